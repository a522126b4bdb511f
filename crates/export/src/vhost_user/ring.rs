//! One ring of a session: what the front end told about it, and the queue at work if there is one.
//!
//! ```text
//!   told (entries, addresses, base, kick, enabled) ──start──▶ running ──detach──▶ ending ──ended──▶ told, with a new base
//!                                                                └──a rule broken──▶ broken, until its base is asked for
//! ```

use super::inflight::Inflight;
use super::memory::{GuestMemory, Regions};
use super::shares::Seat;
use super::source::{Shared, VhostQueueParts, VhostSource};
use super::virtqueue::{MAX_ENTRIES, Virtqueue};
use crate::kit::FrontEnd;
use pvblk_backend::Key;
use pvblk_block::Error;
use pvblk_protocol::vhost_user::VringAddr;
use pvblk_protocol::virtio as config;
use pvblk_protocol::virtio::Offer;
use pvblk_protocol::virtio::Place;
use pvblk_sys::PeerEvent;
use std::sync::Arc;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// The way in which the front end wakes us.
#[derive(Debug)]
pub(super) enum Kick {
    Event(PeerEvent),
    /// Not at all: we look.
    Poll,
}

enum Work {
    Idle,
    Running(Key),
    /// It may first take what a server before us left.
    Ending,
    /// A rule was broken; the ring isn't served again before it was asked for its base.
    Broken,
}

/// The parts of a session that a ring needs to start.
pub(super) struct Surroundings<'a> {
    pub disk: &'a str,
    pub name: &'a str,
    pub offer: &'a Offer,
    pub features: u64,
    pub regions: &'a Regions,
    pub seat: &'a Seat,
    pub inflight: Option<&'a Inflight>,
}

pub(super) struct Ring {
    index: u16,
    entries: Option<u16>,
    place: Option<VringAddr>,
    base: u16,
    kick: Option<Kick>,
    pub enabled: Option<bool>,
    err: Option<PeerEvent>,
    pub shared: Arc<Shared>,
    work: Work,
    /// Tells the end of one start from that of another.
    pub generation: u64,
}

impl Ring {
    pub fn new(index: u16) -> Ring {
        Ring {
            index,
            entries: None,
            place: None,
            base: 0,
            kick: None,
            enabled: None,
            err: None,
            shared: Arc::default(),
            work: Work::Idle,
            generation: 0,
        }
    }

    fn refuse(&self, why: impl std::fmt::Display) -> Error {
        Error::protocol(format!("ring {}: {why}", self.index))
    }

    /// True while a queue is at work or ending.
    pub fn is_active(&self) -> bool {
        matches!(self.work, Work::Running(_) | Work::Ending)
    }

    /// True while its queue is told to stop and hasn't.
    pub fn is_ending(&self) -> bool {
        matches!(self.work, Work::Ending)
    }

    /// Refuses, while the ring runs, a message that only a stopped ring can take.
    fn only_stopped(&self, what: &str) -> Result<(), Error> {
        match self.is_active() {
            true => Err(self.refuse(format!("its {what} can't change while it is at work"))),
            false => Ok(()),
        }
    }

    pub fn set_entries(&mut self, entries: u32) -> Result<(), Error> {
        self.only_stopped("size")?;
        if !entries.is_power_of_two() || entries > MAX_ENTRIES {
            return Err(self.refuse(format!(
                "{entries} entries; a ring has a power of two, at most {MAX_ENTRIES}"
            )));
        }
        self.entries = Some(entries as u16);
        Ok(())
    }

    pub fn set_place(&mut self, place: VringAddr) -> Result<(), Error> {
        if self.place == Some(place) {
            return Ok(());
        }
        self.only_stopped("address")?;
        let aligned = place.descriptor.is_multiple_of(16)
            && place.available.is_multiple_of(2)
            && place.used.is_multiple_of(4);
        if !aligned {
            return Err(self.refuse("its parts are not aligned"));
        }
        if place.flags != 0 {
            return Err(self.refuse("writes can't be logged"));
        }
        self.place = Some(place);
        Ok(())
    }

    pub fn set_base(&mut self, base: u32) -> Result<(), Error> {
        self.only_stopped("base")?;
        self.base = u16::try_from(base)
            .map_err(|_| self.refuse(format!("{base} is no index of a split ring")))?;
        Ok(())
    }

