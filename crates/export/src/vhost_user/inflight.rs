//! Requests in flight, told in memory that the front end keeps: a back end that comes after us finds in it what we took and
//! didn't answer (vhost-user.rst, "Inflight I/O tracking", split virtqueues).
//!
//! ```text
//! each queue, at multiples of 64 bytes     features u64 · version u16 · entries u16 · last_batch_head u16 · used_index u16
//!   then each entry                        inflight u8 · 5 bytes · next u16 · counter u64
//! behind all queues                        our own marks: `unflushed`
//! ```
//!
//! A batch of answers is chained through `next` before the used index moves, and marked as over afterwards. A crash between leaves
//! `used_index` behind the ring's, and the chain says which marks are stale.

use super::unflushed::{Marks, Unflushed, tail_bytes};
use super::virtqueue::Broken;
use pvblk_backend::LostWrites;
use pvblk_block::{Error, ErrorKind, Region};
use pvblk_protocol::vhost_user::InflightArea;
use pvblk_sys::{PAGE_SIZE, PeerFd, create_sealed, guarded_file};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

const HEAD: usize = 16;
const ENTRY: usize = 16;
const VERSION: u16 = 1;

fn queue_bytes(entries: u16) -> usize {
    (HEAD + ENTRY * usize::from(entries)).next_multiple_of(64)
}

/// Bytes of the area that this program makes for so many queues.
pub fn area_bytes(queues: u16, entries: u16) -> u64 {
    let used = usize::from(queues) * queue_bytes(entries);
    (used + tail_bytes(queues)).next_multiple_of(PAGE_SIZE) as u64
}

/// The area of all queues.
#[derive(Clone)]
pub struct Inflight {
    region: Arc<Region>,
    queues: u16,
    entries: u16,
    unflushed: Arc<Unflushed>,
    losses: Option<Arc<LostWrites>>,
}

impl Inflight {
    /// Makes an area for `queues` of `entries` of a disk with these marks, with its file and what to answer.
    pub fn create(
        queues: u16,
        entries: u16,
        marks: Marks,
    ) -> Result<(Inflight, InflightArea, OwnedFd), Error> {
        let used = usize::from(queues) * queue_bytes(entries);
        let len = area_bytes(queues, entries) as usize;
        let what = "making the memory for requests in flight";
        let file = create_sealed("pvblk-inflight", len as u64).map_err(|e| Error::os(what, e))?;
        let region = Region::shared(file.as_fd(), 0, len, true).map_err(|e| Error::os(what, e))?;
        let region = Arc::new(region);
        let area = InflightArea {
            size: len as u64,
            offset: 0,
            queues,
            queue_size: entries,
            padding: [0; 4],
        };
        let inflight = Inflight {
            unflushed: Arc::new(Unflushed::create(&region, used, queues, marks)),
            region,
            queues,
            entries,
            losses: None,
        };
        for i in 0..queues {
            inflight
                .region
                .atomic_u16(inflight.at(i) + 8)
                .store(VERSION, Ordering::Relaxed);
            inflight
                .region
                .atomic_u16(inflight.at(i) + 10)
                .store(entries, Ordering::Relaxed);
        }
        Ok((inflight, area, file))
    }

    /// Takes an area that a front end kept. Errors if it is no such area, or if it was made for contents that are lost.
    pub fn from_peer(area: &InflightArea, file: PeerFd, marks: Marks) -> Result<Inflight, Error> {
        let (queues, entries) = (area.queues, area.queue_size);
        let refuse = |why: String| Error::protocol(format!("memory for requests in flight: {why}"));
        let used = u64::from(queues) * queue_bytes(entries) as u64;
        let whole = area.offset.is_multiple_of(PAGE_SIZE as u64);
        if queues == 0 || entries == 0 || used > area.size || !whole {
            return Err(refuse(format!(
                "{} bytes at {} are no place for {queues} queues of {entries}",
                area.size, area.offset
            )));
        }
        guarded_file(file.as_fd(), area.offset, area.size)
            .map_err(|e| Error::caused(ErrorKind::Protocol, "memory for requests in flight", e))?;
        // Bounded by what is used, not by what the peer says.
        let room = (area.size - used).min(tail_bytes(queues) as u64) as usize;
        let len = (used as usize + room).next_multiple_of(PAGE_SIZE);
        let region = Region::guarded(file.as_fd(), area.offset, len)
            .map_err(|e| Error::os("mapping the memory for requests in flight", e))?;
        let region = Arc::new(region);
        let (unflushed, losses) =
            Unflushed::take_over(&region, used as usize, queues, room, marks)?;
        Ok(Inflight {
            region,
            queues,
            entries,
            unflushed: Arc::new(unflushed),
            losses,
        })
    }

