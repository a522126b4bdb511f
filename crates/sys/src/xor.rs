//! XOR of byte blocks at the speed of memory and caches.
//!
//! A pass loads every byte of every source once, sums in registers, and stores once. One loop is compiled for several
//! instruction sets; the widest that the CPU has is chosen at the first use. Stores go through the caches, because
//! the member's I/O reads the parity again soon.

use std::mem::MaybeUninit;
use std::sync::LazyLock;

/// Most sources of one pass.
pub(crate) const MAX_STREAMS: usize = 64;

/// Registers that one turn of the loop fills; this many hide the cost of counting.
const UNROLL: usize = 4;

/// The loops, compiled for one instruction set.
pub struct Kernel {
    name: &'static str,
    /// Sums a common number of streams; returns the bytes done. Safety: as [`usual`].
    usual: unsafe fn(*mut u8, &[*const u8], usize) -> usize,
    /// Sums the bytes that `usual` left. Safety: as [`usual`].
    rest: unsafe fn(*mut u8, &[*const u8], usize, usize),
    /// True if the given number of bytes are zero. Safety: as [`scan`].
    is_zero: unsafe fn(*const u8, usize) -> bool,
}

impl Kernel {
    /// Name of the instruction set.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// [`xor_of`] by this kernel.
    ///
    /// Panics on different lengths.
    #[inline]
    pub fn xor_of(&self, dst: &mut [u8], srcs: &[&[u8]]) {
        let (len, to) = (dst.len(), dst.as_mut_ptr());
        if !(1..=MAX_STREAMS).contains(&srcs.len()) {
            return self.xor_of_many(dst, srcs);
        }
        let streams = srcs.iter().map(|src| start(src, len));
        // SAFETY: 1 to 64 pointers to `len` bytes each, all of private memory.
        unsafe { self.pass(to, streams, len) };
    }

    #[cold]
    fn xor_of_many(&self, dst: &mut [u8], srcs: &[&[u8]]) {
        dst.fill(0);
        self.xor_into(dst, srcs);
    }

    /// [`xor_into`] by this kernel.
    ///
    /// Panics on different lengths.
    pub fn xor_into(&self, dst: &mut [u8], srcs: &[&[u8]]) {
        let (len, to) = (dst.len(), dst.as_mut_ptr());
        for part in srcs.chunks(MAX_STREAMS - 1) {
            let own = std::iter::once(to.cast_const());
            let streams = own.chain(part.iter().map(|src| start(src, len)));
            // SAFETY: 2 to 64 pointers to `len` bytes each; `to` itself is one of them.
            unsafe { self.pass(to, streams, len) };
        }
    }

    /// Stores the XOR of the streams to `to`.
    ///
    /// # Safety
    /// 1 to [`MAX_STREAMS`] streams, and the conditions of [`usual`].
    #[inline]
    pub(crate) unsafe fn pass(
        &self,
        to: *mut u8,
        streams: impl Iterator<Item = *const u8>,
        len: usize,
    ) {
        // Left uninitialised: clearing 512 bytes takes a tenth of the time of a page's XOR.
        let mut list = [const { MaybeUninit::uninit() }; MAX_STREAMS];
        let mut count = 0;
        for (slot, stream) in list.iter_mut().zip(streams) {
            slot.write(stream);
            count += 1;
        }
        // SAFETY: the first `count` were written just now.
        let list = unsafe { list[..count].assume_init_ref() };
        // SAFETY: promised by the caller; only kernels that the CPU can run are handed out.
        unsafe {
            let done = (self.usual)(to, list, len);
            if done < len {
                (self.rest)(to, list, done, len);
            }
        }
    }

    /// True if `len` bytes are zero.
    ///
    /// # Safety
    /// The conditions of [`scan`].
    pub(crate) unsafe fn is_zero(&self, from: *const u8, len: usize) -> bool {
        // SAFETY: promised by the caller; only kernels that the CPU can run are handed out.
        unsafe { (self.is_zero)(from, len) }
    }
}

/// First byte of a source. Panics if the source doesn't have `len` bytes.
#[inline]
fn start(src: &[u8], len: usize) -> *const u8 {
    assert!(src.len() == len, "blocks of different lengths");
    src.as_ptr()
}

/// XORs every source into `dst`. Without sources, `dst` is unchanged.
///
/// Takes any number of sources of any length; reads and writes `dst` once for each 63 of them. Panics on different
/// lengths; the contents of `dst` are then unspecified.
#[inline]
pub fn xor_into(dst: &mut [u8], srcs: &[&[u8]]) {
    chosen().xor_into(dst, srcs);
}

