//! Each decorator passes on, or adds to, each capability of the device below it.

use pvblk_block::{
    BlockDevice, Buffer, BufferSource, Buffers, CacheState, Cached, Capabilities, Close,
    DeviceQueue, Error, EventHub, Extent, ExtentKind, Extents, Incarnation, Limits, LossMarks,
    Questions, QueueContext, Reclaim, Refresh,
};
use pvblk_cache::{CacheConfig, Mode, PageCache};
use pvblk_volume::{DelaySpec, DelayVolume, FaultSpec, FaultVolume, MemSpec, MemVolume};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Memory that has every capability and counts the calls.
struct Able {
    inner: MemVolume,
    refreshed: AtomicU64,
    closed: AtomicU64,
}

const SECTORS: u64 = 2048;

impl Able {
    fn new() -> Arc<Able> {
        Arc::new(Able {
            inner: MemVolume::open(&MemSpec::new(SECTORS * 512)).unwrap(),
            refreshed: AtomicU64::new(0),
            closed: AtomicU64::new(0),
        })
    }
}

impl BlockDevice for Able {
    fn describe(&self) -> String {
        "able".into()
    }
    fn limits(&self) -> Limits {
        self.inner.limits()
    }
    fn capacity_sectors(&self) -> u64 {
        self.inner.capacity_sectors()
    }
    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        self.inner.open_device_queue(context)
    }
    fn events(&self) -> &EventHub {
        self.inner.events()
    }
    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            refresh: Some(self),
            extents: Some(self),
            cached: Some(self),
            incarnation: Some(self),
            close: Some(self),
            questions: Some(self),
            memory: Some(self),
            buffers: Some(self),
        }
    }
}

impl Refresh for Able {
    fn refresh(&self) -> Result<(), Error> {
        self.refreshed.fetch_add(1, Relaxed);
        Ok(())
    }
}

impl Extents for Able {
    fn extents(&self, sector: u64, sectors: u64, out: &mut Vec<Extent>) -> Result<(), Error> {
        let kind = ExtentKind::Zero;
        out.push(Extent {
            sector,
            sectors,
            kind,
        });
        Ok(())
    }
}

impl Cached for Able {
    fn cached(&self, sector: u64, sectors: u64, out: &mut Vec<Extent<CacheState>>) {
        Extent::push(out, 0, sector, sector + sectors, CacheState::Dirty);
    }
}

const MARKS: Incarnation = Incarnation {
    cache: Some(11),
    contents: Some(12),
};

impl LossMarks for Able {
    fn incarnation(&self) -> Incarnation {
        MARKS
    }
}

impl Close for Able {
    fn close(&self) -> Result<(), Error> {
        self.closed.fetch_add(1, Relaxed);
        Ok(())
    }
}

impl Questions for Able {
    fn ask(&self, question: &str) -> Option<Result<String, Error>> {
        (question == "able?").then(|| Ok("yes".into()))
    }
}

impl Reclaim for Able {
    fn give_way(&self) -> u64 {
        1000
    }
    fn spare_bytes(&self) -> u64 {
        2000
    }
}

struct Source;

impl BufferSource for Source {
    fn allocate(&self, _: usize) -> Option<Buffer> {
        None
    }
    fn free(&self, _: Buffer) {}
}

impl Buffers for Able {
    fn buffer_source(&self) -> Arc<dyn BufferSource> {
        Arc::new(Source)
    }
}

/// The state of the first sectors in the device's cache.
fn cached(device: &dyn BlockDevice) -> CacheState {
    let mut found = Vec::new();
    device
        .capabilities()
        .cached
        .unwrap()
        .cached(0, 8, &mut found);
    found[0].kind
}

