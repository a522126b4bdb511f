//! The stripe queue (seed 004): a queue's writes wait here, without places or pages, until their stripe is whole or nothing more is to be expected.
//!
//! ```text
//!           part                  whole                 its row may go
//!  (none) ────────▶ Delayed ───────────────▶ Whole ────────────────────▶ Goes
//!                      │  none of this queue's stripes reads, and its row may go       │ a place, and few enough are under way
//!                      └─────────────────────────────────────────────▶ Goes            ▼
//!                                                                     under way, until the last part has ended
//! ```
//!
//! A row may go unless a stream is at work in it: more will come for its stripes soon. Each queue has a stripe queue of its own, so writes of
//! two queues to one stripe meet at its word only.
//!
//! Members that have arms are slow if reads and writes alternate. So where they have, writes of the direct path wait here, too, but for no
//! stream; and none of *any* queue's stripes may read: `arms.rs`.

use super::arms::Arms;
use super::common::Common;
use super::plan::sectors_from;
use super::queue::{Mail, QueueCore};
use super::record::{Part, in_block};
use super::run::{Next, Of};
use crate::core::streams::Streams;
use crate::head_pages::bits;
use crate::words::{OwnPlaces, Owner};
use crate::{Geometry, STRIPE_SECTORS};
use slab::Slab;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

/// Stripes that ended after which a write waits no longer, whatever else there is.
const PATIENCE: u64 = 2048;
/// Memory of stripes that is kept for later ones, in stripes.
const SPARE: usize = 64;
/// Stripes that may wait, for each that may have pages: the seed's `STRIPE_QUEUE_SIZE`.
const WAITING_PER_SET: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Delayed,
    Whole,
    Goes,
}

/// Spreads stripe numbers. Nobody gains by making them collide: a queue gathers a bounded number of them.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.write_u64(u64::from(*b)));
    }
    fn write_u64(&mut self, n: u64) {
        // Fibonacci hashing; the upper bits are the good ones, and the map looks at both ends.
        self.0 = (self.0 ^ n)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(32);
    }
}

/// The members and settings that decide when a write goes.
struct Rules<'a> {
    geometry: &'a Geometry,
    /// Stripes that may have pages.
    sets: usize,
    /// Parts that may arrive at words now; and those that always may, unless as many have.
    places: usize,
    kept: usize,
    /// A stream lets its row wait.
    streams: bool,
    arms: Option<(&'a Arms, Owner)>,
}

/// Writes of a stripe that wait.
struct Waits {
    stripe: u64,
    parts: Vec<Part>,
    /// Sectors that they write, as a mask for each data block.
    covered: Vec<u8>,
    place: Place,
    /// A write has FUA.
    hurries: bool,
    /// Its number among those that began to wait.
    number: u64,
    /// Stripes that had ended when it began to wait.
    since: u64,
}

impl Waits {
    fn is_whole(&self) -> bool {
        self.covered.iter().all(|sectors| *sectors == u8::MAX)
    }
}

/// Parts of a stripe, and the sectors that they cover.
type Memory = (Vec<Part>, Vec<u8>);

/// A stripe whose parts were sent to its word.
struct UnderWay {
    parts: usize,
    reads: bool,
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Gather {
    all: Slab<Waits>,
    by_stripe: HashMap<u64, usize, BuildHasherDefault<Spread>>,
    /// By their numbers.
    delayed: BTreeMap<u64, usize>,
    whole: BTreeMap<u64, usize>,
    /// Those that go: first those that are whole.
    whole_go: VecDeque<usize>,
    read_go: VecDeque<usize>,
    /// Parts of a stripe that are on their way to its word, and its number under way.
    arriving: VecDeque<Part>,
    under_way: Slab<UnderWay>,
    /// Parts of stripes under way that have arrived at their words.
    at_words: usize,
    /// Stripes under way that read.
    reading: usize,
    /// As many are under way as there may be; until a quarter less are, none goes, so that neighbours go together.
    is_full: bool,
    /// Stripes that ended.
    ended: u64,
    begun: u64,
    /// A [`Mail::MayRead`] will come.
    awaits_arms: bool,
    /// Something has changed since the last look at those that wait.
    changed: bool,
    pub streams: Streams,
    /// The last stripe that went to read.
    read_last: u64,
    /// Memory to be used again.
    spare: Vec<Memory>,
}

impl Gather {
    pub fn is_empty(&self) -> bool {
        self.all.is_empty() && self.arriving.is_empty()
    }

