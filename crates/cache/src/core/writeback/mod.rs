//! Write-back: frames whose data is newer than the device's, and what a flush waits for.

mod background;
mod check;
mod flush;
mod runs;
mod throttle;

pub use flush::Flush;
pub use runs::Below;
pub use throttle::{Admission, Throttle};

use super::device_io::DeviceIo;
use super::waiters::{Chain, Waiters};
use crate::config::{CacheConfig, Mode, PAGE_BYTES};
use crate::counters::Counters;
use background::Background;
use pvblk_block::Limits;
use pvblk_block::planted::{Plant, has};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Writes at the device that count as congestion.
const CONGESTED: usize = 16;
/// A page that couldn't be written is left alone for this long, unless a flush wants it.
const RETRY: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The device has the frame's data, or the frame has none.
    Clean,
    Dirty,
    /// At the device.
    Writing,
}

#[derive(Clone, Copy, Debug)]
struct Frame {
    /// Number under which it became dirty.
    epoch: u64,
    state: State,
    /// An older version of the page is being written, from another frame.
    behind: bool,
    /// It has a copy of data of that older version.
    copied: bool,
    /// It is the older version: another frame has the page.
    old: bool,
    /// It could not be written.
    failed: bool,
    /// A request waits for its write with FUA.
    fua: bool,
}

impl Frame {
    const CLEAN: Frame = Frame {
        epoch: 0,
        state: State::Clean,
        behind: false,
        copied: false,
        old: false,
        failed: false,
        fua: false,
    };
}

/// The outcome of a write of one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The device has the page.
    Clean,
    /// The device refused it and nobody was told that it was written: the page is to be dropped.
    Dropped,
    /// It is dirty as before, and flushes that cover it fail.
    Failed,
    /// The older version of a page was written, or couldn't be: its frame is to be freed.
    Old,
}

/// A write of one frame that has ended.
pub struct Written {
    pub outcome: Outcome,
    /// Number under which the data became dirty.
    pub epoch: u64,
    /// Requests that are done, or have failed, with this write.
    pub syncs: Chain,
}

/// The write-back machine. It owns the dirty state of each frame and knows nothing of memory, lists or requests, but for their numbers.
///
/// ```text
/// clean ──dirty──▶ dirty ──start──▶ writing ──ok──▶ clean
///                    ▲                 │ error
///                    └─────────────────┘ (write-through: clean, and the page is dropped)
/// writing, and the page is written to: the frame is the old version, the page's new frame is behind it
/// ```
///
/// **Events in:** a page became dirty; it has another frame; a request waits for its write (`sync`); a write ended; a flush began; reclaim found dirty pages;
/// time went on. **Out:** writes at [`DeviceIo`]; the outcome of each frame's write; flushes that nothing keeps any more.
///
/// **Invariants.**
/// - `dirty` has the frames in the state dirty, by page, and no others; `writing` counts those in the state writing, old versions included.
/// - *A flush covers everything that was written before it.* `epochs` counts the frames that are dirty or being written under each number. A flush takes the
///   present number, which is raised then, and is passed on when no frame is left under that number or an older one.
/// - Two writes of a page are never at the device together: a frame that is behind isn't written until the old version has ended.
/// - If the old version couldn't be written, the new one takes its number, since only it has the data.
/// - With write-through, no frame keeps data that the device has refused: a new version with a copy of such data is dropped, too.
/// - A frame that somebody waits for is dirty or being written.
/// - Nothing in a range that the device discards is written meanwhile.
/// - Background writes are bounded by `DEPTH`, those for flushes by `FLUSH_DEPTH`; dirty pages by the throttle.
///
/// **Failure.** An error makes a frame dirty again: flushes that cover it fail, and each later one tries it again; in the background it is tried after a second.
pub struct WriteBack {
    frames: Box<[Frame]>,
    dirty: BTreeMap<u64, u32>,
    /// Frames being written, and I/Os that do it.
    writing: usize,
    ios: usize,
    /// Numbers under which frames became dirty that are not written yet, and how many.
    epochs: BTreeMap<u64, u32>,
    epoch: u64,
    /// Requests that are done when a frame is written.
    syncs: Waiters,
    flushes: Vec<Flush>,
    /// The page at which the flushes' search for dirty pages goes on.
    flush_at: u64,
    /// Pages to be written as soon as they can be.
    urgent: Vec<u64>,
    background: Background,
    /// Nothing is written in the background before this time: the last write failed.
    retry_at: Instant,
    writes_through: bool,
    /// Dirty frames from which on they are written in the background, and from which on writers wait.
    background_from: usize,
    throttle_from: usize,
    expire: Duration,
    /// Pages of the largest I/O that was configured, and of one row of an array below.
    io_pages: u64,
    row_pages: u64,
    spare: Vec<Vec<u32>>,
    counters: Counters,
}