/// Makes `dst` the XOR of the sources; zeros if there are none.
///
/// Up to 64 sources, `dst` is only written. Panics on different lengths; the contents of `dst` are then unspecified.
#[inline]
pub fn xor_of(dst: &mut [u8], srcs: &[&[u8]]) {
    chosen().xor_of(dst, srcs);
}

/// The kernel in use: the first of [`kernels`].
#[inline]
pub fn chosen() -> &'static Kernel {
    static CHOSEN: LazyLock<&Kernel> =
        LazyLock::new(|| kernels().next().expect("the portable one is always there"));
    &CHOSEN
}

/// The kernels that this CPU can run, fastest first.
pub fn kernels() -> impl Iterator<Item = &'static Kernel> {
    #[cfg(target_arch = "x86_64")]
    let wide = x86::kernels();
    #[cfg(not(target_arch = "x86_64"))]
    let wide = std::iter::empty();
    wide.chain([&PORTABLE])
}

static PORTABLE: Kernel = Kernel {
    name: "portable",
    usual: usual::<[u64; 2]>,
    rest: rest::<[u64; 2]>,
    is_zero: scan::<[u64; 2]>,
};

/// A vector register.
///
/// # Safety
/// For all methods: the CPU has the instructions. For `load` and `store`: `size_of::<Self>()` bytes may be read or
/// written at the address, at any alignment. Others may write to them concurrently.
trait Register: Copy {
    unsafe fn load(from: *const u8) -> Self;
    unsafe fn store(self, to: *mut u8);
    unsafe fn xor(self, other: Self) -> Self;
    unsafe fn or(self, other: Self) -> Self;
    unsafe fn is_zero(self) -> bool;
}

// The width that all CPUs with vectors have; compilers put it into one register.
impl Register for [u64; 2] {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: promised by the caller.
        unsafe { from.cast::<Self>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: promised by the caller.
        unsafe { to.cast::<Self>().write_unaligned(self) }
    }

    #[inline(always)]
    unsafe fn xor(self, other: Self) -> Self {
        [self[0] ^ other[0], self[1] ^ other[1]]
    }

    #[inline(always)]
    unsafe fn or(self, other: Self) -> Self {
        [self[0] | other[0], self[1] | other[1]]
    }

    #[inline(always)]
    unsafe fn is_zero(self) -> bool {
        self[0] | self[1] == 0
    }
}

/// Makes `len` bytes at `to` the sum of the streams, for common numbers of streams: the number is a constant, and all
/// addresses stay in registers. Returns the bytes done. The function has no other code, because it is called for
/// single pages, where saving registers would cost measurable time.
///
/// # Safety
/// The CPU has the instructions of `L`. Each stream has `len` bytes that may be read, `to` as many that may be
/// written. A stream may be `to` itself. If others overlap it, or others write concurrently, the result is
/// unspecified bytes: no decision depends on a value read here, and each is read once.
#[inline(always)]
unsafe fn usual<L: Register>(to: *mut u8, streams: &[*const u8], len: usize) -> usize {
    // SAFETY: `groups` asks the same.
    unsafe {
        match *streams {
            [a, b] => groups::<L, UNROLL>(to, &[a, b], 0, len),
            [a, b, c] => groups::<L, UNROLL>(to, &[a, b, c], 0, len),
            [a, b, c, d] => groups::<L, UNROLL>(to, &[a, b, c, d], 0, len),
            [a, b, c, d, e] => groups::<L, UNROLL>(to, &[a, b, c, d, e], 0, len),
            [a, b, c, d, e, f] => groups::<L, UNROLL>(to, &[a, b, c, d, e, f], 0, len),
            _ => 0,
        }
    }
}

/// Sums the bytes that [`usual`] left: from byte `at` on, of any number of streams but none.
///
/// # Safety
/// As [`usual`]; `at` is at most `len`.
#[inline(always)]
unsafe fn rest<L: Register>(to: *mut u8, streams: &[*const u8], at: usize, len: usize) {
    // SAFETY: all of these ask the same.
    unsafe {
        let at = groups::<L, UNROLL>(to, streams, at, len);
        let at = groups::<L, 1>(to, streams, at, len);
        if at < len {
            tail(to, streams, at, len - at);
        }
    }
}

