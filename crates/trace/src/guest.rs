//! Aligns a guest's own blktrace with ours, by the requests found in both.
//!
//! A guest issues a request before the server takes it off the ring, and sees its completion after the server has
//! responded. So each request gives an interval in which the difference of the two clocks lies. The difference that
//! fits most requests shows which requests of the two traces are the same. The clocks may drift, so the difference is
//! then taken from a straight line: the one that keeps farthest from all ends of the intervals. The remaining error
//! is half of the least time that any request spent on the ring, both ways together: no software can tell the two
//! ways apart.

use crate::{Action, Event};
use pvblk_block::Op;
use std::collections::{HashMap, VecDeque};
use std::fmt;

/// Fewest requests that determine a clock.
const LEAST_PAIRS: usize = 8;
/// Greatest drift between two clocks of one machine: Linux corrects a clock by at most 500 parts in a million.
const MOST_DRIFT: f64 = 500e-6;
/// Most requests at one place that are compared with each other, on each side.
const MOST_ALIKE: usize = 64;
/// Most rounds of leaving out requests that contradict the others.
const MOST_ROUNDS: usize = 16;
/// Pairs that are enough to find the difference roughly.
const MOST_PAIRS: usize = 1 << 18;

/// Converts a guest's times to the server's clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GuestClock {
    /// The guest's time at which `offset_ns` holds.
    at_ns: i64,
    /// Server's time less guest's time, at `at_ns`.
    offset_ns: f64,
    /// Drift: gain of the server's clock over the guest's, as a part of the elapsed time.
    pub drift: f64,
    /// Largest possible error of the difference in nanoseconds, in either direction.
    pub within_ns: u64,
    /// Number of requests that determined the clock.
    pub requests: usize,
}

/// Reason why a guest's clock can't be aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoClock {
    /// Only this many requests of the guest were found at the server.
    TooFew(usize),
    /// The times contradict each other: a clock was set during the capture.
    Contradiction,
}

impl fmt::Display for NoClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoClock::TooFew(n) => write!(
                f,
                "{n} of its requests are in the server's capture, {LEAST_PAIRS} are needed: trace both at the same time"
            ),
            NoClock::Contradiction => f.write_str(
                "its clock and the server's can't be aligned: one of them was set during the capture; trace again",
            ),
        }
    }
}

impl std::error::Error for NoClock {}

type Place = (Op, u64, u32);

/// Converts to a type for sums and differences, cut off at 36 years: a guest's file may contain any time.
fn signed(time_ns: u64) -> i64 {
    time_ns.min(1 << 60) as i64
}

/// A request's interval from issue to completion.
#[derive(Clone, Copy)]
struct Span {
    begin_ns: i64,
    end_ns: i64,
}

/// Intervals of the requests at each place, from action `begin` to C.
fn spans(events: &[Event], begin: Action) -> HashMap<Place, Vec<Span>> {
    let mut open: HashMap<Place, VecDeque<i64>> = HashMap::new();
    let mut all: HashMap<Place, Vec<Span>> = HashMap::new();
    for event in events.iter().filter(|e| e.bytes > 0) {
        let place = (event.op, event.sector, event.bytes);
        let now_ns = signed(event.time_ns);
        if event.action == begin {
            open.entry(place).or_default().push_back(now_ns);
        } else if event.action == Action::Requeue {
            open.entry(place).or_default().pop_back();
        } else if event.action == Action::Complete
            && let Some(begin_ns) = open.get_mut(&place).and_then(VecDeque::pop_front)
        {
            let end_ns = now_ns;
            all.entry(place)
                .or_default()
                .push(Span { begin_ns, end_ns });
        }
    }
    all
}

/// A request of the guest and one of the server that may be the same. If they are, the difference of the clocks lies
/// between `least_ns` and `most_ns`.
#[derive(Clone, Copy)]
struct Pair {
    guest: Span,
    /// Positions of the guest's and the server's request among those at the same place.
    numbers: (usize, usize),
    least_ns: i64,
    most_ns: i64,
}

