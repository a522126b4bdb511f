//! Arrays that are found by their UUID among files, after members were replaced; and the commands' reports.

use pvblk_e2e::arrays::{Disks, detail, raid, spec, wrong_stripes};
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::managed::{Managed, PATIENCE, array, at, name, names};
use pvblk_e2e::mounted::Fuse;
use pvblk_e2e::outcome::check;
use pvblk_e2e::stage::{unix, uri};
use pvblk_e2e::tools::{compare, need, run, run_ok, tool};
use pvblk_e2e::{Daemon, Stop, run_all};
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    run_all(&[
        (
            "an_array_of_replaced_members_is_found_by_its_uuid",
            replaced,
        ),
        (
            "the_spec_that_was_told_survives_a_kill_in_a_rebuild",
            killed,
        ),
        ("candidates_that_cant_be_used_are_named", candidates),
        ("a_candidate_that_hangs_is_left_out", hangs),
        ("mdadm_and_we_find_the_same_arrays", scanned),
        ("commands_say_what_they_did", told),
        ("a_watched_array_is_drawn_in_place", watched),
    ])
}

/// The volume of an array among all files of a folder.
fn by_uuid(disks: &Disks, of: std::ops::Range<usize>) -> Result<String, Stop> {
    let is = detail(&disks.paths(of))?;
    let uuid = is["uuid"].as_str().unwrap_or_default();
    Ok(format!(
        "raid5:uuid={uuid},in={}/m*",
        disks.dir.path().display()
    ))
}

/// Error of a server that is to serve a volume; `None`: it serves it.
fn refusal(volume: &str) -> Result<Option<String>, Stop> {
    let dir = tempfile::tempdir()?;
    let (disk, nbd) = (format!("r={volume}"), unix(&dir.path().join("nbd")));
    match Daemon::start(["serve", "--disk", &disk, "--nbd", &nbd]) {
        Ok(mut served) => served.stop().map(|()| None),
        Err(Stop::Fail(said)) => Ok(Some(said)),
        Err(other) => Err(other),
    }
}

fn refused(volume: &str, parts: &[&str]) -> Result<(), Stop> {
    let Some(said) = refusal(volume)? else {
        return Stop::fail(format!("{volume} is served"));
    };
    let line = said.lines().find(|l| l.contains("pvblk: disk r: "));
    for part in parts {
        check(line.is_some_and(|l| l.contains(part)), || {
            format!("{part:?} isn't in one line of {said}")
        })?;
    }
    Ok(())
}

/// Serves a volume and compares all of it with an image.
fn holds(volume: &str, image: &Path) -> Result<Managed, Stop> {
    let served = Managed::of(volume)?;
    let back = served.path("back");
    served.read(&back)?;
    compare(image, &back)?;
    Ok(served)
}

fn replaced() -> Result<(), Stop> {
    need(&["nbdcopy", "cmp"])?;
    let (disks, image) = array(6, "ppl")?;
    let wanted = by_uuid(&disks, 0..4)?;
    let mut served = Managed::of(&wanted)?;
    served.write(&image)?;
    check(served.detail()?["spec"] == wanted.as_str(), || {
        format!("not {wanted}: {:?}", served.detail())
    })?;
    served.raid("replace", &["0", "--with", &name(&disks, 4)])?;
    served.raid("wait", &[])?;
    served.raid("replace", &["2", "--with", &name(&disks, 5)])?;
    served.raid("wait", &[])?;
    check(served.detail()?["spec"] == wanted.as_str(), || {
        "the pattern matches the new members".into()
    })?;
    served.parity_is_right()?;
    served.daemon.stop()?;

    // The list that started it, and one that is half right.
    let old = spec(&disks.paths(0..4), None);
    let file = |n: usize| format!("[file:{}]", name(&disks, n));
    let works = format!("raid5:{}", [4, 1, 5, 3].map(file).concat());
    let offers = format!("start it with {works}; or with raid5:uuid=");
    refused(
        &old,
        &[
            "m0 is no member of the array any more: it was thrown out after ",
            "m2 is no member of the array any more",
            "device number 4 has its place, 0",
            &offers,
        ],
    )?;
    let half = old.replace("m0]", "m4]");
    refused(&half, &["m2 is no member", &works])?;
    for volume in [&wanted, &works] {
        holds(volume, &image)?.daemon.stop()?;
    }
    let served = holds(&wanted, &image)?;
    for left in ["m0 is left out, since it is stale", "m2 is left out"] {
        let lines = served.daemon.lines();
        check(lines.iter().any(|l| l.contains(left)), || {
            format!("{left:?} isn't told: {lines:#?}")
        })?;
    }
    drop(served);
    let now = [4, 1, 5, 3].map(|n| disks.path(n));
    check(wrong_stripes(&now)? == 0, || "parity is wrong".into())
}

