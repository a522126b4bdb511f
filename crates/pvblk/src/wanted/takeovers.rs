//! Takeovers: a spare that takes a member's place by itself is stored, as a replacement by a command is.
//!
//! A command stores the members that it leads to ([`members::ask`]). When a member fails, its spare takes over without one, and the volume that is kept would
//! go on naming the device that is gone. A thread of its own follows the events, asks the array, and stores the volume; nothing waits for it. A server that is killed
//! in between starts with the volume that was stored before, which names the spare, too, and stores the new one then.

use super::members;
use crate::disks::Registry;
use anyhow::{Context, Result};
use pvblk_backend::Service;
use pvblk_backend::events::{Event, Follower, Kind, Start};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Time after which an array is asked again: until its superblocks are on disk it names the old member, too.
const AGAIN: Duration = Duration::from_secs(2);
/// Longest rest of the thread.
const REST: Duration = Duration::from_hours(1);

/// Stores takeovers from now on, until the event log is closed; those that an earlier server didn't come to store, too.
pub fn watch(registry: &Arc<Registry>, service: &Arc<Service>) -> Result<()> {
    let follower = service.events().follow(Start::Next);
    let disks = service.disks().all();
    let now = Instant::now();
    let due = disks.iter().map(|d| (d.name().to_owned(), now)).collect();
    let mut watch = Watch {
        registry: Arc::downgrade(registry),
        service: Arc::downgrade(service),
        due,
    };
    let thread = std::thread::Builder::new().name("pvblk-members".into());
    thread
        .stack_size(512 << 10)
        .spawn(move || watch.run(follower))
        .context("starting a thread that stores members of arrays")?;
    Ok(())
}

struct Watch {
    registry: Weak<Registry>,
    service: Weak<Service>,
    /// Disks that are to be asked, and when.
    due: BTreeMap<String, Instant>,
}

impl Watch {
    fn run(&mut self, mut follower: Follower) {
        loop {
            let next = self.due.values().min();
            let rest = next.map_or(REST, |at| at.saturating_duration_since(Instant::now()));
            match follower.next(rest) {
                Some(event) => self.take(&event),
                None if follower.is_over() => return,
                None => {}
            }
            if !self.settle() {
                return;
            }
        }
    }

    fn take(&mut self, event: &Event) {
        let Some(service) = self.service.upgrade() else {
            return;
        };
        let now = Instant::now();
        match (event.kind, &event.disk) {
            (Kind::RebuildFinished, Some(disk)) => {
                self.due.insert(disk.clone(), now);
            }
            // There may have been takeovers among them.
            (Kind::EventsLost, _) => {
                let all = service.disks().all();
                self.due
                    .extend(all.iter().map(|d| (d.name().to_owned(), now)));
            }
            _ => {}
        }
    }

    /// Asks the arrays that are due; false if the server is gone.
    fn settle(&mut self) -> bool {
        let now = Instant::now();
        let due: Vec<String> = self
            .due
            .extract_if(.., |_, at| *at <= now)
            .map(|(name, _)| name)
            .collect();
        for name in due {
            let (Some(registry), Some(service)) = (self.registry.upgrade(), self.service.upgrade())
            else {
                return false;
            };
            let Some(disk) = service.disks().find(&name) else {
                continue;
            };
            match members::note(&registry, &disk) {
                Ok(false) => {}
                Ok(true) => {
                    self.due.insert(name, Instant::now() + AGAIN);
                }
                Err(e) => {
                    let why = pvblk_block::error_line(&*e);
                    tracing::warn!("disk {name}: its members are not noted: {why}");
                }
            }
        }
        true
    }
}
