//! The front end's side of a blkif ring: requests out, responses in.

use super::index::{Consumer, Producer, RingBroken, SharedIndex};
use super::layout::{ENTRIES, REQ_EVENT, REQ_PROD, RSP_EVENT, RSP_PROD, RingSize};
use super::wire::{ENTRY_SIZE, RequestHeader, Response, Segment};
use pvblk_sys::Region;
use zerocopy::{FromZeros, Immutable, IntoBytes};

/// Produces requests and consumes responses. At most as many requests are outstanding as the ring has entries.
#[derive(Debug)]
pub struct FrontRing {
    pages: Region,
    mask: u32,
    requests: Producer,
    responses: Consumer,
}

impl FrontRing {
    /// Takes over fresh pages: clears them and sets the indices to their start (`SHARED_RING_INIT`). `None` if the
    /// region's size is not that of a ring.
    pub fn new(pages: Region) -> Option<FrontRing> {
        let size = RingSize::from_pages(pages.len() / pvblk_sys::PAGE_SIZE)?;
        pages.zero(0, pages.len());
        pages.atomic_u32(REQ_EVENT).store_release(1);
        pages.atomic_u32(RSP_EVENT).store_release(1);
        Some(FrontRing {
            pages,
            mask: size.entries() - 1,
            requests: Producer::default(),
            responses: Consumer::default(),
        })
    }

    pub fn entries(&self) -> u32 {
        self.mask + 1
    }

    /// Requests that can be put now.
    #[inline]
    pub fn room(&self) -> u32 {
        self.entries() - self.outstanding()
    }

    /// Requests put that have no response yet.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        self.requests.next().wrapping_sub(self.responses.next())
    }

    /// Puts a read, write, flush or barrier with up to 11 segments. Panics without [`FrontRing::room`].
    #[inline]
    pub fn put_rw(&mut self, header: &RequestHeader, segments: &[Segment]) {
        let at = self.slot();
        self.pages.write(at, header.as_bytes());
        self.pages.write(
            at + std::mem::size_of::<RequestHeader>(),
            segments.as_bytes(),
        );
        self.requests.advance();
    }

    /// Puts a request of another layout. Panics without [`FrontRing::room`].
    pub fn put<T: IntoBytes + Immutable>(&mut self, request: &T) {
        let at = self.slot();
        self.pages.write(at, request.as_bytes());
        self.requests.advance();
    }

    #[inline]
    fn slot(&self) -> usize {
        assert!(self.room() > 0, "the caller checks for room");
        ENTRIES + (self.requests.next() & self.mask) as usize * ENTRY_SIZE
    }

    /// Makes requests visible; true if the back end wants to be notified.
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.requests.publish(
            self.pages.atomic_u32(REQ_PROD),
            self.pages.atomic_u32(REQ_EVENT),
        )
    }

    /// Takes the next response, a private copy. The peer wrote its id: check it.
    #[inline]
    pub fn take(&mut self) -> Result<Option<Response>, RingBroken> {
        if self.responses.known() == 0 {
            let limit = self.outstanding();
            let found = self
                .responses
                .refresh(self.pages.atomic_u32(RSP_PROD), limit)?;
            if found == 0 {
                return Ok(None);
            }
        }
        let mut response = Response::new_zeroed();
        let at = ENTRIES + (self.responses.next() & self.mask) as usize * ENTRY_SIZE;
        self.pages.read(at, response.as_mut_bytes());
        self.responses.advance();
        Ok(Some(response))
    }

    /// Asks to be notified of the next response; true if there is one already.
    pub fn arm(&mut self) -> bool {
        self.responses.arm(
            self.pages.atomic_u32(RSP_PROD),
            self.pages.atomic_u32(RSP_EVENT),
        )
    }
}
