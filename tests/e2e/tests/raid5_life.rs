//! The life of an array in `pvblk raid`'s words: spares, failures, rebuilds, checks; while it is served and while it isn't.

use pvblk_e2e::arrays::{Disks, LIMIT, detail, raid, random, scribble, sum, wrong_stripes};
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::managed::{
    Managed, PATIENCE, array, array_with_spare, at, examined, name, names, rebuilt,
};
use pvblk_e2e::outcome::check;
use pvblk_e2e::stage::{unix, uri};
use pvblk_e2e::tools::{Finished, compare, fio_verify, need, need_fio_nbd, run, run_ok};
use pvblk_e2e::{Daemon, Stop, full, run_all};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    run_all(&[
        ("a_spare_takes_the_place_of_a_member", taken),
        ("wrong_parity_is_found_and_made_right", checked),
        ("a_living_member_is_replaced", replaced),
        ("a_frozen_array_begins_nothing", frozen),
        ("a_rebuild_goes_on_after_a_restart", restarted),
        ("a_rebuild_goes_on_after_a_kill", killed),
        ("arrays_are_managed_without_a_server", offline),
        ("mistakes_are_told_in_one_line", mistakes),
        ("a_control_socket_takes_no_nonsense", nonsense),
        ("fio_verifies_while_a_member_is_failed", || {
            loaded(Fate::Told)
        }),
        ("fio_verifies_while_a_member_breaks", || {
            loaded(Fate::Breaks)
        }),
        ("fio_verifies_while_a_member_reads_badly", || {
            loaded(Fate::ReadsBadly)
        }),
    ])
}

fn taken() -> Result<(), Stop> {
    need(&["mdadm", "nbdcopy", "cmp"])?;
    for policy in ["ppl", "bitmap", "resync"] {
        let (disks, image) = array(5, policy)?;
        let mut served = Managed::start(&names(&disks, &[0, 1, 2, 3]))?;
        served.write(&image)?;
        served.raid("add", &[&name(&disks, 4)])?;
        let text = served.raid("detail", &[])?;
        check(
            text.contains("State : active\n") && text.contains("4        -     spare"),
            || text,
        )?;
        // Slow enough to be seen.
        served.raid("speed", &["--min", "4000", "--max", "4000"])?;
        served.raid("fail", &["1"])?;
        let is = served.until("rebuilding", |d| {
            d["serving"]["sync"]["done_bytes"].as_u64() > Some(1 << 20)
        })?;
        check(
            is["degraded"] == true
                && is["missing"] == 1
                && at(&is, 1) == ("spare rebuilding", "m4")
                && is["serving"]["sync"]["action"] == "recover",
            || is.to_string(),
        )?;
        let text = served.raid("detail", &[])?;
        for line in [
            "State : active, degraded, recovering",
            "Rebuild Status : ",
            " KiB/s, 0:0",
            "4        1     spare rebuilding",
        ] {
            check(text.contains(line), || format!("{line:?} isn't in {text}"))?;
        }
        served.raid("speed", &["--min", "200000", "--max", "200000"])?;
        let said = served.try_raid("wait", &[])?.success()?;
        check(
            said.stderr.contains(" % of") || said.stderr.contains(" %, "),
            || format!("no progress is told: {said:?}"),
        )?;
        let is = served.detail()?;
        check(
            is["degraded"] == false && at(&is, 1) == ("active sync", "m4"),
            || is.to_string(),
        )?;
        served.parity_is_right()?;
        let back = disks.dir.path().join("back");
        served.read(&back)?;
        compare(&image, &back)?;
        served.daemon.stop()?;
        let now = [0, 4, 2, 3].map(|n| disks.path(n));
        check(wrong_stripes(&now)? == 0, || {
            format!("{policy}: parity is wrong")
        })?;
        check(
            examined(&now[1], "Device Role")? == "Active device 1",
            || "mdadm knows no new member".into(),
        )?;
        for member in &now {
            check(
                examined(member, "State")? == "clean"
                    && examined(member, "Array State")?.starts_with("AAAA "),
                || format!("{member:?} isn't of a whole array"),
            )?;
        }
        // The one that was thrown out stays out.
        let all = disks.paths(0..5);
        let is = detail(&all)?;
        check(
            at(&is, 1) == ("active sync", "m4") && is["notes"].to_string().contains("m1 is stale"),
            || is.to_string(),
        )?;
    }
    Ok(())
}

