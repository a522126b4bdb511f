//! [`Logs`]: the log of each member's parity behind a word, and the batches that wait for it.
//!
//! The queue that claims a log's word is its writer. All I/O is its caller's: [`LogStep`] says which, and its end comes back as a call.

use super::arrivals::{Arrived, Place};
use super::epoch::{Epoch, Seen, Stop};
use super::packed::{Owner, Packed};
use super::table::{Arrival, InFlight, Looked, Record, Table};
use super::token::{Claimed, Closed, Leaves, Open, Parked, Token, Waiting};
use super::unit::{LogBatch, LogEntry, LogFormat, Room};
use crate::PPL_HEADER_BYTES;
use crate::head_pages::memory;
use pvblk_block::memory::Gauge;
use pvblk_block::planted::{Plant, has};
use pvblk_block::stacked::{Lock, Native, Primitives, Word};
use pvblk_block::{Buffer, Error, Region};
use std::sync::Arc;

/// Bits of [`Unwritten::left`]: the number of the unit's stripes that aren't written yet.
const LEFT: u64 = 0xffff_ffff;
/// Bit of [`Unwritten::left`]: a stripe that is written may be in volatile caches only.
const VOLATILE: u64 = 1 << 32;

type Batches<R> = Vec<Arrived<LogBatch<R>>>;

/// The record of a log's word.
pub struct LogRecord<R> {
    /// Batches for the next unit, in the order of their arrival. All are of the epoch in which the writer looked at them.
    next: Batches<R>,
    /// Batches of the unit that is being written.
    unit: Batches<R>,
    header: Buffer,
    generation: u64,
    /// Stripes of the last unit may be in members' caches only, so it isn't written over before these are flushed.
    stale: bool,
}

impl<R: Send> Record for LogRecord<R> {
    type Pages = ();
}

/// Ownership of a log.
pub type LogToken<S, R> = Token<S, LogRecord<R>>;

/// A part in a unit that is stable: its stripe isn't written yet. The log stays busy until all parts have come back.
#[derive(Debug)]
#[must_use = "a log whose unit's parts don't all come back is busy for ever"]
pub struct Part {
    log: usize,
}

/// The end of a batch's wait. It is for the owner of the batch, with the batch's place in the log's list.
#[derive(Debug)]
pub enum Answer<R> {
    /// Data and parity may be written: the owner resumes, and gives the part back when they are.
    Stable {
        token: Token<Waiting, R>,
        entry: LogEntry,
        place: Place,
        part: Part,
    },
    /// The batch was planned for other members, or its log failed: nothing of it is written. The owner goes on and plans anew, in a stop when
    /// it is told so.
    Again {
        token: Token<Parked, R>,
        entry: LogEntry,
        place: Place,
    },
}

impl<R> Answer<R> {
    /// The queue that gets it.
    pub fn owner(&self) -> Owner {
        match self {
            Answer::Stable { token, .. } => token.owner(),
            Answer::Again { token, .. } => token.owner(),
        }
    }
}

/// Duties that a step of a log leaves to its caller.
#[derive(Debug)]
pub struct LogErrands<R> {
    /// Posted to their owners; those of the caller go on at once.
    pub answers: Vec<Answer<R>>,
    /// Queues that wait until words are drained: they look again.
    pub tell: Vec<Owner>,
    /// Logs that have another writer now: posted to it, if it isn't the caller.
    pub yours: Vec<LogToken<Claimed, R>>,
}

impl<R> Default for LogErrands<R> {
    fn default() -> LogErrands<R> {
        LogErrands {
            answers: Vec::new(),
            tell: Vec::new(),
            yours: Vec::new(),
        }
    }
}

/// The next thing that a log's writer does.
#[derive(Debug)]
#[must_use = "a log that its writer forgets is busy for ever"]
pub enum LogStep<R> {
    /// Words are stopped: it goes on when it is told.
    Held(LogToken<Parked, R>),
    /// It flushes the members; [`Logs::flushed`] or [`Logs::flush_failed`] follows.
    Flush(Flushing<R>),
    /// It writes a unit; [`Logs::written`] or [`Logs::failed`] follows.
    Write(Writing<R>),
    /// Nothing: the log isn't its own any more.
    Left,
}

