//! A server in its own process, front ends on its disks, and one measurement: the experiments on rings share
//! them.

use crate::child::Server;
use anyhow::{Result, ensure};
use pvblk_bench::{self as bench, BlockSizes, JobSpec, Mix, RunOptions};
use pvblk_block::{BlockDevice, SystemClock};
use pvblk_client::local::{ConnectOptions, FrontLink, connect};
use pvblk_client::rings::{Frontend, InStream, MergePolicy, Statistics};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A server with some disks.
pub struct Bed {
    socket: PathBuf,
    /// Dropped last, after its clients.
    _server: Server,
}

/// Options of a front end's connection.
#[derive(Clone, Copy, Debug)]
pub struct Wishes {
    pub queues: u32,
    /// Pages of each ring.
    pub ring_pages: usize,
    /// Memory for data in bytes.
    pub memory_bytes: u64,
}

impl Bed {
    /// Serves `disks` (name and volume) in a process of its own, with a socket in `dir`.
    pub fn start(dir: &Path, disks: &[(String, String)], max_queues: u32) -> Result<Bed> {
        let socket = dir.join("rings.sock");
        let mut args: Vec<String> = vec![
            "serve".into(),
            "--local".into(),
            format!("unix:{}", socket.display()),
            "--max-queues".into(),
            max_queues.to_string(),
        ];
        for (name, volume) in disks {
            args.extend(["--disk".into(), format!("{name}={volume}")]);
        }
        let server = Server::start(&args, None)?;
        Ok(Bed {
            socket,
            _server: server,
        })
    }

    /// Connects to a disk; an error if the server negotiates less than was asked for.
    pub fn connect<M: MergePolicy>(&self, disk: &str, wishes: &Wishes) -> Result<Lane<M>> {
        let options = ConnectOptions {
            queues: wishes.queues,
            ring_pages: wishes.ring_pages,
            memory_bytes: wishes.memory_bytes,
            name: format!("lab {disk}"),
            ..ConnectOptions::default()
        };
        let (parts, link) = connect(&self.socket, disk, &options)?;
        let front = Frontend::with_policy(parts, Arc::new(SystemClock))?;
        ensure!(
            front.queues() == wishes.queues as usize
                && front.ring_entries() as usize == wishes.ring_pages * 32,
            "disk {disk}: {} queues of {} entries were negotiated",
            front.queues(),
            front.ring_entries()
        );
        front.count();
        Ok(Lane { front, link })
    }
}

/// A connected disk.
pub struct Lane<M: MergePolicy = InStream> {
    front: Arc<Frontend<M>>,
    link: FrontLink,
}

impl<M: MergePolicy> Drop for Lane<M> {
    fn drop(&mut self) {
        let _ = self.link.close();
    }
}

/// The load of one sample.
#[derive(Clone, Debug, Serialize)]
pub struct Load {
    pub threads: u32,
    /// Requests in flight of each thread.
    pub depth: u32,
    /// Bytes of each request; the shares of a mix are in `pattern`.
    pub block: u32,
    pub pattern: Pattern,
    /// Requests are submitted as many at a time as are free, else one by one.
    pub batched: bool,
    pub seconds: f64,
}

/// Kinds of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// Reads at random places.
    RandomRead,
    /// Writes at random places.
    RandomWrite,
    /// Each thread reads a stream of its own, from the start of a part of its own.
    SequentialRead,
    /// IOmeter's file server, as fio's example of that name has it: 512 B to 64 KiB, four fifths reads.
    Iometer,
}

/// Block sizes in bytes and their shares in percent of IOmeter's file-server pattern (Intel's access specification of that name).
const IOMETER: [(u32, u32); 8] = [
    (512, 10),
    (1024, 5),
    (2048, 5),
    (4096, 60),
    (8192, 2),
    (16384, 4),
    (32768, 4),
    (65536, 10),
];

/// Figures of one measurement.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Sample {
    /// Requests of the load per second.
    pub iops: f64,
    /// 10^6 bytes per second.
    pub mb_s: f64,
    /// Median of the completion time, microseconds.
    pub p50_us: f64,
    /// 99th percentile of it, microseconds.
    pub p99_us: f64,
    /// Requests per second that reached the ring (iostat: r/s + w/s).
    pub ring_per_s: f64,
    /// Merged into others, per second (iostat: rrqm/s + wrqm/s).
    pub merged_per_s: f64,
    /// Requests waiting or on the ring, on average (iostat: aqu-sz).
    pub aqu_sz: f64,
    /// Requests on the ring, on average.
    pub in_flight: f64,
    /// Size of a request that reached the ring in KiB, on average (iostat: rareq-sz).
    pub areq_kib: f64,
}

/// Requests per second of each sample.
pub fn rates(samples: &[Sample]) -> Vec<f64> {
    samples.iter().map(|s| s.iops).collect()
}

