//! [`Registry`]: the disks of a running server, which come and go one by one. Decision 26.
//!
//! ```text
//!  add ──▶ opening ──opened──▶ serving ──remove──▶ removing ──▶ gone
//!             │                   ▲                    │
//!             │ not opened        └── its flush failed ┘
//!             ▼
//!       gone, or failed if it is wanted ──add──▶ opening
//! ```
//!
//! The control socket and the configuration that is read again call the same functions. Each of them waits for one disk's backing at most until its deadline; slow
//! calls run on threads of their own, so that none waits for another disk's.

mod adding;
mod aside;
mod exporting;
mod kept;
mod refused;
mod removing;
mod shown;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod xen_tests;

use crate::exports::Exports;
use crate::opener::Opener;
use crate::shares::DiskBudgets;
use crate::traces::Traces;
use crate::wanted::{DiskWanted, WantedState};
pub use exporting::{Export, ExportShown};
pub use kept::SharedRegistry;
use parking_lot::{Condvar, Mutex};
use pvblk_backend::events::{Event, Kind};
use pvblk_backend::{Disk, Service};
pub use refused::{Refused, Why};
pub use shown::{DiskPage, DiskShown, Removed};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Most disks of a server, those that come and go included.
pub const MOST_DISKS: usize = 65_536;
/// Most disks that are opened side by side; those whose backing hangs are among them.
const MOST_OPENING: usize = 256;

/// The disks of a server: what is wanted of each, and how far it is.
pub struct Registry {
    service: Arc<Service>,
    opener: Arc<Opener>,
    exports: Arc<Exports>,
    traces: Arc<Traces>,
    budgets: DiskBudgets,
    state: Mutex<State>,
    /// Signalled when an entry has changed.
    changed: Condvar,
    /// Where changes are stored before they are answered.
    kept: OnceLock<Arc<WantedState>>,
    /// Held while a disk's settings or exports change: they are read, stored and then noted.
    changing: Mutex<()>,
}

#[derive(Default)]
struct State {
    entries: BTreeMap<String, Entry>,
    /// Threads that open.
    opening: usize,
    /// Number of the next entry: a name may have another disk later.
    next: u64,
    stopping: bool,
}

/// A name that is taken.
struct Entry {
    number: u64,
    stage: Stage,
    wanted: DiskWanted,
    /// Once it is open.
    disk: Option<Arc<Disk>>,
    /// Why it could not be opened the last time, if it couldn't.
    reason: Option<String>,
    since: Instant,
}

/// The stage that a disk has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Opening,
    /// Opening, but nobody waits for it any more: it is closed when it is open.
    GivenUp,
    Serving,
    Removing,
    /// It is wanted and could not be opened; a command or a reload tries again.
    Failed,
}

/// A change by `set`.
#[derive(Clone, Debug, Default)]
pub struct DiskChange {
    pub exclusive: Option<bool>,
    /// The text of a limit; empty: none.
    pub limit: Option<String>,
}

impl Registry {
    pub fn new(
        service: &Arc<Service>,
        opener: &Arc<Opener>,
        exports: &Arc<Exports>,
        traces: &Arc<Traces>,
        budgets: DiskBudgets,
    ) -> Arc<Registry> {
        Arc::new(Registry {
            service: Arc::clone(service),
            opener: Arc::clone(opener),
            exports: Arc::clone(exports),
            traces: Arc::clone(traces),
            budgets,
            state: Mutex::default(),
            changed: Condvar::new(),
            kept: OnceLock::new(),
            changing: Mutex::default(),
        })
    }

