//! A server over rings that goes away and comes back, as callers see it.

use pvblk_disk::{Disk, Error, ErrorKind, Options, Request};
use std::time::Duration;
use support::Server;

#[path = "support/mod.rs"]
#[allow(dead_code, reason = "every test file uses another part of it")]
mod support;

fn connect(server: &Server, patience: Option<Duration>) -> Disk {
    let options = Options::new().patience(patience);
    options.connect(server.socket(), "vm1").unwrap()
}

const LONG: Option<Duration> = Some(Duration::from_secs(60));

#[test]
fn a_disk_is_found_by_its_name_only() {
    let server = Server::start("mem:1M");
    let error = Disk::connect(server.socket(), "vm2").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("vm2"), "{error}");
    let spec = format!("rings:unix:{},disk=vm1", server.socket().display());
    let disk = Disk::open(&spec).unwrap();
    assert_eq!(disk.size_bytes(), 1 << 20);
    disk.close().unwrap();
}

/// Requests wait for a server that comes back: callers see nothing of it.
#[test]
fn requests_wait_for_the_server() {
    let mut server = Server::start("delay:2ms:mem:1M");
    let disk = connect(&server, LONG);
    disk.write_at(&[1; 4096], 0).unwrap();
    let mut queue = disk.queue(8).unwrap();
    for n in 0..4 {
        let mut buffer = disk.buffer(4096).unwrap();
        buffer.copy_from(0, &[n as u8 + 2; 4096]);
        queue.push(Request::write((n + 1) * 4096, buffer)).unwrap();
    }
    queue.submit();
    server.go_away();
    std::thread::scope(|scope| {
        let blocked = scope.spawn(|| {
            let mut block = [0; 4096];
            disk.read_at(&mut block, 0).map(|()| block[0])
        });
        // The step-driven way can look how long it lasts.
        let mut done = Vec::new();
        while queue
            .wait(&mut done, Some(Duration::from_millis(20)))
            .unwrap()
            > 0
        {}
        for n in 4..8 {
            let mut buffer = disk.buffer(4096).unwrap();
            buffer.copy_from(0, &[n as u8 + 2; 4096]);
            queue
                .push(Request::write((n + 1) * 4096, buffer))
                .unwrap_or_else(|e| panic!("{e}"));
        }
        assert_eq!(
            queue
                .wait(&mut done, Some(Duration::from_millis(20)))
                .unwrap(),
            0
        );
        assert!(!blocked.is_finished());
        server.come_back();
        while queue.in_flight() > 0 {
            queue.wait(&mut done, None).unwrap();
        }
        assert_eq!(done.len(), 8);
        for c in done {
            c.result.unwrap();
        }
        assert_eq!(blocked.join().unwrap().unwrap(), 1);
    });
    disk.flush().unwrap();
    for n in 0..9 {
        let mut block = [0; 4096];
        disk.read_at(&mut block, n * 4096).unwrap();
        assert_eq!(block, [n as u8 + 1; 4096]);
    }
    drop(queue);
    disk.close().unwrap();
}

/// Everything fails once the disk was given up, in each way of using it.
fn is_of_no_use(disk: Disk) {
    let is_gone = |result: Result<(), Error>| {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
    };
    is_gone(disk.flush());
    is_gone(disk.read_at(&mut [0; 512], 0));
    is_gone(disk.write_at(&[0; 512], 0));
    let mut queue = disk.queue(1).unwrap();
    queue.push(Request::flush()).unwrap();
    let mut done = Vec::new();
    queue.wait(&mut done, None).unwrap();
    is_gone(done.remove(0).result);
    drop(queue);
    is_gone(disk.close());
}

#[test]
fn requests_fail_when_the_server_does_not_come_back_in_time() {
    for patience in [Some(Duration::from_millis(200)), None] {
        let mut server = Server::start("delay:2ms:mem:1M");
        let disk = connect(&server, patience);
        let mut queue = disk.queue(8).unwrap();
        for n in 0..8 {
            let buffer = disk.buffer(4096).unwrap();
            queue.push(Request::read(n * 4096, buffer)).unwrap();
        }
        queue.submit();
        server.go_away();
        let mut done = Vec::new();
        while queue.in_flight() > 0 {
            queue.wait(&mut done, None).unwrap();
        }
        // Some may have been answered before.
        let errors = done.into_iter().filter_map(|c| c.result.err());
        for e in errors {
            assert_eq!(e.kind(), ErrorKind::Disconnected, "{e}");
            assert!(e.to_string().contains("open the disk again"), "{e}");
        }
        drop(queue);
        // Requests of now fail whether or not the loss has been noticed.
        is_of_no_use(disk);
        server.come_back();
        let disk = connect(&server, patience);
        disk.flush().unwrap();
    }
}

/// A disk in memory is gone with its server: the next one's empty disk isn't taken for it.
#[test]
fn a_disk_that_lost_its_contents_is_not_taken_back() {
    let mut server = Server::start("mem:1M");
    let disk = connect(&server, Some(Duration::from_millis(500)));
    disk.write_at(&[1; 512], 0).unwrap();
    server.go_away();
    server.come_back_with("mem:1M");
    is_of_no_use(disk);
}

/// The server asks its clients to end: those with patience wait for the next one.
#[test]
fn threads_in_blocking_calls_all_end() {
    let mut server = Server::start("delay:1ms:mem:1M");
    let disk = connect(&server, None);
    disk.flush().unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let disk = &disk;
                scope.spawn(move || {
                    loop {
                        if let Err(e) = disk.read_at(&mut [0; 4096], 0) {
                            return e.kind();
                        }
                    }
                })
            })
            .collect();
        server.go_away();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), ErrorKind::Disconnected);
        }
    });
}
