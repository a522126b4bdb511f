//! [`Idle`]: memory without users, the only kind of I/O memory that is given back to the system.

use crate::region::drop_pages;
use crate::{Buffer, Region, asan};
use std::cell::Cell;
use std::io;
use std::sync::Arc;

/// Approximate limit of bytes released by one call. Other threads that need the same part of the address space wait
/// for the call.
const LONGEST_RUN: usize = 16 << 20;

/// Byte that fills released memory while tests ask for it.
pub const POISON: u8 = 0xdb;

thread_local! {
    static POISONING: Cell<bool> = const { Cell::new(false) };
}

/// For tests: fills memory with [`POISON`] when this thread releases it, and checks that it is unchanged when this
/// thread uses it again. A late reader sees implausible data, and a late writer is detected. The pages become
/// resident again, so this saves no memory.
pub fn poison_released_memory() {
    POISONING.set(true);
}

/// A piece of private memory with one owner: no buffer of it exists, so no request, no device and no kernel operation
/// can reach it. The type gives no access to the bytes and can't be cloned; [`Idle::into_buffer`] takes the memory
/// into use.
#[derive(Debug)]
pub struct Idle(Arc<Region>);

impl Idle {
    /// Takes a piece from [`Region::cut`] that was never used.
    pub fn fresh(piece: Region) -> Idle {
        if POISONING.get() {
            fill(&piece);
        }
        asan::poison(&piece);
        Idle(Arc::new(piece))
    }

    /// Takes all of a buffer's piece out of use. The buffer comes back unchanged if another buffer of the piece
    /// exists, or if it isn't a piece of private memory ([`Region::cut`]).
    #[inline]
    pub fn of(buffer: Buffer) -> Result<Idle, Buffer> {
        if !buffer.region().is_piece() {
            return Err(buffer);
        }
        let (offset, len) = (buffer.offset(), buffer.len());
        let mut region = buffer.into_region();
        // Acquire: the unique owner also sees all writes of former owners.
        if Arc::get_mut(&mut region).is_some() {
            asan::poison(&region);
            return Ok(Idle(region));
        }
        // Cannot fail: the buffer was one of this region.
        Err(Buffer::from_checked(region, offset, len))
    }

    /// Takes the memory into use.
    #[inline]
    pub fn into_buffer(self) -> Buffer {
        let len = self.0.len();
        asan::unpoison(&self.0);
        Buffer::from_checked(self.0, 0, len)
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Always false: there are no empty pieces.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Address of the piece, for sorting.
    pub fn address(&self) -> usize {
        self.0.address()
    }

    /// True if `pieces` are all pieces that are left of one mapping: dropping them unmaps it.
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
        // Only pieces refer to the whole mapping, and pieces can't be cloned.
        all && Arc::strong_count(whole) == of_whole
    }

    /// True if both pieces were cut from the same mapping.
    pub fn is_beside(&self, other: &Idle) -> bool {
        self.0.whole().is_some_and(|w| other.is_of(w))
    }

    fn is_of(&self, whole: &Arc<Region>) -> bool {
        self.0.whole().is_some_and(|w| Arc::ptr_eq(w, whole))
    }

    /// Returns the pages of all pieces to the system; their next use finds zeros. Makes one call for each run of
    /// neighbours up to 16 MiB, because each call interrupts the other CPUs of the process. Pieces whose release
    /// fails keep their pages and remain usable; the first error is returned.
    pub fn release<'a>(pieces: impl IntoIterator<Item = &'a mut Idle>) -> io::Result<()> {
        // Cannot fail: an `Idle` is the only owner.
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

    /// Panics if released memory was written since its release, while [`poison_released_memory`] is in force.
    #[inline]
    pub fn check_poison(&self) {
        if POISONING.get() {
            self.look_for_changes();
        }
    }

    #[cold]
    fn look_for_changes(&self) {
        let mut bytes = vec![0; self.len()];
        asan::unpoison(&self.0);
        self.0.read(0, &mut bytes);
        asan::poison(&self.0);
        if let Some(at) = bytes.iter().position(|&b| b != POISON) {
            panic!("released memory was written at byte {at} of {}", self.len());
        }
    }
}

fn fill(region: &Region) {
    asan::unpoison(region);
    region.write(0, &vec![POISON; region.len()]);
    asan::poison(region);
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
    fn memory_with_a_buffer_is_not_idle_and_released_memory_reads_zero() {
        let mut all = pieces(8);
        let buffer = all.remove(3).into_buffer();
        buffer.write(0, b"kept");
        let other = buffer.slice(100, 10).unwrap();
        let buffer = Idle::of(buffer).expect_err("a slice of it exists");
        Idle::release(&mut all).unwrap();
        assert_eq!(&buffer.to_vec()[..4], b"kept");
        assert!(!Idle::are_whole(all.iter()));
        drop(other);
        all.push(Idle::of(buffer).expect("no other buffer exists now"));
        assert!(Idle::are_whole(all.iter()));
        assert!(!Idle::are_whole(all[1..].iter()));
        Idle::release(&mut all).unwrap();
        for idle in all {
            assert_eq!(&idle.into_buffer().to_vec()[..4], &[0; 4]);
        }
    }

    /// In a build for AddressSanitizer, an access to idle memory ends the process; a child process shows it.
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
    fn shared_memory_is_never_idle() {
        assert!(Idle::of(Buffer::anonymous(PAGE_SIZE).unwrap()).is_err());
    }
}
