use super::super::model_folder::{Crash, Mistake, ModelFolder};
use super::*;
use pvblk_block::error_line;
use pvblk_testing::{random, seed};
use std::sync::atomic::{AtomicBool, Ordering};

/// Everything that a restart has to find: disks, devices that may join their arrays, sockets.
type Look = (Vec<(String, DiskWanted, Vec<String>)>, Listeners);

fn look(state: &WantedState) -> Look {
    let disks = state.disks().into_iter().map(|(name, disk)| {
        let joining = state.joining(&name);
        (name, disk, joining)
    });
    (disks.collect(), state.listeners())
}

fn any_disk(rng: &mut fastrand::Rng) -> DiskWanted {
    DiskWanted {
        exclusive: rng.bool(),
        limit: rng.bool().then(|| format!("iops={}", rng.u8(1..4))),
        ..DiskWanted::new(format!("mem:{}M", rng.u8(1..4)))
    }
}

fn any_configuration(rng: &mut fastrand::Rng) -> Configured {
    let names = ["a", "b", "c"].into_iter().filter(|_| rng.bool());
    let disks: Vec<String> = names.map(str::to_owned).collect();
    Configured {
        disks: disks.into_iter().map(|n| (n, any_disk(rng))).collect(),
        listeners: Listeners::default(),
    }
}

/// A change, with the look that it leads to.
fn any_change(rng: &mut fastrand::Rng, state: &WantedState) -> (Look, Change) {
    let name = rng.choice(["a", "b", "c", "d"]).unwrap().to_owned();
    let before = look(state);
    let mut after = before.clone();
    let at = after.0.iter().position(|(n, ..)| *n == name);
    let change = match (rng.u8(..6), at) {
        (0, Some(at)) => {
            after.0.remove(at);
            Change::Set(name, None)
        }
        (1, Some(at)) => {
            let device = format!("file:{}", rng.u8(..3));
            if !after.0[at].2.contains(&device) {
                after.0[at].2.push(device.clone());
            }
            Change::Joining(name, device)
        }
        (2, Some(at)) => {
            after.0[at].1.volume = "raid5:new".into();
            after.0[at].2.clear();
            Change::Members(name, "raid5:new".into())
        }
        (3, _) => {
            after.1.nbd = vec![format!("unix:/{}", rng.u8(..3))];
            Change::Listeners(after.1.clone())
        }
        (_, at) => {
            let disk = any_disk(rng);
            let entry = (name.clone(), disk.clone(), Vec::new());
            match at {
                Some(at) if after.0[at].1.volume == disk.volume => after.0[at].1 = disk.clone(),
                Some(at) => after.0[at] = entry,
                None => after.0.push(entry),
            }
            Change::Set(name, Some(disk))
        }
    };
    (after, change)
}

enum Change {
    Set(String, Option<DiskWanted>),
    Joining(String, String),
    Members(String, String),
    Listeners(Listeners),
}

impl Change {
    fn make(&self, state: &WantedState) -> Result<()> {
        match self {
            Change::Set(name, wanted) => state.set(name, wanted.clone()),
            Change::Joining(name, device) => state.add_joining(name, device),
            Change::Members(name, volume) => state.set_members(name, volume),
            Change::Listeners(listeners) => state.edit_listeners(|l| *l = listeners.clone()),
        }
    }
}

fn sorted(mut look: Look) -> Look {
    look.0.sort_by(|a, b| a.0.cmp(&b.0));
    look
}

