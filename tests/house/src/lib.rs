//! Rules of the source tree. Each rule is a pure function from text to findings, and is tested with a planted
//! violation.
//!
//! `tests/tree.rs` applies them to the real tree:
//! - dependencies between crates ([`graph`]),
//! - `unsafe`, length of files, unfinished code ([`source`]),
//! - how a device over another one passes capabilities on ([`devices`]),
//! - words of comments ([`words`]),
//! - the places that open, bind and connect ([`opens`]),
//! - the library's interface, which names no type of the crates below ([`interface`]) and is written down ([`exported`]),
//! - links in documents ([`links`]).

pub mod devices;
pub mod exported;
pub mod graph;
pub mod interface;
pub mod lexer;
pub mod links;
pub mod opens;
pub mod source;
pub mod tree;
pub mod words;

/// A violation of a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// File or crate.
    pub place: String,
    /// One line: the violation, and the way to correct it.
    pub text: String,
}

impl Finding {
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
