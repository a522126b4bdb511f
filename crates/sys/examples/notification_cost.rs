//! Measures the cost of waking a peer and of clearing its wake-up: `cargo run --release -p pvblk-sys --example
//! notification_cost`.

use pvblk_sys::{EventFd, PeerEvent};
use std::time::Instant;

const COUNT: u32 = 1_000_000;

fn time(name: &str, f: impl Fn()) {
    let start = Instant::now();
    (0..COUNT).for_each(|_| f());
    let each = start.elapsed().as_nanos() / u128::from(COUNT);
    println!("{name:<30} {each:>5} ns");
}

fn main() -> std::io::Result<()> {
    let (own, shared) = (EventFd::new()?, PeerEvent::new()?);
    for _ in 0..3 {
        time("wake: write", || own.notify());
        time("wake: signal by the kernel", || shared.notify());
        own.drain();
        shared.clear();
        time("clear an empty one: read", || {
            own.drain();
        });
        time("clear an empty one: preadv2", || {
            shared.clear();
        });
    }
    Ok(())
}
