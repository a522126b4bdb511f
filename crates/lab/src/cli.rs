//! Flags of `pvblk-lab`.

use clap::{Args, Parser, Subcommand};
use pvblk_lab::choices::Over;
use pvblk_lab::crash::{Export, Volume};
use std::path::PathBuf;

const START: &str = "\
Examples:
  pvblk-lab rings --quick --check
  pvblk-lab path --json path.json
  pvblk-lab compare before.json after.json --metric iops

The experiments start `pvblk`, the one beside this program or the one that PVBLK_BIN names.";

/// Experiments and measurements on pvblk.
#[derive(Parser, Debug)]
#[command(name = "pvblk-lab", version, about, long_about = None, max_term_width = 110, after_help = START)]
pub struct Cli {
    #[command(subcommand)]
    pub command: LabCommand,
}

#[derive(Subcommand, Debug)]
pub enum LabCommand {
    /// Tell whether results differ: fio's JSON, the lab's, or plain numbers
    #[command(after_long_help = crate::compare::EXAMPLES)]
    Compare(crate::compare::CompareArgs),
    /// The whole ring path between two processes against a bare ring that only copies
    Path(PathArgs),
    /// The NBD server against nbdkit, qemu-nbd and a server that does nothing, same fio job
    Nbd(NbdArgs),
    /// The settings that a server chooses by the load, beside the same settings fixed
    Choices(ChoicesArgs),
    /// vhost-user-blk: pvblk against qemu-storage-daemon, same client
    Vhost(VhostArgs),
    /// A server with many idle attached disks: CPU time, and the memory bill against the kernel's figures
    Idle(IdleArgs),
    /// Both sides of the ring path in one thread, to count instructions under callgrind
    Instructions(InstructionsArgs),
    /// Cost of recording a trace: CPU of each event on the in-memory path
    TraceCost(TraceCostArgs),
    /// Rings of 1 and of 8 pages on a modelled SSD: when one page holds a fast device back
    Rings(SweepArgs),
    /// Rates by the number of jobs, on one queue and on several
    Queues(SweepArgs),
    /// RAID-5's direct write path beside the stripe queue: sequential and random writes and reads
    StripeQueue(StripeQueueArgs),
    /// RAID-5 with more and more threads: on one array, on an array each, and bare copies. Members in memory
    Submitters(SubmittersArgs),
    /// The cost of a partial parity log, a private map and checksums for RAID-5. Members in memory
    Protection(ProtectionArgs),
    /// Giving buffers back when memory is short: pages swapped, time until memory is back, cost, survival. Needs root, cgroup v1 and no swap
    Squeeze(SqueezeArgs),
    #[command(hide = true)]
    Bystander,
    /// RAID-5 writes of pvblk against those of the kernel's md in user-mode Linux, members in memory
    Md(MdArgs),
    /// Processes that read through a page cache that is too small, under the policies of old kernels and of pvblk
    PageOrder(PageOrderArgs),
    /// Hit rates of the page cache beside other policies', by the shape of the load, in virtual time
    HitRates(HitRatesArgs),
    /// The same jobs by fio and by `pvblk bench`: do they agree?
    Fio(FioArgs),
    /// Kill server and front end in the middle of writes, again and again: no completed write may be lost
    Crash(CrashArgs),
    #[command(hide = true)]
    CrashLoad(CrashLoadArgs),
    #[command(hide = true)]
    BareServer(BareServerArgs),
    #[command(hide = true)]
    ChoicesServer(ChoicesServerArgs),
    #[command(hide = true)]
    TraceSample(TraceSampleArgs),
    /// An NBD server that answers and does nothing else: the limit of a client
    NullNbd(NullNbdArgs),
}

impl LabCommand {
    /// The flag `--json` of commands that have it among others.
    pub fn output(&self) -> Option<&OutputArgs> {
        Some(match self {
            LabCommand::Path(a) => &a.output,
            LabCommand::Nbd(a) => &a.output,
            LabCommand::Choices(a) => &a.checked.output,
            LabCommand::Vhost(a) => &a.checked.output,
            LabCommand::Idle(a) => &a.output,
            LabCommand::Rings(a) | LabCommand::Queues(a) => &a.run.checked.output,
            LabCommand::StripeQueue(a) => &a.run.checked.output,
            LabCommand::Submitters(a) => &a.checked.output,
            LabCommand::Protection(a) => &a.checked.output,
            LabCommand::Squeeze(a) => &a.run.checked.output,
            LabCommand::Md(a) => &a.checked.output,
            LabCommand::PageOrder(a) => &a.run.checked.output,
            LabCommand::HitRates(a) => &a.run.checked.output,
            LabCommand::Fio(a) => &a.checked.output,
            LabCommand::Crash(a) => &a.output,
            LabCommand::TraceCost(a) => &a.output,
            _ => return None,
        })
    }
}

