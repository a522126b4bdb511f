//! Transitions of words by one thread.

use super::*;
use std::num::NonZeroU32;

impl Record for u32 {
    type Pages = ();
}

/// A record that counts batches; pieces are numbers.
type Words = Table<u32, u32>;

fn words(count: usize, pieces: u32) -> (Words, Vec<Place>) {
    let (words, mut places) = Table::new(count, pieces, || 0);
    // Popped in order.
    places.reverse();
    (words, places)
}

fn queue(number: u16) -> Owner {
    Owner::new(number).expect("a number")
}

fn claim(words: &Words, at: usize, by: u16, place: Place) -> (Token<Claimed, u32>, Place) {
    match words.arrive(at, queue(by), place, 0) {
        Arrival::Claimed(token, arrived) => (token, arrived.place),
        Arrival::Joined => panic!("word {at} has an owner"),
    }
}

fn join(words: &Words, at: usize, by: u16, place: Place, piece: u32) {
    let arrival = words.arrive(at, queue(by), place, piece);
    assert!(matches!(arrival, Arrival::Joined), "{arrival:?}");
}

fn open(words: &Words, token: Token<Claimed, u32>, epoch: &Epoch) -> Token<Open, u32> {
    match words.look(token, epoch) {
        Looked::Open(token) => token,
        parked => panic!("{parked:?}"),
    }
}

/// Phase, number of the owner or 0, number of the newest arrival or 0, number of the batch.
fn state(words: &Words, at: usize) -> (Phase, u16, u32, u16) {
    let word = words.peek(at);
    (
        word.phase(),
        word.owner().map_or(0, Owner::number),
        word.newest().map_or(0, NonZeroU32::get),
        word.batch(),
    )
}

fn pieces(all: &[Arrived<u32>]) -> Vec<u32> {
    all.iter().map(|arrived| arrived.piece).collect()
}

#[test]
fn fields_do_not_touch_each_other() {
    assert_eq!(Owner::new(0), None);
    assert_eq!(Owner::new(Owner::MAX + 1), None);
    let newest = NonZeroU32::new(u32::MAX);
    for owner in [1, 0x555, Owner::MAX] {
        for batch in [1u16, 0x5555, u16::MAX] {
            let mut word = Packed::FREE;
            for _ in 0..batch {
                word = word.owned(queue(owner));
            }
            word = word.joined(NonZeroU32::MAX);
            for phase in [Phase::Free, Phase::Claimed, Phase::Closed, Phase::Waits] {
                let word = word.with_phase(phase);
                assert_eq!(word.phase(), phase);
                assert_eq!(word.newest(), newest);
                assert_eq!(word.owner().map(Owner::number), Some(owner));
                assert_eq!(word.batch(), batch);
                assert_eq!(word.emptied().newest(), None);
                assert_eq!(word.emptied().joined(NonZeroU32::MAX), word);
            }
            for pages in [false, true] {
                let free = word.released(pages);
                assert_eq!((free.owner(), free.phase()), (None, Phase::Free));
                assert_eq!((free.newest(), free.batch()), (newest, batch));
                assert_eq!(free.has_pages(), pages);
                assert!(!free.owned(queue(owner)).has_pages(), "only of a free word");
            }
        }
    }
}

#[test]
fn a_word_goes_from_free_to_free() {
    let (words, mut places) = words(9, 1);
    let epoch = Epoch::default();
    for batch in 1..=3 {
        let (mut token, place) = claim(&words, 8, 5, places.pop().expect("a place"));
        assert_eq!(state(&words, 8), (Phase::Claimed, 5, 0, batch));
        *token.record_mut() += 1;
        let token = open(&words, token, &epoch);
        assert_eq!(state(&words, 8), (Phase::Claimed, 5, 0, batch));
        let token = words.close(token, &mut Vec::new());
        assert_eq!(state(&words, 8), (Phase::Closed, 5, 0, batch));
        assert_eq!((token.at(), token.owner()), (8, queue(5)));
        assert_eq!(*token.record(), u32::from(batch), "the record stays");
        assert_eq!(words.release(token, &epoch).expect("nobody came"), None);
        assert_eq!(state(&words, 8), (Phase::Free, 0, 0, batch));
        places.push(place);
    }
    assert!((0..8).all(|at| state(&words, at) == (Phase::Free, 0, 0, 0)));
}

#[test]
fn the_number_of_the_batch_wraps() {
    let (words, mut places) = words(1, 1);
    let epoch = Epoch::default();
    let (mut token, _) = claim(&words, 0, 1, places.pop().expect("a place"));
    for batch in 2..=0x1_0001u32 {
        let closed = words.close(open(&words, token, &epoch), &mut Vec::new());
        token = words.hand_over(closed, queue(1));
        assert_eq!(state(&words, 0), (Phase::Claimed, 1, 0, batch as u16));
    }
}

