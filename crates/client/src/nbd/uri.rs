//! NBD URIs (uri.md of the NetworkBlockDevice project), with certificates for TLS; keys that both sides know are not supported.

use super::NbdTls;
use pvblk_block::Error;
use pvblk_protocol::nbd::NbdAddr;
use std::fmt;
use std::str::FromStr;

/// The port of `nbd://HOST/…` without one.
const DEFAULT_PORT: u16 = 10809;

/// An export of a server: `nbd+unix:///EXPORT?socket=PATH` or `nbd://HOST[:PORT]/EXPORT`, with `connections=N` among the queries; with `nbds` over TLS, by
/// `tls-certificates=DIR` and `tls-hostname=NAME` as libnbd has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    pub addr: NbdAddr,
    /// The export's name; empty: the default one.
    pub export: String,
    /// `None`: in the clear.
    pub tls: Option<NbdTls>,
    /// Connections to make at the start, 1 to 64 (`connections=N`, ours; other programs ignore it).
    pub connections: Option<u16>,
}

impl NbdUri {
    /// An export, with as many connections as its queues make.
    pub fn new(addr: NbdAddr, export: impl Into<String>) -> NbdUri {
        NbdUri {
            addr,
            export: export.into(),
            tls: None,
            connections: None,
        }
    }
}

impl FromStr for NbdUri {
    type Err = Error;

    fn from_str(text: &str) -> Result<NbdUri, Error> {
        let bad = |why: &str| {
            Error::config(format!(
                "{text}: {why}: write nbd+unix:///EXPORT?socket=PATH or nbd://HOST:PORT/EXPORT"
            ))
        };
        let (scheme, rest) = text
            .split_once("://")
            .ok_or_else(|| bad("it is no NBD URI"))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decode(export).ok_or_else(|| bad("a % stands before two hex digits"))?;
        let value = |key: &str| {
            let of = |p: &str| Some(p.strip_prefix(key)?.strip_prefix('=')?.to_owned());
            let found = query.split('&').find_map(of).filter(|p| !p.is_empty());
            let text =
                found.map(|p| decode(&p).ok_or_else(|| bad("a % stands before two hex digits")));
            text.transpose()
        };
        let (scheme, secured) = match scheme {
            "nbds" => ("nbd", true),
            "nbds+unix" => ("nbd+unix", true),
            other => (other, false),
        };
        let addr = match scheme {
            "nbd+unix" if !authority.is_empty() => {
                return Err(bad("three slashes stand before the export"));
            }
            "nbd+unix" => {
                let path = value("socket")?;
                let path = path.ok_or_else(|| bad("the socket's path is missing"))?;
                NbdAddr::Unix(path.into())
            }
            "nbd" => {
                // An IPv6 address has colons of its own and stands in brackets.
                let has_port = authority.rfind(':') > authority.rfind(']');
                let addr = match has_port {
                    true => format!("tcp:{authority}"),
                    false => format!("tcp:{authority}:{DEFAULT_PORT}"),
                };
                addr.parse().map_err(|_| bad("the host makes no sense"))?
            }
            _ => return Err(bad("it is no NBD URI")),
        };
        let key = |p: &str| p.split('=').next().unwrap_or_default().to_owned();
        let mut keys = query.split('&').filter(|p| !p.is_empty()).map(key);
        let known = ["socket", "connections", "tls-certificates", "tls-hostname"];
        if let Some(other) = keys.find(|k| !known.contains(&k.as_str())) {
            return Err(Error::config(format!(
                "{text}: unknown option `{}`: use socket=PATH, connections=N, tls-certificates=DIR, tls-hostname=NAME",
                other.escape_debug()
            )));
        }
        let directory = value("tls-certificates")?;
        let hostname = value("tls-hostname")?;
        let tls = match (secured, directory) {
            (true, Some(directory)) => Some(NbdTls {
                directory: directory.into(),
                hostname,
            }),
            (true, None) => {
                return Err(bad(
                    "the directory with ca-cert.pem is missing: add tls-certificates=DIR",
                ));
            }
            (false, None) if hostname.is_none() => None,
            (false, _) => return Err(bad("certificates are for nbds:// and nbds+unix://")),
        };
        let connections = query
            .split('&')
            .find_map(|p| p.strip_prefix("connections="));
        let connections = connections.map(|n| match n.parse() {
            Ok(n @ 1..=64) => Ok(n),
            _ => Err(bad("connections= is a number from 1 to 64")),
        });
        Ok(NbdUri {
            addr,
            export,
            tls,
            connections: connections.transpose()?,
        })
    }
}

