//! A disk, and its blocking calls.

use crate::lanes::{Data, Lanes};
use crate::queue::{Queue, check_depth};
use crate::shared::Shared;
use crate::{Buffer, Error, ErrorKind, Limits, Options};
use pvblk_block::Op;
use std::path::Path;
use std::sync::Arc;

/// A disk that is open. Threads share it by reference; it ends when it and its last queue are dropped, or in order by [`Disk::close`].
///
/// The calls of this type wait for the disk, as those of a file do: as long as the server takes, and while it is away as long as [`Options::patience`] says.
/// They may be made from several threads at the same time. Two writes to the same place at the same time end in either order.
///
/// After an error of a call that takes several requests (all that are longer than 128 KiB) a part of it may have been done.
pub struct Disk {
    // Before the rest, since it has queues.
    lanes: Lanes,
    shared: Arc<Shared>,
}

impl Disk {
    pub(crate) fn new(shared: Shared, most: usize) -> Disk {
        Disk {
            lanes: Lanes::new(most),
            shared: Arc::new(shared),
        }
    }

    /// Opens the disk that a specification names, such as `nbd://host/export`, `vhost-user:unix:/run/vm1.sock`, `rings:unix:/run/pvblk.sock,disk=vm1` or
    /// `file:/srv/disk.img`. The grammar is that of pvblk's commands (`docs/reference/volumes.md`); volumes that aren't a server's run in this process,
    /// `mem:64M` for tests, for example. [`Options::open`] has settings.
    pub fn open(spec: &str) -> Result<Disk, Error> {
        Options::new().open(spec)
    }

    /// Connects to a disk of the pvblk server that serves `--local unix:SOCKET` on this host. Requests and their data go through shared memory.
    /// [`Options::connect`] has settings.
    pub fn connect(socket: impl AsRef<Path>, disk: &str) -> Result<Disk, Error> {
        Options::new().connect(socket, disk)
    }

    /// The present size in bytes. A disk may grow while it is open, and shrink.
    pub fn size_bytes(&self) -> u64 {
        self.shared.size_bytes()
    }

    /// Limits and abilities, which stay the same while the disk is open.
    pub fn limits(&self) -> &Limits {
        self.shared.limits()
    }

    /// Fills `buf` from byte `offset` on, any byte of the disk. The range lies within the disk, or nothing is read.
    ///
    /// ```
    /// let disk = pvblk_disk::Disk::open("mem:1M")?;
    /// disk.write_at(&[7; 4096], 8192)?;
    /// let mut bytes = [0; 3];
    /// disk.read_at(&mut bytes, 8190)?;
    /// assert_eq!(bytes, [0, 0, 7]);
    /// # Ok::<(), pvblk_disk::Error>(())
    /// ```
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<(), Error> {
        let end = self.end_of(Op::Read, offset, buf.len() as u64)?;
        if buf.is_empty() {
            return Ok(());
        }
        let unit = self.unit();
        let blocks = offset / unit * unit..end.next_multiple_of(unit);
        self.run(Op::Read, blocks, Data::Read(buf, offset))
    }

    /// Writes `data` at byte `offset`. Both are multiples of [`Limits::logical_sector_bytes`]; a [`Cursor`](crate::Cursor) takes any.
    ///
    /// The data is stable after a [`Disk::flush`] that begins when this call has returned.
    pub fn write_at(&self, data: &[u8], offset: u64) -> Result<(), Error> {
        let range = self.blocks_of(Op::Write, offset, data.len() as u64)?;
        self.run(Op::Write, range, Data::Write(data, offset))
    }

    /// Makes every write stable that has completed, on all queues and of all threads.
    ///
    /// If it fails, writes since the last flush that succeeded may be lost: write them again.
    pub fn flush(&self) -> Result<(), Error> {
        self.lanes.run(&self.shared, Op::Flush, 0..0, Data::Nothing)
    }

    /// Tells the disk that a range isn't needed; reads of it return anything until it is written. Errors with [`ErrorKind::Unsupported`] if
    /// [`Limits::discard_granularity_bytes`] is 0.
    pub fn discard(&self, offset: u64, len: u64) -> Result<(), Error> {
        let range = self.blocks_of(Op::Discard, offset, len)?;
        self.run(Op::Discard, range, Data::Nothing)
    }

