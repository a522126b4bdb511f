//! Rates between two readings of the counters of a disk or a connection.

use pvblk_backend::{Histogram, Totals};

/// Names of the operations, in the order of [`Rates::operations`].
pub const NAMES: [&str; 5] = ["read", "write", "flush", "discard", "write zeroes"];

/// One operation, or all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rate {
    /// Requests that ended, per second.
    pub requests: f64,
    pub bytes: f64,
    pub errors: f64,
    /// Times in nanoseconds; 0 without requests.
    pub average_ns: u64,
    pub p99_ns: u64,
    pub in_flight: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Rates {
    pub operations: [Rate; 5],
    pub all: Rate,
    /// Requests at work, on average.
    pub load: f64,
    /// Queues with requests at work, on average.
    pub busy: f64,
    /// Times of all operations.
    pub times: Histogram,
}

impl Rates {
    /// `seconds`: the time in which `counted` was counted.
    pub fn new(counted: &Totals, seconds: f64) -> Rates {
        let seconds = seconds.max(1e-6);
        let mut rates = Rates::default();
        let (mut time_ns, mut requests) = (0, 0);
        for (rate, o) in rates.operations.iter_mut().zip(&counted.operations) {
            *rate = Rate {
                requests: o.requests as f64 / seconds,
                bytes: o.bytes as f64 / seconds,
                errors: o.errors as f64 / seconds,
                average_ns: o.time_ns.checked_div(o.requests).unwrap_or(0),
                p99_ns: o.latency.quantile(0.99),
                in_flight: o.in_flight,
            };
            rates.all.requests += rate.requests;
            rates.all.bytes += rate.bytes;
            rates.all.errors += rate.errors;
            time_ns += o.time_ns;
            requests += o.requests;
        }
        let used = counted.operations.iter().filter(|o| o.requests > 0);
        rates.times = Histogram::from_iter(used.flat_map(|o| o.latency.buckets()));
        rates.all.average_ns = time_ns.checked_div(requests).unwrap_or(0);
        rates.all.p99_ns = rates.times.quantile(0.99);
        rates.all.in_flight = counted.in_flight.into();
        rates.load = time_ns as f64 / 1e9 / seconds;
        rates.busy = counted.busy_ns as f64 / 1e9 / seconds;
        rates
    }
}
