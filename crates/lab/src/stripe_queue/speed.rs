//! Members in memory: the cost of the array itself, on one thread and on two.

use super::array::{Array, Way};
use super::load::{Job, for_so_long};
use super::{StripeQueueOptions, members_in_memory};
use anyhow::Result;
use pvblk_block::Op;
use serde::Serialize;
use std::time::Duration;

/// Sectors of an array that are used.
const SPAN: u64 = 96 << 11;
const DEPTHS: [usize; 3] = [1, 32, 128];

/// A kind of request.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Shape {
    /// Name in tables.
    pub name: &'static str,
    /// Bytes of a request.
    pub block: u64,
    /// Requests go to random places instead of in order.
    pub random: bool,
    /// Requests are reads instead of writes.
    pub read: bool,
}

const fn shape(name: &'static str, block: u64, random: bool, read: bool) -> Shape {
    Shape {
        name,
        block,
        random,
        read,
    }
}

pub const SHAPES: [Shape; 5] = [
    shape("4 KiB sequential writes", 4 << 10, false, false),
    shape("4 KiB random writes", 4 << 10, true, false),
    shape("128 KiB writes", 128 << 10, false, false),
    shape("192 KiB writes", 192 << 10, false, false),
    shape("4 KiB random reads", 4 << 10, true, true),
];

/// Rates of one shape.
#[derive(Clone, Debug, Serialize)]
pub struct Speed {
    pub shape: Shape,
    /// Requests in flight.
    pub depth: usize,
    /// The array has a partial parity log.
    pub ppl: bool,
    /// Requests a second with direct writes, as md has.
    pub direct: Vec<f64>,
    /// Requests a second with the stripe queue.
    pub queue: Vec<f64>,
    /// Requests a second with direct writes once more: the control.
    pub direct_again: Vec<f64>,
}

/// Rates of two threads, each with its own queue of an array.
#[derive(Clone, Debug, Serialize)]
pub struct Two {
    pub shape: Shape,
    /// Requests in flight of each thread.
    pub depth: usize,
    /// The array has the stripe queue.
    pub by_queue: bool,
    /// Requests a second of both threads, on one array.
    pub shared: Vec<f64>,
    /// Requests a second of both threads, each on an array of its own.
    pub apart: Vec<f64>,
    /// Requests a second of one thread alone.
    pub one: Vec<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Speeds {
    /// Rates of one thread.
    pub one: Vec<Speed>,
    /// Rates of two threads.
    pub two: Vec<Two>,
}

fn array(ppl: bool) -> Result<Array> {
    Ok(Array::new(
        members_in_memory(SPAN)?,
        super::consistency(ppl),
        super::STRIPES,
        &mut || (),
    )?)
}

pub fn job(shape: &Shape, depth: usize, file: std::ops::Range<u64>) -> Job {
    Job {
        file,
        op: if shape.read { Op::Read } else { Op::Write },
        random: shape.random,
        block: shape.block,
        depth,
        requests: u64::MAX,
        stable: false,
    }
}

pub fn run(options: &StripeQueueOptions, progress: &dyn Fn(&str)) -> Result<Speeds> {
    let (runs, time) = (options.runs, Duration::from_secs_f64(options.seconds));
    let wanted = |name: &str| {
        options
            .cells
            .as_ref()
            .is_none_or(|only| name.contains(only))
    };
    let cpus = pvblk_sys::cpu::allowed();
    let mut one = Vec::new();
    for ppl in [false, true] {
        let mut array = array(ppl)?;
        for shape in SHAPES {
            let name = format!(
                "one thread, {}{}",
                shape.name,
                if ppl { ", PPL" } else { "" }
            );
            if !wanted(&name) {
                continue;
            }
            progress(&format!("members in memory: {name}"));
            for depth in DEPTHS {
                let mut speed = Speed {
                    shape,
                    depth,
                    ppl,
                    direct: Vec::new(),
                    queue: Vec::new(),
                    direct_again: Vec::new(),
                };
                for run in 0..runs {
                    for step in 0..3 {
                        let (way, to) = match (run + step) % 3 {
                            0 => (Way::Direct, &mut speed.direct),
                            1 => (Way::Queue, &mut speed.queue),
                            _ => (Way::Direct, &mut speed.direct_again),
                        };
                        array.begin(way, &[])?;
                        let job = job(&shape, depth, 0..SPAN);
                        to.push(for_so_long(vec![(&array.device, job)], time, &cpus[..1])?.0[0]);
                    }
                }
                one.push(speed);
            }
        }
    }
    let mut two = Vec::new();
    let mut arrays = [array(false)?, array(false)?];
    for shape in SHAPES {
        let name = format!("two threads, {}", shape.name);
        if !wanted(&name) {
            continue;
        }
        progress(&format!("members in memory: {name}"));
        for by_queue in [false, true] {
            let mut t = Two {
                shape,
                depth: 32,
                by_queue,
                shared: Vec::new(),
                apart: Vec::new(),
                one: Vec::new(),
            };
            for run in 0..runs {
                for step in 0..3 {
                    for array in &mut arrays {
                        let way = if by_queue { Way::Queue } else { Way::Direct };
                        array.begin(way, &[])?;
                    }
                    // Each thread gets a half of whole rows of chunks.
                    let half = SPAN / 2 / super::array::ROW_SECTORS * super::array::ROW_SECTORS;
                    let jobs = || {
                        let job = |file| job(&shape, t.depth, file);
                        (job(0..half), job(half..2 * half))
                    };
                    let (a, b) = jobs();
                    let (jobs, to) = match (run + step) % 3 {
                        0 => (
                            vec![(&arrays[0].device, a), (&arrays[0].device, b)],
                            &mut t.shared,
                        ),
                        1 => (
                            vec![(&arrays[0].device, a), (&arrays[1].device, b)],
                            &mut t.apart,
                        ),
                        _ => (vec![(&arrays[0].device, a)], &mut t.one),
                    };
                    to.push(for_so_long(jobs, time, &cpus)?.0.iter().sum());
                }
            }
            two.push(t);
        }
    }
    Ok(Speeds { one, two })
}
