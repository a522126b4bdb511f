//! `pvblk raid create`.

use super::args::CreateArgs;
use super::detail::detail_of;
use super::report::Report;
use super::{Opened, member, open_all};
use crate::output::tell;
use anyhow::{Result, bail};
use pvblk_block::Error;
use pvblk_raid5 as raid5;
use pvblk_raid5::{
    AssembleOptions, Consistency, CreateOptions, Layout, MemberNames, NewMembers, Policy,
    Raid5Progress, sleepy,
};
use pvblk_volume::{SpecNames, VolumeSpec};
use std::collections::HashSet;

pub fn run(args: &CreateArgs) -> Result<()> {
    if !["5", "raid5"].contains(&args.level.as_str()) {
        bail!("--level {}: only 5 is supported", args.level);
    }
    let (members, spares) = (args.raid_devices, args.spare_devices);
    if members.saturating_add(spares) != args.members.len() {
        let spares = match spares {
            0 => String::new(),
            n => format!(" and --spare-devices {n}"),
        };
        bail!(
            "--raid-devices {members}{spares}, and {} members are named",
            args.members.len()
        );
    }
    let chunk_bytes = kib("--chunk", &args.chunk)?;
    let options = CreateOptions {
        layout: args.layout.parse::<Layout>()?,
        // A chunk size that isn't valid is refused where all are checked.
        chunk_sectors: u32::try_from(chunk_bytes / 512).unwrap_or(u32::MAX),
        consistency: match args.consistency_policy.as_str() {
            "ppl" => Consistency::Ppl,
            "resync" => Consistency::Resync,
            "bitmap" => Consistency::Bitmap,
            other => bail!("--consistency-policy {other}: it is ppl, resync or bitmap"),
        },
        size_sectors: match &args.size {
            Some(size) => Some(kib("--size", size)? / 512),
            None => None,
        },
        bitmap_chunk_bytes: match &args.bitmap_chunk {
            Some(size) => Some(kib("--bitmap-chunk", size)?),
            None => None,
        },
        private_map: !args.no_map,
        checksums: args.checksums,
        assume_clean: args.assume_clean,
        force: args.force,
        ..CreateOptions::new(&args.name)
    };
    refuse_twins(&args.members)?;
    let (members, spares) = args.members.split_at(members);
    let members = open_members(members)?;
    let devices = NewMembers {
        members,
        spares: open_all(spares)?,
    };
    let mut assembly = raid5::create(devices, &options, &mut sleepy())?;
    if assembly.dirty {
        let mut progress = Raid5Progress::default();
        let mut tell = |done, of| {
            if let Some(text) = progress.step(done, of) {
                tell!("resync: {text}");
            }
        };
        let force = AssembleOptions::default();
        raid5::prepare(&mut assembly, &force, &mut tell, &mut sleepy())?;
    }
    let g = assembly.geometry;
    let uuid = raid5::uuid_text(&options.set_uuid);
    let message = format!(
        "array {}: {}{} members, {} MiB, {}, chunks of {} KiB, consistency policy {}",
        uuid,
        named(&args.name),
        g.members(),
        g.capacity_sectors() / 2048,
        g.layout(),
        g.chunk_sectors() / 2,
        policy(assembly.policy()),
    );
    let report = Report::new("create", &uuid, message);
    report.with(detail_of(&assembly)).print(args.json)
}

/// The name with its comma; nothing for an array without one.
fn named(name: &str) -> String {
    match name {
        "" => String::new(),
        name => format!("{name}, "),
    }
}

/// In order; one may be `missing`.
/// Two places with one file lose data when that fails: nothing protects it. Locks would tell, but not with `nolock`.
fn refuse_twins(members: &[String]) -> Result<()> {
    let mut files = HashSet::new();
    for member in members {
        if let Some(file) = SpecNames::default().file(member)
            && !files.insert(file)
        {
            bail!("{member} is named twice: each place needs a device of its own");
        }
    }
    Ok(())
}

fn open_members(names: &[String]) -> Result<Vec<Option<Opened>>, Error> {
    let check = |name: &String| match name.as_str() {
        "missing" => Ok(None),
        name => member(name).map(Some),
    };
    // All of them before any file is made.
    let specs: Vec<Option<VolumeSpec>> = names.iter().map(check).collect::<Result<_, Error>>()?;
    let open = |(spec, name): (&Option<VolumeSpec>, &String)| match spec {
        Some(spec) => Ok(Some((name.clone(), spec.as_member().open()?))),
        None => Ok(None),
    };
    specs.iter().zip(names).map(open).collect()
}

fn policy(policy: Policy) -> &'static str {
    match policy {
        Policy::Resync => "resync",
        Policy::Bitmap { .. } => "bitmap",
        Policy::Ppl(_) => "ppl",
    }
}

/// Bytes; a plain number is KiB, as in mdadm.
fn kib(flag: &str, text: &str) -> Result<u64> {
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let text = if plain {
        format!("{text}k")
    } else {
        text.to_owned()
    };
    match pvblk_volume::parse_size(&text) {
        Ok(bytes) if bytes.is_multiple_of(512) => Ok(bytes),
        Ok(bytes) => bail!("{flag}: {bytes} bytes are no number of sectors"),
        Err(e) => bail!("{flag}: {e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::named;

    #[test]
    fn an_array_without_a_name_leaves_no_gap() {
        let line = |name| format!("array u: {}3 members", named(name));
        assert_eq!(line("vm1"), "array u: vm1, 3 members");
        assert_eq!(line(""), "array u: 3 members");
    }
}
