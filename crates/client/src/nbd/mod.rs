//! An NBD client: an export of any server as a block device.
//!
//! Each opened queue is a connection of its own with requests in flight one behind the other, driven by
//! steps as all queues are: nothing blocks, and no thread runs behind the caller's back. Only opening
//! waits for the server, at most [`NbdClientConfig::timeout`].
//!
//! Structured replies are used where the server has them. Every field of a reply is checked; one that
//! makes no sense, or a lost connection, fails the queue: all in flight and all that comes later ends
//! with an I/O error, and [`NbdClient::failure`] says why.

mod hello;
mod inbox;
mod queue;
mod slot;
mod uri;

pub use hello::Terms;
use hello::negotiate;
use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Capabilities, Close, DeviceEvent, DeviceQueue, Error, ErrorKind, EventHub, Limits,
    QueueContext, SECTOR,
};
use pvblk_protocol::nbd::NbdAddr;
use queue::NbdQueue;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
pub use uri::NbdUri;

/// Settings of a client.
#[derive(Clone, Debug)]
pub struct NbdClientConfig {
    /// Longest time of connecting, and of each step of the negotiation.
    pub timeout: Duration,
    /// Connections to make at the start, and no more later: queues take them, and give them back. So opening a queue never waits for
    /// the server. A server without CAN_MULTI_CONN gets one. `None`: each queue connects when it is opened.
    pub connections: Option<u16>,
}

impl Default for NbdClientConfig {
    fn default() -> NbdClientConfig {
        NbdClientConfig {
            timeout: Duration::from_secs(10),
            connections: None,
        }
    }
}

/// State that the device and its queues share.
#[derive(Default)]
struct Shared {
    events: EventHub,
    failure: Mutex<Option<String>>,
    connections: AtomicUsize,
    /// Connections without a queue.
    ready: Mutex<Vec<OwnedFd>>,
    /// Queues give their connections back.
    keeps: bool,
}

impl Shared {
    fn with(ready: Vec<OwnedFd>, keeps: bool) -> Arc<Shared> {
        Arc::new(Shared {
            ready: Mutex::new(ready),
            keeps,
            ..Shared::default()
        })
    }

    fn fail(&self, why: &str) {
        self.failure.lock().get_or_insert_with(|| why.to_owned());
        self.events.raise(DeviceEvent::Gone);
    }
}

/// Counts a queue while it lives.
struct Seat(Arc<Shared>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::AcqRel);
    }
}

/// An export of an NBD server. Its size and limits are those of the first connection.
pub struct NbdClient {
    uri: NbdUri,
    config: NbdClientConfig,
    terms: Terms,
    shared: Arc<Shared>,
}

impl NbdClient {
    /// Connects and negotiates.
    pub fn connect(uri: &NbdUri, config: NbdClientConfig) -> Result<NbdClient, Error> {
        let (socket, terms) = open(uri, &config)?;
        let mut ready = vec![socket];
        let most = match terms.takes_several() {
            true => config.connections.unwrap_or(1),
            false => 1,
        };
        while ready.len() < usize::from(most) {
            ready.push(open_again(uri, &config, &terms)?);
        }
        Ok(NbdClient {
            uri: uri.clone(),
            shared: Shared::with(ready, config.connections.is_some()),
            config,
            terms,
        })
    }

    /// Negotiates over a stream that is connected already, whatever is at its other end. It has one queue, since
    /// nobody knows how to connect another one.
    pub fn over(
        stream: UnixStream,
        export: &str,
        config: NbdClientConfig,
    ) -> Result<NbdClient, Error> {
        let uri = NbdUri::new(NbdAddr::Unix("/nonexistent".into()), export);
        let (socket, terms) = greet(stream, &uri, &config)?;
        Ok(NbdClient {
            uri,
            shared: Shared::with(vec![socket], config.connections.is_some()),
            config,
            terms,
        })
    }

    /// A client with a connection on which everything is agreed upon already: for tests of servers. It has one queue.
    pub fn agreed(socket: OwnedFd, terms: Terms) -> NbdClient {
        NbdClient {
            uri: NbdUri::new(NbdAddr::Unix("/nonexistent".into()), "disk"),
            config: NbdClientConfig::default(),
            terms,
            shared: Shared::with(vec![socket], false),
        }
    }

