//! Volumes over an opener that is behind a socket, and finds files at other places than their names say: a volume that reached a file past it would find
//! nothing.

mod passed;

use super::*;
use crate::spec::{FileSpec, Need, VolumeSpec};
use crate::{FileVolume, SpecNames};
use pvblk_block::{BlockDevice, Error};
use pvblk_raid5::{CreateOptions, MemberNames, NewMembers, create, sleepy, uuid_text};
use rustix::fs::FileType;
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::sync::Mutex;

/// There is no such folder; its files are in a folder of the test.
const PLACE: &str = "/elsewhere";

/// Finds the files of [`PLACE`] and nothing else.
#[derive(Debug)]
struct Elsewhere {
    folder: tempfile::TempDir,
    opened: Mutex<Vec<(PathBuf, OFlags)>>,
    /// An open with one of these flags fails; with [`OFlags::empty`] all do.
    refuses: Option<(OFlags, Errno)>,
    /// The kind that files are said to have.
    kind: Option<FileType>,
    /// A path that an open goes to in place of the file.
    instead: Option<&'static str>,
    holder: LockHolder,
    loop_device: Option<PathBuf>,
    cant_reopen: bool,
}

impl Elsewhere {
    fn new() -> Elsewhere {
        assert!(!Path::new(PLACE).exists());
        Elsewhere {
            folder: tempfile::tempdir().expect("a folder"),
            opened: Mutex::default(),
            refuses: None,
            kind: None,
            instead: None,
            holder: LockHolder::Unknown,
            loop_device: None,
            cant_reopen: false,
        }
    }

    fn real(&self, path: &Path) -> io::Result<PathBuf> {
        let name = path.strip_prefix(PLACE).map_err(|_| Errno::NOENT)?;
        Ok(self.folder.path().join(name))
    }

    fn seen_as(&self, real: &Path) -> PathBuf {
        let folder = self.folder.path();
        let linked = folder.canonicalize().expect("the folder");
        let name = real
            .strip_prefix(folder)
            .or_else(|_| real.strip_prefix(linked));
        Path::new(PLACE).join(name.expect("in the folder"))
    }

    /// Flags of the opens of a file so far.
    fn flags(&self, name: &str) -> Vec<OFlags> {
        let opened = self.opened.lock().unwrap();
        let of_file = opened.iter().filter(|(path, _)| path.ends_with(name));
        of_file.map(|(_, flags)| *flags).collect()
    }

    fn file(&self, name: &str, bytes: u64) {
        let file = File::create(self.folder.path().join(name)).expect("a file");
        file.set_len(bytes).expect("a size");
    }
}

impl FileOpener for Elsewhere {
    fn open(&self, path: &Path, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        self.opened.lock().unwrap().push((path.to_owned(), flags));
        if let Some((of, e)) = self.refuses
            && (of.is_empty() || flags.intersects(of))
        {
            return Err(e.into());
        }
        let real = self
            .instead
            .map_or_else(|| self.real(path), |p| Ok(p.into()));
        InProcess.open(&real?, flags, mode)
    }

    fn reopen(&self, file: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
        match self.cant_reopen {
            true => Err(Errno::ACCESS.into()),
            false => InProcess.reopen(file, flags),
        }
    }

    fn open_in(
        &self,
        folder: BorrowedFd<'_>,
        name: &str,
        flags: OFlags,
        mode: Mode,
    ) -> io::Result<OwnedFd> {
        InProcess.open_in(folder, name, flags, mode)
    }

    fn rename_in(&self, folder: BorrowedFd<'_>, from: &str, to: &str) -> io::Result<()> {
        InProcess.rename_in(folder, from, to)
    }

    fn make_folder(&self, path: &Path, mode: Mode) -> io::Result<()> {
        InProcess.make_folder(&self.real(path)?, mode)
    }

    fn stat(&self, path: &Path) -> io::Result<PathStat> {
        let mut stat = InProcess.stat(&self.real(path)?)?;
        if let Some(kind) = self.kind {
            stat.mode = kind.as_raw_mode() | (stat.mode & 0o777);
        }
        Ok(stat)
    }

    fn real_path(&self, path: &Path) -> io::Result<PathBuf> {
        let real = InProcess.real_path(&self.real(path)?)?;
        Ok(self.seen_as(&real))
    }

    fn expand(&self, pattern: &str, most: usize) -> io::Result<Vec<Match>> {
        let real = self.real(Path::new(pattern))?;
        let found = InProcess.expand(real.to_str().expect("a text"), most)?;
        let seen = found.into_iter().map(|one| match one {
            Match::Path(path) => Match::Path(self.seen_as(&path)),
            Match::Unreadable(path, e) => Match::Unreadable(self.seen_as(&path), e),
        });
        Ok(seen.collect())
    }

