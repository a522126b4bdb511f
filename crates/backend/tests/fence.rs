//! The users of a disk alone decide the state of its fence: no server closes or opens it.

mod support;

use pvblk_backend::{Attachment, Backend, BackendOptions, Disk, Disks, FenceOpened, Service};
use pvblk_block::trace::Tracing;
use pvblk_block::{RequestFlags, Status};
use pvblk_testing::wait;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use support::device::Device;
use support::source::{Feed, source};

const NONE: RequestFlags = RequestFlags::empty();

struct Rig {
    device: Arc<Device>,
    service: Arc<Service>,
    disk: Arc<Disk>,
    opened: Arc<AtomicUsize>,
    waiter: FenceOpened,
}

fn rig() -> Rig {
    let options = BackendOptions {
        workers: 1,
        ..BackendOptions::default()
    };
    let device = Arc::new(Device::default());
    let disk = Arc::new(Disk::new("a", device.clone(), Tracing::off()));
    let disks = Disks::new(vec![Arc::clone(&disk)]);
    let service = Service::new(Backend::start(&options).unwrap(), disks, Arc::default());
    let opened = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&opened);
    Rig {
        device,
        service,
        disk,
        opened,
        waiter: Arc::new(move || {
            count.fetch_add(1, Ordering::AcqRel);
        }),
    }
}

impl Rig {
    fn enter(&self) -> Option<Attachment> {
        let entered = self.service.enter(&self.disk, "front", &self.waiter);
        entered.unwrap()
    }

    /// A front end with a write of each of these sectors at the device, each from a queue of its own.
    fn at_work(&self, sectors: &[u64]) -> (Attachment, Vec<Feed>) {
        let mut front = self.enter().unwrap();
        let before = self.device.held().len();
        let feeds = sectors.iter().map(|&sector| {
            let (feed, source) = source(8);
            front.serve(source, |_| {}).unwrap();
            feed.write(sector, NONE);
            feed
        });
        let feeds = feeds.collect();
        wait("the writes are at the device", || {
            self.device.held().len() == before + sectors.len()
        });
        (front, feeds)
    }
}

#[test]
fn nobody_is_let_in_until_the_last_request_of_who_is_gone_has_ended() {
    let rig = rig();
    let (front, feeds) = rig.at_work(&[1, 2]);
    // Another front end may come while it is there.
    let beside = rig.enter().unwrap();
    let ended = Arc::new(AtomicUsize::new(0));
    let tell = Arc::clone(&ended);
    assert!(!front.leave(move || {
        tell.fetch_add(1, Ordering::AcqRel);
    }));
    assert!(rig.enter().is_none());
    rig.device.complete(0, Status::Ok);
    wait("the first queue ends", || rig.device.held().len() == 1);
    assert!(rig.enter().is_none() && rig.opened.load(Ordering::Acquire) == 0);
    rig.device.complete(0, Status::Ok);
    wait("the fence opens", || {
        rig.opened.load(Ordering::Acquire) == 1
    });
    wait("its end is told", || ended.load(Ordering::Acquire) == 1);
    assert!(rig.enter().is_some());
    assert!(feeds.iter().all(|f| f.answers().len() == 1));
    drop(beside);
    assert!(rig.enter().is_some());
}

#[test]
fn one_that_only_drops_its_attachment_closes_the_fence_too() {
    let rig = rig();
    drop(rig.at_work(&[1]).0);
    assert!(rig.enter().is_none());
    // NBD has no name for the same client: it doesn't wait.
    let (client, source) = source(8);
    let served = rig.service.serve_client(&rig.disk, "NBD", source, |_| {});
    served.unwrap();
    client.write(7, NONE);
    wait("its write is at the device", || {
        rig.device.held().len() == 2
    });
    rig.device.complete(0, Status::Ok);
    wait("the fence opens", || {
        rig.opened.load(Ordering::Acquire) == 1
    });
    assert!(rig.enter().is_some(), "a client isn't waited for");
    rig.device.complete(0, Status::Ok);
}

#[test]
fn one_without_requests_leaves_at_once() {
    let rig = rig();
    assert!(rig.enter().unwrap().leave(|| panic!("nothing follows")));
    assert!(rig.enter().is_some());
    assert_eq!(rig.opened.load(Ordering::Acquire), 0);
}
