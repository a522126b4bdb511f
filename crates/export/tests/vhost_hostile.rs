//! Hostile front ends and guests, end to end: one test for each rule. The other disk goes on, the server stays up, the log names the rule.

mod vhost_support;

use pvblk_protocol::vhost_user::{Code, InflightArea, MemoryRegion, VringAddr};
use pvblk_protocol::virtio::{Driver, flags};
use pvblk_sys::EventFd;
use pvblk_testing::wait;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fmt::Write as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use vhost_support::{Bed, ENTRIES, Front, GUEST, QUEUE_MEMORY};
use zerocopy::IntoBytes;

static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps lines of all threads, with their levels.
struct Log;

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, _: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, "{value:?} ");
    }
}

impl Subscriber for Log {
    fn enabled(&self, m: &Metadata<'_>) -> bool {
        // Lines of which there are too many are told at this level.
        *m.level() <= Level::DEBUG
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = Text(format!("{} ", event.metadata().level()));
        event.record(&mut text);
        LOG.lock().unwrap().push(text.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Waits for a warning about disk a that names the rule. Tests run beside each other, each with rules of its own.
fn named(rule: &str) {
    let found = || {
        LOG.lock()
            .unwrap()
            .iter()
            .any(|l| l.contains("disk a") && l.contains(rule))
    };
    wait(&format!("a warning with {rule:?}"), found);
}

fn bed() -> Bed {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| tracing::subscriber::set_global_default(Log).unwrap());
    Bed::new()
}

/// Another disk works, and a new front end of the same one.
fn others_go_on(bed: &Bed) {
    for disk in ["b", "a"] {
        let mut guest = bed.guest(disk, 1);
        guest.write(0, 3, &[3; 512]);
        assert_eq!(guest.read(0, 3, 512), [3; 512]);
    }
}

/// Runs a guest's queue 0 against a rule of the rings, which queue 1 and another disk survive.
fn broken_ring(rule: &str, breaks: impl FnOnce(&mut Front)) {
    let bed = bed();
    let mut guest = bed.guest("a", 2);
    breaks(&mut guest);
    guest.kicks[0].notify();
    named(rule);
    wait("an error event", || guest.errs[0].drain());
    // Its other queue, and the connection.
    guest.write(1, 5, &[5; 512]);
    // A guest that resets its disk gets the queue back.
    guest.ask(Code::GetVringBase, &Front::state(0, 0));
    let region = std::sync::Arc::clone(guest.drivers[0].region());
    region.zero(0, region.len());
    guest.drivers[0] = Driver::new(region, GUEST, ENTRIES, true);
    guest.start(0, 0);
    assert_eq!(guest.read(0, 5, 512), [5; 512]);
    drop(guest);
    others_go_on(&bed);
}

/// Makes descriptor 0 available with these descriptors (address, len, flags, next).
fn offer(guest: &mut Front, table: &[(u64, u32, u16, u16)]) {
    for (i, &(address, len, flags, next)) in (0..).zip(table) {
        guest.drivers[0].descriptor(i, address, len, flags, next);
    }
    guest.drivers[0].make_available(0);
}

#[test]
fn a_descriptor_index_outside_the_table() {
    broken_ring("descriptor 64 is outside the table of 64", |g| {
        offer(g, &[(GUEST, 16, flags::NEXT, 64)]);
    });
}

#[test]
fn a_head_outside_the_table() {
    broken_ring("descriptor 4242 is outside", |g| {
        g.drivers[0].make_available(4242)
    });
}

#[test]
fn a_loop_of_descriptors() {
    broken_ring("a chain is longer than 64 descriptors", |g| {
        offer(
            g,
            &[(GUEST, 16, flags::NEXT, 1), (GUEST, 16, flags::NEXT, 0)],
        );
    });
}

#[test]
fn an_address_out_of_range() {
    broken_ring("guest address 0xdead0000 are not guest memory", |g| {
        let head = g.drivers[0].head(0, 1, 0);
        let status = g.drivers[0].status_at(0);
        let next = flags::NEXT;
        offer(
            g,
            &[
                (head, 16, next, 1),
                (0xdead_0000, 512, next, 2),
                (status, 1, flags::WRITE, 0),
            ],
        );
    });
}

#[test]
fn a_request_without_a_status() {
    broken_ring("no writable byte for its status", |g| {
        let head = g.drivers[0].head(0, 4, 0);
        offer(g, &[(head, 16, 0, 0)]);
    });
}

#[test]
fn an_available_index_that_jumps() {
    broken_ring(
        "the available index moved on by 65, and the queue has 64 entries",
        |g| {
            g.drivers[0].set_available(65);
        },
    );
}

#[test]
fn an_indirect_table_in_an_indirect_table() {
    broken_ring("an indirect table refers to an indirect table", |g| {
        let at = g.drivers[0].data_offset();
        g.drivers[0].write_descriptor(at, GUEST, 16, flags::INDIRECT, 0);
        let table = g.drivers[0].at(at);
        offer(g, &[(table, 16, flags::INDIRECT, 0)]);
    });
}

#[test]
fn an_indirect_table_of_a_wrong_length() {
    broken_ring("an indirect table has 17 bytes", |g| {
        offer(g, &[(GUEST, 17, flags::INDIRECT, 0)]);
    });
}

#[test]
fn a_readable_descriptor_after_a_writable_one() {
    broken_ring("a readable descriptor follows a writable one", |g| {
        offer(
            g,
            &[
                (GUEST, 16, flags::NEXT | flags::WRITE, 1),
                (GUEST, 16, 0, 0),
            ],
        );
    });
}

#[test]
fn a_chain_that_is_available_twice() {
    let bed = bed();
    let mut guest = bed.guest("a", 2);
    bed.a.hold.store(true, Ordering::Release);
    let driver = &guest.drivers[0];
    driver.build(
        0,
        1,
        0,
        &[(driver.at(driver.data_offset()), 512, false)],
        true,
    );
    guest.submit(0, 0);
    wait("the request is at the device", || {
        bed.a.held.load(Ordering::Acquire) == 1
    });
    guest.drivers[0].make_available(0);
    guest.kicks[0].notify();
    // The ring ends when what it has in flight has.
    bed.a.hold.store(false, Ordering::Release);
    named("descriptor 0 became available while it is in flight");
    drop(guest);
    others_go_on(&bed);
}

#[test]
fn a_truncated_head_is_answered() {
    let bed = bed();
    let mut guest = bed.guest("a", 1);
    let (head, status) = (
        guest.drivers[0].head(0, 0, 0),
        guest.drivers[0].status_at(0),
    );
    offer(
        &mut guest,
        &[(head, 15, flags::NEXT, 1), (status, 1, flags::WRITE, 0)],
    );
    guest.kicks[0].notify();
    assert_eq!(guest.wait_used(0).0, 0);
    assert_eq!(guest.drivers[0].status(0), 1);
    named("the head has 15 bytes of 16");
    guest.write(0, 1, &[1; 512]);
}

#[test]
fn data_on_the_wrong_side_is_answered() {
    let bed = bed();
    let mut guest = bed.guest("a", 1);
    let at = guest.drivers[0].at(guest.drivers[0].data_offset());
    guest.drivers[0].build(0, 0, 0, &[(at, 512, false)], true);
    guest.submit(0, 0);
    guest.wait_used(0);
    assert_eq!(guest.drivers[0].status(0), 1);
    named("0 bytes of data to read and 512 to write");
    guest.write(0, 1, &[1; 512]);
}

#[test]
fn bad_requests_do_not_fill_the_log() {
    let bed = bed();
    let mut guest = bed.guest("a", 1);
    for _ in 0..200 {
        assert_eq!(guest.io(0, 77, 0, &[], 0).0, 2);
    }
    let log = LOG.lock().unwrap();
    let all = log.iter().filter(|l| l.contains("type 77"));
    let warnings = all.clone().filter(|l| l.starts_with("WARN")).count();
    // Other tests' bad requests are counted with them.
    assert!(all.count() == 200 && warnings < 20, "{warnings}");
}

#[test]
fn memory_that_shrinks_with_requests_in_flight() {
    let bed = bed();
    let mut guest = bed.guest("a", 2);
    bed.a.hold.store(true, Ordering::Release);
    for queue in 0..2u16 {
        let driver = &guest.drivers[usize::from(queue)];
        let at = driver.at(driver.data_offset());
        driver.build(0, u32::from(queue), 0, &[(at, 65536, queue == 0)], true);
        guest.submit(queue, 0);
    }
    wait("both are at the device", || {
        bed.a.held.load(Ordering::Acquire) == 2
    });
    ftruncate(&*guest.memory, 0).unwrap();
    bed.a.hold.store(false, Ordering::Release);
    guest.kicks.iter().for_each(EventFd::notify);
    named("queue 0: the guest's memory shrank while it was in use");
    named("queue 1: the guest's memory shrank while it was in use");
    drop(guest);
    others_go_on(&bed);
}

/// A front end that negotiated sends something that ends its connection.
fn refused(rule: &str, code: Code, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    let bed = bed();
    let mut front = bed.front("a");
    front.negotiate();
    assert_eq!(front.tell(code, payload, fds), Some(false), "{code}");
    assert!(front.is_closed());
    named(rule);
    named(&code.to_string());
    others_go_on(&bed);
}

fn memory(len: u64) -> OwnedFd {
    let fd = memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, len).unwrap();
    fd
}

fn region(guest: u64, size: u64, user: u64, offset: u64) -> Vec<u8> {
    let region = MemoryRegion {
        guest_address: guest,
        size,
        user_address: user,
        file_offset: offset,
    };
    [&[0; 8], region.as_bytes()].concat()
}

#[test]
fn queue_sizes_that_are_lies() {
    for (size, rule) in [
        (0u32, "0 entries"),
        (48, "48 entries"),
        (65536, "65536 entries"),
        (u32::MAX, "4294967295 entries"),
    ] {
        refused(rule, Code::SetVringNum, &Front::state(0, size), &[]);
    }
    refused(
        "ring 4; there are 4",
        Code::SetVringNum,
        &Front::state(4, 64),
        &[],
    );
    refused(
        "65536 is no index",
        Code::SetVringBase,
        &Front::state(0, 65536),
        &[],
    );
}

#[test]
fn a_ring_that_is_larger_than_its_memory() {
    let bed = bed();
    let mut guest = bed.guest("a", 0);
    guest.must(Code::SetVringNum, &Front::state(0, 32768), &[]);
    let end = guest.place(0).descriptor + 4 * QUEUE_MEMORY as u64;
    let place = VringAddr {
        descriptor: end - 4096,
        ..guest.place(0)
    };
    guest.must(Code::SetVringAddr, place.as_bytes(), &[]);
    guest.must(Code::SetVringEnable, &Front::state(0, 1), &[]);
    let kick = [guest.kicks[0].as_fd()];
    assert_eq!(
        guest.tell(Code::SetVringKick, &0u64.to_le_bytes(), &kick),
        Some(false)
    );
    assert!(guest.is_closed());
    named("524288 bytes, is not in the memory");
    guest.taken = 0;
    others_go_on(&bed);
}

#[test]
fn parts_of_a_ring_that_are_not_aligned() {
    let odd = VringAddr {
        index: 0,
        flags: 0,
        descriptor: 8,
        used: 0,
        available: 0,
        log: 0,
    };
    refused(
        "its parts are not aligned",
        Code::SetVringAddr,
        odd.as_bytes(),
        &[],
    );
}

#[test]
fn a_ring_that_changes_while_it_is_at_work() {
    for (code, payload) in [
        (Code::SetVringNum, Front::state(0, 32)),
        (Code::SetVringBase, Front::state(0, 7)),
    ] {
        let bed = bed();
        let guest = bed.guest("a", 1);
        assert_eq!(guest.tell(code, &payload, &[]), Some(false));
        assert!(guest.is_closed());
        named("can't change while it is at work");
    }
}

#[test]
fn memory_regions_that_make_no_sense() {
    let file = memory(1 << 20);
    let fd = [file.as_fd()];
    let add = |rule: &str, payload: &[u8]| refused(rule, Code::AddMemReg, payload, &fd);
    add(
        "memory region at 0x1010: it does not begin at a page",
        &region(0x1010, 4096, 0, 0),
    );
    add(
        "not inside the file, which has 1048576",
        &region(0x2000, 2 << 20, 0, 0),
    );
    add(
        "it ends beyond the last address",
        &region(!0xfff, 0x2000, 0, 0),
    );
    add(
        "its payload has 39 bytes",
        &region(0x3000, 0x1000, 0, 0)[..39],
    );
    refused(
        "it was not there",
        Code::RemMemReg,
        &region(0x4000, 0x1000, 0, 0),
        &[],
    );
}

#[test]
fn too_many_memory_regions() {
    let bed = bed();
    let mut front = bed.front("a");
    front.negotiate();
    let file = memory(4096);
    for i in 0..128u64 {
        front.must(
            Code::AddMemReg,
            &region(i << 12, 4096, i << 12, 0),
            &[file.as_fd()],
        );
    }
    let last = region(999 << 12, 4096, 999 << 12, 0);
    assert_eq!(
        front.tell(Code::AddMemReg, &last, &[file.as_fd()]),
        Some(false)
    );
    assert!(front.is_closed());
    named("more than 128 regions");
    let table = [&9u64.to_le_bytes()[..], &[0; 9 * 32]].concat();
    refused(
        "9 memory regions are too many",
        Code::SetMemTable,
        &table,
        &[],
    );
    others_go_on(&bed);
}

#[test]
fn wrong_descriptors() {
    let (file, event) = (memory(4096), EventFd::new().unwrap());
    let null = std::fs::File::open("/dev/null").unwrap();
    let page = region(0, 4096, 0, 0);
    refused(
        "not a memory file",
        Code::AddMemReg,
        &page,
        &[event.as_fd()],
    );
    refused("not a memory file", Code::AddMemReg, &page, &[null.as_fd()]);
    refused(
        "it has 0 descriptors and should have 1",
        Code::AddMemReg,
        &page,
        &[],
    );
    refused(
        "it has 2 descriptors and should have 1",
        Code::AddMemReg,
        &page,
        &[file.as_fd(); 2],
    );
    refused(
        "it has 1 descriptors and should have 0",
        Code::SetOwner,
        &[],
        &[event.as_fd()],
    );
    let ring = 0u64.to_le_bytes();
    refused("not an eventfd", Code::SetVringKick, &ring, &[file.as_fd()]);
    refused("not an eventfd", Code::SetVringCall, &ring, &[null.as_fd()]);
    refused("0x0 with 0 descriptors", Code::SetVringErr, &ring, &[]);
    refused(
        "not a Unix stream socket",
        Code::SetBackendReqFd,
        &[],
        &[event.as_fd()],
    );
    let area = InflightArea {
        size: 4096,
        offset: 0,
        queues: 1,
        queue_size: 64,
        padding: [0; 4],
    };
    refused(
        "not a memory file",
        Code::SetInflightFd,
        area.as_bytes(),
        &[event.as_fd()],
    );
    let area = InflightArea { queues: 9, ..area };
    refused(
        "9 queues of 64 entries",
        Code::GetInflightFd,
        area.as_bytes(),
        &[],
    );
}

#[test]
fn features_and_messages_that_were_not_offered() {
    refused(
        "features 0x400000000 were not offered",
        Code::SetFeatures,
        &(1u64 << 34).to_le_bytes(),
        &[],
    );
    refused(
        "features 0x2 were not offered",
        Code::SetProtocolFeatures,
        &2u64.to_le_bytes(),
        &[],
    );
    let bed = bed();
    let front = bed.front("a");
    front.send(Code::GetQueueNum as u32, 0, &[], &[]);
    assert!(front.is_closed());
    named("MQ was not negotiated");
    for (code, rule) in [
        (6, "request 6 is unknown"),
        (4711, "request 4711 is unknown"),
    ] {
        let front = bed.front("a");
        front.send(code, 0, &[], &[]);
        assert!(front.is_closed());
        named(rule);
    }
    others_go_on(&bed);
}

#[test]
fn half_a_message_holds_up_nobody_else() {
    let bed = bed();
    let slow = bed.front("a");
    pvblk_sys::fdpass::send(slow.socket.as_fd(), &[1, 0, 0], &[]).unwrap();
    bed.guest("b", 1).write(0, 0, &[1; 512]);
    drop(slow);
    others_go_on(&bed);
}
