//! `pvblk raid examine`: prints a member's superblock, line for line as `mdadm --examine` does (times in
//! UTC).

use super::args::ExamineArgs;
use super::{member, open_to_read, text};
use crate::output::{print, print_line};
use anyhow::Result;
use pvblk_raid5::{
    Feature, Kept, Layout, MemberNames, Policy, Role, Superblock, read_superblock, sleepy,
    uuid_text,
};
use pvblk_volume::{SpecNames, spec_in_folder};
use serde::Serialize;
use std::fmt::Write as _;

pub fn run(args: &ExamineArgs) -> Result<()> {
    let mut all = Vec::new();
    for name in &args.members {
        let device = open_to_read(name)?;
        let sb = read_superblock(name, &device, &mut sleepy())?;
        if args.json {
            all.push(Examined::of(name, &sb, device.capacity_sectors()));
            continue;
        }
        print(&format!(
            "{name}:\n{}",
            describe(&sb, device.capacity_sectors())
        ))?;
        if let Some(spec) = found_by(name, &sb) {
            print_line(&format!("     Found By : {spec}"))?;
        }
        // It can be read, but perhaps not be used.
        if let Err(e) = sb.check(device.capacity_sectors()) {
            print_line(&format!("     Note : {e}"))?;
        }
    }
    if args.json {
        print_line(&serde_json::to_string_pretty(&all)?)?;
    }
    Ok(())
}

/// A member's superblock.
#[derive(Serialize)]
struct Examined {
    member: String,
    array_uuid: String,
    device_uuid: String,
    name: String,
    level: i32,
    raid_devices: u32,
    number: u32,
    /// As `role` of mdadm's `Device Role`: `Active device 0`, `spare`.
    role: String,
    /// Null without a place.
    place: Option<u16>,
    array_state: String,
    clean: bool,
    events: u64,
    created_secs: u64,
    updated_secs: u64,
    layout: &'static str,
    chunk_bytes: u64,
    member_bytes: u64,
    data_offset_bytes: u64,
    /// Null unless it is being rebuilt.
    rebuilt_bytes: Option<u64>,
    /// The volume that the member is of.
    spec: Option<String>,
    /// Reason why it can't be used, or null.
    problem: Option<String>,
}

impl Examined {
    fn of(name: &str, sb: &Superblock, device_sectors: u64) -> Examined {
        let seconds = |stamp: u64| stamp & ((1 << 40) - 1);
        let rebuilds = sb.has(Feature::RECOVERY_OFFSET);
        Examined {
            member: name.to_owned(),
            array_uuid: uuid_text(&sb.set_uuid),
            device_uuid: uuid_text(&sb.device_uuid),
            name: sb.name(),
            level: sb.level,
            raid_devices: sb.raid_disks,
            number: sb.dev_number,
            role: role(sb.role()),
            place: match sb.role() {
                Role::Active(place) => Some(place),
                _ => None,
            },
            array_state: array_state(sb),
            clean: sb.is_clean(),
            events: sb.events,
            created_secs: seconds(sb.ctime),
            updated_secs: seconds(sb.utime),
            layout: Layout::md_name(sb.layout),
            chunk_bytes: u64::from(sb.chunk_sectors) * 512,
            member_bytes: sb.size_sectors.saturating_mul(512),
            data_offset_bytes: sb.data_offset_sectors.saturating_mul(512),
            rebuilt_bytes: rebuilds.then(|| sb.recovered_sectors().saturating_mul(512)),
            spec: found_by(name, sb),
            problem: sb.check(device_sectors).err().map(|e| e.to_string()),
        }
    }
}

/// The volume that the member is of, among the files of its folder. Only a RAID-5 array has one, and only members that are files are found.
fn found_by(name: &str, sb: &Superblock) -> Option<String> {
    if sb.level != 5 {
        return None;
    }
    let file = SpecNames::default().file(&member(name).ok()?.to_string())?;
    spec_in_folder(sb, &file)
}

