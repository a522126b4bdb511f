//! The hops of a request's life.

/// From one step to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hop {
    /// From the remap, or from Q where there is none, until it got a tag.
    A2G,
    /// From Q until it got a tag.
    Q2G,
    /// Until it was inserted.
    G2I,
    /// From Q until it was merged into another one.
    Q2M,
    /// From the merge until it was issued with the other one.
    M2D,
    /// From the insertion until it was issued.
    I2D,
    /// From Q until it was issued, on a device without tags.
    Q2D,
    /// From the tag until it was issued, on a device without insertion.
    G2D,
    /// Below.
    D2C,
    /// All of it.
    Q2C,
    /// From a completion to the same submitter's next request.
    C2A,
}

impl Hop {
    /// All, in the order of tables.
    pub const ALL: [Hop; 11] = [
        Hop::A2G,
        Hop::Q2G,
        Hop::G2I,
        Hop::Q2M,
        Hop::M2D,
        Hop::I2D,
        Hop::Q2D,
        Hop::G2D,
        Hop::D2C,
        Hop::Q2C,
        Hop::C2A,
    ];

    /// As the seed and btt call it.
    pub fn name(self) -> &'static str {
        match self {
            Hop::A2G => "A2G",
            Hop::Q2G => "Q2G",
            Hop::G2I => "G2I",
            Hop::Q2M => "Q2M",
            Hop::M2D => "M2D",
            Hop::I2D => "I2D",
            Hop::Q2D => "Q2D",
            Hop::G2D => "G2D",
            Hop::D2C => "D2C",
            Hop::Q2C => "Q2C",
            Hop::C2A => "C2A",
        }
    }

    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// A moment: the time, and what the submitter's clock of shared time shows then.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mark {
    pub ns: u64,
    pub shared: f64,
}

/// When a request reached which step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marks {
    /// The remap, or Q where there is none.
    pub begin: Mark,
    pub queue: Mark,
    pub get: Option<Mark>,
    pub merge: Option<Mark>,
    pub insert: Option<Mark>,
    pub issue: Option<Mark>,
}

impl Marks {
    /// The same moments, of a part that takes its share of the submitter's time only from `now` on.
    pub fn sharing_from(mut self, now: Mark) -> Marks {
        let own = [&mut self.begin, &mut self.queue];
        let others = [
            &mut self.get,
            &mut self.merge,
            &mut self.insert,
            &mut self.issue,
        ];
        let all = own.into_iter().chain(others.into_iter().flatten());
        all.for_each(|mark| mark.shared = now.shared);
        self
    }

    /// The life cut into pieces without overlap, each with its share of the submitter's time in nanoseconds. A piece
    /// between steps that no hop lies between is `None`'s.
    pub fn shares(&self, end: Mark) -> impl Iterator<Item = (Option<Hop>, f64)> {
        #[derive(Clone, Copy, PartialEq)]
        enum Step {
            Begin,
            Get,
            Merge,
            Insert,
            Issue,
            End,
        }
        let steps = [
            (Step::Begin, Some(self.begin)),
            (Step::Get, self.get),
            (Step::Merge, self.merge),
            (Step::Insert, self.insert),
            (Step::Issue, self.issue),
            (Step::End, Some(end)),
        ];
        let mut last = (Step::Begin, self.begin.shared);
        steps.into_iter().skip(1).filter_map(move |(step, mark)| {
            let (before, at) = last;
            // Events that are out of order take nothing from others.
            let now = mark?.shared.max(at);
            last = (step, now);
            let hop = match (before, step) {
                (Step::Begin, Step::Get) => Some(Hop::A2G),
                (Step::Begin, Step::Merge) => Some(Hop::Q2M),
                (Step::Begin, Step::Issue) => Some(Hop::Q2D),
                (Step::Get, Step::Insert) => Some(Hop::G2I),
                (Step::Get, Step::Issue) => Some(Hop::G2D),
                (Step::Merge, Step::Issue) => Some(Hop::M2D),
                (Step::Insert, Step::Issue) => Some(Hop::I2D),
                (Step::Issue, Step::End) => Some(Hop::D2C),
                _ => None,
            };
            Some((hop, now - at))
        })
    }
}
