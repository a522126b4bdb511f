//! The rights that the child gives up, and the system calls that are left to it.

use super::user::User;
use anyhow::{Context, Result, bail};
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope, path_beneath_rules,
};
use libc::c_long;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, Gid, Uid, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_capabilities_secure_bits,
    set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, MaskedEq, Ne};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCondition as Condition, SeccompFilter, SeccompRule,
    TargetArch,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Files of the kernel whose figures a server reads again and again: its own process, memory, control groups, CPUs.
const READABLE: [&str; 6] = [
    "/proc/self",
    "/proc/meminfo",
    "/proc/pressure",
    "/proc/sys/kernel/random/boot_id",
    "/sys/fs/cgroup",
    "/sys/devices/system",
];

/// Becomes `user` without any capability, reaches no file by its path but [`READABLE`] ones, and ends with its parent, which has this number.
pub fn give_up_rights(user: &User, parent: &str) -> Result<()> {
    // Not even a program of root's that it could run gives it any right back.
    set_no_new_privs(true).context("no_new_privs")?;
    refuse_paths().context("Landlock")?;
    become_user(user)?;
    // A change of the user takes this back, so it comes last.
    end_with(parent)
}

/// Places that Ceph's library and the C library read: configurations, keyrings, names of hosts, libraries, figures.
const LIBRARY_READS: [&str; 11] = [
    "/etc",
    "/usr",
    "/lib",
    "/lib64",
    "/opt",
    "/proc",
    "/sys",
    "/run/systemd/resolve",
    "/dev/urandom",
    "/dev/random",
    "/dev/null",
];

/// Calls that no part of a server needs, with Ceph's library or without.
const NEVER: &[c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_register,
    libc::SYS_open_by_handle_at,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_chroot,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
];

/// The first step of the process that has Ceph's library: `user` without any capability, which ends with its parent.
pub fn become_library(user: &User, parent: &str) -> Result<()> {
    set_no_new_privs(true).context("no_new_privs")?;
    become_user(user)?;
    end_with(parent)
}

/// The second one: it reads the library's places and `readable`, makes files in `folder` only, connects, binds no port, and runs nothing.
pub fn confine_library(folder: &Path, readable: &[PathBuf]) -> Result<()> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let places = LIBRARY_READS.iter().map(Path::new);
    let places = places.chain(readable.iter().map(PathBuf::as_path));
    let own = AccessFs::from_all(ABI::V1) & !AccessFs::Execute;
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))?
        .handle_access(AccessNet::BindTcp)?
        .scope(Scope::from_all(ABI::V6))?
        .create()?
        .add_rules(path_beneath_rules(places, read))?
        .add_rules(path_beneath_rules([folder], own))?
        .restrict_self()?;
    if status.ruleset == RulesetStatus::NotEnforced {
        bail!("this kernel has no Landlock, or it is off");
    }
    let rules = NEVER.iter().map(|&call| (call, vec![])).collect();
    let arch: TargetArch = std::env::consts::ARCH.try_into().context("seccomp")?;
    let denied = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, denied, arch)?;
    let filter: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter(&filter).context("seccomp")
}

/// Has the kernel end this process when its parent ends, which has this number.
fn end_with(parent: &str) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM)).context("the end with the parent")?;
    let is_parent = |pid: rustix::process::Pid| pid.as_raw_nonzero().to_string() == parent;
    if !getppid().is_some_and(is_parent) {
        bail!("the parent has ended");
    }
    Ok(())
}

fn become_user(user: &User) -> Result<()> {
    if rustix::process::geteuid().is_root() {
        let bits = CapabilitiesSecureBits::NO_ROOT | CapabilitiesSecureBits::NO_ROOT_LOCKED;
        set_capabilities_secure_bits(bits).context("secure bits")?;
        for capability in CapabilitySet::all().iter() {
            // The kernel may not know it.
            let _ = remove_capability_from_bounding_set(capability);
        }
        let (uid, gid) = (Uid::from_raw(user.user), Gid::from_raw(user.group));
        set_thread_groups(&[]).context("groups")?;
        set_thread_res_gid(gid, gid, gid).context("the group of --sandbox")?;
        set_thread_res_uid(uid, uid, uid).context("the user of --sandbox")?;
    } else if rustix::process::geteuid().as_raw() != user.user {
        bail!(
            "--sandbox: only root can serve as another user; name the user that starts the server"
        );
    }
    let _ = clear_ambient_capability_set();
    let none = CapabilitySet::empty();
    let sets = CapabilitySets {
        effective: none,
        permitted: none,
        inheritable: none,
    };
    set_capabilities(None, sets).context("capabilities")
}

