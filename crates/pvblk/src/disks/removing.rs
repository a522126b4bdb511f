//! Disks that go.

use super::aside::{Deadline, NoAnswer, answer};
use super::{Refused, Registry, Removed, Stage, Why};
use pvblk_backend::events::{Event, Kind};
use pvblk_backend::{Disk, DiskEnd};
use pvblk_export::kit::UnixListen;
use pvblk_export::xen::StandingOrder;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time that the last flush of a disk that was removed may take before its device is closed without: as good as for ever.
const LAST_FLUSH: Duration = Duration::from_secs(24 * 3600);
/// Interval at which a removal looks whether everybody has let go of the device.
const LOOK: Duration = Duration::from_millis(2);

/// A removal that can't be undone any more.
#[derive(Clone, Copy)]
struct Going {
    /// Of its entry.
    number: u64,
    force: bool,
    deadline: Deadline,
}

impl Registry {
    /// Takes a disk away, and returns when its data is stable and its backing closed.
    ///
    /// Without `force` it is refused while the disk is used; a disk whose last flush fails stays as it is. With `force` its users lose it, and the name is free at once;
    /// the backing stays open and locked until its I/O has ended. After `patience` an error says what goes on.
    pub fn remove(
        self: &Arc<Registry>,
        name: &str,
        force: bool,
        patience: Duration,
    ) -> Result<Removed, Refused> {
        let deadline = Deadline::after(patience);
        let (disk, number, parsed) = {
            let mut state = self.state.lock();
            if !state.entries.contains_key(name) && self.is_kept(name) {
                drop(state);
                // No attempt to open it has begun, and it is wanted all the same.
                self.keep(name, None)?;
                return Ok(self.removed_unopened(name));
            }
            if let Some(number) = state.failed(name).map(|e| e.number) {
                drop(state);
                self.keep(name, None)?;
                self.forget(name, number);
                return Ok(self.removed_unopened(name));
            }
            let entry = state.serving(name)?;
            let Some(disk) = entry.disk.clone() else {
                return Err(Refused::no_disk(name));
            };
            let closed = disk.users().close(force);
            closed.map_err(|users| in_use(name, &users))?;
            entry.stage = Stage::Removing;
            entry.since = Instant::now();
            (disk, entry.number, entry.wanted.parse(name).ok())
        };
        self.changed.notify_all();
        if !force {
            self.flush_first(name, number, &disk, &deadline)?;
        }
        // All that can be refused is behind it, and nothing is lost yet.
        if let Err(refused) = self.keep(name, None) {
            disk.users().reopen();
            self.with_entry(name, number, |entry| entry.stage = Stage::Serving);
            return Err(refused);
        }
        if let Some(parsed) = parsed {
            self.unexport(&parsed.vhost_user, &parsed.xen_attach);
        }
        let going = Going {
            number,
            force,
            deadline,
        };
        self.finish(name, disk, going)
    }

    /// Tells that a disk isn't wanted any more which wasn't open.
    fn removed_unopened(&self, name: &str) -> Removed {
        let event = Event::new(Kind::DiskRemoved, "removed; it wasn't open").of(name);
        self.service.events().put(event);
        Removed::gone(name)
    }

    /// Flushes before anything is done that can't be undone.
    fn flush_first(
        self: &Arc<Registry>,
        name: &str,
        number: u64,
        disk: &Arc<Disk>,
        deadline: &Deadline,
    ) -> Result<(), Refused> {
        let flushed = self.service.flush(disk, deadline.left());
        if flushed.is_ok() {
            return Ok(());
        }
        let is_late = deadline.is_over();
        disk.users().reopen();
        self.with_entry(name, number, |entry| entry.stage = Stage::Serving);
        let why = flushed.err().map_or_else(String::new, |e| e.to_string());
        let text = match is_late {
            true => format!(
                "disk {name}: its flush takes longer than {} s: it is served as before; mend its medium, or use --force",
                deadline.secs()
            ),
            false => format!(
                "disk {name}: {why}: it is served as before; mend its medium, or use --force"
            ),
        };
        Err(Refused::new(
            if is_late { Why::Late } else { Why::Failed },
            text,
        ))
    }

