//! `pvblk-lab vhost`: our vhost-user-blk server against qemu-storage-daemon, and SPDK's where the user has built it: same client, 4 KiB random
//! reads.
//!
//! Client and server have a CPU each. All servers run from the start to the end and sleep while another is
//! measured; SPDK's, which doesn't sleep, is stopped then. Samples are interleaved server by server, and our null disk is measured twice in
//! each round: its ratio to itself is the A/A control. Every buffer that comes back
//! is checked in its first and last word, and spoilt before it is used again, except where a disk doesn't touch buffers.

mod peers;

use crate::child::{self, Server};
use crate::driver::{Driver, DriverLoad};
use crate::machine::Machine;
use crate::stats::{Confidence, PairRatio};
use crate::threads::joined;
use crate::verdict::{self, Check};
use anyhow::{Context, Result, bail, ensure};
use peers::{Peer, QEMU, Spdk};
use pvblk_block::{BlockDevice, Buffer, Op};
use pvblk_client::vhost_user::{VhostClient, VhostClientConfig};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
/// Bytes of a server's disks of one kind together.
const SIZE: u64 = 256 << 20;
/// Time for which a server at rest is watched.
const REST: Duration = Duration::from_secs(5);

/// Contents of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    /// All blocks are zeros.
    Nothing,
    /// Reads leave buffers as they are.
    Untouched,
    /// Each block has its number.
    Data,
}

/// A kind of disk that is measured.
struct DiskInfo {
    server: &'static str,
    holds: Holds,
    /// The SPDK disk that ours is compared with.
    rival: Option<&'static str>,
}

const fn disk(server: &'static str, holds: Holds, rival: Option<&'static str>) -> DiskInfo {
    DiskInfo {
        server,
        holds,
        rival,
    }
}

const NULL: &str = "pvblk null";
const MEM: &str = "pvblk mem";
const NULL_AGAIN: &str = "pvblk null again";
const UNTOUCHED: &str = "pvblk null,notouch";
const SPDK_NULL: &str = "SPDK null";
const SPDK_MALLOC: &str = "SPDK malloc";

/// The kinds of disks that are measured, in the order of a round; those of SPDK, which may be absent, last.
const DISKS: [DiskInfo; 7] = [
    disk(NULL, Holds::Nothing, Some(SPDK_NULL)),
    disk(QEMU, Holds::Nothing, None),
    disk(MEM, Holds::Data, Some(SPDK_MALLOC)),
    disk(NULL_AGAIN, Holds::Nothing, None),
    disk(UNTOUCHED, Holds::Untouched, Some(SPDK_NULL)),
    disk(SPDK_NULL, Holds::Untouched, None),
    disk(SPDK_MALLOC, Holds::Data, None),
];

#[derive(Clone, Debug)]
pub struct VhostOptions {
    /// Requests in flight on each queue.
    pub depths: Vec<u32>,
    /// Numbers of queues.
    pub queues: Vec<u16>,
    /// Disks of each kind.
    pub disks: usize,
    pub runs: usize,
    /// Seconds of each sample.
    pub seconds: f64,
    /// The folder in which SPDK was built.
    pub spdk: Option<PathBuf>,
}

/// One server's samples of one number of queues and depth.
#[derive(Clone, Debug, Serialize)]
pub struct VhostSamples {
    /// Name of the server.
    pub server: String,
    /// Disks that were used together, and queues of each.
    pub disks: usize,
    pub queues: u16,
    /// Requests in flight on each queue.
    pub depth: u32,
    /// True if the client polls, instead of sleeping on its descriptor.
    pub polls: bool,
    /// Requests per second of each round.
    pub iops: Vec<f64>,
    /// Server CPU of each round, microseconds for each request.
    pub cpu_us: Vec<f64>,
}

/// The experiment's result.
#[derive(Clone, Debug, Serialize)]
pub struct VhostResult {
    pub machine: Machine,
    /// Versions of the peers.
    pub peers: Vec<String>,
    /// One entry for each server, number of queues, and depth.
    pub samples: Vec<VhostSamples>,
    /// Percentage of a CPU that our server took at rest after all samples, with every queue
    /// connected.
    pub rest_percent: f64,
}

/// Servers of one number of queues, and a client for each disk.
struct VhostBed {
    ours: Server,
    qemu: Peer,
    spdk: Option<Spdk>,
    /// Those of each kind in the order of [`DISKS`].
    clients: Vec<Vec<Arc<VhostClient>>>,
    shape: Shape,
}

/// The shape of each kind of disk.
#[derive(Clone, Copy)]
struct Shape {
    disks: usize,
    queues: u16,
    /// Bytes of a disk.
    bytes: u64,
}

