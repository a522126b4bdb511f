//! The options of a job by fio's names, their effects, and those that have none here.

use super::sizes::{self, BlockSizes};
use super::spec::{Amount, Distribution, JobSpec, Mix};
use super::units;
use std::time::Duration;

/// Options that are understood.
pub(super) const SUPPORTED: &[&str] = &[
    "blockalign (ba)",
    "blocksize (bs)",
    "blocksize_range (bsrange)",
    "bssplit",
    "continue_on_error",
    "do_verify",
    "fdatasync",
    "filename",
    "fsync",
    "group_reporting",
    "io_size",
    "iodepth",
    "iodepth_batch (iodepth_batch_submit)",
    "ioengine",
    "loops",
    "name",
    "new_group",
    "norandommap",
    "number_ios",
    "numjobs",
    "offset",
    "offset_increment",
    "ramp_time",
    "random_distribution",
    "randrepeat",
    "randseed",
    "rate_iops",
    "readwrite (rw)",
    "runtime",
    "rwmixread",
    "rwmixwrite",
    "size",
    "stonewall",
    "thinktime",
    "thinktime_blocks",
    "time_based",
    "uri",
    "verify",
    "verify_fatal",
    "verify_only",
];

/// Options that change nothing here: there is one engine, no cache of ours, and threads are the only kind of job.
const IGNORED: &[&str] = &[
    "allow_file_create",
    "allow_mounted_write",
    "buffer_pattern",
    "buffered",
    "clat_percentiles",
    "create_on_open",
    "description",
    "direct",
    "directory",
    "disk_util",
    "end_fsync",
    "eta",
    "eta_newline",
    "exitall",
    "fallocate",
    "fsync_on_close",
    "gtod_reduce",
    "invalidate",
    "iodepth_batch_complete",
    "iodepth_batch_complete_max",
    "iodepth_batch_complete_min",
    "iodepth_low",
    "lat_percentiles",
    "log_avg_msec",
    "mem",
    "iomem",
    "nrfiles",
    "overwrite",
    "percentile_list",
    "randomize",
    "refill_buffers",
    "scramble_buffers",
    "slat_percentiles",
    "softrandommap",
    "sync",
    "thread",
    "unified_rw_reporting",
    "unlink",
    "write_bw_log",
    "write_iops_log",
    "write_lat_log",
    "zero_buffers",
];

/// The effect of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Applied {
    Set,
    /// The option has no effect here.
    Ignored,
}

/// Sets one option of `spec`. Errors say what is wrong with the value, or that the option isn't known.
pub(super) fn apply(
    spec: &mut JobSpec,
    name: &str,
    value: Option<&str>,
) -> Result<Applied, String> {
    let shown = value.unwrap_or("");
    let needed = || match shown {
        "" => Err("it needs a value".to_owned()),
        v => Ok(v),
    };
    match name {
        "readwrite" | "rw" => direction(spec, needed()?)?,
        "blocksize" | "bs" => sizes::pair(needed()?, &mut spec.sizes, sizes::fixed)?,
        "blocksize_range" | "bsrange" => sizes::pair(needed()?, &mut spec.sizes, sizes::range)?,
        "bssplit" => sizes::pair(needed()?, &mut spec.sizes, sizes::split)?,
        "blockalign" | "ba" => {
            let BlockSizes::Fixed(bytes) = sizes::fixed(needed()?)? else {
                return Err("one size".into());
            };
            spec.align_bytes = Some(bytes);
        }
        "rwmixread" => spec.read_percent = units::number(needed()?, 0, 100)? as u32,
        "rwmixwrite" => spec.read_percent = 100 - units::number(needed()?, 0, 100)? as u32,
        "iodepth" => spec.iodepth = units::number(needed()?, 1, 4096)? as u32,
        "iodepth_batch" | "iodepth_batch_submit" => {
            spec.iodepth_batch = units::number(needed()?, 1, 4096)? as u32;
        }
        "size" => spec.size = Some(amount(needed()?)?),
        "io_size" | "io_limit" => spec.io_size = Some(amount(needed()?)?),
        "offset" => spec.offset = amount(needed()?)?,
        "offset_increment" => spec.offset_increment = amount(needed()?)?,
        "number_ios" => spec.number_ios = Some(units::number(needed()?, 1, u64::MAX)?),
        "runtime" | "timeout" => {
            let time = units::time(needed()?, Duration::from_secs(1))?;
            spec.runtime = Some(time).filter(|t| !t.is_zero());
        }
        "time_based" => spec.time_based = units::switch(value)?,
        "ramp_time" => spec.ramp_time = units::time(needed()?, Duration::from_secs(1))?,
        "loops" => spec.loops = units::number(needed()?, 1, u64::MAX)?,
        "randseed" => spec.seed = units::number(needed()?, 0, u64::MAX)?,
        "randrepeat" | "allrandrepeat" => spec.repeatable = units::switch(value)?,
        "norandommap" => spec.random_map = !units::switch(value)?,
        "random_distribution" => spec.distribution = distribution(needed()?)?,
        "verify" => verify(spec, needed()?)?,
        "verify_fatal" => spec.verify.fatal = units::switch(value)?,
        "do_verify" => spec.verify.after = units::switch(value)?,
        "verify_only" => spec.verify.only = units::switch(value)?,
        "fsync" | "fdatasync" => {
            let every = units::number(needed()?, 0, u64::from(u32::MAX))? as u32;
            spec.flush_every = Some(every).filter(|&n| n > 0);
        }
        "rate_iops" => {
            spec.rate_iops = Some(units::number(needed()?, 1, 1_000_000_000)? as u32);
        }
        "thinktime" => spec.thinktime = units::time(needed()?, Duration::from_micros(1))?,
        "thinktime_blocks" => {
            spec.thinktime_blocks = units::number(needed()?, 1, u64::from(u32::MAX))? as u32;
        }
        "numjobs" => spec.numjobs = units::number(needed()?, 1, 1024)? as u32,
        "stonewall" | "wait_for_previous" => spec.stonewall = units::switch(value)?,
        "new_group" => spec.new_group = units::switch(value)?,
        "group_reporting" => spec.group_reporting = units::switch(value)?,
        "continue_on_error" => {
            spec.continue_on_error = match needed()? {
                "all" | "io" | "read" | "write" | "1" => true,
                "none" | "0" => false,
                other => return Err(format!("{other:?}: write all or none")),
            }
        }
        "name" => needed()?.clone_into(&mut spec.name),
        "filename" | "uri" => spec.target = Some(needed()?.to_owned()),
        // The target decides how I/O is done.
        "ioengine" => return Ok(Applied::Ignored),
        _ if IGNORED.contains(&name) => return Ok(Applied::Ignored),
        _ => return Err(unknown(name)),
    }
    Ok(Applied::Set)
}

