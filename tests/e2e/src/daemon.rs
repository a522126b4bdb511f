//! `pvblk` as a child process.

use crate::outcome::check;
use crate::{Stop, tools};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};
use rustix::time::Timespec;
use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The line that the command prints when its clients may connect.
const READY: &str = "pvblk: ready";

/// Longest time a start may take.
const START: Duration = Duration::from_secs(60);

/// The command under test.
pub fn binary() -> Result<PathBuf, Stop> {
    let path = match std::env::var_os("PVBLK_BIN") {
        Some(path) => PathBuf::from(path),
        None => target().join("release/pvblk"),
    };
    built(path, "--release -p pvblk")
}

/// The program with the experiments: `PVBLK_LAB_BIN`, or the one that the crates' tests have built. No test judges its rates, so it isn't built once more.
pub fn lab_binary() -> Result<PathBuf, Stop> {
    let path = match std::env::var_os("PVBLK_LAB_BIN") {
        Some(path) => PathBuf::from(path),
        None => target().join("debug/pvblk-lab"),
    };
    built(path, "-p pvblk-lab")
}

/// An example of one of the crates, as their tests have built it.
pub fn example(name: &str, package: &str) -> Result<PathBuf, Stop> {
    let how = format!("-p {package} --example {name}");
    built(target().join("debug/examples").join(name), &how)
}

