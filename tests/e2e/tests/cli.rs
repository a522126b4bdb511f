//! Output of the command for a request for help, and for wrong arguments.

use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{Finished, run};
use pvblk_e2e::{Stop, run_all};
use std::process::ExitCode;
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
    ] {
        refused(args, &[1, 2], culprit)?;
    }
    Ok(())
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
