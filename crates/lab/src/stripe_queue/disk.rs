//! A modelled rotational disk in virtual time. Its cost is about that of the SATA disks under an I/O
//! scheduler of the historical measurement (seed 004).
//!
//! It serves one request at a time, in 50 us at 60 MB/s, after a seek: 1 ms, half a turn at 7200 turns a
//! minute (4.17 ms), and up to 7 ms more with the square root of the distance. A small gap ahead is passed
//! over if that is sooner. The next request is the nearest ahead (C-LOOK), or the oldest, if a read has
//! waited for 50 ms or a write for 500 ms.

use parking_lot::Mutex;
use pvblk_block::{
    BlockDevice, Capabilities, Completion, Decorator, DeviceQueue, Error, Forwards, Limits, Op,
    QueueContext, Readiness, Request, SECTOR,
};
use pvblk_volume::{Clock, ManualClock};
use std::collections::{BTreeMap, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

const REQUEST: Duration = Duration::from_micros(50);
const BYTES_PER_SECOND: f64 = 60e6;
const SEEK_SECONDS: f64 = 1e-3 + 60.0 / 7200.0 / 2.0;
const LONGEST_WAY_SECONDS: f64 = 7e-3;
const READ_EXPIRES: Duration = Duration::from_millis(50);
const WRITE_EXPIRES: Duration = Duration::from_millis(500);

/// The model in words.
pub const MODEL: &str = "modelled disk: one request at a time, 50 us + 60 MB/s; seeks 5.2 to 12.2 ms; C-LOOK, reads expire after 50 ms, writes after 500";

/// A request that waits for the head.
#[derive(Clone, Copy)]
struct Waiting {
    queue: u64,
    sectors: u64,
    expires: Instant,
    arrived: Instant,
}

struct Arm {
    capacity_sectors: u64,
    /// Sector at which the head is.
    at: u64,
    /// End of the request at work, and its queue and number.
    busy: Option<(Instant, u64, u64)>,
    /// Waiting requests by sector and number.
    waiting: BTreeMap<(u64, u64), Waiting>,
    /// Finished requests by queue.
    done: HashMap<u64, Vec<u64>>,
    numbers: u64,
}

impl Arm {
    fn way(&self, sector: u64) -> Duration {
        let distance = sector.abs_diff(self.at) as f64;
        if distance == 0.0 {
            return Duration::ZERO;
        }
        let share = distance / self.capacity_sectors as f64;
        let seek = SEEK_SECONDS + LONGEST_WAY_SECONDS * share.sqrt();
        let pass = distance * SECTOR as f64 / BYTES_PER_SECOND;
        let ahead = sector > self.at;
        Duration::from_secs_f64(if ahead { seek.min(pass) } else { seek })
    }

    /// Ends requests that are due, and begins the next one at the time at which the disk became
    /// free.
    fn step(&mut self, now: Instant) {
        let mut free = None;
        if let Some((due, queue, number)) = self.busy
            && due <= now
        {
            self.done.entry(queue).or_default().push(number);
            self.busy = None;
            free = Some(due);
        }
        if self.busy.is_some() {
            return;
        }
        let oldest = self.waiting.iter().min_by_key(|(_, w)| w.expires);
        let expired = oldest.filter(|(_, w)| w.expires <= now).map(|(k, _)| *k);
        let ahead = || self.waiting.range((self.at, 0)..).next().map(|(k, _)| *k);
        let first = || self.waiting.keys().next().copied();
        let Some(key) = expired.or_else(ahead).or_else(first) else {
            return;
        };
        let Some(w) = self.waiting.remove(&key) else {
            return;
        };
        let begin = free.unwrap_or(now).max(w.arrived);
        let bytes = (w.sectors * SECTOR) as f64;
        let took = self.way(key.0) + REQUEST + Duration::from_secs_f64(bytes / BYTES_PER_SECOND);
        self.at = key.0 + w.sectors;
        self.busy = Some((begin + took, w.queue, key.1));
    }
}

/// A disk as the head of this module describes it.
pub struct Disk {
    inner: Arc<dyn BlockDevice>,
    arm: Arc<Mutex<Arm>>,
    clock: Arc<ManualClock>,
}

impl Disk {
    /// Puts the model over a device that takes no time.
    pub fn new(inner: Arc<dyn BlockDevice>, clock: Arc<ManualClock>) -> Disk {
        let arm = Arm {
            capacity_sectors: inner.capacity_sectors(),
            at: 0,
            busy: None,
            waiting: BTreeMap::new(),
            done: HashMap::new(),
            numbers: 0,
        };
        Disk {
            inner,
            arm: Arc::new(Mutex::new(arm)),
            clock,
        }
    }
}

impl Disk {
    /// Moves the head to the begin, so that samples begin alike.
    pub fn park(&self) {
        self.arm.lock().at = 0;
    }
}

impl Decorator for Disk {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }
    fn describe(&self) -> String {
        format!("modelled disk over {}", self.inner.describe())
    }
    fn limits(&self) -> Limits {
        Limits {
            non_rotational: false,
            ..self.inner.limits()
        }
    }
    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        let mut arm = self.arm.lock();
        arm.numbers += 1;
        Ok(Box::new(DiskQueue {
            inner: self.inner.open_device_queue(context)?,
            arm: Arc::clone(&self.arm),
            clock: Arc::clone(&self.clock),
            number: arm.numbers,
            mine: HashMap::new(),
            below: 0,
            batch: Vec::new(),
        }))
    }
    fn forward<'a>(&'a self, _: Capabilities<'a>) -> Forwards<'a> {
        // Only requests are modelled.
        Forwards::none()
    }
}

