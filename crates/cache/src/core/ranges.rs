//! Ranges of pages that a discard or a write-zeroes holds.

struct Range {
    request: u32,
    number: u64,
    /// First page, and the first page behind the last.
    first: u64,
    end: u64,
    /// Passed on to the device, which has not completed it.
    sent: bool,
    waiting: Vec<u32>,
}

impl Range {
    fn has(&self, page: u64) -> bool {
        (self.first..self.end).contains(&page)
    }
}

/// Ranges in which no request begins anything while a discard or a write-zeroes is at work in them. Hits go on and find the data of before.
///
/// **States** of a range: held, while I/O on its pages ends and pages that it covers in part are written; sent, while the device does it; gone. **Events:**
/// hold, send, release, and requests that wait for a release.
///
/// **Invariants.** Ranges have rising numbers, and one that overlaps an older one isn't sent before that is gone. While a range is sent no page of it is
/// written. A request that waits goes on when the range is released; it may be listed more than once, since other pages that it waits for may end first.
/// There is one range for each discard or write-zeroes under way.
#[derive(Default)]
pub struct Ranges {
    held: Vec<Range>,
    last: u64,
}

impl Ranges {
    /// Holds the pages `first..end` for a request. Returns the range's number.
    pub fn hold(&mut self, request: u32, first: u64, end: u64) -> u64 {
        self.last += 1;
        self.held.push(Range {
            request,
            number: self.last,
            first,
            end,
            sent: false,
            waiting: Vec::new(),
        });
        self.last
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// True if a range holds the page.
    pub fn is_held(&self, page: u64) -> bool {
        self.held.iter().any(|r| r.has(page))
    }

    /// True if the device is at work on a range that has the page.
    pub fn is_sent(&self, page: u64) -> bool {
        self.held.iter().any(|r| r.sent && r.has(page))
    }

    /// If a range holds the page, the request waits for its release; true if so.
    pub fn wait(&mut self, page: u64, request: u32) -> bool {
        match self.held.iter_mut().find(|r| r.has(page)) {
            Some(range) => {
                range.waiting.push(request);
                true
            }
            None => false,
        }
    }

    /// If an older range overlaps the one with this number, its request waits for the release of that; true if so.
    pub fn wait_for_older(&mut self, number: u64) -> bool {
        let Some(at) = self.held.iter().position(|r| r.number == number) else {
            return false;
        };
        let (older, rest) = self.held.split_at_mut(at);
        let range = &rest[0];
        let overlaps = |r: &&mut Range| r.first < range.end && range.first < r.end;
        match older.iter_mut().find(overlaps) {
            Some(older) => {
                older.waiting.push(range.request);
                true
            }
            None => false,
        }
    }

    /// True if the range was passed on to the device.
    pub fn was_sent(&self, number: u64) -> bool {
        self.held.iter().any(|r| r.number == number && r.sent)
    }

    /// Notes that the range is passed on to the device.
    pub fn send(&mut self, number: u64) {
        if let Some(range) = self.held.iter_mut().find(|r| r.number == number) {
            range.sent = true;
        }
    }

    /// Ends a range. Returns the requests that waited for it, which are to go on.
    pub fn release(&mut self, number: u64) -> Vec<u32> {
        let at = self.held.iter().position(|r| r.number == number);
        at.map_or_else(Vec::new, |at| self.held.remove(at).waiting)
    }

    /// Held ranges, for people who look for a hang.
    pub fn describe(&self) -> impl Iterator<Item = String> {
        let held = self.held.iter();
        held.map(|r| format!("range {}..{} held by {}", r.first, r.end, r.request))
    }

    /// Errors if an invariant doesn't hold.
    pub fn check(&self) -> Result<(), String> {
        if !self.held.is_sorted_by_key(|r| r.number) {
            return Err("ranges aren't in the order of their numbers".into());
        }
        for (at, range) in self.held.iter().enumerate() {
            let overlaps = |r: &Range| r.first < range.end && range.first < r.end;
            if range.sent && self.held[..at].iter().any(overlaps) {
                return Err(format!(
                    "range {}..{} was sent before an older one",
                    range.first, range.end
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_wait_for_older_ones_and_requests_for_ranges() {
        let mut r = Ranges::default();
        let first = r.hold(1, 10, 20);
        let second = r.hold(2, 19, 30);
        assert!(r.is_held(10) && r.is_held(29) && !r.is_held(30) && !r.is_sent(10));
        assert!(!r.wait_for_older(first) && r.wait_for_older(second));
        r.send(first);
        assert!(r.was_sent(first) && r.is_sent(19) && !r.is_sent(20));
        assert!(r.wait(19, 7) && r.wait(25, 8) && !r.wait(9, 9));
        r.check().unwrap();
        assert_eq!(r.release(first), [2, 7]);
        assert!(!r.wait_for_older(second));
        assert_eq!((r.release(second), r.is_empty()), (vec![8], true));
        assert!(r.release(second).is_empty());
    }

    #[test]
    fn a_range_sent_before_an_older_one_is_found() {
        let mut r = Ranges::default();
        r.hold(1, 0, 2);
        let second = r.hold(2, 1, 3);
        r.send(second);
        assert!(r.check().is_err());
    }
}
