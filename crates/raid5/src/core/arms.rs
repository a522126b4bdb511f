//! [`Arms`]: the stripes of all queues that read, and that are under way, where members have arms.
//!
//! Such members are slow if they go from one place to another. So queues take turns: mostly, stripes of one queue are near to each other. A
//! turn is no token, since a queue that has nothing to do any more isn't polled: whoever looks first when no stripe reads may begin.

use crate::words::Owner;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// See the module's documentation. All queues have it.
#[derive(Default)]
pub(super) struct Arms(Mutex<ArmsNow>);

#[derive(Default)]
struct ArmsNow {
    reading: usize,
    /// Queues that wait, with their numbers of stripes. All are told when no stripe reads any more.
    waiting: VecDeque<(Owner, usize)>,
    /// Those that may read although others do: it is their turn.
    turns: Vec<Owner>,
    /// Stripes under way. Once there are as many as may have pages, none goes until a quarter less are.
    under_way: usize,
    is_full: bool,
}

impl Arms {
    /// A queue has stripes that have to read; true if they may. If not, it is told by [`super::Mail::MayRead`].
    pub fn may_read(&self, queue: Owner, stripes: usize) -> bool {
        let mut now = self.0.lock();
        if now.reading == 0 || now.turns.contains(&queue) {
            now.forget(queue);
            return true;
        }
        match now.waiting.iter_mut().find(|(of, _)| *of == queue) {
            Some((_, count)) => *count = stripes,
            None => now.waiting.push_back((queue, stripes)),
        }
        false
    }

    /// A stripe reads from now on.
    pub fn begin(&self) {
        self.0.lock().reading += 1;
    }

    /// A stripe doesn't read any more. If none does, it is the turn of as many queues as have `most` stripes together, or of one; returns all that
    /// wait, which are to be told.
    pub fn end(&self, most: usize) -> Vec<Owner> {
        let mut now = self.0.lock();
        now.reading -= 1;
        if now.reading > 0 {
            return Vec::new();
        }
        // Those that had a turn and haven't looked were told, and come again when they look.
        let turns = std::mem::take(&mut now.turns);
        now.waiting.retain(|(queue, _)| !turns.contains(queue));
        let mut sum = 0;
        let has_turn = |(n, (queue, stripes)): (usize, &(Owner, usize))| {
            sum += stripes;
            (n == 0 || sum <= most).then_some(*queue)
        };
        now.turns = now.waiting.iter().enumerate().map_while(has_turn).collect();
        now.waiting.iter().map(|(queue, _)| *queue).collect()
    }

    /// A stripe goes to its word; false if too many of the `sets` that may have pages are under way. Only a queue that has one under way may be
    /// refused: it tries again when that has ended.
    pub fn enter(&self, has_some: bool, sets: usize) -> bool {
        let mut now = self.0.lock();
        let most = if now.is_full { sets - sets / 4 } else { sets };
        now.is_full = now.under_way >= most;
        let may_go = !now.is_full || !has_some;
        now.under_way += usize::from(may_go);
        may_go
    }

    /// A stripe isn't under way any more.
    pub fn leave(&self) {
        self.0.lock().under_way -= 1;
    }

    /// A queue is closed.
    pub fn forget(&self, queue: Owner) {
        self.0.lock().forget(queue);
    }
}

impl ArmsNow {
    fn forget(&mut self, queue: Owner) {
        self.waiting.retain(|(of, _)| *of != queue);
        self.turns.retain(|of| *of != queue);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETS: usize = 8;

    fn queue(number: u16) -> Owner {
        Owner::new(number).expect("a number")
    }

    #[test]
    fn queues_that_wait_longest_may_join() {
        let arms = Arms::default();
        assert!(arms.may_read(queue(1), 1));
        arms.begin();
        assert!(!arms.may_read(queue(2), 5) && !arms.may_read(queue(3), 3));
        assert!(!arms.may_read(queue(4), 1) && !arms.may_read(queue(2), 5));
        assert_eq!(arms.end(SETS), [2, 3, 4].map(queue));
        // Another one looks first. It is the turn of those that have as many stripes as there may be.
        assert!(arms.may_read(queue(1), 1));
        arms.begin();
        assert!(arms.may_read(queue(2), 5) && arms.may_read(queue(3), 3));
        assert!(!arms.may_read(queue(4), 1));
        assert_eq!(arms.end(SETS), [queue(4)]);
    }

    #[test]
    fn a_queue_that_doesnt_look_keeps_no_turn() {
        let arms = Arms::default();
        arms.begin();
        assert!(!arms.may_read(queue(2), SETS) && !arms.may_read(queue(3), SETS));
        assert_eq!(arms.end(SETS), [2, 3].map(queue));
        arms.begin();
        assert!(!arms.may_read(queue(3), SETS), "it is the other's turn");
        assert_eq!(arms.end(SETS), [queue(3)]);
        arms.begin();
        assert!(arms.may_read(queue(3), SETS));
    }

    #[test]
    fn a_queue_without_a_stripe_under_way_is_never_refused() {
        let arms = Arms::default();
        assert!((0..SETS).all(|_| arms.enter(true, SETS)));
        assert!(!arms.enter(true, SETS) && arms.enter(false, SETS));
        // A quarter less, so that neighbours go together.
        (0..3).for_each(|_| arms.leave());
        assert!(!arms.enter(true, SETS));
        arms.leave();
        assert!(arms.enter(true, SETS) && arms.enter(true, SETS));
    }
}
