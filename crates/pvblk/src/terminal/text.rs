//! Texts that a terminal can show.

use std::borrow::Cow;
use unicode_width::UnicodeWidthChar;

/// A text of somebody else, in one line: characters that aren't printable, such as escapes, line ends and marks of writing direction, are shown as Rust writes them,
/// `\u{1b}`.
pub fn shown(text: &str) -> Cow<'_, str> {
    match text.chars().all(is_plain) {
        true => Cow::Borrowed(text),
        false => Cow::Owned(text.chars().fold(String::new(), |mut out, c| {
            match is_plain(c) {
                true => out.push(c),
                false => out.extend(c.escape_debug()),
            }
            out
        })),
    }
}

fn is_plain(c: char) -> bool {
    matches!(c, '"' | '\'' | '\\') || c.escape_debug().eq([c])
}

/// True if the locale of the environment has UTF-8.
pub fn is_utf8() -> bool {
    let set = |name| std::env::var(name).ok().filter(|v| !v.is_empty());
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set);
    locale.is_some_and(|l| {
        let l = l.to_ascii_lowercase();
        l.contains("utf-8") || l.contains("utf8")
    })
}

/// The same in ASCII, as wide as before.
pub fn ascii(text: &str) -> Cow<'_, str> {
    if text.is_ascii() {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            _ if c.is_ascii() => out.push(c),
            'µ' => out.push('u'),
            '█' => out.push('#'),
            '▓' => out.push('%'),
            '▒' => out.push('+'),
            '░' => out.push(':'),
            '·' => out.push('.'),
            '…' => out.push('~'),
            '│' => out.push('|'),
            '─' => out.push('-'),
            '↑' => out.push('^'),
            '↓' => out.push('v'),
            '←' => out.push('<'),
            '→' => out.push('>'),
            '≥' => out.push('>'),
            _ => out.extend(std::iter::repeat_n('?', c.width().unwrap_or(0))),
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_steer_the_terminal_is_shown_instead() {
        assert_eq!(
            shown("vm1 \"a\" c:\\d äöü 磁盘"),
            "vm1 \"a\" c:\\d äöü 磁盘"
        );
        assert_eq!(
            shown("a\x1b[2Jb\nc\r\t\u{7f}\u{9b}"),
            "a\\u{1b}[2Jb\\nc\\r\\t\\u{7f}\\u{9b}"
        );
        // Marks that turn the direction of what follows, or that have no width.
        assert_eq!(shown("x\u{202e}y\u{200b}z"), "x\\u{202e}y\\u{200b}z");
    }

    #[test]
    fn ascii_is_as_wide() {
        assert_eq!(ascii("12 µs █▒· ä 磁"), "12 us #+. ? ??");
        assert_eq!(ascii("plain"), "plain");
    }
}
