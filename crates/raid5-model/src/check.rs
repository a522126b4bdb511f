//! The properties, and their checks of a state.

use crate::bug::Bug;
use crate::model::Model;
use crate::plan::{block, entry, log_device, place};
use crate::state::{
    BLOCKS, DEVICES, Entry, Flush, Kick, LogPhase, MEMBERS, NONE, PARITY, Phase, SECTORS, SPARE,
    STRIPES, State, Superblock, Sync, Value, value, version,
};
use std::fmt;

macro_rules! properties {
    ($($property:ident $name:literal $about:literal)*) => {
        /// A property that every state or step has to have.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Property {
            $(#[doc = $about] $property,)*
        }

        impl Property {
            /// Name in reports.
            pub const fn name(self) -> &'static str {
                match self { $(Property::$property => $name,)* }
            }

            /// One sentence that states the property.
            pub const fn about(self) -> &'static str {
                match self { $(Property::$property => $about,)* }
            }
        }
    };
}

properties! {
    FlushedStays "flushed-stays"
        "A write that was acknowledged and then flushed, or had FUA, is there after a power cut, or a newer one is."
    OnlyWritten "only-written"
        "A sector holds what somebody wrote to it, or what it held at first, also after a power cut and a member's loss."
    HoleIsLogged "hole-is-logged"
        "A stripe whose parity may be wrong after a power cut has an entry in its log at every moment."
    RepairIsRight "repair-is-right"
        "Recovery from the log makes parity right, also if it is cut off and begins again."
    IdleIsRight "idle-is-right"
        "Parity of a stripe that nobody works on is right, and its data is what was acknowledged last."
    IncomingIsCurrent "incoming-is-current"
        "Behind the rebuild's cursor the incoming device holds what the member would hold, when nobody works on the stripe."
    ReadBeforeCalculated "read-before-calculated"
        "Parity is calculated when all blocks for it have been read, or are written whole."
    ClosedOnce "closed-once"
        "A batch is closed once: what is acknowledged with it is what its parity was calculated from."
    PlannedForTheseMembers "planned-for-these-members"
        "Nothing is written by a plan, or from blocks read, of an epoch with other members."
    EveryoneEnds "everyone-ends"
        "As long as a request isn't done somebody can take a step, and no run goes on for ever."
    SumIsMarked "sum-is-marked"
        "A block whose sum on disk isn't its own, nor unknown, lies in a chunk whose bit is on all members."
    FitsOrTold "fits-or-told"
        "No request gets a block that isn't what was written last, unless the block's sum is unknown."
    RepairFits "repair-fits"
        "A repair leaves no block, and no sum, that isn't that of what was written last."
    OneFaultHeals "one-fault-heals"
        "After one fault of one device no request fails, if all members are there and all sums of its stripe are known."
}

impl Property {
    /// Those of the write path's model, in the order of the page.
    pub const OF_WRITES: &[Property] = &[
        Property::FlushedStays,
        Property::OnlyWritten,
        Property::HoleIsLogged,
        Property::RepairIsRight,
        Property::IdleIsRight,
        Property::IncomingIsCurrent,
        Property::ReadBeforeCalculated,
        Property::ClosedOnce,
        Property::PlannedForTheseMembers,
        Property::EveryoneEnds,
    ];

    /// Those of the model of checksums, in the order of the page.
    pub const OF_SUMS: &[Property] = &[
        Property::SumIsMarked,
        Property::FitsOrTold,
        Property::RepairFits,
        Property::OneFaultHeals,
        Property::EveryoneEnds,
    ];
}

/// A property that doesn't hold, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    pub property: Property,
    pub text: String,
}

impl Broken {
    pub fn new(property: Property, text: impl FnOnce() -> String) -> Broken {
        Broken {
            property,
            text: text(),
        }
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.property.name(), self.text)
    }
}

