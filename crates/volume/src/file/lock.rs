//! Locks that keep other programs out of a served file: our own, those of QEMU, and a check for loop devices,
//! which take none.
//!
//! All locks are held by the description that the data goes through, so the kernel keeps them until the last operation on it has ended,
//! even if the process has ended before.

use super::layout::{os, refuse};
use crate::opener::{FileOpener, LockHolder};
use crate::spec::FileSpec;
use pvblk_block::Error;
use pvblk_sys::locks;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Longest wait for the I/O of a process that has ended.
const WAITS_FOR_IO: Duration = Duration::from_secs(30);
/// Longest wait for an unknown holder of the lock.
const WAITS_FOR_UNKNOWN: Duration = Duration::from_secs(2);
/// Longest wait for a holder that lives: a process that was killed just now is still seen for a moment.
const WAITS_FOR_LIVING: Duration = Duration::from_millis(500);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// QEMU's image locking (docs/interop of QEMU, "raw" files) takes shared locks of single bytes. The bytes
/// from here on stand for the permissions in use.
const USED: u64 = 100;
/// The bytes from here on stand for the permissions that others may not use.
const NOT_SHARED: u64 = 200;
/// Numbers of QEMU's permissions.
const READ: u64 = 0;
const WRITE: u64 = 1;
const RESIZE: u64 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    ByAnotherOfOurs,
    ByAnother,
}

/// Warns of a loop device that was set up over the file since it was opened.
pub(super) fn warn_of_loops(
    opener: &dyn FileOpener,
    name: &str,
    file: BorrowedFd<'_>,
    read_only: bool,
) {
    if let Some(device) = opener.loop_over(file, read_only) {
        tracing::error!(
            "{name}: the loop device {} was set up over it; both write to it, which destroys data",
            device.display()
        );
    }
}

/// Takes the locks, or names the holder in the error. Waits if the holder is a process that has ended while
/// I/O of it hasn't.
pub(super) fn take(
    spec: &FileSpec,
    opener: &dyn FileOpener,
    file: BorrowedFd<'_>,
) -> Result<(), Error> {
    let start = Instant::now();
    let refusal = wait_for(
        || attempt(spec, file),
        || opener.lock_holder(file),
        || start.elapsed(),
        |holder, wait| {
            tracing::warn!(
                "file:{}: locked by {holder}; waiting up to {} s",
                spec.path.display(),
                wait.as_secs()
            );
        },
    )?;
    match refusal {
        None => refuse_loops(spec, opener, file),
        Some((held, holder)) => Err(refuse(spec, why(spec, held, &holder))),
    }
}

/// Refuses a file that a loop device stands on, unless neither of the two writes.
fn refuse_loops(
    spec: &FileSpec,
    opener: &dyn FileOpener,
    file: BorrowedFd<'_>,
) -> Result<(), Error> {
    let Some(device) = opener.loop_over(file, spec.read_only) else {
        return Ok(());
    };
    let device = device.display();
    Err(refuse(
        spec,
        format!(
            "the loop device {device} is set up over it; end that first (losetup -d {device}), or add `nolock` if that is safe"
        ),
    ))
}

/// Attempts until the locks are taken (`None`), or were held at an attempt for which the time was over. `elapsed` is the time since the first attempt;
/// `tell` is called when a wait begins.
fn wait_for(
    attempt: impl Fn() -> Result<Option<Held>, Error>,
    look: impl Fn() -> LockHolder,
    elapsed: impl Fn() -> Duration,
    tell: impl Fn(&LockHolder, Duration),
) -> Result<Option<(Held, LockHolder)>, Error> {
    let mut told = None;
    let mut has_ended = false;
    loop {
        // A look at all processes may take seconds, and the lock be free after it: only the time of the attempt counts.
        let attempted = elapsed();
        let Some(held) = attempt()? else {
            return Ok(None);
        };
        let holder = look();
        let wait = match holder {
            LockHolder::Process { .. } => WAITS_FOR_LIVING,
            LockHolder::Ended => {
                has_ended = true;
                WAITS_FOR_IO
            }
            // The lock may have become free since the attempt.
            LockHolder::Unknown if has_ended => WAITS_FOR_IO,
            LockHolder::Unknown => WAITS_FOR_UNKNOWN,
        };
        if attempted >= wait {
            return Ok(Some((held, holder)));
        }
        let waits = !matches!(holder, LockHolder::Process { .. });
        if waits && told.replace(wait) != Some(wait) {
            tell(&holder, wait);
        }
        std::thread::sleep(PAUSE);
    }
}