    /// Writes that a server before us answered and that may be lost.
    pub fn losses(&self) -> Option<&Arc<LostWrites>> {
        self.losses.as_ref()
    }

    fn at(&self, queue: u16) -> usize {
        usize::from(queue) * queue_bytes(self.entries)
    }

    /// The part of one queue of `entries`, if the area has it.
    pub fn queue(&self, index: u16, entries: u16) -> Option<InflightQueue> {
        (index < self.queues && entries <= self.entries).then(|| InflightQueue {
            region: Arc::clone(&self.region),
            at: self.at(index),
            index,
            entries,
            counter: 0,
            batch: Vec::with_capacity(usize::from(entries)),
            unflushed: Arc::clone(&self.unflushed),
            noted: 0,
            losses: self.losses.clone(),
        })
    }
}

/// The part of an in-flight area that belongs to one queue.
pub struct InflightQueue {
    region: Arc<Region>,
    at: usize,
    index: u16,
    entries: u16,
    counter: u64,
    batch: Vec<u16>,
    unflushed: Arc<Unflushed>,
    /// The epoch of its last answered write.
    noted: u64,
    losses: Option<Arc<LostWrites>>,
}

impl InflightQueue {
    fn entry(&self, head: u16) -> usize {
        self.at + HEAD + ENTRY * usize::from(head)
    }

    fn is_in_flight(&self, head: u16) -> bool {
        self.region
            .atomic_u8(self.entry(head))
            .load(Ordering::Relaxed)
            == 1
    }

    fn counter_of(&self, head: u16) -> u64 {
        let mut b = [0; 8];
        self.region.read(self.entry(head) + 8, &mut b);
        u64::from_le_bytes(b)
    }

