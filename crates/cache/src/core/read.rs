//! Reads: what is there is copied, what isn't is read together with what will be wanted next.

use super::{Core, Filling, Job, Kind, MOST_PENDING, NONE, Need, State, copy, meeting};
use crate::config::{Mode, PAGE_BYTES};
use crate::lists::On;
use crate::policy::{Policy, Shortfall};
use crate::readahead::{Plan, Sizes};
use pvblk_block::planted::{Plant, has};
use pvblk_block::{Op, Status};

/// Most pages that are allocated for one job at a time.
const MOST_AT_ONCE: u64 = 256;

impl<P: Policy> Core<P> {
    /// True if the job is done.
    pub(super) fn run_read(&mut self, id: u32, job: &mut Job) -> bool {
        loop {
            if job.filling.is_some() {
                if !self.fill(job) {
                    self.park(id, job);
                    return false;
                }
                self.start_filling(job);
            }
            if job.at >= job.end {
                return job.pending == 0;
            }
            if job.pending >= MOST_PENDING {
                return false;
            }
            let page = job.at;
            if self.wait_for_range(page, id) {
                return false;
            }
            let Some(frame) = self.table.find_locked(page) else {
                if self.has_its_share(job) {
                    return false;
                }
                // Counted as a miss when it is met again, being read.
                let plan = self.plan_miss(job);
                self.begin_filling(job, plan, job.end);
                continue;
            };
            let f = &mut self.frames[frame as usize];
            let reading = f.state == State::Reading;
            let marked = std::mem::take(&mut f.marked) || self.table.is_marked(frame);
            if marked {
                self.table.unmark(frame);
                if let Some(plan) = self.plan_mark(job) {
                    self.begin_filling(job, plan, plan.start);
                    continue;
                }
            }
            job.at += 1;
            if reading {
                self.counters.misses += 1;
                job.pending += 1;
                self.wait_on(frame, id, page);
            } else {
                self.counters.hits += 1;
                self.copy_out(job, page, frame);
            }
        }
    }

    fn copy_out(&mut self, job: &Job, page: u64, frame: u32) {
        let (skip, first, len) = meeting(&job.request, page);
        let offset = frame as usize * PAGE_BYTES + first;
        copy(&job.request.buffers, skip, &self.region, offset, len, false);
        self.counters.readahead_used += u64::from(self.table.touch(frame));
    }

    fn ahead(&mut self, owner: usize) -> Sizes {
        let most = self.most_ahead(owner);
        let several = 2 * u64::from(self.config.max_io_bytes) / PAGE_BYTES as u64;
        Sizes { most, several }
    }

    /// The largest window: not so much of a small cache that pages are gone before they are used. A fixed one where frames aren't divided.
    fn most_ahead(&mut self, owner: usize) -> u64 {
        let configured = self.config.most_ahead(&self.limits);
        let most = configured.min(self.frames.len() as u64 / 8);
        if !self.policy.divides_frames() {
            return most;
        }
        let (pages, lost, room) = (
            self.counters.pgalloc,
            self.counters.readahead_lost,
            self.for_readers(),
        );
        self.readers.window(owner, pages, lost, most, room)
    }

    /// Frames that reads may have at the same time.
    fn for_readers(&self) -> u64 {
        let frames = self.frames.len() - self.alloc.marks().high;
        let percent = usize::from(self.policy.kept_from_reads_percent());
        let kept = self.lists.len(On::Active).min(frames * percent / 100);
        (frames - kept) as u64
    }

    /// Pages that each request may have, where all who wait now get as many.
    fn share_of_each(&self) -> u64 {
        match self.policy.divides_frames() {
            true => (self.for_readers() / self.jobs.len().max(1) as u64).max(1),
            false => u64::MAX,
        }
    }

    /// How many of `wanted` pages one request gets at a time. Where there isn't enough for all who wait now, they get parts, which are halves
    /// at most: it costs less to wait a little than to read a rest.
    fn at_once(&self, wanted: u64) -> u64 {
        let most = wanted
            .min(MOST_AT_ONCE)
            .min(self.frames.len() as u64 / 4)
            .max(1);
        most.div_ceil((most / self.share_of_each()).max(1))
    }

    /// Whether what the job reads now is all that it may have: a second part behind the first one at the device would keep pages from those whose
    /// devices have nothing to do.
    fn has_its_share(&self, job: &Job) -> bool {
        let more = || self.at_once(job.end - job.at);
        job.kind == Kind::Read
            && job.pending > 0
            && u64::from(job.pending) + more() > self.share_of_each()
    }

    fn plan_miss(&mut self, job: &Job) -> Plan {
        // Only those who read in order share the room for windows.
        let sizes = match job.hint.sequential {
            true => self.ahead(job.owner),
            false => Sizes::default(),
        };
        let wanted = self.at_once(job.end - job.at);
        let window = &mut self.owners[job.owner].windows[usize::from(job.hint.stream)];
        match job.kind {
            Kind::Read => window.miss(job.at, wanted, job.hint.sequential, sizes),
            _ => Plan {
                start: job.at,
                end: job.at + 1,
                mark: u64::MAX,
            },
        }
    }