impl VhostBed {
    fn start(
        dir: &Path,
        shape: Shape,
        deepest: u32,
        cpu: usize,
        spdk: Option<&Path>,
    ) -> Result<VhostBed> {
        let Shape {
            disks,
            queues,
            bytes,
        } = shape;
        let dir = dir.join(format!("{queues}-queues"));
        std::fs::create_dir(&dir)?;
        let sockets = |name: &str| -> Vec<PathBuf> {
            (0..disks).map(|n| dir.join(format!("{name}{n}"))).collect()
        };
        let [null, mem, untouched, peer] = ["null", "mem", "notouch", "peer"].map(sockets);
        let mut args = vec!["serve".to_owned()];
        for (kind, sockets) in [
            (format!("null:{bytes}"), &null),
            (format!("mem:{bytes}"), &mem),
            (format!("null:{bytes},notouch"), &untouched),
        ] {
            for socket in sockets {
                let name = socket.file_name().unwrap_or_default().display();
                args.extend(["--disk".to_owned(), format!("{name}={kind}")]);
                let at = format!("{name}=unix:{}", socket.display());
                args.extend(["--vhost-user".to_owned(), at]);
            }
        }
        let ours = Server::start(&args, Some(cpu))?;
        let qemu = peers::start_qemu(&peer, bytes, queues, cpu)?;
        let spdk = spdk.map(|program| {
            let dir = dir.join("spdk");
            std::fs::create_dir(&dir)?;
            Spdk::start(program, &dir, (disks, bytes), cpu)
        });
        let spdk = spdk.transpose()?;
        let connect = |path: &PathBuf| -> Result<Arc<VhostClient>> {
            let config = VhostClientConfig {
                queues,
                entries: deepest.next_power_of_two().clamp(4, 1024) as u16,
                memory_bytes: u64::from(queues) * u64::from(deepest) * BLOCK as u64 + (4 << 20),
                ..VhostClientConfig::default()
            };
            Ok(Arc::new(VhostClient::connect(path, &config)?))
        };
        let all = |paths: &[PathBuf]| paths.iter().map(connect).collect::<Result<Vec<_>>>();
        let null = all(&null)?;
        let mut clients = vec![
            null.clone(),
            all(&peer)?,
            all(&mem)?,
            null,
            all(&untouched)?,
        ];
        if let Some(spdk) = &spdk {
            clients.extend([all(&spdk.null)?, all(&spdk.malloc)?]);
        }
        let bed = VhostBed {
            clients,
            ours,
            qemu,
            spdk,
            shape,
        };
        let disks = DISKS[..bed.clients.len()].iter().enumerate();
        for (at, _) in disks.filter(|(_, disk)| disk.holds == Holds::Data) {
            bed.let_spdk_run(is_spdk(at))?;
            bed.fill(at)?;
        }
        bed.let_spdk_run(false)?;
        Ok(bed)
    }

    fn let_spdk_run(&self, runs: bool) -> Result<()> {
        let mut spdk = self.spdk.iter();
        spdk.try_for_each(|spdk| spdk.process.let_run(runs))
    }

    /// One for each queue of each disk.
    fn drivers(&self, at: usize, depth: u32) -> Result<Vec<Driver>> {
        let mut drivers = Vec::new();
        for client in &self.clients[at] {
            let device: Arc<dyn BlockDevice> = client.clone();
            for queue in 0..u32::from(self.shape.queues) {
                drivers.push(Driver::open(&device, queue, depth, BLOCK)?);
            }
        }
        Ok(drivers)
    }

    /// Fills all disks of a kind with data: each block holds its number.
    fn fill(&self, at: usize) -> Result<()> {
        let of_each_disk = usize::from(self.shape.queues);
        for driver in self.drivers(at, 1)?.iter_mut().step_by(of_each_disk) {
            for block in 0..self.shape.bytes / BLOCK as u64 {
                driver.write_block(block, &block.to_le_bytes())?;
            }
        }
        Ok(())
    }

    /// The process that serves a disk.
    fn pid(&self, at: usize) -> u32 {
        match (DISKS[at].server, &self.spdk) {
            (SPDK_NULL | SPDK_MALLOC, Some(spdk)) => spdk.process.pid(),
            (QEMU, _) => self.qemu.pid(),
            _ => self.ours.pid(),
        }
    }

    /// Takes one sample: requests a second, and the server's CPU time for each request in microseconds.
    fn sample(&self, at: usize, (depth, polls): (u32, bool), seconds: f64) -> Result<(f64, f64)> {
        self.let_spdk_run(is_spdk(at))?;
        let (mut drivers, holds) = (self.drivers(at, depth)?, DISKS[at].holds);
        let span = self.shape.bytes;
        let rate = reads(&mut drivers, (depth, polls), (2000, span), holds)?;
        let count = ((rate * seconds / drivers.len() as f64) as u64).max(100);
        let ran = || child::threads_ns(self.pid(at)).context("a server has ended");
        let before = ran()?;
        let rate = reads(&mut drivers, (depth, polls), (count, span), holds)?;
        let used = ran()? - before;
        self.let_spdk_run(false)?;
        Ok((rate, used / 1e3 / (count * drivers.len() as u64) as f64))
    }
}

