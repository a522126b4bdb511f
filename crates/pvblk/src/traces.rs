//! Traces on the control socket of a process with disks, and its log of slow requests.

use crate::latency;
use anyhow::{Context, Result, bail};
use pvblk_block::trace::Tracing;
use pvblk_trace::blktrace::{CaptureWriter, Writer, Written};
use pvblk_trace::latency::{Analyzer, Life};
use pvblk_trace::slow::SlowLog;
use pvblk_trace::{Feed, Next, Recorder, Subscription};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most slow requests that are logged in one second.
const MOST_SLOW_PER_SECOND: u32 = 10;

/// A process's recorder. It records only while a client listens.
pub struct Traces {
    recorder: Recorder,
    feed: Arc<Feed>,
}

/// A log of slow requests, which runs until it is dropped.
#[derive(Default)]
pub struct Running {
    slow: Option<(Arc<Subscription>, JoinHandle<()>)>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some((subscription, thread)) = self.slow.take() {
            subscription.finish();
            let _ = thread.join();
        }
    }
}

/// A capture that is being written.
pub struct Writing {
    name: String,
    subscription: Arc<Subscription>,
    thread: JoinHandle<std::io::Result<Written>>,
}

impl Writing {
    /// Ends the capture; returns a line on its contents.
    pub fn finish(self) -> Result<String> {
        self.subscription.finish();
        let Ok(end) = self.thread.join() else {
            bail!("{}: the thread that writes it panicked", self.name);
        };
        let written = end.with_context(|| format!("writing {}", self.name))?;
        let text = format!("{} events in {}.blktrace.*", written.events, self.name);
        Ok(match written.lost {
            0 => text,
            n => format!("{text}; {n} were dropped"),
        })
    }
}

impl Traces {
    /// Of a server: its devices are numbered from 0.
    pub fn of_server() -> Traces {
        Traces::new(0)
    }

    /// Of a process with a front end: its devices are numbered apart from those of other processes, as its captures are
    /// read together with its server's.
    pub fn of_client() -> Traces {
        Traces::new((std::process::id() % 4095 + 1) << 8)
    }

    fn new(first_minor: u32) -> Traces {
        let recorder = Recorder::idle(first_minor);
        let feed = Feed::new(recorder.clone());
        Traces { recorder, feed }
    }

    /// Tracing for a disk.
    pub fn of(&self, disk: &str) -> Tracing {
        Tracing::to(Arc::new(self.recorder.clone()), disk)
    }

    /// All events from now on.
    pub fn subscribe(&self) -> Result<Subscription> {
        self.feed.subscribe().context("starting a trace")
    }

    /// Writes all events from now on to the capture `name`.
    pub fn write(&self, name: &Path) -> Result<Writing> {
        let shown = name.display().to_string();
        let writer = Writer::create(name).with_context(|| format!("writing {shown}"))?;
        let subscription = Arc::new(self.subscribe()?);
        let ours = Arc::clone(&subscription);
        let body = move || -> std::io::Result<Written> {
            let mut capture = CaptureWriter::new(writer, ours.collector().clone());
            loop {
                match ours.next(Duration::from_secs(1)) {
                    Next::End => break,
                    Next::Nothing => {}
                    Next::Events(events) => capture.events(&events)?,
                }
            }
            capture.finish()
        };
        let thread = std::thread::Builder::new().name("pvblk-capture".into());
        Ok(Writing {
            name: shown,
            subscription,
            thread: thread.spawn(body).context("starting a trace")?,
        })
    }

    /// The events to which clients of the control socket subscribe.
    pub fn feed(&self) -> &Arc<Feed> {
        &self.feed
    }

    /// Starts to log slow requests, where that is wanted.
    pub fn start(&self, slow: Option<Duration>) -> Result<Running> {
        let mut running = Running::default();
        if let Some(threshold) = slow {
            let subscription = Arc::new(self.subscribe()?);
            let ours = Arc::clone(&subscription);
            let thread = std::thread::Builder::new()
                .name("pvblk-slow".into())
                .spawn(move || watch(&ours, threshold))
                .context("starting the log of slow requests")?;
            running.slow = Some((subscription, thread));
        }
        Ok(running)
    }
}

/// Logs slow requests until the subscription ends.
fn watch(subscription: &Subscription, threshold: Duration) {
    let mut log = SlowLog::new(threshold, 1, MOST_SLOW_PER_SECOND);
    let mut analyzer = Analyzer::without_samples();
    let mut names = BTreeMap::new();
    let (mut told, mut lost, mut unknown) = (0, 0, 0);
    let mut last = Instant::now();
    loop {
        match subscription.next(Duration::from_secs(1)) {
            Next::End => return,
            Next::Nothing => {}
            Next::Events(events) => {
                for event in events.iter() {
                    lost += event.lost();
                    analyzer.event(event, &mut |life: &Life| {
                        if log.record(life) {
                            if !names.contains_key(&life.device) {
                                names.extend(subscription.collector().devices());
                            }
                            let name = names.get(&life.device).map_or("", String::as_str);
                            tracing::warn!("slow: {}", latency::life_text(life, name));
                        }
                    });
                }
            }
        }
        if last.elapsed() >= Duration::from_secs(1) {
            last = Instant::now();
            let report = analyzer.take();
            unknown += report.devices.values().map(|d| d.unknown).sum::<u64>();
            if lost > 0 {
                tracing::warn!(
                    "slow: {lost} events were lost, so {unknown} requests can't be judged: the trace is too slow for this load"
                );
                (lost, unknown) = (0, 0);
            }
            let hidden = log.hidden();
            if hidden > told {
                tracing::warn!("slow: and {} more requests", hidden - told);
                told = hidden;
            }
        }
    }
}
