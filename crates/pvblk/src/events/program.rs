//! The program that is run for each event.

use super::form::EventForm;
use crate::opener::Opener;
use anyhow::{Context, Result, bail};
use pvblk_backend::events::{Event, EventLog, Follower, Start};
use rustix::fs::FileType;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
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

/// The thread that runs the program, until it is dropped.
pub struct OnEvent {
    log: Arc<EventLog>,
    stop: Option<Sender<Instant>>,
    thread: Option<JoinHandle<()>>,
}

impl OnEvent {
    /// Runs `program` for all events of `log`, those that happened already first: one at a time, in order.
    pub fn start(program: PathBuf, log: &Arc<EventLog>) -> Result<OnEvent> {
        let (stop, stopping) = channel();
        let follower = log.follow(Start::Oldest);
        let mut runner = Runner {
            program,
            log: Arc::clone(log),
            deadline: DEADLINE,
            stopping,
            ends_at: None,
            fails: false,
        };
        let thread = std::thread::Builder::new()
            .name("pvblk-on-event".into())
            .spawn(move || runner.run(follower))
            .context("starting a thread for --on-event")?;
        Ok(OnEvent {
            log: Arc::clone(log),
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for OnEvent {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(Instant::now() + LAST_EVENTS);
        }
        self.log.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Runner {
    program: PathBuf,
    log: Arc<EventLog>,
    deadline: Duration,
    /// Tells when the end of the server waits no longer.
    stopping: Receiver<Instant>,
    ends_at: Option<Instant>,
    /// The last run failed, and that was logged.
    fails: bool,
}

impl Runner {
    fn run(&mut self, mut follower: Follower) {
        loop {
            match follower.next(Duration::from_hours(1)) {
                Some(event) => {
                    self.look_for_stop(Duration::ZERO);
                    if self.ends_at.is_some_and(|at| Instant::now() >= at) {
                        return;
                    }
                    self.one(&event);
                }
                None if follower.is_over() => return,
                None => {}
            }
        }
    }

    /// Waits, and hears of a stop at once.
    fn look_for_stop(&mut self, patience: Duration) {
        match self.stopping.recv_timeout(patience) {
            Ok(at) => self.ends_at = Some(at),
            Err(RecvTimeoutError::Timeout) => {}
            // The stop was told before.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(patience),
        }
    }

    /// Runs the program for one event; its failure is logged once, until it succeeds again.
    fn one(&mut self, event: &Event) {
        let result = self.run_program(event);
        let program = self.program.display();
        match result {
            Ok(()) => self.fails = false,
            Err(why) if !std::mem::replace(&mut self.fails, true) => {
                tracing::warn!("--on-event {program}, for {}: {why}", event.kind);
            }
            Err(why) => tracing::debug!("--on-event {program}, for {}: {why}", event.kind),
        }
    }

    fn run_program(&mut self, event: &Event) -> Result<(), String> {
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

    fn command(&self, event: &Event) -> Command {
        let form = EventForm::new(event, &self.log);
        let mut command = Command::new(&self.program);
        command
            .arg(event.kind.name())
            .arg(event.disk.as_deref().unwrap_or_default())
            .arg(&event.text)
            .env("PVBLK_EVENT_NUMBER", event.number.to_string())
            .env("PVBLK_EVENT_TIME", &form.time)
            .env("PVBLK_EVENT_KIND", &form.kind)
            .env("PVBLK_EVENT_SEVERITY", &form.severity)
            .env("PVBLK_EVENT_TEXT", &form.text)
            .env("PVBLK_EVENT_LEFT_OUT", event.left_out.to_string())
            .env(
                "PVBLK_EVENT_JSON",
                serde_json::to_string(&form).unwrap_or_default(),
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
    fn wait(
        &mut self,
        child: &mut Child,
        deadline: Instant,
    ) -> std::io::Result<Option<ExitStatus>> {
        let mut nap = Duration::from_millis(1);
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(Some(status));
            }
            let until = self.ends_at.map_or(deadline, |at| at.min(deadline));
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                kill(child)?;
                child.wait()?;
                return Ok(None);
            }
            self.look_for_stop(nap.min(left));
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

    fn runner(program: PathBuf, deadline: Duration) -> Runner {
        Runner {
            program,
            log: Arc::new(EventLog::default()),
            deadline,
            stopping: channel().1,
            ends_at: None,
            fails: false,
        }
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
        let running = OnEvent::start(program, &log).unwrap();
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
        let mut runner = runner(program, Duration::from_secs(2));
        let why = runner.run_program(&event("a", 1)).unwrap_err();
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
        let running = OnEvent::start(program, &log).unwrap();
        let begin = Instant::now();
        drop(running);
        assert!(begin.elapsed() < HANG);
    }

    #[test]
    fn failures_are_told_and_programs_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let mut failing = runner(script(dir.path(), "bad", "exit 3"), HANG);
        let why = failing.run_program(&event("a", 1)).unwrap_err();
        assert!(why.contains("exit status: 3"), "{why}");
        failing.one(&event("a", 1));
        assert!(failing.fails);
        let mut gone = runner(dir.path().join("none"), HANG);
        assert!(gone.run_program(&event("a", 1)).is_err());
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
