//! File disks whose medium hangs, fails, or is used by another program.

use pvblk_e2e::daemon::{Daemon, is_stall};
use pvblk_e2e::nbd::{Command, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::slow_medium::{self, Kind, Rule, SlowMedium};
use pvblk_e2e::{Stop, mounted, run_all, tools};
use rustix::process::{Pid, Resource, Rlimit, Signal};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// A bound that only a hang reaches.
const HANG: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    run_all(&[
        (
            "thirty_two_stalled_requests_leave_other_disks_alone",
            thirty_two_stalled_requests_leave_other_disks_alone,
        ),
        (
            "what_is_cached_is_read_while_its_medium_hangs",
            what_is_cached_is_read_while_its_medium_hangs,
        ),
        (
            "a_hung_disk_does_not_hold_up_the_sizes_of_others",
            a_hung_disk_does_not_hold_up_the_sizes_of_others,
        ),
        (
            "the_next_server_waits_for_io_of_the_last",
            the_next_server_waits_for_io_of_the_last,
        ),
        (
            "a_failed_flush_is_told_to_everybody",
            a_failed_flush_is_told_to_everybody,
        ),
        (
            "a_cut_file_is_not_made_longer_again",
            a_cut_file_is_not_made_longer_again,
        ),
        (
            "qemu_and_pvblk_keep_each_other_out",
            qemu_and_pvblk_keep_each_other_out,
        ),
        (
            "a_limit_of_file_sizes_ends_no_server",
            a_limit_of_file_sizes_ends_no_server,
        ),
        (
            "a_file_under_a_loop_device_is_refused",
            a_file_under_a_loop_device_is_refused,
        ),
    ])
}

/// A server with these disks and its socket for NBD.
fn serve(folder: &Path, disks: &[String]) -> Result<(Daemon, PathBuf), Stop> {
    let socket = folder.join(format!("nbd-{}.sock", fastrand::u64(..)));
    let mut args = vec!["serve".to_owned(), "--workers".into(), "1".into()];
    for disk in disks {
        args.extend(["--disk".into(), disk.clone()]);
    }
    args.extend(["--nbd".into(), format!("unix:{}", socket.display())]);
    Ok((Daemon::start(args)?, socket))
}

/// Waits for the reply to `cookie`, the only request in flight; returns its error number.
fn answer(connection: &mut Connection, cookie: u64) -> Result<u32, Stop> {
    match connection.receive()? {
        Some(reply) if reply.cookie == cookie => Ok(reply.error),
        other => Stop::fail(format!("{other:?} instead of the answer to {cookie}")),
    }
}

fn flush(connection: &mut Connection) -> Result<u32, Stop> {
    connection.send(Command::Flush, 77, 0, &[])?;
    answer(connection, 77)
}

fn write(connection: &mut Connection, offset: u64, data: &[u8]) -> Result<u32, Stop> {
    connection.send(Command::Write, 78, offset, data)?;
    answer(connection, 78)
}

/// Rounds of a write, a flush and a read; the 99th of a hundred of their times.
fn rounds(connection: &mut Connection, count: u64) -> Result<Duration, Stop> {
    let mut times = Vec::new();
    for i in 0..count {
        let (data, at) = ([i as u8; 4096], i % 64 * 4096);
        let start = Instant::now();
        check(write(connection, at, &data)? == 0, || {
            "a write failed".into()
        })?;
        check(flush(connection)? == 0, || "a flush failed".into())?;
        connection.ask(Command::Read, 79, at, 4096)?;
        check(answer(connection, 79)? == 0, || "a read failed".into())?;
        check(connection.receive_data(4096)? == data, || {
            "wrong data".into()
        })?;
        times.push(start.elapsed());
    }
    times.sort();
    Ok(times[times.len() * 99 / 100])
}

