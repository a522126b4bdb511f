//! `pvblk bench`.

use crate::output::{tell, write};
use crate::traces::Traces;
use clap::Args;
use pvblk_bench::{self as bench, JobSpec, Jobs, Load, Progress, Report, RunOptions};
use pvblk_block::{BlockDevice, Error, ErrorKind};
use pvblk_volume::VolumeSpec;
use signal_hook::consts::{SIGINT, SIGTERM};
use std::collections::HashMap;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

pub const HELP: &str = "\
Targets are volumes, as those of `pvblk serve --disk NAME=VOLUME`; see `pvblk serve --help` for all of them:
  mem:1G, file:PATH, delay:210us,iops=209k:null:8G   opened by the benchmark itself
  rings:unix:PATH,disk=NAME                          a disk of `pvblk serve --local`, over rings
  nbd+unix:///NAME?socket=PATH, nbd://HOST:PORT/NAME an export of any NBD server; nbds:// over TLS
  vhost-user:unix:PATH                               a disk of any vhost-user-blk server

Examples:
  pvblk bench --target mem:1G --rw randread --bs 4k --iodepth 32 --numjobs 2 --runtime 10
  pvblk bench iometer-file-access-server.fio --target file:/srv/disk.img,size=4G
  pvblk bench --target rings:unix:/run/pvblk.sock,disk=a --rw randwrite --size 64m --option verify=crc32c
  pvblk bench jobs.fio --target 'nbd+unix:///a?socket=/tmp/nbd.sock' --json - | jq '.jobs[].read.iops'

Job files are fio's: sections, [global], and the options that make sense for a block device. An unknown option
is an error that lists the known ones. Flags go before what the file says, for all of its jobs. Ctrl-C ends the
run early and prints what was measured. Exit status: 0, 1 for I/O errors or wrong data, 2 for wrong usage.";

#[derive(Args, Debug)]
pub struct BenchArgs {
    /// A job file in fio's format
    #[arg(value_name = "FILE.fio")]
    pub file: Option<PathBuf>,
    /// Disk to measure, as in `serve --disk`; goes before `filename=` and `uri=` of the job file
    #[arg(long, value_name = "VOLUME")]
    pub target: Option<String>,
    /// read, write, rw, randread, randwrite or randrw
    #[arg(long, value_name = "PATTERN")]
    pub rw: Option<String>,
    /// Block size, such as 4k, or for reads and writes, such as 4k,64k
    #[arg(long, value_name = "SIZE")]
    pub bs: Option<String>,
    /// Block sizes with their shares, such as 4k/60:64k/40
    #[arg(long, value_name = "SIZE/PERCENT:…")]
    pub bssplit: Option<String>,
    /// Requests in flight of each thread
    #[arg(long, value_name = "N")]
    pub iodepth: Option<String>,
    /// Threads that submit requests, each with its own queue
    #[arg(long, value_name = "N")]
    pub numjobs: Option<String>,
    /// Time to run; without a job file all of it, else at most
    #[arg(long, value_name = "TIME")]
    pub runtime: Option<String>,
    /// Part of the target to use, such as 1g or 50%
    #[arg(long, value_name = "SIZE")]
    pub size: Option<String>,
    /// Share of reads in percent
    #[arg(long, value_name = "PERCENT")]
    pub rwmixread: Option<String>,
    /// Any other option of a job file, such as verify=crc32c; may be given several times
    #[arg(long = "option", value_name = "NAME[=VALUE]")]
    pub options: Vec<String>,
    /// Poll this long before sleeping, microseconds
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0)]
    pub spin_us: u64,
    /// Write the results in fio's JSON layout here; - is standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Record what happens to the requests on this side: NAME.blktrace.N
    #[arg(long, value_name = "NAME")]
    pub trace: Option<PathBuf>,
    /// Show progress though standard error is no terminal
    #[arg(long)]
    pub progress: bool,
}

/// Runs the command; tells errors itself, because their kinds have different exit statuses.
pub fn run(args: &BenchArgs) -> ExitCode {
    match measure(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            tell!("pvblk: {e}");
            ExitCode::from(match e.kind() {
                ErrorKind::Config => 2,
                _ => 1,
            })
        }
    }
}

/// The jobs of the file, if there is one, and of the flags.
fn jobs(args: &BenchArgs) -> Result<Jobs, Error> {
    let mut jobs = match &args.file {
        Some(path) => {
            let shown = path.display().to_string();
            let text = std::fs::read_to_string(path)
                .map_err(|e| Error::caused(ErrorKind::Config, format!("reading {shown}"), e))?;
            bench::parse_jobs(&text, &shown)?
        }
        None => {
            // On the command line a runtime is meant as it stands, and threads are one job.
            let timed = args.runtime.as_ref().map(|_| "time_based");
            Jobs::from_options(["group_reporting"].into_iter().chain(timed))?
        }
    };
    for (name, value) in [
        ("rw", &args.rw),
        ("bs", &args.bs),
        ("bssplit", &args.bssplit),
        ("iodepth", &args.iodepth),
        ("numjobs", &args.numjobs),
        ("runtime", &args.runtime),
        ("size", &args.size),
        ("rwmixread", &args.rwmixread),
        ("filename", &args.target),
    ] {
        if let Some(value) = value {
            let told = |e: Error| Error::config(format!("--{e}"));
            jobs.set_all(&format!("{name}={value}")).map_err(told)?;
        }
    }
    let told = |e: Error| Error::config(format!("--option {e}"));
    let mut options = args.options.iter();
    options.try_for_each(|o| jobs.set_all(o).map_err(told))?;
    Ok(jobs)
}

