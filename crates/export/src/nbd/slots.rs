//! Requests of the client on their way, and how one becomes several for a device with narrow limits.

use super::reply::ReplyTo;
use pvblk_block::{Buffer, Limits, Op, Request, RequestFlags, SECTOR, Status};
use pvblk_protocol::nbd::{Command, NbdRequest};

/// One request of the client.
pub(super) struct Slot {
    /// The request as the client asked it.
    pub to: ReplyTo,
    pub command: Command,
    /// First byte of its range; of a trim, of the whole blocks in it.
    pub offset: u64,
    /// Bytes of its range.
    pub len: u64,
    /// Bytes of the first block before the request, and of the last one after it.
    pub edges: Edges,
    pub op: Op,
    pub flags: RequestFlags,
    /// Whole blocks for the data. Empty while one request at the device has all of them.
    pub buffers: Vec<Buffer>,
    /// The data alone, where that is less than the blocks.
    pub view: Vec<Buffer>,
    /// Requests at the device.
    pub pending: u32,
    /// No request for the device is left to be made.
    pub issued: bool,
    /// All buffers went with one request.
    pub whole: bool,
    /// A flush follows before the reply: FUA on a command which the device knows no FUA for.
    pub then_flush: bool,
    /// The first error, or success.
    pub status: Status,
}

/// Bytes that a request leaves out of its first and of its last block. Both are 0 for most requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Edges {
    pub before: u16,
    pub after: u16,
}

impl Edges {
    /// Of `len` bytes from `offset`, with blocks of `block` bytes: 512 or 4096.
    #[inline]
    pub(super) fn of(offset: u64, len: u64, block: u32) -> Edges {
        let mask = u64::from(block - 1);
        let end = offset.wrapping_add(len);
        Edges {
            before: (offset & mask) as u16,
            after: (end.wrapping_neg() & mask) as u16,
        }
    }

    #[inline]
    pub(super) fn is_none(self) -> bool {
        self == Edges::default()
    }

    /// Bytes in all.
    #[inline]
    pub(super) fn bytes(self) -> usize {
        usize::from(self.before) + usize::from(self.after)
    }
}

impl Slot {
    /// Bytes of all blocks that the request touches.
    #[inline]
    pub(super) fn whole_len(&self) -> u64 {
        self.len + self.edges.bytes() as u64
    }

    /// First sector (512 B) of these blocks.
    #[inline]
    pub(super) fn first_sector(&self) -> u64 {
        (self.offset - u64::from(self.edges.before)) / SECTOR
    }

    /// Where the client's data are.
    #[inline]
    pub(super) fn data(&self) -> &[Buffer] {
        match self.view.is_empty() {
            true => &self.buffers,
            false => &self.view,
        }
    }

    /// Makes the view, if the data are less than the blocks.
    #[inline]
    pub(super) fn look(&mut self) {
        if !self.edges.is_none() && !self.buffers.is_empty() {
            self.cut_view();
        }
    }

    #[cold]
    fn cut_view(&mut self) {
        let (mut skip, mut left) = (usize::from(self.edges.before), self.len as usize);
        for b in &self.buffers {
            let n = b.len().saturating_sub(skip).min(left);
            if n > 0 {
                // In range by construction.
                self.view.extend(b.slice(skip, n));
            }
            skip = skip.saturating_sub(b.len());
            left -= n;
        }
    }

    /// The bytes, of `n` from byte `at` of its blocks, that one request may have, and those that a write has to leave as they are.
    fn piece(&self, at: u64, block: u64, n: u64) -> (u64, Edges) {
        let len = self.whole_len();
        let is_write = self.op.is_write();
        let last = if is_write && self.edges.after > 0 {
            len - block
        } else {
            len
        };
        if is_write && self.edges.before > 0 && at == 0 {
            let after = if len == block { self.edges.after } else { 0 };
            let before = self.edges.before;
            return (block, Edges { before, after });
        }
        if at >= last {
            let after = self.edges.after;
            return (block.min(len - at), Edges { before: 0, after });
        }
        (n.min(last - at), Edges::default())
    }
}

/// Marks a write of one block that leaves `stay` of it as it is.
fn mark(request: &mut Request, stay: Edges) {
    if !stay.is_none() {
        request.flags |= RequestFlags::PARTIAL;
        request.scratch = u64::from(stay.before) | u64::from(stay.after) << 16;
    }
}

/// All slots of a connection; they are used again with their memory.
pub(super) struct Slots {
    all: Vec<Slot>,
    free: Vec<u32>,
    limit: usize,
}

impl Slots {
    pub(super) fn new(limit: usize) -> Slots {
        Slots {
            all: Vec::new(),
            free: Vec::new(),
            limit,
        }
    }

