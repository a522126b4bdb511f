use super::*;

/// Four members, drawn by hand: rows downwards, members across, `P` is parity, numbers are data chunks of the array.
const TABLES: [(Layout, [&str; 5]); 4] = [
    (
        Layout::LeftAsymmetric,
        ["0 1 2 P", "3 4 P 5", "6 P 7 8", "P 9 10 11", "12 13 14 P"],
    ),
    (
        Layout::RightAsymmetric,
        ["P 0 1 2", "3 P 4 5", "6 7 P 8", "9 10 11 P", "P 12 13 14"],
    ),
    (
        Layout::LeftSymmetric,
        ["0 1 2 P", "4 5 P 3", "8 P 6 7", "P 9 10 11", "12 13 14 P"],
    ),
    (
        Layout::RightSymmetric,
        ["P 0 1 2", "5 P 3 4", "7 8 P 6", "9 10 11 P", "P 12 13 14"],
    ),
];

#[test]
fn four_members_are_as_drawn() {
    for (layout, rows) in TABLES {
        let g = Geometry::new(4, 16, layout, 5 * 16 + 3).expect("a geometry");
        assert_eq!((g.rows(), g.capacity_sectors()), (5, 15 * 16));
        for (row, line) in rows.iter().enumerate() {
            for (member, cell) in line.split(' ').enumerate() {
                let (row, at) = (row as u64, row as u64 * 16 + 5);
                let context = format!("{layout} row {row} member {member}");
                if cell == "P" {
                    assert_eq!(g.parity_member(row), member, "{context}");
                    assert_eq!(g.data_index(row, member), None, "{context}");
                    assert_eq!(g.array_sector(member, at), None, "{context}");
                    continue;
                }
                let chunk: u64 = cell.parse().expect("a number");
                let sector = chunk * 16 + 5;
                let place = g.locate(sector);
                assert_eq!(place.row, row, "{context}");
                assert_eq!(place.index, (chunk % 3) as usize, "{context}");
                assert_eq!(place.member, member, "{context}");
                assert_eq!(place.member_sector, at, "{context}");
                assert_eq!(g.array_sector(member, at), Some(sector), "{context}");
            }
        }
    }
}

fn any_geometry(rng: &mut fastrand::Rng) -> Geometry {
    let most = if rng.bool() { 8 } else { 64 };
    let members = rng.u32(3..=most);
    let chunk_sectors = 8u32 << rng.u32(0..=10);
    let rows = rng.u64(1..=200);
    let spare = rng.u64(0..u64::from(chunk_sectors));
    let layout = Layout::ALL[rng.usize(0..4)];
    Geometry::new(
        members,
        chunk_sectors,
        layout,
        rows * u64::from(chunk_sectors) + spare,
    )
    .expect("a geometry")
}

fn seeds() -> impl Iterator<Item = (u64, fastrand::Rng)> {
    pvblk_testing::seeds(7, 200).map(|seed| (seed, fastrand::Rng::with_seed(seed)))
}

#[test]
fn every_row_has_every_member_once() {
    for (seed, mut rng) in seeds() {
        let g = any_geometry(&mut rng);
        for row in 0..g.rows().min(130) {
            let mut seen = vec![false; g.members()];
            seen[g.parity_member(row)] = true;
            let stripe = row * (g.chunk_sectors() / STRIPE_SECTORS);
            let everyone = u64::MAX >> (64 - g.members());
            assert_eq!(
                g.stripe_members(stripe, u64::MAX),
                everyone & !(1 << g.parity_member(row)),
                "seed {seed}: {g:?} row {row}"
            );
            for index in 0..g.data_members() {
                let member = g.data_member(row, index);
                assert_eq!(g.stripe_members(stripe, 1 << index), 1 << member);
                assert!(!seen[member], "seed {seed}: {g:?} row {row}");
                seen[member] = true;
                assert_eq!(g.data_index(row, member), Some(index), "seed {seed}: {g:?}");
            }
        }
        // Parity takes turns: each member has it once in as many rows as there are members.
        let n = g.members() as u64;
        let mut turns: Vec<usize> = (0..n).map(|row| g.parity_member(row)).collect();
        turns.sort_unstable();
        assert!(
            turns.iter().copied().eq(0..g.members()),
            "seed {seed}: {g:?}"
        );
    }
}

