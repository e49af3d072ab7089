//! Vectors of f32 as the update needs them: one implementation for each vector unit, each operation rounded once.
//!
//! Every operation is IEEE's, and conversions are those of [`super::convert`], so a vector gives the bits that its
//! elements would give one by one.

use super::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// `N` numbers of f32.
///
/// # Safety
/// Of every method: pointers must be valid for `N` elements of their type, at the alignment of one element where
/// nothing else is said, and the CPU must have the implementation's instructions. Implementations touch no other memory.
pub(crate) unsafe trait Vector: Copy {
    const N: usize;

    unsafe fn load(from: *const f32) -> Self;
    unsafe fn load_bf16(from: *const u16) -> Self;
    unsafe fn load_f16(from: *const u16) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn store_bf16(self, to: *mut u16);
    unsafe fn store_f16(self, to: *mut u16);
    /// Past the cache, to an address that is a multiple of the vector's `2 * N` bytes.
    unsafe fn stream_bf16(self, to: *mut u16);
    unsafe fn splat(value: f32) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    unsafe fn sqrt(self) -> Self;
    /// `self * other + more`, rounded once.
    unsafe fn mul_add(self, other: Self, more: Self) -> Self;
    /// The sign flipped, of a NaN too.
    unsafe fn neg(self) -> Self;
    /// `other` where `self < other`, and `self` elsewhere, so also where either is a NaN.
    unsafe fn raised_to(self, other: Self) -> Self;
    /// 1 where it is positive, -1 where it is negative, and itself elsewhere: zeros and NaNs.
    unsafe fn sign(self) -> Self;
    /// To bf16 and back.
    unsafe fn rounded_bf16(self) -> Self;
    /// To f16 and back.
    unsafe fn rounded_f16(self) -> Self;
    /// `self` where `rounded` has the bits of `weight`, and `weight` elsewhere.
    unsafe fn unless_replaced(self, rounded: Self, weight: Self) -> Self;
    /// Of weights that are bf16: one less in the upper half where `carry` has the lane's bit, and `low` as the lower half.
    unsafe fn with_low(self, low: *const u16, carry: u32) -> Self;
    /// Writes the lower halves. Returns a bit for each lane whose upper half is not that of `rounded`.
    unsafe fn store_low(self, rounded: Self, low: *mut u16) -> u32;

    /// `other` in the selected lanes, and `self` in the others.
    #[inline(always)]
    unsafe fn or_where(self, other: Self, takes: impl Fn(usize) -> bool) -> Self {
        let (mut mine, mut others) = ([0f32; WIDEST], [0f32; WIDEST]);
        // SAFETY: no vector is wider than these arrays; the caller promises the instructions.
        unsafe {
            self.store(mine.as_mut_ptr());
            other.store(others.as_mut_ptr());
            for lane in 0..Self::N {
                mine[lane] = if takes(lane) { others[lane] } else { mine[lane] };
            }
            Self::load(mine.as_ptr())
        }
    }
}

/// Lanes of the widest vector.
const WIDEST: usize = 16;

