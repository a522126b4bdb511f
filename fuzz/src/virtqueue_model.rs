//! The expected meaning of a chain of a virtqueue, by the text of VIRTIO 1.2, on plain bytes. Written apart from what is tested.

use pvblk_block::{Op, RequestFlags};

/// Guest address of the memory.
pub const GUEST: u64 = 0x4000;
/// Bytes of the memory.
pub const MEMORY: usize = 0x8000;
/// Where the model's queue has its parts.
pub const TABLE: usize = 0;
/// The available ring.
pub const AVAILABLE: usize = 0x200;
/// The used ring.
pub const USED: usize = 0x300;

/// The features that were negotiated.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Entries of the queue.
    pub entries: u16,
    pub indirect: bool,
    pub discard: bool,
    pub write_zeroes: bool,
}

/// The outcome of a chain.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The queue stops.
    Broken,
    /// It is answered with this status, at this byte, with so many bytes written; the name goes to these runs before.
    Answered {
        /// VIRTIO's status byte.
        status: u8,
        /// Where it goes: an offset.
        at: usize,
        /// Bytes written, the status among them.
        written: u32,
        /// Where the name goes: offsets and bytes.
        id: Vec<(usize, usize)>,
    },
    /// It goes to the disk with these runs (offset, bytes).
    Request {
        op: Op,
        flags: RequestFlags,
        sector: u64,
        sectors: u64,
        /// Offsets and bytes of the data.
        runs: Vec<(usize, usize)>,
        /// Where the status goes.
        at: usize,
        /// Bytes the device may write, the status among them.
        writable: u32,
    },
}

fn le(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b))
}

/// The offset of `len` bytes at a guest address.
fn offset(at: u64, len: u64) -> Option<usize> {
    let from = at.checked_sub(GUEST)?;
    (from.checked_add(len)? <= MEMORY as u64 && from < MEMORY as u64).then_some(from as usize)
}

struct Piece {
    at: u64,
    len: u64,
    write: bool,
}

/// The pieces of the chain at `head`, or `None` if a rule of the queue is broken.
fn pieces(memory: &[u8], terms: Terms, head: u16) -> Option<Vec<Piece>> {
    let mut table = memory[TABLE..TABLE + usize::from(terms.entries) * 16].to_vec();
    let mut inside = false;
    let mut index = usize::from(head);
    let mut steps = 0;
    let mut all: Vec<Piece> = Vec::new();
    loop {
        let raw = table.get(index * 16..index * 16 + 16)?;
        let (at, len, flags) = (le(&raw[..8]), le(&raw[8..12]), le(&raw[12..14]));
        let next = le(&raw[14..]) as usize;
        if flags & 4 != 0 {
            if inside || !terms.indirect || flags & 1 != 0 {
                return None;
            }
            if len == 0 || !len.is_multiple_of(16) || len > 1024 * 16 {
                return None;
            }
            let from = offset(at, len)?;
            table = memory[from..from + len as usize].to_vec();
            (inside, index, steps) = (true, 0, 0);
            continue;
        }
        steps += 1;
        if steps > table.len() / 16 || len == 0 {
            return None;
        }
        let write = flags & 2 != 0;
        if all.last().is_some_and(|p| p.write && !write) {
            return None;
        }
        all.push(Piece { at, len, write });
        if all.iter().map(|p| p.len).sum::<u64>() > u64::from(u32::MAX) {
            return None;
        }
        if flags & 1 == 0 {
            return Some(all);
        }
        index = next;
    }
}

/// Cuts `skip` bytes off the front and drops empty pieces.
fn cut(pieces: &[(u64, u64)], mut skip: u64) -> Vec<(u64, u64)> {
    let mut out = Vec::new();
    for &(at, len) in pieces {
        let off = skip.min(len);
        skip -= off;
        if len > off {
            out.push((at.wrapping_add(off), len - off));
        }
    }
    out
}

