//! Disks that come and go while others are served.

mod support;

use pvblk_backend::{Backend, BackendOptions, Disk, Disks, Service, StopTimes};
use pvblk_block::trace::Tracing;
use pvblk_block::{RequestFlags, Status};
use pvblk_testing::wait;
use std::sync::Arc;
use std::time::Duration;
use support::device::Device;
use support::source::source;

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
    assert!(service.remove("b").is_some_and(|d| Arc::ptr_eq(&d, &b)));
    assert!(service.remove("b").is_none() && service.disks().find("b").is_none());
    devices[1].complete(0, Status::Ok);
    wait("it is answered", || feed.answers().len() == 1);
    // Another one of the name is another disk.
    service.add(disk("b", &devices[2])).unwrap();
    assert_eq!(names(), ["a", "b"]);
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
