//! `pvblk-lab path`: front end → ring → back end → `mem` between two processes, against a bare ring that copies.
//!
//! Same bytes, same working set, one CPU a side, both sides polling. Variants are interleaved run by run,
//! and the bare ring is measured twice in each round: its ratio to itself is the A/A control. Every buffer
//! that comes back is checked for the number of the block that was asked for, in its first and last word.

use crate::bare;
use crate::child::Server;
use crate::driver::{Driver, DriverLoad};
use crate::machine::Machine;
use anyhow::{Context, Result, ensure};
use pvblk_block::{BlockDevice, Buffer, Op, Region};
use pvblk_client::local::{ConnectOptions, connect};
use pvblk_client::rings::Frontend;
use pvblk_sys::{create_sealed, fdpass};
use serde::Serialize;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

#[derive(Clone, Debug)]
pub struct PathOptions {
    /// Requests in flight, each at most 512.
    pub depths: Vec<u32>,
    pub runs: usize,
    /// Seconds of each sample.
    pub seconds: f64,
    /// Working set in bytes.
    pub span: u64,
    /// Runs only the path, with this many requests at the first depth, for profilers.
    pub only_requests: Option<u64>,
}

/// All samples of one depth, in requests per second, in the order of the rounds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PathSamples {
    /// Requests in flight.
    pub depth: u32,
    /// Rates of the bare ring.
    pub bare: Vec<f64>,
    /// Rates of the bare ring again: the control.
    pub bare_again: Vec<f64>,
    /// Rates of the whole path with a client that polls.
    pub path: Vec<f64>,
    /// Rates of the whole path with a client that sleeps on its descriptor.
    pub path_sleeping: Vec<f64>,
}

/// The experiment's result.
#[derive(Clone, Debug, Serialize)]
pub struct PathResult {
    pub machine: Machine,
    /// Bytes of each request.
    pub block: usize,
    /// Working set in bytes.
    pub span: u64,
    /// One entry for each depth.
    pub samples: Vec<PathSamples>,
}

const BLOCK: usize = bare::BLOCK;
/// Mixed into block numbers, so that zeros are never right.
const MARK: u64 = 0x9e37_79b9_7f4a_7c15;

fn mark(block: u64) -> [u8; 8] {
    (block ^ MARK).to_le_bytes()
}

fn fill(region: &Region, at: usize, block: u64) {
    for word in 0..BLOCK / 8 {
        region.write(at + word * 8, &mark(block));
    }
}

/// The bare ring's server, in a process of its own: takes the shared memory on `socket`, serves until the
/// other end closes.
pub fn bare_server(socket: &Path, span: u64) -> Result<()> {
    let _ = std::fs::remove_file(socket);
    let store_fd = create_sealed("pvblk-bare-store", span)?;
    let store = Region::shared(store_fd.as_fd(), 0, span as usize, true)?;
    for block in 0..span / BLOCK as u64 {
        fill(&store, block as usize * BLOCK, block);
    }
    let listener = UnixListener::bind(socket)?;
    eprintln!("pvblk: ready");
    let (stream, _) = listener.accept()?;
    let stream: OwnedFd = stream.into();
    let (_, mut fds) = fdpass::recv(stream.as_fd(), &mut [0; 16], true)?;
    let memory = fds.pop().context("no memory came")?;
    let len = pvblk_sys::check_sealed(memory.as_fd())? as usize;
    let shared = Region::shared(memory.as_fd(), 0, len, true)?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    std::thread::spawn(move || {
        let _ = fdpass::recv(stream.as_fd(), &mut [0; 16], true);
        stopped.store(true, Ordering::Relaxed);
    });
    bare::serve(&shared, &store, &stop);
    Ok(())
}

struct Bare {
    server: Server,
    shared: Region,
    _socket: OwnedFd,
}

impl Bare {
    fn start(dir: &Path, span: u64, cpu: usize) -> Result<Bare> {
        let socket = dir.join("bare.sock");
        let args = [
            "bare-server".into(),
            socket.display().to_string(),
            span.to_string(),
        ];
        let server = Server::start_role(&args, Some(cpu))?;
        let len = bare::RING_BYTES + 512 * BLOCK;
        let memory = create_sealed("pvblk-bare", len as u64)?;
        let stream: OwnedFd = std::os::unix::net::UnixStream::connect(&socket)?.into();
        fdpass::send(stream.as_fd(), b"m", &[memory.as_fd()])?;
        let shared = Region::shared(memory.as_fd(), 0, len, true)?;
        Ok(Bare {
            server,
            shared,
            _socket: stream,
        })
    }

