//! The journal of the writes that were sent, completed and flushed: a file that all processes of
//! the experiment map, so it outlives the killed ones.

use anyhow::{Context, Result, ensure};
use pvblk_block::Region;
use pvblk_sys::PAGE_SIZE;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// For each sector of the disk, the writes that it may hold; also the number of requests done, and the number
/// of the next write.
///
/// Writes are numbered in the order in which they are sent, and a sector has one in flight at most. `sent` is
/// set before a write goes out, `done` when it has completed, `stable` after a flush that covers it. So a
/// disk that loses nothing with its server holds `done` or `sent`, whenever a process is killed. A disk with
/// a volatile cache may fall back, when its server is killed, to any write from `stable` on. A write with a
/// number from [`Journal::floor`] on was sent after the last kill. A write that was read since then (`seen`)
/// stays.
pub struct Journal {
    region: Region,
    sectors: u64,
}

const OPERATIONS: usize = 0;
const NEXT: usize = 4;
const FLOOR: usize = 8;
const HEADER: usize = PAGE_SIZE;
const ENTRY: usize = 16;

const DONE: usize = 0;
const SENT: usize = 4;
const STABLE: usize = 8;
const SEEN: usize = 12;

impl Journal {
    /// A journal of a disk of zeros, in a new file.
    pub fn create(path: &Path, sectors: u64) -> Result<Journal> {
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .with_context(|| format!("making {}", path.display()))?;
        let bytes = HEADER + sectors as usize * ENTRY;
        file.set_len(bytes.next_multiple_of(PAGE_SIZE) as u64)?;
        let journal = Journal::map(&file, sectors)?;
        journal.word(NEXT).store(1, Ordering::Relaxed);
        Ok(journal)
    }

    /// The journal in `path`.
    pub fn open(path: &Path, sectors: u64) -> Result<Journal> {
        let file = File::options().read(true).write(true).open(path)?;
        Journal::map(&file, sectors)
    }

    fn map(file: &File, sectors: u64) -> Result<Journal> {
        let len = file.metadata()?.len() as usize;
        ensure!(
            len >= HEADER + sectors as usize * ENTRY,
            "the journal is too short"
        );
        let region = Region::shared(file.as_fd(), 0, len, true)?;
        Ok(Journal { region, sectors })
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        self.region.atomic_u32(at)
    }

    fn entry(&self, sector: u64, part: usize) -> &AtomicU32 {
        assert!(sector < self.sectors, "a sector outside the disk");
        self.word(HEADER + sector as usize * ENTRY + part)
    }

    /// Requests completed so far, in all processes.
    pub fn operations(&self) -> u32 {
        self.word(OPERATIONS).load(Ordering::Relaxed)
    }

    /// Counts one completed request.
    pub fn count(&self) {
        self.word(OPERATIONS).fetch_add(1, Ordering::Relaxed);
    }

    /// A number for a write, larger than all before.
    pub fn next(&self) -> u32 {
        self.word(NEXT).fetch_add(1, Ordering::AcqRel)
    }

    /// Notes that the server was killed. The next one must not have started.
    pub fn killed(&self) {
        let floor = self.next();
        self.word(FLOOR).store(floor, Ordering::Release);
    }

    /// Writes from this number on were sent after the last server was killed.
    pub fn floor(&self) -> u32 {
        self.word(FLOOR).load(Ordering::Acquire)
    }

    /// Notes that write `number` to `sector` is about to be submitted.
    pub fn sent(&self, sector: u64, number: u32) {
        self.entry(sector, SENT).store(number, Ordering::Release);
    }

    /// Notes that write `number` to `sector` has completed.
    pub fn done(&self, sector: u64, number: u32) {
        self.entry(sector, DONE).store(number, Ordering::Release);
    }

    /// Notes that write `number` to `sector` is stable.
    pub fn stable(&self, sector: u64, number: u32) {
        self.entry(sector, STABLE)
            .fetch_max(number, Ordering::AcqRel);
    }

