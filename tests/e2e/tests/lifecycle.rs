//! Starting, negotiating, stopping under load, crashing, resizing.

use pvblk_e2e::load::write_until_closed;
use pvblk_e2e::nbd::Connection;
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{need, run_ok};
use pvblk_e2e::{Daemon, MIB, Route, Stage, Stop, run_all, stage};
use rustix::process::Signal;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn main() -> ExitCode {
    run_all(&[
        (
            "sockets_are_private_and_removed",
            sockets_are_private_and_removed,
        ),
        ("sigterm_drains_over_nbd", || sigterm_drains(Route::Nbd)),
        ("sigterm_drains_over_rings", || sigterm_drains(Route::Rings)),
        (
            "negotiation_falls_back_to_what_is_offered",
            negotiation_falls_back,
        ),
        ("a_crashed_front_end_harms_nobody", crashed_front_end),
        ("a_disk_is_served_once", a_disk_is_served_once),
        ("sighup_reads_sizes_again", sighup_reads_sizes_again),
        (
            "start_prints_the_memory_bill_and_where_to_connect",
            start_prints,
        ),
    ])
}

fn mode(path: &Path) -> Result<u32, Stop> {
    Ok(std::fs::metadata(path)?.permissions().mode() & 0o777)
}

fn sockets_are_private_and_removed() -> Result<(), Stop> {
    let mut stage = Stage::new(Route::Rings, 16 * MIB)?;
    let sockets = [
        stage.local_socket(),
        stage.path("nbd.sock"),
        stage.nbd_socket(),
    ];
    for socket in &sockets {
        let mode = mode(socket)?;
        check(mode == 0o600, || {
            format!("{} has mode {mode:o}", socket.display())
        })?;
    }
    stage.stop()?;
    for socket in &sockets {
        check(!socket.exists(), || {
            format!("{} was left behind", socket.display())
        })?;
    }
    Ok(())
}

/// SIGTERM in the middle of writes: no client gets an error, and flushed writes are in the file.
fn sigterm_drains(route: Route) -> Result<(), Stop> {
    let mut stage = Stage::new(route, 64 * MIB)?;
    let connection = Connection::open(&stage.nbd_socket(), "a")?;
    let progress = Arc::new(AtomicU64::new(0));
    let load = std::thread::spawn({
        let progress = Arc::clone(&progress);
        move || write_until_closed(connection, &progress)
    });
    let deadline = Instant::now() + Duration::from_secs(60);
    // Enough writes that blocks are overwritten and flushes have completed.
    while progress.load(Ordering::Relaxed) < 6000
        && Instant::now() < deadline
        && !load.is_finished()
    {
        std::thread::sleep(Duration::from_millis(5));
    }
    let stopped = stage.nearest().stop();
    let promises = load
        .join()
        .map_err(|_| Stop::Fail("the load panicked".into()))??;
    stopped?;
    check(promises.writes >= 100 && promises.flushes >= 1, || {
        format!(
            "the load stood still: {} writes, {} flushes",
            promises.writes, promises.flushes
        )
    })?;
    if let Some(attach) = stage.take_attach() {
        drop(attach);
        stage.serve().stop()?;
    }
    promises.check_file(&stage.disk())
}

/// Checks an attachment's line on its negotiation, which names queues and pages.
fn negotiated(daemon: &Daemon, queues: &str, pages: &str) -> Result<(), Stop> {
    let told = daemon.lines().iter().any(|line| {
        let numbers: Vec<&str> = line
            .split(|c: char| !c.is_ascii_digit())
            .filter(|w| !w.is_empty())
            .collect();
        line.contains("queue")
            && line.contains("page")
            && numbers.contains(&queues)
            && numbers.contains(&pages)
    });
    check(told, || {
        format!(
            "no line tells {queues} queues and {pages} pages: {:#?}",
            daemon.lines()
        )
    })
}

