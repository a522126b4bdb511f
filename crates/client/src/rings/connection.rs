//! The other side of a front end: rings and memory of one connection, and how one follows another.

use super::durability::Durability;
use super::frames::Frames;
use super::hardware_queue::{HardwareQueue, QueueSetup, SharedQueue, has_flush, most_segments};
use super::owners::{self, Completions};
use super::parts::FrontParts;
use super::plug::{MergeLimits, MergePolicy};
use super::segments::GrantedMemory;
use parking_lot::Mutex;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Clock, Error, ErrorKind, Region};
use pvblk_protocol::xenbus::DiskProperties;
use pvblk_sys::{EventFd, PAGE_SIZE};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Rings, their queues and their memory, from one handshake.
pub struct Connection<M> {
    pub properties: DiskProperties,
    pub merge: MergeLimits,
    pub hardware: Vec<Arc<SharedQueue<M>>>,
    pub durability: Arc<Durability>,
    /// Where its runs come from.
    reserve: Arc<Frames>,
    /// Runs of frames for indirect segments and bounces: first, count.
    runs: Mutex<Vec<(u32, u32)>>,
    _gauges: Vec<Gauge>,
}

impl<M: MergePolicy> Connection<M> {
    /// Takes frames for `parts`' queues. Errors if there are too few; then none are taken.
    pub fn new(
        parts: FrontParts,
        reserve: &Arc<Frames>,
        trouble: &Arc<Trouble>,
        inherited_dirt: bool,
        clock: &Arc<dyn Clock>,
    ) -> Result<Connection<M>, Error> {
        let p = parts.properties;
        let memory = Arc::new(GrantedMemory::new(
            parts.granter,
            Arc::clone(reserve),
            p.persistent,
        ));
        let queues = parts.queues.len();
        let bounce_pages = bounce_pages(reserve.memory(), queues, &p);
        let durability = Arc::new(Durability::new(queues, inherited_dirt));
        let mut connection = Connection {
            properties: p,
            merge: MergeLimits {
                sectors: u64::from(max_sectors(&p)),
                segments: most_segments(&p) as u32,
            },
            hardware: Vec::with_capacity(queues),
            durability: Arc::clone(&durability),
            reserve: Arc::clone(reserve),
            runs: Mutex::default(),
            _gauges: Vec::new(),
        };
        for queue in parts.queues {
            let entries = queue.ring.entries();
            let (Some(indirect_frame), Some(bounce_at)) =
                (connection.take(entries), connection.take(bounce_pages))
            else {
                connection.release();
                return Err(too_few(&parts.name, reserve.memory(), queues));
            };
            let bounce = Frames::new(Arc::clone(reserve.memory()), u32::MAX);
            bounce.give(bounce_at, bounce_pages);
            let index = connection.hardware.len();
            let shadow_bytes = u64::from(entries) * 192;
            connection._gauges.push(Gauge::fixed(
                format!("{}: shadow of queue {index}", parts.name),
                MemoryKind::Heap,
                shadow_bytes,
            ));
            let setup = QueueSetup {
                index,
                properties: p,
                memory: Arc::clone(&memory),
                bounce,
                indirect_frame,
                durability: Arc::clone(&durability),
                trouble: Arc::clone(trouble),
                merge: connection.merge,
                clock: Arc::clone(clock),
            };
            connection.hardware.push(Arc::new(SharedQueue {
                state: Mutex::new(HardwareQueue::new(queue.ring, setup)),
                channel: queue.channel,
            }));
        }
        connection._gauges.push(Gauge::fixed(
            format!("{}: grant references", parts.name),
            MemoryKind::Heap,
            memory.table_bytes() as u64,
        ));
        Ok(connection)
    }

    fn take(&mut self, count: u32) -> Option<u32> {
        let at = self.reserve.take(count)?;
        self.runs.get_mut().push((at, count));
        Some(at)
    }

    /// Gives its frames back. Only once nobody can reach them any more; see docs/decisions/0006-reconnect.md.
    fn release(&self) {
        for (at, count) in self.runs.lock().drain(..) {
            self.reserve.give(at, count);
        }
    }
}

