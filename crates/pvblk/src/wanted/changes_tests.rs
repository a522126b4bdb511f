use super::*;
use pvblk_testing::random;

fn disk(volume: &str) -> DiskWanted {
    DiskWanted::new(volume)
}

fn file(disks: &[(&str, &str)]) -> Configured {
    let disks = disks.iter().map(|(n, v)| ((*n).to_owned(), disk(v)));
    Configured {
        disks: disks.collect(),
        listeners: Listeners::default(),
    }
}

/// `name=volume` of each disk that is wanted.
fn told(changes: &Changes, configured: &Configured) -> String {
    let wanted = changes.wanted(configured);
    let texts: Vec<String> = wanted
        .iter()
        .map(|(n, d)| format!("{n}={}", d.volume))
        .collect();
    texts.join(" ")
}

/// The table of decision 27: configured when it was changed, changed at run time, configured now; then what is wanted after a start, and
/// after a reload.
#[test]
fn each_combination_has_its_rule() {
    let none: &[(&str, &str)] = &[];
    let one: &[(&str, &str)] = &[("a", "mem:1M")];
    let other: &[(&str, &str)] = &[("a", "mem:9M")];
    let removed = None;
    let set = Some("mem:2M");
    for (before, run_time, now, start, reload) in [
        // Added at run time.
        (none, set, none, "a=mem:2M", "a=mem:2M"),
        (none, set, one, "a=mem:1M", "a=mem:1M"),
        // Changed.
        (one, set, one, "a=mem:2M", "a=mem:2M"),
        (one, set, other, "a=mem:9M", "a=mem:9M"),
        (one, set, none, "", ""),
        // Removed.
        (one, removed, one, "", "a=mem:1M"),
        (one, removed, other, "", "a=mem:9M"),
        (one, removed, none, "", ""),
        (none, removed, one, "a=mem:1M", "a=mem:1M"),
        (none, removed, none, "", ""),
    ] {
        let case = format!("{before:?} {run_time:?} {now:?}");
        let (before, now) = (file(before), file(now));
        let mut changes = Changes::default();
        changes.set(&before, "a", run_time.map(disk));
        let at_start = changes.over(&now, Occasion::Start);
        assert_eq!(told(&at_start, &now), start, "start: {case}");
        let reloaded = changes.over(&now, Occasion::Reload);
        assert_eq!(told(&reloaded, &now), reload, "reload: {case}");
        let both = at_start.over(&now, Occasion::Reload);
        assert_eq!(told(&both, &now), reload, "start, reload: {case}");
    }
}

#[test]
fn a_change_that_is_taken_back_leaves_nothing() {
    let configured = file(&[("a", "mem:1M")]);
    let mut changes = Changes::default();
    changes.set(&configured, "a", None);
    changes.set(&configured, "b", Some(disk("mem:2M")));
    assert_eq!(told(&changes, &configured), "b=mem:2M");
    assert_eq!(
        changes.held_back(&configured).collect::<Vec<_>>(),
        ["a"],
        "it is told"
    );
    changes.set(&configured, "a", Some(disk("mem:1M")));
    changes.set(&configured, "b", None);
    assert_eq!(changes, Changes::default());
}

#[test]
fn a_start_with_the_wrong_file_forgets_nothing() {
    let right = file(&[("a", "mem:1M"), ("b", "mem:1M")]);
    let mut changes = Changes::default();
    changes.set(&right, "a", None);
    changes.set(&right, "b", Some(disk("mem:2M")));
    changes.set(&right, "c", Some(disk("mem:3M")));
    let wrong = file(&[]);
    let after = changes.over(&wrong, Occasion::Start);
    assert_eq!(told(&after, &wrong), "c=mem:3M");
    assert_eq!(after.over(&right, Occasion::Start), changes);
    // A reload means it.
    let after = changes.over(&wrong, Occasion::Reload);
    assert_eq!(after.disks.keys().collect::<Vec<_>>(), ["c"]);
}

