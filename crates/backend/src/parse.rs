//! Parses a private copy of a ring entry. Every field is checked before it is used.

use crate::grants::{Access, GrantError, GrantMapper, PageUse};
use pvblk_block::{Op, Request, RequestFlags};
use pvblk_protocol::blkif::wire::{
    self, Entry, SECTORS_PER_PAGE, SEGMENTS_PER_INDIRECT_PAGE, Segment,
};
use zerocopy::IntoBytes;

/// The rule of blkif.h that a request broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Bad {
    /// The operation is unknown.
    #[error("operation {0} is unknown")]
    UnknownOperation(u8),
    /// More than 11 segments, none where data is needed, or more than was offered for indirect requests.
    #[error("{0} segments")]
    SegmentCount(u16),
    /// `indirect_op` is neither read nor write.
    #[error("indirect operation {0} is neither read nor write")]
    IndirectOperation(u8),
    /// `first_sect..=last_sect` is not within a page.
    #[error("segment covers sectors {first} to {last} of a page")]
    SegmentRange {
        /// `first_sect`.
        first: u8,
        /// `last_sect`.
        last: u8,
    },
    /// A grant reference can't be used.
    #[error(transparent)]
    Grant(#[from] GrantError),
}

/// A request whose form is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// The operation of the response: for an indirect request its inner operation.
    pub operation: u8,
    /// True if the request has `PREFLUSH` or `BARRIER`.
    pub ordered: bool,
}

/// Parses entries of one queue, and has the memory for it.
pub struct Parser {
    max_indirect: u16,
    /// Private copy of indirect segments.
    segments: Vec<Segment>,
    /// Pages of the request at hand that have to be released.
    pub uses: Vec<PageUse>,
}

impl Parser {
    /// A parser that takes indirect requests of up to `max_indirect` segments (0: none).
    pub fn new(max_indirect: u16) -> Parser {
        Parser {
            max_indirect,
            segments: Vec::new(),
            uses: Vec::new(),
        }
    }

    /// Fills in `request` from `entry`. After an error its buffers are incomplete: clear them. The caller
    /// empties `uses` before, and releases its pages afterwards.
    #[inline]
    pub fn parse(
        &mut self,
        entry: &Entry,
        mapper: &mut dyn GrantMapper,
        request: &mut Request,
    ) -> Result<Parsed, Bad> {
        request.buffers.clear();
        debug_assert!(self.uses.is_empty());
        let operation = entry.operation();
        match operation {
            wire::OP_READ | wire::OP_WRITE | wire::OP_FLUSH | wire::OP_WRITE_BARRIER => {
                self.parse_rw(entry, mapper, request)
            }
            wire::OP_INDIRECT if self.max_indirect > 0 => {
                self.parse_indirect(entry, mapper, request)
            }
            wire::OP_DISCARD => {
                let d = entry.discard();
                let mut flags = RequestFlags::empty();
                if d.flag & wire::DISCARD_SECURE != 0 {
                    flags |= RequestFlags::SECURE;
                }
                request.reset(Op::Discard, flags, d.sector_number, d.nr_sectors, 0);
                Ok(Parsed {
                    operation,
                    ordered: false,
                })
            }
            other => Err(Bad::UnknownOperation(other)),
        }
    }

    #[inline]
    fn parse_rw(
        &mut self,
        entry: &Entry,
        mapper: &mut dyn GrantMapper,
        request: &mut Request,
    ) -> Result<Parsed, Bad> {
        let rw = entry.rw();
        let operation = rw.header.operation;
        let count = usize::from(rw.header.nr_segments);
        if count > wire::MAX_SEGMENTS {
            return Err(Bad::SegmentCount(count as u16));
        }
        let (op, flags) = match operation {
            wire::OP_READ => (Op::Read, RequestFlags::empty()),
            wire::OP_WRITE => (Op::Write, RequestFlags::empty()),
            wire::OP_FLUSH if count == 0 => (Op::Flush, RequestFlags::empty()),
            wire::OP_FLUSH => (Op::Write, RequestFlags::PREFLUSH),
            _ if count == 0 => (Op::Flush, RequestFlags::BARRIER),
            _ => (Op::Write, RequestFlags::BARRIER),
        };
        if count == 0 && op != Op::Flush {
            return Err(Bad::SegmentCount(0));
        }
        let mut sectors = 0;
        for segment in &rw.segments[..count] {
            sectors += self.add(segment, mapper, op == Op::Read, request)?;
        }
        let sector = if op == Op::Flush {
            0
        } else {
            rw.header.sector_number
        };
        request.reset(op, flags, sector, sectors, 0);
        Ok(Parsed {
            operation,
            ordered: !flags.is_empty(),
        })
    }

    fn parse_indirect(
        &mut self,
        entry: &Entry,
        mapper: &mut dyn GrantMapper,
        request: &mut Request,
    ) -> Result<Parsed, Bad> {
        let indirect = entry.indirect();
        let op = match indirect.indirect_op {
            wire::OP_READ => Op::Read,
            wire::OP_WRITE => Op::Write,
            other => return Err(Bad::IndirectOperation(other)),
        };
        let count = indirect.nr_segments;
        if count == 0 || count > self.max_indirect {
            return Err(Bad::SegmentCount(count));
        }
        let mut left = usize::from(count);
        let mut segments = std::mem::take(&mut self.segments);
        segments.clear();
        segments.resize(left, Segment::default());
        let result = (|| -> Result<u64, Bad> {
            for (page, chunk) in segments.chunks_mut(SEGMENTS_PER_INDIRECT_PAGE).enumerate() {
                let gref = *indirect
                    .indirect_grefs
                    .get(page)
                    .ok_or(Bad::SegmentCount(count))?;
                // Copied once: from here on only the private copy counts (XSA-155).
                mapper.read(gref, chunk.as_mut_bytes())?;
                left -= chunk.len();
            }
            let mut sectors = 0;
            for segment in &segments {
                sectors += self.add(segment, mapper, op == Op::Read, request)?;
            }
            Ok(sectors)
        })();
        self.segments = segments;
        let flags = RequestFlags::empty();
        request.reset(op, flags, indirect.sector_number, result?, 0);
        Ok(Parsed {
            operation: indirect.indirect_op,
            ordered: false,
        })
    }

    /// Adds one segment's buffer; returns its length in sectors. Neighbouring pages become one buffer.
    #[inline]
    fn add(
        &mut self,
        segment: &Segment,
        mapper: &mut dyn GrantMapper,
        writable: bool,
        request: &mut Request,
    ) -> Result<u64, Bad> {
        let Segment {
            gref,
            first_sect: first,
            last_sect: last,
            ..
        } = *segment;
        if first > last || last >= SECTORS_PER_PAGE {
            return Err(Bad::SegmentRange { first, last });
        }
        let sectors = usize::from(last - first) + 1;
        let offset = usize::from(first) * 512;
        let (buffer, access) = mapper.map(gref, offset, sectors * 512, writable)?;
        if access != Access::Direct {
            self.uses.push(PageUse {
                gref,
                // Below 4096.
                offset: offset as u16,
                access,
                buffer: buffer.clone(),
            });
        }
        let joined = match request.buffers.last_mut() {
            Some(previous) => previous.try_extend(&buffer),
            None => false,
        };
        if !joined {
            request.buffers.push(buffer);
        }
        Ok(sectors as u64)
    }
}
