//! The specification of a volume, as plain data: parsed, printed, checked, opened.

mod cache;
mod client;
mod image;
mod nbd;
mod parse;
mod raid5;
mod reach;

pub use cache::CacheSpec;
pub use client::{Need, RingsSpec, VhostSpec};
pub use image::ImageOpener;
pub use nbd::NbdSpec;
pub use raid5::{Candidates, Found, Look, Members, Raid5Spec, SpecNames, look, spec_in_folder};
pub use reach::Reach;

use crate::opener::FileOpener;
use crate::{DelayVolume, FaultVolume, FileVolume, MemVolume, NullVolume};
use pvblk_block::units::{self, Rate, Size, Span};
use pvblk_block::{BlockDevice, Error, ErrorKind};
use pvblk_client::rbd::RbdSpec;
use rustix::fs::{FileType, Mode, OFlags};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A volume, or a decorator over one. `Display` prints the spec that parses to the same value
/// (except for a path that itself holds a comma and a file option, or, inside of `raid5`, a bracket without its partner: only this
/// form can express those).
#[derive(Clone, Debug, PartialEq)]
pub enum VolumeSpec {
    /// `null[:SIZE][,notouch]`
    Null(NullSpec),
    /// `mem:SIZE[,sector=512|4096]`
    Mem(MemSpec),
    /// `file:PATH[,OPTION…]`, or a plain path
    File(FileSpec),
    /// `delay:MODEL:INNER`
    Delay(DelaySpec, Box<VolumeSpec>),
    /// `fault:FAULTS:INNER`
    Fault(FaultSpec, Box<VolumeSpec>),
    /// `cache:SIZE[,OPTION…]:INNER`
    Cache(CacheSpec, Box<VolumeSpec>),
    /// `raid5:[MEMBER][MEMBER]…[,OPTION…]` or `raid5:uuid=UUID,in=PATTERN…[,OPTION…]`
    Raid5(Raid5Spec),
    /// `nbd://HOST:PORT/EXPORT[,OPTION…]` or `nbd+unix:///EXPORT?socket=PATH[,OPTION…]`: an export of an NBD server
    Nbd(NbdSpec),
    /// `rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][,OPTION…]`: an image of a Ceph cluster
    Rbd(RbdSpec),
    /// `vhost-user:unix:PATH[,OPTION…]`: a disk of a vhost-user-blk server
    Vhost(VhostSpec),
    /// `rings:unix:PATH,disk=NAME[,OPTION…]`: a disk of a local server
    Rings(RingsSpec),
}

/// A volume that stores nothing: `null:SIZE[,notouch]`, 1 TiB if no size is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NullSpec {
    /// Capacity in bytes: a multiple of 512, at least 512.
    pub size_bytes: u64,
    /// True if reads zero their buffers; `notouch` leaves the buffers as they are.
    pub touch: bool,
}

impl Default for NullSpec {
    fn default() -> NullSpec {
        NullSpec {
            size_bytes: 1 << 40,
            touch: true,
        }
    }
}

/// A volume in memory: `mem:SIZE[,sector=512|4096]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemSpec {
    /// Capacity in bytes: a multiple of 4096, at least 4096.
    pub size_bytes: u64,
    /// Logical sector in bytes: 512 or 4096.
    pub sector_bytes: u32,
}

impl MemSpec {
    /// `size_bytes` of memory with 512-byte sectors.
    pub fn new(size_bytes: u64) -> MemSpec {
        MemSpec {
            size_bytes,
            sector_bytes: 512,
        }
    }
}

