//! `pvblk attach`: a front end on a server's rings, offered as NBD.

use crate::cli::AttachArgs;
use crate::control::{Methods, Reached, Server};
use crate::events::{self, Told};
use crate::exports::{ExportLimits, Exports};
use crate::memory::Desk;
use crate::nbd::NbdListen;
use crate::opener::Opener;
use crate::shares::ClientLimits;
use crate::traces::Traces;
use crate::{config, daemon, log};
use anyhow::{Context, Result, bail};
use pvblk_backend::{
    Backend, BackendOptions, Disk, Disks, FLOOR_PAGES_PER_WORKER, Pressure, PressureSources,
    Service,
};
use pvblk_block::{BlockDevice, Close, Error};
use pvblk_client::local::{ConnectOptions, LocalDisk};
use pvblk_protocol::xenbus::BackendOffers;
use std::sync::Arc;
use std::time::Duration;

pub fn run(args: &AttachArgs) -> Result<()> {
    let path = config::unix_path("the server", &args.server)?;
    if !(1..=config::MAX_QUEUES).contains(&args.queues) {
        bail!("--queues must be from 1 to {}", config::MAX_QUEUES);
    }
    let size = config::ring_size("--ring-pages", args.ring_pages)?;
    let spin_max = config::spin(args.spin_us)?;
    let nbd: Vec<NbdListen> = args
        .nbd
        .iter()
        .map(|s| s.parse::<NbdListen>())
        .collect::<Result<_, Error>>()?;
    let memory = pvblk_volume::parse_size(&args.memory)?;
    let control = args.control.as_ref();
    let control = control
        .map(|s| config::unix_path("--control", s))
        .transpose()?;
    let opener = Opener::default().serving(1, args.allow_remote);
    log::start(Some((&args.log, &opener)))?;
    let base = daemon::base_memory();
    let mut signals = daemon::signals()?;
    let options = ConnectOptions {
        queues: args.queues,
        ring_pages: size.pages(),
        memory_bytes: memory,
        ..ConnectOptions::default()
    };
    let patience = (args.reconnect > 0).then(|| Duration::from_secs(args.reconnect));
    let stop = || {
        let _ = signal_hook::low_level::raise(signal_hook::consts::SIGTERM);
    };
    let attached = LocalDisk::connect(&path, &args.disk, &options, patience, stop)?;
    let device = Arc::clone(attached.front());
    let entries = device.ring_entries();
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
    let traces = Traces::of_client();
    let disk = Disk::new(&args.disk, device, traces.of(&args.disk)).with_layer("attach");
    let clients = ClientLimits::default();
    let disk = disk.with_memory(clients.budgets(1).next(0));
    let pressure = Arc::new(Pressure::new(FLOOR_PAGES_PER_WORKER * backend.workers()));
    let service = Service::new(backend, Disks::new(vec![Arc::new(disk)]), pressure);
    let told = Told::start(&service, None, events::hang_after(None))?;
    // It has one disk, and offers it by NBD only.
    let limits = ExportLimits {
        offers: BackendOffers::default(),
        queues: 1,
        unallocated: None,
        clients,
        allow_remote: args.allow_remote,
    };
    let opener = Arc::new(opener);
    let servers = Exports::new(&service, &opener, &limits);
    for address in &nbd {
        servers.add_nbd(address)?;
    }
    servers.tell(|address| address.uri(&args.disk));
    let watch = daemon::listen_for_pressure(PressureSources::find(), service.pressure())?;
    let desk = Desk::new(service.pressure(), Some(&watch), base);
    let reached = Reached {
        feed: Arc::clone(traces.feed()),
        service: Arc::clone(&service),
        memory: desk,
        registry: None,
        reload: None,
    };
    let control = match &control {
        None => None,
        Some(path) => {
            let server = Server::start(opener.stream(path)?, &Methods::new(reached))?;
            log::line(format_args!("control on unix:{}", path.display()));
            Some(server)
        }
    };
    let slow = traces.start(args.slow)?;
    daemon::tell_sources(&watch);
    daemon::ready();
    daemon::wait_for_stop(&mut signals, &service, base, || {});
    servers.stop();
    drop((control, slow, watch, told));
    if attached.is_gone() {
        // The server is gone, not closing: nothing more can be flushed. Say why, rather than that.
        daemon::abandon(&service);
    } else {
        daemon::finish(&service)?;
    }
    attached.close().with_context(|| args.server.clone())
}
