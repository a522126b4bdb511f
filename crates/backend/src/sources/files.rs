//! What the kernel's files say, as text.

use std::path::{Path, PathBuf};

/// A control group of this process, or one above it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Groups {
    /// Directories of the v1 memory controller, from the innermost.
    pub v1: Vec<PathBuf>,
    /// Directories of the unified hierarchy, from the innermost.
    pub v2: Vec<PathBuf>,
}

/// Finds a process's groups from the texts of its `cgroup` and `mountinfo` (proc(5), cgroups(7)).
pub(super) fn groups(cgroup: &str, mountinfo: &str) -> Groups {
    let mut found = Groups {
        v1: Vec::new(),
        v2: Vec::new(),
    };
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else {
            continue;
        };
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        let (&[_, _, _, root, point, ..], &[kind, _, options, ..]) = (&left[..], &right[..]) else {
            continue;
        };
        let is_memory = options.split(',').any(|o| o == "memory");
        let (path, to) = match kind {
            "cgroup" if is_memory => (path_of(cgroup, Some("memory")), &mut found.v1),
            "cgroup2" => (path_of(cgroup, None), &mut found.v2),
            _ => continue,
        };
        if let Some(path) = path {
            *to = up_to_root(point, root, path);
        }
    }
    found
}

fn path_of<'a>(cgroup: &'a str, controller: Option<&str>) -> Option<&'a str> {
    cgroup.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let ours = match controller {
            Some(name) => controllers.split(',').any(|c| c == name),
            None => controllers.is_empty(),
        };
        ours.then_some(path)
    })
}

/// The group's directory and all above it that the mount shows.
fn up_to_root(point: &str, root: &str, path: &str) -> Vec<PathBuf> {
    let inside = path.strip_prefix(root.trim_end_matches('/')).unwrap_or("");
    let mut directory = Path::new(point).join(inside.trim_start_matches('/'));
    let mut all = vec![directory.clone()];
    while directory != Path::new(point) && directory.pop() {
        all.push(directory.clone());
    }
    all
}

/// The number after `key` in lines of `key number`, as in `memory.stat` and, with a colon and kB, in `meminfo`.
pub(super) fn number_of(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let rest = line.strip_prefix(key)?;
        let rest = rest.strip_prefix(':').unwrap_or(rest);
        if !rest.starts_with([' ', '\t']) {
            return None;
        }
        let mut words = rest.split_whitespace();
        let number: u64 = words.next()?.parse().ok()?;
        Some(match words.next() {
            Some("kB") => number * 1024,
            _ => number,
        })
    })
}

/// A limit, in bytes: `None` for `max`, and for v1's way to say the same.
pub(super) fn limit(text: &str) -> Option<u64> {
    let bytes: u64 = text.trim().parse().ok()?;
    (bytes < 1 << 60).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn groups_are_found_with_all_above_them() {
        let g = groups("4:memory:/a/b\n1:cpu:/x\n0::/\n", MOUNTS);
        let dir = |s: &str| PathBuf::from(format!("/sys/fs/cgroup/{s}"));
        assert_eq!(g.v1, [dir("memory/a/b"), dir("memory/a"), dir("memory")]);
        assert_eq!(g.v2, [dir("unified")]);
        // In a container the mount's root is the group itself.
        let g = groups(
            "0::/docker/x/y\n",
            "41 31 0:38 /docker/x /cg rw - cgroup2 cgroup2 rw\n",
        );
        assert_eq!(g.v2, [PathBuf::from("/cg/y"), PathBuf::from("/cg")]);
        assert!(g.v1.is_empty());
        assert!(groups("", "garbage - \n").v1.is_empty());
    }

    #[test]
    fn numbers_are_found_by_whole_keys() {
        let text = "inactive_file 12\ntotal_inactive_file 34\n";
        assert_eq!(number_of(text, "inactive_file"), Some(12));
        assert_eq!(number_of(text, "total_inactive_file"), Some(34));
        assert_eq!(number_of(text, "inactive"), None);
        assert_eq!(
            number_of("MemAvailable:  23 kB\n", "MemAvailable"),
            Some(23 << 10)
        );
        assert_eq!(limit("max\n"), None);
        assert_eq!(limit("9223372036854771712\n"), None);
        assert_eq!(limit("1048576\n"), Some(1 << 20));
    }
}
