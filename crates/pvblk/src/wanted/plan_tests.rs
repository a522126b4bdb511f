use super::*;
use pvblk_testing::random;
use std::collections::BTreeSet;

fn disk(volume: &str, sockets: &[&str]) -> DiskWanted {
    DiskWanted {
        vhost_user: sockets.iter().map(|s| (*s).to_owned()).collect(),
        ..DiskWanted::new(volume)
    }
}

fn served(disks: &[(&str, DiskWanted)]) -> Served {
    let disks = disks.iter().map(|(n, d)| ((*n).to_owned(), d.clone()));
    Served {
        disks: disks.collect(),
        listeners: Listeners::default(),
    }
}

#[test]
fn steps_are_told_in_the_order_in_which_they_can_be_done() {
    let limited = |volume, limit: &str| DiskWanted {
        limit: Some(limit.into()),
        ..disk(volume, &[])
    };
    let two = || [("a", disk("mem:1M", &[])), ("b", disk("mem:1M", &[]))];
    let cases: &[(Served, Served, &[&str])] = &[
        (served(&two()), served(&two()), &[]),
        (
            served(&[]),
            served(&two()),
            &["disk a: add mem:1M", "disk b: add mem:1M"],
        ),
        (
            served(&two()),
            served(&[]),
            &["disk a: remove", "disk b: remove"],
        ),
        // Another volume, which may be the file that another disk lets go.
        (
            served(&[("a", disk("file:x", &[])), ("z", disk("file:y", &[]))]),
            served(&[("a", disk("file:y", &[]))]),
            &["disk a: remove", "disk z: remove", "disk a: add file:y"],
        ),
        // A socket goes to another disk.
        (
            served(&[
                ("a", disk("mem:1M", &[])),
                ("b", disk("mem:1M", &["unix:/s"])),
            ]),
            served(&[
                ("a", disk("mem:1M", &["unix:/s"])),
                ("b", disk("mem:1M", &[])),
            ]),
            &[
                "disk b: remove vhost-user on unix:/s",
                "disk a: add vhost-user on unix:/s",
            ],
        ),
        (
            served(&[
                ("a", limited("mem:1M", "iops=1")),
                ("b", limited("mem:1M", "iops=1")),
            ]),
            served(&[
                ("a", limited("mem:1M", "iops=2")),
                ("b", disk("mem:1M", &[])),
            ]),
            &["disk a: set limit to iops=2", "disk b: lift the limit"],
        ),
    ];
    for (present, wanted, expected) in cases {
        let steps = plan(present, wanted);
        let texts: Vec<String> = steps.iter().map(Step::to_string).collect();
        assert_eq!(texts, *expected);
    }
}

#[test]
fn a_socket_of_all_disks_opens_last_and_closes_first() {
    let nbd = |socket: &str| Listeners {
        nbd: vec![socket.to_owned()],
        local: Vec::new(),
    };
    let present = Served {
        listeners: nbd("unix:/old"),
        ..served(&[("a", disk("mem:1M", &[]))])
    };
    let wanted = Served {
        listeners: nbd("unix:/new"),
        ..served(&[("b", disk("mem:1M", &[]))])
    };
    let texts: Vec<String> = plan(&present, &wanted)
        .iter()
        .map(Step::to_string)
        .collect();
    let expected = [
        "close NBD on unix:/old",
        "disk a: remove",
        "disk b: add mem:1M",
        "open NBD on unix:/new",
    ];
    assert_eq!(texts, expected);
}

