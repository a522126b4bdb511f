//! `pvblk raid detail`: the array that members are, as `mdadm --detail` prints it (times in UTC).

use super::create::policy;
use super::{DetailArgs, open_to_read, text};
use anyhow::Result;
use pvblk_volume::raid5::{
    AssembleOptions, Assembly, Role, Superblock, assemble, sleepy, uuid_text,
};
use serde_json::{Value, json};

pub fn run(args: &DetailArgs) -> Result<()> {
    let mut devices = Vec::new();
    for name in &args.members {
        devices.push((name.clone(), open_to_read(name)?));
    }
    let assembly = assemble(devices, &AssembleOptions::default(), &mut sleepy())?;
    match args.json {
        true => println!("{:#}", as_json(&assembly)),
        false => print!("{}", as_text(&assembly)),
    }
    Ok(())
}

fn state(assembly: &Assembly) -> String {
    let mut state = String::from(if assembly.dirty { "active" } else { "clean" });
    if assembly.failed().is_some() {
        state.push_str(", degraded");
    }
    state
}

/// Number in the table of roles of each place, state and name.
fn rows(assembly: &Assembly) -> Vec<(Option<u32>, Option<usize>, &'static str, &str)> {
    let mut rows = Vec::new();
    for (place, member) in assembly.members.iter().enumerate() {
        rows.push(match member {
            Some(m) => {
                let number = m.superblock.dev_number;
                (Some(number), Some(place), "active sync", m.name.as_str())
            }
            None => (None, Some(place), "removed", ""),
        });
    }
    for spare in &assembly.spares {
        let state = match spare.superblock.role() {
            Role::Active(_) => "spare rebuilding",
            Role::Faulty => "faulty",
            _ => "spare",
        };
        let number = spare.superblock.dev_number;
        rows.push((Some(number), None, state, spare.name.as_str()));
    }
    rows
}

fn as_text(assembly: &Assembly) -> String {
    let sb: &Superblock = assembly.newest();
    let g = assembly.geometry;
    let active = assembly.present().count();
    let spares = assembly.spares.len();
    let (array_kib, used_kib) = (g.capacity_sectors() / 2, g.member_sectors() / 2);
    let lines = [
        ("Version", "1.2".into()),
        ("Creation Time", text::time(sb.ctime)),
        ("Raid Level", "raid5".into()),
        (
            "Array Size",
            format!("{array_kib}{}", text::human(array_kib)),
        ),
        (
            "Used Dev Size",
            format!("{used_kib}{}", text::human(used_kib)),
        ),
        ("Raid Devices", g.members().to_string()),
        ("Total Devices", (active + spares).to_string()),
        ("Persistence", "Superblock is persistent".into()),
        ("", String::new()),
        ("Update Time", text::time(sb.utime)),
        ("State", state(assembly)),
        ("Active Devices", active.to_string()),
        ("Working Devices", (active + spares).to_string()),
        ("Failed Devices", "0".into()),
        ("Spare Devices", spares.to_string()),
        ("", String::new()),
        ("Layout", g.layout().to_string()),
        ("Chunk Size", text::chunk(g.chunk_sectors())),
        ("", String::new()),
        ("Consistency Policy", policy(assembly.policy()).into()),
        ("", String::new()),
        ("Name", sb.name()),
        ("UUID", uuid_text(&sb.set_uuid)),
        ("Events", sb.events.to_string()),
        ("", String::new()),
    ];
    let mut out = String::new();
    for (key, value) in lines {
        match key {
            "" => out.push('\n'),
            _ => out.push_str(&format!("{key:>18} : {value}\n")),
        }
    }
    out.push_str("    Number   RaidDevice State\n");
    let or_dash = |n: Option<String>| n.unwrap_or_else(|| "-".into());
    for (number, place, state, name) in rows(assembly) {
        let line = format!(
            "{:>8}   {:>6}     {state:<17} {name}",
            or_dash(number.map(|n| n.to_string())),
            or_dash(place.map(|n| n.to_string())),
        );
        out.push_str(line.trim_end());
        out.push('\n');
    }
    for note in &assembly.notes {
        out.push_str(&format!("\nNote: {note}"));
    }
    if !assembly.notes.is_empty() {
        out.push('\n');
    }
    out
}

fn as_json(assembly: &Assembly) -> Value {
    let sb = assembly.newest();
    let g = assembly.geometry;
    let members: Vec<Value> = rows(assembly)
        .into_iter()
        .map(|(number, place, state, name)| {
            json!({
                "number": number,
                "place": place,
                "state": state,
                "name": (!name.is_empty()).then_some(name),
            })
        })
        .collect();
    json!({
        "name": sb.name(),
        "uuid": uuid_text(&sb.set_uuid),
        "created_secs": sb.ctime & ((1 << 40) - 1),
        "updated_secs": sb.utime & ((1 << 40) - 1),
        "events": sb.events,
        "level": 5,
        "raid_devices": g.members(),
        "layout": g.layout().to_string(),
        "chunk_bytes": g.chunk_sectors() * 512,
        "array_bytes": g.capacity_sectors() * 512,
        "member_bytes": g.member_sectors() * 512,
        "consistency_policy": policy(assembly.policy()),
        "clean": !assembly.dirty,
        "degraded": assembly.failed().is_some(),
        "in_sync_bytes": assembly.in_sync_sectors() * 512,
        "missing": assembly.failed(),
        "members": members,
        "notes": assembly.notes,
    })
}
