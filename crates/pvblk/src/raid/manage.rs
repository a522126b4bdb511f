//! Commands to arrays that are served, and `add`, `check` and `repair`, which do without a server too.

use super::args::{
    AddArgs, CheckArgs, MemberArgs, ReAddArgs, ReplaceArgs, Served, SpeedArgs, StripesArgs,
    WritePathArgs,
};
use super::ask::{Array, follow, noun};
use super::report::{self, Report};
use super::whom::Target;
use super::{member, offline};
use anyhow::{Result, bail};
use pvblk_protocol::nbd::NbdAddr;
use pvblk_raid5::ask::{Detail, Question};
use pvblk_volume::{Members, NbdSpec, RingsSpec, VhostSpec, VolumeSpec};
use std::sync::atomic::AtomicBool;

/// Asks a disk, and tells the outcome in a line; `message` makes it of the state afterwards.
fn order(
    served: &Served,
    command: &'static str,
    question: &Question,
    message: impl FnOnce(&Detail) -> String,
) -> Result<()> {
    let after = Array::served(&served.control, &served.disk)?.ask(question)?;
    let report = Report::new(command, &served.disk, message(&after));
    report.with(after).print(served.json)
}

pub fn add(args: &AddArgs) -> Result<()> {
    let (names, json) = (&args.whom.names, &args.whom.json);
    let (array, disk, new) = match args.whom.target()? {
        Target::Members if args.spares.is_empty() => bail!(
            "no device to add: name it with --spare; if {} is a disk that is served, name the server with --control",
            names[0]
        ),
        Target::Members => return offline::add(names, &args.spares, args.force, *json),
        Target::Served { disk, rest: [], .. } if args.spares.is_empty() => {
            bail!("name the disk that is served, {disk}, and then the new member")
        }
        Target::Served {
            control,
            guessed,
            disk,
            rest,
        } => {
            let array = Array::Served {
                control,
                guessed,
                disk: disk.to_owned(),
            };
            (array, disk, rest)
        }
    };
    for new in new.iter().chain(&args.spares) {
        let member = to_server(new)?;
        let question = Question::Add {
            member: member.clone(),
            force: args.force,
        };
        let after = array.ask(&question)?;
        let message = report::added(disk, &member, &after);
        Report::new("add", disk, message).with(after).print(*json)?;
    }
    Ok(())
}

pub fn re_add(args: &ReAddArgs) -> Result<()> {
    let member = match args.member.parse::<usize>() {
        Ok(place) => place.to_string(),
        Err(_) => to_server(&args.member)?,
    };
    let disk = &args.served.disk;
    let question = Question::ReAdd {
        member: member.clone(),
    };
    order(&args.served, "re-add", &question, |after| {
        report::re_added(disk, &member, after)
    })
}

pub fn fail(args: &MemberArgs) -> Result<()> {
    let member = place_or_name(&args.member)?;
    let Served { control, disk, .. } = &args.served;
    let before = Array::served(control, disk)?.ask(&Question::Detail {})?;
    order(&args.served, "fail", &Question::Fail { member }, |after| {
        report::failed(disk, &before, after)
    })
}

pub fn remove(args: &MemberArgs) -> Result<()> {
    let member = place_or_name(&args.member)?;
    let message = format!("removed {member} from {}", args.served.disk);
    order(&args.served, "remove", &Question::Remove { member }, |_| {
        message
    })
}

pub fn replace(args: &ReplaceArgs) -> Result<()> {
    let question = Question::Replace {
        member: place_or_name(&args.member)?,
        with: args.with.as_deref().map(to_server).transpose()?,
        force: args.force,
    };
    order(&args.served, "replace", &question, |after| {
        report::replaced(&args.served.disk, after)
    })
}

