//! A load generator in the manner of fio: its job files, its meaning of the options, its JSON.
//!
//! ```text
//! job file or flags ─ parse ─▶ JobSpec ─ plan ─▶ a thread with a queue ─▶ Report ─▶ table, JSON
//! ```
//!
//! Each thread of a job opens one [`pvblk_block::Queue`] of the target, keeps `iodepth` requests in flight
//! and sleeps when there is nothing to do. Its hot path allocates nothing: requests and buffers are made once.
//!
//! Times are fio's: `slat` is the time of a submission, `clat` goes from there to the completion, `lat` is
//! both. A device that completes while it takes requests, or by deadline (`mem`, `null`, `delay` over them),
//! is measured as fio measures a synchronous engine: there is no `slat`, and requests are submitted one by
//! one.
//!
//! To use it from a program: make [`JobSpec`]s ([`Jobs::from_options`] is short), call [`run`], read the [`Report`].
//!
//! [`plot`] draws charts of results.

pub mod plot;

mod job_thread;
mod json;
mod latency;
mod machine;
mod options;
mod order;
mod parse;
mod plan;
mod report;
mod run;
mod sizes;
mod spec;
mod table;
mod target;
mod units;
mod usage;
mod verify;

pub use latency::{Latency, Moments};
pub use machine::Machine;
pub use order::Zipf;
pub use parse::{Jobs, parse_jobs};
pub use report::{JobReport, Mismatch, OpReport, Powers, Report, Usage};
pub use run::{Progress, RunOptions, run, run_on};
pub use sizes::BlockSizes;
pub use spec::{Amount, Distribution, JobSpec, Mix, Verify};
pub use target::{Load, open_target, scope};
