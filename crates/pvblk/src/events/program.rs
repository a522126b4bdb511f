//! The program that is run for each event.

use super::form::EventForm;
use crate::opener::Opener;
use anyhow::{Context, Result, bail};
use parking_lot::{Condvar, Mutex};
use pvblk_backend::events::{Event, EventLog, Follower, Start};
use rustix::fs::FileType;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest time that the program may run for one event.
const DEADLINE: Duration = Duration::from_secs(30);
/// Time that the end of the server gives the program for the last events.
const LAST_EVENTS: Duration = Duration::from_secs(2);
/// Longest interval at which a program that runs is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// Variables of the service manager that aren't the program's.
const NOT_ITS_OWN: [&str; 6] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
];

/// Checks that there is a program at `path`; `flag`: where it was named.
pub fn check_program(flag: &str, path: &Path, opener: &Opener) -> Result<PathBuf> {
    let shown = path.display();
    if !path.is_absolute() {
        bail!("{flag} {shown}: give its full path, such as /usr/local/bin/pvblk-event");
    }
    let found = opener.stat(path);
    let found = found.with_context(|| format!("{flag} {shown}"))?;
    if found.kind() != FileType::RegularFile || found.mode & 0o111 == 0 {
        bail!("{flag} {shown}: not a program; chmod +x makes a file one");
    }
    Ok(path.to_owned())
}

/// Runs a program for one event at a time, in this process or in the parent of a sandbox.
pub trait RunEvent: Send + Sync {
    /// Runs it, and waits for its end; the error says why it failed.
    fn run(&self, event: &EventForm) -> Result<(), String>;
    /// The server stops: a run is cut short soon, and no other one begins a little later.
    fn end(&self);
}

/// The thread that has the program run, until it is dropped.
pub struct OnEvent {
    log: Arc<EventLog>,
    runs: Arc<dyn RunEvent>,
    ends_at: Arc<OnceLock<Instant>>,
    thread: Option<JoinHandle<()>>,
}

impl OnEvent {
    /// Has the program at `path` run for all events of `log`, those that happened already first: one at a time, in order.
    pub fn start(path: PathBuf, runs: Arc<dyn RunEvent>, log: &Arc<EventLog>) -> Result<OnEvent> {
        let follower = log.follow(Start::Oldest);
        let ends_at = Arc::default();
        let mut runner = Runner {
            path,
            runs: Arc::clone(&runs),
            log: Arc::clone(log),
            ends_at: Arc::clone(&ends_at),
            fails: false,
        };
        let thread = std::thread::Builder::new()
            .name("pvblk-on-event".into())
            .spawn(move || runner.run(follower))
            .context("starting a thread for --on-event")?;
        Ok(OnEvent {
            log: Arc::clone(log),
            runs,
            ends_at,
            thread: Some(thread),
        })
    }
}