/// Check or repair.
pub fn check(args: &CheckArgs, question: &Question) -> Result<()> {
    let action = match question {
        Question::Repair {} => "repair",
        _ => "check",
    };
    let (names, json) = (&args.whom.names, &args.whom.json);
    let Some(array) = args.whom.served()? else {
        return offline::check(names, args.speed, question, action, *json);
    };
    if args.speed.is_some() {
        bail!(
            "--speed is for members that aren't served: see `pvblk raid speed {}`",
            names[0]
        );
    }
    let after = array.ask(question)?;
    if args.wait {
        let followed = follow(&array, Some(action), &AtomicBool::new(false))?;
        return followed.tell(action, &names[0], *json);
    }
    let message = format!(
        "{action} of {} has begun: `pvblk raid wait` follows it",
        names[0]
    );
    Report::new(action, &names[0], message)
        .with(after)
        .print(*json)
}

pub fn wait(args: &Served) -> Result<()> {
    let array = Array::served(&args.control, &args.disk)?;
    let followed = follow(&array, None, &AtomicBool::new(false))?;
    followed.tell("wait", &args.disk, args.json)
}

pub fn idle(args: &Served) -> Result<()> {
    let disk = &args.disk;
    let before = Array::served(&args.control, disk)?.ask(&Question::Detail {})?;
    let sync = before.serving.and_then(|s| s.sync);
    let message = match sync.as_ref().map(|s| s.action.as_str()) {
        None => format!("{disk}: nothing was under way"),
        Some(action @ ("check" | "repair")) => format!("{action} of {disk} is ended"),
        Some(action) => format!("{} of {disk} begins again", noun(action)),
    };
    order(args, "idle", &Question::Idle {}, |_| message)
}

pub fn freeze(args: &Served, on: bool) -> Result<()> {
    let (command, then) = match on {
        true => ("freeze", "is frozen: nothing is rebuilt or resynchronised"),
        false => ("unfreeze", "isn't frozen: it is rebuilt and resynchronised"),
    };
    let message = format!("{} {then}", args.disk);
    order(args, command, &Question::Frozen { on }, |_| message)
}

pub fn speed(args: &SpeedArgs) -> Result<()> {
    if args.min.is_none() && args.max.is_none() {
        bail!("no speed to set: give --min, --max or both");
    }
    let question = Question::Speed {
        min_kib: args.min,
        max_kib: args.max,
    };
    let disk = &args.served.disk;
    order(&args.served, "speed", &question, |after| {
        let speeds = after.serving.as_ref();
        let (min, max) = speeds.map_or((0, 0), |s| (s.speed_min_kib, s.speed_max_kib));
        format!("{disk}: rebuilds and checks take {min} to {max} KiB/s of each member")
    })
}

pub fn stripes(args: &StripesArgs) -> Result<()> {
    let stripes = args.stripes;
    let message = format!("{}: {stripes} stripe heads are kept", args.served.disk);
    order(
        &args.served,
        "stripes",
        &Question::Stripes { stripes },
        |_| message,
    )
}

pub fn write_path(args: &WritePathArgs) -> Result<()> {
    let path = args.path.clone();
    let message = format!("{}: the write path is {path}", args.served.disk);
    order(
        &args.served,
        "write-path",
        &Question::WritePath { path },
        |_| message,
    )
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
        VolumeSpec::Vhost(VhostSpec { path, .. }) | VolumeSpec::Rings(RingsSpec { path, .. }) => {
            *path = std::path::absolute(&path)?;
        }
        VolumeSpec::Nbd(NbdSpec { uri, .. }) => {
            if let NbdAddr::Unix(path) = &mut uri.addr {
                *path = std::path::absolute(&path)?;
            }
            if let Some(tls) = &mut uri.tls {
                tls.directory = std::path::absolute(&tls.directory)?;
            }
        }
        VolumeSpec::Rbd(rbd) => {
            if let Some(conf) = &mut rbd.conf {
                *conf = std::path::absolute(&conf)?;
            }
        }
        VolumeSpec::Null(_) | VolumeSpec::Mem(_) => {}
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
