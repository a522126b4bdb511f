//! The text form of arrays.

use super::super::{Candidates, FileSpec, Members, Raid5Spec, VolumeSpec};
use super::{parse, unknown};
use pvblk_raid5::parse_uuid;

const EXAMPLE: &str = "as in raid5:[file:a.img][file:b.img][missing],stripes=512";
const FOUND: &str = "as in raid5:uuid=0f1e2d3c:4b5a6978:8796a5b4:c3d2e1f0,in=/srv/md/*.img";

pub(super) fn raid5(text: &str, depth: usize) -> Result<Raid5Spec, String> {
    let is_found = |item: &str| item.starts_with("uuid=") || item.starts_with("in=");
    match !text.starts_with('[') && text.split(',').any(is_found) {
        true => found(text, depth),
        false => named(text, depth),
    }
}

fn named(text: &str, depth: usize) -> Result<Raid5Spec, String> {
    let mut members = Vec::new();
    let mut rest = text;
    while let Some(inside) = rest.strip_prefix('[') {
        let end = closing(inside).ok_or_else(|| format!("a `]` is missing, {EXAMPLE}"))?;
        members.push(match &inside[..end] {
            "" => return Err(format!("empty brackets: a member goes there, {EXAMPLE}")),
            "missing" => None,
            member => Some(parse(member, depth + 1)?),
        });
        rest = &inside[end + 1..];
    }
    if members.is_empty() {
        return Err(format!(
            "members are missing, each in brackets, {EXAMPLE}, or the array's id, {FOUND}"
        ));
    }
    let mut spec = Raid5Spec::new(members);
    if rest.is_empty() {
        return Ok(spec);
    }
    let options = rest.strip_prefix(',').ok_or_else(|| {
        format!(
            "`{}` after the members: options follow a comma, {EXAMPLE}",
            rest.escape_debug()
        )
    })?;
    for (key, value) in super::items(options) {
        if !option(&mut spec, key, value)? {
            return Err(unknown(
                key,
                "stripes=N, write-path=PATH, member-timeout=TIME, re-add=auto, force",
            ));
        }
    }
    Ok(spec)
}

/// `uuid=UUID,in=PATTERN,in=[VOLUME]…`
fn found(text: &str, depth: usize) -> Result<Raid5Spec, String> {
    let mut uuid = None;
    let mut candidates = Candidates {
        uuid: [0; 16],
        within: Vec::new(),
        missing: false,
    };
    let mut spec = Raid5Spec::new(Vec::new());
    let mut rest = text;
    while !rest.is_empty() {
        let item;
        (item, rest) = item_of(rest)?;
        match item
            .split_once('=')
            .map_or((item, None), |(k, v)| (k, Some(v)))
        {
            ("uuid", Some(text)) => {
                uuid = Some(parse_uuid(text).ok_or_else(|| {
                    format!(
                        "uuid `{}` is no UUID: write it as mdadm and `pvblk raid examine` print it, {FOUND}",
                        text.escape_debug()
                    )
                })?);
            }
            ("in", Some("")) => return Err(format!("in= needs a pattern of paths, {FOUND}")),
            ("in", Some(text)) => candidates.within.push(within(text, depth)?),
            ("missing", None) => candidates.missing = true,
            (key, value) => {
                if !option(&mut spec, key, value)? {
                    let known = "uuid=UUID, in=PATTERN, missing, stripes=N, write-path=PATH, member-timeout=TIME, re-add=auto, force";
                    return Err(format!(
                        "{}, {FOUND}; write in=[file:PATTERN] for a pattern with a comma",
                        unknown(key, known)
                    ));
                }
            }
        }
    }
    candidates.uuid = uuid
        .ok_or_else(|| format!("uuid= is missing, {FOUND}; `pvblk raid scan PATTERN` prints it"))?;
    spec.of = Members::Found(candidates);
    Ok(spec)
}

