//! Tables and checks of `pvblk-lab page-order`.

use super::policy::Policy;
use super::{Breakdown, MORE, PROCESSES, PageOrderResult, PageOrderSample, SHOWN, TOO_SMALL};
use crate::verdict::{Check, axis, charts, series, table};
use pvblk_bench::plot::{Chart, Lines, Point, Scale, Unit};

/// Losses of a kernel of 2009 in percent, by number of processes (seed 002).
const SEED: [[(u32, f64); 7]; 2] = [
    [
        (1, -4.9),
        (2, 5.2),
        (4, -82.6),
        (8, -65.6),
        (16, -44.2),
        (32, -30.0),
        (64, -37.7),
    ],
    [
        (1, -48.3),
        (2, -45.7),
        (4, -50.5),
        (8, -59.0),
        (16, -61.8),
        (32, -48.3),
        (64, -21.0),
    ],
];
/// Latencies of the historical measurement: column and percent.
const SEED_LINE: [(&str, f64); 6] = [
    ("avg-A2G", -3.48),
    ("avg-G2I", -0.56),
    ("avg-I2D", -1.57),
    ("avg-D2C", -1.31),
    ("avg-C2A-in-avg+-stddev", 128.69),
    ("%C2A-in-avg+-stddev", 97.26),
];
const PATTERNS: [&str; 2] = ["Sequential reads", "Random reads"];
const IN_ORDER: usize = 0;
const RANDOM: usize = 1;

fn percent(of: f64, to: f64) -> f64 {
    match to > 0.0 {
        true => 100.0 * (of / to - 1.0),
        false => 0.0,
    }
}

impl PageOrderResult {
    fn samples_of(
        &self,
        pattern: usize,
        processes: u32,
        pages: u64,
    ) -> impl Iterator<Item = &PageOrderSample> {
        self.samples.iter().filter(move |s| {
            s.random == (pattern == RANDOM) && s.processes == processes && s.pages == pages
        })
    }

    fn sample(
        &self,
        pattern: usize,
        processes: u32,
        pages: u64,
        policy: &str,
    ) -> Option<&PageOrderSample> {
        self.samples_of(pattern, processes, pages)
            .find(|s| s.policy == policy)
    }

    fn rate(&self, pattern: usize, processes: u32, pages: u64, policy: &str) -> f64 {
        let sample = self.sample(pattern, processes, pages, policy);
        sample.map_or(0.0, |s| s.kib_per_second)
    }

    /// The sample of the best policy where the cache is too small.
    fn best(&self, pattern: usize, processes: u32) -> Option<&PageOrderSample> {
        self.samples_of(pattern, processes, TOO_SMALL[pattern])
            .filter(|s| s.policy != "direct")
            .max_by(|a, b| a.kib_per_second.total_cmp(&b.kib_per_second))
    }

    /// Percentage by which the historical policy is slower than the best one.
    fn lost(&self, pattern: usize, processes: u32) -> f64 {
        let history = Policy::HISTORY.name();
        let best = self
            .best(pattern, processes)
            .map_or(0.0, |s| s.kib_per_second);
        percent(
            self.rate(pattern, processes, TOO_SMALL[pattern], &history),
            best,
        )
    }

    /// Percentage by which the historical policy is slower than the default, with more memory.
    fn lost_with_more(&self, pattern: usize, processes: u32) -> f64 {
        let [history, default] = [Policy::HISTORY, Policy::DEFAULT]
            .map(|p| self.rate(pattern, processes, MORE[pattern], &p.name()));
        percent(history, default)
    }

    fn pattern_table(&self, pattern: usize) -> String {
        let (history, default) = (Policy::HISTORY.name(), Policy::DEFAULT.name());
        let mut t = table(&[
            "processes",
            "seed %",
            "history %",
            "stalls",
            "ms each",
            "default %",
            "KiB/s",
            "best policy",
            "direct KiB/s",
            "history %, 25 % more",
        ]);
        for n in PROCESSES {
            let Some(best) = self.best(pattern, n) else {
                continue;
            };
            let seed = SEED[pattern].iter().find(|s| s.0 == n);
            let of = |policy: &str| self.sample(pattern, n, TOO_SMALL[pattern], policy);
            let count = |s: Option<&PageOrderSample>, name| s.map_or(0, |s| s.counters[name]);
            let stalls = count(of(&history), "stalls");
            let rate = |policy: &str| of(policy).map_or(0.0, |s| s.kib_per_second);
            t.add_row([
                n.to_string(),
                seed.map_or(String::new(), |s| format!("{:+.1}", s.1)),
                format!("{:+.1}", self.lost(pattern, n)),
                stalls.to_string(),
                match stalls {
                    0 => String::new(),
                    n => format!(
                        "{:.1}",
                        count(of(&history), "stall_ns") as f64 / n as f64 / 1e6
                    ),
                },
                format!("{:+.1}", percent(rate(&default), best.kib_per_second)),
                format!("{:.0}", rate(&default)),
                best.policy.clone(),
                format!("{:.0}", rate("direct")),
                format!("{:+.1}", self.lost_with_more(pattern, n)),
            ]);
        }
        format!(
            "\n{}: a cache of {} KiB; 25 % more memory is one of {} KiB\n{t}\n",
            PATTERNS[pattern],
            4 * TOO_SMALL[pattern],
            4 * MORE[pattern]
        )
    }

