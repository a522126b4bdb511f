//! Write-back: what is dirty since when, who writes it, and what a flush waits for.

use super::{Core, IoKind, Job, Kind, NONE, State};
use crate::config::{PAGE_BYTES, PAGE_SECTORS};
use crate::policy::Policy;
use pvblk_block::planted::{Plant, has};
use pvblk_block::{Op, RequestFlags, Status};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Writes at the device at once, in the background.
const DEPTH: usize = 16;
/// The same for flushes.
const FLUSH_DEPTH: usize = 64;
/// How often it is noted what is how old.
const TICK: Duration = Duration::from_secs(5);
/// How long what couldn't be written is left alone, unless somebody flushes.
const RETRY: Duration = Duration::from_secs(1);

/// What background write-back knows.
pub(super) struct Background {
    /// Where its search goes on.
    at: u64,
    /// Reclaim found dirty pages: write until there are none.
    hurry: bool,
    /// Numbers of the past, and when they were.
    ticks: VecDeque<(Instant, u64)>,
    /// Everything up to this number is to be written.
    aged: u64,
    pub(super) retry_at: Instant,
    /// Calls until whole rows are looked for again, since there were none.
    no_rows: u32,
}

impl Background {
    pub fn new(now: Instant) -> Background {
        Background {
            at: 0,
            hurry: false,
            ticks: VecDeque::new(),
            aged: 0,
            retry_at: now,
            no_rows: 0,
        }
    }

    pub fn hurry(&mut self) {
        self.hurry = true;
    }
}

impl<P: Policy> Core<P> {
    fn share(&self, percent: u8) -> usize {
        (self.frames.len() * usize::from(percent) / 100).max(1)
    }

    pub(super) fn is_too_dirty(&self) -> bool {
        self.dirty.len() + self.writing >= self.share(self.config.dirty_percent)
    }

    /// A frame's data changed.
    pub(super) fn make_dirty(&mut self, frame: u32) {
        let epoch = self.epoch;
        let f = &mut self.frames[frame as usize];
        f.failed = false;
        if f.state == State::Dirty || f.state == State::Writing {
            return;
        }
        (f.state, f.epoch) = (State::Dirty, epoch);
        self.dirty.insert(f.page, frame);
        *self.epochs.entry(epoch).or_default() += 1;
        self.counters.pages_dirtied += 1;
    }

    /// A dirty frame isn't any more, though nobody wrote it.
    pub(super) fn forget_dirty(&mut self, frame: u32) {
        let f = &mut self.frames[frame as usize];
        f.state = State::Clean;
        let (page, epoch) = (f.page, f.epoch);
        self.dirty.remove(&page);
        self.count_down(epoch);
    }

    fn count_down(&mut self, epoch: u64) {
        if let Some(count) = self.epochs.get_mut(&epoch) {
            *count -= 1;
            if *count == 0 {
                self.epochs.remove(&epoch);
            }
        }
    }

    /// Writes a run of dirty pages that begins at `page` and ends before `end`. Returns how many pages it has; 0: none can be written from there now.
    fn start_write(&mut self, page: u64, end: u64, runner: usize) -> u64 {
        let may = |core: &Core<P>, page: u64, fua: Option<bool>| {
            let frame = *core.dirty.get(&page)?;
            let f = &core.frames[frame as usize];
            let behind = f.behind && !has(Plant::BehindNotAwaited);
            let waits = behind || core.is_being_done(page);
            (!waits && fua.is_none_or(|fua| fua == f.fua)).then_some((frame, f.fua))
        };
        let Some((frame, fua)) = may(self, page, None) else {
            return 0;
        };
        let mut run = self.spare_list();
        run.push(frame);
        let mut segments = 1;
        let mut next = page + 1;
        while next < end
            && let Some((frame, _)) = may(self, next, Some(fua))
            && self.fits(&run, segments, frame)
        {
            segments += usize::from(run.last().is_none_or(|&l| l + 1 != frame));
            run.push(frame);
            next += 1;
        }
        // To the end of a row, if one is among them; what is left is written with what follows.
        let unit = (u64::from(self.limits.optimal_bytes) / PAGE_BYTES as u64).max(1);
        let row = next / unit * unit;
        if next < end
            && row > page
            && next - page >= u64::from(self.config.max_io_bytes) / PAGE_BYTES as u64
        {
            run.truncate((row - page) as usize);
        }
        let pages = run.len() as u64;
        for (page, &frame) in (page..).zip(&run) {
            self.dirty.remove(&page);
            self.frames[frame as usize].state = State::Writing;
        }
        self.writing += run.len();
        self.write_ios += 1;
        self.start(Op::Write, fua, page, run, runner);
        pages
    }

