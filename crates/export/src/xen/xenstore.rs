//! A client of xenstore: one connection, one request at a time, and watch events in between.

use pvblk_block::{Error, ErrorKind};
use pvblk_protocol::xenstore::{HEAD, Head, MAX_PAYLOAD, Message, Operation, take_message, texts};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// Paths at which xenstore can be reached: its daemon's socket, else the kernel's device.
const PLACES: [&str; 4] = [
    "/run/xenstored/socket",
    "/var/run/xenstored/socket",
    "/dev/xen/xenbus",
    "/proc/xen/xenbus",
];

/// Longest wait for a reply; the daemon normally replies at once.
const ANSWER_TIME: Duration = Duration::from_secs(20);
/// Most different events that are kept; after more, the caller has to look at everything (XSA-349: a guest may write
/// without end).
const MAX_EVENTS: usize = 4096;
/// Attempts at a transaction that fails because others change the same nodes.
const ATTEMPTS: usize = 100;

/// A change at or below a watched path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WatchEvent {
    /// Token given to [`Xenstore::watch`].
    pub token: String,
    /// Path of the changed node.
    pub path: String,
}

/// Events since the last look. Repeated events count once.
#[derive(Debug, Default)]
pub struct Events {
    /// In order of token and path.
    pub changes: BTreeSet<WatchEvent>,
    /// There were too many different events: look at everything.
    pub lost: bool,
}

/// A connection to xenstore.
#[derive(Debug)]
pub struct Xenstore {
    fd: OwnedFd,
    input: Vec<u8>,
    next_request: u32,
    events: Events,
    /// The connection has failed.
    is_lost: bool,
}

impl Xenstore {
    /// Connects to this domain's xenstore. Errors outside a Xen domain, or without permission.
    pub fn connect() -> Result<Xenstore, Error> {
        let found = PLACES.iter().map(Path::new).find(|p| p.exists());
        let Some(place) = found else {
            return Err(Error::config(
                "there is no xenstore here (no /run/xenstored/socket, no /dev/xen/xenbus); run this in a Xen domain, as root",
            ));
        };
        Xenstore::connect_to(place)
    }

    /// Connects to a daemon's socket, or opens a device.
    pub fn connect_to(place: &Path) -> Result<Xenstore, Error> {
        let os = |e: Errno| Error::os(format!("xenstore at {}", place.display()), e);
        let is_device = place.starts_with("/dev") || place.starts_with("/proc");
        let fd = if is_device {
            let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
            rustix::fs::open(place, flags, Mode::empty()).map_err(os)?
        } else {
            let flags = SocketFlags::CLOEXEC;
            let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
                .map_err(os)?;
            let address = SocketAddrUnix::new(place).map_err(os)?;
            rustix::net::connect(&fd, &address).map_err(os)?;
            let now = rustix::fs::fcntl_getfl(&fd).map_err(os)?;
            rustix::fs::fcntl_setfl(&fd, now | OFlags::NONBLOCK).map_err(os)?;
            fd
        };
        Ok(Xenstore {
            fd,
            input: Vec::new(),
            next_request: 1,
            events: Events::default(),
            is_lost: false,
        })
    }

    /// Reads a node's value; `None` if there is no such node.
    pub fn read(&mut self, path: &str) -> Result<Option<String>, Error> {
        self.read_in(0, path)
    }

    /// Reads a node's value; `None` if this domain sees none. To a driver domain, a removed node of another domain
    /// looks like one that it may not see.
    pub fn read_visible(&mut self, path: &str) -> Result<Option<String>, Error> {
        match self.send(Operation::Read, 0, &[path.as_bytes(), &[0]])? {
            Reply::Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            Reply::No(code) if ["ENOENT", "EACCES"].contains(&code.as_str()) => Ok(None),
            Reply::No(code) => Err(refused(Operation::Read, path, &code)),
        }
    }

