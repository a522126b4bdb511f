//! Metrics of arrays and caches, from the answers to questions.

use super::asker::{Asked, Question};
use super::families::{self as f, Family};
use super::snapshot::DiskFigures;
use super::text::{Labels, Lines};
use pvblk_raid5::ask::{Detail, DetailMember, DeviceState};
use serde_json::Value;
use std::io;

/// Bytes of a page of a cache, and of the KiB in which some of its counters count.
const PAGE: u64 = 4096;
const KIB: u64 = 1024;

/// The questions to disks that are arrays or caches, by their volumes.
pub fn questions(disks: &[DiskFigures]) -> Vec<Asked> {
    let mut all = Vec::new();
    for disk in disks.iter().filter(|d| d.counts.is_some()) {
        for (word, question) in [("raid5:", Question::Array), ("cache:", Question::Cache)] {
            if disk.volume.contains(word) {
                all.push((disk.name.clone(), question));
            }
        }
    }
    all
}

pub fn write(lines: &mut Lines<'_>, answers: &[(Asked, Value)]) -> io::Result<()> {
    let of = |wanted: Question| {
        let mut found: Vec<(&str, &Value)> = answers
            .iter()
            .filter(|((_, question), _)| *question == wanted)
            .map(|((name, _), value)| (name.as_str(), value))
            .collect();
        found.sort_unstable_by_key(|(name, _)| *name);
        found
    };
    let details = of(Question::Array).into_iter();
    let details: Vec<(Labels, Detail)> = details
        .filter_map(|(name, value)| {
            let detail = serde_json::from_value(value.clone()).ok()?;
            Some((Labels::of("disk", name), detail))
        })
        .collect();
    arrays(lines, &details)?;
    let caches = of(Question::Cache).into_iter();
    let caches: Vec<(Labels, &Value)> = caches
        .map(|(name, value)| (Labels::of("disk", name), value))
        .collect();
    self::caches(lines, &caches)
}

const MEMBER_STATES: [(DeviceState, &str); 5] = [
    (DeviceState::Active, "active"),
    (DeviceState::Rebuilding, "rebuilding"),
    (DeviceState::Spare, "spare"),
    (DeviceState::Faulty, "faulty"),
    (DeviceState::Removed, "removed"),
];

fn arrays(lines: &mut Lines<'_>, arrays: &[(Labels, Detail)]) -> io::Result<()> {
    let serving = || {
        arrays
            .iter()
            .filter_map(|(l, d)| Some((l, d.serving.as_ref()?)))
    };
    let mut samples = lines.family(&f::ARRAY_DEGRADED)?;
    for (label, detail) in arrays {
        samples.put(label, u64::from(detail.degraded))?;
    }
    let mut samples = lines.family(&f::ARRAY_FAILED)?;
    for (label, serving) in serving() {
        samples.put(label, u64::from(serving.failed))?;
    }
    let mut samples = lines.family(&f::ARRAY_MEMBERS)?;
    for (label, detail) in arrays {
        for (state, name) in MEMBER_STATES {
            let count = detail.members.iter().filter(|m| m.state == state).count();
            samples.put(&label.and("state", name), count as u64)?;
        }
    }
    let mut samples = lines.family(&f::ARRAY_AWAY)?;
    for (label, serving) in serving() {
        samples.put(label, serving.away.len() as u64)?;
    }
    for family in [&f::ARRAY_CORRECTED, &f::ARRAY_CHECKSUM] {
        let count = |member: &DetailMember| match std::ptr::eq(family, &f::ARRAY_CORRECTED) {
            true => member.corrected_reads,
            false => member.checksum_errors,
        };
        let mut samples = lines.family(family)?;
        for (label, detail) in arrays {
            // While a member is replaced two devices are at its place.
            let whole = detail
                .members
                .iter()
                .filter(|m| m.state == DeviceState::Active);
            for (place, member) in whole.filter_map(|m| Some((m.place?, m))) {
                let labels = label.and("place", &place.to_string());
                samples.put(&labels, u64::from(count(member)))?;
            }
        }
    }
    let mut samples = lines.family(&f::ARRAY_MISMATCH)?;
    for (label, serving) in serving() {
        samples.put(label, serving.mismatch_sectors * 512)?;
    }
    let syncs =
        || serving().filter_map(|(l, s)| s.sync.as_ref().map(|s| (l.and("action", &s.action), s)));
    let mut samples = lines.family(&f::ARRAY_SYNC_DONE)?;
    for (labels, sync) in syncs() {
        samples.put(&labels, sync.done_bytes)?;
    }
    let mut samples = lines.family(&f::ARRAY_SYNC_SIZE)?;
    for (labels, sync) in syncs() {
        samples.put(&labels, sync.of_bytes)?;
    }
    Ok(())
}

fn caches(lines: &mut Lines<'_>, caches: &[(Labels, &Value)]) -> io::Result<()> {
    let sum = |value: &Value, names: &[&str]| {
        let each = names.iter().filter_map(|n| value[*n].as_u64());
        each.sum::<u64>()
    };
    let counters: [(&'static Family, &[&str], u64); 10] = [
        (&f::CACHE_HITS, &["hits"], 1),
        (&f::CACHE_MISSES, &["misses"], 1),
        (&f::CACHE_READ, &["pgpgin"], KIB),
        (&f::CACHE_WRITTEN, &["pgpgout"], KIB),
        (
            &f::CACHE_USED,
            &["nr_active_file", "nr_inactive_file"],
            PAGE,
        ),
        (&f::CACHE_FREE, &["nr_free_pages", "nr_listed_pages"], PAGE),
        (&f::CACHE_DIRTY, &["nr_dirty", "nr_writeback"], PAGE),
        (&f::CACHE_AHEAD, &["readahead_pages"], 1),
        (&f::CACHE_AHEAD_USED, &["readahead_used"], 1),
        (&f::CACHE_REFAULTS, &["workingset_refault_file"], 1),
    ];
    for (family, names, factor) in counters {
        let mut samples = lines.family(family)?;
        for (label, value) in caches {
            samples.put(label, sum(value, names) * factor)?;
        }
    }
    for (family, name) in [
        (&f::CACHE_STALLED, "stall_ns"),
        (&f::CACHE_THROTTLED, "throttled_ns"),
    ] {
        let mut samples = lines.family(family)?;
        for (label, value) in caches {
            samples.put_ns(label, sum(value, &[name]))?;
        }
    }
    let mut samples = lines.family(&f::CACHE_ERRORS)?;
    for (label, value) in caches {
        samples.put(&label.and("op", "read"), sum(value, &["read_errors"]))?;
        samples.put(&label.and("op", "write"), sum(value, &["write_errors"]))?;
    }
    Ok(())
}
