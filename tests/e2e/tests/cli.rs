//! Output of the command for a request for help, and for wrong arguments.

use pvblk_e2e::daemon::{Daemon, pvblk};
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{Finished, run};
use pvblk_e2e::{Stop, run_all};
use std::fs::File;
use std::io::{Read, Seek};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

fn main() -> ExitCode {
    run_all(&[
        ("help_has_examples", help_has_examples),
        ("version_is_told", version_is_told),
        ("wrong_flags_are_one_line_and_status_2", wrong_flags),
        ("wrong_values_are_one_line", wrong_values),
        (
            "errors_of_the_machine_are_one_line_and_status_1",
            machine_errors,
        ),
        ("nobody_reads_the_output", nobody_reads),
    ])
}

fn finish(args: &[&str]) -> Result<Finished, Stop> {
    run(pvblk(args)?, Duration::from_secs(60))
}

fn help_has_examples() -> Result<(), Stop> {
    for args in [&["--help"][..], &["serve", "--help"], &["attach", "--help"]] {
        let help = finish(args)?.success()?.stdout;
        check(help.to_lowercase().contains("example"), || {
            format!("{args:?} has no examples:\n{help}")
        })?;
        let command = args
            .first()
            .filter(|a| !a.starts_with('-'))
            .unwrap_or(&"serve");
        check(help.contains(&format!("pvblk {command} ")), || {
            format!("{args:?} shows no command line:\n{help}")
        })?;
    }
    Ok(())
}

fn version_is_told() -> Result<(), Stop> {
    let version = finish(&["--version"])?.success()?.stdout;
    check(version.contains(env!("CARGO_PKG_VERSION")), || version)
}

/// One line that names the culprit, and one of these statuses.
fn refused(args: &[&str], codes: &[i32], culprit: &str) -> Result<(), Stop> {
    let finished = finish(args)?;
    // Disks that were opened before the error may have been reported already.
    let told = |l: &&str| !l.trim().is_empty() && !l.starts_with("disk ");
    let errors: Vec<&str> = finished.stderr.lines().filter(told).collect();
    let text = errors.join("\n");
    let code = finished.status.and_then(|s| s.code());
    let right = code.is_some_and(|c| codes.contains(&c))
        && errors.len() == 1
        && text.contains(culprit)
        && !text.contains("panicked");
    if right {
        return Ok(());
    }
    Err(finished.failure(&format!(
        "should say one line about `{culprit}`, status {codes:?}"
    )))
}

fn wrong_flags() -> Result<(), Stop> {
    let nbd = "unix:/nonexistent/nbd";
    for (args, culprit) in [
        (&["frobnicate"][..], "frobnicate"),
        (
            &["serve", "--disk", "a=mem:4M", "--frobnicate"],
            "--frobnicate",
        ),
        (
            &[
                "serve",
                "--disk",
                "a=mem:4M",
                "--nbd",
                nbd,
                "--workers",
                "many",
            ],
            "many",
        ),
        (
            &["attach", "unix:/nonexistent/local", "--disk", "a"],
            "--nbd",
        ),
    ] {
        refused(args, &[2], culprit)?;
    }
    Ok(())
}

fn wrong_values() -> Result<(), Stop> {
    let nbd = "unix:/nonexistent/nbd";
    for (disk, culprit) in [
        ("mem:4M", "NAME"),
        ("a=floppy:4M", "floppy"),
        ("a=mem:4X", "4X"),
        ("a=mem:0", "0"),
        ("a=delay:soon:mem:4M", "soon"),
    ] {
        refused(&["serve", "--disk", disk, "--nbd", nbd], &[1, 2], culprit)?;
    }
    for (args, culprit) in [
        (&["serve", "--nbd", nbd][..], "--disk"),
        (
            &["serve", "--disk", "a=mem:4M", "--nbd", "pigeon:coop"],
            "pigeon",
        ),
        (
            &[
                "serve",
                "--disk",
                "twin=mem:4M",
                "--disk",
                "twin=mem:4M",
                "--nbd",
                nbd,
            ],
            "twin",
        ),
        (
            &[
                "attach",
                "unix:/nonexistent/local",
                "--disk",
                "a",
                "--ring-pages",
                "3",
                "--nbd",
                nbd,
            ],
            "--ring-pages",
        ),
        (
            &[
                "serve",
                "--disk",
                "a=mem:4M",
                "--nbd",
                nbd,
                "--web-token-file",
                "/t",
            ],
            "give --web ADDRESS too",
        ),
        (&["serve", "--disk", "a=fil:/srv/a", "--nbd", nbd], "`fil`"),
    ] {
        refused(args, &[1, 2], culprit)?;
    }
    let mut command = pvblk(["disk", "list"])?;
    command.env("PVBLK_LOG", "loud");
    let finished = run(command, Duration::from_secs(60))?;
    let is_told = finished
        .stderr
        .starts_with("pvblk: PVBLK_LOG: log loud: a level is one of");
    match is_told && finished.stderr.lines().count() == 1 {
        true => Ok(()),
        false => Err(finished.failure("should say what is wrong with PVBLK_LOG")),
    }
}