fn target() -> PathBuf {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

fn built(path: PathBuf, how: &str) -> Result<PathBuf, Stop> {
    if path.is_file() {
        return Ok(path);
    }
    // A failure and not a skip: with nothing to test, nothing passes.
    Stop::fail(format!("{} isn't built: cargo build {how}", path.display()))
}

/// A command line of `pvblk`, of which those that stay until they are ended do so with this process. `PVBLK_E2E_SANDBOX=USER` has all servers serve in a
/// sandbox: tests of exports pass in it, too.
pub fn pvblk<I: AsRef<OsStr>>(args: impl IntoIterator<Item = I>) -> Result<Command, Stop> {
    let args: Vec<OsString> = args.into_iter().map(|a| a.as_ref().to_owned()).collect();
    let serves = args.first().is_some_and(|a| a == "serve");
    let mut command = match serves || args.first().is_some_and(|a| a == "attach" || a == "web") {
        true => tools::bound(binary()?, "KILL"),
        false => Command::new(binary()?),
    };
    let says_so = args.iter().any(|a| a == "--sandbox");
    command.args(args).stdin(Stdio::null());
    if serves
        && !says_so
        && let Some(user) = std::env::var_os("PVBLK_E2E_SANDBOX")
    {
        command.arg("--sandbox").arg(user);
        command.arg("--open-in").arg(std::env::temp_dir());
    }
    // Servers that run side by side would meet at the usual place.
    command.env("PVBLK_CONTROL", "none");
    Ok(command)
}

/// A command line of `pvblk-lab`, whose experiments are made on the command under test.
pub fn lab<I: AsRef<OsStr>>(args: impl IntoIterator<Item = I>) -> Result<Command, Stop> {
    let mut command = Command::new(lab_binary()?);
    command.env("PVBLK_BIN", binary()?);
    command.env("PVBLK_CONTROL", "none");
    command.args(args).stdin(Stdio::null());
    Ok(command)
}

type Lines = Arc<Mutex<Vec<String>>>;

/// A running `pvblk`; killed when dropped.
pub struct Daemon {
    child: Child,
    line: String,
    said: Lines,
    readers: Vec<JoinHandle<()>>,
}

impl Daemon {
    /// Starts the command and waits until it is ready.
    pub fn start<I: AsRef<OsStr>>(args: impl IntoIterator<Item = I>) -> Result<Daemon, Stop> {
        Daemon::run(pvblk(args)?)
    }

    /// As [`Daemon::start`], for a command line that ends as `pvblk`.
    pub fn run(mut command: Command) -> Result<Daemon, Stop> {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let line = tools::describe(&command);
        let mut child = tools::start(command)?;
        let said = Lines::default();
        let readers = [
            child.stdout.take().map(|s| collect(s, &said)),
            child.stderr.take().map(|s| collect(s, &said)),
        ];
        let mut daemon = Daemon {
            child,
            line,
            said,
            readers: readers.into_iter().flatten().collect(),
        };
        daemon.wait_ready()?;
        Ok(daemon)
    }

    fn wait_ready(&mut self) -> Result<(), Stop> {
        let deadline = Instant::now() + START;
        while !self.lines().iter().any(|l| is_ready(l)) {
            if let Some(status) = self.child.try_wait()? {
                self.read_to_the_end();
                return Err(self.failure(&format!("ended before it was ready ({status})")));
            }
            if Instant::now() > deadline {
                return Err(self.failure("never said that it is ready"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Everything it has printed, on either stream.
    pub fn lines(&self) -> Vec<String> {
        self.said
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The first warning or error that it has printed. A worker that was blocked for a while isn't one: that may be the machine's load.
    pub fn complaint(&self) -> Option<String> {
        let is_bad = |l: &&String| l.contains("WARN") || l.contains("ERROR");
        let lines = self.lines();
        lines.iter().filter(is_bad).find(|l| !is_stall(l)).cloned()
    }

    /// A failure with the process' output.
    pub fn failure(&self, what: &str) -> Stop {
        let said = self.lines().join("\n  | ");
        Stop::Fail(format!("`{}` {what}:\n  | {said}", self.line))
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The process that serves: the child of a server in a sandbox.
    pub fn serving_pid(&self) -> Result<u32, Stop> {
        Ok(self.children()?.first().copied().unwrap_or(self.pid()))
    }

    /// The processes that it has started, in that order.
    pub fn children(&self) -> Result<Vec<u32>, Stop> {
        let pid = self.pid();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        Ok(children
            .split_whitespace()
            .filter_map(|c| c.parse().ok())
            .collect())
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<(), Stop> {
        let pid = i32::try_from(self.child.id())
            .ok()
            .and_then(Pid::from_raw)
            .ok_or_else(|| Stop::Fail("no process id".into()))?;
        Ok(kill_process(pid, signal)?)
    }

    /// Stops it by SIGSTOP, and waits until all of its threads stand still: the signal is sent at once, and taken when a thread gets its CPU.
    pub fn freeze(&self) -> Result<(), Stop> {
        self.signal(Signal::STOP)?;
        let tasks = format!("/proc/{}/task", self.child.id());
        let moves = || -> std::io::Result<bool> {
            for task in std::fs::read_dir(&tasks)? {
                let Ok(stat) = std::fs::read_to_string(task?.path().join("stat")) else {
                    continue; // it has ended
                };
                // After the name, which may have any characters in parentheses.
                let state = stat.rsplit_once(") ").map(|(_, rest)| &rest[..1]);
                if state != Some("T") {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        let begin = Instant::now();
        while moves()? {
            check(begin.elapsed() < START, || "it doesn't stop".into())?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Waits for its end.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus, Stop> {
        let Some(status) = tools::wait(&mut self.child, limit)? else {
            return Err(self.failure("didn't end in time"));
        };
        self.read_to_the_end();
        Ok(status)
    }

    /// Waits until all is read that the process has printed, which has ended.
    fn read_to_the_end(&mut self) {
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
    }

    /// Asks it to end, and fails unless it ends with status 0.
    pub fn stop(&mut self) -> Result<(), Stop> {
        self.signal(Signal::TERM)?;
        let status = self.wait(Duration::from_secs(60))?;
        if status.success() {
            Ok(())
        } else {
            Err(self.failure(&format!("ended with {status} after SIGTERM")))
        }
    }

    /// Kills it at once, as a crash would.
    pub fn crash(mut self) -> Result<(), Stop> {
        self.kill()
    }

    /// Kills it as [`Daemon::crash`], with the processes of a server in a sandbox, and waits for their end; its output can still be read.
    pub fn kill(&mut self) -> Result<(), Stop> {
        // The first process is the last to be killed: without it the others would flush and end in order.
        let started = match self.child.try_wait()? {
            Some(_) => Vec::new(),
            None => self.children().unwrap_or_default(),
        };
        let started: Vec<OwnedFd> = started.into_iter().filter_map(open).collect();
        for process in &started {
            // It may have ended.
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
        self.kill_first()?;
        for process in &started {
            let mut ended = [PollFd::new(process, PollFlags::IN)];
            let limit = Timespec::try_from(START).ok();
            check(poll(&mut ended, limit.as_ref())? > 0, || {
                "a process that was killed goes on".into()
            })?;
        }
        Ok(())
    }

    /// Kills the process that was started, and none of those that it started: the kernel tells these.
    pub fn kill_first(&mut self) -> Result<(), Stop> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

/// A process by its number.
fn open(pid: u32) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.kill();
    }
}

/// True for the line in either form of the log.
fn is_ready(line: &str) -> bool {
    line.trim() == READY || line.contains(concat!(r#""message":""#, "pvblk: ready"))
}

/// True for the lines that the server's log has about a worker that is blocked, which any load of the machine can cause.
pub fn is_stall(line: &str) -> bool {
    line.contains(": stalled: its worker is blocked") || line.contains(": back after ")
}

fn collect(stream: impl Read + Send + 'static, said: &Lines) -> JoinHandle<()> {
    let said = Arc::clone(said);
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            said.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(line);
        }
    })
}