/// The first item and what follows its comma. A value that begins with a bracket ends with its partner.
fn item_of(text: &str) -> Result<(&str, &str), String> {
    if let Some(inside) = text.strip_prefix("in=[") {
        let end = closing(inside)
            .ok_or_else(|| format!("a `]` is missing in `{}`", text.escape_debug()))?;
        let (item, rest) = text.split_at("in=[".len() + end + 1);
        return match (rest, rest.strip_prefix(',')) {
            ("", _) => Ok((item, "")),
            (_, Some(rest)) => Ok((item, rest)),
            _ => Err(format!(
                "`{}` after `{}`: a value that begins with a bracket is a volume; write in=[file:PATTERN]",
                rest.escape_debug(),
                item.escape_debug()
            )),
        };
    }
    Ok(text.split_once(',').unwrap_or((text, "")))
}

fn within(text: &str, depth: usize) -> Result<VolumeSpec, String> {
    if let Some(volume) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
        return parse(volume, depth + 1);
    }
    if text.contains('\0') {
        return Err("a path can't hold a zero byte".into());
    }
    let path = text.strip_prefix("file:").unwrap_or(text);
    // Such a path is printed in brackets.
    let is_bare = !path.starts_with('[') && !path.starts_with("file:");
    if !is_bare && closing(&format!("{path}]")) != Some(path.len()) {
        return Err(format!(
            "the brackets of in={} don't balance",
            text.escape_debug()
        ));
    }
    Ok(VolumeSpec::File(FileSpec::new(path)))
}

/// Options that both forms have. False: there is no such option.
fn option(spec: &mut Raid5Spec, key: &str, value: Option<&str>) -> Result<bool, String> {
    match (key, value) {
        ("stripes", Some(value)) => {
            spec.stripes = value.parse().map_err(|_| {
                format!(
                    "stripes `{}` is not a number from 8 to 32768",
                    value.escape_debug()
                )
            })?;
        }
        ("write-path", Some(value)) => {
            spec.write_path = value.parse().map_err(|_| {
                format!(
                    "write-path `{}` is not direct or stripe-queue",
                    value.escape_debug()
                )
            })?;
        }
        ("member-timeout", Some(value)) => {
            let time = super::span(value).map_err(|e| format!("member-timeout {e}"))?;
            spec.member_timeout = Some(time);
        }
        ("re-add", Some(value)) => {
            if value != "auto" {
                return Err(format!("re-add `{}` is not auto", value.escape_debug()));
            }
            spec.re_add = true;
        }
        ("core", Some(value)) => {
            // Earlier releases had two, and wrote the name of one into their state.
            if !["lock", "words"].contains(&value) {
                return Err(format!("core `{}`: leave it out", value.escape_debug()));
            }
        }
        ("force", None) => spec.force = true,
        _ => return Ok(false),
    }
    Ok(true)
}

/// Where the bracket closes that was open before `text`.
fn closing(text: &str) -> Option<usize> {
    let mut open = 0usize;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'[' => open += 1,
            b']' if open == 0 => return Some(at),
            b']' => open -= 1,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use crate::VolumeSpec;

    #[test]
    fn cores_of_earlier_releases_are_read_and_mean_nothing() {
        let of = |text: &str| text.parse::<VolumeSpec>();
        for core in ["lock", "words"] {
            let spec = of(&format!("raid5:[/a][/b][/c],core={core},stripes=512"));
            let spec = spec.expect("a spec of an earlier release").to_string();
            assert_eq!(spec, "raid5:[file:/a][file:/b][file:/c],stripes=512");
        }
        let why = of("raid5:[/a][/b][/c],core=fast").unwrap_err().to_string();
        assert!(why.contains("core `fast`: leave it out"), "{why}");
    }

    #[test]
    fn brackets_of_patterns_balance_where_they_are_printed_in_brackets() {
        let of = |pattern| -> Result<VolumeSpec, _> {
            let uuid = "2e7020f4:a718b424:6ea55ced:b23434a1";
            format!("raid5:uuid={uuid},in={pattern}").parse()
        };
        for pattern in ["file:[bc]file:in]", "file:[bc", "file:file:a]"] {
            let why = of(pattern).unwrap_err().to_string();
            assert!(why.contains("don't balance"), "{why}");
        }
        for pattern in ["file:[bc]*", "a]", "file:a]", "[file:[bc]*]"] {
            let spec = of(pattern).unwrap();
            assert_eq!(spec.to_string().parse::<VolumeSpec>().unwrap(), spec);
        }
    }
}
