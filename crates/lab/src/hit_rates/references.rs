//! Policies to compare with, as short as they can be: they know pages, and nothing of memory, devices or threads.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

/// A cache of a number of pages.
pub trait Reference {
    /// Reads a page: true if it is there. It is afterwards.
    fn access(&mut self, page: u64) -> bool;
}

/// The page that wasn't used for longest goes.
#[derive(Debug)]
pub struct Lru {
    frames: usize,
    now: u64,
    used: HashMap<u64, u64>,
    by_time: BTreeMap<u64, u64>,
}

impl Lru {
    pub fn new(frames: usize) -> Lru {
        Lru {
            frames,
            now: 0,
            used: HashMap::new(),
            by_time: BTreeMap::new(),
        }
    }
}

impl Reference for Lru {
    fn access(&mut self, page: u64) -> bool {
        self.now += 1;
        let before = self.used.insert(page, self.now);
        if let Some(before) = before {
            self.by_time.remove(&before);
        }
        self.by_time.insert(self.now, page);
        if self.used.len() > self.frames
            && let Some((_, oldest)) = self.by_time.pop_first()
        {
            self.used.remove(&oldest);
        }
        before.is_some()
    }
}

/// SIEVE (NSDI '24): pages in the order in which they came, with a mark that a read sets. A hand goes from the oldest to the newest, takes marks
/// off, and evicts the first page without one.
#[derive(Debug)]
pub struct Sieve {
    frames: usize,
    now: u64,
    /// When each page came.
    came: HashMap<u64, u64>,
    /// Pages and their marks in that order.
    queue: BTreeMap<u64, (u64, bool)>,
    /// The hand is at the first page that came at this time or later.
    hand: u64,
}

impl Sieve {
    pub fn new(frames: usize) -> Sieve {
        Sieve {
            frames,
            now: 0,
            came: HashMap::new(),
            queue: BTreeMap::new(),
            hand: 0,
        }
    }

    fn evict(&mut self) {
        loop {
            let from_hand = self.queue.range_mut(self.hand..).next();
            let Some((&at, (page, marked))) = from_hand else {
                self.hand = 0;
                continue;
            };
            self.hand = at + 1;
            if !std::mem::take(marked) {
                self.came.remove(page);
                self.queue.remove(&at);
                return;
            }
        }
    }
}

impl Reference for Sieve {
    fn access(&mut self, page: u64) -> bool {
        if let Some(place) = self.came.get(&page).and_then(|at| self.queue.get_mut(at)) {
            place.1 = true;
            return true;
        }
        if self.came.len() == self.frames {
            self.evict();
        }
        self.now += 1;
        self.came.insert(page, self.now);
        self.queue.insert(self.now, (page, false));
        false
    }
}

/// S3-FIFO (SOSP '23): a small queue of a tenth for new pages, a main one, and the names of as many pages as the main one has that left the small one.
#[derive(Debug)]
pub struct S3Fifo {
    frames: usize,
    small_share: usize,
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    /// Uses of each page since it came or was looked at, at most 3.
    uses: HashMap<u64, u8>,
    ghosts: VecDeque<u64>,
    is_ghost: HashSet<u64>,
}

impl S3Fifo {
    pub fn new(frames: usize) -> S3Fifo {
        S3Fifo {
            frames,
            small_share: (frames / 10).max(1),
            small: VecDeque::new(),
            main: VecDeque::new(),
            uses: HashMap::new(),
            ghosts: VecDeque::new(),
            is_ghost: HashSet::new(),
        }
    }

    fn evict(&mut self) {
        while self.uses.len() >= self.frames {
            match self.small.len() >= self.small_share || self.main.is_empty() {
                true => self.look_at_small(),
                false => self.look_at_main(),
            }
        }
    }

    fn look_at_small(&mut self) {
        let Some(page) = self.small.pop_front() else {
            return;
        };
        if self.uses.get(&page).is_some_and(|&uses| uses > 1) {
            self.uses.insert(page, 0);
            self.main.push_back(page);
            return;
        }
        self.uses.remove(&page);
        self.is_ghost.insert(page);
        self.ghosts.push_back(page);
        if self.ghosts.len() > self.frames - self.small_share
            && let Some(oldest) = self.ghosts.pop_front()
        {
            self.is_ghost.remove(&oldest);
        }
    }

