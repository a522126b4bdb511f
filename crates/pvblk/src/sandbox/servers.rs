//! The servers that the process that serves may be connected to.

use super::policy::{path_of, real};
use anyhow::{Context, Result, bail};
use pvblk_backend::{RateLimit, ratelimited};
use pvblk_client::dial::{self, Dialer, SocketType};
use pvblk_protocol::nbd::NbdAddr;
use pvblk_volume::{FileOpener, in_process};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// Longest wait for one address of a server, whatever the process that serves asks for.
const LONGEST: Duration = Duration::from_secs(30);

/// Connects to servers that the configuration names, and to those of `--connect-to`. A TCP server is judged by its host as it is written, and its port; a Unix socket
/// by the file that its path leads to, and the file that was judged is the one that is connected to.
#[derive(Debug)]
pub struct Servers {
    opener: Arc<dyn FileOpener>,
    dialer: Arc<dyn Dialer>,
    tcp: Vec<TcpServer>,
    /// Without symbolic links, as the folders.
    sockets: Vec<PathBuf>,
    /// All sockets below them are allowed.
    folders: Vec<PathBuf>,
    refused: RateLimit,
}

/// A host with one port, or with all.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TcpServer {
    host: Host,
    port: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Host {
    Address(IpAddr),
    /// In lower case.
    Name(String),
}

impl Host {
    fn of(text: &str) -> Host {
        match text.parse() {
            Ok(address) => Host::Address(address),
            Err(_) => Host::Name(text.to_ascii_lowercase()),
        }
    }
}

/// A value of `--connect-to`: `tcp:HOST:PORT`, `tcp:HOST:*` or `unix:PATH` of a socket or folder.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Allowed {
    Tcp(TcpServer),
    Unix(PathBuf),
}

impl FromStr for Allowed {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Allowed> {
        let any_port = text.strip_suffix(":*");
        // A port that is left out again.
        let with_port = any_port.map(|host| format!("{host}:0"));
        let address = with_port.as_deref().unwrap_or(text).parse();
        Ok(match (address, any_port) {
            (Ok(NbdAddr::Tcp { host, port }), _) => Allowed::Tcp(TcpServer {
                host: Host::of(&host),
                port: any_port.is_none().then_some(port),
            }),
            (Ok(NbdAddr::Unix(_)), Some(_)) | (Err(_), _) => {
                bail!(
                    "--connect-to {text}: write tcp:HOST:PORT, tcp:HOST:* for all ports, or unix:PATH of a socket or folder"
                )
            }
            (Ok(NbdAddr::Unix(path)), None) => Allowed::Unix(path),
        })
    }
}

impl Servers {
    /// `named`: those that the configuration names; `allowed`: values of `--connect-to`. Sockets needn't exist yet, but their folders do.
    pub fn new(named: &[NbdAddr], allowed: &[String]) -> Result<Servers> {
        let mut servers = Servers {
            opener: in_process(),
            dialer: dial::in_process(),
            tcp: Vec::new(),
            sockets: Vec::new(),
            folders: Vec::new(),
            refused: RateLimit::default(),
        };
        for address in named {
            match address {
                NbdAddr::Unix(path) => servers.add_socket(path)?,
                NbdAddr::Tcp { host, port } => servers.tcp.push(TcpServer {
                    host: Host::of(host),
                    port: Some(*port),
                }),
            }
        }
        for text in allowed {
            match text.parse()? {
                Allowed::Tcp(server) => servers.tcp.push(server),
                Allowed::Unix(path) if path.is_dir() => {
                    let folder = servers.opener.real_path(&path);
                    servers.folders.push(folder.context(text.clone())?);
                }
                Allowed::Unix(path) => servers.add_socket(&path)?,
            }
        }
        Ok(servers)
    }

    fn add_socket(&mut self, path: &Path) -> Result<()> {
        let found = real(&*self.opener, path).with_context(|| path.display().to_string())?;
        self.sockets.push(found);
        Ok(())
    }

    fn refuse(&self, address: &NbdAddr) -> io::Error {
        ratelimited!(
            warn,
            self.refused,
            "the server asked for a connection to {address}, which no disk of the configuration names and no --connect-to allows"
        );
        let text = format!(
            "a server in a sandbox connects to servers that its configuration names: start it with --connect-to {address}"
        );
        io::Error::new(io::ErrorKind::PermissionDenied, text)
    }

    fn has_tcp(&self, host: &str, port: u16) -> bool {
        let host = Host::of(host);
        let mut all = self.tcp.iter();
        all.any(|s| s.host == host && s.port.is_none_or(|p| p == port))
    }

    fn has_socket(&self, real: &Path) -> bool {
        let below = |folder: &PathBuf| real.starts_with(folder);
        self.sockets.iter().any(|s| s == real) || self.folders.iter().any(below)
    }
}

