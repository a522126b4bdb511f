//! WarningLog lines about guests are limited: a guest can cause refusals as often as it likes.

mod xen_support;

use parking_lot::Mutex;
use std::sync::Arc;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};
use xen_support::{Bed, SMALL};

/// Collects the texts of warnings.
#[derive(Clone, Default)]
struct WarningLog(Arc<Mutex<Vec<String>>>);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl Subscriber for WarningLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().push(text.0);
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn a_refusal_is_logged_with_its_reason_and_the_rate_is_limited() {
    let (log, begin) = (WarningLog::default(), std::time::Instant::now());
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let bed = Bed::new();
    let mut guest = bed.guest(7);
    bed.attach(&guest, "a");
    for _ in 0..40 {
        guest.until_back("2");
        let mut keys = guest.keys(SMALL);
        keys.retain(|(key, _)| key != "ring-ref");
        keys.push(("ring-ref".into(), "4000".into()));
        guest.publish(&keys, "3");
        guest.until_back("5");
        guest.set_state("6");
        guest.until_back("6");
        guest.set_state("1");
    }
    guest.until_back("2");
    let all = log.0.lock().clone();
    // The first eight, the 16th and the 32nd; or after a minute.
    let most = 8 + 2 + begin.elapsed().as_secs() as usize / 60;
    assert!((8 + 2..=most).contains(&all.len()), "{all:#?}");
    assert!(
        all[0].starts_with("disk a, domain 7, xvda: queue 0: mapping ring-ref [4000]"),
        "{}",
        all[0]
    );
    let told = |l: &String| l.ends_with("(32 times so far)");
    assert!(all.iter().any(told), "{all:#?}");
}
