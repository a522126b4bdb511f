//! [`Stock`]: pages of stripes that move between queues, and [`Reserve`], those of a queue.

use super::epoch::Epoch;
use super::packed::Owner;
use super::table::{Record, Table};
use super::token::{Claimed, Leaves, Token};
use pvblk_block::stacked::{Count, Lock, Native, Primitives};
use std::collections::VecDeque;
use std::sync::Arc;

/// Sets that a queue takes from the stock at a time, or gives to it.
const DOZEN: usize = 12;
/// Sets whose memory is given back at a time, so that the others are there for queues meanwhile.
const PORTION: usize = 64;
/// Words that a queue freed last, whose sets it takes only if there are no others: the next writes may be to the same stripes.
const RECENT: usize = 32;
/// Number of freed words that a queue remembers at least, before it drops those that others have claimed since then.
const REMEMBERED: usize = 64;

/// A set: the pages of one stripe, as a value. It is in one place at any time: the stock, a queue's reserve, a word's record, or a variable.
pub trait PageSet: Send + Sized + 'static {
    /// Gives the memory of those to the system that nobody else has a buffer of; returns bytes.
    fn give_back(sets: &mut [Self]) -> u64;
}

/// Duties that a step of pages leaves to its caller.
#[derive(Debug)]
pub struct Errands<R> {
    /// Queues that have waited for pages and have them: they are woken.
    pub wake: Vec<Owner>,
    /// Queues that wait until words are drained: they look again.
    pub tell: Vec<Owner>,
    /// Words that pieces arrived for while they were claimed for their pages: the caller takes the list and hands the word over.
    pub arrived: Vec<Token<Claimed, R>>,
}

impl<R> Default for Errands<R> {
    fn default() -> Errands<R> {
        Errands {
            wake: Vec::new(),
            tell: Vec::new(),
            arrived: Vec::new(),
        }
    }
}

/// Sets of a queue, whose lock nobody else wants except when pages are short.
type Shelf<V, P> = <P as Primitives>::Lock<Vec<V>>;

struct Inner<V: Send, P: Primitives> {
    /// Taken from the back: the front has those whose memory was given back.
    sets: VecDeque<V>,
    /// Queues that wait, first come first. While there is one, `sets` is empty.
    line: VecDeque<Owner>,
    /// Sets for queues that were in the line, until they take them.
    granted: Vec<(Owner, V)>,
    shelves: Vec<(Owner, Arc<Shelf<V, P>>)>,
    /// Sets that there are, wherever they are.
    total: usize,
    /// Sets that are dropped when they come: there are to be fewer.
    surplus: usize,
}

/// Sets that no queue has, and the queues that wait for one.
pub struct Stock<V: PageSet, P: Primitives = Native> {
    inner: P::Lock<Inner<V, P>>,
    /// Queues in the line, and surplus sets. Changes under the lock only; while it isn't 0, batches that end give their sets to the stock.
    wanted: P::Count,
}

/// The side of a stock to which sets are put.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Used,
    GivenBack,
}

impl<V: PageSet, P: Primitives> Stock<V, P> {
    pub fn new(sets: Vec<V>) -> Arc<Stock<V, P>> {
        let inner = Inner {
            total: sets.len(),
            sets: sets.into(),
            line: VecDeque::new(),
            granted: Vec::new(),
            shelves: Vec::new(),
            surplus: 0,
        };
        Arc::new(Stock {
            inner: P::Lock::new(inner),
            wanted: P::Count::new(),
        })
    }

    /// The reserve of a queue that is opened. Its number is no other open queue's.
    pub fn open(self: &Arc<Self>, owner: Owner) -> Reserve<V, P> {
        let shelf = Arc::new(Shelf::<V, P>::new(Vec::new()));
        let mut inner = self.inner.lock();
        debug_assert!(inner.shelves.iter().all(|(other, _)| *other != owner));
        inner.shelves.push((owner, Arc::clone(&shelf)));
        Reserve {
            owner,
            stock: Arc::clone(self),
            shelf,
            released: Released::default(),
            useful: Released::default(),
            cursor: 0,
            waits: false,
            is_short: false,
        }
    }

