//! Tables, plots and checks of `pvblk-lab rings`.

use super::{RingsPoint, RingsResult, SHAPES};
use crate::bed::{Pattern, SSD_IOPS, Sample, rates, typical};
use crate::verdict::{Check, axis, charts, median_ratio, ratio, series, table};
use comfy_table::Table;
use pvblk_bench::plot::{Chart, Lines, Point, Scale, Unit};

/// The historical measurement (seed 000), 4 KiB random reads: threads, and thousands of requests a
/// second with 1 page and 8.
const SEED: [(u32, u32, u32); 6] = [
    (1, 19, 19),
    (4, 89, 89),
    (8, 149, 149),
    (16, 131, 198),
    (32, 127, 208),
    (64, 132, 209),
];

impl RingsPoint {
    fn in_flight(&self) -> u32 {
        self.load.threads * self.load.depth
    }

    /// Ratio of the rate with 8 pages to that with 1 page, median of pairs.
    fn gain(&self) -> f64 {
        median_ratio(&rates(&self.eight_pages), &rates(&self.one_page))
    }

    fn gain_text(&self) -> String {
        let (one, eight) = (rates(&self.one_page), rates(&self.eight_pages));
        ratio(&eight, &one, (&eight, &rates(&self.eight_again)))
    }

    fn control(&self) -> f64 {
        median_ratio(&rates(&self.eight_pages), &rates(&self.eight_again))
    }
}

