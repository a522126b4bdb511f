//! The differences between seeds. A seed explores one corner: few kinds of requests and of faults, but often.

use super::shape::Shape;
use crate::pick;
use crate::workload::{Load, Mix};
use fastrand::Rng;

/// The means by which parity is made right after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Resync of all parity.
    Resync,
    /// A partial parity log.
    Ppl,
    /// Resync of the parts that a write-intent bitmap marks.
    Bitmap,
}

/// The members that fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Losses {
    None,
    /// One member fails while the array serves.
    Serving,
    /// One member is missing when the array is started.
    Starting,
    /// One member fails while the array serves; then a second one, which ends the array until the
    /// power is cut.
    Two,
}

/// The properties of one seed.
#[derive(Clone, Debug)]
pub struct ArrayProfile {
    /// Layout of the array.
    pub shape: Shape,
    /// Means by which parity is made right after a crash.
    pub policy: Policy,
    /// Sectors of each partial parity log's area.
    pub log_sectors: u64,
    /// The disks begin with unknown contents, instead of zeros.
    pub junk: bool,
    /// Number of stripe heads.
    pub stripes: usize,
    /// Requests of the users.
    pub load: Load,
    /// Number of power cycles.
    pub cycles: u32,
    /// Most steps of a cycle.
    pub steps: u64,
    /// Members that fail.
    pub losses: Losses,
    /// There is a spare device, onto which the array recovers.
    pub spare: bool,
    /// Sectors for each bit of the bitmap, or of the private map.
    pub bitmap_chunk: u64,
    /// An array without a bitmap has a private map.
    pub private_map: bool,
    /// Its blocks have checksums.
    pub checksums: bool,
    /// Parity is computed while the array serves.
    pub later: bool,
    /// Writes go through the stripe queue.
    pub queued: bool,
    /// Number of starts, of 8, that are cut.
    pub cut_starts: u32,
    /// Shares of users and members in the steps.
    pub pace: [u32; 2],
    /// Members say that they are rotational, so that users wait for one another.
    pub rotational: bool,
    /// The array is squeezed again and again.
    pub squeezes: bool,
    /// Members write zeros by themselves.
    pub holes: bool,
    /// Milliseconds for which the array waits for a member; members stall then.
    pub limit: Option<u64>,
    /// Members that stalled come back by themselves.
    pub re_add: bool,
}

impl ArrayProfile {
    /// Adds the properties that came later, drawn from a generator of their own: old seeds keep
    /// their other choices.
    #[must_use]
    pub fn with_zeroes(self, seed: u64) -> ArrayProfile {
        let mut rng = Rng::with_seed(seed ^ 0x2e50);
        ArrayProfile {
            load: Load {
                blank: pick(&mut rng, &[0, 0, 1, 4]),
                ..self.load
            },
            holes: rng.u8(..4) > 0,
            ..self
        }
    }

    /// Gives the array a private map, drawn from a generator of its own.
    #[must_use]
    pub fn with_map(self, seed: u64) -> ArrayProfile {
        let mut rng = Rng::with_seed(seed ^ 0x3a90);
        ArrayProfile {
            private_map: self.policy != Policy::Bitmap && rng.u8(..3) > 0,
            ..self
        }
    }

    /// Gives the blocks of an array with a private map checksums, drawn from a generator of their own.
    #[must_use]
    pub fn with_checksums(self, seed: u64) -> ArrayProfile {
        let mut rng = Rng::with_seed(seed ^ 0x5a35);
        ArrayProfile {
            checksums: self.private_map && rng.u8(..3) > 0,
            ..self
        }
    }

    /// Lets members stall, drawn from a generator of their own; `always`: in each seed.
    #[must_use]
    pub fn with_stalls(self, seed: u64, always: bool) -> ArrayProfile {
        let mut rng = Rng::with_seed(seed ^ 0x57a1);
        if !always && (self.losses != Losses::None || rng.u8(..3) == 0) {
            return self;
        }
        ArrayProfile {
            losses: Losses::None,
            limit: Some(pick(&mut rng, &[4000, 10_000, 30_000])),
            re_add: rng.u8(..3) > 0 || always,
            policy: match rng.u8(..2) {
                0 => self.policy,
                _ => Policy::Bitmap,
            },
            // A member that is kicked before all parity was made takes data along.
            later: false,
            ..self
        }
    }

    /// The properties of a seed.
    pub fn new(rng: &mut Rng) -> ArrayProfile {
        let members = rng.usize(3..=6);
        let chunk = pick(rng, &[8, 8, 16, 32]);
        let member_sectors = pick(rng, &[64, 128, 256, 512]);
        let shape = Shape {
            members,
            chunk,
            layout: rng.u32(..4),
            rows: member_sectors / chunk,
        };
        let users = pick(rng, &[1, 1, 2, 2, 3]);
        let policies = [
            Policy::Ppl,
            Policy::Ppl,
            Policy::Ppl,
            Policy::Resync,
            Policy::Bitmap,
        ];
        let policy = pick(rng, &policies);
        let changing = pick(rng, &[0, 0, 1, 4]);
        let longest = pick(rng, &[1, 8, 24, 64, 128]);
        let (log_sectors, junk) = (pick(rng, &[16, 24, 72, 264, 2048]), rng.bool());
        let stripes = pick(rng, &[8, 8, 16, 32]);
        let depths = (0..users).map(|_| pick(rng, &[1, 2, 4, 8, 16]));
        let depths = depths.collect();
        let (cycles, steps) = (rng.u32(2..=5), pick(rng, &[100, 400, 1500]));
        let mut load = Load {
            depths,
            sectors: shape.sectors(),
            mix: Mix {
                reads: pick(rng, &[0, 1, 4]),
                writes: pick(rng, &[2, 8, 8]),
                flushes: pick(rng, &[0, 1, 1, 4]),
                fua: pick(rng, &[0, 0, 1, 4]),
                ..Mix::default()
            },
            longest: longest.min(shape.sectors()),
            most: 128,
            batch: 3,
            hot: pick(rng, &[0, 8, 32, 128]),
            sequential: pick(rng, &[0, 0, 4, 7]),
            aligned: pick(rng, &[0, 4, 8]),
            changing,
            stable: false,
            blank: 0,
            eager: true,
            foreign: None,
        };
        let spare = rng.bool();
        let bitmap_chunk = pick(rng, &[8, 16, 64]);
        let (later, queued) = (rng.bool(), rng.u8(..4) > 0);
        load.stable = changing == 0 && rng.bool();
        let losses = [
            Losses::None,
            Losses::None,
            Losses::Serving,
            Losses::Serving,
            Losses::Starting,
            Losses::Two,
        ];
        // Of a property that is no more: old seeds keep their other choices.
        rng.bool();
        ArrayProfile {
            policy,
            log_sectors,
            junk,
            stripes,
            load,
            cycles,
            steps,
            spare,
            bitmap_chunk,
            private_map: false,
            checksums: false,
            later,
            queued,
            losses: pick(rng, &losses),
            cut_starts: pick(rng, &[0, 2, 5]),
            pace: [1, 2].map(|_| pick(rng, &[1, 3, 9])),
            rotational: rng.u8(..4) == 0,
            squeezes: rng.u8(..3) == 0,
            holes: false,
            limit: None,
            re_add: false,
            shape,
        }
    }
}
