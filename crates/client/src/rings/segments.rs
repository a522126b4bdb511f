//! From buffers to blkif segments: pages of our memory by grant, other memory by a bounce.

use super::frames::Frames;
use super::parts::Granter;
use pvblk_block::{Buffer, Request};
use pvblk_protocol::blkif::wire::Segment;
use pvblk_sys::{PAGE_SIZE, gather, scatter, total_len};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Our memory as the back end sees it.
pub struct GrantedMemory {
    granter: Arc<dyn Granter>,
    pub frames: Arc<Frames>,
    /// Reference of each frame, 0 if it has none. Filled on first use and kept, where grants are persistent.
    persistent: Option<Vec<AtomicU32>>,
}

impl GrantedMemory {
    /// With `persistent`, a frame that was granted once stays granted for the life of the connection.
    pub fn new(granter: Arc<dyn Granter>, frames: Arc<Frames>, persistent: bool) -> GrantedMemory {
        let count = granter.memory().len() / PAGE_SIZE;
        GrantedMemory {
            frames,
            persistent: persistent.then(|| (0..count).map(|_| AtomicU32::new(0)).collect()),
            granter,
        }
    }

    /// Bytes of the table of references.
    pub fn table_bytes(&self) -> usize {
        self.persistent
            .as_ref()
            .map_or(0, |t| t.len() * std::mem::size_of::<AtomicU32>())
    }

    /// A reference to a frame, `None` if the grant table is full. A frame belongs to one owner at a
    /// time, so two threads never grant the same one.
    #[inline]
    pub fn grant(&self, frame: u32, read_only: bool) -> Option<u32> {
        let Some(table) = &self.persistent else {
            return self.granter.grant(frame, read_only);
        };
        let known = table[frame as usize].load(Ordering::Relaxed);
        if known != 0 {
            return Some(known);
        }
        // Kept for both directions, so never read-only.
        let gref = self.granter.grant(frame, false)?;
        table[frame as usize].store(gref, Ordering::Relaxed);
        Some(gref)
    }

    /// The request that used the reference is answered.
    #[inline]
    pub fn done(&self, gref: u32) {
        if self.persistent.is_none() {
            self.granter.end(gref);
        }
    }

    /// True if grants end with their request.
    pub fn is_transient(&self) -> bool {
        self.persistent.is_none()
    }

    /// True if the back end reaches all of the request's data without a bounce.
    #[inline]
    pub fn reaches(&self, request: &Request) -> bool {
        request.buffers.iter().all(|b| {
            Arc::ptr_eq(b.region(), self.frames.memory()) && b.offset().is_multiple_of(512)
        })
    }

    /// Appends the segments of a buffer in our memory; false if the grant table is full.
    #[inline]
    pub fn append(&self, buffer: &Buffer, read_only: bool, out: &mut Vec<Segment>) -> bool {
        let mut at = buffer.offset();
        let end = at + buffer.len();
        while at < end {
            let frame = (at / PAGE_SIZE) as u32;
            let page_end = (at / PAGE_SIZE + 1) * PAGE_SIZE;
            let upto = end.min(page_end);
            let Some(gref) = self.grant(frame, read_only) else {
                return false;
            };
            out.push(Segment {
                gref,
                first_sect: (at % PAGE_SIZE / 512) as u8,
                last_sect: ((upto - 1) % PAGE_SIZE / 512) as u8,
                pad: 0,
            });
            at = upto;
        }
        true
    }
}

/// Copies the data of `requests` to or from a bounce run.
pub fn copy_bounce<'a>(
    requests: impl Iterator<Item = &'a Box<Request>>,
    bounce: &Buffer,
    to_bounce: bool,
) {
    let region = bounce.region();
    let mut at = bounce.offset();
    let copy = if to_bounce { gather } else { scatter };
    for request in requests {
        copy(&request.buffers, region, at);
        at += total_len(&request.buffers);
    }
}
