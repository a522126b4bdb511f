//! RAID-5 arrays between pvblk and the kernel's md, in a guest: each takes over arrays that the other made,
//! or left in the middle of work.

use pvblk_e2e::arrays::{
    Disks, Served, copies, detail, dump, left, raid, spec, sum, wrong_stripes,
};
use pvblk_e2e::cuts::{CHUNK, Cut, Live};
use pvblk_e2e::managed::{Managed, names, rebuilt};
use pvblk_e2e::md::{Done, Guest};
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::need;
use pvblk_e2e::{Stop, full, pattern, run_all, vm};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

const GUEST_LIMIT: Duration = Duration::from_secs(300);

const LAYOUTS: [&str; 4] = [
    "left-symmetric",
    "left-asymmetric",
    "right-symmetric",
    "right-asymmetric",
];

const POLICIES: [&str; 3] = ["ppl", "bitmap", "resync"];

fn main() -> ExitCode {
    run_all(&[
        ("arrays_of_every_layout_change_hands", layouts),
        ("what_md_left_cut_off_is_made_right", cut_by_md),
        ("what_we_left_cut_off_md_makes_right", || {
            cut_by_us(vm::Kind::Uml)
        }),
        ("md_tells_what_it_took_from_our_log", || {
            cut_by_us(vm::Kind::Qemu)
        }),
        ("the_other_finishes_a_rebuild", rebuilds),
    ])
}

/// An array of the round of layouts.
struct Case {
    name: String,
    ours: bool,
    members: usize,
    layout: &'static str,
    policy: &'static str,
    /// We make it with checksums.
    checksums: bool,
    chunk: &'static str,
    /// The member that is missing when one is.
    lost: usize,
}

/// Each layout, made by md and by us, with all policies among them; with every policy, if all is asked for.
fn cases(rng: &mut fastrand::Rng) -> Vec<Case> {
    let first = rng.usize(0..3);
    let mut cases = Vec::new();
    for ours in [false, true] {
        for (n, layout) in LAYOUTS.into_iter().enumerate() {
            let policies = if full() { 3 } else { 1 };
            for more in 0..policies {
                let policy = POLICIES[(first + n + usize::from(ours) + more) % 3];
                let who = if ours { "ours" } else { "md" };
                let members = rng.usize(3..=5);
                cases.push(Case {
                    name: format!("{who}-{layout}-{policy}"),
                    ours,
                    members,
                    layout,
                    policy,
                    // One of ours at least: two policies in turn aren't both bitmap.
                    checksums: ours && n % 2 == 0 && policy != "bitmap",
                    chunk: ["4", "16", "64"][rng.usize(0..3)],
                    lost: rng.usize(0..members),
                });
            }
        }
    }
    cases
}

