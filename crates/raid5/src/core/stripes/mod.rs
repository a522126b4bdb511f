//! The core without a lock: each queue has a part of it that is its own, and stripes belong to the queue that finds them free.
//! docs/decisions/0048-stripes-own-themselves.md has the rules. `array::stripes` is the device around it, which volumes have by `core=words`.
//!
//! | file | has |
//! |---|---|
//! | `common` | the parts that all queues share: words, pages, logs, members |
//! | `membership` | devices and members between two stops |
//! | `queue` | a queue's own part: its inputs, outputs and steps |
//! | `record` | the record of a stripe, the requests' parts that wait for it, and its plans |
//! | `request` | requests, from their begin to their end; reads that need no word |
//! | `gather` | the stripe queue: writes that wait until their stripe is whole |
//! | `arms` | stripes of all queues that read, where members have arms |
//! | `batch` | a batch, from the claim of its word to the release |
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
mod gather;
mod intent;
mod io;
mod kick;
mod log;
mod membership;
mod orders;
mod queue;
mod record;
mod request;
mod sync;

#[cfg(test)]
mod intent_tests;
#[cfg(test)]
mod random_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod thread_tests;
#[cfg(test)]
mod trace_tests;
#[cfg(test)]
mod world;

pub use common::Common;
pub use kick::Change;
pub use membership::Device;
pub use queue::{Errand, Mail, QueueCore};
pub use sync::{Early, SyncEnd};

use super::Shared;
use super::plan::{Record, bit};
use super::sync::Action;
use super::work::{RoundPiece, Work};
use super::{Data, MemberIo, Piece};
