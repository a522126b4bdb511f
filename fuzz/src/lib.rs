//! Fuzz targets: each takes any bytes, plays a hostile peer with them, and checks everything that it sees against
//! an independent model. A target panics on a finding and never otherwise.
//!
//! libFuzzer runs them through `fuzz_targets/` (see `scripts/fuzz.sh`), `cargo test` and the `smoke` binary
//! over the seeds in `corpus/` and random changes of them.

pub mod blktrace;
pub mod front;
pub mod front_table;
pub mod guest;
pub mod http;
pub mod nbd_client;
pub mod nbd_contexts;
pub mod nbd_device;
pub mod nbd_handshake;
pub mod nbd_requests;
pub mod parse;
pub mod parse_model;
pub mod raid5_metadata;
pub mod ring;
pub mod ring_model;
pub mod smoke;
pub mod store;
pub mod virtqueue;
pub mod virtqueue_model;
pub mod xenstore;

pub type Target = fn(&[u8]);

/// All targets by name.
pub const TARGETS: &[(&str, Target)] = &[
    ("blktrace", blktrace::blktrace),
    ("front", front::front),
    ("http", http::http),
    ("nbd_client", nbd_client::nbd_client),
    ("nbd_contexts", nbd_contexts::nbd_contexts),
    ("nbd_handshake", nbd_handshake::nbd_handshake),
    ("nbd_requests", nbd_requests::nbd_requests),
    ("parse", parse::parse),
    ("raid5_metadata", raid5_metadata::raid5_metadata),
    ("ring", ring::ring),
    ("store", store::store),
    ("virtqueue", virtqueue::virtqueue),
    ("xenstore", xenstore::xenstore),
];
