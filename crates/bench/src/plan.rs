//! The requests that a job makes: direction, place and length.

use super::order::{Permutation, UsedMap, Zipf, mix};
use super::spec::{Distribution, JobSpec, Mix};
use pvblk_block::{Error, Limits, SECTOR};

/// Most units of a random map: 128 MiB of memory.
const MOST_MAPPED: u64 = 1 << 30;

/// One request to be made. Places are bytes from the target's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Io {
    pub write: bool,
    pub offset: u64,
    pub len: u32,
}

enum Order {
    /// Next place of each direction.
    Sequential([u64; 2]),
    /// Blocks of one length, each used once.
    Permuted {
        order: Permutation,
        next: u64,
    },
    /// Units that are each used once, for requests of different lengths.
    Mapped(UsedMap),
    /// Random places, over and over.
    Free,
    /// Places by frequency, scattered by the permutation.
    Zipf(Zipf, Permutation),
    Pareto(f64, Permutation),
}

/// The stream of requests of one thread of a job. The same seed makes the same stream.
pub(super) struct Plan {
    rng: fastrand::Rng,
    spec: JobSpec,
    base: u64,
    span: u64,
    unit: u64,
    order: Order,
    /// Bytes and requests left; `None` if there is no limit.
    bytes_left: Option<u64>,
    ios_left: u64,
    bytes_in_all: u64,
}

impl Plan {
    /// The stream of thread `thread` of `spec` on a target of `capacity` bytes; errors if it doesn't fit there.
    pub(super) fn new(
        spec: &JobSpec,
        thread: u32,
        seed: u64,
        capacity: u64,
        limits: &Limits,
    ) -> Result<Plan, Error> {
        let bad = |why: String| Error::config(format!("job {}: {why}", spec.name));
        if let Some(why) = spec.problem() {
            return Err(bad(why));
        }
        let unit = u64::from(spec.unit_bytes());
        let sector = limits.logical_sector_bytes;
        let fits = |s: &super::BlockSizes| s.multiple_of(sector);
        if !spec.sizes.iter().all(fits) || !unit.is_multiple_of(u64::from(sector)) {
            return Err(bad(format!(
                "the target's sectors have {sector} bytes: blocks must be multiples of that"
            )));
        }
        let most = u64::from(limits.max_sectors) * SECTOR;
        if u64::from(spec.max_bytes()) > most {
            return Err(bad(format!(
                "blocks of {} bytes are more than the {most} that the target takes in one request",
                spec.max_bytes()
            )));
        }
        if spec.writes() && limits.read_only && !spec.checked().is_some_and(|v| v.only) {
            return Err(bad("it writes, but the target is read-only".into()));
        }
        let step = spec.offset_increment.of(capacity);
        let base = spec.offset.of(capacity) + step * u64::from(thread);
        let base = base - base % unit;
        let room = capacity.saturating_sub(base);
        let span = spec.size.map_or(room, |s| s.of(capacity));
        if span > room {
            return Err(bad(format!(
                "size {span} at offset {base} does not fit into the target's {capacity} bytes: take a smaller size (or a percentage) or a larger target"
            )));
        }
        if span < u64::from(spec.max_bytes()) {
            return Err(bad(format!(
                "its part of the target, {span} bytes, is less than one block of {}",
                spec.max_bytes()
            )));
        }
        let mut rng = fastrand::Rng::with_seed(seed);
        let order = order(spec, span, unit, &mut rng).map_err(bad)?;
        let bytes_in_all = spec
            .io_size
            .map_or(span, |s| s.of(capacity))
            .saturating_mul(spec.loops);
        Ok(Plan {
            rng,
            base,
            span,
            unit,
            order,
            bytes_left: (!spec.time_based).then_some(bytes_in_all),
            ios_left: spec.number_ios.unwrap_or(u64::MAX),
            bytes_in_all,
            spec: spec.clone(),
        })
    }

    /// First byte and length in bytes of the part that is used.
    pub(super) fn part(&self) -> (u64, u64) {
        (self.base, self.span)
    }

    /// Bytes to move in all; `None` if only time ends the job.
    pub(super) fn goal_bytes(&self) -> Option<u64> {
        let by_ios = self
            .ios_left
            .saturating_mul(u64::from(self.spec.max_bytes()));
        self.bytes_left.map(|_| self.bytes_in_all.min(by_ios))
    }

