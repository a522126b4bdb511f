//! Stream sockets that read into buffers and write from them without a copy in user space.

use crate::Buffer;
use crate::fileio::{Room, fill};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Most parts that one call passes to the kernel.
pub const MAX_PARTS: usize = 64;

/// A part of the bytes to send.
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    /// Private bytes, such as a header.
    Bytes(&'a [u8]),
    /// A buffer from `skip` bytes on.
    Buffer(&'a Buffer, usize),
}

impl Part<'_> {
    /// Number of bytes to send.
    #[inline]
    pub fn size(&self) -> usize {
        match self {
            Part::Bytes(b) => b.len(),
            Part::Buffer(b, skip) => b.len() - skip,
        }
    }
}

/// The parts without their first `skip` bytes, and without empty ones.
pub fn skip_bytes<'a>(
    parts: impl Iterator<Item = Part<'a>>,
    mut skip: usize,
) -> impl Iterator<Item = Part<'a>> {
    parts.filter_map(move |part| {
        let size = part.size();
        if skip >= size {
            skip -= size;
            return None;
        }
        let from = std::mem::take(&mut skip);
        Some(match part {
            Part::Bytes(b) => Part::Bytes(&b[from..]),
            Part::Buffer(b, at) => Part::Buffer(b, at + from),
        })
    })
}

/// A Unix socket that doesn't block, and the address of the file at `path`, neither bound nor connected.
pub fn unix(path: &Path, kind: SocketType) -> io::Result<(OwnedFd, SocketAddrUnix)> {
    let at = SocketAddrUnix::new(path).map_err(|_| {
        let why = "the path of a socket may have 107 bytes; use a shorter one";
        io::Error::new(io::ErrorKind::InvalidInput, why)
    })?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok((socket_with(AddressFamily::UNIX, kind, flags, None)?, at))
}

/// User id and process id of the process that connected to a Unix socket; the process id is 0 for a process of
/// another namespace.
pub fn peer(fd: BorrowedFd<'_>) -> io::Result<(u32, i32)> {
    credentials(fd).map(|found| (found.uid, found.pid))
}

/// Group ids of the process that connected to a Unix socket: its group, and its further groups.
pub fn peer_groups(fd: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let group = credentials(fd)?.gid;
    let mut groups = vec![0_u32; 64];
    loop {
        let room = groups.len() * size_of::<u32>();
        let mut len = room as libc::socklen_t;
        // SAFETY: the first pointer is to `len` bytes of live memory, the second to a live variable.
        let r = unsafe {
            libc::getsockopt(
                fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &mut len,
            )
        };
        let found = len as usize / size_of::<u32>();
        if r == 0 {
            groups.truncate(found);
            groups.push(group);
            return Ok(groups);
        }
        let e = io::Error::last_os_error();
        // A list that is too long is told with its length.
        if e.raw_os_error() != Some(libc::ERANGE) || found <= groups.len() {
            return Err(e);
        }
        groups.resize(found, 0);
    }
}

fn credentials(fd: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut found = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: both pointers are to live variables of the right size.
    let r = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &mut len,
        )
    };
    if r < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(found)
}

/// `SO_PASSRIGHTS` of asm-generic/socket.h, Linux 6.16.
const SO_PASSRIGHTS: i32 = 83;

/// Makes the kernel refuse descriptors that a peer sends to this Unix socket, or to sockets that it accepts later.
/// Otherwise the reading thread would close them, which can wait as long as the peer likes (a TCP socket that
/// lingers). Returns false before Linux 6.16, and for other sockets.
pub fn refuse_descriptors(fd: BorrowedFd<'_>) -> bool {
    pass_descriptors(fd, false)
}

/// Undoes [`refuse_descriptors`], for a socket that was accepted. False before Linux 6.16, where descriptors are always passed.
pub fn take_descriptors(fd: BorrowedFd<'_>) -> bool {
    pass_descriptors(fd, true)
}

fn pass_descriptors(fd: BorrowedFd<'_>, pass: bool) -> bool {
    let pass = i32::from(pass);
    // SAFETY: the pointer is to a live variable of the length given.
    let r = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const pass).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    r == 0
}

