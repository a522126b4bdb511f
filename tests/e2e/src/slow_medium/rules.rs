//! Rules for requests, and their notation in the control file.

use std::time::Duration;

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `open`, also of a file that it creates.
    Open,
    /// Reads, also those that fill the page cache.
    Read,
    /// Writes, also those out of the page cache.
    Write,
    /// `fsync` and `fdatasync`.
    Fsync,
    /// `fallocate` in all its modes.
    Fallocate,
    /// A new size.
    Truncate,
    /// `stat`.
    Getattr,
    /// `SEEK_HOLE` and `SEEK_DATA`.
    Lseek,
    /// The FLUSH that each `close` sends, which isn't a flush to the medium.
    Close,
}

impl Kind {
    /// All kinds of requests.
    pub const ALL: [Kind; 9] = [
        Kind::Open,
        Kind::Read,
        Kind::Write,
        Kind::Fsync,
        Kind::Fallocate,
        Kind::Truncate,
        Kind::Getattr,
        Kind::Lseek,
        Kind::Close,
    ];

    /// Its name in the control file.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Open => "open",
            Kind::Read => "read",
            Kind::Write => "write",
            Kind::Fsync => "fsync",
            Kind::Fallocate => "fallocate",
            Kind::Truncate => "truncate",
            Kind::Getattr => "getattr",
            Kind::Lseek => "lseek",
            Kind::Close => "close",
        }
    }

    /// The kinds that `word` names: one, several with commas between them, or `*` for all.
    pub fn parse(word: &str) -> Option<Vec<Kind>> {
        if word == "*" {
            return Some(Kind::ALL.to_vec());
        }
        let one = |w: &str| Kind::ALL.into_iter().find(|k| k.name() == w);
        word.split(',').map(one).collect()
    }
}

/// A span of time, from which each request draws its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The least delay.
    pub least: Duration,
    /// The greatest delay.
    pub most: Duration,
}

impl Span {
    /// From `least` to `most` milliseconds.
    pub fn millis(least: u64, most: u64) -> Span {
        Span {
            least: Duration::from_millis(least),
            most: Duration::from_millis(most.max(least)),
        }
    }

    pub(super) fn draw(&self, rng: &mut fastrand::Rng) -> Duration {
        let nanos = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(rng.u64(nanos(self.least)..=nanos(self.most)))
    }
}

/// The treatment of a request. The request takes effect on the data when it completes, not before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Done at once.
    Now,
    /// Done after a time.
    Delay(Span),
    /// Done after a time, and of each thousand requests so many after a longer one.
    Mix(Span, u32, Span),
    /// The request is neither done nor completed until it is released.
    Hold,
    /// Answered with this error number, and not done.
    Fail(i32),
}

impl Rule {
    /// The rule that `words` tell: `now`, `hold`, `fail ERRNO`, `delay MS MS`, or `mix MS MS PERMILLE MS MS`.
    pub fn parse(words: &[&str]) -> Option<Rule> {
        let number = |w: &str| w.parse::<u64>().ok();
        Some(match words {
            ["now"] => Rule::Now,
            ["hold"] => Rule::Hold,
            ["fail", errno] => Rule::Fail(errno.parse().ok().filter(|&e| e > 0)?),
            ["delay", least, most] => Rule::Delay(Span::millis(number(least)?, number(most)?)),
            ["mix", least, most, share, longest, longer] => Rule::Mix(
                Span::millis(number(least)?, number(most)?),
                share.parse().ok()?,
                Span::millis(number(longest)?, number(longer)?),
            ),
            _ => return None,
        })
    }
}

/// A rule for some requests: of one file, or of all if `file` is `None`.
#[derive(Clone, Debug)]
struct Entry {
    file: Option<String>,
    kind: Kind,
    rule: Rule,
}

/// All rules; the one that was set last decides.
#[derive(Debug, Default)]
pub(super) struct Rules(Vec<Entry>);

impl Rules {
    pub fn set(&mut self, file: &str, kinds: &[Kind], rule: Rule) {
        let file = (file != "*").then(|| file.to_owned());
        for &kind in kinds {
            // Rules that the new one overrides are removed, so that the list stays short.
            self.0
                .retain(|e| e.kind != kind || (file.is_some() && e.file != file));
            self.0.push(Entry {
                file: file.clone(),
                kind,
                rule,
            });
        }
    }

    pub fn of(&self, file: &str, kind: Kind) -> Rule {
        let fits = |e: &&Entry| e.kind == kind && e.file.as_deref().is_none_or(|f| f == file);
        self.0.iter().rev().find(fits).map_or(Rule::Now, |e| e.rule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_rule_that_fits_decides() {
        let mut rules = Rules::default();
        rules.set("a", &[Kind::Write], Rule::Hold);
        assert_eq!(rules.of("a", Kind::Write), Rule::Hold);
        assert_eq!(rules.of("a", Kind::Read), Rule::Now);
        assert_eq!(rules.of("b", Kind::Write), Rule::Now);
        rules.set("*", &[Kind::Write], Rule::Fail(5));
        rules.set("b", &[Kind::Write], Rule::Now);
        assert_eq!(rules.of("a", Kind::Write), Rule::Fail(5));
        assert_eq!(rules.of("b", Kind::Write), Rule::Now);
        assert_eq!(rules.0.len(), 2);
    }

    #[test]
    fn rules_in_words() {
        assert_eq!(Rule::parse(&["hold"]), Some(Rule::Hold));
        assert_eq!(
            Rule::parse(&["mix", "0", "2", "30", "50", "400"]),
            Some(Rule::Mix(Span::millis(0, 2), 30, Span::millis(50, 400)))
        );
        assert_eq!(Rule::parse(&["fail", "0"]), None);
        assert_eq!(Rule::parse(&["fail"]), None);
        assert_eq!(Rule::parse(&["later"]), None);
        assert_eq!(
            Kind::parse("write,fsync"),
            Some(vec![Kind::Write, Kind::Fsync])
        );
        assert_eq!(Kind::parse("*").map(|k| k.len()), Some(9));
        assert_eq!(Kind::parse("writ"), None);
    }
}
