//! Cost of random reads of 4 KiB of a file that is in memory or in the page cache, by each way that a queue could take: plain reads, reads that don't
//! wait (`RWF_NOWAIT`), and io_uring in batches; and of the volume `file:` on top of them.
//!
//! `cargo run --release -p pvblk-volume --example file_read_cost FILE [MIB]`: makes the file if there is none; default 256 MiB.

use pvblk_block::{BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Request};
use pvblk_sys::fileio;
use pvblk_sys::uring::{FileOp, Uring};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

const ROUNDS: u32 = 7;
const READS: u64 = 100_000;
const BLOCK: u64 = 4096;
const DEPTH: usize = 32;

/// Nanoseconds for each read: the median of several rounds, the least and the greatest.
fn times(mut round: impl FnMut()) -> String {
    round();
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begin = Instant::now();
            round();
            begin.elapsed().as_secs_f64() * 1e9 / READS as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let middle = times[times.len() / 2];
    format!(
        "{middle:7.0}  ({:.0} to {:.0})",
        times[0],
        times[times.len() - 1]
    )
}

/// Reads all of `order` by io_uring, `batch` at a time, each batch with one system call. Returns how many weren't done at the end of that call.
fn by_ring(ring: &mut Uring, order: &[u64], buffers: &[Buffer], batch: usize) -> u64 {
    let mut late = 0;
    for some in order.chunks(batch) {
        for (at, buffer) in some.iter().zip(buffers) {
            let op = FileOp::Read { offset: at * BLOCK };
            ring.push(op, vec![buffer.clone()], 0).expect("room");
        }
        ring.submit().expect("submitted");
        let mut done = 0;
        while let Some(completion) = ring.reap() {
            done += 1;
            completion.result.expect("read");
        }
        late += (some.len() - done) as u64;
        while done < some.len() {
            done += usize::from(ring.reap().is_some());
        }
    }
    late
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("the name of a file");
    let mib: u64 = arguments.next().map_or(256, |a| a.parse().expect("MiB"));
    let blocks = (mib << 20) / BLOCK;
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .expect("the file");
    let noise = Buffer::anonymous(1 << 20).expect("memory");
    noise.write(0, &[0x5a; 1 << 20]);
    for n in 0..mib {
        fileio::write_at(file.as_fd(), n << 20, std::slice::from_ref(&noise)).expect("written");
    }
    let mut rng = fastrand::Rng::with_seed(1);
    let order: Vec<u64> = (0..READS).map(|_| rng.u64(..blocks)).collect();
    let buffers: Vec<Buffer> = (0..DEPTH)
        .map(|_| Buffer::anonymous(BLOCK as usize).expect("memory"))
        .collect();

    println!("nanoseconds for each of {READS} reads of 4 KiB of {path}, {mib} MiB:");
    for (name, wait) in [("read", true), ("read, RWF_NOWAIT", false)] {
        let one = |(n, at): (usize, &u64)| {
            let buffer = std::slice::from_ref(&buffers[n % DEPTH]);
            fileio::read_some(file.as_fd(), at * BLOCK, buffer, 0, wait)
        };
        match one((0, &0)) {
            Err(e) => println!("  {name:32} {e}"),
            Ok(_) => {
                let all = || {
                    order
                        .iter()
                        .enumerate()
                        .for_each(|x| _ = one(x).expect("read"))
                };
                println!("  {name:32} {}", times(all));
            }
        }
    }
    let file: Arc<OwnedFd> = Arc::new(file.into());
    match Uring::new(Arc::clone(&file), DEPTH as u32) {
        Err(e) => println!("  io_uring                         {e}"),
        Ok(mut ring) => {
            let op = FileOp::Read { offset: 0 };
            ring.push(op, vec![buffers[0].clone()], 0).expect("room");
            ring.submit().expect("submitted");
            let first = loop {
                if let Some(first) = ring.reap() {
                    break first.result;
                }
            };
            for batch in [1, 8, 32] {
                let name = format!("io_uring, {batch} a system call");
                match &first {
                    Err(e) => println!("  {name:32} {e}"),
                    Ok(_) => {
                        let mut late = 0;
                        let told = times(|| late += by_ring(&mut ring, &order, &buffers, batch));
                        println!("  {name:32} {told}, {late} not in the call");
                    }
                }
            }
        }
    }
    drop(file);
    let device: Arc<dyn BlockDevice> =
        pvblk_volume::open(&format!("file:{path},nolock")).expect("a volume");
    for depth in [1, 8, 32] {
        let mut queue = Queue::open(&device, &QueueContext::new(depth as u32)).expect("a queue");
        let mut free: Vec<Box<Request>> = (0..depth)
            .map(|n| Request::with_buffers(Op::Read, 0, vec![buffers[n].clone()], 0))
            .collect();
        let mut batch = Vec::new();
        let mut done: Vec<Completion> = Vec::new();
        let told = times(|| {
            for some in order.chunks(depth) {
                for at in some {
                    let mut request = free.pop().expect("one for each");
                    request.sector = at * BLOCK / 512;
                    batch.push(request);
                }
                queue.submit(&mut batch);
                while done.len() < some.len() {
                    queue.poll(&mut done);
                }
                free.extend(done.drain(..).map(|c| c.request));
            }
        });
        println!("  {:32} {told}", format!("file:, {depth} a batch"));
    }
}
