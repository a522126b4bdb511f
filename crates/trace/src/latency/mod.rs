//! Turns events into hops: the time that each request spent at each step, by device, operation and submitter.
//!
//! Events of our hooks are paired by the request's identity, all others as in btt: by device and range of sectors. A merged request is issued and completed as one; an
//! event that covers the sectors of several requests counts for each of them. C2A is the time from a completion to
//! the next request of the same submitter; if several requests complete before it, from the last of them.
//!
//! A gap ends every pairing across it: requests in flight at its begin, and events of its time, are counted as unknown and are in no other
//! figure.

mod deviation;
mod hop;
mod pairing;
mod part;
mod path;
mod remaps;
mod report;
mod stats;
mod submitter;
mod tally;

pub use deviation::{Column, Deviation, deviation};
pub use hop::Hop;
pub use part::Part;
pub use path::{Followed, FollowedRequest, HopTime, Path, PathHop, Paths};
pub use report::{DeviceReport, Export, Hops, Report, SubmitterReport};
pub use stats::{PERCENTILES, Samples, Summary, Times, TimesExport};
pub use tally::{Sums, Tally};

use crate::{Action, Device, Event, Extra, op_name};
use hop::{Mark, Marks};
use pairing::{InFlight, Key, Pending};
use pvblk_block::Op;
use remaps::{Remapped, Remaps};
use std::collections::{BTreeMap, HashMap};
use submitter::Submitter;

/// A completed request with its steps. Times are nanoseconds of the events' clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Life {
    pub device: Device,
    /// Its identity while it was in flight, if its events have it.
    pub id: Option<u64>,
    pub submitter: u32,
    pub op: Op,
    /// First sector (512 B).
    pub sector: u64,
    /// Length in sectors.
    pub sectors: u64,
    /// The error number; 0 for success.
    pub error: u16,
    /// Time of A, if it was remapped.
    pub remap_ns: Option<u64>,
    /// Device before the remap, if any.
    pub from: Option<Device>,
    /// Sector on that device: of the request, or of a part of it, that this one was made for.
    pub from_sector: Option<u64>,
    /// Time of Q.
    pub queue_ns: u64,
    /// Time of G.
    pub get_ns: Option<u64>,
    /// Time of M or F.
    pub merge_ns: Option<u64>,
    /// Time of I.
    pub insert_ns: Option<u64>,
    /// Time of D.
    pub issue_ns: Option<u64>,
    /// Time of C.
    pub complete_ns: u64,
}

impl Life {
    /// Time from Q to C, in nanoseconds.
    pub fn total_ns(&self) -> u64 {
        self.complete_ns.saturating_sub(self.queue_ns)
    }

    /// The request's hops in nanoseconds, without C2A, which lies between two requests.
    pub fn hops(&self) -> impl Iterator<Item = (Hop, u64)> {
        let length = |(hop, from_ns, to_ns): (Hop, u64, u64)| (hop, to_ns.saturating_sub(from_ns));
        self.spans().map(length)
    }

    /// Hops that follow one another, with begin and end: all but A2G and Q2C, which others are parts of.
    pub(crate) fn successive_hops(&self) -> impl Iterator<Item = (Hop, u64, u64)> {
        let is_part = |hop: &Hop| !matches!(hop, Hop::A2G | Hop::Q2C);
        self.spans().filter(move |(hop, ..)| is_part(hop))
    }

