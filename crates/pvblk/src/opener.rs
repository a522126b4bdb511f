//! [`Opener`]: everything that the server opens, binds and connects.

use crate::wanted::{LOCK, RealFolder};
use anyhow::{Context, Result};
use pvblk_block::{BlockDevice, Error};
use pvblk_export::nbd::NbdSocket;
use pvblk_export::socket_file::{SocketFile, SocketType};
use pvblk_export::xen::{LinuxXen, Xenstore};
use pvblk_protocol::nbd::NbdAddr;
use pvblk_volume::{Need, VolumeSpec};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

/// The one way by which `pvblk serve` reaches files, devices, sockets and other servers. Nothing else of it opens, binds or connects
/// anything while it serves, so that this can move to a process of its own. Its calls may wait for a medium or peer: none is made on a thread that others
/// depend on.
#[derive(Debug)]
pub struct Opener {
    need: Need,
    allow_remote: bool,
}

impl Opener {
    /// `queues`: how many queues a volume may need at once; `allow_remote`: whether NBD may listen where other machines reach it.
    pub fn new(queues: u16, allow_remote: bool) -> Opener {
        Opener {
            need: Need {
                queues,
                ..Need::default()
            },
            allow_remote,
        }
    }

    /// Opens a volume and everything below it.
    pub fn volume(&self, spec: &VolumeSpec) -> Result<Arc<dyn BlockDevice>, Error> {
        spec.open_for(&self.need)
    }

    /// A socket for NBD clients.
    pub fn nbd(&self, address: &NbdAddr) -> Result<NbdSocket, Error> {
        NbdSocket::bind(address, self.allow_remote)
    }

    /// A socket for front ends on rings.
    pub fn local(&self, path: &Path) -> Result<SocketFile, Error> {
        SocketFile::bind(path, SocketType::SEQPACKET)
    }

    /// A socket for virtual machines, or for the control protocol.
    pub fn stream(&self, path: &Path) -> Result<SocketFile, Error> {
        SocketFile::bind(path, SocketType::STREAM)
    }

    /// The control socket at its usual place, whose directory is made if it isn't there.
    pub fn usual_control(&self, path: &Path) -> Result<SocketFile, Error> {
        if let Some(directory) = path.parent()
            && !directory.exists()
        {
            let made = DirBuilder::new().mode(0o755).create(directory);
            made.map_err(|e| Error::os(format!("making {}", directory.display()), e))?;
        }
        self.stream(path)
    }

    /// The folder that keeps what is wanted, made if there is none, with its lock.
    pub fn state(&self, path: &Path) -> Result<RealFolder> {
        let failed = || format!("--state {}", path.display());
        match DirBuilder::new().mode(0o700).create(path) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(e).with_context(failed),
            _ => {}
        }
        let folder = File::open(path).with_context(failed)?;
        let mut options = OpenOptions::new();
        options.create(true).write(true).truncate(false).mode(0o600);
        let lock = options.open(path.join(LOCK)).with_context(failed)?;
        RealFolder::locked(path, folder, lock)
    }

    /// The way to Xen: its store, and its devices.
    pub fn xen(&self) -> Result<(Xenstore, LinuxXen)> {
        let xenstore = Xenstore::connect()?;
        let hypervisor = LinuxXen::check().context("serving Xen guests")?;
        Ok((xenstore, hypervisor))
    }
}
