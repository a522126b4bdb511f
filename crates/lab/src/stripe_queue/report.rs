//! Tables and checks of `pvblk-lab stripe-queue`.

use super::load::{Phase, READ_WINDOW, StripeCell, StripeSample, WRITE_WINDOW};
use super::speed::Speeds;
use super::{Mix, StripePoint, StripeQueueResult, disk};
use crate::path::median;
use crate::stats::{Confidence, PairRatio};
use crate::verdict::{Check, axis, charts, median_ratio, ratio, series, table};
use pvblk_bench::plot::{Chart, Lines, Point, Scale, Unit};

/// The historical measurement (seed 004): by block (4 KiB, 128 KiB) and threads (1, 2, 4, 8), the gain of the
/// stripe queue in rate, CPU and CPU efficiency, in percent.
type SeedTable = [[i32; 3]; 8];
#[rustfmt::skip]
const SEED: [(Phase, SeedTable); 4] = [
    (Phase::SequentialRead, [
        [0, 4, -3], [-38, -33, -8], [-35, -30, -8], [-14, -11, -3], [2, 1, 2], [-11, -10, -2], [-7, -6, -1], [-9, -6, -4],
    ]),
    (Phase::RandomRead, [
        [-9, 15, -21], [-1, -30, 42], [-14, -22, 10], [-21, -28, 9], [-8, -4, -4], [-13, -13, 0], [-15, -15, 0], [-13, -13, 0],
    ]),
    (Phase::SequentialWrite, [
        [25, 11, 12], [41, 42, -1], [40, 18, 19], [15, -5, 21], [65, 57, 4], [46, 36, 8], [24, -7, 34], [28, -15, 51],
    ]),
    (Phase::RandomWrite, [
        [2, -8, 11], [-1, -19, 21], [2, 2, 0], [-1, -28, 37], [2, -3, 5], [3, -4, 7], [4, -3, 8], [5, -9, 15],
    ]),
];

fn seed(cell: &StripeCell) -> Option<[i32; 3]> {
    let table = SEED.iter().find(|s| s.0 == cell.phase)?.1;
    let at = if cell.block > 4096 { 4 } else { 0 } + cell.threads.ilog2() as usize;
    table.get(at).copied()
}

fn rates(samples: &[StripeSample]) -> Vec<f64> {
    samples.iter().map(|s| s.mb_per_second).collect()
}

fn typical(samples: &[StripeSample], f: fn(&StripeSample) -> f64) -> f64 {
    median(&samples.iter().map(f).collect::<Vec<_>>())
}

fn percent(ratio: f64) -> String {
    format!("{:+.0}", 100.0 * (ratio - 1.0))
}

impl StripePoint {
    /// Gain of the stripe queue in percent: rate, CPU, efficiency.
    fn gains(&self) -> [f64; 3] {
        let rate = median_ratio(&rates(&self.queue), &rates(&self.direct));
        let cpu = |s: &StripeSample| s.cpu_percent;
        let cpu = typical(&self.queue, cpu) / typical(&self.direct, cpu).max(1e-9);
        [rate, cpu, rate / cpu.max(1e-9)]
    }

    /// The rate where prereads are free, by the faster of both ways.
    fn bound(&self) -> Option<f64> {
        let free = [&self.direct_free, &self.queue_free].map(|s| median(&rates(s)));
        (!self.direct_free.is_empty()).then(|| free[0].max(free[1]))
    }

    fn interval(&self) -> Option<PairRatio> {
        PairRatio::of(
            &rates(&self.queue),
            &rates(&self.direct),
            Confidence::default(),
        )
        .ok()
    }

    /// The ratio in words. There is no control in virtual time, where samples of the same are
    /// equal.
    fn ratio(&self) -> String {
        match (self.direct_again.is_empty(), self.interval()) {
            (true, Some(r)) => format!("{:.2} ({:.2} to {:.2})", r.median, r.low, r.high),
            _ => ratio(
                &rates(&self.queue),
                &rates(&self.direct),
                (&rates(&self.direct_again), &rates(&self.direct)),
            ),
        }
    }

    fn name(&self, members: &str) -> String {
        let ppl = if self.ppl { ", PPL" } else { "" };
        format!("{members}{ppl}, {}", self.cell.name())
    }

