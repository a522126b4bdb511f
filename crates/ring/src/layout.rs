//! Where things lie on the shared pages.

use crate::wire::ENTRY_SIZE;
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

/// How the front end lays out entries (xen/include/public/io/protocols.h). Their numbers are the same in both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Abi {
    /// `x86_64-abi`, also that of 64-bit ARM: entries of 112 bytes.
    #[default]
    X86_64,
    /// `x86_32-abi`: entries of 108 bytes; 64-bit fields begin at multiples of 4.
    X86_32,
}

/// Where the two layouts part: a 64-bit field follows.
pub(crate) const ABI_HEAD: usize = 4;
/// Bytes that 64-bit layouts have there in between.
pub(crate) const ABI_GAP: usize = 4;

impl Abi {
    /// Bytes of one entry.
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
    /// From the number of pages; `None` unless 1, 2, 4, 8 or 16.
    pub fn from_pages(pages: usize) -> Option<RingSize> {
        (pages.is_power_of_two() && pages <= MAX_RING_PAGES).then(|| RingSize {
            order: pages.trailing_zeros(),
        })
    }

    /// From the page order (`ring-page-order`), 0 to 4.
    pub fn from_order(order: u32) -> Option<RingSize> {
        (order <= MAX_RING_PAGES.trailing_zeros()).then_some(RingSize { order })
    }

    /// log2 of the pages.
    pub fn order(self) -> u32 {
        self.order
    }

    /// Pages.
    pub fn pages(self) -> usize {
        1 << self.order
    }

    /// Bytes.
    pub fn bytes(self) -> usize {
        self.pages() * PAGE_SIZE
    }

    /// Requests that fit: the largest power of two that the pages hold (ring.h, `__RING_SIZE`).
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