    fn look_at_main(&mut self) {
        let Some(page) = self.main.pop_front() else {
            return;
        };
        match self.uses.get_mut(&page) {
            Some(uses) if *uses > 0 => {
                *uses -= 1;
                self.main.push_back(page);
            }
            _ => drop(self.uses.remove(&page)),
        }
    }
}

impl Reference for S3Fifo {
    fn access(&mut self, page: u64) -> bool {
        if let Some(uses) = self.uses.get_mut(&page) {
            *uses = (*uses + 1).min(3);
            return true;
        }
        self.evict();
        self.uses.insert(page, 0);
        // Its name stays in the queue of ghosts until it is the oldest.
        match self.is_ghost.remove(&page) {
            true => self.main.push_back(page),
            false => self.small.push_back(page),
        }
        false
    }
}

/// The page that is used again last goes, which no policy can know (Belady's): the best that there can be.
#[derive(Debug)]
pub struct Best {
    frames: usize,
    /// For each access the place of the next one to the same page.
    next: Vec<usize>,
    at: usize,
    when: HashMap<u64, usize>,
    by_time: BTreeSet<(usize, u64)>,
}

impl Best {
    /// For the accesses `pages`, which are to follow in this order.
    pub fn new(frames: usize, pages: &[u64]) -> Best {
        let mut seen = HashMap::new();
        let mut next = vec![usize::MAX; pages.len()];
        for (at, page) in pages.iter().enumerate().rev() {
            next[at] = seen.insert(*page, at).unwrap_or(usize::MAX);
        }
        Best {
            frames,
            next,
            at: 0,
            when: HashMap::new(),
            by_time: BTreeSet::new(),
        }
    }
}

impl Reference for Best {
    fn access(&mut self, page: u64) -> bool {
        let next = self.next[self.at];
        self.at += 1;
        let before = self.when.insert(page, next);
        if let Some(before) = before {
            self.by_time.remove(&(before, page));
        }
        self.by_time.insert((next, page));
        if self.when.len() > self.frames
            && let Some((_, last)) = self.by_time.pop_last()
        {
            self.when.remove(&last);
        }
        before.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hits(reference: &mut dyn Reference, pages: &[u64]) -> Vec<u64> {
        let hits = pages.iter().filter(|&&p| reference.access(p));
        hits.copied().collect()
    }

    #[test]
    fn each_evicts_its_own_page() {
        // 1 is used again, 2 isn't; 4 comes to three pages.
        let pages = [1, 2, 3, 1, 4, 1, 2, 3];
        assert_eq!(hits(&mut Lru::new(3), &pages), [1, 1]);
        // The hand passes 1, evicts 2 for 4; then 3 for 2, and 4 for 3.
        assert_eq!(hits(&mut Sieve::new(3), &pages), [1, 1]);
        assert_eq!(hits(&mut Best::new(3, &pages), &pages), [1, 1, 2, 3]);
        // The small queue has one place in ten: 0 was used twice, so it goes to the main one, and 1 goes.
        let pages = [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 2, 1, 9];
        assert_eq!(hits(&mut S3Fifo::new(10), &pages), [0, 0, 0, 2, 9]);
    }

    #[test]
    fn none_is_better_than_the_best_or_larger_than_it_may_be() {
        let mut rng = fastrand::Rng::with_seed(5);
        for frames in [1, 2, 10, 33] {
            let pages: Vec<u64> = (0..5000)
                .map(|_| rng.u64(..60).min(rng.u64(..60)))
                .collect();
            let best = hits(&mut Best::new(frames, &pages), &pages).len();
            let (mut lru, mut sieve) = (Lru::new(frames), Sieve::new(frames));
            let mut s3 = S3Fifo::new(frames.max(2));
            for reference in [&mut lru as &mut dyn Reference, &mut sieve] {
                assert!(hits(reference, &pages).len() <= best);
            }
            hits(&mut s3, &pages);
            assert!(lru.used.len() <= frames && sieve.queue.len() <= frames);
            assert_eq!(s3.uses.len(), s3.small.len() + s3.main.len());
            assert!(s3.uses.len() <= frames.max(2));
        }
    }
}