    /// Slots in use.
    #[inline]
    pub(super) fn used(&self) -> usize {
        self.all.len() - self.free.len()
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.used() >= self.limit
    }

    /// A slot for `r`, which is done for the request `to`, with its buffers moved in from `buffers`.
    #[inline(always)]
    pub(super) fn insert(
        &mut self,
        to: ReplyTo,
        r: &NbdRequest,
        edges: Edges,
        op: Op,
        buffers: &mut Vec<Buffer>,
    ) -> u32 {
        let index = match self.free.pop() {
            Some(index) => index,
            None => self.grow(),
        };
        let s = &mut self.all[index as usize];
        s.to = to;
        s.command = r.command;
        s.offset = r.offset;
        s.len = r.len;
        s.edges = edges;
        s.op = op;
        s.flags = RequestFlags::empty();
        debug_assert!(s.buffers.is_empty() && s.view.is_empty());
        std::mem::swap(&mut s.buffers, buffers);
        s.pending = 0;
        s.issued = false;
        s.whole = false;
        s.then_flush = false;
        s.status = Status::Ok;
        index
    }

    /// The number of one more slot.
    #[cold]
    fn grow(&mut self) -> u32 {
        self.all.push(Slot {
            to: ReplyTo {
                cookie: 0,
                offset: 0,
            },
            command: Command::Read,
            offset: 0,
            len: 0,
            edges: Edges::default(),
            op: Op::Read,
            flags: RequestFlags::empty(),
            buffers: Vec::new(),
            view: Vec::new(),
            pending: 0,
            issued: false,
            whole: false,
            then_flush: false,
            status: Status::Ok,
        });
        (self.all.len() - 1) as u32
    }

    /// Frees a slot, whose buffers have been taken out.
    #[inline]
    pub(super) fn remove(&mut self, index: u32) {
        self.free.push(index);
    }

    #[inline]
    pub(super) fn get(&self, index: u32) -> &Slot {
        &self.all[index as usize]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, index: u32) -> &mut Slot {
        &mut self.all[index as usize]
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.all.iter_mut()
    }
}

/// The point up to which a request has been cut up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub slot: u32,
    buffer: usize,
    /// Bytes of that buffer already used.
    skip: usize,
    /// Bytes of the request already used.
    done: u64,
}

impl Cut {
    pub(super) fn new(slot: u32) -> Cut {
        Cut {
            slot,
            buffer: 0,
            skip: 0,
            done: 0,
        }
    }

    /// Makes `request` the next part that the device takes; returns true if it is the last.
    pub(super) fn next(&mut self, slot: &mut Slot, part: &PartSize, request: &mut Request) -> bool {
        let start = self.done;
        let first = slot.first_sector() * SECTOR + start;
        let (room, stay) = slot.piece(start, part.block, part.at(first));
        let mut room = room as usize;
        while room > 0
            && request.buffers.len() < part.max_segments
            && let Some(b) = slot.buffers.get(self.buffer)
        {
            let n = (b.len() - self.skip).min(room);
            // In range by construction.
            request.buffers.extend(b.slice(self.skip, n));
            room -= n;
            self.done += n as u64;
            self.skip += n;
            if self.skip == b.len() {
                self.skip = 0;
                self.buffer += 1;
            }
        }
        let sectors = (self.done - start) / SECTOR;
        request.reset(
            slot.op,
            slot.flags,
            first / SECTOR,
            sectors,
            u64::from(self.slot),
        );
        mark(request, stay);
        slot.pending += 1;
        slot.issued = self.buffer == slot.buffers.len();
        slot.issued
    }
}

/// Bytes of a part, unless the device's own unit is larger: so much of one request is done before a worker looks at its other lanes.
pub(super) const PART: u64 = 256 << 10;

/// A block of `len` bytes, which lies in one of the buffers.
fn block_at(buffers: &[Buffer], mut at: usize, len: usize) -> Option<Buffer> {
    for b in buffers {
        if at < b.len() {
            return b.slice(at, len);
        }
        at -= b.len();
    }
    None
}

/// The size of the parts into which requests are cut for a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartSize {
    /// Most bytes of one request, in whole blocks.
    bytes: u64,
    /// Parts end at multiples of it, where it isn't 0: a row of an array isn't cut.
    unit: u64,
    block: u64,
    max_segments: usize,
}

impl PartSize {
    pub(super) fn of(limits: &Limits) -> PartSize {
        let block = u64::from(limits.logical_sector_bytes);
        let optimal = u64::from(limits.optimal_bytes);
        let device = u64::from(limits.max_sectors) * SECTOR;
        let wanted = match optimal {
            0 => PART,
            n => (PART / n * n).max(n),
        };
        PartSize {
            bytes: (device.min(wanted) / block * block).max(block),
            unit: if wanted <= device { optimal } else { 0 },
            block,
            max_segments: limits.max_segments.max(1) as usize,
        }
    }

