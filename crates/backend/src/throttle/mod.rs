//! Limits of a disk: requests and bytes per second, of reads, of writes and of both, for the disk and for each of its connections.
//!
//! [`Throttle`] has the rates and the disk's [accounts](account), which all lanes of the disk charge without a lock; a [`Connection`] has those of one
//! connection. Requests that have to wait do so in their lane ([`crate::lane`]), which sleeps until their time.

mod account;
mod limits;

use account::{Account, Bursts, LimitRate};
use limits::RATES;
pub use limits::ThrottleLimits;
use parking_lot::Mutex;
use pvblk_block::{Clock, Op, Request, SECTOR, SystemClock};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// One for each of [`limits::KEYS`].
type Accounts = [Account; RATES];
type LimitRates = [LimitRate; RATES];

/// Requests of which the limits hold each other back: reads, and all that changes the disk.
pub(crate) const KINDS: usize = 2;

/// The kind that a request's limits are of; `None` for a flush, which isn't limited.
#[inline]
pub(crate) fn kind(op: Op) -> Option<usize> {
    match op {
        Op::Flush => None,
        Op::Read => Some(0),
        Op::Write | Op::Discard | Op::WriteZeroes => Some(1),
    }
}

/// Indices of the accounts that requests of a kind are charged to, for one request and for their bytes.
const REQUESTS: [[usize; 2]; KINDS] = [[0, 2], [1, 2]];
const BYTES: [[usize; 2]; KINDS] = [[3, 5], [4, 5]];

/// Limits of a disk, which its lanes keep together.
pub struct Throttle {
    /// There are limits, or lanes that hold requests back because of limits that there were.
    on: AtomicBool,
    disk_rates: LimitRates,
    connection_rates: LimitRates,
    burst_ns: AtomicU64,
    /// Changes with the limits.
    generation: AtomicU64,
    accounts: Accounts,
    held_back: AtomicU64,
    held_back_ever: AtomicU64,
    clock: Arc<dyn Clock>,
    origin: Instant,
    state: Mutex<ThrottleState>,
}

#[derive(Default)]
struct ThrottleState {
    limits: ThrottleLimits,
    /// Lanes that hold requests back.
    holding: usize,
    since: Option<Instant>,
    connections: Vec<Weak<Connection>>,
}

/// The requests that the limits of a disk hold back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldBack {
    /// Requests that wait now.
    pub requests: u64,
    /// Requests that had to wait since the disk is served.
    pub ever: u64,
    /// The time from which on some requests have waited without a pause.
    pub since: Option<Instant>,
}

/// One connection of a disk: the lanes of a front end, or of an NBD client's connection.
pub struct Connection {
    name: String,
    accounts: Accounts,
}

impl Connection {
    pub fn new(name: String) -> Arc<Connection> {
        Arc::new(Connection {
            name,
            accounts: Accounts::default(),
        })
    }

    /// Its name for people.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Default for Throttle {
    fn default() -> Throttle {
        Throttle::with_clock(Arc::new(SystemClock))
    }
}

impl Throttle {
    /// Without limits, and with the time of a clock of the caller's.
    pub fn with_clock(clock: Arc<dyn Clock>) -> Throttle {
        Throttle {
            on: AtomicBool::new(false),
            disk_rates: LimitRates::default(),
            connection_rates: LimitRates::default(),
            burst_ns: AtomicU64::new(0),
            generation: AtomicU64::new(0),
            accounts: Accounts::default(),
            held_back: AtomicU64::new(0),
            held_back_ever: AtomicU64::new(0),
            origin: clock.now(),
            clock,
            state: Mutex::default(),
        }
    }

    /// Sets the limits, also while the disk is used. Accounts keep their debts; requests that wait now are looked at again within 100 ms.
    pub fn set(&self, limits: ThrottleLimits) {
        let mut state = self.state.lock();
        let now = self.now();
        state.connections.retain(|c| c.strong_count() > 0);
        let connections: Vec<_> = state.connections.iter().filter_map(Weak::upgrade).collect();
        let burst = limits.burst.as_nanos() as u64;
        let bursts = Bursts {
            old: self.burst_ns.swap(burst, Ordering::Relaxed),
            new: burst,
        };
        for index in 0..RATES {
            let of_disk = std::iter::once(&self.accounts[index]);
            self.disk_rates[index].set(limits.disk[index], (now, bursts), of_disk);
            let of_each = connections.iter().map(|c| &c.accounts[index]);
            self.connection_rates[index].set(limits.connection[index], (now, bursts), of_each);
        }
        state.limits = limits;
        self.generation.fetch_add(1, Ordering::Release);
        self.switch(&state);
    }

