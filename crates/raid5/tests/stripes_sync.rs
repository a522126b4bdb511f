//! Rebuilds and resyncs of the array around the core without a lock: begun by the other core or by a crash, cut short, and done.

#[path = "support/failing.rs"]
mod failing;
#[path = "support/started.rs"]
mod started;

use failing::Failing;
use pvblk_block::{BlockDevice, Buffer, Close, Op, Queue, QueueContext, Request, Status};
use pvblk_raid5::{
    ArrayOptions, AssembleOptions, Assembly, BackgroundWork, Consistency, CreateOptions, Raid5,
    StripeArray, StripeBackground, SyncAction, sleepy,
};
use started::{prepared, prepared_with};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

type Named = (String, Arc<dyn BlockDevice>);

const BLOCK: usize = 4096;

/// Arrays that the core takes.
const ALL: [Consistency; 2] = [Consistency::Ppl, Consistency::Resync];

fn disk(name: &str) -> Named {
    (name.into(), pvblk_volume::open("mem:8M").unwrap())
}

fn disks(count: usize) -> Vec<Named> {
    (0..count).map(|n| disk(&n.to_string())).collect()
}

fn how(consistency: Consistency, assume_clean: bool) -> CreateOptions {
    let mut how = CreateOptions::new("test:0");
    how.chunk_sectors = 16;
    how.consistency = consistency;
    how.assume_clean = assume_clean;
    how
}

/// Assembled, with a resync left for later.
fn later(disks: &[Named], new: Option<&CreateOptions>) -> Assembly {
    let options = AssembleOptions {
        resync_later: true,
        ..AssembleOptions::default()
    };
    prepared_with(disks.to_vec(), new, &options)
}

fn start(assembly: Assembly) -> (Arc<StripeArray>, StripeBackground) {
    let array = StripeArray::start(assembly, &ArrayOptions::default()).unwrap();
    let background = StripeBackground::new(&array);
    (array, background)
}

/// Submits a request, and waits for its end.
fn run(
    array: &Arc<dyn BlockDevice>,
    mut step: impl FnMut(),
    op: Op,
    sector: u64,
    byte: u8,
) -> Vec<u8> {
    let mut queue = Queue::open(array, &QueueContext::new(4)).unwrap();
    let buffer = Buffer::anonymous(BLOCK).unwrap();
    buffer.write(0, &[byte; BLOCK]);
    let request = Request::with_buffers(op, sector, vec![buffer], 0);
    queue.submit(&mut vec![request]);
    let mut done = Vec::new();
    for _ in 0..1_000_000 {
        step();
        queue.poll(&mut done);
        if let Some(done) = done.pop() {
            assert_eq!(done.status, Status::Ok);
            return done.request.buffers[0].to_vec();
        }
    }
    panic!("a request never ends");
}

/// The byte that a block is full of.
fn stamp(sector: u64) -> u8 {
    (sector / 8 % 251) as u8
}

/// A block that was read is full of a byte.
fn holds(block: &[u8], sector: u64, byte: u8) {
    let is_it = block.iter().all(|found| *found == byte);
    assert!(is_it, "sector {sector} has {} and not {byte}", block[0]);
}

/// Blocks all over the array.
fn some(array: &dyn BlockDevice) -> impl Iterator<Item = u64> + use<> {
    (0..array.capacity_sectors()).step_by(8 * 37)
}

/// Fails a member of an array that the core with a lock serves, and begins to make another device the member; `replaces`: of a member that works.
fn begun(consistency: Consistency, replaces: bool) -> Vec<Named> {
    let mut disks = disks(4);
    let assembly = prepared(disks.clone(), Some(&how(consistency, true)));
    let array = Raid5::start(assembly, &ArrayOptions::default()).unwrap();
    let mut background = BackgroundWork::new(&array).unwrap();
    array.set_speed(1, 1).unwrap();
    let device: Arc<dyn BlockDevice> = array.clone();
    for sector in some(&*array) {
        let step = || {
            background.step(Duration::ZERO);
        };
        run(&device, step, Op::Write, sector, stamp(sector));
    }
    let spare = disk("spare");
    array.add(&spare.0, &spare.1, false, &mut sleepy()).unwrap();
    disks.push(spare);
    match replaces {
        true => array.replace(2).unwrap(),
        false => array.fail(2).unwrap(),
    }
    for second in 0..100 {
        background.step(Duration::from_secs(second));
    }
    assert_eq!(array.rebuilding(), Some(2));
    drop(background);
    array.stop(&mut sleepy()).unwrap();
    disks
}

