//! `pvblk-lab compare` beside `ministat` on the same random samples, and on the output of fio.

use fastrand::Rng;
use pvblk_e2e::daemon::lab;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{Finished, need, run, run_ok};
use pvblk_e2e::{Stop, full, run_all};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tempfile::TempDir;

const LEVELS: [&str; 6] = ["80", "90", "95", "98", "99", "99.5"];

fn main() -> ExitCode {
    run_all(&[
        (
            "figures_are_ministats_at_every_size_and_confidence",
            every_size,
        ),
        (
            "figures_are_ministats_for_random_samples",
            random_comparisons,
        ),
        ("a_wrong_figure_would_be_found", wrong_figures),
        ("fio_json_is_read", fio_json),
        ("results_of_other_machines_are_warned_of", other_machines),
        ("mistakes_are_one_line", mistakes),
    ])
}

/// Roughly normal, around `mean` with the standard deviation `spread`.
///
/// Never all within a thousandth of the mean: `ministat` takes the difference of sums of squares, and has fewer
/// right digits than it prints when a spread is that small.
fn normal(rng: &mut Rng, n: usize, mean: f64, spread: f64) -> Vec<f64> {
    let mut one = || (0..12).map(|_| rng.f64()).sum::<f64>() - 6.0;
    loop {
        let samples: Vec<f64> = (0..n).map(|_| mean + spread * one()).collect();
        let max = samples.iter().copied().fold(f64::MIN, f64::max);
        let min = samples.iter().copied().fold(f64::MAX, f64::min);
        if max - min > mean.abs() / 1e3 {
            return samples;
        }
    }
}

/// Both programs on two files.
struct Bench {
    dir: TempDir,
    /// Number of differences that were proven, and of those that weren't.
    verdicts: [usize; 2],
}

impl Bench {
    fn new() -> Result<Bench, Stop> {
        need(&["ministat"])?;
        Ok(Bench {
            dir: tempfile::tempdir()?,
            verdicts: [0; 2],
        })
    }

    fn write(&self, name: &str, samples: &[f64]) -> Result<PathBuf, Stop> {
        let path = self.dir.path().join(name);
        let lines: Vec<String> = samples.iter().map(|s| format!("{s}\n")).collect();
        std::fs::write(&path, lines.concat())?;
        Ok(path)
    }

    fn compare(&mut self, a: &[f64], b: &[f64], confidence: &str) -> Result<(), Stop> {
        let files = [self.write("a", a)?, self.write("b", b)?].map(|f| f.display().to_string());
        let args = ["compare", &files[0], &files[1], "--confidence", confidence];
        let ours = run(lab(args)?, Duration::from_secs(60))?.success()?;
        let theirs = run_ok("ministat", ["-A", "-c", confidence, &files[0], &files[1]])?;
        same(&ours.stdout, &theirs.stdout).map_err(|why| {
            Stop::Fail(format!(
                "{why}, at {confidence} %\nours:\n{}theirs:\n{}a: {a:?}\nb: {b:?}",
                ours.stdout, theirs.stdout
            ))
        })?;
        self.verdicts[usize::from(ours.stdout.contains("No difference"))] += 1;
        Ok(())
    }

    fn finish(self) -> Result<(), Stop> {
        let [proven, not] = self.verdicts;
        println!("{proven} differences proven, {not} not");
        check(proven > 10 && not > 10, || {
            "the samples don't exercise both verdicts".into()
        })
    }
}

/// Compares the output of both, word by word. Numbers may differ by one in the last digit of their precision:
/// the programs add up in different orders.
fn same(ours: &str, theirs: &str) -> Result<(), String> {
    // Ours has the metric's name, and a line to set it off.
    let ours: Vec<&str> = ours
        .lines()
        .filter(|l| !l.is_empty() && *l != "value")
        .collect();
    let theirs: Vec<&str> = theirs.lines().collect();
    if ours.len() != theirs.len() {
        return Err(format!("{} lines, not {}", ours.len(), theirs.len()));
    }
    for (our, their) in ours.iter().zip(theirs) {
        // Rows have eight significant digits, the lines after them six.
        let digits = if their.starts_with('\t') { 6 } else { 8 };
        let (a, b) = (our.split_whitespace(), their.split_whitespace());
        let equal = a.clone().count() == b.clone().count()
            && a.zip(b).all(|(a, b)| same_word(a, b, digits));
        if !equal {
            return Err(format!("{our:?} is not {their:?}"));
        }
    }
    Ok(())
}