impl Dialer for Servers {
    /// Permission denied, with a text, for other servers.
    fn connection(
        &self,
        address: &NbdAddr,
        kind: SocketType,
        timeout: Duration,
    ) -> io::Result<OwnedFd> {
        let timeout = timeout.min(LONGEST);
        match address {
            NbdAddr::Tcp { host, port } if self.has_tcp(host, *port) => {
                self.dialer.connection(address, kind, timeout)
            }
            NbdAddr::Tcp { .. } => Err(self.refuse(address)),
            NbdAddr::Unix(path) => {
                let found = self.opener.open(path, OFlags::PATH, Mode::empty())?;
                if !self.has_socket(&path_of(found.as_fd())?) {
                    return Err(self.refuse(address));
                }
                let found = format!("/proc/self/fd/{}", found.as_raw_fd());
                let found = NbdAddr::Unix(found.into());
                self.dialer.connection(&found, kind, timeout)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    const SOON: Duration = Duration::from_secs(10);

    /// True: connected; false: refused by the policy.
    fn connects(servers: &Servers, address: &NbdAddr) -> bool {
        match servers.connection(address, SocketType::STREAM, SOON) {
            Ok(_) => true,
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                let advice = format!("--connect-to {address}");
                assert!(e.to_string().ends_with(&advice), "{e}");
                false
            }
            Err(e) => panic!("{address}: {e}"),
        }
    }

    #[test]
    fn sockets_are_judged_by_where_they_are_each_time() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        std::fs::create_dir(at("folder")).unwrap();
        std::fs::create_dir(at("other")).unwrap();
        let listen = |name: &str| UnixListener::bind(at(name)).unwrap();
        let _all = ["folder/a", "other/secret", "said"].map(listen);
        symlink(at("other/secret"), at("folder/link")).unwrap();
        symlink(at("other"), at("folder/way")).unwrap();
        symlink(at("said"), at("alias")).unwrap();
        let unix = |name: &str| NbdAddr::Unix(at(name));
        let named = [unix("named"), unix("alias")];
        let folder = format!("unix:{}", at("folder").display());
        let servers = Servers::new(&named, &[folder]).unwrap();
        let connects = |name: &str| connects(&servers, &unix(name));
        for right in ["folder/a", "alias", "said"] {
            assert!(connects(right), "{right}");
        }
        for wrong in [
            "other/secret",
            "folder/link",
            "folder/way/secret",
            "folder/../other/secret",
        ] {
            assert!(!connects(wrong), "{wrong}");
        }
        // One that isn't there is told as without a sandbox.
        let missing = servers.connection(&unix("named"), SocketType::STREAM, SOON);
        assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
        let first = listen("named");
        assert!(connects("named"));
        drop(first);
        // A link in its place leads nowhere else.
        std::fs::remove_file(at("named")).unwrap();
        symlink(at("other/secret"), at("named")).unwrap();
        assert!(!connects("named"));
        std::fs::remove_file(at("alias")).unwrap();
        symlink(at("other/secret"), at("alias")).unwrap();
        assert!(!connects("alias"));
    }

    #[test]
    fn tcp_servers_are_judged_by_host_and_port() {
        let listeners = [0; 3].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = listeners.each_ref().map(|l| l.local_addr().unwrap().port());
        let tcp = |host: &str, port: u16| NbdAddr::Tcp {
            host: host.into(),
            port,
        };
        let allowed = format!("tcp:127.0.0.1:{}", ports[1]);
        let servers = Servers::new(&[tcp("LocalHost", ports[0])], &[allowed]).unwrap();
        let is_right = |host: &str, port: u16| connects(&servers, &tcp(host, port));
        assert!(is_right("localhost", ports[0]) && is_right("127.0.0.1", ports[1]));
        for (host, port) in [
            ("localhost", ports[1]),
            ("127.0.0.1", ports[0]),
            ("127.0.0.1", ports[2]),
            ("127.1", ports[1]),
            ("localhost.", ports[0]),
        ] {
            assert!(!is_right(host, port), "{host}:{port}");
        }
        let servers = Servers::new(&[], &["tcp:127.0.0.1:*".into()]).unwrap();
        assert!(
            ports
                .iter()
                .all(|&p| connects(&servers, &tcp("127.0.0.1", p)))
        );
        assert!(!connects(&servers, &tcp("127.0.0.2", ports[0])));
        for wrong in ["", "tcp:*", "tcp:h", "unix:", "unix:/a:*", "/a", "tcp:h:x"] {
            let e = Servers::new(&[], &[wrong.into()]).unwrap_err().to_string();
            assert!(e.starts_with("--connect-to"), "{e}");
        }
        let six = "tcp:[::1]:5".parse::<Allowed>().unwrap();
        let host = Host::of("0:0:0:0:0:0:0:1");
        let port = Some(5);
        assert_eq!(six, Allowed::Tcp(TcpServer { host, port }));
    }
}
