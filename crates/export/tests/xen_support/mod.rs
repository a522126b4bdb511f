//! Xen for tests: xenstore, a hypervisor, guests, and a server with disks in memory behind a real back end.
#![allow(
    dead_code,
    unused_imports,
    reason = "every test file uses another part of it"
)]

pub mod daemon;
pub mod guest;
pub mod hypervisor;
#[path = "../ram_support/mod.rs"]
mod ram_support;

pub use daemon::Daemon;
pub use guest::{Guest, SMALL, Wishes, whole};
pub use hypervisor::{FakeXen, Handle};
pub use ram_support::*;

use pvblk_backend::{Backend, BackendOptions, Disk, Disks, Pressure, Service};
use pvblk_block::Error;
use pvblk_block::trace::Tracing;
use pvblk_export::xen::toolstack::Toolstack;
use pvblk_export::xen::{StandingOrder, XenServer};
use pvblk_protocol::xenbus::BackendOffers;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Sectors of each disk: 16 MiB.
pub const SECTORS: u64 = 32768;

/// A domain 0 with xenstore and a hypervisor. Tests start and stop servers in it.
pub struct Bed {
    pub daemon: Arc<Daemon>,
    pub xen: Arc<FakeXen>,
    pub server: Option<XenServer>,
    pub a: Arc<Ram>,
    pub b: Arc<Ram>,
    /// Standing orders of servers that are started from now on.
    pub orders: Vec<StandingOrder>,
}

impl Bed {
    /// Starts a server of the disks a and b.
    pub fn new() -> Bed {
        Bed::with_orders(&[])
    }

    /// As [`Bed::new`], with standing orders: disk, guest, device.
    pub fn with_orders(orders: &[(&str, &str, Option<u32>)]) -> Bed {
        let order = |(disk, guest, device): &(&str, &str, Option<u32>)| StandingOrder {
            disk: (*disk).into(),
            guest: (*guest).into(),
            device: *device,
        };
        let mut bed = Bed {
            daemon: Arc::new(Daemon::new()),
            xen: Arc::default(),
            server: None,
            a: Ram::new(SECTORS),
            b: Ram::new(SECTORS),
            orders: orders.iter().map(order).collect(),
        };
        bed.start();
        bed
    }

    /// Starts a server of other disks.
    pub fn serve(&self, disks: &[(&str, &Arc<Ram>)]) -> XenServer {
        self.try_serve(disks).unwrap()
    }

    pub fn try_serve(&self, disks: &[(&str, &Arc<Ram>)]) -> Result<XenServer, Error> {
        let disk = |(name, ram): &(&str, &Arc<Ram>)| {
            let device = Arc::new(RamDevice(Arc::clone(ram)));
            Arc::new(Disk::new(*name, device, Tracing::off()))
        };
        let options = BackendOptions {
            workers: 2,
            ..BackendOptions::default()
        };
        let backend = Backend::start(&options).unwrap();
        let disks = Disks::new(disks.iter().map(disk).collect());
        let service = Service::new(backend, disks, Arc::new(Pressure::new(0)));
        let hypervisor = Arc::new(Handle(Arc::clone(&self.xen)));
        let orders = self.orders.clone();
        let offers = BackendOffers::default();
        XenServer::start(self.daemon.client(), hypervisor, &service, offers, orders)
    }

    pub fn start(&mut self) {
        self.server = Some(self.serve(&[("a", &self.a), ("b", &self.b)]));
    }

    pub fn toolstack(&self) -> Toolstack {
        Toolstack::over(self.daemon.client()).unwrap()
    }

    /// A guest without attached disks.
    pub fn guest(&self, domid: u16) -> Guest {
        Guest::new(&self.daemon, &self.xen, domid)
    }

    pub fn attach(&self, guest: &Guest, disk: &str) {
        self.toolstack().attach(guest.node, disk).unwrap();
    }

    /// A guest that uses a disk.
    pub fn connected(&self, domid: u16, disk: &str, wishes: Wishes) -> Guest {
        let mut guest = self.guest(domid);
        self.attach(&guest, disk);
        guest.connect(wishes);
        guest
    }

    /// Checks that the other guest's disk still responds, and that new ones are served.
    pub fn still_serves(&self, other: &mut Guest) {
        other.check();
        let domid = 1000 + self.xen.maps.load(Ordering::Relaxed) as u16 % 1000;
        let mut fresh = self.connected(domid, "b", SMALL);
        fresh.check();
        fresh.close();
        assert_eq!(fresh.memory.mapped(), 0);
        self.toolstack().detach(fresh.node, WAIT, false).unwrap();
        fresh.destroy();
    }
}

impl Drop for Bed {
    /// Destroys all guests, so that the server waits for none.
    fn drop(&mut self) {
        for ram in [&self.a, &self.b] {
            ram.hold.store(false, Ordering::Release);
        }
        self.daemon.end_guests();
    }
}