/// A regular file or block device:
/// `file:PATH[,direct][,ro][,nolock][,engine=uring|sync][,size=SIZE][,sector=512|4096][,format=raw]`.
///
/// The path is everything up to the first comma that a known option follows, so colons and other
/// commas are part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSpec {
    pub path: PathBuf,
    /// Bypass the page cache (`O_DIRECT`).
    pub direct: bool,
    /// Open for reading only.
    pub read_only: bool,
    /// Take the lock that keeps a second writer out; `nolock` doesn't.
    pub lock: bool,
    /// The way of I/O; `None`: `sync` on memory filesystems, where io_uring only adds a slow worker
    /// thread, otherwise `uring`.
    pub engine: Option<Engine>,
    /// Make the file if there is none (sparse, readable by its owner only), or extend a shorter one to
    /// this many bytes. A longer one stays as it is. Not for block devices.
    pub size_bytes: Option<u64>,
    /// Logical sector in bytes, 512 or 4096; `None`: the smallest that the file allows.
    pub sector_bytes: Option<u32>,
    /// Its bytes are the disk, also if they look like a container's, such as a qcow2 image: `format=raw`. For every disk whose user isn't
    /// trusted: who can write to it can make it look like one, and without this it isn't opened the next time.
    pub raw: bool,
}

impl FileSpec {
    /// The file at `path`, writable, locked, through the page cache.
    pub fn new(path: impl Into<PathBuf>) -> FileSpec {
        FileSpec {
            path: path.into(),
            direct: false,
            read_only: false,
            lock: true,
            engine: None,
            size_bytes: None,
            sector_bytes: None,
            raw: false,
        }
    }

    /// Refuses a container, whose bytes aren't the disk that is in it, unless they are to be served as they are. A read-only volume
    /// destroys nothing, and is warned.
    pub(crate) fn check_format(&self, opener: &dyn FileOpener) -> Result<(), Error> {
        if self.raw {
            return Ok(());
        }
        let Some(found) = self.container(opener) else {
            return Ok(());
        };
        let (path, what) = (self.path.display(), found.what);
        if self.read_only {
            tracing::warn!(
                "file:{path}: it is {what}, and its bytes are served, not the disk inside; say format=raw if they are wanted"
            );
            return Ok(());
        }
        let inside = match found.is_luks() {
            true => "open it with `cryptsetup open` and serve the device that it makes",
            false => "convert it with `qemu-img convert -O raw`",
        };
        let why = format!(
            "file:{path}: it is {what}, and a guest would write over it instead of the disk inside: {inside}; if a guest made this of its own raw disk, \
             add the option format=raw"
        );
        Err(Error::new(ErrorKind::Content, why))
    }

    /// The container that the file is. One that can't be read, or doesn't exist, is none: opening it says why.
    fn container(&self, opener: &dyn FileOpener) -> Option<pvblk_raid5::found::Found> {
        // A pipe would be waited for, and opening a tape would wind it.
        let kind = opener.stat(&self.path).ok()?.kind();
        if !matches!(kind, FileType::RegularFile | FileType::BlockDevice) {
            return None;
        }
        let file = opener.open(&self.path, OFlags::RDONLY, Mode::empty());
        pvblk_raid5::found::container_in(file.ok()?.into())
    }
}

/// The system calls by which a file volume reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// io_uring, many requests in flight per queue.
    Uring,
    /// `preadv` and `pwritev` when the request is submitted, one after another.
    Sync,
}

/// A modelled device: `delay:[TIME][,iops=RATE][,bw=RATE][,channels=N][,serial]:INNER`.
///
/// A request submitted at `t` is executed on the inner device at once and completes when the inner
/// device is done and all of these have passed:
/// - `service` after its service begins. That is `t`, or later: when one of `channels` is free (they
///   are shared by all queues and given out in order of submission), and with `serial` also when the
///   previous request of the same queue is due;
/// - its slot of `1/iops` seconds, one after another over all queues;
/// - its data's time on the wire, bytes/`bandwidth`, one after another over all queues (reads and
///   writes; other operations have no data).
///
/// Not modelled: seeks, caches, differences between reads and writes, and bursts above a cap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DelaySpec {
    /// Time of service of each request, up to 1 hour.
    pub service: Duration,
    /// Requests per second over all queues, 1 to 10⁹ (`k`, `M` are 1000, 1000²); `None`: no cap.
    pub iops: Option<u64>,
    /// Bytes per second over all queues, 1 to 10¹⁵ (`k`, `M`, `G`, `T` are powers of 1000); `None`: no cap.
    pub bandwidth: Option<u64>,
    /// Requests served at the same time, 1 to 1024; `None`: any number.
    pub channels: Option<u32>,
    /// Each queue serves one request at a time.
    pub serial: bool,
}