/// The array as a start after a power cut finds it.
#[derive(Clone, Copy)]
struct Start {
    superblock: Superblock,
    /// A device that was counted on and is gone; `NONE`: all of them are there.
    lost: u8,
}

impl Start {
    fn device(&self, at: usize, stripe: usize) -> Option<usize> {
        let says = &self.superblock;
        let device = match at as u8 {
            at if at == says.swapped => SPARE,
            at if at == says.failed && stripe < says.committed as usize => SPARE,
            at if at == says.failed => return None,
            _ => at,
        };
        (device as u8 != self.lost).then_some(device)
    }
}

impl Model {
    /// Checks a state; `quick` leaves out the power cuts, for a step that changed nothing that is stable.
    pub fn check_state(&self, s: &State, quick: bool) -> Result<(), Broken> {
        for at in 0..STRIPES {
            if s.stripes[at].phase == Phase::Free {
                self.check_idle(s, at)?;
            }
        }
        if quick {
            return Ok(());
        }
        self.check_cuts(s)
    }

    /// Checks that the array is at rest, in a state in which nobody has to take a step.
    pub fn check_rest(&self, s: &State) -> Result<(), Broken> {
        let waits = |text: String| Err(Broken::new(Property::EveryoneEnds, || text));
        for (w, write) in s.writes.iter().enumerate() {
            if write.submitted && write.left != 0 {
                return waits(format!("write {w} waits for ever"));
            }
        }
        if s.flush == Flush::Flying {
            return waits("the flush waits for ever".into());
        }
        if s.kick != Kick::None {
            return waits("the kick of a member waits for ever".into());
        }
        if !matches!(s.sync, Sync::Off | Sync::Over) {
            return waits("rebuilding waits for ever".into());
        }
        for (at, stripe) in s.stripes.iter().enumerate() {
            if stripe.phase != Phase::Free {
                return waits(format!("nobody releases stripe {at}"));
            }
        }
        for (at, log) in s.logs.iter().enumerate() {
            if log.phase != LogPhase::Idle || log.next != 0 {
                return waits(format!("nobody goes on with the log of place {at}"));
            }
        }
        Ok(())
    }

    fn check_idle(&self, s: &State, at: usize) -> Result<(), Broken> {
        for sector in 0..SECTORS {
            let now = |b: usize| {
                // As reads see it: a stripe that is begun and not done is read from the others.
                let device = s.members.device(place(&self.bound, at, b), at)?;
                let passed = !s.members.incoming || at < s.members.done as usize;
                (device != SPARE || passed).then(|| s.media[device][at][sector].now)
            };
            let found: [Option<Value>; BLOCKS + 1] = std::array::from_fn(now);
            let sum = found.iter().fold(0, |sum, v| sum ^ v.unwrap_or(0));
            let idle = |text: String| Err(Broken::new(Property::IdleIsRight, || text));
            let incoming = s.members.incoming && at < s.members.done as usize;
            for (b, block) in found[..BLOCKS].iter().enumerate() {
                let right = value(b, s.expected[at][b][sector].now);
                let is_incoming = incoming && place(&self.bound, at, b) as u8 == s.members.failed;
                let wrong = block.unwrap_or(sum) != right;
                if wrong && is_incoming {
                    return Err(Broken::new(Property::IncomingIsCurrent, || {
                        format!("sector {sector} of block {b} of stripe {at} is old there")
                    }));
                }
                if wrong {
                    return idle(format!(
                        "sector {sector} of block {b} of stripe {at} is wrong"
                    ));
                }
            }
            if found.iter().all(Option::is_some) && sum != 0 {
                let is_incoming =
                    incoming && place(&self.bound, at, PARITY) as u8 == s.members.failed;
                if is_incoming {
                    return Err(Broken::new(Property::IncomingIsCurrent, || {
                        format!("sector {sector} of parity of stripe {at} is old there")
                    }));
                }
                return idle(format!("sector {sector} of parity of stripe {at} is wrong"));
            }
        }
        Ok(())
    }