fn same_word(a: &str, b: &str, digits: i32) -> bool {
    let number = |w: &str| w.trim_end_matches(['%', ')']).parse::<f64>();
    match (number(a), number(b)) {
        _ if a == b => true,
        (Ok(a), Ok(b)) => {
            let exponent = b.abs().max(f64::MIN_POSITIVE).log10().floor() as i32;
            (a - b).abs() <= 1.01 * 10f64.powi(exponent + 1 - digits)
        }
        _ => false,
    }
}

/// All degrees of freedom that have a quantile of their own, and some beyond.
fn every_size() -> Result<(), Stop> {
    let mut bench = Bench::new()?;
    let mut rng = pvblk_testing::random();
    for freedom in (4..=103).chain([150, 1000]) {
        let n = rng.usize(3..=freedom - 1);
        let far = freedom % 4 != 0;
        for confidence in LEVELS {
            let a = normal(&mut rng, n, 100.0, 1.0);
            let mean = if far { 110.0 } else { 100.0 };
            let b = normal(&mut rng, freedom + 2 - n, mean, 1.0);
            bench.compare(&a, &b, confidence)?;
        }
    }
    bench.finish()
}

/// All magnitudes, spreads from three thousandths of the mean to many times it, differences about as large as the error.
fn random_comparisons() -> Result<(), Stop> {
    let mut bench = Bench::new()?;
    let mut rng = pvblk_testing::random();
    for _ in 0..if full() { 3000 } else { 300 } {
        let [n, m] = [0; 2].map(|_: usize| match rng.u8(..3) {
            0 => rng.usize(3..6),
            1 => rng.usize(3..40),
            _ => rng.usize(3..300),
        });
        let mean = 10f64.powf(rng.f64() * 18.0 - 9.0) * if rng.u8(..8) == 0 { -1.0 } else { 1.0 };
        let spread = mean.abs() * 10f64.powf(rng.f64() * 3.5 - 2.5);
        let error = spread * (1.0 / n as f64 + 1.0 / m as f64).sqrt();
        let other = mean + (rng.f64() - 0.5) * 10.0 * error;
        let a = normal(&mut rng, n, mean, spread);
        let wider = spread * (0.5 + rng.f64());
        let b = normal(&mut rng, m, other, wider);
        bench.compare(&a, &b, LEVELS[rng.usize(..LEVELS.len())])?;
    }
    bench.finish()
}

fn wrong_figures() -> Result<(), Stop> {
    let right = "x a\n+ b\nx  10  1  10  6  5.5  3.0276504\nDifference at 95.0% confidence\n\
                 \t14.5 +/- 4.79567\n\t263.636% +/- 87.1939%\n\t(Student's t, pooled s = 5.24404)\n";
    let found = |from: &str, to: &str| {
        check(same(&right.replace(from, to), right).is_err(), || {
            format!("{to} passes for {from}")
        })
    };
    same(right, right).map_err(Stop::Fail)?;
    // A quantile of 2.094 for 2.093 is 4.79796 for 4.79567.
    found("4.79567", "4.79796")?;
    found("4.79567", "4.79569")?;
    found("3.0276504", "3.0276506")?;
    found("5.24404)", "5.24407)")?;
    found("263.636%", "-263.636%")?;
    found("95.0%", "99.0%")?;
    found("Difference at", "No difference proven at")?;
    found("\t263.636% +/- 87.1939%\n", "")?;
    same(&right.replace("4.79567", "4.79568"), right).map_err(Stop::Fail)
}

