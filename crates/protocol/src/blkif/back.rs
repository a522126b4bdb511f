//! The back end's side of a blkif ring: requests in, responses out.

use super::index::{Consumer, Producer, RingBroken};
use super::layout::{
    ABI_GAP, ABI_HEAD, Abi, ENTRIES, REQ_EVENT, REQ_PROD, RSP_EVENT, RSP_PROD, RingSize,
};
use super::wire::{Entry, Response};
use pvblk_sys::Region;
use zerocopy::IntoBytes;

/// Consumes requests and produces responses. The pages belong to the peer, which may write any bytes at any time.
#[derive(Debug)]
pub struct BackRing {
    pages: Region,
    mask: u32,
    abi: Abi,
    requests: Consumer,
    responses: Producer,
}

impl BackRing {
    /// Attaches to a peer's fresh ring, whose indices are at their start. `None` if the region's size is not that of
    /// a ring.
    pub fn new(pages: Region) -> Option<BackRing> {
        BackRing::with_abi(pages, Abi::default())
    }

    /// As [`BackRing::new`], for a front end with this layout of entries.
    pub fn with_abi(pages: Region, abi: Abi) -> Option<BackRing> {
        let size = RingSize::from_pages(pages.len() / pvblk_sys::PAGE_SIZE)?;
        Some(BackRing {
            pages,
            mask: size.entries() - 1,
            abi,
            requests: Consumer::default(),
            responses: Producer::default(),
        })
    }

    pub fn entries(&self) -> u32 {
        self.mask + 1
    }

    /// Requests taken that have no response yet.
    #[inline]
    pub fn unanswered(&self) -> u32 {
        self.requests.next().wrapping_sub(self.responses.next())
    }

    /// Takes the next request: a private copy, read once (XSA-155). Its contents are not checked.
    ///
    /// Errors if `req_prod` is further ahead than the ring has room for: the peer is broken (the counterpart of
    /// XSA-391 in `ring.h`).
    #[inline]
    pub fn take(&mut self, entry: &mut Entry) -> Result<bool, RingBroken> {
        if self.pending()? == 0 {
            return Ok(false);
        }
        let at = self.offset(self.requests.next());
        let bytes = entry.bytes_mut();
        match self.abi {
            Abi::X86_64 => self.pages.read(at, bytes),
            Abi::X86_32 => {
                let (head, rest) = bytes.split_at_mut(ABI_HEAD);
                self.pages.read(at, head);
                let (gap, rest) = rest.split_at_mut(ABI_GAP);
                gap.fill(0);
                self.pages.read(at + ABI_HEAD, rest);
            }
        }
        self.requests.advance();
        Ok(true)
    }

    #[inline]
    fn offset(&self, index: u32) -> usize {
        ENTRIES + (index & self.mask) as usize * self.abi.entry_size()
    }

    /// Requests that can be taken: the known ones, or, if there are none, those published since the last look. Errors
    /// as [`BackRing::take`].
    #[inline]
    pub fn pending(&mut self) -> Result<u32, RingBroken> {
        if self.requests.known() == 0 {
            let limit = self.entries() - self.unanswered();
            let produced = self.pages.atomic_u32(REQ_PROD);
            self.requests.refresh(produced, limit)?;
        }
        Ok(self.requests.known())
    }

    /// Prepares a response. Panics if every request has one: that is a bug of the caller, never the peer's doing.
    #[inline]
    pub fn respond(&mut self, id: u64, operation: u8, status: i16) {
        assert!(self.unanswered() > 0, "a response without a request");
        let response = Response {
            id,
            operation,
            pad: 0,
            status,
            pad2: 0,
        };
        let at = self.offset(self.responses.next());
        // The 32-bit layout has the same fields at the same offsets, without the padding at the end.
        let len = match self.abi {
            Abi::X86_64 => size_of::<Response>(),
            Abi::X86_32 => size_of::<Response>() - ABI_GAP,
        };
        self.pages.write(at, &response.as_bytes()[..len]);
        self.responses.advance();
    }

    /// Makes responses visible; true if the front end wants to be notified.
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.responses.publish(
            self.pages.atomic_u32(RSP_PROD),
            self.pages.atomic_u32(RSP_EVENT),
        )
    }

    /// Asks to be notified of the next request; true if there is one already.
    #[inline]
    pub fn arm(&mut self) -> bool {
        self.requests.arm(
            self.pages.atomic_u32(REQ_PROD),
            self.pages.atomic_u32(REQ_EVENT),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::{OP_INDIRECT, OP_READ};
    use super::*;
    use std::sync::atomic::Ordering;

    /// A 32-bit guest's layout: id at 4, sector at 12, segments at 20 or grant references at 24.
    #[test]
    fn entries_of_32_bit_guests_are_understood() {
        let memory = Region::anonymous(pvblk_sys::PAGE_SIZE).unwrap();
        let mut raw = [0xaa; 108];
        raw[..4].copy_from_slice(&[OP_READ, 1, 0x34, 0x12]);
        raw[4..12].copy_from_slice(&0x0807_0605_0403_0201_u64.to_le_bytes());
        raw[12..20].copy_from_slice(&77_u64.to_le_bytes());
        raw[20..28].copy_from_slice(&[9, 0, 0, 0, 1, 6, 0, 0]);
        memory.write(ENTRIES, &raw);
        raw[..4].copy_from_slice(&[OP_INDIRECT, OP_READ, 100, 0]);
        raw[20..28].copy_from_slice(&[0x34, 0x12, 0, 0, 11, 0, 0, 0]);
        memory.write(ENTRIES + 108, &raw);
        memory.atomic_u32(REQ_PROD).store(2, Ordering::Release);
        let mut ring = BackRing::with_abi(memory, Abi::X86_32).unwrap();
        let mut entry = Entry::default();
        assert!(ring.take(&mut entry).unwrap());
        let rw = entry.rw();
        let h = rw.header;
        assert_eq!((h.operation, h.nr_segments, h.handle), (OP_READ, 1, 0x1234));
        assert_eq!(
            (h.id, h.sector_number, h.pad),
            (0x0807_0605_0403_0201, 77, 0)
        );
        let s = rw.segments[0];
        assert_eq!((s.gref, s.first_sect, s.last_sect), (9, 1, 6));
        assert!(ring.take(&mut entry).unwrap());
        let i = entry.indirect();
        assert_eq!(
            (i.indirect_op, i.nr_segments, i.handle),
            (OP_READ, 100, 0x1234)
        );
        assert_eq!((i.sector_number, i.indirect_grefs[0]), (77, 11));
        // Responses of 12 bytes at a distance of 108; the rest of each entry is unchanged.
        ring.respond(5, OP_READ, -1);
        ring.respond(6, OP_READ, 0);
        let mut answer = [0; 16];
        ring.pages.read(ENTRIES, &mut answer);
        assert_eq!(
            answer[..12],
            [5, 0, 0, 0, 0, 0, 0, 0, OP_READ, 0, 0xff, 0xff]
        );
        assert_eq!(answer[12..], [77, 0, 0, 0]);
        ring.pages.read(ENTRIES + 108, &mut answer);
        assert_eq!(answer[..12], [6, 0, 0, 0, 0, 0, 0, 0, OP_READ, 0, 0, 0]);
    }
}
