//! Flushes, and what is written for them and in the background.

use crate::core::Core;
use crate::core::writeback::{Below, Flush};
use crate::policy::Policy;
use pvblk_block::Status;

impl<P: Policy> Core<P> {
    /// Writes for a flush; passes it on if nothing keeps it.
    pub(in crate::core) fn go_on_with_flush(&mut self, flush: Flush) {
        let below = Below {
            io: &mut self.io,
            ranges: &self.ranges,
            runner: flush.owner,
            followed: false,
        };
        if self.writes.go_on_with_flush(flush, below)
            && let Some(request) = self.requests.get(flush.request)
        {
            self.io.pass(flush.request, &request.request, request.owner);
        }
    }

    /// Goes on with all flushes.
    pub(in crate::core) fn go_on_with_flushes(&mut self) {
        let mut at = 0;
        while let Some(flush) = self.writes.flush(at) {
            self.go_on_with_flush(flush);
            let waits = self
                .writes
                .flush(at)
                .is_some_and(|f| f.request == flush.request);
            at += usize::from(waits);
        }
    }

    /// A frame that became dirty under this number could not be written.
    pub(super) fn fail_flushes(&mut self, epoch: u64, status: Status) {
        for number in self.writes.take_failed_flushes(epoch) {
            if let Some(mut request) = self.requests.take(number) {
                request.status = status;
                self.complete(number, request);
            }
        }
    }

    /// Writes the dirty ones of these pages, for a request of `runner` that waits for it, and that traces follow or not.
    pub(in crate::core) fn write_out(
        &mut self,
        page: u64,
        end: u64,
        (runner, followed): (usize, bool),
    ) {
        let below = Below {
            io: &mut self.io,
            ranges: &self.ranges,
            runner,
            followed,
        };
        self.writes.write_out(page, end, below);
    }

    /// Writes as in the background, for a request of `runner` that waits until less is dirty.
    pub(in crate::core) fn write_in_background(&mut self, runner: usize) {
        let below = Below {
            io: &mut self.io,
            ranges: &self.ranges,
            runner,
            followed: false,
        };
        self.writes.write_in_background(self.moment.now, below);
    }
}
