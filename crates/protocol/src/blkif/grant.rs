//! Grant table entries, version 1 (xen/include/public/grant_table.h, `struct grant_entry_v1`):
//! `flags` u16 at 0, `domid` u16 at 2, `frame` u32 at 4.

pub const GRANT_ENTRY_SIZE: usize = 8;
/// Entries on one page of the table.
pub const GRANTS_PER_PAGE: usize = pvblk_sys::PAGE_SIZE / GRANT_ENTRY_SIZE;
/// The first references are reserved (`GNTTAB_NR_RESERVED_ENTRIES`).
pub const RESERVED_GRANTS: u32 = 8;

const PERMIT_ACCESS: u32 = 1;
const TYPE_MASK: u32 = 3;
const READ_ONLY: u32 = 1 << 2;

/// A decoded entry, from one private copy of its two words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantEntry {
    /// Frame number in the granter's memory, in pages.
    pub frame: u32,
    /// True if the grantee may only read.
    pub read_only: bool,
}

impl GrantEntry {
    /// Decodes `flags | domid << 16` and `frame`; `None` if the entry grants nothing.
    #[inline]
    pub fn decode(flags_domid: u32, frame: u32) -> Option<GrantEntry> {
        (flags_domid & TYPE_MASK == PERMIT_ACCESS).then_some(GrantEntry {
            frame,
            read_only: flags_domid & READ_ONLY != 0,
        })
    }

    /// The first word of an entry that grants access to domain `domid`.
    pub fn encode_flags(self, domid: u16) -> u32 {
        let read_only = if self.read_only { READ_ONLY } else { 0 };
        PERMIT_ACCESS | read_only | u32::from(domid) << 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_survives_its_encoding() {
        for read_only in [false, true] {
            let e = GrantEntry {
                frame: 77,
                read_only,
            };
            assert_eq!(GrantEntry::decode(e.encode_flags(3), 77), Some(e));
        }
        assert_eq!(GrantEntry::decode(0, 77), None);
        assert_eq!(GrantEntry::decode(2, 77), None);
    }
}