/// Faults by seed: `fault:[seed=N][,after=N][,error=P][,read-error=P][,write-error=P][,flush-error=P][,stall=P/TIME][,torn=P]:INNER`.
///
/// Each request draws its fate from a generator seeded by `seed` and the queue's index, so the same
/// requests in the same order on a queue meet the same faults. Probabilities are 0 to 1.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FaultSpec {
    /// The seed; `None`: a random one, which the log tells.
    pub seed: Option<u64>,
    /// So many requests, of all queues together, meet no fault first.
    pub after: u64,
    /// Probability that a request fails with an I/O error and does nothing.
    pub error: f64,
    /// Instead of `error`, for reads.
    pub read_error: Option<f64>,
    /// Instead of `error`, for writes, discards and write-zeroes.
    pub write_error: Option<f64>,
    /// Instead of `error`, for flushes.
    pub flush_error: Option<f64>,
    /// Probability that a request's completion is held back for `stall_time`.
    pub stall: f64,
    /// Time for which a stalled completion is held back, up to 1 hour.
    pub stall_time: Duration,
    /// Probability that only the first part of a write is stored (a random number of logical sectors,
    /// never all), and then an I/O error reported.
    pub torn: f64,
}

/// The longest modelled time.
const LONGEST: Duration = Duration::from_secs(3600);

impl VolumeSpec {
    /// Checks all values against their ranges; the parser and [`VolumeSpec::open`] do it too.
    pub fn validate(&self) -> Result<(), Error> {
        self.problem()
            .map_or(Ok(()), |why| Err(Error::config(format!("{self}: {why}"))))
    }

    /// Opens the volume and everything below it, in this process, with the needs of a disk that is served.
    pub fn open(&self) -> Result<Arc<dyn BlockDevice>, Error> {
        self.open_for(&Need::default())
    }

    /// Opens the volume and everything below it, for some use.
    pub fn open_for(&self, need: &Need) -> Result<Arc<dyn BlockDevice>, Error> {
        self.validate()?;
        let below = |inner: &VolumeSpec| inner.open_for(need);
        Ok(match self {
            VolumeSpec::Null(spec) => Arc::new(NullVolume::open(spec)?),
            VolumeSpec::Mem(spec) => Arc::new(MemVolume::open(spec)?),
            VolumeSpec::File(spec) => Arc::new(FileVolume::open_by(spec, &need.opener)?),
            VolumeSpec::Delay(spec, inner) => Arc::new(DelayVolume::new(spec, below(inner)?)?),
            VolumeSpec::Fault(spec, inner) => Arc::new(FaultVolume::new(spec, below(inner)?)?),
            VolumeSpec::Cache(spec, inner) => spec.open(inner.open_for(&need.below_cache())?)?,
            VolumeSpec::Raid5(spec) => spec.open(need)?,
            VolumeSpec::Nbd(spec) => spec.open(need)?,
            VolumeSpec::Rbd(spec) => need.images.open(spec, need)?,
            VolumeSpec::Vhost(spec) => spec.open(need)?,
            VolumeSpec::Rings(spec) => spec.open(need)?,
        })
    }

    /// The same for a device whose own metadata says what it is, such as a member of an array: it isn't looked at for containers, of which a part may
    /// be left where the array writes nothing.
    #[must_use]
    pub fn as_member(&self) -> VolumeSpec {
        let inner = |inner: &VolumeSpec| Box::new(inner.as_member());
        match self {
            VolumeSpec::File(file) => VolumeSpec::File(FileSpec {
                raw: true,
                ..file.clone()
            }),
            VolumeSpec::Delay(spec, of) => VolumeSpec::Delay(spec.clone(), inner(of)),
            VolumeSpec::Fault(spec, of) => VolumeSpec::Fault(spec.clone(), inner(of)),
            VolumeSpec::Cache(spec, of) => VolumeSpec::Cache(spec.clone(), inner(of)),
            _ => self.clone(),
        }
    }

