//! The shares that disks have of a worker's time when several have work: deficit round robin, in units of [`crate::lane::Lane::cost`].
//!
//! In each round a disk may do work worth [`TURN`]. Its lanes are stepped together with those of others until nothing is left of that; then they wait until no
//! lane of a disk that has something left finds work, which begins the next round. Work that a disk did in excess, since steps aren't cut short, is missing in the
//! next round. A disk that does little per round is never held up.

use crate::stall::Stall;
use std::sync::{Arc, Weak};

/// Work of one turn: 256 KiB of data, or 64 requests without.
pub const TURN: u64 = 512;

struct Share {
    /// Of the disk; it names the disk.
    stall: Weak<Stall>,
    /// Work left in `round`; below zero: taken in advance.
    left: i64,
    round: u64,
}

/// Shares of the disks of one worker's lanes.
#[derive(Default)]
pub struct Shares {
    all: Vec<Share>,
    round: u64,
}

impl Shares {
    /// The number of a disk's share. Numbers of disks that are gone are given again.
    pub fn enter(&mut self, stall: &Arc<Stall>) -> usize {
        let named = |s: &Share| s.stall.as_ptr() == Arc::as_ptr(stall);
        if let Some(known) = self.all.iter().position(named) {
            return known;
        }
        let share = Share {
            stall: Arc::downgrade(stall),
            left: TURN as i64,
            round: self.round,
        };
        match self.all.iter().position(|s| s.stall.strong_count() == 0) {
            Some(free) => {
                self.all[free] = share;
                free
            }
            None => {
                self.all.push(share);
                self.all.len() - 1
            }
        }
    }

    /// True if the disk may still do something in this round.
    #[inline]
    pub fn may(&mut self, share: usize) -> bool {
        let share = &mut self.all[share];
        if share.round != self.round {
            let rounds = (self.round - share.round).min(1 << 20) as i64;
            share.left = (share.left + rounds * TURN as i64).min(TURN as i64);
            share.round = self.round;
        }
        share.left > 0
    }

    /// Takes a step's work off what the disk has left: true if that was all.
    #[inline]
    pub fn charge(&mut self, share: usize, cost: u64) -> bool {
        let left = &mut self.all[share].left;
        *left -= cost as i64;
        *left <= 0
    }

    /// Begins the next round.
    #[inline]
    pub fn next_round(&mut self) {
        self.round += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_do_the_same_work_whatever_their_steps_are() {
        let disks: [Arc<Stall>; 3] = Default::default();
        let mut shares = Shares::default();
        let numbers = disks.each_ref().map(|d| shares.enter(d));
        // The third one has little to do, and does all of it.
        let costs = [TURN + 100, 24, 5];
        let mut done = [0; 3];
        for _ in 0..100_000 {
            let mut moved = false;
            for (i, &share) in numbers.iter().enumerate() {
                if shares.may(share) {
                    shares.charge(share, costs[i]);
                    done[i] += costs[i];
                    moved |= i < 2;
                }
            }
            if !moved {
                shares.next_round();
            }
        }
        let (a, b) = (done[0] as f64, done[1] as f64);
        assert!((0.99..1.01).contains(&(a / b)), "{done:?}");
        assert_eq!(done[2], 5 * 100_000);
    }

    #[test]
    fn lanes_of_one_disk_have_one_share_and_a_gone_disks_number_is_used_again() {
        let mut shares = Shares::default();
        let (a, b) = (Arc::<Stall>::default(), Arc::<Stall>::default());
        assert_eq!([&a, &b, &a].map(|s| shares.enter(s)), [0, 1, 0]);
        assert!(shares.may(0) && shares.charge(0, 2 * TURN));
        shares.next_round();
        assert!(!shares.may(0) && shares.may(1));
        drop(a);
        let c = Arc::<Stall>::default();
        assert_eq!(shares.enter(&c), 0);
        assert!(shares.may(0));
    }

    #[test]
    fn rounds_that_pass_while_a_disk_rests_give_it_one_turn() {
        let mut shares = Shares::default();
        let a = Arc::<Stall>::default();
        let share = shares.enter(&a);
        assert!(shares.charge(share, 3 * TURN));
        for _ in 0..100 {
            shares.next_round();
        }
        assert!(shares.may(share) && !shares.charge(share, TURN - 1));
        assert!(shares.charge(share, 1));
    }
}
