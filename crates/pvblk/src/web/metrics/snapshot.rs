//! [`Snapshot`]: the figures of one moment, from this process or over a control socket.

use super::buckets::{COUNTS, place};
use crate::control::{ASK_PATIENCE, Client, Reached};
use crate::disks::{DiskPage, DiskShown};
use crate::memory::Report;
use crate::stat::{self, Counted};
use anyhow::Result;
use pvblk_backend::{OPERATIONS, Totals};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

/// Most pages of disks that are asked for: more than there can be disks.
const MOST_PAGES: usize = 70;

/// The figures of one moment.
#[derive(Default)]
pub struct Snapshot {
    pub version: String,
    /// Of the process that serves, if it is this one.
    pub process: Option<Process>,
    pub disks: Vec<DiskFigures>,
    /// Numbers of events by kind.
    pub events: BTreeMap<String, u64>,
    pub memory: Option<Report>,
}

pub struct Process {
    pub cpu_ns: u64,
    pub start: SystemTime,
}

/// Figures of a disk.
#[derive(Clone, Debug, Default)]
pub struct DiskFigures {
    pub name: String,
    pub state: String,
    pub health: String,
    /// The volume as it was given.
    pub volume: String,
    pub size_bytes: u64,
    pub limit: Option<String>,
    pub connections: u64,
    /// Of a disk that is open.
    pub counts: Option<Counts>,
}

/// Counters of a disk.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    pub in_flight: u64,
    pub busy_ns: u64,
    /// In the order of [`OPERATIONS`].
    pub operations: [Operation; OPERATIONS.len()],
}

#[derive(Clone, Debug, Default)]
pub struct Operation {
    pub requests: u64,
    pub bytes: u64,
    pub errors: u64,
    pub merges: u64,
    pub time_ns: u64,
    pub latency: [u64; COUNTS],
}

impl Counts {
    pub fn requests(&self) -> u64 {
        self.operations.iter().map(|o| o.requests).sum()
    }
}

fn latency(pairs: impl Iterator<Item = (u64, u64)>) -> [u64; COUNTS] {
    let mut counts = [0; COUNTS];
    for (end, count) in pairs {
        counts[place(end)] += count;
    }
    counts
}

impl From<&Totals> for Counts {
    fn from(totals: &Totals) -> Counts {
        Counts {
            in_flight: u64::from(totals.in_flight),
            busy_ns: totals.busy_ns,
            operations: totals.operations.each_ref().map(|o| Operation {
                requests: o.requests,
                bytes: o.bytes,
                errors: o.errors,
                merges: o.merges,
                time_ns: o.time_ns,
                latency: latency(o.latency.buckets()),
            }),
        }
    }
}

impl From<&Counted> for Counts {
    fn from(counted: &Counted) -> Counts {
        Counts {
            in_flight: u64::from(counted.in_flight),
            busy_ns: counted.busy_ns,
            operations: OPERATIONS.map(|op| {
                let used = counted.operations.get(stat::name(op));
                used.map_or_else(Operation::default, |o| Operation {
                    requests: o.requests,
                    bytes: o.bytes,
                    errors: o.errors,
                    merges: o.merges,
                    time_ns: o.time_ns,
                    latency: latency(o.latency_ns.iter().copied()),
                })
            }),
        }
    }
}

/// A moment close to the start of the process: it is asked for when a server for metrics starts.
static START: LazyLock<SystemTime> = LazyLock::new(SystemTime::now);

/// Notes the start of the process.
pub fn begin() {
    LazyLock::force(&START);
}

impl Snapshot {
    /// Of this process.
    pub fn inside(reached: &Reached) -> Snapshot {
        let service = &reached.service;
        let mut disks = match &reached.registry {
            Some(registry) => registry.glances(),
            None => Vec::new(),
        };
        for (figures, disk) in &mut disks {
            if let Some(disk) = disk {
                figures.counts = Some(disk.counters().read_totals(|totals| Counts::from(totals)));
            }
        }
        let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Snapshot {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            process: Some(Process {
                cpu_ns: Duration::new(used.tv_sec as u64, used.tv_nsec as u32).as_nanos() as u64,
                start: *START,
            }),
            disks: disks.into_iter().map(|(figures, _)| figures).collect(),
            events: stat::event_counts(service.events()),
            memory: Some(reached.memory.report()),
        }
    }

    /// Of the server at this control socket.
    pub fn behind(control: &Path) -> Result<Snapshot> {
        let mut client = Client::connect(control, ASK_PATIENCE)?;
        let version: Value = client.call("pvblk.version", json!({}))?;
        let stat: stat::Answer = client.call("stat", json!({}))?;
        let memory = client.call("memory.ask", json!({"question": {"memory": "report"}}))?;
        let counted: HashMap<&str, &Counted> = stat.counted().collect();
        let (mut disks, mut after) = (Vec::new(), Value::Null);
        for _ in 0..MOST_PAGES {
            let page: DiskPage = client.call("disk.list", json!({ "after": after }))?;
            disks.extend(
                page.disks
                    .iter()
                    .map(|d| figures(d, counted.get(d.name.as_str()).copied())),
            );
            match page.next {
                Some(next) => after = next.into(),
                None => break,
            }
        }
        Ok(Snapshot {
            version: version["version"].as_str().unwrap_or_default().to_owned(),
            process: None,
            disks,
            events: stat.events,
            memory: Some(memory),
        })
    }
}

fn figures(disk: &DiskShown, counted: Option<&Counted>) -> DiskFigures {
    // Disks that leave may have the name of one that is there; their counters are nobody's.
    let counts = counted
        .filter(|_| disk.state != "removing")
        .map(Counts::from);
    DiskFigures {
        name: disk.name.clone(),
        state: disk.state.clone(),
        health: disk.health.clone(),
        volume: disk.volume.clone(),
        size_bytes: disk.size_bytes,
        limit: disk.limit.clone(),
        connections: disk.users.iter().map(|u| u.count as u64).sum(),
        counts,
    }
}