    fn spans(&self) -> impl Iterator<Item = (Hop, u64, u64)> {
        let (queue, issue) = (Some(self.queue_ns), self.issue_ns);
        let alone = issue.filter(|_| self.insert_ns.is_none() && self.merge_ns.is_none());
        let merged = issue.filter(|_| self.insert_ns.is_none());
        let complete = Some(self.complete_ns);
        let no_tag = alone.filter(|_| self.get_ns.is_none());
        [
            (Hop::A2G, self.remap_ns.or(queue), self.get_ns),
            (Hop::Q2G, queue, self.get_ns),
            (Hop::G2I, self.get_ns, self.insert_ns),
            (Hop::Q2M, queue, self.merge_ns),
            (Hop::M2D, self.merge_ns, merged),
            (Hop::I2D, self.insert_ns, issue),
            (Hop::Q2D, queue, no_tag),
            (Hop::G2D, self.get_ns, alone),
            (Hop::D2C, issue, complete),
            (Hop::Q2C, queue, complete),
        ]
        .into_iter()
        .filter_map(|(hop, from, to)| Some((hop, from?, to?)))
    }
}

/// State of the analysis of one device.
#[derive(Default)]
struct DeviceAnalysis {
    in_flight: InFlight,
    remaps: Remaps,
    /// End of the last gap: events before that time may be incomplete.
    gap_until_ns: u64,
    report: DeviceReport,
}

/// Analyses events in the order of their times.
#[derive(Default)]
pub struct Analyzer {
    devices: BTreeMap<Device, DeviceAnalysis>,
    submitters: HashMap<(Device, u32), Submitter>,
    hops: BTreeMap<(Device, &'static str), Hops>,
    /// Only counts and the requests themselves are wanted.
    without_samples: bool,
    /// A submitter has requests that aren't known.
    is_part: bool,
    keys: Vec<Key>,
}

/// True if one of both has no identity. Otherwise they are of one request only if the identity is the same.
fn pairs_by_range(event: &Event, pending: &Pending) -> bool {
    event.request().is_none() || pending.id.is_none()
}

impl Analyzer {
    pub fn new() -> Analyzer {
        Analyzer::default()
    }

    /// Keeps no samples of hops, so that its memory is bounded by the requests in flight: for those who look at each request when it completes.
    pub fn without_samples() -> Analyzer {
        Analyzer {
            without_samples: true,
            ..Analyzer::default()
        }
    }

    /// Submitters have requests that aren't followed: times between requests and shares of a submitter's time are left out.
    pub fn has_a_part_of_all(&mut self) {
        self.is_part = true;
    }

    /// Analyses a whole capture that is sorted by time; calls `done` with each request that completes.
    pub fn run(events: &[Event], mut done: impl FnMut(&Life)) -> Report {
        let mut analyzer = Analyzer::new();
        for event in events {
            analyzer.event(event, &mut done);
        }
        analyzer.finish()
    }

    /// Analyses one event.
    pub fn event(&mut self, event: &Event, done: &mut dyn FnMut(&Life)) {
        if let Extra::Gap { until_ns, lost } = event.extra {
            return self.gap(event, until_ns, lost);
        }
        let analysis = self.devices.entry(event.device).or_default();
        let ns = event.time_ns;
        let report = &mut analysis.report;
        report.events += 1;
        report.begin_ns = Some(report.begin_ns.map_or(ns, |b| b.min(ns)));
        report.end_ns = report.end_ns.max(ns);
        if ns < analysis.gap_until_ns {
            if event.action == Action::Queue {
                analysis.report.unknown += 1;
            }
            return;
        }
        let found = match event.action {
            Action::Gap => true,
            Action::Plug => {
                report.plugs += 1;
                true
            }
            Action::Unplug => {
                report.unplugs += 1;
                true
            }
            Action::Sleep => {
                report.sleeps += 1;
                true
            }
            Action::Remap => self.remap(event),
            Action::Queue => self.queue(event),
            Action::Split => self.split(event),
            Action::Complete => self.complete(event, done),
            Action::Issue | Action::Requeue => self.issue(event),
            Action::Get | Action::BackMerge | Action::FrontMerge | Action::Insert => {
                self.step(event)
            }
        };
        if !found && let Some(analysis) = self.devices.get_mut(&event.device) {
            analysis.report.unmatched += 1;
        }
    }

