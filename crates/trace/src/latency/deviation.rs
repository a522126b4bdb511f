//! The deviation table: growth of each average from a good capture to a bad one.

use super::hop::Hop;
use super::report::{Hops, Report};
use crate::Device;
use serde::Serialize;

/// One figure of both captures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Column {
    /// Name as in the table, such as `avg-D2C`.
    pub name: String,
    /// In the good capture: nanoseconds, or a share in percent.
    pub good: f64,
    /// In the bad capture, in the same unit.
    pub bad: f64,
    /// Difference of the two in percent of the good one; `None` if the good one is 0.
    pub percent: Option<f64>,
}

/// The row of one device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Deviation {
    /// The device's name or number.
    pub device: String,
    /// Figures that both captures have.
    pub columns: Vec<Column>,
}

/// The table's hops, including those that replace others on devices without tags.
const HOPS: [Hop; 5] = [Hop::A2G, Hop::G2I, Hop::I2D, Hop::Q2D, Hop::D2C];

/// Compares devices of the same name (or number, without a name); if each capture has only one device, those two.
pub fn deviation(good: &Report, bad: &Report) -> Vec<Deviation> {
    let pairs: Vec<(Device, Device)> = match (good.devices.len(), bad.devices.len()) {
        (1, 1) => good
            .devices
            .keys()
            .copied()
            .zip(bad.devices.keys().copied())
            .collect(),
        _ => good
            .devices
            .keys()
            .filter_map(|g| {
                let name = good.name(*g);
                let same = bad.devices.keys().find(|b| bad.name(**b) == name);
                Some((*g, *same?))
            })
            .collect(),
    };
    pairs
        .into_iter()
        .map(|(g, b)| Deviation {
            device: good.name(g),
            columns: columns(&good.all_of(g), &bad.all_of(b)),
        })
        .collect()
}

fn columns(good: &Hops, bad: &Hops) -> Vec<Column> {
    let mut columns = Vec::new();
    let mut add = |name: String, good: f64, bad: f64| {
        let percent = (good != 0.0).then(|| (bad - good) / good * 100.0);
        columns.push(Column {
            name,
            good,
            bad,
            percent,
        });
    };
    for hop in HOPS {
        if let (Some(g), Some(b)) = (good.of(hop).summary(), bad.of(hop).summary()) {
            add(format!("avg-{}", hop.name()), g.average_ns, b.average_ns);
        }
    }
    if let (Some(g), Some(b)) = (good.of(Hop::C2A).summary(), bad.of(Hop::C2A).summary()) {
        add("avg-C2A".to_owned(), g.average_ns, b.average_ns);
        add(
            "avg-C2A-in-avg+-stddev".to_owned(),
            g.within_average_ns,
            b.within_average_ns,
        );
        add(
            "%C2A-in-avg+-stddev".to_owned(),
            g.within_share * 100.0,
            b.within_share * 100.0,
        );
    }
    columns
}
