//! The in-flight area's record of writes that no flush covers. By it a server that comes after us knows whether they may be lost,
//! and makes the front end's next flush fail if so (`pvblk_backend::LostWrites`).
//!
//! ```text
//! behind all queues, u64 each      magic "pvblkvu1" · flags (1: has a contents mark) · contents mark
//!   since the second release       magic "pvblkca1" · cache mark · flags (1: has epochs) · last covered epoch · 0
//!   then each queue                epoch of its last answered write
//! ```
//!
//! Each flush ends an epoch when it is taken, and covers it when it succeeds. A queue notes the epoch that it is before an answer to
//! a write becomes visible. So a write whose epoch is covered was answered before a flush was submitted that succeeded.
//!
//! The front end can change all of it. It harms only itself with that.

use pvblk_backend::LostWrites;
use pvblk_block::{BlockDevice, Error, Region};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

const MAGIC: u64 = u64::from_le_bytes(*b"pvblkvu1");
const CACHE_MAGIC: u64 = u64::from_le_bytes(*b"pvblkca1");
/// Bytes of the words before the queues' epochs; areas of the first release end here.
pub(super) const MARK: usize = 64;

// Words of the mark.
const CONTENTS_FLAGS: usize = 1;
const CONTENTS: usize = 2;
const CACHE: usize = 3;
const CACHE_MARK: usize = 4;
const CACHE_FLAGS: usize = 5;
const COVERED: usize = 6;

/// Bytes behind the queues of an area.
pub(super) fn tail_bytes(queues: u16) -> usize {
    MARK + (8 * usize::from(queues)).next_multiple_of(64)
}

/// Marks of a disk's content and of its cache; they change when something may be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    /// Changes when everything is lost; `None`: it doesn't end with the process.
    pub contents: Option<u64>,
    /// Changes when completed writes that were not flushed may be lost; `None`: there are none, each write is stable.
    pub cache: Option<u64>,
}

impl Marks {
    /// Those of a device now. One that doesn't know about its cache counts as bound to this process.
    pub fn of(device: &dyn BlockDevice) -> Marks {
        static PROCESS: OnceLock<u64> = OnceLock::new();
        let process = || *PROCESS.get_or_init(|| RandomState::new().hash_one(0));
        let incarnation = device.incarnation();
        let volatile = device.limits().volatile_cache;
        Marks {
            contents: incarnation.contents,
            cache: volatile.then(|| incarnation.cache.unwrap_or_else(process)),
        }
    }
}

/// The words of an area behind its queues.
#[derive(Clone, Debug)]
struct Words {
    region: Arc<Region>,
    at: usize,
    queues: u16,
}

impl Words {
    fn word(&self, index: usize) -> &AtomicU64 {
        self.region.atomic_u64(self.at + 8 * index)
    }

    fn get(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Acquire)
    }

    fn set(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Release);
    }

    fn epoch(&self, queue: u16) -> &AtomicU64 {
        self.word(MARK / 8 + usize::from(queue))
    }

    fn has_epochs(&self) -> bool {
        self.get(CACHE) == CACHE_MAGIC && self.get(CACHE_FLAGS) & 1 != 0
    }

    /// The epoch of the last answered write of all queues.
    fn last(&self) -> u64 {
        let all = (0..self.queues).map(|q| self.epoch(q).load(Ordering::Acquire));
        all.max().unwrap_or(0)
    }

    /// From now on the marks are these; the epochs are covered up to `covered`.
    fn set_cache(&self, cache: Option<u64>, covered: u64) {
        self.word(COVERED).fetch_max(covered, Ordering::AcqRel);
        self.set(CACHE_MARK, cache.unwrap_or(0));
        self.set(CACHE, CACHE_MAGIC);
    }
}

/// The epochs of an area, as its queues share them.
#[derive(Debug)]
pub(super) struct Unflushed {
    /// `None`: the area has no place for them.
    words: Option<Words>,
    epoch: AtomicU64,
}

impl Unflushed {
    /// Those of a fresh area of zeros with this offset for the mark.
    pub fn create(region: &Arc<Region>, at: usize, queues: u16, marks: Marks) -> Unflushed {
        let region = Arc::clone(region);
        let words = Words { region, at, queues };
        words.set(CONTENTS_FLAGS, u64::from(marks.contents.is_some()));
        words.set(CONTENTS, marks.contents.unwrap_or(0));
        words.set(0, MAGIC);
        words.set(CACHE_FLAGS, 1);
        words.set_cache(marks.cache, 0);
        Unflushed {
            words: Some(words),
            epoch: AtomicU64::new(1),
        }
    }

    /// Those of an area that a front end kept and that has `room` bytes behind its queues; with the losses that the front
    /// end has to be told of. Errors if the disk's contents are lost.
    pub fn take_over(
        region: &Arc<Region>,
        at: usize,
        queues: u16,
        room: usize,
        marks: Marks,
    ) -> Result<(Unflushed, Option<Arc<LostWrites>>), Error> {
        let none = Unflushed {
            words: None,
            epoch: AtomicU64::new(1),
        };
        let region = Arc::clone(region);
        let words = Words { region, at, queues };
        if room < MARK || words.get(0) != MAGIC {
            // Another program made it, and doesn't say for which disk.
            return Ok((none, marks.cache.map(|_| LostWrites::new(|| {}))));
        }
        let made_for = (words.get(CONTENTS_FLAGS) != 0).then(|| words.get(CONTENTS));
        if made_for.is_some() && made_for != marks.contents {
            return Err(Error::protocol(
                "the disk's contents are lost: they ended with the server that the guest was connected to; stop the guest",
            ));
        }
        let epochs = room >= tail_bytes(queues) && words.has_epochs();
        let last = if epochs { words.last() } else { 0 };
        let is_dirty = !epochs || last > words.get(COVERED);
        let is_same = match words.get(CACHE) == CACHE_MAGIC {
            true => marks.cache == Some(words.get(CACHE_MARK)),
            // The first release left no mark. The area is memory of this boot, so a mark that is the boot's hasn't changed.
            false => marks.cache == pvblk_sys::boot_mark(),
        };
        let lost = match marks.cache {
            Some(_) if is_dirty && !is_same => {
                let (words, cache) = (words.clone(), marks.cache);
                Some(LostWrites::new(move || words.set_cache(cache, last)))
            }
            _ => {
                words.set_cache(marks.cache, 0);
                None
            }
        };
        let next = words.get(COVERED).max(last).saturating_add(1);
        let taken = Unflushed {
            words: epochs.then_some(words),
            epoch: AtomicU64::new(next),
        };
        Ok((taken, lost))
    }

    /// A write of `queue` is answered, which isn't visible yet. `noted` is the queue's own: the epoch that it noted last, 0 at first.
    #[inline]
    pub fn wrote(&self, queue: u16, noted: &mut u64) {
        let epoch = self.epoch.load(Ordering::Acquire);
        if *noted == epoch {
            return;
        }
        *noted = epoch;
        if let Some(words) = &self.words {
            words.epoch(queue).store(epoch, Ordering::Release);
        }
    }

    /// A flush was taken: the epoch that it covers if it succeeds.
    pub fn flush(&self) -> u64 {
        self.epoch.fetch_add(1, Ordering::AcqRel)
    }

    /// A flush succeeded.
    pub fn flushed(&self, epoch: u64) {
        if let Some(words) = &self.words {
            words.word(COVERED).fetch_max(epoch, Ordering::AcqRel);
        }
    }
}
