//! Steps: the vocabulary of traces, and those that a state allows. A step and a state have one state that follows.

use crate::bug::Bug;
use crate::model::Model;
use crate::plan::written;
use crate::state::{
    Flush, Kick, LogPhase, MEMBERS, NONE, Phase, SPARE, STRIPES, SYNC, State, Sync,
};
use crate::vocabulary::steps;

steps! {
    /// A step of the array, of a user or of a device. Each is atomic: it has one access to a word that others share.
    Submit(u8) "write submitted" "A user submits this write: it claims its stripe if that is free, and joins the list otherwise."
    Check(u8) "epoch checked" "The owner of this stripe looks at the epoch after its claim, and plans reads or parks."
    Park(u8) "parked" "The owner of this stripe has parked; a step of its own only with a planted bug."
    ReadsEnd(u8) "reads ended" "What the batch of this stripe needs has been read, or a member failed it."
    Close(u8) "closed" "The batch of this stripe is closed, and parity is calculated."
    LogGo(u8) "log begun" "The writer of this place's log looks at the epoch and begins a unit, a flush before it, or nothing."
    LogFlushed(u8) "log flushed" "The flush before a unit of this place's log has ended."
    LogWritten(u8) "log written" "A unit of this place's log is stable, or its member failed."
    DataBegin(u8) "data begun" "Data and parity of this stripe go to the members."
    DataEnd(u8) "data ended" "They are written, or a member failed; if none did, the stripe is released."
    Release(u8) "released" "The batch of this stripe is acknowledged, and the next request in the list owns the stripe."
    KickScan "kick scans" "The kick looks for stripes and logs with I/O in flight."
    KickFlush "kick flushes" "All of them are drained; the other members are flushed."
    KickName "kick names" "Superblocks that name the failed member go to the others."
    KickNamed "kick named" "They are stable: the epoch is even again, and everybody who waited goes on."
    FlushBegin "flush submitted" "A user submits a flush, which goes to all devices."
    FlushEnd "flush ended" "It is acknowledged."
    FlushFailed "flush failed" "A member failed it; it waits for superblocks that name the member."
    Die(u8) "device dies" "From now on this device fails every request."
    SyncWant "rebuild wants" "Rebuilding asks for its next stripe."
    SyncRead(u8) "rebuild read" "The other blocks of this stripe have been read, and the missing one is written."
    SyncWritten(u8) "rebuild wrote" "It is written; rebuilding releases the stripe."
    SyncOn "rebuild goes on" "Rebuilding goes on with the next stripe; superblocks tell of this one later."
    SyncFlush "rebuild flushes" "Devices are flushed, so that superblocks may tell of this stripe."
    SyncTell "rebuild tells" "Superblocks that say how far rebuilding is go to the devices."
    SyncTold "rebuild told" "They are stable."
    SyncTake "rebuild takes" "Superblocks that call the incoming device the member go to the devices."
    SyncTaken "rebuild taken" "They are stable."
}

impl Step {
    /// True if nobody has to do it: users submit when they like, and devices die or not.
    fn is_up_to_others(self) -> bool {
        matches!(self, Step::Submit(_) | Step::FlushBegin | Step::Die(_))
    }
}

impl Model {
    /// The steps that a state allows.
    pub fn steps(&self, s: &State, out: &mut Vec<Step>) {
        self.users(s, out);
        for at in 0..STRIPES {
            self.of_stripe(s, at, out);
        }
        for (at, log) in s.logs.iter().enumerate() {
            let step = match log.phase {
                LogPhase::Claimed => Step::LogGo,
                LogPhase::Flushing => Step::LogFlushed,
                LogPhase::Writing => Step::LogWritten,
                LogPhase::Idle | LogPhase::Held | LogPhase::Stripes => continue,
            };
            out.push(step(at as u8));
        }
        match s.kick {
            Kick::Begun => out.push(Step::KickScan),
            Kick::Draining if s.waits == 0 => out.push(Step::KickFlush),
            Kick::Flushed if s.next_superblock.is_none() => out.push(Step::KickName),
            Kick::Naming => out.push(Step::KickNamed),
            Kick::Draining | Kick::Flushed | Kick::None => {}
        }
        self.of_sync(s, out);
    }