    fn policy_table(&self, pattern: usize) -> String {
        let header = PROCESSES.map(|n| n.to_string());
        let mut header: Vec<&str> = header.iter().map(String::as_str).collect();
        header.insert(0, "% of the best policy: order, wait, active");
        let mut t = table(&header);
        let first = self.samples_of(pattern, PROCESSES[0], TOO_SMALL[pattern]);
        for policy in first.map(|s| &s.policy).filter(|p| *p != "direct") {
            let mut row = vec![policy.clone()];
            row.extend(PROCESSES.map(|n| {
                let best = self.best(pattern, n).map_or(0.0, |s| s.kib_per_second);
                let rate = self.rate(pattern, n, TOO_SMALL[pattern], policy);
                format!("{:+.1}", percent(rate, best))
            }));
            t.add_row(row);
        }
        format!("\n{}\n{t}\n", PATTERNS[pattern])
    }

    fn counter_table(&self) -> String {
        let mut t = table(&[
            "12 processes",
            "policy",
            "effectiveness %",
            "direct share %",
            "stalls",
            "ms each",
            "failed after progress",
            "read ahead, pages",
            "used %",
            "KiB a read",
            "active pages",
            "CPU ns/KiB",
        ]);
        for pattern in [IN_ORDER, RANDOM] {
            for policy in [Policy::HISTORY, Policy::DEFAULT] {
                let found = self.sample(pattern, SHOWN, TOO_SMALL[pattern], &policy.name());
                let Some(s) = found else { continue };
                let share =
                    |v: Option<f64>| v.map_or(String::new(), |v| format!("{:.1}", 100.0 * v));
                let c = |name| s.counters[name] as f64;
                t.add_row([
                    PATTERNS[pattern].to_owned(),
                    s.policy.clone(),
                    share(s.effectiveness),
                    share(s.direct_share),
                    format!("{}", c("stalls")),
                    match c("stalls") > 0.0 {
                        true => format!("{:.2}", c("stall_ns") / c("stalls") / 1e6),
                        false => String::new(),
                    },
                    format!("{}", c("failed_after_progress")),
                    format!("{}", c("readahead_pages")),
                    share(s.readahead_accuracy),
                    format!("{:.1}", c("pgpgin") / c("read_requests").max(1.0)),
                    format!("{}", c("nr_active_file")),
                    format!("{:.0}", s.cpu_ns_per_kib),
                ]);
            }
        }
        format!(
            "\nSeed: effectiveness about 100 %, more than 40 % scanned directly, in both cases; CPU for each KiB almost the same.\n{t}\n"
        )
    }

    pub fn table(&self) -> String {
        let mut text = format!(
            "Processes that read records of 64 KiB, each from a modelled disk of its own (1 ms and 40 MB/s for a request), in virtual time.\n\
             Half of the cache was read often before, and isn't any more. History is {}, the default {}.\n",
            Policy::HISTORY.name(),
            Policy::DEFAULT.name()
        );
        for pattern in [IN_ORDER, RANDOM] {
            text += &self.pattern_table(pattern);
        }
        for pattern in [IN_ORDER, RANDOM] {
            text += &self.policy_table(pattern);
        }
        for b in &self.breakdowns {
            text += &b.table(true);
        }
        text += &self.counter_table();
        text += "\nFrames' order on a disk that merges (200 us, 200 MB/s, 12 us for each segment), a cache of 256 MiB; the seed's controller was 30 % faster\n";
        text += &self.merging.table(false);
        text
    }

    pub fn charts(&self) -> Vec<Chart> {
        let of = |pattern| {
            let line = |name: &str, policy: &str| {
                let points = PROCESSES.iter().filter_map(|n| {
                    let sample = self.sample(pattern, *n, TOO_SMALL[pattern], policy)?;
                    Some(Point {
                        x: f64::from(*n),
                        y: sample.kib_per_second * 1024.0,
                        interval: None,
                    })
                });
                series(name, points)
            };
            Lines {
                title: PATTERNS[pattern].into(),
                subtitle: "modelled disks, a cache that is too small".into(),
                x: axis("processes", Unit::Count, Scale::Log2),
                y: axis("throughput", Unit::BytesPerSecond, Scale::Linear),
                series: vec![
                    line("default", &Policy::DEFAULT.name()),
                    line("history", &Policy::HISTORY.name()),
                    line("direct", "direct"),
                ],
            }
        };
        charts([of(IN_ORDER), of(RANDOM)])
    }

