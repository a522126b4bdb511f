//! `pvblk-lab fio`: the same job file, run by fio and by `pvblk bench` on the same NBD export, turn by turn.
//!
//! The export is a modelled device, so that it and not the client decides the rate: then two clients that measure
//! rightly agree.

use crate::child::{self, Server};
use crate::machine::Machine;
use crate::stats::{Confidence, PairRatio};
use crate::verdict::Check;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

#[derive(Clone, Debug)]
pub struct AgreeOptions {
    /// Pairs of runs of each job.
    pub runs: usize,
    /// Seconds of each run.
    pub seconds: u32,
}

/// The figures of one run, from its JSON.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Run {
    /// Requests per second, reads and writes.
    pub iops: f64,
    /// Median completion time of reads, microseconds.
    pub p50_us: f64,
}

/// All runs of one job, in pairs.
#[derive(Clone, Debug, Serialize)]
pub struct Pairs {
    /// Name of the job in its file.
    pub job: String,
    pub fio: Vec<Run>,
    /// Runs of `pvblk bench`.
    pub bench: Vec<Run>,
}

/// The experiment's result.
#[derive(Clone, Debug, Serialize)]
pub struct AgreeResult {
    pub machine: Machine,
    /// fio's version, as it prints it.
    pub fio: String,
    /// The volume behind the export.
    pub volume: String,
    /// One entry for each job.
    pub jobs: Vec<Pairs>,
}

const VOLUME: &str = "delay:1ms,iops=8000,bw=100M:mem:1G";
/// Name and options of the jobs.
const JOBS: [(&str, &str); 4] = [
    ("read-1", "rw=randread\nbs=4k\niodepth=1"),
    ("read-16", "rw=randread\nbs=4k\niodepth=16"),
    (
        "mixed-8",
        "rw=randrw\nrwmixread=70\nbssplit=512/10:4k/60:16k/20:64k/10\niodepth=8",
    ),
    ("stream-4", "rw=read\nbs=128k\niodepth=4"),
];

/// Runs the experiment in `dir`.
pub fn run(options: &AgreeOptions, dir: &Path, progress: &dyn Fn(&str)) -> Result<AgreeResult> {
    let version = Command::new("fio")
        .arg("--version")
        .output()
        .context("running fio; install the package fio")?;
    let socket = dir.join("nbd.sock");
    let args = [
        "serve",
        "--disk",
        &format!("d={VOLUME}"),
        "--nbd",
        &format!("unix:{}", socket.display()),
    ];
    let _server = Server::start(&args.map(str::to_owned), None)?;
    let uri = format!("nbd+unix:///d?socket={}", socket.display());
    let mut result = AgreeResult {
        machine: Machine::here(),
        fio: String::from_utf8_lossy(&version.stdout).trim().to_owned(),
        volume: VOLUME.to_owned(),
        jobs: Vec::new(),
    };
    let bench = child::pvblk()?;
    for (name, options_text) in JOBS {
        let file = dir.join(format!("{name}.fio"));
        let text = format!(
            "[{name}]\nioengine=nbd\nuri={uri}\n{options_text}\nnorandommap\ntime_based\nruntime={}\n",
            options.seconds
        );
        std::fs::write(&file, text)?;
        let mut pairs = Pairs {
            job: name.to_owned(),
            fio: Vec::new(),
            bench: Vec::new(),
        };
        for run in 0..options.runs {
            progress(&format!("{name}, pair {} of {}", run + 1, options.runs));
            let mut fio = Command::new("fio");
            fio.arg("--output-format=json").arg(&file);
            let mut ours = Command::new(&bench);
            ours.args(["bench", "--json", "-"]).arg(&file);
            // The two programs take turns at being the first.
            if run % 2 == 0 {
                pairs.fio.push(measure(fio)?);
                pairs.bench.push(measure(ours)?);
            } else {
                pairs.bench.push(measure(ours)?);
                pairs.fio.push(measure(fio)?);
            }
        }
        result.jobs.push(pairs);
    }
    Ok(result)
}

fn measure(mut command: Command) -> Result<Run> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .with_context(|| format!("running {:?}", command.get_program()))?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "{:?} ended with {}: {}",
        command.get_program(),
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    // fio may print notes before the JSON and a table after it.
    let json = stdout.find('{').map_or("", |at| &stdout[at..]);
    let mut values = serde_json::Deserializer::from_str(json).into_iter::<Value>();
    let report = values.next().context("no JSON")??;
    let job = &report["jobs"][0];
    let number = |v: &Value| v.as_f64().unwrap_or(0.0);
    Ok(Run {
        iops: number(&job["read"]["iops"]) + number(&job["write"]["iops"]),
        p50_us: number(&job["read"]["clat_ns"]["percentile"]["50.000000"]) / 1000.0,
    })
}

impl Pairs {
    fn ratio(&self, f: fn(&Run) -> f64) -> Result<PairRatio> {
        let all = |runs: &[Run]| runs.iter().map(f).collect::<Vec<_>>();
        PairRatio::of(&all(&self.bench), &all(&self.fio), Confidence::default())
    }
}

impl AgreeResult {
    pub fn table(&self) -> Result<String> {
        let mut t = comfy_table::Table::new();
        t.load_preset(comfy_table::presets::ASCII_MARKDOWN);
        t.set_header([
            "job",
            "fio IOPS",
            "bench IOPS",
            "ratio (95 %)",
            "fio p50 us",
            "bench p50 us",
            "ratio (95 %)",
        ]);
        let median = |runs: &[Run], f: fn(&Run) -> f64| {
            crate::path::median(&runs.iter().map(f).collect::<Vec<_>>())
        };
        for pairs in &self.jobs {
            let text = |r: PairRatio| format!("{:.3} ({:.3} to {:.3})", r.median, r.low, r.high);
            t.add_row([
                pairs.job.clone(),
                format!("{:.0}", median(&pairs.fio, |r| r.iops)),
                format!("{:.0}", median(&pairs.bench, |r| r.iops)),
                text(pairs.ratio(|r| r.iops)?),
                format!("{:.0}", median(&pairs.fio, |r| r.p50_us)),
                format!("{:.0}", median(&pairs.bench, |r| r.p50_us)),
                text(pairs.ratio(|r| r.p50_us)?),
            ]);
        }
        Ok(format!(
            "{} against pvblk bench, {} over NBD (a modelled device)\n{t}",
            self.fio, self.volume
        ))
    }

    /// The medians of both programs agree within 5 %.
    pub fn checks(&self) -> Result<Vec<Check>> {
        let mut checks = Vec::new();
        for pairs in &self.jobs {
            for (what, f) in [
                ("rate", (|r| r.iops) as fn(&Run) -> f64),
                ("p50", |r| r.p50_us),
            ] {
                let ratio = pairs.ratio(f)?.median;
                checks.push(Check {
                    expected: format!("{}: {what} within 5 % of fio's", pairs.job),
                    figure: format!("{ratio:.3}"),
                    holds: (ratio - 1.0).abs() <= 0.05,
                });
            }
        }
        Ok(checks)
    }
}
