//! A local front end's link to its back end, after it is Connected.

use super::frame::Frame;
use super::front::{Dialer, Talk};
use super::socket::{self, Received};
use crate::xenbus::number::sentence;
use crate::xenbus::{FrontEvent, FrontResources, QueueKeys};
use pvblk_block::{Error, ErrorKind};
use pvblk_frontend::FrontParts;
use pvblk_ring::RingSize;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Messages handled in one step; more stay readable.
const MESSAGES_PER_STEP: usize = 64;
/// How long an orderly end may take.
const CLOSE_TIME: Duration = Duration::from_secs(10);

/// What the back end did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// The disk has this many 512-byte sectors now.
    Resized {
        /// New capacity in 512-byte sectors.
        sectors: u64,
    },
    /// The back end wants to end: let requests in flight finish, then call [`FrontLink::close`].
    Closing {
        /// Its reason, if it gave one.
        reason: Option<String>,
    },
    /// The back end has ended and uses nothing of ours. The last event.
    Closed,
    /// The back end is gone, or makes no sense. Requests in flight are lost. The last event.
    Gone {
        /// What happened.
        reason: String,
    },
}

/// The control side of a connection: not for the hot path. Dropping it closes the socket, which ends the connection.
#[derive(Debug)]
pub struct FrontLink {
    talk: Talk,
    dialer: Dialer,
    scratch: Vec<u8>,
    ended: bool,
}

/// Rings are made once for a connection.
struct NoMore;

impl FrontResources for NoMore {
    fn allocate(&mut self, _: usize, _: RingSize) -> Result<Vec<QueueKeys>, Error> {
        Err(Error::protocol("the back end offered rings a second time"))
    }
}

impl FrontLink {
    pub(super) fn new(talk: Talk, dialer: Dialer) -> FrontLink {
        FrontLink {
            talk,
            dialer,
            scratch: Vec::new(),
            ended: false,
        }
    }

    /// Ends this connection, if it hasn't ended, and makes another one to the same disk, on the same memory, within
    /// `timeout`: with at most as many queues and pages as the first. For [`pvblk_frontend::Frontend::reconnect`],
    /// after its `suspend`.
    ///
    /// A live server answers only when nothing that we left is at work there any more. Errors as [`super::connect`]; it
    /// may be tried again.
    pub fn reconnect(&mut self, timeout: Duration) -> Result<FrontParts, Error> {
        self.ended = true;
        // It may be shut already.
        let _ = rustix::net::shutdown(self.talk.store.fd(), rustix::net::Shutdown::Both);
        let memory = Arc::clone(&self.talk.memory);
        let contact = self.dialer.handshake(Some(memory), timeout)?;
        self.talk = contact.talk;
        self.ended = false;
        Ok(contact.parts)
    }

    /// Readable when [`FrontLink::step`] has something to do. To be polled until the last event: after it, it stays readable.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.talk.store.fd()
    }

    /// True after [`LinkEvent::Closed`] or [`LinkEvent::Gone`].
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Handles what the back end sent, without waiting.
    pub fn step(&mut self) -> Vec<LinkEvent> {
        let mut events = Vec::new();
        for _ in 0..MESSAGES_PER_STEP {
            if self.ended {
                break;
            }
            match self.next() {
                Ok(Step::Event(event)) => events.push(event),
                Ok(Step::Quiet) => continue,
                Ok(Step::Nothing) => break,
                Err(e) => {
                    let reason = format!("{}: {e}", self.dialer.name());
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

    /// Ends the connection in order and waits until the back end uses nothing of ours: at most 10 seconds.
    ///
    /// The caller's requests have all been answered; one that wasn't is lost. Errors if the back end is gone
    /// or doesn't answer: the connection has ended all the same.
    pub fn close(&mut self) -> Result<(), Error> {
        if self.ended {
            return Ok(());
        }
        let deadline = Instant::now() + CLOSE_TIME;
        self.talk.store.deadline = Some(deadline);
        let result = self.close_by(deadline);
        self.ended = true;
        result.map_err(|e| {
            let e = socket::explain(self.talk.store.fd(), &mut self.scratch, e);
            e.context(self.dialer.name())
        })
    }

    fn close_by(&mut self, deadline: Instant) -> Result<(), Error> {
        self.talk.negotiation.begin_close(&mut self.talk.store)?;
        self.talk.negotiation.finish_close(&mut self.talk.store)?;
        loop {
            match self.next()? {
                Step::Event(LinkEvent::Closed) => return Ok(()),
                Step::Event(_) | Step::Quiet => {}
                Step::Nothing => socket::wait(self.talk.store.fd(), false, deadline)?,
            }
        }
    }

    fn next(&mut self) -> Result<Step, Error> {
        let gone = |text: &str| Error::new(ErrorKind::Disconnected, text);
        let changes = match socket::receive(self.talk.store.fd(), &mut self.scratch, None)? {
            Received::Frame(Frame::Write(changes), _) => changes,
            Received::Frame(Frame::Error(text), _) => return Err(gone(&sentence(&text))),
            Received::Frame(..) => {
                return Err(Error::protocol("the back end sent a front end's message"));
            }
            Received::Nothing => return Ok(Step::Nothing),
            Received::Closed => return Err(gone("the back end closed its socket")),
        };
        self.talk.store.apply(changes)?;
        let Talk {
            store, negotiation, ..
        } = &mut self.talk;
        let event = negotiation.peer_changed(store, &mut NoMore)?;
        Ok(match event {
            None | Some(FrontEvent::Connected(_)) => Step::Quiet,
            Some(FrontEvent::Resized { sectors }) => Step::Event(LinkEvent::Resized { sectors }),
            Some(FrontEvent::Closing { reason }) => Step::Event(LinkEvent::Closing { reason }),
            Some(FrontEvent::Closed { .. }) => Step::Event(LinkEvent::Closed),
        })
    }
}

enum Step {
    Event(LinkEvent),
    /// A message that changes nothing for us.
    Quiet,
    Nothing,
}
