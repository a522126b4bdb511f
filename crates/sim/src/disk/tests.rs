use super::*;
use crate::bugs::Bug;
use crate::stamp;
use pvblk_block::Queue;

fn disk(bug: Option<Bug>) -> Arc<CrashDisk> {
    Arc::new(CrashDisk::new(DiskSetup {
        sectors: 64,
        stamped: true,
        sabotage: Sabotage::new(bug),
        ..DiskSetup::default()
    }))
}

fn open(disk: &Arc<CrashDisk>) -> Queue {
    let device: Arc<dyn BlockDevice> = disk.clone();
    Queue::open(&device, &QueueContext::new(8)).unwrap()
}

/// Submits a write of whole stamps.
fn write(queue: &mut Queue, id: u64, sector: u64, sectors: u64) -> Buffer {
    let buffer = Buffer::anonymous(sectors as usize * SECTOR_BYTES).unwrap();
    for n in 0..sectors {
        let bytes = stamp::make(id, sector + n, false);
        buffer.write(n as usize * SECTOR_BYTES, &bytes);
    }
    let request = Request::with_buffers(Op::Write, sector, vec![buffer.clone()], id);
    queue.submit(&mut vec![request]);
    buffer
}

fn finish(disk: &CrashDisk, queue: &mut Queue, rng: &mut Rng) {
    while disk.busy() > 0 {
        disk.step(rng);
    }
    queue.poll(&mut Vec::new());
}

fn name(disk: &CrashDisk, sector: u64) -> u64 {
    stamp::name(&disk.current(sector), sector)
}

#[test]
fn a_write_in_flight_is_torn_between_sectors_and_the_kernel_may_go_on_with_it() {
    let (mut torn, mut goes_on, mut gone) = (0, 0, 0);
    for seed in 0..100 {
        let mut rng = Rng::with_seed(seed);
        let disk = disk(None);
        let mut queue = open(&disk);
        write(&mut queue, 1, 8, 8);
        disk.crash(Crash::Process, &mut rng);
        let done = |d: &CrashDisk| (8..16).filter(|&s| name(d, s) == 1).count();
        torn += usize::from(!disk.is_locked() && (1..8).contains(&done(&disk)));
        gone += usize::from(!disk.is_locked() && done(&disk) == 0);
        if disk.is_locked() {
            goes_on += 1;
            let left = disk.late();
            assert_eq!(done(&disk) + left, 8);
            (0..left).for_each(|_| assert!(disk.step(&mut rng)));
            assert!(!disk.is_locked() && done(&disk) == 8);
        }
        assert!(disk.take_trouble().is_none());
    }
    assert!(torn > 0 && goes_on > 0 && gone > 0);
}

#[test]
fn without_power_nothing_goes_on_and_what_was_not_flushed_may_be_lost() {
    let mut kept = [0; 2];
    for seed in 0..50 {
        let mut rng = Rng::with_seed(seed);
        let disk = disk(None);
        let mut queue = open(&disk);
        write(&mut queue, 1, 0, 1);
        finish(&disk, &mut queue, &mut rng);
        queue.submit(&mut vec![Request::new(Op::Flush, 0, 0, 2)]);
        finish(&disk, &mut queue, &mut rng);
        write(&mut queue, 3, 0, 1);
        finish(&disk, &mut queue, &mut rng);
        write(&mut queue, 4, 32, 8);
        disk.crash(Crash::Power(Survives::AnyVersions), &mut rng);
        assert!(!disk.is_locked() && disk.late() == 0);
        kept[usize::from(name(&disk, 0) == 3)] += 1;
        assert!([1, 3].contains(&name(&disk, 0)));
    }
    assert!(kept[0] > 0 && kept[1] > 0);
}

#[test]
fn a_promise_is_kept_before_the_next_write_of_its_sector() {
    let mut rng = Rng::with_seed(1);
    let disk = disk(Some(Bug::FlushSkipsWriting));
    let mut queue = open(&disk);
    for id in 1..4 {
        write(&mut queue, id, 5, 1);
        finish(&disk, &mut queue, &mut rng);
        assert_eq!((name(&disk, 5), disk.late()), (id - 1, 1));
    }
    disk.crash(Crash::Power(Survives::Everything), &mut rng);
    assert_eq!((name(&disk, 5), disk.late()), (2, 0));
}

#[test]
fn it_sees_what_its_users_may_not_do() {
    let mut rng = Rng::with_seed(1);
    let disk = disk(None);
    let mut queue = open(&disk);
    let buffer = write(&mut queue, 1, 0, 2);
    buffer.write(0, &[7]);
    finish(&disk, &mut queue, &mut rng);
    assert!(disk.take_trouble().unwrap().contains("changed"));
    write(&mut queue, 2, 0, 2);
    write(&mut queue, 3, 1, 2);
    assert!(disk.take_trouble().unwrap().contains("is submitted while"));
    finish(&disk, &mut queue, &mut rng);
    let misplaced = Buffer::anonymous(SECTOR_BYTES).unwrap();
    misplaced.write(0, &stamp::make(4, 9, false));
    let request = Request::with_buffers(Op::Write, 3, vec![misplaced], 4);
    queue.submit(&mut vec![request]);
    finish(&disk, &mut queue, &mut rng);
    let why = disk.take_trouble().unwrap();
    assert!(why.contains("what write 4 put on sector 9"), "{why}");
}