/// Frames that connections with such parts need, and later ones that ask for no more: theirs for good, so that
/// users of the memory can't take them in between.
fn reserve(parts: &FrontParts, frames: &Frames) -> Result<Arc<Frames>, Error> {
    let memory = frames.memory();
    let queues = parts.queues.len();
    let bounce = bounce_pages(memory, queues, &parts.properties);
    let count = parts.queues.iter().map(|q| q.ring.entries() + bounce).sum();
    let at = frames.take(count);
    let at = at.ok_or_else(|| too_few(&parts.name, memory, queues))?;
    let reserve = Frames::new(Arc::clone(memory), u32::MAX);
    reserve.give(at, count);
    Ok(Arc::new(reserve))
}

/// Pages for bounces of one queue: a quarter of the memory for all, and never less than one request for each. Requests
/// in memory of their own must not take the last pages from those that have none.
fn bounce_pages(memory: &Region, queues: usize, p: &DiskProperties) -> u32 {
    let all_frames = (memory.len() / PAGE_SIZE) as u32;
    (all_frames / 4 / (queues as u32).max(1)).max(most_segments(p) as u32)
}

fn too_few(name: &str, memory: &Region, queues: usize) -> Error {
    let all_frames = memory.len() / PAGE_SIZE;
    Error::config(format!(
        "{name}: {all_frames} frames are too few for {queues} queues; ask for fewer queues or ring pages, or more memory"
    ))
}

/// Most sectors (512 B) of one request that the device takes.
pub fn max_sectors(p: &DiskProperties) -> u32 {
    (most_segments(p) * PAGE_SIZE / 512) as u32
}

/// Tells the control thread that a ring broke.
pub struct Trouble {
    pub bell: EventFd,
    reason: Mutex<Option<String>>,
    /// Requests of a broken ring wait for the next connection, rather than end with errors.
    pub recovers: AtomicBool,
}

impl Trouble {
    fn new() -> std::io::Result<Trouble> {
        Ok(Trouble {
            bell: EventFd::new()?,
            reason: Mutex::default(),
            recovers: AtomicBool::new(false),
        })
    }

    pub fn report(&self, why: &str) {
        self.reason.lock().get_or_insert_with(|| why.to_owned());
        self.bell.notify();
    }

    pub fn take(&self) -> Option<String> {
        self.bell.drain();
        self.reason.lock().take()
    }
}

/// Where requests can go now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Up,
    Down,
    Gone,
}

/// The state of its ring, as a submitter finds it.
pub enum Found<M> {
    Up(Arc<Connection<M>>),
    /// Nothing yet: requests wait.
    Down,
    /// Nothing any more.
    Gone,
}

struct Current<M> {
    stage: Stage,
    /// The last one while there is none.
    connection: Arc<Connection<M>>,
}

/// The connection now, as all submitters see it.
pub struct Link<M> {
    current: Mutex<Current<M>>,
    /// Changes with every change of `current`.
    epoch: AtomicU64,
    /// Number of times that completed writes may have been lost before a flush covered them.
    losses: AtomicU64,
    pub trouble: Arc<Trouble>,
    submitters: Mutex<Vec<Weak<Completions>>>,
    clock: Arc<dyn Clock>,
}

impl<M: MergePolicy> Link<M> {
    pub fn new(
        parts: FrontParts,
        frames: &Arc<Frames>,
        clock: Arc<dyn Clock>,
    ) -> Result<Link<M>, Error> {
        let os = |e| Error::os(format!("{}: connecting", parts.name), e);
        let trouble = Arc::new(Trouble::new().map_err(os)?);
        // Whoever had the disk before may have left writes that are not flushed; our flushes have to cover them.
        let reserve = reserve(&parts, frames)?;
        let connection = Connection::new(parts, &reserve, &trouble, true, &clock)?;
        Ok(Link {
            current: Mutex::new(Current {
                stage: Stage::Up,
                connection: Arc::new(connection),
            }),
            epoch: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            trouble,
            submitters: Mutex::default(),
            clock,
        })
    }

    /// Changes with every change of the connection; to be read before [`Link::find`].
    #[inline]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Number of times that writes may have been lost before they were flushed.
    #[inline]
    pub fn losses(&self) -> u64 {
        self.losses.load(Ordering::Acquire)
    }

    pub fn find(&self) -> Found<M> {
        let current = self.current.lock();
        match current.stage {
            Stage::Up => Found::Up(Arc::clone(&current.connection)),
            Stage::Down => Found::Down,
            Stage::Gone => Found::Gone,
        }
    }

