//! One thread of a job: its queue, its requests in flight, its clock.

use super::plan::{Io, Plan};
use super::report::JobReport;
use super::run::{LiveCounters, RunOptions};
use super::spec::{JobSpec, Verify};
use super::usage;
use super::verify::{Checker, Expect, Written};
use pvblk_block::{
    BlockDevice, Buffer, BufferSource, Completion, Error, ErrorKind, Op, Queue, QueueContext,
    Readiness, Request, RequestFlags, SECTOR, Status,
};
use pvblk_sys::{PollEvent, Poller};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Longest sleep, after which a request to stop is noticed.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);
/// Longest time for requests in flight to come back once the run is to stop.
const DRAIN_TIME: Duration = Duration::from_secs(30);
/// Most mismatches that are kept.
const MOST_MISMATCHES: usize = 100;
/// Time between two samples of the rate.
const SAMPLE: Duration = Duration::from_millis(500);
/// errno(3) of an I/O error, and of wrong data.
const EIO: i32 = 5;
const EILSEQ: i32 = 84;

/// The purpose of a request in flight.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Load,
    /// Reads back written data.
    Check,
    Flush,
}

struct RequestSlot {
    request: Option<Box<Request>>,
    buffer: Buffer,
    io: Io,
    purpose: Purpose,
    in_flight: bool,
    start: Instant,
    issued: Instant,
}

/// The next thing to do.
enum Next {
    Issue(Io, Purpose),
    /// Submit nothing before this time, or before a completion.
    Hold(Option<Instant>),
    End,
}

/// Rates of the time since the last sample.
struct Sampler {
    next: Instant,
    before: [(u64, u64); 2],
}

pub(super) struct JobThread {
    spec: JobSpec,
    plan: Plan,
    queue: Queue,
    /// True if completions don't come on a descriptor: the device completes while it takes requests, or by
    /// deadline. True until the first request shows otherwise.
    immediate: bool,
    submitted: bool,
    source: Option<Arc<dyn BufferSource>>,
    slots: Vec<RequestSlot>,
    free: Vec<u32>,
    batch: Vec<Box<Request>>,
    batch_ids: Vec<u32>,
    done: Vec<Completion>,
    poller: Poller,
    events: Vec<PollEvent>,
    spin: Duration,
    stop: Arc<std::sync::atomic::AtomicBool>,
    counters: Arc<LiveCounters>,
    now: Instant,
    /// End of the load, if it has a time limit.
    deadline: Option<Instant>,
    measured_from: Instant,
    ramping: bool,
    sampler: Sampler,
    /// A request that the plan has given and that has to wait.
    ahead: Option<Io>,
    due: [Instant; 2],
    flush_due: bool,
    writes: u32,
    since_pause: u32,
    pause_until: Option<Instant>,
    verify: Option<Verify>,
    checker: Checker,
    written: Option<Written>,
    read_back: usize,
    checking: bool,
    failed: bool,
    report: JobReport,
}

