//! Duties of every server: readiness, signals, an orderly stop.

use crate::sandbox::{Link, State};
use crate::{bill, log};
use anyhow::{Context, Result};
use pvblk_backend::{DiskEnd, Pressure, PressureSources, PressureWatch, Service, StopTimes};
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::iterator::Signals;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Time that a stop waits for each disk. docs/guide/serving.md has a service unit whose `TimeoutStopSec` goes by the sum.
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
    tell(State::Ready);
}

/// The link by which a server in a sandbox tells its service manager.
static LINK: OnceLock<Arc<Link>> = OnceLock::new();

/// Has the parent of a server in a sandbox tell the service manager from now on.
pub fn tell_by(link: &Arc<Link>) {
    let _ = LINK.set(Arc::clone(link));
}

/// Tells the service manager; without NOTIFY_SOCKET nobody.
pub fn tell(state: State) {
    let own = match state {
        State::Ready => NotifyState::Ready,
        State::Stopping => NotifyState::Stopping,
        State::Watchdog => NotifyState::Watchdog,
    };
    match LINK.get() {
        Some(link) => link.tell(state),
        None => {
            if let Err(e) = sd_notify::notify(false, &[own]) {
                tracing::debug!("telling systemd: {e}");
            }
        }
    }
}

/// Runs until a signal says stop; `reload` is called for SIGHUP, and may not wait.
pub fn wait_for_stop(signals: &mut Signals, service: &Service, base: u64, reload: impl Fn()) {
    for signal in signals.forever() {
        match signal {
            SIGHUP => {
                service.refresh();
                reload();
            }
            SIGUSR1 => log::put(&bill::render(base)),
            _ => {
                tell(State::Stopping);
                tracing::info!("stopping");
                return;
            }
        }
    }
}

/// Runs until a signal says stop, where there are no disks.
pub fn wait_for_end(signals: &mut Signals) {
    let is_stop = |signal: &i32| matches!(*signal, SIGINT | SIGTERM);
    signals.forever().find(is_stop);
    tell(State::Stopping);
    tracing::info!("stopping");
}

/// Starts to listen for memory pressure.
pub fn listen_for_pressure(
    sources: PressureSources,
    pressure: &Arc<Pressure>,
) -> Result<PressureWatch> {
    Ok(sources.watch(Arc::clone(pressure))?)
}

/// Says who tells of memory pressure and who can't, once everything else has begun.
pub fn tell_sources(watch: &PressureWatch) {
    for source in watch.states() {
        let why = source.missing.as_deref().unwrap_or("listens to it");
        tracing::debug!("memory pressure: {}: {why}", source.name);
    }
    let here = watch
        .states()
        .iter()
        .filter(|s| s.missing.is_none())
        .count();
    log::line(format_args!(
        "memory pressure: {here} sources (`pvblk ctl memory` shows them)"
    ));
    if here == 0 {
        tracing::warn!("nothing here tells of memory pressure: only `pvblk ctl squeeze` does");
    }
}

/// Lets what is in flight complete and flushes all disks, each for itself. An error tells which disks it couldn't flush; the others are safe.
pub fn finish(service: &Arc<Service>) -> Result<()> {
    let ends = service.stop(STOP);
    let mut failed: Vec<String> = Vec::new();
    for DiskEnd { disk, result } in &ends {
        if let Err(e) = result {
            failed.push(format!("disk {disk}: {e}"));
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    abandon(service);
    let (lost, all) = (failed.len(), ends.len());
    Err(anyhow::anyhow!(
        "stopped, {lost} of {all} disks not in order: {}",
        failed.join("; ")
    ))
}

/// Keeps the service from being taken down in order: that would wait for the same device, maybe for ever.
pub fn abandon(service: &Arc<Service>) {
    std::mem::forget(Arc::clone(service));
}
