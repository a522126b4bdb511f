//! The recipes of docs/guide/recipes.md that need more than a command line: a libvirtd starts a guest with the elements that the page has.

use pvblk_e2e::hops::until;
use pvblk_e2e::outcome::check;
use pvblk_e2e::{Daemon, MIB, Stop, need_release, run_all, stage, tools, vm};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// A limit that only a hang reaches.
const GUEST_TIME: Duration = Duration::from_secs(1200);

fn main() -> ExitCode {
    run_all(&[("libvirt_starts_a_guest_on_served_disks", libvirt)])
}

/// The page's blocks of XML, with this folder in the place of the page's.
fn domain(dir: &Path) -> Result<String, Stop> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/recipes.md");
    let page = std::fs::read_to_string(page)?;
    let blocks: Vec<&str> = page
        .split("```xml\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .collect();
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
    until(|| Ok(server.lines().iter().any(|l| l.contains("connected"))))?;
    round_after(told, before + 1, over)?;
    told.write_all_at(b"stop", 0)?;
    Ok(server)
}
