//! Counts by submitter, where members can do several requests at once; with rotational members all
//! submitters count as one.

/// A number for each submitter.
pub(super) struct Tally {
    of: Vec<usize>,
    together: bool,
}

impl Tally {
    /// `together`: all submitters are one.
    pub fn new(together: bool) -> Tally {
        Tally {
            of: Vec::new(),
            together,
        }
    }

    /// Index of a submitter's count.
    pub fn key(&self, owner: usize) -> usize {
        match self.together {
            true => 0,
            false => owner,
        }
    }

    pub fn get(&self, owner: usize) -> usize {
        self.of.get(self.key(owner)).copied().unwrap_or(0)
    }

    pub fn add(&mut self, owner: usize) {
        let key = self.key(owner);
        if self.of.len() <= key {
            self.of.resize(key + 1, 0);
        }
        self.of[key] += 1;
    }

    pub fn sub(&mut self, owner: usize) {
        let key = self.key(owner);
        self.of[key] -= 1;
    }

    /// Keys of those that aren't zero.
    pub fn some(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.of.len()).filter(|k| self.of[*k] > 0)
    }
}
