//! A disk behind a page cache: real clients read, write and flush it, and its server is killed.

use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::nbd::{Command, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::stage::{unix, uri};
use pvblk_e2e::tools::{compare, need, run, run_ok};
use pvblk_e2e::{Daemon, MIB, Stop, run_all};
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(60);
/// Of the disk: much more than of its cache.
const BYTES: u64 = 32 * MIB;

fn main() -> ExitCode {
    run_all(&[
        ("clients_write_flush_and_read", copied),
        ("what_was_flushed_outlives_a_kill", killed),
        ("counters_are_told_and_pages_dropped", counted),
        ("write_through_needs_no_flush", written_through),
        ("mistakes_are_told_in_one_line", mistakes),
    ])
}

/// A server of `c`, a cache over a file.
struct Cached {
    daemon: Daemon,
    dir: TempDir,
}

impl Cached {
    fn start(options: &str) -> Result<Cached, Stop> {
        let dir = tempfile::tempdir()?;
        File::create(dir.path().join("disk"))?.set_len(BYTES)?;
        Cached::again(dir, options)
    }

    fn again(dir: TempDir, options: &str) -> Result<Cached, Stop> {
        let path = |name: &str| unix(&dir.path().join(name));
        let disk = dir.path().join("disk");
        let disk = format!("c=cache:{options}:file:{}", disk.display());
        let (nbd, control) = (path("nbd"), path("control"));
        let args = [
            "serve",
            "--disk",
            &disk,
            "--nbd",
            &nbd,
            "--control",
            &control,
        ];
        Ok(Cached {
            daemon: Daemon::start(args)?,
            dir,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn uri(&self) -> String {
        uri(&self.path("nbd"), "c")
    }

    fn connect(&self) -> Result<Connection, Stop> {
        Connection::open(&self.path("nbd"), "c")
    }

    fn cache(&self, more: &[&str]) -> Result<String, Stop> {
        let control = unix(&self.path("control"));
        let mut command = pvblk(["cache", "c", "--control", &control])?;
        command.args(more);
        Ok(run(command, LIMIT)?.success()?.stdout)
    }

    fn counters(&self) -> Result<Value, Stop> {
        Ok(serde_json::from_str(&self.cache(&["--json"])?)?)
    }
}

fn count(counters: &Value, name: &str) -> u64 {
    counters[name].as_u64().unwrap_or(u64::MAX)
}

fn done(client: &mut Connection) -> Result<(), Stop> {
    let reply = client.receive()?;
    check(reply.is_some_and(|r| r.error == 0), || format!("{reply:?}"))
}

fn copied() -> Result<(), Stop> {
    need(&["nbdcopy", "qemu-io", "cmp"])?;
    let mut cached = Cached::start("2M")?;
    let mut rng = pvblk_testing::random();
    let image = cached.path("image");
    let mut data = vec![0; BYTES as usize];
    rng.fill(&mut data);
    std::fs::write(&image, &data)?;
    let uri = cached.uri();
    run_ok(
        "nbdcopy",
        ["--flush".as_ref(), image.as_os_str(), uri.as_ref()],
    )?;
    // It is in the file, and not only in the cache.
    compare(&image, &cached.path("disk"))?;
    // The writes cover parts of pages, of written and of unwritten ones.
    let pieces = [(512, 512), (4096 * 7 + 1024, 8192), (20 * MIB + 3584, 1024)];
    let mut args = vec!["-f".to_owned(), "raw".into()];
    for (at, len) in pieces {
        args.extend(["-c".into(), format!("write -P 0x5a {at} {len}")]);
        data[at as usize..(at + len) as usize].fill(0x5a);
    }
    args.extend(["-c".into(), "flush".into(), uri.clone()]);
    run_ok("qemu-io", &args)?;
    std::fs::write(&image, &data)?;
    let back = cached.path("back");
    run_ok("nbdcopy", [uri.as_ref(), back.as_os_str()])?;
    compare(&image, &back)?;
    cached.daemon.stop()?;
    compare(&image, &cached.path("disk"))
}

/// Rounds of writes, of which some are flushed, and a kill: those are in the file, and each page is one that was written to it.
fn killed() -> Result<(), Stop> {
    const PAGES: u64 = 2048;
    const PAGE: usize = 4096;
    let mut rng = pvblk_testing::random();
    let mut cached = Cached::start("1M")?;
    // By page: the number that was flushed last, and those that were written since.
    let mut flushed = vec![0u64; PAGES as usize];
    let mut number = 0u64;
    let mut lost = 0;
    for round in 0..6 {
        let mut client = cached.connect()?;
        let mut written = vec![Vec::new(); PAGES as usize];
        for batch in 0..5 {
            for _ in 0..100 {
                number += 1;
                let page = rng.u64(..PAGES);
                let data: Vec<u8> = number.to_le_bytes().repeat(PAGE / 8);
                client.send(Command::Write, number, page * PAGE as u64, &data)?;
                done(&mut client)?;
                written[page as usize].push(number);
            }
            if batch < 4 {
                client.send(Command::Flush, 0, 0, &[])?;
                done(&mut client)?;
                for (flushed, written) in flushed.iter_mut().zip(&mut written) {
                    *flushed = written.drain(..).next_back().unwrap_or(*flushed);
                }
            }
        }
        let counters = cached.counters()?;
        check(count(&counters, "pages_dirtied") > 0, || {
            counters.to_string()
        })?;
        let Cached { daemon, dir } = cached;
        daemon.crash()?;
        let file = File::open(dir.path().join("disk"))?;
        let mut data = vec![0; PAGE];
        for page in 0..PAGES {
            file.read_exact_at(&mut data, page * PAGE as u64)?;
            let (numbers, _) = data.as_chunks::<8>();
            let found = u64::from_le_bytes(numbers[0]);
            let (least, since) = (flushed[page as usize], &written[page as usize]);
            let whole = numbers.iter().all(|n| u64::from_le_bytes(*n) == found);
            check(whole && (found == least || since.contains(&found)), || {
                format!(
                    "round {round}, page {page}: {found}, and {least} was flushed, {since:?} written since"
                )
            })?;
            lost += u64::from(since.last().is_some_and(|last| *last != found));
            flushed[page as usize] = found;
        }
        cached = Cached::again(dir, "1M")?;
    }
    println!("{lost} writes that were not flushed were lost");
    check(lost > 0, || "nothing was only in the cache".into())
}

fn counted() -> Result<(), Stop> {
    need(&["qemu-io"])?;
    let cached = Cached::start("4M")?;
    let bill = cached.daemon.lines().join("\n");
    check(
        bill.contains("cache over file:") && bill.contains(": pages"),
        || bill,
    )?;
    let uri = cached.uri();
    let io = |commands: &[&str]| {
        let each = commands.iter().flat_map(|c| ["-c", c]);
        let args: Vec<&str> = ["-f", "raw"]
            .into_iter()
            .chain(each)
            .chain([&*uri])
            .collect();
        run_ok("qemu-io", &args).map(drop)
    };
    // qemu reads a little to find the image's format, so figures are differences.
    io(&["read 0 1M"])?;
    let cold = cached.counters()?;
    io(&["read 0 1M", "read 0 1M"])?;
    let warm = cached.counters()?;
    let more = |name: &str| count(&warm, name) - count(&cold, name);
    check(more("hits") >= 512 && more("pgpgin") == 0, || {
        format!("{cold} {warm}")
    })?;
    let text = cached.cache(&[])?;
    check(
        text.contains("\nhit_ratio ") && text.contains("\npgpgin "),
        || text,
    )?;
    let said = cached.cache(&["--drop"])?;
    let dropped = said.trim().strip_prefix("dropped_pages ");
    let dropped = dropped.and_then(|n| n.parse::<u64>().ok());
    check(dropped.is_some_and(|n| n >= 256), || said)?;
    io(&["read 0 1M"])?;
    let again = cached.counters()?;
    check(
        count(&again, "pgpgin") >= count(&warm, "pgpgin") + 1024,
        || format!("{warm} {again}"),
    )
}

fn written_through() -> Result<(), Stop> {
    let cached = Cached::start("1M,mode=write-through")?;
    let mut client = cached.connect()?;
    client.send(Command::Write, 1, 8192, &[7; 4096])?;
    done(&mut client)?;
    let mut data = [0; 4096];
    File::open(cached.path("disk"))?.read_exact_at(&mut data, 8192)?;
    check(data == [7; 4096], || "it isn't in the file".into())
}

fn mistakes() -> Result<(), Stop> {
    let cached = Cached::start("1M")?;
    let control = unix(&cached.path("control"));
    let refused = |args: &[&str], what: &str| -> Result<(), Stop> {
        let said = run(pvblk(args)?, LIMIT)?;
        let told = said.stderr.contains(what) && said.stderr.lines().count() == 1;
        check(said.status.is_some_and(|s| !s.success()) && told, || {
            format!("{args:?}: {what:?} isn't in {said:?}")
        })
    };
    refused(&["cache", "nosuch", "--control", &control], "nosuch")?;
    refused(
        &["cache", "c", "--control", "unix:/nosuch/socket"],
        "/nosuch/socket",
    )?;
    let serve = |disk: &str, what: &str| {
        refused(&["serve", "--disk", disk, "--nbd", "unix:/nosuch/s"], what)
    };
    serve(
        "c=cache:1M,mode=fast:mem:1M",
        "none of write-back, write-through, read-only",
    )?;
    serve("c=cache:1k:mem:1M", "from 64k to 16T")?;
    // A disk without a cache: the error says how to add one, and which disks have one.
    let without = |disks: &[&str], said: &[&str]| -> Result<(), Stop> {
        let dir = tempfile::tempdir()?;
        let (nbd, own) = (unix(&dir.path().join("n")), unix(&dir.path().join("c")));
        let mut args = vec!["serve", "--nbd", &nbd, "--control", &own];
        disks.iter().for_each(|disk| args.extend(["--disk", disk]));
        let _daemon = Daemon::start(args)?;
        for more in [None, Some("--drop")] {
            let mut asked = vec!["cache", "m", "--control", &own];
            asked.extend(more);
            said.iter().try_for_each(|said| refused(&asked, said))?;
        }
        Ok(())
    };
    let add = "disk m has no cache: serve it as m=cache:256M:mem:1M to add one";
    without(&["m=mem:1M"], &[add])?;
    let other = "c=cache:1M:mem:2M";
    without(&["m=mem:1M", other], &[add, "disks with a cache: c"])
}
