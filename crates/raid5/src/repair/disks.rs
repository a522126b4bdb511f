//! Blocking access to all members.

use super::super::assemble::{Assembly, Member};
use super::super::blocking::{Blocking, Idle};
use pvblk_block::Error;

/// A device of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// The member at a place.
    Member(usize),
    /// The one that is being rebuilt.
    Incoming,
}

impl At {
    /// All that are there; the one that is being rebuilt is the last.
    pub fn all(assembly: &Assembly) -> Vec<At> {
        let there = |&place: &usize| assembly.members[place].is_some();
        let members = (0..assembly.members.len()).filter(there).map(At::Member);
        let incoming = assembly.incoming.iter().map(|_| At::Incoming);
        members.chain(incoming).collect()
    }

    /// The device with the data and the log of a place: its member, or else the device that is
    /// recovered for it.
    pub fn home(assembly: &Assembly, place: usize) -> Option<At> {
        let incoming = assembly.incoming.as_ref().map(|i| i.place);
        match &assembly.members[place] {
            Some(_) => Some(At::Member(place)),
            None => (incoming == Some(place)).then_some(At::Incoming),
        }
    }

    /// The device, if it is there.
    pub fn of(self, assembly: &Assembly) -> Option<&Member> {
        match self {
            At::Member(place) => assembly.members[place].as_ref(),
            At::Incoming => assembly.incoming.as_ref().map(|i| &i.member),
        }
    }

    pub fn of_mut(self, assembly: &mut Assembly) -> Option<&mut Member> {
        match self {
            At::Member(place) => assembly.members[place].as_mut(),
            At::Incoming => assembly.incoming.as_mut().map(|i| &mut i.member),
        }
    }
}

/// A queue of one device.
pub struct Disk {
    blocking: Blocking,
    data_offset: u64,
}

impl Disk {
    pub fn open(member: &Member) -> Result<Disk, Error> {
        Ok(Disk {
            blocking: Blocking::open(&member.device)?,
            data_offset: member.superblock.data_offset_sectors,
        })
    }

    pub fn blocking(&mut self) -> &mut Blocking {
        &mut self.blocking
    }
}

/// A queue of each member, and of the one that is being rebuilt.
pub struct Disks {
    members: Vec<Option<Disk>>,
    incoming: Option<(usize, Disk)>,
}

impl Disks {
    pub fn open(assembly: &Assembly) -> Result<Disks, Error> {
        let mut members = Vec::new();
        for member in &assembly.members {
            members.push(member.as_ref().map(Disk::open).transpose()?);
        }
        let incoming = match &assembly.incoming {
            Some(incoming) => Some((incoming.place, Disk::open(&incoming.member)?)),
            None => None,
        };
        Ok(Disks { members, incoming })
    }

    /// One device. It must be there.
    pub fn at(&mut self, at: At) -> Result<&mut Blocking, Error> {
        let disk = match at {
            At::Member(place) => self.members.get_mut(place).and_then(Option::as_mut),
            At::Incoming => self.incoming.as_mut().map(|(_, disk)| disk),
        };
        let disk = disk.map(|d| &mut d.blocking);
        disk.ok_or_else(|| Error::config(format!("{at:?} isn't there")))
    }

    /// A device is to be recovered for a place.
    pub fn take_in(&mut self, place: usize, disk: Disk) {
        self.incoming = Some((place, disk));
    }

    /// The device that was recovered is the member.
    pub fn take_over(&mut self) {
        if let Some((place, disk)) = self.incoming.take() {
            self.members[place] = Some(disk);
        }
    }