/// Steps until it is so; the limit is for a machine that is very busy.
fn until(background: &mut StripeBackground, mut is: impl FnMut(&mut StripeBackground) -> bool) {
    let begin = Instant::now();
    while !is(background) {
        background.work();
        assert!(begin.elapsed() < Duration::from_secs(300), "it never is");
    }
}

/// Sectors of members whose parity is wrong, as the core with a lock finds them.
fn wrong_parity(array: &Arc<Raid5>) -> u64 {
    let mut background = BackgroundWork::new(array).unwrap();
    array.sync(Some(SyncAction::Check)).unwrap();
    let mut now = Duration::ZERO;
    while {
        now += Duration::from_secs(1);
        background.step(now);
        background.is_busy()
    } {}
    assert_eq!(array.state().trouble, None);
    array.state().mismatch_sectors
}

/// All is there, and parity is right, as the core with a lock finds them.
fn is_right(disks: &[Named], last: u8) {
    let assembly = prepared(disks.to_vec(), None);
    let is_whole = assembly.failed().is_none();
    assert!(is_whole && assembly.incoming.is_none() && !assembly.dirty);
    let array = Raid5::start(assembly, &ArrayOptions::default()).unwrap();
    let mut background = BackgroundWork::new(&array).unwrap();
    let device: Arc<dyn BlockDevice> = array.clone();
    for sector in some(&*array) {
        let step = || {
            background.step(Duration::ZERO);
        };
        let expected = if sector == 0 { last } else { stamp(sector) };
        let found = run(&device, step, Op::Read, sector, 0);
        holds(&found, sector, expected);
    }
    drop(background);
    assert_eq!(wrong_parity(&array), 0);
}

#[test]
fn a_rebuild_that_was_begun_goes_on_and_is_done() {
    for consistency in ALL {
        for replaces in [false, true] {
            let disks = begun(consistency, replaces);
            let assembly = prepared(disks.clone(), None);
            let recovered = |assembly: &Assembly| {
                assembly
                    .incoming
                    .as_ref()
                    .map_or(0, |incoming| incoming.recovered_sectors)
            };
            let before = recovered(&assembly);
            assert!(before > 0, "it was begun");
            let (array, mut background) = start(assembly);
            // It is cut short.
            assert_eq!(
                (array.rebuilding(), array.failed().is_none()),
                (Some(2), replaces)
            );
            let begin = Instant::now();
            while array.rebuilt_sectors() <= Some(before) {
                background.work();
                assert!(
                    begin.elapsed() < Duration::from_secs(300),
                    "it never goes on"
                );
            }
            drop(background);
            array.close().unwrap();
            drop(array);
            let assembly = prepared(disks.clone(), None);
            assert!(recovered(&assembly) > before);
            let (array, mut background) = start(assembly);
            let device: Arc<dyn BlockDevice> = array.clone();
            let mut writes = 0;
            until(&mut background, |background| {
                // Somebody uses it meanwhile; at rest it is fast.
                if writes < 20 {
                    writes += 1;
                    run(&device, || background.work(), Op::Write, 0, writes);
                }
                array.rebuilding().is_none()
            });
            assert_eq!(array.failed(), None);
            for sector in some(&*array).skip(1) {
                let found = run(&device, || background.work(), Op::Read, sector, 0);
                holds(&found, sector, stamp(sector));
            }
            drop((background, device));
            array.close().unwrap();
            is_right(&disks, writes);
            // The device that had the place isn't needed.
            let others: Vec<Named> = disks
                .iter()
                .filter(|(name, _)| name != "2")
                .cloned()
                .collect();
            is_right(&others, writes);
        }
    }
}