/// A server's life on one medium, with crashes in the middle of changes; an error says what came back instead of the old or the new state.
fn life(seed: u64, mistake: Option<Mistake>, answers_early: bool) -> Result<u32, String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let folder = ModelFolder::new(seed, mistake);
    let mut configured = any_configuration(&mut rng);
    let start = |configured: &Configured| {
        let (store, changes) = Store::on(Box::new(folder.clone())).map_err(|e| error_line(&*e))?;
        Ok::<_, String>(WantedState::new(configured.clone(), Some(store), changes))
    };
    let mut state = start(&configured)?;
    let mut crashes = 0;
    while crashes < 4 {
        folder.crash_after(rng.u32(..20));
        let (old, new) = loop {
            let old = sorted(look(&state));
            if rng.u8(..8) == 0 {
                // The file is changed, and read again.
                let next = any_configuration(&mut rng);
                let changes = state.inner.lock().changes.clone();
                let read = |changes| sorted(look(&WantedState::new(next.clone(), None, changes)));
                let (started, reloaded) = (read(changes), read(state.preview(&next)));
                let done = state.reload(next.clone()).is_ok();
                configured = next;
                if !done {
                    // The next start reads the new file, too.
                    break (started, reloaded);
                }
                assert_eq!(sorted(look(&state)), reloaded);
                continue;
            }
            let (new, change) = any_change(&mut rng, &state);
            let new = sorted(new);
            let done = change.make(&state).is_ok();
            if !done && answers_early {
                break (new.clone(), new);
            }
            if !done {
                break (old, new);
            }
            if sorted(look(&state)) != new {
                return Err(format!("{:?} instead of {new:?}", look(&state)));
            }
        };
        assert!(folder.is_down());
        crashes += 1;
        folder.start_again(match rng.bool() {
            true => Crash::Kill,
            false => Crash::PowerCut,
        });
        drop(state);
        state = start(&configured)?;
        let found = sorted(look(&state));
        if found != old && found != new {
            return Err(format!("{found:?}, neither {old:?} nor {new:?}"));
        }
    }
    Ok(crashes)
}

#[test]
fn a_crash_at_any_step_leaves_the_old_or_the_new() {
    let first = seed();
    let mut crashes = 0;
    for n in 0..1000 {
        let seed = first.wrapping_add(n);
        match life(seed, None, false) {
            Ok(more) => crashes += more,
            Err(why) => panic!("PVBLK_SEED={seed}: {why}"),
        }
    }
    assert_eq!(crashes, 4000);
}

#[test]
fn the_crashes_find_every_mistake() {
    let first = seed();
    let is_found = |mistake, early| {
        let mut seeds = (0..200).map(|n| first.wrapping_add(n));
        seeds.any(|seed| life(seed, mistake, early).is_err())
    };
    for mistake in [
        Mistake::UnsyncedBytes,
        Mistake::UnsyncedNames,
        Mistake::WrittenInPlace,
    ] {
        assert!(is_found(Some(mistake), false), "{mistake:?}");
    }
    assert!(is_found(None, true), "answers before it is stored");
}

/// Threads change disks of their own, on a medium with errors: what was answered is there, and what failed isn't.
#[test]
fn changes_at_the_same_time_are_stored_together_and_fail_each_for_itself() {
    let mut rng = random();
    let folder = ModelFolder::new(rng.u64(..), None);
    let open = || {
        let (store, changes) = Store::on(Box::new(folder.clone())).unwrap();
        WantedState::new(Configured::default(), Some(store), changes)
    };
    let state = open();
    let failed = AtomicBool::new(false);
    folder.fail_with(0.05);
    let wanted: Vec<Option<DiskWanted>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|n| {
                let mut rng = rng.fork();
                let (state, failed) = (&state, &failed);
                scope.spawn(move || {
                    let mut wanted = None;
                    for _ in 0..100 {
                        let next = rng.bool().then(|| any_disk(&mut rng));
                        match state.set(&format!("disk{n}"), next.clone()) {
                            Ok(()) => wanted = next,
                            Err(_) => failed.store(true, Ordering::Relaxed),
                        }
                    }
                    wanted
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(failed.load(Ordering::Relaxed), "no error came");
    let check = |state: &WantedState| {
        for (n, wanted) in wanted.iter().enumerate() {
            assert_eq!(state.disk(&format!("disk{n}")), *wanted, "disk{n}");
        }
    };
    check(&state);
    folder.fail_with(0.0);
    // After an error that left it open which of the two is stored, the next change settles it.
    state.set("last", Some(DiskWanted::new("mem:1M"))).unwrap();
    drop(state);
    check(&open());
}
