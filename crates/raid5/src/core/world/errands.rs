//! Superblocks that queues want to be written.

use super::World;
use crate::core::kick::Change;
use crate::core::queue::Errand;

impl World {
    /// An errand is done, and power is cut perhaps; false if there is none.
    pub(super) fn do_errand(&mut self) -> bool {
        if self.errands.is_empty() {
            return false;
        }
        let (queue, errand) = self
            .errands
            .swap_remove(self.rng.usize(..self.errands.len()));
        let had_incoming = self.disk.incoming.is_some();
        if let Errand::Name {
            dirty,
            failed,
            change,
        } = errand
        {
            let takes_over = change == Some(Change::TakesOver);
            self.ways.kicks += usize::from(failed != 0);
            self.ways.made_dirty += usize::from(dirty && !self.disk.dirty);
            self.ways.recovered += usize::from(takes_over && self.disk.missing() > 0);
            self.ways.replaced += usize::from(takes_over && self.disk.missing() == 0);
        }
        if let Errand::Name {
            change: Some(Change::TakesIn { slot, .. }),
            ..
        } = errand
        {
            self.copy_bits(slot);
        }
        let by_bitmap = self.comes_by_bitmap();
        let devices = &self.devices;
        let failed = self
            .disk
            .write(errand, by_bitmap, |slot| devices[slot].dead);
        self.has_missed |= self.disk.missing() > 0;
        let is_lost = had_incoming && self.disk.incoming.is_none();
        if self.rng.bool() {
            self.cut();
        }
        match errand {
            Errand::Name { change, .. } => {
                let takes_over = change == Some(Change::TakesOver);
                self.ways.incoming_lost += usize::from(is_lost && !takes_over);
                self.queue(queue).named(failed);
            }
            Errand::Recovered { .. } | Errand::Resynced(_) => self.queue(queue).sync_told(failed),
        }
        self.collect(queue);
        true
    }
}
