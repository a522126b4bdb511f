//! Counts and keeps log lines.

use parking_lot::Mutex;
use std::fmt::Debug;
use std::sync::Arc;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Lines of the log with their levels, in order.
#[derive(Clone, Default)]
pub struct Log(pub Arc<Mutex<Vec<(Level, String)>>>);

impl Log {
    /// Lines that are at least as bad as `level`.
    pub fn lines(&self, level: Level) -> Vec<String> {
        let lines = self.0.lock();
        let bad = lines.iter().filter(|(l, _)| *l <= level);
        bad.map(|(_, line)| line.clone()).collect()
    }
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().push((*event.metadata().level(), text.0));
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Warnings and errors that `f` logs on this thread.
pub fn count_warnings(f: impl FnOnce()) -> usize {
    let log = Log::default();
    tracing::subscriber::with_default(log.clone(), f);
    log.lines(Level::WARN).len()
}
