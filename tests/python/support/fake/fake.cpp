// A fake accelerator for tests: torch's PrivateUse1 device, on the CPU.
//
// What makes it a test instrument:
// - Its memory cannot be touched by the host. One file in memory is mapped twice: at the addresses that tensors have,
//   where every access is a fault, and at others, which only this file uses.
// - Copies and operations run on queues, one thread for each stream, with random delays before each piece of work. So
//   work on two streams is ordered by events alone, and a wait that is missing shows in the numbers.
// - Freed memory is filled with NaN in the order of its stream and given to the next that asks on that stream, so what
//   uses memory that it has given back shows too.
//
// An operation is queued where its results are known beforehand: it writes into its arguments, or torch can tell the
// shapes of its results. All others wait for the current stream and run at once.

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr size_t kArena = size_t{4} << 30;
constexpr size_t kAlign = 512;
constexpr size_t kStreams = 512;

// ---- What tests set ----

std::atomic<int64_t> longest_us{0};
std::atomic<uint64_t> seed{0};
std::atomic<int64_t> capacity{int64_t{2} << 30};
std::atomic<int64_t> waits{0};
std::atomic<int64_t> ignored_wait{-1};
std::atomic<bool> has_streams{true};
std::atomic<bool> has_pinned{true};

// ---- Queues ----

using Clock = std::chrono::steady_clock;

// A point in a queue.
struct Mark {
  std::mutex mutex;
  std::condition_variable reached;
  bool done = false;
  std::string error;
  Clock::time_point time;

  void wait() {
    std::unique_lock lock(mutex);
    reached.wait(lock, [&] { return done; });
  }
  bool query() {
    std::lock_guard lock(mutex);
    return done;
  }
};

class Queue {
 public:
  explicit Queue(int64_t id) : random_(static_cast<uint64_t>(id) * 7919 + seed.load()) {
    std::thread([this] { work(); }).detach();
  }

  void put(std::function<void()> task, bool is_quick = false) {
    std::lock_guard lock(mutex_);
    tasks_.push_back({std::move(task), is_quick});
    ++given_;
    changed_.notify_all();
  }

  // Runs when all that was given has run, also after a failure.
  std::shared_ptr<Mark> mark() {
    auto mark = std::make_shared<Mark>();
    std::lock_guard lock(mutex_);
    tasks_.push_back({nullptr, true, mark, false});
    ++given_;
    changed_.notify_all();
    return mark;
  }

  void wait_for(std::shared_ptr<Mark> mark) {
    std::lock_guard lock(mutex_);
    tasks_.push_back({nullptr, true, std::move(mark), true});
    ++given_;
    changed_.notify_all();
  }

  void settle() {
    std::unique_lock lock(mutex_);
    const auto end = given_;
    changed_.wait(lock, [&] { return ended_ >= end; });
  }

  void synchronize() {
    settle();
    std::lock_guard lock(mutex_);
    TORCH_CHECK(error_.empty(), "a fake stream failed: ", error_);
  }

  void forget() {
    settle();
    std::lock_guard lock(mutex_);
    error_.clear();
  }

  bool is_idle() {
    std::lock_guard lock(mutex_);
    return ended_ == given_;
  }

 private:
  struct Task {
    std::function<void()> run;
    bool is_quick = false;
    std::shared_ptr<Mark> mark;
    bool waits = false;
  };

  void run(Task& task) {
    if (task.mark && task.waits) {
      task.mark->wait();
      if (error_.empty()) error_ = task.mark->error;
    } else if (task.mark) {
      std::lock_guard lock(task.mark->mutex);
      task.mark->error = error_;
      task.mark->time = Clock::now();
      task.mark->done = true;
      task.mark->reached.notify_all();
    } else if (error_.empty()) {
      const auto longest = longest_us.load();
      if (!task.is_quick && longest > 0 && random_() % 3 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % longest));
      }
      try {
        task.run();
      } catch (const c10::Error& failure) {
        error_ = failure.what_without_backtrace();
      } catch (const std::exception& failure) {
        error_ = failure.what();
      }
    }
  }

  void work() {
    at::AutoDispatchBelowAutograd below;
    // A kernel that is cut for several threads rounds the ends of each part its own way.
    at::set_num_threads(1);
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      run(task);
      task = {};
      lock.lock();
      ++ended_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t given_ = 0;
  uint64_t ended_ = 0;
  std::string error_;
  std::minstd_rand random_;
};

