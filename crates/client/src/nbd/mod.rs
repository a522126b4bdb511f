//! An NBD client: an export of any server as a block device.
//!
//! Each opened queue is a connection of its own with requests in flight one behind the other, driven by
//! steps as all queues are: nothing blocks on a user's thread. Only opening
//! waits for the server, at most [`NbdClientConfig::timeout`].
//!
//! Structured replies are used where the server has them. Every field of a reply is checked; one that
//! makes no sense ends the connections, as a server that hangs up does. Then all requests fail, or wait for the server and are
//! sent again ([`OnReconnect`]); `docs/decisions/0032-nbd-volumes.md` has the states and what is kept for a server that loses its cache.

mod connect;
mod credentials;
mod extents;
mod hello;
mod inbox;
mod kept;
mod link;
mod queue;
mod reconnect;
mod replay;
mod slot;
mod stream;
mod tls;
mod uri;

use crate::dial::{self, Dialer};
use connect::{Connected, another, connect, greet};
pub use credentials::{CredentialReader, read_credential};
pub use hello::Terms;
use link::Link;
use pvblk_block::{
    BlockDevice, Capabilities, Close, DeviceQueue, Error, ErrorKind, EventHub, Extent, Extents,
    Limits, QueueContext, Reclaim, Refresh,
};
use pvblk_protocol::nbd::NbdAddr;
use queue::NbdQueue;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
pub use tls::NbdTls;
pub use uri::NbdUri;

/// The lot of requests when the server goes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnReconnect {
    /// They wait for the server, and are sent again.
    Resend,
    /// They fail, and so do all later ones.
    Fail,
}

/// Settings of a client.
#[derive(Clone, Debug)]
pub struct NbdClientConfig {
    /// Longest time of connecting, and of each step of the negotiation.
    pub timeout: Duration,
    /// Connections to make at the start, and no more later: queues take them, and give them back. So opening a queue never waits for
    /// the server. A server without CAN_MULTI_CONN gets one. `None`: each queue connects when it is opened.
    pub connections: Option<u16>,
    /// If the server lets us have fewer connections, those are enough.
    pub fewer: bool,
    pub on_reconnect: OnReconnect,
    /// Longest time for which requests wait for a server that went away; `None`: for ever.
    pub wait: Option<Duration>,
    /// Most bytes of completed writes that are kept until a flush covers them, to be sent again with [`OnReconnect::Resend`] to a server that
    /// lost them; 0: none are.
    pub keep_bytes: u64,
    /// Writes are refused, whatever the server allows.
    pub read_only: bool,
    /// Makes all connections.
    pub dialer: Arc<dyn Dialer>,
    /// Reads the files of TLS for each connection.
    pub credentials: Arc<dyn CredentialReader>,
    #[cfg(test)]
    pub(crate) plant: Option<kept::Plant>,
}

impl Default for NbdClientConfig {
    fn default() -> NbdClientConfig {
        NbdClientConfig {
            timeout: Duration::from_secs(10),
            connections: None,
            fewer: false,
            on_reconnect: OnReconnect::Fail,
            wait: None,
            keep_bytes: 64 << 20,
            read_only: false,
            dialer: dial::in_process(),
            credentials: credentials::in_process(),
            #[cfg(test)]
            plant: None,
        }
    }
}

/// An export of an NBD server. Its limits are those of the first connection.
pub struct NbdClient {
    link: Arc<Link>,
    asker: extents::Asker,
}

impl NbdClient {
    /// Connects and negotiates.
    pub fn connect(uri: &NbdUri, config: NbdClientConfig) -> Result<NbdClient, Error> {
        let first = connect(uri, &config)?;
        let most = match first.terms.takes_several() {
            true => config.connections.unwrap_or(1),
            false => 1,
        };
        let mut all = vec![first];
        while all.len() < usize::from(most) {
            match another(uri, &config, &all[0].terms, all[0].terms.size_bytes) {
                Ok(c) => all.push(c),
                Err(e) if config.fewer => {
                    tracing::warn!("{} connections instead of {most}: {e}", all.len());
                    break;
                }
                Err(e) => return Err(e),
            }
        }
        let connections = config.connections.map(|_| all.len() as u16);
        let config = NbdClientConfig {
            connections,
            ..config
        };
        let link = Link::new(uri, config, all)?;
        reconnect::start(&link)?;
        let asker = extents::Asker::default();
        Ok(NbdClient { link, asker })
    }

