//! `pvblk trace`: captures and timelines from running servers.

mod timeline;

use crate::config;
use crate::control::Stream;
use crate::output::{tell, tell_part};
use anyhow::{Context, Result, bail};
use clap::Args;
use clap::error::ErrorKind;
use parking_lot::Mutex;
use pvblk_block::trace::MOST_EVERY;
use pvblk_trace::Event;
use pvblk_trace::blktrace::{Step, Writer};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufWriter, IsTerminal, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub const HELP: &str = "\
Writes NAME.blktrace.0, NAME.blktrace.1, …, which `pvblk latency`, `blkparse` and `btt` read; each is a queue's.
Ends with --seconds, Ctrl-C, or when all servers have ended. --perfetto writes a timeline instead, which
https://ui.perfetto.dev opens in the browser without sending it anywhere: disks, their layers, a slice for each
request with its hops, and flows from layer to layer.

Examples:
  pvblk serve --disk a=mem:1G --local unix:/run/p.sock --control unix:/run/p.ctl
  pvblk trace unix:/run/p.ctl --seconds 10 --output slow
  pvblk trace unix:/run/p.ctl unix:/run/attach.ctl       both sides of the rings in one capture
  pvblk trace unix:/run/p.ctl --every 64 --seconds 10    one request in 64, at a million a second
  pvblk trace unix:/run/p.ctl --output - | blkparse -i -
  pvblk trace unix:/run/p.ctl unix:/run/attach.ctl --seconds 5 --perfetto vm1.pftrace
  pvblk trace --from slow --guest vm1=xvda --perfetto vm1.pftrace";

#[derive(Args, Debug)]
pub struct TraceArgs {
    /// Control sockets of servers, or of attached front ends
    #[arg(value_name = "unix:PATH", required_unless_present = "from")]
    pub servers: Vec<String>,
    /// Name of the capture; - writes all records to standard output [default: trace]
    #[arg(long, short, value_name = "NAME", conflicts_with = "perfetto")]
    pub output: Option<PathBuf>,
    /// Write a timeline for Perfetto instead of a capture; - writes to standard output
    #[arg(long, value_name = "FILE")]
    pub perfetto: Option<PathBuf>,
    /// Draw the timeline of captures that were made before, read as one; may be given several times
    #[arg(long, value_name = "FILE|NAME", requires = "perfetto", conflicts_with_all = ["servers", "output", "seconds"])]
    pub from: Vec<PathBuf>,
    /// A capture that blktrace made in the guest whose disk is served as DISK, at the same time; may be given several times
    #[arg(long, value_name = "DISK=FILE|NAME", value_parser = crate::latency::guest, requires = "from")]
    pub guest: Vec<(String, PathBuf)>,
    /// Length of the trace; by default until Ctrl-C
    #[arg(long, value_name = "SECONDS")]
    pub seconds: Option<f64>,
    /// Record one request in so many, with all its events, for loads that are too high for a record of all
    #[arg(long, value_name = "N", default_value = "1", value_parser = every())]
    pub every: u32,
}

/// The values of `--every`.
pub fn every() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=i64::from(MOST_EVERY))
}

/// A finite, positive number of seconds.
pub fn seconds(flag: &str, seconds: f64) -> Result<Duration> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => bail!("{flag} {seconds}: must be more than 0"),
    }
}

pub fn run(args: &TraceArgs) -> Result<()> {
    if let Some(file) = &args.perfetto {
        return match args.from.is_empty() {
            true => timeline::from_servers(args, file),
            false => timeline::from_captures(args, file),
        };
    }
    let output = args.output.clone().unwrap_or_else(|| "trace".into());
    let limit = args.seconds.map(|s| seconds("--seconds", s)).transpose()?;
    let streams = open(&args.servers, args.every)?;
    let to_stdout = output.as_os_str() == "-";
    let writer = match to_stdout {
        true => Writer::stream(BufWriter::with_capacity(1 << 16, std::io::stdout())),
        false => Writer::create(&output)?,
    };
    let capture = Mutex::new(Capture::new(writer));
    let count = AtomicU64::new(0);
    let end = follow(streams, limit, &count, |server, step| {
        let mut capture = capture.lock();
        capture.step(server, step)?;
        count.store(capture.events, Ordering::Relaxed);
        Ok(())
    });
    let capture = capture.into_inner();
    let (events, dropped, devices) = (capture.events, capture.dropped, capture.devices.len());
    let files = capture.writer.finish()?;
    end?;
    let lost = match dropped {
        0 => String::new(),
        n => format!("; {n} events were dropped"),
    };
    let place = match (to_stdout, files) {
        (true, _) => "standard output".to_owned(),
        (false, 1) => format!("{}.blktrace.0", output.display()),
        (false, n) => format!("{0}.blktrace.0 to .{1}", output.display(), n - 1),
    };
    tell!("{events} events of {devices} devices in {place}{lost}");
    Ok(())
}

