//! Addresses of servers, as users write them.

use pvblk_block::Error;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Where to listen: `unix:PATH` or `tcp:HOST:PORT` (IPv6 hosts in brackets; port 0: any free one).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddr {
    /// A Unix socket at this path.
    Unix(PathBuf),
    /// A TCP port of this host.
    Tcp {
        /// Name or address, without brackets.
        host: String,
        /// Port; 0: any free one.
        port: u16,
    },
}

impl FromStr for NbdAddr {
    type Err = Error;

    fn from_str(s: &str) -> Result<NbdAddr, Error> {
        let bad = || {
            Error::config(format!(
                "NBD address {s:?}: write unix:PATH, tcp:HOST:PORT or tcp:[IPV6]:PORT"
            ))
        };
        if let Some(path) = s.strip_prefix("unix:") {
            return if path.is_empty() {
                Err(bad())
            } else {
                Ok(NbdAddr::Unix(path.into()))
            };
        }
        let rest = s.strip_prefix("tcp:").ok_or_else(bad)?;
        let (host, port) = rest.rsplit_once(':').ok_or_else(bad)?;
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let host = match bare {
            Some(h) => h,
            None if host.contains(':') => return Err(bad()),
            None => host,
        };
        if host.is_empty() {
            return Err(bad());
        }
        Ok(NbdAddr::Tcp {
            host: host.to_owned(),
            port: port.parse().map_err(|_| bad())?,
        })
    }
}

impl fmt::Display for NbdAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NbdAddr::Unix(path) => write!(f, "unix:{}", path.display()),
            NbdAddr::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            NbdAddr::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_printed() {
        for s in [
            "unix:/run/x",
            "tcp:127.0.0.1:10809",
            "tcp:localhost:0",
            "tcp:[::1]:9",
        ] {
            assert_eq!(s.parse::<NbdAddr>().unwrap().to_string(), s);
        }
        for s in [
            "",
            "unix:",
            "tcp:1",
            "tcp::5",
            "tcp:::1:5",
            "tcp:h:99999",
            "udp:h:1",
        ] {
            assert!(s.parse::<NbdAddr>().is_err(), "{s}");
        }
    }
}
