//! The connections of a volume, all of them up or none, and the queues that use them (docs/decisions/0032-nbd-volumes.md).

use super::connect::{Connected, another, connect};
use super::hello::Terms;
use super::kept::{Kept, Log};
use super::{NbdClientConfig, NbdUri, OnReconnect};
use parking_lot::Mutex;
use pvblk_block::{Capacity, DeviceEvent, Error, ErrorKind, EventHub, SECTOR};
use pvblk_protocol::nbd::tflag;
use pvblk_sys::{EventFd, Poller};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Token of [`Link::bell`] in the poller; sockets have their generation, from 1.
pub(super) const BELL: u64 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Up,
    /// The last connection broke; the thread looks for the server.
    Down,
    /// Given up: all requests fail, now and later.
    Gone,
}

/// The next thing for a queue whose connection broke.
pub(super) enum Next {
    /// A connection of this generation.
    Connected(Connected, u64),
    Gone,
}

/// The link's side of a queue.
pub(super) struct Seat {
    /// Readable while there is something in `next`.
    pub bell: EventFd,
    /// True while there may be something in `next`.
    pub news: AtomicBool,
    state: Mutex<SeatState>,
    /// Where the queue keeps its writes; `None`: nothing is kept.
    pub log: Option<Arc<Log>>,
}

#[derive(Default)]
struct SeatState {
    /// The socket that the queue has, or is about to get.
    socket: Option<Arc<OwnedFd>>,
    next: Option<Next>,
}

impl Seat {
    fn new(log: Option<Arc<Log>>) -> io::Result<Seat> {
        Ok(Seat {
            bell: EventFd::new()?,
            news: AtomicBool::new(false),
            state: Mutex::default(),
            log,
        })
    }

    fn tell(&self, next: Next) {
        let mut state = self.state.lock();
        state.socket = match &next {
            Next::Connected(c, _) => Some(Arc::clone(&c.stream.socket)),
            Next::Gone => None,
        };
        state.next = Some(next);
        self.news.store(true, Ordering::Release);
        self.bell.notify();
    }

    /// Takes what there is, and clears the bell.
    pub fn take(&self) -> Option<Next> {
        let mut state = self.state.lock();
        self.news.store(false, Ordering::Relaxed);
        self.bell.drain();
        state.next.take()
    }
}

struct State {
    stage: Stage,
    /// Number of the connections, from 1; while there is none, of the next ones.
    generation: u64,
    /// Why the stage isn't [`Stage::Up`].
    why: String,
    /// Connections without a queue.
    ready: Vec<Connected>,
    seats: Vec<Arc<Seat>>,
    /// Connections that were closed with requests in flight, and are to be made anew.
    owed: usize,
}

/// State that the device, its queues and its thread share.
pub(super) struct Link {
    pub uri: NbdUri,
    pub config: NbdClientConfig,
    /// Of the first connection: the limits of the device.
    pub terms: Terms,
    pub capacity: Capacity,
    pub events: EventHub,
    pub kept: Option<Kept>,
    state: Mutex<State>,
    /// Has the sockets, for their hang-up, and the bell.
    pub poller: Poller,
    /// Wakes the thread.
    pub bell: EventFd,
    /// The device is closed.
    pub stop: AtomicBool,
    /// The next connections may have a smaller size.
    any_size: AtomicBool,
    /// The server has answered a request over the present connections.
    answered: AtomicBool,
}

impl Link {
    /// `first`: connections of the same terms, at least one.
    pub fn new(
        uri: &NbdUri,
        config: NbdClientConfig,
        first: Vec<Connected>,
    ) -> Result<Arc<Link>, Error> {
        let os = |e| Error::os(format!("{uri}: connecting"), e);
        let terms = first[0].terms;
        let link = Link {
            uri: uri.clone(),
            terms,
            capacity: Capacity::new(sectors(&terms)),
            events: EventHub::default(),
            kept: Kept::new(&uri.to_string(), &terms, &config),
            state: Mutex::new(State {
                stage: Stage::Up,
                generation: 1,
                why: String::new(),
                ready: Vec::new(),
                seats: Vec::new(),
                owed: 0,
            }),
            poller: Poller::new().map_err(os)?,
            bell: EventFd::new().map_err(os)?,
            stop: AtomicBool::new(false),
            any_size: AtomicBool::new(false),
            answered: AtomicBool::new(false),
            config,
        };
        link.poller
            .add(link.bell.as_fd(), BELL, false)
            .map_err(os)?;
        for c in &first {
            link.watch(c, 1).map_err(os)?;
        }
        link.state.lock().ready = first;
        Ok(Arc::new(link))
    }

    fn watch(&self, c: &Connected, generation: u64) -> io::Result<()> {
        self.poller.add_hangup(c.stream.fd(), generation)
    }