/// Opens the streams of all servers, of one request in `every`.
pub fn open(servers: &[String], every: u32) -> Result<Vec<Stream>> {
    if every > 1 && servers.len() > 1 {
        // A mark doesn't cross a ring (decision 34).
        let text = "--every is for one server: each follows requests of its own choice, so no way over both would be known\n";
        return Err(clap::Error::raw(ErrorKind::ArgumentConflict, text).into());
    }
    let path = |s: &String| config::unix_path("the server's control socket", s);
    let all = servers.iter();
    all.map(|s| Stream::open(&path(s)?, every)).collect()
}

/// Gives the events of all streams to `take`, with the stream's index, until the time is over, a signal
/// comes, or all streams have ended.
pub fn follow(
    mut streams: Vec<Stream>,
    limit: Option<Duration>,
    events: &AtomicU64,
    take: impl Fn(usize, Step) -> Result<()> + Sync,
) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The second one ends at once.
        let status = 128 + signal;
        signal_hook::flag::register_conditional_shutdown(signal, status, Arc::clone(&stop))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let begin = Instant::now();
    let take = &take;
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (i, stream) in streams.iter_mut().enumerate() {
            let Some(mut reader) = stream.reader() else {
                continue;
            };
            let name = stream.name().to_owned();
            threads.push(scope.spawn(move || -> Result<()> {
                while let Some(step) = reader.next_step()? {
                    if step == Step::CutOff {
                        bail!("{name}: the server ended in the middle of a record");
                    }
                    take(i, step)?;
                }
                Ok(())
            }));
        }
        let shows = std::io::stderr().is_terminal();
        let mut asked = false;
        while threads.iter().any(|t| !t.is_finished()) {
            let over = limit.is_some_and(|l| begin.elapsed() >= l) || stop.load(Ordering::Relaxed);
            if over && !asked {
                asked = true;
                streams.iter().for_each(Stream::finish);
            }
            std::thread::sleep(Duration::from_millis(20));
            if shows {
                let seconds = begin.elapsed().as_secs_f64();
                let count = events.load(Ordering::Relaxed);
                tell_part!("\rtrace: {count} events in {seconds:.1} s\x1b[K");
            }
        }
        if shows {
            tell_part!("\r\x1b[K");
            let _ = std::io::stderr().flush();
        }
        let ended = threads.into_iter().map(|t| match t.join() {
            Ok(end) => end,
            Err(_) => bail!("a thread panicked"),
        });
        ended.collect()
    })
}

/// Several servers' records become one capture: each server's queues get numbers of their own.
struct Capture {
    writer: Writer,
    queues: BTreeMap<(usize, u32), u32>,
    devices: BTreeSet<u32>,
    events: u64,
    dropped: u64,
}

impl Capture {
    fn new(writer: Writer) -> Capture {
        Capture {
            writer,
            queues: BTreeMap::new(),
            devices: BTreeSet::new(),
            events: 0,
            dropped: 0,
        }
    }

    fn step(&mut self, server: usize, step: Step) -> Result<()> {
        let failed = "writing the capture";
        match step {
            Step::Event(event, _) => {
                let next = self.queues.len() as u32;
                let queue = *self.queues.entry((server, event.queue)).or_insert(next);
                self.devices.insert(event.device.0);
                self.events += 1;
                self.writer.event(&Event { queue, ..event }).context(failed)
            }
            Step::Clock(time_ns, device, day) => {
                self.writer.clock(time_ns, device, day).context(failed)
            }
            Step::Message(time_ns, device, text) => {
                let gap = pvblk_trace::blktrace::gap(time_ns, device, &text);
                self.dropped += gap.map_or(0, |gap| gap.lost());
                let message = self.writer.message(time_ns, device, &text);
                message.context(failed)
            }
            // The writer names submitters itself.
            Step::Process(..) | Step::Other(_) | Step::CutOff => Ok(()),
        }
    }
}