fn is_spdk(at: usize) -> bool {
    at >= DISKS.len() - 2
}

/// Makes `count` random reads on each queue, of the first `span` bytes, with all threads on one CPU. Returns the requests a second of
/// all threads together.
fn reads(
    drivers: &mut [Driver],
    (depth, polls): (u32, bool),
    (count, span): (u64, u64),
    holds: Holds,
) -> Result<f64> {
    let queues = drivers.len() as u64;
    let wrong = AtomicU64::new(0);
    let start = Instant::now();
    let read = |number: u64, driver: &mut Driver| -> Result<Instant> {
        let mut rng = fastrand::Rng::with_seed(number);
        let load = DriverLoad {
            op: Op::Read,
            block: BLOCK,
            depth,
            count,
            span,
            sleep: !polls,
        };
        let check = |buffer: &Buffer, block: u64| {
            let expected = match holds {
                Holds::Data => Some(block.to_le_bytes()),
                Holds::Nothing => Some([0; 8]),
                // The client does the same work as for other disks.
                Holds::Untouched => None,
            };
            for at in [0, BLOCK - 8] {
                let mut word = [0; 8];
                buffer.read(at, &mut word);
                if expected.is_some_and(|expected| word != expected) {
                    wrong.fetch_add(1, Ordering::Relaxed);
                }
                buffer.write(at, &[0xa5; 8]);
            }
        };
        driver.run(&load, || rng.u64(..span / BLOCK as u64), check)?;
        Ok(Instant::now())
    };
    // The end of a thread may take as long as a sample, while a server polls on the CPU of the one that waits for it.
    let ends = std::thread::scope(|scope| -> Result<Vec<Instant>> {
        let read = &read;
        let threads: Vec<_> = (0u64..)
            .zip(drivers.iter_mut())
            .map(|(number, driver)| scope.spawn(move || read(number, driver)))
            .collect();
        threads.into_iter().map(joined).collect()
    })?;
    let last = ends.into_iter().max().context("no queue")?;
    let elapsed = last.duration_since(start).as_secs_f64();
    let wrong = wrong.into_inner();
    ensure!(wrong == 0, "{wrong} words of what was read are wrong");
    Ok((count * queues) as f64 / elapsed)
}

/// Runs the experiment.
pub fn run(options: &VhostOptions, dir: &Path, progress: &dyn Fn(&str)) -> Result<VhostResult> {
    let cpus = pvblk_sys::cpu::allowed();
    let (client, server) = match cpus[..] {
        [a, b, ..] => (a, b),
        _ => bail!("client and server need a CPU each, and there is one"),
    };
    let mut peers = vec![peers::version(QEMU)?];
    let program = options.spdk.as_deref().map(peers::spdk_program);
    let program = program.transpose()?;
    if let Some(program) = &program {
        let memory = match peers::has_huge_pages(SIZE) {
            true => "huge pages",
            false => "pages of 4 KiB",
        };
        peers.push(format!("{} with {memory}", peers::version(program)?));
    }
    // Before this program is pinned.
    let machine = Machine::here();
    // And all threads that are started from here on: none of them takes the server's CPU.
    pvblk_sys::cpu::pin(client)?;
    let mut samples: Vec<VhostSamples> = Vec::new();
    let mut rest_percent = 0.0;
    let deepest = options.depths.iter().max().copied().unwrap_or(1);
    for &queues in &options.queues {
        let shape = Shape {
            disks: options.disks,
            queues,
            bytes: (SIZE / options.disks as u64) & !(BLOCK as u64 - 1),
        };
        let bed = VhostBed::start(dir, shape, deepest, server, program.as_deref())?;
        let kinds = bed.clients.len();
        let first = samples.len();
        for &depth in &options.depths {
            // Threads that poll on one CPU would measure how it is shared.
            let polling = [false, true];
            for &polls in &polling[..1 + usize::from(options.disks == 1)] {
                for disk in &DISKS[..kinds] {
                    samples.push(VhostSamples {
                        server: disk.server.to_owned(),
                        disks: options.disks,
                        queues,
                        depth,
                        polls,
                        iops: Vec::new(),
                        cpu_us: Vec::new(),
                    });
                }
            }
        }
        for round in 0..options.runs {
            progress(&format!(
                "{queues} queues, round {} of {}",
                round + 1,
                options.runs
            ));
            for (n, s) in samples[first..].iter_mut().enumerate() {
                let way = (s.depth, s.polls);
                let (iops, cpu_us) = bed.sample(n % kinds, way, options.seconds)?;
                s.iops.push(iops);
                s.cpu_us.push(cpu_us);
            }
        }
        // Lanes keep memory for reuse for 100 ms; this waits for longer.
        std::thread::sleep(Duration::from_millis(300));
        rest_percent = f64::max(rest_percent, child::cpu_percent(bed.ours.pid(), REST)?);
    }
    Ok(VhostResult {
        machine,
        peers,
        samples,
        rest_percent,
    })
}

