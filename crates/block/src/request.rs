//! A request and its completion.

use crate::queue::LostList;
use pvblk_sys::{Buffer, total_len};
use std::sync::Arc;

/// Bytes of a sector: the unit of all addresses and lengths here (blkif.h: `sector_number` is always in 512-byte units).
pub const SECTOR: u64 = 512;
/// log2 of [`SECTOR`].
pub const SECTOR_SHIFT: u32 = 9;

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Fills the buffers from the device.
    Read,
    /// Stores the buffers on the device.
    Write,
    /// Makes every write stable that completed before this request was submitted.
    Flush,
    /// The sectors are no longer needed; reads return anything until they are written.
    Discard,
    /// Makes the sectors read as zeros.
    WriteZeroes,
}

impl Op {
    /// True if the operation changes the device's contents.
    pub fn is_write(self) -> bool {
        matches!(self, Op::Write | Op::Discard | Op::WriteZeroes)
    }

    /// True if the operation carries data in buffers.
    pub fn has_data(self) -> bool {
        matches!(self, Op::Read | Op::Write)
    }
}

bitflags::bitflags! {
    /// Options of a request.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct RequestFlags: u8 {
        /// Write, write-zeroes: stable at completion (force unit access).
        const FUA = 1;
        /// Discard: the old data must be unreadable afterwards (BLKIF_DISCARD_SECURE).
        const SECURE = 2;
        /// Write-zeroes: keep the space allocated (NBD_CMD_FLAG_NO_HOLE).
        const NO_UNMAP = 4;
        /// Write: the submitter promises not to change the buffers before completion, so that
        /// a device which computes parity from them may skip its snapshot.
        const STABLE_BUFFERS = 8;
        /// Write: flush first, then write (blkif FLUSH_DISKCACHE with data). Request sources use it; the back
        /// end turns it into two requests, so devices never see it.
        const PREFLUSH = 16;
        /// Write or flush: all earlier writes of the device complete before, all later ones start after
        /// (blkif WRITE_BARRIER). As with `PREFLUSH`, devices never see it.
        const BARRIER = 32;
        /// Write of one block of which a part is to stay as it is: the first `scratch & 0xffff` bytes and the
        /// last `scratch >> 16`. No other request of the disk runs while the block is read and written. As
        /// with `PREFLUSH`, devices never see it.
        const PARTIAL = 64;
    }
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The request succeeded.
    Ok,
    /// The device failed, or lost the request.
    IoError,
    /// The device doesn't know this operation.
    Unsupported,
    /// No space left on the backing.
    NoSpace,
    /// The device is read-only.
    ReadOnly,
    /// The request is outside the device, unaligned or too long, or its buffers don't match its
    /// length.
    Invalid,
}

/// One request. Submitters keep requests and use them again, so that the hot path allocates nothing.
///
/// While a device owns it (between [`crate::Queue::submit`] and [`crate::Queue::poll`]) it must not be
/// dropped: that is a bug which panics in debug builds and completes with [`Status::IoError`] in release builds.
#[derive(Debug)]
pub struct Request {
    pub op: Op,
    pub flags: RequestFlags,
    /// First sector (512 B).
    pub sector: u64,
    /// Length in sectors (512 B); 0 for a flush.
    pub sectors: u64,
    /// Data of a read or write, in order; a device may take and must return them unchanged.
    pub buffers: Vec<Buffer>,
    /// The submitter's own mark; a device must return it unchanged.
    pub tag: u64,
    /// The mark of a device that splits or remaps the request; the submitter doesn't read it.
    pub scratch: u64,
    /// Time at which a lane of the back end took the request from its source, in [`pvblk_sys::ticks`]; a device must return it unchanged.
    pub taken: u64,
    /// Trace hooks record this request ([`crate::trace`]). A layer that makes requests of its own for this one copies it to them.
    pub followed: bool,
    /// True while a device owns the request.
    pub(crate) in_flight: bool,
    /// The list of the queue that the request was last submitted to, for the case that a device drops it. It
    /// is kept over reuse, so that the hot path touches no shared counter.
    pub(crate) lost: Option<Arc<LostList>>,
}

impl Request {
    /// An empty request to be filled in.
    pub fn new(op: Op, sector: u64, sectors: u64, tag: u64) -> Box<Request> {
        Box::new(Request {
            op,
            flags: RequestFlags::empty(),
            sector,
            sectors,
            buffers: Vec::new(),
            tag,
            scratch: 0,
            taken: 0,
            followed: false,
            in_flight: false,
            lost: None,
        })
    }

    /// A read or write of `buffers` at `sector`; their lengths add up to the request's.
    pub fn with_buffers(op: Op, sector: u64, buffers: Vec<Buffer>, tag: u64) -> Box<Request> {
        let sectors = total_len(&buffers) as u64 / SECTOR;
        let mut r = Request::new(op, sector, sectors, tag);
        r.buffers = buffers;
        r
    }

    /// Sets everything except the buffers, for the next use.
    #[inline]
    pub fn reset(&mut self, op: Op, flags: RequestFlags, sector: u64, sectors: u64, tag: u64) {
        self.op = op;
        self.flags = flags;
        self.sector = sector;
        self.sectors = sectors;
        self.tag = tag;
        self.scratch = 0;
        self.followed = false;
    }

    /// First sector after the request; saturates.
    pub fn end(&self) -> u64 {
        self.sector.saturating_add(self.sectors)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.in_flight
            && let Some(lost) = &self.lost
        {
            lost.push(self.tag);
            if cfg!(debug_assertions) && !std::thread::panicking() && !lost.is_closed() {
                panic!("a device dropped a request in flight (tag {})", self.tag);
            }
        }
    }
}

/// A request that has completed.
#[derive(Debug)]
pub struct Completion {
    /// The request, as it was submitted.
    pub request: Box<Request>,
    pub status: Status,
}
