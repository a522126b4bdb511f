use super::*;
use crate::Layout;
use crate::core::record::PartOf;
use crate::words::Owner;
use pvblk_block::{Op, Request};
use std::sync::Arc;

/// Sets of pages: so twice as many stripes may wait.
const SETS: usize = 4;

/// Three data members, chunks of two blocks: a row has two stripes, of three blocks each.
struct Stripes {
    geometry: Geometry,
    gather: Gather,
    /// Parts that went, each with its stripe and its number under way.
    went: Vec<(u64, usize)>,
    /// Parts that may arrive at words.
    places: usize,
}

fn rules(geometry: &Geometry, places: usize) -> Rules<'_> {
    Rules {
        geometry,
        sets: SETS,
        places,
        kept: 0,
        streams: true,
        arms: None,
    }
}

impl Stripes {
    fn new() -> Stripes {
        let geometry = Geometry::new(4, 16, Layout::LeftSymmetric, 64 * STRIPE_SECTORS);
        Stripes {
            geometry: geometry.expect("a geometry"),
            gather: Gather::default(),
            went: Vec::new(),
            places: 100,
        }
    }

    /// A write comes; true if all of its parts found room.
    fn write(&mut self, sector: u64, sectors: u64) -> bool {
        self.gather.streams.note(sector, sectors);
        self.add(sector, sectors)
    }

    fn add(&mut self, sector: u64, sectors: u64) -> bool {
        let request = Arc::new(Request::new(Op::Write, sector, sectors, 0));
        let end = sector + sectors;
        let stripes = self.geometry.range_stripes(&(sector..end));
        stripes.into_iter().all(|stripe| {
            let range = sector..end;
            if self.geometry.stripe_blocks(stripe, &range) == 0 {
                return true;
            }
            let part = Part {
                of: PartOf::Request {
                    request: Arc::clone(&request),
                    id: 0,
                    sectors: range,
                    way: None,
                },
                from: Owner::new(1).expect("a number"),
                stripe,
            };
            let has_room = self
                .gather
                .has_room(stripe, &rules(&self.geometry, self.places));
            if has_room {
                self.gather.add(part, &self.geometry);
            }
            has_room
        })
    }

    /// Stripes whose parts go now, one for each part.
    fn go(&mut self) -> Vec<u64> {
        let mut stripes = Vec::new();
        while let Some(part) = self.gather.next(&rules(&self.geometry, self.places)) {
            let PartOf::Request { way, .. } = part.of else {
                unreachable!("a part of a request")
            };
            self.went.push((part.stripe, way.expect("its number")));
            stripes.push(part.stripe);
            self.gather.check().expect("all in their places");
        }
        stripes
    }

    /// All parts of a stripe that went have ended.
    fn end(&mut self, stripe: u64) {
        for (_, way) in self.went.extract_if(.., |(of, _)| *of == stripe) {
            self.gather.part_ended(way);
        }
    }

    fn expect_nothing(&mut self) {
        assert!(self.gather.waits_in_vain());
        self.gather.oldest_go(&rules(&self.geometry, self.places));
    }
}

#[test]
fn partial_writes_wait_while_others_read() {
    let mut stripes = Stripes::new();
    assert!(stripes.write(0, 8));
    assert_eq!(stripes.go(), [0]);
    // Another row's, and the same stripe's again.
    assert!(stripes.write(48, 8) && stripes.write(32, 8));
    assert_eq!(stripes.go(), [0; 0]);
    assert!(!stripes.gather.waits_in_vain(), "a write is under way");
    stripes.end(0);
    assert_eq!(stripes.go(), [0, 2], "in their order");
    stripes.end(0);
    assert!(stripes.write(96, 8));
    assert_eq!(stripes.go(), [0; 0], "stripe 2 reads");
    stripes.end(2);
    assert_eq!(stripes.go(), [4]);
}

#[test]
fn a_stripe_that_becomes_whole_goes_while_others_read() {
    let mut stripes = Stripes::new();
    assert!(stripes.write(480, 8));
    assert_eq!(stripes.go(), [20]);
    // The blocks of stripe 0: 0, 16 and 32, of which one comes in two pieces.
    assert!(stripes.write(0, 4) && stripes.write(16, 8) && stripes.write(32, 8));
    assert_eq!(stripes.go(), [0; 0]);
    assert!(stripes.write(4, 4));
    assert_eq!(stripes.go(), [0, 0, 0, 0]);
}

#[test]
fn a_stream_lets_its_row_wait() {
    let mut stripes = Stripes::new();
    // Five of the six blocks of row 0: stripe 0 is whole, and stripe 1 isn't.
    for block in 0..5 {
        assert!(stripes.write(block * 8, 8));
    }
    assert_eq!(stripes.go(), [0; 0], "more will come");
    assert!(stripes.write(40, 8));
    // The whole row at once.
    let went = stripes.go();
    assert_eq!((went.len(), went[0], went[5]), (6, 0, 1));
}

#[test]
fn a_stream_that_ends_goes_on_when_its_user_waits() {
    let mut stripes = Stripes::new();
    for block in 0..5 {
        assert!(stripes.write(block * 8, 8));
    }
    assert_eq!(stripes.go(), [0; 0]);
    // First those that are whole.
    stripes.expect_nothing();
    assert_eq!(stripes.go(), [0, 0, 0]);
    assert!(!stripes.gather.waits_in_vain());
    stripes.end(0);
    stripes.expect_nothing();
    assert_eq!(stripes.go(), [1, 1]);
    stripes.end(1);
    assert!(stripes.gather.is_empty());
}

