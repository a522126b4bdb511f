//! The NBD protocol, command by command and context by context, with libnbd's and QEMU's programs: those of this Debian, and later ones that know
//! extended headers.

use pvblk_e2e::later::Later;
use pvblk_e2e::nbd::{Connection, Reply};
use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{compare, need, run, run_ok, tool};
use pvblk_e2e::{Daemon, MIB, Stop, pattern, run_all, stage};
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;
use tempfile::TempDir;

/// The bindings of libnbd for the system's Python.
const BINDINGS: &str = "/usr/lib/python3/dist-packages/nbd.py";
const PYTHON: &str = "/usr/bin/python3";
const LIMIT: Duration = Duration::from_secs(300);
const GIB: u64 = 1 << 30;
const EINVAL: u32 = 22;

fn main() -> ExitCode {
    run_all(&[
        ("commands_by_libnbd", commands),
        ("commands_by_a_later_libnbd", later_commands),
        ("requests_that_nobody_knows", unknown),
        ("contexts_by_nbdinfo", contexts),
        ("qemu_img_sees_holes", || {
            holes(|args| Ok(run_ok("qemu-img", args)?.stdout))
        }),
        ("a_later_qemu_img_sees_holes", || {
            let later = Later::fetch()?;
            holes(|args| later.run_ok("qemu-img", args))
        }),
        ("extended_headers_are_negotiated", extended),
        ("a_map_of_more_than_4_gib_is_one_request", long_map),
        ("nbdcopy_by_extended_headers", nbdcopy),
    ])
}

const SIZE: u64 = 64 * MIB;

/// A server of a plain, a read-only and a cached disk, whose log tells of negotiations.
struct Bed {
    folder: TempDir,
    server: Daemon,
}

impl Bed {
    fn new(bytes: u64) -> Result<Bed, Stop> {
        let folder = tempfile::tempdir()?;
        let at = |name: &str| folder.path().join(name).display().to_string();
        for name in ["a.img", "ro.img", "cached.img"] {
            std::fs::File::create(folder.path().join(name))?.set_len(bytes)?;
        }
        let server = Daemon::start([
            "serve".to_owned(),
            format!("--disk=a=file:{}", at("a.img")),
            format!("--disk=ro=file:{},ro", at("ro.img")),
            format!("--disk=cached=cache:8M:file:{}", at("cached.img")),
            format!("--nbd=unix:{}", at("nbd.sock")),
            "--log=info,export::nbd=debug".to_owned(),
        ])?;
        Ok(Bed { folder, server })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.path("nbd.sock")
    }

    fn uri(&self, disk: &str) -> String {
        stage::uri(&self.socket(), disk)
    }

    /// Times that a connection of this form was agreed on, by the server's log.
    fn agreed(&self, form: &str) -> usize {
        let text = format!(": {form} headers, contexts ");
        let lines = self.server.lines();
        lines.iter().filter(|l| l.contains(&text)).count()
    }

    /// Runs the commands by a Python that has libnbd. Returns the forms of requests that this libnbd knows.
    fn commands(&self, python: impl FnOnce([String; 3]) -> Command) -> Result<String, Stop> {
        let folder = env!("CARGO_MANIFEST_DIR");
        let script = format!("{folder}/tests/nbd_conformance/commands.py");
        let socket = self.socket().display().to_string();
        let command = python([script, socket, SIZE.to_string()]);
        Ok(run(command, LIMIT)?.success()?.stdout)
    }
}

fn commands() -> Result<(), Stop> {
    if ![BINDINGS, PYTHON].iter().all(|f| Path::new(f).exists()) {
        return Stop::skip("not installed: python3-libnbd");
    }
    let mut bed = Bed::new(SIZE)?;
    let forms = bed.commands(|args| tool(PYTHON, args))?;
    check(forms.contains("simple structured"), || forms.clone())?;
    check(
        bed.agreed("Simple") > 0 && bed.agreed("Structured") > 0,
        || "the log tells of no negotiation".into(),
    )?;
    bed.server.stop()
}

fn later_commands() -> Result<(), Stop> {
    let later = Later::fetch()?;
    let mut bed = Bed::new(SIZE)?;
    let forms = bed.commands(|args| later.tool("python3", args))?;
    check(forms.contains("extended"), || forms.clone())?;
    check(bed.agreed("Extended") > 0, || {
        "no connection with extended headers".into()
    })?;
    bed.server.stop()
}

