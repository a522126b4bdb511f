//! Locks of byte ranges that belong to an open file description (`F_OFD_SETLK`, fcntl(2)). They end with the last
//! reference to the description; operations in flight hold one each.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

fn range(kind: libc::c_int, start: u64, bytes: u64) -> libc::flock {
    // SAFETY: all zeros is a valid `flock` structure; `l_pid` has to be 0 for these calls.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = start as libc::off_t;
    lock.l_len = bytes as libc::off_t;
    lock
}

fn set(fd: BorrowedFd<'_>, lock: &libc::flock) -> io::Result<()> {
    // SAFETY: the call reads the structure, which lives over it.
    match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes a shared lock on `bytes` bytes from `start` without waiting: `EAGAIN` (or `EACCES`) if another description
/// holds an exclusive lock.
pub fn lock_shared(fd: BorrowedFd<'_>, start: u64, bytes: u64) -> io::Result<()> {
    set(fd, &range(libc::F_RDLCK, start, bytes))
}

/// Releases this description's locks on `bytes` bytes from `start`.
pub fn unlock(fd: BorrowedFd<'_>, start: u64, bytes: u64) -> io::Result<()> {
    set(fd, &range(libc::F_UNLCK, start, bytes))
}

/// True if another description holds a lock of any kind on `bytes` bytes from `start`.
pub fn is_locked_by_another(fd: BorrowedFd<'_>, start: u64, bytes: u64) -> io::Result<bool> {
    let mut lock = range(libc::F_WRLCK, start, bytes);
    // SAFETY: the call reads and fills the structure, which lives over it.
    match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) } {
        0 => Ok(lock.l_type != libc::F_UNLCK as libc::c_short),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn descriptions_share_a_lock_and_see_each_others() {
        let first = crate::create_sealed("locks", 4096).unwrap();
        let path = format!("/proc/self/fd/{}", first.as_raw_fd());
        let open = || std::fs::File::options().read(true).write(true).open(&path);
        let (second, third) = (open().unwrap(), open().unwrap());
        lock_shared(first.as_fd(), 100, 1).unwrap();
        assert!(!is_locked_by_another(first.as_fd(), 100, 1).unwrap());
        assert!(is_locked_by_another(second.as_fd(), 100, 1).unwrap());
        assert!(!is_locked_by_another(second.as_fd(), 101, 9).unwrap());
        lock_shared(second.as_fd(), 100, 1).unwrap();
        unlock(first.as_fd(), 100, 1).unwrap();
        assert!(is_locked_by_another(third.as_fd(), 0, 200).unwrap());
        drop(second);
        assert!(!is_locked_by_another(third.as_fd(), 0, 200).unwrap());
    }
}
