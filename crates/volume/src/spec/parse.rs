//! The text form of specs: `KIND[:ARGS][:INNER]`.

use super::{CacheSpec, DelaySpec, Engine, FaultSpec, FileSpec, MemSpec, NullSpec, VolumeSpec};
use super::{client, nbd};
use pvblk_block::Error;
use pvblk_block::units::{parse_probability, parse_rate, parse_size, parse_span};
use std::str::FromStr;

mod raid5;

use raid5::raid5;

/// Deepest nesting of decorators and arrays.
const DEEPEST: usize = 16;

const KINDS: [&str; 11] = [
    "null",
    "mem",
    "file",
    "delay",
    "fault",
    "cache",
    "raid5",
    "nbd",
    "rbd",
    "vhost-user",
    "rings",
];

const FILE_FLAGS: [&str; 3] = ["direct", "ro", "nolock"];
const FILE_KEYS: [&str; 4] = ["engine", "size", "sector", "format"];

impl FromStr for VolumeSpec {
    type Err = Error;

    /// Parses and validates a spec; the error is one line that says what is allowed.
    fn from_str(text: &str) -> Result<VolumeSpec, Error> {
        let spec = parse(text, 0)
            .map_err(|why| Error::config(format!("volume `{}`: {why}", text.escape_debug())))?;
        spec.validate()?;
        Ok(spec)
    }
}

fn parse(text: &str, depth: usize) -> Result<VolumeSpec, String> {
    if depth > DEEPEST {
        return Err(format!("more than {DEEPEST} volumes over each other"));
    }
    let (kind, rest) = match text.split_once(':') {
        Some((kind, rest)) => (kind, Some(rest)),
        None => (text, None),
    };
    match (kind, rest) {
        ("null", rest) => null(rest.unwrap_or("")).map(VolumeSpec::Null),
        ("mem", rest) => mem(rest.unwrap_or("")).map(VolumeSpec::Mem),
        ("file", rest) => file(rest.unwrap_or("")).map(VolumeSpec::File),
        ("delay", rest) => {
            let (args, inner) = decorator("delay:200us:mem:1G", rest, depth)?;
            Ok(VolumeSpec::Delay(delay(args)?, inner))
        }
        ("fault", rest) => {
            let (args, inner) = decorator("fault:seed=1,error=0.01:mem:1G", rest, depth)?;
            Ok(VolumeSpec::Fault(fault(args)?, inner))
        }
        ("cache", rest) => {
            let (args, inner) = decorator("cache:256M:file:/srv/disk.img", rest, depth)?;
            Ok(VolumeSpec::Cache(cache(args)?, inner))
        }
        ("raid5", rest) => raid5(rest.unwrap_or(""), depth).map(VolumeSpec::Raid5),
        ("nbd" | "nbd+unix" | "nbds" | "nbds+unix", _) => nbd::nbd(text).map(VolumeSpec::Nbd),
        ("rbd", rest) => rest.unwrap_or("").parse().map(VolumeSpec::Rbd),
        ("vhost-user", rest) => client::vhost_user(rest.unwrap_or("")).map(VolumeSpec::Vhost),
        ("rings", rest) => client::rings(rest.unwrap_or("")).map(VolumeSpec::Rings),
        (scheme, Some(rest)) if rest.starts_with("//") => Err(format!(
            "unknown kind `{}`: of URIs nbd://, nbd+unix://, nbds:// and nbds+unix:// are known; of a file write file:PATH",
            scheme.escape_debug()
        )),
        (word, Some(_)) if text.contains('/') && is_word(word) => Err(format!(
            "unknown kind `{word}`: use {}; of a file whose path begins so write file:PATH",
            KINDS.join(", ")
        )),
        _ if text.contains('/') => file(text).map(VolumeSpec::File),
        ("", _) => Err(format!(
            "a kind is missing: {}, or a path with a `/`",
            KINDS.join(", ")
        )),
        _ => Err(format!(
            "unknown kind `{}`: use {}, as in mem:1G, or a path with a `/`",
            kind.escape_debug(),
            KINDS.join(", ")
        )),
    }
}

