//! The ways by which the command's disks leave the process: a server for each way that was asked for, all over one service.

use crate::config::ServeConfig;
use crate::log;
use crate::shares::ClientLimits;
use anyhow::{Context, Result};
use pvblk_backend::{Disk, Service};
use pvblk_export::local::LocalServer;
use pvblk_export::nbd::{NbdConfig, NbdServer};
use pvblk_export::vhost_user::{VhostLimits, VhostServer};
use pvblk_export::xen::{LinuxXen, XenServer, Xenstore};
use pvblk_protocol::nbd::NbdAddr;
use pvblk_protocol::xenbus::BackendOffers;
use std::sync::Arc;

/// Servers, which stop one after another when this is dropped: no new peers, then those that are there.
#[derive(Default)]
pub struct Exports {
    nbd: Vec<NbdServer>,
    _local: Option<LocalServer>,
    _vhost: Option<VhostServer>,
    _xen: Option<XenServer>,
}

impl Exports {
    /// Starts all servers of `pvblk serve`, and tells where they are.
    pub fn start(service: &Arc<Service>, config: &ServeConfig) -> Result<Exports> {
        let offers = BackendOffers {
            max_queues: Some(config.max_queues),
            max_ring: Some(config.max_ring),
            persistent: config.persistent_grants,
            ..BackendOffers::default()
        };
        let local = match &config.local {
            Some(path) => {
                log::line(format_args!(
                    "rings on unix:{} (up to {} queues of {} pages for each disk)",
                    path.display(),
                    config.max_queues,
                    config.max_ring.pages()
                ));
                Some(LocalServer::bind(path, service, offers)?)
            }
            None => None,
        };
        let clients = config.clients;
        let mut exports = Exports::nbd(service, &config.nbd, config.allow_remote, clients)?;
        exports._local = local;
        exports.tell(|address| {
            let disks = service.disks().all();
            let uris = disks.iter().map(|d: &Arc<Disk>| uri(address, d.name()));
            uris.collect::<Vec<_>>().join(" ")
        });
        if !config.vhost_user.is_empty() {
            for l in &config.vhost_user {
                log::line(format_args!(
                    "disk {}: vhost-user-blk on unix:{} (up to {} queues)",
                    l.disk,
                    l.path.display(),
                    config.max_queues
                ));
            }
            let limits = VhostLimits {
                // At most 64: see `config`.
                queues: config.max_queues as u16,
                unallocated: config.max_guest_unallocated,
            };
            exports._vhost = Some(VhostServer::bind(&config.vhost_user, service, limits)?);
        }
        if config.xen {
            exports._xen = Some(xen(service, offers, config)?);
        }
        Ok(exports)
    }

    /// Starts an NBD server on each address.
    pub fn nbd(
        service: &Arc<Service>,
        addresses: &[NbdAddr],
        remote: bool,
        clients: ClientLimits,
    ) -> Result<Exports> {
        let config = NbdConfig {
            allow_remote: remote,
            shares: clients.shares(),
            ..NbdConfig::default()
        };
        let server = |address| NbdServer::bind(address, config.clone(), service);
        let nbd = addresses.iter().map(server);
        Ok(Exports {
            nbd: nbd.collect::<Result<_, _>>()?,
            ..Exports::default()
        })
    }

    /// Tells for each NBD server where it is.
    pub fn tell(&self, uris: impl Fn(&NbdAddr) -> String) {
        for server in &self.nbd {
            log::line(format_args!("NBD on {}", uris(&server.local_addr())));
        }
    }
}

fn xen(service: &Arc<Service>, offers: BackendOffers, config: &ServeConfig) -> Result<XenServer> {
    let xenstore = Xenstore::connect()?;
    let hypervisor = LinuxXen::check().context("serving Xen guests")?;
    let orders = config.xen_attach.clone();
    let server = XenServer::start(xenstore, Arc::new(hypervisor), service, offers, orders)?;
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
    Ok(server)
}

/// The URI under which NBD clients reach an export.
pub fn uri(address: &NbdAddr, export: &str) -> String {
    match address {
        NbdAddr::Unix(path) => format!("nbd+unix:///{export}?socket={}", path.display()),
        NbdAddr::Tcp { .. } => {
            let text = address.to_string();
            format!("nbd://{}/{export}", text.trim_start_matches("tcp:"))
        }
    }
}
