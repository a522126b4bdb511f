//! `pvblk-lab compare`: tells whether results differ, as `ministat` does.

use anyhow::{Context, Result, ensure};
use clap::Args;
use clap::error::ErrorKind;
use pvblk_lab::samples::{Samples, same_machine};
use pvblk_lab::stats::{Comparison, Confidence, HEADER, Summary};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Symbols of the sides, as `ministat` has them.
const SYMBOLS: [char; 7] = ['x', '+', '*', '%', '#', '@', 'O'];

pub const EXAMPLES: &str = "\
A side is one file, or all files up to the next `--`; every other side is compared with the first
one, by Student's t with a pooled variance. That takes three samples on each side. Flags go before
the first `--`.

A file holds one of:
  fio's JSON    one sample of each job and direction; jobs of one name and group ran together and
                are one sample together
  lab results   every array of numbers that `pvblk-lab … --json` wrote
  numbers       one on each line; lines that begin with # are comments

Examples:
  pvblk-lab compare before.json after.json --metric iops
  pvblk-lab compare --metric iops a1.json a2.json a3.json -- b1.json b2.json b3.json
  pvblk-lab compare --confidence 99 --json verdict.json old.txt new.txt";

#[derive(Args, Debug)]
pub struct CompareArgs {
    /// Results: one file for each side, or the files of the first side if there is a `--`
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// The files of the next side; another `--` begins another one
    #[arg(value_name = "MORE", last = true)]
    pub more: Vec<PathBuf>,
    /// Level of confidence in percent: 80, 90, 95, 98, 99 or 99.5
    #[arg(long, value_name = "PERCENT", default_value = "95")]
    pub confidence: Confidence,
    /// Only metrics with these words in their name, such as iops or "depth 32"; may be given several times
    #[arg(long = "metric", value_name = "NAME")]
    pub metrics: Vec<String>,
    /// Write samples, summaries and verdicts here
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
}

/// The files of each side, the reference's first.
fn sides(args: &CompareArgs) -> Result<Vec<Vec<PathBuf>>, clap::Error> {
    let sides: Vec<Vec<PathBuf>> = if args.more.is_empty() {
        args.files.iter().map(|f| vec![f.clone()]).collect()
    } else {
        let more = args.more.split(|f| f == Path::new("--"));
        std::iter::once(args.files.as_slice())
            .chain(more)
            .map(<[PathBuf]>::to_vec)
            .collect()
    };
    let wrong = |kind, text: &str| Err(clap::Error::raw(kind, text));
    if sides.len() < 2 {
        return wrong(
            ErrorKind::TooFewValues,
            "one side alone: name a file to compare it with\n",
        );
    }
    let flag = |f: &&PathBuf| f.as_os_str().as_encoded_bytes().starts_with(b"--");
    if let Some(flag) = sides.iter().flatten().find(flag) {
        let text = format!("{}: flags go before the first --\n", flag.display());
        return wrong(ErrorKind::UnknownArgument, &text);
    }
    if sides.iter().any(Vec::is_empty) {
        return wrong(
            ErrorKind::TooFewValues,
            "a side without files beside a --\n",
        );
    }
    if sides.len() > SYMBOLS.len() {
        return wrong(ErrorKind::TooManyValues, "more than seven sides\n");
    }
    Ok(sides)
}

#[derive(Serialize)]
struct Side {
    files: Vec<String>,
    #[serde(skip)]
    samples: Samples,
    machines: Vec<serde_json::Value>,
}

impl Side {
    fn read(files: &[PathBuf]) -> Result<Side> {
        let samples = Samples::read(files)?;
        Ok(Side {
            files: files.iter().map(|f| f.display().to_string()).collect(),
            machines: samples.machines.clone(),
            samples,
        })
    }
}

/// One side's share of a metric.
#[derive(Serialize)]
struct Part {
    side: usize,
    samples: Vec<f64>,
    summary: Summary,
    /// The comparison with the first side; `None` for that side itself, and for too few samples.
    comparison: Option<Comparison>,
    /// The reason why there is no comparison.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// One metric that at least two sides have, the first among them.
#[derive(Serialize)]
struct Metric {
    name: String,
    parts: Vec<Part>,
}

impl Metric {
    fn of(name: &str, sides: &[Side], confidence: Confidence) -> Option<Metric> {
        let reference = sides.first()?.samples.of(name)?;
        let mut parts = Vec::new();
        for (side, of_side) in sides.iter().enumerate() {
            let Some(samples) = of_side.samples.of(name) else {
                continue;
            };
            let (comparison, reason) = match Comparison::of(reference, samples, confidence) {
                _ if side == 0 => (None, None),
                Ok(comparison) => (Some(comparison), None),
                Err(why) => (None, Some(why.to_string())),
            };
            parts.push(Part {
                side,
                samples: samples.to_vec(),
                summary: Summary::of(samples)?,
                comparison,
                reason,
            });
        }
        (parts.len() > 1).then(|| Metric {
            name: name.to_owned(),
            parts,
        })
    }

