//! The write-intent bitmap on the devices of a run.

use super::{Mail, Opening, World};
use crate::STRIPE_SECTORS;
use crate::core::Sums;
use crate::words::Chunks;
use std::ops::Range;

/// Bits as they are on each device.
#[derive(Clone, Debug)]
pub struct Bits {
    /// A chunk has two to the power of this sectors.
    shift: u32,
    /// By slot, as masks of chunks.
    on: Vec<u64>,
}

impl Bits {
    /// Those of stripes whose parity may be wrong are set.
    pub fn new(shift: u32, slots: usize, unsynced: &[Range<u64>]) -> Bits {
        let mut bits = Bits {
            shift,
            on: Vec::new(),
        };
        let all = unsynced.iter().cloned().flatten();
        let mask = all.fold(0, |mask, stripe| mask | bits.of(stripe));
        bits.on = vec![mask; slots];
        bits
    }

    /// The chunks as the core has them.
    pub fn chunks(&self, member_sectors: u64) -> Chunks {
        let count = member_sectors.div_ceil(1 << self.shift);
        let is_set = |chunk: u64| self.on[0] & 1 << chunk != 0;
        Chunks::new(self.shift, (0..count).map(is_set))
    }

    /// Chunks of a stripe, as a mask.
    fn of(&self, stripe: u64) -> u64 {
        let sectors = stripe * STRIPE_SECTORS..(stripe + 1) * STRIPE_SECTORS;
        sectors.fold(0, |mask, sector| mask | 1 << (sector >> self.shift))
    }

    /// True if a slot's bits say that a stripe may be wrong.
    pub fn marks(&self, slot: usize, stripe: u64) -> bool {
        self.on[slot] & self.of(stripe) != 0
    }
}

impl World {
    /// Bits that queues wait for are set; power may be cut when only some of the devices have them.
    pub(super) fn set_bits(&mut self) -> bool {
        if self.intends.is_empty() {
            return false;
        }
        let many = self.rng.usize(1..=self.intends.len());
        let wanted: Vec<(usize, Opening)> = self.intends.drain(..many).collect();
        let writes = wanted.iter().filter(|(_, opening)| opening.writes);
        let stripes: Vec<u64> = writes.map(|(_, opening)| opening.stripe).collect();
        let mut failed = 0;
        for slot in self.disk.live().collect::<Vec<_>>() {
            if self.devices[slot].dead {
                failed |= 1 << slot;
                continue;
            }
            let Some(bits) = &mut self.bits else { continue };
            let mask = stripes.iter().map(|stripe| bits.of(*stripe));
            bits.on[slot] |= mask.fold(0, |all, one| all | one);
            self.cut_rarely();
        }
        if failed == 0 {
            self.common.bits_are_set(stripes);
            self.load_sums();
        }
        self.ways.bits_set += 1;
        for (queue, Opening { stripe, .. }) in wanted {
            // As mail: others take their turns before.
            self.post[queue][queue].push_back(Mail::Intended { stripe, failed });
        }
        true
    }

    /// The queue that sweeps.
    pub(super) fn sweeps(&self) -> Option<usize> {
        (0..self.queues.len()).find(|at| {
            let queue = self.queues[*at].as_ref();
            queue.is_some_and(|queue| queue.is_sweeping())
        })
    }

    /// A sweep begins or goes on, and bits that nobody counts on are taken away.
    pub(super) fn sweep_rarely(&mut self) {
        let sweeps = self.sweeps();
        let queue = sweeps.unwrap_or_else(|| self.rng.usize(..self.queues.len()));
        self.open(queue);
        let bits = self.rng.bool();
        if self.rng.u32(..4) == 0 {
            self.common.sums().into_iter().for_each(Sums::squeeze);
        }
        let core = self.queue(queue);
        match sweeps {
            None => core.start_sweep(bits),
            Some(_) => core.go_on_sweeping(),
        }
        self.write_sums(queue);
        let core = self.queue(queue);
        let is_over = sweeps.is_some() && !core.is_sweeping();
        self.collect(queue);
        if is_over || self.rng.u32(..8) == 0 {
            self.clear_bits();
        }
    }

    fn clear_bits(&mut self) {
        let Some(chunks) = self.common.chunks() else {
            return;
        };
        let clear = (0..chunks.count()).filter(|chunk| chunks.is_clear(*chunk));
        let clear = clear.fold(0, |mask, chunk| mask | 1 << chunk);
        for slot in self.disk.live().collect::<Vec<_>>() {
            let Some(bits) = &mut self.bits else { return };
            self.ways.bits_cleared += usize::from(bits.on[slot] & clear != 0);
            if !self.devices[slot].dead {
                bits.on[slot] &= !clear;
            }
            self.cut_rarely();
        }
    }

    fn cut_rarely(&mut self) {
        if self.rng.u32(..6) == 0 {
            self.cut();
        }
    }

    /// All of the bitmap goes to a device that is taken in, before superblocks tell of it.
    pub(super) fn copy_bits(&mut self, to: usize) {
        let from = self.disk.roles.iter().flatten().next();
        if let (Some(bits), Some(from)) = (&mut self.bits, from) {
            let on = bits.on[*from];
            bits.on.resize(bits.on.len().max(to + 1), 0);
            bits.on[to] = on;
        }
    }
}
