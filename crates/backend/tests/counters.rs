//! Counters of a disk, as requests come and go on a worker.

mod support;

use pvblk_backend::{Backend, BackendOptions, Disk, Totals};
use pvblk_block::trace::Tracing;
use pvblk_block::{Op, RequestFlags, Status};
use pvblk_testing::wait;
use std::sync::Arc;
use support::device::Device;

use support::source::source;

const WRITE: usize = Op::Write as usize;
const FLUSH: usize = Op::Flush as usize;

fn counts(totals: &Totals, op: usize) -> (u64, u64, u64) {
    let it = &totals.operations[op];
    (it.requests, it.bytes, it.errors)
}

#[test]
fn what_a_worker_serves_is_counted_by_operation_and_connection() {
    let device = Arc::new(Device::default());
    let backend = Backend::start(&BackendOptions {
        workers: 1,
        ..BackendOptions::default()
    })
    .unwrap();
    let disk = Disk::new("d", device.clone(), Tracing::off());
    let (feed, lane) = source(16);
    let id = backend.attach(&disk, lane, Box::new(|_| {})).unwrap();
    let (_idle, lane) = source(16);
    backend.attach(&disk, lane, Box::new(|_| {})).unwrap();
    for sector in 0..5 {
        feed.write(sector, RequestFlags::empty());
    }
    feed.flush(5, RequestFlags::empty());
    wait("all are at the device", || device.held().len() == 6);
    let counters = disk.counters();
    assert_eq!(counters.totals().in_flight, 6);
    assert_eq!(counts(&counters.totals(), WRITE), (0, 0, 0));
    for sector in 0..5 {
        let status = if sector == 3 {
            Status::IoError
        } else {
            Status::Ok
        };
        device.complete_one((0, Op::Write, sector), status);
    }
    wait("the writes are counted", || {
        counters.totals().in_flight == 1
    });
    assert_eq!(counts(&counters.totals(), WRITE), (5, 5 * 512, 1));
    let read = counters.read_totals(|totals| counts(totals, WRITE));
    assert_eq!(read, (5, 5 * 512, 1));
    assert_eq!(counts(&counters.totals(), FLUSH), (0, 0, 0));
    device.complete_one((0, Op::Flush, 0), Status::Ok);
    wait("the flush is counted", || counters.totals().in_flight == 0);
    assert_eq!(counts(&counters.totals(), FLUSH), (1, 0, 0));
    assert!(counters.totals().busy_ns > 0);
    let latency = counters.totals().operations[WRITE].latency.clone();
    assert_eq!(latency.buckets().map(|(_, n)| n).sum::<u64>(), 5);
    // A write with a flush before it, and one of a long part: one request each, whatever the lane makes of them.
    feed.write(7, RequestFlags::PREFLUSH);
    wait("the flush before the write", || device.held().len() == 1);
    device.complete_one((0, Op::Flush, 0), Status::Ok);
    wait("the write", || device.held() == [(0, Op::Write, 7)]);
    device.complete_one((0, Op::Write, 7), Status::Ok);
    wait("the write is counted", || counters.totals().in_flight == 0);
    assert_eq!(counts(&counters.totals(), WRITE), (6, 6 * 512, 1));
    assert_eq!(counts(&counters.totals(), FLUSH), (1, 0, 0));
    // The sums stay when the connection goes.
    let before = counters.totals();
    backend.detach(&id);
    wait("the connection goes", || {
        counters
            .connections()
            .iter()
            .all(|(_, t)| *t == Totals::default())
    });
    assert_eq!(counters.totals(), before);
    assert_eq!(counters.read_totals(Clone::clone), before);
}
