//! The page, the metrics and the API over HTTP: `--web` of `pvblk serve`, and `pvblk web` in front of a control socket. Decision 35.

mod api;
mod backing;
mod metrics;
mod site;

use crate::config::File;
use crate::control::{ControlArg, Methods};
use crate::opener::Opener;
use crate::{daemon, log};
use anyhow::{Context, Result, anyhow, bail};
use backing::{Backing, Behind, Inside};
use clap::Args;
pub use metrics::DiskFigures;
use pvblk_export::socket_file::SocketFile;
use pvblk_protocol::nbd::NbdAddr;
use pvblk_web::{Hosts, Listener, Server, Settings, Token};
use site::Site;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

/// Shown under the flags.
pub const HELP: &str = "\
Everybody who reaches the address reads names and figures; only those with the token change anything. docs/guide/metrics.md has more.

Examples:
  pvblk web --listen tcp:127.0.0.1:9808
  pvblk web --control unix:/run/pvblk.ctl --listen unix:/run/pvblk-web.sock
  curl http://127.0.0.1:9808/metrics";

#[derive(Args, Debug)]
pub struct WebArgs {
    /// Where to listen for readers: TCP only on loopback addresses, unless --web-allow-remote
    #[arg(long, value_name = "unix:PATH|tcp:HOST:PORT")]
    pub listen: String,
    #[command(flatten)]
    pub control: ControlArg,
    #[command(flatten)]
    pub access: AccessArgs,
    #[command(flatten)]
    pub log: log::LogArgs,
}

#[derive(Args, Clone, Debug, Default)]
pub struct ServeWebArgs {
    /// Socket for the page at / and for Prometheus at /metrics. TCP only on loopback addresses, unless --web-allow-remote
    #[arg(long, value_name = "unix:PATH|tcp:HOST:PORT")]
    pub web: Option<String>,
    #[command(flatten)]
    pub access: AccessArgs,
}

/// Those who may read and change over HTTP.
#[derive(Args, Clone, Debug, Default)]
pub struct AccessArgs {
    /// Let other machines read the page and the metrics. There is no password for reading
    #[arg(long)]
    pub web_allow_remote: bool,
    /// Serve the page under this name of the machine, too; may be given several times [default: addresses and localhost]
    #[arg(long, value_name = "NAME")]
    pub web_host: Vec<String>,
    /// File with the token of those who may change something over HTTP, mode 0600 [default: nobody may]
    #[arg(long, value_name = "FILE")]
    pub web_token_file: Option<PathBuf>,
}

/// A checked configuration.
#[derive(Debug)]
pub struct WebConfig {
    address: NbdAddr,
    allow_remote: bool,
    hosts: Hosts,
    token_file: Option<PathBuf>,
}

impl WebConfig {
    /// Of flags, and of the file where there is no flag; `None`: nothing is offered.
    pub fn of_server(args: &ServeWebArgs, file: &File) -> Result<Option<WebConfig>> {
        let Some(address) = args.web.as_ref().or(file.web.as_ref()) else {
            let access = &args.access;
            let hosts = !access.web_host.is_empty() || !file.web_host.is_empty();
            let token = access.web_token_file.is_some() || file.web_token_file.is_some();
            let remote = access.web_allow_remote || file.web_allow_remote;
            if hosts || token || remote {
                bail!(
                    "--web-host, --web-token-file and --web-allow-remote say who may use the page: give --web ADDRESS too"
                );
            }
            return Ok(None);
        };
        let mut access = args.access.clone();
        access.web_allow_remote |= file.web_allow_remote;
        access.web_host.extend(file.web_host.iter().cloned());
        if access.web_token_file.is_none() {
            access.web_token_file.clone_from(&file.web_token_file);
        }
        WebConfig::of("--web", address, access).map(Some)
    }

    fn of(flag: &str, address: &str, access: AccessArgs) -> Result<WebConfig> {
        let parsed = address.parse::<NbdAddr>();
        let address = parsed.map_err(|_| {
            anyhow!("{flag} {address}: write unix:PATH, tcp:HOST:PORT or tcp:[IPV6]:PORT")
        })?;
        let of_address = match &address {
            NbdAddr::Tcp { host, .. } => Some(host.clone()),
            NbdAddr::Unix(_) => None,
        };
        Ok(WebConfig {
            hosts: Hosts::with(access.web_host.into_iter().chain(of_address)),
            address,
            allow_remote: access.web_allow_remote,
            token_file: access.web_token_file,
        })
    }

    /// The address at which it listens.
    pub fn address(&self) -> &NbdAddr {
        &self.address
    }

    /// True if other machines may read.
    pub fn allow_remote(&self) -> bool {
        self.allow_remote
    }

    /// The file with the token of those who may change something.
    pub fn token_file(&self) -> Option<&PathBuf> {
        self.token_file.as_ref()
    }

    /// Serves the disks of this process.
    pub fn start(&self, opener: &Opener, methods: &Methods) -> Result<Server> {
        self.serve(opener, Arc::new(Inside::new(methods.clone())))
    }

    fn serve(&self, opener: &Opener, backing: Arc<dyn Backing>) -> Result<Server> {
        metrics::begin();
        let token = self.token_file.as_ref();
        let token = token.map(|path| Token::read(path, opener.file(path)));
        let token = token.transpose().context("--web-token-file")?;
        let (socket, address) = opener.web(&self.address, self.allow_remote)?;
        let place = match &address {
            NbdAddr::Unix(path) => format!("unix:{}", path.display()),
            NbdAddr::Tcp { .. } => {
                format!("http://{}/", address.to_string().trim_start_matches("tcp:"))
            }
        };
        let settings = Settings {
            hosts: self.hosts.clone(),
            ..Settings::default()
        };
        let site = Arc::new(Site::new(backing, token));
        let server = Server::start(socket, place.clone(), site, settings);
        let server = server.with_context(|| format!("serving the page on {place}"))?;
        log::line(format_args!("page and metrics on {place}"));
        Ok(server)
    }
}

/// A listening socket for readers.
pub enum WebSocket {
    Unix(SocketFile),
    Tcp(TcpListener),
}

impl AsFd for WebSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            WebSocket::Unix(file) => file.as_fd(),
            WebSocket::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl Listener for WebSocket {
    fn accept(&self) -> io::Result<Option<OwnedFd>> {
        match self {
            WebSocket::Unix(file) => file.accept(),
            WebSocket::Tcp(listener) => Listener::accept(listener),
        }
    }
}

/// `pvblk web`
pub fn run(args: &WebArgs) -> Result<()> {
    let control = args.control.path()?;
    let config = WebConfig::of("--listen", &args.listen, args.access.clone())?;
    let opener = Opener::default();
    log::start(Some((&args.log, &opener)))?;
    let mut signals = daemon::signals()?;
    let server = config.serve(&opener, Arc::new(Behind::new(control)))?;
    daemon::ready();
    daemon::wait_for_end(&mut signals);
    drop(server);
    Ok(())
}
