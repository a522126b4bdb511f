//! The holder of a lock on a file, as far as /proc shows it (proc_pid_fdinfo(5)).

use pvblk_sys::locks;
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

/// The holder of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LockHolder {
    /// A process that lives.
    Process { pid: u32, name: String },
    /// None that lives: the kernel is at work for one that has ended.
    Ended,
    /// There are processes that we may not look at.
    Unknown,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LockHolder::Process { pid, .. } if *pid == std::process::id() => {
                write!(f, "this very process ({pid}) has it")
            }
            LockHolder::Process { pid, name } => write!(f, "process {pid} ({name}) has it"),
            LockHolder::Ended => f.write_str(
                "its last server has ended, but I/O of that server is still at work at the medium",
            ),
            LockHolder::Unknown => f.write_str("a process that can't be looked at has it"),
        }
    }
}

/// A byte that no program locks otherwise.
const OWN_BYTE: u64 = 1 << 62;

/// Looks at all processes: slow, for a refusal.
pub(super) fn find(file: BorrowedFd<'_>) -> LockHolder {
    let Some(wanted) = name_in_records(file) else {
        return LockHolder::Unknown;
    };
    let own = format!("{}", file.as_raw_fd());
    let mut hidden = false;
    let Ok(all) = std::fs::read_dir("/proc") else {
        return LockHolder::Unknown;
    };
    for process in all.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        let skip = (pid == std::process::id()).then_some(own.as_str());
        match has_lock(&process.path(), &wanted, skip) {
            Ok(true) => {
                let name = std::fs::read_to_string(process.path().join("comm"));
                let name = name.unwrap_or_default().trim().to_owned();
                return LockHolder::Process { pid, name };
            }
            Ok(false) => {}
            // One that has ended in the meantime has no lock.
            Err(e) => hidden |= e.kind() == std::io::ErrorKind::PermissionDenied,
        }
    }
    if hidden && !taker_has_ended(&wanted) {
        LockHolder::Unknown
    } else {
        LockHolder::Ended
    }
}

/// True if the process that took the `flock` on the file is no more, by the kernel's list of locks: the last word where some processes can't be looked at.
fn taker_has_ended(wanted: &str) -> bool {
    let all = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let Some(pid) = all.lines().find_map(|line| flock_taker(line, wanted)) else {
        return false;
    };
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Err(_) => true,
        // A process that has ended and waits for its parent, or for a thread in the kernel, has `Z` or `X` behind its name.
        Ok(stat) => stat
            .rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with(['Z', 'X'])),
    }
}

/// The process in a line such as `1: FLOCK ADVISORY WRITE 708 fe:00:393 0 EOF`, if the line names the file.
fn flock_taker(line: &str, wanted: &str) -> Option<u32> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    match fields[..] {
        [_, "FLOCK", _, _, pid, file, ..] if file == wanted => pid.parse().ok(),
        _ => None,
    }
}

/// The kernel's name of the file in its records of locks, such as `fe:00:393`. It is learnt from a lock of
/// our own, because some filesystems have another device number there than in `stat`.
fn name_in_records(file: BorrowedFd<'_>) -> Option<String> {
    locks::lock_shared(file, OWN_BYTE, 1).ok()?;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()));
    let _ = locks::unlock(file, OWN_BYTE, 1);
    let info = info.ok()?;
    let own = OWN_BYTE.to_string();
    let line = info.lines().find(|line| line.ends_with(&own))?;
    line.split_whitespace()
        .find(|field| field.matches(':').count() == 2)
        .map(str::to_owned)
}

/// True if the process has a lock on the file, by another descriptor than `skip`. Only the kernel's own records are read: a look at the files
/// themselves could wait for their media.
fn has_lock(process: &Path, wanted: &str, skip: Option<&str>) -> std::io::Result<bool> {
    for fd in std::fs::read_dir(process.join("fdinfo"))?.flatten() {
        if skip.is_some_and(|skip| fd.file_name() == skip) {
            continue;
        }
        let info = std::fs::read_to_string(fd.path());
        if info.is_ok_and(|text| text.lines().any(|line| is_lock_on(line, wanted))) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// True for a line such as `lock: 1: OFDLCK ADVISORY READ -1 fe:00:393 100 100` that names the file.
fn is_lock_on(line: &str, wanted: &str) -> bool {
    line.strip_prefix("lock:")
        .is_some_and(|fields| fields.split_whitespace().any(|field| field == wanted))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_line_names_a_file() {
        let line = "lock:\t1: OFDLCK ADVISORY  READ -1 fe:01:393 100 100";
        assert!(is_lock_on(line, "fe:01:393"));
        assert!(!is_lock_on(line, "fe:01:394"));
        assert!(!is_lock_on(line, "fe:00:393"));
        assert!(!is_lock_on("pos:\tfe:01:393", "fe:01:393"));
    }

    #[test]
    fn the_taker_of_a_lock_is_told_by_the_kernels_list() {
        let line = "7: FLOCK  ADVISORY  WRITE 708 fe:00:393 0 EOF";
        assert_eq!(flock_taker(line, "fe:00:393"), Some(708));
        assert_eq!(flock_taker(line, "fe:00:394"), None);
        let other = "8: OFDLCK ADVISORY  WRITE -1 fe:00:393 0 EOF";
        assert_eq!(flock_taker(other, "fe:00:393"), None);
    }

    #[test]
    fn a_lock_of_this_process_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let first = std::fs::File::create(&path).unwrap();
        let second = std::fs::File::open(&path).unwrap();
        rustix::fs::flock(&first, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let pid = std::process::id();
        let found = find(second.as_fd());
        assert!(matches!(found, LockHolder::Process { pid: p, .. } if p == pid));
        drop(first);
        assert!(!matches!(find(second.as_fd()), LockHolder::Process { .. }));
    }
}
