//! One thread of the workload.

use super::target::{Disk, Target};
use crate::crash::journal::{CompletedWrite, Journal};
use crate::crash::{SECTORS, stamp};
use anyhow::{Context, Result, bail, ensure};
use pvblk_block::{
    Buffer, Completion, Op, Queue, QueueContext, Readiness, Request, RequestFlags, Status,
};
use pvblk_sys::Poller;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const DEPTH: usize = 24;
/// Most sectors of one request.
const MOST: u64 = 64;

/// The state of one request in flight.
struct InFlight {
    buffer: Buffer,
    request: Option<Box<Request>>,
    /// Number of a write.
    number: u32,
    sector: u64,
    sectors: u64,
    /// [`Journal::floor`] when it was sent.
    floor: u32,
    /// [`Worker::told`] when it was sent.
    told: u32,
    /// The completed writes that a flush covers: those completed when it was sent.
    covers: Vec<CompletedWrite>,
}

impl InFlight {
    /// Marks the request's sectors as having nothing in flight.
    fn release(&self, busy: &mut [bool], first: u64) {
        let at = (self.sector - first.min(self.sector)) as usize;
        busy[at..at + self.sectors as usize].fill(false);
    }
}

fn open_queue(disk: &Disk, first: u64) -> Result<Queue> {
    let mut context = QueueContext::new(DEPTH as u32);
    context.index = u32::from(first > 0);
    Ok(Queue::open(&disk.device(), &context)?)
}

/// One thread of the workload: a queue, and a part of the disk that only this worker writes to.
pub(super) struct Worker {
    target: Arc<Target>,
    disk: Disk,
    queue: Queue,
    journal: Arc<Journal>,
    first: u64,
    sectors: u64,
    /// Sectors with a request in flight.
    busy: Vec<bool>,
    slots: Vec<InFlight>,
    free: Vec<usize>,
    rng: fastrand::Rng,
    poller: Poller,
    watches: bool,
    /// True if the disk loses nothing with its server's process.
    keeps: bool,
    /// The floor at which a failed flush or a lost connection last told that unflushed writes may be lost.
    told: u32,
    /// Number of flushes that failed although they were sent after the loss was told.
    late: usize,
    /// True if the connection is over.
    lost: bool,
}

impl Worker {
    /// A worker for `sectors` sectors from `first` on.
    pub fn open(
        target: &Arc<Target>,
        journal: Arc<Journal>,
        rng: fastrand::Rng,
        first: u64,
        sectors: u64,
        keeps: bool,
    ) -> Result<Worker> {
        let disk = target.device()?;
        let source = disk.device().buffer_source();
        let bytes = MOST as usize * 512;
        let mut slots = Vec::new();
        for i in 0..DEPTH {
            // Half of the buffers lie where the server reaches them, half have to be bounced.
            let buffer = match &source {
                Some(source) if i % 2 == 0 => source.allocate(bytes).context("no memory")?,
                _ => Buffer::anonymous(bytes)?,
            };
            slots.push(InFlight {
                buffer,
                request: Some(Request::new(Op::Flush, 0, 0, i as u64)),
                number: 0,
                sector: 0,
                sectors: 0,
                floor: 0,
                told: 0,
                covers: Vec::new(),
            });
        }
        Ok(Worker {
            queue: open_queue(&disk, first)?,
            target: Arc::clone(target),
            disk,
            journal,
            first,
            sectors,
            busy: vec![false; sectors as usize],
            slots,
            free: (0..DEPTH).collect(),
            rng,
            poller: Poller::new()?,
            watches: false,
            keeps,
            told: 0,
            late: 0,
            lost: false,
        })
    }

    /// Reads all of the worker's part. The contents that are read settle the writes that a killed process or
    /// a lost connection had in flight.
    pub fn check_all(&mut self) -> Result<()> {
        while !self.read_all()? {
            self.connect_again()?;
        }
        Ok(())
    }