impl JobThread {
    /// Opens a queue of `device` for one thread of `spec`, with all of the thread's memory.
    pub(super) fn open(
        spec: &JobSpec,
        plan: Plan,
        seed: u64,
        device: &Arc<dyn BlockDevice>,
        context: &QueueContext,
        counters: Arc<LiveCounters>,
        options: &RunOptions<'_>,
    ) -> Result<JobThread, Error> {
        let queue = Queue::open(device, context)?;
        let poller = Poller::new().map_err(|e| Error::os("waiting for completions", e))?;
        let source = device.buffer_source();
        let len = (spec.max_bytes() as usize).next_multiple_of(pvblk_sys::PAGE_SIZE);
        let now = Instant::now();
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut noise = vec![0; len];
        rng.fill(&mut noise);
        let mut slots: Vec<RequestSlot> = Vec::new();
        for id in 0..u64::from(spec.iodepth) {
            let buffer = match &source {
                Some(s) => s.allocate(len).ok_or_else(|| {
                    Error::new(
                        ErrorKind::Exhausted,
                        "no shared memory left for the buffers: ask for more, as in rings:…,memory=256M",
                    )
                }),
                None => Buffer::anonymous(len).map_err(|e| Error::os("memory for the buffers", e)),
            };
            let buffer = match buffer {
                Ok(b) => b,
                Err(e) => {
                    give_back(source.as_ref(), &mut slots);
                    return Err(e);
                }
            };
            // Buffers hold neither zeros, which devices may treat in their own way, nor untouched
            // pages.
            buffer.write(0, &noise);
            slots.push(RequestSlot {
                request: Some(Request::new(Op::Flush, 0, 0, id)),
                buffer,
                io: Io {
                    write: false,
                    offset: 0,
                    len: 0,
                },
                purpose: Purpose::Load,
                in_flight: false,
                start: now,
                issued: now,
            });
        }
        let written = spec
            .checked()
            .filter(|v| spec.writes() && (v.after || v.only))
            .map(|_| Written::new(plan.part(), spec.unit_bytes()));
        let depth = spec.iodepth as usize;
        let mut thread = JobThread {
            plan,
            queue,
            immediate: true,
            submitted: false,
            source,
            slots,
            free: (0..spec.iodepth).rev().collect(),
            batch: Vec::with_capacity(depth),
            batch_ids: Vec::with_capacity(depth),
            done: Vec::with_capacity(depth),
            poller,
            events: Vec::with_capacity(4),
            spin: options.spin,
            stop: Arc::clone(&options.stop),
            counters,
            now,
            deadline: None,
            measured_from: now,
            ramping: false,
            sampler: Sampler {
                next: now,
                before: Default::default(),
            },
            ahead: None,
            due: [now; 2],
            flush_due: false,
            writes: 0,
            since_pause: 0,
            pause_until: None,
            verify: spec.checked(),
            checker: Checker::new(seed, spec.unit_bytes()),
            written,
            read_back: 0,
            checking: false,
            failed: false,
            report: JobReport {
                name: spec.name.clone(),
                grouped: spec.group_reporting,
                options: spec.options.clone(),
                threads: 1,
                iodepth: spec.iodepth,
                ..JobReport::default()
            },
            spec: spec.clone(),
        };
        thread.look_for_fd()?;
        Ok(thread)
    }

    /// Runs the job to its end.
    pub(super) fn run(mut self) -> JobReport {
        // Times of a modelled device are as exact as its user's timers.
        let _ = pvblk_sys::cpu::set_timer_slack_ns(1);
        let before = usage::of_this_thread();
        let started = Instant::now();
        self.now = started;
        self.due = [started; 2];
        self.ramping = !self.spec.ramp_time.is_zero();
        self.measure_from(started);
        self.deadline = self
            .spec
            .runtime
            .and_then(|t| started.checked_add(t + self.spec.ramp_time));
        if self.verify.is_some_and(|v| v.only) {
            self.replay();
        } else {
            self.phase();
            let time = self.now - self.measured_from;
            self.report.read.runtime = time;
            self.report.write.runtime = time;
        }
        if self.verify.is_some_and(|v| v.after || v.only)
            && self.written.is_some()
            && !self.failed
            && !self.stopping()
        {
            self.read_back();
        }
        for op in [&mut self.report.read, &mut self.report.write] {
            if op.ios == 0 {
                op.runtime = Duration::ZERO;
            }
        }
        self.report.elapsed = started.elapsed();
        self.report.usage = usage::of_this_thread().since(&before, self.report.elapsed);
        if self.queue.in_flight() == 0 {
            give_back(self.source.as_ref(), &mut self.slots);
        }
        std::mem::take(&mut self.report)
    }

    /// Notes the writes that the job would make, without writing.
    fn replay(&mut self) {
        while let Some(io) = self.plan.next() {
            if let (true, Some(w)) = (io.write, &mut self.written) {
                w.note(io.offset, io.len);
            }
        }
    }

    fn read_back(&mut self) {
        self.checking = true;
        self.deadline = None;
        let start = Instant::now();
        let before = self.report.read.ios;
        self.phase();
        let time = self.now.saturating_duration_since(start);
        let read = &mut self.report.read;
        // A job that only writes has read nothing before the check.
        read.runtime = if before == 0 {
            time
        } else {
            read.runtime + time
        };
    }

