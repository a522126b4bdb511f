//! A killed server's writes that are still on their way to a slow medium: the next server isn't let in before they have
//! ended, so none of them lands on top of what was written since.

use pvblk_e2e::arrays::{raid, wrong_stripes};
use pvblk_e2e::nbd::{Command, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::slow_medium::{Kind, Rule, SlowMedium};
use pvblk_e2e::{Daemon, MIB, Stop, run_all, stage};
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

fn main() -> ExitCode {
    run_all(&[
        ("an_old_direct_write_isnt_overtaken", || {
            overtaking("direct")
        }),
        ("an_old_write_isnt_overtaken", || overtaking("engine=uring")),
        ("an_old_write_of_an_array_isnt_overtaken", array),
    ])
}

/// Time for which the old write is held: many times the start of a server.
const HOLD: Duration = Duration::from_secs(5);
/// Bytes of a write.
const BLOCK: usize = 4096;
/// Where, in bytes.
const PLACE: u64 = 64 << 10;

/// Starts servers until one is let in.
struct Starting {
    told: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Daemon, Stop>>>,
}

impl Starting {
    fn new(arguments: Vec<String>) -> Starting {
        let told = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&told);
        let thread = std::thread::spawn(move || {
            loop {
                let last = match Daemon::start(&arguments) {
                    Ok(daemon) => return Ok(daemon),
                    Err(last) => last,
                };
                if stop.load(Ordering::Relaxed) {
                    return Err(last);
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        Starting {
            told,
            thread: Some(thread),
        }
    }

    /// True if the next server was let in so far.
    fn is_in(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// The server that was let in; an error if none is let in within the limit.
    fn wait(mut self, limit: Duration) -> Result<Daemon, Stop> {
        let deadline = Instant::now() + limit;
        while !self.is_in() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.told.store(true, Ordering::Relaxed);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            _ => Stop::fail("the thread that starts servers panicked"),
        }
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        self.told.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A server that was let in is killed.
            let _ = thread.join();
        }
    }
}

struct Heals<'a>(&'a SlowMedium);

impl Drop for Heals<'_> {
    fn drop(&mut self) {
        self.0.heal("*");
    }
}

fn ok(connection: &mut Connection, what: &str) -> Result<(), Stop> {
    let reply = connection.receive()?;
    check(reply.is_some_and(|r| r.error == 0), || {
        format!("{what}: {reply:?}")
    })
}

/// Write A is held by the medium while its server is killed and the next one starts; then B is written to the
/// same place. The disk makes several writes to the medium of A; whether or not these are done, the disk
/// reads B from the flush of B on.
fn written_over(dir: &Path, medium: &SlowMedium, spec: &str, writes: usize) -> Result<(), Stop> {
    let local = stage::unix(&dir.join("local"));
    let nbd = dir.join("nbd");
    let serve: Vec<String> = ["serve", "--disk", &format!("a={spec}"), "--local", &local]
        .map(str::to_owned)
        .to_vec();
    let first = Daemon::start(&serve)?;
    let mut attach = Daemon::start([
        "attach",
        &local,
        "--disk",
        "a",
        "--nbd",
        &stage::unix(&nbd),
        "--reconnect",
        "120",
    ])?;
    // Behind the servers, so that it comes before them in a failure: a killed server may wait for the medium.
    let _heals = Heals(medium);
    let mut connection = Connection::open(&nbd, "a")?;
    // An array notes that it is written to before its first write; that is over now.
    connection.send(Command::Write, 1, PLACE, &[b'0'; BLOCK])?;
    ok(&mut connection, "the first write")?;
    connection.send(Command::Flush, 2, 0, &[])?;
    ok(&mut connection, "the first flush")?;
    medium.set("*", &[Kind::Write], Rule::Hold);
    connection.send(Command::Write, 3, PLACE, &[b'A'; BLOCK])?;
    medium.wait_held("*", &[Kind::Write], writes)?;
    medium.set("*", &[Kind::Write], Rule::Now);
    first.signal(Signal::KILL)?;
    let starting = Starting::new(serve);
    // From here on a failure is reported only at the end, together with the disk's contents.
    let deadline = Instant::now() + HOLD;
    while !starting.is_in() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let early = starting.is_in();
    if !early {
        medium.release("*", &Kind::ALL);
    }
    let mut second = starting.wait(Duration::from_secs(60))?;
    ok(&mut connection, "A, done again")?;
    connection.send(Command::Write, 4, PLACE, &[b'B'; BLOCK])?;
    ok(&mut connection, "B")?;
    connection.send(Command::Flush, 5, 0, &[])?;
    ok(&mut connection, "the flush")?;
    let flushed = connection.read(6, PLACE, BLOCK)?;
    medium.release("*", &Kind::ALL);
    medium.settle()?;
    let later = connection.read(7, PLACE, BLOCK)?;
    let of = |data: &[u8]| data.iter().map(|&b| char::from(b)).next();
    check(
        !early && flushed == [b'B'; BLOCK] && later == [b'B'; BLOCK],
        || {
            format!(
                "let in beside a write of the server before: {early}; after the flush of B the disk reads {:?}, later {:?}",
                of(&flushed),
                of(&later)
            )
        },
    )?;
    attach.stop()?;
    second.stop()
}

fn overtaking(option: &str) -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let medium = SlowMedium::new()?;
    let disk = medium.add("disk", 16 * MIB)?;
    let spec = format!("file:{},{option}", disk.display());
    written_over(dir.path(), &medium, &spec, 1)
}

fn array() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let medium = SlowMedium::new()?;
    let names = ["m0", "m1", "m2"];
    let paths: Result<Vec<PathBuf>, Stop> = names.iter().map(|n| medium.add(n, 24 * MIB)).collect();
    let paths = paths?;
    raid(
        &[
            "create",
            "--raid-devices",
            "3",
            "--consistency-policy",
            "resync",
        ],
        &paths,
    )?;
    let member = |p: &PathBuf| format!("[file:{},direct]", p.display());
    let members: String = paths.iter().map(member).collect();
    // Data and parity.
    written_over(dir.path(), &medium, &format!("raid5:{members}"), 2)?;
    let wrong = wrong_stripes(&paths)?;
    check(wrong == 0, || {
        format!("the parity of {wrong} blocks is wrong")
    })
}