fn why(spec: &FileSpec, held: Held, holder: &LockHolder) -> String {
    let who = match (held, spec.read_only) {
        (Held::ByAnotherOfOurs, false) => "another volume has it open and locked",
        (Held::ByAnotherOfOurs, true) => "a writer has it open and locked",
        (Held::ByAnother, _) => "another program has it open and locked, as QEMU does",
    };
    match holder {
        // Without the lock both would write, which is never right.
        LockHolder::Process { pid, .. } if *pid == std::process::id() => {
            format!("{who}: {holder}; it is named twice, or a disk of this server stands on it")
        }
        LockHolder::Process { name, .. } if name.starts_with("pvblk") => format!(
            "{who}: {holder}; stop that server, remove its disk, or ask that server by its control socket (--control)"
        ),
        LockHolder::Process { .. } => {
            format!("{who}: {holder}; close that first, or add `nolock` if that is safe")
        }
        LockHolder::Ended => format!(
            "{who}: {holder}, after {} s; start again when the medium answers",
            WAITS_FOR_IO.as_secs()
        ),
        LockHolder::Unknown => format!("{who}; close that first, or add `nolock` if that is safe"),
    }
}

/// Takes all locks or none.
fn attempt(spec: &FileSpec, file: BorrowedFd<'_>) -> Result<Option<Held>, Error> {
    let operation = if spec.read_only {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    let cant = |e: io::Error| {
        os(
            spec,
            "can't be locked; add `nolock` if nobody else writes to it",
            e,
        )
    };
    match rustix::fs::flock(file, operation) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(Some(Held::ByAnotherOfOurs)),
        Err(e) => return Err(cant(e.into())),
    }
    let used: &[u64] = if spec.read_only {
        &[READ]
    } else {
        &[READ, WRITE]
    };
    match lock_bytes(file, used) {
        Ok(true) => Ok(None),
        Ok(false) => {
            let _ = locks::unlock(file, USED, NOT_SHARED);
            let _ = rustix::fs::flock(file, FlockOperation::NonBlockingUnlock);
            Ok(Some(Held::ByAnother))
        }
        Err(e) if has_none(&e) => {
            tracing::warn!(
                "file:{}: its filesystem can't lock bytes ({e}), so QEMU's programs aren't kept out",
                spec.path.display()
            );
            Ok(None)
        }
        Err(e) => Err(cant(e)),
    }
}

/// The filesystem or the kernel has no such locks.
fn has_none(e: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(e),
        Some(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK)
    )
}

/// Locks first and looks afterwards, so that of two programs that start at once not both succeed. False if
/// another program uses permissions that we don't share, or doesn't share those that we use.
fn lock_bytes(file: BorrowedFd<'_>, used: &[u64]) -> io::Result<bool> {
    let not_shared = [WRITE, RESIZE];
    let ours = used.iter().map(|p| USED + p);
    for byte in ours.chain(not_shared.map(|p| NOT_SHARED + p)) {
        match locks::lock_shared(file, byte, 1) {
            Ok(()) => {}
            Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::AGAIN | Errno::ACCESS)) => {
                return Ok(false);
            }
            Err(e) => return Err(e),
        }
    }
    let theirs = used.iter().map(|p| NOT_SHARED + p);
    for byte in theirs.chain(not_shared.map(|p| USED + p)) {
        if locks::is_locked_by_another(file, byte, 1)? {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// The end of a wait for locks that are free from the attempt with number `free` on, when each look takes `look`.
    fn waited(free: usize, look: Duration) -> Option<(Held, LockHolder)> {
        let (attempts, now) = (Cell::new(0), Cell::new(Duration::ZERO));
        let attempt = || {
            attempts.set(attempts.get() + 1);
            now.set(now.get() + PAUSE);
            Ok((attempts.get() < free).then_some(Held::ByAnotherOfOurs))
        };
        let slow = || {
            now.set(now.get() + look);
            LockHolder::Unknown
        };
        wait_for(attempt, slow, || now.get(), |_, _| {}).unwrap()
    }

    #[test]
    fn a_slow_look_at_all_processes_refuses_nobody() {
        assert_eq!(waited(2, WAITS_FOR_UNKNOWN * 2), None);
        assert_eq!(waited(3, WAITS_FOR_UNKNOWN / 2), None);
        assert!(waited(usize::MAX, WAITS_FOR_UNKNOWN * 2).is_some());
    }
}