    /// Writes what is dirty of these pages, for a request that waits for it.
    pub(super) fn write_out(&mut self, mut page: u64, end: u64, runner: usize) {
        while let Some((&first, _)) = self.dirty.range(page..end).next() {
            page = first + self.start_write(first, end, runner).max(1);
        }
    }

    /// A write of pages has ended.
    pub(super) fn write_ended(&mut self, first: u64, frames: Vec<u32>, status: Status) {
        self.write_ios -= 1;
        let ok = status == Status::Ok;
        for (page, &frame) in (first..).zip(&frames) {
            self.writing -= 1;
            let f = &mut self.frames[frame as usize];
            let (syncs, waits) = (
                std::mem::replace(&mut f.syncs, NONE),
                std::mem::replace(&mut f.waits, NONE),
            );
            let (epoch, orphan) = (f.epoch, f.orphan);
            f.fua = false;
            if ok {
                self.counters.pages_written += 1;
            } else {
                self.counters.write_errors += 1;
                self.background.retry_at = self.now + RETRY;
            }
            match (orphan, ok) {
                (true, _) => self.orphan_ended(page, frame, epoch, ok),
                (false, true) => {
                    self.frames[frame as usize].state = State::Clean;
                    self.count_down(epoch);
                }
                (false, false) if self.writes_through() => {
                    // The device has what it had: nobody was told otherwise.
                    self.frames[frame as usize].state = State::Clean;
                    self.count_down(epoch);
                    let chain = waits;
                    self.drop_page(frame, 0);
                    self.answer(chain, frame, Status::Ok);
                    self.answer_syncs(syncs, status);
                    continue;
                }
                (false, false) => {
                    let f = &mut self.frames[frame as usize];
                    (f.state, f.failed) = (State::Dirty, true);
                    self.dirty.insert(page, frame);
                }
            }
            if !ok {
                self.fail_flushes(epoch, status);
            }
            self.answer_syncs(syncs, status);
            self.answer(waits, frame, Status::Ok);
        }
        self.keep_list(frames);
        self.pump_urgent();
        self.pump_flushes();
    }

    /// An older version of a page was written, or not.
    fn orphan_ended(&mut self, page: u64, frame: u32, epoch: u64, ok: bool) {
        self.count_down(epoch);
        self.free_frame(frame, 0);
        let Some(new) = self.table.find_locked(page) else {
            return;
        };
        let f = &mut self.frames[new as usize];
        f.behind = false;
        let waits = std::mem::replace(&mut f.waits, NONE);
        if has(Plant::RedirtiedIsClean) && f.state == State::Dirty && f.syncs == NONE {
            self.forget_dirty(new);
        }
        let f = &mut self.frames[new as usize];
        if !ok && f.state == State::Dirty && f.epoch > epoch {
            // What the older one held is in this one only.
            let newer = std::mem::replace(&mut f.epoch, epoch);
            self.count_down(newer);
            *self.epochs.entry(epoch).or_default() += 1;
        }
        let f = &self.frames[new as usize];
        if f.state == State::Dirty && (f.syncs != NONE || f.epoch <= self.flush_wanted()) {
            self.urgent.push(page);
        }
        self.answer(waits, new, Status::Ok);
    }

    /// Those whose data was written, or not.
    fn answer_syncs(&mut self, chain: u32, status: Status) {
        let all = self.take_chain(chain);
        for &(id, _) in &all {
            let Some(Some(job)) = self.jobs.get_mut(id as usize) else {
                continue;
            };
            job.pending -= 1;
            if status != Status::Ok {
                job.status = status;
            }
            if job.pending == 0 || job.pending == super::MOST_PENDING / 2 {
                self.run(id);
            }
        }
        self.keep_chain(all);
    }

