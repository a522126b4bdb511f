//! A number that every step raises. It is bounded, so no run goes on for ever: each ends in a state in which nobody has to take a step.

use crate::state::{LogPhase, NONE, Phase, SPARE, SYNC, State, Stripe, Sync};

/// See the module's documentation. Rarer things weigh more: an epoch outweighs all stripes, a request that is done
/// outweighs the phases of its stripe, and so on.
pub fn rank(s: &State) -> u64 {
    let writes = s.writes.iter().map(|w| {
        let done = u64::from((!w.left & 0b11).count_ones());
        u64::from(w.submitted) + done * 500
    });
    let stripes = s.stripes.iter().map(|stripe| phase(s, stripe));
    let logs = s.logs.iter().map(|log| match log.phase {
        LogPhase::Idle => 0,
        LogPhase::Claimed => 1,
        LogPhase::Flushing => 2,
        LogPhase::Writing => 3,
        LogPhase::Stripes => 4,
        LogPhase::Held => 5,
    });
    let sync = match s.sync {
        Sync::Off => 0,
        Sync::AtStripe => 1,
        Sync::Late => 300,
        Sync::Done => 301,
        Sync::Flushed => 302,
        Sync::Telling => 303,
        Sync::Whole => 304,
        Sync::Taking => 305,
        // Its request may still be in a list.
        Sync::Over => {
            let waits = s.stripes.iter().any(|stripe| stripe.list.contains(&SYNC));
            2500 + if waits { 0 } else { 50 }
        }
    };
    let rebuilt = 500 * (u64::from(s.members.done) + u64::from(s.members.committed));
    let dead = match s.dead {
        NONE => 0,
        dead => 1 + u64::from(dead as usize == SPARE),
    };
    u64::from(s.epoch) * 5000
        + s.kick as u64
        + writes.sum::<u64>()
        + stripes.sum::<u64>()
        + logs.sum::<u64>()
        + s.flush as u64
        + dead
        + sync
        + rebuilt
        + 400 * u64::from(s.sync_stripe)
}

fn phase(s: &State, stripe: &Stripe) -> u64 {
    let is_stale = stripe.epoch != s.epoch && !s.is_stopped();
    let round = u64::from(stripe.round);
    let tens = match stripe.phase {
        Phase::Free => 0,
        // Its plan is too old: it begins anew.
        Phase::Reading | Phase::Parking if is_stale => return 0,
        Phase::Read if is_stale => return 1,
        Phase::Closed | Phase::Listed if is_stale => return 2,
        Phase::Claimed => 1,
        Phase::Reading => 2 + 2 * round,
        Phase::Read => 3 + 2 * round,
        Phase::Closed | Phase::Listed => 7,
        Phase::Logging => 8,
        Phase::Logged => 9,
        Phase::Writing => 10,
        Phase::SyncReading => 11,
        Phase::SyncWriting => 12,
        Phase::Parking => 20,
        Phase::Parked => 21,
        Phase::Unnamed => 22,
        Phase::Ending => 23,
    };
    tens * 10
}
