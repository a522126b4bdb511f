//! The file volume's own behaviour: opening, locking, sizes, and the ring's backlog.

mod common;

use common::*;
use pvblk_block::{
    BlockDevice, Buffer, DeviceEvent, ErrorKind, Op, QueueContext, Region, Request, RequestFlags,
    SECTOR, Status,
};
use pvblk_volume::{Engine, FileSpec, FileVolume};
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().expect("a folder"))
    }

    fn file(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.0.path().join(name);
        let file = File::create(&path).expect("a file");
        file.set_len(bytes).expect("a size");
        path
    }
}

fn open(path: &Path, options: &str) -> Result<Arc<dyn BlockDevice>, pvblk_block::Error> {
    pvblk_volume::open(&format!("file:{}{options}", path.display()))
}

fn refused(path: &Path, options: &str, why: &str) {
    match open(path, options) {
        Ok(device) => panic!("{} was opened", device.describe()),
        Err(e) => {
            let line = e.to_string();
            let name = path.file_name().and_then(|n| n.to_str()).expect("a name");
            assert!(line.contains(why) && line.contains(name), "{line}");
            assert!(!line.contains('\n'), "{line}");
        }
    }
}

/// The kernel's error stays an error that programs can look at, and is printed once.
#[test]
fn a_failed_open_keeps_its_cause() {
    let folder = Folder::new();
    let path = folder.file("plain", 4096).join("below");
    let error = open(&path, ",size=1M").map(drop).unwrap_err();
    let cause = std::error::Error::source(&error).expect("a cause");
    let cause = cause
        .downcast_ref::<std::io::Error>()
        .expect("an io::Error");
    let number = rustix::io::Errno::NOTDIR.raw_os_error();
    assert_eq!(cause.raw_os_error(), Some(number));
    assert_eq!(error.raw_os_error(), Some(number));
    assert_eq!(error.kind(), ErrorKind::Os);
    let line = format!("file:{}: can't look at it: {cause}", path.display());
    assert_eq!(error.to_string(), line);
    assert_eq!(pvblk_block::error_line(&error), line);
}

#[test]
fn what_cannot_be_opened_says_what_to_do() {
    let folder = Folder::new();
    let missing = folder.0.path().join("missing");
    refused(&missing, "", "add size=SIZE to make it");
    refused(&missing, ",dirct", "if the comma begins an option");
    refused(&missing, ",ro", "no such file");
    refused(folder.0.path(), "", "it is a directory");
    assert!(open(Path::new("/dev/null"), "").is_err());
    refused(&folder.file("empty", 0), "", "it is empty");
    let odd = folder.file("odd", 10_000);
    refused(&odd, "", "add size=10240 to extend it, or `ro`");
    refused(&odd, ",sector=4096", "size=12288");
    assert_eq!(
        open(&missing, ",ro,size=1M")
            .map(|_| ())
            .expect_err("ro")
            .kind(),
        ErrorKind::Config
    );
    assert!(!missing.exists());
}

#[test]
fn a_file_that_is_not_writable_needs_ro() {
    let folder = Folder::new();
    let path = folder.file("disk", 1 << 20);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).expect("chmod");
    if File::options().write(true).open(&path).is_ok() {
        println!("skipped: this user may write to anything");
    } else {
        refused(&path, "", "add `ro`");
    }
    let device = open(&path, ",ro").expect("readable");
    assert!(device.limits().read_only);
    let mut q = queue(&device, 4);
    assert_eq!(read(&mut q, 0, 8), vec![0; 4096]);
    assert_eq!(write(&mut q, 0, &[1; 512]), Status::ReadOnly);
    for op in [Op::Discard, Op::WriteZeroes] {
        assert_eq!(
            plain(&mut q, op, RequestFlags::empty(), 0, 8),
            Status::ReadOnly
        );
    }
    assert_eq!(
        plain(&mut q, Op::Flush, RequestFlags::empty(), 0, 0),
        Status::Ok
    );
}

#[test]
fn the_last_partial_sector_of_a_read_only_file() {
    let folder = Folder::new();
    let path = folder.0.path().join("odd");
    std::fs::write(&path, vec![7; 4096 + 700]).expect("a file");
    for options in [
        ",ro,engine=uring",
        ",ro,engine=sync",
        ",ro,direct,engine=uring",
        ",ro,direct,engine=sync",
    ] {
        let device = match open(&path, options) {
            Ok(device) => device,
            Err(e) if options.contains("direct") => {
                println!("skipped: {e}");
                continue;
            }
            Err(e) => panic!("{e}"),
        };
        let mut q = queue(&device, 2);
        let sectors = device.capacity_sectors();
        assert_eq!(
            sectors * SECTOR,
            5120_u64.next_multiple_of(device.limits().logical_sector_bytes.into())
        );
        let all = read(&mut q, 0, sectors);
        assert!(all[..4796].iter().all(|&b| b == 7), "{options}");
        assert!(all[4796..].iter().all(|&b| b == 0), "{options}");
    }
}

