//! An array around either core, and its background work, which the test steps.

use pvblk_block::{BlockDevice, Close};
use pvblk_raid5::{
    ArrayOptions, Assembly, BackgroundWork, Consistency, CoreKind, ManagedArray, Raid5,
    StripeArray, StripeBackground, WriteCounts,
};
use std::sync::Arc;
use std::time::Duration;

/// A core, and a consistency policy of arrays that it takes.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub core: CoreKind,
    pub consistency: Consistency,
}

const fn kind(core: CoreKind, consistency: Consistency) -> Kind {
    Kind { core, consistency }
}

/// Each test has use for some of it.
#[allow(dead_code)]
impl Kind {
    pub const PPL: [Kind; 2] = [
        kind(CoreKind::Lock, Consistency::Ppl),
        kind(CoreKind::Words, Consistency::Ppl),
    ];
    pub const RESYNC: [Kind; 2] = [
        kind(CoreKind::Lock, Consistency::Resync),
        kind(CoreKind::Words, Consistency::Resync),
    ];
    pub const BITMAP: [Kind; 2] = [
        kind(CoreKind::Lock, Consistency::Bitmap),
        kind(CoreKind::Words, Consistency::Bitmap),
    ];
    pub const ALL: [Kind; 6] = [
        Kind::PPL[0],
        Kind::PPL[1],
        Kind::RESYNC[0],
        Kind::RESYNC[1],
        Kind::BITMAP[0],
        Kind::BITMAP[1],
    ];
}

pub trait Array: ManagedArray + BlockDevice + Close {
    /// Counters of writes.
    #[allow(dead_code)]
    fn counts(&self) -> WriteCounts;
}

impl Array for StripeArray {
    fn counts(&self) -> WriteCounts {
        StripeArray::counts(self)
    }
}

impl Array for Raid5 {
    fn counts(&self) -> WriteCounts {
        Raid5::counts(self)
    }
}

pub trait Background {
    /// Does what is due; `now` counts from any moment.
    fn step(&mut self, now: Duration);
    /// True if work is under way, or will be.
    fn is_busy(&self) -> bool;
}

impl Background for BackgroundWork {
    fn step(&mut self, now: Duration) {
        BackgroundWork::step(self, now);
    }
    fn is_busy(&self) -> bool {
        BackgroundWork::is_busy(self)
    }
}

impl Background for StripeBackground {
    fn step(&mut self, now: Duration) {
        self.work(now);
    }
    fn is_busy(&self) -> bool {
        StripeBackground::is_busy(self)
    }
}

pub fn open(
    core: CoreKind,
    assembly: Assembly,
    options: &ArrayOptions,
) -> (Arc<dyn Array>, Box<dyn Background>) {
    match core {
        CoreKind::Lock => {
            let array = Raid5::start(assembly, options).unwrap();
            let background = BackgroundWork::new(&array).unwrap();
            (array, Box::new(background))
        }
        CoreKind::Words => {
            let array = StripeArray::start(assembly, options).unwrap();
            let background = StripeBackground::new(&array);
            (array, Box::new(background))
        }
    }
}
