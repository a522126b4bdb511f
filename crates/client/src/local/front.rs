//! Connecting to a disk of a local server.

use super::front_memory::{FrontMemory, LocalResources};
use super::link::FrontLink;
use crate::dial::{self, Dialer, SocketType, dial_by};
use crate::rings::FrontParts;
use crate::rings::{FrontEvent, FrontPersonality, FrontWishes, FrontendNegotiation};
use pvblk_block::{Error, ErrorKind};
use pvblk_protocol::blkif::RingSize;
use pvblk_protocol::local::SocketStore;
use pvblk_protocol::local::socket::{self, Received};
use pvblk_protocol::local::{Frame, MAX_NAME};
use pvblk_protocol::xenbus::MAX_QUEUES;
use pvblk_protocol::xenbus::number::sentence;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Options of [`connect`].
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Upper limit of queues, 1 to 64; the back end may offer fewer.
    pub queues: u32,
    /// Upper limit of pages of each ring: 1, 2, 4, 8 or 16; the back end may offer fewer.
    pub ring_pages: usize,
    /// Guest memory for data and indirect pages in bytes, 4 KiB to 63 GiB, rounded up to pages. The system supplies
    /// pages on first access.
    pub memory_bytes: u64,
    /// The front end's name in the back end's logs, up to 256 bytes.
    pub name: String,
    /// Use persistent grants, if the back end agrees.
    pub persistent: bool,
    /// Longest time for the whole handshake.
    pub timeout: Duration,
    /// Behaviour of the front end in the handshake.
    pub personality: FrontPersonality,
    /// Makes all connections.
    pub dialer: Arc<dyn Dialer>,
}

impl Default for ConnectOptions {
    /// Four queues of 16 pages, 64 MiB, persistent grants, 10 seconds.
    fn default() -> ConnectOptions {
        ConnectOptions {
            queues: 4,
            ring_pages: 16,
            memory_bytes: 64 << 20,
            name: format!("process {}", std::process::id()),
            persistent: true,
            timeout: Duration::from_secs(10),
            personality: FrontPersonality::default(),
            dialer: dial::in_process(),
        }
    }
}

impl ConnectOptions {
    fn wishes(&self) -> Result<FrontWishes, Error> {
        if self.queues == 0 || self.queues > MAX_QUEUES {
            return Err(Error::config(format!(
                "{} queues; ask for 1 to {MAX_QUEUES}",
                self.queues
            )));
        }
        let ring = RingSize::from_pages(self.ring_pages).ok_or_else(|| {
            Error::config(format!(
                "a ring of {} pages; ask for 1, 2, 4, 8 or 16",
                self.ring_pages
            ))
        })?;
        if self.name.len() > MAX_NAME {
            return Err(Error::config(format!(
                "the front end's name may have {MAX_NAME} bytes"
            )));
        }
        Ok(FrontWishes {
            queues: self.queues,
            ring,
            persistent: self.persistent,
            personality: self.personality,
        })
    }
}

/// Connects to disk `disk` of the server at `path`, and waits for state Connected or the timeout.
///
/// The parts may be used on any threads. The link is for the caller's control thread; dropping it ends the
/// connection. Errors are the back end's refusal in its words, or a local failure.
pub fn connect(
    path: &Path,
    disk: &str,
    options: &ConnectOptions,
) -> Result<(FrontParts, FrontLink), Error> {
    let target = ConnectTarget {
        path: path.to_owned(),
        disk: disk.to_owned(),
        wishes: options.wishes()?,
        options: options.clone(),
    };
    let connection = target.handshake(None, options.timeout)?;
    Ok((connection.parts, FrontLink::new(connection.session, target)))
}

/// A connection's target and options, kept for reconnecting.
#[derive(Clone, Debug)]
pub(super) struct ConnectTarget {
    path: PathBuf,
    disk: String,
    options: ConnectOptions,
    wishes: FrontWishes,
}

/// The control side of a connection.
#[derive(Debug)]
pub(super) struct ControlSession {
    pub store: SocketStore,
    pub negotiation: FrontendNegotiation,
    pub memory: Arc<FrontMemory>,
}

/// A connection that was just made.
pub(super) struct NewConnection {
    pub parts: FrontParts,
    pub session: ControlSession,
}

impl ConnectTarget {
    /// Name in messages to users.
    pub fn name(&self) -> String {
        format!("disk {} at {}", self.disk, self.path.display())
    }

    /// Connects. With the memory of an earlier connection, at most as many queues and pages are used as then.
    pub fn handshake(
        &self,
        memory: Option<Arc<FrontMemory>>,
        timeout: Duration,
    ) -> Result<NewConnection, Error> {
        let deadline = Instant::now() + timeout;
        let dialer = &*self.options.dialer;
        let socket = dial_by(dialer, &self.path, SocketType::SEQPACKET, deadline)?;
        let socket = Arc::new(socket);
        self.open_session(&socket, memory, deadline)
            .map_err(|e| socket::explain(socket.as_fd(), &mut Vec::new(), e).context(self.name()))
    }

    fn open_session(
        &self,
        socket: &Arc<OwnedFd>,
        memory: Option<Arc<FrontMemory>>,
        deadline: Instant,
    ) -> Result<NewConnection, Error> {
        let mut wishes = self.wishes;
        if let Some(m) = &memory {
            wishes.queues = wishes.queues.min(m.queues as u32);
            wishes.ring = wishes.ring.min(m.ring);
        }
        let hello = Frame::Hello {
            disk: self.disk.clone(),
            front: self.options.name.clone(),
        };
        let mut resources = LocalResources {
            socket: Arc::clone(socket),
            deadline,
            data_bytes: self.options.memory_bytes,
            name: format!("front end of {}", self.name()),
            memory,
            made: None,
        };
        let mut store = SocketStore::new(Arc::clone(socket), Some(deadline));
        let mut negotiation = FrontendNegotiation::new(wishes);
        let mut scratch = Vec::new();
        socket::send(socket.as_fd(), &hello, &[], Some(deadline))?;
        negotiation.start(&mut store)?;
        let disconnected = |why: &str| Err(Error::new(ErrorKind::Disconnected, why));
        loop {
            socket::wait(socket.as_fd(), false, deadline)?;
            let changes = match socket::receive(socket.as_fd(), &mut scratch, None)? {
                Received::Nothing => continue,
                Received::Frame(Frame::Write(changes), _) => changes,
                Received::Frame(Frame::Error(text), _) => return disconnected(&sentence(&text)),
                Received::Frame(..) => {
                    return Err(Error::protocol("the back end sent a front end's message"));
                }
                Received::Closed => return disconnected("the back end closed its socket"),
            };
            store.apply(changes)?;
            let event = negotiation.peer_changed(&mut store, &mut resources)?;
            if let Some(FrontEvent::Connected(properties)) = event {
                let (Some((queues, granter)), Some(memory)) =
                    (resources.made.take(), resources.memory.take())
                else {
                    return Err(Error::protocol(
                        "the back end connected before the rings were made",
                    ));
                };
                return Ok(NewConnection {
                    parts: FrontParts {
                        name: self.name(),
                        properties,
                        queues,
                        granter,
                    },
                    session: ControlSession {
                        store,
                        negotiation,
                        memory,
                    },
                });
            }
        }
    }
}
