//! Output of commands. A reader of standard output that has enough may go at any time: `pvblk disk list | head -1` is no error. Notes and progress, on standard
//! error, may get lost.

use anyhow::{Context, Result};
use serde::Serialize;
use std::fmt;
use std::io::{ErrorKind, Write};

/// Nobody reads standard output any more: a command that prints on and on ends by it, without a word and with status 0. See `main`.
#[derive(Debug)]
pub struct ReaderGone;

impl fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody reads standard output any more")
    }
}

impl std::error::Error for ReaderGone {}

/// Prints `text` at once. A command goes on if nobody reads it, and has the status that it would have had.
pub fn print(text: &str) -> Result<()> {
    write(text).context("printing")
}

/// As [`print`], with the error of the system.
pub fn write(text: &str) -> std::io::Result<()> {
    match put(text) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        put => put,
    }
}

/// Prints `text` at once, one of many. The error is [`ReaderGone`] if nobody reads it.
pub fn print_or_end(text: &str) -> Result<()> {
    match put(text) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        put => put.context("printing"),
    }
}

fn put(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// Prints a line at once, as [`print`].
pub fn print_line(line: &str) -> Result<()> {
    print(&format!("{line}\n"))
}

/// Prints `value` as JSON for people, as [`print`].
pub fn print_json(value: &impl Serialize) -> Result<()> {
    // By way of a value, whose members are in the order of their names.
    let value = serde_json::to_value(value).context("the answer")?;
    print_line(&serde_json::to_string_pretty(&value).context("the answer")?)
}

/// Writes to standard error, or doesn't if nobody reads that; by way of [`tell!`] and [`tell_part!`].
pub fn note(text: fmt::Arguments<'_>) {
    let mut out = std::io::stderr().lock();
    let _ = out.write_fmt(text).and_then(|()| out.flush());
}

/// Prints a line to standard error, as `eprintln!`, which panics where nobody reads that.
macro_rules! tell {
    ($($words:tt)*) => {
        $crate::output::note(format_args!("{}\n", format_args!($($words)*)))
    };
}

/// The same without an end of the line, for progress.
macro_rules! tell_part {
    ($($words:tt)*) => {
        $crate::output::note(format_args!($($words)*))
    };
}

pub(crate) use {tell, tell_part};