#[test]
fn devices_that_may_join_go_with_the_volume() {
    let configured = file(&[("r", "raid5:abc")]);
    let mut changes = Changes::default();
    assert!(!changes.add_joining(&configured, "x", "file:d"));
    assert!(changes.add_joining(&configured, "r", "file:d"));
    assert!(changes.add_joining(&configured, "r", "file:d"));
    assert_eq!(changes.disks["r"].joining, ["file:d"]);
    // Another field changes.
    let exclusive = DiskWanted {
        exclusive: true,
        ..disk("raid5:abc")
    };
    changes.set(&configured, "r", Some(exclusive));
    assert_eq!(changes.disks["r"].joining, ["file:d"]);
    changes.set_members(&configured, "r", "raid5:abd");
    let change = &changes.disks["r"];
    assert_eq!(change.joining, Vec::<String>::new());
    let wanted = change.wanted.as_ref().unwrap();
    assert!(wanted.exclusive && wanted.volume == "raid5:abd");
    // The file names the new members, too: nothing is left to remember but the other field.
    let now = file(&[("r", "raid5:abd")]);
    let after = changes.over(&now, Occasion::Reload);
    assert_eq!(told(&after, &now), "r=raid5:abd");
}

#[test]
fn sockets_are_merged() {
    let listeners = |nbd: &[&str]| Listeners {
        local: Vec::new(),
        nbd: nbd.iter().map(|s| (*s).to_owned()).collect(),
    };
    let configured = Configured {
        listeners: listeners(&["unix:/a"]),
        ..Configured::default()
    };
    let mut changes = Changes::default();
    changes.set_listeners(&configured, listeners(&["unix:/a", "unix:/b"]));
    let now = Configured {
        listeners: listeners(&["unix:/c"]),
        ..Configured::default()
    };
    let after = changes.over(&now, Occasion::Reload);
    assert_eq!(*after.listeners(&now), listeners(&["unix:/b", "unix:/c"]));
    changes.set_listeners(&configured, configured.listeners.clone());
    assert_eq!(changes, Changes::default());
}

/// Changes, starts and reloads in any order: a disk that was removed isn't wanted until a reload names it or it is added again, and one that was
/// added is wanted until it is removed or the file takes it over.
#[test]
fn nothing_is_lost_and_nothing_comes_back_by_itself() {
    let mut rng = random();
    let names = ["a", "b", "c"];
    for _ in 0..2000 {
        let mut configured = Configured::default();
        let mut changes = Changes::default();
        for _ in 0..20 {
            let name = rng.choice(names).unwrap();
            let volume = format!("mem:{}M", rng.u8(1..4));
            let before = changes.wanted(&configured);
            match rng.u8(..6) {
                0 => {
                    changes.set(&configured, name, Some(disk(&volume)));
                    let found = changes.disk(&configured, name);
                    assert_eq!(found, Some(&disk(&volume)));
                }
                1 => {
                    changes.set(&configured, name, None);
                    assert_eq!(changes.disk(&configured, name), None);
                }
                2 => {
                    // The same configuration: a start changes nothing.
                    changes = changes.over(&configured, Occasion::Start);
                    assert_eq!(changes.wanted(&configured), before);
                }
                kind => {
                    configured.disks.clear();
                    for name in names.into_iter().filter(|_| rng.bool()) {
                        let volume = format!("mem:{}M", 1 + configured.disks.len());
                        configured.disks.push((name.to_owned(), disk(&volume)));
                    }
                    let occasion = match kind {
                        3 => Occasion::Start,
                        _ => Occasion::Reload,
                    };
                    let old = changes.clone();
                    changes = old.over(&configured, occasion);
                    let again = changes.over(&configured, occasion);
                    assert_eq!(changes, again, "read twice");
                    for (name, change) in &old.disks {
                        let now = changes.disk(&configured, name);
                        let is_named = configured.disk(name).is_some();
                        match (&change.wanted, &change.configured) {
                            (None, _) => {
                                let returns = is_named && occasion == Occasion::Reload;
                                assert_eq!(now.is_some(), returns, "{name}: {change:?}");
                            }
                            (Some(_), None) => assert!(now.is_some(), "{name} is lost"),
                            (Some(_), Some(_)) => assert_eq!(now.is_some(), is_named),
                        }
                    }
                }
            }
            // One disk and all disks agree.
            let wanted = changes.wanted(&configured);
            for name in names {
                let listed = wanted.iter().find(|(n, _)| n == name).map(|(_, d)| d);
                assert_eq!(changes.disk(&configured, name), listed);
            }
        }
    }
}
