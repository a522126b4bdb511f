//! Requests of the random runs.

use super::device::SECTOR;
use super::history::sector_of;
use super::{Asked, World, value};
use crate::STRIPE_SECTORS;
use pvblk_block::{Buffer, Op, Request, RequestFlags};

impl World {
    /// True if most writes follow the last one.
    fn streams(&self) -> bool {
        !self.runs && self.common.has_stripe_queues()
    }

    /// A queue gets a request.
    pub(super) fn ask(&mut self) {
        self.now += 1;
        self.ways.requests += 1;
        let queue = self.rng.usize(..self.queues.len());
        self.open(queue);
        let capacity = self.geometry.capacity_sectors();
        let op = match self.rng.u32(..24) {
            0..14 => Op::Write,
            14..19 => Op::Read,
            19..21 => Op::WriteZeroes,
            21 => Op::Discard,
            _ => Op::Flush,
        };
        let row = self.geometry.row_sectors();
        let rows_only = self.runs && self.rng.u32(..4) > 0;
        let (sector, sectors) = match self.rng.u32(..if rows_only { 2 } else { 8 }) {
            _ if op == Op::Flush => (0, 0),
            // Whole rows, whole blocks, and anything.
            0 | 1 => {
                let first = self.rng.u64(..self.geometry.rows());
                (
                    first * row,
                    self.rng.u64(1..=2.min(self.geometry.rows() - first)) * row,
                )
            }
            2 | 3 => {
                let first = self.rng.u64(..capacity / STRIPE_SECTORS);
                let most = (capacity / STRIPE_SECTORS - first).min(6);
                (
                    first * STRIPE_SECTORS,
                    self.rng.u64(1..=most) * STRIPE_SECTORS,
                )
            }
            4..7 => {
                let first = self.rng.u64(..capacity);
                (
                    first,
                    self.rng.u64(1..=STRIPE_SECTORS.min(capacity - first)),
                )
            }
            _ => {
                let first = self.rng.u64(..capacity);
                (first, self.rng.u64(1..=(3 * row).min(capacity - first)))
            }
        };
        let (sector, sectors) = match self.focus.clone() {
            Some(focus) if op != Op::Flush && self.rng.u32(..8) > 0 => {
                let first = self.rng.u64(focus.clone());
                (first, self.rng.u64(1..=(focus.end - first).min(12)))
            }
            _ => (sector, sectors),
        };
        let left = capacity - self.written.min(capacity);
        let (sector, sectors) = match op {
            // A stream.
            Op::Write if left > 0 && self.streams() && self.rng.u32(..4) > 0 => {
                (self.written, left.min(STRIPE_SECTORS))
            }
            _ => (sector, sectors),
        };
        if op == Op::Write {
            self.written = (sector + sectors) % capacity;
        }
        let tag = self.asked.len() as u64;
        let mut request = Request::new(op, sector, sectors, tag);
        if op.is_write() && op != Op::Discard && self.rng.u32(..5) == 0 {
            request.flags |= RequestFlags::FUA;
        }
        if op == Op::Write && self.rng.bool() {
            request.flags |= RequestFlags::STABLE_BUFFERS;
        }
        if op == Op::WriteZeroes && self.rng.bool() {
            request.flags |= RequestFlags::NO_UNMAP;
        }
        if op.has_data() {
            let memory = Buffer::anonymous(sectors as usize * SECTOR).expect("memory");
            for at in 0..sectors {
                let bytes = sector_of(value(self.now, sector + at));
                if op == Op::Write {
                    memory.write(at as usize * SECTOR, &bytes);
                }
            }
            let cut = self.rng.usize(..sectors as usize) * SECTOR;
            let cut = if self.rng.u32(..3) == 0 { cut } else { 0 };
            let buffers = [memory.slice(0, cut), memory.slice(cut, memory.len() - cut)];
            request.buffers = buffers
                .into_iter()
                .flatten()
                .filter(|b| !b.is_empty())
                .collect();
        }
        if op.is_write() {
            for at in sector..sector + sectors {
                let value = if op == Op::Write {
                    value(self.now, at)
                } else {
                    0
                };
                self.history.begin(at, value, self.now);
            }
        }
        self.asked.push(Some(Asked {
            begin: self.now,
            queue,
        }));
        self.queue(queue).submit(request);
        self.collect(queue);
    }
}