    /// Pages that somebody waits for and whose older versions are written now.
    fn pump_urgent(&mut self) {
        for page in std::mem::take(&mut self.urgent) {
            let Some(&frame) = self.dirty.get(&page) else {
                continue;
            };
            let syncs = self.frames[frame as usize].syncs;
            let waiter = self.waits.get(syncs as usize).map(|w| w.job);
            let waiter = waiter.or_else(|| self.flushes.first().copied());
            let job = waiter.and_then(|id| self.jobs.get(id as usize)?.as_ref());
            let runner = job.map_or(Core::BACKGROUND, |j| j.owner);
            self.start_write(page, page + 1, runner);
        }
    }

    /// A new flush covers everything that is dirty now.
    pub(super) fn new_flush(&mut self) -> Kind {
        let epoch = self.epoch;
        self.epoch += 1;
        self.flush_at = 0;
        Kind::Flush { epoch, sent: false }
    }

    /// The newest number that a flush waits for.
    fn flush_wanted(&self) -> u64 {
        let flushes = self
            .flushes
            .iter()
            .filter_map(|&id| self.jobs.get(id as usize));
        let epochs = flushes.filter_map(|job| match job.as_ref()?.kind {
            Kind::Flush {
                epoch, sent: false, ..
            } => Some(epoch),
            _ => None,
        });
        epochs.max().unwrap_or(0)
    }

    /// True if the job is done. It is when the device says so, so never here, unless it has failed.
    pub(super) fn run_flush(&mut self, id: u32, job: &mut Job) -> bool {
        let Kind::Flush { epoch, sent } = job.kind else {
            return true;
        };
        if sent {
            return false;
        }
        // This job is out of its place now, so the others don't know it.
        self.pump_flush(epoch.max(self.flush_wanted()), job.owner);
        self.send_flush(id, job, epoch)
    }

    /// Passes a flush on if nothing keeps it; true if it is done without.
    fn send_flush(&mut self, id: u32, job: &mut Job, epoch: u64) -> bool {
        let first = self.epochs.first_key_value();
        if first.is_some_and(|(&e, _)| e <= epoch) {
            return false;
        }
        job.kind = Kind::Flush { epoch, sent: true };
        self.flushes.retain(|&f| f != id);
        self.pass(id, job);
        false
    }

    /// Passes a request on to the device.
    pub(super) fn pass(&mut self, id: u32, job: &Job) {
        let mut request = self.spare_request();
        let tag = self.ios.insert(IoKind::Pass(id)) as u64;
        let r = &job.request;
        let flags = r.flags - RequestFlags::STABLE_BUFFERS;
        request.reset(r.op, flags, r.sector, r.sectors, tag);
        self.out.ios.push(super::Io {
            runner: job.owner,
            request,
        });
    }

    /// Goes on with all flushes.
    pub(super) fn pump_flushes(&mut self) {
        let mut at = 0;
        while at < self.flushes.len() {
            let id = self.flushes[at];
            self.run(id);
            if self.jobs.get(id as usize).is_none() {
                // Done without the device.
                self.flushes.retain(|&f| f != id);
            }
            at += usize::from(self.flushes.get(at) == Some(&id));
        }
    }

    /// Writes dirty pages up to a number, by sector.
    fn pump_flush(&mut self, epoch: u64, runner: usize) {
        while self.write_ios < FLUSH_DEPTH {
            let Some((&page, &frame)) = self.dirty.range(self.flush_at..).next() else {
                break;
            };
            self.flush_at = page + 1;
            if self.frames[frame as usize].epoch <= epoch {
                self.flush_at = page + self.start_write(page, u64::MAX, runner).max(1);
            }
        }
    }

    /// A page with this number could not be written.
    fn fail_flushes(&mut self, epoch: u64, status: Status) {
        let flushes = self.flushes.clone();
        for id in flushes {
            let Some(place) = self.jobs.get_mut(id as usize) else {
                continue;
            };
            let covers = |job: &Job| matches!(job.kind, Kind::Flush { epoch: e, .. } if e >= epoch);
            let Some(mut job) = place.take_if(|job| covers(job)) else {
                continue;
            };
            self.flushes.retain(|&f| f != id);
            job.status = status;
            self.complete(id, job);
        }
    }