/// The text that the answer to an order holds starts the array, whenever the server is killed afterwards.
fn killed() -> Result<(), Stop> {
    need(&["nbdcopy", "cmp"])?;
    let mut rng = pvblk_testing::random();
    for order in ["replace", "fail"] {
        let (disks, image) = array(5, "ppl")?;
        let mut served = Managed::start(&names(&disks, &[0, 1, 2, 3]))?;
        served.write(&image)?;
        served.raid("speed", &["--min", "20000", "--max", "20000"])?;
        let new = name(&disks, 4);
        let args = match order {
            "replace" => vec!["1", "--with", &new, "--json"],
            _ => {
                served.raid("add", &[&new])?;
                vec!["1", "--json"]
            }
        };
        let answer: Value = serde_json::from_str(&served.raid(order, &args)?)?;
        let volume = answer["detail"]["spec"].as_str().unwrap_or_default();
        check(volume.starts_with("raid5:uuid="), || answer.to_string())?;
        std::thread::sleep(std::time::Duration::from_millis(rng.u64(0..1500)));
        served.daemon.kill()?;
        let mut served = holds(volume, &image)?;
        served.raid("wait", &[])?;
        let is = served.detail()?;
        check(is["degraded"] == false, || is.to_string())?;
        if order == "fail" {
            check(at(&is, 1) == ("active sync", "m4"), || is.to_string())?;
        }
        served.parity_is_right()?;
        served.daemon.stop()?;
    }
    Ok(())
}

fn candidates() -> Result<(), Stop> {
    need(&["nbdcopy", "cmp"])?;
    let (disks, image) = array(4, "ppl")?;
    let wanted = by_uuid(&disks, 0..4)?;
    let mut served = Managed::of(&wanted)?;
    served.write(&image)?;
    served.daemon.stop()?;
    let path = |name: &str| disks.dir.path().join(name);
    // Others' arrays, files of other kinds, and files that can't be read.
    let other = Disks::new(3)?;
    raid(&["create", "--raid-devices", "3"], &other.paths(0..3))?;
    std::fs::copy(other.path(0), path("m-other"))?;
    std::fs::create_dir(path("m-folder"))?;
    std::os::unix::fs::symlink("nowhere", path("m-link"))?;
    std::fs::copy(disks.path(1), path("m-short"))?;
    std::fs::OpenOptions::new()
        .write(true)
        .open(path("m-short"))?
        .set_len(6000)?;
    run_ok("mkfifo", [path("m-fifo")])?;
    let mut served = holds(&wanted, &image)?;
    let lines = served.daemon.lines();
    for left in [
        "m-folder is left out: it is a folder",
        "m-link is left out: No such file",
        "m-short is left out: it ends in the middle of its superblock",
    ] {
        check(lines.iter().any(|l| l.contains(left)), || {
            format!("{left:?} isn't told: {lines:#?}")
        })?;
    }
    check(!lines.iter().any(|l| l.contains("m-other")), || {
        format!("others are told: {lines:#?}")
    })?;
    served.daemon.stop()?;

    std::fs::copy(disks.path(1), path("m-copy"))?;
    refused(
        &wanted,
        &["m-copy", "/m1 ", "are the same member, or one is a copy"],
    )?;
    std::fs::remove_file(path("m-copy"))?;
    std::fs::rename(disks.path(3), path("away"))?;
    refused(
        &wanted,
        &[
            "no candidate is member 3 (number 3)",
            "write `missing` to start without it",
        ],
    )?;
    let mut served = holds(&format!("{wanted},missing"), &image)?;
    served.write(&image)?;
    served.daemon.stop()?;
    // The others know now that they are without it.
    holds(&wanted, &image)?.daemon.stop()?;
    std::fs::rename(path("away"), disks.path(3))?;
    let served = holds(&wanted, &image)?;
    let is = served.detail()?;
    check(is["missing"] == 3, || is.to_string())
}

