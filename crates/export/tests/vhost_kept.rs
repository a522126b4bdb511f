//! Descriptors and memory that a front end keeps, or that it has the server keep: they are bounded, and none of them keeps its session alive.

mod vhost_support;

use pvblk_protocol::vhost_user::{Code, InflightArea, message};
use pvblk_sys::fdpass;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, fallocate, ftruncate, memfd_create};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use vhost_support::kept::Guest;
use vhost_support::{Bed, Front};
use zerocopy::{FromBytes, IntoBytes};

fn area(queues: u16, queue_size: u16) -> InflightArea {
    InflightArea {
        size: 0,
        offset: 0,
        queues,
        queue_size,
        padding: [0; 4],
    }
}

/// Has the server make an area; `None` if it refuses.
fn made(front: &Front, queues: u16, entries: u16) -> Option<(InflightArea, OwnedFd)> {
    let asked = area(queues, entries);
    front.send(Code::GetInflightFd as u32, 0, asked.as_bytes(), &[]);
    let (_, body, mut fds) = front.answer()?;
    Some((InflightArea::read_from_bytes(&body).unwrap(), fds.remove(0)))
}

fn allocated(file: &OwnedFd) -> u64 {
    rustix::fs::fstat(file).unwrap().st_blocks as u64 * 512
}

/// The server made them, so its control group pays for what is allocated of them, as long as somebody has a descriptor.
#[test]
fn areas_that_a_front_end_keeps_hold_the_memory_of_four() {
    let bed = Bed::new();
    let mut kept = Vec::new();
    for _ in 0..12 {
        let mut front = bed.front("a");
        front.negotiate();
        let (area, file) = made(&front, 4, 1024).unwrap();
        front.must(Code::SetInflightFd, area.as_bytes(), &[file.as_fd()]);
        front.add_memory();
        front.start(0, 0);
        front.write(0, 1, &[1; 512]);
        assert!(allocated(&file) > 0);
        kept.push((area, file));
    }
    let full = |files: &mut dyn Iterator<Item = &OwnedFd>| {
        let all: Vec<u64> = files.map(allocated).collect();
        println!("allocated of {} areas: {all:?}", all.len());
        all.into_iter().filter(|bytes| *bytes > 0).count()
    };
    assert_eq!(full(&mut kept.iter().map(|(_, file)| file)), 4);
    // Within one connection, too.
    let mut front = bed.front("b");
    front.negotiate();
    let files: Vec<_> = (0..12).map(|_| made(&front, 4, 1024).unwrap().1).collect();
    assert_eq!(full(&mut files.iter()), 4);
    // One that was emptied is as good as a fresh one.
    let (area, file) = &kept[0];
    let mut front = bed.front("a");
    front.negotiate();
    front.must(Code::SetInflightFd, area.as_bytes(), &[file.as_fd()]);
    front.add_memory();
    front.start(0, 0);
    front.write(0, 1, &[2; 512]);
}

#[test]
fn memory_for_requests_in_flight_is_on_the_bill_of_unallocated_memory() {
    const LIMIT: u64 = 24 << 20;
    // Half of it is for whoever comes first, a quarter for each of the two: 18 MiB. The guest has 4 MiB of its own.
    let bed = Bed::with(1, Some(LIMIT));
    let negotiated = || {
        let mut front = bed.front("a");
        front.negotiate();
        front
    };
    let told = InflightArea {
        size: 20 << 20,
        ..area(1, 64)
    };
    let file = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, told.size).unwrap();
    // Only what it uses of it counts, which is a page or two.
    let front = negotiated();
    front.must(Code::SetInflightFd, told.as_bytes(), &[file.as_fd()]);
    drop(front);
    let small = Bed::with(1, Some(1 << 20));
    let mut front = small.front("a");
    front.negotiate();
    let told = InflightArea {
        size: 4 << 20,
        ..area(4, 32768)
    };
    let fds = [file.as_fd()];
    assert_eq!(
        front.tell(Code::SetInflightFd, told.as_bytes(), &fds),
        Some(false)
    );
    assert!(front.is_closed());
    // The same, allocated by the front end.
    fallocate(&file, FallocateFlags::empty(), 0, 20 << 20).unwrap();
    let mut front = small.front("a");
    front.negotiate();
    front.must(Code::SetInflightFd, told.as_bytes(), &fds);
    drop(front);
    // And one that the server would have to allocate.
    let mut front = small.front("a");
    front.negotiate();
    assert!(made(&front, 4, 32768).is_none());
    let mut front = small.front("a");
    front.negotiate();
    for _ in 0..12 {
        assert!(made(&front, 4, 1024).is_some());
    }
}

