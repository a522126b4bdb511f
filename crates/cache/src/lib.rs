//! A page cache: a [`pvblk_block::BlockDevice`] over another one, in bounded memory.
//!
//! ```text
//! reads that hit ──▶ table: no lock ──▶ copy
//! the rest ──▶ core (one lock, once for a batch) ──▶ lower queues: one of the device for each of the cache
//!                │ alloc: buddy lists, lists of CPUs, watermarks
//!                │ lists: active and inactive, refault distance
//!                └ write-back: by sector, in runs; a flush covers frames by number
//! ```
//!
//! docs/decisions/0012-page-cache.md says what must hold. The decisions of a cache that is short of memory are a type parameter
//! ([`Policy`]), so that the experiments can show what made a kernel lose most of its throughput in 2009.

pub mod alloc;
mod ask;
mod background;
mod config;
mod core;
mod counters;
mod device;
mod giving;
mod lists;
mod pace;
mod policy;
mod queue;
mod readahead;
mod shared;
mod table;

pub use background::BackgroundWork;
pub use config::{CacheConfig, Mode, PAGE_BYTES, PAGE_SECTORS};
pub use counters::Counters;
pub use device::PageCache;
pub use policy::{AfterFailure, Policy, Shortfall, Standard};
pub use pvblk_block::stacked::Due;
