//! `pvblk ctl reload`.

use super::Difference;
use crate::control::{Client, ControlArg};
use crate::output::{print, print_json};
use anyhow::{Result, bail};
use clap::Args;
use serde_json::json;
use std::time::Duration;

/// Longest wait: each step has 60 s, and some may come one after another.
const PATIENCE: Duration = Duration::from_secs(600);

#[derive(Args, Debug)]
pub struct ReloadArgs {
    #[command(flatten)]
    control: ControlArg,
    /// Print the difference, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

pub fn run(args: &ReloadArgs) -> Result<()> {
    let mut client = Client::connect(&args.control.path()?, PATIENCE)?;
    let difference: Difference = client.call("reload", json!({"dry_run": args.dry_run}))?;
    match args.json {
        true => print_json(&difference)?,
        false => print(&difference.to_string())?,
    }
    match difference.failed.len() {
        0 => Ok(()),
        n => bail!("{n} steps failed: see above; the next reload tries them again"),
    }
}
