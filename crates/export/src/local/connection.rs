//! One front end's connection, on the server's side.

use super::connector::{LocalConnector, LocalServerContext};
use crate::kit::{Event, FrontEnd, Inbox};
use crate::xenbus::Connector;
use crate::xenbus::serving::{Handshake, Serves, Serving};
use pvblk_backend::events::Peer;
use pvblk_block::{Error, ErrorKind};
use pvblk_protocol::local::Frame;
use pvblk_protocol::local::SocketStore;
use pvblk_protocol::local::socket::{self, Received};
use pvblk_protocol::xenbus::XenbusState;
use pvblk_protocol::xenbus::number::{quote, sentence};
use pvblk_sys::{Closer, PeerFd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time for a front end to reach Connected, or to come back after Closed.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// Longest time for a connection to end: requests in flight have to finish.
const CLOSING_TIME: Duration = Duration::from_secs(30);
/// Most messages of one front end that are handled before other front ends have their turn.
const MESSAGES_PER_TURN: usize = 32;

/// A front end's socket, with a handshake after HELLO. An error of a method ends the connection: see
/// [`Connection::end`].
pub(super) struct Connection {
    shared: Arc<LocalServerContext>,
    inbox: Arc<Inbox>,
    id: u64,
    socket: Arc<OwnedFd>,
    peer: Peer,
    closer: Arc<Closer>,
    /// Since it has named its disk.
    named: Option<Handshake<SocketStore, LocalConnector>>,
    state: XenbusState,
    /// Time at which the connection is ended if its state is still the same.
    pub deadline: Option<Instant>,
}

impl Connection {
    pub fn new(
        shared: Arc<LocalServerContext>,
        inbox: Arc<Inbox>,
        id: u64,
        socket: OwnedFd,
        address: &str,
    ) -> Connection {
        let peer = Peer::of_socket("rings", socket.as_fd(), address);
        Connection {
            closer: shared.closer(""),
            shared,
            inbox,
            id,
            socket: Arc::new(socket),
            peer,
            named: None,
            state: XenbusState::Initialising,
            deadline: Some(Instant::now() + HANDSHAKE_TIME),
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Name in log lines.
    pub fn name(&self) -> String {
        match &self.named {
            Some(n) => n.connector.name(),
            None => format!("local front end {}", self.id),
        }
    }

    /// The disk that the front end named, if there is one.
    pub fn disk(&self) -> Option<&str> {
        let named = self.named.as_ref();
        named.map(|n| n.connector.serving.disk.as_str())
    }

    /// The front end as the system knows it.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// True if neither end uses resources of the other any more.
    pub fn is_closed(&self) -> bool {
        self.state == XenbusState::Closed || self.named.is_none()
    }

    /// Handles received messages, at most [`MESSAGES_PER_TURN`].
    pub fn readable(&mut self, scratch: &mut Vec<u8>) -> Result<(), Error> {
        for _ in 0..MESSAGES_PER_TURN {
            match socket::receive(self.fd(), scratch, Some(&self.closer))? {
                Received::Frame(frame, fds) => self.handle(frame, fds)?,
                Received::Nothing => break,
                Received::Closed => {
                    return Err(Error::new(
                        ErrorKind::Disconnected,
                        "the front end closed its socket",
                    ));
                }
            }
        }
        Ok(())
    }

    fn handle(&mut self, frame: Frame, fds: Vec<PeerFd>) -> Result<(), Error> {
        let Some(named) = &mut self.named else {
            return match frame {
                Frame::Hello { disk, front } => self.hello(disk, &front),
                _ => Err(Error::protocol("the first message is not HELLO")),
            };
        };
        let mut fds = fds.into_iter();
        match (frame, fds.next(), fds.next()) {
            (Frame::Write(changes), ..) => {
                named.store.apply(changes)?;
                named.peer_changed()?;
            }
            (
                Frame::Memory {
                    table_first,
                    table_frames,
                },
                Some(file),
                _,
            ) => named
                .connector
                .take_memory(file, table_first, table_frames)?,
            (Frame::Channel { port }, Some(from_peer), Some(to_peer)) => {
                named.connector.take_channel(port, from_peer, to_peer)?;
            }
            (Frame::Error(text), ..) => {
                return Err(Error::new(ErrorKind::Disconnected, sentence(&text)));
            }
            _ => return Err(Error::protocol("the front end sent HELLO a second time")),
        }
        self.settle();
        Ok(())
    }

    fn hello(&mut self, disk: String, front: &str) -> Result<(), Error> {
        let Some(found) = self.shared.service.disks().find(&disk) else {
            return Err(Error::config(format!(
                "there is no disk {} here; compare the names given with --disk on both sides",
                quote(&disk)
            )));
        };
        self.closer = self.shared.closer(&disk);
        let peer = sentence(front);
        let service = &self.shared.service;
        let (name, told) = (peer.clone(), self.peer.clone());
        let front = FrontEnd::new(service, found, &self.inbox, self.id, name, told);
        let serving = Serving {
            disk: sentence(&disk),
            peer,
            front,
            offers: self.shared.offers,
        };
        let connector = LocalConnector::new(Arc::clone(&self.shared), serving);
        let store = SocketStore::new(Arc::clone(&self.socket), None);
        let named = self.named.insert(Handshake::new(store, connector));
        named.start()?;
        self.settle();
        Ok(())
    }

    /// Handles an event that another thread reported.
    pub fn event(&mut self, event: Event) -> Result<(), Error> {
        if let Some(named) = &mut self.named {
            named.event(event)?;
        }
        self.settle();
        Ok(())
    }

    /// Asks the front end to disconnect, for good.
    pub fn stop(&mut self) -> Result<(), Error> {
        if let Some(n) = &mut self.named {
            n.negotiation.set_online(false);
            n.close()?;
        }
        self.settle();
        Ok(())
    }

    /// Closes the socket, after sending `reason` if there is one. Returns what has left the disk if requests of it are still at work.
    pub fn end(self, reason: Option<&str>) -> Option<Serving> {
        if let Some(text) = reason {
            let frame = Frame::Error(sentence(text));
            // A front end that doesn't read its socket misses the reason; it is in the log.
            let _ = socket::send(self.fd(), &frame, &[], None);
        }
        let mut connector = self.named?.connector;
        (!connector.disconnect()).then_some(connector.serving)
    }

    /// Sets the deadline anew if the state has changed.
    fn settle(&mut self) {
        let Some(named) = &self.named else { return };
        let state = named.state();
        if state == self.state {
            return;
        }
        tracing::debug!("{}: {} → {state}", self.name(), self.state);
        self.state = state;
        self.deadline = match state {
            XenbusState::Connected => None,
            XenbusState::Closing => Some(Instant::now() + CLOSING_TIME),
            _ => Some(Instant::now() + HANDSHAKE_TIME),
        };
    }
}
