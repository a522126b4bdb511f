//! The places of the server that open, bind and connect: the `Opener`, and those that are listed here with a reason (decision 26).

use crate::Finding;
use crate::lexer::code_only;

/// Folders that the rule is about: the command with its server, and the volumes that it opens.
const CHECKED: [&str; 2] = ["crates/pvblk/src/", "crates/volume/src/"];

/// Calls that open, bind or connect.
const CALLS: &[&str] = &[
    "File::open",
    "File::create",
    "OpenOptions",
    "DirBuilder",
    "fs::read(",
    "fs::read_to_string",
    "fs::read_dir",
    "fs::write(",
    "fs::create_dir",
    "fs::rename",
    "fs::open(",
    "openat(",
    "::bind(",
    "::connect(",
    ".connect(",
    "dial(",
    ".open_for(",
    "as_member().open()",
];

const OPENER: &str = "the Opener itself";
const COMMAND: &str = "a command that ends, and not the server";
const JOURNAL: &str = "the journal's socket, again when the journal was restarted";
const VOLUME: &str = "the way of a volume, which `Opener::volume` goes";
const KERNEL: &str = "files of the kernel that tell of a device or process";

/// Files that may have such calls, and why.
const ALLOWED: &[(&str, &str)] = &[
    ("crates/pvblk/src/opener.rs", OPENER),
    (
        "crates/pvblk/src/config/file.rs",
        "the configuration, which a reload reads by its path, too",
    ),
    ("crates/pvblk/src/log/journal.rs", JOURNAL),
    ("crates/pvblk/src/log/mod.rs", JOURNAL),
    (
        "crates/pvblk/src/wanted/store.rs",
        "files of the state, by the descriptor of its folder",
    ),
    ("crates/pvblk/src/attach.rs", COMMAND),
    ("crates/pvblk/src/bench.rs", COMMAND),
    ("crates/pvblk/src/control/client.rs", COMMAND),
    ("crates/pvblk/src/disk.rs", COMMAND),
    ("crates/pvblk/src/events/mod.rs", COMMAND),
    ("crates/pvblk/src/latency/mod.rs", COMMAND),
    ("crates/pvblk/src/raid/create.rs", COMMAND),
    ("crates/pvblk/src/raid/mod.rs", COMMAND),
    ("crates/pvblk/src/stat.rs", COMMAND),
    ("crates/pvblk/src/wanted/command.rs", COMMAND),
    ("crates/pvblk/src/xen.rs", COMMAND),
    ("crates/volume/src/spec.rs", VOLUME),
    ("crates/volume/src/spec/client.rs", VOLUME),
    ("crates/volume/src/spec/nbd.rs", VOLUME),
    ("crates/volume/src/spec/raid5.rs", VOLUME),
    ("crates/volume/src/spec/raid5/found.rs", VOLUME),
    ("crates/volume/src/spec/raid5/look.rs", VOLUME),
    ("crates/volume/src/file.rs", VOLUME),
    ("crates/volume/src/file/layout.rs", VOLUME),
    ("crates/volume/src/file/lock/holder.rs", KERNEL),
    ("crates/volume/src/file/lock/loops.rs", KERNEL),
    (
        "crates/volume/src/spec/raid5/names.rs",
        "a member that a question to an array names; past the Opener so far",
    ),
];

/// Findings in one Rust file at `path`, relative to the root.
pub fn check(path: &str, text: &str) -> Vec<Finding> {
    let is_test = path.ends_with("tests.rs") || path.contains("/tests/");
    if is_test || !CHECKED.iter().any(|folder| path.starts_with(folder)) {
        return Vec::new();
    }
    let code = code_only(text);
    // Unit tests are at the end of a file.
    let code = code.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let calls = code.lines().enumerate().filter_map(|(line, text)| {
        let call = CALLS.iter().find(|call| text.contains(**call))?;
        Some((line + 1, *call))
    });
    let is_allowed = ALLOWED.iter().any(|(place, _)| *place == path);
    let mut calls = calls.peekable();
    if is_allowed {
        return match calls.peek() {
            Some(_) => Vec::new(),
            None => vec![Finding::new(
                path,
                "it opens nothing any more: take it from the list in tests/house/src/opens.rs",
            )],
        };
    }
    let refuse = |(line, call): (usize, &str)| {
        let text = format!(
            "`{call}`: the server opens, binds and connects by its `Opener`; or list the file in tests/house/src/opens.rs, with the reason"
        );
        Finding::new(format!("{path}:{line}"), text)
    };
    calls.map(refuse).collect()
}

/// Files of the list that aren't in the tree.
pub fn check_list(paths: &[&str]) -> Vec<Finding> {
    let gone = ALLOWED.iter().filter(|(path, _)| !paths.contains(path));
    gone.map(|(path, _)| {
        Finding::new(
            *path,
            "no such file: take it from the list in tests/house/src/opens.rs",
        )
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_planted_open_is_found() {
        let planted = "fn f() {\n    let file = std::fs::File::open(path)?;\n}\n";
        for path in [
            "crates/pvblk/src/disks/adding.rs",
            "crates/volume/src/mem.rs",
        ] {
            let findings = check(path, planted);
            assert_eq!(findings.len(), 1);
            assert_eq!(findings[0].place, format!("{path}:2"));
        }
        for path in [
            "crates/pvblk/src/opener.rs",
            "crates/pvblk/src/disks/tests.rs",
            "crates/sys/src/lib.rs",
        ] {
            assert_eq!(check(path, planted), []);
        }
        let tests = format!("fn g() {{}}\n#[cfg(test)]\nmod tests {{\n{planted}}}\n");
        assert_eq!(check("crates/volume/src/mem.rs", &tests), []);
        assert_eq!(check("crates/volume/src/mem.rs", "// File::open\n"), []);
    }

    #[test]
    fn the_list_has_no_more_than_it_needs() {
        assert_eq!(check("crates/pvblk/src/opener.rs", "fn f() {}").len(), 1);
        assert_eq!(check_list(&[]).len(), ALLOWED.len());
    }
}