impl Pair {
    /// Returns `None` if the server's interval is longer than the guest's.
    fn of(guest: &Span, server: &Span, numbers: (usize, usize)) -> Option<Pair> {
        let least_ns = server.end_ns - guest.end_ns;
        let most_ns = server.begin_ns - guest.begin_ns;
        let guest = *guest;
        (least_ns <= most_ns).then_some(Pair {
            guest,
            numbers,
            least_ns,
            most_ns,
        })
    }

    fn holds(&self, difference_ns: i64, slack_ns: i64) -> bool {
        (self.least_ns - slack_ns..=self.most_ns + slack_ns).contains(&difference_ns)
    }
}

impl GuestClock {
    /// Determines the clock from the events of two devices, each sorted by time: the guest's disk, and our back end
    /// of that disk.
    pub fn set(guest: &[Event], server: &[Event]) -> Result<GuestClock, NoClock> {
        let both = BothSides::of(guest, server);
        let at_ns = guest.first().map_or(0, |e| signed(e.time_ns));
        let lasted = |events: &[Event]| match (events.first(), events.last()) {
            (Some(first), Some(last)) => signed(last.time_ns) - signed(first.time_ns),
            _ => 0,
        };
        let longest_ns = lasted(guest).max(lasted(server));
        // Clocks of one machine that are not being corrected differ by a few parts in a million.
        let slack_ns = longest_ns / 10_000;
        let coarse_ns = most_covered(&both.any(), slack_ns).ok_or(NoClock::TooFew(0))?;
        let mut pairs = both.about(coarse_ns, slack_ns);
        if pairs.len() < LEAST_PAIRS {
            return Err(NoClock::TooFew(pairs.len()));
        }
        let all = pairs.len();
        for _ in 0..MOST_ROUNDS {
            let (line, margin_ns) = Bounds::of(&pairs, at_ns, coarse_ns).line();
            if margin_ns >= 0.0 {
                return Ok(GuestClock {
                    at_ns,
                    offset_ns: coarse_ns as f64 + line.offset_ns,
                    drift: line.drift,
                    within_ns: margin_ns.ceil() as u64,
                    requests: pairs.len(),
                });
            }
            // Wrongly paired requests must be few; otherwise the difference is wrong.
            let before = pairs.len();
            pairs.retain(|p| line.lies_in(p, at_ns, coarse_ns));
            if pairs.len() == before || pairs.len() < LEAST_PAIRS.max(all - all / 10) {
                break;
            }
        }
        Err(NoClock::Contradiction)
    }

    /// Converts a guest's time to the server's clock; at least 0.
    pub fn server_ns(&self, guest_ns: u64) -> u64 {
        let guest_ns = signed(guest_ns);
        let offset = self.offset_ns + self.drift * (guest_ns - self.at_ns) as f64;
        guest_ns.saturating_add(offset.round() as i64).max(0) as u64
    }
}

/// Requests of both sides, by their places.
struct BothSides(Vec<(Vec<Span>, Vec<Span>)>);

impl BothSides {
    fn of(guest: &[Event], server: &[Event]) -> BothSides {
        let mut ours = spans(server, Action::Queue);
        let theirs = spans(guest, Action::Issue).into_iter();
        let mut all: Vec<_> = theirs
            .filter_map(|(place, guest)| Some((guest, ours.remove(&place)?)))
            .collect();
        for (guest, server) in &mut all {
            guest.sort_by_key(|s| s.begin_ns);
            server.sort_by_key(|s| s.begin_ns);
        }
        // In a fixed order: the same files give the same clock.
        all.sort_by_key(|(guest, _)| guest.first().map(|s| (s.begin_ns, s.end_ns)));
        BothSides(all)
    }

