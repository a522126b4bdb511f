//! Memory of a running server: the bill and the pools' figures, the limits, and a squeeze by hand.

use crate::control::ControlArg;
use crate::output::{print, print_line};
use crate::wanted::command::{ReloadArgs, run as reload};
use crate::{bill, config, control};
use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use pvblk_backend::{DiskMemory, PoolCounters, Pressure, PressureSourceState, PressureWatch};
use pvblk_block::memory::MemoryKind;
use pvblk_block::{Error, ErrorKind};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub const HELP: &str = "\
Examples:
  pvblk ctl memory --control unix:/run/pvblk.ctl
  pvblk ctl squeeze --control unix:/run/pvblk.ctl
  pvblk ctl set --control unix:/run/pvblk.ctl --max-buffer-pages 256 --buffer-squeeze-duration-ms 100
  pvblk ctl reload --control unix:/run/pvblk.ctl --dry-run";

#[derive(Subcommand, Debug)]
pub enum CtlCommand {
    /// Show the server's memory: each disk's buffers, every owner on the memory bill, and the sources of memory pressure
    Memory(MemoryArgs),
    /// Give all free buffers back to the system now, as if memory was short
    Squeeze(SqueezeArgs),
    /// Change limits of the running server
    Set(SetArgs),
    /// Read the configuration file again, print what it changes, and serve that
    Reload(ReloadArgs),
}