struct DiskQueue {
    inner: Box<dyn DeviceQueue>,
    arm: Arc<Mutex<Arm>>,
    clock: Arc<ManualClock>,
    number: u64,
    /// Requests of this queue that the disk hasn't begun.
    mine: HashMap<u64, Box<Request>>,
    /// Number of requests at the inner device.
    below: usize,
    batch: Vec<Box<Request>>,
}

impl DeviceQueue for DiskQueue {
    fn submit(&mut self, batch: &mut Vec<Box<Request>>) {
        let now = self.clock.now();
        let mut arm = self.arm.lock();
        for request in batch.drain(..) {
            if !request.op.has_data() {
                self.batch.push(request);
                continue;
            }
            arm.numbers += 1;
            let number = arm.numbers;
            let expires = match request.op {
                Op::Read => READ_EXPIRES,
                _ => WRITE_EXPIRES,
            };
            let waiting = Waiting {
                queue: self.number,
                sectors: request.sectors,
                expires: now + expires,
                arrived: now,
            };
            arm.waiting.insert((request.sector, number), waiting);
            self.mine.insert(number, request);
        }
        // All requests of a batch are there when the disk chooses one.
        arm.step(now);
        drop(arm);
        self.below += self.batch.len();
        self.inner.submit(&mut self.batch);
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        let mut arm = self.arm.lock();
        arm.step(self.clock.now());
        if let Some(done) = arm.done.get_mut(&self.number) {
            let mine = &mut self.mine;
            self.batch
                .extend(done.drain(..).filter_map(|n| mine.remove(&n)));
        }
        drop(arm);
        self.below += self.batch.len();
        if !self.batch.is_empty() {
            self.inner.submit(&mut self.batch);
        }
        if self.below > 0 {
            let before = out.len();
            self.inner.poll(out);
            self.below -= out.len() - before;
        }
    }

    fn arm(&mut self) -> Readiness {
        let mut arm = self.arm.lock();
        arm.step(self.clock.now());
        let done = arm.done.get(&self.number).is_some_and(|d| !d.is_empty());
        if self.below > 0 || done {
            return Readiness::Ready;
        }
        Readiness::Wait(
            arm.busy
                .map(|(due, ..)| due)
                .filter(|_| !self.mine.is_empty()),
        )
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_block::Queue;
    use pvblk_sys::Buffer;

    /// Queue number and end in microseconds of reads of these sectors, in the order in which they end; the
    /// head is at `at` first.
    fn ends(at: u64, sectors: &[u64]) -> Vec<(u64, u64)> {
        let clock = Arc::new(ManualClock::default());
        let memory = pvblk_volume::open("mem:64M").expect("memory");
        let disk = Disk::new(memory, Arc::clone(&clock));
        disk.arm.lock().at = at;
        let device: Arc<dyn BlockDevice> = Arc::new(disk);
        let mut queue = Queue::open(&device, &QueueContext::new(8)).expect("a queue");
        let begin = clock.now();
        let read = |&sector: &u64| {
            let buffer = Buffer::anonymous(4096).expect("memory");
            Request::with_buffers(Op::Read, sector, vec![buffer], sector)
        };
        queue.submit(&mut sectors.iter().map(read).collect());
        let (mut done, mut ends) = (Vec::new(), Vec::new());
        while queue.in_flight() > 0 {
            queue.poll(&mut done);
            for c in done.drain(..) {
                ends.push((c.request.sector, (clock.now() - begin).as_micros() as u64));
            }
            if let Readiness::Wait(Some(due)) = queue.arm() {
                clock.advance_to(due);
            }
        }
        ends
    }

    #[test]
    fn each_part_of_the_model() {
        // 4 KiB at 60 MB/s take 68 us.
        assert_eq!(ends(0, &[0, 8]), [(0, 118), (8, 236)]);
        // A gap of 64 KiB is passed over in 1092 us.
        assert_eq!(ends(0, &[0, 136]), [(0, 118), (136, 118 + 1092 + 118)]);
        // Back is a seek: 1 ms, half a turn, and 7 ms times the root of 16/131072.
        assert_eq!(ends(16, &[0]), [(0, 5362)]);
        // The nearest ahead comes first.
        let order: Vec<u64> = ends(0, &[1000, 5000, 0, 3000])
            .iter()
            .map(|e| e.0)
            .collect();
        assert_eq!(order, [0, 1000, 3000, 5000]);
    }
}
