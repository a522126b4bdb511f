//! [`Token`]: ownership of a word as a value. It can't be copied; each transition consumes it, and gives the next one.

use super::packed::Owner;

/// The word is claimed, and its owner hasn't looked at the epoch.
#[derive(Debug)]
pub struct Claimed(());

/// The batch was planned in this epoch, and takes arrivals. The difference to [`Claimed`] matters to the owner only, so the word says claimed still.
#[derive(Debug)]
pub struct Open {
    epoch: u32,
}

/// The batch takes no arrivals any more.
#[derive(Debug)]
pub struct Closed {
    epoch: u32,
}

/// The owner saw a stop. It waits until members have changed, and plans anew.
#[derive(Debug)]
pub struct Parked(());

/// The closed batch waits for its log, or for superblocks.
#[derive(Debug)]
pub struct Waiting {
    epoch: u32,
}

/// Ownership of a word, with the record that goes with it. `S` is the state, one of this module's types. It isn't bound to a thread: a
/// queue posts it to another to hand the word over.
#[derive(Debug)]
#[must_use = "a word whose token is dropped is never free again"]
pub struct Token<S, R> {
    at: usize,
    owner: Owner,
    record: Box<R>,
    state: S,
}

impl<S, R> Token<S, R> {
    /// Number of the word.
    pub fn at(&self) -> usize {
        self.at
    }

    /// The queue whose token it is.
    pub fn owner(&self) -> Owner {
        self.owner
    }

    pub fn record(&self) -> &R {
        &self.record
    }

    pub fn record_mut(&mut self) -> &mut R {
        &mut self.record
    }

    /// The record alone, and the token without it.
    pub(super) fn split(self) -> (Token<S, ()>, Box<R>) {
        let token = Token {
            at: self.at,
            owner: self.owner,
            record: Box::new(()),
            state: self.state,
        };
        (token, self.record)
    }

    fn into<T>(self, state: T) -> Token<T, R> {
        Token {
            at: self.at,
            owner: self.owner,
            record: self.record,
            state,
        }
    }
}

impl<S> Token<S, ()> {
    /// With its record again.
    pub(super) fn with<R>(self, record: Box<R>) -> Token<S, R> {
        Token {
            at: self.at,
            owner: self.owner,
            record,
            state: self.state,
        }
    }
}

/// States in which a token's owner takes arrivals out of the list: all but those in which it waits.
pub trait Takes {}
impl Takes for Claimed {}
impl Takes for Open {}
impl Takes for Closed {}

/// States in which a token's owner may leave the word: nothing was begun, or all is done.
pub trait Leaves: Takes {}
impl Leaves for Claimed {}
impl Leaves for Closed {}

/// States with a batch, which was planned in an epoch.
pub trait Planned {
    /// The epoch's number, as [`super::Seen::Going`] has it.
    fn epoch(&self) -> u32;
}

macro_rules! planned {
    ($($state:ident)*) => {
        $(impl Planned for $state {
            fn epoch(&self) -> u32 {
                self.epoch
            }
        })*
    };
}
planned!(Open Closed Waiting);

impl<S: Planned, R> Token<S, R> {
    /// The epoch in which the batch was planned.
    pub fn epoch(&self) -> u32 {
        self.state.epoch()
    }
}

impl<R> Token<Claimed, R> {
    pub(super) fn new(at: usize, owner: Owner, record: Box<R>) -> Token<Claimed, R> {
        Token {
            at,
            owner,
            record,
            state: Claimed(()),
        }
    }

    pub(super) fn opened(self, epoch: u32) -> Token<Open, R> {
        self.into(Open { epoch })
    }
}

impl<S, R> Token<S, R> {
    pub(super) fn parked(self) -> Token<Parked, R> {
        self.into(Parked(()))
    }

    pub(super) fn claimed(self, owner: Owner) -> Token<Claimed, R> {
        Token::new(self.at, owner, self.record)
    }
}

impl<R> Token<Open, R> {
    pub(super) fn closed(self) -> Token<Closed, R> {
        let epoch = self.epoch();
        self.into(Closed { epoch })
    }
}

impl<R> Token<Closed, R> {
    pub(super) fn waiting(self) -> Token<Waiting, R> {
        let epoch = self.epoch();
        self.into(Waiting { epoch })
    }
}

impl<R> Token<Waiting, R> {
    /// The batch is given up, and is planned anew after the stop: its log has failed, or nobody has begun it.
    pub fn give_up(self) -> Token<Parked, R> {
        // The word says `Waits` in either case.
        self.parked()
    }

    pub(super) fn resumed(self) -> Token<Closed, R> {
        let epoch = self.epoch();
        self.into(Closed { epoch })
    }
}
