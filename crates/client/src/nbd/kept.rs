//! Copies of answered writes that no completed flush covers, for a server that loses its cache (docs/decisions/0032-nbd-volumes.md).

use super::NbdClientConfig;
use super::hello::Terms;
use parking_lot::Mutex;
use pvblk_block::Buffer;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_protocol::nbd::tflag;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of data in a chunk; few in tests, so that writes cross chunks and find no room.
pub(super) const CHUNK: usize = if cfg!(test) { 8 << 10 } else { 256 << 10 };
/// Most entries of a chunk.
const ENTRIES: usize = if cfg!(test) { 16 } else { 1024 };
/// Bytes of memory that a chunk may take.
pub(super) const COST: u64 = (CHUNK + ENTRIES * size_of::<Entry>()) as u64;
/// Most bytes of unused chunks that stay for reuse.
const SPARE: u64 = 8 << 20;

/// An answered write, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Number of the submission of its request, over all queues.
    pub stamp: u64,
    /// First byte on the export.
    pub offset: u64,
    pub len: u64,
    pub kind: EntryKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryKind {
    /// Data from this byte of the chunk on.
    Data(usize),
    /// Zeros, written with these command flags.
    Zeroes(u16),
    /// Stable at the server: older entries aren't written over it.
    Stable,
}

/// Memory with the entries of one log.
pub(super) struct Chunk {
    /// Sequence number of its first entry in its log.
    first: u64,
    entries: Vec<Entry>,
    bytes: Box<[u8]>,
    filled: usize,
}

/// A bug that a test plants and has to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plant {
    /// Nothing is replayed.
    NoReplay,
    /// Older data goes over newer ones.
    OutOfOrder,
    /// Entries are dropped when the flush is sent.
    DroppedEarly,
    /// The connections are handed to the queues before the replay.
    HandedEarly,
    /// No flush follows the replay.
    NoFlush,
    /// Older data goes over writes that had FUA.
    FuaOverwritten,
    /// Answers of old connections are taken after the seal.
    NotSealed,
    /// Only those to flushes are.
    LateFlush,
}

impl Plant {
    #[cfg(test)]
    /// Those that random requests find. The test of late flushes finds the other one.
    pub const RANDOM: [Plant; 7] = [
        Plant::NoReplay,
        Plant::OutOfOrder,
        Plant::DroppedEarly,
        Plant::HandedEarly,
        Plant::NoFlush,
        Plant::FuaOverwritten,
        Plant::NotSealed,
    ];
}

/// Outcome for a write that was to be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keeping {
    Kept,
    /// There is no room: a flush has to cover it before it is answered.
    Full,
    /// The connection that answered is over: the write counts as not answered.
    Sealed,
}

/// The writes that were answered on one queue.
#[derive(Default)]
pub(super) struct Log(Mutex<LogState>);

#[derive(Default)]
struct LogState {
    /// The generation of connections whose answers are taken.
    generation: u64,
    chunks: VecDeque<Chunk>,
    /// Sequence number of the next entry.
    next: u64,
    /// Entries before this one are covered by a flush.
    covered: u64,
}

impl LogState {
    fn cover(&mut self, until: u64, spare: &mut Vec<Chunk>) {
        self.covered = self.covered.max(until);
        while let Some(chunk) = self.chunks.front()
            && chunk.first + chunk.entries.len() as u64 <= self.covered
        {
            spare.extend(self.chunks.pop_front());
        }
    }
}

/// Chunks of a log of an earlier generation.
pub(super) struct Held {
    covered: u64,
    chunks: VecDeque<Chunk>,
}

impl Held {
    /// Its entries that no flush covers, in order of their answers, with the memory that their data is in.
    pub fn entries(&self) -> impl Iterator<Item = (Entry, &[u8])> {
        self.chunks.iter().flat_map(|c| {
            let skip = self.covered.saturating_sub(c.first) as usize;
            c.entries.iter().skip(skip).map(|e| (*e, &c.bytes[..]))
        })
    }
}

/// Position in each log.
pub(super) type Positions = Vec<u64>;

/// All that is kept for a volume.
pub(super) struct Kept {
    /// Most bytes of all chunks.
    most: u64,
    /// Bytes of chunks in logs and of those that wait for their replay.
    used: AtomicU64,
    gauge: Gauge,
    spare: Mutex<Vec<Box<[u8]>>>,
    logs: Mutex<Logs>,
    stamps: AtomicU64,
    /// Writes that have ended, by whatever status.
    ends: AtomicU64,
    /// A flush of ours is on its way.
    flushing: AtomicBool,
    held: Mutex<Vec<Held>>,
    #[cfg(test)]
    plant: Option<Plant>,
}