    fn lock_holder(&self, _: BorrowedFd<'_>) -> LockHolder {
        self.holder.clone()
    }

    fn loop_over(&self, _: BorrowedFd<'_>, _: bool) -> Option<PathBuf> {
        self.loop_device.clone()
    }

    fn device_text(&self, _: u64, _: &str) -> io::Result<String> {
        Ok("64\n".into())
    }
}

fn need(opener: Elsewhere) -> (Arc<Elsewhere>, Need) {
    let opener = Arc::new(opener);
    let need = Need {
        opener: Arc::new(passed::over(&opener)),
        ..Need::default()
    };
    (opener, need)
}

fn open(need: &Need, spec: &str) -> Result<Arc<dyn BlockDevice>, Error> {
    spec.parse::<VolumeSpec>()?.open_for(need)
}

/// The error of opening `/elsewhere/disk` with some options, without its name.
fn refusal(opener: Elsewhere, options: &str) -> String {
    opener.file("disk", 1 << 20);
    let (_opener, need) = need(opener);
    let error = open(&need, &format!("file:{PLACE}/disk{options}"));
    let line = error.map(drop).expect_err("refused").to_string();
    let why = line.strip_prefix(&format!("file:{PLACE}/disk: "));
    why.expect("the name").to_owned()
}

#[test]
fn files_are_reached_by_the_opener_alone() {
    let (opener, need) = need(Elsewhere::new());
    let device = open(&need, "file:/elsewhere/new,size=1M").expect("a volume");
    let made = opener.folder.path().join("new").metadata().expect("made");
    assert_eq!(
        (made.len(), made.permissions().mode() & 0o777),
        (1 << 20, 0o600)
    );
    assert_eq!(device.limits().readahead_bytes, 64 << 10);
    drop(device);
    opener.file("made", 8 << 20);
    symlink("made", opener.folder.path().join("link")).expect("a link");
    for spec in [
        "file:/elsewhere/made",
        "file:/elsewhere/made,ro",
        "file:/elsewhere/link,nolock",
        "cache:16M:delay:1us:fault:error=0:file:/elsewhere/made",
    ] {
        let device = open(&need, spec).expect(spec);
        assert_eq!(device.capacity_sectors() * 512, 8 << 20, "{spec}");
    }
    // Another opener doesn't find them.
    let error = open(&Need::default(), "file:/elsewhere/made").map(drop);
    assert!(
        error
            .expect_err("none")
            .to_string()
            .contains("no such file")
    );
}

