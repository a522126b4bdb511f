//! The public interface of the library as text, one line for each thing that its users can name or rely on, taken from its sources.
//!
//! It is a scan of text that rustfmt has laid out, and no compiler: it knows the forms that the library's sources have. Types that implement marker traits by
//! themselves (`Send`, `Sync`) are checked in the library's own root.

use crate::interface::LIBRARY;
use crate::lexer::code_only;
use std::collections::BTreeSet;

/// The file with the interface, from the root.
pub const INTERFACE: &str = "crates/disk/interface.txt";

/// Attributes that a user of an item can tell from others.
const SEEN: [&str; 2] = ["#[derive(", "#[non_exhaustive"];

/// The interface that these files have (path from the root, text), as the lines of [`INTERFACE`].
pub fn lines(files: &[(String, String)]) -> Vec<String> {
    let of_library = files.iter().filter(|(path, _)| {
        path.strip_prefix(LIBRARY)
            .is_some_and(|name| !name.ends_with("tests.rs"))
    });
    let sources: Vec<(bool, String)> = of_library
        .map(|(path, text)| (path.ends_with("src/lib.rs"), code_only(text)))
        .collect();
    let roots = sources.iter().filter(|(is_root, _)| *is_root);
    let exported: BTreeSet<String> = roots.flat_map(|(_, code)| exports(code)).collect();
    let mut found = BTreeSet::new();
    let mut defined = BTreeSet::new();
    for (is_root, code) in &sources {
        for item in items(code) {
            let name = item.name();
            let is_shown = exported.contains(name) || *is_root && !item.head.starts_with("pub use");
            if item.head.starts_with("pub ") && is_shown {
                defined.insert(name.to_owned());
                found.extend(item.definition());
            } else if item.head.starts_with("impl") {
                found.extend(item.implementation(&exported));
            }
        }
    }
    let elsewhere = exported.difference(&defined);
    found.extend(elsewhere.map(|name| format!("pub use {name}")));
    found.into_iter().collect()
}

/// Names that a crate's root exports from its modules.
fn exports(code: &str) -> Vec<String> {
    let uses = items(code).into_iter();
    let uses = uses.filter_map(|item| Some(item.head.strip_prefix("pub use ")?.to_owned()));
    let names = uses.flat_map(|text| {
        let list = text.split_once('{').map(|(_, list)| list.to_owned());
        let names = list.unwrap_or(text);
        let names = names.trim_end_matches('}').split(',').map(|name| {
            let name = name.rsplit("::").next().unwrap_or(name);
            name.trim().to_owned()
        });
        names.collect::<Vec<_>>()
    });
    names.filter(|name| !name.is_empty()).collect()
}

/// An item without its comments.
struct Item<'a> {
    /// In one line, up to its body, without attributes.
    head: String,
    /// Attributes that its users can tell from others, each with a space after it.
    attributes: String,
    body: Option<&'a str>,
}

/// The items of a file, or of a body; those for tests are left out.
fn items(code: &str) -> Vec<Item<'_>> {
    let mut found = Vec::new();
    let (mut begin, mut depth) = (0, 0_i32);
    let mut at = 0;
    let bytes = code.as_bytes();
    while at < bytes.len() {
        match bytes[at] {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth -= 1,
            // A list of names has braces, and no body.
            b'{' if depth == 0 && one_line(&code[begin..at]).contains("use ") => depth += 1,
            b'}' => depth -= 1,
            b'{' if depth == 0 => {
                let end = end_of_body(bytes, at);
                found.extend(item(&code[begin..at], Some(&code[at + 1..end])));
                (at, begin) = (end, end + 1);
            }
            b';' if depth == 0 => {
                found.extend(item(&code[begin..at], None));
                begin = at + 1;
            }
            _ => {}
        }
        at += 1;
    }
    found
}

/// Place of the brace that closes the one at `open`.
fn end_of_body(code: &[u8], open: usize) -> usize {
    let mut depth = 0;
    for (at, byte) in code.iter().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 1 => return at,
            b'}' => depth -= 1,
            _ => {}
        }
    }
    code.len()
}

fn item<'a>(text: &str, body: Option<&'a str>) -> Option<Item<'a>> {
    let text = one_line(text);
    let (mut head, mut attributes) = (text.as_str(), String::new());
    while head.starts_with('#') {
        let (attribute, rest) = head.split_at(end_of_attribute(head));
        if attribute == "#[cfg(test)]" {
            return None;
        }
        if SEEN.iter().any(|seen| attribute.starts_with(seen)) {
            attributes += attribute;
            attributes.push(' ');
        }
        head = rest.trim_start();
    }
    Some(Item {
        head: head.to_owned(),
        attributes,
        body,
    })
}

