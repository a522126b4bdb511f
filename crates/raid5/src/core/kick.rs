//! Kicks: a device that failed isn't a member any more, and the others' superblocks say so, but only when they hold all that they were given.
//!
//! Stripes that were being written together with its blocks are whole on the others then, so what it had can be calculated after a power cut.
//! Writes of which nothing had begun are planned anew, without it. docs/decisions/0009-raid5.md has the rules.

use super::{Core, Purpose};
use pvblk_block::Op;
use pvblk_block::planted::{Plant, has};

/// The state of a kick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kick {
    /// There is none.
    None,
    /// Writes of stripes are at the other members, or of a log that is emptied then.
    Draining,
    /// The others are being flushed, and the log of an incoming device is emptied.
    Flushing,
    /// Superblocks that name the device are being written.
    Naming,
}

impl Kick {
    /// Superblocks wait for it.
    pub fn goes_first(self) -> bool {
        matches!(self, Kick::Draining | Kick::Flushing)
    }
}

impl Core {
    /// After a device failed; it has no slot any more.
    pub(super) fn begin_kick(&mut self, slot: usize, runner: usize) {
        if let Some(superblock) = self.meta.leave_out(slot) {
            self.ages.note(slot, superblock);
        }
        for head in self.logs.take_unwritten() {
            self.plan_anew(head);
        }
        match self.meta.kick {
            Kick::None => self.meta.kick = Kick::Draining,
            Kick::Draining | Kick::Flushing => {}
            Kick::Naming => self.write_meta(runner),
        }
        self.let_go(runner);
        self.go_on_kicking(runner);
    }

    /// Doesn't wait any longer for I/O at devices that aren't members, but for that with memory of stripes or submitters.
    fn let_go(&mut self, runner: usize) {
        for token in 0..self.purposes.len() {
            let slot = self.places[token];
            let Some(purpose) = self.purposes[token].filter(|_| self.slots.all[slot].is_none())
            else {
                continue;
            };
            let is_own = match purpose {
                Purpose::Direct(direct) => direct.sectors == 0,
                Purpose::HeadRead { .. } | Purpose::HeadWrite(_) | Purpose::Abandoned => false,
                _ => true,
            };
            if is_own {
                self.purposes[token] = Some(Purpose::Abandoned);
                self.io_ended(purpose, slot, false, runner);
            }
        }
    }

    /// Goes on with a kick that nothing at the members holds up. The runner, which is polled, does its I/O.
    pub(super) fn go_on_kicking(&mut self, runner: usize) {
        if self.broken {
            return;
        }
        let empties = self.log_to_empty().map(|incoming| incoming.role);
        let writes = |purpose| match purpose {
            Purpose::HeadWrite(_) => true,
            Purpose::Log(role) => empties == Some(role),
            _ => false,
        };
        if self.meta.kick == Kick::Draining
            && (has(Plant::KickNotDrained) || !self.is_at_members(writes))
        {
            self.meta.kick = Kick::Flushing;
            if !has(Plant::KickNotFlushed) {
                self.flush_all(runner, Purpose::KickFlush);
            }
            self.empty_log(runner);
        }
        let flushes = |purpose| matches!(purpose, Purpose::KickFlush);
        if self.meta.kick == Kick::Flushing && !self.is_at_members(flushes) {
            self.meta.kick = Kick::Naming;
            self.write_meta(runner);
        }
    }

    /// True if a device of the array has such I/O. One that was kicked may never answer.
    fn is_at_members(&self, of: impl Fn(Purpose) -> bool) -> bool {
        let is_live = |slot: usize| self.slots.all[slot].is_some();
        let mut all = self.places.iter().zip(&self.purposes);
        all.any(|(slot, purpose)| purpose.is_some_and(&of) && is_live(*slot))
    }

    /// The superblocks name it.
    pub(super) fn kick_ended(&mut self) {
        self.meta.kick = Kick::None;
        // A flush may have waited for the member that failed writes.
        self.held.sort_by_key(|(_, c)| c.request.op == Op::Flush);
        self.done.append(&mut self.held);
    }

    /// True if the head's round writes and was planned for members that aren't all there any more.
    pub(super) fn is_outdated(&self, head: usize) -> bool {
        let round = self.heads.all[head].round.as_ref();
        !self.broken && round.is_some_and(|r| r.plan.is_outdated(&self.members))
    }

    /// Takes back a round of which nothing was written to data and parity: its pieces wait again.
    pub(super) fn plan_anew(&mut self, head: usize) {
        let h = &mut self.heads.all[head];
        let stripe = h.record.stripe;
        let Some(round) = &mut h.round else { return };
        for piece in round.pieces.drain(..).rev() {
            h.waiting.push_front(piece.piece);
        }
        // Pages may have what isn't on the members.
        h.record.valid = 0;
        let pieces = std::mem::take(&mut round.pieces);
        let (logged, intends) = (round.logged, round.intends);
        if let Some(block) = round.partial_parity.take() {
            self.logs.take_back(block);
        }
        self.keep_list(pieces);
        if logged {
            let parity = self.geometry.stripe_parity(stripe);
            self.logs
                .stripe_done(parity, !self.slots.volatile().is_empty());
        }
        if intends {
            self.intent_over(stripe, false);
        }
        self.round_over(head);
    }
}