    /// Submits requests until the end, and waits for the last completion.
    fn phase(&mut self) {
        let mut ended = false;
        let mut stopped_at = None;
        loop {
            let mut hold = None;
            while !ended && let Some(&id) = self.free.last() {
                if self.failed || self.stopping() {
                    ended = true;
                    break;
                }
                match self.next() {
                    Next::Issue(io, purpose) => {
                        self.free.pop();
                        self.prepare(id, io, purpose);
                        if self.immediate {
                            self.submit();
                            self.reap();
                        } else if self.batch.len() >= self.spec.iodepth_batch as usize {
                            self.submit();
                        }
                    }
                    Next::Hold(until) => {
                        hold = until;
                        break;
                    }
                    Next::End => ended = true,
                }
            }
            self.submit();
            if self.reap() > 0 {
                continue;
            }
            if ended && self.queue.in_flight() == 0 {
                return;
            }
            if (ended || self.stopping()) && self.stopping() {
                let since = *stopped_at.get_or_insert(self.now);
                if self.now.saturating_duration_since(since) > DRAIN_TIME {
                    let n = self.queue.in_flight();
                    self.fail(EIO, format!("{n} requests did not come back"));
                    return;
                }
            }
            self.wait(hold);
        }
    }

    fn stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    #[inline]
    fn next(&mut self) -> Next {
        if self.checking {
            return self.next_check();
        }
        let busy = self.queue.in_flight() + self.batch.len() > 0;
        if self.flush_due {
            // The flush is to cover all writes before it, so they have to be done.
            if busy {
                return Next::Hold(None);
            }
            self.flush_due = false;
            let nothing = Io {
                write: true,
                offset: 0,
                len: 0,
            };
            return Next::Issue(nothing, Purpose::Flush);
        }
        if self.deadline.is_some_and(|end| self.now >= end) {
            return Next::End;
        }
        if self.since_pause >= self.spec.thinktime_blocks && !self.spec.thinktime.is_zero() {
            if busy {
                return Next::Hold(None);
            }
            let until = *self
                .pause_until
                .get_or_insert(self.now + self.spec.thinktime);
            if self.now < until {
                return Next::Hold(Some(until));
            }
            self.pause_until = None;
            self.since_pause = 0;
        }
        let Some(io) = self.ahead.take().or_else(|| self.plan.next()) else {
            return Next::End;
        };
        if let Some(rate) = self.spec.rate_iops {
            let due = &mut self.due[usize::from(io.write)];
            if *due > self.now {
                self.ahead = Some(io);
                return Next::Hold(Some(*due));
            }
            *due += Duration::from_secs(1) / rate;
        }
        // Of two writes in flight to the same place either may win, and then nothing can be
        // checked.
        if self.written.is_some() && io.write && self.overlaps(&io) {
            self.ahead = Some(io);
            return Next::Hold(None);
        }
        self.since_pause += 1;
        if io.write {
            self.writes += 1;
            self.flush_due = self
                .spec
                .flush_every
                .is_some_and(|n| self.writes.is_multiple_of(n));
        }
        Next::Issue(io, Purpose::Load)
    }

    fn next_check(&mut self) -> Next {
        let most = self.spec.max_bytes();
        let known = |w: &Written| w.next_known(self.read_back, most);
        let Some((offset, len, next)) = self.written.as_ref().and_then(known) else {
            return Next::End;
        };
        self.read_back = next;
        let io = Io {
            write: false,
            offset,
            len,
        };
        Next::Issue(io, Purpose::Check)
    }

    fn overlaps(&self, io: &Io) -> bool {
        let end = io.offset + u64::from(io.len);
        self.slots.iter().any(|s| {
            let other_end = s.io.offset + u64::from(s.io.len);
            s.in_flight && s.io.write && s.io.offset < end && io.offset < other_end
        })
    }

