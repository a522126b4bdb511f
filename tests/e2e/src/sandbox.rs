//! Servers in a sandbox.

use crate::tools::run;
use crate::{Stop, daemon};
use rustix::process::geteuid;
use std::path::Path;
use std::time::Duration;

/// A limit that only a hang reaches.
const HANG: Duration = Duration::from_secs(60);

/// The user of `--sandbox`: root's servers become `nobody`; others stay who they are.
pub fn user() -> String {
    match geteuid().is_root() {
        true => "nobody".into(),
        false => geteuid().as_raw().to_string(),
    }
}

/// Skips where the kernel has no Landlock, without which there is no sandbox.
pub fn need_sandbox() -> Result<(), Stop> {
    if !Path::new("/sys/kernel/security/lsm").exists() && landlock_is_missing() {
        return Stop::skip("this kernel has no Landlock");
    }
    Ok(())
}

/// True if a server says so.
fn landlock_is_missing() -> bool {
    let user = user();
    let args = [
        "serve",
        "--sandbox",
        &user,
        "--disk",
        "a=mem:1M",
        "--control",
        "none",
    ];
    let command = daemon::pvblk(args);
    let said = command.and_then(|c| run(c, HANG));
    said.is_ok_and(|s| s.stderr.contains("Landlock"))
}
