//! A hypervisor for tests: guests' memory in files, grant tables, event channels that mask as Xen's do.

use super::WAIT;
use parking_lot::Mutex;
use pvblk_export::xen::{ForeignPages, Hypervisor};
use pvblk_protocol::blkif::EventChannel;
use pvblk_sys::xen::{CopyDirection, GrantCopy, MAX_COPIES};
use pvblk_sys::{EventFd, PAGE_SIZE, Poller, Region, create_sealed};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// Number for names of memory files, so that each guest's mappings are found in /proc/self/maps.
static NEXT: AtomicU64 = AtomicU64::new(0);

#[derive(Clone, Copy)]
struct Grant {
    frame: u32,
    read_only: bool,
}

/// One guest's memory and grants.
pub struct Memory {
    name: String,
    file: OwnedFd,
    /// The guest's own mapping of all its memory.
    pub all: Region,
    grants: Mutex<HashMap<u32, Grant>>,
    /// Pages that the guest itself has mapped a second time.
    pub own_pages: AtomicUsize,
}

impl Memory {
    fn new(frames: usize) -> Memory {
        let name = format!("xen-guest-{}-", NEXT.fetch_add(1, Ordering::Relaxed));
        let file = create_sealed(&name, (frames * PAGE_SIZE) as u64).unwrap();
        let all = Region::shared(file.as_fd(), 0, frames * PAGE_SIZE, true).unwrap();
        Memory {
            name,
            file,
            all,
            grants: Mutex::default(),
            own_pages: AtomicUsize::new(0),
        }
    }

    /// Grants a frame under a reference, or changes the grant.
    pub fn grant(&self, gref: u32, frame: u32, read_only: bool) {
        self.grants.lock().insert(gref, Grant { frame, read_only });
    }

    /// Ends a grant; existing mappings of the page stay, as on Xen.
    pub fn revoke(&self, gref: u32) {
        self.grants.lock().remove(&gref);
    }

    /// Maps some frames a second time for the guest.
    pub fn frames(&self, frames: &[u32]) -> Region {
        self.own_pages.fetch_add(frames.len(), Ordering::AcqRel);
        self.map(frames, true)
    }

    fn map(&self, frames: &[u32], writable: bool) -> Region {
        let frames: Vec<u64> = frames.iter().map(|&f| u64::from(f)).collect();
        Region::from_frames(self.file.as_fd(), &frames, writable).unwrap()
    }

    /// Pages mapped by others, from /proc/self/maps, so that no mapping is missed.
    pub fn mapped(&self) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let hex = |text: &str| usize::from_str_radix(text, 16).unwrap();
        let mine = maps.lines().filter(|l| l.contains(&self.name));
        let bytes = mine.map(|line| {
            let range = line.split(' ').next().unwrap();
            let (from, to) = range.split_once('-').unwrap();
            hex(to) - hex(from)
        });
        let pages = bytes.sum::<usize>() / PAGE_SIZE;
        pages - self.all.len() / PAGE_SIZE - self.own_pages.load(Ordering::Acquire)
    }
}

/// State of an event channel.
#[derive(Default)]
struct ChannelState {
    /// The back end took the notification and hasn't unmasked the port.
    masked: bool,
    /// The guest notified meanwhile.
    pending: bool,
}

pub struct Port {
    line: Mutex<ChannelState>,
    to_back: EventFd,
    /// Signalled by the back end.
    pub to_guest: EventFd,
    bound: Mutex<bool>,
    pub clears: AtomicUsize,
    pub rearms: AtomicUsize,
    pub notifies: AtomicUsize,
}

impl Port {
    /// Notifies the back end.
    pub fn ring(&self) {
        let mut line = self.line.lock();
        line.pending = true;
        if !line.masked {
            self.to_back.notify();
        }
    }

    pub fn is_bound(&self) -> bool {
        *self.bound.lock()
    }

    /// Sleeps until the back end notifies.
    pub fn sleep(&self, deadline: Instant) {
        let poller = Poller::new().unwrap();
        poller.add(self.to_guest.as_fd(), 0, false).unwrap();
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "the back end doesn't notify");
        poller.wait(&mut Vec::new(), Some(left)).unwrap();
        self.to_guest.drain();
    }
}

struct BackEnd(Arc<Port>);

impl EventChannel for BackEnd {
    fn notify(&self) {
        self.0.notifies.fetch_add(1, Ordering::AcqRel);
        self.0.to_guest.notify();
    }

    fn clear(&self) {
        let mut line = self.0.line.lock();
        if self.0.to_back.drain() {
            self.0.clears.fetch_add(1, Ordering::AcqRel);
            *line = ChannelState {
                masked: true,
                pending: false,
            };
        }
    }

