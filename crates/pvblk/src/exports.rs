//! The ways by which the command's disks leave the process: servers for each way that was asked for, all over one service.

use crate::config::ServeConfig;
use crate::log;
use crate::nbd::NbdListen;
use crate::opener::Opener;
use crate::shares::ClientLimits;
use crate::wanted::Listeners;
use anyhow::Result;
use parking_lot::Mutex;
use pvblk_backend::{Disk, Service};
use pvblk_block::{Error, ErrorKind};
use pvblk_export::kit::{MappingBudget, UnixListen, same_address};
use pvblk_export::local::LocalServer;
use pvblk_export::nbd::{NbdConfig, NbdServer};
use pvblk_export::vhost_user::{VhostLimits, VhostServer};
use pvblk_export::xen::{StandingOrder, XenServer};
use pvblk_protocol::nbd::NbdAddr;
use pvblk_protocol::xenbus::BackendOffers;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Servers, which come and go at run time.
pub struct Exports {
    service: Arc<Service>,
    opener: Arc<Opener>,
    nbd: NbdConfig,
    offers: BackendOffers,
    limits: VhostLimits,
    /// Of all servers for front ends on rings.
    mapped: Arc<MappingBudget>,
    /// Never held while something is opened or a server is stopped.
    servers: Mutex<Servers>,
}

#[derive(Default)]
struct Servers {
    nbd: Vec<Listening<NbdServer>>,
    local: Vec<Listening<LocalServer>>,
    vhost: Option<VhostServer>,
    xen: Option<XenServer>,
}

impl Drop for Servers {
    /// Has all of them begin to stop, so that they wait for their peers side by side.
    fn drop(&mut self) {
        self.nbd.iter().for_each(|s| s.server.begin_stop());
        self.local.iter().for_each(|s| s.server.begin_stop());
        self.vhost.iter().for_each(VhostServer::begin_stop);
        self.xen.iter().for_each(XenServer::begin_stop);
    }
}

/// A server by the address that its user gave it.
struct Listening<S> {
    given: String,
    server: S,
}

/// Settings that all servers of a process are told once.
#[derive(Clone, Copy, Debug)]
pub struct ExportLimits {
    pub offers: BackendOffers,
    /// Most queues of a virtual machine's disk: at most 64.
    pub queues: u16,
    /// Bytes of guests' memory that nobody has allocated; `None`: no limit.
    pub unallocated: Option<u64>,
    pub clients: ClientLimits,
    pub allow_remote: bool,
}

impl ExportLimits {
    pub fn of(config: &ServeConfig) -> ExportLimits {
        ExportLimits {
            offers: BackendOffers {
                max_queues: Some(config.max_queues),
                max_ring: Some(config.max_ring),
                persistent: config.persistent_grants,
                ..BackendOffers::default()
            },
            // At most 64: see `config`.
            queues: config.max_queues as u16,
            unallocated: config.max_guest_unallocated,
            clients: config.clients,
            allow_remote: config.allow_remote,
        }
    }
}

impl Exports {
    /// No server yet.
    pub fn new(service: &Arc<Service>, opener: &Arc<Opener>, limits: &ExportLimits) -> Exports {
        Exports {
            service: Arc::clone(service),
            opener: Arc::clone(opener),
            nbd: NbdConfig {
                allow_remote: limits.allow_remote,
                shares: limits.clients.shares(),
                ..NbdConfig::default()
            },
            offers: limits.offers,
            limits: VhostLimits {
                queues: limits.queues,
                unallocated: limits.unallocated,
            },
            mapped: MappingBudget::new(),
            servers: Mutex::default(),
        }
    }

    /// Starts all servers of `pvblk serve`, and tells where they are.
    pub fn start(&self, config: &ServeConfig) -> Result<()> {
        if let Some(listen) = &config.local {
            log::line(format_args!(
                "rings on unix:{} (up to {} queues of {} pages for each disk)",
                listen.path.display(),
                config.max_queues,
                config.max_ring.pages()
            ));
            self.add_local(listen)?;
        }
        for address in &config.nbd {
            self.add_nbd(address)?;
        }
        self.tell(|address| {
            let disks = self.service.disks().all();
            if disks.is_empty() {
                return address.uri("");
            }
            let uris = disks.iter().map(|d: &Arc<Disk>| address.uri(d.name()));
            uris.collect::<Vec<_>>().join(" ")
        });
        let mut sockets = Vec::new();
        for (name, listen) in &config.vhost_user {
            log::line(format_args!(
                "disk {}: vhost-user-blk on unix:{} (up to {} queues)",
                name,
                listen.path.display(),
                config.max_queues
            ));
            let disk = self.disk(name)?;
            sockets.push((disk, self.opener.vhost_user(listen)?));
        }
        if !sockets.is_empty() {
            // Together: those that are there at the start share evenly.
            let server = VhostServer::start(sockets, &self.service, self.limits)?;
            self.servers.lock().vhost = Some(server);
        }
        if config.xen {
            self.start_xen(config)?;
        }
        Ok(())
    }

