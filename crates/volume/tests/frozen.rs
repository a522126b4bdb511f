//! A file on a filesystem that hangs: requests that wait there hold up no others. The filesystem is ext4 on a
//! loop device, frozen by fsfreeze(8), which holds every change.

mod common;

use common::*;
use pvblk_block::{
    BlockDevice, Buffer, Completion, Op, Queue, Region, Request, RequestFlags, Status,
};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// A bound that only a hang reaches.
const HANG: Duration = Duration::from_secs(60);

/// One frozen filesystem at a time, so that a thread that waits for a disk waits for this one.
static ONE: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

/// A mounted filesystem of its own; thawed, unmounted and removed at the end.
struct Frozen {
    point: PathBuf,
    _folder: tempfile::TempDir,
    _one: parking_lot::MutexGuard<'static, ()>,
}

fn tool(name: &str, args: &[&str]) -> Result<(), String> {
    let said = Command::new(name)
        .args(args)
        .output()
        .map_err(|e| format!("{name}: {e}"))?;
    if said.status.success() {
        return Ok(());
    }
    Err(format!("{name}: {}", String::from_utf8_lossy(&said.stderr)))
}

impl Frozen {
    /// `None`, with the reason printed, where that can't be done.
    fn new() -> Option<Frozen> {
        let one = ONE.lock();
        let folder = tempfile::tempdir().expect("a folder");
        let image = folder.path().join("image");
        let point = folder.path().join("mounted");
        std::fs::File::create(&image)
            .and_then(|f| f.set_len(64 << 20))
            .expect("an image");
        std::fs::create_dir(&point).expect("a folder");
        let (from, to) = (image.to_str()?, point.to_str()?);
        let made = tool("mkfs.ext4", &["-q", "-F", from])
            .and_then(|()| tool("mount", &["-o", "loop", from, to]));
        if let Err(why) = made {
            println!("skipped: {why}");
            return None;
        }
        Some(Frozen {
            point,
            _folder: folder,
            _one: one,
        })
    }

    fn device(&self, options: &str) -> Arc<dyn BlockDevice> {
        let path = self.point.join("disk");
        let device = open(&path, &format!(",size=16M{options}"));
        // Allocated, so that direct writes could be done without waiting.
        assert_eq!(write(&mut queue(&device, 1), 0, &[7; 4 << 20]), Status::Ok);
        device
    }

    fn freeze(&self) {
        let point = self.point.to_str().expect("a name");
        tool("fsfreeze", &["-f", point]).expect("frozen");
    }