    /// Pairs at the same place, whatever their difference; if one place has many requests, some of them.
    fn any(&self) -> Vec<Pair> {
        let mut places: Vec<_> = self.0.iter().collect();
        places.sort_by_key(|(guest, server)| guest.len() * server.len());
        let mut pairs = Vec::new();
        for (guest, server) in places {
            let every = |n: usize| n.div_ceil(MOST_ALIKE);
            for (g, theirs) in guest.iter().enumerate().step_by(every(guest.len())) {
                let ours = server.iter().enumerate().step_by(every(server.len()));
                pairs.extend(ours.filter_map(|(s, ours)| Pair::of(theirs, ours, (g, s))));
            }
            if pairs.len() > MOST_PAIRS {
                break;
            }
        }
        pairs
    }

    /// Pairs that are the same request if the difference is about `coarse_ns`; only those where neither has another
    /// candidate.
    fn about(&self, coarse_ns: i64, slack_ns: i64) -> Vec<Pair> {
        let mut all = Vec::new();
        for (guest, server) in &self.0 {
            let mut pairs = Vec::new();
            for (g, theirs) in guest.iter().enumerate() {
                let first = theirs.begin_ns + coarse_ns - slack_ns;
                let last = theirs.end_ns + coarse_ns + slack_ns;
                let begin = server.partition_point(|s| s.begin_ns < first);
                let near = server.iter().enumerate().skip(begin);
                // Two candidates are as bad as many.
                let near = near
                    .take_while(|(_, s)| s.begin_ns <= last)
                    .take(MOST_ALIKE);
                let near = near.filter_map(|(s, ours)| Pair::of(theirs, ours, (g, s)));
                pairs.extend(near.filter(|p| p.holds(coarse_ns, slack_ns)).take(2));
            }
            let (mut theirs, mut ours) = (HashMap::new(), HashMap::new());
            for Pair { numbers, .. } in &pairs {
                *theirs.entry(numbers.0).or_insert(0) += 1;
                *ours.entry(numbers.1).or_insert(0) += 1;
            }
            let alone = |p: &Pair| theirs[&p.numbers.0] == 1 && ours[&p.numbers.1] == 1;
            all.extend(pairs.iter().filter(|p| alone(p)));
        }
        all
    }
}

/// The difference that lies in most intervals, each extended by `slack_ns` at both ends.
fn most_covered(pairs: &[Pair], slack_ns: i64) -> Option<i64> {
    // At the same time, beginnings come before ends.
    let mut ends: Vec<(i64, i32)> = pairs
        .iter()
        .flat_map(|p| [(p.least_ns - slack_ns, -1), (p.most_ns + slack_ns, 1)])
        .collect();
    ends.sort_unstable();
    let (mut depth, mut best, mut found) = (0, 0, None);
    for (i, &(at, end)) in ends.iter().enumerate() {
        depth -= end;
        if depth > best {
            best = depth;
            let until = ends.get(i + 1).map_or(at, |next| next.0);
            found = Some(at + (until - at) / 2);
        }
    }
    found
}

/// The difference of the clocks as a line over the guest's time, less a coarse difference.
struct ClockLine {
    offset_ns: f64,
    drift: f64,
}

impl ClockLine {
    fn lies_in(&self, pair: &Pair, at_ns: i64, coarse_ns: i64) -> bool {
        let value = |time_ns: i64| self.offset_ns + self.drift * (time_ns - at_ns) as f64;
        value(pair.guest.begin_ns) <= (pair.most_ns - coarse_ns) as f64
            && value(pair.guest.end_ns) >= (pair.least_ns - coarse_ns) as f64
    }
}

/// Points that the line has to stay above and below: times since `at_ns`, and differences less the coarse one.
struct Bounds {
    least: Vec<(f64, f64)>,
    most: Vec<(f64, f64)>,
}

impl Bounds {
    fn of(pairs: &[Pair], at_ns: i64, coarse_ns: i64) -> Bounds {
        let point =
            |time_ns: i64, bound_ns: i64| ((time_ns - at_ns) as f64, (bound_ns - coarse_ns) as f64);
        Bounds {
            least: pairs
                .iter()
                .map(|p| point(p.guest.end_ns, p.least_ns))
                .collect(),
            most: pairs
                .iter()
                .map(|p| point(p.guest.begin_ns, p.most_ns))
                .collect(),
        }
    }