fn machine_errors() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let absent = dir.path().join("absent.img").display().to_string();
    let socket = format!("unix:{}", dir.path().join("nbd.sock").display());
    let nowhere = format!("unix:{}", dir.path().join("nowhere/nbd.sock").display());
    refused(
        &[
            "serve",
            "--disk",
            &format!("a=file:{absent}"),
            "--nbd",
            &socket,
        ],
        &[1],
        &absent,
    )?;
    refused(
        &["serve", "--disk", "a=mem:4M", "--nbd", &nowhere],
        &[1],
        "nowhere",
    )?;
    refused(
        &["attach", &nowhere, "--disk", "a", "--nbd", &socket],
        &[1],
        "nowhere",
    )
}

/// Exit status, and what it says on standard error.
fn printing_to(stdout: Stdio, args: &[&str]) -> Result<(Option<i32>, String), Stop> {
    let mut stderr = tempfile::tempfile()?;
    let mut command = pvblk(args)?;
    command.stdout(stdout).stderr(stderr.try_clone()?);
    let status = command.status()?;
    let mut text = String::new();
    stderr.rewind()?;
    stderr.read_to_string(&mut text)?;
    Ok((status.code(), text))
}

/// A reader that has enough is no error, and a full file system is one, in one line.
fn nobody_reads() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let control = format!("unix:{}", dir.path().join("control").display());
    let member = format!("file:{},size=64M", dir.path().join("a").display());
    let others = ["b", "c"].map(|n| format!("file:{},size=64M", dir.path().join(n).display()));
    let disk = "c=cache:4M:mem:8M";
    let _daemon = Daemon::start(["serve", "--disk", disk, "--control", &control])?;
    let create = ["raid", "create", "--raid-devices", "3", &member];
    finish(&[&create[..], &[&others[0], &others[1]]].concat())?.success()?;
    let path = dir.path().join("a").display().to_string();
    let load = ["--rw", "randread", "--runtime", "10ms"];
    let bench = [&["bench", "--target", "null:1M"], &load[..]].concat();
    let asks: &[&[&str]] = &[
        &["ctl", "memory"],
        &["ctl", "memory", "--json"],
        &["ctl", "squeeze"],
        &["disk", "list"],
        &["disk", "show", "c", "--json"],
        &["cache", "c"],
        &["stat"],
        &["top", "--count", "1"],
        &["events"],
    ];
    let mut all: Vec<Vec<&str>> = vec![bench, vec!["raid", "examine", &path]];
    all.extend(
        asks.iter()
            .map(|a| [a, &["--control", &control][..]].concat()),
    );
    // A command that does several things does all of them.
    let spares = ["d", "e"].map(|n| dir.path().join(n).display().to_string());
    let made = spares
        .each_ref()
        .map(|path| format!("file:{path},size=64M"));
    let members = ["a", "b", "c"].map(|n| dir.path().join(n).display().to_string());
    let mut add = vec!["raid", "add"];
    add.extend(members.iter().map(String::as_str));
    made.iter().for_each(|spare| add.extend(["--spare", spare]));
    let (reader, writer) = std::io::pipe()?;
    drop(reader);
    let (status, said) = printing_to(writer.into(), &add)?;
    check(status == Some(0), || format!("{status:?}: {said}"))?;
    for spare in &spares {
        finish(&["raid", "examine", spare])?.success()?;
    }
    for args in &all {
        let (reader, writer) = std::io::pipe()?;
        drop(reader);
        let (status, said) = printing_to(writer.into(), args)?;
        let is_quiet = status == Some(0) && said.is_empty();
        check(is_quiet, || format!("{args:?}, closed: {status:?}: {said}"))?;
        if args[0] == "events" {
            continue; // there may be none
        }
        let full = File::options().write(true).open("/dev/full")?;
        let (status, said) = printing_to(full.into(), args)?;
        let is_told = status == Some(1) && said.lines().count() == 1 && said.contains("No space");
        check(is_told, || format!("{args:?}, full: {status:?}: {said}"))?;
    }
    Ok(())
}
