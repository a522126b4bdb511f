//! The driver's side of a virtqueue: for the client, tests and fuzzing. It does what it is told, also what no driver may.

use super::{DESCRIPTOR, Place};
use pvblk_block::Region;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

/// A descriptor's flags.
pub mod flags {
    pub const NEXT: u16 = 1;
    /// The device writes it.
    pub const WRITE: u16 = 2;
    /// It refers to a table.
    pub const INDIRECT: u16 = 4;
}

/// Bytes of one request's place: head, ranges, status; an indirect table and the data follow in places of their own.
const HEADS: usize = 64;
/// Bytes of one request's indirect table.
const TABLES: usize = 512;
/// Most pieces of data of a request: its table also has the head and the status.
pub const MOST_PIECES: usize = TABLES / DESCRIPTOR - 2;
fn descriptor(address: u64, len: u32, flags: u16, next: u16) -> [u8; DESCRIPTOR] {
    let mut raw = [0; DESCRIPTOR];
    raw[..8].copy_from_slice(&address.to_le_bytes());
    raw[8..12].copy_from_slice(&len.to_le_bytes());
    raw[12..14].copy_from_slice(&flags.to_le_bytes());
    raw[14..].copy_from_slice(&next.to_le_bytes());
    raw
}

fn available_offset(entries: usize) -> usize {
    entries * DESCRIPTOR
}

fn used_offset(entries: usize) -> usize {
    (available_offset(entries) + 6 + entries * 2).next_multiple_of(4)
}

fn heads_offset(entries: usize) -> usize {
    (used_offset(entries) + 6 + entries * 8).next_multiple_of(64)
}

/// A driver's queue, in guest memory that begins with it.
pub struct Driver {
    region: Arc<Region>,
    /// Guest address of the region.
    guest: u64,
    entries: u16,
    pub event_index: bool,
    next_available: u16,
    next_used: u16,
}

impl Driver {
    /// A queue of `entries` at the beginning of `region`, which the guest has at address `guest`.
    pub fn new(region: Arc<Region>, guest: u64, entries: u16, event_index: bool) -> Driver {
        Driver {
            region,
            guest,
            entries,
            event_index,
            next_available: 0,
            next_used: 0,
        }
    }

    /// Bytes of memory that a queue of `entries` takes, in whole pages.
    pub fn bytes(entries: u16) -> usize {
        let entries = usize::from(entries);
        (heads_offset(entries) + entries * (HEADS + TABLES)).next_multiple_of(4096)
    }

    /// Bytes of memory before the place for data.
    pub fn data_offset(&self) -> usize {
        Driver::bytes(self.entries)
    }

    pub fn entries(&self) -> u16 {
        self.entries
    }

    fn available_offset(&self) -> usize {
        available_offset(self.entries.into())
    }

    fn used_offset(&self) -> usize {
        used_offset(self.entries.into())
    }

    fn heads(&self) -> usize {
        heads_offset(self.entries.into())
    }

    fn table(&self, head: u16) -> usize {
        self.heads() + usize::from(self.entries) * HEADS + usize::from(head) * TABLES
    }

    /// Guest addresses of descriptor table, available and used ring.
    pub fn addresses(&self) -> (u64, u64, u64) {
        let at = |offset: usize| self.guest + offset as u64;
        (at(0), at(self.available_offset()), at(self.used_offset()))
    }

    /// The same as the device sees it.
    pub fn place(&self) -> Place {
        let part = |offset| (Arc::clone(&self.region), offset);
        Place {
            table: part(0),
            available: part(self.available_offset()),
            used: part(self.used_offset()),
        }
    }

    /// Guest address of the memory that holds the queue.
    pub fn guest(&self) -> u64 {
        self.guest
    }

    /// The memory itself.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The guest address of byte `offset`.
    #[inline]
    pub fn at(&self, offset: usize) -> u64 {
        self.guest + offset as u64
    }

    /// Writes a descriptor at byte `offset` of the memory.
    #[inline]
    pub fn write_descriptor(&self, offset: usize, address: u64, len: u32, flags: u16, next: u16) {
        self.region
            .write(offset, &descriptor(address, len, flags, next));
    }

    /// Writes descriptor `index` of the table.
    #[inline]
    pub fn descriptor(&self, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        self.write_descriptor(usize::from(index) * 16, address, len, flags, next);
    }

    fn index(&self, offset: usize) -> &AtomicU16 {
        self.region.atomic_u16(offset)
    }

    /// Puts `head` into the available ring and makes it visible.
    pub fn make_available(&mut self, head: u16) {
        self.enqueue(head);
        self.publish();
    }

    /// Puts `head` into the available ring; the device doesn't see it before [`Driver::publish`].
    #[inline]
    pub fn enqueue(&mut self, head: u16) {
        let slot = usize::from(self.next_available & (self.entries - 1));
        self.index(self.available_offset() + 4 + slot * 2)
            .store(head, Ordering::Relaxed);
        self.next_available = self.next_available.wrapping_add(1);
    }

    /// Makes visible what was put into the available ring.
    #[inline]
    pub fn publish(&mut self) {
        self.set_available(self.next_available);
    }

    /// Makes any available index visible.
    pub fn set_available(&mut self, index: u16) {
        self.next_available = index;
        self.index(self.available_offset() + 2)
            .store(index, Ordering::Release);
    }