/// The flag of experiments that keep their samples.
#[derive(Args, Debug)]
pub struct OutputArgs {
    /// Write raw samples, tables and plots here, for `pvblk report` and `pvblk-lab compare`
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
}

/// Flags of experiments that expect something.
#[derive(Args, Debug)]
pub struct CheckedArgs {
    #[command(flatten)]
    pub output: OutputArgs,
    /// Print each expected figure with the measured one; exit 1 if one isn't reached
    #[arg(long)]
    pub check: bool,
}

/// Flags of experiments that can be made shorter.
#[derive(Args, Debug)]
pub struct QuickArgs {
    #[command(flatten)]
    pub checked: CheckedArgs,
    /// Measure less: fewer points or runs, smaller files
    #[arg(long)]
    pub quick: bool,
}

#[derive(Args, Debug)]
pub struct PathArgs {
    /// Requests in flight to measure
    #[arg(long, value_delimiter = ',', default_value = "1,4,32,128,256")]
    pub depths: Vec<u32>,
    /// Runs of each, interleaved
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// Seconds of each run
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
    /// Working set on the server's side, such as 256M
    #[arg(long, default_value = "64M")]
    pub span: String,
    #[command(flatten)]
    pub output: OutputArgs,
    /// Fewer and shorter runs
    #[arg(long)]
    pub quick: bool,
    /// Only the path, this many requests at the first depth, for profilers
    #[arg(long, hide = true)]
    pub requests: Option<u64>,
}