/// A log for which members are being flushed.
#[derive(Debug)]
#[must_use = "a log that its writer forgets is busy for ever"]
pub struct Flushing<R>(LogToken<Open, R>);

/// A log whose unit is being written.
#[derive(Debug)]
#[must_use = "a log that its writer forgets is busy for ever"]
pub struct Writing<R> {
    token: LogToken<Closed, R>,
    buffers: Vec<Buffer>,
}

impl<R> Flushing<R> {
    /// Member whose log it is.
    pub fn at(&self) -> usize {
        self.0.at()
    }
}

impl<R> Writing<R> {
    /// Member whose log it is.
    pub fn at(&self) -> usize {
        self.token.at()
    }

    /// Records of the stripes that have entries in the unit.
    pub fn stripes(&self) -> impl Iterator<Item = &R> {
        let unit = self.token.record().unit.iter();
        unit.map(|arrived| arrived.piece.token.record())
    }

    /// The unit, which goes to the begin of the log's area on each device that has it, with FUA.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }
}

impl<R: std::fmt::Debug> std::fmt::Debug for LogRecord<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let counts = (self.next.len(), self.unit.len());
        write!(f, "LogRecord{counts:?}")
    }
}

/// A unit that is stable, beside the word of its log. It has a cache line of its own.
#[repr(align(64))]
struct Unwritten<R: Record, P: Primitives> {
    /// Stripes that aren't written, and whether others are in caches. Each owner of one takes it out of the count.
    left: P::Word,
    /// The log's token. Held for a move only: its writer puts it, and the owner of the last stripe takes it.
    token: P::Lock<Option<LogToken<Closed, R>>>,
}

/// The logs of an array, by the member whose parity they are for. `R`: the record of stripes.
pub struct Logs<R: Record, P: Primitives = Native> {
    words: Table<LogRecord<R>, LogBatch<R>, P>,
    unwritten: Box<[Unwritten<R, P>]>,
    format: LogFormat,
    _memory: Gauge,
}

impl<R: Record, P: Primitives> Logs<R, P> {
    /// A log for each member, and places for so many batches that wait.
    pub fn new(format: LogFormat, batches: u32) -> Result<(Logs<R, P>, Vec<Place>), Error> {
        let count = format.geometry.members();
        let bytes = count * PPL_HEADER_BYTES;
        let region = Region::anonymous(bytes).map_err(|e| Error::os("memory for logs", e))?;
        let region = Arc::new(region);
        let mut at = 0;
        let (words, places) = Table::new(count, batches, || {
            let header = Buffer::new(&region, at, PPL_HEADER_BYTES);
            at += PPL_HEADER_BYTES;
            LogRecord {
                next: Vec::new(),
                unit: Vec::new(),
                header: header.expect("one for each log"),
                // Above that of the empty log that is there.
                generation: 1,
                stale: false,
            }
        });
        let unwritten = |_| Unwritten {
            left: P::Word::new(0),
            token: P::Lock::new(None),
        };
        let logs = Logs {
            words,
            unwritten: (0..count).map(unwritten).collect(),
            format,
            _memory: memory("headers of logs", bytes),
        };
        Ok((logs, places))
    }

    /// A log's word as it was at some moment, for traces and tests.
    pub fn peek(&self, at: usize) -> Packed {
        self.words.peek(at)
    }

    /// A batch waits for its log from now on. If nobody owns the log, its queue is the writer, and begins at once.
    pub fn arrive(&self, place: Place, batch: LogBatch<R>) -> Option<LogToken<Claimed, R>> {
        let at = self.format.geometry.stripe_parity(batch.entry.stripe);
        let queue = batch.token.owner();
        match self.words.arrive(at, queue, place, batch) {
            Arrival::Claimed(mut token, arrived) => {
                debug_assert!(token.record().next.is_empty(), "a free log has no batches");
                token.record_mut().next.push(arrived);
                Some(token)
            }
            Arrival::Joined => None,
        }
    }