    /// A queue is closed: its sets are the others'. Those in records of free words are found there.
    pub fn close(&self, reserve: Reserve<V, P>, wake: &mut Vec<Owner>) {
        let owner = reserve.owner;
        let mut left = Vec::new();
        if reserve.waits {
            left.extend(self.leave_line(owner));
        }
        let mut inner = self.inner.lock();
        inner.shelves.retain(|(other, _)| *other != owner);
        drop(inner);
        left.append(&mut reserve.shelf.lock());
        self.put(left, End::Used, wake);
    }

    /// True if a queue waits for a set, or there are too many: batches that end give theirs away.
    pub fn is_wanted(&self) -> bool {
        self.wanted.load() != 0
    }

    /// Sets that were in somebody's hand are dropped if there are too many, or are for the first in the line, or for anybody.
    fn put(&self, sets: impl IntoIterator<Item = V>, end: End, wake: &mut Vec<Owner>) {
        let mut dropped = Vec::new();
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        for set in sets {
            if inner.surplus > 0 {
                inner.surplus -= 1;
                inner.total -= 1;
                self.wanted.sub(1);
                dropped.push(set);
            } else if let Some(owner) = inner.line.pop_front() {
                self.wanted.sub(1);
                inner.granted.push((owner, set));
                wake.push(owner);
            } else if end == End::Used {
                inner.sets.push_back(set);
            } else {
                inner.sets.push_front(set);
            }
        }
        drop(guard);
        V::give_back(&mut dropped);
    }

    /// A set of the stock; others go to the reserve with it.
    fn take(&self, shelf: &Shelf<V, P>) -> Option<V> {
        let mut inner = self.inner.lock();
        let set = inner.sets.pop_back()?;
        let from = inner.sets.len().saturating_sub(DOZEN - 1);
        // Under the lock: whoever looks at stock and reserves finds them in one of both.
        shelf.lock().extend(inner.sets.drain(from..));
        Some(set)
    }

    /// A set of another queue's reserve. Half of the others there come with it.
    fn take_from_others(inner: &Inner<V, P>, owner: Owner, shelf: &Shelf<V, P>) -> Option<V> {
        let others = inner.shelves.iter().filter(|(other, _)| *other != owner);
        for (_, other) in others {
            let mut theirs = other.lock();
            let Some(set) = theirs.pop() else {
                continue;
            };
            let half = theirs.len().div_ceil(2);
            let mut more = theirs.split_off(half);
            drop(theirs);
            shelf.lock().append(&mut more);
            return Some(set);
        }
        None
    }

    /// A set of the stock, or of another queue's reserve; if there is none, the queue is the last in the line now, and looks again.
    fn take_or_join_line(&self, owner: Owner, shelf: &Shelf<V, P>) -> Option<V> {
        let mut inner = self.inner.lock();
        let found = inner.sets.pop_back();
        let found = found.or_else(|| Self::take_from_others(&inner, owner, shelf));
        if found.is_none() {
            inner.line.push_back(owner);
            self.wanted.add(1);
            // Pairs with the barrier of those who free a word: this queue sees the set there, or they see this queue.
            P::full_barrier();
        }
        found
    }

    /// The queue waits no longer. It may have a set already.
    fn leave_line(&self, owner: Owner) -> Option<V> {
        let mut inner = self.inner.lock();
        if let Some(at) = inner.line.iter().position(|other| *other == owner) {
            inner.line.remove(at);
            self.wanted.sub(1);
        }
        Self::granted(&mut inner, owner)
    }

    fn granted(inner: &mut Inner<V, P>, owner: Owner) -> Option<V> {
        let at = inner.granted.iter().position(|(to, _)| *to == owner)?;
        Some(inner.granted.swap_remove(at).1)
    }

