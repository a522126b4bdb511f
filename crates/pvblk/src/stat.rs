//! `pvblk stat`: counters of served disks' requests, as rates.

use crate::config;
use crate::control::{ASK_PATIENCE, Client, ControlArg, no_disk};
use crate::output::print_or_end;
use anyhow::{Result, bail};
use clap::Args;
use comfy_table::{CellAlignment, Table, presets::NOTHING};
use pvblk_backend::events::EventLog;
use pvblk_backend::{Disk, Disks, Histogram, OPERATIONS, OperationTotals, Totals};
use pvblk_block::{Error, Op};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;

/// Shown under the flags.
pub const HELP: &str = "\
Columns, for reads (r), writes (w), and discards and write-zeroes together (d):
  r/s      requests that ended, per second
  rMB/s    their data, 10^6 bytes per second
  r_await  their average time in ms, from when the server took them to their answer; r_p99: 99 % took less (at most 1/8 too much)
  rrqm/s   those that were merged into others on their way to another server's rings
  rareq    their average size in KiB
  f/s      flushes, and their average time
  err/s    requests that ended with an error
  aqu-sz   requests at work, on average
  qbusy    queues with requests at work, on average
Without INTERVAL: since the server began to serve the disk. With it: since then, and then since the last line.

Examples:
  pvblk stat --control unix:/run/pvblk.ctl
  pvblk stat vm1 1s --control unix:/run/pvblk.ctl
  pvblk stat 500ms --count 10 --json --control unix:/run/pvblk.ctl";

#[derive(Args, Debug)]
pub struct StatArgs {
    /// The disk, if not all, and how long to count for each further table, such as 1s
    #[arg(value_name = "[DISK] [INTERVAL]", num_args = 0..=2)]
    pub what: Vec<String>,
    /// Tables to print with an interval [default: until interrupted]
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// A line for each connection, too
    #[arg(long)]
    pub connections: bool,
    #[command(flatten)]
    pub control: ControlArg,
    /// The counters themselves, since the server began to serve the disk: one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Counters of one operation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Operation {
    pub requests: u64,
    pub bytes: u64,
    pub errors: u64,
    pub merges: u64,
    pub in_flight: u64,
    pub time_ns: u64,
    /// Pairs of a time in nanoseconds, and how many requests took less, and not less than the time before.
    pub latency_ns: Vec<(u64, u64)>,
}

/// Counters of a disk or connection.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counted {
    pub in_flight: u32,
    pub busy_ns: u64,
    /// Only operations that were used.
    pub operations: BTreeMap<String, Operation>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Connection {
    pub name: String,
    #[serde(flatten)]
    pub counted: Counted,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OfDisk {
    pub disk: String,
    /// For how long the counters have counted.
    pub elapsed_ns: u64,
    #[serde(flatten)]
    pub counted: Counted,
    pub connections: Vec<Connection>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    pub disks: Vec<OfDisk>,
    /// Number of disks that are wanted and could not be opened: they have no counters.
    #[serde(default)]
    pub failed: usize,
    /// Numbers of the server's events by kind; only those that happened.
    #[serde(default)]
    pub events: BTreeMap<String, u64>,
}

impl Answer {
    #[must_use]
    pub fn with_failed(self, failed: usize) -> Answer {
        Answer { failed, ..self }
    }

    #[must_use]
    pub fn with_events(self, log: &EventLog) -> Answer {
        let events = event_counts(log);
        Answer { events, ..self }
    }

    /// Names of the disks, with their counters.
    pub fn counted(&self) -> impl Iterator<Item = (&str, &Counted)> {
        self.disks.iter().map(|d| (d.disk.as_str(), &d.counted))
    }
}

/// Numbers of events by the names of their kinds; only those that happened.
pub fn event_counts(log: &EventLog) -> BTreeMap<String, u64> {
    let counts = log.counts().into_iter();
    let happened = counts.filter(|(_, count)| *count > 0);
    happened
        .map(|(kind, count)| (kind.name().to_owned(), count))
        .collect()
}

/// The name of an operation in JSON.
pub fn name(op: Op) -> &'static str {
    match op {
        Op::Read => "read",
        Op::Write => "write",
        Op::Flush => "flush",
        Op::Discard => "discard",
        Op::WriteZeroes => "write_zeroes",
    }
}