fn negotiation_falls_back() -> Result<(), Stop> {
    need(&["nbdcopy", "cmp"])?;
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name);
    let mut serve = Daemon::start([
        "serve",
        "--disk",
        "a=mem:32M",
        "--local",
        &stage::unix(&path("local")),
        "--max-queues",
        "2",
        "--max-ring-pages",
        "8",
    ])?;
    pvblk_e2e::pattern::write(&path("image"), 32 * MIB, 3)?;
    for (asked, got) in [
        (("8", "16"), ("2", "8")),
        (("1", "1"), ("1", "1")),
        (("2", "8"), ("2", "8")),
    ] {
        let mut attach = Daemon::start([
            "attach",
            &stage::unix(&path("local")),
            "--disk",
            "a",
            "--queues",
            asked.0,
            "--ring-pages",
            asked.1,
            "--nbd",
            &stage::unix(&path("nbd")),
        ])?;
        negotiated(&attach, got.0, got.1)?;
        let uri = stage::uri(&path("nbd"), "a");
        run_ok(
            "nbdcopy",
            ["--flush", &path("image").display().to_string(), &uri],
        )?;
        run_ok("nbdcopy", [&uri, &path("back").display().to_string()])?;
        pvblk_e2e::tools::compare(&path("image"), &path("back"))?;
        attach.stop()?;
    }
    serve.stop()
}

/// A front end killed in the middle of its writes: the disk stays, and the next front end finds it whole.
fn crashed_front_end() -> Result<(), Stop> {
    let mut stage = Stage::new(Route::Rings, 64 * MIB)?;
    for _ in 0..3 {
        let connection = Connection::open(&stage.nbd_socket(), "a")?;
        let progress = Arc::new(AtomicU64::new(0));
        let load = std::thread::spawn({
            let progress = Arc::clone(&progress);
            move || write_until_closed(connection, &progress)
        });
        let deadline = Instant::now() + Duration::from_secs(60);
        while progress.load(Ordering::Relaxed) < 500
            && Instant::now() < deadline
            && !load.is_finished()
        {
            std::thread::sleep(Duration::from_millis(2));
        }
        let Some(attach) = stage.take_attach() else {
            return Stop::fail("nothing is attached");
        };
        attach.crash()?;
        // The connection ends at any point; only writes that completed before count.
        let _ = load.join();
        // A crash leaves its socket; the next one takes its place.
        let mut again = stage.attach_again(&[])?;
        let fresh = Connection::open(&stage.nbd_socket(), "a")?;
        check(fresh.size_bytes == 64 * MIB, || {
            "the disk changed its size".into()
        })?;
        drop(fresh);
        again.stop()?;
        let direct = Connection::open(&stage.path("nbd.sock"), "a")?;
        check(direct.size_bytes == 64 * MIB, || {
            "the disk changed its size".into()
        })?;
        let next = stage.attach_again(&[])?;
        stage.put_attach(next);
    }
    stage.stop()
}

fn a_disk_is_served_once() -> Result<(), Stop> {
    let mut stage = Stage::new(Route::Nbd, 16 * MIB)?;
    let disk = stage.disk().display().to_string();
    let second = pvblk_e2e::daemon::pvblk([
        "serve",
        "--disk",
        &format!("b=file:{disk}"),
        "--nbd",
        &stage::unix(&stage.path("second.sock")),
    ])?;
    let second = pvblk_e2e::tools::run(second, Duration::from_secs(60))?;
    let code = second.status.and_then(|s| s.code());
    check(code == Some(1), || {
        format!("ended with {code:?}: {}", second.stderr)
    })?;
    let clear = second.stderr.trim().lines().count() == 1
        && second.stderr.contains(&disk)
        && ["use", "lock", "another", "already"]
            .iter()
            .any(|w| second.stderr.contains(w));
    check(clear, || format!("not one clear line: {:?}", second.stderr))?;
    stage.stop()
}

fn sighup_reads_sizes_again() -> Result<(), Stop> {
    need(&["nbdinfo"])?;
    let mut stage = Stage::new(Route::Nbd, 16 * MIB)?;
    let file = std::fs::OpenOptions::new().write(true).open(stage.disk())?;
    file.set_len(24 * MIB)?;
    stage.serve().signal(Signal::HUP)?;
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let size = run_ok("nbdinfo", ["--size", &stage.uri()])?.stdout;
        if size.trim() == (24 * MIB).to_string() {
            return stage.stop();
        }
        check(Instant::now() < deadline, || {
            format!("still {} bytes", size.trim())
        })?;
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn start_prints() -> Result<(), Stop> {
    let mut stage = Stage::new(Route::Nbd, 16 * MIB)?;
    let socket = stage.nbd_socket().display().to_string();
    let lines = stage.serve().lines();
    check(lines.iter().any(|l| l.contains(&socket)), || {
        format!("no line tells where to connect: {lines:#?}")
    })?;
    check(
        lines.iter().any(|l| l.to_lowercase().contains("memory")),
        || format!("no line tells the memory bill: {lines:#?}"),
    )?;
    stage.stop()
}