/// Runs of neighbouring bytes, or `None` if not all is memory.
fn runs(pieces: &[(u64, u64)]) -> Option<Vec<(usize, usize)>> {
    let mut out: Vec<(usize, usize)> = Vec::new();
    for &(at, len) in pieces {
        let from = offset(at, len)?;
        match out.last_mut() {
            Some((begin, n)) if *begin + *n == from => *n += len as usize,
            _ => out.push((from, len as usize)),
        }
    }
    Some(out)
}

/// The first `n` bytes, which are there in number, or `None` if they aren't memory.
fn bytes(memory: &[u8], pieces: &[(u64, u64)], n: u64) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    for &(at, len) in pieces {
        let take = len.min(n - out.len() as u64);
        if take == 0 {
            break;
        }
        let from = offset(at, take)?;
        out.extend_from_slice(&memory[from..from + take as usize]);
    }
    Some(out)
}

/// Judges the chain at `head`, which is in the table.
pub fn judge(memory: &[u8], terms: Terms, head: u16) -> Verdict {
    try_judge(memory, terms, head).unwrap_or(Verdict::Broken)
}

fn try_judge(memory: &[u8], terms: Terms, head: u16) -> Option<Verdict> {
    let all = pieces(memory, terms, head)?;
    let side = |write: bool| -> Vec<(u64, u64)> {
        let of = all.iter().filter(|p| p.write == write);
        of.map(|p| (p.at, p.len)).collect()
    };
    let (read, mut write) = (side(false), side(true));
    let sum = |list: &[(u64, u64)]| list.iter().map(|p| p.1).sum::<u64>();
    let writable = sum(&write) as u32;
    let last = write.last_mut()?;
    let at = offset(last.0.wrapping_add(last.1 - 1), 1)?;
    last.1 -= 1;
    let write = cut(&write, 0);
    let (to_read, to_write) = (sum(&read), sum(&write));
    let answered = |status: u8| {
        Some(Verdict::Answered {
            status,
            at,
            written: writable,
            id: Vec::new(),
        })
    };
    if to_read < 16 {
        return answered(1);
    }
    let head = bytes(memory, &read, 16)?;
    let (kind, sector) = (le(&head[..4]), le(&head[8..]));
    let rest = cut(&read, 16);
    let to_read = to_read - 16;
    let request = |op, flags, sector, sectors, runs| {
        Some(Verdict::Request {
            op,
            flags,
            sector,
            sectors,
            runs,
            at,
            writable,
        })
    };
    let none = RequestFlags::empty();
    match kind {
        0 | 1 => {
            let (op, len, other, data) = match kind {
                0 => (Op::Read, to_write, to_read, &write),
                _ => (Op::Write, to_read, to_write, &rest),
            };
            if len == 0 || !len.is_multiple_of(512) || other != 0 {
                return answered(1);
            }
            let runs = runs(data)?;
            if runs.iter().any(|r| !r.1.is_multiple_of(512)) {
                return answered(1);
            }
            request(op, none, sector, len / 512, runs)
        }
        4 => request(Op::Flush, none, 0, 0, Vec::new()),
        8 if to_write < 20 => answered(1),
        8 => Some(Verdict::Answered {
            status: 0,
            at,
            written: writable,
            id: runs(&write)?,
        }),
        11 | 13 => {
            let offered = if kind == 11 {
                terms.discard
            } else {
                terms.write_zeroes
            };
            if !offered {
                return answered(2);
            }
            if to_read != 16 {
                return answered(1);
            }
            let range = bytes(memory, &rest, 16)?;
            let (sector, sectors, flags) = (le(&range[..8]), le(&range[8..12]), le(&range[12..]));
            match (kind, flags) {
                (11, 0) => request(Op::Discard, none, sector, sectors, Vec::new()),
                (13, 0) => request(
                    Op::WriteZeroes,
                    RequestFlags::NO_UNMAP,
                    sector,
                    sectors,
                    Vec::new(),
                ),
                (13, 1) => request(Op::WriteZeroes, none, sector, sectors, Vec::new()),
                _ => answered(2),
            }
        }
        _ => answered(2),
    }
}