#[test]
fn an_arrays_members_are_reached_by_the_opener_alone() {
    let (opener, need) = need(Elsewhere::new());
    let name = |n: &str| format!("file:{PLACE}/{n}");
    let member = |n: &&str| {
        opener.file(n, 8 << 20);
        let spec = FileSpec::new(Path::new(PLACE).join(n));
        let device = FileVolume::open_by(&spec, &need.opener).expect("a file");
        Some((name(n), Arc::new(device) as Arc<dyn BlockDevice>))
    };
    let devices = NewMembers {
        members: ["a", "b", "c"].iter().map(member).collect(),
        spares: Vec::new(),
    };
    let options = CreateOptions {
        chunk_sectors: 128,
        ..CreateOptions::new("test")
    };
    create(devices, &options, &mut sleepy()).expect("an array");
    let uuid = uuid_text(&options.set_uuid);

    // By its UUID among the files of a folder; what is added while it serves is reached in the same way.
    let array = open(&need, &format!("raid5:uuid={uuid},in={PLACE}/[a-c]")).expect("an array");
    let ask = |question: String| array.ask(&question).expect("an array's answer");
    let missing = ask(format!(r#"{{"raid": "add", "member": "{}"}}"#, name("d")));
    let missing = missing.expect_err("there is none").to_string();
    assert!(missing.contains("no such file"), "{missing}");
    opener.file("d", 8 << 20);
    ask(format!(r#"{{"raid": "add", "member": "{}"}}"#, name("d"))).expect("it is added");
    let spec = ask(r#"{"raid": "spec"}"#.into()).expect("a specification");
    assert!(spec.contains("/elsewhere/d"), "{spec}");
    drop(array);

    // By names. A member that was replaced is looked for beside the others.
    let named = format!("raid5:[{}][{}][{}]", name("a"), name("b"), name("c"));
    drop(open(&need, &named).expect("an array"));
    let folder = opener.folder.path();
    symlink("a", folder.join("link")).expect("a link");
    let names = SpecNames::new(&need);
    assert_eq!(names.file(&name("link")), Some(Path::new(PLACE).join("a")));
    assert!(names.same_device(&name("a"), &name("link")));
    assert!(!names.same_device(&name("a"), &name("b")));
}

#[test]
fn options_become_flags() {
    let flags = |options: &str, refuses| {
        let opener = Elsewhere {
            refuses,
            ..Elsewhere::new()
        };
        opener.file("disk", 1 << 20);
        let (opener, need) = need(opener);
        // Some filesystems can't do O_DIRECT.
        let _ = open(&need, &format!("file:{PLACE}/disk{options},format=raw"));
        opener.flags("disk")
    };
    let usual = OFlags::RDWR | OFlags::NOATIME;
    assert_eq!(flags("", None), [usual]);
    assert_eq!(flags(",direct", None), [usual | OFlags::DIRECT]);
    assert_eq!(flags(",size=2M", None), [usual | OFlags::CREATE]);
    let only_read = OFlags::RDONLY | OFlags::NOATIME;
    assert_eq!(flags(",ro", None), [only_read]);
    // Another's file is opened without O_NOATIME.
    let of_another = Some((OFlags::NOATIME, Errno::PERM));
    assert_eq!(flags("", of_another), [usual, OFlags::RDWR]);
}

#[test]
fn an_openers_errors_say_what_to_do() {
    let refuses = |of, e| Elsewhere {
        refuses: Some((of, e)),
        ..Elsewhere::new()
    };
    let all = OFlags::empty();
    let denied = io::Error::from(Errno::ACCESS);
    assert_eq!(
        refusal(refuses(all, Errno::ACCESS), ""),
        format!("can't be opened for writing; add `ro` to only read it: {denied}")
    );
    assert_eq!(
        refusal(refuses(all, Errno::ACCESS), ",ro"),
        format!("can't be opened: {denied}")
    );
    assert_eq!(
        refusal(refuses(OFlags::DIRECT, Errno::INVAL), ",direct"),
        "its filesystem can't do O_DIRECT; drop `direct`"
    );
    let kind = |kind| Elsewhere {
        kind: Some(kind),
        ..Elsewhere::new()
    };
    assert_eq!(
        refusal(kind(FileType::Fifo), ""),
        "it is neither a regular file nor a block device"
    );
    assert_eq!(
        refusal(kind(FileType::Directory), ""),
        "it is a directory, neither a regular file nor a block device"
    );
    let block = FileType::BlockDevice;
    assert_eq!(
        refusal(kind(block), ",size=1M"),
        "it is a block device; `size` is for regular files, drop it"
    );
    let busy = Elsewhere {
        refuses: Some((OFlags::EXCL, Errno::BUSY)),
        ..kind(block)
    };
    assert_eq!(
        refusal(busy, ""),
        "it is mounted, part of another device or open in another volume; free it first, or add `nolock` if that is safe"
    );
    // Without the lock there is no O_EXCL, and then the open finds that it isn't one.
    assert_eq!(
        refusal(kind(block), ",nolock"),
        "it was replaced while it was opened"
    );
    let replaced = Elsewhere {
        instead: Some("/dev/null"),
        ..Elsewhere::new()
    };
    assert_eq!(refusal(replaced, ""), "it was replaced while it was opened");
}

#[test]
fn a_container_is_found_by_the_opener() {
    let opener = Elsewhere::new();
    let (opener, need) = need(opener);
    let mut image = vec![0; 1 << 20];
    image[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    std::fs::write(opener.folder.path().join("disk"), image).expect("a file");
    let error = open(&need, "file:/elsewhere/disk").map(drop);
    let error = error.expect_err("a container").to_string();
    assert!(error.contains("it is a qcow2 image"), "{error}");
    assert_eq!(opener.flags("disk"), [OFlags::RDONLY]);
    assert!(open(&need, "file:/elsewhere/disk,format=raw").is_ok());
}

/// The error about a file that this program has locked; without the lock the file can be opened.
fn locked_by(program: &str) -> String {
    let opener = Elsewhere {
        holder: LockHolder::Process {
            pid: 7,
            name: program.into(),
        },
        ..Elsewhere::new()
    };
    opener.file("disk", 1 << 20);
    let (_opener, need) = need(opener);
    let first = open(&need, "file:/elsewhere/disk").expect("a volume");
    let error = open(&need, "file:/elsewhere/disk").map(drop);
    drop(first);
    assert!(open(&need, "file:/elsewhere/disk").is_ok());
    error.expect_err("locked").to_string()
}

#[test]
fn the_opener_tells_who_has_the_file() {
    assert_eq!(
        locked_by("qemu"),
        "file:/elsewhere/disk: another volume has it open and locked: process 7 (qemu) has it; close that first, or add `nolock` if that is safe"
    );
    // Another server of ours would write, too: the lock stays.
    let error = locked_by("pvblk");
    assert!(
        error.contains("--control") && !error.contains("nolock"),
        "{error}"
    );

    let opener = Elsewhere {
        loop_device: Some("/dev/loop7".into()),
        ..Elsewhere::new()
    };
    assert_eq!(
        refusal(opener, ""),
        "the loop device /dev/loop7 is set up over it; end that first (losetup -d /dev/loop7), or add `nolock` if that is safe"
    );
}

/// A volume that can't be opened a second time for `fdatasync` serves all the same.
#[test]
fn a_file_that_cannot_be_opened_once_more_is_served() {
    let opener = Elsewhere {
        cant_reopen: true,
        ..Elsewhere::new()
    };
    opener.file("disk", 1 << 20);
    let (_opener, need) = need(opener);
    assert!(open(&need, "file:/elsewhere/disk").is_ok());
}

#[test]
fn a_file_is_opened_once_more_whatever_its_name_leads_to() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("file");
    std::fs::write(&path, "old").expect("a file");
    let first = InProcess.open(&path, OFlags::RDONLY, Mode::empty());
    let first = File::from(first.expect("a file"));
    std::fs::remove_file(&path).expect("removed");
    std::fs::write(&path, "another").expect("a file");
    let again = InProcess.reopen(first.as_fd(), OFlags::RDONLY);
    let again = File::from(again.expect("a file"));
    let inode = |file: &File| file.metadata().expect("its inode").ino();
    assert_eq!(inode(&first), inode(&again));
    // Both are closed by exec.
    for file in [&first, &again] {
        let flags = rustix::io::fcntl_getfd(file).expect("flags");
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
}

#[test]
fn relative_names_start_at_the_working_directory() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("file");
    File::create(&path)
        .expect("a file")
        .set_len(1 << 20)
        .expect("a size");
    let here = std::env::current_dir().expect("a working directory");
    let up: PathBuf = here.components().skip(1).map(|_| "..").collect();
    let relative = up.join(path.strip_prefix("/").expect("an absolute path"));
    assert!(relative.is_relative());
    let spec = format!("file:{}", relative.display());
    assert!(open(&Need::default(), &spec).is_ok());
    let real = InProcess.real_path(&relative).expect("a path");
    assert_eq!(real, path.canonicalize().expect("a path"));
}

/// The state of a server: its folder is made, opened, and files in it are made and renamed, all by messages.
#[test]
fn a_folder_is_used_through_a_socket() {
    let (opener, need) = need(Elsewhere::new());
    let path = Path::new(PLACE).join("state");
    need.opener
        .make_folder(&path, Mode::RWXU)
        .expect("a folder");
    let again = need.opener.make_folder(&path, Mode::RWXU);
    let again = again.expect_err("it is there");
    assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
    let folder = need.opener.open(&path, OFlags::RDONLY, Mode::empty());
    let folder = folder.expect("a folder");
    let flags = OFlags::WRONLY | OFlags::CREATE;
    let file = need
        .opener
        .open_in(folder.as_fd(), "new", flags, Mode::RUSR);
    io::Write::write_all(&mut File::from(file.expect("a file")), b"x").expect("written");
    let renamed = need.opener.rename_in(folder.as_fd(), "new", "old");
    renamed.expect("renamed");
    let old = opener.folder.path().join("state/old");
    assert_eq!(std::fs::read(old).expect("the file"), b"x");
}

#[test]
fn names_in_a_folder_lead_nowhere_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = File::open(folder.path()).expect("a folder");
    let make = |name: &str| {
        let flags = OFlags::WRONLY | OFlags::CREATE;
        InProcess.open_in(at.as_fd(), name, flags, Mode::RUSR)
    };
    make("a").expect("a file");
    for wrong in ["", ".", "..", "../a", "/tmp/a", "a/b"] {
        let error = make(wrong).expect_err(wrong);
        assert_eq!(error.raw_os_error(), Some(Errno::INVAL.raw_os_error()));
        assert!(InProcess.rename_in(at.as_fd(), "a", wrong).is_err());
    }
    InProcess.rename_in(at.as_fd(), "a", "b").expect("renamed");
    assert!(folder.path().join("b").exists() && !folder.path().join("a").exists());
}

#[test]
fn a_pattern_gives_no_more_names_than_wanted() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["a", "b", "c", ".hidden"] {
        File::create(folder.path().join(name)).expect("a file");
    }
    let pattern = folder.path().join("*").display().to_string();
    let count = |most| InProcess.expand(&pattern, most).expect("names").len();
    assert_eq!((count(9), count(2)), (3, 2));
    assert!(InProcess.expand("[", 1).is_err());
}
