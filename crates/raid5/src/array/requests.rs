//! [`MemberRequests`]: member I/O as requests at the members, one for all that lie side by side.

use crate::STRIPE_SECTORS;
use crate::core::{MemberIo, Token};
use pvblk_block::{Limits, Op, Request, RequestFlags};

/// One of the I/Os that are a request at a member.
#[derive(Clone, Copy)]
struct Part {
    token: Token,
    sectors: u64,
    buffers: usize,
}

/// A request for a member.
pub(super) struct MemberRequest {
    pub slot: usize,
    pub request: Box<Request>,
    /// Sector of the array that it is for, if traces follow one of its I/Os.
    pub cause: Option<u64>,
}

/// The requests of a queue at the members, by tag.
#[derive(Default)]
pub(super) struct MemberRequests {
    parts: Vec<Vec<Part>>,
    free_tags: Vec<usize>,
    spare: Vec<Box<Request>>,
    /// [`sort_key`]s of the I/O. They are sorted in its place, since they are small.
    keys: Vec<u128>,
}

/// Slot, operation, FUA and sector of an I/O, and in the lowest 32 bits its index in the list, for [`index_of`].
fn sort_key(io: &MemberIo, index: usize) -> u128 {
    debug_assert!(io.slot < 1 << 16 && index <= u32::MAX as usize);
    let kind = (io.slot as u128) << 16 | (io.op as u128) << 8 | u128::from(io.fua);
    kind << 96 | u128::from(io.sector) << 32 | index as u128
}

fn index_of(key: u128) -> usize {
    (key as u32) as usize
}

impl MemberRequests {
    /// Appends requests for the I/O, of which none is left. `limits` are those of a slot, if it has a queue; without them each I/O is a request.
    pub fn make(
        &mut self,
        ios: &mut Vec<MemberIo>,
        limits: impl Fn(usize) -> Option<Limits>,
        out: &mut Vec<MemberRequest>,
    ) {
        let mut keys = std::mem::take(&mut self.keys);
        keys.extend(ios.iter().enumerate().map(|(at, io)| sort_key(io, at)));
        keys.sort_unstable();
        let first = out.len();
        for key in keys.drain(..) {
            let io = &mut ios[index_of(key)];
            let data = std::mem::take(&mut io.data);
            let buffers = data.buffers();
            let count = buffers.len();
            let sectors: u64 = match io.op {
                Op::WriteZeroes => STRIPE_SECTORS,
                _ => buffers.iter().map(|b| b.len() as u64 / 512).sum(),
            };
            let part = Part {
                token: io.token,
                sectors,
                buffers: count,
            };
            if let Some(last) = out[first..].last_mut() {
                let request = &mut last.request;
                let touches = last.slot == io.slot
                    && request.op == io.op
                    && io.op != Op::Flush
                    && request.flags.contains(RequestFlags::FUA) == io.fua
                    && request.end() == io.sector;
                let fits = limits(io.slot).is_some_and(|l| {
                    request.sectors + sectors <= u64::from(l.max_sectors)
                        && request.buffers.len() + count <= l.max_segments as usize
                });
                if touches && fits {
                    request.sectors += sectors;
                    request.followed |= io.cause.is_some();
                    last.cause = last.cause.or(io.cause);
                    data.append_to(&mut request.buffers);
                    self.parts[request.tag as usize].push(part);
                    continue;
                }
            }
            let flags = match io.fua {
                true => RequestFlags::FUA,
                false => RequestFlags::empty(),
            };
            let mut request = self.request(io.op, flags, io.sector, part);
            request.followed = io.cause.is_some();
            data.append_to(&mut request.buffers);
            out.push(MemberRequest {
                slot: io.slot,
                request,
                cause: io.cause,
            });
        }
        ios.clear();
        self.keys = keys;
    }

    /// A request for a member, without its buffers.
    fn request(&mut self, op: Op, flags: RequestFlags, sector: u64, part: Part) -> Box<Request> {
        let tag = match self.free_tags.pop() {
            Some(tag) => tag,
            None => {
                self.parts.push(Vec::new());
                self.parts.len() - 1
            }
        };
        self.parts[tag].push(part);
        let mut request = self
            .spare
            .pop()
            .unwrap_or_else(|| Request::new(Op::Flush, 0, 0, 0));
        request.reset(op, flags, sector, part.sectors, tag as u64);
        request
    }

    /// A request has ended. Appends its I/Os and whether they are done; but a read of several that failed is to be sent again, I/O by I/O, since
    /// one sector that can't be read isn't all of them.
    pub fn end(
        &mut self,
        mut request: Box<Request>,
        ok: bool,
        ended: &mut Vec<(Token, bool)>,
    ) -> Vec<Box<Request>> {
        let tag = request.tag as usize;
        let mut again = Vec::new();
        if !ok && request.op == Op::Read && self.parts[tag].len() > 1 {
            again = self.take_apart(&request);
        } else {
            ended.extend(self.parts[tag].iter().map(|p| (p.token, ok)));
        }
        self.parts[tag].clear();
        self.free_tags.push(tag);
        request.buffers.clear();
        self.spare.push(request);
        again
    }

    fn take_apart(&mut self, request: &Request) -> Vec<Box<Request>> {
        let parts = std::mem::take(&mut self.parts[request.tag as usize]);
        let mut sector = request.sector;
        let mut buffers = request.buffers.iter().cloned();
        let one = |part: Part| {
            let mut one = self.request(Op::Read, request.flags, sector, part);
            one.followed = request.followed;
            one.buffers.extend(buffers.by_ref().take(part.buffers));
            sector += part.sectors;
            one
        };
        parts.into_iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::Data;

    #[test]
    fn keys_are_in_the_order_of_slot_operation_fua_and_sector() {
        let mut ios = Vec::new();
        for slot in [0, 1, 63] {
            for op in [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes] {
                for (fua, sector) in [(false, 0), (false, 1 << 32), (true, 7), (true, u64::MAX)] {
                    ios.push(MemberIo {
                        slot,
                        op,
                        fua,
                        sector,
                        data: Data::None,
                        token: Token::default(),
                        cause: None,
                    });
                }
            }
        }
        fastrand::Rng::with_seed(1).shuffle(&mut ios);
        let mut keys: Vec<u128> = (0..ios.len()).map(|at| sort_key(&ios[at], at)).collect();
        keys.sort_unstable();
        let mut by_fields: Vec<usize> = (0..ios.len()).collect();
        by_fields.sort_by_key(|at| {
            let io = &ios[*at];
            (io.slot, io.op as u8, io.fua, io.sector)
        });
        let by_key: Vec<usize> = keys.into_iter().map(index_of).collect();
        assert_eq!(by_key, by_fields);
    }
}
