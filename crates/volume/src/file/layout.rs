//! Opening a file or block device, and what can be known about it.

use crate::opener::{FileOpener, PathStat};
use crate::spec::FileSpec;
use pvblk_block::{Error, SECTOR};
use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags, SeekFrom, Statx, StatxFlags};
use rustix::io::Errno;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Filesystems whose pages are the medium (linux/magic.h): io_uring would hand I/O on them to a worker thread.
const MEMORY_FILESYSTEMS: [u64; 3] = [TMPFS, 0x8584_58f6, 0x9584_58f6];

/// The one of them whose pages may be swapped out.
const TMPFS: u64 = 0x0102_1994;

/// Filesystems that tell whether a write to the page cache would wait: XFS, Btrfs.
const TELLING_FILESYSTEMS: [u64; 2] = [0x5846_5342, 0x9123_683e];

/// An open file and its alignments.
pub(super) struct Layout {
    pub(super) file: OwnedFd,
    pub(super) is_block_device: bool,
    /// Logical and physical sector in bytes.
    pub(super) sector_bytes: u32,
    pub(super) physical_bytes: u32,
    /// 0 if the filesystem can't punch holes.
    pub(super) discard_bytes: u32,
    /// Alignment of a segment's address and length in bytes for O_DIRECT; `None` through the page
    /// cache.
    pub(super) direct: Option<Alignment>,
    /// The pages are the medium.
    pub(super) in_memory: bool,
    /// Those pages may go to the machine's swap.
    pub(super) is_swappable: bool,
    /// A write to the page cache can be tried without waiting.
    pub(super) tells_of_writes: bool,
    pub(super) non_rotational: bool,
    /// 0 if it is unknown.
    pub(super) readahead_bytes: u32,
}

/// Alignment of a segment in memory, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Alignment {
    pub(super) address: usize,
    pub(super) length: usize,
}

pub(super) fn refuse(spec: &FileSpec, why: impl std::fmt::Display) -> Error {
    Error::config(format!("file:{}: {why}", spec.path.display()))
}

pub(super) fn os(spec: &FileSpec, what: &str, e: impl Into<std::io::Error>) -> Error {
    Error::os(format!("file:{}: {what}", spec.path.display()), e.into())
}

