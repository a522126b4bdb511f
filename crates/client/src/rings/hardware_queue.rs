//! A hardware queue: one ring, its tags, and the shadow of every request in flight.

mod hold;

use super::backlog::Backlog;
use super::connection::Trouble;
use super::durability::{Coverage, Durability};
use super::frames::Frames;
use super::limit::Limit;
use super::owners::Owners;
use super::plug::{MergeLimits, MergePolicy, Merged};
use super::segments::{GrantedMemory, copy_bounce};
use super::statistics::{Counting, Statistics};
use hold::Held;
use parking_lot::Mutex;
use pvblk_block::planted::{self, Plant};
use pvblk_block::trace::{Phase, Tracer};
use pvblk_block::{Buffer, Clock, Completion, Op, Request, RequestFlags, Status, Work};
use pvblk_protocol::blkif::wire::{
    self, DiscardRequest, IndirectRequest, RequestHeader, Response, Segment,
};
use pvblk_protocol::blkif::{EventChannel, FrontRing};
use pvblk_protocol::xenbus::DiskProperties;
use pvblk_sys::PAGE_SIZE;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;

/// Most answers taken in one go, so that a poll is bounded.
const DRAIN_BATCH: usize = 64;
/// `owner` of answers that nobody in particular takes: a number no submitter has.
const NOBODY: u32 = u32::MAX;

/// The state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// On the ring.
    Issued,
    /// Its write is done; the flush that makes it durable is on the ring (FUA).
    FlushAfter,
}

/// A request in flight as we know it; the ring's copy belongs to the peer.
#[derive(Debug, Default)]
struct Shadow {
    work: Option<(Merged, Stage)>,
    /// The operation that the answer must echo.
    operation: u8,
    bounce: Option<Buffer>,
    /// References that end with the request.
    transient: Vec<u32>,
    /// The writes that a flush covers.
    coverage: Option<Coverage>,
}

/// The parts of a queue, besides its ring.
pub struct QueueSetup {
    /// Its number among the connection's queues.
    pub index: usize,
    pub properties: DiskProperties,
    pub memory: Arc<GrantedMemory>,
    /// Pages for bounces, this queue's own.
    pub bounce: Frames,
    /// First of `entries` frames, one for each tag's indirect segments.
    pub indirect_frame: u32,
    pub durability: Arc<Durability>,
    pub trouble: Arc<Trouble>,
    /// Bounds of one ring request.
    pub merge: MergeLimits,
    /// Looked at only while requests are held.
    pub clock: Arc<dyn Clock>,
}

/// See the module's documentation. Used under its lock.
pub struct HardwareQueue<M> {
    ring: FrontRing,
    setup: QueueSetup,
    shadow: Vec<Shadow>,
    free_tags: Vec<u32>,
    backlog: Backlog,
    /// Answers, and sectors of their requests.
    work: Work,
    /// Requests of submitters that are on the ring, merged or not.
    carried: usize,
    /// Of the policies that hold requests.
    limit: Option<Held>,
    pub owners: Owners,
    segments: Vec<Segment>,
    /// The last request that was tried found no pages or no grants.
    starved: bool,
    /// Why the queue answers everything with an error.
    broken: Option<String>,
    /// The ring makes no sense: nothing more is put there or taken from there, and all waits for the next connection.
    stuck: bool,
    /// The connection is over and all is parked: submitters look for the next one.
    stopped: bool,
    /// For people who want to know; it costs a look at the clock for each batch.
    counting: Option<Box<Counting>>,
    policy: PhantomData<M>,
}

/// A hardware queue and its doorbell.
pub struct SharedQueue<M> {
    pub state: Mutex<HardwareQueue<M>>,
    pub channel: Box<dyn EventChannel>,
}

impl<M: MergePolicy> HardwareQueue<M> {
    pub fn new(ring: FrontRing, setup: QueueSetup) -> HardwareQueue<M> {
        let entries = ring.entries();
        let limit = M::IN_FLIGHT.map(|bounds| Held {
            limit: Limit::new(bounds, entries),
            quiet_since: setup.clock.now(),
        });
        HardwareQueue {
            ring,
            setup,
            shadow: (0..entries).map(|_| Shadow::default()).collect(),
            free_tags: (0..entries).rev().collect(),
            backlog: Backlog::default(),
            work: Work::default(),
            carried: 0,
            limit,
            owners: Owners::default(),
            segments: Vec::new(),
            starved: false,
            broken: None,
            stuck: false,
            stopped: false,
            counting: None,
            policy: PhantomData,
        }
    }

    /// True once everything is parked: this queue takes nothing any more.
    #[inline]
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Entries of the ring.
    pub fn entries(&self) -> u32 {
        self.ring.entries()
    }

