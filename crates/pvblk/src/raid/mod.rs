//! `pvblk raid`: arrays before and after they are served, in mdadm's words.

mod create;
mod detail;
mod examine;
mod text;

use anyhow::Result;
use clap::{Args, Subcommand};
use pvblk_block::{BlockDevice, Error};
use pvblk_volume::{FileSpec, VolumeSpec};
use std::path::Path;
use std::sync::Arc;

pub const HELP: &str = "\
Members are volumes as in `pvblk serve --help`, or just names of files. An array is served by its members:
  pvblk serve --disk r=raid5:[file:a.img][file:b.img][file:c.img] --nbd unix:/tmp/nbd.sock

Examples:
  pvblk raid create --name vol0 --level 5 --raid-devices 3 file:a.img,size=1G file:b.img,size=1G file:c.img,size=1G
  pvblk raid detail a.img b.img c.img
  pvblk raid examine a.img

The format is md's, version 1.2: Linux assembles the members too, with mdadm over loop devices.";

#[derive(Subcommand, Debug)]
pub enum RaidCommand {
    /// Make an array out of members; what they hold is lost
    Create(CreateArgs),
    /// Print what is written on members, as `mdadm --examine`
    Examine(ExamineArgs),
    /// Print the array that members are, as `mdadm --detail`
    Detail(DetailArgs),
}

#[derive(Args, Debug)]
pub struct CreateArgs {
    /// Name of the array, usually HOST:NAME; at most 31 bytes
    #[arg(long, default_value = "")]
    pub name: String,
    /// RAID level: 5
    #[arg(long, default_value = "5", value_name = "LEVEL")]
    pub level: String,
    /// How many members there are, as a check
    #[arg(long, value_name = "N")]
    pub raid_devices: usize,
    /// Chunk size, such as 64K; a plain number is KiB, as for mdadm
    #[arg(long, default_value = "512K", value_name = "SIZE")]
    pub chunk: String,
    /// How parity takes turns: left-symmetric, left-asymmetric, right-symmetric, right-asymmetric
    #[arg(long, default_value = "left-symmetric")]
    pub layout: String,
    /// What happens after a crash: ppl (partial parity log: closes the write hole), resync or bitmap
    #[arg(long, default_value = "ppl", value_name = "POLICY")]
    pub consistency_policy: String,
    /// How much of each member to use, such as 10G; a plain number is KiB [default: as much as the smallest has]
    #[arg(long, value_name = "SIZE")]
    pub size: Option<String>,
    /// All parity is right already: don't calculate it. Members that hold nothing are known to be right without this
    #[arg(long)]
    pub assume_clean: bool,
    /// Write over members of another array
    #[arg(long)]
    pub force: bool,
    /// The members, in order
    #[arg(value_name = "MEMBER", required = true)]
    pub members: Vec<String>,
}

#[derive(Args, Debug)]
pub struct ExamineArgs {
    /// Members; they are only read, also while they are served
    #[arg(value_name = "MEMBER", required = true)]
    pub members: Vec<String>,
}

#[derive(Args, Debug)]
pub struct DetailArgs {
    /// Members; they are only read, also while they are served
    #[arg(value_name = "MEMBER", required = true)]
    pub members: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub fn run(command: &RaidCommand) -> Result<()> {
    match command {
        RaidCommand::Create(args) => create::run(args),
        RaidCommand::Examine(args) => examine::run(args),
        RaidCommand::Detail(args) => detail::run(args),
    }
}

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

/// Opens a member for reading, whoever else uses it.
fn open_to_read(text: &str) -> Result<Arc<dyn BlockDevice>, Error> {
    let mut spec = member(text)?;
    if let VolumeSpec::File(file) = &mut spec {
        file.read_only = true;
        file.lock = false;
        file.size_bytes = None;
    }
    spec.open()
}
