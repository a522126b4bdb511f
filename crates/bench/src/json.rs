//! The report in the layout of fio's JSON output (fio(1), "JSON OUTPUT"), for the tools that read it.

use super::Machine;
use super::latency::{Latency, Moments};
use super::report::{JobReport, OpReport, Powers, Report};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use std::time::{Duration, UNIX_EPOCH};

/// Percentiles that fio prints by default.
const PERCENTILES: [f64; 17] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95,
    99.99,
];

/// Key and value pairs in their order: JSON objects whose keys are made here.
struct Pairs<T>(Vec<(String, T)>);

impl<T: Serialize> Serialize for Pairs<T> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let mut map = s.serialize_map(Some(self.0.len()))?;
        for (key, value) in &self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

#[derive(Serialize)]
struct Document {
    #[serde(rename = "fio version")]
    version: String,
    timestamp: u64,
    timestamp_ms: u128,
    #[serde(rename = "global options")]
    global: Pairs<String>,
    /// The machine of the run, which fio's output doesn't have.
    machine: Machine,
    jobs: Vec<Job>,
}

#[derive(Serialize)]
struct Job {
    jobname: String,
    groupid: u32,
    error: i32,
    eta: u32,
    elapsed: u64,
    #[serde(rename = "job options")]
    options: Pairs<String>,
    read: Op,
    write: Op,
    trim: Op,
    sync: Sync,
    job_runtime: u64,
    usr_cpu: f64,
    sys_cpu: f64,
    ctx: u64,
    majf: u64,
    minf: u64,
    iodepth_level: Pairs<f64>,
    iodepth_submit: Pairs<f64>,
    iodepth_complete: Pairs<f64>,
    latency_ns: Pairs<f64>,
    latency_us: Pairs<f64>,
    latency_ms: Pairs<f64>,
    latency_depth: u32,
    latency_target: u32,
    latency_percentile: f64,
    latency_window: u32,
}

#[derive(Serialize)]
struct Op {
    io_bytes: u64,
    io_kbytes: u64,
    bw_bytes: u64,
    bw: u64,
    iops: f64,
    runtime: u128,
    total_ios: u64,
    short_ios: u64,
    drop_ios: u64,
    slat_ns: Times,
    clat_ns: Times,
    lat_ns: Times,
    bw_min: u64,
    bw_max: u64,
    bw_agg: f64,
    bw_mean: f64,
    bw_dev: f64,
    bw_samples: u64,
    iops_min: u64,
    iops_max: u64,
    iops_mean: f64,
    iops_stddev: f64,
    iops_samples: u64,
}

#[derive(Serialize)]
struct Sync {
    total_ios: u64,
    lat_ns: Times,
}

#[derive(Serialize)]
struct Times {
    min: u64,
    max: u64,
    mean: f64,
    stddev: f64,
    #[serde(rename = "N")]
    n: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    percentile: Option<Pairs<u64>>,
}

fn times(latency: &Latency, percentiles: bool) -> Times {
    let m: &Moments = latency.moments();
    let percentile = (percentiles && m.count > 0).then(|| {
        let pair = |p: &f64| (format!("{p:.6}"), latency.percentile_ns(*p));
        Pairs(PERCENTILES.iter().map(pair).collect())
    });
    Times {
        min: m.min as u64,
        max: m.max as u64,
        mean: m.mean(),
        stddev: m.stddev(),
        n: m.count,
        percentile,
    }
}

fn op(r: &OpReport) -> Op {
    let bw = r.bytes_per_second();
    let (b, i) = (&r.bw_kib, &r.iops_samples);
    Op {
        io_bytes: r.bytes,
        io_kbytes: r.bytes >> 10,
        bw_bytes: bw as u64,
        bw: (bw / 1024.0) as u64,
        iops: r.iops(),
        runtime: r.runtime.as_millis(),
        total_ios: r.ios,
        short_ios: 0,
        drop_ios: 0,
        slat_ns: times(&r.slat, false),
        clat_ns: times(&r.clat, true),
        lat_ns: times(&r.lat, false),
        bw_min: b.min as u64,
        bw_max: b.max as u64,
        bw_agg: if b.count > 0 { 100.0 } else { 0.0 },
        bw_mean: b.mean(),
        bw_dev: b.stddev(),
        bw_samples: b.count,
        iops_min: i.min as u64,
        iops_max: i.max as u64,
        iops_mean: i.mean(),
        iops_stddev: i.stddev(),
        iops_samples: i.count,
    }
}