fn compare(args: &[&str]) -> Result<Finished, Stop> {
    let words = std::iter::once(&"compare").chain(args);
    run(lab(words)?, Duration::from_secs(60))
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn load(path: &Path) -> Result<Value, Stop> {
    Ok(serde_json::from_str(&std::fs::read_to_string(path)?)?)
}

/// Three short runs a side of an engine that does nothing; two jobs of one name are one sample.
fn fio_json() -> Result<(), Stop> {
    need(&["fio"])?;
    let dir = tempfile::tempdir()?;
    let (mut files, mut rates) = (Vec::new(), Vec::new());
    for round in 0..6 {
        let file = dir.path().join(format!("{round}.json"));
        run_ok(
            "fio",
            [
                "--name=rand",
                "--ioengine=null",
                "--rw=randread",
                "--size=64M",
                "--numjobs=2",
                "--output-format=json",
                &format!("--output={}", text(&file)),
            ],
        )?;
        let report = load(&file)?;
        let jobs = report["jobs"].as_array().cloned().unwrap_or_default();
        check(jobs.len() == 2, || format!("{} jobs", jobs.len()))?;
        let rate = |job: &Value| job["read"]["iops"].as_f64().unwrap_or(0.0);
        rates.push(jobs.iter().map(rate).sum::<f64>());
        files.push(text(&file));
    }
    let verdict = dir.path().join("verdict.json");
    let mut args: Vec<&str> = files.iter().map(String::as_str).collect();
    args.insert(3, "--");
    let json = text(&verdict);
    let mut flags = vec!["--json", &json, "--metric", "iops"];
    flags.extend(args);
    let finished = compare(&flags)?.success()?;
    check(finished.stdout.contains("rand read iops"), || {
        finished.stdout.clone()
    })?;
    let report = load(&verdict)?;
    let parts = &report["metrics"][0]["parts"];
    let found: Vec<f64> = (0..2)
        .flat_map(|side| parts[side]["samples"].as_array().cloned())
        .flatten()
        .filter_map(|v| v.as_f64())
        .collect();
    check(found == rates, || format!("{found:?} is not {rates:?}"))?;
    check(parts[1]["comparison"]["proven"].is_boolean(), || {
        format!("no verdict in {report:#}")
    })
}

fn other_machines() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let files = ["A", "A", "B"].map(|cpu| json!({"result": {"machine": {"cpu": cpu}, "samples": [{"depth": 1, "iops": [1, 2, 3]}]}}));
    let mut paths = Vec::new();
    for (number, record) in files.iter().enumerate() {
        let path = dir.path().join(format!("{number}.json"));
        std::fs::write(&path, record.to_string())?;
        paths.push(text(&path));
    }
    for (other, warns) in [(1, false), (2, true)] {
        let said = compare(&[&paths[0], &paths[other]])?.success()?.stdout;
        let right = said.contains("warning: ") == warns && said.contains("depth 1 iops");
        check(right, || said.clone())?;
    }
    Ok(())
}

fn mistakes() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let numbers = dir.path().join("numbers");
    std::fs::write(&numbers, "1\n2\n3\n")?;
    let words = dir.path().join("words");
    std::fs::write(&words, "one\ntwo\n")?;
    let (numbers, words) = (text(&numbers), text(&words));
    for (args, code, culprit) in [
        (&[][..], 2, "FILE"),
        (&[&*numbers], 2, "one side"),
        (&[&*numbers, "--", "--", &*numbers], 2, "without files"),
        (
            &[&*numbers, &*numbers, "--confidence", "97"],
            2,
            "99 or 99.5",
        ),
        (
            &[&*numbers, "--", &*numbers, "--json"],
            2,
            "flags go before",
        ),
        (&[&*numbers, "/nonexistent/b"], 1, "/nonexistent/b"),
        (&[&*numbers, &*words], 1, "line 1"),
        (
            &[&*numbers, &*numbers, "--metric", "speed"],
            1,
            "there are: in x: value",
        ),
    ] {
        let finished = compare(args)?;
        let right = finished.status.and_then(|s| s.code()) == Some(code)
            && finished.stderr.lines().count() == 1
            && finished.stderr.contains(culprit);
        if !right {
            return Err(finished.failure(&format!("should name {culprit:?}, status {code}")));
        }
    }
    Ok(())
}