    fn read_in(&mut self, transaction: u32, path: &str) -> Result<Option<String>, Error> {
        let answer = self.ask(Operation::Read, transaction, path, &[path.as_bytes(), &[0]])?;
        Ok(answer.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Lists the names in a directory; `None` if there is no such node.
    pub fn list(&mut self, path: &str) -> Result<Option<Vec<String>>, Error> {
        self.list_in(0, path)
    }

    fn list_in(&mut self, transaction: u32, path: &str) -> Result<Option<Vec<String>>, Error> {
        let parts = [path.as_bytes(), &[0]];
        let answer = self.ask(Operation::Directory, transaction, path, &parts)?;
        Ok(answer.map(|bytes| texts(&bytes)))
    }

    /// Watches `path` and everything below. One event comes at the beginning.
    pub fn watch(&mut self, path: &str, token: &str) -> Result<(), Error> {
        let parts = [path.as_bytes(), &[0], token.as_bytes(), &[0]];
        self.must(Operation::Watch, 0, path, &parts)
    }

    /// Ends a watch. Earlier events may still be in the queue.
    pub fn unwatch(&mut self, path: &str, token: &str) -> Result<(), Error> {
        let parts = [path.as_bytes(), &[0], token.as_bytes(), &[0]];
        self.ask(Operation::Unwatch, 0, path, &parts).map(drop)
    }

    /// Runs `work` in a transaction, again if others changed the nodes that it read or wrote.
    pub fn transaction<T>(
        &mut self,
        mut work: impl FnMut(&mut Transaction<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        for _ in 0..ATTEMPTS {
            let start = self.ask(Operation::TransactionStart, 0, "", &[&[0]])?;
            let number = start.map(|bytes| texts(&bytes).join(""));
            let id = number
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| Error::protocol("xenstore: a transaction without a number"))?;
            let result = work(&mut Transaction { store: self, id });
            let end: &[u8] = if result.is_ok() { b"T\0" } else { b"F\0" };
            let ended = self.send(Operation::TransactionEnd, id, &[end])?;
            let value = result?;
            match ended {
                Reply::Ok(_) => return Ok(value),
                Reply::No(code) if code == "EAGAIN" => {}
                Reply::No(code) => return Err(refused(Operation::TransactionEnd, "", &code)),
            }
        }
        Err(Error::new(
            ErrorKind::Os,
            "xenstore: the transaction was given up, because others kept changing the same nodes; try again",
        ))
    }

    /// Reads received events. Never waits.
    pub fn pump(&mut self) -> Result<(), Error> {
        if self.is_lost {
            return Err(Error::new(
                ErrorKind::Disconnected,
                "the connection to xenstore has failed",
            ));
        }
        loop {
            match self.next_message(None) {
                Ok(Some(message)) => self.note(&message),
                Ok(None) => return Ok(()),
                Err(e) => {
                    self.is_lost = true;
                    return Err(e);
                }
            }
        }
    }

    /// Takes the events since the last look.
    pub fn take_events(&mut self) -> Events {
        std::mem::take(&mut self.events)
    }

    /// True if [`Xenstore::take_events`] has something.
    pub fn has_events(&self) -> bool {
        self.events.lost || !self.events.changes.is_empty()
    }

    /// Waits up to `time` for an event.
    pub fn wait(&mut self, time: Duration) -> Result<(), Error> {
        if !self.has_events() {
            self.ready(PollFlags::IN, Instant::now() + time)?;
            self.pump()?;
        }
        Ok(())
    }

    fn must(
        &mut self,
        operation: Operation,
        transaction: u32,
        path: &str,
        parts: &[&[u8]],
    ) -> Result<(), Error> {
        match self.send(operation, transaction, parts)? {
            Reply::Ok(_) => Ok(()),
            Reply::No(code) => Err(refused(operation, path, &code)),
        }
    }

    /// As [`Xenstore::send`]; `None` if there is no such node.
    fn ask(
        &mut self,
        operation: Operation,
        transaction: u32,
        path: &str,
        parts: &[&[u8]],
    ) -> Result<Option<Vec<u8>>, Error> {
        match self.send(operation, transaction, parts)? {
            Reply::Ok(bytes) => Ok(Some(bytes)),
            Reply::No(code) if code == "ENOENT" => Ok(None),
            Reply::No(code) => Err(refused(operation, path, &code)),
        }
    }

    /// Sends a request and waits for its reply.
    fn send(
        &mut self,
        operation: Operation,
        transaction: u32,
        parts: &[&[u8]],
    ) -> Result<Reply, Error> {
        let len: usize = parts.iter().map(|p| p.len()).sum();
        if len > MAX_PAYLOAD {
            return Err(Error::config(format!(
                "xenstore: a request of {len} bytes, the most is {MAX_PAYLOAD}"
            )));
        }
        let request = self.next_request;
        self.next_request = self.next_request.wrapping_add(1).max(1);
        let head = Head {
            operation: operation as u32,
            request,
            transaction,
            len: len as u32,
        };
        let mut bytes = Vec::with_capacity(HEAD + len);
        bytes.extend(head.encode());
        parts.iter().for_each(|p| bytes.extend(*p));
        let result = self.exchange(&bytes, request);
        self.is_lost |= result.is_err();
        result
    }

    fn exchange(&mut self, bytes: &[u8], request: u32) -> Result<Reply, Error> {
        let deadline = Instant::now() + ANSWER_TIME;
        self.write_all(bytes, deadline)?;
        loop {
            let Some(message) = self.next_message(Some(deadline))? else {
                let seconds = ANSWER_TIME.as_secs();
                return Err(Error::new(
                    ErrorKind::Disconnected,
                    format!("xenstore did not answer within {seconds} s"),
                ));
            };
            if message.head.operation == Operation::WatchEvent as u32 {
                self.note(&message);
            } else if message.head.request != request {
                return Err(Error::protocol("xenstore sent a reply to no request"));
            } else {
                // Events that came with the reply are no longer in the socket, so no poll would report them.
                while let Some(event) = take_message(&mut self.input)? {
                    self.note(&event);
                }
                return Ok(if message.head.operation == Operation::Error as u32 {
                    Reply::No(texts(&message.payload).join(" "))
                } else {
                    Reply::Ok(message.payload)
                });
            }
        }
    }

    fn note(&mut self, message: &Message) {
        if message.head.operation != Operation::WatchEvent as u32 {
            return;
        }
        let mut texts = texts(&message.payload).into_iter();
        let (Some(path), Some(token)) = (texts.next(), texts.next()) else {
            return;
        };
        if self.events.changes.len() == MAX_EVENTS {
            self.events.changes.clear();
            self.events.lost = true;
        }
        if !self.events.lost {
            self.events.changes.insert(WatchEvent { token, path });
        }
    }

    /// Takes the next message; with a deadline, waits for it.
    fn next_message(&mut self, deadline: Option<Instant>) -> Result<Option<Message>, Error> {
        loop {
            if let Some(message) = take_message(&mut self.input)? {
                return Ok(Some(message));
            }
            let mut bytes = [0; HEAD + MAX_PAYLOAD];
            match rustix::io::read(&self.fd, &mut bytes) {
                Ok(0) => {
                    return Err(Error::new(
                        ErrorKind::Disconnected,
                        "xenstore closed its connection",
                    ));
                }
                Ok(n) => self.input.extend(&bytes[..n]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => match deadline {
                    Some(deadline) if self.ready(PollFlags::IN, deadline)? => {}
                    _ => return Ok(None),
                },
                Err(e) => return Err(Error::os("reading from xenstore", e)),
            }
        }
    }

    fn write_all(&mut self, mut bytes: &[u8], deadline: Instant) -> Result<(), Error> {
        while !bytes.is_empty() {
            match rustix::io::write(&self.fd, bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if self.ready(PollFlags::OUT, deadline)? => {}
                Err(e) => return Err(Error::os("writing to xenstore", e)),
            }
        }
        Ok(())
    }

    /// Waits for the descriptor; false at the deadline.
    fn ready(&self, flags: PollFlags, deadline: Instant) -> Result<bool, Error> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let time = Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            match poll(&mut [PollFd::new(&self.fd, flags)], Some(&time)) {
                Ok(n) => return Ok(n > 0),
                Err(Errno::INTR) => {}
                Err(e) => return Err(Error::os("waiting for xenstore", e)),
            }
        }
    }
}

impl AsFd for Xenstore {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

enum Reply {
    Ok(Vec<u8>),
    /// The request was refused, with the name of an error number.
    No(String),
}

fn refused(operation: Operation, path: &str, code: &str) -> Error {
    let why = match code {
        "EACCES" => "this domain, or user, may not",
        "ENOSPC" | "EQUOTA" | "E2BIG" => "xenstore's quota is used up",
        other => other,
    };
    Error::new(
        ErrorKind::Os,
        format!("xenstore: {operation:?} {path}: {why}"),
    )
}

/// A transaction: its requests take effect together.
pub struct Transaction<'a> {
    store: &'a mut Xenstore,
    id: u32,
}

impl Transaction<'_> {
    /// Reads a node's value; `None` if there is no such node.
    pub fn read(&mut self, path: &str) -> Result<Option<String>, Error> {
        self.store.read_in(self.id, path)
    }

