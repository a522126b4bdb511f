//! Results of an analysis.

use super::hop::Hop;
use super::stats::{Samples, Summary, TimesExport};
use super::submitter::Submitter;
use crate::Device;
use serde::Serialize;
use std::collections::BTreeMap;

/// The samples of all hops.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hops([Samples; Hop::ALL.len()]);

impl Hops {
    /// The samples of one hop.
    pub fn of(&self, hop: Hop) -> &Samples {
        &self.0[hop.index()]
    }

    pub(super) fn of_mut(&mut self, hop: Hop) -> &mut Samples {
        &mut self.0[hop.index()]
    }

    /// Adds the samples of `other`.
    pub fn merge(&mut self, other: &Hops) {
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            mine.merge(theirs);
        }
    }
}

/// Counts of events on one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceReport {
    /// All events of the device.
    pub events: u64,
    /// Time of the first event, in nanoseconds.
    pub begin_ns: Option<u64>,
    /// Time of the last event, in nanoseconds.
    pub end_ns: u64,
    /// Requests merged behind another one.
    pub back_merges: u64,
    /// Requests merged in front of another one.
    pub front_merges: u64,
    pub splits: u64,
    /// Issues; fewer than the requests if some were merged.
    pub issues: u64,
    /// Requests put back after their issue.
    pub requeues: u64,
    /// Completions with an error.
    pub errors: u64,
    /// Waits for a tag.
    pub sleeps: u64,
    /// Times that the queue was plugged.
    pub plugs: u64,
    /// Times that the queue was unplugged.
    pub unplugs: u64,
    /// Requests remapped from another device, by that device.
    pub remapped_from: BTreeMap<Device, u64>,
    /// Requests without a completion: in flight at the end of the capture, or the completion was lost.
    pub unfinished: u64,
    /// Events of requests that began before the capture, or whose beginning was lost.
    pub unmatched: u64,
    /// Events that were lost, as the gaps say that concern this device alone.
    pub lost: u64,
    /// Requests of which some events may have been lost: they are in no other figure.
    pub unknown: u64,
}

/// Time of one submitter by hop, in nanoseconds. If several of its requests are in flight, each moment belongs to
/// them in equal parts, so that all parts and C2A add up to the elapsed time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SubmitterReport {
    pub requests: u64,
    /// Time from the first event to the last.
    pub elapsed_ns: u64,
    /// Shares of successive hops, by name.
    pub shares_ns: BTreeMap<&'static str, f64>,
    /// Time without a request in flight: the share of C2A.
    pub idle_ns: f64,
    /// Time between steps that have no hop.
    pub other_ns: f64,
}

impl SubmitterReport {
    pub(super) fn of(s: &Submitter) -> SubmitterReport {
        let shares = Hop::ALL.into_iter().map(|h| (h, s.shares_ns[h.index()]));
        SubmitterReport {
            requests: s.requests,
            elapsed_ns: s.now_ns - s.begin_ns.unwrap_or(s.now_ns),
            shares_ns: shares
                .filter(|(_, ns)| *ns > 0.0)
                .map(|(hop, ns)| (hop.name(), ns))
                .collect(),
            idle_ns: s.idle_ns,
            other_ns: s.other_ns,
        }
    }

    /// Share of the elapsed time that the parts explain; 1 if no event is missing.
    pub fn explained(&self) -> f64 {
        let sum: f64 = self.shares_ns.values().sum::<f64>() + self.idle_ns + self.other_ns;
        if self.elapsed_ns == 0 {
            1.0
        } else {
            sum / self.elapsed_ns as f64
        }
    }
}

/// Results for a whole capture.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Counts by device.
    pub devices: BTreeMap<Device, DeviceReport>,
    /// Samples by device and operation.
    pub hops: BTreeMap<(Device, &'static str), Hops>,
    /// Submitters by device and number.
    pub submitters: BTreeMap<(Device, u32), SubmitterReport>,
    /// Names of devices, as far as known; the reader of the capture sets them.
    pub names: BTreeMap<Device, String>,
}

impl Report {
    /// A device's name, or its number if it has none.
    pub fn name(&self, device: Device) -> String {
        let name = self.names.get(&device);
        name.map_or_else(|| device.to_string(), Clone::clone)
    }

    /// Samples of all operations of a device together.
    pub fn all_of(&self, device: Device) -> Hops {
        let mut all = Hops::default();
        let of = self.hops.iter().filter(|((d, _), _)| *d == device);
        of.for_each(|(_, hops)| all.merge(hops));
        all
    }

    /// Converts to figures and histograms for a file.
    pub fn export(&self) -> Export {
        let mut devices = Vec::new();
        for (device, report) in &self.devices {
            let mut operations = BTreeMap::new();
            for ((_, op), hops) in self.hops.iter().filter(|((d, _), _)| d == device) {
                let of = |hop: Hop| {
                    let samples = hops.of(hop);
                    let figures = samples.summary()?;
                    let histogram = samples.histogram().export();
                    Some((hop.name(), HopExport { figures, histogram }))
                };
                operations.insert(*op, Hop::ALL.into_iter().filter_map(of).collect());
            }
            let submitters = self.submitters.iter().filter(|((d, _), _)| d == device);
            devices.push(DeviceExport {
                device: device.to_string(),
                name: self.names.get(device).cloned(),
                back_merges: report.back_merges,
                front_merges: report.front_merges,
                splits: report.splits,
                errors: report.errors,
                unfinished: report.unfinished,
                unmatched: report.unmatched,
                lost: report.lost,
                unknown: report.unknown,
                operations,
                submitters: submitters.map(|((_, s), r)| (*s, r.clone())).collect(),
            });
        }
        Export { devices }
    }
}

/// A report as it is written to a file.
#[derive(Clone, Debug, Serialize)]
pub struct Export {
    devices: Vec<DeviceExport>,
}

#[derive(Clone, Debug, Serialize)]
struct DeviceExport {
    device: String,
    name: Option<String>,
    back_merges: u64,
    front_merges: u64,
    splits: u64,
    errors: u64,
    unfinished: u64,
    unmatched: u64,
    lost: u64,
    unknown: u64,
    operations: BTreeMap<&'static str, BTreeMap<&'static str, HopExport>>,
    submitters: BTreeMap<u32, SubmitterReport>,
}

#[derive(Clone, Debug, Serialize)]
struct HopExport {
    #[serde(flatten)]
    figures: Summary,
    histogram: TimesExport,
}
