//! Messages with descriptors over a `SOCK_SEQPACKET` Unix socket.

use crate::peer_fd::{Closer, PeerFd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Most descriptors in one message.
pub const MAX_FDS: usize = 16;

/// Sends one message with up to [`MAX_FDS`] descriptors. `WouldBlock` if the peer doesn't read.
pub fn send(fd: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "too many descriptors in one message",
        ));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = sendmsg(fd, &[IoSlice::new(bytes)], &mut ancillary, flags)?;
    if sent != bytes.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    Ok(())
}

/// Receives one message into `bytes`. Returns its length (0: the peer closed) and its descriptors, which are
/// close-on-exec. Errors if the message is longer than `bytes` or has too many descriptors. Use this only for peers
/// that are trusted not to send files whose closing blocks; see [`recv_from_peer`].
pub fn recv(fd: BorrowedFd<'_>, bytes: &mut [u8], wait: bool) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut fds = Vec::new();
    let n = receive(fd, bytes, wait, MAX_FDS, |fd| fds.push(fd))?;
    Ok((n, fds))
}

/// As [`recv`], from an untrusted peer: `closer` closes descriptors that the caller doesn't take. Without a closer,
/// or while it has no room, the kernel discards descriptors, and a message that has some is an error.
pub fn recv_from_peer(
    fd: BorrowedFd<'_>,
    bytes: &mut [u8],
    closer: Option<&Arc<Closer>>,
    wait: bool,
) -> io::Result<(usize, Vec<PeerFd>)> {
    let mut fds = Vec::new();
    let closer = closer.filter(|c| c.has_room());
    let most = if closer.is_some() { MAX_FDS } else { 0 };
    let n = receive(fd, bytes, wait, most, |fd| {
        if let Some(closer) = closer {
            fds.push(PeerFd::new(fd, closer));
        }
    })?;
    Ok((n, fds))
}

fn receive(
    fd: BorrowedFd<'_>,
    bytes: &mut [u8],
    wait: bool,
    most: usize,
    mut take: impl FnMut(OwnedFd),
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let room = if most == 0 { 0 } else { space.len() };
    let mut ancillary = RecvAncillaryBuffer::new(&mut space[..room]);
    let mut flags = RecvFlags::CMSG_CLOEXEC;
    if !wait {
        flags |= RecvFlags::DONTWAIT;
    }
    let got = recvmsg(fd, &mut [IoSliceMut::new(bytes)], &mut ancillary, flags)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            passed.for_each(&mut take);
        }
    }
    let cut = rustix::net::ReturnFlags::TRUNC | rustix::net::ReturnFlags::CTRUNC;
    if got.flags.intersects(cut) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "message too long",
        ));
    }
    Ok(got.bytes)
}

/// Creates a connected pair of message sockets, for tests and for children.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EventFd;
    use std::os::fd::AsFd;

    #[test]
    fn descriptors_arrive_with_their_message() {
        let (a, b) = pair().unwrap();
        let e = EventFd::new().unwrap();
        send(a.as_fd(), b"one", &[e.as_fd()]).unwrap();
        send(a.as_fd(), b"two", &[]).unwrap();
        let mut buf = [0; 16];
        let (n, mut fds) = recv(b.as_fd(), &mut buf, true).unwrap();
        assert_eq!((&buf[..n], fds.len()), (&b"one"[..], 1));
        let event = PeerFd::new(fds.remove(0), &Closer::new());
        crate::PeerEvent::from_peer(event).unwrap().notify();
        assert!(e.drain());
        assert!(recv(b.as_fd(), &mut buf[..2], true).is_err());
        drop(a);
        assert_eq!(recv(b.as_fd(), &mut buf, true).unwrap().0, 0);
    }
}
