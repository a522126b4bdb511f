//! Detects the contents of a device or file by the magic numbers of formats, as blkid does.
//!
//! The check protects users' data. Magic numbers prove nothing: a format that isn't here isn't found, and
//! data that was moved or cut off may keep its magic. Where a magic is short, the bytes around it have to
//! make sense too.

mod table;

use crate::{Blocking, Idle};
use pvblk_block::{BlockDevice, Error, ExtentKind};
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use table::{At, MAGICS};

/// All marks from the start are before this, in bytes.
const START_BYTES: usize = 256 << 10;
/// All marks from the end are behind this.
const END_BYTES: usize = 132 << 10;
/// A container's mark is in the first of these.
const CONTAINER_BYTES: usize = 4096;

/// Something that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// With its article, such as `an XFS file system`.
    pub what: &'static str,
    /// True for a format that has a disk inside, and isn't the disk itself: a write to it as to a disk
    /// destroys it.
    pub container: bool,
}

impl Found {
    /// True for a LUKS volume, whose encrypted bytes may be served on purpose.
    pub fn is_luks(&self) -> bool {
        self.what == table::LUKS
    }
}

/// The formats found in bytes from the start and bytes up to the end of a device of `size_bytes`. Both may be
/// fewer than the device has.
fn find(start: &[u8], end: &[u8], size_bytes: u64) -> Vec<Found> {
    let mut all: Vec<Found> = Vec::new();
    for magic in MAGICS {
        let (bytes, at) = match magic.at {
            At::Start(at) => (start, Some(at)),
            At::End(back) => (end, end.len().checked_sub(back)),
            At::Place(place) => {
                let begin = size_bytes - end.len() as u64;
                let at = place(size_bytes).and_then(|at| at.checked_sub(begin));
                (end, at.and_then(|at| usize::try_from(at).ok()))
            }
        };
        let Some(from_mark) = at.and_then(|at| bytes.get(at..)) else {
            continue;
        };
        let right = from_mark.starts_with(magic.bytes) && (magic.check)(bytes);
        if right && !all.iter().any(|f| f.what == magic.what) {
            all.push(Found {
                what: magic.what,
                container: magic.container,
            });
        }
    }
    all
}

/// The formats found on a device, as one text, such as `an XFS file system and a GUID partition table`;
/// `None` if none is found.
pub fn on_device(
    device: &Arc<dyn BlockDevice>,
    idle: &mut Idle<'_>,
) -> Result<Option<String>, Error> {
    let size = device.capacity_sectors() * 512;
    let mut disk = Blocking::open(device)?;
    let mut part = |most: usize, from_end: bool| {
        let len = usize::try_from(size).map_or(most, |size| most.min(size));
        let mut bytes = vec![0; len];
        let sector = match from_end {
            true => size / 512 - len as u64 / 512,
            false => 0,
        };
        // Reading would take memory for it, where the device is memory.
        let mut extents = Vec::new();
        let told = device.extents(sector, len as u64 / 512, &mut extents);
        if told.is_err() || extents.iter().any(|e| e.kind == ExtentKind::Data) {
            disk.read(sector, &mut bytes, idle)?;
        }
        Ok::<_, Error>(bytes)
    };
    let start = part(START_BYTES, false)?;
    let end = part(END_BYTES, true)?;
    Ok(named(&find(&start, &end, size)))
}

/// `a, b and c`
fn named(found: &[Found]) -> Option<String> {
    let names: Vec<&str> = found.iter().map(|f| f.what).collect();
    let (last, others) = names.split_last()?;
    Some(match others {
        [] => (*last).to_owned(),
        others => format!("{} and {last}", others.join(", ")),
    })
}

/// The container format of a file or block device, read from where it stands, its start. One that can't be read has none.
pub fn container_in(file: File) -> Option<Found> {
    let mut start = Vec::new();
    file.take(CONTAINER_BYTES as u64)
        .read_to_end(&mut start)
        .ok()?;
    let found = find(&start, &[], start.len() as u64);
    found.into_iter().find(|f| f.container)
}

#[cfg(test)]
mod tests;
