//! Runs of dirty pages: which are written together.

use super::{DeviceIo, State, WriteBack};
use crate::core::ranges::Ranges;
use pvblk_block::planted::{Plant, has};

/// Where writes go: the device, but for the ranges that it discards, and the queue that is to submit them.
pub struct Below<'a> {
    pub io: &'a mut DeviceIo,
    pub ranges: &'a Ranges,
    pub runner: usize,
    /// The request that they are for is followed by traces.
    pub followed: bool,
}

impl WriteBack {
    /// The dirty frame of a page, if the page may be written now; and whether it is to be written with FUA.
    fn writable(&self, page: u64, ranges: &Ranges) -> Option<(u32, bool)> {
        let frame = *self.dirty.get(&page)?;
        let f = &self.frames[frame as usize];
        let behind = f.behind && !has(Plant::BehindNotAwaited);
        let waits = behind || ranges.is_sent(page);
        (!waits).then_some((frame, f.fua))
    }

    /// Writes a run of dirty pages that begins at `page` and ends before `end`. Returns how many pages it has; 0: none can be written from there now.
    pub(super) fn start(&mut self, page: u64, end: u64, below: &mut Below) -> u64 {
        let Some((frame, fua)) = self.writable(page, below.ranges) else {
            return 0;
        };
        let shape = below.io.shape();
        let mut run = self.spare.pop().unwrap_or_default();
        run.push(frame);
        let mut segments = 1;
        let mut next = page + 1;
        while next < end
            && let Some((frame, its_fua)) = self.writable(next, below.ranges)
            && its_fua == fua
            && shape.fits(&run, segments, frame)
        {
            segments += usize::from(run.last().is_none_or(|&l| l + 1 != frame));
            run.push(frame);
            next += 1;
        }
        // To the end of a row, if one is among them; the rest is written with what follows.
        let row = next / self.row_pages * self.row_pages;
        if next < end && row > page && next - page >= self.io_pages {
            run.truncate((row - page) as usize);
        }
        let pages = run.len() as u64;
        for (page, &frame) in (page..).zip(&run) {
            self.dirty.remove(&page);
            self.frames[frame as usize].state = State::Writing;
        }
        self.writing += run.len();
        self.ios += 1;
        below.io.write(fua, page, run, below.runner, below.followed);
        pages
    }

    /// Writes the dirty ones of these pages, for a request that waits for it.
    pub fn write_out(&mut self, mut page: u64, end: u64, mut below: Below) {
        while let Some((&first, _)) = self.dirty.range(page..end).next() {
            page = first + self.start(first, end, &mut below).max(1);
        }
    }

    /// Takes the pages that are to be written as soon as their older versions are, which they are now.
    pub fn take_urgent(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.urgent)
    }

    /// The request that waits for a dirty page to be written: one that wrote it, else the oldest flush.
    pub fn waits_for(&self, page: u64) -> Option<u32> {
        let frame = *self.dirty.get(&page)?;
        let flush = || Some(self.flushes.first()?.request);
        self.syncs.newest(frame).or_else(flush)
    }
}