/// All that holds for each decorator; `buffers`: whether it lets users have those of the device below.
fn check(device: &Arc<dyn BlockDevice>, able: &Able, buffers: bool) {
    let name = device.describe();
    assert!(name.ends_with(":able"), "{name}");
    assert_eq!(device.capacity_sectors(), SECTORS, "{name}");
    device.refresh().unwrap();
    assert_eq!(able.refreshed.load(Relaxed), 1, "{name}");
    let mut found = Vec::new();
    device.extents(8, 16, &mut found).unwrap();
    assert_eq!(found[0].kind, ExtentKind::Zero, "{name}");
    assert_eq!(device.incarnation().contents, MARKS.contents, "{name}");
    assert_eq!(device.ask("able?").unwrap().unwrap(), "yes", "{name}");
    assert!(device.ask("else?").is_none(), "{name}");
    assert_eq!(device.spare_bytes(), 2000, "{name}");
    assert_eq!(device.give_way(), 1000, "{name}");
    assert_eq!(device.buffer_source().is_some(), buffers, "{name}");
    device.close().unwrap();
    assert_eq!(able.closed.load(Relaxed), 1, "{name}");
}

#[test]
fn modelled_devices_pass_everything_on() {
    let able = Able::new();
    let delay = DelayVolume::new(&DelaySpec::default(), able.clone()).unwrap();
    let device: Arc<dyn BlockDevice> = Arc::new(delay);
    check(&device, &able, true);
    assert_eq!(device.incarnation(), MARKS);
    assert_eq!(cached(&*device), CacheState::Dirty);
    let able = Able::new();
    let fault = FaultVolume::new(&FaultSpec::default(), able.clone()).unwrap();
    let device: Arc<dyn BlockDevice> = Arc::new(fault);
    check(&device, &able, true);
    assert_eq!(device.incarnation(), MARKS);
    assert_eq!(cached(&*device), CacheState::Dirty);
}

#[test]
fn a_cache_adds_to_the_device_below() {
    for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::ReadOnly] {
        let able = Able::new();
        let mut config = CacheConfig::new(1 << 16);
        config.mode = mode;
        let cache = PageCache::new(&config, able.clone()).unwrap();
        let device: Arc<dyn BlockDevice> = Arc::new(cache);
        check(&device, &able, false);
        // Its own pages, not those of a cache below.
        assert_eq!(cached(&*device), CacheState::Absent);
        // Writes that it holds back are lost with it.
        let same = device.incarnation().cache == MARKS.cache;
        assert_eq!(same, mode != Mode::WriteBack);
    }
}

#[test]
fn decorators_of_decorators_pass_everything_on() {
    let able = Able::new();
    let inner = DelayVolume::new(&DelaySpec::default(), able.clone()).unwrap();
    let outer = FaultVolume::new(&FaultSpec::default(), Arc::new(inner)).unwrap();
    let device: Arc<dyn BlockDevice> = Arc::new(outer);
    check(&device, &able, true);
}

#[test]
fn writes_are_held_back_only_where_nobody_else_writes_unless_the_user_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let file = format!("file:{},size=1M", dir.path().join("a").display());
    for (below, exclusive) in [
        ("mem:1M".to_owned(), true),
        ("null:1M".into(), true),
        (file.clone(), true),
        (format!("delay:0us:fault:error=0:{file}"), true),
        (format!("{file},nolock"), false),
    ] {
        for (mode, held_back) in [
            ("", exclusive),
            (",mode=write-back", true),
            (",mode=write-through", false),
        ] {
            let text = format!("cache:1M{mode}:{below}");
            let device = pvblk_volume::open(&text).unwrap();
            let through = device.describe().contains("mode=write-through");
            assert_eq!(through, !held_back, "{text}: {}", device.describe());
            assert_eq!(device.limits().exclusive, exclusive, "{text}");
            // The text that was parsed is printed again.
            let spec: pvblk_volume::VolumeSpec = text.parse().unwrap();
            assert_eq!(
                spec.to_string()
                    .parse::<pvblk_volume::VolumeSpec>()
                    .unwrap(),
                spec
            );
            device.close().unwrap();
        }
    }
}
