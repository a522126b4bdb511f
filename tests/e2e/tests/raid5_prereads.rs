//! Reads of an array from its members for parity, beside the kernel's md: the same writes, replayed to both.
//!
//! To md, writes past the page cache are synchronous, and it doesn't delay the reads that those need; pvblk
//! delays all. Without that mark md reads a few per cent less than here; and it lets its cache grow from 256
//! stripe heads to about 300.

use pvblk_e2e::arrays::LIMIT;
use pvblk_e2e::daemon::example;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{need, run, run_ok};
use pvblk_e2e::{MIB, Stop, run_all, vm};
use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

const GUEST_LIMIT: Duration = Duration::from_secs(300);

/// Requests in flight.
const DEPTH: &str = "32";

/// Runs of md: they differ by about 2 %, ours not at all.
const RUNS: usize = 3;

/// pvblk may read this many per cent of md's reads. It reads 4 to 10 % more than md here.
const MOST: u64 = 113;

fn main() -> ExitCode {
    run_all(&[("as_few_reads_as_md", compared)])
}

fn compared() -> Result<(), Stop> {
    need(&["tar", "ldd"])?;
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/ext4.trace");
    let tool = example("raid5_prereads", "pvblk-volume")?;
    let mut md = md(&tool, &trace)?;
    md.sort_unstable();
    let md = md[md.len() / 2];
    let few = |sectors: u64| sectors * 100 <= md * MOST;
    for (sectors, model) in ours(&tool, &trace, &[])? {
        println!("{sectors} sectors, md {md}: {model}");
        check(few(sectors), || {
            format!("{sectors} sectors were read, md read {md}: {model}")
        })?;
    }
    // The comparison itself must see a difference.
    for (sectors, model) in ours(&tool, &trace, &["--stripes", "32"])? {
        check(!few(sectors), || {
            format!("{sectors} sectors with a small cache, md {md}: {model}")
        })?;
    }
    Ok(())
}

/// Sectors that our array reads, with each kind of disk.
fn ours(tool: &Path, trace: &Path, args: &[&str]) -> Result<Vec<(u64, String)>, Stop> {
    let mut command = Command::new(tool);
    command.arg(trace).args(["--depth", DEPTH]).args(args);
    let said = run(command, LIMIT)?.success()?.stdout;
    // depth  32  read   83328 sectors   4281 requests  MODEL
    let figure = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        Some((words.get(3)?.parse().ok()?, (*words.get(7)?).to_owned()))
    };
    let figures: Vec<_> = said.lines().filter_map(figure).collect();
    check(figures.len() >= 3, || said)?;
    Ok(figures)
}

/// Sectors that md's array reads, one figure for each run.
fn md(tool: &Path, trace: &Path) -> Result<Vec<u64>, Stop> {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name);
    let luggage = path("luggage");
    std::fs::create_dir_all(luggage.join("lib"))?;
    std::fs::copy(tool, luggage.join("raid5_prereads"))?;
    std::fs::copy(trace, luggage.join("trace"))?;
    for library in libraries(tool)? {
        let name = library.file_name().unwrap_or_default();
        std::fs::copy(&library, luggage.join("lib").join(name))?;
    }
    let mut runs = String::new();
    for _ in 0..RUNS {
        let _ = writeln!(runs, "{DEPTH} plain");
    }
    std::fs::write(luggage.join("runs"), runs)?;
    let archive = path("tool.tar");
    run_ok(
        "tar",
        [
            "-C".as_ref(),
            luggage.as_os_str(),
            "-cf".as_ref(),
            archive.as_os_str(),
            ".".as_ref(),
        ],
    )?;
    let mut disks: Vec<PathBuf> = (0..4).map(|n| path(&format!("m{n}"))).collect();
    for disk in &disks {
        File::create(disk)?.set_len(64 * MIB)?;
    }
    disks.push(archive);
    let disks: Vec<&Path> = disks.iter().map(PathBuf::as_path).collect();
    let (script, out) = (vm::named("md-prereads.sh"), path("out"));
    std::fs::create_dir(&out)?;
    let log = vm::script(vm::Kind::Uml, &script, &disks, &out, GUEST_LIMIT)?;
    let left = std::fs::read_to_string(out.join("reads"))?;
    let sectors = |line: &str| line.split(' ').nth(3)?.parse().ok().filter(|n| *n > 0);
    let reads: Vec<u64> = left.lines().filter_map(sectors).collect();
    check(reads.len() == RUNS, || format!("{left}\n{log}"))?;
    Ok(reads)
}

/// The libraries of a program, and its loader: the guest's may be older.
fn libraries(program: &Path) -> Result<Vec<PathBuf>, Stop> {
    let said = run_ok("ldd", [program])?.stdout;
    let paths = said.split_whitespace().filter(|w| w.starts_with('/'));
    Ok(paths.map(PathBuf::from).collect())
}
