//! Flags: parsed here, checked in `config`.

use crate::config;
use clap::{Args, Parser, Subcommand};
use pvblk_lab::crash::{Export, Volume};
use std::path::PathBuf;
use std::time::Duration;

const VOLUMES: &str = "\
Volumes:
  file:PATH[,direct][,ro][,size=SIZE]   a regular file or block device; ,format=raw if its bytes are the disk although they look like an
                                        image of another format, such as qcow2
  mem:SIZE                              memory; gone when the server stops
  null:SIZE                             nothing; reads are zeros
  delay:210us,iops=209k,bw=2.4G:VOLUME  a modelled device in front of another volume
  fault:seed=1,error=0.01:VOLUME        errors, stalls and torn writes, by seed
  raid5:[VOLUME][VOLUME][VOLUME]        a RAID-5 array in md's format, and its spares; see `pvblk raid --help`. [missing] for a
                                        lost member, then ,stripes=N (4 KiB of each member kept in memory) and ,force
  cache:256M:VOLUME                     a page cache in front of another volume; ,mode=write-back|write-through|read-only,
                                        ,readahead=128k (else the kernel's for the disk), ,dirty=20 (percent before
                                        writers wait)

Examples:
  pvblk serve --disk vm1=file:/srv/vm1.img,size=20G --local unix:/run/pvblk.sock
  pvblk serve --disk a=mem:1G --disk b=file:b.img --nbd unix:/tmp/nbd.sock --nbd tcp:127.0.0.1:10809
  pvblk serve --config /etc/pvblk.toml
  qemu-img convert -n -O raw image.qcow2 'nbd+unix:///a?socket=/tmp/nbd.sock'
  pvblk serve --disk vm1=file:/srv/vm1.img --vhost-user vm1=unix:/run/vm1.sock
  qemu-system-x86_64 -object memory-backend-memfd,id=m,size=2G,share=on -machine q35,memory-backend=m -m 2G \
    -chardev socket,id=c,path=/run/vm1.sock,reconnect=1 -device vhost-user-blk-pci,chardev=c,num-queues=4
  pvblk serve --disk vm1=file:/srv/vm1.img --xen     and then: pvblk xen attach vm1 GUEST
  pvblk serve --disk vm1=file:/srv/vm1.img --xen --xen-attach vm1=GUEST:xvda

Signals:
  SIGTERM, SIGINT  stop taking requests, answer those in flight, flush, exit 0
  SIGHUP           look at the sizes of all backings again; attached front ends see the new size
  SIGUSR1          print the memory bill again";

const START: &str = "\
Examples:
  pvblk serve --disk a=file:a.img,size=1G --local unix:/tmp/rings.sock --nbd unix:/tmp/nbd.sock
  pvblk attach unix:/tmp/rings.sock --disk a --nbd unix:/tmp/a.sock
  pvblk serve --help     volumes, signals, more examples";

const ATTACH: &str = "\
Examples:
  pvblk attach unix:/run/pvblk.sock --disk vm1 --queues 2 --ring-pages 8 --nbd unix:/tmp/vm1.sock
  nbdinfo 'nbd+unix:///vm1?socket=/tmp/vm1.sock'

The rings are negotiated: the server may offer fewer queues or pages than asked for. What came of it is
printed on standard error.

A server that is killed or restarted loses nothing: requests wait, and those that it hadn't answered are sent again to the
next one. If its machine went down with it, writes that were not flushed may be lost; then the next flush fails.";