// Never freed: their threads live as long as the process.
struct Queues {
  std::mutex mutex;
  std::map<std::pair<int, int64_t>, Queue*> by_id;
  int64_t next[kDevices] = {1, 1};

  Queue& at(int device, int64_t id) {
    std::lock_guard lock(mutex);
    auto& queue = by_id[{device, id}];
    if (!queue) queue = new Queue(id);
    return *queue;
  }
  int64_t fresh(int device) {
    std::lock_guard lock(mutex);
    return 1 + (next[device]++ - 1) % kStreams;
  }
  std::vector<Queue*> all(int device) {
    std::lock_guard lock(mutex);
    std::vector<Queue*> found;
    for (auto& [key, queue] : by_id) {
      if (device < 0 || key.first == device) found.push_back(queue);
    }
    return found;
  }
};

Queues& queues() {
  static auto* queues = new Queues;
  return *queues;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local int64_t current_stream[kDevices] = {0, 0};

Queue& current_queue(int device) {
  return queues().at(device, current_stream[device]);
}

// Also of streams that failed.
void drain(int device) {
  for (auto* queue : queues().all(device)) queue->settle();
}

// ---- Memory ----

struct Arena {
  char* host = nullptr;    // what tensors have; a touch is a fault
  char* inside = nullptr;  // the same bytes

  Arena() {
    const int file = memfd_create("fake", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArena) == 0, "no memory for the fake device");
    host = static_cast<char*>(mmap(nullptr, kArena, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0));
    inside = static_cast<char*>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    TORCH_CHECK(host != MAP_FAILED && inside != MAP_FAILED, "no addresses for the fake device");
    close(file);
  }
};

Arena& arena() {
  static auto* arena = new Arena;
  return *arena;
}

char* inside(const void* address) {
  if (!address) return nullptr;
  const auto* at = static_cast<const char*>(address);
  TORCH_CHECK(at >= arena().host && at < arena().host + kArena, "not memory of the fake device: ", address);
  return arena().inside + (at - arena().host);
}

struct Block {
  size_t bytes;
  int device;
  int64_t stream;
};

struct FakeAllocator final : c10::DeviceAllocator {
  std::mutex mutex;
  std::map<char*, Block> used;
  std::map<std::tuple<int, int64_t, size_t>, std::vector<char*>> kept;  // by device, stream and bytes
  std::map<char*, size_t> free_ranges;
  c10::CachingDeviceAllocator::DeviceStats stats[kDevices];

