//! XOR against loops that only move the same bytes: `cargo run --release -p pvblk-sys --example xor_speed`.
//!
//! The baseline loads as many streams as XOR has sources, stores one, and calculates nothing, so its rate is the
//! limit of this core's caches and memory. It is written in several ways; each row takes the fastest one. XOR and
//! baseline take turns over the same bytes, and the baseline is also compared with itself (A/A). Times are CPU time
//! of the thread, so that other processes disturb less. The program fails if XOR's rate is below 0.8 of the
//! baseline's in any row.
//!
//! `nt` rows use stores that go around the caches. They move one stream less to and from memory, since the
//! destination isn't fetched before it is written; the next reader of the sum then finds it in no cache.

#![allow(unsafe_code)]

use pvblk_sys::{Region, cpu, xor};
use rustix::time::{ClockId, clock_gettime};
use std::hint::black_box;
use std::process::ExitCode;

/// Least bytes moved by one sample.
const SAMPLE_BYTES: usize = 256 << 20;
/// Least share of the baseline's rate that XOR must reach.
const FLOOR: f64 = 0.8;

/// A loop that moves bytes: `dst` becomes one of the sources.
type Loop = unsafe fn(dst: *mut u8, srcs: &[*const u8], len: usize);

/// Loops that move bytes. Each leaves the last source in `dst`.
#[cfg(target_arch = "x86_64")]
mod baseline {
    use super::Loop;
    use std::arch::{asm, is_x86_feature_detected};

    // Written by hand, so that no compiler removes loads whose values are unused.
    macro_rules! body {
        ($to:ident, $len:ident, $load:literal, $store:literal, $fence:literal, $reg:literal, $width:literal,
            $($src:ident)*) => {
            asm!(
                "2:",
                $(
                    concat!($load, " ", $reg, "0, [{", stringify!($src), "} + {at}]"),
                    concat!($load, " ", $reg, "1, [{", stringify!($src), "} + {at} + ", $width, "]"),
                    concat!($load, " ", $reg, "2, [{", stringify!($src), "} + {at} + 2 * ", $width, "]"),
                    concat!($load, " ", $reg, "3, [{", stringify!($src), "} + {at} + 3 * ", $width, "]"),
                )*
                concat!($store, " [{to} + {at}], ", $reg, "0"),
                concat!($store, " [{to} + {at} + ", $width, "], ", $reg, "1"),
                concat!($store, " [{to} + {at} + 2 * ", $width, "], ", $reg, "2"),
                concat!($store, " [{to} + {at} + 3 * ", $width, "], ", $reg, "3"),
                concat!("add {at}, 4 * ", $width),
                "cmp {at}, {len}",
                "jb 2b",
                "vzeroupper",
                $fence,
                at = inout(reg) 0usize => _,
                len = in(reg) $len,
                to = in(reg) $to,
                $($src = in(reg) $src,)*
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                options(nostack),
            )
        };
    }

    macro_rules! baseline {
        ($name:ident, $load:literal, $store:literal, $fence:literal, $reg:literal, $width:literal) => {
            /// # Safety
            /// The CPU has the registers; `len` is a multiple of 256 and not 0; all blocks are
            /// aligned to 64 and have `len` bytes.
            unsafe fn $name(to: *mut u8, srcs: &[*const u8], len: usize) {
                // SAFETY: loads and stores are inside the blocks, whose lengths the caller checked.
                unsafe {
                    match *srcs {
                        [a, b, c] => body!(to, len, $load, $store, $fence, $reg, $width, a b c),
                        [a, b, c, d, e] => body!(to, len, $load, $store, $fence, $reg, $width, a b c d e),
                        _ => unreachable!("3 or 5 sources"),
                    }
                }
            }
        };
    }

    baseline!(ymm, "vmovdqu", "vmovdqu", "", "ymm", "32");
    baseline!(zmm, "vmovdqu64", "vmovdqu64", "", "zmm", "64");
    baseline!(ymm_around, "vmovdqu", "vmovntdq", "sfence", "ymm", "32");
    baseline!(zmm_around, "vmovdqu64", "vmovntdq", "sfence", "zmm", "64");

