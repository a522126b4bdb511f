//! The write-intent bitmap while the array serves: a bit is on all members before a stripe of its chunk is written.

use super::pages::memory;
use super::{Core, Data, Purpose};
use crate::{Health, Intent, PAGE_BYTES, PageWrite, STRIPE_SECTORS, WriteIntent};
use pvblk_block::memory::Gauge;
use pvblk_block::{Buffer, Error, Op, Region};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// See the module's documentation.
pub(super) struct Intents {
    bitmap: Option<WriteIntent>,
    region: Option<Arc<Region>>,
    /// Heads whose bits aren't on disk.
    waiting: Vec<(usize, Intent)>,
    /// Heads whose chunks have too many writers.
    full: Vec<usize>,
    /// Superblocks wait for these.
    announced: Option<Intent>,
    /// Pages to be written, each with the queue that writes it.
    wanted: BTreeMap<usize, usize>,
    writes: HashMap<usize, (PageWrite, usize)>,
    /// Flushes that a sweep waits for.
    flushing: usize,
    /// The background thread's queue, which is always polled. It writes pages, since other queues may
    /// complete their requests before.
    pub background: Option<usize>,
    /// Pages that are written though the others have them: one device is new.
    fresh: bool,
    _memory: Option<Gauge>,
}

impl Intents {
    pub fn new(bitmap: Option<WriteIntent>) -> Result<Intents, Error> {
        let bytes = bitmap.as_ref().map(|b| b.pages().len() * PAGE_BYTES);
        let region = match bytes {
            Some(bytes) => {
                let region = Region::anonymous(bytes);
                Some(Arc::new(
                    region.map_err(|e| Error::os("memory for the bitmap", e))?,
                ))
            }
            None => None,
        };
        Ok(Intents {
            bitmap,
            region,
            waiting: Vec::new(),
            full: Vec::new(),
            announced: None,
            wanted: BTreeMap::new(),
            writes: HashMap::new(),
            flushing: 0,
            background: None,
            fresh: false,
            _memory: bytes.map(|b| memory("bitmap", b)),
        })
    }

    /// A page is to be written.
    pub fn want(&mut self, page: usize, runner: usize) {
        self.wanted.insert(page, runner);
    }

    /// Superblocks of these events come next; true if they have to wait for the bitmap.
    pub fn announce(&mut self, events: u64) -> bool {
        let Some(bitmap) = &mut self.bitmap else {
            return false;
        };
        let intent = bitmap.set_events(events);
        if bitmap.is_durable(&intent) {
            return false;
        }
        self.announced = Some(intent);
        true
    }

    /// All of it goes to a new member, which is written before anything counts on it.
    pub fn new_member(&mut self, runner: usize) {
        if let Some(bitmap) = &self.bitmap {
            self.wanted
                .extend(bitmap.pages().map(|page| (page, runner)));
            self.fresh = true;
        }
    }
}

impl Core {
    /// Sets or removes the queue of the background thread.
    pub fn set_background_queue(&mut self, owner: Option<usize>) {
        self.intents.background = owner;
    }

    /// The bitmap as it is now.
    pub fn bitmap(&self) -> Option<&WriteIntent> {
        self.intents.bitmap.as_ref()
    }

    /// A head's round is ready, and goes on when its bit is on disk.
    pub(super) fn intend(&mut self, head: usize) {
        let sector = self.stripe_sector(head);
        let Some(bitmap) = &mut self.intents.bitmap else {
            self.write_pages(head);
            return;
        };
        let Some(intent) = bitmap.start_write(sector, STRIPE_SECTORS) else {
            self.intents.full.push(head);
            return;
        };
        let durable = bitmap.is_durable(&intent);
        let mut runner = 0;
        if let Some(round) = &mut self.heads.all[head].round {
            round.intends = true;
            runner = round.runner;
        }
        intent.pages().for_each(|p| self.intents.want(p, runner));
        match durable {
            true => self.write_pages(head),
            false => self.intents.waiting.push((head, intent)),
        }
    }

    fn stripe_sector(&self, head: usize) -> u64 {
        let stripe = self.heads.all[head].record.stripe;
        self.geometry.stripe_member_sector(stripe)
    }

