//! What vhost-user front ends may take of what the process has only once, divided so that none can take the part of another.
//!
//! Half of each resource is divided evenly among the sockets: that part is there for each of them at any time. The other half goes to whoever
//! comes first.

use parking_lot::Mutex;
use pvblk_sys::MAX_GUARDED;
use std::sync::Arc;

/// Address space that all front ends may have mapped, in bytes: an eighth of what a process has.
const MAX_MAPPED: u64 = 16 << 40;

/// A resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Bytes of address space.
    Mapped,
    /// Mappings that are guarded against files that shrink.
    Guarded,
    /// Bytes of guest memory that nobody has allocated.
    Unallocated,
}

/// What is there, and who has how much of it.
#[derive(Debug)]
pub struct Shares {
    most: [u64; 3],
    /// By socket.
    used: Mutex<Vec<[u64; 3]>>,
}

/// The part of one socket.
#[derive(Clone, Debug)]
pub struct Seat {
    all: Arc<Shares>,
    index: usize,
}

/// What a mapping takes; given back when it is dropped.
#[derive(Debug)]
pub struct Share {
    seat: Seat,
    bytes: u64,
}

impl Shares {
    /// For so many sockets; `unallocated`: the most bytes of guests' memory that nobody has allocated, if there is a limit.
    pub fn new(sockets: usize, unallocated: Option<u64>) -> Arc<Shares> {
        let unallocated = unallocated.unwrap_or(u64::MAX);
        Arc::new(Shares {
            most: [MAX_MAPPED, MAX_GUARDED as u64, unallocated],
            used: Mutex::new(vec![[0; 3]; sockets]),
        })
    }

    /// The part of the socket with this number.
    pub fn seat(self: &Arc<Shares>, index: usize) -> Seat {
        Seat {
            all: Arc::clone(self),
            index,
        }
    }

    /// Bytes of address space taken by all.
    pub fn mapped(&self) -> u64 {
        self.used
            .lock()
            .iter()
            .map(|u| u[Kind::Mapped as usize])
            .sum()
    }

    fn fits(&self, used: &[[u64; 3]], index: usize, kind: Kind, wanted: u64) -> bool {
        let (kind, most) = (kind as usize, self.most[kind as usize]);
        let own = most / 2 / used.len().max(1) as u64;
        if wanted <= own {
            return true;
        }
        let others = used.iter().enumerate().filter(|(i, _)| *i != index);
        let kept = others.fold(0u64, |sum, (_, u)| sum.saturating_add(u[kind].max(own)));
        kept.saturating_add(wanted) <= most
    }
}

impl Seat {
    /// Takes what one mapping of so many bytes needs; `None` if it doesn't fit.
    pub fn take(&self, bytes: u64) -> Option<Share> {
        let mut used = self.all.used.lock();
        let [mapped, guarded, _] = used[self.index];
        let fits = self
            .all
            .fits(&used, self.index, Kind::Mapped, mapped + bytes)
            && self.all.fits(&used, self.index, Kind::Guarded, guarded + 1);
        if !fits {
            return None;
        }
        used[self.index][Kind::Mapped as usize] += bytes;
        used[self.index][Kind::Guarded as usize] += 1;
        let seat = self.clone();
        Some(Share { seat, bytes })
    }

    /// Says how much memory of its front end nobody has allocated; errors with the most that it may have now.
    pub fn set_unallocated(&self, bytes: u64) -> Result<(), u64> {
        let mut used = self.all.used.lock();
        if !self.all.fits(&used, self.index, Kind::Unallocated, bytes) {
            return Err(self.all.most[Kind::Unallocated as usize]);
        }
        used[self.index][Kind::Unallocated as usize] = bytes;
        Ok(())
    }

    /// What all have mapped, in bytes.
    #[cfg(test)]
    pub fn mapped(&self) -> u64 {
        self.all.mapped()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let used = &mut self.seat.all.used.lock()[self.seat.index];
        used[Kind::Mapped as usize] -= self.bytes;
        used[Kind::Guarded as usize] -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes all it can get, in these pieces.
    fn greedy(seat: &Seat, bytes: u64) -> Vec<Share> {
        std::iter::from_fn(|| seat.take(bytes)).collect()
    }

    #[test]
    fn nobody_takes_the_part_of_another() {
        let shares = Shares::new(4, Some(800));
        let seats: Vec<Seat> = (0..4).map(|i| shares.seat(i)).collect();
        // Half of all is for whoever comes first, besides an eighth for each.
        let all = greedy(&seats[0], 1 << 40);
        assert_eq!(all.len(), 10);
        for other in &seats[1..] {
            assert_eq!(greedy(other, 1 << 40).len(), 2, "and it is given back");
        }
        drop(all);
        assert_eq!(shares.mapped(), 0);
        let all = greedy(&seats[1], 1);
        assert_eq!(all.len(), MAX_GUARDED * 5 / 8);
        assert_eq!(greedy(&seats[2], 1).len(), MAX_GUARDED / 8);
        assert_eq!(seats[0].set_unallocated(501), Err(800));
        assert_eq!(seats[0].set_unallocated(500), Ok(()));
        assert_eq!(seats[1].set_unallocated(101), Err(800));
        assert_eq!(seats[1].set_unallocated(100), Ok(()));
        seats[0].set_unallocated(0).unwrap();
        assert_eq!(seats[1].set_unallocated(500), Ok(()));
    }

    #[test]
    fn without_a_limit_everything_may_be_unallocated() {
        let shares = Shares::new(3, None);
        for i in 0..3 {
            assert_eq!(shares.seat(i).set_unallocated(1 << 40), Ok(()));
        }
    }
}
