//! `pvblk disk`: disks of a running server come and go.

use crate::config;
use crate::control::{Client, ControlArg};
use crate::disks::{DiskPage, DiskShown, Removed};
use crate::output::{print, print_json};
use crate::wanted::{DiskWanted, check_name};
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use serde_json::json;
use std::time::Duration;

pub const HELP: &str = "\
Examples:
  pvblk disk add vm2=file:/srv/vm2.img,size=20G --vhost-user unix:/run/vm2.sock
  pvblk disk add vm1          (again, after it could not be opened)
  pvblk disk list
  pvblk disk set vm2 --exclusive on
  pvblk disk remove vm2

Volumes are those of `pvblk serve --help`. Files are opened by the server: give paths from the root.";

/// A client waits so much longer than the server.
const MARGIN: Duration = Duration::from_secs(5);

#[derive(Subcommand, Debug)]
pub enum DiskCommand {
    /// Open a volume and serve it under a name; NBD clients and front ends find it from then on
    Add(AddArgs),
    /// Take a disk away: flush it, close what it stands on, and return when that is done
    Remove(RemoveArgs),
    /// List all disks
    List(ListArgs),
    /// Show one disk
    Show(ShowArgs),
    /// Change a disk while it is used
    Set(SetArgs),
}

/// Flags of commands that may have to wait for a medium.
#[derive(Args, Debug)]
pub struct Waiting {
    #[command(flatten)]
    pub control: ControlArg,
    /// Give up after this time, such as 500ms or 60s; the server goes on and tells in `pvblk disk list` how far it is
    #[arg(long, value_name = "TIME", value_parser = config::time, default_value = "60s")]
    pub timeout: Duration,
    /// Print JSON, for programs
    #[arg(long)]
    pub json: bool,
}