impl From<Totals> for Counted {
    fn from(totals: Totals) -> Counted {
        let used = OPERATIONS.into_iter().zip(&totals.operations);
        let used = used.filter(|(_, t)| t.requests > 0 || t.in_flight > 0);
        let operation = |t: &OperationTotals| Operation {
            requests: t.requests,
            bytes: t.bytes,
            errors: t.errors,
            merges: t.merges,
            in_flight: t.in_flight,
            time_ns: t.time_ns,
            latency_ns: t.latency.buckets().collect(),
        };
        Counted {
            in_flight: totals.in_flight,
            busy_ns: totals.busy_ns,
            operations: used
                .map(|(op, t)| (name(op).to_owned(), operation(t)))
                .collect(),
        }
    }
}

impl From<&Counted> for Totals {
    fn from(counted: &Counted) -> Totals {
        let mut totals = Totals {
            in_flight: counted.in_flight,
            busy_ns: counted.busy_ns,
            ..Totals::default()
        };
        for (op, sum) in OPERATIONS.into_iter().zip(&mut totals.operations) {
            if let Some(o) = counted.operations.get(name(op)) {
                *sum = OperationTotals {
                    requests: o.requests,
                    bytes: o.bytes,
                    errors: o.errors,
                    merges: o.merges,
                    in_flight: o.in_flight,
                    time_ns: o.time_ns,
                    latency: Histogram::from_iter(o.latency_ns.iter().copied()),
                };
            }
        }
        totals
    }
}

/// The server's answer, for the disk `only`, or for all.
pub fn answer(disks: &Disks, only: Option<&str>) -> Result<Answer, Error> {
    let wanted = match only {
        None => disks.all(),
        Some(name) => vec![disks.find(name).ok_or_else(|| no_disk(disks, name))?],
    };
    Ok(Answer {
        disks: wanted.iter().map(|d| of_disk(d)).collect(),
        failed: 0,
        events: BTreeMap::new(),
    })
}

fn of_disk(disk: &Disk) -> OfDisk {
    let counters = disk.counters();
    let connections = counters.connections().into_iter();
    OfDisk {
        disk: disk.name().to_owned(),
        elapsed_ns: counters.elapsed().as_nanos() as u64,
        counted: counters.totals().into(),
        connections: connections
            .map(|(name, totals)| Connection {
                name,
                counted: totals.into(),
            })
            .collect(),
    }
}

/// A disk and an interval, in any number.
fn disk_and_interval(what: &[String]) -> Result<(Option<&str>, Option<Duration>)> {
    let interval = |text: &String| -> Result<Duration> {
        match config::time(text) {
            Ok(t) if t >= Duration::from_millis(10) => Ok(t),
            Ok(_) => bail!("{text}: an interval is at least 10ms"),
            Err(e) => bail!("{text}: {e}"),
        }
    };
    match what {
        [] => Ok((None, None)),
        [one] if config::time(one).is_ok() => Ok((None, Some(interval(one)?))),
        [one] => Ok((Some(one), None)),
        [disk, time, ..] => Ok((Some(disk), Some(interval(time)?))),
    }
}

pub fn run(args: &StatArgs) -> Result<()> {
    let socket = args.control.path()?;
    let (disk, interval) = disk_and_interval(&args.what)?;
    let mut tables = match interval {
        None if args.count.is_some() => bail!("--count is for an interval: write one, such as 1s"),
        None => 1,
        Some(_) => args.count.unwrap_or(u64::MAX),
    };
    let mut before: Option<Answer> = None;
    while tables > 0 {
        tables -= 1;
        let mut client = Client::connect(&socket, ASK_PATIENCE)?;
        let answer: Answer = client.call("stat", json!({ "disk": disk }))?;
        let shown = match args.json {
            true => serde_json::to_string(&answer)? + "\n",
            false => table(&answer, before.as_ref(), args.connections),
        };
        print_or_end(&shown)?;
        before = Some(answer);
        if let (Some(interval), true) = (interval, tables > 0) {
            std::thread::sleep(interval);
        }
    }
    Ok(())
}

