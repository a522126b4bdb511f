//! Commands that would destroy a user's data without a warning are refused.

use pvblk_e2e::arrays::{Disks, LIMIT, spec, sum};
use pvblk_e2e::daemon::pvblk;
use pvblk_e2e::managed::{Managed, array, name, names};
use pvblk_e2e::nbd::{Command as Nbd, Connection};
use pvblk_e2e::outcome::check;
use pvblk_e2e::stage::unix;
use pvblk_e2e::tools::{Finished, compare, find, need, run, tool};
use pvblk_e2e::{Daemon, MIB, Stop, run_all};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

fn main() -> ExitCode {
    run_all(&[
        ("raid_create_asks_before_it_writes_over_something", created),
        ("raid_add_asks_too", added),
        ("a_container_is_not_served_as_a_disk", contained),
        ("what_a_guest_wrote_to_its_own_disk_is_served", by_a_guest),
        (
            "a_disk_that_looks_like_a_container_stops_no_other",
            beside_others,
        ),
        ("an_array_of_replaced_members_says_how_it_starts", replaced),
    ])
}

/// One line that has these words, and a failure.
fn refused(said: &Finished, words: &[&str]) -> Result<(), Stop> {
    let failed = said.status.is_some_and(|s| !s.success());
    let told = words.iter().all(|w| said.stderr.contains(w));
    check(failed && told && said.stderr.lines().count() == 1, || {
        format!("{words:?} expected in {said:?}")
    })
}

/// Makes a file that has a signature, and names what the file is then.
struct Maker {
    program: &'static str,
    args: &'static [&'static str],
    /// To its standard input.
    input: &'static str,
    /// Arguments behind the file, of one that makes the file itself.
    after: Option<&'static str>,
    /// Its size in MiB.
    mib: u64,
    what: &'static str,
}

const fn maker(program: &'static str, args: &'static [&'static str], what: &'static str) -> Maker {
    Maker {
        program,
        args,
        input: "",
        after: None,
        mib: 64,
        what,
    }
}

const MAKERS: &[Maker] = &[
    maker("mkfs.ext4", &["-qF"], "an ext2, ext3 or ext4 file system"),
    maker(
        "mkfs.ext2",
        &["-qF", "-b", "1024"],
        "an ext2, ext3 or ext4 file system",
    ),
    Maker {
        mib: 320,
        ..maker("mkfs.xfs", &["-qf"], "an XFS file system")
    },
    Maker {
        mib: 128,
        ..maker("mkfs.btrfs", &["-qf"], "a btrfs file system")
    },
    maker("mkfs.vfat", &["-F", "32"], "a FAT file system"),
    maker("mkfs.vfat", &["-F", "16"], "a FAT file system"),
    maker("mkfs.exfat", &[], "an exFAT file system"),
    maker("mkfs.f2fs", &["-q", "-f"], "an F2FS file system"),
    maker("mkntfs", &["-FqQ"], "an NTFS file system"),
    maker("mkswap", &["-q"], "swap space"),
    maker("make-bcache", &["-B"], "a bcache device"),
    Maker {
        input: "label: gpt\n,10M\n",
        ..maker("sfdisk", &["-q"], "a GUID partition table")
    },
    Maker {
        input: "label: dos\n,10M\n",
        ..maker("sfdisk", &["-q"], "an MBR partition table")
    },
    Maker {
        input: "secret",
        ..maker(
            "cryptsetup",
            &[
                "luksFormat",
                "-q",
                "--type",
                "luks1",
                "--pbkdf-force-iterations",
                "1000",
                "--key-file",
                "-",
            ],
            "a LUKS volume",
        )
    },
    Maker {
        input: "secret",
        ..maker(
            "cryptsetup",
            &[
                "luksFormat",
                "-q",
                "--pbkdf",
                "pbkdf2",
                "--pbkdf-force-iterations",
                "1000",
                "--key-file",
                "-",
            ],
            "a LUKS volume",
        )
    },
    Maker {
        after: Some("-quiet"),
        ..maker("mksquashfs", &["/etc/hostname"], "a squashfs file system")
    },
    Maker {
        after: Some("/etc/hostname"),
        ..maker("genisoimage", &["-quiet", "-o"], "an ISO 9660 file system")
    },
];

impl Maker {
    fn make(&self, path: &Path) -> Result<(), Stop> {
        if self.after.is_some() {
            std::fs::remove_file(path)?;
        }
        let mut command = tool(self.program, self.args);
        command.arg(path).args(self.after).stdin(Stdio::piped());
        // Some of them are chatty.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // A program that doesn't read its input may have ended.
            let _ = stdin.write_all(self.input.as_bytes());
        }
        let status = child.wait()?;
        check(status.success(), || format!("{}: {status}", self.program))?;
        let file = File::options().write(true).open(path)?;
        let len = file.metadata()?.len();
        Ok(file.set_len(len.max(self.mib * MIB))?)
    }
}

