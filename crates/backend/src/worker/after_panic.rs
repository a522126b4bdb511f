//! After a panic on a worker's thread: the worker goes on, and the end of each lane that was lost is told.

use super::end::{finish, panicked};
use super::mailbox::Command;
use super::{Replaced, Shift, roster};
use std::time::Duration;

/// A worker that panics again and again in its own code does so this often at most.
const PACE: Duration = Duration::from_millis(100);

impl Shift<'_> {
    /// To be called after [`Shift::run`] has panicked, and then `run` again.
    ///
    /// A panic in a call of a lane ends that lane. One in the worker's own code may have left the roster in any state: all lanes that are
    /// here end, and it begins with an empty roster. The other workers and the disks themselves aren't touched by it, so peers can
    /// connect again, and an orderly stop still flushes.
    pub(super) fn mend(&mut self) -> Result<(), Replaced> {
        let Some((id, lane)) = self.out.take() else {
            self.begin_anew();
            return Ok(());
        };
        if !self.roster.back() {
            finish(Some(lane), None, panicked());
            self.seat.mailbox.send(Command::Back(id, None));
            return Err(Replaced);
        }
        if let Some(index) = self.roster.find(id) {
            self.roster.active.retain(|&i| i != index);
            if let Some(berth) = self.roster.berth(index) {
                berth.lane = Some(lane);
            }
            self.remove(index, panicked())?;
        }
        // The panic may have lost events that were being handled, so every lane is looked at.
        self.roster.wake_all();
        Ok(())
    }

    fn begin_anew(&mut self) {
        let name = &self.seat.name;
        tracing::error!("{name}: a bug in the worker itself: it ends all of its lanes and goes on");
        std::thread::sleep(PACE);
        match roster::poller(&self.seat.mailbox) {
            Ok(poller) => self.roster.poller = poller,
            // Descriptors left in the old poller wake the worker for nothing, at worst.
            Err(e) => tracing::error!("{name}: making a new poller: {e}"),
        }
        self.roster.lose_all();
    }

    /// Ends the lanes that [`Shift::begin_anew`] left.
    pub(super) fn end_lost(&mut self) -> Result<(), Replaced> {
        for index in 0..self.roster.berths.len() {
            if self.roster.berth(index).is_some_and(|b| b.lost) {
                self.remove(index, panicked())?;
            }
        }
        self.roster.any_lost = false;
        Ok(())
    }
}