/// Bytes of a request of the compact form.
fn request(magic: u32, flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut b = magic.to_be_bytes().to_vec();
    b.extend(flags.to_be_bytes());
    b.extend(command.to_be_bytes());
    b.extend(cookie.to_be_bytes());
    b.extend(offset.to_be_bytes());
    b.extend(len.to_be_bytes());
    b
}

/// Commands that aren't known are refused and the connection goes on; bytes that are no request end it.
fn unknown() -> Result<(), Stop> {
    const MAGIC: u32 = 0x2560_9513;
    let mut bed = Bed::new(SIZE)?;
    let mut client = Connection::open(&bed.socket(), "a")?;
    let mut cookie = 0;
    for (flags, command) in [
        // A resize, which is an extension; numbers of nobody; a status without a context.
        (0, 8),
        (0, 9),
        (0, 0xffff),
        (0xffff, 9),
        (0, 7),
        // A flag of extended headers.
        (1 << 5, 0),
        (1 << 5, 7),
    ] {
        cookie += 1;
        let bytes = request(MAGIC, flags, command, cookie, 0, 512);
        client.send_bytes(&bytes)?;
        let got = client.receive()?;
        let want = Reply {
            cookie,
            error: EINVAL,
        };
        check(got == Some(want), || {
            format!("command {command} with flags {flags:#x}: {got:?}")
        })?;
    }
    check(client.read(99, 0, 512)? == [0; 512], || "other data".into())?;
    client.send_bytes(&request(MAGIC ^ 1, 0, 0, 100, 0, 512))?;
    let got = client.receive()?;
    check(got.is_none(), || format!("an answer to junk: {got:?}"))?;
    // Others go on.
    let mut next = Connection::open(&bed.socket(), "a")?;
    check(next.read(1, 0, 512)? == [0; 512], || "other data".into())?;
    bed.server.stop()
}

/// The extents that nbdinfo prints: first byte, length, flags.
fn map(json: &str) -> Result<Vec<(u64, u64, u64)>, Stop> {
    let map: Value = serde_json::from_str(json)?;
    let number = |e: &Value, key: &str| e[key].as_u64().unwrap_or(u64::MAX);
    let one = |e: &Value| (number(e, "offset"), number(e, "length"), number(e, "type"));
    Ok(map.as_array().into_iter().flatten().map(one).collect())
}

/// Fails unless the extents follow on from the first byte to the last.
fn is_whole(map: &[(u64, u64, u64)], bytes: u64) -> Result<(), Stop> {
    let mut end = 0;
    for (offset, length, _) in map {
        check(*offset == end && *length > 0, || {
            format!("they don't follow on: {map:?}")
        })?;
        end += length;
    }
    check(end == bytes, || format!("{end} bytes of {bytes}: {map:?}"))
}

fn contexts() -> Result<(), Stop> {
    need(&["nbdinfo", "qemu-io"])?;
    let mut bed = Bed::new(SIZE)?;
    let uri = bed.uri("cached");
    run_ok(
        "qemu-io",
        ["-f", "raw", "-c", "write -P 7 1M 64k", "-c", "flush", &uri],
    )?;
    for (context, in_data) in [("base:allocation", 0), ("x-pvblk:cache", 1)] {
        let arg = format!("--map={context}");
        let said = run_ok("nbdinfo", [&arg, "--json", &uri])?.stdout;
        let map = map(&said)?;
        is_whole(&map, SIZE)?;
        let at = |byte: u64| map.iter().find(|e| e.0 <= byte && byte < e.0 + e.1);
        let flags = at(MIB + 4096).map(|e| e.2);
        check(flags == Some(in_data), || format!("{context}: {map:?}"))?;
    }
    // What isn't cached can't be.
    let arg = "--map=x-pvblk:cache";
    let said = run(tool("nbdinfo", [arg, &bed.uri("a")]), LIMIT)?;
    check(said.status.is_some_and(|s| !s.success()), || {
        format!("a cache where none is: {said:?}")
    })?;
    let list = run_ok("nbdinfo", ["--json", &uri])?.stdout;
    let list: Value = serde_json::from_str(&list)?;
    let names = &list["exports"][0]["contexts"];
    check(
        names == &serde_json::json!(["base:allocation", "x-pvblk:cache"]),
        || format!("{list:#}"),
    )?;
    bed.server.stop()
}