#[test]
fn a_range_lies_in_the_blocks_that_have_some_of_its_sectors() {
    for (seed, mut rng) in seeds() {
        let g = any_geometry(&mut rng);
        for _ in 0..100 {
            let start = rng.u64(0..g.capacity_sectors());
            let most = rng.u64(1..=2 * g.row_sectors());
            let sectors = start..start + rng.u64(1..=most);
            let near = g.stripe_of(start).saturating_sub(2);
            let stripe = rng.u64(near..g.stripes().min(near + 20));
            let has_some = |index: &usize| {
                let first = g.stripe_array_sector(stripe, *index);
                first < sectors.end && sectors.start < first + STRIPE_SECTORS
            };
            let blocks = (0..g.data_members()).filter(has_some);
            assert_eq!(
                g.stripe_blocks(stripe, &sectors),
                blocks.fold(0, |mask, index| mask | 1 << index),
                "seed {seed}: {g:?} stripe {stripe} {sectors:?}"
            );
        }
    }
}

#[test]
fn maps_go_there_and_back() {
    for (seed, mut rng) in seeds() {
        let g = any_geometry(&mut rng);
        for _ in 0..100 {
            let sector = rng.u64(0..g.capacity_sectors());
            let place = g.locate(sector);
            let back = g.array_sector(place.member, place.member_sector);
            assert_eq!(back, Some(sector), "seed {seed}: {g:?}");
            assert!(
                place.member_sector < g.member_sectors(),
                "seed {seed}: {g:?}"
            );
            let slot = g.slot(sector);
            let (stripe, index) = (slot.stripe, slot.index);
            assert_eq!(stripe, g.stripe_of(sector));
            assert!(stripe < g.stripes());
            assert_eq!(g.stripe_row(stripe), place.row, "seed {seed}: {g:?}");
            assert_eq!(
                g.stripe_data(stripe, index),
                place.member,
                "seed {seed}: {g:?}"
            );
            assert_eq!(
                g.stripe_parity(stripe),
                g.parity_member(place.row),
                "seed {seed}: {g:?}"
            );
            assert_eq!(
                g.stripe_member_sector(stripe) + slot.offset_sectors,
                place.member_sector,
                "seed {seed}: {g:?}"
            );
            assert_eq!(
                g.stripe_array_sector(stripe, index) + slot.offset_sectors,
                sector,
                "seed {seed}: {g:?}"
            );
        }
    }
}

#[test]
fn small_arrays_are_bijections() {
    // Every sector of the array and every parity sector, painted on the members: nothing twice, nothing left.
    for layout in Layout::ALL {
        for members in 3..=9u32 {
            let g = Geometry::new(members, 8, layout, 8 * 20).expect("a geometry");
            let mut painted = vec![vec![0u32; g.member_sectors() as usize]; g.members()];
            for sector in 0..g.capacity_sectors() {
                let place = g.locate(sector);
                painted[place.member][place.member_sector as usize] += 1;
            }
            for sector in 0..g.member_sectors() {
                painted[g.parity_member(sector / 8)][sector as usize] += 1;
            }
            assert!(
                painted.iter().flatten().all(|&n| n == 1),
                "{layout} {members}"
            );
        }
    }
}

#[test]
fn pieces_cover_a_range_and_stay_in_chunks() {
    for (seed, mut rng) in seeds() {
        let g = any_geometry(&mut rng);
        let start = rng.u64(0..g.capacity_sectors());
        let sectors = rng.u64(0..=(g.capacity_sectors() - start).min(20 * g.chunk_sectors()));
        let mut at = start;
        for piece in g.pieces(start, sectors) {
            assert_eq!(piece.array_sector, at, "seed {seed}: {g:?}");
            assert!(piece.sectors > 0);
            let last = g.locate(at + piece.sectors - 1);
            assert_eq!(last.member, piece.place.member, "seed {seed}: {g:?}");
            assert_eq!(
                last.member_sector - piece.place.member_sector,
                piece.sectors - 1,
                "seed {seed}: {g:?}"
            );
            at += piece.sectors;
            let whole = at % g.chunk_sectors() == 0 || at == start + sectors;
            assert!(whole, "seed {seed}: cut too early: {g:?}");
        }
        assert_eq!(at, start + sectors, "seed {seed}: {g:?}");
    }
}

