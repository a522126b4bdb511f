//! `pvblk-lab nbd`: our NBD server against its peers and against a server that does nothing, same fio job.
//!
//! Client (fio's nbd engine) on one CPU, server on another. Servers are started anew for each sample,
//! filled through NBD where they hold data, and interleaved round by round; ours is measured twice in
//! each round, and its ratio to itself is the A/A control.

use crate::child;
use crate::machine::Machine;
use crate::path::{median, ratios};
use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Size of the export and the working set.
const SIZE: &str = "256M";

/// The servers that are measured, in the order of a round.
const SERVERS: [&str; 6] = [
    "pvblk",
    "nbdkit",
    "qemu-nbd",
    "null",
    "null, simple replies",
    "pvblk again",
];

#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// Requests in flight.
    pub depths: Vec<u32>,
    pub runs: usize,
    /// Seconds of each sample.
    pub seconds: u32,
    /// Client and server may use all CPUs.
    pub unpinned: bool,
}

/// One server's samples at one depth.
#[derive(Clone, Debug, Default, Serialize)]
pub struct NbdSamples {
    /// Name of the server.
    pub server: String,
    /// Requests in flight.
    pub depth: u32,
    /// Requests per second of each round.
    pub iops: Vec<f64>,
    /// Server CPU of each round, microseconds for each request.
    pub cpu_us: Vec<f64>,
    /// Median latency of each round, microseconds.
    pub p50_us: Vec<f64>,
}

/// The experiment's result.
#[derive(Clone, Debug, Serialize)]
pub struct NbdResult {
    pub machine: Machine,
    /// True if client and server had a CPU each.
    pub pinned: bool,
    /// One entry for each server and depth.
    pub samples: Vec<NbdSamples>,
}

struct NbdServer {
    child: Child,
    uri: String,
    files: Vec<PathBuf>,
}

impl NbdServer {
    fn start(kind: &str, dir: &Path, cpu: Option<usize>) -> Result<NbdServer> {
        let socket = dir.join("bench.sock");
        let _ = std::fs::remove_file(&socket);
        let at = socket.display().to_string();
        let mut files = vec![socket.clone()];
        let line: Vec<String> = match kind {
            "pvblk" | "pvblk again" => [
                &child::pvblk()?.display().to_string(),
                "serve",
                "--disk",
                &format!("d=mem:{SIZE}"),
                "--nbd",
                &format!("unix:{at}"),
            ]
            .map(str::to_owned)
            .into(),
            "nbdkit" => ["nbdkit", "-f", "-U", &at, "memory", SIZE]
                .map(str::to_owned)
                .into(),
            "qemu-nbd" => {
                let image = Path::new("/dev/shm").join(format!("pvblk-{}", std::process::id()));
                std::fs::File::create(&image)?.set_len(256 << 20)?;
                let path = image.display().to_string();
                files.push(image);
                ["qemu-nbd", "-t", "-f", "raw", "-x", "d", "-k", &at, &path]
                    .map(str::to_owned)
                    .into()
            }
            _ => {
                let own = child::this_program()?.display().to_string();
                [&own, "null-nbd", &at, "--size", SIZE]
                    .map(str::to_owned)
                    .into()
            }
        };
        let simple = (kind == "null, simple replies").then(|| "--simple".to_owned());
        let child = child::on_cpu(cpu, &line[0])
            .args(&line[1..])
            .args(simple)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("starting {kind}: is it installed?"))?;
        let server = NbdServer {
            child,
            uri: format!("nbd+unix:///d?socket={at}"),
            files,
        };
        let deadline = Instant::now() + Duration::from_secs(10);
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            ensure!(Instant::now() < deadline, "{kind} did not start");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    /// CPU time so far in microseconds, user and system, threads that ended included.
    fn cpu_us(&self) -> Result<f64> {
        Ok(child::cpu_seconds(self.child.id())? * 1e6)
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for f in &self.files {
            let _ = std::fs::remove_file(f);
        }
    }
}

