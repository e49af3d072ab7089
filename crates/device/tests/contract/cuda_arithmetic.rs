//! Each rule's CUDA file against the rule's own arithmetic, without a GPU: a C++ compiler makes a program of it in which
//! every intrinsic is the plain operation and threads run one after another; those of a warp take turns where they do
//! something together. How blocks run together and how a launch passes its structs needs a GPU to be tested.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use forebay_device::kernel::uniform_element;
use forebay_device::update::{MAX_COLUMNS, MAX_SCALARS};
use forebay_device::{Dtype, MasterFormat, Rule, StateFormat};

use crate::masters;
use crate::segments::{DTYPES, FORMATS, Problem, Shape, dtype_pairs, plausible};
use crate::written::{groups, rules};

/// With an argument it reads records from standard input and writes weight and columns of each to standard output. Without
/// one it reads what `Problem::to_bytes` gives, runs the kernel, and writes the images and the flag.
const PROGRAM: &str = r#"
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#define __device__
#define __global__
#define __launch_bounds__(threads)
#define __grid_constant__
// The conversions of f16 are assembly in the kernels, both from x to y.
#define asm(...) convert(x, y)
static unsigned bits_of(float x) { unsigned bits; __builtin_memcpy(&bits, &x, 4); return bits; }
static float float_of(unsigned bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
static float from_f16(unsigned short half) {
    unsigned sign = unsigned(half & 0x8000) << 16, size = half & 0x7fff;
    if (size >= 0x7c00) return float_of(sign | size << 13 | 0x7f800000 | (size > 0x7c00 ? 0x400000 : 0));
    if (size < 0x400) return float_of(sign | bits_of(float(size) * float_of(103u << 23)));
    return float_of(sign | ((size << 13) + (112u << 23)));
}
static unsigned short to_f16(float x) {
    unsigned bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (x != x) return 0x7fff;
    if (size >= 0x47800000) return sign | 0x7c00;
    if (size < 0x38800000) return sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000);
    return sign | (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
}
template <class X, class Y> void convert(X x, Y& y) {
    if constexpr (sizeof(X) == 2) y = from_f16(x.bits);
    else y.bits = to_f16(x);
}
static float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __frcp_rn(float a) { return 1.0f / a; }
static float __fsqrt_rn(float a) { return std::sqrt(a); }
static float __uint_as_float(unsigned bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned bits; __builtin_memcpy(&bits, &x, 4); return bits; }
static struct { unsigned x; } blockIdx, threadIdx;
// A lane of a warp runs until it ends or gives a number to its warp. All lanes have to give theirs before any goes on.
static struct Lane { ucontext_t context; alignas(16) char stack[1 << 16]; unsigned mask, number; bool waits, ended; } lanes[32];
static ucontext_t warp;
static unsigned lane;
static unsigned __reduce_max_sync(unsigned mask, unsigned number) {
    Lane& own = lanes[lane];
    own.mask = mask, own.number = number, own.waits = true;
    swapcontext(&own.context, &warp);
    return own.number;
}
static void (*run_lane)();
static void start_lane() { run_lane(); lanes[lane].ended = true; }
static void run_warp() {
    for (lane = 0; lane < 32; lane++) {
        Lane& own = lanes[lane];
        getcontext(&own.context);
        own.context.uc_stack.ss_sp = own.stack, own.context.uc_stack.ss_size = sizeof own.stack, own.context.uc_link = &warp;
        makecontext(&own.context, start_lane, 0);
        own.ended = false;
    }
    unsigned first = threadIdx.x;
    for (bool together = true; together;) {
        unsigned waiting = 0, ended = 0, numbers[32];
        for (lane = 0; lane < 32; lane++) {
            if (!lanes[lane].ended) {
                lanes[lane].waits = false, threadIdx.x = first + lane;
                swapcontext(&warp, &lanes[lane].context);
            }
            waiting += lanes[lane].waits && !lanes[lane].ended, ended += lanes[lane].ended;
        }
        // On a GPU the others would wait for ever.
        if (waiting != 0 && waiting != 32) std::fprintf(stderr, "%u lanes wait and %u have ended\n", waiting, ended), std::exit(3);
        for (unsigned i = 0; i < 32; i++) {
            numbers[i] = 0;
            for (unsigned j = 0; j < 32; j++)
                if (lanes[i].mask >> j & 1 && lanes[j].number > numbers[i]) numbers[i] = lanes[j].number;
        }
        for (unsigned i = 0; i < 32; i++) lanes[i].number = numbers[i];
        together = waiting == 32;
    }
}
#include "compact.cuh"
#include "packed.cuh"
#undef UPDATE_KERNELS
#define UPDATE_KERNELS(name, Rule) using Written = Rule;
#include RULE_FILE
template <class T> static void get(T* to, size_t count) { if (std::fread(to, sizeof(T), count, stdin) != count) std::exit(2); }
template <class T> static void put(const T* from, size_t count) { std::fwrite(from, sizeof(T), count, stdout); }
static void describe(Segment& seg, const u64* at, const u32* numbers, u32 blocks) {
    seg = {at[0], at[1], {at[2], at[3], at[4]}, at[5], numbers[0], blocks, numbers[1], numbers[2]};
}
static void describe(CompactSegment& seg, const u64* at, const u32* numbers, u32 blocks) {
    seg = {at[0], at[1], {at[2], at[3], at[4]}, at[6], at[7], numbers[0], blocks, numbers[1], numbers[2]};
}
static void describe(PackedSegment& seg, const u64* at, const u32* numbers, u32 blocks) {
    u64 master = at[5] ? at[5] : at[6];
    seg = {at[0], at[1], {at[2], at[3], at[4]}, {at[8], at[9], at[10]}, master, at[7], numbers[0], blocks, numbers[1], numbers[2],
           {numbers[4], numbers[5], numbers[6]}, numbers[3]};
}
static void trust(PackedUpdate& step, u32 trusts) { step.trust_master = trusts; }
static void trust(Update& step, u32 trusts) { step.trust_master = trusts; }
static void trust(CompactUpdate&, u32) {}
template <class Step> static void kernel(const u32* head, void (*const* kernels)(const Step&)) {
    u32 flag = 0xdead;
    float values[2];
    u64 bytes[11];
    char* images[11];
    get(values, 2), get(bytes, 11);
    for (int i = 0; i < 11; i++) get(images[i] = (char*)std::aligned_alloc(256, (bytes[i] + 256) & ~255ull), bytes[i]);
    static Step step;
    step.segments = head[2], trust(step, head[4]);
    step.followed = head[5] ? u64(&flag) : 0;
    step.grad_scale = head[6] ? u64(&values[0]) : 0, step.skip = head[7] ? u64(&values[1]) : 0;
    get(step.scalars, head[3]);
    u32 blocks = 0;
    for (u32 i = 0; i < head[2]; i++) {
        u64 starts[11], at[11];
        u32 numbers[7];
        get(starts, 11), get(numbers, 7);
        for (int j = 0; j < 11; j++) at[j] = starts[j] == ~0ull ? 0 : u64(images[j]) + starts[j];
        describe(step.segment[i], at, numbers, blocks);
        blocks += (numbers[0] + BLOCK_ELEMENTS - 1) / BLOCK_ELEMENTS;
    }
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (u32 first = 0; first < THREADS; first += 32) {
            static const Step* all = &step;
            static void (*kernel)(const Step&);
            kernel = *kernels, threadIdx.x = first;
            run_lane = [] { kernel(*all); };
            run_warp();
        }
    for (int i = 0; i < 11; i++) put(images[i], bytes[i]);
    put(&flag, 1);
}
static void kernel() {
    static void (*const plain[9])(const Update&) = {
        update_segments<Written, float, float>, update_segments<Written, float, Bf16>, update_segments<Written, float, F16>,
        update_segments<Written, Bf16, float>, update_segments<Written, Bf16, Bf16>, update_segments<Written, Bf16, F16>,
        update_segments<Written, F16, float>, update_segments<Written, F16, Bf16>, update_segments<Written, F16, F16>,
    };
    static void (*const compact[3])(const CompactUpdate&) = {
        update_compact<Written, float>, update_compact<Written, Bf16>, update_compact<Written, F16>,
    };
    static void (*const packed[1])(const PackedUpdate&) = {update_packed<Written>};
    u32 head[9];
    get(head, 9);
    if (head[8] == 2) kernel(head, packed);
    else if (head[8]) kernel(head, &compact[head[1]]);
    else kernel(head, &plain[3 * head[0] + head[1]]);
}
struct Record { float weight, grad, state[MAX_COLUMNS]; u32 kept, position; Scalars scalars; };
int main(int arguments, char**) {
    if (arguments == 1) return kernel(), 0;
    Record r;
    while (std::fread(&r, sizeof r, 1, stdin) == 1) {
        Written::update(r.weight, r.grad, r.state, r.kept, r.scalars, r.position);
        std::fwrite(&r.weight, 4, 1, stdout);
        std::fwrite(r.state, sizeof r.state, 1, stdout);
    }
}
"#;

/// Reads a type, the sizes of pairs, their weights and their masters; compares, rounds, and writes the flag and the weights.
const MASTERS: &str = r#"
#include <initializer_list>
#include "masters.cu"
template <class T> static void get(T* to, size_t count) { if (std::fread(to, sizeof(T), count, stdin) != count) std::exit(2); }
int main() {
    static void (*const compare[3])(const Masters) = {compare_f32, compare_bf16, compare_f16};
    static void (*const round[3])(const Masters) = {round_f32, round_bf16, round_f16};
    u32 head[2], blocks = 0;
    float flag = 7;
    static Masters of;
    get(head, 2);
    u32 width = head[0] == 0 ? 4 : 2;
    of.differ = u64(&flag), of.pairs = head[1];
    for (u32 i = 0; i < head[1]; i++) {
        u32 elements;
        get(&elements, 1);
        char *weight = (char*)std::calloc(elements + 1, width), *master = (char*)std::calloc(elements + 1, 4);
        get(weight, elements * width), get(master, elements * 4);
        of.pair[i] = {u64(weight), u64(master), elements, blocks};
        blocks += (elements + BLOCK_ELEMENTS - 1) / BLOCK_ELEMENTS;
    }
    for (auto kernel : {compare[head[0]], round[head[0]]})
        for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
            for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++) kernel(of);
    std::fwrite(&flag, 4, 1, stdout);
    for (u32 i = 0; i < head[1]; i++) std::fwrite((char*)of.pair[i].weight, width, of.pair[i].elements, stdout);
}
"#;