    /// From now on there are so many sets. New ones are made, and those that are too many are dropped as they come: [`Stock::give_way`]
    /// fetches those that no batch has. One thread at a time calls this.
    pub fn set_count<E>(
        &self,
        count: usize,
        make: impl FnOnce(usize) -> Result<Vec<V>, E>,
        wake: &mut Vec<Owner>,
    ) -> Result<(), E> {
        let mut inner = self.inner.lock();
        let stay = inner.total - inner.surplus;
        let kept = inner.surplus.min(count.saturating_sub(stay));
        inner.surplus -= kept;
        self.wanted.sub(kept);
        let too_many = stay.saturating_sub(count);
        inner.surplus += too_many;
        self.wanted.add(too_many);
        drop(inner);
        let missing = count.saturating_sub(stay + kept);
        if missing > 0 {
            let sets = make(missing)?;
            self.inner.lock().total += sets.len();
            self.put(sets, End::GivenBack, wake);
        }
        Ok(())
    }

    /// Gives the memory of all sets that no batch has to the system, a portion at a time; returns bytes. `owner`: a number of no queue,
    /// under which words are claimed for their sets.
    pub fn give_way<R: Record<Pages = V>, T: Send>(
        &self,
        (table, epoch): (&Table<R, T, P>, &Epoch<P>),
        owner: Owner,
        errands: &mut Errands<R>,
    ) -> u64 {
        let mut bytes = 0;
        let mut portion = Vec::new();
        let mut left = self.inner.lock().sets.len();
        while left > 0 {
            let mut inner = self.inner.lock();
            left = left.min(inner.sets.len());
            let from = inner.sets.len() - left.min(PORTION);
            portion.extend(inner.sets.drain(from..));
            drop(inner);
            left -= portion.len();
            bytes += self.cool(&mut portion, &mut errands.wake);
        }
        let shelves: Vec<_> = self.inner.lock().shelves.to_vec();
        for (_, shelf) in shelves {
            portion.append(&mut shelf.lock());
            bytes += self.cool(&mut portion, &mut errands.wake);
        }
        for at in 0..table.count() {
            if let Some(token) = table.claim_pages(at, owner) {
                portion.extend(strip((table, epoch), token, errands));
            }
            if portion.len() == PORTION {
                bytes += self.cool(&mut portion, &mut errands.wake);
            }
        }
        bytes + self.cool(&mut portion, &mut errands.wake)
    }

    fn cool(&self, portion: &mut Vec<V>, wake: &mut Vec<Owner>) -> u64 {
        let bytes = V::give_back(portion);
        self.put(portion.drain(..), End::GivenBack, wake);
        bytes
    }

    /// Number of sets in the stock and in reserves, and of all that there are.
    pub fn count(&self) -> (usize, usize) {
        let inner = self.inner.lock();
        let shelves = inner.shelves.iter();
        let on_shelves: usize = shelves.map(|(_, shelf)| shelf.lock().len()).sum();
        let here = inner.sets.len() + inner.granted.len();
        (here + on_shelves, inner.total)
    }
}

#[cfg(test)]
impl<V: PageSet, P: Primitives> Stock<V, P> {
    pub fn inner_len(&self) -> usize {
        self.inner.lock().sets.len()
    }

    pub fn surplus(&self) -> usize {
        self.inner.lock().surplus
    }

    pub fn in_line(&self) -> usize {
        let inner = self.inner.lock();
        assert_eq!(self.wanted.load(), inner.line.len() + inner.surplus);
        assert!(inner.line.is_empty() || inner.sets.is_empty());
        inner.line.len()
    }
}

#[cfg(test)]
impl<V: PageSet, P: Primitives> Reserve<V, P> {
    pub fn remembered(&self) -> usize {
        self.released.len() + self.useful.len()
    }
}

/// Takes the set out of a record whose word was claimed for that, and frees the word.
fn strip<R: Record, T: Send, P: Primitives>(
    (table, epoch): (&Table<R, T, P>, &Epoch<P>),
    mut token: Token<Claimed, R>,
    errands: &mut Errands<R>,
) -> Option<R::Pages> {
    let set = token.record_mut().take_pages();
    match table.release(token, epoch) {
        Ok(tell) => errands.tell.extend(tell),
        Err(token) => errands.arrived.push(token),
    }
    set
}

/// Freed words, the oldest first, and the numbers of their batches.
#[derive(Default)]
struct Released {
    words: VecDeque<(usize, u16)>,
    /// Length at which those that others have claimed since then are dropped.
    most: usize,
}

impl Released {
    fn len(&self) -> usize {
        self.words.len()
    }

