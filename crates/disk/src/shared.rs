//! The state that a disk shares with its queues.

use crate::buffer::{Buffer, Home, check_len};
use crate::queue::Work;
use crate::{Error, ErrorKind, Limits};
use parking_lot::Mutex;
use pvblk_block::{BlockDevice, DeviceEvent, SECTOR, Subscription};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

pub(crate) struct Shared {
    device: Arc<dyn BlockDevice>,
    name: String,
    limits: Limits,
    home: Arc<Home>,
    /// The server is gone for good.
    gone: Arc<AtomicBool>,
    _events: Subscription,
    /// Number of the next queue.
    index: AtomicU32,
    /// Most queues that users may have open at the same time.
    most: usize,
    queues: Mutex<Queues>,
}

#[derive(Default)]
struct Queues {
    /// Queues that users have, and those that they gave up.
    open: usize,
    /// Queues that were dropped with requests in flight, and whether they count as open.
    given_up: Vec<(Work, bool)>,
}

impl Shared {
    pub(crate) fn new(device: Arc<dyn BlockDevice>, gone: Arc<AtomicBool>, most: usize) -> Shared {
        let tell = Arc::clone(&gone);
        let events = device.events().subscribe(move |event| {
            if event == DeviceEvent::Gone {
                tell.store(true, Ordering::Release);
            }
        });
        Shared {
            name: device.describe(),
            limits: Limits::of(&device.limits()),
            home: Home::of(&*device),
            gone,
            _events: events,
            index: AtomicU32::new(0),
            most,
            queues: Mutex::default(),
            device,
        }
    }

    pub(crate) fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.device.capacity_sectors() * SECTOR
    }

    /// True once requests fail because the server is gone for good.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire) || self.device.events().is_gone()
    }

    pub(crate) fn next_index(&self) -> u32 {
        self.index.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn buffer(&self, len: usize) -> Result<Buffer, Error> {
        check_len(len, self.limits.logical_sector_bytes)?;
        if let Some(buffer) = self.home.allocate(len)? {
            return Ok(buffer);
        }
        self.reap();
        self.home.allocate(len)?.ok_or_else(|| {
            let name = &self.name;
            Error::new(
                ErrorKind::Exhausted,
                format!("{name}: no shared memory is left for a buffer of {len} bytes"),
            )
            .advise("drop buffers, or ask for more by Options::memory_bytes")
        })
    }

    /// Counts one more queue, which [`Shared::leave`] ends.
    pub(crate) fn enter(&self) -> Result<(), Error> {
        self.reap();
        let mut queues = self.queues.lock();
        if queues.open >= self.most {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("{}: all {} queues are open", self.name, self.most),
            )
            .advise("drop one, or ask for more by Options::queues"));
        }
        queues.open += 1;
        Ok(())
    }

    /// A queue is closed. One with requests in flight is kept until they complete, as their memory is in use.
    pub(crate) fn leave(&self, given_up: Option<Work>, counted: bool) {
        let mut queues = self.queues.lock();
        match given_up {
            Some(work) => queues.given_up.push((work, counted)),
            None => queues.open -= usize::from(counted),
        }
    }

    /// Looks after the queues that were given up.
    fn reap(&self) {
        let mut queues = self.queues.lock();
        let mut ended = 0;
        queues.given_up.retain_mut(|(work, counted)| {
            let goes_on = work.reap(self);
            ended += usize::from(*counted && !goes_on);
            goes_on
        });
        queues.open -= ended;
    }

    /// Gives up the requests of queues that were dropped. Errors if users still have queues.
    pub(crate) fn end_queues(&self) -> Result<(), Error> {
        self.reap();
        let mut queues = self.queues.lock();
        let given_up = std::mem::take(&mut queues.given_up);
        queues.open -= given_up.iter().filter(|(_, counted)| *counted).count();
        let open = queues.open;
        drop(queues);
        drop(given_up);
        match open {
            0 => Ok(()),
            _ => Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "{}: {open} of its queues are open; drop them before closing",
                    self.name
                ),
            )),
        }
    }
}