/// Serves disks over shared-memory rings and NBD.
#[derive(Parser, Debug)]
#[command(name = "pvblk", version, about, long_about = None, max_term_width = 110, after_help = START)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand, Debug)]
pub enum Command {
    /// Serve disks to front ends on rings and to NBD clients
    #[command(after_long_help = VOLUMES)]
    Serve(ServeArgs),
    /// Attach to a served disk over rings and offer it as NBD
    #[command(after_long_help = ATTACH)]
    Attach(AttachArgs),
    /// Tell whether results differ: fio's JSON, the lab's, or plain numbers
    #[command(after_long_help = crate::compare::EXAMPLES)]
    Compare(crate::compare::CompareArgs),
    /// Generate load as fio does, on a volume, over rings or over NBD
    #[command(after_help = crate::bench::HELP)]
    Bench(crate::bench::BenchArgs),
    /// Record what happens to requests, from running servers, as blktrace does
    #[command(after_help = crate::trace::HELP)]
    Trace(crate::trace::TraceArgs),
    /// Where the time of requests went, hop by hop, now or from captures
    #[command(after_help = crate::latency::HELP)]
    Latency(crate::latency::LatencyArgs),
    /// Make RAID-5 arrays, look at them, add and replace members, check parity
    #[command(subcommand, after_help = crate::raid::HELP)]
    Raid(crate::raid::RaidCommand),
    /// Look at a running server's memory, change its limits, squeeze it
    #[command(subcommand, after_help = crate::memory::HELP)]
    Ctl(crate::memory::CtlCommand),
    /// What the page cache of a served disk counts
    #[command(after_help = crate::cache::HELP)]
    Cache(crate::cache::CacheArgs),
    /// Attach served disks to Xen guests, detach and list them
    #[command(subcommand, after_help = crate::xen::HELP)]
    Xen(crate::xen::XenCommand),
    /// Experiments and measurements
    #[command(subcommand)]
    Lab(LabCommand),
}

#[derive(Args, Debug, Default)]
pub struct ServeArgs {
    /// A disk: its name (also its NBD export name) and its volume; may be given several times
    #[arg(long = "disk", value_name = "NAME=VOLUME")]
    pub disks: Vec<String>,
    /// Let one front end or virtual machine at a time use disk NAME, or NBD clients only; may be given several times [default: a second one
    /// is let in, with a warning]
    #[arg(long, value_name = "NAME")]
    pub exclusive: Vec<String>,
    /// Socket for front ends on rings
    #[arg(long, value_name = "unix:PATH")]
    pub local: Option<String>,
    /// Socket for NBD clients; may be given several times. TCP only on loopback addresses, unless --allow-remote
    #[arg(long, value_name = "unix:PATH|tcp:HOST:PORT")]
    pub nbd: Vec<String>,
    /// Socket at which a virtual machine gets disk NAME by vhost-user-blk; may be given several times. One machine at a time
    #[arg(long, value_name = "NAME=unix:PATH")]
    pub vhost_user: Vec<String>,
    /// Memory of all virtual machines together that nobody has allocated when they connect, and that is charged to the server's control group
    /// where the server touches it first; `none`: no limit [default: half of the group's limit, if it has one]
    #[arg(long, value_name = "SIZE|none")]
    pub max_guest_unallocated: Option<String>,
    /// Serve Xen guests: `pvblk xen attach` makes a disk appear in one. For dom0 or a driver domain
    #[arg(long)]
    pub xen: bool,
    /// Attach disk DISK to each Xen guest of this name as soon as there is one: after a reboot or restore, too. DEVICE is xvda, xvdb and
    /// so on [default: the first that is free]; may be given several times
    #[arg(long, value_name = "DISK=GUEST[:DEVICE]")]
    pub xen_attach: Vec<String>,
    /// Don't offer persistent grants to Xen guests: the hypervisor copies their data
    #[arg(long)]
    pub no_persistent_grants: bool,
    /// The same in a file; flags add to it
    #[arg(long, value_name = "FILE.toml")]
    pub config: Option<PathBuf>,
    /// Worker threads [default: one per CPU]
    #[arg(long, value_name = "N")]
    pub workers: Option<usize>,
    /// Most rings of one disk that a front end or virtual machine may ask for, 1 to 64 [default: the number of workers, at least 4]
    #[arg(long, value_name = "N")]
    pub max_queues: Option<u32>,
    /// Most pages of one ring: 1, 2, 4, 8 or 16 [default: 16]
    #[arg(long, value_name = "N")]
    pub max_ring_pages: Option<u32>,
    /// Longest time to poll an idle queue before sleeping on it, microseconds; 0: never poll [default: 50]
    #[arg(long, value_name = "MICROSECONDS")]
    pub spin_us: Option<u64>,
    /// Let NBD listen on addresses that other machines reach. NBD has no passwords: anybody who reaches it reads and writes the disks
    #[arg(long)]
    pub allow_remote: bool,
    /// Socket for `pvblk raid`, `pvblk cache`, `pvblk ctl`, `pvblk trace` and `pvblk latency --live`
    #[arg(long, value_name = "unix:PATH")]
    pub control: Option<String>,
    /// Log requests that take longer, such as 100ms, with all their hops, at most 10 a second. Records all the time
    #[arg(long, value_name = "TIME", value_parser = config::time)]
    pub slow: Option<Duration>,
    /// Free buffer pages (4 KiB) that each NBD connection keeps for its next requests, 0 to 16384 [default: 1024]
    #[arg(long, value_name = "PAGES")]
    pub max_buffer_pages: Option<usize>,
    /// How long connections keep none after memory got tight, milliseconds, 0 to 60000 [default: 10]
    #[arg(long, value_name = "MILLISECONDS")]
    pub buffer_squeeze_duration_ms: Option<u64>,
    /// Buffer pages (4 KiB) for each worker that are kept even then, 0 to 64 [default: 64]
    #[arg(long, value_name = "PAGES")]
    pub buffer_floor_pages: Option<usize>,
    /// Don't listen for memory pressure: squeeze only when told to, by `pvblk ctl squeeze`
    #[arg(long)]
    pub no_pressure: bool,
    /// Most memory for the data of all NBD clients, such as 1G: writes on their way and replies not yet read. Each disk's clients have a floor on top, half
    /// of it together [default: a quarter of the machine's memory or of the control group's limit, at most 4G]
    #[arg(long, value_name = "SIZE")]
    pub max_client_memory: Option<String>,
    /// The same for the NBD clients of one disk [default: a quarter of that, 64M to 512M]
    #[arg(long, value_name = "SIZE")]
    pub max_client_memory_per_disk: Option<String>,
    /// Most NBD connections, 1 to 65536 [default: 1024]
    #[arg(long, value_name = "N")]
    pub max_connections: Option<usize>,
    /// Most NBD connections of one disk, 1 to 65536 [default: 128]
    #[arg(long, value_name = "N")]
    pub max_connections_per_disk: Option<usize>,
}