    /// Stops all servers side by side: no new peers, then those that are there. Returns when the slowest one is done, at most 10 seconds later.
    pub fn stop(&self) {
        let servers = std::mem::take(&mut *self.servers.lock());
        drop(servers);
    }

    /// Tells for each NBD server where it is.
    pub fn tell(&self, uris: impl Fn(&NbdPlace) -> String) {
        for address in self.nbd_places() {
            log::line(format_args!("NBD on {}", uris(&address)));
        }
    }

    fn disk(&self, name: &str) -> Result<Arc<Disk>, Error> {
        let disk = self.service.disks().find(name);
        disk.ok_or_else(|| Error::config(format!("there is no disk {name}")))
    }

    /// Where NBD clients reach all disks, with the real ports.
    pub fn nbd_places(&self) -> Vec<NbdPlace> {
        let servers = self.servers.lock();
        let place = |s: &Listening<NbdServer>| NbdPlace {
            address: s.server.local_addr(),
            has_tls: s.server.has_tls(),
        };
        servers.nbd.iter().map(place).collect()
    }

    /// Where front ends on rings reach all disks.
    pub fn local_paths(&self) -> Vec<PathBuf> {
        let servers = self.servers.lock();
        let all = servers.local.iter().map(|s| s.server.path().to_owned());
        all.collect()
    }

    /// Listens for NBD clients of all disks; returns where, with the real port.
    pub fn add_nbd(&self, listen: &NbdListen) -> Result<NbdPlace, Error> {
        let given = listen.to_string();
        self.check_free(&given)?;
        let config = NbdConfig {
            tls: listen.tls(&self.opener)?,
            rules: listen.rules(&self.opener)?,
            ..self.nbd.clone()
        };
        let socket = self.opener.nbd(listen)?;
        let server = NbdServer::start(socket, config, &self.service)?;
        let place = NbdPlace {
            address: server.local_addr(),
            has_tls: server.has_tls(),
        };
        self.servers.lock().nbd.push(Listening { given, server });
        Ok(place)
    }

    /// Addresses of all disks, as they were given.
    pub fn listeners(&self) -> Listeners {
        let servers = self.servers.lock();
        Listeners {
            local: servers.local.iter().map(|s| s.given.clone()).collect(),
            nbd: servers.nbd.iter().map(|s| s.given.clone()).collect(),
        }
    }

    /// Removes the listener that was given this address, or has it. Clients that are connected keep it, with an error, unless `force`.
    pub fn remove_nbd(&self, address: &NbdAddr, force: bool) -> Result<(), Error> {
        let text = address.to_string();
        let mut servers = self.servers.lock();
        let is_it = |s: &Listening<NbdServer>| {
            same_address(&s.given, &text) || s.server.local_addr() == *address
        };
        let found = servers.nbd.iter().position(is_it);
        let index = found.ok_or_else(|| none(&format!("NBD listener {text}")))?;
        match servers.nbd[index].server.connections() {
            n if n > 0 && !force => Err(used(n, "NBD clients", &text)),
            _ => {
                let server = servers.nbd.remove(index);
                drop(servers);
                // It waits for its clients a while.
                drop(server);
                Ok(())
            }
        }
    }

    /// Listens for front ends on rings of all disks.
    pub fn add_local(&self, listen: &UnixListen) -> Result<(), Error> {
        let given = listen.to_string();
        self.check_free(&given)?;
        let socket = self.opener.local(listen)?;
        let budget = Arc::clone(&self.mapped);
        let server = LocalServer::start(socket, &self.service, self.offers, budget)?;
        self.servers.lock().local.push(Listening { given, server });
        Ok(())
    }

