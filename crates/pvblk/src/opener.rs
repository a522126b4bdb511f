//! [`Opener`]: everything that the server opens, binds and connects.

use crate::events::{Program, RunEvent};
use crate::nbd::NbdListen;
use crate::sandbox::{FileCalls, Images, Link, SocketKind};
use crate::wanted::{LOCK, RealFolder};
use crate::web::WebSocket;
use anyhow::{Context, Result};
use pvblk_block::{BlockDevice, Error};
use pvblk_client::dial::{self, Dialer};
use pvblk_client::nbd::read_credential;
use pvblk_export::kit::{AccessOptions, UnixListen};
use pvblk_export::nbd::NbdSocket;
use pvblk_export::socket_file::{SocketAccess, SocketFile, SocketType};
use pvblk_export::xen::{LinuxXen, Xenstore};
use pvblk_protocol::nbd::NbdAddr;
use pvblk_volume::{FileOpener, Need, PassedOpener, PathStat, VolumeSpec, in_process};
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Arc;

/// The one way by which `pvblk serve` reaches files, devices, sockets and other servers. Nothing else of it opens, binds or connects
/// anything, so that this can move to a process of its own: files are opened by a [`FileOpener`], whose calls can be made over a socket, and a socket is a
/// descriptor with its address. Volumes of other servers get a [`Dialer`], by which they connect again for as long as they are used; `rbd` connects for itself, in a process of its own where there is a sandbox.
///
/// Its calls may wait for a medium or peer: none is made on a thread that others depend on.
#[derive(Debug)]
pub struct Opener {
    files: Arc<dyn FileOpener>,
    /// The process that opens and binds for this one.
    parent: Option<Arc<Link>>,
    /// Queues that a volume may need at once.
    queues: u16,
    /// NBD may listen where other machines reach it.
    allow_remote: bool,
}

impl Default for Opener {
    /// For volumes with one queue, and for clients of this machine.
    fn default() -> Opener {
        Opener {
            files: in_process(),
            parent: None,
            queues: 1,
            allow_remote: false,
        }
    }
}

impl Opener {
    /// Has another process open and bind.
    pub fn over(parent: &Arc<Link>) -> Opener {
        Opener {
            files: Arc::new(PassedOpener(FileCalls(Arc::clone(parent)))),
            parent: Some(Arc::clone(parent)),
            ..Opener::default()
        }
    }

    /// `queues`: how many queues a volume may need at once; `allow_remote`: whether NBD may listen where other machines reach it.
    #[must_use]
    pub fn serving(self, queues: u16, allow_remote: bool) -> Opener {
        Opener {
            queues,
            allow_remote,
            ..self
        }
    }

    /// A file of the server's own, to be read.
    pub fn file(&self, path: &Path) -> io::Result<File> {
        let opened = self.files.open(path, OFlags::RDONLY, Mode::empty());
        opened.map(File::from)
    }

    /// The kind and permissions of what a path leads to.
    pub fn stat(&self, path: &Path) -> io::Result<PathStat> {
        self.files.stat(path)
    }

    /// The text of a file of the server's own.
    pub fn text(&self, path: &Path) -> io::Result<String> {
        let mut text = String::new();
        self.file(path)?.read_to_string(&mut text)?;
        Ok(text)
    }

