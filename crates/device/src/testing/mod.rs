//! Helpers that the tests of this crate and of the crates above it share.

pub mod checked;
pub mod fault;
pub mod kinds;

/// So many random bytes, the same for the same seed.
///
/// It is in this crate because this crate is optimised in every build, and tests ask for a hundred megabytes.
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut found = Vec::with_capacity(bytes + 8);
    while found.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        found.extend(state.to_ne_bytes());
    }
    found.truncate(bytes);
    found
}
