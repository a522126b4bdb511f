//! Speed of the computation of parity, beside that of only reading the same memory: `cargo run --release
//! --example raid5_xor`. It prints the figures and asserts nothing, since they depend on the machine.

use pvblk_raid5::xor_of;
use std::hint::black_box;
use std::time::Instant;

fn main() {
    println!("sources  block_bytes  xor_GB/s  read_GB/s  ratio   (bytes of sources; best of 7)");
    for sources in [2usize, 3, 4, 7, 15] {
        for block in [4096usize, 65536, 1 << 20, 32 << 20] {
            let data: Vec<Vec<u8>> = (0..sources).map(|n| vec![n as u8 + 1; block]).collect();
            let srcs: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
            let mut dst = vec![0u8; block];
            let rounds = ((1usize << 28) / (block * sources)).max(2);
            let bytes = (rounds * sources * block) as f64;
            let xor = best(|| {
                for _ in 0..rounds {
                    xor_of(black_box(&mut dst), black_box(&srcs));
                }
            });
            let read = best(|| {
                for _ in 0..rounds {
                    for src in black_box(&srcs) {
                        black_box(sum(src));
                    }
                }
            });
            println!(
                "{sources:7}  {block:11}  {:8.1}  {:9.1}  {:5.2}",
                bytes / xor / 1e9,
                bytes / read / 1e9,
                read / xor
            );
        }
    }
}

/// Reads everything, and does as little else as a vector instruction can.
fn sum(bytes: &[u8]) -> [u64; 4] {
    let (lanes, _) = bytes.as_chunks::<32>();
    let mut sum = [0u64; 4];
    for lane in lanes {
        for (s, word) in sum.iter_mut().zip(lane.as_chunks::<8>().0) {
            *s |= u64::from_ne_bytes(*word);
        }
    }
    sum
}

fn best(mut run: impl FnMut()) -> f64 {
    let times = (0..7).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}
