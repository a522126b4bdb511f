//! [`StripePages`]: the memory of one stripe's pages, as a value.

use super::stock::PageSet;
use crate::STRIPE_BYTES;
use crate::head_pages::{HeadPages, memory};
use parking_lot::Mutex;
use pvblk_block::memory::Gauge;
use pvblk_block::{Buffer, Error, Region};
use pvblk_sys::Idle;
use std::sync::Arc;

/// Sets that are mapped together. Each is a piece whose memory comes and goes alone.
const MAPPED: usize = 8;

/// Memory of an array's sets, as it is on the bill: the cap is all that there are, also those that were never used.
struct Bill {
    gauge: Gauge,
    /// Bytes of all sets.
    present: Mutex<u64>,
}

impl Bill {
    fn count(&self, change: impl FnOnce(&mut u64)) {
        let mut present = self.present.lock();
        change(&mut present);
        self.gauge.set_cap(*present);
    }
}

/// Makes sets for an array.
pub struct PageMemory {
    members: usize,
    bill: Arc<Bill>,
}

/// A page for each member, in memory of one owner. It has the system's memory from its first use until that is given back.
pub struct StripePages {
    bill: Arc<Bill>,
    used: Option<HeadPages>,
    /// Memory that nobody has a buffer of, while it isn't in use.
    idle: Option<Idle>,
    /// It counts as memory that the system has given.
    warm: bool,
    bytes: u64,
}

impl PageMemory {
    pub fn new(members: usize) -> PageMemory {
        PageMemory {
            members,
            bill: Arc::new(Bill {
                gauge: memory("stripes", 0),
                present: Mutex::new(0),
            }),
        }
    }

    /// Address space for so many sets. The system's memory comes with their use.
    pub fn make(&self, count: usize) -> Result<Vec<StripePages>, Error> {
        let bytes = self.members * STRIPE_BYTES;
        let mut all = Vec::with_capacity(count);
        while all.len() < count {
            let beside = MAPPED.min(count - all.len());
            let region = Region::anonymous(beside * bytes);
            let region = region.map_err(|e| Error::os("memory for stripes", e))?;
            self.bill.count(|n| *n += (beside * bytes) as u64);
            all.extend(region.cut(bytes).into_iter().map(|piece| StripePages {
                bill: Arc::clone(&self.bill),
                used: None,
                idle: Some(Idle::fresh(piece)),
                warm: false,
                bytes: bytes as u64,
            }));
        }
        Ok(all)
    }

    /// Bytes that may be the system's.
    pub fn gauge(&self) -> &Gauge {
        &self.bill.gauge
    }
}

impl StripePages {
    /// Takes the memory into use.
    pub fn pages(&mut self) -> &HeadPages {
        let idle = &mut self.idle;
        let (bill, warm, bytes) = (&self.bill, &mut self.warm, self.bytes);
        self.used.get_or_insert_with(|| {
            let idle = idle.take().expect("memory is in use or idle");
            if !std::mem::replace(warm, true) {
                bill.gauge.add(bytes);
            }
            HeadPages::new(Arc::clone(idle.into_buffer().region()), 0)
        })
    }

    /// Takes the memory out of use, unless somebody has a buffer of it; true if it is to be given back.
    fn rest(&mut self) -> bool {
        let region = self.used.take().map(HeadPages::into_region);
        let buffer = region.and_then(|region| Buffer::new(&region, 0, region.len()));
        match buffer.map(Idle::of) {
            None => {}
            Some(Ok(idle)) => self.idle = Some(idle),
            Some(Err(buffer)) => self.used = Some(HeadPages::new(Arc::clone(buffer.region()), 0)),
        }
        self.warm && self.idle.is_some()
    }
}

impl PageSet for StripePages {
    fn give_back(sets: &mut [StripePages]) -> u64 {
        let mut leaving: Vec<&mut StripePages> = sets.iter_mut().collect();
        leaving.retain_mut(|set| set.rest());
        if Idle::release(leaving.iter_mut().filter_map(|set| set.idle.as_mut())).is_err() {
            return 0;
        }
        let gone = |set: &mut StripePages| {
            set.warm = false;
            set.bill.gauge.sub(set.bytes);
            set.bytes
        };
        leaving.into_iter().map(gone).sum()
    }
}

impl Drop for StripePages {
    fn drop(&mut self) {
        if self.warm {
            self.bill.gauge.sub(self.bytes);
        }
        self.bill.count(|n| *n -= self.bytes);
    }
}
