//! Bounds of a search: requests, sweeps, faults, and members that are missing.

use super::state::{REQUESTS, STRIPES};
use crate::state::{BLOCKS, MEMBERS, NONE, PARITY};
use std::fmt;

/// A request of one user.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    pub reads: bool,
    pub stripe: u8,
    /// Data blocks, as a mask; a read has one.
    pub blocks: u8,
}

/// Kinds of faults.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Faults {
    /// Most of them in a run.
    pub most: u8,
    pub flips: bool,
    /// A sum on disk is wrong.
    pub sums: bool,
    /// One write is lost.
    pub lost: bool,
    /// All writes of a device are lost for a while.
    pub all: bool,
    pub astray: bool,
}

/// See the module's documentation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bound {
    /// The place that has parity, for each stripe.
    pub parity: [u8; STRIPES],
    pub requests: [Option<Request>; REQUESTS],
    /// Parity is made by read-modify-write where both ways are possible.
    pub modify: bool,
    /// Each stripe has a chunk of its own.
    pub apart: bool,
    pub sweeps: u8,
    /// The power may be cut once.
    pub cut: bool,
    pub faults: Faults,
    /// The place without a member at first, and whether a spare is rebuilt for it.
    pub missing: u8,
    pub spare: bool,
    /// Places whose sums aren't known at first, as a mask.
    pub unknown: u8,
}

impl Bound {
    pub fn place(&self, stripe: usize, block: usize) -> usize {
        let parity = self.parity[stripe] as usize;
        let others = || (0..MEMBERS).filter(|m| *m != parity);
        others().nth(block).unwrap_or(parity)
    }

    pub fn block(&self, stripe: usize, place: usize) -> usize {
        let is_there = |b: &usize| self.place(stripe, *b) == place;
        (0..BLOCKS).find(is_there).unwrap_or(PARITY)
    }

    pub fn chunk(&self, stripe: usize) -> usize {
        if self.apart { stripe } else { 0 }
    }

    /// All chunks, as a mask.
    pub fn chunks(&self) -> u8 {
        if self.apart { 0b11 } else { 0b01 }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        for request in self.requests.iter().flatten() {
            let blocks = ["", "a", "b", "ab"][usize::from(request.blocks)];
            let reads = if request.reads { "?" } else { "" };
            words.push(format!("{}:{blocks}{reads}", request.stripe));
        }
        let mut add = |has: bool, word: &str| words.extend(has.then(|| word.to_owned()));
        add(self.modify, "modify");
        add(self.apart, "apart");
        (0..self.sweeps).for_each(|_| add(true, "sweep"));
        add(self.cut, "cut");
        let faults = self.faults;
        add(faults.flips, "flip");
        add(faults.sums, "sum");
        add(faults.lost, "lost");
        add(faults.all, "all");
        add(faults.astray, "astray");
        add(faults.most > 1, "twice");
        for place in 0..MEMBERS as u8 {
            add(self.missing == place, &format!("missing{place}"));
            add(self.unknown & (1 << place) != 0, &format!("unknown{place}"));
        }
        add(self.spare, "spare");
        write!(f, "{}", words.join(" "))
    }
}

fn request(word: &str) -> Option<Request> {
    let (stripe, blocks) = word.split_once(':')?;
    let (blocks, reads) = match blocks.strip_suffix('?') {
        Some(blocks) => (blocks, true),
        None => (blocks, false),
    };
    let blocks = match blocks {
        "a" => 0b01,
        "b" => 0b10,
        "ab" if !reads => 0b11,
        _ => return None,
    };
    let stripe = stripe.parse().ok().filter(|s| usize::from(*s) < STRIPES)?;
    Some(Request {
        reads,
        stripe,
        blocks,
    })
}

/// A bound, as its words have it: `0:ab` is a write of both blocks of stripe 0, `1:a?` a read, `sweep` one sweep, `cut` a power cut, `flip` and the
/// like one fault, `twice` two. `missing0` and `unknown0` are of a place. `None`: a word isn't known.
pub fn bound(words: &str) -> Option<Bound> {
    let mut bound = Bound {
        parity: [2, 1],
        requests: [None; REQUESTS],
        modify: false,
        apart: false,
        sweeps: 0,
        cut: false,
        faults: Faults::default(),
        missing: NONE,
        spare: false,
        unknown: 0,
    };
    let faults = |f: &mut Faults| f.most = f.most.max(1);
    for word in words.split_whitespace() {
        let place = |of: &str| {
            let place = word.strip_prefix(of)?.parse().ok();
            place.filter(|place| usize::from(*place) < MEMBERS)
        };
        match word {
            "modify" => bound.modify = true,
            "apart" => bound.apart = true,
            "sweep" => bound.sweeps += 1,
            "cut" => bound.cut = true,
            "flip" => bound.faults.flips = true,
            "sum" => bound.faults.sums = true,
            "lost" => bound.faults.lost = true,
            "all" => bound.faults.all = true,
            "astray" => bound.faults.astray = true,
            "spare" => bound.spare = true,
            "twice" => bound.faults.most = 2,
            _ if let Some(place) = place("missing") => bound.missing = place,
            _ if let Some(place) = place("unknown") => bound.unknown |= 1 << place,
            _ => *bound.requests.iter_mut().find(|r| r.is_none())? = Some(request(word)?),
        }
        if matches!(word, "flip" | "sum" | "lost" | "all" | "astray") {
            faults(&mut bound.faults);
        }
    }
    Some(bound)
}

/// The rest of each bound that isn't a request or a sweep.
const OTHERS: [&str; 5] = [
    "flip sum lost all astray",
    "modify sweep flip all",
    "apart cut lost",
    "modify cut flip all",
    "flip missing0 spare",
];

fn bounds(all: &[&str]) -> Vec<Bound> {
    all.iter().filter_map(|words| bound(words)).collect()
}

/// A few bounds, for each run of the tests: between them all faults and power cuts, one chunk and two, both ways of making parity, sums that aren't
/// known at first, two faults, and a rebuild for each place.
pub fn some() -> Vec<Bound> {
    bounds(&[
        "0:a 0:b? sweep cut flip sum lost all astray",
        "0:a 0:a? modify sweep sweep cut flip all",
        "0:a 1:ab apart sweep cut lost all astray",
        "0:a 0:b? sweep cut flip unknown1",
        "0:a 0:a? sweep flip sum twice",
        "0:a 0:b 0:a? sweep flip missing0",
        "0:a 0:b? sweep flip missing0 spare",
        "0:a 1:b? sweep flip all missing1 spare",
        "0:a 0:b? sweep flip missing2 spare",
    ])
}

/// All sets of three requests of six kinds, with a sweep and faults, and in turn with power cuts, two chunks, parity by read-modify-write, and rebuilds.
pub fn all() -> Vec<Bound> {
    const KINDS: [&str; 6] = ["0:a", "0:b", "0:ab", "1:a", "0:a?", "1:b?"];
    let mut all = some();
    for (a, first) in KINDS.iter().enumerate() {
        for (b, second) in KINDS.iter().enumerate().skip(a) {
            for third in &KINDS[b..] {
                let words = format!("{first} {second} {third} sweep");
                for others in OTHERS {
                    all.extend(bound(&format!("{words} {others}")));
                }
            }
        }
    }
    all
}
