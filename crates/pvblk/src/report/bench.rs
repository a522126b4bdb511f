//! Benchmarks: JSON of `pvblk bench` or fio, one or several side by side.

use super::page::{Cell, Page};
use super::{Source, machine, time};
use anyhow::Result;
use pvblk_bench::plot::{
    Axis, Bar, Bars, Chart, Group, Lines, MOST_SERIES, Point, Scale, Series, Unit,
};
use serde_json::Value;

/// Percentiles in tables and plots, by fio's names.
const PERCENTILES: [(&str, f64); 5] = [
    ("50.000000", 2.0),
    ("90.000000", 10.0),
    ("99.000000", 100.0),
    ("99.900000", 1000.0),
    ("99.990000", 10_000.0),
];

/// One direction of a job.
struct Direction<'a> {
    /// Name of the file.
    file: &'a str,
    /// Job and direction.
    name: String,
    figures: &'a Value,
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

impl Direction<'_> {
    /// Requests a second, with the least and the greatest of the samples in between.
    fn iops(&self) -> Bar {
        let f = self.figures;
        let samples = number(&f["iops_samples"]) > 1.0;
        Bar {
            value: number(&f["iops"]),
            interval: samples.then(|| (number(&f["iops_min"]), number(&f["iops_max"]))),
        }
    }

    fn percentile(&self, name: &str) -> Option<f64> {
        let value = &self.figures["clat_ns"]["percentile"][name];
        value.as_f64().filter(|ns| *ns > 0.0)
    }
}

fn jobs(source: &Source) -> impl Iterator<Item = &Value> {
    source.content["jobs"].as_array().into_iter().flatten()
}

/// The directions in which something was done. Jobs of one name are told apart by their numbers.
fn directions<'a>(source: &'a Source, file: &'a str) -> Vec<Direction<'a>> {
    let mut all: Vec<Direction<'a>> = Vec::new();
    for job in jobs(source) {
        for direction in ["read", "write", "trim"] {
            let figures = &job[direction];
            if number(&figures["total_ios"]) == 0.0 {
                continue;
            }
            let name = job["jobname"].as_str().unwrap_or("job");
            let mut unique = format!("{name}, {direction}");
            let mut count = 2;
            while all.iter().any(|d| d.name == unique) {
                unique = format!("{name} #{count}, {direction}");
                count += 1;
            }
            all.push(Direction {
                file,
                name: unique,
                figures,
            });
        }
    }
    all
}

/// Short names of files that tell them apart.
fn names(sources: &[Source]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for source in sources {
        let stem = source.name.strip_suffix(".json").unwrap_or(&source.name);
        let mut unique = stem.to_owned();
        let mut count = 2;
        while names.contains(&unique) {
            unique = format!("{stem} #{count}");
            count += 1;
        }
        names.push(unique);
    }
    names
}

pub fn section(page: &mut Page, sources: &[Source]) -> Result<()> {
    let names = names(sources);
    page.section(&names.join(" beside "));
    machines(page, sources, &names);
    let all: Vec<Direction> = sources
        .iter()
        .zip(&names)
        .flat_map(|(source, name)| directions(source, name))
        .collect();
    if sources.len() > 1 {
        page.quiet("One run of each side says nothing about chance: pvblk-lab compare does, with three or more.");
    }
    for chart in charts(&all, &names) {
        page.chart(&chart)?;
    }
    page.part("Figures");
    page.table(
        &[
            "job",
            "side",
            "requests/s",
            "throughput",
            "requests",
            "average",
            "p50",
            "p90",
            "p99",
            "p99.9",
            "p99.99",
            "longest",
        ],
        all.iter().map(row).collect(),
    );
    for (source, name) in sources.iter().zip(&names) {
        details(page, source, name);
    }
    Ok(())
}

fn machines(page: &mut Page, sources: &[Source], names: &[String]) {
    let known: Vec<&Value> = sources.iter().map(|s| &s.content["machine"]).collect();
    if known.windows(2).all(|w| w[0] == w[1]) {
        machine(page, known[0]);
        return;
    }
    page.warning("The files are from different machines, or don't all name theirs: their figures don't compare.");
    for (known, name) in known.iter().zip(names) {
        page.part(name);
        machine(page, known);
    }
}

fn row(d: &Direction) -> Vec<Cell> {
    let f = d.figures;
    let mut row: Vec<Cell> = vec![
        d.name.as_str().into(),
        d.file.into(),
        Unit::Count.label(number(&f["iops"])).into(),
        Unit::BytesPerSecond.label(number(&f["bw_bytes"])).into(),
        f["total_ios"].to_string().into(),
        time(number(&f["clat_ns"]["mean"])).into(),
    ];
    row.extend(PERCENTILES.map(|(name, _)| {
        let ns = d.percentile(name);
        Cell::from(ns.map_or_else(|| "–".to_owned(), time))
    }));
    row.push(time(number(&f["clat_ns"]["max"])).into());
    row
}

