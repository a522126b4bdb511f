//! Making a connection: the socket, the negotiation, and whether the export is the one that it was.

use super::hello::{self, Terms};
use super::stream::Stream;
use super::{NbdClientConfig, NbdUri};
use crate::dial::SocketType;
use pvblk_block::Error;
use pvblk_protocol::nbd::{NbdAddr, tflag};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// TCP keepalive: the time without a word from the peer until it is asked, the pause between questions, and their number.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(5), 6);

/// A connection in its transmission phase.
#[derive(Clone)]
pub(super) struct Connected {
    pub stream: Stream,
    pub terms: Terms,
}

impl Connected {
    /// False if the server has hung up.
    pub fn is_alive(&self) -> bool {
        self.stream.is_alive()
    }
}

/// Connects and negotiates. Waits at most `config.timeout` for each step of the server.
pub(super) fn connect(uri: &NbdUri, config: &NbdClientConfig) -> Result<Connected, Error> {
    establish(uri, config, false).map(|(connection, _)| connection)
}

fn establish(
    uri: &NbdUri,
    config: &NbdClientConfig,
    context: bool,
) -> Result<(Connected, Option<u32>), Error> {
    let socket = open(uri, config).map_err(|e| Error::os(format!("{uri}: connecting"), e))?;
    agree(socket, uri, config, context).map_err(|e| e.context(uri.to_string()))
}

/// A connected socket whose reads and writes wait at most `config.timeout`.
fn open(uri: &NbdUri, config: &NbdClientConfig) -> std::io::Result<OwnedFd> {
    use rustix::net::sockopt;
    let kind = SocketType::STREAM;
    let socket = config.dialer.connection(&uri.addr, kind, config.timeout)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    if let NbdAddr::Tcp { .. } = &uri.addr {
        sockopt::set_tcp_nodelay(&socket, true)?;
        keep_alive(&socket)?;
    }
    for way in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
        sockopt::set_socket_timeout(&socket, way, Some(config.timeout))?;
    }
    Ok(socket)
}

/// Negotiates over a socket that is connected; with TLS if the URI says so.
fn agree(
    socket: OwnedFd,
    uri: &NbdUri,
    config: &NbdClientConfig,
    context: bool,
) -> Result<(Connected, Option<u32>), Error> {
    let mut stream = Stream::plain(socket);
    hello::greet(&mut stream)?;
    if let Some(tls) = &uri.tls {
        let host = match &uri.addr {
            NbdAddr::Tcp { host, .. } => host,
            NbdAddr::Unix(_) => "localhost",
        };
        let session = tls.session(host, &*config.credentials)?;
        hello::ask_for_tls(&mut stream)?;
        stream = stream.secured(&uri.to_string(), session)?;
    }
    let (mut terms, context) = hello::negotiate(&mut stream, &uri.export, context)?;
    if config.read_only {
        terms.flags |= tflag::READ_ONLY;
    }
    Ok((Connected { stream, terms }, context))
}

/// As [`connect`], with the number of the context `base:allocation`, if the server has it.
pub(super) fn connect_with_context(
    uri: &NbdUri,
    config: &NbdClientConfig,
) -> Result<(Connected, Option<u32>), Error> {
    establish(uri, config, true)
}

/// Negotiates over a stream that is connected.
pub(super) fn greet(
    s: UnixStream,
    uri: &NbdUri,
    config: &NbdClientConfig,
) -> Result<Connected, Error> {
    let os = |e: std::io::Error| Error::os(format!("{uri}: connecting"), e);
    s.set_read_timeout(Some(config.timeout)).map_err(os)?;
    s.set_write_timeout(Some(config.timeout)).map_err(os)?;
    let agreed = agree(s.into(), uri, config, false);
    let (connection, _) = agreed.map_err(|e| e.context(uri.to_string()))?;
    Ok(connection)
}

/// Has the kernel end a connection whose peer is gone without a word, with data on the way or without.
fn keep_alive(s: &OwnedFd) -> std::io::Result<()> {
    use rustix::net::sockopt;
    let (idle, interval, count) = KEEPALIVE;
    sockopt::set_socket_keepalive(s, true)?;
    sockopt::set_tcp_keepidle(s, idle)?;
    sockopt::set_tcp_keepintvl(s, interval)?;
    sockopt::set_tcp_keepcnt(s, count)?;
    let all = idle + interval * count;
    Ok(sockopt::set_tcp_user_timeout(s, all.as_millis() as u32)?)
}

/// One more connection to an export that had these terms, of at least so many bytes.
pub(super) fn another(
    uri: &NbdUri,
    config: &NbdClientConfig,
    first: &Terms,
    least_bytes: u64,
) -> Result<Connected, Error> {
    let c = connect(uri, config)?;
    match unlike(first, least_bytes, &c.terms) {
        None => Ok(c),
        Some(why) => Err(Error::protocol(format!(
            "{uri}: it isn't the export that it was: {why}"
        ))),
    }
}

/// The promise of the open device that a new connection's terms don't keep; `None` if it can go on with them.
fn unlike(first: &Terms, least_bytes: u64, new: &Terms) -> Option<String> {
    let (was, is) = (|f| first.has(f), |f| new.has(f));
    if is(tflag::READ_ONLY) && !was(tflag::READ_ONLY) {
        return Some("it is read-only now".into());
    }
    if new.size_bytes < least_bytes {
        return Some(format!(
            "it had {least_bytes} bytes and has {} now, so it may be another one",
            new.size_bytes
        ));
    }
    if is(tflag::SEND_FLUSH) && !was(tflag::SEND_FLUSH) && !was(tflag::READ_ONLY) {
        return Some("it had no volatile cache and has one now".into());
    }
    for (flag, ability) in [
        (tflag::SEND_FLUSH, "flush"),
        (tflag::SEND_TRIM, "discard"),
        (tflag::SEND_WRITE_ZEROES, "write zeroes"),
        (tflag::CAN_MULTI_CONN, "have several connections"),
    ] {
        if was(flag) && !is(flag) {
            return Some(format!("it can't {ability} any more"));
        }
    }
    if new.min_block > first.min_block {
        let (a, b) = (first.min_block, new.min_block);
        return Some(format!("its smallest block had {a} bytes and has {b} now"));
    }
    if new.max_block < first.max_block {
        let (a, b) = (first.max_block, new.max_block);
        return Some(format!("its largest request had {a} bytes and has {b} now"));
    }
    None
}