    fn row(&self, with_ppl: Option<&StripePoint>) -> Vec<String> {
        let [rate, cpu, efficiency] = self.gains().map(percent);
        let seed = seed(&self.cell).map_or(String::new(), |[r, c, e]| format!("{r:+} {c:+} {e:+}"));
        let mut row = vec![
            format!("{} x {}", self.cell.block >> 10, self.cell.threads),
            format!("{:.1}", median(&rates(&self.direct))),
            format!("{:.1}", median(&rates(&self.queue))),
            seed,
            format!("{rate} {cpu} {efficiency}"),
            self.ratio(),
            format!(
                "{:.1} {:.1}",
                typical(&self.direct, |s| s.cpu_percent),
                typical(&self.queue, |s| s.cpu_percent)
            ),
        ];
        if self.cell.phase.writes() {
            let prereads = |s: &[StripeSample]| typical(s, |s| s.prereads_per_mib);
            let edges = |s: &[StripeSample]| typical(s, |s| s.prereads_at_edges as f64);
            let whole = |s: &[StripeSample]| typical(s, |s| s.whole_percent);
            row.push(format!(
                "{:.2} {:.3}",
                prereads(&self.direct),
                prereads(&self.queue)
            ));
            row.push(format!("{} {}", edges(&self.direct), edges(&self.queue)));
            row.push(format!(
                "{:.1} {:.1}",
                whole(&self.direct),
                whole(&self.queue)
            ));
            row.push(self.bound().map_or(String::new(), |bound| {
                format!("{:.1} ({:.2})", bound, median(&rates(&self.queue)) / bound)
            }));
            row.push(with_ppl.map_or(String::new(), |p| {
                format!(
                    "{:.1} {:.1}",
                    median(&rates(&p.direct)),
                    median(&rates(&p.queue))
                )
            }));
        }
        row
    }
}

fn tables(points: &[StripePoint]) -> String {
    let mut text = String::new();
    for phase in Phase::ALL {
        let mut header = vec![
            "KiB x threads",
            "direct MB/s",
            "queue",
            "seed: rate CPU eff %",
            "ours",
            "queue/direct (95 %)",
            "CPU % d q",
        ];
        if phase.writes() {
            header.extend([
                "prereads/MiB d q",
                "at edges",
                "whole % d q",
                "prereads free (share)",
                "PPL MB/s d q",
            ]);
        }
        let mut t = table(&header);
        for p in points.iter().filter(|p| p.cell.phase == phase && !p.ppl) {
            t.add_row(p.row(points.iter().find(|o| o.ppl && o.cell == p.cell)));
        }
        text += &format!("\n{}\n{t}\n", phase.name());
    }
    text
}

impl Mix {
    fn part(samples: &[[f64; 2]], i: usize) -> Vec<f64> {
        samples.iter().map(|s| s[i]).collect()
    }

    fn kept(&self) -> f64 {
        median_ratio(&Mix::part(&self.queue, 0), &Mix::part(&self.direct, 0))
    }
}

fn speed_tables(speeds: &Speeds) -> String {
    let mut t = table(&[
        "one thread",
        "in flight",
        "PPL",
        "direct k/s",
        "queue k/s",
        "queue GB/s",
        "queue/direct (95 %)",
    ]);
    for s in &speeds.one {
        let queue = median(&s.queue);
        t.add_row([
            s.shape.name.to_owned(),
            s.depth.to_string(),
            if s.ppl { "on" } else { "off" }.into(),
            format!("{:.1}", median(&s.direct) / 1e3),
            format!("{:.1}", queue / 1e3),
            format!("{:.2}", queue * s.shape.block as f64 / 1e9),
            ratio(&s.queue, &s.direct, (&s.direct_again, &s.direct)),
        ]);
    }
    let mut text = format!("\nMembers in memory\n{t}\n");
    let mut t = table(&[
        "two threads",
        "way",
        "one k/s",
        "two, one array",
        "two arrays",
        "one array/two arrays",
    ]);
    for s in &speeds.two {
        t.add_row([
            s.shape.name.to_owned(),
            if s.by_queue { "queue" } else { "direct" }.into(),
            format!("{:.1}", median(&s.one) / 1e3),
            format!("{:.1}", median(&s.shared) / 1e3),
            format!("{:.1}", median(&s.apart) / 1e3),
            format!("{:.2}", median_ratio(&s.shared, &s.apart)),
        ]);
    }
    text += &format!("\n{t}\n");
    text
}

