//! Calls of a process that was taken over.

use super::*;
use crate::events::EventForm;
use pvblk_client::dial::SocketType;
use pvblk_volume::{FileAnswer, FileCall, VolumeSpec};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use tempfile::TempDir;

/// A parent with a socket and a folder of sockets in its policy, and the end of its child.
struct Scene {
    dir: TempDir,
    child: OwnedFd,
    server: Arc<Server>,
    calls: u64,
}

impl Scene {
    fn new() -> Scene {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("folder")).unwrap();
        let (socket, child) = fdpass::pair().unwrap();
        let named = [
            NbdAddr::Unix(at("named")),
            "tcp:127.0.0.1:9".parse().unwrap(),
        ];
        let folder = format!("unix:{}", at("folder").display());
        let server = Arc::new(Server {
            socket,
            sending: Mutex::default(),
            policy: Policy::new(&[], &[], &[]).unwrap(),
            servers: Servers::new(&named, &[folder]).unwrap(),
            library: None,
            connecting: Places::new(CONNECTING),
            events: None,
            allow_remote: false,
            web_allow_remote: false,
            secured: Vec::new(),
            names: Mutex::default(),
            calls: Places::new(AT_ONCE),
        });
        let reader = Arc::clone(&server);
        std::thread::spawn(move || reader.serve());
        Scene {
            dir,
            child,
            server,
            calls: 0,
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn tell(&mut self, of: Call) -> u64 {
        self.calls += 1;
        let number = self.calls;
        send(self.child.as_fd(), &Numbered { number, of }, None).unwrap();
        number
    }

    /// The next answer, with the number of its call.
    fn answer(&self) -> (u64, Answer, Option<OwnedFd>) {
        let (answer, file) = receive::<Numbered<Answer>>(&self.child).unwrap().unwrap();
        (answer.number, answer.of, file)
    }

    fn ask(&mut self, of: Call) -> (Answer, Option<OwnedFd>) {
        let number = self.tell(of);
        let (answered, answer, file) = self.answer();
        assert_eq!(answered, number);
        (answer, file)
    }

    fn connect(&mut self, address: &str) -> (Answer, Option<OwnedFd>) {
        self.ask(connect(address))
    }
}

fn connect(address: &str) -> Call {
    Call::Connect {
        address: address.into(),
        kind: SocketKind::Stream,
        timeout: Duration::MAX,
    }
}

#[test]
fn a_child_that_was_taken_over_is_connected_to_nobody_else() {
    let mut scene = Scene::new();
    let secret = UnixListener::bind(scene.at("secret")).unwrap();
    secret.set_nonblocking(true).unwrap();
    symlink(scene.at("secret"), scene.at("folder/link")).unwrap();
    symlink(scene.dir.path(), scene.at("folder/way")).unwrap();
    symlink(scene.at("secret"), scene.at("named")).unwrap();
    let unix = |name: &str| format!("unix:{}", scene.dir.path().join(name).display());
    let dropped = pvblk_sys::fdpass::pair().unwrap().0;
    let wrong = [
        unix("secret"),
        unix("named"),
        unix("folder/link"),
        unix("folder/way/secret"),
        unix("folder/../secret"),
        unix("./secret"),
        unix("folder"),
        unix("folder/none"),
        format!("unix:{}\0", scene.at("folder/a").display()),
        "unix:\0abstract".into(),
        "unix:/".into(),
        "unix:/proc/self/exe".into(),
        format!(
            "unix:/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&dropped)
        ),
        "unix:/run/systemd/private".into(),
        "tcp:127.0.0.1:10".into(),
        "tcp:0.0.0.0:9".into(),
        "tcp:localhost:9".into(),
        "tcp:[::ffff:127.0.0.1]:9".into(),
        "tcp:127.0.0.1 :9".into(),
        "tcp:127.0.0.1:9/".into(),
        String::new(),
        "x".repeat(100_000),
    ];
    for address in wrong {
        let (answer, socket) = scene.connect(&address);
        let shown = &address[..address.len().min(80)];
        assert!(socket.is_none(), "{shown:?}");
        let refused = matches!(answer, Answer::Refused { .. } | Answer::Failed(_));
        assert!(refused, "{shown:?}: {answer:?}");
    }
    assert!(secret.accept().is_err(), "somebody was connected");
    // It goes on with what is right.
    let right = UnixListener::bind(scene.at("folder/right")).unwrap();
    let address = format!("unix:{}", scene.at("folder/right").display());
    let (answer, socket) = scene.connect(&address);
    assert!(matches!(answer, Answer::Connected) && socket.is_some());
    right.accept().unwrap();
    // All places are back.
    for _ in 0..CONNECTING {
        assert!(scene.server.connecting.try_take());
    }
    let (answer, _) = scene.connect(&address);
    assert!(is_busy(&answer), "{answer:?}");
}

fn is_busy(answer: &Answer) -> bool {
    matches!(answer, Answer::Failed(number) if *number == Errno::BUSY.raw_os_error())
}

#[test]
fn servers_that_do_not_accept_hold_up_no_file() {
    let mut scene = Scene::new();
    let path = scene.at("folder/full");
    let (listener, at) = pvblk_sys::socket::unix(&path, SocketType::STREAM).unwrap();
    rustix::net::bind(&listener, &at).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    // The only one that it lets wait to be accepted.
    let _first = UnixStream::connect(&path).unwrap();
    let address = format!("unix:{}", path.display());
    let more = 8;
    for _ in 0..CONNECTING + more {
        scene.tell(connect(&address));
    }
    let file = scene.tell(Call::File(FileCall::Stat("/".into())));
    let (mut busy, mut is_stated) = (0, false);
    while busy < more || !is_stated {
        let (number, answer, _) = scene.answer();
        match number == file {
            true => is_stated = matches!(answer, Answer::File(FileAnswer::Stat(..))),
            false => {
                assert!(is_busy(&answer), "{answer:?}");
                busy += 1;
            }
        }
    }
    let listener = UnixListener::from(listener);
    listener.set_nonblocking(false).unwrap();
    for _ in 0..=CONNECTING {
        listener.accept().unwrap();
    }
    for _ in 0..CONNECTING {
        let (_, answer, socket) = scene.answer();
        assert!(matches!(answer, Answer::Connected) && socket.is_some());
    }
}

#[test]
fn a_child_that_was_taken_over_opens_no_other_image() {
    let mut scene = Scene::new();
    let images = ["rbd:p/a,conf=/etc/ceph/ceph.conf"
        .parse::<VolumeSpec>()
        .unwrap()];
    let images = images.map(|spec| spec.reach().images.remove(0));
    let library = Library::of_test(&images);
    for wrong in [
        "rbd:p/b,conf=/etc/ceph/ceph.conf",
        "rbd:p/a",
        "rbd:p/a,conf=/tmp/evil.conf",
        "rbd:p/a,conf=/etc/ceph/ceph.conf,nolock",
        "rbd:p/a,conf=/etc/ceph/../ceph/ceph.conf",
        "file:/etc/shadow",
        "",
    ] {
        let e = library.open(wrong).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::PermissionDenied, "{wrong}");
        let (answer, _) = scene.ask(Call::OpenImage(wrong.into()));
        assert!(matches!(answer, Answer::Refused { by_user: true, .. }));
    }
    let (answer, _) = scene.ask(Call::CloseImage("image-0".into()));
    assert!(matches!(answer, Answer::Done));
}

#[test]
fn a_child_that_was_taken_over_runs_no_program() {
    let mut scene = Scene::new();
    let event = EventForm {
        number: 1,
        run: String::new(),
        time: "/bin/sh".into(),
        kind: "disk-added".into(),
        severity: "info".into(),
        disk: None,
        text: "/bin/sh".into(),
        left_out: 0,
        fields: Default::default(),
    };
    let (answer, _) = scene.ask(Call::Event(event));
    assert!(matches!(answer, Answer::Failed(_)), "{answer:?}");
    let (answer, _) = scene.ask(Call::LastEvents);
    assert!(matches!(answer, Answer::Done));
}
