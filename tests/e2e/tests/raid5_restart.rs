//! An array whose server is killed under an attached front end: flushes fail where writes may be
//! lost, and nowhere else.

use pvblk_e2e::arrays::{Disks, raid, spec};
use pvblk_e2e::nbd::{Command, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::stage::unix;
use pvblk_e2e::{Daemon, Stop, run_all};
use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    run_all(&[
        ("an_array_loses_nothing_with_its_server", || {
            killed("", None, true)
        }),
        ("nor_does_it_without_a_member", || killed("", Some(1), true)),
        ("nor_with_a_write_through_cache_over_it", || {
            killed("cache:16M,mode=write-through:", None, true)
        }),
        ("a_write_back_cache_over_it_does", || {
            killed("cache:16M:", None, false)
        }),
        ("write_zeroes_trim_and_block_status_work", zeroes),
    ])
}

/// Writes, kills the server, starts it again without this member, and flushes; `safe`: that works at once, else from the second time on.
fn killed(over: &str, without: Option<usize>, safe: bool) -> Result<(), Stop> {
    let disks = Disks::new(3)?;
    let members = disks.paths(0..3);
    raid(
        &["create", "--raid-devices", "3", "--chunk", "64K"],
        &members,
    )?;
    let path = |name: &str| -> PathBuf { disks.dir.path().join(name) };
    let (local, nbd) = (unix(&path("local")), unix(&path("nbd")));
    let serve = |without| {
        let disk = format!("r={over}{}", spec(&members, without));
        Daemon::start(["serve", "--disk", &disk, "--local", &local])
    };
    let mut server = serve(None)?;
    let mut attach = Daemon::start(["attach", &local, "--disk", "r", "--nbd", &nbd])?;
    let mut client = Connection::open(&path("nbd"), "r")?;
    let mut ask = |command, data: &[u8]| -> Result<bool, Stop> {
        let at = if command == Command::Write { 4096 } else { 0 };
        client.send(command, 1, at, data)?;
        match client.receive()? {
            Some(reply) => Ok(reply.error == 0),
            None => Stop::fail("the connection ended"),
        }
    };
    let works = |is: bool, what: &str| check(is, || format!("{what} fails"));
    works(ask(Command::Write, &[1; 8192])?, "a write")?;
    works(ask(Command::Flush, &[])?, "a flush")?;
    for round in 2..4 {
        works(ask(Command::Write, &[round; 8192])?, "a write")?;
        server.kill()?;
        server = serve(without)?;
        let first = ask(Command::Flush, &[])?;
        check(first == safe, || {
            format!("round {round}: a flush after a kill says {first}")
        })?;
        works(ask(Command::Flush, &[])?, "the next flush")?;
    }
    attach.stop()?;
    server.stop()
}

/// Zeroes ranges with libnbd's own client, which uses everything that the server offers.
fn zeroes() -> Result<(), Stop> {
    use pvblk_e2e::arrays::{Served, random};
    use pvblk_e2e::tools::{compare, need, run_ok};
    need(&["nbdinfo", "nbdcopy", "cmp", "qemu-io"])?;
    let disks = Disks::new(3)?;
    let members = disks.paths(0..3);
    raid(
        &["create", "--raid-devices", "3", "--chunk", "64K"],
        &members,
    )?;
    let mut served = Served::start(&spec(&members, None))?;
    let uri = served.uri();
    let map = || -> Result<String, Stop> {
        let said = run_ok("nbdinfo", ["--map", &uri])?.stdout;
        Ok(said.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let info = run_ok("nbdinfo", ["--json", &uri])?.stdout;
    for able in ["\"can_zero\": true", "\"can_trim\": true"] {
        check(info.contains(able), || info.clone())?;
    }
    let size = 44 << 20;
    let all_hole = format!("0 {size} 3 hole,zero");
    check(map()? == all_hole, || map().unwrap_or_default())?;
    let image = disks.dir.path().join("image");
    let mut data = random(size);
    std::fs::write(&image, &data)?;
    served.write(&image)?;
    check(map()? == format!("0 {size} 0 data"), || {
        map().unwrap_or_default()
    })?;
    // Zeros anywhere, of any length; a discard from the first whole row of 128 KiB on.
    let words = [
        "write -z 513k 1537k",
        "write -zu 4M 8M",
        "discard 20500k 4M",
        "flush",
    ];
    let mut args = vec!["-f", "raw", "-d", "unmap"];
    words.iter().for_each(|w| args.extend(["-c", w]));
    args.push(&uri);
    run_ok("qemu-io", args)?;
    data[513 << 10..(513 + 1537) << 10].fill(0);
    data[4 << 20..12 << 20].fill(0);
    // Rows of 128 KiB: 161 to 192.
    data[161 * (128 << 10)..192 * (128 << 10)].fill(0);
    std::fs::write(&image, &data)?;
    let back = disks.dir.path().join("back");
    served.read(&back)?;
    compare(&image, &back)?;
    let found = map()?;
    for hole in [
        format!("{} {} 3 hole,zero", 4 << 20, 8 << 20),
        format!("{} {} 3 hole,zero", 161 * (128 << 10), 31 * (128 << 10)),
    ] {
        check(found.contains(&hole), || {
            format!("{hole:?} isn't in {found}")
        })?;
    }
    served.daemon.stop()?;
    let wrong = pvblk_e2e::arrays::wrong_stripes(&members)?;
    check(wrong == 0, || format!("{wrong} stripes with wrong parity"))
}
