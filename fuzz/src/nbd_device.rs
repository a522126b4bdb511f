//! A disk whose every sector holds its number, so that data in a wrong place shows, whatever the order.

use pvblk_block::{
    BlockDevice, Buffer, CacheState, Cached, Capabilities, Completion, DeviceQueue, Error,
    EventHub, Extent, Limits, Op, QueueContext, Request, RequestFlags, Status,
};

/// Its size in sectors.
pub const SECTORS: u64 = 256;
/// Requests that touch these sectors fail.
pub const BAD: std::ops::Range<u64> = 200..204;

/// The eight bytes that a sector consists of, 64 times.
fn word(sector: u64) -> [u8; 8] {
    (sector.wrapping_add(1))
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .to_ne_bytes()
}

/// The expected content of a sector.
pub fn pattern(sector: u64) -> [u8; 512] {
    let mut b = [0; 512];
    b.chunks_exact_mut(8)
        .for_each(|c| c.copy_from_slice(&word(sector)));
    b
}

/// The expected byte at an offset in bytes. It doesn't make the whole sector: a run of the target asks for some 100,000 bytes.
pub fn byte(at: u64) -> u8 {
    word(at / 512)[(at % 8) as usize]
}

/// The device; the target itself plays its queue.
pub struct PatternDisk {
    limits: Limits,
    events: EventHub,
}

impl PatternDisk {
    /// A disk with these limits.
    pub fn new(limits: Limits) -> PatternDisk {
        PatternDisk {
            limits,
            events: EventHub::default(),
        }
    }

    /// Checks a request against the limits, and does it.
    pub fn execute(&self, request: Box<Request>) -> Completion {
        let r = &request;
        let unit = self.limits.sectors_per_block();
        assert!(
            r.end() <= SECTORS && r.sectors.is_multiple_of(unit) && r.sector.is_multiple_of(unit)
        );
        if r.op.has_data() {
            let bytes: usize = r.buffers.iter().map(Buffer::len).sum();
            assert_eq!(bytes as u64, r.sectors * 512, "buffers and length differ");
            assert!(r.sectors > 0 && r.sectors <= u64::from(self.limits.max_sectors));
            assert!(r.buffers.len() <= self.limits.max_segments as usize);
        } else {
            assert!(r.buffers.is_empty());
        }
        assert!(r.op == Op::Flush || r.sectors > 0);
        let status = if r.op != Op::Flush && r.sector < BAD.end && BAD.start < r.end() {
            Status::IoError
        } else {
            Status::Ok
        };
        // A lane would read what stays of a block: here nobody looks at it.
        let stay = match r.flags.contains(RequestFlags::PARTIAL) {
            true => [r.scratch & 0xffff, r.scratch >> 16].map(|n| n as usize),
            false => [0; 2],
        };
        let is_partial = stay != [0; 2];
        assert!(!is_partial || (r.op == Op::Write && r.sectors == unit));
        let end = r.sectors as usize * 512 - stay[1];
        let mut sector = r.sector;
        for b in &r.buffers {
            for at in (0..b.len()).step_by(512) {
                let mut got = [0; 512];
                match r.op {
                    Op::Write => {
                        b.read(at, &mut got);
                        let from = (sector - r.sector) as usize * 512;
                        let new = stay[0].clamp(from, from + 512) - from;
                        let new = new..end.clamp(from, from + 512) - from;
                        let (got, want) = (got.get(new.clone()), pattern(sector));
                        let zeros = got.is_some_and(|g| g.iter().all(|&b| b == 0));
                        let may_be_zeros = is_partial || !self.limits.write_zeroes;
                        assert!(
                            got == want.get(new) || (zeros && may_be_zeros),
                            "wrong data for sector {sector}"
                        );
                    }
                    _ => b.write(at, &pattern(sector)),
                }
                sector += 1;
            }
        }
        Completion { request, status }
    }
}

impl BlockDevice for PatternDisk {
    fn describe(&self) -> String {
        "pattern".into()
    }
    fn limits(&self) -> Limits {
        self.limits
    }
    fn capacity_sectors(&self) -> u64 {
        SECTORS
    }
    fn open_device_queue(&self, _: &QueueContext) -> Result<Box<dyn DeviceQueue>, Error> {
        Err(Error::config("the target plays the queue"))
    }
    fn events(&self) -> &EventHub {
        &self.events
    }
    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            cached: Some(self),
            ..Capabilities::none()
        }
    }
}

impl Cached for PatternDisk {
    /// Blocks of four sectors, in turns.
    fn cached(&self, sector: u64, sectors: u64, out: &mut Vec<Extent<CacheState>>) {
        for at in sector..sector + sectors {
            let states = [CacheState::Absent, CacheState::Clean, CacheState::Dirty];
            out.push(Extent {
                sector: at,
                sectors: 1,
                kind: states[(at / 4 % 3) as usize],
            });
        }
    }
}