/// Median of a figure over the samples; 0 if there are none.
pub fn typical(samples: &[Sample], f: fn(&Sample) -> f64) -> f64 {
    let values: Vec<f64> = samples.iter().map(f).collect();
    if values.is_empty() {
        0.0
    } else {
        crate::path::median(&values)
    }
}

impl<M: MergePolicy> Lane<M> {
    /// Puts `load` on the disk.
    pub fn measure(&self, load: &Load) -> Result<Sample> {
        let device: Arc<dyn BlockDevice> = self.front.clone();
        let jobs = [load.job(&device)];
        let before = self.front.statistics();
        let report = bench::run(&jobs, &device, &RunOptions::default())?;
        let now = self.front.statistics().since(&before);
        let total = report.total();
        if let Some(error) = &total.error {
            anyhow::bail!("{error}");
        }
        ensure!(total.read.ios + total.write.ios > 0, "nothing was done");
        let clat = total.clat();
        let us = |percent| clat.percentile_ns(percent) as f64 / 1000.0;
        let parts = f64::from(load.parts(&device));
        Ok(Sample {
            iops: total.iops() / parts,
            mb_s: total.bytes_per_second() / 1e6,
            p50_us: us(50.0),
            p99_us: us(99.0),
            ..iostat(&now)
        })
    }
}

fn iostat(now: &Statistics) -> Sample {
    let per_s = |n: u64| n as f64 / now.seconds;
    Sample {
        iops: 0.0,
        mb_s: 0.0,
        p50_us: 0.0,
        p99_us: 0.0,
        ring_per_s: per_s(now.requests),
        merged_per_s: per_s(now.merged),
        aqu_sz: now.queue_seconds / now.seconds,
        in_flight: now.ring_seconds / now.seconds,
        areq_kib: now.sectors as f64 / 2.0 / now.requests.max(1) as f64,
    }
}

impl Load {
    /// Requests of the device that each request of the load becomes: longer ones than the device takes are cut, as a
    /// block layer does, and all parts are in flight at once.
    fn parts(&self, device: &Arc<dyn BlockDevice>) -> u32 {
        let most = device.limits().max_sectors * 512;
        self.block.div_ceil(most).max(1)
    }

    fn job(&self, device: &Arc<dyn BlockDevice>) -> JobSpec {
        let parts = self.parts(device);
        let block = self.block / parts;
        let mut job = JobSpec::new("lab");
        job.numjobs = self.threads;
        job.iodepth = self.depth * parts;
        job.iodepth_batch = if self.batched { job.iodepth } else { 1 };
        job.time_based = true;
        job.runtime = Some(Duration::from_secs_f64(self.seconds));
        job.random = self.pattern != Pattern::SequentialRead;
        job.random_map = false;
        job.sizes = [BlockSizes::Fixed(block), BlockSizes::Fixed(block)];
        match self.pattern {
            Pattern::RandomRead => {}
            Pattern::RandomWrite => job.mix = Mix::Write,
            Pattern::SequentialRead => {
                let each = device.capacity_sectors() * 512 / u64::from(self.threads);
                let each = each - each % (1 << 20);
                job.size = Some(bench::Amount::Bytes(each));
                job.offset_increment = bench::Amount::Bytes(each);
            }
            Pattern::Iometer => {
                job.mix = Mix::Both;
                job.read_percent = 80;
                let split = BlockSizes::Split(IOMETER.to_vec());
                job.sizes = [split.clone(), split];
            }
        }
        job
    }

    /// Memory for its data in bytes.
    fn buffer_bytes(&self) -> u64 {
        let block = match self.pattern {
            Pattern::Iometer => 65536,
            _ => self.block.max(4096),
        };
        u64::from(block) * u64::from(self.depth) * u64::from(self.threads)
    }
}

/// Memory that a front end of so many queues needs for the largest of `loads`, in bytes: bounces take a quarter of it.
pub fn memory_bytes(loads: &[Load], queues: u32) -> u64 {
    let largest = loads.iter().map(Load::buffer_bytes).max().unwrap_or(0);
    // Each queue has a page for each entry of its ring, and for a request's segments.
    largest * 3 / 2 + (16 << 20) + u64::from(queues) * (2 << 20)
}

/// The modelled SSD of the first experiment (seed 000) as a volume, slower by the factor `slower`.
///
/// Its cap comes from 44 channels that take 210 us for a request: 209,524 a second. A cap by spacing
/// (`iops=`) would make requests that come together wait for each other even where the device is far from
/// busy.
pub fn modelled_ssd(slower: f64) -> String {
    let (us, bw) = (210.0 * slower, SSD_BYTES / slower);
    format!("delay:{us:.0}us,channels=44,bw={bw:.0}:null:64G")
}

/// Requests per second that the modelled device does at most (seed 000's table ends there).
pub const SSD_IOPS: f64 = 209_000.0;
/// Bytes per second that the modelled device moves at most.
pub const SSD_BYTES: f64 = 2.4e9;