impl Drop for OnEvent {
    fn drop(&mut self) {
        let _ = self.ends_at.set(Instant::now() + LAST_EVENTS);
        self.runs.end();
        self.log.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Runner {
    /// Where it is, for messages.
    path: PathBuf,
    runs: Arc<dyn RunEvent>,
    log: Arc<EventLog>,
    /// Once set, no run begins later.
    ends_at: Arc<OnceLock<Instant>>,
    /// The last run failed, and that was logged.
    fails: bool,
}

impl Runner {
    fn run(&mut self, mut follower: Follower) {
        loop {
            match follower.next(Duration::from_hours(1)) {
                Some(event) => {
                    if self.ends_at.get().is_some_and(|at| Instant::now() >= *at) {
                        return;
                    }
                    self.one(&event);
                }
                None if follower.is_over() => return,
                None => {}
            }
        }
    }

    /// Has the program run for one event; its failure is logged once, until it succeeds again.
    fn one(&mut self, event: &Event) {
        let result = self.runs.run(&EventForm::new(event, &self.log));
        let program = self.path.display();
        match result {
            Ok(()) => self.fails = false,
            Err(why) if !std::mem::replace(&mut self.fails, true) => {
                tracing::warn!("--on-event {program}, for {}: {why}", event.kind);
            }
            Err(why) => tracing::debug!("--on-event {program}, for {}: {why}", event.kind),
        }
    }
}

/// A program that this process runs.
pub struct Program {
    path: PathBuf,
    deadline: Duration,
    /// Longest time of the last run, once the server stops.
    ends_at: Mutex<Option<Instant>>,
    stops: Condvar,
}

impl RunEvent for Program {
    fn run(&self, event: &EventForm) -> Result<(), String> {
        let mut command = self.command(event);
        let mut child = command.spawn().map_err(|e| format!("starting it: {e}"))?;
        let deadline = Instant::now() + self.deadline;
        let status = self.wait(&mut child, deadline).map_err(|e| e.to_string())?;
        match status {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(format!("it ended with {status}")),
            None => Err(format!(
                "killed: it hadn't ended after {} s",
                self.deadline.as_secs()
            )),
        }
    }

    fn end(&self) {
        *self.ends_at.lock() = Some(Instant::now() + LAST_EVENTS);
        self.stops.notify_all();
    }
}

impl Program {
    pub fn new(path: PathBuf) -> Program {
        Program {
            path,
            deadline: DEADLINE,
            ends_at: Mutex::new(None),
            stops: Condvar::new(),
        }
    }

    /// Sleeps before a run; false if the server's stop leaves no time for one.
    pub fn sleep(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut ends_at = self.ends_at.lock();
        loop {
            let now = Instant::now();
            if ends_at.is_some_and(|at| at <= until.max(now)) {
                return false;
            }
            if now >= until || self.stops.wait_until(&mut ends_at, until).timed_out() {
                return true;
            }
        }
    }

    fn command(&self, event: &EventForm) -> Command {
        let mut command = Command::new(&self.path);
        command
            .arg(&event.kind)
            .arg(event.disk.as_deref().unwrap_or_default())
            .arg(&event.text)
            .env("PVBLK_EVENT_NUMBER", event.number.to_string())
            .env("PVBLK_EVENT_TIME", &event.time)
            .env("PVBLK_EVENT_KIND", &event.kind)
            .env("PVBLK_EVENT_SEVERITY", &event.severity)
            .env("PVBLK_EVENT_TEXT", &event.text)
            .env("PVBLK_EVENT_LEFT_OUT", event.left_out.to_string())
            .env(
                "PVBLK_EVENT_JSON",
                serde_json::to_string(event).unwrap_or_default(),
            )
            // So that all that it starts can be killed with it.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        if let Some(disk) = &event.disk {
            command.env("PVBLK_EVENT_DISK", disk);
        }
        for (name, value) in &event.fields {
            let name = format!("PVBLK_EVENT_FIELD_{}", name.to_ascii_uppercase());
            command.env(name, value.to_string());
        }
        for name in NOT_ITS_OWN {
            command.env_remove(name);
        }
        command
    }

    /// Waits for the end of the program; `None`: it was killed.
    fn wait(&self, child: &mut Child, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
        let mut nap = Duration::from_millis(1);
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(Some(status));
            }
            let mut ends_at = self.ends_at.lock();
            let until = ends_at.map_or(deadline, |at| at.min(deadline));
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                kill(child)?;
                child.wait()?;
                return Ok(None);
            }
            self.stops.wait_for(&mut ends_at, nap.min(left));
            nap = (nap * 2).min(LOOK);
        }
    }
}