    /// Most bytes of a part that begins at byte `at` of the device.
    fn at(&self, at: u64) -> u64 {
        match self.unit {
            0 => self.bytes,
            unit => self.bytes - at % unit,
        }
    }

    /// True if the device takes all of a slot's data in one request.
    #[inline]
    pub(super) fn fits(&self, slot: &Slot) -> bool {
        slot.whole_len() <= self.bytes
            && slot.buffers.len() <= self.max_segments
            && (slot.edges.is_none() || slot.op == Op::Read)
    }
}

/// A request of one length that several of the device follow from, without data of the client: zeros where the device
/// can't write them by itself, or at the edges of blocks, and what is to be cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Walk {
    pub slot: u32,
    /// Bytes of its blocks already asked for.
    done: u64,
}

impl Walk {
    pub(super) fn new(slot: u32) -> Walk {
        Walk { slot, done: 0 }
    }

    /// Makes `request` the next one; returns true if it is the last. `zeros`: a buffer of zeros, if the device is to be sent them.
    pub(super) fn next(
        &mut self,
        slot: &mut Slot,
        part: &PartSize,
        zeros: Option<&Buffer>,
        request: &mut Request,
    ) -> bool {
        let first = slot.first_sector() * SECTOR + self.done;
        let is_load = slot.op == Op::Read;
        let most = match (zeros, is_load) {
            (None, false) => u64::MAX,
            (Some(zeros), _) => part.at(first).min(zeros.len() as u64),
            (None, true) => {
                let room = slot.buffers.first().map_or(0, Buffer::len) as u64;
                part.at(first).min(room)
            }
        };
        let (n, stay) = slot.piece(self.done, part.block, most);
        let len = n as usize;
        let op = match (stay.is_none(), zeros) {
            _ if is_load => {
                // Read one after another: nobody looks at them.
                let buffer = slot.buffers.first().and_then(|b| b.slice(0, len));
                request.buffers.extend(buffer);
                Op::Read
            }
            (true, None) => Op::WriteZeroes,
            (true, Some(zeros)) => {
                request.buffers.extend(zeros.slice(0, len));
                Op::Write
            }
            (false, _) => {
                // The edges' blocks lie one behind the other.
                let at = if stay.before > 0 || slot.edges.before == 0 {
                    0
                } else {
                    len
                };
                request.buffers.extend(block_at(&slot.buffers, at, len));
                Op::Write
            }
        };
        let mut flags = slot.flags;
        if op == Op::Write {
            flags.remove(RequestFlags::NO_UNMAP);
            flags |= RequestFlags::STABLE_BUFFERS;
        }
        let (sector, sectors) = (first / SECTOR, n / SECTOR);
        request.reset(op, flags, sector, sectors, u64::from(self.slot));
        mark(request, stay);
        self.done += n;
        slot.pending += 1;
        slot.issued = self.done == slot.whole_len();
        slot.issued
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_request_in_order_within_the_limits() {
        let mut slots = Slots::new(4);
        let r = NbdRequest {
            flags: 0,
            command: Command::Read,
            cookie: 7,
            offset: 1 << 20,
            len: 40 << 10,
            payload: 0,
        };
        let whole = Buffer::anonymous(40 << 10).unwrap();
        for (max_sectors, max_segments) in [(8, 1), (9, 2), (88, 11), (24, 1), (65536, 1)] {
            let mut buffers = vec![
                whole.slice(0, 16384).unwrap(),
                whole.slice(16384, 8192).unwrap(),
                whole.slice(24576, 16384).unwrap(),
            ];
            let limits = Limits {
                max_sectors,
                max_segments,
                ..Limits::default()
            };
            let part = PartSize::of(&limits);
            let index = slots.insert(
                ReplyTo::from(&r),
                &r,
                Edges::default(),
                Op::Read,
                &mut buffers,
            );
            let slot = slots.get_mut(index);
            assert!(!part.fits(slot) || max_segments > 2);
            let mut cut = Cut::new(index);
            let (mut sector, mut offset) = (2048, 0);
            loop {
                let mut next = Request::new(Op::Flush, 0, 0, 0);
                let last = cut.next(slot, &part, &mut next);
                assert_eq!((next.sector, next.tag), (sector, u64::from(index)));
                assert!(next.sectors > 0 && next.sectors <= u64::from(max_sectors));
                assert!(next.buffers.len() <= max_segments as usize);
                for b in &next.buffers {
                    assert_eq!(b.offset(), offset);
                    offset += b.len();
                }
                sector += next.sectors;
                if last {
                    break;
                }
            }
            assert_eq!((sector, offset), (2048 + 80, 40 << 10));
            slot.buffers.clear();
            slots.remove(index);
        }
        assert_eq!(slots.used(), 0);
    }
}
