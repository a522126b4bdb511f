//! `pvblk raid`: arrays in mdadm's words, while they are served, before and after.

mod args;
mod ask;
mod create;
mod detail;
mod examine;
mod manage;
mod offline;
mod progress;
mod report;
mod scan;
mod screen;
mod text;
mod whom;

pub use ask::{Speed, noun};
pub use progress::{pace, percent};

use anyhow::Result;
use args::{
    AddArgs, CheckArgs, CreateArgs, DetailArgs, ExamineArgs, MapArgs, MemberArgs, MembersArgs,
    ReAddArgs, ReplaceArgs, ScanArgs, Served, SpeedArgs, StripesArgs, WritePathArgs,
};
use clap::Subcommand;
use pvblk_block::{BlockDevice, Error};
use pvblk_raid5::ask::Question;
use pvblk_volume::{FileSpec, VolumeSpec};
use std::path::Path;
use std::sync::Arc;

pub const HELP: &str = "\
Members are volumes as in `pvblk serve --help`, or just names of files. An array is served by its members and its spares, or by its UUID, which
finds them also when members were replaced:
  pvblk serve --disk r=raid5:[file:a.img][file:b.img][file:c.img] --nbd unix:/tmp/s --control unix:/tmp/ctl
  pvblk raid scan '/srv/md/*.img'
  pvblk serve --disk r='raid5:uuid=UUID,in=/srv/md/*.img' --nbd unix:/tmp/s --control unix:/tmp/ctl

Examples:
  pvblk raid create --name vol0 --level 5 --raid-devices 3 file:a.img,size=1G file:b.img,size=1G file:c.img,size=1G
  pvblk raid detail a.img b.img c.img
  pvblk raid check a.img b.img c.img
  pvblk raid add a.img b.img c.img --spare file:d.img,size=1G

While it is served, members are named to the server:
  export PVBLK_CONTROL=unix:/tmp/ctl
  pvblk raid detail r
  pvblk raid add r file:d.img,size=1G
  pvblk raid fail r b.img
  pvblk raid wait r

The format is md's, version 1.2: Linux assembles the members too, with mdadm over loop devices.";

#[derive(Subcommand, Debug)]
pub enum RaidCommand {
    /// Make an array of members; their contents are lost
    Create(CreateArgs),
    /// Print the superblocks of members, as `mdadm --examine`
    Examine(ExamineArgs),
    /// Find the arrays among files, and print the volume that serves each, as `mdadm --examine --scan`
    Scan(ScanArgs),
    /// Print the state of an array, as `mdadm --detail`
    Detail(DetailArgs),
    /// Give an array a spare; if a member is missing, it is rebuilt onto that
    Add(AddArgs),
    /// Take a device back that was a member: only what it missed is written, if that is known
    ReAdd(ReAddArgs),
    /// Throw a member out, as if it had failed
    Fail(MemberArgs),
    /// Take a spare away
    Remove(MemberArgs),
    /// Rebuild a member onto a spare while it is still there, then throw it out
    Replace(ReplaceArgs),
    /// Compare parity with data, and count differences. Exit status 1: there are some
    Check(CheckArgs),
    /// The same, and make parity right
    Repair(CheckArgs),
    /// Show the progress of a rebuild, resync or check until its end. Exit status 1: the array isn't whole, or a check found wrong parity
    Wait(Served),
    /// End a check or repair; rebuilding and resyncing begin again
    Idle(Served),
    /// Begin no rebuild or resync any more, and end the one under way
    Freeze(Served),
    /// Rebuild and resync again
    Unfreeze(Served),
    /// Set the speed of rebuilds, resyncs and checks
    Speed(SpeedArgs),
    /// Set the number of stripe heads that are kept in memory
    Stripes(StripesArgs),
    /// Set the path by which writes go to stripes
    WritePath(WritePathArgs),
    /// Recover from a crash and leave the array clean, without serving it
    Assemble(MembersArgs),
    /// Rebuild a missing member onto a spare, without serving the array
    Rebuild(MembersArgs),
    /// Begin or end the private map of an array that isn't served
    Map(MapArgs),
}

pub fn run(command: &RaidCommand) -> Result<()> {
    match command {
        RaidCommand::Create(args) => create::run(args),
        RaidCommand::Examine(args) => examine::run(args),
        RaidCommand::Scan(args) => scan::run(args),
        RaidCommand::Detail(args) => detail::run(args),
        RaidCommand::Add(args) => manage::add(args),
        RaidCommand::ReAdd(args) => manage::re_add(args),
        RaidCommand::Fail(args) => manage::fail(args),
        RaidCommand::Remove(args) => manage::remove(args),
        RaidCommand::Replace(args) => manage::replace(args),
        RaidCommand::Check(args) => manage::check(args, &Question::Check {}),
        RaidCommand::Repair(args) => manage::check(args, &Question::Repair {}),
        RaidCommand::Wait(args) => manage::wait(args),
        RaidCommand::Idle(args) => manage::idle(args),
        RaidCommand::Freeze(args) => manage::freeze(args, true),
        RaidCommand::Unfreeze(args) => manage::freeze(args, false),
        RaidCommand::Speed(args) => manage::speed(args),
        RaidCommand::Stripes(args) => manage::stripes(args),
        RaidCommand::WritePath(args) => manage::write_path(args),
        RaidCommand::Assemble(args) => offline::assemble(args),
        RaidCommand::Rebuild(args) => offline::rebuild(args),
        RaidCommand::Map(args) => offline::map(args),
    }
}

/// A device and its name on the command line.
type Opened = (String, Arc<dyn BlockDevice>);

/// A member's volume. Names of files need no `file:` here, since members are named by the dozen.
fn member(text: &str) -> Result<VolumeSpec, Error> {
    if text == "missing" {
        return Err(Error::config(
            "missing: leave it out; what there is of an array is told without it",
        ));
    }
    if !text.contains(':') || Path::new(text).exists() {
        return Ok(VolumeSpec::File(FileSpec::new(text)));
    }
    text.parse()
}

/// Opens a member for reading, also while another program uses it.
fn open_to_read(text: &str) -> Result<Arc<dyn BlockDevice>, Error> {
    let mut spec = member(text)?;
    if let VolumeSpec::File(file) = &mut spec {
        file.read_only = true;
        file.lock = false;
        file.size_bytes = None;
    }
    spec.as_member().open()
}

/// Opens members to change them, exclusively.
fn open_all(names: &[String]) -> Result<Vec<Opened>, Error> {
    let open = |name: &String| Ok((name.clone(), member(name)?.as_member().open()?));
    names.iter().map(open).collect()
}
