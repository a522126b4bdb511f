//! The `pvblk-lab` command: experiments on `pvblk`, and whether their results differ.

mod cli;
mod commands;
mod compare;

use clap::Parser;
use pvblk_block::error_line;
use std::process::ExitCode;

/// The allocator that `pvblk` has, so that code costs the same in this process as there.
#[global_allocator]
static HEAP: pvblk_sys::alloc::Counting = pvblk_sys::alloc::Counting;

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return usage_error(&e),
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env("PVBLK_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .init();
    let Err(e) = commands::run(&cli.command) else {
        return ExitCode::SUCCESS;
    };
    // Some mistakes in flags show only when several flags are looked at together.
    if let Some(usage) = e.downcast_ref::<clap::Error>() {
        return usage_error(usage);
    }
    eprintln!("pvblk-lab: {}", error_line(&*e));
    ExitCode::FAILURE
}

/// Help and version go to standard output; a mistake is told in one line, with status 2.
fn usage_error(e: &clap::Error) -> ExitCode {
    use clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if !e.use_stderr() || e.kind() == DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = e.print();
        return ExitCode::from(if e.use_stderr() { 2 } else { 0 });
    }
    let text = e.to_string();
    let told = text.lines().take_while(|line| !line.trim().is_empty());
    let told: Vec<&str> = told.map(str::trim).collect();
    let told = told.join(" ");
    let told = told.trim_start_matches("error: ");
    eprintln!("pvblk-lab: {told} (see pvblk-lab --help)");
    ExitCode::from(2)
}
