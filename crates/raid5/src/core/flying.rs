//! [`Flying`]: batches and runs whose next step is the end of their I/O, or of their calculation.

use super::bit;
use super::record::Stripe;
use super::run::Run;
use crate::Geometry;
use crate::core::plan::Plan;
use crate::words::{Closed, Open, Part, Token};

/// See the module's documentation.
pub enum Flying {
    Reading {
        token: Token<Open, Stripe>,
        plan: Plan,
        /// Parts that the plan is for.
        parts: usize,
        /// Parts that have joined had their reads.
        again: bool,
        ios: Ios,
    },
    Calculating(Token<Closed, Stripe>),
    Writing {
        token: Token<Closed, Stripe>,
        /// It is in a log's unit that is stable.
        logged: Option<Part>,
        ios: Ios,
    },
    /// A run that is being calculated.
    Run(Run),
    RunWriting {
        run: Run,
        logged: Option<Part>,
        ios: Ios,
    },
}

impl Flying {
    /// A sector of the array that it is for, of a request that traces follow.
    pub(super) fn followed(&self, geometry: &Geometry) -> Option<u64> {
        match self {
            Flying::Reading { token, .. } => token.record().followed(geometry),
            Flying::Calculating(token) | Flying::Writing { token, .. } => {
                token.record().followed(geometry)
            }
            Flying::Run(run) | Flying::RunWriting { run, .. } => run.followed(),
        }
    }
}

/// I/O of a batch or a run that hasn't ended, and masks of failures.
#[derive(Clone, Copy)]
pub struct Ios {
    left: usize,
    failed: u64,
    unread: u64,
}

impl Ios {
    /// None of so many has ended.
    pub(super) fn new(left: usize) -> Ios {
        Ios {
            left,
            failed: 0,
            unread: 0,
        }
    }

    /// The read of a role's block has ended; `fits`: it could be read, and is what was written. True if it was the last one.
    pub(super) fn read(&mut self, role: usize, ok: bool, fits: bool) -> bool {
        self.left -= 1;
        self.failed |= if fits { 0 } else { bit(role) };
        self.unread |= if ok { 0 } else { bit(role) };
        self.left == 0
    }

    /// A write to a slot has ended. True if it was the last one.
    pub(super) fn wrote(&mut self, slot: usize, ok: bool) -> bool {
        self.left -= 1;
        self.failed |= if ok { 0 } else { bit(slot) };
        self.left == 0
    }

    /// Of a batch that reads, roles whose blocks it hasn't; of one that writes, slots that failed.
    pub(super) fn failed(&self) -> u64 {
        self.failed
    }

    /// Of the roles that failed, those that couldn't be read. The others' blocks don't fit their sums.
    pub(super) fn unread(&self) -> u64 {
        self.unread
    }
}
