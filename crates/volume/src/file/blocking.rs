//! A request's system calls, each until its end: on the disk's threads, and on those of its users where the file's pages are the medium.

use super::layout::Alignment;
use super::shared::FileShared;
use super::task::{Next, Step, Task, allocate_mode};
use pvblk_block::{Op, Request, RequestFlags, SECTOR, Status};
use pvblk_sys::{Buffer, fileio};
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

/// Bytes of the buffer that unaligned data passes through.
pub(super) const BOUNCE_BYTES: usize = 128 << 10;

/// Before a call that the kernel couldn't take is tried again.
const PAUSE: Duration = Duration::from_millis(1);

/// Where a request is after its system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// At its end.
    Done(Status),
    /// Before its `fdatasync`.
    Sync,
}

/// Takes all steps of `request` from where `task` is, but the last `fdatasync` if other requests can share it. With `bounced`, data goes
/// through a page-aligned buffer piece by piece, for segments that O_DIRECT wouldn't take.
pub(super) fn execute(
    request: &Request,
    task: &mut Task,
    bounced: bool,
    shared: &FileShared,
) -> Outcome {
    let durable = durable_write(request, shared) && !bounced;
    let mut bounce = None;
    loop {
        if task.step == Step::Sync && !shared.in_memory {
            return Outcome::Sync;
        }
        if bounced && task.step == Step::Data && bounce.is_none() {
            match shared.take_bounce() {
                Ok(buffer) => bounce = Some(buffer),
                Err(e) => {
                    shared.log_text("no memory for a bounce buffer", &e);
                    return Outcome::Done(Status::IoError);
                }
            }
        }
        let writes = request.op.is_write() && matches!(task.step, Step::Data | Step::Zeros);
        if writes && !shared.may_write(request) {
            return Outcome::Done(Status::Invalid);
        }
        let piece = bounce.as_ref().map(|(buffer, _)| buffer);
        let result = take_step(task, request, shared, piece, durable);
        if let Err(e) = &result
            && e.kind() == io::ErrorKind::WouldBlock
        {
            std::thread::sleep(PAUSE);
        }
        if let Next::Done(status) = task.advance(request, result, durable, shared) {
            bounce.into_iter().for_each(|b| shared.put_bounce(b));
            return Outcome::Done(status);
        }
    }
}

/// True if the request's write is on stable storage at its end, without a step of its own for that.
pub(super) fn durable_write(request: &Request, shared: &FileShared) -> bool {
    request.flags.contains(RequestFlags::FUA) && shared.syncs_apart
}

/// True if every segment is aligned as `alignment` asks.
pub(super) fn is_aligned(buffers: &[Buffer], alignment: Alignment) -> bool {
    buffers.iter().all(|segment| {
        segment.offset().is_multiple_of(alignment.address)
            && segment.len().is_multiple_of(alignment.length)
    })
}

fn take_step(
    task: &Task,
    request: &Request,
    shared: &FileShared,
    bounce: Option<&Buffer>,
    durable: bool,
) -> io::Result<u64> {
    let start = request.sector * SECTOR;
    let total = request.sectors * SECTOR;
    let at = start + task.done;
    let file = shared.file.as_fd();
    match (task.step, bounce) {
        (Step::Data, None) => {
            let (buffers, skip) = (&request.buffers, task.done as usize);
            let done = match request.op {
                Op::Read => fileio::read_some(file, at, buffers, skip, true)?,
                _ => fileio::write_some(file, at, buffers, skip, durable)?,
            };
            Ok(done as u64)
        }
        (Step::Data, Some(bounce)) => {
            let piece = part(bounce, total - task.done)?;
            let window = std::slice::from_ref(&piece);
            if request.op == Op::Read {
                fileio::read_at(file, at, window)?;
                copy(&request.buffers, task.done as usize, &piece, false);
            } else {
                copy(&request.buffers, task.done as usize, &piece, true);
                fileio::write_at(file, at, window)?;
            }
            Ok(piece.len() as u64)
        }
        (Step::Allocate, _) => {
            rustix::fs::fallocate(file, allocate_mode(request), start, total)?;
            Ok(total)
        }
        (Step::Zeros, _) => {
            let piece = part(&shared.zeros, total - task.done)?;
            let done = fileio::write_some(file, at, std::slice::from_ref(&piece), 0, false)?;
            Ok(done as u64)
        }
        (Step::Sync, _) => {
            shared.sync()?;
            Ok(0)
        }
    }
}

/// The first `len` bytes of `buffer`, or all of it if it is shorter.
fn part(buffer: &Buffer, len: u64) -> io::Result<Buffer> {
    let len = buffer.len().min(usize::try_from(len).unwrap_or(usize::MAX));
    buffer
        .slice(0, len)
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Copies between `piece` and the segments, from `skip` bytes into them.
fn copy(segments: &[Buffer], mut skip: usize, piece: &Buffer, to_piece: bool) {
    let mut at = 0;
    for segment in segments {
        let from = skip.min(segment.len());
        skip -= from;
        let len = (segment.len() - from).min(piece.len() - at);
        if let Some(window) = segment.slice(from, len).filter(|_| len > 0) {
            if to_piece {
                window.copy_to(piece.region(), piece.offset() + at);
            } else {
                window.copy_from(piece.region(), piece.offset() + at);
            }
            at += len;
        }
    }
}