    /// The oldest, if more than so many are there.
    fn pop(&mut self, left: usize) -> Option<(usize, u16)> {
        (self.len() > left)
            .then(|| self.words.pop_front())
            .flatten()
    }

    fn push(&mut self, word: (usize, u16), is_current: impl Fn(&(usize, u16)) -> bool) {
        self.words.push_back(word);
        if self.len() > self.most.max(REMEMBERED) {
            self.words.retain(is_current);
            self.most = 2 * self.len();
        }
    }
}

/// A queue's own sets, the words in which it has left others, and its place in the line.
#[must_use = "a reserve is closed by its stock"]
pub struct Reserve<V: PageSet, P: Primitives = Native> {
    owner: Owner,
    stock: Arc<Stock<V, P>>,
    shelf: Arc<Shelf<V, P>>,
    /// Words that the queue has freed with sets. `useful`: those whose data was of use since it was read or written; sets of others are taken before.
    released: Released,
    useful: Released,
    /// The word at which the queue goes on to look for sets.
    cursor: usize,
    /// The queue is in the line, or was and hasn't taken its set.
    waits: bool,
    is_short: bool,
}

impl<V: PageSet, P: Primitives> Reserve<V, P> {
    /// True if the queue waits for a set.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// A set for a batch. `None`: the queue is in the line, and calls this again when it is woken. Its batch is parked until then: a stop
    /// that waited for it might wait for ever, since batches that have sets wait for the stop's end.
    pub fn take<R: Record<Pages = V>, T: Send>(
        &mut self,
        words: (&Table<R, T, P>, &Epoch<P>),
        errands: &mut Errands<R>,
    ) -> Option<V> {
        if self.waits {
            let granted = Stock::granted(&mut *self.stock.inner.lock(), self.owner);
            self.waits = granted.is_none();
            return granted;
        }
        self.is_short = false;
        self.find(words, errands)
            .or_else(|| self.stock.take_or_join_line(self.owner, &self.shelf))
            .or_else(|| self.look_again(words, errands))
    }

    /// True after a [`Reserve::take_now`] that found nothing, until a batch of the queue ends.
    pub fn is_short(&self) -> bool {
        self.is_short
    }

    /// As [`Reserve::take`], for a queue that doesn't join the line. `None`: there is no set, or the queue is short, or in the line.
    pub fn take_now<R: Record<Pages = V>, T: Send>(
        &mut self,
        words: (&Table<R, T, P>, &Epoch<P>),
        errands: &mut Errands<R>,
    ) -> Option<V> {
        if self.waits || self.is_short {
            return None;
        }
        let found = self.find(words, errands).or_else(|| {
            let inner = self.stock.inner.lock();
            Stock::take_from_others(&*inner, self.owner, &self.shelf)
        });
        self.is_short = found.is_none();
        found
    }

    /// A set that the queue or the stock has, or a free word.
    fn find<R: Record<Pages = V>, T: Send>(
        &mut self,
        words: (&Table<R, T, P>, &Epoch<P>),
        errands: &mut Errands<R>,
    ) -> Option<V> {
        let own = self.shelf.lock().pop();
        let old =
            |reserve: &mut Self, errands: &mut _| reserve.take_released(RECENT, words, errands);
        own.or_else(|| old(self, errands))
            .or_else(|| self.stock.take(&self.shelf))
            .or_else(|| self.take_released(0, words, errands))
            .or_else(|| self.walk(words, errands))
    }

    /// The set of the word that the queue freed longest ago and that nobody has claimed since then; first of those whose data wasn't useful. So
    /// many of these are left, and if any are, those that were useful, too.
    fn take_released<R: Record<Pages = V>, T: Send>(
        &mut self,
        left: usize,
        words: (&Table<R, T, P>, &Epoch<P>),
        errands: &mut Errands<R>,
    ) -> Option<V> {
        let useful = left == 0;
        while let Some((at, batch)) = self
            .released
            .pop(left)
            .or_else(|| useful.then(|| self.useful.pop(0)).flatten())
        {
            if let Some(token) = words.0.claim_idle(at, self.owner, batch) {
                let set = strip(words, token, errands);
                if set.is_some() {
                    return set;
                }
            }
        }
        None
    }

