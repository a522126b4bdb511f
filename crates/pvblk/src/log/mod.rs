//! The log: lines on standard error, or entries of the journal, which never hold up a server, even if their reader stops reading.
//!
//! A command writes the lines itself. A server ([`detach`]) gives them to a thread. If they aren't read, a
//! bounded number of bytes waits, further lines are dropped, and their number is printed when the reader
//! reads again. Lines that a peer may cause have a bound of bytes per second, too.

mod bound;
mod filter;
mod journal;
mod lines;
mod record;

use crate::opener::Opener;
use anyhow::{Context, Result};
use clap::Args;
use journal::Journal;
use lines::Lines;
pub use record::rfc3339;
use record::{Format, Record};
use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};
use tracing::Level;
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context as LayerContext, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry};

/// Longest wait for the reader at the end of the process.
const LAST_LINES: Duration = Duration::from_secs(2);

static SERVER: OnceLock<Arc<Lines>> = OnceLock::new();
static FORMAT: OnceLock<Format> = OnceLock::new();
/// Of a server whose lines go to the journal.
static JOURNAL: OnceLock<Journal> = OnceLock::new();

/// Flags of the log.
#[derive(Args, Clone, Debug, Default)]
pub struct LogArgs {
    /// Least level of lines: error, warn, info, debug or trace; for a module such as raid5 or export::nbd another one; several with commas between
    /// [default: $PVBLK_LOG, or info]
    #[arg(long, value_name = "LEVEL|MODULE=LEVEL,...")]
    pub log: Option<String>,
    /// Form of the log: text, json, journald, or auto: journald if standard error is the journal, else text [default: auto]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
}

impl LogArgs {
    /// The flags, and keys of the configuration file where there is no flag.
    pub fn or(&self, log: Option<&String>, log_format: Option<&String>) -> LogArgs {
        LogArgs {
            log: self.log.clone().or_else(|| log.cloned()),
            log_format: self.log_format.clone().or_else(|| log_format.cloned()),
        }
    }
}

/// Begins to log what libraries have to say; once. A server's flags choose the form, and its opener connects to the journal. Commands that aren't servers
/// log text.
pub fn start(server: Option<(&LogArgs, &Opener)>) -> Result<()> {
    let args = server.map(|(args, _)| args);
    let filter = match (
        args.and_then(|a| a.log.as_deref()),
        std::env::var("PVBLK_LOG"),
    ) {
        (Some(text), _) => filter::parse(text)?,
        (None, Ok(text)) if !text.is_empty() => filter::parse(&text).context("PVBLK_LOG")?,
        _ => EnvFilter::new("info"),
    };
    let format: Format = match args {
        Some(args) => args.log_format.as_deref().unwrap_or("auto").parse()?,
        None => Format::Text,
    };
    if let Some((_, opener)) = server
        && format == Format::Journald
    {
        // An error now rather than lines that nobody sees.
        let _ = JOURNAL.set(connect(opener, Path::new(journal::SOCKET))?);
    }
    let _ = FORMAT.set(format);
    Registry::default().with(filter).with(Records).init();
    Ok(())
}

fn connect(opener: &Opener, path: &Path) -> Result<Journal> {
    let socket = opener.datagrams(path).with_context(|| {
        format!(
            "log format journald: there is no journal at {}",
            path.display()
        )
    })?;
    Ok(Journal(socket))
}

fn format() -> Format {
    FORMAT.get().copied().unwrap_or(Format::Text)
}

/// Prints a line of the command's own.
pub fn line(text: fmt::Arguments<'_>) {
    own(Level::INFO, &text.to_string());
}

/// Prints a line that says why the command ends.
pub fn failure(text: fmt::Arguments<'_>) {
    own(Level::ERROR, &text.to_string());
}

/// Prints whole lines.
pub fn put(lines: &str) {
    match format() {
        Format::Text => emit(lines.as_bytes(), lines.lines().count() as u64, Lines::put),
        _ => lines.lines().for_each(|line| own(Level::INFO, line)),
    }
}

fn own(level: Level, message: &str) {
    let record = Record {
        level,
        module: None,
        message,
        fields: &[],
    };
    emit(&record.encode(format(), SystemTime::now()), 1, Lines::put);
}

/// The log's own line about itself.
fn notice(text: &str) -> Vec<u8> {
    let record = Record {
        level: Level::WARN,
        module: None,
        message: &format!("pvblk: {text}"),
        fields: &[],
    };
    record.encode(format(), SystemTime::now())
}

fn emit(bytes: &[u8], lines: u64, put: fn(&Lines, &[u8], u64)) {
    match SERVER.get() {
        Some(server) => put(server, bytes, lines),
        None if format() == Format::Journald => {
            let _ = JOURNAL.get().map(|mut journal| journal.write(bytes));
        }
        None => {
            let _ = io::stderr().write_all(bytes);
        }
    }
}

/// Gives all lines from now on to a thread of their own, the only one that waits for the reader of standard
/// error. Messages of panics go the same way.
pub fn detach() -> Result<()> {
    if SERVER.get().is_some() {
        return Ok(());
    }
    let lines = match format() {
        Format::Journald => Lines::start(JOURNAL.get().context("no journal")?, notice)?,
        Format::Text | Format::Json => Lines::start(io::stderr(), notice)?,
    };
    let _ = SERVER.set(lines);
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed").to_owned();
        // Empty unless RUST_BACKTRACE asks for it.
        let trace = std::backtrace::Backtrace::capture();
        failure(format_args!("thread '{name}' {panic}\n{trace}"));
    }));
    Ok(())
}

/// Waits until all that was printed is read, for a while, when it is dropped at the end of the process.
pub struct LastLines;

impl Drop for LastLines {
    fn drop(&mut self) {
        if let Some(server) = SERVER.get() {
            server.flush(LAST_LINES);
        }
    }
}

/// Prints the events of `tracing`.
struct Records;

impl<S: tracing::Subscriber> Layer<S> for Records {
    fn on_event(&self, event: &tracing::Event<'_>, _: LayerContext<'_, S>) {
        let mut parts = Parts::default();
        event.record(&mut parts);
        let record = Record {
            level: *event.metadata().level(),
            module: Some(event.metadata().target()),
            message: &parts.message,
            fields: &parts.fields,
        };
        let bytes = record.encode(format(), SystemTime::now());
        emit(&bytes, 1, Lines::put_bounded);
    }
}

/// The text and the fields of an event.
#[derive(Default)]
struct Parts {
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Visit for Parts {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record(field, value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record(field, format!("{value:?}"));
    }
}

impl Parts {
    fn record(&mut self, field: &Field, value: String) {
        match field.name() {
            "message" => self.message = value,
            name => self.fields.push((name, value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_that_is_not_there_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let error = connect(&Opener::default(), &path).err().unwrap();
        let none = io::Error::from_raw_os_error(2);
        assert_eq!(
            format!("{error:#}"),
            format!(
                "log format journald: there is no journal at {}: {none}",
                path.display()
            )
        );
    }
}
