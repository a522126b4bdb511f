//! `raid5`: an array as a volume.

mod found;
mod look;
mod names;
mod replaced;

pub use found::{Candidates, spec_in_folder};
pub use look::{Found, Look, look};
pub use names::SpecNames;

use super::{Need, VolumeSpec};
use pvblk_block::units::Span;
use pvblk_block::{BlockDevice, Error};
use pvblk_raid5 as raid5;
use pvblk_raid5::{ArrayOptions, AssembleOptions, Assembly, Geometry, Raid5Progress, WritePath};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A RAID-5 array of members in md's format: `raid5:[MEMBER][MEMBER]…[,stripes=N][,write-path=PATH][,member-timeout=TIME][,re-add=auto][,force]`, or
/// `raid5:uuid=UUID,in=PATTERN[,in=PATTERN]…[,missing]` with the same options.
///
/// Members are volumes, each in brackets of its own, in any order: their superblocks say where they belong. There are as many as
/// the array has members. For one that isn't there write `[missing]`: then it has no place in the array until mdadm adds it again.
///
/// A member that was replaced while the array was served is refused: the others count on the device that has its place now.
///
/// More than the array has members may be named: the others are spares, onto which it is rebuilt when a member is missing.
///
/// An array that wasn't stopped in order is repaired when it is opened; what a log doesn't tell is repaired while it serves.
#[derive(Clone, Debug, PartialEq)]
pub struct Raid5Spec {
    /// The devices that it is made of.
    pub of: Members,
    /// Stripe heads that are kept in memory, 8 to 32768, as md's `stripe_cache_size`: 4 KiB for each member.
    pub stripes: u32,
    /// The way of writes to stripes: `direct` as md has it, or through the `stripe-queue`.
    pub write_path: WritePath,
    /// Time after which a member that doesn't answer is kicked, 100 ms to one hour; `None`: it is waited for, as in md.
    pub member_timeout: Option<Duration>,
    /// A member that was kicked for that is taken back when it answers again.
    pub re_add: bool,
    /// Start with stale members, or when dirty and degraded, although data may be wrong.
    pub force: bool,
}

/// The devices of an array.
#[derive(Clone, Debug, PartialEq)]
pub enum Members {
    /// Each by its volume; `None` is `missing`.
    Named(Vec<Option<VolumeSpec>>),
    /// Files that are looked at for them.
    Found(Candidates),
}

impl Raid5Spec {
    /// Number of stripe heads unless told otherwise, as in md.
    pub const STRIPES: u32 = 256;

    /// An array of these members.
    pub fn new(members: Vec<Option<VolumeSpec>>) -> Raid5Spec {
        Raid5Spec {
            of: Members::Named(members),
            stripes: Raid5Spec::STRIPES,
            write_path: WritePath::default(),
            member_timeout: None,
            re_add: false,
            force: false,
        }
    }

    pub(super) fn problem(&self) -> Option<String> {
        if !(8..=32768).contains(&self.stripes) {
            return Some("stripes must be 8 to 32768".into());
        }
        let limits = Duration::from_millis(100)..=Duration::from_hours(1);
        if self.member_timeout.is_some_and(|t| !limits.contains(&t)) {
            return Some("member-timeout must be 100 ms to 3600 s".into());
        }
        if self.re_add && self.member_timeout.is_none() {
            return Some("re-add=auto takes members back that were kicked for their time: give member-timeout=TIME too".into());
        }
        match &self.of {
            Members::Named(members) => named_problem(members),
            Members::Found(candidates) => candidates.problem(),
        }
    }

    /// Opens the members and finds the array that they are. Nothing is written.
    pub fn assemble(&self) -> Result<Assembly, Error> {
        self.assemble_for(&Need::default())
    }

    fn assemble_for(&self, need: &Need) -> Result<Assembly, Error> {
        match &self.of {
            Members::Named(members) => self.assemble_named(members, need),
            Members::Found(candidates) => candidates.assemble(self, need),
        }
    }

    fn assemble_named(
        &self,
        members: &[Option<VolumeSpec>],
        need: &Need,
    ) -> Result<Assembly, Error> {
        let mut devices = Vec::new();
        for member in members.iter().flatten() {
            devices.push((member.to_string(), member.as_member().open_for(need)?));
        }
        if !self.force {
            let mut found = Vec::new();
            for (name, device) in &devices {
                // What has no superblock is told with the others.
                if let Ok(sb) = raid5::read_superblock(name, device, &mut raid5::sleepy()) {
                    found.push((name.clone(), sb));
                }
            }
            if found.len() == devices.len() {
                replaced::refuse(self, members, &found, &need.opener)?;
            }
        }
        let assembly = raid5::assemble(devices, &self.options(), &mut raid5::sleepy())?;
        let (named, of) = (members.len(), assembly.members.len());
        if named < of {
            return Err(Error::config(format!(
                "{self}: the array has {of} members, and {named} are named; write `[missing]` for one that isn't there"
            )));
        }
        Ok(assembly)
    }

    pub(super) fn open(&self, need: &Need) -> Result<Arc<dyn BlockDevice>, Error> {
        let mut assembly = self.assemble_for(need)?;
        let mut progress = Raid5Progress::default();
        let mut tell = |done, of| {
            if let Some(text) = progress.step(done, of) {
                tracing::info!("raid5: parity is calculated, {text}");
            }
        };
        raid5::prepare(
            &mut assembly,
            &self.options(),
            &mut tell,
            &mut raid5::sleepy(),
        )?;
        for note in &assembly.notes {
            tracing::warn!("raid5: {note}");
        }
        let options = ArrayOptions {
            stripes: self.stripes as usize,
            path: self.write_path,
            member_timeout: self.member_timeout,
            re_add: self.re_add,
            names: Arc::new(SpecNames::new(need)),
        };
        let patterns = match &self.of {
            Members::Found(candidates) => candidates.within.iter(),
            Members::Named(_) => [].iter(),
        };
        let patterns = patterns.map(VolumeSpec::to_string).collect();
        raid5::serve(assembly, &options, patterns)
    }

    fn options(&self) -> AssembleOptions {
        AssembleOptions {
            force: self.force,
            resync_later: true,
        }
    }
}

fn named_problem(members: &[Option<VolumeSpec>]) -> Option<String> {
    let count = members.len();
    let missing = members.iter().filter(|m| m.is_none()).count();
    let most = *Geometry::MEMBERS.end() as usize;
    if !(*Geometry::MEMBERS.start() as usize..=most).contains(&count) {
        return Some(format!(
            "an array has 3 to {most} members, and here are {count}; write `[missing]` for one that isn't there"
        ));
    }
    if missing > 1 {
        return Some("one member can be missing, no more".into());
    }
    members.iter().flatten().find_map(VolumeSpec::problem)
}

impl fmt::Display for Raid5Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("raid5:")?;
        match &self.of {
            Members::Named(members) => {
                for member in members {
                    match member {
                        Some(member) => write!(f, "[{member}]")?,
                        None => f.write_str("[missing]")?,
                    }
                }
            }
            Members::Found(candidates) => candidates.fmt(f)?,
        }
        if self.stripes != Raid5Spec::STRIPES {
            write!(f, ",stripes={}", self.stripes)?;
        }
        if self.write_path != WritePath::default() {
            write!(f, ",write-path={}", self.write_path)?;
        }
        if let Some(time) = self.member_timeout {
            write!(f, ",member-timeout={}", Span(time))?;
        }
        if self.re_add {
            f.write_str(",re-add=auto")?;
        }
        f.write_str(if self.force { ",force" } else { "" })
    }
}
