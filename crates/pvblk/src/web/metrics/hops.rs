//! Hops: where the time of requests goes, of those that are followed while somebody reads metrics.

use super::super::backing::Backing;
use super::Disk;
use super::families as f;
use super::text::{Labels, Lines};
use parking_lot::Mutex;
use pvblk_trace::live::HopsReport;
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Requests are followed for so long after the last reading that asked for it: more than the longest interval between two readings of Prometheus.
const IDLE: Duration = Duration::from_secs(300);
/// Pause after a server didn't answer.
const PAUSE: Duration = Duration::from_secs(1);
/// Most numbers of `hops=` at a time; the one that was asked for the longest time ago goes.
const MOST_ASKED: usize = 8;
/// Most pairs of a disk and a hop, with two lines each.
const MOST_HOPS: usize = 1000;

/// Sums of hops since the first reading, and the thread that adds to them.
#[derive(Default)]
pub struct Hops(Mutex<HopsState>);

#[derive(Default)]
struct HopsState {
    /// Numbers that readers asked for, with the time of the last one.
    asked: BTreeMap<u32, Instant>,
    thread_runs: bool,
    /// One request in so many is followed now; 0: none.
    follows: u32,
    /// In the order of a request's way.
    disks: BTreeMap<String, Vec<HopSum>>,
    /// The number of all [`HopSum`]s.
    hops: usize,
    left_out: u64,
    lost: u64,
    unknown: u64,
}

/// Estimates for all requests: what was followed, times the number of which it is one.
struct HopSum {
    label: String,
    requests: u64,
    ns: u64,
}

impl HopsState {
    /// The least number that somebody asked for not long ago.
    fn wanted(&mut self, now: Instant) -> Option<u32> {
        self.asked
            .retain(|_, last| now.saturating_duration_since(*last) <= IDLE);
        self.asked.keys().next().copied()
    }

    fn add(&mut self, report: HopsReport) {
        self.lost += report.lost;
        self.unknown += report.unknown;
        let every = report.every.max(1);
        let mut left_out = 0;
        for disk in report.disks {
            let sums = self.disks.entry(disk.disk).or_default();
            for hop in disk.hops {
                let found = sums.iter().position(|s| s.label == hop.label);
                let index = found.unwrap_or(sums.len());
                if found.is_none() {
                    if self.hops >= MOST_HOPS {
                        left_out += 1;
                        continue;
                    }
                    self.hops += 1;
                    sums.push(HopSum {
                        label: hop.label,
                        requests: 0,
                        ns: 0,
                    });
                }
                let sum = &mut sums[index];
                sum.requests = sum.requests.saturating_add(hop.count.saturating_mul(every));
                sum.ns = sum.ns.saturating_add(hop.sum_ns.saturating_mul(every));
            }
        }
        self.left_out = left_out;
    }

    /// Forgets disks that aren't there any more.
    fn keep(&mut self, disks: &[Disk<'_>]) {
        let names: HashSet<&str> = disks.iter().map(|d| d.figures.name.as_str()).collect();
        self.disks.retain(|name, _| names.contains(name.as_str()));
        self.hops = self.disks.values().map(Vec::len).sum();
    }
}

impl Hops {
    /// Follows one request in `every` from now on, or more of them if another reader asked for that.
    pub fn ask(self: &Arc<Hops>, backing: &Arc<dyn Backing>, every: u32) {
        let now = Instant::now();
        let mut state = self.0.lock();
        state.asked.insert(every, now);
        if state.asked.len() > MOST_ASKED
            && let Some(oldest) = state.asked.iter().min_by_key(|(_, last)| **last)
        {
            let oldest = *oldest.0;
            state.asked.remove(&oldest);
        }
        if state.thread_runs {
            return;
        }
        let (hops, backing) = (Arc::downgrade(self), Arc::clone(backing));
        let thread = std::thread::Builder::new().name("pvblk-web-hops".into());
        // Without a thread nothing is followed, and the figures tell so.
        state.thread_runs = thread.spawn(move || run(&hops, &*backing)).is_ok();
    }

    /// The next number that the thread is to follow; none: the thread ends.
    pub(super) fn next(&self) -> Option<u32> {
        let mut state = self.0.lock();
        let next = state.wanted(Instant::now());
        state.follows = 0;
        state.thread_runs = next.is_some();
        next
    }

    /// Takes what one request in `every` tells; false if another number is wanted by now.
    fn take(&self, every: u32, report: Option<HopsReport>) -> bool {
        let mut state = self.0.lock();
        state.follows = every;
        if let Some(report) = report {
            state.add(report);
        }
        state.wanted(Instant::now()) == Some(every)
    }