fn created() -> Result<(), Stop> {
    need(&["mkfs.ext4", "mkswap", "sha256sum"])?;
    let mut made = 0;
    for maker in MAKERS {
        if find(maker.program).is_none() {
            println!(
                "{} isn't installed: {} isn't tried",
                maker.program, maker.what
            );
            continue;
        }
        made += 1;
        let disks = Disks::of(3, maker.mib)?;
        let members = disks.paths(0..3);
        maker.make(&members[1])?;
        let before = sum(&members[1])?;
        let create = |more: &[&str]| -> Result<Finished, Stop> {
            let mut command = pvblk(["raid", "create", "--raid-devices", "3"])?;
            command.args(more).args(&members);
            run(command, LIMIT)
        };
        refused(&create(&[])?, &["m1 holds", maker.what, "--force"])?;
        check(sum(&members[1])? == before, || {
            format!("{}: it was written to", maker.what)
        })?;
        // Nor is anything written to the others.
        let said = run(pvblk_raid("detail", &members[..1])?, LIMIT)?;
        refused(&said, &["not a member of an md array"])?;
        create(&["--force", "--assume-clean"])?.success()?;
        refused(&create(&[])?, &["is a member of array", "--force"])?;
    }
    check(made >= 2, || "nothing was tried".into())
}

fn pvblk_raid(word: &str, members: &[std::path::PathBuf]) -> Result<Command, Stop> {
    let mut command = pvblk(["raid", word])?;
    command.args(members);
    Ok(command)
}

fn added() -> Result<(), Stop> {
    need(&["mkfs.ext4"])?;
    let (disks, _) = array(6, "ppl")?;
    run(
        tool("mkfs.ext4", ["-qF".as_ref(), disks.path(4).as_os_str()]),
        LIMIT,
    )?
    .success()?;
    std::fs::write(
        disks.path(5),
        [b"QFI\xfb\0\0\0\x03".as_slice(), &[0; (24 << 20) - 8]].concat(),
    )?;
    let members = names(&disks, &[0, 1, 2, 3]);
    let offline = |more: &[&str]| -> Result<Finished, Stop> {
        let mut command = pvblk(["raid", "add", "--spare", &name(&disks, 5)])?;
        command.args(more).args(&members);
        run(command, LIMIT)
    };
    refused(&offline(&[])?, &["m5 holds a qcow2 image", "--force"])?;
    let mut served = Managed::start(&members)?;
    let said = served.try_raid("add", &[&name(&disks, 4)])?;
    refused(
        &said,
        &["m4 holds an ext2, ext3 or ext4 file system", "--force"],
    )?;
    served.raid("add", &["--force", &name(&disks, 4)])?;
    // Once it was the array's there is nothing to ask, whatever is left in front of the superblock.
    served.raid("fail", &["2"])?;
    served.raid("wait", &[])?;
    served.raid("fail", &["2"])?;
    served.raid("add", &[&name(&disks, 4)])?;
    served.raid("wait", &[])?;
    served.daemon.stop()?;
    offline(&["--force"])?;
    Ok(())
}

/// Tries to serve it; `None`: it is served.
fn served(spec: &str) -> Result<Option<Finished>, Stop> {
    let dir = tempfile::tempdir()?;
    let (disk, nbd) = (format!("a={spec}"), unix(&dir.path().join("s")));
    let args = ["serve", "--disk", &disk, "--nbd", &nbd];
    match Daemon::start(args) {
        Ok(mut daemon) => {
            daemon.stop()?;
            Ok(None)
        }
        Err(_) => run(pvblk(args)?, LIMIT).map(Some),
    }
}