    /// Removes a socket for front ends on rings. Those that are connected keep it, with an error, unless `force`.
    pub fn remove_local(&self, path: &Path, force: bool) -> Result<(), Error> {
        let mut servers = self.servers.lock();
        let found = servers.local.iter().position(|s| s.server.path() == path);
        let text = path.display().to_string();
        let index = found.ok_or_else(|| none(&format!("socket {text} for front ends on rings")))?;
        match servers.local[index].server.connections() {
            n if n > 0 && !force => Err(used(n, "front ends", &text)),
            _ => {
                let server = servers.local.remove(index);
                drop(servers);
                drop(server);
                Ok(())
            }
        }
    }

    /// The same address is given once: a second server there would find the first one's socket in use, with an error that names another server.
    fn check_free(&self, given: &str) -> Result<(), Error> {
        let servers = self.servers.lock();
        let nbd = servers.nbd.iter().map(|s| &s.given);
        let mut all = nbd.chain(servers.local.iter().map(|s| &s.given));
        match all.any(|g| same_address(g, given)) {
            true => Err(Error::config(format!(
                "this server listens at {given} already"
            ))),
            false => Ok(()),
        }
    }

    /// Offers a disk to virtual machines at one more socket.
    pub fn add_vhost(&self, disk: &str, listen: &UnixListen) -> Result<(), Error> {
        let disk = self.disk(disk)?;
        let socket = self.opener.vhost_user(listen)?;
        let mut servers = self.servers.lock();
        if let Some(vhost) = &servers.vhost {
            return vhost.add(&disk, socket);
        }
        let server = VhostServer::start(Vec::new(), &self.service, self.limits)?;
        let added = server.add(&disk, socket);
        servers.vhost = Some(server);
        added
    }

    /// Removes a socket for virtual machines. One that is connected keeps it, with an error, unless `force`.
    pub fn remove_vhost(&self, path: &Path, force: bool) -> Result<(), Error> {
        match &self.servers.lock().vhost {
            Some(vhost) => vhost.remove(path, force),
            None => Err(none(&format!("vhost-user socket {}", path.display()))),
        }
    }

    /// Attaches a disk to a Xen guest whenever there is one of that name.
    pub fn add_order(&self, order: StandingOrder) -> Result<(), Error> {
        match &self.servers.lock().xen {
            Some(xen) => xen.add_order(order),
            None => Err(Error::config(
                "this server serves no Xen guests: start it with --xen",
            )),
        }
    }

    /// Takes that back. A guest keeps the disk that it has.
    pub fn remove_order(&self, order: StandingOrder) -> Result<(), Error> {
        match &self.servers.lock().xen {
            Some(xen) => xen.remove_order(order),
            None => Err(none(&format!("order: {order}"))),
        }
    }

    /// As [`Exports::start_xen`], with a server over a simulated xenstore.
    #[cfg(test)]
    pub fn set_xen(&self, server: XenServer) {
        self.servers.lock().xen = Some(server);
    }

    fn start_xen(&self, config: &ServeConfig) -> Result<()> {
        let (xenstore, hypervisor) = self.opener.xen()?;
        let orders = config.xen_attach.clone();
        let hypervisor = Arc::new(hypervisor);
        let server = XenServer::start(xenstore, hypervisor, &self.service, self.offers, orders)?;
        log::line(format_args!(
            "Xen guests from domain {} (up to {} queues of {} pages, grants {})",
            server.domain(),
            config.max_queues,
            config.max_ring.pages(),
            match config.persistent_grants {
                true => "persistent",
                false => "copied",
            }
        ));
        for order in &config.xen_attach {
            log::line(format_args!("{order}, whenever there is one"));
        }
        self.servers.lock().xen = Some(server);
        Ok(())
    }
}

fn none(what: &str) -> Error {
    Error::config(format!("there is no {what}"))
}

fn used(count: usize, who: &str, place: &str) -> Error {
    let why = format!("{count} {who} are connected at {place}: disconnect them, or use --force");
    Error::new(ErrorKind::Exhausted, why)
}

/// Where NBD clients reach all disks.
#[derive(Clone, Debug)]
pub struct NbdPlace {
    /// With the real port.
    pub address: NbdAddr,
    pub has_tls: bool,
}

impl NbdPlace {
    /// The URI of an export, as NBD clients write it.
    pub fn uri(&self, export: &str) -> String {
        let scheme = if self.has_tls { "nbds" } else { "nbd" };
        match &self.address {
            NbdAddr::Unix(path) => {
                format!("{scheme}+unix:///{export}?socket={}", path.display())
            }
            NbdAddr::Tcp { .. } => {
                let text = self.address.to_string();
                format!("{scheme}://{}/{export}", text.trim_start_matches("tcp:"))
            }
        }
    }
}