#[derive(Args, Debug)]
pub struct AttachArgs {
    /// The server's socket for front ends
    #[arg(value_name = "unix:PATH")]
    pub server: String,
    /// Which disk
    #[arg(long, value_name = "NAME")]
    pub disk: String,
    /// Rings to ask for, 1 to 64
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub queues: u32,
    /// Pages of each ring to ask for: 1, 2, 4, 8 or 16 (32 to 512 requests in flight)
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub ring_pages: u32,
    /// Memory shared with the server for data, such as 64M
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub memory: String,
    /// Where to offer the disk as NBD, under its name; may be given several times
    #[arg(long, value_name = "unix:PATH|tcp:HOST:PORT", required = true)]
    pub nbd: Vec<String>,
    /// Worker threads [default: one per CPU]
    #[arg(long, value_name = "N")]
    pub workers: Option<usize>,
    /// Longest time to poll an idle queue before sleeping on it, microseconds; 0: never poll
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50)]
    pub spin_us: u64,
    /// When the server goes away, requests wait this many seconds for it to come back, and are replayed; 0: they fail
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub reconnect: u64,
    /// Let NBD listen on addresses that other machines reach
    #[arg(long)]
    pub allow_remote: bool,
    /// Socket for `pvblk trace` and `pvblk latency --live`
    #[arg(long, value_name = "unix:PATH")]
    pub control: Option<String>,
    /// Log requests that take longer, such as 100ms, with all their hops, at most 10 a second. Records all the time
    #[arg(long, value_name = "TIME", value_parser = config::time)]
    pub slow: Option<Duration>,
}

