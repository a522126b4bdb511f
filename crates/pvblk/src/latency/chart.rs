//! Charts of hops.

use super::save;
use anyhow::Result;
use pvblk_bench::plot::{Unit, hop_chart};
use pvblk_trace::latency::{Hop, Hops, Report};
use std::path::Path;

pub(super) type Row = (String, Vec<(&'static str, f64)>);

/// One row for each device: averages in microseconds of successive hops.
pub(super) fn rows(report: &Report, suffix: &str) -> Vec<Row> {
    let row = |(device, hops): (_, Hops)| {
        let first = match hops.of(Hop::A2G).count() {
            0 => [Hop::Q2D, Hop::G2I],
            _ => [Hop::A2G, Hop::G2I],
        };
        let order = first.into_iter().chain([Hop::I2D, Hop::D2C, Hop::C2A]);
        let parts = order.filter_map(|hop| {
            let average = hops.of(hop).summary()?.average_ns;
            Some((hop.name(), average / 1e3))
        });
        (format!("{}{suffix}", report.name(device)), parts.collect())
    };
    let devices = report.devices.keys();
    devices
        .map(|d| row((*d, report.all_of(*d))))
        .filter(|(_, parts): &Row| !parts.is_empty())
        .collect()
}

pub(super) fn draw(path: &Path, rows: &[Row]) -> Result<()> {
    let rows: Vec<(&str, Vec<(&str, f64)>)> =
        rows.iter().map(|(n, p)| (n.as_str(), p.clone())).collect();
    let subtitle = "Averages of a request's hops, and of the time until the next request";
    let svg = hop_chart("Where the time goes", subtitle, Unit::Microseconds, &rows)?;
    save(path, &svg)
}
