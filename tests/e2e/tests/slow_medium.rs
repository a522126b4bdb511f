//! The slow medium of other tests follows its rules.

use pvblk_e2e::slow_medium::{Kind, Options, Rule, SlowMedium};
use pvblk_e2e::{Stop, run_all};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

fn main() -> ExitCode {
    run_all(&[
        ("files_hold_what_was_written", files_hold_what_was_written),
        (
            "what_is_held_lands_when_it_is_released_and_nobody_else_waits",
            what_is_held_lands_when_it_is_released_and_nobody_else_waits,
        ),
        (
            "failed_requests_change_nothing",
            failed_requests_change_nothing,
        ),
        (
            "direct_writes_beside_each_other",
            direct_writes_beside_each_other,
        ),
        (
            "its_end_wakes_a_process_that_hangs_in_it",
            its_end_wakes_a_process_that_hangs_in_it,
        ),
        (
            "the_control_file_sets_rules_and_tells_what_waits",
            the_control_file_sets_rules_and_tells_what_waits,
        ),
        ("a_folder_keeps_the_files", a_folder_keeps_the_files),
    ])
}

fn asynchronous() -> Options {
    Options {
        asynchronous: true,
        ..Options::default()
    }
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

fn files_hold_what_was_written() -> Result<(), Stop> {
    let medium = SlowMedium::with(asynchronous())?;
    let path = medium.add("disk", 1 << 20).unwrap();
    let file = open(&path);
    file.write_all_at(b"here", 8192).unwrap();
    file.sync_data().unwrap();
    let mut data = [0; 4];
    medium
        .data("disk")
        .unwrap()
        .read_exact_at(&mut data, 8192)
        .unwrap();
    assert_eq!(&data, b"here");
    // SEEK_HOLE, fallocate and the size go through.
    let at = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)).unwrap();
    assert_eq!(at, 8192);
    let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, hole, 8192, 4096).unwrap();
    file.read_exact_at(&mut data, 8192).unwrap();
    assert_eq!(data, [0; 4]);
    file.set_len(1 << 21).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 21);
    // A file may be made, listed and removed like any.
    fs::write(medium.point().join("other"), b"x").unwrap();
    let names = fs::read_dir(medium.point()).unwrap();
    let mut names: Vec<_> = names.map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [".control", "disk", "other"]);
    fs::remove_file(medium.point().join("other")).unwrap();
    assert!(!medium.point().join("other").exists());
    Ok(())
}

fn what_is_held_lands_when_it_is_released_and_nobody_else_waits() -> Result<(), Stop> {
    let medium = SlowMedium::with(asynchronous())?;
    let path = medium.add("disk", 1 << 20).unwrap();
    let other = medium.add("other", 1 << 20).unwrap();
    medium.set("disk", &[Kind::Write], Rule::Hold);
    let file = open(&path);
    let thread = std::thread::spawn(move || file.write_all_at(b"late", 0));
    medium.wait_held("disk", &[Kind::Write], 1).unwrap();
    // Reads of the same file, writes to another, and stat go on.
    let mut data = [9; 4];
    open(&path).read_exact_at(&mut data, 4096).unwrap();
    open(&other).write_all_at(b"soon", 0).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
    medium
        .data("disk")
        .unwrap()
        .read_exact_at(&mut data, 0)
        .unwrap();
    assert_eq!(data, [0; 4], "it landed before its release");
    assert_eq!(medium.release("disk", &Kind::ALL), 1);
    thread.join().unwrap().unwrap();
    medium
        .data("disk")
        .unwrap()
        .read_exact_at(&mut data, 0)
        .unwrap();
    assert_eq!(&data, b"late");
    Ok(())
}

fn failed_requests_change_nothing() -> Result<(), Stop> {
    let medium = SlowMedium::with(asynchronous())?;
    let path = medium.add("disk", 1 << 20).unwrap();
    let file = open(&path);
    medium.set("*", &[Kind::Write], Rule::Fail(28));
    let error = file.write_all_at(b"gone", 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(28));
    medium.set("*", &[Kind::Fsync], Rule::Hold);
    let syncing = file.try_clone().unwrap();
    let thread = std::thread::spawn(move || syncing.sync_data());
    medium.wait_held("*", &[Kind::Fsync], 1).unwrap();
    assert_eq!(medium.fail_held("*", &Kind::ALL, 5), 1);
    let error = thread.join().unwrap().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5));
    medium.heal("*");
    file.write_all_at(b"here", 0).unwrap();
    Ok(())
}