#[test]
fn a_device_that_fails_while_it_is_rebuilt_is_left_out() {
    let mut disks = begun(Consistency::Ppl, false);
    let whole = disks.clone();
    let dead = Arc::new(AtomicBool::new(false));
    let fails = Arc::clone(&dead);
    disks[4].1 = Failing::over(
        &whole[4].1,
        Arc::new(move |r| r.op.is_write() && r.sector > 16 && fails.load(Ordering::Relaxed)),
    );
    let (array, mut background) = start(prepared(disks, None));
    dead.store(true, Ordering::Relaxed);
    until(&mut background, |_| array.rebuilding().is_none());
    assert_eq!(array.failed(), Some(2));
    let device: Arc<dyn BlockDevice> = array.clone();
    for sector in some(&*array) {
        let found = run(&device, || background.work(), Op::Read, sector, 0);
        holds(&found, sector, stamp(sector));
    }
    drop((background, device));
    array.close().unwrap();
    let assembly = prepared(whole, None);
    assert_eq!(assembly.failed(), Some(2));
    assert!(assembly.incoming.is_none(), "superblocks leave it out");
}

#[test]
fn parity_is_made_right_while_it_serves() {
    for consistency in ALL {
        let disks = disks(4);
        // Random contents, so that parity is wrong.
        for (n, (_, disk)) in disks.iter().enumerate() {
            for sector in (0..disk.capacity_sectors()).step_by(8) {
                run(
                    disk,
                    || {},
                    Op::Write,
                    sector,
                    (n as u64 * 7 + sector / 8) as u8,
                );
            }
        }
        let (array, mut background) = start(later(&disks, Some(&how(consistency, false))));
        assert_eq!(array.in_sync_sectors(), Some(8));
        let device: Arc<dyn BlockDevice> = array.clone();
        for sector in some(&*array) {
            run(
                &device,
                || background.work(),
                Op::Write,
                sector,
                stamp(sector),
            );
        }
        // Cut short; the next start goes on.
        drop((background, device));
        array.close().unwrap();
        drop(array);
        let (array, mut background) = start(later(&disks, None));
        assert!(array.in_sync_sectors().is_some());
        until(&mut background, |_| array.in_sync_sectors().is_none());
        drop(background);
        array.close().unwrap();
        is_right(&disks, 0);
    }
}

/// A member fails while parity isn't right yet. After an end in order the array starts without it, and without force.
#[test]
fn a_member_that_fails_during_a_resync_is_missed() {
    let disks = disks(4);
    let dead = Arc::new(AtomicBool::new(false));
    let fails = Arc::clone(&dead);
    let mut failing = disks.clone();
    failing[1].1 = Failing::over(
        &disks[1].1,
        Arc::new(move |r| r.op.is_write() && r.sector > 16 && fails.load(Ordering::Relaxed)),
    );
    let (array, mut background) = start(later(&failing, Some(&how(Consistency::Resync, false))));
    assert_eq!(array.in_sync_sectors(), Some(8));
    let device: Arc<dyn BlockDevice> = array.clone();
    dead.store(true, Ordering::Relaxed);
    for sector in some(&*array) {
        run(
            &device,
            || background.work(),
            Op::Write,
            sector,
            stamp(sector),
        );
    }
    assert_eq!((array.failed(), array.in_sync_sectors()), (Some(1), None));
    drop((background, device));
    array.close().unwrap();
    let (array, mut background) = start(later(&disks, None));
    assert_eq!(array.failed(), Some(1));
    let device: Arc<dyn BlockDevice> = array.clone();
    for sector in some(&*array) {
        let found = run(&device, || background.work(), Op::Read, sector, 0);
        holds(&found, sector, stamp(sector));
    }
}

/// Data that the array's pages hold is read from the members all the same.
#[test]
fn wrong_parity_is_counted_and_repaired() {
    for consistency in ALL {
        let disks = disks(4);
        let (array, mut background) = start(later(&disks, Some(&how(consistency, true))));
        let device: Arc<dyn BlockDevice> = array.clone();
        for sector in some(&*array) {
            run(
                &device,
                || background.work(),
                Op::Write,
                sector,
                stamp(sector),
            );
        }
        let mut check = |action| {
            array.sync(action).unwrap();
            until(&mut background, |_| array.synced().is_some());
            let synced = array.synced().unwrap();
            assert!(synced.is_whole && synced.action == action, "{synced:?}");
            synced.mismatch_sectors
        };
        assert_eq!(check(SyncAction::Check), 0);
        // The last write's block, and one that nobody wrote.
        let last = some(&*array).last().unwrap();
        let (_, member) = &disks[0];
        let data = prepared(disks.clone(), None).newest().data_offset_sectors;
        for sector in [0, array.geometry().slot(last).stripe * 8] {
            run(member, || {}, Op::Write, data + sector, 99);
        }
        assert_eq!(check(SyncAction::Check), 16);
        assert_eq!(check(SyncAction::Check), 16, "a check changes nothing");
        assert_eq!(check(SyncAction::Repair), 16);
        assert_eq!(check(SyncAction::Check), 0);
        drop(device);
        drop(background);
        array.close().unwrap();
    }
}

