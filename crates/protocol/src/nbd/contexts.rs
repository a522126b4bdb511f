//! Metadata contexts: their names and numbers, and the questions about block status (proto.md, "Metadata querying").

use super::{u32_at, u64_at};

/// Descriptor flag of `base:allocation`: not allocated.
pub const STATE_HOLE: u32 = 1;
/// Descriptor flag of `base:allocation`: reads as zeros.
pub const STATE_ZERO: u32 = 2;
/// Descriptor flag of `x-pvblk:cache`: in the server's page cache.
pub const STATE_CACHED: u32 = 1;
/// Descriptor flag of `x-pvblk:cache`: the device below the cache hasn't acknowledged the newest data.
pub const STATE_DIRTY: u32 = 2;

/// A property of the disk's blocks that a client may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// Data and holes.
    Allocation,
    /// The parts that are in the disk's page cache. The protocol reserves names that begin with `x-` for those that nobody has registered.
    Cache,
}

impl Context {
    pub const ALL: [Context; 2] = [Context::Allocation, Context::Cache];

    /// Its name: a namespace, a colon, and the rest.
    pub fn name(self) -> &'static str {
        match self {
            Context::Allocation => "base:allocation",
            Context::Cache => "x-pvblk:cache",
        }
    }

    /// Its number on the wire, chosen by us.
    pub fn id(self) -> u32 {
        match self {
            Context::Allocation => 1,
            Context::Cache => 2,
        }
    }

    fn bit(self) -> u8 {
        1 << self.id()
    }
}

/// A set of contexts.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Contexts(u8);

impl Contexts {
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    pub fn has(self, context: Context) -> bool {
        self.0 & context.bit() != 0
    }

    pub fn add(&mut self, context: Context) {
        self.0 |= context.bit();
    }

    /// In the order of their numbers.
    pub fn iter(self) -> impl Iterator<Item = Context> {
        Context::ALL.into_iter().filter(move |&c| self.has(c))
    }

    /// Those of the set that a client's query names. A namespace alone names all of its contexts where `wildcards` are allowed: in lists, not in
    /// selections.
    pub fn named_by(self, query: &str, wildcards: bool) -> Contexts {
        let named = |c: &Context| match c.name().strip_prefix(query) {
            Some("") => true,
            Some(_) => wildcards && query.ends_with(':'),
            None => false,
        };
        self.iter().filter(named).collect()
    }

    /// Both sets together.
    #[must_use]
    pub fn with(self, other: Contexts) -> Contexts {
        Contexts(self.0 | other.0)
    }
}

impl FromIterator<Context> for Contexts {
    fn from_iter<I: IntoIterator<Item = Context>>(all: I) -> Contexts {
        let mut set = Contexts::default();
        all.into_iter().for_each(|c| set.add(c));
        set
    }
}

impl std::fmt::Debug for Contexts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set()
            .entries(self.iter().map(Context::name))
            .finish()
    }
}

/// Longest payload of a question about block status that can be right: a length, and each context's number once.
pub const LONGEST_QUESTION: usize = 8 + 4 * Context::ALL.len();

/// The payload of a question about block status: the length of the range in bytes, and some of the contexts that were `selected`. `None` if its
/// length can't be, no context is asked for, one that wasn't selected, or one twice.
pub fn parse_question(payload: &[u8], selected: Contexts) -> Option<(u64, Contexts)> {
    let (len, ids) = payload.split_at_checked(8)?;
    let (ids, rest) = ids.as_chunks::<4>();
    if ids.is_empty() || !rest.is_empty() {
        return None;
    }
    let mut asked = Contexts::default();
    for id in ids {
        let context = selected.iter().find(|c| c.id() == u32_at(id, 0))?;
        if asked.has(context) {
            return None;
        }
        asked.add(context);
    }
    Some((u64_at(len, 0), asked))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Contexts {
        Context::ALL.into_iter().collect()
    }

    #[test]
    fn queries_name_contexts_and_in_lists_namespaces() {
        let names = |set: Contexts, query, wildcards| -> Vec<&str> {
            let named = set.named_by(query, wildcards);
            named.iter().map(Context::name).collect()
        };
        for (query, listed, selected) in [
            ("base:allocation", &["base:allocation"][..], 1),
            ("base:", &["base:allocation"], 0),
            ("x-pvblk:", &["x-pvblk:cache"], 0),
            ("x-pvblk:cache", &["x-pvblk:cache"], 1),
            ("", &[], 0),
            (":", &[], 0),
            ("base", &[], 0),
            ("base:alloc", &[], 0),
            ("base:allocations", &[], 0),
            ("qemu:", &[], 0),
        ] {
            assert_eq!(names(all(), query, true), listed, "{query:?}");
            assert_eq!(names(all(), query, false).len(), selected, "{query:?}");
        }
        let one = Contexts::from_iter([Context::Allocation]);
        assert!(names(one, "x-pvblk:", true).is_empty());
        assert_eq!((one.len(), all().len(), one.with(all())), (1, 2, all()));
    }

    #[test]
    fn a_question_names_selected_contexts_once() {
        let payload = |len: u64, ids: &[u32]| {
            let mut b = len.to_be_bytes().to_vec();
            ids.iter().for_each(|id| b.extend(id.to_be_bytes()));
            b
        };
        let one = Contexts::from_iter([Context::Cache]);
        let both = parse_question(&payload(5 << 32, &[2, 1]), all());
        assert_eq!(both, Some((5 << 32, all())));
        assert_eq!(parse_question(&payload(7, &[2]), all()), Some((7, one)));
        assert_eq!(parse_question(&payload(7, &[2]), one), Some((7, one)));
        for (ids, selected) in [
            (&[][..], all()),
            (&[1], one),
            (&[2, 2], all()),
            (&[1, 2, 1], all()),
            (&[0], all()),
            (&[3], all()),
            (&[1], Contexts::default()),
        ] {
            assert_eq!(parse_question(&payload(7, ids), selected), None, "{ids:?}");
        }
        let long = payload(7, &[1]);
        for n in (0..12).chain([13]) {
            let mut cut = long.clone();
            cut.resize(n, 0);
            assert_eq!(parse_question(&cut, all()), None, "{n} bytes");
        }
    }
}