/// No file is opened, made, removed or run by its path; no TCP port is bound or connected to, and no signal leaves, as far as the kernel can refuse these.
fn refuse_paths() -> Result<()> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let status = Ruleset::default()
        // The least that is of use, in Linux 5.13.
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))?
        .handle_access(AccessNet::from_all(ABI::V5))?
        .scope(Scope::from_all(ABI::V6))?
        .create()?
        .add_rules(path_beneath_rules(READABLE, read))?
        .restrict_self()?;
    if status.ruleset == RulesetStatus::NotEnforced {
        bail!(
            "this kernel has none, or it is off (`lsm=` on its command line): serve without --sandbox, or on Linux 5.13 or later"
        );
    }
    Ok(())
}

/// Lets all threads of the process make allowed calls only. Others fail with EPERM.
pub fn lock() -> Result<()> {
    let arch: TargetArch = std::env::consts::ARCH.try_into().context("seccomp")?;
    let filter = |rules, default, matched| -> Result<BpfProgram> {
        let filter = SeccompFilter::new(rules, default, matched, arch)?;
        Ok(filter.try_into()?)
    };
    // The flags of clone3 are in memory, where a filter can't see them; glibc then takes clone.
    let clone3 = BTreeMap::from([(libc::SYS_clone3, vec![])]);
    let missing = filter(
        clone3,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOSYS as u32),
    )?;
    let allowed = filter(
        allowed()?,
        SeccompAction::Errno(libc::EPERM as u32),
        SeccompAction::Allow,
    )?;
    seccompiler::apply_filter_all_threads(&missing).context("seccomp")?;
    seccompiler::apply_filter_all_threads(&allowed).context("seccomp")
}