fn layouts() -> Result<(), Stop> {
    need(&["nbdcopy", "cmp", "sha256sum"])?;
    let mut rng = pvblk_testing::random();
    let dir = tempfile::tempdir()?;
    let image = dir.path().join("image");
    let cases = cases(&mut rng);

    // The smallest members that have room for a log and for all sizes of chunks.
    let mut guest = Guest::new(4)?;
    let mut came = Vec::new();
    for case in &cases {
        let Case { name, layout, .. } = case;
        if case.ours {
            let disks = Disks::of(case.members, 4)?;
            let members = disks.paths(0..case.members);
            let count = case.members.to_string();
            let make = ["create", "--raid-devices", &count, "--chunk", case.chunk];
            let how = ["--layout", layout, "--consistency-policy", case.policy];
            let sums: &[&str] = match case.checksums {
                true => &["--checksums"],
                false => &[],
            };
            raid(&[make.as_slice(), &how, sums].concat(), &members)?;
            let is = detail(&members)?;
            let kept = is["private_map"] == (case.policy != "bitmap");
            check(kept && is["checksums"] == case.checksums, || {
                format!("{name}: {is}")
            })?;
            let bytes = is["array_bytes"].as_u64().unwrap_or(0);
            pattern::write(&image, bytes, rng.u64(..))?;
            let mut served = Served::start(&spec(&members, None))?;
            served.write(&image)?;
            served.scribble(&image, &mut rng)?;
            served.daemon.stop()?;
            came.push(sum(&image)?);
            guest.array(name, &members)?;
            guest.plan(&format!("assemble {name}\ncheck {name}\nsum {name} came"));
        } else {
            guest.room(name, case.members);
            guest.plan(&format!(
                "make {name} {layout} {} {}",
                case.policy, case.chunk
            ));
            came.push(String::new());
        }
        guest.plan(&format!("fill {name}\nsum {name} filled\nstop {name}"));
    }
    let done = guest.run(vm::Kind::Uml)?;
    println!("Linux {}", done.version()?);

    let mut guest = Guest::new(4)?;
    let mut gone = Vec::new();
    for (case, came) in cases.iter().zip(came) {
        let name = &case.name;
        if case.ours {
            println!("{name}: {}", right(&done, name)?.join("; "));
            check(done.word(name, "came")? == came, || {
                format!("{name}: md reads something else than we wrote")
            })?;
        }
        let members = done.members(name, dir.path())?;
        taken_over(case, &members, &image, &done.word(name, "filled")?)?;
        // And back, half of them without a member.
        let without = rng.bool().then_some(case.lost);
        // All files are candidates, the other arrays' too.
        let volume = match without {
            Some(_) => spec(&members, without),
            None => format!(
                "raid5:uuid={},in={}/*",
                detail(&members)?["uuid"].as_str().unwrap_or_default(),
                dir.path().display()
            ),
        };
        let mut served = Served::start(&volume)?;
        served.scribble(&image, &mut rng)?;
        served.daemon.stop()?;
        let is = detail(&present(&members, without))?;
        check(is["checksums"] == case.checksums, || {
            format!("{name}: {is}")
        })?;
        guest.array(name, &present(&members, without))?;
        guest.plan(&format!("assemble {name} --run\nsum {name} back"));
        if without.is_none() {
            guest.plan(&format!("check {name}"));
        }
        guest.plan(&format!("stop {name}"));
        gone.push((without, sum(&image)?));
    }
    let done = guest.run(vm::Kind::Uml)?;
    for (case, (without, sum)) in cases.iter().zip(gone) {
        let name = &case.name;
        check(done.word(name, "back")? == sum, || {
            format!("{name}: md reads something else than we wrote without {without:?}")
        })?;
        let mut told = done.kernel(name, "raid level 5 active with")?;
        check(!told.is_empty(), || {
            format!("{name}: the kernel says nothing")
        })?;
        if without.is_none() {
            told.extend(right(&done, name)?);
        }
        println!("{name}, chunks of {} KiB: {}", case.chunk, told.join("; "));
    }
    Ok(())
}

/// md's check found no error. Returns md's lines on it.
fn right(done: &Done, name: &str) -> Result<Vec<String>, Stop> {
    let found = done.word(name, "mismatches")?;
    check(found == "0", || format!("{name}: mismatch_cnt is {found}"))?;
    let mut told = done.kernel(name, ": check done")?;
    check(!told.is_empty(), || {
        format!("{name}: the kernel didn't check")
    })?;
    told.push(format!("mismatch_cnt is {found}"));
    Ok(told)
}

/// Checks that we read the contents of an array that md stopped as md does, with all members and without any
/// one of them. The contents are left in a file.
fn taken_over(case: &Case, members: &[PathBuf], image: &Path, expected: &str) -> Result<(), Stop> {
    let name = &case.name;
    let is = detail(members)?;
    check(
        is["clean"] == true
            && is["degraded"] == false
            && is["layout"] == case.layout
            && is["consistency_policy"] == case.policy
            // md's writes aren't in it.
            && is["private_map"] == false
            && is["checksums"] == false
            && is["raid_devices"] == case.members,
        || format!("{name}: {is}"),
    )?;
    for without in [Some(case.lost), None] {
        let dir = tempfile::tempdir()?;
        dump(&copies(members, dir.path())?, without, image)?;
        check(sum(image)? == expected, || {
            format!("{name}: not what md stored, without {without:?}")
        })?;
    }
    check(wrong_stripes(members)? == 0, || {
        format!("{name}: parity is wrong")
    })
}

/// Number of odd chunks that differ between two images; these were never written.
fn changed(before: &Path, after: &Path, chunk: usize) -> Result<usize, Stop> {
    let (before, after) = (std::fs::read(before)?, std::fs::read(after)?);
    check(before.len() == after.len(), || "another size".into())?;
    let chunks = before.chunks(chunk).zip(after.chunks(chunk));
    let odd = chunks.skip(1).step_by(2);
    Ok(odd.filter(|(before, after)| before != after).count())
}

