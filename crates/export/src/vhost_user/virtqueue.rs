//! The device's side of a split virtqueue (VIRTIO 1.2, section 2.7): chains are taken, used buffers are published in
//! batches, each side asks to be woken only when it sleeps.
//!
//! The driver is hostile. Its indices are loaded once, descriptors are copied out, and only the copies are checked and used. A
//! rule broken here has no answer in the protocol, so it stops the queue: [`Broken`] names the rule.

use super::memory::GuestMemory;
use pvblk_protocol::virtio::{DESCRIPTOR, Place};
use std::sync::atomic::{AtomicU16, Ordering, fence};
use virtio_bindings::virtio_ring::{
    VRING_AVAIL_F_NO_INTERRUPT, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
    VRING_USED_F_NO_NOTIFY,
};

/// Most entries of a queue (VIRTIO 1.2, 2.7).
pub const MAX_ENTRIES: u32 = 32768;
/// Most descriptors of a chain in an indirect table. The specification allows no more than the queue has entries; drivers
/// of small queues exceed that, and QEMU takes as many.
pub const MAX_INDIRECT: usize = 1024;

/// The rule of the queue that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// More became available than the queue holds.
    #[error("the available index moved on by {0}, and the queue has {1} entries")]
    AvailableIndex(u16, u16),
    /// A head or a next is not in the table.
    #[error("descriptor {0} is outside the table of {1}")]
    DescriptorIndex(u16, u32),
    /// A chain that was not answered yet is made available again.
    #[error("descriptor {0} became available while it is in flight")]
    InFlight(u16),
    /// More descriptors than there can be: a loop, or more than any request of ours has.
    #[error("a chain is longer than {0} descriptors")]
    Loop(u32),
    /// An indirect descriptor inside an indirect table.
    #[error("an indirect table refers to an indirect table")]
    IndirectInIndirect,
    /// A descriptor that is indirect and has a next.
    #[error("an indirect descriptor has a next one")]
    IndirectAndNext,
    /// A feature that was not negotiated.
    #[error("indirect descriptors were not negotiated")]
    IndirectNotNegotiated,
    /// Not a whole number of descriptors, none, or too many.
    #[error("an indirect table has {0} bytes")]
    IndirectLength(u32),
    /// Something to be read follows something to be written.
    #[error("a readable descriptor follows a writable one")]
    ReadableAfterWritable,
    /// A descriptor of no bytes.
    #[error("a descriptor has no bytes")]
    Empty,
    /// More than 2^32 bytes.
    #[error("a chain is longer than 4 GiB")]
    TooLong,
    /// Not, or not all, guest memory.
    #[error("{1} bytes at guest address {0:#x} are not guest memory")]
    Address(u64, u32),
    /// No byte in which the request could be answered.
    #[error("a request has no writable byte for its status")]
    NoStatus,
    /// The file behind the memory was cut off.
    #[error("the guest's memory shrank while it was in use")]
    MemoryLost,
}

/// A descriptor that was copied out and checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    pub address: u64,
    /// Bytes, at least 1.
    pub len: u32,
    /// The device writes it.
    pub writable: bool,
}

/// A queue at work.
pub struct Virtqueue {
    place: Place,
    entries: u16,
    event_index: bool,
    indirect: bool,
    next_available: u16,
    next_used: u16,
    /// Used entries that are published; what lies between this and `next_used` is not.
    published: u16,
    /// The driver was told that it needn't wake us.
    quiet: bool,
    /// Private copy of an indirect table.
    table: Vec<u8>,
}

impl Virtqueue {
    /// A queue of `entries` (a power of two) at `place`, from available index `base` on. The used index is read from memory.
    pub fn new(
        place: Place,
        entries: u16,
        base: u16,
        event_index: bool,
        indirect: bool,
    ) -> Virtqueue {
        let mut queue = Virtqueue {
            place,
            entries,
            event_index,
            indirect,
            next_available: base,
            next_used: 0,
            published: 0,
            quiet: false,
            table: Vec::new(),
        };
        queue.next_used = queue.used_index().load(Ordering::Acquire);
        queue.published = queue.next_used;
        queue
    }

    pub fn entries(&self) -> u16 {
        self.entries
    }

    /// The available index from which on chains weren't taken.
    pub fn next_available(&self) -> u16 {
        self.next_available
    }

    /// Takes up reading at another index.
    pub fn set_next_available(&mut self, index: u16) {
        self.next_available = index;
    }