    /// The writer looks at the epoch, and sends batches of another one back. Step `log begun` of the model.
    pub fn begin(
        &self,
        token: LogToken<Claimed, R>,
        room: Room,
        epoch: &Epoch<P>,
        errands: &mut LogErrands<R>,
    ) -> LogStep<R> {
        let mut open = match self.words.look(token, epoch) {
            Looked::Open(open) => open,
            Looked::Parked(parked, tell) => {
                errands.tell.extend(tell);
                return LogStep::Held(parked);
            }
        };
        let mut next = std::mem::take(&mut open.record_mut().next);
        self.words.take(&mut open, &mut next);
        send_back(&mut next, open.epoch(), errands);
        let first = next.first().map(|arrived| arrived.piece.token.owner());
        let record = open.record_mut();
        record.next = next;
        let stale = record.stale;
        if first != Some(open.owner()) {
            // The writer of a unit has a batch in it: else its queue might be closed when the write ends.
            let closed = self.close(open, errands);
            self.leave(closed, epoch, errands);
            return LogStep::Left;
        }
        match stale && !has(Plant::LogReusedEarly) {
            true => LogStep::Flush(Flushing(open)),
            false => LogStep::Write(self.unit(open, room, errands)),
        }
    }

    /// The writer was told to go on, and begins as after a claim.
    pub fn go_on(&self, held: LogToken<Parked, R>) -> LogToken<Claimed, R> {
        self.words.go_on(held)
    }

    /// The members are flushed: those who have arrived meanwhile are in the unit, too. Step `log flushed` of the model.
    pub fn flushed(
        &self,
        Flushing(mut open): Flushing<R>,
        room: Room,
        epoch: &Epoch<P>,
        errands: &mut LogErrands<R>,
    ) -> LogStep<R> {
        // A stop that this look misses waits for the word.
        if let Seen::Stopped(_) = epoch.look() {
            return self.hold(open, epoch, errands);
        }
        open.record_mut().stale = false;
        LogStep::Write(self.unit(open, room, errands))
    }

    /// A member failed the flush: the log isn't written over, and its batches are planned anew after the stop, which begins here unless a
    /// queue has stopped words already.
    pub fn flush_failed(
        &self,
        Flushing(open): Flushing<R>,
        epoch: &Epoch<P>,
        errands: &mut LogErrands<R>,
    ) -> (LogStep<R>, Result<Stop, Owner>) {
        let stop = epoch.stop(open.owner());
        (self.hold(open, epoch, errands), stop)
    }

    fn hold(
        &self,
        open: LogToken<Open, R>,
        epoch: &Epoch<P>,
        errands: &mut LogErrands<R>,
    ) -> LogStep<R> {
        let (parked, tell) = self.words.park(open, epoch);
        errands.tell.extend(tell);
        LogStep::Held(parked)
    }

    /// Closes the log, with those who have arrived until then among the next.
    fn close(
        &self,
        mut open: LogToken<Open, R>,
        errands: &mut LogErrands<R>,
    ) -> LogToken<Closed, R> {
        let mut next = std::mem::take(&mut open.record_mut().next);
        let mut closed = self.words.close(open, &mut next);
        send_back(&mut next, closed.epoch(), errands);
        closed.record_mut().next = next;
        closed
    }

    /// Makes a unit of as many batches as fit, in the order of their arrival; the others stay for the next one.
    fn unit(&self, open: LogToken<Open, R>, room: Room, errands: &mut LogErrands<R>) -> Writing<R> {
        let mut token = self.close(open, errands);
        let at = token.at();
        let record = token.record_mut();
        let count = room.holds(record.next.iter().map(|arrived| &arrived.piece.entry));
        record.unit.extend(record.next.drain(..count));
        record.generation += 1;
        let entries = record.unit.iter().map(|arrived| &arrived.piece.entry);
        let id = (at, record.generation);
        let buffers = self.format.encode(id, room, &record.header, entries);
        Writing { token, buffers }
    }

    /// The unit is stable: its batches' owners are told so. Step `log written` of the model.
    pub fn written(&self, writing: Writing<R>, errands: &mut LogErrands<R>) {
        let mut token = writing.token;
        let log = token.at();
        let unit = std::mem::take(&mut token.record_mut().unit);
        let Unwritten { left, token: kept } = &self.unwritten[log];
        // Both before the answers, which publish them.
        left.store_relaxed(unit.len() as u64);
        *kept.lock() = Some(token);
        errands.answers.extend(unit.into_iter().map(|arrived| {
            let LogBatch { token, entry } = arrived.piece;
            let (place, part) = (arrived.place, Part { log });
            Answer::Stable {
                token,
                entry,
                place,
                part,
            }
        }));
    }

