use super::*;
use crate::exports::ExportLimits;
use crate::shares::ClientLimits;
use crate::wanted::{Configured, Steps};
use pvblk_backend::{Backend, BackendOptions, Disks, StopTimes};
use pvblk_protocol::nbd::NbdAddr;
use pvblk_protocol::xenbus::BackendOffers;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A bound that only a hang reaches.
pub(super) const HANG: Duration = Duration::from_secs(120);

pub(super) struct Bed {
    pub registry: Arc<Registry>,
    dir: tempfile::TempDir,
}

impl Bed {
    pub fn new() -> Bed {
        let options = BackendOptions {
            workers: 1,
            ..BackendOptions::default()
        };
        let backend = Backend::start(&options).unwrap();
        let service = Service::new(backend, Disks::default(), Arc::default());
        let clients = ClientLimits::default();
        let limits = ExportLimits {
            offers: BackendOffers::default(),
            queues: 2,
            unallocated: None,
            clients,
            allow_remote: false,
        };
        let opener = Arc::new(Opener::default().serving(2, false));
        let exports = Arc::new(Exports::new(&service, &opener, &limits));
        let traces = Arc::new(Traces::of_server());
        let budgets = clients.budgets(1);
        Bed {
            registry: Registry::new(&service, &opener, &exports, &traces, budgets),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn add(&self, name: &str, volume: &str) -> Result<DiskShown, Refused> {
        self.registry.add(name, &DiskWanted::new(volume), HANG)
    }

    pub fn remove(&self, name: &str, force: bool) -> Result<Removed, Refused> {
        self.registry.remove(name, force, HANG)
    }

    fn names(&self) -> Vec<String> {
        let page = self.registry.list(None, usize::MAX);
        page.disks.into_iter().map(|d| d.name).collect()
    }
}

#[test]
fn disks_come_and_go_and_leave_nothing_behind() {
    let bed = Bed::new();
    let file = format!("file:{},size=1M", bed.path("a.img").display());
    let shown = bed.add("a", &file).unwrap();
    assert_eq!(
        (shown.state.as_str(), shown.size_bytes),
        ("serving", 1 << 20)
    );
    let again = bed.add("a", "mem:1M").unwrap_err();
    assert_eq!(again.why, Why::Exists, "{again}");
    // Its file is locked as long as it is open.
    let locked = bed.add("b", &file).unwrap_err();
    assert_eq!(locked.why, Why::Failed, "{locked}");
    assert_eq!(bed.names(), ["a"], "a name that failed is free");
    let device = Arc::downgrade(bed.registry.service.disks().find("a").unwrap().device());
    assert_eq!(bed.remove("a", false).unwrap().state, "gone");
    assert_eq!(device.strong_count(), 0);
    assert_eq!(bed.remove("a", false).unwrap_err().why, Why::NoDisk);
    for _ in 0..20 {
        bed.add("a", &file).unwrap();
        bed.remove("a", true).unwrap();
    }
    assert!(bed.names().is_empty());
    assert!(bed.registry.service.pressure().report().disks.is_empty());
    assert_eq!(bed.registry.state.lock().opening, 0);
}

#[test]
fn mistakes_are_told_before_anything_is_opened() {
    let bed = Bed::new();
    for (name, volume) in [("a b", "mem:1M"), ("a", "floppy:1M"), ("", "mem:1M")] {
        assert_eq!(bed.add(name, volume).unwrap_err().why, Why::Invalid);
    }
    let lost = format!("file:{}", bed.path("none.img").display());
    let refused = bed.add("a", &lost).unwrap_err();
    assert!(
        refused.why == Why::Failed && refused.text.starts_with("disk a: "),
        "{refused}"
    );
    assert!(bed.names().is_empty());
}

#[test]
fn a_disk_that_is_used_goes_by_force_only() {
    let bed = Bed::new();
    bed.add("a", "mem:1M").unwrap();
    let address = NbdAddr::Unix(bed.path("nbd"));
    let listen = address.to_string().parse().unwrap();
    bed.registry.exports.add_nbd(&listen).unwrap();
    let client = nbd_client(&bed.path("nbd"), "a");
    let start = Instant::now();
    while bed.registry.show("a").unwrap().users.is_empty() {
        assert!(start.elapsed() < HANG, "the client isn't counted");
        std::thread::sleep(Duration::from_millis(1));
    }
    let refused = bed.remove("a", false).unwrap_err();
    assert_eq!(refused.why, Why::InUse);
    assert!(
        refused.text.contains("used by NBD") && refused.text.contains("--force"),
        "{refused}"
    );
    let shown = bed.registry.show("a").unwrap();
    assert_eq!((shown.state.as_str(), shown.users.len()), ("serving", 1));
    bed.remove("a", true).unwrap();
    // The connection is closed.
    client.set_read_timeout(Some(HANG)).unwrap();
    assert_eq!(
        std::io::Read::read(&mut &client, &mut [0; 16]).unwrap_or(0),
        0
    );
    assert!(bed.names().is_empty());
    let used = bed.registry.exports.remove_nbd(&address, false);
    assert!(used.is_ok(), "nobody is connected");
    assert!(!bed.path("nbd").exists());
}

/// A client in its transmission phase.
fn nbd_client(socket: &Path, export: &str) -> UnixStream {
    use std::io::{Read, Write};
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    // Fixed new style without padding; NBD_OPT_EXPORT_NAME.
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(b"IHAVEOPT");
    bytes.extend(1u32.to_be_bytes());
    bytes.extend((export.len() as u32).to_be_bytes());
    bytes.extend(export.as_bytes());
    stream.write_all(&bytes).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

#[test]
fn an_open_that_hangs_holds_up_its_own_command_and_frees_the_name_when_it_ends() {
    let bed = Bed::new();
    // A server that says nothing.
    let path = bed.path("mute");
    let mute = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let wanted = DiskWanted::new(format!("nbd+unix:///x?socket={}", path.display()));
    let patience = Duration::from_millis(200);
    let late = bed.registry.add("slow", &wanted, patience).unwrap_err();
    assert_eq!(late.why, Why::Late, "{late}");
    // Others come and go beside it.
    bed.add("quick", "mem:1M").unwrap();
    assert_eq!(bed.registry.show("slow").unwrap().state, "opening");
    assert_eq!(bed.names(), ["quick", "slow"]);
    let busy = bed.add("slow", "mem:1M").unwrap_err();
    assert_eq!(busy.why, Why::Busy, "{busy}");
    bed.remove("quick", false).unwrap();
    // Its end: the call returns.
    drop(mute);
    let start = Instant::now();
    while !bed.names().is_empty() {
        assert!(start.elapsed() < HANG, "the name isn't freed");
        std::thread::sleep(Duration::from_millis(5));
    }
    bed.add("slow", "mem:1M").unwrap();
}

#[test]
fn sockets_of_disks_come_and_go() {
    let bed = Bed::new();
    let socket = |name: &str| format!("unix:{}", bed.path(name).display());
    let wanted = DiskWanted {
        vhost_user: vec![socket("one"), socket("two")],
        ..DiskWanted::new("mem:1M")
    };
    bed.registry.add("a", &wanted, HANG).unwrap();
    assert!(bed.path("one").exists() && bed.path("two").exists());
    let three = Export::VhostUser {
        disk: "a".into(),
        socket: socket("three"),
    };
    bed.registry.add_export(&three, HANG).unwrap();
    let twice = bed.registry.add_export(&three, HANG).unwrap_err();
    assert_eq!(twice.why, Why::Exists);
    let shown = bed.registry.show("a").unwrap();
    assert_eq!(shown.exports.len(), 3);
    // A disk whose socket is taken isn't added, and takes none.
    let other = DiskWanted {
        vhost_user: vec![socket("four"), socket("one")],
        ..DiskWanted::new("mem:1M")
    };
    let refused = bed.registry.add("b", &other, HANG).unwrap_err();
    assert!(refused.text.contains("in use"), "{refused}");
    assert!(!bed.path("four").exists() && bed.path("one").exists());
    bed.registry.remove_export(&three, false, HANG).unwrap();
    assert!(!bed.path("three").exists());
    // One that is connected keeps its socket.
    let one = Export::VhostUser {
        disk: "a".into(),
        socket: socket("one"),
    };
    let machine = UnixStream::connect(bed.path("one")).unwrap();
    // The connection was there before the order, so the server takes it first.
    let used = bed.registry.remove_export(&one, false, HANG).unwrap_err();
    assert_eq!(used.why, Why::InUse, "{used}");
    bed.registry.remove_export(&one, true, HANG).unwrap();
    assert!(!bed.path("one").exists());
    machine.set_read_timeout(Some(HANG)).unwrap();
    assert_eq!(
        std::io::Read::read(&mut &machine, &mut [0; 16]).unwrap_or(0),
        0
    );
    bed.remove("a", false).unwrap();
    assert!(!bed.path("two").exists());
}

#[test]
fn a_socket_is_named_by_its_address_and_keeps_its_options() {
    let bed = Bed::new();
    // The user who runs the tests is in this group, and may be in no other.
    let group = rustix::process::getegid().as_raw();
    let options = format!("socket-group={group},socket-mode=640");
    let plain = |name: &str| format!("unix:{}", bed.path(name).display());
    let full = |name: &str| format!("{},{options}", plain(name));
    let disk = || "a".to_owned();
    let vhost = |socket| Export::VhostUser {
        disk: disk(),
        socket,
    };
    let kinds: [(&str, &dyn Fn(String) -> Export); 3] = [
        ("vhost", &vhost),
        ("local", &Export::Local),
        ("nbd", &Export::Nbd),
    ];
    let state = bed.keep(&[("a", &DiskWanted::new("mem:1M"))]);
    bed.add("a", "mem:1M").unwrap();
    let kept = || {
        let (disk, all) = (state.disk("a").unwrap(), state.listeners());
        [disk.vhost_user, all.local, all.nbd].concat()
    };
    for (name, export) in kinds {
        let shown = bed.registry.add_export(&export(full(name)), HANG).unwrap();
        assert_eq!(shown.place, plain(name), "{name}");
        let file = std::fs::metadata(bed.path(name)).unwrap();
        assert_eq!(file.permissions().mode() & 0o777, 0o640, "{name}");
        let twice = bed.registry.add_export(&export(plain(name)), HANG);
        assert!(twice.is_err(), "{name}");
        assert!(kept().contains(&full(name)), "{:?}", kept());
    }
    let exports = bed.registry.show("a").unwrap().exports;
    assert!(
        exports.iter().all(|e| !e.contains("socket-")),
        "{exports:?}"
    );
    // One that is used stays as it was given.
    let client = nbd_client(&bed.path("nbd"), "a");
    let machine = UnixStream::connect(bed.path("vhost")).unwrap();
    for (name, export) in [("nbd", kinds[2].1), ("vhost", kinds[0].1)] {
        let remove = || {
            bed.registry
                .remove_export(&export(plain(name)), false, HANG)
        };
        assert_eq!(remove().unwrap_err().why, Why::InUse, "{name}");
        assert!(kept().contains(&full(name)), "{:?}", kept());
    }
    drop((client, machine));
    for (name, export) in kinds {
        let shown = bed.registry.remove_export(&export(plain(name)), true, HANG);
        assert_eq!(shown.unwrap().place, plain(name));
        assert!(!bed.path(name).exists(), "{name}");
    }
    assert!(kept().is_empty(), "{:?}", kept());
    // A reload closes a listener by the text that it was given.
    let listen = "tcp:127.0.0.1:0,allow=any=a:ro";
    let added = bed.registry.add_export(&Export::Nbd(listen.into()), HANG);
    added.unwrap();
    let removed = bed
        .registry
        .remove_export(&Export::Nbd(listen.into()), false, HANG);
    assert_eq!(removed.unwrap().place, "tcp:127.0.0.1:0");
}

#[test]
fn a_server_that_stops_takes_no_disk_and_flushes_those_that_were_removed() {
    let bed = Bed::new();
    bed.add("a", "mem:1M").unwrap();
    bed.registry.stop();
    assert_eq!(bed.add("b", "mem:1M").unwrap_err().why, Why::Stopping);
    assert_eq!(bed.remove("a", true).unwrap_err().why, Why::Stopping);
    let times = StopTimes {
        drain: HANG,
        flush: HANG,
    };
    assert_eq!(bed.registry.service.stop(times).len(), 1);
}

#[test]
fn ten_thousand_disks_are_listed_in_pages() {
    let bed = Bed::new();
    for n in 0..2500 {
        bed.add(&format!("d{n}"), "null:1M").unwrap();
    }
    let (mut pages, mut after, mut all) = (0, None, Vec::new());
    loop {
        let page = bed.registry.list(after.as_deref(), usize::MAX);
        pages += 1;
        all.extend(page.disks.into_iter().map(|d| d.name));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!((pages, all.len()), (3, 2500));
    assert!(all.is_sorted());
}

#[test]
fn a_disk_changes_while_it_is_served() {
    let bed = Bed::new();
    bed.add("a", "mem:1M").unwrap();
    let change = DiskChange {
        exclusive: Some(true),
        limit: None,
    };
    assert!(bed.registry.set("a", &change).unwrap().exclusive);
    let disk = bed.registry.service.disks().find("a").unwrap();
    assert!(disk.users().is_exclusive());
    let none = bed.registry.set("b", &change).unwrap_err();
    assert_eq!(none.why, Why::NoDisk);
}

impl Bed {
    /// Keeps a state, without a file, in which these disks are configured.
    fn keep(&self, disks: &[(&str, &DiskWanted)]) -> Arc<WantedState> {
        let disks = disks.iter().map(|(n, d)| ((*n).to_owned(), (*d).clone()));
        let configured = Configured {
            disks: disks.collect(),
            ..Configured::default()
        };
        let state = Arc::new(WantedState::open(configured, None).unwrap());
        self.registry.keep_in(&state);
        state
    }
}

#[test]
fn a_disk_that_could_not_be_opened_is_shown_and_tried_again() {
    let bed = Bed::new();
    let image = bed.path("a.img");
    let wanted = DiskWanted {
        vhost_user: vec![format!("unix:{}", bed.path("a.sock").display())],
        ..DiskWanted::new(format!("file:{}", image.display()))
    };
    let state = bed.keep(&[("a", &wanted)]);
    bed.registry
        .add_failed("a", &wanted, "disk a: its medium is gone")
        .unwrap();
    let shown = bed.registry.show("a").unwrap();
    assert_eq!(
        (shown.state.as_str(), shown.health.as_str()),
        ("failed", "failed")
    );
    assert_eq!(shown.reason.as_deref(), Some("its medium is gone"));
    assert_eq!(
        (bed.names(), bed.registry.failed()),
        (vec!["a".to_owned()], 1)
    );
    // Nobody can use it, and the error says what to do.
    let change = DiskChange {
        exclusive: Some(true),
        limit: None,
    };
    let refused = bed.registry.set("a", &change).unwrap_err();
    assert!(
        refused
            .text
            .contains("its medium is gone; `pvblk disk add a` tries again"),
        "{refused}"
    );
    // Again, in vain: the reason is the new one.
    let refused = bed.registry.add_again("a", HANG).unwrap_err();
    let shown = bed.registry.show("a").unwrap();
    assert_eq!(shown.state, "failed");
    let reason = shown.reason.unwrap();
    assert!(
        refused.text.ends_with(&reason) && reason.contains("a.img"),
        "{refused}: {reason}"
    );
    // Another volume that can't be opened either changes nothing of what is wanted.
    let other = format!("file:{}", bed.path("b.img").display());
    bed.add("a", &other).unwrap_err();
    let shown = bed.registry.show("a").unwrap();
    assert_eq!(
        (shown.volume, shown.reason),
        (wanted.volume.clone(), Some(reason))
    );
    assert_eq!(state.disk("a"), Some(wanted.clone()));
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let shown = bed.registry.add_again("a", HANG).unwrap();
    assert_eq!((shown.state.as_str(), shown.reason), ("serving", None));
    assert!(bed.path("a.sock").exists() && bed.registry.failed() == 0);
    assert_eq!(
        bed.registry.add_again("a", HANG).unwrap_err().why,
        Why::Exists
    );
    assert_eq!(
        bed.registry.add_again("b", HANG).unwrap_err().why,
        Why::NoDisk
    );
    // One that is removed isn't wanted any more, and isn't shown when it fails.
    bed.remove("a", false).unwrap();
    std::fs::remove_file(&image).unwrap();
    assert!(bed.registry.add("a", &wanted, HANG).is_err() && bed.names().is_empty());
}

#[test]
fn a_disk_that_could_not_be_opened_is_removed_or_replaced() {
    let bed = Bed::new();
    let wanted = DiskWanted::new(format!("file:{}", bed.path("none.img").display()));
    let state = bed.keep(&[("a", &wanted), ("b", &wanted)]);
    for name in ["a", "b"] {
        bed.registry
            .add_failed(name, &wanted, "no such file")
            .unwrap();
    }
    assert_eq!(bed.remove("a", false).unwrap().state, "gone");
    assert_eq!((state.disk("a"), bed.names()), (None, vec!["b".to_owned()]));
    assert_eq!(bed.add("b", "mem:1M").unwrap().state, "serving");
    assert_eq!(state.disk("b"), Some(DiskWanted::new("mem:1M")));
    bed.remove("b", false).unwrap();
}

#[test]
fn a_reload_tries_disks_again_that_could_not_be_opened() {
    let bed = Bed::new();
    let wanted = |name: &str| {
        let path = bed.path(name).display().to_string();
        DiskWanted::new(format!("file:{path},size=1M"))
    };
    // Its folder isn't there.
    let (a, b) = (wanted("a/a.img"), wanted("b/b.img"));
    let state = bed.keep(&[("a", &a), ("b", &b)]);
    let server = SharedRegistry(Arc::clone(&bed.registry));
    let carry_out = || -> Vec<bool> {
        let wanted = crate::wanted::plan::Served {
            disks: state.disks().into_iter().collect(),
            listeners: state.listeners(),
        };
        server.forget_failed(&wanted);
        let steps = crate::wanted::plan::plan(&server.present(), &wanted);
        steps.iter().map(|s| server.carry_out(s).is_ok()).collect()
    };
    assert_eq!(carry_out(), [false, false]);
    assert_eq!((bed.names().len(), bed.registry.failed()), (2, 2));
    std::fs::create_dir(bed.path("a")).unwrap();
    assert_eq!(carry_out(), [true, false]);
    assert_eq!(bed.registry.show("a").unwrap().state, "serving");
    // A configuration without it forgets one that isn't open.
    let configured = Configured {
        disks: vec![("a".into(), a)],
        ..Configured::default()
    };
    state.reload(configured).unwrap();
    assert_eq!(carry_out(), [] as [bool; 0]);
    assert_eq!(
        (bed.names(), bed.registry.failed()),
        (vec!["a".to_owned()], 0)
    );
    bed.remove("a", false).unwrap();
}
