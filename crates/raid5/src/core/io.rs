//! Member I/O in flight.

use super::log::UnitKey;
use super::queue::QueueCore;
use super::request::Direct;
use super::{Data, MemberIo};
use crate::core::Token as IoToken;
use pvblk_block::{Op, trace};

/// The purpose of an I/O.
pub enum Purpose {
    /// A piece of a read goes to the member as it is.
    Direct(Direct),
    /// A request flushes members.
    Flush(usize),
    /// A batch reads a block.
    Read { flying: usize, role: usize },
    /// A batch writes a block, or a run its blocks.
    Write { flying: usize },
    /// A unit of a log is written, or members are flushed for it.
    Log(UnitKey),
    /// Members are flushed, so that superblocks may name one that failed.
    Kick,
    /// Members are flushed, so that superblocks may tell how far an action is.
    Sync,
    /// Members are flushed before bits of the bitmap are taken away.
    Sweep,
}

impl Purpose {
    /// A block that can't be read is calculated. Other failures are the device's end as a member.
    fn is_read(&self) -> bool {
        matches!(self, Purpose::Direct(_) | Purpose::Read { .. })
    }
}

impl QueueCore {
    /// Starts I/O on a device; `sector` is of its data, but for logs.
    pub(super) fn start(
        &mut self,
        purpose: Purpose,
        (slot, op, fua): (usize, Op, bool),
        sector: u64,
        data: Data,
    ) {
        let base = match purpose {
            Purpose::Direct(_) | Purpose::Read { .. } | Purpose::Write { .. } => {
                self.now.device(slot).slot.data_sectors
            }
            Purpose::Flush(_)
            | Purpose::Log(_)
            | Purpose::Kick
            | Purpose::Sync
            | Purpose::Sweep => 0,
        };
        let cause = match trace::is_on() {
            true => self.cause(&purpose),
            false => None,
        };
        let token = self.purposes.insert((purpose, slot));
        self.ios.push(MemberIo {
            slot,
            op,
            fua,
            sector: base + sector,
            data,
            token: IoToken(token),
            cause,
        });
    }

    /// A sector of the array that an I/O is for, of a request that traces follow.
    #[cold]
    fn cause(&self, purpose: &Purpose) -> Option<u64> {
        match purpose {
            Purpose::Direct(direct) => self.followed(direct),
            Purpose::Read { flying, .. } | Purpose::Write { flying } => {
                self.flying[*flying].followed(&self.common.geometry)
            }
            Purpose::Log(unit) => self.unit_followed(*unit),
            Purpose::Flush(_) | Purpose::Kick | Purpose::Sync | Purpose::Sweep => None,
        }
    }

    /// I/O that this queue started has ended.
    pub fn ended(&mut self, token: IoToken, ok: bool) {
        let Some((purpose, slot)) = self.purposes.try_remove(token.0) else {
            debug_assert!(false, "an I/O ended twice");
            return;
        };
        if !ok && !purpose.is_read() {
            self.common.note_failure(slot);
        }
        match purpose {
            Purpose::Direct(direct) => self.direct_ended(direct, ok),
            Purpose::Flush(request) => self.flush_ended(request, slot, ok),
            Purpose::Read { flying, role } => self.block_read(flying, role, ok),
            Purpose::Write { flying } => self.block_written(flying, slot, ok),
            Purpose::Log(unit) => self.log_ended(unit, slot, ok),
            Purpose::Kick => self.kick_flush_over(),
            Purpose::Sync => self.sync_flushed(slot, ok),
            Purpose::Sweep => self.sweep_flushed(),
        }
    }
}
