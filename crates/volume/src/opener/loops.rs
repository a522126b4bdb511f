//! Loop devices over a file: the kernel's driver takes no lock on it.

use rustix::fs::{FileType, Stat};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// A loop device over the file; of those that can't be written to none if the file is `read_only` too.
pub(super) fn find(file: BorrowedFd<'_>, read_only: bool) -> Option<PathBuf> {
    let wanted = rustix::fs::fstat(file).ok()?;
    std::fs::read_dir("/sys/block")
        .ok()?
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let is_set_up = name.starts_with("loop") && entry.path().join("loop").is_dir();
            is_set_up.then(|| (Path::new("/dev").join(name), entry.path()))
        })
        .find(|(device, folder)| {
            let is_read_only = std::fs::read_to_string(folder.join("ro"));
            let writes = !is_read_only.is_ok_and(|text| text.trim() == "1");
            (writes || !read_only) && stands_on(device, folder, &wanted)
        })
        .map(|(device, _)| device)
}

/// Asks the device itself, or, if we may not, looks where its backing file's name leads.
fn stands_on(device: &Path, folder: &Path, wanted: &Stat) -> bool {
    let is_device = FileType::from_raw_mode(wanted.st_mode) == FileType::BlockDevice;
    let same = |inode: (u64, u64), rdevice: u64| match is_device {
        true => rdevice == wanted.st_rdev,
        false => inode == (wanted.st_dev, wanted.st_ino),
    };
    let asked = std::fs::File::open(device).and_then(|d| pvblk_sys::loops::backing(d.as_fd()));
    if let Ok(backing) = asked {
        return same((backing.device, backing.inode), backing.rdevice);
    }
    let name = std::fs::read_to_string(folder.join("loop/backing_file"));
    let found = name.ok().and_then(|n| rustix::fs::stat(n.trim_end()).ok());
    found.is_some_and(|f| same((f.st_dev, f.st_ino), f.st_rdev))
}