fn thirty_two_stalled_requests_leave_other_disks_alone() -> Result<(), Stop> {
    for options in ["", ",direct"] {
        let medium = SlowMedium::new()?;
        let folder = tempfile::tempdir()?;
        let hung = medium.add("disk", 16 << 20)?;
        let healthy = folder.path().join("healthy");
        let disks = [
            format!("hung=file:{}{options}", hung.display()),
            format!("healthy=file:{}{options},size=16M", healthy.display()),
        ];
        let (server, socket) = serve(folder.path(), &disks)?;
        // Ends before the server, which may wait for it.
        let medium = medium;
        let mut neighbour = Connection::open(&socket, "healthy")?;
        let alone = rounds(&mut neighbour, 200)?;
        medium.set("disk", &Kind::ALL, Rule::Hold);
        let mut stuck = Connection::open(&socket, "hung")?;
        for i in 0..8 {
            let at = i * 65536;
            stuck.ask(Command::Read, i, (1 << 20) + at, 4096)?;
            stuck.send(Command::Write, 8 + i, (2 << 20) + at, &[1; 4096])?;
            stuck.ask(Command::Trim, 16 + i, (4 << 20) + at, 4096)?;
            stuck.send(Command::Flush, 24 + i, 0, &[])?;
        }
        if medium.wait_held("disk", &Kind::ALL, 3).is_err() {
            return Err(server.failure("sent too little to the medium"));
        }
        let beside = rounds(&mut neighbour, 200)?;
        println!(
            "file{options}: p99 of write, flush, read: {alone:?} alone, {beside:?} beside a hung disk"
        );
        check(medium.held("disk", &Kind::ALL) >= 3, || {
            "the medium doesn't hang".into()
        })?;
        medium.heal("disk");
        let mut seen = [false; 32];
        for _ in 0..32 {
            let Some(reply) = stuck.receive()? else {
                return Err(server.failure("closed the connection"));
            };
            if reply.cookie < 8 && reply.error == 0 {
                stuck.receive_data(4096)?;
            }
            let seen = &mut seen[reply.cookie as usize];
            check(!std::mem::replace(seen, true), || "answered twice".into())?;
        }
    }
    Ok(())
}

/// A mounted ext4 in the file `image` of a medium, unmounted when it is dropped.
struct Ext4 {
    medium: SlowMedium,
    folder: tempfile::TempDir,
}

