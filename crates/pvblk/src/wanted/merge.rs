//! The merge of what the configuration says now with what was changed at run time: by field, and in lists by element.
//!
//! `base` is the configuration that the change was made over. A field that the configuration has changed since then is the configuration's;
//! every other one stays as it is at run time.

use super::DiskWanted;

/// A disk that is in both; `base` is `None` if the configuration didn't name it before: fields that it doesn't give then stay, too.
pub fn disk(
    base: Option<&DiskWanted>,
    configured: &DiskWanted,
    run_time: &DiskWanted,
) -> DiskWanted {
    let unnamed = DiskWanted::default();
    let base = base.unwrap_or(&unnamed);
    DiskWanted {
        volume: value(&base.volume, &configured.volume, &run_time.volume),
        exclusive: value(&base.exclusive, &configured.exclusive, &run_time.exclusive),
        vhost_user: list(
            &base.vhost_user,
            &configured.vhost_user,
            &run_time.vhost_user,
        ),
        xen_attach: list(
            &base.xen_attach,
            &configured.xen_attach,
            &run_time.xen_attach,
        ),
        limit: value(&base.limit, &configured.limit, &run_time.limit),
    }
}

fn value<T: Clone + PartialEq>(base: &T, configured: &T, run_time: &T) -> T {
    match base == configured {
        true => run_time.clone(),
        false => configured.clone(),
    }
}

/// Elements at run time without those that left the configuration, then those that came into it.
pub fn list(base: &[String], configured: &[String], run_time: &[String]) -> Vec<String> {
    let left = |e: &&String| base.contains(e) && !configured.contains(e);
    let came = |e: &&String| configured.contains(e) && !base.contains(e);
    let mut merged: Vec<String> = run_time.iter().filter(|e| !left(e)).cloned().collect();
    for element in configured.iter().filter(came) {
        if !merged.contains(element) {
            merged.push(element.clone());
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(words: &str) -> Vec<String> {
        words.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn lists_are_merged_by_element() {
        for (base, configured, run_time, merged) in [
            ("", "", "", ""),
            ("a", "a", "", ""),
            ("a", "a", "a b", "a b"),
            ("a", "a c", "b", "b c"),
            ("a", "", "a b", "b"),
            ("a", "c", "a", "c"),
            ("", "a", "a", "a"),
            ("a b", "b", "b a x", "b x"),
        ] {
            let of = |w| texts(w);
            let found = list(&of(base), &of(configured), &of(run_time));
            assert_eq!(found, of(merged), "{base} | {configured} | {run_time}");
        }
    }

    #[test]
    fn a_field_is_the_configurations_if_it_changed_there() {
        let base = DiskWanted {
            limit: Some("iops=1".into()),
            vhost_user: texts("unix:/a"),
            ..DiskWanted::new("mem:1M")
        };
        let run_time = DiskWanted {
            limit: Some("iops=2".into()),
            exclusive: true,
            ..base.clone()
        };
        assert_eq!(disk(Some(&base), &base, &run_time), run_time);
        let mut configured = DiskWanted::new("mem:2M");
        let merged = disk(Some(&base), &configured, &run_time);
        let expected = DiskWanted {
            exclusive: true,
            ..DiskWanted::new("mem:2M")
        };
        assert_eq!(merged, expected, "the limit and the socket left the file");
        configured.limit = base.limit.clone();
        let merged = disk(Some(&base), &configured, &run_time);
        assert_eq!(merged.limit.as_deref(), Some("iops=2"));
        // A disk that was added at run time, and is in the file since.
        let merged = disk(None, &DiskWanted::new("mem:3M"), &run_time);
        let expected = DiskWanted {
            volume: "mem:3M".into(),
            ..run_time
        };
        assert_eq!(merged, expected);
    }
}