/// Calls that are allowed with any argument.
const CALLS: &[(&str, c_long)] = &[
    // Descriptors that it has.
    ("read", libc::SYS_read),
    ("write", libc::SYS_write),
    ("readv", libc::SYS_readv),
    ("writev", libc::SYS_writev),
    ("pread64", libc::SYS_pread64),
    ("pwrite64", libc::SYS_pwrite64),
    ("preadv", libc::SYS_preadv),
    ("pwritev", libc::SYS_pwritev),
    ("preadv2", libc::SYS_preadv2),
    ("pwritev2", libc::SYS_pwritev2),
    ("lseek", libc::SYS_lseek),
    ("fallocate", libc::SYS_fallocate),
    ("fsync", libc::SYS_fsync),
    ("fdatasync", libc::SYS_fdatasync),
    ("sync_file_range", libc::SYS_sync_file_range),
    ("ftruncate", libc::SYS_ftruncate),
    ("fadvise64", libc::SYS_fadvise64),
    ("cachestat", pvblk_sys::fileio::SYS_CACHESTAT),
    ("fstat", libc::SYS_fstat),
    ("fstatfs", libc::SYS_fstatfs),
    ("flock", libc::SYS_flock),
    ("fcntl", libc::SYS_fcntl),
    ("close", libc::SYS_close),
    ("close_range", libc::SYS_close_range),
    ("dup", libc::SYS_dup),
    ("dup3", libc::SYS_dup3),
    ("getdents64", libc::SYS_getdents64),
    // Landlock decides which files: those of `READABLE`.
    ("openat", libc::SYS_openat),
    ("newfstatat", libc::SYS_newfstatat),
    ("statx", libc::SYS_statx),
    // Sockets that it has or accepts.
    ("accept4", libc::SYS_accept4),
    ("recvfrom", libc::SYS_recvfrom),
    ("recvmsg", libc::SYS_recvmsg),
    ("recvmmsg", libc::SYS_recvmmsg),
    ("shutdown", libc::SYS_shutdown),
    ("getsockopt", libc::SYS_getsockopt),
    ("setsockopt", libc::SYS_setsockopt),
    ("getsockname", libc::SYS_getsockname),
    ("getpeername", libc::SYS_getpeername),
    // Events and waiting.
    ("eventfd2", libc::SYS_eventfd2),
    ("pipe2", libc::SYS_pipe2),
    ("epoll_create1", libc::SYS_epoll_create1),
    ("epoll_ctl", libc::SYS_epoll_ctl),
    ("epoll_pwait", libc::SYS_epoll_pwait),
    ("epoll_pwait2", libc::SYS_epoll_pwait2),
    ("ppoll", libc::SYS_ppoll),
    ("timerfd_create", libc::SYS_timerfd_create),
    ("timerfd_settime", libc::SYS_timerfd_settime),
    ("timerfd_gettime", libc::SYS_timerfd_gettime),
    ("io_uring_enter", libc::SYS_io_uring_enter),
    ("io_setup", libc::SYS_io_setup),
    ("io_submit", libc::SYS_io_submit),
    ("io_getevents", libc::SYS_io_getevents),
    ("io_cancel", libc::SYS_io_cancel),
    ("io_destroy", libc::SYS_io_destroy),
    // Memory.
    ("munmap", libc::SYS_munmap),
    ("mremap", libc::SYS_mremap),
    ("madvise", libc::SYS_madvise),
    ("mincore", libc::SYS_mincore),
    ("msync", libc::SYS_msync),
    ("mlock", libc::SYS_mlock),
    ("munlock", libc::SYS_munlock),
    ("memfd_create", libc::SYS_memfd_create),
    ("brk", libc::SYS_brk),
    // Threads and time.
    ("futex", libc::SYS_futex),
    ("membarrier", libc::SYS_membarrier),
    ("rseq", libc::SYS_rseq),
    ("set_robust_list", libc::SYS_set_robust_list),
    ("sched_yield", libc::SYS_sched_yield),
    ("sched_getaffinity", libc::SYS_sched_getaffinity),
    ("sched_setaffinity", libc::SYS_sched_setaffinity),
    ("getcpu", libc::SYS_getcpu),
    ("exit", libc::SYS_exit),
    ("exit_group", libc::SYS_exit_group),
    ("clock_gettime", libc::SYS_clock_gettime),
    ("clock_getres", libc::SYS_clock_getres),
    ("clock_nanosleep", libc::SYS_clock_nanosleep),
    ("nanosleep", libc::SYS_nanosleep),
    ("gettimeofday", libc::SYS_gettimeofday),
    ("restart_syscall", libc::SYS_restart_syscall),
    // Signals of its own.
    ("rt_sigaction", libc::SYS_rt_sigaction),
    ("rt_sigprocmask", libc::SYS_rt_sigprocmask),
    ("rt_sigreturn", libc::SYS_rt_sigreturn),
    ("sigaltstack", libc::SYS_sigaltstack),
    // Figures.
    ("getpid", libc::SYS_getpid),
    ("gettid", libc::SYS_gettid),
    ("getppid", libc::SYS_getppid),
    ("getuid", libc::SYS_getuid),
    ("geteuid", libc::SYS_geteuid),
    ("getgid", libc::SYS_getgid),
    ("getegid", libc::SYS_getegid),
    ("getrandom", libc::SYS_getrandom),
    ("getrusage", libc::SYS_getrusage),
    ("sysinfo", libc::SYS_sysinfo),
    ("uname", libc::SYS_uname),
];

/// Calls of older numbers that only some machines have.
#[cfg(target_arch = "x86_64")]
const OLD_CALLS: &[(&str, c_long)] = &[
    ("poll", libc::SYS_poll),
    ("epoll_wait", libc::SYS_epoll_wait),
    ("dup2", libc::SYS_dup2),
    ("readlink", libc::SYS_readlink),
];
#[cfg(not(target_arch = "x86_64"))]
const OLD_CALLS: &[(&str, c_long)] = &[];

/// Calls that are allowed with some arguments only, and which.
#[cfg(test)]
const CONDITIONAL: &[(&str, &str)] = &[
    ("clone", "threads of this process"),
    ("clone3", "answered with ENOSYS, so that `clone` is taken"),
    ("mmap", "not executable"),
    ("mprotect", "not executable"),
    ("ioctl", "not those that type into a terminal"),
    ("tgkill", "to this process"),
    (
        "prctl",
        "the thread's name and timer slack, and names of memory",
    ),
    ("prlimit64", "reading its own limits"),
    ("socketpair", "Unix sockets of streams and packets"),
    ("sendto", "without an address"),
    ("sendmsg", "without `MSG_FASTOPEN`, which connects"),
    ("sendmmsg", "without `MSG_FASTOPEN`, which connects"),
];

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

