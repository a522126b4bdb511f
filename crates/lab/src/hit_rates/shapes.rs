//! Shapes of loads, as pages that are read one after the other. Sizes are in multiples of the cache, `c`.

use pvblk_bench::Zipf;

/// A shape. Papers on caches name these as the parts of which block traces consist: skewed use, scans, loops, pages read once, working sets that move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Zipf's law with exponent 0.7 over 8 c.
    ZipfFlat,
    /// Zipf's law with exponent 1 over 8 c.
    Zipf,
    /// Zipf's law with exponent 1 over 8 c; a backup reads 2 c in order after each 4 c reads. Reads of the backup aren't counted.
    ZipfAndScan,
    /// Any page of 1.5 c.
    Uniform,
    /// 1.2 c in order, again and again.
    Loop,
    /// Half of the reads are of pages that nobody read before or will read again; the others follow Zipf's law, 0.9 over 2 c.
    ReadOnce,
    /// A third of the reads are of pages that are read twice within c / 50 reads and then never again; the others follow Zipf's law, 0.9 over 2 c.
    ReadTwice,
    /// 0.6 c are read at random; they are others after each 5 c reads.
    Moving,
    /// 0.5 c were read often and aren't any more; then any page of 0.9 c. It is the state in which a kernel of 2009 lost its throughput (seed 002).
    OldHot,
    /// A database: an index of 0.2 c is read in half of the reads, the table of 20 c at random in the others.
    IndexAndTable,
}

/// Reads in order, and those of them that count.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The page of each read.
    pub pages: Vec<u64>,
    /// The first read that counts.
    begin: usize,
    /// Pages from here on are a scan's, which don't count.
    scan: u64,
}

impl Trace {
    /// True if the read at this place counts.
    pub fn counts(&self, at: usize) -> bool {
        at >= self.begin && self.pages[at] < self.scan
    }

    /// Number of reads that count.
    pub fn counted(&self) -> u64 {
        let places = self.begin..self.pages.len();
        places.filter(|&at| self.counts(at)).count() as u64
    }

    /// The page behind the last one.
    pub fn end(&self) -> u64 {
        self.pages.iter().max().map_or(0, |page| page + 1)
    }
}

/// Pages by Zipf's law, in an order that has nothing to do with how often they are read.
struct Pages {
    ranks: Zipf,
    by_rank: Vec<u64>,
}

impl Pages {
    fn new(pages: u64, exponent: f64, rng: &mut fastrand::Rng) -> Pages {
        let mut by_rank: Vec<u64> = (0..pages).collect();
        rng.shuffle(&mut by_rank);
        let ranks = Zipf::new(pages, exponent);
        Pages { ranks, by_rank }
    }

    fn page(&self, rng: &mut fastrand::Rng) -> u64 {
        self.by_rank[self.ranks.pick(rng) as usize]
    }
}

