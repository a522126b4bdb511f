//! The checks of a state, and the number that every step raises.

use super::model::Model;
use super::state::{Armed, Asked, Check, Phase, STRIPES, Spare, State, Sweep, There, UNKNOWN};
use crate::check::{Broken, Property};
use crate::state::{MEMBERS, NONE};

impl Model {
    /// Chunks whose bits are on all members, as a mask; those of a device that may have lost writes don't count.
    pub(super) fn marks(&self, s: &State) -> u8 {
        let counts = |m: &usize| s.harmed & (1 << *m) == 0 && s.missing != *m as u8;
        let members = (0..MEMBERS).filter(counts);
        members.fold(0b11, |all, m| all & s.bits[m])
    }

    /// A block whose sum on disk isn't its own, whatever a power cut leaves of both, lies in a marked chunk. A device that had a fault doesn't count, neither
    /// with its block nor with its page of sums.
    pub(super) fn check_marks(&self, s: &State) -> Result<(), Broken> {
        let counts = |member: usize| s.harmed & (1 << member) == 0 && s.missing != member as u8;
        let marked = self.marks(s);
        for place in (0..MEMBERS).filter(|p| counts(*p) && counts(self.holder(*p))) {
            for at in 0..STRIPES {
                if marked & (1 << self.bound.chunk(at)) != 0 {
                    continue;
                }
                let sums = || s.pages[place][at].all().filter(|sum| *sum != UNKNOWN);
                for contents in s.media[place][at].all() {
                    if let Some(sum) = sums().find(|sum| *sum != contents) {
                        return Err(Broken::new(Property::SumIsMarked, || {
                            format!(
                                "place {place} of stripe {at} may have {contents:#b}, and a sum of {sum:#b}, and isn't marked"
                            )
                        }));
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks that the array is at rest, in a state in which nobody has to take a step.
    pub fn check_rest(&self, s: &State) -> Result<(), Broken> {
        let waits = |text: String| Err(Broken::new(Property::EveryoneEnds, || text));
        for (r, ask) in s.asks.iter().enumerate() {
            if !matches!(ask.asked, Asked::New | Asked::Done) {
                return waits(format!("request {r} waits for ever"));
            }
        }
        for (at, batch) in s.batches.iter().enumerate() {
            if batch.phase != Phase::Free {
                return waits(format!("nobody releases stripe {at}"));
            }
        }
        if s.sweep != Sweep::None {
            return waits("a sweep waits for ever".into());
        }
        if !matches!(s.check, Check::None | Check::Done) || matches!(s.spare, Spare::Comes(..)) {
            return waits("the action `checksum`, or a rebuild, waits for ever".into());
        }
        if !s.serves() {
            return waits("a start doesn't end".into());
        }
        Ok(())
    }
}

/// A number that every step raises. It is bounded, so no run goes on for ever. Rarer things weigh more: a power cut outweighs all sweeps, which outweigh
/// requests, and so on.
pub fn rank(s: &State) -> u64 {
    let sweep = match s.sweep {
        Sweep::None => 5,
        sweep => sweep as u64,
    };
    let sweeps = u64::from(s.sweeps) * 8 + sweep;
    let check = match s.check {
        Check::None => 0,
        Check::Turn(at) => 1 + u64::from(at),
        Check::Ended => 3,
        Check::Writing => 4,
        Check::Done => 5,
    };
    let spare = match s.spare {
        Spare::None => 0,
        Spare::Comes(begun, done) => 6 + u64::from(begun) + u64::from(done),
        Spare::Gone => 20,
        Spare::Over => 21,
    };
    let asks: u64 = s.asks.iter().map(|ask| ask.asked as u64).sum();
    let there = |it: &There| u64::from(*it != There::Clear);
    let batches = s.batches.iter().map(|batch| {
        let bad = u64::from(batch.bad != NONE) + u64::from(batch.trusted != NONE);
        let phase = match batch.phase {
            Phase::Free => 0,
            phase => 1 + phase as u64,
        };
        (u64::from(batch.fixed) * 4 + bad) * 16 + phase
    });
    let armed = match s.armed {
        Armed::None => 1,
        _ => 0,
    };
    let there = (s.chunks.iter().map(there).sum::<u64>() + there(&s.group)) * 16;
    let faults = u64::from(s.faults) * 3 + armed;
    ((s.power as u64) << 50)
        + (sweeps << 40)
        + ((check + asks + spare) << 24)
        + (batches.sum::<u64>() << 8)
        + there
        + faults
}
