//! Arrays whose blocks have checksums, on members whose blocks become others.

mod server;

use pvblk_block::{Buffer, Op, Request, RequestFlags, Status};
use pvblk_raid5::{
    AssembleOptions, Blocking, Consistency, CreateOptions, Kept, STRIPE_BYTES, STRIPE_SECTORS,
    SUPER_SECTOR, SyncAction, assemble, create, prepare, sleepy,
};
use pvblk_testing::seed;
use server::{Block, MEMBER_BYTES, Server, again, devices};
use std::time::Duration;

const POLICIES: [Consistency; 2] = [Consistency::Ppl, Consistency::Resync];

#[test]
fn a_flipped_bit_is_found_and_made_right() {
    for policy in POLICIES {
        let mut server = Server::new(4, policy, 1);
        server.write_all();
        for restarts in [false, true] {
            if restarts {
                server.end(true);
                server.start();
            }
            let before = server.all_errors();
            let places = [(0, 0), (1, 1), (2, 700), (3, 1024), (0, 1500), (3, 2047)];
            let was = places.map(|(member, stripe)| server.raw(member, server.sector_of(stripe)));
            for (member, stripe) in places {
                server.flip(member, server.sector_of(stripe));
            }
            assert!(server.is_whole(), "{policy:?}");
            // Reads look at no parity.
            assert_eq!(server.check(), 0, "{policy:?}");
            assert_eq!(server.all_errors() - before, 6, "{policy:?}");
            for ((member, stripe), was) in places.into_iter().zip(was) {
                assert_eq!(server.raw(member, server.sector_of(stripe)), was);
            }
        }
    }
}

#[test]
fn without_checksums_a_flipped_bit_is_what_the_guest_reads() {
    let mut server = Server::new(4, Consistency::Ppl, 2);
    server.end(true);
    let found = again(&server.devices);
    let options = AssembleOptions::default();
    let mut assembly = assemble(found, &options, &mut sleepy()).unwrap();
    prepare(&mut assembly, &options, &mut |_, _| {}, &mut sleepy()).unwrap();
    assert!(pvblk_raid5::set_private_map(&mut assembly, false, &mut sleepy()).unwrap());
    server.serve(assembly);
    server.write_all();
    let member = server.geometry.locate(0).member;
    server.flip(member, server.sector_of(0));
    assert_eq!(server.read(0, 1), Some(false));
}

#[test]
fn a_part_of_a_block_is_compared_whole() {
    let mut server = Server::new(4, Consistency::Ppl, 3);
    server.write_all();
    let place = server.geometry.locate(80);
    let stripe = place.member_sector / STRIPE_SECTORS;
    let mut block = server.raw(place.member, server.sector_of(stripe));
    block[100] ^= 1;
    server.set_raw(place.member, server.sector_of(stripe), &block);
    assert_eq!(server.read_sectors(80, 1), Some(true));
    assert_eq!(server.all_errors(), 1);
    // The flipped byte lies in another sector than the one that is read.
    server.forget();
    server.flip(place.member, server.sector_of(stripe));
    assert_eq!(server.read_sectors(83, 2), Some(true));
    assert_eq!(server.all_errors(), 2);
}

#[test]
fn a_wrong_sum_is_made_right_and_counted_for_the_member_that_has_it() {
    let mut server = Server::new(4, Consistency::Ppl, 4);
    server.write_all();
    server.end(true);
    let area = {
        let found = again(&server.devices);
        let assembly = assemble(found, &AssembleOptions::default(), &mut sleepy()).unwrap();
        assembly.newest().sums_area().unwrap()
    };
    let right = server.raw(2, area.sector);
    let mut page = right;
    page[40..48].fill(0x5a);
    server.set_raw(2, area.sector, &page);
    server.start();
    assert!(server.is_whole());
    assert_eq!(server.check(), 0);
    assert_eq!(server.errors(), [0, 0, 2, 0]);
    server.end(true);
    assert_eq!(server.raw(2, area.sector), right);
}

#[test]
fn a_missing_member_leaves_no_wrong_data() {
    let mut server = Server::new(4, Consistency::Ppl, 5);
    server.write_all();
    server.array().fail(1).unwrap();
    server.settle();
    assert_eq!(server.array().failed(), Some(1));
    assert!(server.is_whole(), "degraded");
    // Its sums are on the member of place 3.
    let stripe = 5;
    let block = server.block_at(2, stripe).expect("data");
    server.flip(2, server.sector_of(stripe));
    assert_eq!(server.read(block, 1), None, "nothing tells what it was");
    let other = server.block_at(3, stripe).or(server.block_at(0, stripe));
    assert_eq!(server.read(other.unwrap(), 1), Some(true));
}

