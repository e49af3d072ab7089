// One update of many segments of whose columns some are kept in fewer bits than an f32, for any rule, any types and any
// kind of master: one kernel for each rule, in which `kinds` says what the operands are. See src/update/format.rs for the
// formats, and update.cuh and compact.cuh for the rest. scripts/make_ptx.py compiles this file and then the rule's own,
// whose UPDATE_KERNELS then makes this kernel.
//
// A thread takes eight elements and a warp one block of a column, so that the largest magnitude of a block is found
// within a warp. All that is asked of `kinds` is the same for a whole launch block, and asked outside of loops.

#pragma once

#include "compact.cuh"

constexpr u32 MAX_PACKED_SEGMENTS = 33;
constexpr u32 EIGHT = 8;
constexpr u32 LANES = 32;
constexpr u32 COLUMN_BLOCK = LANES * EIGHT;  // elements that share a scale

// The columns that may be below zero, a bit for each: of every rule the first one. A test of launch.rs shows it.
constexpr u32 SIGNED_COLUMNS = 1;

// What the fields of `kinds` say, two bits each.
enum Type { F32_TYPE, BF16_TYPE, F16_TYPE };
enum MasterKind { NO_MASTER, F32_MASTER, COMPACT_MASTER };
enum Format { F32_FORMAT, BF16_FORMAT, BLOCKS_FORMAT };
enum Field { WEIGHT_FIELD, GRAD_FIELD, MASTER_FIELD, COLUMN_FIELD };  // the last one and those behind it: of each column
constexpr u32 RANDOM = 1 << 12;  // columns are rounded at random, with their keys

struct PackedSegment {
    u64 weight, grad, state[MAX_COLUMNS], scale[MAX_COLUMNS];  // addresses; 0 for what is not there
    u64 master, carry;  // an f32 master, or the lower halves of compact ones and their carries
    u32 elements, first_block, scalars;
    u32 first;  // where its first element is in the parameter, modulo 2^32
    u32 key[MAX_COLUMNS], kinds;
    __device__ u32 field(u32 field) const { return kinds >> 2 * field & 3; }
};

struct PackedUpdate {
    u64 grad_scale, skip;  // as in Update
    u64 followed;
    u32 segments, trust_master;
    Scalars scalars[MAX_SETS];
    PackedSegment segment[MAX_PACKED_SEGMENTS];
};
static_assert(sizeof(PackedUpdate) <= 4096, "kernel parameters of every GPU and driver are at most 4 KiB");

// Eight values of 8, 16 or 32 bits as they are in memory, in the first words of so many.
struct Packs { u32 word[EIGHT]; };

template <class T>
__device__ inline u32 unpack(const Packs& from, u32 i) {
    constexpr u32 EACH = 4 / sizeof(T), BITS = 8 * sizeof(T);
    return from.word[i / EACH] >> BITS * (i % EACH) & ~0u >> (32 - BITS);
}

template <class T>
__device__ inline void pack(Packs& to, u32 i, u32 value) {
    constexpr u32 EACH = 4 / sizeof(T), BITS = 8 * sizeof(T);
    if (i % EACH == 0) to.word[i / EACH] = value;
    else to.word[i / EACH] |= value << BITS * (i % EACH);
}

// What eight values are loaded and stored as.
template <class T>
struct alignas(sizeof(T) == 1 ? 8 : 16) Words { u32 word[2 * sizeof(T)]; };

// All eight at once where they are there and aligned; zeros for those that are not there. Nothing is computed from them
// here: the reads of all operands are to be under way at once.
template <class T>
__device__ inline void load_packs(Packs& to, u64 base, u32 at, u32 count, bool whole) {
    const T* from = reinterpret_cast<const T*>(base) + at;
    if (whole) {
        Words<T> words = *reinterpret_cast<const Words<T>*>(from);
#pragma unroll
        for (u32 i = 0; i < 2 * sizeof(T); i++) to.word[i] = words.word[i];
    } else {
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) pack<T>(to, i, i < count ? from[i] : 0);
    }
}

