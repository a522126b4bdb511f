//! The places of the server that open, bind and connect: the `Opener`, and those that are listed here with a reason (decision 26).

use crate::Finding;
use crate::lexer::code_only;

/// Folders that the rule is about: the command with its server, and the crates that are in it.
const CHECKED: [&str; 9] = [
    "crates/pvblk/src/",
    "crates/volume/src/",
    "crates/block/src/",
    "crates/backend/src/",
    "crates/cache/src/",
    "crates/raid5/src/",
    "crates/export/src/",
    "crates/client/src/",
    "crates/web/src/",
];

/// Calls that open, bind, connect, or look something up by its path.
const CALLS: &[&str] = &[
    "File::open",
    "File::create",
    "OpenOptions",
    "DirBuilder",
    "fs::read(",
    "fs::read_to_string",
    "fs::read_dir",
    "fs::read_link(",
    "fs::write(",
    "fs::create_dir",
    "fs::rename",
    "fs::remove_",
    "fs::metadata(",
    "fs::symlink_metadata(",
    "fs::canonicalize",
    "fs::open(",
    "fs::stat(",
    "fs::mkdir(",
    "openat(",
    "renameat(",
    "glob_with(",
    "::bind(",
    "::connect(",
    ".connect(",
    "dial(",
];

/// Calls that open volumes in this process. The server's `Opener` gives volumes their own.
const VOLUMES: &[&str] = &[
    "in_process(",
    "Need::default()",
    "SpecNames::default()",
    "FileVolume::open(",
    "volume::open(",
    "as_member().open()",
];

/// Calls that only the server must not make: a volume opens those below it, for the need that it got.
const SERVER: &str = "crates/pvblk/src/";
const OF_VOLUMES: &[&str] = &[".open_for("];

const OPENER: &str = "the Opener itself";
const COMMAND: &str = "a command that ends, and not the server";
const ATTACH: &str =
    "a server with one disk, which is another server's and is connected to for as long as it runs";
const PAGE: &str = "the process of `pvblk web`, which is no server of disks";
const SOCKETS: &str = "makes the sockets and Xen's channels that the `Opener` hands out";
const XEN: &str =
    "Xen's own devices and event channels: each guest needs new ones for as long as it runs";
const REMOTE: &str = "a volume of another server, which connects again for as long as it is used, by the `Dialer` of its `Need`";
const DIALER: &str = "the `Dialer` of this process itself";
const IMAGES: &str =
    "a disk of the process that has Ceph's library, for the need of the volume that it stands for";
const CEPH: &str = "a volume of Ceph's library, which connects for itself";
const CREDENTIALS: &str = "the `CredentialReader` of this process itself";
const KERNEL: &str = "the kernel's figures of this process and its control group";
const STEP: &str = "a step of a handshake has the name of a call; it opens nothing";
const PARENT: &str = "the parent of a server in a sandbox, whose duty it is";
const TESTS: &str = "built for tests only";
const ALONE: &str = "opening without a server, for commands and other programs";