/// A number of bytes with a binary unit.
fn size(bytes: u32) -> String {
    match bytes {
        b if b >= 1 << 20 => format!("{} MiB", b >> 20),
        b if b >= 1024 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

impl RingsResult {
    fn k(&self, samples: &[Sample]) -> f64 {
        typical(samples, |s| s.iops) * self.slower / 1000.0
    }

    fn random_table(&self, pattern: Pattern) -> Table {
        let mut t = table(&[
            "threads",
            "in flight",
            "seed 1p/8p k/s",
            "1 page k/s",
            "8 pages k/s",
            "8p/1p (95 %)",
            "8p/8p",
            "p50, p99 us 1p",
            "8p",
        ]);
        for p in self.random.iter().filter(|p| p.load.pattern == pattern) {
            let seed = SEED
                .iter()
                .find(|s| s.0 == p.load.threads && pattern == Pattern::RandomRead)
                .map_or(String::new(), |s| format!("{} / {}", s.1, s.2));
            let times = |s: &[Sample]| {
                let at = |f| typical(s, f) / self.slower;
                format!("{:.0}, {:.0}", at(|s| s.p50_us), at(|s| s.p99_us))
            };
            t.add_row([
                p.load.threads.to_string(),
                p.in_flight().to_string(),
                seed,
                format!("{:.1}", self.k(&p.one_page)),
                format!("{:.1}", self.k(&p.eight_pages)),
                p.gain_text(),
                format!("{:.2}", p.control()),
                times(&p.one_page),
                times(&p.eight_pages),
            ]);
        }
        t
    }

    fn sizes_table(&self) -> Table {
        let mut t = table(&[
            "block",
            "1 page k/s",
            "8 pages k/s",
            "8 pages MB/s",
            "8p/1p (95 %)",
            "8p/8p",
        ]);
        for p in &self.sizes {
            t.add_row([
                size(p.load.block),
                format!("{:.2}", self.k(&p.one_page)),
                format!("{:.2}", self.k(&p.eight_pages)),
                format!("{:.0}", typical(&p.eight_pages, |s| s.mb_s) * self.slower),
                p.gain_text(),
                format!("{:.2}", p.control()),
            ]);
        }
        t
    }

    fn sequential_table(&self, points: &[RingsPoint], shape: (u32, u32)) -> Table {
        let mut t = table(&[
            "block",
            "1p MB/s",
            "8p MB/s",
            "8p/1p",
            "1p rrqm/s",
            "8p rrqm/s",
            "1p rareq-sz",
            "8p rareq-sz",
            "1p aqu-sz",
            "8p aqu-sz",
            "1p in-flight",
            "8p in-flight",
        ]);
        let mine = |p: &&RingsPoint| (p.load.threads, p.load.depth) == shape;
        for p in points.iter().filter(mine) {
            let both =
                |f: fn(&Sample) -> f64| (typical(&p.one_page, f), typical(&p.eight_pages, f));
            let (one, eight) = both(|s| s.mb_s);
            let merged = both(|s| s.merged_per_s);
            let areq = both(|s| s.areq_kib);
            let queue = both(|s| s.aqu_sz);
            let flight = both(|s| s.in_flight);
            t.add_row([
                size(p.load.block),
                format!("{:.0}", one * self.slower),
                format!("{:.0}", eight * self.slower),
                format!("{:.2}", p.gain()),
                format!("{:.0}", merged.0 * self.slower),
                format!("{:.0}", merged.1 * self.slower),
                format!("{:.1}", areq.0),
                format!("{:.1}", areq.1),
                format!("{:.0}", queue.0),
                format!("{:.0}", queue.1),
                format!("{:.1}", flight.0),
                format!("{:.1}", flight.1),
            ]);
        }
        t
    }

    pub fn table(&self) -> String {
        let clock = if self.slower == 1.0 {
            "at its full speed".to_owned()
        } else {
            format!(
                "its clock slowed by {}; all figures are those of the full speed",
                self.slower
            )
        };
        let mut text = format!(
            "Modelled device (210 us, 209k/s, 2.4 GB/s at most), {clock}. {} CPUs. n.p.: no difference proven.\n\n\
             4 KiB random reads\n{}\n\n4 KiB random writes\n{}\n\nRandom reads, 32 threads x 4\n{}\n",
            self.machine.cpus,
            self.random_table(Pattern::RandomRead),
            self.random_table(Pattern::RandomWrite),
            self.sizes_table(),
        );
        for (points, policy) in [
            (
                &self.sequential,
                "submitted one by one, merging beyond the limit in flight (ours)",
            ),
            (
                &self.batched,
                "submitted in batches, merging in the batch (ours)",
            ),
            (
                &self.elevator,
                "submitted one by one, merging what waits for the ring (the elevator's way)",
            ),
        ] {
            for shape in SHAPES {
                text += &format!(
                    "\nSequential reads, {} threads x {}, {policy}\n{}\n",
                    shape.0,
                    shape.1,
                    self.sequential_table(points, shape)
                );
            }
        }
        text
    }

    pub fn charts(&self) -> Vec<Chart> {
        let reads = || {
            let points = self.random.iter();
            points.filter(|p| p.load.pattern == Pattern::RandomRead)
        };
        let rates_of = |of: fn(&RingsPoint) -> &Vec<Sample>| {
            reads().filter_map(move |p| {
                let all: Vec<f64> = rates(of(p)).iter().map(|r| r * self.slower).collect();
                Point::spread(f64::from(p.in_flight()), &all)
            })
        };
        let random = Lines {
            title: "4 KiB random reads: rings of 1 and 8 pages".into(),
            subtitle: "modelled device: 210 µs, 209k/s at most; whiskers: least and greatest round"
                .into(),
            x: axis("requests in flight", Unit::Count, Scale::Log2),
            y: axis("requests a second", Unit::Count, Scale::Linear),
            series: vec![
                series("8 pages", rates_of(|p| &p.eight_pages)),
                series("1 page", rates_of(|p| &p.one_page)),
            ],
        };
        let gains = |points: &[RingsPoint], shape: (u32, u32)| {
            let points = points.iter();
            let of = points.filter(|p| (p.load.threads, p.load.depth) == shape);
            let point = |p: &RingsPoint| Point {
                x: f64::from(p.load.block),
                y: p.gain(),
                interval: None,
            };
            of.map(point).collect::<Vec<_>>()
        };
        let sequential = Lines {
            title: "Sequential reads: 8 pages against 1 page".into(),
            subtitle:
                "modelled device; ours merges beyond the limit in flight, the elevator what waits for the ring"
                    .into(),
            x: axis("block size", Unit::Bytes, Scale::Log2),
            y: axis(
                "rate of 8 pages / rate of 1 page",
                Unit::Plain,
                Scale::Linear,
            ),
            series: vec![
                series("ours, 8 x 32", gains(&self.sequential, SHAPES[0])),
                series("ours, 32 x 8", gains(&self.sequential, SHAPES[1])),
                series("elevator, 8 x 32", gains(&self.elevator, SHAPES[0])),
                series("elevator, 32 x 8", gains(&self.elevator, SHAPES[1])),
            ],
        };
        charts([random, sequential])
    }

    /// Expectations from the historical measurement (seed 000).
    pub fn checks(&self) -> Vec<Check> {
        let mut checks = Vec::new();
        for p in &self.random {
            let name = match p.load.pattern {
                Pattern::RandomWrite => "random writes",
                _ => "random reads",
            };
            let (n, gain) = (p.in_flight(), p.gain());
            let what = |text: &str| format!("{name}, {n} in flight: {text}");
            if n <= 32 {
                checks.push(Check {
                    expected: what("1 and 8 pages within 5 %"),
                    figure: format!("{gain:.3}"),
                    holds: (gain - 1.0).abs() <= 0.05,
                });
                continue;
            }
            checks.push(Check {
                expected: what("8 pages at least 1.30 x 1 page"),
                figure: format!("{gain:.3}"),
                holds: gain >= 1.30,
            });
            let one = self.k(&p.one_page);
            checks.push(Check {
                expected: what("1 page keeps 145k/s"),
                figure: format!("{one:.1}k"),
                holds: one >= 145.0,
            });
            if n >= 128 {
                let share = self.k(&p.eight_pages) * 1000.0 / SSD_IOPS;
                checks.push(Check {
                    expected: what("8 pages reach 95 % of the device"),
                    figure: format!("{:.1} %", share * 100.0),
                    holds: share >= 0.95,
                });
            }
        }
        for p in self.sizes.iter().filter(|p| p.load.block >= 16384) {
            let gain = p.gain();
            checks.push(Check {
                expected: format!("random reads of {}: within 5 %", size(p.load.block)),
                figure: format!("{gain:.3}"),
                holds: (gain - 1.0).abs() <= 0.05,
            });
        }
        for p in self.sequential.iter().chain(&self.batched) {
            let gain = p.gain();
            checks.push(Check {
                expected: format!(
                    "sequential reads of {}{}, {} x {}: 8 pages at least 0.98 x 1 page",
                    size(p.load.block),
                    if p.load.batched { " in batches" } else { "" },
                    p.load.threads,
                    p.load.depth
                ),
                figure: format!("{gain:.3}"),
                holds: gain >= 0.98,
            });
        }
        checks.extend(
            self.sequential
                .iter()
                .filter_map(|p| self.beside_elevator(p)),
        );
        checks
    }

    /// Small sequential reads one by one are as fast on both rings as by the elevator on the better one.
    fn beside_elevator(&self, p: &RingsPoint) -> Option<Check> {
        let same = |e: &&RingsPoint| {
            let key = |p: &RingsPoint| (p.load.threads, p.load.depth, p.load.block);
            key(e) == key(p) && p.load.block <= 16384
        };
        let elevator = self.elevator.iter().find(same)?;
        let rate = |samples: &[Sample]| typical(samples, |s| s.mb_s);
        let best = rate(&elevator.one_page).max(rate(&elevator.eight_pages));
        let share = rate(&p.one_page).min(rate(&p.eight_pages)) / best;
        Some(Check {
            expected: format!(
                "sequential reads of {}, {} x {}: both rings at least 0.95 x the elevator's best",
                size(p.load.block),
                p.load.threads,
                p.load.depth
            ),
            figure: format!("{share:.3}"),
            holds: share >= 0.95,
        })
    }
}
