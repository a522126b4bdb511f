//! Parsing numbers in keys, and quoting a peer's text.

use pvblk_block::Error;

/// Quotes a peer's text for a message: shortened, control characters escaped.
pub fn quote(text: &str) -> String {
    let mut out = String::from("'");
    out.extend(text.chars().take(60).flat_map(char::escape_debug));
    if text.chars().nth(60).is_some() {
        out.push('…');
    }
    out.push('\'');
    out
}

/// Quotes a peer's sentence (its `error` key or message) for a message: at most 300 characters, one line.
pub fn sentence(text: &str) -> String {
    let visible = text.chars().take(300);
    visible
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// Parses decimal digits only: no sign, no blanks, as every known front end writes them.
pub fn parse_u64(key: &str, value: &str) -> Result<u64, Error> {
    let digits = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
    digits
        .then(|| value.parse().ok())
        .flatten()
        .ok_or_else(|| Error::protocol(format!("{key} is {}, not a number", quote(value))))
}

/// As [`parse_u64`], up to 2^32 - 1.
pub fn parse_u32(key: &str, value: &str) -> Result<u32, Error> {
    let n = parse_u64(key, value)?;
    u32::try_from(n).map_err(|_| Error::protocol(format!("{key} is {n}, the most is {}", u32::MAX)))
}

/// Parses a key that may be absent.
pub fn optional_u32(
    read: &dyn Fn(&str) -> Option<String>,
    key: &str,
) -> Result<Option<u32>, Error> {
    read(key).map(|v| parse_u32(key, &v)).transpose()
}

/// Parses an optional mark: 64 bits in hexadecimal.
pub fn optional_mark(
    read: &dyn Fn(&str) -> Option<String>,
    key: &str,
) -> Result<Option<u64>, Error> {
    let Some(text) = read(key) else {
        return Ok(None);
    };
    match u64::from_str_radix(&text, 16) {
        Ok(mark) if text.len() <= 16 && !text.starts_with('+') => Ok(Some(mark)),
        _ => Err(Error::protocol(format!(
            "{key} is {}, not a hexadecimal number of 64 bits",
            quote(&text)
        ))),
    }
}

/// Parses a feature bit: absent is off, any number but 0 is on.
pub fn flag(read: &dyn Fn(&str) -> Option<String>, key: &str) -> Result<bool, Error> {
    Ok(optional_u32(read, key)?.unwrap_or(0) != 0)
}
