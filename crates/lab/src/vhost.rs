//! `pvblk-lab vhost`: our vhost-user-blk server against qemu-storage-daemon, same client, 4 KiB random reads.
//!
//! Client and server have a CPU each. All servers run from the start to the end and sleep while another is
//! measured; samples are interleaved server by server, and our null disk is measured twice in each round: its
//! ratio to itself is the A/A control. Both null disks fill buffers with zeros. Every buffer that comes back
//! is checked in its first and last word, and spoilt before it is used again.

use crate::child::{self, Server};
use crate::driver::{Driver, DriverLoad};
use crate::machine::Machine;
use crate::threads::joined;
use crate::verdict::{self, Check};
use anyhow::{Context, Result, bail, ensure};
use pvblk_block::{BlockDevice, Buffer, Op};
use pvblk_client::vhost_user::{VhostClient, VhostClientConfig};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
/// Bytes of the disks.
const SIZE: u64 = 256 << 20;
/// The server that ours is compared with.
const PEER: &str = "qemu-storage-daemon";
/// The servers that are measured, in the order of a round. `mem` in a name tells that the disk
/// holds data.
const SERVERS: [&str; 4] = ["pvblk null", PEER, "pvblk mem", "pvblk null again"];
/// Time for which a server at rest is watched.
const REST: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct VhostOptions {
    /// Requests in flight on each queue.
    pub depths: Vec<u32>,
    /// Numbers of queues.
    pub queues: Vec<u16>,
    pub runs: usize,
    /// Seconds of each sample.
    pub seconds: f64,
}

/// One server's samples of one number of queues and depth.
#[derive(Clone, Debug, Serialize)]
pub struct VhostSamples {
    /// Name of the server.
    pub server: String,
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
    /// Version of the peer.
    pub peer: String,
    /// One entry for each server, number of queues, and depth.
    pub samples: Vec<VhostSamples>,
    /// Percentage of a CPU that our server took at rest after all samples, with every queue
    /// connected.
    pub rest_percent: f64,
}

/// The peer's process and its socket.
struct Peer(Child);

