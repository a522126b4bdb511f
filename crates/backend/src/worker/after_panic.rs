//! The worker goes on after a panic on its thread, and the end of each lane that was lost is reported.

use super::commands::Command;
use super::end::{finish, panicked};
use super::{Replaced, WorkerThread, lane_table};
use std::time::Duration;

/// Shortest interval between panics in the worker's own code.
const PACE: Duration = Duration::from_millis(100);

impl WorkerThread<'_> {
    /// To be called after [`WorkerThread::run`] has panicked, and then `run` again.
    ///
    /// A panic in a call of a lane ends that lane. One in the worker's own code may have left the lane table
    /// in any state: all lanes that are here end, and the worker begins with an empty table. The other
    /// workers and the disks themselves aren't affected, so peers can connect again, and an orderly stop
    /// still flushes.
    pub(super) fn after_panic(&mut self) -> Result<(), Replaced> {
        let Some((id, lane)) = self.out.take() else {
            self.begin_anew();
            return Ok(());
        };
        if !self.lanes.back() {
            finish(Some(lane), None, panicked());
            self.worker.commands.send(Command::Back(id, None));
            return Err(Replaced);
        }
        if let Some(index) = self.lanes.find(id) {
            self.lanes.active.retain(|&i| i != index);
            if let Some(entry) = self.lanes.entry(index) {
                entry.lane = Some(lane);
            }
            self.remove(index, panicked())?;
        }
        // The panic may have lost events that were being handled, so every lane is stepped.
        self.lanes.wake_all();
        Ok(())
    }

    fn begin_anew(&mut self) {
        let name = &self.worker.name;
        tracing::error!("{name}: a bug in the worker itself: it ends all of its lanes and goes on");
        std::thread::sleep(PACE);
        match lane_table::poller(&self.worker.commands) {
            Ok(poller) => self.lanes.poller = poller,
            // The old poller stays; descriptors left in it wake the worker for nothing, at worst.
            Err(e) => tracing::error!("{name}: making a new poller: {e}"),
        }
        self.lanes.lose_all();
    }

    /// Ends the lanes that [`WorkerThread::begin_anew`] left.
    pub(super) fn end_lost(&mut self) -> Result<(), Replaced> {
        for index in 0..self.lanes.entries.len() {
            if self.lanes.entry(index).is_some_and(|b| b.lost) {
                self.remove(index, panicked())?;
            }
        }
        self.lanes.any_lost = false;
        Ok(())
    }
}
