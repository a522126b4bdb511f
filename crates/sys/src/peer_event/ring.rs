//! An io_uring whose completions signal one eventfd: a third less than an AIO context, but each change of the eventfd takes two system calls.

use io_uring::{IoUring, opcode};
use std::os::fd::{AsRawFd, OwnedFd};

/// Entries of its queue; there is never more than one.
const ENTRIES: u32 = 2;

pub(super) struct SignalRing {
    ring: IoUring,
    registered: bool,
}

impl SignalRing {
    /// Belongs to the calling thread. `None` if the kernel refuses it.
    pub fn new() -> Option<SignalRing> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .build(ENTRIES)
            .ok()?;
        let registered = false;
        Some(SignalRing { ring, registered })
    }

    /// Signals `event` from now on; false if the kernel refuses that, and then none.
    pub fn set(&mut self, event: &OwnedFd) -> bool {
        let submitter = self.ring.submitter();
        if self.registered && submitter.unregister_eventfd().is_err() {
            return false;
        }
        self.registered = submitter.register_eventfd(event.as_raw_fd()).is_ok();
        self.registered
    }

    /// Signals the eventfd once; a full counter stays full. False if the kernel didn't.
    #[inline]
    pub fn signal(&mut self) -> bool {
        self.ring.completion().for_each(drop);
        let nothing = opcode::Nop::new().build();
        // SAFETY: the operation names no memory and no descriptor.
        let pushed = unsafe { self.ring.submission().push(&nothing) };
        // One that was pushed and not taken goes with the next: a signal too many, which peers expect.
        pushed.is_ok() && self.ring.submit().is_ok_and(|n| n > 0)
    }
}
