//! `pvblk-lab hit-rates`: shares of reads that find their page, by the policy of the cache and by the shape of the load.
//!
//! The cache that is served and the one with Linux' lists of 2011 run as they are, in virtual time on a modelled disk, without read-ahead. The
//! others are references of a few lines (see [`references`]). Shapes are made from a seed, so the same figures come out each time.

pub mod references;
mod replay;
mod report;
pub mod shapes;

use crate::machine::Machine;
use crate::page_order::policy::{ActiveShare, Policy};
use crate::threads::spread;
use anyhow::Result;
use pvblk_cache::Standard;
use references::{Best, Lru, Reference, S3Fifo, Sieve};
use serde::Serialize;
use shapes::{Shape, Trace};

/// Names of the policies, in the order of the columns.
pub const POLICIES: [&str; 6] = ["best", "served", "2011", "LRU", "SIEVE", "S3-FIFO"];

#[derive(Clone, Copy, Debug)]
pub struct HitRateOptions {
    /// Pages of each cache.
    pub pages: u64,
    /// Shapes that run at a time.
    pub threads: usize,
    /// Seed of the shapes.
    pub seed: u64,
}

/// Hit rates of one shape.
#[derive(Clone, Debug, Serialize)]
pub struct HitRateSample {
    pub shape: &'static str,
    /// Reads that are counted: those after the cache was full, without those of scans.
    pub reads: u64,
    /// Shares of them that hit, 0 to 1, in the order of [`POLICIES`].
    pub rates: [f64; POLICIES.len()],
    /// The same of all reads.
    pub of_all: [f64; POLICIES.len()],
}

#[derive(Clone, Debug, Serialize)]
pub struct HitRates {
    pub machine: Machine,
    /// Pages of each cache.
    pub pages: u64,
    pub seed: u64,
    pub samples: Vec<HitRateSample>,
}

fn sample(shape: Shape, options: &HitRateOptions) -> Result<HitRateSample> {
    let trace = shape.trace(options.pages, options.seed);
    let frames = options.pages as usize;
    let of = |reference: &mut dyn Reference| shares(&trace, |page| Ok(reference.access(page)));
    let lists_of_2011 = Policy {
        active: ActiveShare::Percent(50),
        ..Policy::DEFAULT
    };
    let rates = [
        of(&mut Best::new(frames, &trace.pages))?,
        replay::rates(Standard, options.pages, &trace)?,
        replay::rates(lists_of_2011, options.pages, &trace)?,
        of(&mut Lru::new(frames))?,
        of(&mut Sieve::new(frames))?,
        of(&mut S3Fifo::new(frames))?,
    ];
    Ok(HitRateSample {
        shape: shape.name(),
        reads: trace.counted(),
        rates: rates.map(|rates| rates.0),
        of_all: rates.map(|rates| rates.1),
    })
}

/// Shares of the counted reads and of all reads for which `read` answers that they hit.
fn shares(trace: &Trace, mut read: impl FnMut(u64) -> Result<bool>) -> Result<(f64, f64)> {
    let (mut hits, mut all) = (0, 0);
    for (at, &page) in trace.pages.iter().enumerate() {
        let hit = read(page)?;
        hits += u64::from(hit && trace.counts(at));
        all += u64::from(hit);
    }
    let of = |hits: u64, reads: u64| hits as f64 / reads.max(1) as f64;
    Ok((of(hits, trace.counted()), of(all, trace.pages.len() as u64)))
}

/// Runs all shapes; `progress` is told which one begins.
pub fn run(options: &HitRateOptions, progress: &(dyn Fn(&str) + Sync)) -> Result<HitRates> {
    let samples = spread(options.threads, Shape::ALL.len(), |at| {
        let shape = Shape::ALL[at];
        progress(&format!(
            "{}, {} of {}",
            shape.name(),
            at + 1,
            Shape::ALL.len()
        ));
        sample(shape, options)
    })?;
    Ok(HitRates {
        machine: Machine::here(),
        pages: options.pages,
        seed: options.seed,
        samples,
    })
}
