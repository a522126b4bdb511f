//! The rules for descriptors that come with a message.
//!
//! A session ends when its front end's socket is closed everywhere. So the server must not have a descriptor of that socket itself, nor one
//! of anything that another descriptor can wait in: no socket that isn't connected or that has something to read. Memory files and
//! eventfds hold nothing.

use pvblk_block::Error;
use pvblk_protocol::vhost_user::Code;
use pvblk_sys::PeerFd;
use rustix::net::{AddressFamily, Shutdown, SocketType, shutdown, sockopt};
use std::os::fd::{BorrowedFd, OwnedFd};

/// A message has this many descriptors, and takes another number.
pub(super) fn count(has: usize, takes: usize) -> Error {
    Error::protocol(format!("it has {has} descriptors and should have {takes}"))
}

/// Checks the number of descriptors that come along; those of a memory table are counted with its regions.
pub(super) fn check_descriptors(code: Code, has: usize) -> Result<(), Error> {
    let (least, most) = match code {
        Code::SetMemTable => return Ok(()),
        Code::SetVringKick | Code::SetVringCall | Code::SetVringErr => (0, 1),
        Code::SetBackendReqFd | Code::SetInflightFd | Code::AddMemReg => (1, 1),
        // Some front ends send one; it is closed unused, as the specification says.
        Code::RemMemReg => (0, 1),
        _ => (0, 0),
    };
    match has {
        n if n < least => Err(count(n, least)),
        n if n > most => Err(count(n, most)),
        _ => Ok(()),
    }
}

/// The channel for requests of our own: a Unix stream socket that is connected to one without a name, as socketpair(2) makes them, and that has nothing
/// to read. Nothing can be sent to it from now on. The front end's end of its session is connected to the name that the server listens at.
pub(super) fn channel(fd: PeerFd) -> Result<OwnedFd, Error> {
    let refuse = |why: &str| Error::protocol(format!("the descriptor {why}"));
    let mut why = "is not a Unix stream socket";
    let check = |fd: BorrowedFd<'_>| {
        let refused = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
        if sockopt::socket_domain(fd) != Ok(AddressFamily::UNIX)
            || sockopt::socket_type(fd) != Ok(SocketType::STREAM)
        {
            return Err(refused());
        }
        why = "is a socket that is not connected";
        let peer = rustix::net::getpeername(fd)?.ok_or_else(refused)?;
        why = "is a socket that is connected to a name, not to the other end of a pair";
        // An address without a name is its family alone (unix(7)).
        if peer.addr_len() as usize > size_of::<u16>() {
            return Err(refused());
        }
        why = "is a socket that can't be closed for reading";
        shutdown(fd, Shutdown::Read)?;
        why = "is a socket that has something to read, where only we send requests";
        match rustix::io::ioctl_fionread(fd)? {
            0 => Ok(()),
            _ => Err(refused()),
        }
    };
    let checked = fd.checked(check);
    checked.map_err(|_| refuse(why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_sys::Closer;
    use rustix::net::{SocketFlags, socketpair};
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    fn refused(fd: impl Into<OwnedFd>) -> String {
        let fd = PeerFd::new(fd.into(), &Closer::new());
        channel(fd).expect_err("taken").to_string()
    }

    #[test]
    fn a_channel_is_one_end_of_a_pair_and_empty() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let taken = channel(PeerFd::new(theirs.into(), &Closer::new())).unwrap();
        assert!(
            rustix::io::write(&ours, b"x").is_err(),
            "nobody would read it"
        );
        rustix::io::write(&taken, b"to them").unwrap();
        assert_eq!(rustix::io::read(&ours, &mut [0; 16]).unwrap(), 7);
        let (ours, theirs) = UnixStream::pair().unwrap();
        rustix::io::write(&ours, b"x").unwrap();
        assert!(refused(theirs).contains("something to read"));
    }

    #[test]
    fn other_descriptors_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        assert!(refused(client).contains("connected to a name"));
        // What it accepts is connected to a client without one.
        let (accepted, _) = listener.accept().unwrap();
        drop(accepted);
        assert!(refused(listener).contains("not connected"));
        let flags = SocketFlags::CLOEXEC;
        let (packets, _peer) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        assert!(refused(packets).contains("not a Unix stream socket"));
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (tcp, event) = (tcp, pvblk_sys::EventFd::new().unwrap());
        assert!(refused(tcp).contains("not a Unix stream socket"));
        let event = event.as_fd().try_clone_to_owned().unwrap();
        assert!(refused(event).contains("not a Unix stream socket"));
    }
}
