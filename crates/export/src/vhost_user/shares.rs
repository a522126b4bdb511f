//! Shares of vhost-user front ends in what the process has only once, divided so that none can take the part of another.
//!
//! Each socket has a floor, which is there for it at any time; the rest goes to whoever comes first. The sockets that a server starts with divide half of each resource
//! evenly. A socket that is added later gets a part of what nobody has and nobody was promised ([`LATER`]), and again whenever a front end connects to it while it
//! holds nothing, so that no floor is ever taken back from another socket.

use parking_lot::Mutex;
use pvblk_sys::MAX_GUARDED;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Address space that all front ends may have mapped, in bytes: an eighth of what a process has.
const MAX_MAPPED: u64 = 16 << 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Bytes of address space.
    Mapped,
    /// Mappings that are guarded against files that shrink.
    Guarded,
    /// Bytes of guest memory that nobody has allocated.
    Unallocated,
}

/// A socket that is added while the server runs is promised a sixteenth of what is free then.
const LATER: u64 = 16;

/// The resources that there are, and each socket's part of them.
#[derive(Debug)]
pub struct Shares {
    most: [u64; 3],
    sockets: Mutex<BTreeMap<usize, SocketShare>>,
}

/// One socket's numbers, by resource.
#[derive(Clone, Copy, Debug, Default)]
struct SocketShare {
    floor: [u64; 3],
    used: [u64; 3],
}

/// The part of one socket, as long as somebody has a clone of it.
#[derive(Clone, Debug)]
pub struct Seat(Arc<Place>);

#[derive(Debug)]
struct Place {
    all: Arc<Shares>,
    index: usize,
}

/// The resources that a mapping takes; given back when it is dropped.
#[derive(Debug)]
pub struct Share {
    seat: Seat,
    bytes: u64,
}

impl Shares {
    /// For so many sockets, with the numbers from 0; `unallocated`: the most bytes of guests' memory that nobody has allocated, if there is a limit.
    pub fn new(sockets: usize, unallocated: Option<u64>) -> Arc<Shares> {
        let unallocated = unallocated.unwrap_or(u64::MAX);
        let most = [MAX_MAPPED, MAX_GUARDED as u64, unallocated];
        let share = SocketShare {
            floor: most.map(|n| n / 2 / sockets.max(1) as u64),
            used: [0; 3],
        };
        Arc::new(Shares {
            most,
            sockets: Mutex::new((0..sockets).map(|i| (i, share)).collect()),
        })
    }

    /// The part of the socket with this number: one of the first, or one that is added now.
    pub fn seat(self: &Arc<Shares>, index: usize) -> Seat {
        let mut sockets = self.sockets.lock();
        if !sockets.contains_key(&index) {
            let floor = self.later(&sockets, index);
            let used = [0; 3];
            sockets.insert(index, SocketShare { floor, used });
        }
        let all = Arc::clone(self);
        Seat(Arc::new(Place { all, index }))
    }

    /// Bytes of address space taken by all.
    pub fn mapped(&self) -> u64 {
        let sockets = self.sockets.lock();
        let mapped = sockets.values().map(|s| s.used[Kind::Mapped as usize]);
        mapped.sum()
    }

    /// The sum of what sockets but this one have or were promised.
    fn taken(sockets: &BTreeMap<usize, SocketShare>, index: usize, kind: usize) -> u64 {
        let others = sockets.iter().filter(|(i, _)| **i != index);
        others.fold(0u64, |sum, (_, s)| {
            sum.saturating_add(s.used[kind].max(s.floor[kind]))
        })
    }

    fn later(&self, sockets: &BTreeMap<usize, SocketShare>, index: usize) -> [u64; 3] {
        [Kind::Mapped, Kind::Guarded, Kind::Unallocated].map(|kind| {
            let kind = kind as usize;
            let taken = Shares::taken(sockets, index, kind);
            self.most[kind].saturating_sub(taken) / LATER
        })
    }

    fn fits(
        &self,
        sockets: &BTreeMap<usize, SocketShare>,
        index: usize,
        kind: Kind,
        wanted: u64,
    ) -> bool {
        let kind = kind as usize;
        if sockets.get(&index).is_some_and(|s| wanted <= s.floor[kind]) {
            return true;
        }
        let taken = Shares::taken(sockets, index, kind);
        taken.saturating_add(wanted) <= self.most[kind]
    }
}

