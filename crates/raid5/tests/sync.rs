//! Rebuilds and resyncs of an array: begun earlier or by a crash, cut short, and done.

#[path = "support/failing.rs"]
mod failing;
#[path = "support/started.rs"]
mod started;

use failing::Failing;
use pvblk_block::{BlockDevice, Buffer, Close, Op, Queue, QueueContext, Request, Status};
use pvblk_raid5::{
    ArrayOptions, AssembleOptions, Assembly, BackgroundWork, Consistency, CreateOptions, Raid5,
    ReAdded, SyncAction, sleepy,
};
use started::{prepared, prepared_with};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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

/// An array whose time stands still but for [`Served::until`].
struct Served {
    array: Arc<Raid5>,
    device: Arc<dyn BlockDevice>,
    background: BackgroundWork,
    now: Duration,
}

impl Served {
    fn start(assembly: Assembly) -> Served {
        let array = Raid5::start(assembly, &ArrayOptions::default()).unwrap();
        Served {
            background: BackgroundWork::new(&array),
            device: array.clone(),
            array,
            now: Duration::ZERO,
        }
    }

    fn run(&mut self, op: Op, sector: u64, byte: u8) -> Vec<u8> {
        let step = || self.background.work(self.now);
        run(&self.device, step, op, sector, byte)
    }

    fn fill(&mut self) {
        fill(&self.device, || self.background.work(self.now));
    }

    fn holds(&mut self, first: u8) {
        holds(&self.device, || self.background.work(self.now), first);
    }

    fn tick(&mut self) {
        self.now += Duration::from_millis(1);
        self.background.work(self.now);
    }

    fn until(&mut self, is: impl Fn(&Raid5) -> bool) {
        for _ in 0..1_000_000 {
            if is(&self.array) {
                return;
            }
            self.tick();
        }
        panic!("it never is");
    }

    fn close(self) {
        drop((self.background, self.device));
        self.array.close().unwrap();
    }
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

/// Blocks all over the array.
fn some(array: &dyn BlockDevice) -> impl Iterator<Item = u64> + use<> {
    (0..array.capacity_sectors()).step_by(8 * 37)
}

/// Writes a stamp to each of these blocks.
fn fill(array: &Arc<dyn BlockDevice>, mut step: impl FnMut()) {
    for sector in some(&**array) {
        run(array, &mut step, Op::Write, sector, stamp(sector));
    }
}

/// The blocks hold their stamps, and the first one a byte.
fn holds(array: &Arc<dyn BlockDevice>, mut step: impl FnMut(), first: u8) {
    for sector in some(&**array) {
        let byte = if sector == 0 { first } else { stamp(sector) };
        let block = run(array, &mut step, Op::Read, sector, 0);
        let is_it = block.iter().all(|found| *found == byte);
        assert!(is_it, "sector {sector} has {} and not {byte}", block[0]);
    }
}

/// A disk that fails writes from a sector on, as soon as it is told to.
fn mortal(disk: &mut Named, first: u64) -> Arc<AtomicBool> {
    let dead = Arc::new(AtomicBool::new(false));
    let fails = Arc::clone(&dead);
    let rule =
        move |r: &Request| r.op.is_write() && r.sector >= first && fails.load(Ordering::Relaxed);
    disk.1 = Failing::over(&disk.1, Arc::new(rule));
    dead
}

/// The first sector behind a superblock.
const DATA: u64 = 17;

/// Fails a member of an array, and begins to make another device the member; `replaces`: of a member that works.
fn begun(consistency: Consistency, replaces: bool) -> Vec<Named> {
    let mut disks = disks(4);
    let assembly = prepared(disks.clone(), Some(&how(consistency, true)));
    let array = Raid5::start(assembly, &ArrayOptions::default()).unwrap();
    let mut background = BackgroundWork::new(&array);
    array.set_speed(1, 1).unwrap();
    let device: Arc<dyn BlockDevice> = array.clone();
    let step = || {
        background.work(Duration::ZERO);
    };
    fill(&device, step);
    let spare = disk("spare");
    array.add(&spare.0, &spare.1, false, &mut sleepy()).unwrap();
    disks.push(spare);
    match replaces {
        true => array.replace(2).unwrap(),
        false => array.fail(2).unwrap(),
    }
    for second in 0..100 {
        background.work(Duration::from_secs(second));
    }
    assert_eq!(array.rebuilding(), Some(2));
    drop(background);
    array.stop(&mut sleepy()).unwrap();
    disks
}

/// Sectors of members whose parity is wrong.
fn wrong_parity(array: &Arc<Raid5>) -> u64 {
    let mut background = BackgroundWork::new(array);
    array.sync(Some(SyncAction::Check)).unwrap();
    let mut now = Duration::ZERO;
    while {
        now += Duration::from_secs(1);
        background.work(now);
        background.is_busy()
    } {}
    assert_eq!(array.state().trouble, None);
    array.state().mismatch_sectors
}

/// All is there, and parity is right.
fn is_right(disks: &[Named], last: u8) {
    let assembly = prepared(disks.to_vec(), None);
    let is_whole = assembly.failed().is_none();
    assert!(is_whole && assembly.incoming.is_none() && !assembly.dirty);
    let array = Raid5::start(assembly, &ArrayOptions::default()).unwrap();
    let mut background = BackgroundWork::new(&array);
    let device: Arc<dyn BlockDevice> = array.clone();
    let step = || {
        background.work(Duration::ZERO);
    };
    holds(&device, step, last);
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
            let mut served = Served::start(assembly);
            // It is cut short.
            assert_eq!(
                (served.array.rebuilding(), served.array.failed().is_none()),
                (Some(2), replaces)
            );
            served.until(|array| array.rebuilt_sectors() > Some(before));
            served.close();
            let assembly = prepared(disks.clone(), None);
            assert!(recovered(&assembly) > before);
            let mut served = Served::start(assembly);
            // Somebody uses it meanwhile; at rest it is fast.
            for byte in 1..=20 {
                served.run(Op::Write, 0, byte);
                served.tick();
            }
            assert_eq!(served.array.rebuilding(), Some(2));
            served.until(|array| array.rebuilding().is_none());
            assert_eq!(served.array.failed(), None);
            served.holds(20);
            served.close();
            is_right(&disks, 20);
            // The device that had the place isn't needed.
            let others: Vec<Named> = disks
                .iter()
                .filter(|(name, _)| name != "2")
                .cloned()
                .collect();
            is_right(&others, 20);
        }
    }
}

