//! The Debian package: made of the command under test, looked through, installed into a folder, upgraded and purged (decision 42).

use pvblk_e2e::Stop;
use pvblk_e2e::daemon::{Daemon, binary, pvblk};
use pvblk_e2e::outcome::{Test, check, run_all};
use pvblk_e2e::package::package;
use pvblk_e2e::tools::{need, run, run_ok, tool};
use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

const TESTS: &[Test] = &[
    ("the_package_has_its_files", files),
    ("lintian_finds_nothing", lintian),
    ("each_command_has_a_page_and_no_page_a_mistake", pages),
    ("completions_load_in_their_shells", completions),
    ("units_have_few_rights", units),
    (
        "the_default_configuration_serves_nothing",
        default_configuration,
    ),
    ("an_upgrade_restarts_no_server", scripts),
    ("upgrade_and_purge_leave_what_is_the_users", life),
];

fn main() -> ExitCode {
    run_all(TESTS)
}

fn files() -> Result<(), Stop> {
    let package = package()?;
    for name in [
        "etc/pvblk/pvblk.toml",
        "lib/systemd/system/pvblk.service",
        "lib/systemd/system/pvblk@.service",
        "usr/lib/sysusers.d/pvblk.conf",
        "usr/lib/tmpfiles.d/pvblk.conf",
        "usr/share/bash-completion/completions/pvblk",
        "usr/share/zsh/vendor-completions/_pvblk",
        "usr/share/fish/vendor_completions.d/pvblk.fish",
        "usr/share/man/man5/pvblk.toml.5.gz",
        "usr/share/man/man7/pvblk.7.gz",
        "usr/share/man/man7/pvblk-volumes.7.gz",
        "usr/share/doc/pvblk/guide/serving.md",
        "usr/share/doc/pvblk/reference/configuration.md",
        "usr/share/doc/pvblk/examples/grafana/pvblk.json",
        "usr/share/doc/pvblk/examples/prometheus/pvblk.rules.yml",
        "usr/share/doc/pvblk/examples/network.conf",
    ] {
        check(package.root.join(name).is_file(), || format!("no {name}"))?;
    }
    let conffiles = fs::read_to_string(package.control.join("conffiles"))?;
    check(conffiles == "/etc/pvblk/pvblk.toml\n", || conffiles)?;
    let ours = run(version(&binary()?), LIMIT)?.success()?;
    let theirs = run(version(&package.root.join("usr/bin/pvblk")), LIMIT)?;
    let theirs = theirs.success()?.stdout;
    check(ours.stdout == theirs, || {
        format!("{theirs:?}, expected {:?}", ours.stdout)
    })
}

fn version(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg("--version");
    command
}

fn lintian() -> Result<(), Stop> {
    need(&["lintian"])?;
    let deb = package()?.deb.to_string_lossy().into_owned();
    let told = run_ok("lintian", ["--allow-root", "--fail-on", "warning", &deb])?;
    check(told.stdout.is_empty(), || told.stdout)
}

/// Names of the commands, with those below them, as the help lists them: `raid-create`.
fn commands(before: &[&str]) -> Result<Vec<String>, Stop> {
    let mut args = before.to_vec();
    args.push("--help");
    let mut command = pvblk(&args)?;
    command.env("COLUMNS", "400");
    let help = run(command, LIMIT)?.success()?.stdout;
    let Some((_, list)) = help.split_once("\nCommands:\n") else {
        return Ok(Vec::new());
    };
    let mut names = Vec::new();
    for line in list.lines().take_while(|l| !l.is_empty()) {
        // A name stands two columns from the margin.
        let name = match line.strip_prefix("  ") {
            Some(rest) if !rest.starts_with(' ') => rest.split(' ').next().unwrap_or_default(),
            _ => continue,
        };
        if name == "help" {
            continue;
        }
        let path: Vec<&str> = before.iter().copied().chain([name]).collect();
        names.push(path.join("-"));
        names.extend(commands(&path)?);
    }
    Ok(names)
}

fn pages() -> Result<(), Stop> {
    let man = package()?.root.join("usr/share/man");
    let mut expected: Vec<String> = commands(&[])?
        .iter()
        .map(|name| format!("pvblk-{name}.1.gz"))
        .collect();
    expected.push("pvblk.1.gz".to_owned());
    expected.sort();
    check(expected.len() > 40, || format!("{expected:?}"))?;
    let mut found = names(&man.join("man1"))?;
    found.sort();
    check(found == expected, || {
        format!("pages: {found:?}, commands: {expected:?}")
    })?;
    need(&["mandoc", "groff", "zcat"])?;
    let plain = tempfile::tempdir()?;
    for folder in ["man1", "man5", "man7"] {
        for name in names(&man.join(folder))? {
            let page = plain.path().join(name.trim_end_matches(".gz"));
            fs::write(
                &page,
                run_ok("zcat", [man.join(folder).join(&name)])?.stdout,
            )?;
            let page = page.to_string_lossy();
            let lint = run(tool("mandoc", ["-Tlint", "-Wwarning", &*page]), LIMIT)?.stdout;
            // clap_mangen parts paragraphs of a long help twice.
            let lint: Vec<&str> = lint
                .lines()
                .filter(|l| !l.contains("skipping paragraph macro: br"))
                .collect();
            check(lint.is_empty(), || lint.join("\n"))?;
            let groff = [
                "-man", "-t", "-Kutf8", "-Tutf8", "-ww", "-rLL=80n", "-z", &*page,
            ];
            let told = run_ok("groff", groff)?;
            check(told.stderr.is_empty(), || told.stderr)?;
        }
    }
    Ok(())
}

