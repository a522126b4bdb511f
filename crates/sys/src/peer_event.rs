//! Eventfds shared with a peer that may do anything with its end.
//!
//! `O_NONBLOCK` belongs to the open file, which both ends share, so a peer can clear it at any time. A `write` to a
//! full counter then waits until the peer reads, and a `read` of an empty one until the peer writes. So neither is
//! used here:
//!
//! - The kernel wakes the peer. An asynchronous read of no bytes names the peer's eventfd to be signalled at its end
//!   (`IOCB_FLAG_RESFD`, io_submit(2)). It completes within the call, and a full counter stays full. A thread that wakes one peer often uses an
//!   io_uring instead, with that peer's eventfd registered for its completions; the operation does nothing.
//! - Our end is cleared by `preadv2` with `RWF_NOWAIT`, which never waits, whatever the file's flags are.
//!
//! If the kernel refuses an AIO context (all of `fs.aio-max-nr` are taken) or is older than 5.8, plain reads and
//! writes are used after a check. A peer that then clears the flag and fills or empties its counter within the same
//! microsecond can make one call wait; the stall detection of the calling thread has to handle that.

mod ring;

use crate::peer_fd::PeerFd;
use ring::SignalRing;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, ReadWriteFlags};
use std::cell::RefCell;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// An eventfd whose other end a peer has. None of its calls waits.
#[derive(Debug)]
pub struct PeerEvent {
    fd: OwnedFd,
    /// Never given twice, unlike the descriptor's.
    number: u64,
}

impl PeerEvent {
    /// Creates an eventfd to be sent to a peer; not inherited by children.
    pub fn new() -> io::Result<PeerEvent> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(PeerEvent::of(eventfd(0, flags)?))
    }

    /// Takes a descriptor received from a peer. Errors if it is not an eventfd, or is a semaphore.
    pub fn from_peer(fd: PeerFd) -> io::Result<PeerEvent> {
        Ok(PeerEvent::of(fd.checked(check)?))
    }

    fn of(fd: OwnedFd) -> PeerEvent {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        PeerEvent { fd, number }
    }

    /// Wakes the peer. A full counter is not an error: the peer has a wake-up to see already.
    #[inline]
    pub fn notify(&self) {
        let submitted = SIGNALLER.try_with(|s| {
            s.try_borrow_mut()
                .is_ok_and(|mut s| s.get_or_insert_with(Signaller::new).signal(self))
        });
        if !submitted.unwrap_or(false) {
            self.write_if_there_is_room();
        }
    }

    /// Clears the peer's wake-up; true if there was one.
    #[inline]
    pub fn clear(&self) -> bool {
        let mut bytes = [0u8; 8];
        let mut into = [IoSliceMut::new(&mut bytes)];
        // Offset -1: an eventfd has no position.
        match rustix::io::preadv2(&self.fd, &mut into, u64::MAX, ReadWriteFlags::NOWAIT) {
            Ok(n) => n > 0,
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                self.is(PollFlags::IN) && rustix::io::read(&self.fd, &mut bytes).is_ok()
            }
            Err(_) => false,
        }
    }

    #[cold]
    fn write_if_there_is_room(&self) {
        if self.is(PollFlags::OUT) {
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    fn is(&self, what: PollFlags) -> bool {
        let now = Timespec::default();
        let mut fds = [PollFd::new(&self.fd, what)];
        poll(&mut fds, Some(&now)).is_ok_and(|n| n > 0) && fds[0].revents().contains(what)
    }

    /// Returns a second handle of the same counter.
    pub fn try_clone(&self) -> io::Result<PeerEvent> {
        Ok(PeerEvent::of(self.fd.try_clone()?))
    }
}

impl AsFd for PeerEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn check(fd: BorrowedFd<'_>) -> io::Result<()> {
    let refuse = |why| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    let number = fd.as_raw_fd();
    let link = std::fs::read_link(format!("/proc/self/fd/{number}"))?;
    if link.to_string_lossy() != "anon_inode:[eventfd]" {
        return refuse("the descriptor is not an eventfd");
    }
    // A read decrements a semaphore by one only, so a peer could keep it readable for ever.
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}"))?;
    let is = |l: &str| l.starts_with("eventfd-semaphore:") && l.trim_end().ends_with('1');
    match info.lines().any(is) {
        true => refuse("the eventfd is a semaphore"),
        false => Ok(()),
    }
}

