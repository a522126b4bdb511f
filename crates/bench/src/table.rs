//! The report as text.

use super::latency::Latency;
use super::report::{JobReport, OpReport, Report};
use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};

/// Nanoseconds as microseconds with three significant digits.
fn us(ns: f64) -> String {
    match ns / 1000.0 {
        t if t < 10.0 => format!("{t:.2}"),
        t if t < 100.0 => format!("{t:.1}"),
        t => format!("{t:.0}"),
    }
}

fn times(latency: &Latency) -> Vec<String> {
    let m = latency.moments();
    let mut cells = vec![us(m.mean()), us(m.stddev())];
    for percent in [50.0, 90.0, 99.0, 99.9] {
        cells.push(us(latency.percentile_ns(percent) as f64));
    }
    cells.push(us(m.max));
    cells
}

fn add(t: &mut Table, name: &str, op: &str, r: &OpReport) {
    let mut row = vec![
        name.to_owned(),
        op.to_owned(),
        format!("{:.0}", r.iops()),
        format!("{:.1}", r.bytes_per_second() / 1e6),
    ];
    row.extend(times(&r.clat));
    row.push(r.errors.to_string());
    t.add_row(row);
}

fn add_job(t: &mut Table, job: &JobReport) {
    let threads = match job.threads {
        0 | 1 => String::new(),
        n => format!(" ({n} threads)"),
    };
    let name = format!("{}{threads}", job.name);
    for (op, r) in [("read", &job.read), ("write", &job.write)] {
        if r.ios + r.errors > 0 {
            add(t, &name, op, r);
        }
    }
    if job.flush.count() > 0 {
        let n = job.flush.count();
        let rate = n as f64 / job.elapsed.as_secs_f64().max(1e-9);
        let mut row = vec![
            name.clone(),
            "flush".into(),
            format!("{rate:.0}"),
            "–".into(),
        ];
        row.extend(times(&job.flush));
        row.push("–".into());
        t.add_row(row);
    }
    if job.read.ios + job.write.ios + job.errors() == 0 {
        add(t, &name, "none", &OpReport::default());
    }
}

pub(super) fn render(report: &Report) -> String {
    let mut t = Table::new();
    t.load_preset(ASCII_MARKDOWN).set_header([
        "job", "op", "IOPS", "MB/s", "avg µs", "stdev", "p50", "p90", "p99", "p99.9", "max",
        "errors",
    ]);
    let entries = report.entries();
    for job in &entries {
        add_job(&mut t, job);
    }
    if entries.len() > 1 {
        add_job(&mut t, &report.total());
    }
    for column in t.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    t.to_string()
}
