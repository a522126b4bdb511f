//! Exhaustive models of RAID-5: of the write path (docs/decisions/0048-stripes-own-themselves.md), and of checksums, which is [`sums`].
//!
//! The former has stripes, logs, flushes, a member that fails, a rebuild, and power cuts at every step, all in all orders, for an array of three
//! members with two stripes of two blocks of two sectors and for three writes. [`search`](search::search) looks at all states within a
//! [`Bound`]; a [`Property`] that doesn't hold is found with the shortest way there. [`Bug`]s can be planted, and have to be found.
//!
//! | file | is |
//! |---|---|
//! | `state` | the state: media, words, machines, expectations |
//! | `plan` | which blocks a batch reads and writes, and their contents |
//! | `step` | the steps that a state allows: the vocabulary of traces |
//! | `model` | the state after a step |
//! | `rare` | the kick of a member, and rebuilding |
//! | `check` | the properties; what a power cut leaves |
//! | `rank` | why no run goes on for ever |
//! | `machine` | a model, as far as the search has to know it |
//! | `vocabulary` | macros for lists of steps and bugs |
//! | `search` | breadth-first search |
//! | `bound`, `bounds` | what is searched |
//! | `trace` | checks a trace, step by step |
//! | [`sums`] | the model of checksums, with the same search, properties and traces |

mod bound;
mod bounds;
mod bug;
mod check;
mod machine;
mod model;
mod plan;
mod rank;
mod rare;
mod search;
mod state;
mod step;
pub mod sums;
mod trace;
mod vocabulary;

pub use bound::{Bound, Shape, bound, shape};
pub use bounds::{all, some};
pub use bug::Bug;
pub use check::{Broken, Property};
pub use machine::{Machine, Vocabulary};
pub use model::Model;
pub use search::{Found, Trace, search};
pub use state::State;
pub use step::Step;
pub use trace::{Refused, replay};
