//! One front end as the server sees it.

use super::connector::{LocalConnector, Shared};
use super::frame::Frame;
use super::socket::{self, Received};
use super::store::SocketStore;
use crate::xenbus::number::{quote, sentence};
use crate::xenbus::serving::{self, Serves, Serving};
use crate::xenbus::{BackendNegotiation, Connector, Note, XenbusState};
use pvblk_block::{Error, ErrorKind};
use pvblk_sys::{Closer, PeerFd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a front end may take to get to Connected, or to come back after Closed.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// How long the end of a connection may take: requests in flight have to finish.
const CLOSING_TIME: Duration = Duration::from_secs(30);
/// Messages of one front end before the others get their turn.
const MESSAGES_PER_TURN: usize = 32;

/// A front end that has named its disk.
struct Named {
    negotiation: BackendNegotiation,
    store: SocketStore,
    connector: LocalConnector,
}

/// A socket, and from its HELLO on a handshake. Errors of its methods end it: see [`Connection::end`].
pub(super) struct Connection {
    shared: Arc<Shared>,
    id: u64,
    socket: Arc<OwnedFd>,
    closer: Arc<Closer>,
    named: Option<Named>,
    state: XenbusState,
    /// When it is to be ended if its state is still the same.
    pub deadline: Option<Instant>,
}

impl Connection {
    pub fn new(shared: Arc<Shared>, id: u64, socket: OwnedFd) -> Connection {
        Connection {
            closer: shared.closer(""),
            shared,
            id,
            socket: Arc::new(socket),
            named: None,
            state: XenbusState::Initialising,
            deadline: Some(Instant::now() + HANDSHAKE_TIME),
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// For logs.
    pub fn name(&self) -> String {
        match &self.named {
            Some(n) => n.connector.name(),
            None => format!("local front end {}", self.id),
        }
    }

    /// The disk that it named, if it has; for counts of the log.
    pub fn disk(&self) -> &str {
        let named = self.named.as_ref();
        named.map_or("no disk", |n| &n.connector.serving.disk)
    }

    /// True if both ends have nothing of each other any more.
    pub fn is_closed(&self) -> bool {
        self.state == XenbusState::Closed || self.named.is_none()
    }

    /// Handles what came in, up to a bound.
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
                named
                    .negotiation
                    .peer_changed(&mut named.store, &mut named.connector)?;
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
            _ => return Err(Error::protocol("HELLO came a second time")),
        }
        self.settle();
        Ok(())
    }

    fn hello(&mut self, disk: String, front: &str) -> Result<(), Error> {
        let Some(device) = self.shared.host.device(&disk) else {
            return Err(Error::config(format!(
                "there is no disk {} here; compare the names given with --disk on both sides",
                quote(&disk)
            )));
        };
        self.closer = self.shared.closer(&disk);
        let names = (sentence(&disk), sentence(front));
        let Shared { host, inbox, .. } = &*self.shared;
        let serving = Serving::new(host, inbox, self.id, names, device);
        let offers = serving.offers;
        let connector = LocalConnector::new(Arc::clone(&self.shared), serving);
        self.named = Some(Named {
            negotiation: BackendNegotiation::new(offers, true),
            store: SocketStore::new(Arc::clone(&self.socket), None),
            connector,
        });
        self.fence_opened()
    }

    /// Starts the handshake, if the disk's fence is open and it isn't under way.
    pub fn fence_opened(&mut self) -> Result<(), Error> {
        let Some(n) = &mut self.named else {
            return Ok(());
        };
        let waits = n.negotiation.state() == XenbusState::Initialising;
        if waits && n.connector.serving.may_begin() {
            n.negotiation.start(&mut n.store)?;
            n.negotiation.peer_changed(&mut n.store, &mut n.connector)?;
        }
        self.settle();
        Ok(())
    }

    /// Handles what another thread told about this connection.
    pub fn note(&mut self, note: Note) -> Result<(), Error> {
        if matches!(note, Note::FenceOpened { .. }) {
            return self.fence_opened();
        }
        let Some(Named {
            negotiation,
            store,
            connector,
        }) = &mut self.named
        else {
            return Ok(());
        };
        serving::note(note, negotiation, store, connector)?;
        self.settle();
        Ok(())
    }

    /// Asks the front end to leave, for good.
    pub fn stop(&mut self) -> Result<(), Error> {
        if let Some(n) = &mut self.named {
            n.negotiation.set_online(false);
            n.negotiation.close(&mut n.store, &mut n.connector)?;
        }
        self.settle();
        Ok(())
    }

    /// Closes the socket, after telling `reason` if there is one. Returns what still has requests in flight.
    pub fn end(self, reason: Option<&str>) -> Option<LocalConnector> {
        if let Some(text) = reason {
            let frame = Frame::Error(sentence(text));
            // If the front end doesn't read, it won't know; the log does.
            let _ = socket::send(self.fd(), &frame, &[], None);
        }
        let mut connector = self.named?.connector;
        (!connector.disconnect()).then_some(connector)
    }

    /// Restarts the clock when the state has changed.
    fn settle(&mut self) {
        let Some(named) = &self.named else { return };
        let state = named.negotiation.state();
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
