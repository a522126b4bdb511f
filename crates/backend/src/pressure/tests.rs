use super::*;
use crate::BufferPool;
use pvblk_block::{
    BlockDevice, Buffer, Capabilities, DeviceQueue, Error, EventHub, Limits, ManualClock,
    QueueContext, Reclaim,
};
use std::path::{Path, PathBuf};

struct Rig {
    clock: Arc<ManualClock>,
    pressure: Arc<Pressure>,
}

impl Rig {
    fn new(floor: usize) -> Rig {
        let clock = Arc::new(ManualClock::default());
        let pressure = Arc::new(Pressure::with_clock(floor, clock.clone()));
        Rig { clock, pressure }
    }

    fn pool(&self, disk: &str) -> BufferPool {
        BufferPool::new(&self.pressure, disk, "pressure test", None, 4096)
    }
}

/// Takes this many pages and writes to each.
fn take(pool: &mut BufferPool, pages: usize) -> Vec<Buffer> {
    let mut out = Vec::new();
    (0..pages).for_each(|_| assert!(pool.take(4096, &mut out)));
    out.iter().for_each(|b| b.write(0, b"data"));
    out
}

#[test]
fn a_squeeze_takes_what_is_free_of_all_pools_and_nothing_else() {
    let rig = Rig::new(0);
    let (mut a, mut b) = (rig.pool("a"), rig.pool("b"));
    let mut in_use = take(&mut a, 10);
    let mut idle = take(&mut a, 300);
    a.give(&mut idle);
    let mut idle = take(&mut b, 50);
    b.give(&mut idle);
    assert_eq!(rig.pressure.free_bytes(), 350 * 4096);
    let squeezed = rig.pressure.squeeze();
    assert_eq!((squeezed.bytes, squeezed.merged), (350 * 4096, false));
    assert_eq!((a.free_pages(), a.used_pages(), b.free_pages()), (0, 10, 0));
    assert!(in_use.iter().all(|b| b.to_vec()[..4] == *b"data"));
    // While it lasts, memory that comes back goes to the system.
    assert!(rig.pressure.is_on());
    a.give(&mut in_use);
    a.settle();
    assert_eq!(a.free_pages(), 0);
    rig.clock.advance(SQUEEZE_DURATION);
    assert!(!rig.pressure.is_on());
    let mut again = take(&mut a, 10);
    a.give(&mut again);
    a.settle();
    assert_eq!(a.free_pages(), 10);
    let report = rig.pressure.report();
    assert_eq!((report.squeezes, report.squeezed), (1, SQUEEZE_DURATION));
    let of = |disk: &str| report.disks[disk].pools;
    assert_eq!((of("a").squeezes, of("a").squeezed_pages), (1, 310));
    assert_eq!((of("b").squeezes, of("b").squeezed_pages), (1, 50));
    assert_eq!((of("a").peak_pages, of("a").allocated_pages), (310, 320));
    assert_eq!(report.total.squeezed_pages, 360);
}

#[test]
fn the_floor_is_shared_and_comes_back() {
    let rig = Rig::new(64);
    let (mut a, mut b) = (rig.pool("a"), rig.pool("b"));
    rig.pressure.squeeze();
    for pool in [&mut a, &mut b] {
        let mut pages = take(pool, 50);
        pool.give(&mut pages);
        pool.settle();
    }
    assert_eq!((a.free_pages(), b.free_pages()), (50, 14));
    drop(a);
    let mut pages = take(&mut b, 50);
    b.give(&mut pages);
    b.settle();
    assert_eq!(b.free_pages(), 50);
    rig.clock.advance(Duration::from_secs(1));
    b.rest();
    assert_eq!(rig.pressure.reserve_floor(100), 64);
}

#[test]
fn signals_are_merged_and_prolong() {
    let rig = Rig::new(0);
    let mut pool = rig.pool("a");
    let mut pages = take(&mut pool, 5);
    assert!(!rig.pressure.squeeze().merged);
    pool.give(&mut pages);
    assert!(rig.pressure.squeeze().merged);
    assert_eq!(pool.free_pages(), 5);
    rig.clock.advance(Duration::from_millis(6));
    assert_eq!(rig.pressure.squeeze().bytes, 5 * 4096);
    rig.clock.advance(Duration::from_millis(6));
    assert!(rig.pressure.is_on());
    rig.clock.advance(Duration::from_millis(4));
    assert!(!rig.pressure.is_on());
    let report = rig.pressure.report();
    assert_eq!((report.squeezes, report.merged), (2, 1));
    assert_eq!(report.squeezed, Duration::from_millis(16));
}

