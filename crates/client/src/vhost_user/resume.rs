//! The same rings and the same memory for the next server.

use super::front::Front;
use super::{Ring, Shared, VhostClientConfig, negotiate, start, tell_memory};
use pvblk_block::Error;
use pvblk_protocol::vhost_user::{Code, InflightArea};
use pvblk_protocol::virtio::Place;
use pvblk_sys::PeerEvent;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::{FromBytes, IntoBytes};

/// A ring as a server is told of it, whoever has its driver.
pub(super) struct Seat {
    /// Of descriptor table, available and used ring.
    pub addresses: (u64, u64, u64),
    place: Place,
    pub kick: Arc<PeerEvent>,
    pub call: Arc<PeerEvent>,
}

impl Seat {
    pub fn of(ring: &Ring) -> Seat {
        Seat {
            addresses: ring.driver.addresses(),
            place: ring.driver.place(),
            kick: Arc::clone(&ring.kick),
            call: Arc::clone(&ring.call),
        }
    }

    /// The used index that the last server published.
    fn published(&self) -> u16 {
        let (region, used) = &self.place.used;
        region.atomic_u16(used + 2).load(Ordering::Acquire)
    }
}

/// The state that the next server is told.
pub(super) struct Kept {
    pub path: PathBuf,
    pub config: VhostClientConfig,
    /// Rings and buffers.
    pub file: OwnedFd,
    /// The area of requests in flight, which the first server made.
    pub inflight: (InflightArea, OwnedFd),
    pub seats: Vec<Seat>,
}

/// Has the server make the area in which it tells what is in flight.
pub(super) fn area(
    front: &mut Front,
    config: &VhostClientConfig,
) -> Result<(InflightArea, OwnedFd), Error> {
    let wish = InflightArea {
        size: 0,
        offset: 0,
        queues: config.queues,
        queue_size: config.entries,
        padding: [0; 4],
    };
    let (told, file) = front.ask_for_file(Code::GetInflightFd, wish.as_bytes())?;
    match InflightArea::read_from_bytes(&told) {
        Ok(area) => Ok((area, file)),
        Err(_) => Err(Error::protocol("GET_INFLIGHT_FD: the answer is no area")),
    }
}

impl Shared {
    /// Connects to the next server, hands it the rings, and returns its socket. An error may be for a moment only: nobody may
    /// listen yet.
    pub fn resume(&self, kept: &Kept) -> Result<UnixStream, Error> {
        // Until the new connection stands nobody asks on the old one: requests may be answered before that.
        let mut held = self.front.lock();
        self.connections.fetch_add(1, Ordering::AcqRel);
        let mut front = Front::connect(&kept.path, &kept.config)?;
        let (terms, _) = negotiate(&mut front, &kept.config)?;
        if terms.features != self.terms.features || terms.limits != self.terms.limits {
            return Err(Error::protocol(
                "the next server offers another disk, or other features",
            ));
        }
        let (area, file) = &kept.inflight;
        front.tell(Code::SetInflightFd, area.as_bytes(), &[file.as_fd()])?;
        tell_memory(&mut front, &kept.file, self.memory.file_bytes())?;
        for (index, seat) in (0u32..).zip(&kept.seats) {
            let base = seat.published();
            start(&mut front, index, seat, kept.config.entries, base)?;
        }
        let socket = front.copy_socket()?;
        *held = front;
        drop(held);
        for seat in &kept.seats {
            // What was made available meanwhile, and what was answered before somebody could be told.
            seat.kick.notify();
            seat.call.notify();
        }
        Ok(socket)
    }
}
