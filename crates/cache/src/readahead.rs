//! Read-ahead on demand: windows that grow while a stream goes on, and a marked page that starts the next one in time.

/// Streams that a queue follows at once.
pub const STREAMS: usize = 8;

/// The place of a read among the streams of its queue, when it is submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The stream that it belongs to, or begins.
    pub stream: u8,
    /// It goes on where the stream was, or begins the device.
    pub sequential: bool,
}

/// Where the streams of a queue are. Hits are told too, so it is the queue's own and takes no lock.
#[derive(Debug)]
pub struct Streams {
    /// The last page of each.
    last: [u64; STREAMS],
    /// Their numbers, in a byte each: the one that was used last is in the lowest byte.
    order: u64,
}

/// A byte of the order is a stream's number.
const _: () = assert!(STREAMS == size_of::<u64>());

impl Default for Streams {
    fn default() -> Streams {
        Streams {
            last: [u64::MAX - 1; STREAMS],
            order: 0x0001_0203_0405_0607,
        }
    }
}

impl Streams {
    /// Pages `first` to `last` are read.
    #[inline]
    pub fn read(&mut self, first: u64, last: u64) -> Hint {
        // On the page where it was, or on the next one.
        let follows = |at: u64| first.wrapping_sub(at) <= 1;
        let (mut stream, mut sequential) = (self.newest(), true);
        if !follows(self.last[stream]) {
            let ends = (0..).zip(&self.last);
            let found = ends.fold(0u32, |all, (bit, &at)| all | u32::from(follows(at)) << bit);
            if found != 0 {
                stream = found.trailing_zeros() as usize % STREAMS;
                self.bring_forward(stream);
            } else {
                // The oldest one ends.
                self.order = self.order.rotate_left(8);
                (stream, sequential) = (self.newest(), first == 0);
            }
        }
        self.last[stream] = last;
        Hint {
            stream: stream as u8,
            sequential,
        }
    }

    /// The number of the stream that was used last.
    #[inline]
    fn newest(&self) -> usize {
        self.order as usize % STREAMS
    }

    /// Makes a stream the one that was used last.
    fn bring_forward(&mut self, stream: usize) {
        let stream = stream as u64;
        let mut places = (0..64).step_by(8);
        let place = places.find(|place| self.order >> place & 0xff == stream);
        // The bytes up to the stream's own.
        let upto = u64::MAX >> (56 - place.unwrap_or(0));
        let newer = self.order & upto >> 8;
        self.order = self.order & !upto | newer << 8 | stream;
    }

    /// True if `page` is the one that the current stream ended on: then it was accessed already.
    #[inline]
    pub fn is_on(&self, page: u64) -> bool {
        self.last[self.newest()] == page
    }
}

/// The largest windows with which pages read in advance are still there when they are wanted. Time is counted in pages that are read.
///
/// Queues that read in order lately share the frames; each has a window that it uses and one on its way. Pages that are lost all the same make
/// windows smaller for all, by an eighth at a time, and they grow again by a sixteenth while none are.
#[derive(Debug)]
pub struct Readers {
    frames: u64,
    age: u64,
    /// The age that each owner was seen in last.
    last: Vec<u64>,
    /// Seen in this age, and in the one before.
    now: u64,
    before: u64,
    /// Sixteenths of a page.
    limit: u64,
    /// When that was looked at, and how many pages had been lost.
    looked: (u64, u64),
}

impl Readers {
    /// For a cache of so many frames.
    pub fn new(frames: usize) -> Readers {
        Readers {
            frames: frames as u64,
            age: 0,
            last: Vec::new(),
            now: 0,
            before: 0,
            limit: u64::MAX / 32,
            looked: (0, 0),
        }
    }

    /// `owner` reads in order, `pages` have been read in all, and `lost` of those that were read in advance were reclaimed before they were used.
    /// Returns the largest window of it, for `most` at most and `room` frames for all.
    pub fn window(&mut self, owner: usize, pages: u64, lost: u64, most: u64, room: u64) -> u64 {
        let step = (self.frames / 4).max(1);
        if pages - self.looked.0 >= step {
            self.limit = self.limit.min(16 * most);
            match lost - self.looked.1 > step / 32 {
                true => self.limit -= self.limit / 8,
                false => self.limit += self.limit / 16 + 1,
            }
            self.looked = (pages, lost);
        }
        most.min(room / (2 * self.readers(owner, pages)))
            .min(self.limit / 16)
    }

    /// Number of owners that read in order, this one among them.
    fn readers(&mut self, owner: usize, pages: u64) -> u64 {
        let age = 1 + pages / (4 * self.frames);
        if age != self.age {
            self.before = if age == self.age + 1 { self.now } else { 0 };
            (self.age, self.now) = (age, 0);
        }
        if self.last.len() <= owner {
            self.last.resize(owner + 1, 0);
        }
        if self.last[owner] != age {
            self.last[owner] = age;
            self.now += 1;
        }
        self.now.max(self.before)
    }
}