#[test]
fn size_makes_and_extends_but_never_shrinks() {
    let folder = Folder::new();
    let path = folder.0.path().join("disk");
    let device = open(&path, ",size=1M").expect("made");
    assert_eq!(device.capacity_sectors(), 2048);
    let mode = std::fs::metadata(&path).expect("made").permissions().mode();
    assert_eq!(mode & 0o077, 0, "only its owner may read a new disk");
    assert_eq!(write(&mut queue(&device, 1), 2047, &[3; 512]), Status::Ok);
    drop(device);
    let device = open(&path, ",size=2M").expect("extended");
    assert_eq!(device.capacity_sectors(), 4096);
    assert_eq!(
        read(&mut queue(&device, 1), 2047, 2)[..513],
        [[3; 512].as_slice(), &[0]].concat()
    );
    drop(device);
    assert_eq!(
        open(&path, ",size=512").expect("kept").capacity_sectors(),
        4096
    );
}

#[test]
fn a_second_writer_is_kept_out() {
    let folder = Folder::new();
    let path = folder.file("disk", 1 << 20);
    let writer = open(&path, "").expect("the first");
    refused(&path, "", "another volume has it open and locked");
    refused(&path, ",ro", "a writer has it");
    open(&path, ",nolock").expect("at your own risk");
    drop(writer);
    let reader = open(&path, ",ro").expect("a reader");
    let other = open(&path, ",ro").expect("another reader");
    refused(&path, "", "open and locked");
    drop((reader, other));
    open(&path, "").expect("free again");
}

#[test]
fn a_resized_file_is_told() {
    let folder = Folder::new();
    let path = folder.file("disk", 1 << 20);
    let device = pvblk_volume::open(&format!("delay:1us:{}", path.display())).expect("a volume");
    let told = Arc::new(Mutex::new(Vec::new()));
    let listener = Arc::clone(&told);
    let _subscription = device
        .events()
        .subscribe(move |event| listener.lock().expect("lock").push(event));
    let mut q = queue(&device, 1);
    device.refresh().expect("looks");
    let resize = |bytes| {
        File::options()
            .write(true)
            .open(&path)
            .and_then(|f| f.set_len(bytes))
            .expect("resized");
        device.refresh().expect("looks");
    };
    assert_eq!(write(&mut q, 2048, &[1; 512]), Status::Invalid);
    resize((2 << 20) + 100);
    assert_eq!(device.capacity_sectors(), 4096, "whole sectors only");
    assert_eq!(write(&mut q, 2048, &[1; 512]), Status::Ok);
    resize(512 << 10);
    assert_eq!(write(&mut q, 2048, &[1; 512]), Status::Invalid);
    let told = told.lock().expect("lock");
    let sectors = |sectors| DeviceEvent::Resized { sectors };
    assert_eq!(*told, [sectors(4096), sectors(1024)]);
}

#[test]
fn secure_discard_is_not_promised() {
    let folder = Folder::new();
    for engine in [",engine=sync", ",engine=uring"] {
        let path = folder.file(&engine[1..], 1 << 20);
        let mut q = queue(&open(&path, engine).expect("a volume"), 8);
        let mut batch: Vec<_> = (0..5)
            .map(|tag| Request::new(Op::Discard, 0, 8, tag))
            .collect();
        batch
            .iter_mut()
            .for_each(|r| r.flags = RequestFlags::SECURE);
        q.submit(&mut batch);
        let mut out = Vec::new();
        while out.len() < 5 {
            wait(&mut q, &mut out);
        }
        assert!(out.iter().all(|c| c.status == Status::Unsupported));
        assert_eq!(
            plain(&mut q, Op::Discard, RequestFlags::empty(), 0, 8),
            Status::Ok
        );
    }
}

#[test]
fn idle_queues_cost_no_descriptor() {
    let folder = Folder::new();
    let path = folder.file("disk", 1 << 20);
    let device = open(&path, ",engine=uring").expect("a volume");
    let q = queue(&device, 128);
    assert!(q.wait_fd().is_none());
}

