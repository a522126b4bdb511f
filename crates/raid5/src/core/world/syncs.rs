//! Rebuilds, resyncs and checks of a run.

use super::World;
use crate::core::{Action, QueueCore};

impl World {
    /// Nothing happens by itself any more: an action goes on or begins, if there is one to be done. False: there is none.
    pub(super) fn go_on_syncing(&mut self) -> bool {
        if self.sweeps().is_some() {
            self.sweep_rarely();
            return true;
        }
        if let Some(at) = (0..self.queues.len()).find(|at| self.syncs(*at)) {
            self.queue(at).allow_stripes(u64::MAX);
            return true;
        }
        let Some(action) = self.common.wanted() else {
            return false;
        };
        let queue = self.rng.usize(..self.queues.len());
        self.open(queue);
        self.queue(queue)
            .start_sync(action)
            .expect("it is possible");
        self.collect(queue);
        true
    }

    fn syncs(&self, queue: usize) -> bool {
        self.queues[queue]
            .as_ref()
            .is_some_and(|q| q.sync.is_some())
    }

    /// An action begins, goes on, is told to superblocks, or is stopped.
    pub(super) fn sync_rarely(&mut self) {
        self.note_ends();
        let under_way = (0..self.queues.len()).find(|at| self.syncs(*at));
        let queue = under_way.unwrap_or_else(|| self.rng.usize(..self.queues.len()));
        if under_way.is_none() {
            let checks = [Action::Check, Action::Repair];
            let check = *self.rng.choice(&checks).expect("one of them");
            let action = self.common.wanted().unwrap_or(check);
            self.open(queue);
            // A check isn't possible without a member.
            let _ = self.queue(queue).start_sync(action);
            return self.collect(queue);
        }
        let most = self.rng.u64(1..4);
        match self.rng.u32(..32) {
            0..18 => {
                self.queue(queue).allow_stripes(most);
            }
            18..31 => self.queue(queue).checkpoint(),
            _ => {
                self.ways.syncs_stopped += 1;
                self.queue(queue).stop_sync();
            }
        }
        self.collect(queue);
    }

    /// Looks at the actions that have ended.
    pub(super) fn note_ends(&mut self) {
        let ends = self.queues.iter_mut().flatten();
        let ends: Vec<_> = ends.filter_map(QueueCore::take_synced).collect();
        for end in ends {
            let is_check = matches!(end.action, Action::Check | Action::Repair);
            if end.early.is_none() {
                self.ways.checked += usize::from(is_check);
                self.ways.resynced += usize::from(end.action == Action::Resync);
            }
            let is_unsynced = !self.unsynced.0.is_empty();
            assert!(
                end.mismatch_sectors == 0 || is_unsynced,
                "parity was wrong: {end:?}"
            );
        }
    }

    /// Members that failed some I/O, and aren't left out yet.
    pub(super) fn doomed_members(&self) -> usize {
        let members = self.disk.roles.iter().flatten();
        members
            .filter(|slot| self.doomed & 1 << **slot != 0)
            .count()
    }
}
