//! Memory that members read into while they have a time limit: a member that is kicked may still read, and must not change memory that has another use by
//! then.

use pvblk_block::memory::{Gauge, MemoryKind};
use pvblk_block::{Buffer, Error, Region, Request};
use std::sync::Arc;

/// Smallest piece of memory.
const LEAST_BYTES: usize = 4096;

/// A read that goes to memory of its own.
pub(super) struct Bounced {
    region: Arc<Region>,
    /// Memory that gets the data when it has been read.
    targets: Vec<Buffer>,
}

/// Memory for reads of one queue.
pub(super) struct Bounces {
    free: Vec<Arc<Region>>,
    free_bytes: usize,
    /// Most bytes that are kept for later reads.
    kept_bytes: usize,
    /// Bytes in use and kept.
    memory: Gauge,
    bytes: u64,
}

impl Bounces {
    pub fn new(kept_bytes: usize) -> Bounces {
        Bounces {
            free: Vec::new(),
            free_bytes: 0,
            kept_bytes,
            memory: Gauge::fixed(
                "raid5: reads of members with a time limit",
                MemoryKind::Anonymous,
                0,
            ),
            bytes: 0,
        }
    }

    /// Gives a read memory in place of its own. Errors if there is none.
    pub fn bounce(&mut self, request: &mut Request) -> Result<Bounced, Error> {
        let bytes = request.sectors as usize * 512;
        let size = bytes.next_power_of_two().max(LEAST_BYTES);
        let region = match self.free.iter().rposition(|r| r.len() == size) {
            Some(at) => {
                self.free_bytes -= size;
                self.free.swap_remove(at)
            }
            None => {
                let region = Region::anonymous(size)
                    .map_err(|e| Error::os("raid5: memory for a read", e))?;
                self.count(size as i64);
                Arc::new(region)
            }
        };
        let own = Buffer::new(&region, 0, bytes).into_iter().collect();
        let targets = std::mem::replace(&mut request.buffers, own);
        Ok(Bounced { region, targets })
    }

    /// Gives a read its own memory back; `copy`: with the data.
    pub fn restore(&mut self, bounced: Bounced, request: &mut Request, copy: bool) {
        let Bounced { region, targets } = bounced;
        let mut at = 0;
        for target in targets.iter().filter(|_| copy) {
            target.copy_from(&region, at);
            at += target.len();
        }
        request.buffers = targets;
        self.keep(region);
    }

    /// The device has given an abandoned read back.
    pub fn discard(&mut self, bounced: Bounced, request: &mut Request) {
        request.buffers.clear();
        self.keep(bounced.region);
    }

    fn keep(&mut self, region: Arc<Region>) {
        let size = region.len();
        // With another owner it could be written to by that.
        if Arc::strong_count(&region) == 1 && self.free_bytes + size <= self.kept_bytes {
            self.free_bytes += size;
            self.free.push(region);
        } else {
            self.count(-(size as i64));
        }
    }

    fn count(&mut self, change: i64) {
        self.bytes = self.bytes.saturating_add_signed(change);
        self.memory.set_cap(self.bytes);
        self.memory.set(self.bytes);
    }
}