/// Truncates the list of parts to `most` bytes; returns the number of parts left.
fn cut(iov: &mut [libc::iovec], most: usize) -> usize {
    let mut left = most;
    for (i, v) in iov.iter_mut().enumerate() {
        if left == 0 {
            return i;
        }
        v.iov_len = v.iov_len.min(left);
        left -= v.iov_len;
    }
    iov.len()
}

/// Parts to send in one call: at most [`MAX_PARTS`], without the first bytes that were sent before, and up to a number of bytes.
pub struct SendList<'a> {
    parts: [libc::iovec; MAX_PARTS],
    len: usize,
    /// Bytes that are still to be skipped.
    skip: usize,
    bytes: usize,
    most: usize,
    _parts: PhantomData<Part<'a>>,
}

impl<'a> SendList<'a> {
    /// An empty list.
    #[inline]
    pub fn new(skip: usize, most: usize) -> SendList<'a> {
        SendList {
            parts: [libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            }; MAX_PARTS],
            len: 0,
            skip,
            bytes: 0,
            most,
            _parts: PhantomData,
        }
    }

    /// Appends a part, or as much of it as there is room for.
    #[inline]
    pub fn push(&mut self, part: Part<'a>) {
        if self.skip > 0 || self.is_full() {
            return self.push_rest(part);
        }
        let mut entry = match part {
            Part::Bytes(b) => libc::iovec {
                iov_base: b.as_ptr().cast_mut().cast(),
                iov_len: b.len(),
            },
            Part::Buffer(b, skip) => b.iovec(skip, false),
        };
        entry.iov_len = entry.iov_len.min(self.most - self.bytes);
        if entry.iov_len > 0 {
            self.bytes += entry.iov_len;
            self.parts[self.len] = entry;
            self.len += 1;
        }
    }

    #[cold]
    fn push_rest(&mut self, part: Part<'a>) {
        let size = part.size();
        let skip = self.skip.min(size);
        self.skip -= skip;
        if skip == size || self.is_full() {
            return;
        }
        self.push(match part {
            Part::Bytes(b) => Part::Bytes(&b[skip..]),
            Part::Buffer(b, at) => Part::Buffer(b, at + skip),
        });
    }

    /// True if there is no room for more.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.len == MAX_PARTS || self.bytes == self.most
    }

    /// Number of bytes to send.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Sends them without blocking and without SIGPIPE; returns the bytes sent. `WouldBlock` if the socket is full.
    pub fn send(mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        // SAFETY: an all-zero msghdr is valid: no name, no control data.
        let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
        msg.msg_iov = self.parts.as_mut_ptr();
        msg.msg_iovlen = self.len as _;
        // SAFETY: the first `len` entries describe memory that the borrows of the parts keep alive; the
        // kernel only reads it.
        let r = unsafe {
            libc::sendmsg(
                fd.as_raw_fd(),
                &msg,
                libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
            )
        };
        if r < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(r as usize)
    }
}

/// Sends up to [`MAX_PARTS`] parts and at most `most` bytes, as [`SendList::send`].
pub fn send<'a>(
    fd: BorrowedFd<'_>,
    parts: impl Iterator<Item = Part<'a>>,
    most: usize,
) -> io::Result<usize> {
    let mut list = SendList::new(0, most);
    for part in parts {
        list.push(part);
        if list.is_full() {
            break;
        }
    }
    list.send(fd)
}

