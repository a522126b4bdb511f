//! A guest that outlives its servers, with what it has in flight.

use super::{ENTRIES, Front};
use pvblk_protocol::vhost_user::{Code, InflightArea};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use zerocopy::{FromBytes, IntoBytes};

pub const OK: u8 = 0;
pub const IO_ERROR: u8 = 1;
pub const QUEUES: u16 = 2;

/// A guest that keeps an in-flight area.
pub struct Guest {
    pub front: Front,
    path: PathBuf,
    area: InflightArea,
    file: OwnedFd,
}

impl Guest {
    pub fn new(path: &Path) -> Guest {
        let mut front = Front::connect(path);
        front.negotiate();
        let asked = InflightArea {
            size: 0,
            offset: 0,
            queues: QUEUES,
            queue_size: ENTRIES,
            padding: [0; 4],
        };
        front.send(Code::GetInflightFd as u32, 0, asked.as_bytes(), &[]);
        let (_, body, mut fds) = front.answer().unwrap();
        let area = InflightArea::read_from_bytes(&body).unwrap();
        let mut guest = Guest {
            front,
            path: path.to_owned(),
            area,
            file: fds.remove(0),
        };
        guest.start();
        guest
    }

    fn start(&mut self) {
        self.front.must(
            Code::SetInflightFd,
            self.area.as_bytes(),
            &[self.file.as_fd()],
        );
        self.front.add_memory();
        for queue in 0..QUEUES {
            // Where nothing is in flight; else the area says it.
            let base = self.front.drivers[usize::from(queue)].available();
            self.front.start(queue, base);
        }
    }

    /// Goes on with the next server, with all that it has.
    pub fn reconnect(&mut self) {
        self.front.reconnect(&self.path.clone());
        self.front.negotiate();
        self.start();
    }

    pub fn flush(&mut self, queue: u16) -> u8 {
        self.front.io(queue, 4, 0, &[], 0).0
    }

    /// A flush fails, and then no more of them: one that is submitted while the failed one becomes visible may be taken for
    /// one that was submitted before.
    pub fn is_told(&mut self, queue: u16) {
        assert_eq!(self.flush(queue), IO_ERROR);
        self.flush(queue);
        for queue in 0..QUEUES {
            assert_eq!(self.flush(queue), OK);
        }
    }

    /// Makes the area look like one of the first release: no more than its own mark behind the queues.
    pub fn forget_the_cache_mark(&self) {
        let at = usize::from(QUEUES) * (16 + 16 * usize::from(ENTRIES)).next_multiple_of(64);
        let rest = self.area.size as usize - (at + 24);
        rustix::io::pwrite(&self.file, &vec![0; rest], at as u64 + 24).unwrap();
    }
}
