//! Disks that come and go while others are served.

mod support;

use pvblk_backend::{Backend, BackendOptions, Disk, DiskEnd, Disks, Service, StopTimes};
use pvblk_block::trace::Tracing;
use pvblk_block::{Op, RequestFlags, Status};
use pvblk_testing::wait;
use std::sync::Arc;
use std::time::Duration;
use support::device::Device;
use support::source::source;

/// Long enough never to pass in a test.
const LONG: Duration = Duration::from_secs(120);

fn disk(name: &str, device: &Arc<Device>) -> Arc<Disk> {
    Arc::new(Disk::new(name, device.clone(), Tracing::off()))
}

fn service(disks: Disks) -> Arc<Service> {
    let options = BackendOptions {
        workers: 1,
        ..BackendOptions::default()
    };
    Service::new(Backend::start(&options).unwrap(), disks, Arc::default())
}

#[test]
fn a_disk_is_found_from_its_adding_to_its_removal_and_its_clients_go_on() {
    let devices: Vec<_> = (0..3).map(|_| Arc::new(Device::default())).collect();
    let service = service(Disks::new(vec![disk("a", &devices[0])]));
    let names = || {
        let all = service.disks().all();
        all.iter().map(|d| d.name().to_owned()).collect::<Vec<_>>()
    };
    let b = disk("b", &devices[1]);
    service.add(Arc::clone(&b)).unwrap();
    let again = service.add(disk("b", &devices[2])).unwrap_err();
    assert!(again.to_string().contains("a disk b already"), "{again}");
    assert_eq!(names(), ["a", "b"]);
    let (feed, client) = source(8);
    let served = service.serve_client(&b, "test", client, |_| {});
    served.unwrap();
    feed.write(1, RequestFlags::empty());
    wait("its write is at the device", || {
        devices[1].held().len() == 1
    });
    let (tell, told) = std::sync::mpsc::channel();
    let ended = move |end: DiskEnd| tell.send(end.result.map_err(|e| e.to_string())).unwrap();
    service.retire(&b, LONG, ended).unwrap();
    let again = service.retire(&b, LONG, |_| ()).unwrap_err();
    assert!(again.to_string().contains("no disk b"), "{again}");
    assert!(service.disks().find("b").is_none());
    // Another one of the name is another disk, and comes at once.
    service.add(disk("b", &devices[2])).unwrap();
    assert_eq!(names(), ["a", "b"]);
    let (_, late) = source(8);
    let refused = service.serve_client(&b, "test", late, |_| {});
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("being removed"), "{refused}");
    // Its write is at work: it isn't flushed, and its device stays.
    assert_eq!(service.retired()[0].1, 1);
    assert_eq!(devices[1].held().len(), 1);
    devices[1].complete(0, Status::Ok);
    wait("it is answered", || feed.answers().len() == 1);
    wait("its flush", || {
        devices[1].held().iter().any(|h| h.1 == Op::Flush)
    });
    assert!(told.try_recv().is_err());
    devices[1].complete(0, Status::Ok);
    assert_eq!(told.recv_timeout(LONG), Ok(Ok(())));
    assert!(service.retired().is_empty());
    drop(b);
    assert_eq!(Arc::strong_count(&devices[1]), 1, "the device is dropped");
}

#[test]
fn a_stop_waits_for_a_disk_that_was_taken_out_and_flushes_it() {
    let devices: Vec<_> = (0..2).map(|_| Arc::new(Device::default())).collect();
    let service = service(Disks::new(vec![disk("a", &devices[0])]));
    let a = service.disks().find("a").unwrap();
    let (feed, client) = source(8);
    service.serve_client(&a, "test", client, |_| {}).unwrap();
    feed.write(1, RequestFlags::empty());
    wait("its write is at the device", || {
        devices[0].held().len() == 1
    });
    service.retire(&a, LONG, |_| ()).unwrap();
    service.add(disk("a", &devices[1])).unwrap();
    drop(a);
    let times = StopTimes {
        drain: LONG,
        flush: LONG,
    };
    let stopping = Arc::clone(&service);
    let stop = std::thread::spawn(move || stopping.stop(times));
    let flush = |d: &Device| d.held().iter().any(|h| h.1 == Op::Flush);
    wait("the flush of the one at rest", || flush(&devices[1]));
    devices[1].complete(0, Status::Ok);
    assert!(!stop.is_finished() && !flush(&devices[0]));
    devices[0].complete(0, Status::Ok);
    wait("the flush of the one that was taken out", || {
        flush(&devices[0])
    });
    devices[0].complete(0, Status::Ok);
    let ends = stop.join().unwrap();
    assert_eq!(ends.len(), 2);
    assert!(ends.iter().all(|e| e.disk == "a" && e.result.is_ok()));
    assert_eq!(feed.answers(), [(1, Status::Ok)]);
}

#[test]
fn the_default_disk_is_the_first_or_the_one_that_was_named_and_never_another() {
    let device = Arc::new(Device::default());
    let two = || vec![disk("a", &device), disk("b", &device)];
    let default = |disks: &Disks| disks.export("").map(|d| d.name().to_owned());
    assert_eq!(default(&Disks::new(two())).as_deref(), Some("a"));
    let named = Disks::new(two()).with_default("b");
    assert_eq!(default(&named).as_deref(), Some("b"));
    assert_eq!(default(&Disks::new(two()).with_default("c")), None);
    assert!(named.export("a").is_some() && named.export("c").is_none());
    assert_eq!(named.page(1, 5).len(), 1);
    assert!(named.page(2, 5).is_empty());
}

#[test]
fn a_service_that_stops_takes_no_disk() {
    let service = service(Disks::default());
    let times = StopTimes {
        drain: Duration::from_secs(120),
        flush: Duration::from_secs(120),
    };
    assert!(service.stop(times).is_empty());
    let device = Arc::new(Device::default());
    let refused = service.add(disk("a", &device)).unwrap_err();
    assert!(refused.to_string().contains("stopping"), "{refused}");
}