/// Completions that fit into the AIO context of a thread.
const CONTEXT_EVENTS: usize = 64;
/// Signals between two removals of completions.
const SIGNALS_PER_REAP: u32 = 32;

/// `struct iocb` of linux/aio_abi.h, on little-endian machines.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event_fd: u32,
}

/// `struct io_event` of linux/aio_abi.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent {
    data: u64,
    iocb: u64,
    result: i64,
    more: i64,
}

/// `IOCB_CMD_PREAD` of linux/aio_abi.h.
const PREAD: u16 = 0;
/// `IOCB_FLAG_RESFD` of linux/aio_abi.h.
const RESFD: u32 = 1;

/// Signals of one event in a row after which its thread's ring signals it.
const OFTEN: u32 = 64;

thread_local! {
    static SIGNALLER: RefCell<Option<Signaller>> = const { RefCell::new(None) };
}

/// The means of a thread to signal events, made at its first signal.
struct Signaller {
    context: Option<Context>,
    used: u32,
    ring: Option<SignalRing>,
    /// Number of the event that the ring signals; 0: none.
    of_ring: u64,
    /// The last event that the context signalled, and how often in a row.
    last: u64,
    in_a_row: u32,
}

struct Context {
    id: libc::c_ulong,
    /// An empty memory file: reading no bytes from it completes at once.
    nothing: OwnedFd,
}

impl Signaller {
    #[cold]
    fn new() -> Signaller {
        Signaller {
            context: Context::new(),
            used: 0,
            ring: SignalRing::new(),
            of_ring: 0,
            last: 0,
            in_a_row: 0,
        }
    }

    /// Makes the kernel signal the event; false if it can't.
    #[inline]
    fn signal(&mut self, event: &PeerEvent) -> bool {
        if self.of_ring == event.number
            && let Some(ring) = &mut self.ring
        {
            if ring.signal() {
                return true;
            }
            (self.ring, self.of_ring) = (None, 0);
        }
        self.signal_by_context(event)
    }

    fn signal_by_context(&mut self, event: &PeerEvent) -> bool {
        let Some(context) = &self.context else {
            return false;
        };
        if self.used >= SIGNALS_PER_REAP {
            context.reap();
            self.used = 0;
        }
        self.used += 1;
        if self.last != event.number {
            (self.last, self.in_a_row) = (event.number, 0);
        }
        self.in_a_row += 1;
        if self.in_a_row == OFTEN
            && let Some(ring) = &mut self.ring
        {
            self.of_ring = if ring.set(&event.fd) { event.number } else { 0 };
        }
        context.signal(&event.fd)
    }
}

impl Context {
    #[cold]
    fn new() -> Option<Context> {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let nothing = rustix::fs::memfd_create("pvblk-nothing", flags).ok()?;
        let mut id: libc::c_ulong = 0;
        // SAFETY: `id` is zero, as the kernel wants it, and written by it.
        let made = unsafe {
            libc::syscall(
                libc::SYS_io_setup,
                CONTEXT_EVENTS as libc::c_long,
                &raw mut id,
            )
        };
        (made == 0).then_some(Context { id, nothing })
    }

    fn signal(&self, event: &OwnedFd) -> bool {
        let mut iocb = Iocb {
            opcode: PREAD,
            fd: self.nothing.as_raw_fd() as u32,
            flags: RESFD,
            event_fd: event.as_raw_fd() as u32,
            ..Iocb::default()
        };
        let mut list = [&raw mut iocb];
        // SAFETY: `id` is a context of this thread; the list has one iocb, which the kernel reads and whose `key` it writes,
        // all within the call. It names no memory, and descriptors that live as long as the call.
        let n = unsafe {
            libc::syscall(
                libc::SYS_io_submit,
                self.id,
                1 as libc::c_long,
                list.as_mut_ptr(),
            )
        };
        n == 1
    }

