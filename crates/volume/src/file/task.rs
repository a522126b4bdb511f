//! The steps of a request on a file, whichever engine takes them.

use super::shared::FileShared;
use pvblk_block::{Op, Request, RequestFlags, SECTOR, Status};
use pvblk_sys::fileio;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::io;
use std::sync::atomic::Ordering;

/// The system call that a request needs now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Read or write the buffers, from `done` bytes on.
    Data,
    /// `fallocate`.
    Allocate,
    /// Write zeros, from `done` bytes on, where `fallocate` can't.
    Zeros,
    /// `fdatasync`.
    Sync,
}

/// The progress of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub(super) step: Step,
    /// Bytes that this step has done.
    pub(super) done: u64,
}

/// The continuation after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Take the task's step, which may be another one now.
    Step,
    /// The request is done.
    Done(Status),
}

impl Task {
    /// The first step, or the status of a request that needs none.
    pub(super) fn begin(request: &Request) -> Result<Task, Status> {
        let step = match request.op {
            Op::Read | Op::Write => Step::Data,
            Op::Flush => Step::Sync,
            // A hole's old blocks stay on the medium: nothing here can promise that they are gone.
            Op::Discard if request.flags.contains(RequestFlags::SECURE) => {
                return Err(Status::Unsupported);
            }
            Op::Discard | Op::WriteZeroes => Step::Allocate,
        };
        Ok(Task { step, done: 0 })
    }

    /// Goes on from the result of a step: bytes done, or an error. `durable_writes` says that a
    /// write with FUA is on stable storage without a `Sync` step.
    pub(super) fn advance(
        &mut self,
        request: &Request,
        result: io::Result<u64>,
        durable_writes: bool,
        shared: &FileShared,
    ) -> Next {
        let bytes = match result {
            Ok(bytes) => bytes,
            Err(e) => return self.fail(request, &e, shared),
        };
        self.done += bytes;
        let total = request.sectors * SECTOR;
        let finished = match self.step {
            Step::Data | Step::Zeros => {
                if self.done < total && request.op == Op::Read && self.at_end(bytes, shared) {
                    fileio::zero_from(&request.buffers, self.done as usize);
                    return Next::Done(Status::Ok);
                }
                if self.done < total && bytes == 0 {
                    shared.log(request, &io::ErrorKind::WriteZero.into());
                    return Next::Done(Status::IoError);
                }
                self.done >= total
            }
            Step::Allocate => true,
            Step::Sync => {
                // Somebody's data was lost, and no flush can say any more that all is well.
                let lost = request.op == Op::Flush && shared.data_lost.load(Ordering::Acquire);
                return Next::Done(if lost { Status::IoError } else { Status::Ok });
            }
        };
        if !finished {
            return Next::Step;
        }
        let already_durable = durable_writes && self.step == Step::Data;
        if request.flags.contains(RequestFlags::FUA)
            && matches!(request.op, Op::Write | Op::WriteZeroes)
            && !already_durable
        {
            self.step = Step::Sync;
            return Next::Step;
        }
        Next::Done(Status::Ok)
    }

    /// True if a short read met the end of the file. With O_DIRECT the rest of a short read can
    /// begin between two sectors; only the end of the file does that.
    fn at_end(&self, bytes: u64, shared: &FileShared) -> bool {
        bytes == 0
            || shared
                .direct
                .is_some_and(|a| !self.done.is_multiple_of(a.length as u64))
    }

    fn fail(&mut self, request: &Request, e: &io::Error, shared: &FileShared) -> Next {
        match Errno::from_io_error(e) {
            Some(Errno::INTR | Errno::AGAIN) => return Next::Step,
            Some(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV)
                if self.step == Step::Allocate && request.op == Op::Discard =>
            {
                return Next::Done(Status::Unsupported);
            }
            // A block device that another program holds refuses while it has the pages in its
            // cache.
            // A discard may do nothing.
            Some(Errno::BUSY) if self.step == Step::Allocate && request.op == Op::Discard => {
                return Next::Done(Status::Ok);
            }
            Some(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV | Errno::BUSY)
                if self.step == Step::Allocate =>
            {
                *self = Task {
                    step: Step::Zeros,
                    done: 0,
                };
                return Next::Step;
            }
            _ => {}
        }
        shared.log(request, e);
        let durable_write = self.step == Step::Data && request.flags.contains(RequestFlags::FUA);
        let lost = match self.step {
            Step::Sync => true,
            // The write's own sync may have taken the one report of a failed write-back.
            _ => durable_write && Errno::from_io_error(e) == Some(Errno::IO),
        };
        if lost {
            shared.lose_data();
        }
        Next::Done(if self.step == Step::Sync {
            Status::IoError
        } else {
            status_of(e)
        })
    }
}

/// The mode of `fallocate` for a discard or write-zeroes.
pub(super) fn allocate_mode(request: &Request) -> FallocateFlags {
    let keeps_space =
        request.op == Op::WriteZeroes && request.flags.contains(RequestFlags::NO_UNMAP);
    FallocateFlags::KEEP_SIZE
        | if keeps_space {
            FallocateFlags::ZERO_RANGE
        } else {
            FallocateFlags::PUNCH_HOLE
        }
}

fn status_of(e: &io::Error) -> Status {
    match Errno::from_io_error(e) {
        Some(Errno::NOSPC | Errno::DQUOT) => Status::NoSpace,
        Some(Errno::OPNOTSUPP) => Status::Unsupported,
        _ => Status::IoError,
    }
}

#[cfg(test)]
mod tests;