/// The results of one element: weight and columns.
type Results = [f32; 1 + MAX_COLUMNS];

fn bits(results: Results) -> [u32; 1 + MAX_COLUMNS] {
    // The payload of a NaN is free.
    results.map(|value| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() })
}

/// Where the kernels are, and a new folder; `None` where there is no compiler or no source.
fn folders(name: &str) -> Option<(PathBuf, PathBuf)> {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/kernels");
    if !kernels.is_dir() || Command::new("c++").arg("--version").output().is_err() {
        eprintln!("not tested: there is no C++ compiler here, or not the source");
        return None;
    }
    let folder = std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    Some((kernels, folder))
}

/// Makes a program of a text.
fn build(kernels: &Path, folder: &Path, name: &str, text: &str) -> PathBuf {
    let (source, program) = (folder.join(format!("{name}.cpp")), folder.join(name));
    std::fs::write(&source, text).unwrap();
    let compiled = Command::new("c++")
        .args(["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing"])
        // A GPU refuses vectors at addresses that are not multiples of them; this ends the program there.
        .args(["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-I"])
        .args([kernels, &source])
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    program
}

/// Makes a program of each rule's file in a folder; `None` where there is no compiler or no source.
fn compile(name: &str) -> Option<(PathBuf, Vec<(&'static Rule, PathBuf)>)> {
    let (kernels, folder) = folders(name)?;
    let text = |rule: &Rule| format!("#define RULE_FILE \"{}.cu\"\n{PROGRAM}", rule.name);
    let programs = rules().map(|rule| (rule, build(&kernels, &folder, rule.name, &text(rule)))).collect();
    Some((folder, programs))
}

/// What a program writes when it reads this.
fn run(command: &mut Command, input: Vec<u8>) -> Vec<u8> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut standard_input = child.stdin.take().unwrap();
    // From a thread: the program may write before it has read everything.
    let writer = std::thread::spawn(move || standard_input.write_all(&input).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    output.stdout
}

#[test]
fn cuda_files_have_the_arithmetic_of_their_rules() {
    let Some((folder, programs)) = compile("cuda-arithmetic") else { return };
    for (rule, program) in programs {
        let (mut records, mut expected) = (Vec::new(), Vec::new());
        for (number, group) in groups(rule).iter().enumerate() {
            let s = group.scalars();
            // Across the borders of blocks of 512, in which Adam rounds differently.
            for position in (0..4096u32).step_by(61).chain(500..530) {
                let pick = |operand: u64, low, high| {
                    uniform_element(100 * number as u64 + operand, u64::from(position), low, high)
                };
                let weight = pick(0, -2.0, 2.0);
                // Every other gradient cancels most of the decay, so that its last bits show.
                let grad = if position % 2 == 0 { pick(1, -1.0, 1.0) } else { weight * -0.13 * pick(1, 0.999, 1.001) };
                let mut state = [pick(2, -0.3, 0.3), pick(3, 0.0, 0.1), pick(4, 0.0, 0.1)];
                for (column, value) in state.iter_mut().enumerate() {
                    *value *= f32::from(u8::from(group.kept & 1 << column != 0));
                }
                [weight, grad].iter().chain(&state).for_each(|value| records.extend(value.to_ne_bytes()));
                [group.kept, position].iter().for_each(|number| records.extend(number.to_ne_bytes()));
                s.values.iter().for_each(|value| records.extend(value.to_ne_bytes()));
                [s.flags, 0].iter().for_each(|number| records.extend(number.to_ne_bytes()));
                let new = (rule.element)(weight, grad, &mut state, group.kept, &s, u64::from(position));
                expected.push((group.kept, [new, state[0], state[1], state[2]]));
            }
        }
        let output = run(Command::new(&program).arg("records"), records);
        let found = output.chunks_exact(size_of::<Results>()).map(|record| {
            let value = |i: usize| f32::from_ne_bytes(record[4 * i..4 * i + 4].try_into().unwrap());
            std::array::from_fn(value)
        });
        let found: Vec<Results> = found.collect();
        assert_eq!(found.len(), expected.len(), "{rule:?}");
        for (i, (found, (kept, expected))) in found.into_iter().zip(expected).enumerate() {
            // Columns that are not there have no value.
            let there = |results: Results| {
                std::array::from_fn(|i| if i == 0 || kept & 1 << (i - 1) != 0 { results[i] } else { 0.0 })
            };
            assert_eq!(bits(there(found)), bits(there(expected)), "{rule:?}, record {i}: {found:?} and {expected:?}");
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(MAX_SCALARS, 8, "the record above has room for these");
}

/// What a flag holds before a launch.
const UNTOUCHED: u32 = 0xdead;

/// Everything around the arithmetic, for every rule and pair of types: scale and skip, masters that follow or are trusted,
/// and the flag that tells of those that gave way.
#[test]
fn cuda_files_do_with_masters_what_rules_do() {
    let Some((folder, programs)) = compile("cuda-masters") else { return };
    for (rule, program) in programs {
        let groups = groups(rule);
        for (pair, (weight, grad)) in dtype_pairs().enumerate() {
            let of_pair: Vec<_> = groups.iter().cycle().skip(4 * pair).take(4).collect();
            let shape = |i: usize| Shape {
                weight,
                grad,
                master: (i % 3 != 1).into(),
                first: 700 * i as u64,
                scalars: (i % 4) as u32,
                shifted: i % 4 > 1,
                ..Shape::plain([5, 4099, 64, 8192, 1, 300][i % 6], of_pair[i % 4].kept)
            };
            let scalars: Vec<_> = of_pair.iter().map(|group| group.scalars()).collect();
            let some_follow = Problem::new(rule, &scalars, &(0..12).map(shape).collect::<Vec<_>>(), plausible);
            let mut none_follows = some_follow.clone();
            none_follows.set_weights(|_, master| master);
            let mut nonsense = some_follow.clone().trusting();
            nonsense.set_weights(|_, _| f32::NAN);
            // One of the four elements that a thread takes together, or the one that is left over.
            let mut one_follows = none_follows.clone();
            one_follows.set_weight(0, pair % 5, 1.5);
            let trusting = some_follow.clone().trusting();
            for problem in [some_follow, none_follows, one_follows, trusting, nonsense] {
                for (scale, has_flag, skip) in
                    [(None, true, None), (Some(0.37), false, Some(0.0)), (None, true, Some(1.0))]
                {
                    let found = run(&mut Command::new(&program), problem.to_bytes(scale, skip, has_flag));
                    let (mut after, mut gave_way) = (problem.clone(), false);
                    if skip != Some(1.0) {
                        gave_way = after.step(scale.unwrap_or(1.0));
                    }
                    let (images, flag) = found.split_at(found.len() - 4);
                    let what =
                        || format!("{rule:?}, {weight:?} with {grad:?} gradients, {scale:?} {has_flag} {skip:?}");
                    assert!(after.has_images(images), "{}", what());
                    let expected = if gave_way && has_flag { 1 } else { UNTOUCHED };
                    assert_eq!(u32::from_ne_bytes(flag.try_into().unwrap()), expected, "{}", what());
                }
            }
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Comparing weights with their masters and writing them anew, for every type.
#[test]
fn cuda_files_compare_and_round_masters_as_rules_do() {
    let Some((kernels, folder)) = folders("cuda-compare") else { return };
    let (prelude, _) = PROGRAM.split_once("// A lane of a warp").unwrap();
    let program = build(&kernels, &folder, "masters", &format!("{prelude}{MASTERS}"));
    for (number, dtype) in masters::DTYPES.into_iter().enumerate() {
        for changed in [None, Some((0, 0)), Some((2, 4096)), Some((3, 69))] {
            let sizes = [5usize, 4096, 4097, 70];
            let mut input = [number as u32, sizes.len() as u32].map(u32::to_ne_bytes).concat();
            let mut expected = Vec::new();
            for (pair, elements) in sizes.into_iter().enumerate() {
                let values = masters::masters(pair as u64, elements);
                let weights = masters::rounded(dtype, &values);
                let mut given = weights.clone();
                if let Some((_, at)) = changed.filter(|&(of, _)| of == pair) {
                    given[at * dtype.bytes() as usize] ^= 1;
                }
                input.extend((elements as u32).to_ne_bytes());
                input.extend(given);
                input.extend(values.iter().flat_map(|value| value.to_ne_bytes()));
                expected.extend(weights);
            }
            let found = run(&mut Command::new(&program), input);
            let (flag, weights) = found.split_at(4);
            let told = f32::from_ne_bytes(flag.try_into().unwrap());
            assert_eq!(told, if changed.is_some() { 1.0 } else { 7.0 }, "{dtype:?} {changed:?}");
            assert!(weights == expected, "{dtype:?} {changed:?}");
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// The same for compact masters: pairs that are masters of their weights and others, ties, aligned memory and other,
/// and a last byte of carries that is not full.
#[test]
fn cuda_files_do_with_compact_masters_what_rules_do() {
    let Some((folder, programs)) = compile("cuda-compact") else { return };
    for (rule, program) in programs {
        let groups = groups(rule);
        for (pair, grad) in DTYPES.into_iter().enumerate() {
            let of_pair: Vec<_> = groups.iter().cycle().skip(4 * pair).take(4).collect();
            let shape = |i: usize| Shape {
                weight: Dtype::Bf16,
                grad,
                master: MasterFormat::Compact,
                first: 700 * i as u64,
                scalars: (i % 4) as u32,
                shifted: i % 4 > 1,
                ..Shape::plain([5, 4099, 64, 8192, 1, 300][i % 6], of_pair[i % 4].kept)
            };
            let scalars: Vec<_> = of_pair.iter().map(|group| group.scalars()).collect();
            let all_hold = Problem::new(rule, &scalars, &(0..12).map(shape).collect::<Vec<_>>(), |segment, i| {
                let [_, rest @ .., master] = plausible(segment, i);
                let master = if i % 5 == 0 { f32::from_bits(master.to_bits() & !0xffff | 0x8000) } else { master };
                [master, rest[0], rest[1], rest[2], rest[3], master]
            });
            // Any halves at all: ties beside odd weights, and carries that do not belong to their half.
            let mut any = all_hold.clone();
            any.set_halves(|segment, i| {
                let pattern = (segment as u32 * 977 + i as u32).wrapping_mul(2_654_435_761);
                ([0x8000, 0x7fff, 0x8001, 0, (pattern >> 16) as u16][i % 5], pattern & 1 != 0)
            });
            let mut one_follows = all_hold.clone();
            one_follows.set_weight(3, 8191, 0.0);
            for problem in [all_hold, any, one_follows] {
                for (scale, has_flag, skip) in
                    [(None, true, None), (Some(0.37), false, Some(0.0)), (None, true, Some(1.0))]
                {
                    let found = run(&mut Command::new(&program), problem.to_bytes(scale, skip, has_flag));
                    let (mut after, mut gave_way) = (problem.clone(), false);
                    if skip != Some(1.0) {
                        gave_way = after.step(scale.unwrap_or(1.0));
                    }
                    let (images, flag) = found.split_at(found.len() - 4);
                    let what = || format!("{rule:?}, {grad:?} gradients, {scale:?} {has_flag} {skip:?}");
                    assert!(after.has_images(images), "{}", what());
                    let expected = if gave_way && has_flag { 1 } else { UNTOUCHED };
                    assert_eq!(u32::from_ne_bytes(flag.try_into().unwrap()), expected, "{}", what());
                }
            }
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// The same for columns in fewer bits: each format and several together, rounded to nearest and at random, all types and
/// kinds of masters, aligned memory and other, last blocks that are not full, and blocks that are not finite.
#[test]
fn cuda_files_do_with_columns_in_fewer_bits_what_rules_do() {
    let Some((folder, programs)) = compile("cuda-packed") else { return };
    for (rule, program) in programs {
        let groups = groups(rule);
        for (turn, formats) in FORMATS[1..].iter().enumerate() {
            let pairs: Vec<_> = dtype_pairs().collect();
            // Groups whose rule keeps nothing have nothing in fewer bits.
            let of_turn: Vec<_> =
                groups.iter().filter(|group| group.kept & 1 != 0).cycle().skip(5 * turn).take(8).collect();
            let shape = |i: usize| {
                let (weight, grad) = pairs[(i + 2 * turn) % pairs.len()];
                let master = match i % 4 {
                    0 => MasterFormat::None,
                    1 if weight == Dtype::Bf16 => MasterFormat::Compact,
                    2 => MasterFormat::Compact,
                    _ => MasterFormat::F32,
                };
                let weight = if master == MasterFormat::Compact { Dtype::Bf16 } else { weight };
                Shape {
                    weight,
                    grad,
                    master,
                    // Beyond 2^32 too.
                    first: 700 * i as u64 + if i.is_multiple_of(5) { (1 << 33) - 1000 } else { 0 },
                    scalars: (i % 8) as u32,
                    shifted: i % 3 == 2,
                    // A column of f32 alone would go to another kernel.
                    formats: if formats.0[0] == StateFormat::F32 { FORMATS[2] } else { *formats },
                    ..Shape::plain([5, 4099, 64, 8192, 1, 300, 255, 257, 4355][i % 9], of_turn[i % 8].kept)
                }
            };
            let scalars: Vec<_> = of_turn.iter().map(|group| group.scalars()).collect();
            let some_follow = Problem::new(rule, &scalars, &(0..18).map(shape).collect::<Vec<_>>(), plausible);
            let mut all_hold = some_follow.clone();
            all_hold.set_weights(|_, master| master);
            let mut one_follows = all_hold.clone();
            one_follows.set_weight(3, 8191, 0.0);
            let not_finite = Problem::new(rule, &scalars, &(0..18).map(shape).collect::<Vec<_>>(), |segment, i| {
                let [weight, grad, mean, square, largest, master] = plausible(segment, i);
                match i {
                    70 => [weight, f32::INFINITY, mean, square, largest, master],
                    600 => [weight, grad, f32::NAN, f32::NAN, f32::NAN, master],
                    1024..1280 => [weight, 0.0, 0.0, 0.0, 0.0, master],
                    // Nearly all of them are nothing beside the largest.
                    1536..1792 => [weight, if i == 1600 { 1e3 } else { 1e-9 }, 0.0, 0.0, 0.0, master],
                    1280..1536 => [weight, 0.0, -1e-39, 1e-39, 1e-39, master],
                    _ => [weight, grad, mean, square, largest, master],
                }
            });
            let trusting = Problem::new(
                rule,
                &scalars,
                &(0..18)
                    .map(shape)
                    .map(|shape| match shape.master {
                        MasterFormat::Compact => Shape { master: MasterFormat::F32, ..shape },
                        _ => shape,
                    })
                    .collect::<Vec<_>>(),
                plausible,
            )
            .trusting();
            for (problem, (scale, has_flag, skip)) in [
                (&some_follow, (None, true, None)),
                (&some_follow, (Some(0.37), false, Some(0.0))),
                (&some_follow, (None, true, Some(1.0))),
                (&all_hold, (None, true, None)),
                (&one_follows, (Some(0.37), true, None)),
                (&not_finite, (None, false, None)),
                (&trusting, (Some(0.37), true, None)),
            ] {
                let found = run(&mut Command::new(&program), problem.to_bytes(scale, skip, has_flag));
                let (mut after, mut gave_way) = (problem.clone(), false);
                if skip != Some(1.0) {
                    gave_way = after.step(scale.unwrap_or(1.0));
                }
                let (images, flag) = found.split_at(found.len() - 4);
                let what = format!("{formats:?}, {scale:?} {has_flag} {skip:?}");
                after.expect_images(images, &what);
                let expected = if gave_way && has_flag { 1 } else { UNTOUCHED };
                assert_eq!(u32::from_ne_bytes(flag.try_into().unwrap()), expected, "{rule:?}, {what}");
            }
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