impl Layout {
    /// Opens, locks, and if asked to makes or extends the file of `spec`.
    pub(super) fn open(spec: &FileSpec, opener: &dyn FileOpener) -> Result<Layout, Error> {
        // Looked at before it is opened: opening a pipe would block, opening a tape would wind it.
        let known = match opener.stat(&spec.path) {
            Ok(stat) => Some(stat),
            Err(e) if e.kind() == ErrorKind::NotFound && spec.size_bytes.is_some() => None,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return Err(refuse(spec, missing_hint(spec)));
            }
            Err(e) => return Err(os(spec, "can't look at it", e)),
        };
        let kind = known.map(|stat| stat.kind());
        let is_block_device = kind == Some(FileType::BlockDevice);
        let what = match kind {
            None | Some(FileType::RegularFile | FileType::BlockDevice) => None,
            Some(FileType::Directory) => Some("a directory, "),
            Some(_) => Some(""),
        };
        if let Some(what) = what {
            return Err(refuse(
                spec,
                format!("it is {what}neither a regular file nor a block device"),
            ));
        }
        if is_block_device && spec.size_bytes.is_some() {
            return Err(refuse(
                spec,
                "it is a block device; `size` is for regular files, drop it",
            ));
        }
        let file = open_file(spec, opener, is_block_device)?;
        let now = rustix::fs::fstat(&file).map_err(|e| os(spec, "can't look at it", e))?;
        let expected = [FileType::RegularFile, FileType::BlockDevice][usize::from(is_block_device)];
        if FileType::from_raw_mode(now.st_mode) != expected {
            return Err(refuse(spec, "it was replaced while it was opened"));
        }
        if spec.lock {
            super::lock::take(spec, opener, file.as_fd())?;
        }
        if let Some(size) = spec.size_bytes.filter(|&s| s > now.st_size.max(0) as u64) {
            rustix::fs::ftruncate(&file, size).map_err(|e| os(spec, "can't extend it", e))?;
        }
        if is_block_device {
            Layout::of_block_device(spec, opener, file, known)
        } else {
            Layout::of_regular_file(spec, opener, file)
        }
    }

    fn of_block_device(
        spec: &FileSpec,
        opener: &dyn FileOpener,
        file: OwnedFd,
        stat: Option<PathStat>,
    ) -> Result<Layout, Error> {
        let ask = |r: rustix::io::Result<u32>| {
            r.map_err(|e| os(spec, "can't ask for its sector size", e))
        };
        let logical = ask(rustix::fs::ioctl_blksszget(&file))?;
        let physical = ask(rustix::fs::ioctl_blkpbszget(&file))?;
        // The page cache takes any multiple of 512; O_DIRECT only the device's own sectors.
        let smallest = if spec.direct { logical } else { 512 };
        let sector_bytes = choose_sector(spec, smallest, logical)?;
        let address = direct_alignment(file.as_fd()).map_or(logical, |(address, _)| address);
        Ok(Layout {
            is_block_device: true,
            sector_bytes,
            physical_bytes: physical.max(sector_bytes),
            discard_bytes: if spec.read_only { 0 } else { sector_bytes },
            direct: spec.direct.then_some(Alignment {
                address: address as usize,
                length: logical as usize,
            }),
            in_memory: false,
            is_swappable: false,
            tells_of_writes: true,
            non_rotational: stat.is_none_or(|s| !is_rotational(opener, s.device)),
            readahead_bytes: stat.map_or(0, |s| readahead_bytes(opener, s.device)),
            file,
        })
    }

    fn of_regular_file(
        spec: &FileSpec,
        opener: &dyn FileOpener,
        file: OwnedFd,
    ) -> Result<Layout, Error> {
        let known = direct_alignment(file.as_fd());
        if spec.direct && known == Some((0, 0)) {
            return Err(refuse(spec, "this file can't do O_DIRECT; drop `direct`"));
        }
        let (smallest, usual) = match known {
            _ if !spec.direct => (512, 512),
            Some((_, length)) => (length.max(512), length.max(512)),
            // Nobody says; 4096 is right everywhere, 512 where the user knows better.
            None => (512, 4096),
        };
        let sector_bytes = choose_sector(spec, smallest, usual)?;
        let length = file_len(file.as_fd()).map_err(|e| os(spec, "can't look at it", e))?;
        if length == 0 {
            return Err(refuse(spec, "it is empty; add size=SIZE to extend it"));
        }
        if !length.is_multiple_of(sector_bytes.into()) && !spec.read_only {
            let whole = length.next_multiple_of(sector_bytes.into());
            return Err(refuse(
                spec,
                format!(
                    "its {length} bytes are not whole sectors of {sector_bytes}; add size={whole} to extend it, or `ro`"
                ),
            ));
        }
        let block = rustix::fs::fstat(&file).map_or(4096, |s| s.st_blksize as u32);
        let block = block.clamp(sector_bytes, 1 << 20).next_power_of_two();
        let can_punch = !spec.read_only && can_punch(file.as_fd(), length);
        let magic = rustix::fs::fstatfs(&file).map_or(0, |s| s.f_type as u64 & 0xffff_ffff);
        let (address, length) = known.unwrap_or((sector_bytes, sector_bytes));
        Ok(Layout {
            is_block_device: false,
            sector_bytes,
            physical_bytes: sector_bytes.max(4096),
            discard_bytes: if can_punch { block } else { 0 },
            direct: spec.direct.then_some(Alignment {
                address: address.max(1) as usize,
                length: length.max(1) as usize,
            }),
            in_memory: MEMORY_FILESYSTEMS.contains(&magic),
            is_swappable: magic == TMPFS,
            tells_of_writes: TELLING_FILESYSTEMS.contains(&magic),
            non_rotational: true,
            readahead_bytes: rustix::fs::fstat(&file)
                .map_or(0, |s| readahead_bytes(opener, s.st_dev)),
            file,
        })
    }
}

/// Capacity in sectors (512 B). A read-only file's last sector may be partly past its end and reads
/// as zeros there; a writable one counts whole sectors only.
pub(super) fn capacity_sectors(
    file: BorrowedFd<'_>,
    is_block_device: bool,
    sector_bytes: u32,
    read_only: bool,
) -> Result<u64, Errno> {
    let bytes = if is_block_device {
        rustix::fs::seek(file, SeekFrom::End(0))?
    } else {
        file_len(file)?
    };
    let unit = u64::from(sector_bytes);
    let blocks = if read_only {
        bytes.div_ceil(unit)
    } else {
        bytes / unit
    };
    Ok(blocks * unit / SECTOR)
}

