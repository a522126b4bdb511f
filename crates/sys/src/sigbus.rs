//! Mappings whose file may shrink: a fault in one of them is turned into zeros and a mark, instead of ending the
//! process.
//!
//! A hypervisor chooses the file of its guest's memory, and not all hypervisors seal it. If such a file is truncated
//! under a mapping, every access beyond its new end raises SIGBUS, also in our own copies. The handler here looks the
//! address up in a fixed table and maps private zeros over the whole region, so that the access succeeds. The region
//! is *lost* from then on, and its user disconnects the peer. Copies by the kernel fail with `EFAULT`, without a
//! signal.
//!
//! The handler does only async-signal-safe things: atomics, `mmap`, `sigaction`.

use std::cell::UnsafeCell;
use std::io;
use std::mem::MaybeUninit;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

/// Most guarded regions of a process: half of the mappings that Linux allows it by default (`vm.max_map_count`).
pub const MAX_GUARDED: usize = 32_768;

/// Value of `base` while an entry of the table is being filled or emptied; no mapping has this address.
const RESERVED: usize = 1;

/// An entry of [`TABLE`].
struct GuardedRange {
    /// Odd while the range changes, and another number after each change: the handler takes start and length of one range, or none.
    version: AtomicUsize,
    /// Start address; 0 if the entry is free, [`RESERVED`] while it changes.
    base: AtomicUsize,
    len: AtomicUsize,
    lost: AtomicBool,
}