#[test]
fn a_device_that_fails_while_it_is_rebuilt_is_left_out() {
    let mut disks = begun(Consistency::Ppl, false);
    let whole = disks.clone();
    let dead = mortal(&mut disks[4], DATA);
    let mut served = Served::start(prepared(disks, None));
    dead.store(true, Ordering::Relaxed);
    served.until(|array| array.rebuilding().is_none());
    assert_eq!(served.array.failed(), Some(2));
    served.holds(0);
    served.close();
    let assembly = prepared(whole, None);
    assert_eq!(assembly.failed(), Some(2));
    assert!(assembly.incoming.is_none(), "superblocks leave it out");
}

/// Fills disks, so that parity is wrong.
fn spoil(disks: &[Named]) {
    for (n, (_, disk)) in disks.iter().enumerate() {
        for sector in (0..disk.capacity_sectors()).step_by(8) {
            let byte = (n as u64 * 7 + sector / 8) as u8;
            run(disk, || {}, Op::Write, sector, byte);
        }
    }
}

/// A device that takes the place of another has its data, and parity that is as wrong as it was.
#[test]
fn a_resync_goes_on_after_a_replacement() {
    for consistency in [Consistency::Ppl, Consistency::Resync, Consistency::Bitmap] {
        let mut disks = disks(4);
        spoil(&disks);
        let mut how = how(consistency, false);
        how.bitmap_chunk_bytes = (consistency == Consistency::Bitmap).then_some(64 << 10);
        let mut served = Served::start(later(&disks, Some(&how)));
        disks.push(disk("4"));
        let (name, device) = disks.last().unwrap();
        let added = served.array.add(name, device, false, &mut sleepy());
        added.unwrap();
        served.array.replace(1).unwrap();
        served.until(|array| array.rebuilding() == Some(1));
        served.close();
        // The device comes first.
        let mut served = Served::start(later(&disks, None));
        assert!(served.array.in_sync_sectors().is_some());
        served.until(|array| array.rebuilding().is_none());
        assert!(served.array.in_sync_sectors().is_some(), "too fast");
        served.close();
        disks.remove(1);
        let mut served = Served::start(later(&disks, None));
        assert!(served.array.in_sync_sectors().is_some(), "{consistency:?}");
        served.until(|array| array.in_sync_sectors().is_none());
        assert_eq!(served.array.failed(), None);
        served.fill();
        served.close();
        is_right(&disks, 0);
    }
}