fn end_of_attribute(text: &str) -> usize {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '[' => depth += 1,
            ']' if depth == 1 => return at + 1,
            ']' => depth -= 1,
            _ => {}
        }
    }
    text.len()
}

/// Text in one line, as rustfmt would write it if lines were long enough.
fn one_line(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let line = words.join(" ").replace("( ", "(").replace(", )", ")");
    line.replace(" )", ")").replace(", }", " }")
}

/// The parts of a list between its own commas.
fn parts(list: &str) -> Vec<String> {
    let (mut depth, mut before, mut begin) = (0, ' ', 0);
    let mut found = Vec::new();
    for (at, c) in list.char_indices() {
        match c {
            '(' | '[' | '{' | '<' => depth += 1,
            // An arrow closes nothing.
            '>' if before == '-' || before == '=' => {}
            ')' | ']' | '}' | '>' => depth -= 1,
            ',' if depth == 0 => {
                found.push(one_line(&list[begin..at]));
                begin = at + 1;
            }
            _ => {}
        }
        before = c;
    }
    found.push(one_line(&list[begin..]));
    found.retain(|part| !part.is_empty());
    found
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    let split = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    split.filter(|word| !word.is_empty())
}

/// The fields that others see; one word stands for all of the rest.
fn fields(body: &str, rest: &str) -> String {
    let (mut seen, hidden): (Vec<String>, Vec<String>) = parts(body)
        .into_iter()
        .partition(|field| words(field).next() == Some("pub") && !field.contains("pub("));
    if !hidden.is_empty() {
        seen.push(rest.to_owned());
    }
    seen.join(", ")
}

/// The text after parameters in angle brackets.
fn after_parameters(text: &str) -> &str {
    let (mut depth, mut before) = (0, ' ');
    for (at, c) in text.char_indices() {
        match c {
            '<' => depth += 1,
            '>' if before != '-' => depth -= 1,
            _ if depth == 0 => return &text[at..],
            _ => {}
        }
        before = c;
    }
    ""
}

