use super::*;
use crate::{Batch, Layout, PplHeader, find_newest, xor_of};

fn entry(data_sector: u64, blocks: u32, pp_blocks: u32, parity_member: u32) -> PplEntry {
    PplEntry {
        data_sector,
        pp_bytes: pp_blocks * 4096,
        data_bytes: blocks * 4096,
        parity_member,
        checksum: 0,
    }
}

fn geometry() -> Geometry {
    // Chunks of 16 KiB: four stripes in a row.
    Geometry::new(4, 32, Layout::LeftSymmetric, 320).expect("a geometry")
}

/// Per repair: stripe, members, block of partial parity.
fn plan(e: PplEntry) -> Vec<(u64, Vec<usize>, Option<u64>)> {
    let plan = e.plan(&geometry(), e.parity_member as usize, |_, _| false);
    let plan = plan.expect("a plan");
    assert_eq!(plan.left_alone, 0);
    plan.repairs
        .into_iter()
        .map(|r| {
            assert_eq!(r.parity_member, e.parity_member as usize);
            let block = r.partial_parity.map(|at| at / 4096);
            (r.member_sector / 8, r.data_members, block)
        })
        .collect()
}

#[test]
fn entries_mean_what_md_means() {
    // One block changes in two stripes; two blocks do; all do.
    let one = [(1, vec![1], Some(0)), (2, vec![1], Some(1))];
    assert_eq!(plan(entry(32 + 8, 2, 2, 3)), one);
    let two = [(1, vec![0, 1], Some(0)), (2, vec![0, 1], Some(1))];
    assert_eq!(plan(entry(8, 4, 2, 3)), two);
    let all = [(1, vec![0, 1, 2], None), (2, vec![0, 1, 2], None)];
    assert_eq!(plan(entry(8, 6, 0, 3)), all);
    // The second row has its parity on member 2, and its data begins on 3.
    assert_eq!(plan(entry(96 + 16, 2, 1, 2)), [(6, vec![3, 0], Some(0))]);
    // Two whole chunks: partial parity fills a chunk, and the length says which blocks.
    let deep = plan(entry(0, 8, 4, 3));
    assert_eq!(deep.len(), 4);
    assert_eq!(deep[3], (3, vec![0, 1], Some(3)));
    // From other writers: two blocks at the end of a chunk and the first of the next.
    let wrapped = [(3, vec![0], Some(0)), (0, vec![1], Some(1))];
    assert_eq!(plan(entry(24, 2, 4, 3)), wrapped);
}

#[test]
fn entries_that_md_would_not_write_are_refused() {
    let g = geometry();
    let refuse = |e: PplEntry, log| e.plan(&g, log, |_, _| false).expect_err("refused");
    let shape = |e| matches!(refuse(e, 3), PplError::Shape { .. });
    assert!(shape(entry(0, 0, 0, 3)));
    assert!(shape(entry(0, 1, 0, 3)), "all blocks, but of what");
    assert!(shape(entry(0, 3, 2, 3)));
    assert!(shape(entry(0, 4, 1, 3)), "more blocks than there are");
    assert!(shape(entry(0, 1, 2, 3)));
    assert!(shape(entry(0, 5, 5, 3)), "deeper than a chunk");
    let mut odd = entry(0, 1, 1, 3);
    odd.data_bytes += 512;
    odd.pp_bytes += 512;
    assert!(shape(odd));
    let range = |e| matches!(refuse(e, 3), PplError::Range(_));
    assert!(range(entry(4, 1, 1, 3)), "not on a block");
    assert!(range(entry(24, 6, 0, 3)), "into the next row");
    assert!(range(entry(64, 2, 1, 3)), "into the next row");
    assert!(range(entry(960, 1, 1, 3)), "behind the end");
    assert!(range(entry(u64::MAX - 7, 1, 1, 3)));
    let parity = |e, log| matches!(refuse(e, log), PplError::Parity { right: 3, .. });
    assert!(parity(entry(0, 1, 1, 2), 3));
    assert!(parity(entry(0, 1, 1, 3), 2));
    assert!(parity(entry(0, 1, 1, u32::MAX), 3));
}

