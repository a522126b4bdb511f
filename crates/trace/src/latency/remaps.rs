//! Remaps (A) whose request hasn't been queued (Q) yet.

use super::hop::Mark;
use crate::{Device, Event};
use pvblk_block::Op;
use std::collections::{HashMap, VecDeque};

/// A remap: its moment, its submitter, the request, and the device before.
pub(super) struct Remapped {
    pub mark: Mark,
    pub submitter: u32,
    pub op: Op,
    pub bytes: u32,
    pub from: Option<Device>,
    /// Sector on that device, by the remap.
    pub from_sector: Option<u64>,
}

/// Most remaps kept for one sector: in a broken capture some are never followed by a Q.
const MOST_AT_ONE_SECTOR: usize = 1024;

/// The remaps of one device, by sector, oldest first. Several requests can begin at one sector: all flushes are at
/// sector 0, and a batch is remapped as a whole before it is queued.
#[derive(Default)]
pub(super) struct Remaps {
    by_sector: HashMap<u64, VecDeque<Remapped>>,
    len: usize,
}

impl Remaps {
    pub fn len(&self) -> usize {
        self.len
    }

    /// Adds a remap; returns the oldest at this sector if there are too many.
    pub fn add(&mut self, sector: u64, remapped: Remapped) -> Option<Remapped> {
        let here = self.by_sector.entry(sector).or_default();
        here.push_back(remapped);
        if here.len() > MOST_AT_ONE_SECTOR {
            return here.pop_front();
        }
        self.len += 1;
        None
    }

    /// Takes all remaps.
    pub fn take_all(&mut self) -> impl Iterator<Item = Remapped> + use<> {
        self.len = 0;
        std::mem::take(&mut self.by_sector).into_values().flatten()
    }

    /// Takes the remap of the request that `event` queues: the oldest of this submitter, else the oldest of any.
    pub fn take(&mut self, event: &Event) -> Option<Remapped> {
        let fits = |r: &Remapped| r.op == event.op && r.bytes == event.bytes;
        let own = |r: &Remapped| r.submitter == event.submitter && fits(r);
        self.remove(event.sector, own)
            .or_else(|| self.remove(event.sector, fits))
    }

    /// Takes the oldest remap to `sector` that `fits`.
    pub fn remove(&mut self, sector: u64, fits: impl Fn(&Remapped) -> bool) -> Option<Remapped> {
        let here = self.by_sector.get_mut(&sector)?;
        let at = here.iter().position(fits)?;
        let found = here.remove(at);
        if here.is_empty() {
            self.by_sector.remove(&sector);
        }
        self.len -= 1;
        found
    }
}
