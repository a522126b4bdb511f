//! Estimates of the width of text that hold for all fonts.

/// Pixels of a letter's height, for ordinary text.
pub const TEXT: i32 = 14;
/// Pixels from one line of text to the next.
pub const LINE: i32 = 19;

/// Pixels that a text may need. Wide fonts have letters of 0.6 of their height; capitals and `m` are wider.
pub fn text_width(text: &str, size: i32) -> i32 {
    let wide = |c: char| c.is_uppercase() || matches!(c, 'm' | 'w' | '%' | '@') || !c.is_ascii();
    let units: i32 = text.chars().map(|c| if wide(c) { 80 } else { 61 }).sum();
    units * size / 100 + 1
}

/// Breaks a text between words, or inside of a word that is too long, into lines of at most `width` pixels.
pub fn wrap(text: &str, size: i32, width: i32) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        if let Some(line) = lines.last_mut()
            && text_width(line, size) + text_width(word, size) + size / 2 <= width
        {
            line.push(' ');
            line.push_str(word);
            continue;
        }
        let mut rest = String::new();
        for letter in word.chars() {
            if !rest.is_empty() && text_width(&rest, size) + size > width {
                lines.push(std::mem::take(&mut rest));
            }
            rest.push(letter);
        }
        lines.push(rest);
    }
    lines
}

/// Labels that fit side by side, of those centred at `at`: the first one, and each that leaves some room.
pub fn fitting(labels: &[(i32, String)]) -> Vec<&(i32, String)> {
    let mut end = i32::MIN;
    let mut fitting = Vec::new();
    for label in labels {
        let half = text_width(&label.1, TEXT) / 2;
        if label.0 - half >= end {
            end = label.0 + half + 8;
            fitting.push(label);
        }
    }
    fitting
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_break_into_lines_that_fit() {
        let text =
            "a title of some words and averyveryveryveryveryverylongwordwithoutanybreak at its end";
        let lines = wrap(text, TEXT, 200);
        assert!(lines.len() > 3);
        assert!(
            lines.iter().all(|l| text_width(l, TEXT) <= 200),
            "{lines:?}"
        );
        let joined: String = lines.concat();
        assert_eq!(joined.replace(' ', ""), text.replace(' ', ""));
        assert!(wrap("", TEXT, 200).is_empty());
    }

    #[test]
    fn crowded_labels_are_thinned() {
        let labels: Vec<(i32, String)> = (0..100).map(|i| (i * 10, format!("{i}"))).collect();
        let kept = fitting(&labels);
        assert!(kept.len() > 10 && kept.len() < 60);
        for pair in kept.windows(2) {
            let half = |l: &(i32, String)| text_width(&l.1, TEXT) / 2;
            assert!(pair[0].0 + half(pair[0]) < pair[1].0 - half(pair[1]));
        }
    }
}
