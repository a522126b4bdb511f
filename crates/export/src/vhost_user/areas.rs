//! The memory for requests in flight that front ends of one socket may have, and what of it the server pays for.
//!
//! The server makes such an area, so the server's control group pays for its pages. The front end keeps a descriptor of it over
//! connections and servers, and nothing tells when it closes that. So the socket has a descriptor of each area, too, and an area is on the bill of
//! unallocated memory, with its whole length, until it is *emptied*: a hole of its length gives the pages back to the system, whoever has
//! them mapped. Pages that somebody touches afterwards are paid for by who touches them.
//!
//! Emptied is the one that wasn't used for longest: when a front end asks for one more than [`MOST`], or when the bill has no room. A hypervisor uses one
//! area at a time and forgets it when its guest is reset, so an area that is in use is emptied only if others on the same disk asked for as many meanwhile.
//! A server that is handed an emptied area finds it as fresh as one that the hypervisor made zeros of.

use super::shares::Seat;
use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Error, ErrorKind};
use rustix::fs::{FallocateFlags, fallocate};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

/// Most areas of one socket that the server pays for.
const MOST: usize = 4;

#[derive(Debug)]
struct Kept {
    file: OwnedFd,
    /// Of its file: the same for all descriptors.
    id: (u64, u64),
    bytes: u64,
}

/// The areas of one socket.
#[derive(Debug)]
pub(super) struct Areas {
    seat: Seat,
    /// The one that wasn't used for longest is the first.
    kept: VecDeque<Kept>,
    /// Bytes of the connected front end's own memory that nobody allocated.
    own: u64,
    disk: String,
    /// Bytes of the longest.
    longest: u64,
    /// Since there is one.
    gauge: Option<Gauge>,
}

impl Areas {
    /// Those of the socket that has this part of what there is for all. None is longer than `longest`, in bytes.
    pub fn new(disk: &str, seat: Seat, longest: u64) -> Areas {
        Areas {
            seat,
            kept: VecDeque::with_capacity(MOST),
            own: 0,
            disk: disk.to_owned(),
            longest,
            gauge: None,
        }
    }

    fn kept_bytes(&self) -> u64 {
        self.kept.iter().map(|k| k.bytes).sum()
    }

    /// Puts on the bill what nobody allocated of the connected front end's own memory. Areas are emptied for it, except the one that was used last.
    /// Errors with the most that all may have.
    pub fn set_own(&mut self, bytes: u64) -> Result<(), u64> {
        loop {
            let all = bytes.saturating_add(self.kept_bytes());
            let refused = match self.seat.set_unallocated(all) {
                Ok(()) => {
                    self.own = bytes;
                    return Ok(());
                }
                Err(most) => most,
            };
            if self.kept.len() <= 1 || self.empty_first().is_err() {
                return Err(refused);
            }
        }
    }

    /// Makes room for an area of so many bytes that the server will make. No area may be in use.
    pub fn make_room(&mut self, bytes: u64) -> Result<(), Error> {
        while self.kept.len() >= MOST {
            self.empty_first()?;
        }
        loop {
            let all = self
                .own
                .saturating_add(self.kept_bytes())
                .saturating_add(bytes);
            let Err(most) = self.seat.set_unallocated(all) else {
                return Ok(());
            };
            if self.kept.is_empty() {
                let _ = self.seat.set_unallocated(self.own);
                return Err(Error::new(
                    ErrorKind::Exhausted,
                    format!(
                        "{} KiB of memory for requests in flight, for which the server's control group pays, are too much: {} KiB are allowed for all guests; give the disk fewer or shorter queues, or see --max-guest-unallocated",
                        bytes >> 10,
                        most >> 10
                    ),
                ));
            }
            self.empty_first()?;
        }
    }

    /// Keeps an area for which there is room.
    pub fn keep(&mut self, file: OwnedFd, id: (u64, u64), bytes: u64) {
        self.kept.push_back(Kept { file, id, bytes });
        let all = self.kept_bytes();
        let gauge = self.gauge.get_or_insert_with(|| {
            Gauge::new(
                format!("disk {}: memory for requests in flight", self.disk),
                MemoryKind::Unallocated,
                MOST as u64 * self.longest,
            )
        });
        gauge.set(all);
    }

