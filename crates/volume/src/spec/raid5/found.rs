//! An array that is found by its UUID among files and block devices.

use super::super::{FileSpec, Need, VolumeSpec};
use super::look::{Found, Look, look, matches, pattern_problem};
use super::{Members, Raid5Spec};
use crate::opener::FileOpener;
use pvblk_block::{BlockDevice, Error};
use pvblk_raid5 as raid5;
use pvblk_raid5::{Assembly, Candidate, SpecParts, Superblock, uuid_text};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Most values of `in=`.
const MOST_PATTERNS: usize = 256;
/// Most times that all is looked at because superblocks change meanwhile.
const TRIES: usize = 4;
/// Most candidates that the log names.
const MOST_NOTES: usize = 32;
/// Most candidates that an error names.
const MOST_NAMES: usize = 8;

/// `uuid=UUID,in=PATTERN[,in=PATTERN]…[,missing]`
#[derive(Clone, Debug, PartialEq)]
pub struct Candidates {
    pub uuid: [u8; 16],
    /// Each stands on a file whose path is a pattern: `file:/srv/*.img,direct`, `delay:1ms:file:/srv/*.img`. Its options are every candidate's.
    pub within: Vec<VolumeSpec>,
    /// Start without a member that the others count on.
    pub missing: bool,
}

/// A candidate of the array.
struct Seen {
    spec: VolumeSpec,
    candidate: Candidate,
}

/// The result of a look.
struct Sight {
    seen: Vec<Seen>,
    /// Candidates that can't be used, with the reason.
    unusable: Vec<String>,
    /// Files that were looked at.
    files: usize,
}

impl Candidates {
    pub(super) fn problem(&self) -> Option<String> {
        if self.within.is_empty() {
            return Some("in= is missing: say which files may be members, as in raid5:uuid=UUID,in=/srv/md/*.img".into());
        }
        if self.within.len() > MOST_PATTERNS {
            return Some(format!(
                "in= may be given {MOST_PATTERNS} times, and no more"
            ));
        }
        for within in &self.within {
            let Some(file) = within.file() else {
                return Some(format!(
                    "in=[{within}]: candidates are files and block devices; name members of other kinds in brackets instead"
                ));
            };
            if file.size_bytes.is_some() {
                return Some(format!(
                    "in=[{within}]: `size` makes files, and candidates are there already"
                ));
            }
            let why = pattern_problem(&file.path).map(|why| format!("in=[{within}]: {why}"));
            if let Some(why) = why.or_else(|| within.problem()) {
                return Some(why);
            }
        }
        None
    }

    /// Finds the members, opens and locks them, and makes sure that they are what they were when they were chosen. Writes nothing.
    pub(super) fn assemble(&self, array: &Raid5Spec, need: &Need) -> Result<Assembly, Error> {
        for _ in 0..TRIES {
            let Sight {
                seen,
                unusable,
                files,
            } = self.look(&need.opener)?;
            let uuid = uuid_text(&self.uuid);
            if seen.is_empty() {
                return Err(Error::config(format!(
                    "no candidate is of array {uuid}: {files} files were looked at{}; `pvblk raid scan PATTERN` prints the arrays that are there",
                    listed(&unusable)
                )));
            }
            let candidates: Vec<Candidate> = seen.iter().map(|s| s.candidate.clone()).collect();
            let selection = raid5::select(&candidates, array.force)
                .map_err(|e| e.context(format!("array {uuid}")))?;
            let left_out: Vec<String> =
                selection.left_out.into_iter().map(|(_, why)| why).collect();
            let notes: Vec<String> = left_out.into_iter().chain(unusable).collect();
            tracing::info!(
                "raid5: array {uuid}: {} of {files} files are of it, and {} are used",
                seen.len(),
                selection.taken.len()
            );
            match (selection.absent.as_slice(), self.missing) {
                ([], _) | ([_], true) => {}
                (absent, _) => {
                    let each = absent
                        .iter()
                        .map(|a| format!("{} (number {})", a.place, a.number));
                    let or = match absent.len() {
                        1 => ", or write `missing` to start without it",
                        _ => ": all but one are needed",
                    };
                    return Err(Error::config(format!(
                        "array {uuid}: no candidate is member {}, which the others count on{}; name its file with another in={or}",
                        each.collect::<Vec<_>>().join(" or "),
                        listed(&notes)
                    )));
                }
            }
            let mut devices: Vec<(String, Arc<dyn BlockDevice>)> = Vec::new();
            let mut changed = false;
            for &n in &selection.taken {
                let device = seen[n].spec.as_member().open_for(need)?;
                let name = seen[n].candidate.name.clone();
                let now = raid5::read_superblock(&name, &device, &mut raid5::sleepy())?;
                changed |= now != seen[n].candidate.superblock;
                devices.push((name, device));
            }
            if changed {
                continue;
            }
            let mut assembly = raid5::assemble(devices, &array.options(), &mut raid5::sleepy())
                .map_err(|e| match notes.is_empty() {
                    true => e,
                    false => e.context(listed(&notes).trim_start_matches("; ").to_owned()),
                })?;
            let more = notes.len().saturating_sub(MOST_NOTES);
            let more = (more > 0).then(|| format!("{more} more candidates can't be used"));
            let notes = notes.into_iter().take(MOST_NOTES).chain(more);
            assembly.notes.splice(0..0, notes);
            return Ok(assembly);
        }
        Err(Error::config(format!(
            "array {}: its superblocks change while they are looked at, so another program uses it: stop that first",
            uuid_text(&self.uuid)
        )))
    }