impl VhostResult {
    fn of(&self, like: &VhostSamples, server: &str) -> Option<&VhostSamples> {
        let shape = |s: &VhostSamples| (s.queues, s.depth, s.polls);
        let mut all = self.samples.iter();
        all.find(|s| s.server == server && shape(s) == shape(like))
    }

    /// The SPDK disk that one of ours is compared with.
    fn rival(&self, s: &VhostSamples) -> Option<&VhostSamples> {
        let ours = DISKS.iter().find(|disk| disk.server == s.server)?;
        self.of(s, ours.rival?)
    }

    /// The ratio of a disk to a server's, in words, with the control.
    fn ratio(&self, s: &VhostSamples, to: &str) -> Option<String> {
        let (to, ours, again) = (self.of(s, to)?, self.of(s, NULL)?, self.of(s, NULL_AGAIN)?);
        Some(verdict::ratio(&s.iops, &to.iops, (&ours.iops, &again.iops)))
    }

    pub fn table(&self) -> String {
        let mut t = verdict::table(&[
            "disks",
            "queues",
            "in flight each",
            "client",
            "server",
            "k/s",
            "server CPU µs/request",
            "it / qemu-storage-daemon",
            "it / SPDK's",
        ]);
        for s in &self.samples {
            t.add_row([
                s.disks.to_string(),
                s.queues.to_string(),
                s.depth.to_string(),
                if s.polls { "polls" } else { "sleeps" }.to_owned(),
                s.server.clone(),
                format!("{:.1}", crate::path::median(&s.iops) / 1e3),
                format!("{:.2}", crate::path::median(&s.cpu_us)),
                self.ratio(s, QEMU).unwrap_or_default(),
                self.rival(s)
                    .and_then(|rival| self.ratio(s, &rival.server))
                    .unwrap_or_default(),
            ]);
        }
        format!(
            "4 KiB random reads over vhost-user-blk, client and server on a CPU each, {} ({} CPUs), Linux {}; {}\n{t}\n\
             Our server at rest with all queues connected: {:.2} % of a CPU. n.p.: not proven beyond the control (pvblk null against itself).",
            self.machine.cpu,
            self.machine.cpus,
            self.machine.kernel,
            self.peers.join(", "),
            self.rest_percent
        )
    }

    /// Expectations: beside QEMU from 32 requests in flight on and for one disk, beside SPDK for all.
    pub fn checks(&self) -> Vec<Check> {
        let mut checks = Vec::new();
        let deep = self.samples.iter();
        let deep = deep.filter(|s| s.depth >= 32 && s.disks == 1);
        for s in deep {
            let (expected, least) = match (&*s.server, s.polls) {
                ("pvblk null", false) => ("the peer's null twice, client sleeps", 2.0),
                ("pvblk null", true) => ("the peer's null 1.3 times, client polls", 1.3),
                ("pvblk mem", _) => ("0.8 of the peer's null, with data in memory", 0.8),
                _ => continue,
            };
            let Some(peer) = self.of(s, QEMU) else {
                continue;
            };
            let ratio = verdict::median_ratio(&s.iops, &peer.iops);
            checks.push(Check {
                expected: format!("{expected} ({} queues, {} in flight)", s.queues, s.depth),
                figure: format!("{ratio:.2}, {:.0} k/s", crate::path::median(&s.iops) / 1e3),
                holds: ratio >= least,
            });
        }
        for s in &self.samples {
            let Some(rival) = self.rival(s) else { continue };
            let ratio = PairRatio::of(&s.iops, &rival.iops, Confidence::default()).ok();
            let client = if s.polls { "polls" } else { "sleeps" };
            checks.push(Check {
                expected: format!(
                    "{} not proven slower than {} ({} disks, {} queues, {} in flight, client {client})",
                    s.server, rival.server, s.disks, s.queues, s.depth
                ),
                holds: ratio.as_ref().is_some_and(|r| r.high >= 1.0),
                figure: verdict::interval(ratio),
            });
        }
        if checks.is_empty() {
            checks.push(Check {
                expected: "shapes with 32 and more in flight".into(),
                figure: "none was measured".into(),
                holds: false,
            });
        }
        checks.push(Check {
            expected: "nothing at rest".into(),
            figure: format!("{:.2} % of a CPU", self.rest_percent),
            holds: self.rest_percent <= 0.05,
        });
        checks
    }
}