    /// Takes a submitter out; what it still has in flight is dropped when it is answered.
    pub fn leave(&mut self, number: u32) {
        let before = self.backlog.len();
        self.backlog.forget(number);
        self.owners.leave(number, before - self.backlog.len());
    }

    /// Starts to count, or starts anew.
    pub fn count(&mut self) {
        self.counting = Some(Box::new(Counting::new()));
    }

    pub fn statistics(&mut self) -> Option<Statistics> {
        self.account();
        self.counting.as_ref().map(|c| c.sums())
    }

    /// To be called before anything changes what waits or is on the ring.
    #[inline]
    fn account(&mut self) {
        if let Some(counting) = &mut self.counting {
            let in_flight = self.shadow.len() - self.free_tags.len();
            counting.tick(self.backlog.len(), in_flight);
        }
    }

    /// Issues what waits, as far as tags go; true if the back end wants to be notified.
    pub fn dispatch(&mut self, tracer: &mut Tracer, me: u32, done: &mut Vec<Completion>) -> bool {
        if self.broken.is_some() {
            for merged in self.backlog.take_all() {
                self.owners.finish(merged, Status::IoError, me, done);
            }
            return false;
        }
        if self.stuck {
            return false;
        }
        if self.backlog.holds() && !planted::has(Plant::HeldNotReleased) {
            self.release();
        }
        while let Some(&tag) = self.free_tags.last() {
            let Some(merged) = self.backlog.pop() else {
                break;
            };
            let carried = 1 + merged.rest.len();
            match self.issue(merged, tag, tracer) {
                Ok(()) => {
                    self.carried += carried;
                    self.free_tags.pop();
                }
                Err(merged) => {
                    // No pages or grants now; answers on their way bring some back.
                    self.starved = true;
                    let nothing_comes = self.free_tags.len() == self.shadow.len();
                    if nothing_comes {
                        self.owners.nudge(merged.owner);
                    }
                    self.backlog.put_back(*merged);
                    break;
                }
            }
        }
        self.ring.publish()
    }

    /// Of the last `count` requests that were inserted, tells which wait for a tag.
    #[cold]
    #[inline(never)]
    pub fn trace_waiting(&self, tracer: &mut Tracer, count: usize) {
        let waiting = self.backlog.newest().take(count);
        tracer.requests(Phase::Sleep, waiting.map(|merged| &*merged.first));
    }

    fn issue(&mut self, merged: Merged, tag: u32, tracer: &mut Tracer) -> Result<(), Box<Merged>> {
        let request = &merged.first;
        let id = u64::from(tag);
        let shadow = &mut self.shadow[tag as usize];
        match request.op {
            Op::Read | Op::Write => return self.issue_data(merged, tag, tracer),
            Op::Flush => {
                shadow.operation = flush_operation(&self.setup.properties);
                shadow.coverage = Some(self.setup.durability.now());
                self.ring.put_rw(&header(shadow.operation, 0, id, 0), &[]);
            }
            Op::Discard | Op::WriteZeroes => {
                let secure = request.flags.contains(RequestFlags::SECURE);
                shadow.operation = wire::OP_DISCARD;
                self.ring.put(&DiscardRequest {
                    operation: wire::OP_DISCARD,
                    flag: if secure { wire::DISCARD_SECURE } else { 0 },
                    handle: 0,
                    pad: 0,
                    id,
                    sector_number: request.sector,
                    nr_sectors: request.sectors,
                });
            }
        }
        tracer.request(Phase::Issue, request);
        shadow.work = Some((merged, Stage::Issued));
        Ok(())
    }

