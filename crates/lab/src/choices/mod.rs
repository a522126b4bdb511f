//! `pvblk-lab choices`: the settings that a server chooses for each queue by its load (the time for which it polls, and the requests that it takes at a
//! time), beside the same settings fixed.
//!
//! A server for each setting, all with one worker on a CPU, and a client on another one; servers sleep while another is measured. 4 KiB random reads
//! over rings or vhost-user. Samples are interleaved setting by setting, and the server that chooses is measured twice in each round, as two servers: the A/A control.

mod report;

use crate::child::{self, Server};
use crate::driver::{Driver, DriverLoad};
use crate::machine::Machine;
use anyhow::{Context, Result, bail};
use pvblk_backend::{Backend, BackendOptions, Disk, Disks, FixedChoices, Service};
use pvblk_block::trace::Tracing;
use pvblk_block::{BlockDevice, Op};
use pvblk_client::local::{ConnectOptions, FrontLink, connect};
use pvblk_client::rings::Frontend;
use pvblk_client::vhost_user::{VhostClient, VhostClientConfig};
use pvblk_export::local::LocalServer;
use pvblk_export::vhost_user::{Listen, VhostLimits, VhostServer};
use pvblk_protocol::xenbus::BackendOffers;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const BLOCK: usize = 4096;
const SIZE: u64 = 64 << 20;
/// Memory for data of a connection, bytes.
const MEMORY: u64 = 8 << 20;

/// Volumes that are read: what they do is the limit in different degrees. A modelled device answers after its time.
const VOLUMES: [(&str, &str); 4] = [
    ("null", "null:64M,notouch"),
    ("mem", "mem:64M"),
    ("20us", "delay:20us:null:64M,notouch"),
    ("100us", "delay:100us:null:64M,notouch"),
];

/// A server's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    /// The server chooses all.
    Chosen,
    ChosenAgain,
    /// It polls for so many microseconds.
    Spin(u64),
    /// It takes at most so many requests at a time.
    Pull(u32),
}

const SETTINGS: [Setting; 12] = [
    Setting::Chosen,
    Setting::ChosenAgain,
    Setting::Spin(0),
    Setting::Spin(25),
    Setting::Spin(100),
    Setting::Pull(1),
    Setting::Pull(2),
    Setting::Pull(4),
    Setting::Pull(8),
    Setting::Pull(16),
    Setting::Pull(32),
    Setting::Pull(256),
];

impl Setting {
    fn name(self) -> String {
        match self {
            Setting::Chosen => "chosen".to_owned(),
            Setting::ChosenAgain => "chosen again".to_owned(),
            Setting::Spin(us) => format!("polls {us} µs"),
            Setting::Pull(most) => format!("takes {most}"),
        }
    }

    fn is_fixed(&self) -> bool {
        !matches!(self, Setting::Chosen | Setting::ChosenAgain)
    }

    fn fixed(self) -> FixedChoices {
        let mut fixed = FixedChoices::default();
        match self {
            Setting::Chosen | Setting::ChosenAgain => {}
            Setting::Spin(us) => fixed.spin = Some(Duration::from_micros(us)),
            Setting::Pull(most) => fixed.pull = Some(most),
        }
        fixed
    }
}

/// The way from client to server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Over {
    Rings,
    VhostUser,
}

impl Over {
    fn name(self) -> &'static str {
        match self {
            Over::Rings => "rings",
            Over::VhostUser => "vhost-user-blk",
        }
    }
}

#[derive(Clone, Debug)]
pub struct ChoicesOptions {
    pub over: Over,
    /// Names of volumes; empty: all.
    pub volumes: Vec<String>,
    /// Requests in flight, each at most 256.
    pub depths: Vec<u32>,
    pub runs: usize,
    /// Seconds of each sample.
    pub seconds: f64,
}

/// All samples of one load and setting, in the order of the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct ChoicesSamples {
    pub volume: String,
    /// Requests in flight.
    pub depth: u32,
    /// True if the client polls, instead of sleeping on its descriptor.
    pub polls: bool,
    pub setting: String,
    /// Requests per second.
    pub iops: Vec<f64>,
    /// Server CPU, microseconds for each request.
    pub cpu_us: Vec<f64>,
}

/// The experiment's result.
#[derive(Clone, Debug, Serialize)]
pub struct ChoicesResult {
    pub machine: Machine,
    pub over: Over,
    /// By volume, requests in flight and client, and then by setting: the server that chooses, the same again, and those with fixed settings.
    pub samples: Vec<ChoicesSamples>,
}

/// Serves all volumes with `fixed` settings at `socket`, until SIGTERM.
pub fn server(socket: &Path, fixed: FixedChoices) -> Result<()> {
    let backend = Backend::start(&BackendOptions {
        workers: 1,
        fixed,
        ..BackendOptions::default()
    })?;
    let mut disks = Vec::new();
    for (name, volume) in VOLUMES {
        let volume = pvblk_volume::open(volume)?;
        disks.push(Arc::new(Disk::new(name, volume, Tracing::off())));
    }
    let service = Service::new(backend, Disks::new(disks), Arc::default());
    let _rings = LocalServer::bind(socket, &service, BackendOffers::default())?;
    let listen = VOLUMES.iter().enumerate().map(|(at, (disk, _))| Listen {
        disk: (*disk).to_owned(),
        path: vhost_socket(socket, at),
    });
    let limits = VhostLimits {
        queues: 1,
        unallocated: None,
    };
    let _vhost = VhostServer::bind(&listen.collect::<Vec<_>>(), &service, limits)?;
    eprintln!("pvblk: ready");
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM])?;
    signals.forever().next();
    Ok(())
}