    /// Whether background write-back has something to do.
    pub fn wants_write_back(&self) -> bool {
        let some = self.dirty.len() > self.share(self.config.dirty_background_percent);
        let aged = self
            .epochs
            .first_key_value()
            .is_some_and(|(&e, _)| e <= self.background.aged);
        (some || aged || self.background.hurry)
            && self.write_ios < DEPTH
            && !self.dirty.is_empty()
            && self.now >= self.background.retry_at
    }

    /// A piece of background write-back.
    pub fn write_back(&mut self) {
        if self.wants_write_back() {
            self.pump_background(Core::BACKGROUND);
        }
        self.background.hurry &= !self.dirty.is_empty();
    }

    /// Writes dirty pages, by sector, from where it was; whole rows first.
    pub(super) fn pump_background(&mut self, runner: usize) {
        let unit = (u64::from(self.limits.optimal_bytes) / PAGE_BYTES as u64).max(1);
        for whole in [true, false] {
            if whole && (unit == 1 || self.background.no_rows > 0) {
                self.background.no_rows = self.background.no_rows.saturating_sub(1);
                continue;
            }
            let before = self.write_ios;
            let mut rounds = 0;
            while self.write_ios < DEPTH && rounds < 2 {
                let Some((&page, &frame)) = self.dirty.range(self.background.at..).next() else {
                    self.background.at = 0;
                    rounds += 1;
                    continue;
                };
                let row = page / unit * unit;
                self.background.at = page + 1;
                let f = &self.frames[frame as usize];
                if f.behind || f.failed && self.now < self.background.retry_at {
                    continue;
                }
                let written = match whole {
                    true if !self.is_row_dirty(row, unit) => {
                        self.background.at = row + unit;
                        continue;
                    }
                    true => {
                        let mut end = row + unit;
                        while self.is_row_dirty(end, unit)
                            && (end - page) * (PAGE_BYTES as u64)
                                < u64::from(self.config.max_io_bytes)
                        {
                            end += unit;
                        }
                        self.start_write(page, end, runner)
                    }
                    false => self.start_write(page, u64::MAX, runner),
                };
                self.background.at = page + written.max(1);
            }
            // Parts of rows wait until there is nothing else.
            if self.write_ios > 0 {
                return;
            }
            if whole && self.write_ios == before {
                self.background.no_rows = 64;
            }
        }
    }

    /// Whether all of a row is dirty, from its first page on.
    fn is_row_dirty(&self, row: u64, unit: u64) -> bool {
        let pages = self.dirty.range(row..row + unit);
        pages.count() as u64 == unit
    }

    /// Notes the time: what is older than the configured age is to be written. Returns when to come back.
    pub fn tick(&mut self) -> Option<Instant> {
        let due = self.background.ticks.back().map(|&(at, _)| at + TICK);
        if due.is_none_or(|due| self.now >= due) {
            self.background.ticks.push_back((self.now, self.epoch));
            self.epoch += 1;
        }
        while let Some(&(at, epoch)) = self.background.ticks.front() {
            if self.now < at + self.config.dirty_expire {
                break;
            }
            self.background.aged = epoch;
            self.background.ticks.pop_front();
        }
        (!self.epochs.is_empty()).then(|| self.now + TICK)
    }

    /// Whether everything written is on the device, though perhaps in its cache.
    pub fn is_clean(&self) -> bool {
        self.epochs.is_empty()
    }

    /// The device has so many sectors now. What was behind its end is gone; false if a page at the old end has to be written first.
    pub fn resize(&mut self, sectors: u64) -> bool {
        let edge = self.capacity.min(sectors) / PAGE_SECTORS;
        for frame in 0..self.frames.len() as u32 {
            let f = &self.frames[frame as usize];
            let (page, state) = (f.page, f.state);
            if state == State::Free || page < edge || f.orphan {
                continue;
            }
            let gone = page * PAGE_SECTORS >= sectors;
            if state == State::Dirty && gone && f.syncs == NONE && !f.behind {
                self.forget_dirty(frame);
            } else if state != State::Clean || f.waits != NONE {
                self.write_out(page, page + 1, Core::BACKGROUND);
                return false;
            }
            self.drop_page(frame, 0);
        }
        self.capacity = sectors;
        true
    }
}