const COLUMNS: [&str; 23] = [
    "disk",
    "r/s",
    "rMB/s",
    "rrqm/s",
    "r_await",
    "r_p99",
    "rareq",
    "w/s",
    "wMB/s",
    "wrqm/s",
    "w_await",
    "w_p99",
    "wareq",
    "d/s",
    "dMB/s",
    "d_await",
    "f/s",
    "f_await",
    "err/s",
    "in-flight",
    "aqu-sz",
    "qbusy",
    "seconds",
];

/// Rates since `before`, or since the server began.
fn table(answer: &Answer, before: Option<&Answer>, connections: bool) -> String {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header(COLUMNS);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for disk in &answer.disks {
        // A server that was started again counts anew.
        let old = before.and_then(|b| b.disks.iter().find(|d| d.disk == disk.disk));
        let old = old.filter(|o| o.elapsed_ns <= disk.elapsed_ns);
        let seconds = (disk.elapsed_ns - old.map_or(0, |o| o.elapsed_ns)) as f64 / 1e9;
        let of_disk = since(&disk.counted, old.map(|o| &o.counted));
        table.add_row(row(&disk.disk, &of_disk, seconds));
        for c in disk.connections.iter().filter(|_| connections) {
            let old = old.and_then(|o| o.connections.iter().find(|x| x.name == c.name));
            let counted = since(&c.counted, old.map(|o| &o.counted));
            table.add_row(row(&format!("  {}", c.name), &counted, seconds));
        }
    }
    let mut text = table.trim_fmt() + "\n";
    match answer.failed {
        0 => {}
        1 => text += "one more disk isn't open: see `pvblk disk list`\n",
        n => text += &format!("{n} more disks aren't open: see `pvblk disk list`\n"),
    }
    text
}

fn since(now: &Counted, before: Option<&Counted>) -> Totals {
    let now = Totals::from(now);
    match before {
        Some(before) => now.since(&Totals::from(before)),
        None => now,
    }
}

