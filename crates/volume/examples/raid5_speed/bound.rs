//! Copies and sums alone that an array of four members in memory needs for its writes: no write can be faster, made this way.
//!
//! Pages are the same for each write, so they stay in the CPU's cache. A stripe's blocks are copied in pieces of 4 KiB, whole chunks go to members in
//! one piece.

use pvblk_sys::xor::{xor_into, xor_of};
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
const CHUNK: usize = 64 << 10;
const DATA: usize = 3;

/// The memory of members, of pages, and of so many requests' data.
pub struct Bound {
    members: Vec<Vec<u8>>,
    pages: [Vec<u8>; DATA],
    parity: Vec<u8>,
    data: Vec<u8>,
    rows: usize,
}

impl Bound {
    /// For writes to `span` bytes of the array, `depth` of `bytes` each in flight.
    pub fn new(span: u64, depth: usize, bytes: usize) -> Bound {
        let rows = (span as usize).div_ceil(DATA * CHUNK);
        let chunk = || vec![1; CHUNK];
        Bound {
            members: (0..=DATA).map(|_| vec![0; rows * CHUNK]).collect(),
            pages: [chunk(), chunk(), chunk()],
            parity: chunk(),
            // A write that goes over a row's end takes its data from two requests.
            data: vec![2; (depth * bytes).max(DATA * CHUNK)],
            rows,
        }
    }

    /// Writes a second, for a time. `bytes` and `is_random` as the array's; `stable`: without copies of the data.
    pub fn rate(
        &mut self,
        bytes: usize,
        is_random: bool,
        stable: bool,
        alone: bool,
        time: Duration,
    ) -> f64 {
        let mut rng = fastrand::Rng::with_seed(1);
        let (mut writes, mut at) = (0.0, 0);
        let begin = Instant::now();
        while begin.elapsed() < time {
            if is_random {
                let blocks = self.rows * DATA * CHUNK / BLOCK;
                self.change(rng.usize(..blocks));
                writes += 1.0;
            } else if alone && bytes < DATA * CHUNK {
                self.write(at, bytes / CHUNK);
                at = (at + bytes / CHUNK) % (self.rows * DATA);
                writes += 1.0;
            } else {
                self.whole(at / DATA, stable);
                at = (at + DATA) % (self.rows * DATA);
                writes += (DATA * CHUNK) as f64 / bytes as f64;
            }
            std::hint::black_box(&self.members);
        }
        writes / begin.elapsed().as_secs_f64()
    }

    /// True if parity fits the data of all members.
    pub fn is_right(&self) -> bool {
        let [a, b, c, d] = &self.members[..] else {
            return false;
        };
        let mut blocks = a.iter().zip(b).zip(c).zip(d);
        blocks.all(|(((a, b), c), d)| a ^ b ^ c ^ d == 0)
    }

    /// Members of a row's data and parity.
    fn roles(row: usize) -> ([usize; DATA], usize) {
        let parity = DATA - row % (DATA + 1);
        let data = std::array::from_fn(|index| (parity + 1 + index) % (DATA + 1));
        (data, parity)
    }

    /// The data of the n-th piece of a size: requests come again and again.
    fn data_of(data: &[u8], number: usize, size: usize) -> &[u8] {
        let pieces = data.len() / size;
        &data[number % pieces * size..][..size]
    }

    /// Writes a whole row.
    fn whole(&mut self, row: usize, stable: bool) {
        let chunks: [&[u8]; DATA] =
            std::array::from_fn(|index| Bound::data_of(&self.data, row * DATA + index, CHUNK));
        for block in (0..CHUNK).step_by(BLOCK) {
            let data = chunks.map(|chunk| &chunk[block..][..BLOCK]);
            let parity = &mut self.parity[block..][..BLOCK];
            if stable {
                xor_of(parity, &data);
                continue;
            }
            for (page, data) in self.pages.iter_mut().zip(data) {
                page[block..][..BLOCK].copy_from_slice(data);
            }
            let [a, b, c] = &self.pages;
            xor_of(parity, &[a, b, c].map(|page| &page[block..][..BLOCK]));
        }
        let (roles, parity) = Bound::roles(row);
        for (index, role) in roles.into_iter().enumerate() {
            let data = match stable {
                true => chunks[index],
                false => &self.pages[index],
            };
            self.members[role][row * CHUNK..][..CHUNK].copy_from_slice(data);
        }
        self.members[parity][row * CHUNK..][..CHUNK].copy_from_slice(&self.parity);
    }

    /// Writes chunks that don't begin or end a row together, so that each row is written for itself. The first write to a row reads its other chunks;
    /// later ones find all of it in pages.
    fn write(&mut self, first: usize, chunks: usize) {
        let mut at = first;
        while at < first + chunks {
            let (row, begin) = (at / DATA % self.rows, at % DATA);
            let end = DATA.min(begin + first + chunks - at);
            let (roles, parity) = Bound::roles(row);
            for (index, page) in self.pages.iter_mut().enumerate() {
                if (begin..end).contains(&index) {
                    page.copy_from_slice(Bound::data_of(&self.data, at + index - begin, CHUNK));
                } else if begin == 0 {
                    page.copy_from_slice(&self.members[roles[index]][row * CHUNK..][..CHUNK]);
                }
            }
            let [a, b, c] = &self.pages;
            xor_of(&mut self.parity, &[a, b, c]);
            for (index, page) in self.pages.iter().enumerate().take(end).skip(begin) {
                let member = &mut self.members[roles[index]];
                member[row * CHUNK..][..CHUNK].copy_from_slice(page);
            }
            self.members[parity][row * CHUNK..][..CHUNK].copy_from_slice(&self.parity);
            at += end - begin;
        }
    }

    /// Writes one block: reads it and the parity, and writes both.
    fn change(&mut self, block: usize) {
        let (chunk, within) = (block / (CHUNK / BLOCK), block % (CHUNK / BLOCK) * BLOCK);
        let row = chunk / DATA;
        let (roles, parity) = Bound::roles(row);
        let (role, at) = (roles[chunk % DATA], row * CHUNK + within);
        let [old, new, _] = &mut self.pages;
        let (old, new) = (&mut old[..BLOCK], &mut new[..BLOCK]);
        let sum = &mut self.parity[..BLOCK];
        old.copy_from_slice(&self.members[role][at..][..BLOCK]);
        sum.copy_from_slice(&self.members[parity][at..][..BLOCK]);
        new.copy_from_slice(Bound::data_of(&self.data, block, BLOCK));
        xor_into(sum, &[old, new]);
        self.members[role][at..][..BLOCK].copy_from_slice(new);
        self.members[parity][at..][..BLOCK].copy_from_slice(sum);
    }
}
