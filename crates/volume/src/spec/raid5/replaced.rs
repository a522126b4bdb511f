//! Members that were replaced while the array was served: the command line that started it then names a device that it doesn't count on any
//! more, and not the one that does.

use super::super::{FileSpec, VolumeSpec};
use super::found::{Candidates, with_path, without_size};
use super::look::{Found, look};
use super::{Members, Raid5Spec};
use crate::opener::FileOpener;
use pvblk_block::Error;
use pvblk_raid5 as raid5;
use pvblk_raid5::{Candidate, Role, Superblock, time_text, uuid_text};
use rustix::fs::FileType;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A place that a named device had, and another one has now that isn't named.
struct Replaced {
    place: u16,
    /// Index of the named member that had the slot before.
    old: usize,
    /// Of the device that has it, in the newest superblock of those that are named.
    number: usize,
    newest_events: u64,
}

/// Refuses members of which one was replaced, with the specification that starts the array, if its members can be found.
/// `found`: what is named, in the order of `members`, without those that are missing.
pub(super) fn refuse(
    spec: &Raid5Spec,
    members: &[Option<VolumeSpec>],
    found: &[(String, Superblock)],
    opener: &Arc<dyn FileOpener>,
) -> Result<(), Error> {
    let all = replaced(found);
    let Some(first) = all.first() else {
        return Ok(());
    };
    let text: Vec<String> = all.iter().map(|one| one.text(found)).collect();
    let text = text.join("; ");
    let uuid = found[first.old].1.set_uuid;
    let folders = Beside::of(members, uuid, opener);
    let now = folders.as_ref().and_then(|f| f.spec(spec, members, found));
    Err(Error::config(match (now, folders) {
        (Some(now), Some(folders)) => format!(
            "{text}: start it with {now}; or with {}, which finds members whatever they are replaced by",
            folders.by_uuid()
        ),
        _ => format!(
            "{text}: write raid5:uuid={},in=DIR/* with the folder of its members for DIR, or name that device instead (the server logged it when it was \
             rebuilt), or write [missing] for {} to start without it",
            uuid_text(&uuid),
            found[first.old].0,
        ),
    }))
}

impl Replaced {
    fn text(&self, found: &[(String, Superblock)]) -> String {
        let (name, sb) = &found[self.old];
        format!(
            "{name} is no member of the array any more: it was thrown out after {} UTC (events {}, newest {}), and device number {} has its place, {}",
            time_text(sb.utime),
            sb.events,
            self.newest_events,
            self.number,
            self.place
        )
    }
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
                number: *number,
                old,
                newest_events: newest.events,
            });
        }
    }
    all
}

/// The files in the folders of the named members that are of the array.
struct Beside {
    uuid: [u8; 16],
    /// Patterns, one for each folder.
    patterns: Vec<PathBuf>,
    files: Vec<PathBuf>,
    candidates: Vec<Candidate>,
}

impl Beside {
    /// `None` if a member isn't a regular file, or a folder can't be looked at. The folder of a block device has devices that nobody named.
    fn of(
        members: &[Option<VolumeSpec>],
        uuid: [u8; 16],
        opener: &Arc<dyn FileOpener>,
    ) -> Option<Beside> {
        let mut patterns: Vec<PathBuf> = Vec::new();
        for member in members.iter().flatten() {
            let path = &member.file()?.path;
            if opener.stat(path).ok()?.kind() != FileType::RegularFile {
                return None;
            }
            let folder = path.parent()?.to_str()?;
            let pattern = Path::new(&glob::Pattern::escape(folder)).join("*");
            if !patterns.contains(&pattern) {
                patterns.push(pattern);
            }
        }
        let all: Vec<&Path> = patterns.iter().map(PathBuf::as_path).collect();
        let (mut files, mut candidates) = (Vec::new(), Vec::new());
        for one in look(opener, &all).ok()? {
            if let Found::Superblock(superblock) = one.found
                && superblock.set_uuid == uuid
            {
                candidates.push(Candidate {
                    name: one.path.display().to_string(),
                    superblock: *superblock,
                });
                files.push(one.path);
            }
        }
        Some(Beside {
            uuid,
            patterns,
            files,
            candidates,
        })
    }

    fn by_uuid(&self) -> VolumeSpec {
        let within = self.patterns.iter();
        let within = within.map(|p| VolumeSpec::File(FileSpec::new(p)));
        VolumeSpec::Raid5(Raid5Spec {
            of: Members::Found(Candidates {
                uuid: self.uuid,
                within: within.collect(),
                missing: false,
            }),
            ..Raid5Spec::new(Vec::new())
        })
    }

    /// The list that starts the array, with the options of the one that doesn't. A device that is named keeps the volume that it is named by, others get that of the
    /// member that had their place.
    fn spec(
        &self,
        spec: &Raid5Spec,
        members: &[Option<VolumeSpec>],
        found: &[(String, Superblock)],
    ) -> Option<VolumeSpec> {
        let selection = raid5::select(&self.candidates, false).ok()?;
        if !selection.absent.is_empty() {
            return None;
        }
        let named: Vec<&VolumeSpec> = members.iter().flatten().collect();
        let volume = |n: usize| {
            let sb = &self.candidates[n].superblock;
            let same = found
                .iter()
                .position(|(_, s)| s.device_uuid == sb.device_uuid);
            if let Some(same) = same {
                return named[same].clone();
            }
            let before = found.iter().position(|(_, s)| s.role() == sb.role());
            without_size(with_path(named[before.unwrap_or(0)], &self.files[n]))
        };
        let role = |n: &usize| self.candidates[*n].superblock.role();
        let places = selection.taken.iter().filter_map(|n| match role(n) {
            Role::Active(place) => Some(place),
            _ => None,
        });
        let filled: HashSet<u16> = places.collect();
        let count = self.candidates.first()?.superblock.raid_disks as u16;
        let mut order = selection.taken.clone();
        order.sort_by_key(|n| match role(n) {
            Role::Active(place) => place,
            _ => u16::MAX,
        });
        let mut list: Vec<Option<VolumeSpec>> =
            order.into_iter().map(|n| Some(volume(n))).collect();
        list.extend((0..count).filter(|p| !filled.contains(p)).map(|_| None));
        let spec = Raid5Spec {
            of: Members::Named(list),
            ..spec.clone()
        };
        let spec = VolumeSpec::Raid5(spec);
        spec.validate().is_ok().then_some(spec)
    }
}
