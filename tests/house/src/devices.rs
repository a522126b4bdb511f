//! Devices over other devices pass capabilities on by one mechanism (docs/decisions/0019-narrow-trait.md).

use crate::Finding;
use crate::lexer::code_only;

const IMPL: &str = "impl BlockDevice for ";

/// Checks one Rust file: a struct that holds another device implements `Decorator`, or makes its capabilities of `Forwards`. Both name every capability,
/// so that none is forgotten; `Forwards::none()` hides all, and doesn't fill up a literal.
pub fn check_devices(path: &str, text: &str) -> Vec<Finding> {
    let code = code_only(text);
    let mut findings = Vec::new();
    for (at, _) in code.match_indices(IMPL) {
        let rest = &code[at + IMPL.len()..];
        let name = rest
            .split(|c: char| !c.is_alphanumeric() && c != '_')
            .next();
        let name = name.unwrap_or_default();
        let fields = code
            .match_indices(&format!("struct {name}"))
            .map(|(i, found)| &code[i + found.len()..])
            .find(|after| after.starts_with([' ', '(', '<', '{']))
            .map_or("", item);
        if fields.contains("dyn BlockDevice") && !item(rest).contains("Forwards") {
            let line = code[..at].lines().count() + 1;
            let text = format!(
                "{name} holds another device: implement `Decorator`, or make its capabilities of `Forwards`"
            );
            findings.push(Finding::new(format!("{path}:{line}"), text));
        }
    }
    for (at, _) in code.match_indices("Forwards::none()") {
        let path_or_space = |c: char| c.is_alphanumeric() || c.is_whitespace() || "_:".contains(c);
        if code[..at].trim_end_matches(path_or_space).ends_with("..") {
            let line = code[..at].lines().count();
            let text = "hides the next new capability unnoticed: name each instead of `..Forwards::none()`";
            findings.push(Finding::new(format!("{path}:{line}"), text));
        }
    }
    findings
}

/// The text up to the end of the item's braces, or to its semicolon.
fn item(text: &str) -> &str {
    let mut depth = 0;
    for (i, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return &text[..i],
            '}' => depth -= 1,
            ';' if depth == 0 => return &text[..i],
            _ => {}
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(structure: &str, implementation: &str) -> Vec<Finding> {
        let text = format!("{structure}\nimpl BlockDevice for Over {{ {implementation} }}\n");
        check_devices("a.rs", &text)
    }

    #[test]
    fn a_device_over_a_device_decides_about_each_capability() {
        let over = "struct Over {\n    inner: Arc<dyn BlockDevice>,\n}";
        let findings = found(over, "Capabilities::none()");
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].place, "a.rs:4");
        let tuple = "pub struct Over(Box<dyn BlockDevice>);";
        assert_eq!(found(tuple, "Capabilities::none()").len(), 1);
        assert_eq!(found(over, "Forwards { a: None }.into()").len(), 0);
        assert_eq!(found("struct Over;", "Capabilities::none()").len(), 0);
        let other = "struct Overall { inner: Arc<dyn BlockDevice> }\nstruct Over { n: u8 }";
        assert_eq!(found(other, "Capabilities::none()").len(), 0);
    }

    #[test]
    fn no_literal_is_filled_up_with_hidden_capabilities() {
        let found = |text: &str| check_devices("a.rs", text);
        assert_eq!(found("fn f() -> Forwards {\n    Forwards::none()\n}\n"), []);
        assert_eq!(found("// never `..Forwards::none()`\n"), []);
        assert_eq!(found("let all = 0..9;\nlet none = Forwards::none();\n"), []);
        for rest in [
            "..Forwards::none()",
            "..pvblk_block::Forwards::none()",
            ".. Forwards::none()",
        ] {
            let text = format!("Forwards {{\n    extents: inner.extents,\n    {rest}\n}}\n");
            let findings = found(&text);
            assert_eq!(findings.len(), 1, "{rest}");
            assert_eq!(findings[0].place, "a.rs:3");
        }
    }
}
