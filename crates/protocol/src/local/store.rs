//! The two directories of a handshake, over a socket.

use super::Frame;
use super::socket;
use crate::xenbus::{Change, KeyMap, Store};
use pvblk_block::Error;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// Holds the peer's directory as far as it was received; sends changes of ours as messages.
#[derive(Debug)]
pub struct SocketStore {
    pub socket: Arc<OwnedFd>,
    peer: KeyMap,
    /// End of the wait for room in the socket; `None`: don't wait.
    pub deadline: Option<Instant>,
}

impl SocketStore {
    pub fn new(socket: Arc<OwnedFd>, deadline: Option<Instant>) -> SocketStore {
        SocketStore {
            socket,
            peer: KeyMap::new(),
            deadline,
        }
    }

    /// Applies a transaction of the peer.
    pub fn apply(&mut self, changes: Vec<Change>) -> Result<(), Error> {
        self.peer.apply(changes)
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Store for SocketStore {
    fn read(&self, key: &str) -> Option<String> {
        self.peer.get(key).map(str::to_owned)
    }

    fn write(&mut self, changes: &[Change]) -> Result<(), Error> {
        let frame = Frame::Write(changes.to_vec());
        socket::send(self.fd(), &frame, &[], self.deadline)
    }
}
