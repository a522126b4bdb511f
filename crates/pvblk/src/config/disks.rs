//! The disks of file and flags, put together and checked.

use super::file::File;
use super::unix_path;
use crate::cli::ServeArgs;
use crate::wanted::{DiskWanted, check_name};
use anyhow::{Context, Result, bail};
use pvblk_export::vhost_user::Listen;
use pvblk_export::xen::StandingOrder;
use pvblk_volume::VolumeSpec;

/// Disks in the order in which they are served.
#[derive(Debug)]
pub struct Disks {
    pub wanted: Vec<(String, DiskWanted)>,
    pub specs: Vec<(String, VolumeSpec)>,
    pub vhost_user: Vec<Listen>,
    pub xen_attach: Vec<StandingOrder>,
}

/// The file's disks, by their names, then those of flags.
pub fn resolve(args: &ServeArgs, file: &File, xen: bool) -> Result<Disks> {
    let mut wanted: Vec<(String, DiskWanted)> = Vec::new();
    wanted.extend(file.disk.iter().map(|(n, d)| (n.clone(), d.clone())));
    add_flags(&mut wanted, args)?;
    let mut disks = Disks {
        wanted: Vec::new(),
        specs: Vec::new(),
        vhost_user: Vec::new(),
        xen_attach: Vec::new(),
    };
    for (name, disk) in &wanted {
        if let (Some(guest), false) = (disk.xen_attach.first(), xen) {
            bail!("--xen-attach {name}={guest}: it needs --xen, too");
        }
        let parsed = disk.parse(name)?;
        disks.specs.push((name.clone(), parsed.spec));
        let listen = |path| Listen {
            disk: name.clone(),
            path,
        };
        disks
            .vhost_user
            .extend(parsed.vhost_user.into_iter().map(listen));
        disks.xen_attach.extend(parsed.xen_attach);
    }
    disks.wanted = wanted;
    sort_as_given(&mut disks.xen_attach, args);
    check_guests(&disks.xen_attach)?;
    Ok(disks)
}

fn add_flags(wanted: &mut Vec<(String, DiskWanted)>, args: &ServeArgs) -> Result<()> {
    for arg in &args.disks {
        let (name, volume) = arg
            .split_once('=')
            .with_context(|| format!("--disk {arg}: write NAME=VOLUME, such as --disk a=mem:1G"))?;
        check_name(name)?;
        if wanted.iter().any(|(n, _)| n == name) {
            bail!("disk {name} is given twice: names must differ");
        }
        wanted.push((name.to_owned(), DiskWanted::new(volume)));
    }
    for name in &args.exclusive {
        named(wanted, &format!("--exclusive {name}"), name)?.exclusive = true;
    }
    let mut limited = Vec::new();
    for arg in &args.limits {
        let (name, limit) = arg.split_once(':').with_context(|| {
            format!("--limit {arg}: write NAME:LIMITS, such as --limit a:read-iops=1k,bw=100M")
        })?;
        named(wanted, &format!("--limit {arg}"), name)?.limit = Some(limit.to_owned());
        if limited.contains(&name) {
            bail!(
                "--limit {arg}: disk {name} has one already; write all of its limits in one, with commas"
            );
        }
        limited.push(name);
    }
    for arg in &args.vhost_user {
        let (name, socket) = arg.split_once('=').with_context(|| {
            format!(
                "--vhost-user {arg}: write NAME=unix:PATH, such as --vhost-user a=unix:/run/a.sock"
            )
        })?;
        unix_path("--vhost-user NAME=", socket)?;
        let sockets = &mut named(wanted, &format!("--vhost-user {arg}"), name)?.vhost_user;
        sockets.push(socket.to_owned());
    }
    for arg in &args.xen_attach {
        let (name, guest) = arg.split_once('=').with_context(|| {
            format!(
                "--xen-attach {arg}: write DISK=GUEST or DISK=GUEST:DEVICE, such as vm1=debian:xvda"
            )
        })?;
        let guests = &mut named(wanted, &format!("--xen-attach {arg}"), name)?.xen_attach;
        guests.push(guest.to_owned());
    }
    Ok(())
}

fn named<'a>(
    wanted: &'a mut [(String, DiskWanted)],
    flag: &str,
    name: &str,
) -> Result<&'a mut DiskWanted> {
    let found = wanted.iter_mut().find(|(n, _)| n == name);
    let found = found.map(|(_, disk)| disk);
    found.with_context(|| format!("{flag}: there is no disk {name}"))
}

/// A guest's disks without a device get the first free ones in the order of the flags; those of the file come first.
fn sort_as_given(orders: &mut [StandingOrder], args: &ServeArgs) {
    let given = |order: &StandingOrder| {
        let is_of = |arg: &String| {
            let parts = arg.split_once('=');
            parts.is_some_and(|(disk, guest)| disk == order.disk && is_guest(guest, &order.guest))
        };
        args.xen_attach.iter().position(is_of)
    };
    orders.sort_by_key(given);
}

/// True if `text` is `GUEST` or `GUEST:DEVICE`.
fn is_guest(text: &str, guest: &str) -> bool {
    let rest = text.strip_prefix(guest);
    rest.is_some_and(|r| r.is_empty() || (r.starts_with(':') && !r[1..].contains(':')))
}

/// A guest gets a disk once, and one disk for each device.
fn check_guests(orders: &[StandingOrder]) -> Result<()> {
    for (n, order) in orders.iter().enumerate() {
        let StandingOrder {
            disk,
            guest,
            device,
        } = order;
        for other in orders[..n].iter().filter(|o| o.guest == *guest) {
            if other.disk == *disk {
                bail!("--xen-attach {disk}={guest}: guest {guest} gets disk {disk} already");
            }
            if device.is_some() && other.device == *device {
                bail!(
                    "--xen-attach {disk}={guest}: that device is disk {}",
                    other.disk
                );
            }
        }
    }
    Ok(())
}
