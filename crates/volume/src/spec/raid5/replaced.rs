//! Members that were replaced while the array was served: the command line that started it then names a device that it doesn't count on any
//! more, and not the one that it does.

use super::super::{FileSpec, VolumeSpec};
use super::Raid5Spec;
use pvblk_block::Error;
use pvblk_raid5::{Role, SUPER_BYTES, SUPER_SECTOR, Superblock};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Most files of a folder that are looked at for the device that took a place.
const MOST_FILES: usize = 1000;

/// A place that a named device had, and another one has now that isn't named.
struct Replaced {
    place: u16,
    /// Of the device that has it.
    number: u32,
    /// Index of the named member that had the slot before.
    old: usize,
    /// The array's newest superblock among those that are named.
    newest: Superblock,
}

/// Refuses members of which one was replaced, with the spec that starts the array, if the device that has its place can be found.
/// `found`: what is named, in the order of the spec's members, without those that are missing.
pub(super) fn refuse(spec: &Raid5Spec, found: &[(String, Superblock)]) -> Result<(), Error> {
    let all = replaced(found);
    if all.is_empty() {
        return Ok(());
    }
    let mut spec = spec.clone();
    // Where each of them is among the spec's members.
    let named = spec.members.iter().enumerate();
    let at: Vec<usize> = named.filter_map(|(n, m)| m.as_ref().map(|_| n)).collect();
    let mut text = Vec::new();
    for one in &all {
        let (name, sb) = &found[one.old];
        text.push(format!(
            "{name} was thrown out of the array (events {}, newest {}), and another device has its place, {}",
            sb.events, one.newest.events, one.place
        ));
        let new = spec.members.iter().flatten().find_map(|m| search(m, one));
        match new {
            Some(new) => spec.members[at[one.old]] = Some(new),
            None => {
                text.push(format!(
                    "name that one instead: the server logged it when it was rebuilt; or write [missing] for {name} to start without it"
                ));
                return Err(Error::config(text.join("; ")));
            }
        }
    }
    Err(Error::config(format!(
        "{}: start it with {spec}",
        text.join("; ")
    )))
}

fn replaced(found: &[(String, Superblock)]) -> Vec<Replaced> {
    let members = found.iter().map(|(_, sb)| sb);
    let active = members
        .clone()
        .filter(|sb| matches!(sb.role(), Role::Active(_)));
    let Some(newest) = active.max_by_key(|sb| sb.events) else {
        return Vec::new();
    };
    // Of several arrays: that is another mistake, and told by who assembles them.
    if members.clone().any(|sb| sb.set_uuid != newest.set_uuid) {
        return Vec::new();
    }
    let is_fresh = |sb: &Superblock| sb.events.saturating_add(1) >= newest.events;
    let entry = |number: usize| newest.roles.get(number).copied();
    let mut all = Vec::new();
    for (old, (_, sb)) in found.iter().enumerate() {
        let Role::Active(place) = sb.role() else {
            continue;
        };
        if is_fresh(sb) && entry(sb.dev_number as usize) == Some(sb.role()) {
            continue;
        }
        let has_place = |n: &usize| entry(*n) == Some(Role::Active(place));
        let numbers: Vec<usize> = (0..newest.roles.len()).filter(has_place).collect();
        let is_named = |n: &usize| {
            let mut fresh = members.clone().filter(|sb| is_fresh(sb));
            fresh.any(|sb| sb.dev_number as usize == *n)
        };
        if let (Some(number), false) = (numbers.first(), numbers.iter().any(is_named)) {
            all.push(Replaced {
                place,
                number: *number as u32,
                old,
                newest: newest.clone(),
            });
        }
    }
    all
}

/// The device that has the place, if it is a file in the folder of a member; nothing else is opened that nobody named.
fn search(member: &VolumeSpec, wanted: &Replaced) -> Option<VolumeSpec> {
    let VolumeSpec::File(file) = member else {
        return None;
    };
    let folder = match file.path.parent()? {
        here if here == Path::new("") => Path::new("."),
        folder => folder,
    };
    let entries = std::fs::read_dir(folder).ok()?.take(MOST_FILES).flatten();
    let mut files: Vec<PathBuf> = entries
        .map(|e| file.path.with_file_name(e.file_name()))
        .collect();
    files.sort();
    let found = files.into_iter().find(|path| is_wanted(path, wanted))?;
    Some(VolumeSpec::File(FileSpec {
        path: found,
        size_bytes: None,
        ..file.clone()
    }))
}

fn is_wanted(path: &Path, wanted: &Replaced) -> bool {
    let is_file = std::fs::metadata(path).is_ok_and(|m| m.is_file());
    let superblock = || {
        let mut bytes = [0; SUPER_BYTES];
        let file = std::fs::File::open(path).ok()?;
        file.read_exact_at(&mut bytes, SUPER_SECTOR * 512).ok()?;
        Superblock::parse(&bytes).ok()
    };
    is_file
        && superblock().is_some_and(|sb| {
            sb.set_uuid == wanted.newest.set_uuid
                && sb.dev_number == wanted.number
                && sb.role() == Role::Active(wanted.place)
                && sb.events.saturating_add(1) >= wanted.newest.events
        })
}