impl Item<'_> {
    /// The word after those that say what the item is.
    fn name(&self) -> &str {
        let kinds = [
            "pub", "struct", "enum", "trait", "fn", "const", "type", "mod", "static", "unsafe",
            "async",
        ];
        words(&self.head)
            .find(|word| !kinds.contains(word))
            .unwrap_or_default()
    }

    /// The lines of a public item that is no implementation.
    fn definition(&self) -> Vec<String> {
        let line = |text: &str| format!("{}{text}", self.attributes);
        let head = self.head.as_str();
        let name = self.name();
        let body = self.body.unwrap_or_default();
        if head.starts_with("pub struct ") {
            let text = match (self.body, head.split_once('(')) {
                (Some(body), _) => format!("{head} {{ {} }}", fields(body, "..")),
                (None, Some((begin, list))) => {
                    format!("{begin}({})", fields(list.trim_end_matches(')'), "_"))
                }
                (None, None) => head.to_owned(),
            };
            return vec![line(&text)];
        }
        if head.starts_with("pub enum ") {
            let variants = parts(body).into_iter();
            let variants = variants.map(|variant| format!("{name}::{variant}"));
            return [line(head)].into_iter().chain(variants).collect();
        }
        if head.starts_with("pub trait ") || head.starts_with("pub mod ") {
            let inside = items(body).into_iter();
            let inside = inside.map(|item| format!("{name}: {}{}", item.attributes, item.head));
            return [line(head)].into_iter().chain(inside).collect();
        }
        vec![line(head)]
    }

    /// The lines of an implementation that users of exported types see.
    fn implementation(&self, exported: &BTreeSet<String>) -> Vec<String> {
        let body = items(self.body.unwrap_or_default()).into_iter();
        if self.head.contains(" for ") {
            let is_seen = words(&self.head).any(|word| exported.contains(word));
            let types = body.filter(|item| item.head.starts_with("type "));
            let types = types.map(|item| format!("{}: {}", self.head, item.head));
            let all = [self.head.clone()].into_iter().chain(types);
            return all.filter(|_| is_seen).collect();
        }
        let of = after_parameters(self.head.trim_start_matches("impl"));
        let of = words(of).next().unwrap_or_default();
        let public = body.filter(|item| item.head.starts_with("pub "));
        let public = public.map(|item| format!("{}: {}", self.head, item.head));
        public.filter(|_| exported.contains(of)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str =
        "mod a;\npub use a::{\n    Disk, Kind,\n    Trait,\n};\npub use pvblk_block::Op;\n";

    fn of(module: &str) -> Vec<String> {
        let file = |name: &str, text: &str| (format!("{LIBRARY}{name}"), text.to_owned());
        lines(&[file("a.rs", module), file("lib.rs", ROOT)])
    }

    const MODULE: &str = "
use std::fmt;
/// A disk { of; pub fn words(.
#[derive(Clone, Debug)]
#[must_use]
pub struct Disk<T> {
    // Its size.
    pub size: [u8; 4],
    map: HashMap<u8, (u8, T)>,
}
impl<T: Into<Vec<u8>>> Disk<T> {
    pub const MOST: u32 = 4;
    // Opens.
    pub fn open<F>(
        &self,
        f: F,
    ) -> Result<T, Error>
    where
        F: Fn(u8) -> u8,
    {
        if true { 1 } else { 2 };
    }
    pub(crate) fn inside(&self) {}
    fn own() {}
}
impl<T> Iterator for Disk<T> {
    type Item = u8;
    fn next(&mut self) -> Option<u8> {}
}
#[non_exhaustive]
pub enum Kind {
    // One.
    One,
    Two(u8, u16),
    Three { n: u8 },
}
pub trait Trait {
    fn must(&self);
    fn may(&self) {}
}
pub struct Hidden {
    pub n: u8,
}
impl Hidden {
    pub fn f() {}
}
impl Drop for Hidden {}
#[cfg(test)]
mod tests {
    pub struct Kind;
}
";

    #[test]
    fn all_is_listed_that_users_see() {
        let expected = [
            "#[derive(Clone, Debug)] pub struct Disk<T> { pub size: [u8; 4], .. }",
            "#[non_exhaustive] pub enum Kind",
            "Kind::One",
            "Kind::Three { n: u8 }",
            "Kind::Two(u8, u16)",
            "Trait: fn may(&self)",
            "Trait: fn must(&self)",
            "impl<T: Into<Vec<u8>>> Disk<T>: pub const MOST: u32 = 4",
            "impl<T: Into<Vec<u8>>> Disk<T>: pub fn open<F>(&self, f: F) -> Result<T, Error> where F: Fn(u8) -> u8,",
            "impl<T> Iterator for Disk<T>",
            "impl<T> Iterator for Disk<T>: type Item = u8",
            "pub trait Trait",
            "pub use Op",
        ];
        assert_eq!(of(MODULE), expected);
    }

    #[test]
    fn each_change_that_users_see_is_found() {
        let before = of(MODULE);
        for (from, to) in [
            ("#[derive(Clone, Debug)]", "#[derive(Debug)]"),
            ("#[non_exhaustive]\n", ""),
            ("pub size: [u8; 4]", "pub size: [u8; 8]"),
            ("    map: HashMap<u8, (u8, T)>,\n", ""),
            ("Into<Vec<u8>>", "Into<Vec<u16>>"),
            ("&self,\n        f: F", "&mut self,\n        f: F"),
            ("Result<T, Error>", "Result<T, String>"),
            ("MOST: u32 = 4", "MOST: u32 = 5"),
            ("Two(u8, u16)", "Two(u8, u32)"),
            ("    One,\n", ""),
            ("fn must(&self);", "fn must(&self) {}\n    fn more(&self);"),
            ("type Item = u8", "type Item = u16"),
            ("impl<T> Iterator for", "impl<T> Hash for"),
            ("    pub fn open", "    pub(crate) fn open"),
            ("    fn own", "    pub fn own"),
        ] {
            let changed = MODULE.replace(from, to);
            assert!(changed != MODULE && of(&changed) != before, "{from}");
        }
        for (from, to) in [
            ("pub n: u8", "pub n: u16"),
            ("map: HashMap", "list: HashMap"),
            ("fn own", "fn other"),
            ("// Opens.", "// Shuts."),
            ("pub fn f()", "pub fn g()"),
        ] {
            let changed = MODULE.replace(from, to);
            assert!(changed != MODULE, "{from}");
            assert_eq!(of(&changed), before, "{from}");
        }
    }
}
