use super::*;
use crate::FileVolume;
use pvblk_raid5::{CreateOptions, NewMembers, Role, SUPER_SECTOR, create, parse_uuid, sleepy};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Files of 8 MiB.
struct Files(tempfile::TempDir);

impl Files {
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn name(&self, name: &str) -> String {
        format!("file:{}", self.path(name).display())
    }

    fn make(&self, name: &str) -> Arc<dyn BlockDevice> {
        let spec = FileSpec {
            size_bytes: Some(8 << 20),
            ..FileSpec::new(self.path(name))
        };
        Arc::new(FileVolume::open(&spec).expect("a file"))
    }

    /// An array of these files; its UUID as text.
    fn array(&self, names: &[&str]) -> String {
        let members = names.iter().map(|n| Some((self.name(n), self.make(n))));
        let devices = NewMembers {
            members: members.collect(),
            spares: Vec::new(),
        };
        let options = CreateOptions {
            chunk_sectors: 128,
            ..CreateOptions::new("test")
        };
        create(devices, &options, &mut sleepy()).expect("an array");
        uuid_text(&options.set_uuid)
    }

    fn spec(&self, uuid: &str, more: &str) -> VolumeSpec {
        let text = format!("raid5:uuid={uuid},in={}/*{more}", self.0.path().display());
        text.parse().expect("a spec")
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut Superblock)) {
        let file = std::fs::OpenOptions::new();
        let file = file
            .clone()
            .read(true)
            .write(true)
            .open(self.path(name))
            .expect("a file");
        let mut bytes = [0; 4096];
        file.read_exact_at(&mut bytes, SUPER_SECTOR * 512)
            .expect("read");
        let mut sb = Superblock::parse(&bytes).expect("a superblock");
        change(&mut sb);
        file.write_all_at(&sb.encode(), SUPER_SECTOR * 512)
            .expect("written");
    }
}

fn files() -> Files {
    Files(tempfile::tempdir().expect("a folder"))
}

fn assembled(spec: &VolumeSpec) -> Result<Assembly, Error> {
    let VolumeSpec::Raid5(spec) = spec else {
        panic!("{spec} is no array");
    };
    spec.assemble()
}

