//! The recipes of docs/guide/recipes.md that need more than a command line: a libvirtd starts a guest with the elements that the page has.

use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{bound, need, run, run_ok, wait, wait_for};
use pvblk_e2e::{Daemon, MIB, Stop, daemon, need_release, package, run_all, stage, tools, vm};
use rustix::process::geteuid;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ExitCode, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// A limit that only a hang reaches.
const GUEST_TIME: Duration = Duration::from_secs(1200);

fn main() -> ExitCode {
    run_all(&[
        ("libvirt_starts_a_guest_on_served_disks", libvirt),
        ("services_show_a_disk_as_files", files),
    ])
}

/// The page's blocks with this mark.
fn blocks(mark: &str) -> Result<Vec<String>, Stop> {
    let page = package::tree().join("docs/guide/recipes.md");
    let page = std::fs::read_to_string(page)?;
    let begin = format!("```{mark}\n");
    let blocks = page.split(begin.as_str()).skip(1);
    let blocks = blocks.filter_map(|rest| rest.split("```").next());
    Ok(blocks.map(str::to_owned).collect())
}

/// The page's XML, with this folder in the place of the page's.
fn domain(dir: &Path) -> Result<String, Stop> {
    let blocks = blocks("xml")?;
    check(blocks.len() == 3, || format!("{} blocks", blocks.len()))?;
    let text = blocks.concat();
    check(text.contains("/run/pvblk/"), || text.clone())?;
    Ok(text.replace("/run/pvblk/", &format!("{}/", dir.display())))
}

/// The vhost-user disk's server; the one of the NBD disk runs on while this one is killed.
fn server(dir: &Path) -> Result<Daemon, Stop> {
    let volume = format!("vm1=delay:5ms:file:{}", dir.join("vm1.img").display());
    let socket = format!("vm1={}", stage::unix(&dir.join("vm1.sock")));
    let words = ["--vhost-user", &socket, "--max-queues", "4"];
    Daemon::start(["serve", "--disk", &volume].iter().chain(&words))
}

/// The number of a round that the guest has told of; 0: of none.
fn round(bytes: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(bytes);
    let number = text.lines().next().and_then(|l| l.strip_prefix("round "));
    number.and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Waits until the guest has told on the NBD disk of a round after this one. Returns its number.
fn round_after(file: &File, before: u64, over: &AtomicBool) -> Result<u64, Stop> {
    const PLACE: (u64, usize) = (MIB - 512, 24);
    vm::wait_for(file, PLACE, |seen| round(seen) > before, over, GUEST_TIME)?;
    let mut bytes = [0; PLACE.1];
    file.read_exact_at(&mut bytes, PLACE.0)?;
    Ok(round(&bytes))
}

/// fio verifies rounds of writes on the vhost-user disk and tells of them on the NBD disk, while the first one's server is killed and started again.
fn libvirt() -> Result<(), Stop> {
    need_release()?;
    tools::need(&["libvirtd", "virsh", "qemu-system-x86_64"])?;
    let folder = tempfile::tempdir()?;
    let dir = folder.path();
    let make = |name: &str, bytes: u64| -> Result<File, Stop> {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true);
        let file = options.open(dir.join(name))?;
        file.set_len(bytes)?;
        Ok(file)
    };
    let disk = make("vm1.img", 8 * MIB)?;
    let told = make("vm2.img", 8 * MIB)?;
    std::fs::write(dir.join("domain"), domain(dir)?)?;
    let volume = format!("vm2=file:{}", dir.join("vm2.img").display());
    let nbd = stage::unix(&dir.join("nbd.sock"));
    let mut other = Daemon::start(["serve", "--disk", &volume, "--nbd", &nbd])?;
    let first = server(dir)?;
    let machine = vm::Machine {
        domain: Some(dir.join("domain")),
        ..vm::Machine::default()
    };
    let out = dir.join("out");
    let script = vm::named("vhost-kill.sh");
    let guest = || vm::script_on(vm::Kind::Libvirt, &script, &machine, &out, GUEST_TIME);
    let (said, mut server) = vm::beside(guest, |over| restarted(dir, first, &told, over))?;
    check(said.lines().any(|l| l == "all well"), || said.clone())?;
    let mut written = vec![0; 4096];
    disk.read_exact_at(&mut written, MIB)?;
    check(written.iter().any(|b| *b != 0), || {
        "the guest wrote nothing to the vhost-user disk".into()
    })?;
    server.stop()?;
    other.stop()
}

/// Kills the server when the guest has begun, starts another, and ends the guest when that one has served two rounds more.
fn restarted(
    dir: &Path,
    mut first: Daemon,
    told: &File,
    over: &AtomicBool,
) -> Result<Daemon, Stop> {
    round_after(told, 0, over)?;
    first.kill()?;
    let before = round_after(told, 0, over)?;
    let server = server(dir)?;
    wait_for("the guest connects", || {
        Ok(server.lines().iter().any(|l| l.contains("connected")))
    })?;
    round_after(told, before + 1, over)?;
    told.write_all_at(b"stop", 0)?;
    Ok(server)
}

/// A unit of the page: its name, and its lines.
struct Unit {
    name: String,
    lines: Vec<String>,
}

/// A limit that only a hang reaches.
const HANG: Duration = Duration::from_secs(120);

impl Unit {
    /// Units begin with a remark that has their path.
    fn of(block: &str) -> Result<Unit, Stop> {
        let lines: Vec<String> = block.lines().map(str::to_owned).collect();
        let name = lines
            .first()
            .and_then(|l| l.strip_prefix("# /etc/systemd/system/"));
        let name = name.ok_or_else(|| Stop::Fail(format!("no unit's path: {lines:?}")))?;
        let name = name.to_owned();
        Ok(Unit { name, lines })
    }

