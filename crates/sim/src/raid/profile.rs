//! What differs from seed to seed. A seed explores one corner: few kinds of requests and of trouble, but often.

use super::shape::Shape;
use crate::profile::pick;
use fastrand::Rng;

/// What makes parity right after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Calculating all of it.
    Resync,
    /// A partial parity log.
    Ppl,
    /// Calculating what a write-intent bitmap marks.
    Bitmap,
}

/// The mix of requests: shares, each relative to the sum.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Reads.
    pub reads: u32,
    /// Writes.
    pub writes: u32,
    /// Flushes.
    pub flushes: u32,
    /// FUA writes.
    pub fua: u32,
}

/// Which trouble members make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Losses {
    /// None.
    None,
    /// One fails while the array serves.
    Serving,
    /// One isn't there when the array is started.
    Starting,
    /// As `Serving`; then a second one fails, which ends the array until the power is cut.
    Two,
}

/// What one seed is like.
#[derive(Clone, Debug)]
pub struct Profile {
    /// The array.
    pub shape: Shape,
    /// After a crash.
    pub policy: Policy,
    /// Sectors of each partial parity log's area.
    pub log_sectors: u64,
    /// It begins with bytes that nobody knows, instead of zeros.
    pub junk: bool,
    /// Stripe heads.
    pub stripes: usize,
    /// Depth of each submitter, which has a queue of its own.
    pub depths: Vec<u32>,
    /// Power cycles.
    pub cycles: u32,
    /// Steps of a cycle, at most.
    pub steps: u64,
    /// Requests.
    pub mix: Mix,
    /// Longest request in sectors.
    pub longest: u64,
    /// Sectors of the array on which requests concentrate; 0: none.
    pub hot: u64,
    /// Of 8 requests, so many follow the one before.
    pub sequential: u32,
    /// Of 8 requests, so many begin and end at blocks.
    pub aligned: u32,
    /// Of 8 writes, so many change their data on the way.
    pub restless: u32,
    /// Trouble.
    pub losses: Losses,
    /// There is a device more, onto which the array is rebuilt.
    pub spare: bool,
    /// Sectors for each bit of the bitmap.
    pub bitmap_chunk: u64,
    /// Parity is made while the array serves.
    pub later: bool,
    /// Writes go through the stripe queue.
    pub queued: bool,
    /// Submitters promise not to change their data.
    pub stable: bool,
    /// What is calculated waits, so that others come in between.
    pub lazy: bool,
    /// Of 8 starts, so many are cut.
    pub cut_starts: u32,
    /// Shares of submitters and members in the steps.
    pub pace: [u32; 2],
    /// Members say that they have arms, so that submitters wait for one another.
    pub rotational: bool,
    /// Memory gets short again and again.
    pub squeezes: bool,
    /// Of 8 writes, so many bring no data: zeros are written, or sectors discarded.
    pub zeroes: u32,
    /// Members write zeros by themselves.
    pub holes: bool,
}

impl Profile {
    /// What came later has dice of its own: without it, an old seed does what it did.
    #[must_use]
    pub fn with_zeroes(self, seed: u64) -> Profile {
        let mut rng = Rng::with_seed(seed ^ 0x2e50);
        Profile {
            zeroes: pick(&mut rng, &[0, 0, 1, 4]),
            holes: rng.u8(..4) > 0,
            ..self
        }
    }

    /// The seed's.
    pub fn new(rng: &mut Rng) -> Profile {
        let members = rng.usize(3..=6);
        let chunk = pick(rng, &[8, 8, 16, 32]);
        let member_sectors = pick(rng, &[64, 128, 256, 512]);
        let shape = Shape {
            members,
            chunk,
            layout: rng.u32(..4),
            rows: member_sectors / chunk,
        };
        let submitters = pick(rng, &[1, 1, 2, 2, 3]);
        let policy = pick(
            rng,
            &[
                Policy::Ppl,
                Policy::Ppl,
                Policy::Ppl,
                Policy::Resync,
                Policy::Bitmap,
            ],
        );
        let restless = pick(rng, &[0, 0, 1, 4]);
        let longest = pick(rng, &[1, 8, 24, 64, 128]);
        Profile {
            policy,
            log_sectors: pick(rng, &[16, 24, 72, 264, 2048]),
            junk: rng.bool(),
            stripes: pick(rng, &[8, 8, 16, 32]),
            depths: (0..submitters)
                .map(|_| pick(rng, &[1, 2, 4, 8, 16]))
                .collect(),
            cycles: rng.u32(2..=5),
            steps: pick(rng, &[100, 400, 1500]),
            mix: Mix {
                reads: pick(rng, &[0, 1, 4]),
                writes: pick(rng, &[2, 8, 8]),
                flushes: pick(rng, &[0, 1, 1, 4]),
                fua: pick(rng, &[0, 0, 1, 4]),
            },
            longest: longest.min(shape.sectors()),
            hot: pick(rng, &[0, 8, 32, 128]),
            sequential: pick(rng, &[0, 0, 4, 7]),
            aligned: pick(rng, &[0, 4, 8]),
            restless,
            spare: rng.bool(),
            bitmap_chunk: pick(rng, &[8, 16, 64]),
            later: rng.bool(),
            queued: rng.u8(..4) > 0,
            stable: restless == 0 && rng.bool(),
            lazy: rng.bool(),
            losses: pick(
                rng,
                &[
                    Losses::None,
                    Losses::None,
                    Losses::Serving,
                    Losses::Serving,
                    Losses::Starting,
                    Losses::Two,
                ],
            ),
            cut_starts: pick(rng, &[0, 2, 5]),
            pace: [1, 2].map(|_| pick(rng, &[1, 3, 9])),
            rotational: rng.u8(..4) == 0,
            squeezes: rng.u8(..3) == 0,
            zeroes: 0,
            holes: false,
            shape,
        }
    }
}