    /// Sets a value; creates missing nodes of the path.
    pub fn write(&mut self, path: &str, value: &str) -> Result<(), Error> {
        let parts = [path.as_bytes(), &[0], value.as_bytes()];
        self.store.must(Operation::Write, self.id, path, &parts)
    }

    /// Creates a node with these permissions: `n` and the owner's domain, then `r`, `w` or `b` and the domains that
    /// may read, write or do both.
    pub fn make(&mut self, path: &str, permissions: &[String]) -> Result<(), Error> {
        let parts = [path.as_bytes(), &[0]];
        self.store.must(Operation::Mkdir, self.id, path, &parts)?;
        let mut parts = vec![path.as_bytes(), &[0]];
        for p in permissions {
            parts.extend([p.as_bytes(), &[0]]);
        }
        self.store
            .must(Operation::SetPermissions, self.id, path, &parts)
    }

    /// Lists the names in a directory; `None` if there is no such node.
    pub fn list(&mut self, path: &str) -> Result<Option<Vec<String>>, Error> {
        self.store.list_in(self.id, path)
    }

    /// Removes a node and all nodes below it. A missing node is not an error.
    pub fn remove(&mut self, path: &str) -> Result<(), Error> {
        let parts = [path.as_bytes(), &[0]];
        self.store
            .ask(Operation::Remove, self.id, path, &parts)
            .map(drop)
    }
}