pub(super) fn file_len(file: BorrowedFd<'_>) -> Result<u64, Errno> {
    Ok(rustix::fs::fstat(file)?.st_size.max(0) as u64)
}

fn missing_hint(spec: &FileSpec) -> &'static str {
    // A mistyped option looks like a part of the path.
    if spec.path.as_os_str().as_encoded_bytes().contains(&b',') {
        "no such file; if the comma begins an option, it must be one of direct, ro, nolock, engine=, size=, sector=, format="
    } else if spec.size_bytes.is_some() {
        "no such file"
    } else {
        "no such file; add size=SIZE to make it, as in file:/srv/disk.img,size=10G"
    }
}

fn open_file(
    spec: &FileSpec,
    opener: &dyn FileOpener,
    is_block_device: bool,
) -> Result<OwnedFd, Error> {
    let mut flags = match spec.read_only {
        true => OFlags::RDONLY,
        false => OFlags::RDWR,
    };
    flags.set(OFlags::CREATE, spec.size_bytes.is_some());
    flags.set(OFlags::DIRECT, spec.direct);
    // Linux refuses O_EXCL on a block device that is mounted or part of another device.
    let exclusive = is_block_device && spec.lock && !spec.read_only;
    flags.set(OFlags::EXCL, exclusive);
    let open = |flags| opener.open(&spec.path, flags, Mode::RUSR | Mode::WUSR);
    // A read that stores its time waits for the filesystem's journal. Only the file's owner may do without.
    let opened = match open(flags | OFlags::NOATIME) {
        Err(e) if Errno::from_io_error(&e) == Some(Errno::PERM) => open(flags),
        opened => opened,
    };
    let rule = opener.rule();
    opened.map_err(|e| match Errno::from_io_error(&e) {
        Some(Errno::ACCESS) if rule.is_some() => os(spec, rule.unwrap_or_default(), e),
        Some(Errno::ACCESS | Errno::PERM | Errno::ROFS) if !spec.read_only => os(
            spec,
            "can't be opened for writing; add `ro` to only read it",
            e,
        ),
        Some(Errno::INVAL) if spec.direct => refuse(
            spec,
            "its filesystem can't do O_DIRECT; drop `direct`",
        ),
        Some(Errno::BUSY) if exclusive => refuse(
            spec,
            "it is mounted, part of another device or open in another volume; free it first, or add `nolock` if that is safe",
        ),
        _ => os(spec, "can't be opened", e),
    })
}

fn choose_sector(spec: &FileSpec, smallest: u32, usual: u32) -> Result<u32, Error> {
    let chosen = spec.sector_bytes.unwrap_or(usual.max(512));
    if chosen < smallest {
        return Err(refuse(
            spec,
            format!("it needs sectors of {smallest} bytes here; use sector={smallest}"),
        ));
    }
    if chosen != 512 && chosen != 4096 {
        return Err(refuse(
            spec,
            format!("sectors of {chosen} bytes are not supported, only 512 and 4096"),
        ));
    }
    Ok(chosen)
}

/// Alignment of address, offset and length in bytes for O_DIRECT, if the kernel reports it; zeros if O_DIRECT
/// isn't supported.
fn direct_alignment(file: BorrowedFd<'_>) -> Option<(u32, u32)> {
    let statx: Statx =
        rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    (statx.stx_mask & StatxFlags::DIOALIGN.bits() != 0)
        .then_some((statx.stx_dio_mem_align, statx.stx_dio_offset_align))
}

/// Tries to punch a hole behind the end, where there is nothing to lose.
fn can_punch(file: BorrowedFd<'_>, length: u64) -> bool {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let behind = length.next_multiple_of(4096);
    rustix::fs::fallocate(file, mode, behind, 4096).is_ok()
}

fn is_rotational(opener: &dyn FileOpener, device: u64) -> bool {
    let text = opener.device_text(device, "queue/rotational");
    text.is_ok_and(|text| text.trim() == "1")
}

/// Bytes that the kernel reads ahead on a device; 0 where it doesn't say, as for filesystems without one
/// device.
fn readahead_bytes(opener: &dyn FileOpener, device: u64) -> u32 {
    let text = opener.device_text(device, "queue/read_ahead_kb");
    let kib = text.ok().and_then(|t| t.trim().parse::<u32>().ok());
    kib.and_then(|k| k.checked_mul(1024)).unwrap_or(0)
}