/// Kills the program and what it has started. It isn't waited for yet, so its number is still its own.
fn kill(child: &mut Child) -> std::io::Result<()> {
    let group = i32::try_from(child.id()).ok();
    match group.and_then(rustix::process::Pid::from_raw) {
        Some(group) => {
            rustix::process::kill_process_group(group, rustix::process::Signal::KILL)?;
            Ok(())
        }
        None => child.kill(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_backend::events::Kind;
    use std::os::unix::fs::PermissionsExt;

    /// A bound that only a hang reaches.
    const HANG: Duration = Duration::from_secs(60);

    fn script(dir: &Path, name: &str, body: &str) -> PathBuf {
        let path = dir.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn event(disk: &str, n: u32) -> Event {
        Event::new(Kind::DiskAdded, format!("number {n}"))
            .of(disk)
            .with("count", n)
    }

    fn start(program: PathBuf, log: &Arc<EventLog>) -> OnEvent {
        let runs = Arc::new(Program::new(program.clone()));
        OnEvent::start(program, runs, log).unwrap()
    }

    fn form(disk: &str, n: u32) -> EventForm {
        EventForm::new(&event(disk, n), &EventLog::default())
    }

    #[test]
    fn the_program_gets_each_event_in_order_with_its_fields() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let body = format!(
            "echo \"$1 $2 $3 $PVBLK_EVENT_NUMBER $PVBLK_EVENT_FIELD_COUNT $PVBLK_EVENT_SEVERITY\" >>{}",
            out.display()
        );
        let program = script(dir.path(), "program", &body);
        let log = Arc::new(EventLog::default());
        // Before the program is there.
        log.put(event("a", 1));
        let running = start(program, &log);
        log.put(event("b", 2));
        log.put(event("a; rm -rf /", 3));
        let begin = Instant::now();
        let lines = loop {
            let text = std::fs::read_to_string(&out).unwrap_or_default();
            if text.lines().count() == 3 {
                break text;
            }
            assert!(begin.elapsed() < HANG, "{text}");
            std::thread::sleep(Duration::from_millis(5));
        };
        drop(running);
        let expected = [
            "disk-added a number 1 1 1 info",
            "disk-added b number 2 2 2 info",
            "disk-added a; rm -rf / number 3 3 3 info",
        ];
        assert_eq!(lines.lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_program_that_does_not_end_is_killed_with_what_it_started() {
        let dir = tempfile::tempdir().unwrap();
        let pids = dir.path().join("pids");
        let body = format!("sleep 1000 & echo $! >{}\nwait", pids.display());
        let program = script(dir.path(), "slow", &body);
        let program = Program {
            deadline: Duration::from_secs(2),
            ..Program::new(program)
        };
        let why = program.run(&form("a", 1)).unwrap_err();
        assert_eq!(why, "killed: it hadn't ended after 2 s");
        let Ok(text) = std::fs::read_to_string(&pids) else {
            return; // the machine was too slow for the shell to come that far
        };
        let Ok(pid) = text.trim().parse::<u32>() else {
            return;
        };
        let begin = Instant::now();
        // A zombie of which init hasn't heard is as good as gone.
        let gone = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
            stat.map_or(true, |s| s.contains(") Z "))
        };
        while !gone() {
            assert!(begin.elapsed() < HANG, "its child still runs");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn the_end_waits_for_no_program() {
        let dir = tempfile::tempdir().unwrap();
        let program = script(dir.path(), "slow", "sleep 1000");
        let log = Arc::new(EventLog::default());
        for n in 0..100 {
            log.put(event("a", n));
        }
        let running = start(program, &log);
        let begin = Instant::now();
        drop(running);
        assert!(begin.elapsed() < HANG);
    }

    #[test]
    fn failures_are_told_and_programs_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let bad = script(dir.path(), "bad", "exit 3");
        let failing = Arc::new(Program::new(bad.clone()));
        let why = failing.run(&form("a", 1)).unwrap_err();
        assert!(why.contains("exit status: 3"), "{why}");
        let mut runner = Runner {
            path: bad,
            runs: failing,
            log: Arc::default(),
            ends_at: Arc::default(),
            fails: false,
        };
        runner.one(&event("a", 1));
        assert!(runner.fails);
        let gone = Program::new(dir.path().join("none"));
        assert!(gone.run(&form("a", 1)).is_err());
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        for (path, words) in [
            (file, "chmod +x"),
            ("relative".into(), "full path"),
            (dir.path().join("none"), "none"),
        ] {
            let e = check_program("--on-event", &path, &Opener::default()).unwrap_err();
            assert!(e.to_string().contains(words), "{e}");
        }
    }
}
