//! Messages between the two processes of a server: JSON in one packet, at most one descriptor beside it.

use anyhow::{Context, Result, bail};
use pvblk_sys::fdpass;
use pvblk_volume::{FileAnswer, FileCall};
use rustix::event::{PollFd, PollFlags, poll};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Most bytes of a message.
const MOST: usize = 128 << 10;

/// A message with the number of its call.
#[derive(Serialize, Deserialize)]
pub struct Numbered<T> {
    pub number: u64,
    pub of: T,
}

/// A call of the process that serves.
#[derive(Debug, Serialize, Deserialize)]
pub enum Call {
    File(FileCall),
    /// Make a listening socket; its file, if it has one, is `name` until [`Call::Unbind`].
    Bind {
        name: u64,
        /// As users write it: `unix:PATH` or `tcp:HOST:PORT`.
        address: String,
        kind: SocketKind,
        /// Permissions and group of its file.
        mode: u32,
        group: Option<u32>,
    },
    /// Remove the file of a socket.
    Unbind(u64),
    /// Tell the service manager the server's state.
    Tell(State),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketKind {
    Stream,
    Packets,
}

/// A state of the server for its service manager (sd_notify(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    Ready,
    Stopping,
    Watchdog,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    File(FileAnswer),
    Done,
    /// The socket is beside it.
    Bound,
    /// Its reason in words. `by_user`: the user has to ask for something else.
    Refused {
        by_user: bool,
        text: String,
    },
}

/// Sends a message with a descriptor; waits while the other side doesn't read. One thread at a time.
pub fn send(
    socket: BorrowedFd<'_>,
    message: &impl Serialize,
    file: Option<BorrowedFd<'_>>,
) -> Result<()> {
    let bytes = serde_json::to_vec(message).context("a message")?;
    if bytes.len() > MOST {
        bail!("a message of {} bytes is too long", bytes.len());
    }
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    loop {
        match fdpass::send(socket, &bytes, &files) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                poll(
                    &mut [PollFd::from_borrowed_fd(socket, PollFlags::OUT)],
                    None,
                )?;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            sent => return Ok(sent?),
        }
    }
}

/// The next message and its descriptor; `None`: the other side is gone.
pub fn receive<T: DeserializeOwned>(socket: &OwnedFd) -> Result<Option<(T, Option<OwnedFd>)>> {
    let mut bytes = vec![0; MOST];
    loop {
        let (length, mut files) = match fdpass::recv(socket.as_fd(), &mut bytes, true) {
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            received => received?,
        };
        if length == 0 {
            return Ok(None);
        }
        let message = serde_json::from_slice(&bytes[..length])?;
        return Ok(Some((message, files.pop())));
    }
}
