//! Conversions of one record: to and from bytes, and to and from an [`Event`].

use super::{CGROUP, MAGIC, RECORD_BYTES, VERSION, category, notify};
use crate::{Action, Device, Event, Extra};
use pvblk_block::Op;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A record's fields, in this machine's byte order.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Record {
    /// [`MAGIC`] with the version.
    pub magic: u32,
    /// Number of the record among those of its device and CPU, from 1; a gap is a loss. Notifications have none.
    pub sequence: u32,
    /// Time in nanoseconds.
    pub time_ns: u64,
    /// First sector (512 B).
    pub sector: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// Code in the lower half, categories in the upper one.
    pub action: u32,
    /// Process that did it.
    pub pid: u32,
    /// Major and minor number.
    pub device: u32,
    /// CPU on which it was recorded.
    pub cpu: u32,
    /// Of a completion: 0, or the negative error number, as the kernel has it.
    pub error: u16,
    /// Length of the payload in bytes.
    pub payload_bytes: u16,
}

const _: () = assert!(size_of::<Record>() == RECORD_BYTES);

/// Longest payload of an event of ours, in bytes.
pub(super) const MAX_EXTRA: usize = 16;

impl Record {
    /// Reads a record of either byte order; the flag is true if it was the other one. `None` if its magic is wrong.
    pub fn decode(bytes: &[u8; RECORD_BYTES]) -> Option<(Record, bool)> {
        let record = Record::read_from_bytes(bytes).ok()?;
        let ours = |magic: u32| magic & !0xff == MAGIC;
        match record {
            r if ours(r.magic) => Some((r, false)),
            r if ours(r.magic.swap_bytes()) => Some((r.swapped(), true)),
            _ => None,
        }
    }

    /// Converts to the other byte order.
    #[must_use]
    pub fn swapped(self) -> Record {
        Record {
            magic: self.magic.swap_bytes(),
            sequence: self.sequence.swap_bytes(),
            time_ns: self.time_ns.swap_bytes(),
            sector: self.sector.swap_bytes(),
            bytes: self.bytes.swap_bytes(),
            action: self.action.swap_bytes(),
            pid: self.pid.swap_bytes(),
            device: self.device.swap_bytes(),
            cpu: self.cpu.swap_bytes(),
            error: self.error.swap_bytes(),
            payload_bytes: self.payload_bytes.swap_bytes(),
        }
    }

    /// True for a notification, which belongs to no request.
    pub fn is_notification(&self) -> bool {
        self.action & category::NOTIFY != 0
    }

    /// True if a cgroup's number precedes the payload.
    pub(super) fn has_cgroup(&self) -> bool {
        self.action & CGROUP != 0
    }

    /// The action without its categories.
    pub(super) fn code(&self) -> u32 {
        self.action & 0xff
    }

    /// The event of a request with sectors; `None` for other records. `payload` is without a cgroup's number. Errors
    /// say what is wrong with the payload or the numbers.
    pub fn event(&self, payload: &[u8]) -> Result<Option<Event>, String> {
        if self.is_notification() || self.action & category::PC != 0 {
            return Ok(None);
        }
        let Some(action) = action_of(self.code()) else {
            return Ok(None);
        };
        let extra = match action {
            Action::Remap => {
                let from = fixed(payload, 0, 16)?;
                Extra::Remap {
                    // The payload has two numbers of 4 bytes: the device before and the device after the remap; the
                    // record has the latter, too.
                    from: Device((from >> 32) as u32),
                    sector: fixed(payload, 8, 16)?,
                }
            }
            Action::Split => Extra::Split(fixed(payload, 0, 8)?),
            Action::Unplug => Extra::Waiting(fixed(payload, 0, 8)?),
            // The kernel's records have no payload here.
            _ if has_identity(action) => fixed(payload, 0, 8).map_or(Extra::None, Extra::Request),
            _ => Extra::None,
        };
        if self
            .sector
            .checked_add(u64::from(self.bytes).div_ceil(512))
            .is_none()
        {
            return Err(format!(
                "sector {} and {} bytes are beyond all devices",
                self.sector, self.bytes
            ));
        }
        Ok(Some(Event {
            time_ns: self.time_ns,
            action,
            device: Device(self.device),
            queue: self.cpu,
            submitter: self.pid,
            op: self.op(),
            fua: self.action & category::FUA != 0,
            sector: self.sector,
            bytes: self.bytes,
            // 0 for success; some errors are stored as positive numbers.
            error: if action == Action::Complete {
                (self.error as i16).unsigned_abs()
            } else {
                0
            },
            extra,
        }))
    }

