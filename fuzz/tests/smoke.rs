//! Every target over its seeds and some random changes of them. `PVBLK_SEED=N` runs the same inputs again.

use pvblk_fuzz::{TARGETS, smoke};
use std::time::Duration;

fn run(name: &str) {
    let (_, target) = TARGETS.iter().find(|(n, _)| *n == name).expect("a target");
    let n = smoke::run(
        name,
        *target,
        pvblk_testing::seed(),
        500,
        Duration::from_secs(1),
    );
    println!("{name}: {n} inputs");
}

#[test]
fn ring() {
    run("ring");
}

#[test]
fn blktrace() {
    run("blktrace");
}

#[test]
fn http() {
    run("http");
}

#[test]
fn front() {
    run("front");
}

#[test]
fn parse() {
    run("parse");
}

#[test]
fn raid5_metadata() {
    run("raid5_metadata");
}

#[test]
fn nbd_contexts() {
    run("nbd_contexts");
}

#[test]
fn nbd_handshake() {
    run("nbd_handshake");
}

#[test]
fn nbd_requests() {
    run("nbd_requests");
}

#[test]
fn store() {
    run("store");
}

#[test]
fn virtqueue() {
    run("virtqueue");
}

#[test]
fn every_target_has_seeds() {
    for (name, _) in TARGETS {
        assert!(
            !smoke::seeds(name).is_empty(),
            "{name} has no seeds; run `smoke seeds`"
        );
    }
}

#[test]
fn xenstore() {
    run("xenstore");
}