#[test]
fn blocks_of_missing_members_are_left_alone() {
    let g = geometry();
    let plan = |missing: usize, from: u64| {
        let e = entry(0, 4, 2, 3);
        e.plan(&g, 3, |m, sector| m == missing && sector >= from)
            .map(|p| (p.repairs.len(), p.left_alone))
    };
    assert_eq!(plan(9, 0), Ok((2, 0)));
    assert_eq!(plan(1, 0), Ok((0, 2)));
    assert_eq!(plan(1, 8), Ok((1, 1)), "rebuilt up to there");
    assert_eq!(plan(2, 0), Ok((2, 0)), "its data didn't change");
}

type Block = [u8; STRIPE_BYTES];

/// An array in memory, at the granularity of blocks.
#[derive(Clone)]
struct Array {
    g: Geometry,
    members: Vec<Vec<Block>>,
}

impl Array {
    fn new(g: Geometry, rng: &mut fastrand::Rng) -> Array {
        let mut members = vec![vec![[0; STRIPE_BYTES]; g.stripes() as usize]; g.members()];
        for stripe in 0..g.stripes() {
            for index in 0..g.data_members() {
                // Enough to tell blocks apart.
                rng.fill(&mut members[g.stripe_data(stripe, index)][stripe as usize][..16]);
            }
        }
        let mut array = Array { g, members };
        for stripe in 0..g.stripes() {
            let parity = array.sum(stripe, |_| true);
            array.members[g.stripe_parity(stripe)][stripe as usize] = parity;
        }
        array
    }

    fn block(&self, member: usize, stripe: u64) -> &Block {
        &self.members[member][stripe as usize]
    }

    /// XOR of the data blocks of a stripe that are asked for.
    fn sum(&self, stripe: u64, wanted: impl Fn(usize) -> bool) -> Block {
        let blocks = (0..self.g.data_members()).filter(|&i| wanted(i));
        let blocks: Vec<&[u8]> = blocks
            .map(|i| &self.block(self.g.stripe_data(stripe, i), stripe)[..])
            .collect();
        let mut sum = [0; STRIPE_BYTES];
        xor_of(&mut sum, &blocks);
        sum
    }

    fn is_right(&self, stripe: u64) -> bool {
        self.sum(stripe, |_| true) == *self.block(self.g.stripe_parity(stripe), stripe)
    }
}

