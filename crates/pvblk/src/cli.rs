//! Flags: parsed here, checked in `config`.

use crate::config;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::time::Duration;

const VOLUMES: &str = "\
Volumes:
  file:PATH[,direct][,ro][,size=SIZE]
      a regular file or block device; ,format=raw if its bytes are the disk although they look like
      an image of another format, such as qcow2
  mem:SIZE
      memory; gone when the server stops
  null:SIZE
      nothing; reads are zeros
  delay:210us,iops=209k,bw=2.4G:VOLUME
      a modelled device in front of another volume
  fault:seed=1,error=0.01:VOLUME
      errors, stalls and torn writes, by seed
  raid5:[VOLUME][VOLUME][VOLUME]
      a RAID-5 array in md's format, and its spares; see `pvblk raid --help`. [missing] for a lost
      member, then ,stripes=N (4 KiB of each member kept in memory) and ,force
  cache:256M:VOLUME
      a page cache in front of another volume; ,mode=write-back|write-through|read-only,
      ,readahead=128k (else the kernel's for the disk), ,dirty=20 (percent before writers wait)
  nbd://HOST:PORT/NAME, nbd+unix:///NAME?socket=PATH
      an export of an NBD server; ,connections=N at the start, and no more [default: --max-queues];
      requests wait for a server that went away, with ,wait=TIME not for ever, and are sent again;
      with ,on-reconnect=fail they fail
  nbds://HOST:PORT/NAME?tls-certificates=DIR, nbds+unix:///NAME?socket=PATH&tls-certificates=DIR
      the same over TLS, by the certificates in DIR; &tls-hostname=NAME if the server's has another
      name than the host
  rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][,conf=PATH][,id=NAME][,ro][,nolock][,on-lost-lock=fail|wait]
      an image of a Ceph cluster; needs the package librbd1
  vhost-user:unix:PATH[,queues=N][,queue-size=E][,memory=SIZE]
      a disk of a vhost-user-blk server
  rings:unix:PATH,disk=NAME[,queues=N][,ring-pages=P][,memory=SIZE]
      a disk of another `pvblk serve --local`, over rings

Examples:
  pvblk serve --disk vm1=file:/srv/vm1.img,size=20G --local unix:/run/pvblk.sock
  pvblk serve --disk a=mem:1G --disk b=file:b.img --nbd unix:/tmp/nbd.sock --nbd tcp:127.0.0.1:10809
  pvblk serve --disk a=cache:256M:nbd://127.0.0.1:10809/a --local unix:/run/cached.sock
  pvblk serve --config /etc/pvblk.toml
  qemu-img convert -n -O raw image.qcow2 'nbd+unix:///a?socket=/tmp/nbd.sock'
  pvblk serve --disk vm1=file:/srv/vm1.img --vhost-user vm1=unix:/run/vm1.sock
  qemu-system-x86_64 -object memory-backend-memfd,id=m,size=2G,share=on -machine q35,memory-backend=m -m 2G \
    -chardev socket,id=c,path=/run/vm1.sock,reconnect=1 -device vhost-user-blk-pci,chardev=c,num-queues=4
  pvblk serve --disk vm1=file:/srv/vm1.img --xen     and then: pvblk xen attach vm1 GUEST
  pvblk serve --disk vm1=file:/srv/vm1.img --xen --xen-attach vm1=GUEST:xvda

Signals:
  SIGTERM, SIGINT  stop taking requests, answer those in flight, flush, exit 0
  SIGHUP           look at the sizes of all backings again; attached front ends see the new size. Read the configuration file again
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

