//! The part of a request's target after `?`.

/// Most parameters of a request.
const MOST: usize = 32;

/// Parameters with their values, in their order; each name once. Errors say in one line what is wrong.
pub fn decode(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut all: Vec<(String, String)> = Vec::new();
    for pair in text.split('&').filter(|p| !p.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let (name, value) = (unescape(name)?, unescape(value)?);
        if all.iter().any(|(n, _)| *n == name) {
            return Err(format!("the parameter {name:?} is there twice"));
        }
        if all.len() == MOST {
            return Err(format!("there are more than {MOST} parameters"));
        }
        all.push((name, value));
    }
    Ok(all)
}

fn unescape(text: &str) -> Result<String, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || rest.next().and_then(|d| (d as char).to_digit(16));
                match (digit(), digit()) {
                    (Some(high), Some(low)) => (high * 16 + low) as u8,
                    _ => return Err("after % come two hexadecimal digits".into()),
                }
            }
            other => other,
        });
    }
    String::from_utf8(bytes).map_err(|_| "a parameter isn't UTF-8".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded_once() {
        let ok = |text: &str| {
            let pairs = decode(text).unwrap().into_iter();
            pairs
                .map(|(n, v)| format!("{n}={v}"))
                .collect::<Vec<_>>()
                .join("|")
        };
        assert_eq!(ok(""), "");
        assert_eq!(ok("disk=vm1&follow=true"), "disk=vm1|follow=true");
        assert_eq!(ok("a=%7B%22raid%22%3a+1%7d&&b"), "a={\"raid\": 1}|b=");
        assert_eq!(ok("a=%2525&b=c=d"), "a=%25|b=c=d");
        assert_eq!(ok("%C3%A4=\u{fc}"), "\u{e4}=\u{fc}");
    }

    #[test]
    fn mistakes_are_told() {
        for (text, why) in [
            ("a=%", "two hexadecimal"),
            ("a=%2", "two hexadecimal"),
            ("a=%+1", "two hexadecimal"),
            ("a=%ff", "isn't UTF-8"),
            ("a=1&a=2", "twice"),
            ("a=1&%61=2", "twice"),
        ] {
            let e = decode(text).unwrap_err();
            assert!(e.contains(why), "{text}: {e}");
        }
        let many: Vec<String> = (0..=MOST).map(|n| format!("p{n}")).collect();
        assert!(
            decode(&many.join("&"))
                .unwrap_err()
                .contains("more than 32")
        );
        assert_eq!(decode(&many[1..].join("&")).unwrap().len(), MOST);
    }
}
