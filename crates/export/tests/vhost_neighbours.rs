//! One hostile front end and a neighbour on another disk, with one worker for both: the neighbour goes on. `--nocapture` prints what it costs it.

mod vhost_support;

use pvblk_protocol::vhost_user::{Code, MemoryRegion, SingleRegion};
use rustix::fs::{MemfdFlags, OFlags, fcntl_getfl, fcntl_setfl, ftruncate, memfd_create};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vhost_support::{Bed, Front};
use zerocopy::IntoBytes;

/// One at a time: they measure the process.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The neighbour's requests: the latency that 99 % of them stay below.
fn p99(guest: &mut Front) -> Duration {
    let mut all: Vec<Duration> = (0..500)
        .map(|i| {
            let start = Instant::now();
            guest.write(0, i, &[i as u8; 512]);
            start.elapsed()
        })
        .collect();
    all.sort_unstable();
    all[all.len() * 99 / 100]
}

/// A whole handshake of the neighbour and one request.
fn handshake(bed: &Bed) -> Duration {
    let start = Instant::now();
    bed.guest("b", 1).write(0, 0, &[1; 512]);
    start.elapsed()
}

fn slowest_handshake(bed: &Bed) -> Duration {
    (0..20).map(|_| handshake(bed)).max().unwrap()
}

fn report(what: &str, alone: Duration, beside: Duration) {
    let ratio = beside.as_secs_f64() / alone.as_secs_f64();
    println!("{what}: {alone:?} alone, {beside:?} beside the attack: {ratio:.2} times");
}

fn waits(fd: BorrowedFd<'_>) {
    let now = fcntl_getfl(fd).unwrap();
    fcntl_setfl(fd, now & !OFlags::NONBLOCK).unwrap();
}

/// The flag belongs to the file that both ends share, so a peer can make a write to its full counter wait.
#[test]
fn a_full_call_that_waits_when_it_is_written() {
    let _alone = alone();
    let mut bed = Bed::with(1, None);
    let mut neighbour = bed.guest("b", 1);
    let alone = p99(&mut neighbour);
    let mut hostile = bed.guest("a", 2);
    let call = hostile.calls[0].as_fd().try_clone_to_owned().unwrap();
    // Set up by its own server, it is full when the server rings it.
    waits(call.as_fd());
    hostile.calls[0].drain();
    rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    for head in 0..8 {
        let driver = &hostile.drivers[0];
        driver.want_calls(true);
        driver.build(head, 4, 0, &[], true);
        hostile.submit(0, head);
    }
    let used = |h: &mut Front| h.drivers[0].used().is_some();
    let mut done = 0;
    pvblk_testing::wait("its requests are answered", || {
        done += u32::from(used(&mut hostile));
        done == 8
    });
    report("write, 99 %", alone, p99(&mut neighbour));
    // The worker isn't waiting in that queue's call.
    hostile.drivers[0].build(8, 4, 0, &[], true);
    hostile.submit(0, 8);
    pvblk_testing::wait("its next request is answered", || used(&mut hostile));
    // The same event as error event, and a kick that can be read by two.
    let which = 1u64.to_le_bytes();
    hostile.must(Code::SetVringErr, &which, &[call.as_fd()]);
    hostile.drivers[1].make_available(4242);
    hostile.kicks[1].notify();
    neighbour.write(0, 1, &[1; 512]);
    handshake_of_the_next(&bed, neighbour);
    drop(hostile);
    bed.server.stop();
}

/// The next front end of the neighbour's disk.
fn handshake_of_the_next(bed: &Bed, neighbour: Front) {
    drop(neighbour);
    handshake(bed);
}

fn add_region(file: BorrowedFd<'_>, front: &Front, len: u64) -> Option<bool> {
    let region = MemoryRegion {
        guest_address: 1 << 45,
        size: len,
        user_address: 1 << 45,
        file_offset: 0,
    };
    let told = SingleRegion { padding: 0, region };
    front.tell(Code::AddMemReg, told.as_bytes(), &[file])
}

#[test]
fn guest_memory_in_a_regular_file_is_refused() {
    let _alone = alone();
    let bed = Bed::with(1, None);
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = std::fs::File::create_new(dir.path().join("memory")).unwrap();
    file.set_len(4096).unwrap();
    if rustix::fs::fstatfs(&file).unwrap().f_type == 0x0102_1994 {
        println!("not tried: the target folder is a tmpfs");
        return;
    }
    let mut front = bed.front("a");
    front.negotiate();
    assert_eq!(add_region(file.as_fd(), &front, 4096), Some(false));
    assert!(front.is_closed());
    handshake(&bed);
}

/// Sends what `message` does until it is told to stop, reading nothing that comes back.
fn flood(
    front: Front,
    stop: &Arc<AtomicBool>,
    message: impl Fn(&Front) + Send + 'static,
) -> std::thread::JoinHandle<()> {
    let stop = Arc::clone(stop);
    std::thread::spawn(move || {
        while !stop.load(Ordering::Acquire) {
            message(&front);
        }
    })
}

