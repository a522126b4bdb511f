//! The path of a request through all layers, hop by hop: front end, ring, worker, volume, members.
//!
//! Layers are linked by remaps (A), and across a ring by their names: `X/front`, or `X/guest`, issues requests that
//! arrive at `X/back`. A request and those below it belong together if they touch the same sectors and the lower
//! one's time lies between the upper one's D and C. Of several below, the upper one waited for the last to complete.
//!
//! An array makes requests of its own for one from above, at other sectors, and some only when others are done: it reads old data and parity, then
//! writes. Their remaps say for which sector of the array they are. The path follows them backward from the last one: before it came the last of
//! those that were done when it began.

use super::{Life, Samples};
use crate::Device;
use pvblk_block::Op;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

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
}

type HopTime = (Device, Part, u64);

/// A completed request on a layer that has another one above it.
struct EndedRequest {
    /// Its own operation, if it is the upper one's, too.
    op: Option<Op>,
    sector: u64,
    end: u64,
    queue_ns: u64,
    complete_ns: u64,
    hops: Vec<HopTime>,
}

/// Most completed requests kept for one upper layer: more than can be in flight on a ring.
const MOST_KEPT: usize = 2048;

/// Combines the requests of all layers. Call [`Paths::life`] for every request, in the order of completion.
#[derive(Default)]
pub struct Paths {
    names: BTreeMap<Device, String>,
    /// Devices across rings: from `X/back` to all `X/front` and `X/guest`.
    fronts: HashMap<Device, Vec<Device>>,
    /// Devices that have another one below.
    uppers: BTreeSet<Device>,
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
            self.uppers.extend(&fronts);
            self.fronts.insert(*back, fronts);
        }
    }

    /// Adds a completed request.
    pub fn life(&mut self, life: &Life) {
        let uppers = match life.from {
            Some(from) => {
                self.uppers.insert(from);
                vec![from]
            }
            None => self.fronts.get(&life.device).cloned().unwrap_or_default(),
        };
        let has_below = self.uppers.contains(&life.device);
        let ended = self.ended.get(&life.device);
        let below = ended.map_or_else(Vec::new, |e| below(e, life));
        let followed = !below.is_empty();
        let hops = hops(life, &below);
        if uppers.is_empty() {
            if has_below {
                self.add(life, hops, followed);
            }
            return;
        }
        for upper in uppers {
            let kept = self.ended.entry(upper).or_default();
            if kept.len() == MOST_KEPT {
                kept.pop_front();
            }
            // Made by an array: for one sector of the request above.
            let made = life.from_sector.filter(|sector| *sector != life.sector);
            kept.push_back(EndedRequest {
                op: made.is_none().then_some(life.op),
                sector: made.unwrap_or(life.sector),
                end: made.map_or(life.sector + life.sectors, |sector| sector + 1),
                queue_ns: life.queue_ns,
                complete_ns: life.complete_ns,
                hops: hops.clone(),
            });
        }
    }

    fn add(&mut self, life: &Life, hops: Vec<HopTime>, followed: bool) {
        let path = self.paths.entry(life.device).or_default();
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
    let is_part = |e: &&EndedRequest| {
        let touches = e.sector < end && life.sector < e.end || life.sectors == 0;
        e.op.is_none_or(|op| op == life.op) && touches && e.queue_ns >= begin_ns
    };
    // The youngest are at the end.
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

fn hops(life: &Life, below: &[&EndedRequest]) -> Vec<HopTime> {
    let device = life.device;
    let issue_ns = life.issue_ns.unwrap_or(life.queue_ns);
    let passed = below.iter().map(|b| b.hops.len() + 1).sum::<usize>();
    let mut hops = Vec::with_capacity(passed + 2);
    hops.push((device, Part::Wait, issue_ns.saturating_sub(life.queue_ns)));
    let mut before_ns = issue_ns;
    let mut last = None;
    for b in below {
        let lower = b.hops.first().map_or(device, |h| h.0);
        hops.push((device, Part::Down(lower), b.queue_ns - before_ns));
        hops.extend_from_slice(&b.hops);
        before_ns = b.complete_ns;
        last = Some(lower);
    }
    let rest_ns = life.complete_ns.saturating_sub(before_ns);
    let rest = last.map_or(Part::Work, Part::Up);
    hops.push((device, rest, rest_ns));
    hops
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(minor: u32, from: Option<u32>, times: [u64; 3]) -> Life {
        let [queue_ns, issue_ns, complete_ns] = times;
        let device = |minor| Device::new(Device::MAJOR, minor);
        Life {
            device: device(minor),
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