  FakeAllocator() {
    free_ranges[arena().host] = kArena;
  }

  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kFake, current_device);
    if (bytes == 0) return {nullptr, nullptr, &discard, device};
    const auto size = (bytes + kAlign - 1) / kAlign * kAlign;
    auto* at = take(size);
    if (!at) {
      emptyCache();
      at = take(size);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, at, "the fake device is out of memory: ", bytes, " bytes requested");
    return {at, at, &discard, device};
  }

  char* take(size_t size) {
    std::lock_guard lock(mutex);
    const int device = current_device;
    const auto stream = current_stream[device];
    auto& stat = stats[device].allocated_bytes[0];
    if (stat.current + static_cast<int64_t>(size) > capacity.load()) return nullptr;
    char* at = nullptr;
    if (auto& list = kept[{device, stream, size}]; !list.empty()) {
      at = list.back();
      list.pop_back();
    } else {
      for (auto& [start, length] : free_ranges) {
        if (length < size) continue;
        at = start;
        const auto rest = length - size;
        free_ranges.erase(start);
        if (rest) free_ranges[at + size] = rest;
        break;
      }
    }
    if (at) {
      used[at] = {size, device, stream};
      stat.increase(size);
    }
    return at;
  }

  void give(char* at) {
    std::lock_guard lock(mutex);
    const auto block = used.at(at);
    used.erase(at);
    stats[block.device].allocated_bytes[0].decrease(block.bytes);
    kept[{block.device, block.stream, block.bytes}].push_back(at);
    auto* bytes = inside(at);
    const auto size = block.bytes;
    queues().at(block.device, block.stream).put([=] { memset(bytes, 0xff, size); }, true);
  }

  static void discard(void* address) {
    if (address) self().give(static_cast<char*>(address));
  }

  static FakeAllocator& self() {
    static auto* allocator = new FakeAllocator;
    return *allocator;
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &discard;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    drain(-1);
    memcpy(inside(to), inside(from), bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    drain(-1);
    std::lock_guard lock(mutex);
    for (auto& [key, list] : kept) {
      for (auto* at : list) free_ranges[at] = std::get<2>(key);
    }
    kept.clear();
    for (auto it = free_ranges.begin(); it != free_ranges.end();) {
      auto next = std::next(it);
      if (next != free_ranges.end() && it->first + it->second == next->first) {
        it->second += next->second;
        free_ranges.erase(next);
      } else {
        ++it;
      }
    }
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {
    TORCH_CHECK(false, "the fake device has no record_stream");
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex);
    return stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex);
    stats[device].allocated_bytes[0].reset_peak();
  }
};

// Page-locked memory: ordinary memory that is known by its address. It is freed when the device is idle.
struct PinnedAllocator final : c10::Allocator {
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::map<char*, size_t>& blocks() {
    static auto* blocks = new std::map<char*, size_t>;
    return *blocks;
  }
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(has_pinned, "the fake device has no page-locked memory");
    auto* at = static_cast<char*>(c10::alloc_cpu(std::max<size_t>(bytes, 1)));
    std::lock_guard lock(mutex());
    blocks()[at] = bytes;
    return {at, at, &discard, c10::kCPU};
  }
  static void discard(void* address) {
    drain(-1);
    {
      std::lock_guard lock(mutex());
      blocks().erase(static_cast<char*>(address));
    }
    c10::free_cpu(address);
  }
  static bool knows(const void* address) {
    std::lock_guard lock(mutex());
    auto* at = static_cast<char*>(const_cast<void*>(address));
    auto next = blocks().upper_bound(at);
    return next != blocks().begin() && at < std::prev(next)->first + std::prev(next)->second;
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &discard;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
};

// ---- Streams, events and devices ----