/// The neighbour's handshakes while a front end sends `message` all the time. The server's own tests count its part of the control thread,
/// with a clock of theirs.
fn beside_a_flood(what: &str, message: impl Fn(&Front) + Send + 'static) {
    let bed = Bed::with(1, None);
    let alone = slowest_handshake(&bed);
    let stop = Arc::new(AtomicBool::new(false));
    let hostile = bed.guest("a", 4);
    let socket = hostile.socket.try_clone().unwrap();
    let thread = flood(hostile, &stop, message);
    let beside = slowest_handshake(&bed);
    // Nothing was wrong with its messages, so it is still connected.
    let is_connected = rustix::net::send(&socket, &[], rustix::net::SendFlags::NOSIGNAL).is_ok();
    stop.store(true, Ordering::Release);
    thread.join().unwrap();
    assert!(is_connected);
    report(&format!("{what}: slowest of 20 handshakes"), alone, beside);
}

#[test]
fn a_flood_of_messages_keeps_nobody_else_from_its_handshake() {
    let _alone = alone();
    let cheap = |f: &Front| f.send(Code::SetOwner as u32, 0, &[], &[]);
    beside_a_flood("SET_OWNER", cheap);
    let table = |f: &Front| {
        let regions: Vec<u8> = (0..4)
            .flat_map(|i| f.region(i).as_bytes().to_vec())
            .collect();
        let table = [&4u64.to_le_bytes()[..], &regions].concat();
        f.send(Code::SetMemTable as u32, 0, &table, &[f.memory.as_fd(); 4]);
    };
    beside_a_flood("SET_MEM_TABLE", table);
}

#[test]
fn a_front_end_that_comes_and_goes_is_let_in_a_bounded_number_of_times() {
    let _alone = alone();
    let bed = Bed::with(1, None);
    let alone = slowest_handshake(&bed);
    let (start, stop) = (Instant::now(), Arc::new(AtomicBool::new(false)));
    let path = bed.path("a");
    let ends = Arc::clone(&stop);
    let thread = std::thread::spawn(move || {
        let mut count = 0u32;
        while !ends.load(Ordering::Acquire) {
            let front = Front::connect(&path);
            let soon = Some(Duration::from_millis(500));
            front.socket.set_read_timeout(soon).unwrap();
            front.send(Code::GetFeatures as u32, 0, &[], &[]);
            let mut byte = [0];
            count +=
                u32::from(pvblk_sys::fdpass::recv(front.socket.as_fd(), &mut byte, true).is_ok());
        }
        count
    });
    let beside = slowest_handshake(&bed);
    std::thread::sleep(Duration::from_secs(2).saturating_sub(start.elapsed()));
    stop.store(true, Ordering::Release);
    let count = thread.join().unwrap();
    let most = 64 + 16 * (start.elapsed().as_secs() as u32 + 1);
    report("slowest of 20 handshakes", alone, beside);
    println!("{count} connections in {:?}", start.elapsed());
    assert!(count <= most, "{count} connections, at most {most}");
}

/// Bytes of shared mappings of this process.
fn mapped() -> u64 {
    pvblk_sys::proc_status::memory(None).unwrap().shared_mapped
}

#[test]
fn memory_is_mapped_once_for_all_rings() {
    let _alone = alone();
    const LEN: u64 = 256 << 30;
    let bed = Bed::with(1, None);
    let mut front = bed.front("a");
    front.negotiate();
    front.add_memory();
    let file = memfd_create("large", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, LEN).unwrap();
    let before = mapped();
    assert_eq!(add_region(file.as_fd(), &front, LEN), Some(true));
    for i in 0..4 {
        front.start(i, 0);
    }
    let grown = mapped() - before;
    assert!((LEN..LEN + (LEN >> 1)).contains(&grown), "{grown}");
    // It ends with its front end, and every ring reaches it.
    for queue in 0..4 {
        front.write(queue, queue.into(), &[queue as u8; 512]);
    }
    drop(front);
    pvblk_testing::wait("it is unmapped", || mapped() < before + LEN);
    handshake(&bed);
}

#[test]
fn memory_that_nobody_allocated_has_a_limit() {
    let _alone = alone();
    const LEN: u64 = 64 << 20;
    // Half of it is for whoever comes first, a quarter for each of the two.
    let bed = Bed::with(1, Some(LEN));
    let mut neighbour = bed.guest("b", 1);
    let file = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, LEN).unwrap();
    let attached = |expected: bool| {
        let mut front = bed.front("a");
        front.negotiate();
        assert_eq!(add_region(file.as_fd(), &front, LEN), Some(expected));
        assert_eq!(expected, front.tell(Code::SetOwner, &[], &[]).is_some());
    };
    attached(false);
    neighbour.write(0, 1, &[1; 512]);
    // Preallocated, as QEMU does if it is asked to.
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, LEN).unwrap();
    attached(true);
    handshake_of_the_next(&bed, neighbour);
}