    fn issue_data(
        &mut self,
        merged: Merged,
        tag: u32,
        tracer: &mut Tracer,
    ) -> Result<(), Box<Merged>> {
        let is_read = merged.first.op == Op::Read;
        let most = most_segments(&self.setup.properties);
        let mut segments = std::mem::take(&mut self.segments);
        segments.clear();
        let direct = merged.segments as usize <= most
            && merged.requests().all(|r| self.setup.memory.reaches(r));
        let bounce = if direct {
            None
        } else {
            let len = merged.sectors as usize * 512;
            let Some(frame) = self.setup.bounce.take(len.div_ceil(PAGE_SIZE) as u32) else {
                self.segments = segments;
                return Err(Box::new(merged));
            };
            let at = frame as usize * PAGE_SIZE;
            Buffer::new(self.setup.memory.frames.memory(), at, len)
        };
        // The back end writes to our pages for a read, and only reads them for a write.
        let granted = match &bounce {
            Some(run) => {
                if !is_read {
                    copy_bounce(merged.requests(), run, true);
                }
                self.setup.memory.append(run, !is_read, &mut segments)
            }
            None => merged
                .requests()
                .flat_map(|r| &r.buffers)
                .all(|b| self.setup.memory.append(b, !is_read, &mut segments)),
        };
        let indirect = (granted && segments.len() > wire::MAX_SEGMENTS).then(|| {
            self.setup
                .memory
                .grant(self.setup.indirect_frame + tag, true)
        });
        if !granted || indirect == Some(None) {
            segments
                .iter()
                .for_each(|segment| self.setup.memory.done(segment.gref));
            if let Some(run) = &bounce {
                give_run(&self.setup.bounce, run);
            }
            self.segments = segments;
            return Err(Box::new(merged));
        }
        let operation = if is_read {
            wire::OP_READ
        } else {
            wire::OP_WRITE
        };
        let id = u64::from(tag);
        let shadow = &mut self.shadow[tag as usize];
        if let Some(Some(gref)) = indirect {
            let at = (self.setup.indirect_frame + tag) as usize * PAGE_SIZE;
            let page = self.setup.memory.frames.memory();
            page.write(at, segments.as_bytes());
            let mut grefs = [0; wire::MAX_INDIRECT_PAGES];
            grefs[0] = gref;
            self.ring.put(&IndirectRequest {
                operation: wire::OP_INDIRECT,
                indirect_op: operation,
                nr_segments: segments.len() as u16,
                pad: 0,
                id,
                sector_number: merged.sector,
                handle: 0,
                pad2: 0,
                indirect_grefs: grefs,
                pad3: 0,
            });
            if self.setup.memory.is_transient() {
                shadow.transient.push(gref);
            }
        } else {
            let header = header(operation, segments.len() as u8, id, merged.sector);
            self.ring.put_rw(&header, &segments);
        }
        if self.setup.memory.is_transient() {
            shadow.transient.extend(segments.iter().map(|s| s.gref));
        }
        self.segments = segments;
        tracer.requests(Phase::Issue, merged.requests().map(|r| &**r));
        shadow.operation = operation;
        shadow.bounce = bounce;
        shadow.work = Some((merged, Stage::Issued));
        Ok(())
    }

    /// Takes answers off the ring: those of `me` go to `done`, others to their owners' completion queues.
    pub fn drain(&mut self, me: u32, done: &mut Vec<Completion>) {
        if let Err(why) = self.take_answers(DRAIN_BATCH, me, done) {
            self.break_off(&why, me, done);
        }
    }

    fn take_answers(
        &mut self,
        most: usize,
        me: u32,
        done: &mut Vec<Completion>,
    ) -> Result<(), String> {
        if self.stuck || self.stopped {
            return Ok(());
        }
        self.account();
        let before = self.work.pieces;
        for _ in 0..most {
            let Some(response) = self.ring.take().map_err(|e| e.to_string())? else {
                break;
            };
            self.answered(&response, me, done)?;
        }
        if self.backlog.holds() && self.work.pieces != before {
            self.note_answers();
        }
        Ok(())
    }

    /// The back end makes no sense: from here on its connection is over.
    #[cold]
    fn break_off(&mut self, why: &str, me: u32, done: &mut Vec<Completion>) {
        if self.setup.trouble.recovers.load(Ordering::Relaxed) {
            self.stuck = true;
        } else {
            self.fail(why, me, done);
        }
        self.setup.trouble.report(why);
    }

    /// Ends this ring: takes the answers that are there, and parks all the rest with its submitters.
    pub fn park(&mut self) {
        let entries = self.shadow.len();
        if let Err(why) = self.take_answers(entries, NOBODY, &mut Vec::new()) {
            tracing::debug!("the last answers of a ring: {why}");
        }
        self.stopped = true;
        let shadow = std::mem::take(&mut self.shadow);
        let in_flight = shadow.into_iter().filter_map(|s| s.work.map(|w| w.0));
        for merged in in_flight.chain(self.backlog.take_all()) {
            self.owners.park(merged);
        }
    }

