//! A source that is killed at any moment, and the next one on the same memory.

use super::super::inflight::Inflight;
use super::super::unflushed::Marks;
use super::*;
use pvblk_block::Region;
use pvblk_protocol::virtio::{Driver, flags};
use virtio_bindings::virtio_blk::VIRTIO_BLK_T_OUT;

const ENTRIES: u16 = 16;
const STABLE: Marks = Marks {
    contents: None,
    cache: None,
};

struct Guest {
    driver: Driver,
    inflight: Inflight,
}

impl Guest {
    fn new() -> Guest {
        let region = Arc::new(Region::anonymous(1 << 20).unwrap());
        Guest {
            driver: Driver::new(region, 0x10000, ENTRIES, true),
            inflight: Inflight::create(1, ENTRIES, STABLE).unwrap().0,
        }
    }

    /// A server that comes up; QEMU tells the used index as base, which isn't needed.
    fn server(&self) -> VhostSource {
        self.server_with(Arc::default())
    }

    fn server_with(&self, shared: Arc<Shared>) -> VhostSource {
        let used = self.driver.published();
        VhostSource::new(VhostQueueParts {
            name: "test".into(),
            queue: Virtqueue::new(self.driver.place(), ENTRIES, used, true, true),
            memory: GuestMemory::of_driver(&self.driver),
            shared,
            kick: None,
            inflight: self.inflight.queue(0, ENTRIES),
            offered: Offered {
                discard: false,
                write_zeroes: false,
            },
            id: [0; ID],
        })
    }

    /// A write of sector `head`.
    fn submit(&mut self, head: u16) {
        let data = self.driver.at(self.driver.data_offset());
        self.driver
            .build(head, 1, head.into(), &[(data, 512, false)], true);
        self.driver.make_available(head);
    }
}

fn pull(source: &mut VhostSource, room: usize) -> Vec<Box<Request>> {
    let mut out = Vec::new();
    assert!(source.pull(room, &mut out).is_ok());
    out
}

fn answer(source: &mut VhostSource, requests: Vec<Box<Request>>) {
    let status = Status::Ok;
    let done = requests
        .into_iter()
        .map(|request| Completion { request, status });
    source.complete(&mut done.collect());
}

/// As SIGKILL does: nothing runs any more.
fn kill(source: VhostSource, requests: Vec<Box<Request>>) {
    std::mem::forget(source);
    drop(requests);
}

fn sectors(requests: &[Box<Request>]) -> Vec<u64> {
    requests.iter().map(|r| r.sector).collect()
}

#[test]
fn what_a_killed_server_took_is_done_again_in_order_and_before_the_rest() {
    let mut guest = Guest::new();
    let mut first = guest.server();
    for head in [4, 2, 7, 1] {
        guest.submit(head);
    }
    let mut taken = pull(&mut first, 3);
    assert_eq!(sectors(&taken), [4, 2, 7]);
    // The second is answered, and the guest knows.
    answer(&mut first, vec![taken.remove(1)]);
    first.push().unwrap();
    kill(first, taken);
    guest.submit(9);
    let mut second = guest.server();
    assert_eq!(second.arm(), Readiness::Ready);
    let all = pull(&mut second, 16);
    assert_eq!(sectors(&all), [4, 7, 1, 9]);
    answer(&mut second, all);
    second.push().unwrap();
    let mut heads = Vec::new();
    while let Some((head, _)) = guest.driver.used() {
        heads.push(head);
    }
    assert_eq!(heads, [2, 4, 7, 1, 9]);
    // A third has nothing to do again.
    drop(second);
    assert!(pull(&mut guest.server(), 16).is_empty());
}

/// The index of a queue that was told to stop covers all that was taken, so what a server before it took is done first.
#[test]
fn a_queue_that_is_told_to_stop_first_does_what_was_left() {
    let mut guest = Guest::new();
    let mut first = guest.server();
    for head in [4, 2, 7, 1, 9, 8, 3, 5, 0, 6, 10, 11] {
        guest.submit(head);
    }
    let mut taken = pull(&mut first, 12);
    taken.extend(pull(&mut first, 12));
    assert_eq!(taken.len(), 12);
    answer(&mut first, vec![taken.remove(1)]);
    first.push().unwrap();
    kill(first, taken);
    let shared: Arc<Shared> = Arc::default();
    let mut second = guest.server_with(Arc::clone(&shared));
    assert!(shared.stop_after_resubmission());
    let mut all = pull(&mut second, 16);
    assert!(all.len() < 11, "not at once");
    assert_eq!(second.arm(), Readiness::Ready);
    let end = second.pull(16, &mut all);
    assert!(matches!(end, Err(SourceEnd::Closed)));
    assert_eq!(sectors(&all), [4, 7, 1, 9, 8, 3, 5, 0, 6, 10, 11]);
    answer(&mut second, all);
    second.push().unwrap();
    drop(second);
    assert_eq!((shared.index(), guest.driver.published()), (12, 12));
    // One without anything left is stopped at once.
    shared.start();
    let mut third = guest.server_with(Arc::clone(&shared));
    assert!(!shared.stop_after_resubmission());
    assert!(pull(&mut third, 16).is_empty());
}