fn describe(sb: &Superblock, device_sectors: u64) -> String {
    let mut lines: Vec<(&str, String)> = vec![
        ("Magic", "a92b4efc".into()),
        ("Version", "1.2".into()),
        ("Feature Map", format!("{:#x}", sb.feature_map)),
        ("Array UUID", uuid_text(&sb.set_uuid)),
        ("Name", sb.name()),
        ("Creation Time", text::time(sb.ctime)),
        ("Raid Level", level(sb.level)),
        ("Raid Devices", sb.raid_disks.to_string()),
        ("", String::new()),
    ];
    let avail = sb.data_size_sectors;
    lines.push((
        "Avail Dev Size",
        format!("{avail} sectors{}", text::human(avail / 2)),
    ));
    let array_kib = sb
        .size_sectors
        .saturating_mul(u64::from(sb.raid_disks.saturating_sub(1)))
        / 2;
    lines.push((
        "Array Size",
        format!("{array_kib} KiB{}", text::human(array_kib)),
    ));
    if sb.size_sectors != avail {
        let used = sb.size_sectors;
        lines.push((
            "Used Dev Size",
            format!("{used} sectors{}", text::human(used / 2)),
        ));
    }
    lines.push(("Data Offset", format!("{} sectors", sb.data_offset_sectors)));
    lines.push(("Super Offset", "8 sectors".into()));
    lines.push(("Unused Space", unused(sb, device_sectors)));
    if sb.has(Feature::RECOVERY_OFFSET) {
        lines.push((
            "Recovery Offset",
            format!("{} sectors", sb.recovery_offset_sectors),
        ));
    }
    let state = if sb.is_clean() { "clean" } else { "active" };
    lines.push(("State", state.into()));
    lines.push(("Device UUID", uuid_text(&sb.device_uuid)));
    lines.push(("", String::new()));
    match sb.policy() {
        Policy::Resync => {}
        Policy::Bitmap { sector } => lines.push((
            "Internal Bitmap",
            format!("{} sectors from superblock", sector.wrapping_sub(8)),
        )),
        Policy::Ppl(log) => lines.push((
            "PPL",
            format!(
                "{} sectors at offset {} sectors from superblock",
                log.sectors,
                log.sector.wrapping_sub(8)
            ),
        )),
    }
    if let (true, Some(map)) = (sb.keeps_map(), sb.private_map()) {
        let offset = map.sector.wrapping_sub(8);
        let text = format!("{} sectors at offset {offset} sectors", map.sectors);
        lines.push(("Private Map", format!("{text} from superblock")));
    }
    if let (Kept::MapAndSums, Some(sums)) = (sb.kept(), sb.sums_area()) {
        let offset = sums.sector.wrapping_sub(8);
        let text = format!("{} sectors at offset {offset} sectors", sums.sectors);
        lines.push(("Checksums", format!("{text} from superblock")));
    }
    lines.push(("Update Time", text::time(sb.utime)));
    if let Some(log) = sb.bad_block_log() {
        let bad = match sb.has(Feature::BAD_BLOCKS) {
            true => " - bad blocks present.",
            false => "",
        };
        lines.push((
            "Bad Block Log",
            format!(
                "{} entries available at offset {} sectors{bad}",
                log.sectors * 64,
                sb.bblog_offset_sectors
            ),
        ));
    }
    // A superblock whose checksum doesn't match was refused before.
    let bytes = sb.encode();
    let sum = u32::from_le_bytes([bytes[216], bytes[217], bytes[218], bytes[219]]);
    lines.push(("Checksum", format!("{sum:x} - correct")));
    lines.push(("Events", sb.events.to_string()));
    lines.push(("", String::new()));
    lines.push(("Layout", Layout::md_name(sb.layout).into()));
    lines.push(("Chunk Size", text::chunk(u64::from(sb.chunk_sectors))));
    lines.push(("", String::new()));

    let mut out = String::new();
    for (key, value) in lines {
        let _ = match key {
            "" => writeln!(out),
            _ => writeln!(out, "{key:>15} : {value}"),
        };
    }
    let _ = writeln!(out, "   Device Role : {}", role(sb.role()));
    let _ = writeln!(
        out,
        "   Array State : {} ('A' == active, '.' == missing, 'R' == replacing)",
        array_state(sb)
    );
    out
}

fn level(level: i32) -> String {
    match level {
        5 | 0 | 1 | 4 | 6 | 10 => format!("raid{level}"),
        -1 => "linear".into(),
        other => other.to_string(),
    }
}

/// Room that nothing uses: between the metadata and the data, and after the data.
fn unused(sb: &Superblock, device_sectors: u64) -> String {
    // mdadm leaves 36 KiB from the superblock on to the kernel, whatever is there.
    let mut first = 8 + 72;
    if let Policy::Ppl(log) = sb.policy() {
        first = first.max(log.sector.saturating_add(log.sectors));
    }
    if let Some(log) = sb.bad_block_log() {
        first = first.max(log.sector.saturating_add(log.sectors));
    }
    let before = i128::from(sb.data_offset_sectors) - i128::from(first);
    let after = i128::from(device_sectors)
        - i128::from(sb.data_offset_sectors)
        - i128::from(sb.size_sectors);
    format!("before={before} sectors, after={after} sectors")
}

fn role(role: Role) -> String {
    match role {
        Role::Active(place) => format!("Active device {place}"),
        Role::Spare | Role::Faulty => "spare".into(),
        Role::Journal => "Journal".into(),
        Role::Unknown(number) => format!("unknown ({number:#x})"),
    }
}

/// A letter for each place.
fn array_state(sb: &Superblock) -> String {
    let places = u16::try_from(sb.raid_disks).unwrap_or(0);
    let count = |place| {
        sb.roles
            .iter()
            .filter(|r| **r == Role::Active(place))
            .count()
    };
    (0..places)
        .map(|place| match count(place) {
            0 => '.',
            1 => 'A',
            _ => 'R',
        })
        .collect()
}
