//! Optional capabilities of devices.

use crate::{BlockDevice, Error, Incarnation};
use pvblk_sys::Buffer;
use std::sync::Arc;

/// The optional capabilities of a device; `None`: the device doesn't have the capability.
///
/// A device over other devices can't write this with `..`: it names every field of [`Forwards`].
#[derive(Clone, Copy)]
pub struct Capabilities<'a> {
    /// The device can look at its backing again, which may have been resized.
    pub refresh: Option<&'a dyn Refresh>,
    /// The device tells data from holes.
    pub extents: Option<&'a dyn Extents>,
    /// The device has a page cache, and tells the parts that are in it.
    pub cached: Option<&'a dyn Cached>,
    /// The device knows when data may have been lost.
    pub incarnation: Option<&'a dyn LossMarks>,
    /// The device has something to do at its end.
    pub close: Option<&'a dyn Close>,
    /// The device answers questions in JSON.
    pub questions: Option<&'a dyn Questions>,
    /// The device holds memory that it can give back.
    pub memory: Option<&'a dyn Reclaim>,
    /// The device has memory of its own for the buffers of requests.
    pub buffers: Option<&'a dyn Buffers>,
}

impl Capabilities<'_> {
    /// The capabilities of a device that is over no other device. A device that has some writes `Capabilities
    /// { extents: Some(self), ..Capabilities::none() }`.
    pub const fn none() -> Self {
        Capabilities {
            refresh: None,
            extents: None,
            cached: None,
            incarnation: None,
            close: None,
            questions: None,
            memory: None,
            buffers: None,
        }
    }
}

/// The capabilities of a device over other devices: passed on from below, its own, or none. The fields are
/// those of [`Capabilities`].
///
/// A literal names every capability, never `..Forwards::none()` (a rule of `tests/house`): a new capability
/// doesn't compile until each such device has decided about it.
pub struct Forwards<'a> {
    pub refresh: Option<&'a dyn Refresh>,
    pub extents: Option<&'a dyn Extents>,
    pub cached: Option<&'a dyn Cached>,
    pub incarnation: Option<&'a dyn LossMarks>,
    pub close: Option<&'a dyn Close>,
    pub questions: Option<&'a dyn Questions>,
    pub memory: Option<&'a dyn Reclaim>,
    pub buffers: Option<&'a dyn Buffers>,
}

impl Forwards<'_> {
    /// All capabilities hidden: for devices of tests, examples and experiments. A device that is served
    /// names each capability instead.
    pub const fn none() -> Self {
        Forwards {
            refresh: None,
            extents: None,
            cached: None,
            incarnation: None,
            close: None,
            questions: None,
            memory: None,
            buffers: None,
        }
    }
}

impl<'a> From<Forwards<'a>> for Capabilities<'a> {
    fn from(all: Forwards<'a>) -> Self {
        let Forwards {
            refresh,
            extents,
            cached,
            incarnation,
            close,
            questions,
            memory,
            buffers,
        } = all;
        Capabilities {
            refresh,
            extents,
            cached,
            incarnation,
            close,
            questions,
            memory,
            buffers,
        }
    }
}

/// A device that can look at its backing again.
pub trait Refresh {
    /// Looks at the backing again: it may have been resized. Slow.
    fn refresh(&self) -> Result<(), Error>;
}

/// A device that tells data from holes.
pub trait Extents {
    /// Adds extents in order that cover all of `sector..sector + sectors`. Slow.
    fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error>;
}

/// A device that has a page cache.
pub trait Cached {
    /// Adds extents in order that cover all of `sector..sector + sectors`, as they are at some moment of the call. Takes time with the number
    /// of pages, and keeps requests of the device waiting only for a bounded part of it.
    fn cached(&self, sector: u64, sectors: u64, out: &mut Vec<Extent<CacheState>>);
}

/// A device that knows when data may have been lost.
pub trait LossMarks {
    /// The current marks.
    fn incarnation(&self) -> Incarnation;
}

/// A device that has something to do at its end.
pub trait Close {
    /// Ends the use of the device in order, when all queues are closed: an array writes that it is clean, for
    /// example. Slow. An error loses no data, but the next start may take longer.
    fn close(&self) -> Result<(), Error>;
}

/// A device that answers questions.
pub trait Questions {
    /// Answers a question, or hands it on to the device below. Both texts are JSON, and each device documents
    /// the questions that it knows; `None`: the device doesn't know this one. The call may be slow, and may
    /// change the device's members. Errors say in one line what to do.
    fn ask(&self, question: &str) -> Option<Result<String, Error>>;
}