#[derive(Default)]
struct Logs {
    all: Vec<Arc<Log>>,
    /// Those that no queue has.
    free: Vec<Arc<Log>>,
}

impl Kept {
    /// `None` if this server loses nothing, or nothing is to be kept.
    pub fn new(name: &str, terms: &Terms, config: &NbdClientConfig) -> Option<Kept> {
        let volatile = terms.has(tflag::SEND_FLUSH) && !terms.has(tflag::READ_ONLY);
        let wanted = config.on_reconnect == super::OnReconnect::Resend && config.keep_bytes > 0;
        (volatile && wanted).then(|| Kept {
            most: config.keep_bytes,
            used: AtomicU64::new(0),
            gauge: Gauge::new(
                format!("{name}: unflushed writes"),
                MemoryKind::Heap,
                config.keep_bytes,
            ),
            spare: Mutex::default(),
            logs: Mutex::default(),
            stamps: AtomicU64::new(1),
            ends: AtomicU64::new(0),
            flushing: AtomicBool::new(false),
            held: Mutex::default(),
            #[cfg(test)]
            plant: config.plant,
        })
    }

    /// The number of one more submission. It is larger than those of all requests that the submitter knows to be submitted.
    #[inline]
    pub fn stamp(&self) -> u64 {
        self.stamps.fetch_add(1, Ordering::Relaxed)
    }

    /// A write has ended; to be called before anybody is told.
    #[inline]
    pub fn write_ended(&self) {
        self.ends.fetch_add(1, Ordering::Release);
    }

    /// A number that changes whenever a write is submitted and whenever one ends.
    pub fn writes(&self) -> u64 {
        let ends = self.ends.load(Ordering::Acquire);
        ends + self.stamps.load(Ordering::Relaxed)
    }

    /// A log for one more queue, on connections of this generation. It may hold writes of a queue that is closed.
    pub fn log(&self, generation: u64) -> Arc<Log> {
        let mut logs = self.logs.lock();
        let log = logs.free.pop().unwrap_or_else(|| {
            let log = Arc::new(Log::default());
            logs.all.push(Arc::clone(&log));
            log
        });
        log.0.lock().generation = generation;
        log
    }

    /// The log's queue is closed; its entries stay until a flush covers them.
    pub fn give_back(&self, log: &Arc<Log>) {
        self.logs.lock().free.push(Arc::clone(log));
    }

    /// Keeps data of a write, from byte `skip` of `buffers` on, that a connection of `generation` has answered.
    pub fn data(
        &self,
        log: &Log,
        generation: u64,
        (stamp, offset, len): (u64, u64, u64),
        buffers: &[Buffer],
    ) -> Keeping {
        let mut state = log.0.lock();
        if state.generation != generation && !self.has(Plant::NotSealed) {
            return Keeping::Sealed;
        }
        let (mut done, total) = (0, len as usize);
        while done < total {
            let Some(chunk) = self.room(&mut state, 1) else {
                return Keeping::Full;
            };
            let n = (total - done).min(CHUNK - chunk.filled);
            let at = chunk.filled;
            copy(buffers, done, &mut chunk.bytes[at..at + n]);
            chunk.filled += n;
            chunk.entries.push(Entry {
                stamp,
                offset: offset + done as u64,
                len: n as u64,
                kind: EntryKind::Data(at),
            });
            state.next += 1;
            done += n;
        }
        Keeping::Kept
    }

    /// Keeps a range without data.
    pub fn range(&self, log: &Log, generation: u64, entry: Entry) -> Keeping {
        let mut state = log.0.lock();
        if state.generation != generation && !self.has(Plant::NotSealed) {
            return Keeping::Sealed;
        }
        if self.has(Plant::FuaOverwritten) && entry.kind == EntryKind::Stable {
            return Keeping::Kept;
        }
        let Some(chunk) = self.room(&mut state, 0) else {
            return Keeping::Full;
        };
        chunk.entries.push(entry);
        state.next += 1;
        Keeping::Kept
    }

