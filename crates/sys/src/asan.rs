//! Tells AddressSanitizer which memory nobody may touch, in a build with `-Zsanitizer=address --cfg pvblk_asan` (scripts/asan.sh); nothing in any other.
//!
//! It doesn't know mappings by itself: a piece that is free is as good to it as one in use. With this, who touches an [`crate::Idle`] piece is stopped at once.
//! Reads and writes of the kernel's are not seen.

use crate::Region;

#[cfg(pvblk_asan)]
mod told {
    use super::Region;

    unsafe extern "C" {
        fn __asan_poison_memory_region(addr: *const u8, size: usize);
        fn __asan_unpoison_memory_region(addr: *const u8, size: usize);
    }

    /// From now on nobody may touch it.
    pub fn forbid(region: &Region) {
        // SAFETY: it marks addresses and doesn't touch them.
        unsafe { __asan_poison_memory_region(region.address() as *const u8, region.len()) }
    }

    /// The opposite.
    pub fn allow(region: &Region) {
        // SAFETY: as above.
        unsafe { __asan_unpoison_memory_region(region.address() as *const u8, region.len()) }
    }
}

#[cfg(not(pvblk_asan))]
mod told {
    use super::Region;

    #[inline]
    pub fn forbid(_: &Region) {}

    #[inline]
    pub fn allow(_: &Region) {}
}

pub use told::{allow, forbid};