impl Peer {
    fn start(socket: &Path, queues: u16, cpu: usize) -> Result<Peer> {
        let disk = format!("driver=null-co,node-name=d,size={SIZE},read-zeroes=on");
        let export = format!(
            "type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path={},writable=on,num-queues={queues},iothread=t",
            socket.display()
        );
        let child = child::on_cpu(Some(cpu), PEER)
            .args(["--object", "iothread,id=t"])
            .args(["--blockdev", &disk, "--export", &export])
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("starting {PEER}: is it installed?"))?;
        let mut peer = Peer(child);
        let deadline = Instant::now() + Duration::from_secs(20);
        while !socket.exists() {
            ensure!(Instant::now() < deadline, "{PEER} did not start");
            if let Some(status) = peer.0.try_wait()? {
                bail!("{PEER} ended at once: {status}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(peer)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Servers of one number of queues, and a client for each of them.
struct VhostBed {
    ours: Server,
    peer: Peer,
    clients: Vec<Arc<VhostClient>>,
    queues: u16,
}

impl VhostBed {
    fn start(dir: &Path, queues: u16, deepest: u32, cpu: usize) -> Result<VhostBed> {
        let socket = |name: &str| dir.join(format!("{name}-{queues}"));
        let (null, mem, peer) = (socket("null"), socket("mem"), socket("peer"));
        let listen = |name: &str, path: &Path| format!("{name}=unix:{}", path.display());
        let args = [
            "serve",
            "--disk",
            &format!("null=null:{SIZE}"),
            "--disk",
            &format!("mem=mem:{SIZE}"),
            "--vhost-user",
            &listen("null", &null),
            "--vhost-user",
            &listen("mem", &mem),
        ];
        let ours = Server::start(&args.map(str::to_owned), Some(cpu))?;
        let other = Peer::start(&peer, queues, cpu)?;
        let connect = |path: &PathBuf| -> Result<Arc<VhostClient>> {
            let config = VhostClientConfig {
                queues,
                entries: deepest.next_power_of_two().clamp(4, 1024) as u16,
                memory_bytes: u64::from(queues) * u64::from(deepest) * BLOCK as u64 + (4 << 20),
                ..VhostClientConfig::default()
            };
            Ok(Arc::new(VhostClient::connect(path, &config)?))
        };
        let clients = [&null, &peer, &mem].map(connect);
        let [null, peer, mem] = clients;
        let null = null?;
        let bed = VhostBed {
            clients: vec![Arc::clone(&null), peer?, mem?, null],
            ours,
            peer: other,
            queues,
        };
        bed.fill()?;
        Ok(bed)
    }

    fn drivers(&self, at: usize, depth: u32) -> Result<Vec<Driver>> {
        let device: Arc<dyn BlockDevice> = self.clients[at].clone();
        let open = |q| Driver::open(&device, q, depth, BLOCK).map_err(Into::into);
        (0..u32::from(self.queues)).map(open).collect()
    }

    /// Fills a disk with data: each block holds its number.
    fn fill(&self) -> Result<()> {
        let mem = SERVERS
            .iter()
            .position(|s| has_data(s))
            .context("no disk has data")?;
        let mut drivers = self.drivers(mem, 1)?;
        let driver = drivers.first_mut().context("no queue")?;
        for block in 0..SIZE / BLOCK as u64 {
            driver.write_block(block, &block.to_le_bytes())?;
        }
        Ok(())
    }

    /// CPU time that a server took so far, in microseconds.
    fn cpu_us(&self, server: &str) -> Result<f64> {
        let pid = match server == PEER {
            true => self.peer.0.id(),
            false => self.ours.pid(),
        };
        Ok(child::cpu_seconds(pid)? * 1e6)
    }

    /// Takes one sample: requests a second, and the server's CPU time for each request.
    fn sample(
        &self,
        at: usize,
        depth: u32,
        polls: bool,
        seconds: f64,
        cpu: usize,
    ) -> Result<(f64, f64)> {
        let mut drivers = self.drivers(at, depth)?;
        let data = has_data(SERVERS[at]);
        let rate = reads(&mut drivers, depth, polls, 2000, data, cpu)?;
        let count = (rate * seconds / drivers.len() as f64) as u64;
        let before = self.cpu_us(SERVERS[at])?;
        let rate = reads(&mut drivers, depth, polls, count.max(100), data, cpu)?;
        let used = self.cpu_us(SERVERS[at])? - before;
        Ok((rate, used / (count.max(100) * drivers.len() as u64) as f64))
    }
}

fn has_data(server: &str) -> bool {
    server.ends_with("mem")
}

/// Makes `count` random reads on each queue, with all threads on one CPU. Returns the requests a second of
/// all threads together.
fn reads(
    drivers: &mut [Driver],
    depth: u32,
    polls: bool,
    count: u64,
    data: bool,
    cpu: usize,
) -> Result<f64> {
    let queues = drivers.len() as u64;
    let wrong = AtomicU64::new(0);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0u64..)
            .zip(drivers.iter_mut())
            .map(|(number, driver)| {
                let wrong = &wrong;
                scope.spawn(move || -> Result<()> {
                    pvblk_sys::cpu::pin(cpu)?;
                    let mut rng = fastrand::Rng::with_seed(number);
                    let load = DriverLoad {
                        op: Op::Read,
                        block: BLOCK,
                        depth,
                        count,
                        span: SIZE,
                        sleep: !polls,
                    };
                    let check = |buffer: &Buffer, block: u64| {
                        let expected = if data { block.to_le_bytes() } else { [0; 8] };
                        for at in [0, BLOCK - 8] {
                            let mut word = [0; 8];
                            buffer.read(at, &mut word);
                            if word != expected {
                                wrong.fetch_add(1, Ordering::Relaxed);
                            }
                            buffer.write(at, &[0xa5; 8]);
                        }
                    };
                    driver.run(&load, || rng.u64(..SIZE / BLOCK as u64), check)?;
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(joined)
    })?;
    let elapsed = start.elapsed().as_secs_f64();
    let wrong = wrong.into_inner();
    ensure!(wrong == 0, "{wrong} words of what was read are wrong");
    Ok((count * queues) as f64 / elapsed)
}

fn version() -> Result<String> {
    let out = Command::new(PEER).arg("--version").output();
    let out = out.with_context(|| format!("running {PEER}: is it installed?"))?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// Runs the experiment.
pub fn run(options: &VhostOptions, dir: &Path, progress: &dyn Fn(&str)) -> Result<VhostResult> {
    let cpus = pvblk_sys::cpu::allowed();
    let (client, server) = match cpus[..] {
        [a, b, ..] => (a, b),
        _ => bail!("client and server need a CPU each, and there is one"),
    };
    let peer = version()?;
    let mut samples: Vec<VhostSamples> = Vec::new();
    let mut rest_percent = 0.0;
    let deepest = options.depths.iter().max().copied().unwrap_or(1);
    for &queues in &options.queues {
        let bed = VhostBed::start(dir, queues, deepest, server)?;
        let first = samples.len();
        for &depth in &options.depths {
            for polls in [false, true] {
                for server in SERVERS {
                    samples.push(VhostSamples {
                        server: server.to_owned(),
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
                let at = n % SERVERS.len();
                let (iops, cpu_us) = bed.sample(at, s.depth, s.polls, options.seconds, client)?;
                s.iops.push(iops);
                s.cpu_us.push(cpu_us);
            }
        }
        // Lanes keep memory for reuse for 100 ms; this waits for longer.
        std::thread::sleep(Duration::from_millis(300));
        rest_percent = f64::max(rest_percent, child::cpu_percent(bed.ours.pid(), REST)?);
    }
    Ok(VhostResult {
        machine: Machine::here(),
        peer,
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

    /// The ratio of our null disk to a server, in words, with the control.
    fn ratio(&self, s: &VhostSamples, to: &str) -> Option<String> {
        let (to, ours, again) = (
            self.of(s, to)?,
            self.of(s, SERVERS[0])?,
            self.of(s, SERVERS[3])?,
        );
        Some(verdict::ratio(&s.iops, &to.iops, (&ours.iops, &again.iops)))
    }

    pub fn table(&self) -> String {
        let mut t = verdict::table(&[
            "queues",
            "in flight each",
            "client",
            "server",
            "k/s",
            "server CPU µs/request",
            "it / qemu-storage-daemon",
        ]);
        for s in &self.samples {
            t.add_row([
                s.queues.to_string(),
                s.depth.to_string(),
                if s.polls { "polls" } else { "sleeps" }.to_owned(),
                s.server.clone(),
                format!("{:.1}", crate::path::median(&s.iops) / 1e3),
                format!("{:.2}", crate::path::median(&s.cpu_us)),
                self.ratio(s, PEER).unwrap_or_default(),
            ]);
        }
        format!(
            "4 KiB random reads over vhost-user-blk, client and server on a CPU each, {} ({} CPUs), Linux {}; {}\n{t}\n\
             Our server at rest with all queues connected: {:.2} % of a CPU. n.p.: not proven beyond the control (pvblk null against itself).",
            self.machine.cpu, self.machine.cpus, self.machine.kernel, self.peer, self.rest_percent
        )
    }

    /// Expectations from 32 requests in flight on.
    pub fn checks(&self) -> Vec<Check> {
        let mut checks = Vec::new();
        let deep = self.samples.iter().filter(|s| s.depth >= 32);
        for s in deep {
            let (expected, least) = match (&*s.server, s.polls) {
                ("pvblk null", false) => ("the peer's null twice, client sleeps", 2.0),
                ("pvblk null", true) => ("the peer's null 1.3 times, client polls", 1.3),
                ("pvblk mem", _) => ("0.8 of the peer's null, with data in memory", 0.8),
                _ => continue,
            };
            let Some(peer) = self.of(s, PEER) else {
                continue;
            };
            let ratio = verdict::median_ratio(&s.iops, &peer.iops);
            checks.push(Check {
                expected: format!("{expected} ({} queues, {} in flight)", s.queues, s.depth),
                figure: format!("{ratio:.2}, {:.0} k/s", crate::path::median(&s.iops) / 1e3),
                holds: ratio >= least,
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
            holds: self.rest_percent <= 0.5,
        });
        checks
    }
}