    /// Negotiates over a stream that is connected already, whatever is at its other end. It has one queue, since
    /// nobody knows how to connect another one.
    pub fn over(
        stream: UnixStream,
        export: &str,
        config: NbdClientConfig,
    ) -> Result<NbdClient, Error> {
        let uri = NbdUri::new(NbdAddr::Unix("/nonexistent".into()), export);
        let first = greet(stream, &uri, &config)?;
        NbdClient::without_thread(&uri, config, first)
    }

    /// A client with a connection on which everything is agreed upon already: for tests of servers. It has one queue.
    pub fn agreed(socket: OwnedFd, terms: Terms) -> NbdClient {
        let uri = NbdUri::new(NbdAddr::Unix("/nonexistent".into()), "disk");
        let stream = stream::Stream::plain(socket);
        let first = Connected { stream, terms };
        match NbdClient::without_thread(&uri, NbdClientConfig::default(), first) {
            Ok(client) => client,
            Err(e) => panic!("{e}"),
        }
    }

    fn without_thread(
        uri: &NbdUri,
        config: NbdClientConfig,
        first: Connected,
    ) -> Result<NbdClient, Error> {
        let config = NbdClientConfig {
            on_reconnect: OnReconnect::Fail,
            ..config
        };
        let link = Link::new(uri, config, vec![first])?;
        let asker = extents::Asker::default();
        Ok(NbdClient { link, asker })
    }

    /// Why requests fail, or wait; `None` while the server is there.
    pub fn failure(&self) -> Option<String> {
        self.link.failure()
    }
}

impl Drop for NbdClient {
    fn drop(&mut self) {
        self.link.stop.store(true, Ordering::Release);
        self.link.bell.notify();
    }
}

impl BlockDevice for NbdClient {
    fn describe(&self) -> String {
        self.link.uri.to_string()
    }

    fn limits(&self) -> Limits {
        self.link.terms.limits()
    }

    fn capacity_sectors(&self) -> u64 {
        self.link.capacity.sectors()
    }

    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let seat = self.link.enter()?;
        let tracer = context
            .tracing
            .tracer(&self.describe(), context.index, context.submitter);
        let name = format!("{} (queue {})", self.link.uri, context.index);
        match NbdQueue::new(name, &self.link, &seat, context.depth, tracer) {
            Ok(queue) => Ok(Box::new(queue)),
            Err(e) => {
                self.link.leave(&seat, None, true);
                Err(e)
            }
        }
    }

    fn events(&self) -> &EventHub {
        &self.link.events
    }

    fn capabilities(&self) -> Capabilities<'_> {
        let terms = &self.link.terms;
        // Another connection is asked, whose answers must know of the writes of all.
        let tells = terms.mode.has_chunks() && terms.takes_several();
        Capabilities {
            extents: tells.then_some(self as _),
            refresh: Some(self),
            close: Some(self),
            memory: Some(self),
            ..Capabilities::none()
        }
    }
}

impl Close for NbdClient {
    /// Errors if the server went away first, with the reason.
    fn close(&self) -> Result<(), Error> {
        match self.failure() {
            Some(why) => Err(Error::new(ErrorKind::Disconnected, why)),
            None => Ok(()),
        }
    }
}

impl Extents for NbdClient {
    /// Sectors that the server doesn't tell of are data.
    fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error> {
        let end = sector.saturating_add(sectors);
        self.asker.extents(&self.link, sector, end, out);
        Ok(())
    }
}

impl Refresh for NbdClient {
    /// Takes another size over, also a smaller one. A server without CAN_MULTI_CONN isn't asked.
    fn refresh(&self) -> Result<(), Error> {
        self.link.refresh()
    }
}

impl Reclaim for NbdClient {
    fn give_way(&self) -> u64 {
        self.link.kept.as_ref().map_or(0, kept::Kept::give_way)
    }

    fn spare_bytes(&self) -> u64 {
        self.link.kept.as_ref().map_or(0, kept::Kept::spare_bytes)
    }
}

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
