//! The table of `pvblk-lab choices`, and the figures that it expects.

use super::{ChoicesResult, ChoicesSamples, SETTINGS, Setting};
use crate::path::median;
use crate::stats::{Confidence, PairRatio};
use crate::verdict::{self, Check};

/// The part of the best fixed setting's rate that choices have to reach.
const ASKED: f64 = 0.95;

/// One load: its samples in the order of [`SETTINGS`].
struct Cell<'a>(&'a [ChoicesSamples]);

impl Cell<'_> {
    fn chosen(&self) -> &ChoicesSamples {
        &self.0[0]
    }

    /// The fixed setting with the greatest rate of those that `kind` lets pass.
    fn best(&self, kind: fn(&Setting) -> bool) -> Option<&ChoicesSamples> {
        let all = SETTINGS.iter().zip(self.0);
        let fixed = all.filter(|(setting, _)| kind(setting));
        let best = fixed.max_by(|a, b| median(&a.1.iops).total_cmp(&median(&b.1.iops)));
        best.map(|(_, samples)| samples)
    }

    fn against(&self, other: &ChoicesSamples) -> Option<PairRatio> {
        PairRatio::of(&self.chosen().iops, &other.iops, Confidence::default()).ok()
    }

    fn name(&self) -> String {
        let it = self.chosen();
        let client = if it.polls { "polls" } else { "sleeps" };
        format!("{}, {} in flight, client {client}", it.volume, it.depth)
    }
}

fn spins(setting: &Setting) -> bool {
    matches!(setting, Setting::Spin(_))
}

fn pulls(setting: &Setting) -> bool {
    matches!(setting, Setting::Pull(_))
}

impl ChoicesResult {
    fn cells(&self) -> impl Iterator<Item = Cell<'_>> {
        self.samples.chunks_exact(SETTINGS.len()).map(Cell)
    }

    pub fn table(&self) -> String {
        let mut t = verdict::table(&[
            "load",
            "chosen, k/s",
            "CPU µs/request",
            "best time to poll",
            "chosen / it",
            "its CPU",
            "best number to take",
            "chosen / it",
            "its CPU",
            "chosen / chosen again",
        ]);
        for cell in self.cells() {
            let of = |best: Option<&ChoicesSamples>| match best {
                Some(best) => [
                    best.setting.clone(),
                    verdict::interval(cell.against(best)),
                    format!("{:.2}", median(&best.cpu_us)),
                ],
                None => Default::default(),
            };
            let chosen = cell.chosen();
            let mut row = vec![
                cell.name(),
                format!("{:.1}", median(&chosen.iops) / 1e3),
                format!("{:.2}", median(&chosen.cpu_us)),
            ];
            row.extend(of(cell.best(spins)));
            row.extend(of(cell.best(pulls)));
            row.push(verdict::interval(cell.against(&cell.0[1])));
            t.add_row(row);
        }
        format!(
            "4 KiB random reads over {}, client and server on a CPU each, {} ({} CPUs), Linux {}\n{t}\n\
             The best of several fixed settings is chosen by the rates themselves, so its ratio is somewhat too small.",
            self.over.name(),
            self.machine.cpu,
            self.machine.cpus,
            self.machine.kernel,
        )
    }

    /// Expectations: no load has less than 0.95 times the rate of the best fixed setting, by the upper end of the interval.
    pub fn checks(&self) -> Vec<Check> {
        let check = |cell: Cell<'_>| {
            let ratio = cell
                .best(Setting::is_fixed)
                .and_then(|best| cell.against(best));
            Check {
                expected: format!("{}: not proven below {ASKED} of the best", cell.name()),
                holds: ratio.is_some_and(|r| r.high >= ASKED),
                figure: verdict::interval(ratio),
            }
        };
        self.cells().map(check).collect()
    }
}
