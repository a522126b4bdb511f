//! Effects of the policies, on a clock that only moves when all wait, and the writes that an array below sees.

#[allow(dead_code)] // The experiment's table has more of them.
#[path = "../../lab/src/page_order/policy.rs"]
mod past;

use pvblk_block::{
    BlockDevice, Buffer, Clock, Completion, ManualClock, Op, Queue, QueueContext, Readiness,
    Request, Status,
};
use pvblk_cache::{BackgroundWork, CacheConfig, Counters, Due, Mode, PageCache, Policy, Standard};
use pvblk_raid5::{ArrayOptions, Assembly, Consistency, Layout, Member, NewArray, Raid5};
use pvblk_volume::{DelayVolume, VolumeSpec};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A process that reads: where, how much at once, and how often.
struct Reader {
    queue: Queue,
    request: Option<Box<Request>>,
    next: u64,
    end: u64,
    sectors: u64,
    random: Option<fastrand::Rng>,
    begin: u64,
    left: u64,
    done: Vec<Completion>,
}

impl Reader {
    fn new(device: &Arc<dyn BlockDevice>, index: u32, begin: u64, sectors: u64) -> Reader {
        let mut context = QueueContext::new(1);
        context.index = index;
        let buffer = Buffer::anonymous(4096).unwrap();
        Reader {
            queue: Queue::open(device, &context).unwrap(),
            request: Some(Request::with_buffers(Op::Read, begin, vec![buffer], 0)),
            next: begin,
            end: begin + sectors,
            sectors: 8,
            random: None,
            begin,
            left: sectors / 8,
            done: Vec::new(),
        }
    }

    /// One step; false if it waits, and until when.
    fn step(&mut self) -> Result<(), Option<Instant>> {
        if let Some(mut request) = self.request.take() {
            if self.left == 0 {
                self.request = Some(request);
                return Err(None);
            }
            self.left -= 1;
            let at = match &mut self.random {
                Some(rng) => self.begin + rng.u64(..(self.end - self.begin) / 8) * 8,
                None => self.next,
            };
            self.next = at + self.sectors;
            request.reset(
                Op::Read,
                pvblk_block::RequestFlags::empty(),
                at,
                self.sectors,
                0,
            );
            self.queue.submit(&mut vec![request]);
            return Ok(());
        }
        if self.queue.poll(&mut self.done) > 0 {
            let done = self.done.pop().unwrap();
            assert_eq!(done.status, Status::Ok);
            self.request = Some(done.request);
            return Ok(());
        }
        match self.queue.arm() {
            Readiness::Ready => Ok(()),
            Readiness::Wait(until) => Err(until),
        }
    }
}

/// Steps all readers and the background, until all have read what they are to.
fn drive<P: Policy>(
    clock: &ManualClock,
    cache: &PageCache<P>,
    readers: &mut [Reader],
    mut background: Option<&mut BackgroundWork<P>>,
) {
    let mut turns = 0;
    while readers.iter().any(|r| r.left > 0 || r.request.is_none()) {
        turns += 1;
        if turns > 200_000 {
            let left: Vec<_> = readers.iter().map(|r| r.left).collect();
            let background = background.map(|k| k.wants_reclaim());
            panic!(
                "no end: {left:?} to be read, {background:?} to be reclaimed, {}",
                cache.unfinished()
            );
        }
        let mut until: Option<Instant> = None;
        let mut moved = false;
        for reader in readers.iter_mut() {
            match reader.step() {
                Ok(()) => moved = true,
                Err(at) => until = until.into_iter().chain(at).min(),
            }
        }
        if let Some(background) = &mut background {
            for due in [background.step(), background.arm()] {
                match due {
                    Due::Now => moved = true,
                    Due::At(at) => until = until.into_iter().chain([at]).min(),
                    Due::Never => {}
                }
            }
        }
        if !moved {
            clock.advance_to(until.expect("somebody waits for ever"));
        }
    }
}

fn cached(config: &CacheConfig, below: &str, clock: &Arc<ManualClock>) -> Arc<PageCache> {
    cached_by(Standard, config, below, clock)
}

