//! `pvblk report`: one HTML file of results or of a capture.

mod bench;
mod comparison;
mod hops;
mod lab;
mod page;

pub use hops::section as hops;
pub use page::Page;

use crate::latency;
use crate::output::{print, tell};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use pvblk_trace::blktrace::files_of;
use serde_json::Value;
use std::path::{Path, PathBuf};

pub const HELP: &str = "\
Takes what these commands wrote; several files become one page, and those of `bench` are put side by side:
  pvblk bench --json FILE, and fio's --output-format=json
  pvblk latency --json FILE
  pvblk-lab EXPERIMENT --json FILE
  pvblk-lab compare --json FILE
  pvblk trace, or blktrace: a capture, which is analysed as by `pvblk latency`; several are read as one
The page is one file that loads nothing: tables, plots, the machine, and the files themselves to save again.

Examples:
  pvblk bench --target mem:1G --rw randread --iodepth 32 --runtime 10 --json after.json
  pvblk report before.json after.json --output change.html
  pvblk report trace --output slow.html             all of trace.blktrace.0, trace.blktrace.1, …";

/// Most bytes of a file of results.
const MOST_BYTES: u64 = 64 << 20;
/// Most bytes of a capture that is kept in its report.
const MOST_CAPTURE: usize = 16 << 20;

#[derive(Args, Debug)]
pub struct ReportArgs {
    /// Files of results, and captures
    #[arg(value_name = "FILE|NAME", required = true)]
    pub files: Vec<PathBuf>,
    /// The page; - is standard output
    #[arg(long, short, value_name = "FILE.html", default_value = "report.html")]
    pub output: PathBuf,
    /// Title of the page [default: the names of the files]
    #[arg(long, value_name = "TEXT")]
    pub title: Option<String>,
    /// A capture that blktrace made in the guest whose disk is served as DISK, beside the capture of the server; may be given several times
    #[arg(long, value_name = "DISK=FILE|NAME", value_parser = latency::guest)]
    pub guest: Vec<(String, PathBuf)>,
}

/// A file of results.
struct Source {
    /// Its name in the page.
    name: String,
    bytes: Vec<u8>,
    content: Value,
}

/// The sources by what wrote them.
#[derive(Default)]
struct Sources {
    bench: Vec<Source>,
    comparisons: Vec<Source>,
    lab: Vec<Source>,
    hops: Vec<Source>,
    captures: Vec<PathBuf>,
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    name.to_string_lossy().into_owned()
}

impl Sources {
    fn read(files: &[PathBuf]) -> Result<Sources> {
        let mut all = Sources::default();
        for path in files {
            all.add(path).with_context(|| path.display().to_string())?;
        }
        Ok(all)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        if !path.is_file() && !files_of(path).is_empty() {
            self.captures.push(path.to_owned());
            return Ok(());
        }
        let size = std::fs::metadata(path)?.len();
        let bytes = match size <= MOST_BYTES {
            true => std::fs::read(path)?,
            // A capture may be of any size, and is read apart.
            false => Vec::new(),
        };
        // fio writes notes before its JSON.
        let begin = bytes.iter().position(|b| *b == b'{');
        let mut json =
            begin.map(|at| serde_json::Deserializer::from_slice(&bytes[at..]).into_iter());
        let content: Value = match json.as_mut().and_then(Iterator::next) {
            Some(Ok(content)) => content,
            _ => Value::Null,
        };
        let source = Source {
            name: name_of(path),
            bytes,
            content,
        };
        let has = |keys: &[&str]| keys.iter().all(|k| source.content.get(k).is_some());
        let place = if has(&["jobs"]) {
            &mut self.bench
        } else if has(&["command", "result"]) {
            &mut self.lab
        } else if has(&["sides", "metrics"]) {
            &mut self.comparisons
        } else if has(&["devices", "paths"]) {
            &mut self.hops
        } else if source.content.is_null() {
            self.captures.push(path.to_owned());
            return Ok(());
        } else {
            bail!(
                "it is JSON, but not of `pvblk bench`, fio, `pvblk latency`, `pvblk-lab` or `pvblk-lab compare`"
            );
        };
        place.push(source);
        Ok(())
    }
}

pub fn run(args: &ReportArgs) -> Result<()> {
    let sources = Sources::read(&args.files)?;
    ensure!(
        args.guest.is_empty() || !sources.captures.is_empty(),
        "--guest needs the server's capture beside it"
    );
    let mut page = Page::default();
    if !sources.bench.is_empty() {
        bench::section(&mut page, &sources.bench)?;
    }
    for source in &sources.comparisons {
        comparison::section(&mut page, source)?;
    }
    for source in &sources.lab {
        lab::section(&mut page, source)?;
    }
    for source in &sources.hops {
        page.section(&source.name);
        hops::section(&mut page, &source.content)?;
    }
    if !sources.captures.is_empty() {
        capture(&mut page, &sources.captures, &args.guest)?;
    }
    page.section("Files");
    let Sources {
        bench,
        comparisons,
        lab,
        hops,
        captures,
    } = &sources;
    for source in bench.iter().chain(comparisons).chain(lab).chain(hops) {
        page.attachment(&source.name, "application/json", &source.bytes);
    }
    let guests = args.guest.iter().map(|(_, file)| file);
    for path in captures.iter().chain(guests) {
        attach_capture(&mut page, path)?;
    }
    let names: Vec<String> = args.files.iter().map(|f| name_of(f)).collect();
    let title = args.title.clone().unwrap_or_else(|| names.join(", "));
    write(&args.output, page, &title)
}

/// Writes the page, and says so.
pub fn write(to: &Path, page: Page, title: &str) -> Result<()> {
    let made = concat!("made by pvblk report ", env!("CARGO_PKG_VERSION"));
    let html = page.finish(title, made);
    if to.as_os_str() == "-" {
        return print(&html);
    }
    std::fs::write(to, html).with_context(|| format!("writing {}", to.display()))?;
    tell!("report: {}", to.display());
    Ok(())
}

fn capture(page: &mut Page, files: &[PathBuf], guests: &[(String, PathBuf)]) -> Result<()> {
    let figures = latency::figures(files, guests)
        .context("it is no JSON of results, so it was read as a capture")?;
    let names: Vec<String> = files.iter().map(|f| name_of(f)).collect();
    page.section(&names.join(", "));
    hops::section(page, &figures)
}

fn attach_capture(page: &mut Page, path: &Path) -> Result<()> {
    for file in files_of(path) {
        let name = name_of(&file);
        let size = std::fs::metadata(&file)?.len();
        if size > MOST_CAPTURE as u64 {
            page.quiet(&format!(
                "{name} ({size} bytes) isn't in this page: keep it beside"
            ));
            continue;
        }
        page.attachment(&name, "application/octet-stream", &std::fs::read(&file)?);
    }
    Ok(())
}

/// A time in nanoseconds with its unit.
fn time(ns: f64) -> String {
    pvblk_bench::plot::Unit::Microseconds.label(ns / 1e3)
}

/// The table of a machine, if the file names one.
fn machine(page: &mut Page, machine: &Value) {
    let Some(fields) = machine.as_object() else {
        return;
    };
    let row = |(key, value): (&String, &Value)| {
        let name = match key.as_str() {
            "cpu" => "CPU",
            "cpus" => "CPUs",
            "kernel" => "kernel",
            "memory_mib" => "memory, MiB",
            other => other,
        };
        let value = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        vec![name.into(), value.into()]
    };
    page.words(&["machine", ""], fields.iter().map(row).collect());
}