#[derive(Args, Debug)]
pub struct MemoryArgs {
    #[command(flatten)]
    control: ControlArg,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub struct SqueezeArgs {
    #[command(flatten)]
    control: ControlArg,
}

#[derive(Args, Debug)]
pub struct SetArgs {
    #[command(flatten)]
    control: ControlArg,
    /// Free buffer pages (4 KiB) that each connection keeps, 0 to 16384
    #[arg(long, value_name = "PAGES")]
    max_buffer_pages: Option<usize>,
    /// Time for which connections keep no pages under pressure, milliseconds, 0 to 60000
    #[arg(long, value_name = "MILLISECONDS")]
    buffer_squeeze_duration_ms: Option<u64>,
    /// Buffer pages (4 KiB) that all connections together keep even then
    #[arg(long, value_name = "PAGES")]
    buffer_floor_pages_total: Option<usize>,
}

/// A question, on the control socket.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Question {
    Memory(Ask),
    Set(Settings),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Ask {
    Report,
    Squeeze,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Settings {
    max_buffer_pages: Option<usize>,
    buffer_squeeze_duration_ms: Option<u64>,
    /// Of all workers together.
    buffer_floor_pages: Option<usize>,
}

/// Buffers of a disk, or of all.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Pool {
    pub pool_pages: u64,
    pub in_use_pages: u64,
    pub peak_pages: u64,
    pub allocated_pages: u64,
    pub taken_pages: u64,
    pub squeezes: u64,
    pub squeezed_pages: u64,
    pub returned_pages: u64,
    pub allocation_stalls: u64,
    pub squeezed_ms: f64,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct DiskPool {
    pub disk: String,
    #[serde(flatten)]
    pub pool: Pool,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Owner {
    pub owner: String,
    pub kind: String,
    pub live_bytes: u64,
    pub cap_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Source {
    pub name: String,
    pub missing: Option<String>,
}

/// The answer to `report`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    settings: Settings,
    pub squeezing: bool,
    pub squeezes: u64,
    pub merged_signals: u64,
    pub source_signals: u64,
    pub longest_squeeze_us: u64,
    pub device_bytes: u64,
    pub disks: Vec<DiskPool>,
    pub total: Pool,
    pub sources: Vec<Source>,
    pub owners: Vec<Owner>,
    pub private_bytes: u64,
    pub shared_bytes: u64,
    pub cap_bytes: u64,
    pub rss_anon_bytes: u64,
}

/// The answer to `squeeze`.
#[derive(Debug, Serialize, Deserialize)]
struct SqueezeAnswer {
    bytes: u64,
    merged: bool,
}

/// Where questions about memory are answered, in the server.
pub struct Desk {
    pressure: Arc<Pressure>,
    sources: Vec<PressureSourceState>,
    signals: Arc<AtomicU64>,
    base: u64,
}

impl Desk {
    /// `base`: what the process had before it served anything.
    pub fn new(pressure: &Arc<Pressure>, watch: Option<&PressureWatch>, base: u64) -> Desk {
        Desk {
            pressure: Arc::clone(pressure),
            sources: watch.map_or_else(Vec::new, |w| w.states().to_vec()),
            signals: watch.map_or_else(Arc::default, PressureWatch::signals),
            base,
        }
    }

    /// Answers a question; both texts are JSON.
    pub fn answer(&self, question: &str) -> Result<String, Error> {
        let question: Question = serde_json::from_str(question)
            .map_err(|e| Error::caused(ErrorKind::Config, "a question about memory", e))?;
        let answer = match question {
            Question::Memory(Ask::Report) => serde_json::to_string(&self.report()),
            Question::Memory(Ask::Squeeze) => {
                let squeezed = self.pressure.squeeze();
                serde_json::to_string(&SqueezeAnswer {
                    bytes: squeezed.bytes,
                    merged: squeezed.merged,
                })
            }
            Question::Set(settings) => {
                self.set(&settings)
                    .map_err(|e| Error::boxed(ErrorKind::Config, "", e.into()))?;
                serde_json::to_string(&self.settings())
            }
        };
        answer.map_err(|e| Error::caused(ErrorKind::Config, "the answer", e))
    }

    fn set(&self, settings: &Settings) -> Result<()> {
        // All are checked before any is changed.
        let pages = settings.max_buffer_pages.map(config::buffer_pages);
        let duration = settings
            .buffer_squeeze_duration_ms
            .map(config::squeeze_duration);
        let (pages, duration) = (pages.transpose()?, duration.transpose()?);
        if let Some(pages) = settings.buffer_floor_pages {
            self.pressure.set_floor_pages(pages);
        }
        if let Some(duration) = duration {
            self.pressure.set_duration(duration);
        }
        if let Some(pages) = pages {
            self.pressure.set_max_buffer_pages(pages);
        }
        Ok(())
    }

    fn settings(&self) -> Settings {
        Settings {
            max_buffer_pages: Some(self.pressure.max_buffer_pages()),
            buffer_squeeze_duration_ms: Some(self.pressure.duration().as_millis() as u64),
            buffer_floor_pages: Some(self.pressure.floor_pages()),
        }
    }

    /// All figures of this moment.
    pub fn report(&self) -> Report {
        let report = self.pressure.report();
        let lines = bill::lines(self.base);
        let (private_bytes, shared_bytes, cap_bytes) = bill::totals(&lines);
        let disk = |(name, memory): (&String, &DiskMemory)| DiskPool {
            disk: name.clone(),
            pool: pool(&memory.pools, memory.squeezed.as_secs_f64()),
        };
        let source = |s: &PressureSourceState| Source {
            name: s.name.clone(),
            missing: s.missing.clone(),
        };
        let kind = |kind| match kind {
            MemoryKind::Heap => "heap",
            MemoryKind::Anonymous => "private",
            MemoryKind::Shared => "shared",
            MemoryKind::Unallocated => "unallocated",
        };
        let owner = |l: pvblk_block::memory::MemoryLine| Owner {
            kind: kind(l.kind).to_owned(),
            owner: l.owner,
            live_bytes: l.live_bytes,
            cap_bytes: l.cap_bytes,
        };
        Report {
            settings: self.settings(),
            squeezing: report.on,
            squeezes: report.squeezes,
            merged_signals: report.merged,
            source_signals: self.signals.load(Ordering::Relaxed),
            longest_squeeze_us: report.longest_pass.as_micros() as u64,
            device_bytes: report.device_bytes,
            disks: report.disks.iter().map(disk).collect(),
            total: pool(&report.total, report.squeezed.as_secs_f64()),
            sources: self.sources.iter().map(source).collect(),
            owners: lines.into_iter().map(owner).collect(),
            private_bytes,
            shared_bytes,
            cap_bytes,
            rss_anon_bytes: pvblk_sys::proc_status::memory(None).map_or(0, |m| m.rss_anon),
        }
    }
}

fn pool(c: &PoolCounters, squeezed_seconds: f64) -> Pool {
    Pool {
        pool_pages: c.free_pages + c.used_pages,
        in_use_pages: c.used_pages,
        peak_pages: c.peak_pages,
        allocated_pages: c.allocated_pages,
        taken_pages: c.taken_pages,
        squeezes: c.squeezes,
        squeezed_pages: c.squeezed_pages,
        returned_pages: c.returned_pages,
        allocation_stalls: c.stalls,
        squeezed_ms: squeezed_seconds * 1e3,
    }
}

/// `pvblk ctl`.
pub fn run(command: &CtlCommand) -> Result<()> {
    match command {
        CtlCommand::Memory(args) => {
            let text = ask(&args.control, &Question::Memory(Ask::Report))?;
            if args.json {
                return print(&text);
            }
            let report: Report = parse(&args.control, &text)?;
            print(&report.text())
        }
        CtlCommand::Reload(args) => reload(args),
        CtlCommand::Squeeze(args) => {
            let text = ask(&args.control, &Question::Memory(Ask::Squeeze))?;
            let answer: SqueezeAnswer = parse(&args.control, &text)?;
            match answer.merged {
                true => print_line("a squeeze was just over: it lasts longer"),
                false => print_line(&format!("{} KiB given back", answer.bytes / 1024)),
            }
        }
        CtlCommand::Set(args) => {
            let settings = Settings {
                max_buffer_pages: args.max_buffer_pages,
                buffer_squeeze_duration_ms: args.buffer_squeeze_duration_ms,
                buffer_floor_pages: args.buffer_floor_pages_total,
            };
            let text = ask(&args.control, &Question::Set(settings))?;
            print(&settings_text(&parse(&args.control, &text)?))
        }
    }
}

fn ask(socket: &ControlArg, question: &Question) -> Result<String> {
    control::ask_memory(&socket.path()?, &serde_json::to_string(question)?)
}

fn parse<T: for<'a> Deserialize<'a>>(socket: &ControlArg, text: &str) -> Result<T> {
    let place = socket.path()?;
    serde_json::from_str(text)
        .with_context(|| format!("{}: the answer isn't about memory", place.display()))
}

fn settings_text(s: &Settings) -> String {
    let shown = |n: Option<usize>| n.unwrap_or_default();
    format!(
        "max-buffer-pages {}, buffer-squeeze-duration-ms {}, floor {} pages in all\n",
        shown(s.max_buffer_pages),
        s.buffer_squeeze_duration_ms.unwrap_or_default(),
        shown(s.buffer_floor_pages),
    )
}

impl Report {
    fn text(&self) -> String {
        let mut table = comfy_table::Table::new();
        table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
        table.set_header([
            "disk",
            "pool pages",
            "in use",
            "peak",
            "squeezes",
            "pages squeezed",
            "pages returned",
            "stalls",
            "under squeeze",
        ]);
        let row = |name: &str, p: &Pool| {
            let under = format!("{:.1} ms", p.squeezed_ms);
            let numbers = [
                p.pool_pages,
                p.in_use_pages,
                p.peak_pages,
                p.squeezes,
                p.squeezed_pages,
                p.returned_pages,
                p.allocation_stalls,
            ];
            let mut cells = vec![name.to_owned()];
            cells.extend(numbers.map(|n| n.to_string()));
            cells.push(under);
            cells
        };
        for d in &self.disks {
            table.add_row(row(&d.disk, &d.pool));
        }
        table.add_row(row("all", &self.total));
        let mut out = format!("{table}\n");
        out += &settings_text(&self.settings);
        out += &format!(
            "squeezed {} times, longest {} µs, {} KiB of caches and stripes; {} signals of sources, {} merged{}\n",
            self.squeezes,
            self.longest_squeeze_us,
            self.device_bytes / 1024,
            self.source_signals,
            self.merged_signals,
            if self.squeezing {
                "; squeezing now"
            } else {
                ""
            },
        );
        for s in &self.sources {
            out += &match &s.missing {
                None => format!("source: {}\n", s.name),
                Some(why) => format!("no source: {}: {why}\n", s.name),
            };
        }
        let mut owners = comfy_table::Table::new();
        owners.load_preset(comfy_table::presets::ASCII_MARKDOWN);
        owners.set_header(["memory", "kind", "now KiB", "at most KiB"]);
        for o in &self.owners {
            owners.add_row([
                o.owner.clone(),
                o.kind.clone(),
                o.live_bytes.div_ceil(1024).to_string(),
                o.cap_bytes.div_ceil(1024).to_string(),
            ]);
        }
        out += &format!("{owners}\n");
        out += &format!(
            "sum: {} KiB private, {} KiB mapped shared, at most {} KiB; RssAnon {} KiB\n",
            self.private_bytes / 1024,
            self.shared_bytes / 1024,
            self.cap_bytes / 1024,
            self.rss_anon_bytes / 1024,
        );
        out
    }
}
