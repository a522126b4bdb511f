//! An orderly end: each disk is flushed for itself, whatever the others do.

mod support;

use pvblk_backend::{Backend, BackendOptions, Disk, Disks, Service, StopTimes};
use pvblk_block::trace::Tracing;
use pvblk_block::{Op, RequestFlags, Status};
use pvblk_testing::wait;
use std::sync::Arc;
use std::time::Duration;
use support::device::Device;
use support::source::{Feed, source};

const NONE: RequestFlags = RequestFlags::empty();
const FLUSH: (u32, Op, u64) = (0, Op::Flush, 0);

struct Rig {
    devices: Vec<Arc<Device>>,
    service: Arc<Service>,
}

/// A service of so many disks, named by their numbers.
fn rig(disks: usize) -> Rig {
    let backend = Backend::start(&BackendOptions {
        workers: 1,
        ..BackendOptions::default()
    })
    .unwrap();
    let devices: Vec<_> = (0..disks).map(|_| Arc::new(Device::default())).collect();
    let disk = |(i, d): (usize, &Arc<Device>)| {
        Arc::new(Disk::new(i.to_string(), d.clone(), Tracing::off()))
    };
    let disks = devices.iter().enumerate().map(disk).collect();
    Rig {
        service: Service::new(backend, Disks::new(disks), Arc::default()),
        devices,
    }
}

impl Rig {
    fn attach(&self, disk: usize) -> Feed {
        let (feed, source) = source(8);
        let disk = self.service.disks().find(&disk.to_string()).unwrap();
        let served = self.service.serve_client(&disk, "test", source, |_| {});
        served.unwrap();
        feed
    }

    /// Stops on another thread, and lets `meanwhile` play the devices; returns the ends of the disks, by
    /// name.
    fn stop(&self, times: StopTimes, meanwhile: impl FnOnce()) -> Vec<(String, Option<String>)> {
        let service = Arc::clone(&self.service);
        let thread = std::thread::spawn(move || service.stop(times));
        meanwhile();
        let ends = thread.join().unwrap();
        let mut ends: Vec<_> = ends
            .into_iter()
            .map(|e| (e.disk, e.result.err().map(|e| e.to_string())))
            .collect();
        ends.sort();
        ends
    }
}

/// Long enough never to pass in a test.
const LONG: Duration = Duration::from_secs(120);
const SHORT: Duration = Duration::from_millis(300);

#[test]
fn a_disk_whose_flush_fails_keeps_nobody_from_being_flushed() {
    let rig = rig(3);
    let times = StopTimes {
        drain: LONG,
        flush: LONG,
    };
    let ends = rig.stop(times, || {
        for (device, status) in rig
            .devices
            .iter()
            .zip([Status::IoError, Status::Ok, Status::Ok])
        {
            wait("its flush", || device.held().contains(&FLUSH));
            device.complete_one(FLUSH, status);
        }
    });
    assert_eq!(ends.len(), 3);
    assert!(ends[0].1.as_ref().unwrap().contains("last flush failed"));
    assert_eq!((&ends[1].1, &ends[2].1), (&None, &None));
    let left: Vec<_> = rig.service.disks().all();
    assert_eq!(left.len(), 1, "those that ended well have left");
    assert_eq!(left[0].name(), "0");
}

#[test]
fn a_disk_whose_requests_never_end_is_flushed_and_keeps_nobody_waiting() {
    let rig = rig(2);
    let (stuck, good) = (rig.attach(0), rig.attach(1));
    stuck.write(7, NONE);
    good.write(8, NONE);
    wait("writes are at work", || {
        rig.devices.iter().all(|d| d.held().len() == 1)
    });
    let times = StopTimes {
        drain: SHORT,
        flush: LONG,
    };
    let ends = rig.stop(times, || {
        rig.devices[1].complete_one((0, Op::Write, 8), Status::Ok);
        wait("the healthy disk's flush", || {
            rig.devices[1].held().iter().any(|h| h.1 == Op::Flush)
        });
        rig.devices[1].complete(0, Status::Ok);
        wait("the other's, too", || {
            rig.devices[0].held().iter().any(|h| h.1 == Op::Flush)
        });
        rig.devices[0].complete_one((1, Op::Flush, 0), Status::Ok);
    });
    assert_eq!(good.answers(), [(8, Status::Ok)]);
    let why = ends[0].1.as_ref().unwrap();
    assert!(why.contains("still in flight") && why.contains("is flushed"));
    assert_eq!(ends[1].1, None);
}

#[test]
fn a_flush_that_never_ends_is_given_up() {
    let rig = rig(1);
    let times = StopTimes {
        drain: LONG,
        flush: SHORT,
    };
    let ends = rig.stop(times, || ());
    assert!(ends[0].1.as_ref().unwrap().contains("stuck"));
    let disk = rig.service.disks().find("0").unwrap();
    let (_, refused) = source(1);
    let late = rig.service.serve_client(&disk, "test", refused, |_| {});
    assert!(late.is_err());
}
