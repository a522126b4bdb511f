//! Rates of an array of four members in memory, by one thread: `cargo run --release -p pvblk-volume --example raid5_speed`.
//!
//! A copy loop over as many bytes runs beside it, and shows the speed of this machine's memory at the moment.
//! `--example raid5_speed -- '4 KiB random writes' 32 100000` does only so many requests of one kind with so many in flight, for profilers.
//! `--example raid5_speed -- bound 5` compares writes with their [`bound`] in so many rounds.

mod bound;

use bound::Bound;
use pvblk_block::{
    BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Request, RequestFlags, Status,
};
use pvblk_raid5::{ArrayOptions, Assembly, Consistency, Layout, Member, NewArray, Raid5};
use std::sync::Arc;
use std::time::{Duration, Instant};

const MEMBER_SECTORS: u64 = 128 << 11;
/// Bytes of the array that are used.
const SPAN: u64 = 96 << 20;
/// The same in a run for a profiler: what stays in a CPU's cache.
const SMALL_SPAN: u64 = 6 << 20;
const TIME: Duration = Duration::from_millis(500);

const KINDS: [What; 6] = [
    What::new("192 KiB writes", Op::Write, 192 << 10),
    What {
        stable: true,
        ..What::new("192 KiB, stable", Op::Write, 192 << 10)
    },
    What::new("128 KiB writes", Op::Write, 128 << 10),
    What {
        random: true,
        ..What::new("4 KiB random writes", Op::Write, 4096)
    },
    What::new("4 KiB writes", Op::Write, 4096),
    What {
        random: true,
        ..What::new("4 KiB random reads", Op::Read, 4096)
    },
];

fn array(consistency: Consistency) -> Result<Arc<dyn BlockDevice>, pvblk_block::Error> {
    let created = NewArray {
        set_uuid: [7; 16],
        name: "speed:0",
        created_secs: 1,
        layout: Layout::LeftSymmetric,
        chunk_sectors: 128,
        device_sectors: &[MEMBER_SECTORS; 4],
        size_sectors: None,
        consistency,
        checksums: false,
        clean: true,
    }
    .build()?;
    let mut members = Vec::new();
    for i in 0..4 {
        members.push(Some(Member {
            device: pvblk_volume::open(&format!("mem:{}", MEMBER_SECTORS * 512))?,
            name: format!("m{i}"),
            superblock: created.superblock(i, [i as u8; 16]),
        }));
    }
    let assembly = Assembly::new(created.geometry(), members, false);
    let array = Raid5::start(assembly, &ArrayOptions::default())?;
    array.keep()?;
    Ok(array)
}

/// Requests of one kind.
struct What {
    text: &'static str,
    op: Op,
    bytes: usize,
    random: bool,
    /// The data stays as it is until the end: no copy is needed.
    stable: bool,
}

impl What {
    const fn new(text: &'static str, op: Op, bytes: usize) -> What {
        What {
            text,
            op,
            bytes,
            random: false,
            stable: false,
        }
    }
}

/// Requests a second, over [`TIME`] or so many requests.
fn rate(
    array: &Arc<dyn BlockDevice>,
    what: &What,
    depth: usize,
    span: u64,
    requests: Option<u64>,
) -> f64 {
    let What {
        op, bytes, random, ..
    } = *what;
    let context = QueueContext::new(depth as u32);
    let mut queue = Queue::open(array, &context).expect("a queue");
    let data = Buffer::anonymous(bytes * depth).expect("memory");
    let part = |i: usize| data.slice(i * bytes, bytes).expect("inside");
    let request = |i: usize| Request::with_buffers(op, 0, vec![part(i)], i as u64);
    let mut free: Vec<Box<Request>> = (0..depth).map(request).collect();
    let (mut batch, mut done) = (Vec::new(), Vec::<Completion>::new());
    let mut rng = fastrand::Rng::with_seed(1);
    let blocks = span / bytes as u64;
    let (mut next, mut count) = (0, 0u64);
    let begin = Instant::now();
    while requests.map_or_else(|| begin.elapsed() < TIME, |most| count < most) {
        for mut request in free.drain(..) {
            next += 1;
            let block = if random {
                rng.u64(..blocks)
            } else {
                next % blocks
            };
            request.sector = block * (bytes as u64 / 512);
            if what.stable {
                request.flags = RequestFlags::STABLE_BUFFERS;
            }
            batch.push(request);
        }
        queue.submit(&mut batch);
        queue.poll(&mut done);
        for c in done.drain(..) {
            assert_eq!(c.status, Status::Ok);
            count += 1;
            free.push(c.request);
        }
    }
    let rate = count as f64 / begin.elapsed().as_secs_f64();
    while queue.in_flight() > 0 {
        queue.poll(&mut done);
    }
    rate
}

