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

use super::tally::{Sums, Tally};
use super::{Life, Part, Samples};
use crate::{Action, Device, Event, Extra};
use pvblk_block::Op;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

/// One hop of a path, over all requests.
#[derive(Clone, Debug)]
pub struct PathHop<T = Samples> {
    pub device: Device,
    pub part: Part,
    /// Times of the requests that passed it.
    pub times: T,
}

/// Times of a device's requests, hop by hop through all layers below it.
#[derive(Clone, Debug, Default)]
pub struct Path<T = Samples> {
    /// Hops in the order in which a request passes them.
    pub hops: Vec<PathHop<T>>,
    /// Time from Q to C on the uppermost device, of the requests that were followed.
    pub total: T,
    /// Requests without any events below. In [`Paths::live`] they are in `total` and `hops`, too.
    pub alone: u64,
    /// Requests below which events may have been lost.
    pub unknown: u64,
    /// The slowest requests, in [`Paths::live`] only; the slowest is the first.
    pub slowest: Vec<FollowedRequest>,
}

/// A hop of one request: the device, the part of the path, and its length in nanoseconds.
pub type HopTime = (Device, Part, u64);

/// One request with its hops through all layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FollowedRequest {
    pub op: Op,
    /// First sector (512 B).
    pub sector: u64,
    /// Length in sectors.
    pub sectors: u64,
    /// Time of Q on the uppermost device, in nanoseconds of the events' clock.
    pub begin_ns: u64,
    /// Time from Q to C.
    pub total_ns: u64,
    /// One after the other: together they take the whole time.
    pub hops: Vec<HopTime>,
}

/// A completed request and what was found below it.
#[derive(Clone, Debug, Default)]
pub struct Followed {
    /// A number of its own among all requests of all layers.
    pub number: u64,
    /// Numbers of the requests below that it waited for.
    pub below: Vec<u64>,
    /// Of a request on an uppermost layer: its time from Q to C through all layers, hop by hop without a pause, in nanoseconds. `None` if
    /// nothing was found below, or events may be lost.
    pub way: Option<Vec<HopTime>>,
}

/// A completed request on a layer that has another one above it.
struct EndedRequest {
    /// See [`Followed::number`].
    number: u64,
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

/// Most completed requests kept for all layers together: some 20 MiB.
const MOST_KEPT_IN_ALL: usize = 1 << 16;

/// Combines the requests of all layers. Call [`Paths::life`] for every request, in the order of completion.
pub struct Paths<T = Samples> {
    names: HashMap<Device, String>,
    by_name: HashMap<String, Vec<Device>>,
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
    /// Number of all in `ended`.
    kept: usize,
    paths: BTreeMap<Device, Path<T>>,
    /// Most requests in [`Path::slowest`].
    most_slowest: usize,
    /// Requests without events below are followed as far as they are known.
    takes_alone: bool,
    /// Number of the last request.
    last: u64,
}

impl Default for Paths {
    fn default() -> Paths {
        Paths::make(0, false)
    }
}

impl Paths<Sums> {
    /// In bounded memory, with the `most_slowest` slowest requests of each uppermost device. Requests without any events below are in the figures,
    /// too: their hops end where their events do.
    pub fn live(most_slowest: usize) -> Paths<Sums> {
        Paths::make(most_slowest, true)
    }
}

impl<T: Tally> Paths<T> {
    fn make(most_slowest: usize, takes_alone: bool) -> Paths<T> {
        Paths {
            names: HashMap::new(),
            by_name: HashMap::new(),
            fronts: HashMap::new(),
            uppers: BTreeMap::new(),
            gaps: HashMap::new(),
            issued: HashSet::new(),
            hands_down: HashSet::new(),
            ended: HashMap::new(),
            kept: 0,
            paths: BTreeMap::new(),
            most_slowest,
            takes_alone,
            last: 0,
        }
    }

