//! The time of its worker that a step of a lane takes, and the end of the step for the sake of others.

use super::TURN_SECTORS;

/// A request costs a worker about as much as the copy of so many sectors: 4 KiB.
const REQUEST_SECTORS: u64 = 8;

/// One step of a lane, as its worker sees it.
#[derive(Default)]
pub(super) struct Turn {
    /// Sectors of data that were copied, or about as many.
    sectors: u64,
    requests: u64,
    /// Other disks have work on the same worker: steps are shorter.
    company: bool,
    /// The last step ended before its responses were pushed.
    owes_push: bool,
}

impl Turn {
    #[inline]
    pub(super) fn begin(&mut self) {
        self.sectors = 0;
        self.requests = 0;
    }

    /// Notes data that was copied, or that the device is about to copy.
    #[inline]
    pub(super) fn copied(&mut self, sectors: u64) {
        self.sectors += sectors;
    }

    /// Notes requests that went to the device, or cost as much.
    #[inline]
    pub(super) fn submitted(&mut self, requests: usize) {
        self.requests += requests as u64;
    }

    #[inline]
    pub(super) fn sectors(&self) -> u64 {
        self.sectors
    }

    /// A measure of the worker's time that the step took: sectors of data, and requests as if each were 4 KiB of data more.
    #[inline]
    pub(super) fn cost(&self) -> u64 {
        self.sectors + self.requests * REQUEST_SECTORS
    }

    /// True if so much was copied that what isn't urgent is left to the next step.
    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.sectors >= TURN_SECTORS
    }

    /// True if that changes.
    #[inline]
    pub(super) fn set_company(&mut self, company: bool) -> bool {
        std::mem::replace(&mut self.company, company) != company
    }

    /// Ends the step before its responses are pushed, if others wait and much was copied: true then.
    #[inline]
    pub(super) fn leaves_push(&mut self) -> bool {
        if !self.company || !self.is_over() {
            return false;
        }
        self.owes_push = true;
        true
    }

    /// True if the last step ended before its responses were pushed.
    #[inline]
    pub(super) fn owes_push(&self) -> bool {
        self.owes_push
    }

    /// They are pushed now.
    pub(super) fn takes_up_push(&mut self) {
        self.owes_push = false;
    }
}
