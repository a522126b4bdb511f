//! io_uring on buffers: an operation owns its buffers until its completion.

mod reserve;

pub use reserve::reserve_rings;

use crate::{Buffer, EventFd};
use io_uring::{IoUring, opcode, types};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// An operation on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileOp {
    /// Fills the buffers from `offset`.
    Read {
        /// Bytes from the start of the file.
        offset: u64,
    },
    /// Writes the buffers at `offset`; with `durable` the data is on stable storage at completion (`RWF_DSYNC`).
    Write {
        /// Bytes from the start of the file.
        offset: u64,
        /// Force unit access.
        durable: bool,
    },
}

/// A completion: the token and the buffers of the operation, and the result of the system call.
#[derive(Debug)]
pub struct Completion {
    /// Token given to [`Uring::push`].
    pub token: u64,
    /// Bytes done, or the error.
    pub result: io::Result<u32>,
    /// Buffers given to [`Uring::push`].
    pub buffers: Vec<Buffer>,
}

/// Room for one operation in flight.
#[derive(Default)]
struct OperationSlot {
    token: u64,
    buffers: Vec<Buffer>,
    /// Reused, so that the hot path doesn't allocate.
    iov: Vec<libc::iovec>,
    busy: bool,
}

/// A pair of submission and completion queues for one file, owned by one thread at a time.
pub struct Uring {
    /// Taken once, in `drop`.
    ring: ManuallyDrop<IoUring>,
    file: Arc<OwnedFd>,
    slots: Vec<OperationSlot>,
    free: Vec<u32>,
    unsubmitted: usize,
    /// The kernel polls the event of [`Uring::watch`].
    watches: bool,
}

/// `user_data` of the poll of [`Uring::watch`]; never the index of an operation.
const WATCHED_EVENT: u64 = u64::MAX;

// SAFETY: the raw pointers inside (`iov`) point into regions that `buffers` keep mapped; nothing is
// bound to a thread.
unsafe impl Send for Uring {}

impl Uring {
    /// Creates a ring for up to `entries` operations in flight on `file`, or takes one of [`reserve_rings`], which may have fewer.
    pub fn new(file: Arc<OwnedFd>, entries: u32) -> io::Result<Uring> {
        let entries = entries.next_power_of_two().clamp(1, 4096);
        let ring = match reserve::take() {
            Some(reserved) => reserved?,
            None => IoUring::builder().setup_clamp().build(entries)?,
        };
        Ok(Uring::with(ring, file, entries))
    }

    fn with(ring: IoUring, file: Arc<OwnedFd>, entries: u32) -> Uring {
        let room = (ring.params().sq_entries()).min(entries);
        Uring {
            ring: ManuallyDrop::new(ring),
            file,
            slots: (0..room).map(|_| OperationSlot::default()).collect(),
            free: (0..room).rev().collect(),
            unsubmitted: 0,
            watches: false,
        }
    }