#[derive(Subcommand, Debug)]
pub enum LabCommand {
    /// The whole ring path between two processes against a bare ring that only copies
    Path(PathArgs),
    /// The NBD server against nbdkit, qemu-nbd and a server that does nothing, same fio job
    Nbd(NbdArgs),
    /// vhost-user-blk: our server against qemu-storage-daemon, same client
    Vhost(VhostArgs),
    /// A server with many idle attached disks: CPU time, and the memory bill against the kernel's figures
    Idle(IdleArgs),
    /// Both sides of the ring path in one thread, to count instructions under callgrind
    Instructions(InstructionsArgs),
    /// What recording a trace costs: CPU of each event on the in-memory path
    TraceCost(TraceCostArgs),
    /// Seed 000's table: rings of 1 and of 8 pages on a modelled SSD
    Rings(SweepArgs),
    /// Seed 001's table: one queue against several, by jobs
    Queues(SweepArgs),
    /// Seed 004's tables: RAID-5's direct write path and the stripe queue, by tiobench's phases
    StripeQueue(StripeQueueArgs),
    /// Seed 003's experiments: what is swapped, how fast memory is back, what it costs, who survives. Needs root, cgroup v1 and no swap
    Squeeze(SqueezeArgs),
    #[command(hide = true)]
    Bystander,
    /// RAID-5 writes of ours against those of the kernel's md in user-mode Linux, members in memory
    Md(MdArgs),
    /// Seed 002's tables: processes that read through a page cache that is too small, by what it does then
    PageOrder(PageOrderArgs),
    /// The same jobs by fio and by `pvblk bench`: do they agree?
    Fio(FioArgs),
    /// Kills server and front end in the middle of writes, again and again: nothing answered may be lost
    Crash(CrashArgs),
    #[command(hide = true)]
    CrashLoad(CrashLoadArgs),
    #[command(hide = true)]
    BareServer(BareServerArgs),
    #[command(hide = true)]
    TraceSample(TraceSampleArgs),
    /// An NBD server that answers and does nothing else: what the client alone can do
    NullNbd(NullNbdArgs),
}