fn allowed() -> Result<Rules> {
    let calls = CALLS.iter().chain(OLD_CALLS);
    let mut rules: Rules = calls.map(|&(_, call)| (call, vec![])).collect();
    let exec = libc::PROT_EXEC as u64;
    let not_executable = || rule([Condition::new(2, Dword, MaskedEq(exec), 0)]);
    rules.insert(libc::SYS_mmap, vec![not_executable()?]);
    rules.insert(libc::SYS_mprotect, vec![not_executable()?]);
    let thread = (libc::CLONE_THREAD | libc::CLONE_VM) as u64;
    let a_thread = rule([Condition::new(0, Qword, MaskedEq(thread), thread)])?;
    rules.insert(libc::SYS_clone, vec![a_thread]);
    rules.insert(libc::SYS_clone3, vec![]);
    let no_typing = rule([
        Condition::new(1, Dword, Ne, libc::TIOCSTI),
        Condition::new(1, Dword, Ne, libc::TIOCLINUX),
        Condition::new(1, Dword, Ne, libc::TIOCSCTTY),
    ])?;
    rules.insert(libc::SYS_ioctl, vec![no_typing]);
    let own = u64::from(std::process::id());
    let to_itself = rule([Condition::new(0, Dword, Eq, own)])?;
    rules.insert(libc::SYS_tgkill, vec![to_itself]);
    let options = [libc::PR_SET_NAME, libc::PR_SET_TIMERSLACK, PR_SET_VMA];
    let options: Result<_> = options
        .iter()
        .map(|&option| rule([Condition::new(0, Dword, Eq, option as u64)]))
        .collect();
    rules.insert(libc::SYS_prctl, options?);
    let reads = rule([Condition::new(2, Qword, Eq, 0)])?;
    rules.insert(libc::SYS_prlimit64, vec![reads]);
    // A datagram socket would send to any address.
    let pairs: Result<_> = [libc::SOCK_STREAM, libc::SOCK_SEQPACKET]
        .iter()
        .map(|&kind| {
            rule([
                Condition::new(0, Dword, Eq, libc::AF_UNIX as u64),
                Condition::new(1, Dword, MaskedEq(SOCK_TYPE_MASK), kind as u64),
            ])
        })
        .collect();
    rules.insert(libc::SYS_socketpair, pairs?);
    // A port that was shut down would be connected anew.
    let fast_open = libc::MSG_FASTOPEN as u64;
    let connects_not = |argument| Condition::new(argument, Dword, MaskedEq(fast_open), 0);
    let to_its_peer = rule([connects_not(3), Condition::new(4, Qword, Eq, 0)])?;
    rules.insert(libc::SYS_sendto, vec![to_its_peer]);
    rules.insert(libc::SYS_sendmsg, vec![rule([connects_not(2)])?]);
    rules.insert(libc::SYS_sendmmsg, vec![rule([connects_not(3)])?]);
    Ok(rules)
}

/// The bits of a socket's type without its flags (`SOCK_TYPE_MASK` of the kernel).
const SOCK_TYPE_MASK: u64 = 0xf;

/// `PR_SET_VMA` of prctl(2), by which allocators name memory.
const PR_SET_VMA: i32 = 0x5356_4d41;