fn cached_by<P: Policy>(
    policy: P,
    config: &CacheConfig,
    below: &str,
    clock: &Arc<ManualClock>,
) -> Arc<PageCache<P>> {
    let inner = match below.parse().unwrap() {
        VolumeSpec::Delay(delay, inner) => {
            let inner = inner.open().unwrap();
            Arc::new(DelayVolume::with_clock(&delay, inner, clock.clone()).unwrap()) as _
        }
        other => other.open().unwrap(),
    };
    Arc::new(PageCache::with_policy(config, policy, inner, clock.clone()).unwrap())
}

#[test]
fn a_stream_is_read_ahead_in_few_requests_and_random_reads_are_not() {
    let clock = Arc::new(ManualClock::default());
    let mut config = CacheConfig::new(16 << 20);
    config.readahead_bytes = Some(128 << 10);
    let cache = cached(&config, "delay:100us:null:1G", &clock);
    let device: Arc<dyn BlockDevice> = cache.clone();
    let mut readers = [Reader::new(&device, 0, 0, 8192)];
    drive(&clock, &cache, &mut readers, None);
    let c = cache.counters();
    assert!((33..=40).contains(&c.read_requests), "{c:?}");
    assert!(
        c.readahead_accuracy().unwrap() > 0.9 && c.hits > 900,
        "{c:?}"
    );
    // Again: everything is there.
    let mut readers = [Reader::new(&device, 0, 0, 8192)];
    drive(&clock, &cache, &mut readers, None);
    let again = cache.counters().since(&c);
    assert_eq!((again.read_requests, again.hits), (0, 1024));
    let mut readers = [Reader::new(&device, 0, 1 << 20, 1 << 20)];
    (readers[0].random, readers[0].left) = (Some(fastrand::Rng::with_seed(1)), 500);
    drive(&clock, &cache, &mut readers, None);
    let random = cache.counters().since(&c);
    assert_eq!(random.readahead_pages, 0);
    assert_eq!(random.pgpgin, 4 * random.misses);
    cache.check().unwrap();
}

#[test]
fn frames_in_order_are_few_segments() {
    fn segments(policy: impl Policy) -> f64 {
        let clock = Arc::new(ManualClock::default());
        let mut config = CacheConfig::new(256 << 20);
        config.lists = 1;
        let cache = cached_by(policy, &config, "null:1G", &clock);
        let device: Arc<dyn BlockDevice> = cache.clone();
        drive(
            &clock,
            &cache,
            &mut [Reader::new(&device, 0, 0, 65536)],
            None,
        );
        cache.counters().segments_per_read().unwrap()
    }
    let reversed = past::Policy {
        order: past::FrameOrder::Reversed,
        ..past::Policy::DEFAULT
    };
    let (kept, reversed) = (segments(Standard), segments(reversed));
    println!("{kept:.2} segments in order, {reversed:.2} reversed");
    assert!(reversed >= 4.0 * kept, "{kept} {reversed}");
}

/// Several processes, each on a device of its own that serves one request at a time, and a cache that is too small. Half of it is active:
/// it was read twice before.
fn squeeze(pages: u64, processes: u64, policy: impl Policy) -> (Duration, Counters) {
    let clock = Arc::new(ManualClock::default());
    let mut config = CacheConfig::new(pages * 4096);
    config.lists = 1;
    let cache = cached_by(policy, &config, "delay:200us,serial:null:64G", &clock);
    let device: Arc<dyn BlockDevice> = cache.clone();
    let mut background = BackgroundWork::new(&cache);
    for _ in 0..3 {
        let mut warm = [Reader::new(&device, 0, 1 << 26, pages * 5)];
        drive(&clock, &cache, &mut warm, Some(&mut background));
    }
    let (before, begin) = (cache.counters(), clock.now());
    let reader = |n: u64| Reader::new(&device, n as u32, n << 21, 8 * 4000);
    let mut readers: Vec<_> = (0..processes).map(reader).collect();
    drive(&clock, &cache, &mut readers, Some(&mut background));
    cache.check().unwrap();
    (clock.now() - begin, cache.counters().since(&before))
}

/// As in Linux 2.6.31.
const HISTORY: past::Policy = past::Policy {
    order: past::FrameOrder::Reversed,
    ..past::Policy::HISTORY
};