/// Runs `pvblk raid` on members; returns its exit status and its output.
fn status(args: &[&str], members: &[PathBuf]) -> Result<(Option<i32>, Finished), Stop> {
    let mut command = pvblk(["raid"])?;
    command.args(args).args(members);
    let said = run(command, LIMIT)?;
    Ok((said.status.and_then(|s| s.code()), said))
}

fn checked() -> Result<(), Stop> {
    need(&["mdadm"])?;
    let (disks, _) = array(4, "ppl")?;
    let members = disks.paths(0..4);
    let found = |args: &[&str], code: i32, sectors: u64| -> Result<(), Stop> {
        let (status, said) = status(args, &members)?;
        check(
            status == Some(code) && said.stdout == format!("mismatch_cnt: {sectors}\n"),
            || format!("not {code}, {sectors}: {said:?}"),
        )
    };
    found(&["check"], 0, 0)?;
    let offset = examined(&members[0], "Data Offset")?;
    let offset: u64 = offset.trim_end_matches(" sectors").parse().unwrap_or(0);
    // The first stripe's parity is the last member's.
    let file = OpenOptions::new().write(true).open(&members[3])?;
    file.write_all_at(&[0x5a], offset * 512 + 5000)?;
    found(&["check"], 1, 8)?;
    let mut served = Managed::start(&names(&disks, &[0, 1, 2, 3]))?;
    let said = served.try_raid("check", &["--wait"])?;
    check(
        said.status.and_then(|s| s.code()) == Some(1) && said.stdout == "mismatch_cnt: 8\n",
        || format!("{said:?}"),
    )?;
    check(served.detail()?["serving"]["mismatch_sectors"] == 8, || {
        "the count isn't told afterwards".into()
    })?;
    served.daemon.stop()?;
    check(wrong_stripes(&members)? == 1, || {
        "a check changed parity".into()
    })?;
    found(&["repair"], 0, 8)?;
    found(&["check"], 0, 0)?;
    check(wrong_stripes(&members)? == 0, || "parity is wrong".into())?;
    check(examined(&members[3], "State")? == "clean", || {
        "not clean after a repair".into()
    })
}

fn replaced() -> Result<(), Stop> {
    need(&["mdadm", "nbdcopy", "cmp"])?;
    for policy in ["ppl", "bitmap"] {
        let (disks, image) = array(5, policy)?;
        let mut served = Managed::start(&names(&disks, &[0, 1, 2, 3]))?;
        served.write(&image)?;
        served.raid("speed", &["--max", "4000"])?;
        let new = format!("file:{}", name(&disks, 4));
        served.raid("replace", &[&name(&disks, 2), "--with", &new])?;
        let is = served.until("replacing", |d| !d["serving"]["sync"].is_null())?;
        let both = is["members"].as_array().map_or(0, |members| {
            members.iter().filter(|m| m["place"] == 2).count()
        });
        check(
            both == 2 && at(&is, 2).1 == "m2" && is["degraded"] == false,
            || is.to_string(),
        )?;
        // Meanwhile the cache gets smaller and larger, and new data comes.
        for stripes in ["8", "1024", "64"] {
            served.raid("stripes", &[stripes])?;
            let now = served.detail()?["serving"]["stripes"].to_string();
            check(now == stripes, || format!("{now} stripes, not {stripes}"))?;
            scribble(&image, &mut pvblk_testing::random())?;
            served.write(&image)?;
        }
        served.raid("speed", &["--min", "200000", "--max", "200000"])?;
        served.raid("wait", &[])?;
        let is = served.detail()?;
        check(at(&is, 2) == ("active sync", "m4"), || is.to_string())?;
        served.parity_is_right()?;
        let back = disks.dir.path().join("back");
        served.read(&back)?;
        compare(&image, &back)?;
        served.daemon.stop()?;
        let role = examined(&disks.path(4), "Device Role")?;
        check(role == "Active device 2", || role)?;
        let now = [0, 1, 4, 3].map(|n| disks.path(n));
        check(wrong_stripes(&now)? == 0, || "parity is wrong".into())?;
    }
    Ok(())
}

