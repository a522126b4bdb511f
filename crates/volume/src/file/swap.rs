//! Pages of a file in memory that may have gone to the machine's swap, whose medium may hang.

use pvblk_sys::fileio;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Time for which it is believed that the machine has swap, or has none. Nothing is written to swap as soon as it is there.
const BELIEVED: Duration = Duration::from_millis(100);

/// A question: are some of a file's bytes, from an offset on, in swap?
type Ask = fn(BorrowedFd<'_>, u64, u64) -> io::Result<bool>;

/// The means to know whether pages of a file system in memory are there.
#[derive(Clone, Copy)]
pub(super) struct Swap {
    has_swap: fn() -> bool,
    is_swapped: Ask,
}

impl Swap {
    /// The machine's own.
    pub(super) const MACHINE: Swap = Swap {
        has_swap: || rustix::system::sysinfo().totalswap > 0,
        is_swapped: fileio::is_swapped,
    };

    /// For pages that are never swapped out: of ramfs and hugetlbfs.
    pub(super) const NEVER: Swap = Swap {
        has_swap: || false,
        is_swapped: |_, _, _| Ok(false),
    };

    /// For tests: a machine with swap, whose answers are these.
    #[cfg(test)]
    pub(super) fn told(is_swapped: Ask) -> Swap {
        let has_swap = || true;
        Swap {
            has_swap,
            is_swapped,
        }
    }

    /// True if a read or write of these bytes waits for no medium. A kernel that can't tell (before Linux 6.5, or for a file that the process
    /// neither owns nor may write) gives no such promise.
    pub(super) fn are_present(&self, file: BorrowedFd<'_>, offset: u64, bytes: u64) -> bool {
        (self.is_swapped)(file, offset, bytes).is_ok_and(|swapped| !swapped)
    }
}

/// One queue's knowledge of swap.
#[derive(Default)]
pub(super) struct SwapLook {
    until: Option<Instant>,
    on: bool,
}

impl SwapLook {
    /// True if the machine has swap, or had some lately.
    pub(super) fn is_on(&mut self, swap: &Swap) -> bool {
        let now = Instant::now();
        if self.until.is_none_or(|until| now >= until) {
            self.until = Some(now + BELIEVED);
            self.on = (swap.has_swap)();
        }
        self.on
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FileVolume;
    use crate::spec::FileSpec;
    use pvblk_block::{BlockDevice, Buffer, Op, Queue, QueueContext, Request, Status};
    use std::os::fd::AsFd;
    use std::path::Path;
    use std::sync::Arc;

    /// A queue of a file on tmpfs of which one page is written; `None`, with the reason printed, where there is no tmpfs.
    fn disk(swap: Swap) -> Option<(tempfile::TempDir, Queue)> {
        let folder = tempfile::tempdir_in(Path::new("/dev/shm"));
        let Ok(folder) = folder else {
            println!("skipped: there is no /dev/shm");
            return None;
        };
        let path = folder.path().join("disk");
        std::fs::write(&path, [7; 4096]).unwrap();
        let spec = FileSpec {
            size_bytes: Some(1 << 20),
            ..FileSpec::new(path)
        };
        let mut volume = FileVolume::open(&spec).unwrap();
        if !volume.shared.in_memory {
            println!("skipped: /dev/shm isn't in memory");
            return None;
        }
        Arc::get_mut(&mut volume.shared).unwrap().swap = swap;
        let device: Arc<dyn BlockDevice> = Arc::new(volume);
        let queue = Queue::open(&device, &QueueContext::new(4)).unwrap();
        Some((folder, queue))
    }

    /// Reads the first page. Returns whether that was done in the step itself.
    fn is_inline(queue: &mut Queue) -> bool {
        let buffer = Buffer::anonymous(4096).unwrap();
        queue.submit(&mut vec![Request::with_buffers(
            Op::Read,
            0,
            vec![buffer],
            1,
        )]);
        // A queue without requests at its threads has no descriptor.
        let inline = queue.wait_fd().is_none();
        let mut done = Vec::new();
        let begin = Instant::now();
        while queue.poll(&mut done) == 0 {
            assert!(begin.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
        assert_eq!(done[0].status, Status::Ok);
        assert_eq!(done[0].request.buffers[0].to_vec(), [7; 4096]);
        inline
    }

    #[test]
    fn pages_in_swap_are_left_to_the_threads() {
        for (swap, inline) in [
            (Swap::NEVER, true),
            (Swap::told(|_, _, _| Ok(false)), true),
            (Swap::told(|_, _, _| Ok(true)), false),
            (
                Swap::told(|_, _, _| Err(io::ErrorKind::Unsupported.into())),
                false,
            ),
        ] {
            let Some((_folder, mut queue)) = disk(swap) else {
                return;
            };
            assert_eq!(is_inline(&mut queue), inline);
        }
    }

    #[test]
    fn the_kernel_tells_that_pages_are_there() {
        let Some((folder, _)) = disk(Swap::NEVER) else {
            return;
        };
        let file = std::fs::File::open(folder.path().join("disk")).unwrap();
        if (Swap::MACHINE.has_swap)() {
            println!("skipped: this machine has swap");
            return;
        }
        match fileio::is_swapped(file.as_fd(), 0, 1 << 20) {
            Ok(swapped) => assert!(!swapped),
            Err(e) => println!("skipped: {e}"),
        }
    }
}