template <class T>
__device__ inline void store_packs(const Packs& from, u64 base, u32 at, u32 count, bool whole) {
    T* to = reinterpret_cast<T*>(base) + at;
    if (whole) {
        Words<T> words;
#pragma unroll
        for (u32 i = 0; i < 2 * sizeof(T); i++) words.word[i] = from.word[i];
        *reinterpret_cast<Words<T>*>(to) = words;
    } else {
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) {
            if (i < count) to[i] = static_cast<T>(unpack<T>(from, i));
        }
    }
}

typedef unsigned char u8;

// Weights and gradients by their type: as a function of a type and its bits.
struct AsF32 {
    typedef u32 Bits;
    __device__ static float widen(u32 bits) { return __uint_as_float(bits); }
    __device__ static u32 narrow(float x) { return __float_as_uint(x); }
};
struct AsBf16 {
    typedef u16 Bits;
    __device__ static float widen(u32 bits) { return ::widen(Bf16{u16(bits)}); }
    __device__ static u32 narrow(float x) { Bf16 y; ::narrow(x, y); return y.bits; }
};
struct AsF16 {
    typedef u16 Bits;
    __device__ static float widen(u32 bits) { return ::widen(F16{u16(bits)}); }
    __device__ static u32 narrow(float x) { F16 y; ::narrow(x, y); return y.bits; }
};

__device__ inline u32 random_bits(u32 key, u32 index) {
    u32 x = index ^ key;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = ((x ^ x >> 15) + key) * 0x846ca68bu;
    return x ^ x >> 16;
}

__device__ inline u32 bf16_at_random(float value, u32 random) {
    u32 bits = __float_as_uint(value);
    return (bits & 0x7f800000) == 0x7f800000 ? AsBf16::narrow(value) : (bits + (random >> 16)) >> 16;
}

__device__ inline int most(int a, int b) { return a > b ? a : b; }
__device__ inline u32 least(u32 a, u32 b) { return a < b ? a : b; }

// Codes of 8 bits; A, B and C are the bits that are cut off in their ranges.
template <bool SIGNED>
struct Code {
    static constexpr u32 A = SIGNED ? 20 : 19, B = SIGNED ? 21 : 20, C = 22;
    static constexpr u32 OF_A = SIGNED ? 889 : 1777, OF_B = SIGNED ? 425 : 857, OF_C = SIGNED ? 207 : 203;
    static constexpr u32 TOP = SIGNED ? 127 : 255;

    __device__ static float share(u32 code) {
        u32 magnitude = code & TOP, sign = SIGNED ? (code & 0x80) << 24 : 0;
        u32 bits = least(least((magnitude + OF_A) << A, (magnitude + OF_B) << B), (magnitude + OF_C) << C);
        return __uint_as_float(magnitude == 0 ? sign : bits | sign);
    }

    __device__ static int ranged(u32 share, bool randomly, u32 random, u32 shift, u32 offset) {
        u32 up = randomly ? random >> (32 - shift) : 1u << (shift - 1);
        return int(share + up - (offset << shift)) >> shift;
    }

    __device__ static u32 of(float value, float inverse, bool randomly, u32 random) {
        u32 share = __float_as_uint(__fmul_rn(value, inverse)) & 0x7fffffff;
        int a = ranged(share, randomly, random, A, OF_A);
        int b = ranged(share, randomly, random, B, OF_B);
        int c = ranged(share, randomly, random, C, OF_C);
        u32 code = least(u32(most(most(most(a, b), c), 0)), TOP);
        u32 bits = __float_as_uint(value);
        if (SIGNED) return code | bits >> 31 << 7;
        return code == 0 && (bits & 0x7fffffff) != 0 ? 1 : code;
    }
};

