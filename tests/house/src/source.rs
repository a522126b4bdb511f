//! Rules for source files.

use crate::Finding;
use crate::lexer::{code_only, lines_with_word};

/// The only folder that may have `unsafe`.
const UNSAFE_HOME: &str = "crates/sys/";

/// Most lines of a file that a person still reads in one go.
const MAX_LINES: usize = 700;

/// Checks one Rust file at `path`, relative to the root.
pub fn check_rust(path: &str, text: &str) -> Vec<Finding> {
    let code = code_only(text);
    let mut findings = check_length(path, text);
    let mut refuse = |line: usize, text: &str| {
        findings.push(Finding::new(format!("{path}:{line}"), text));
    };
    if !path.starts_with(UNSAFE_HOME) {
        for (line, _) in lines_with_word(&code, "unsafe") {
            refuse(
                line,
                "`unsafe` lives in crates/sys only; add a safe function there",
            );
        }
        for (line, text) in lines_with_word(&code, "unsafe_code") {
            if !text.contains("forbid") && !text.contains("deny") {
                refuse(
                    line,
                    "the lint against `unsafe` may be relaxed in crates/sys only",
                );
            }
        }
    }
    for (i, line) in text.lines().enumerate() {
        if line.contains(concat!("{e", ":#}")) {
            refuse(
                i + 1,
                "a chain printed so tells causes twice; print it with `pvblk_block::error_line`",
            );
        }
    }
    for name in ["todo", "unimplemented"] {
        for (line, text) in lines_with_word(&code, name) {
            if text.contains(&format!("{name}!")) {
                refuse(
                    line,
                    "finish it, or leave it out and say so in the documents",
                );
            }
        }
    }
    for (line, text) in lines_with_word(&code, "ignore") {
        let attribute = text.replace(' ', "");
        if attribute.contains("#[ignore") || attribute.contains("cfg_attr(") {
            refuse(
                line,
                "a test runs or doesn't exist; skip at run time, with a reason",
            );
        }
    }
    findings
}

/// Checks the length of a file.
pub fn check_length(path: &str, text: &str) -> Vec<Finding> {
    let lines = text.lines().count();
    if lines > MAX_LINES {
        let text = format!("{lines} lines; split it at a concept, {MAX_LINES} is the most");
        return vec![Finding::new(path, text)];
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> usize {
        check_rust(path, text).len()
    }

    #[test]
    fn unsafe_has_one_home() {
        let planted = "fn f() {\n    unsafe { g() }\n}\n";
        let findings = check_rust("crates/protocol/src/lib.rs", planted);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].place, "crates/protocol/src/lib.rs:2");
        assert_eq!(found("crates/sys/src/lib.rs", planted), 0);
        assert_eq!(found("crates/system/src/lib.rs", planted), 1);
        assert_eq!(
            found("fuzz/fuzz_targets/ring.rs", "unsafe impl Send for X {}"),
            1
        );
        assert_eq!(
            found("crates/protocol/src/lib.rs", "// no unsafe here\n"),
            0
        );
    }

    #[test]
    fn the_lint_is_not_relaxed_elsewhere() {
        assert_eq!(
            found("crates/protocol/src/lib.rs", "#![allow(unsafe_code)]"),
            1
        );
        assert_eq!(
            found("crates/protocol/src/lib.rs", "#![expect(unsafe_code)]"),
            1
        );
        assert_eq!(
            found("crates/protocol/src/lib.rs", "#![forbid(unsafe_code)]"),
            0
        );
        assert_eq!(found("crates/sys/src/lib.rs", "#![allow(unsafe_code)]"), 0);
    }

    #[test]
    fn nothing_is_left_unfinished() {
        assert_eq!(found("a.rs", concat!("fn f() { to", "do!() }")), 1);
        assert_eq!(
            found("a.rs", concat!("fn f() { unimpl", "emented!(\"x\") }")),
            1
        );
        assert_eq!(found("a.rs", "// todo! later"), 0);
        assert_eq!(found("a.rs", "let todo = 1;"), 0);
    }

    #[test]
    fn causes_are_told_once() {
        let planted = concat!("eprintln!(\"x: {e", ":#}\");");
        assert_eq!(found("a.rs", planted), 1);
        assert_eq!(found("a.rs", "eprintln!(\"x: {e}\");"), 0);
    }

    #[test]
    fn no_test_is_switched_off() {
        assert_eq!(found("a.rs", "#[ignore]\nfn f() {}"), 1);
        assert_eq!(found("a.rs", "#[ignore = \"slow\"]\nfn f() {}"), 1);
        assert_eq!(
            found("a.rs", "#[cfg_attr(debug_assertions, ignore)]\nfn f() {}"),
            1
        );
        assert_eq!(found("a.rs", "let ignore = 1;"), 0);
    }

    #[test]
    fn long_files_are_found() {
        assert_eq!(found("a.rs", &"\n".repeat(MAX_LINES)), 0);
        assert_eq!(found("a.rs", &"\n".repeat(MAX_LINES + 1)), 1);
    }
}