    /// A shell's words for its command of this kind, with folders below `dir` in the place of the page's; empty if it has none.
    fn command(&self, key: &str, dir: &Path) -> String {
        let line = self
            .lines
            .iter()
            .find_map(|l| l.strip_prefix(key)?.strip_prefix('='));
        // A failure of one with a `-` doesn't count, and `$$` stands for a `$`.
        let line = line
            .unwrap_or_default()
            .trim_start_matches('-')
            .replace("$$", "$");
        let here = |place: &str| dir.join(place).display().to_string();
        let line = line.replace("/run/pvblk/", &format!("{}/", dir.display()));
        let line = line.replace("/run/data-disk", &here("disk"));
        line.replace("/srv/data", &here("files"))
    }

    fn run(&self, key: &str, dir: &Path) -> Result<(), Stop> {
        let command = self.command(key, dir);
        run_ok("sh", ["-c", &command]).map(drop)
    }

    /// As systemd starts it.
    fn start(&self, dir: &Path) -> Result<Child, Stop> {
        self.run("ExecStartPre", dir)?;
        let command = format!("exec {}", self.command("ExecStart", dir));
        let mut started = bound("sh", "TERM");
        started.args(["-c", &command]).stdin(Stdio::null());
        let mut child = started.spawn()?;
        if let Err(e) = self.run("ExecStartPost", dir) {
            let _ = child.kill();
            let _ = child.wait();
            return Err(e);
        }
        Ok(child)
    }

    /// As systemd stops it, which sends no signal to a process that has ended by then.
    fn stop(&self, mut child: Child, dir: &Path) -> Result<(), Stop> {
        self.run("ExecStop", dir)?;
        let status = wait(&mut child, HANG)?;
        check(status.is_some_and(|s| s.success()), || {
            format!("{}: {status:?}", self.name)
        })
    }
}

/// systemd finds no mistake in the units, and their commands do what the page says.
fn files() -> Result<(), Stop> {
    need(&[
        "nbdfuse",
        "fuse2fs",
        "mkfs.ext4",
        "e2fsck",
        "fusermount3",
        "mountpoint",
    ])?;
    need(&["systemd-analyze"])?;
    if !Path::new("/dev/fuse").exists() {
        return Stop::skip("there is no /dev/fuse");
    }
    if !geteuid().is_root() {
        return Stop::skip("only root lets others see a mounted disk");
    }
    let units: Result<Vec<Unit>, Stop> = blocks("ini")?.iter().map(|b| Unit::of(b)).collect();
    let units = units?;
    let [disk, files] = &units[..] else {
        return Stop::fail("the page has other units");
    };
    let folder = tempfile::tempdir()?;
    let dir = folder.path();
    verify(&units)?;
    for place in ["disk", "files"] {
        std::fs::create_dir(dir.join(place))?;
    }
    let done = rounds(disk, files, dir);
    for unit in [files, disk] {
        if done.is_err() {
            let _ = unit.run("ExecStopPost", dir);
        }
    }
    done?;
    run_ok(
        "e2fsck",
        ["-fn", &dir.join("data.img").display().to_string()],
    )
    .map(drop)
}

/// Starts both, writes, and stops both, three times: each finds what the one before wrote.
fn rounds(disk: &Unit, files: &Unit, dir: &Path) -> Result<(), Stop> {
    let volume = format!("data=file:{},size=64M", dir.join("data.img").display());
    let nbd = stage::unix(&dir.join("nbd.sock"));
    let mut server = Daemon::start(["serve", "--disk", &volume, "--nbd", &nbd])?;
    let note = dir.join("files/note");
    let (seed, mut told) = (pvblk_testing::seed(), String::new());
    for round in 0..3 {
        let shown = disk.start(dir)?;
        if round == 0 {
            run_ok(
                "mkfs.ext4",
                ["-q", &dir.join("disk/data").display().to_string()],
            )?;
        }
        let mounted = files.start(dir)?;
        check(
            round == 0 || std::fs::read_to_string(&note)? == told,
            || format!("round {round}: the file has other contents"),
        )?;
        told = format!("round {round}, {seed:x}");
        std::fs::write(&note, &told)?;
        files.stop(mounted, dir)?;
        disk.stop(shown, dir)?;
        // Nothing is left to be cleared away.
        check(!note.exists() && !dir.join("disk/data").exists(), || {
            "it is mounted still".into()
        })?;
    }
    server.stop()
}

/// Has systemd read the units, beside the package's own.
fn verify(units: &[Unit]) -> Result<(), Stop> {
    let folder = tempfile::tempdir()?;
    let own = std::fs::read_to_string(package::tree().join("dist/systemd/pvblk.service"))?;
    let program = daemon::binary()?.canonicalize()?;
    let own = own.replace("/usr/bin/pvblk", &program.display().to_string());
    std::fs::write(folder.path().join("pvblk.service"), own)?;
    let mut words = vec!["verify".to_owned(), "--man=no".to_owned()];
    for unit in units {
        let path = folder.path().join(&unit.name);
        std::fs::write(&path, unit.lines.join("\n"))?;
        words.push(path.display().to_string());
    }
    let told = run(tools::tool("systemd-analyze", words), HANG)?.success()?;
    let said = told.stdout + &told.stderr;
    let about = |line: &str| units.iter().any(|u| line.contains(&u.name)) || line.contains("pvblk");
    check(!said.lines().any(about), || said.clone())
}
