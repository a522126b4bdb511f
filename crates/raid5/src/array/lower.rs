//! Queues at members: how they are opened, and how a queue of the array waits for them.

use super::MemberDevice;
use crate::core::Mail;
use pvblk_block::stacked::{CompletionQueue, LowerQueue};
use pvblk_block::trace::Tracer;
use pvblk_block::{Error, QueueContext, Readiness};
use pvblk_sys::Poller;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

/// Most requests of one array queue at one member.
const MEMBER_DEPTH: u32 = 512;

/// For queues at the members of a queue that is opened with `context`.
pub(super) fn below(context: &QueueContext) -> QueueContext {
    QueueContext {
        depth: MEMBER_DEPTH,
        merges: Arc::default(),
        ..context.clone()
    }
}

/// Opens a queue at a member.
pub(super) fn open_member(
    member: &MemberDevice,
    below: &QueueContext,
) -> Result<LowerQueue, Error> {
    let floor = member.device.floor();
    let below = QueueContext {
        tracing: below.tracing.inside(&member.name, &floor),
        merges: Arc::clone(&below.merges),
        ..*below
    };
    LowerQueue::open(&member.device, &below)
}

/// The hooks for requests that come to a member from a queue of the array. `own`: that queue's.
pub(super) fn remaps_to(member: &MemberDevice, below: &QueueContext, own: &Tracer) -> Tracer {
    let floor = member.device.floor();
    let tracing = below.tracing.below(own).inside(&member.name, &floor);
    tracing.tracer(&floor, below.index, below.submitter)
}

/// Mail that other queues leave for a queue.
pub(super) type Mailbox = CompletionQueue<Vec<Mail>>;

/// The mail for a new queue, and its poller, which has the descriptor of their event.
pub(super) fn open_mail() -> Result<(Arc<Mailbox>, Poller), Error> {
    let os = |e| Error::os("raid5: opening a queue", e);
    let mail = Mailbox::new().map_err(os)?;
    let poller = Poller::new().map_err(os)?;
    poller
        .add(mail.wait().event().as_fd(), 0, false)
        .map_err(os)?;
    Ok((Arc::new(mail), poller))
}

/// Asks members with requests in flight for wake-ups at the poller; the earliest of their times.
pub(super) fn arm_members(members: &mut [Option<LowerQueue>], poller: &Poller) -> Readiness {
    let mut deadline: Option<Instant> = None;
    for (at, lower) in members.iter_mut().enumerate() {
        let Some(lower) = lower.as_mut().filter(|lower| !lower.is_idle()) else {
            continue;
        };
        match lower.arm_in(poller, at as u64 + 1) {
            Ok(Readiness::Ready) => return Readiness::Ready,
            Ok(Readiness::Wait(until)) => deadline = deadline.into_iter().chain(until).min(),
            Err(e) => {
                // Out of kernel memory: rather a busy queue than one that sleeps for ever.
                tracing::error!("raid5: waiting for a member: {e}");
                return Readiness::Ready;
            }
        }
    }
    Readiness::Wait(deadline)
}
