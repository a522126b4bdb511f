//! The array while it serves: each queue has a part of the core that is its own, and stripes belong to the queue that finds them free. There is
//! no lock. docs/decisions/0048-stripes-own-themselves.md has the rules; `array` is the device around it.
//!
//! | file | has |
//! |---|---|
//! | `members`, `slots` | devices by role, and devices by slot |
//! | `plan`, `work`, `zero` | the blocks that a batch reads and writes, its calculation, and stripes that become holes |
//! | `state` | the array's state, for users |
//! | `common` | the parts that all queues share: words, pages, logs, members |
//! | `membership` | devices and members between two stops |
//! | `queue` | a queue's own part: its inputs, outputs and steps |
//! | `record` | the record of a stripe, the requests' parts that wait for it, and its plans |
//! | `request` | requests, from their begin to their end; reads that need no word |
//! | `gather` | the stripe queue: writes that wait until their stripe is whole |
//! | `streams` | writes that follow one another |
//! | `arms` | stripes of all queues that read, where members have arms |
//! | `batch` | a batch, from the claim of its word to the release |
//! | `flying` | batches and runs whose I/O or calculation goes on |
//! | `run` | neighbouring stripes that one write covers whole, as one batch |
//! | `sums`, `fits` | sums of blocks in memory; blocks that don't fit theirs |
//! | `intent` | bits of the bitmap: batches that wait for theirs, and sweeps |
//! | `log` | units of logs that this queue writes |
//! | `kick` | the stop that changes members |
//! | `orders` | devices that users have taken in or thrown out |
//! | `sync` | rebuilds, resyncs and checks: one part for each stripe |
//! | `io` | member I/O in flight |
//!
//! It does no I/O, and knows no threads: whoever drives a queue carries out what the queue puts into its outputs, and tells it the end. A
//! queue reads the common parts and changes them by words only; everything else that one has to tell another is [`Mail`].

mod arms;
mod batch;
mod common;
mod fits;
mod flying;
mod gather;
mod intent;
mod io;
mod kick;
mod log;
mod members;
mod membership;
mod orders;
mod plan;
mod queue;
mod record;
mod request;
mod run;
mod slots;
mod state;
mod streams;
mod sums;
mod sync;
mod work;
mod zero;

#[cfg(test)]
mod intent_tests;
#[cfg(test)]
mod random_tests;
#[cfg(test)]
mod run_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod thread_tests;
#[cfg(test)]
mod trace_tests;
#[cfg(test)]
mod world;

pub(super) use common::{Arriving, Common, Marks, Unknown};
pub(super) use kick::Change;
pub(super) use membership::Device;
pub(super) use queue::{Errand, Mail, Opening, QueueCore};
pub use state::{Action, SyncNow, WritePath};
pub(super) use state::{MemberNow, State};
pub(super) use sums::Sums;
pub(super) use sync::{Early, SyncEnd};
pub(super) use work::Work;

use crate::STRIPE_SECTORS;
use plan::{Record, bit};
use pvblk_block::{Buffer, Op, Request};
use std::sync::Arc;
use work::BatchPiece;

/// Ticks that make up the time a member has for an I/O.
pub(super) const TICKS: u32 = 4;

/// Names an I/O when it ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Token(usize);

/// Member I/O to start.
#[derive(Debug)]
pub(super) struct MemberIo {
    /// Slot of the device.
    pub slot: usize,
    pub op: Op,
    pub fua: bool,
    /// First sector of the device.
    pub sector: u64,
    pub data: Data,
    pub token: Token,
    /// If it is for a request that traces follow: the sector of the array.
    pub cause: Option<u64>,
}

/// Memory that an I/O reads into or writes.
#[derive(Debug, Default)]
pub(super) enum Data {
    /// Nothing: a flush.
    #[default]
    None,
    /// One piece of memory, which is the usual case.
    One(Buffer),
    /// The buffers of several requests.
    Some(Vec<Buffer>),
    /// None, and a block of zeros is written.
    Zeros,
}

impl Data {
    fn of(buffer: Option<Buffer>) -> Data {
        buffer.map_or(Data::None, Data::One)
    }

    pub fn buffers(&self) -> &[Buffer] {
        match self {
            Data::None | Data::Zeros => &[],
            Data::One(buffer) => std::slice::from_ref(buffer),
            Data::Some(buffers) => buffers,
        }
    }

    /// Moves it behind other buffers.
    pub fn append_to(self, buffers: &mut Vec<Buffer>) {
        match self {
            Data::None | Data::Zeros => {}
            Data::One(buffer) => buffers.push(buffer),
            Data::Some(mut some) => buffers.append(&mut some),
        }
    }
}

/// A request that calculations may read while the core holds it. It stays in its box, which goes back to the
/// submitter.
#[allow(clippy::redundant_allocation)]
type SharedRequest = Arc<Box<Request>>;

/// A part of a request that lies in one block of a stripe.
#[derive(Clone, Copy, Debug)]
struct Piece {
    request: usize,
    write: bool,
    stripe: u64,
    /// Data block of the stripe.
    index: usize,
    /// First sector in the block, and length.
    offset: u64,
    sectors: u64,
    /// Bytes of the request's data before it.
    skip: usize,
}

impl Piece {
    /// Length in bytes.
    fn len(&self) -> usize {
        debug_assert!(self.offset + self.sectors <= STRIPE_SECTORS);
        (self.sectors * 512) as usize
    }
}

/// Counters of writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rounds of stripes that were written.
    pub rounds: u64,
    /// Those of whole stripes.
    pub whole: u64,
    /// Blocks of 4 KiB that were read for them.
    pub prereads: u64,
    /// Bytes of writes.
    pub written_bytes: u64,
    /// Bytes that copies and calculations for them have loaded or stored, without what members do.
    pub moved_bytes: u64,
}

impl std::ops::Add for Counts {
    type Output = Counts;

    fn add(self, other: Counts) -> Counts {
        Counts {
            rounds: self.rounds + other.rounds,
            whole: self.whole + other.whole,
            prereads: self.prereads + other.prereads,
            written_bytes: self.written_bytes + other.written_bytes,
            moved_bytes: self.moved_bytes + other.moved_bytes,
        }
    }
}
