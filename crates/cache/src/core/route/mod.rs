//! The ways of requests through the core, from page to page: which machine is asked, in which order, and where a request waits.

mod discard;
mod flush;
mod read;
mod write;

/// Most pages that one request waits for at a time.
const MOST_PENDING: u32 = 512;
