//! `pvblk latency` beside `btt` and `blkparse` on captures that the kernel's blktrace made, of a partitioned
//! disk under a device mapper's linear device. `data/README.md` describes them.

use pvblk_e2e::btt::{HOPS, Table, btts, btts_by_device, devices, ours, parts_add_up, same};
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{need, run, run_ok};
use pvblk_e2e::{MIB, Stop, full, run_all, vm};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tempfile::TempDir;

fn main() -> ExitCode {
    run_all(&[
        ("figures_of_a_real_capture_are_btts", figures),
        ("merges_and_remaps_are_those_that_blkparse_prints", counts),
        ("a_difference_to_btt_is_seen", difference),
        ("a_new_capture_tells_the_same", fresh),
    ])
}

/// A capture of a disk and of the device above it, and pvblk's report on it.
struct Real {
    /// Names of captures: files are NAME.blktrace.0 and NAME.blktrace.1.
    names: [PathBuf; 2],
    dir: TempDir,
    report: Value,
    /// The report for people.
    text: String,
}

impl Real {
    fn stored() -> Result<Real, Stop> {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
        Real::of(["real", "real-dm"].map(|name| data.join(name)))
    }

    fn of(names: [PathBuf; 2]) -> Result<Real, Stop> {
        need(&["blkparse", "btt"])?;
        let dir = tempfile::tempdir()?;
        let json = dir.path().join("report.json");
        let [disk, above] = &names;
        let args = [
            "latency".as_ref(),
            disk.as_os_str(),
            above.as_os_str(),
            "--json".as_ref(),
            json.as_os_str(),
        ];
        let text = run(pvblk(args)?, Duration::from_secs(60))?
            .success()?
            .stdout;
        Ok(Real {
            report: serde_json::from_slice(&std::fs::read(json)?)?,
            names,
            dir,
            text,
        })
    }

    /// All files in one, as `btt` wants it.
    fn dump(&self) -> Result<PathBuf, Stop> {
        let dump = self.dir.path().join("dump");
        let mut args: Vec<_> = ["-O", "-q", "-d"].map(Into::into).into();
        args.push(dump.clone().into_os_string());
        for name in &self.names {
            args.extend(["-i".into(), name.clone().into_os_string()]);
        }
        run_ok("blkparse", args)?;
        Ok(dump)
    }

    fn compare(&self) -> Result<(), Stop> {
        let dump = self.dump()?;
        let ([disk], [above]) = self.split()? else {
            return Stop::fail(format!("not two devices: {}", self.text));
        };
        // btt's table of all leaves out the stacked device.
        same(&ours(std::slice::from_ref(disk)), &btts(&dump)?, &HOPS)?;
        let by_device = btts_by_device(&dump)?;
        let theirs = |device: &Value| -> Result<&Table, Stop> {
            let number = device["device"].as_str().unwrap_or_default();
            let table = by_device.get(number);
            table.ok_or_else(|| Stop::Fail(format!("btt has no {number} in {by_device:?}")))
        };
        let known: Vec<&str> = HOPS.into_iter().filter(|h| *h != "M2D").collect();
        same(&ours(std::slice::from_ref(disk)), theirs(disk)?, &known)?;
        // btt's name there for the hop that is Q2C here.
        let mut stacked = theirs(above)?.clone();
        if let Some(figures) = stacked.remove("Q2Cdm") {
            stacked.insert("Q2C".into(), figures);
        }
        same(&ours(std::slice::from_ref(above)), &stacked, &["Q2C"])
    }

    /// The report on the disk, and that on the device above it.
    fn split(&self) -> Result<(&[Value], &[Value]), Stop> {
        let devices = devices(&self.report);
        let at = devices
            .iter()
            .position(|d| d["operations"]["read"]["D2C"].is_null());
        match at {
            Some(1) => Ok(devices.split_at(1)),
            _ => Stop::fail(format!("not a disk and a device above: {}", self.text)),
        }
    }
}

/// The output of blkparse for a capture.
#[derive(Default)]
struct Printed {
    device: String,
    /// By action's letter.
    actions: BTreeMap<String, u64>,
    /// By the device that requests came from, as `8,1`.
    remaps: BTreeMap<String, u64>,
    /// Completions without sectors that are no flush's own.
    ends_of_flushes: u64,
}