impl WriteBack {
    /// Bytes for each frame.
    pub const FRAME_BYTES: usize = size_of::<Frame>() + Waiters::FRAME_BYTES;

    pub fn new(config: &CacheConfig, limits: &Limits, now: Instant) -> WriteBack {
        let frames = config.frames();
        let share = |percent: u8| (frames * usize::from(percent) / 100).max(1);
        WriteBack {
            frames: vec![Frame::CLEAN; frames].into(),
            dirty: BTreeMap::new(),
            writing: 0,
            ios: 0,
            epochs: BTreeMap::new(),
            epoch: 1,
            syncs: Waiters::new(frames),
            flushes: Vec::new(),
            flush_at: 0,
            urgent: Vec::new(),
            background: Background::default(),
            retry_at: now,
            writes_through: config.mode == Mode::WriteThrough,
            background_from: share(config.dirty_background_percent),
            throttle_from: share(config.dirty_percent),
            expire: config.dirty_expire,
            io_pages: u64::from(config.max_io_bytes) / PAGE_BYTES as u64,
            row_pages: (u64::from(limits.optimal_bytes) / PAGE_BYTES as u64).max(1),
            spare: Vec::new(),
            counters: Counters::default(),
        }
    }

    pub fn counters(&self) -> Counters {
        Counters {
            nr_dirty: self.dirty.len() as u64,
            nr_writeback: self.writing as u64,
            ..self.counters
        }
    }

    /// True if every write waits for the device.
    pub fn writes_through(&self) -> bool {
        self.writes_through
    }

    pub fn is_clean(&self, frame: u32) -> bool {
        self.frames[frame as usize].state == State::Clean
    }

    pub fn is_dirty(&self, frame: u32) -> bool {
        self.frames[frame as usize].state == State::Dirty
    }

    pub fn is_writing(&self, frame: u32) -> bool {
        self.frames[frame as usize].state == State::Writing
    }

    /// True if a write of the frame, or of its older version, will end, or a request waits for one.
    pub fn is_busy(&self, frame: u32) -> bool {
        let f = &self.frames[frame as usize];
        f.state == State::Writing || f.behind || self.syncs.any(frame)
    }

    /// True if the frame is dirty because its last write failed.
    pub fn has_failed(&self, frame: u32) -> bool {
        let f = &self.frames[frame as usize];
        f.state == State::Dirty && f.failed
    }

    /// True if only its data would go with the frame: it is dirty, and no request or write waits for it.
    pub fn could_be_lost(&self, frame: u32) -> bool {
        self.is_dirty(frame) && !self.is_busy(frame)
    }

    /// True if the device has everything, though perhaps in its cache.
    pub fn has_nothing_unwritten(&self) -> bool {
        self.epochs.is_empty()
    }

    pub fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Frames that the device hasn't got yet.
    pub fn unwritten_frames(&self) -> usize {
        self.dirty.len() + self.writing
    }

    /// True if the device has many writes of the cache.
    pub fn is_congested(&self) -> bool {
        self.ios >= CONGESTED
    }

    /// The data of a frame, which holds `page`, has changed.
    pub fn make_dirty(&mut self, page: u64, frame: u32) {
        let f = &mut self.frames[frame as usize];
        f.failed = false;
        if f.state != State::Clean {
            return;
        }
        (f.state, f.epoch) = (State::Dirty, self.epoch);
        self.dirty.insert(page, frame);
        *self.epochs.entry(self.epoch).or_default() += 1;
        self.counters.pages_dirtied += 1;
    }

