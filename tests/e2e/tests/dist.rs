//! The files of a release: made twice of one commit and the command under test, and looked through (decision 46).

use pvblk_e2e::daemon::binary;
use pvblk_e2e::outcome::{Test, check, run_all};
use pvblk_e2e::package::tree;
use pvblk_e2e::tools::{need, run, run_ok, tool};
use pvblk_e2e::{Stop, need_release};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::OnceLock;
use std::time::Duration;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(900);

const TESTS: &[Test] = &[
    ("a_release_is_made_twice_with_the_same_bytes", same_bytes),
    ("sums_are_those_of_the_files", sums),
    ("the_source_is_the_commit", source),
    ("an_archive_has_what_the_package_has", archive),
    ("the_bill_of_materials_is_that_of_the_lock_file", bill),
    ("notices_name_what_is_linked", notices),
];

fn main() -> ExitCode {
    run_all(TESTS)
}

/// A release in a folder that goes when the program ends.
struct Release {
    dir: TempDir,
}

impl Release {
    fn make(umask: &str, zone: &str) -> Result<Release, Stop> {
        let dir = tempfile::tempdir()?;
        let script = tree().join("scripts/dist.sh");
        // What differs between the machines of two people who make one.
        let line = format!("umask {umask}; exec \"$0\" \"$@\"");
        let mut command = tool("sh", ["-c", &line]);
        command
            .arg(script)
            .arg(binary()?)
            .arg(dir.path().join("out"));
        command.env("TZ", zone).env("PVBLK_DIST_DIRTY", "1");
        command.current_dir(dir.path());
        run(command, LIMIT)?.success()?;
        Ok(Release { dir })
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    /// The one file whose name ends so.
    fn file(&self, end: &str, but: &str) -> Result<PathBuf, Stop> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.out())? {
            let path = entry?.path();
            let name = path.to_string_lossy();
            if name.ends_with(end) && (but.is_empty() || !name.ends_with(but)) {
                found.push(path);
            }
        }
        match (found.pop(), found.pop()) {
            (Some(file), None) => Ok(file),
            other => Stop::fail(format!("files with {end}: {other:?}")),
        }
    }
}

/// The release, made once.
fn release() -> Result<&'static Release, Stop> {
    static MADE: OnceLock<Result<Release, String>> = OnceLock::new();
    need_release()?;
    need(&[
        "git",
        "cargo-cyclonedx",
        "dpkg-buildpackage",
        "dh",
        "lowdown",
        "python3",
    ])?;
    if !tree().join(".git").exists() {
        return Stop::skip("this tree is no repository, and a release is made of a commit");
    }
    let made = MADE.get_or_init(|| Release::make("022", "UTC").map_err(Stop::into_text));
    made.as_ref().map_err(|text| Stop::Fail(text.clone()))
}

fn names(folder: &Path) -> Result<Vec<String>, Stop> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn same_bytes() -> Result<(), Stop> {
    let first = release()?;
    let second = Release::make("077", "Asia/Kathmandu")?;
    let (ours, theirs) = (names(&first.out())?, names(&second.out())?);
    check(ours == theirs && ours.len() == 5, || {
        format!("{ours:?}, {theirs:?}")
    })?;
    for name in ours {
        let same = fs::read(first.out().join(&name))? == fs::read(second.out().join(&name))?;
        check(same, || format!("{name} differs"))?;
    }
    Ok(())
}

fn sums() -> Result<(), Stop> {
    let out = release()?.out();
    let listed = fs::read_to_string(out.join("SHA256SUMS"))?;
    let mut expected = names(&out)?;
    expected.retain(|n| n != "SHA256SUMS");
    let named: Vec<&str> = listed
        .lines()
        .filter_map(|l| l.split("  ").nth(1))
        .collect();
    check(named == expected, || listed.clone())?;
    let mut command = tool(
        "sha256sum",
        ["--check", "--strict", "--quiet", "SHA256SUMS"],
    );
    command.current_dir(&out);
    run(command, LIMIT)?.success().map(drop)
}

/// Unpacks an archive, and returns the one folder that is in it.
fn unpack(archive: &Path, into: &Path) -> Result<PathBuf, Stop> {
    let args = ["-xzf".as_ref(), archive.as_os_str(), "-C".as_ref()];
    run_ok("tar", args.into_iter().chain([into.as_os_str()]))?;
    match &names(into)?[..] {
        [one] => Ok(into.join(one)),
        more => Stop::fail(format!("{}: {more:?}", archive.display())),
    }
}

