//! Superblocks as they are on disk.

use crate::core::kick::Change;
use crate::core::queue::Errand;
use crate::head_pages::bits;

/// See the module's documentation. Slots are devices.
#[derive(Clone, Debug)]
pub struct OnDisk {
    /// Members by role; `None`: it failed.
    pub roles: Vec<Option<usize>>,
    /// A device that becomes the member of a role: its slot, the role, and stripes that it holds from the first on.
    pub incoming: Option<(usize, usize, u64)>,
    /// It was the member, and holds all but what the bitmap marks.
    pub by_bitmap: bool,
    /// A slot that was the member of a role, which hasn't had another one since.
    pub gone: Option<(usize, usize)>,
    /// Stripes before this have right parity.
    pub resynced: u64,
    pub dirty: bool,
}

impl OnDisk {
    /// Roles without a member.
    pub fn missing(&self) -> usize {
        self.roles.iter().filter(|slot| slot.is_none()).count()
    }

    /// Devices of the array.
    pub fn live(&self) -> impl Iterator<Item = usize> {
        let incoming = self.incoming.map(|(slot, ..)| slot);
        self.roles.iter().flatten().copied().chain(incoming)
    }

    /// Superblocks are written, which these slots fail. `by_bitmap`: the device that arrives was the member. Returns those of them that have one, as a mask: a name leaves them out.
    pub fn write(&mut self, errand: Errand, by_bitmap: bool, dead: impl Fn(usize) -> bool) -> u64 {
        if let Errand::Name {
            dirty,
            failed,
            change,
        } = errand
        {
            bits(failed).for_each(|slot| self.lose(slot));
            self.dirty |= dirty;
            let incoming = match change {
                Some(Change::TakesOver) => self.incoming.take(),
                _ => None,
            };
            if let Some((slot, role, _)) = incoming {
                self.roles[role] = Some(slot);
                self.gone = None;
            }
            if let Some(Change::TakesIn { slot, role }) = change {
                self.incoming = Some((slot, role, 0));
                self.by_bitmap = by_bitmap;
            }
        }
        let dead: Vec<usize> = self.live().filter(|slot| dead(*slot)).collect();
        match (errand, &mut self.incoming) {
            (Errand::Name { .. }, _) => dead.iter().for_each(|slot| self.lose(*slot)),
            (Errand::Recovered { slot: of, stripes }, Some((slot, _, held)))
                if of == *slot && !dead.contains(slot) =>
            {
                *held = stripes;
            }
            (Errand::Recovered { .. }, _) => {}
            (Errand::Resynced(stripes), _) => self.resynced = stripes,
        }
        dead.iter().fold(0, |mask, slot| mask | 1 << slot)
    }

    fn lose(&mut self, slot: usize) {
        if let Some(role) = self.roles.iter().position(|role| *role == Some(slot)) {
            self.roles[role] = None;
            self.gone = Some((slot, role));
        }
        self.incoming.take_if(|incoming| incoming.0 == slot);
    }
}