    /// The used index, published or not.
    pub fn next_used(&self) -> u16 {
        self.next_used
    }

    /// Reads the available index, from any thread and as long as it is kept.
    pub fn submitted(&self) -> pvblk_backend::Submitted {
        let (region, at) = self.place.available.clone();
        Box::new(move || region.atomic_u16(at + 2).load(Ordering::Acquire))
    }

    fn available_at(&self, offset: usize) -> &AtomicU16 {
        self.place
            .available
            .0
            .atomic_u16(self.place.available.1 + offset)
    }

    fn used_index(&self) -> &AtomicU16 {
        self.place.used.0.atomic_u16(self.place.used.1 + 2)
    }

    /// True if the file behind one of its parts was cut off.
    #[inline]
    pub fn is_lost(&self) -> bool {
        let place = &self.place;
        place.table.0.is_lost() || place.available.0.is_lost() || place.used.0.is_lost()
    }

    /// Chains that can be taken now.
    #[inline]
    pub fn available(&self) -> Result<u16, Broken> {
        // Acquire: the entries and descriptors below the index are read after it.
        let index = self.available_at(2).load(Ordering::Acquire);
        let count = index.wrapping_sub(self.next_available);
        if count > self.entries {
            return Err(Broken::AvailableIndex(count, self.entries));
        }
        Ok(count)
    }

    /// Takes the head of the next chain, which [`Virtqueue::available`] said is there.
    #[inline]
    pub fn take(&mut self) -> Result<u16, Broken> {
        let slot = usize::from(self.next_available & (self.entries - 1));
        let head = self.available_at(4 + slot * 2).load(Ordering::Relaxed);
        if head >= self.entries {
            return Err(Broken::DescriptorIndex(head, u32::from(self.entries)));
        }
        self.next_available = self.next_available.wrapping_add(1);
        Ok(head)
    }

    /// Copies the chain that begins at `head` (below the entries) to `out`: first what is read, then what is written.
    #[inline]
    pub fn chain(
        &mut self,
        head: u16,
        memory: &GuestMemory,
        out: &mut Vec<Descriptor>,
    ) -> Result<(), Broken> {
        out.clear();
        let entries = u32::from(self.entries);
        let mut walk = Walk::new(entries, entries.min(MAX_INDIRECT as u32));
        let mut next = Some(head);
        while let Some(index) = next {
            let mut raw = [0; DESCRIPTOR];
            let at = self.place.table.1 + usize::from(walk.index(index)?) * DESCRIPTOR;
            self.place.table.0.read(at, &mut raw);
            let raw = Raw::of(&raw);
            if raw.flags & VRING_DESC_F_INDIRECT as u16 != 0 {
                if !self.indirect {
                    return Err(Broken::IndirectNotNegotiated);
                }
                if raw.flags & VRING_DESC_F_NEXT as u16 != 0 {
                    return Err(Broken::IndirectAndNext);
                }
                return self.indirect_chain(raw, memory, walk, out);
            }
            next = walk.add(raw, out)?;
        }
        Ok(())
    }

    fn indirect_chain(
        &mut self,
        table: Raw,
        memory: &GuestMemory,
        mut walk: Walk,
        out: &mut Vec<Descriptor>,
    ) -> Result<(), Broken> {
        let len = table.len as usize;
        if len == 0 || !len.is_multiple_of(DESCRIPTOR) || len / DESCRIPTOR > MAX_INDIRECT {
            return Err(Broken::IndirectLength(table.len));
        }
        self.table.resize(len, 0);
        // Copied once, all of it: the driver can't change what is being walked.
        if !memory.read(table.address, &mut self.table) {
            return Err(Broken::Address(table.address, table.len));
        }
        let count = (len / DESCRIPTOR) as u32;
        (walk.table, walk.left, walk.most) = (count, count, count);
        let mut next = Some(0);
        while let Some(index) = next {
            let at = usize::from(walk.index(index)?) * DESCRIPTOR;
            let Some(raw) = self.table[at..].first_chunk().map(Raw::of) else {
                return Err(Broken::IndirectLength(table.len));
            };
            if raw.flags & VRING_DESC_F_INDIRECT as u16 != 0 {
                return Err(Broken::IndirectInIndirect);
            }
            next = walk.add(raw, out)?;
        }
        Ok(())
    }