    /// A front end uses the area of this file; true if it is on the bill.
    pub fn uses(&mut self, id: (u64, u64)) -> bool {
        let Some(at) = self.kept.iter().position(|k| k.id == id) else {
            return false;
        };
        if let Some(kept) = self.kept.remove(at) {
            self.kept.push_back(kept);
        }
        true
    }

    /// Gives the pages of the first one back and forgets it. An error leaves it on the bill.
    fn empty_first(&mut self) -> Result<(), Error> {
        if let Some(first) = self.kept.front() {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&first.file, hole, 0, first.bytes)
                .map_err(|e| Error::os("emptying memory for requests in flight", e))?;
        }
        self.kept.pop_front();
        if let Some(gauge) = &self.gauge {
            gauge.set(self.kept_bytes());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::shares::Shares;
    use super::*;
    use pvblk_sys::{create_sealed, guarded_file};
    use std::os::fd::AsFd;

    const BYTES: u64 = 16 << 10;

    /// Makes one, all of it allocated.
    fn make(areas: &mut Areas) -> Result<(OwnedFd, (u64, u64)), Error> {
        areas.make_room(BYTES)?;
        let file = create_sealed("t", BYTES).unwrap();
        rustix::io::pwrite(&file, &[1; BYTES as usize], 0).unwrap();
        let id = guarded_file(file.as_fd(), 0, 0).unwrap().id;
        areas.keep(file.try_clone().unwrap(), id, BYTES);
        Ok((file, id))
    }

    fn is_full(file: &OwnedFd) -> bool {
        rustix::fs::fstat(file).unwrap().st_blocks as u64 * 512 == BYTES
    }

    #[test]
    fn the_one_that_was_not_used_for_longest_is_emptied() {
        let mut areas = Areas::new("t", Shares::new(1, None).seat(0), BYTES);
        let all: Vec<_> = (0..MOST).map(|_| make(&mut areas).unwrap()).collect();
        assert!(areas.uses(all[0].1));
        let more = make(&mut areas).unwrap();
        let full: Vec<_> = all.iter().map(|(file, _)| is_full(file)).collect();
        assert_eq!(full, [true, false, true, true]);
        assert!(is_full(&more.0) && !areas.uses(all[1].1));
        // The one in use outlives any number of others, as long as it is used now and then.
        for _ in 0..20 {
            assert!(areas.uses(all[0].1));
            make(&mut areas).unwrap();
        }
        assert!(is_full(&all[0].0) && !is_full(&more.0));
        let gauge = areas.gauge.as_ref().unwrap();
        assert_eq!(gauge.live_bytes(), MOST as u64 * BYTES);
    }

    #[test]
    fn areas_share_the_bill_with_the_guests_memory() {
        // Half of it is for each of the two, at any time, and the other half for whoever comes first.
        let shares = Shares::new(2, Some(4 * BYTES));
        let mut areas = Areas::new("t", shares.seat(0), BYTES);
        let all: Vec<_> = (0..3).map(|_| make(&mut areas).unwrap()).collect();
        let other = shares.seat(1);
        assert_eq!(other.set_unallocated(BYTES + 1), Err(4 * BYTES));
        // What the guest has doesn't fit beside two of them; the one that was used last stays.
        areas.set_own(BYTES + 1).unwrap();
        let full: Vec<_> = all.iter().map(|(file, _)| is_full(file)).collect();
        assert_eq!(full, [false, false, true]);
        assert_eq!(areas.set_own(2 * BYTES + 1), Err(4 * BYTES));
        assert!(is_full(&all[2].0));
        areas.set_own(2 * BYTES).unwrap();
        make(&mut areas).unwrap();
        assert!(!is_full(&all[2].0));
        areas.set_own(0).unwrap();
        areas.set_own(2 * BYTES + 1).unwrap_err();
        // Nobody can hand over one that is longer than all there is.
        let e = areas.make_room(5 * BYTES).unwrap_err().to_string();
        assert!(
            e.contains("--max-guest-unallocated") && !e.contains('\n'),
            "{e}"
        );
    }
}