    /// As [`Worker::check_all`]; false if the connection was lost on the way.
    fn read_all(&mut self) -> Result<bool> {
        let mut batch = Vec::new();
        let mut at = 0;
        while (at < self.sectors && !self.lost) || self.queue.in_flight() > 0 {
            while at < self.sectors && !self.free.is_empty() && !self.lost {
                let sectors = MOST.min(self.sectors - at);
                self.prepare(Op::Read, self.first + at, sectors, &mut batch)?;
                at += sectors;
            }
            self.queue.submit(&mut batch);
            self.wait(true)?;
        }
        Ok(!self.lost)
    }

    /// Makes a new connection when the last one is lost. An NBD client can't know whether the writes in
    /// flight, and those that no flush covers, are on the disk.
    fn connect_again(&mut self) -> Result<()> {
        while self.queue.in_flight() > 0 {
            self.wait(true)?;
        }
        self.disk = self.target.device()?;
        self.queue = open_queue(&self.disk, self.first)?;
        (self.poller, self.watches) = (Poller::new()?, false);
        self.lost = false;
        self.told = self.journal.floor();
        Ok(())
    }

    /// Works until it is told to stop.
    pub fn work(&mut self, stop: &AtomicBool) -> Result<()> {
        let mut batch = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..self.rng.usize(1..=8) {
                self.one(&mut batch)?;
            }
            self.queue.submit(&mut batch);
            self.wait(false)?;
            if self.lost {
                self.connect_again()?;
                self.check_all().context("after a lost connection")?;
            }
        }
        while self.queue.in_flight() > 0 {
            self.wait(false)?;
        }
        Ok(())
    }

    /// Adds one random request to `batch`, if a slot is free.
    fn one(&mut self, batch: &mut Vec<Box<Request>>) -> Result<()> {
        if self.free.is_empty() {
            return Ok(());
        }
        let dice = self.rng.u32(..100);
        if dice < 4 {
            return self.prepare(Op::Flush, 0, 0, batch);
        }
        // Requests mostly go to a small part, so that the same sectors come again soon, and to neighbours, so
        // that requests merge.
        let span = if self.rng.bool() { 512 } else { self.sectors };
        let at = self.rng.u64(..span);
        let most = if self.rng.u32(..4) == 0 { MOST } else { 8 };
        let sectors = self.rng.u64(1..=most).min(self.sectors - at);
        if self.busy[at as usize..(at + sectors) as usize].contains(&true) {
            return Ok(());
        }
        let op = if dice < 65 { Op::Write } else { Op::Read };
        self.prepare(op, self.first + at, sectors, batch)
    }

    fn prepare(
        &mut self,
        op: Op,
        sector: u64,
        sectors: u64,
        batch: &mut Vec<Box<Request>>,
    ) -> Result<()> {
        let index = self.free.pop().context("no free slot")?;
        let slot = &mut self.slots[index];
        let mut request = slot.request.take().context("a slot without a request")?;
        let fua = op == Op::Write && self.rng.u32(..10) == 0;
        let flags = if fua {
            RequestFlags::FUA
        } else {
            RequestFlags::empty()
        };
        request.reset(op, flags, sector, sectors, index as u64);
        (slot.sector, slot.sectors) = (sector, sectors);
        (slot.floor, slot.told) = (self.journal.floor(), self.told);
        if op == Op::Flush {
            slot.covers.clear();
            let all = (0..SECTORS).map(|s| self.journal.completed_write(s));
            slot.covers.extend(all);
        }
        if sectors > 0 {
            let data = slot.buffer.slice(0, sectors as usize * 512);
            let data = data.context("a request larger than its buffer")?;
            if op == Op::Write {
                slot.number = self.journal.next();
                stamp::fill(&data, sector, slot.number);
                for s in sector..sector + sectors {
                    self.journal.sent(s, slot.number);
                }
            }
            request.buffers.push(data);
        }
        let at = (sector - self.first.min(sector)) as usize;
        self.busy[at..at + sectors as usize].fill(true);
        batch.push(request);
        Ok(())
    }

    /// Takes completions, and sleeps if there are none. `settle`: data that is read now decides which write
    /// the sector holds.
    fn wait(&mut self, settle: bool) -> Result<()> {
        let mut done = Vec::new();
        if self.queue.poll(&mut done) == 0 {
            return self.sleep();
        }
        for completion in done {
            self.completed(completion, settle)?;
        }
        Ok(())
    }

    fn completed(&mut self, completion: Completion, settle: bool) -> Result<()> {
        let Completion {
            mut request,
            status,
        } = completion;
        let index = request.tag as usize;
        match (status, request.op) {
            (Status::Ok, Op::Read) => self.has_read(&request, settle)?,
            (Status::Ok, op) => {
                let (slot, journal) = (&mut self.slots[index], &self.journal);
                let fua = request.flags.contains(RequestFlags::FUA);
                for s in slot.sector..slot.sector + slot.sectors {
                    journal.done(s, slot.number);
                    if fua {
                        journal.stable(s, slot.number);
                    }
                }
                if op == Op::Flush {
                    // A failure that was on its way when this flush was sent has been taken by now. It tells
                    // of the writes that this flush covers, too.
                    let stable = slot.covers.iter().filter(|a| a.is_since(self.told));
                    stable.for_each(|a| journal.stable(a.sector, a.number));
                }
            }
            _ => self.has_failed(&request, status)?,
        }
        // A failed write may be on the disk or not: its sectors rest until all is read again.
        if status == Status::Ok || self.lost {
            self.slots[index].release(&mut self.busy, self.first);
        }
        request.buffers.clear();
        self.slots[index].request = Some(request);
        self.free.push(index);
        self.journal.count();
        Ok(())
    }

    /// Checks that the data that was read is one of the writes that the journal allows.
    fn has_read(&mut self, request: &Request, settle: bool) -> Result<()> {
        let floor = self.slots[request.tag as usize].floor;
        for b in &request.buffers {
            for (sector, held) in stamp::look(b, request.sector) {
                let allowed = self.journal.allowed(sector);
                let may = |number| allowed.holds(number, self.keeps, settle);
                match held {
                    Some(number) if may(number) => self.journal.saw(sector, number, floor),
                    Some(number) => {
                        bail!("sector {sector} holds write {number}; it may hold {allowed:?}")
                    }
                    None => bail!("sector {sector} is torn; it may hold {allowed:?}"),
                }
            }
        }
        Ok(())
    }

    /// Checks that the failure is one that is allowed. Only a lost connection fails requests, and only the
    /// loss of a killed server's volatile cache fails a flush or a write with FUA. The loss concerns the
    /// requests that each thread had sent before the first of them was told. A back end that tells a guest
    /// can't distinguish the flushes sent just after that from those sent just before, and fails both: at
    /// most as many as a guest has in flight.
    fn has_failed(&mut self, request: &Request, status: Status) -> Result<()> {
        if self.disk.is_lost() {
            self.lost = true;
            return Ok(());
        }
        let (slot, floor) = (&self.slots[request.tag as usize], self.journal.floor());
        let flushes = request.op == Op::Flush || request.flags.contains(RequestFlags::FUA);
        let in_time = slot.told != floor;
        let guest = matches!(*self.target, Target::Vhost(_)) && self.late < DEPTH;
        self.late = if in_time { 0 } else { self.late + 1 };
        ensure!(
            flushes && !self.keeps && (in_time || guest) && status == Status::IoError,
            "{:?} of {} sectors at {} ended as {status:?}",
            request.op,
            slot.sectors,
            slot.sector
        );
        self.told = floor;
        Ok(())
    }

    fn sleep(&mut self) -> Result<()> {
        let Readiness::Wait(deadline) = self.queue.arm() else {
            return Ok(());
        };
        let Some(fd) = self.queue.wait_fd() else {
            return Ok(());
        };
        if !self.watches {
            self.poller.add(fd, 0, false)?;
            self.watches = true;
        }
        // A signal doesn't wake this thread, so it looks now and then.
        let tick = Duration::from_millis(100);
        let left = deadline.map(|d| d.saturating_duration_since(std::time::Instant::now()));
        let mut events = Vec::new();
        self.poller
            .wait(&mut events, Some(left.map_or(tick, |l| l.min(tick))))?;
        if !events.is_empty() {
            self.queue.woken();
        }
        Ok(())
    }
}
