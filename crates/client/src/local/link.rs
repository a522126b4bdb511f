//! A local front end's link to its back end, after it is Connected.

use super::front::{ConnectTarget, ControlSession};
use crate::rings::FrontParts;
use crate::rings::{FrontEvent, FrontResources};
use pvblk_block::{Error, ErrorKind};
use pvblk_protocol::blkif::RingSize;
use pvblk_protocol::local::Frame;
use pvblk_protocol::local::socket::{self, Received};
use pvblk_protocol::xenbus::QueueKeys;
use pvblk_protocol::xenbus::number::sentence;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most messages handled in one step; others stay readable.
const MESSAGES_PER_STEP: usize = 64;
/// Longest time of an orderly end.
const CLOSE_TIME: Duration = Duration::from_secs(10);

/// An action of the back end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// The disk's capacity changed.
    Resized {
        /// New capacity in 512-byte sectors.
        sectors: u64,
    },
    /// The back end asks to end: let requests in flight finish, then call [`FrontLink::close`].
    Closing {
        /// The back end's reason, if it gave one.
        reason: Option<String>,
    },
    /// The back end has ended and uses none of our memory. The last event.
    Closed,
    /// The back end is gone, or broke the protocol. Requests in flight are lost. The last event.
    Gone {
        /// Reason for logs.
        reason: String,
    },
}

/// The control side of a connection, not used per request. Dropping it closes the socket, which ends the connection.
#[derive(Debug)]
pub struct FrontLink {
    session: ControlSession,
    target: ConnectTarget,
    scratch: Vec<u8>,
    ended: bool,
}

/// Refuses to make rings: they are made once for a connection.
struct NoResources;

impl FrontResources for NoResources {
    fn allocate(&mut self, _: usize, _: RingSize) -> Result<Vec<QueueKeys>, Error> {
        Err(Error::protocol("the back end offered rings a second time"))
    }
}

impl FrontLink {
    pub(super) fn new(session: ControlSession, target: ConnectTarget) -> FrontLink {
        FrontLink {
            session,
            target,
            scratch: Vec::new(),
            ended: false,
        }
    }

    /// Ends this connection if it hasn't ended, and makes a new one to the same disk, on the same memory, within
    /// `timeout`, with at most as many queues and pages as the first. For [`crate::rings::Frontend::reconnect`],
    /// after its `suspend`.
    ///
    /// A live server completes the handshake only after all requests of the earlier connection have ended. Errors as
    /// [`super::connect`]; the caller may try again.
    pub fn reconnect(&mut self, timeout: Duration) -> Result<FrontParts, Error> {
        self.ended = true;
        // The socket may be shut down already.
        let _ = rustix::net::shutdown(self.session.store.fd(), rustix::net::Shutdown::Both);
        let memory = Arc::clone(&self.session.memory);
        let connection = self.target.handshake(Some(memory), timeout)?;
        self.session = connection.session;
        self.ended = false;
        Ok(connection.parts)
    }

    /// Readable when [`FrontLink::step`] has something to do. Stop polling it after the last event: it stays
    /// readable.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.session.store.fd()
    }

    /// True after [`LinkEvent::Closed`] or [`LinkEvent::Gone`].
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Handles messages of the back end, without waiting.
    pub fn step(&mut self) -> Vec<LinkEvent> {
        let mut events = Vec::new();
        for _ in 0..MESSAGES_PER_STEP {
            if self.ended {
                break;
            }
            match self.next() {
                Ok(LinkStep::Event(event)) => events.push(event),
                Ok(LinkStep::Quiet) => continue,
                Ok(LinkStep::Nothing) => break,
                Err(e) => {
                    let reason = format!("{}: {e}", self.target.name());
                    events.push(LinkEvent::Gone { reason });
                }
            }
            self.ended = matches!(
                events.last(),
                Some(LinkEvent::Closed | LinkEvent::Gone { .. })
            );
        }
        events
    }

    /// Ends the connection in order and waits, at most 10 seconds, until the back end uses none of our memory.
    ///
    /// All requests of the caller must have completed; others are lost. Errors if the back end is gone or doesn't
    /// respond; the connection has ended in any case.
    pub fn close(&mut self) -> Result<(), Error> {
        if self.ended {
            return Ok(());
        }
        let deadline = Instant::now() + CLOSE_TIME;
        self.session.store.deadline = Some(deadline);
        let result = self.close_by(deadline);
        self.ended = true;
        result.map_err(|e| {
            let e = socket::explain(self.session.store.fd(), &mut self.scratch, e);
            e.context(self.target.name())
        })
    }

    fn close_by(&mut self, deadline: Instant) -> Result<(), Error> {
        self.session
            .negotiation
            .begin_close(&mut self.session.store)?;
        self.session
            .negotiation
            .finish_close(&mut self.session.store)?;
        loop {
            match self.next()? {
                LinkStep::Event(LinkEvent::Closed) => return Ok(()),
                LinkStep::Event(_) | LinkStep::Quiet => {}
                LinkStep::Nothing => socket::wait(self.session.store.fd(), false, deadline)?,
            }
        }
    }

    fn next(&mut self) -> Result<LinkStep, Error> {
        let gone = |text: &str| Error::new(ErrorKind::Disconnected, text);
        let changes = match socket::receive(self.session.store.fd(), &mut self.scratch, None)? {
            Received::Frame(Frame::Write(changes), _) => changes,
            Received::Frame(Frame::Error(text), _) => return Err(gone(&sentence(&text))),
            Received::Frame(..) => {
                return Err(Error::protocol("the back end sent a front end's message"));
            }
            Received::Nothing => return Ok(LinkStep::Nothing),
            Received::Closed => return Err(gone("the back end closed its socket")),
        };
        self.session.store.apply(changes)?;
        let ControlSession {
            store, negotiation, ..
        } = &mut self.session;
        let event = negotiation.peer_changed(store, &mut NoResources)?;
        Ok(match event {
            None | Some(FrontEvent::Connected(_)) => LinkStep::Quiet,
            Some(FrontEvent::Resized { sectors }) => {
                LinkStep::Event(LinkEvent::Resized { sectors })
            }
            Some(FrontEvent::Closing { reason }) => LinkStep::Event(LinkEvent::Closing { reason }),
            Some(FrontEvent::Closed { .. }) => LinkStep::Event(LinkEvent::Closed),
        })
    }
}

/// Result of looking for one message.
enum LinkStep {
    Event(LinkEvent),
    /// A message that needs no action here.
    Quiet,
    Nothing,
}