#[test]
fn parity_is_made_right_while_it_serves() {
    for consistency in ALL {
        let disks = disks(4);
        spoil(&disks);
        let mut served = Served::start(later(&disks, Some(&how(consistency, false))));
        assert_eq!(served.array.in_sync_sectors(), Some(8));
        served.fill();
        // Cut short; the next start goes on.
        served.close();
        let mut served = Served::start(later(&disks, None));
        assert!(served.array.in_sync_sectors().is_some());
        served.until(|array| array.in_sync_sectors().is_none());
        served.close();
        is_right(&disks, 0);
    }
}

/// A member fails while parity isn't right yet. After an end in order the array starts without it, and without force.
#[test]
fn a_member_that_fails_during_a_resync_is_missed() {
    let disks = disks(4);
    let mut failing = disks.clone();
    let dead = mortal(&mut failing[1], DATA);
    let assembly = later(&failing, Some(&how(Consistency::Resync, false)));
    let mut served = Served::start(assembly);
    assert_eq!(served.array.in_sync_sectors(), Some(8));
    dead.store(true, Ordering::Relaxed);
    served.fill();
    let array = &served.array;
    assert_eq!((array.failed(), array.in_sync_sectors()), (Some(1), None));
    served.close();
    let mut served = Served::start(later(&disks, None));
    assert_eq!(served.array.failed(), Some(1));
    served.holds(0);
}