    fn finish(
        self: &Arc<Registry>,
        name: &str,
        disk: Arc<Disk>,
        going: Going,
    ) -> Result<Removed, Refused> {
        let Going {
            number,
            force,
            deadline,
        } = going;
        let device = Arc::downgrade(disk.device());
        let (tell, told) = answer();
        let (registry, gone) = (Arc::clone(self), name.to_owned());
        let ended = move |end: DiskEnd| {
            registry.forget(&gone, number);
            registry.forget_counts(&gone);
            let text = match &end.result {
                Ok(()) => {
                    tracing::info!("disk {gone}: removed");
                    "removed".to_owned()
                }
                Err(e) => {
                    tracing::error!("disk {gone}: removed: {e}");
                    format!("removed, but {e}")
                }
            };
            let event = Event::new(Kind::DiskRemoved, text).of(&gone);
            registry.service.events().put(event);
            let _ = tell.send(end.result);
        };
        if let Err(e) = self.service.retire(&disk, LAST_FLUSH, ended) {
            return Err(Refused::new(Why::Stopping, e.to_string()));
        }
        drop(disk);
        if force {
            // Another disk may take the name now.
            self.forget(name, number);
        }
        let late = |what: &str| {
            let text = format!(
                "disk {name}: {what} longer than {} s: it goes on, see `pvblk disk list`",
                deadline.secs()
            );
            Refused::new(Why::Late, text)
        };
        match told.until(&deadline) {
            Ok(Ok(())) => {}
            Ok(Err(e)) => {
                let text = format!("disk {name} is removed, but {e}");
                return Err(Refused::new(Why::Failed, text));
            }
            Err(NoAnswer::Late) => {
                return Err(late("requests in flight, or its last flush, take"));
            }
            Err(NoAnswer::Never) => return Err(Refused::stopping()),
        }
        // Somebody may hold it for a moment: a client that negotiates, a command that asks.
        while device.strong_count() > 0 {
            if deadline.is_over() {
                return Err(late("its data is stable, but its backing stays open"));
            }
            std::thread::sleep(LOOK.min(deadline.left()));
        }
        Ok(Removed::gone(name))
    }

    /// A disk that wasn't announced to anybody is closed.
    pub(super) fn take_back(self: &Arc<Registry>, disk: &Arc<Disk>) {
        let name = disk.name().to_owned();
        let registry = Arc::clone(self);
        let ended = move |_| registry.forget_counts(&name);
        // A service that stops closes it.
        let _ = self.service.retire(disk, LAST_FLUSH, ended);
    }

    /// The counters of a disk that is gone, unless there is another of its name.
    fn forget_counts(&self, name: &str) {
        if self.service.disks().find(name).is_none() {
            self.service.pressure().forget(name);
        }
    }

    /// Ends exports of a disk that is being removed; they needn't be there.
    pub(super) fn unexport(&self, sockets: &[UnixListen], orders: &[StandingOrder]) {
        for listen in sockets {
            if let Err(e) = self.exports.remove_vhost(&listen.path, true) {
                tracing::debug!("{e}");
            }
        }
        for order in orders {
            if let Err(e) = self.exports.remove_order(order.clone()) {
                tracing::debug!("{e}");
            }
        }
    }
}

fn in_use(name: &str, users: &[(String, usize)]) -> Refused {
    const NAMED: usize = 4;
    let one = |(user, count): &(String, usize)| match count {
        1 => user.clone(),
        n => format!("{user} ({n} queues or connections)"),
    };
    let mut all: Vec<String> = users.iter().take(NAMED).map(one).collect();
    if users.len() > NAMED {
        all.push(format!("{} more", users.len() - NAMED));
    }
    let text = format!(
        "disk {name} is used by {}: disconnect them (`pvblk disk show {name}` lists them), or use --force",
        all.join(", ")
    );
    Refused::new(Why::InUse, text)
}
