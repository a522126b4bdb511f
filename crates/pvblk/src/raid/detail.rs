//! `pvblk raid detail`: how an array is, as `mdadm --detail` prints it (times in UTC).

use super::args::DetailArgs;
use super::ask::{Array, Speed};
use super::screen::Screen;
use super::{member, open_to_read, progress, text};
use crate::output::print;
use anyhow::Result;
use pvblk_raid5::ask::{Detail, DetailMember, DeviceState, Question, Serving};
use pvblk_raid5::{
    AssembleOptions, Assembly, Member, MemberNames, Role, SpecParts, WritePath, assemble, sleepy,
};
use pvblk_volume::{Raid5Spec, SpecNames};
use std::time::Duration;

/// Time over which a speed is measured.
const MEASURE: Duration = Duration::from_millis(300);
/// Interval at which the answer is printed again.
const AGAIN: Duration = Duration::from_secs(1);

pub fn run(args: &DetailArgs) -> Result<()> {
    let array = args.whom.served()?;
    let mut speed = Speed::default();
    // Opened when there is something to show, so that an error before is seen.
    let mut screen = None;
    loop {
        let mut detail = look(args, array.as_ref())?;
        let sync = |detail: &mut Detail, speed: &mut Speed| {
            let sync = detail.serving.as_mut().and_then(|s| s.sync.as_mut());
            sync.is_some_and(|sync| {
                speed.look(sync);
                sync.speed_kib.is_none()
            })
        };
        if sync(&mut detail, &mut speed) {
            std::thread::sleep(MEASURE);
            detail = look(args, array.as_ref())?;
            sync(&mut detail, &mut speed);
        }
        let text = printed(&detail, args)?;
        if !args.watch {
            return print(&text);
        }
        let screen = match &mut screen {
            Some(screen) => screen,
            none => none.insert(Screen::open()?),
        };
        screen.show(&text)?;
        screen.wait(AGAIN, &text)?;
    }
}

fn look(args: &DetailArgs, array: Option<&Array>) -> Result<Detail> {
    if let Some(array) = array {
        return array.ask(&Question::Detail {});
    }
    let mut devices = Vec::new();
    for name in &args.whom.names {
        devices.push((name.clone(), open_to_read(name)?));
    }
    let assembly = assemble(devices, &AssembleOptions::default(), &mut sleepy())?;
    Ok(detail_of(&assembly))
}

/// The state of an array that isn't served.
pub fn detail_of(assembly: &Assembly) -> Detail {
    Detail {
        spec: SpecNames::default().spec(&parts(assembly)),
        ..Detail::of_assembly(assembly)
    }
}

/// Parts of the specification of an array that isn't served.
fn parts(assembly: &Assembly) -> SpecParts {
    // Names are words of the command line, where a file needs no `file:`.
    let name = |m: &Member| member(&m.name).map_or_else(|_| m.name.clone(), |s| s.to_string());
    let incoming = assembly.incoming.iter().map(|i| &i.member);
    let spares = assembly.spares.iter().filter(|s| s.is_spare());
    let others = incoming.chain(spares);
    SpecParts {
        set_uuid: assembly.newest().set_uuid,
        members: assembly
            .members
            .iter()
            .map(|m| m.as_ref().map(name))
            .collect(),
        spares: others.clone().map(name).collect(),
        devices: assembly.present().chain(others).map(name).collect(),
        patterns: Vec::new(),
        missing: is_counted_on(assembly),
        stripes: Raid5Spec::STRIPES as usize,
        write_path: WritePath::default(),
        member_timeout: None,
        re_add: false,
    }
}

/// True if a member that isn't named may come back: superblocks name a device for a place that has none here.
fn is_counted_on(assembly: &Assembly) -> bool {
    let incoming = assembly.incoming.as_ref().map(|i| i.place);
    let place = assembly.failed().filter(|p| incoming != Some(*p));
    place.is_some_and(|p| assembly.newest().roles.contains(&Role::Active(p as u16)))
}

fn printed(detail: &Detail, args: &DetailArgs) -> Result<String> {
    Ok(match (args.whom.json, args.watch) {
        // One line for each look.
        (true, true) => format!("{}\n", serde_json::to_string(detail)?),
        (true, false) => format!("{}\n", serde_json::to_string_pretty(detail)?),
        (false, true) => format!("{}\n", as_text(detail)),
        (false, false) => as_text(detail),
    })
}

/// `clean, degraded, recovering`
fn state(detail: &Detail) -> String {
    let mut state = String::from(if detail.clean { "clean" } else { "active" });
    let serving = detail.serving.as_ref();
    if serving.is_some_and(|s| s.failed) {
        state.push_str(", FAILED");
    } else if detail.degraded {
        state.push_str(", degraded");
    }
    if let Some(sync) = serving.and_then(|s| s.sync.as_ref()) {
        state.push_str(match sync.action.as_str() {
            "recover" => ", recovering",
            "check" => ", checking",
            "checksum" => ", making checksums",
            _ => ", resyncing",
        });
    }
    state
}