fn frozen() -> Result<(), Stop> {
    let disks = array_with_spare()?;
    let mut served = Managed::start(&names(&disks, &[0, 1, 2, 3, 4]))?;
    served.raid("freeze", &[])?;
    served.raid("fail", &["3"])?;
    std::thread::sleep(Duration::from_millis(600));
    let is = served.detail()?;
    check(
        at(&is, 3).0 == "removed" && is["serving"]["sync"].is_null(),
        || format!("frozen, and yet {is}"),
    )?;
    let said = served.try_raid("wait", &[])?;
    check(said.stderr.contains("frozen: unfreeze it"), || {
        format!("{said:?}")
    })?;
    served.raid("speed", &["--min", "2000", "--max", "2000"])?;
    served.raid("unfreeze", &[])?;
    let begun = |d: &Value| d["serving"]["sync"]["done_bytes"].as_u64() > Some(1 << 20);
    served.until("rebuilding", begun)?;
    served.raid("freeze", &[])?;
    let before = served.detail()?;
    std::thread::sleep(Duration::from_millis(300));
    let after = served.detail()?;
    check(
        before["serving"]["sync"].is_null() && before["members"] == after["members"],
        || format!("frozen at {before}, and then {after}"),
    )?;
    served.raid("speed", &["--min", "200000", "--max", "200000"])?;
    served.raid("unfreeze", &[])?;
    served.raid("wait", &[])?;
    served.parity_is_right()?;
    served.raid("speed", &["--min", "1000", "--max", "1000"])?;
    served.raid("check", &[])?;
    let is = served.detail()?;
    check(is["serving"]["sync"]["action"] == "check", || {
        is.to_string()
    })?;
    served.raid("idle", &[])?;
    let is = served.detail()?;
    check(is["serving"]["sync"].is_null(), || is.to_string())?;
    served.daemon.stop()
}

/// Serves an array with a member less and a spare, and lets the rebuild come to a third.
fn third(disks: &Disks, image: &Path) -> Result<Managed, Stop> {
    let served = Managed::start(&names(disks, &[0, 1, 2, 3]))?;
    served.write(image)?;
    served.raid("speed", &["--min", "6000", "--max", "6000"])?;
    served.raid("add", &[&name(disks, 4)])?;
    served.raid("fail", &[&name(disks, 1)])?;
    served.until("a third", |d| rebuilt(d, 1) > 7 << 20)?;
    // So that it isn't done before its server is stopped, on a busy machine either.
    served.raid("speed", &["--min", "1000", "--max", "1000"])?;
    Ok(served)
}

/// All that is left, the new one slow, so that it is seen where the rebuild goes on.
fn slowly(disks: &Disks) -> Vec<String> {
    let mut members = names(disks, &[0, 2, 3]);
    members.push(format!("delay:0us,bw=10M:file:{}", name(disks, 4)));
    members
}

fn restarted() -> Result<(), Stop> {
    need(&["mdadm", "nbdcopy", "cmp"])?;
    for policy in ["ppl", "bitmap", "resync"] {
        let (disks, image) = array(5, policy)?;
        let mut served = third(&disks, &image)?;
        served.daemon.stop()?;
        let left = [0, 2, 3, 4].map(|n| disks.path(n));
        let offline = detail(&left)?;
        let done = rebuilt(&offline, 1);
        check(
            done > 6 << 20 && at(&offline, 1) == ("spare rebuilding", "m4"),
            || offline.to_string(),
        )?;
        let told = examined(&left[3], "Recovery Offset")?;
        check(told == format!("{} sectors", done / 512), || {
            format!("{policy}: mdadm says {told}, and we {done} bytes")
        })?;
        let mut served = Managed::start(&slowly(&disks))?;
        let is = served.detail()?;
        let now = is["serving"]["sync"]["done_bytes"].as_u64().unwrap_or(0);
        check(
            rebuilt(&is, 1) >= done && (now >= done || now == 0) && is["degraded"] == true,
            || format!("{policy}: after {done} bytes: {is}"),
        )?;
        served.raid("wait", &[])?;
        served.parity_is_right()?;
        let back = disks.dir.path().join("back");
        served.read(&back)?;
        compare(&image, &back)?;
        served.daemon.stop()?;
        let role = examined(&left[3], "Device Role")?;
        check(role == "Active device 1", || role)?;
    }
    Ok(())
}

