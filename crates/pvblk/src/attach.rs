//! `pvblk attach`: a front end on a server's rings, offered as NBD.

use crate::cli::AttachArgs;
use crate::exports::{self, Exports};
use crate::memory::Desk;
use crate::shares::ClientLimits;
use crate::traces::Traces;
use crate::{config, daemon, log};
use anyhow::{Result, bail};
use pvblk_backend::{
    Backend, BackendOptions, Disk, Disks, FLOOR_PAGES_PER_WORKER, Pressure, Service,
};
use pvblk_block::{BlockDevice, Error};
use pvblk_client::local::{ConnectOptions, Keeper, KeeperEvent, connect};
use pvblk_client::rings::Frontend;
use pvblk_protocol::nbd::NbdAddr;
use std::sync::Arc;
use std::time::Duration;

pub fn run(args: &AttachArgs) -> Result<()> {
    let path = config::unix_path("the server", &args.server)?;
    if !(1..=config::MAX_QUEUES).contains(&args.queues) {
        bail!("--queues must be from 1 to {}", config::MAX_QUEUES);
    }
    let size = config::ring_size("--ring-pages", args.ring_pages)?;
    let spin_max = config::spin(args.spin_us)?;
    let nbd: Vec<NbdAddr> = args
        .nbd
        .iter()
        .map(|s| s.parse::<NbdAddr>())
        .collect::<Result<_, Error>>()?;
    let memory = pvblk_volume::parse_size(&args.memory)?;
    let control = args.control.as_ref();
    let control = control
        .map(|s| config::unix_path("--control", s))
        .transpose()?;
    let base = daemon::base_memory();
    let mut signals = daemon::signals()?;
    let options = ConnectOptions {
        queues: args.queues,
        ring_pages: size.pages(),
        memory_bytes: memory,
        ..ConnectOptions::default()
    };
    let (parts, link) = connect(&path, &args.disk, &options)?;
    let entries = parts.queues.first().map_or(0, |q| q.ring.entries());
    let device = Frontend::new(parts)?;
    log::line(format_args!(
        "disk {}: {} MiB, negotiated {} queues of {} pages ({entries} requests each)",
        args.disk,
        device.capacity_sectors() / 2048,
        device.queues(),
        entries / 32,
    ));
    let backend = Backend::start(&BackendOptions {
        workers: args.workers.unwrap_or(0),
        spin_max,
        ..BackendOptions::default()
    })?;
    let shared: Arc<dyn BlockDevice> = device.clone();
    let traces = Traces::of_client();
    let disk = Disk::new(&args.disk, shared, traces.of(&args.disk)).with_layer("attach");
    let clients = ClientLimits::default();
    let disk = disk.with_memory(clients.budgets(1)());
    let pressure = Arc::new(Pressure::new(FLOOR_PAGES_PER_WORKER * backend.workers()));
    let service = Service::new(backend, Disks::new(vec![Arc::new(disk)]), pressure);
    let patience = (args.reconnect > 0).then(|| Duration::from_secs(args.reconnect));
    let keeper = Keeper::start(link, device, patience, follow(&args.disk, patience))?;
    let servers = Exports::nbd(&service, &nbd, args.allow_remote, clients)?;
    servers.tell(|address| exports::uri(address, &args.disk));
    let watch = daemon::listen_for_pressure(service.pressure())?;
    let desk = Desk::new(service.pressure(), Some(&watch), base);
    let control = traces.start(control.as_deref(), args.slow, &service, desk)?;
    daemon::tell_sources(&watch);
    daemon::ready();
    daemon::wait_for_stop(&mut signals, &service, base);
    drop(servers);
    drop(control);
    drop(watch);
    if keeper.is_gone() {
        // The server is gone, not closing: nothing more can be flushed. Say why, rather than that.
        daemon::abandon(&service);
    } else {
        daemon::finish(&service)?;
    }
    match keeper.stop() {
        Some(why) => bail!("{}: {why}", args.server),
        None => Ok(()),
    }
}

/// Tells people, and ends the command when there is nothing to serve any more.
fn follow(disk: &str, patience: Option<Duration>) -> impl Fn(KeeperEvent) + Send + 'static {
    let disk = disk.to_owned();
    move |event| match event {
        KeeperEvent::Lost { reason } => {
            let seconds = patience.unwrap_or_default().as_secs();
            tracing::warn!("disk {disk}: {reason}; requests wait up to {seconds} s for it");
        }
        KeeperEvent::Back { after } => {
            tracing::info!(
                "disk {disk}: connected again after {:.1} s",
                after.as_secs_f64()
            );
        }
        KeeperEvent::Closing { .. } | KeeperEvent::Ended { .. } => {
            // Whoever waits for signals stops.
            let _ = signal_hook::low_level::raise(signal_hook::consts::SIGTERM);
        }
    }
}