#[test]
fn direct_takes_any_multiple_of_512_in_memory() {
    let mut rng = pvblk_testing::random();
    let folder = Folder::new();
    for engine in ["sync", "uring"] {
        let path = folder.file(engine, 8 << 20);
        let options = format!(",direct,sector=4096,engine={engine}");
        let device = match open(&path, &options) {
            Ok(device) => device,
            Err(e) => {
                println!("skipped: {e}");
                return;
            }
        };
        let mut q = queue(&device, 4);
        let region = Arc::new(Region::anonymous(1 << 20).expect("memory"));
        // Longer than the bounce buffer, in segments whose lengths and addresses are odd multiples of 512.
        let lengths = [
            512,
            1536,
            300 * 512,
            2048,
            4096,
            512 * (512 - 300 - 1 - 3 - 4 - 8),
        ];
        let mut at = 512;
        let mut segments = Vec::new();
        for len in lengths {
            segments.push(Buffer::new(&region, at, len).expect("inside"));
            at += len + 512;
        }
        let data = random_bytes(&mut rng, lengths.iter().sum());
        fill(&segments, &data);
        let mut request = Request::with_buffers(Op::Write, 8, segments.clone(), 0);
        request.flags = RequestFlags::FUA;
        assert_eq!(run(&mut q, request).status, Status::Ok);
        assert!(read(&mut q, 8, data.len() as u64 / SECTOR) == data);
        segments.iter().for_each(Buffer::zero);
        let request = Request::with_buffers(Op::Read, 8, segments.clone(), 0);
        assert_eq!(run(&mut q, request).status, Status::Ok);
        assert!(gather(&segments) == data);
    }
}

/// With any depth and number of entries every request completes once, with the right data.
#[test]
fn a_backlog_loses_nothing() {
    let seed = pvblk_testing::seed();
    let mut rng = fastrand::Rng::with_seed(seed);
    let folder = Folder::new();
    for round in 0..12 {
        let entries = 1 << rng.u32(0..4);
        let depth = entries * rng.u32(2..6) + rng.u32(0..3);
        println!("round {round}: depth {depth}, {entries} entries");
        let spec = FileSpec {
            engine: Some(Engine::Uring),
            size_bytes: Some(1 << 20),
            ..FileSpec::new(folder.0.path().join(format!("disk{round}")))
        };
        let volume = FileVolume::open(&spec)
            .expect("a volume")
            .with_ring_entries(entries);
        let device: Arc<dyn BlockDevice> = Arc::new(volume);
        let mut q = queue(&device, depth);
        let mut oracle = Oracle::new(0, device.capacity_sectors());
        random_ops(&mut q, &mut oracle, &mut rng, 300, depth.into());
        // All at once: far more than fit.
        let buffers: Vec<_> = (0..depth).map(|i| buffer_of(&[i as u8; 4096])).collect();
        let write = |(i, b): (usize, &Buffer)| {
            Request::with_buffers(Op::Write, i as u64 * 8, vec![b.clone()], i as u64)
        };
        let mut batch: Vec<_> = buffers.iter().enumerate().map(write).collect();
        q.submit(&mut batch);
        let mut seen = vec![false; depth as usize];
        while q.in_flight() > 0 {
            let mut out = Vec::new();
            wait(&mut q, &mut out);
            for done in out {
                assert_eq!(done.status, Status::Ok);
                assert_eq!(done.request.buffers[0].len(), 4096, "the buffers came back");
                let seen = &mut seen[done.request.tag as usize];
                assert!(!std::mem::replace(seen, true), "completed twice");
            }
        }
        assert!(seen.iter().all(|&s| s));
        for i in 0..depth {
            assert_eq!(read(&mut q, u64::from(i) * 8, 8), [i as u8; 4096]);
        }
    }
}

#[test]
fn a_queue_may_be_closed_with_requests_in_flight() {
    let folder = Folder::new();
    let path = folder.file("disk", 4 << 20);
    let device = open(&path, ",engine=uring").expect("a volume");
    let mut q = pvblk_block::Queue::open(&device, &QueueContext::new(64)).expect("a queue");
    let mut batch: Vec<_> = (0..64)
        .map(|i| Request::with_buffers(Op::Write, i * 8, vec![buffer_of(&[1; 4096])], i))
        .collect();
    q.submit(&mut batch);
    drop(q);
}

/// Runs on the scratch block device that `PVBLK_SCRATCH_DEVICE` names, whose contents are lost.
#[test]
fn a_block_device() {
    let Ok(path) = std::env::var("PVBLK_SCRATCH_DEVICE") else {
        println!("skipped: PVBLK_SCRATCH_DEVICE names no block device to overwrite");
        return;
    };
    let seed = pvblk_testing::seed();
    refused(Path::new(&path), ",size=1M", "drop it");
    let all = [
        "",
        ",engine=sync",
        ",direct",
        ",direct,engine=sync",
        ",nolock",
    ];
    for options in all {
        // Somebody else has it: discards may be refused then.
        let held = (options == ",nolock").then(|| open(Path::new(&path), ""));
        let device = open(Path::new(&path), options).expect("a block device");
        println!("{}: {:?}", device.describe(), device.limits());
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut q = queue(&device, 16);
        let part = device.capacity_sectors().min(16384);
        let base = device.capacity_sectors() - part;
        let mut oracle = Oracle::new(base, part);
        let none = RequestFlags::empty();
        assert_eq!(plain(&mut q, Op::WriteZeroes, none, base, part), Status::Ok);
        random_ops(&mut q, &mut oracle, &mut rng, 1500, 16);
        oracle.check(base, &read(&mut q, base, part), options);
        refused(Path::new(&path), "", "open in another volume");
        drop(held);
    }
}