    fn look(&self, opener: &Arc<dyn FileOpener>) -> Result<Sight, Error> {
        let patterns: Option<Vec<&Path>> = self.within.iter().map(pattern).collect();
        let looks = look(opener, &patterns.unwrap_or_default())?;
        let (mut seen, mut unusable) = (Vec::new(), Vec::new());
        let files = looks.len();
        for Look {
            path,
            pattern,
            found,
        } in looks
        {
            match found {
                Found::Superblock(sb) if sb.set_uuid == self.uuid => {
                    let spec = with_path(&self.within[pattern], &path);
                    seen.push(Seen {
                        candidate: Candidate {
                            name: spec.to_string(),
                            superblock: *sb,
                        },
                        spec,
                    });
                }
                Found::Unusable(why) => {
                    unusable.push(format!("{} is left out: {why}", path.display()));
                }
                Found::Superblock(_) | Found::Nothing => {
                    tracing::debug!("raid5: {} is no member of the array", path.display());
                }
            }
        }
        Ok(Sight {
            seen,
            unusable,
            files,
        })
    }
}

impl fmt::Display for Candidates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "uuid={}", uuid_text(&self.uuid))?;
        for within in &self.within {
            write!(f, ",in={}", InValue(within))?;
        }
        f.write_str(if self.missing { ",missing" } else { "" })
    }
}

/// A value of `in=`: a bare pattern where that says it all.
struct InValue<'a>(&'a VolumeSpec);

impl fmt::Display for InValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let VolumeSpec::File(file) = self.0
            && *file == FileSpec::new(&file.path)
            && let Some(path) = file.path.to_str()
            && !path.contains(',')
            && !path.starts_with('[')
            && !path.starts_with("file:")
        {
            return f.write_str(path);
        }
        write!(f, "[{}]", self.0)
    }
}

/// `; A; B; and 3 more`
fn listed(lines: &[String]) -> String {
    let more = lines.len().saturating_sub(MOST_NAMES);
    let mut text: String = lines
        .iter()
        .take(MOST_NAMES)
        .map(|l| format!("; {l}"))
        .collect();
    if more > 0 {
        text.push_str(&format!("; and {more} more"));
    }
    text
}

fn pattern(spec: &VolumeSpec) -> Option<&Path> {
    spec.file().map(|file| file.path.as_path())
}

/// The same volume on another file.
pub(super) fn with_path(spec: &VolumeSpec, path: &Path) -> VolumeSpec {
    let mut spec = spec.clone();
    if let Some(file) = leaf_mut(&mut spec) {
        file.path = path.to_owned();
    }
    spec
}

fn leaf_mut(spec: &mut VolumeSpec) -> Option<&mut FileSpec> {
    match spec {
        VolumeSpec::Delay(_, inner) | VolumeSpec::Fault(_, inner) | VolumeSpec::Cache(_, inner) => {
            leaf_mut(inner)
        }
        VolumeSpec::File(file) => Some(file),
        _ => None,
    }
}

/// The candidate that a named member is: its absolute path as a pattern that matches nothing else.
fn candidate(name: &str) -> Option<VolumeSpec> {
    let spec: VolumeSpec = name.parse().ok()?;
    let path = std::path::absolute(&spec.file()?.path).ok()?;
    let spec = with_path(&spec, Path::new(&glob::Pattern::escape(path.to_str()?)));
    Some(without_size(spec))
}

/// Files that exist already need no size.
pub(super) fn without_size(mut spec: VolumeSpec) -> VolumeSpec {
    if let Some(file) = leaf_mut(&mut spec) {
        file.size_bytes = None;
    }
    spec
}

/// The specification of an array that serves; by its UUID if all devices are files.
pub(super) fn spec_now(parts: &SpecParts) -> Raid5Spec {
    let named = || {
        let member = |name: &String| name.parse::<VolumeSpec>().ok();
        let members = parts.members.iter().map(|m| m.as_ref().and_then(member));
        let spares = parts.spares.iter().map(member);
        Members::Named(members.chain(spares).collect())
    };
    Raid5Spec {
        of: by_uuid(parts).map_or_else(named, Members::Found),
        stripes: u32::try_from(parts.stripes).unwrap_or(Raid5Spec::STRIPES),
        write_path: parts.write_path,
        member_timeout: parts.member_timeout,
        re_add: parts.re_add,
        force: false,
    }
}

fn by_uuid(parts: &SpecParts) -> Option<Candidates> {
    let mut within: Vec<VolumeSpec> = Vec::new();
    for text in &parts.patterns {
        let spec: VolumeSpec = text.parse().ok()?;
        let path = std::path::absolute(&spec.file()?.path).ok()?;
        within.push(with_path(&spec, &path));
    }
    for name in &parts.devices {
        let spec: VolumeSpec = name.parse().ok()?;
        let path = &spec.file()?.path;
        // A pattern finds the device with its own options.
        let is_found = |w: &VolumeSpec| {
            pattern(w).is_some_and(|p| matches(p, path))
                && without_size(spec.clone()) == with_path(w, path)
        };
        if !within.iter().any(is_found) {
            within.push(candidate(name)?);
        }
    }
    let found = Candidates {
        uuid: parts.set_uuid,
        within,
        missing: parts.missing,
    };
    found.problem().is_none().then_some(found)
}

/// The UUID form that finds the array of this superblock in a folder of its members.
pub fn spec_in_folder(sb: &Superblock, member: &Path) -> Option<String> {
    let path = std::path::absolute(member).ok()?;
    let folder = glob::Pattern::escape(path.parent()?.to_str()?);
    let within = VolumeSpec::File(FileSpec::new(Path::new(&folder).join("*")));
    let found = Candidates {
        uuid: sb.set_uuid,
        within: vec![within],
        missing: false,
    };
    Some(format!("raid5:{found}"))
}

#[cfg(test)]
mod tests;