    fn rearm(&self) {
        let mut line = self.0.line.lock();
        if std::mem::take(&mut line.masked) {
            self.0.rearms.fetch_add(1, Ordering::AcqRel);
            if line.pending {
                self.0.to_back.notify();
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.to_back.as_fd()
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        *self.0.bound.lock() = false;
    }
}

type OnCopy = Box<dyn FnMut(CopyDirection, &[GrantCopy]) + Send>;

/// The hypervisor: all guests and ports.
#[derive(Default)]
pub struct FakeXen {
    guests: Mutex<HashMap<u16, Arc<Memory>>>,
    ports: Mutex<HashMap<(u16, u32), Arc<Port>>>,
    /// Calls of `map`.
    pub maps: AtomicUsize,
    /// Single copies, and calls of `copy`.
    pub copies: AtomicUsize,
    pub copy_calls: AtomicUsize,
    /// Open accesses to guests' pages.
    pub open: Arc<AtomicUsize>,
    on_copy: Mutex<Option<OnCopy>>,
}

impl FakeXen {
    pub fn create(&self, domid: u16, frames: usize) -> Arc<Memory> {
        let memory = Arc::new(Memory::new(frames));
        self.guests.lock().insert(domid, Arc::clone(&memory));
        memory
    }

    /// Ends the domain: no page of it can be mapped or copied, and no port can be bound. Existing mappings stay.
    pub fn destroy(&self, domid: u16) {
        self.guests.lock().remove(&domid);
        self.ports.lock().retain(|(d, _), _| *d != domid);
    }

    /// Offers a port of the guest.
    pub fn offer(&self, domid: u16, port: u32) -> Arc<Port> {
        let new = Arc::new(Port {
            line: Mutex::default(),
            to_back: EventFd::new().unwrap(),
            to_guest: EventFd::new().unwrap(),
            bound: Mutex::new(false),
            clears: AtomicUsize::new(0),
            rearms: AtomicUsize::new(0),
            notifies: AtomicUsize::new(0),
        });
        self.ports.lock().insert((domid, port), Arc::clone(&new));
        new
    }

    /// Calls `f` before each call of `copy` from now on.
    pub fn on_copy(&self, f: impl FnMut(CopyDirection, &[GrantCopy]) + Send + 'static) {
        *self.on_copy.lock() = Some(Box::new(f));
    }

    pub fn stop_on_copy(&self) {
        *self.on_copy.lock() = None;
    }

    fn guest(&self, domid: u16) -> io::Result<Arc<Memory>> {
        let guests = self.guests.lock();
        guests
            .get(&domid)
            .cloned()
            .ok_or_else(|| no("no such domain"))
    }
}

fn no(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

/// The hypervisor as the server gets it.
pub struct Handle(pub Arc<FakeXen>);

impl Hypervisor for Handle {
    fn pages(&self, domid: u16) -> io::Result<Box<dyn ForeignPages>> {
        self.0.open.fetch_add(1, Ordering::AcqRel);
        let xen = Arc::clone(&self.0);
        Ok(Box::new(FakePages { xen, domid }))
    }

    fn bind(&self, domid: u16, port: u32) -> io::Result<Box<dyn EventChannel>> {
        let ports = self.0.ports.lock();
        let port = ports
            .get(&(domid, port))
            .ok_or_else(|| no("no such port"))?;
        let was_bound = std::mem::replace(&mut *port.bound.lock(), true);
        if was_bound {
            return Err(no("the port is bound"));
        }
        // A fresh binding is not masked, and pending at first, as the driver makes it.
        *port.line.lock() = ChannelState::default();
        port.to_back.notify();
        Ok(Box::new(BackEnd(Arc::clone(port))))
    }
}

struct FakePages {
    xen: Arc<FakeXen>,
    domid: u16,
}

impl Drop for FakePages {
    fn drop(&mut self) {
        self.xen.open.fetch_sub(1, Ordering::AcqRel);
    }
}

impl ForeignPages for FakePages {
    fn map(&self, grefs: &[u32], writable: bool) -> io::Result<Region> {
        self.xen.maps.fetch_add(1, Ordering::AcqRel);
        let guest = self.xen.guest(self.domid)?;
        let grants = guest.grants.lock();
        let mut frames = Vec::new();
        for gref in grefs {
            let grant = grants.get(gref).ok_or_else(|| no("grants nothing"))?;
            if grant.read_only && writable {
                return Err(no("granted read-only"));
            }
            frames.push(grant.frame);
        }
        Ok(guest.map(&frames, writable))
    }

    fn copy(&self, direction: CopyDirection, copies: &mut [GrantCopy]) {
        assert!((1..=MAX_COPIES).contains(&copies.len()));
        if let Some(f) = &mut *self.xen.on_copy.lock() {
            f(direction, copies);
        }
        self.xen.copy_calls.fetch_add(1, Ordering::AcqRel);
        self.xen.copies.fetch_add(copies.len(), Ordering::AcqRel);
        let guest = self.xen.guest(self.domid);
        for copy in copies {
            assert!(usize::from(copy.offset) + copy.buffer.len() <= PAGE_SIZE);
            let found = guest.as_ref().ok().and_then(|g| {
                let grant = g.grants.lock().get(&copy.gref).copied();
                Some((g, grant?))
            });
            let to_guest = direction == CopyDirection::ToGuest;
            let Some((guest, grant)) = found.filter(|(_, g)| !(to_guest && g.read_only)) else {
                copy.failed = true;
                continue;
            };
            let at = grant.frame as usize * PAGE_SIZE + usize::from(copy.offset);
            match direction {
                CopyDirection::FromGuest => copy.buffer.copy_from(&guest.all, at),
                CopyDirection::ToGuest => copy.buffer.copy_to(&guest.all, at),
            }
            copy.failed = false;
        }
    }
}

/// Waits for `done`, asleep on the port in between.
pub fn wait_on<T>(port: &Port, mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + WAIT;
    loop {
        match done() {
            Some(result) => return result,
            None => port.sleep(deadline),
        }
    }
}