/// Writes are logged, any part of their blocks reaches the members, and recovery follows: parity is right everywhere; and a
/// member that was lost with the crash comes back from the others, but for blocks that were being written.
#[test]
fn no_crash_opens_the_write_hole() {
    for seed in pvblk_testing::seeds(3, 150) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let layout = Layout::ALL[rng.usize(0..4)];
        let members = rng.u32(3..8);
        let g = Geometry::new(members, 8 << rng.u32(0..3), layout, 32 * 12).expect("a geometry");
        let before = Array::new(g, &mut rng);
        let mut now = before.clone();

        // One batch for each parity member, of distinct stripes in order, so that some join.
        let mut logs: Vec<Vec<u8>> = vec![PplHeader::empty(5).encode().to_vec(); g.members()];
        let mut written: Vec<(u64, usize, usize)> = Vec::new();
        for (member, log) in logs.iter_mut().enumerate() {
            let mut batch = Batch::new(g, 5, 1, member, 6 * 4096);
            let mut partial = Vec::new();
            let (mut first, mut blocks) = (0, 1);
            for stripe in (0..g.stripes()).filter(|&s| g.stripe_parity(s) == member) {
                if rng.u32(0..3) == 0 {
                    first = rng.usize(0..g.data_members());
                    blocks = rng.usize(1..=g.data_members() - first);
                }
                if rng.u32(0..3) == 0 {
                    continue;
                }
                let rest = before.sum(stripe, |i| !(first..first + blocks).contains(&i));
                let pp = (blocks < g.data_members()).then_some(&rest);
                if batch.add(stripe, first, blocks, pp).is_err() {
                    break;
                }
                partial.extend(pp.into_iter().flatten());
                written.push((stripe, first, blocks));
            }
            if !batch.is_empty() {
                *log = [&batch.header().encode()[..], &partial].concat();
            }
        }
        // Of new data and new parity, any blocks.
        for &(stripe, first, blocks) in &written {
            let mut new = [0; STRIPE_BYTES];
            rng.fill(&mut new[..16]);
            for index in first..first + blocks {
                if rng.bool() {
                    new[17] = index as u8 + 1;
                    now.members[g.stripe_data(stripe, index)][stripe as usize] = new;
                }
            }
            if rng.bool() {
                now.members[g.stripe_parity(stripe)][stripe as usize] = new;
            }
        }

        let lost = match rng.bool() {
            true => Some(rng.usize(0..g.members())),
            false => None,
        };
        let crashed = now.clone();
        for (member, log) in logs.iter().enumerate() {
            if lost == Some(member) {
                continue;
            }
            let newest = find_newest(log, 5).expect("a log");
            for (at, entry) in newest.header.entries_at() {
                let at = 4096 + at as usize;
                let partial = &log[at..at + entry.pp_bytes as usize];
                entry.check(partial).expect("undamaged");
                let plan = entry.plan(&g, member, |m, _| Some(m) == lost);
                for repair in plan.expect("a plan").repairs {
                    let stripe = repair.member_sector / STRIPE_SECTORS;
                    let at = repair.partial_parity.map(|at| at as usize);
                    let of = repair.data_members.iter();
                    let mut sources: Vec<&[u8]> = of.map(|&m| &now.block(m, stripe)[..]).collect();
                    sources.extend(at.map(|at| &partial[at..at + STRIPE_BYTES]));
                    let mut parity = [0; STRIPE_BYTES];
                    xor_of(&mut parity, &sources);
                    now.members[repair.parity_member][stripe as usize] = parity;
                }
            }
        }

        for stripe in 0..g.stripes() {
            let context = format!("seed {seed}, stripe {stripe}, lost {lost:?}");
            let parity_member = g.stripe_parity(stripe);
            for index in 0..g.data_members() {
                let member = g.stripe_data(stripe, index);
                assert!(now.block(member, stripe) == crashed.block(member, stripe));
            }
            let Some(lost) = lost.filter(|&l| l != parity_member) else {
                assert!(lost.is_some() || now.is_right(stripe), "{context}");
                continue;
            };
            let index = g.data_index(g.stripe_row(stripe), lost).expect("data");
            let was_written = written
                .iter()
                .any(|&(s, first, blocks)| s == stripe && (first..first + blocks).contains(&index));
            if !was_written {
                let mut back = now.sum(stripe, |i| i != index);
                let mut rest = [0; STRIPE_BYTES];
                xor_of(&mut rest, &[&back, now.block(parity_member, stripe)]);
                back = rest;
                assert!(back == *before.block(lost, stripe), "{context}");
            }
        }
    }
}

#[test]
fn damaged_partial_parity_is_found() {
    let g = geometry();
    let mut batch = Batch::new(g, 1, 1, 3, 1 << 17);
    let blocks: Vec<Block> = (0..3).map(|n| [n as u8 + 1; STRIPE_BYTES]).collect();
    for (stripe, block) in blocks.iter().enumerate() {
        batch.add(stripe as u64, 1, 1, Some(block)).expect("room");
    }
    let [entry] = batch.header().entries[..] else {
        panic!("they join");
    };
    let mut partial = blocks.concat();
    assert_eq!(entry.check(&partial), Ok(()));
    assert!(entry.check(&partial[..4096]).is_err());
    partial[5000] ^= 1;
    assert_eq!(entry.check(&partial), Err(PplError::PartialParity));
    let whole = entry_of_whole_stripe(&g);
    assert_eq!(whole.check(&[]), Ok(()));
}

fn entry_of_whole_stripe(g: &Geometry) -> PplEntry {
    let mut batch = Batch::new(*g, 1, 1, 3, 0);
    batch.add(0, 0, 3, None).expect("room");
    batch.header().entries[0]
}