fn unknown(name: &str) -> String {
    format!("it is not supported here; supported: {}", {
        let close = SUPPORTED.iter().filter(|s| s.contains(name));
        let close: Vec<&str> = close.copied().collect();
        match name.len() > 2 && !close.is_empty() {
            true => close.join(", "),
            false => SUPPORTED.join(", "),
        }
    })
}

fn direction(spec: &mut JobSpec, text: &str) -> Result<(), String> {
    (spec.mix, spec.random) = match text {
        "read" => (Mix::Read, false),
        "write" => (Mix::Write, false),
        "rw" | "readwrite" => (Mix::Both, false),
        "randread" => (Mix::Read, true),
        "randwrite" => (Mix::Write, true),
        "randrw" => (Mix::Both, true),
        _ => {
            return Err(format!(
                "{text:?} is not supported here: write read, write, rw, randread, randwrite or randrw"
            ));
        }
    };
    Ok(())
}

fn amount(text: &str) -> Result<Amount, String> {
    match text.trim().strip_suffix('%') {
        Some(percent) => Ok(Amount::Percent(units::number(percent, 0, 10_000)? as u32)),
        None => units::size(text).map(Amount::Bytes),
    }
}

fn distribution(text: &str) -> Result<Distribution, String> {
    let (kind, value) = text.split_once(':').unwrap_or((text, ""));
    let number = |default: f64| match value {
        "" => Ok(default),
        v => v
            .parse::<f64>()
            .map_err(|_| format!("{v:?} is not a number")),
    };
    match kind {
        "random" => Ok(Distribution::Uniform),
        "zipf" => match number(1.1)? {
            theta if theta > 0.0 && theta <= 10.0 => Ok(Distribution::Zipf(theta)),
            theta => Err(format!("zipf:{theta}: the exponent is from 0 to 10")),
        },
        "pareto" => match number(0.2)? {
            h if h > 0.0 && h < 1.0 => Ok(Distribution::Pareto(h)),
            h => Err(format!("pareto:{h}: the share is between 0 and 1")),
        },
        _ => Err(format!(
            "{text:?} is not supported here: write random, zipf:EXPONENT or pareto:SHARE"
        )),
    }
}

fn verify(spec: &mut JobSpec, text: &str) -> Result<(), String> {
    match text {
        "0" | "none" => spec.verify.on = false,
        "crc32c" | "crc32c-intel" => spec.verify.on = true,
        _ => {
            return Err(format!("{text:?} is not supported here: write crc32c"));
        }
    }
    Ok(())
}