fn source() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let release = release()?;
    let folder = unpack(&release.file(".tar.gz", "64.tar.gz")?, dir.path())?;
    let mut git = tool("git", ["ls-tree", "-r", "--name-only", "-z", "HEAD"]);
    git.current_dir(tree());
    let listed = run(git, LIMIT)?.success()?.stdout;
    let listed: BTreeSet<&str> = listed.split_terminator('\0').collect();
    let mut find = tool("find", [".", "!", "-type", "d", "-printf", "%P\\0"]);
    find.current_dir(&folder);
    let found = run(find, LIMIT)?.success()?.stdout;
    let found: BTreeSet<&str> = found.split_terminator('\0').collect();
    check(found == listed, || {
        format!(
            "{:?}",
            found.symmetric_difference(&listed).collect::<Vec<_>>()
        )
    })?;
    // cargo takes the crates of the lock file, and no others.
    let mut command = Command::new("cargo");
    command.args(["metadata", "--locked", "--no-deps", "--format-version", "1"]);
    command.current_dir(&folder);
    let read = run(command, LIMIT)?.success()?.stdout;
    let read: Value = serde_json::from_str(&read)?;
    let packages = read["packages"].as_array().map_or(0, Vec::len);
    check(packages > 15, || format!("{packages} packages"))
}

fn archive() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let release = release()?;
    let folder = unpack(&release.file("64.tar.gz", "")?, dir.path())?;
    let deb = dir.path().join("deb");
    let package = release.file(".deb", "")?;
    let args = ["-x".as_ref(), package.as_os_str(), deb.as_os_str()];
    run_ok("dpkg-deb", args)?;
    // An archive that is unpacked over the root must not meet a link there: /lib is one.
    let merged = format!(
        "cd '{}' && cp -a lib/. usr/lib/ && rm -r lib",
        deb.display()
    );
    run_ok("sh", ["-c", &merged])?;
    let told = run(tool("diff", ["-r".as_ref(), &*deb, &*folder]), LIMIT)?.stdout;
    let more: BTreeSet<&str> = told
        .lines()
        .map(|l| l.rsplit(": ").next().unwrap_or(l))
        .collect();
    check(
        more == BTreeSet::from(["LICENSE-APACHE", "LICENSE-MIT"]),
        || told.clone(),
    )?;
    for name in [
        "usr/share/man/man1/pvblk-serve.1.gz",
        "usr/share/bash-completion/completions/pvblk",
        "usr/lib/systemd/system/pvblk.service",
        "usr/share/doc/pvblk/third-party-notices.txt.gz",
    ] {
        check(folder.join(name).is_file(), || format!("no {name}"))?;
    }
    let program = folder.join("usr/bin/pvblk");
    let version = |program: &Path| {
        let mut command = Command::new(program);
        command.arg("--version");
        Ok::<String, Stop>(run(command, LIMIT)?.success()?.stdout)
    };
    check(version(&program)? == version(&binary()?)?, || {
        "it is another program".into()
    })?;
    // Stripped: without symbols and what debuggers read.
    need(&["readelf"])?;
    let sections = run(
        tool("readelf", ["-SW".as_ref(), program.as_os_str()]),
        LIMIT,
    )?;
    let sections = sections.success()?.stdout;
    let has = |name: &str| sections.contains(name);
    check(
        has(".text") && !has(".symtab") && !has(".debug_info"),
        || sections.clone(),
    )
}

/// Sums of the crates in Cargo.lock, by name and version.
fn locked() -> Result<BTreeMap<(String, String), String>, Stop> {
    let text = fs::read_to_string(tree().join("Cargo.lock"))?;
    let mut all = BTreeMap::new();
    for part in text.split("[[package]]\n").skip(1) {
        let value = |key: &str| {
            let line = part.lines().find_map(|l| l.strip_prefix(key));
            let value = line.and_then(|l| l.strip_prefix(" = "));
            value.unwrap_or_default().trim_matches('"').to_owned()
        };
        all.insert((value("name"), value("version")), value("checksum"));
    }
    Ok(all)
}