#[test]
fn arrivals_come_in_their_order() {
    let (words, mut places) = words(1, 5);
    let epoch = Epoch::default();
    let (token, first) = claim(&words, 0, 1, places.pop().expect("a place"));
    let mut token = open(&words, token, &epoch);
    for piece in [10, 20, 30] {
        join(&words, 0, 2, places.pop().expect("a place"), piece);
    }
    let mut all = Vec::new();
    words.take(&mut token, &mut all);
    assert_eq!(pieces(&all), [10, 20, 30]);
    words.take(&mut token, &mut all);
    assert_eq!(all.len(), 3, "each once");
    join(&words, 0, 3, places.pop().expect("a place"), 40);
    // A place is used again after its piece was taken.
    join(&words, 0, 1, first, 50);
    let token = words.close(token, &mut all);
    assert_eq!(pieces(&all), [10, 20, 30, 40, 50]);
    let numbers: Vec<u32> = all.iter().map(|a| a.place.number().get()).collect();
    assert_eq!(numbers, [2, 3, 4, 5, 1]);
    assert!(words.release(token, &epoch).is_ok());
}

#[test]
fn arrivals_after_the_close_are_for_the_next_batch() {
    let (words, mut places) = words(1, 3);
    let epoch = Epoch::default();
    let (token, _) = claim(&words, 0, 1, places.pop().expect("a place"));
    let mut all = Vec::new();
    let closed = words.close(open(&words, token, &epoch), &mut all);
    join(&words, 0, 2, places.pop().expect("a place"), 7);
    let mut closed = words.release(closed, &epoch).expect_err("somebody came");
    assert_eq!(state(&words, 0), (Phase::Closed, 1, 2, 1));
    *closed.record_mut() = 99;
    words.take(&mut closed, &mut all);
    assert_eq!(pieces(&all), [7]);
    join(&words, 0, 3, places.pop().expect("a place"), 8);
    let next = words.hand_over(closed, queue(2));
    assert_eq!(state(&words, 0), (Phase::Claimed, 2, 3, 2));
    assert_eq!((next.owner(), *next.record()), (queue(2), 99));
    let closed = words.close(open(&words, next, &epoch), &mut all);
    assert_eq!(pieces(&all), [7, 8]);
    assert!(words.release(closed, &epoch).is_ok());
}

#[test]
fn who_claims_in_a_stop_parks_and_tells_the_kicker() {
    let (words, mut places) = words(2, 2);
    let epoch = Epoch::default();
    let stop = epoch.stop(queue(9)).expect("nobody kicks");
    let (token, _) = claim(&words, 1, 4, places.pop().expect("a place"));
    let mut left = words.in_flight(&stop);
    assert!(
        words.is_in_flight(&mut left),
        "it may not have seen the stop"
    );
    let Looked::Parked(parked, tell) = words.look(token, &epoch) else {
        panic!("the stop wasn't seen");
    };
    assert_eq!(tell, Some(queue(9)));
    assert_eq!(state(&words, 1), (Phase::Waits, 4, 0, 1));
    assert!(!words.is_in_flight(&mut left));
    epoch.go_on(stop);
    let token = words.go_on(parked);
    assert_eq!(state(&words, 1), (Phase::Claimed, 4, 0, 1));
    assert_eq!(open(&words, token, &epoch).epoch(), 2);
}

#[test]
fn a_stop_waits_for_words_that_are_in_flight() {
    let (words, mut places) = words(3, 3);
    let epoch = Epoch::default();
    let mut token = |at| {
        let (token, _) = claim(&words, at, 1, places.pop().expect("a place"));
        open(&words, token, &epoch)
    };
    let (parks, frees, hands_over) = (token(0), token(1), token(2));
    let stop = epoch.stop(queue(2)).expect("nobody kicks");
    let mut left = words.in_flight(&stop);
    let mut gone = |tell: Option<Owner>| {
        assert_eq!(tell, Some(queue(2)));
        words.is_in_flight(&mut left)
    };
    assert!(gone(words.park(parks, &epoch).1));
    let closed = words.close(frees, &mut Vec::new());
    assert!(gone(words.release(closed, &epoch).expect("nobody came")));
    let closed = words.close(hands_over, &mut Vec::new());
    let next = words.hand_over(closed, queue(3));
    let Looked::Parked(_, tell) = words.look(next, &epoch) else {
        panic!("the stop wasn't seen");
    };
    assert!(!gone(tell));
    epoch.go_on(stop);
}

