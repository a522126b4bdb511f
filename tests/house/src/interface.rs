//! The interface of the library: it names no type of the crates that it is made of (docs/decisions/0044-library.md).

use crate::Finding;
use crate::lexer::code_only;

/// The folder of the library's sources.
pub const LIBRARY: &str = "crates/disk/src/";

/// Checks the file of the library at `path`. A public item, up to its body, names nothing that comes from another crate of pvblk; nor does the head of an
/// implementation of a trait, of which `From` for an error below is the likeliest.
pub fn check(path: &str, text: &str) -> Vec<Finding> {
    if !path.starts_with(LIBRARY) || path.ends_with("tests.rs") {
        return Vec::new();
    }
    let code = code_only(text);
    let code = code.split("#[cfg(test)]").next().unwrap_or_default();
    let below = imported(code);
    let mut findings = Vec::new();
    let mut look = |number: usize, head: &str| {
        let mut words = head.split(|c: char| !c.is_alphanumeric() && c != '_');
        if let Some(name) = words.find(|w| w.starts_with("pvblk_") || below.iter().any(|b| b == w))
        {
            let text = format!(
                "a public item names `{name}` of another crate of pvblk: give the library a type of its own"
            );
            findings.push(Finding::new(format!("{path}:{number}"), text));
        }
    };
    let (mut head, mut all_is_public) = (String::new(), false);
    for (number, line) in (1..).zip(code.lines()) {
        let begin = line.trim_start();
        if all_is_public {
            all_is_public = line != "}";
            look(number, line);
        } else if !head.is_empty() || begin.starts_with("pub ") || begin.starts_with("impl") {
            head.push_str(line);
            let balanced = head.matches('(').count() <= head.matches(')').count();
            if balanced && (line.contains(['{', ';']) || line.ends_with(',')) {
                all_is_public = ["pub enum", "pub trait"]
                    .iter()
                    .any(|w| head.starts_with(w));
                let is_use = head.trim_start().starts_with("pub use");
                let end = if is_use { None } else { head.find('{') };
                look(number, &head[..end.unwrap_or(head.len())]);
                head.clear();
            }
        }
    }
    findings
}

/// Names that a file imports from other crates of pvblk.
fn imported(code: &str) -> Vec<String> {
    let mut names = Vec::new();
    for (at, _) in code.match_indices("use pvblk_") {
        let text = &code[at..];
        let import = text.split(';').next().unwrap_or_default();
        let last = import.rsplit("::").next().unwrap_or_default();
        let of_list = import.split_once('{').map_or(last, |(_, list)| list);
        for name in of_list.split([',', '}']) {
            let name = name.rsplit(" as ").next().unwrap_or(name).trim();
            let name = name.rsplit("::").next().unwrap_or(name);
            names.extend((!name.is_empty()).then(|| name.to_owned()));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    const USE: &str = "use pvblk_block::{Op,\n    Status as S, trace::Tracing};\nuse std::fmt;\n";

    fn found(text: &str) -> Vec<String> {
        let all = check("crates/disk/src/queue.rs", &format!("{USE}{text}"));
        all.into_iter().map(|f| f.to_string()).collect()
    }

    #[test]
    fn types_of_other_crates_are_found() {
        for leak in [
            "pub fn op(&self) -> Op {\n",
            "pub fn op(\n    &self,\n    tracing: &Tracing,\n) -> u8 {\n",
            "pub struct A(pub S);\n",
            "pub struct A {\n    pub op: Op,\n}\n",
            "pub use pvblk_block::Queue;\n",
            "pub use pvblk_block::{Queue, Request};\n",
            "pub enum A {\n    First,\n    Second(Op),\n}\n",
            "impl From<pvblk_block::Error> for Error {\n",
            "impl From<Op> for Error {\n",
            "impl A {\n    pub fn of(a: pvblk_sys::Buffer) {}\n}\n",
        ] {
            assert_eq!(found(leak).len(), 1, "{leak}");
        }
    }

    #[test]
    fn the_inside_may_use_them() {
        for fine in [
            "pub(crate) fn op(&self) -> Op {\n",
            "fn op(op: Op) {\n",
            "pub struct A {\n    op: Op,\n    n: u8,\n}\n",
            "pub fn f(&self) -> u8 {\n    Op::Read as u8\n}\n",
            "/// An Op of Status.\npub fn f(&self) -> u8 {\n",
            "impl A {\n    fn f(op: Op) {}\n}\n",
        ] {
            assert_eq!(found(fine), Vec::<String>::new(), "{fine}");
        }
        assert!(check("crates/bench/src/run.rs", "pub use pvblk_block::Op;\n").is_empty());
    }
}
