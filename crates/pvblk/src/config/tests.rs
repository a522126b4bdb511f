use super::*;
use std::path::Path;

#[test]
fn times_have_units() {
    assert_eq!(time("10ms"), Ok(Duration::from_millis(10)));
    assert_eq!(time("1.5us"), Ok(Duration::from_nanos(1500)));
    for wrong in ["", "10", "ms", "-1s", "10 ms", "1e300s", "1h"] {
        assert!(time(wrong).is_err(), "{wrong}");
    }
}

fn resolve(args: &ServeArgs) -> Result<ServeConfig> {
    ServeConfig::resolve(args, &Opener::default())
}

fn args(disks: &[&str]) -> ServeArgs {
    ServeArgs {
        disks: disks.iter().map(|s| (*s).to_owned()).collect(),
        nbd: vec!["unix:/tmp/x.sock".into()],
        ..ServeArgs::default()
    }
}

#[test]
fn mistakes_are_told_in_one_line_that_says_what_to_do() {
    let cases: &[(&[&str], &str)] = &[
        (&[], "--disk NAME=VOLUME"),
        (&["a"], "NAME=VOLUME"),
        (&["a=mem:1M", "a=mem:2M"], "given twice"),
        (&["a b=mem:1M"], "letters"),
        (&["a=floppy:1M"], "disk a"),
    ];
    for (disks, expect) in cases {
        let e = format!("{:#}", resolve(&args(disks)).unwrap_err());
        assert!(e.contains(expect), "{e}");
        assert!(!e.contains('\n'), "{e}");
    }
    let mut a = args(&["a=mem:1M"]);
    a.max_ring_pages = Some(3);
    assert!(resolve(&a).is_err());
    a.max_ring_pages = None;
    a.buffer_floor_pages = Some(65);
    assert!(resolve(&a).is_err());
    a.buffer_floor_pages = None;
    a.max_buffer_pages = Some(16385);
    assert!(resolve(&a).is_err());
    a.max_buffer_pages = None;
    a.nbd.clear();
    assert!(resolve(&a).is_err());
}

#[test]
fn a_virtual_machines_socket_names_its_disk() {
    let mut a = args(&["a=mem:1M"]);
    a.nbd.clear();
    for (wrong, expect) in [
        ("a", "NAME=unix:PATH"),
        ("a=/tmp/x", "unix:PATH"),
        ("b=unix:/tmp/x", "no disk b"),
    ] {
        a.vhost_user = vec![wrong.into()];
        let e = format!("{:#}", resolve(&a).unwrap_err());
        assert!(e.contains(expect) && !e.contains('\n'), "{e}");
    }
    a.vhost_user = vec!["a=unix:/tmp/x".into()];
    let c = resolve(&a).unwrap();
    assert_eq!(c.vhost_user[0].1.path, Path::new("/tmp/x"));
    for (text, limit) in [("none", None), ("3G", Some(3 << 30))] {
        a.max_guest_unallocated = Some(text.into());
        assert_eq!(resolve(&a).unwrap().max_guest_unallocated, limit);
    }
    a.max_guest_unallocated = Some("much".into());
    let e = format!("{:#}", resolve(&a).unwrap_err());
    assert!(
        e.contains("max-guest-unallocated") && !e.contains('\n'),
        "{e}"
    );
}

#[test]
fn disks_for_xen_guests_by_name_are_checked_before_anything_starts() {
    let mut a = args(&["a=mem:1M", "b=mem:1M"]);
    a.xen_attach = vec!["a=debian".into()];
    let e = resolve(&a).unwrap_err().to_string();
    assert!(e.contains("--xen-attach a=debian: it needs --xen"), "{e}");
    a.xen = true;
    let cases: &[(&[&str], &str)] = &[
        (&["a"], "DISK=GUEST"),
        (&["c=debian"], "no disk c"),
        (&["a="], "guest's name"),
        (&["a=7:xvda"], "guest's name"),
        (&["a=debian:hda"], "hda"),
        (&["a=debian:"], "not a device"),
        (&["a=debian", "a=debian:xvdb"], "gets disk a already"),
        (
            &["a=debian:xvda", "b=debian:51712"],
            "that device is disk a",
        ),
    ];
    for (orders, expect) in cases {
        a.xen_attach = orders.iter().map(|s| (*s).to_owned()).collect();
        let e = format!("{:#}", resolve(&a).unwrap_err());
        assert!(e.contains(expect) && !e.contains('\n'), "{e}");
        assert!(e.starts_with("--xen-attach "), "{e}");
    }
    a.xen_attach = vec!["a=deb:ian:xvdb".into(), "a=other".into()];
    let all = resolve(&a).unwrap().xen_attach;
    let told: Vec<_> = all.iter().map(|o| (o.guest.as_str(), o.device)).collect();
    assert_eq!(told, [("deb:ian", Some(51728)), ("other", None)]);
}

#[test]
fn a_file_and_flags_add_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.toml");
    std::fs::write(
        &path,
        "local = 'unix:/tmp/r.sock'\nworkers = 3\nmax_buffer_pages = 7\nmax_client_memory = '1G'\nmax_connections_per_disk = 9\nxen = true\n[disk.x]\nvolume = 'mem:1M'\nxen_attach = ['one', 'two:xvda']\n",
    )
    .unwrap();
    let mut a = args(&["y=null:1M"]);
    a.config = Some(path.clone());
    let c = resolve(&a).unwrap();
    assert_eq!(c.disks.len(), 2);
    assert_eq!((c.workers, c.max_queues), (3, 4));
    assert_eq!(c.buffers.max_pages, 7);
    let clients = (c.clients.memory, c.clients.connections_of_disk);
    assert_eq!(clients, (Some(1 << 30), 9));
    let guests: Vec<_> = c.xen_attach.iter().map(|o| o.guest.as_str()).collect();
    assert_eq!(guests, ["one", "two"]);
    assert_eq!(c.local.unwrap().path, Path::new("/tmp/r.sock"));
    std::fs::write(&path, "\nlocale = 'x'\n").unwrap();
    let e = resolve(&a).unwrap_err().to_string();
    assert!(e.contains("line 2"), "{e}");
}

#[test]
fn the_file_is_read_by_the_opener() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pvblk.toml");
    let opener = Opener::default();
    let refused = |path: &Path| format!("{:#}", File::read(path, &opener).unwrap_err());
    let none = std::io::Error::from_raw_os_error(2);
    let expected = format!("reading {}: {none}", path.display());
    assert_eq!(refused(&path), expected);
    std::fs::write(&path, "nbd = [\"unix:/a\"]\nworkers = \"x\"\n").unwrap();
    assert!(refused(&path).contains("pvblk.toml, line 2: "));
    std::fs::write(&path, b"nbd = [\"unix:/\xff\"]").unwrap();
    let text = refused(&path);
    assert!(
        text.ends_with("stream did not contain valid UTF-8"),
        "{text}"
    );
    std::fs::write(&path, "nbd = [\"unix:/a\"]\n").unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink("pvblk.toml", &link).unwrap();
    assert_eq!(File::read(&link, &opener).unwrap().nbd, ["unix:/a"]);
}