    fn op(&self) -> Op {
        let has = |bits: u32| self.action & bits != 0;
        if has(category::DISCARD) {
            Op::Discard
        } else if has(category::FLUSH) && self.bytes == 0 {
            Op::Flush
        } else if has(category::WRITE) {
            Op::Write
        } else {
            Op::Read
        }
    }
}

/// The 8 bytes at `at` of a payload that must have `len` bytes; payloads are big-endian in either byte order of the
/// record.
fn fixed(payload: &[u8], at: usize, len: usize) -> Result<u64, String> {
    let bytes = payload.get(at..at + 8).filter(|_| payload.len() == len);
    bytes
        .and_then(|b| b.try_into().ok())
        .map(u64::from_be_bytes)
        .ok_or_else(|| format!("a payload of {} bytes, not {len}", payload.len()))
}

fn action_of(code: u32) -> Option<Action> {
    Some(match code {
        1 => Action::Queue,
        2 => Action::BackMerge,
        3 => Action::FrontMerge,
        4 => Action::Get,
        5 => Action::Sleep,
        6 => Action::Requeue,
        7 => Action::Issue,
        8 => Action::Complete,
        9 => Action::Plug,
        // 11: unplugged by a timer.
        10 | 11 => Action::Unplug,
        12 => Action::Insert,
        13 => Action::Split,
        15 => Action::Remap,
        // Bounces, aborts, a driver's own data, and actions of later kernels.
        _ => return None,
    })
}

fn code_of(action: Action) -> u32 {
    use category::{COMPLETE, FS, ISSUE, QUEUE, REQUEUE};
    match action {
        Action::Queue => 1 | QUEUE,
        Action::BackMerge => 2 | QUEUE,
        Action::FrontMerge => 3 | QUEUE,
        Action::Get => 4 | QUEUE,
        Action::Sleep => 5 | QUEUE,
        Action::Requeue => 6 | REQUEUE,
        Action::Issue => 7 | ISSUE | FS,
        Action::Complete => 8 | COMPLETE | FS,
        Action::Plug => 9 | QUEUE,
        Action::Unplug => 10 | QUEUE,
        Action::Insert => 12 | QUEUE | FS,
        Action::Split => 13,
        Action::Remap => 15 | QUEUE,
        Action::Gap => notify::MESSAGE | category::NOTIFY,
    }
}

/// True for steps whose records tell the request's identity, in a payload that other readers pass over.
fn has_identity(action: Action) -> bool {
    use Action::{BackMerge, Complete, FrontMerge, Get, Insert, Issue, Queue};
    matches!(
        action,
        Queue | Get | BackMerge | FrontMerge | Insert | Issue | Complete
    )
}

/// The record of an event, its payload, and the payload's length. A remap without an origin is written as one from
/// its own sector. A gap is a message, for which [`Writer`](super::Writer) writes the text.
pub fn record_of(event: &Event) -> (Record, [u8; MAX_EXTRA], usize) {
    let mut action = code_of(event.action);
    action |= match event.op {
        Op::Read => category::READ,
        Op::Write | Op::WriteZeroes => category::WRITE,
        Op::Flush => category::WRITE | category::FLUSH,
        Op::Discard => category::WRITE | category::DISCARD,
    };
    if event.fua {
        action |= category::FUA;
    }
    let mut payload = [0; MAX_EXTRA];
    let len = match (event.action, event.extra) {
        (Action::Remap, extra) => {
            let (from, sector) = match extra {
                Extra::Remap { from, sector } => (from, sector),
                _ => (event.device, event.sector),
            };
            payload[..4].copy_from_slice(&from.0.to_be_bytes());
            payload[4..8].copy_from_slice(&event.device.0.to_be_bytes());
            payload[8..].copy_from_slice(&sector.to_be_bytes());
            16
        }
        (Action::Split, Extra::Split(value)) | (Action::Unplug, Extra::Waiting(value)) => {
            payload[..8].copy_from_slice(&value.to_be_bytes());
            8
        }
        (Action::Split, _) => {
            payload[..8].copy_from_slice(&event.end().to_be_bytes());
            8
        }
        (Action::Unplug, _) => 8,
        (action, Extra::Request(id)) if has_identity(action) => {
            payload[..8].copy_from_slice(&id.to_be_bytes());
            8
        }
        _ => 0,
    };
    let record = Record {
        magic: MAGIC | VERSION,
        sequence: 0,
        time_ns: event.time_ns,
        sector: event.sector,
        bytes: event.bytes,
        action,
        pid: event.submitter,
        device: event.device.0,
        cpu: event.queue,
        error: event.error.wrapping_neg(),
        payload_bytes: len as u16,
    };
    (record, payload, len)
}