impl Ext4 {
    fn make(medium: SlowMedium) -> Result<Ext4, Stop> {
        mounted::need_machine()?;
        let image = medium.add("image", 64 << 20)?;
        let (folder, image) = (tempfile::tempdir()?, image.to_string_lossy());
        tools::run_ok("mkfs.ext4", ["-q", "-F", &image])?;
        let point = folder.path().to_string_lossy().into_owned();
        tools::run_ok("mount", ["-o", "loop", &image, &point])?;
        Ok(Ext4 { medium, folder })
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        let point = self.folder.path().to_string_lossy().into_owned();
        for _ in 0..100 {
            // Reads that were held end first.
            if asked("umount", &[&point]).is_ok_and(|(content, _)| content) {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Heals the medium when it is dropped: a server doesn't end while its threads wait there.
struct Healed<'a>(&'a SlowMedium);

impl Drop for Healed<'_> {
    fn drop(&mut self) {
        self.0.heal("image");
    }
}

/// The reads of this disk that can't be answered from the page cache wait for a medium that hangs. Its cached blocks are read, other disks go on, and
/// the worker that all of them share is never blocked, which its watchdog would say after a second.
fn what_is_cached_is_read_while_its_medium_hangs() -> Result<(), Stop> {
    let medium = SlowMedium::with(slow_medium::Options {
        // Else the cache would be there twice.
        direct_io: true,
        ..Default::default()
    })?;
    let ext4 = Ext4::make(medium)?;
    let folder = tempfile::tempdir()?;
    let path = ext4.folder.path().join("disk");
    let healthy = folder.path().join("healthy");
    let block = |i: u64| [i as u8 ^ 0x5a; 4096];
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    for i in 0..16 << 8 {
        file.write_all_at(&block(i), i * 4096)?;
    }
    file.sync_all()?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    let disks = [
        format!("hung=file:{}", path.display()),
        format!("healthy=file:{},size=16M", healthy.display()),
    ];
    let (server, socket) = serve(folder.path(), &disks)?;
    let _healed = Healed(&ext4.medium);
    let mut warm = Connection::open(&socket, "hung")?;
    for i in 0..32 {
        check(warm.read(i, i * 4096, 4096)? == block(i), || {
            "wrong data".into()
        })?;
    }
    ext4.medium.set("image", &[Kind::Read], Rule::Hold);
    let mut stuck = Connection::open(&socket, "hung")?;
    let cold = |i: u64| (2 << 8) + i * 200;
    for i in 0..16 {
        stuck.ask(Command::Read, i, cold(i) * 4096, 4096)?;
    }
    ext4.medium.wait_held("image", &[Kind::Read], 1)?;
    let mut neighbour = Connection::open(&socket, "healthy")?;
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        rounds(&mut neighbour, 1)?;
        for i in 0..32 {
            check(warm.read(i, i * 4096, 4096)? == block(i), || {
                "wrong data".into()
            })?;
        }
    }
    check(ext4.medium.held("image", &[Kind::Read]) >= 1, || {
        "the medium doesn't hang".into()
    })?;
    let stall = server.lines().into_iter().find(|line| is_stall(line));
    check(stall.is_none(), || format!("{stall:?}"))?;
    ext4.medium.heal("image");
    for _ in 0..16 {
        let Some(reply) = stuck.receive()? else {
            return Err(server.failure("closed the connection"));
        };
        check(reply.error == 0, || {
            format!("a read ended with {}", reply.error)
        })?;
        let data = stuck.receive_data(4096)?;
        check(data == block(cold(reply.cookie)), || "wrong data".into())?;
    }
    Ok(())
}

fn a_hung_disk_does_not_hold_up_the_sizes_of_others() -> Result<(), Stop> {
    let medium = SlowMedium::new()?;
    let folder = tempfile::tempdir()?;
    let hung = medium.add("disk", 16 << 20)?;
    let healthy = folder.path().join("healthy");
    let disks = [
        format!("hung=file:{}", hung.display()),
        format!("healthy=file:{},size=16M", healthy.display()),
    ];
    let (server, socket) = serve(folder.path(), &disks)?;
    // Ends before the server, which may wait for it.
    let medium = medium;
    medium.set("disk", &Kind::ALL, Rule::Hold);
    File::options()
        .write(true)
        .open(&healthy)?
        .set_len(32 << 20)?;
    server.signal(Signal::HUP)?;
    let deadline = Instant::now() + HANG;
    while Connection::open(&socket, "healthy")?.size_bytes != 32 << 20 {
        check(Instant::now() < deadline, || {
            "the new size is never told".into()
        })?;
        std::thread::sleep(Duration::from_millis(20));
    }
    medium.heal("disk");
    Ok(())
}

fn the_next_server_waits_for_io_of_the_last() -> Result<(), Stop> {
    for options in ["", ",direct"] {
        let medium = SlowMedium::new()?;
        let folder = tempfile::tempdir()?;
        let disk = medium.add("disk", 1 << 20)?;
        let disks = [format!("disk=file:{}{options}", disk.display())];
        let (first, socket) = serve(folder.path(), &disks)?;
        // Ends before the server, which may wait for it.
        let medium = medium;
        medium.set("disk", &[Kind::Write], Rule::Hold);
        let mut old = Connection::open(&socket, "disk")?;
        old.send(Command::Write, 1, 0, &[b'A'; 4096])?;
        medium.wait_held("disk", &[Kind::Write], 1)?;
        first.signal(Signal::KILL)?;
        let path = folder.path().to_owned();
        let next = std::thread::spawn(move || serve(&path, &disks));
        // Far longer than a start takes without such a wait; the wait itself has no upper bound here.
        let until = Instant::now() + Duration::from_secs(2);
        while Instant::now() < until && !next.is_finished() {
            std::thread::sleep(Duration::from_millis(10));
        }
        if next.is_finished() {
            let how = next.join().map(|started| started.map(|_| "started"));
            return Stop::fail(format!("the next server didn't wait for a write: {how:?}"));
        }
        medium.heal("disk");
        let started = next.join().map_err(|_| Stop::Fail("a panic".into()))?;
        let (second, socket) = started?;
        // The log is written by a thread of its own.
        let until = Instant::now() + Duration::from_secs(10);
        let told = || second.lines().iter().any(|l| l.contains("still at work"));
        while !told() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        check(told(), || {
            let said = second.lines().join("\n  | ");
            format!("it doesn't say what it waited for:\n  | {said}")
        })?;
        let mut new = Connection::open(&socket, "disk")?;
        check(write(&mut new, 0, &[b'B'; 4096])? == 0, || {
            "B failed".into()
        })?;
        check(flush(&mut new)? == 0, || "the flush failed".into())?;
        medium.settle()?;
        let mut data = [0; 4096];
        medium.data("disk")?.read_exact_at(&mut data, 0)?;
        check(data == [b'B'; 4096], || {
            format!("the older write won: {}", data[0] as char)
        })?;
    }
    Ok(())
}

fn a_failed_flush_is_told_to_everybody() -> Result<(), Stop> {
    for options in ["", ",direct"] {
        let medium = SlowMedium::new()?;
        let folder = tempfile::tempdir()?;
        let disk = medium.add("disk", 1 << 20)?;
        let disks = [format!("disk=file:{}{options}", disk.display())];
        let (_server, socket) = serve(folder.path(), &disks)?;
        // Ends before the server, which may wait for it.
        let medium = medium;
        let mut one = Connection::open(&socket, "disk")?;
        let mut other = Connection::open(&socket, "disk")?;
        let mut third = Connection::open(&socket, "disk")?;
        check(write(&mut one, 0, &[1; 4096])? == 0, || {
            "a write failed".into()
        })?;
        check(flush(&mut one)? == 0, || "the first flush failed".into())?;
        check(write(&mut other, 0, &[2; 4096])? == 0, || {
            "a write failed".into()
        })?;
        medium.set("disk", &[Kind::Fsync], Rule::Hold);
        one.send(Command::Flush, 77, 0, &[])?;
        medium.wait_held("disk", &[Kind::Fsync], 1)?;
        // A second one overlaps it.
        other.send(Command::Flush, 77, 0, &[])?;
        std::thread::sleep(Duration::from_millis(100));
        medium.set("disk", &[Kind::Fsync], Rule::Now);
        medium.fail_held("disk", &[Kind::Fsync], 5);
        let errors = [
            answer(&mut one, 77)?,
            answer(&mut other, 77)?,
            flush(&mut third)?,
            flush(&mut one)?,
        ];
        check(!errors.contains(&0), || {
            format!("{options}: flushes ended with {errors:?}, 0 is success")
        })?;
    }
    Ok(())
}

fn a_cut_file_is_not_made_longer_again() -> Result<(), Stop> {
    for options in ["", ",direct"] {
        let folder = tempfile::tempdir()?;
        let disk = folder.path().join("disk");
        let disks = [format!("disk=file:{},size=16M{options}", disk.display())];
        let (server, socket) = serve(folder.path(), &disks)?;
        let mut guest = Connection::open(&socket, "disk")?;
        check(write(&mut guest, 12 << 20, &[1; 4096])? == 0, || {
            "a write failed".into()
        })?;
        File::options().write(true).open(&disk)?.set_len(8 << 20)?;
        for i in 0..16 {
            let error = write(&mut guest, (8 << 20) + (i * 65536), &[2; 4096])?;
            check(error != 0, || "a write behind the end was taken".into())?;
        }
        check(write(&mut guest, 0, &[3; 4096])? == 0, || {
            "a write before the end failed".into()
        })?;
        server.signal(Signal::HUP)?;
        let deadline = Instant::now() + HANG;
        while Connection::open(&socket, "disk")?.size_bytes != 8 << 20 {
            check(Instant::now() < deadline, || {
                "the new size is never told".into()
            })?;
            std::thread::sleep(Duration::from_millis(20));
        }
        let len = std::fs::metadata(&disk)?.len();
        check(len == 8 << 20, || format!("the file has {len} bytes again"))?;
    }
    Ok(())
}

/// Runs a program to its end: true if it succeeded, and its output.
fn asked(program: &str, args: &[&str]) -> Result<(bool, String), Stop> {
    let said = tools::run(tools::tool(program, args), HANG)?;
    let content = said.status.is_some_and(|s| s.success());
    Ok((content, said.stdout + &said.stderr))
}

fn qemu_and_pvblk_keep_each_other_out() -> Result<(), Stop> {
    tools::need(&["qemu-io", "qemu-img", "qemu-nbd"])?;
    let folder = tempfile::tempdir()?;
    let disk = folder.path().join("disk");
    let name = disk.to_string_lossy().into_owned();
    let spec = |options: &str| vec![format!("disk=file:{name}{options}")];
    let write = ["-f", "raw", "-c", "write 0 4k", name.as_str()];
    let read = ["-r", "-f", "raw", "-c", "read 0 4k", name.as_str()];
    let (mut server, _) = serve(folder.path(), &spec(",size=1M"))?;
    let (content, said) = asked("qemu-io", &write)?;
    check(!content && said.contains("lock"), || {
        format!("QEMU got into a served disk: {said}")
    })?;
    server.stop()?;
    // Readers don't mind each other, but a writer.
    let (mut server, _) = serve(folder.path(), &spec(",ro"))?;
    let (other, _) = serve(folder.path(), &spec(",ro"))?;
    drop(other);
    let (content, said) = asked("qemu-io", &read)?;
    check(content && !said.contains("lock"), || {
        format!("QEMU can't read beside a reader: {said}")
    })?;
    let (_, said) = asked("qemu-io", &write)?;
    check(said.contains("lock"), || {
        format!("QEMU wrote beside a reader: {said}")
    })?;
    server.stop()?;
    // The other way round.
    let socket = folder.path().join("qemu.sock");
    let mut qemu = tools::tool(
        "qemu-nbd",
        ["-t", "-f", "raw", "-k", &socket.to_string_lossy(), &name],
    )
    .spawn()?;
    let deadline = Instant::now() + HANG;
    while !socket.exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let refused = serve(folder.path(), &spec("")).map(|_| ());
    let reader = serve(folder.path(), &spec(",ro")).map(|_| ());
    let allowed = serve(folder.path(), &spec(",nolock")).map(|_| ());
    qemu.kill()?;
    qemu.wait()?;
    for refused in [refused, reader] {
        match refused {
            Err(Stop::Fail(why)) if why.contains("qemu-nbd") && why.contains("nolock") => {}
            other => return Stop::fail(format!("not refused for qemu-nbd: {other:?}")),
        }
    }
    allowed
}

fn a_file_under_a_loop_device_is_refused() -> Result<(), Stop> {
    tools::need(&["losetup"])?;
    let folder = tempfile::tempdir()?;
    let disk = folder.path().join("disk");
    File::create(&disk)?.set_len(1 << 20)?;
    let name = disk.to_string_lossy().into_owned();
    let (set_up, device) = asked("losetup", &["--find", "--show", &name])?;
    if !set_up {
        return Stop::skip(format!("no loop device to be had: {device}"));
    }
    let device = device.trim().to_owned();
    let spec = |options: &str| vec![format!("disk=file:{name}{options}")];
    // By the same file under another name, too.
    let link = folder.path().join("link");
    std::fs::hard_link(&disk, &link)?;
    let linked = vec![format!("disk=file:{}", link.display())];
    let refused = [
        serve(folder.path(), &spec("")).map(|_| ()),
        serve(folder.path(), &linked).map(|_| ()),
        serve(folder.path(), &spec(",ro")).map(|_| ()),
    ];
    let allowed = serve(folder.path(), &spec(",nolock")).map(|_| ());
    asked("losetup", &["--detach", &device])?;
    for refused in refused {
        match refused {
            Err(Stop::Fail(why)) if why.contains(&device) && why.contains("nolock") => {}
            other => return Stop::fail(format!("not refused for {device}: {other:?}")),
        }
    }
    allowed?;
    let (_, said) = asked("losetup", &["--find", "--show", "--read-only", &name])?;
    let reader = serve(folder.path(), &spec(",ro")).map(|_| ());
    let writer = serve(folder.path(), &spec("")).map(|_| ());
    asked("losetup", &["--detach", said.trim()])?;
    reader?;
    check(writer.is_err(), || {
        "a writer under a read-only loop device was let in".into()
    })
}

/// A write behind the limit fails, and nothing else does. Without a handler of SIGXFSZ it would end the server.
fn a_limit_of_file_sizes_ends_no_server() -> Result<(), Stop> {
    const LIMIT: u64 = 1 << 20;
    let folder = tempfile::tempdir()?;
    for option in ["", ",direct"] {
        let path = folder.path().join(format!("disk{option}"));
        File::create(&path)?.set_len(4 * LIMIT)?;
        let disks = [
            format!("a=file:{}{option}", path.display()),
            "b=mem:1M".to_owned(),
        ];
        let (mut server, socket) = serve(folder.path(), &disks)?;
        let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| Stop::Fail("no process id".into()))?;
        let limit = Rlimit {
            current: Some(LIMIT),
            maximum: None,
        };
        rustix::process::prlimit(Some(pid), Resource::Fsize, limit)?;
        let mut client = Connection::open(&socket, "a")?;
        let mut other = Connection::open(&socket, "b")?;
        for round in 0..3 {
            let (inside, behind) = (
                write(&mut client, LIMIT - 4096, &[1; 4096])?,
                write(&mut client, LIMIT + 4096 * round, &[2; 4096])?,
            );
            check(inside == 0 && behind != 0, || {
                format!("{option:?}: inside the limit {inside}, behind it {behind}")
            })?;
            let neighbour = write(&mut other, 0, &[3; 4096])?;
            check(neighbour == 0 && flush(&mut client)? == 0, || {
                format!("{option:?}: a neighbour's write {neighbour}, or the flush failed")
            })?;
        }
        drop((client, other));
        server.stop()?;
    }
    Ok(())
}