// A column of eight elements to memory as a block of codes. The whole warp takes part; elements from `count` on are not
// there, and do not count.
template <bool SIGNED>
__device__ inline void keep_codes(
    const float* numbers, const PackedSegment& seg, int c, u32 at, u32 count, bool whole
) {
    constexpr u32 INFINITE = 0x7f800000, NORMAL = 0x00800000;
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < EIGHT; i++) {
        u32 magnitude = __float_as_uint(numbers[i]) & 0x7fffffff;
        largest = i < count && magnitude > largest ? magnitude : largest;
    }
    largest = __reduce_max_sync(0xffffffff, largest);
    bool counts = largest >= NORMAL && largest < INFINITE;
    float inverse = counts ? __frcp_rn(__uint_as_float(largest)) : 0.0f;
    if (threadIdx.x % LANES == 0) {
        // A block with a number that is not finite is NaN as a whole.
        reinterpret_cast<u32*>(seg.scale[c])[at / COLUMN_BLOCK] = counts ? largest : largest < NORMAL ? 0 : 0x7fc00000;
    }
    Packs codes;
    if (seg.kinds & RANDOM) {
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) {
            u32 random = random_bits(seg.key[c], seg.first + at + i);
            pack<u8>(codes, i, Code<SIGNED>::of(numbers[i], inverse, true, random));
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) pack<u8>(codes, i, Code<SIGNED>::of(numbers[i], inverse, false, 0));
    }
    store_packs<u8>(codes, seg.state[c], at, count, whole);
}

// The gradients as the rule gets them.
template <class G>
__device__ inline void ready_grads(float* grad, const Packs& from, const Scalars& s, float scale) {
#pragma unroll
    for (u32 i = 0; i < EIGHT; i++) {
        float g = __fmul_rn(G::widen(unpack<typename G::Bits>(from, i)), scale);
        grad[i] = s.has(MAXIMIZE) ? -g : g;
    }
}

// The numbers that the rule updates, but for compact masters. Returns whether all masters hold.
template <class P>
__device__ inline bool old_weights(
    float* weight, const Packs& from, const Packs& master, bool has_master, bool trusts, u32 count
) {
    bool all_hold = true;
    if (has_master) {
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) {
            u32 bits = unpack<typename P::Bits>(from, i);
            float number = __uint_as_float(master.word[i]);
            bool counts = trusts || P::narrow(number) == bits;
            all_hold &= counts || i >= count;
            weight[i] = counts ? number : P::widen(bits);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) weight[i] = P::widen(unpack<typename P::Bits>(from, i));
    }
    return all_hold;
}

// New weights to memory; they stay in `to` as they are there.
template <class P>
__device__ inline void keep_weights(Packs& to, const float* weight, u64 base, u32 at, u32 count, bool whole) {
#pragma unroll
    for (u32 i = 0; i < EIGHT; i++) pack<typename P::Bits>(to, i, P::narrow(weight[i]));
    store_packs<typename P::Bits>(to, base, at, count, whole);
}

