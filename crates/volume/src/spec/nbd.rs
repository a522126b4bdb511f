//! An export of an NBD server as a volume: `nbd://…` and `nbd+unix://…`.

use super::client::{Need, number};
use super::parse::{size, span, unknown};
use crate::opener::FileOpener;
use pvblk_block::units::{Size, Span};
use pvblk_block::{BlockDevice, Error};
use pvblk_client::nbd::{
    CredentialReader, NbdClient, NbdClientConfig, NbdUri, OnReconnect, read_credential,
};
use rustix::fs::{Mode, OFlags};
use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// An export of an NBD server: `URI[,connections=N][,on-reconnect=resend|fail][,wait=TIME][,keep=SIZE][,ro]`. A comma in the URI is `%2C`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdSpec {
    pub uri: NbdUri,
    /// Connections to make at the start, 1 to 64; `None`: the URI's, or what is needed.
    pub connections: Option<u16>,
    /// `None`: requests of a served disk are sent again, others fail.
    pub on_reconnect: Option<OnReconnect>,
    /// Longest time for which requests wait for a server that went away; `None`: for ever.
    pub wait: Option<Duration>,
    /// Most bytes of unflushed writes that are kept for a server that loses them, 0 or 1M to 64G; `None`: 64M for a served disk, else 0.
    pub keep_bytes: Option<u64>,
    pub read_only: bool,
}

/// Has credentials opened as all files of volumes are, and so by the rules that these are under.
#[derive(Debug)]
struct ByOpener(Arc<dyn FileOpener>);

impl CredentialReader for ByOpener {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let file = self.0.open(path, OFlags::RDONLY, Mode::empty())?;
        read_credential(File::from(file))
    }
}

impl NbdSpec {
    /// Unflushed writes that are kept, in bytes, unless told otherwise.
    pub const KEEP: u64 = 64 << 20;

    pub(super) fn open(&self, need: &Need) -> Result<Arc<dyn BlockDevice>, Error> {
        let served = need.patience.is_some();
        let usual = match served {
            true => (OnReconnect::Resend, NbdSpec::KEEP),
            false => (OnReconnect::Fail, 0),
        };
        let connections = self.connections.or(self.uri.connections);
        let config = NbdClientConfig {
            connections: connections.or(need.at_start.then_some(need.queues)),
            fewer: connections.is_none() && need.fewer,
            on_reconnect: self.on_reconnect.unwrap_or(usual.0),
            wait: self.wait,
            keep_bytes: self.keep_bytes.unwrap_or(usual.1),
            read_only: self.read_only,
            dialer: Arc::clone(&need.dialer),
            credentials: Arc::new(ByOpener(Arc::clone(&need.opener))),
            ..NbdClientConfig::default()
        };
        Ok(Arc::new(NbdClient::connect(&self.uri, config)?))
    }

    pub(super) fn problem(&self) -> Option<String> {
        if self.connections.is_some_and(|n| !(1..=64).contains(&n)) {
            return Some("connections must be 1 to 64".into());
        }
        if self.wait.is_some() && self.on_reconnect == Some(OnReconnect::Fail) {
            return Some("with on-reconnect=fail nothing waits: drop `wait`".into());
        }
        let sizes = (1 << 20)..=(64 << 30);
        let wrong = |n: u64| n != 0 && !sizes.contains(&n);
        self.keep_bytes
            .is_some_and(wrong)
            .then(|| "keep must be 0, or 1M to 64G".into())
    }
}

/// The error is the URI's own reason; which URI it is stands before it.
pub(super) fn nbd(text: &str) -> Result<NbdSpec, String> {
    let mut parts = text.split(',');
    let uri = parts.next().unwrap_or_default();
    let parsed: Result<NbdUri, Error> = uri.parse();
    let mut spec = NbdSpec {
        uri: parsed.map_err(|e| e.to_string().replacen(&format!("{uri}: "), "", 1))?,
        connections: None,
        on_reconnect: None,
        wait: None,
        keep_bytes: None,
        read_only: false,
    };
    for part in parts {
        match part.split_once('=') {
            Some(("connections", n)) => spec.connections = Some(number("connections", n)?),
            Some(("on-reconnect", "resend")) => spec.on_reconnect = Some(OnReconnect::Resend),
            Some(("on-reconnect", "fail")) => spec.on_reconnect = Some(OnReconnect::Fail),
            Some(("on-reconnect", other)) => {
                return Err(format!(
                    "on-reconnect `{}`: use on-reconnect=resend or on-reconnect=fail",
                    other.escape_debug()
                ));
            }
            Some(("wait", time)) => spec.wait = Some(span(time)?),
            Some(("keep", bytes)) => spec.keep_bytes = Some(size(bytes)?),
            None if part == "ro" => spec.read_only = true,
            _ => {
                return Err(unknown(
                    part.split('=').next().unwrap_or(part),
                    "connections=N, on-reconnect=resend|fail, wait=TIME, keep=SIZE, ro, as in nbd://host/a,connections=4; a comma in the URI is %2C",
                ));
            }
        }
    }
    Ok(spec)
}

impl fmt::Display for NbdSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.uri.fmt(f)?;
        if let Some(n) = self.connections {
            write!(f, ",connections={n}")?;
        }
        match self.on_reconnect {
            Some(OnReconnect::Resend) => f.write_str(",on-reconnect=resend")?,
            Some(OnReconnect::Fail) => f.write_str(",on-reconnect=fail")?,
            None => {}
        }
        if let Some(time) = self.wait {
            write!(f, ",wait={}", Span(time))?;
        }
        if let Some(bytes) = self.keep_bytes {
            write!(f, ",keep={}", Size(bytes))?;
        }
        f.write_str(if self.read_only { ",ro" } else { "" })
    }
}