A server that is killed or restarted loses no flushed write: requests wait, and those that it hadn't answered are sent again to
the next one. Writes that no completed flush covers may be lost if the server's machine went down with it, or if they were in a
write-back cache; then the next flush fails.";

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
    Serve(Box<ServeArgs>),
    /// Attach to a served disk over rings and offer it as NBD
    #[command(after_long_help = ATTACH)]
    Attach(AttachArgs),
    /// Generate load as fio does, on a volume, over rings or over NBD
    #[command(after_help = crate::bench::HELP)]
    Bench(crate::bench::BenchArgs),
    /// Record what happens to requests, from running servers, as blktrace does
    #[command(after_help = crate::trace::HELP)]
    Trace(crate::trace::TraceArgs),
    /// Where the time of requests went, hop by hop, now or from captures
    #[command(after_help = crate::latency::HELP)]
    Latency(crate::latency::LatencyArgs),
    /// Make one HTML file of results or of a capture: tables, plots, machine, samples
    #[command(after_help = crate::report::HELP)]
    Report(crate::report::ReportArgs),
    /// Add disks to a running server, remove, list and change them
    #[command(subcommand, after_help = crate::disk::HELP)]
    Disk(crate::disk::DiskCommand),
    /// Add ways by which clients reach a running server's disks, and remove them
    #[command(subcommand, after_help = crate::export::HELP)]
    Export(crate::export::ExportCommand),
    /// Make RAID-5 arrays, look at them, add and replace members, check parity
    #[command(subcommand, after_help = crate::raid::HELP)]
    Raid(crate::raid::RaidCommand),
    /// Look at a running server's memory, change its limits, squeeze it; read its configuration again
    #[command(subcommand, after_help = crate::memory::HELP)]
    Ctl(crate::memory::CtlCommand),
    /// Print the events of a running server: trouble of its disks, and their users that come and go
    #[command(after_help = crate::events::HELP)]
    Events(crate::events::EventsArgs),
    /// Show the counters of a served disk's page cache
    #[command(after_help = crate::cache::HELP)]
    Cache(crate::cache::CacheArgs),
    /// Rates, sizes, times and errors of served disks' requests, as `iostat -x` prints them
    #[command(after_help = crate::stat::HELP)]
    Stat(crate::stat::StatArgs),
    /// Offer the page and the metrics of a running server, from a process of its own
    #[command(after_help = crate::web::HELP)]
    Web(crate::web::WebArgs),
    /// Watch the disks of a running server: load, times and where they are spent, arrays, events
    #[command(after_help = crate::top::HELP)]
    Top(crate::top::TopArgs),
    /// Attach served disks to Xen guests, detach and list them
    #[command(subcommand, after_help = crate::xen::HELP)]
    Xen(crate::xen::XenCommand),
    /// Write the manual pages of all commands, and completions for bash, zsh and fish
    #[command(hide = true)]
    Manual(crate::manual::ManualArgs),
}

