//! The disks of file and flags, put together and checked.

use super::file::File;
use super::unix_listen;
use crate::cli::ServeArgs;
use crate::wanted::{DiskWanted, check_name};
use anyhow::{Context, Result, anyhow, bail};
use pvblk_export::kit::UnixListen;
use pvblk_export::xen::StandingOrder;
use pvblk_volume::VolumeSpec;

/// Disks that can be served, in their order.
#[derive(Debug, Default)]
pub struct Disks {
    pub specs: Vec<(String, VolumeSpec)>,
    pub vhost_user: Vec<(String, UnixListen)>,
    pub xen_attach: Vec<StandingOrder>,
}

/// A disk that can't be served, and why not.
#[derive(Debug)]
pub struct WrongDisk {
    pub disk: String,
    pub why: anyhow::Error,
}

/// The file's disks, by their names, then those of flags.
pub fn configured(args: &ServeArgs, file: &File) -> Result<Vec<(String, DiskWanted)>> {
    let of_file = file.disk.iter().map(|(n, d)| (n.clone(), d.clone()));
    let mut wanted = of_file.collect();
    add_flags(&mut wanted, args)?;
    Ok(wanted)
}

/// Checks disks, each for itself and against the others. `args`: flags that some of them are from.
pub fn check(
    wanted: &[(String, DiskWanted)],
    args: &ServeArgs,
    xen: bool,
) -> Result<Disks, WrongDisk> {
    let mut disks = Disks::default();
    for (name, disk) in wanted {
        let wrong = |why| WrongDisk {
            disk: name.clone(),
            why,
        };
        if let (Some(guest), false) = (disk.xen_attach.first(), xen) {
            let why = anyhow!("--xen-attach {name}={guest}: it needs --xen, too");
            return Err(wrong(why));
        }
        let parsed = disk.parse(name).map_err(wrong)?;
        disks.specs.push((name.clone(), parsed.spec));
        let sockets = parsed.vhost_user.into_iter();
        disks.vhost_user.extend(sockets.map(|l| (name.clone(), l)));
        disks.xen_attach.extend(parsed.xen_attach);
    }
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
        unix_listen(&format!("--vhost-user {name}="), socket)?;
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
fn check_guests(orders: &[StandingOrder]) -> Result<(), WrongDisk> {
    for (n, order) in orders.iter().enumerate() {
        let StandingOrder {
            disk,
            guest,
            device,
        } = order;
        let same_guest = orders[..n].iter().filter(|o| o.guest == *guest);
        for StandingOrder {
            disk: other,
            device: taken,
            ..
        } in same_guest
        {
            let why = if other == disk {
                format!("guest {guest} gets disk {disk} already")
            } else if device.is_some() && taken == device {
                format!("that device is disk {other}")
            } else {
                continue;
            };
            return Err(WrongDisk {
                disk: disk.clone(),
                why: anyhow!("--xen-attach {disk}={guest}: {why}"),
            });
        }
    }
    Ok(())
}
