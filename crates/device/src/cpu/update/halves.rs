//! Compact masters in memory, a vector at a time; see [`crate::update::master`].

use super::prefetch;
use super::vector::Vector;
use crate::update::master::CARRIES;

/// The lower halves of compact masters, and the carries of rounding.
#[derive(Clone, Copy)]
pub(super) struct Halves {
    pub(super) low: usize,
    pub(super) carry: usize,
}

impl Halves {
    pub(super) const NONE: Self = Self { low: 0, carry: 0 };

    fn low(self, at: usize) -> *mut u16 {
        (self.low as *mut u16).wrapping_add(at)
    }

    fn carry(self, at: usize) -> *mut u8 {
        (self.carry as *mut u8).wrapping_add(at / CARRIES as usize)
    }

    /// The masters of weights, from `at` on.
    ///
    /// # Safety
    /// As [`Vector`]'s, for the elements from `at` on. `at` must be a multiple of the vector's lanes, or of [`CARRIES`] if
    /// those are more.
    #[inline(always)]
    pub(super) unsafe fn join<V: Vector>(self, weight: V, at: usize, ahead: usize) -> V {
        prefetch(self.low(at + ahead));
        // SAFETY: as the caller promises. A vector's carries are whole bytes, or all in one.
        unsafe {
            let first = self.carry(at);
            let carry = match V::N {
                16 => u32::from(first.cast::<u16>().read_unaligned()),
                8 => u32::from(first.read()),
                _ => u32::from(first.read()) >> (at % CARRIES as usize) & ((1 << V::N) - 1),
            };
            let master = weight.with_low(self.low(at), carry);
            master.unless_replaced(master.rounded_bf16(), weight)
        }
    }

    /// Keeps of masters what their rounding does not have.
    ///
    /// # Safety
    /// As [`Self::join`].
    #[inline(always)]
    pub(super) unsafe fn keep<V: Vector>(self, master: V, at: usize) {
        // SAFETY: as the caller promises.
        unsafe {
            let carry = master.store_low(master.rounded_bf16(), self.low(at));
            let first = self.carry(at);
            match V::N {
                16 => first.cast::<u16>().write_unaligned(carry as u16),
                8 => first.write(carry as u8),
                _ => {
                    let (shift, lanes) = (at % CARRIES as usize, (1u32 << V::N) - 1);
                    first.write(first.read() & !((lanes << shift) as u8) | (carry << shift) as u8);
                }
            }
        }
    }
}