/// Splits a decorator's arguments, which never hold a colon, from the volume it is over.
fn decorator<'a>(
    example: &str,
    rest: Option<&'a str>,
    depth: usize,
) -> Result<(&'a str, Box<VolumeSpec>), String> {
    let (args, inner) = rest
        .and_then(|rest| rest.split_once(':'))
        .filter(|(_, inner)| !inner.is_empty())
        .ok_or_else(|| format!("the volume to go over is missing, as in {example}"))?;
    if args.is_empty() {
        return Err(format!("arguments are missing, as in {example}"));
    }
    Ok((args, Box::new(parse(inner, depth + 1)?)))
}

fn items(args: &str) -> impl Iterator<Item = (&str, Option<&str>)> {
    args.split(',').map(|item| match item.split_once('=') {
        Some((key, value)) => (key, Some(value)),
        None => (item, None),
    })
}

pub(super) fn size(text: &str) -> Result<u64, String> {
    parse_size(text).ok_or_else(|| {
        format!(
            "`{}` is not a size: bytes, or a number with k, M, G or T (powers of 1024), as in 64M",
            text.escape_debug()
        )
    })
}

fn rate(text: &str, what: &str, example: &str) -> Result<u64, String> {
    parse_rate(text).ok_or_else(|| {
        format!(
            "{what} `{}` is not a number with k, M, G or T (powers of 1000), as in {example}",
            text.escape_debug()
        )
    })
}

fn probability(text: &str, what: &str) -> Result<f64, String> {
    parse_probability(text).ok_or_else(|| {
        format!(
            "{what} `{}` is not a probability from 0 to 1, as in {what}=0.01",
            text.escape_debug()
        )
    })
}

pub(super) fn span(text: &str) -> Result<std::time::Duration, String> {
    parse_span(text).ok_or_else(|| {
        format!(
            "`{}` is not a time: a number with ns, us, ms or s, as in 210us",
            text.escape_debug()
        )
    })
}

fn sector(text: &str) -> Result<u32, String> {
    match text {
        "512" => Ok(512),
        "4096" | "4k" => Ok(4096),
        _ => Err(format!(
            "sector `{}` must be 512 or 4096",
            text.escape_debug()
        )),
    }
}

pub(super) fn unknown(key: &str, allowed: &str) -> String {
    format!("unknown option `{}`: use {allowed}", key.escape_debug())
}

fn null(args: &str) -> Result<NullSpec, String> {
    let mut spec = NullSpec::default();
    for (i, item) in args.split(',').enumerate() {
        match item {
            "" if args.is_empty() => {}
            "notouch" => spec.touch = false,
            _ if i == 0 => spec.size_bytes = size(item)?,
            _ => return Err(unknown(item, "notouch, as in null:1T,notouch")),
        }
    }
    Ok(spec)
}

fn mem(args: &str) -> Result<MemSpec, String> {
    if args.is_empty() {
        return Err("a size is missing, as in mem:1G".into());
    }
    let (first, rest) = args.split_once(',').unwrap_or((args, ""));
    let mut spec = MemSpec::new(size(first)?);
    for (key, value) in items(rest).filter(|_| args.contains(',')) {
        match (key, value) {
            ("sector", Some(value)) => spec.sector_bytes = sector(value)?,
            _ => return Err(unknown(key, "sector=512|4096, as in mem:1G,sector=4096")),
        }
    }
    Ok(spec)
}

/// True if `text` begins with an option of `file`.
fn begins_file_option(text: &str) -> bool {
    let item = text.split(',').next().unwrap_or("");
    match item.split_once('=') {
        Some((key, _)) => FILE_KEYS.contains(&key),
        None => FILE_FLAGS.contains(&item),
    }
}

