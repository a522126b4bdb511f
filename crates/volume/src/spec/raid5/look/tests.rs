use super::*;
use crate::in_process;
use parking_lot::Mutex;
use std::os::unix::fs::symlink;

fn paths(names: &[&str]) -> Paths {
    names.iter().map(|n| (0, PathBuf::from(n))).collect()
}

fn unusable(look: &Look) -> &str {
    match &look.found {
        Found::Unusable(why) => why,
        other => panic!("{}: {other:?}", look.path.display()),
    }
}

fn nothing_at(path: &Path) -> Answer {
    let inode = path.as_os_str().len() as u64;
    Ok(Some((FileId::File(1, inode), Found::Nothing)))
}

/// More candidates hang than are looked at at a time; all others are looked at, and the threads are forgotten when their calls return.
#[test]
fn a_candidate_that_hangs_is_left_out_by_name() {
    static HOLD: Mutex<()> = Mutex::new(());
    let held = HOLD.lock();
    let before = HUNG.load(Ordering::Relaxed);
    let mut names: Vec<String> = (0..AT_ONCE + 2).map(|n| format!("hangs{n}")).collect();
    names.push("there".into());
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let read = |path: &Path| {
        if path.display().to_string().starts_with("hangs") {
            drop(HOLD.lock());
        }
        nothing_at(path)
    };
    let looks = look_at(paths(&names), Duration::from_millis(50), read).expect("looks");
    assert_eq!(looks.len(), names.len());
    for look in &looks[..AT_ONCE + 2] {
        assert!(unusable(look).starts_with("it doesn't answer"), "{look:?}");
    }
    assert!(matches!(looks[AT_ONCE + 2].found, Found::Nothing));
    assert_eq!(HUNG.load(Ordering::Relaxed), before + AT_ONCE + 2);

    // No more than so many hang at a time: then nothing is looked at.
    let more: Vec<String> = (0..MOST_HUNG).map(|n| format!("hangs{n}")).collect();
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    let error = look_at(paths(&more), Duration::from_millis(50), read).expect_err("too many");
    assert!(error.to_string().contains("still hang"), "{error}");
    assert!(HUNG.load(Ordering::Relaxed) <= MOST_HUNG + AT_ONCE);
    drop(held);
    let begin = Instant::now();
    while HUNG.load(Ordering::Relaxed) > before {
        assert!(
            begin.elapsed() < Duration::from_secs(60),
            "threads are left"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn files_without_a_superblock_are_told_from_damaged_ones() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    let mut magic = vec![0; 8192];
    magic[4096..4100].copy_from_slice(&pvblk_raid5::SUPER_MAGIC.to_le_bytes());
    std::fs::write(path("a-empty"), "").expect("a file");
    std::fs::write(path("b-zeros"), vec![0; 8192]).expect("a file");
    std::fs::write(path("c-damaged"), &magic).expect("a file");
    std::fs::write(path("d-truncated"), &magic[..6000]).expect("a file");
    std::fs::create_dir(path("e-folder")).expect("a folder");
    symlink("nowhere", path("f-broken")).expect("a link");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        path("g-fifo"),
        FileType::Fifo,
        Mode::from_raw_mode(0o600),
        0,
    )
    .expect("a FIFO");
    symlink("b-zeros", path("h-again")).expect("a link");
    std::fs::write(path(".hidden"), "").expect("a file");

    let all = look(&in_process(), &[&path("*"), &path("none"), &path("[ab]*")]).expect("looks");
    let names: Vec<String> = all
        .iter()
        .map(|l| l.path.file_name().expect("a name").display().to_string())
        .collect();
    assert_eq!(
        names,
        [
            "a-empty",
            "b-zeros",
            "c-damaged",
            "d-truncated",
            "e-folder",
            "f-broken",
            "g-fifo",
            "none"
        ],
        "each file once, hidden ones not at all"
    );
    for nothing in [0, 1, 6] {
        assert!(
            matches!(all[nothing].found, Found::Nothing),
            "{:?}",
            all[nothing]
        );
    }
    assert!(unusable(&all[2]).contains("checksum") || unusable(&all[2]).contains("version"));
    assert_eq!(unusable(&all[3]), "it ends in the middle of its superblock");
    assert!(unusable(&all[4]).contains("it is a folder; for its files write "));
    assert!(unusable(&all[5]).contains("No such file"));
    assert!(unusable(&all[7]).contains("No such file"));
    assert_eq!((all[7].pattern, all[0].pattern), (1, 0));
}

#[test]
fn patterns_match_as_in_a_shell() {
    let is = |pattern: &str, path: &str| matches(Path::new(pattern), Path::new(path));
    assert!(is("/srv/*.img", "/srv/a.img"));
    assert!(is("/srv/./*.img", "/srv/a.img"));
    assert!(!is("/srv/*", "/srv/md/a.img"));
    assert!(!is("/srv/*", "/srv/.a"));
    assert!(is("/dev/sd[a-c]1", "/dev/sdb1"));
    assert!(is(
        "*.img",
        &std::env::current_dir()
            .expect("a folder")
            .join("x.img")
            .display()
            .to_string()
    ));
    assert_eq!(pattern_problem(Path::new("/srv/*")), None);
    assert!(pattern_problem(Path::new("/srv/[a")).is_some());
}

#[test]
fn patterns_that_match_too_much_are_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    for n in 0..=MOST_FILES {
        std::fs::write(dir.path().join(n.to_string()), "").expect("a file");
    }
    let error = look(&in_process(), &[&dir.path().join("*")])
        .expect_err("too many")
        .to_string();
    assert!(error.contains("more than 4096 files match"), "{error}");
}
