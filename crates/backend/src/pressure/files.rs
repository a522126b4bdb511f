//! Contents of the kernel's files, as text.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where the system mounts the hierarchies of control groups (file-hierarchy(7)).
const USUAL: &str = "/sys/fs/cgroup";

/// The control groups of this process: for each hierarchy the mounts that show them, the best one first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Groups {
    /// Mounts of the v1 memory controller.
    pub v1: Vec<Mount>,
    /// Mounts of the unified hierarchy.
    pub v2: Vec<Mount>,
}

/// A mount of a hierarchy that shows the group of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    /// The hierarchy's device number, as stat(2) has it.
    device: u64,
    /// The group's directory, and those of all groups above it that the mount shows.
    pub directories: Vec<PathBuf>,
}

impl Mount {
    /// True unless another mount covers it.
    pub fn is_reached(&self) -> bool {
        let own = self.directories.first();
        own.and_then(|d| d.metadata().ok())
            .is_some_and(|m| m.dev() == self.device)
    }
}

/// One line of `mountinfo`.
struct MountInfoLine<'a> {
    device: u64,
    /// The directory of the file system that is mounted, and the mount point.
    root: String,
    point: String,
    kind: &'a str,
    options: &'a str,
}

impl MountInfoLine<'_> {
    fn parse(line: &str) -> Option<MountInfoLine<'_>> {
        let (left, right) = line.split_once(" - ")?;
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        let (&[_, _, device, root, point, ..], &[kind, _, options, ..]) = (&left[..], &right[..])
        else {
            return None;
        };
        let (major, minor) = device.split_once(':')?;
        Some(MountInfoLine {
            device: device_number(major.parse().ok()?, minor.parse().ok()?),
            root: unescaped(root),
            point: unescaped(point),
            kind,
            options,
        })
    }
}

/// Finds a process's groups from the texts of its `cgroup` and `mountinfo` (proc(5), cgroups(7)).
///
/// A hierarchy can be mounted any number of times, also for others: in a container's tree, or of a part in which this process
/// isn't. The mount where the system has it goes first, then those that show most of the groups above, then the oldest.
pub(super) fn groups(cgroup: &str, mountinfo: &str) -> Groups {
    let lines: Vec<MountInfoLine<'_>> =
        mountinfo.lines().filter_map(MountInfoLine::parse).collect();
    let mounts = |of: &dyn Fn(&MountInfoLine<'_>) -> bool, path: Option<&str>| {
        let mut found = Vec::new();
        let Some(path) = path else { return found };
        for (n, line) in lines.iter().enumerate().filter(|(_, l)| of(l)) {
            // A later mount at the same place covers this one.
            let is_covered = lines[n + 1..].iter().any(|l| l.point == line.point);
            let Some(inside) = below(path, &line.root).filter(|_| !is_covered) else {
                continue;
            };
            let is_usual = Path::new(&line.point).starts_with(USUAL);
            let mount = Mount {
                device: line.device,
                directories: up_to_root(&line.point, inside),
            };
            found.push((!is_usual, line.root.len(), mount));
        }
        found.sort_by_key(|(unusual, root, _)| (*unusual, *root));
        found
    };
    let only = |found: Vec<(bool, usize, Mount)>| found.into_iter().map(|(_, _, m)| m).collect();
    let is_v1 =
        |l: &MountInfoLine<'_>| l.kind == "cgroup" && l.options.split(',').any(|o| o == "memory");
    let is_v2 = |l: &MountInfoLine<'_>| l.kind == "cgroup2";
    Groups {
        v1: only(mounts(&is_v1, path_of(cgroup, Some("memory")))),
        v2: only(mounts(&is_v2, path_of(cgroup, None))),
    }
}

/// As makedev(3) puts it together.
fn device_number(major: u64, minor: u64) -> u64 {
    (major & 0xfff) << 8 | (major & !0xfff) << 32 | minor & 0xff | (minor & !0xff) << 12
}

/// Blanks and backslashes in these paths are octal, such as `\\040`.
fn unescaped(text: &str) -> String {
    let mut all = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        all.push_str(before);
        let digits = after.get(..3).and_then(|d| u8::from_str_radix(d, 8).ok());
        rest = match digits {
            Some(byte) => {
                all.push(char::from(byte));
                &after[3..]
            }
            None => {
                all.push('\\');
                after
            }
        };
    }
    all + rest
}