// Eight elements from `at` on, of which `count` are there: none behind the end, where the thread still takes part in what
// its warp does together.
template <class Rule>
__device__ void update_packed_eight(
    const PackedUpdate& step, const PackedSegment& seg, const Scalars& s, float scale, u32 at, u32 count, bool aligned
) {
    bool whole = aligned && count == EIGHT;
    auto kept = [&seg](int c) { return c < Rule::REQUIRED || seg.state[c] != 0; };
    u32 weight_type = seg.field(WEIGHT_FIELD), grad_type = seg.field(GRAD_FIELD), masters = seg.field(MASTER_FIELD);
    u8* carry_at = reinterpret_cast<u8*>(seg.carry) + at / CARRIES;

    Packs weights, grads, master, columns[Rule::COLUMNS];
    float scales[Rule::COLUMNS];
    u32 carries = 0;
    if (weight_type == F32_TYPE) load_packs<u32>(weights, seg.weight, at, count, whole);
    else load_packs<u16>(weights, seg.weight, at, count, whole);
    if (grad_type == F32_TYPE) load_packs<u32>(grads, seg.grad, at, count, whole);
    else load_packs<u16>(grads, seg.grad, at, count, whole);
    if (masters == F32_MASTER) load_packs<u32>(master, seg.master, at, count, whole);
    else if (masters == COMPACT_MASTER) {
        load_packs<u16>(master, seg.master, at, count, whole);
        if (count > 0) carries = *carry_at;
    }
#pragma unroll
    for (int c = 0; c < Rule::COLUMNS; c++) {
        if (!kept(c)) continue;
        u32 format = seg.field(COLUMN_FIELD + c);
        if (format == F32_FORMAT) load_packs<u32>(columns[c], seg.state[c], at, count, whole);
        else if (format == BF16_FORMAT) load_packs<u16>(columns[c], seg.state[c], at, count, whole);
        else {
            load_packs<u8>(columns[c], seg.state[c], at, count, whole);
            scales[c] = reinterpret_cast<const float*>(seg.scale[c])[at / COLUMN_BLOCK];
        }
    }

    float weight[EIGHT], grad[EIGHT], state[Rule::COLUMNS][EIGHT];
    if (grad_type == F32_TYPE) ready_grads<AsF32>(grad, grads, s, scale);
    else if (grad_type == BF16_TYPE) ready_grads<AsBf16>(grad, grads, s, scale);
    else ready_grads<AsF16>(grad, grads, s, scale);
    bool trusts = step.trust_master != 0, full = masters == F32_MASTER, all_hold;
    if (weight_type == F32_TYPE) all_hold = old_weights<AsF32>(weight, weights, master, full, trusts, count);
    else if (weight_type == BF16_TYPE) all_hold = old_weights<AsBf16>(weight, weights, master, full, trusts, count);
    else all_hold = old_weights<AsF16>(weight, weights, master, full, trusts, count);
    if (masters == COMPACT_MASTER) {
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) {
            Bf16 p{u16(unpack<u16>(weights, i))};
            float number = __uint_as_float((u32(p.bits) - (carries >> i & 1)) << 16 | unpack<u16>(master, i));
            bool is_pair = holds(number, p);
            all_hold &= is_pair || i >= count;
            weight[i] = is_pair ? number : weight[i];
        }
    }
    // Many threads may store it, all the same value.
    if (step.followed && !all_hold) *reinterpret_cast<volatile u32*>(step.followed) = 1;
#pragma unroll
    for (int c = 0; c < Rule::COLUMNS; c++) {
        u32 format = seg.field(COLUMN_FIELD + c);
        if (!kept(c)) {
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) state[c][i] = 0.0f;
        } else if (format == F32_FORMAT) {
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) state[c][i] = __uint_as_float(columns[c].word[i]);
        } else if (format == BF16_FORMAT) {
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) state[c][i] = AsBf16::widen(unpack<u16>(columns[c], i));
        } else {
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) {
                u32 code = unpack<u8>(columns[c], i);
                float share = SIGNED_COLUMNS >> c & 1 ? Code<true>::share(code) : Code<false>::share(code);
                state[c][i] = __fmul_rn(share, scales[c]);
            }
        }
    }

    u32 mask = 0;
#pragma unroll
    for (int c = 0; c < Rule::COLUMNS; c++) mask |= kept(c) ? 1u << c : 0u;