/// The licences that `deny.toml` allows.
fn allowed() -> Result<BTreeSet<String>, Stop> {
    let text = fs::read_to_string(tree().join("deny.toml"))?;
    let list = text.split_once("\nallow = [").map(|(_, rest)| rest);
    let list = list
        .and_then(|rest| rest.split_once("\n]"))
        .map(|(list, _)| list);
    let lines = list.unwrap_or_default().lines().map(str::trim);
    let names = lines.filter_map(|l| Some(l.strip_prefix('"')?.split_once('"')?.0.to_owned()));
    Ok(names.collect())
}

/// True if some choice of an SPDX expression is allowed. Expressions here are words, `AND`, `OR` and parentheses.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let fits = any(&words, &mut at, allowed);
    fits && at == words.len()
}

fn any(words: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut fits = all(words, at, allowed);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        fits |= all(words, at, allowed);
    }
    fits
}

fn all(words: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut fits = true;
    loop {
        let word = words.get(*at).copied().unwrap_or_default();
        *at += 1;
        fits &= match word {
            "(" => {
                let inner = any(words, at, allowed);
                *at += 1;
                inner
            }
            name if words.get(*at) == Some(&"WITH") => {
                let with = format!("{name} WITH {}", words.get(*at + 1).unwrap_or(&""));
                *at += 2;
                allowed.contains(&with)
            }
            name => allowed.contains(name),
        };
        if words.get(*at) != Some(&"AND") {
            return fits;
        }
        *at += 1;
    }
}

fn bill() -> Result<(), Stop> {
    let text = fs::read_to_string(release()?.file(".cdx.json", "")?)?;
    let bill: Value = serde_json::from_str(&text)?;
    check(bill["bomFormat"] == "CycloneDX", || text.clone())?;
    check(bill["metadata"]["component"]["name"] == "pvblk", || {
        bill["metadata"].to_string()
    })?;
    for word in ["/tmp/", "/home/", "/root/"] {
        check(!text.contains(word), || {
            format!("the bill names a folder of this machine: {word}")
        })?;
    }
    let (locked, allowed) = (locked()?, allowed()?);
    check(allowed.len() > 3, || format!("{allowed:?}"))?;
    let components = bill["components"].as_array().cloned().unwrap_or_default();
    let mut found = BTreeSet::new();
    for one in &components {
        let of = |key: &str| one[key].as_str().unwrap_or_default().to_owned();
        let name = (of("name"), of("version"));
        let sum = locked.get(&name);
        let sum = sum.ok_or_else(|| Stop::Fail(format!("{name:?} isn't in Cargo.lock")))?;
        let told = one["hashes"][0]["content"].as_str().unwrap_or_default();
        check(told == sum, || format!("{name:?}: {told}, expected {sum}"))?;
        let licence = one["licenses"][0]["expression"].as_str();
        let licence = licence.or(one["licenses"][0]["license"]["id"].as_str());
        check(licence.is_some_and(|l| is_allowed(l, &allowed)), || {
            format!("{name:?}: {licence:?} isn't in deny.toml")
        })?;
        found.insert(name.0);
    }
    for name in [
        "pvblk-sys",
        "pvblk-export",
        "rustls",
        "ring",
        "clap",
        "io-uring",
    ] {
        check(found.contains(name), || format!("no {name}: {found:?}"))?;
    }
    for name in ["tempfile", "loom", "rcgen", "libtest-mimic", "windows-sys"] {
        check(!found.contains(name), || {
            format!("{name} is no part of the program")
        })?;
    }
    Ok(())
}

fn notices() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let folder = unpack(&release()?.file("64.tar.gz", "")?, dir.path())?;
    let file = folder.join("usr/share/doc/pvblk/third-party-notices.txt.gz");
    let text = run_ok("zcat", [file])?.stdout;
    let mut linked = Command::new("cargo");
    linked.args(["tree", "--locked", "-p", "pvblk", "--prefix", "none"]);
    linked.args(["-e", "no-dev,no-build,no-proc-macro", "-f", "{p}"]);
    linked.current_dir(tree());
    let linked = run(linked, LIMIT)?.success()?.stdout;
    let mut count = 0;
    for line in linked.lines().filter(|l| !l.contains('/')) {
        let title = line.replacen(" v", " ", 1).replace(" (*)", "");
        check(text.contains(&format!("\n{title}: ")), || {
            format!("no licence of {title}")
        })?;
        count += 1;
    }
    check(
        count > 50 && text.contains("Permission is hereby granted"),
        || format!("{count} crates"),
    )
}
