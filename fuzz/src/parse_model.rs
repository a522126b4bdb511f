//! The meaning of a ring entry, from blkif.h's offsets and rules alone (facts 1.3, 1.6).

use crate::guest::Guest;
use pvblk_block::{Op, RequestFlags};

/// A request as it must come out.
#[derive(Debug, PartialEq)]
pub struct Expected {
    pub op: Op,
    pub flags: RequestFlags,
    pub sector: u64,
    pub sectors: u64,
    /// Offset in the guest's memory of each sector of data.
    pub data: Vec<usize>,
    /// References in use until the answer.
    pub grefs: Vec<u32>,
    /// The answer's id and operation.
    pub id: u64,
    pub echo: u8,
}

/// The outcome for an entry.
pub enum Verdict {
    Good(Expected),
    /// An answer at once.
    Bad {
        /// The answer's id.
        id: u64,
        /// The answer's operation.
        echo: u8,
        /// The answer's status.
        status: i16,
    },
}

struct Reader<'a> {
    guest: &'a Guest,
    budget: usize,
    grefs: Vec<u32>,
    data: Vec<usize>,
}

impl Reader<'_> {
    fn map(&mut self, gref: u32, offset: usize, writable: bool) -> Option<usize> {
        let at = self.guest.resolve(gref, offset, writable)?;
        if self.grefs.len() == self.budget {
            return None;
        }
        self.grefs.push(gref);
        Some(at)
    }

    /// Of a page that is copied from at once.
    fn look(&self, gref: u32) -> Option<usize> {
        let at = self.guest.resolve(gref, 0, false)?;
        (self.budget > 0).then_some(at)
    }

    fn segment(&mut self, raw: [u8; 8], writable: bool) -> Option<()> {
        let gref = u32::from_ne_bytes([raw[0], raw[1], raw[2], raw[3]]);
        let (first, last) = (usize::from(raw[4]), usize::from(raw[5]));
        if first > last || last > 7 {
            return None;
        }
        let at = self.map(gref, first * 512, writable)?;
        self.data.extend((0..=last - first).map(|i| at + i * 512));
        Some(())
    }
}

fn u16_at(e: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([e[at], e[at + 1]])
}

fn u32_at(e: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([e[at], e[at + 1], e[at + 2], e[at + 3]])
}

fn u64_at(e: &[u8], at: usize) -> u64 {
    u64::from(u32_at(e, at)) | u64::from(u32_at(e, at + 4)) << 32
}

/// Judges `entry`. `max_indirect`: segments that were offered; `budget`: more uses of references than this fail.
pub fn judge(guest: &Guest, entry: &[u8; 112], max_indirect: u16, budget: usize) -> Verdict {
    let (operation, id, sector) = (entry[0], u64_at(entry, 8), u64_at(entry, 16));
    let mut reader = Reader {
        guest,
        budget,
        grefs: Vec::new(),
        data: Vec::new(),
    };
    let none = RequestFlags::empty();
    // Operation and flags by what is asked for; `None`: a rule is broken.
    let good = match operation {
        0..=3 => {
            let count = usize::from(entry[1]);
            let shape = match (operation, count) {
                (_, 12..) | (0 | 1, 0) => None,
                (0, _) => Some((Op::Read, none)),
                (1, _) => Some((Op::Write, none)),
                (2, 0) => Some((Op::Flush, RequestFlags::BARRIER)),
                (2, _) => Some((Op::Write, RequestFlags::BARRIER)),
                (_, 0) => Some((Op::Flush, none)),
                (_, _) => Some((Op::Write, RequestFlags::PREFLUSH)),
            };
            shape.filter(|(op, _)| {
                (0..count).all(|i| {
                    let mut raw = [0; 8];
                    raw.copy_from_slice(&entry[24 + i * 8..32 + i * 8]);
                    reader.segment(raw, *op == Op::Read).is_some()
                })
            })
        }
        5 => {
            let secure = entry[1] & 1 != 0;
            let flags = if secure { RequestFlags::SECURE } else { none };
            Some((Op::Discard, flags))
        }
        6 if max_indirect > 0 => {
            let op = match entry[1] {
                0 => Some(Op::Read),
                1 => Some(Op::Write),
                _ => None,
            };
            let count = usize::from(u16_at(entry, 2));
            let fits = count > 0 && count <= usize::from(max_indirect) && count <= 8 * 512;
            let fine = op.is_some() && fits && indirect(&mut reader, entry, count, op);
            op.filter(|_| fine).map(|op| (op, none))
        }
        _ => {
            return Verdict::Bad {
                id,
                echo: operation,
                status: -2,
            };
        }
    };
    // Front ends know an indirect request by its inner operation and stop the disk at any other.
    let echo = if operation == 6 { entry[1] } else { operation };
    let Some((op, flags)) = good else {
        return Verdict::Bad {
            id,
            echo,
            status: -1,
        };
    };
    Verdict::Good(Expected {
        op,
        flags,
        sector: if op == Op::Flush { 0 } else { sector },
        sectors: match op {
            Op::Discard => u64_at(entry, 24),
            _ => reader.data.len() as u64,
        },
        data: reader.data,
        grefs: reader.grefs,
        id,
        echo,
    })
}

/// All pages of segments are taken first, then the segments, in order.
fn indirect(reader: &mut Reader<'_>, entry: &[u8; 112], count: usize, op: Option<Op>) -> bool {
    let mut segments = Vec::new();
    for page in 0..count.div_ceil(512) {
        let gref = u32_at(entry, 28 + page * 4);
        let Some(at) = reader.look(gref) else {
            return false;
        };
        let here = (count - page * 512).min(512);
        segments.extend((0..here).map(|i| reader.guest.bytes::<8>(at + i * 8)));
    }
    segments
        .into_iter()
        .all(|raw| reader.segment(raw, op == Some(Op::Read)).is_some())
}
