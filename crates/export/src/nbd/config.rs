//! Settings of NBD connections and listeners.

use super::access::Rules;
use super::shares::Shares;
use super::tls::Tls;
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
    /// A client that takes none of its replies for so long, or sends nothing more of a write's data, is let go.
    pub stall_timeout: Duration,
    /// Bounds that the connections to one disk share, and those to all disks: the same for all listeners.
    pub shares: Arc<Shares>,
    /// The pressure that the connections' buffers give way to; it also says how many free pages each keeps. A server has its service's.
    pub pressure: Arc<Pressure>,
    /// Negotiations at the same time. For one more, the oldest one of the client that has most of them is closed.
    pub max_handshakes: usize,
    /// Longest time of a negotiation.
    pub handshake_timeout: Duration,
    /// Listen on TCP addresses that other machines reach. Without TLS and certificates for clients, anybody who reaches them reads and writes the disks.
    pub allow_remote: bool,
    /// TLS, where the listener has it.
    pub tls: Option<Arc<Tls>>,
    /// Rights of clients.
    pub rules: Rules,
}

impl Default for NbdConfig {
    /// 128 requests and 64 MiB in flight, a minute without progress, no pressure from anywhere, 64 negotiations of at most 10 s, local only.
    fn default() -> NbdConfig {
        NbdConfig {
            depth: 128,
            max_in_flight_bytes: 64 << 20,
            stall_timeout: Duration::from_secs(60),
            shares: Arc::default(),
            pressure: Arc::default(),
            max_handshakes: 64,
            handshake_timeout: Duration::from_secs(10),
            allow_remote: false,
            tls: None,
            rules: Rules::default(),
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
        // The largest request may begin and end inside blocks.
        let one = pvblk_protocol::nbd::MAX_PAYLOAD as usize + 2 * 4096;
        self.max_in_flight_bytes.max(one)
    }
}
