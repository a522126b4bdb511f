//! [`Idle`]: memory that nobody uses, and the only kind that goes back to the system.

use crate::region::drop_pages;
use crate::{Buffer, Region, asan};
use std::cell::Cell;
use std::io;
use std::sync::Arc;

/// Bytes that are released in one call, about: others of the process wait for it who need the same part of its address space.
const LONGEST_RUN: usize = 16 << 20;

/// What released memory is filled with while tests ask for it.
pub const POISON: u8 = 0xdb;

thread_local! {
    static POISONING: Cell<bool> = const { Cell::new(false) };
}

/// Fills memory with [`POISON`] when this thread releases it and looks for changes when this thread uses it again, for tests: whoever
/// still reads it sees no plausible data, and whoever still writes it is found. The pages are resident again, so this saves no memory.
pub fn poison_released_memory() {
    POISONING.set(true);
}

/// A piece of private memory of which this is the only owner: nobody has a buffer of it, so no request, no device and no
/// kernel operation can reach it. It gives no access to its bytes and can't be cloned; [`Idle::into_buffer`] takes it into use.
#[derive(Debug)]
pub struct Idle(Arc<Region>);

impl Idle {
    /// A piece that was cut just now.
    pub fn fresh(piece: Region) -> Idle {
        if POISONING.get() {
            fill(&piece);
        }
        asan::forbid(&piece);
        Idle(Arc::new(piece))
    }

    /// Takes all of a buffer's piece out of use. If anybody else still has a buffer of it, or it isn't a piece of private memory
    /// ([`Region::cut`]), the buffer comes back as it was.
    #[inline]
    pub fn of(buffer: Buffer) -> Result<Idle, Buffer> {
        if !buffer.region().is_piece() {
            return Err(buffer);
        }
        let (offset, len) = (buffer.offset(), buffer.len());
        let mut region = buffer.into_region();
        // The unique owner also sees all that former owners wrote.
        if Arc::get_mut(&mut region).is_some() {
            asan::forbid(&region);
            return Ok(Idle(region));
        }
        // It was a buffer of this region just now.
        Err(Buffer::from_checked(region, offset, len))
    }

    /// Takes it into use.
    #[inline]
    pub fn into_buffer(self) -> Buffer {
        let len = self.0.len();
        asan::allow(&self.0);
        Buffer::from_checked(self.0, 0, len)
    }

    /// Bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if it holds no bytes; none does.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Where it lies, for sorting.
    pub fn address(&self) -> usize {
        self.0.address()
    }

    /// True if the pieces are all that is left of what they were cut from: dropping them unmaps it.
    pub fn are_whole<'a>(pieces: impl Iterator<Item = &'a Idle>) -> bool {
        let mut pieces = pieces.peekable();
        let first: Option<&Idle> = pieces.peek().copied();
        let Some(whole) = first.and_then(|p| p.0.whole()) else {
            return false;
        };
        let mut of_whole = 0;
        let all = pieces.all(|p| {
            of_whole += 1;
            p.is_of(whole)
        });
        // Nobody but a piece refers to the whole, and pieces don't multiply.
        all && Arc::strong_count(whole) == of_whole
    }

    /// True if both were cut from the same.
    pub fn is_beside(&self, other: &Idle) -> bool {
        self.0.whole().is_some_and(|w| other.is_of(w))
    }

    fn is_of(&self, whole: &Arc<Region>) -> bool {
        self.0.whole().is_some_and(|w| Arc::ptr_eq(w, whole))
    }

    /// Gives the pages of all pieces back to the system; they are zero when they are used next. Makes one call for each run of neighbours up to
    /// 16 MiB, as each call interrupts the other CPUs of the process. What the system refuses keeps its pages, which
    /// is as good; the first error is told.
    pub fn release<'a>(pieces: impl IntoIterator<Item = &'a mut Idle>) -> io::Result<()> {
        // Always there: an `Idle` is the only owner.
        let regions = pieces.into_iter().filter_map(|p| Arc::get_mut(&mut p.0));
        let mut regions: Vec<&mut Region> = regions.collect();
        regions.sort_unstable_by_key(|r| r.address());
        let mut result = Ok(());
        let mut rest = &mut regions[..];
        while !rest.is_empty() {
            let mut end = rest[0].address();
            let start = end;
            let mut n = 0;
            while n < rest.len() && rest[n].address() == end && end - start < LONGEST_RUN {
                end += rest[n].len();
                n += 1;
            }
            let (run, others) = rest.split_at_mut(n);
            result = result.and(drop_pages(run, end - start));
            rest = others;
        }
        if POISONING.get() {
            for region in &regions {
                fill(region);
            }
        }
        result
    }

    /// Panics if released memory was written since, while [`poison_released_memory`] is in force; else does nothing.
    #[inline]
    pub fn check_poison(&self) {
        if POISONING.get() {
            self.look_for_changes();
        }
    }

    #[cold]
    fn look_for_changes(&self) {
        let mut bytes = vec![0; self.len()];
        asan::allow(&self.0);
        self.0.read(0, &mut bytes);
        asan::forbid(&self.0);
        if let Some(at) = bytes.iter().position(|&b| b != POISON) {
            panic!("released memory was written at byte {at} of {}", self.len());
        }
    }
}

fn fill(region: &Region) {
    asan::allow(region);
    region.write(0, &vec![POISON; region.len()]);
    asan::forbid(region);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE_SIZE;

    fn pieces(count: usize) -> Vec<Idle> {
        let region = Region::anonymous(count * PAGE_SIZE).unwrap();
        region.cut(PAGE_SIZE).into_iter().map(Idle::fresh).collect()
    }

    #[test]
    fn what_somebody_has_is_not_idle_and_what_nobody_has_reads_zero_after_release() {
        let mut all = pieces(8);
        let buffer = all.remove(3).into_buffer();
        buffer.write(0, b"kept");
        let other = buffer.slice(100, 10).unwrap();
        let buffer = Idle::of(buffer).expect_err("a slice of it is out");
        Idle::release(&mut all).unwrap();
        assert_eq!(&buffer.to_vec()[..4], b"kept");
        assert!(!Idle::are_whole(all.iter()));
        drop(other);
        all.push(Idle::of(buffer).expect("nobody has it now"));
        assert!(Idle::are_whole(all.iter()));
        assert!(!Idle::are_whole(all[1..].iter()));
        Idle::release(&mut all).unwrap();
        for idle in all {
            assert_eq!(&idle.into_buffer().to_vec()[..4], &[0; 4]);
        }
    }

    /// In a build for AddressSanitizer: whoever touches idle memory is stopped. Shown in a process of its own.
    #[cfg(pvblk_asan)]
    #[test]
    fn idle_memory_is_not_touched() {
        const CHILD: &str = "PVBLK_ASAN_CHILD";
        if std::env::var_os(CHILD).is_some() {
            let idle = pieces(2).pop().unwrap();
            let whole = idle.0.whole().unwrap();
            whole.read(PAGE_SIZE, &mut [0; 16]);
            return;
        }
        let me = std::env::current_exe().unwrap();
        let mut child = std::process::Command::new(me);
        child.args([
            "--exact",
            "idle::tests::idle_memory_is_not_touched",
            "--nocapture",
        ]);
        let out = child.env(CHILD, "1").output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(
            !out.status.success() && text.contains("use-after-poison"),
            "{text}"
        );
    }

    #[test]
    fn memory_that_is_not_ours_alone_is_never_idle() {
        assert!(Idle::of(Buffer::anonymous(PAGE_SIZE).unwrap()).is_err());
    }
}