#[test]
fn a_missing_members_block_is_compared_too() {
    for rebuilds in [false, true] {
        let mut server = Server::new(4, Consistency::Ppl, 12);
        server.write_all();
        server.array().fail(1).unwrap();
        server.settle();
        server.end(true);
        // Sums of place 0 are on the missing member, and not in memory any more.
        server.start();
        let stripe = (0..8)
            .find(|stripe| server.geometry.stripe_parity(*stripe) == 2)
            .unwrap();
        let block = server.block_at(1, stripe).unwrap();
        server.flip(0, server.sector_of(stripe));
        if !rebuilds {
            assert_eq!(server.read(block, 1), None, "made of a wrong block");
            continue;
        }
        let spare = devices(1).remove(0);
        let array = server.array();
        array.add("spare", &spare.1, false, &mut sleepy()).unwrap();
        server.pass(Duration::from_secs(10));
        assert_eq!(server.array().failed(), Some(1));
        let state = server.array().state();
        let trouble = state.trouble.clone();
        let trouble = trouble.unwrap_or_default();
        let text = "can't be read, or isn't what was written";
        assert!(trouble.ends_with(text), "{trouble}");
    }
}

#[test]
fn a_member_that_lost_all_writes_for_a_while_is_made_right() {
    let mut server = Server::new(4, Consistency::Ppl, 13);
    server.write_all();
    server.end(true);
    let found = again(&server.devices);
    let assembly = assemble(found, &AssembleOptions::default(), &mut sleepy()).unwrap();
    let sums = assembly.newest().sums_area().unwrap();
    drop(assembly);
    for member in 0..4 {
        let old: Vec<Block> = (0..32)
            .map(|stripe| server.raw(member, server.sector_of(stripe)))
            .collect();
        let old_sums = server.raw(member, sums.sector);
        server.start();
        // Whole rows, and parts.
        server.write(0, 60);
        (60..90).for_each(|block| server.write(block, 1));
        server.end(true);
        // Superblock and map are those of now.
        for (stripe, block) in old.iter().enumerate() {
            server.set_raw(member, server.sector_of(stripe as u64), block);
        }
        server.set_raw(member, sums.sector, &old_sums);
        server.start();
        assert!(server.is_whole(), "member {member}");
        assert_eq!(server.check(), 0, "member {member}");
        let errors = server.errors();
        assert_eq!(errors.iter().sum::<u32>(), errors[member]);
        assert!(errors[member] > 40, "{errors:?}");
        server.end(true);
    }
}

#[test]
fn recovery_from_the_log_makes_no_parity_of_what_rotted_at_rest() {
    let mut server = Server::new(4, Consistency::Ppl, 14);
    server.write_all();
    server.write(77, 1);
    // The chunk's mark goes; the log still has the block.
    server.pass(Duration::from_secs(20));
    let place = server.geometry.locate(77 * STRIPE_SECTORS);
    server.flip(place.member, server.data_sectors + place.member_sector);
    server.end(false);
    server.start();
    assert_eq!(server.read(77, 1), Some(true));
    assert_eq!(server.all_errors(), 1);
    server.settle();
    assert_eq!(server.check(), 0);
    assert_eq!(server.all_errors(), 1);
}

#[test]
fn a_rebuilt_member_is_protected_again() {
    let mut server = Server::new(4, Consistency::Ppl, 6);
    server.write_all();
    server.array().fail(1).unwrap();
    server.settle();
    for block in (0..server.holds.len()).step_by(7) {
        server.write(block, 1);
    }
    let spare = devices(1).remove(0);
    let name = "spare".to_owned();
    server
        .array()
        .add(&name, &spare.1, false, &mut sleepy())
        .unwrap();
    server.settle();
    assert_eq!(server.array().failed(), None);
    server.devices[1] = (name, spare.1);
    for restarts in [false, true] {
        if restarts {
            server.end(true);
            server.start();
        }
        let before = server.all_errors();
        for member in 0..4 {
            for stripe in [3 + member as u64 * 500, 40 + member as u64 * 900] {
                server.flip(member, server.sector_of(stripe));
            }
        }
        assert!(server.is_whole());
        assert_eq!(server.check(), 0);
        assert_eq!(server.all_errors() - before, 8, "restarts {restarts}");
    }
}

