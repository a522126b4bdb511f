//! `pvblk export`: ways by which clients reach the disks of a running server.

use crate::disk::Waiting;
use crate::disks::ExportShown;
use crate::output::{print, print_json};
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use serde_json::json;

pub const HELP: &str = "\
Examples:
  pvblk export add --disk vm2 --vhost-user unix:/run/vm2.sock
  pvblk export add --nbd tcp:127.0.0.1:10809
  pvblk export remove --nbd tcp:127.0.0.1:10809 --force";

#[derive(Subcommand, Debug)]
pub enum ExportCommand {
    /// Listen for NBD clients or front ends of all disks, or offer one disk to virtual machines or Xen guests
    Add(ExportArgs),
    /// Take such an export away
    Remove(RemoveExportArgs),
}

#[derive(Args, Debug)]
pub struct ExportArgs {
    /// The disk, for --vhost-user and --xen-attach
    #[arg(long, value_name = "NAME")]
    pub disk: Option<String>,
    /// Socket at which a virtual machine gets the disk. Options as for `pvblk serve`
    #[arg(long, value_name = "unix:PATH[,OPTIONS]")]
    pub vhost_user: Option<String>,
    /// Xen guest that gets the disk whenever there is one of this name
    #[arg(long, value_name = "GUEST[:DEVICE]")]
    pub xen_attach: Option<String>,
    /// Socket for NBD clients of all disks
    #[arg(long, value_name = "unix:PATH|tcp:HOST:PORT")]
    pub nbd: Option<String>,
    /// Socket for front ends on rings of all disks. Options as for `pvblk serve`
    #[arg(long, value_name = "unix:PATH[,OPTIONS]")]
    pub local: Option<String>,
    #[command(flatten)]
    pub waiting: Waiting,
}

#[derive(Args, Debug)]
pub struct RemoveExportArgs {
    /// Also while it is used: who is connected there loses it
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub export: ExportArgs,
}

pub fn run(command: &ExportCommand) -> Result<()> {
    let (method, done, args, force) = match command {
        ExportCommand::Add(args) => ("export.add", "added", args, false),
        ExportCommand::Remove(args) => ("export.remove", "removed", &args.export, args.force),
    };
    let of_disk = [&args.vhost_user, &args.xen_attach];
    let of_all = [&args.nbd, &args.local];
    let given = |all: [&Option<String>; 2]| all.iter().filter(|a| a.is_some()).count();
    match (args.disk.is_some(), given(of_disk), given(of_all)) {
        (true, 1, 0) | (false, 0, 1) => {}
        _ => bail!(
            "which export? give --disk NAME with either --vhost-user or --xen-attach; or --nbd; or --local"
        ),
    }
    let mut params = json!({"timeout_secs": args.waiting.timeout.as_secs_f64()});
    let texts = [
        ("disk", &args.disk),
        ("vhost_user", &args.vhost_user),
        ("xen_attach", &args.xen_attach),
        ("nbd", &args.nbd),
        ("local", &args.local),
    ];
    for (name, text) in texts {
        if let Some(text) = text {
            params[name] = text.as_str().into();
        }
    }
    if force {
        params["force"] = true.into();
    }
    let shown: ExportShown = args.waiting.client()?.call(method, params)?;
    if args.waiting.json {
        return print_json(&shown);
    }
    let of_disk = shown
        .disk
        .map_or_else(String::new, |d| format!("disk {d}: "));
    print(&format!(
        "{of_disk}{} {}: {done}\n",
        shown.kind, shown.place
    ))
}