fn refused(spec: &VolumeSpec) -> String {
    let error = assembled(spec).err().expect("refused").to_string();
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

#[test]
fn the_members_of_one_array_are_found_among_others() {
    let files = files();
    let uuid = files.array(&["a", "b", "c"]);
    let other = files.array(&["x", "y", "z"]);
    files.make("nothing");
    let assembly = assembled(&files.spec(&uuid, "")).expect("an array");
    assert_eq!(
        assembly.newest().set_uuid,
        parse_uuid(&uuid).expect("a uuid")
    );
    let names: Vec<&str> = assembly.present().map(|m| m.name.as_str()).collect();
    assert_eq!(names, [files.name("a"), files.name("b"), files.name("c")]);
    assert!(assembly.notes.is_empty(), "{:?}", assembly.notes);
    // Its members are locked, the other's aren't.
    assert!(refused(&files.spec(&uuid, "")).contains("/a"), "locked");
    assert!(assembled(&files.spec(&other, "")).is_ok());
    drop(assembly);
    let nobodys = "0".repeat(32);
    assert!(refused(&files.spec(&nobodys, "")).contains("no candidate is of array"));
}

#[test]
fn a_member_that_isnt_found_is_missed_by_name() {
    let files = files();
    let uuid = files.array(&["a", "b", "c"]);
    std::fs::remove_file(files.path("b")).expect("removed");
    let error = refused(&files.spec(&uuid, ""));
    assert!(
        error.contains("no candidate is member 1 (number 1), which the others count on"),
        "{error}"
    );
    assert!(
        error.contains("write `missing` to start without it"),
        "{error}"
    );
    let assembly = assembled(&files.spec(&uuid, ",missing")).expect("degraded");
    assert_eq!(assembly.failed(), Some(1));
    drop(assembly);
    std::fs::remove_file(files.path("c")).expect("removed");
    let error = refused(&files.spec(&uuid, ",missing"));
    assert!(
        error.contains("member 1 (number 1) or 2 (number 2)"),
        "{error}"
    );
}

#[test]
fn what_cant_be_read_is_named_and_left_out() {
    let files = files();
    let uuid = files.array(&["a", "b", "c"]);
    std::fs::OpenOptions::new()
        .write(true)
        .open(files.path("b"))
        .and_then(|f| f.set_len(5000))
        .expect("truncated");
    files.change("c", |sb| sb.chunk_sectors = 7);
    std::os::unix::fs::symlink("nowhere", files.path("d")).expect("a link");
    let error = refused(&files.spec(&uuid, ",missing"));
    for part in [
        "/b is left out: it ends in the middle",
        "/d is left out: No such file",
    ] {
        assert!(error.contains(part), "{part:?} isn't in {error}");
    }
}

#[test]
fn stale_members_are_named_and_copies_are_refused() {
    let files = files();
    let uuid = files.array(&["a", "b", "c"]);
    std::fs::copy(files.path("b"), files.path("copy")).expect("copied");
    let error = refused(&files.spec(&uuid, ""));
    assert!(
        error.contains("/b and file:") && error.contains("/copy are the same member"),
        "{error}"
    );
    // Older, it is told from the one that is used.
    for name in ["a", "b", "c"] {
        files.change(name, |sb| sb.events += 10);
    }
    let assembly = assembled(&files.spec(&uuid, "")).expect("an array");
    assert!(assembly.notes[0].contains("/copy is left out: it is an older copy of file:"));
    drop(assembly);
    std::fs::remove_file(files.path("copy")).expect("removed");
    for name in ["a", "b"] {
        files.change(name, |sb| {
            sb.events += 2;
            sb.roles[2] = Role::Faulty;
        });
    }
    let assembly = assembled(&files.spec(&uuid, "")).expect("degraded, as the superblocks say");
    assert_eq!(assembly.failed(), Some(2));
    assert!(
        assembly.notes[0].contains("/c is left out, since it is stale"),
        "{:?}",
        assembly.notes
    );
}

/// The answer of an array to what starts it, while its devices change.
#[test]
fn the_spec_that_works_is_told() {
    let files = files();
    let uuid = files.array(&["a", "b", "c"]);
    let asked = |device: &Arc<dyn BlockDevice>, question: &str| -> serde_json::Value {
        let answer = device.ask(question).expect("an array").expect("an answer");
        serde_json::from_str(&answer).expect("JSON")
    };
    let spec_of = |device: &Arc<dyn BlockDevice>| {
        let answer = asked(device, r#"{"raid": "spec"}"#);
        answer["spec"].as_str().expect("a spec").to_owned()
    };
    let list = format!(
        "raid5:[{}][{}][{}],stripes=64",
        files.name("a"),
        files.name("b"),
        files.name("c")
    );
    let list: VolumeSpec = list.parse().expect("a spec");
    let device = list.open().expect("an array");
    let dir = files.0.path().display();
    assert_eq!(
        spec_of(&device),
        format!("raid5:uuid={uuid},in={dir}/a,in={dir}/b,in={dir}/c,stripes=64")
    );
    device.close().expect("closed");
    drop(device);

    // Found by a pattern, and given a device that it doesn't match.
    let text = format!("raid5:uuid={uuid},in={dir}/[abc]");
    let device = text
        .parse::<VolumeSpec>()
        .expect("a spec")
        .open()
        .expect("an array");
    assert_eq!(spec_of(&device), text);
    drop(files.make("d"));
    let add = format!(
        r#"{{"raid": "add", "member": "{},size=8M"}}"#,
        files.name("d")
    );
    let now = format!("{text},in={dir}/d");
    assert_eq!(asked(&device, &add)["spec"], now);
    let answer = asked(&device, r#"{"raid": "spec"}"#);
    assert_eq!(
        answer["list"],
        format!(
            "raid5:[{}][{}][{}][{},size=8M]",
            files.name("a"),
            files.name("b"),
            files.name("c"),
            files.name("d")
        )
    );
    asked(&device, r#"{"raid": "fail", "member": "1"}"#);
    let begin = std::time::Instant::now();
    while asked(&device, r#"{"raid": "detail"}"#)["degraded"] == true {
        assert!(
            begin.elapsed() < std::time::Duration::from_secs(60),
            "never rebuilt"
        );
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(spec_of(&device), now);
    device.close().expect("closed");
    drop(device);
    let assembly = assembled(&now.parse().expect("a spec")).expect("an array");
    assert_eq!(assembly.failed(), None);
    assert!(
        assembly.notes[0].contains("/b is left out, since it is stale"),
        "{:?}",
        assembly.notes
    );
    drop(assembly);
    // Nobody knows a file by which memory is found.
    let memory = "raid5:[mem:8M][mem:8M][mem:8M]".parse().expect("a spec");
    let VolumeSpec::Raid5(memory) = memory else {
        panic!("{memory} is no array");
    };
    let parts = SpecParts {
        set_uuid: [7; 16],
        members: vec![Some("mem:8M".into()), None, Some("mem:4M".into())],
        spares: Vec::new(),
        devices: vec!["mem:8M".into(), "mem:4M".into()],
        patterns: Vec::new(),
        missing: true,
        stripes: Raid5Spec::STRIPES as usize,
        write_path: memory.write_path,
        member_timeout: None,
        re_add: false,
    };
    assert_eq!(
        spec_now(&parts).to_string(),
        "raid5:[mem:8M][missing][mem:4M]"
    );
}

/// Each named member knows of the replacements before its own. None of them knows the last.
#[test]
fn a_list_of_which_every_member_was_replaced_is_refused_with_the_one_that_works() {
    let files = files();
    files.array(&["a", "b", "c"]);
    for (old, new) in [("a", "x"), ("b", "y"), ("c", "z")] {
        std::fs::copy(files.path(old), files.path(new)).expect("copied");
    }
    let roles = |replaced: usize| {
        let role = |n: usize| match n {
            n if n < replaced => Role::Faulty,
            n if n < 3 => Role::Active(n as u16),
            n if n < 3 + replaced => Role::Active(n as u16 - 3),
            _ => Role::Spare,
        };
        (0..6).map(role).collect::<Vec<Role>>()
    };
    for (n, name) in ["a", "b", "c"].into_iter().enumerate() {
        files.change(name, |sb| {
            sb.events = 10 * (n as u64 + 1);
            sb.roles[..6].copy_from_slice(&roles(n));
        });
    }
    for (n, name) in ["x", "y", "z"].into_iter().enumerate() {
        files.change(name, |sb| {
            sb.events = 40;
            sb.dev_number = 3 + n as u32;
            sb.device_uuid = [n as u8; 16];
            sb.roles[..6].copy_from_slice(&roles(3));
        });
    }
    let list = |names: [&str; 3]| -> String {
        let each = names.map(|n| format!("[{}]", files.name(n)));
        format!("raid5:{}", each.concat())
    };
    let works = list(["x", "y", "z"]);
    let spec = |text: &str| text.parse::<VolumeSpec>().expect("a spec");
    for old in [["a", "b", "c"], ["c", "a", "b"], ["a", "y", "c"]] {
        let error = refused(&spec(&list(old)));
        assert!(
            error.contains(&format!("start it with {works}; or with raid5:uuid=")),
            "{error}"
        );
    }
    assert!(assembled(&spec(&works)).is_ok());
    // The last one can't be found any more.
    std::fs::remove_file(files.path("z")).expect("removed");
    let error = refused(&spec(&list(["a", "b", "c"])));
    assert!(
        error.contains("in=DIR/*") && error.contains("device number 3 has its place, 0"),
        "{error}"
    );
}
