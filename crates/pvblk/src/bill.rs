//! The memory bill, printed.

use pvblk_block::memory::{MemoryKind, MemoryLine, bill};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Lines of one kind of owner that are printed one by one; more are summed up.
const SHOWN: usize = 12;

/// All owners, and the heap that no gauge claims. `base` is what the process had before it served anything.
pub fn lines(base: u64) -> Vec<MemoryLine> {
    let mut lines = bill();
    let claimed: u64 = lines
        .iter()
        .filter(|l| l.kind == MemoryKind::Heap)
        .map(|l| l.live_bytes)
        .sum();
    let heap = (pvblk_sys::alloc::live_bytes() as u64).saturating_sub(claimed);
    for (owner, bytes) in [("process at start", base), ("other heap", heap)] {
        lines.push(MemoryLine {
            owner: owner.to_owned(),
            kind: MemoryKind::Heap,
            live_bytes: bytes,
            cap_bytes: bytes,
        });
    }
    lines
}

/// Sums of private and shared bytes in use, and of the caps.
pub fn totals(lines: &[MemoryLine]) -> (u64, u64, u64) {
    let sum = |shared: bool| {
        lines
            .iter()
            .filter(|l| l.kind != MemoryKind::Unallocated)
            .filter(|l| (l.kind == MemoryKind::Shared) == shared)
            .map(|l| l.live_bytes)
            .sum()
    };
    (
        sum(false),
        sum(true),
        lines
            .iter()
            .filter(|l| l.kind != MemoryKind::Unallocated)
            .map(|l| l.cap_bytes)
            .sum(),
    )
}

/// The bill as a table.
pub fn render(base: u64) -> String {
    let lines = lines(base);
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{:<52} {:>10} {:>12} {:>12}",
        "memory", "kind", "now KiB", "at most KiB"
    );
    // Owners that differ only in numbers are one group.
    let mut groups: BTreeMap<String, Vec<&MemoryLine>> = BTreeMap::new();
    for l in &lines {
        let key: String = l.owner.chars().filter(|c| !c.is_ascii_digit()).collect();
        groups
            .entry(format!("{key}{:?}", l.kind))
            .or_default()
            .push(l);
    }
    for group in groups.values() {
        if group.len() <= SHOWN {
            for l in group {
                row(&mut out, &l.owner, l.kind, l.live_bytes, l.cap_bytes);
            }
        } else {
            let name = format!("{} and {} like it", group[0].owner, group.len() - 1);
            let live = group.iter().map(|l| l.live_bytes).sum();
            let cap = group.iter().map(|l| l.cap_bytes).sum();
            row(&mut out, &name, group[0].kind, live, cap);
        }
    }
    let (private, shared, cap) = totals(&lines);
    let _ = writeln!(
        out,
        "sum: {} KiB private, {} KiB mapped shared, at most {} KiB",
        private / 1024,
        shared / 1024,
        cap / 1024
    );
    out
}

fn row(out: &mut String, owner: &str, kind: MemoryKind, live: u64, cap: u64) {
    let kind = match kind {
        MemoryKind::Heap => "heap",
        MemoryKind::Anonymous => "private",
        MemoryKind::Shared => "shared",
        MemoryKind::Unallocated => "not yet",
    };
    let _ = writeln!(
        out,
        "{owner:<52} {kind:>10} {:>12} {:>12}",
        live.div_ceil(1024),
        cap.div_ceil(1024)
    );
}
