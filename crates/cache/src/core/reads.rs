//! Reads of the device: which pages go together, how many at a time, and what is read in advance.

use crate::config::{CacheConfig, PAGE_BYTES};
use crate::counters::Counters;
use crate::pace::Pace;
use crate::policy::Policy;
use crate::readahead::{Hint, Plan, Readers, STREAMS, Sizes, Window};
use pvblk_block::Limits;
use std::time::Instant;

/// Most pages that are allocated for one request at a time.
const MOST_AT_ONCE: u64 = 256;

/// Pages to be read for a request, and the frames that it has got for them.
pub struct Filling {
    plan: Plan,
    /// The next page to get a frame for.
    at: u64,
    /// The first page that nobody asked for.
    optional: u64,
    frames: Vec<u32>,
}

impl Filling {
    /// The next page before `last` that needs a frame; `None`: all pages have one.
    pub fn next(&mut self, last: u64, is_absent: impl Fn(u64) -> bool) -> Option<u64> {
        let last = self.plan.end.min(last);
        self.at = (self.at..last)
            .find(|&p| is_absent(p))
            .unwrap_or(last.max(self.at));
        (self.at < last).then_some(self.at)
    }

    /// A frame for the page that [`Filling::next`] returned.
    pub fn got(&mut self, frame: u32) {
        self.frames.push(frame);
        self.at += 1;
    }

    /// Leaves out the pages from `last` on; if it is `complete`, also those without frames.
    pub fn cut(&mut self, last: u64, complete: bool) {
        self.plan.end = self.plan.end.min(last);
        if complete {
            self.plan.end = self.plan.end.min(self.at);
        }
    }

    /// True if it has frames for half of its pages at least.
    pub fn has_half(&self) -> bool {
        2 * (self.at - self.plan.start) >= self.plan.end - self.plan.start
    }

    /// True if it has frames for all pages that were asked for.
    pub fn has_wanted(&self) -> bool {
        self.at >= self.optional
    }

    /// Number of its frames.
    pub fn held(&self) -> usize {
        self.frames.len()
    }

    /// True if the page is read in advance.
    pub fn is_ahead(&self, page: u64) -> bool {
        page >= self.optional
    }

    /// Its pages, some of which may be there by now.
    pub fn pages(&self) -> std::ops::Range<u64> {
        self.plan.start..self.plan.end
    }

    /// True if the page is to be marked.
    pub fn is_marked(&self, page: u64) -> bool {
        page == self.plan.mark
    }

    /// The page to be marked if it is one of an earlier window.
    pub fn earlier_mark(&self) -> Option<u64> {
        (self.plan.mark < self.plan.start).then_some(self.plan.mark)
    }

    /// Takes its frames, in rising order if `sorted`.
    pub fn take_frames(&mut self, sorted: bool) -> Vec<u32> {
        if sorted {
            self.frames.sort_unstable();
        }
        std::mem::take(&mut self.frames)
    }
}

/// Memory that reads may use now, and the number of requests that share it.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Frames for reads.
    pub frames: u64,
    /// Pages allocated so far, and those of them that were read in advance and lost.
    pub allocated: u64,
    pub lost: u64,
    /// Requests under way.
    pub requests: usize,
}

/// A stream's last window, and how large the next may be.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    window: Window,
    pace: Pace,
}

/// The read machine. It owns the windows of each queue's streams and the sizes that windows may have; it turns a miss or a mark into a plan.
///
/// **States:** a window for each of a queue's streams: none, or pages of which the last were read in advance; and its [`Pace`]. **Events in:** a page that a read or a part
/// of a write wants is absent; a marked page is read; both with the room that there is; a page that was read in advance is waited for. **Out:** a [`Filling`]: pages to be read for a request, which holds the frames
/// for them from then on until they are placed.
///
/// **Invariants.** A plan begins with the absent page or behind the mark. It has at most 256 pages that were asked for and a quarter of the frames; windows have at
/// most an eighth of the frames, a 32nd where they grow since a stream waits, and, where readers share, half of a reader's part. A write that needs the rest of its page gets one page.
pub struct Reads<P> {
    policy: P,
    frames: u64,
    /// Pages of the largest window, of the largest one of a stream that waits, and from how many on windows begin early.
    most_ahead: u64,
    most_of_waiting: u64,
    several: u64,
    /// Each owner's streams.
    streams: Vec<[Stream; STREAMS]>,
    readers: Readers,
    spare: Vec<Vec<u32>>,
    counters: Counters,
}

impl<P: Policy> Reads<P> {
    pub fn new(config: &CacheConfig, policy: P, limits: &Limits) -> Reads<P> {
        let frames = config.frames();
        let most_ahead = config.most_ahead(limits).min(frames as u64 / 8);
        // Two or three of them are on their way or being used; the rest of the cache is for what is read again.
        let most_of_waiting = config.most_ahead_of_waiting(limits);
        let most_of_waiting = most_of_waiting.min(frames as u64 / 32).max(most_ahead);
        Reads {
            policy,
            frames: frames as u64,
            most_ahead,
            most_of_waiting,
            several: 2 * u64::from(config.max_io_bytes) / PAGE_BYTES as u64,
            streams: vec![<[Stream; STREAMS]>::default()],
            readers: Readers::new(frames),
            spare: Vec::new(),
            counters: Counters::default(),
        }
    }

