//! End-to-end tests: the real `pvblk` command as child processes, and the clients that people use.
//!
//! The command is built ahead (`cargo build --release -p pvblk`); `PVBLK_BIN` names another one. The experiments (`pvblk-lab`; `PVBLK_LAB_BIN`) and the
//! examples of crates are those that `cargo test --workspace` builds.
//! `PVBLK_E2E_FULL=1` asks for the full sizes and times. A test that the machine can't run is skipped
//! with a reason, never passed; see [`Stop::Skip`].

pub mod arrays;
pub mod browser;
pub mod btt;
pub mod ceph;
pub mod control;
pub mod credentials;
pub mod cuts;
pub mod daemon;
pub mod documents;
pub mod hops;
pub mod http;
pub mod later;
pub mod load;
pub mod managed;
pub mod md;
pub mod mounted;
pub mod nbd;
pub mod netns;
pub mod outcome;
pub mod package;
pub mod pattern;
pub mod perfetto;
pub mod qmp;
pub mod sandbox;
pub mod slow_medium;
pub mod stage;
pub mod terminal;
pub mod tools;
pub mod vm;

pub use daemon::Daemon;
pub use outcome::{Stop, run_all, run_trials};
pub use stage::{Route, Stage};

/// Bytes in a MiB.
pub const MIB: u64 = 1 << 20;

/// True if the full sizes and times were asked for.
pub fn full() -> bool {
    std::env::var_os("PVBLK_E2E_FULL").is_some_and(|v| v == "1")
}

/// Skips a test of what is released unless `make test-release` runs it: it takes minutes.
pub fn need_release() -> Result<(), Stop> {
    if full() || std::env::var_os("PVBLK_E2E_RELEASE").is_some_and(|v| v == "1") {
        return Ok(());
    }
    Stop::skip("it takes minutes: make test-release runs it")
}

/// Size of a disk for copies, in bytes.
pub fn disk_bytes() -> u64 {
    if full() { 1024 * MIB } else { 256 * MIB }
}
