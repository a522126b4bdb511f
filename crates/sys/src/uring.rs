//! io_uring on buffers: an operation owns its buffers until the kernel is done with them.

use crate::Buffer;
use io_uring::{IoUring, opcode, types};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// What to do with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileOp {
    /// Fill the buffers from `offset` (bytes).
    Read {
        /// Bytes from the start of the file.
        offset: u64,
    },
    /// Write the buffers at `offset` (bytes); with `durable` the data is on stable storage at completion (`RWF_DSYNC`).
    Write {
        /// Bytes from the start of the file.
        offset: u64,
        /// Force unit access.
        durable: bool,
    },
    /// `fdatasync`.
    Sync,
    /// `fallocate(mode, offset, len)`, for discard and write-zeroes.
    Allocate {
        /// `FALLOC_FL_*`.
        mode: i32,
        /// Bytes from the start of the file.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// A finished operation: the token and the buffers it was given, and the system call's result.
#[derive(Debug)]
pub struct Finished {
    /// As given to [`Uring::push`].
    pub token: u64,
    /// Bytes done, or the error.
    pub result: io::Result<u32>,
    /// As given to [`Uring::push`].
    pub buffers: Vec<Buffer>,
}

#[derive(Default)]
struct Slot {
    token: u64,
    buffers: Vec<Buffer>,
    /// Kept per slot so that the hot path doesn't allocate.
    iov: Vec<libc::iovec>,
    busy: bool,
}

/// One submission and completion queue pair for one file, owned by one thread at a time.
pub struct Uring {
    ring: IoUring,
    file: Arc<OwnedFd>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    unsubmitted: usize,
}

// SAFETY: the raw pointers inside (`iov`) point into regions that `buffers` keep mapped; nothing is
// bound to a thread.
unsafe impl Send for Uring {}

impl Uring {
    /// A ring with room for `entries` operations in flight on `file`.
    pub fn new(file: Arc<OwnedFd>, entries: u32) -> io::Result<Uring> {
        let entries = entries.next_power_of_two().clamp(1, 4096);
        let ring = IoUring::builder().setup_clamp().build(entries)?;
        let room = (ring.params().sq_entries()).min(entries);
        Ok(Uring {
            ring,
            file,
            slots: (0..room).map(|_| Slot::default()).collect(),
            free: (0..room).rev().collect(),
            unsubmitted: 0,
        })
    }

    /// Operations that can still be pushed.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Operations in flight or not yet submitted.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Bytes of the rings that this process shares with the kernel.
    pub fn mapped_bytes(entries: u32) -> usize {
        let entries = entries.next_power_of_two().clamp(1, 4096) as usize;
        // struct io_uring_sqe is 64 bytes, io_uring_cqe 16 with twice as many, the index array 4.
        let page = |n: usize| n.div_ceil(crate::PAGE_SIZE) * crate::PAGE_SIZE;
        page(entries * 64) + page(entries * 2 * 16 + entries * 4 + 128)
    }

    /// Queues an operation. Gives the buffers back if there is no room. Nothing reaches the kernel
    /// before [`Uring::submit`].
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
                    .build()
            }
            FileOp::Read { offset } => opcode::Readv::new(fd, iov, count).offset(offset).build(),
            FileOp::Write { offset, durable } => {
                let flags = if durable { libc::RWF_DSYNC } else { 0 };
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
            FileOp::Sync => opcode::Fsync::new(fd)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
            FileOp::Allocate { mode, offset, len } => opcode::Fallocate::new(fd, len)
                .offset(offset)
                .mode(mode)
                .build(),
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

    /// Hands everything pushed to the kernel in one system call.
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

    /// Takes one finished operation, without blocking or a system call.
    #[inline]
    pub fn reap(&mut self) -> Option<Finished> {
        let entry = self.ring.completion().next()?;
        let index = entry.user_data() as u32;
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.busy);
        slot.busy = false;
        let finished = Finished {
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

    /// True if something can be reaped.
    pub fn is_ready(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }
}

impl AsFd for Uring {
    /// Readable when something can be reaped.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns the descriptor and lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl Drop for Uring {
    /// Waits until the kernel is done with every buffer: they may be unmapped right after.
    fn drop(&mut self) {
        let _ = self.submit();
        while self.in_flight() > self.unsubmitted {
            if self.reap().is_some() {
                continue;
            }
            match self.ring.submit_and_wait(1) {
                Ok(n) => self.unsubmitted = self.unsubmitted.saturating_sub(n),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    // The kernel may still write to the buffers: leak them rather than free them.
                    std::mem::forget(std::mem::take(&mut self.slots));
                    return;
                }
            }
        }
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

    fn wait(u: &mut Uring) -> Finished {
        loop {
            if let Some(f) = u.reap() {
                return f;
            }
            u.ring.submit_and_wait(1).unwrap();
        }
    }

    #[test]
    fn write_sync_and_read_back() {
        let fd = Arc::new(crate::create_sealed("t", 1 << 20).unwrap());
        let Ok(mut u) = Uring::new(fd, 4) else {
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
        u.push(op, parts, 7).unwrap();
        u.submit().unwrap();
        let f = wait(&mut u);
        assert_eq!((f.token, f.result.unwrap(), f.buffers.len()), (7, 8192, 2));
        u.push(FileOp::Sync, vec![], 8).unwrap();
        let back = Buffer::anonymous(4096).unwrap();
        u.push(FileOp::Read { offset: 8192 }, vec![back.clone()], 9)
            .unwrap();
        u.submit().unwrap();
        let tokens = [wait(&mut u).token, wait(&mut u).token];
        assert!(tokens.contains(&8) && tokens.contains(&9));
        assert_eq!(&back.slice(0, 6).unwrap().to_vec(), b"second");
        for i in 0..4 {
            u.push(FileOp::Sync, vec![], i).unwrap();
        }
        assert!(u.push(FileOp::Sync, vec![], 9).is_err());
        drop(u); // waits for the four
    }
}
