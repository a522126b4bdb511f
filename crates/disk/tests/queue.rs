//! Queues: places, batches, waiting, memory.

use pvblk_disk::{Completion, Disk, ErrorKind, Options, Queue, Readiness, Request};
use pvblk_sys::Poller;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

#[path = "support/mod.rs"]
#[allow(dead_code, reason = "every test file uses another part of it")]
mod support;

/// Waits until nothing is in flight.
fn all(queue: &mut Queue) -> Vec<Completion> {
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(&mut done, None).unwrap();
    }
    done
}

#[test]
fn requests_are_known_by_their_tags_and_bring_their_buffers_back() {
    let disk = Disk::open("mem:1M").unwrap();
    let mut queue = disk.queue(8).unwrap();
    for n in 0..8 {
        let mut buffer = disk.buffer(4096).unwrap();
        buffer.copy_from(0, &[n as u8 + 1; 4096]);
        let part = 512 * (n as usize + 1);
        queue
            .push(Request::write(n * 4096, buffer).first(part).tag(100 + n))
            .unwrap();
    }
    assert_eq!((queue.in_flight(), queue.depth()), (8, 8));
    let full = queue.push(Request::flush()).unwrap_err();
    assert!(full.to_string().contains("all 8 places"), "{full}");
    assert!(full.request.into_buffer().is_none());
    let mut done = all(&mut queue);
    done.sort_by_key(|c| c.tag);
    for (n, c) in (0..8).zip(&done) {
        c.result.as_ref().unwrap();
        assert_eq!(c.tag, 100 + n);
        let buffer = c.buffer.as_ref().unwrap();
        assert_eq!(buffer.to_vec(), [n as u8 + 1; 4096]);
        let mut block = [0; 4096];
        disk.read_at(&mut block, n * 4096).unwrap();
        let part = 512 * (n as usize + 1);
        assert_eq!(block[..part], [n as u8 + 1; 4096][..part]);
        assert_eq!(block[part..], [0; 4096][part..]);
    }
}

#[test]
fn a_request_that_makes_no_sense_fails_alone() {
    let disk = Disk::open("mem:1M").unwrap();
    let mut queue = disk.queue(8).unwrap();
    let buffer = || disk.buffer(4096).unwrap();
    let wrong = [
        Request::read(1, buffer()),
        Request::read(1 << 20, buffer()),
        Request::read(u64::MAX - 1, buffer()),
        Request::write(0, buffer()).first(100),
        Request::discard(0, u64::MAX),
        Request::write_zeroes(0, 0),
    ];
    let count = wrong.len();
    for (n, request) in wrong.into_iter().enumerate() {
        queue.push(request.tag(n as u64)).unwrap();
    }
    queue.push(Request::read(0, buffer()).tag(99)).unwrap();
    let done = all(&mut queue);
    assert_eq!(done.len(), count + 1);
    for c in done {
        assert_eq!(c.result.is_ok(), c.tag == 99, "{c:?}");
        if let Err(e) = &c.result {
            assert_eq!(e.kind(), ErrorKind::Invalid);
        }
        // The whole buffer, although a part of it was to be used.
        if let Some(buffer) = c.buffer {
            assert_eq!(buffer.len(), 4096);
        }
    }
    for len in [0, 100, 4097] {
        assert_eq!(disk.buffer(len).unwrap_err().kind(), ErrorKind::Invalid);
    }
    for depth in [0, 65_537] {
        assert_eq!(disk.queue(depth).unwrap_err().kind(), ErrorKind::Config);
    }
}

#[test]
fn waiting_has_a_limit_and_ends_when_nothing_is_in_flight() {
    let disk = Disk::open("delay:3600s:mem:1M").unwrap();
    let mut queue = disk.queue(1).unwrap();
    let mut done = Vec::new();
    assert_eq!(queue.wait(&mut done, None).unwrap(), 0);
    queue.push(Request::flush()).unwrap();
    let begin = Instant::now();
    let limit = Duration::from_millis(5);
    assert_eq!(queue.wait(&mut done, Some(limit)).unwrap(), 0);
    assert!(begin.elapsed() >= limit);
    assert_eq!(queue.in_flight(), 1);
    let disk = Disk::open("delay:20ms:mem:1M").unwrap();
    let mut queue = disk.queue(1).unwrap();
    queue.push(Request::flush()).unwrap();
    let begin = Instant::now();
    assert_eq!(queue.wait(&mut done, None).unwrap(), 1);
    assert!(begin.elapsed() >= Duration::from_millis(20));
    assert_eq!(queue.wait(&mut done, Some(limit)).unwrap(), 0);
}

