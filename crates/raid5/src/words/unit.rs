//! A unit of a log as bytes: md's header with an entry for each stripe, and partial parity from wherever it is.

use super::token::{Token, Waiting};
use crate::head_pages::{HeadPages, memory};
use crate::{Batch, Geometry, PPL_HEADER_BYTES, PPL_MAX_ENTRIES, STRIPE_BYTES};
use pvblk_block::memory::Gauge;
use pvblk_block::{Buffer, Error, Region};
use std::sync::Arc;

/// Blocks that are mapped together.
const MAPPED: usize = 16;

/// Bounds of a unit.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Partial parity: the least [`crate::log_space_bytes`] of the devices that have the log.
    pub bytes: u64,
    /// Segments of one write at these devices. The header is one.
    pub segments: usize,
}

impl Room {
    /// The bounds of both.
    pub fn least(self, other: Room) -> Room {
        Room {
            bytes: self.bytes.min(other.bytes),
            segments: self.segments.min(other.segments),
        }
    }
}

/// A block of the memory of logs.
#[derive(Debug)]
pub struct LogBlock(Arc<Region>);

/// Memory for the partial parity of one queue's batches. A block comes back with the answer of its log.
pub struct LogBlocks {
    free: Vec<LogBlock>,
    bill: Gauge,
}

impl Default for LogBlocks {
    fn default() -> LogBlocks {
        LogBlocks {
            free: Vec::new(),
            bill: memory("logs of a queue", 0),
        }
    }
}

impl LogBlocks {
    /// A block that isn't in use.
    pub fn take(&mut self) -> Result<LogBlock, Error> {
        if let Some(block) = self.free.pop() {
            return Ok(block);
        }
        let bytes = MAPPED * STRIPE_BYTES;
        let region = Region::anonymous(bytes).map_err(|e| Error::os("memory for logs", e))?;
        self.bill.set_cap(self.bill.cap_bytes() + bytes as u64);
        self.bill.add(bytes as u64);
        let pieces = region.cut(STRIPE_BYTES).into_iter();
        self.free
            .extend(pieces.map(|piece| LogBlock(Arc::new(piece))));
        Ok(self.free.pop().expect("there are some now"))
    }

    /// The batch's log has answered, and its parity is calculated.
    pub fn put(&mut self, block: LogBlock) {
        self.free.push(block);
    }
}

/// Partial parity of a stripe, until its log is stable.
#[derive(Debug)]
pub enum Partial {
    /// The sum of several blocks, in the memory of logs.
    Sum(LogBlock),
    /// The only block that doesn't change is partial parity by itself, so this is its page.
    Page(Buffer),
}

impl Partial {
    /// The sum of the pages of these members, as a mask. A page that is alone isn't copied: it stays as it is until the log has answered.
    pub fn of(pages: &HeadPages, rest: u64, blocks: &mut LogBlocks) -> Result<Partial, Error> {
        if rest.is_power_of_two()
            && let Some(page) = pages.buffer(rest.trailing_zeros() as usize)
        {
            return Ok(Partial::Page(page));
        }
        let block = blocks.take()?;
        pages.sum_to(&block.0, 0, rest);
        Ok(Partial::Sum(block))
    }

    /// The parity's page becomes right: partial parity and the pages of the members that change, as a mask.
    pub fn make_parity(&self, pages: &HeadPages, parity: usize, touched: u64) {
        match self {
            Partial::Sum(block) => pages.sum_with(parity, touched, (&block.0, 0)),
            Partial::Page(page) => pages.sum_with(parity, touched, (page.region(), page.offset())),
        }
    }

    /// For the log's write.
    pub fn buffer(&self) -> Buffer {
        match self {
            Partial::Sum(LogBlock(region)) => {
                Buffer::new(region, 0, STRIPE_BYTES).expect("a block's length")
            }
            Partial::Page(page) => page.clone(),
        }
    }
}

/// Blocks of a stripe that change, or of neighbouring stripes of a row that change whole, for an entry of a log.
#[derive(Debug)]
pub struct LogEntry {
    /// The first stripe, and how many there are.
    pub stripe: u64,
    pub stripes: usize,
    /// First data block that changes, and how many do.
    pub first: usize,
    pub blocks: usize,
    /// None if all change.
    pub partial: Option<Partial>,
}

/// A closed batch that waits for its log; of a run, that of the first stripe.
#[derive(Debug)]
pub struct LogBatch<R> {
    pub token: Token<Waiting, R>,
    pub entry: LogEntry,
}

/// The array of which the logs are.
#[derive(Clone, Copy, Debug)]
pub struct LogFormat {
    pub geometry: Geometry,
    /// [`crate::ppl_signature`] of the array.
    pub signature: u32,
}

impl Room {
    /// Number of these that fit into one unit, in their order; one at least, since every log has room for one.
    pub(super) fn holds<'a>(&self, entries: impl Iterator<Item = &'a LogEntry>) -> usize {
        let blocks = (self.bytes / STRIPE_BYTES as u64) as usize;
        let mut left = blocks.min(self.segments.saturating_sub(1)).max(1);
        // Each as if it had an entry of its own: stripes that follow each other share one only when they are sorted.
        let fits = |entry: &&LogEntry| {
            let needs = usize::from(entry.partial.is_some());
            let fits = needs <= left;
            left -= needs.min(left);
            fits
        };
        entries.take(PPL_MAX_ENTRIES).take_while(fits).count()
    }
}

impl LogFormat {
    /// Writes a unit's header, and gives all of its bytes. `at`: the member that has the log.
    pub(super) fn encode<'a>(
        &self,
        (at, generation): (usize, u64),
        room: Room,
        header: &Buffer,
        entries: impl Iterator<Item = &'a LogEntry>,
    ) -> Vec<Buffer> {
        let mut entries: Vec<_> = entries.collect();
        entries.sort_unstable_by_key(|entry| entry.stripe);
        let space = room.bytes.max(STRIPE_BYTES as u64);
        let (geometry, signature) = (self.geometry, self.signature);
        let mut batch = Batch::new(geometry, signature, generation, at, space);
        let mut bytes = vec![header.clone()];
        for entry in entries {
            let mut parity = [0; STRIPE_BYTES];
            let partial = entry.partial.as_ref().map(|partial| {
                let buffer = partial.buffer();
                buffer.read(0, &mut parity);
                bytes.push(buffer);
                &parity
            });
            for stripe in (entry.stripe..).take(entry.stripes) {
                let added = batch.add(stripe, entry.first, entry.blocks, partial);
                added.expect("it was counted before");
            }
        }
        debug_assert_eq!(header.len(), PPL_HEADER_BYTES);
        header.write(0, &batch.header().encode());
        bytes
    }
}
