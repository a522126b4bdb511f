//! Whether a lane that waits for its device asks its source to ring meanwhile.
//!
//! A ring costs the peer a system call or a hypercall, and us a wake-up, for a request that the next end at the device would show as well. So where
//! many requests are at the device, the lane sleeps without being rung, but not for long: a device that is slower than that is known after a
//! few tries, and then the source rings as ever.

use std::time::Duration;

/// With so many requests at the device one ends soon.
const MANY: usize = 8;
/// Longest that a request may lie on the ring unseen because of this.
pub(crate) const UNSEEN: Duration = Duration::from_micros(50);
/// Most sleeps between two tries.
const SELDOM: u32 = 256;

/// What was learned of the device.
#[derive(Debug, Default)]
pub(crate) struct Ringing {
    /// It sleeps, or slept, without being rung; nothing has ended since.
    waits: bool,
    /// Sleeps until the next try.
    skip: u32,
    /// As many as there were after the last try in vain; halved by each that was not.
    pause: u32,
}

impl Ringing {
    /// Before each sleep: true if the source need not ring, for [`UNSEEN`] at most.
    pub fn may_rest(&mut self, at_device: usize) -> bool {
        if std::mem::take(&mut self.waits) {
            self.pause = (self.pause * 2).clamp(1, SELDOM);
            self.skip = self.pause;
        }
        if at_device < MANY {
            return false;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        true
    }

    /// It does sleep so.
    pub fn rests(&mut self) {
        self.waits = true;
    }

    /// Requests ended at the device.
    #[inline]
    pub fn ended(&mut self) {
        if std::mem::take(&mut self.waits) {
            self.pause /= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fast_device_is_waited_for_and_a_slow_one_seldom() {
        let mut ringing = Ringing::default();
        for _ in 0..100 {
            assert!(ringing.may_rest(MANY));
            ringing.rests();
            ringing.ended();
        }
        assert!(!ringing.may_rest(MANY - 1));
        // Nothing ends in time, ever: one try in 256 sleeps after a while.
        let mut tries = 0;
        for _ in 0..10_000 {
            if ringing.may_rest(32) {
                ringing.rests();
                tries += 1;
            }
        }
        assert!(
            (10_000 / 257..10_000 / 257 + 12).contains(&tries),
            "{tries}"
        );
        // It becomes fast.
        let mut sleeps = 0;
        while ringing.pause > 0 {
            sleeps += 1;
            if ringing.may_rest(32) {
                ringing.rests();
                ringing.ended();
            }
        }
        assert!(sleeps < 2 * SELDOM, "{sleeps}");
        assert!(ringing.may_rest(32));
    }
}