/// Files that may have such calls, and why.
const ALLOWED: &[(&str, &str)] = &[
    ("crates/pvblk/src/opener.rs", OPENER),
    ("crates/volume/src/opener.rs", OPENER),
    ("crates/volume/src/opener/holder.rs", OPENER),
    ("crates/volume/src/opener/loops.rs", OPENER),
    ("crates/export/src/socket_file.rs", SOCKETS),
    ("crates/export/src/nbd/listener.rs", SOCKETS),
    ("crates/export/src/nbd/server.rs", SOCKETS),
    ("crates/export/src/local/server.rs", SOCKETS),
    ("crates/export/src/vhost_user/server.rs", SOCKETS),
    ("crates/export/src/xen/xenstore.rs", SOCKETS),
    ("crates/export/src/xen/toolstack.rs", COMMAND),
    ("crates/export/src/xen/hypervisor.rs", XEN),
    ("crates/export/src/xenbus/backend.rs", STEP),
    ("crates/backend/src/pressure/limit.rs", KERNEL),
    ("crates/backend/src/pressure/sources.rs", KERNEL),
    ("crates/backend/src/pressure/watermark.rs", KERNEL),
    ("crates/client/src/nbd/model.rs", TESTS),
    ("crates/client/src/nbd/credentials.rs", CREDENTIALS),
    ("crates/client/src/dial.rs", DIALER),
    ("crates/client/src/rbd/clusters.rs", CEPH),
    ("crates/client/src/rings/handshake.rs", STEP),
    ("crates/client/src/vhost_user/mod.rs", REMOTE),
    ("crates/client/src/vhost_user/resume.rs", REMOTE),
    ("crates/volume/src/spec/nbd.rs", REMOTE),
    ("crates/pvblk/src/sandbox/library.rs", PARENT),
    ("crates/pvblk/src/sandbox/parent.rs", PARENT),
    ("crates/pvblk/src/sandbox/policy.rs", PARENT),
    ("crates/pvblk/src/sandbox/servers.rs", PARENT),
    ("crates/pvblk/src/sandbox/user.rs", PARENT),
    ("crates/pvblk/src/attach.rs", ATTACH),
    ("crates/pvblk/src/bench.rs", COMMAND),
    ("crates/pvblk/src/control/client.rs", COMMAND),
    ("crates/pvblk/src/disk.rs", COMMAND),
    ("crates/pvblk/src/events/mod.rs", COMMAND),
    ("crates/pvblk/src/manual.rs", COMMAND),
    ("crates/pvblk/src/latency/mod.rs", COMMAND),
    ("crates/pvblk/src/raid/create.rs", COMMAND),
    ("crates/pvblk/src/raid/detail.rs", COMMAND),
    ("crates/pvblk/src/raid/examine.rs", COMMAND),
    ("crates/pvblk/src/raid/mod.rs", COMMAND),
    ("crates/pvblk/src/raid/offline.rs", COMMAND),
    ("crates/pvblk/src/raid/scan.rs", COMMAND),
    ("crates/pvblk/src/report/mod.rs", COMMAND),
    ("crates/pvblk/src/stat.rs", COMMAND),
    ("crates/pvblk/src/trace/timeline.rs", COMMAND),
    ("crates/pvblk/src/top/feed.rs", COMMAND),
    ("crates/pvblk/src/wanted/command.rs", COMMAND),
    ("crates/pvblk/src/xen.rs", COMMAND),
    ("crates/pvblk/src/web/backing.rs", PAGE),
    ("crates/pvblk/src/web/metrics/snapshot.rs", PAGE),
];

/// Files that may have one of the calls and no other, and why.
const ONE_CALL: &[(&str, &str, &str)] = &[
    ("crates/volume/src/file.rs", "in_process(", ALONE),
    ("crates/client/src/local/front.rs", "in_process(", ALONE),
    ("crates/client/src/nbd/mod.rs", "in_process(", ALONE),
    ("crates/pvblk/src/sandbox/images.rs", ".open_for(", IMAGES),
    ("crates/volume/src/spec.rs", "Need::default()", ALONE),
    ("crates/volume/src/spec/raid5.rs", "Need::default()", ALONE),
    ("crates/volume/src/spec/client.rs", "in_process(", ALONE),
    ("crates/volume/src/spec/client.rs", "::connect(", REMOTE),
];

/// Findings in one Rust file at `path`, relative to the root.
pub fn check(path: &str, text: &str) -> Vec<Finding> {
    let is_test = path.ends_with("tests.rs") || path.contains("/tests/");
    if is_test || !CHECKED.iter().any(|folder| path.starts_with(folder)) {
        return Vec::new();
    }
    let code = code_only(text);
    let code = without_tests(&code);
    let of_server: &[&str] = match path.starts_with(SERVER) {
        true => OF_VOLUMES,
        false => &[],
    };
    let known = || CALLS.iter().chain(VOLUMES).chain(of_server);
    let calls: Vec<(usize, &str)> = code
        .lines()
        .enumerate()
        .flat_map(|(line, text)| {
            let here = known().filter(move |call| text.contains(**call));
            here.map(move |call| (line + 1, *call))
        })
        .collect();
    let gone = |what: &str| {
        let text = format!("{what}: take it from the list in tests/house/src/opens.rs");
        Finding::new(path, text)
    };
    if ALLOWED.iter().any(|(place, _)| *place == path) {
        return match calls.is_empty() {
            true => vec![gone("it opens nothing any more")],
            false => Vec::new(),
        };
    }
    let ones = || ONE_CALL.iter().filter(|(place, ..)| *place == path);
    let unused = ones().filter(|(_, call, _)| calls.iter().all(|(_, found)| found != call));
    let unused = unused.map(|(_, call, _)| gone(&format!("it has no `{call}` any more")));
    let refuse = |(line, call): (usize, &str)| {
        let text = format!(
            "`{call}`: the server opens, binds and connects by its `Opener`; or list the file in tests/house/src/opens.rs, with the reason"
        );
        Finding::new(format!("{path}:{line}"), text)
    };
    let others = calls.iter().copied();
    let others = others.filter(|(_, call)| ones().all(|(_, may, _)| may != call));
    unused.chain(others.map(refuse)).collect()
}