    fn reap(&self) {
        let mut events = [IoEvent::default(); CONTEXT_EVENTS];
        let now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: there is room for as many events as are asked for; with a timeout of nothing it doesn't wait.
        unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.id,
                0 as libc::c_long,
                CONTEXT_EVENTS as libc::c_long,
                events.as_mut_ptr(),
                &raw const now,
            )
        };
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was made by `new` and isn't used afterwards.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer_fd::Closer;
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

    /// The peer's end of a new event, in blocking mode.
    fn blocking() -> (PeerEvent, OwnedFd) {
        let ours = PeerEvent::new().unwrap();
        let theirs = ours.try_clone().unwrap().fd;
        let flags = fcntl_getfl(&theirs).unwrap();
        fcntl_setfl(&theirs, flags & !OFlags::NONBLOCK).unwrap();
        (ours, theirs)
    }

    fn value(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn every_signal_is_counted_and_cleared_once() {
        let (ours, theirs) = blocking();
        for _ in 0..1000 {
            ours.notify();
        }
        assert_eq!(value(&theirs), 1000);
        rustix::io::write(&theirs, &3u64.to_ne_bytes()).unwrap();
        assert!(ours.clear());
        assert!(!ours.clear(), "an empty counter in blocking mode");
    }

    #[test]
    fn events_in_turn_and_events_in_a_row_are_signalled_alike() {
        let (a, a_theirs) = blocking();
        let (b, b_theirs) = blocking();
        let mut sent = [0u64; 2];
        for (round, run) in [1, 200, 1, 63, 64, 65, 2, 500].into_iter().enumerate() {
            let (event, sum) = match round % 2 {
                0 => (&a, &mut sent[0]),
                _ => (&b, &mut sent[1]),
            };
            for _ in 0..run {
                event.notify();
                *sum += 1;
            }
        }
        assert_eq!([value(&a_theirs), value(&b_theirs)], sent);
        // One that is gone isn't taken for the next, which may have its descriptor.
        drop((b, b_theirs));
        let (c, c_theirs) = blocking();
        c.notify();
        assert_eq!(value(&c_theirs), 1);
        assert!(!a.clear());
    }

    #[test]
    fn a_ring_leaves_a_full_counter_full() {
        let (ours, theirs) = blocking();
        (0..2 * OFTEN).for_each(|_| ours.notify());
        assert_eq!(value(&theirs), u64::from(2 * OFTEN));
        rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        // On this thread: another one has a ring of its own.
        (0..3 * OFTEN).for_each(|_| ours.notify());
        assert_eq!(value(&theirs), u64::MAX);
        ours.notify();
        assert_eq!(value(&theirs), 1);
    }

    /// Fails instead of waiting for ever.
    fn does_not_wait(call: impl FnOnce() + Send + 'static) {
        let (done, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            call();
            let _ = done.send(());
        });
        let ended = ended.recv_timeout(std::time::Duration::from_secs(60));
        ended.expect("it waits for the peer, or panicked");
    }

    #[test]
    fn a_full_counter_in_blocking_mode_does_not_block_us() {
        let (ours, theirs) = blocking();
        rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let same = ours.try_clone().unwrap();
        does_not_wait(move || {
            for _ in 0..3 {
                same.notify();
            }
            // The fallback without AIO doesn't block either.
            same.write_if_there_is_room();
        });
        assert_eq!(value(&theirs), u64::MAX);
        ours.write_if_there_is_room();
        assert_eq!(value(&theirs), 1);
    }

    #[test]
    fn only_a_counting_eventfd_is_accepted() {
        let closer = Closer::new();
        let from = |fd: OwnedFd| PeerEvent::from_peer(PeerFd::new(fd, &closer));
        assert!(from(std::fs::File::open("/dev/null").unwrap().into()).is_err());
        assert!(from(eventfd(1, EventfdFlags::SEMAPHORE).unwrap()).is_err());
        assert!(from(eventfd(1, EventfdFlags::empty()).unwrap()).is_ok());
    }
}
