//! Tells AddressSanitizer which memory must not be accessed, in a build with `-Zsanitizer=address --cfg pvblk_asan`
//! (scripts/asan.sh). In other builds the functions do nothing.
//!
//! AddressSanitizer tracks the heap but not our mappings: without these marks it would not notice an access to an
//! [`crate::Idle`] piece. Accesses by the kernel are not checked.

use crate::Region;

#[cfg(pvblk_asan)]
mod marks {
    use super::Region;

    unsafe extern "C" {
        fn __asan_poison_memory_region(addr: *const u8, size: usize);
        fn __asan_unpoison_memory_region(addr: *const u8, size: usize);
    }

    /// Makes any access to the region an error.
    pub fn poison(region: &Region) {
        // SAFETY: the call marks addresses and doesn't touch them.
        unsafe { __asan_poison_memory_region(region.address() as *const u8, region.len()) }
    }

    /// Allows accesses to the region again.
    pub fn unpoison(region: &Region) {
        // SAFETY: as above.
        unsafe { __asan_unpoison_memory_region(region.address() as *const u8, region.len()) }
    }
}

#[cfg(not(pvblk_asan))]
mod marks {
    use super::Region;

    #[inline]
    pub fn poison(_: &Region) {}

    #[inline]
    pub fn unpoison(_: &Region) {}
}

pub use marks::{poison, unpoison};