    /// Checks all that a power cut in this state may leave. Sectors survive independently of one another, so that each may be looked at
    /// alone, with each choice of superblocks, of the log and of members.
    pub fn check_cuts(&self, s: &State) -> Result<(), Broken> {
        for superblock in std::iter::once(s.superblock).chain(s.next_superblock) {
            let counts_on = |device: u8| match device as usize {
                SPARE => {
                    superblock.swapped != NONE
                        || (superblock.failed != NONE && superblock.committed > 0)
                }
                _ => device != superblock.failed && device != superblock.swapped,
            };
            let may_be_lost = |device: u8| match (device, s.dead) {
                (NONE, _) => true,
                (_, NONE) => self.bound.failure && usize::from(device) < MEMBERS,
                (_, dead) if counts_on(dead) => device == dead,
                _ => self.bound.spare_fails && usize::from(device) == SPARE && counts_on(device),
            };
            let devices = [NONE].into_iter().chain(0..DEVICES as u8);
            for lost in devices.filter(|d| may_be_lost(*d)) {
                let start = Start { superblock, lost };
                for at in 0..STRIPES {
                    self.check_cut(s, &start, at)?;
                }
            }
        }
        Ok(())
    }

    /// The entries that recovery may find for a stripe.
    fn entries(&self, s: &State, start: &Start, at: usize) -> impl Iterator<Item = Entry> + use<> {
        let log = place(&self.bound, at, PARITY);
        let device = start.device(log, at);
        let is_written = s.logs[log].phase == LogPhase::Writing
            && log_device(self.bug, s, log) == device
            && device.is_some();
        let is_in_unit = s.logs[log].unit & (1 << at) != 0;
        let old = device.map_or(Entry::default(), |device| s.entries[device][at]);
        let new = (is_written && is_in_unit).then(|| entry(&s.stripes[at]));
        // Torn: neither the old log nor the new one.
        let torn = is_written.then(Entry::default);
        std::iter::once(old).chain(new).chain(torn)
    }

