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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uring::{FileOp, Uring};
    use crate::{Buffer, EventFd};
    use io_uring::types;
    use rustix::io::Errno;
    use std::os::fd::AsRawFd;
    use std::sync::Arc;

    /// Runs one entry, and returns its result.
    fn once(ring: &mut IoUring, entry: &io_uring::squeue::Entry) -> i32 {
        // SAFETY: the entries of this test name static memory, or none.
        unsafe { ring.submission().push(entry) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    }

    #[test]
    fn a_reserved_ring_opens_nothing() {
        let Ok(mut ring) = restricted() else {
            println!("skipped: io_uring is not available here");
            return;
        };
        let path = c"/etc/passwd".as_ptr();
        let here = types::Fd(rustix::fs::CWD.as_raw_fd());
        let refused = [
            opcode::OpenAt::new(here, path).build(),
            opcode::UnlinkAt::new(here, path).build(),
            opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build(),
            opcode::Nop::new().build(),
            opcode::Read::new(types::Fixed(0), std::ptr::null_mut(), 0).build(),
        ];
        for entry in &refused {
            assert_eq!(
                once(&mut ring, entry),
                -Errno::ACCESS.raw_os_error(),
                "{entry:?}"
            );
        }
        let event = EventFd::new().unwrap();
        event.notify();
        let poll = opcode::PollAdd::new(types::Fd(event.number()), libc::POLLIN as u32);
        assert!(once(&mut ring, &poll.build()) > 0);
        // None can be lifted later.
        let lifted = ring.submitter().register_restrictions(&mut []);
        assert!(lifted.is_err());
    }

    #[test]
    fn a_ring_that_watches_an_event_can_be_used_again() {
        let Ok(mut ring) = restricted() else {
            println!("skipped: io_uring is not available here");
            return;
        };
        let event = EventFd::new().unwrap();
        let poll = opcode::PollAdd::new(types::Fd(event.number()), libc::POLLIN as u32);
        let poll = poll.build().user_data(WATCHED_EVENT);
        // SAFETY: the entry names no memory.
        unsafe { ring.submission().push(&poll) }.unwrap();
        ring.submit().unwrap();
        stop_watching(&mut ring).unwrap();
        assert!(ring.completion().is_empty());
        event.notify();
        let file: std::fs::File = tempfile();
        let mut ring = Uring::with(ring, Arc::new(file.into()), 4);
        let buffer = Buffer::anonymous(4096).unwrap();
        ring.push(FileOp::Read { offset: 0 }, vec![buffer], 3)
            .unwrap();
        ring.submit().unwrap();
        let done = loop {
            if let Some(done) = ring.reap() {
                break done;
            }
            std::thread::yield_now();
        };
        assert_eq!(done.token, 3);
    }

    fn tempfile() -> std::fs::File {
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        memory.into()
    }
}
