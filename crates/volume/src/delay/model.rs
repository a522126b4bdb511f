//! When a modelled device would be done: clocks in virtual time, reserved without locks.

use crate::spec::DelaySpec;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Ticks per nanosecond: fine enough that a cap of millions per second is off by less than 10⁻⁴.
const TICKS: u64 = 64;
const TICKS_PER_SECOND: u64 = 1_000_000_000 * TICKS;

/// The shared state of a modelled device. Each cap is one clock: the time until which it is taken.
pub(super) struct Model {
    epoch: Instant,
    service: u64,
    /// Ticks of one slot, and the clock of slots.
    iops: Option<(u64, AtomicU64)>,
    /// Bytes per second, and the clock of the wire.
    wire: Option<(u64, AtomicU64)>,
    /// Until when each channel is taken; empty if there are any number.
    channels: Vec<AtomicU64>,
    serial: bool,
}

/// The time at which the last request of a queue is due.
#[derive(Default)]
pub(super) struct QueueClock(u64);

impl Model {
    pub(super) fn new(spec: &DelaySpec, epoch: Instant) -> Model {
        Model {
            epoch,
            service: spec.service.as_nanos() as u64 * TICKS,
            iops: spec
                .iops
                .map(|rate| (TICKS_PER_SECOND / rate, AtomicU64::new(0))),
            wire: spec.bandwidth.map(|rate| (rate, AtomicU64::new(0))),
            channels: (0..spec.channels.unwrap_or(0))
                .map(|_| AtomicU64::new(0))
                .collect(),
            serial: spec.serial,
        }
    }

    /// Reserves time for a request of `bytes`, and returns the time at which it is due.
    pub(super) fn reserve(&self, now: Instant, bytes: u64, queue: &mut QueueClock) -> Instant {
        let nanos = now.saturating_duration_since(self.epoch).as_nanos() as u64;
        let now = nanos * TICKS;
        let mut begin = now;
        if self.serial {
            begin = begin.max(queue.0);
        }
        let mut due = self.serve(begin);
        if let Some((slot, clock)) = &self.iops {
            due = due.max(take(clock, now, *slot));
        }
        if let Some((rate, clock)) = &self.wire {
            let cost = u128::from(bytes) * u128::from(TICKS_PER_SECOND) / u128::from(*rate);
            let cost = u64::try_from(cost).unwrap_or(u64::MAX / 4);
            due = due.max(take(clock, now, cost));
        }
        queue.0 = due;
        self.epoch + Duration::from_nanos(due.div_ceil(TICKS))
    }

    /// Serves a request that may begin at `begin`; returns its end.
    fn serve(&self, begin: u64) -> u64 {
        if self.channels.is_empty() {
            return begin + self.service;
        }
        loop {
            // The channel with the least idle time before `begin`, or else the first to be free.
            let mut best: Option<(&AtomicU64, u64)> = None;
            for channel in &self.channels {
                let free = channel.load(Ordering::Relaxed);
                let better = best.is_none_or(|(_, other)| match (free <= begin, other <= begin) {
                    (true, true) => free > other,
                    (false, false) => free < other,
                    (fits, _) => fits,
                });
                if better {
                    best = Some((channel, free));
                }
            }
            let Some((channel, free)) = best else {
                return begin + self.service;
            };
            let end = begin.max(free) + self.service;
            let taken =
                channel.compare_exchange_weak(free, end, Ordering::Relaxed, Ordering::Relaxed);
            if taken.is_ok() {
                return end;
            }
        }
    }
}

/// Takes `cost` ticks of a clock from `now` on; returns when they end.
fn take(clock: &AtomicU64, now: u64, cost: u64) -> u64 {
    let mut seen = clock.load(Ordering::Relaxed);
    loop {
        let end = seen.max(now).saturating_add(cost);
        match clock.compare_exchange_weak(seen, end, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return end,
            Err(newer) => seen = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(spec: &str, bytes: &[u64]) -> Vec<u64> {
        let spec = match format!("delay:{spec}:null").parse().unwrap() {
            crate::VolumeSpec::Delay(spec, _) => spec,
            other => panic!("{other}"),
        };
        let epoch = Instant::now();
        let (model, mut queue) = (Model::new(&spec, epoch), QueueClock::default());
        let due = |&b: &u64| (model.reserve(epoch, b, &mut queue) - epoch).as_micros() as u64;
        bytes.iter().map(due).collect()
    }

    #[test]
    fn each_part_of_the_model() {
        assert_eq!(micros("100us", &[0; 3]), [100, 100, 100]);
        assert_eq!(micros("100us,serial", &[0; 3]), [100, 200, 300]);
        assert_eq!(
            micros("100us,channels=2", &[0; 5]),
            [100, 100, 200, 200, 300]
        );
        assert_eq!(micros("iops=10k", &[0; 3]), [100, 200, 300]);
        assert_eq!(micros("150us,iops=10k", &[0; 3]), [150, 200, 300]);
        assert_eq!(micros("bw=1M", &[100, 0, 200]), [100, 100, 300]);
        // A serial queue keeps to one channel instead of reserving others' future.
        assert_eq!(micros("100us,serial,channels=2", &[0; 3]), [100, 200, 300]);
    }

    #[test]
    fn a_cap_is_kept_exactly_over_threads() {
        let spec = DelaySpec {
            iops: Some(209_000),
            ..DelaySpec::default()
        };
        let epoch = Instant::now();
        let model = Model::new(&spec, epoch);
        let each = 20_000;
        let last = std::thread::scope(|s| {
            let run = || {
                let mut queue = QueueClock::default();
                (0..each)
                    .map(|_| model.reserve(epoch, 512, &mut queue))
                    .max()
            };
            [s.spawn(run), s.spawn(run)].map(|t| t.join().unwrap())
        });
        let took = (last.into_iter().flatten().max().unwrap() - epoch).as_secs_f64();
        let rate = 2.0 * f64::from(each) / took;
        assert!((rate / 209_000.0 - 1.0).abs() < 1e-4, "{rate}");
    }
}