// SAFETY: one element is read or written at a pointer.
unsafe impl Vector for f32 {
    const N: usize = 1;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the caller promises.
        unsafe { from.read() }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: as the caller promises.
        bf16_to_f32(unsafe { from.read() })
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: as the caller promises.
        f16_to_f32(unsafe { from.read() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe { to.write(self) };
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        // SAFETY: as the caller promises.
        unsafe { to.write(f32_to_bf16(self)) };
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        // SAFETY: as the caller promises.
        unsafe { to.write(f32_to_f16(self)) };
    }
    #[inline(always)]
    unsafe fn stream_bf16(self, to: *mut u16) {
        // SAFETY: as the caller promises.
        unsafe { self.store_bf16(to) };
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        value
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self + other
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self - other
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self * other
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self / other
    }
    #[inline(always)]
    unsafe fn sqrt(self) -> Self {
        f32::sqrt(self)
    }
    #[inline(always)]
    unsafe fn mul_add(self, other: Self, more: Self) -> Self {
        f32::mul_add(self, other, more)
    }
    #[inline(always)]
    unsafe fn neg(self) -> Self {
        -self
    }
    #[inline(always)]
    unsafe fn raised_to(self, other: Self) -> Self {
        if self < other { other } else { self }
    }
    #[inline(always)]
    unsafe fn sign(self) -> Self {
        if self > 0.0 {
            1.0
        } else if self < 0.0 {
            -1.0
        } else {
            self
        }
    }
    #[inline(always)]
    unsafe fn rounded_bf16(self) -> Self {
        bf16_to_f32(f32_to_bf16(self))
    }
    #[inline(always)]
    unsafe fn rounded_f16(self) -> Self {
        f16_to_f32(f32_to_f16(self))
    }
    #[inline(always)]
    unsafe fn unless_replaced(self, rounded: Self, weight: Self) -> Self {
        if rounded.to_bits() == weight.to_bits() { self } else { weight }
    }
    #[inline(always)]
    unsafe fn with_low(self, low: *const u16, carry: u32) -> Self {
        // SAFETY: as the caller promises.
        let low = u32::from(unsafe { low.read() });
        f32::from_bits(self.to_bits().wrapping_sub(carry << 16) | low)
    }
    #[inline(always)]
    unsafe fn store_low(self, rounded: Self, low: *mut u16) -> u32 {
        // SAFETY: as the caller promises.
        unsafe { low.write(self.to_bits() as u16) };
        u32::from((self.to_bits() ^ rounded.to_bits()) >> 16 != 0)
    }
}

/// Implements [`Vector`] from one expression for each operation.
macro_rules! vector {
    (
        $vector:ident, $n:literal;
        $($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? => $body:expr;)+
    ) => {
        // SAFETY: loads and stores are of `N` elements and need no more alignment than the trait says; the other
        // operations touch no memory.
        unsafe impl Vector for $vector {
            const N: usize = $n;
            $(
                #[inline(always)]
                unsafe fn $name($($argument: $type),*) $(-> $result)? {
                    // SAFETY: the caller promises the pointers and the instructions.
                    unsafe { $body }
                }
            )+
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Vector;
    use std::arch::x86_64::*;

    /// The bits of the nearest bf16 in the upper half of each lane.
    ///
    /// # Safety
    /// The CPU must have AVX2.
    #[inline(always)]
    unsafe fn bf16_bits_256(value: __m256) -> __m256i {
        // SAFETY: as the caller promises.
        unsafe {
            let bits = _mm256_castps_si256(value);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
            let chosen = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fff_0000), nan);
            _mm256_and_si256(chosen, _mm256_set1_epi32(-0x1_0000))
        }
    }

    /// The nearest bf16s, packed.
    ///
    /// # Safety
    /// The CPU must have AVX2.
    #[inline(always)]
    unsafe fn packed_256(value: __m256) -> __m128i {
        // SAFETY: as the caller promises.
        unsafe {
            let low = _mm256_srli_epi32::<16>(bf16_bits_256(value));
            // Packing works on each half of the register, so the halves are put together afterwards.
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(low, low));
            _mm256_castsi256_si128(packed)
        }
    }