/// Sizes of windows in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Pages of the largest one; 0: none.
    pub most: u64,
    /// From so many pages on a window is several requests, which may all end at the same time. A device would have nothing to do if the next window
    /// began only then, so it begins when half of the one before is used.
    pub several: u64,
}

impl Sizes {
    /// The farthest from a mark that the first page which isn't there can be, where windows follow each other.
    pub fn reach(&self) -> u64 {
        match self.most >= self.several {
            true => self.most + self.most / 2,
            false => self.most,
        }
    }
}

/// A stream's last window: `size` pages from `start`, of which the last `ahead` were not asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    start: u64,
    size: u64,
    ahead: u64,
    /// Pages between the mark and the first page in advance.
    early: u64,
}

/// Pages to be read now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The first page.
    pub start: u64,
    /// The first page behind the last.
    pub end: u64,
    /// The page to be marked, which may be one of the window before, or [`u64::MAX`].
    pub mark: u64,
}

impl Window {
    fn plan(&self) -> Plan {
        Plan {
            start: self.start,
            end: self.start + self.size,
            mark: match self.ahead {
                0 => u64::MAX,
                _ => self.mark(),
            },
        }
    }

    /// Pages of the window, if its mark is at `page`.
    pub fn is_marked_at(&self, page: u64) -> Option<u64> {
        (self.size > 0 && page == self.mark()).then_some(self.size)
    }

    fn mark(&self) -> u64 {
        self.start + self.size - self.ahead - self.early
    }

    fn grow(&mut self, sizes: Sizes) {
        self.start += self.size;
        self.early = match self.size {
            size if size >= sizes.several => size / 2,
            _ => 0,
        };
        self.size = match self.size {
            size if size < sizes.most / 16 => 4 * size,
            size => (2 * size).min(sizes.most),
        };
        self.ahead = self.size;
    }

    /// `wanted` pages from `page` on are read, and the first isn't there.
    pub fn miss(&mut self, page: u64, wanted: u64, sequential: bool, sizes: Sizes) -> Plan {
        let most = sizes.most;
        let alone = Plan {
            start: page,
            end: page + wanted,
            mark: u64::MAX,
        };
        if most == 0 || !sequential {
            *self = Window::default();
            return alone;
        }
        let behind = self.start + self.size;
        if self.size > 0 && (page == behind || page == behind - self.ahead) {
            self.grow(sizes);
            if self.start > page {
                // What was read in advance is gone already: from here, with the new size.
                self.start = page;
            }
            self.early = 0;
            if self.size < wanted {
                self.size = wanted;
                self.ahead = 0;
            } else if self.ahead >= self.size {
                self.ahead = self.size - wanted.min(self.size - 1);
            }
            return self.plan();
        }
        if wanted > most {
            *self = Window::default();
            return alone;
        }
        let size = match wanted.next_power_of_two() {
            n if n <= most / 32 => 4 * n,
            n if n <= most / 4 => 2 * n,
            _ => most,
        };
        *self = Window {
            start: page,
            size: size.max(wanted),
            ahead: size.saturating_sub(wanted),
            early: 0,
        };
        self.plan()
    }

