//! Scripts in a Linux guest: see `tests/vm`.
//!
//! The guest is made of Debian's packages, which the first run fetches: some minutes at worst. Later ones take 2 s with
//! user-mode Linux and 5 s with QEMU, and up to 20 times longer on a busy machine: run one at a time, with generous limits.

use crate::Stop;
use crate::tools::{bound, run};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Kinds of guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// QEMU in software: Debian's kernel on two CPUs, with blktrace. Disks are `/dev/vda` and so on.
    Qemu,
    /// User-mode Linux: the fastest, one CPU, no blktrace. Disks are `/dev/ubda` and so on.
    Uml,
    /// Xen under QEMU: the script is dom0's and starts guests itself.
    Xen,
    /// Debian 12 under QEMU, booted by systemd, on two CPUs. Disks are `/dev/vdb` and so on.
    Debian,
    /// QEMU in software on one CPU, started by a libvirtd. Disks are those of [`Machine::domain`].
    Libvirt,
}

/// A machine with other disks than files.
#[derive(Clone, Debug, Default)]
pub struct Machine {
    /// Files of disks.
    pub disks: Vec<PathBuf>,
    /// Sockets of vhost-user disks, which come after those. QEMU only.
    pub vhost: Vec<PathBuf>,
    /// Queues of each vhost-user disk; 0: one.
    pub queues: usize,
    /// CPUs; 0: two.
    pub cpus: usize,
    /// Files that the script finds in `/add`, or in `/run/vm/add` of [`Kind::Debian`].
    pub added: Vec<PathBuf>,
    /// A file of XML with elements of the domain and of its devices. [`Kind::Libvirt`] only, which has no other disks.
    pub domain: Option<PathBuf>,
}

/// For the first run, which fetches packages and makes the guest.
const PREPARATION: Duration = Duration::from_secs(600);

/// A script of `tests/vm/scripts`.
pub fn named(script: &str) -> PathBuf {
    folder().join("scripts").join(script)
}

/// Path of the script that starts a guest.
pub fn starter(kind: Kind) -> PathBuf {
    folder().join(match kind {
        Kind::Qemu => "guest.sh",
        Kind::Uml => "uml.sh",
        Kind::Xen => "xen.sh",
        Kind::Debian => "debian.sh",
        Kind::Libvirt => "libvirt.sh",
    })
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm")
}

/// Runs a script as root in a guest, with these files as its disks and their paths as its arguments, and
/// returns its output. The files that it leaves in `/out` come back in `out`.
///
/// The test is skipped if this machine has no such guest, and fails if the script does or takes longer than `limit`.
pub fn script(
    kind: Kind,
    script: &Path,
    disks: &[&Path],
    out: &Path,
    limit: Duration,
) -> Result<String, Stop> {
    let machine = Machine {
        disks: disks.iter().map(|p| p.to_path_buf()).collect(),
        ..Machine::default()
    };
    script_on(kind, script, &machine, out, limit)
}

/// The same on such a machine.
pub fn script_on(
    kind: Kind,
    script: &Path,
    machine: &Machine,
    out: &Path,
    limit: Duration,
) -> Result<String, Stop> {
    // Told to stop, it ends its guest first.
    let mut command = bound(starter(kind), "TERM");
    command.stdin(Stdio::null());
    command.arg("--script").arg(script).arg("--out").arg(out);
    command.arg("--seconds").arg(limit.as_secs().to_string());
    for disk in &machine.disks {
        command.arg("--disk").arg(disk);
    }
    for file in &machine.added {
        command.arg("--add").arg(file);
    }
    if let Some(domain) = &machine.domain {
        command.arg("--with").arg(domain);
    }
    for socket in &machine.vhost {
        command.arg("--vhost").arg(socket);
    }
    for (flag, number) in [("--queues", machine.queues), ("--cpus", machine.cpus)] {
        if number > 0 {
            command.arg(flag).arg(number.to_string());
        }
    }
    // It ends the guest itself at the limit; it couldn't if it were killed.
    let finished = run(command, limit + PREPARATION)?;
    if finished.status.and_then(|s| s.code()) == Some(125) {
        let why = finished.stderr.lines().last().unwrap_or_default();
        return Stop::skip(format!("no guest: {}", why.trim_start_matches("vm: ")));
    }
    let is_broken = finished.status.and_then(|s| s.code()) == Some(123);
    finished.success().map_err(|stop| match stop {
        Stop::Fail(text) if is_broken => Stop::Emulator(text),
        stop => stop,
    })?;
    Ok(std::fs::read_to_string(out.join("log"))?)
}

/// Runs a guest, and `beside` it with a mark that is set when the guest is over.
pub fn beside<T>(
    guest: impl FnOnce() -> Result<String, Stop> + Send,
    beside: impl FnOnce(&AtomicBool) -> Result<T, Stop>,
) -> Result<(String, T), Stop> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let result = guest();
            over.store(true, Ordering::Release);
            result
        });
        let beside = beside(&over);
        let guest = guest
            .join()
            .unwrap_or_else(|_| Stop::fail("the guest's thread panicked"));
        // The guest's output explains more; a skip too.
        let said = guest?;
        beside.map(|value| (said, value))
    })
}

/// Waits until the guest has written such a `text` at `offset` of a disk, which has room for so many bytes; fails when the guest is over, or after `limit`.
pub fn wait_for(
    file: &File,
    (offset, len): (u64, usize),
    text: impl Fn(&[u8]) -> bool,
    over: &AtomicBool,
    limit: Duration,
) -> Result<(), Stop> {
    let deadline = Instant::now() + limit;
    let mut seen = vec![0; len];
    loop {
        file.read_exact_at(&mut seen, offset)?;
        if text(&seen) {
            return Ok(());
        }
        if Instant::now() > deadline || over.load(Ordering::Acquire) {
            let seen = String::from_utf8_lossy(&seen);
            return Stop::fail(format!("the guest wrote no more than {seen:?}"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::tests::{KILLED, left_by_a_killed_program, wait_for_the_end_of};

    /// The script of a guest is told to stop, or killed itself.
    #[test]
    fn a_machine_ends_with_the_program_that_started_its_script() {
        let Some(signal) = std::env::var_os(KILLED) else {
            let test = "vm::tests::a_machine_ends_with_the_program_that_started_its_script";
            for signal in ["TERM", "KILL"] {
                wait_for_the_end_of(left_by_a_killed_program(test, signal));
            }
            return;
        };
        let cache = tempfile::tempdir().unwrap();
        let script = r#"source "$0"; cache=$1 seconds=1000; limited sh -c 'echo; echo "started $$"; exec sleep 1000'"#;
        let mut command = bound("bash", &signal.to_string_lossy());
        command.arg("-c").arg(script).arg(folder().join("lib.sh"));
        let _ = command.arg(cache.path()).stdin(Stdio::null()).status();
        panic!("it lives on");
    }
}