    /// Takes up what another left, on a ring whose used index is `used`: the heads to be done again, oldest first. The contents of the
    /// area are the peer's to change; nothing in it can name more than the queue's entries.
    pub fn recover(&mut self, used: u16) -> Vec<u16> {
        let told = self.region.atomic_u16(self.at + 14);
        let stale = used.wrapping_sub(told.load(Ordering::Acquire));
        if stale <= self.entries {
            let mut head = self.region.atomic_u16(self.at + 12).load(Ordering::Relaxed);
            for _ in 0..stale {
                if head >= self.entries {
                    break;
                }
                self.region
                    .atomic_u8(self.entry(head))
                    .store(0, Ordering::Relaxed);
                head = self
                    .region
                    .atomic_u16(self.entry(head) + 6)
                    .load(Ordering::Relaxed);
            }
        }
        fence(Ordering::Release);
        told.store(used, Ordering::Relaxed);
        let mut heads: Vec<(u64, u16)> = (0..self.entries)
            .filter(|&h| self.is_in_flight(h))
            .map(|h| (self.counter_of(h), h))
            .collect();
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |&(c, _)| c.wrapping_add(1));
        heads.into_iter().map(|(_, h)| h).collect()
    }

    /// `head` was taken.
    #[inline]
    pub fn taken(&mut self, head: u16) {
        let at = self.entry(head);
        self.region.write(at + 8, &self.counter.to_le_bytes());
        self.counter = self.counter.wrapping_add(1);
        self.region.atomic_u8(at).store(1, Ordering::Release);
    }

    /// `head` is in the used ring, which isn't published yet.
    #[inline]
    pub fn answered(&mut self, head: u16) {
        let last = self.region.atomic_u16(self.at + 12);
        let next = self.region.atomic_u16(self.entry(head) + 6);
        next.store(last.load(Ordering::Relaxed), Ordering::Relaxed);
        last.store(head, Ordering::Release);
        self.batch.push(head);
    }

    /// The used ring was published up to index `used`.
    #[inline]
    pub fn published(&mut self, used: u16) {
        fence(Ordering::Release);
        for head in self.batch.drain(..) {
            let at = self.at + HEAD + ENTRY * usize::from(head);
            self.region.atomic_u8(at).store(0, Ordering::Relaxed);
        }
        fence(Ordering::Release);
        self.region
            .atomic_u16(self.at + 14)
            .store(used, Ordering::Relaxed);
    }

    /// A write was done, and its answer isn't visible yet.
    #[inline]
    pub fn wrote(&mut self) {
        self.unflushed.wrote(self.index, &mut self.noted);
    }

    /// A flush was taken: what it covers, for [`InflightQueue::flushed`].
    #[cold]
    pub fn flush(&self) -> u64 {
        self.unflushed.flush()
    }

    /// The flush that got `covers` has succeeded.
    #[cold]
    pub fn flushed(&self, covers: u64) {
        self.unflushed.flushed(covers);
    }

    /// Writes that a server before us answered and that may be lost.
    pub fn losses(&self) -> Option<&Arc<LostWrites>> {
        self.losses.as_ref()
    }

    /// Errors if the memory was cut off.
    #[inline]
    pub fn check(&self) -> Result<(), Broken> {
        match self.region.is_lost() {
            true => Err(Broken::MemoryLost),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(file: &OwnedFd) -> PeerFd {
        PeerFd::new(file.try_clone().unwrap(), &pvblk_sys::Closer::new())
    }

    const STABLE: Marks = Marks {
        contents: None,
        cache: None,
    };

    #[test]
    fn what_was_not_answered_comes_back_in_order() {
        let (inflight, area, file) = Inflight::create(2, 8, STABLE).unwrap();
        let mut queue = inflight.queue(1, 8).unwrap();
        assert_eq!(queue.recover(100), [0; 0]);
        for head in [5, 2, 7, 0] {
            queue.taken(head);
        }
        queue.answered(2);
        queue.published(101);
        // The next one comes with another process, and finds the same memory.
        let kept = Inflight::from_peer(&area, peer(&file), STABLE).unwrap();
        drop((queue, inflight));
        let mut queue = kept.queue(1, 8).unwrap();
        assert_eq!(queue.recover(101), [5, 7, 0]);
        assert_eq!(kept.queue(0, 8).unwrap().recover(0), [0; 0]);
        // Taken later, so it is the last.
        queue.taken(1);
        assert_eq!(kept.queue(1, 8).unwrap().recover(101), [5, 7, 0, 1]);
    }

    #[test]
    fn a_crash_between_publishing_and_clearing_repeats_nothing() {
        let (inflight, ..) = Inflight::create(1, 8, STABLE).unwrap();
        let mut queue = inflight.queue(0, 8).unwrap();
        queue.recover(0);
        for head in [1, 2, 3, 4] {
            queue.taken(head);
        }
        queue.answered(3);
        queue.answered(1);
        // Before the used index moved: they are done again, which changes nothing.
        assert_eq!(inflight.queue(0, 8).unwrap().recover(0), [1, 2, 3, 4]);
        // After it moved.
        assert_eq!(inflight.queue(0, 8).unwrap().recover(2), [2, 4]);
    }

    #[test]
    fn nonsense_in_the_area_is_bounded() {
        let (inflight, area, file) = Inflight::create(1, 8, STABLE).unwrap();
        let junk = vec![0xff; 16 + 8 * 16];
        inflight.region.write(0, &junk);
        assert_eq!(inflight.queue(0, 8).unwrap().recover(3), [0; 0]);
        for i in 0..8 {
            inflight.region.write(16 + i * 16, &[1]);
        }
        inflight.region.atomic_u16(14).store(0, Ordering::Relaxed);
        inflight.region.atomic_u16(12).store(9, Ordering::Relaxed);
        assert_eq!(inflight.queue(0, 8).unwrap().recover(5).len(), 8);
        assert!(inflight.queue(1, 8).is_none() && inflight.queue(0, 9).is_none());
        let file = || peer(&file);
        for bad in [
            InflightArea { queues: 0, ..area },
            InflightArea {
                queue_size: 0,
                ..area
            },
            InflightArea {
                queues: 1000,
                ..area
            },
            InflightArea {
                size: 1 << 40,
                ..area
            },
            InflightArea { offset: 1, ..area },
            InflightArea {
                offset: u64::MAX - 4095,
                ..area
            },
        ] {
            assert!(
                Inflight::from_peer(&bad, file(), STABLE).is_err(),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn a_disk_whose_contents_are_lost_is_refused() {
        let marks = |contents| Marks {
            contents: Some(contents),
            ..STABLE
        };
        let (_, area, file) = Inflight::create(1, 8, marks(7)).unwrap();
        let again = |m| Inflight::from_peer(&area, peer(&file), m);
        assert!(again(marks(7)).is_ok());
        let e = again(marks(8)).err().expect("another disk").to_string();
        assert!(e.contains("contents are lost"), "{e}");
    }
}