/// Data that the array's pages hold is read from the members all the same.
#[test]
fn wrong_parity_is_counted_and_repaired() {
    for consistency in ALL {
        let disks = disks(4);
        let mut served = Served::start(later(&disks, Some(&how(consistency, true))));
        served.fill();
        let array = Arc::clone(&served.array);
        let mut check = |action| {
            let before = array.state().syncs;
            array.sync(Some(action)).unwrap();
            served.until(|array| array.state().syncs > before && array.state().sync.is_none());
            let state = array.state();
            assert_eq!(state.trouble, None, "{action}");
            state.mismatch_sectors
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
        served.close();
    }
}

/// A stripe's parity is logged by the member that is replaced. That fails, so the stripe is written without parity; then its parity is rebuilt. The
/// log's entry from before must not make it wrong after a power cut.
#[test]
fn a_log_does_not_outlive_writes_without_parity() {
    let disks = begun(Consistency::Ppl, true);
    let mut failing = disks.clone();
    let dead = mortal(&mut failing[2], 0);
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
    let mut served = Served::start(assembly);
    served.run(Op::Write, block(0), 1);
    dead.store(true, Ordering::Relaxed);
    served.run(Op::Write, its, 3);
    served.run(Op::Write, block(1), 2);
    let array = &served.array;
    assert_eq!((array.failed(), array.rebuilding()), (Some(2), Some(2)));
    served.until(|array| array.rebuilding().is_none());
    assert_eq!(served.array.failed(), None);
    // Power is cut: nobody ends in order.
    let assembly = prepared(disks, None);
    let array = Raid5::start(assembly, &ArrayOptions::default()).unwrap();
    assert_eq!(wrong_parity(&array), 0);
}

/// Nobody uses the array, and the thread sleeps between stripes.
#[test]
fn the_arrays_own_thread_rebuilds() {
    let disks = begun(Consistency::Resync, false);
    let assembly = prepared(disks.clone(), None);
    let array = Raid5::start(assembly, &ArrayOptions::default()).unwrap();
    array.keep().unwrap();
    let begin = Instant::now();
    while array.rebuilding().is_some() {
        std::thread::sleep(Duration::from_millis(5));
        assert!(begin.elapsed() < Duration::from_secs(300), "it never is");
    }
    array.close().unwrap();
    is_right(&disks, 0);
}

/// From its choice on a spare can't be taken away: it is written.
#[test]
fn a_spare_that_becomes_a_member_stays() {
    let disks = disks(4);
    let mut served = Served::start(later(&disks, Some(&how(Consistency::Ppl, true))));
    let spare = disk("spare");
    let array = Arc::clone(&served.array);
    array.add(&spare.0, &spare.1, false, &mut sleepy()).unwrap();
    array.freeze(true);
    array.fail(1).unwrap();
    served.until(|array| array.failed() == Some(1));
    served.tick();
    array.freeze(false);
    served.tick();
    let said = array.remove("spare").unwrap_err().to_string();
    assert!(said.contains("becomes a member"), "{said}");
    served.until(|array| array.failed().is_none());
    let said = array.remove("spare").unwrap_err().to_string();
    assert!(said.contains("no spare"), "{said}");
    served.close();
}

/// A member fails its superblock. Then another one fails once, so all are written again: the first one's failure isn't forgotten.
#[test]
fn a_member_that_failed_its_superblock_is_left_out_though_all_are_written_again() {
    let disks = disks(4);
    drop(prepared(
        disks.clone(),
        Some(&how(Consistency::Resync, true)),
    ));
    let mut failing = disks.clone();
    let serves = Arc::new(AtomicBool::new(false));
    for (at, most) in [(1, usize::MAX), (2, 1)] {
        let (left, serves) = (AtomicUsize::new(most), Arc::clone(&serves));
        let rule = move |r: &Request| {
            let is_superblock =
                r.op == Op::Write && r.sector < DATA && serves.load(Ordering::Relaxed);
            let less = |left: usize| left.checked_sub(1);
            is_superblock
                && left
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
                    .is_ok()
        };
        failing[at].1 = Failing::over(&failing[at].1, Arc::new(rule));
    }
    let mut served = Served::start(later(&failing, None));
    serves.store(true, Ordering::Relaxed);
    served.fill();
    assert_eq!(served.array.failed(), Some(1));
    served.holds(0);
    served.close();
    let assembly = prepared(disks, None);
    assert_eq!(assembly.failed(), Some(1));
}

/// Members are replaced one after the other, more often than there are slots; some by two orders at once.
#[test]
fn orders_are_followed_one_after_the_other() {
    let disks = disks(4);
    let mut served = Served::start(later(&disks, Some(&how(Consistency::Resync, true))));
    served.fill();
    let array = Arc::clone(&served.array);
    array.set_speed(1 << 30, 1 << 30).unwrap();
    for round in 0..70 {
        let spare = disk(&format!("spare {round}"));
        array.add(&spare.0, &spare.1, false, &mut sleepy()).unwrap();
        let place = round % 4;
        match round % 3 {
            0 => array.replace(place).unwrap(),
            1 => array.fail(place).unwrap(),
            // The spare takes the place that is empty.
            _ => {
                array.replace((place + 1) % 4).unwrap();
                array.fail(place).unwrap();
            }
        }
        let name = spare.0;
        served.until(|array| array.places()[place].as_ref() == Some(&name));
        assert!(!array.state().broken && array.failed().is_none());
    }
    served.holds(0);
    served.close();
}

/// As many members as there are slots: a device that comes has the place of one that failed, and no member can be replaced.
#[test]
fn the_largest_array_is_rebuilt_and_goes_on_after_a_restart() {
    let mut disks = disks(64);
    let assembly = prepared(disks.clone(), Some(&how(Consistency::Resync, true)));
    let mut served = Served::start(assembly);
    served.array.set_speed(1, 1).unwrap();
    served.fill();
    let spare = disk("spare");
    let array = &served.array;
    array.add(&spare.0, &spare.1, false, &mut sleepy()).unwrap();
    let why = array.replace(63).unwrap_err().to_string();
    assert!(why.contains("no room for one device more"), "{why}");
    array.fail(63).unwrap();
    served.until(|array| array.rebuilding() == Some(63));
    served.until(|array| array.rebuilt_sectors().is_some_and(|sectors| sectors > 0));
    served.close();
    disks[63] = spare;
    let mut served = Served::start(prepared(disks.clone(), None));
    assert_eq!(served.array.rebuilding(), Some(63));
    served.until(|array| array.rebuilding().is_none());
    served.holds(0);
    served.close();
    is_right(&disks, 0);
}

/// The background's next sweep was due long ago when the member fails: that one doesn't begin.
#[test]
fn a_member_that_fails_after_a_rest_is_written_only_what_it_missed() {
    let mut disks = disks(3);
    let dead = mortal(&mut disks[1], 0);
    let assembly = prepared(disks.clone(), Some(&how(Consistency::Ppl, true)));
    let geometry = assembly.geometry;
    let mut served = Served::start(assembly);
    served.now += Duration::from_secs(60);
    dead.store(true, Ordering::Relaxed);
    // One of these is on the member.
    for sector in 0..geometry.row_sectors() / 8 {
        served.run(Op::Write, sector * 8, 1);
    }
    assert_eq!(served.array.failed(), Some(1));
    dead.store(false, Ordering::Relaxed);
    let (name, device) = &disks[1];
    let again = served.array.re_add(name, device, &mut sleepy());
    assert_eq!(again.unwrap(), ReAdded::ByBitmap);
    served.until(|array| array.failed().is_none());
    assert!(served.array.state().recovered.unwrap().by_bitmap);
    assert_eq!(served.run(Op::Read, 0, 0), [1; BLOCK]);
    served.close();
    assert_eq!(
        wrong_parity(&Raid5::start(prepared(disks, None), &ArrayOptions::default()).unwrap()),
        0
    );
}
