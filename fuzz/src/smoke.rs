//! Plain runs without libFuzzer: the committed seeds, and random changes of them for a while.

use crate::Target;
use pvblk_protocol::local::Frame;
use pvblk_protocol::xenbus::Change;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where the seeds are.
pub fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

/// The seeds of a target, sorted by name.
pub fn seeds(name: &str) -> Vec<(String, Vec<u8>)> {
    let Ok(folder) = std::fs::read_dir(corpus().join(name)) else {
        return Vec::new();
    };
    let mut all: Vec<_> = folder
        .filter_map(|e| e.ok())
        .filter_map(|e| {
            let bytes = std::fs::read(e.path()).ok()?;
            Some((e.file_name().to_string_lossy().into_owned(), bytes))
        })
        .collect();
    all.sort();
    all
}

/// Runs all seeds, then `least` changed inputs and more until `time` is over. Returns how many inputs ran.
/// An input that panics is kept: its place is printed.
pub fn run(name: &str, target: Target, seed: u64, least: usize, time: Duration) -> usize {
    let seeds = seeds(name);
    let start = Instant::now();
    for (file, bytes) in &seeds {
        guarded(name, target, bytes, &format!("corpus/{name}/{file}"));
    }
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut n = 0;
    while n < least || start.elapsed() < time {
        let input = random_input(&mut rng, &seeds);
        guarded(name, target, &input, &format!("input {n} of this seed"));
        n += 1;
    }
    seeds.len() + n
}

fn guarded(name: &str, target: Target, bytes: &[u8], what: &str) {
    let Err(panic) = std::panic::catch_unwind(|| target(bytes)) else {
        return;
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("artifacts")
        .join(name);
    let file = folder.join(format!("smoke-{:016x}", hash(bytes)));
    let kept = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&file, bytes));
    match kept {
        Ok(()) => eprintln!("{name}: {what} fails; it is kept in {}", file.display()),
        Err(e) => eprintln!("{name}: {what} fails; it can't be kept: {e}"),
    }
    std::panic::resume_unwind(panic);
}

fn hash(bytes: &[u8]) -> u64 {
    // FNV-1a.
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3)
    })
}

/// Random bytes, or a seed with some changes.
pub fn random_input(rng: &mut fastrand::Rng, seeds: &[(String, Vec<u8>)]) -> Vec<u8> {
    let fresh = |rng: &mut fastrand::Rng, n: usize| (0..n).map(|_| rng.u8(..)).collect::<Vec<u8>>();
    let Some((_, seed)) = rng.choice(seeds).filter(|_| rng.u8(0..4) > 0) else {
        let n = 1usize << rng.u32(3..13);
        return fresh(rng, n);
    };
    let mut input = seed.clone();
    for _ in 0..rng.u32(1..=8) {
        let at = rng.usize(0..=input.len());
        let n = rng.usize(0..=16).min(input.len() - at);
        match rng.u8(0..4) {
            0 => drop(input.drain(at..at + n)),
            1 => {
                let more = fresh(rng, n);
                input.splice(at..at, more);
            }
            2 => {
                let copy = input[at..at + n].to_vec();
                let to = rng.usize(0..=input.len());
                input.splice(to..to, copy);
            }
            _ => input[at..at + n].iter_mut().for_each(|b| *b = rng.u8(..)),
        }
    }
    input
}

/// Writes a few generated seeds for a target: random bytes of growing length, and messages where it reads messages.
pub fn write_seeds(name: &str) -> std::io::Result<()> {
    let folder = corpus().join(name);
    std::fs::create_dir_all(&folder)?;
    let mut rng = fastrand::Rng::with_seed(hash(name.as_bytes()));
    for (i, n) in [64usize, 256, 512, 1024, 2048].into_iter().enumerate() {
        let bytes: Vec<u8> = (0..n).map(|_| rng.u8(..)).collect();
        std::fs::write(folder.join(format!("random-{i}")), bytes)?;
    }
    if name == "blktrace" {
        for devices in 1..=3 {
            let bytes = crate::blktrace::sample(devices);
            std::fs::write(folder.join(format!("lives-{devices}")), bytes)?;
        }
    }
    if name == "raid5_metadata" {
        for (file, bytes) in crate::raid5_metadata::samples() {
            std::fs::write(folder.join(file), bytes)?;
        }
    }
    if name == "store" {
        for (i, frame) in frames().iter().enumerate() {
            let bytes = frame.encode().unwrap_or_default();
            std::fs::write(folder.join(format!("frame-{i}")), bytes)?;
        }
    }
    Ok(())
}

/// One message of each kind.
fn frames() -> Vec<Frame> {
    vec![
        Frame::Hello {
            disk: "a".into(),
            front: "lab".into(),
        },
        Frame::Error("no".into()),
        Frame::Write(vec![
            Change::set("ring-ref", 8),
            Change::remove("error"),
            Change::set("state", 3),
        ]),
        Frame::Memory {
            table_first: 0,
            table_frames: 1,
        },
        Frame::Channel { port: 1 },
    ]
}