fn cut_by_md() -> Result<(), Stop> {
    need(&["nbdcopy", "cmp", "sha256sum"])?;
    let disks = Disks::of(8, 8)?;
    let all = disks.paths(0..8);
    let out = disks.dir.path().join("out");
    std::fs::create_dir(&out)?;
    let each: Vec<&Path> = all.iter().map(PathBuf::as_path).collect();
    let script = vm::named("md-cut.sh");
    vm::script(vm::Kind::Uml, &script, &each, &out, GUEST_LIMIT)?;

    let (members, cut) = all.split_at(4);
    let before = disks.dir.path().join("before");
    dump(members, None, &before)?;
    check(sum(&before)? == left(&out, "sum")?, || {
        "not what md stored".into()
    })?;
    let is = detail(cut)?;
    check(is["clean"] == false, || format!("not cut off: {is}"))?;
    let wrong = wrong_stripes(cut)?;
    println!(
        "Linux {}, cut off with wrong parity in {wrong} stripes",
        left(&out, "kernel")?
    );
    check(wrong > 0, || "no write was cut off in its middle".into())?;
    for without in [None, Some(0), Some(1), Some(2), Some(3)] {
        recovered(
            cut,
            without,
            &before,
            64 << 10,
            &disks.dir.path().join("after"),
        )?;
    }
    Ok(())
}

/// pvblk makes a cut array right: chunks that weren't written stay, and parity fits. The array's contents are
/// left in a file.
fn recovered(
    cut: &[PathBuf],
    without: Option<usize>,
    before: &Path,
    chunk: usize,
    after: &Path,
) -> Result<(), Stop> {
    // Force is for arrays without a log: it must not make anything of this one worse.
    let force = ["", ",force"];
    for force in &force[..1 + usize::from(without.is_some())] {
        let dir = tempfile::tempdir()?;
        let members = copies(cut, dir.path())?;
        let mut served = Served::start(&(spec(&members, without) + force))?;
        check(served.said("made right from the logs"), || {
            format!("without {without:?}: no log: {:?}", served.daemon.lines())
        })?;
        served.read(after)?;
        served.daemon.stop()?;
        let changed = changed(before, after, chunk)?;
        check(changed == 0, || {
            format!("without {without:?}{force}: {changed} chunks changed that nobody wrote")
        })?;
        if without.is_none() {
            check(wrong_stripes(&members)? == 0, || "parity is wrong".into())?;
            check(detail(&members)?["clean"] == true, || "not clean".into())?;
        }
    }
    Ok(())
}

/// A cut, and how it is recovered.
struct Round {
    name: String,
    cut: Vec<PathBuf>,
    without: Option<usize>,
    /// It was served with all members.
    whole: bool,
    wrong: usize,
}

fn cut_by_us(kind: vm::Kind) -> Result<(), Stop> {
    need(&["nbdcopy", "cmp", "sha256sum"])?;
    let mut rng = pvblk_testing::random();
    let disks = Disks::fast(4, 4)?;
    let members = disks.paths(0..4);
    let layout = LAYOUTS[rng.usize(0..4)];
    let make = ["create", "--raid-devices", "4", "--chunk", "16K"];
    raid(&[&make[..], &["--layout", layout]].concat(), &members)?;
    println!("{layout}");
    let dir = tempfile::tempdir()?;
    let before = dir.path().join("before");
    let bytes = detail(&members)?["array_bytes"].as_u64().unwrap_or(0);
    pattern::write(&before, bytes, rng.u64(..))?;
    // QEMU is slow.
    let wanted = match (kind, full()) {
        (vm::Kind::Qemu, false) => 1,
        (_, false) => 3,
        (_, true) => 8,
    };
    let rounds = cut_off(&members, &before, dir.path(), wanted, &mut rng)?;

    let mut guest = Guest::new(4)?;
    let mut sums = Vec::new();
    for round in &rounds {
        let Round { name, without, .. } = round;
        let after = dir.path().join("after");
        recovered(&round.cut, *without, &before, CHUNK, &after)?;
        sums.push(sum(&after)?);
        let present = present(&round.cut, *without);
        guest.array(name, &present)?;
        // An array that was degraded before is taken as it is.
        let insist = match without {
            Some(_) if round.whole => {
                guest.plan(&format!("try {name}"));
                " --run"
            }
            _ => "",
        };
        guest.plan(&format!("assemble {name}{insist}\nsum {name} sum"));
        if without.is_none() {
            guest.plan(&format!("check {name}"));
        }
        guest.plan(&format!("stop {name}"));
        if full() && without.is_some() {
            let name = format!("{name}-force");
            guest.array(&name, &present)?;
            guest.plan(&format!("assemble {name} --force\nstop {name}"));
        }
    }
    let done = guest.run(kind)?;
    println!("Linux {}", done.version()?);
    for (round, sum) in rounds.iter().zip(sums) {
        let Round { name, without, .. } = round;
        md_recovered(&done, round)?;
        check(done.word(name, "sum")? == sum, || {
            format!("{name}: md and we make something else of it")
        })?;
        if full() && without.is_some() {
            forced(&done, &format!("{name}-force"), *without, &before)?;
        }
    }
    Ok(())
}

