//! [`Limits`] of a server.

use std::time::Duration;

/// Bounds of everything that a peer can drive up.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub connections: usize,
    /// Most streams of events, among the connections.
    pub streams: usize,
    /// Most bytes of a request's line and headers.
    pub head_bytes: usize,
    pub headers: usize,
    pub body_bytes: usize,
    /// Longest rest between two requests.
    pub idle: Duration,
    /// Longest time from a request's first byte to its last one.
    pub request: Duration,
    /// Longest time for the whole answer. Streams of events have none.
    pub answer: Duration,
    /// Longest time for a reader to take anything of its answer, or all of an event.
    pub progress: Duration,
    /// Time after which a quiet stream of events gets a comment, so that a reader that is gone is noticed.
    pub sign_of_life: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 64,
            streams: 16,
            head_bytes: 8 << 10,
            headers: 64,
            body_bytes: 16 << 10,
            idle: Duration::from_secs(75),
            request: Duration::from_secs(10),
            answer: Duration::from_secs(60),
            progress: Duration::from_secs(10),
            sign_of_life: Duration::from_secs(15),
        }
    }
}
