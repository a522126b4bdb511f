//! A front end's memory in the back end: checked.

use pvblk_block::{Error, ErrorKind};
use pvblk_protocol::blkif::grant::GRANTS_PER_PAGE;
use pvblk_protocol::local::MAX_MEMORY;
use pvblk_sys::{PAGE_SIZE, PeerFd};
use std::os::fd::{AsFd, BorrowedFd};

/// `TMPFS_MAGIC` of linux/magic.h.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// A checked memory file with a grant table inside.
#[derive(Debug)]
pub struct GuestMemory {
    file: PeerFd,
    frames: u32,
    table_first: u32,
    table_frames: u32,
}

impl GuestMemory {
    /// Checks and takes a front end's memory file. Refuses a file that is not a sealed memfd, uses huge pages, is not
    /// whole pages, is empty or larger than [`MAX_MEMORY`], or doesn't contain the grant table.
    pub fn from_peer(
        file: PeerFd,
        table_first: u32,
        table_frames: u32,
    ) -> Result<GuestMemory, Error> {
        let len = pvblk_sys::check_sealed(file.as_fd())
            .map_err(|e| Error::caused(ErrorKind::Protocol, "", e))?;
        // On hugetlbfs, an access to a page that can't be allocated ends the process.
        let kind =
            rustix::fs::fstatfs(file.as_fd()).map_err(|e| Error::os("looking at the memory", e))?;
        if kind.f_type as i64 != TMPFS_MAGIC {
            return Err(Error::protocol("the memory is not made of ordinary pages"));
        }
        if len == 0 || len > MAX_MEMORY || !len.is_multiple_of(PAGE_SIZE as u64) {
            return Err(Error::protocol(format!(
                "the memory has {len} bytes, not whole pages up to 64 GiB"
            )));
        }
        // At most 2^24 frames.
        let frames = (len / PAGE_SIZE as u64) as u32;
        if table_frames == 0 || table_frames > frames || table_first > frames - table_frames {
            return Err(Error::protocol(format!(
                "the grant table of {table_frames} frames from {table_first} is not inside a memory of {frames} frames"
            )));
        }
        Ok(GuestMemory {
            file,
            frames,
            table_first,
            table_frames,
        })
    }

    /// The memory file, for mapping.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Length in bytes, a multiple of 4096.
    pub fn len(&self) -> usize {
        self.frames as usize * PAGE_SIZE
    }

    /// Always false: an empty file is refused.
    pub fn is_empty(&self) -> bool {
        self.frames == 0
    }

    /// Frames of 4096 bytes.
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// Offset of the grant table in bytes.
    pub(super) fn table_offset(&self) -> usize {
        self.table_first as usize * PAGE_SIZE
    }

    /// Entries of the grant table.
    pub(super) fn table_entries(&self) -> u32 {
        // At most 2^24 frames of 512.
        (u64::from(self.table_frames) * GRANTS_PER_PAGE as u64).min(u64::from(u32::MAX)) as u32
    }
}

/// Kernel mappings needed for these frames side by side: neighbours in the file share one.
pub(super) fn runs(frames: &[u64]) -> u64 {
    let breaks = frames.windows(2).filter(|w| w[0] + 1 != w[1]).count();
    breaks as u64 + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_sys::{Closer, create_sealed};

    #[test]
    fn bad_memory_is_refused() {
        let memory = |pages: u64, first, count| {
            let file = create_sealed("t", pages * PAGE_SIZE as u64).unwrap();
            GuestMemory::from_peer(PeerFd::new(file, &Closer::new()), first, count)
        };
        assert_eq!(memory(4, 1, 3).unwrap().table_entries(), 1536);
        for (pages, first, count) in [
            (4, 0, 0),
            (4, 0, 5),
            (4, 2, 3),
            (4, u32::MAX, 1),
            (4, 1, u32::MAX),
            (0, 0, 1),
            ((MAX_MEMORY >> 12) + 1, 0, 1),
        ] {
            assert!(
                memory(pages, first, count).is_err(),
                "{pages} {first} {count}"
            );
        }
        let odd = create_sealed("t", 5000).unwrap();
        let odd = PeerFd::new(odd, &Closer::new());
        assert!(GuestMemory::from_peer(odd, 0, 1).is_err());
        let loose = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&loose, 8192).unwrap();
        let loose = PeerFd::new(loose, &Closer::new());
        let e = GuestMemory::from_peer(loose, 0, 1).unwrap_err();
        assert!(e.to_string().contains("sealed"), "{e}");
    }

    #[test]
    fn neighbours_in_the_file_are_one_run() {
        assert_eq!((runs(&[5, 6, 7]), runs(&[7, 6, 5]), runs(&[1])), (1, 3, 1));
    }
}