    fn check_cut(&self, s: &State, start: &Start, at: usize) -> Result<(), Broken> {
        let devices: [Option<usize>; BLOCKS + 1] =
            std::array::from_fn(|b| start.device(place(&self.bound, at, b), at));
        for entry in self.entries(s, start, at) {
            for sector in 0..SECTORS {
                let all = |b: usize| {
                    let held = devices[b].map(|device| &s.media[device][at][sector]);
                    let gone = held.is_none().then_some(None);
                    let held = held.into_iter().flat_map(|held| held.all());
                    held.map(Some).chain(gone)
                };
                for a in all(0) {
                    for b in all(1) {
                        for p in all(PARITY) {
                            self.check_found(s, start, at, sector, [a, b, p], entry)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Recovers a sector of a stripe, with another cut in between, and looks at the result.
    fn check_found(
        &self,
        s: &State,
        start: &Start,
        at: usize,
        sector: usize,
        found: [Option<Value>; BLOCKS + 1],
        entry: Entry,
    ) -> Result<(), Broken> {
        let repaired = repair(found, entry, sector);
        if entry.touched == 0 && is_wrong(found) {
            return Err(Broken::new(Property::HoleIsLogged, || {
                format!(
                    "stripe {at}: a power cut leaves wrong parity in sector {sector}, and no log tells"
                )
            }));
        }
        if is_wrong(repaired) {
            return Err(Broken::new(Property::RepairIsRight, || {
                format!("stripe {at}: the log's entry makes parity of sector {sector} wrong")
            }));
        }
        // The repair may be cut off: its parity is there or not, and the log is still there.
        for parity in [found[PARITY], repaired[PARITY]] {
            let again = repair([found[0], found[1], parity], entry, sector);
            if again != repaired {
                return Err(Broken::new(Property::RepairIsRight, || {
                    format!("stripe {at}: a second recovery has another result than the first")
                }));
            }
        }
        if self.bug == Some(Bug::RecoveryClearsLogEarly) && is_wrong(found) {
            return Err(Broken::new(Property::HoleIsLogged, || {
                format!("stripe {at}: a second cut leaves wrong parity, and the log is empty")
            }));
        }
        self.check_contents(s, start, at, sector, repaired)
    }

    fn check_contents(
        &self,
        s: &State,
        start: &Start,
        at: usize,
        sector: usize,
        found: [Option<Value>; BLOCKS + 1],
    ) -> Result<(), Broken> {
        for b in 0..BLOCKS {
            let sum = found[1 - b].unwrap_or(0) ^ found[PARITY].unwrap_or(0);
            let contents = found[b].unwrap_or(sum);
            let may = s.expected[at][b][sector].may;
            match version(b, contents) {
                Some(version) if may & (1 << version) != 0 => {}
                // A member that is lost in the cut takes along what was being written to it.
                _ if found[b].is_none() && self.is_lost_with(s, start, at, b) => {}
                Some(version) => {
                    return Err(Broken::new(Property::FlushedStays, || {
                        format!(
                            "stripe {at}, sector {sector} of block {b}: after a cut it holds version {version}, of {may:#b}{start}"
                        )
                    }));
                }
                None => {
                    return Err(Broken::new(Property::OnlyWritten, || {
                        format!(
                            "stripe {at}, sector {sector} of block {b}: after a cut it holds {contents:#010b}{start}"
                        )
                    }));
                }
            }
        }
        Ok(())
    }

    /// True if a block's device is lost in the cut, and the block has been written since the last flush.
    fn is_lost_with(&self, s: &State, start: &Start, at: usize, b: usize) -> bool {
        let is_settled = |sector: usize| s.expected[at][b][sector].may.count_ones() == 1;
        let device = Start {
            lost: NONE,
            ..*start
        };
        debug_assert_eq!(block(&self.bound, at, place(&self.bound, at, b)), b);
        device.device(place(&self.bound, at, b), at).is_some() && !(0..SECTORS).all(is_settled)
    }
}

impl fmt::Display for Start {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let says = &self.superblock;
        if says.swapped != NONE {
            write!(f, ", the spare is place {}", says.swapped)?;
        }
        if says.failed != NONE {
            write!(f, ", place {} has failed", says.failed)?;
            write!(f, " and {} stripes of it are recovered", says.committed)?;
        }
        if self.lost != NONE {
            write!(f, ", device {} is lost", self.lost)?;
        }
        Ok(())
    }
}

/// True if all blocks are there and parity doesn't fit the data.
fn is_wrong(found: [Option<Value>; BLOCKS + 1]) -> bool {
    match found {
        [Some(a), Some(b), Some(p)] => a ^ b != p,
        _ => false,
    }
}

/// Repairs a stripe's sector by the log's entry. Where a block that changes is missing, it stays as it is.
fn repair(
    found: [Option<Value>; BLOCKS + 1],
    entry: Entry,
    sector: usize,
) -> [Option<Value>; BLOCKS + 1] {
    let [a, b, parity] = found;
    let mut sum = entry.partial[sector];
    for (n, block) in [a, b].into_iter().enumerate() {
        match block {
            _ if entry.touched & (1 << n) == 0 => {}
            Some(contents) => sum ^= contents,
            None => return found,
        }
    }
    match parity {
        Some(_) if entry.touched != 0 => [a, b, Some(sum)],
        _ => found,
    }
}

/// True if a power cut after the step may leave something that a cut before it couldn't, or if more is expected of it.
pub fn may_matter(before: &State, after: &State) -> bool {
    let logs = |s: &State| s.logs.map(|log| (log.phase, log.unit));
    before.media != after.media
        || before.entries != after.entries
        || before.superblock != after.superblock
        || before.next_superblock != after.next_superblock
        || before.dead != after.dead
        || before.expected != after.expected
        || logs(before) != logs(after)
}
