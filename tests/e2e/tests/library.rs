//! The library `pvblk-disk`: its examples as programs of their own, on disks of a server that is reached in each way.

use pvblk_e2e::daemon::{Daemon, example};
use pvblk_e2e::outcome::check;
use pvblk_e2e::stage::{self, uri};
use pvblk_e2e::tools::{Finished, compare, describe, run, wait};
use pvblk_e2e::{MIB, Stop, pattern, run_all};
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(120);
/// Not a multiple of the pieces of a copy.
const BYTES: u64 = 32 * MIB + 12288;

fn main() -> ExitCode {
    run_all(&[
        ("the_first_program_of_the_guide", first),
        ("a_disk_is_copied_over_each_way", copies),
        ("a_copy_goes_on_over_a_killed_server", copy_goes_on),
        ("size_and_limits_are_those_of_the_server", info),
        ("random_reads_over_each_way", reads),
        ("errors_are_one_line", errors),
    ])
}

/// A server of disk a, a file.
struct Served {
    dir: TempDir,
    daemon: Daemon,
}

impl Served {
    /// With `decorator` in front of the file, and these options behind it.
    fn start(decorator: &str, options: &str) -> Result<Served, Stop> {
        let dir = tempfile::tempdir()?;
        pattern::write(&dir.path().join("disk"), BYTES, pvblk_testing::seed())?;
        let daemon = Served::serve(dir.path(), decorator, options)?;
        Ok(Served { dir, daemon })
    }

    fn serve(dir: &Path, decorator: &str, options: &str) -> Result<Daemon, Stop> {
        let disk = format!("a={decorator}file:{}{options}", dir.join("disk").display());
        let socket = |name: &str| stage::unix(&dir.join(name));
        let vhost = format!("a={}", socket("vhost"));
        let (local, nbd) = (socket("local"), socket("nbd"));
        Daemon::start([
            "serve",
            "--disk",
            &disk,
            "--local",
            &local,
            "--nbd",
            &nbd,
            "--vhost-user",
            &vhost,
        ])
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn rings(&self) -> String {
        format!("rings:unix:{},disk=a", self.path("local").display())
    }

    /// Specifications of the disk over rings, NBD and vhost-user.
    fn ways(&self) -> [String; 3] {
        let vhost = format!("vhost-user:unix:{}", self.path("vhost").display());
        [self.rings(), uri(&self.path("nbd"), "a"), vhost]
    }
}

fn program(name: &str, args: &[&str]) -> Result<Command, Stop> {
    let mut command = Command::new(example(name, "pvblk-disk")?);
    command.args(args).stdin(Stdio::null());
    Ok(command)
}

fn ran(name: &str, args: &[&str]) -> Result<Finished, Stop> {
    run(program(name, args)?, LIMIT)?.success()
}

/// The page shows the program that is run here, whole.
fn first() -> Result<(), Stop> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/guide/library.md"))?;
    let text = fs::read_to_string(root.join("crates/disk/examples/disk_first.rs"))?;
    let shown = page.split("```rust\n").nth(1);
    let shown = shown.and_then(|rest| rest.split("```").next());
    check(shown == Some(&*text), || {
        format!("the guide shows another program than disk_first.rs:\n{shown:?}")
    })?;
    let mut served = Served::start("", "")?;
    let local = served.path("local").display().to_string();
    let said = ran("disk_first", &[&local, "a"])?.stdout;
    check(said == "hello\n", || format!("it said {said:?}"))?;
    served.daemon.stop()?;
    let mut bytes = [0; 5];
    fs::File::open(served.path("disk"))?.read_exact_at(&mut bytes, 0)?;
    check(&bytes == b"hello", || format!("the file has {bytes:?}"))
}

fn copies() -> Result<(), Stop> {
    let mut served = Served::start("", "")?;
    for (n, spec) in served.ways().iter().enumerate() {
        let copy = served.path(&format!("copy{n}"));
        ran("disk_copy", &[spec, &copy.display().to_string()])?;
        compare(&served.path("disk"), &copy)?;
    }
    served.daemon.stop()
}

