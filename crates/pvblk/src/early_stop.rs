//! A stop before the disks are open, which may wait for their media for ever.

use crate::log;
use anyhow::{Context, Result};
use parking_lot::{Condvar, Mutex};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use std::sync::Arc;
use std::time::Duration;

/// Time that a stop waits for a disk that is being opened. Nobody has used it, so nothing has to be flushed.
const PATIENCE: Duration = Duration::from_secs(5);

/// Heeds a signal to stop while disks are opened, until it is dropped. `daemon::wait_for_stop` hears the same signal afterwards.
pub struct EarlyStop {
    shared: Arc<Shared>,
    handle: Handle,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Default)]
struct State {
    /// The disk that is being opened.
    disk: String,
    stops: bool,
    over: bool,
}

impl EarlyStop {
    pub fn start() -> Result<EarlyStop> {
        let mut signals = Signals::new([SIGTERM, SIGINT]).context("handling signals")?;
        let (shared, handle) = (Arc::new(Shared::default()), signals.handle());
        let mine = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("pvblk-signal".into());
        let wait = move || {
            if signals.forever().next().is_some() {
                mine.stop();
            }
        };
        thread.spawn(wait).context("starting a thread")?;
        Ok(EarlyStop { shared, handle })
    }

    /// This disk is opened next.
    pub fn next(&self, disk: &str) {
        disk.clone_into(&mut self.shared.state.lock().disk);
    }

    /// The server is to stop, so no further disk is opened.
    pub fn is_due(&self) -> bool {
        self.shared.state.lock().stops
    }
}

impl Shared {
    /// Ends the process unless the disks are open in time.
    fn stop(&self) {
        let mut state = self.state.lock();
        state.stops = true;
        tracing::info!("stopping; disk {} is being opened", state.disk);
        let wait = self
            .over
            .wait_while_for(&mut state, |state| !state.over, PATIENCE);
        if wait.timed_out() {
            log::failure(format_args!(
                "pvblk: stopped while disk {} was being opened, which took too long",
                state.disk
            ));
            // Drops nothing: that could wait for the same disk.
            drop(log::LastLines);
            pvblk_sys::librbd::before_exit();
            std::process::exit(1);
        }
    }
}

impl Drop for EarlyStop {
    fn drop(&mut self) {
        self.shared.state.lock().over = true;
        self.shared.over.notify_all();
        self.handle.close();
    }
}
