//! The command `serve` as a child process.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// Starts `pvblk serve` with these arguments, and waits until it serves.
pub fn start(args: &[String]) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_pvblk"))
        .arg("serve")
        .args(args)
        .env("PVBLK_CONTROL", "none")
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let ready = |l: &std::io::Result<String>| l.as_ref().is_ok_and(|l| l == "pvblk: ready");
    assert!(lines.any(|l| ready(&l)), "{args:?}: it didn't start");
    std::thread::spawn(move || lines.for_each(drop));
    child
}