/// A server is killed in the middle, and another one started later: the copy waits, and is whole.
fn copy_goes_on() -> Result<(), Stop> {
    // So slow that the server is killed long before the end.
    const SLOW: &str = "delay:bw=1M:";
    let mut served = Served::start(SLOW, "")?;
    let copy = served.path("copy");
    let specs = served.ways();
    // A vhost-user disk isn't waited for.
    for spec in &specs[..2] {
        let mut command = program("disk_copy", &[spec, &copy.display().to_string()])?;
        let line = describe(&command);
        let mut child = command.stdout(Stdio::null()).spawn()?;
        let begin = Instant::now();
        // Blocks that were written, of a file that has its size from the beginning.
        let has_begun = || fs::metadata(&copy).is_ok_and(|m| m.blocks() >= 2048);
        while !has_begun() {
            check(begin.elapsed() < LIMIT, || {
                format!("`{line}` copies nothing")
            })?;
            std::thread::sleep(Duration::from_millis(5));
        }
        served.daemon.kill()?;
        check(child.try_wait()?.is_none(), || {
            format!("`{line}` ended before its server was killed")
        })?;
        std::thread::sleep(Duration::from_millis(300));
        served.daemon = Served::serve(served.dir.path(), "", "")?;
        let status = wait(&mut child, LIMIT)?;
        if status.is_none() {
            child.kill()?;
            child.wait()?;
        }
        check(status.is_some_and(|s| s.success()), || {
            format!("`{line}` ended with {status:?}")
        })?;
        compare(&served.path("disk"), &copy)?;
        fs::remove_file(&copy)?;
        served.daemon.stop()?;
        served.daemon = Served::serve(served.dir.path(), SLOW, "")?;
    }
    served.daemon.stop()
}

fn info() -> Result<(), Stop> {
    for (options, sector, read_only) in [("", 512, false), (",sector=4096,ro", 4096, true)] {
        let mut served = Served::start("", options)?;
        for spec in served.ways() {
            let said = ran("disk_info", &[&spec])?.stdout;
            // NBD knows requests of any length, which the server cuts to blocks.
            let sector = if spec.starts_with("nbd") { 512 } else { sector };
            for expected in [
                format!("size             {BYTES}\n"),
                format!("logical sector   {sector}\n"),
                format!("read only        {read_only}\n"),
            ] {
                check(said.contains(&expected), || {
                    format!("{spec}: {expected:?} isn't in:\n{said}")
                })?;
            }
        }
        served.daemon.stop()?;
    }
    Ok(())
}

fn reads() -> Result<(), Stop> {
    let mut served = Served::start("", "")?;
    for spec in served.ways() {
        let said = ran("disk_randread", &[&spec, "1"])?.stdout;
        let count = said.split(" reads, ").next().and_then(|n| n.parse().ok());
        check(count.is_some_and(|n: u64| n >= 32), || {
            format!("{spec}: {said:?}")
        })?;
        println!("{spec}: {}", said.trim_end());
    }
    served.daemon.stop()
}

/// A main that returns the library's error prints one line, which says what to do.
fn errors() -> Result<(), Stop> {
    let served = Served::start("", "")?;
    let none = format!("rings:unix:{},disk=b", served.path("local").display());
    let nowhere = "rings:unix:/nonexistent/pvblk.sock,disk=a";
    for (spec, kind, text) in [
        (none.as_str(), "Error: Refused: ", "b"),
        (nowhere, "Error: Os: ", "No such file or directory"),
        ("mem:much", "Error: Config: ", "mem:much"),
    ] {
        let failed = run(program("disk_info", &[spec])?, LIMIT)?;
        let lines: Vec<&str> = failed.stderr.lines().collect();
        let fits = lines.len() == 1 && lines[0].starts_with(kind) && lines[0].contains(text);
        check(fits && failed.status.is_some_and(|s| !s.success()), || {
            format!("{spec}: {:?}, {lines:?}", failed.status)
        })?;
    }
    Ok(())
}