    /// The file that it stands on, if it stands on one.
    pub fn file(&self) -> Option<&FileSpec> {
        match self {
            VolumeSpec::File(file) => Some(file),
            VolumeSpec::Delay(_, inner)
            | VolumeSpec::Fault(_, inner)
            | VolumeSpec::Cache(_, inner) => inner.file(),
            _ => None,
        }
    }

    fn problem(&self) -> Option<String> {
        let sector_ok = |s: u32| s == 512 || s == 4096;
        match self {
            VolumeSpec::Null(s) => s.problem(),
            VolumeSpec::Mem(s) if !sector_ok(s.sector_bytes) => {
                Some("sector must be 512 or 4096".into())
            }
            VolumeSpec::Mem(s) => size_problem(s.size_bytes, 4096),
            VolumeSpec::File(s) if s.path.as_os_str().is_empty() => {
                Some("a path is missing, as in file:/srv/disk.img".into())
            }
            VolumeSpec::File(s) if s.read_only && s.size_bytes.is_some() => {
                Some("`size` makes or extends a file, which `ro` forbids; drop one".into())
            }
            VolumeSpec::File(s) if s.sector_bytes.is_some_and(|s| !sector_ok(s)) => {
                Some("sector must be 512 or 4096".into())
            }
            VolumeSpec::File(s) => s
                .size_bytes
                .and_then(|size| size_problem(size, s.sector_bytes.unwrap_or(512).into())),
            VolumeSpec::Delay(s, inner) => s.problem().or_else(|| inner.problem()),
            VolumeSpec::Fault(s, inner) => s.problem().or_else(|| inner.problem()),
            VolumeSpec::Cache(s, inner) => {
                let mine = s.problem().or_else(|| inner.problem_below_cache());
                mine.or_else(|| inner.problem())
            }
            VolumeSpec::Raid5(s) => s.problem(),
            VolumeSpec::Nbd(s) => s.problem(),
            VolumeSpec::Rbd(s) => s.problem(),
            VolumeSpec::Vhost(s) => s.problem(),
            VolumeSpec::Rings(s) => s.problem(),
        }
    }
}

impl VolumeSpec {
    /// The mistake of a client below a cache that is to have one queue: the cache's background has that.
    fn problem_below_cache(&self) -> Option<String> {
        let (word, queues) = match self {
            VolumeSpec::Nbd(s) => ("connections", s.connections.or(s.uri.connections)),
            VolumeSpec::Vhost(s) => ("queues", s.queues),
            VolumeSpec::Rings(s) => ("queues", s.queues),
            VolumeSpec::Delay(_, inner) | VolumeSpec::Fault(_, inner) => {
                return inner.problem_below_cache();
            }
            _ => return None,
        };
        (queues == Some(1)).then(|| {
            format!(
                "a cache takes one of the {word} for its background work: give {word}=2 or more"
            )
        })
    }
}

impl NullSpec {
    fn problem(&self) -> Option<String> {
        size_problem(self.size_bytes, 512)
    }
}

impl DelaySpec {
    pub(crate) fn problem(&self) -> Option<String> {
        let outside = |v: Option<u64>, max| v.is_some_and(|v| v == 0 || v > max);
        if self.service > LONGEST {
            Some("the service time must be at most 3600s".into())
        } else if outside(self.iops, 1_000_000_000) {
            Some("iops must be 1 to 1000M".into())
        } else if outside(self.bandwidth, 1_000_000_000_000_000) {
            Some("bw must be 1 to 1000T bytes per second".into())
        } else if outside(self.channels.map(u64::from), 1024) {
            Some("channels must be 1 to 1024".into())
        } else {
            None
        }
    }
}

impl FaultSpec {
    pub(crate) fn problem(&self) -> Option<String> {
        let named = [
            ("error", Some(self.error)),
            ("read-error", self.read_error),
            ("write-error", self.write_error),
            ("flush-error", self.flush_error),
            ("stall", Some(self.stall)),
            ("torn", Some(self.torn)),
        ];
        for (name, value) in named {
            if value.is_some_and(|p| !(0.0..=1.0).contains(&p)) {
                return Some(format!("{name} must be a probability from 0 to 1"));
            }
        }
        (self.stall_time > LONGEST).then(|| "the stall time must be at most 3600s".into())
    }
}