impl Printed {
    fn of(name: &Path) -> Result<Printed, Stop> {
        let said = run_ok("blkparse", ["-q".as_ref(), "-i".as_ref(), name.as_os_str()])?.stdout;
        let mut printed = Printed::default();
        for line in said.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [device, _, _, _, _, action, ref rest @ ..] = words[..] else {
                continue;
            };
            device.clone_into(&mut printed.device);
            *printed.actions.entry(action.into()).or_default() += 1;
            match (action, rest) {
                ("A", [.., "<-", from, _]) => {
                    let from = from.trim_matches(['(', ')']).to_owned();
                    *printed.remaps.entry(from).or_default() += 1;
                }
                ("C", [operation, _, "[0]"]) if !operation.starts_with('F') => {
                    printed.ends_of_flushes += 1;
                }
                _ => {}
            }
        }
        Ok(printed)
    }

    fn count(&self, action: &str) -> u64 {
        self.actions.get(action).copied().unwrap_or(0)
    }
}

fn figures() -> Result<(), Stop> {
    Real::stored()?.compare()
}

fn counts() -> Result<(), Stop> {
    let real = Real::stored()?;
    let printed = count(&real)?;
    // The capture has the events for which it was made.
    for action in ["Q", "G", "M", "F", "I", "D", "C", "P", "U", "A"] {
        check(printed.count(action) > 0, || format!("no {action}"))?;
    }
    check(printed.ends_of_flushes > 0, || "no flush".into())
}

/// Compares our counts with blkparse's; returns those of the disk.
fn count(real: &Real) -> Result<Printed, Stop> {
    parts_add_up(&real.report)?;
    let mut all = Vec::new();
    for (name, device) in real.names.iter().zip(devices(&real.report)) {
        let printed = Printed::of(name)?;
        check(device["device"] == *printed.device, || {
            format!("{device} is not {}", printed.device)
        })?;
        for (ours, action) in [("back_merges", "M"), ("front_merges", "F"), ("splits", "X")] {
            let count = printed.count(action);
            check(device[ours] == count, || {
                format!(
                    "{}: {ours} {}, and blkparse has {count}",
                    name.display(),
                    device[ours]
                )
            })?;
        }
        let line = format!("\ndevice {}: ", printed.device);
        let line = real
            .text
            .split_once(&line)
            .and_then(|(_, rest)| rest.lines().next());
        let line = line.unwrap_or_default();
        let remaps: u64 = printed.remaps.values().sum();
        check(remaps == printed.count("A"), || format!("{remaps} remaps"))?;
        for (from, count) in &printed.remaps {
            let words = format!("{count} remapped from {from}");
            check(line.split(", ").any(|w| w == words), || {
                format!("no {words:?} in {line:?}")
            })?;
        }
        // No request is lost on the way through a partition. A flush completes twice: in the driver, and for
        // its submitter.
        check(device["unfinished"] == 0, || format!("unfinished: {line}"))?;
        check(device["unmatched"] == printed.ends_of_flushes, || {
            format!(
                "not only {} ends of flushes are unmatched: {line}",
                printed.ends_of_flushes
            )
        })?;
        all.push(printed);
    }
    check(all.len() == 2, || format!("{} devices", all.len()))?;
    Ok(all.swap_remove(0))
}

/// Each figure of each hop, changed a little, must fail the comparison.
fn difference() -> Result<(), Stop> {
    let real = Real::stored()?;
    let btts = btts(&real.dump()?)?;
    let ours = ours(real.split()?.0);
    same(&ours, &btts, &HOPS)?;
    for hop in HOPS {
        for figure in 0..4 {
            let mut wrong = ours.clone();
            if let Some(of) = wrong.get_mut(hop) {
                match figure {
                    0 => of.0 += 1,
                    1 => of.1 += 2.0,
                    2 => of.2 -= 2.0,
                    _ => of.3 += 2.0,
                }
            }
            check(same(&wrong, &btts, &HOPS).is_err(), || {
                format!("{hop}, figure {figure}: not seen")
            })?;
        }
    }
    Ok(())
}

/// The stored capture is one of many that the kernel could have made.
fn fresh() -> Result<(), Stop> {
    if !full() {
        return Stop::skip("boots a guest; set PVBLK_E2E_FULL=1");
    }
    need(&["blkparse", "btt"])?;
    let dir = tempfile::tempdir()?;
    let disk = dir.path().join("disk");
    std::fs::File::create(&disk)?.set_len(64 * MIB)?;
    let script = vm::named("blktrace.sh");
    let limit = Duration::from_secs(300);
    vm::script(vm::Kind::Qemu, &script, &[&disk], dir.path(), limit)?;
    let real = Real::of(["real", "real-dm"].map(|name| dir.path().join(name)))?;
    real.compare()?;
    count(&real)?;
    Ok(())
}