/// Replaces %XX by the bytes that they stand for.
fn decode(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            out.push(*first);
            continue;
        }
        let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
        out.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &rest[2..];
    }
    String::from_utf8(out).ok()
}

/// Replaces bytes that mean something else in a URI by %XX.
fn encode(text: &str) -> String {
    let plain = |b: &u8| b.is_ascii_alphanumeric() || b"-._~/:@+=".contains(b);
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match plain(&byte) {
            true => out.push(char::from(byte)),
            false => out += &format!("%{byte:02X}"),
        }
    }
    out
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = encode(&self.export);
        let mut sign = '?';
        let s = if self.tls.is_some() { "s" } else { "" };
        match &self.addr {
            NbdAddr::Unix(path) => {
                let path = encode(&path.display().to_string());
                write!(f, "nbd{s}+unix:///{export}?socket={path}")?;
                sign = '&';
            }
            tcp => write!(
                f,
                "nbd{s}://{}/{export}",
                tcp.to_string().trim_start_matches("tcp:")
            )?,
        }
        if let Some(tls) = &self.tls {
            let directory = encode(&tls.directory.display().to_string());
            write!(f, "{sign}tls-certificates={directory}")?;
            sign = '&';
            if let Some(name) = &tls.hostname {
                write!(f, "&tls-hostname={}", encode(name))?;
            }
        }
        match self.connections {
            Some(n) => write!(f, "{sign}connections={n}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_read_and_printed() {
        for text in [
            "nbd+unix:///disk?socket=/run/x",
            "nbd+unix:///?socket=/run/x",
            "nbd://localhost:10810/disk",
            "nbd://[::1]:5/a/b",
            "nbd://h:5/a?connections=4",
            "nbd+unix:///disk?socket=/run/x&connections=64",
            "nbds://h:5/a?tls-certificates=/etc/pki/nbd",
            "nbds+unix:///a?socket=/x&tls-certificates=/p%26q&tls-hostname=nbd.example&connections=2",
        ] {
            assert_eq!(text.parse::<NbdUri>().unwrap().to_string(), text);
        }
        let of = |s: &str| s.parse::<NbdUri>().unwrap();
        assert_eq!(of("nbd://h").to_string(), "nbd://h:10809/");
        assert_eq!(of("nbd://[::1]/x").to_string(), "nbd://[::1]:10809/x");
        let spaces = of("nbd+unix:///a%20b?socket=/x%26y");
        assert_eq!(spaces.export, "a b");
        assert_eq!(spaces.to_string(), "nbd+unix:///a%20b?socket=/x%26y");
        // In a volume's specification options follow a comma.
        let comma = "nbd+unix:///a%2Cb?socket=/x%2Cy";
        assert_eq!(
            (of(comma).export.as_str(), of(comma).to_string().as_str()),
            ("a,b", comma)
        );
        for bad in [
            "",
            "disk",
            "http://h/x",
            "nbds://h/x",
            "nbds+unix:///x?tls-certificates=/p",
            "nbd://h/x?tls-certificates=/p",
            "nbd://h/x?tls-hostname=h",
            "nbds://h/x?tls-certificates=",
            "nbds://h/x?tls-certificates=/p&tls-psk-file=/k",
            "nbd+unix:///x",
            "nbd+unix://h/x?socket=/y",
            "nbd:///x",
            "nbd://h:99999/x",
            "nbd://h/x?conections=4",
            "nbd://h/x?connections=0",
            "nbd://h/x?connections=65",
            "nbd://h/%4",
            "nbd://h/%zz",
        ] {
            let e = bad.parse::<NbdUri>().unwrap_err().to_string();
            assert!(!e.contains('\n'), "{e}");
        }
    }
}
