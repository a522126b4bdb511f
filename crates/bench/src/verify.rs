//! Data that can be checked: each unit carries a header and a checksum.

use super::order::mix;
use super::report::Mismatch;
use pvblk_block::Buffer;

/// Marks a unit that was written by this program ("pvblkchk").
const MAGIC: u64 = u64::from_le_bytes(*b"pvblkchk");
/// Bytes of the header: magic, place, seed, length, number of the write, checksum of the payload, checksum of
/// the header.
const HEADER: usize = 40;

/// The contents of a unit aren't known: a write to it failed.
const UNKNOWN: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    magic: u64,
    offset: u64,
    seed: u64,
    len: u32,
    number: u32,
    payload_crc: u32,
}

impl Header {
    fn encode(&self) -> [u8; HEADER] {
        let mut b = [0; HEADER];
        b[..8].copy_from_slice(&self.magic.to_le_bytes());
        b[8..16].copy_from_slice(&self.offset.to_le_bytes());
        b[16..24].copy_from_slice(&self.seed.to_le_bytes());
        b[24..28].copy_from_slice(&self.len.to_le_bytes());
        b[28..32].copy_from_slice(&self.number.to_le_bytes());
        b[32..36].copy_from_slice(&self.payload_crc.to_le_bytes());
        let crc = crc32c::crc32c(&b[..36]);
        b[36..].copy_from_slice(&crc.to_le_bytes());
        b
    }

    /// The fields, and true if their checksum is right.
    fn decode(b: &[u8]) -> (Header, bool) {
        let u64_at = |at: usize| {
            let mut n = [0; 8];
            n.copy_from_slice(&b[at..at + 8]);
            u64::from_le_bytes(n)
        };
        let u32_at = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        let header = Header {
            magic: u64_at(0),
            offset: u64_at(8),
            seed: u64_at(16),
            len: u32_at(24),
            number: u32_at(28),
            payload_crc: u32_at(32),
        };
        (header, crc32c::crc32c(&b[..36]) == u32_at(36))
    }
}

fn payload(out: &mut [u8], seed: u64, offset: u64, number: u32) {
    let mut state = mix(seed ^ offset.rotate_left(17) ^ u64::from(number));
    for word in out.chunks_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&mix(state).to_le_bytes()[..word.len()]);
    }
}

/// The expected contents of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expect {
    /// The write of this thread with this number.
    Number(u32),
    /// Any write of any job with units of this length, whole and in its place.
    Anything,
}

/// Makes and checks units of one thread.
pub(super) struct Checker {
    seed: u64,
    unit: usize,
    scratch: Vec<u8>,
}

impl Checker {
    pub(super) fn new(seed: u64, unit: u32) -> Checker {
        Checker {
            seed,
            unit: unit as usize,
            scratch: vec![0; unit as usize],
        }
    }

    /// Fills `len` bytes of `buffer`, for write `number` at byte `offset`.
    pub(super) fn fill(&mut self, buffer: &Buffer, len: u32, offset: u64, number: u32) {
        for at in (0..len as usize).step_by(self.unit) {
            let offset = offset + at as u64;
            payload(&mut self.scratch[HEADER..], self.seed, offset, number);
            let header = Header {
                magic: MAGIC,
                offset,
                seed: self.seed,
                len: self.unit as u32,
                number,
                payload_crc: crc32c::crc32c(&self.scratch[HEADER..]),
            };
            self.scratch[..HEADER].copy_from_slice(&header.encode());
            buffer.write(at, &self.scratch);
        }
    }

    /// Checks `len` bytes of `buffer`, which were read at byte `offset`; calls back for each wrong
    /// unit.
    pub(super) fn check(
        &mut self,
        buffer: &Buffer,
        len: u32,
        offset: u64,
        expect: impl Fn(u64) -> Expect,
        mut wrong: impl FnMut(Mismatch),
    ) {
        for at in (0..len as usize).step_by(self.unit) {
            let offset = offset + at as u64;
            buffer.read(at, &mut self.scratch);
            if let Some((expected, found)) = self.problem(offset, expect(offset)) {
                wrong(Mismatch {
                    offset,
                    expected,
                    found,
                });
            }
        }
    }

    /// Compares the unit in the scratch memory; returns the expected and the found contents if they
    /// differ.
    fn problem(&self, offset: u64, expect: Expect) -> Option<(String, String)> {
        let (h, whole) = Header::decode(&self.scratch);
        let differ = |expected: String, found: String| Some((expected, found));
        if h.magic != MAGIC {
            let found = match self.scratch.iter().all(|&b| b == 0) {
                true => "zeros".into(),
                false => format!("{:#018x}", h.magic),
            };
            return differ(format!("a header that starts with {MAGIC:#018x}"), found);
        }
        if !whole {
            return differ("a whole header".into(), format!("a damaged one: {h:?}"));
        }
        if h.offset != offset {
            return differ(
                format!("the data of byte {offset}"),
                format!("those of byte {}", h.offset),
            );
        }
        if h.len as usize != self.unit {
            return differ(
                format!("a unit of {} bytes", self.unit),
                format!("one of {}", h.len),
            );
        }
        if let Expect::Number(number) = expect
            && (h.number, h.seed) != (number, self.seed)
        {
            return differ(
                format!("write {number} of seed {:#x}", self.seed),
                format!("write {} of seed {:#x}", h.number, h.seed),
            );
        }
        let crc = crc32c::crc32c(&self.scratch[HEADER..]);
        if crc == h.payload_crc {
            return None;
        }
        let mut right = vec![0; self.unit - HEADER];
        payload(&mut right, h.seed, offset, h.number);
        let pair = right.iter().zip(&self.scratch[HEADER..]);
        let first = pair.enumerate().find(|(_, (a, b))| a != b);
        let (at, a, b) = first.map_or((0, 0, 0), |(i, (a, b))| (HEADER + i, *a, *b));
        differ(
            format!(
                "crc32c {:#010x}, {a:#04x} at byte {at} of it",
                h.payload_crc
            ),
            format!("{crc:#010x}, {b:#04x}"),
        )
    }
}

