//! Reads: pages that are there are copied, the others are read together with those that will be wanted next.

use super::MOST_PENDING;
use crate::core::memory::Memory;
use crate::core::reads::{Filling, Room};
use crate::core::requests::{Copies, Kind, Ongoing};
use crate::core::waiters::{Chain, NO_PAGE};
use crate::core::{BACKGROUND, Core};
use crate::policy::{Policy, Shortfall};
use pvblk_block::Status;

/// A read uses a page, and gets its part of it if the core copies. True if it is the first use of a page that was read in advance.
fn give<P: Policy>(memory: &mut Memory<P>, read: &Ongoing, page: u64, frame: u32) -> bool {
    if read.copies == Copies::Inside {
        memory.copy_out(&read.request, page, frame);
    }
    memory.touch(frame)
}

impl<P: Policy> Core<P> {
    /// True if the request is done.
    pub(in crate::core) fn go_on_with_read(&mut self, number: u32, read: &mut Ongoing) -> bool {
        if self.is_behind_end(read) {
            self.fail_rest(read);
            return read.pending == 0;
        }
        loop {
            if !self.fill_and_start(number, read) {
                return false;
            }
            if read.at >= read.end {
                return read.pending == 0;
            }
            if read.pending >= MOST_PENDING {
                return false;
            }
            let page = read.at;
            if self.ranges.wait(page, number) {
                return false;
            }
            let wanted = read.end - page;
            let Some(frame) = self.memory.find(page) else {
                let room = self.room();
                if self.reads.has_its_share(read.pending, wanted, room) {
                    return false;
                }
                // Counted as a miss when it is met again, being read.
                let filling = self.reads.miss(read.owner, read.hint, page, wanted, room);
                read.filling = Some(filling);
                continue;
            };
            if self.memory.unmark(frame) {
                let (room, now) = (self.room(), self.moment.now);
                let is_there = |page| self.memory.find(page).is_some();
                let filling = self
                    .reads
                    .marked(read.owner, read.hint, page, (room, now), is_there);
                if filling.is_some() {
                    read.filling = filling;
                    continue;
                }
            }
            read.at += 1;
            if self.memory.is_reading(frame) {
                self.reads.count_miss();
                if self.memory.is_ahead(frame) {
                    self.reads.waits_for_ahead(read.owner, read.hint);
                }
                read.pending += 1;
                self.waiters.add(frame, number, page);
            } else {
                let ahead = give(&mut self.memory, read, page, frame);
                self.reads.count_hit(ahead);
            }
        }
    }

    fn room(&self) -> Room {
        let (allocated, lost) = self.memory.read_ahead_losses();
        Room {
            frames: self.memory.room_for_reads(),
            allocated,
            lost,
            requests: self.requests.len(),
        }
    }

    /// True if a page is to be read.
    fn is_absent(&self, page: u64) -> bool {
        self.memory.find(page).is_none() && !self.ranges.is_held(page)
    }

    /// Gets frames for the request's pages, if it is to have any read, and starts the reads. False if it has to wait for frames: it is parked then.
    pub(super) fn fill_and_start(&mut self, number: u32, request: &mut Ongoing) -> bool {
        let Some(mut filling) = request.filling.take() else {
            return true;
        };
        if self.fill(request, &mut filling) {
            self.start(request.owner, request.request.followed, filling);
            return true;
        }
        request.filling = Some(filling);
        self.requests.park(number, request);
        false
    }

    /// Gets frames; false if the request has to wait for more.
    fn fill(&mut self, request: &mut Ongoing, filling: &mut Filling) -> bool {
        let last = self.io.pages();
        let complete = loop {
            if filling.next(last, |page| self.is_absent(page)).is_none() {
                break true;
            }
            match self.allocate(request) {
                Some(frame) => filling.got(frame),
                None => break self.may_stop(request, filling),
            }
        };
        filling.cut(last, complete);
        complete
    }

    /// There is no frame: whether the request goes on with those that it has.
    fn may_stop(&self, request: &mut Ongoing, filling: &Filling) -> bool {
        let may = self.policy.goes_on_with(&Shortfall {
            asleep: request.allocation.is_asleep(),
            progress: request.allocation.progress(),
            is_idle: self.io.is_idle(),
            has_half: filling.has_half(),
            only_optional: filling.has_wanted(),
        });
        let enough = filling.held() > 0 || filling.has_wanted();
        if may && enough {
            request.allocation.reset();
        }
        may && enough
    }

