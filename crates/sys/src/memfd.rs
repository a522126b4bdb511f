//! Sealed memory files: guest memory of local peers.

use rustix::fs::{MemfdFlags, SealFlags};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// A memory file of `len` bytes that can neither shrink nor grow.
pub fn create_sealed(name: &str, len: u64) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Checks that a descriptor from a peer is a memory file that can't shrink, and returns its length in
/// bytes. Without the seal a peer could truncate it and kill us with SIGBUS.
pub fn check_sealed(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let refuse = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
    let seals = rustix::fs::fcntl_get_seals(fd)
        .map_err(|_| refuse("the memory is not a memfd that allows sealing"))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(refuse("the memory is not sealed against shrinking"));
    }
    if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(refuse("the memory is sealed against writing"));
    }
    Ok(rustix::fs::fstat(fd)?.st_size.max(0) as u64)
}

/// Checks that a descriptor from a peer is a file that holds `len` bytes at `offset`, and returns its page size in bytes:
/// offsets and lengths of mappings are multiples of it. Unlike [`check_sealed`] it may shrink later, so it is for
/// [`crate::Region::guarded`] only.
pub fn guarded_file(fd: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<u64> {
    /// `HUGETLBFS_MAGIC` of linux/magic.h.
    const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
    let refuse = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
    let stat = rustix::fs::fstat(fd)?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::RegularFile {
        return Err(refuse("the descriptor is not a memory file".into()));
    }
    let size = stat.st_size.max(0) as u64;
    if offset.checked_add(len).is_none_or(|end| end > size) {
        return Err(refuse(format!(
            "{len} bytes at {offset} are not inside the file, which has {size}"
        )));
    }
    let kind = rustix::fs::fstatfs(fd)?;
    if kind.f_type as i64 == HUGETLBFS_MAGIC {
        return Ok((kind.f_bsize.max(1) as u64).max(crate::PAGE_SIZE as u64));
    }
    Ok(crate::PAGE_SIZE as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn an_unsealed_file_is_refused() {
        let fd = rustix::fs::memfd_create("t", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        assert!(check_sealed(fd.as_fd()).is_err());
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(check_sealed(file.as_fd()).is_err());
    }
}