    /// The set of any free word.
    fn walk<R: Record<Pages = V>, T: Send>(
        &mut self,
        words: (&Table<R, T, P>, &Epoch<P>),
        errands: &mut Errands<R>,
    ) -> Option<V> {
        for _ in 0..words.0.count() {
            let at = self.cursor;
            self.cursor = (at + 1) % words.0.count();
            if let Some(token) = words.0.claim_pages(at, self.owner) {
                return strip(words, token, errands);
            }
        }
        None
    }

    /// The look of a queue that has joined the line.
    fn look_again<R: Record<Pages = V>, T: Send>(
        &mut self,
        words: (&Table<R, T, P>, &Epoch<P>),
        errands: &mut Errands<R>,
    ) -> Option<V> {
        self.waits = true;
        let found = self.walk(words, errands).or_else(|| {
            let inner = self.stock.inner.lock();
            Stock::take_from_others(&*inner, self.owner, &self.shelf)
        })?;
        self.waits = false;
        // Meanwhile it may have been given one.
        let granted = self.stock.leave_line(self.owner);
        self.stock.put(granted, End::Used, &mut errands.wake);
        Some(found)
    }

    /// A batch is over, before its word is freed or handed over. It gives its set away if one is wanted; that of a stripe that was written
    /// `whole` goes to the reserve, since nobody needs its data to make parity.
    pub fn end_batch<R: Record<Pages = V>>(
        &mut self,
        record: &mut R,
        whole: bool,
        wake: &mut Vec<Owner>,
    ) {
        self.is_short = false;
        let wanted = self.stock.is_wanted();
        if !wanted && !whole {
            return;
        }
        let set = record.take_pages();
        if wanted {
            self.stock.put(set, End::Used, wake);
        } else if let Some(set) = set {
            self.keep(set, wake);
        }
    }

    /// Puts a set into the reserve.
    fn keep(&mut self, set: V, wake: &mut Vec<Owner>) {
        let mut shelf = self.shelf.lock();
        shelf.push(set);
        let mut rest = Vec::new();
        if shelf.len() > 2 * DOZEN {
            rest.extend(shelf.drain(..DOZEN));
        }
        drop(shelf);
        // A queue that has joined the line before it held the reserve's lock is seen; one that holds it later finds the set.
        if self.stock.is_wanted() {
            rest.append(&mut self.shelf.lock());
        }
        if !rest.is_empty() {
            self.stock.put(rest, End::Used, wake);
        }
    }

    /// Frees a word, as [`Table::release`] does, and remembers it if its record has kept a set.
    pub fn release<S: Leaves, R: Record<Pages = V>, T: Send>(
        &mut self,
        words: (&Table<R, T, P>, &Epoch<P>),
        token: Token<S, R>,
        errands: &mut Errands<R>,
    ) -> Result<(), Token<S, R>> {
        let (at, record) = (token.at(), token.record());
        let (has_pages, is_useful) = (record.has_pages(), record.was_useful());
        let batch = words.0.peek(at).batch();
        errands.tell.extend(words.0.release(token, words.1)?);
        if has_pages {
            self.has_released(words, (at, batch), is_useful, errands);
        }
        Ok(())
    }

    /// The word is free, and a full barrier has followed: it pairs with that in `take_or_join_line`.
    fn has_released<R: Record<Pages = V>, T: Send>(
        &mut self,
        words: (&Table<R, T, P>, &Epoch<P>),
        (at, batch): (usize, u16),
        is_useful: bool,
        errands: &mut Errands<R>,
    ) {
        if self.stock.is_wanted() {
            // If somebody has claimed it, they look when they are done.
            if let Some(token) = words.0.claim_idle(at, self.owner, batch) {
                let set = strip(words, token, errands);
                self.stock.put(set, End::Used, &mut errands.wake);
            }
            return;
        }
        let released = if is_useful {
            &mut self.useful
        } else {
            &mut self.released
        };
        released.push((at, batch), |&(at, batch)| {
            let word = words.0.peek(at);
            word.has_pages() && word.batch() == batch
        });
    }
}