    fn prepare(&mut self, id: u32, io: Io, purpose: Purpose) {
        let slot = &mut self.slots[id as usize];
        // A free slot holds its request; without one there is nothing to send.
        let Some(mut request) = slot.request.take() else {
            return;
        };
        let op = match (purpose, io.write) {
            (Purpose::Flush, _) => Op::Flush,
            (_, true) => Op::Write,
            (_, false) => Op::Read,
        };
        let (sector, sectors) = (io.offset / SECTOR, u64::from(io.len) / SECTOR);
        request.reset(op, RequestFlags::empty(), sector, sectors, u64::from(id));
        let fits = request.buffers.first().map(Buffer::len) == Some(io.len as usize);
        if !fits {
            request.buffers.clear();
            if purpose != Purpose::Flush {
                let slice = slot.buffer.slice(0, io.len as usize);
                request.buffers.extend(slice);
            }
        }
        if let (Op::Write, Some(_)) = (op, self.verify) {
            let number = self
                .written
                .as_mut()
                .map_or(1, |w| w.note(io.offset, io.len));
            self.checker.fill(&slot.buffer, io.len, io.offset, number);
        }
        slot.io = io;
        slot.purpose = purpose;
        slot.in_flight = true;
        self.batch.push(request);
        self.batch_ids.push(id);
        let in_flight = self.queue.in_flight() + self.batch.len();
        self.report.depths.record(in_flight);
    }

    /// Looks for the queue's descriptor: some queues have none before their first request.
    fn look_for_fd(&mut self) -> Result<(), Error> {
        if let (true, Some(fd)) = (self.immediate, self.queue.wait_fd()) {
            let added = self.poller.add(fd.as_fd(), 0, false);
            added.map_err(|e| Error::os("waiting for completions", e))?;
            self.immediate = false;
        }
        Ok(())
    }

    #[inline]
    fn submit(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        self.report.submits.record(self.batch.len());
        let start = Instant::now();
        self.queue.submit(&mut self.batch);
        if !self.submitted {
            self.submitted = true;
            if let Err(e) = self.look_for_fd() {
                self.fail(EIO, e.to_string());
            }
        }
        // Such a device has done all the work by now, which isn't the time of the submission.
        self.now = if self.immediate {
            start
        } else {
            Instant::now()
        };
        for id in self.batch_ids.drain(..) {
            let slot = &mut self.slots[id as usize];
            slot.start = start;
            slot.issued = self.now;
            if !self.immediate && slot.purpose != Purpose::Flush {
                let op = match slot.io.write {
                    true => &mut self.report.write,
                    false => &mut self.report.read,
                };
                op.slat.record((self.now - start).as_nanos() as u64);
            }
        }
    }

    /// Takes completions and returns their number.
    #[inline]
    fn reap(&mut self) -> usize {
        let mut done = std::mem::take(&mut self.done);
        let n = self.queue.poll(&mut done);
        if n > 0 {
            self.now = Instant::now();
            self.report.completes.record(n);
            for c in done.drain(..) {
                self.complete(c);
            }
            self.tick();
        }
        self.done = done;
        n
    }

    #[inline]
    fn complete(&mut self, c: Completion) {
        let id = c.request.tag as usize;
        let slot = &mut self.slots[id];
        slot.request = Some(c.request);
        slot.in_flight = false;
        let (io, purpose) = (slot.io, slot.purpose);
        let clat = (self.now - slot.issued).as_nanos() as u64;
        let lat = (self.now - slot.start).as_nanos() as u64;
        self.free.push(id as u32);
        if c.status != Status::Ok {
            return self.failed_request(&io, purpose, c.status);
        }
        if purpose == Purpose::Flush {
            self.report.flush.record(lat);
            return;
        }
        let op = match io.write {
            true => &mut self.report.write,
            false => &mut self.report.read,
        };
        op.ios += 1;
        op.bytes += u64::from(io.len);
        op.clat.record(clat);
        op.lat.record(lat);
        self.counters.add(u64::from(io.len));
        if !io.write && self.verify.is_some() {
            self.check(id, &io, purpose);
        }
    }

    fn check(&mut self, id: usize, io: &Io, purpose: Purpose) {
        // The result of a read among writes depends on their order, so it isn't checked.
        if purpose == Purpose::Load && self.spec.writes() {
            return;
        }
        let report = &mut self.report;
        let before = report.mismatch_count;
        let written = self.written.as_ref();
        let expect = |offset| written.map_or(Expect::Anything, |w| w.expected(offset));
        let buffer = &self.slots[id].buffer;
        self.checker.check(buffer, io.len, io.offset, expect, |m| {
            report.mismatch_count += 1;
            if report.mismatches.len() < MOST_MISMATCHES {
                report.mismatches.push(m);
            }
        });
        let wrong = report.mismatch_count - before;
        if wrong > 0 {
            report.read.errors += wrong;
            let first = report.mismatches.first().map(ToString::to_string);
            report.error.get_or_insert(first.unwrap_or_default());
            report.errno = EILSEQ;
            self.failed |= self.verify.is_some_and(|v| v.fatal);
        }
    }