/// A server that refuses whatever a real one would.
fn carry_out(present: &mut Served, step: &Step) {
    let taken: BTreeSet<Export> = present
        .disks
        .values()
        .flat_map(DiskWanted::exports)
        .collect();
    let listeners = &mut present.listeners;
    let list = |listeners: &mut Listeners, l: &Listener| match l {
        Listener::Local(s) => (std::mem::take(&mut listeners.local), s.clone(), true),
        Listener::Nbd(s) => (std::mem::take(&mut listeners.nbd), s.clone(), false),
    };
    let put = |listeners: &mut Listeners, all, is_local| match is_local {
        true => listeners.local = all,
        false => listeners.nbd = all,
    };
    let exports = |disk: &mut DiskWanted, export: &Export, add: bool| {
        let (all, text) = match export {
            Export::VhostUser(s) => (&mut disk.vhost_user, s),
            Export::XenAttach(g) => (&mut disk.xen_attach, g),
        };
        match add {
            true => all.push(text.clone()),
            false => all.retain(|t| t != text),
        }
    };
    match step {
        Step::CloseListener(l) => {
            let (mut all, socket, is_local) = list(listeners, l);
            assert!(all.contains(&socket));
            all.retain(|s| *s != socket);
            put(listeners, all, is_local);
        }
        Step::OpenListener(l) => {
            let (mut all, socket, is_local) = list(listeners, l);
            assert!(!all.contains(&socket));
            all.push(socket);
            put(listeners, all, is_local);
        }
        Step::RemoveDisk { disk } => {
            assert!(present.disks.remove(disk).is_some());
        }
        Step::AddDisk { disk, wanted } => {
            let volumes = present.disks.values().any(|d| d.volume == wanted.volume);
            assert!(!volumes, "two disks on {}", wanted.volume);
            assert!(wanted.exports().all(|e| !taken.contains(&e)));
            let before = present.disks.insert(disk.clone(), wanted.clone());
            assert!(before.is_none());
        }
        Step::AddExport { disk, export } => {
            assert!(!taken.contains(export), "{export} is taken");
            exports(present.disks.get_mut(disk).unwrap(), export, true);
        }
        Step::RemoveExport { disk, export } => {
            assert!(taken.contains(export));
            exports(present.disks.get_mut(disk).unwrap(), export, false);
        }
        Step::SetExclusive { disk, exclusive } => {
            present.disks.get_mut(disk).unwrap().exclusive = *exclusive;
        }
        Step::SetLimit { disk, limit } => {
            present.disks.get_mut(disk).unwrap().limit = limit.clone();
        }
    }
}

/// Up to five disks; no two have a volume, a socket or a guest's device in common.
fn any_served(rng: &mut fastrand::Rng) -> Served {
    let mut volumes: Vec<String> = (0..8).map(|n| format!("file:{n}")).collect();
    let mut sockets: Vec<String> = (0..16).map(|n| format!("unix:/{n}")).collect();
    rng.shuffle(&mut volumes);
    rng.shuffle(&mut sockets);
    let mut served = Served::default();
    for name in ["a", "b", "c", "d", "e"] {
        if rng.bool() {
            continue;
        }
        let mut disk = DiskWanted::new(volumes.pop().unwrap());
        for _ in 0..rng.u8(..2) {
            disk.vhost_user.push(sockets.pop().unwrap());
            disk.xen_attach.push(sockets.pop().unwrap());
        }
        disk.exclusive = rng.bool();
        disk.limit = rng.bool().then(|| format!("iops={}", rng.u8(1..3)));
        served.disks.insert(name.into(), disk);
    }
    served.listeners.nbd = sockets.pop().into_iter().collect();
    served.listeners.local = sockets.pop().into_iter().filter(|_| rng.bool()).collect();
    served
}

fn sorted(mut served: Served) -> Served {
    for disk in served.disks.values_mut() {
        disk.vhost_user.sort();
        disk.xen_attach.sort();
    }
    served
}

#[test]
fn every_plan_leads_to_what_is_wanted_and_leaves_the_rest_alone() {
    let mut rng = random();
    for _ in 0..5000 {
        let (present, wanted) = (any_served(&mut rng), any_served(&mut rng));
        let steps = plan(&present, &wanted);
        let mut now = present.clone();
        for step in &steps {
            if let Some(name) = step.disk() {
                let (before, after) = (present.disks.get(name), wanted.disks.get(name));
                assert_ne!(before, after, "disk {name} is the same: {step}");
            }
            carry_out(&mut now, step);
        }
        assert_eq!(sorted(now), sorted(wanted.clone()), "{steps:?}");
        assert_eq!(plan(&wanted, &wanted), []);
    }
}