/// Cuts an array off, served with all members and without one.
fn cut_off(
    members: &[PathBuf],
    before: &Path,
    dir: &Path,
    wanted: usize,
    rng: &mut fastrand::Rng,
) -> Result<Vec<Round>, Stop> {
    let mut rounds = Vec::new();
    let missing = rng.usize(0..4);
    for (without, wanted) in [(None, wanted), (Some(missing), wanted.div_ceil(2))] {
        let whole = without.is_none();
        let mut served = Served::start(&spec(members, without))?;
        served.write(before)?;
        let live = Live {
            daemon: &served.daemon,
            socket: &served.socket(),
            members,
        };
        let torn = whole.then_some(usize::MAX);
        let cuts = live.cuts(wanted, torn, dir, rng)?;
        served.daemon.stop()?;
        for (n, Cut { members, wrong }) in cuts.into_iter().enumerate() {
            let is = detail(&members)?;
            check(is["clean"] == false, || format!("not cut off: {is}"))?;
            let mut round = |name: String, without| {
                rounds.push(Round {
                    name,
                    cut: members.clone(),
                    without,
                    whole,
                    wrong,
                });
            };
            if whole {
                round(format!("cut{n}"), None);
                let without = rng.usize(0..4);
                round(format!("cut{n}-without{without}"), Some(without));
            } else {
                round(format!("degraded{n}-without{missing}"), without);
            }
        }
    }
    Ok(rounds)
}

/// md found one of our arrays dirty, and made it right from the log alone.
fn md_recovered(done: &Done, round: &Round) -> Result<(), Stop> {
    let Round { name, wrong, .. } = round;
    let mut told = done.kernel(name, "not clean")?;
    check(!told.is_empty(), || format!("{name}: it was clean"))?;
    let resyncs = done.kernel(name, "resync of RAID array")?;
    check(resyncs.is_empty(), || format!("{name}: {resyncs:?}"))?;
    let mut checked = Vec::new();
    if round.without.is_none() {
        checked = right(done, name)?;
    } else {
        let degraded = done.kernel(name, "starting dirty degraded array with PPL")?;
        check(!degraded.is_empty(), || format!("{name}: not degraded"))?;
        told.extend(degraded);
        let mdadm = done.text(name, "mdadm")?;
        check(
            !round.whole
                || done.word(name, "tried")? != "0" && mdadm.contains("use --run to insist"),
            || format!("{name}: mdadm says {mdadm}"),
        )?;
    }
    // Only a kernel with dynamic debug prints this line.
    if let Some(load) = done.kernel(name, "ppl_load: ")?.pop() {
        let entries = load.rsplit(' ').next().and_then(|n| n.parse().ok());
        let entries: usize = entries.unwrap_or(0);
        let blocks = done.kernel(name, "write parity at sector")?.len();
        check(entries > 0 && load.contains(" mismatch_count: 0 "), || {
            format!("{name}: {load}")
        })?;
        check(round.without.is_some() || blocks >= *wrong, || {
            format!("{name}: parity of {blocks} blocks was written, and of {wrong} it was wrong")
        })?;
        told.push(load);
        told.push(format!("it wrote parity of {blocks} blocks"));
    }
    told.extend(checked);
    let how = match round.whole {
        true => format!("wrong parity in {wrong} stripes"),
        false => "served without a member".to_owned(),
    };
    println!("{name}, {how}: {}", told.join("; "));
    Ok(())
}

