//! RAID-5 arrays of pvblk as mdadm sees them, and the recomputation of their parity.

use pvblk_e2e::arrays::{
    Disks, LIMIT, Served, copies, detail, dump, raid, random, scribble, spec, wrong_stripes,
};
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{compare, need, run, run_ok, tool};
use pvblk_e2e::{Stop, run_all};
use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    run_all(&[
        ("members_are_what_mdadm_would_make", examined),
        ("old_disks_get_their_parity", resynced),
        ("mistakes_are_told_in_one_line", mistakes),
        ("a_killed_server_leaves_right_parity", killed),
    ])
}

fn examined() -> Result<(), Stop> {
    need(&["mdadm", "blkid"])?;
    let layouts = [
        "left-symmetric",
        "left-asymmetric",
        "right-symmetric",
        "right-asymmetric",
    ];
    let policies = ["ppl", "resync", "bitmap"];
    for n in 0..4 {
        let (layout, policy, chunk) = (layouts[n], policies[n % 3], ["64K", "512K", "4", "1M"][n]);
        let disks = Disks::new(3 + n)?;
        let members = disks.paths(0..3 + n);
        let count = members.len().to_string();
        let mut args = vec!["create", "--name", "host:vol0", "--raid-devices", &count];
        args.extend([
            "--layout",
            layout,
            "--consistency-policy",
            policy,
            "--chunk",
            chunk,
        ]);
        if n == 3 {
            args.extend(["--size", "10M"]);
        }
        raid(&args, &members)?;
        for member in &members {
            let mut theirs = tool("mdadm", ["--examine".as_ref(), member.as_os_str()]);
            theirs.env("TZ", "UTC");
            let theirs = run(theirs, LIMIT)?.success()?.stdout;
            let told = raid(&["examine"], std::slice::from_ref(member))?;
            // Two lines more: the volume and the private map, which mdadm doesn't know.
            let (volume, map) = (" Found By : ", " Private Map : ");
            check(told.contains(map) == (policy != "bitmap"), || told.clone())?;
            let ours: Vec<&str> = told
                .lines()
                .filter(|l| !l.contains(volume) && !l.contains(map))
                .collect();
            let ours = ours.join("\n");
            check(words(&ours) == words(&theirs), || {
                format!("{ours}\nmdadm: {theirs}")
            })?;
            check(
                theirs.contains(" - correct") && theirs.contains("State : clean"),
                || theirs.clone(),
            )?;
            check(theirs.contains(layout), || theirs.clone())?;
            let probed = run_ok("blkid", ["-p".as_ref(), member.as_os_str()])?.stdout;
            check(probed.contains("TYPE=\"linux_raid_member\""), || probed)?;
        }
        let detail = detail(&members)?;
        check(
            detail["clean"] == true
                && detail["layout"] == layout
                && detail["consistency_policy"] == policy
                && detail["raid_devices"] == members.len(),
            || detail.to_string(),
        )?;
    }
    Ok(())
}

/// Lines, whatever the spaces between words.
fn words(text: &str) -> Vec<String> {
    let lines = text
        .lines()
        .map(|l| l.split_whitespace().collect::<Vec<_>>().join(" "));
    lines.filter(|l| !l.is_empty()).collect()
}

fn resynced() -> Result<(), Stop> {
    for policy in ["ppl", "resync", "bitmap"] {
        let disks = Disks::new(3)?;
        for path in disks.paths(0..3) {
            std::fs::write(path, random(24 << 20))?;
        }
        let members = disks.paths(0..3);
        let mut args = vec![
            "create",
            "--raid-devices",
            "3",
            "--consistency-policy",
            policy,
        ];
        args.push("--assume-clean");
        raid(&args, &members)?;
        check(wrong_stripes(&members)? > 5000, || {
            "taken at its word".into()
        })?;
        args.pop();
        args.push("--force");
        let mut command = pvblk(["raid"])?;
        command.args(&args).args(&members);
        let said = run(command, LIMIT)?.success()?;
        check(said.stderr.contains("resync: 100 %"), || said.stderr)?;
        check(wrong_stripes(&members)? == 0, || {
            format!("{policy}: parity is wrong")
        })?;
        check(detail(&members)?["clean"] == true, || "not clean".into())?;
    }
    Ok(())
}

