//! The differences between seeds. A seed explores one corner: few kinds of requests and of faults, but often.

use crate::pick;
use crate::workload::{Load, Mix};
use fastrand::Rng;
use pvblk_client::rings::FrontWishes;
use pvblk_protocol::blkif::RingSize;
use pvblk_protocol::xenbus::BackendOffers;

/// The properties of one seed.
#[derive(Clone, Debug)]
pub struct RingsProfile {
    /// Requests of the users.
    pub load: Load,
    /// Steps with new requests and faults.
    pub steps: u64,
    /// Number of kills, ends and broken rings.
    pub troubles: u32,
    /// Number of back ends, of 8 that die, that take the disk's cache with them.
    pub power_loss: u32,
    /// One step in so many may begin a fault.
    pub trouble_one_in: u32,
    /// Shares of users, lanes and disk in the steps.
    pub pace: [u32; 3],
    /// Number of queues of the first connection, and the most of later ones.
    pub queues: u32,
    /// Ring size of the first connection, and the greatest of later ones.
    pub ring: RingSize,
    /// Grants are persistent, if the back end agrees.
    pub persistent: bool,
    /// One of this many grants is refused; 0: none.
    pub refuse: u32,
    /// The back end has to unmap grants.
    pub counted: bool,
    /// The disk shows by its incarnation that its cache was lost.
    pub mark_known: bool,
    /// The disk can discard.
    pub discard: bool,
}

/// The offer of a back end.
#[derive(Clone, Copy, Debug)]
pub struct Offers {
    /// Keys of the handshake.
    pub keys: BackendOffers,
    /// The back end offers `feature-flush-cache`; without it, `feature-barrier`.
    pub flush: bool,
}

impl RingsProfile {
    /// The properties of a seed.
    pub fn new(rng: &mut Rng) -> RingsProfile {
        let users = pick(rng, &[1, 1, 2, 2, 3]);
        let most_queues = pick(rng, &[1, 2, 4]);
        let queues = rng.u32(1..=most_queues);
        // The memory has room for two rings of four pages or four of two.
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

    /// The wishes of the front end at its first connection, which later ones don't exceed.
    pub fn wishes(&self) -> FrontWishes {
        FrontWishes {
            queues: self.queues,
            ring: self.ring,
            persistent: self.persistent,
            personality: Default::default(),
        }
    }

    /// The offer of a back end. `least_segments` is the number that an earlier one granted; now and then one
    /// offers less.
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