    /// The present limits.
    pub fn limits(&self) -> ThrottleLimits {
        self.state.lock().limits
    }

    /// The requests that its limits hold back.
    pub fn held_back(&self) -> HeldBack {
        HeldBack {
            requests: self.held_back.load(Ordering::Relaxed),
            ever: self.held_back_ever.load(Ordering::Relaxed),
            since: self.state.lock().since,
        }
    }

    /// True if lanes have to ask.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// To be called under the lock that `state` was taken with.
    fn switch(&self, state: &ThrottleState) {
        let on = !state.limits.is_none() || state.holding > 0;
        self.on.store(on, Ordering::Relaxed);
    }

    /// Nanoseconds since the throttle was made.
    pub(crate) fn now(&self) -> u64 {
        let since = self.clock.now().saturating_duration_since(self.origin);
        since.as_nanos() as u64
    }

    pub(crate) fn instant(&self, at: u64) -> Instant {
        self.origin + Duration::from_nanos(at)
    }

    /// Shortest sleep of a lane that holds requests back, in nanoseconds: late requests lose nothing while it is far below the burst.
    pub(crate) fn shortest_sleep(&self) -> u64 {
        (self.burst_ns.load(Ordering::Relaxed) / 16).min(1_000_000)
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Makes a connection known, so that its debts are kept when limits change.
    pub(crate) fn enter(&self, connection: &Arc<Connection>) {
        let mut state = self.state.lock();
        state.connections.retain(|c| c.strong_count() > 0);
        let known = |c: &Weak<Connection>| c.as_ptr() == Arc::as_ptr(connection);
        if !state.connections.iter().any(known) {
            state.connections.push(Arc::downgrade(connection));
        }
    }

    /// A lane begins to hold requests back (`true`), or holds none any more.
    pub(crate) fn holds(&self, holds: bool) {
        let mut state = self.state.lock();
        match holds {
            true => state.holding += 1,
            false => state.holding -= 1,
        }
        state.since = match state.holding {
            0 => None,
            _ => state.since.or_else(|| Some(self.clock.now())),
        };
        self.switch(&state);
    }

    /// Counts requests that begin to wait.
    pub(crate) fn count_held(&self, requests: u64) {
        self.held_back.fetch_add(requests, Ordering::Relaxed);
        self.held_back_ever.fetch_add(requests, Ordering::Relaxed);
    }

    /// Counts requests that waited and go on.
    pub(crate) fn count_passed(&self, requests: u64) {
        self.held_back.fetch_sub(requests, Ordering::Relaxed);
    }

    /// Charges a request of that kind; returns the time at which it may pass.
    pub(crate) fn charge(&self, of: &Connection, request: &Request, kind: usize, now: u64) -> u64 {
        let burst = self.burst_ns.load(Ordering::Relaxed);
        let mut at = 0;
        self.each_cost(of, request, kind, |account, cost| {
            at = account.charge(cost, burst, now).max(at);
        });
        at
    }

    /// The time at which a request may pass that was charged by limits that may have changed since.
    pub(crate) fn due(&self, of: &Connection, request: &Request, kind: usize) -> u64 {
        let burst = self.burst_ns.load(Ordering::Relaxed);
        let mut at = 0;
        self.each_cost(of, request, kind, |account, cost| {
            at = account.due(cost, burst).max(at);
        });
        at
    }

    /// A request that was charged and had to wait passes now.
    pub(crate) fn passes(&self, of: &Connection, request: &Request, kind: usize, now: u64) {
        self.each_cost(of, request, kind, |account, cost| account.passes(cost, now));
    }

    fn each_cost(
        &self,
        of: &Connection,
        request: &Request,
        kind: usize,
        mut f: impl FnMut(&Account, u64),
    ) {
        let bytes = match request.op.has_data() {
            true => request.sectors * SECTOR,
            false => 0,
        };
        let requests = REQUESTS[kind].map(|index| (index, 1));
        let bytes = BYTES[kind].map(|index| (index, bytes));
        for (index, amount) in requests.into_iter().chain(bytes) {
            let tables = [
                (&self.disk_rates, &self.accounts),
                (&self.connection_rates, &of.accounts),
            ];
            for (rates, accounts) in tables {
                let cost = rates[index].cost(amount);
                if cost > 0 {
                    f(&accounts[index], cost);
                }
            }
        }
    }
}

impl std::fmt::Debug for Throttle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Throttle")
            .field("limits", &self.limits().to_string())
            .field("held_back", &self.held_back())
            .finish_non_exhaustive()
    }
}