#[test]
fn the_limit_changes_while_running() {
    let rig = Rig::new(0);
    let mut pool = rig.pool("a");
    let mut pages = take(&mut pool, 2000);
    pool.give(&mut pages);
    assert_eq!(pool.free_pages(), 2000);
    pool.rest();
    assert_eq!(pool.free_pages(), MAX_BUFFER_PAGES);
    rig.pressure.set_max_buffer_pages(100);
    assert_eq!(pool.free_pages(), 100);
    // With a limit of 0 pools behave as under constant pressure.
    rig.pressure.set_max_buffer_pages(0);
    let mut pages = take(&mut pool, 7);
    pool.give(&mut pages);
    pool.settle();
    let counters = pool.counters();
    assert_eq!((pool.free_pages(), counters.allocated_pages), (0, 2007));
    assert_eq!(counters.allocated_pages, counters.taken_pages);
}

#[test]
fn devices_give_way_too_while_they_are_there() {
    let rig = Rig::new(0);
    let device: Arc<dyn BlockDevice> = Arc::new(Roomy(EventHub::default(), true));
    rig.pressure.add_device(&device);
    let other: Arc<dyn BlockDevice> = Arc::new(Roomy(EventHub::default(), false));
    rig.pressure.add_device(&other);
    assert_eq!(rig.pressure.devices().len(), 1);
    assert_eq!(rig.pressure.free_bytes(), 2000);
    assert_eq!(rig.pressure.squeeze().bytes, 1000);
    assert_eq!(rig.pressure.report().device_bytes, 1000);
    drop(device);
    rig.clock.advance(SQUEEZE_DURATION);
    assert_eq!(
        (rig.pressure.squeeze().bytes, rig.pressure.free_bytes()),
        (0, 0)
    );
}

/// A device that has memory to give back, or not.
struct Roomy(EventHub, bool);

impl BlockDevice for Roomy {
    fn describe(&self) -> String {
        "roomy".into()
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn capacity_sectors(&self) -> u64 {
        8
    }

    fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Err(Error::config("nobody reads or writes here"))
    }

    fn events(&self) -> &EventHub {
        &self.0
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            memory: self.1.then_some(self as &dyn Reclaim),
            ..Capabilities::none()
        }
    }
}

impl Reclaim for Roomy {
    fn give_way(&self) -> u64 {
        1000
    }

    fn spare_bytes(&self) -> u64 {
        2000
    }
}

#[test]
fn a_pool_that_goes_away_leaves_its_counts_and_no_memory() {
    let rig = Rig::new(64);
    let mut pool = rig.pool("a");
    let mut pages = take(&mut pool, 5);
    pool.give(&mut pages);
    drop(pool);
    let report = rig.pressure.report();
    let pools = report.disks["a"].pools;
    assert_eq!(
        (pools.taken_pages, pools.free_pages, pools.returned_pages),
        (5, 0, 5)
    );
    assert_eq!(rig.pressure.free_bytes(), 0);
    // Without the disk, too: sums of the process don't go back.
    rig.pressure.forget("a");
    let report = rig.pressure.report();
    assert!(report.disks.is_empty());
    let total = report.total;
    assert_eq!(
        (total.taken_pages, total.free_pages, total.returned_pages),
        (5, 0, 5)
    );
}

/// A folder with the files of a control group, removed at the end.
pub(super) struct TestGroup(PathBuf);

impl TestGroup {
    /// A group with these files. Each test has a name of its own.
    pub fn new(test: &str, files: &[(&str, &str)]) -> TestGroup {
        let path = std::env::temp_dir().join(format!("pvblk-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let group = TestGroup(path);
        files
            .iter()
            .for_each(|(name, text)| group.write(name, text));
        group
    }

    /// A v2 group that uses nothing and has no limit.
    pub fn v2(test: &str) -> TestGroup {
        let files = [
            ("memory.current", "0\n"),
            ("memory.high", "max\n"),
            ("memory.max", "max\n"),
            ("memory.stat", "anon 1\nactive_file 0\ninactive_file 0\n"),
        ];
        TestGroup::new(test, &files)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.join(name), text).unwrap();
    }
}

impl Drop for TestGroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