impl Shape {
    pub const ALL: [Shape; 10] = [
        Shape::ZipfFlat,
        Shape::Zipf,
        Shape::ZipfAndScan,
        Shape::Uniform,
        Shape::Loop,
        Shape::ReadOnce,
        Shape::ReadTwice,
        Shape::Moving,
        Shape::OldHot,
        Shape::IndexAndTable,
    ];

    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Shape::ZipfFlat => "Zipf 0.7",
            Shape::Zipf => "Zipf 1.0",
            Shape::ZipfAndScan => "Zipf 1.0 beside scans",
            Shape::Uniform => "uniform, 1.5 c",
            Shape::Loop => "loop, 1.2 c",
            Shape::ReadOnce => "half read once",
            Shape::ReadTwice => "a third read twice",
            Shape::Moving => "moving set, 0.6 c",
            Shape::OldHot => "old hot pages, 0.9 c",
            Shape::IndexAndTable => "index and table",
        }
    }

    /// The reads of this shape for caches of `c` pages.
    pub fn trace(self, c: u64, seed: u64) -> Trace {
        let mut rng = fastrand::Rng::with_seed(seed);
        let rng = &mut rng;
        let of = |factor: f64| (c as f64 * factor) as u64;
        let reads = 40 * c;
        let mut pages = Vec::with_capacity(reads as usize);
        // A cache is full and its lists have turned over by then.
        let mut begin = 10 * c as usize;
        let mut scan = u64::MAX;
        match self {
            Shape::ZipfFlat | Shape::Zipf => {
                let exponent = if self == Shape::Zipf { 1.0 } else { 0.7 };
                let zipf = Pages::new(8 * c, exponent, rng);
                pages.extend((0..reads).map(|_| zipf.page(rng)));
            }
            Shape::ZipfAndScan => {
                let zipf = Pages::new(8 * c, 1.0, rng);
                scan = 8 * c;
                while (pages.len() as u64) < reads {
                    pages.extend((0..4 * c).map(|_| zipf.page(rng)));
                    pages.extend(scan..scan + 2 * c);
                }
            }
            Shape::Uniform => pages.extend((0..reads).map(|_| rng.u64(..of(1.5)))),
            Shape::Loop => pages.extend((0..reads).map(|n| n % of(1.2))),
            Shape::ReadOnce => {
                let zipf = Pages::new(2 * c, 0.9, rng);
                for n in 0..reads {
                    pages.push(if rng.bool() {
                        zipf.page(rng)
                    } else {
                        2 * c + n
                    });
                }
            }
            Shape::ReadTwice => {
                let zipf = Pages::new(2 * c, 0.9, rng);
                let (mut fresh, mut again) = (2 * c, Vec::new());
                for _ in 0..reads {
                    pages.push(match rng.u32(..6) {
                        0 => {
                            again.push(fresh);
                            fresh += 1;
                            fresh - 1
                        }
                        // As many as are new, and some c / 50 reads later.
                        1 if again.len() as u64 > of(1.0 / 300.0) => {
                            again.swap_remove(rng.usize(..again.len()))
                        }
                        _ => zipf.page(rng),
                    });
                }
            }
            Shape::Moving => {
                for n in 0..reads {
                    let turn = n / (5 * c);
                    pages.push(turn * c + rng.u64(..of(0.6)));
                }
            }
            Shape::OldHot => {
                for _ in 0..3 {
                    pages.extend(0..of(0.5));
                }
                // Reads count while the old hot pages are in the way.
                begin = pages.len() + c as usize;
                let rest = reads - pages.len() as u64;
                pages.extend((0..rest).map(|_| c + rng.u64(..of(0.9))));
            }
            Shape::IndexAndTable => {
                for _ in 0..reads {
                    pages.push(match rng.bool() {
                        true => rng.u64(..of(0.2)),
                        false => c + rng.u64(..20 * c),
                    });
                }
            }
        }
        Trace { pages, begin, scan }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_what_they_say() {
        for shape in Shape::ALL {
            let trace = shape.trace(256, 1);
            assert_eq!(trace.pages, shape.trace(256, 1).pages, "from a seed");
            assert!(trace.counted() > 256 * 10, "{shape:?}");
        }
        let once = Shape::ReadOnce.trace(256, 1);
        let mut fresh: Vec<u64> = once.pages.iter().copied().filter(|&p| p >= 512).collect();
        let reads = fresh.len();
        fresh.dedup();
        assert_eq!(fresh.len(), reads);
        let twice = Shape::ReadTwice.trace(256, 1);
        let mut times = std::collections::HashMap::new();
        let fresh = twice.pages.iter().filter(|&&p| p >= 512);
        fresh.for_each(|&page| *times.entry(page).or_insert(0) += 1);
        assert!(times.values().all(|&n| n <= 2));
        let share = times.values().sum::<i32>() as f64 / twice.pages.len() as f64;
        assert!((0.3..0.37).contains(&share), "{share}");
        let scans = Shape::ZipfAndScan.trace(256, 1);
        assert!(scans.counted() < scans.pages.len() as u64 * 3 / 4);
    }

    #[test]
    fn the_second_page_is_read_half_as_often() {
        let mut rng = fastrand::Rng::with_seed(3);
        let zipf = Pages::new(1000, 1.0, &mut rng);
        let [first, second] = [zipf.by_rank[0], zipf.by_rank[1]];
        let reads: Vec<u64> = (0..200_000).map(|_| zipf.page(&mut rng)).collect();
        let of = |page| reads.iter().filter(|&&p| p == page).count() as f64;
        assert!((1.9..2.1).contains(&(of(first) / of(second))));
    }
}