    fn users(&self, s: &State, out: &mut Vec<Step>) {
        for (w, shape) in self.bound.writes.iter().enumerate() {
            let Some(shape) = shape else { continue };
            // Writes of one shape are interchangeable: they are submitted in order.
            let mut twins = (0..w).filter(|t| self.bound.writes[*t] == Some(*shape));
            if !s.writes[w].submitted && twins.all(|t| s.writes[t].submitted) {
                out.push(Step::Submit(w as u8));
            }
        }
        let acknowledged = s.writes.iter().any(|w| w.submitted && w.left == 0);
        match s.flush {
            Flush::None if self.bound.flush && acknowledged => out.push(Step::FlushBegin),
            Flush::Flying => match (s.dead_member(), s.epoch) {
                (None, _) => out.push(Step::FlushEnd),
                (Some(_), epoch) if epoch % 2 == 0 => out.push(Step::FlushFailed),
                _ => {}
            },
            _ => {}
        }
        if self.bound.failure && s.dead == NONE {
            out.extend((0..MEMBERS as u8).map(Step::Die));
        }
        let second = self.bound.spare_fails && s.dead != SPARE as u8;
        if second && !s.is_stopped() && s.members.has(SPARE) {
            out.push(Step::Die(SPARE as u8));
        }
    }

    fn of_stripe(&self, s: &State, at: usize, out: &mut Vec<Step>) {
        let stripe = &s.stripes[at];
        let n = at as u8;
        match stripe.phase {
            Phase::Claimed => out.push(Step::Check(n)),
            Phase::Parking => out.push(Step::Park(n)),
            Phase::Reading => {
                out.push(Step::ReadsEnd(n));
                if self.bug == Some(Bug::CalculatedBeforeRead) {
                    out.push(Step::Close(n));
                }
            }
            Phase::Read => out.push(Step::Close(n)),
            Phase::Closed | Phase::Logged => out.push(Step::DataBegin(n)),
            Phase::Listed | Phase::Logging if self.bug == Some(Bug::LogAfterData) => {
                out.push(Step::DataBegin(n));
            }
            Phase::Writing => out.push(Step::DataEnd(n)),
            Phase::Ending => out.push(Step::Release(n)),
            Phase::SyncReading => out.push(Step::SyncRead(n)),
            Phase::SyncWriting => out.push(Step::SyncWritten(n)),
            Phase::Free | Phase::Parked | Phase::Listed | Phase::Logging | Phase::Unnamed => {}
        }
    }

    fn of_sync(&self, s: &State, out: &mut Vec<Step>) {
        let wanted = self.bound.spare && s.members.failed != NONE;
        match s.sync {
            Sync::Late => out.push(Step::SyncWritten(s.sync_stripe)),
            // Superblocks are written one after the other; those in flight end, whatever happens.
            Sync::Telling => out.push(Step::SyncTold),
            Sync::Taking => out.push(Step::SyncTaken),
            _ if s.is_stopped() => {}
            Sync::Off if wanted => out.push(Step::SyncWant),
            Sync::Done => {
                out.push(Step::SyncFlush);
                if usize::from(s.members.done) < STRIPES {
                    out.push(Step::SyncOn);
                }
            }
            Sync::Flushed => out.push(Step::SyncTell),
            Sync::Whole => out.push(Step::SyncTake),
            Sync::Off | Sync::AtStripe | Sync::Over => {}
        }
    }

    /// The block that is being written to a sector of a device.
    pub fn flying(&self, s: &State, device: usize, at: usize, sector: usize) -> Option<u8> {
        let stripe = &s.stripes[at];
        let syncs = stripe.phase == Phase::SyncWriting
            || (s.sync == Sync::Late && usize::from(s.sync_stripe) == at);
        if syncs && device == SPARE {
            return Some(s.sync_block[sector]);
        }
        if stripe.phase != Phase::Writing {
            return None;
        }
        let mut blocks = written(stripe, true);
        let b = blocks.find(|b| self.target(s, at, *b) == Some(device))?;
        Some(stripe.new[b][sector])
    }
}

/// True if rebuilding is first in a stripe's list.
pub fn is_syncs_turn(list: &[u8]) -> bool {
    list.first() == Some(&SYNC)
}
