//! The log: a reader that doesn't read it holds up no disk, and clients can't fill it.

use pvblk_e2e::daemon::{is_stall, pvblk};
use pvblk_e2e::nbd::{Command, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::stage::unix;
use pvblk_e2e::{Daemon, Stop, run_all, tools};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A limit for operations that take a moment on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Connections that break the protocol.
const BROKEN: usize = 4;

fn main() -> ExitCode {
    run_all(&[
        ("who_does_not_read_it_holds_up_nobody", nobody_reads),
        ("what_waited_for_a_reader_is_told", told_later),
        ("reconnects_without_end_do_not_fill_it", reconnects),
    ])
}

/// A server of two disks and one worker, whose standard error is a full pipe.
struct Stuck {
    child: Child,
    /// The pipe's other end; it doesn't block.
    log: File,
    said: String,
    disk_a: Connection,
    /// On disk b, before they break the protocol.
    broken: Vec<Connection>,
    dir: TempDir,
}

impl Drop for Stuck {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Stuck {
    fn new() -> Result<Stuck, Stop> {
        let dir = tempfile::tempdir()?;
        let socket = dir.path().join("nbd");
        let (read, write) = rustix::pipe::pipe()?;
        rustix::io::ioctl_fionbio(&read, true)?;
        let mut command = pvblk([
            "serve",
            "--workers",
            "1",
            "--disk",
            "a=mem:1M",
            "--disk",
            "b=mem:1M",
            "--nbd",
            &unix(&socket),
        ])?;
        let child = command.stderr(write).spawn()?;
        drop(command);
        let mut log = File::from(read);
        let mut said = String::new();
        wait_for(&mut log, &mut said, "pvblk: ready\n")?;
        let served = |disk: &str| -> Result<Connection, Stop> {
            let mut connection = Connection::open(&socket, disk)?;
            flush(&mut connection)?;
            Ok(connection)
        };
        let disk_a = served("a")?;
        let broken: Result<Vec<Connection>, Stop> = (0..BROKEN).map(|_| served("b")).collect();
        let stuck = Stuck {
            child,
            log,
            said,
            disk_a,
            broken: broken?,
            dir,
        };
        stuck.fill()?;
        Ok(stuck)
    }

    /// Fills the pipe, through a descriptor that doesn't share the server's flags.
    fn fill(&self) -> Result<(), Stop> {
        let path = format!("/proc/self/fd/{}", self.log.as_raw_fd());
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let write: OwnedFd = rustix::fs::open(path, flags, Mode::empty())?;
        for piece in [4096, 1] {
            while match rustix::io::write(&write, &[b'\n'; 4096][..piece]) {
                Ok(_) => true,
                Err(Errno::AGAIN) => false,
                Err(e) => return Err(e.into()),
            } {}
        }
        Ok(())
    }

    /// Clients of disk b send bytes that are no request; the worker ends each connection and logs
    /// it.
    fn break_them(&mut self) -> Result<(), Stop> {
        for connection in &mut self.broken {
            connection.send_bytes(&[0x55; 28])?;
        }
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<(), Stop> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| Stop::Fail("no process id".into()))?;
        Ok(kill_process(pid, signal)?)
    }

    fn ended(&mut self) -> Result<(), Stop> {
        match tools::wait(&mut self.child, PATIENCE)? {
            Some(status) => check(status.success(), || format!("{status}: {}", self.said)),
            None => Stop::fail("it doesn't end"),
        }
    }
}

/// Reads on until `words` have come.
fn wait_for(log: &mut File, said: &mut String, words: &str) -> Result<(), Stop> {
    read_until(log, said, words, |said| said.contains(words))
}

/// Reads on until `enough` holds for all that was read; `what` names it.
fn read_until(
    log: &mut File,
    said: &mut String,
    what: &str,
    enough: impl Fn(&str) -> bool,
) -> Result<(), Stop> {
    let begin = Instant::now();
    while !enough(said) {
        check(begin.elapsed() < PATIENCE, || {
            format!("no {what:?} in {said}")
        })?;
        let mut bytes = [0; 4096];
        match log.read(&mut bytes) {
            Ok(0) => return Stop::fail(format!("it ended without {what:?}: {said}")),
            Ok(n) => said.push_str(&String::from_utf8_lossy(&bytes[..n])),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn flush(connection: &mut Connection) -> Result<(), Stop> {
    connection.send(Command::Flush, 1, 0, &[])?;
    let reply = connection.receive()?;
    check(reply.is_some_and(|r| r.error == 0), || format!("{reply:?}"))
}

fn nobody_reads() -> Result<(), Stop> {
    let mut stuck = Stuck::new()?;
    stuck.break_them()?;
    for connection in &mut stuck.broken {
        let reply = connection.receive()?;
        check(reply.is_none(), || format!("still served: {reply:?}"))?;
    }
    // The memory bill.
    stuck.signal(Signal::USR1)?;
    for n in 0..100 {
        stuck.disk_a.send(Command::Write, n, 4096 * n, &[7; 4096])?;
        let reply = stuck.disk_a.receive()?;
        check(reply.is_some_and(|r| r.error == 0), || {
            format!("disk a: {reply:?}")
        })?;
    }
    // Others can still come.
    flush(&mut Connection::open(&stuck.dir.path().join("nbd"), "a")?)?;
    stuck.signal(Signal::TERM)?;
    stuck.ended()
}

fn told_later() -> Result<(), Stop> {
    let mut stuck = Stuck::new()?;
    stuck.break_them()?;
    flush(&mut stuck.disk_a)?;
    let told = |said: &str| {
        let of_b = |l: &&str| l.contains("export \"b\": ") && !is_stall(l);
        said.lines().filter(of_b).count()
    };
    let Stuck { log, said, .. } = &mut stuck;
    // A server that stops ends the connections that it hasn't read from yet without a line.
    read_until(log, said, "line for each", |said| told(said) >= BROKEN)?;
    stuck.signal(Signal::TERM)?;
    let Stuck { log, said, .. } = &mut stuck;
    wait_for(log, said, "stopping")?;
    let told = told(said);
    check(told == BROKEN, || {
        format!("{told} of {BROKEN} are told: {said}")
    })?;
    stuck.ended()
}

fn reconnects() -> Result<(), Stop> {
    const TIMES: usize = 300;
    let dir = tempfile::tempdir()?;
    let socket = dir.path().join("nbd");
    let args = ["serve", "--disk", "a=mem:1M", "--nbd", &unix(&socket)];
    let begin = Instant::now();
    let mut serve = Daemon::start(args)?;
    for _ in 0..TIMES {
        let mut connection = Connection::open(&socket, "a")?;
        connection.send_bytes(&[0x55; 28])?;
        check(connection.receive()?.is_none(), || "still served".into())?;
    }
    serve.stop()?;
    // The lines are eight, then 16, 32, 64, 128 and 256; and rare events are logged once a minute.
    let most = 8 + 5 + begin.elapsed().as_secs() as usize / 60 + 1;
    let lines = serve.lines();
    for kind in ["serves export \"a\"", "export \"a\": "] {
        let of_kind = |l: &&String| l.contains(kind) && !is_stall(l);
        let told: Vec<&String> = lines.iter().filter(of_kind).collect();
        check((13..=most).contains(&told.len()), || {
            format!("{} lines of {TIMES}: {told:#?}", told.len())
        })?;
        check(told[12].ends_with("(256 times so far)"), || {
            format!("{told:#?}")
        })?;
    }
    Ok(())
}