fn killed() -> Result<(), Stop> {
    need(&["mdadm", "nbdcopy", "cmp"])?;
    let (disks, image) = array(5, "ppl")?;
    let mut served = third(&disks, &image)?;
    scribble(&image, &mut pvblk_testing::random())?;
    served.write(&image)?;
    served.daemon.kill()?;
    let left = [0, 2, 3, 4].map(|n| disks.path(n));
    let offline = detail(&left)?;
    check(
        offline["clean"] == false && at(&offline, 1).1 == "m4",
        || offline.to_string(),
    )?;
    let mut served = Managed::start(&slowly(&disks))?;
    served.raid("wait", &[])?;
    served.parity_is_right()?;
    let back = disks.dir.path().join("back");
    served.read(&back)?;
    compare(&image, &back)?;
    served.daemon.stop()?;
    check(wrong_stripes(&left)? == 0, || "parity is wrong".into())?;
    check(
        examined(&left[3], "Device Role")? == "Active device 1"
            && examined(&left[3], "State")? == "clean",
        || "mdadm doesn't know the new member".into(),
    )
}

fn offline() -> Result<(), Stop> {
    need(&["mdadm"])?;
    let disks = Disks::new(6)?;
    let args = ["create", "--raid-devices", "4", "--spare-devices", "1"];
    let mut named = disks.paths(0..2);
    named.extend(["missing".into(), disks.path(2), disks.path(3)]);
    raid(&args, &named)?;
    let there = disks.paths(0..4);
    let is = detail(&there)?;
    check(is["missing"] == 2 && at(&is, 2).0 == "removed", || {
        is.to_string()
    })?;
    raid(&["rebuild"], &there)?;
    let is = detail(&there)?;
    check(at(&is, 2) == ("active sync", "m3"), || is.to_string())?;
    let role = examined(&disks.path(3), "Device Role")?;
    check(role == "Active device 2", || role)?;
    // One more spare, and then a member is lost.
    let new = disks.path(4).display().to_string();
    raid(&["add", "--spare", &new], &there)?;
    let role = examined(&disks.path(4), "Device Role")?;
    check(role == "spare", || role)?;
    let left = [0, 2, 3, 4].map(|n| disks.path(n));
    let (code, said) = status(&["rebuild"], &left)?;
    check(
        code == Some(1) && said.stderr.contains("--run") && said.stderr.lines().count() == 1,
        || format!("{said:?}"),
    )?;
    let (code, said) = status(&["rebuild", "--run", "--speed", "20000"], &left)?;
    check(code == Some(0) && said.stderr.contains("recover: "), || {
        format!("{said:?}")
    })?;
    raid(&["check"], &left)?;
    check(wrong_stripes(&left)? == 0, || "parity is wrong".into())?;
    // A crash is made right without serving.
    let mut served = Managed::start(&names(&disks, &[0, 2, 3, 4]))?;
    let image = disks.dir.path().join("image");
    std::fs::write(&image, random(8 << 20))?;
    run_ok(
        "nbdcopy",
        [image.as_os_str(), uri(&served.path("nbd"), "r").as_ref()],
    )?;
    served.daemon.kill()?;
    check(detail(&left)?["clean"] == false, || "not killed".into())?;
    let said = raid(&["assemble"], &left)?;
    check(said.contains("clean, 4 of 4 members"), || said)?;
    check(detail(&left)?["clean"] == true, || "not clean".into())?;
    check(wrong_stripes(&left)? == 0, || "parity is wrong".into())
}