    /// A socket whose datagrams go to the one at `path`.
    pub fn datagrams(&self, path: &Path) -> io::Result<UnixDatagram> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(path)?;
        Ok(socket)
    }

    /// Opens a volume and everything below it.
    pub fn volume(&self, spec: &VolumeSpec) -> Result<Arc<dyn BlockDevice>, Error> {
        let mut need = Need {
            queues: self.queues,
            opener: Arc::clone(&self.files),
            dialer: self.dialer(),
            ..Need::default()
        };
        if let Some(parent) = &self.parent {
            need.images = Arc::new(Images(Arc::clone(parent)));
        }
        spec.open_for(&need)
    }

    /// Connects to servers of other disks.
    fn dialer(&self) -> Arc<dyn Dialer> {
        match &self.parent {
            None => dial::in_process(),
            Some(parent) => Arc::<Link>::clone(parent),
        }
    }

    /// Runs `program` for events.
    pub fn event_program(&self, program: &Path) -> Arc<dyn RunEvent> {
        match &self.parent {
            None => Arc::new(Program::new(program.to_owned())),
            // It knows the program from its own command line.
            Some(parent) => Arc::<Link>::clone(parent),
        }
    }

    /// A socket for NBD clients.
    pub fn nbd(&self, listen: &NbdListen) -> Result<NbdSocket, Error> {
        let address = listen.address();
        match (&self.parent, address) {
            (_, NbdAddr::Unix(path)) => {
                let access = listen.access(self)?;
                Ok(NbdSocket::unix(self.stream_for(path, access)?))
            }
            (None, _) => {
                let allow = self.allow_remote || listen.secured().is_some();
                NbdSocket::bind(address, allow)
            }
            (Some(parent), NbdAddr::Tcp { .. }) => Ok(NbdSocket::tcp(parent.tcp(address)?)),
        }
    }

    /// The contents of a file of credentials.
    pub fn credential(&self, path: &Path) -> io::Result<Vec<u8>> {
        read_credential(self.file(path)?)
    }

    /// The number of a user or group, by `table`: /etc/passwd or /etc/group. A number stands for itself.
    pub fn number(&self, table: &str, name: &str) -> Result<u32, Error> {
        if let Ok(number) = name.parse() {
            return Ok(number);
        }
        let text = self.text(Path::new(table));
        let text = text.map_err(|e| Error::os(format!("reading {table}"), e))?;
        let number = text.lines().find_map(|line| {
            let mut fields = line.split(':');
            (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
        });
        number.ok_or_else(|| Error::config(format!("there is no {name} in {table}")))
    }

    /// The processes that options of a socket name.
    pub fn access(&self, options: &AccessOptions) -> Result<SocketAccess, Error> {
        options.resolve(|group| self.number("/etc/group", group))
    }

    /// A socket for front ends on rings.
    pub fn local(&self, listen: &UnixListen) -> Result<SocketFile, Error> {
        let access = self.access(&listen.access)?;
        match &self.parent {
            None => SocketFile::bind_for(&listen.path, SocketType::SEQPACKET, access),
            Some(parent) => parent.unix(&listen.path, SocketKind::Packets, access),
        }
    }

    /// A socket for virtual machines.
    pub fn vhost_user(&self, listen: &UnixListen) -> Result<SocketFile, Error> {
        self.stream_for(&listen.path, self.access(&listen.access)?)
    }

    /// A socket for the control protocol, or for readers of the page.
    pub fn stream(&self, path: &Path) -> Result<SocketFile, Error> {
        self.stream_for(path, SocketAccess::default())
    }

    fn stream_for(&self, path: &Path, access: SocketAccess) -> Result<SocketFile, Error> {
        match &self.parent {
            None => SocketFile::bind_for(path, SocketType::STREAM, access),
            Some(parent) => parent.unix(path, SocketKind::Stream, access),
        }
    }

    /// A socket for readers of the page and the metrics, and its address with the real port.
    pub fn web(
        &self,
        address: &NbdAddr,
        allow_remote: bool,
    ) -> Result<(WebSocket, NbdAddr), Error> {
        let (host, port) = match address {
            NbdAddr::Unix(path) => {
                return Ok((WebSocket::Unix(self.stream(path)?), address.clone()));
            }
            NbdAddr::Tcp { host, port } => (host, *port),
        };
        let failed = |e| Error::os(format!("listening on {host} port {port}"), e);
        if let Some(parent) = &self.parent {
            return of_listener(parent.tcp(address)?).map_err(failed);
        }
        let found = (host.as_str(), port).to_socket_addrs();
        let found: Vec<SocketAddr> = found
            .map_err(|e| Error::os(format!("looking up {host}"), e))?
            .collect();
        if !allow_remote && let Some(a) = found.iter().find(|a| !a.ip().is_loopback()) {
            return Err(Error::config(format!(
                "{} is reachable from other machines, which could read everything without a password: use 127.0.0.1, or give --web-allow-remote",
                a.ip()
            )));
        }
        let listener = TcpListener::bind(found.as_slice()).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        of_listener(listener).map_err(failed)
    }

    /// The control socket at its usual place, whose directory is made if it isn't there.
    pub fn usual_control(&self, path: &Path) -> Result<SocketFile, Error> {
        if let Some(directory) = path.parent()
            && self.files.stat(directory).is_err()
        {
            let made = self.files.make_folder(directory, Mode::from(0o755));
            made.map_err(|e| Error::os(format!("making {}", directory.display()), e))?;
        }
        self.stream(path)
    }

    /// The folder that keeps what is wanted, made if there is none, with its lock.
    pub fn state(&self, path: &Path) -> Result<RealFolder> {
        let failed = || format!("--state {}", path.display());
        match self.files.make_folder(path, Mode::RWXU) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(e).with_context(failed),
            _ => {}
        }
        let folder = self.file(path).with_context(failed)?;
        let flags = OFlags::WRONLY | OFlags::CREATE;
        let mode = Mode::RUSR | Mode::WUSR;
        let lock = self.files.open_in(folder.as_fd(), LOCK, flags, mode);
        let lock = File::from(lock.with_context(failed)?);
        RealFolder::locked(path, folder, lock, &self.files)
    }

    /// The way to Xen: its store, and its devices.
    pub fn xen(&self) -> Result<(Xenstore, LinuxXen)> {
        let xenstore = Xenstore::connect()?;
        let hypervisor = LinuxXen::check().context("serving Xen guests")?;
        Ok((xenstore, hypervisor))
    }
}

/// A listening socket for readers of the page, with its real port.
fn of_listener(listener: TcpListener) -> io::Result<(WebSocket, NbdAddr)> {
    let real = listener.local_addr()?;
    let address = NbdAddr::Tcp {
        host: real.ip().to_string(),
        port: real.port(),
    };
    Ok((WebSocket::Tcp(listener), address))
}