fn size_problem(size: u64, unit: u64) -> Option<String> {
    // Offsets in files are signed, and sums of two offsets must not overflow.
    if size == 0 || !size.is_multiple_of(unit) || size > 1 << 62 {
        return Some(format!(
            "size must be a multiple of {unit} bytes, from {unit} to 4194304T"
        ));
    }
    None
}

impl fmt::Display for VolumeSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VolumeSpec::Null(s) => {
                write!(f, "null:{}", Size(s.size_bytes))?;
                f.write_str(if s.touch { "" } else { ",notouch" })
            }
            VolumeSpec::Mem(s) => {
                write!(f, "mem:{}", Size(s.size_bytes))?;
                match s.sector_bytes {
                    512 => Ok(()),
                    other => write!(f, ",sector={other}"),
                }
            }
            VolumeSpec::File(s) => s.fmt(f),
            VolumeSpec::Delay(s, inner) => write!(f, "{s}:{inner}"),
            VolumeSpec::Fault(s, inner) => write!(f, "{s}:{inner}"),
            VolumeSpec::Cache(s, inner) => write!(f, "{s}:{inner}"),
            VolumeSpec::Raid5(s) => s.fmt(f),
            VolumeSpec::Nbd(s) => s.fmt(f),
            VolumeSpec::Rbd(s) => s.fmt(f),
            VolumeSpec::Vhost(s) => s.fmt(f),
            VolumeSpec::Rings(s) => s.fmt(f),
        }
    }
}

impl fmt::Display for FileSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file:{}", self.path.display())?;
        for (set, text) in [
            (self.direct, ",direct"),
            (self.read_only, ",ro"),
            (!self.lock, ",nolock"),
        ] {
            f.write_str(if set { text } else { "" })?;
        }
        match self.engine {
            Some(Engine::Uring) => f.write_str(",engine=uring")?,
            Some(Engine::Sync) => f.write_str(",engine=sync")?,
            None => {}
        }
        if let Some(size) = self.size_bytes {
            write!(f, ",size={}", Size(size))?;
        }
        if let Some(sector) = self.sector_bytes {
            write!(f, ",sector={sector}")?;
        }
        f.write_str(if self.raw { ",format=raw" } else { "" })
    }
}

impl fmt::Display for DelaySpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "delay:{}", Span(self.service))?;
        if let Some(iops) = self.iops {
            write!(f, ",iops={}", Rate(iops))?;
        }
        if let Some(bandwidth) = self.bandwidth {
            write!(f, ",bw={}", Rate(bandwidth))?;
        }
        if let Some(channels) = self.channels {
            write!(f, ",channels={channels}")?;
        }
        f.write_str(if self.serial { ",serial" } else { "" })
    }
}

impl fmt::Display for FaultSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        parts.extend(self.seed.map(|seed| format!("seed={seed}")));
        parts.extend((self.after != 0).then(|| format!("after={}", self.after)));
        let nonzero = |p: f64| Some(p).filter(|&p| p != 0.0);
        for (name, value) in [
            ("error", nonzero(self.error)),
            ("read-error", self.read_error),
            ("write-error", self.write_error),
            ("flush-error", self.flush_error),
        ] {
            parts.extend(value.map(|p| format!("{name}={p}")));
        }
        if self.stall != 0.0 || self.stall_time != Duration::ZERO {
            parts.push(format!("stall={}/{}", self.stall, Span(self.stall_time)));
        }
        parts.extend(nonzero(self.torn).map(|p| format!("torn={p}")));
        if parts.is_empty() {
            // A fault device without faults is still one.
            parts.push("error=0".into());
        }
        write!(f, "fault:{}", parts.join(","))
    }
}

/// Bytes of a size such as `512`, `64k`, `1G` (powers of 1024). Errors with what is allowed.
pub fn parse_size(text: &str) -> Result<u64, Error> {
    units::parse_size(text).ok_or_else(|| {
        Error::config(format!(
            "{text:?} is not a size: write one such as 64M or 1G"
        ))
    })
}
