//! One disk, and each pair of exports that have front ends: while a request of a front end that is gone is at work, no other one begins, by
//! whatever export either of them uses. It makes no difference whether the one that comes had been offered the disk before.

#![allow(
    clippy::duplicate_mod,
    reason = "each support module brings its own disk in memory"
)]

mod local_support;
mod vhost_support;
mod xen_support;

use local_support::{Fixture, RINGS, Raw, offers};
use pvblk_backend::FenceOpened;
use pvblk_client::local::{ConnectOptions, connect};
use pvblk_export::vhost_user::{Listen, VhostLimits, VhostServer};
use pvblk_export::xen::XenServer;
use pvblk_export::xen::toolstack::Toolstack;
use pvblk_protocol::blkif::wire::OP_WRITE;
use pvblk_protocol::xenbus::BackendOffers;
use pvblk_testing::wait;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use vhost_support::Front;
use xen_support::{Daemon, FakeXen, Guest, Handle, SMALL, whole};

#[derive(Clone, Copy, Debug)]
enum Export {
    Local,
    Vhost,
    Xen,
}
use Export::{Local, Vhost, Xen};

/// Disk a by all three exports: by vhost-user at two sockets, so that the second front end isn't held up by the first one's session.
struct Bed {
    f: Fixture,
    daemon: Arc<Daemon>,
    xen: Arc<FakeXen>,
    _vhost: VhostServer,
    _xen_server: XenServer,
}

/// The rest of a step: to vanish, or to begin and to be served.
type Rest = Box<dyn FnOnce() + Send>;

impl Bed {
    fn new() -> Bed {
        let f = Fixture::new(offers(1, 1));
        let listen = |name: &str| Listen {
            disk: "a".into(),
            path: f.dir.path().join(name),
        };
        let limits = VhostLimits {
            queues: 4,
            unallocated: None,
        };
        let listens = [listen("first"), listen("second")];
        let vhost = VhostServer::bind(&listens, &f.service, limits).unwrap();
        let (daemon, xen) = (Arc::new(Daemon::new()), Arc::<FakeXen>::default());
        let hypervisor = Arc::new(Handle(Arc::clone(&xen)));
        let offers = BackendOffers::default();
        let server = XenServer::start(daemon.client(), hypervisor, &f.service, offers, Vec::new());
        Bed {
            f,
            daemon,
            xen,
            _vhost: vhost,
            _xen_server: server.unwrap(),
        }
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.f.dir.path().join(name)
    }

    fn attached_guest(&self, domid: u16) -> Guest {
        let guest = Guest::new(&self.daemon, &self.xen, domid);
        let mut toolstack = Toolstack::over(self.daemon.client()).unwrap();
        toolstack.attach(guest.node, "a").unwrap();
        guest
    }

    fn hold(&self) {
        self.f.ram.hold.store(true, Ordering::Release);
    }

    /// A front end with a write at the device; returns how it vanishes.
    fn at_work(&self, export: Export) -> Rest {
        let rest: Rest = match export {
            Local => {
                let options = ConnectOptions {
                    memory_bytes: 1 << 20,
                    timeout: Duration::from_secs(60),
                    ..ConnectOptions::default()
                };
                let (mut parts, link) = connect(self.f.server.path(), "a", &options).unwrap();
                self.f.keep_a_write(&mut parts);
                Box::new(move || drop((parts, link)))
            }
            Vhost => {
                let mut front = Front::connect(&self.socket("first"));
                front.negotiate();
                front.add_memory();
                front.start(0, 0);
                self.hold();
                let driver = &front.drivers[0];
                let data = driver.at(driver.data_offset());
                driver.build(0, 1, 0, &[(data, 512, false)], true);
                front.submit(0, 0);
                Box::new(move || drop(front))
            }
            Xen => {
                let mut guest = self.attached_guest(7);
                guest.connect(SMALL);
                self.hold();
                let page = guest.page(false);
                guest.put(0, OP_WRITE, 0, &[whole(page.gref)]);
                guest.kick(0);
                Box::new(move || guest.daemon.remove(&guest.node.back_end(0)))
            }
        };
        wait("its write is at the device", || {
            self.f.ram.held.load(Ordering::Acquire) == 1
        });
        rest
    }

    /// A front end that has heard what is offered; returns how it begins and waits to be served.
    fn offered(&self, export: Export) -> Box<dyn FnOnce() -> Rest + Send> {
        match export {
            Local => {
                let raw = Raw::new(&self.f);
                Box::new(move || {
                    raw.prepare();
                    raw.until("state", "2");
                    Box::new(move || {
                        raw.write(&RINGS);
                        raw.until("state", "4");
                    })
                })
            }
            Vhost => {
                let path = self.socket("second");
                Box::new(move || {
                    let mut front = Front::connect(&path);
                    front.negotiate();
                    front.add_memory();
                    Box::new(move || {
                        front.start(0, 0);
                        front.write(0, 1, &[1; 512]);
                    })
                })
            }
            Xen => {
                let mut guest = self.attached_guest(9);
                Box::new(move || {
                    guest.until_back("2");
                    Box::new(move || {
                        let keys = guest.keys(SMALL);
                        guest.publish(&keys, "3");
                        guest.until_back("4");
                        guest.set_state("4");
                        guest.check();
                    })
                })
            }
        }
    }
}

impl Drop for Bed {
    /// No guest is left for the server to wait for.
    fn drop(&mut self) {
        self.f.release();
        self.daemon.end_guests();
    }
}

fn pair(gone: Export, comes: Export, was_offered: bool) {
    let bed = Bed::new();
    let vanish = bed.at_work(gone);
    let offered = bed.offered(comes);
    // The queues of the one that is gone. It may have opened more than one.
    let queues = bed.f.served();
    let disk = bed.f.service.disks().find("a").unwrap();
    let nobody: FenceOpened = Arc::new(|| ());
    let is_closed = || !disk.users().fence_is_open(&nobody);
    let begin: Rest = match was_offered {
        true => {
            let begin = offered();
            vanish();
            wait("the server sees that it is gone", is_closed);
            begin
        }
        false => {
            vanish();
            wait("the server sees that it is gone", is_closed);
            Box::new(move || offered()())
        }
    };
    let begun = std::thread::spawn(begin);
    std::thread::sleep(Duration::from_millis(150));
    assert!(is_closed(), "{gone:?} is still at work");
    let now = (bed.f.served(), begun.is_finished());
    assert_eq!(now, (queues, false), "{comes:?} begins beside {gone:?}");
    bed.f.release();
    begun.join().unwrap();
    assert_eq!(bed.f.served(), queues + 1, "{gone:?}, {comes:?}");
}

/// A test for each pair: who is gone, and who comes.
macro_rules! pairs {
    ($($name:ident: $gone:ident, $comes:ident;)*) => {
        $(
            #[test]
            fn $name() {
                pair($gone, $comes, false);
                pair($gone, $comes, true);
            }
        )*
    };
}

pairs! {
    a_local_front_end_waits_for_a_local_one: Local, Local;
    a_virtual_machine_waits_for_a_local_front_end: Local, Vhost;
    a_xen_guest_waits_for_a_local_front_end: Local, Xen;
    a_local_front_end_waits_for_a_virtual_machine: Vhost, Local;
    a_virtual_machine_waits_for_another: Vhost, Vhost;
    a_xen_guest_waits_for_a_virtual_machine: Vhost, Xen;
    a_local_front_end_waits_for_a_xen_guest: Xen, Local;
    a_virtual_machine_waits_for_a_xen_guest: Xen, Vhost;
    a_xen_guest_waits_for_another: Xen, Xen;
}