/// The number of the last write of each unit of a job's part: 4 bytes for each unit.
pub(super) struct Written {
    base: u64,
    unit: u64,
    numbers: Vec<u32>,
    last: u32,
}

impl Written {
    pub(super) fn new(part: (u64, u64), unit: u32) -> Written {
        let unit = u64::from(unit);
        Written {
            base: part.0,
            unit,
            numbers: vec![0; part.1.div_ceil(unit) as usize],
            last: 0,
        }
    }

    fn range(&self, offset: u64, len: u32) -> std::ops::Range<usize> {
        let first = (offset - self.base) / self.unit;
        let units = u64::from(len).div_ceil(self.unit);
        first as usize..(first + units) as usize
    }

    /// Notes a write; returns its number.
    pub(super) fn note(&mut self, offset: u64, len: u32) -> u32 {
        self.last = (self.last + 1) % UNKNOWN;
        self.last = self.last.max(1);
        let range = self.range(offset, len);
        self.numbers[range].fill(self.last);
        self.last
    }

    /// Notes that the contents of these units aren't known.
    pub(super) fn forget(&mut self, offset: u64, len: u32) {
        let range = self.range(offset, len);
        self.numbers[range].fill(UNKNOWN);
    }

    pub(super) fn expected(&self, offset: u64) -> Expect {
        Expect::Number(self.numbers[((offset - self.base) / self.unit) as usize])
    }

    /// The next stretch of known units from unit `from` on, at most `most` bytes: place, length, and the unit
    /// after it.
    pub(super) fn next_known(&self, from: usize, most: u32) -> Option<(u64, u32, usize)> {
        let known = |n: &u32| !matches!(*n, 0 | UNKNOWN);
        let first = from + self.numbers.get(from..)?.iter().position(known)?;
        let most = (u64::from(most) / self.unit).max(1) as usize;
        let run = self.numbers[first..].iter().take(most);
        let run = run.take_while(|n| known(n)).count();
        let offset = self.base + first as u64 * self.unit;
        Some((offset, (run as u64 * self.unit) as u32, first + run))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(c: &mut Checker, b: &Buffer, offset: u64, expect: Expect) -> Vec<Mismatch> {
        let mut all = Vec::new();
        c.check(b, b.len() as u32, offset, |_| expect, |m| all.push(m));
        all
    }

    #[test]
    fn what_was_written_is_right_and_nothing_else() {
        let mut c = Checker::new(7, 512);
        let b = Buffer::anonymous(4096).unwrap();
        c.fill(&b, 4096, 8192, 3);
        assert_eq!(wrong(&mut c, &b, 8192, Expect::Number(3)), []);
        assert_eq!(wrong(&mut c, &b, 8192, Expect::Anything), []);
        // The buffer holds old data, data of another place, or data of another job.
        for (offset, number, seed, found) in [
            (8192, 4, 7, "write 3"),
            (4096, 3, 7, "those of byte 8192"),
            (8192, 3, 8, "seed 0x7"),
        ] {
            let mut other = Checker::new(seed, 512);
            let all = wrong(&mut other, &b, offset, Expect::Number(number));
            assert_eq!(all.len(), 8);
            assert!(all[0].found.contains(found), "{}", all[0]);
            assert_eq!(all[7].offset, offset + 7 * 512);
        }
    }

    #[test]
    fn every_damaged_byte_is_found_and_told() {
        let mut c = Checker::new(7, 512);
        let b = Buffer::anonymous(512).unwrap();
        for at in 0..512 {
            c.fill(&b, 512, 0, 1);
            let mut byte = [0];
            b.read(at, &mut byte);
            b.write(at, &[byte[0] ^ 0x10]);
            let all = wrong(&mut c, &b, 0, Expect::Number(1));
            assert_eq!(all.len(), 1, "byte {at}");
            if at >= HEADER {
                assert!(
                    all[0].expected.contains(&format!("at byte {at} ")),
                    "{}",
                    all[0]
                );
            }
        }
        b.zero();
        assert_eq!(wrong(&mut c, &b, 0, Expect::Anything)[0].found, "zeros");
    }

    #[test]
    fn later_writes_count_and_failed_ones_are_not_checked() {
        let mut w = Written::new((4096, 10 * 512), 512);
        assert_eq!(w.note(4096, 2048), 1);
        assert_eq!(w.note(4096 + 512, 512), 2);
        w.forget(4096 + 1024, 512);
        w.note(4096 + 8 * 512, 1024);
        assert_eq!(w.expected(4096), Expect::Number(1));
        assert_eq!(w.expected(4096 + 512), Expect::Number(2));
        let mut stretches = Vec::new();
        let mut from = 0;
        while let Some((offset, len, next)) = w.next_known(from, 1024) {
            stretches.push((offset, len));
            from = next;
        }
        assert_eq!(stretches, [(4096, 1024), (5632, 512), (8192, 1024)]);
    }
}
