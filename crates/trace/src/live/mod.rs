//! Hops of a running process, second by second, in bounded memory: `hops` of the control protocol.

mod label;
mod report;

pub use label::label;
pub use report::{DiskHops, HopOfRequest, HopTimes, HopsReport, SlowRequest};

use crate::latency::{Analyzer, FollowedRequest, Hop, HopTime, Part, Path, Paths, Sums};
use crate::{Device, Event, op_name};
use pvblk_block::SECTOR;
use std::collections::{BTreeMap, HashMap};

/// Most disks of one report: those with most requests.
pub const MOST_DISKS: usize = 1000;
/// Most requests in [`DiskHops::slowest`].
pub const MOST_SLOWEST: usize = 10;

/// Names of all devices that there are.
pub type Names = Box<dyn Fn() -> Vec<(Device, String)> + Send>;

/// Follows requests by their events, and tells the sums since the last time.
pub struct Live {
    names: Names,
    /// Only of this disk.
    disk: Option<String>,
    /// Devices that were seen, and whether they are wanted.
    seen: HashMap<Device, bool>,
    analyzer: Analyzer,
    paths: Paths<Sums>,
    lost: u64,
    begin_ns: u64,
}

impl Live {
    /// Follows requests to `disk`, or to all disks. `now_ns` is the present time of the events' clock.
    pub fn new(names: Names, disk: Option<String>, now_ns: u64) -> Live {
        Live {
            names,
            disk,
            seen: HashMap::new(),
            analyzer: Analyzer::without_samples(),
            paths: Paths::live(MOST_SLOWEST),
            lost: 0,
            begin_ns: now_ns,
        }
    }

    /// Adds events, in order of time.
    pub fn events(&mut self, events: &[Event]) {
        for event in events {
            self.lost += event.lost();
            if event.device != Device::ALL && !self.is_wanted(event.device) {
                continue;
            }
            self.paths.event(event);
            let paths = &mut self.paths;
            self.analyzer.event(event, &mut |life| paths.life(life));
        }
    }

    fn is_wanted(&mut self, device: Device) -> bool {
        if let Some(wanted) = self.seen.get(&device) {
            return *wanted;
        }
        for (device, name) in (self.names)() {
            if self.seen.contains_key(&device) {
                continue;
            }
            let wanted = self
                .disk
                .as_deref()
                .is_none_or(|disk| disk == disk_of(&name));
            self.seen.insert(device, wanted);
            if wanted {
                self.paths.name(device, &name);
            }
        }
        *self.seen.entry(device).or_insert(self.disk.is_none())
    }

    /// The figures since the last call. Requests in flight are in those of the time in which they complete. `every`: one request of so many has events.
    pub fn take(&mut self, now_ns: u64, every: u64) -> HopsReport {
        let counts = self.analyzer.take();
        let unknown: u64 = counts.devices.values().map(|d| d.unknown).sum();
        let mut disks = BTreeMap::<String, DiskHops>::new();
        let mut above = 0;
        for (device, path) in self.paths.take() {
            above += path.unknown;
            let name = self.name(device);
            let of = disks.entry(disk_of(&name).to_owned()).or_default();
            self.add(of, &path, every);
        }
        let mut disks: Vec<DiskHops> = disks
            .into_iter()
            .map(|(disk, of)| DiskHops { disk, ..of })
            .filter(|of| of.requests > 0)
            .collect();
        let hidden = disks.len().saturating_sub(MOST_DISKS) as u64;
        if hidden > 0 {
            disks.sort_by_key(|of| std::cmp::Reverse(of.requests));
            disks.truncate(MOST_DISKS);
            disks.sort_by(|a, b| a.disk.cmp(&b.disk));
        }
        let begin_ns = std::mem::replace(&mut self.begin_ns, now_ns);
        HopsReport {
            at_ns: now_ns,
            elapsed_ns: now_ns.saturating_sub(begin_ns),
            every,
            lost: std::mem::take(&mut self.lost),
            unknown: unknown + above,
            hidden,
            disks,
        }
    }