/// Names of what is in a folder.
fn names(folder: &Path) -> Result<Vec<String>, Stop> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

/// Each shell that is installed loads its completions and knows `pvblk` then.
fn completions() -> Result<(), Stop> {
    let share = package()?.root.join("usr/share");
    let share = share.to_string_lossy();
    let bash = format!(
        "set -e; . '{share}/bash-completion/completions/pvblk'; COMP_WORDS=(pvblk ser); COMP_CWORD=1; _pvblk pvblk ser pvblk; echo \"${{COMPREPLY[@]}}\""
    );
    let zsh = format!(
        "fpath=('{share}/zsh/vendor-completions' $fpath); autoload -Uz compinit; compinit -u -D; autoload +X _pvblk; echo $_comps[pvblk]"
    );
    let fish = format!(
        "source '{share}/fish/vendor_completions.d/pvblk.fish'; complete -C 'pvblk ser' | string split -f1 \\t"
    );
    let mut missing = Vec::new();
    for (shell, args, expected) in [
        ("bash", ["--norc", "-c", &*bash], "serve"),
        ("zsh", ["-f", "-c", &*zsh], "_pvblk"),
        ("fish", ["--no-config", "-c", &*fish], "serve"),
    ] {
        if need(&[shell]).is_err() {
            missing.push(shell);
            continue;
        }
        let said = run_ok(shell, args)?;
        check(
            said.stdout.trim() == expected && said.stderr.is_empty(),
            || format!("{shell}: {said:?}"),
        )?;
    }
    if missing.is_empty() {
        return Ok(());
    }
    Stop::skip(format!(
        "not installed: {}; the others were tried",
        missing.join(", ")
    ))
}

fn units() -> Result<(), Stop> {
    need(&["systemd-analyze"])?;
    let package = package()?;
    let folder = package.root.join("lib/systemd/system");
    // Beside each other, with the program where the package was unpacked to: it isn't installed here.
    let dir = tempfile::tempdir()?;
    let program = package.root.join("usr/bin/pvblk");
    for (name, most) in [("pvblk.service", 2.0), ("pvblk@.service", 1.0)] {
        let text = fs::read_to_string(folder.join(name))?;
        let unit = dir.path().join(name);
        fs::write(
            &unit,
            text.replace("/usr/bin/pvblk", &program.to_string_lossy()),
        )?;
        let unit = unit.to_string_lossy();
        let told = run_ok("systemd-analyze", ["verify", "--man=no", &*unit])?;
        let said = told.stdout + &told.stderr;
        check(!said.contains("pvblk"), || said)?;
        let told = run_ok(
            "systemd-analyze",
            ["security", "--offline=true", "--no-pager", &*unit],
        )?;
        let level = told
            .stdout
            .lines()
            .find_map(|l| l.split_once("exposure level for"));
        let level = level.and_then(|(_, l)| l.split_whitespace().nth(1)?.parse::<f64>().ok());
        check(level.is_some_and(|l| l <= most), || {
            format!(
                "{name}: {level:?}, expected at most {most}\n{}",
                told.stdout
            )
        })?;
    }
    Ok(())
}

fn default_configuration() -> Result<(), Stop> {
    let text = fs::read_to_string(package()?.root.join("etc/pvblk/pvblk.toml"))?;
    let dir = tempfile::tempdir()?;
    let (file, socket) = (
        dir.path().join("pvblk.toml"),
        dir.path().join("control.sock"),
    );
    let control = format!("unix:{}", socket.display());
    // A sandbox needs root and the package's account.
    let text: Vec<String> = text
        .lines()
        .filter(|l| !l.starts_with("sandbox = ") && !l.starts_with("open_in = "))
        .map(|l| l.replace("unix:/run/pvblk/control.sock", &control))
        .collect();
    fs::write(&file, text.join("\n"))?;
    let mut server = Daemon::start(["serve", "--config", &*file.to_string_lossy()])?;
    let listed = run(
        pvblk(["disk", "list", "--json", "--control", &control])?,
        LIMIT,
    )?
    .success()?;
    let disks: serde_json::Value = serde_json::from_str(&listed.stdout)?;
    let disks = disks.get("disks").unwrap_or(&disks);
    check(disks.as_array().is_some_and(Vec::is_empty), || {
        listed.stdout.clone()
    })?;
    server.signal(Signal::TERM)?;
    let status = server.wait(LIMIT)?;
    check(status.success(), || format!("{status:?}"))
}

