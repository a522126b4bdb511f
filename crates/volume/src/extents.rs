//! Extents of data in a file, as its filesystem reports them.

use pvblk_block::{Extent, ExtentKind, SECTOR};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::io;
use std::os::fd::BorrowedFd;

/// Appends extents that cover `sector..sector+sectors` in order. A sector that holds any data is data.
///
/// Moves the file position, which nothing else here uses.
pub(crate) fn file_extents(
    file: BorrowedFd<'_>,
    sector: u64,
    sectors: u64,
    out: &mut Vec<Extent>,
) -> io::Result<()> {
    let end = sector.saturating_add(sectors);
    let mut at = sector;
    let first = out.len();
    let mut push = |from, to, kind| Extent::push(out, first, from, to, kind);
    while at < end {
        let (data, hole) = match next_data(file, at * SECTOR) {
            Ok(Some((data, hole))) => {
                let data = (data / SECTOR).clamp(at, end);
                (data, hole.div_ceil(SECTOR).clamp(data, end))
            }
            Ok(None) => (end, end),
            // The filesystem can't tell: all of it may be data.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => (at, end),
            Err(e) => return Err(e.into()),
        };
        push(at, data, ExtentKind::Hole);
        push(data, hole, ExtentKind::Data);
        // A race with a writer may leave an empty step; then the sector counts as data.
        if hole == at {
            push(at, at + 1, ExtentKind::Data);
        }
        at = hole.max(at + 1);
    }
    Ok(())
}

/// The first data at or after byte `at` and where it ends, or `None` if there is none.
fn next_data(file: BorrowedFd<'_>, at: u64) -> Result<Option<(u64, u64)>, Errno> {
    let data = match seek(file, SeekFrom::Data(at)) {
        Ok(data) => data,
        Err(Errno::NXIO) => return Ok(None),
        Err(e) => return Err(e),
    };
    match seek(file, SeekFrom::Hole(data)) {
        Ok(hole) => Ok(Some((data, hole.max(data)))),
        Err(Errno::NXIO) => Ok(Some((data, data))),
        Err(e) => Err(e),
    }
}