    /// The page in `old`, which is being written, moves to `new`, which is clean and about to be written to. `copies`: with data of `old`.
    pub fn supersede(&mut self, old: u32, new: u32, copies: bool) {
        debug_assert!(self.is_writing(old) && self.is_clean(new));
        self.frames[old as usize].old = true;
        let new = &mut self.frames[new as usize];
        (new.behind, new.copied) = (true, copies);
    }

    /// A request is done when `frame` has been written, which is dirty.
    pub fn sync(&mut self, page: u64, frame: u32, request: u32, fua: bool) {
        self.frames[frame as usize].fua |= fua;
        self.syncs.add(frame, request, page);
    }

    /// A dirty frame isn't any more, though its data was not written.
    pub fn forget(&mut self, page: u64, frame: u32) {
        let f = std::mem::replace(&mut self.frames[frame as usize], Frame::CLEAN);
        self.dirty.remove(&page);
        self.count_down(f.epoch);
    }

    fn count_down(&mut self, epoch: u64) {
        if let Some(count) = self.epochs.get_mut(&epoch) {
            *count -= 1;
            if *count == 0 {
                self.epochs.remove(&epoch);
            }
        }
    }

    /// A write of pages has ended; each of them is to be given to [`WriteBack::written`].
    pub fn io_ended(&mut self, ok: bool, now: Instant) {
        self.ios -= 1;
        if !ok {
            self.retry_at = now + RETRY;
        }
    }

    /// The frame of a page has been written, or not.
    pub fn written(&mut self, page: u64, frame: u32, ok: bool) -> Written {
        self.writing -= 1;
        match ok {
            true => self.counters.pages_written += 1,
            false => self.counters.write_errors += 1,
        }
        let f = &mut self.frames[frame as usize];
        let (epoch, old) = (f.epoch, f.old);
        let outcome = match ok {
            _ if old => Outcome::Old,
            true => Outcome::Clean,
            // The device has what it had: nobody was told otherwise.
            false if self.writes_through => Outcome::Dropped,
            false => Outcome::Failed,
        };
        if outcome == Outcome::Failed {
            (f.state, f.failed, f.fua) = (State::Dirty, true, false);
            self.dirty.insert(page, frame);
        } else {
            *f = Frame::CLEAN;
            self.count_down(epoch);
        }
        Written {
            outcome,
            epoch,
            syncs: self.syncs.detach(frame),
        }
    }

    /// The older version of a page, which became dirty under `epoch`, is not at the device any more: the page's frame isn't behind it now.
    ///
    /// `Some`: with write-through, it has a copy of data that the device has refused. The page is to be dropped, and these requests, which wait for its write, fail, too.
    #[must_use]
    pub fn old_version_ended(
        &mut self,
        page: u64,
        frame: u32,
        epoch: u64,
        ok: bool,
    ) -> Option<Chain> {
        let f = &mut self.frames[frame as usize];
        f.behind = false;
        let has_refused_data = std::mem::take(&mut f.copied) && !ok && self.writes_through;
        let is_awaited = self.syncs.any(frame);
        if has(Plant::RedirtiedIsClean) && self.is_dirty(frame) && !is_awaited {
            self.forget(page, frame);
        }
        let wanted = self.newest_flush();
        let f = &mut self.frames[frame as usize];
        if f.state != State::Dirty {
            return None;
        }
        if has_refused_data {
            self.forget(page, frame);
            return Some(self.syncs.detach(frame));
        }
        if !ok && f.epoch > epoch {
            let newer = std::mem::replace(&mut f.epoch, epoch);
            self.count_down(newer);
            *self.epochs.entry(epoch).or_default() += 1;
        }
        if is_awaited || self.frames[frame as usize].epoch <= wanted {
            self.urgent.push(page);
        }
        None
    }

    /// Ends a chain of requests that waited for a write.
    pub fn drain(&mut self, syncs: Chain) -> Vec<(u32, u64)> {
        self.syncs.drain(syncs)
    }

    /// Keeps the memory of a drained list.
    pub fn keep(&mut self, list: Vec<(u32, u64)>) {
        self.syncs.keep(list);
    }

    /// Keeps the memory of a run of frames that has ended.
    pub fn keep_run(&mut self, mut run: Vec<u32>) {
        run.clear();
        self.spare.push(run);
    }
}