    /// Makes a range read as zeros, by a request for it where the disk knows one, and by writing zeros otherwise.
    ///
    /// ```
    /// let disk = pvblk_disk::Disk::open("mem:1M")?;
    /// disk.write_at(&[7; 8192], 0)?;
    /// disk.write_zeroes(4096, 4096)?;
    /// let mut bytes = [1; 2];
    /// disk.read_at(&mut bytes, 4095)?;
    /// assert_eq!(bytes, [7, 0]);
    /// # Ok::<(), pvblk_disk::Error>(())
    /// ```
    pub fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), Error> {
        let range = self.blocks_of(Op::WriteZeroes, offset, len)?;
        match self.limits().write_zeroes {
            true => self.run(Op::WriteZeroes, range, Data::Nothing),
            false => self.run(Op::Write, range, Data::Zeros),
        }
    }

    /// Opens a queue for at most `depth` requests in flight, 1 to 65536. The number of queues that are open at the same time is limited by [`Options::queues`].
    ///
    /// A queue may outlive the `Disk`. It is of no use to threads other than its user's, so each thread opens its own.
    ///
    /// ```
    /// use pvblk_disk::{Disk, Request};
    ///
    /// let disk = Disk::open("mem:1M")?;
    /// let mut queue = disk.queue(32)?;
    /// for block in 0..32 {
    ///     let mut buffer = disk.buffer(4096)?;
    ///     buffer.copy_from(0, &[block as u8; 4096]);
    ///     queue.push(Request::write(block * 4096, buffer).tag(block))?;
    /// }
    /// let mut done = Vec::new();
    /// while queue.in_flight() > 0 {
    ///     queue.wait(&mut done, None)?;
    ///     for completion in done.drain(..) {
    ///         completion.result?;
    ///     }
    /// }
    /// disk.flush()?;
    /// # let mut byte = [0];
    /// # disk.read_at(&mut byte, 31 * 4096)?;
    /// # assert_eq!(byte, [31]);
    /// # Ok::<(), pvblk_disk::Error>(())
    /// ```
    pub fn queue(&self, depth: u32) -> Result<Queue, Error> {
        check_depth(depth)?;
        self.shared.enter()?;
        let opened = Queue::open(&self.shared, depth, true);
        let opened = match opened {
            // A blocking call may have had the device's last one.
            Err(_) if self.lanes.close_idle() => Queue::open(&self.shared, depth, true),
            opened => opened,
        };
        opened.inspect_err(|_| self.shared.leave(None, true))
    }

    /// Makes a buffer of `len` bytes, a multiple of [`Limits::logical_sector_bytes`], in the memory from which requests of this disk are done without a copy.
    pub fn buffer(&self, len: usize) -> Result<Buffer, Error> {
        self.shared.buffer(len)
    }

    /// Ends the use in order: flushes, and tells the server. Queues must be dropped before; otherwise it fails with [`ErrorKind::Busy`], flushes nothing, and
    /// the disk ends with the last of them.
    ///
    /// A disk that is dropped instead isn't flushed, and nobody hears of errors. Ending the connection waits for the server, at most 10 seconds.
    pub fn close(self) -> Result<(), Error> {
        self.shared.end_queues()?;
        let flushed = match self.limits().read_only {
            true => Ok(()),
            false => self.flush(),
        };
        self.lanes.close_idle();
        let closed = self.shared.device().close();
        flushed.and(closed.map_err(Error::of_device))
    }

    fn unit(&self) -> u64 {
        u64::from(self.limits().logical_sector_bytes)
    }

    fn run(&self, op: Op, range: std::ops::Range<u64>, data: Data<'_>) -> Result<(), Error> {
        match range.is_empty() {
            true => Ok(()),
            false => self.lanes.run(&self.shared, op, range, data),
        }
    }

    /// The end of a range, if that is within the disk.
    fn end_of(&self, op: Op, offset: u64, len: u64) -> Result<u64, Error> {
        let size = self.size_bytes();
        let end = offset.checked_add(len).filter(|&end| end <= size);
        end.ok_or_else(|| {
            let why = format!("the disk has {size}; ask for its size by Disk::size_bytes");
            self.invalid(op, offset, len, &why)
        })
    }

    /// A range of whole blocks within the disk.
    fn blocks_of(&self, op: Op, offset: u64, len: u64) -> Result<std::ops::Range<u64>, Error> {
        let end = self.end_of(op, offset, len)?;
        let unit = self.unit();
        if (offset | len) & (unit - 1) != 0 {
            let why = format!(
                "the disk has blocks of {unit}; use multiples of it, or a Cursor for writes"
            );
            return Err(self.invalid(op, offset, len, &why));
        }
        Ok(offset..end)
    }

    fn invalid(&self, op: Op, offset: u64, len: u64, why: &str) -> Error {
        let (name, op) = (self.shared.name(), crate::request::name(op));
        Error::new(
            ErrorKind::Invalid,
            format!("{name}: {op} of {len} bytes at byte {offset}: {why}"),
        )
    }
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Disk({}, {} bytes)",
            self.shared.name(),
            self.size_bytes()
        )
    }
}