impl LabCommand {
    /// Where its samples are to be written.
    pub fn json(&self) -> Option<&PathBuf> {
        match self {
            LabCommand::Path(a) => a.json.as_ref(),
            LabCommand::Nbd(a) => a.json.as_ref(),
            LabCommand::Vhost(a) => a.json.as_ref(),
            LabCommand::Idle(a) => a.json.as_ref(),
            LabCommand::Rings(a) | LabCommand::Queues(a) => a.json.as_ref(),
            LabCommand::StripeQueue(a) => a.json.as_ref(),
            LabCommand::Squeeze(a) => a.json.as_ref(),
            LabCommand::Md(a) => a.json.as_ref(),
            LabCommand::PageOrder(a) => a.json.as_ref(),
            LabCommand::Fio(a) => a.json.as_ref(),
            LabCommand::Crash(a) => a.json.as_ref(),
            LabCommand::TraceCost(a) => a.json.as_ref(),
            _ => None,
        }
    }
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
    /// Write raw samples here
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
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
    /// Rounds, interleaved
    #[arg(long, default_value_t = 5)]
    pub runs: usize,
    /// Seconds of each sample
    #[arg(long, default_value_t = 3)]
    pub seconds: u32,
    /// Let client and server use all CPUs, instead of one each
    #[arg(long)]
    pub unpinned: bool,
    /// Write raw samples here
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub struct IdleArgs {
    /// Attached disks
    #[arg(long, default_value_t = 100)]
    pub disks: usize,
    /// Seconds to watch
    #[arg(long, default_value_t = 60)]
    pub seconds: u64,
    /// Write the figures here
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub struct BareServerArgs {
    /// Socket to pass the shared memory on
    pub socket: PathBuf,
    /// Bytes of the store
    pub span: u64,
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
    /// Write raw samples here
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
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
}

#[derive(Args, Debug)]
pub struct CrashArgs {
    /// Kills and restarts, over all exports and volumes
    #[arg(long, default_value_t = 1000)]
    pub cycles: u32,
    /// What decides who is killed when [default: random, printed]
    #[arg(long)]
    pub seed: Option<u64>,
    /// How the disks are reached: rings, vhost-user, nbd [default: all]
    #[arg(long, value_delimiter = ',')]
    pub export: Vec<Export>,
    /// What they are: file, direct, cache, raid5 [default: all], each with each export
    #[arg(long, value_delimiter = ',')]
    pub volume: Vec<Volume>,
    /// Where `slow_medium` is mounted, an example of the end-to-end tests: the disks' files are made there, and writes are held
    /// beyond kills
    #[arg(long, value_name = "DIR")]
    pub medium: Option<PathBuf>,
    /// Disks at work at a time
    #[arg(long, default_value_t = 4)]
    pub jobs: usize,
    /// Write the figures here
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub struct CrashLoadArgs {
    /// The server's socket
    pub socket: PathBuf,
    /// The journal
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
    /// Write raw samples here, and plots beside
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
    /// Print each expected shape with its figure; exit 1 if one fails
    #[arg(long)]
    pub check: bool,
    /// A minute's worth
    #[arg(long)]
    pub quick: bool,
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
    /// Which members [default: all]
    #[arg(long, value_name = "MEMBERS", value_delimiter = ',')]
    pub on: Vec<StripeQueuePart>,
    /// Only cells whose name has this in it, such as `random writes, 4 KiB` or, in memory, `two threads, 4 KiB`
    #[arg(long, value_name = "TEXT")]
    pub cells: Option<String>,
    /// Where the members that are files are made [default: the folder for temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub dir: Option<PathBuf>,
    /// Write raw samples here, and plots beside
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
    /// Print each expected shape with its figure; exit 1 if one fails
    #[arg(long)]
    pub check: bool,
    /// A few minutes' worth
    #[arg(long)]
    pub quick: bool,
}

#[derive(Args, Debug)]
pub struct SqueezeArgs {
    /// Runs of each; the overhead has at least five [default: 3, or 1 with --quick]
    #[arg(long)]
    pub runs: Option<usize>,
    /// Which parts [default: all]
    #[arg(long, value_name = "PARTS", value_delimiter = ',')]
    pub on: Vec<SqueezePart>,
    /// Where the swap file is made [default: the folder for temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub dir: Option<PathBuf>,
    /// Write raw samples here, and plots beside
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
    /// Print each expected shape with its figure; exit 1 if one fails
    #[arg(long)]
    pub check: bool,
    /// Smaller and shorter
    #[arg(long)]
    pub quick: bool,
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
    /// Files
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
    /// Queues
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    pub queues: Vec<u16>,
    /// Write raw samples here
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
    /// Print each expected ratio with its figure; exit 1 if one isn't reached
    #[arg(long)]
    pub check: bool,
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
    /// Stripe heads of ours
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub stripes: usize,
    /// Write raw samples here
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
    /// Print each expected ratio with its figure; exit 1 if one isn't reached
    #[arg(long)]
    pub check: bool,
}

#[derive(Args, Debug)]
pub struct PageOrderArgs {
    /// Seconds of virtual time of each cell of up to 16 processes; with more, less
    #[arg(long, default_value_t = 0.5)]
    pub seconds: f64,
    /// Cells at a time [default: one for each CPU]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Write raw samples here, and plots beside
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
    /// Print each expected shape with its figure; exit 1 if one fails
    #[arg(long)]
    pub check: bool,
    /// Only two policies, as in history and the default, and a small file
    #[arg(long)]
    pub quick: bool,
    /// Which part [default: all]
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
    /// Write the figures here
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
    /// Print whether they agree within 5 %; exit 1 if not
    #[arg(long)]
    pub check: bool,
}