    /// Starts the reads of a request's pages.
    fn start(&mut self, owner: usize, followed: bool, mut filling: Filling) {
        let list = filling.take_frames(self.policy.keeps_frames_in_order());
        let mut frames = list.iter().copied();
        let shape = self.io.shape();
        let mut run = self.reads.list();
        let (mut first, mut segments) = (0, 0);
        for page in filling.pages() {
            if frames.len() == 0 {
                break;
            }
            // Others may have begun to read it meanwhile.
            if !self.is_absent(page) {
                continue;
            }
            let Some(frame) = frames.next() else { break };
            let adjoins = !run.is_empty() && first + run.len() as u64 == page;
            if !adjoins || !shape.fits(&run, segments, frame) {
                let next = self.reads.list();
                let full = std::mem::replace(&mut run, next);
                self.start_run(first, full, (owner, followed));
                (first, segments) = (page, 0);
            }
            segments += usize::from(run.last().is_none_or(|&l| l + 1 != frame));
            run.push(frame);
            self.memory.place(page, frame, true);
            if filling.is_marked(page) {
                self.memory.mark(frame);
            }
            if filling.is_ahead(page) {
                self.reads.count_ahead();
                self.memory.set_ahead(frame);
            }
        }
        self.start_run(first, run, (owner, followed));
        // Without any frame, the request that comes to the window's first page tries again.
        let mark = filling.earlier_mark().filter(|_| !list.is_empty());
        if let Some(frame) = mark.and_then(|page| self.memory.find(page)) {
            self.memory.mark(frame);
        }
        self.memory.give_up(owner, frames);
        self.reads.keep_list(list);
    }

    fn start_run(&mut self, first: u64, run: Vec<u32>, (owner, followed): (usize, bool)) {
        match run.is_empty() {
            true => self.reads.keep_list(run),
            false => self.io.read(first, run, owner, followed),
        }
    }

    /// A read of the device has ended.
    pub(in crate::core) fn read_ended(&mut self, first: u64, frames: Vec<u32>, status: Status) {
        let alone = frames.len() == 1;
        if status != Status::Ok {
            self.reads.count_error();
        }
        for (page, &frame) in (first..).zip(&frames) {
            if status == Status::Ok {
                self.memory.read(frame);
            } else if !alone && self.waiters.any(frame) {
                // One page that can't be read isn't all of them.
                self.memory.unmark(frame);
                let waiting = self.waiters.newest(frame);
                let waiting = waiting.and_then(|number| self.requests.get(number));
                let whom = waiting.map_or((BACKGROUND, false), |r| (r.owner, r.request.followed));
                let mut one = self.reads.list();
                one.push(frame);
                self.io.read(page, one, whom.0, whom.1);
                continue;
            } else {
                self.memory.drop_page(frame);
            }
            let chain = self.waiters.detach(frame);
            self.page_is_there(chain, frame, status);
        }
        self.reads.keep_list(frames);
    }

    /// The requests that waited for a page go on: it is there, or can't be read.
    pub(in crate::core) fn page_is_there(&mut self, chain: Chain, frame: u32, status: Status) {
        if chain.is_empty() {
            return;
        }
        let all = self.waiters.drain(chain);
        // All take their data before anyone goes on: a request that does may need memory, and reclaim this frame.
        for &(number, page) in &all {
            let Some(request) = self.requests.get_mut(number) else {
                continue;
            };
            // An entry without a page may be of a request that is done, and had waited twice.
            if request.kind == Kind::Read && page != NO_PAGE {
                request.pending -= 1;
                match status {
                    Status::Ok => {
                        let ahead = give(&mut self.memory, request, page, frame);
                        self.reads.count_use(ahead);
                    }
                    _ => request.status = status,
                }
            } else if status != Status::Ok && matches!(request.kind, Kind::Write { .. }) {
                // A write of a part that needs the rest.
                (request.status, request.at) = (status, request.end);
            }
        }
        for &(number, _) in &all {
            let Some(request) = self.requests.get(number) else {
                continue;
            };
            let goes_on = match request.kind {
                // A parked one goes on in its turn; and not for each of many pages.
                Kind::Read => {
                    let waits = request.at < request.end && request.pending >= MOST_PENDING / 2;
                    !request.is_parked() && request.filling.is_none() && !waits
                }
                _ => true,
            };
            if goes_on {
                self.go_on(number);
            }
        }
        self.waiters.keep(all);
    }
}
