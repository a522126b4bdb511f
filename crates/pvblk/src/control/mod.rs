//! The control socket of a running server: one line asks, and the answer follows.
//!
//! ```text
//! > trace            what happens to requests from now on
//! < ok               then records as in a blktrace file, until the asker shuts its side down; then the rest, and the end
//! < error: …         or why not, in one line
//! ```

mod client;
mod server;

pub use client::Stream;
pub use server::Server;

/// Asks for a trace.
const TRACE: &str = "trace";
/// The answer before a trace.
const OK: &str = "ok";
/// What an answer begins with that says why not.
const ERROR: &str = "error: ";
