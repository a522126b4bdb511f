//! A front end's socket: messages with descriptors over a byte stream, without waiting.

use pvblk_block::{Error, ErrorKind};
use pvblk_protocol::vhost_user::{Asked, HEADER, Header};
use pvblk_sys::{Closer, PeerFd, fdpass};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;
use zerocopy::FromBytes;

/// A whole message.
#[derive(Debug)]
pub(super) struct Message {
    pub asked: Asked,
    pub body: Vec<u8>,
    pub fds: Vec<PeerFd>,
}

/// The outcome of a read from the socket.
#[derive(Debug)]
pub(super) enum Received {
    Message(Message),
    Nothing,
    Closed,
}

/// The socket, and as much of a message as came.
#[derive(Debug)]
pub(super) struct Stream {
    fd: OwnedFd,
    head: Vec<u8>,
    body: Vec<u8>,
    fds: Vec<PeerFd>,
    /// When the first byte of it was received.
    since: Option<Instant>,
    closer: Arc<Closer>,
}

impl Stream {
    pub fn new(fd: OwnedFd, closer: Arc<Closer>) -> Stream {
        Stream {
            fd,
            head: Vec::with_capacity(HEADER),
            body: Vec::new(),
            fds: Vec::new(),
            since: None,
            closer,
        }
    }

    /// Takes the next message if all of it is there. Never reads beyond its end: descriptors come with the bytes that they
    /// were sent with.
    pub fn receive(&mut self, now: Instant) -> Result<Received, Error> {
        loop {
            let asked = match self.head.first_chunk::<HEADER>() {
                Some(head) => match Header::read_from_bytes(head) {
                    Ok(header) => Some(header.check()?),
                    Err(_) => return Err(Error::protocol("a header could not be read")),
                },
                None => None,
            };
            let wanted = match asked {
                Some(asked) if self.body.len() == asked.size => {
                    self.head.clear();
                    self.since = None;
                    return Ok(Received::Message(Message {
                        asked,
                        body: std::mem::take(&mut self.body),
                        fds: std::mem::take(&mut self.fds),
                    }));
                }
                Some(asked) => asked.size - self.body.len(),
                None => HEADER - self.head.len(),
            };
            let mut bytes = [0; pvblk_protocol::vhost_user::MAX_PAYLOAD];
            let closer = Some(&self.closer);
            match fdpass::recv_from_peer(self.fd.as_fd(), &mut bytes[..wanted], closer, false) {
                Ok((0, _)) => return Ok(Received::Closed),
                Ok((n, fds)) => {
                    let part = if asked.is_some() {
                        &mut self.body
                    } else {
                        &mut self.head
                    };
                    part.extend_from_slice(&bytes[..n]);
                    self.since.get_or_insert(now);
                    self.fds.extend(fds);
                    if self.fds.len() > fdpass::MAX_FDS {
                        return Err(Error::protocol("a message has too many descriptors"));
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Received::Nothing),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                    return Err(Error::protocol("a message has too many descriptors"));
                }
                Err(_) => return Ok(Received::Closed),
            }
        }
    }

    /// False while too many of its peer's descriptors wait to be closed: then a message that has some can't be received.
    pub fn has_room(&self) -> bool {
        self.closer.has_room()
    }

    /// When the message that isn't there in full yet began.
    pub fn half_since(&self) -> Option<Instant> {
        self.since
    }

    /// Sends an answer. A front end that doesn't read its answers counts as gone.
    pub fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), Error> {
        fdpass::send(self.fd.as_fd(), bytes, fd.as_slice())
            .map_err(|e| Error::caused(ErrorKind::Disconnected, "it doesn't take an answer", e))
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_protocol::vhost_user::{Code, message};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (OwnedFd, Stream) {
        let flags = SocketFlags::CLOEXEC;
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        (a, Stream::new(b, Closer::new()))
    }

    #[test]
    fn messages_come_whole_however_they_are_cut() {
        let (peer, mut stream) = pair();
        let event = pvblk_sys::EventFd::new().unwrap();
        let one = message(Code::SetVringCall as u32, 0, &[7; 8]);
        let two = message(Code::SetOwner as u32, 0, &[]);
        fdpass::send(peer.as_fd(), &one[..5], &[event.as_fd()]).unwrap();
        assert!(matches!(
            stream.receive(Instant::now()),
            Ok(Received::Nothing)
        ));
        fdpass::send(peer.as_fd(), &one[5..15], &[]).unwrap();
        assert!(matches!(
            stream.receive(Instant::now()),
            Ok(Received::Nothing)
        ));
        let rest = [&one[15..], &two[..]].concat();
        fdpass::send(peer.as_fd(), &rest, &[]).unwrap();
        let Ok(Received::Message(m)) = stream.receive(Instant::now()) else {
            panic!("no message")
        };
        assert_eq!(
            (m.asked.code, m.body, m.fds.len()),
            (Code::SetVringCall, vec![7; 8], 1)
        );
        let Ok(Received::Message(m)) = stream.receive(Instant::now()) else {
            panic!("no message")
        };
        assert_eq!((m.asked.code, m.fds.len()), (Code::SetOwner, 0));
        drop(peer);
        assert!(matches!(
            stream.receive(Instant::now()),
            Ok(Received::Closed)
        ));
    }

    #[test]
    fn too_many_descriptors_and_bad_headers_are_errors() {
        let (peer, mut stream) = pair();
        let event = pvblk_sys::EventFd::new().unwrap();
        let fds = [event.as_fd(); fdpass::MAX_FDS];
        for byte in message(Code::SetOwner as u32, 0, &[]).chunks(6) {
            fdpass::send(peer.as_fd(), byte, &fds).unwrap();
        }
        let e = stream.receive(Instant::now()).unwrap_err().to_string();
        assert!(e.contains("too many descriptors"), "{e}");
        let (peer, mut stream) = pair();
        fdpass::send(peer.as_fd(), &[0xff; HEADER], &[]).unwrap();
        assert!(stream.receive(Instant::now()).is_err());
    }
}
