//! The inactive and the active list of frames, and what was known of pages that are gone.

const NONE: u32 = u32::MAX;

/// The place of a frame in the lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// Neither of the lists.
    None,
    /// The one that is reclaimed from.
    Inactive,
    /// The one that is protected.
    Active,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    /// Towards the head, where frames come in.
    newer: u32,
    /// Towards the tail, where they go.
    older: u32,
    on: On,
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    head: u32,
    tail: u32,
    len: usize,
}

/// Both lists, through the frames themselves.
#[derive(Debug)]
pub struct Lists {
    links: Box<[Link]>,
    ends: [Ends; 2],
}

impl Lists {
    /// Empty lists for `frames` frames.
    pub fn new(frames: usize) -> Lists {
        let link = Link {
            newer: NONE,
            older: NONE,
            on: On::None,
        };
        let ends = Ends {
            head: NONE,
            tail: NONE,
            len: 0,
        };
        Lists {
            links: vec![link; frames].into(),
            ends: [ends; 2],
        }
    }

    /// Frames on a list.
    pub fn len(&self, on: On) -> usize {
        match on {
            On::None => 0,
            on => self.ends[on as usize - 1].len,
        }
    }

    /// The list that a frame is on.
    pub fn on(&self, frame: u32) -> On {
        self.links[frame as usize].on
    }

    /// The oldest of a list.
    pub fn oldest(&self, on: On) -> Option<u32> {
        let tail = match on {
            On::None => NONE,
            on => self.ends[on as usize - 1].tail,
        };
        (tail != NONE).then_some(tail)
    }

    /// Takes a frame off its list and puts it at the head of `on`, if that is a list.
    pub fn put(&mut self, frame: u32, on: On) {
        self.take(frame);
        if on == On::None {
            return;
        }
        let ends = &mut self.ends[on as usize - 1];
        let older = std::mem::replace(&mut ends.head, frame);
        ends.len += 1;
        match older {
            NONE => ends.tail = frame,
            o => self.links[o as usize].newer = frame,
        }
        self.links[frame as usize] = Link {
            newer: NONE,
            older,
            on,
        };
    }

    fn take(&mut self, frame: u32) {
        let Link { newer, older, on } = self.links[frame as usize];
        if on == On::None {
            return;
        }
        let ends = &mut self.ends[on as usize - 1];
        ends.len -= 1;
        match newer {
            NONE => ends.head = older,
            n => self.links[n as usize].older = older,
        }
        match older {
            NONE => self.ends[on as usize - 1].tail = newer,
            o => self.links[o as usize].newer = newer,
        }
        self.links[frame as usize].on = On::None;
    }
}

/// The time at which each page was reclaimed, as a count of pages that had left the inactive list. When the page is read again, the difference says
/// how much longer that list should have been. There is a place for each frame; of two pages with one place the newer one is remembered.
#[derive(Debug)]
pub struct Shadows {
    places: Box<[(u64, u64)]>,
    clock: u64,
}

impl Shadows {
    /// For `frames` frames; nothing is remembered.
    pub fn new(frames: usize) -> Shadows {
        let places = frames.next_power_of_two().max(2);
        Shadows {
            places: vec![(u64::MAX, 0); places].into(),
            clock: 0,
        }
    }

    fn place(&self, page: u64) -> usize {
        // The highest bits, so that pages in order meet only after almost half of the places.
        let hash = page.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (hash >> (u64::BITS - self.places.len().trailing_zeros())) as usize
    }

    /// A page was activated.
    pub fn activated(&mut self) {
        self.clock += 1;
    }

    /// A page is reclaimed.
    pub fn evicted(&mut self, page: u64) {
        self.clock += 1;
        let place = self.place(page);
        self.places[place] = (page, self.clock);
    }

    /// A page is read: how far it was from still being there, if it was there not long ago.
    pub fn refault(&mut self, page: u64) -> Option<u64> {
        let place = self.place(page);
        let (of, at) = self.places[place];
        if of != page {
            return None;
        }
        self.places[place].0 = u64::MAX;
        Some(self.clock - at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_leave_in_the_order_in_which_they_came() {
        let mut l = Lists::new(6);
        (0..6).for_each(|f| l.put(f, On::Inactive));
        l.put(0, On::Inactive);
        l.put(3, On::Active);
        l.put(5, On::None);
        l.put(1, On::Active);
        assert_eq!((l.len(On::Inactive), l.len(On::Active)), (3, 2));
        let mut order = Vec::new();
        for on in [On::Inactive, On::Active] {
            while let Some(f) = l.oldest(on) {
                assert_eq!(l.on(f), on);
                order.push(f);
                l.put(f, On::None);
            }
        }
        assert_eq!(order, [2, 4, 0, 3, 1]);
        assert_eq!((l.len(On::Inactive), l.len(On::Active)), (0, 0));
    }

    #[test]
    fn pages_in_order_are_all_remembered() {
        for frames in [16, 1000, 1 << 14, 1 << 16, 1 << 18] {
            let mut s = Shadows::new(frames);
            let pages = 7_000_000..7_000_000 + frames as u64 / 5 * 2;
            pages.clone().for_each(|page| s.evicted(page));
            let known = pages.clone().filter(|&page| s.refault(page).is_some());
            assert_eq!(known.count(), pages.count(), "{frames} frames");
        }
    }

    #[test]
    fn distances_count_what_left_meanwhile() {
        let mut s = Shadows::new(16);
        s.evicted(7);
        s.activated();
        s.evicted(1_000_000);
        assert_eq!(s.refault(7), Some(2));
        assert_eq!(s.refault(7), None);
        assert_eq!(s.refault(99), None);
    }
}