#[test]
fn a_replaced_member_is_protected_again() {
    let mut server = Server::new(4, Consistency::Ppl, 7);
    server.write_all();
    let spare = devices(1).remove(0);
    let name = "spare".to_owned();
    server
        .array()
        .add(&name, &spare.1, false, &mut sleepy())
        .unwrap();
    server.array().replace(2).unwrap();
    server.settle();
    server.devices[2] = (name, spare.1);
    server.end(true);
    server.start();
    for member in 0..4 {
        server.flip(member, server.sector_of(9 + member as u64 * 500));
    }
    assert!(server.is_whole());
    assert_eq!(server.check(), 0);
    assert_eq!(server.all_errors(), 4);
}

#[test]
fn after_a_crash_sums_are_right_or_unknown() {
    for policy in POLICIES {
        let mut server = Server::new(4, policy, 8);
        server.write_all();
        // Marks of chunks that aren't used go.
        server.pass(Duration::from_secs(20));
        let used = server.holds.len() / 2;
        (0..40).for_each(|n| server.write(used + n, 1));
        server.end(false);
        server.start();
        server.settle();
        // Far from what was written sums have survived; others were made anew, those of the whole group.
        let place = server.geometry.locate(used as u64 * STRIPE_SECTORS);
        let neighbour = place.member_sector - 2 * 128;
        let flips = [8, neighbour, place.member_sector];
        for sector in flips {
            server.flip(place.member, server.data_sectors + sector);
        }
        assert!(server.is_whole(), "{policy:?}");
        assert_eq!(server.check(), 0);
        assert_eq!(server.all_errors(), 3, "{policy:?}");
    }
}

#[test]
fn sums_are_made_anew_when_others_had_the_array() {
    let mut server = Server::new(4, Consistency::Ppl, 11);
    server.write_all();
    server.end(true);
    // As md leaves superblocks: of times without microseconds.
    let found = again(&server.devices);
    let assembly = assemble(found, &AssembleOptions::default(), &mut sleepy()).unwrap();
    for member in assembly.present() {
        let mut superblock = member.superblock.clone();
        superblock.set_updated(superblock.utime, Kept::Nothing);
        let mut disk = Blocking::open(&member.device).unwrap();
        disk.write(SUPER_SECTOR, &superblock.encode(), &mut sleepy())
            .unwrap();
    }
    drop(assembly);
    let stripe = 33;
    let block = (0..4)
        .find_map(|member| Some((member, server.block_at(member, stripe)?)))
        .unwrap();
    // A block and its parity are others, as after a write of md's.
    let parity = server.geometry.stripe_parity(stripe);
    for member in [block.0, parity] {
        let mut bytes = server.raw(member, server.sector_of(stripe));
        bytes[9] ^= 0xff;
        server.set_raw(member, server.sector_of(stripe), &bytes);
    }
    server.holds[block.1][9] ^= 0xff;
    server.start();
    server.settle();
    assert!(server.is_whole());
    assert_eq!(server.all_errors(), 0);
    server.flip(block.0, server.sector_of(stripe));
    assert_eq!(server.read(block.1, 1), Some(true));
    assert_eq!(server.all_errors(), 1);
    assert_eq!(server.check(), 0);
}

/// After writes to the other blocks of a stripe whose parity was wrong, parity has a checksum which fits it, and one block has none. That block is right.
#[test]
fn a_repair_keeps_the_one_block_without_a_checksum() {
    for policy in POLICIES {
        let mut server = Server::new(4, policy, 14);
        server.write_all();
        server.end(true);
        let found = again(&server.devices);
        let assembly = assemble(found, &AssembleOptions::default(), &mut sleepy()).unwrap();
        let area = assembly.newest().sums_area().unwrap();
        drop(assembly);
        let stripe = 21;
        for member in 0..4 {
            let mut page = server.raw(member, area.sector);
            page[stripe as usize * 4..][..4].fill(0);
            server.set_raw(member, area.sector, &page);
        }
        let parity = server.geometry.stripe_parity(stripe);
        server.flip(parity, server.sector_of(stripe));
        server.start();
        let blocks = (0..4).filter_map(|member| server.block_at(member, stripe));
        for block in blocks.collect::<Vec<_>>().into_iter().skip(1) {
            server.forget();
            server.write_part(block);
        }
        assert_eq!(server.sync(SyncAction::Repair), 8, "{policy:?}");
        assert_eq!(server.check(), 0, "{policy:?}");
        assert!(server.is_whole(), "{policy:?}");
        assert_eq!(server.all_errors(), 0, "{policy:?}");
    }
}