    fn sample(&self, depth: u32, count: u64, blocks: u64, rng: &mut fastrand::Rng) -> Result<f64> {
        self.server.signal("CONT")?;
        let mut wrong = 0u64;
        let run = |n: u64, rng: &mut fastrand::Rng, wrong: &mut u64| {
            let start = Instant::now();
            bare::drive(
                &self.shared,
                depth,
                n,
                || rng.u64(0..blocks),
                |at, block| *wrong += u64::from(!is_marked(&self.shared, at, block)),
            );
            n as f64 / start.elapsed().as_secs_f64()
        };
        run(count / 20 + 1, rng, &mut wrong); // wake caches and the server up
        let rate = run(count, rng, &mut wrong);
        self.server.signal("STOP")?;
        ensure!(
            wrong == 0,
            "{wrong} buffers of the bare ring were not filled"
        );
        Ok(rate)
    }
}

fn is_marked(region: &Region, at: usize, block: u64) -> bool {
    let (mut first, mut last) = ([0; 8], [0; 8]);
    region.read(at, &mut first);
    region.read(at + BLOCK - 8, &mut last);
    first == mark(block) && last == first
}

/// A server with one `mem` disk, and a front end on it.
pub struct Whole {
    server: Server,
    device: Arc<dyn BlockDevice>,
    link: pvblk_client::local::FrontLink,
}

impl Whole {
    /// Starts the server on `cpu` and fills the disk with marks.
    pub fn start(dir: &Path, span: u64, cpu: usize) -> Result<Whole> {
        let socket = dir.join("rings.sock");
        let args: Vec<String> = [
            "serve",
            "--workers",
            "1",
            "--disk",
            &format!("d=mem:{span}"),
            "--local",
            &format!("unix:{}", socket.display()),
        ]
        .map(str::to_owned)
        .into();
        let server = Server::start(&args, Some(cpu))?;
        let options = ConnectOptions {
            queues: 1,
            ring_pages: 16,
            memory_bytes: 64 << 20,
            ..ConnectOptions::default()
        };
        let (parts, link) = connect(&socket, "d", &options)?;
        let device: Arc<dyn BlockDevice> = Frontend::new(parts)?;
        let blocks = span / BLOCK as u64;
        let mut driver = Driver::open(&device, 0, 1, BLOCK)?;
        for block in 0..blocks {
            driver.write_block(block, &mark(block))?;
        }
        Ok(Whole {
            server,
            device,
            link,
        })
    }

    fn sample(&self, load: &DriverLoad, rng: &mut fastrand::Rng) -> Result<f64> {
        self.server.signal("CONT")?;
        let blocks = load.span / BLOCK as u64;
        let mut driver = Driver::open(&self.device, 0, load.depth, BLOCK)?;
        let mut wrong = 0u64;
        let mut check = |b: &Buffer, block: u64| {
            wrong += u64::from(!is_marked(b.region(), b.offset(), block));
        };
        let warm = DriverLoad {
            count: load.count / 20 + 1,
            ..*load
        };
        driver.run(&warm, || rng.u64(0..blocks), &mut check)?;
        let outcome = driver.run(load, || rng.u64(0..blocks), &mut check)?;
        drop(driver);
        self.server.signal("STOP")?;
        ensure!(wrong == 0, "{wrong} buffers were not filled");
        Ok(outcome.rate())
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        let _ = self.server.signal("CONT");
        let _ = self.link.close();
    }
}