#[test]
fn a_word_that_was_handed_over_is_drained() {
    let (words, mut places) = words(1, 1);
    let epoch = Epoch::default();
    let (token, _) = claim(&words, 0, 1, places.pop().expect("a place"));
    let closed = words.close(open(&words, token, &epoch), &mut Vec::new());
    let stop = epoch.stop(queue(2)).expect("nobody kicks");
    let mut left = words.in_flight(&stop);
    assert!(words.is_in_flight(&mut left));
    let _next = words.hand_over(closed, queue(3));
    assert!(!words.is_in_flight(&mut left));
    assert!(
        words.is_in_flight(&mut words.in_flight(&stop)),
        "a later scan doesn't know"
    );
    epoch.go_on(stop);
}

#[test]
fn a_word_that_waits_for_its_log_is_drained() {
    let (words, mut places) = words(1, 2);
    let epoch = Epoch::default();
    let (token, _) = claim(&words, 0, 1, places.pop().expect("a place"));
    let closed = words.close(open(&words, token, &epoch), &mut Vec::new());
    let (waiting, tell) = words.wait(closed, &epoch);
    assert_eq!(tell, None, "nobody kicks");
    let stop = epoch.stop(queue(2)).expect("nobody kicks");
    assert!(!words.is_in_flight(&mut words.in_flight(&stop)));
    join(&words, 0, 2, places.pop().expect("a place"), 3);
    let closed = words.resume(waiting);
    assert_eq!(
        (closed.epoch(), state(&words, 0)),
        (0, (Phase::Closed, 1, 2, 1))
    );
    let (waiting, tell) = words.wait(closed, &epoch);
    assert_eq!(tell, Some(queue(2)));
    epoch.go_on(stop);
    let token = words.go_on(waiting.give_up());
    assert_eq!(open(&words, token, &epoch).epoch(), 2, "it is planned anew");
}

#[test]
fn one_queue_stops_words_at_a_time() {
    let epoch: Epoch = Epoch::default();
    for kick in 0..3 {
        assert_eq!(epoch.look(), Seen::Going(2 * kick));
        let stop = epoch.stop(queue(Owner::MAX)).expect("nobody kicks");
        assert_eq!(epoch.look(), Seen::Stopped(queue(Owner::MAX)));
        assert_eq!(epoch.stop(queue(1)), Err(queue(Owner::MAX)));
        epoch.go_on(stop);
    }
}

#[test]
fn a_claim_without_a_batch_is_taken_back_or_handed_over() {
    let (words, mut places) = words(1, 1);
    let epoch = Epoch::default();
    let token = words.claim_idle(0, queue(2), 0).expect("it is free");
    assert_eq!(words.release(token, &epoch).expect("nobody came"), None);
    assert_eq!(state(&words, 0), (Phase::Free, 0, 0, 1));
    let token = words.claim_idle(0, queue(2), 1).expect("it is free");
    join(&words, 0, 1, places.pop().expect("a place"), 5);
    let mut token = words.release(token, &epoch).expect_err("somebody came");
    let mut all = Vec::new();
    words.take(&mut token, &mut all);
    let next = words.hand_over(token, queue(1));
    assert_eq!((next.owner(), pieces(&all)), (queue(1), vec![5]));
    assert_eq!(state(&words, 0), (Phase::Claimed, 1, 0, 3));
    // A stop that saw the claim is told when it is taken back.
    let stop = epoch.stop(queue(9)).expect("nobody kicks");
    let mut left = words.in_flight(&stop);
    let tell = words.release(next, &epoch).expect("nobody came");
    assert_eq!(tell, Some(queue(9)));
    assert!(!words.is_in_flight(&mut left));
    epoch.go_on(stop);
}

#[test]
fn an_idle_word_is_claimed_for_its_record() {
    let (words, mut places) = words(1, 2);
    let epoch = Epoch::default();
    let (token, _) = claim(&words, 0, 1, places.pop().expect("a place"));
    assert!(words.claim_idle(0, queue(2), 1).is_none(), "it isn't free");
    let closed = words.close(open(&words, token, &epoch), &mut Vec::new());
    assert_eq!(words.release(closed, &epoch).expect("nobody came"), None);
    assert!(
        words.claim_idle(0, queue(2), 0).is_none(),
        "a batch came since"
    );
    let token = words.claim_idle(0, queue(2), 1).expect("it is free");
    assert_eq!(state(&words, 0), (Phase::Claimed, 2, 0, 2));
    join(&words, 0, 1, places.pop().expect("a place"), 5);
    let mut all = Vec::new();
    let closed = words.close(open(&words, token, &epoch), &mut all);
    assert_eq!(pieces(&all), [5]);
    assert!(words.release(closed, &epoch).is_ok());
}