fn rule<const N: usize>(
    conditions: [Result<Condition, seccompiler::BackendError>; N],
) -> Result<SeccompRule> {
    let conditions: Result<Vec<Condition>, _> = conditions.into_iter().collect();
    Ok(SeccompRule::new(conditions?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, Mode, OFlags, openat};
    use rustix::io::Errno;
    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
        SocketType, sendmsg_addr, sendto, shutdown,
    };
    use std::collections::BTreeSet;
    use std::io::{self, IoSlice};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::Command;

    /// Set for the process that locks itself up; its parent's number.
    const LOCKED_UP: &str = "PVBLK_TEST_LOCKED_UP";

    fn error<T>(result: Result<T, impl Into<io::Error>>) -> Option<i32> {
        result.err().and_then(|e| e.into().raw_os_error())
    }

    /// Sockets that the parent made: ports, whose connection is ended so that they could be connected anew, and a connection.
    struct Held {
        ports: [TcpListener; 2],
        connected: UnixStream,
        elsewhere: SocketAddr,
    }

    impl Held {
        fn new(elsewhere: &TcpListener) -> Held {
            Held {
                ports: [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap()),
                connected: UnixStream::pair().unwrap().0,
                elsewhere: elsewhere.local_addr().unwrap(),
            }
        }

        fn fast_open(&self) -> rustix::io::Result<usize> {
            shutdown(&self.ports[0], Shutdown::Both)?;
            let flags = SendFlags::from_bits_retain(libc::MSG_FASTOPEN as u32);
            sendto(&self.ports[0], b"x", flags, &self.elsewhere)
        }

        fn fast_open_by_message(&self) -> rustix::io::Result<usize> {
            shutdown(&self.ports[1], Shutdown::Both)?;
            let flags = SendFlags::from_bits_retain(libc::MSG_FASTOPEN as u32);
            let (bytes, mut none) = ([IoSlice::new(b"x")], SendAncillaryBuffer::default());
            sendmsg_addr(&self.ports[1], &self.elsewhere, &bytes, &mut none, flags)
        }

        fn send_elsewhere(&self) -> rustix::io::Result<usize> {
            let address = SocketAddrUnix::new("/run/systemd/notify")?;
            sendto(&self.connected, b"x", SendFlags::empty(), &address)
        }
    }

    /// Every attempt of hostile code with the error that it met.
    fn attempts(held: &Held) -> Vec<(&'static str, Option<i32>)> {
        let read = |path: &str| error(openat(CWD, path, OFlags::RDONLY, Mode::empty()));
        let write = |path: &str| {
            error(openat(
                CWD,
                path,
                OFlags::WRONLY | OFlags::CREATE,
                Mode::RUSR,
            ))
        };
        let parent = getppid().unwrap();
        let memory = format!("/proc/{}/mem", parent.as_raw_nonzero());
        let zero = Uid::ROOT;
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        vec![
            ("read a file", read("/etc/passwd")),
            ("read a folder", read("/")),
            (
                "read by way of /proc/self/root",
                read("/proc/self/root/etc/passwd"),
            ),
            ("read the parent's memory", read(&memory)),
            ("open a device", read("/dev/null")),
            ("make a file", write("/tmp/made-in-a-sandbox")),
            ("write its own memory", write("/proc/self/mem")),
            ("remove a file", error(std::fs::remove_file("/etc/passwd"))),
            (
                "rename a file",
                error(std::fs::rename("/etc/passwd", "/etc/x")),
            ),
            ("make a folder", error(std::fs::create_dir("/tmp/x"))),
            (
                "link",
                error(std::os::unix::fs::symlink("/etc/passwd", "/tmp/x")),
            ),
            ("run a program", error(Command::new("/bin/true").spawn())),
            (
                "connect to a port",
                error(TcpStream::connect("127.0.0.1:1")),
            ),
            ("listen at a port", error(TcpListener::bind("127.0.0.1:0"))),
            (
                "connect a port that it has by a fast open",
                error(held.fast_open()),
            ),
            ("the same by a message", error(held.fast_open_by_message())),
            ("connect to a socket", error(UnixStream::connect("/run/x"))),
            (
                "send to another address by a socket that it has",
                error(held.send_elsewhere()),
            ),
            (
                "make a socket that sends to any address",
                error(rustix::net::socketpair(
                    AddressFamily::UNIX,
                    SocketType::DGRAM,
                    SocketFlags::CLOEXEC,
                    None,
                )),
            ),
            ("listen at a socket", error(UnixListener::bind("/tmp/x"))),
            (
                "signal the parent",
                error(rustix::process::kill_process(parent, Signal::CONT)),
            ),
            ("become root", error(set_thread_res_uid(zero, zero, zero))),
            (
                "raise a limit",
                error(rustix::process::setrlimit(
                    rustix::process::Resource::Nofile,
                    limit,
                )),
            ),
            (
                "let itself be traced",
                error(rustix::process::set_dumpable_behavior(
                    rustix::process::DumpableBehavior::Dumpable,
                )),
            ),
            (
                "make an io_uring",
                error(pvblk_sys::uring::Uring::new(
                    std::sync::Arc::new(pvblk_sys::fdpass::pair().unwrap().0),
                    4,
                )),
            ),
        ]
    }

    #[test]
    fn hostile_code_gets_nowhere() {
        if let Ok(parent) = std::env::var(LOCKED_UP) {
            let user = if rustix::process::geteuid().is_root() {
                super::super::User::find("nobody").unwrap()
            } else {
                super::super::User {
                    user: rustix::process::geteuid().as_raw(),
                    group: rustix::process::getegid().as_raw(),
                }
            };
            let before = std::thread::spawn(|| {
                std::thread::park();
                error(UnixStream::connect("/run/x"))
            });
            let elsewhere = TcpListener::bind("127.0.0.1:0").unwrap();
            let held = Held::new(&elsewhere);
            give_up_rights(&user, &parent).unwrap();
            lock().unwrap();
            // A thread from before has the filter, too.
            before.thread().unpark();
            let of_before = before.join().unwrap();
            println!("attempt connect on an older thread: {of_before:?}");
            for (name, outcome) in attempts(&held) {
                println!("attempt {name}: {outcome:?}");
            }
            // All that a server needs goes on.
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            assert!(status.contains("Seccomp:\t2") && status.contains("CapBnd:\t0000000000000000"));
            std::thread::spawn(|| vec![1u8; 64 << 20]).join().unwrap();
            println!("attempts are over");
            return;
        }
        if let Err(e) = kernel_can() {
            println!("skipped: {}", pvblk_block::error_line(&*e));
            return;
        }
        let out = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "--test-threads=1"])
            .arg("sandbox::lockdown::tests::hostile_code_gets_nowhere")
            .env(LOCKED_UP, std::process::id().to_string())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(
            text.contains("attempts are over"),
            "{text}\n{}",
            String::from_utf8_lossy(&out.stderr)
        );
        let refused = [Errno::PERM, Errno::ACCESS].map(|e| format!("Some({})", e.raw_os_error()));
        let attempts: Vec<&str> = text.lines().filter(|l| l.contains("attempt ")).collect();
        assert_eq!(attempts.len(), 26, "{text}");
        for attempt in attempts {
            assert!(refused.iter().any(|r| attempt.ends_with(r)), "{attempt}");
        }
    }

    /// Fails on a kernel without Landlock, where there is no sandbox.
    fn kernel_can() -> Result<()> {
        let probe = Ruleset::default()
            .set_compatibility(CompatLevel::HardRequirement)
            .handle_access(AccessFs::from_all(ABI::V1))?
            .create();
        probe.map(drop).context("no Landlock")
    }

    #[test]
    fn calls_that_reach_out_are_not_allowed() {
        let allowed = allowed().unwrap();
        let refused = [
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_pidfd_open,
            libc::SYS_pidfd_getfd,
            libc::SYS_kill,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_listen,
            libc::SYS_io_uring_setup,
            libc::SYS_io_uring_register,
            libc::SYS_open_by_handle_at,
            libc::SYS_openat2,
            libc::SYS_unlinkat,
            libc::SYS_renameat2,
            libc::SYS_linkat,
            libc::SYS_fchmod,
            libc::SYS_fchown,
            libc::SYS_mount,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_chroot,
            libc::SYS_bpf,
            libc::SYS_perf_event_open,
            libc::SYS_userfaultfd,
            libc::SYS_keyctl,
            libc::SYS_init_module,
            libc::SYS_reboot,
            libc::SYS_setresuid,
            libc::SYS_capset,
            libc::SYS_seccomp,
            libc::SYS_process_madvise,
        ];
        for call in refused {
            assert!(!allowed.contains_key(&call), "call {call}");
        }
    }

    #[test]
    fn the_reference_lists_the_allowed_calls() {
        let page = include_str!("../../../../docs/reference/sandbox.md");
        let (_, table) = page.split_once("## System calls").unwrap();
        let listed: BTreeSet<&str> = table
            .lines()
            .filter_map(|line| line.strip_prefix("| `"))
            .filter_map(|line| line.split('`').next())
            .collect();
        let plain = CALLS.iter().chain(OLD_CALLS).map(|(name, _)| *name);
        let known: BTreeSet<&str> = plain.chain(CONDITIONAL.iter().map(|(n, _)| *n)).collect();
        let missing: Vec<_> = known.difference(&listed).collect();
        let stale: Vec<_> = listed.difference(&known).collect();
        assert!(
            missing.is_empty() && stale.is_empty(),
            "missing: {missing:?}, not allowed: {stale:?}"
        );
        assert_eq!(allowed().unwrap().len(), known.len());
    }
}
