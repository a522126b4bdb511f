//! Optional capabilities of devices.

use crate::{BlockDevice, Error, Incarnation};
use pvblk_sys::Buffer;
use std::sync::Arc;

/// The optional capabilities of a device; `None`: the device doesn't have this one.
///
/// A device over other devices can't write this with `..`: it names every field of [`Forwards`].
#[derive(Clone, Copy)]
pub struct Capabilities<'a> {
    /// Looks at its backing again.
    pub refresh: Option<&'a dyn Refresh>,
    /// Tells data from holes.
    pub extents: Option<&'a dyn Extents>,
    /// Knows when data may have been lost.
    pub incarnation: Option<&'a dyn LossMarks>,
    /// Has something to do at its end.
    pub close: Option<&'a dyn Close>,
    /// Answers questions in JSON.
    pub questions: Option<&'a dyn Questions>,
    /// Holds memory that it can give back.
    pub memory: Option<&'a dyn Reclaim>,
    /// Has memory of its own for the buffers of requests.
    pub buffers: Option<&'a dyn Buffers>,
}

impl Capabilities<'_> {
    /// For a device that stands on no other device. One that has some writes `Capabilities { extents: Some(self), ..Capabilities::none() }`.
    pub const fn none() -> Self {
        Capabilities {
            refresh: None,
            extents: None,
            incarnation: None,
            close: None,
            questions: None,
            memory: None,
            buffers: None,
        }
    }
}

/// The capabilities of a device over other devices: passed on from below, its own, or none. The fields are those of [`Capabilities`].
///
/// There is no value of it to write after `..`, so a literal names every capability, and a new capability doesn't compile until each such device has decided.
pub struct Forwards<'a> {
    /// See [`Capabilities::refresh`].
    pub refresh: Option<&'a dyn Refresh>,
    /// See [`Capabilities::extents`].
    pub extents: Option<&'a dyn Extents>,
    /// See [`Capabilities::incarnation`].
    pub incarnation: Option<&'a dyn LossMarks>,
    /// See [`Capabilities::close`].
    pub close: Option<&'a dyn Close>,
    /// See [`Capabilities::questions`].
    pub questions: Option<&'a dyn Questions>,
    /// See [`Capabilities::memory`].
    pub memory: Option<&'a dyn Reclaim>,
    /// See [`Capabilities::buffers`].
    pub buffers: Option<&'a dyn Buffers>,
}

impl<'a> From<Forwards<'a>> for Capabilities<'a> {
    fn from(all: Forwards<'a>) -> Self {
        let Forwards {
            refresh,
            extents,
            incarnation,
            close,
            questions,
            memory,
            buffers,
        } = all;
        Capabilities {
            refresh,
            extents,
            incarnation,
            close,
            questions,
            memory,
            buffers,
        }
    }
}

/// See [`Capabilities::refresh`].
pub trait Refresh {
    /// Looks at the backing again: it may have been resized. Slow.
    fn refresh(&self) -> Result<(), Error>;
}

/// See [`Capabilities::extents`].
pub trait Extents {
    /// Adds extents in order that cover all of `sector..sector + sectors`. Slow.
    fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error>;
}

/// See [`Capabilities::incarnation`].
pub trait LossMarks {
    /// The marks as they are now.
    fn incarnation(&self) -> Incarnation;
}

/// See [`Capabilities::close`].
pub trait Close {
    /// Ends its use in order, when all queues are closed: it may have to tell its backing that all is well. Slow; errors
    /// lose nothing, but the next start may take longer.
    fn close(&self) -> Result<(), Error>;
}

/// See [`Capabilities::questions`].
pub trait Questions {
    /// Answers a question about itself, or hands it on to the device below. Both texts are JSON, and each device says which questions it knows;
    /// `None`: it doesn't know this one. May be slow, and may change what the device is made of. Errors say in one line what to do.
    fn ask(&self, question: &str) -> Option<Result<String, Error>>;
}

/// See [`Capabilities::memory`].
pub trait Reclaim {
    /// Gives memory back to the system that holds nothing anybody needs: clean pages of caches, buffers for reuse. Called on any thread
    /// when memory is short; doesn't wait for I/O. Returns bytes, with those of the devices below.
    fn give_way(&self) -> u64;

    /// Bytes that [`Reclaim::give_way`] might give back, at most; cheap.
    fn spare_bytes(&self) -> u64;
}

/// See [`Capabilities::buffers`].
pub trait Buffers {
    /// Memory that requests should use for their buffers, to save a copy.
    fn buffer_source(&self) -> Arc<dyn BufferSource>;
}

/// Uses of the capabilities. Each method says what holds for a device that doesn't have its capability.
impl dyn BlockDevice + '_ {
    /// Looks at the backing again, which may have been resized; nothing to do for a device without [`Capabilities::refresh`]. Slow.
    pub fn refresh(&self) -> Result<(), Error> {
        match self.capabilities().refresh {
            Some(able) => able.refresh(),
            None => Ok(()),
        }
    }

    /// The parts of `sector..sector + sectors` that hold data: adds extents in order that cover the whole range; one extent of data for a device
    /// without [`Capabilities::extents`]. Slow.
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

    /// Not known for a device without [`Capabilities::incarnation`].
    pub fn incarnation(&self) -> Incarnation {
        let able = self.capabilities().incarnation;
        able.map_or_else(Incarnation::default, LossMarks::incarnation)
    }

    /// Ends its use in order, when all queues are closed; nothing to do for a device without [`Capabilities::close`]. Slow.
    pub fn close(&self) -> Result<(), Error> {
        match self.capabilities().close {
            Some(able) => able.close(),
            None => Ok(()),
        }
    }

    /// The answer in JSON to a question in JSON; `None` if the device, or any below it, doesn't know the question.
    pub fn ask(&self, question: &str) -> Option<Result<String, Error>> {
        self.capabilities().questions?.ask(question)
    }

    /// Gives back memory that nobody needs, and returns how many bytes; 0 for a device without [`Capabilities::memory`].
    pub fn give_way(&self) -> u64 {
        self.capabilities().memory.map_or(0, Reclaim::give_way)
    }

    /// Bytes that [`Reclaim::give_way`] might give back, at most; cheap.
    pub fn spare_bytes(&self) -> u64 {
        self.capabilities().memory.map_or(0, Reclaim::spare_bytes)
    }

    /// Memory that requests to this device should use for their buffers, to save a copy; `None` if any will do.
    pub fn buffer_source(&self) -> Option<Arc<dyn BufferSource>> {
        self.capabilities().buffers.map(Buffers::buffer_source)
    }
}

/// Memory that a device reaches without copying.
pub trait BufferSource: Send + Sync {
    /// `len` bytes in one piece, or `None` if there are none left now. `len` is a multiple of 4096.
    fn allocate(&self, len: usize) -> Option<Buffer>;
    /// Gives back a buffer from [`BufferSource::allocate`], unchanged.
    fn free(&self, buffer: Buffer);
}

/// A part of a device and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First sector (512 B).
    pub sector: u64,
    /// Length in sectors (512 B).
    pub sectors: u64,
    /// What it holds.
    pub kind: ExtentKind,
}

impl Extent {
    /// Appends `from..to`, joined with the last extent from index `first` on if that is of the same kind.
    pub fn push(out: &mut Vec<Extent>, first: usize, from: u64, to: u64, kind: ExtentKind) {
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

/// What an extent holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Allocated data.
    Data,
    /// Not allocated; reads as zeros.
    Hole,
    /// Allocated; reads as zeros.
    Zero,
}