    /// Stripes that wait.
    pub fn waiting(&self) -> usize {
        self.all.len()
    }

    /// True if a part of the stripe may be added: its stripe waits already, or there is room for one more. If there is none, the writes that
    /// have waited longest go.
    fn has_room(&mut self, stripe: u64, rules: &Rules<'_>) -> bool {
        if self.by_stripe.contains_key(&stripe) || self.all.len() < rules.sets * WAITING_PER_SET {
            return true;
        }
        if self.whole_go.is_empty() && self.read_go.is_empty() {
            self.oldest_go(rules);
        }
        false
    }

    fn add(&mut self, part: Part, geometry: &Geometry) {
        let Some(sectors) = part.sectors().cloned() else {
            return;
        };
        self.changed = true;
        let stripe = part.stripe;
        let key = match self.by_stripe.get(&stripe) {
            Some(key) => *key,
            None => self.begin_to_wait(stripe, geometry.data_members()),
        };
        let waits = &mut self.all[key];
        let is_new = waits.parts.is_empty();
        for index in bits(geometry.stripe_blocks(stripe, &sectors)) {
            let sectors = in_block(geometry, stripe, index, &sectors);
            let count = sectors.end - sectors.start;
            waits.covered[index] |= sectors_from(sectors.start % STRIPE_SECTORS, count);
        }
        waits.hurries |= part.has_fua();
        waits.parts.push(part);
        if waits.place == Place::Delayed && waits.is_whole() {
            waits.place = Place::Whole;
            waits.since = self.ended;
            self.whole.insert(waits.number, key);
            if !is_new {
                self.delayed.remove(&waits.number);
            }
        } else if is_new {
            self.delayed.insert(waits.number, key);
        }
    }

    /// Makes an entry for a stripe. The caller puts it into one of the lists.
    fn begin_to_wait(&mut self, stripe: u64, blocks: usize) -> usize {
        let (parts, mut covered) = self.spare.pop().unwrap_or_default();
        covered.clear();
        covered.resize(blocks, 0);
        let number = self.begun;
        self.begun += 1;
        let key = self.all.insert(Waits {
            stripe,
            parts,
            covered,
            place: Place::Delayed,
            hurries: false,
            number,
            since: self.ended,
        });
        self.by_stripe.insert(stripe, key);
        key
    }

    fn is_old(&self, key: usize) -> bool {
        self.ended - self.all[key].since > PATIENCE
    }

    fn may_go(&self, key: usize, rows: &[u64], geometry: &Geometry) -> bool {
        let waits = &self.all[key];
        // A write with FUA is one that somebody waits for.
        let hurries = waits.hurries || self.is_old(key);
        hurries || !rows.contains(&geometry.stripe_row(waits.stripe))
    }

    /// Looks which of those that wait may go.
    fn look(&mut self, rules: &Rules<'_>) {
        self.changed = false;
        let geometry = rules.geometry;
        let rows = match rules.streams {
            true => self.streams.rows(geometry.row_sectors()),
            false => Vec::new(),
        };
        let going = |gather: &Gather, of: &BTreeMap<u64, usize>| -> Vec<usize> {
            let keys = of.values().copied();
            keys.filter(|key| gather.may_go(*key, &rows, geometry))
                .collect()
        };
        let whole = going(self, &self.whole);
        self.go(whole, rules);
        if self.delayed.is_empty() {
            return;
        }
        let may_read = match rules.arms {
            Some((arms, queue)) => {
                let may_read = arms.may_read(queue, self.delayed.len());
                self.awaits_arms = !may_read;
                may_read
            }
            None => self.reading == 0 && self.read_go.is_empty(),
        };
        let is_old = |key: &usize| self.is_old(*key);
        if may_read || self.delayed.values().next().is_some_and(is_old) {
            let mut delayed = going(self, &self.delayed);
            delayed.retain(|key| may_read || is_old(key));
            // Members like it in order, and on from where the last one was.
            let from = self.read_last;
            delayed.sort_unstable_by_key(|key| {
                let stripe = self.all[*key].stripe;
                (stripe < from, stripe)
            });
            self.go(delayed, rules);
        }
    }

