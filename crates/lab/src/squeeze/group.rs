//! A limited control group, and a swap file, both removed at the end.

use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Folder of the memory controller of version 1.
const V1: &str = "/sys/fs/cgroup/memory";

/// A group of the v1 memory controller.
pub struct Group(PathBuf);

impl Group {
    /// A new group without a limit. Errors say what this machine lacks.
    pub fn new(name: &str) -> Result<Group> {
        let base = Path::new(V1);
        ensure!(
            base.join("memory.limit_in_bytes").exists(),
            "no memory controller of cgroup v1 at {V1}: the experiment needs one"
        );
        let path = base.join(format!("pvblk-{name}-{}", std::process::id()));
        std::fs::create_dir(&path)
            .with_context(|| format!("making {}: is this root?", path.display()))?;
        Ok(Group(path))
    }

    /// Sets the limit in bytes; `None` removes it.
    pub fn limit(&self, bytes: Option<u64>) -> Result<()> {
        let text = bytes.map_or("-1".to_owned(), |b| b.to_string());
        std::fs::write(self.0.join("memory.limit_in_bytes"), text).context("setting a limit")
    }

    /// Bytes charged to the group.
    pub fn usage(&self) -> Result<u64> {
        let text = std::fs::read_to_string(self.0.join("memory.usage_in_bytes"))?;
        text.trim().parse().context("reading the group's usage")
    }

    /// Number of processes of the group that were killed because no memory could be freed.
    pub fn kills(&self) -> u64 {
        let text = std::fs::read_to_string(self.0.join("memory.oom_control")).unwrap_or_default();
        let line = text.lines().find_map(|l| l.strip_prefix("oom_kill "));
        line.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
    }

    /// A command whose process is in the group from its first instruction on.
    pub fn command(&self, program: &Path, args: &[String]) -> Result<Command> {
        let mut command = Command::new("sh");
        let procs = self.0.join("cgroup.procs");
        command
            .arg("-c")
            .arg(r#"echo $$ > "$0" && exec "$@""#)
            .arg(procs)
            .arg(program)
            .args(args);
        Ok(command)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for _ in 0..200 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        tracing::warn!("{} can't be removed", self.0.display());
    }
}

/// A swap file that is in use until it is dropped.
pub struct Swap(PathBuf);

impl Swap {
    /// Makes a swap file and uses it. Errors if there is swap already: its use would be counted,
    /// too.
    pub fn on(dir: &Path, bytes: u64) -> Result<Swap> {
        let swaps = std::fs::read_to_string("/proc/swaps").context("reading /proc/swaps")?;
        ensure!(
            swaps.lines().count() <= 1,
            "there is swap already: switch it off for the experiment"
        );
        let path = dir.join("swap");
        let shown = path.display().to_string();
        // The file has blocks and no holes: the kernel takes no file with holes.
        run("fallocate", &["-l", &bytes.to_string(), &shown])?;
        let swap = Swap(path);
        run("chmod", &["600", &shown])?;
        run("mkswap", &[&shown])?;
        run("swapon", &[&shown])?;
        Ok(swap)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let shown = self.0.display().to_string();
        if let Err(e) = run("swapoff", &[&shown]) {
            tracing::warn!("{}", pvblk_block::error_line(&*e));
        }
        let _ = std::fs::remove_file(&self.0);
    }
}

fn run(program: &str, args: &[&str]) -> Result<()> {
    let path = format!(
        "{}:/usr/sbin:/sbin",
        std::env::var("PATH").unwrap_or_default()
    );
    let done = Command::new(program)
        .args(args)
        .env("PATH", path)
        .output()
        .with_context(|| format!("running {program}"))?;
    if !done.status.success() {
        bail!(
            "{program} {}: {}",
            args.join(" "),
            String::from_utf8_lossy(&done.stderr).trim()
        );
    }
    Ok(())
}

/// Pages swapped in and out since the machine started.
pub fn swapped() -> Result<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/vmstat").context("reading /proc/vmstat")?;
    let of = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name));
        line.and_then(|n| n.trim().parse().ok())
            .with_context(|| format!("/proc/vmstat has no {name}"))
    };
    Ok((of("pswpin ")?, of("pswpout ")?))
}

/// Major faults of a process so far: field 12 of `stat` (proc(5)).
pub fn major_faults(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = text.rsplit_once(") ").map_or("", |(_, f)| f);
    let field = fields.split(' ').nth(9);
    field.and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Resident bytes of a process (`statm`).
pub fn resident(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
    Some(pages * 4096)
}