    /// The marked page `page` is read; `absent` finds the first page after it that isn't there, as far as the largest window, where it is somebody else's mark.
    /// Returns the pages to read in advance.
    pub fn marked(
        &mut self,
        page: u64,
        absent: impl FnOnce() -> u64,
        sizes: Sizes,
    ) -> Option<Plan> {
        let most = sizes.most;
        if most == 0 {
            return None;
        }
        if self.size > 0 && page == self.mark() {
            self.grow(sizes);
            return Some(self.plan());
        }
        // Somebody else's mark.
        let absent = absent();
        if absent - page > sizes.reach() {
            return None;
        }
        *self = Window {
            start: absent,
            size: absent - page,
            ..Window::default()
        };
        self.start -= self.size;
        self.grow(sizes);
        Some(self.plan())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Sizes = sizes(32);

    const fn sizes(most: u64) -> Sizes {
        Sizes { most, several: 512 }
    }

    #[test]
    fn windows_grow_to_the_largest_and_marks_start_the_next() {
        let mut w = Window::default();
        // One page of a stream: four, of which three are in advance.
        let p = w.miss(10, 1, true, MOST);
        assert_eq!((p.start, p.end, p.mark), (10, 14, 11));
        let mut sizes = Vec::new();
        let mut mark = p.mark;
        for _ in 0..5 {
            let p = w.marked(mark, || 0, MOST).unwrap();
            assert_eq!(p.mark, p.start);
            sizes.push(p.end - p.start);
            mark = p.mark;
        }
        assert_eq!(sizes, [8, 16, 32, 32, 32]);
        // The next one isn't there in time: the stream goes on where the window ended.
        let end = w.start + w.size;
        let p = w.miss(end, 1, true, MOST);
        assert_eq!((p.start, p.end, p.mark), (end, end + 32, end + 1));
    }

    #[test]
    fn windows_of_several_requests_begin_early() {
        let most = sizes(2048);
        let mut w = Window::default();
        let mut mark = w.miss(0, 16, true, most).mark;
        let mut plans = Vec::new();
        for _ in 0..6 {
            let p = w.marked(mark, || 0, most).unwrap();
            plans.push((p.start, p.end - p.start, p.mark));
            assert!(p.mark > mark);
            mark = p.mark;
        }
        let expected = [
            (64, 256, 64),
            (320, 512, 320),
            (832, 1024, 576),
            (1856, 2048, 1344),
            (3904, 2048, 2880),
            (5952, 2048, 4928),
        ];
        assert_eq!(plans, expected);
        // Its mark wasn't met, and it is gone: from here.
        let p = w.miss(8000, 16, true, most);
        assert_eq!((p.start, p.mark), (8000, 8016));
    }

    #[test]
    fn first_windows_by_request_and_none_for_random_reads() {
        let first = |wanted| Window::default().miss(100, wanted, true, MOST);
        assert_eq!(first(2).end - 100, 4);
        assert_eq!(first(8).end - 100, 16);
        assert_eq!(first(9).end - 100, 32);
        assert_eq!((first(32).end, first(32).mark), (132, u64::MAX));
        assert_eq!(first(64).end, 164);
        let mut w = Window::default();
        w.miss(10, 1, true, MOST);
        let p = w.miss(500, 3, false, MOST);
        assert_eq!((p.start, p.end, p.mark), (500, 503, u64::MAX));
        assert_eq!(w, Window::default());
        assert_eq!(Window::default().miss(10, 1, true, sizes(0)).end, 11);
    }

    #[test]
    fn somebody_elses_mark_goes_on_behind_what_is_there() {
        let mut w = Window::default();
        let p = w.marked(40, || 48, MOST).unwrap();
        assert_eq!((p.start, p.end), (48, 64));
        assert_eq!(Window::default().marked(40, || 80, MOST), None);
    }

    #[test]
    fn windows_are_shared_and_shrink_while_pages_are_lost() {
        let mut r = Readers::new(512);
        let mut pages = 0;
        // Alone: as much as is allowed, or half of the room.
        assert_eq!(r.window(1, pages, 0, MOST.most, 460), 32);
        assert_eq!(r.window(1, pages, 0, MOST.most, 20), 10);
        for owner in 2..=16 {
            r.window(owner, pages, 0, MOST.most, 460);
        }
        assert_eq!(r.window(1, pages, 0, MOST.most, 460), 14);
        // An owner that hasn't come again for a while doesn't count.
        for _ in 0..4 {
            pages += 4 * 512;
            r.window(1, pages, 0, MOST.most, 460);
        }
        assert_eq!(r.window(1, pages, 0, MOST.most, 460), 32);
        // Losses, and none again.
        let mut sizes = Vec::new();
        let mut lost = 0;
        for round in 0..12 {
            pages += 128;
            lost += if round < 6 { 100 } else { 0 };
            sizes.push(r.window(1, pages, lost, MOST.most, 460));
        }
        assert_eq!(sizes, [28, 24, 21, 18, 16, 14, 15, 16, 17, 18, 19, 21]);
    }

    #[test]
    fn streams_are_told_apart() {
        let mut s = Streams::default();
        assert!(s.read(0, 0).sequential);
        assert!(!s.read(1000, 1001).sequential);
        for i in 1..20 {
            let a = s.read(i, i);
            let b = s.read(1000 + 2 * i, 1001 + 2 * i);
            assert!(a.sequential && b.sequential && a.stream != b.stream);
        }
        // Halves of a page.
        assert!(s.read(19, 19).sequential && s.is_on(19));
        // The oldest of nine is forgotten.
        let far = |i: u64| 100_000 * (i + 1);
        for i in 0..STREAMS as u64 {
            assert!(!s.read(far(i), far(i)).sequential);
        }
        assert!(!s.read(20, 20).sequential, "the ninth");
        for i in (1..STREAMS as u64).rev() {
            assert!(s.read(far(i) + 1, far(i) + 1).sequential);
        }
        assert!(!s.read(far(0) + 1, far(0) + 1).sequential);
        assert!(s.read(far(1) + 2, far(1) + 2).sequential);
        assert!(!s.read(20 + 1, 20 + 1).sequential);
        // Random reads don't push out a stream that is in use.
        for i in 0..40 {
            assert!(!s.read(5000 + 10 * i, 5000 + 10 * i).sequential);
            assert!(s.read(22 + i, 22 + i).sequential);
        }
    }
}
