//! The model of checksums: docs/decisions/0052-checksums.md.
//!
//! Three members with volatile caches, two stripes of one block of each member, which share a group of sums; sums in memory and on the next
//! member, the map's bits, batches and direct reads, sweeps, power cuts with the start after each, and faults: flipped bits, and writes that a
//! device loses or puts elsewhere. Joins and hand-overs of words, logs and kicks are left out: the write path's model has them.
//!
//! | file | is |
//! |---|---|
//! | `state` | the state: media, sums, marks, batches, and what users may find |
//! | `step` | the steps that a state allows |
//! | `model` | the state after a step; writes that a device loses |
//! | `batch` | a batch: its reads, its sums, its writes |
//! | `direct` | a direct read |
//! | `repair` | a block that doesn't fit its sum |
//! | `rebuild` | a device that is rebuilt for a missing member |
//! | `rare` | sweeps, the action `checksum`, faults, a power cut and a start |
//! | `check` | the properties, and why no run goes on for ever |
//! | `bound` | what is searched |

mod batch;
mod bound;
mod bug;
mod check;
mod direct;
mod model;
mod rare;
mod rebuild;
mod repair;
mod state;
mod step;

pub use bound::{Bound, all, bound, some};
pub use bug::Bug;
pub use model::Model;
pub use state::State;
pub use step::Step;
