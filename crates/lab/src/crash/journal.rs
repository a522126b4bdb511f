//! What a killed process knew: kept in a file that all processes of the experiment map.

use anyhow::{Context, Result, ensure};
use pvblk_block::Region;
use pvblk_sys::PAGE_SIZE;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// Per sector of the disk: which write it holds at least, and which it may hold. Also how much was done, and the
/// number of the next write.
///
/// `sent` is set before a write goes out and `done` after its answer came. A sector has one write in flight at most,
/// so it holds `done` or `sent`, and nothing else, whenever anybody is killed.
pub struct Journal {
    region: Region,
    sectors: u64,
}

const OPERATIONS: usize = 0;
const NEXT: usize = 4;
const HEADER: usize = PAGE_SIZE;
const ENTRY: usize = 8;

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

    fn entry(&self, sector: u64) -> usize {
        assert!(sector < self.sectors, "a sector outside the disk");
        HEADER + sector as usize * ENTRY
    }

    /// Requests answered so far, by all processes.
    pub fn operations(&self) -> u32 {
        self.word(OPERATIONS).load(Ordering::Relaxed)
    }

    /// One more is answered.
    pub fn count(&self) {
        self.word(OPERATIONS).fetch_add(1, Ordering::Relaxed);
    }

    /// A number for a write, larger than all before.
    pub fn next(&self) -> u32 {
        self.word(NEXT).fetch_add(1, Ordering::Relaxed)
    }

    /// Write `number` to `sector` is about to be submitted.
    pub fn sent(&self, sector: u64, number: u32) {
        self.word(self.entry(sector) + 4)
            .store(number, Ordering::Release);
    }

    /// It was answered.
    pub fn done(&self, sector: u64, number: u32) {
        self.word(self.entry(sector))
            .store(number, Ordering::Release);
    }

    /// What `sector` may hold: the last answered write, and the last one sent.
    pub fn allowed(&self, sector: u64) -> [u32; 2] {
        let at = self.entry(sector);
        [at, at + 4].map(|at| self.word(at).load(Ordering::Acquire))
    }
}
