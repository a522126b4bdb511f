//! From a chain of descriptors to a request (VIRTIO 1.2, section 5.2.6). Every field is checked before it is used.

use super::memory::GuestMemory;
use super::virtqueue::{Broken, Descriptor};
use pvblk_block::{Buffer, Op, Request, RequestFlags, SECTOR};
use pvblk_protocol::virtio::{ID, Offered};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

/// Bytes of a request's head: type, priority, sector.
pub const HEAD: usize = 16;
/// Bytes of a discard's or write-zeroes' range: sector, sectors, flags.
pub const RANGE: usize = 16;

/// The rule of virtio-blk that a request broke. It has a status byte, so it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Bad {
    /// Not one of the types that we know or offered.
    #[error("type {0} is unknown or was not offered")]
    UnknownType(u32),
    /// Fewer readable bytes than a head has.
    #[error("the head has {0} bytes of 16")]
    ShortHead(u64),
    /// Data that isn't whole sectors, none, or on the wrong side.
    #[error(
        "{0} bytes of data to read and {1} to write, where whole sectors of one kind are needed"
    )]
    Data(u64, u64),
    /// A piece of the data that isn't whole sectors.
    #[error("a piece of the data has {0} bytes, which are not whole sectors")]
    Piece(usize),
    /// Not exactly one range.
    #[error("the ranges have {0} bytes where one of 16 was offered")]
    Ranges(u64),
    /// A range with bits that its type doesn't have.
    #[error("the range has flags {0:#x}")]
    RangeFlags(u32),
    /// Room for the name that is too small.
    #[error("there are {0} bytes for the name of 20")]
    ShortId(u64),
}

impl Bad {
    /// True if the answer is "unsupported" and not "error".
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Bad::UnknownType(_) | Bad::RangeFlags(_))
    }
}

/// The request that a chain holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// The request was filled in and goes to the disk.
    Submit,
    /// The disk's name is to be written to the request's buffers.
    Id,
}

/// The rest of a good chain.
#[derive(Debug)]
pub struct Chain {
    /// The byte for the status.
    pub status: Buffer,
    /// Writable bytes, the status included.
    pub writable: u32,
    /// The request, or the reason why it can't be done.
    pub asked: Result<Parsed, Bad>,
}

/// Fills in `request` from a chain. Whatever is wrong in form comes back in [`Chain::asked`] and is answered; only what can't be
/// answered breaks the queue. After anything but [`Parsed::Submit`] the request's buffers mean nothing to the disk.
#[inline]
pub fn parse(
    chain: &[Descriptor],
    memory: &GuestMemory,
    offered: Offered,
    request: &mut Request,
) -> Result<Chain, Broken> {
    request.buffers.clear();
    let split = chain.partition_point(|d| !d.writable);
    let (readable, writable) = chain.split_at(split);
    let Some((last, before)) = writable.split_last() else {
        return Err(Broken::NoStatus);
    };
    // The status is the last writable byte.
    let at = last.address.wrapping_add(u64::from(last.len) - 1);
    let status = memory
        .byte(at)
        .ok_or(Broken::Address(last.address, last.len))?;
    let sum = |list: &[Descriptor]| list.iter().map(|d| u64::from(d.len)).sum::<u64>();
    let (to_read, to_write) = (sum(readable), sum(writable) - 1);
    let mut chain = Chain {
        status,
        writable: (to_write + 1) as u32,
        asked: Err(Bad::ShortHead(to_read)),
    };
    if to_read < HEAD as u64 {
        return Ok(chain);
    }
    let mut head = [0; HEAD];
    let data = Data {
        memory,
        readable,
        before,
        last: (last.address, last.len - 1),
    };
    data.copy(0, &mut head)?;
    let kind = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
    let mut sector = [0; 8];
    sector.copy_from_slice(&head[8..]);
    let sector = u64::from_le_bytes(sector);
    let to_read = to_read - HEAD as u64;
    chain.asked = match kind {
        VIRTIO_BLK_T_IN | VIRTIO_BLK_T_OUT => {
            let (op, len, other) = match kind {
                VIRTIO_BLK_T_IN => (Op::Read, to_write, to_read),
                _ => (Op::Write, to_read, to_write),
            };
            if len == 0 || !len.is_multiple_of(SECTOR) || other != 0 {
                Err(Bad::Data(to_write, to_read))
            } else {
                data.buffers(op == Op::Read, &mut request.buffers)?;
                let odd = request
                    .buffers
                    .iter()
                    .find(|b| !b.len().is_multiple_of(512));
                match odd {
                    Some(piece) => Err(Bad::Piece(piece.len())),
                    None => {
                        request.reset(op, RequestFlags::empty(), sector, len / SECTOR, 0);
                        Ok(Parsed::Submit)
                    }
                }
            }
        }
        VIRTIO_BLK_T_FLUSH => {
            // Drivers leave anything in the sector of a flush, and some add data that has no meaning.
            request.reset(Op::Flush, RequestFlags::empty(), 0, 0, 0);
            Ok(Parsed::Submit)
        }
        VIRTIO_BLK_T_GET_ID if to_write < ID as u64 => Err(Bad::ShortId(to_write)),
        VIRTIO_BLK_T_GET_ID => {
            data.buffers(true, &mut request.buffers)?;
            Ok(Parsed::Id)
        }
        VIRTIO_BLK_T_DISCARD if offered.discard => {
            data.range(to_read, 0)?.map(|(sector, sectors, _)| {
                request.reset(Op::Discard, RequestFlags::empty(), sector, sectors, 0);
                Parsed::Submit
            })
        }
        VIRTIO_BLK_T_WRITE_ZEROES if offered.write_zeroes => {
            let known = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
            data.range(to_read, known)?.map(|(sector, sectors, flags)| {
                let flags = match flags & known {
                    0 => RequestFlags::NO_UNMAP,
                    _ => RequestFlags::empty(),
                };
                request.reset(Op::WriteZeroes, flags, sector, sectors, 0);
                Parsed::Submit
            })
        }
        other => Err(Bad::UnknownType(other)),
    };
    Ok(chain)
}