    fn thaw(&self) {
        let _ = tool("fsfreeze", &["-u", self.point.to_str().expect("a name")]);
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.thaw();
        for _ in 0..100 {
            // The held requests end first.
            if tool("umount", &[self.point.to_str().expect("a name")]).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn open(path: &Path, options: &str) -> Arc<dyn BlockDevice> {
    pvblk_volume::open(&format!("file:{}{options}", path.display())).expect("a volume")
}

/// Runs `f` on a thread and fails if it hangs; the thread is then given up, after `thaw`.
fn within<T: Send + 'static>(
    frozen: &Frozen,
    what: &str,
    f: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || tell.send(f()));
    told.recv_timeout(HANG).unwrap_or_else(|_| {
        frozen.thaw();
        panic!("{what} hangs");
    })
}

/// Waits until a thread of this process, or of its io_uring, waits for a disk: proc(5)'s state D.
fn wait_until_a_thread_hangs() {
    let give_up = std::time::Instant::now() + HANG;
    let hangs = |stat: String| {
        // The name before it may hold anything, also a parenthesis.
        let state = stat
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.trim_start().chars().next());
        state == Some('D')
    };
    loop {
        let mut tasks = std::fs::read_dir("/proc/self/task").expect("threads");
        if tasks.any(|t| {
            let stat = t.and_then(|t| std::fs::read_to_string(t.path().join("stat")));
            stat.is_ok_and(hangs)
        }) {
            return;
        }
        assert!(std::time::Instant::now() < give_up, "no operation began");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Thirty-two writes, trims and flushes.
fn changes() -> Vec<Box<Request>> {
    (0..32)
        .map(|i| match i % 3 {
            0 => Request::new(Op::Discard, i * 8, 8, i),
            1 => Request::with_buffers(Op::Write, i * 8, vec![buffer_of(&[9; 4096])], i),
            _ => {
                let mut write =
                    Request::with_buffers(Op::Write, i * 8, vec![buffer_of(&[9; 4096])], i);
                write.flags = RequestFlags::FUA;
                write
            }
        })
        .collect()
}

/// As many completions as there are requests in flight.
fn all(q: &mut Queue) -> Vec<Completion> {
    let mut out = Vec::new();
    while q.in_flight() > 0 {
        wait(q, &mut out);
    }
    out
}

#[test]
fn a_frozen_disk_holds_up_no_other_of_the_same_thread() {
    for options in ["", ",direct"] {
        let Some(frozen) = Frozen::new() else { return };
        let stuck = frozen.device(options);
        let folder = tempfile::tempdir().expect("a folder");
        let healthy = open(&folder.path().join("disk"), &format!(",size=4M{options}"));
        frozen.freeze();
        // One thread has both queues, as a worker does.
        let mut stuck_queue = within(&frozen, "a healthy disk beside a frozen one", move || {
            let mut stuck = queue(&stuck, 32);
            stuck.submit(&mut changes());
            assert_eq!(stuck.in_flight(), 32);
            let mut healthy = queue(&healthy, 4);
            for i in 0..20 {
                assert_eq!(write(&mut healthy, i * 8, &[i as u8; 4096]), Status::Ok);
                let none = RequestFlags::empty();
                assert_eq!(plain(&mut healthy, Op::Flush, none, 0, 0), Status::Ok);
                assert_eq!(plain(&mut healthy, Op::Discard, none, 512, 8), Status::Ok);
                assert_eq!(read(&mut healthy, i * 8, 8), [i as u8; 4096]);
            }
            let mut out = Vec::new();
            stuck.poll(&mut out);
            assert!(out.is_empty(), "a frozen filesystem took {out:?}");
            stuck
        });
        frozen.thaw();
        let out = all(&mut stuck_queue);
        assert_eq!(out.len(), 32);
        assert!(out.iter().all(|c| c.status == Status::Ok));
    }
}

#[test]
fn a_queue_of_a_frozen_disk_is_closed_at_once() {
    for options in ["", ",direct"] {
        let Some(frozen) = Frozen::new() else { return };
        let stuck = frozen.device(options);
        frozen.freeze();
        within(&frozen, "closing", move || {
            let mut q = queue(&stuck, 32);
            q.submit(&mut changes());
            wait_until_a_thread_hangs();
            drop(q);
            drop(stuck);
        });
        // A thread's operation keeps the file open, and its lock.
        let path = frozen.point.join("disk");
        let again = format!("file:{}", path.display());
        let error = pvblk_volume::open(&again).map(|_| ()).expect_err("locked");
        assert!(error.to_string().contains("this very process"), "{error}");
        frozen.thaw();
        let give_up = std::time::Instant::now() + HANG;
        while pvblk_volume::open(&again).is_err() {
            assert!(std::time::Instant::now() < give_up, "never free again");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn an_odd_address_on_a_frozen_direct_disk_holds_up_nobody() {
    let Some(frozen) = Frozen::new() else { return };
    let device = frozen.device(",direct,sector=4096");
    let region = Arc::new(Region::anonymous(1 << 16).expect("memory"));
    let odd = Buffer::new(&region, 513, 4096).expect("inside");
    odd.write(0, &[5; 4096]);
    frozen.freeze();
    let mut q = within(&frozen, "an odd address", move || {
        let mut q = queue(&device, 4);
        q.submit(&mut vec![Request::with_buffers(Op::Write, 8, vec![odd], 1)]);
        assert_eq!(q.in_flight(), 1);
        // A read beside it.
        q.submit(&mut vec![Request::with_buffers(
            Op::Read,
            0,
            vec![buffer_of(&[0; 4096])],
            2,
        )]);
        let mut out = Vec::new();
        wait(&mut q, &mut out);
        assert_eq!((out.len(), out[0].request.tag), (1, 2));
        q
    });
    frozen.thaw();
    assert!(all(&mut q).iter().all(|c| c.status == Status::Ok));
    assert_eq!(read(&mut q, 8, 8), [5; 4096]);
}