fn row(name: &str, totals: &Totals, seconds: f64) -> Vec<String> {
    let per_second = |n: f64| n / seconds.max(1e-9);
    let each = |sum: f64, requests: u64| sum / requests.max(1) as f64;
    let of = |op: Op| &totals.operations[op as usize];
    let rate = |t: &OperationTotals| format!("{:.1}", per_second(t.requests as f64));
    let merged = |t: &OperationTotals| format!("{:.1}", per_second(t.merges as f64));
    let mb = |t: &OperationTotals| format!("{:.2}", per_second(t.bytes as f64 / 1e6));
    let wait = |t: &OperationTotals| format!("{:.3}", each(t.time_ns as f64 / 1e6, t.requests));
    let p99 = |t: &OperationTotals| format!("{:.3}", t.latency.quantile(0.99) as f64 / 1e6);
    let size = |t: &OperationTotals| format!("{:.1}", each(t.bytes as f64 / 1024.0, t.requests));
    let (r, w, f) = (of(Op::Read), of(Op::Write), of(Op::Flush));
    let (discard, zeroes) = (of(Op::Discard), of(Op::WriteZeroes));
    let d = OperationTotals {
        requests: discard.requests + zeroes.requests,
        bytes: discard.bytes + zeroes.bytes,
        time_ns: discard.time_ns + zeroes.time_ns,
        ..OperationTotals::default()
    };
    let all = totals.operations.iter();
    let (time, errors) = all.fold((0, 0), |(t, e), o| (t + o.time_ns, e + o.errors));
    let mut cells = vec![name.to_owned()];
    for t in [r, w] {
        cells.extend([rate(t), mb(t), merged(t), wait(t), p99(t), size(t)]);
    }
    cells.extend([rate(&d), mb(&d), wait(&d), rate(f), wait(f)]);
    cells.push(format!("{:.1}", per_second(errors as f64)));
    cells.push(totals.in_flight.to_string());
    cells.push(format!("{:.2}", per_second(time as f64 / 1e9)));
    cells.push(format!("{:.2}", per_second(totals.busy_ns as f64 / 1e9)));
    cells.push(format!("{seconds:.1}"));
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(requests: u64, ns: u64) -> Counted {
        let read = Operation {
            requests,
            bytes: requests * 4096,
            errors: requests / 10,
            merges: requests / 4,
            in_flight: 3,
            time_ns: requests * ns,
            latency_ns: vec![(ns + 1, requests)],
        };
        Counted {
            in_flight: 3,
            busy_ns: requests * ns,
            operations: BTreeMap::from([("read".to_owned(), read)]),
        }
    }

    fn answered(elapsed_ns: u64, counted: Counted) -> Answer {
        Answer {
            failed: 0,
            events: BTreeMap::new(),
            disks: vec![OfDisk {
                disk: "a".into(),
                elapsed_ns,
                counted,
                connections: Vec::new(),
            }],
        }
    }

    fn cell(text: &str, column: &str) -> String {
        let at = COLUMNS.iter().position(|c| *c == column).unwrap();
        let line = text.lines().nth(1).unwrap();
        line.split_whitespace().nth(at).unwrap().to_owned()
    }

    #[test]
    fn rates_are_of_the_time_between_two_answers() {
        let first = answered(10_000_000_000, counted(1000, 1_000_000));
        let second = answered(12_000_000_000, counted(3000, 1_000_000));
        let text = table(&second, Some(&first), false);
        for (column, value) in [
            ("r/s", "1000.0"),
            ("rMB/s", "4.10"),
            ("rrqm/s", "250.0"),
            ("r_await", "1.000"),
            ("rareq", "4.0"),
            ("w/s", "0.0"),
            ("err/s", "100.0"),
            ("in-flight", "3"),
            ("aqu-sz", "1.00"),
            ("qbusy", "1.00"),
            ("seconds", "2.0"),
        ] {
            assert_eq!(cell(&text, column), value, "{column} in\n{text}");
        }
        let p99: f64 = cell(&text, "r_p99").parse().unwrap();
        assert!((1.0..=1.13).contains(&p99), "{p99}");
        // A server that was started again: since its start.
        let again = answered(1_000_000_000, counted(50, 1_000_000));
        assert_eq!(cell(&table(&again, Some(&second), false), "r/s"), "50.0");
        assert_eq!(cell(&table(&first, None, false), "r/s"), "100.0");
    }

    #[test]
    fn counters_survive_their_text() {
        let answer = answered(1, counted(7, 250));
        let text = serde_json::to_string(&answer).unwrap();
        assert_eq!(serde_json::from_str::<Answer>(&text).unwrap(), answer);
        let totals = Totals::from(&answer.disks[0].counted);
        assert_eq!(totals.operations[0].latency.quantile(0.5), 256);
    }

    #[test]
    fn a_disk_and_an_interval_in_any_number() {
        let ask = |what: &[&str]| {
            let what: Vec<String> = what.iter().map(|w| (*w).to_owned()).collect();
            let (disk, interval) = disk_and_interval(&what).map_err(|e| e.to_string())?;
            Ok::<_, String>((disk.map(str::to_owned), interval.map(|t| t.as_millis())))
        };
        assert_eq!(ask(&[]), Ok((None, None)));
        assert_eq!(ask(&["vm1"]), Ok((Some("vm1".into()), None)));
        assert_eq!(ask(&["500ms"]), Ok((None, Some(500))));
        assert_eq!(ask(&["vm1", "2s"]), Ok((Some("vm1".into()), Some(2000))));
        assert!(
            ask(&["vm1", "often"])
                .unwrap_err()
                .contains("a time has a unit")
        );
        assert!(ask(&["1ms"]).unwrap_err().contains("at least 10ms"));
    }
}