    /// For one drift, the highest and lowest offset that are allowed; swapped if none is.
    fn offsets(&self, drift: f64) -> (f64, f64) {
        let level = |(time, bound): &(f64, f64)| bound - drift * time;
        let least = self
            .least
            .iter()
            .map(level)
            .fold(f64::NEG_INFINITY, f64::max);
        let most = self.most.iter().map(level).fold(f64::INFINITY, f64::min);
        (least, most)
    }

    /// The line that is farthest from all bounds, and its distance; negative if no line lies between them.
    fn line(&self) -> (ClockLine, f64) {
        let margin = |drift: f64| {
            let (least, most) = self.offsets(drift);
            (most - least) / 2.0
        };
        // The distance is a concave function of the drift.
        let (mut low, mut high) = (-MOST_DRIFT, MOST_DRIFT);
        while high - low > 1e-10 {
            let third = (high - low) / 3.0;
            match margin(low + third) < margin(high - third) {
                true => low += third,
                false => high -= third,
            }
        }
        let best = (low + high) / 2.0;
        // A few requests don't determine a drift.
        let drift = match margin(0.0) >= 0.9 * margin(best) && margin(0.0) >= 0.0 {
            true => 0.0,
            false => best,
        };
        let (least, most) = self.offsets(drift);
        let offset_ns = (least + most) / 2.0;
        (ClockLine { offset_ns, drift }, (most - least) / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::tests::event;

    /// Events of `count` reads on both sides: the guest's clock is behind by `offset_ns` and gains `drift`. The reads
    /// are at `places` places, up to 8 in flight. A request takes 20 to 60 us on the ring, both ways together, and 10
    /// to 500 us at the server.
    fn both_sides(
        seed: u64,
        (count, places): (u64, u64),
        offset_ns: u64,
        drift: f64,
    ) -> (Vec<Event>, Vec<Event>) {
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut guest, mut server) = (Vec::new(), Vec::new());
        let mut now_ns = offset_ns + 1_000_000_000;
        for _ in 0..count {
            now_ns += random.u64(1_000..400_000);
            let at = |action, time_ns, sector| Event {
                action,
                time_ns,
                sector,
                ..event()
            };
            let sector = random.u64(0..places) * 8;
            let queue_ns = now_ns + random.u64(10_000..30_000);
            let complete_ns = queue_ns + random.u64(10_000..500_000);
            let end_ns = complete_ns + random.u64(10_000..30_000);
            let guests = |ns: u64| {
                let since = (ns - offset_ns) as f64;
                (since * (1.0 + drift)) as u64
            };
            guest.push(at(Action::Issue, guests(now_ns), sector));
            guest.push(at(Action::Complete, guests(end_ns), sector));
            server.push(at(Action::Queue, queue_ns, sector));
            server.push(at(Action::Complete, complete_ns, sector));
        }
        guest.sort_by_key(|e| e.time_ns);
        server.sort_by_key(|e| e.time_ns);
        (guest, server)
    }

    const OFFSET_NS: u64 = 5_000_000_000_000;

    #[test]
    fn a_clock_without_drift_is_aligned_within_the_shortest_way() {
        for seed in 0..20 {
            let (guest, server) = both_sides(seed, (2000, 1 << 20), OFFSET_NS, 0.0);
            let clock = GuestClock::set(&guest, &server).unwrap();
            let off = clock
                .server_ns(1_000_000_000)
                .abs_diff(OFFSET_NS + 1_000_000_000);
            assert!(off <= clock.within_ns, "{off} {clock:?}");
            assert!((8_000..=14_000).contains(&clock.within_ns), "{clock:?}");
            assert!(clock.requests > 1990, "{clock:?}");
        }
    }

    #[test]
    fn a_clock_with_drift_is_aligned_at_all_times() {
        for (seed, drift) in [(1, 60e-6), (2, -60e-6), (3, 1e-6)] {
            let (guest, server) = both_sides(seed, (50_000, 1 << 20), OFFSET_NS, drift);
            let clock = GuestClock::set(&guest, &server).unwrap();
            assert!((clock.drift + drift).abs() < 2e-6, "{clock:?}");
            for ns in [1e9, 4e9, 8e9] {
                let server_ns = OFFSET_NS + (ns / (1.0 + drift)) as u64;
                let off = clock.server_ns(ns as u64).abs_diff(server_ns);
                assert!(off <= clock.within_ns + 2_000, "{off} {clock:?}");
            }
        }
    }

    #[test]
    fn repeated_reads_at_few_places_do_not_mislead() {
        for seed in 0..10 {
            for places in [16, 300] {
                let (guest, server) = both_sides(seed, (5000, places), OFFSET_NS, 5e-6);
                let clock = GuestClock::set(&guest, &server).unwrap();
                let off = clock
                    .server_ns(1_000_000_000)
                    .abs_diff(OFFSET_NS + 1_000_000_000);
                assert!(off <= clock.within_ns + 10_000, "{places} {off} {clock:?}");
            }
        }
    }

    #[test]
    fn partly_overlapping_captures_are_enough() {
        let (guest, server) = both_sides(7, (4000, 1 << 20), OFFSET_NS, 0.0);
        let clock = GuestClock::set(&guest[4000..], &server[..5000]).unwrap();
        let off = clock.server_ns(0).abs_diff(OFFSET_NS);
        assert!(off <= clock.within_ns, "{off} {clock:?}");
    }

    #[test]
    fn captures_without_common_requests_are_an_error() {
        let (guest, _) = both_sides(1, (500, 1 << 20), OFFSET_NS, 0.0);
        let (_, server) = both_sides(2, (500, 1 << 20), OFFSET_NS, 0.0);
        let error = GuestClock::set(&guest, &server).unwrap_err();
        assert!(matches!(error, NoClock::TooFew(0..8)), "{error}");
        assert_eq!(GuestClock::set(&[], &[]), Err(NoClock::TooFew(0)));
    }

    #[test]
    fn impossible_times_are_harmless() {
        let (mut guest, server) = both_sides(1, (200, 1 << 20), OFFSET_NS, 0.0);
        for far in [u64::MAX, u64::MAX - 1, 1 << 63, 1 << 60] {
            let last = guest.len() - 1;
            guest[last].time_ns = far;
            if let Ok(clock) = GuestClock::set(&guest, &server) {
                clock.server_ns(far);
            }
            let _ = GuestClock::set(&server, &guest);
        }
        guest.iter_mut().for_each(|e| e.time_ns = u64::MAX);
        let _ = GuestClock::set(&guest, &server);
        // A million requests at one place at one time.
        let alike: Vec<Event> = (0..1_000_000)
            .map(|i| Event {
                action: if i % 2 == 0 {
                    Action::Issue
                } else {
                    Action::Complete
                },
                time_ns: 5,
                ..event()
            })
            .collect();
        let ours = alike.iter().map(|e| Event {
            action: if e.action == Action::Issue {
                Action::Queue
            } else {
                e.action
            },
            ..*e
        });
        let ours: Vec<Event> = ours.collect();
        assert_eq!(GuestClock::set(&alike, &ours), Err(NoClock::TooFew(0)));
    }

    #[test]
    fn a_clock_that_jumps_is_an_error() {
        let (mut guest, server) = both_sides(1, (20_000, 1 << 20), OFFSET_NS, 0.0);
        let half = guest.len() / 2;
        // By less than the drift that is assumed at first.
        guest[half..].iter_mut().for_each(|e| e.time_ns += 150_000);
        let error = GuestClock::set(&guest, &server).unwrap_err();
        assert_eq!(error, NoClock::Contradiction);
    }
}
