//! Tables and expected ratios.

use super::{MdCell, MdResult, Who};
use crate::path::median;
use crate::stats::{Confidence, PairRatio};
use crate::verdict::{self, Check, table};

/// Least expected ratio of our rate to md's, for 4 KiB random writes at this depth.
const RANDOM: (usize, f64) = (32, 5.0);
/// Least expected ratio for 128 KiB writes at each depth.
const LARGE: f64 = 3.0;

impl MdCell {
    fn rates(&self, who: Who) -> &[f64] {
        self.of(who).map_or(&[], |s| &s.rate)
    }

    fn ratio(&self, ours: Who, md: Who) -> Option<PairRatio> {
        let (ours, md) = (self.rates(ours), self.rates(md));
        PairRatio::of(ours, md, Confidence::default()).ok()
    }

    fn ratio_text(&self, ours: Who, md: Who) -> String {
        verdict::interval(self.ratio(ours, md))
    }

    /// Median ratio of md's CPU time for a write to ours.
    fn cpu_ratio(&self, ours: Who, md: Who) -> String {
        let of = |who| self.of(who).map_or(&[][..], |s| &s.cpu_us);
        verdict::interval(PairRatio::of(of(md), of(ours), Confidence::default()).ok())
    }

    fn megabytes(&self, who: Who) -> String {
        format!(
            "{:.0}",
            median(self.rates(who)) * self.kind.block as f64 / 1e6
        )
    }

    fn cpu(&self, who: Who) -> String {
        let us = self.of(who).map_or(0.0, |s| median(&s.cpu_us));
        format!("{us:.2}")
    }

    fn moved(&self, who: Who) -> String {
        let moved = self.of(who).map_or(0.0, |s| median(&s.moved));
        format!("{moved:.2}")
    }

    fn target(&self) -> Option<f64> {
        match (self.kind.block, self.kind.random, self.depth) {
            (4096, true, depth) if depth == RANDOM.0 => Some(RANDOM.1),
            (131_072, false, _) => Some(LARGE),
            _ => None,
        }
    }
}

impl MdResult {
    pub fn table(&self) -> String {
        let mut rates = table(&[
            "writes",
            "in flight",
            "md k/s",
            "md MB/s",
            "direct",
            "queue",
            "direct / md",
            "queue / md",
            "md / md",
        ]);
        let mut plain = table(&[
            "writes",
            "in flight",
            "md MB/s",
            "direct",
            "queue",
            "direct / md",
            "queue / md",
        ]);
        let mut cpu = table(&[
            "writes",
            "in flight",
            "md",
            "md, no copy",
            "ram disk, no md",
            "direct",
            "queue",
            "direct, no copy",
            "queue, no copy",
            "md / direct",
            "md / queue",
        ]);
        let mut moved = table(&[
            "writes",
            "in flight",
            "direct",
            "queue",
            "direct, no copy",
            "queue, no copy",
        ]);
        for c in &self.cells {
            let names = [c.kind.name.to_owned(), c.depth.to_string()];
            let thousands = format!("{:.1}", median(c.rates(Who::Md)) / 1e3);
            let [md, direct, queue] = [Who::Md, Who::Direct, Who::Queue].map(|w| c.megabytes(w));
            let ratios = [
                c.ratio_text(Who::Direct, Who::Md),
                c.ratio_text(Who::Queue, Who::Md),
                c.ratio_text(Who::MdAgain, Who::Md),
            ];
            let figures = [thousands, md, direct, queue];
            rates.add_row(names.iter().chain(&figures).chain(&ratios));
            let free = [Who::MdSkipCopy, Who::DirectStable, Who::QueueStable];
            let figures = free.map(|w| c.megabytes(w));
            let ratios = [free[1], free[2]].map(|w| c.ratio_text(w, Who::MdSkipCopy));
            plain.add_row(names.iter().chain(&figures).chain(&ratios));
            let all = [
                Who::Md,
                Who::MdSkipCopy,
                Who::RamDisk,
                Who::Direct,
                Who::Queue,
                Who::DirectStable,
                Who::QueueStable,
            ];
            let ratios = [Who::Direct, Who::Queue].map(|w| c.cpu_ratio(w, Who::Md));
            cpu.add_row(names.iter().chain(&all.map(|w| c.cpu(w))).chain(&ratios));
            let ours = [Who::Direct, Who::Queue, Who::DirectStable, Who::QueueStable];
            moved.add_row(names.iter().chain(&ours.map(|w| c.moved(w))));
        }
        let guest: Vec<&str> = self.guest.lines().collect();
        format!(
            "RAID-5 of four in memory, chunks of 64 KiB, no log, {} MiB are written; both on CPU {} in turns; {} and {} stripe heads. {}, Linux {}.\n\
             md in user-mode Linux: {}. fio {}\nSectors with wrong parity by md's check afterwards: {}\n\n\
             MB/s, with copies; ratios of pairs, median and 95 % interval\n{rates}\n\n\
             MB/s, without copies: md's skip_copy, our stable buffers\n{plain}\n\n\
             CPU of each write, microseconds\n{cpu}\n\n\
             Bytes that our array moves for each byte written, without what its members do\n{moved}",
            self.span,
            self.cpu,
            self.stripes[0],
            self.stripes[1],
            self.machine.cpu,
            self.machine.kernel,
            guest.join("; "),
            self.fio,
            self.mismatches,
        )
    }

    /// Expectations of the experiment.
    pub fn checks(&self) -> Vec<Check> {
        let mut checks = vec![Check {
            expected: "md kept parity right".to_owned(),
            figure: format!("{} sectors are wrong", self.mismatches),
            holds: self.mismatches == 0,
        }];
        for c in &self.cells {
            let Some(target) = c.target() else { continue };
            for (way, who) in [("direct", Who::Direct), ("queue", Who::Queue)] {
                let Some(ratio) = c.ratio(who, Who::Md) else {
                    continue;
                };
                checks.push(Check {
                    expected: format!("{}, {way}: {target} x md", MdCell::name(&c.kind, c.depth)),
                    figure: c.ratio_text(who, Who::Md),
                    holds: ratio.median >= target,
                });
            }
        }
        checks
    }
}