    fn plan_mark(&mut self, job: &Job) -> Option<Plan> {
        let sizes = self.ahead(job.owner);
        let (table, behind) = (&self.table, job.at + 1..=job.at + sizes.reach());
        let absent = || {
            let mut pages = behind.clone();
            let found = pages.find(|&page| table.find_locked(page).is_none());
            found.unwrap_or(behind.end() + 1)
        };
        let window = &mut self.owners[job.owner].windows[usize::from(job.hint.stream)];
        window.marked(job.at, absent, sizes)
    }

    /// A part of `job.at` is to be written: the rest of the page is read first.
    pub(super) fn begin_part(&mut self, job: &mut Job) {
        let plan = self.plan_miss(job);
        self.begin_filling(job, plan, plan.end);
    }

    fn begin_filling(&mut self, job: &mut Job, plan: Plan, optional: u64) {
        job.filling = Some(Filling {
            at: plan.start,
            plan,
            optional,
            frames: self.spare_list(),
        });
    }

    /// Whether a page is to be read.
    fn is_absent(&self, page: u64) -> bool {
        self.table.find_locked(page).is_none() && !self.is_held(page)
    }

    /// Gets frames for the job's plan; false if it has to wait.
    pub(super) fn fill(&mut self, job: &mut Job) -> bool {
        let Some(mut filling) = job.filling.take() else {
            return true;
        };
        let last = filling.plan.end.min(self.capacity.div_ceil(8));
        let mut all = true;
        while filling.at < last {
            if !self.is_absent(filling.at) {
                filling.at += 1;
                continue;
            }
            match self.frame_for(job) {
                Some(frame) => {
                    filling.frames.push(frame);
                    filling.at += 1;
                }
                None => {
                    all = self.may_stop(job, &filling);
                    break;
                }
            }
        }
        filling.plan.end = filling.at.min(last);
        if !all {
            // The plan goes on where it was.
            filling.plan.end = last;
        }
        job.filling = Some(filling);
        all
    }

    /// There is no frame: whether what the plan has is enough to go on with.
    fn may_stop(&self, job: &mut Job, filling: &Filling) -> bool {
        let may = self.policy.goes_on_with(&Shortfall {
            asleep: matches!(job.need, Need::Sleep { .. }),
            progress: job.progress,
            is_idle: self.ios.is_empty(),
            has_half: 2 * (filling.at - filling.plan.start)
                >= filling.plan.end - filling.plan.start,
            only_optional: filling.at >= filling.optional,
        });
        let enough = !filling.frames.is_empty() || filling.at >= filling.optional;
        if may && enough {
            job.need = Need::Nothing;
        }
        may && enough
    }

    /// Starts the reads of the job's plan.
    pub(super) fn start_filling(&mut self, job: &mut Job) {
        let Some(mut filling) = job.filling.take() else {
            return;
        };
        if self.policy.keeps_frames_in_order() {
            filling.frames.sort_unstable();
        }
        let mut frames = std::mem::take(&mut filling.frames).into_iter();
        let has_any = frames.len() > 0;
        let mut run = self.spare_list();
        let (mut first, mut segments) = (0, 0);
        for page in filling.plan.start..filling.plan.end {
            if frames.len() == 0 {
                break;
            }
            // Others may have begun to read it meanwhile.
            if !self.is_absent(page) {
                continue;
            }
            let Some(frame) = frames.next() else { break };
            let adjoins = !run.is_empty() && first + run.len() as u64 == page;
            if !adjoins || !self.fits(&run, segments, frame) {
                let next = self.spare_list();
                let full = std::mem::replace(&mut run, next);
                self.start_run(first, full, job.owner);
                (first, segments) = (page, 0);
            }
            segments += usize::from(run.last().is_none_or(|&l| l + 1 != frame));
            run.push(frame);
            let ahead = page >= filling.optional;
            self.counters.readahead_pages += u64::from(ahead);
            self.read_into(page, frame, page == filling.plan.mark, ahead);
        }
        self.start_run(first, run, job.owner);
        // Without any, who comes to its first page tries again.
        if has_any && filling.plan.mark < filling.plan.start {
            self.mark_page(filling.plan.mark);
        }
        let list = self.owners[job.owner].list;
        for frame in frames {
            self.free_frame(frame, list);
        }
    }

    /// Whoever reads this page, which is there or on its way, is to read ahead.
    fn mark_page(&mut self, page: u64) {
        let Some(frame) = self.table.find_locked(page) else {
            return;
        };
        match self.table.is_open(frame) {
            true => self.table.mark(frame),
            false => self.frames[frame as usize].marked = true,
        }
    }

