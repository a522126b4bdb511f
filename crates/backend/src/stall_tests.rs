//! Log lines on stalls.

use super::*;
use tracing::Level;

#[path = "../tests/support/log.rs"]
#[allow(dead_code)]
mod log;

const MS: Duration = Duration::from_millis(1);

fn with_log(f: impl FnOnce(&log::Log)) {
    let log = log::Log::default();
    tracing::subscriber::with_default(log.clone(), || f(&log));
}

#[test]
fn a_short_stall_is_only_for_debug() {
    with_log(|log| {
        let (stall, now) = (Arc::<Stall>::default(), Instant::now());
        for n in 1..=100 {
            let blocked = stall.begin("a, queue 0", now);
            assert!(stall.is_on());
            assert!(blocked.is_due(now) && blocked.is_due(now + TOLD_AFTER - MS));
            blocked.end(now + TOLD_AFTER - MS);
            assert!(!stall.is_on());
            // The stall isn't logged later, either.
            assert!(!blocked.is_due(now + TOLD_AFTER));
            let all = log.lines(Level::TRACE);
            assert_eq!(all.len(), n);
            let last = format!("blocked for 0.999 s; {n} short stalls");
            assert!(all[n - 1].contains(&last), "{}", all[n - 1]);
        }
        assert!(log.lines(Level::INFO).is_empty());
    });
}

#[test]
fn a_long_stall_is_told_once_and_so_is_its_end() {
    with_log(|log| {
        let (stall, now) = (Arc::<Stall>::default(), Instant::now());
        let blocked = stall.begin("a, queue 0", now);
        assert!(blocked.is_due(now));
        for later in [TOLD_AFTER, TOLD_AFTER * 2] {
            assert!(!blocked.is_due(now + later));
        }
        blocked.end(now + TOLD_AFTER * 4);
        let all = log.lines(Level::TRACE);
        assert_eq!(all.len(), 2, "{all:#?}");
        assert!(
            all[0].starts_with("a, queue 0: stalled: its worker is blocked"),
            "{}",
            all[0]
        );
        assert_eq!(all[1], "a, queue 0: back after 4.0 s");
        assert_eq!(log.lines(Level::ERROR).len(), 1);
        assert_eq!(log.lines(Level::WARN).len(), 2);
    });
}

#[test]
fn stalls_without_end_do_not_fill_the_log() {
    with_log(|log| {
        let (stall, now) = (Arc::<Stall>::default(), Instant::now());
        for _ in 0..256 {
            let blocked = stall.begin("a, queue 0", now);
            assert!(!blocked.is_due(now + TOLD_AFTER));
            blocked.end(now + TOLD_AFTER);
        }
        // The lines are eight, then 16, 32, 64, 128 and 256; a test that takes a minute may see one more.
        // Each stall has a line for its end.
        let told = log.lines(Level::ERROR).len();
        assert!((13..=14).contains(&told), "{told}");
        assert_eq!(log.lines(Level::WARN).len(), 2 * told);
    });
}