fn fio(uri: &str, cpu: Option<usize>, args: &[&str]) -> Result<serde_json::Value> {
    let output = child::on_cpu(cpu, "fio")
        .args(["--name=j", "--ioengine=nbd", "--output-format=json"])
        .args([&format!("--uri={uri}"), &format!("--size={SIZE}")])
        .args(args)
        .output()
        .context("running fio: is it installed?")?;
    let text = String::from_utf8_lossy(&output.stdout);
    // Some versions print a note before the JSON.
    let json = text.find('{').map(|at| &text[at..]).unwrap_or("");
    let value: serde_json::Value = serde_json::from_str(json).with_context(|| {
        format!(
            "fio printed no JSON: {}",
            String::from_utf8_lossy(&output.stderr)
        )
    })?;
    if !output.status.success() || value["jobs"][0]["error"] != 0 {
        bail!("fio failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(value)
}

fn sample(
    kind: &str,
    depth: u32,
    options: &NbdOptions,
    cpus: (Option<usize>, Option<usize>),
    dir: &Path,
) -> Result<(f64, f64, f64)> {
    let server = NbdServer::start(kind, dir, cpus.1)?;
    if !kind.starts_with("null") {
        fio(
            &server.uri,
            cpus.0,
            &["--rw=write", "--bs=1M", "--iodepth=4"],
        )?;
    }
    let before = server.cpu_us()?;
    let j = fio(
        &server.uri,
        cpus.0,
        &[
            "--rw=randread",
            "--bs=4k",
            "--norandommap",
            "--time_based",
            &format!("--iodepth={depth}"),
            &format!("--runtime={}", options.seconds),
        ],
    )?;
    let used = server.cpu_us()? - before;
    let read = &j["jobs"][0]["read"];
    let total = read["total_ios"].as_f64().context("no total_ios")?;
    let iops = read["iops"].as_f64().context("no iops")?;
    let p50 = read["clat_ns"]["percentile"]["50.000000"]
        .as_f64()
        .unwrap_or(0.0);
    Ok((iops, used / total, p50 / 1000.0))
}

/// Runs the experiment.
pub fn run(options: &NbdOptions, dir: &Path, progress: &dyn Fn(&str)) -> Result<NbdResult> {
    let cpus = pvblk_sys::cpu::allowed();
    let pair = if options.unpinned || cpus.len() < 2 {
        (None, None)
    } else {
        (Some(cpus[0]), Some(cpus[1]))
    };
    let mut samples: Vec<NbdSamples> = Vec::new();
    for &depth in &options.depths {
        for server in SERVERS {
            samples.push(NbdSamples {
                server: server.to_owned(),
                depth,
                ..NbdSamples::default()
            });
        }
    }
    for round in 0..options.runs {
        for s in &mut samples {
            progress(&format!(
                "round {} of {}, depth {}, {}",
                round + 1,
                options.runs,
                s.depth,
                s.server
            ));
            let (iops, cpu, p50) = sample(&s.server, s.depth, options, pair, dir)?;
            s.iops.push(iops);
            s.cpu_us.push(cpu);
            s.p50_us.push(p50);
        }
    }
    Ok(NbdResult {
        machine: Machine::here(),
        pinned: pair.0.is_some(),
        samples,
    })
}

impl NbdResult {
    pub fn table(&self) -> String {
        use comfy_table::{Table, presets::ASCII_MARKDOWN};
        let mut t = Table::new();
        t.load_preset(ASCII_MARKDOWN).set_header([
            "depth",
            "server",
            "k/s",
            "p50 µs",
            "server CPU µs/request",
            "pvblk / it (least, greatest)",
        ]);
        for s in &self.samples {
            let ours = self
                .samples
                .iter()
                .find(|o| o.depth == s.depth && o.server == SERVERS[0]);
            let (m, a, b) = ours.map_or((0.0, 0.0, 0.0), |o| ratios(&o.iops, &s.iops));
            t.add_row([
                s.depth.to_string(),
                s.server.clone(),
                format!("{:.1}", median(&s.iops) / 1e3),
                format!("{:.0}", median(&s.p50_us)),
                format!("{:.2}", median(&s.cpu_us)),
                format!("{m:.2} ({a:.2}, {b:.2})"),
            ]);
        }
        format!(
            "4 KiB random reads over NBD on a Unix socket, fio, one connection, {}, {} ({} CPUs), Linux {}\n{t}",
            if self.pinned {
                "client and server on a CPU each"
            } else {
                "not pinned"
            },
            self.machine.cpu,
            self.machine.cpus,
            self.machine.kernel
        )
    }
}