/// Runs a maintainer script as dpkg would on a machine with systemd, and gives what it asked systemd to do.
fn asked(script: &str, args: &[&str]) -> Result<String, Stop> {
    let dir = tempfile::tempdir()?;
    let log = dir.path().join("log");
    fs::write(&log, "")?;
    for name in [
        "deb-systemd-invoke",
        "deb-systemd-helper",
        "systemctl",
        "systemd-sysusers",
        "systemd-tmpfiles",
    ] {
        let stub = dir.path().join(name);
        fs::write(
            &stub,
            format!("#!/bin/sh\necho {name} \"$@\" >>'{}'\n", log.display()),
        )?;
        fs::set_permissions(&stub, fs::Permissions::from_mode(0o755))?;
    }
    let text = fs::read_to_string(package()?.control.join(script))?;
    let text = text.replace("/run/systemd/system", &dir.path().to_string_lossy());
    let path = format!("{}:/usr/bin:/bin", dir.path().display());
    let args = ["-ec", &text, script]
        .into_iter()
        .chain(args.iter().copied());
    let mut command = tool("sh", args);
    command.env("PATH", path);
    run(command, LIMIT)?.success()?;
    Ok(fs::read_to_string(log)?)
}

fn scripts() -> Result<(), Stop> {
    let upgraded =
        asked("prerm", &["upgrade", "0.2.0"])? + &asked("postinst", &["configure", "0.0.9"])?;
    for word in ["stop", "restart", "try-restart"] {
        check(!upgraded.split_whitespace().any(|w| w == word), || {
            upgraded.clone()
        })?;
    }
    check(
        upgraded.contains("deb-systemd-invoke start pvblk.service"),
        || upgraded.clone(),
    )?;
    let removed = asked("prerm", &["remove"])?;
    check(
        removed.contains("deb-systemd-invoke stop pvblk.service"),
        || removed,
    )
}

/// dpkg on a folder of its own, in which nothing of this machine is changed.
fn dpkg(root: &Path, args: &[&str]) -> Result<(), Stop> {
    let root = format!("--root={}", root.display());
    let always = [
        &*root,
        "--force-script-chrootless",
        "--force-depends",
        "--force-confold",
    ];
    run_ok("dpkg", always.iter().chain(args)).map(drop)
}

fn life() -> Result<(), Stop> {
    if !rustix::process::geteuid().is_root() {
        return Stop::skip("dpkg installs as root only");
    }
    need(&[
        "dpkg",
        "systemd-sysusers",
        "systemd-tmpfiles",
        "deb-systemd-helper",
    ])?;
    let package = package()?;
    let dir = tempfile::tempdir()?;
    let root = dir.path().join("root");
    for folder in ["var/lib/dpkg/info", "var/lib/dpkg/updates", "etc"] {
        fs::create_dir_all(root.join(folder))?;
    }
    fs::write(root.join("var/lib/dpkg/status"), "")?;
    dpkg(&root, &["-i", &package.deb.to_string_lossy()])?;
    let accounts = fs::read_to_string(root.join("etc/passwd"))?;
    check(accounts.contains("pvblk:"), || accounts)?;
    check(
        root.join("etc/systemd/system/multi-user.target.wants/pvblk.service")
            .is_symlink(),
        || "the service isn't enabled".to_owned(),
    )?;

    // What the machine's operator and the server wrote.
    let config = root.join("etc/pvblk/pvblk.toml");
    let image = root.join("srv/pvblk/vm1.img");
    let state = root.join("var/lib/pvblk/state.json");
    fs::create_dir_all(root.join("var/lib/pvblk"))?;
    for file in [&config, &image, &state] {
        fs::write(file, "mine")?;
    }

    let deb = package.next(dir.path())?;
    dpkg(&root, &["-i", &deb.to_string_lossy()])?;
    for file in [&config, &image, &state] {
        let text = fs::read_to_string(file)?;
        check(text == "mine", || {
            format!("{} after the upgrade: {text}", file.display())
        })?;
    }

    dpkg(&root, &["-r", "pvblk"])?;
    check(!root.join("usr/bin/pvblk").exists(), || {
        "the program stays".to_owned()
    })?;
    check(config.exists() && state.exists(), || {
        "a removal is no purge".to_owned()
    })?;
    dpkg(&root, &["-P", "pvblk"])?;
    for gone in [
        "etc/pvblk",
        "var/lib/pvblk",
        "usr/share/doc/pvblk",
        "etc/systemd/system/multi-user.target.wants/pvblk.service",
    ] {
        let path = root.join(gone);
        check(fs::symlink_metadata(&path).is_err(), || {
            format!("{gone} stays after the purge")
        })?;
    }
    check(image.exists(), || "the purge took an image".to_owned())
}