impl GuardedRange {
    /// Changes the range, as nobody else may at the same time.
    fn change(&self, base: usize, len: usize) {
        let version = self.version.load(Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.base.store(base, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.lost.store(false, Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(2), Ordering::Release);
    }

    /// The range, if `at` is in it. One that changes just now isn't told: nobody accesses that.
    fn around(&self, at: usize) -> Option<(usize, usize)> {
        let version = self.version.load(Ordering::Acquire);
        let base = self.base.load(Ordering::Relaxed);
        let len = self.len.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let stays = version & 1 == 0 && self.version.load(Ordering::Relaxed) == version;
        let holds = base > RESERVED && at >= base && at - base < len;
        (stays && holds).then_some((base, len))
    }
}

static TABLE: [GuardedRange; MAX_GUARDED] = [const {
    GuardedRange {
        version: AtomicUsize::new(0),
        base: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
    }
}; MAX_GUARDED];

struct Previous(UnsafeCell<MaybeUninit<libc::sigaction>>);

// SAFETY: written once before the handler is installed, only read afterwards.
unsafe impl Sync for Previous {}

static PREVIOUS: Previous = Previous(UnsafeCell::new(MaybeUninit::zeroed()));
/// Index of the entry at which the search for a free one begins.
static FREE_FROM: AtomicUsize = AtomicUsize::new(0);
static INSTALL: Once = Once::new();

/// Owner of one entry of [`TABLE`]; frees the entry on drop.
#[derive(Debug)]
pub(crate) struct Guard(usize);

impl Guard {
    /// Guards the mapping of `len` bytes at `base`. The mapping must stay until the guard is dropped. Errors if all
    /// entries are taken.
    pub fn new(base: usize, len: usize) -> io::Result<Guard> {
        install();
        let from = FREE_FROM.load(Ordering::Relaxed);
        for i in (from..MAX_GUARDED).chain(0..from) {
            let slot = &TABLE[i];
            let free = slot
                .base
                .compare_exchange(0, RESERVED, Ordering::AcqRel, Ordering::Relaxed);
            if free.is_ok() {
                slot.change(base, len);
                let _ =
                    FREE_FROM.compare_exchange(from, i + 1, Ordering::Relaxed, Ordering::Relaxed);
                return Ok(Guard(i));
            }
        }
        Err(io::Error::new(
            io::ErrorKind::QuotaExceeded,
            "too many guarded mappings in this process",
        ))
    }

    /// True after an access found the file shorter than the mapping.
    pub fn is_lost(&self) -> bool {
        TABLE[self.0].lost.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let slot = &TABLE[self.0];
        slot.change(RESERVED, 0);
        slot.base.store(0, Ordering::Release);
        FREE_FROM.fetch_min(self.0, Ordering::Relaxed);
    }
}

fn install() {
    INSTALL.call_once(|| {
        // SAFETY: an all-zero sigaction is valid; its fields are set below.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: nobody reads `PREVIOUS` while it is filled: the handler isn't installed, and `Once` admits one
        // thread.
        unsafe {
            libc::sigaction(
                libc::SIGBUS,
                std::ptr::null(),
                (*PREVIOUS.0.get()).as_mut_ptr(),
            );
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
        }
    });
}

extern "C" fn on_sigbus(_signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo. Its address has a meaning only for faults, whose codes are positive.
    let (code, at) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code > 0 && replace(at) {
        return;
    }
    // The fault is not in a guarded region: restore the previous handler, which decides when the access is repeated
    // or the next SIGBUS comes.
    // SAFETY: filled by `install` before this handler could run.
    unsafe {
        libc::sigaction(
            libc::SIGBUS,
            (*PREVIOUS.0.get()).as_ptr(),
            std::ptr::null_mut(),
        );
    }
    if code <= 0 {
        // SAFETY: the signal was sent by a process and not raised by an access, so it has to be sent again.
        unsafe { libc::raise(libc::SIGBUS) };
    }
}

/// Maps zeros over the guarded region around `at`; false if there is none.
fn replace(at: usize) -> bool {
    for slot in &TABLE {
        let Some((base, len)) = slot.around(at) else {
            continue;
        };
        slot.lost.store(true, Ordering::Release);
        // SAFETY: the whole range is one of our mappings and can't be unmapped: the faulting thread is in the middle
        // of an access to it, so it holds the region. Other threads that access it see zeros or the former bytes;
        // both are valid.
        let mapped = unsafe {
            libc::mmap(
                base as *mut libc::c_void,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        return mapped != libc::MAP_FAILED;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PAGE_SIZE, Region, guarded_file};
    use std::os::fd::AsFd;
    use std::sync::Arc;

    fn file(pages: u64) -> rustix::fd::OwnedFd {
        let fd = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, pages * PAGE_SIZE as u64).unwrap();
        fd
    }

    #[test]
    fn a_file_that_shrinks_loses_only_its_own_region() {
        let (fd, other) = (file(8), file(8));
        let region = Region::guarded(fd.as_fd(), 0, 8 * PAGE_SIZE).unwrap();
        let untouched = Region::guarded(other.as_fd(), 0, 8 * PAGE_SIZE).unwrap();
        region.write(0, b"first");
        region.write(7 * PAGE_SIZE, b"last");
        untouched.write(7 * PAGE_SIZE, b"last");
        rustix::fs::ftruncate(&fd, PAGE_SIZE as u64).unwrap();
        let mut b = [1; 5];
        region.read(0, &mut b);
        assert_eq!((&b, region.is_lost()), (b"first", false));
        region.read(7 * PAGE_SIZE, &mut b);
        assert_eq!((b, region.is_lost()), ([0; 5], true));
        region.write(3 * PAGE_SIZE, b"still writable");
        untouched.read(7 * PAGE_SIZE, &mut b[..4]);
        assert_eq!((&b[..4], untouched.is_lost()), (&b"last"[..], false));
    }

    #[test]
    fn concurrent_copies_survive_a_truncation() {
        let fd = file(256);
        let region = Arc::new(Region::guarded(fd.as_fd(), 0, 256 * PAGE_SIZE).unwrap());
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let region = Arc::clone(&region);
                std::thread::spawn(move || {
                    let mut b = vec![0; 64 * PAGE_SIZE];
                    while !region.is_lost() {
                        region.read(128 * PAGE_SIZE, &mut b);
                    }
                })
            })
            .collect();
        rustix::fs::ftruncate(&fd, 0).unwrap();
        for t in threads {
            t.join().unwrap();
        }
    }

    /// Of two ranges that have an entry in turn, the handler never sees the start of one and the length of the other.
    #[test]
    fn start_and_length_are_of_one_range() {
        let slot = GuardedRange {
            version: AtomicUsize::new(0),
            base: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
        };
        // Low and short, or high and long.
        let (low, high) = ((1 << 20, 1 << 12), (1 << 30, 1 << 24));
        let over = AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                for _ in 0..300_000 {
                    for (base, len) in [low, high] {
                        slot.change(base, len);
                        slot.change(RESERVED, 0);
                    }
                }
                over.store(true, Ordering::Relaxed);
            });
            // In the low range if that had the length of the high one.
            while !over.load(Ordering::Relaxed) {
                assert_eq!(slot.around(low.0 + low.1 + 100), None);
                let seen = slot.around(high.0 + high.1 - 1);
                assert!(seen.is_none() || seen == Some(high), "{seen:?}");
            }
        });
    }

    #[test]
    fn a_file_that_is_too_short_is_refused() {
        let fd = file(4);
        let len = 4 * PAGE_SIZE as u64;
        assert!(guarded_file(fd.as_fd(), 0, len).is_ok());
        assert!(guarded_file(fd.as_fd(), PAGE_SIZE as u64, len).is_err());
        assert!(guarded_file(fd.as_fd(), u64::MAX, 2).is_err());
        let event = crate::EventFd::new().unwrap();
        assert!(guarded_file(event.as_fd(), 0, 1).is_err());
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(guarded_file(null.as_fd(), 0, 1).is_err());
    }
}