    /// Writes to these devices side by side, each its bytes at its sector; returns those that failed that. Errors if `idle` ends it.
    pub fn write_each(
        &mut self,
        writes: &[(At, u64, &[u8])],
        idle: &mut Idle<'_>,
    ) -> Result<Vec<(At, Error)>, Error> {
        let mut failed: Vec<(At, Error)> = Vec::new();
        let most = writes.iter().map(|(_, _, bytes)| bytes.len()).max();
        let window = self.window_bytes().max(1);
        for from in (0..most.unwrap_or(0)).step_by(window) {
            let mut left: Vec<At> = Vec::new();
            for (at, sector, bytes) in writes {
                let part = from.min(bytes.len())..bytes.len().min(from + window);
                if part.is_empty() || failed.iter().any(|(other, _)| other == at) {
                    continue;
                }
                let sector = sector + part.start as u64 / 512;
                if let Err(error) = self.at(*at)?.begin_write(sector, &bytes[part]) {
                    self.end_each(left)?;
                    return Err(error);
                }
                left.push(*at);
            }
            self.finish_each(left, &mut failed, idle)?;
        }
        Ok(failed)
    }

    fn finish_each(
        &mut self,
        mut left: Vec<At>,
        failed: &mut Vec<(At, Error)>,
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        while !left.is_empty() {
            let before = left.len();
            // All are looked at: none counts as late that has answered.
            for at in std::mem::take(&mut left) {
                match self.at(at)?.try_finish_write() {
                    None => left.push(at),
                    Some(Ok(())) => {}
                    Some(Err(error)) => failed.push((at, error)),
                }
            }
            if left.len() == before
                && let Err(error) = idle()
            {
                self.end_each(left)?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives up the requests in flight at these devices.
    fn end_each(&mut self, left: Vec<At>) -> Result<(), Error> {
        left.into_iter().try_for_each(|at| {
            self.at(at)?.end();
            Ok(())
        })
    }

    pub fn drop_at(&mut self, at: At) {
        match at {
            At::Member(place) => self.members[place] = None,
            At::Incoming => self.incoming = None,
        }
    }

    /// The device with the data of a place: its member, or else the device that is recovered for it. There
    /// must be one.
    fn data(&mut self, place: usize) -> Result<(&mut Blocking, u64), Error> {
        let incoming = self.incoming.as_mut().filter(|(p, _)| *p == place);
        let disk = self.members[place].as_mut();
        let disk = disk.or(incoming.map(|(_, disk)| disk));
        disk.map(|d| (&mut d.blocking, d.data_offset))
            .ok_or_else(|| Error::config(format!("no member at place {place}")))
    }

    /// Most bytes of [`Disks::begin_read`].
    pub fn window_bytes(&self) -> usize {
        let incoming = self.incoming.iter().map(|(_, disk)| disk);
        let all = self.members.iter().flatten().chain(incoming);
        let least = all.map(|d| d.blocking.window_bytes()).min();
        least.unwrap_or(0)
    }

    /// Begins to read data of a place; to be followed by [`Disks::finish_read`].
    pub fn begin_read(&mut self, place: usize, sector: u64, bytes: usize) -> Result<(), Error> {
        let (disk, offset) = self.data(place)?;
        disk.begin_read(offset + sector, bytes)
    }

    pub fn finish_read(
        &mut self,
        place: usize,
        to: &mut [u8],
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        self.data(place)?.0.finish_read(to, idle)
    }

    /// Reads data of a place.
    pub fn read(
        &mut self,
        place: usize,
        sector: u64,
        to: &mut [u8],
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        let (disk, offset) = self.data(place)?;
        disk.read(offset + sector, to, idle)
    }

    /// Writes data of a place; see [`Disks::flush`].
    pub fn write(
        &mut self,
        place: usize,
        sector: u64,
        from: &[u8],
        idle: &mut Idle<'_>,
    ) -> Result<(), Error> {
        let (disk, offset) = self.data(place)?;
        disk.write_cached(offset + sector, from, idle)
    }

    /// Flushes all devices that were written to.
    pub fn flush(&mut self, idle: &mut Idle<'_>) -> Result<(), Error> {
        let incoming = self.incoming.iter_mut().map(|(_, disk)| disk);
        let mut all = self.members.iter_mut().flatten().chain(incoming);
        all.try_for_each(|disk| disk.blocking.flush(idle))
    }
}
