//! Arrays over NBD servers in network namespaces: one server is cut off under load, and comes back.

use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::managed::{Managed, PATIENCE};
use pvblk_e2e::netns::{Cut, Host, need_namespaces};
use pvblk_e2e::outcome::check;
use pvblk_e2e::stage::uri;
use pvblk_e2e::tools::{compare, fio_verify, need, need_fio_nbd, run, tool};
use pvblk_e2e::{Stop, run_all};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

const PORT: u16 = 10809;
const MEMBER_MIB: u64 = 48;
/// Bytes of a member for each bit of the bitmap.
const CHUNK: u64 = 256 << 10;
/// First sector of the bitmap, after the superblock.
const BITMAP_SECTOR: usize = 16;
const BITMAP_HEADER: usize = 256;

fn main() -> ExitCode {
    run_all(&[
        ("a_server_whose_link_is_down_comes_back", || {
            cut(Cut::Link, 0, "bitmap")?;
            cut(Cut::Link, 1, "ppl")
        }),
        ("a_server_whose_packets_go_astray_comes_back", || {
            cut(Cut::Astray, 2, "ppl")?;
            cut(Cut::Astray, 0, "bitmap")
        }),
        ("a_recovery_by_the_bitmap_goes_on_after_a_kill", || {
            killed_while_recovering()
        }),
    ])
}

/// Three servers, two of them nbdkit's and one ours, and an array over them.
struct Net {
    hosts: Vec<Host>,
    files: Vec<PathBuf>,
    uris: Vec<String>,
    served: Managed,
    dir: tempfile::TempDir,
}

/// The array of these members.
fn volume(members: &[String], options: &str) -> String {
    let members: String = members.iter().map(|uri| format!("[{uri}]")).collect();
    format!("raid5:{members},{options}")
}

/// The server of member `n`, whose data is in this file.
fn server(n: usize, file: &Path, address: &str) -> Result<Command, Stop> {
    if n == 2 {
        let disk = format!("d=file:{}", file.display());
        let nbd = format!("tcp:{address}:{PORT}");
        return pvblk(["serve", "--allow-remote", "--disk", &disk, "--nbd", &nbd]);
    }
    let mut nbdkit = tool("nbdkit", ["-f", "-p", &PORT.to_string(), "file"]);
    nbdkit.arg(file);
    Ok(nbdkit)
}

impl Net {
    fn new(policy: &str, options: &str) -> Result<Net, Stop> {
        let dir = tempfile::tempdir()?;
        let (mut hosts, mut files, mut uris) = (Vec::new(), Vec::new(), Vec::new());
        for n in 0..3 {
            let file = dir.path().join(format!("m{n}"));
            std::fs::File::create(&file)?.set_len(MEMBER_MIB << 20)?;
            let mut host = Host::new(n as u32)?;
            host.serve(&server(n, &file, &host.address)?, PORT)?;
            let export = if n == 2 { "d" } else { "" };
            uris.push(format!("nbd://{}:{PORT}/{export}", host.address));
            hosts.push(host);
            files.push(file);
        }
        let mut create = pvblk(["raid", "create", "--raid-devices", "3", "--chunk", "64K"])?;
        create.args(["--consistency-policy", policy]);
        if policy == "bitmap" {
            create.args(["--bitmap-chunk", "256K"]);
        }
        create.args(&uris);
        run(create, PATIENCE)?.success()?;
        let served = Managed::of(&volume(&uris, options))?;
        served.raid("speed", &["--min", "200000", "--max", "200000"])?;
        Ok(Net {
            hosts,
            files,
            uris,
            served,
            dir,
        })
    }

    /// Verified writes and reads of some MiB of the array, and no more of them.
    fn fio(&self, args: &[&str]) -> Result<(), Stop> {
        let target = uri(&self.served.path("nbd"), "r");
        let options = [&["--bs=16k", "--iodepth=8", "--randseed=7"], args].concat();
        fio_verify(&target, &options, Duration::from_secs(240))
    }

    /// The chunks whose bits are set, as a member has them.
    fn bits(&self, member: usize) -> Result<Vec<u64>, Stop> {
        let image = std::fs::read(&self.files[member])?;
        let begin = BITMAP_SECTOR * 512 + BITMAP_HEADER;
        // The header has the sectors that it covers; bits behind them mean nothing.
        let sectors = image[BITMAP_SECTOR * 512 + 40..][..8].try_into();
        let sectors = u64::from_le_bytes(sectors.unwrap_or_default());
        let count = (sectors * 512).div_ceil(CHUNK);
        let is_set = |n: &u64| image[begin + *n as usize / 8] & 1 << (n % 8) != 0;
        Ok((0..count).filter(is_set).collect())
    }

