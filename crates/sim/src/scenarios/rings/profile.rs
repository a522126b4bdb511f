//! What differs from seed to seed. A seed explores one corner: few kinds of requests and of trouble, but often.

use crate::pick;
use crate::workload::{Load, Mix};
use fastrand::Rng;
use pvblk_export::xenbus::FrontWishes;
use pvblk_protocol::blkif::RingSize;
use pvblk_protocol::xenbus::BackendOffers;

/// What one seed is like.
#[derive(Clone, Debug)]
pub struct RingsProfile {
    /// What users ask for.
    pub load: Load,
    /// Steps with new requests and trouble.
    pub steps: u64,
    /// How many times something is killed, closed or broken.
    pub troubles: u32,
    /// Of 8 back ends that die, so many take the cache with them.
    pub power_loss: u32,
    /// One step in so many may begin trouble.
    pub trouble_one_in: u32,
    /// Shares of users, lanes and disk in the steps.
    pub pace: [u32; 3],
    /// The first connection's queues, and the most of later ones.
    pub queues: u32,
    /// Its rings, and the largest of later ones.
    pub ring: RingSize,
    /// Grants are kept, if the back end agrees.
    pub persistent: bool,
    /// One grant in so many is refused; 0: none.
    pub refuse: u32,
    /// The back end has to unmap.
    pub counted: bool,
    /// The disk tells when its cache is lost.
    pub mark_known: bool,
    /// The disk can discard.
    pub discard: bool,
}

/// What a back end offers.
#[derive(Clone, Copy, Debug)]
pub struct Offers {
    /// Keys of the handshake.
    pub keys: BackendOffers,
    /// `feature-flush-cache`; without it there is `feature-barrier`.
    pub flush: bool,
}

impl RingsProfile {
    /// The seed's.
    pub fn new(rng: &mut Rng) -> RingsProfile {
        let users = pick(rng, &[1, 1, 2, 2, 3]);
        let most_queues = pick(rng, &[1, 2, 4]);
        let queues = rng.u32(1..=most_queues);
        // Two rings of four pages or four of two are what the memory has room for.
        let most_order = if queues <= 2 { 2 } else { 1 };
        let discard = rng.bool();
        RingsProfile {
            load: Load {
                sectors: pick(rng, &[24, 64, 160]),
                depths: (0..users).map(|_| pick(rng, &[1, 2, 4, 8, 16])).collect(),
                mix: Mix {
                    reads: pick(rng, &[1, 4, 8]),
                    writes: pick(rng, &[2, 8, 8]),
                    flushes: pick(rng, &[0, 1, 1, 4]),
                    fua: pick(rng, &[0, 0, 1, 4]),
                    discards: if discard { pick(rng, &[0, 1, 3]) } else { 0 },
                    zeroes: 0,
                },
                longest: pick(rng, &[1, 4, 8, 15]),
                most: 15,
                batch: pick(rng, &[1, 4, 16]),
                hot: 0,
                sequential: pick(rng, &[0, 4, 7]),
                aligned: 0,
                changing: 0,
                stable: false,
                blank: 0,
                eager: rng.bool(),
                foreign: Some(pick(rng, &[0, 0, 2, 8])),
            },
            steps: rng.u64(60..800),
            troubles: pick(rng, &[0, 1, 2, 2, 3, 4, 6]),
            power_loss: pick(rng, &[0, 3, 6, 8]),
            trouble_one_in: pick(rng, &[2, 5, 20]),
            pace: [1, 4, 16].map(|_| pick(rng, &[1, 3, 9])),
            queues,
            ring: ring(rng.u32(0..=most_order).min(rng.u32(0..=most_order))),
            persistent: rng.bool(),
            refuse: pick(rng, &[0, 0, 0, 6, 40]),
            counted: rng.bool(),
            mark_known: rng.u8(..8) > 0,
            discard,
        }
    }

    /// What the front end asks for at its first connection, and so at most ever.
    pub fn wishes(&self) -> FrontWishes {
        FrontWishes {
            queues: self.queues,
            ring: self.ring,
            persistent: self.persistent,
            personality: Default::default(),
        }
    }

    /// What a back end offers. `least_segments` is what an earlier one promised; now and then one can do less.
    pub fn offers(&self, rng: &mut Rng, first: bool, least_segments: u16) -> Offers {
        let segments = pick(rng, &[0, 16, 32]);
        let poor = !first && rng.u8(..8) == 0;
        let segments = if poor {
            segments
        } else {
            segments.max(least_segments)
        };
        let flush = rng.u8(..4) > 0;
        let fewer = !first && rng.bool();
        Offers {
            keys: BackendOffers {
                max_queues: Some(if fewer { rng.u32(1..=4) } else { 4 }),
                max_ring: Some(if fewer { ring(rng.u32(0..=2)) } else { ring(2) }),
                max_indirect_segments: (segments > 0).then_some(segments),
                persistent: rng.bool(),
                barrier: !flush || rng.bool(),
            },
            flush,
        }
    }
}

fn ring(order: u32) -> RingSize {
    RingSize::from_order(order).expect("an order of at most 4")
}
