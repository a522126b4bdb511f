//! Disks that come.

use super::aside::{Deadline, answer};
use super::{DiskShown, MOST_OPENING, Refused, Registry, Stage, State, Why};
use crate::wanted::{DiskWanted, ParsedDisk, members};
use parking_lot::MutexGuard;
use pvblk_backend::events::{Event, Kind};
use pvblk_backend::{Disk, ThrottleLimits};
use pvblk_block::{BlockDevice, Error, ErrorKind};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

impl Registry {
    /// Tries to open a disk again that is wanted and could not be opened.
    pub fn add_again(
        self: &Arc<Registry>,
        name: &str,
        patience: Duration,
    ) -> Result<DiskShown, Refused> {
        let wanted = {
            let state = self.state.lock();
            match state.entries.get(name) {
                Some(entry) if entry.stage == Stage::Failed => entry.wanted.clone(),
                Some(entry) => return Err(Refused::busy(name, entry)),
                None => {
                    let text = format!(
                        "there is no disk {name} to try again: add one by {name}=VOLUME, or serve one of the configuration that was removed by `pvblk ctl reload`"
                    );
                    return Err(Refused::new(Why::NoDisk, text));
                }
            }
        };
        self.add(name, &wanted, patience)
    }

    /// Opens a disk and serves it, with the exports that `wanted` names for it: all of it, or nothing. After `patience` an error says that it takes too
    /// long; then the disk is closed again when it is open, and its name is free from then on. A disk that is wanted and could not be opened keeps its name.
    pub fn add(
        self: &Arc<Registry>,
        name: &str,
        wanted: &DiskWanted,
        patience: Duration,
    ) -> Result<DiskShown, Refused> {
        let deadline = Deadline::after(patience);
        let parsed = wanted.parse(name).map_err(Refused::invalid)?;
        let number = {
            let mut state = self.state.lock();
            if state.opening >= MOST_OPENING {
                let text = format!(
                    "{MOST_OPENING} disks are being opened, the most there may be: their backings may hang, see `pvblk disk list`"
                );
                return Err(Refused::new(Why::Busy, text));
            }
            let number = state.reserve(name, wanted)?;
            state.opening += 1;
            number
        };
        let (tell, told) = answer();
        let opening = Opening {
            registry: Arc::clone(self),
            name: name.to_owned(),
            number,
            outcome: Err("no thread could be started to open it".into()),
        };
        let wanted = wanted.clone();
        let open = move || opening.run(&parsed, &wanted, &tell);
        // A closure that comes back is dropped, and with it the place.
        let spawned = pvblk_block::spawn("pvblk-open", Box::new(open)).is_ok();
        if !spawned {
            let text = format!("disk {name}: the system refuses a thread to open it");
            return Err(Refused::new(Why::Failed, text));
        }
        let outcome = match told.until(&deadline) {
            Ok(outcome) => outcome,
            // It may be open just now.
            Err(_) if self.give_up(name, number) => {
                told.now().unwrap_or_else(|| Err(late(name, &deadline)))
            }
            // Its thread has decided and is about to tell.
            Err(_) => told.at_last().unwrap_or_else(|| Err(late(name, &deadline))),
        };
        outcome?;
        self.show(name)
    }

    /// Waits no longer for a disk that is opened; false if it is open, or has failed, already.
    fn give_up(&self, name: &str, number: u64) -> bool {
        let mut given_up = false;
        self.with_entry(name, number, |entry| {
            given_up = entry.stage == Stage::Opening;
            if given_up {
                entry.stage = Stage::GivenUp;
            }
        });
        given_up
    }

    /// Serves a device that is open under a name that is taken for it. Errors free the name and close the device.
    fn install(
        &self,
        name: &str,
        number: u64,
        device: Arc<dyn BlockDevice>,
        wanted: &DiskWanted,
        limits: ThrottleLimits,
    ) -> Result<Arc<Disk>, Error> {
        let budget = self.budgets.next(self.service.disks().len());
        let disk = Disk::new(name, device, self.traces.of(name)).with_memory(budget);
        disk.throttle().set(limits);
        let disk = Arc::new(match wanted.exclusive {
            true => disk.exclusive(),
            false => disk,
        });
        self.service.add(Arc::clone(&disk))?;
        let ours = self.with_entry(name, number, |entry| entry.disk = Some(Arc::clone(&disk)));
        debug_assert!(ours, "a name that is taken stays");
        Ok(disk)
    }

    /// Serves a disk of the configuration, whose exports are started with all others.
    pub fn add_opened(
        &self,
        name: &str,
        device: Arc<dyn BlockDevice>,
        wanted: &DiskWanted,
    ) -> Result<(), Error> {
        let parsed = wanted.parse(name);
        let parsed = parsed.map_err(|e| Error::boxed(ErrorKind::Config, "", e.into()))?;
        let number = self.state.lock().reserve(name, wanted);
        let number = number.map_err(|refused| Error::config(refused.text))?;
        let installed = self.install(name, number, device, wanted, parsed.limits);
        match installed {
            Ok(_) => self.with_entry(name, number, |entry| entry.stage = Stage::Serving),
            Err(e) => {
                self.forget(name, number);
                return Err(e);
            }
        };
        Ok(())
    }

    /// Notes a disk that is wanted and could not be opened at the start, and why.
    pub fn add_failed(&self, name: &str, wanted: &DiskWanted, why: &str) -> Result<(), Refused> {
        let number = self.state.lock().reserve(name, wanted)?;
        self.with_entry(name, number, |entry| entry.fail(name, why));
        Ok(())
    }