    /// Ends all pairings on the gap's device, or on all.
    fn gap(&mut self, event: &Event, until_ns: u64, lost: u64) {
        let all = event.device == Device::ALL;
        if !all {
            self.devices.entry(event.device).or_default().report.lost += lost;
        }
        let concerned = |device: &Device| all || *device == event.device;
        for (device, analysis) in &mut self.devices {
            if !concerned(device) {
                continue;
            }
            analysis.gap_until_ns = analysis.gap_until_ns.max(until_ns);
            let submitters = analysis.in_flight.take_all().map(|p| p.submitter);
            let submitters = submitters.chain(analysis.remaps.take_all().map(|r| r.submitter));
            for submitter in submitters {
                analysis.report.unknown += 1;
                let submitter = self.submitters.entry((*device, submitter));
                submitter.or_default().give_up(event.time_ns);
            }
        }
        // The next request isn't the first after the last completion that was seen.
        let submitters = self.submitters.iter_mut();
        for (_, submitter) in submitters.filter(|((device, _), _)| concerned(device)) {
            submitter.completed_ns = None;
        }
    }

    fn submitter(&mut self, device: Device, submitter: u32) -> &mut Submitter {
        self.submitters.entry((device, submitter)).or_default()
    }

    /// Starts a request on its device.
    fn arrive(&mut self, event: &Event) -> Mark {
        let (mark, gap) = self
            .submitter(event.device, event.submitter)
            .begin(event.time_ns);
        if !self.without_samples {
            let hops = self.hops.entry((event.device, op_name(event.op)));
            let hops = hops.or_default();
            if let Some(gap) = gap.filter(|_| !self.is_part) {
                hops.of_mut(Hop::C2A).record(gap);
            }
        }
        mark
    }

    fn remap(&mut self, event: &Event) -> bool {
        let (mut before, mut from, mut from_sector) = (None, None, None);
        if let Some(analysis) = self.devices.get_mut(&event.device)
            && let Extra::Remap {
                from: device,
                sector,
            } = event.extra
        {
            from = Some(device);
            from_sector = Some(sector);
            *analysis.report.remapped_from.entry(device).or_default() += 1;
            // Remapped twice, from a device above to a partition and then to the whole disk: one request, which began
            // with the first remap.
            before = analysis.remaps.remove(sector, |r| {
                r.submitter == event.submitter
                    && r.from != from
                    && (r.op, r.bytes) == (event.op, event.bytes)
            });
        }
        let remapped = before.unwrap_or_else(|| Remapped {
            mark: self.arrive(event),
            submitter: event.submitter,
            op: event.op,
            bytes: event.bytes,
            from,
            from_sector,
        });
        let Some(analysis) = self.devices.get_mut(&event.device) else {
            return false;
        };
        let Some(forgotten) = analysis.remaps.add(event.sector, remapped) else {
            return true;
        };
        // The request never got here, and no event will follow.
        self.submitter(event.device, forgotten.submitter)
            .give_up(event.time_ns);
        false
    }

    fn queue(&mut self, event: &Event) -> bool {
        let analysis = self.devices.get_mut(&event.device);
        let remap = analysis.and_then(|f| f.remaps.take(event));
        let from = remap.as_ref().and_then(|r| r.from);
        let from_sector = remap.as_ref().and_then(|r| r.from_sector);
        let remapped = remap.is_some();
        let (begin, queue, submitter) = match remap {
            Some(Remapped {
                mark: begin,
                submitter,
                ..
            }) => {
                let queue = self.submitter(event.device, submitter).mark(event.time_ns);
                (begin, queue, submitter)
            }
            None => {
                let mark = self.arrive(event);
                (mark, mark, event.submitter)
            }
        };
        let Some(analysis) = self.devices.get_mut(&event.device) else {
            return false;
        };
        // A request has the identity of one that is still in flight: the completion of that one was lost.
        let before = event
            .request()
            .and_then(|id| analysis.in_flight.take_id(id));
        if let Some(before) = before {
            analysis.report.unknown += 1;
            let submitter = self.submitters.entry((event.device, before.submitter));
            submitter.or_default().give_up(event.time_ns);
        }
        analysis.in_flight.add(Pending {
            id: event.request(),
            op: event.op,
            submitter,
            sector: event.sector,
            end: event.end(),
            remapped,
            from,
            from_sector,
            marks: Marks {
                begin,
                queue,
                get: None,
                merge: None,
                insert: None,
                issue: None,
            },
        });
        true
    }

