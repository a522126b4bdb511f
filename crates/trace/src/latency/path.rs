//! The path of a request through all layers, hop by hop: front end, ring, worker, volume, members.
//!
//! Layers are linked by remaps (A), and across a ring by their names: `X/front`, or `X/guest`, issues requests that
//! arrive at `X/back`. A request that a layer hands down as it is has the same identity there. Others belong to a request if they touch
//! the same sectors and their time lies between the upper one's D and C. Of several below, the upper one waited for the last to complete.
//!
//! An array makes requests of its own for one from above, at other sectors, and some only when others are done: it reads old data and parity, then
//! writes. Their remaps say for which sector of the array they are. The path follows them backward from the last one: before it came the last of
//! those that were done when it began.
//!
//! Where events below may have been lost, all that can't be known: such requests are counted, and are in no hop.

use super::{Life, Samples};
use crate::{Action, Device, Event, Extra};
use pvblk_block::Op;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

/// A part of a request's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// On this device, from Q until the issue.
    Wait,
    /// From this device's D to the Q of the given device below it.
    Down(Device),
    /// From this device's D to its C, with no device below.
    Work,
    /// From the C of the given device below to this one's C.
    Up(Device),
}

/// One hop of a path, over all requests.
#[derive(Clone, Debug)]
pub struct PathHop {
    pub device: Device,
    pub part: Part,
    /// Times of the requests that passed it.
    pub times: Samples,
}

/// Times of a device's requests, hop by hop through all layers below it.
#[derive(Clone, Debug, Default)]
pub struct Path {
    /// Hops in the order in which a request passes them.
    pub hops: Vec<PathHop>,
    /// Time from Q to C on the uppermost device, of the requests that were followed.
    pub total: Samples,
    /// Requests without any events below.
    pub alone: u64,
    /// Requests below which events may have been lost.
    pub unknown: u64,
}

type HopTime = (Device, Part, u64);

/// A completed request on a layer that has another one above it.
struct EndedRequest {
    /// The identity, if it is that of a request that the layer above issued.
    id: Option<u64>,
    /// Its own operation, if it is the upper one's, too.
    op: Option<Op>,
    sector: u64,
    end: u64,
    queue_ns: u64,
    complete_ns: u64,
    /// `None`: events below may have been lost.
    hops: Option<Vec<HopTime>>,
}

/// Longest time between a request's D on one layer and its Q on the layer below that is on the same machine, in nanoseconds.
const LONGEST_DOWN_NS: u64 = 1_000_000_000;

/// Most completed requests kept for one upper layer: more than can be in flight on a ring.
const MOST_KEPT: usize = 2048;

/// Combines the requests of all layers. Call [`Paths::life`] for every request, in the order of completion.
#[derive(Default)]
pub struct Paths {
    names: BTreeMap<Device, String>,
    /// Devices across rings: from `X/back` to all `X/front` and `X/guest`.
    fronts: HashMap<Device, Vec<Device>>,
    /// Devices that have another one below, with all that were seen below.
    uppers: BTreeMap<Device, BTreeSet<Device>>,
    /// Begin and end of the last gap of each device, in nanoseconds.
    gaps: HashMap<Device, (u64, u64)>,
    /// Requests that are issued and not completed.
    issued: HashSet<(Device, u64)>,
    /// Layers that hand requests down as they are, with the layer below.
    hands_down: HashSet<(Device, Device)>,
    ended: HashMap<Device, VecDeque<EndedRequest>>,
    paths: BTreeMap<Device, Path>,
}

impl Paths {
    /// Sets a device's name.
    pub fn name(&mut self, device: Device, name: &str) {
        self.names.insert(device, name.to_owned());
        self.fronts.clear();
        let all = &self.names;
        for (back, name) in all {
            let Some(scope) = name.strip_suffix("/back") else {
                continue;
            };
            let is_front = |name: &str| {
                let layer = name.strip_prefix(scope);
                matches!(layer, Some("/front" | "/guest"))
            };
            let fronts = all.iter().filter(|(_, n)| is_front(n));
            let fronts: Vec<Device> = fronts.map(|(d, _)| *d).collect();
            for front in &fronts {
                self.uppers.entry(*front).or_default().insert(*back);
            }
            self.fronts.insert(*back, fronts);
        }
    }