fn mistakes() -> Result<(), Stop> {
    let (disks, _) = array(6, "ppl")?;
    File::create(disks.path(5))?.set_len(8 << 20)?;
    let mut served = Managed::start(&names(&disks, &[0, 1, 2, 3]))?;
    let refused = |said: Finished, what: &str| {
        let one_line = said.stderr.lines().count() == 1;
        let code = said.status.and_then(|s| s.code());
        check(
            code == Some(1) && one_line && said.stderr.contains(what),
            || format!("{what:?} isn't all of {said:?}"),
        )
    };
    let (member, small) = (name(&disks, 0), name(&disks, 5));
    let nosuch = name(&disks, 9);
    for (word, args, what) in [
        ("fail", &["4"][..], "there are places 0 to 3"),
        ("fail", &["99999999999999999999"], "there are places 0 to 3"),
        ("fail", &[&nosuch], "no such member"),
        ("add", &[&member], "it is in the array already"),
        (
            "add",
            &[&format!("file:{member},direct")],
            "in the array already",
        ),
        ("add", &[&small], "take a larger one"),
        ("add", &[&nosuch], "add size=SIZE to make it"),
        ("add", &["floppy:1"], "unknown kind"),
        ("remove", &[&member], "no spare of the array"),
        ("replace", &["1"], "there is no spare"),
        ("replace", &["1", "--with", &small], "take a larger one"),
        ("stripes", &["7"], "8 to 32768"),
        ("speed", &["--min", "0"], "at least 1"),
        ("speed", &["--min", "300000"], "not below"),
        ("speed", &[], "--min, --max"),
    ] {
        refused(served.try_raid(word, args)?, what)?;
    }
    let control = unix(&served.path("control"));
    let other = pvblk(["raid", "detail", "--control", &control, "x"])?;
    refused(run(other, LIMIT)?, "no disk named x; there are r")?;
    let nowhere = unix(&served.path("nowhere"));
    let other = pvblk(["raid", "detail", "--control", &nowhere, "r"])?;
    refused(run(other, LIMIT)?, "is `pvblk serve` running there?")?;
    // With the members themselves while they are served.
    let (_, said) = status(&["check"], &disks.paths(0..4))?;
    refused(said, "open and locked")?;
    // Two members can't fail, a spare isn't added twice.
    served.raid("freeze", &[])?;
    served.raid("fail", &["1"])?;
    refused(served.try_raid("fail", &["2"])?, "the array would be lost")?;
    refused(served.try_raid("fail", &["1"])?, "no member is at place 1")?;
    refused(served.try_raid("check", &[])?, "no parity to compare")?;
    refused(served.try_raid("replace", &["2"])?, "a member is missing")?;
    served.raid("add", &[&name(&disks, 4)])?;
    refused(
        served.try_raid("add", &[&name(&disks, 4)])?,
        "in the array already",
    )?;
    refused(
        served.try_raid("fail", &[&name(&disks, 4)])?,
        "remove it instead",
    )?;
    served.raid("remove", &[&name(&disks, 4)])?;
    // It is free again.
    run_ok("cp", [disks.path(4), disks.path(5)])?;
    refused(served.try_raid("wait", &[])?, "degraded")?;
    served.daemon.stop()
}

/// The reply of a control socket to these bytes.
fn answer(served: &Managed, question: &[u8]) -> Result<String, Stop> {
    let mut socket = UnixStream::connect(served.path("control"))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    // It may hang up before it has read all.
    let _ = socket.write_all(question);
    let _ = socket.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer);
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

fn nonsense() -> Result<(), Stop> {
    let (disks, _) = array(4, "ppl")?;
    let mut served = Managed::start(&names(&disks, &[0, 1, 2, 3]))?;
    let long = [b"ask r ".as_slice(), &[b' '; 20_000], b"{}\n"].concat();
    let deep = [b"ask r ".as_slice(), &[b'['; 10_000], b"\n"].concat();
    for (question, what) in [
        (&b"\n"[..], "the questions are"),
        (b"ask\n", "the questions are"),
        (b"ask r\n", "the questions are"),
        (b"ask  {}\n", "no disk named "),
        (b"ask r {\"raid\":\"detail\"\n", "EOF while parsing"),
        (b"ask r {}\n", "knows no such questions"),
        (b"ask r 5\n", "knows no such questions"),
        (b"ask r [\"detail\"]\n", "knows no such questions"),
        (b"ask r {\"raid\":\"grow\"}\n", "unknown variant"),
        (b"ask r {\"raid\":\"detail\",\"x\":1}\n", "unknown field"),
        (
            b"ask r {\"raid\":\"stripes\",\"stripes\":1e9}\n",
            "invalid type",
        ),
        (
            b"ask r {\"raid\":\"fail\",\"member\":\"\\n\\u0000error\"}\n",
            "no such member",
        ),
        (
            b"ask r {\"raid\":\"add\",\"member\":\"file:\\u0000\"}\n",
            "zero byte",
        ),
        (b"\xff\xfe\n", "isn't UTF-8"),
        (&long, "at most 16384 bytes"),
        (&deep, "recursion limit"),
    ] {
        let said = answer(&served, question)?;
        check(
            said.starts_with("error: ") && said.contains(what) && said.lines().count() == 1,
            || format!("{what:?} isn't all of {said:?}"),
        )?;
    }
    let said = answer(&served, b"ask r {\"raid\":\"detail\"}")?;
    let json = said.strip_prefix("ok\n").unwrap_or_default();
    let detail: Value = serde_json::from_str(json)?;
    check(detail["serving"]["failed"] == false, || said)?;
    served.daemon.stop()
}