    /// Handles G, M, F and I.
    fn step(&mut self, event: &Event) -> bool {
        fn place(action: Action, marks: &mut Marks) -> &mut Option<Mark> {
            match action {
                Action::Get => &mut marks.get,
                Action::Insert => &mut marks.insert,
                _ => &mut marks.merge,
            }
        }
        let Some(analysis) = self.devices.get_mut(&event.device) else {
            return false;
        };
        let waits = |p: &Pending| {
            p.marks.issue.is_none() && place(event.action, &mut p.marks.clone()).is_none()
        };
        let known = event.request().filter(|id| {
            let pending = analysis.in_flight.of_id(*id);
            pending.is_some_and(|p| waits(p))
        });
        let pending = match known {
            Some(id) => analysis.in_flight.of_id(id),
            None => {
                let waits = |p: &Pending| waits(p) && pairs_by_range(event, p);
                analysis.in_flight.one(event, waits)
            }
        };
        let Some(pending) = pending else {
            return false;
        };
        let submitter = self.submitters.entry((event.device, pending.submitter));
        let mark = submitter.or_default().mark(event.time_ns);
        *place(event.action, &mut pending.marks) = Some(mark);
        match event.action {
            Action::BackMerge => analysis.report.back_merges += 1,
            Action::FrontMerge => analysis.report.front_merges += 1,
            _ => {}
        }
        true
    }

    /// Handles D, and R, which takes it back.
    fn issue(&mut self, event: &Event) -> bool {
        let Some(analysis) = self.devices.get_mut(&event.device) else {
            return false;
        };
        let issue = event.action == Action::Issue;
        let fits = |p: &Pending| p.marks.issue.is_none() == issue;
        let submitters = &mut self.submitters;
        let mut set = |pending: &mut Pending| {
            let submitter = submitters.entry((event.device, pending.submitter));
            let mark = submitter.or_default().mark(event.time_ns);
            pending.marks.issue = Some(mark).filter(|_| issue);
        };
        if !issue {
            analysis.report.requeues += 1;
        } else {
            analysis.report.issues += 1;
        }
        let known = event.request().and_then(|id| analysis.in_flight.of_id(id));
        if let Some(pending) = known.filter(|p| fits(p)) {
            set(pending);
            return true;
        }
        let fits = |p: &Pending| fits(p) && pairs_by_range(event, p);
        if event.bytes == 0 {
            return analysis.in_flight.one(event, fits).map(set).is_some();
        }
        analysis.in_flight.covered(event, fits, &mut self.keys);
        for key in &self.keys {
            if let Some(pending) = analysis.in_flight.get_mut(*key) {
                set(pending);
            }
        }
        !self.keys.is_empty()
    }

    fn split(&mut self, event: &Event) -> bool {
        let (Extra::Split(at), Some(analysis)) = (event.extra, self.devices.get_mut(&event.device))
        else {
            return false;
        };
        let Some(mut second) = analysis.in_flight.split(event, at) else {
            return false;
        };
        analysis.report.splits += 1;
        let submitter = self.submitters.entry((event.device, second.submitter));
        let now = submitter.or_default().also(event.time_ns);
        second.marks = second.marks.sharing_from(now);
        analysis.in_flight.add(second);
        true
    }

