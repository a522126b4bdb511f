//! Bounds of a search: what users write, and what may fail.

use crate::state::{BLOCKS, STRIPES, WRITES};
use std::fmt;

/// A write of one user.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct Shape {
    pub stripe: u8,
    /// Data blocks, as a mask.
    pub blocks: u8,
    /// Sectors of each of them, as a mask.
    pub sectors: u8,
    pub fua: bool,
}

/// See the module's documentation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bound {
    /// The place that has parity, for each stripe.
    pub parity: [u8; STRIPES],
    pub writes: [Option<Shape>; WRITES],
    /// Parity is made by read-modify-write where both ways are possible.
    pub modify: bool,
    /// There is one flush, at any time.
    pub flush: bool,
    /// One member fails, at any time, or is lost with the power.
    pub failure: bool,
    /// The array recovers onto a spare.
    pub spare: bool,
    /// The spare fails too, while it is recovered or later.
    pub spare_fails: bool,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for shape in self.writes.iter().flatten() {
            write!(f, "{}:", shape.stripe)?;
            for b in (0..BLOCKS).filter(|b| shape.blocks & (1 << b) != 0) {
                write!(f, "{}", ["a", "b"][b])?;
            }
            let part = if shape.sectors == 0b11 { "" } else { "/2" };
            write!(f, "{part}{} ", if shape.fua { "!" } else { "" })?;
        }
        let mut words = vec![if self.modify { "modify" } else { "reconstruct" }];
        words.push(match self.parity[0] == self.parity[1] {
            true => "one log",
            false => "two logs",
        });
        words.extend(self.flush.then_some("flush"));
        words.extend(self.failure.then_some("failure"));
        words.extend(self.spare.then_some("spare"));
        words.extend(self.spare_fails.then_some("spare fails"));
        write!(f, "{}", words.join(", "))
    }
}

/// A write as the documents have it: `0:ab` is both blocks of stripe 0, `1:a/2` half of a block of stripe 1, and `!` means FUA.
pub fn shape(text: &str) -> Option<Shape> {
    let (stripe, rest) = text.split_once(':')?;
    let (rest, fua) = match rest.strip_suffix('!') {
        Some(rest) => (rest, true),
        None => (rest, false),
    };
    let (rest, sectors) = match rest.strip_suffix("/2") {
        Some(rest) => (rest, 0b01),
        None => (rest, 0b11),
    };
    let blocks = match rest {
        "a" => 0b01,
        "b" => 0b10,
        "ab" => 0b11,
        _ => return None,
    };
    let stripe = stripe.parse().ok().filter(|s| usize::from(*s) < STRIPES)?;
    Some(Shape {
        stripe,
        blocks,
        sectors,
        fua,
    })
}

/// A bound with these writes, and all that may happen besides. Panics if a write can't be read.
pub fn bound(writes: &[&str]) -> Bound {
    let mut all = [None; WRITES];
    for (place, text) in all.iter_mut().zip(writes) {
        let read = shape(text);
        assert!(read.is_some(), "{text} is no write");
        *place = read;
    }
    Bound {
        parity: [2, 2],
        writes: all,
        modify: false,
        flush: true,
        failure: true,
        spare: true,
        spare_fails: true,
    }
}