    /// Adds an event; the life that it ends, if it ends one, comes after it.
    pub fn event(&mut self, event: &Event) {
        match (event.action, event.extra) {
            (Action::Issue, Extra::Request(id)) => {
                self.issued.insert((event.device, id));
            }
            (Action::Complete, Extra::Request(id)) => {
                self.issued.remove(&(event.device, id));
            }
            (_, Extra::Gap { until_ns, .. }) => self.gap(event, until_ns),
            _ => {}
        }
    }

    fn gap(&mut self, event: &Event, until_ns: u64) {
        let all = event.device == Device::ALL;
        self.issued
            .retain(|(device, _)| !all && *device != event.device);
        let gap = self.gaps.entry(event.device).or_default();
        // Gaps come in order of time. One that follows at once is the same gap.
        if event.time_ns > gap.1 {
            gap.0 = event.time_ns;
        }
        gap.1 = gap.1.max(until_ns);
    }

    /// True if events of the device with times from `begin_ns` to `end_ns` may have been lost.
    fn has_gap(&self, device: Device, begin_ns: u64, end_ns: u64) -> bool {
        let of = |device| {
            let gap = self.gaps.get(&device);
            gap.is_some_and(|(from_ns, until_ns)| *from_ns <= end_ns && *until_ns >= begin_ns)
        };
        of(device) || of(Device::ALL)
    }

    /// Adds a completed request.
    pub fn life(&mut self, life: &Life) {
        let uppers = match life.from {
            Some(from) => {
                self.uppers.entry(from).or_default().insert(life.device);
                vec![from]
            }
            None => self.fronts.get(&life.device).cloned().unwrap_or_default(),
        };
        let lowers = self.uppers.get(&life.device);
        let has_below = lowers.is_some();
        let (begin_ns, end_ns) = (life.queue_ns, life.complete_ns);
        let mut lowers = lowers.into_iter().flatten();
        let gap = lowers.any(|lower| self.has_gap(*lower, begin_ns, end_ns));
        let ended = self.ended.get(&life.device);
        let below = ended.map_or_else(Vec::new, |e| below(e, life));
        let followed = !below.is_empty();
        let hops = hops(life, &below).filter(|_| !gap);
        if uppers.is_empty() {
            if has_below {
                self.add(life, hops, followed);
            }
            return;
        }
        for upper in uppers {
            let id = life.id.filter(|id| self.issued.contains(&(upper, *id)));
            let link = (upper, life.device);
            if id.is_some() {
                self.hands_down.insert(link);
            } else if self.hands_down.contains(&link) {
                let since_ns = life.queue_ns.saturating_sub(LONGEST_DOWN_NS);
                // Its issue above may be among what was lost: it could be taken for another request's.
                if self.has_gap(upper, since_ns, life.complete_ns) {
                    continue;
                }
            }
            let kept = self.ended.entry(upper).or_default();
            if kept.len() == MOST_KEPT {
                kept.pop_front();
            }
            // Made by an array: for one sector of the request above.
            let made = life.from_sector.filter(|sector| *sector != life.sector);
            kept.push_back(EndedRequest {
                id,
                op: made.is_none().then_some(life.op),
                sector: made.unwrap_or(life.sector),
                end: made.map_or(life.sector + life.sectors, |sector| sector + 1),
                queue_ns: life.queue_ns,
                complete_ns: life.complete_ns,
                hops: hops.clone(),
            });
        }
    }