#[test]
fn an_area_that_changes_while_rings_are_at_work_is_refused() {
    let bed = Bed::new();
    let guest = Guest::new(&bed.path("a"));
    let own = memfd_create("area", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&own, 1 << 20).unwrap();
    let told = InflightArea {
        size: 1 << 20,
        ..area(2, 64)
    };
    let set = (Code::SetInflightFd, &[own.as_fd()][..]);
    let get = (Code::GetInflightFd, &[][..]);
    drop(guest);
    for (code, fds) in [set, get] {
        let guest = Guest::new(&bed.path("a"));
        assert_eq!(
            guest.front.tell(code, told.as_bytes(), fds),
            Some(false),
            "{code}"
        );
        assert!(guest.front.is_closed());
    }
    // Not while they have stopped.
    let guest = Guest::new(&bed.path("a"));
    for ring in 0..2 {
        guest.front.ask(Code::GetVringBase, &Front::state(ring, 0));
    }
    guest.front.must(set.0, told.as_bytes(), set.1);
    assert!(made(&guest.front, 2, 64).is_some());
}

/// GET_VRING_BASE is answered when all requests of the ring are, those included that a server before this one took. A guest that goes on from the index
/// without the area, as a migrated one does, would lose them.
#[test]
fn a_ring_tells_its_index_when_nothing_is_in_flight_any_more() {
    const LEFT: u16 = 60;
    let bed = Bed::with(1, None);
    for round in 0..10 {
        let mut front = bed.front("a");
        front.negotiate();
        let (area, file) = made(&front, 1, 64).unwrap();
        let driver = &mut front.drivers[0];
        for head in 0..LEFT {
            // More than the server does in one step, so that it has to stop in between.
            let data = driver.at(driver.data_offset());
            driver.build(head, 1, 0, &[(data, 128 << 10, false)], true);
            driver.make_available(head);
            // Taken by a server before: the mark, and the counter that says in which order.
            let at = 16 + 16 * u64::from(head);
            rustix::io::pwrite(&file, &[1], at).unwrap();
            rustix::io::pwrite(&file, &u64::from(head).to_le_bytes(), at + 8).unwrap();
        }
        front.must(Code::SetInflightFd, area.as_bytes(), &[file.as_fd()]);
        front.add_memory();
        let tell = |code: Code, payload: &[u8]| front.must(code, payload, &[]);
        tell(Code::SetVringNum, &Front::state(0, 64));
        tell(Code::SetVringAddr, front.place(0).as_bytes());
        let kick = [front.kicks[0].as_fd()];
        front.must(Code::SetVringKick, &0u64.to_le_bytes(), &kick);
        // Both in one turn, so that the ring has no time in between.
        let enable = message(Code::SetVringEnable as u32, 0, &Front::state(0, 1));
        let stop = message(Code::GetVringBase as u32, 0, &Front::state(0, 0));
        fdpass::send(front.socket.as_fd(), &[enable, stop].concat(), &[]).unwrap();
        let (_, body, _) = front.answer().unwrap();
        let index = u32::from_le_bytes(body[4..].try_into().unwrap());
        let driver = &mut front.drivers[0];
        let answered = std::iter::from_fn(|| driver.used()).count();
        assert_eq!((index, answered), (LEFT.into(), LEFT.into()), "{round}");
    }
}

fn own_end(front: &Front) -> OwnedFd {
    front.socket.as_fd().try_clone_to_owned().unwrap()
}

/// The front end is gone; the next one is heard.
fn next_is_heard(bed: &Bed, gone: Front) {
    drop(gone);
    bed.guest("a", 1).write(0, 0, &[1; 512]);
}

fn is_refused(code: Code, payload: &[u8], fd: impl FnOnce(&Front) -> OwnedFd) {
    let bed = Bed::new();
    let mut front = bed.front("a");
    front.negotiate();
    front.add_memory();
    let fd = fd(&front);
    let told = front.tell(code, payload, &[fd.as_fd()]);
    assert_eq!(told, Some(false), "{code}");
    assert!(front.is_closed());
    drop(fd);
    next_is_heard(&bed, front);
}

/// A session ends when its front end's socket is closed everywhere. A server that has a descriptor of it would wait for itself.
#[test]
fn the_front_ends_own_end_of_its_socket_is_never_kept() {
    is_refused(Code::SetBackendReqFd, &[], own_end);
    let region = |front: &Front| front.single(3).as_bytes().to_vec();
    let bed = Bed::new();
    let front = bed.front("b");
    is_refused(Code::RemMemReg, &region(&front), own_end);
    is_refused(Code::AddMemReg, &region(&front), own_end);
    let ring = 0u64.to_le_bytes();
    for code in [Code::SetVringKick, Code::SetVringCall, Code::SetVringErr] {
        is_refused(code, &ring, own_end);
    }
    is_refused(Code::SetOwner, &[], own_end);
}