    /// Operations that can be pushed now.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Makes the ring's descriptor readable once `event` is, until [`Uring::reap`] has seen it; the caller drains the
    /// event. Returns false if there is no room for it now. Takes effect at the next [`Uring::submit`].
    pub fn watch(&mut self, event: &EventFd) -> bool {
        if !self.watches {
            let entry = opcode::PollAdd::new(types::Fd(event.number()), libc::POLLIN as u32)
                .build()
                .user_data(WATCHED_EVENT);
            // SAFETY: the entry names no memory. The kernel takes a reference to the event's file.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                return false;
            }
            self.watches = true;
            self.unsubmitted += 1;
        }
        true
    }

    /// Operations in flight or not yet submitted; a watched event doesn't count.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Bytes of the queues that a ring of `entries` operations shares with the kernel.
    pub fn mapped_bytes(entries: u32) -> usize {
        let entries = entries.next_power_of_two().clamp(1, 4096) as usize;
        // struct io_uring_sqe is 64 bytes, io_uring_cqe 16 with twice as many, the index array 4.
        let page = |n: usize| n.div_ceil(crate::PAGE_SIZE) * crate::PAGE_SIZE;
        page(entries * 64) + page(entries * 2 * 16 + entries * 4 + 128)
    }

    /// Queues an operation that doesn't wait for the medium: where it would have to wait, it fails with `EAGAIN` or
    /// `EOPNOTSUPP` (`RWF_NOWAIT`). So the kernel uses none of its worker threads, which all rings of a submitting
    /// thread share and which are few. Gives the buffers back if there is no room. The kernel sees the operation at
    /// the next [`Uring::submit`].
    pub fn push(
        &mut self,
        op: FileOp,
        buffers: Vec<Buffer>,
        token: u64,
    ) -> Result<(), Vec<Buffer>> {
        let Some(index) = self.free.pop() else {
            return Err(buffers);
        };
        let slot = &mut self.slots[index as usize];
        let by_kernel = matches!(op, FileOp::Read { .. });
        slot.iov.clear();
        slot.iov
            .extend(buffers.iter().map(|b| b.iovec(0, by_kernel)));
        slot.buffers = buffers;
        slot.token = token;
        slot.busy = true;
        let fd = types::Fd(self.file.as_raw_fd());
        let (iov, count) = (slot.iov.as_ptr(), slot.iov.len() as u32);
        let entry = match op {
            FileOp::Read { offset } if count == 1 => {
                let v = &slot.iov[0];
                opcode::Read::new(fd, v.iov_base.cast(), v.iov_len as u32)
                    .offset(offset)
                    .rw_flags(libc::RWF_NOWAIT)
                    .build()
            }
            FileOp::Read { offset } => opcode::Readv::new(fd, iov, count)
                .offset(offset)
                .rw_flags(libc::RWF_NOWAIT)
                .build(),
            FileOp::Write { offset, durable } => {
                let flags = if durable { libc::RWF_DSYNC } else { 0 } | libc::RWF_NOWAIT;
                if count == 1 {
                    let v = &slot.iov[0];
                    opcode::Write::new(fd, v.iov_base.cast(), v.iov_len as u32)
                        .offset(offset)
                        .rw_flags(flags)
                        .build()
                } else {
                    opcode::Writev::new(fd, iov, count)
                        .offset(offset)
                        .rw_flags(flags)
                        .build()
                }
            }
        }
        .user_data(u64::from(index));
        // SAFETY: the entry's pointers are `slot.iov` and the buffers it describes. The slot keeps
        // both, unmoved on the heap, until its completion is taken in `reap` (or leaked in `drop`).
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            // Can't happen: there are no more slots than entries, but losing a request would be worse.
            slot.busy = false;
            self.free.push(index);
            return Err(std::mem::take(&mut self.slots[index as usize].buffers));
        }
        self.unsubmitted += 1;
        Ok(())
    }

    /// Passes all pushed operations to the kernel in one system call.
    pub fn submit(&mut self) -> io::Result<()> {
        while self.unsubmitted > 0 {
            match self.ring.submit() {
                Ok(n) => {
                    self.unsubmitted = self.unsubmitted.saturating_sub(n);
                    if n == 0 {
                        break;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // The kernel is short of memory or its completion queue is full: try at the next call.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => break,
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Takes one completion, without blocking or a system call.
    #[inline]
    pub fn reap(&mut self) -> Option<Completion> {
        let mut entry = self.ring.completion().next()?;
        while entry.user_data() == WATCHED_EVENT {
            self.watches = false;
            entry = self.ring.completion().next()?;
        }
        let index = entry.user_data() as u32;
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.busy);
        slot.busy = false;
        let finished = Completion {
            token: slot.token,
            result: match entry.result() {
                n if n >= 0 => Ok(n as u32),
                e => Err(io::Error::from_raw_os_error(-e)),
            },
            buffers: std::mem::take(&mut slot.buffers),
        };
        self.free.push(index);
        Some(finished)
    }

    /// True if there is a completion to reap.
    pub fn is_ready(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }
}

impl AsFd for Uring {
    /// The descriptor is readable when there is a completion to reap.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns the descriptor and lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl Uring {
    /// Waits for the completion of all operations. `false` if that isn't possible; then the buffers still belong to
    /// the kernel.
    fn wait_for_all(&mut self) -> bool {
        let _ = self.submit();
        while self.in_flight() > 0 {
            if self.reap().is_some() {
                continue;
            }
            match self.ring.submit_and_wait(1) {
                Ok(n) => self.unsubmitted = self.unsubmitted.saturating_sub(n),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }
}

impl Drop for Uring {
    /// Waits for the completion of all operations, because their buffers may be unmapped right after. That takes as
    /// long as the medium takes: a thread that must not wait leaves the drop of a ring with operations in flight to
    /// another thread.
    fn drop(&mut self) {
        let is_quiet = self.wait_for_all();
        if !is_quiet {
            // The kernel may still write to the buffers: leak them rather than free them.
            std::mem::forget(std::mem::take(&mut self.slots));
        }
        // SAFETY: `self.ring` isn't used again, as the value is being dropped.
        let ring = unsafe { ManuallyDrop::take(&mut self.ring) };
        reserve::give_back(ring, is_quiet, self.watches);
    }
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(u: &mut Uring) -> Completion {
        loop {
            if let Some(f) = u.reap() {
                return f;
            }
            u.ring.submit_and_wait(1).unwrap();
        }
    }

    /// Runs one operation to its completion.
    fn once(u: &mut Uring, op: FileOp, buffers: Vec<Buffer>) -> Completion {
        u.push(op, buffers, 7).unwrap();
        u.submit().unwrap();
        wait(u)
    }

    #[test]
    fn write_and_read_back_or_would_wait() {
        let file = tempfile();
        let Ok(mut u) = Uring::new(Arc::new(file), 4) else {
            eprintln!("skipped: io_uring is not available here");
            return;
        };
        let b = Buffer::anonymous(8192).unwrap();
        b.write(0, b"first");
        b.write(4096, b"second");
        let parts = vec![b.slice(4096, 4096).unwrap(), b.slice(0, 4096).unwrap()];
        let op = FileOp::Write {
            offset: 8192,
            durable: true,
        };
        let f = once(&mut u, op, parts);
        assert_eq!((f.token, f.buffers.len()), (7, 2));
        let would_wait = |e: io::Error| {
            assert!(matches!(
                e.raw_os_error(),
                Some(libc::EAGAIN | libc::EOPNOTSUPP)
            ));
        };
        let written = f.result.map_err(would_wait).is_ok();
        let back = Buffer::anonymous(4096).unwrap();
        let f = once(&mut u, FileOp::Read { offset: 8192 }, vec![back.clone()]);
        if f.result.map_err(would_wait).is_ok() && written {
            assert_eq!(&back.slice(0, 6).unwrap().to_vec(), b"second");
        }
        for i in 0..4 {
            let op = FileOp::Read { offset: 0 };
            u.push(op, vec![back.clone()], i).unwrap();
        }
        let op = FileOp::Read { offset: 0 };
        assert!(u.push(op, vec![back.clone()], 9).is_err());
        drop(u); // waits for the four
    }

    fn tempfile() -> OwnedFd {
        let path = std::env::temp_dir().join(format!("pvblk-uring-{}", std::process::id()));
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .unwrap();
        std::fs::remove_file(path).unwrap();
        file.set_len(1 << 20).unwrap();
        file.into()
    }

    #[test]
    fn a_watched_event_makes_the_ring_readable() {
        let Ok(mut u) = Uring::new(Arc::new(tempfile()), 4) else {
            eprintln!("skipped: io_uring is not available here");
            return;
        };
        let poller = crate::Poller::new().unwrap();
        poller.add(u.as_fd(), 1, false).unwrap();
        let event = EventFd::new().unwrap();
        for _ in 0..3 {
            assert!(u.watch(&event) && u.watch(&event));
            u.submit().unwrap();
            let mut got = Vec::new();
            poller
                .wait(&mut got, Some(std::time::Duration::ZERO))
                .unwrap();
            assert!(got.is_empty());
            event.notify();
            poller
                .wait(&mut got, Some(std::time::Duration::from_secs(60)))
                .unwrap();
            assert_eq!(got.len(), 1);
            assert!(u.reap().is_none());
            assert!(event.drain());
        }
        assert!(u.watch(&event));
        u.submit().unwrap();
        drop(u); // doesn't wait for the event
    }
}
