//! Tables, plots and checks of `pvblk-lab queues`.

use super::{QueuesPoint, QueuesResult, Scaling};
use crate::bed::{Pattern, Sample, rates, typical};
use crate::stats::{Claim, Confidence, PairRatio};
use crate::verdict::{Check, axis, charts, median_ratio, ratio, series, table};
use pvblk_bench::plot::{Chart, Lines, Point, Scale, Unit};

/// The historical measurement (seed 001): jobs, and thousands of requests a second on one queue and
/// on 16, with 16 CPUs.
const SEED: [(u32, u32, u32); 6] = [
    (1, 57, 58),
    (4, 95, 201),
    (8, 89, 372),
    (16, 68, 284),
    (32, 65, 196),
    (64, 63, 183),
];

/// The part of their peak that several queues keep in the historical measurement: 183 of 372 thousand requests a second with 64 jobs on 16 CPUs.
const LEAST_SHARE: f64 = 0.49;

fn name(pattern: Pattern) -> &'static str {
    match pattern {
        Pattern::Iometer => "IOmeter file server, 64 in flight a job",
        Pattern::RandomRead => "4 KiB random reads, 64 in flight a job",
        Pattern::RandomWrite => "4 KiB random writes, 64 in flight a job",
        Pattern::SequentialRead => "sequential reads",
    }
}

impl QueuesPoint {
    fn row(&self) -> [String; 5] {
        let (one, several) = (rates(&self.one_queue), rates(&self.several));
        let times = |s: &[Sample]| {
            format!(
                "{:.0}, {:.0}",
                typical(s, |s| s.p50_us),
                typical(s, |s| s.p99_us)
            )
        };
        [
            format!("{:.1}", typical(&self.one_queue, |s| s.iops) / 1000.0),
            format!("{:.1}", typical(&self.several, |s| s.iops) / 1000.0),
            ratio(&several, &one, (&several, &rates(&self.several_again))),
            times(&self.one_queue),
            times(&self.several),
        ]
    }

    /// True if several queues are proven to be slower than one, beyond what the control shows.
    fn is_worse(&self) -> bool {
        let (one, several) = (rates(&self.one_queue), rates(&self.several));
        let level = Confidence::default();
        let pairs = PairRatio::of(&several, &one, level);
        let control = PairRatio::of(&several, &rates(&self.several_again), level);
        match (pairs, control) {
            (Ok(r), Ok(c)) => r.median < 1.0 && Claim::of(r, c).proven(),
            _ => median_ratio(&several, &one) < 0.95,
        }
    }
}

impl QueuesResult {
    fn of(&self, pattern: Pattern) -> impl Iterator<Item = &QueuesPoint> {
        self.null.iter().filter(move |p| p.load.pattern == pattern)
    }

    fn patterns(&self) -> impl Iterator<Item = Pattern> {
        let all = [Pattern::Iometer, Pattern::RandomRead, Pattern::RandomWrite];
        all.into_iter().filter(|&p| self.of(p).next().is_some())
    }

    /// True if more jobs find no CPU for themselves and their workers: from here on several queues have to keep [`LEAST_SHARE`] of their peak.
    fn is_full(&self, jobs: u32) -> bool {
        2 * jobs as usize >= self.machine.cpus
    }

