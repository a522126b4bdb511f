//! State that the queues of a file volume share with its threads.

use super::blocking::BOUNCE_BYTES;
use super::layout::{Alignment, capacity_sectors, file_len};
use super::log::ErrorLog;
use super::swap::Swap;
use super::work_queues::WorkQueues;
use parking_lot::Mutex;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Capacity, DeviceEvent, EventHub, Op, Request, SECTOR};
use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Most buffers for unaligned data that are kept for reuse.
const KEPT_BOUNCES: usize = 2;

/// The shared state of a file volume. The hot path only loads from it. Each operation on the file holds a
/// reference, so the file stays open, and locked, until the last operation has ended.
pub(super) struct FileShared {
    pub(super) name: String,
    /// The one description that all data is read and written through: it has the locks.
    pub(super) file: Arc<OwnedFd>,
    /// The one that is synced.
    pub(super) sync_file: Arc<OwnedFd>,
    /// The two are separate descriptions, so that each gets its own report of a failed write-back.
    pub(super) syncs_apart: bool,
    pub(super) is_block_device: bool,
    pub(super) read_only: bool,
    /// The pages are the medium.
    pub(super) in_memory: bool,
    /// Where pages in memory may go.
    pub(super) swap: Swap,
    pub(super) direct: Option<Alignment>,
    pub(super) sector_bytes: u32,
    /// Never written to, so the system backs it with its one page of zeros.
    pub(super) zeros: pvblk_sys::Buffer,
    /// A write-back or a sync failed: flushes can't be believed any more.
    pub(super) data_lost: AtomicBool,
    pub(super) log: ErrorLog,
    pub(super) capacity: Capacity,
    pub(super) events: EventHub,
    /// Length in bytes when it was looked at last; 0 for a block device.
    pub(super) known_bytes: AtomicU64,
    /// Reads, writes without waiting can be tried.
    pub(super) tries: [AtomicBool; 2],
    pub(super) work_queues: WorkQueues,
    pub(super) bounces: Mutex<Vec<Bounce>>,
}

/// A buffer for data whose address O_DIRECT doesn't take, and its place on the bill.
pub(super) type Bounce = (pvblk_sys::Buffer, Gauge);

impl FileShared {
    /// True if it is worth trying `op` without waiting.
    #[inline]
    pub(super) fn tries(&self, op: Op) -> bool {
        self.tries[usize::from(op != Op::Read)].load(Ordering::Relaxed)
    }

    /// The file can't tell whether `op` would wait.
    #[cold]
    pub(super) fn try_no_more(&self, op: Op) {
        self.tries[usize::from(op != Op::Read)].store(false, Ordering::Relaxed);
    }

    /// `fdatasync`.
    pub(super) fn sync(&self) -> io::Result<()> {
        loop {
            match rustix::fs::fdatasync(&self.sync_file) {
                Err(Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }

    /// False if the write would extend a file again that another program has cut: it is behind the capacity,
    /// or behind the file's present end while the file is shorter than it was known to be.
    pub(super) fn may_write(&self, request: &Request) -> bool {
        if request.end() > self.capacity.sectors() {
            return false;
        }
        if self.is_block_device {
            return true;
        }
        self.present_bytes()
            .map_or(true, |bytes| self.fits(request, bytes))
    }

    /// The file's length as the kernel knows it. Never waits for the medium, or for a server.
    pub(super) fn present_bytes(&self) -> Result<u64, Errno> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        Ok(rustix::fs::statx(&*self.file, c"", flags, StatxFlags::SIZE)?.stx_size)
    }

    /// As [`FileShared::may_write`] of a file that has `bytes` bytes.
    pub(super) fn fits(&self, request: &Request, bytes: u64) -> bool {
        bytes >= self.known_bytes.load(Ordering::Relaxed) || request.end() * SECTOR <= bytes
    }

    /// Asks for the size and raises an event if it has changed.
    pub(super) fn look(&self) -> Result<(), Errno> {
        let file = self.file.as_fd();
        let bytes = if self.is_block_device {
            0
        } else {
            file_len(file)?
        };
        let sectors = capacity_sectors(
            file,
            self.is_block_device,
            self.sector_bytes,
            self.read_only,
        )?;
        // A larger one counts when it may be written to, a smaller one before the old length is forgotten.
        if bytes > self.known_bytes.load(Ordering::Relaxed) {
            self.known_bytes.store(bytes, Ordering::Relaxed);
        }
        if self.capacity.set(sectors) {
            self.events.raise(DeviceEvent::Resized { sectors });
        }
        self.known_bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// The file was found to be shorter than it was: [`FileShared::look`], on a thread that may wait.
    #[cold]
    pub(super) fn look_soon(self: &Arc<FileShared>) {
        let shared = Arc::clone(self);
        let look = move || {
            if let Err(e) = shared.look() {
                shared.log_text("asking for its size", &e.into());
            }
        };
        let _ = self.work_queues.threads().run(Box::new(look));
    }

    pub(super) fn take_bounce(&self) -> io::Result<Bounce> {
        if let Some(bounce) = self.bounces.lock().pop() {
            return Ok(bounce);
        }
        let buffer = pvblk_sys::Buffer::anonymous(BOUNCE_BYTES).map_err(io::Error::other)?;
        let owner = format!("{}: bounce buffer", self.name);
        let gauge = Gauge::fixed(owner, MemoryKind::Anonymous, buffer.len() as u64);
        Ok((buffer, gauge))
    }

    pub(super) fn put_bounce(&self, bounce: Bounce) {
        let mut kept = self.bounces.lock();
        if kept.len() < KEPT_BOUNCES {
            kept.push(bounce);
        }
    }

    pub(super) fn log(&self, request: &Request, e: &io::Error) {
        self.log.warn(&self.name, &describe(request), e);
    }

    pub(super) fn log_text(&self, what: &str, e: &io::Error) {
        self.log.warn(&self.name, what, e);
    }

    pub(super) fn lose_data(&self) {
        if !self.data_lost.swap(true, Ordering::AcqRel) {
            tracing::error!(
                "{}: writing data back failed; every flush fails until the volume is opened anew",
                self.name
            );
        }
    }
}

fn describe(request: &Request) -> String {
    format!(
        "{:?} of {} sectors at {}",
        request.op, request.sectors, request.sector
    )
}
