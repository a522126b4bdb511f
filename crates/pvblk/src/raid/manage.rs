//! Commands to arrays that are served, and `add`, `check` and `repair`, which do without a server too.

use super::args::{
    AddArgs, CheckArgs, MemberArgs, ReplaceArgs, Served, SpeedArgs, StripesArgs, Whom,
    WritePathArgs,
};
use super::ask::{Array, follow};
use super::{member, offline};
use anyhow::{Result, bail};
use pvblk_client::nbd::NbdUri;
use pvblk_protocol::nbd::NbdAddr;
use pvblk_raid5::ask::Question;
use pvblk_volume::{Members, RingsSpec, VhostSpec, VolumeSpec};
use std::sync::atomic::AtomicBool;

/// Asks a disk, and has nothing to tell if it works.
pub fn order(served: &Served, question: &Question) -> Result<()> {
    Array::served(&served.control, &served.disk)?.ask(question)?;
    Ok(())
}

pub fn add(args: &AddArgs) -> Result<()> {
    let Whom { control, names } = &args.whom;
    let Some(control) = control else {
        if args.spares.is_empty() {
            bail!("no device to add: name it with --spare, or the server with --control");
        }
        return offline::add(names, &args.spares, args.force);
    };
    let (disk, new) = match names.as_slice() {
        [disk, new @ ..] if new.len() + args.spares.len() > 0 => (disk, new),
        _ => bail!("with --control name the disk, and then the new member"),
    };
    let array = Array::served(control, disk)?;
    for new in new.iter().chain(&args.spares) {
        array.ask(&Question::Add {
            member: to_server(new)?,
            force: args.force,
        })?;
    }
    Ok(())
}

pub fn fail(args: &MemberArgs) -> Result<()> {
    let member = place_or_name(&args.member)?;
    order(&args.served, &Question::Fail { member })
}

pub fn remove(args: &MemberArgs) -> Result<()> {
    let member = place_or_name(&args.member)?;
    order(&args.served, &Question::Remove { member })
}

pub fn replace(args: &ReplaceArgs) -> Result<()> {
    let question = Question::Replace {
        member: place_or_name(&args.member)?,
        with: args.with.as_deref().map(to_server).transpose()?,
        force: args.force,
    };
    order(&args.served, &question)
}

/// Check or repair.
pub fn check(args: &CheckArgs, question: &Question) -> Result<()> {
    let action = match question {
        Question::Repair {} => "repair",
        _ => "check",
    };
    let Some(array) = one_disk(&args.whom)? else {
        return offline::check(&args.whom.names, args.speed, question, action);
    };
    array.ask(question)?;
    match args.wait {
        true => follow(&array, Some(action), &AtomicBool::new(false))?.judge(),
        false => Ok(()),
    }
}

pub fn wait(args: &Served) -> Result<()> {
    let array = Array::served(&args.control, &args.disk)?;
    follow(&array, None, &AtomicBool::new(false))?.judge()
}

pub fn speed(args: &SpeedArgs) -> Result<()> {
    if args.min.is_none() && args.max.is_none() {
        bail!("no speed to set: give --min, --max or both");
    }
    let question = Question::Speed {
        min_kib: args.min,
        max_kib: args.max,
    };
    order(&args.served, &question)
}

pub fn stripes(args: &StripesArgs) -> Result<()> {
    let stripes = args.stripes;
    order(&args.served, &Question::Stripes { stripes })
}

pub fn write_path(args: &WritePathArgs) -> Result<()> {
    let path = args.path.clone();
    order(&args.served, &Question::WritePath { path })
}

/// The disk of a server; `None` if members are named instead.
pub fn one_disk(whom: &Whom) -> Result<Option<Array>> {
    match (&whom.control, whom.names.as_slice()) {
        (None, _) => Ok(None),
        (Some(control), [disk]) => Array::served(control, disk).map(Some),
        (Some(_), names) => bail!(
            "{}: with --control name the disk alone; the server knows its members",
            names.join(" ")
        ),
    }
}

/// A member for a server, which may run in another folder.
fn to_server(text: &str) -> Result<String> {
    let mut spec = member(text)?;
    absolute(&mut spec)?;
    Ok(spec.to_string())
}

fn absolute(spec: &mut VolumeSpec) -> Result<()> {
    match spec {
        VolumeSpec::File(file) => file.path = std::path::absolute(&file.path)?,
        VolumeSpec::Delay(_, inner) | VolumeSpec::Fault(_, inner) | VolumeSpec::Cache(_, inner) => {
            absolute(inner)?
        }
        VolumeSpec::Raid5(array) => match &mut array.of {
            Members::Named(members) => members.iter_mut().flatten().try_for_each(absolute)?,
            Members::Found(found) => found.within.iter_mut().try_for_each(absolute)?,
        },
        VolumeSpec::Vhost(VhostSpec { path, .. })
        | VolumeSpec::Rings(RingsSpec { path, .. })
        | VolumeSpec::Nbd(NbdUri {
            addr: NbdAddr::Unix(path),
            ..
        }) => {
            *path = std::path::absolute(&path)?;
        }
        VolumeSpec::Null(_) | VolumeSpec::Mem(_) | VolumeSpec::Nbd(_) => {}
    }
    Ok(())
}

/// Leaves the name of a place as it is.
fn place_or_name(text: &str) -> Result<String> {
    match text.bytes().all(|b| b.is_ascii_digit()) {
        true => Ok(text.to_owned()),
        false => to_server(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_get_absolute_paths() {
        let here = std::env::current_dir().expect("a folder");
        let here = here.display();
        for (text, expected) in [
            ("a.img", format!("file:{here}/a.img")),
            (
                "file:a.img,direct,size=1G",
                format!("file:{here}/a.img,direct,size=1G"),
            ),
            (
                "delay:1ms:file:sub/a",
                format!("delay:1ms:file:{here}/sub/a"),
            ),
            ("/srv/a", "file:/srv/a".into()),
            ("mem:1M", "mem:1M".into()),
        ] {
            assert_eq!(to_server(text).expect("a member"), expected);
        }
        assert_eq!(place_or_name("12").expect("a place"), "12");
        assert!(to_server("floppy:1").is_err());
    }
}