    #[cold]
    fn failed_request(&mut self, io: &Io, purpose: Purpose, status: Status) {
        let (what, op) = match (purpose, io.write) {
            (Purpose::Flush, _) => ("flush", &mut self.report.write),
            (_, true) => ("write", &mut self.report.write),
            (_, false) => ("read", &mut self.report.read),
        };
        op.errors += 1;
        if let (true, Purpose::Load, Some(w)) = (io.write, purpose, &mut self.written) {
            w.forget(io.offset, io.len);
        }
        let text = format!(
            "a {what} of {} bytes at byte {} ended with {status:?}",
            io.len, io.offset
        );
        self.report.error.get_or_insert(text);
        if self.report.errno == 0 {
            self.report.errno = EIO;
        }
        self.failed |= !self.spec.continue_on_error;
    }

    #[cold]
    fn fail(&mut self, errno: i32, text: String) {
        self.report.error.get_or_insert(text);
        self.report.errno = errno;
        self.failed = true;
    }

    /// Ends the ramp and takes samples of the rate when their time has come.
    #[inline]
    fn tick(&mut self) {
        if self.now < self.sampler.next {
            return;
        }
        let ramp_end = self.measured_from + self.spec.ramp_time;
        if self.ramping {
            if self.now >= ramp_end {
                self.ramping = false;
                self.report.read.clear();
                self.report.write.clear();
                self.report.flush = Default::default();
                self.measure_from(self.now);
            }
            return;
        }
        let late = self.now - self.sampler.next;
        let seconds = (SAMPLE + late).as_secs_f64();
        let ops = [&mut self.report.read, &mut self.report.write];
        for (op, before) in ops.into_iter().zip(&mut self.sampler.before) {
            if op.ios > 0 {
                let bytes = op.bytes.saturating_sub(before.0) as f64;
                op.bw_kib.record(bytes / 1024.0 / seconds);
                let ios = op.ios.saturating_sub(before.1) as f64;
                op.iops_samples.record(ios / seconds);
            }
            *before = (op.bytes, op.ios);
        }
        self.sampler.next = self.now + SAMPLE;
    }

    fn measure_from(&mut self, now: Instant) {
        self.measured_from = now;
        self.sampler.next = if self.ramping { now } else { now + SAMPLE };
        self.sampler.before = Default::default();
    }

    /// Waits for a completion, or until `hold`.
    fn wait(&mut self, hold: Option<Instant>) {
        if !self.spin.is_zero() && self.queue.in_flight() > 0 {
            let until = Instant::now() + self.spin;
            while Instant::now() < until {
                if self.reap() > 0 {
                    return;
                }
                std::hint::spin_loop();
            }
        }
        let armed = self.queue.arm();
        if let Err(e) = self.look_for_fd() {
            self.fail(EIO, e.to_string());
        }
        self.now = Instant::now();
        let Readiness::Wait(due) = armed else {
            return;
        };
        let until = due.into_iter().chain(hold).min();
        let time = until.map_or(LONGEST_SLEEP, |t| {
            t.saturating_duration_since(self.now).min(LONGEST_SLEEP)
        });
        if self.immediate {
            std::thread::sleep(time);
        } else {
            self.events.clear();
            if let Err(e) = self.poller.wait(&mut self.events, Some(time)) {
                self.fail(EIO, format!("waiting for completions: {e}"));
            }
            if !self.events.is_empty() {
                self.queue.woken();
            }
        }
        if hold.is_some() {
            self.now = Instant::now();
        }
    }
}

/// Returns buffers to their source. The device must not use them any more.
fn give_back(source: Option<&Arc<dyn BufferSource>>, slots: &mut Vec<RequestSlot>) {
    let Some(source) = source else { return };
    for slot in slots.drain(..) {
        source.free(slot.buffer);
    }
}
