//! Sending and receiving messages, with a deadline.

use super::{Frame, MAX_FRAME};
use crate::xenbus::number::sentence;
use pvblk_block::{Error, ErrorKind};
use pvblk_sys::{Closer, PeerFd, Poller, fdpass};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

/// Sends one message. With a deadline it waits until the socket has room; without one, a full socket is an error.
pub fn send(
    socket: BorrowedFd<'_>,
    frame: &Frame,
    fds: &[BorrowedFd<'_>],
    deadline: Option<Instant>,
) -> Result<(), Error> {
    let bytes = frame.encode().ok_or_else(|| {
        Error::config("a message of the handshake is too long; use shorter names or fewer queues")
    })?;
    let gone = |e: io::Error| Error::caused(ErrorKind::Disconnected, "the peer is gone", e);
    loop {
        match fdpass::send(socket, &bytes, fds) {
            Ok(()) => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => match deadline {
                Some(deadline) => wait(socket, true, deadline)?,
                None => {
                    return Err(Error::new(
                        ErrorKind::Disconnected,
                        "the peer doesn't read its socket",
                    ));
                }
            },
            Err(e) => return Err(gone(e)),
        }
    }
}

/// Result of looking for a message.
#[derive(Debug)]
pub enum Received {
    Frame(Frame, Vec<PeerFd>),
    Nothing,
    Closed,
}

/// Takes the next message without waiting. Errors if it is malformed or has the wrong number of descriptors. Without
/// a closer, descriptors are refused.
pub fn receive(
    socket: BorrowedFd<'_>,
    scratch: &mut Vec<u8>,
    closer: Option<&Arc<Closer>>,
) -> Result<Received, Error> {
    scratch.resize(MAX_FRAME, 0);
    let mut got = fdpass::recv_from_peer(socket, scratch, closer, false);
    // The peer closed before it read all our messages: reported once, and before its last messages.
    if matches!(&got, Err(e) if e.kind() == io::ErrorKind::ConnectionReset) {
        got = fdpass::recv_from_peer(socket, scratch, closer, false);
    }
    let (n, fds) = match got {
        Ok(got) => got,
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Received::Nothing),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok(Received::Nothing),
        Err(e) if e.kind() == io::ErrorKind::InvalidData => {
            return Err(Error::protocol(format!(
                "a message of more than {MAX_FRAME} bytes or with too many descriptors"
            )));
        }
        Err(_) => return Ok(Received::Closed),
    };
    // An empty packet looks like the end of the connection; our peers send none.
    if n == 0 {
        return Ok(Received::Closed);
    }
    let frame =
        Frame::decode(&scratch[..n]).map_err(|e| Error::caused(ErrorKind::Protocol, "", e))?;
    if fds.len() != frame.descriptors() {
        return Err(Error::protocol(format!(
            "a message has {} descriptors, but its type takes {}",
            fds.len(),
            frame.descriptors()
        )));
    }
    Ok(Received::Frame(frame, fds))
}

/// Adds the reason that a peer gave before it closed to an error that only says that the peer is gone.
pub fn explain(socket: BorrowedFd<'_>, scratch: &mut Vec<u8>, error: Error) -> Error {
    if error.kind() == ErrorKind::Disconnected {
        while let Ok(Received::Frame(frame, _)) = receive(socket, scratch, None) {
            if let Frame::Error(text) = frame {
                return Error::new(ErrorKind::Disconnected, sentence(&text));
            }
        }
    }
    error
}

/// Waits until the socket is readable (or writable). Errors at the deadline.
pub fn wait(socket: BorrowedFd<'_>, for_write: bool, deadline: Instant) -> Result<(), Error> {
    let os = |e| Error::os("waiting for the peer", e);
    let poller = Poller::new().map_err(os)?;
    poller.add(socket, 0, for_write).map_err(os)?;
    // Readable data must not end a wait for room to write.
    poller.set(socket, 0, !for_write, for_write).map_err(os)?;
    let mut events = Vec::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        poller.wait(&mut events, Some(left)).map_err(os)?;
        let ready = |e: &pvblk_sys::PollEvent| {
            if for_write {
                e.writable || e.hangup
            } else {
                e.readable
            }
        };
        if events.drain(..).any(|e| ready(&e)) {
            return Ok(());
        }
        if left.is_zero() {
            return Err(Error::new(
                ErrorKind::Disconnected,
                "the peer didn't answer in time",
            ));
        }
    }
}