fn target_of(job: &JobSpec) -> Result<&str, Error> {
    job.target.as_deref().ok_or_else(|| {
        Error::config(format!(
            "job {}: there is no target: add --target, or filename= to the job (see pvblk bench --help)",
            job.name
        ))
    })
}

/// Opens each target once and runs the jobs; false if anything failed.
fn measure(args: &BenchArgs) -> Result<bool, Error> {
    let jobs = jobs(args)?;
    if !jobs.ignored.is_empty() {
        let names = jobs.ignored.join(", ");
        tell!("pvblk bench: these options mean nothing here and are ignored: {names}");
    }
    let stop = Arc::new(AtomicBool::new(false));
    let mut open: HashMap<&str, Arc<dyn BlockDevice>> = HashMap::new();
    // All are read before the first one is opened.
    let mut specs: Vec<VolumeSpec> = Vec::new();
    for job in &jobs.jobs {
        specs.push(target_of(job)?.parse()?);
    }
    let mut devices = Vec::new();
    for (job, spec) in jobs.jobs.iter().zip(&specs) {
        let name = target_of(job)?;
        if !open.contains_key(name) {
            let load = Load::of(&jobs.jobs, |j| j.target.as_deref() == Some(name));
            open.insert(name, bench::open_target(spec, &load, &stop)?);
        }
        devices.extend(open.get(name).map(Arc::clone));
    }
    handle_signals(&stop)?;
    let shows = args.progress || std::io::stderr().is_terminal();
    let show = |p: &Progress| show(p);
    let traces = Traces::of_client();
    let tracing = specs
        .iter()
        .map(|spec| traces.of(bench::scope(spec)))
        .collect();
    let writing = args.trace.as_ref().map(|name| traces.write(name));
    let writing = writing
        .transpose()
        .map_err(|e| Error::boxed(ErrorKind::Config, "", e.into()))?;
    let options = RunOptions {
        tracing,
        stop,
        spin: Duration::from_micros(args.spin_us),
        progress: shows.then_some(&show),
    };
    let result = bench::run_on(&jobs.jobs, &devices, &options);
    if shows {
        clear_line();
    }
    if let Some(writing) = writing {
        let told = writing
            .finish()
            .map_err(|e| Error::boxed(ErrorKind::Config, "", e.into()))?;
        tell!("pvblk bench: {told}");
    }
    let mut report = result?;
    report.global = jobs.global.clone();
    drop(devices);
    print(&report, args)?;
    let mut good = !report.failed();
    for (_, device) in open {
        if let Err(e) = device.close() {
            tell!("pvblk: {e}");
            good = false;
        }
    }
    Ok(good)
}

/// The first signal ends the run in order, the second one at once.
fn handle_signals(stop: &Arc<AtomicBool>) -> Result<(), Error> {
    let os = |e| Error::os("handling signals", e);
    for signal in [SIGINT, SIGTERM] {
        let status = 128 + signal;
        signal_hook::flag::register_conditional_shutdown(signal, status, Arc::clone(stop))
            .map_err(os)?;
        signal_hook::flag::register(signal, Arc::clone(stop)).map_err(os)?;
    }
    Ok(())
}

/// Prints a line. The figures are right even if nobody reads them.
fn put(line: &str) -> Result<(), Error> {
    write(&format!("{line}\n")).map_err(|e| Error::os("printing", e))
}

fn print(report: &Report, args: &BenchArgs) -> Result<(), Error> {
    let table = report.table();
    let json = |e: serde_json::Error| Error::os("making JSON", e);
    match &args.json {
        Some(path) if path.as_os_str() == "-" => {
            tell!("{table}");
            put(&report.to_json().map_err(json)?)?;
        }
        Some(path) => {
            let text = report.to_json().map_err(json)? + "\n";
            std::fs::write(path, text)
                .map_err(|e| Error::os(format!("writing {}", path.display()), e))?;
            put(&table)?;
        }
        None => put(&table)?,
    }
    if report.interrupted {
        tell!("pvblk bench: interrupted; these are the figures until then");
    }
    for job in &report.threads {
        for m in &job.mismatches {
            tell!("pvblk: job {}: {m}", job.name);
        }
        let more = job.mismatch_count - job.mismatches.len() as u64;
        if more > 0 {
            tell!("pvblk: job {}: and {more} more", job.name);
        }
        if let (Some(e), true) = (&job.error, job.mismatches.is_empty()) {
            tell!("pvblk: job {}: {e}", job.name);
        }
    }
    Ok(())
}

/// One line that is written over on a terminal.
fn show(p: &Progress) {
    let mut line = String::from("bench:");
    if p.stages > 1 {
        line += &format!(" stage {} of {},", p.stage, p.stages);
    }
    if let (Some(done), Some(left)) = (p.done, p.left) {
        line += &format!(" {:.0} %, {} s left,", done * 100.0, left.as_secs());
    }
    line += &format!(
        " {} threads, {:.1} k IOPS, {:.1} MB/s",
        p.threads,
        p.iops / 1e3,
        p.bytes_per_second / 1e6
    );
    let mut out = std::io::stderr().lock();
    let _ = match out.is_terminal() {
        true => write!(out, "\r{line}\x1b[K"),
        false => writeln!(out, "{line}"),
    };
}

fn clear_line() {
    let mut out = std::io::stderr().lock();
    if out.is_terminal() {
        let _ = write!(out, "\r\x1b[K");
    }
}