/// A file on a file system that doesn't answer: nbdfuse, whose server is stopped.
fn hangs() -> Result<(), Stop> {
    need(&["nbdcopy", "cmp", "nbdfuse", "fusermount3"])?;
    let (disks, image) = array(4, "ppl")?;
    let wanted = by_uuid(&disks, 0..4)?;
    let mut served = Managed::of(&wanted)?;
    served.write(&image)?;
    served.daemon.stop()?;
    let dir = tempfile::tempdir()?;
    let nbd = dir.path().join("nbd");
    let slow = Daemon::start(["serve", "--disk", "x=mem:16M", "--nbd", &unix(&nbd)])?;
    let fuse = Fuse::mount(&disks.dir.path().join("fuse"), &uri(&nbd, "x"))?;
    slow.freeze()?;
    let volume = format!("{wanted},in={}", fuse.file.display());
    let served = holds(&volume, &image);
    slow.signal(Signal::CONT)?;
    let mut served = served?;
    let lines = served.daemon.lines();
    let left = format!("{} is left out: it doesn't answer", fuse.file.display());
    check(lines.iter().any(|l| l.contains(&left)), || {
        format!("{left:?} isn't told: {lines:#?}")
    })?;
    served.daemon.stop()
}

/// mdadm's `ARRAY` lines and ours are about the same arrays.
fn scanned() -> Result<(), Stop> {
    need(&["mdadm", "nbdcopy", "cmp"])?;
    let (disks, image) = array(4, "bitmap")?;
    let mut served = Managed::start(&names(&disks, &[0, 1, 2, 3]))?;
    served.write(&image)?;
    served.daemon.stop()?;
    let mut theirs = tool("mdadm", ["--examine", "--brief"]);
    theirs.args(disks.paths(0..4));
    let theirs = run(theirs, PATIENCE)?.success()?.stdout;
    let uuid = theirs
        .split_whitespace()
        .find_map(|w| w.strip_prefix("UUID="));
    let Some(uuid) = uuid else {
        return Stop::fail(format!("mdadm tells no UUID: {theirs}"));
    };
    let pattern = disks.dir.path().join("m*");
    let ours = raid(&["scan"], std::slice::from_ref(&pattern))?;
    check(
        ours == format!("raid5:uuid={uuid},in={}\n", pattern.display()),
        || format!("{ours}mdadm: {theirs}"),
    )?;
    holds(ours.trim(), &image)?.daemon.stop()?;
    // With dashes, as blkid and others write it.
    let plain: String = uuid.split(':').collect();
    let dashes = format!(
        "{}-{}-{}-{}-{}",
        &plain[..8],
        &plain[8..12],
        &plain[12..16],
        &plain[16..20],
        &plain[20..]
    );
    holds(&ours.trim().replace(uuid, &dashes), &image).map(drop)
}