/// The socket of a volume over vhost-user, beside that of rings.
fn vhost_socket(rings: &Path, volume: usize) -> PathBuf {
    rings.with_extension(volume.to_string())
}

/// A server with one setting, and a front end on each of its disks.
struct Bench {
    server: Server,
    disks: Vec<Arc<dyn BlockDevice>>,
    /// The connections of rings.
    links: Vec<FrontLink>,
}

impl Bench {
    fn start(dir: &Path, over: Over, setting: Setting, cpu: usize) -> Result<Bench> {
        let FixedChoices { spin, pull } = setting.fixed();
        let socket: PathBuf = dir.join(format!("{setting:?}.sock"));
        let mut args = vec!["choices-server".to_owned(), socket.display().to_string()];
        if let Some(spin) = spin {
            args.extend(["--spin-us".to_owned(), spin.as_micros().to_string()]);
        }
        if let Some(pull) = pull {
            args.extend(["--pull".to_owned(), pull.to_string()]);
        }
        let server = Server::start_role(&args, Some(cpu))?;
        let (mut disks, mut links) = (Vec::<Arc<dyn BlockDevice>>::new(), Vec::new());
        for (at, (disk, _)) in VOLUMES.into_iter().enumerate() {
            match over {
                Over::Rings => {
                    let options = ConnectOptions {
                        queues: 1,
                        ring_pages: 8,
                        memory_bytes: MEMORY,
                        ..ConnectOptions::default()
                    };
                    let (parts, link) = connect(&socket, disk, &options)?;
                    disks.push(Frontend::new(parts)?);
                    links.push(link);
                }
                Over::VhostUser => {
                    let config = VhostClientConfig {
                        entries: 256,
                        memory_bytes: MEMORY,
                        ..VhostClientConfig::default()
                    };
                    let socket = vhost_socket(&socket, at);
                    disks.push(Arc::new(VhostClient::connect(&socket, &config)?));
                }
            }
        }
        Ok(Bench {
            server,
            disks,
            links,
        })
    }

    /// Takes one sample: requests a second, and the server's CPU time for each request in microseconds.
    fn sample(&self, volume: usize, depth: u32, polls: bool, seconds: f64) -> Result<(f64, f64)> {
        let mut driver = Driver::open(&self.disks[volume], 0, depth, BLOCK)?;
        let mut rng = fastrand::Rng::with_seed(1);
        let mut reads = |count: u64| -> Result<f64> {
            let load = DriverLoad {
                op: Op::Read,
                block: BLOCK,
                depth,
                count,
                span: SIZE,
                sleep: !polls,
            };
            let outcome = driver.run(&load, || rng.u64(..SIZE / BLOCK as u64), |_, _| {})?;
            Ok(outcome.rate())
        };
        let rate = reads(500 + 4 * u64::from(depth))?;
        // The rules settle.
        let rate = reads((rate * seconds) as u64 + 100)?;
        let count = (rate * seconds) as u64 + 100;
        let ran = || child::threads_ns(self.server.pid()).context("a server has ended");
        let before = ran()?;
        let rate = reads(count)?;
        Ok((rate, (ran()? - before) / 1e3 / count as f64))
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        for link in &mut self.links {
            let _ = link.close();
        }
    }
}

/// Runs the experiment, with its sockets in `dir`.
pub fn run(options: &ChoicesOptions, dir: &Path, progress: &dyn Fn(&str)) -> Result<ChoicesResult> {
    let known = |name: &String| VOLUMES.iter().any(|(volume, _)| volume == name);
    if let Some(unknown) = options.volumes.iter().find(|name| !known(name)) {
        let names = VOLUMES.map(|(name, _)| name).join(", ");
        bail!("there is no volume {unknown}: there are {names}");
    }
    let cpus = pvblk_sys::cpu::allowed();
    let [client, server, ..] = cpus[..] else {
        bail!("client and server need a CPU each, and there is one");
    };
    // Before this program is pinned.
    let machine = Machine::here();
    // And all threads that are started from here on: none of them takes the server's CPU.
    pvblk_sys::cpu::pin(client)?;
    let benches = SETTINGS.map(|setting| Bench::start(dir, options.over, setting, server));
    let benches: Vec<Bench> = benches.into_iter().collect::<Result<_>>()?;
    let mut samples = Vec::new();
    let wanted =
        |name: &str| options.volumes.is_empty() || options.volumes.iter().any(|v| v == name);
    let volumes = VOLUMES.into_iter().enumerate();
    for (at, (volume, _)) in volumes.filter(|(_, (name, _))| wanted(name)) {
        for &depth in &options.depths {
            for polls in [false, true] {
                let client = if polls { "polls" } else { "sleeps" };
                progress(&format!("{volume}, {depth} in flight, the client {client}"));
                let mut cell = SETTINGS.map(|setting| ChoicesSamples {
                    volume: volume.to_owned(),
                    depth,
                    polls,
                    setting: setting.name(),
                    iops: Vec::new(),
                    cpu_us: Vec::new(),
                });
                for round in 0..options.runs {
                    // Each goes first in turn.
                    for step in 0..SETTINGS.len() {
                        let n = (round + step) % SETTINGS.len();
                        let (iops, cpu) = benches[n].sample(at, depth, polls, options.seconds)?;
                        cell[n].iops.push(iops);
                        cell[n].cpu_us.push(cpu);
                    }
                }
                samples.extend(cell);
            }
        }
    }
    Ok(ChoicesResult {
        machine,
        over: options.over,
        samples,
    })
}