/// Receives up to `most` bytes, first into `buffers` from byte `skip` of them on, then into `spill`, without
/// blocking. Returns the bytes received, 0 at the end of the stream; `WouldBlock` if there is nothing.
pub fn recv(
    fd: BorrowedFd<'_>,
    buffers: &[Buffer],
    skip: usize,
    spill: &mut [u8],
    most: usize,
) -> io::Result<usize> {
    let mut room = [Room::uninit(); MAX_PARTS];
    let iov = fill(&mut room[..MAX_PARTS - 1], buffers, skip, true);
    let described: usize = iov.iter().map(|v| v.iov_len).sum();
    let mut n = iov.len();
    // `spill` may follow only if all buffers are described, or bytes would arrive out of order.
    if !spill.is_empty() && described + skip >= crate::total_len(buffers) {
        room[n].write(libc::iovec {
            iov_base: spill.as_mut_ptr().cast(),
            iov_len: spill.len(),
        });
        n += 1;
    }
    // SAFETY: the first `n` were written above.
    let iov = unsafe { room[..n].assume_init_mut() };
    n = cut(iov, most);
    // SAFETY: an all-zero msghdr is valid.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = iov.as_mut_ptr();
    msg.msg_iovlen = n as _;
    // SAFETY: the first `n` entries describe writable memory that the borrows keep alive.
    let r = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut msg, libc::MSG_DONTWAIT) };
    if r < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(r as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn descriptors_that_a_peer_sends_are_refused_where_the_kernel_can() {
        let dir = std::env::temp_dir().join(format!("pvblk-rights-{}", std::process::id()));
        let listener = std::os::unix::net::UnixListener::bind(&dir).unwrap();
        let can = refuse_descriptors(listener.as_fd());
        let peer = UnixStream::connect(&dir).unwrap();
        std::fs::remove_file(&dir).unwrap();
        let sent = crate::fdpass::send(peer.as_fd(), b"x", &[listener.as_fd()]);
        assert_eq!(sent.is_err(), can);
        assert!(crate::fdpass::send(peer.as_fd(), b"x", &[]).is_ok());
        let (accepted, _) = listener.accept().unwrap();
        assert_eq!(take_descriptors(accepted.as_fd()), can);
        assert!(crate::fdpass::send(peer.as_fd(), b"x", &[listener.as_fd()]).is_ok());
    }

    #[test]
    fn a_send_goes_on_at_any_byte() {
        let data = Buffer::anonymous(8).unwrap();
        data.write(0, b"abcdefgh");
        let parts = [
            Part::Bytes(b"head"),
            Part::Bytes(b""),
            Part::Buffer(&data, 2),
            Part::Bytes(b"end"),
        ];
        let all = b"headcdefghend";
        for skip in 0..=all.len() + 1 {
            let left: Vec<Part<'_>> = skip_bytes(parts.into_iter(), skip).collect();
            assert!(left.iter().all(|p| p.size() > 0));
            let bytes = left.iter().flat_map(|p| match p {
                Part::Bytes(b) => b.to_vec(),
                Part::Buffer(b, at) => b.to_vec()[*at..].to_vec(),
            });
            assert_eq!(bytes.collect::<Vec<u8>>(), all[skip.min(all.len())..]);
            for most in 0..=all.len() + 1 {
                let mut list = SendList::new(skip, most);
                parts.into_iter().for_each(|p| list.push(p));
                let rest = &all[skip.min(all.len())..];
                let rest = &rest[..rest.len().min(most)];
                assert_eq!(list.bytes(), rest.len());
                let (a, b) = UnixStream::pair().unwrap();
                let mut got = vec![0; rest.len()];
                if !rest.is_empty() {
                    assert_eq!(list.send(a.as_fd()).unwrap(), rest.len());
                    std::io::Read::read_exact(&mut &b, &mut got).unwrap();
                }
                assert_eq!(got, rest);
            }
        }
    }

    #[test]
    fn header_and_data_travel_in_one_call() {
        let (a, b) = UnixStream::pair().unwrap();
        let me = std::process::id() as i32;
        assert_eq!(peer(b.as_fd()).unwrap().1, me);
        let data = Buffer::anonymous(8).unwrap();
        data.write(0, b"abcdefgh");
        let n = send(
            a.as_fd(),
            [Part::Bytes(b"head"), Part::Buffer(&data, 2)].into_iter(),
            7,
        )
        .unwrap();
        assert_eq!(n, 7);
        let rest = [Part::Buffer(&data, 5)].into_iter();
        assert_eq!(send(a.as_fd(), rest, usize::MAX).unwrap(), 3);
        let into = Buffer::anonymous(8).unwrap();
        let mut spill = [0; 8];
        let into = std::slice::from_ref(&into);
        assert_eq!(recv(b.as_fd(), into, 3, &mut spill, 2).unwrap(), 2);
        let n = recv(b.as_fd(), into, 5, &mut spill, usize::MAX).unwrap();
        assert_eq!(n, 8);
        assert_eq!(&into[0].to_vec()[3..], b"headc");
        assert_eq!(&spill[..5], b"defgh");
        let e = recv(b.as_fd(), &[], 0, &mut spill, 9).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::WouldBlock);
        drop(a);
        assert_eq!(recv(b.as_fd(), &[], 0, &mut spill, 9).unwrap(), 0);
    }
}
