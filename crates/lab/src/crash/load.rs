//! The workload's process: writes, reads back, flushes, until it is killed or told to stop.

use super::journal::Journal;
use super::{SECTORS, stamp};
use anyhow::{Context, Result, bail, ensure};
use pvblk_block::{
    BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Readiness, Request, RequestFlags,
    Status,
};
use pvblk_export::local::{ConnectOptions, Keeper, KeeperEvent, connect};
use pvblk_frontend::Frontend;
use pvblk_sys::Poller;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What the process is told.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The server's socket.
    pub socket: PathBuf,
    /// The journal's file.
    pub journal: PathBuf,
    /// Which requests to make.
    pub seed: u64,
    /// Rings to ask for.
    pub queues: u32,
    /// Pages of each.
    pub ring_pages: usize,
}

const THREADS: u64 = 2;
const DEPTH: usize = 24;
/// Most sectors of one request.
const MOST: u64 = 64;
/// How long a server may be away. Longer than any restart, shorter than the referee's patience.
const PATIENCE: Duration = Duration::from_secs(30);

/// Checks the whole disk against the journal, says that it is ready, and works until SIGTERM.
pub fn run(options: &LoadOptions) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&stop))?;
    let journal = Arc::new(Journal::open(&options.journal, SECTORS)?);
    let wishes = ConnectOptions {
        queues: options.queues,
        ring_pages: options.ring_pages,
        memory_bytes: 16 << 20,
        name: "crash load".into(),
        timeout: PATIENCE,
        ..ConnectOptions::default()
    };
    let (parts, link) = connect(&options.socket, "a", &wishes)?;
    let front = Frontend::new(parts)?;
    let keeper = Keeper::start(link, front.clone(), Some(PATIENCE), |event| {
        if let KeeperEvent::Ended { reason } = event {
            eprintln!("pvblk: {reason}");
            std::process::exit(3);
        }
    })?;
    let device: Arc<dyn BlockDevice> = front;
    let part = SECTORS / THREADS;
    let mut workers = Vec::new();
    for t in 0..THREADS {
        let mut worker = Worker::open(&device, Arc::clone(&journal), t, t * part, part)?;
        worker.rng = fastrand::Rng::with_seed(options.seed ^ t << 56);
        workers.push(worker);
    }
    for worker in &mut workers {
        worker.check_all().context("after the restart")?;
    }
    eprintln!("pvblk: ready");
    let threads: Vec<_> = workers
        .into_iter()
        .map(|mut worker| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || worker.work(&stop))
        })
        .collect();
    for thread in threads {
        match thread.join() {
            Ok(result) => result?,
            Err(_) => bail!("a thread of the workload panicked"),
        }
    }
    match keeper.stop() {
        Some(why) => bail!("{why}"),
        None => Ok(()),
    }
}

/// One request's place in the worker.
struct Slot {
    buffer: Buffer,
    request: Option<Box<Request>>,
    /// Of a write.
    number: u32,
    sector: u64,
    sectors: u64,
}

/// One thread: a queue, and a part of the disk that only it touches.
struct Worker {
    queue: Queue,
    journal: Arc<Journal>,
    first: u64,
    sectors: u64,
    /// Sectors with a request in flight.
    busy: Vec<bool>,
    slots: Vec<Slot>,
    free: Vec<usize>,
    rng: fastrand::Rng,
    poller: Poller,
    watches: bool,
}

impl Worker {
    fn open(
        device: &Arc<dyn BlockDevice>,
        journal: Arc<Journal>,
        index: u64,
        first: u64,
        sectors: u64,
    ) -> Result<Worker> {
        let mut context = QueueContext::new(DEPTH as u32);
        context.index = index as u32;
        let bytes = MOST as usize * 512;
        let source = device.buffer_source();
        let mut slots = Vec::new();
        for i in 0..DEPTH {
            // Half of them where the server reaches them, half to be bounced.
            let buffer = match &source {
                Some(source) if i % 2 == 0 => source.allocate(bytes).context("no memory")?,
                _ => Buffer::anonymous(bytes)?,
            };
            slots.push(Slot {
                buffer,
                request: Some(Request::new(Op::Flush, 0, 0, i as u64)),
                number: 0,
                sector: 0,
                sectors: 0,
            });
        }
        Ok(Worker {
            queue: Queue::open(device, &context)?,
            journal,
            first,
            sectors,
            busy: vec![false; sectors as usize],
            slots,
            free: (0..DEPTH).collect(),
            rng: fastrand::Rng::new(),
            poller: Poller::new()?,
            watches: false,
        })
    }

    /// Reads all of its part. What a killed process had in flight is settled by what is there now.
    fn check_all(&mut self) -> Result<()> {
        let mut batch = Vec::new();
        let mut at = 0;
        while at < self.sectors || self.queue.in_flight() > 0 {
            while at < self.sectors && !self.free.is_empty() {
                let sectors = MOST.min(self.sectors - at);
                self.prepare(Op::Read, self.first + at, sectors, &mut batch)?;
                at += sectors;
            }
            self.queue.submit(&mut batch);
            self.wait(true)?;
        }
        Ok(())
    }

    fn work(&mut self, stop: &AtomicBool) -> Result<()> {
        let mut batch = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..self.rng.usize(1..=8) {
                self.one(&mut batch)?;
            }
            self.queue.submit(&mut batch);
            self.wait(false)?;
        }
        while self.queue.in_flight() > 0 {
            self.wait(false)?;
        }
        Ok(())
    }

    /// One random request, if there is a place for it.
    fn one(&mut self, batch: &mut Vec<Box<Request>>) -> Result<()> {
        if self.free.is_empty() {
            return Ok(());
        }
        let dice = self.rng.u32(..100);
        if dice < 4 {
            return self.prepare(Op::Flush, 0, 0, batch);
        }
        // Mostly a small part, so that the same sectors come again soon; and neighbours, so that requests merge.
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

    /// Takes what is done, and sleeps if there is nothing. `settle`: what is read now is what is there.
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
        ensure!(
            status == Status::Ok,
            "{:?} of {} sectors at {} ended as {status:?}",
            request.op,
            request.sectors,
            request.sector
        );
        let index = request.tag as usize;
        let slot = &mut self.slots[index];
        for s in slot.sector..slot.sector + slot.sectors {
            if request.op == Op::Write {
                self.journal.done(s, slot.number);
            }
            self.busy[(s - self.first) as usize] = false;
        }
        if request.op == Op::Read {
            for b in &request.buffers {
                for (sector, held) in stamp::look(b, request.sector) {
                    let [done, sent] = self.journal.allowed(sector);
                    match held {
                        Some(number) if number == done || (settle && number == sent) => {
                            if settle {
                                self.journal.sent(sector, number);
                                self.journal.done(sector, number);
                            }
                        }
                        Some(number) => bail!(
                            "sector {sector} holds write {number}; answered was {done}, sent {sent}"
                        ),
                        None => bail!("sector {sector} is torn; answered was {done}, sent {sent}"),
                    }
                }
            }
        }
        request.buffers.clear();
        slot.request = Some(request);
        self.free.push(index);
        self.journal.count();
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
        // A signal doesn't wake this thread, so look now and then.
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
