//! Memory files of peers: sealed ones made here, and checks of those that a peer sends.

use rustix::fs::{MemfdFlags, SealFlags};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Creates a memory file of `len` bytes that can neither shrink nor grow.
pub fn create_sealed(name: &str, len: u64) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Checks that a descriptor from a peer is a file in memory: of memfd_create, tmpfs or hugetlbfs. Only those support
/// seals, so a query for seals is a check that calls no file system that might not reply. Pages of other files come
/// from a disk or from a server (FUSE, NFS), which may be the peer itself, and an access to such a page would wait
/// for it.
pub fn is_memory(fd: BorrowedFd<'_>) -> io::Result<()> {
    match rustix::fs::fcntl_get_seals(fd) {
        Ok(_) => Ok(()),
        Err(_) => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the descriptor is not a memory file (memfd, tmpfs or hugetlbfs)",
        )),
    }
}

/// Checks that a descriptor from a peer is a memory file that can't shrink, and returns its length in bytes. Without
/// the seal a peer could truncate the file and end this process with SIGBUS.
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

/// Properties of a file that [`guarded_file`] accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFile {
    /// Page size of the file in bytes; offsets and lengths of mappings are multiples of it.
    pub page_bytes: u64,
    /// Device and inode number: equal for all descriptors of one file.
    pub id: (u64, u64),
    /// Bytes that are not allocated yet; the first access allocates them.
    pub unallocated: u64,
}

/// Checks that a descriptor from a peer is a memory file that holds `len` bytes at `offset`. Unlike with
/// [`check_sealed`], the file may shrink later, so map it by [`crate::Region::guarded`] only. The file need not end
/// at a page boundary: the rest of its last page is zeros.
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