/// Percentages of `of`, by fio's names of the ranges.
fn levels(names: [&str; 7], counts: [u64; 7], of: u64) -> Pairs<f64> {
    let share = |n: u64| 100.0 * n as f64 / of.max(1) as f64;
    let pairs = names.iter().zip(counts);
    Pairs(pairs.map(|(k, n)| ((*k).to_owned(), share(n))).collect())
}

fn depth_levels(p: &Powers) -> Pairs<f64> {
    let [_, one, two, four, eight, sixteen, thirty_two, more] = p.0;
    levels(
        ["1", "2", "4", "8", "16", "32", ">=64"],
        [one, two, four, eight, sixteen, thirty_two, more],
        p.0.iter().sum(),
    )
}

/// fio's ranges of batches end at their name: 1 to 4 are under "4".
fn batch_levels(p: &Powers) -> Pairs<f64> {
    let [zero, one, two, four, eight, sixteen, thirty_two, more] = p.0;
    levels(
        ["0", "4", "8", "16", "32", "64", ">=64"],
        [zero, one + two, four, eight, sixteen, thirty_two, more],
        p.0.iter().sum(),
    )
}

/// Shares of times up to each bound, from the bound before on; `last` adds an open range.
fn buckets(latency: &Latency, from: u64, bounds: &[u64], scale: u64, last: bool) -> Pairs<f64> {
    let share = |n: u64| 100.0 * n as f64 / latency.count().max(1) as f64;
    let mut low = from;
    let mut pairs = Vec::new();
    for &bound in bounds {
        let high = bound * scale;
        pairs.push((bound.to_string(), share(latency.between(low, high))));
        low = high;
    }
    if last {
        let bound = bounds.last().copied().unwrap_or(0);
        pairs.push((format!(">={bound}"), share(latency.between(low, u64::MAX))));
    }
    Pairs(pairs)
}

fn job(r: &JobReport) -> Job {
    let mut lat = r.read.lat.clone();
    lat.merge(&r.write.lat);
    let wall = r.usage.wall_s.max(1e-9);
    let bounds = [2, 4, 10, 20, 50, 100, 250, 500, 750, 1000, 2000];
    Job {
        jobname: r.name.clone(),
        groupid: r.group,
        error: r.errno,
        eta: 0,
        elapsed: r.elapsed.as_secs() + 1,
        options: Pairs(r.options.clone()),
        read: op(&r.read),
        write: op(&r.write),
        trim: op(&OpReport::default()),
        sync: Sync {
            total_ios: r.flush.count(),
            lat_ns: times(&r.flush, true),
        },
        job_runtime: r.elapsed.as_millis() as u64,
        usr_cpu: 100.0 * r.usage.user_s / wall,
        sys_cpu: 100.0 * r.usage.system_s / wall,
        ctx: r.usage.switches,
        majf: r.usage.major_faults,
        minf: r.usage.minor_faults,
        iodepth_level: depth_levels(&r.depths),
        iodepth_submit: batch_levels(&r.submits),
        iodepth_complete: batch_levels(&r.completes),
        latency_ns: buckets(&lat, 0, &bounds[..10], 1, false),
        latency_us: buckets(&lat, 1000, &bounds[..10], 1000, false),
        latency_ms: buckets(&lat, 1_000_000, &bounds, 1_000_000, true),
        latency_depth: r.iodepth,
        latency_target: 0,
        latency_percentile: 100.0,
        latency_window: 0,
    }
}

pub(super) fn render(report: &Report) -> serde_json::Result<String> {
    let since: Duration = report
        .finished
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    serde_json::to_string_pretty(&Document {
        // Readers look for a version such as fio-3.33; this is the version of the program that
        // wrote the report.
        version: concat!("pvblk-", env!("CARGO_PKG_VERSION")).into(),
        timestamp: since.as_secs(),
        timestamp_ms: since.as_millis(),
        global: Pairs(report.global.clone()),
        machine: Machine::here(),
        jobs: report.entries().iter().map(job).collect(),
    })
}