fn as_text(detail: &Detail) -> String {
    let (array_kib, used_kib) = (detail.array_bytes / 1024, detail.member_bytes / 1024);
    let count = |of: &[DeviceState]| {
        let rows = detail.members.iter();
        rows.filter(|m| of.contains(&m.state)).count()
    };
    let (active, spares) = (
        count(&[DeviceState::Active]),
        count(&[DeviceState::Rebuilding, DeviceState::Spare]),
    );
    let faulty = count(&[DeviceState::Faulty]);
    let sized = |kib: u64| format!("{kib}{}", text::human(kib));
    let blank = || ("", String::new());
    let mut lines = vec![
        ("Version", "1.2".into()),
        ("Creation Time", text::time(detail.created_secs)),
        ("Raid Level", format!("raid{}", detail.level)),
        ("Array Size", sized(array_kib)),
        ("Used Dev Size", sized(used_kib)),
        ("Raid Devices", detail.raid_devices.to_string()),
        ("Total Devices", (active + spares + faulty).to_string()),
        ("Persistence", "Superblock is persistent".into()),
        blank(),
        ("Update Time", text::time(detail.updated_secs)),
        ("State", state(detail)),
        ("Active Devices", active.to_string()),
        ("Working Devices", (active + spares).to_string()),
        ("Failed Devices", faulty.to_string()),
        ("Spare Devices", spares.to_string()),
        blank(),
        ("Layout", detail.layout.clone()),
        ("Chunk Size", text::chunk(detail.chunk_bytes / 512)),
        blank(),
        ("Consistency Policy", detail.consistency_policy.clone()),
    ];
    if detail.private_map {
        lines.push(("Private Map", "before the data".into()));
    }
    if detail.checksums {
        lines.push(("Checksums", "of each block of 4 KiB".into()));
    }
    lines.push(blank());
    if let Some(serving) = &detail.serving {
        sync_lines(serving, &mut lines);
        let cached = (serving.stripes, serving.active_stripes);
        lines.extend([
            ("Stripe Cache", format!("{}, {} active", cached.0, cached.1)),
            ("Write Path", serving.write_path.clone()),
            ("Mismatch Count", serving.mismatch_sectors.to_string()),
        ]);
    }
    let corrected = detail.members.iter().map(|m| u64::from(m.corrected_reads));
    match corrected.sum::<u64>() {
        0 if detail.serving.is_none() => {}
        n => lines.extend([("Corrected Reads", n.to_string()), blank()]),
    }
    let misfits = detail.members.iter().map(|m| u64::from(m.checksum_errors));
    let misfits: u64 = misfits.sum();
    if detail.checksums && detail.serving.is_some() {
        lines.extend([("Checksum Errors", misfits.to_string()), blank()]);
    }
    lines.extend([
        ("Name", detail.name.clone()),
        ("UUID", detail.uuid.clone()),
        ("Events", detail.events.to_string()),
        ("Volume", detail.spec.clone()),
        blank(),
    ]);
    let mut out = String::new();
    for (key, value) in lines {
        match key {
            "" => out.push('\n'),
            _ => out.push_str(format!("{key:>18} : {value}").trim_end()),
        }
        if !key.is_empty() {
            out.push('\n');
        }
    }
    out.push_str("    Number   RaidDevice State\n");
    detail.members.iter().for_each(|m| row(m, detail, &mut out));
    for note in &detail.notes {
        out.push_str(&format!("\nNote: {note}"));
    }
    if !detail.notes.is_empty() {
        out.push('\n');
    }
    out
}

fn sync_lines(serving: &Serving, lines: &mut Vec<(&str, String)>) {
    if let Some(sync) = &serving.sync {
        let key = match sync.action.as_str() {
            "recover" => "Rebuild Status",
            "check" => "Check Status",
            "checksum" => "Checksum Status",
            "repair" => "Repair Status",
            _ => "Resync Status",
        };
        let mut status = format!("{}% complete", progress::percent(sync));
        status.push_str(&progress::pace(sync));
        lines.push((key, status));
    }
    if let Some(trouble) = &serving.trouble {
        lines.push(("Last Action", trouble.clone()));
    }
    if let Some(rebuilt) = &serving.rebuilt {
        let how = match rebuilt.by_bitmap {
            true => ", what it missed",
            false => "",
        };
        lines.push((
            "Last Rebuild",
            format!("member {}, {} sectors{how}", rebuilt.place, rebuilt.sectors),
        ));
    }
    if let Some(ms) = serving.member_timeout_ms {
        lines.push(("Member Timeout", format!("{} s", ms as f64 / 1000.0)));
    }
    for away in &serving.away {
        let text = format!("member {}, {}", away.place, away.name);
        lines.push(("Waited For", text));
    }
    if serving.frozen {
        lines.push(("Sync Action", "frozen".into()));
    }
    let (min, max) = (serving.speed_min_kib, serving.speed_max_kib);
    lines.push(("Sync Speed", format!("{min} to {max} KiB/s")));
}

fn row(member: &DetailMember, detail: &Detail, out: &mut String) {
    let or_dash = |n: Option<String>| n.unwrap_or_else(|| "-".into());
    let mut line = format!(
        "{:>8}   {:>6}     {:<17} {}",
        or_dash(member.number.map(|n| n.to_string())),
        or_dash(member.place.map(|n| n.to_string())),
        member.state.text(),
        member.name.as_deref().unwrap_or_default(),
    );
    // Without a server the superblocks are the only source.
    if let (Some(rebuilt), None) = (member.rebuilt_bytes, &detail.serving) {
        let (done, of) = (rebuilt / 1024, detail.member_bytes / 1024);
        line.push_str(&format!(", {done} of {of} KiB"));
    }
    out.push_str(line.trim_end());
    out.push('\n');
}