fn told() -> Result<(), Stop> {
    let (disks, _) = array(6, "ppl")?;
    let mut served = Managed::start(&names(&disks, &[0, 1, 2, 3]))?;
    let file = |n: usize| format!("file:{}", name(&disks, n));
    let says = |word: &str, args: &[&str], line: &str| -> Result<(), Stop> {
        let said = served.raid(word, args)?;
        check(said == format!("{line}\n"), || {
            format!("{word} {args:?} says {said:?}, not {line:?}")
        })
    };
    says(
        "speed",
        &["--max", "100000"],
        "r: rebuilds and checks take 1000 to 100000 KiB/s of each member",
    )?;
    says("stripes", &["512"], "r: 512 stripe heads are kept")?;
    says(
        "write-path",
        &["stripe-queue"],
        "r: the write path is stripe-queue",
    )?;
    says(
        "freeze",
        &[],
        "r is frozen: nothing is rebuilt or resynchronised",
    )?;
    says(
        "unfreeze",
        &[],
        "r isn't frozen: it is rebuilt and resynchronised",
    )?;
    says("idle", &[], "r: nothing was under way")?;
    says("wait", &[], "r: nothing is under way")?;
    says(
        "check",
        &[],
        "check of r has begun: `pvblk raid wait` follows it",
    )?;
    served.raid("wait", &[])?;
    says("check", &["--wait"], "mismatch_cnt: 0")?;
    let (m1, m4, m5) = (file(1), file(4), file(5));
    says("add", &[&m4], &format!("added {m4} to r as a spare"))?;
    says("remove", &[&m4], &format!("removed {m4} from r"))?;
    served.raid("add", &[&m4])?;
    says(
        "fail",
        &["1"],
        &format!("member 1 of r, {m1}, is thrown out; {m4} is rebuilt in its place"),
    )?;
    says("wait", &[], "r: the rebuild has ended")
        .or_else(|_| says("wait", &[], "r: nothing is under way"))?;
    says(
        "replace",
        &["2", "--with", &m5],
        &format!(
            "{m5} is rebuilt to replace member 2 of r, {}, which is used until then",
            file(2)
        ),
    )?;
    let json: Value = serde_json::from_str(&served.raid("wait", &["--json"])?)?;
    check(
        json["command"] == "wait" && json["array"] == "r" && json["detail"]["degraded"] == false,
        || json.to_string(),
    )?;
    served.daemon.stop()
}

/// On a terminal the view has the alternate screen, fits it after a change of its size, and gives it back at Ctrl-C; a pipe gets text.
fn watched() -> Result<(), Stop> {
    need(&["script", "stty"])?;
    let (disks, _) = array(4, "ppl")?;
    let served = Managed::start(&names(&disks, &[0, 1, 2, 3]))?;
    let program = pvblk(["raid"])?.get_program().to_owned();
    let watch = format!(
        "{} raid detail --watch --control {} r",
        program.display(),
        unix(&served.path("control"))
    );
    let out = served.path("typescript");
    let shell = format!(
        r#"views() {{ grep -ac 'Raid Level' '{out}'; }}
until_views() {{ while [ "$(views)" -lt "$1" ]; do sleep 0.1; done; }}
(until_views 2; stty cols 40 rows 8 <&3; until_views 6; kill -INT $$) 3</dev/tty &
exec {watch}"#,
        out = out.display()
    );
    let file = served.path("watch.sh");
    std::fs::write(&file, shell)?;
    let script = format!("sh {}", file.display());
    run(
        tool(
            "script",
            ["-qefc".as_ref(), script.as_ref(), out.as_os_str()],
        ),
        PATIENCE,
    )?;
    let drawn = std::fs::read_to_string(&out)?;
    let (enter, leave) = ("\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l");
    check(drawn.contains(enter) && drawn.contains(leave), || {
        format!("the screen isn't taken and given back: {drawn:?}")
    })?;
    let frames: Vec<&str> = drawn.split("\x1b[H").collect();
    check(frames[0].contains(enter) && frames.len() > 4, || {
        format!("not drawn in place: {drawn:?}")
    })?;
    let last: Vec<&str> = frames[frames.len() - 2].split("\r\n").collect();
    let longest = last
        .iter()
        .map(|l| l.trim_end_matches("\x1b[J").chars().count());
    check(
        last.len() == 8 && longest.max() <= Some(39 + "\x1b[K".len()),
        || format!("it doesn't fit 8 rows of 40: {last:?}"),
    )?;
    let plain = format!("{watch} | head -n 60");
    let plain = run(tool("sh", ["-c", &plain]), PATIENCE)?.stdout;
    check(
        plain.matches("Raid Level : raid5\n").count() == 2 && !plain.contains('\x1b'),
        || format!("no plain text: {plain:?}"),
    )
}