    /// The loops that this CPU can run: with stores through the caches, and around them.
    pub fn all() -> [Vec<(&'static str, Loop)>; 2] {
        let (mut through, mut around): (Vec<(_, Loop)>, Vec<(_, Loop)>) = (vec![], vec![]);
        if is_x86_feature_detected!("avx2") {
            through.push(("ymm", ymm));
            around.push(("ymm", ymm_around));
        }
        if is_x86_feature_detected!("avx512f") {
            through.push(("zmm", zmm));
            around.push(("zmm", zmm_around));
        }
        [through, around]
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod baseline {
    /// Nothing: no baseline is written for this CPU.
    pub fn all() -> [Vec<(&'static str, super::Loop)>; 2] {
        [vec![], vec![]]
    }
}

/// Streams of a row: the sources and, last, the destination. Aligned to pages.
struct Streams {
    memory: Vec<Vec<u8>>,
    span: usize,
}

impl Streams {
    fn new(sources: usize, span: usize) -> Streams {
        let fill = |n: usize| {
            (0..span + PAGE)
                .map(|i| ((i * (n + 3)) >> 3) as u8)
                .collect()
        };
        Streams {
            memory: (0..=sources).map(fill).collect(),
            span,
        }
    }

    /// The destination and the sources.
    fn split<const N: usize>(&mut self) -> (&mut [u8], [&[u8]; N]) {
        let span = self.span;
        let start = |m: &[u8]| m.as_ptr().align_offset(PAGE);
        let (dst, srcs) = self.memory.split_last_mut().expect("streams");
        let at = start(dst);
        let src = |n: usize| &srcs[n][start(&srcs[n])..][..span];
        (&mut dst[at..at + span], std::array::from_fn(src))
    }
}

const PAGE: usize = 4096;

/// One comparison, and the memory that it covers.
struct Comparison {
    name: &'static str,
    /// Bytes of one call.
    block: usize,
    /// Bytes of one stream.
    span: usize,
    /// Pairs of samples.
    rounds: usize,
    /// XOR works on regions of the same size, not on the baseline's memory.
    regions: bool,
}

const ROWS: &[Comparison] = &[
    row("L1", 4096, 4096, 101, false),
    row("L1, regions", 4096, 4096, 101, true),
    row("L2", 64 << 10, 64 << 10, 101, false),
    row("L2, regions", 64 << 10, 64 << 10, 101, true),
    row("memory", 4096, 256 << 20, 15, false),
    row("memory", 64 << 10, 256 << 20, 15, false),
];

const fn row(
    name: &'static str,
    block: usize,
    span: usize,
    rounds: usize,
    regions: bool,
) -> Comparison {
    Comparison {
        name,
        block,
        span,
        rounds,
        regions,
    }
}

/// CPU time of this thread, in nanoseconds.
fn thread_ns() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

/// Nanoseconds of one pass over the span; `call` runs once for each block.
fn sample(row: &Comparison, sources: usize, mut call: impl FnMut(usize)) -> f64 {
    let rounds = SAMPLE_BYTES.div_ceil(row.span * (sources + 1));
    let begin = thread_ns();
    for _ in 0..rounds {
        for at in (0..row.span).step_by(row.block) {
            call(at);
        }
    }
    (thread_ns() - begin) / rounds as f64
}

fn run_baseline<const N: usize>(
    f: Loop,
    row: &Comparison,
    dst: &mut [u8],
    srcs: &[&[u8]; N],
) -> f64 {
    let (to, block) = (dst.as_mut_ptr(), row.block);
    sample(row, N, |at| {
        let from = srcs.map(|src| src[at..at + block].as_ptr());
        // SAFETY: blocks are pages inside the streams; the CPU was asked for the registers.
        unsafe { f(to.add(at), black_box(&from), block) }
    })
}

fn run_kernel<const N: usize>(
    kernel: &xor::Kernel,
    row: &Comparison,
    dst: &mut [u8],
    srcs: &[&[u8]; N],
) -> f64 {
    sample(row, N, |at| {
        let from = srcs.map(|src| &src[at..at + row.block]);
        kernel.xor_of(&mut dst[at..at + row.block], black_box(&from));
    })
}

fn run_regions<const N: usize>(row: &Comparison, to: &Region, srcs: &[Region; N]) -> f64 {
    let srcs = srcs.each_ref();
    sample(row, N, |at| {
        let from = srcs.map(|src| (src, at));
        to.xor_from(at, black_box(&from), row.block);
    })
}

fn run_copy(row: &Comparison, dst: &mut [u8], src: &[u8]) -> f64 {
    sample(row, 1, |at| {
        dst[at..at + row.block].copy_from_slice(black_box(&src[at..at + row.block]));
    })
}

/// Smallest, median and largest.
fn spread(mut of: Vec<f64>) -> [f64; 3] {
    of.sort_by(f64::total_cmp);
    [of[0], of[of.len() / 2], of[of.len() - 1]]
}

fn median(of: Vec<f64>) -> f64 {
    spread(of)[1]
}

/// The loop that is fastest here. Panics if it doesn't move everything.
fn fastest<const N: usize>(
    loops: &[(&'static str, Loop)],
    row: &Comparison,
    dst: &mut [u8],
    srcs: &[&[u8]; N],
) -> (&'static str, Loop) {
    let mut best = (f64::INFINITY, loops[0]);
    for &(name, f) in loops {
        let times = (0..5).map(|_| run_baseline(f, row, dst, srcs)).collect();
        let time = median(times);
        if time < best.0 {
            best = (time, (name, f));
        }
    }
    dst.fill(0);
    run_baseline(best.1.1, row, dst, srcs);
    assert!(dst == srcs[N - 1]);
    best.1
}

/// Prints a row; returns XOR's share of the baseline's rate.
fn compare<const N: usize>(
    row: &Comparison,
    [through, around]: &[Vec<(&'static str, Loop)>; 2],
) -> f64 {
    let mut streams = Streams::new(N, row.span);
    let (dst, srcs): (_, [_; N]) = streams.split();
    let region = |n: usize| {
        let region = Region::anonymous(row.span).expect("memory");
        region.write(0, srcs[n]);
        region
    };
    let regions: Option<(Region, [Region; N])> =
        (row.regions).then(|| (region(0), std::array::from_fn(region)));
    let (name, baseline) = fastest(through, row, dst, &srcs);
    let (_, around) = fastest(around, row, dst, &srcs);

    let (mut base, mut again, mut xor) = (vec![], vec![], vec![]);
    let (mut nt, mut copy) = (vec![], vec![]);
    let mut kernels: Vec<(&xor::Kernel, Vec<f64>)> = xor::kernels().map(|k| (k, vec![])).collect();
    for round in 0..row.rounds {
        let (first, last) = match round % 2 {
            0 => (&mut base, &mut again),
            _ => (&mut again, &mut base),
        };
        first.push(run_baseline(baseline, row, dst, &srcs));
        xor.push(match &regions {
            Some((to, from)) => run_regions(row, to, from),
            None => run_kernel(xor::chosen(), row, dst, &srcs),
        });
        last.push(run_baseline(baseline, row, dst, &srcs));
        nt.push(run_baseline(around, row, dst, &srcs));
        if round % 5 == 0 {
            copy.push(run_copy(row, dst, srcs[0]));
            for (kernel, times) in &mut kernels {
                times.push(run_kernel(kernel, row, dst, &srcs));
            }
        }
    }
    let ratios = |a: &[f64], b: &[f64]| spread(a.iter().zip(b).map(|(a, b)| a / b).collect());
    let [aa_low, aa, aa_high] = ratios(&base, &again);
    let [low, ratio, high] = ratios(&base, &xor);
    let [_, nt_ratio, _] = ratios(&nt, &xor);
    let rate = |streams: usize, ns: Vec<f64>| (streams * row.span) as f64 / median(ns);
    print!(
        "{:<11} {:>6} {N:>7}  {:>6.1}  {:>6.1} {name}  {ratio:.2} ({low:.2}..{high:.2})  {aa:.2} ({aa_low:.2}..{aa_high:.2})",
        row.name,
        row.block,
        rate(N + 1, xor),
        rate(N + 1, base),
    );
    print!(
        "  {:>6.1} {nt_ratio:>6.2} {:>7.1} ",
        rate(N + 1, nt),
        rate(2, copy)
    );
    for (_, times) in kernels {
        print!(" {:>8.1}", rate(N + 1, times));
    }
    println!("{}", if ratio < FLOOR { "  BELOW" } else { "" });
    ratio
}

fn main() -> ExitCode {
    let baselines = baseline::all();
    if baselines[0].is_empty() {
        println!("no baseline is written for this CPU: nothing to compare with");
        return ExitCode::SUCCESS;
    }
    if let Some(&last) = cpu::allowed().last() {
        let _ = cpu::pin(last);
    }
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if let Some(model) = info.lines().find(|l| l.starts_with("model name")) {
        println!("{model}");
    }
    println!(
        "XOR by {}. GB/s: bytes loaded and stored; medians. Ratios of rates in pairs: median (least..most).",
        xor::chosen().name()
    );
    print!(
        "{:<11} {:>6} {:>7}  {:>6}  {:>6} {:<3}  {:<17}  {:<17}  {:>6} {:>6} {:>7} ",
        "set", "block", "sources", "XOR", "base", "", "XOR/base", "A/A", "nt", "XOR/nt", "memcpy"
    );
    for kernel in xor::kernels() {
        print!(" {:>8}", kernel.name());
    }
    println!();
    let mut worst = f64::INFINITY;
    for row in ROWS {
        worst = worst.min(compare::<3>(row, &baselines));
        worst = worst.min(compare::<5>(row, &baselines));
    }
    if worst < FLOOR {
        println!("a ratio is below {FLOOR}: {worst:.2}");
        return ExitCode::FAILURE;
    }
    println!("every ratio XOR/base is at least {FLOOR}; the least is {worst:.2}");
    ExitCode::SUCCESS
}