    /// Why requests fail or wait; `None` while the server is there.
    pub fn failure(&self) -> Option<String> {
        let state = self.state.lock();
        (state.stage != Stage::Up).then(|| state.why.clone())
    }

    /// A seat for one more queue. It gets its connection as [`Seat::take`] says: at once, or when the server is back.
    pub fn enter(&self) -> Result<Arc<Seat>, Error> {
        let gone = |why: &str| Error::new(ErrorKind::Disconnected, why);
        let mut made: Option<(Connected, u64)> = None;
        loop {
            let mut state = self.state.lock();
            if state.stage == Stage::Gone {
                return Err(gone(&state.why));
            }
            // A flush would cover only the writes of its own connection.
            if !state.seats.is_empty() && !self.terms.takes_several() {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "{}: the server doesn't offer CAN_MULTI_CONN, so a writable export has one queue only: use one thread, or serve it to one client",
                        self.uri
                    ),
                ));
            }
            if let Some(most) = self.config.connections
                && state.seats.len() >= usize::from(most)
            {
                let why = format!("{}: all {most} connections are in use", self.uri);
                return Err(
                    Error::new(ErrorKind::Exhausted, why).advise("ask for more with connections=")
                );
            }
            let made_now = made.take().filter(|(_, g)| *g == state.generation);
            let connection = state.ready.pop().or(made_now.map(|(c, _)| c));
            if connection.is_none() && state.stage == Stage::Up && self.config.connections.is_none()
            {
                let generation = state.generation;
                drop(state);
                let c = self.another(self.capacity.sectors() * SECTOR)?;
                let os = |e| Error::os(format!("{}: connecting", self.uri), e);
                self.watch(&c, generation).map_err(os)?;
                made = Some((c, generation));
                continue;
            }
            let log = self.kept.as_ref().map(|k| k.log(state.generation));
            let seat =
                Seat::new(log).map_err(|e| Error::os(format!("{}: a queue", self.uri), e))?;
            let seat = Arc::new(seat);
            if let Some(c) = connection {
                seat.tell(Next::Connected(c, state.generation));
            }
            state.seats.push(Arc::clone(&seat));
            return Ok(seat);
        }
    }

    /// A queue is closed. `own`: its connection; with `idle` nothing is on the way on it, so that another queue may have it. Returns the connection
    /// if nobody will.
    pub fn leave(
        &self,
        seat: &Arc<Seat>,
        own: Option<(Connected, u64)>,
        idle: bool,
    ) -> Option<Connected> {
        let mut state = self.state.lock();
        state.seats.retain(|s| !Arc::ptr_eq(s, seat));
        if let (Some(kept), Some(log)) = (&self.kept, &seat.log) {
            kept.give_back(log);
        }
        // One that it was given and didn't take is as good as new.
        let (own, idle) = match seat.take() {
            Some(Next::Connected(c, generation)) => (Some((c, generation)), true),
            _ => (own, idle),
        };
        let (c, generation) = own?;
        if state.stage != Stage::Up || state.generation != generation {
            return None;
        }
        if idle && self.config.connections.is_some() {
            self.give(&mut state, c);
            return None;
        }
        // Its end is no news from now on.
        let _ = self.poller.remove(c.stream.fd());
        if self.config.connections.is_some() {
            state.owed += 1;
            self.bell.notify();
        }
        Some(c)
    }

    /// Hands a connection of the present generation to a queue that has none, or keeps it for one.
    fn give(&self, state: &mut State, c: Connected) {
        let waits = |s: &&Arc<Seat>| s.state.lock().socket.is_none();
        match state.seats.iter().find(waits) {
            Some(seat) => seat.tell(Next::Connected(c, state.generation)),
            None => state.ready.push(c),
        }
    }

    /// True if connections are to be made for those that were closed.
    pub fn is_owed(&self) -> bool {
        let state = self.state.lock();
        state.stage == Stage::Up && state.owed > 0
    }

    /// Makes one of them.
    pub fn pay(&self) -> Result<(), Error> {
        let generation = self.state.lock().generation;
        let c = self.another(self.capacity.sectors() * SECTOR)?;
        let mut state = self.state.lock();
        if state.stage == Stage::Up && state.generation == generation && state.owed > 0 {
            self.watch(&c, generation)
                .map_err(|e| Error::os(format!("{}: connecting", self.uri), e))?;
            state.owed -= 1;
            self.give(&mut state, c);
        }
        Ok(())
    }

    /// A number that changes whenever a write is submitted and whenever one ends; `None` if they aren't counted.
    pub fn writes(&self) -> Option<u64> {
        match &self.kept {
            Some(kept) => Some(kept.writes()),
            None => self.terms.has(tflag::READ_ONLY).then_some(0),
        }
    }

    /// Looks whether the export has another size now. If so, all connections are made anew, and the size is taken whatever it is.
    pub fn refresh(&self) -> Result<(), Error> {
        if !self.terms.takes_several() || self.failure().is_some() {
            return Ok(());
        }
        let generation = self.state.lock().generation;
        let found = connect(&self.uri, &self.config)?;
        if sectors(&found.terms) != self.capacity.sectors()
            && self.config.on_reconnect == OnReconnect::Resend
        {
            self.any_size.store(true, Ordering::Release);
            self.lost(generation, "the export has another size");
        }
        Ok(())
    }

    /// The least size that a new connection's export must have, in bytes.
    pub fn least_bytes(&self) -> u64 {
        match self.any_size.load(Ordering::Acquire) {
            true => 0,
            false => self.capacity.sectors() * SECTOR,
        }
    }

    /// One more connection to the same export.
    pub fn another(&self, least_bytes: u64) -> Result<Connected, Error> {
        another(&self.uri, &self.config, &self.terms, least_bytes)
    }

    /// A connection of this generation broke.
    #[cold]
    pub fn lost(&self, generation: u64, why: &str) {
        let mut state = self.state.lock();
        if state.stage != Stage::Up || state.generation != generation {
            return;
        }
        state.why = why.to_owned();
        state.generation += 1;
        if let Some(kept) = &self.kept {
            kept.seal(state.generation);
        }
        for c in state.ready.drain(..) {
            hang_up(&c.stream.socket);
        }
        for seat in &state.seats {
            // Its queue learns of it by the end of the stream.
            seat.state.lock().socket.as_deref().map(hang_up);
        }
        match self.config.on_reconnect {
            OnReconnect::Resend => state.stage = Stage::Down,
            OnReconnect::Fail => return self.end(state),
        }
        drop(state);
        self.bell.notify();
    }

    /// Gives up: all requests fail, now and later.
    pub fn give_up(&self, why: &str) {
        let mut state = self.state.lock();
        if state.stage == Stage::Down {
            state.why = why.to_owned();
            self.end(state);
        }
    }

    fn end(&self, mut state: parking_lot::MutexGuard<'_, State>) {
        state.stage = Stage::Gone;
        self.events.set_gone();
        for seat in &state.seats {
            seat.tell(Next::Gone);
        }
        drop(state);
        if let Some(kept) = &self.kept {
            kept.forget();
        }
        self.events.raise(DeviceEvent::Gone);
    }

    /// Why the connections broke, if they did and aren't made anew yet.
    pub fn is_down(&self) -> Option<String> {
        let state = self.state.lock();
        (state.stage == Stage::Down).then(|| state.why.clone())
    }

    /// Number of connections that the volume is to have.
    pub fn needs(&self) -> usize {
        let state = self.state.lock();
        let all = match self.config.connections {
            Some(most) if self.terms.takes_several() => usize::from(most),
            Some(_) => 1,
            None => state.seats.len(),
        };
        all.max(1)
    }

    /// The server has answered a request.
    #[inline]
    pub fn note_answer(&self) {
        // All queues come here, for each answer.
        if !self.answered.load(Ordering::Relaxed) {
            self.answered.store(true, Ordering::Relaxed);
        }
    }

    /// True if the server has answered a request since the last call.
    pub fn take_answered(&self) -> bool {
        self.answered.swap(false, Ordering::Relaxed)
    }

    /// Goes on with these connections. Gives them back if there are more queues than connections.
    pub fn resume(&self, mut next: Vec<Connected>) -> Result<(), Vec<Connected>> {
        let mut state = self.state.lock();
        if state.seats.len() > next.len() {
            return Err(next);
        }
        let generation = state.generation;
        let found = sectors(&next[0].terms);
        for c in &next {
            if let Err(e) = self.watch(c, generation) {
                // Its end is noticed by its queue then, if it has one.
                tracing::warn!("{}: waiting for its end: {e}", self.uri);
            }
        }
        let resized = self.capacity.set(found);
        self.any_size.store(false, Ordering::Release);
        for seat in &state.seats {
            if let Some(c) = next.pop() {
                seat.tell(Next::Connected(c, generation));
            }
        }
        state.ready = match self.config.connections {
            Some(_) => next,
            None => Vec::new(),
        };
        state.owed = 0;
        state.stage = Stage::Up;
        state.why.clear();
        drop(state);
        if resized {
            self.events.raise(DeviceEvent::Resized { sectors: found });
        }
        Ok(())
    }
}

/// Capacity in 512-byte sectors: whole blocks of the export.
pub(super) fn sectors(terms: &Terms) -> u64 {
    let unit = u64::from(terms.min_block);
    (terms.size_bytes - terms.size_bytes % unit) / SECTOR
}

/// The server needn't wait for us, nor send what nobody reads.
pub(super) fn hang_up(socket: &OwnedFd) {
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}