    fn go(&mut self, keys: Vec<usize>, rules: &Rules<'_>) {
        for key in keys {
            let waits = &mut self.all[key];
            match std::mem::replace(&mut waits.place, Place::Goes) {
                Place::Whole => {
                    self.whole.remove(&waits.number);
                    self.whole_go.push_back(key);
                }
                Place::Delayed => {
                    self.delayed.remove(&waits.number);
                    self.read_go.push_back(key);
                    if let Some((arms, _)) = rules.arms {
                        arms.begin();
                    }
                }
                Place::Goes => debug_assert!(false, "a stripe goes twice"),
            }
        }
    }

    /// True if writes wait for more to come, while none goes or is under way.
    pub fn waits_in_vain(&self) -> bool {
        let waits = !self.delayed.is_empty() || !self.whole.is_empty();
        let goes = !self.whole_go.is_empty() || !self.read_go.is_empty();
        let is_moving = goes || !self.arriving.is_empty() || !self.under_way.is_empty();
        waits && !is_moving && !self.awaits_arms
    }

    /// Nothing more is to be expected: all whole stripes go, or else the row that has waited longest.
    fn oldest_go(&mut self, rules: &Rules<'_>) {
        if !self.whole.is_empty() {
            let whole = self.whole.values().copied().collect();
            return self.go(whole, rules);
        }
        let Some(first) = self.delayed.values().next() else {
            return;
        };
        let row = |key: usize| rules.geometry.stripe_row(self.all[key].stripe);
        let oldest = row(*first);
        let keys = self.delayed.values().copied();
        self.go(keys.filter(|key| row(*key) == oldest).collect(), rules);
    }

    /// The next part that goes to its word.
    fn next(&mut self, rules: &Rules<'_>) -> Option<Part> {
        if self.arriving.is_empty() {
            if self.changed {
                self.look(rules);
            }
            self.next_stripe(rules)?;
        }
        let part = self.arriving.pop_front()?;
        self.at_words += 1;
        Some(part)
    }

    /// Number of stripes that may go now.
    fn room(&mut self, sets: usize) -> usize {
        let most = if self.is_full { sets - sets / 4 } else { sets };
        self.is_full = self.under_way.len() >= most;
        match self.is_full {
            true => 0,
            false => sets - self.under_way.len(),
        }
    }

    /// True if a whole stripe goes next.
    fn whole_goes(&mut self, rules: &Rules<'_>) -> bool {
        if self.arriving.is_empty() && self.changed {
            self.look(rules);
        }
        self.arriving.is_empty() && !self.whole_go.is_empty()
    }

    /// Whole stripes that go next, which are neighbours of one row and of which the same writes have the same blocks, whole; and these writes.
    /// `None`: the next stripe isn't such a one, or none goes.
    fn alike(&mut self, rules: &Rules<'_>, most: usize) -> Option<(Range<u64>, Vec<Of>)> {
        let most = self.room(rules.sets).min(most);
        let geometry = rules.geometry;
        let first = &self.all[*self.whole_go.front()?];
        let of: Option<Vec<Of>> = first
            .parts
            .iter()
            .map(|part| part.whole(geometry))
            .collect();
        let of = of?;
        let sum: u32 = of.iter().map(|of| of.blocks.count_ones()).sum();
        if sum as usize != geometry.data_members() {
            // Two writes have the same block.
            return None;
        }
        let row = geometry.stripe_row(first.stripe);
        let goes = self.whole_go.iter().take(most).map(|key| &self.all[*key]);
        let alike = goes.zip(first.stripe..).take_while(|(waits, stripe)| {
            let mut both = waits.parts.iter().zip(&of);
            waits.stripe == *stripe
                && geometry.stripe_row(*stripe) == row
                && waits.parts.len() == of.len()
                && both.all(|(part, of)| part.is_of(of, geometry))
        });
        let count = alike.count() as u64;
        (count > 0).then(|| (first.stripe..first.stripe + count, of))
    }

    /// So many of the stripes that go next go as a run. Returns their numbers under way.
    #[inline(never)]
    pub fn run_goes(&mut self, count: usize) -> Vec<usize> {
        let mut ways = Vec::with_capacity(count);
        let keys: Vec<usize> = self.whole_go.drain(..count).collect();
        for key in keys {
            let (way, memory) = self.leave(key, false);
            self.at_words += memory.0.len();
            self.keep(memory);
            ways.push(way);
        }
        ways
    }

