//! Units of logs: waits of this queue's batches, and units that it writes.

use super::Data;
use super::io::Purpose;
use super::queue::{Mail, QueueCore};
use super::record::Stripe;
use crate::words::{
    Answer, Claimed, Closed, Flushing, LogBatch, LogEntry, LogErrands, LogStep, LogToken, Logs,
    Owner, Parked, Part, Partial, Stop, Token, Writing,
};
use pvblk_block::Op;

/// Names a unit in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitKey(usize);

/// A unit of a log whose next step is the end of its I/O.
pub struct Unit {
    step: UnitStep,
    ios: usize,
    failed: Vec<usize>,
}

enum UnitStep {
    Flushing(Flushing<Stripe>),
    Writing(Writing<Stripe>),
}

impl QueueCore {
    /// Calls for the logs, which are there where this is called, and runs the errands.
    fn with_logs<T>(
        &mut self,
        call: impl FnOnce(&Self, &Logs<Stripe>, &mut LogErrands<Stripe>) -> T,
    ) -> T {
        let mut errands = LogErrands::default();
        let logs = self.common.logs.as_ref();
        let done = call(self, logs.expect("an array with a log"), &mut errands);
        for answer in errands.answers {
            self.send(answer.owner(), Mail::Answer(answer));
        }
        self.tell(errands.tell);
        for token in errands.yours {
            self.send(token.owner(), Mail::Log(token));
        }
        done
    }

    /// A batch whose parity is calculated waits for its log.
    pub(super) fn wait_for_log(&mut self, token: Token<Closed, Stripe>, entry: LogEntry) {
        let (token, tell) = self.common.words.wait(token, &self.common.epoch);
        self.tell(tell);
        let place = self.log_places.take();
        let place = place.expect("a place at logs for each part");
        let claimed = self.with_logs(|_, logs, _| logs.arrive(place, LogBatch { token, entry }));
        if let Some(token) = claimed {
            self.send(self.me, Mail::Log(token));
        }
    }

    /// A log is this queue's.
    pub(super) fn log_claimed(&mut self, token: LogToken<Claimed, Stripe>) {
        let step = self.with_logs(|queue, logs, errands| {
            logs.begin(token, queue.now.room, &queue.common.epoch, errands)
        });
        self.log_step(step);
    }

    /// The stop is over in which a log was held.
    pub(super) fn log_goes_on(&mut self, token: LogToken<Parked, Stripe>) {
        let token = self.with_logs(|_, logs, _| logs.go_on(token));
        self.send(self.me, Mail::Log(token));
    }

    fn log_step(&mut self, step: LogStep<Stripe>) {
        match step {
            LogStep::Left => {}
            LogStep::Held(token) => self.held_logs.push(token),
            LogStep::Flush(flushing) => {
                let slots = self.common.volatile(&self.now);
                let key = self.add_unit(UnitStep::Flushing(flushing), slots.len());
                for slot in slots {
                    self.start(Purpose::Log(key), (slot, Op::Flush, false), 0, Data::None);
                }
                self.unit_goes_on(key);
            }
            LogStep::Write(writing) => {
                // The incoming device has a log only while there is no member: entries that it kept from before the member failed would
                // outlive writes without parity. It has none when it takes over, and needs none, since all is flushed then.
                let slot = self.now.members.reads(writing.at());
                let slot = slot.expect("an entry for parity that is there");
                let sector = self.now.device(slot).slot.log_sector;
                let data = Data::Some(writing.buffers().to_vec());
                let key = self.add_unit(UnitStep::Writing(writing), 1);
                self.start(Purpose::Log(key), (slot, Op::Write, true), sector, data);
            }
        }
    }

    /// A sector of the array that a unit is for, of a request that traces follow.
    pub(super) fn unit_followed(&self, key: UnitKey) -> Option<u64> {
        match &self.units[key.0].step {
            UnitStep::Writing(writing) => {
                let mut stripes = writing.stripes();
                stripes.find_map(|stripe| stripe.followed(&self.common.geometry))
            }
            UnitStep::Flushing(_) => None,
        }
    }

    fn add_unit(&mut self, step: UnitStep, ios: usize) -> UnitKey {
        UnitKey(self.units.insert(Unit {
            step,
            ios,
            failed: Vec::new(),
        }))
    }

    pub(super) fn log_ended(&mut self, key: UnitKey, slot: usize, ok: bool) {
        let unit = &mut self.units[key.0];
        unit.ios -= 1;
        if !ok {
            unit.failed.push(slot);
        }
        self.unit_goes_on(key);
    }

    fn unit_goes_on(&mut self, key: UnitKey) {
        if self.units[key.0].ios > 0 {
            return;
        }
        let Unit { step, failed, .. } = self.units.remove(key.0);
        match step {
            UnitStep::Flushing(flushing) if failed.is_empty() => {
                let step = self.with_logs(|queue, logs, errands| {
                    logs.flushed(flushing, queue.now.room, &queue.common.epoch, errands)
                });
                self.log_step(step);
            }
            UnitStep::Flushing(flushing) => {
                let (step, stop) = self.with_logs(|queue, logs, errands| {
                    logs.flush_failed(flushing, &queue.common.epoch, errands)
                });
                self.log_step(step);
                self.log_failed(stop, failed);
            }
            UnitStep::Writing(writing) if failed.is_empty() => {
                self.with_logs(|_, logs, errands| logs.written(writing, errands));
            }
            UnitStep::Writing(writing) => {
                let stop = self.with_logs(|queue, logs, errands| {
                    logs.failed(writing, &queue.common.epoch, errands)
                });
                self.log_failed(stop, failed);
            }
        }
    }

    fn log_failed(&mut self, stop: Result<Stop, Owner>, failed: Vec<usize>) {
        if let Ok(stop) = stop {
            self.has_stopped(stop);
        }
        for slot in failed {
            self.member_failed(slot);
        }
    }

    /// The end of a batch's wait.
    pub(super) fn answered(&mut self, answer: Answer<Stripe>) {
        match answer {
            Answer::Stable {
                token,
                entry,
                place,
                part,
            } => {
                self.log_places.put(place);
                self.put_block(entry);
                let mut token = self.common.words.resume(token);
                match token.record_mut().run.take() {
                    Some(run) => self.run_logged(token, *run, part),
                    None => self.write_blocks(token, Some(part)),
                }
            }
            Answer::Again {
                mut token,
                entry,
                place,
            } => {
                self.log_places.put(place);
                self.put_block(entry);
                // If words are stopped they park again.
                if let Some(run) = token.record_mut().run.take() {
                    return self.run_again(token, *run);
                }
                token.record_mut().forget();
                self.claim_again(token);
            }
        }
    }

    fn put_block(&mut self, entry: LogEntry) {
        if let Some(Partial::Sum(block)) = entry.partial {
            self.blocks.put(block);
        }
    }

    /// The stripe of a log's part is written, or a member failed it.
    pub(super) fn give_back(&mut self, part: Part) {
        let volatile = !self.common.volatile(&self.now).is_empty();
        self.with_logs(|queue, logs, errands| {
            logs.done(part, volatile, &queue.common.epoch, errands);
        });
    }
}