    /// True if the device wants to be woken for what became visible since `before`.
    #[inline]
    pub fn needs_kick(&self, before: u16) -> bool {
        fence(Ordering::SeqCst);
        if self.event_index {
            let at = self.used_offset() + 4 + usize::from(self.entries) * 8;
            let event = self.index(at).load(Ordering::Relaxed);
            let new = self.next_available;
            return new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(before);
        }
        self.index(self.used_offset()).load(Ordering::Relaxed) & 1 == 0
    }

    /// The available index now.
    pub fn available(&self) -> u16 {
        self.next_available
    }

    /// The used index that the device published.
    #[inline]
    pub fn published(&self) -> u16 {
        self.index(self.used_offset() + 2).load(Ordering::Acquire)
    }

    /// True if a chain was used that [`Driver::used`] hasn't returned.
    #[inline]
    pub fn has_used(&self) -> bool {
        self.published() != self.next_used
    }

    /// The next used chain: its head and the bytes written.
    #[inline]
    pub fn used(&mut self) -> Option<(u32, u32)> {
        if !self.has_used() {
            return None;
        }
        let slot = usize::from(self.next_used & (self.entries - 1));
        let mut raw = [0; 8];
        self.region
            .read(self.used_offset() + 4 + slot * 8, &mut raw);
        self.next_used = self.next_used.wrapping_add(1);
        let word = |i: usize| u32::from_le_bytes([raw[i], raw[i + 1], raw[i + 2], raw[i + 3]]);
        Some((word(0), word(4)))
    }

    /// Asks to be woken at the next used chain, or not at all.
    pub fn want_calls(&self, want: bool) {
        if self.event_index {
            let event = if want {
                self.next_used
            } else {
                self.next_used.wrapping_sub(1)
            };
            let at = self.available_offset() + 4 + usize::from(self.entries) * 2;
            self.index(at).store(event, Ordering::Relaxed);
        } else {
            self.index(self.available_offset())
                .store(u16::from(!want), Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
    }

    /// Writes a request's head for chain `head` and returns its guest address.
    #[inline]
    pub fn head(&self, head: u16, kind: u32, sector: u64) -> u64 {
        let at = self.heads() + usize::from(head) * HEADS;
        let mut raw = [0; 16];
        raw[..4].copy_from_slice(&kind.to_le_bytes());
        raw[8..].copy_from_slice(&sector.to_le_bytes());
        self.region.write(at, &raw);
        // Not a status that a device sets.
        self.region.write(at + 48, &[0xff]);
        self.at(at)
    }

    /// Writes the range of a discard or write-zeroes and returns its guest address.
    pub fn range(&self, head: u16, sector: u64, sectors: u32, flags: u32) -> u64 {
        let at = self.heads() + usize::from(head) * HEADS + 16;
        let mut raw = [0; 16];
        raw[..8].copy_from_slice(&sector.to_le_bytes());
        raw[8..12].copy_from_slice(&sectors.to_le_bytes());
        raw[12..].copy_from_slice(&flags.to_le_bytes());
        self.region.write(at, &raw);
        self.at(at)
    }

    /// The guest address of the status byte of chain `head`.
    #[inline]
    pub fn status_at(&self, head: u16) -> u64 {
        self.at(self.heads() + usize::from(head) * HEADS + 48)
    }

    /// The status byte of chain `head`; 255 before the device answered.
    #[inline]
    pub fn status(&self, head: u16) -> u8 {
        let mut b = [0];
        self.region
            .read((self.status_at(head) - self.guest) as usize, &mut b);
        b[0]
    }

    /// Builds a request of `kind` at `head`, with up to [`MOST_PIECES`] pieces (guest address, bytes, the device writes) between head and status; indirect.
    #[inline]
    pub fn request(
        &self,
        head: u16,
        kind: u32,
        sector: u64,
        pieces: impl IntoIterator<Item = (u64, u32, bool)>,
    ) {
        let first = (self.head(head, kind, sector), 16, false);
        let status = (self.status_at(head), 1, true);
        let mut table = [0; TABLES];
        let mut count = 0;
        let chain = std::iter::once(first).chain(pieces).chain([status]);
        for ((address, len, write), raw) in chain.zip(table.chunks_exact_mut(DESCRIPTOR)) {
            count += 1;
            let write = if write { flags::WRITE } else { 0 };
            raw.copy_from_slice(&descriptor(address, len, write | flags::NEXT, count));
        }
        let bytes = usize::from(count) * DESCRIPTOR;
        // The last one has no next.
        table[bytes - 4] &= !(flags::NEXT as u8);
        let at = self.table(head);
        self.region.write(at, &table[..bytes]);
        self.descriptor(head, self.at(at), bytes as u32, flags::INDIRECT, 0);
    }

    /// Builds a chain of request `kind` at `head` with these pieces (guest address, bytes, the device writes) between head and
    /// status; indirect, or with the descriptors from `head` on.
    pub fn build(
        &self,
        head: u16,
        kind: u32,
        sector: u64,
        pieces: &[(u64, u32, bool)],
        indirect: bool,
    ) {
        if indirect {
            return self.request(head, kind, sector, pieces.iter().copied());
        }
        let first = (self.head(head, kind, sector), 16, false);
        let status = (self.status_at(head), 1, true);
        let mut chain = vec![first];
        chain.extend_from_slice(pieces);
        chain.push(status);
        for (i, &(address, len, write)) in (0u16..).zip(&chain) {
            let last = usize::from(i) + 1 == chain.len();
            let next = if last { 0 } else { flags::NEXT };
            let write = if write { flags::WRITE } else { 0 };
            self.descriptor(head + i, address, len, next | write, head + i + 1);
        }
    }
}