    fn next_stripe(&mut self, rules: &Rules<'_>) -> Option<()> {
        let sets = rules.sets;
        if self.room(sets) == 0 {
            return None;
        }
        let (key, reads) = match self.whole_go.front() {
            Some(key) => (*key, false),
            None => (*self.read_go.front()?, true),
        };
        // A stripe that is whole needs no reads only if all of it arrives together.
        let has_some = !self.under_way.is_empty();
        let fits = self.all[key].parts.len() <= rules.places;
        let may_fit = has_some || rules.places < rules.kept;
        if may_fit && !fits
            || !rules
                .arms
                .is_none_or(|(arms, _)| arms.enter(has_some, sets))
        {
            return None;
        }
        let went = match reads {
            true => self.read_go.pop_front(),
            false => self.whole_go.pop_front(),
        };
        debug_assert_eq!(went, Some(key));
        let (way, mut memory) = self.leave(key, reads);
        for mut part in memory.0.drain(..) {
            part.set_way(way);
            self.arriving.push_back(part);
        }
        self.keep(memory);
        Some(())
    }

    /// A stripe that goes is under way from now on: its number there, and its parts.
    #[inline(always)]
    fn leave(&mut self, key: usize, reads: bool) -> (usize, Memory) {
        let Waits {
            stripe,
            parts,
            covered,
            ..
        } = self.all.remove(key);
        self.by_stripe.remove(&stripe);
        if reads {
            self.reading += 1;
            self.read_last = stripe;
        }
        let way = self.under_way.insert(UnderWay {
            parts: parts.len(),
            reads,
        });
        (way, (parts, covered))
    }

    /// Keeps memory of a stripe for a later one.
    #[inline(always)]
    fn keep(&mut self, (mut parts, covered): Memory) {
        parts.clear();
        if self.spare.len() < SPARE {
            self.spare.push((parts, covered));
        }
    }

    /// A part that went has ended. If its stripe has: true if it has read.
    fn part_ended(&mut self, way: usize) -> Option<bool> {
        self.at_words -= 1;
        let under_way = &mut self.under_way[way];
        under_way.parts -= 1;
        if under_way.parts == 0 {
            let UnderWay { reads, .. } = self.under_way.remove(way);
            self.reading -= usize::from(reads);
            self.ended += 1;
            self.changed = true;
            return Some(reads);
        }
        None
    }

    /// A stripe under way has read. Where members have arms it counts until its end: it writes at the place where it has read.
    fn has_read(&mut self, way: usize, rules: &Rules<'_>) {
        let under_way = &mut self.under_way[way];
        if rules.arms.is_none() && std::mem::take(&mut under_way.reads) {
            self.reading -= 1;
            self.changed = true;
        }
    }

    /// Takes out all parts that wait. Those that are under way stay so.
    fn take(&mut self) -> Vec<Part> {
        self.by_stripe.clear();
        self.delayed.clear();
        self.whole.clear();
        self.whole_go.clear();
        self.read_go.clear();
        // They end as if they had arrived.
        self.at_words += self.arriving.len();
        let waiting = self.all.drain().flat_map(|waits| waits.parts);
        self.arriving.drain(..).chain(waiting).collect()
    }

    /// Stripes that wait, and wait though they are whole.
    #[cfg(test)]
    pub fn delayed_and_whole(&self) -> (usize, usize) {
        (self.delayed.len(), self.whole.len())
    }

    /// Checks that each stripe that waits is where its place says; an error names the first that isn't.
    #[cfg(test)]
    pub fn check(&self) -> Result<(), String> {
        for (key, waits) in &self.all {
            let list = |list: &BTreeMap<u64, usize>| list.get(&waits.number) == Some(&key);
            let goes = self.whole_go.iter().chain(&self.read_go);
            let goes = goes.filter(|going| **going == key).count();
            let (delayed, whole) = (list(&self.delayed), list(&self.whole));
            let is_right = match waits.place {
                Place::Delayed => delayed && !whole && goes == 0 && !waits.is_whole(),
                Place::Whole => whole && !delayed && goes == 0 && waits.is_whole(),
                Place::Goes => goes == 1 && !whole && !delayed,
            };
            let is_known = self.by_stripe.get(&waits.stripe) == Some(&key);
            if !is_right || !is_known || waits.parts.is_empty() {
                return Err(format!("stripe {} waits in a wrong place", waits.stripe));
            }
        }
        let lists = self.delayed.len() + self.whole.len();
        let lists = lists + self.whole_go.len() + self.read_go.len();
        match lists == self.all.len() && self.by_stripe.len() == self.all.len() {
            true => Ok(()),
            false => Err("stripes are lost".into()),
        }
    }
}

/// Places of a queue that are kept for stripes that go from here.
fn kept_of(places: &OwnPlaces) -> usize {
    places.count() / 4
}

impl Common {
    fn rules(&self, queue: Owner, places: &OwnPlaces) -> Rules<'_> {
        Rules {
            geometry: &self.geometry,
            sets: self.stripes(),
            places: places.left(),
            kept: kept_of(places),
            streams: self.has_stripe_queues(),
            arms: self.arms.as_ref().map(|arms| (arms, queue)),
        }
    }
}

