//! Tells AddressSanitizer which memory nobody may touch, in a build with `-Zsanitizer=address --cfg pvblk_asan` (scripts/asan.sh); nothing in any other.
//!
//! It doesn't know mappings by itself: a piece that is free is as good to it as one in use. With this, who touches an [`crate::Idle`] piece is stopped at once.
//! Reads and writes of the kernel's are not seen.

#[cfg(pvblk_asan)]
mod told {
    unsafe extern "C" {
        fn __asan_poison_memory_region(addr: *const u8, size: usize);
        fn __asan_unpoison_memory_region(addr: *const u8, size: usize);
    }

    /// From now on nobody may touch it.
    pub fn forbid(addr: *const u8, len: usize) {
        // SAFETY: it marks addresses and doesn't touch them.
        unsafe { __asan_poison_memory_region(addr, len) }
    }

    /// The opposite.
    pub fn allow(addr: *const u8, len: usize) {
        // SAFETY: as above.
        unsafe { __asan_unpoison_memory_region(addr, len) }
    }
}

#[cfg(not(pvblk_asan))]
mod told {
    #[inline]
    pub fn forbid(_: *const u8, _: usize) {}

    #[inline]
    pub fn allow(_: *const u8, _: usize) {}
}

pub use told::{allow, forbid};