/// The part of a group's path below a mount's root; `None` if the group isn't there.
fn below<'a>(path: &'a str, root: &str) -> Option<&'a str> {
    let inside = path.strip_prefix(root.trim_end_matches('/'))?;
    (inside.is_empty() || inside.starts_with('/')).then_some(inside)
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
fn up_to_root(point: &str, inside: &str) -> Vec<PathBuf> {
    let mut directory = PathBuf::from(point);
    directory.extend(inside.split('/').filter(|name| !name.is_empty()));
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

/// A limit in bytes: `None` for `max`, and for the number by which v1 says the same.
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

    fn directories(mounts: &[Mount]) -> Vec<Vec<String>> {
        let text = |p: &PathBuf| p.display().to_string();
        let of = |m: &Mount| m.directories.iter().map(text).collect();
        mounts.iter().map(of).collect()
    }

    #[test]
    fn groups_are_found_with_all_above_them() {
        let g = groups("4:memory:/a/b\n1:cpu:/x\n0::/\n", MOUNTS);
        let v1 = ["memory/a/b", "memory/a", "memory"].map(|d| format!("{USUAL}/{d}"));
        assert_eq!(directories(&g.v1), [v1]);
        assert_eq!(directories(&g.v2), [[format!("{USUAL}/unified")]]);
        // In a container the mount's root is the group itself.
        let g = groups(
            "0::/docker/x/y\n",
            "41 31 0:38 /docker/x /cg rw - cgroup2 cgroup2 rw\n",
        );
        assert_eq!(directories(&g.v2), [["/cg/y", "/cg"]]);
        assert!(g.v1.is_empty());
        assert!(groups("", "garbage - \n").v1.is_empty());
    }

    /// Other programs mount the same hierarchies for themselves, later than the system does.
    #[test]
    fn of_several_mounts_the_own_one_is_taken() {
        let cgroup = "4:memory:/a/b\n0::/a b\n";
        let more = "\
71 23 0:32 / /srv/guest/sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
72 23 0:32 /other /srv/guest2/memory rw - cgroup cgroup rw,memory
73 23 0:32 /a/bb /sys/fs/cgroup/bb rw - cgroup cgroup rw,memory
74 23 0:38 /a\\040b /srv/with\\040blank rw - cgroup2 none rw
75 23 0:38 / /srv/all rw - cgroup2 none rw
76 23 0:38 /.. /srv/above rw - cgroup2 none rw
";
        let g = groups(cgroup, &format!("{MOUNTS}{more}"));
        let own = |d: &str| format!("{USUAL}/{d}");
        let expected = [
            ["memory/a/b", "memory/a", "memory"].map(own),
            ["/a/b", "/a", ""].map(|d| format!("/srv/guest/sys/fs/cgroup/memory{d}")),
        ];
        assert_eq!(directories(&g.v1), expected);
        let v2 = directories(&g.v2);
        assert_eq!(v2[0], ["unified/a b", "unified"].map(own));
        assert_eq!(v2[1], ["/srv/all/a b", "/srv/all"]);
        assert_eq!(v2[2], ["/srv/with blank"]);
        assert_eq!(v2.len(), 3);
        // A mount that doesn't show this process' group isn't used, even if it is the only one.
        let stranger = more.lines().nth(1).unwrap();
        assert!(groups(cgroup, stranger).v1.is_empty());
        // A mount that another one covers isn't used either.
        let covered = format!("{MOUNTS}77 31 0:99 / {USUAL}/unified rw - tmpfs tmpfs rw\n");
        assert!(groups(cgroup, &covered).v2.is_empty());
    }

    #[test]
    fn a_mount_is_told_from_another_file_system_at_its_place() {
        let directory = std::env::temp_dir();
        let device = directory.metadata().unwrap().dev();
        let mount = |device| Mount {
            device,
            directories: vec![directory.clone()],
        };
        assert!(mount(device).is_reached() && !mount(device + 1).is_reached());
        let null = Path::new("/dev/null").metadata().unwrap().rdev();
        assert_eq!(null, device_number(1, 3));
        assert_eq!(device_number(0x1234, 0x56789), 0x0000_1000_5672_3489);
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
