//! `pvblk cache`: what a served page cache counts, and dropping its clean pages.

use crate::control::{self, ControlArg};
use crate::output::print;
use anyhow::{Context, Result};
use clap::Args;
use pvblk_backend::Disk;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Shown under the flags.
pub const HELP: &str = "\
Names are those of /proc/vmstat where there are any; what begins with nr_ is a number of pages now, the rest was counted since the start.

Examples:
  pvblk serve --disk a=cache:256M:file:a.img --nbd unix:/tmp/a.sock --control unix:/tmp/control.sock
  pvblk cache a --control unix:/tmp/control.sock
  pvblk cache a --control unix:/tmp/control.sock --drop";

#[derive(Args, Debug)]
pub struct CacheArgs {
    /// Name of the served disk
    #[arg(value_name = "DISK")]
    pub disk: String,
    #[command(flatten)]
    pub control: ControlArg,
    /// Print JSON, for programs
    #[arg(long)]
    pub json: bool,
    /// Drop all pages that are clean and not in use
    #[arg(long)]
    pub drop: bool,
}

/// Most disks that an error names.
const MOST_NAMED: usize = 8;

/// True if a question to a disk is one to its cache.
pub fn is_question(question: &str) -> bool {
    let question: Result<Map<String, Value>, _> = serde_json::from_str(question);
    question.is_ok_and(|question| question.contains_key("cache"))
}

/// The error for a question to the cache of a disk that has none: how to add one, and which of the served disks have one.
pub fn no_cache(disk: &Disk, served: &[Arc<Disk>]) -> String {
    let (name, volume) = (disk.name(), disk.device().describe());
    let mut error =
        format!("disk {name} has no cache: serve it as {name}=cache:256M:{volume} to add one");
    let counters = r#"{"cache":"counters"}"#;
    let cached = served.iter().filter(|d| d.ask(counters).is_some());
    let mut cached: Vec<&str> = cached.take(MOST_NAMED + 1).map(|d| d.name()).collect();
    if cached.len() > MOST_NAMED {
        cached[MOST_NAMED] = "more";
    }
    if !cached.is_empty() {
        error += &format!("; disks with a cache: {}", cached.join(", "));
    }
    error
}

pub fn run(args: &CacheArgs) -> Result<()> {
    let socket = args.control.path()?;
    let word = if args.drop { "drop" } else { "counters" };
    let question = format!("{{\"cache\":\"{word}\"}}");
    let answer = control::ask(&socket, &args.disk, &question)?;
    let answer: Map<String, Value> = serde_json::from_str(&answer)
        .with_context(|| format!("{}: the answer is no cache's", socket.display()))?;
    let text = match args.json {
        true => serde_json::to_string_pretty(&answer)? + "\n",
        false => answer.iter().map(line).collect(),
    };
    print(&text)
}

/// As /proc/vmstat has it; shares in percent.
fn line((name, value): (&String, &Value)) -> String {
    match value.as_f64() {
        Some(share) if value.is_f64() && name != "segments_per_read" => {
            format!("{name} {:.2} %\n", 100.0 * share)
        }
        Some(number) if value.is_f64() => format!("{name} {number:.2}\n"),
        Some(_) => format!("{name} {value}\n"),
        None => format!("{name} -\n"),
    }
}