    pub fn write(&self, lines: &mut Lines<'_>, disks: &[Disk<'_>]) -> io::Result<()> {
        let mut state = self.0.lock();
        state.keep(disks);
        let none = Labels::default();
        lines
            .family(&f::HOPS_FOLLOWED)?
            .put(&none, state.follows.into())?;
        lines.family(&f::HOPS_LOST)?.put(&none, state.lost)?;
        lines.family(&f::HOPS_UNKNOWN)?.put(&none, state.unknown)?;
        lines
            .family(&f::HOPS_LEFT_OUT)?
            .put(&none, state.left_out)?;
        let each: Vec<(Labels, u64, u64)> = state
            .disks
            .iter()
            .flat_map(|(disk, sums)| {
                let label = Labels::of("disk", disk);
                let one = move |s: &HopSum| (label.and("hop", &s.label), s.requests, s.ns);
                sums.iter().map(one)
            })
            .collect();
        // Sending may wait for the reader.
        drop(state);
        let mut samples = lines.family(&f::HOP_REQUESTS)?;
        for (labels, requests, _) in &each {
            samples.put(labels, *requests)?;
        }
        let mut samples = lines.family(&f::HOP_TIME)?;
        for (labels, _, ns) in &each {
            samples.put_ns(labels, *ns)?;
        }
        Ok(())
    }
}

/// The thread that follows, until nobody wants it for a while or the metrics are gone.
fn run(hops: &Weak<Hops>, backing: &dyn Backing) {
    while let Some(every) = hops.upgrade().and_then(|h| h.next()) {
        let mut take = |report| hops.upgrade().is_some_and(|h| h.take(every, report));
        if let Err(e) = backing.follow(every, &mut take) {
            tracing::debug!("no hops in metrics: {}", e.message);
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_trace::live::{DiskHops, HopTimes};

    /// A label, a count and a sum in nanoseconds.
    type Hop = (&'static str, u64, u64);

    fn report(every: u64, disks: &[(&str, &[Hop])]) -> HopsReport {
        let hop = |(label, count, sum_ns): &Hop| HopTimes {
            label: (*label).to_owned(),
            count: *count,
            sum_ns: *sum_ns,
            ..HopTimes::default()
        };
        let disk = |(name, hops): &(&str, &[Hop])| DiskHops {
            disk: (*name).to_owned(),
            hops: hops.iter().map(hop).collect(),
            ..DiskHops::default()
        };
        HopsReport {
            every,
            lost: 2,
            unknown: 1,
            disks: disks.iter().map(disk).collect(),
            ..HopsReport::default()
        }
    }

    fn sums(state: &HopsState, disk: &str) -> Vec<(String, u64, u64)> {
        let sums = state.disks.get(disk).into_iter().flatten();
        sums.map(|s| (s.label.clone(), s.requests, s.ns)).collect()
    }

    #[test]
    fn what_is_followed_stands_for_all() {
        let mut state = HopsState::default();
        // A disk can have two ways, and the same hop in both.
        let ways: &[Hop] = &[("worker", 2, 10), ("medium", 1, 5), ("worker", 1, 1)];
        state.add(report(64, &[("a", ways)]));
        state.add(report(1, &[("a", &[("medium", 1, 7)]), ("b", &[])]));
        let expected = [("worker", 192, 704), ("medium", 65, 327)];
        let expected = expected.map(|(l, n, ns)| (l.to_owned(), n, ns));
        assert_eq!(sums(&state, "a"), expected);
        assert_eq!((state.lost, state.unknown, state.hops), (4, 2, 2));
    }

    #[test]
    fn hops_are_bounded_and_those_that_are_there_go_on() {
        let mut state = HopsState::default();
        state.add(report(1, &[("a", &[("worker", 1, 1)])]));
        let names: Vec<String> = (0..MOST_HOPS).map(|n| format!("d{n}")).collect();
        for name in &names {
            state.add(report(1, &[(name, &[("worker", 1, 1)])]));
        }
        assert_eq!((state.hops, state.left_out), (MOST_HOPS, 1));
        state.add(report(1, &[("a", &[("worker", 1, 1), ("medium", 1, 1)])]));
        assert_eq!(sums(&state, "a"), [("worker".to_owned(), 2, 2)]);
        // Removed disks make room.
        state.keep(&[]);
        assert_eq!(state.hops, 0);
        state.add(report(1, &[("z", &[("worker", 1, 1)])]));
        assert_eq!((sums(&state, "z").len(), state.left_out), (1, 0));
    }

    #[test]
    fn the_least_number_counts_for_as_long_as_somebody_asks() {
        let (mut state, begin) = (HopsState::default(), Instant::now());
        assert_eq!(state.wanted(begin), None);
        state.asked.insert(64, begin + IDLE / 2);
        state.asked.insert(8, begin);
        assert_eq!(state.wanted(begin + IDLE), Some(8));
        assert_eq!(state.wanted(begin + IDLE + PAUSE), Some(64));
        assert_eq!(state.wanted(begin + IDLE * 2), None);
    }

    #[test]
    fn readers_cannot_make_the_table_of_numbers_long() {
        let hops = Arc::new(Hops::default());
        // No thread is started.
        hops.0.lock().thread_runs = true;
        let none = super::super::tests::Planted { disks: 0, used: 0 };
        let backing: Arc<dyn Backing> = Arc::new(none);
        for every in 1..100 {
            hops.ask(&backing, every);
        }
        assert_eq!(hops.0.lock().asked.len(), MOST_ASKED);
        // The thread goes on with the least of them, and ends with the last reader.
        assert!(!hops.take(1, None));
        let next = hops.next().expect("a number");
        assert!(hops.take(next, Some(report(u64::from(next), &[]))));
        hops.0.lock().asked.clear();
        assert_eq!(hops.next(), None);
        assert!(!hops.0.lock().thread_runs);
    }
}