fn charts(all: &[Direction], sides: &[String]) -> Vec<Chart> {
    let mut charts = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    for d in all {
        if !names.contains(&d.name.as_str()) {
            names.push(&d.name);
        }
    }
    let of = |name: &str, side: &str| all.iter().find(|d| d.name == name && d.file == side);
    for sides in sides.chunks(MOST_SERIES) {
        let bars = |title: &str, subtitle: &str, unit, bar: &dyn Fn(&Direction<'_>) -> Bar| {
            let group = |name: &&str| Group {
                name: (*name).to_owned(),
                bars: sides.iter().map(|side| of(name, side).map(bar)).collect(),
            };
            Chart::Bars(Bars {
                title: title.to_owned(),
                subtitle: subtitle.to_owned(),
                unit,
                series: sides.to_vec(),
                groups: names.iter().map(group).collect(),
            })
        };
        if names.is_empty() {
            break;
        }
        let spread = "whiskers: least and greatest half second";
        charts.push(bars(
            "Requests a second",
            spread,
            Unit::Count,
            &|d: &Direction<'_>| d.iops(),
        ));
        charts.push(bars(
            "Throughput",
            "",
            Unit::BytesPerSecond,
            &|d: &Direction<'_>| Bar {
                value: number(&d.figures["bw_bytes"]),
                interval: None,
            },
        ));
    }
    // A line for each side of a job, or for each job if there is one side.
    let line = |d: &Direction, name: &str| Series {
        name: name.to_owned(),
        points: PERCENTILES
            .iter()
            .filter_map(|(percentile, one_in)| {
                let (x, y) = (*one_in, d.percentile(percentile)? / 1e3);
                let interval = None;
                Some(Point { x, y, interval })
            })
            .collect(),
        band: false,
    };
    let percentiles = |title: String, series: Vec<Series>| {
        Chart::Lines(Lines {
            title,
            subtitle: "the time that so many of 100 requests stayed below".into(),
            x: Axis {
                label: "share of the requests".into(),
                unit: Unit::Nines,
                scale: Scale::Log10,
            },
            y: Axis {
                label: "completion time".into(),
                unit: Unit::Microseconds,
                scale: Scale::Log10,
            },
            series,
        })
    };
    let groups: Vec<(String, Vec<Series>)> = match sides.len() {
        1 => {
            let lines = all.iter().map(|d| line(d, &d.name)).collect();
            vec![("Completion times".to_owned(), lines)]
        }
        _ => {
            let of = |name: &&str| {
                let sides = sides.iter().filter_map(|side| of(name, side));
                let lines = sides.map(|d| line(d, d.file)).collect();
                (format!("Completion times of {name}"), lines)
            };
            names.iter().map(of).collect()
        }
    };
    for (title, series) in groups {
        let shown: Vec<Series> = series
            .into_iter()
            .filter(|s| !s.points.is_empty())
            .collect();
        for some in shown.chunks(MOST_SERIES) {
            charts.push(percentiles(title.clone(), some.to_vec()));
        }
    }
    charts
}

/// Options, errors, flushes and CPU time of a file's jobs.
fn details(page: &mut Page, source: &Source, name: &str) {
    page.part(&format!("Jobs of {name}"));
    if let Some(version) = source.content["fio version"].as_str() {
        page.quiet(&format!("measured by {version}"));
    }
    let options = |value: &Value| {
        let options = value.as_object().into_iter().flatten();
        let options = options.map(|(name, value)| match value.as_str() {
            Some("") | None => name.clone(),
            Some(value) => format!("{name}={value}"),
        });
        options.collect::<Vec<_>>().join(" ")
    };
    let global = options(&source.content["global options"]);
    if !global.is_empty() {
        page.quiet(&format!("options of all jobs: {global}"));
    }
    let rows = jobs(source).map(|job| {
        let error = match number(&job["error"]) {
            0.0 => Cell::from("none"),
            errno => Cell::Bad(format!("errno {errno}")),
        };
        let sync = &job["sync"];
        let flushes = match number(&sync["total_ios"]) {
            0.0 => "none".to_owned(),
            n => format!("{n}, {} on average", time(number(&sync["lat_ns"]["mean"]))),
        };
        let cpu = format!(
            "{:.1} % and {:.1} %",
            number(&job["usr_cpu"]),
            number(&job["sys_cpu"])
        );
        vec![
            job["jobname"].as_str().unwrap_or("job").into(),
            options(&job["job options"]).into(),
            flushes.into(),
            cpu.into(),
            error,
        ]
    });
    page.words(
        &["job", "options", "flushes", "CPU, user and kernel", "error"],
        rows.collect(),
    );
}
