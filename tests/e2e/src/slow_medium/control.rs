//! The control file: the text that is written to it commands the medium, and the text that is read from it
//! shows the state.
//!
//! A file is its name, or `*` for all; kinds are as in [`Kind::parse`]. Each line is one of
//!
//! ```text
//! set FILE KINDS now | hold | delay MS MS | mix MS MS PERMILLE MS MS | fail ERRNO
//! release FILE KINDS
//! fail FILE KINDS ERRNO
//! ```
//!
//! `release` lets waiting requests go on, `fail` completes them with an error; both leave the rules as they
//! are.

use super::rules::{Kind, Rule};
use super::schedule::Schedule;

/// Name of the control file.
pub const NAME: &str = ".control";

/// Runs the commands in `text`, up to the first line that isn't understood.
pub(super) fn obey(schedule: &Schedule, text: &str) -> Result<(), String> {
    for line in text.lines().filter(|l| !l.trim().is_empty()) {
        line_of(schedule, line).ok_or_else(|| format!("not understood: {line}"))?;
    }
    Ok(())
}

fn line_of(schedule: &Schedule, line: &str) -> Option<()> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words.as_slice() {
        ["set", file, kinds, rule @ ..] => {
            schedule.set(file, &Kind::parse(kinds)?, Rule::parse(rule)?);
        }
        ["release", file, kinds] => {
            schedule.release(file, &Kind::parse(kinds)?, None);
        }
        ["fail", file, kinds, errno] => {
            let errno = errno.parse().ok().filter(|&e| e > 0)?;
            schedule.release(file, &Kind::parse(kinds)?, Some(errno));
        }
        _ => return None,
    }
    Some(())
}

/// Counts of waiting requests: first of all, then of each kind and of each file that has any.
pub(super) fn status(schedule: &Schedule, files: &[String]) -> String {
    let line = |name: &str, (held, delayed): (usize, usize)| {
        format!("{name} held {held} delayed {delayed}\n")
    };
    let mut text = line("all", schedule.waiting("*", &Kind::ALL));
    for kind in Kind::ALL {
        let waiting = schedule.waiting("*", &[kind]);
        if waiting != (0, 0) {
            text += &line(kind.name(), waiting);
        }
    }
    for file in files {
        let waiting = schedule.waiting(file, &Kind::ALL);
        if waiting != (0, 0) {
            text += &line(&format!("file {file}"), waiting);
        }
    }
    text
}
