//! `btt`'s figures beside those of `pvblk latency`.

use crate::Stop;
use crate::outcome::check;
use crate::tools::{run, tool};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// The hops that both know.
pub const HOPS: [&str; 7] = ["Q2G", "G2I", "Q2M", "I2D", "M2D", "D2C", "Q2C"];

/// Count, average, least and greatest, in nanoseconds.
pub type Figures = (u64, f64, f64, f64);

/// Figures by hop.
pub type Table = BTreeMap<String, Figures>;

/// Runs btt on the output of `blkparse -d`; it leaves files beside it.
fn btt(dump: &Path, options: &[&str]) -> Result<String, Stop> {
    let mut command = tool("btt", ["-i".as_ref(), dump.as_os_str()]);
    command.args(options);
    command.current_dir(dump.parent().unwrap_or(Path::new("/")));
    Ok(run(command, Duration::from_secs(120))?.success()?.stdout)
}

/// The end of a line of btt's tables: least, average, greatest, count.
fn figures(words: &[&str]) -> Option<Figures> {
    let [min, average, max, count] = words else {
        return None;
    };
    let ns = |w: &str| w.parse::<f64>().map(|s| s * 1e9).ok();
    Some((count.parse().ok()?, ns(average)?, ns(min)?, ns(max)?))
}

/// The table of all devices that btt prints.
pub fn btts(dump: &Path) -> Result<Table, Stop> {
    let said = btt(dump, &[])?;
    let mut all = Table::new();
    for line in said.lines().take_while(|l| !l.contains("Device Overhead")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let Some((name, Some(row))) = words.split_first().map(|(n, w)| (n, figures(w))) {
            all.insert((*name).to_owned(), row);
        }
    }
    check(all.contains_key("D2C"), || format!("no table in {said}"))?;
    Ok(all)
}

/// The same for each device, such as `8,0`; M2D is missing there.
pub fn btts_by_device(dump: &Path) -> Result<BTreeMap<String, Table>, Stop> {
    let said = btt(dump, &["-A"])?;
    let mut all: BTreeMap<String, Table> = BTreeMap::new();
    let mut hop = "";
    let from_devices = said.lines().skip_while(|l| !l.contains("= Per Device ="));
    for line in from_devices.take_while(|l| !l.contains("= All Devices =")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [name, "MIN", "AVG", "MAX", "N"] => hop = name,
            [major, minor, ref rest @ ..] if major.starts_with('(') => {
                let device = format!("{major}{minor}");
                let device = device.trim_matches(['(', ')']).to_owned();
                if let Some(row) = figures(rest) {
                    all.entry(device).or_default().insert(hop.to_owned(), row);
                }
            }
            _ => {}
        }
    }
    check(!all.is_empty(), || format!("no devices in {said}"))?;
    Ok(all)
}

/// The devices of our report.
pub fn devices(report: &Value) -> &[Value] {
    report["devices"].as_array().map_or(&[], Vec::as_slice)
}

/// The same of these devices of our report: without flushes, which btt doesn't see.
pub fn ours(devices: &[Value]) -> Table {
    let mut all = Table::new();
    for (op, hops) in devices
        .iter()
        .filter_map(|d| d["operations"].as_object())
        .flatten()
        .filter(|(op, _)| *op != "flush")
    {
        for (hop, f) in hops.as_object().into_iter().flatten() {
            let number = |name: &str| f[name].as_f64().unwrap_or(f64::NAN);
            let (count, average) = (number("count"), number("average_ns"));
            assert!(count > 0.0, "{op} {hop}");
            let one = (0, 0.0, f64::INFINITY, 0.0);
            let sum = all.entry(hop.clone()).or_insert(one);
            let before = sum.0 as f64;
            sum.1 = (sum.1 * before + average * count) / (before + count);
            sum.0 += count as u64;
            sum.2 = sum.2.min(number("min_ns"));
            sum.3 = sum.3.max(number("max_ns"));
        }
    }
    all
}

/// Fails unless both have the same figures of these hops.
pub fn same(ours: &Table, btts: &Table, hops: &[&str]) -> Result<(), Stop> {
    for hop in hops {
        let (Some(a), Some(b)) = (ours.get(*hop), btts.get(*hop)) else {
            return Stop::fail(format!(
                "{hop}: {:?} and {:?}",
                ours.get(*hop),
                btts.get(*hop)
            ));
        };
        // btt takes a hop whose ends are at the same nanosecond for one of 1 ns, and prints nine decimals of a second.
        let near = |a: f64, b: f64| (-0.51..=1.51).contains(&(b - a));
        let equal = a.0 == b.0 && near(a.1, b.1) && near(a.2, b.2) && near(a.3, b.3);
        check(equal, || format!("{hop}: {a:?}, and btt has {b:?}"))?;
    }
    Ok(())
}

/// Fails unless the submitters' hops and gaps add up to their time.
pub fn parts_add_up(report: &Value) -> Result<(), Stop> {
    for device in devices(report) {
        for (pid, s) in device["submitters"].as_object().into_iter().flatten() {
            let number = |v: &Value| v.as_f64().unwrap_or(0.0);
            let shares = s["shares_ns"].as_object().into_iter().flatten();
            let sum: f64 = shares.map(|(_, v)| number(v)).sum();
            let sum = sum + number(&s["idle_ns"]) + number(&s["other_ns"]);
            let share = sum / number(&s["elapsed_ns"]);
            check((share - 1.0).abs() < 0.02, || format!("{pid}: {share}"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_seen() {
        let row = (10, 1000.0, 10.0, 9000.0);
        let table = |hop: &str, row: Figures| Table::from([(hop.to_owned(), row)]);
        let right = table("D2C", row);
        for near in [(10, 1000.9, 10.0, 9000.0), (10, 1001.5, 11.0, 9000.0)] {
            assert!(same(&right, &table("D2C", near), &["D2C"]).is_ok());
        }
        for wrong in [
            (11, row.1, row.2, row.3),
            (row.0, row.1 + 1.6, row.2, row.3),
            (row.0, row.1 - 0.6, row.2, row.3),
            (row.0, row.1, row.2 - 2.0, row.3),
            (row.0, row.1, row.2, row.3 + 2.0),
            (row.0, f64::NAN, row.2, row.3),
        ] {
            assert!(same(&right, &table("D2C", wrong), &["D2C"]).is_err());
        }
        assert!(same(&right, &table("Q2C", row), &["D2C"]).is_err());
        assert!(same(&right, &right, &HOPS).is_err());
    }
}