    /// Sets a device's name.
    pub fn name(&mut self, device: Device, name: &str) {
        let before = self.names.insert(device, name.to_owned());
        if before.as_deref() == Some(name) {
            return;
        }
        if let Some(before) = before {
            if let Some(same) = self.by_name.get_mut(&before) {
                same.retain(|d| *d != device);
            }
            self.fronts.remove(&device);
            self.fronts
                .values_mut()
                .for_each(|all| all.retain(|d| *d != device));
        }
        self.by_name
            .entry(name.to_owned())
            .or_default()
            .push(device);
        let of = |scope: &str, layer: &str| -> Vec<Device> {
            let found = self.by_name.get(&format!("{scope}/{layer}"));
            found.cloned().unwrap_or_default()
        };
        let ends = match name.rsplit_once('/') {
            Some((scope, "back")) => {
                let fronts = [of(scope, "front"), of(scope, "guest")].concat();
                Some((fronts, vec![device]))
            }
            Some((scope, "front" | "guest")) => Some((vec![device], of(scope, "back"))),
            _ => None,
        };
        for (fronts, back) in ends
            .iter()
            .flat_map(|(f, backs)| backs.iter().map(move |b| (f, b)))
        {
            let known = self.fronts.entry(*back).or_default();
            known.extend(fronts);
            known.sort_unstable();
            known.dedup();
            for front in fronts {
                self.uppers.entry(*front).or_default().insert(*back);
            }
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
        self.add_gap(event.device, event.time_ns, until_ns);
    }

    fn add_gap(&mut self, device: Device, from_ns: u64, until_ns: u64) {
        let gap = self.gaps.entry(device).or_default();
        // Gaps come in order of time. One that follows at once is the same gap.
        if from_ns > gap.1 {
            gap.0 = from_ns;
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
        self.follow(life);
    }

    /// Adds a completed request, and tells what was found below it.
    pub fn follow(&mut self, life: &Life) -> Followed {
        self.last += 1;
        let number = self.last;
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
        let numbers: Vec<u64> = below.iter().map(|b| b.number).collect();
        let hops = hops(life, &below).filter(|_| !gap);
        // Handed down as it is: of no other request.
        let used = below
            .first()
            .and_then(|b| b.id)
            .filter(|_| life.id.is_some());
        if let Some(used) = used {
            self.use_up(life.device, used);
        }
        if uppers.is_empty() {
            if has_below || self.takes_alone {
                self.add(life, hops.as_deref(), !numbers.is_empty());
            }
            return Followed {
                number,
                way: hops.filter(|_| has_below && !numbers.is_empty()),
                below: numbers,
            };
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
            if self.kept == MOST_KEPT_IN_ALL {
                self.forget(life.complete_ns);
            }
            let kept = self.ended.entry(upper).or_default();
            self.kept += 1;
            if kept.len() == MOST_KEPT {
                kept.pop_front();
                self.kept -= 1;
            }
            // Made by an array: for one sector of the request above.
            let made = life.from_sector.filter(|sector| *sector != life.sector);
            kept.push_back(EndedRequest {
                number,
                id,
                op: made.is_none().then_some(life.op),
                sector: made.unwrap_or(life.sector),
                end: made.map_or(life.sector + life.sectors, |sector| sector + 1),
                queue_ns: life.queue_ns,
                complete_ns: life.complete_ns,
                hops: hops.clone(),
            });
        }
        Followed {
            number,
            below: numbers,
            way: None,
        }
    }

    fn use_up(&mut self, upper: Device, id: u64) {
        let Some(ended) = self.ended.get_mut(&upper) else {
            return;
        };
        if let Some(at) = ended.iter().rposition(|e| e.id == Some(id)) {
            ended.remove(at);
            self.kept -= 1;
        }
    }

    /// Too many were kept. Those in flight above them can't be followed any more.
    fn forget(&mut self, now_ns: u64) {
        self.ended.clear();
        self.kept = 0;
        self.add_gap(Device::ALL, now_ns, now_ns);
    }

    fn add(&mut self, life: &Life, hops: Option<&[HopTime]>, followed: bool) {
        let path = self.paths.entry(life.device).or_default();
        let Some(hops) = hops else {
            path.unknown += 1;
            return;
        };
        if !followed {
            path.alone += 1;
            if !self.takes_alone {
                return;
            }
        }
        path.total.record(life.total_ns());
        path.keep_slowest(life, hops, self.most_slowest);
        let mut place = 0;
        for &(device, part, ns) in hops {
            let same = |h: &PathHop<T>| h.device == device && h.part == part;
            let at = path.hops.iter().position(same).unwrap_or_else(|| {
                let times = T::default();
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

    /// A hop's name in tables, such as `vm1/front: down to ring`.
    pub fn hop_name(&self, device: Device, part: Part) -> String {
        let name = |device: Device| {
            let name = self.names.get(&device);
            name.map_or_else(|| device.to_string(), Clone::clone)
        };
        part.name(&name(device), name)
    }

    /// Takes the paths since the last call, by uppermost device.
    pub fn take(&mut self) -> BTreeMap<Device, Path<T>> {
        std::mem::take(&mut self.paths)
    }

    /// The device's name, if it is known.
    pub fn name_of(&self, device: Device) -> Option<&str> {
        self.names.get(&device).map(String::as_str)
    }
}

impl<T> Path<T> {
    fn keep_slowest(&mut self, life: &Life, hops: &[HopTime], most: usize) {
        let total_ns = life.total_ns();
        let is_slow = |of: &FollowedRequest| total_ns > of.total_ns;
        if most == 0 || self.slowest.len() == most && !self.slowest.last().is_some_and(is_slow) {
            return;
        }
        self.slowest.truncate(most - 1);
        let at = self.slowest.partition_point(|s| s.total_ns >= total_ns);
        let request = FollowedRequest {
            op: life.op,
            sector: life.sector,
            sectors: life.sectors,
            begin_ns: life.queue_ns,
            total_ns,
            hops: hops.to_vec(),
        };
        self.slowest.insert(at, request);
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
    let Some(issue_ns) = life.issue_ns else {
        return Some(vec![(device, Part::Answer, life.total_ns())]);
    };
    let mut hops = Vec::new();
    // Where requests are inserted or merged, the tag isn't what they wait for.
    let alone = life.insert_ns.is_none() && life.merge_ns.is_none();
    let got_ns = life.get_ns.filter(|ns| alone && *ns <= issue_ns);
    if let Some(ns) = got_ns {
        hops.push((device, Part::Get, ns.saturating_sub(life.queue_ns)));
    }
    let from_ns = got_ns.unwrap_or(life.queue_ns).max(life.queue_ns);
    hops.push((device, Part::Wait, issue_ns.saturating_sub(from_ns)));
    let mut before_ns = issue_ns.max(life.queue_ns);
    let mut last = None;
    for b in below {
        let of = b.hops.as_deref()?;
        let lower = of.first().map_or(device, |h| h.0);
        hops.push((
            device,
            Part::Down(lower),
            b.queue_ns.saturating_sub(before_ns),
        ));
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

    #[test]
    fn requests_that_nobody_waits_for_do_not_add_up() {
        let mut paths = Paths::live(10);
        // A resync reads members of many arrays, for no request above.
        for n in 0..2 * MOST_KEPT_IN_ALL as u64 {
            let upper = 1000 + (n % 100) as u32;
            paths.life(&life(1, Some(upper), [n, n, n]));
            assert!(paths.kept <= MOST_KEPT_IN_ALL);
        }
        let kept: usize = paths.ended.values().map(VecDeque::len).sum();
        assert_eq!(kept, paths.kept);
        // A request that was in flight when they were forgotten isn't followed: those below it may have been among them.
        let ns = 2 * MOST_KEPT_IN_ALL as u64;
        paths.life(&life(1000, None, [10, 20, ns]));
        let path = &paths.take()[&Device::new(Device::MAJOR, 1000)];
        assert_eq!((path.unknown, path.total.count()), (1, 0));
        // A later one is.
        paths.life(&life(1000, None, [ns + 1, ns + 2, ns + 3]));
        let path = &paths.take()[&Device::new(Device::MAJOR, 1000)];
        assert_eq!((path.unknown, path.total.count()), (0, 1));
    }

    #[test]
    fn a_request_that_was_handed_down_is_kept_until_the_one_above_ends() {
        let mut paths = Paths::live(10);
        for n in 0..10_000 {
            let issue = Event {
                action: Action::Issue,
                device: Device::new(Device::MAJOR, 1),
                extra: Extra::Request(n % 3),
                ..crate::event::tests::event()
            };
            paths.event(&issue);
            let id = Some(n % 3);
            let at = |times: [u64; 3]| times.map(|t| n * 100 + t);
            let lower = Life {
                id,
                ..life(2, Some(1), at([3, 4, 9]))
            };
            paths.life(&lower);
            assert_eq!(paths.kept, 1);
            let upper = Life {
                id,
                ..life(1, None, at([1, 2, 10]))
            };
            paths.life(&upper);
            assert_eq!(paths.kept, 0);
        }
        let path = &paths.take()[&Device::new(Device::MAJOR, 1)];
        assert_eq!((path.total.count(), path.alone), (10_000, 0));
        assert_eq!(path.slowest.len(), 10);
    }
}