/// Runs the experiment; `progress` is told what is being measured.
pub fn run(options: &PathOptions, dir: &Path, progress: &dyn Fn(&str)) -> Result<PathResult> {
    let cpus = pvblk_sys::cpu::allowed();
    ensure!(
        cpus.len() >= 2,
        "lab path needs two CPUs, one for each side; this process may use {}",
        cpus.len()
    );
    for &depth in &options.depths {
        ensure!(
            (1..=512).contains(&depth),
            "depth {depth}: must be from 1 to 512"
        );
    }
    let machine = Machine::here(); // before this thread is kept on one CPU
    pvblk_sys::cpu::pin(cpus[0]).context("keeping the client on its CPU")?;
    let blocks = options.span / BLOCK as u64;
    let mut rng = fastrand::Rng::with_seed(1);
    progress("filling the disk through the rings");
    let whole = Whole::start(dir, options.span, cpus[1])?;
    let load = |depth: u32, count: u64, sleep: bool| DriverLoad {
        op: Op::Read,
        block: BLOCK,
        depth,
        count,
        span: options.span,
        sleep,
    };
    if let Some(count) = options.only_requests {
        let depth = options.depths.first().copied().unwrap_or(32);
        let rate = whole.sample(&load(depth, count, false), &mut rng)?;
        progress(&format!("{rate:.0} requests/s"));
        return Ok(PathResult {
            machine,
            block: BLOCK,
            span: options.span,
            samples: Vec::new(),
        });
    }
    whole.server.signal("STOP")?;
    let bare = Bare::start(dir, options.span, cpus[1])?;
    bare.server.signal("STOP")?;
    let mut samples: Vec<PathSamples> = options
        .depths
        .iter()
        .map(|&depth| PathSamples {
            depth,
            ..PathSamples::default()
        })
        .collect();
    for round in 0..options.runs {
        for s in &mut samples {
            progress(&format!(
                "round {} of {}, depth {}",
                round + 1,
                options.runs,
                s.depth
            ));
            // The first count is a guess; later ones fill the time.
            let guess = s.bare.last().copied().unwrap_or(500_000.0);
            let count = ((guess * options.seconds) as u64).max(1000);
            s.bare.push(bare.sample(s.depth, count, blocks, &mut rng)?);
            s.path
                .push(whole.sample(&load(s.depth, count, false), &mut rng)?);
            s.bare_again
                .push(bare.sample(s.depth, count, blocks, &mut rng)?);
            // At depth 1 the path is slower by far: it has a wake-up for each request.
            let few = (count / 20).max(500);
            s.path_sleeping
                .push(whole.sample(&load(s.depth, few, true), &mut rng)?);
        }
    }
    Ok(PathResult {
        machine,
        block: BLOCK,
        span: options.span,
        samples,
    })
}

/// Median of `values`; 0 if there are none.
pub fn median(values: &[f64]) -> f64 {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    match v.len() {
        0 => 0.0,
        n if n % 2 == 1 => v[n / 2],
        n => (v[n / 2 - 1] + v[n / 2]) / 2.0,
    }
}

/// Median, least and greatest of the ratios of paired samples.
pub fn ratios(a: &[f64], b: &[f64]) -> (f64, f64, f64) {
    let mut r: Vec<f64> = a.iter().zip(b).map(|(a, b)| a / b).collect();
    r.sort_by(f64::total_cmp);
    match (r.first(), r.last()) {
        (Some(&least), Some(&greatest)) => (median(&r), least, greatest),
        _ => (0.0, 0.0, 0.0),
    }
}

impl PathResult {
    pub fn table(&self) -> String {
        use comfy_table::{Table, presets::ASCII_MARKDOWN};
        let mut t = Table::new();
        t.load_preset(ASCII_MARKDOWN).set_header([
            "in flight",
            "bare ring k/s",
            "whole path k/s",
            "path / bare (least, greatest)",
            "A/A: bare / bare (least, greatest)",
            "path, client sleeps k/s",
        ]);
        let of = |(m, a, b): (f64, f64, f64)| format!("{m:.2} ({a:.2}, {b:.2})");
        for s in &self.samples {
            t.add_row([
                s.depth.to_string(),
                format!("{:.0}", median(&s.bare) / 1e3),
                format!("{:.0}", median(&s.path) / 1e3),
                of(ratios(&s.path, &s.bare)),
                of(ratios(&s.bare_again, &s.bare)),
                format!("{:.0}", median(&s.path_sleeping) / 1e3),
            ]);
        }
        format!(
            "4 KiB random reads, working set {} MiB, one pinned CPU a side, {} ({} CPUs), Linux {}\n{t}",
            self.span >> 20,
            self.machine.cpu,
            self.machine.cpus,
            self.machine.kernel
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ratios() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(ratios(&[1.0, 2.0, 6.0], &[2.0, 2.0, 2.0]), (1.0, 0.5, 3.0));
    }
}