impl StripeQueueResult {
    pub fn table(&self) -> String {
        let mut text = format!(
            "Four members, chunks of 64 KiB, {} MiB of files; a thread has {} KiB in flight where it writes, {} KiB where it reads in order, one \
             request where it reads anywhere.\nSeed: 2048 MB on a 1.2 GHz iop348 with four SATA disks, ext2.\n",
            self.bytes >> 20,
            WRITE_WINDOW >> 10,
            READ_WINDOW >> 10
        );
        if !self.modelled.is_empty() {
            text += &format!(
                "\n{}\nCPU %: real CPU time per modelled time.\n",
                disk::MODEL
            );
            text += &tables(&self.modelled);
        }
        if !self.mixes.is_empty() {
            let mut t = table(&[
                "reads",
                "beside writes",
                "reads MB/s d q",
                "kept",
                "writes MB/s d q",
            ]);
            for m in &self.mixes {
                let rate = |s: &[[f64; 2]], i| median(&Mix::part(s, i));
                t.add_row([
                    m.reader.to_owned(),
                    m.writer.to_owned(),
                    format!("{:.2} {:.2}", rate(&m.direct, 0), rate(&m.queue, 0)),
                    format!("{:.3}", m.kept()),
                    format!("{:.2} {:.2}", rate(&m.direct, 1), rate(&m.queue, 1)),
                ]);
            }
            text += &format!("\nReads beside a writer, modelled disks\n{t}\n");
        }
        if !self.sweep.is_empty() {
            let mut t = table(&[
                "stripes",
                "threads",
                "direct MB/s",
                "queue",
                "gain %",
                "prereads/MiB d q",
            ]);
            for s in &self.sweep {
                let p = &s.point;
                let prereads = |s: &[StripeSample]| typical(s, |s| s.prereads_per_mib);
                t.add_row([
                    s.stripes.to_string(),
                    p.cell.threads.to_string(),
                    format!("{:.1}", median(&rates(&p.direct))),
                    format!("{:.1}", median(&rates(&p.queue))),
                    percent(p.gains()[0]),
                    format!("{:.2} {:.3}", prereads(&p.direct), prereads(&p.queue)),
                ]);
            }
            text += &format!(
                "\nSequential writes of 4 KiB by the size of the stripe cache, modelled disks\n{t}\n"
            );
        }
        if !self.files.is_empty() {
            text += &format!("\nFiles, on this machine's time\n{}", tables(&self.files));
        }
        if let Some(speeds) = &self.memory {
            text += &speed_tables(speeds);
        }
        text
    }

    pub fn charts(&self) -> Vec<Chart> {
        let line = |threads: usize, of: fn(&StripePoint) -> &Vec<StripeSample>| {
            let sweep = self.sweep.iter();
            let sweep = sweep.filter(move |s| s.point.cell.threads == threads);
            sweep.filter_map(move |s| {
                let all: Vec<f64> = rates(of(&s.point)).iter().map(|r| r * 1e6).collect();
                Point::spread(s.stripes as f64, &all)
            })
        };
        let mut all = Vec::new();
        for threads in [1, 4, 8] {
            let direct = series("direct", line(threads, |p| &p.direct));
            let queue = series("stripe queue", line(threads, |p| &p.queue));
            if direct.points.is_empty() {
                continue;
            }
            let many = if threads == 1 { "thread" } else { "threads" };
            all.push(Lines {
                title: format!(
                    "Sequential writes of 4 KiB by {threads} {many}, by the size of the stripe cache"
                ),
                subtitle: disk::MODEL.into(),
                x: axis("stripes", Unit::Count, Scale::Log2),
                y: axis("throughput", Unit::BytesPerSecond, Scale::Linear),
                series: vec![queue, direct],
            });
        }
        charts(all)
    }

    /// Expectations from the historical measurement (seed 004).
    pub fn checks(&self) -> Vec<Check> {
        let mut checks = Vec::new();
        let mut add = |expected: String, figure: f64, holds: bool| {
            checks.push(Check {
                expected,
                figure: format!("{figure:.3}"),
                holds,
            });
        };
        for (members, points) in [("modelled", &self.modelled), ("files", &self.files)] {
            for p in points {
                let name = p.name(members);
                if !p.cell.phase.writes() {
                    let Some(interval) = p.interval() else {
                        continue;
                    };
                    add(
                        format!("{name}: lower end of the interval above 0.98"),
                        interval.low,
                        interval.low > 0.98,
                    );
                    continue;
                }
                let gain = p.gains()[0];
                add(
                    format!("{name}: at least 0.98 of direct"),
                    gain,
                    gain >= 0.98,
                );
                if p.cell.phase == Phase::SequentialWrite {
                    let reads = typical(&p.queue, |s| s.prereads_per_mib);
                    add(
                        format!("{name}: prereads per MiB inside of streams at most 0.01"),
                        reads,
                        reads <= 0.01,
                    );
                    if let Some(bound) = p.bound() {
                        let share = median(&rates(&p.queue)) / bound;
                        add(
                            format!("{name}: at least 0.9 of the rate with free prereads"),
                            share,
                            share >= 0.9,
                        );
                    }
                }
            }
        }
        for m in &self.mixes {
            let kept = m.kept();
            add(
                format!(
                    "{} reads beside {} writes: at least 0.95",
                    m.reader, m.writer
                ),
                kept,
                kept >= 0.95,
            );
        }
        for s in self.memory.iter().flat_map(|m| &m.two) {
            let share = median_ratio(&s.shared, &s.apart);
            let way = if s.by_queue { "queue" } else { "direct" };
            add(
                format!(
                    "two threads, {}, {way}: at least 0.85 of two arrays",
                    s.shape.name
                ),
                share,
                share >= 0.85,
            );
        }
        checks
    }
}
