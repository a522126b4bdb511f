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

/// Checks that a descriptor from a peer is a file in memory: of memfd_create, tmpfs or hugetlbfs. Only those have seals, so asking for them
/// tells, and asks no file system that might not answer. A page of another file is had from a disk, or from a server (FUSE, NFS) that
/// may be the peer itself: whoever touches it waits.
pub fn is_memory(fd: BorrowedFd<'_>) -> io::Result<()> {
    match rustix::fs::fcntl_get_seals(fd) {
        Ok(_) => Ok(()),
        Err(_) => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the descriptor is not a memory file (memfd, tmpfs or hugetlbfs)",
        )),
    }
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

/// What [`guarded_file`] saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFile {
    /// Offsets and lengths of mappings are multiples of it, in bytes.
    pub page_bytes: u64,
    /// The same for all descriptors of one file.
    pub id: (u64, u64),
    /// Bytes that nobody has allocated yet: whoever touches them first pays for them.
    pub unallocated: u64,
}

/// Checks that a descriptor from a peer is a memory file that holds `len` bytes at `offset`. Unlike [`check_sealed`] it may
/// shrink later, so it is for [`crate::Region::guarded`] only. It need not end with a page: the rest of its last one is zeros.
pub fn guarded_file(fd: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<MemoryFile> {
    /// `HUGETLBFS_MAGIC` of linux/magic.h.
    const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
    is_memory(fd)?;
    let stat = rustix::fs::fstat(fd)?;
    let size = stat.st_size.max(0) as u64;
    if offset.checked_add(len).is_none_or(|end| end > size) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{len} bytes at {offset} are not inside the file, which has {size}"),
        ));
    }
    let kind = rustix::fs::fstatfs(fd)?;
    let huge = kind.f_type as i64 == HUGETLBFS_MAGIC;
    let page_bytes = if huge { kind.f_bsize.max(1) as u64 } else { 0 };
    Ok(MemoryFile {
        page_bytes: page_bytes.max(crate::PAGE_SIZE as u64),
        id: (stat.st_dev, stat.st_ino),
        // Blocks are of 512 bytes, whatever st_blksize says (stat(2)).
        unallocated: size.saturating_sub(stat.st_blocks.max(0) as u64 * 512),
    })
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
