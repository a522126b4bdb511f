//! Flags of `pvblk raid`.

use crate::control::ControlArg;
use clap::Args;

/// An array that is served, or the members of one that isn't.
#[derive(Args, Debug)]
pub struct Whom {
    #[command(flatten)]
    pub control: ControlArg,
    /// Members; or the name of a disk that is served, which no file has, unless --control names the server
    #[arg(value_name = "MEMBER|DISK", required = true)]
    pub names: Vec<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// An array that is served.
#[derive(Args, Debug)]
pub struct Served {
    #[command(flatten)]
    pub control: ControlArg,
    /// Name of the disk
    #[arg(value_name = "DISK")]
    pub disk: String,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Options for members that aren't served.
#[derive(Args, Debug, Default)]
pub struct Offline {
    /// Go on without a member that the others count on; it won't have the data that is written from
    /// then on
    #[arg(long)]
    pub run: bool,
    /// Take stale members when there are too few others, and an array that is dirty and degraded, although data may be wrong
    #[arg(long)]
    pub force: bool,
    /// KiB a second of each member, at most
    #[arg(long, value_name = "KIB")]
    pub speed: Option<u64>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct CreateArgs {
    /// Name of the array, usually HOST:NAME; at most 31 bytes
    #[arg(long, default_value = "")]
    pub name: String,
    /// RAID level: 5
    #[arg(long, default_value = "5", value_name = "LEVEL")]
    pub level: String,
    /// Number of members, as a check
    #[arg(long, value_name = "N")]
    pub raid_devices: usize,
    /// Number of spares that are named after the members
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub spare_devices: usize,
    /// Chunk size, such as 64K; a plain number is KiB, as for mdadm
    #[arg(long, default_value = "512K", value_name = "SIZE")]
    pub chunk: String,
    /// Order in which members hold parity: left-symmetric, left-asymmetric, right-symmetric,
    /// right-asymmetric
    #[arg(long, default_value = "left-symmetric")]
    pub layout: String,
    /// Means of recovery after a crash: ppl (partial parity log: closes the write hole), resync or
    /// bitmap
    #[arg(long, default_value = "ppl", value_name = "POLICY")]
    pub consistency_policy: String,
    /// Bytes of a member for each bit of the write-intent bitmap, such as 1M; a plain number is KiB [default: 64M or more]
    #[arg(long, value_name = "SIZE")]
    pub bitmap_chunk: Option<String>,
    /// Make no private map: a member that is away when the server ends has to be rebuilt whole then. Without effect with a bitmap
    #[arg(long)]
    pub no_map: bool,
    /// Keep a checksum of each block of 4 KiB, so that a block which isn't what was written is found when it is read, and calculated from the others. Takes
    /// a 1024th of each member; not with a bitmap
    #[arg(long, conflicts_with = "no_map")]
    pub checksums: bool,
    /// Size to use of each member, such as 10G; a plain number is KiB [default: as much as the smallest has]
    #[arg(long, value_name = "SIZE")]
    pub size: Option<String>,
    /// All parity is right already: don't calculate it. Members that hold nothing are known to be right without this
    #[arg(long)]
    pub assume_clean: bool,
    /// Overwrite the contents of members: another array, a file system, partitions, an image
    #[arg(long)]
    pub force: bool,
    /// The members, in order, one of them perhaps `missing`; then the spares
    #[arg(value_name = "MEMBER", required = true)]
    pub members: Vec<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct ExamineArgs {
    /// Members; they are only read, also while they are served
    #[arg(value_name = "MEMBER", required = true)]
    pub members: Vec<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct ScanArgs {
    /// Paths of files and block devices, with `*`, `?` and `[…]`; they are only read, also while they are served
    #[arg(value_name = "PATTERN", required = true)]
    pub patterns: Vec<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct DetailArgs {
    /// Members are only read, also while they are served
    #[command(flatten)]
    pub whom: Whom,
    /// Print it again each second, until Ctrl-C
    #[arg(long)]
    pub watch: bool,
}

#[derive(Args, Debug)]
pub struct AddArgs {
    /// Members of an array that isn't served; or a disk that is, and then the new member
    #[command(flatten)]
    pub whom: Whom,
    /// A device to become a spare; may be given several times
    #[arg(long = "spare", value_name = "NEW")]
    pub spares: Vec<String>,
    /// Also if it holds something, such as a file system or another array's data, which is lost
    #[arg(long)]
    pub force: bool,
}

#[derive(Args, Debug)]
pub struct ReAddArgs {
    #[command(flatten)]
    pub served: Served,
    /// The volume that it is; or its place, if it is to come back by itself
    #[arg(value_name = "PLACE|MEMBER")]
    pub member: String,
}

#[derive(Args, Debug)]
pub struct MemberArgs {
    #[command(flatten)]
    pub served: Served,
    /// Its place, or the volume that it is
    #[arg(value_name = "PLACE|MEMBER")]
    pub member: String,
}

#[derive(Args, Debug)]
pub struct ReplaceArgs {
    #[command(flatten)]
    pub served: Served,
    /// Its place, or the volume that it is
    #[arg(value_name = "PLACE|MEMBER")]
    pub member: String,
    /// Device that takes its place; else a spare does
    #[arg(long, value_name = "MEMBER")]
    pub with: Option<String>,
    /// Also if that holds something, such as a file system or another array's data, which is lost
    #[arg(long, requires = "with")]
    pub force: bool,
}

#[derive(Args, Debug)]
pub struct CheckArgs {
    #[command(flatten)]
    pub whom: Whom,
    /// Show how far it is until its end, as it is always done without a server
    #[arg(long)]
    pub wait: bool,
    /// KiB a second of each member at most, without a server; with one see `pvblk raid speed`
    #[arg(long, value_name = "KIB", conflicts_with = "control")]
    pub speed: Option<u64>,
}

#[derive(Args, Debug)]
pub struct MembersArgs {
    /// All members of the array, and a spare to rebuild onto
    #[arg(value_name = "MEMBER", required = true)]
    pub members: Vec<String>,
    #[command(flatten)]
    pub offline: Offline,
}

#[derive(Args, Debug)]
pub struct MapArgs {
    /// `on` begins a private map, `off` ends it
    #[arg(value_name = "on|off", value_parser = ["on", "off"])]
    pub state: String,
    #[command(flatten)]
    pub members: MembersArgs,
}

#[derive(Args, Debug)]
pub struct SpeedArgs {
    #[command(flatten)]
    pub served: Served,
    /// KiB a second of each member while others use the array: md's sync_speed_min
    #[arg(long, value_name = "KIB")]
    pub min: Option<u64>,
    /// KiB a second of each member at most: md's sync_speed_max
    #[arg(long, value_name = "KIB")]
    pub max: Option<u64>,
}

#[derive(Args, Debug)]
pub struct StripesArgs {
    #[command(flatten)]
    pub served: Served,
    /// So many; each has 4 KiB of every member in memory: md's stripe_cache_size
    #[arg(value_name = "N")]
    pub stripes: usize,
}

#[derive(Args, Debug)]
pub struct WritePathArgs {
    #[command(flatten)]
    pub served: Served,
    /// Write path: direct, as md has it, or stripe-queue, where writes that fill a stripe wait for each other
    #[arg(value_name = "PATH", value_parser = ["direct", "stripe-queue"])]
    pub path: String,
}