impl QueueCore {
    /// True if a whole stripe of this queue goes next.
    pub(super) fn whole_goes(&mut self) -> bool {
        let rules = self.common.rules(self.me, &self.places);
        self.gather.whole_goes(&rules)
    }

    /// The whole stripes of this queue that go next and are alike, at most so many, and their writes.
    pub(super) fn alike_stripes(&mut self, most: usize) -> Option<(Range<u64>, Vec<Of>)> {
        let rules = self.common.rules(self.me, &self.places);
        self.gather.alike(&rules, most)
    }

    /// A part of a write begins to wait for others of its stripe; false: there is no room.
    pub(super) fn gather_part(&mut self, part: Part) -> bool {
        let rules = self.common.rules(self.me, &self.places);
        let has_room = self.gather.has_room(part.stripe, &rules);
        if has_room {
            self.gather.add(part, rules.geometry);
        }
        has_room
    }

    /// The next part of those that waited arrives at its word, if one may; true if something was done.
    pub(super) fn next_gathered(&mut self) -> bool {
        if self.gather.is_empty() {
            return false;
        }
        if self.now.broken {
            for _ in 0..self.gather.read_go.len() {
                self.end_reading();
            }
            for part in self.gather.take() {
                self.fail_part(part);
            }
            return true;
        }
        match self.next_gathered_run() {
            Next::Begun => return true,
            Next::Waits => return false,
            Next::Alone => {}
        }
        let rules = self.common.rules(self.me, &self.places);
        let Some(place) = self.places.take() else {
            return false;
        };
        match self.gather.next(&rules) {
            Some(part) => {
                self.arrive(place, part);
                true
            }
            None => {
                self.places.put(place);
                false
            }
        }
    }

    /// A part that went from the stripe queue has ended.
    pub(super) fn gathered_ended(&mut self, way: usize) {
        let Some(reads) = self.gather.part_ended(way) else {
            return;
        };
        if reads {
            self.end_reading();
        }
        if let Some(arms) = &self.common.arms {
            arms.leave();
        }
    }

    /// All that a batch needed was read: that of `ways`, which is empty then.
    pub(super) fn gathered_read(&mut self) {
        let rules = self.common.rules(self.me, &self.places);
        for way in self.ways.drain(..) {
            self.gather.has_read(way, &rules);
        }
    }

    /// One of this queue's stripes doesn't read any more.
    fn end_reading(&mut self) {
        if let Some(arms) = &self.common.arms {
            let queues = arms.end(self.common.stripes());
            self.tell_readers(queues);
        }
    }

    fn tell_readers(&mut self, queues: Vec<Owner>) {
        for queue in queues {
            self.send(queue, Mail::MayRead);
        }
    }

    /// No stripe reads at the moment.
    pub(super) fn may_read(&mut self) {
        self.gather.awaits_arms = false;
        self.gather.changed = true;
    }

    /// Places at words that are left for parts that don't wait here. Those that do have a quarter.
    pub(super) fn places_beside(&self) -> usize {
        let kept = match self.gather.is_empty() {
            true => 0,
            false => kept_of(&self.places).saturating_sub(self.gather.at_words),
        };
        self.places.left().saturating_sub(kept)
    }

    /// True if writes of this queue wait for more to come, while none of them is under way.
    pub fn waits_in_vain(&self) -> bool {
        self.gather.waits_in_vain()
    }

    /// This queue's user waits: nothing more is to be expected of it. Its row that has waited longest goes on, if none of its writes is under way.
    pub fn expect_nothing(&mut self) {
        if self.gather.waits_in_vain() {
            let rules = self.common.rules(self.me, &self.places);
            self.gather.oldest_go(&rules);
        }
    }
}

#[cfg(test)]
#[path = "gather_tests.rs"]
mod tests;
