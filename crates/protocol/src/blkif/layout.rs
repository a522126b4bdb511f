//! Offsets and sizes on the shared pages of a ring.

use super::wire::ENTRY_SIZE;
use pvblk_sys::PAGE_SIZE;

/// Offset of the front end's request producer index (ring.h, `struct name_sring`).
pub const REQ_PROD: usize = 0;
/// Offset of the request event index: the back end wants to be notified when `req_prod` passes it.
pub const REQ_EVENT: usize = 4;
/// Offset of the back end's response producer index.
pub const RSP_PROD: usize = 8;
/// Offset of the response event index.
pub const RSP_EVENT: usize = 12;
/// Offset of the first entry.
pub const ENTRIES: usize = 64;

/// Layout of a front end's entries (xen/include/public/io/protocols.h). A ring has the same number of entries in
/// both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Abi {
    /// `x86_64-abi`, also that of 64-bit ARM: entries of 112 bytes.
    #[default]
    X86_64,
    /// `x86_32-abi`: entries of 108 bytes; 64-bit fields begin at multiples of 4.
    X86_32,
}

/// Offset at which the two layouts diverge: a 64-bit field follows.
pub(crate) const ABI_HEAD: usize = 4;
/// Padding bytes at that offset in 64-bit layouts.
pub(crate) const ABI_GAP: usize = 4;

impl Abi {
    /// Size of one entry in bytes.
    pub fn entry_size(self) -> usize {
        match self {
            Abi::X86_64 => ENTRY_SIZE,
            Abi::X86_32 => ENTRY_SIZE - ABI_GAP,
        }
    }

    /// Value of the `protocol` key.
    pub fn name(self) -> &'static str {
        match self {
            Abi::X86_64 => "x86_64-abi",
            Abi::X86_32 => "x86_32-abi",
        }
    }
}

/// Most pages of one ring (Linux's `XENBUS_MAX_RING_GRANT_ORDER` is 4).
pub const MAX_RING_PAGES: usize = 16;

/// A ring's size: 1, 2, 4, 8 or 16 pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RingSize {
    order: u32,
}

impl RingSize {
    /// Converts from pages; `None` unless 1, 2, 4, 8 or 16.
    pub fn from_pages(pages: usize) -> Option<RingSize> {
        (pages.is_power_of_two() && pages <= MAX_RING_PAGES).then(|| RingSize {
            order: pages.trailing_zeros(),
        })
    }

    /// Converts from the page order (`ring-page-order`), 0 to 4.
    pub fn from_order(order: u32) -> Option<RingSize> {
        (order <= MAX_RING_PAGES.trailing_zeros()).then_some(RingSize { order })
    }

    /// Page order: log2 of the number of pages.
    pub fn order(self) -> u32 {
        self.order
    }

    pub fn pages(self) -> usize {
        1 << self.order
    }

    pub fn bytes(self) -> usize {
        self.pages() * PAGE_SIZE
    }

    /// Number of entries: the largest power of two that fits (ring.h, `__RING_SIZE`).
    pub fn entries(self) -> u32 {
        let fit = (self.bytes() - ENTRIES) / ENTRY_SIZE;
        1 << fit.ilog2()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_follow_the_header() {
        let entries: Vec<_> = [1, 2, 4, 8, 16]
            .map(|p| RingSize::from_pages(p).unwrap().entries())
            .into();
        assert_eq!(entries, [32, 64, 128, 256, 512]);
        assert!(RingSize::from_pages(0).is_none());
        assert!(RingSize::from_pages(3).is_none());
        assert!(RingSize::from_pages(32).is_none());
        assert!(RingSize::from_order(5).is_none());
    }
}