    /// Sets how we are woken; a new way for a ring at work is refused.
    pub fn set_kick(&mut self, kick: Kick) -> Result<(), Error> {
        self.only_stopped("kick")?;
        self.kick = Some(kick);
        Ok(())
    }

    pub fn set_err(&mut self, err: Option<PeerEvent>) {
        self.err = err;
    }

    /// Starts the ring if everything is known that it needs and its front end may use the disk; with its first ring a front end enters the disk.
    pub fn start(&mut self, around: &Surroundings<'_>, front: &mut FrontEnd) -> Result<(), Error> {
        if !matches!(self.work, Work::Idle) || around.regions.is_empty() {
            return Ok(());
        }
        let negotiated = around.features & pvblk_protocol::vhost_user::F_PROTOCOL_FEATURES != 0;
        let (Some(entries), Some(place), Some(kick)) = (self.entries, self.place, &self.kick)
        else {
            return Ok(());
        };
        // Without the protocol's features there is no SET_VRING_ENABLE: the kick enables too.
        if !self.enabled.unwrap_or(!negotiated) {
            return Ok(());
        }
        if !front.enter()? {
            return Ok(());
        }
        let memory = map(around.disk, around.regions, around.seat)?;
        let (table, available, used) = Place::lengths(entries);
        let part = |what: &str, at: u64, len: u64| {
            memory.user(at, len).ok_or_else(|| {
                self.refuse(format!(
                    "its {what} at {at:#x}, {len} bytes, is not in the memory"
                ))
            })
        };
        let place = Place {
            table: part("descriptor table", place.descriptor, table)?,
            available: part("available ring", place.available, available)?,
            used: part("used ring", place.used, used)?,
        };
        let kick = match kick {
            Kick::Event(event) => {
                let copy = event.try_clone();
                Some(copy.map_err(|e| Error::os("copying a descriptor", e))?)
            }
            Kick::Poll => None,
        };
        let inflight = match around.inflight {
            Some(inflight) => Some(inflight.queue(self.index, entries).ok_or_else(|| {
                self.refuse("the memory for requests in flight has no place for it")
            })?),
            None => None,
        };
        let queue = Virtqueue::new(
            place,
            entries,
            self.base,
            config::has(around.features, VIRTIO_RING_F_EVENT_IDX),
            config::has(around.features, VIRTIO_RING_F_INDIRECT_DESC),
        );
        self.shared.start();
        let source = VhostSource::new(VhostQueueParts {
            name: format!("{}, queue {}", around.name, self.index),
            queue,
            memory,
            shared: Arc::clone(&self.shared),
            kick,
            inflight,
            offered: around.offer.offered(around.features),
            id: config::id(around.disk),
        });
        self.generation += 1;
        let key = front.serve(self.index, self.generation, Box::new(source))?;
        self.work = Work::Running(key);
        Ok(())
    }

    /// Stops the ring when all its requests are answered, those included that a server before us took: the index at which it stopped says nothing of them.
    pub fn drain(&mut self, front: &FrontEnd) {
        if let Work::Running(key) = self.work {
            if !self.shared.stop_after_resubmission() {
                front.stop(key);
            }
            self.work = Work::Ending;
        }
    }

    /// Stops the ring and forgets what started it.
    pub fn reset(&mut self, front: &FrontEnd) {
        self.drain(front);
        (self.kick, self.enabled) = (None, None);
    }

    /// Its queue is gone; `broken` if by itself.
    pub fn ended(&mut self, broken: bool) {
        self.base = self.shared.index();
        self.work = if broken { Work::Broken } else { Work::Idle };
        if broken && let Some(err) = &self.err {
            err.notify();
        }
    }

    /// The base of a stopped ring, which then waits for another kick.
    pub fn take_base(&mut self) -> u16 {
        self.kick = None;
        self.work = Work::Idle;
        self.base
    }

    /// Gives a ring at work other memory.
    pub fn set_memory(&self, disk: &str, regions: &Regions, seat: &Seat) -> Result<(), Error> {
        if self.is_active() {
            self.shared.set_memory(map(disk, regions, seat)?);
        }
        Ok(())
    }
}

/// Maps the guest's memory, on the bill of its disk.
fn map(disk: &str, regions: &Regions, seat: &Seat) -> Result<GuestMemory, Error> {
    let owner = format!("disk {disk}: guest memory of a vhost-user front end");
    regions.map(seat, &owner)
}