fn file(args: &str) -> Result<FileSpec, String> {
    let comma = args
        .match_indices(',')
        .map(|(at, _)| at)
        .find(|&at| begins_file_option(&args[at + 1..]));
    let (path, options) = match comma {
        Some(at) => (&args[..at], Some(&args[at + 1..])),
        None => (args, None),
    };
    if path.is_empty() {
        return Err("a path is missing, as in file:/srv/disk.img,direct".into());
    }
    if path.contains('\0') {
        return Err("a path can't hold a zero byte".into());
    }
    let mut spec = FileSpec::new(path);
    for (key, value) in options.into_iter().flat_map(items) {
        match (key, value) {
            ("direct", None) => spec.direct = true,
            ("ro", None) => spec.read_only = true,
            ("nolock", None) => spec.lock = false,
            ("engine", Some("uring")) => spec.engine = Some(Engine::Uring),
            ("engine", Some("sync")) => spec.engine = Some(Engine::Sync),
            ("engine", Some(other)) => {
                return Err(format!(
                    "unknown engine `{}`: use engine=uring or engine=sync",
                    other.escape_debug()
                ));
            }
            ("size", Some(value)) => spec.size_bytes = Some(size(value)?),
            ("sector", Some(value)) => spec.sector_bytes = Some(sector(value)?),
            ("format", Some("raw")) => spec.raw = true,
            ("format", Some(other)) => {
                return Err(format!(
                    "format `{}`: only raw disks are served; convert it with `qemu-img convert -O raw`",
                    other.escape_debug()
                ));
            }
            _ => {
                return Err(unknown(
                    key,
                    "direct, ro, nolock, engine=uring|sync, size=SIZE, sector=512|4096, format=raw",
                ));
            }
        }
    }
    Ok(spec)
}

fn delay(args: &str) -> Result<DelaySpec, String> {
    let mut spec = DelaySpec::default();
    for (i, (key, value)) in items(args).enumerate() {
        match (key, value) {
            ("iops", Some(value)) => spec.iops = Some(rate(value, "iops", "iops=209k")?),
            ("bw", Some(value)) => spec.bandwidth = Some(rate(value, "bw", "bw=2.4G")?),
            ("channels", Some(value)) => {
                spec.channels = Some(value.parse().map_err(|_| {
                    format!(
                        "channels `{}` is not a number from 1 to 1024",
                        value.escape_debug()
                    )
                })?);
            }
            ("serial", None) => spec.serial = true,
            (_, None) if i == 0 => spec.service = span(key)?,
            _ => {
                return Err(unknown(
                    key,
                    "a time first, then iops=RATE, bw=RATE, channels=N, serial, as in delay:210us,iops=209k:mem:1G",
                ));
            }
        }
    }
    Ok(spec)
}

fn fault(args: &str) -> Result<FaultSpec, String> {
    let mut spec = FaultSpec::default();
    for (key, value) in items(args) {
        let value = value.ok_or_else(|| fault_unknown(key))?;
        match key {
            "seed" => {
                spec.seed = Some(value.parse().map_err(|_| {
                    format!("seed `{}` is not a whole number", value.escape_debug())
                })?);
            }
            "after" => {
                spec.after = value.parse().map_err(|_| {
                    format!(
                        "after `{}` is not a number of requests",
                        value.escape_debug()
                    )
                })?;
            }
            "error" => spec.error = probability(value, key)?,
            "read-error" => spec.read_error = Some(probability(value, key)?),
            "write-error" => spec.write_error = Some(probability(value, key)?),
            "flush-error" => spec.flush_error = Some(probability(value, key)?),
            "torn" => spec.torn = probability(value, key)?,
            "stall" => {
                let (p, time) = value
                    .split_once('/')
                    .ok_or("stall needs a time, as in stall=0.001/50ms")?;
                spec.stall = probability(p, key)?;
                spec.stall_time = span(time)?;
            }
            _ => return Err(fault_unknown(key)),
        }
    }
    Ok(spec)
}

fn fault_unknown(key: &str) -> String {
    unknown(
        key,
        "seed=N, after=N, error=P, read-error=P, write-error=P, flush-error=P, stall=P/TIME, torn=P",
    )
}

fn cache(args: &str) -> Result<CacheSpec, String> {
    let (first, rest) = args.split_once(',').unwrap_or((args, ""));
    let mut spec = CacheSpec::new(size(first)?);
    for (key, value) in items(rest).filter(|_| args.contains(',')) {
        spec.set(key, value)?;
    }
    Ok(spec)
}

/// True for what looks like the kind of a volume, as `fil` does.
fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_lowercase())
}

#[cfg(test)]
mod tests;