#[test]
fn two_wrong_blocks_of_a_stripe_fail_and_nothing_is_written() {
    let mut server = Server::new(4, Consistency::Ppl, 9);
    server.write_all();
    let stripe = 11;
    for member in [0, 2] {
        server.flip(member, server.sector_of(stripe));
    }
    let was: Vec<Block> = (0..4)
        .map(|member| server.raw(member, server.sector_of(stripe)))
        .collect();
    for member in [0, 2] {
        if let Some(block) = server.block_at(member, stripe) {
            assert_eq!(server.read(block, 1), None);
        }
    }
    let check = server.check();
    assert_eq!(check, 0, "a check passes over it");
    for (member, was) in was.iter().enumerate() {
        assert!(server.raw(member, server.sector_of(stripe)) == *was);
    }
    // A write of the whole stripe makes it right.
    for member in 0..4 {
        if let Some(block) = server.block_at(member, stripe) {
            server.holds[block].fill(0);
        }
    }
    let row = server.geometry.stripe_row(stripe);
    let sectors = server.geometry.row_sectors();
    let first = (row * sectors / STRIPE_SECTORS) as usize;
    server.write(first, (sectors / STRIPE_SECTORS) as usize);
    assert!(server.is_whole());
}

/// Faults of one device: a write that it lost, that went elsewhere, a flipped bit, or a page of sums that is overwritten.
#[test]
fn faults_of_single_blocks_are_found_and_made_right() {
    let count = std::env::var("PVBLK_FAULTS").map_or(1500, |n| n.parse().unwrap());
    let seed = seed();
    let mut server = Server::new(4, Consistency::Ppl, seed);
    server.write_all();
    let stripes = server.geometry.stripes();
    let mut found = 0;
    for fault in 0..count {
        let member = server.rng.usize(..4);
        let stripe = server.rng.u64(..stripes);
        let sector = server.sector_of(stripe);
        let block = server.block_at(member, stripe);
        let wrong = match (server.rng.u32(..3), block) {
            (0, Some(block)) => {
                // Acknowledged and lost.
                let old = server.raw(member, sector);
                server.write(block, 1);
                server.set_raw(member, sector, &old);
                vec![stripe]
            }
            (1, Some(block)) => {
                // It went to another stripe.
                let other = (stripe + 1 + server.rng.u64(..stripes - 1)) % stripes;
                let old = server.raw(member, sector);
                server.write(block, 1);
                let new = server.raw(member, sector);
                server.set_raw(member, sector, &old);
                server.set_raw(member, server.sector_of(other), &new);
                vec![stripe, other]
            }
            _ => {
                server.flip(member, sector);
                vec![stripe]
            }
        };
        server.forget();
        let before = server.errors();
        for stripe in wrong.iter().copied() {
            match server.block_at(member, stripe) {
                Some(block) if server.rng.bool() => {
                    assert_eq!(server.read(block, 1), Some(true), "fault {fault}");
                }
                Some(block) => server.write_part(block),
                // Parity: whoever writes a part of another block reads it.
                None => {
                    let other = (0..4).find_map(|other| server.block_at(other, stripe));
                    server.write_part(other.unwrap());
                }
            }
        }
        let mut after = server.errors();
        after[member] -= wrong.len() as u32;
        assert_eq!(after, before, "fault {fault} at {member} {wrong:?}");
        found += wrong.len();
        if fault % 500 == 499 {
            // Sums are dropped from memory, and come again.
            server.end(true);
            server.start();
        }
    }
    assert!(server.is_whole());
    assert_eq!(server.check(), 0);
    println!("{found} wrong blocks of {count} faults, all found and made right");
}

#[test]
fn a_bitmap_and_checksums_exclude_each_other() {
    let mut how = CreateOptions::new("both");
    how.consistency = Consistency::Bitmap;
    how.checksums = true;
    let error = create(devices(3), &how, &mut sleepy()).err().unwrap();
    assert_eq!(
        error.to_string(),
        "checksums need the private map, which arrays with a write-intent bitmap don't have: take a partial parity log"
    );
}

