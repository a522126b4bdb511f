//! The `pvblk` command: flags, configuration, wiring; everything else is in the libraries.

// They panic where nobody reads.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod attach;
mod bench;
mod bill;
mod cache;
mod cli;
mod config;
mod control;
mod daemon;
mod disk;
mod disks;
mod early_stop;
mod events;
mod export;
mod exports;
mod hops;
mod latency;
mod log;
mod manual;
mod memory;
mod nbd;
mod opener;
mod output;
mod raid;
mod report;
mod sandbox;
mod serve;
mod shares;
mod stat;
mod terminal;
mod top;
mod trace;
mod traces;
mod wanted;
mod web;
mod xen;

use clap::Parser;
use pvblk_block::error_line;
use std::process::ExitCode;

#[global_allocator]
static HEAP: pvblk_sys::alloc::Counting = pvblk_sys::alloc::Counting;

fn main() -> ExitCode {
    let code = command();
    pvblk_sys::librbd::before_exit();
    code
}

fn command() -> ExitCode {
    let _last_lines = log::LastLines;
    if let Some(command) = in_the_lab(std::env::args().skip(1)) {
        log::failure(format_args!(
            "pvblk: experiments and comparisons are in a program of their own: {command}"
        ));
        return ExitCode::from(2);
    }
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return usage_error(&e),
    };
    let is_server = matches!(
        cli.command,
        cli::Command::Serve(_) | cli::Command::Attach(_) | cli::Command::Web(_)
    );
    if !is_server && let Err(e) = log::start(None) {
        log::failure(format_args!("pvblk: {}", error_line(&*e)));
        return ExitCode::FAILURE;
    }
    let result = match &cli.command {
        cli::Command::Serve(args) => match serve::run(args) {
            Ok(code) => return code,
            Err(e) => Err(e),
        },
        cli::Command::Attach(args) => attach::run(args),
        cli::Command::Events(args) => events::run(args),
        cli::Command::Bench(args) => return bench::run(args),
        cli::Command::Trace(args) => trace::run(args),
        cli::Command::Latency(args) => latency::run(args),
        cli::Command::Report(args) => report::run(args),
        cli::Command::Disk(command) => disk::run(command),
        cli::Command::Export(command) => export::run(command),
        cli::Command::Raid(command) => raid::run(command),
        cli::Command::Ctl(command) => memory::run(command),
        cli::Command::Cache(args) => cache::run(args),
        cli::Command::Stat(args) => stat::run(args),
        cli::Command::Web(args) => web::run(args),
        cli::Command::Top(args) => top::run(args),
        cli::Command::Xen(command) => xen::run(command),
        cli::Command::Manual(args) => manual::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if e.is::<output::ReaderGone>() => ExitCode::SUCCESS,
        // Some mistakes in flags show only when they are put together.
        Err(e) => match e.downcast_ref::<clap::Error>() {
            Some(usage) => usage_error(usage),
            None => {
                log::failure(format_args!("pvblk: {}", error_line(&*e)));
                ExitCode::FAILURE
            }
        },
    }
}

/// The command line of `pvblk-lab` that does what these arguments of `pvblk` did in earlier versions.
fn in_the_lab(mut args: impl Iterator<Item = String>) -> Option<String> {
    let command = match args.next()?.as_str() {
        "lab" => "pvblk-lab",
        "compare" => "pvblk-lab compare",
        _ => return None,
    };
    let words: Vec<String> = std::iter::once(command.to_owned()).chain(args).collect();
    Some(words.join(" "))
}

/// Help and version go to standard output; a mistake is told in one line, with status 2.
fn usage_error(e: &clap::Error) -> ExitCode {
    if !e.use_stderr() {
        let _ = e.print();
        return ExitCode::SUCCESS;
    }
    if e.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = e.print();
        return ExitCode::from(2);
    }
    let text = e.to_string();
    let message = text.split("\nUsage:").next().unwrap_or_default();
    let message = message.split("\nFor more information").next();
    let words: Vec<&str> = message.unwrap_or_default().split_whitespace().collect();
    let line = words.join(" ");
    let line = did_you_mean(&line);
    log::failure(format_args!(
        "pvblk: {} (see pvblk --help)",
        line.trim_start_matches("error: ")
    ));
    ExitCode::from(2)
}

/// clap's tips as the end of its sentence.
fn did_you_mean(line: &str) -> String {
    let (what, tip) = line.split_once(" tip: ").unwrap_or((line, ""));
    match tip.split_once(": ") {
        None if tip.is_empty() => what.to_owned(),
        Some((similar, names)) if similar.contains("similar") => {
            format!("{what}; did you mean {names}?")
        }
        _ => format!("{what}; {tip}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{did_you_mean, error_line, in_the_lab};
    use anyhow::Context;
    use pvblk_block::Error;

    #[test]
    fn tips_end_the_sentence() {
        for (said, expected) in [
            (
                "unexpected argument '--x' found",
                "unexpected argument '--x' found",
            ),
            (
                "unexpected argument '--dsik' found tip: a similar argument exists: '--disk'",
                "unexpected argument '--dsik' found; did you mean '--disk'?",
            ),
            (
                "unrecognized subcommand 'lst' tip: some similar subcommands exist: 'list', 'set'",
                "unrecognized subcommand 'lst'; did you mean 'list', 'set'?",
            ),
            (
                "unexpected argument '--x' found tip: to pass '--x' as a value, use '-- --x'",
                "unexpected argument '--x' found; to pass '--x' as a value, use '-- --x'",
            ),
        ] {
            assert_eq!(did_you_mean(said), expected);
        }
    }

    #[test]
    fn each_cause_is_told_once() {
        let missing = || std::io::Error::from_raw_os_error(2);
        let text = missing().to_string();
        let opened: Result<(), Error> = Err(Error::os("file:/x: can't open it", missing()));
        let e = opened.context("disk a").unwrap_err();
        assert_eq!(
            error_line(&*e),
            format!("disk a: file:/x: can't open it: {text}")
        );
        let read: Result<(), _> = Err(missing());
        let e = read
            .context("reading x")
            .context("configuration")
            .unwrap_err();
        assert_eq!(error_line(&*e), format!("configuration: reading x: {text}"));
    }

    #[test]
    fn commands_of_the_lab_are_named() {
        let of = |line: &str| in_the_lab(line.split(' ').map(str::to_owned));
        for (line, expected) in [
            ("lab path --quick", Some("pvblk-lab path --quick")),
            ("lab", Some("pvblk-lab")),
            ("compare a -- b", Some("pvblk-lab compare a -- b")),
            ("serve --disk lab", None),
        ] {
            assert_eq!(of(line).as_deref(), expected, "{line}");
        }
    }
}