#[test]
fn nothing_waits_for_ever_beside_a_stream() {
    let mut stripes = Stripes::new();
    for block in 0..5 {
        assert!(stripes.write(block * 8, 8));
    }
    assert_eq!(stripes.go(), [0; 0]);
    // Other writes end all the time; the stream stays known.
    let turns = (0..=PATIENCE).position(|_| {
        assert!(stripes.add(480, 8));
        let went = stripes.go();
        assert!(went.contains(&20));
        stripes.end(20);
        went.contains(&0) && went.contains(&1)
    });
    assert_eq!(turns, None, "it is patient");
    assert!(stripes.add(480, 8));
    let went = stripes.go();
    assert!(went.contains(&0) && went.contains(&1), "{went:?}");
}

#[test]
fn the_longest_wait_ends_when_there_is_no_room() {
    let mut stripes = Stripes::new();
    assert!(stripes.write(0, 8));
    assert_eq!(stripes.go(), [0]);
    // Each in a stripe of its own.
    for row in 1..=(SETS * WAITING_PER_SET) as u64 {
        assert!(stripes.write(row * 48, 8));
    }
    assert!(!stripes.write(480, 8));
    assert_eq!(stripes.go(), [2]);
    assert!(stripes.write(480, 8));
}

#[test]
fn few_enough_are_under_way() {
    let mut stripes = Stripes::new();
    // Whole rows, of two stripes each.
    assert!((0..3).all(|row| stripes.write(row * 48, 48)));
    assert_eq!(stripes.go(), [0, 1, 2, 3]);
    stripes.end(0);
    assert_eq!(stripes.go(), [0; 0], "neighbours go together");
    stripes.end(1);
    assert_eq!(stripes.go(), [4, 5]);
}

#[test]
fn a_stripe_goes_when_all_of_it_has_places() {
    let mut stripes = Stripes::new();
    // Two stripes of a part each, and one of three.
    assert!(stripes.write(0, 48));
    let blocks = [96, 112, 128];
    assert!(blocks.into_iter().all(|sector| stripes.write(sector, 8)));
    stripes.places = 2;
    assert_eq!(stripes.go(), [0, 1]);
    stripes.end(0);
    assert_eq!(stripes.go(), [0; 0], "it would read");
    stripes.end(1);
    assert_eq!(stripes.go(), [4, 4, 4], "nothing else would give it places");
}

/// Stripes that go next as a run, and the numbers of blocks of its writes.
fn alike(stripes: &mut Stripes, most: usize) -> Option<(std::ops::Range<u64>, Vec<u32>)> {
    let rules = rules(&stripes.geometry, stripes.places);
    let found = stripes
        .gather
        .whole_goes(&rules)
        .then(|| stripes.gather.alike(&rules, most));
    let (run, of) = found.flatten()?;
    Some((run, of.iter().map(|of| of.blocks.count_ones()).collect()))
}

#[test]
fn neighbours_with_the_same_writes_go_as_a_run() {
    let mut stripes = Stripes::new();
    // Two chunks of row 0, and the rest of it with row 1.
    assert!(stripes.write(0, 32) && stripes.write(32, 64));
    assert_eq!(alike(&mut stripes, 8), Some((0..2, vec![2, 1])));
    assert_eq!(alike(&mut stripes, 1), Some((0..1, vec![2, 1])));
    let ways = stripes.gather.run_goes(2);
    assert_eq!(ways.len(), 2);
    // Row 1 has other writes.
    assert_eq!(alike(&mut stripes, 8), Some((2..4, vec![3])));
    stripes.gather.check().expect("all in their places");
    for way in ways {
        // Two parts of each stripe.
        assert_eq!(stripes.gather.part_ended(way), None);
        assert_eq!(stripes.gather.part_ended(way), Some(false));
    }
    assert_eq!(stripes.go(), [2, 3]);
}

#[test]
fn stripes_whose_blocks_are_shared_or_cut_go_alone() {
    let mut stripes = Stripes::new();
    // Both write block 1 of stripes 0 and 1.
    assert!(stripes.write(0, 32) && stripes.write(16, 32));
    assert_eq!(alike(&mut stripes, 8), None);
    assert_eq!(stripes.go(), [0, 0, 1, 1]);
    // Block 0 of stripe 4 comes in two pieces.
    assert!(stripes.write(96, 4) && stripes.write(100, 44));
    assert_eq!(alike(&mut stripes, 8), None);
}

#[test]
fn a_run_has_no_more_stripes_than_may_be_under_way() {
    let mut stripes = Stripes::new();
    assert!((0..3).all(|row| stripes.write(row * 48, 48)));
    assert_eq!(alike(&mut stripes, 8), Some((0..2, vec![3])));
    assert_eq!(stripes.go(), [0, 1, 2, 3]);
    assert_eq!(
        alike(&mut stripes, 8),
        None,
        "four are, as many as there are sets"
    );
    stripes.end(0);
    stripes.end(1);
    assert_eq!(alike(&mut stripes, 8), Some((4..6, vec![3])));
}