/// A descriptor may also wait unread inside of another one that the server has.
#[test]
fn a_channel_that_holds_descriptors_is_refused() {
    let with = |fd: &Front| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        fdpass::send(ours.as_fd(), b"x", &[own_end(fd).as_fd()]).unwrap();
        theirs.into()
    };
    is_refused(Code::SetBackendReqFd, &[], with);
    let listens = |_: &Front| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        std::os::unix::net::UnixListener::bind(path).unwrap().into()
    };
    is_refused(Code::SetBackendReqFd, &[], listens);
    // Nothing can be sent to the server's end later on.
    let bed = Bed::new();
    let mut front = bed.front("a");
    front.negotiate();
    let (ours, theirs) = UnixStream::pair().unwrap();
    front.must(Code::SetBackendReqFd, &[], &[theirs.as_fd()]);
    drop(theirs);
    assert!(fdpass::send(ours.as_fd(), b"x", &[own_end(&front).as_fd()]).is_err());
    next_is_heard(&bed, front);
}

/// A front end that waits for its turn at a socket isn't read, so descriptors that it sent would stay in the server's hands.
#[test]
fn who_waits_for_its_turn_can_send_no_descriptors() {
    let (probe, _peer) = UnixStream::pair().unwrap();
    if !pvblk_sys::socket::refuse_descriptors(probe.as_fd()) {
        println!("not tried: this kernel can't refuse descriptors");
        return;
    }
    let bed = Bed::new();
    let mut front = bed.front("a");
    front.negotiate();
    let waits = UnixStream::connect(bed.path("a")).unwrap();
    let sent = fdpass::send(waits.as_fd(), &[1, 0, 0], &[own_end(&front).as_fd()]);
    assert!(sent.is_err());
    drop(waits);
    next_is_heard(&bed, front);
}

/// Files whose pages are had from somebody who may not answer. None of them is read, written or asked for anything.
#[test]
fn guest_memory_is_taken_from_no_other_file_than_memory() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("memory");
    let regular = std::fs::File::create_new(&path).unwrap();
    regular.set_len(1 << 20).unwrap();
    let memory = memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&memory, 1 << 20).unwrap();
    let only_path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&memory));
    let open = |path: &str, flags| rustix::fs::open(path, flags, Mode::empty()).unwrap();
    let (pipe_out, pipe_in) = rustix::pipe::pipe().unwrap();
    let mut others: Vec<(&str, OwnedFd)> = vec![
        ("a pipe", pipe_out),
        ("a pipe's other end", pipe_in),
        ("a directory", open("/", OFlags::RDONLY)),
        ("a path", open(&only_path, OFlags::PATH)),
        ("a device", open("/dev/zero", OFlags::RDWR)),
        (
            "a file of the kernel's",
            open("/proc/self/maps", OFlags::RDONLY),
        ),
        ("a socket", UnixStream::pair().unwrap().0.into()),
    ];
    // Where the folder is a tmpfs its files are memory.
    if rustix::fs::fstatfs(&regular).unwrap().f_type != 0x0102_1994 {
        others.push(("a regular file", regular.into()));
    }
    for folder in ["/dev/shm", "/tmp"] {
        if std::path::Path::new(folder).is_dir() {
            others.push(("another directory", open(folder, OFlags::RDONLY)));
        }
    }
    let bed = Bed::with(1, None);
    let told = InflightArea {
        size: 1 << 20,
        ..area(1, 64)
    };
    for (what, file) in &others {
        let region = bed.front("b").region(0);
        let table = [&1u64.to_le_bytes()[..], region.as_bytes()].concat();
        let single = [&[0; 8], region.as_bytes()].concat();
        for (code, payload) in [
            (Code::AddMemReg, &single[..]),
            (Code::SetMemTable, &table),
            (Code::SetInflightFd, told.as_bytes()),
        ] {
            let fds: [BorrowedFd<'_>; 1] = [file.as_fd()];
            let mut front = bed.front("a");
            front.negotiate();
            assert_eq!(
                front.tell(code, payload, &fds),
                Some(false),
                "{code}, {what}"
            );
            assert!(front.is_closed());
        }
    }
    bed.guest("a", 1).write(0, 1, &[1; 512]);
}
