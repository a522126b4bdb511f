//! `pvblk serve`.

use crate::cli::ServeArgs;
use crate::config::ServeConfig;
use crate::events::Told;
use crate::exports::Exports;
use crate::memory::Desk;
use crate::traces::Traces;
use crate::{bill, daemon, log};
use anyhow::{Context, Result, bail};
use pvblk_backend::{Backend, BackendOptions, Disk, Disks, Pressure, Service};
use pvblk_block::ErrorKind;
use pvblk_volume::Need;
use std::sync::Arc;

pub fn run(args: &ServeArgs) -> Result<()> {
    let mut config = ServeConfig::resolve(args)?;
    log::start(Some(&config.log))?;
    let base = daemon::base_memory();
    let mut signals = daemon::signals()?;
    let traces = Traces::of_server();
    let mut disks = Vec::new();
    let mut budgets = config.clients.budgets(config.disks.len());
    // Each front end's ring, NBD connection and guest's queue takes one.
    let need = Need {
        queues: config.max_queues as u16,
        ..Need::default()
    };
    for (name, spec) in &config.disks {
        let device = match spec.open_for(&need) {
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
        disk.throttle().set(config.limits(name));
        disks.push(Arc::new(match config.is_exclusive(name) {
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
    let disks = Disks::new(disks).with_default(first);
    let service = Service::new(backend, disks, pressure);
    let told = Told::start(&service, config.on_event.take(), config.hang_after)?;
    let exports = Exports::start(&service, &config)?;
    let control = traces.start(config.control.as_deref(), config.slow, &service, desk)?;
    if let Some(watch) = &watch {
        daemon::tell_sources(watch);
    }
    log::put(&bill::render(base));
    daemon::ready();
    daemon::wait_for_stop(&mut signals, &service, base);
    // Peers first, then the data.
    drop(exports);
    drop(control);
    drop(watch);
    drop(told);
    daemon::finish(&service)
}