/// Sums all whole groups of `N` registers from byte `at` on; returns the byte after the last.
///
/// # Safety
/// As [`usual`].
#[inline(always)]
unsafe fn groups<L: Register, const N: usize>(
    to: *mut u8,
    streams: &[*const u8],
    mut at: usize,
    len: usize,
) -> usize {
    let width = size_of::<L>();
    while len - at >= N * width {
        // SAFETY: `at + N * width <= len`. A group is loaded whole before it is stored, so `to` may
        // be among the streams.
        unsafe {
            let load = |stream: *const u8, i: usize| L::load(stream.add(at + i * width));
            let mut sum: [L; N] = std::array::from_fn(|i| load(streams[0], i));
            for &stream in &streams[1..] {
                for (i, sum) in sum.iter_mut().enumerate() {
                    *sum = sum.xor(load(stream, i));
                }
            }
            for (i, sum) in sum.into_iter().enumerate() {
                sum.store(to.add(at + i * width));
            }
        }
        at += N * width;
    }
    at
}

/// Bytes of the widest register.
const WIDEST: usize = 64;

/// Sums `rest` bytes from byte `at`, fewer than [`WIDEST`]. Only odd lengths need it.
///
/// # Safety
/// As [`usual`].
#[cold]
#[inline(never)]
unsafe fn tail(to: *mut u8, streams: &[*const u8], at: usize, rest: usize) {
    let mut sum = [0; WIDEST];
    for &stream in streams {
        // SAFETY: `at + rest` is the length that the caller promised.
        let part = unsafe { padded(stream.add(at), rest) };
        for (sum, byte) in sum.iter_mut().zip(part) {
            *sum ^= byte;
        }
    }
    // SAFETY: as above; all streams were loaded before this store.
    unsafe { std::ptr::copy_nonoverlapping(sum.as_ptr(), to.add(at), rest) };
}

/// `len` bytes, fewer than [`WIDEST`], followed by zeros.
///
/// # Safety
/// The bytes may be read. Others may write to them concurrently.
unsafe fn padded(from: *const u8, len: usize) -> [u8; WIDEST] {
    let mut bytes = [0; WIDEST];
    // SAFETY: promised by the caller; the slice operation checks that `bytes` is as long.
    unsafe { std::ptr::copy_nonoverlapping(from, bytes[..len].as_mut_ptr(), len) };
    bytes
}

