//! `pvblk serve`.

use crate::cli::ServeArgs;
use crate::config::ServeConfig;
use crate::hub::Hub;
use crate::memory::Desk;
use crate::rings::RingHost;
use crate::traces::Traces;
use crate::vhost::VhostDisks;
use crate::{bill, daemon, log};
use anyhow::{Context, Result, bail};
use pvblk_backend::{Backend, BackendOptions, Disk, Pressure};
use pvblk_block::ErrorKind;
use pvblk_export::local::LocalServer;
use pvblk_export::vhost_user::VhostServer;
use pvblk_export::xen::{LinuxXen, XenServer, Xenstore};
use std::sync::Arc;

pub fn run(args: &ServeArgs) -> Result<()> {
    let mut config = ServeConfig::resolve(args)?;
    let base = daemon::base_memory();
    let mut signals = daemon::signals()?;
    let traces = Traces::of_server();
    let mut disks = Vec::new();
    let mut budgets = config.clients.budgets(config.disks.len());
    for (name, spec) in &config.disks {
        let device = match spec.open() {
            // A guest can write what keeps its own disk from being served; the others' aren't to suffer from that.
            Err(e) if e.kind() == ErrorKind::Content && config.disks.len() > 1 => {
                tracing::error!("disk {name} is not served: {e}");
                continue;
            }
            opened => opened.with_context(|| format!("disk {name}"))?,
        };
        let mib = device.capacity_sectors() / 2048;
        log::line(format_args!(
            "disk {name}: {}, {mib} MiB",
            device.describe()
        ));
        let disk = Disk::new(name, device, traces.of(name)).with_memory(budgets());
        disks.push(Arc::new(match config.exclusive.contains(name) {
            true => disk.exclusive(),
            false => disk,
        }));
    }
    if disks.is_empty() {
        bail!("none of the disks can be served: see the errors above");
    }
    let served = |name: &str| disks.iter().any(|d: &Arc<Disk>| d.name() == name);
    config.vhost_user.retain(|l| served(&l.disk));
    config.xen_attach.retain(|o| served(&o.disk));
    let first = config.disks[0].0.clone();
    let backend = Backend::start(&BackendOptions {
        workers: config.workers,
        spin_max: config.spin_max,
        ..BackendOptions::default()
    })?;
    let buffers = &config.buffers;
    let pressure = Arc::new(Pressure::new(buffers.floor_pages * backend.workers()));
    pressure.set_max_buffer_pages(buffers.max_pages);
    pressure.set_duration(buffers.squeeze);
    let watch = match buffers.listen {
        true => Some(daemon::listen_for_pressure(&pressure)?),
        false => None,
    };
    let desk = Desk::new(&pressure, watch.as_ref(), base);
    let hub = Hub::new(backend, disks, first, pressure);
    let local = match &config.local {
        Some(path) => {
            let host = RingHost::new(Arc::clone(&hub), &config);
            log::line(format_args!(
                "rings on unix:{} (up to {} queues of {} pages for each disk)",
                path.display(),
                config.max_queues,
                config.max_ring.pages()
            ));
            Some(LocalServer::bind(path, Arc::new(host))?)
        }
        None => None,
    };
    let nbd = daemon::start_nbd(&hub, &config.nbd, config.allow_remote, config.clients)?;
    for server in &nbd {
        let address = server.local_addr();
        let uri = |d: &Arc<Disk>| daemon::uri(&address, d.name());
        let all: Vec<_> = hub.disks().iter().map(uri).collect();
        log::line(format_args!("NBD on {}", all.join(" ")));
    }
    let vhost = match config.vhost_user.as_slice() {
        [] => None,
        listens => {
            for l in listens {
                let (disk, path) = (&l.disk, l.path.display());
                log::line(format_args!(
                    "disk {disk}: vhost-user-blk on unix:{path} (up to {} queues)",
                    config.max_queues
                ));
            }
            let host = VhostDisks::new(
                Arc::clone(&hub),
                config.max_queues,
                config.max_guest_unallocated,
            );
            Some(VhostServer::bind(listens, Arc::new(host))?)
        }
    };
    let xen = match config.xen {
        true => Some(serve_xen(&hub, &config)?),
        false => None,
    };
    let control = traces.start(config.control.as_deref(), config.slow, &hub, desk)?;
    if let Some(watch) = &watch {
        daemon::tell_sources(watch);
    }
    log::put(bill::render(base).as_bytes());
    daemon::ready();
    daemon::wait_for_stop(&mut signals, &hub, base);
    // No new ones, then those that are there, then the data.
    drop(nbd);
    drop(local);
    drop(vhost);
    drop(xen);
    drop(control);
    drop(watch);
    daemon::finish(&hub)
}

fn serve_xen(hub: &Arc<Hub>, config: &ServeConfig) -> Result<XenServer> {
    let xenstore = Xenstore::connect()?;
    let hypervisor = LinuxXen::check().context("serving Xen guests")?;
    let host = RingHost::new(Arc::clone(hub), config);
    let orders = config.xen_attach.clone();
    let server = XenServer::start(xenstore, Arc::new(hypervisor), Arc::new(host), orders)?;
    log::line(format_args!(
        "Xen guests from domain {} (up to {} queues of {} pages, grants {})",
        server.domain(),
        config.max_queues,
        config.max_ring.pages(),
        if config.persistent_grants {
            "persistent"
        } else {
            "copied"
        }
    ));
    for order in &config.xen_attach {
        log::line(format_args!("{order}, whenever there is one"));
    }
    Ok(server)
}