/// The bytes of a chain without its status.
struct Data<'a> {
    memory: &'a GuestMemory,
    readable: &'a [Descriptor],
    before: &'a [Descriptor],
    last: (u64, u32),
}

impl Data<'_> {
    /// Copies readable bytes from byte `skip` of them on; the caller knows that there are enough.
    fn copy(&self, mut skip: u64, mut dst: &mut [u8]) -> Result<(), Broken> {
        for d in self.readable {
            let len = u64::from(d.len);
            if skip >= len {
                skip -= len;
                continue;
            }
            let part = (len - skip).min(dst.len() as u64) as usize;
            let (now, rest) = std::mem::take(&mut dst).split_at_mut(part);
            let at = d.address.wrapping_add(skip);
            if !self.memory.read(at, now) {
                return Err(Broken::Address(d.address, d.len));
            }
            (dst, skip) = (rest, 0);
            if dst.is_empty() {
                break;
            }
        }
        Ok(())
    }

    /// Adds the buffers of what follows the head, or of what is written before the status.
    fn buffers(&self, write: bool, out: &mut Vec<Buffer>) -> Result<(), Broken> {
        let mut skip = if write { 0 } else { HEAD as u64 };
        let (list, last) = match write {
            true => (self.before, self.last),
            false => (self.readable, (0, 0)),
        };
        let pieces = list.iter().map(|d| (d.address, d.len)).chain([last]);
        for (address, len) in pieces {
            let skipped = skip.min(u64::from(len));
            skip -= skipped;
            let (at, left) = (address.wrapping_add(skipped), len - skipped as u32);
            if !self.memory.buffers(at, left, out) {
                return Err(Broken::Address(address, len));
            }
        }
        Ok(())
    }

    /// The one range of a discard or write-zeroes: sector, sectors, flags.
    fn range(&self, len: u64, known: u32) -> Result<Result<(u64, u64, u32), Bad>, Broken> {
        if len != RANGE as u64 {
            return Ok(Err(Bad::Ranges(len)));
        }
        let mut raw = [0; RANGE];
        self.copy(HEAD as u64, &mut raw)?;
        let (mut sector, mut sectors, mut flags) = ([0; 8], [0; 4], [0; 4]);
        sector.copy_from_slice(&raw[..8]);
        sectors.copy_from_slice(&raw[8..12]);
        flags.copy_from_slice(&raw[12..]);
        let flags = u32::from_le_bytes(flags);
        if flags & !known != 0 {
            return Ok(Err(Bad::RangeFlags(flags)));
        }
        let sectors = u64::from(u32::from_le_bytes(sectors));
        Ok(Ok((u64::from_le_bytes(sector), sectors, flags)))
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
