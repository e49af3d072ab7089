//! Conversions between f32 and half precision, without branches, so that loops over them become vector code.

/// Rounds to nearest-even; every NaN becomes the one the GPU's conversion makes.
#[inline(always)]
pub(crate) fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) >> 16;
    if value.is_nan() { 0x7fff } else { rounded as u16 }
}

#[inline(always)]
pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds to nearest-even; every NaN becomes the one the GPU's conversion makes.
#[inline(always)]
pub(crate) fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let (sign, size) = ((bits >> 16) & 0x8000, bits & 0x7fff_ffff);
    let normal = size.wrapping_add(0xfff + ((size >> 13) & 1)).wrapping_sub(112 << 23) >> 13;
    // The last place of 0.5 is the smallest f16, so the addition rounds to it.
    let small = (f32::from_bits(size) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let finite = if size < 0x3880_0000 { small } else { normal };
    let number = sign | if size >= 0x4780_0000 { 0x7c00 } else { finite };
    if value.is_nan() { 0x7fff } else { number as u16 }
}

#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let (sign, size) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff));
    let normal = (size << 13) + (112 << 23);
    // An integer of 10 bits is exact in f32, and so is its product with a power of two.
    let small = (size as i32 as f32 * f32::from_bits(103 << 23)).to_bits();
    let quiet = if size > 0x7c00 { 0x0040_0000 } else { 0 };
    let special = (size << 13) | 0x7f80_0000 | quiet;
    let finite = if size < 0x400 { small } else { normal };
    f32::from_bits(sign | if size >= 0x7c00 { special } else { finite })
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn half_precision_rounds_to_nearest_even_and_has_one_nan() {
        for (value, bits) in [(1.0f32, 0x3f80u16), (-2.5, 0xc020), (f32::INFINITY, 0x7f80), (f32::NAN, 0x7fff)] {
            assert_eq!(f32_to_bf16(value), bits, "{value}");
        }
        // Halfway between two bf16 values: to the even one, both ways.
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(f32_to_bf16(f32::MAX), 0x7f80);
        assert_eq!((f32_to_f16(65504.0), f32_to_f16(65520.0), f32_to_f16(f32::NAN)), (0x7bff, 0x7c00, 0x7fff));
        assert_eq!(f16_to_f32(0x3c00), 1.0);
    }

    /// Every f16 there is, against an implementation of somebody else's.
    #[test]
    fn every_f16_widens_to_its_value() {
        for bits in 0..=u16::MAX {
            assert_eq!(f16_to_f32(bits).to_bits(), f16::from_bits(bits).to_f32().to_bits(), "{bits:#06x}");
        }
    }

    /// Every pattern of the upper 20 bits, with the lower ones that decide a rounding.
    #[test]
    fn f32_narrows_to_the_nearest_f16() {
        for upper in 0..1u32 << 20 {
            for lower in [0, 1, 0x7ff, 0x800, 0x801, 0xfff] {
                let value = f32::from_bits(upper << 12 | lower);
                let expected = if value.is_nan() { 0x7fff } else { f16::from_f32(value).to_bits() };
                assert_eq!(f32_to_f16(value), expected, "{:#010x}", value.to_bits());
            }
        }
    }
}