/// `qemu-img` reads the holes of a disk, skips them in a copy, and runs a load that ends.
fn holes(qemu_img: impl Fn(&[&str]) -> Result<String, Stop>) -> Result<(), Stop> {
    need(&["qemu-img", "cmp"])?;
    let mut bed = Bed::new(6 * GIB)?;
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(bed.path("a.img"))?;
    for at in [MIB, 5 * GIB] {
        file.write_all_at(&[0x5a; MIB as usize], at)?;
    }
    let uri = bed.uri("a");
    let said = qemu_img(&["map", "-f", "raw", "--output=json", &uri])?;
    let map: Value = serde_json::from_str(&said)?;
    let data = |e: &&Value| e["data"] == true;
    let data: Vec<_> = map.as_array().into_iter().flatten().filter(data).collect();
    let places: Vec<_> = data.iter().map(|e| e["start"].as_u64()).collect();
    check(places == [Some(MIB), Some(5 * GIB)], || format!("{map:#}"))?;
    let copy = bed.path("copy.img").display().to_string();
    qemu_img(&["convert", "-f", "raw", "-O", "raw", &uri, &copy])?;
    let kept = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&copy)?) * 512;
    check(kept <= 64 * MIB, || {
        format!("the copy of 2 MiB of data takes {kept} bytes")
    })?;
    let cached = bed.uri("cached");
    // Back in, onto a disk with a cache.
    qemu_img(&["convert", "-n", "-f", "raw", "-O", "raw", &copy, &cached])?;
    for other in [&copy, &cached] {
        qemu_img(&["compare", "-f", "raw", "-F", "raw", &uri, other])?;
    }
    let bench = ["bench", "-f", "raw", "-c", "2000", "-d", "16", "-s", "8k"];
    for kind in [&[][..], &["-w", "--pattern=9", "--flush-interval=100"]] {
        let all: Vec<_> = bench.iter().chain(kind).copied().collect();
        qemu_img(&[&all[..], &[&cached]].concat())?;
    }
    bed.server.stop()
}

fn extended() -> Result<(), Stop> {
    let later = Later::fetch()?;
    let mut bed = Bed::new(SIZE)?;
    let about = later.run_ok("nbdinfo", [&bed.uri("a")])?;
    check(about.contains("using extended packets"), || about.clone())?;
    check(bed.agreed("Extended") > 0, || bed.server.lines().join("\n"))?;
    let before = bed.agreed("Extended");
    let (uri, copy) = (bed.uri("a"), bed.path("copy"));
    let copy = copy.display().to_string();
    later.run_ok("qemu-img", ["convert", "-f", "raw", &uri, &copy])?;
    check(bed.agreed("Extended") > before, || {
        "QEMU has no extended headers".into()
    })?;
    bed.server.stop()
}

/// A disk of 12 GiB whose data are at its end: by lengths of 32 bits that takes several questions.
fn long_map() -> Result<(), Stop> {
    let later = Later::fetch()?;
    let mut bed = Bed::new(12 * GIB)?;
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(bed.path("a.img"))?;
    file.write_all_at(&[1; MIB as usize], 12 * GIB - MIB)?;
    let uri = bed.uri("a");
    let mut command = later.tool("nbdinfo", ["--map", "--json", &uri]);
    // libnbd tells of each call.
    command.env("LIBNBD_DEBUG", "1");
    let said = run(command, LIMIT)?.success()?;
    let map = map(&said.stdout)?;
    let want = [(0, 12 * GIB - MIB, 3), (12 * GIB - MIB, MIB, 0)];
    check(map == want, || format!("{map:?}"))?;
    let asks = |l: &&str| l.contains("nbd_block_status_64: enter");
    let asked: Vec<_> = said.stderr.lines().filter(asks).collect();
    check(asked.len() == 1, || format!("{asked:#?}"))?;
    bed.server.stop()
}

fn nbdcopy() -> Result<(), Stop> {
    need(&["cmp"])?;
    let later = Later::fetch()?;
    let mut bed = Bed::new(SIZE)?;
    let (image, back) = (bed.path("image"), bed.path("back"));
    pattern::write(&image, SIZE, 5)?;
    let names = [&image, &back].map(|p| p.display().to_string());
    let uri = bed.uri("a");
    let many = ["--connections=4", "--requests=64", "--flush"];
    for (from, to) in [(&names[0], &uri), (&uri, &names[1])] {
        let args = many.iter().copied().chain([from.as_str(), to]);
        later.run_ok("nbdcopy", args)?;
    }
    compare(&image, &back)?;
    let others = bed.agreed("Structured") + bed.agreed("Simple");
    check(bed.agreed("Extended") >= 2 && others == 0, || {
        format!(
            "not all connections have extended headers: {:#?}",
            bed.server.lines()
        )
    })?;
    bed.server.stop()
}