fn contained() -> Result<(), Stop> {
    need(&["qemu-img", "sha256sum"])?;
    let dir = tempfile::tempdir()?;
    for (format, what) in [
        ("qcow2", "a qcow2 image"),
        ("qcow", "a QCOW image"),
        ("vmdk", "a VMDK image"),
        ("vhdx", "a VHDX image"),
        ("vpc", "a VHD image"),
        ("vdi", "a VDI image"),
        ("qed", "a QED image"),
        ("parallels", "a Parallels image"),
        ("luks", "a LUKS volume"),
    ] {
        let path = dir.path().join(format);
        let mut args = vec!["create", "-q", "-f", format];
        if format == "luks" {
            args.extend([
                "--object",
                "secret,id=s,data=secret",
                "-o",
                "key-secret=s,iter-time=10",
            ]);
        }
        let make = || -> Result<(), Stop> {
            let mut command = tool("qemu-img", args.clone());
            command.arg(&path).arg("64M");
            run(command, LIMIT)?.success().map(drop)
        };
        // For LUKS it measures its own CPU time, and refuses where a clock shows none.
        let mut made = make();
        for _ in 0..20 {
            if made.is_ok() {
                break;
            }
            made = make();
        }
        made?;
        let whole = std::fs::metadata(&path)?.len().next_multiple_of(4096);
        File::options().write(true).open(&path)?.set_len(whole)?;
        let before = sum(&path)?;
        let file = format!("file:{}", path.display());
        // All of them come the same way.
        let ways = if format == "qcow2" { 3 } else { 1 };
        let specs = [
            file.clone(),
            format!("{file},size=128M"),
            format!("cache:16M:{file},nolock"),
        ];
        for spec in specs.into_iter().take(ways) {
            match served(&spec)? {
                Some(said) => refused(&said, &[what, "format=raw"])?,
                None => return Stop::fail(format!("{spec} is served")),
            }
        }
        check(sum(&path)? == before, || {
            format!("{format}: it was written to")
        })?;
        let specs = [format!("{file},format=raw"), format!("{file},ro")];
        for spec in specs.into_iter().take(ways) {
            let said = served(&spec)?;
            check(said.is_none(), || format!("{spec}: {said:?}"))?;
        }
    }
    let said = served("file:/srv/a.img,format=qcow2")?;
    let wrong = said.ok_or_else(|| Stop::Fail("format=qcow2 is served".into()))?;
    refused(&wrong, &["only raw disks are served"])
}

/// A guest may do as it likes with its disk.
/// The first disk is refused for its contents. The second is served under its own name, and not as the default export, which is the first's.
fn beside_others() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let [bad, good] = ["bad", "good"].map(|n| dir.path().join(n));
    for path in [&bad, &good] {
        File::create(path)?.set_len(MIB)?;
    }
    // The beginning of a qcow2 image, as a guest can write it.
    File::options()
        .write(true)
        .open(&bad)?
        .write_all(b"QFI\xfb\0\0\0\x03")?;
    let (socket, vhost) = (dir.path().join("nbd"), dir.path().join("vhost"));
    let mut args = vec!["serve".to_owned()];
    for (name, path) in [("bad", &bad), ("good", &good)] {
        args.extend([
            "--disk".to_owned(),
            format!("{name}=file:{}", path.display()),
        ]);
    }
    args.extend(["--nbd".to_owned(), unix(&socket)]);
    args.extend(["--vhost-user".to_owned(), format!("bad={}", unix(&vhost))]);
    let mut serve = Daemon::start(args)?;
    let mut connection = Connection::open(&socket, "good")?;
    connection.send(Nbd::Write, 1, 0, &[7; 4096])?;
    check(connection.receive()?.is_some_and(|r| r.error == 0), || {
        "the other disk doesn't answer".into()
    })?;
    for export in ["", "bad"] {
        check(Connection::open(&socket, export).is_err(), || {
            format!("the export {export:?} is served")
        })?;
    }
    drop(connection);
    serve.stop()?;
    let told = serve.lines();
    check(
        told.iter()
            .any(|l| l.contains("disk bad is not served") && l.contains("format=raw")),
        || format!("it doesn't say why: {told:#?}"),
    )
}