    /// A device failed the unit's write: its batches are planned anew. The stop begins here, unless a queue has stopped words already. Step
    /// `log written` of the model.
    pub fn failed(
        &self,
        writing: Writing<R>,
        epoch: &Epoch<P>,
        errands: &mut LogErrands<R>,
    ) -> Result<Stop, Owner> {
        let mut token = writing.token;
        // First: a batch that is sent back must not be planned for the member that failed.
        let stop = epoch.stop(token.owner());
        let unit = std::mem::take(&mut token.record_mut().unit);
        errands.answers.extend(unit.into_iter().map(again));
        self.leave(token, epoch, errands);
        stop
    }

    /// The stripe of a part is written, or a member failed it; its owner has no I/O in flight. `volatile`: it may be in a cache only. The
    /// owner of the last part leaves the log.
    pub fn done(
        &self,
        Part { log }: Part,
        volatile: bool,
        epoch: &Epoch<P>,
        errands: &mut LogErrands<R>,
    ) {
        let Unwritten { left, token: kept } = &self.unwritten[log];
        let mark = if volatile { VOLATILE } else { 0 };
        let mut seen = left.load_relaxed();
        loop {
            debug_assert!(seen & LEFT > 0, "a part comes back once");
            let next = (seen - 1) | mark;
            // Publishes the ends of this stripe's I/O to the owner of the last one.
            match left.exchange_release(seen, next) {
                Ok(()) if next & LEFT > 0 => return,
                Ok(()) => break,
                Err(now) => seen = now,
            }
        }
        // Acquires the ends of all, so that leaving the log publishes them to a stop and to the next writer.
        let stale = left.load_acquire() & VOLATILE != 0;
        let token = kept.lock().take();
        let mut token = token.expect("the last part finds the log");
        token.record_mut().stale = stale;
        self.leave(token, epoch, errands);
    }

    /// The array has stopped: all batches are sent back, and their owners fail them.
    pub fn refuse(
        &self,
        mut token: LogToken<Claimed, R>,
        epoch: &Epoch<P>,
        errands: &mut LogErrands<R>,
    ) {
        let mut next = std::mem::take(&mut token.record_mut().next);
        self.words.take(&mut token, &mut next);
        errands.answers.extend(next.into_iter().map(again));
        self.leave(token, epoch, errands);
    }

    /// Frees the log, or hands it over to the queue whose batch is the first of those that wait.
    fn leave<S: Leaves>(
        &self,
        mut token: LogToken<S, R>,
        epoch: &Epoch<P>,
        errands: &mut LogErrands<R>,
    ) {
        if token.record().next.is_empty() {
            token = match self.words.release(token, epoch) {
                Ok(tell) => return errands.tell.extend(tell),
                Err(token) => token,
            };
            let mut next = Vec::new();
            self.words.take(&mut token, &mut next);
            token.record_mut().next = next;
        }
        let first = token.record().next.first();
        let to = first.expect("somebody has arrived").piece.token.owner();
        errands.yours.push(self.words.hand_over(token, to));
    }

    /// Logs with I/O in flight, their units' stripes' among it, for the queue that has stopped words.
    pub fn in_flight(&self, stop: &Stop) -> InFlight {
        self.words.in_flight(stop)
    }

    /// Forgets logs that are drained; true if there are others still.
    pub fn is_in_flight(&self, left: &mut InFlight) -> bool {
        self.words.is_in_flight(left)
    }
}

/// Sends the batches back that were planned in another epoch.
fn send_back<R>(batches: &mut Batches<R>, epoch: u32, errands: &mut LogErrands<R>) {
    let is_old = |arrived: &mut Arrived<LogBatch<R>>| arrived.piece.token.epoch() != epoch;
    let old = batches.extract_if(.., is_old);
    errands.answers.extend(old.map(again));
}

fn again<R>(arrived: Arrived<LogBatch<R>>) -> Answer<R> {
    let LogBatch { token, entry } = arrived.piece;
    Answer::Again {
        token: token.give_up(),
        entry,
        place: arrived.place,
    }
}
