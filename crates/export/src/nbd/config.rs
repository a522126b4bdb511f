//! Settings of NBD connections and listeners.

use pvblk_backend::Pressure;
use std::sync::Arc;
use std::time::Duration;

/// Settings with their bounds. [`NbdConfig::default`] is right for most.
#[derive(Clone, Debug)]
pub struct NbdConfig {
    /// Most requests in flight of one connection: 1..=4096. More wait in the socket.
    pub depth: u32,
    /// Most bytes of data in flight of one connection, unsent replies included: at least 32 MiB, one full request.
    pub max_in_flight_bytes: usize,
    /// What the connections' buffers give way to; it also says how many free pages each keeps.
    pub pressure: Arc<Pressure>,
    /// Live connections of a listener, negotiations included. More are closed at once.
    pub max_connections: usize,
    /// Negotiations at the same time. More are closed at once.
    pub max_handshakes: usize,
    /// How long a negotiation may take.
    pub handshake_timeout: Duration,
    /// Listen on TCP addresses that other machines reach. NBD has no authentication here: only in trusted networks.
    pub allow_remote: bool,
}

impl Default for NbdConfig {
    /// 128 requests and 64 MiB in flight, no pressure from anywhere, 256 connections, 64 negotiations of at most 10 s, local only.
    fn default() -> NbdConfig {
        NbdConfig {
            depth: 128,
            max_in_flight_bytes: 64 << 20,
            pressure: Arc::default(),
            max_connections: 256,
            max_handshakes: 64,
            handshake_timeout: Duration::from_secs(10),
            allow_remote: false,
        }
    }
}

impl NbdConfig {
    /// The depth within its bounds.
    pub(super) fn bounded_depth(&self) -> u32 {
        self.depth.clamp(1, 4096)
    }

    /// The bytes in flight within their bounds.
    pub(super) fn bounded_in_flight(&self) -> usize {
        self.max_in_flight_bytes
            .max(super::proto::MAX_PAYLOAD as usize)
    }
}