    /// Notes that the disk of an entry could not be opened. One that isn't wanted, since nothing stored that it is, is forgotten.
    fn not_opened(&self, name: &str, number: u64, why: &str) {
        let wanted = self.kept().and_then(|state| state.disk(name));
        let Some(wanted) = wanted else {
            self.forget(name, number);
            return;
        };
        self.with_entry(name, number, |entry| {
            // The reason is that of the disk that is wanted, which a command may have tried with another volume.
            let earlier = entry.reason.take().filter(|_| entry.wanted != wanted);
            entry.wanted = wanted;
            entry.fail(name, earlier.as_deref().unwrap_or(why));
        });
    }

    /// Starts the exports of one disk; an error takes back those that were started.
    pub(super) fn export(&self, name: &str, parsed: &ParsedDisk) -> Result<(), Error> {
        for (done, listen) in parsed.vhost_user.iter().enumerate() {
            if let Err(e) = self.exports.add_vhost(name, listen) {
                self.unexport(&parsed.vhost_user[..done], &[]);
                return Err(e);
            }
        }
        for (done, order) in parsed.xen_attach.iter().enumerate() {
            if let Err(e) = self.exports.add_order(order.clone()) {
                self.unexport(&parsed.vhost_user, &parsed.xen_attach[..done]);
                return Err(e);
            }
        }
        Ok(())
    }
}

fn late(name: &str, deadline: &Deadline) -> Refused {
    let text = format!(
        "disk {name}: opening it takes longer than {} s: it is given up, and the name is free when its medium answers; see `pvblk disk list`",
        deadline.secs()
    );
    Refused::new(Why::Late, text)
}

fn nobody_waits() -> Refused {
    let text = "its medium answered after the deadline of the command that opened it";
    Refused::new(Why::Late, text)
}

/// A thread that opens a disk. Dropping it gives its place back.
struct Opening {
    registry: Arc<Registry>,
    name: String,
    number: u64,
    /// `Ok`: the disk is served; else why not.
    outcome: Result<(), String>,
}

impl Opening {
    fn run(
        mut self,
        parsed: &ParsedDisk,
        wanted: &DiskWanted,
        tell: &SyncSender<Result<(), Refused>>,
    ) {
        self.outcome = Err("opening it panicked".into());
        let result = self.open(parsed, wanted);
        self.outcome = result.as_ref().map_err(|e| e.text.clone()).copied();
        if let Err(e) = &result {
            tracing::debug!("disk {}: not added: {e}", self.name);
        }
        // The name is free, or the disk noted as failed, when its asker is told.
        drop(self);
        let _ = tell.send(result);
    }

    fn open(&self, parsed: &ParsedDisk, wanted: &DiskWanted) -> Result<(), Refused> {
        let (registry, name) = (&self.registry, &self.name);
        let why = |e: Error| Refused::new(Why::Failed, format!("disk {name}: {e}"));
        let state = registry.kept().map(|s| &**s);
        let device = members::open(&registry.opener, state, name, &parsed.spec);
        let device = device.map_err(why)?;
        self.check_wanted()?;
        let description = device.describe();
        let mib = device.capacity_sectors() / 2048;
        // Before anybody can find it.
        let before = registry.keep(name, Some(wanted.clone()))?;
        let served = self.serve(device, parsed, wanted);
        match &served {
            Ok(()) => {
                tracing::info!("disk {name}: added: {description}, {mib} MiB");
                let text = format!("added: {description}, {mib} MiB");
                let event = Event::new(Kind::DiskAdded, text).of(name);
                registry.service.events().put(event);
            }
            Err(_) => registry.take_back_kept(name, before),
        }
        served
    }

    fn serve(
        &self,
        device: Arc<dyn BlockDevice>,
        parsed: &ParsedDisk,
        wanted: &DiskWanted,
    ) -> Result<(), Refused> {
        let (registry, name) = (&self.registry, &self.name);
        let why = |e: Error| Refused::new(Why::Failed, format!("disk {name}: {e}"));
        let disk = registry.install(name, self.number, device, wanted, parsed.limits);
        let disk = disk.map_err(why)?;
        let exported = registry.export(name, parsed).map_err(why);
        let served = exported.and_then(|()| {
            let state = registry.state.lock();
            self.begin(state).inspect_err(|_| {
                registry.unexport(&parsed.vhost_user, &parsed.xen_attach);
            })
        });
        if served.is_err() {
            registry.take_back(&disk);
        }
        served
    }

    /// Errors if nobody waits for the disk any more.
    fn check_wanted(&self) -> Result<(), Refused> {
        let state = self.registry.state.lock();
        let entry = state.entries.get(&self.name);
        match entry.map(|e| e.stage) {
            Some(Stage::Opening) if !state.stopping => Ok(()),
            Some(Stage::Opening) => Err(Refused::stopping()),
            _ => Err(nobody_waits()),
        }
    }

    fn begin(&self, mut state: MutexGuard<'_, State>) -> Result<(), Refused> {
        let stopping = state.stopping;
        match state.entries.get_mut(&self.name) {
            Some(entry) if entry.stage == Stage::Opening && !stopping => {
                entry.stage = Stage::Serving;
                Ok(())
            }
            _ => Err(nobody_waits()),
        }
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.registry.state.lock().opening -= 1;
        if let Err(why) = &self.outcome {
            self.registry.not_opened(&self.name, self.number, why);
        }
    }
}