    /// Notes that the chain of `head` is done, with `len` bytes written. Not visible before [`Virtqueue::publish`].
    #[inline]
    pub fn add_used(&mut self, head: u16, len: u32) {
        let slot = usize::from(self.next_used & (self.entries - 1));
        let mut element = [0; 8];
        element[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        element[4..].copy_from_slice(&len.to_le_bytes());
        self.place
            .used
            .0
            .write(self.place.used.1 + 4 + slot * 8, &element);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Makes used chains visible.
    #[inline]
    pub fn publish(&mut self) {
        // Release: the elements, the data and the status bytes are there before the index.
        self.used_index().store(self.next_used, Ordering::Release);
    }

    /// True if the driver wants to be woken for what was published since the last call.
    #[inline]
    pub fn needs_call(&mut self) -> bool {
        let (old, new) = (self.published, self.next_used);
        self.published = new;
        // The index is visible before we look whether the driver sleeps; it does the same the other way round.
        fence(Ordering::SeqCst);
        if self.event_index {
            let at = 4 + usize::from(self.entries) * 2;
            let event = self.available_at(at).load(Ordering::Relaxed);
            // VIRTIO 1.2, 2.7.10: woken when the index has passed the event.
            return new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old);
        }
        self.available_at(0).load(Ordering::Relaxed) & VRING_AVAIL_F_NO_INTERRUPT as u16 == 0
    }

    /// Tells the driver that it needn't wake us: we look by ourselves.
    #[inline]
    pub fn disarm(&mut self) {
        // With an event index, which is passed only once, there is nothing to take back.
        if !self.event_index && !self.quiet {
            let flags = self.place.used.0.atomic_u16(self.place.used.1);
            flags.store(VRING_USED_F_NO_NOTIFY as u16, Ordering::Relaxed);
        }
        self.quiet = true;
    }

    /// Asks the driver to wake us at the next chain; true if there is one already, or the index makes no sense.
    pub fn arm(&mut self) -> bool {
        self.quiet = false;
        if self.event_index {
            let at = self.place.used.1 + 4 + usize::from(self.entries) * 8;
            let event = self.place.used.0.atomic_u16(at);
            event.store(self.next_available, Ordering::Relaxed);
        } else {
            let flags = self.place.used.0.atomic_u16(self.place.used.1);
            flags.store(0, Ordering::Relaxed);
        }
        // What we ask for is visible before the last look; the driver publishes and then looks.
        fence(Ordering::SeqCst);
        self.available_at(2).load(Ordering::Relaxed) != self.next_available
    }
}

/// A descriptor as the driver wrote it.
#[derive(Clone, Copy)]
struct Raw {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Raw {
    #[inline]
    fn of(b: &[u8; DESCRIPTOR]) -> Raw {
        Raw {
            address: u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]),
            len: u32::from_le_bytes([b[8], b[9], b[10], b[11]]),
            flags: u16::from_le_bytes([b[12], b[13]]),
            next: u16::from_le_bytes([b[14], b[15]]),
        }
    }
}

/// State of the walk along a chain.
struct Walk {
    table: u32,
    left: u32,
    most: u32,
    bytes: u32,
    writing: bool,
}

impl Walk {
    fn new(table: u32, most: u32) -> Walk {
        Walk {
            table,
            left: most,
            most,
            bytes: 0,
            writing: false,
        }
    }

    #[inline]
    fn index(&self, index: u16) -> Result<u16, Broken> {
        if u32::from(index) >= self.table {
            return Err(Broken::DescriptorIndex(index, self.table));
        }
        Ok(index)
    }

    /// Takes one descriptor and returns the index of the next.
    #[inline]
    fn add(&mut self, raw: Raw, out: &mut Vec<Descriptor>) -> Result<Option<u16>, Broken> {
        self.left = self.left.checked_sub(1).ok_or(Broken::Loop(self.most))?;
        if raw.len == 0 {
            return Err(Broken::Empty);
        }
        self.bytes = self.bytes.checked_add(raw.len).ok_or(Broken::TooLong)?;
        let writable = raw.flags & VRING_DESC_F_WRITE as u16 != 0;
        if self.writing && !writable {
            return Err(Broken::ReadableAfterWritable);
        }
        self.writing = writable;
        out.push(Descriptor {
            address: raw.address,
            len: raw.len,
            writable,
        });
        Ok((raw.flags & VRING_DESC_F_NEXT as u16 != 0).then_some(raw.next))
    }
}

#[cfg(test)]
#[path = "virtqueue_tests.rs"]
mod tests;