fn mistakes() -> Result<(), Stop> {
    let disks = Disks::new(5)?;
    let members = disks.paths(0..3);
    let all = disks.paths(0..5);
    let refused = |args: &[&str], members: &[PathBuf], what: &str| -> Result<(), Stop> {
        let mut command = pvblk(["raid"])?;
        command.args(args).args(members);
        let said = run(command, LIMIT)?;
        let failed = said.status.is_some_and(|s| !s.success());
        let told = said.stderr.contains(what) && said.stderr.lines().count() == 1;
        check(failed && told, || {
            format!("{args:?}: {what:?} isn't in {said:?}")
        })
    };
    let three = ["create", "--raid-devices", "3"];
    let with = |more: &[&'static str]| [&three[..], more].concat();
    refused(
        &["create", "--raid-devices", "4"],
        &members,
        "and 3 members are named",
    )?;
    refused(&with(&["--level", "6"]), &members, "only 5 is supported")?;
    refused(&with(&["--chunk", "100K"]), &members, "power of two")?;
    refused(&with(&["--chunk", "x"]), &members, "--chunk")?;
    refused(
        &with(&["--layout", "parity-last"]),
        &members,
        "left-symmetric",
    )?;
    refused(
        &with(&["--consistency-policy", "journal"]),
        &members,
        "ppl, resync or bitmap",
    )?;
    refused(&with(&["--size", "1G"]), &members, "take less")?;
    refused(
        &with(&[]),
        &["nosuch/a".into(), "b".into(), "c".into()],
        "nosuch/a",
    )?;
    let twin: PathBuf = format!("{},nolock", members[0].display()).into();
    refused(
        &with(&[]),
        &[twin.clone(), members[1].clone(), twin],
        "is named twice",
    )?;
    refused(&["detail"], &members, "not a member of an md array")?;
    raid(&three, &members)?;
    refused(&three, &members, "is a member of array")?;
    refused(&["detail"], &all, "m3: not a member")?;
    refused(&["detail"], &members[..1], "2 are needed")?;
    raid(&["create", "--raid-devices", "3", "--force"], &all[2..5])?;
    refused(&["detail"], &all[1..3], "name the members of one")?;

    // An array without one of its members is served only if the specification says so.
    let serve = |spec: String, what: &str| -> Result<(), Stop> {
        let socket = disks.dir.path().join("s");
        let nbd = format!("unix:{}", socket.display());
        let disk = format!("r={spec}");
        let said = run(pvblk(["serve", "--disk", &disk, "--nbd", &nbd])?, LIMIT)?;
        let told = said.stderr.contains(what);
        check(said.status.is_some_and(|s| !s.success()) && told, || {
            format!("{spec}: {said:?}")
        })
    };
    let name = |n: usize| all[n].display().to_string();
    serve(
        format!("raid5:[{}][{}]", name(2), name(3)),
        "an array has 3 to 64 members",
    )?;
    serve(
        format!("raid5:[{}][{}][{}]", name(2), name(3), name(0)),
        "name the members of one",
    )?;
    serve(format!("raid5:[{}][{}][{}]", name(2), name(3), name(3)), "")?;
    let read_only = format!("raid5:[{}][{}][{},ro]", name(2), name(3), name(4));
    serve(read_only, "is read-only")
}

fn killed() -> Result<(), Stop> {
    need(&["nbdcopy", "cmp"])?;
    let mut rng = pvblk_testing::random();
    let disks = Disks::new(4)?;
    let members = disks.paths(0..4);
    raid(
        &["create", "--raid-devices", "4", "--chunk", "16K"],
        &members,
    )?;
    let image = disks.dir.path().join("image");
    File::create(&image)?.set_len(detail(&members)?["array_bytes"].as_u64().unwrap_or(0))?;
    let back = disks.dir.path().join("back");
    for round in 0..3 {
        scribble(&image, &mut rng)?;
        let served = Served::start(&spec(&members, None))?;
        if round > 0 {
            check(served.said("right from the logs"), || {
                "no log was read".into()
            })?;
        }
        served.write(&image)?;
        served.read(&back)?;
        compare(&image, &back)?;
        served.daemon.crash()?;
        let state = detail(&members)?;
        check(state["clean"] == false, || format!("killed, and {state}"))?;
    }
    // Everything was flushed, so it is all there, whichever member goes.
    for without in 0..4 {
        let dir = tempfile::tempdir()?;
        dump(&copies(&members, dir.path())?, Some(without), &back)?;
        compare(&image, &back)?;
    }
    dump(&members, None, &back)?;
    compare(&image, &back)?;
    check(wrong_stripes(&members)? == 0, || "parity is wrong".into())?;
    check(detail(&members)?["clean"] == true, || {
        "not clean after a stop".into()
    })
}
