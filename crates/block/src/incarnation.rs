//! Marks by which a user that comes back finds out whether a device still has its contents.

/// Two marks of a device. A mark changes when data may have been lost since it was last read, by an end of
/// the process or the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Incarnation {
    /// Changes when completed writes that were not flushed may be lost; `None`: not known, so they may be
    /// lost.
    pub cache: Option<u64>,
    /// Changes when all contents are lost; `None`: the contents don't end with the process.
    pub contents: Option<u64>,
}

impl Incarnation {
    /// The marks of a device over several, any of which may be added, removed or replaced without a loss. Its
    /// marks change when the set of the members' marks changes. Members with the same marks, such as files on
    /// one machine, count as one, so their number doesn't matter. A member whose cache isn't known makes the
    /// cache of the whole not known.
    ///
    /// Contents end with the process only if those of two members do: the contents of one can be computed.
    pub fn of_members(members: impl IntoIterator<Item = Incarnation>) -> Incarnation {
        let members: Vec<Incarnation> = members.into_iter().collect();
        let caches: Option<Vec<u64>> = members.iter().map(|m| m.cache).collect();
        let contents: Vec<u64> = members.iter().filter_map(|m| m.contents).collect();
        Incarnation {
            cache: caches.filter(|c| !c.is_empty()).map(mark_of),
            contents: (contents.len() > 1).then(|| mark_of(contents)),
        }
    }

    /// The marks of a cache of this process over the device: unflushed data is lost when the cache's own mark
    /// changes, or the device's.
    #[must_use]
    pub fn under_cache(self, mark: u64) -> Incarnation {
        Incarnation {
            cache: self.cache.map(|lower| mark_of(vec![mark, lower])),
            ..self
        }
    }
}

/// One mark for a set of marks. It is the same in every process and every version, because it is compared
/// with marks that another process gave.
fn mark_of(mut marks: Vec<u64>) -> u64 {
    marks.sort_unstable();
    marks.dedup();
    marks.iter().fold(marks.len() as u64, |sum, mark| {
        // The finalizer of splitmix64.
        let n = sum.wrapping_add(*mark).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        n ^ (n >> 31)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(cache: Option<u64>, contents: Option<u64>) -> Incarnation {
        Incarnation { cache, contents }
    }

    #[test]
    fn what_stands_on_several_changes_when_one_of_them_may_have_lost_something() {
        let of = |members: &[Incarnation]| Incarnation::of_members(members.iter().copied());
        let file = marks(Some(1), None);
        let all = of(&[file, file, file]);
        assert!(all.cache.is_some() && all.contents.is_none());
        assert_eq!(all, of(&[file, file]), "one is missing, nothing is lost");
        assert_ne!(all, of(&[file, file, marks(Some(2), None)]), "another boot");
        assert_ne!(all, of(&[marks(Some(2), None); 3]));
        assert_eq!(
            of(&[file, file, marks(None, None)]).cache,
            None,
            "not known"
        );
        assert_eq!(of(&[]), Incarnation::default());
        let two = [file, marks(Some(7), None)];
        assert_eq!(of(&two), of(&[two[1], two[0]]), "in any order");
        assert_ne!(
            of(&two),
            of(&[file, marks(Some(8), None)]),
            "its cache went"
        );
        let memory = |n| marks(Some(n), Some(n));
        assert_eq!(of(&[file, file, memory(3)]).contents, None);
        let lost = of(&[file, memory(3), memory(4)]).contents;
        assert!(lost.is_some() && lost != of(&[file, memory(3), memory(5)]).contents);
    }

    #[test]
    fn a_cache_changes_with_its_process_and_with_what_is_below() {
        let file = marks(Some(1), None);
        assert_eq!(file.under_cache(5), file.under_cache(5));
        assert_ne!(file.under_cache(5), file.under_cache(6));
        assert_ne!(file.under_cache(5), marks(Some(2), None).under_cache(5));
        assert_eq!(marks(None, None).under_cache(5).cache, None);
        assert_eq!(marks(Some(1), Some(9)).under_cache(5).contents, Some(9));
    }
}
