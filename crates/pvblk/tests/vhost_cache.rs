//! A guest whose server is killed with its writes in a cache: it must not be told that they are safe.

mod serving;
#[path = "../../export/tests/vhost_support/mod.rs"]
mod vhost_support;

use std::path::{Path, PathBuf};
use std::process::Child;
use tempfile::TempDir;
use vhost_support::kept::{Guest, OK};

const BYTES: usize = 4096;

struct Serve {
    dir: TempDir,
    volume: String,
    child: Child,
}

impl Serve {
    fn new(cache: &str) -> Serve {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk");
        let volume = format!("d={cache}file:{},size=8M", file.display());
        let child = start(&volume, &dir.path().join("socket"));
        Serve { dir, volume, child }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// Another process serves the disk; the one before has no time to say or save anything.
    fn kill_and_start_again(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = start(&self.volume, &self.socket());
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(volume: &str, socket: &Path) -> Child {
    let disk = format!("--disk={volume}");
    serving::start(&[disk, format!("--vhost-user=d=unix:{}", socket.display())])
}

#[test]
fn a_write_that_was_only_in_a_killed_cache_fails_the_next_flush() {
    let mut serve = Serve::new("cache:64M:");
    let mut guest = Guest::new(&serve.socket());
    guest.front.write(0, 8, &[1; BYTES]);
    assert_eq!(guest.flush(0), OK);
    guest.front.write(0, 16, &[2; BYTES]);
    serve.kill_and_start_again();
    guest.reconnect();
    // What was flushed is there, the rest is gone: otherwise this would test nothing.
    assert_eq!(guest.front.read(0, 8, BYTES), [1; BYTES]);
    assert_eq!(guest.front.read(1, 16, BYTES), [0; BYTES]);
    guest.is_told(1);
    // It writes what it had again.
    guest.front.write(1, 16, &[2; BYTES]);
    assert_eq!(guest.flush(0), OK);
    serve.kill_and_start_again();
    guest.reconnect();
    assert_eq!(guest.front.read(0, 16, BYTES), [2; BYTES]);
    assert_eq!([guest.flush(0), guest.flush(1)], [OK, OK]);
}

#[test]
fn a_server_that_is_killed_before_it_told_leaves_it_to_the_next() {
    let mut serve = Serve::new("cache:64M:");
    let mut guest = Guest::new(&serve.socket());
    guest.front.write(1, 16, &[2; BYTES]);
    for _ in 0..2 {
        serve.kill_and_start_again();
        guest.reconnect();
    }
    guest.is_told(0);
}

#[test]
fn where_nothing_is_lost_no_flush_fails() {
    for cache in ["", "cache:64M,mode=write-through:"] {
        let mut serve = Serve::new(cache);
        let mut guest = Guest::new(&serve.socket());
        guest.front.write(0, 16, &[2; BYTES]);
        serve.kill_and_start_again();
        guest.reconnect();
        assert_eq!(guest.front.read(1, 16, BYTES), [2; BYTES], "{cache}");
        assert_eq!([guest.flush(0), guest.flush(1)], [OK, OK], "{cache}");
    }
}