    /// The lines that `ministat` prints: two rows and their verdict, then a row and a verdict for each
    /// further side.
    fn lines(&self) -> Vec<String> {
        let mut lines = vec![String::new(), self.name.clone(), HEADER.to_owned()];
        for part in &self.parts {
            lines.push(part.summary.row(SYMBOLS[part.side]));
            lines.extend(part.comparison.map(|c| c.to_string()));
            lines.extend(part.reason.iter().map(|why| format!("No verdict: {why}")));
        }
        lines
    }
}

#[derive(Serialize)]
struct Report {
    confidence_percent: Confidence,
    /// True if the files name machines that differ.
    machines_differ: bool,
    sides: Vec<Side>,
    metrics: Vec<Metric>,
}

pub fn run(args: &CompareArgs) -> Result<()> {
    let sides: Vec<Side> = sides(args)?
        .iter()
        .map(|files| Side::read(files))
        .collect::<Result<_>>()?;
    let wanted = |name: &&str| {
        let has = |words: &String| format!(" {name} ").contains(&format!(" {} ", words.trim()));
        args.metrics.is_empty() || args.metrics.iter().any(has)
    };
    let names: Vec<&str> = metric_names(&sides);
    let metrics: Vec<Metric> = names
        .iter()
        .filter(|n| wanted(n))
        .filter_map(|name| Metric::of(name, &sides, args.confidence))
        .collect();
    ensure!(
        !metrics.is_empty(),
        "no metric to compare; there are: {}",
        describe(&sides)
    );
    let report = Report {
        confidence_percent: args.confidence,
        machines_differ: machines_differ(&sides),
        sides,
        metrics,
    };
    print(&report.text())?;
    for (symbol, alone) in report.left_out(&wanted) {
        eprintln!("pvblk-lab: only in {symbol}: {}", alone.join(", "));
    }
    if let Some(file) = &args.json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(file, text + "\n").with_context(|| format!("writing {}", file.display()))?;
    }
    Ok(())
}

/// Prints `text`; a reader that closes the pipe early is no error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("printing the comparison"),
    }
}

/// All names, in the order of appearance.
fn metric_names(sides: &[Side]) -> Vec<&str> {
    let mut names = Vec::new();
    for (name, _) in sides.iter().flat_map(|s| &s.samples.metrics) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names
}

/// The names of the first few metrics of each side, in one line.
fn describe(sides: &[Side]) -> String {
    const SHOWN: usize = 6;
    let of = |(symbol, side): (char, &Side)| {
        let names: Vec<&str> = metric_names(std::slice::from_ref(side));
        let more = match names.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let names = &names[..names.len().min(SHOWN)];
        format!("in {symbol}: {}{more}", names.join(", "))
    };
    let sides: Vec<String> = SYMBOLS.into_iter().zip(sides).map(of).collect();
    sides.join("; ")
}

fn machines_differ(sides: &[Side]) -> bool {
    let mut machines = sides.iter().flat_map(|s| &s.machines);
    machines
        .next()
        .is_some_and(|first| machines.any(|other| !same_machine(first, other)))
}

impl Report {
    fn text(&self) -> String {
        let side = |(symbol, side): (char, &Side)| format!("{symbol} {}", side.files.join(" "));
        let sides = SYMBOLS.into_iter().zip(&self.sides);
        let mut lines: Vec<String> = sides.map(side).collect();
        if self.machines_differ {
            let text =
                "warning: the files are from different machines; their figures don't compare";
            lines.push(text.to_owned());
        }
        let programs = self.sides.iter().flat_map(|s| &s.samples.programs);
        let mut programs: Vec<&str> = programs.map(String::as_str).collect();
        programs.sort_unstable();
        programs.dedup();
        if programs.len() > 1 {
            let programs = programs.join(", ");
            lines.push(format!(
                "warning: measured by different programs: {programs}"
            ));
        }
        lines.extend(self.metrics.iter().flat_map(Metric::lines));
        lines.join("\n") + "\n"
    }

    /// For each side, the wanted metrics that were not compared.
    fn left_out<'a>(&'a self, wanted: &impl Fn(&&str) -> bool) -> Vec<(char, Vec<&'a str>)> {
        let compared = |name: &str| self.metrics.iter().any(|m| m.name == name);
        let of = |(symbol, side): (char, &'a Side)| {
            let mut names = metric_names(std::slice::from_ref(side));
            names.retain(|name| wanted(name) && !compared(name));
            (symbol, names)
        };
        let sides = SYMBOLS.into_iter().zip(&self.sides);
        sides
            .map(of)
            .filter(|(_, names)| !names.is_empty())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: CompareArgs,
    }

    fn sides_of(words: &[&str]) -> Result<Vec<Vec<PathBuf>>, clap::Error> {
        let line = Line::try_parse_from(std::iter::once(&"compare").chain(words))?;
        sides(&line.args)
    }

    #[test]
    fn sides_are_files_or_lists() {
        for (words, expected) in [
            (&["a", "b", "c"][..], &[&["a"][..], &["b"], &["c"]][..]),
            (&["a", "b", "--", "c"], &[&["a", "b"], &["c"]]),
            (
                &["--metric", "iops", "a", "--", "b", "c", "--", "d"],
                &[&["a"], &["b", "c"], &["d"]],
            ),
        ] {
            let found = sides_of(words).unwrap();
            let expected: Vec<Vec<PathBuf>> = expected
                .iter()
                .map(|side| side.iter().map(PathBuf::from).collect())
                .collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn what_is_no_comparison_is_refused() {
        for words in [
            &[][..],
            &["a"],
            &["a", "--", "b", "--", "--", "c"],
            &["a", "b", "--confidence", "97"],
            &["a", "--", "b", "--metric", "iops"],
            &["1", "2", "3", "4", "5", "6", "7", "8"],
        ] {
            assert!(sides_of(words).is_err(), "{words:?}");
        }
    }
}