    fn start_run(&mut self, first: u64, run: Vec<u32>, owner: usize) {
        match run.is_empty() {
            true => self.keep_list(run),
            false => self.start(Op::Read, false, first, run, owner),
        }
    }

    /// From now on the page is being read into a frame.
    fn read_into(&mut self, page: u64, frame: u32, marked: bool, ahead: bool) {
        self.place(page, frame, State::Reading);
        self.frames[frame as usize].marked = marked;
        if ahead {
            self.table.set_ahead(frame);
        }
    }

    /// From now on the page has this frame.
    pub(super) fn place(&mut self, page: u64, frame: u32, state: State) {
        let f = &mut self.frames[frame as usize];
        debug_assert!(f.state == State::Free);
        (f.page, f.state) = (page, state);
        self.table.insert(page, frame);
        let mut on = On::Inactive;
        if let Some(distance) = self.shadows.refault(page) {
            self.counters.workingset_refault_file += 1;
            if distance <= self.lists.len(On::Active) as u64 {
                self.counters.workingset_activate_file += 1;
                on = On::Active;
            }
        }
        match state {
            State::Reading => {
                self.frames[frame as usize].activate = on == On::Active;
                self.reading += 1;
            }
            _ => self.lists.put(frame, on),
        }
    }

    /// The page's read has ended, well or not.
    fn not_reading(&mut self, frame: u32) {
        self.reading -= 1;
        let f = &mut self.frames[frame as usize];
        let on = match std::mem::take(&mut f.activate) {
            true => On::Active,
            false => On::Inactive,
        };
        self.lists.put(frame, on);
    }

    /// A read has ended.
    pub(super) fn read_ended(&mut self, first: u64, frames: Vec<u32>, status: Status) {
        let alone = frames.len() == 1;
        self.counters.read_errors += u64::from(status != Status::Ok);
        for (page, &frame) in (first..).zip(&frames) {
            if status == Status::Ok {
                self.not_reading(frame);
                let f = &mut self.frames[frame as usize];
                f.state = State::Clean;
                let (chain, marked) = (f.waits, std::mem::take(&mut f.marked));
                f.waits = NONE;
                self.table.open(frame, marked);
                self.answer(chain, frame, status);
                continue;
            }
            let chain = self.frames[frame as usize].waits;
            if !alone && chain != NONE {
                // One page that can't be read isn't all of them.
                let wait = &self.waits[chain as usize];
                let owner = self.jobs.get(wait.job as usize);
                let owner = owner.and_then(|j| Some(j.as_ref()?.owner));
                let mut one = self.spare_list();
                one.push(frame);
                self.frames[frame as usize].marked = false;
                self.start(
                    Op::Read,
                    false,
                    page,
                    one,
                    owner.unwrap_or(Core::BACKGROUND),
                );
                continue;
            }
            self.frames[frame as usize].waits = NONE;
            self.not_reading(frame);
            self.drop_page(frame, 0);
            self.answer(chain, frame, status);
        }
        self.keep_list(frames);
    }

    /// Those who waited for a page go on: it is there, or can't be read.
    pub(super) fn answer(&mut self, chain: u32, frame: u32, status: Status) {
        let all = self.take_chain(chain);
        // All take their data before anybody goes on: who does may need memory, and reclaim this frame.
        for &(id, page) in &all {
            let Some(mut job) = self.jobs.get_mut(id as usize).and_then(Option::take) else {
                continue;
            };
            // An entry without a page may be of a request that is done, and had waited twice.
            if job.kind == Kind::Read && page != u64::MAX {
                job.pending -= 1;
                match status {
                    Status::Ok => self.copy_out(&job, page, frame),
                    _ => job.status = status,
                }
            } else if status != Status::Ok && matches!(job.kind, Kind::Write { .. }) {
                // A write of a part that needs the rest.
                (job.status, job.at) = (status, job.end);
            }
            self.jobs[id as usize] = Some(job);
        }
        for &(id, _) in &all {
            let Some(Some(job)) = self.jobs.get(id as usize) else {
                continue;
            };
            let goes_on = match job.kind {
                // What is parked goes on in its turn; and not for each of many pages.
                Kind::Read => {
                    let waits = job.at < job.end && job.pending >= MOST_PENDING / 2;
                    !job.is_parked && job.filling.is_none() && !waits
                }
                _ => true,
            };
            if goes_on {
                self.run(id);
            }
        }
        self.keep_chain(all);
    }

    /// Whether a part of `page` can be written as it is.
    pub(super) fn is_whole(&self, job: &Job, page: u64) -> bool {
        let (_, first, len) = meeting(&job.request, page);
        let sectors = self.sectors_of(page) as usize;
        has(Plant::PartWithoutRead) || (first == 0 && len == sectors * 512)
    }

    /// Whether writes wait for the device.
    pub(super) fn writes_through(&self) -> bool {
        self.config.mode == Mode::WriteThrough
    }
}