/// The code before the unit tests, which are at the end of a file or in one of their own.
fn without_tests(code: &str) -> &str {
    const MARK: &str = "#[cfg(test)]\nmod ";
    let is_here = |at: usize| {
        let line = code[at + MARK.len()..].lines().next();
        line.is_some_and(|line| line.ends_with('{'))
    };
    let mut marks = code.match_indices(MARK);
    let tests = marks.find(|(at, _)| is_here(*at));
    tests.map_or(code, |(at, _)| &code[..at])
}

/// Files of the lists that aren't in the tree.
pub fn check_list(paths: &[&str]) -> Vec<Finding> {
    let listed = ALLOWED.iter().map(|(path, _)| *path);
    let listed = listed.chain(ONE_CALL.iter().map(|(path, ..)| *path));
    let gone = listed.filter(|path| !paths.contains(path));
    gone.map(|path| {
        Finding::new(
            path,
            "no such file: take it from the list in tests/house/src/opens.rs",
        )
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN: &str = "fn f() {\n    let file = std::fs::File::open(path)?;\n}\n";

    #[test]
    fn a_planted_open_is_found() {
        for path in [
            "crates/pvblk/src/disks/adding.rs",
            "crates/pvblk/src/config/file.rs",
            "crates/pvblk/src/log/journal.rs",
            "crates/pvblk/src/wanted/store.rs",
            "crates/volume/src/file/layout.rs",
            "crates/volume/src/spec/raid5/names.rs",
            "crates/raid5/src/found.rs",
            "crates/web/src/token.rs",
        ] {
            let findings = check(path, OPEN);
            assert_eq!(findings.len(), 1);
            assert_eq!(findings[0].place, format!("{path}:2"));
        }
        for path in [
            "crates/pvblk/src/opener.rs",
            "crates/pvblk/src/disks/tests.rs",
            "crates/sys/src/lib.rs",
        ] {
            assert_eq!(check(path, OPEN), []);
        }
        let tests = format!("fn g() {{}}\n#[cfg(test)]\nmod tests {{\n{OPEN}}}\n");
        assert_eq!(check("crates/volume/src/mem.rs", &tests), []);
        let tests_apart = format!("#[cfg(test)]\nmod tests;\n{OPEN}");
        assert_eq!(check("crates/volume/src/mem.rs", &tests_apart).len(), 1);
        assert_eq!(check("crates/volume/src/mem.rs", "// File::open\n"), []);
    }

    #[test]
    fn each_way_past_the_opener_is_found() {
        for call in CALLS.iter().chain(VOLUMES) {
            let planted = format!("fn f() {{ {call} }}\n");
            for path in ["crates/pvblk/src/serve.rs", "crates/volume/src/mem.rs"] {
                assert!(!check(path, &planted).is_empty(), "{call} in {path}");
            }
        }
        let open_for = "fn f() { spec.open_for(&need) }\n";
        assert_eq!(check("crates/pvblk/src/serve.rs", open_for).len(), 1);
        assert_eq!(check("crates/volume/src/mem.rs", open_for), []);
    }

    #[test]
    fn a_file_that_may_make_one_call_may_make_no_other() {
        let may = "fn f() { opener::in_process() }\n";
        let path = "crates/volume/src/file.rs";
        assert_eq!(check(path, may), []);
        assert_eq!(check(path, &format!("{may}{OPEN}")).len(), 1);
        assert_eq!(check(path, "fn f() {}").len(), 1);
    }

    #[test]
    fn the_list_has_no_more_than_it_needs() {
        assert_eq!(check("crates/pvblk/src/opener.rs", "fn f() {}").len(), 1);
        assert_eq!(check_list(&[]).len(), ALLOWED.len() + ONE_CALL.len());
    }
}
