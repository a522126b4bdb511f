//! The blocking calls, on volumes in this process.

use pvblk_block::{
    BlockDevice, Capabilities, Decorator, DeviceQueue, Error as E, Forwards, Limits, QueueContext,
};
use pvblk_disk::{Cursor, Disk, ErrorKind, Options};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::sync::Arc;
use support::Server;

#[path = "support/mod.rs"]
#[allow(dead_code, reason = "every test file uses another part of it")]
mod support;

const MIB: usize = 1 << 20;

/// Bytes of which no two blocks are alike.
fn pattern(len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i * 7 + i / 512 * 13 + i / 4096) as u8)
        .collect()
}

fn read(disk: &Disk, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    disk.read_at(&mut bytes, offset).unwrap();
    bytes
}

#[test]
fn any_range_is_read_and_whole_blocks_are_written() {
    for spec in ["mem:8M", "mem:8M,sector=4096"] {
        let disk = Disk::open(spec).unwrap();
        // Longer than all requests that are in flight at once.
        let data = pattern(3 * MIB);
        disk.write_at(&data, MIB as u64).unwrap();
        assert_eq!(read(&disk, MIB as u64, 3 * MIB), data);
        for (skip, len) in [(1, 1), (511, 2), (4095, 4098), (131_071, 2), (5, 2 * MIB)] {
            let found = read(&disk, (MIB + skip) as u64, len);
            assert!(found == data[skip..skip + len], "{len} bytes at {skip}");
        }
        assert_eq!(read(&disk, 8 * MIB as u64 - 1, 1), [0]);
        assert!(read(&disk, 8 * MIB as u64, 0).is_empty());
        let unit = u64::from(disk.limits().logical_sector_bytes);
        for (offset, len) in [(1, unit), (0, unit - 1), (unit / 2, unit / 2)] {
            let error = disk.write_at(&data[..len as usize], offset).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains(&format!("blocks of {unit};")));
        }
        disk.close().unwrap();
    }
}

#[test]
fn ranges_outside_the_disk_are_refused_whole() {
    let disk = Disk::open("mem:1M").unwrap();
    let end = MIB as u64;
    let errors = [
        disk.read_at(&mut [0; 2], end - 1),
        disk.write_at(&[1; 1024], end - 512),
        disk.discard(end, 512),
        disk.write_zeroes(end - 512, u64::MAX),
        disk.read_at(&mut [0; 2], u64::MAX),
    ];
    for error in errors {
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("the disk has 1048576"));
    }
    assert_eq!(read(&disk, end - 512, 512), [0; 512]);
}

/// A disk that knows neither discard nor write-zeroes.
struct Plain(Arc<dyn BlockDevice>);

impl Decorator for Plain {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.0
    }
    fn describe(&self) -> String {
        "plain".into()
    }
    fn limits(&self) -> Limits {
        Limits {
            discard_granularity_bytes: 0,
            write_zeroes: false,
            ..self.0.limits()
        }
    }
    fn open_device_queue(&self, context: &QueueContext) -> Result<Box<dyn DeviceQueue>, E> {
        self.0.open_device_queue(context)
    }
    fn forward<'a>(&'a self, _: Capabilities<'a>) -> Forwards<'a> {
        Forwards::none()
    }
}

/// A disk over rings that knows neither, and a disk in this process that knows both.
fn plain_and_able() -> (Server, [Disk; 2]) {
    let device = pvblk_volume::open("mem:4M").unwrap();
    let server = Server::start_on(Arc::new(Plain(device)));
    let plain = Disk::connect(server.socket(), "vm1").unwrap();
    let able = Disk::open("mem:4M").unwrap();
    assert!(!plain.limits().write_zeroes && able.limits().write_zeroes);
    (server, [plain, able])
}

#[test]
fn zeros_are_written_whether_or_not_the_disk_knows_a_request_for_it() {
    let (_server, disks) = plain_and_able();
    for disk in disks {
        let data = pattern(2 * MIB);
        disk.write_at(&data, 0).unwrap();
        disk.write_zeroes(512, 2 * MIB as u64 - 1024).unwrap();
        let mut expected = vec![0; 2 * MIB];
        expected[..512].copy_from_slice(&data[..512]);
        expected[2 * MIB - 512..].copy_from_slice(&data[2 * MIB - 512..]);
        assert!(read(&disk, 0, 2 * MIB) == expected, "{disk:?}");
    }
}