    /// Writes the pages that writes wait for.
    pub(super) fn start_intents(&mut self) {
        if self.broken {
            self.fail_intents();
            return;
        }
        let fresh = std::mem::take(&mut self.intents.fresh);
        for (page, runner) in std::mem::take(&mut self.intents.wanted) {
            let runner = self.intents.background.unwrap_or(runner);
            let intents = &mut self.intents;
            let (Some(bitmap), Some(region)) = (&mut intents.bitmap, &intents.region) else {
                return;
            };
            if !fresh && !bitmap.is_unwritten(page) {
                continue;
            }
            let Some(write) = bitmap.begin_page(page) else {
                // When the write that is under way has ended.
                intents.wanted.insert(page, runner);
                intents.fresh |= fresh;
                continue;
            };
            let at = page * PAGE_BYTES;
            region.write(at, bitmap.page(page));
            let data = Buffer::new(region, at, PAGE_BYTES);
            let live: Vec<usize> = self.slots.live().collect();
            intents.writes.insert(page, (write, live.len()));
            for slot in live {
                let sector = self.slots.all[slot].as_ref().map_or(0, |s| s.bitmap_sector);
                let io = (slot, Op::Write, true);
                let sector = sector + (at / 512) as u64;
                self.start(
                    runner,
                    Purpose::Intent(page),
                    io,
                    sector,
                    Data::of(data.clone()),
                );
            }
        }
    }

    /// A page is on one of the members, or that is kicked.
    pub(super) fn intent_written(&mut self, page: usize) {
        let intents = &mut self.intents;
        let Some((_, left)) = intents.writes.get_mut(&page) else {
            return;
        };
        *left -= 1;
        if *left > 0 {
            return;
        }
        let (Some((write, _)), Some(bitmap)) = (intents.writes.remove(&page), &mut intents.bitmap)
        else {
            return;
        };
        bitmap.end_page(write, true);
        let waiting = std::mem::take(&mut intents.waiting);
        let (ready, waiting): (Vec<_>, Vec<_>) = waiting
            .into_iter()
            .partition(|(_, intent)| bitmap.is_durable(intent));
        intents.waiting = waiting;
        let told = intents
            .announced
            .take_if(|intent| bitmap.is_durable(intent));
        for (head, _) in ready {
            self.write_pages(head);
        }
        if told.is_some() {
            self.announced();
        }
    }

    /// A write has ended; `everywhere`: on all members.
    pub(super) fn intent_over(&mut self, stripe: u64, everywhere: bool) {
        let sector = self.geometry.stripe_member_sector(stripe);
        if let Some(bitmap) = &mut self.intents.bitmap {
            bitmap.end_write(sector, STRIPE_SECTORS, everywhere);
        }
        for head in std::mem::take(&mut self.intents.full) {
            self.intend(head);
        }
    }

    /// Fails the writes that wait for pages: the array has failed.
    pub(super) fn fail_intents(&mut self) {
        self.intents.announced = None;
        let waiting = std::mem::take(&mut self.intents.waiting);
        let heads = waiting.into_iter().map(|(head, _)| head);
        let full = std::mem::take(&mut self.intents.full);
        for head in heads.chain(full).collect::<Vec<_>>() {
            self.write_pages(head);
        }
    }

    /// Sweeps the bitmap, as is due every few seconds: bits that aren't needed any more are
    /// cleared.
    pub fn sweep(&mut self, runner: usize) {
        let idle = self.intents.flushing == 0 && !self.broken;
        let degraded = self.members.failed().is_some();
        if self.intents.bitmap.is_none() || !idle || degraded {
            return;
        }
        self.intents.flushing = self.flush_all(runner, Purpose::SweepFlush);
        if self.intents.flushing == 0 {
            self.swept();
        }
    }

    /// One of the members is flushed.
    pub(super) fn sweep_flushed(&mut self) {
        self.intents.flushing -= 1;
        if self.intents.flushing == 0 && !self.broken {
            self.swept();
        }
    }

    fn swept(&mut self) {
        let health = Health {
            events: self.meta.events(),
            degraded: self.members.failed().is_some(),
        };
        let Some(bitmap) = &mut self.intents.bitmap else {
            return;
        };
        let pages = bitmap.sweep(health);
        pages.into_iter().for_each(|p| self.intents.want(p, 0));
    }

    /// Parity of stripes before this is right, on stable storage, too.
    pub(super) fn intents_resynced(&mut self, stripes: std::ops::Range<u64>) {
        let sectors = |stripe| self.geometry.stripe_member_sector(stripe);
        if let Some(bitmap) = &mut self.intents.bitmap {
            bitmap.resynced(sectors(stripes.start)..sectors(stripes.end));
        }
    }
}