/// True if `len` bytes are zero; returns soon after the first byte that isn't.
///
/// # Safety
/// The CPU has the instructions of `L`; `len` bytes may be read. Others may write to them concurrently.
#[inline(always)]
unsafe fn scan<L: Register>(from: *const u8, len: usize) -> bool {
    let (width, mut at) = (size_of::<L>(), 0);
    // SAFETY: no load goes beyond `len`.
    unsafe {
        while len - at >= UNROLL * width {
            let mut seen = L::load(from.add(at));
            for i in 1..UNROLL {
                seen = seen.or(L::load(from.add(at + i * width)));
            }
            if !seen.is_zero() {
                return false;
            }
            at += UNROLL * width;
        }
        while len - at >= width {
            if !L::load(from.add(at)).is_zero() {
                return false;
            }
            at += width;
        }
        at == len || padded(from.add(at), len - at) == [0; WIDEST]
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Kernel, Register};
    use std::arch::is_x86_feature_detected as has;
    use std::arch::x86_64::{self as cpu, __m256i, __m512i};

    /// The kernels that this CPU can run, fastest first.
    pub fn kernels() -> impl Iterator<Item = &'static Kernel> {
        // The first CPUs with AVX-512 lower their clock for it; those that also have VBMI2 don't.
        let avx512 = has!("avx512f") && has!("avx512vbmi2");
        let avx512 = avx512.then_some(&AVX512);
        avx512.into_iter().chain(has!("avx2").then_some(&AVX2))
    }

    macro_rules! register {
        ($register:ident, $load:ident, $store:ident, $xor:ident, $or:ident, $test:ident is $zero:literal) => {
            impl Register for $register {
                #[inline(always)]
                unsafe fn load(from: *const u8) -> Self {
                    // SAFETY: promised by the caller, as in all of these.
                    unsafe { cpu::$load(from.cast()) }
                }

                #[inline(always)]
                unsafe fn store(self, to: *mut u8) {
                    // SAFETY: as `load`.
                    unsafe { cpu::$store(to.cast(), self) }
                }

                #[inline(always)]
                unsafe fn xor(self, other: Self) -> Self {
                    // SAFETY: as `load`.
                    unsafe { cpu::$xor(self, other) }
                }

                #[inline(always)]
                unsafe fn or(self, other: Self) -> Self {
                    // SAFETY: as `load`.
                    unsafe { cpu::$or(self, other) }
                }

                #[inline(always)]
                unsafe fn is_zero(self) -> bool {
                    // SAFETY: as `load`.
                    unsafe { cpu::$test(self, self) == $zero }
                }
            }
        };
    }

    // The last argument is the test's result for a register of zeros, tested with itself.
    register!(
        __m256i,
        _mm256_loadu_si256,
        _mm256_storeu_si256,
        _mm256_xor_si256,
        _mm256_or_si256,
        _mm256_testz_si256 is 1
    );
    register!(
        __m512i,
        _mm512_loadu_si512,
        _mm512_storeu_si512,
        _mm512_xor_si512,
        _mm512_or_si512,
        _mm512_test_epi64_mask is 0
    );

    macro_rules! kernel {
        ($kernel:ident, $name:literal, $feature:literal, $register:ident) => {
            static $kernel: Kernel = {
                #[target_feature(enable = $feature)]
                unsafe fn usual(to: *mut u8, streams: &[*const u8], len: usize) -> usize {
                    // SAFETY: the same is promised by the caller; the feature is enabled here.
                    unsafe { super::usual::<$register>(to, streams, len) }
                }

                #[target_feature(enable = $feature)]
                unsafe fn rest(to: *mut u8, streams: &[*const u8], at: usize, len: usize) {
                    // SAFETY: as above.
                    unsafe { super::rest::<$register>(to, streams, at, len) }
                }

                #[target_feature(enable = $feature)]
                unsafe fn is_zero(from: *const u8, len: usize) -> bool {
                    // SAFETY: as above.
                    unsafe { super::scan::<$register>(from, len) }
                }

                Kernel {
                    name: $name,
                    usual,
                    rest,
                    is_zero,
                }
            };
        };
    }

    kernel!(AVX2, "avx2", "avx2", __m256i);
    kernel!(AVX512, "avx512", "avx512f", __m512i);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PAGE_SIZE, Region, create_sealed};
    use std::os::fd::AsFd;

    fn bytes(rng: &mut fastrand::Rng, len: usize) -> Vec<u8> {
        std::iter::repeat_with(|| rng.u8(..)).take(len).collect()
    }

    /// Lengths around every width, and some at random.
    fn lengths(rng: &mut fastrand::Rng) -> Vec<usize> {
        let edges = [8usize, 16, 32, 64, 128, 256, 512, 4096];
        let mut lengths = vec![0, 1, 2, 3];
        lengths.extend(edges.iter().flat_map(|e| [e - 1, *e, e + 1]));
        lengths.extend(std::iter::repeat_with(|| rng.usize(..9000)).take(20));
        lengths
    }

    #[test]
    fn every_kernel_agrees_with_single_bytes() {
        let mut rng = pvblk_testing::random();
        for kernel in kernels() {
            for len in lengths(&mut rng) {
                for count in [0, 1, 2, 3, 4, 5, 6, 7, 12, 63, 64, 65, 130] {
                    if count > 12 && len > 1000 {
                        continue;
                    }
                    let data: Vec<(usize, Vec<u8>)> = (0..count)
                        .map(|_| (rng.usize(..64), bytes(&mut rng, len + 64)))
                        .collect();
                    let srcs: Vec<&[u8]> = data.iter().map(|(at, b)| &b[*at..at + len]).collect();
                    let before = bytes(&mut rng, len + 64);
                    let at = rng.usize(..64);
                    let by_hand = |mut all: Vec<u8>, keep: bool| {
                        for i in 0..len {
                            let old = if keep { all[at + i] } else { 0 };
                            all[at + i] = srcs.iter().fold(old, |sum, src| sum ^ src[i]);
                        }
                        all
                    };
                    let what = format!("{} {count} of {len}", kernel.name());
                    let mut dst = before.clone();
                    kernel.xor_into(&mut dst[at..at + len], &srcs);
                    assert!(dst == by_hand(before.clone(), true), "xor_into {what}");
                    dst.clone_from(&before);
                    kernel.xor_of(&mut dst[at..at + len], &srcs);
                    assert!(dst == by_hand(before, false), "xor_of {what}");
                }
            }
        }
    }

    #[test]
    fn every_kernel_detects_a_single_bit() {
        let mut rng = pvblk_testing::random();
        for kernel in kernels() {
            for len in lengths(&mut rng) {
                let at = rng.usize(..64);
                let mut all = vec![0xff; len + 64];
                all[at..at + len].fill(0);
                // SAFETY: `len` bytes from `at` on are there.
                let is_zero = |all: &[u8]| unsafe { kernel.is_zero(all[at..].as_ptr(), len) };
                assert!(is_zero(&all), "{} {len}", kernel.name());
                for i in (0..len).filter(|i| len < 600 || i % 61 == 0) {
                    all[at + i] = 1 << rng.u8(..8);
                    assert!(!is_zero(&all), "{} {i} of {len}", kernel.name());
                    all[at + i] = 0;
                }
            }
        }
    }

    fn region(rng: &mut fastrand::Rng) -> Region {
        let region = Region::anonymous(4 * PAGE_SIZE).unwrap();
        region.write(0, &bytes(rng, 4 * PAGE_SIZE));
        region
    }

    fn contents(region: &Region) -> Vec<u8> {
        let mut all = vec![0; region.len()];
        region.read(0, &mut all);
        all
    }

    #[test]
    fn regions_agree_with_single_bytes() {
        let mut rng = pvblk_testing::random();
        let regions: Vec<Region> = (0..6).map(|_| region(&mut rng)).collect();
        for round in 0..600 {
            let len = match round % 3 {
                0 => PAGE_SIZE,
                1 => rng.usize(..300),
                _ => rng.usize(..2 * PAGE_SIZE),
            };
            let to = &regions[0];
            let at = rng.usize(..=to.len() - len);
            let before: Vec<Vec<u8>> = regions.iter().map(contents).collect();
            let mut expected = before[0].clone();
            let sources: Vec<(usize, usize)> = (0..rng.usize(1..=MAX_STREAMS))
                .map(|_| match rng.usize(..regions.len()) {
                    0 => (0, at),
                    n => (n, rng.usize(..=to.len() - len)),
                })
                .collect();
            for i in 0..len {
                expected[at + i] = sources.iter().fold(0, |x, &(n, at)| x ^ before[n][at + i]);
            }
            let given: Vec<_> = sources.iter().map(|&(n, at)| (&regions[n], at)).collect();
            to.xor_from(at, &given, len);
            assert!(contents(to) == expected, "{sources:?} of {len} to {at}");
            for (region, before) in regions.iter().zip(&before).skip(1) {
                assert!(contents(region) == *before);
            }

            let mut private = bytes(&mut rng, len);
            let by_hand: Vec<u8> = (private.iter().zip(&expected[at..]))
                .map(|(a, b)| a ^ b)
                .collect();
            to.xor_to(at, &mut private);
            assert!(private == by_hand);

            to.write(at, &private);
            let zeros = private.iter().all(|&b| b == 0);
            assert_eq!(to.is_zero(at, len), zeros);
            to.zero(at, len);
            assert!(to.is_zero(at, len));
            to.write(at, &private);
        }
    }

    #[test]
    #[should_panic(expected = "different lengths")]
    fn lengths_must_agree() {
        xor_into(&mut [0; 8], &[&[0; 8], &[0; 9]]);
    }

    #[test]
    #[should_panic(expected = "1 to 64 sources")]
    fn a_sum_without_sources_panics() {
        region(&mut pvblk_testing::random()).xor_from(0, &[], 1);
    }

    #[test]
    #[should_panic(expected = "1 to 64 sources")]
    fn too_many_sources_panic() {
        let region = region(&mut pvblk_testing::random());
        region.xor_from(0, &[(&region, 0); MAX_STREAMS + 1], 1);
    }

    #[test]
    #[should_panic(expected = "range outside the region")]
    fn a_source_outside_panics() {
        let region = region(&mut pvblk_testing::random());
        let end = region.len() - 7;
        region.xor_from(0, &[(&region, 0), (&region, end)], 8);
    }

    #[test]
    #[should_panic(expected = "range outside the region")]
    fn a_destination_outside_panics() {
        let region = region(&mut pvblk_testing::random());
        region.xor_from(region.len() - 7, &[(&region, 0)], 8);
    }

    #[test]
    #[should_panic(expected = "range outside the region")]
    fn zeros_outside_panic() {
        let region = region(&mut pvblk_testing::random());
        region.is_zero(usize::MAX, 2);
    }

    #[test]
    #[should_panic(expected = "region is read-only")]
    fn a_destination_must_be_writable() {
        let file = create_sealed("t", PAGE_SIZE as u64).unwrap();
        let region = Region::shared(file.as_fd(), 0, PAGE_SIZE, false).unwrap();
        region.xor_from(0, &[(&region, 0)], 1);
    }
}
