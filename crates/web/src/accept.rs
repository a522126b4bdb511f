//! The header `Accept`.

/// Quality that a reader gives a form, in thousandths; 0: it doesn't take it. `versions`: the values of the parameter `version` that the form
/// satisfies; a range without one is satisfied by any. A reader without the header takes everything.
pub fn quality(accept: Option<&str>, media: &str, versions: &[&str]) -> u16 {
    let Some(accept) = accept else {
        return 1000;
    };
    let mut best: Option<(u8, u16)> = None;
    for range in accept.split(',') {
        let mut parts = range.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let Some(precision) = precision(name, media) else {
            continue;
        };
        let (mut quality, mut fits) = (1000, true);
        for part in parts {
            match part.split_once('=').map(|(k, v)| (k.trim(), v.trim())) {
                Some((key, value)) if key.eq_ignore_ascii_case("q") => quality = thousandths(value),
                Some((key, value)) if key.eq_ignore_ascii_case("version") => {
                    fits = versions.contains(&value.trim_matches('"'));
                }
                _ => {}
            }
        }
        // The most precise range counts; of equal ones the best.
        if fits && best.is_none_or(|b| (precision, quality) > b) {
            best = Some((precision, quality));
        }
    }
    best.map_or(0, |(_, quality)| quality)
}

/// 2: the form itself; 1: its kind; 0: anything.
fn precision(range: &str, media: &str) -> Option<u8> {
    if range.eq_ignore_ascii_case(media) {
        return Some(2);
    }
    let kind = media.split('/').next().unwrap_or_default();
    match range.split_once('/') {
        Some((k, "*")) if k.eq_ignore_ascii_case(kind) => Some(1),
        Some(("*", "*")) => Some(0),
        _ => None,
    }
}

fn thousandths(text: &str) -> u16 {
    let share: f32 = text.parse().unwrap_or(0.0);
    (share.clamp(0.0, 1.0) * 1000.0).round() as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN: &str = "application/openmetrics-text";
    const PLAIN: &str = "text/plain";

    fn both(accept: &str) -> (u16, u16) {
        let open = quality(Some(accept), OPEN, &["1.0.0", "0.0.1"]);
        (open, quality(Some(accept), PLAIN, &["0.0.4"]))
    }

    #[test]
    fn readers_get_the_form_that_they_like_best() {
        let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                          text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert_eq!(both(prometheus), (1000, 500));
        assert_eq!(both("*/*"), (1000, 1000));
        assert_eq!(both("text/html, text/*;q=0.3"), (0, 300));
        assert_eq!(both("text/plain;version=1.0"), (0, 0));
        assert_eq!(
            both("application/openmetrics-text; version=\"1.0.0\"; q=0.2"),
            (200, 0)
        );
        assert_eq!(both("text/plain;q=0, */*;q=0.5"), (500, 0));
        assert_eq!(both("text/plain;q=nan"), (0, 0));
        assert_eq!(quality(None, PLAIN, &[]), 1000);
        assert_eq!(both(""), (0, 0));
    }
}
