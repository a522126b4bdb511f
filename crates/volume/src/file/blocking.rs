//! The engine that does each request when it is submitted, one system call after another.

use super::Shared;
use super::layout::Alignment;
use super::task::{Next, Step, Task, allocate_mode};
use pvblk_block::{Op, Request, SECTOR, Status};
use pvblk_sys::{Buffer, fileio, total_len};
use std::io;
use std::os::fd::BorrowedFd;

/// Bytes of the buffer that unaligned data passes through.
pub(super) const BOUNCE_BYTES: usize = 128 << 10;

/// Does all of `request`. With `bounce`, data goes through that page-aligned buffer piece by piece,
/// for segments that O_DIRECT wouldn't take.
pub(super) fn execute(
    request: &Request,
    file: BorrowedFd<'_>,
    shared: &Shared,
    bounce: Option<&Buffer>,
) -> Status {
    let mut task = match Task::begin(request) {
        Ok(task) => task,
        Err(status) => return status,
    };
    loop {
        let result = take_step(&task, request, file, shared, bounce);
        if let Next::Done(status) = task.advance(request, result, false, shared) {
            return status;
        }
    }
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
    file: BorrowedFd<'_>,
    shared: &Shared,
    bounce: Option<&Buffer>,
) -> io::Result<u64> {
    let start = request.sector * SECTOR;
    let total = request.sectors * SECTOR;
    let at = start + task.done;
    match (task.step, bounce) {
        (Step::Data, None) => {
            if request.op == Op::Read {
                fileio::read_at(file, at, &request.buffers)?;
            } else {
                fileio::write_at(file, at, &request.buffers)?;
            }
            Ok(total_len(&request.buffers) as u64)
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
            fileio::write_at(file, at, std::slice::from_ref(&piece))?;
            Ok(piece.len() as u64)
        }
        (Step::Sync, _) => {
            rustix::fs::fdatasync(file)?;
            Ok(0)
        }
    }
}

/// The first `len` bytes of `buffer`, or all of it if it is shorter.
pub(super) fn part(buffer: &Buffer, len: u64) -> io::Result<Buffer> {
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