    /// A queue is opened that has this number.
    pub fn open(&mut self, owner: usize) {
        if self.streams.len() <= owner {
            self.streams
                .resize(owner + 1, <[Stream; STREAMS]>::default());
        }
        self.streams[owner] = <[Stream; STREAMS]>::default();
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Counts a page of a read that was found; `ahead`: it was the first use of a page read in advance.
    pub fn count_hit(&mut self, ahead: bool) {
        self.counters.hits += 1;
        self.count_use(ahead);
    }

    /// Counts a page of a read that was not found.
    pub fn count_miss(&mut self) {
        self.counters.misses += 1;
    }

    /// Counts the use of a page, if it was the first of one that was read in advance.
    pub fn count_use(&mut self, ahead: bool) {
        self.counters.readahead_used += u64::from(ahead);
    }

    /// Counts a page that is read in advance.
    pub fn count_ahead(&mut self) {
        self.counters.readahead_pages += 1;
    }

    /// Counts a read of the device that failed.
    pub fn count_error(&mut self) {
        self.counters.read_errors += 1;
    }

    /// The largest window of a stream: not so much of a small cache that pages are gone before they are used.
    fn sizes(&mut self, owner: usize, stream: u8, room: Room) -> Sizes {
        let pace = &self.streams[owner][usize::from(stream)].pace;
        let (own, is_early) = (
            pace.most(self.most_ahead, self.most_of_waiting),
            pace.is_early(),
        );
        let most = match self.policy.divides_frames() {
            true => {
                let all = self.most_of_waiting;
                let (allocated, lost) = (room.allocated, room.lost);
                let share = self
                    .readers
                    .window(owner, allocated, lost, all, room.frames);
                own.min(share)
            }
            false => self.most_ahead,
        };
        Sizes {
            most,
            several: if is_early { 1 } else { self.several },
        }
    }

    /// A read waits for a page that was read in advance and is on its way.
    pub fn waits_for_ahead(&mut self, owner: usize, hint: Hint) {
        self.streams[owner][usize::from(hint.stream)].pace.waits();
    }

    /// Pages that each request may have, where all that wait now get as many.
    fn share_of_each(&self, room: Room) -> u64 {
        match self.policy.divides_frames() {
            true => (room.frames / room.requests.max(1) as u64).max(1),
            false => u64::MAX,
        }
    }

    /// Number of pages, of `wanted` ones, that one request gets at a time. Where there isn't enough for all that wait now, they get parts, which are halves
    /// at most: it costs less to wait a little than to read a rest.
    fn at_once(&self, wanted: u64, room: Room) -> u64 {
        let most = wanted.min(MOST_AT_ONCE).min(self.frames / 4).max(1);
        most.div_ceil((most / self.share_of_each(room)).max(1))
    }

    /// True if the `pending` pages that a read waits for are all that it may have, though it wants more: a second part behind the first one at the
    /// device would keep pages from requests whose devices have nothing to do.
    pub fn has_its_share(&self, pending: u32, wanted: u64, room: Room) -> bool {
        pending > 0 && u64::from(pending) + self.at_once(wanted, room) > self.share_of_each(room)
    }

    /// The page `at` of a read isn't there, and `wanted` pages from there on are asked for.
    pub fn miss(&mut self, owner: usize, hint: Hint, at: u64, wanted: u64, room: Room) -> Filling {
        // Only readers in order share the room for windows.
        let sizes = match hint.sequential {
            true => self.sizes(owner, hint.stream, room),
            false => Sizes::default(),
        };
        let pages = self.at_once(wanted, room);
        let stream = &mut self.streams[owner][usize::from(hint.stream)];
        if !hint.sequential {
            stream.pace = Pace::default();
        }
        let plan = stream.window.miss(at, pages, hint.sequential, sizes);
        self.begin(plan, at + wanted)
    }

    /// A part of the page `at` is to be written, and the page isn't there: the rest is read first.
    pub fn miss_of_write(&mut self, at: u64) -> Filling {
        let plan = Plan {
            start: at,
            end: at + 1,
            mark: u64::MAX,
        };
        self.begin(plan, plan.end)
    }

    /// The marked page `at` is read. `None`: enough is there.
    pub fn marked(
        &mut self,
        owner: usize,
        hint: Hint,
        at: u64,
        (room, now): (Room, Instant),
        is_there: impl Fn(u64) -> bool,
    ) -> Option<Filling> {
        let bounds = (self.most_ahead, self.most_of_waiting);
        let stream = &mut self.streams[owner][usize::from(hint.stream)];
        if let Some(size) = stream.window.is_marked_at(at) {
            stream.pace.marked(at, now, size, bounds);
        }
        let sizes = self.sizes(owner, hint.stream, room);
        let behind = at + 1..=at + sizes.reach();
        let absent = || {
            let found = behind.clone().find(|&page| !is_there(page));
            found.unwrap_or(behind.end() + 1)
        };
        let stream = &mut self.streams[owner][usize::from(hint.stream)];
        let plan = stream.window.marked(at, absent, sizes)?;
        Some(self.begin(plan, plan.start))
    }

    fn begin(&mut self, plan: Plan, optional: u64) -> Filling {
        Filling {
            at: plan.start,
            plan,
            optional,
            frames: self.list(),
        }
    }

    /// An empty list for frames.
    pub fn list(&mut self) -> Vec<u32> {
        self.spare.pop().unwrap_or_default()
    }

    /// Keeps the memory of a list.
    pub fn keep_list(&mut self, mut list: Vec<u32>) {
        list.clear();
        self.spare.push(list);
    }
}
