//! Messages between the two processes of a server: JSON in one packet, at most one descriptor beside it.

use crate::events::EventForm;
use anyhow::{Context, Result, bail};
use parking_lot::{Condvar, Mutex};
use pvblk_client::dial::SocketType;
use pvblk_sys::fdpass;
use pvblk_volume::{FileAnswer, FileCall};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

/// Most bytes of a message.
const MOST: usize = 128 << 10;

/// Connections that are made at once, of all calls that are; the process that serves waits with the next one, and the parent refuses it. So servers that don't answer hold
/// up nothing but each other.
pub const CONNECTING: usize = 32;

/// Places of which so many can be taken at once.
#[derive(Debug)]
pub struct Places {
    free: Mutex<usize>,
    given_back: Condvar,
}

impl Places {
    pub fn new(number: usize) -> Places {
        Places {
            free: Mutex::new(number),
            given_back: Condvar::new(),
        }
    }

    /// Waits for one.
    pub fn take(&self) {
        let mut free = self.free.lock();
        while *free == 0 {
            self.given_back.wait(&mut free);
        }
        *free -= 1;
    }

    /// False if there is none.
    pub fn try_take(&self) -> bool {
        let mut free = self.free.lock();
        let is_free = *free > 0;
        *free -= usize::from(is_free);
        is_free
    }

    pub fn give_back(&self) {
        *self.free.lock() += 1;
        self.given_back.notify_one();
    }
}

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
    /// Connect to a server of other disks.
    Connect {
        /// As users write it.
        address: String,
        kind: SocketKind,
        /// Longest wait for one address of a host.
        timeout: Duration,
    },
    /// Have an image of a Ceph cluster opened by the process that has its library.
    OpenImage(String),
    /// Have it closed; nobody waits for the answer.
    CloseImage(String),
    /// Run the program of `--on-event` for this one.
    Event(EventForm),
    /// The server stops: the program's time is short from now on.
    LastEvents,
    /// Tell the service manager the server's state.
    Tell(State),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketKind {
    Stream,
    Packets,
}

impl From<SocketKind> for SocketType {
    fn from(kind: SocketKind) -> SocketType {
        match kind {
            SocketKind::Stream => SocketType::STREAM,
            SocketKind::Packets => SocketType::SEQPACKET,
        }
    }
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
    /// The connected socket is beside it.
    Connected,
    /// The name by which an image is served over rings, and the path of the socket.
    Image(String, PathBuf),
    /// The number of a system call's error.
    Failed(i32),
    /// Its reason in words. `by_user`: the user has to ask for something else.
    Refused {
        by_user: bool,
        text: String,
    },
}

impl Answer {
    /// The answer to a call that failed with this error.
    pub fn of(e: &io::Error) -> Answer {
        match e.raw_os_error() {
            Some(number) => Answer::Failed(number),
            None => Answer::Refused {
                by_user: e.kind() == ErrorKind::PermissionDenied,
                text: e.to_string(),
            },
        }
    }

    /// The error that the call failed with.
    pub fn error(self) -> io::Error {
        match self {
            Answer::Failed(number) => io::Error::from_raw_os_error(number),
            Answer::Refused {
                by_user: true,
                text,
            } => io::Error::new(ErrorKind::PermissionDenied, text),
            Answer::Refused { text, .. } => io::Error::other(text),
            _ => Errno::PROTO.into(),
        }
    }
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
            // It ended without having read all.
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return Ok(None),
            received => received?,
        };
        if length == 0 {
            return Ok(None);
        }
        let message = serde_json::from_slice(&bytes[..length])?;
        return Ok(Some((message, files.pop())));
    }
}