    fn add(&mut self, life: &Life, hops: Option<Vec<HopTime>>, followed: bool) {
        let path = self.paths.entry(life.device).or_default();
        let Some(hops) = hops else {
            path.unknown += 1;
            return;
        };
        if !followed {
            path.alone += 1;
            return;
        }
        path.total.record(life.total_ns());
        let mut place = 0;
        for (device, part, ns) in hops {
            let same = |h: &PathHop| h.device == device && h.part == part;
            let at = path.hops.iter().position(same).unwrap_or_else(|| {
                let times = Samples::default();
                let hop = PathHop {
                    device,
                    part,
                    times,
                };
                path.hops.insert(place, hop);
                place
            });
            path.hops[at].times.record(ns);
            place = at + 1;
        }
    }

    /// Takes the paths since the last call, by uppermost device.
    pub fn take(&mut self) -> BTreeMap<Device, Path> {
        std::mem::take(&mut self.paths)
    }
}

/// The requests below for which `life` waited, one after the other.
fn below<'a>(ended: &'a VecDeque<EndedRequest>, life: &Life) -> Vec<&'a EndedRequest> {
    let Some(begin_ns) = life.issue_ns else {
        return Vec::new();
    };
    let end = life.sector + life.sectors;
    let during = |e: &&EndedRequest| e.queue_ns >= begin_ns && e.complete_ns <= life.complete_ns;
    let same = |e: &&EndedRequest| e.id.is_some() && e.id == life.id;
    let is_part = |e: &&EndedRequest| {
        let touches = e.sector < end && life.sector < e.end || life.sectors == 0;
        e.id.is_none() && e.op.is_none_or(|op| op == life.op) && touches && e.queue_ns >= begin_ns
    };
    // The youngest are at the end.
    let handed_down = ended.iter().rev().filter(during).find(same);
    if let Some(same) = handed_down {
        return vec![same];
    }
    let mut younger = ended.iter().rev().filter(is_part);
    let mut chain: Vec<&EndedRequest> = Vec::new();
    let mut until_ns = life.complete_ns;
    while let Some(next) = younger.find(|e| e.complete_ns <= until_ns) {
        until_ns = next.queue_ns;
        chain.push(next);
        if next.op.is_some() {
            break;
        }
    }
    chain.reverse();
    chain
}