    fn complete(&mut self, event: &Event, done: &mut dyn FnMut(&Life)) -> bool {
        let Some(analysis) = self.devices.get_mut(&event.device) else {
            return false;
        };
        if event.error != 0 {
            analysis.report.errors += 1;
        }
        if let Some(id) = event.request() {
            let same = |p: &mut Pending| {
                (p.op, p.sector, p.end) == (event.op, event.sector, event.end())
                    && p.marks.queue.ns <= event.time_ns
            };
            if analysis.in_flight.of_id(id).is_some_and(same)
                && let Some(pending) = analysis.in_flight.take_id(id)
            {
                self.finish_one(event, &pending, done);
                return true;
            }
        }
        let nameless = |p: &Pending| pairs_by_range(event, p);
        if event.bytes == 0 {
            let flush = analysis.in_flight.take_flush(event.op, event.submitter);
            return match flush {
                Some(pending) => {
                    self.finish_one(event, &pending, done);
                    true
                }
                None => false,
            };
        }
        let mut keys = std::mem::take(&mut self.keys);
        let issued = |p: &Pending| p.marks.issue.is_some() && nameless(p);
        analysis.in_flight.covered(event, issued, &mut keys);
        if keys.is_empty() {
            analysis.in_flight.covered(event, nameless, &mut keys);
        }
        for key in &keys {
            let analysis = self.devices.get_mut(&event.device);
            if let Some(pending) = analysis.and_then(|f| f.in_flight.take(*key)) {
                self.finish_one(event, &pending, done);
            }
        }
        let found = !keys.is_empty();
        self.keys = keys;
        found
    }

    fn finish_one(&mut self, event: &Event, pending: &Pending, done: &mut dyn FnMut(&Life)) {
        let submitter = self.submitter(event.device, pending.submitter);
        let end = submitter.end(event.time_ns);
        let marks = &pending.marks;
        for (hop, share) in marks.shares(end) {
            match hop {
                Some(hop) => submitter.shares_ns[hop.index()] += share,
                None => submitter.other_ns += share,
            }
        }
        let ns = |mark: Option<Mark>| mark.map(|m| m.ns);
        let life = Life {
            device: event.device,
            id: pending.id,
            submitter: pending.submitter,
            op: pending.op,
            sector: pending.sector,
            sectors: pending.end - pending.sector,
            error: event.error,
            remap_ns: pending.remapped.then_some(marks.begin.ns),
            from: pending.from,
            from_sector: pending.from_sector,
            queue_ns: marks.queue.ns,
            get_ns: ns(marks.get),
            merge_ns: ns(marks.merge),
            insert_ns: ns(marks.insert),
            issue_ns: ns(marks.issue),
            complete_ns: event.time_ns,
        };
        if !self.without_samples {
            let hops = self.hops.entry((event.device, op_name(pending.op)));
            let hops = hops.or_default();
            for (hop, ns) in life.hops() {
                hops.of_mut(hop).record(ns);
            }
        }
        done(&life);
    }

    /// Requests in flight on a device.
    pub(crate) fn in_flight(&self, device: Device) -> u64 {
        let analysis = self.devices.get(&device);
        analysis.map_or(0, |a| a.in_flight.len() as u64)
    }

    /// Takes the report since the last call, for figures of successive intervals. Requests in flight stay, and are
    /// counted when they complete.
    pub fn take(&mut self) -> Report {
        let devices = self.devices.iter_mut();
        let devices = devices.map(|(device, analysis)| {
            let mut report = std::mem::take(&mut analysis.report);
            report.unfinished = (analysis.in_flight.len() + analysis.remaps.len()) as u64;
            (*device, report)
        });
        let submitters = self.submitters.iter_mut();
        let is_part = self.is_part;
        let submitters = submitters.filter(|_| !is_part);
        Report {
            devices: devices.collect(),
            hops: std::mem::take(&mut self.hops),
            submitters: submitters
                .map(|(key, s)| (*key, SubmitterReport::of(&s.take())))
                .collect(),
            names: BTreeMap::new(),
        }
    }

    /// Ends the analysis; requests in flight are counted as unfinished.
    pub fn finish(mut self) -> Report {
        self.take()
    }
}