    /// The nearest f16s, with the one NaN.
    ///
    /// # Safety
    /// The CPU must have AVX2 and F16C.
    #[inline(always)]
    unsafe fn f16_256(value: __m256) -> __m128i {
        // SAFETY: as the caller promises.
        unsafe {
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packs_epi32(nan, nan));
            let half = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value);
            _mm_blendv_epi8(half, _mm_set1_epi16(0x7fff), _mm256_castsi256_si128(packed))
        }
    }

    vector! {
        __m256, 8;
        load(from: *const f32) -> Self => _mm256_loadu_ps(from);
        load_bf16(from: *const u16) -> Self => {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        };
        load_f16(from: *const u16) -> Self => _mm256_cvtph_ps(_mm_loadu_si128(from.cast()));
        store(self: Self, to: *mut f32) => _mm256_storeu_ps(to, self);
        store_bf16(self: Self, to: *mut u16) => _mm_storeu_si128(to.cast(), packed_256(self));
        store_f16(self: Self, to: *mut u16) => _mm_storeu_si128(to.cast(), f16_256(self));
        stream_bf16(self: Self, to: *mut u16) => _mm_stream_si128(to.cast(), packed_256(self));
        splat(value: f32) -> Self => _mm256_set1_ps(value);
        add(self: Self, other: Self) -> Self => _mm256_add_ps(self, other);
        sub(self: Self, other: Self) -> Self => _mm256_sub_ps(self, other);
        mul(self: Self, other: Self) -> Self => _mm256_mul_ps(self, other);
        div(self: Self, other: Self) -> Self => _mm256_div_ps(self, other);
        sqrt(self: Self) -> Self => _mm256_sqrt_ps(self);
        mul_add(self: Self, other: Self, more: Self) -> Self => _mm256_fmadd_ps(self, other, more);
        neg(self: Self) -> Self => _mm256_xor_ps(self, _mm256_set1_ps(-0.0));
        raised_to(self: Self, other: Self) -> Self =>
            _mm256_blendv_ps(self, other, _mm256_cmp_ps::<_CMP_LT_OQ>(self, other));
        sign(self: Self) -> Self => {
            let (zero, one) = (_mm256_setzero_ps(), _mm256_set1_ps(1.0));
            let up = _mm256_blendv_ps(self, one, _mm256_cmp_ps::<_CMP_GT_OQ>(self, zero));
            _mm256_blendv_ps(up, _mm256_set1_ps(-1.0), _mm256_cmp_ps::<_CMP_LT_OQ>(self, zero))
        };
        rounded_bf16(self: Self) -> Self => _mm256_castsi256_ps(bf16_bits_256(self));
        rounded_f16(self: Self) -> Self => _mm256_cvtph_ps(f16_256(self));
        unless_replaced(self: Self, rounded: Self, weight: Self) -> Self => {
            let same = _mm256_cmpeq_epi32(_mm256_castps_si256(rounded), _mm256_castps_si256(weight));
            _mm256_blendv_ps(weight, self, _mm256_castsi256_ps(same))
        };
        with_low(self: Self, low: *const u16, carry: u32) -> Self => {
            let lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let carries = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(carry as i32), lanes), lanes);
            // A lane of ones is -1, and shifted -1 in the upper half.
            let upper = _mm256_add_epi32(_mm256_castps_si256(self), _mm256_slli_epi32::<16>(carries));
            let lower = _mm256_cvtepu16_epi32(_mm_loadu_si128(low.cast()));
            _mm256_castsi256_ps(_mm256_or_si256(upper, lower))
        };
        store_low(self: Self, rounded: Self, low: *mut u16) -> u32 => {
            let bits = _mm256_castps_si256(self);
            let lower = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(lower, lower));
            _mm_storeu_si128(low.cast(), _mm256_castsi256_si128(packed));
            let upper = _mm256_andnot_si256(_mm256_set1_epi32(0xffff), bits);
            let same = _mm256_cmpeq_epi32(upper, _mm256_castps_si256(rounded));
            !(_mm256_movemask_ps(_mm256_castsi256_ps(same)) as u32) & 0xff
        };
    }

    /// The bits of the nearest bf16 in the upper half of each lane.
    ///
    /// # Safety
    /// The CPU must have AVX-512.
    #[inline(always)]
    unsafe fn bf16_bits_512(value: __m512) -> __m512i {
        // SAFETY: as the caller promises.
        unsafe {
            let bits = _mm512_castps_si512(value);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
            let chosen = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fff_0000));
            _mm512_and_si512(chosen, _mm512_set1_epi32(-0x1_0000))
        }
    }

    /// The nearest bf16s, packed.
    ///
    /// # Safety
    /// The CPU must have AVX-512.
    #[inline(always)]
    unsafe fn packed_512(value: __m512) -> __m256i {
        // SAFETY: as the caller promises.
        unsafe { _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(bf16_bits_512(value))) }
    }

    /// The nearest f16s, with the one NaN.
    ///
    /// # Safety
    /// The CPU must have AVX-512.
    #[inline(always)]
    unsafe fn f16_512(value: __m512) -> __m256i {
        // SAFETY: as the caller promises.
        unsafe {
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
            _mm256_mask_blend_epi16(
                nan,
                _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(value),
                _mm256_set1_epi16(0x7fff),
            )
        }
    }

    vector! {
        __m512, 16;
        load(from: *const f32) -> Self => _mm512_loadu_ps(from);
        load_bf16(from: *const u16) -> Self => {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        };
        load_f16(from: *const u16) -> Self => _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
        store(self: Self, to: *mut f32) => _mm512_storeu_ps(to, self);
        store_bf16(self: Self, to: *mut u16) => _mm256_storeu_si256(to.cast(), packed_512(self));
        store_f16(self: Self, to: *mut u16) => _mm256_storeu_si256(to.cast(), f16_512(self));
        stream_bf16(self: Self, to: *mut u16) => _mm256_stream_si256(to.cast(), packed_512(self));
        splat(value: f32) -> Self => _mm512_set1_ps(value);
        add(self: Self, other: Self) -> Self => _mm512_add_ps(self, other);
        sub(self: Self, other: Self) -> Self => _mm512_sub_ps(self, other);
        mul(self: Self, other: Self) -> Self => _mm512_mul_ps(self, other);
        div(self: Self, other: Self) -> Self => _mm512_div_ps(self, other);
        sqrt(self: Self) -> Self => _mm512_sqrt_ps(self);
        mul_add(self: Self, other: Self, more: Self) -> Self => _mm512_fmadd_ps(self, other, more);
        neg(self: Self) -> Self => _mm512_xor_ps(self, _mm512_set1_ps(-0.0));
        raised_to(self: Self, other: Self) -> Self =>
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self, other), self, other);
        sign(self: Self) -> Self => {
            let (zero, one) = (_mm512_setzero_ps(), _mm512_set1_ps(1.0));
            let up = _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(self, zero), self, one);
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self, zero), up, _mm512_set1_ps(-1.0))
        };
        rounded_bf16(self: Self) -> Self => _mm512_castsi512_ps(bf16_bits_512(self));
        rounded_f16(self: Self) -> Self => _mm512_cvtph_ps(f16_512(self));
        unless_replaced(self: Self, rounded: Self, weight: Self) -> Self => {
            let same = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(rounded), _mm512_castps_si512(weight));
            _mm512_mask_blend_ps(same, weight, self)
        };
        with_low(self: Self, low: *const u16, carry: u32) -> Self => {
            let weight = _mm512_castps_si512(self);
            let upper = _mm512_mask_sub_epi32(weight, carry as __mmask16, weight, _mm512_set1_epi32(0x1_0000));
            let lower = _mm512_cvtepu16_epi32(_mm256_loadu_si256(low.cast()));
            _mm512_castsi512_ps(_mm512_or_si512(upper, lower))
        };
        store_low(self: Self, rounded: Self, low: *mut u16) -> u32 => {
            let bits = _mm512_castps_si512(self);
            _mm256_storeu_si256(low.cast(), _mm512_cvtepi32_epi16(bits));
            let upper = _mm512_andnot_si512(_mm512_set1_epi32(0xffff), bits);
            u32::from(_mm512_cmpneq_epi32_mask(upper, _mm512_castps_si512(rounded)))
        };
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::super::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
    use super::Vector;
    use std::arch::aarch64::*;

    /// Each lane through a function; the compiler makes vector code of those without branches.
    ///
    /// # Safety
    /// The CPU must have NEON, as all of this architecture do.
    #[inline(always)]
    unsafe fn each<T: Copy + Default>(value: float32x4_t, convert: impl Fn(f32) -> T) -> [T; 4] {
        let mut lanes = [0f32; 4];
        // SAFETY: four f32 are stored into an array of four.
        unsafe { vst1q_f32(lanes.as_mut_ptr(), value) };
        lanes.map(convert)
    }

    vector! {
        float32x4_t, 4;
        load(from: *const f32) -> Self => vld1q_f32(from);
        load_bf16(from: *const u16) -> Self =>
            vld1q_f32(from.cast::<[u16; 4]>().read_unaligned().map(bf16_to_f32).as_ptr());
        load_f16(from: *const u16) -> Self =>
            vld1q_f32(from.cast::<[u16; 4]>().read_unaligned().map(f16_to_f32).as_ptr());
        store(self: Self, to: *mut f32) => vst1q_f32(to, self);
        store_bf16(self: Self, to: *mut u16) => to.cast::<[u16; 4]>().write_unaligned(each(self, f32_to_bf16));
        store_f16(self: Self, to: *mut u16) => to.cast::<[u16; 4]>().write_unaligned(each(self, f32_to_f16));
        stream_bf16(self: Self, to: *mut u16) => self.store_bf16(to);
        splat(value: f32) -> Self => vdupq_n_f32(value);
        add(self: Self, other: Self) -> Self => vaddq_f32(self, other);
        sub(self: Self, other: Self) -> Self => vsubq_f32(self, other);
        mul(self: Self, other: Self) -> Self => vmulq_f32(self, other);
        div(self: Self, other: Self) -> Self => vdivq_f32(self, other);
        sqrt(self: Self) -> Self => vsqrtq_f32(self);
        mul_add(self: Self, other: Self, more: Self) -> Self => vfmaq_f32(more, self, other);
        neg(self: Self) -> Self => vnegq_f32(self);
        raised_to(self: Self, other: Self) -> Self => vbslq_f32(vcltq_f32(self, other), other, self);
        sign(self: Self) -> Self => {
            let up = vbslq_f32(vcgtzq_f32(self), vdupq_n_f32(1.0), self);
            vbslq_f32(vcltzq_f32(self), vdupq_n_f32(-1.0), up)
        };
        rounded_bf16(self: Self) -> Self =>
            vld1q_f32(each(self, |value| bf16_to_f32(f32_to_bf16(value))).as_ptr());
        rounded_f16(self: Self) -> Self => vld1q_f32(each(self, |value| f16_to_f32(f32_to_f16(value))).as_ptr());
        unless_replaced(self: Self, rounded: Self, weight: Self) -> Self => {
            let same = vceqq_u32(vreinterpretq_u32_f32(rounded), vreinterpretq_u32_f32(weight));
            vbslq_f32(same, self, weight)
        };
        with_low(self: Self, low: *const u16, carry: u32) -> Self => {
            let (lower, mut lanes) = (low.cast::<[u16; 4]>().read_unaligned(), [0f32; 4]);
            vst1q_f32(lanes.as_mut_ptr(), self);
            for (lane, (value, low)) in lanes.iter_mut().zip(lower).enumerate() {
                *value = value.with_low(&raw const low, carry >> lane & 1);
            }
            vld1q_f32(lanes.as_ptr())
        };
        store_low(self: Self, rounded: Self, low: *mut u16) -> u32 => {
            let (bits, rounded) = (each(self, f32::to_bits), each(rounded, f32::to_bits));
            low.cast::<[u16; 4]>().write_unaligned(bits.map(|bits| bits as u16));
            (0..4).fold(0, |carry, lane| carry | u32::from((bits[lane] ^ rounded[lane]) >> 16 != 0) << lane)
        };
    }
}