    /// Changes a disk while it is used. Waits for the medium of the state.
    pub fn set(&self, name: &str, change: &DiskChange) -> Result<DiskShown, Refused> {
        let _one = self.changing.lock();
        let (number, disk, mut wanted) = {
            let mut state = self.state.lock();
            let entry = state.serving(name)?;
            let Some(disk) = entry.disk.clone() else {
                return Err(Refused::no_disk(name));
            };
            (entry.number, disk, entry.wanted.clone())
        };
        if let Some(limit) = &change.limit {
            wanted.limit = Some(limit.clone()).filter(|l| !l.is_empty());
        }
        wanted.exclusive = change.exclusive.unwrap_or(wanted.exclusive);
        let parsed = wanted.parse(name).map_err(Refused::invalid)?;
        let (exclusive, limit) = (wanted.exclusive, wanted.limit);
        self.keep_settings(name, exclusive, limit.as_deref())?;
        let noted = self.with_entry(name, number, |entry| {
            entry.wanted.exclusive = exclusive;
            entry.wanted.limit = limit;
        });
        if !noted {
            return Err(Refused::no_disk(name));
        }
        disk.throttle().set(parsed.limits);
        disk.users().set_exclusive(exclusive);
        let shown = self.show(name)?;
        let limit = shown.limit.as_deref().unwrap_or("none");
        let text = format!("exclusive: {}, limit: {limit}", shown.exclusive);
        let event = Event::new(Kind::DiskChanged, text).of(name);
        self.service.events().put(event);
        Ok(shown)
    }

    /// Adds and removes nothing any more: the server stops.
    pub fn stop(&self) {
        self.state.lock().stopping = true;
        self.changed.notify_all();
    }

    /// Changes the entry with this number, if it is still there.
    fn with_entry(&self, name: &str, number: u64, change: impl FnOnce(&mut Entry)) -> bool {
        let mut state = self.state.lock();
        let found = state.entries.get_mut(name).filter(|e| e.number == number);
        let is_there = found.is_some();
        if let Some(entry) = found {
            change(entry);
        }
        drop(state);
        self.changed.notify_all();
        is_there
    }

    fn forget(&self, name: &str, number: u64) {
        let mut state = self.state.lock();
        if state.entries.get(name).is_some_and(|e| e.number == number) {
            state.entries.remove(name);
        }
        drop(state);
        self.changed.notify_all();
    }
}

impl Entry {
    /// Its disk could not be opened.
    fn fail(&mut self, name: &str, why: &str) {
        let why = why.strip_prefix(&format!("disk {name}: ")).unwrap_or(why);
        self.stage = Stage::Failed;
        self.reason = Some(why.to_owned());
        self.disk = None;
        self.since = Instant::now();
    }
}

impl State {
    /// The entry of a disk that can be used.
    fn serving(&mut self, name: &str) -> Result<&mut Entry, Refused> {
        if self.stopping {
            return Err(Refused::stopping());
        }
        match self.entries.get_mut(name) {
            None => Err(Refused::no_disk(name)),
            Some(entry) if entry.stage == Stage::Serving => Ok(entry),
            Some(entry) => Err(Refused::busy(name, entry)),
        }
    }

    /// The entry of a disk that is wanted and could not be opened.
    fn failed(&self, name: &str) -> Option<&Entry> {
        let entry = self.entries.get(name);
        entry.filter(|e| e.stage == Stage::Failed)
    }

    /// Takes a name.
    fn reserve(&mut self, name: &str, wanted: &DiskWanted) -> Result<u64, Refused> {
        if self.stopping {
            return Err(Refused::stopping());
        }
        let failed = self.failed(name);
        match self.entries.get(name) {
            Some(entry) if failed.is_none() => return Err(Refused::busy(name, entry)),
            _ => {}
        }
        let reason = failed.and_then(|e| e.reason.clone());
        if failed.is_none() && self.entries.len() >= MOST_DISKS {
            let text = format!("{MOST_DISKS} disks are served, the most there may be: remove some");
            return Err(Refused::new(Why::Busy, text));
        }
        let number = self.next;
        self.next += 1;
        let entry = Entry {
            number,
            stage: Stage::Opening,
            wanted: wanted.clone(),
            disk: None,
            reason,
            since: Instant::now(),
        };
        self.entries.insert(name.to_owned(), entry);
        Ok(number)
    }
}