/// The hops of `life`; `None` if those of a request below aren't known.
fn hops(life: &Life, below: &[&EndedRequest]) -> Option<Vec<HopTime>> {
    let device = life.device;
    let issue_ns = life.issue_ns.unwrap_or(life.queue_ns);
    let mut hops = Vec::new();
    hops.push((device, Part::Wait, issue_ns.saturating_sub(life.queue_ns)));
    let mut before_ns = issue_ns;
    let mut last = None;
    for b in below {
        let of = b.hops.as_deref()?;
        let lower = of.first().map_or(device, |h| h.0);
        hops.push((device, Part::Down(lower), b.queue_ns - before_ns));
        hops.extend_from_slice(of);
        before_ns = b.complete_ns;
        last = Some(lower);
    }
    let rest_ns = life.complete_ns.saturating_sub(before_ns);
    let rest = last.map_or(Part::Work, Part::Up);
    hops.push((device, rest, rest_ns));
    Some(hops)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(minor: u32, from: Option<u32>, times: [u64; 3]) -> Life {
        let [queue_ns, issue_ns, complete_ns] = times;
        let device = |minor| Device::new(Device::MAJOR, minor);
        Life {
            device: device(minor),
            id: None,
            submitter: 0,
            op: Op::Write,
            sector: 64,
            sectors: 8,
            error: 0,
            remap_ns: None,
            from: from.map(device),
            from_sector: None,
            queue_ns,
            get_ns: None,
            merge_ns: None,
            insert_ns: None,
            issue_ns: Some(issue_ns),
            complete_ns,
        }
    }

    #[test]
    fn layers_are_linked_by_remaps_and_by_names() {
        let mut paths = Paths::default();
        for (minor, name) in [
            (0, "vm/front"),
            (1, "vm/back"),
            (2, "vm/raid5"),
            (5, "x/back"),
        ] {
            paths.name(Device::new(Device::MAJOR, minor), name);
        }
        for begin in [0, 1000] {
            let at = |times: [u64; 3]| times.map(|t| begin + t);
            // Two members: the second one completes last. A request at the same place that completed before is
            // another one.
            paths.life(&life(2, Some(1), at([1, 2, 3])));
            paths.life(&life(3, Some(2), at([140, 150, 300])));
            paths.life(&life(4, Some(2), at([145, 150, 350])));
            paths.life(&life(2, Some(1), at([115, 135, 360])));
            paths.life(&life(1, None, at([100, 110, 362])));
            paths.life(&life(0, None, at([0, 30, 400])));
        }
        let found = paths.take();
        let [(top, path)] = &found.iter().collect::<Vec<_>>()[..] else {
            panic!("{found:?}");
        };
        assert_eq!((top.minor(), path.total.values()), (0, &[400, 400][..]));
        let device = |minor| Device::new(Device::MAJOR, minor);
        let hops: Vec<_> = path
            .hops
            .iter()
            .map(|h| (h.device.minor(), h.part, h.times.values()[1]))
            .collect();
        let expected = [
            (0, Part::Wait, 30),
            (0, Part::Down(device(1)), 70),
            (1, Part::Wait, 10),
            (1, Part::Down(device(2)), 5),
            (2, Part::Wait, 20),
            (2, Part::Down(device(4)), 10),
            (4, Part::Wait, 5),
            (4, Part::Work, 200),
            (2, Part::Up(device(4)), 10),
            (1, Part::Up(device(2)), 2),
            (0, Part::Up(device(1)), 38),
        ];
        assert_eq!(hops, expected);
        assert_eq!(expected.iter().map(|h| h.2).sum::<u64>(), 400);
    }

    #[test]
    fn an_array_waits_for_one_member_after_the_other() {
        let mut paths = Paths::default();
        for (minor, name) in [(1, "vm/raid5"), (2, "vm/[a]"), (3, "vm/[b]")] {
            paths.name(Device::new(Device::MAJOR, minor), name);
        }
        let member = |minor, op, times, from_sector| Life {
            op,
            sector: 2048 + minor as u64,
            from_sector: Some(from_sector),
            ..life(minor, Some(1), times)
        };
        // Of another request, which is at work at the same time.
        paths.life(&member(3, Op::Read, [101, 102, 110], 500));
        // Old data and old parity, then the new ones.
        paths.life(&member(2, Op::Read, [111, 112, 120], 66));
        paths.life(&member(3, Op::Read, [112, 113, 160], 66));
        paths.life(&member(3, Op::Write, [170, 171, 175], 66));
        paths.life(&member(2, Op::Write, [171, 172, 190], 66));
        paths.life(&life(1, None, [100, 110, 200]));
        let found = paths.take();
        let device = |minor| Device::new(Device::MAJOR, minor);
        let path = &found[&device(1)];
        let hops: Vec<_> = path
            .hops
            .iter()
            .map(|h| (h.device.minor(), h.part, h.times.values()[0]))
            .collect();
        let expected = [
            (1, Part::Wait, 10),
            (1, Part::Down(device(3)), 2),
            (3, Part::Wait, 1),
            (3, Part::Work, 47),
            (1, Part::Down(device(2)), 11),
            (2, Part::Wait, 1),
            (2, Part::Work, 18),
            (1, Part::Up(device(2)), 10),
        ];
        assert_eq!(hops, expected);
        assert_eq!(path.total.values(), [100]);
    }

    #[test]
    fn requests_without_anything_below_are_counted() {
        let mut paths = Paths::default();
        paths.name(Device::new(Device::MAJOR, 0), "vm/front");
        paths.name(Device::new(Device::MAJOR, 1), "vm/back");
        paths.life(&life(1, None, [5, 6, 7]));
        paths.life(&life(0, None, [10, 20, 30]));
        let found = paths.take();
        let path = &found[&Device::new(Device::MAJOR, 0)];
        assert_eq!((path.alone, path.total.count()), (1, 0));
    }
}