fn by_a_guest() -> Result<(), Stop> {
    let dir = tempfile::tempdir()?;
    let file = format!("file:{}", dir.path().join("a.img").display());
    let (socket, header) = (dir.path().join("s"), *b"QFI\xfb\0\0\0\x03");
    let nbd = unix(&socket);
    let disk = format!("a={file},size=16M");
    let mut daemon = Daemon::start(["serve", "--disk", &disk, "--nbd", &nbd])?;
    let mut client = Connection::open(&socket, "a")?;
    let mut sector = [0; 512];
    sector[..8].copy_from_slice(&header);
    client.send(Nbd::Write, 1, 0, &sector)?;
    check(client.receive()?.is_some_and(|r| r.error == 0), || {
        "a write fails".into()
    })?;
    daemon.stop()?;
    match served(&file)? {
        Some(said) => refused(
            &said,
            &["a qcow2 image", "if a guest made this", "format=raw"],
        )?,
        None => return Stop::fail("it is served"),
    }
    let said = served(&format!("{file},format=raw"))?;
    check(said.is_none(), || format!("{said:?}"))
}

fn replaced() -> Result<(), Stop> {
    need(&["nbdcopy", "cmp"])?;
    let (disks, image) = array(6, "ppl")?;
    let old = names(&disks, &[0, 1, 2, 3]);
    let mut served = Managed::start(&old)?;
    served.write(&image)?;
    for (place, new) in [("1", 4), ("3", 5)] {
        served.raid("add", &[&name(&disks, new)])?;
        served.raid("fail", &[place])?;
        served.raid("wait", &[])?;
        let file = |n: usize| format!("[file:{}]", name(&disks, n));
        let last = if new == 4 { 3 } else { 5 };
        let now = [0, 4, 2, last].map(file).concat();
        served.until("told", |_| {
            let told = format!("start it with raid5:{now} next time");
            let lines = served.daemon.lines();
            lines.iter().any(|l| l.contains(&told))
        })?;
    }
    served.daemon.stop()?;

    let line = spec(&disks.paths(0..4), None);
    let said = self::served(&line)?;
    let said = said.ok_or_else(|| Stop::Fail("replaced members are served".into()))?;
    let works = [0, 4, 2, 5].map(|n| format!("[file:{}]", name(&disks, n)));
    let works = format!("raid5:{}", works.concat());
    refused(
        &said,
        &[
            "m1 is no member of the array any more",
            "m3 is no member of the array any more",
            &format!("start it with {works}; or with raid5:uuid="),
        ],
    )?;
    // The array could be served with one of them alone, but that one lacks later writes.
    let half = spec(&disks.paths(0..4), None).replace("m3]", "m5]");
    let said = self::served(&half)?;
    let said = said.ok_or_else(|| Stop::Fail("a replaced member is served".into()))?;
    refused(&said, &["m1 is no member", &works])?;
    // Where the device can't be found, the place is named.
    let away = tempfile::tempdir()?;
    let gone = away.path().join("gone");
    std::fs::rename(disks.path(4), &gone)?;
    let said = self::served(&half)?;
    let said = said.ok_or_else(|| Stop::Fail("a replaced member is served".into()))?;
    refused(
        &said,
        &[
            "m1 is no member",
            "its place, 1",
            "raid5:uuid=",
            "[missing]",
        ],
    )?;
    std::fs::rename(&gone, disks.path(4))?;

    let mut served = Managed::start(&names(&disks, &[0, 4, 2, 5]))?;
    let back = disks.dir.path().join("back");
    served.read(&back)?;
    compare(&image, &back)?;
    served.daemon.stop()?;
    // A user that names a member as missing wants that.
    let without = spec(&disks.paths(0..4), Some(1)).replace("m3]", "m5]");
    let said = self::served(&without)?;
    check(said.is_none(), || format!("{said:?}"))
}