#[test]
fn sleeping_after_reclaim_is_what_costs() {
    let good = squeeze(480, 8, Standard);
    let bad = squeeze(480, 8, HISTORY);
    for (name, (time, c)) in [("good", &good), ("bad", &bad)] {
        println!(
            "{name}: {time:?}, {} stalls of {:?}, direct share {:?}, effectiveness {:?}, {} failed after progress",
            c.stalls,
            c.average_stall(),
            c.direct_share(),
            c.effectiveness(),
            c.failed_after_progress
        );
    }
    assert_eq!(good.1.stalls, 0);
    assert!(bad.1.stalls > 0 && bad.1.failed_after_progress > 0);
    assert!(bad.0 > 2 * good.0, "{:?} {:?}", bad.0, good.0);
    // Memory for all cures it.
    let (good, bad) = (squeeze(1024, 8, Standard).0, squeeze(1024, 8, HISTORY).0);
    assert!(bad < good * 21 / 20, "{bad:?} {good:?}");
}

/// A cache that has not even a window for each: all get parts, and nobody reads what is gone before it is used.
#[test]
fn too_many_streams_share_what_there_is() {
    for processes in [8, 16, 32] {
        let (good, c) = squeeze(512, processes, Standard);
        let (bad, _) = squeeze(512, processes, HISTORY);
        let lost = c.readahead_lost as f64 / c.readahead_pages.max(1) as f64;
        println!(
            "{processes}: {good:?}, {bad:?} as in history, {:.1} pages for each read, {:.1} % of what was read in advance lost",
            c.pgpgin as f64 / 4.0 / c.read_requests as f64,
            100.0 * lost
        );
        assert!(good < bad, "{processes}: {good:?} {bad:?}");
        // What is read twice is what was lost.
        assert!(lost < 0.05, "{processes}: {lost}");
    }
}

/// Active pages that are used stay; what is read in advance gets the frames of the others.
#[test]
fn active_pages_go_where_windows_need_them_and_stay_where_they_are_used() {
    let (_, idle) = squeeze(512, 12, Standard);
    let pinned = past::Policy {
        active: past::ActiveShare::Percent(50),
        ..past::Policy::DEFAULT
    };
    let (_, pinned) = squeeze(512, 12, pinned);
    println!(
        "{} of {} active",
        idle.nr_active_file, pinned.nr_active_file
    );
    assert!(idle.nr_active_file < pinned.nr_active_file / 2);
    assert!(pinned.nr_active_file > 150);
}

#[test]
fn small_writes_in_a_row_reach_an_array_as_whole_stripes() {
    const SECTORS: u64 = 1 << 16;
    let created = NewArray {
        set_uuid: [7; 16],
        name: "cache:0",
        created_secs: 1,
        layout: Layout::LeftSymmetric,
        chunk_sectors: 128,
        device_sectors: &[SECTORS; 4],
        size_sectors: None,
        consistency: Consistency::Resync,
        checksums: false,
        clean: true,
    };
    let created = created.build().unwrap();
    let member = |n: usize| {
        let device = pvblk_volume::open("mem:32M").unwrap();
        let name = format!("m{n}");
        let superblock = created.superblock(n, [n as u8; 16]);
        Some(Member {
            device,
            name,
            superblock,
        })
    };
    let assembly = Assembly::new(created.geometry(), (0..4).map(member).collect(), false);
    let array = Raid5::start(assembly, &ArrayOptions::default()).unwrap();
    array.keep().unwrap();
    let cache = PageCache::new(&CacheConfig::new(8 << 20), array.clone()).unwrap();
    let device: Arc<dyn BlockDevice> = Arc::new(cache);
    let mut queue = Queue::open(&device, &QueueContext::new(1)).unwrap();
    let mut run = |mut request: Box<Request>| {
        let mut done = Vec::new();
        queue.submit(&mut vec![{
            request.tag = 1;
            request
        }]);
        while queue.poll(&mut done) == 0 {}
        assert_eq!(done[0].status, Status::Ok);
    };
    let data = Buffer::anonymous(4096).unwrap();
    for page in 0..10_000 {
        run(Request::with_buffers(
            Op::Write,
            page * 8,
            vec![data.clone()],
            0,
        ));
    }
    run(Request::new(Op::Flush, 0, 0, 0));
    let counts = array.counts();
    let share = counts.whole as f64 / counts.rounds as f64;
    println!(
        "{counts:?}: {:.2} % of the stripes written whole",
        share * 100.0
    );
    assert!(share >= 0.99);
}

