//! Hops: the times between the steps of a request.

/// Time from one step of a request to another.
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
    /// From the issue until the completion: the time below this device.
    D2C,
    /// From Q until the completion: the whole time on this device.
    Q2C,
    /// From a completion to the same submitter's next request.
    C2A,
}

impl Hop {
    /// All hops, in the order of tables.
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

    /// Name in tables and files.
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

/// A moment: its time, and the submitter's clock of shared time then.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mark {
    pub ns: u64,
    pub shared: f64,
}

/// Moments at which a request reached its steps.
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
    /// The same moments for a part of a split request, which shares the submitter's time only from `now` on.
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

    /// Cuts the request's time into intervals without overlap, each with its share of the submitter's time in
    /// nanoseconds. `None` stands for intervals between steps that have no hop.
    pub fn shares(&self, end: Mark) -> impl Iterator<Item = (Option<Hop>, f64)> {
        #[derive(Clone, Copy, PartialEq)]
        enum RequestStep {
            Begin,
            Get,
            Merge,
            Insert,
            Issue,
            End,
        }
        let steps = [
            (RequestStep::Begin, Some(self.begin)),
            (RequestStep::Get, self.get),
            (RequestStep::Merge, self.merge),
            (RequestStep::Insert, self.insert),
            (RequestStep::Issue, self.issue),
            (RequestStep::End, Some(end)),
        ];
        let mut last = (RequestStep::Begin, self.begin.shared);
        steps.into_iter().skip(1).filter_map(move |(step, mark)| {
            let (before, at) = last;
            // Events out of order take nothing from other intervals.
            let now = mark?.shared.max(at);
            last = (step, now);
            let hop = match (before, step) {
                (RequestStep::Begin, RequestStep::Get) => Some(Hop::A2G),
                (RequestStep::Begin, RequestStep::Merge) => Some(Hop::Q2M),
                (RequestStep::Begin, RequestStep::Issue) => Some(Hop::Q2D),
                (RequestStep::Get, RequestStep::Insert) => Some(Hop::G2I),
                (RequestStep::Get, RequestStep::Issue) => Some(Hop::G2D),
                (RequestStep::Merge, RequestStep::Issue) => Some(Hop::M2D),
                (RequestStep::Insert, RequestStep::Issue) => Some(Hop::I2D),
                (RequestStep::Issue, RequestStep::End) => Some(Hop::D2C),
                _ => None,
            };
            Some((hop, now - at))
        })
    }
}
