//! [`Listener`]: a listening socket, and the times in which nobody is accepted.

use super::control::Io;
use pvblk_backend::{RateLimit, ratelimited};
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Pause while the process has no descriptors left: the connection that can't be taken keeps the listener readable.
const NO_DESCRIPTORS: Duration = Duration::from_millis(100);

/// A listening socket in a control thread's loop.
pub(crate) struct Listener<L> {
    socket: L,
    token: u64,
    /// Where it is, for the log.
    place: String,
    paused_until: Option<Instant>,
    /// Its server takes another one.
    wanted: bool,
    /// The loop waits for it.
    heard: bool,
}

impl<L: AsFd> Listener<L> {
    /// Listens from now on; `token` is told when there is a connection.
    pub fn new(socket: L, place: String, token: u64, io: &Io) -> io::Result<Listener<L>> {
        io.add(socket.as_fd(), token)?;
        Ok(Listener {
            socket,
            token,
            place,
            paused_until: None,
            wanted: true,
            heard: true,
        })
    }

    /// Path or address of the socket.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// The next connection, if there is one and one may be taken; `accept` takes it.
    pub fn accept<T>(
        &mut self,
        io: &Io,
        accept: impl FnOnce(&L) -> io::Result<Option<T>>,
    ) -> Option<T> {
        if !self.heard {
            return None;
        }
        accept(&self.socket).unwrap_or_else(|e| {
            let place = &self.place;
            ratelimited!(
                error,
                RateLimit::of(place, "accept"),
                "accepting at {place}: {e}"
            );
            self.pause(io, NO_DESCRIPTORS);
            None
        })
    }

    /// Accepts nobody for so long; a longer pause that has begun stays.
    pub fn pause(&mut self, io: &Io, time: Duration) {
        self.paused_until = self.paused_until.max(Some(io.now() + time));
        self.set(io);
    }

    /// Accepts somebody only while `wanted`.
    pub fn want(&mut self, io: &Io, wanted: bool) {
        self.wanted = wanted;
        self.set(io);
    }

    /// The end of its pause.
    pub fn due(&self) -> Option<Instant> {
        self.paused_until
    }

    /// Time has passed.
    pub fn passed(&mut self, io: &Io) {
        if self.paused_until.is_some_and(|t| t <= io.now()) {
            self.paused_until = None;
            self.set(io);
        }
    }

    fn set(&mut self, io: &Io) {
        let heard = self.wanted && self.paused_until.is_none();
        if heard != self.heard {
            self.heard = heard;
            io.set(self.socket.as_fd(), self.token, heard);
        }
    }
}
