//! An HTTP/1.1 server for a page, metrics and an API. It knows no disks: a [`Site`] answers. Decision 35.
//!
//! One thread accepts, and each connection has a thread that blocks with deadlines, as long as it is open:
//!
//! ```text
//! idle ── first byte ──▶ reading ── whole request ──▶ answering ── answer sent ──▶ idle
//!  │ 75 s, or room needed   │ 10 s, too large            │ 60 s, 10 s without progress
//!  ▼                        ▼                            ▼
//! closed                  4xx, closed                  closed
//! ```

mod accept;
mod connection;
mod events;
mod files;
mod head;
mod host;
mod limits;
mod out;
mod query;
mod request;
mod response;
mod server;
mod token;

pub use accept::quality;
pub use events::Events;
pub use head::{Head, Refusal, parse as parse_head};
pub use host::Hosts;
pub use limits::Limits;
pub use query::decode as decode_query;
pub use request::{Method, Request};
pub use response::{Answer, Response, Status};
pub use server::{Listener, Server, Settings};
pub use token::Token;

/// The answers to requests. Called on the threads of connections, which may wait.
pub trait Site: Send + Sync + 'static {
    /// The answer; `None`: the path is none of the site's, and may be a file of the page.
    fn answer(&self, request: &Request) -> Option<Answer>;
}
