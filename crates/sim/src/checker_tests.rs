use super::*;

fn bytes(id: u64, sector: u64) -> Bytes {
    match id {
        ZEROS => [0; 512],
        id => stamp::make(id, sector, false),
    }
}

fn read(c: &mut Checker, id: u64) -> Result<(), String> {
    let since = c.read_submitted();
    c.read_done(since, &[(0, bytes(id, 0))])
}

/// True if a read may find version `id`; the checker doesn't take it as found.
fn may(c: &Checker, id: u64) -> bool {
    c.check_raw(0, &bytes(id, 0)).is_ok()
}

fn write(c: &mut Checker, id: u64) {
    c.write_submitted(0, 1, id, true);
    c.write_acked(0, 1, false);
}

#[test]
fn what_is_acknowledged_stays_while_the_cache_does_and_what_is_flushed_for_ever() {
    let mut c = Checker::new(1, true);
    write(&mut c, 10);
    assert!(read(&mut c, 10).is_ok() && read(&mut c, 0).is_err());
    let flush = c.flush_submitted(0);
    write(&mut c, 11);
    c.flush_done(flush);
    assert!(read(&mut c, 10).is_err());
    c.cache_lost();
    assert!(read(&mut c, 0).is_err());
    assert!(read(&mut c, 10).is_ok());
    assert!(
        read(&mut c, 11).is_err(),
        "a read has shown that it is gone"
    );
    c.cache_lost();
    assert!(!may(&c, 11) && may(&c, 10));
}

#[test]
fn a_flush_that_spans_a_loss_must_not_succeed_until_the_loss_is_told() {
    let mut c = Checker::new(1, true);
    let opened = c.now();
    write(&mut c, 10);
    let (before, replayed) = (c.flush_submitted(opened), c.flush_submitted(opened));
    assert!(c.flush_failed(before).is_err());
    c.cache_lost();
    c.connected();
    assert!(c.flush_failed(before).is_ok());
    let told = c.now();
    let after = c.flush_submitted(told);
    c.flush_done(after);
    assert!(c.flush_failed(after).is_err());
    assert!(may(&c, 0) && may(&c, 10));
    c.flush_done(replayed); // it says that the write is safe
    assert!(read(&mut c, 0).is_err());
}

#[test]
fn a_read_may_find_what_is_in_flight_or_was_while_it_was_read() {
    let mut c = Checker::new(1, true);
    let since = c.read_submitted();
    write(&mut c, 10);
    assert!(c.read_done(since, &[(0, bytes(0, 0))]).is_ok());
    c.write_submitted(0, 1, 11, true);
    assert!(read(&mut c, 10).is_ok() && read(&mut c, 11).is_ok());
    c.abandon();
    assert!(read(&mut c, 11).is_ok() && read(&mut c, 10).is_err());
    // One version was there before a loss, another after it: a read that spans the loss may find
    // both.
    write(&mut c, 12);
    let since = c.read_submitted();
    c.cache_lost();
    assert!(read(&mut c, 11).is_ok());
    assert!(c.read_done(since, &[(0, bytes(12, 0))]).is_ok());
    assert!(read(&mut c, 12).is_err());
}

#[test]
fn only_what_a_flush_covers_is_sure() {
    let mut c = Checker::new(1, true);
    c.write_submitted(0, 1, 1, true);
    assert!(!c.is_free(0, 1) && may(&c, 0) && may(&c, 1) && !may(&c, 2));
    c.write_acked(0, 1, false);
    let flush = c.flush_submitted(0);
    write(&mut c, 2);
    c.flush_done(flush);
    assert!(!may(&c, 0) && !may(&c, 1) && may(&c, 2) && c.is_unsettled(0));
    c.cache_lost();
    assert!(!may(&c, 0) && may(&c, 1) && may(&c, 2));
    c.write_submitted(0, 1, 3, true);
    c.write_acked(0, 1, true);
    assert!(!may(&c, 2) && may(&c, 3) && !c.is_unsettled(0));
    c.write_submitted(0, 1, 4, false);
    c.write_failed(0, 1);
    c.cache_lost();
    assert!(may(&c, 3) && may(&c, 4) && !c.is_whole(0, 1));
    // A flush after the loss doesn't cover writes before it.
    c.started();
    let told = c.now();
    let flush = c.flush_submitted(told);
    c.flush_done(flush);
    assert!(may(&c, 3) && may(&c, 4) && c.is_unsettled(0));
    assert!(read(&mut c, 3).is_ok() && !may(&c, 4) && !c.is_unsettled(0));
    write(&mut c, ZEROS);
    c.write_submitted(0, 1, ZEROS, true);
    c.write_ignored(0, 1);
    assert!(may(&c, 0) && !may(&c, 3));
}

#[test]
fn what_nobody_knows_is_known_once_it_is_read() {
    let mut c = Checker::new(1, false);
    assert!(may(&c, 7) && may(&c, 8));
    assert!(read(&mut c, 7).is_ok());
    assert!(may(&c, 7) && !may(&c, 8));
    write(&mut c, 9);
    c.cache_lost();
    c.anything(0);
    assert!(may(&c, 8) && read(&mut c, 9).is_ok() && !may(&c, 7));
}