/// Flags of commands that are answered at once.
#[derive(Args, Debug)]
pub struct Quick {
    #[command(flatten)]
    pub control: ControlArg,
    /// Print JSON, for programs
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct AddArgs {
    /// Its name, which is also its NBD export's, and its volume. NAME alone: open a disk that is wanted and could not be opened
    #[arg(value_name = "NAME[=VOLUME]")]
    pub disk: String,
    /// Let one front end or virtual machine at a time use it, or NBD clients only
    #[arg(long)]
    pub exclusive: bool,
    /// Socket at which a virtual machine gets it; may be given several times. Options as for `pvblk serve --vhost-user`
    #[arg(long, value_name = "unix:PATH[,OPTIONS]")]
    pub vhost_user: Vec<String>,
    /// Attach it to each Xen guest of this name; may be given several times
    #[arg(long, value_name = "GUEST[:DEVICE]")]
    pub xen_attach: Vec<String>,
    /// Limits of its rate, such as read-iops=1000,write-bw=10M
    #[arg(long, value_name = "LIMITS")]
    pub limit: Option<String>,
    #[command(flatten)]
    pub waiting: Waiting,
}

#[derive(Args, Debug)]
pub struct RemoveArgs {
    /// Name of the disk
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Also while it is used: its users lose it, and the name is free at once
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub waiting: Waiting,
}

#[derive(Args, Debug)]
pub struct ListArgs {
    #[command(flatten)]
    pub quick: Quick,
}

#[derive(Args, Debug)]
pub struct ShowArgs {
    #[arg(value_name = "NAME")]
    pub name: String,
    #[command(flatten)]
    pub quick: Quick,
}

#[derive(Args, Debug)]
pub struct SetArgs {
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Refuse a second front end or virtual machine from now on, or let it in with a warning
    #[arg(long, value_name = "on|off")]
    pub exclusive: Option<Switch>,
    /// Limits of its rate; `none`: no limits
    #[arg(long, value_name = "LIMITS|none")]
    pub limit: Option<String>,
    #[command(flatten)]
    pub quick: Quick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
}

impl Waiting {
    pub fn client(&self) -> Result<Client> {
        Client::connect(&self.control.path()?, self.timeout + MARGIN)
    }
}

impl Quick {
    fn client(&self) -> Result<Client> {
        Client::connect(&self.control.path()?, Duration::from_secs(30))
    }
}

pub fn run(command: &DiskCommand) -> Result<()> {
    match command {
        DiskCommand::Add(args) => add(args),
        DiskCommand::Remove(args) => remove(args),
        DiskCommand::List(args) => list(args),
        DiskCommand::Show(args) => {
            let params = json!({"name": args.name});
            let disk: DiskShown = args.quick.client()?.call("disk.show", params)?;
            show(&disk, args.quick.json)
        }
        DiskCommand::Set(args) => set(args),
    }
}

fn add(args: &AddArgs) -> Result<()> {
    let Some((name, volume)) = args.disk.split_once('=') else {
        return add_again(args);
    };
    let wanted = DiskWanted {
        exclusive: args.exclusive,
        vhost_user: args.vhost_user.clone(),
        xen_attach: args.xen_attach.clone(),
        limit: args.limit.clone(),
        ..DiskWanted::new(volume)
    };
    // Mistakes that show without the server.
    wanted.parse(name)?;
    let mut params = serde_json::to_value(&wanted).context("the request")?;
    params["name"] = name.into();
    params["timeout_secs"] = args.waiting.timeout.as_secs_f64().into();
    let disk: DiskShown = args.waiting.client()?.call("disk.add", params)?;
    show(&disk, args.waiting.json)
}

/// Opens a disk that the server knows.
fn add_again(args: &AddArgs) -> Result<()> {
    let name = &args.disk;
    let is_more = args.exclusive || args.limit.is_some();
    if is_more || !args.vhost_user.is_empty() || !args.xen_attach.is_empty() {
        bail!(
            "{name}: write NAME=VOLUME with these flags; NAME alone opens a disk that is wanted and could not be opened"
        );
    }
    check_name(name)
        .with_context(|| format!("{name}: write NAME=VOLUME, such as vm2=file:/srv/vm2.img"))?;
    let params = json!({
        "name": name,
        "timeout_secs": args.waiting.timeout.as_secs_f64(),
    });
    let disk: DiskShown = args.waiting.client()?.call("disk.add", params)?;
    show(&disk, args.waiting.json)
}

fn remove(args: &RemoveArgs) -> Result<()> {
    let params = json!({
        "name": args.name,
        "force": args.force,
        "timeout_secs": args.waiting.timeout.as_secs_f64(),
    });
    let removed: Removed = args.waiting.client()?.call("disk.remove", params)?;
    match args.waiting.json {
        true => print_json(&removed),
        false => print(&format!("disk {}: removed\n", removed.name)),
    }
}

fn set(args: &SetArgs) -> Result<()> {
    if args.exclusive.is_none() && args.limit.is_none() {
        bail!("nothing to change: give --limit or --exclusive");
    }
    let limit = args.limit.as_deref();
    let params = json!({
        "name": args.name,
        "exclusive": args.exclusive.map(|s| s == Switch::On),
        "limit": limit.map(|l| if l == "none" { "" } else { l }),
    });
    let disk: DiskShown = args.quick.client()?.call("disk.set", params)?;
    show(&disk, args.quick.json)
}

fn list(args: &ListArgs) -> Result<()> {
    let mut client = args.quick.client()?;
    let (mut disks, mut after) = (Vec::new(), None);
    loop {
        let params = json!({"after": after});
        let page: DiskPage = client.call("disk.list", params)?;
        disks.extend(page.disks);
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    if args.quick.json {
        return print_json(&json!({"disks": disks}));
    }
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(["disk", "state", "health", "MiB", "users", "volume"]);
    for disk in &disks {
        let users: usize = disk.users.iter().map(|u| u.count).sum();
        let mib = (disk.size_bytes >> 20).to_string();
        table.add_row([
            &disk.name,
            &disk.state,
            &disk.health,
            &mib,
            &users.to_string(),
            &disk.volume,
        ]);
    }
    let mut text = format!("{table}\n");
    for disk in &disks {
        if let Some(why) = &disk.reason {
            text += &format!("disk {} isn't open: {why}\n", disk.name);
        }
    }
    print(&text)
}

fn show(disk: &DiskShown, json: bool) -> Result<()> {
    if json {
        return print_json(disk);
    }
    let mut text = format!(
        "disk {}: {}, {}, {}, {} MiB",
        disk.name,
        disk.state,
        disk.health,
        disk.volume,
        disk.size_bytes >> 20
    );
    let mut more = |what: &str| {
        text += ", ";
        text += what;
    };
    if disk.read_only {
        more("read-only");
    }
    if disk.exclusive {
        more("exclusive");
    }
    if let Some(limit) = &disk.limit {
        more(&format!("limit {limit}"));
    }
    if let Some(why) = &disk.reason {
        text += &format!("\n  it isn't open: {why}");
    }
    for user in &disk.users {
        text += &format!("\n  used by {} ({})", user.name, user.count);
    }
    for client in &disk.clients {
        text += &format!("\n    {}, for {} s", client.name, client.secs);
        if let (Some(pid), Some(uid)) = (client.pid, client.uid) {
            text += &format!(", process {pid} of user {uid}");
        }
    }
    for queue in &disk.queues {
        text += &format!(
            "\n    queue {}: {} in flight, worker {}, polled before it sleeps: {} us for requests, {} us for the device",
            queue.name, queue.in_flight, queue.worker, queue.polled_us, queue.device_polled_us
        );
        if let Some(pull) = queue.pull.filter(|pull| *pull > 0) {
            let plural = if pull == 1 { "" } else { "s" };
            text += &format!(", up to {pull} request{plural} at a time");
        }
        if let Some(signals) = queue.signals.filter(|signals| *signals > 0) {
            let requests = queue.requests as f64 / signals as f64;
            text += &format!(", a signal for {requests:.1} requests");
        }
    }
    for export in &disk.exports {
        text += &format!("\n  {export}");
    }
    print(&(text + "\n"))
}