/// A stripe's parity is logged by the member that is replaced. That fails, so the stripe is written without parity; then its parity is rebuilt. The
/// log's entry from before must not make it wrong after a power cut.
#[test]
fn a_log_does_not_outlive_writes_without_parity() {
    for words in [false, true] {
        let disks = begun(Consistency::Ppl, true);
        let dead = Arc::new(AtomicBool::new(false));
        let fails = Arc::clone(&dead);
        let mut failing = disks.clone();
        failing[2].1 = Failing::over(
            &disks[2].1,
            Arc::new(move |r| r.op.is_write() && fails.load(Ordering::Relaxed)),
        );
        let assembly = prepared(failing, None);
        let geometry = assembly.geometry;
        let mut stripes = (0..geometry.stripes()).rev();
        let stripe = stripes.find(|stripe| geometry.stripe_parity(*stripe) == 2);
        // The entry's partial parity has the block that changes later.
        let block = |index| geometry.stripe_array_sector(stripe.unwrap(), index);
        // A block of the member.
        let other = stripes
            .find(|stripe| geometry.stripe_data(*stripe, 0) == 2)
            .unwrap();
        let its = geometry.stripe_array_sector(other, 0);
        if words {
            let (array, mut background) = start(assembly);
            let device: Arc<dyn BlockDevice> = array.clone();
            run(&device, || background.work(), Op::Write, block(0), 1);
            dead.store(true, Ordering::Relaxed);
            run(&device, || background.work(), Op::Write, its, 3);
            run(&device, || background.work(), Op::Write, block(1), 2);
            assert_eq!((array.failed(), array.rebuilding()), (Some(2), Some(2)));
            until(&mut background, |_| array.rebuilding().is_none());
            assert_eq!(array.failed(), None);
        } else {
            let array = Raid5::start(assembly, &ArrayOptions::default()).unwrap();
            let mut background = BackgroundWork::new(&array).unwrap();
            array.set_speed(1, 1).unwrap();
            let device: Arc<dyn BlockDevice> = array.clone();
            let mut now = Duration::ZERO;
            let mut step = |seconds: u64| {
                now += Duration::from_secs(seconds);
                background.step(now);
            };
            run(&device, || step(0), Op::Write, block(0), 1);
            dead.store(true, Ordering::Relaxed);
            run(&device, || step(0), Op::Write, its, 3);
            run(&device, || step(0), Op::Write, block(1), 2);
            assert_eq!((array.failed(), array.rebuilding()), (Some(2), Some(2)));
            array.set_speed(1_000_000, 1_000_000).unwrap();
            while array.rebuilding().is_some() {
                step(1);
            }
            assert_eq!(array.failed(), None);
        }
        // Power is cut: nobody ends in order.
        let assembly = prepared(disks, None);
        let array = Raid5::start(assembly, &ArrayOptions::default()).unwrap();
        assert_eq!(wrong_parity(&array), 0, "words: {words}");
    }
}

/// Nobody uses the array, and the thread sleeps between stripes.
#[test]
fn the_arrays_own_thread_rebuilds() {
    let disks = begun(Consistency::Resync, false);
    let (array, background) = start(prepared(disks.clone(), None));
    drop(background);
    array.keep().unwrap();
    let begin = Instant::now();
    while array.rebuilding().is_some() {
        std::thread::sleep(Duration::from_millis(5));
        assert!(begin.elapsed() < Duration::from_secs(300), "it never is");
    }
    array.close().unwrap();
    is_right(&disks, 0);
}
