//! A disk as a stream of bytes with a position.

use crate::{Disk, Error, ErrorKind};
use std::borrow::Borrow;
use std::io::{self, Read, Seek, SeekFrom, Write};

/// A position on a disk, for code that takes [`Read`], [`Write`] and [`Seek`]. `D` is `&Disk`, `Arc<Disk>` or `Disk`.
///
/// Reads and writes are of any length at any byte. Each is a request of its own, and one of a part of a block reads the block, so wrap it in
/// [`io::BufReader`] or [`io::BufWriter`] for many small ones. While a part of a block is written nobody else may write the rest of it: that would be lost.
///
/// `flush` is that of the disk: what was written is stable after it. Dropping doesn't flush. At the end of the disk reads return 0, and writes
/// fail with [`io::ErrorKind::StorageFull`].
///
/// ```
/// use std::io::{Read, Seek, SeekFrom, Write};
///
/// let disk = pvblk_disk::Disk::open("mem:1M")?;
/// let mut cursor = pvblk_disk::Cursor::new(&disk);
/// cursor.seek(SeekFrom::Start(1000))?;
/// cursor.write_all(b"a label")?;
/// cursor.flush()?;
/// cursor.seek(SeekFrom::Current(-7))?;
/// let mut label = [0; 7];
/// cursor.read_exact(&mut label)?;
/// assert_eq!(&label, b"a label");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Cursor<D> {
    disk: D,
    position: u64,
}

impl<D: Borrow<Disk>> Cursor<D> {
    /// A cursor at the first byte.
    pub fn new(disk: D) -> Cursor<D> {
        Cursor { disk, position: 0 }
    }

    /// The disk that was given to [`Cursor::new`].
    pub fn into_inner(self) -> D {
        self.disk
    }

    fn disk(&self) -> &Disk {
        self.disk.borrow()
    }

    /// Bytes from here to the end of the disk, `most` at most.
    fn left(&self, most: usize) -> usize {
        let left = self.disk().size_bytes().saturating_sub(self.position);
        usize::try_from(left).unwrap_or(usize::MAX).min(most)
    }
}

impl<D: Borrow<Disk>> Read for Cursor<D> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.left(buf.len());
        self.disk().read_at(&mut buf[..len], self.position)?;
        self.position += len as u64;
        Ok(len)
    }
}

impl<D: Borrow<Disk>> Write for Cursor<D> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let len = self.left(data.len());
        if len == 0 && !data.is_empty() {
            let text = format!("{:?}: a write at the end of the disk", self.disk());
            return Err(Error::new(ErrorKind::NoSpace, text).into());
        }
        let unit = self.disk().limits().logical_sector_bytes as usize;
        let within = (self.position % unit as u64) as usize;
        let len = if within == 0 && len >= unit {
            let len = len / unit * unit;
            self.disk().write_at(&data[..len], self.position)?;
            len
        } else {
            let len = len.min(unit - within);
            let at = self.position - within as u64;
            let mut block = vec![0; unit];
            self.disk().read_at(&mut block, at)?;
            block[within..within + len].copy_from_slice(&data[..len]);
            self.disk().write_at(&block, at)?;
            len
        };
        self.position += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(self.disk().flush()?)
    }
}

impl<D: Borrow<Disk>> Seek for Cursor<D> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let new = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
            SeekFrom::End(by) => self.disk().size_bytes().checked_add_signed(by),
        };
        self.position = new.ok_or_else(|| {
            let text = format!("{:?}: a seek to before the first byte", self.disk());
            Error::new(ErrorKind::Invalid, text)
        })?;
        Ok(self.position)
    }
}