/// Gigabytes a second of a loop that copies 64 KiB pieces over the same span.
fn copies() -> f64 {
    let (from, to) = (vec![1u8; SPAN as usize], &mut vec![0u8; SPAN as usize]);
    let (begin, mut bytes) = (Instant::now(), 0);
    while begin.elapsed() < TIME {
        for (from, to) in from.chunks(64 << 10).zip(to.chunks_mut(64 << 10)) {
            to.copy_from_slice(from);
            bytes += to.len();
        }
        std::hint::black_box(&to);
    }
    bytes as f64 / begin.elapsed().as_secs_f64() / 1e9
}

/// Rates of an array's writes, and ratios to the mean of the bound's just before and after: medians, with the least and the greatest.
fn bounds(rounds: usize) -> Result<(), pvblk_block::Error> {
    println!(
        "{:<20} {:>6} {:>5} {:>10} {:>10} {:>21} {:>21}",
        "requests", "depth", "MiB", "bound, k/s", "array, k/s", "array / bound", "bound / bound"
    );
    let writes = KINDS.iter().filter(|kind| kind.op == Op::Write);
    // In order, small ones share reads and parity in ways that the bound doesn't have.
    let has_bound = |kind: &&What| kind.random || kind.bytes > 4096;
    for (what, depth) in writes
        .filter(has_bound)
        .flat_map(|kind| [1, 32].map(|depth| (kind, depth)))
    {
        for span in [SMALL_SPAN, SPAN] {
            let array = array(Consistency::Resync)?;
            let mut bound = Bound::new(span, depth, what.bytes);
            let rate_of = |bound: &mut Bound| {
                bound.rate(what.bytes, what.random, what.stable, depth == 1, TIME)
            };
            // Memory is there from now on.
            rate_of(&mut bound);
            rate(&array, what, depth, span, None);
            let mut samples = Vec::new();
            for _ in 0..rounds {
                let first = rate_of(&mut bound);
                let ours = rate(&array, what, depth, span, None);
                samples.push((first, ours, rate_of(&mut bound)));
            }
            assert!(bound.is_right(), "the bound's parity");
            let median = |of: &dyn Fn(&(f64, f64, f64)) -> f64| {
                let mut all: Vec<f64> = samples.iter().map(of).collect();
                all.sort_by(f64::total_cmp);
                (all[all.len() / 2], all[0], all[all.len() - 1])
            };
            let ratio = |of: &dyn Fn(&(f64, f64, f64)) -> f64| {
                let (middle, least, most) = median(of);
                format!("{middle:.2} ({least:.2} to {most:.2})")
            };
            println!(
                "{:<20} {depth:>6} {:>5} {:>10.1} {:>10.1} {:>21} {:>21}",
                what.text,
                span >> 20,
                median(&|s| s.0).0 / 1e3,
                median(&|s| s.1).0 / 1e3,
                ratio(&|s| s.1 * 2.0 / (s.0 + s.2)),
                ratio(&|s| s.2 / s.0)
            );
        }
    }
    Ok(())
}

fn main() -> Result<(), pvblk_block::Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [bound, rounds] = &args[..]
        && bound == "bound"
    {
        let rounds = rounds.parse().ok().filter(|rounds| *rounds > 0);
        return bounds(rounds.expect("a number of rounds"));
    }
    if let [kind, depth, requests] = &args[..] {
        let kind = KINDS.iter().find(|k| k.text == kind).expect("a kind");
        let depth = depth.parse().ok().filter(|d| *d > 0).expect("a depth");
        let requests = requests.parse().expect("a number of requests");
        let array = array(Consistency::Resync)?;
        let rate = rate(&array, kind, depth, SMALL_SPAN, Some(requests));
        println!("{:.1} thousand a second", rate / 1e3);
        return Ok(());
    }
    assert!(
        args.is_empty(),
        "arguments: KIND DEPTH REQUESTS, or bound ROUNDS, or none"
    );
    println!("copies of 64 KiB: {:.2} GB/s", copies());
    println!(
        "{:<8} {:<18} {:>6} {:>10} {:>8}",
        "policy", "requests", "depth", "k/s", "GB/s"
    );
    for (policy, consistency) in [("resync", Consistency::Resync), ("ppl", Consistency::Ppl)] {
        let array = array(consistency)?;
        for what in &KINDS {
            for depth in [1, 32, 128] {
                let rate = rate(&array, what, depth, SPAN, None);
                let gigabytes = rate * what.bytes as f64 / 1e9;
                println!(
                    "{policy:<8} {:<18} {depth:>6} {:>10.1} {gigabytes:>8.2}",
                    what.text,
                    rate / 1e3
                );
            }
        }
    }
    println!("copies of 64 KiB: {:.2} GB/s", copies());
    Ok(())
}
