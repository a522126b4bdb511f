//! Rings that were made beforehand, for a process that may make none any more (`io_uring_setup` is refused in a sandbox).

use super::WATCHED_EVENT;
use io_uring::register::Restriction;
use io_uring::{IoUring, opcode};
use std::io;
use std::sync::Mutex;

/// Entries of a reserved ring: as many as a queue of a file uses at most.
const ENTRIES: u32 = 256;

/// `None`: nothing was reserved, and rings are made when they are needed.
static RESERVE: Mutex<Option<Vec<IoUring>>> = Mutex::new(None);

/// Makes `count` rings of 256 entries, from which alone rings are taken from now on. The kernel lets them read, write and poll descriptors of this process,
/// and nothing else. Returns how many could be made.
pub fn reserve_rings(count: usize) -> usize {
    let rings: Vec<IoUring> = std::iter::repeat_with(restricted)
        .take(count)
        .map_while(Result::ok)
        .collect();
    let made = rings.len();
    *lock() = Some(rings);
    made
}

fn lock() -> std::sync::MutexGuard<'static, Option<Vec<IoUring>>> {
    RESERVE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn restricted() -> io::Result<IoUring> {
    let ring: IoUring = IoUring::builder().setup_r_disabled().build(ENTRIES)?;
    let mut allowed = [
        Restriction::sqe_op(opcode::Read::CODE),
        Restriction::sqe_op(opcode::Readv::CODE),
        Restriction::sqe_op(opcode::Write::CODE),
        Restriction::sqe_op(opcode::Writev::CODE),
        Restriction::sqe_op(opcode::PollAdd::CODE),
        Restriction::sqe_op(opcode::PollRemove::CODE),
    ];
    ring.submitter().register_restrictions(&mut allowed)?;
    ring.submitter().register_enable_rings()?;
    Ok(ring)
}

/// A ring of the reserve; `None` without one, an error if all are in use.
pub(super) fn take() -> Option<io::Result<IoUring>> {
    let mut reserve = lock();
    let rings = reserve.as_mut()?;
    let used = || io::Error::other("all reserved rings are in use");
    Some(rings.pop().ok_or_else(used))
}

/// Puts a ring back that nobody uses any more. One that isn't quiet, or without a reserve, is closed.
pub(super) fn give_back(mut ring: IoUring, is_quiet: bool, watches: bool) {
    if lock().is_none() || !is_quiet {
        return;
    }
    if watches && stop_watching(&mut ring).is_err() {
        return;
    }
    if let Some(rings) = lock().as_mut() {
        rings.push(ring);
    }
}

/// Ends the poll of an event. The poll and its end complete, in any order.
fn stop_watching(ring: &mut IoUring) -> io::Result<()> {
    let entry = opcode::PollRemove::new(WATCHED_EVENT).build();
    let entry = entry.user_data(WATCHED_EVENT);
    // SAFETY: the entry names no memory.
    let pushed = unsafe { ring.submission().push(&entry) };
    pushed.map_err(io::Error::other)?;
    let mut ended = 0;
    while ended < 2 {
        match ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
        ended += ring.completion().count();
    }
    Ok(())
}