/// A device that holds memory that it can give back.
pub trait Reclaim {
    /// Gives memory back to the system that isn't needed: clean pages of caches, buffers for reuse. Called on
    /// any thread when memory is short; doesn't wait for I/O. Returns the number of bytes, with those of the
    /// devices below.
    fn give_way(&self) -> u64;

    /// Most bytes that [`Reclaim::give_way`] can give back; cheap.
    fn spare_bytes(&self) -> u64;
}

/// A device with memory of its own.
pub trait Buffers {
    /// The memory that requests should use for their buffers, to save a copy.
    fn buffer_source(&self) -> Arc<dyn BufferSource>;
}

/// Uses of the capabilities. Each method has a result for a device without its capability.
impl dyn BlockDevice + '_ {
    /// Looks at the backing again, which may have been resized; does nothing for a device without
    /// [`Capabilities::refresh`]. Slow.
    pub fn refresh(&self) -> Result<(), Error> {
        match self.capabilities().refresh {
            Some(able) => able.refresh(),
            None => Ok(()),
        }
    }

    /// The parts of `sector..sector + sectors` that hold data: adds extents in order that cover the whole
    /// range. A device without [`Capabilities::extents`] has one extent of data. Slow.
    pub fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error> {
        if let Some(able) = self.capabilities().extents {
            return able.extents(sector, sectors, out);
        }
        let kind = ExtentKind::Data;
        out.push(Extent {
            sector,
            sectors,
            kind,
        });
        Ok(())
    }

    /// The marks of the device; unknown for a device without [`Capabilities::incarnation`].
    pub fn incarnation(&self) -> Incarnation {
        let able = self.capabilities().incarnation;
        able.map_or_else(Incarnation::default, LossMarks::incarnation)
    }

    /// Ends the use of the device in order, when all queues are closed; does nothing for a device without
    /// [`Capabilities::close`]. Slow.
    pub fn close(&self) -> Result<(), Error> {
        match self.capabilities().close {
            Some(able) => able.close(),
            None => Ok(()),
        }
    }

    /// The answer in JSON to a question in JSON; `None` if neither the device nor any below it knows the
    /// question.
    pub fn ask(&self, question: &str) -> Option<Result<String, Error>> {
        self.capabilities().questions?.ask(question)
    }

    /// Gives back memory that isn't needed, and returns the number of bytes; 0 for a device without
    /// [`Capabilities::memory`].
    pub fn give_way(&self) -> u64 {
        self.capabilities().memory.map_or(0, Reclaim::give_way)
    }

    /// Most bytes that [`Reclaim::give_way`] can give back; cheap.
    pub fn spare_bytes(&self) -> u64 {
        self.capabilities().memory.map_or(0, Reclaim::spare_bytes)
    }

    /// The memory that requests to this device should use for their buffers, to save a copy; `None` if any
    /// memory will do.
    pub fn buffer_source(&self) -> Option<Arc<dyn BufferSource>> {
        self.capabilities().buffers.map(Buffers::buffer_source)
    }
}

/// Memory that a device reaches without copying.
pub trait BufferSource: Send + Sync {
    /// Allocates `len` contiguous bytes, a multiple of 4096; `None` if there are none left now.
    fn allocate(&self, len: usize) -> Option<Buffer>;
    /// Gives back a buffer from [`BufferSource::allocate`], unchanged.
    fn free(&self, buffer: Buffer);
}

/// A part of a device, and the kind of its contents, or another property that all of it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent<K = ExtentKind> {
    /// First sector (512 B).
    pub sector: u64,
    /// Length in sectors (512 B).
    pub sectors: u64,
    pub kind: K,
}

impl<K: PartialEq> Extent<K> {
    /// Appends `from..to`, joined with the last extent from index `first` on if that is of the same kind.
    pub fn push(out: &mut Vec<Extent<K>>, first: usize, from: u64, to: u64, kind: K) {
        if from >= to {
            return;
        }
        match out[first..].last_mut() {
            Some(last) if last.kind == kind && last.sector + last.sectors == from => {
                last.sectors += to - from;
            }
            _ => out.push(Extent {
                sector: from,
                sectors: to - from,
                kind,
            }),
        }
    }
}

/// The kind of an extent's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Data that is allocated.
    Data,
    /// Not allocated; reads as zeros.
    Hole,
    /// Allocated; reads as zeros.
    Zero,
}

/// The state of an extent in a page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheState {
    /// Not in the cache: reads go to the device below.
    Absent,
    /// In the cache, as the device below has it.
    Clean,
    /// In the cache, and the device below hasn't acknowledged the newest data.
    Dirty,
}