#[test]
fn a_discard_that_the_disk_does_not_know_is_unsupported() {
    let (_server, [plain, able]) = plain_and_able();
    able.discard(0, 4096).unwrap();
    let error = plain.discard(0, 4096).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

#[test]
fn threads_share_a_disk_and_its_queues() {
    // Requests take a while, so that calls overlap; more threads than queues.
    let disk = Options::new().queues(2).open("delay:200us:mem:4M").unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let disk = &disk;
            scope.spawn(move || {
                for turn in 0..8 {
                    let at = (thread * 8 + turn) * 8192;
                    let data = vec![(thread * 8 + turn + 1) as u8; 8192];
                    disk.write_at(&data, at).unwrap();
                    assert_eq!(read(disk, at, 8192), data);
                    disk.flush().unwrap();
                }
            });
        }
    });
    for place in 0..64 {
        assert_eq!(read(&disk, place * 8192, 8192), [place as u8 + 1; 8192]);
    }
}

#[test]
fn the_first_error_of_a_call_is_told_and_the_disk_goes_on() {
    let disk = Disk::open("fault:seed=1,after=8,read-error=1:mem:4M").unwrap();
    let mut bytes = vec![0; 2 * MIB];
    let error = disk.read_at(&mut bytes, 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    let text = error.to_string();
    assert!(
        text.contains("read of 131072 bytes at byte ") && text.contains("the device failed"),
        "{text}"
    );
    disk.write_at(&[1; 512], 0).unwrap();
    disk.flush().unwrap();
    disk.close().unwrap();
}

#[test]
fn a_read_only_disk_says_so() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(MIB as u64).unwrap();
    let disk = Disk::open(&format!("file:{},ro", file.path().display())).unwrap();
    assert!(disk.limits().read_only);
    let error = disk.write_at(&[1; 512], 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error}");
    let outer = io::Error::from(error);
    assert_eq!(outer.kind(), io::ErrorKind::ReadOnlyFilesystem);
    // Nothing is flushed.
    disk.close().unwrap();
}

#[test]
fn a_disk_that_can_not_be_opened_says_why() {
    let kind = |spec: &str| Disk::open(spec).unwrap_err().kind();
    assert_eq!(kind("mem:much"), ErrorKind::Config);
    assert_eq!(kind("nosuch:1M"), ErrorKind::Config);
    let error = Disk::connect("/nonexistent/pvblk.sock", "vm1").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Os);
    assert_eq!(error.raw_os_error(), Some(2));
    assert_eq!(io::Error::from(error).kind(), io::ErrorKind::NotFound);
    let many = Options::new().queues(64).open("mem:1M").unwrap_err();
    assert!(many.to_string().contains("1 to 63"), "{many}");
    assert_eq!(many.kind(), ErrorKind::Config);
}

#[test]
fn a_cursor_reads_and_writes_any_bytes() {
    for spec in ["mem:1M", "mem:1M,sector=4096"] {
        let disk = Arc::new(Disk::open(spec).unwrap());
        let data = pattern(MIB);
        disk.write_at(&data, 0).unwrap();
        let mut expected = data;
        let mut cursor = Cursor::new(Arc::clone(&disk));
        for (at, len) in [(0, 1), (511, 3), (4000, 10_000), (8192, 4096), (MIB - 5, 5)] {
            let new: Vec<u8> = (0..len).map(|i| (i * 3 + at) as u8).collect();
            assert_eq!(cursor.seek(SeekFrom::Start(at as u64)).unwrap(), at as u64);
            cursor.write_all(&new).unwrap();
            expected[at..at + len].copy_from_slice(&new);
        }
        cursor.rewind().unwrap();
        let mut found = Vec::new();
        BufReader::new(&mut cursor).read_to_end(&mut found).unwrap();
        assert!(found == expected, "{spec}");
        assert_eq!(cursor.stream_position().unwrap(), MIB as u64);
        assert_eq!(cursor.read(&mut [0; 8]).unwrap(), 0);
        let error = cursor.write_all(&[1]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(cursor.seek(SeekFrom::End(-1)).unwrap(), MIB as u64 - 1);
        assert_eq!(cursor.write(&[1, 2, 3]).unwrap(), 1);
        assert!(cursor.seek(SeekFrom::Current(-(MIB as i64) - 1)).is_err());
        assert_eq!(cursor.stream_position().unwrap(), MIB as u64);
    }
}

#[test]
fn small_writes_go_through_a_buffer() {
    let disk = Disk::open("mem:1M").unwrap();
    let mut out = BufWriter::with_capacity(8192, Cursor::new(&disk));
    for line in 0..2000 {
        writeln!(out, "line {line}").unwrap();
    }
    out.flush().unwrap();
    drop(out);
    let mut text = String::new();
    let cursor = Cursor::new(&disk);
    cursor.take(24_000).read_to_string(&mut text).unwrap();
    let lines: Vec<&str> = text.trim_end_matches('\0').lines().collect();
    assert_eq!(lines.len(), 2000);
    assert_eq!(lines[1999], "line 1999");
}