#[derive(Args, Clone, Debug, Default)]
pub struct ServeArgs {
    /// A disk: its name (also its NBD export name) and its volume; may be given several times
    #[arg(long = "disk", value_name = "NAME=VOLUME")]
    pub disks: Vec<String>,
    /// Let one front end or virtual machine at a time use disk NAME, or NBD clients only; may be given several times [default: a second one
    /// is let in, with a warning]
    #[arg(long, value_name = "NAME")]
    pub exclusive: Vec<String>,
    /// Limit the rates of disk NAME, such as `vm1:read-iops=1k,write-bw=50M,burst=20ms`: read-iops, write-iops, iops, read-bw, write-bw and bw in requests
    /// and bytes a second, each with connection- before it for each connection; may be given several times
    #[arg(long = "limit", value_name = "NAME:LIMITS")]
    pub limits: Vec<String>,
    /// Socket for front ends on rings. After commas: socket-group=GROUP, socket-mode=660
    #[arg(long, value_name = "unix:PATH[,OPTIONS]")]
    pub local: Option<String>,
    /// Socket for NBD clients; may be given several times. TCP only on loopback addresses, unless clients need certificates or with --allow-remote. After commas:
    /// tls=DIR (TLS with the credentials in DIR), tls-mode=require|allow, verify-peer=yes|no, allow=WHO=DISK[:ro] (WHO: any, cert:NAME, uid:USER or
    /// gid:GROUP; DISK: a name or *), socket-group=GROUP, socket-mode=660
    #[arg(long, value_name = "unix:PATH|tcp:HOST:PORT[,OPTIONS]")]
    pub nbd: Vec<String>,
    /// Socket at which a virtual machine gets disk NAME by vhost-user-blk; may be given several times. One machine at a time. After commas: socket-group=GROUP,
    /// socket-mode=660
    #[arg(long, value_name = "NAME=unix:PATH[,OPTIONS]")]
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
    /// Folder that keeps what is added, changed and removed at run time, for the next start; made if there is none [default: $STATE_DIRECTORY, if the
    /// service has one; else changes last as long as the server]
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Read bytes of guests and clients in a process of its own, as USER and without any other right; this process keeps its rights, opens files for it, and
    /// makes and connects sockets. Not with --xen
    #[arg(long, value_name = "USER")]
    pub sandbox: Option<String>,
    /// Folder whose files may be added as disks, and that may hold sockets, while a server in a sandbox runs; may be given several times [default: none but those
    /// that the command line and the configuration name]
    #[arg(long, value_name = "DIR")]
    pub open_in: Vec<PathBuf>,
    /// Server whose disks may be added while a server in a sandbox runs: tcp:HOST:PORT, tcp:HOST:* for all its ports, or unix:PATH of a socket or of a folder with
    /// sockets; may be given several times [default: none but those that the command line and the configuration name]
    #[arg(long, value_name = "ADDRESS")]
    pub connect_to: Vec<String>,
    /// Worker threads [default: one per CPU]
    #[arg(long, value_name = "N")]
    pub workers: Option<usize>,
    /// Most rings of one disk that a front end or virtual machine may ask for, 1 to 64 [default: the number of workers, at least 4]
    #[arg(long, value_name = "N")]
    pub max_queues: Option<u32>,
    /// Most pages of one ring: 1, 2, 4, 8 or 16 [default: 16]
    #[arg(long, value_name = "N")]
    pub max_ring_pages: Option<u32>,
    /// Longest time to poll an idle queue before sleeping on it, microseconds; 0: never poll [default: 100]
    #[arg(long, value_name = "MICROSECONDS")]
    pub spin_us: Option<u64>,
    /// Let NBD listen on addresses that other machines reach. NBD has no passwords: anybody who reaches it reads and writes the disks
    #[arg(long)]
    pub allow_remote: bool,
    /// Socket for `pvblk disk`, `pvblk raid`, `pvblk ctl` and all other commands that ask a server; `none`: none [default: $PVBLK_CONTROL, else
    /// unix:/run/pvblk/control.sock for root and where systemd made the directory]
    #[arg(long, value_name = "unix:PATH|none")]
    pub control: Option<String>,
    #[command(flatten)]
    pub web: crate::web::ServeWebArgs,
    /// Log requests that take longer, such as 100ms, with all their hops, at most 10 a second. Records all the time
    #[arg(long, value_name = "TIME", value_parser = config::time)]
    pub slow: Option<Duration>,
    /// Run PROGRAM for each event, with the arguments EVENT DISK TEXT: see `pvblk events`
    #[arg(long, value_name = "PROGRAM")]
    pub on_event: Option<PathBuf>,
    /// Age from which on a request counts as hanging, such as 10s [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = config::time)]
    pub hang_after: Option<Duration>,
    #[command(flatten)]
    pub log: crate::log::LogArgs,
    /// Free buffer pages (4 KiB) that each NBD connection keeps for its next requests, 0 to 16384 [default: 1024]
    #[arg(long, value_name = "PAGES")]
    pub max_buffer_pages: Option<usize>,
    /// Time for which connections keep no pages after memory got tight, milliseconds, 0 to 60000 [default: 10]
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
    /// Name of the served disk
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
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 100)]
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
    #[command(flatten)]
    pub log: crate::log::LogArgs,
}
