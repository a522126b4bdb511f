//! A back end's offers, published before the front end chooses.

use super::number::optional_u32;
use super::{Change, MAX_QUEUES};
use crate::blkif::{RingSize, wire};
use pvblk_block::Error;

/// Largest page order of a ring (Linux's `XENBUS_MAX_RING_GRANT_ORDER`).
const MAX_ORDER: u32 = 4;
/// Most segments that the header's eight indirect pages hold.
const MOST_INDIRECT: u32 = (wire::MAX_INDIRECT_PAGES * wire::SEGMENTS_PER_INDIRECT_PAGE) as u32;

/// A back end's offers. A key that is `None` isn't published, as by back ends that are older than the key. Keys are
/// from xen/include/public/io/blkif.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendOffers {
    /// `multi-queue-max-queues`: 1 to 64. `None`: one queue, and the front end's multi-queue keys are ignored.
    pub max_queues: Option<u32>,
    /// `max-ring-page-order` and its deprecated twin `max-ring-pages`. `None`: one page, and the front end's keys for
    /// more are ignored.
    pub max_ring: Option<RingSize>,
    /// `feature-max-indirect-segments`: 1 to 256. `None`: indirect requests are not offered.
    pub max_indirect_segments: Option<u16>,
    /// `feature-persistent`, used if the front end wants it too.
    pub persistent: bool,
    /// `feature-barrier`: write barriers are offered.
    pub barrier: bool,
}

impl Default for BackendOffers {
    /// Everything, with 4 queues of up to 16 pages and 256 indirect segments.
    fn default() -> BackendOffers {
        BackendOffers {
            max_queues: Some(4),
            max_ring: RingSize::from_order(MAX_ORDER),
            max_indirect_segments: Some(wire::MAX_INDIRECT_SEGMENTS as u16),
            persistent: true,
            barrier: true,
        }
    }
}

impl BackendOffers {
    /// Offers of a back end from before multi-queue, multi-page rings, indirect requests and persistent grants.
    pub fn oldest() -> BackendOffers {
        BackendOffers {
            max_queues: None,
            max_ring: None,
            max_indirect_segments: None,
            persistent: false,
            barrier: true,
        }
    }

    /// Most queues that a front end may ask for, 1 to 64.
    pub fn queue_limit(&self) -> u32 {
        self.max_queues.unwrap_or(1).clamp(1, MAX_QUEUES)
    }

    /// Largest ring that a front end may ask for.
    pub fn ring_limit(&self) -> RingSize {
        self.max_ring.unwrap_or(one_page())
    }

    /// Most segments of an indirect request; 0: not offered.
    pub fn indirect_limit(&self) -> u16 {
        self.max_indirect_segments
            .unwrap_or(0)
            .min(wire::MAX_INDIRECT_SEGMENTS as u16)
    }

    /// The keys to publish, without `state`.
    pub fn changes(&self) -> Vec<Change> {
        let mut keys = Vec::new();
        if self.max_queues.is_some() {
            keys.push(Change::set("multi-queue-max-queues", self.queue_limit()));
        }
        if let Some(ring) = self.max_ring {
            keys.push(Change::set("max-ring-page-order", ring.order()));
            // The header asks for the deprecated name too: Red Hat's and Amazon's front ends read it.
            keys.push(Change::set("max-ring-pages", ring.pages()));
        }
        if self.indirect_limit() > 0 {
            keys.push(Change::set(
                "feature-max-indirect-segments",
                self.indirect_limit(),
            ));
        }
        keys
    }
}

pub fn one_page() -> RingSize {
    match RingSize::from_order(0) {
        Some(size) => size,
        None => unreachable!("a ring of one page exists"),
    }
}

/// A back end's offers as a front end reads them, limited to what the front end supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfferedLimits {
    /// Most queues, 1 to 64.
    pub max_queues: u32,
    pub max_ring: RingSize,
    /// Most segments of an indirect request, up to 4096; 0: not offered.
    pub max_indirect_segments: u16,
}

/// Reads a back end's offers: absent keys mean one queue, one page, no indirect requests. Errors if a value is not a number.
pub fn parse_offers(read: &dyn Fn(&str) -> Option<String>) -> Result<OfferedLimits, Error> {
    let queues = optional_u32(read, "multi-queue-max-queues")?.unwrap_or(1);
    let order = match optional_u32(read, "max-ring-page-order")? {
        Some(order) => order,
        None => optional_u32(read, "max-ring-pages")?
            .unwrap_or(1)
            .max(1)
            .ilog2(),
    };
    let indirect = optional_u32(read, "feature-max-indirect-segments")?.unwrap_or(0);
    Ok(OfferedLimits {
        max_queues: queues.clamp(1, MAX_QUEUES),
        max_ring: RingSize::from_order(order.min(MAX_ORDER)).unwrap_or(one_page()),
        max_indirect_segments: indirect.min(MOST_INDIRECT) as u16,
    })
}