    fn name(&self, device: Device) -> String {
        let name = self.paths.name_of(device);
        name.map_or_else(|| device.to_string(), str::to_owned)
    }

    /// Adds a path that begins at one of the disk's uppermost layers: it can have several, one for each kind of client.
    fn add(&self, of: &mut DiskHops, path: &Path<Sums>, every: u64) {
        of.requests += path.total.count() * every;
        let parts = path.hops.iter().map(|h| (h.device, h.part));
        let hops = self.describe(parts);
        for (hop, (layer, label, depth)) in path.hops.iter().zip(hops) {
            let has_get =
                |h: &&crate::latency::PathHop<Sums>| h.device == hop.device && h.part == Part::Get;
            of.hops.push(HopTimes {
                name: letters(hop.part, path.hops.iter().any(|h| has_get(&h))).to_owned(),
                member: member(&layer).map(str::to_owned),
                layer,
                label,
                depth,
                count: hop.times.count(),
                sum_ns: hop.times.sum_ns(),
                latency_ns: hop.times.buckets().collect(),
            });
        }
        of.slowest.extend(path.slowest.iter().map(|r| self.slow(r)));
        of.slowest.sort_by_key(|r| std::cmp::Reverse(r.total_ns));
        of.slowest.truncate(MOST_SLOWEST);
    }

    fn slow(&self, request: &FollowedRequest) -> SlowRequest {
        let parts = request
            .hops
            .iter()
            .map(|(device, part, _)| (*device, *part));
        let mut begin_ns = 0;
        let hops = request.hops.iter().zip(self.describe(parts));
        let hop = |((_, _, ns), (layer, label, depth)): (&HopTime, _)| {
            let begin = begin_ns;
            begin_ns += ns;
            HopOfRequest {
                layer,
                label,
                depth,
                begin_ns: begin,
                ns: *ns,
            }
        };
        SlowRequest {
            op: op_name(request.op).to_owned(),
            sector: request.sector,
            bytes: request.sectors.saturating_mul(SECTOR),
            begin_ns: request.begin_ns,
            total_ns: request.total_ns,
            hops: hops.map(hop).collect(),
        }
    }

    /// Layer, label and depth of successive hops.
    fn describe(
        &self,
        hops: impl Iterator<Item = (Device, Part)>,
    ) -> impl Iterator<Item = (String, String, u32)> {
        let mut depths: HashMap<Device, u32> = HashMap::new();
        let described: Vec<_> = hops
            .map(|(device, part)| {
                let depth = *depths.entry(device).or_insert(0);
                let other = match part {
                    Part::Down(other) | Part::Up(other) => {
                        depths.insert(other, depth + 1);
                        self.name(other)
                    }
                    _ => String::new(),
                };
                let layer = self.name(device);
                let label = label(&layer, part, &other);
                (layer, label, depth)
            })
            .collect();
        described.into_iter()
    }
}

/// The disk's name, from the name of one of its layers.
fn disk_of(layer: &str) -> &str {
    layer.split_once('/').map_or(layer, |(disk, _)| disk)
}

/// The member of an array, from the name of one of its layers: `DISK/[MEMBER]`.
fn member(layer: &str) -> Option<&str> {
    let (_, layer) = layer.split_once("/[")?;
    // A member's name may have brackets, too.
    let whole = layer.strip_suffix(']');
    whole.or_else(|| layer.split_once("]/").map(|(name, _)| name))
}

/// A hop's name by the steps at its ends. `has_get`: the wait begins with G, not with Q.
fn letters(part: Part, has_get: bool) -> &'static str {
    match part {
        Part::Get => Hop::Q2G.name(),
        Part::Wait if has_get => Hop::G2D.name(),
        Part::Wait => Hop::Q2D.name(),
        Part::Down(_) => "D2Q",
        Part::Work => Hop::D2C.name(),
        Part::Answer => Hop::Q2C.name(),
        Part::Up(_) => "C2C",
    }
}

#[cfg(test)]
mod tests;
