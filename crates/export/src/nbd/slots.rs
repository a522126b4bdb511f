//! Requests of the client on their way, and how one becomes several for a device with narrow limits.

use super::proto::{Command, NbdRequest};
use pvblk_block::{Buffer, Limits, Op, Request, RequestFlags, SECTOR, Status};

/// One request of the client.
pub(super) struct Slot {
    pub cookie: u64,
    pub command: Command,
    /// First byte, for structured replies.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
    pub op: Op,
    pub flags: RequestFlags,
    /// The data. Empty while one request at the device has all of them.
    pub buffers: Vec<Buffer>,
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

    /// A slot for `r`, with its buffers moved in from `buffers`.
    pub(super) fn insert(&mut self, r: &NbdRequest, op: Op, buffers: &mut Vec<Buffer>) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.all.push(Slot {
                cookie: 0,
                command: r.command,
                offset: 0,
                len: 0,
                op,
                flags: RequestFlags::empty(),
                buffers: Vec::new(),
                pending: 0,
                issued: false,
                whole: false,
                then_flush: false,
                status: Status::Ok,
            });
            (self.all.len() - 1) as u32
        });
        let s = &mut self.all[index as usize];
        s.cookie = r.cookie;
        s.command = r.command;
        s.offset = r.offset;
        s.len = r.len;
        s.op = op;
        s.flags = RequestFlags::empty();
        debug_assert!(s.buffers.is_empty());
        std::mem::swap(&mut s.buffers, buffers);
        s.pending = 0;
        s.issued = false;
        s.whole = false;
        s.then_flush = false;
        s.status = Status::Ok;
        index
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

/// How far a request has been cut up.
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
    pub(super) fn next(&mut self, slot: &mut Slot, limits: &Limits, request: &mut Request) -> bool {
        let start = self.done;
        let most = most_bytes(limits);
        let mut room = most;
        while room > 0
            && request.buffers.len() < limits.max_segments.max(1) as usize
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
            (slot.offset + start) / SECTOR,
            sectors,
            u64::from(self.slot),
        );
        slot.pending += 1;
        slot.issued = self.buffer == slot.buffers.len();
        slot.issued
    }
}

/// Most bytes of one request to the device, in whole blocks.
fn most_bytes(limits: &Limits) -> usize {
    let block = limits.logical_sector_bytes as usize;
    let most = limits.max_sectors as usize * SECTOR as usize;
    (most / block * block).max(block)
}

/// True if the device takes all of a slot's data in one request.
#[inline]
pub(super) fn fits(slot: &Slot, limits: &Limits) -> bool {
    slot.len as usize <= most_bytes(limits) && slot.buffers.len() <= limits.max_segments as usize
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
            let index = slots.insert(&r, Op::Read, &mut buffers);
            let slot = slots.get_mut(index);
            assert!(!fits(slot, &limits) || max_segments > 2);
            let mut cut = Cut::new(index);
            let (mut sector, mut offset) = (2048, 0);
            loop {
                let mut part = Request::new(Op::Flush, 0, 0, 0);
                let last = cut.next(slot, &limits, &mut part);
                assert_eq!((part.sector, part.tag), (sector, u64::from(index)));
                assert!(part.sectors > 0 && part.sectors <= u64::from(max_sectors));
                assert!(part.buffers.len() <= max_segments as usize);
                for b in &part.buffers {
                    assert_eq!(b.offset(), offset);
                    offset += b.len();
                }
                sector += part.sectors;
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
