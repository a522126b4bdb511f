use super::super::shares::Shares;
use super::*;
use pvblk_sys::Closer;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const PAGE: u64 = PAGE_SIZE as u64;

fn file(pages: u64) -> PeerFd {
    let fd = memfd_create("t", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, pages * PAGE).unwrap();
    PeerFd::new(fd, &Closer::new())
}

fn region(guest: u64, pages: u64, user: u64, offset: u64) -> MemoryRegion {
    MemoryRegion {
        guest_address: guest * PAGE,
        size: pages * PAGE,
        user_address: user * PAGE,
        file_offset: offset * PAGE,
    }
}

#[test]
fn bad_regions_are_refused_by_name() {
    let mut regions = Regions::default();
    regions.add(region(16, 16, 100, 0), file(16)).unwrap();
    let mut odd = region(64, 1, 200, 0);
    odd.guest_address += 512;
    let max = u64::MAX / PAGE;
    for (told, why) in [
        (region(0, 0, 0, 0), "empty"),
        (odd, "at a page"),
        (region(max, 2, 300, 0), "last address"),
        (region(64, 2, max, 0), "last address"),
        (region(31, 2, 300, 0), "overlaps"),
        (region(15, 2, 300, 0), "overlaps"),
        (region(64, 2, 115, 0), "overlaps"),
        (region(64, 2, 300, 15), "not inside the file"),
        (region(64, 17, 300, 0), "not inside the file"),
        (region(64, (1 << 40) / PAGE, 300, 0), "1 TiB"),
    ] {
        let e = regions.add(told, file(16)).unwrap_err().to_string();
        assert!(e.contains(why), "{e}");
    }
    assert!(regions.add(region(64, 1, 300, 0), file(0)).is_err());
    assert!(regions.remove(&region(16, 15, 100, 0)).is_err());
    regions.remove(&region(16, 16, 100, 0)).unwrap();
    assert!(regions.is_empty());
    for i in 0..MAX_REGIONS as u64 {
        regions.add(region(i, 1, i, 0), file(1)).unwrap();
    }
    let e = regions.add(region(999, 1, 999, 0), file(1)).unwrap_err();
    assert!(e.to_string().contains("more than 128 regions"), "{e}");
}

#[test]
fn addresses_lead_to_the_right_bytes_and_nowhere_else() {
    let mut regions = Regions::default();
    // Two that touch, in one file the other way round, and one further on.
    let (a, b) = (file(8), file(4));
    let a2 = a.as_fd().try_clone_to_owned().unwrap();
    let a2 = PeerFd::new(a2, &Closer::new());
    regions.add(region(1, 4, 1000, 4), a).unwrap();
    regions.add(region(5, 4, 2000, 0), a2).unwrap();
    regions.add(region(20, 4, 3000, 0), b).unwrap();
    let seat = Shares::new(1, None).seat(0);
    let memory = regions.map(&seat, "test: memory").unwrap();
    // Once for all queues.
    drop(regions.map(&seat, "test: memory").unwrap());
    assert_eq!(seat.mapped(), 12 * PAGE);
    let (ring, at) = memory.user(2000 * PAGE + 16, 4).unwrap();
    ring.write(at, b"ring");
    let mut out = Vec::new();
    // Across the border of two regions.
    assert!(memory.buffers(5 * PAGE - 2, 22, &mut out));
    assert_eq!(out.iter().map(Buffer::len).collect::<Vec<_>>(), [2, 20]);
    assert_eq!(&out[1].to_vec()[16..], b"ring");
    let mut got = [1; 22];
    assert!(memory.read(5 * PAGE - 2, &mut got));
    assert_eq!(&got[18..], b"ring");
    // Neighbours become one.
    out.clear();
    assert!(memory.buffers(PAGE, 100, &mut out) && memory.buffers(PAGE + 100, 50, &mut out));
    assert_eq!((out.len(), out[0].len()), (1, 150));
    for (at, len) in [
        (0, 1),
        (PAGE - 1, 2),
        (9 * PAGE - 1, 2),
        (9 * PAGE, 1),
        (24 * PAGE - 1, 2),
        (u64::MAX, 1),
        (PAGE, u32::MAX),
    ] {
        out.clear();
        assert!(!memory.buffers(at, len, &mut out), "{at:#x} {len}");
    }
    assert!(!memory.read(9 * PAGE - 1, &mut [0; 2]));
    assert!(memory.user(1004 * PAGE - 1, 2).is_none());
    assert!(memory.user(999 * PAGE, 1).is_none() && memory.user(u64::MAX, 1).is_none());
    drop((memory, regions));
    assert_eq!(seat.mapped(), 8 * PAGE, "buffers of two regions are left");
    drop((out, ring));
    assert_eq!(seat.mapped(), 0);
}

#[test]
fn memory_that_shrinks_is_lost_and_buffers_stay_mapped() {
    let fd = file(4);
    let other = fd.as_fd().try_clone_to_owned().unwrap();
    let mut regions = Regions::default();
    regions.add(region(0, 4, 0, 0), fd).unwrap();
    let memory = regions
        .map(&Shares::new(1, None).seat(0), "test: memory")
        .unwrap();
    let mut out = Vec::new();
    assert!(memory.buffers(3 * PAGE, 512, &mut out));
    ftruncate(&other, 0).unwrap();
    assert!(!memory.is_lost());
    assert_eq!(out[0].to_vec(), [0; 512]);
    assert!(memory.is_lost());
    drop(memory);
    out[0].write(0, b"still mapped");
}