    fn answered(
        &mut self,
        response: &Response,
        me: u32,
        done: &mut Vec<Completion>,
    ) -> Result<(), String> {
        let tag = usize::try_from(response.id).unwrap_or(usize::MAX);
        let Some((shadow, (merged, stage))) = self
            .shadow
            .get_mut(tag)
            .and_then(|s| s.work.take().map(|w| (s, w)))
        else {
            return Err(format!(
                "the back end answered request {} that is not in flight",
                response.id
            ));
        };
        if response.operation != shadow.operation {
            let why = format!(
                "the back end answered operation {} with {}",
                shadow.operation, response.operation
            );
            shadow.work = Some((merged, stage));
            return Err(why);
        }
        let status = match response.status {
            wire::RSP_OKAY => Status::Ok,
            wire::RSP_EOPNOTSUPP => Status::Unsupported,
            _ => Status::IoError,
        };
        self.starved = false;
        for gref in shadow.transient.drain(..) {
            self.setup.memory.done(gref);
        }
        if let Some(run) = shadow.bounce.take() {
            if merged.first.op == Op::Read && status == Status::Ok {
                copy_bounce(merged.requests(), &run, false);
            }
            give_run(&self.setup.bounce, &run);
        }
        if status == Status::Ok && merged.first.op.is_write() {
            self.setup.durability.answered(self.setup.index);
        }
        if let Some(coverage) = shadow.coverage.take()
            && status == Status::Ok
        {
            self.setup.durability.flushed(&coverage);
        }
        let durable = merged.first.flags.contains(RequestFlags::FUA);
        if stage == Stage::Issued
            && durable
            && status == Status::Ok
            && has_flush(&self.setup.properties)
        {
            shadow.operation = flush_operation(&self.setup.properties);
            self.ring
                .put_rw(&header(shadow.operation, 0, tag as u64, 0), &[]);
            shadow.work = Some((merged, Stage::FlushAfter));
            return Ok(());
        }
        self.free_tags.push(tag as u32);
        self.carried -= 1 + merged.rest.len();
        self.work.pieces += 1;
        self.work.amount += merged.sectors;
        if status != Status::Ok && !merged.rest.is_empty() {
            self.split(merged);
        } else {
            self.owners.finish(merged, status, me, done);
        }
        Ok(())
    }

    /// A merged request failed: each of its requests tries alone, so that one bad sector fails one request.
    #[cold]
    fn split(&mut self, merged: Merged) {
        let number = merged.owner;
        self.owners.add_work(number, merged.rest.len());
        for r in merged.rest.into_iter().rev().chain([merged.first]) {
            self.backlog.put_back(Merged {
                owner: number,
                sector: r.sector,
                sectors: r.sectors,
                segments: super::plug::count_segments(&r),
                first: r,
                rest: Vec::new(),
            });
        }
    }

    /// Answers everything with an error, now and from now on.
    #[cold]
    fn fail(&mut self, why: &str, me: u32, done: &mut Vec<Completion>) {
        if self.broken.is_none() {
            tracing::error!("ring stopped: {why}");
            self.broken = Some(why.to_owned());
        }
        for tag in 0..self.shadow.len() {
            if let Some((merged, _)) = self.shadow[tag].work.take() {
                // The bounce run and grants stay as they are: the peer may still write there.
                self.owners.finish(merged, Status::IoError, me, done);
            }
        }
        for merged in self.backlog.take_all() {
            self.owners.finish(merged, Status::IoError, me, done);
        }
    }

    /// Asks for an event at the next answer; true if there is something to do now.
    pub fn arm(&mut self) -> bool {
        self.broken.is_none() && !self.stuck && !self.stopped && self.ring.arm()
    }

    /// True if requests wait while tags are free: a dispatch may move them.
    pub fn can_dispatch(&self) -> bool {
        let may_issue = !self.free_tags.is_empty()
            && (!self.starved || self.free_tags.len() == self.shadow.len());
        let released = self.backlog.releases(self.room(), self.work.pieces);
        let waits = self.backlog.ready() > 0 || released;
        let fails = self.broken.is_some() && self.backlog.len() > 0;
        !self.stuck && (fails || waits && may_issue)
    }
}

fn give_run(frames: &Frames, run: &Buffer) {
    frames.give(
        (run.offset() / PAGE_SIZE) as u32,
        run.len().div_ceil(PAGE_SIZE) as u32,
    );
}

/// Most segments of one ring request: what was offered for indirect ones, at most 256 (one indirect page), else 11.
pub fn most_segments(p: &DiskProperties) -> usize {
    usize::from(p.max_indirect_segments).clamp(wire::MAX_SEGMENTS, wire::MAX_INDIRECT_SEGMENTS)
}

pub fn has_flush(p: &DiskProperties) -> bool {
    p.flush || p.barrier
}

/// Linux prefers flush where both are offered; an empty barrier drains and flushes too.
fn flush_operation(p: &DiskProperties) -> u8 {
    if p.flush {
        wire::OP_FLUSH
    } else {
        wire::OP_WRITE_BARRIER
    }
}

fn header(operation: u8, nr_segments: u8, id: u64, sector_number: u64) -> RequestHeader {
    RequestHeader {
        operation,
        nr_segments,
        handle: 0,
        pad: 0,
        id,
        sector_number,
    }
}

/// True if the device itself can do what the request asks; else the answer, without the ring.
pub fn immediate(request: &Request, p: &DiskProperties) -> Option<Status> {
    match request.op {
        Op::Flush if !has_flush(p) => Some(Status::Ok),
        Op::Discard if request.flags.contains(RequestFlags::SECURE) && !p.discard_secure => {
            Some(Status::Unsupported)
        }
        Op::WriteZeroes => Some(Status::Unsupported),
        _ => None,
    }
}