    /// Why a queue failed: the first reason, if any did.
    pub fn failure(&self) -> Option<String> {
        self.shared.failure.lock().clone()
    }

    fn seat(&self) -> Result<Seat, Error> {
        let others = self.shared.connections.fetch_add(1, Ordering::AcqRel);
        let seat = Seat(Arc::clone(&self.shared));
        // A flush would cover only the writes of its own connection.
        if others > 0 && !self.terms.takes_several() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{}: the server doesn't offer CAN_MULTI_CONN, so a writable export has one queue only: use one thread, or serve it to one client",
                    self.uri
                ),
            ));
        }
        Ok(seat)
    }
}

fn open(uri: &NbdUri, config: &NbdClientConfig) -> Result<(OwnedFd, Terms), Error> {
    let failed = |e: Error| e.context(uri.to_string());
    let os = |e: std::io::Error| Error::os(format!("{uri}: connecting"), e);
    let timeout = Some(config.timeout);
    match &uri.addr {
        NbdAddr::Unix(path) => greet(UnixStream::connect(path).map_err(os)?, uri, config),
        NbdAddr::Tcp { host, port } => {
            let mut s = dial(host, *port, config.timeout).map_err(os)?;
            s.set_nodelay(true).map_err(os)?;
            s.set_read_timeout(timeout).map_err(os)?;
            s.set_write_timeout(timeout).map_err(os)?;
            let terms = negotiate(&mut s, &uri.export).map_err(failed)?;
            Ok((s.into(), terms))
        }
    }
}

/// One more connection to the same export.
fn open_again(uri: &NbdUri, config: &NbdClientConfig, terms: &Terms) -> Result<OwnedFd, Error> {
    let (socket, found) = open(uri, config)?;
    match found == *terms {
        true => Ok(socket),
        false => Err(Error::protocol(format!(
            "{uri}: the export is another one than when it was opened: open it anew"
        ))),
    }
}

fn greet(
    mut s: UnixStream,
    uri: &NbdUri,
    config: &NbdClientConfig,
) -> Result<(OwnedFd, Terms), Error> {
    let os = |e: std::io::Error| Error::os(format!("{uri}: connecting"), e);
    s.set_read_timeout(Some(config.timeout)).map_err(os)?;
    s.set_write_timeout(Some(config.timeout)).map_err(os)?;
    let terms = negotiate(&mut s, &uri.export).map_err(|e| e.context(uri.to_string()))?;
    Ok((s.into(), terms))
}

/// Tries all addresses of a host, in order.
fn dial(host: &str, port: u16, timeout: Duration) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::other("the host has no address");
    for addr in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&addr, timeout) {
            Ok(s) => return Ok(s),
            Err(e) => last = e,
        }
    }
    Err(last)
}

impl BlockDevice for NbdClient {
    fn describe(&self) -> String {
        self.uri.to_string()
    }

    fn limits(&self) -> Limits {
        self.terms.limits()
    }

    fn capacity_sectors(&self) -> u64 {
        let unit = u64::from(self.terms.min_block);
        (self.terms.size_bytes - self.terms.size_bytes % unit) / SECTOR
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let seat = self.seat()?;
        let ready = self.shared.ready.lock().pop();
        let socket = match (ready, self.config.connections) {
            (Some(socket), _) => socket,
            (None, None) => open_again(&self.uri, &self.config, &self.terms)?,
            (None, Some(most)) => {
                let why = format!("{}: all {most} connections are in use", self.uri);
                return Err(
                    Error::new(ErrorKind::Exhausted, why).advise("ask for more with connections=")
                );
            }
        };
        let tracer = context
            .tracing
            .tracer(&self.describe(), context.index, context.submitter);
        let name = format!("{} (queue {})", self.uri, context.index);
        let queue = NbdQueue::new(name, socket, self.terms, context.depth, seat, tracer)?;
        Ok(Box::new(queue))
    }

    fn events(&self) -> &EventHub {
        &self.shared.events
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            close: Some(self),
            ..Capabilities::none()
        }
    }
}

impl Close for NbdClient {
    /// Errors if the server ended first, with the reason.
    fn close(&self) -> Result<(), Error> {
        match self.failure() {
            Some(why) => Err(Error::new(ErrorKind::Disconnected, why)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
