//! `pvblk raid scan`: the arrays that are in files, one volume a line, as `mdadm --examine --scan`.

use super::args::ScanArgs;
use crate::output::{print_line, tell};
use anyhow::{Result, bail};
use pvblk_raid5::{Candidate, Role, Superblock, select, uuid_text};
use pvblk_volume::{Candidates, FileSpec, Found, Members, Raid5Spec, VolumeSpec, in_process, look};
use serde::Serialize;
use std::path::{Path, PathBuf};

#[derive(Serialize)]
struct Scan {
    arrays: Vec<Array>,
    /// Files that may be members and can't be used, with the reason.
    unusable: Vec<String>,
    /// Files that were looked at.
    files: usize,
}

/// An array of which at least one member was found.
#[derive(Serialize)]
struct Array {
    uuid: String,
    name: String,
    level: i32,
    raid_devices: u32,
    /// The volume that serves it, if it can be served.
    spec: Option<String>,
    /// Why it can't.
    problem: Option<String>,
    members: Vec<Device>,
    /// Devices that aren't used, a line each.
    left_out: Vec<String>,
}

#[derive(Serialize)]
struct Device {
    path: String,
    number: u32,
    /// Its place; null for a spare.
    place: Option<u16>,
    events: u64,
}

/// The members of one array that were found.
struct Seen {
    uuid: [u8; 16],
    candidates: Vec<Candidate>,
    /// Numbers of the patterns that found them.
    patterns: Vec<usize>,
}

pub fn run(args: &ScanArgs) -> Result<()> {
    let patterns: Vec<PathBuf> = args
        .patterns
        .iter()
        .map(|p| std::path::absolute(p.strip_prefix("file:").unwrap_or(p)))
        .collect::<Result<_, _>>()?;
    let texts: Vec<&Path> = patterns.iter().map(PathBuf::as_path).collect();
    let looks = look(&in_process(), &texts)?;
    let (mut seen, mut unusable): (Vec<Seen>, Vec<String>) = (Vec::new(), Vec::new());
    let files = looks.len();
    for one in looks {
        let path = one.path.display().to_string();
        let superblock = match one.found {
            Found::Superblock(sb) => *sb,
            Found::Nothing => continue,
            Found::Unusable(why) => {
                unusable.push(format!("{path} is left out: {why}"));
                continue;
            }
        };
        let uuid = superblock.set_uuid;
        let at = seen
            .iter()
            .position(|s| s.uuid == uuid)
            .unwrap_or(seen.len());
        if at == seen.len() {
            seen.push(Seen {
                uuid,
                candidates: Vec::new(),
                patterns: Vec::new(),
            });
        }
        seen[at].candidates.push(Candidate {
            name: path,
            superblock,
        });
        if !seen[at].patterns.contains(&one.pattern) {
            seen[at].patterns.push(one.pattern);
        }
    }
    let scan = Scan {
        arrays: seen.iter().map(|s| array(s, &texts)).collect(),
        unusable,
        files,
    };
    if args.json {
        return print_line(&serde_json::to_string_pretty(&scan)?);
    }
    for why in &scan.unusable {
        tell!("{why}");
    }
    for array in &scan.arrays {
        for why in &array.left_out {
            tell!("{why}");
        }
        match (&array.spec, &array.problem) {
            (Some(spec), _) => print_line(spec)?,
            (None, why) => tell!(
                "array {} isn't complete: {}",
                array.uuid,
                why.as_deref().unwrap_or_default()
            ),
        }
    }
    if scan.arrays.is_empty() {
        bail!("no array is in the {files} files that were looked at");
    }
    Ok(())
}

fn array(seen: &Seen, patterns: &[&Path]) -> Array {
    let newest = seen.candidates.iter().map(|c| &c.superblock);
    let newest = newest.max_by_key(|sb| sb.events);
    let of = |f: fn(&Superblock) -> i64| newest.map_or(0, f);
    let mut array = Array {
        uuid: uuid_text(&seen.uuid),
        name: newest.map_or_else(String::new, Superblock::name),
        level: of(|sb| sb.level.into()) as i32,
        raid_devices: of(|sb| sb.raid_disks.into()) as u32,
        spec: None,
        problem: None,
        members: Vec::new(),
        left_out: Vec::new(),
    };
    let selection = match select(&seen.candidates, false) {
        Ok(selection) => selection,
        Err(e) => {
            array.problem = Some(e.to_string());
            return array;
        }
    };
    array.left_out = selection.left_out.into_iter().map(|(_, why)| why).collect();
    for n in selection.taken {
        let Candidate { name, superblock } = &seen.candidates[n];
        array.members.push(Device {
            path: name.clone(),
            number: superblock.dev_number,
            place: match superblock.role() {
                Role::Active(place) => Some(place),
                _ => None,
            },
            events: superblock.events,
        });
    }
    array.problem = match (array.level, selection.absent.as_slice()) {
        (5, []) => None,
        (5, absent) => {
            let each: Vec<String> = absent.iter().map(|a| a.place.to_string()).collect();
            Some(format!("no file is member {}", each.join(" or ")))
        }
        (level, _) => Some(format!("level {level} isn't served, only 5")),
    };
    if array.problem.is_none() {
        let within = seen.patterns.iter();
        let within = within.map(|&n| VolumeSpec::File(FileSpec::new(patterns[n])));
        let found = Candidates {
            uuid: seen.uuid,
            within: within.collect(),
            missing: false,
        };
        let spec = Raid5Spec {
            of: Members::Found(found),
            ..Raid5Spec::new(Vec::new())
        };
        array.spec = Some(VolumeSpec::Raid5(spec).to_string());
    }
    array
}