/// The end of a member under load.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    /// Somebody says so.
    Told,
    /// From some request on nothing works.
    Breaks,
    /// From some request on many reads fail.
    ReadsBadly,
}

/// A load over NBD, an attached front end and rings, with all that it reads verified, knows nothing of a member that fails and
/// is rebuilt.
fn loaded(fate: Fate) -> Result<(), Stop> {
    need_fio_nbd()?;
    let disks = array_with_spare()?;
    let mut members = names(&disks, &[0, 1, 2, 3, 4]);
    let file = &members[1];
    members[1] = match fate {
        Fate::Told => file.clone(),
        Fate::Breaks => format!("fault:seed=1,after=3000,error=1:file:{file}"),
        Fate::ReadsBadly => format!("fault:seed=1,after=1000,read-error=0.02:file:{file}"),
    };
    let mut served = Managed::start(&members)?;
    let (local, nbd) = (unix(&served.path("local")), unix(&served.path("attached")));
    let args = ["attach", &local, "--disk", "r", "--nbd", &nbd];
    let mut attach = Daemon::start(args.iter().chain(&["--queues", "2"]))?;
    // Not so slow that the rebuild begins after the load, nor so fast that it ends before it is seen.
    served.raid("speed", &["--min", "4000", "--max", "8000"])?;
    let seconds = if full() { 60 } else { 6 };
    let uri = uri(&served.path("attached"), "r");
    let fio = std::thread::spawn(move || fio(&uri, seconds));
    std::thread::sleep(Duration::from_secs(1));
    if fate == Fate::Told {
        served.raid("fail", &["1"])?;
    }
    if fate != Fate::ReadsBadly {
        // On a machine that is slow to look, the rebuild has ended.
        served.until("rebuilding", |d| at(d, 1).1 == "m4")?;
    }
    let ended = fio.join();
    ended.unwrap_or_else(|_| Stop::fail("the thread that runs fio panicked"))?;
    served.raid("wait", &[])?;
    let is = served.detail()?;
    let corrected = is["members"][1]["corrected_reads"].as_u64() > Some(0);
    check(
        at(&is, 1) == ("active sync", "m4") || (fate == Fate::ReadsBadly && corrected),
        || is.to_string(),
    )?;
    served.raid("speed", &["--min", "200000", "--max", "200000"])?;
    served.parity_is_right()?;
    let is = served.detail()?;
    let back = disks.dir.path().join("back");
    served.read(&back)?;
    let before = sum(&back)?;
    attach.stop()?;
    served.daemon.stop()?;
    // The written data is there without a server's cache.
    let which = if at(&is, 1).1 == "m4" { 4 } else { 1 };
    let mut served = Managed::start(&names(&disks, &[0, which, 2, 3]))?;
    served.raid("fail", &["2"])?;
    served.read(&back)?;
    check(sum(&back)? == before, || {
        "what was read before isn't what parity says".into()
    })?;
    served.daemon.stop()
}

fn fio(uri: &str, seconds: u64) -> Result<(), Stop> {
    let options = [
        "--rw=randrw",
        "--rwmixread=30",
        "--bssplit=4k/50:16k/20:64k/20:256k/10",
        "--iodepth=16",
        "--numjobs=3",
        "--size=20M",
        "--offset_increment=20M",
        "--verify_backlog=256",
        "--fsync=64",
        "--time_based=1",
        &format!("--runtime={seconds}"),
    ];
    fio_verify(uri, &options, Duration::from_secs(seconds + 90))
}