    /// Waits until no bit is set.
    fn until_clean(&self, member: usize) -> Result<(), Stop> {
        let begin = Instant::now();
        while !self.bits(member)?.is_empty() {
            if begin.elapsed() > PATIENCE * 3 {
                return Stop::fail("the bits of the bitmap are never cleared");
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }
}

fn cut(how: Cut, member: usize, policy: &str) -> Result<(), Stop> {
    need(&["nbdkit", "nbdcopy"])?;
    need_fio_nbd()?;
    need_namespaces()?;
    let net = Net::new(policy, "member-timeout=3s,re-add=auto")?;
    let other = (member + 1) % 3;
    let whole = ["--rw=write", "--size=80M"];
    net.fio(&whole)?;
    let has_bitmap = policy == "bitmap";
    if has_bitmap {
        net.until_clean(other)?;
    }

    // The writes while it is cut off, and no others, are written to it when it is back.
    net.hosts[member].cut(how, true)?;
    let part = ["--rw=randwrite", "--offset=16M", "--size=6M"];
    net.fio(&part)?;
    let is = net.served.detail()?;
    check(
        is["missing"] == member && is["serving"]["failed"] == false,
        || is.to_string(),
    )?;
    check(is["serving"]["away"][0]["place"] == member, || {
        is.to_string()
    })?;
    // Rows have two data chunks, so 6 MiB are 3 of each member.
    let mut sectors = 6 << 20 >> 10..=u64::MAX;
    if has_bitmap {
        let missed = net.bits(other)?;
        check((12..=13).contains(&missed.len()), || format!("{missed:?}"))?;
        let all = missed.len() as u64 * CHUNK / 512;
        sectors = all..=all;
    }
    net.hosts[member].cut(how, false)?;
    let back = net.served.until("back", |d| d["degraded"] == false)?;
    let rebuilt = &back["serving"]["rebuilt"];
    let written = rebuilt["sectors"].as_u64().unwrap_or_default();
    check(
        rebuilt["by_bitmap"] == true && sectors.contains(&written) && rebuilt["place"] == member,
        || format!("{rebuilt}, and {sectors:?} were missed"),
    )?;
    net.served.parity_is_right()?;
    let read = [
        "--rw=randwrite",
        "--offset=16M",
        "--size=6M",
        "--verify_only=1",
    ];
    net.fio(&read)?;

    // The same under load all the time.
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let load = [
                "--rw=randrw",
                "--size=80M",
                "--verify_backlog=64",
                "--time_based=1",
            ];
            net.fio(&[&load[..], &["--runtime=12"]].concat())
        });
        std::thread::sleep(Duration::from_secs(2));
        net.hosts[member].cut(how, true)?;
        let gone = net.served.until("missing", |d| d["missing"] == member);
        net.hosts[member].cut(how, false)?;
        let back = net.served.until("back", |d| d["degraded"] == false)?;
        gone?;
        let rebuilt = &back["serving"]["rebuilt"];
        check(rebuilt["by_bitmap"] == true, || rebuilt.to_string())?;
        load.join().unwrap_or_else(|_| Stop::fail("the load ended"))
    })?;
    net.served.until("whole", |d| {
        d["degraded"] == false && d["serving"]["sync"].is_null()
    })?;
    net.served.parity_is_right()?;
    same_without(&net, member)
}

/// A member's server dies and comes back. The array's server is killed while it writes to that member what it missed, and the next one goes on by the
/// bitmap. Nobody writes to the array meanwhile: killed after a write without a member it isn't clean, and starts by force only.
fn killed_while_recovering() -> Result<(), Stop> {
    need(&["nbdkit", "nbdcopy"])?;
    need_fio_nbd()?;
    need_namespaces()?;
    let (member, other) = (0, 1);
    let options = "member-timeout=3s";
    let mut net = Net::new("bitmap", options)?;
    net.fio(&["--rw=write", "--size=80M"])?;
    net.until_clean(other)?;
    net.hosts[member].kill()?;
    let part = ["--rw=randwrite", "--offset=16M", "--size=24M"];
    net.fio(&part)?;
    net.served
        .until("missing", |d| d["missing"] == member as u64)?;
    let missed = net.bits(other)?;
    // Rows have two data chunks, so 24 MiB are 12 of each member.
    check((48..=49).contains(&missed.len()), || format!("{missed:?}"))?;
    let again = server(member, &net.files[member], &net.hosts[member].address)?;
    net.hosts[member].serve(&again, PORT)?;
    net.served.daemon.stop()?;

    let mut without = net.uris.clone();
    let uri = std::mem::replace(&mut without[member], "missing".into());
    net.served = Managed::of(&volume(&without, options))?;
    // 12 MiB take two minutes at this speed.
    net.served
        .raid("speed", &["--min", "100", "--max", "100"])?;
    net.served.raid("re-add", &[&uri])?;
    net.served.until("recovered in part", |d| {
        let sync = &d["serving"]["sync"];
        sync["by_bitmap"] == true && sync["done_bytes"].as_u64() > Some(2 * CHUNK)
    })?;
    net.served.daemon.kill()?;
    let left = net.bits(other)?;
    check(!left.is_empty(), || "nothing is left".into())?;

    net.served = Managed::of(&volume(&net.uris, options))?;
    net.served
        .raid("speed", &["--min", "200000", "--max", "200000"])?;
    let back = net.served.until("whole", |d| {
        d["degraded"] == false && d["serving"]["sync"].is_null()
    })?;
    let rebuilt = &back["serving"]["rebuilt"];
    let most = missed.len() as u64 * CHUNK / 512;
    let sectors = rebuilt["sectors"].as_u64().unwrap_or_default();
    check(
        rebuilt["by_bitmap"] == true && (1..=most).contains(&sectors),
        || format!("{rebuilt}, and {most} sectors were missed"),
    )?;
    net.served.parity_is_right()?;
    net.fio(&[&part[..], &["--verify_only=1"]].concat())?;
    same_without(&net, member)
}

/// The array holds the same whichever member is asked.
fn same_without(net: &Net, member: usize) -> Result<(), Stop> {
    let copy = |name: &str| net.dir.path().join(name);
    let read = |to: &Path| net.served.read(to);
    read(&copy("with"))?;
    let other = (member + 1) % 3;
    net.served.raid("fail", &[&other.to_string()])?;
    read(&copy("without"))?;
    compare(&copy("with"), &copy("without"))
}