#pragma unroll
    for (u32 i = 0; i < EIGHT; i++) {
        float column[Rule::COLUMNS];
#pragma unroll
        for (int c = 0; c < Rule::COLUMNS; c++) column[c] = state[c][i];
        Rule::update(weight[i], grad[i], column, mask, s, seg.first + at + i);
#pragma unroll
        for (int c = 0; c < Rule::COLUMNS; c++) state[c][i] = column[c];
    }

    if (weight_type == F32_TYPE) keep_weights<AsF32>(weights, weight, seg.weight, at, count, whole);
    else if (weight_type == BF16_TYPE) keep_weights<AsBf16>(weights, weight, seg.weight, at, count, whole);
    else keep_weights<AsF16>(weights, weight, seg.weight, at, count, whole);
    if (masters == F32_MASTER) {
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) master.word[i] = __float_as_uint(weight[i]);
        store_packs<u32>(master, seg.master, at, count, whole);
    } else if (masters == COMPACT_MASTER) {
        u32 new_carries = 0;
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) {
            u32 bits = __float_as_uint(weight[i]);
            pack<u16>(master, i, bits & 0xffff);
            new_carries |= u32(i < count && unpack<u16>(weights, i) != bits >> 16) << i;
        }
        store_packs<u16>(master, seg.master, at, count, whole);
        if (count > 0) *carry_at = u8(new_carries);
    }
#pragma unroll
    for (int c = 0; c < Rule::COLUMNS; c++) {
        if (!kept(c)) continue;
        u32 format = seg.field(COLUMN_FIELD + c);
        if (format == F32_FORMAT) {
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) columns[c].word[i] = __float_as_uint(state[c][i]);
            store_packs<u32>(columns[c], seg.state[c], at, count, whole);
        } else if (format == BF16_FORMAT) {
            if (seg.kinds & RANDOM) {
#pragma unroll
                for (u32 i = 0; i < EIGHT; i++) {
                    u32 random = random_bits(seg.key[c], seg.first + at + i);
                    pack<u16>(columns[c], i, bf16_at_random(state[c][i], random));
                }
            } else {
#pragma unroll
                for (u32 i = 0; i < EIGHT; i++) pack<u16>(columns[c], i, AsBf16::narrow(state[c][i]));
            }
            store_packs<u16>(columns[c], seg.state[c], at, count, whole);
        } else if (SIGNED_COLUMNS >> c & 1) {
            keep_codes<true>(state[c], seg, c, at, count, whole);
        } else {
            keep_codes<false>(state[c], seg, c, at, count, whole);
        }
    }
}

template <class Rule>
__device__ void update_packed(const PackedUpdate& step) {
    if (step.skip && *reinterpret_cast<const float*>(step.skip) != 0.0f) return;
    float scale = step.grad_scale ? *reinterpret_cast<const float*>(step.grad_scale) : 1.0f;

    // The last segment that starts at or before this block.
    u32 first = 0, last = step.segments - 1;
    while (first < last) {
        u32 middle = (first + last + 1) / 2;
        if (step.segment[middle].first_block <= blockIdx.x) first = middle;
        else last = middle - 1;
    }
    const PackedSegment& seg = step.segment[first];
    const Scalars s = step.scalars[seg.scalars];
    u32 begin = (blockIdx.x - seg.first_block) * BLOCK_ELEMENTS;
    u32 length = least(seg.elements - begin, BLOCK_ELEMENTS);

    // Eight codes are half as long as eight of anything else.
    u64 addresses = seg.weight | seg.grad | seg.master;
#pragma unroll
    for (int c = 0; c < Rule::COLUMNS; c++) {
        addresses |= seg.field(COLUMN_FIELD + c) == BLOCKS_FORMAT ? 2 * seg.state[c] : seg.state[c];
    }
    bool aligned = addresses % 16 == 0;
    // By blocks of columns, which are whole warps: behind the end of a segment a thread goes on with its warp.
    for (u32 block = threadIdx.x / LANES * COLUMN_BLOCK; block < length; block += EIGHT * THREADS) {
        u32 at = block + threadIdx.x % LANES * EIGHT;
        u32 count = at < length ? least(length - at, EIGHT) : 0;
        update_packed_eight<Rule>(step, seg, s, scale, begin + at, count, aligned);
    }
}

#undef UPDATE_KERNELS
#define UPDATE_KERNELS(name, Rule)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) name##_packed(const __grid_constant__ PackedUpdate step) { \
        update_packed<Rule>(step);                                                                                   \
    }
