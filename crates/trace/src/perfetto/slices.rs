//! Cuts a request's time into slices that nest.

use crate::latency::Life;

/// A slice: its name, begin and end in nanoseconds.
pub type Slice<'a> = (&'a str, u64, u64);

/// Begin and end of the request's slice: from A, or Q without one, to C.
pub fn span(life: &Life) -> (u64, u64) {
    let begin_ns = life.remap_ns.unwrap_or(life.queue_ns).min(life.queue_ns);
    (begin_ns, life.complete_ns.max(begin_ns))
}

/// The request's hops. They don't overlap if its events have a normal order; what sticks out of the request's slice is cut off.
pub fn hops(life: &Life, into: &mut Vec<Slice<'static>>) {
    let (begin_ns, end_ns) = span(life);
    into.clear();
    if begin_ns < life.queue_ns {
        into.push(("A2Q", begin_ns, life.queue_ns));
    }
    for (hop, from_ns, to_ns) in life.successive_hops() {
        let from_ns = from_ns.clamp(begin_ns, end_ns);
        into.push((hop.name(), from_ns, to_ns.clamp(from_ns, end_ns)));
    }
}

/// A begin or an end at a time in nanoseconds, in the order in which they are written.
pub enum Step<'a> {
    Begin(&'a str, u64),
    End(u64),
}

/// Calls `step` with the begins and ends of the slices. One that begins in another and ends after it is cut in two, so that both nest and no
/// time is lost.
pub fn nested<'a, E>(
    slices: &mut Vec<Slice<'a>>,
    mut step: impl FnMut(Step<'a>) -> Result<(), E>,
) -> Result<(), E> {
    let longer_first = |s: &Slice<'a>| (s.1, std::cmp::Reverse(s.2));
    // The next one is the last.
    slices.sort_by_key(|s| std::cmp::Reverse(longer_first(s)));
    let mut open: Vec<u64> = Vec::new();
    while let Some((name, begin_ns, end_ns)) = slices.pop() {
        while let Some(ends_ns) = open.pop_if(|ends_ns| *ends_ns <= begin_ns) {
            step(Step::End(ends_ns))?;
        }
        let mut until_ns = end_ns;
        if let Some(outer_ns) = open.last().copied()
            && outer_ns < end_ns
        {
            until_ns = outer_ns;
            let rest = (name, outer_ns, end_ns);
            let at = slices.partition_point(|s| longer_first(s) > longer_first(&rest));
            slices.insert(at, rest);
        }
        step(Step::Begin(name, begin_ns))?;
        open.push(until_ns);
    }
    while let Some(ends_ns) = open.pop() {
        step(Step::End(ends_ns))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn steps(mut slices: Vec<Slice<'static>>) -> Vec<String> {
        let mut all = Vec::new();
        let done = nested(&mut slices, |step| {
            all.push(match step {
                Step::Begin(name, at) => format!("{name}@{at}"),
                Step::End(at) => format!("@{at}"),
            });
            Ok::<(), Infallible>(())
        });
        assert!(done.is_ok());
        all
    }

    #[test]
    fn slices_end_before_the_next_begins() {
        let found = steps(vec![("a", 0, 10), ("b", 10, 10), ("c", 10, 12)]);
        assert_eq!(found, ["a@0", "@10", "c@10", "b@10", "@10", "@12"]);
    }

    #[test]
    fn slices_that_cross_are_cut_and_keep_their_time() {
        let found = steps(vec![("a", 0, 10), ("b", 5, 20), ("c", 8, 30)]);
        assert_eq!(
            found,
            [
                "a@0", "b@5", "c@8", "@10", "@10", "@10", "c@10", "b@10", "@20", "@30"
            ]
        );
    }
}