#[test]
fn the_stripes_of_a_range_have_all_its_sectors() {
    for (seed, mut rng) in seeds() {
        let g = any_geometry(&mut rng);
        let start = rng.u64(0..g.capacity_sectors());
        let most = (g.capacity_sectors() - start).min(3 * g.row_sectors());
        let end = start + rng.u64(1..=most);
        let stripes = g.range_stripes(&(start..end));
        for sector in start..end {
            let stripe = g.stripe_of(sector);
            assert!(stripes.contains(&stripe), "seed {seed}: {g:?}, {sector}");
        }
        let chunk = |sector: u64| sector / g.chunk_sectors();
        if chunk(start) == chunk(end - 1) {
            let ends = [start, end - 1].map(|sector| g.stripe_of(sector));
            assert_eq!([stripes.start, stripes.end - 1], ends, "seed {seed}: {g:?}");
        }
    }
}

#[test]
fn whole_stripes_are_those_whose_sectors_are_all_in_the_range() {
    for (seed, mut rng) in seeds() {
        let g = any_geometry(&mut rng);
        let start = rng.u64(0..g.capacity_sectors());
        let most = (g.capacity_sectors() - start).min(3 * g.row_sectors());
        let range = start..start + rng.u64(1..=most);
        let covers = |stripe, index| {
            let first = g.stripe_array_sector(stripe, index);
            let its = (first..first + STRIPE_SECTORS).filter(|sector| range.contains(sector));
            its.count() as u64
        };
        let stripes = g.range_stripes(&range);
        for stripe in stripes.clone() {
            let blocks = || (0..g.data_members()).filter(|index| covers(stripe, *index) > 0);
            let is_clean = blocks().all(|index| covers(stripe, index) == STRIPE_SECTORS);
            let mask = blocks().fold(0, |mask, index| mask | 1 << index);
            let whole = (is_clean && mask != 0).then_some(mask);
            assert_eq!(
                g.whole_blocks(stripe, &range),
                whole,
                "seed {seed}: {g:?}, {range:?}"
            );
            let is_next = |next: &u64| {
                let all = (0..g.data_members()).all(|index| covers(*next, index) == STRIPE_SECTORS);
                all && g.stripe_row(*next) == g.stripe_row(stripe)
            };
            let left = stripe..stripes.end;
            let end = stripe + left.clone().take_while(is_next).count() as u64;
            let found = g.whole_stripes(&left, &range);
            assert_eq!(found, stripe..end, "seed {seed}: {g:?}, {range:?}");
            if end > stripe {
                assert!(range.end - range.start >= g.least_whole_sectors());
                assert_eq!(g.whole_blocks(stripe, &range), Some(g.all_blocks()));
            }
        }
    }
}

#[test]
fn nonsense_is_refused_in_one_line() {
    let g = |members, chunk, sectors| Geometry::new(members, chunk, Layout::default(), sectors);
    for bad in [
        g(2, 128, 1 << 20),
        g(65, 128, 1 << 20),
        g(4, 4, 1 << 20),
        g(4, 16384, 1 << 20),
        g(4, 129, 1 << 20),
        g(4, 0, 1 << 20),
        g(4, 128, 127),
        g(4, 128, u64::MAX),
        g(64, 8, u64::MAX / 512),
    ] {
        let text = bad.expect_err("refused").to_string();
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.starts_with("raid5 "), "{text}");
    }
    assert!(g(3, 8, 8).is_ok());
    assert!(g(64, 8192, 1 << 30).is_ok());
}

#[test]
fn layouts_have_names_and_numbers() {
    for (number, layout) in Layout::ALL.into_iter().enumerate() {
        assert_eq!(Layout::from_md(number as u32), Some(layout));
        assert_eq!(layout.to_string().parse::<Layout>().ok(), Some(layout));
    }
    for number in [4, 5, 6, u32::MAX] {
        assert_eq!(Layout::from_md(number), None);
    }
    let refused = |text: &str| text.parse::<Layout>().expect_err("refused").to_string();
    assert!(refused("parity-first").contains("doesn't rotate"));
    assert!(refused("ls").contains("left-symmetric"));
}
