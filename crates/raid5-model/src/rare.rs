//! The rare machines: a kick, and rebuilding.

use crate::bug::Bug;
use crate::model::{Model, begin_kick};
use crate::state::{
    Kick, LogPhase, MEMBERS, Members, NONE, Phase, SECTORS, SPARE, STRIPES, SYNC, State, Stripe,
    Superblock, Sync, Value,
};

impl Model {
    pub(crate) fn kick_scan(&self, s: &mut State) {
        s.kick = Kick::Draining;
        if self.has(Bug::KickNotDrained) {
            return;
        }
        let busy = (0..STRIPES).filter(|n| !s.stripes[*n].is_drained());
        s.waits = busy.fold(0, |mask, n| mask | 1 << n);
        let rests = |n: &usize| matches!(s.logs[*n].phase, LogPhase::Idle | LogPhase::Held);
        let logs = (0..MEMBERS).filter(|n| !rests(n));
        s.waits |= logs.fold(0, |mask, n| mask | 1 << (STRIPES + n));
    }

    /// The place of the device that is kicked: its own, or the one that the spare has or is to have.
    pub(crate) fn kicked_place(&self, s: &State) -> u8 {
        match (s.dead as usize == SPARE, s.members.swapped) {
            (false, _) => s.dead,
            (true, NONE) => s.members.failed,
            (true, place) => place,
        }
    }

    pub(crate) fn kick_named(&self, s: &mut State) {
        if let Some(named) = s.next_superblock.take() {
            s.superblock = named;
        }
        s.members = Members {
            failed: s.superblock.failed,
            ..Members::default()
        };
        s.epoch += 1;
        s.kick = Kick::None;
        if s.dead as usize == SPARE {
            s.sync = Sync::Over;
            s.sync_stripe = 0;
        }
        for stripe in &mut s.stripes {
            stripe.phase = match stripe.phase {
                Phase::Parked => Phase::Claimed,
                Phase::Unnamed => Phase::Ending,
                phase => phase,
            };
        }
        for log in &mut s.logs {
            if log.phase == LogPhase::Held {
                log.phase = match log.next {
                    0 => LogPhase::Idle,
                    _ => LogPhase::Claimed,
                };
            }
        }
    }

    pub(crate) fn sync_read(&self, s: &mut State, at: usize) {
        if s.is_stopped() {
            s.sync = Sync::Over;
            self.sync_release(s, at);
            return;
        }
        let failed = s.members.failed as usize;
        for sector in 0..SECTORS {
            let others = (0..MEMBERS).filter(|m| *m != failed);
            let sum = others.fold(0, |sum: Value, m| sum ^ s.media[m][at][sector].now);
            s.sync_block[sector] = sum;
            s.media[SPARE][at][sector].begin(sum);
        }
        if self.has(Bug::SyncReleasesEarly) {
            s.sync = Sync::Late;
            self.sync_release(s, at);
            return;
        }
        s.stripes[at].phase = Phase::SyncWriting;
    }

    pub(crate) fn sync_release(&self, s: &mut State, at: usize) {
        let mut next = Stripe {
            list: s.stripes[at].list,
            ..Stripe::default()
        };
        next.remove(SYNC);
        self.hand_over(s, at, next, true);
    }

    pub(crate) fn sync_written(&self, s: &mut State, at: usize) {
        let failed = s.dead as usize == SPARE;
        for sector in (0..SECTORS).filter(|_| !failed) {
            s.media[SPARE][at][sector].end(s.sync_block[sector], false);
        }
        if failed {
            begin_kick(s);
        }
        if s.sync != Sync::Late {
            self.sync_release(s, at);
        }
        s.sync_block = [0; SECTORS];
        s.sync = if failed { Sync::Over } else { Sync::Done };
        if !failed {
            s.members.done = at as u8 + 1;
        }
    }

    pub(crate) fn sync_tell(&self, s: &mut State) {
        if self.has(Bug::TakenOverEarly) {
            self.sync_take(s);
            return;
        }
        s.next_superblock = Some(Superblock {
            committed: s.members.done,
            ..s.superblock
        });
        s.sync = Sync::Telling;
    }

    pub(crate) fn sync_told(&self, s: &mut State) {
        if let Some(told) = s.next_superblock.take() {
            s.superblock = told;
        }
        s.members.committed = s.members.done;
        s.sync = match usize::from(s.members.done) {
            STRIPES => Sync::Whole,
            _ => Sync::Off,
        };
        s.sync_stripe = s.members.done % STRIPES as u8;
        if s.dead_member().is_some() {
            begin_kick(s);
        }
    }

    pub(crate) fn sync_take(&self, s: &mut State) {
        s.next_superblock = Some(Superblock {
            failed: NONE,
            committed: 0,
            swapped: s.members.failed,
        });
        s.sync = Sync::Taking;
    }

    pub(crate) fn sync_taken(&self, s: &mut State) {
        if let Some(taken) = s.next_superblock.take() {
            s.superblock = taken;
        }
        s.members = Members {
            swapped: s.members.failed,
            ..Members::default()
        };
        s.sync = Sync::Over;
        if s.dead_member().is_some() {
            begin_kick(s);
        }
    }
}