#[test]
fn flags_of_requests_change_nothing() {
    let mut server = Server::new(3, Consistency::Ppl, 10);
    let row = (server.geometry.row_sectors() / STRIPE_SECTORS) as usize;
    // Whole rows from buffers that stay as they are: nothing is copied.
    let buffer = Buffer::anonymous(row * STRIPE_BYTES).unwrap();
    for n in 0..row {
        server.rng.fill(&mut server.holds[n]);
        buffer.write(n * STRIPE_BYTES, &server.holds[n]);
    }
    let mut request = Request::with_buffers(Op::Write, 0, vec![buffer], 0);
    request.flags = RequestFlags::STABLE_BUFFERS | RequestFlags::FUA;
    assert_eq!(server.ask(request).status, Status::Ok);
    let mut request = Request::new(Op::WriteZeroes, row as u64 * 8, row as u64 * 8, 0);
    request.flags = RequestFlags::empty();
    assert_eq!(server.ask(request).status, Status::Ok);
    // Two in the first row, one in the second, which is zeros.
    for (member, stripe) in [(0, 0), (1, 2), (2, 1)] {
        server.flip(member, server.sector_of(stripe));
    }
    assert!(server.is_whole());
    assert_eq!(server.check(), 0);
    assert_eq!(server.all_errors(), 3);
}

/// The bytes of a member, before its data too, by block.
fn image(server: &Server, member: usize) -> Vec<Block> {
    let blocks = MEMBER_BYTES / STRIPE_BYTES as u64;
    let sector = |n: u64| n * STRIPE_SECTORS;
    (0..blocks).map(|n| server.raw(member, sector(n))).collect()
}

/// The member has lost all writes since it held this.
fn lose_writes(server: &mut Server, member: usize, image: &[Block]) {
    for (n, block) in image.iter().enumerate() {
        server.set_raw(member, n as u64 * STRIPE_SECTORS, block);
    }
}

/// The stripe from 100 on whose parity is on a member.
fn stripe_with_parity_on(server: &Server, member: usize) -> u64 {
    let is_it = |stripe: &u64| server.geometry.stripe_parity(*stripe) == member;
    (100..200).find(is_it).expect("every fourth stripe is one")
}

fn write_and_flush(server: &mut Server, block: usize) {
    server.write(block, 1);
    let flush = Request::new(Op::Flush, 0, 0, 0);
    assert_eq!(server.ask(flush).status, Status::Ok);
}

/// Runs a test with each policy and each member that loses writes, of an array that has come to rest.
fn with_each_lossy(test: impl Fn(&mut Server, usize, &str)) {
    for policy in POLICIES {
        for lossy in 0..4 {
            let mut server = Server::new(4, policy, 21);
            server.write_all();
            server.pass(Duration::from_secs(20));
            test(&mut server, lossy, &format!("{policy:?}, member {lossy}"));
        }
    }
}

/// Power is cut, and the next server finds a member as it was before.
fn restart_with_lost(server: &mut Server, lossy: usize, before: &[Block]) {
    server.end(false);
    lose_writes(server, lossy, before);
    server.start();
    server.settle();
}

/// Its map says that a chunk is clean, which others' maps and its sums contradict: no block of a working member may be "repaired".
#[test]
fn a_member_that_lost_its_map_takes_no_write_of_others_back() {
    with_each_lossy(|server, lossy, text| {
        let before = image(server, lossy);
        let stripe = stripe_with_parity_on(server, lossy);
        let member = (lossy + 1) % 4;
        let block = server.block_at(member, stripe).expect("data");
        write_and_flush(server, block);
        restart_with_lost(server, lossy, &before);
        assert_eq!(server.read(block, 1), Some(true), "{text}");
        assert_eq!(server.errors()[member], 0, "{text}");
    });
}

/// Its map says that a chunk is marked, which it isn't any more: its sums tell what it has lost.
#[test]
fn a_member_that_lost_writes_and_its_map_is_made_right() {
    with_each_lossy(|server, lossy, text| {
        let stripe = stripe_with_parity_on(server, (lossy + 1) % 4);
        let block = server.block_at(lossy, stripe).expect("data");
        server.write(block, 1);
        let before = image(server, lossy);
        write_and_flush(server, block);
        server.pass(Duration::from_secs(60));
        restart_with_lost(server, lossy, &before);
        assert_eq!(server.read(block, 1), Some(true), "{text}");
        assert!(server.errors()[lossy] > 0, "{text}");
    });
}
