//! `pvblk xen`: disks of a running server appear in Xen guests, and go.

use crate::config;
use crate::output::{print, print_line, tell};
use anyhow::Result;
use clap::{Args, Subcommand};
use pvblk_export::xen::node::{Node, device_name, parse_device};
use pvblk_export::xen::toolstack::{Listed, Toolstack};
use pvblk_protocol::xenbus::XenbusState;
use std::fmt::Display;
use std::time::Duration;

pub const HELP: &str = "\
Run as root in dom0 (or where the guest's toolstack runs), beside a server with --xen:
  pvblk serve --xen --disk vm1=file:/srv/vm1.img,size=20G
  pvblk xen attach vm1 debian          the first free device of the guest named debian
  pvblk xen attach vm1 7 xvdb          device xvdb of domain 7
  pvblk xen list
  pvblk xen detach debian xvdb

A restarted or restored guest is another domain: attach its disks again, or have the server do it whenever a guest of that name
appears, with `pvblk serve --xen --xen-attach vm1=debian:xvda`. A server that is stopped lets guests go; so does one that comes
back after it was killed. With --xen-attach their disks come back by themselves; else detach and attach again then.

A guest that is restored looks for its disks in its first moment. Without --xen-attach:
  xl restore -p FILE; pvblk xen attach --no-wait vm1 debian xvda; xl unpause debian";

#[derive(Subcommand, Debug)]
pub enum XenCommand {
    /// Make a served disk appear in a running guest
    Attach(AttachArgs),
    /// Take a disk away from a guest, after it has let go of it
    Detach(DetachArgs),
    /// Disks of guests, with the states of both ends
    List(ListArgs),
}

#[derive(Args, Debug)]
pub struct AttachArgs {
    /// Name of the disk at its server
    #[arg(value_name = "DISK")]
    disk: String,
    #[command(flatten)]
    guest: Guest,
    /// Device in the guest: xvda, xvdb and so on [default: the first that is free]
    #[arg(value_name = "DEVICE")]
    device: Option<String>,
    /// Longest time to wait for the guest
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = config::time)]
    timeout: Duration,
    /// Don't wait for the guest: it is paused, or has no driver yet
    #[arg(long, conflicts_with = "timeout")]
    no_wait: bool,
}

#[derive(Args, Debug)]
pub struct DetachArgs {
    #[command(flatten)]
    guest: Guest,
    /// Device in the guest: xvda, xvdb and so on
    #[arg(value_name = "DEVICE")]
    device: String,
    /// Longest time to wait for the guest
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = config::time)]
    timeout: Duration,
    /// Don't wait for the guest: what it has in flight fails
    #[arg(long)]
    force: bool,
}

#[derive(Args, Debug)]
pub struct ListArgs {
    /// Domain in which the servers are [default: this one]
    #[arg(long, value_name = "DOMAIN")]
    back_end: Option<u16>,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct Guest {
    /// Name or number of the guest
    #[arg(value_name = "GUEST")]
    guest: String,
    /// Domain in which the server is [default: this one]
    #[arg(long, value_name = "DOMAIN")]
    back_end: Option<u16>,
}

impl Guest {
    fn open(&self) -> Result<(Toolstack, u16)> {
        let mut toolstack = open(self.back_end)?;
        let domid = toolstack.domain(&self.guest)?;
        Ok((toolstack, domid))
    }
}

fn open(back_end: Option<u16>) -> Result<Toolstack> {
    let mut toolstack = Toolstack::connect()?;
    if let Some(domid) = back_end {
        toolstack.set_back_end(domid);
    }
    Ok(toolstack)
}

pub fn run(command: &XenCommand) -> Result<()> {
    match command {
        XenCommand::Attach(args) => attach(args),
        XenCommand::Detach(args) => detach(args),
        XenCommand::List(args) => list(args),
    }
}

fn attach(args: &AttachArgs) -> Result<()> {
    let (mut toolstack, domid) = args.guest.open()?;
    let devid = match &args.device {
        Some(name) => parse_device(name)?,
        None => toolstack.free_device(domid)?,
    };
    let node = Node { domid, devid };
    toolstack.attach(node, &args.disk)?;
    if args.no_wait {
        let device = device_name(devid);
        return print_line(&format!("{} will be {device} of domain {domid}", args.disk));
    }
    let tell = |l: &Listed| tell!("server {}, guest {}", state(l.back), state(l.front));
    match toolstack.wait_connected(node, args.timeout, tell) {
        Ok(l) => print_line(&format!(
            "{} is {} of {}: {} queues of {} pages, grants {}",
            args.disk,
            l.device(),
            l.guest.unwrap_or_else(|| format!("domain {domid}")),
            l.queues,
            l.ring_pages,
            grants(l.persistent)
        )),
        Err(e) => {
            // Nothing stays behind that nobody uses; a guest that took it just now keeps it.
            let connected = |l: &Listed| l.back == Some(XenbusState::Connected);
            match toolstack.look(node) {
                Ok(Some(l)) if connected(&l) => {}
                _ => {
                    if let Err(also) = toolstack.detach(node, Duration::ZERO, true) {
                        tracing::warn!("{also}");
                    }
                }
            }
            Err(e.into())
        }
    }
}

fn detach(args: &DetachArgs) -> Result<()> {
    let (mut toolstack, domid) = args.guest.open()?;
    let devid = parse_device(&args.device)?;
    let node = Node { domid, devid };
    toolstack.detach(node, args.timeout, args.force)?;
    print_line(&format!("{} of domain {domid} is gone", device_name(devid)))
}

fn list(args: &ListArgs) -> Result<()> {
    let all = open(args.back_end)?.list()?;
    let text = match args.json {
        true => serde_json::to_string_pretty(&all.iter().map(json).collect::<Vec<_>>())? + "\n",
        false => table(&all),
    };
    print(&text)
}

fn table(all: &[Listed]) -> String {
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    table.set_header([
        "domain",
        "guest",
        "device",
        "disk",
        "server",
        "guest's state",
        "queues",
        "pages",
        "grants",
    ]);
    for l in all {
        let known = |n: u32| if n > 0 { n.to_string() } else { "-".into() };
        table.add_row([
            l.node.domid.to_string(),
            l.guest.clone().unwrap_or_else(|| "-".into()),
            l.device(),
            l.disk.clone(),
            state(l.back),
            state(l.front),
            known(l.queues),
            known(l.ring_pages),
            match &l.error {
                Some(why) => why.clone(),
                None => grants(l.persistent).into(),
            },
        ]);
    }
    format!("{table}\n")
}

fn json(l: &Listed) -> serde_json::Value {
    serde_json::json!({
        "domain": l.node.domid,
        "guest": l.guest,
        "device": l.device(),
        "disk": l.disk,
        "server": state(l.back),
        "guest_state": state(l.front),
        "queues": l.queues,
        "ring_pages": l.ring_pages,
        "persistent": l.persistent,
        "error": l.error,
    })
}

fn state(state: Option<XenbusState>) -> String {
    state.map_or_else(|| "-".into(), |s| (&s as &dyn Display).to_string())
}

fn grants(persistent: bool) -> &'static str {
    if persistent { "persistent" } else { "copied" }
}
