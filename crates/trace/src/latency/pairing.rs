//! Pairs events with requests: by the request's identity where the event has it, as those of our hooks do; else by device and range of
//! sectors, because blktrace has no request numbers.

use super::hop::Marks;
use crate::{Device, Event};
use pvblk_block::Op;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// A request in flight.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    /// Its identity, if its events have it; `None` after a split.
    pub id: Option<u64>,
    pub op: Op,
    pub submitter: u32,
    pub sector: u64,
    /// First sector after it.
    pub end: u64,
    /// True if it was remapped to this device, which is then the beginning of its hops.
    pub remapped: bool,
    /// Device before the remap, if known.
    pub from: Option<Device>,
    /// Sector on that device, by the remap.
    pub from_sector: Option<u64>,
    pub marks: Marks,
}

/// Most requests with the same first sector, or in between, that are examined for one event: requests that never
/// complete in a broken capture must not make reading it slow.
const MOST_LOOKS: usize = 1024;

/// Key of a request in flight: its first sector, and a growing number.
pub(super) type Key = (u64, u64);

/// Requests in flight on a device.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    /// Requests with sectors.
    ranges: BTreeMap<Key, Pending>,
    /// Flushes without identity, oldest first.
    flushes: VecDeque<Pending>,
    /// Places of requests with identity.
    by_id: HashMap<u64, Place>,
    /// Number of those that have no sectors.
    without_sectors: usize,
    next: u64,
}

/// The place of a request with identity.
#[derive(Debug)]
enum Place {
    Range(Key),
    /// A flush, which has no sectors.
    Here(Box<Pending>),
}

impl InFlight {
    pub fn len(&self) -> usize {
        self.ranges.len() + self.flushes.len() + self.without_sectors
    }

    pub fn add(&mut self, pending: Pending) {
        let id = pending.id;
        if pending.sector == pending.end {
            match id {
                Some(id) => {
                    let place = Place::Here(Box::new(pending));
                    let before = self.by_id.insert(id, place);
                    if !matches!(before, Some(Place::Here(_))) {
                        self.without_sectors += 1;
                    }
                }
                None => self.flushes.push_back(pending),
            }
            return;
        }
        self.next += 1;
        let key = (pending.sector, self.next);
        self.ranges.insert(key, pending);
        if let Some(id) = id {
            let before = self.by_id.insert(id, Place::Range(key));
            self.without_sectors -= usize::from(matches!(before, Some(Place::Here(_))));
        }
    }

    /// The request of identity `id`.
    pub fn of_id(&mut self, id: u64) -> Option<&mut Pending> {
        match self.by_id.get_mut(&id)? {
            Place::Range(key) => self.ranges.get_mut(key),
            Place::Here(pending) => Some(pending),
        }
    }

    /// Takes the request of identity `id`.
    pub fn take_id(&mut self, id: u64) -> Option<Pending> {
        match self.by_id.remove(&id)? {
            Place::Range(key) => self.ranges.remove(&key),
            Place::Here(pending) => {
                self.without_sectors -= 1;
                Some(*pending)
            }
        }
    }

    /// Takes all requests.
    pub fn take_all(&mut self) -> impl Iterator<Item = Pending> + use<> {
        let ranges = std::mem::take(&mut self.ranges).into_values();
        let flushes = std::mem::take(&mut self.flushes);
        let here = std::mem::take(&mut self.by_id).into_values();
        self.without_sectors = 0;
        let here = here.filter_map(|place| match place {
            Place::Here(pending) => Some(*pending),
            Place::Range(_) => None,
        });
        ranges.chain(flushes).chain(here)
    }

    /// The oldest request that begins at the event's sector and that `fits`; one of the same length has priority.
    pub fn one(&mut self, event: &Event, fits: impl Fn(&Pending) -> bool) -> Option<&mut Pending> {
        let end = event.end();
        if end == event.sector {
            // Only the submitter distinguishes flushes, and the issuer isn't always the submitter.
            let fits = |p: &Pending| p.op == event.op && fits(p);
            let own = |p: &Pending| p.submitter == event.submitter && fits(p);
            let looked = || self.flushes.iter().take(MOST_LOOKS);
            let at = looked().position(own).or_else(|| looked().position(fits))?;
            return self.flushes.get_mut(at);
        }
        let key = self
            .exact(event, &fits)
            .or_else(|| self.first(event.sector, event.op, u64::MAX, &fits))?;
        self.ranges.get_mut(&key)
    }

    fn exact(&self, event: &Event, fits: &impl Fn(&Pending) -> bool) -> Option<Key> {
        let end = event.end();
        let same = |p: &Pending| p.end == end && fits(p);
        self.first(event.sector, event.op, end, &same)
    }

    /// The oldest request that begins at `sector`, ends by `end` and fits.
    fn first(
        &self,
        sector: u64,
        op: Op,
        end: u64,
        fits: &impl Fn(&Pending) -> bool,
    ) -> Option<Key> {
        self.ranges
            .range((sector, 0)..=(sector, u64::MAX))
            .take(MOST_LOOKS)
            .find(|(_, p)| p.op == op && p.end <= end && fits(p))
            .map(|(key, _)| *key)
    }

    /// The requests that make up the range of `event`: one of exactly this range if there is one, else adjacent ones
    /// inside it.
    pub fn covered(&self, event: &Event, fits: impl Fn(&Pending) -> bool, keys: &mut Vec<Key>) {
        keys.clear();
        if let Some(key) = self.exact(event, &fits) {
            keys.push(key);
            return;
        }
        let (mut at, end) = (event.sector, event.end());
        while at < end {
            let mut inside = self.ranges.range((at, 0)..(end, 0)).take(MOST_LOOKS);
            let found = inside.find(|(_, p)| p.op == event.op && p.end <= end && fits(p));
            let Some((key, pending)) = found else { break };
            keys.push(*key);
            at = pending.end;
        }
    }

    pub fn get_mut(&mut self, key: Key) -> Option<&mut Pending> {
        self.ranges.get_mut(&key)
    }

    pub fn take(&mut self, key: Key) -> Option<Pending> {
        let pending = self.ranges.remove(&key)?;
        if let Some(id) = pending.id {
            self.by_id.remove(&id);
        }
        Some(pending)
    }

    /// Takes the oldest flush that was issued: of this submitter, or of any, because the completing process isn't
    /// always the submitter; else the oldest that wasn't issued.
    pub fn take_flush(&mut self, op: Op, submitter: u32) -> Option<Pending> {
        let find = |own: bool, issued: bool| {
            self.flushes.iter().take(MOST_LOOKS).position(|p| {
                p.op == op
                    && (!own || p.submitter == submitter)
                    && (!issued || p.marks.issue.is_some())
            })
        };
        let at = find(true, true)
            .or_else(|| find(false, true))
            .or_else(|| find(true, false))
            .or_else(|| find(false, false))?;
        self.flushes.remove(at)
    }

    /// Splits the request that begins at the event's sector in two. Returns the second part, which the caller adds.
    pub fn split(&mut self, event: &Event, at: u64) -> Option<Pending> {
        let longer = |p: &Pending| p.end > at && at > p.sector;
        let key = self.first(event.sector, event.op, u64::MAX, &longer)?;
        let first = self.ranges.get_mut(&key)?;
        if let Some(id) = first.id.take() {
            self.by_id.remove(&id);
        }
        let second = Pending {
            sector: at,
            ..first.clone()
        };
        first.end = at;
        Some(second)
    }
}
