//! The rules of the tree, each a pure function from text to findings, so that each is tested with a planted violation.
//!
//! `tests/tree.rs` applies them to the real tree. A rule that matters is checked here rather than by a reviewer:
//! - which crate may depend on which ([`graph`]),
//! - where `unsafe` may be written, how long a file may be, what must not be left behind ([`source`]),
//! - how a device over another one passes capabilities on ([`devices`]),
//! - that links in the documents lead somewhere ([`links`]).

pub mod devices;
pub mod graph;
pub mod lexer;
pub mod links;
pub mod source;
pub mod tree;

/// A broken rule: where, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// File or crate.
    pub place: String,
    /// What is wrong, and what to do.
    pub text: String,
}

impl Finding {
    /// A finding at `place`.
    pub fn new(place: impl Into<String>, text: impl Into<String>) -> Finding {
        Finding {
            place: place.into(),
            text: text.into(),
        }
    }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.place, self.text)
    }
}
