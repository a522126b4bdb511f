//! Removes comments, strings and characters from Rust source, so that rules about code see only code.

/// The source with every comment, string and character literal blanked; line numbers are unchanged.
pub fn code_only(source: &str) -> String {
    let s = source.as_bytes();
    let mut out = Vec::with_capacity(s.len());
    let mut at = 0;
    while at < s.len() {
        let end = skipped_end(s, at);
        match end {
            Some(end) => {
                let newlines = s[at..end].iter().filter(|&&b| b == b'\n').count();
                out.push(b' ');
                out.extend(std::iter::repeat_n(b'\n', newlines));
                at = end;
            }
            None => {
                out.push(s[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// End of the comment or literal that starts at `at`; `None` if none starts there.
fn skipped_end(s: &[u8], at: usize) -> Option<usize> {
    let rest = &s[at..];
    if rest.starts_with(b"//") {
        return Some(find(s, at, b'\n').unwrap_or(s.len()));
    }
    if rest.starts_with(b"/*") {
        return Some(block_comment_end(s, at));
    }
    let in_word = at > 0 && (s[at - 1].is_ascii_alphanumeric() || s[at - 1] == b'_');
    match rest[0] {
        b'"' => Some(quoted_end(s, at, b'"')),
        b'\'' => char_end(s, at),
        b'r' | b'b' | b'c' if !in_word => raw_string_end(s, at),
        _ => None,
    }
}

fn find(s: &[u8], from: usize, byte: u8) -> Option<usize> {
    s[from..].iter().position(|&b| b == byte).map(|p| from + p)
}

fn block_comment_end(s: &[u8], at: usize) -> usize {
    let (mut depth, mut i) = (0, at);
    while i < s.len() {
        if s[i..].starts_with(b"/*") {
            depth += 1;
            i += 2;
        } else if s[i..].starts_with(b"*/") {
            depth -= 1;
            i += 2;
            if depth == 0 {
                return i;
            }
        } else {
            i += 1;
        }
    }
    s.len()
}

fn quoted_end(s: &[u8], at: usize, quote: u8) -> usize {
    let mut i = at + 1;
    while i < s.len() {
        match s[i] {
            b'\\' => i += 2,
            b if b == quote => return i + 1,
            _ => i += 1,
        }
    }
    s.len()
}

/// End of a character literal, which a closing quote distinguishes from a lifetime.
fn char_end(s: &[u8], at: usize) -> Option<usize> {
    if s.get(at + 1) == Some(&b'\\') {
        return Some(quoted_end(s, at, b'\''));
    }
    // A character has at most four bytes; a lifetime has no quote right after its first character.
    let text = std::str::from_utf8(s.get(at + 1..(at + 5).min(s.len()))?)
        .or_else(|e| std::str::from_utf8(&s[at + 1..at + 1 + e.valid_up_to()]))
        .ok()?;
    let width = text.chars().next()?.len_utf8();
    (s.get(at + 1 + width) == Some(&b'\'')).then_some(at + width + 2)
}

/// End of `r"…"`, `br#"…"#`, `cr"…"`: a raw string ends at its quote and as many hashes as at its start.
fn raw_string_end(s: &[u8], at: usize) -> Option<usize> {
    let mut i = at;
    if matches!(s[i], b'b' | b'c') {
        i += 1;
    }
    if s.get(i) != Some(&b'r') {
        return None;
    }
    i += 1;
    let hashes = s[i..].iter().take_while(|&&b| b == b'#').count();
    i += hashes;
    if s.get(i) != Some(&b'"') {
        return None;
    }
    let mut close = vec![b'"'];
    close.resize(1 + hashes, b'#');
    let body = i + 1;
    let end = s[body..].windows(close.len()).position(|w| w == close);
    Some(end.map_or(s.len(), |p| body + p + close.len()))
}

/// Line number (from 1) and text of each line of `code` that has `word` as a whole identifier.
pub fn lines_with_word<'a>(
    code: &'a str,
    word: &'a str,
) -> impl Iterator<Item = (usize, &'a str)> + 'a {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    code.lines()
        .enumerate()
        .filter(move |(_, line)| {
            line.match_indices(word).any(|(at, _)| {
                let before = line[..at].chars().next_back();
                let after = line[at + word.len()..].chars().next();
                !before.is_some_and(is_word) && !after.is_some_and(is_word)
            })
        })
        .map(|(n, line)| (n + 1, line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_is_left() {
        for hidden in [
            "// unsafe\n",
            "/* a /* nested unsafe */ unsafe */",
            r#""unsafe \" unsafe""#,
            r##"r#"unsafe " unsafe"#"##,
            r#"br"unsafe""#,
            r#"b"unsafe""#,
            "/// unsafe",
        ] {
            let source = format!("a {hidden} \nb");
            let code = code_only(&source);
            assert!(!code.contains("unsafe"), "{source:?} became {code:?}");
            assert!(code.starts_with("a ") && code.ends_with("\nb"), "{code:?}");
        }
    }

    #[test]
    fn code_after_literals_is_seen() {
        for source in [
            "let q = '\"'; unsafe {}",
            "let q = '\\''; unsafe {}",
            "fn f<'a>(x: &'a str) { unsafe {} }",
            "let s = \"\\\\\"; unsafe {}",
            "let s = r\"\\\"; unsafe {}",
            "let e = 'é'; unsafe {}",
            "/* '\" */ unsafe {}",
            "let r#type = 1; unsafe {}",
        ] {
            assert!(code_only(source).contains("unsafe"), "{source:?}");
        }
    }

    #[test]
    fn lines_keep_their_numbers() {
        let code = code_only("/*\n\n*/ \"a\nb\"\nunsafe");
        assert_eq!(lines_with_word(&code, "unsafe").next(), Some((5, "unsafe")));
    }

    #[test]
    fn words_are_whole() {
        assert_eq!(
            lines_with_word("unsafe_code not_unsafe", "unsafe").count(),
            0
        );
        assert_eq!(lines_with_word("(unsafe{", "unsafe").count(), 1);
    }
}
