//! Counts random reads of 4 KiB with 32 in flight: `disk_randread SPEC SECONDS`.

use pvblk_disk::{Disk, Error, Request};
use std::time::{Duration, Instant};

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let spec = args.next().unwrap_or_else(|| "mem:64M".into());
    let seconds = args.next().and_then(|s| s.parse().ok()).unwrap_or(1);
    let disk = Disk::open(&spec)?;
    let blocks = disk.size_bytes() / 4096;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % blocks * 4096
    };
    let mut queue = disk.queue(32)?;
    for _ in 0..queue.depth() {
        queue.push(Request::read(next(), disk.buffer(4096)?))?;
    }
    let (mut reads, mut done) = (0, Vec::new());
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(seconds) {
        reads += queue.wait(&mut done, None)?;
        for completion in done.drain(..) {
            completion.result?;
            if let Some(buffer) = completion.buffer {
                queue.push(Request::read(next(), buffer))?;
            }
        }
    }
    let rate = reads as f64 / begin.elapsed().as_secs_f64();
    println!("{reads} reads, {rate:.0} a second");
    Ok(())
}