/// The user's own loop, by the descriptor, over rings, in which nobody calls `submit`.
#[test]
fn a_queue_is_waited_for_by_its_descriptor() {
    let server = support::Server::start("delay:1ms:mem:1M");
    let disk = Disk::connect(server.socket(), "vm1").unwrap();
    let mut queue = disk.queue(4).unwrap();
    let poller = Poller::new().unwrap();
    poller.add(queue.as_fd(), 0, false).unwrap();
    let mut done = Vec::new();
    for turn in 0..20 {
        let buffer = disk.buffer(4096).unwrap();
        queue.push(Request::read(turn * 4096, buffer)).unwrap();
        while queue.poll(&mut done) == 0 {
            if let Readiness::Wait(until) = queue.arm() {
                assert_eq!(until, None);
                let mut events = Vec::new();
                let hang = Duration::from_secs(60);
                poller.wait(&mut events, Some(hang)).unwrap();
                assert!(!events.is_empty(), "turn {turn}: no wake-up");
            }
        }
        done.pop().unwrap().result.unwrap();
    }
    // Nothing is left of the wake-ups.
    assert_eq!(queue.arm(), Readiness::Wait(None));
    let mut events = Vec::new();
    poller.wait(&mut events, Some(Duration::ZERO)).unwrap();
    assert!(events.is_empty());
}

#[test]
fn the_number_of_queues_is_limited_and_blocking_calls_have_their_own() {
    let disk = Options::new().queues(2).open("mem:1M").unwrap();
    let (a, b) = (disk.queue(1).unwrap(), disk.queue(1).unwrap());
    let error = disk.queue(1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(error.to_string().contains("Options::queues"), "{error}");
    disk.flush().unwrap();
    drop(a);
    let c = disk.queue(1).unwrap();
    let error = disk.close().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("2 of its queues"), "{error}");
    drop((b, c));
}

/// Memory that is shared with a server comes back from buffers, from requests that weren't submitted, and from those that
/// were given up.
#[test]
fn shared_memory_comes_back() {
    let server = support::Server::start("delay:1ms:mem:64M");
    let options = Options::new().queues(4).memory_bytes(4 << 20);
    let disk = options.connect(server.socket(), "vm1").unwrap();
    let most = |disk: &Disk| {
        let mut buffers = Vec::new();
        loop {
            match disk.buffer(256 << 10) {
                Ok(buffer) => buffers.push(buffer),
                Err(e) => {
                    assert_eq!(e.kind(), ErrorKind::Exhausted);
                    assert!(e.to_string().contains("Options::memory_bytes"), "{e}");
                    return buffers.len();
                }
            }
        }
    };
    let count = most(&disk);
    assert!(count >= 16, "{count} buffers");
    assert_eq!(most(&disk), count);
    for turn in 0..4 {
        let mut queue = disk.queue(16).unwrap();
        let pushed = |queue: &mut Queue| {
            let buffer = disk.buffer(256 << 10).unwrap();
            let part = Request::read(0, buffer).first(4096 * (turn + 1));
            queue.push(part).unwrap();
        };
        (0..8).for_each(|_| pushed(&mut queue));
        queue.submit();
        (0..8).for_each(|_| pushed(&mut queue));
    }
    // Those that were given up complete on their own.
    pvblk_testing::wait("all memory is there again", || most(&disk) == count);
    let queues: Vec<Queue> = (0..4).map(|_| disk.queue(1).unwrap()).collect();
    drop(queues);
    disk.close().unwrap();
}

/// A queue that is given up counts until its requests have completed, so that their number is bounded.
#[test]
fn queues_that_are_given_up_count() {
    let disk = Options::new().queues(1).open("delay:20ms:mem:1M").unwrap();
    let begin = Instant::now();
    let mut queue = disk.queue(1).unwrap();
    queue.push(Request::flush()).unwrap();
    queue.submit();
    drop(queue);
    pvblk_testing::wait("the queue may be opened again", || disk.queue(1).is_ok());
    assert!(begin.elapsed() >= Duration::from_millis(20));
}

#[test]
fn a_buffer_of_another_disk_works_too() {
    let server = support::Server::start("mem:1M");
    let over_rings = Disk::connect(server.socket(), "vm1").unwrap();
    let here = Disk::open("mem:1M").unwrap();
    for (from, to) in [(&over_rings, &here), (&here, &over_rings)] {
        let mut buffer = from.buffer(4096).unwrap();
        buffer.copy_from(0, &[9; 4096]);
        let mut queue = to.queue(1).unwrap();
        queue.push(Request::write(4096, buffer)).unwrap();
        let done = all(&mut queue);
        done[0].result.as_ref().unwrap();
        let mut block = [0; 4096];
        to.read_at(&mut block, 4096).unwrap();
        assert_eq!(block, [9; 4096]);
    }
}

#[test]
#[should_panic(expected = "513 bytes of a request with a buffer of 512")]
fn a_request_is_not_longer_than_its_buffer() {
    let disk = Disk::open("mem:1M").unwrap();
    let _ = Request::read(0, disk.buffer(512).unwrap()).first(513);
}

#[test]
#[should_panic(expected = "2 bytes at 511 of a buffer of 512 bytes")]
fn a_copy_stays_within_its_buffer() {
    let disk = Disk::open("mem:1M").unwrap();
    let buffer = disk.buffer(512).unwrap();
    buffer.copy_to(511, &mut [0; 2]);
}
