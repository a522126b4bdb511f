//! The back end's side of a ring.

use crate::index::{Consumer, Producer, RingBroken};
use crate::layout::{ENTRIES, REQ_EVENT, REQ_PROD, RSP_EVENT, RSP_PROD, RingSize};
use crate::wire::{ENTRY_SIZE, Entry, Response};
use pvblk_sys::Region;
use zerocopy::IntoBytes;

/// Consumes requests, produces responses. The pages belong to the peer, who may write anything at any time.
#[derive(Debug)]
pub struct BackRing {
    pages: Region,
    mask: u32,
    requests: Consumer,
    responses: Producer,
}

impl BackRing {
    /// Attaches to a peer's fresh ring: all indices at their start. `None` if the region is not a ring's size.
    pub fn new(pages: Region) -> Option<BackRing> {
        let size = RingSize::from_pages(pages.len() / pvblk_sys::PAGE_SIZE)?;
        Some(BackRing {
            pages,
            mask: size.entries() - 1,
            requests: Consumer::default(),
            responses: Producer::default(),
        })
    }

    /// Entries of the ring.
    pub fn entries(&self) -> u32 {
        self.mask + 1
    }

    /// Requests taken and not yet answered.
    #[inline]
    pub fn unanswered(&self) -> u32 {
        self.requests.next().wrapping_sub(self.responses.next())
    }

    /// Takes the next request: a private copy, read once (XSA-155). Nothing in it is checked.
    ///
    /// A `req_prod` further ahead than there is room for means a broken peer (XSA-391's counterpart in `ring.h`).
    #[inline]
    pub fn take(&mut self, entry: &mut Entry) -> Result<bool, RingBroken> {
        if self.pending()? == 0 {
            return Ok(false);
        }
        let at = ENTRIES + (self.requests.next() & self.mask) as usize * ENTRY_SIZE;
        self.pages.read(at, entry.bytes_mut());
        self.requests.advance();
        Ok(true)
    }

    /// Requests that can be taken: those known of, or if there are none, those that the front end has published since. Errors as [`BackRing::take`].
    #[inline]
    pub fn pending(&mut self) -> Result<u32, RingBroken> {
        if self.requests.known() == 0 {
            let limit = self.entries() - self.unanswered();
            let produced = self.pages.atomic_u32(REQ_PROD);
            self.requests.refresh(produced, limit)?;
        }
        Ok(self.requests.known())
    }

    /// Prepares a response. Panics if there is no unanswered request: that is our bug, never the peer's doing.
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
        let at = ENTRIES + (self.responses.next() & self.mask) as usize * ENTRY_SIZE;
        self.pages.write(at, response.as_bytes());
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