    pub fn table(&self) -> String {
        let several = format!("{} queues k/s", self.queues);
        let mut text = format!(
            "null (buffers are not touched, as null_blk), bound by {} CPUs (seed 001: 16). n.p.: no difference proven.\n",
            self.machine.cpus
        );
        let gain = format!("{}q/1q (95 %)", self.queues);
        let p = "p50, p99 us 1q";
        let pn = format!("{}q", self.queues);
        for pattern in self.patterns() {
            let mut t = table(&[
                "jobs",
                "seed 1q/16q k/s",
                "1 queue k/s",
                &several,
                &gain,
                p,
                &pn,
            ]);
            for point in self.of(pattern) {
                let jobs = point.load.threads;
                let seed = SEED
                    .iter()
                    .find(|s| s.0 == jobs && pattern == Pattern::Iometer)
                    .map_or(String::new(), |s| format!("{} / {}", s.1, s.2));
                let mut row = vec![jobs.to_string(), seed];
                row.extend(point.row());
                t.add_row(row);
            }
            text += &format!("\n{}\n{t}\n", name(pattern));
        }
        let mut t = table(&["threads x depth", "1 queue k/s", &several, &gain, p, &pn]);
        for point in &self.shapes {
            let mut row = vec![format!("{} x {}", point.load.threads, point.load.depth)];
            row.extend(point.row());
            t.add_row(row);
        }
        text += &format!("\n4 KiB random reads, 64 in flight\n{t}\n");
        for (title, all) in [
            (
                "null, 4 KiB random reads, one thread x 64 a queue".to_owned(),
                &self.scaling,
            ),
            (
                format!(
                    "modelled device, each queue one request at a time, 100 us (clock slowed by {}), 8 threads x 4",
                    self.slower
                ),
                &self.serial,
            ),
        ] {
            let mut t = table(&["queues", "k/s", "x 1 queue"]);
            for s in all {
                t.add_row([
                    s.queues.to_string(),
                    format!("{:.2}", typical(&s.samples, |s| s.iops) / 1000.0),
                    format!("{:.2}", gain_of(all, s)),
                ]);
            }
            text += &format!("\n{title}\n{t}\n");
        }
        text
    }

    pub fn charts(&self) -> Vec<Chart> {
        let rates_of = |of: fn(&QueuesPoint) -> &Vec<Sample>| {
            let points = self.of(Pattern::Iometer);
            points.filter_map(move |p| Point::spread(f64::from(p.load.threads), &rates(of(p))))
        };
        let chart = Lines {
            title: "IOmeter's file server on null, by jobs".into(),
            subtitle: format!(
                "{} CPUs; whiskers: least and greatest round",
                self.machine.cpus
            ),
            x: axis("jobs", Unit::Count, Scale::Log2),
            y: axis("requests a second", Unit::Count, Scale::Linear),
            series: vec![
                series("1 queue", rates_of(|p| &p.one_queue)),
                series(&format!("{} queues", self.queues), rates_of(|p| &p.several)),
            ],
        };
        charts([chart])
    }

    /// Expectations from the historical measurement (seed 001).
    pub fn checks(&self) -> Vec<Check> {
        let mut checks = Vec::new();
        for p in self.null.iter().chain(&self.shapes) {
            let (one, several) = (rates(&p.one_queue), rates(&p.several));
            checks.push(Check {
                expected: format!(
                    "null, {:?}, {} x {}: {} queues not below one",
                    p.load.pattern, p.load.threads, p.load.depth, self.queues
                ),
                figure: format!("{:.3}", median_ratio(&several, &one)),
                holds: !p.is_worse(),
            });
        }
        for pattern in self.patterns() {
            let rate = |p: &QueuesPoint| typical(&p.several, |s| s.iops);
            let peak = self.of(pattern).map(rate).fold(0.0, f64::max);
            let several = |p: &&QueuesPoint| p.load.threads >= 4 && self.is_full(p.load.threads);
            for p in self.of(pattern).filter(several) {
                let share = rate(p) / peak;
                checks.push(Check {
                    expected: format!(
                        "null, {pattern:?}, {} jobs: at least {LEAST_SHARE} of the peak",
                        p.load.threads
                    ),
                    figure: format!("{share:.3}"),
                    holds: share >= LEAST_SHARE,
                });
            }
        }
        for s in self.scaling.iter().filter(|s| (2..=6).contains(&s.queues)) {
            let gain = gain_of(&self.scaling, s);
            checks.push(Check {
                expected: format!("null, {0} queues: at least 0.8 x {0}", s.queues),
                figure: format!("{gain:.2}"),
                holds: gain >= 0.8 * f64::from(s.queues),
            });
        }
        for (queues, least) in [(4, 3.8), (8, 7.0)] {
            let Some(s) = self.serial.iter().find(|s| s.queues == queues) else {
                continue;
            };
            let gain = gain_of(&self.serial, s);
            checks.push(Check {
                expected: format!("modelled, {queues} queues: at least {least} x one"),
                figure: format!("{gain:.2}"),
                holds: gain >= least,
            });
        }
        checks
    }
}

fn gain_of(all: &[Scaling], one: &Scaling) -> f64 {
    let base = all.first().map_or(&[][..], |s| &s.samples);
    median_ratio(&rates(&one.samples), &rates(base))
}
