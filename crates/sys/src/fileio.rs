//! Synchronous file operations on buffers, for files that act like memory and for control paths.

use crate::Buffer;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Most segments that one call passes to the kernel (`IOV_MAX` is 1024).
const CHUNK: usize = 256;

/// Number of cachestat(2), the same on all architectures; libc doesn't name it on most.
pub const SYS_CACHESTAT: libc::c_long = 451;

/// Room for a piece of a list. A list isn't cleared before it is filled: it may be as long as the data.
pub(crate) type Room = MaybeUninit<libc::iovec>;

/// Fills `buffers` from `offset` (bytes). Bytes beyond the end of the file read as zeros.
pub fn read_at(fd: BorrowedFd<'_>, offset: u64, buffers: &[Buffer]) -> io::Result<()> {
    let done = run(fd, offset, buffers, true)?;
    zero_from(buffers, done);
    Ok(())
}

/// Writes all of `buffers` at `offset` (bytes).
pub fn write_at(fd: BorrowedFd<'_>, offset: u64, buffers: &[Buffer]) -> io::Result<()> {
    let done = run(fd, offset, buffers, false)?;
    if done < crate::total_len(buffers) {
        return Err(io::ErrorKind::WriteZero.into());
    }
    Ok(())
}

/// Zeroes `buffers` past their first `done` bytes.
pub fn zero_from(buffers: &[Buffer], mut done: usize) {
    for b in buffers {
        let skip = done.min(b.len());
        done -= skip;
        if skip < b.len() {
            b.region().zero(b.offset() + skip, b.len() - skip);
        }
    }
}

/// One `preadv2` into `buffers` from byte `skip` of them on, at file offset `offset` (bytes), with at most 256
/// segments. Returns the bytes read, 0 at the end of the file. Without `wait` it fails with `EAGAIN` instead of
/// waiting for the medium (`RWF_NOWAIT`), or with `EOPNOTSUPP` on files that don't support this.
pub fn read_some(
    fd: BorrowedFd<'_>,
    offset: u64,
    buffers: &[Buffer],
    skip: usize,
    wait: bool,
) -> io::Result<usize> {
    let flags = if wait { 0 } else { libc::RWF_NOWAIT };
    let mut room = [Room::uninit(); CHUNK];
    let iov = fill(&mut room, buffers, skip, true);
    let (fd, at, n) = (fd.as_raw_fd(), offset as i64, iov.len() as i32);
    // SAFETY: the entries describe live, checked, writable buffers; the caller's borrow keeps them mapped over the call.
    let r = unsafe {
        match (&*iov, flags) {
            // Most reads are of one piece, for which the kernel takes a fifteenth less time without a list.
            ([one], 0) => libc::pread(fd, one.iov_base, one.iov_len, at),
            _ => libc::preadv2(fd, iov.as_ptr(), n, at, flags),
        }
    };
    usize::try_from(r).map_err(|_| io::Error::last_os_error())
}

/// One `pwritev2` of `buffers` from byte `skip` of them on, at file offset `offset` (bytes), with at most 256
/// segments. Returns the bytes written. With `durable` the data is on stable storage on return (`RWF_DSYNC`). The
/// call waits for the medium: `RWF_NOWAIT` doesn't keep it from waiting for a frozen file system.
pub fn write_some(
    fd: BorrowedFd<'_>,
    offset: u64,
    buffers: &[Buffer],
    skip: usize,
    durable: bool,
) -> io::Result<usize> {
    let flags = if durable { libc::RWF_DSYNC } else { 0 };
    let mut room = [Room::uninit(); CHUNK];
    let iov = fill(&mut room, buffers, skip, false);
    let (at, n) = (offset as i64, iov.len() as i32);
    // SAFETY: the entries describe live, checked buffers; the caller's borrow keeps them mapped over the call.
    let r = unsafe { libc::pwritev2(fd.as_raw_fd(), iov.as_ptr(), n, at, flags) };
    usize::try_from(r).map_err(|_| io::Error::last_os_error())
}

/// True if some of these bytes of a file on tmpfs are in the machine's swap, or on their way from there: cachestat(2), of Linux 6.5. The file
/// has to be the caller's own, or writable by it. Never waits for the medium.
pub fn is_swapped(fd: BorrowedFd<'_>, offset: u64, bytes: u64) -> io::Result<bool> {
    let range = [offset, bytes];
    // Pages that are cached, dirty, being written back, evicted, and evicted lately.
    let mut counts = [0u64; 5];
    // SAFETY: the kernel reads two numbers (`struct cachestat_range`) and writes five (`struct cachestat`), all within the call.
    let r = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            fd.as_raw_fd(),
            range.as_ptr(),
            counts.as_mut_ptr(),
            0u32,
        )
    };
    if r < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(counts[3] > 0)
}

/// Reads or writes until all is done or the file ends; returns the bytes done.
fn run(fd: BorrowedFd<'_>, offset: u64, buffers: &[Buffer], read: bool) -> io::Result<usize> {
    let want = crate::total_len(buffers);
    let mut done = 0;
    let mut room = [Room::uninit(); CHUNK];
    while done < want {
        let iov = fill(&mut room, buffers, done, read);
        let n = iov.len();
        let at = (offset + done as u64) as libc::off_t;
        // SAFETY: the entries describe live, checked buffers (writable if read into); the
        // caller's borrow keeps them mapped over the call.
        let r = unsafe {
            if read {
                libc::preadv(fd.as_raw_fd(), iov.as_ptr(), n as i32, at)
            } else {
                libc::pwritev(fd.as_raw_fd(), iov.as_ptr(), n as i32, at)
            }
        };
        match r {
            0 => break,
            r if r > 0 => done += r as usize,
            _ => {
                let e = io::Error::last_os_error();
                if e.kind() != io::ErrorKind::Interrupted {
                    return Err(e);
                }
            }
        }
    }
    Ok(done)
}

/// Describes `buffers` from byte `skip` on, as far as there is room.
pub(crate) fn fill<'a>(
    room: &'a mut [Room],
    buffers: &[Buffer],
    mut skip: usize,
    by_kernel: bool,
) -> &'a mut [libc::iovec] {
    let mut n = 0;
    for b in buffers {
        if skip >= b.len() {
            skip -= b.len();
            continue;
        }
        if n == room.len() {
            break;
        }
        room[n].write(b.iovec(skip, by_kernel));
        skip = 0;
        n += 1;
    }
    // SAFETY: the first `n` were written above.
    unsafe { room[..n].assume_init_mut() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn more_segments_than_one_call_takes() {
        let fd = crate::create_sealed("t", 1 << 20).unwrap();
        let whole = Buffer::anonymous(512 * 600).unwrap();
        let parts: Vec<_> = (0..600)
            .rev()
            .map(|i| whole.slice(i * 512, 512).unwrap())
            .collect();
        for (i, p) in parts.iter().enumerate() {
            p.write(0, &(i as u32).to_le_bytes());
        }
        write_at(fd.as_fd(), 4096, &parts).unwrap();
        let back = Buffer::anonymous(512 * 600).unwrap();
        read_at(fd.as_fd(), 4096, std::slice::from_ref(&back)).unwrap();
        for i in 0..600u32 {
            let mut b = [0; 4];
            back.read(i as usize * 512, &mut b);
            assert_eq!(u32::from_le_bytes(b), i);
        }
        back.write(0, &[9; 16]);
        read_at(fd.as_fd(), (1 << 20) - 8, &[back.slice(0, 16).unwrap()]).unwrap();
        assert_eq!(back.slice(0, 16).unwrap().to_vec(), [0; 16]);
    }
}