    /// Notes that write `number` was read from `sector`, which has nothing in flight, by a request that was
    /// sent when the floor was `floor`.
    pub fn saw(&self, sector: u64, number: u32, floor: u32) {
        self.entry(sector, SENT).store(number, Ordering::Relaxed);
        self.entry(sector, DONE).store(number, Ordering::Relaxed);
        self.entry(sector, SEEN).store(floor, Ordering::Release);
    }

    /// The last completed write of `sector`.
    pub fn completed_write(&self, sector: u64) -> CompletedWrite {
        let seen = self.entry(sector, SEEN).load(Ordering::Acquire);
        let done = self.entry(sector, DONE).load(Ordering::Acquire);
        CompletedWrite {
            sector,
            number: done,
            at: done.max(seen),
        }
    }

    /// The writes that `sector` may hold.
    pub fn allowed(&self, sector: u64) -> Allowed {
        let load = |part| self.entry(sector, part).load(Ordering::Acquire);
        let (done, sent, stable, seen) = (load(DONE), load(SENT), load(STABLE), load(SEEN));
        let floor = self.floor();
        Allowed {
            done,
            sent,
            stable,
            is_sure: done >= floor || seen == floor,
        }
    }
}

/// A sector's last completed write, as it was when a flush was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletedWrite {
    pub sector: u64,
    pub number: u32,
    /// The number, or the floor at which the write was read, whichever is larger.
    at: u32,
}

impl CompletedWrite {
    /// True if the write was sent or seen since the floor was `floor`: the kill of an earlier server can't
    /// have lost it.
    pub fn is_since(&self, floor: u32) -> bool {
        self.at >= floor
    }
}

/// The writes that a sector may hold.
#[derive(Clone, Copy, Debug)]
pub struct Allowed {
    /// Number of the last completed write.
    pub done: u32,
    /// Number of the last write that was sent.
    pub sent: u32,
    /// Number of the last write that a flush covers.
    pub stable: u32,
    /// No server was killed since `done` was sent or seen.
    is_sure: bool,
}

impl Allowed {
    /// True if the sector may hold write `number`. `keeps`: the disk loses nothing with its server.
    /// `settles`: the disk may hold the write that was sent last, or not.
    pub fn holds(&self, number: u32, keeps: bool, settles: bool) -> bool {
        let fell_back = !keeps && !self.is_sure && (self.stable..=self.sent).contains(&number);
        number == self.done || (settles && number == self.sent) || fell_back
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journal() -> (tempfile::TempDir, Journal) {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::create(&dir.path().join("journal"), 8).unwrap();
        (dir, journal)
    }

    fn write(journal: &Journal, sector: u64) -> u32 {
        let number = journal.next();
        journal.sent(sector, number);
        journal.done(sector, number);
        number
    }

    #[test]
    fn a_disk_that_keeps_its_writes_holds_the_last_one() {
        let (_dir, journal) = journal();
        let old = write(&journal, 3);
        let new = write(&journal, 3);
        journal.killed();
        assert!(journal.allowed(3).holds(new, true, false));
        assert!(!journal.allowed(3).holds(old, true, true));
        let unknown = journal.next();
        journal.sent(3, unknown);
        assert!(!journal.allowed(3).holds(unknown, true, false));
        assert!(journal.allowed(3).holds(unknown, true, true));
    }

    #[test]
    fn a_volatile_cache_falls_back_only_at_a_kill_and_not_behind_a_flush() {
        let (_dir, journal) = journal();
        let flushed = write(&journal, 3);
        journal.stable(3, flushed);
        let middle = write(&journal, 3);
        let last = write(&journal, 3);
        assert!(!journal.allowed(3).holds(middle, false, true));
        journal.killed();
        for number in [flushed, middle, last] {
            assert!(journal.allowed(3).holds(number, false, false));
        }
        assert!(!journal.allowed(3).holds(flushed - 1, false, true));
        // A write that was read stays.
        journal.saw(3, middle, journal.floor());
        assert!(!journal.allowed(3).holds(flushed, false, true));
        let completed = journal.completed_write(3);
        assert_eq!(completed.number, middle);
        assert!(completed.is_since(journal.floor()));
        journal.killed();
        assert!(journal.allowed(3).holds(flushed, false, false));
        assert!(!completed.is_since(journal.floor()));
    }
}