    /// The connection, or the last one.
    pub fn last(&self) -> Arc<Connection<M>> {
        Arc::clone(&self.current.lock().connection)
    }

    pub fn is_up(&self) -> bool {
        self.current.lock().stage == Stage::Up
    }

    /// Will be woken at each change.
    pub fn enter(&self, completions: &Arc<Completions>) {
        let mut all = self.submitters.lock();
        all.retain(|m| m.strong_count() > 0);
        all.push(Arc::downgrade(completions));
    }

    fn wake_all(&self) {
        for completions in self.submitters.lock().iter().filter_map(Weak::upgrade) {
            completions.wait().notify();
        }
    }

    /// Ends the connection, and parks what is in flight with its submitters. False if there was none.
    pub fn suspend(&self) -> bool {
        let connection = {
            let mut current = self.current.lock();
            if current.stage != Stage::Up {
                return false;
            }
            current.stage = Stage::Down;
            self.epoch.fetch_add(1, Ordering::Release);
            Arc::clone(&current.connection)
        };
        for queue in &connection.hardware {
            let mut bells = Vec::new();
            let mut state = queue.state.lock();
            state.park();
            state.owners.bells(&mut bells);
            drop(state);
            owners::ring(&mut bells);
        }
        // What it told belongs to the connection that is over.
        self.trouble.take();
        true
    }

    /// Gives up: everything ends with an error.
    pub fn give_up(&self) {
        self.suspend();
        let mut current = self.current.lock();
        current.stage = Stage::Gone;
        self.epoch.fetch_add(1, Ordering::Release);
        drop(current);
        self.wake_all();
    }

    /// Goes on with another connection.
    pub fn resume(&self, mut parts: FrontParts) -> Result<(), Error> {
        self.suspend();
        let mut current = self.current.lock();
        if current.stage == Stage::Gone {
            return Err(Error::new(
                ErrorKind::Disconnected,
                "the disk was given up before",
            ));
        }
        let old = &current.connection;
        let reserve = &old.reserve;
        if !Arc::ptr_eq(parts.granter.memory(), reserve.memory()) {
            return Err(Error::config("a connection on other memory"));
        }
        let (before, now) = (old.properties, parts.properties);
        if let Some(why) = unlike(&before, &now) {
            return Err(Error::config(format!(
                "{}: it isn't the disk that it was: {why}",
                parts.name
            )));
        }
        // More would want more memory, and bind the connection after it.
        let segments = &mut parts.properties.max_indirect_segments;
        *segments = before.max_indirect_segments.min(*segments);
        let dirt = old.durability.is_dirty();
        let cache_kept = before.cache_mark.is_some() && before.cache_mark == now.cache_mark;
        // What may be lost may be there too, and is covered by nothing yet.
        let lost = dirt && !cache_kept;
        let name = parts.name.clone();
        // Nobody uses the old frames any more, now that the new connection stands; the new one may need them.
        old.release();
        let connection = Connection::new(parts, reserve, &self.trouble, dirt, &self.clock)?;
        if lost {
            self.losses.fetch_add(1, Ordering::Release);
            tracing::error!(
                "{name}: the back end may have lost writes that were not flushed; the next flush will fail"
            );
        }
        current.connection = Arc::new(connection);
        current.stage = Stage::Up;
        self.epoch.fetch_add(1, Ordering::Release);
        drop(current);
        self.wake_all();
        Ok(())
    }
}

/// The promise of `before` that `next` can't keep; `None` if it can take its place.
fn unlike(before: &DiskProperties, next: &DiskProperties) -> Option<String> {
    let said = |what: &str, a: &dyn std::fmt::Display, b: &dyn std::fmt::Display| {
        Some(format!("{what} was {a} and is {b}"))
    };
    if before.contents_mark != next.contents_mark {
        return Some("what it held is lost (its server keeps it in memory only)".into());
    }
    if before.sector_size != next.sector_size {
        return said("sector-size", &before.sector_size, &next.sector_size);
    }
    if next.read_only && !before.read_only {
        return Some("it is read-only now".into());
    }
    if has_flush(before) && !has_flush(next) {
        return Some("it can't flush any more".into());
    }
    let (most, now) = (most_segments(before), most_segments(next));
    if now < most {
        return said("most segments of a request", &most, &now);
    }
    None
}
