//! Arrays that no server has: opened, worked on in the foreground, and closed in order.

use super::args::{MapArgs, MembersArgs, Offline};
use super::ask::{Array, follow};
use super::detail::detail_of;
use super::open_all;
use super::progress::Bar;
use super::report::Report;
use crate::output::tell;
use anyhow::{Result, bail};
use pvblk_block::Close;
use pvblk_raid5 as raid5;
use pvblk_raid5::ask::{Question, SyncProgress};
use pvblk_raid5::{ArrayOptions, AssembleOptions, Assembly, Kept, Raid5, Role, add_spare, sleepy};
use pvblk_volume::SpecNames;
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Stripe heads: other programs don't need the memory now.
const STRIPES: usize = 1024;

/// Writes spares; nothing changes on members.
pub fn add(members: &[String], spares: &[String], force: bool, json: bool) -> Result<()> {
    let options = AssembleOptions::default();
    let mut assembly = raid5::assemble(open_all(members)?, &options, &mut sleepy())?;
    let array = uuid(&assembly);
    for (name, device) in open_all(spares)? {
        add_spare(&mut assembly, &name, &device, force, &mut sleepy())?;
        let message = format!("added {name} to array {array} as a spare");
        let report = Report::new("add", &array, message);
        report.with(detail_of(&assembly)).print(json)?;
    }
    Ok(())
}

pub fn assemble(args: &MembersArgs) -> Result<()> {
    let assembly = found(&args.members, &args.offline)?;
    let assembly = ready(assembly, &args.offline)?;
    let (there, of) = (assembly.present().count(), assembly.members.len());
    let array = uuid(&assembly);
    let message = format!("array {array}: clean, {there} of {of} members");
    let report = Report::new("assemble", &array, message);
    report.with(detail_of(&assembly)).print(args.offline.json)
}

/// Begins or ends the private map.
pub fn map(args: &MapArgs) -> Result<()> {
    let MembersArgs { members, offline } = &args.members;
    let keep = args.state == "on";
    let mut assembly = ready(found(members, offline)?, offline)?;
    let had_sums = assembly.newest().kept() == Kept::MapAndSums;
    let changed = raid5::set_private_map(&mut assembly, keep, &mut sleepy())?;
    let array = uuid(&assembly);
    let text = match (keep, changed) {
        (true, true) => "a private map is kept from now on",
        (true, false) => "a private map was kept before",
        (false, true) if had_sums => "no private map and no checksums are kept any more",
        (false, true) => "no private map is kept any more",
        (false, false) => "no private map was kept before",
    };
    let report = Report::new("map", &array, format!("array {array}: {text}"));
    report.with(detail_of(&assembly)).print(offline.json)
}

pub fn rebuild(args: &MembersArgs) -> Result<()> {
    let assembly = found(&args.members, &args.offline)?;
    let spare = assembly.spares.iter().any(|s| s.is_spare());
    match (assembly.failed(), &assembly.incoming) {
        (_, Some(_)) => {}
        (Some(_), None) if spare => {}
        (Some(place), None) => {
            let stale = assembly.spares.iter().find(|s| !s.is_spare());
            let remedy = match stale.map(|s| &s.name) {
                Some(name) => format!(
                    "{name} is stale, which is no spare: `pvblk raid add MEMBER… --spare {name}` makes it one"
                ),
                None => "no spare is named: make one with `pvblk raid add`, and name it".to_owned(),
            };
            bail!("no member is at place {place}, and {remedy}")
        }
        (None, None) => bail!("there is nothing to rebuild: all members are there"),
    }
    run(
        ready(assembly, &args.offline)?,
        &args.offline,
        None,
        ("rebuild", "recover"),
    )
}

/// Check or repair.
pub fn check(
    members: &[String],
    speed: Option<u64>,
    question: &Question,
    action: &'static str,
    json: bool,
) -> Result<()> {
    let offline = Offline {
        speed,
        json,
        // Without one it is refused anyway.
        run: true,
        ..Offline::default()
    };
    let assembly = found(members, &offline)?;
    if let Some(place) = assembly.failed() {
        bail!(
            "{action}: no member is at place {place}, so there is no parity to compare: name it, or rebuild it first"
        );
    }
    run(
        ready(assembly, &offline)?,
        &offline,
        Some(question),
        (action, action),
    )
}

fn uuid(assembly: &Assembly) -> String {
    raid5::uuid_text(&assembly.newest().set_uuid)
}

/// The array that members are. Nothing is written.
fn found(members: &[String], offline: &Offline) -> Result<Assembly> {
    let devices = open_all(members)?;
    let assembly = raid5::assemble(devices, &options(offline), &mut sleepy())?;
    let incoming = assembly.incoming.as_ref();
    let rebuilds = incoming.map(|i| i.member.superblock.dev_number as usize);
    if let Some(place) = assembly.failed()
        && !offline.run
    {
        let role = Role::Active(place as u16);
        let roles = assembly.newest().roles.iter().enumerate();
        let mut others = roles.filter(|(n, _)| Some(*n) != rebuilds);
        if others.any(|(_, r)| *r == role) {
            bail!(
                "no member at place {place} is named, and the others count on it: name it too, or throw it out with --run"
            );
        }
    }
    Ok(assembly)
}

/// With parity that is right, as far as it can be.
fn ready(mut assembly: Assembly, offline: &Offline) -> Result<Assembly> {
    let mut bar = Bar::default();
    let mut tell = |done: u64, of: u64| {
        bar.show(&SyncProgress {
            by_bitmap: false,
            action: "resync".into(),
            done_bytes: done * 512,
            of_bytes: of * 512,
            mismatch_sectors: 0,
            speed_kib: None,
            seconds_left: None,
        });
    };
    let prepared = raid5::prepare(&mut assembly, &options(offline), &mut tell, &mut sleepy());
    bar.end();
    for note in &assembly.notes {
        tell!("{note}");
    }
    prepared?;
    Ok(assembly)
}

fn options(offline: &Offline) -> AssembleOptions {
    AssembleOptions {
        force: offline.force,
        resync_later: false,
    }
}

/// Runs the array until the question's work, or its recovery, has ended, or until a signal. The words: the command's, and md's for the work.
fn run(
    assembly: Assembly,
    offline: &Offline,
    question: Option<&Question>,
    (command, action): (&'static str, &str),
) -> Result<()> {
    let uuid = uuid(&assembly);
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The second one ends at once.
        let status = 128 + signal;
        signal_hook::flag::register_conditional_shutdown(signal, status, Arc::clone(&stop))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let array = Raid5::start(
        assembly,
        &ArrayOptions {
            stripes: STRIPES,
            names: Arc::new(SpecNames::default()),
            ..ArrayOptions::default()
        },
    )?;
    let speed = offline.speed.unwrap_or(u64::MAX);
    array.set_speed(speed, speed)?;
    // The array does only the work that was asked for.
    array.freeze(question.is_some());
    array.keep()?;
    let asked = Array::Own(Arc::clone(&array));
    let begun = question.map_or(Ok(()), |q| asked.ask(q).map(drop));
    let followed = begun.and_then(|()| follow(&asked, Some(action), &stop));
    let closed = array.close();
    let followed = followed?;
    closed?;
    if followed.stopped {
        bail!("{action} was stopped; a rebuild goes on from there the next time");
    }
    followed.tell(command, &format!("array {uuid}"), offline.json)
}
