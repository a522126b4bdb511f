//! A member that was away while the server ended is brought up to date by the next one.

use super::array::{CHUNK, Kind, LIMIT, MEMBERS, TestArray, miss, named};
use super::started::{prepared, prepared_with};
use pvblk_block::Close;
use pvblk_raid5::{
    ArrayMember, AssembleOptions, Blocking, Consistency, Feature, MemberState, ReAdded,
    SUPER_SECTOR, read_superblock, sleepy,
};
use std::time::Duration;

impl TestArray {
    /// The server ends, in order or not, and the next one starts with all devices but the one that was away.
    fn restart(&mut self, away: usize, in_order: bool) {
        self.queue = None;
        if in_order {
            self.array.close().unwrap();
        }
        let mut left: Vec<_> = self.disks.iter().map(named).collect();
        left.remove(away);
        self.start(prepared(left, None));
    }

    /// A device is what the array has recovered, in this many chunks, by its marks.
    fn comes_back(&mut self, disk: usize, chunks: u64) {
        assert_eq!(self.re_add(disk).unwrap(), ReAdded::ByBitmap);
        self.settle();
        let state = self.array.state();
        assert_eq!((state.failed, state.trouble), (None, None));
        let recovered = state.recovered.unwrap();
        assert!(recovered.by_bitmap);
        assert_eq!(recovered.sectors, chunks * CHUNK);
        assert!(self.is_whole());
        assert_eq!(self.mismatches(), 0);
    }
}

/// An array at which nothing is left of a member that was away, and the chunks that it missed.
fn without(kind: Kind, disk: usize) -> (TestArray, Vec<u64>) {
    let mut world = TestArray::new(kind, TestArray::limited(false));
    let chunks = miss(&mut world, disk);
    world.open(disk);
    world.pass(LIMIT * 2);
    (world, chunks)
}

#[test]
fn the_next_server_knows_what_a_member_missed() {
    for kind in Kind::ON_DISK {
        for in_order in [true, false] {
            if !in_order && kind.consistency != Consistency::Ppl {
                // Degraded and dirty: without a log it isn't started.
                continue;
            }
            for disk in 0..MEMBERS {
                let (mut world, mut chunks) = without(kind, disk);
                world.restart(disk, in_order);
                // It misses more.
                world.write_now(20_000, 8);
                chunks.push(20_000 / 32 * 16 / CHUNK);
                chunks.sort_unstable();
                chunks.dedup();
                world.comes_back(disk, chunks.len() as u64);
            }
        }
    }
}

/// The next server goes on where the one before was, and passes over what isn't marked.
#[test]
fn a_member_that_was_being_brought_up_to_date_goes_on_so() {
    for kind in Kind::ON_DISK {
        let (mut world, _) = without(kind, 1);
        world.array.set_speed(1, 1).unwrap();
        assert_eq!(world.re_add(1).unwrap(), ReAdded::ByBitmap);
        world.pass(Duration::from_secs(1));
        assert_eq!(world.rebuilding(), Some(1));
        world.queue = None;
        world.array.close().unwrap();
        world.written(1);
        let all = world.disks.iter().map(named).collect();
        world.start(prepared(all, None));
        world.settle();
        let rebuilding = |m: &ArrayMember| m.state != MemberState::InSync;
        assert!(!world.array.state().members.iter().any(rebuilding));
        let recovered = world.array.state().recovered.unwrap();
        assert!(recovered.by_bitmap, "{kind:?}");
        let sectors: u64 = world.written(1).iter().map(|w| w.1).sum();
        assert!(sectors <= 12 * CHUNK, "{kind:?}: {sectors}");
        assert!(world.is_whole());
        assert_eq!(world.mismatches(), 0);
    }
}

/// Superblocks that md writes have no microseconds: its writes aren't in the map.
#[test]
fn a_map_from_before_another_wrote_marks_all() {
    for events in [0, 1] {
        let (mut world, _) = without(Kind::LOG_AND_MAP, 2);
        world.queue = None;
        world.array.close().unwrap();
        for disk in [0, 1] {
            let (name, device) = named(&world.disks[disk]);
            let mut superblock = read_superblock(&name, &device, &mut sleepy()).unwrap();
            assert!(superblock.keeps_map());
            // An array that becomes clean has the events that it had before it was dirty.
            superblock.events += events;
            superblock.utime = superblock.utime % (1 << 40) + 1;
            let mut blocking = Blocking::open(&device).unwrap();
            let bytes = superblock.encode();
            blocking.write(SUPER_SECTOR, &bytes, &mut sleepy()).unwrap();
        }
        let left = world.disks[..2].iter().map(named).collect();
        world.start(prepared(left, None));
        let all = world.superblock(0).size_sectors / CHUNK;
        world.comes_back(2, all);
    }
}

/// After a crash, parity is made right where the map says; without one, everywhere.
#[test]
fn a_crash_without_a_log_costs_marked_chunks_only() {
    let mut world = TestArray::new(Kind::MAP, TestArray::limited(false));
    world.write_now(0, 2048);
    world.sweep();
    world.write_now(4096, 8);
    world.queue = None;
    let all = world.disks.iter().map(named).collect();
    let later = AssembleOptions {
        resync_later: true,
        ..AssembleOptions::default()
    };
    let assembly = prepared_with(all, None, &later);
    let sectors: u64 = assembly.unsynced.iter().map(|r| r.end - r.start).sum();
    assert!((1..=2 * CHUNK).contains(&sectors), "{sectors}");
    world.start(assembly);
    world.settle();
    assert_eq!(world.array.state().in_sync_sectors, None);
    assert_eq!(world.mismatches(), 0);
    assert!(world.is_whole());
}

/// Nobody knows what a member by force has missed.
#[test]
fn a_forced_start_believes_no_map() {
    for kind in Kind::ON_DISK {
        let (mut world, _) = without(kind, 0);
        world.queue = None;
        world.array.close().unwrap();
        let left = world.disks[..2].iter().map(named).collect();
        let force = AssembleOptions {
            force: true,
            ..AssembleOptions::default()
        };
        world.start(prepared_with(left, None, &force));
        world.re_add(2).unwrap();
        world.settle();
        assert_eq!(world.failed(), None);
        assert_eq!(world.mismatches(), 0, "{kind:?}");
    }
}

#[test]
fn a_member_of_another_policy_is_written_whole() {
    let (mut world, _) = without(Kind::MAP, 1);
    world.restart(1, true);
    let mut superblock = world.superblock(1);
    superblock.feature_map |= Feature::PPL.0;
    superblock.bitmap_or_ppl = [8, 0, 8, 0];
    let mut blocking = Blocking::open(&world.disks[1].device).unwrap();
    let bytes = superblock.encode();
    blocking.write(SUPER_SECTOR, &bytes, &mut sleepy()).unwrap();
    let ReAdded::Whole(why) = world.re_add(1).unwrap() else {
        panic!("it has a log");
    };
    assert!(why.contains("another consistency policy"), "{why}");
    world.settle();
    assert!(world.is_whole());
    world.restart(0, true);
}