/// Checks an array that mdadm was forced to assemble: mdadm says that the array is clean, so that md drops
/// the log.
fn forced(done: &Done, name: &str, without: Option<usize>, before: &Path) -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let mut members = done.members(name, dir.path())?;
    let after = dir.path().join("after");
    // Something has to be in the place.
    members.insert(without.unwrap_or(0), PathBuf::new());
    dump(&members, without, &after)?;
    println!(
        "{name}: {}; {} chunks changed that nobody wrote",
        done.text(name, "mdadm")?.trim().replace('\n', "; "),
        changed(before, &after, CHUNK)?
    );
    Ok(())
}

/// Those that are there.
fn present(members: &[PathBuf], without: Option<usize>) -> Vec<PathBuf> {
    let members = members.iter().enumerate();
    let present = members.filter(|(n, _)| without != Some(*n));
    present.map(|(_, path)| path.clone()).collect()
}

/// A rebuild of ours that has come to a third.
struct Rebuild {
    disks: Disks,
    /// Image file with the array's contents.
    image: PathBuf,
    served: Managed,
}

impl Rebuild {
    fn begin(policy: &str, rng: &mut fastrand::Rng) -> Result<Rebuild, Stop> {
        let disks = Disks::of(5, 12)?;
        let make = ["create", "--raid-devices", "4", "--chunk", "16K"];
        let how = ["--consistency-policy", policy];
        raid(&[&make[..], &how].concat(), &disks.paths(0..4))?;
        let image = disks.dir.path().join("image");
        let bytes = detail(&disks.paths(0..4))?["array_bytes"].as_u64();
        pattern::write(&image, bytes.unwrap_or(0), rng.u64(..))?;
        let served = Managed::start(&names(&disks, &[0, 1, 2, 3]))?;
        served.write(&image)?;
        served.raid("speed", &["--min", "2000", "--max", "2000"])?;
        served.raid("add", &[&disks.path(4).display().to_string()])?;
        served.raid("fail", &["1"])?;
        served.until("a third", |d| rebuilt(d, 1) > 3 << 20)?;
        Ok(Rebuild {
            disks,
            image,
            served,
        })
    }

    /// The members, the new one last.
    fn members(&self) -> [PathBuf; 4] {
        [0, 2, 3, 4].map(|n| self.disks.path(n))
    }
}

fn rebuilds() -> Result<(), Stop> {
    need(&["nbdcopy", "cmp", "sha256sum"])?;
    let mut rng = pvblk_testing::random();
    let dir = tempfile::tempdir()?;
    let mut guest = Guest::new(12)?;
    let first = rng.usize(0..3);
    let policies = if full() { 3 } else { 1 };
    let policies = || (first..first + policies).map(|n| POLICIES[n % 3]);
    let mut begun = Vec::new();
    for policy in policies() {
        let mut rebuild = Rebuild::begin(policy, &mut rng)?;
        rebuild.served.daemon.stop()?;
        let left = rebuild.members();
        let is = detail(&left)?;
        check(rebuilt(&is, 1) > 3 << 20, || {
            format!("what was rebuilt is forgotten: {is}")
        })?;
        let sectors = (is["member_bytes"].as_u64().unwrap_or(0) - rebuilt(&is, 1)) / 512;
        check(sectors > 4096, || format!("hardly anything is left: {is}"))?;
        let name = format!("ours-{policy}");
        let new = guest.array(&name, &left)? + 3;
        guest.plan(&format!("assemble {name}\nrebuilt {name} {new}"));
        guest.plan(&format!("check {name}\nsum {name} sum\nstop {name}"));
        begun.push((name, sectors, sum(&rebuild.image)?));
        let name = format!("md-{policy}");
        guest.room(&name, 4);
        let spare = guest.spare(&name);
        guest.plan(&format!("make {name} right-symmetric {policy} 16"));
        guest.plan(&format!("fill {name}\nsum {name} sum"));
        guest.plan(&format!("rebuild {name} {spare} 3\nstop {name}"));
    }
    let cut = cut_in_a_rebuild(&mut guest, dir.path(), &mut rng)?;
    let done = guest.run(vm::Kind::Uml)?;
    for (name, left, sum) in begun {
        let written: u64 = done.word(&name, "rebuilt")?.parse().unwrap_or(0);
        // Superblocks and the bitmap are written too, and the place of a log is filled with zeros.
        let log = if name.ends_with("ppl") { 2048 } else { 0 };
        check((left..left + log + 1024).contains(&written), || {
            format!("{name}: {left} sectors were left, and md wrote {written}")
        })?;
        finished(&done, &name, &sum)?;
        println!("{name}: {left} sectors were left, and md wrote {written}");
    }
    finished(&done, "cut", &cut)?;
    for policy in policies() {
        let name = format!("md-{policy}");
        we_finish(&done, &name, dir.path())?;
    }
    Ok(())
}