struct Event {
  std::shared_ptr<Mark> mark;
  bool is_timed;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kFake;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kFake, current_device};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there are ", int(kDevices), " fake devices, not ", device);
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::DeviceIndex index(c10::Device device) const {
    return device.index() < 0 ? current_device : device.index();
  }
  c10::Stream stream(c10::DeviceIndex device, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, device), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(index(device), current_stream[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(index(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    TORCH_CHECK(has_streams, "the fake device has no streams");
    return stream(index(device), queues().fresh(index(device)));
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = getStream(next.device());
    current_stream[next.device_index()] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  Queue& queue(const c10::Stream& stream) const {
    return queues().at(stream.device_index(), stream.id());
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag)
      const override {
    if (!*event) *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
    static_cast<Event*>(*event)->mark = queue(stream).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && waits++ != ignored_wait) queue(stream).wait_for(static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    return !event || static_cast<Event*>(event)->mark->query();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return queue(stream).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    queue(stream).synchronize();
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto mark = static_cast<Event*>(event)->mark;
    mark->wait();
    TORCH_CHECK(mark->error.empty(), "a fake stream failed: ", mark->error);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (auto* queue : queues().all(device)) queue->synchronize();
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    auto *from = static_cast<Event*>(begin), *to = static_cast<Event*>(end);
    TORCH_CHECK(from && to && from->is_timed && to->is_timed, "a fake event has no time");
    TORCH_CHECK(from->mark->query() && to->mark->query(), "a fake event was not reached");
    return std::chrono::duration<double, std::milli>(to->mark->time - from->mark->time).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current_device = device;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  bool isPinnedPtr(const void* address) const override {
    return PinnedAllocator::knows(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* allocator = new PinnedAllocator;
    return allocator;
  }
  c10::Device getDeviceFromPtr(void* address) const override {
    std::lock_guard lock(FakeAllocator::self().mutex);
    auto& used = FakeAllocator::self().used;
    auto next = used.upper_bound(static_cast<char*>(address));
    TORCH_CHECK(next != used.begin(), "not memory of the fake device");
    return {kFake, static_cast<c10::DeviceIndex>(std::prev(next)->second.device)};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    auto data = bytes ? FakeAllocator::self().allocate(bytes) : at::DataPtr(nullptr, impl->device());
    if (const auto kept = std::min(bytes, storage.nbytes()); kept) {
      auto *from = inside(storage.data()), *to = inside(data.get());
      current_queue(impl->device().index()).put([=] { memcpy(to, from, kept); });
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};

// ---- Operations ----

bool is_fake(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kFake;
}

// The same bytes as a tensor of the CPU, for work on a queue. It does not keep the memory: as on real devices, memory
// that was given back is used again in the order of its stream.
at::Tensor seen(const at::Tensor& tensor) {
  auto* data = is_fake(tensor) ? inside(tensor.const_data_ptr()) : const_cast<void*>(tensor.const_data_ptr());
  auto view = at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &FakeAllocator::self(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &FakeAllocator::self(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
      format);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const auto device = is_fake(to) ? to.device() : self.device();
  auto& queue = current_queue(device.index());
  auto source = seen(self), target = seen(to);
  queue.put([source, target]() mutable { target.copy_(source); });
  const auto& host = is_fake(self) ? to : self;
  const bool on_host = !is_fake(self) || !is_fake(to);
  // As on CUDA: ordinary memory of the host is done with when the call returns.
  if (on_host && (!non_blocking || !PinnedAllocator::knows(host.const_data_ptr()))) queue.synchronize();
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) const_cast<at::Tensor&>(to).resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data() != nullptr && (!stride.empty() || size.empty())) {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  impl->set_sizes_contiguous(size);
  return self;
}

// Every tensor in a value, also in lists.
template <class F>
c10::IValue mapped(const c10::IValue& value, F&& each) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(each(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(each(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(each(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

at::Tensor shape_of(const at::Tensor& tensor) {
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

// What torch says that an operation gives for such shapes; none where it cannot say.
std::optional<torch::jit::Stack> tried(const c10::OperatorHandle& op, torch::jit::Stack shapes) {
  for (auto& shape : shapes) {
    if (shape.isDevice()) shape = c10::Device(c10::kMeta);
  }
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &shapes);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return shapes;
}

// Whether outputs that the caller gave have the right size already.
bool outputs_fit(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  torch::jit::Stack shapes;
  std::vector<std::pair<at::Tensor, at::Tensor>> outputs;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_out = op.schema().arguments()[i].is_out();
    shapes.push_back(mapped(arguments[i], [&](const at::Tensor& tensor) {
      auto shape = shape_of(tensor);
      if (is_out) outputs.emplace_back(tensor, shape);
      return shape;
    }));
  }
  return tried(op, shapes) && std::all_of(outputs.begin(), outputs.end(), [](const auto& output) {
    return output.first.sizes() == output.second.sizes();
  });
}

// Results of an operation that only reads; none where torch does not know their shapes.
std::optional<std::vector<c10::IValue>> results(
    const c10::OperatorHandle& op,
    const std::vector<c10::IValue>& arguments,
    c10::Device device) {
  for (const auto& result : op.schema().returns()) {
    if (result.alias_info() || result.type()->kind() != c10::TypeKind::TensorType) return std::nullopt;
  }
  torch::jit::Stack shapes;
  for (const auto& argument : arguments) shapes.push_back(mapped(argument, shape_of));
  const auto answer = tried(op, shapes);
  if (!answer) return std::nullopt;
  std::vector<c10::IValue> found;
  for (const auto& value : *answer) {
    const auto shape = value.toTensor();
    found.push_back(
        shape.defined()
            ? c10::IValue(empty_strided(shape.sizes(), shape.strides(), shape.scalar_type(), {}, device, {}))
            : value);
  }
  return found;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const std::vector<c10::IValue> arguments(stack->end() - count, stack->end());
  std::optional<c10::Device> device;
  bool is_plain = true, has_out = false;
  size_t writes = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto& kind = schema.arguments()[i];
    const bool written = kind.alias_info() && kind.alias_info()->isWrite();
    writes += written;
    is_plain &= !arguments[i].isGenerator() && kind.type()->str().find("Generator") == std::string::npos;
    has_out |= kind.is_out();
    mapped(arguments[i], [&](const at::Tensor& tensor) {
      if (is_fake(tensor)) {
        device = tensor.device();
        is_plain &= tensor.layout() == c10::kStrided;
      } else {
        is_plain &= tensor.dim() == 0 && tensor.device().is_cpu();
      }
      return tensor;
    });
  }
  is_plain &= device.has_value() && (!has_out || outputs_fit(op, arguments));
  bool in_place = writes > 0;
  for (const auto& result : schema.returns()) in_place &= result.alias_info() && result.alias_info()->isWrite();
  std::optional<std::vector<c10::IValue>> made;
  if (is_plain && !writes) made = results(op, arguments, *device);
  if (!is_plain || (writes && !in_place) || (!writes && !made)) {
    // Copies to the CPU and back, on the current stream, each waited for.
    at::native::cpu_fallback(op, stack);
    return;
  }
  torch::jit::Stack inner;
  for (const auto& argument : arguments) {
    inner.push_back(argument.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : mapped(argument, [](const at::Tensor& tensor) {
      // A number's value is read when the work is submitted, as a launch does. The copy has no owner in Python.
      return is_fake(tensor) ? seen(tensor) : tensor.clone();
    }));
  }
  std::vector<at::Tensor> outputs;
  if (made) {
    for (const auto& value : *made) outputs.push_back(value.toTensor().defined() ? seen(value.toTensor()) : at::Tensor());
  }
  current_queue(device->index()).put([op, inner, outputs]() mutable {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &inner);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].defined()) outputs[i].copy_(inner[i].toTensor());
    }
  });
  std::vector<c10::IValue> answer;
  if (made) {
    answer = *made;
  } else {
    for (size_t i = 0; i < count && answer.size() < schema.returns().size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias && alias->isWrite()) answer.push_back(arguments[i]);
    }
  }
  stack->erase(stack->end() - count, stack->end());
  stack->insert(stack->end(), answer.begin(), answer.end());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
}

struct Registration {
  Registration() {
    c10::SetAllocator(kFake, &FakeAllocator::self());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  }
} registration;

}  // namespace

// ---- For fake/__init__.py, through ctypes ----

extern "C" {

void fake_delays(int64_t us, uint64_t start) {
  longest_us = us;
  seed = start;
}

void fake_capacity(int64_t bytes) {
  capacity = bytes;
}

void fake_has(bool streams, bool pinned) {
  has_streams = streams;
  has_pinned = pinned;
}

int64_t fake_waits(int64_t ignored) {
  ignored_wait = ignored;
  return waits.exchange(0);
}

void fake_sleep(int64_t ns) {
  current_queue(current_device).put([=] { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); }, true);
}

void fake_trap() {
  current_queue(current_device).put([] { throw std::runtime_error("a trap was run"); }, true);
}

void fake_repair() {
  for (auto* queue : queues().all(-1)) queue->forget();
}

int32_t fake_current_device() {
  return current_device;
}

void fake_set_device(int32_t device) {
  current_device = device;
}

}  // extern "C"