    /// The log's last chunk, with room for one entry and `bytes` of data.
    fn room<'a>(&self, state: &'a mut LogState, bytes: usize) -> Option<&'a mut Chunk> {
        let fits = |c: &Chunk| c.filled + bytes <= CHUNK && c.entries.len() < ENTRIES;
        if !state.chunks.back().is_some_and(fits) {
            let chunk = self.chunk(state.next)?;
            state.chunks.push_back(chunk);
        }
        state.chunks.back_mut()
    }

    fn chunk(&self, first: u64) -> Option<Chunk> {
        let within = |used: u64| used.checked_add(COST).filter(|&n| n <= self.most);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, within)
            .ok()?;
        let bytes = match self.spare.lock().pop() {
            Some(bytes) => bytes,
            None => {
                self.gauge.add(COST);
                vec![0; CHUNK].into_boxed_slice()
            }
        };
        Some(Chunk {
            first,
            entries: Vec::new(),
            bytes,
            filled: 0,
        })
    }

    fn free(&self, chunks: impl IntoIterator<Item = Chunk>) {
        let mut spare = self.spare.lock();
        for chunk in chunks {
            self.used.fetch_sub(COST, Ordering::Relaxed);
            if (spare.len() as u64 + 1) * COST <= SPARE {
                spare.push(chunk.bytes);
            } else {
                self.gauge.sub(COST);
            }
        }
    }

    /// True if it is time for a flush of ours, once until [`Kept::flushed`].
    #[inline]
    pub fn wants_flush(&self) -> bool {
        self.used.load(Ordering::Relaxed) > self.most / 2
            && !self.flushing.swap(true, Ordering::Relaxed)
    }

    /// The flush of ours has ended.
    pub fn flushed(&self) {
        self.flushing.store(false, Ordering::Relaxed);
    }

    /// The entries that a flush covers which is sent now: all those whose answers the sender knows of.
    pub fn positions(&self, out: &mut Positions) {
        let logs = self.logs.lock();
        // All at one moment: a write that is covered must not leave an older one of the same bytes uncovered.
        let all: Vec<_> = logs.all.iter().map(|l| l.0.lock()).collect();
        out.clear();
        out.extend(all.iter().map(|state| state.next));
        drop(all);
        if self.has(Plant::DroppedEarly) {
            self.drop_until(&logs, out);
        }
    }

    /// A flush that was sent at these positions was answered without an error by a connection of `generation`, whose queue has this log. False if
    /// that is over: then the flush counts as not answered, because what it covers is replayed, and a write that waits for this flush is in
    /// no log.
    pub fn cover(&self, log: &Log, generation: u64, positions: &Positions) -> bool {
        // Seals take this lock too.
        let logs = self.logs.lock();
        if log.0.lock().generation != generation && !self.has(Plant::LateFlush) {
            return false;
        }
        self.drop_until(&logs, positions);
        true
    }

    fn drop_until(&self, logs: &Logs, positions: &Positions) {
        let mut free = Vec::new();
        for (log, &until) in logs.all.iter().zip(positions) {
            log.0.lock().cover(until, &mut free);
        }
        self.free(free);
    }

    /// From now on only answers of this generation are taken; what is kept waits for its replay.
    pub fn seal(&self, generation: u64) {
        let mut held = self.held.lock();
        for log in &self.logs.lock().all {
            let mut state = log.0.lock();
            state.generation = generation;
            let covered = state.covered;
            state.covered = state.next;
            let chunks = std::mem::take(&mut state.chunks);
            if !chunks.is_empty() {
                held.push(Held { covered, chunks });
            }
        }
        self.flushed();
    }

    /// Writes that wait for their replay.
    pub fn held(&self) -> parking_lot::MutexGuard<'_, Vec<Held>> {
        self.held.lock()
    }

    /// The replay is done, and flushed.
    pub fn replayed(&self) {
        let held = std::mem::take(&mut *self.held.lock());
        self.free(held.into_iter().flat_map(|h| h.chunks));
    }

    /// The volume was given up.
    pub fn forget(&self) {
        self.replayed();
        self.give_way();
    }

    /// Frees unused chunks; returns their bytes.
    pub fn give_way(&self) -> u64 {
        let bytes = std::mem::take(&mut *self.spare.lock()).len() as u64 * COST;
        self.gauge.sub(bytes);
        bytes
    }

    /// Bytes of unused chunks.
    pub fn spare_bytes(&self) -> u64 {
        self.spare.lock().len() as u64 * COST
    }

    /// True if a test has planted this bug.
    #[cfg(test)]
    pub fn has(&self, bug: Plant) -> bool {
        self.plant == Some(bug)
    }

    #[cfg(not(test))]
    #[inline]
    pub const fn has(&self, _: Plant) -> bool {
        false
    }
}

/// Copies bytes of `buffers` from byte `skip` on.
fn copy(buffers: &[Buffer], mut skip: usize, mut to: &mut [u8]) {
    for b in buffers {
        if skip >= b.len() {
            skip -= b.len();
            continue;
        }
        let n = to.len().min(b.len() - skip);
        let (now, rest) = to.split_at_mut(n);
        b.read(skip, now);
        to = rest;
        skip = 0;
        if to.is_empty() {
            return;
        }
    }
}
