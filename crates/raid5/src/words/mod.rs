//! Words, by which queues own stripes and logs without a lock (docs/decisions/0048-stripes-own-themselves.md). A word is an atomic of 64 bits for
//! each stripe or log: its owner, its state, and the newest piece of a request that waits for it.
//! `core` uses them.
//!
//! | file | has |
//! |---|---|
//! | `packed` | the fields of a word |
//! | `arrivals` | pieces that wait in a word's list |
//! | `token` | ownership of a word, as a value |
//! | `table` | words, and each access to them |
//! | `stock` | pages that move between queues, and those of each queue |
//! | `pages` | the memory of a stripe's pages |
//! | `places` | the places of each queue |
//! | `log` | logs, the batches that wait for them, and the parts of a unit |
//! | `unit` | a unit's bytes, and the memory of partial parity |
//! | `epoch` | the stop of all words, and who stopped them |
//! | `chunks` | the write-intent bitmap's chunks |
//!
//! crates/raid5/tests/loom.rs has models of them for loom.

mod arrivals;
mod chunks;
mod epoch;
mod log;
mod packed;
mod pages;
mod places;
mod stock;
mod table;
mod token;
mod unit;

#[cfg(test)]
mod log_random_tests;
#[cfg(test)]
mod log_tests;
#[cfg(test)]
mod stock_tests;
#[cfg(test)]
mod tests;

pub use arrivals::{Arrivals, Arrived, Place};
pub use chunks::{Chunks, Marked, SeenChunk};
pub use epoch::{Epoch, Passed, Seen, Stop};
pub use log::{Answer, Flushing, LogErrands, LogRecord, LogStep, LogToken, Logs, Part, Writing};
pub use packed::{Owner, Packed, Phase};
pub use pages::{PageMemory, StripePages};
pub use places::{OwnPlaces, Places};
pub use stock::{Errands, PageSet, Reserve, Stock};
pub use table::{Arrival, InFlight, Looked, Owned, Record, Table};
pub use token::{Claimed, Closed, Leaves, Open, Parked, Planned, Takes, Token, Waiting};
pub use unit::{LogBatch, LogBlock, LogBlocks, LogEntry, LogFormat, Partial, Room};