/// Cuts an array off in the middle of a recovery and of writes. Hands the copies to md and to pvblk, and
/// returns the sum of the contents that the array has when pvblk has finished.
/// array holds when we have finished.
fn cut_in_a_rebuild(
    guest: &mut Guest,
    dir: &Path,
    rng: &mut fastrand::Rng,
) -> Result<String, Stop> {
    let mut rebuild = Rebuild::begin("ppl", rng)?;
    let members = rebuild.members();
    // A cut leaves the superblocks' position, which is behind the recovery itself.
    rebuild.served.until("a third on disk", |_| {
        detail(&members).is_ok_and(|d| rebuilt(&d, 1) > 3 << 20)
    })?;
    let live = Live {
        daemon: &rebuild.served.daemon,
        socket: &rebuild.served.path("nbd"),
        members: &members,
    };
    // The recovery is nearly stopped, so that it doesn't end meanwhile. The recovered part has
    // parity, right or wrong.
    let slow = ["--min", "100", "--max", "100"];
    rebuild.served.raid("speed", &slow)?;
    let cut = live.cuts(1, Some(3 << 20), dir, rng)?.remove(0).members;
    rebuild.served.daemon.stop()?;
    guest.array("cut", &cut)?;
    guest.plan("assemble cut\nsum cut sum\ncheck cut\nstop cut");
    let is = detail(&cut)?;
    check(is["clean"] == false && rebuilt(&is, 1) > 3 << 20, || {
        format!("not cut off in a rebuild: {is}")
    })?;
    let after = dir.join("after");
    let paths: Vec<String> = cut.iter().map(|p| p.display().to_string()).collect();
    let mut served = Managed::start(&paths)?;
    served.raid("wait", &[])?;
    served.parity_is_right()?;
    served.read(&after)?;
    served.daemon.stop()?;
    let changed = changed(&rebuild.image, &after, CHUNK)?;
    check(changed == 0, || {
        format!("{changed} chunks changed that nobody wrote")
    })?;
    sum(&after)
}

/// md has finished a rebuild of ours.
fn finished(done: &Done, name: &str, sum: &str) -> Result<(), Stop> {
    let mut told = done.kernel(name, "not clean")?;
    told.extend(done.kernel(name, "starting dirty")?);
    told.extend(done.kernel(name, "raid level 5 active with")?);
    let recovered = done.kernel(name, "recover done")?;
    check(!recovered.is_empty(), || format!("{name}: no rebuild"))?;
    check(done.word(name, "sum")? == sum, || {
        format!("{name}: md and we make something else of it")
    })?;
    told.extend(recovered);
    told.extend(right(done, name)?);
    println!("{name}: {}", told.join("; "));
    Ok(())
}

/// We finish a rebuild that md began.
fn we_finish(done: &Done, name: &str, dir: &Path) -> Result<(), Stop> {
    let interrupted = done.kernel(name, "recover interrupted")?;
    check(!interrupted.is_empty(), || {
        format!("{name}: not interrupted")
    })?;
    let members = done.members(name, dir)?;
    let left = [0, 2, 3, 4].map(|n: usize| members[n].clone());
    let offline = detail(&left)?;
    let done_bytes = rebuilt(&offline, 1);
    check(done_bytes > 3 << 20, || format!("{name}: {offline}"))?;
    println!(
        "{name}: {}; {done_bytes} bytes are rebuilt",
        interrupted.join("; ")
    );
    // The new one is slow, so that it is seen where we go on.
    let mut left = left.map(|path| path.display().to_string());
    left[3] = format!("delay:0us,bw=10M:file:{}", left[3]);
    let mut served = Managed::start(&left)?;
    let is = served.detail()?;
    check(
        rebuilt(&is, 1) >= done_bytes && is["degraded"] == true,
        || format!("{name}: after {done_bytes} bytes we begin again: {is}"),
    )?;
    served.raid("wait", &[])?;
    served.parity_is_right()?;
    let image = dir.join("image");
    served.read(&image)?;
    served.daemon.stop()?;
    check(sum(&image)? == done.word(name, "sum")?, || {
        format!("{name}: not what md stored")
    })
}
