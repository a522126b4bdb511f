use super::*;
use crate::spec::{Candidates, Members, NbdSpec, Raid5Spec};
use pvblk_block::ErrorKind;
use pvblk_cache::Mode;
use pvblk_client::rbd::{OnLostLock, RbdSpec};
use pvblk_raid5::WritePath;
use std::path::PathBuf;
use std::time::Duration;

fn ok(text: &str) -> VolumeSpec {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn file_spec(text: &str) -> FileSpec {
    match ok(text) {
        VolumeSpec::File(spec) => spec,
        other => panic!("{text} is {other:?}"),
    }
}

#[test]
fn each_kind() {
    assert_eq!(ok("null"), VolumeSpec::Null(NullSpec::default()));
    assert_eq!(
        ok("null:notouch"),
        VolumeSpec::Null(NullSpec {
            touch: false,
            ..NullSpec::default()
        })
    );
    assert_eq!(
        ok("null:2T,notouch"),
        VolumeSpec::Null(NullSpec {
            size_bytes: 2 << 40,
            touch: false
        })
    );
    assert_eq!(ok("mem:64M"), VolumeSpec::Mem(MemSpec::new(64 << 20)));
    let nested = ok(
        "delay:210us,iops=209k,bw=2.4G,channels=8,serial:fault:seed=7,error=0.5,read-error=0,stall=0.001/50ms,torn=1:mem:1G,sector=4096",
    );
    let VolumeSpec::Delay(delay, inner) = nested else {
        panic!("not a delay");
    };
    assert_eq!(
        delay,
        DelaySpec {
            service: Duration::from_micros(210),
            iops: Some(209_000),
            bandwidth: Some(2_400_000_000),
            channels: Some(8),
            serial: true,
        }
    );
    let VolumeSpec::Fault(fault, inner) = *inner else {
        panic!("not a fault");
    };
    assert_eq!(fault.seed, Some(7));
    assert_eq!((fault.error, fault.read_error), (0.5, Some(0.0)));
    assert_eq!(
        (fault.stall, fault.stall_time),
        (0.001, Duration::from_millis(50))
    );
    assert_eq!(
        *inner,
        VolumeSpec::Mem(MemSpec {
            size_bytes: 1 << 30,
            sector_bytes: 4096
        })
    );
}

#[test]
fn paths_keep_colons_and_commas() {
    let path = |text: &str| file_spec(text).path;
    assert_eq!(path("file:/a:b,c=d,e"), PathBuf::from("/a:b,c=d,e"));
    assert_eq!(path("file:disk.img"), PathBuf::from("disk.img"));
    assert_eq!(path("/srv/x.img"), PathBuf::from("/srv/x.img"));
    assert_eq!(path("./mem:1G"), PathBuf::from("./mem:1G"));
    assert_eq!(path("/a,rows,ro"), PathBuf::from("/a,rows"));
    assert_eq!(ok("delay:1ms:file:/a:b").to_string(), "delay:1ms:file:/a:b");
    let spec = file_spec("file:/d,x.img,direct,ro,nolock,engine=sync,sector=4k");
    assert_eq!(spec.path, PathBuf::from("/d,x.img"));
    assert!(spec.direct && spec.read_only && !spec.lock);
    assert_eq!(
        (spec.engine, spec.sector_bytes),
        (Some(Engine::Sync), Some(4096))
    );
    let spec = file_spec("/d,engine=uring,size=1.5M");
    assert_eq!(
        (spec.engine, spec.size_bytes),
        (Some(Engine::Uring), Some(3 << 19))
    );
}

#[test]
fn arrays_hold_whole_specs() {
    let VolumeSpec::Raid5(spec) = ok(
        "raid5:[file:/a,b.img,direct][missing][delay:1ms,iops=5k:mem:1G,sector=4096],stripes=512,force",
    ) else {
        panic!("not an array");
    };
    assert_eq!((spec.stripes, spec.force), (512, true));
    let [Some(VolumeSpec::File(a)), None, Some(VolumeSpec::Delay(..))] = named(&spec) else {
        panic!("{:?}", spec.of);
    };
    assert!(a.direct);
    assert_eq!(a.path, PathBuf::from("/a,b.img"));
    // Brackets in paths come in pairs; arrays go over arrays, and anything goes over arrays.
    let VolumeSpec::Raid5(spec) = ok("raid5:[/x[1].img][/[[]]][mem:4k]") else {
        panic!("not an array");
    };
    let path = |n: usize| match &named(&spec)[n] {
        Some(VolumeSpec::File(f)) => f.path.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!((path(0), path(1)), ("/x[1].img".into(), "/[[]]".into()));
    assert_eq!(spec.stripes, Raid5Spec::STRIPES);
    ok("fault:seed=1:raid5:[mem:1G][raid5:[mem:4k][mem:4k][mem:4k],force][missing],stripes=17");
}

fn named(spec: &Raid5Spec) -> &[Option<VolumeSpec>] {
    match &spec.of {
        Members::Named(members) => members,
        found => panic!("{found:?}"),
    }
}

#[test]
fn arrays_are_named_by_their_uuid() {
    let found = |text: &str| match ok(text) {
        VolumeSpec::Raid5(Raid5Spec {
            of: Members::Found(found),
            ..
        }) => found,
        other => panic!("{other:?}"),
    };
    let path = |spec: &VolumeSpec| match spec {
        VolumeSpec::File(f) => f.path.display().to_string(),
        other => panic!("{other:?}"),
    };
    let id = "00112233:44556677:8899aabb:ccddeeff";
    let one = found(&format!("raid5:uuid={id},in=/srv/md/*.img"));
    assert_eq!(path(&one.within[0]), "/srv/md/*.img");
    assert!(!one.missing);
    let text = "raid5:in=/dev/sd[a-c]1,uuid=00112233-4455-6677-8899-aabbccddeeff,in=[file:/a,b/*,direct],in=file:x?,missing,stripes=512,force";
    let many = found(text);
    assert_eq!(many.uuid, one.uuid);
    assert_eq!(
        many.within.iter().map(path).collect::<Vec<_>>(),
        ["/dev/sd[a-c]1", "/a,b/*", "x?"]
    );
    assert!(many.missing && matches!(&many.within[1], VolumeSpec::File(f) if f.direct));
    assert_eq!(
        ok(text).to_string(),
        format!(
            "raid5:uuid={id},in=/dev/sd[a-c]1,in=[file:/a,b/*,direct],in=x?,missing,stripes=512,force"
        )
    );
    found(&format!("raid5:uuid={id},in=[delay:1ms:file:/srv/*]"));
    ok(&format!(
        "cache:1M:raid5:[raid5:uuid={id},in=/x/[ab]*][mem:4k][mem:4k]"
    ));
    for (bad, why) in [
        (format!("raid5:uuid={id}"), "in= is missing"),
        ("raid5:in=/srv/*".into(), "uuid= is missing"),
        ("raid5:uuid=0011,in=/srv/*".into(), "is no UUID"),
        (format!("raid5:uuid={id},in="), "needs a pattern"),
        (format!("raid5:uuid={id},in=/a,b"), "unknown option `b`"),
        (
            format!("raid5:uuid={id},in=[mem:1M]"),
            "candidates are files",
        ),
        (format!("raid5:uuid={id},in=[file:/a"), "a `]` is missing"),
        (format!("raid5:uuid={id},in=/a[b"), "it is no pattern"),
        (
            format!("raid5:uuid={id},in=[file:/a,size=1M]"),
            "`size` makes files",
        ),
        (
            format!("raid5:uuid={id},in=/a,stripes=1"),
            "stripes must be",
        ),
        ("raid5:a.img".into(), "members are missing"),
        (format!("raid5:uuid={id},a.img"), "unknown option `a.img`"),
        (format!("raid5:uuid={id},in=[ab]*"), "begins with a bracket"),
        ("raid5:".into(), "members are missing"),
    ] {
        let error = bad.parse::<VolumeSpec>().expect_err(&bad).to_string();
        assert!(
            error.contains(why) && error.lines().count() == 1,
            "{bad}: {error}"
        );
    }
}

fn candidates(rng: &mut fastrand::Rng) -> Candidates {
    let parts = [
        "a", ":", ",x", "[bc]", "/", "=", "*", "?", " ", "é", "file:", "in",
    ];
    let within = |rng: &mut fastrand::Rng| {
        let path: String = (0..rng.usize(1..8))
            .map(|_| parts[rng.usize(0..parts.len())])
            .collect();
        let file = VolumeSpec::File(FileSpec {
            direct: rng.bool(),
            // Three stars and more are no pattern.
            ..FileSpec::new(path.replace("**", "*").replace("**", "*"))
        });
        match rng.bool() {
            true => file,
            false => VolumeSpec::Delay(DelaySpec::default(), Box::new(file)),
        }
    };
    Candidates {
        uuid: std::array::from_fn(|_| rng.u8(..)),
        within: (0..rng.usize(1..4)).map(|_| within(rng)).collect(),
        missing: rng.bool(),
    }
}

fn rbd(rng: &mut fastrand::Rng) -> RbdSpec {
    let mut name = |least: usize| -> String {
        let parts = ["a", ":", "[b]", "=", "ro", "missing", " ", "é"];
        let of = rng.usize(least..6);
        (0..of).map(|_| parts[rng.usize(0..parts.len())]).collect()
    };
    let (pool, image, namespace) = (name(1), name(1), name(0));
    let (snapshot, conf, id) = (name(1), name(1), name(1));
    RbdSpec {
        namespace,
        snapshot: rng.bool().then_some(snapshot),
        conf: rng.bool().then(|| format!("/{conf}").into()),
        id: rng.bool().then_some(id),
        read_only: rng.bool(),
        lock: rng.bool(),
        on_lost_lock: [OnLostLock::Fail, OnLostLock::Wait][rng.usize(0..2)],
        ..RbdSpec::new(pool, image)
    }
}

/// A random spec whose paths hold what this form can express.
fn random(rng: &mut fastrand::Rng, depth: u32) -> VolumeSpec {
    let inner = |rng: &mut fastrand::Rng| Box::new(random(rng, depth - 1));
    match rng.u32(0..if depth == 0 { 4 } else { 9 }) {
        0 => VolumeSpec::Null(NullSpec {
            size_bytes: rng.u64(1..1 << 30) * 512,
            touch: rng.bool(),
        }),
        1 => VolumeSpec::Mem(MemSpec {
            size_bytes: rng.u64(1..1 << 20) * 4096,
            sector_bytes: [512, 4096][rng.usize(0..2)],
        }),
        2 => {
            let parts = ["a", ":", ",x", "[b]", "/", "=", "missing", "+", " ", "é"];
            let path: String = (0..rng.usize(1..8))
                .map(|_| parts[rng.usize(0..parts.len())])
                .collect();
            VolumeSpec::File(FileSpec {
                direct: rng.bool(),
                lock: rng.bool(),
                engine: [None, Some(Engine::Sync), Some(Engine::Uring)][rng.usize(0..3)],
                ..FileSpec::new(path)
            })
        }
        3 => VolumeSpec::Rbd(rbd(rng)),
        4 => VolumeSpec::Delay(
            DelaySpec {
                service: Duration::from_nanos(rng.u64(0..1 << 40)),
                iops: rng.bool().then(|| rng.u64(1..1 << 29)),
                serial: rng.bool(),
                ..DelaySpec::default()
            },
            inner(rng),
        ),
        5 => VolumeSpec::Fault(
            FaultSpec {
                seed: rng.bool().then(|| rng.u64(..)),
                after: rng.u64(0..3),
                torn: rng.f64(),
                ..FaultSpec::default()
            },
            inner(rng),
        ),
        6 => {
            let mut spec = CacheSpec::new(rng.u64(16..1 << 20) * 4096);
            spec.0.mode = [Mode::Usual, Mode::WriteBack, Mode::ReadOnly][rng.usize(0..3)];
            spec.0.lists = rng.u32(0..3);
            spec.0.timeout = Duration::from_millis(rng.u64(1..100));
            VolumeSpec::Cache(spec, inner(rng))
        }
        _ => {
            let missing = rng.usize(0..6);
            let of = match rng.bool() {
                true => {
                    let all = 0..rng.usize(3..6);
                    let members = all.map(|n| (n != missing).then(|| *inner(rng)));
                    Members::Named(members.collect())
                }
                false => Members::Found(candidates(rng)),
            };
            let millis = rng.u64(100..100_000);
            let limit = rng.bool().then(|| Duration::from_millis(millis));
            VolumeSpec::Raid5(Raid5Spec {
                of,
                stripes: rng.u32(8..=32768),
                write_path: match rng.bool() {
                    true => WritePath::Direct,
                    false => WritePath::StripeQueue,
                },
                member_timeout: limit,
                re_add: limit.is_some() && rng.bool(),
                force: rng.bool(),
            })
        }
    }
}

#[test]
fn whatever_is_printed_parses_to_the_same() {
    let seed = pvblk_testing::seed();
    println!("seed {seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    for _ in 0..2000 {
        let spec = random(&mut rng, 3);
        let text = spec.to_string();
        assert_eq!(ok(&text), spec, "{text}, seed {seed}");
    }
}

/// Anything at all is parsed or refused, in one line, and what is parsed is printed so that it is parsed again.
#[test]
fn torn_specs_do_no_harm() {
    let seed = pvblk_testing::seed();
    println!("seed {seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    for _ in 0..5000 {
        let mut text: Vec<char> = random(&mut rng, 2).to_string().chars().collect();
        for _ in 0..rng.usize(1..4) {
            let at = rng.usize(0..text.len());
            match rng.bool() {
                true => drop(text.remove(at)),
                false => text.insert(at, ['[', ']', ',', ':', '=', '0'][rng.usize(0..6)]),
            }
            if text.is_empty() {
                break;
            }
        }
        let text: String = text.into_iter().collect();
        match text.parse::<VolumeSpec>() {
            Ok(spec) => assert_eq!(ok(&spec.to_string()), spec, "{text}, seed {seed}"),
            Err(e) => assert!(!e.to_string().contains('\n'), "{e}"),
        }
    }
}

#[test]
fn printed_specs_parse_to_the_same() {
    for text in [
        "null:1T",
        "null:512,notouch",
        "mem:64M",
        "mem:4k,sector=4096",
        "file:/a:b,c",
        "file:disk.img,direct,ro,nolock,engine=sync,sector=4096",
        "file:/x,engine=uring,size=1536k",
        "delay:210us,iops=209k,bw=2400M,channels=4,serial:mem:1G",
        "delay:0s:mem:1G",
        "fault:error=0:mem:1G",
        "cache:256M:file:/a,direct",
        "cache:64k,mode=write-through,readahead=1M,dirty=40,dirty-background=5,dirty-expire=1s,wait-time=5ms,lists=4:delay:1ms:mem:1G",
        "raid5:[file:/a][file:/b][cache:1M,mode=read-only:file:/c]",
        "raid5:[file:/a][file:/b][file:/c]",
        "delay:1ms:raid5:[missing][file:/b,direct][delay:1ms:mem:4k],stripes=512,force",
        "nbd://localhost:10810/disk",
        "nbd://[::1]:5/a/b?connections=4",
        "nbd+unix:///a?socket=/run/x",
        "nbd+unix:///a%2Cb?socket=/run/x,connections=2,on-reconnect=resend,wait=30s,keep=16M,ro",
        "nbd://h:1/a,on-reconnect=fail,keep=0",
        "raid5:[nbd://[::1]:5/a,connections=4,ro][nbd+unix:///a%5D?socket=/x][mem:1M],stripes=512",
        "rbd:pool/image",
        "rbd:pool/name space/im:a.ge@snap,conf=/etc/ceph/x.conf,id=me,ro,nolock,on-lost-lock=wait",
        "cache:1M:rbd:pool/image,nolock",
        "raid5:[rbd:p/a][rbd:p/b,id=x][rbd:p/c@s]",
        "vhost-user:unix:/run/v.sock",
        "vhost-user:unix:/run/v.sock,queues=2,queue-size=64,memory=8M",
        "rings:unix:/run/x.sock,disk=a",
        "rings:unix:/run/x.sock,disk=a,queues=4,ring-pages=2,memory=8M",
        "cache:1M:nbd://h:1/a",
        "raid5:[nbd://[::1]:5/a][rings:unix:/x,disk=a][vhost-user:unix:/x,queues=1],stripes=512",
        "fault:seed=18446744073709551615,after=100,error=0.01,read-error=0,write-error=1,flush-error=0.25,stall=0.001/50ms,torn=0.5:delay:1ms:null:1T",
    ] {
        let spec = ok(text);
        assert_eq!(spec.to_string(), text);
        assert_eq!(ok(&spec.to_string()), spec);
    }
}

#[test]
fn every_error_is_one_line_that_says_what_is_allowed() {
    let too_deep = "delay:1ms:".repeat(DEEPEST + 1) + "mem:1G";
    let too_deep_array = "raid5:[".repeat(DEEPEST + 1) + "mem:1G" + &"]".repeat(DEEPEST + 1);
    for (text, want) in [
        ("", "a kind is missing"),
        (":x", "a kind is missing"),
        ("memory:1G", "unknown kind `memory`: use null, mem"),
        ("fil:/srv/a.img", "unknown kind `fil`: use null, mem"),
        ("disk.img", "a path with a `/`"),
        ("a\nb", "unknown kind `a\\nb`"),
        ("mem", "a size is missing, as in mem:1G"),
        ("mem:", "a size is missing"),
        ("mem:1X", "`1X` is not a size"),
        ("mem:1G:x", "`1G:x` is not a size"),
        ("mem:1G,", "unknown option ``: use sector=512|4096"),
        ("mem:1G,sector", "unknown option `sector`"),
        ("mem:1G,sector=513", "sector `513` must be 512 or 4096"),
        ("mem:1000", "size must be a multiple of 4096"),
        ("mem:0", "size must be a multiple of 4096"),
        ("mem:8388608T", "to 4194304T"),
        ("null:1", "size must be a multiple of 512"),
        ("null:x", "`x` is not a size"),
        ("null:1T,touch", "unknown option `touch`: use notouch"),
        ("file", "a path is missing"),
        ("file:", "a path is missing"),
        ("file:,ro", "a path is missing"),
        ("file:/a\0b", "zero byte"),
        ("file:/a,ro,x", "unknown option `x`: use direct, ro"),
        ("file:/a,ro=1,ro", "path"),
        ("file:/a,engine=aio", "unknown engine `aio`"),
        ("file:/a,size=", "`` is not a size"),
        ("file:/a,size=100", "multiple of 512"),
        ("file:/a,size=512,sector=4096", "multiple of 4096"),
        ("file:/a,sector=1024", "must be 512 or 4096"),
        ("file:/a,ro,size=1M", "drop one"),
        ("delay", "the volume to go over is missing, as in delay:"),
        ("delay:1ms", "the volume to go over is missing"),
        ("delay:1ms:", "the volume to go over is missing"),
        ("delay::mem:1G", "arguments are missing"),
        ("delay:1:mem:1G", "`1` is not a time"),
        ("delay:2h:mem:1G", "`2h` is not a time"),
        ("delay:3601s:mem:1G", "at most 3600s"),
        ("delay:iops=x:mem:1G", "iops `x` is not a number"),
        ("delay:iops=0:mem:1G", "iops must be 1 to 1000M"),
        ("delay:bw=x:mem:1G", "bw `x` is not a number"),
        ("delay:bw=0:mem:1G", "bw must be 1 to 1000T"),
        ("delay:channels=x:mem:1G", "channels `x`"),
        ("delay:channels=0:mem:1G", "channels must be 1 to 1024"),
        (
            "delay:iops=1,5ms:mem:1G",
            "unknown option `5ms`: use a time first",
        ),
        ("delay:serial=1:mem:1G", "unknown option `serial`"),
        ("delay:1ms:mem:1X", "`1X` is not a size"),
        ("delay:1ms:mem:1", "multiple of 4096"),
        (
            "nbd://h/x?x=1",
            "unknown option `x`: use socket=PATH, connections=N, tls-certificates=DIR",
        ),
        (
            "nbd://h/x,y=1",
            "unknown option `y`: use connections=N, on-reconnect=resend|fail, wait=TIME, keep=SIZE, ro",
        ),
        ("nbd://h/x,ro=1", "unknown option `ro`"),
        ("nbd://h/x,connections=0", "connections must be 1 to 64"),
        ("nbd://h/x,on-reconnect=no", "use on-reconnect=resend or"),
        ("nbd://h/x,on-reconnect=fail,wait=1s", "drop `wait`"),
        ("nbd://h/x,keep=1k", "keep must be 0, or 1M to 64G"),
        ("nbd://h/x,wait=1", "`1` is not a time"),
        ("nbd://h:99999/x", "the host makes no sense"),
        ("nbd:///x", "the host makes no sense"),
        ("nbd:x", "it is no NBD URI"),
        ("nbd+unix:///x", "the socket's path is missing"),
        ("nbds://h/x", "add tls-certificates=DIR"),
        (
            "nbd://h/x?tls-certificates=/p",
            "certificates are for nbds://",
        ),
        (
            "http://h/x",
            "unknown kind `http`: of URIs nbd://, nbd+unix://, nbds:// and nbds+unix:// are known",
        ),
        (
            "vhost-user:/x",
            "a server's socket is missing, as in vhost-user:unix:",
        ),
        ("vhost-user:unix:", "a server's socket is missing"),
        (
            "vhost-user:unix:/x,disk=a",
            "unknown option `disk=a`: use queues=N",
        ),
        ("vhost-user:unix:/x,queues=65", "queues must be 1 to 64"),
        (
            "vhost-user:unix:/x,queue-size=100",
            "a power of two from 4 to 1024",
        ),
        (
            "rbd",
            "a pool and an image are missing, as in rbd:pool/image",
        ),
        ("rbd:pool", "a pool and an image are missing"),
        ("rbd:/image", "a pool and an image are missing"),
        ("rbd:a/b/c/d", "a pool and an image are missing"),
        ("rbd:p/i@", "a snapshot is missing after the `@`"),
        ("rbd:p/i@a/b", "names can't hold `/` or `@`"),
        ("rbd:p/i@a@b", "names can't hold `/` or `@`"),
        ("rbd:p/i,conf=", "conf= and id= need a value"),
        (
            "rbd:p/i,snap=x",
            "unknown option `snap=x`: use conf=PATH, id=NAME, ro, nolock, on-lost-lock=fail|wait",
        ),
        (
            "rbd:p/i,on-lost-lock=never",
            "unknown option `on-lost-lock=never`: use conf=PATH",
        ),
        ("rings:", "a server's socket is missing, as in rings:unix:"),
        (
            "rings:unix:/x",
            "the disk's name is missing, as in rings:unix:",
        ),
        (
            "rings:unix:/x,disk=a,queue=1",
            "unknown option `queue=1`: use disk=NAME",
        ),
        (
            "rings:unix:/x,disk=a,queues=x",
            "queues `x` is not a number",
        ),
        ("rings:unix:/x,disk=a,memory=x", "`x` is not a size"),
        (
            "rings:unix:/x,disk=a,ring-pages=3",
            "ring-pages must be 1, 2, 4, 8 or 16",
        ),
        ("delay:1ms:nbd:x", "it is no NBD URI"),
        ("cache:1M", "the volume to go over is missing"),
        ("cache:5q:mem:1G", "`5q` is not a size"),
        ("cache:1k:mem:1G", "from 64k to 16T"),
        ("cache:1M,mode=x:mem:1G", "mode `x` is none of write-back"),
        ("cache:1M,dirty=5:mem:1G", "dirty not the smaller one"),
        ("cache:1M,wait=full:mem:1G", "unknown option `wait`"),
        ("cache:1M,dirty=101:mem:1G", "1 to 99 percent"),
        ("cache:1M,x:mem:1G", "unknown option `x`: use mode="),
        ("cache:1M,lists=x:mem:1G", "lists `x` is not a number"),
        ("fault:x:mem:1G", "unknown option `x`: use seed=N"),
        ("fault:x=1:mem:1G", "unknown option `x`: use seed=N"),
        ("fault:seed=x:mem:1G", "seed `x` is not a whole number"),
        (
            "fault:after=x:mem:1G",
            "after `x` is not a number of requests",
        ),
        ("fault:error=2:mem:1G", "error `2` is not a probability"),
        ("fault:torn=x:mem:1G", "torn `x` is not a probability"),
        ("fault:stall=0.1:mem:1G", "stall needs a time"),
        ("fault:stall=0.1/1:mem:1G", "`1` is not a time"),
        ("fault:stall=x/1s:mem:1G", "stall `x` is not a probability"),
        ("fault:stall=1/3601s:mem:1G", "at most 3600s"),
        ("fault:", "the volume to go over is missing, as in fault:"),
        (
            "raid5",
            "members are missing, each in brackets, as in raid5:[",
        ),
        ("raid5:/a", "members are missing, each in brackets"),
        ("raid5:[/a", "a `]` is missing"),
        ("raid5:[/a[][/b][/c]", "a `]` is missing"),
        ("raid5:[]", "empty brackets: a member goes there"),
        (
            "raid5:[/a][/b]",
            "an array has 3 to 64 members, and here are 2",
        ),
        ("raid5:[/a][missing][missing]", "one member can be missing"),
        (
            "raid5:[/a][/b][/c]stripes=4",
            "`stripes=4` after the members",
        ),
        (
            "raid5:[/a][/b][/c],",
            "unknown option ``: use stripes=N, write-path=PATH, member-timeout=TIME, re-add=auto, force",
        ),
        (
            "raid5:[/a][/b][/c],member-timeout=1ms",
            "member-timeout must be",
        ),
        (
            "raid5:[/a][/b][/c],member-timeout=soon",
            "`soon` is not a time",
        ),
        (
            "raid5:[/a][/b][/c],re-add=auto",
            "give member-timeout=TIME too",
        ),
        (
            "raid5:[/a][/b][/c],member-timeout=1s,re-add=x",
            "re-add `x` is not auto",
        ),
        (
            "raid5:[/a][/b][/c],write-path=x",
            "write-path `x` is not direct or stripe-queue",
        ),
        (
            "raid5:[/a][/b][/c],stripes=x",
            "stripes `x` is not a number",
        ),
        ("raid5:[/a][/b][/c],stripes=7", "stripes must be 8 to 32768"),
        ("raid5:[/a][/b][/c],force=1", "unknown option `force`"),
        ("raid5:[/a][/b][mem:1X]", "`1X` is not a size"),
        ("raid5:[/a][/b][mem:1]", "multiple of 4096"),
        (&too_deep_array, "more than 16 volumes"),
        (&too_deep, "more than 16 volumes"),
    ] {
        // A comma that no option follows belongs to the path, so this one is no error.
        if want == "path" {
            assert_eq!(file_spec(text).path, PathBuf::from("/a,ro=1"));
            continue;
        }
        let error = text.parse::<VolumeSpec>().expect_err(text);
        let line = error.to_string();
        assert!(line.contains(want), "{text}: {line}");
        assert!(!line.contains('\n'), "{text}: {line}");
        assert_eq!(error.kind(), ErrorKind::Config);
    }
}

#[test]
fn values_that_only_the_struct_form_can_hold_are_checked() {
    let mut fault = FaultSpec {
        error: f64::NAN,
        ..FaultSpec::default()
    };
    let inner = Box::new(VolumeSpec::Mem(MemSpec::new(4096)));
    assert!(
        VolumeSpec::Fault(fault.clone(), inner.clone())
            .validate()
            .is_err()
    );
    fault.error = 0.0;
    fault.flush_error = Some(1.5);
    assert!(VolumeSpec::Fault(fault, inner).validate().is_err());
    let mem = MemSpec {
        size_bytes: 4096,
        sector_bytes: 1024,
    };
    assert!(VolumeSpec::Mem(mem).open().is_err());
}

#[test]
fn clients_are_volumes() {
    let VolumeSpec::Rings(r) = ok("rings:unix:/run/x.sock,disk=a,queues=4,ring-pages=2,memory=8M")
    else {
        panic!("not rings");
    };
    assert_eq!((r.disk.as_str(), r.queues, r.ring_pages), ("a", Some(4), 2));
    assert_eq!(r.memory_bytes, Some(8 << 20));
    let VolumeSpec::Vhost(v) = ok("vhost-user:unix:/run/v.sock,queues=2,queue-size=64") else {
        panic!("not vhost-user");
    };
    assert_eq!((v.queues, v.entries, v.memory_bytes), (Some(2), 64, None));
    let VolumeSpec::Cache(_, inner) = ok("cache:1M:nbd://h/x?connections=2") else {
        panic!("not a cache");
    };
    let VolumeSpec::Nbd(NbdSpec { uri, .. }) = *inner else {
        panic!("not NBD");
    };
    assert_eq!((uri.export.as_str(), uri.connections), ("x", Some(2)));
    // A path that looks like a URI is a file, if it says so.
    assert_eq!(
        file_spec("file:http://h/x").path,
        PathBuf::from("http://h/x")
    );
}

#[test]
fn a_cache_leaves_its_users_a_queue_of_the_client_below() {
    for (text, word) in [
        ("cache:1M:nbd://h/x?connections=1", "connections=2"),
        (
            "cache:1M:delay:1ms:nbd://h/x,connections=1",
            "connections=2",
        ),
        ("cache:1M:vhost-user:unix:/run/v.sock,queues=1", "queues=2"),
        (
            "cache:1M:rings:unix:/run/x.sock,disk=a,queues=1",
            "queues=2",
        ),
    ] {
        let spec = text.parse::<VolumeSpec>();
        let why = spec.expect_err("one queue isn't enough").to_string();
        assert!(why.contains(word) && !why.contains('\n'), "{why}");
        ok(&text.replace("s=1", "s=2"));
    }
    ok("nbd://h/x?connections=1");
    ok("cache:1M:nbd://h/x");
}
