//! Numbers and cells as text.

use crate::terminal::shown;
use ratatui_core::style::{Modifier, Style};
use ratatui_core::text::{Line, Span};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// A number in at most five places: `0`, `3.2`, `812`, `45.2k`.
pub fn count(value: f64) -> String {
    let steps = [(1e9, "G"), (1e6, "M"), (1e3, "k")];
    for (size, name) in steps {
        // What would be rounded up to the step is shown in it.
        if value >= size * 0.9995 {
            return format!("{}{name}", digits(value / size));
        }
    }
    match value {
        v if v < 0.05 => "0".to_owned(),
        v if v < 99.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

fn digits(value: f64) -> String {
    match value {
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// A time in nanoseconds in at most six places: `812ns`, `12.3µs`; `-` for none.
pub fn time(ns: u64) -> String {
    let value = ns as f64;
    match value {
        0.0 => "-".to_owned(),
        v if v < 999.5 => format!("{v:.0}ns"),
        v if v < 999.5e3 => format!("{}µs", digits(v / 1e3)),
        v if v < 999.5e6 => format!("{}ms", digits(v / 1e6)),
        v => format!("{}s", digits(v / 1e9)),
    }
}

/// Bytes, by powers of 1024.
pub fn bytes(n: u64) -> String {
    let steps = [
        (1u64 << 40, "TiB"),
        (1 << 30, "GiB"),
        (1 << 20, "MiB"),
        (1 << 10, "KiB"),
    ];
    for (size, name) in steps {
        if n >= size {
            let value = n as f64 / size as f64;
            return match n % size {
                0 => format!("{} {name}", n / size),
                _ => format!("{} {name}", digits(value)),
            };
        }
    }
    format!("{n} B")
}

pub fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// A text in so many columns: cut, with `…` at the end, or filled up with spaces.
pub fn left(text: &str, width: usize) -> String {
    let mut out = cut(text, width);
    // The width of a text may be more than the sum of its characters' widths.
    let missing = width.saturating_sub(out.width());
    out.extend(std::iter::repeat_n(' ', missing));
    out
}

/// The same with the spaces before it.
pub fn right(text: &str, width: usize) -> String {
    let cut = cut(text, width);
    let mut out = " ".repeat(width.saturating_sub(cut.width()));
    out.push_str(&cut);
    out
}

fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut out = String::new();
    let mut used = 0;
    for c in text.chars() {
        let columns = c.width().unwrap_or(0);
        if used + columns + 1 > width {
            break;
        }
        used += columns;
        out.push(c);
    }
    if width > 0 {
        out.push('…');
    }
    out
}

/// A text of somebody else as a span.
pub fn theirs(text: &str) -> Span<'static> {
    Span::raw(shown(text).into_owned())
}

pub fn plain(text: impl Into<String>) -> Span<'static> {
    Span::raw(text.into())
}

pub fn strong(text: impl Into<String>) -> Span<'static> {
    Span::styled(text.into(), Style::new().add_modifier(Modifier::BOLD))
}

/// Heading of a section, over the whole width.
pub fn heading(text: &str, width: usize) -> Line<'static> {
    let mut line = format!("── {text} ");
    line.extend(std::iter::repeat_n('─', width.saturating_sub(line.width())));
    Line::styled(line, Style::new().add_modifier(Modifier::BOLD))
}

/// Text that is broken at spaces into lines of at most `width` columns; what doesn't fit a line of its own is broken anywhere.
pub fn wrapped(text: &str, width: usize) -> Vec<String> {
    let width = width.max(8);
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split(' ') {
        let mut word = word.to_owned();
        let space = usize::from(!line.is_empty());
        if line.width() + space + word.width() <= width {
            line.extend(std::iter::repeat_n(' ', space));
            line.push_str(&word);
            continue;
        }
        if !line.is_empty() {
            lines.push(std::mem::take(&mut line));
        }
        while word.width() > width {
            let rest = split_off(&mut word, width);
            lines.push(std::mem::replace(&mut word, rest));
        }
        line = word;
    }
    lines.push(line);
    lines
}

fn split_off(word: &mut String, width: usize) -> String {
    let mut used = 0;
    let at = word.char_indices().find(|(_, c)| {
        used += c.width().unwrap_or(0);
        used > width
    });
    let at = at.map_or(word.len(), |(at, _)| at);
    word.split_off(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_is_wider_than_its_characters_fits() {
        // A variation selector makes two columns of one.
        let faces = "\u{263a}\u{fe0f}".repeat(40);
        for width in 0..50 {
            let widths = [left(&faces, width), right(&faces, width)].map(|t| t.chars().count());
            assert!(widths.iter().all(|&w| w <= 2 * width + 1), "{widths:?}");
        }
    }

    #[test]
    fn numbers_keep_their_width() {
        let of = |v: f64| count(v);
        assert_eq!(
            [
                0.0, 0.04, 3.21, 9.96, 812.4, 999.7, 45_210.0, 999_800.0, 2.5e9
            ]
            .map(of),
            [
                "0", "0", "3.2", "10.0", "812", "1.00k", "45.2k", "1.00M", "2.50G"
            ]
        );
        assert_eq!(
            [0, 812, 999_600, 12_345, 4_560_000, 61_000_000_000].map(time),
            ["-", "812ns", "1.00ms", "12.3µs", "4.56ms", "61.0s"]
        );
        assert_eq!(
            [512, 4096, 1536, 1 << 30].map(bytes),
            ["512 B", "4 KiB", "1.50 KiB", "1 GiB"]
        );
        for n in 0..64 {
            assert!(time(1 << n).width() <= 12, "{}", time(1 << n));
            assert!(count((1u64 << n) as f64).len() <= 12);
        }
    }

    #[test]
    fn cells_are_as_wide_as_they_should() {
        assert_eq!(left("abc", 5), "abc  ");
        assert_eq!(right("abc", 5), "  abc");
        assert_eq!(left("abcdef", 4), "abc…");
        assert_eq!(left("磁盘磁盘", 4), "磁… ");
        assert_eq!(left("x", 0), "");
    }

    #[test]
    fn long_texts_are_broken() {
        assert_eq!(wrapped("one two three", 8), ["one two", "three"]);
        assert_eq!(wrapped("abcdefghij k", 8), ["abcdefgh", "ij k"]);
        assert_eq!(wrapped("", 8), [""]);
    }
}
