//! What every server of ours does: readiness, signals, an orderly stop.

use crate::hub::Hub;
use crate::shares::ClientLimits;
use crate::{bill, log};
use anyhow::{Context, Result};
use pvblk_backend::{DiskEnd, Pressure, Seldom, Sources, StopTimes, Watch, seldom};
use pvblk_export::nbd::{NbdConfig, NbdServer};
use pvblk_protocol::nbd::NbdAddr;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::iterator::Signals;
use std::sync::Arc;
use std::time::Duration;

/// How long a stop waits for each disk. docs/guide/serving.md has a service unit whose `TimeoutStopSec` goes by the sum.
pub const STOP: StopTimes = StopTimes {
    drain: Duration::from_secs(20),
    flush: Duration::from_secs(20),
};

/// Signals that are handled; to be made before threads are, so that none is missed.
/// Also lifts the limit of open descriptors, and lets nobody wait for standard error: the other things to be done before all else.
pub fn signals() -> Result<Signals> {
    pvblk_sys::limits::raise_open_files();
    // A write beyond the process's limit of a file's size is an error of that write, and no reason to end.
    signal_hook::flag::register(SIGXFSZ, Arc::default()).context("handling signals")?;
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1]).context("handling signals")?;
    log::detach().context("starting the log")?;
    Ok(signals)
}

/// Private memory of the process now, for the bill's first line.
pub fn base_memory() -> u64 {
    let rss = pvblk_sys::proc_status::memory(None).map_or(0, |m| m.rss_anon);
    rss.saturating_sub(pvblk_sys::alloc::live_bytes() as u64)
}

/// Tells that everything is up: a line on standard error, and systemd if it asked.
pub fn ready() {
    log::line(format_args!("pvblk: ready"));
    // Without NOTIFY_SOCKET this does nothing.
    if let Err(e) = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]) {
        tracing::warn!("telling systemd: {e}");
    }
}

/// Starts an NBD server on each address.
pub fn start_nbd(
    hub: &Arc<Hub>,
    addresses: &[NbdAddr],
    remote: bool,
    clients: ClientLimits,
) -> Result<Vec<NbdServer>> {
    let mut servers = Vec::new();
    let shares = clients.shares();
    for address in addresses {
        let deliver_hub = Arc::clone(hub);
        let deliver = move |export: &str, source: Box<dyn pvblk_backend::RequestSource>| {
            let Some(disk) = deliver_hub.export(export) else {
                return; // it was there at the handshake, and disks don't go
            };
            let who = source.describe();
            let told = who.clone();
            let broken = Seldom::of(disk.name(), "broken");
            let ended = move |end| match end {
                pvblk_backend::SourceEnd::Closed => tracing::debug!("{told}: closed"),
                pvblk_backend::SourceEnd::Broken(e) => seldom!(warn, broken, "{told}: {e}"),
            };
            // Connections of one client can't be told from those of several.
            let user = disk.users().enter("NBD");
            let attached = user.and_then(|user| deliver_hub.attach(&disk, &user, source, ended));
            if let Err(e) = attached {
                seldom!(error, Seldom::of(disk.name(), "attach"), "{who}: {e}");
            }
        };
        let exports: Arc<dyn pvblk_export::nbd::ExportTable> = hub.clone();
        let config = NbdConfig {
            allow_remote: remote,
            pressure: Arc::clone(hub.pressure()),
            shares: Arc::clone(&shares),
            ..NbdConfig::default()
        };
        let server = NbdServer::bind(address, config, exports, Arc::new(deliver))?;
        servers.push(server);
    }
    Ok(servers)
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

/// Runs until a signal says stop.
pub fn wait_for_stop(signals: &mut Signals, hub: &Hub, base: u64) {
    for signal in signals.forever() {
        match signal {
            SIGHUP => hub.refresh(),
            SIGUSR1 => log::put(bill::render(base).as_bytes()),
            _ => {
                let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Stopping]);
                tracing::info!("stopping");
                return;
            }
        }
    }
}

/// Starts to listen for memory pressure.
pub fn listen_for_pressure(pressure: &Arc<Pressure>) -> Result<Watch> {
    Ok(Sources::find().watch(Arc::clone(pressure))?)
}

/// Says who tells of memory pressure and who can't, once everything else has begun.
pub fn tell_sources(watch: &Watch) {
    for source in watch.states() {
        match &source.missing {
            None => log::line(format_args!("memory pressure: {}", source.name)),
            Some(why) => log::line(format_args!("memory pressure: not {}: {why}", source.name)),
        }
    }
    if watch.states().iter().all(|s| s.missing.is_some()) {
        tracing::warn!("nothing here tells of memory pressure: only `pvblk ctl squeeze` does");
    }
}

/// Lets what is in flight complete and flushes all disks, each for itself. An error tells which disks it couldn't flush; the others are safe.
pub fn finish(hub: &Arc<Hub>) -> Result<()> {
    let ends = hub.stop(STOP);
    let mut failed: Vec<String> = Vec::new();
    for DiskEnd { disk, result } in &ends {
        if let Err(e) = result {
            failed.push(format!("disk {disk}: {e}"));
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    abandon(hub);
    let (lost, all) = (failed.len(), ends.len());
    Err(anyhow::anyhow!(
        "stopped, {lost} of {all} disks not in order: {}",
        failed.join("; ")
    ))
}

/// Keeps the hub from being taken down in order: that would wait for the same device, maybe for ever.
pub fn abandon(hub: &Arc<Hub>) {
    std::mem::forget(Arc::clone(hub));
}
