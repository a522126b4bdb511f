//! The program of `--on-event`, which the parent runs for events that the process that serves tells.

use crate::events::{EventForm, Program, RunEvent};
use parking_lot::Mutex;
use pvblk_backend::events::Kind;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Most bytes of an event.
const LONGEST: usize = 32 << 10;
/// Runs of the program that may follow each other at once, and the time after which there may be one more.
const BURST: u32 = 100;
const PACE: Duration = Duration::from_millis(100);

/// Runs one program at a time, at a bounded rate, whatever the process that serves asks for.
pub struct Events {
    program: Program,
    /// Held while the program runs.
    turn: Mutex<Pace>,
}

impl Events {
    pub fn new(program: PathBuf) -> Events {
        Events {
            program: Program::new(program),
            turn: Mutex::default(),
        }
    }

    /// Runs the program; waits while there were many runs. The error says why it failed or isn't run.
    pub fn run(&self, event: &EventForm) -> Result<(), String> {
        if let Some(why) = problem(event) {
            tracing::error!("the process that serves told an event that is none: {why}");
            return Err(why.into());
        }
        let Some(mut turn) = self.turn.try_lock() else {
            return Err("it still runs for another event".into());
        };
        let wait = turn.next(Instant::now());
        if !self.program.sleep(wait) {
            return Err("the server stops".into());
        }
        self.program.run(event)
    }

    /// The server stops: the program that runs is killed soon.
    pub fn end(&self) {
        self.program.end();
    }
}

/// The reason why this is no event of a server; its text may be any.
fn problem(event: &EventForm) -> Option<&'static str> {
    let is_plain = |text: &str, more: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || more.contains(c);
        text.len() <= 64 && text.chars().all(plain)
    };
    if event.kind.parse::<Kind>().is_err() {
        return Some("there is no such kind");
    }
    if !is_plain(&event.severity, "") || !is_plain(&event.time, "-:.+") {
        return Some("its severity or time is none");
    }
    if !event.fields.keys().all(|name| is_plain(name, "_-")) {
        return Some("a field's name is none");
    }
    let bytes = serde_json::to_string(event).map_or(usize::MAX, |text| text.len());
    (bytes > LONGEST).then_some("it is too long")
}

/// The time at which so many runs at once are allowed again.
#[derive(Default)]
struct Pace(Option<Instant>);

impl Pace {
    /// Takes the place of one run; returns the time until it may begin.
    fn next(&mut self, now: Instant) -> Duration {
        let full = self.0.map_or(now, |at| at.max(now)) + PACE;
        self.0 = Some(full);
        full.saturating_duration_since(now + PACE * BURST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::FieldForm;
    use std::os::unix::fs::PermissionsExt;

    fn event() -> EventForm {
        EventForm {
            number: 1,
            run: "r".into(),
            time: "2026-01-01T00:00:00.000Z".into(),
            kind: "disk-added".into(),
            severity: "info".into(),
            disk: Some("a".into()),
            text: "$(reboot)\n".into(),
            left_out: 0,
            fields: [("count".to_owned(), FieldForm::Number(1))].into(),
        }
    }

    #[test]
    fn only_events_are_told() {
        assert_eq!(problem(&event()), None);
        let with = |change: fn(&mut EventForm)| {
            let mut event = event();
            change(&mut event);
            problem(&event)
        };
        for wrong in [
            with(|e| e.kind = "other".into()),
            with(|e| e.severity = "in fo".into()),
            with(|e| e.time = "now\n".into()),
            with(|e| {
                e.fields.insert("a=b".into(), FieldForm::Number(1));
            }),
            with(|e| e.text = "x".repeat(LONGEST)),
        ] {
            assert!(wrong.is_some());
        }
    }

    #[test]
    fn the_program_runs_once_at_a_time_and_not_without_end() {
        let mut pace = Pace::default();
        let now = Instant::now();
        for _ in 0..BURST {
            assert_eq!(pace.next(now), Duration::ZERO);
        }
        assert_eq!(pace.next(now), PACE);
        assert_eq!(pace.next(now + PACE * 2), Duration::ZERO);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        // Ends when it is told to.
        let fifo = dir.path().join("fifo");
        let mode = rustix::fs::Mode::from(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let text = format!("#!/bin/sh\necho >{0}\nread line <{0}\n", fifo.display());
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let events = Events::new(path);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| events.run(&event()));
            // The program runs once this returns.
            assert_eq!(std::fs::read(&fifo).unwrap(), b"\n");
            let why = events.run(&event()).unwrap_err();
            assert!(why.contains("another event"), "{why}");
            std::fs::write(&fifo, b"\n").unwrap();
            assert_eq!(first.join().unwrap(), Ok(()));
        });
        events.end();
        assert!(events.run(&event()).is_err());
    }
}
