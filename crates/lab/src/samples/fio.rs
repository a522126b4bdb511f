//! Samples in fio's JSON (`--output-format=json`), and in JSON of the same layout.
//!
//! One run is one sample. Entries of one name and group ran together, as `numjobs` makes them: their rates are
//! summed and their latencies averaged over all requests; as percentiles of parts don't make a percentile of
//! the whole, such a group has none. Entries of one name in several groups are repetitions.

use super::Samples;
use anyhow::{Result, ensure};
use serde_json::Value;

const DIRECTIONS: [&str; 5] = ["read", "write", "trim", "mixed", "sync"];

/// Percentiles that are read: fio's name and ours.
const PERCENTILES: [(&str, &str); 4] = [
    ("50.000000", "p50_us"),
    ("99.000000", "p99_us"),
    ("99.900000", "p999_us"),
    ("99.990000", "p9999_us"),
];

/// True for a report of fio.
pub fn is_fio(document: &Value) -> bool {
    document["jobs"]
        .as_array()
        .is_some_and(|jobs| jobs.iter().any(|j| j["jobname"].is_string()))
}

/// All samples of a report; a report of a job that failed has none.
pub fn samples(document: &Value) -> Result<Samples> {
    let mut groups: Vec<((&str, u64), Vec<&Value>)> = Vec::new();
    for job in document["jobs"].as_array().into_iter().flatten() {
        let name = job["jobname"].as_str().unwrap_or("job");
        let error = job["error"].as_i64().unwrap_or(0);
        ensure!(error == 0, "its job {name} failed with error {error}");
        let key = (name, job["groupid"].as_u64().unwrap_or(0));
        match groups.iter_mut().find(|(k, _)| *k == key) {
            Some((_, jobs)) => jobs.push(job),
            None => groups.push((key, vec![job])),
        }
    }
    let mut samples = Samples::default();
    for ((name, _), jobs) in &groups {
        for direction in DIRECTIONS {
            let parts: Vec<&Value> = jobs
                .iter()
                .map(|job| &job[direction])
                .filter(|part| requests(part) > 0.0)
                .collect();
            for (metric, value) in of_direction(&parts) {
                samples.add(&format!("{name} {direction} {metric}"), &[value]);
            }
        }
    }
    Ok(samples)
}

fn requests(part: &Value) -> f64 {
    part["total_ios"].as_f64().unwrap_or(0.0)
}

/// The figures of one direction of jobs that ran together; none for no jobs.
fn of_direction(parts: &[&Value]) -> Vec<(String, f64)> {
    let mut figures = Vec::new();
    for (field, name) in [("iops", "iops"), ("bw_bytes", "bw_bytes")] {
        let rates: Option<Vec<f64>> = parts.iter().map(|p| p[field].as_f64()).collect();
        if let Some(rates) = rates.filter(|r| !r.is_empty()) {
            figures.push((name.to_owned(), rates.iter().sum()));
        }
    }
    // `lat` is from submission to completion, `clat` from when the kernel or the library had it.
    for kind in ["lat", "clat"] {
        let field = format!("{kind}_ns");
        let means: Option<f64> = parts
            .iter()
            .map(|p| Some(p[&field]["mean"].as_f64()? * requests(p)))
            .sum();
        let total: f64 = parts.iter().map(|p| requests(p)).sum();
        if let Some(mean) = means.filter(|&m| m > 0.0) {
            figures.push((format!("{kind}_mean_us"), mean / total / 1e3));
        }
        if let [only] = parts {
            for (percentile, name) in PERCENTILES {
                if let Some(ns) = only[&field]["percentile"][percentile].as_f64() {
                    figures.push((format!("{kind}_{name}"), ns / 1e3));
                }
            }
        }
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn samples(document: &Value) -> Samples {
        super::samples(document).unwrap()
    }

    fn job(group: u64, iops: f64, ios: u64, mean: f64) -> Value {
        json!({"jobname": "r", "groupid": group, "write": {"total_ios": 0, "iops": 0.0},
            "read": {"total_ios": ios, "iops": iops, "bw_bytes": iops * 4096.0,
                "lat_ns": {"mean": mean}, "clat_ns": {"mean": mean - 1000.0,
                    "percentile": {"50.000000": 7000, "99.000000": 9000}}}})
    }

    #[test]
    fn a_job_alone() {
        let s = samples(&json!({"fio version": "fio-3.33", "jobs": [job(0, 500.0, 10, 8000.0)]}));
        let names: Vec<&str> = s.metrics.iter().map(|(n, _)| n.as_str()).collect();
        assert_eq!(
            names,
            [
                "r read iops",
                "r read bw_bytes",
                "r read lat_mean_us",
                "r read clat_mean_us",
                "r read clat_p50_us",
                "r read clat_p99_us"
            ]
        );
        assert_eq!(s.of("r read clat_mean_us").unwrap(), [7.0]);
        assert_eq!(s.of("r read clat_p99_us").unwrap(), [9.0]);
    }

    #[test]
    fn jobs_of_a_group_are_one_sample() {
        let jobs = [job(0, 100.0, 10, 2000.0), job(0, 300.0, 30, 6000.0)];
        let s = samples(&json!({"jobs": jobs}));
        assert_eq!(s.of("r read iops").unwrap(), [400.0]);
        assert_eq!(s.of("r read lat_mean_us").unwrap(), [5.0], "by requests");
        assert_eq!(s.of("r read clat_p50_us"), None);
    }

    #[test]
    fn a_failed_job_is_no_sample() {
        let mut failed = job(0, 100.0, 10, 2000.0);
        failed["error"] = json!(5);
        let error = super::samples(&json!({"jobs": [failed]})).unwrap_err();
        assert!(error.to_string().contains("error 5"), "{error}");
    }

    #[test]
    fn groups_are_repetitions() {
        let jobs = [job(0, 100.0, 10, 2000.0), job(1, 300.0, 30, 6000.0)];
        let s = samples(&json!({"jobs": jobs}));
        assert_eq!(s.of("r read iops").unwrap(), [100.0, 300.0]);
    }
}
