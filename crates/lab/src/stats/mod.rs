//! Statistics of samples: summaries, comparisons, and the claims that they allow.
//!
//! [`Comparison`] prints what `ministat` prints for the same numbers. [`PairRatio`] and [`Claim`] are for
//! runs that were interleaved in pairs, with an A/A control beside them.

mod compare;
mod confidence;
mod general;
mod pairs;
mod summary;

pub use compare::{Comparison, MIN_SAMPLES};
pub use confidence::Confidence;
pub use general::general;
pub use pairs::{Claim, Doubt, PairRatio};
pub use summary::{HEADER, Summary};
