//! Superblocks as they are on disk.

use crate::core::stripes::queue::Errand;
use crate::head_pages::bits;

/// See the module's documentation. Slots are devices.
#[derive(Clone, Debug)]
pub struct OnDisk {
    /// Members by role; `None`: it failed.
    pub roles: Vec<Option<usize>>,
    /// A device that becomes the member of a role: its slot, the role, and stripes that it holds from the first on.
    pub incoming: Option<(usize, usize, u64)>,
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

    /// Superblocks are written; these slots fail that. Returns those of them that are lost by it, as a mask.
    pub fn write(&mut self, errand: Errand, dead: impl Fn(usize) -> bool) -> u64 {
        if let Errand::Name { failed, .. } = errand {
            bits(failed).for_each(|slot| self.lose(slot));
        }
        let live: Vec<usize> = self.live().collect();
        let dead: Vec<usize> = live.into_iter().filter(|slot| dead(*slot)).collect();
        dead.iter().for_each(|slot| self.lose(*slot));
        match (errand, &mut self.incoming) {
            (Errand::Name { takes_over, .. }, incoming) => {
                self.dirty = true;
                if let Some((slot, role, _)) = incoming.take_if(|_| takes_over) {
                    self.roles[role] = Some(slot);
                }
            }
            (Errand::Recovered(stripes), Some((_, _, held))) => *held = stripes,
            (Errand::Recovered(_), None) => {}
            (Errand::Resynced(stripes), _) => self.resynced = stripes,
        }
        dead.iter().fold(0, |mask, slot| mask | 1 << slot)
    }

    fn lose(&mut self, slot: usize) {
        let role = self.roles.iter_mut().find(|role| **role == Some(slot));
        if let Some(role) = role {
            *role = None;
        }
        self.incoming.take_if(|incoming| incoming.0 == slot);
    }
}