    /// The next request; `None` when all were given.
    #[inline]
    pub(super) fn next(&mut self) -> Option<Io> {
        if self.ios_left == 0 {
            return None;
        }
        let write = match self.spec.mix {
            Mix::Read => false,
            Mix::Write => true,
            Mix::Both => self.rng.u32(0..100) >= self.spec.read_percent,
        };
        let mut len = u64::from(self.spec.sizes[usize::from(write)].pick(&mut self.rng));
        if let Some(left) = self.bytes_left {
            len = self.shorten(len, left, write)?;
        }
        let (offset, len) = self.place(write, len)?;
        if let Some(left) = &mut self.bytes_left {
            *left -= len;
        }
        self.ios_left -= 1;
        Some(Io {
            write,
            offset: self.base + offset,
            len: len as u32,
        })
    }

    /// Shortens a request to the room that there is. Blocks of one length come whole or not at all.
    fn shorten(&self, len: u64, room: u64, write: bool) -> Option<u64> {
        if len <= room {
            return Some(len);
        }
        let cut = room - room % self.unit;
        (cut > 0 && !self.spec.sizes[usize::from(write)].is_fixed()).then_some(cut)
    }

    #[inline]
    fn place(&mut self, write: bool, len: u64) -> Option<(u64, u64)> {
        let last = (self.span - len) / self.unit;
        match &mut self.order {
            Order::Sequential(next) => {
                let at = next[usize::from(write)];
                let (at, len) = match self.shorten(len, self.span - at, write) {
                    Some(len) => (at, len),
                    None => (0, len),
                };
                if let Order::Sequential(next) = &mut self.order {
                    let aligned = (at + len).next_multiple_of(self.unit);
                    next[usize::from(write)] = aligned.min(self.span);
                }
                Some((at, len))
            }
            Order::Permuted { order, next } => {
                if *next == self.span / self.unit {
                    *order = Permutation::new(*next, &mut self.rng);
                    *next = 0;
                }
                *next += 1;
                Some((order.at(*next - 1) * self.unit, len))
            }
            Order::Mapped(map) => {
                let units = (self.span / self.unit) as usize;
                let from = self.rng.usize(0..units);
                let first = match map.next_free(from) {
                    Some(i) => i,
                    None => {
                        map.clear();
                        from
                    }
                };
                // A request ends where a used block begins, as in fio.
                let wanted = (len.div_ceil(self.unit) as usize).min(units - first);
                let mut run = 0;
                while run < wanted && !map.is_used(first + run) {
                    map.mark(first + run);
                    run += 1;
                }
                let len = len.min(run as u64 * self.unit);
                Some((first as u64 * self.unit, len))
            }
            Order::Free => Some((self.rng.u64(0..=last) * self.unit, len)),
            Order::Zipf(zipf, scatter) => {
                let block = scatter.at(zipf.pick(&mut self.rng));
                Some((block.min(last) * self.unit, len))
            }
            Order::Pareto(power, scatter) => {
                let units = (self.span / self.unit) as f64;
                let rank = (units * self.rng.f64().powf(*power)) as u64;
                let block = scatter.at(rank.min(units as u64 - 1));
                Some((block.min(last) * self.unit, len))
            }
        }
    }
}

fn order(spec: &JobSpec, span: u64, unit: u64, rng: &mut fastrand::Rng) -> Result<Order, String> {
    let units = span / unit;
    Ok(match (spec.random, spec.distribution) {
        (false, _) => Order::Sequential([0; 2]),
        (true, Distribution::Zipf(theta)) => {
            Order::Zipf(Zipf::new(units, theta), Permutation::new(units, rng))
        }
        (true, Distribution::Pareto(h)) => {
            let power = h.ln() / (1.0 - h).ln();
            Order::Pareto(power, Permutation::new(units, rng))
        }
        (true, Distribution::Uniform) if !spec.random_map => Order::Free,
        (true, Distribution::Uniform) if spec.fixed_bytes().map(u64::from) == Some(unit) => {
            Order::Permuted {
                order: Permutation::new(units, rng),
                next: 0,
            }
        }
        (true, Distribution::Uniform) if units <= MOST_MAPPED => {
            Order::Mapped(UsedMap::new(units as usize))
        }
        _ => {
            return Err(format!(
                "a random map of {units} blocks is too large: add norandommap, or take a smaller size"
            ));
        }
    })
}

/// The seed of one thread.
pub(super) fn thread_seed(seed: u64, number: u32) -> u64 {
    mix(seed ^ (u64::from(number) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