    /// Expectations from the historical measurement.
    pub fn checks(&self) -> Vec<Check> {
        let mut checks = Vec::new();
        let mut add = |expected: String, figure: String, holds: bool| {
            checks.push(Check {
                expected,
                figure,
                holds,
            });
        };
        let in_between = [4, 8, 12, 16];
        for pattern in [IN_ORDER, RANDOM] {
            let name = PATTERNS[pattern];
            let losses = in_between.map(|n| (n, self.lost(pattern, n)));
            add(
                format!("{name}: history loses 40 to 85 % somewhere from 4 to 16 processes"),
                losses.map(|(n, l)| format!("{n}: {l:+.1} %")).join(", "),
                losses.iter().any(|(_, l)| (-85.0..=-40.0).contains(l)),
            );
            // Losses where the cache is just too small: 25 % more memory isn't enough for more
            // processes.
            let just = losses
                .iter()
                .find(|(_, l)| *l <= -20.0)
                .map_or(SHOWN, |l| l.0);
            let (before, after) = (self.lost(pattern, just), self.lost_with_more(pattern, just));
            add(
                format!("{name}: 25 % more memory cures it where the cache is just too small"),
                format!("{just} processes: {before:+.1} % becomes {after:+.1} %"),
                after >= -5.0,
            );
            let default = Policy::DEFAULT.name();
            let worst = PROCESSES
                .map(|n| {
                    let best = self.best(pattern, n).map_or(0.0, |s| s.kib_per_second);
                    (
                        n,
                        percent(self.rate(pattern, n, TOO_SMALL[pattern], &default), best),
                    )
                })
                .into_iter()
                .min_by(|a, b| a.1.total_cmp(&b.1));
            if let Some((n, worst)) = worst {
                add(
                    format!("{name}: the default is nowhere more than 3 % below the best policy"),
                    format!("{n} processes: {worst:+.1} %"),
                    worst >= -3.0,
                );
            }
        }
        if let Some(random) = self.breakdowns.first() {
            for column in &random.columns {
                let change = column.percent.unwrap_or(0.0);
                let name = &column.name;
                match name.as_str() {
                    "avg-A2G" | "avg-G2I" | "avg-I2D" | "avg-D2C" => add(
                        format!("{name}: within 5 %"),
                        format!("{change:+.2} %"),
                        change.abs() <= 5.0,
                    ),
                    "avg-C2A" => add(
                        format!("{name}: at least doubled"),
                        format!("{change:+.2} %"),
                        change >= 100.0,
                    ),
                    _ => {}
                }
            }
        }
        let [reversed, kept] = self.merging.segments;
        add(
            "frames in order: segments for each request at least 4 times fewer".into(),
            format!("{reversed:.2} and {kept:.2}"),
            kept > 0.0 && reversed >= 4.0 * kept,
        );
        if let Some(d2c) = self.merging.columns.iter().find(|c| c.name == "avg-D2C") {
            let gain = d2c.percent.unwrap_or(0.0);
            add(
                "frames in order: D2C at least 20 % shorter on a disk that merges".into(),
                format!("{gain:+.1} %"),
                gain <= -20.0,
            );
        }
        checks
    }
}

impl Breakdown {
    fn table(&self, with_seed: bool) -> String {
        let mut header = vec![self.name];
        header.extend(self.columns.iter().map(|c| c.name.as_str()));
        let mut t = table(&header);
        let figure = |name: &str, v: f64| match name.starts_with('%') {
            true => format!("{v:.1} %"),
            false => format!("{:.1} us", v / 1e3),
        };
        let names = ["first", "second"];
        for (at, title) in names.iter().enumerate() {
            let value = |c: &pvblk_trace::latency::Column| [c.good, c.bad][at];
            let title = match with_seed {
                true => ["default", "history"][at],
                false => title,
            };
            let cells = self.columns.iter().map(|c| figure(&c.name, value(c)));
            t.add_row(std::iter::once(title.to_owned()).chain(cells));
        }
        let change = self.columns.iter().map(|c| match c.percent {
            Some(p) => format!("{p:+.2} %"),
            None => "-".into(),
        });
        t.add_row(std::iter::once("change".to_owned()).chain(change));
        if with_seed {
            let seed = self.columns.iter().map(|c| {
                let found = SEED_LINE.iter().find(|s| s.0 == c.name);
                found.map_or(String::new(), |s| format!("{:+.2} %", s.1))
            });
            t.add_row(std::iter::once("seed".to_owned()).chain(seed));
        }
        let [a, b] = self.segments;
        format!("\n{t}\nSegments for each request: {a:.2} and {b:.2}\n")
    }
}
