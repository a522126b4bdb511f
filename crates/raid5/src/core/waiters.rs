//! Pieces that found nothing free, by the queues that they came through: each has its turn, so that all of them have something to do.

use super::Piece;
use std::collections::VecDeque;

#[derive(Default)]
pub(super) struct Waiters {
    /// Waiting pieces by owner.
    all: Vec<VecDeque<Piece>>,
    len: usize,
    /// Whose turn it is, and how many pieces it has had of it.
    turn: usize,
    taken: usize,
}

impl Waiters {
    pub fn push(&mut self, owner: usize, piece: Piece) {
        if self.all.len() <= owner {
            self.all.resize_with(owner + 1, VecDeque::new);
        }
        self.all[owner].push_back(piece);
        self.len += 1;
    }

    /// The next piece. A turn has `turn` pieces, and goes on to the end of its request, whose pieces are
    /// neighbours. Long turns suit rotational disks: the pieces of one queue are mostly near to each other.
    pub fn pop(&mut self, turn: usize) -> Option<Piece> {
        if self.len == 0 {
            return None;
        }
        while self.all[self.turn].is_empty() {
            self.pass();
        }
        let piece = self.all[self.turn].pop_front()?;
        self.len -= 1;
        self.taken += 1;
        let next = self.all[self.turn].front();
        if self.taken >= turn && next.is_none_or(|n| n.request != piece.request) {
            self.pass();
        }
        Some(piece)
    }

    fn pass(&mut self) {
        self.turn = (self.turn + 1) % self.all.len();
        self.taken = 0;
    }

    /// All of them.
    pub fn take(&mut self) -> Vec<Piece> {
        self.len = 0;
        self.all.iter_mut().flat_map(std::mem::take).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(request: usize) -> Piece {
        Piece {
            request,
            write: true,
            stripe: 0,
            index: 0,
            offset: 0,
            sectors: 8,
            skip: 0,
        }
    }

    #[test]
    fn each_has_its_turn_and_whole_requests() {
        let mut waiters = Waiters::default();
        // Owner 2 has requests of three pieces, owner 0 of one.
        for request in [20, 21, 22] {
            (0..3).for_each(|_| waiters.push(2, piece(request)));
        }
        (0..3).for_each(|n| waiters.push(0, piece(n)));
        let order: Vec<usize> = std::iter::from_fn(|| waiters.pop(2).map(|p| p.request)).collect();
        assert_eq!(order, [0, 1, 20, 20, 20, 2, 21, 21, 21, 22, 22, 22]);
        assert!(waiters.pop(2).is_none());
        waiters.push(1, piece(7));
        waiters.push(0, piece(8));
        assert_eq!(waiters.take().len(), 2);
        assert!(waiters.pop(2).is_none());
    }
}