fn direct_writes_beside_each_other() -> Result<(), Stop> {
    for options in [
        asynchronous(),
        Options {
            direct_io: true,
            parallel_writes: true,
            ..Options::default()
        },
    ] {
        let medium = SlowMedium::with(options.clone())?;
        let path = medium.add("disk", 1 << 20).unwrap();
        let mut how = File::options();
        how.read(true).write(true);
        if !options.direct_io {
            how.custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32);
        }
        let file = how.open(&path).unwrap();
        // Memory of whole pages, which is aligned as O_DIRECT wants it.
        let page = rustix::param::page_size();
        let bytes = vec![7; 2 * page];
        let first = bytes.as_ptr().align_offset(page);
        file.write_all_at(&bytes[first..first + page], 0).unwrap();
        let mut data = [0; 1];
        medium
            .data("disk")
            .unwrap()
            .read_exact_at(&mut data, 0)
            .unwrap();
        assert_eq!(data, [7]);
        if options.direct_io {
            medium.set("disk", &[Kind::Write], Rule::Hold);
            let threads = [0, 1].map(|n: u64| {
                let (file, bytes) = (file.try_clone().unwrap(), bytes.clone());
                std::thread::spawn(move || file.write_all_at(&bytes[..4096], n * 4096))
            });
            medium.wait_held("disk", &[Kind::Write], 2).unwrap();
            medium.heal("disk");
            for thread in threads {
                thread.join().unwrap().unwrap();
            }
        }
    }
    Ok(())
}

fn its_end_wakes_a_process_that_hangs_in_it() -> Result<(), Stop> {
    let medium = SlowMedium::with(asynchronous())?;
    let path = medium.add("disk", 1 << 20).unwrap();
    medium.set("disk", &[Kind::Read], Rule::Hold);
    let mut child = Command::new("cat")
        .arg(&path)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    medium.wait_held("disk", &[Kind::Read], 1).unwrap();
    let point = medium.point().to_owned();
    drop(medium);
    assert!(!child.wait().unwrap().success());
    assert!(!point.exists(), "the mount or its folder is left");
    Ok(())
}

fn the_control_file_sets_rules_and_tells_what_waits() -> Result<(), Stop> {
    let medium = SlowMedium::with(asynchronous())?;
    let path = medium.add("disk", 1 << 20).unwrap();
    let control = medium.point().join(".control");
    fs::write(
        &control,
        "set disk write,fsync hold\nset * read delay 1 2\n",
    )
    .unwrap();
    assert!(fs::write(&control, "set disk writ hold\n").is_err());
    let thread = std::thread::spawn(move || open(&path).write_all_at(b"late", 0));
    medium.wait_held("disk", &[Kind::Write], 1).unwrap();
    let mut said = String::new();
    File::open(&control)
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    assert_eq!(
        said,
        "all held 1 delayed 0\nwrite held 1 delayed 0\nfile disk held 1 delayed 0\n"
    );
    let mut asked = File::options().write(true).open(&control).unwrap();
    asked.write_all(b"release * *\n").unwrap();
    thread.join().unwrap().unwrap();
    medium.settle().unwrap();
    Ok(())
}

fn a_folder_keeps_the_files() -> Result<(), Stop> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("disk"), b"before").unwrap();
    let options = Options {
        backing: Some(folder.path().to_owned()),
        ..asynchronous()
    };
    let medium = SlowMedium::with(options)?;
    let disk = medium.point().join("disk");
    assert_eq!(fs::read(&disk).unwrap(), b"before");
    fs::write(&disk, b"after").unwrap();
    drop(medium);
    assert_eq!(fs::read(folder.path().join("disk")).unwrap(), b"after");
    Ok(())
}
