//! Rules for the words of doc comments.

use crate::Finding;

/// Words that begin a clause without a subject, unless the sentence is a question.
const HEADLESS: &[&str] = &["What", "Who", "Whoever", "Which", "Whether", "How"];

/// Fewest words of a doc comment: shorter ones repeat the name of the item.
const MIN_WORDS: usize = 3;

/// Checks the doc comments of the Rust file at `path`, relative to the root.
pub fn check(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (line, comment) in doc_comments(text) {
        let mut refuse = |text: String| {
            findings.push(Finding::new(format!("{path}:{line}"), text));
        };
        for sentence in sentences(&comment) {
            let first = sentence.split_whitespace().next().unwrap_or_default();
            if HEADLESS.contains(&first) && !sentence.ends_with('?') {
                refuse(format!(
                    "a sentence begins with `{first}`; begin with a noun or a verb"
                ));
            }
        }
        let words = comment.split_whitespace().count();
        if words < MIN_WORDS && !comment.contains('`') {
            refuse(format!(
                "a doc comment of {words} words; say what the name doesn't, or leave it out"
            ));
        }
    }
    findings
}

/// First line (from 1) and text of each doc comment; its lines and paragraphs are joined by spaces.
fn doc_comments(text: &str) -> Vec<(usize, String)> {
    let mut comments: Vec<(usize, String)> = Vec::new();
    let mut last = None;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim_start();
        let Some(doc) = line.strip_prefix("///").or(line.strip_prefix("//!")) else {
            continue;
        };
        match comments.last_mut() {
            Some((_, comment)) if last == Some(number - 1) => {
                comment.push(' ');
                comment.push_str(doc.trim());
            }
            _ => comments.push((number, doc.trim().to_owned())),
        }
        last = Some(number);
    }
    comments
}

/// The sentences of a comment, each with its last character, which is `.` or `?`, or the end of the comment.
fn sentences(comment: &str) -> impl Iterator<Item = &str> {
    comment
        .split_inclusive(['.', '?', '!', ':'])
        .map(str::trim)
        .filter(|s| !s.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> usize {
        check("crates/protocol/src/xenstore.rs", text).len()
    }

    #[test]
    fn headless_sentences_are_found() {
        assert_eq!(found("/// What requests may ask for.\nfn f() {}"), 1);
        assert_eq!(found("    /// Opens the ring. Who reads it waits."), 1);
        assert_eq!(found("//! How long it\n//! takes to end."), 1);
        assert_eq!(found("/// Reads a key: which of them is\n/// Which?"), 0);
        assert_eq!(found("// What requests may ask for."), 0);
        assert_eq!(found("/// Number of requests that wait."), 0);
    }

    #[test]
    fn comments_that_repeat_the_name_are_found() {
        assert_eq!(found("/// Ring.\nstruct Ring;"), 1);
        assert_eq!(found("/// Its number.\nnumber: u32,"), 1);
        assert_eq!(found("/// `struct blkif_request`.\nstruct Request;"), 0);
        assert_eq!(found("/// Length in bytes.\nlen: usize,"), 0);
    }

    #[test]
    fn lines_are_those_of_the_comments() {
        let text = "fn f() {}\n\n/// A sentence that goes on\n/// for two lines.\nfn g() {}\n/// Short.\nfn h() {}\n";
        let places: Vec<_> = check("crates/sys/src/lib.rs", text)
            .into_iter()
            .map(|f| f.place)
            .collect();
        assert_eq!(places, ["crates/sys/src/lib.rs:6"]);
    }
}
