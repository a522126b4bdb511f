//! The amount of memory for this process.

use super::files;
use std::path::{Path, PathBuf};

/// Bytes of memory that this process may have: the machine's, or the lowest limit of its control groups.
/// `None` if neither is known.
pub fn memory_limit() -> Option<u64> {
    limit_in(Path::new("/proc"))
}

/// The lowest limit in bytes that a control group of this process has, or one above it; `None`: there is none.
pub fn group_limit() -> Option<u64> {
    groups_in(Path::new("/proc"))
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap_or_default()
}

fn limit_in(proc: &Path) -> Option<u64> {
    let machine = files::number_of(&read(&proc.join("meminfo")), "MemTotal");
    groups_in(proc).into_iter().chain(machine).min()
}

fn groups_in(proc: &Path) -> Option<u64> {
    let read = |name: &str| read(&proc.join(name));
    let groups = files::groups(&read("self/cgroup"), &read("self/mountinfo"));
    let directories = |mounts: &[files::Mount]| -> Vec<PathBuf> {
        let reached = mounts.iter().find(|m| m.is_reached());
        reached.map_or_else(Vec::new, |m| m.directories.clone())
    };
    let (v1, v2) = (directories(&groups.v1), directories(&groups.v2));
    let v1 = v1.iter().map(|g| g.join("memory.limit_in_bytes"));
    let v2 = v2.iter().map(|g| g.join("memory.max"));
    let limits = v1.chain(v2).filter_map(|file| {
        let text = std::fs::read_to_string(file).ok()?;
        files::limit(&text)
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_counts() {
        let dir = std::env::temp_dir().join(format!("pvblk-limit-{}", std::process::id()));
        let at = |name: &str| dir.join(name);
        std::fs::create_dir_all(at("self")).unwrap();
        std::fs::create_dir_all(at("cg/a/b")).unwrap();
        std::fs::write(at("meminfo"), "MemTotal: 1024 kB\n").unwrap();
        assert_eq!(limit_in(&dir), Some(1 << 20));
        let device = std::os::unix::fs::MetadataExt::dev(&at("cg").metadata().unwrap());
        let (major, minor) = (device >> 8 & 0xfff, device & 0xff | device >> 12 & !0xff);
        let mount = format!(
            "41 31 {major}:{minor} / {} rw - cgroup2 cgroup2 rw\n",
            at("cg").display()
        );
        std::fs::write(at("self/mountinfo"), mount).unwrap();
        std::fs::write(at("self/cgroup"), "0::/a/b\n").unwrap();
        std::fs::write(at("cg/a/b/memory.max"), "max\n").unwrap();
        std::fs::write(at("cg/a/memory.max"), "524288\n").unwrap();
        assert_eq!(limit_in(&dir), Some(1 << 19));
        assert_eq!(limit_in(&at("nowhere")), None);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