impl Seat {
    /// A front end connects: a socket that was added later and holds nothing may be promised more now.
    pub fn renew(&self) {
        let Place { all, index } = &*self.0;
        let mut sockets = all.sockets.lock();
        let later = all.later(&sockets, *index);
        if let Some(share) = sockets.get_mut(index)
            && share.used == [0; 3]
        {
            for (floor, new) in share.floor.iter_mut().zip(later) {
                *floor = new.max(*floor);
            }
        }
    }

    /// Takes what one mapping of so many bytes needs; `None` if it doesn't fit.
    pub fn take(&self, bytes: u64) -> Option<Share> {
        let Place { all, index } = &*self.0;
        let mut sockets = all.sockets.lock();
        let [mapped, guarded, _] = sockets.get(index)?.used;
        let fits = all.fits(&sockets, *index, Kind::Mapped, mapped + bytes)
            && all.fits(&sockets, *index, Kind::Guarded, guarded + 1);
        let share = sockets.get_mut(index).filter(|_| fits)?;
        share.used[Kind::Mapped as usize] += bytes;
        share.used[Kind::Guarded as usize] += 1;
        let seat = self.clone();
        Some(Share { seat, bytes })
    }

    /// Says how much memory of its front end nobody has allocated; errors with the most that it may have now.
    pub fn set_unallocated(&self, bytes: u64) -> Result<(), u64> {
        let Place { all, index } = &*self.0;
        let mut sockets = all.sockets.lock();
        let fits = all.fits(&sockets, *index, Kind::Unallocated, bytes);
        match sockets.get_mut(index).filter(|_| fits) {
            Some(share) => share.used[Kind::Unallocated as usize] = bytes,
            None => return Err(all.most[Kind::Unallocated as usize]),
        }
        Ok(())
    }

    /// Bytes that all have mapped.
    #[cfg(test)]
    pub fn mapped(&self) -> u64 {
        self.0.all.mapped()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let Place { all, index } = &*self.seat.0;
        if let Some(share) = all.sockets.lock().get_mut(index) {
            share.used[Kind::Mapped as usize] -= self.bytes;
            share.used[Kind::Guarded as usize] -= 1;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.all.sockets.lock().remove(&self.index);
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
    fn sockets_come_and_go_and_no_promise_is_taken_back() {
        let shares = Shares::new(2, Some(1 << 20));
        let first: Vec<Seat> = (0..2).map(|i| shares.seat(i)).collect();
        // Two TiB for each of the first, and what is free for the greedy one.
        let all = greedy(&first[0], 1 << 40);
        assert_eq!(all.len(), 12);
        let floor = |index: usize| shares.sockets.lock()[&index].floor[0];
        let late = shares.seat(2);
        assert_eq!(floor(2), 0, "nothing is free");
        assert!(late.take(1 << 12).is_none());
        drop(all);
        late.renew();
        // Half of 16 TiB is free: half a TiB.
        assert_eq!(floor(2), 1 << 39);
        let all = greedy(&first[0], 1 << 30);
        assert_eq!(greedy(&late, 1 << 30).len(), 512, "its promise");
        assert_eq!(greedy(&first[1], 1 << 40).len(), 4, "and that of another");
        let held = late.take(1 << 30);
        drop(late);
        assert!(shares.sockets.lock().contains_key(&2), "it has a mapping");
        drop(held);
        assert!(!shares.sockets.lock().contains_key(&2));
        drop(all);
        // However many there are, the sum of all promises is there.
        let many: Vec<Seat> = (3..1000).map(|i| shares.seat(i)).collect();
        for kind in 0..3 {
            let sockets = shares.sockets.lock();
            assert!(Shares::taken(&sockets, usize::MAX, kind) <= shares.most[kind]);
        }
        let all: Vec<Share> = many.iter().flat_map(|s| greedy(s, 1 << 40)).collect();
        assert_eq!(greedy(&first[0], 1 << 40).len(), 4);
        drop(all);
    }

    #[test]
    fn without_a_limit_everything_may_be_unallocated() {
        let shares = Shares::new(3, None);
        for i in 0..3 {
            assert_eq!(shares.seat(i).set_unallocated(1 << 40), Ok(()));
        }
    }
}