#[derive(Args, Debug)]
pub struct NbdArgs {
    /// Requests in flight to measure
    #[arg(long, value_delimiter = ',', default_value = "1,32,128")]
    pub depths: Vec<u32>,
    /// Number of interleaved rounds
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// Seconds of each sample
    #[arg(long, default_value_t = 3)]
    pub seconds: u32,
    /// Let client and server use all CPUs, instead of one each
    #[arg(long)]
    pub unpinned: bool,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub struct IdleArgs {
    /// Number of attached disks
    #[arg(long, default_value_t = 100)]
    pub disks: usize,
    /// Seconds to watch
    #[arg(long, default_value_t = 60)]
    pub seconds: u64,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub struct BareServerArgs {
    /// Socket to pass the shared memory on
    pub socket: PathBuf,
    /// Bytes of the store
    pub span: u64,
}

#[derive(Args, Debug)]
pub struct ChoicesArgs {
    /// The way from client to server
    #[arg(long, value_enum, default_value_t = Over::Rings)]
    pub over: Over,
    /// Volumes to measure: null, mem, 20us, 100us [default: all]
    #[arg(long, value_delimiter = ',')]
    pub volumes: Vec<String>,
    /// Requests in flight to measure, each at most 256
    #[arg(long, value_delimiter = ',', default_value = "1,4,32,128")]
    pub depths: Vec<u32>,
    /// Number of interleaved rounds
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// Seconds of each sample
    #[arg(long, default_value_t = 0.2)]
    pub seconds: f64,
    #[command(flatten)]
    pub checked: CheckedArgs,
}

#[derive(Args, Debug)]
pub struct ChoicesServerArgs {
    /// Socket for front ends on rings
    pub socket: PathBuf,
    /// Time to poll an idle queue before sleeping on it, microseconds
    #[arg(long)]
    pub spin_us: Option<u64>,
    /// Most requests to take at a time
    #[arg(long)]
    pub pull: Option<u32>,
}

#[derive(Args, Debug)]
pub struct TraceCostArgs {
    /// Requests of each sample
    #[arg(long, default_value_t = 100_000)]
    pub requests: usize,
    /// Requests in flight
    #[arg(long, default_value_t = 32)]
    pub depth: u32,
    /// Rounds: not recording, recording, not recording
    #[arg(long, default_value_t = 11)]
    pub rounds: usize,
    /// Record one request in so many
    #[arg(long, default_value_t = 1)]
    pub every: u32,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub struct TraceSampleArgs {
    /// Name of the capture
    pub prefix: PathBuf,
    #[arg(long, default_value_t = 1000)]
    pub requests: usize,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

#[derive(Args, Debug)]
pub struct NullNbdArgs {
    /// Unix socket to listen on
    pub socket: PathBuf,
    /// Size of the export, such as 1G
    #[arg(long, default_value = "1G")]
    pub size: String,
    /// Refuse structured replies
    #[arg(long)]
    pub simple: bool,
}

#[derive(Args, Debug)]
pub struct InstructionsArgs {
    /// 4 KiB reads to run
    #[arg(long, default_value_t = 100_000)]
    pub requests: usize,
    /// Requests in flight, at most 512
    #[arg(long, default_value_t = 32)]
    pub depth: u32,
    /// Record one request in so many; without it, nobody records
    #[arg(long)]
    pub every: Option<u32>,
}

#[derive(Args, Debug)]
pub struct CrashArgs {
    /// Kills and restarts, over all exports and volumes
    #[arg(long, default_value_t = 1000)]
    pub cycles: u32,
    /// Decides which process is killed when [default: random, printed]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Exports of the disks: rings, vhost-user, nbd [default: all]
    #[arg(long, value_delimiter = ',')]
    pub export: Vec<Export>,
    /// Kinds of disks: file, direct, cache, raid5 [default: all], each with each export
    #[arg(long, value_delimiter = ',')]
    pub volume: Vec<Volume>,
    /// Mount point of `slow_medium`, an example of the end-to-end tests: the disks' files are made there, and it holds writes
    /// beyond a kill
    #[arg(long, value_name = "DIR")]
    pub medium: Option<PathBuf>,
    /// Disks at work at a time
    #[arg(long, default_value_t = 4)]
    pub jobs: usize,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub struct CrashLoadArgs {
    /// Path of the server's socket
    pub socket: PathBuf,
    /// Path of the journal
    pub journal: PathBuf,
    pub seed: u64,
    pub export: Export,
    pub volume: Volume,
    pub queues: u32,
    pub ring_pages: usize,
}

#[derive(Args, Debug)]
pub struct SweepArgs {
    /// Rounds, interleaved; three are needed for an interval
    #[arg(long)]
    pub runs: Option<usize>,
    /// Seconds of each sample
    #[arg(long)]
    pub seconds: Option<f64>,
    /// Slow the modelled device's clock by this factor [default: 1 with 8 CPUs or more, else 20]
    #[arg(long)]
    pub slower: Option<f64>,
    #[command(flatten)]
    pub run: QuickArgs,
}

#[derive(Args, Debug)]
pub struct StripeQueueArgs {
    /// Rounds, interleaved; three are needed for an interval [default: 5, or 3 with --quick]
    #[arg(long)]
    pub runs: Option<usize>,
    /// Bytes of all files together [default: 192M, or 48M with --quick]
    #[arg(long, value_name = "SIZE")]
    pub size: Option<String>,
    /// Seconds of each sample of members in memory
    #[arg(long, default_value_t = 0.3)]
    pub seconds: f64,
    /// Members to measure [default: all]
    #[arg(long, value_name = "MEMBERS", value_delimiter = ',')]
    pub on: Vec<StripeQueuePart>,
    /// Only cells whose name has this in it, such as `random writes, 4 KiB` or, in memory, `two threads, 4 KiB`
    #[arg(long, value_name = "TEXT")]
    pub cells: Option<String>,
    /// Where the members that are files are made [default: the folder for temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub dir: Option<PathBuf>,
    #[command(flatten)]
    pub run: QuickArgs,
}

#[derive(Args, Debug)]
pub struct SubmittersArgs {
    /// Numbers of threads, each on a CPU of its own [default: 1, 2, 4 and so on, as many as there are CPUs]
    #[arg(long, value_delimiter = ',')]
    pub threads: Vec<usize>,
    /// Rounds, interleaved; three are needed for an interval
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// Seconds of each sample
    #[arg(long, default_value_t = 0.3)]
    pub seconds: f64,
    /// Requests in flight of each thread
    #[arg(long, default_value_t = 32)]
    pub depth: usize,
    /// Give the arrays a partial parity log
    #[arg(long)]
    pub ppl: bool,
    /// Only shapes whose name has this in it, such as `random writes`
    #[arg(long, value_name = "TEXT")]
    pub cells: Option<String>,
    #[command(flatten)]
    pub checked: CheckedArgs,
}

#[derive(Args, Debug)]
pub struct ProtectionArgs {
    /// Rounds, interleaved; three are needed for an interval
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// Seconds of each sample
    #[arg(long, default_value_t = 0.3)]
    pub seconds: f64,
    /// Only shapes whose name has this in it, such as `random writes`
    #[arg(long, value_name = "TEXT")]
    pub cells: Option<String>,
    #[command(flatten)]
    pub checked: CheckedArgs,
}

#[derive(Args, Debug)]
pub struct SqueezeArgs {
    /// Runs of each; the overhead has at least five [default: 3, or 1 with --quick]
    #[arg(long)]
    pub runs: Option<usize>,
    /// Parts to run [default: all]
    #[arg(long, value_name = "PARTS", value_delimiter = ',')]
    pub on: Vec<SqueezePart>,
    /// Where the swap file is made [default: the folder for temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub dir: Option<PathBuf>,
    #[command(flatten)]
    pub run: QuickArgs,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
pub enum SqueezePart {
    /// Pages swapped in and out
    Swap,
    /// From the allocation to memory back
    Reaction,
    /// Rates with a limit of 0 and of 1024 pages
    Overhead,
    /// A hard limit without swap
    Survival,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
pub enum StripeQueuePart {
    /// Modelled disks, in virtual time
    Modelled,
    /// Files on a file system
    Files,
    /// Memory, on one thread and on two
    Memory,
}

#[derive(Args, Debug)]
pub struct VhostArgs {
    /// Rounds, interleaved; three are needed for an interval
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// Seconds of each sample
    #[arg(long, default_value_t = 0.4)]
    pub seconds: f64,
    /// Requests in flight on each queue
    #[arg(long, value_delimiter = ',', default_value = "1,4,32,128,256")]
    pub depths: Vec<u32>,
    /// Numbers of queues
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    pub queues: Vec<u16>,
    /// Disks of each kind that are used together, of 256 MiB in all. With several, clients only sleep
    #[arg(long, default_value_t = 1)]
    pub disks: usize,
    /// The folder in which SPDK was built: its vhost target is measured, too. It has huge pages if a hugetlbfs is mounted and 1280 MiB are free
    #[arg(long, value_name = "FOLDER")]
    pub spdk: Option<PathBuf>,
    #[command(flatten)]
    pub checked: CheckedArgs,
}

#[derive(Args, Debug)]
pub struct MdArgs {
    /// Rounds, interleaved; three are needed for an interval
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// Seconds of each sample
    #[arg(long, default_value_t = 0.5)]
    pub seconds: f64,
    /// Requests in flight to measure
    #[arg(long, value_delimiter = ',', default_value = "1,32,128")]
    pub depths: Vec<usize>,
    /// Only cells whose name has this in it, such as `4 KiB random` or `random, 32 in`
    #[arg(long, value_name = "TEXT")]
    pub cells: Option<String>,
    /// The script that starts user-mode Linux; it is in the source tree
    #[arg(long, value_name = "FILE", default_value = "tests/vm/uml.sh")]
    pub uml: PathBuf,
    /// fio's options in the guest; DEPTH stands for the requests in flight
    #[arg(long, value_name = "OPTIONS", default_value = pvblk_lab::md::FIO, allow_hyphen_values = true)]
    pub fio: String,
    /// Stripe heads of md, 17 to 32768; with more it is slower here
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub md_stripes: usize,
    /// Stripe heads of pvblk's array
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub stripes: usize,
    /// MiB of the array that are written, 96 at most; with few, all stays in the CPU's caches
    #[arg(long, value_name = "MIB", default_value_t = pvblk_lab::md::ARRAY)]
    pub span: u64,
    #[command(flatten)]
    pub checked: CheckedArgs,
}

#[derive(Args, Debug)]
pub struct HitRatesArgs {
    /// Pages of each cache (4 KiB) [default: 16384, or 2048 with --quick]
    #[arg(long, value_name = "N")]
    pub pages: Option<u64>,
    /// Shapes at a time [default: one for each CPU]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Seed of the shapes
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    #[command(flatten)]
    pub run: QuickArgs,
}

#[derive(Args, Debug)]
pub struct PageOrderArgs {
    /// Seconds of virtual time of each cell of up to 16 processes; with more, less
    #[arg(long, default_value_t = 0.5)]
    pub seconds: f64,
    /// Cells at a time [default: one for each CPU]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    #[command(flatten)]
    pub run: QuickArgs,
    /// Parts to run [default: all]
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    pub on: Vec<PageOrderPart>,
    /// Rounds on the real clock, interleaved; three are needed for an interval
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// Bytes of the file that is read on the real clock [default: 512M, or 64M with --quick]
    #[arg(long, value_name = "SIZE")]
    pub size: Option<String>,
    /// Where that file is made: on a disk, not in memory [default: the folder for temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub dir: Option<PathBuf>,
    /// Seconds of each sample of threads on the real clock
    #[arg(long, default_value_t = 2.0)]
    pub real_seconds: f64,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageOrderPart {
    /// Modelled disks, in virtual time
    Modelled,
    /// A file read by the cache and by the kernel, and chosen cells with threads
    Real,
}

#[derive(Args, Debug)]
pub struct FioArgs {
    /// Pairs of runs of each job, at least 3
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// Seconds of each run
    #[arg(long, default_value_t = 4)]
    pub seconds: u32,
    #[command(flatten)]
    pub checked: CheckedArgs,
}