#[test]
fn modes_are_what_they_say() {
    let clock = Arc::new(ManualClock::default());
    for (mode, written) in [(Mode::WriteBack, 0), (Mode::WriteThrough, 4)] {
        let mut config = CacheConfig::new(1 << 20);
        config.mode = mode;
        let cache = cached(&config, "mem:16M", &clock);
        let device: Arc<dyn BlockDevice> = cache.clone();
        assert_eq!(device.limits().volatile_cache, mode == Mode::WriteBack);
        let mut queue = Queue::open(&device, &QueueContext::new(1)).unwrap();
        let data = Buffer::anonymous(4096).unwrap();
        queue.submit(&mut vec![Request::with_buffers(
            Op::Write,
            8,
            vec![data],
            0,
        )]);
        let mut done = Vec::new();
        while queue.poll(&mut done) == 0 {}
        assert_eq!(
            (done[0].status, cache.counters().pgpgout),
            (Status::Ok, written)
        );
        drop(queue);
        device.close().unwrap();
        assert_eq!(
            (cache.counters().pgpgout, cache.counters().nr_dirty),
            (4, 0)
        );
        let answer = device.ask(r#"{"cache": "counters"}"#).unwrap().unwrap();
        assert!(answer.contains("\"pgpgout\":4"), "{answer}");
    }
    let mut config = CacheConfig::new(1 << 20);
    config.mode = Mode::ReadOnly;
    assert!(cached(&config, "mem:16M", &clock).limits().read_only);
}

/// Virtual time of a read in order of `mib` from a cache of 128 MiB over `below`, 4 KiB at a time with one in flight.
fn read_in_order(below: &str, readahead: Option<u32>, mib: u64) -> Duration {
    let VolumeSpec::Delay(spec, inner) = below.parse().unwrap() else {
        panic!("{below} is no delay");
    };
    let clock = Arc::new(ManualClock::default());
    let inner = inner.open().unwrap();
    let device = DelayVolume::with_clock(&spec, inner, clock.clone()).unwrap();
    let mut config = CacheConfig::new(128 << 20);
    config.readahead_bytes = readahead;
    let cache = PageCache::with_clock(&config, Arc::new(device), clock.clone()).unwrap();
    let cache = Arc::new(cache);
    let device: Arc<dyn BlockDevice> = cache.clone();
    let mut readers = [Reader::new(&device, 0, 0, mib * 2048)];
    let begin = clock.now();
    while readers[0].left > 0 || readers[0].request.is_none() {
        if let Err(until) = readers[0].step() {
            clock.advance_to(until.expect("somebody waits for ever"));
        }
    }
    cache.check().unwrap();
    clock.now() - begin
}

#[test]
fn windows_grow_with_the_round_trip() {
    let below = "delay:1ms:null:1G";
    let fixed = read_in_order(below, Some(128 << 10), 256);
    let grown = read_in_order(below, None, 256);
    // Two windows of 128 KiB in each round trip: 1024 of them.
    assert!(fixed > Duration::from_millis(1000), "{fixed:?}");
    let times = fixed.as_secs_f64() / grown.as_secs_f64();
    assert!(times > 8.0, "{fixed:?} became {grown:?}");
}

#[test]
fn windows_grow_until_the_device_gives_no_more() {
    for (below, bytes_a_second) in [
        ("delay:1ms,bw=1G:null:1G", 1e9),
        ("delay:10ms,bw=200M:null:1G", 200e6),
    ] {
        let took = read_in_order(below, None, 512).as_secs_f64();
        let share = 512.0 * 1048576.0 / took / bytes_a_second;
        assert!(share > 0.85, "{below}: {share} of what the device gives");
    }
    // A device without a round trip to speak of: nothing changes.
    let near = "delay:20us,bw=1G:null:1G";
    let (fixed, free) = (
        read_in_order(near, Some(128 << 10), 64),
        read_in_order(near, None, 64),
    );
    let share = free.as_secs_f64() / fixed.as_secs_f64();
    assert!(share < 1.05, "{fixed:?} became {free:?}");
}
