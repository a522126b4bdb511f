//! The bounds that are searched. They differ in what is written; everywhere a member may fail, and the spare that takes its place, and there
//! may be a flush, at any time.

use crate::bound::{Bound, bound};

/// A few bounds, for each run of the tests: between them both ways of making parity, one log and two, FUA, parts of blocks, whole
/// stripes, and three writes to one stripe.
pub fn some() -> Vec<Bound> {
    let two_logs = |b: Bound| Bound {
        parity: [2, 1],
        ..b
    };
    let modify = |b: Bound| Bound { modify: true, ..b };
    vec![
        bound(&["0:a", "0:b", "1:a"]),
        modify(bound(&["0:a", "0:b/2", "0:a/2!"])),
        two_logs(bound(&["0:a!", "0:b", "1:ab"])),
        bound(&["0:ab", "0:a/2", "0:b"]),
    ]
}

/// All sets of three writes of the eight kinds, each with one log and parity from all data, and with two logs, parity by
/// read-modify-write, and FUA for the first write.
pub fn all() -> Vec<Bound> {
    const KINDS: [&str; 8] = ["0:a", "0:b", "0:ab", "0:a/2", "1:a", "1:b", "1:ab", "1:a/2"];
    let mut bounds = some();
    for (a, first) in KINDS.iter().enumerate() {
        for (b, second) in KINDS.iter().enumerate().skip(a) {
            for third in &KINDS[b..] {
                bounds.push(bound(&[first, second, third]));
                let stable = format!("{first}!");
                bounds.push(Bound {
                    parity: [2, 1],
                    modify: true,
                    ..bound(&[&stable, second, third])
                });
            }
        }
    }
    bounds
}
