//! I/O that is left at devices that were members, and members that come back, with the core that has a lock. [`super::returns`] has the rest.

use super::MemberDevice;
use super::background::BackgroundWork;
use super::control::Parts;
use super::returns::Places;
use crate::core::Token;
use crate::{Member, Role};
use pvblk_block::stacked::LowerQueue;
use pvblk_block::{BlockDevice, Completion, Error};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Abandoned I/O at a device that was kicked.
pub(super) struct LeftBehind {
    lower: LowerQueue,
    /// The tokens of each request, by its tag.
    tokens: HashMap<u64, Vec<Token>>,
    polled: Vec<Completion>,
}

impl LeftBehind {
    pub fn new(lower: LowerQueue, tokens: HashMap<u64, Vec<Token>>) -> LeftBehind {
        LeftBehind {
            lower,
            tokens,
            polled: Vec::new(),
        }
    }

    /// Appends the I/O that has come back; false when none is left.
    fn poll(&mut self, ended: &mut Vec<Token>) -> bool {
        self.lower.poll(&mut self.polled);
        for completion in self.polled.drain(..) {
            let tokens = self.tokens.remove(&completion.request.tag);
            ended.extend(tokens.into_iter().flatten());
        }
        !self.lower.is_idle()
    }
}

impl BackgroundWork {
    /// Looks after devices that were members; `frozen`: nothing is to begin.
    pub(super) fn step_away(&mut self, now: Duration, frozen: bool) {
        let shared = Arc::clone(&self.shared);
        let mut ended = Vec::new();
        let mut left = shared.left_behind.lock();
        left.retain_mut(|l| l.poll(&mut ended));
        drop(left);
        if !ended.is_empty() {
            self.queue.step(|core, owner| {
                ended
                    .drain(..)
                    .for_each(|token| core.ended(owner, token, false));
            });
        }
        if let Some(limit) = shared.control.limit
            && now >= self.tick_at
        {
            self.tick_at = now + limit / crate::core::TICKS;
            self.queue.step(|core, owner| core.tick(owner));
        }
        let core = shared.core.lock();
        let places = Places {
            wants: core.wants_spare(),
            incoming: core.recovered_sectors().map(|(_, place, _)| place),
            frozen,
        };
        drop(core);
        let parts: &dyn Parts = &*shared;
        self.returns.step(parts, now, places);
        if frozen {
            return;
        }
        // Not locked while it is taken back.
        let returning = shared.control.returning.lock().take();
        if let Some(member) = returning {
            self.take_back(member);
        }
    }

    /// The device that is to be added as a spare, since it came back and is to be rebuilt whole. Adding waits for the device.
    pub fn take_whole(&mut self) -> Option<(String, Arc<dyn BlockDevice>)> {
        self.returns.take_whole()
    }

    /// A device that was a member becomes it again, by the bitmap.
    fn take_back(&mut self, member: Member) {
        let shared = Arc::clone(&self.shared);
        let Role::Active(place) = member.superblock.role() else {
            return;
        };
        let place = usize::from(place);
        let ability = member.device.limits().into();
        let superblock = member.superblock.clone();
        let device = MemberDevice {
            device: Arc::clone(&member.device),
            name: member.name.clone(),
        };
        let taken = self.queue.step(|core, owner| {
            if core.wants_spare() != Some(place) {
                return Err(Error::config(format!("place {place} isn't empty any more")));
            }
            let slot = core.take_in(place, superblock, true, ability, owner)?;
            shared.set_device(slot, device);
            Ok::<(), Error>(())
        });
        match taken {
            Ok(()) => tracing::info!(
                "raid5: {} is member {place} again; what it missed is written",
                member.name
            ),
            Err(e) => {
                tracing::debug!("raid5: {e}");
                // Another time, unless the place is another's by then.
                let empty = shared.core.lock().wants_spare() == Some(place);
                if empty {
                    *shared.control.returning.lock() = Some(member);
                }
            }
        }
    }
}