#[test]
fn answers_that_were_not_published_are_done_again() {
    let mut guest = Guest::new();
    let mut first = guest.server();
    guest.submit(3);
    guest.submit(5);
    let taken = pull(&mut first, 16);
    answer(&mut first, taken);
    kill(first, Vec::new());
    assert_eq!(guest.driver.used(), None);
    assert_eq!(sectors(&pull(&mut guest.server(), 16)), [3, 5]);
}

/// By seed: kills at any moment, also between publishing and what follows it; every request is answered exactly once.
#[test]
fn every_request_is_answered_once_over_many_killed_servers() {
    let mut rng = pvblk_testing::random();
    let mut below = |n: usize| rng.usize(..n);
    let mut guest = Guest::new();
    let mut source = guest.server();
    let mut at_disk: Vec<Box<Request>> = Vec::new();
    let mut waiting = [false; ENTRIES as usize];
    let (mut answered, mut kills) = (0, 0);
    for _ in 0..20_000 {
        match below(16) {
            0..=5 => {
                let head = below(ENTRIES.into());
                if !std::mem::replace(&mut waiting[head], true) {
                    guest.submit(head as u16);
                }
            }
            6..=8 => {
                let room = usize::from(ENTRIES) - at_disk.len();
                at_disk.append(&mut pull(&mut source, room.min(1 + below(8))));
            }
            9..=12 => {
                let mut done = Vec::new();
                for _ in 0..below(at_disk.len() + 1) {
                    done.push(at_disk.swap_remove(below(at_disk.len())));
                }
                answer(&mut source, done);
                if below(4) > 0 {
                    source.push().unwrap();
                }
            }
            13 => {
                if below(2) == 0 && source.unpublished {
                    // Killed inside `push`, after the index and before the marks.
                    source.parts.queue.publish();
                }
                kill(source, std::mem::take(&mut at_disk));
                source = guest.server();
                kills += 1;
            }
            _ => _ = source.push().unwrap(),
        }
        while let Some((head, _)) = guest.driver.used() {
            assert!(
                std::mem::replace(&mut waiting[head as usize], false),
                "{head} twice"
            );
            answered += 1;
        }
    }
    loop {
        let all = pull(&mut source, usize::from(ENTRIES) - at_disk.len());
        let over = all.is_empty() && at_disk.is_empty();
        at_disk.extend(all);
        answer(&mut source, std::mem::take(&mut at_disk));
        source.push().unwrap();
        if over {
            break;
        }
    }
    while let Some((head, _)) = guest.driver.used() {
        waiting[head as usize] = false;
        answered += 1;
    }
    assert_eq!(waiting, [false; ENTRIES as usize], "never answered");
    assert!(answered > 1000 && kills > 100, "{answered} {kills}");
}

/// A ring that is never kicked is looked at, but an idle one seldom.
#[test]
fn a_queue_without_a_kick_is_looked_at_less_and_less() {
    let mut guest = Guest::new();
    let mut server = guest.server();
    let mut sleep = || match server.arm() {
        Readiness::Wait(Some(until)) => until.saturating_duration_since(Instant::now()),
        other => panic!("{other:?}"),
    };
    let first = sleep();
    assert!(first <= Duration::from_micros(100), "{first:?}");
    let all: Duration = (0..100).map(|_| sleep()).sum();
    // Bounded from above only: time passes while it is measured.
    let last = sleep();
    assert!(
        last <= Duration::from_millis(20) && all <= Duration::from_secs(2),
        "{last:?}"
    );
    assert!(server.poll == Duration::from_millis(20));
    guest.driver.build(0, 4, 0, &[], true);
    guest.driver.make_available(0);
    let mut out = Vec::new();
    server.pull(1, &mut out).unwrap();
    assert_eq!((out.len(), server.poll), (1, Duration::from_micros(100)));
}

/// Chains that are walked for nothing: a few in a pull, and the lane is charged for them.
#[test]
fn a_pull_walks_few_descriptors() {
    let mut guest = Guest::new();
    let table = guest.driver.data_offset();
    let data = guest.driver.at(table + 0x8000);
    let head = guest.driver.head(0, VIRTIO_BLK_T_OUT, 0);
    guest
        .driver
        .write_descriptor(table, head, 16, flags::NEXT, 1);
    for n in 1..1000 {
        let (odd, next) = (data + 2 * u64::from(n), flags::NEXT);
        let at = table + usize::from(n) * 16;
        guest.driver.write_descriptor(at, odd, 1, next, n + 1);
    }
    let status = guest.driver.status_at(0);
    guest
        .driver
        .write_descriptor(table + 16_000, status, 1, flags::WRITE, 0);
    for head in 0..ENTRIES {
        let at = guest.driver.at(table);
        guest
            .driver
            .descriptor(head, at, 1001 * 16, flags::INDIRECT, 0);
        guest.driver.make_available(head);
    }
    let mut source = guest.server();
    let mut out = Vec::new();
    let pulled = source.pull(16, &mut out).unwrap();
    assert!(out.is_empty());
    assert_eq!(pulled.answered, 5 + 5 * 1001 / 32);
    source.push().unwrap();
    assert_eq!(guest.driver.published(), 5);
}
