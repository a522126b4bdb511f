//! The lab: workloads, baselines and experiments, and the wiring that they and the tests use.

pub mod agree;
pub mod bare;
pub mod bed;
pub mod child;
pub mod crash;
pub mod driver;
pub mod hit_rates;
pub mod idle;
pub mod instructions;
pub mod loopback;
pub mod machine;
pub mod md;
pub mod nbd;
pub mod null_nbd;
pub mod page_order;
pub mod path;
pub mod queues;
pub mod rings;
pub mod samples;
pub mod squeeze;
pub mod stats;
pub mod stripe_queue;
mod threads;
pub mod trace_cost;
pub mod trace_sample;
pub mod verdict;
pub mod vhost;
