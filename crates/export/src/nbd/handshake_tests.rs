use super::*;
use crate::nbd::access::{Rule, Who};
use crate::nbd::testing::MemDevice;
use pvblk_block::trace::Tracing;
use pvblk_protocol::nbd::{Context, tflag};
use std::collections::HashMap;
use std::sync::LazyLock;

fn disk(name: impl Into<String>, about: impl Into<String>) -> Arc<Disk> {
    let device = MemDevice::sized(1 << 20);
    *device.about.lock() = about.into();
    Arc::new(Disk::new(name, device, Tracing::off()))
}

static TABLE: LazyLock<Disks> =
    LazyLock::new(|| Disks::new(vec![disk("disk0", "the first"), disk("disk1", "")]));

fn option(kind: u32, payload: &[u8]) -> Vec<u8> {
    let mut b = b"IHAVEOPT".to_vec();
    b.extend(kind.to_be_bytes());
    b.extend((payload.len() as u32).to_be_bytes());
    b.extend(payload);
    b
}

fn reply(kind: u32, rep: u32, payload: &[u8]) -> Vec<u8> {
    let mut b = vec![0, 3, 0xe8, 0x89, 4, 0x55, 0x65, 0xa9];
    b.extend(kind.to_be_bytes());
    b.extend(rep.to_be_bytes());
    b.extend((payload.len() as u32).to_be_bytes());
    b.extend(payload);
    b
}

fn string(s: &str) -> Vec<u8> {
    [&(s.len() as u32).to_be_bytes(), s.as_bytes()].concat()
}

fn info_payload(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut b = string(name);
    b.extend((wanted.len() as u16).to_be_bytes());
    for w in wanted {
        b.extend(w.to_be_bytes());
    }
    b
}

fn contexts_payload(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut b = string(name);
    b.extend((queries.len() as u32).to_be_bytes());
    for q in queries {
        b.extend(string(q));
    }
    b
}

/// A negotiation past the greeting.
fn begun(client_flags: u32) -> Handshake<'static> {
    let mut h = Handshake::new(&TABLE);
    assert_eq!(h.take_output(), b"NBDMAGICIHAVEOPT\0\x03");
    assert!(matches!(
        h.feed(&client_flags.to_be_bytes()),
        Ok(Step::More)
    ));
    h
}

/// Feeds one option and returns the output, of a negotiation that goes on.
fn ask(h: &mut Handshake<'_>, kind: u32, payload: &[u8]) -> Vec<u8> {
    assert!(matches!(h.feed(&option(kind, payload)), Ok(Step::More)));
    h.take_output()
}

fn starts(got: &[u8], kind: u32, rep: u32) -> bool {
    got.starts_with(&reply(kind, rep, &[])[..16])
}

/// The context that every disk has.
fn base() -> Contexts {
    Contexts::from_iter([Context::Allocation])
}

const FLAGS: u16 = 0b1001_0110_1101;

#[test]
fn export_name_is_answered_the_old_way() {
    for (flags, padding) in [(3, 0), (1, 124), (0, 124), (2, 0)] {
        let mut h = begun(flags);
        let step = h.feed(&option(opt::EXPORT_NAME, b"disk1")).unwrap();
        let Step::Done(n) = step else { panic!() };
        assert_eq!(
            (n.export.as_str(), n.mode, n.no_zeroes),
            ("disk1", Mode::Simple, padding == 0)
        );
        let mut want = (1u64 << 20).to_be_bytes().to_vec();
        want.extend(FLAGS.to_be_bytes());
        want.extend(vec![0; padding]);
        assert_eq!(h.take_output(), want);
        assert!(h.feed(b"x").is_err());
    }
    let e = begun(3)
        .feed(&option(opt::EXPORT_NAME, b"nope"))
        .unwrap_err();
    assert!(e.to_string().contains("unknown export \"nope\""));
}

#[test]
fn go_describes_the_export_and_keeps_what_follows() {
    let mut h = begun(3);
    assert_eq!(
        ask(&mut h, opt::STRUCTURED_REPLY, b""),
        reply(opt::STRUCTURED_REPLY, rep::ACK, b"")
    );
    let got = ask(
        &mut h,
        opt::SET_META_CONTEXT,
        &contexts_payload("", &["x:y", "base:allocation"]),
    );
    let want = [
        reply(
            opt::SET_META_CONTEXT,
            rep::META_CONTEXT,
            b"\0\0\0\x01base:allocation",
        ),
        reply(opt::SET_META_CONTEXT, rep::ACK, b""),
    ];
    assert_eq!(got, want.concat());
    let mut bytes = option(opt::GO, &info_payload("disk0", &[1, 2, 3]));
    bytes.extend(b"first request");
    let Step::Done(n) = h.feed(&bytes).unwrap() else {
        panic!()
    };
    assert!(n.mode == Mode::Structured && n.contexts == base() && n.no_zeroes);
    assert_eq!(n.leftover, b"first request");
    let mut export = vec![0, 0];
    export.extend((1u64 << 20).to_be_bytes());
    export.extend((FLAGS | proto::tflag::SEND_DF).to_be_bytes());
    let want = [
        reply(opt::GO, rep::INFO, &export),
        reply(
            opt::GO,
            rep::INFO,
            &[0, 3, 0, 0, 0, 1, 0, 0, 16, 0, 2, 0, 0, 0],
        ),
        reply(opt::GO, rep::INFO, b"\0\x01disk0"),
        reply(opt::GO, rep::INFO, b"\0\x02disk of 1 MiB"),
        reply(opt::GO, rep::ACK, b""),
    ];
    assert_eq!(h.take_output(), want.concat());
}

#[test]
fn the_selection_belongs_to_its_export() {
    let mut h = begun(3);
    ask(&mut h, opt::STRUCTURED_REPLY, b"");
    ask(
        &mut h,
        opt::SET_META_CONTEXT,
        &contexts_payload("disk1", &["base:allocation"]),
    );
    let Step::Done(n) = h
        .feed(&option(opt::GO, &info_payload("disk0", &[])))
        .unwrap()
    else {
        panic!()
    };
    assert!(n.contexts.is_empty());
    // A selection without a match, or one that fails, leaves none.
    for payload in [
        contexts_payload("disk0", &["base:"]),
        contexts_payload("nope", &["base:allocation"]),
    ] {
        let mut h = begun(3);
        ask(&mut h, opt::STRUCTURED_REPLY, b"");
        ask(
            &mut h,
            opt::SET_META_CONTEXT,
            &contexts_payload("disk0", &["base:allocation"]),
        );
        ask(&mut h, opt::SET_META_CONTEXT, &payload);
        let Step::Done(n) = h
            .feed(&option(opt::GO, &info_payload("disk0", &[])))
            .unwrap()
        else {
            panic!()
        };
        assert!(n.contexts.is_empty());
    }
}

#[test]
fn lists_and_infos_let_the_negotiation_go_on() {
    let mut h = begun(3);
    let want = [
        reply(opt::LIST, rep::SERVER, b"\0\0\0\x05disk0disk of 1 MiB"),
        reply(opt::LIST, rep::SERVER, b"\0\0\0\x05disk1disk of 1 MiB"),
        reply(opt::LIST, rep::ACK, b""),
    ];
    assert_eq!(ask(&mut h, opt::LIST, b""), want.concat());
    let got = ask(&mut h, opt::INFO, &info_payload("", &[1]));
    assert!(
        got.ends_with(
            &[
                reply(opt::INFO, rep::INFO, b"\0\x01disk0"),
                reply(opt::INFO, rep::ACK, b"")
            ]
            .concat()
        )
    );
    ask(&mut h, opt::STRUCTURED_REPLY, b"");
    for queries in [&[][..], &["base:"], &["base:allocation"]] {
        let got = ask(
            &mut h,
            opt::LIST_META_CONTEXT,
            &contexts_payload("disk1", queries),
        );
        assert!(starts(&got, opt::LIST_META_CONTEXT, rep::META_CONTEXT));
    }
    let got = ask(
        &mut h,
        opt::LIST_META_CONTEXT,
        &contexts_payload("disk1", &["qemu:x"]),
    );
    assert_eq!(got, reply(opt::LIST_META_CONTEXT, rep::ACK, b""));
    assert!(matches!(
        h.feed(&option(opt::ABORT, b"")),
        Ok(Step::Aborted)
    ));
    assert_eq!(h.take_output(), reply(opt::ABORT, rep::ACK, b""));
}

/// A disk with a page cache has two contexts, and lists know wildcards.
#[test]
fn contexts_are_those_of_the_disk() {
    let plain = disk("plain", "");
    let device = MemDevice::sized(1 << 20);
    device
        .has_cache
        .store(true, std::sync::atomic::Ordering::Relaxed);
    let cached = Arc::new(Disk::new("cached", device, Tracing::off()));
    let table = Disks::new(vec![plain, cached]);
    let begin = |kind| {
        let mut h = Handshake::new(&table);
        h.feed(&3u32.to_be_bytes()).unwrap();
        h.take_output();
        ask(&mut h, kind, b"");
        h
    };
    let (base, cache) = (&b"base:allocation"[..], &b"x-pvblk:cache"[..]);
    let mut h = begin(opt::EXTENDED_HEADERS);
    for (disk, queries, listed, selected) in [
        ("cached", &[][..], &[base, cache][..], &[][..]),
        ("plain", &[], &[base], &[]),
        ("cached", &["base:", "x-pvblk:"], &[base, cache], &[]),
        ("cached", &["x-pvblk:"], &[cache], &[]),
        ("plain", &["x-pvblk:"], &[], &[]),
        ("cached", &["x-pvblk:cache", "qemu:"], &[cache], &[cache]),
        ("plain", &["x-pvblk:cache"], &[], &[]),
        (
            "cached",
            &["x-pvblk:cache", "base:allocation"],
            &[base, cache],
            &[base, cache],
        ),
        // Twice, or with a wildcard, is once.
        (
            "cached",
            &["base:", "base:allocation", "base:allocation"],
            &[base],
            &[base],
        ),
    ] {
        for (kind, found) in [
            (opt::LIST_META_CONTEXT, listed),
            (opt::SET_META_CONTEXT, selected),
        ] {
            let got = ask(&mut h, kind, &contexts_payload(disk, queries));
            let set = kind == opt::SET_META_CONTEXT;
            let mut want = Vec::new();
            for name in found {
                let id = if *name == base { 1 } else { 2u32 };
                let id = if set { id } else { 0 };
                let payload = [&id.to_be_bytes(), *name].concat();
                want.extend(reply(kind, rep::META_CONTEXT, &payload));
            }
            want.extend(reply(kind, rep::ACK, b""));
            assert_eq!(got, want, "{disk} {queries:?} {kind}");
        }
    }
    // The flag of the payload stands where contexts were selected for this disk.
    let payload_flag = |h: &mut Handshake<'_>, disk| {
        let got = ask(h, opt::INFO, &info_payload(disk, &[]));
        let flags = u16::from_be_bytes([got[30], got[31]]);
        flags & tflag::BLOCK_STATUS_PAYLOAD != 0
    };
    for (how, want) in [
        (opt::EXTENDED_HEADERS, true),
        (opt::STRUCTURED_REPLY, false),
    ] {
        let mut h = begin(how);
        assert!(!payload_flag(&mut h, "cached"));
        let both = contexts_payload("cached", &["base:allocation", "x-pvblk:cache"]);
        ask(&mut h, opt::SET_META_CONTEXT, &both);
        assert_eq!(payload_flag(&mut h, "cached"), want);
        assert!(!payload_flag(&mut h, "plain"));
        let step = h.feed(&option(opt::GO, &info_payload("cached", &[])));
        let Ok(Step::Done(n)) = step else { panic!() };
        assert_eq!(n.contexts.len(), 2);
        assert_eq!(
            n.transmission_flags & tflag::BLOCK_STATUS_PAYLOAD != 0,
            want
        );
    }
}

/// 64 queries are answered, more are too many; what isn't well-formed is told as such, however many it has.
#[test]
fn queries_are_counted() {
    let mut h = begun(3);
    ask(&mut h, opt::STRUCTURED_REPLY, b"");
    let many = |n| contexts_payload("disk0", &vec!["base:allocation"; n]);
    let mut cut = many(65);
    cut.pop();
    let mut long = many(65);
    long.push(0);
    for kind in [opt::LIST_META_CONTEXT, opt::SET_META_CONTEXT] {
        for (payload, want) in [
            (many(64), rep::META_CONTEXT),
            (many(65), rep::ERR_TOO_BIG),
            (many(3000), rep::ERR_TOO_BIG),
            (cut.clone(), rep::ERR_INVALID),
            (long.clone(), rep::ERR_INVALID),
        ] {
            let got = ask(&mut h, kind, &payload);
            assert!(starts(&got, kind, want), "{kind}: {got:x?}");
        }
    }
}

#[test]
fn what_makes_no_sense_is_refused_and_the_negotiation_goes_on() {
    let long = "x".repeat(4097);
    let mut short_info = info_payload("disk0", &[1, 2]);
    short_info.pop();
    let mut huge_count = string("disk0");
    huge_count.extend(u32::MAX.to_be_bytes());
    let table: &[(u32, Vec<u8>, u32)] = &[
        (opt::STARTTLS, vec![], rep::ERR_UNSUP),
        (4, b"disk0".to_vec(), rep::ERR_UNSUP),
        (0xdead_beef, vec![1; 60_000], rep::ERR_UNSUP),
        (opt::LIST, b"x".to_vec(), rep::ERR_INVALID),
        (opt::STRUCTURED_REPLY, b"x".to_vec(), rep::ERR_INVALID),
        (opt::INFO, vec![], rep::ERR_INVALID),
        (opt::GO, short_info, rep::ERR_INVALID),
        (
            opt::GO,
            [info_payload("disk0", &[]), vec![0]].concat(),
            rep::ERR_INVALID,
        ),
        (opt::GO, vec![0xff; 4], rep::ERR_TOO_BIG),
        (opt::GO, info_payload(&long, &[]), rep::ERR_TOO_BIG),
        (opt::GO, info_payload("a\0b", &[]), rep::ERR_INVALID),
        (
            opt::GO,
            [vec![0, 0, 0, 1, 0xff], vec![0, 0]].concat(),
            rep::ERR_INVALID,
        ),
        (opt::GO, info_payload("nope", &[]), rep::ERR_UNKNOWN),
        // Without structured replies there are no contexts.
        (
            opt::SET_META_CONTEXT,
            contexts_payload("disk0", &[]),
            rep::ERR_INVALID,
        ),
    ];
    let mut h = begun(3);
    for (kind, payload, want) in table {
        let got = ask(&mut h, *kind, payload);
        assert!(starts(&got, *kind, *want), "option {kind}: {got:x?}");
    }
    ask(&mut h, opt::STRUCTURED_REPLY, b"");
    for payload in [huge_count, contexts_payload("disk0", &[&long])] {
        let got = ask(&mut h, opt::SET_META_CONTEXT, &payload);
        assert!(!starts(&got, opt::SET_META_CONTEXT, rep::ACK));
    }
    assert!(matches!(
        h.feed(&option(opt::GO, &info_payload("", &[]))),
        Ok(Step::Done(_))
    ));
}

#[test]
fn extended_headers_take_the_place_of_structured_replies() {
    for before in [false, true] {
        let mut h = begun(3);
        if before {
            ask(&mut h, opt::STRUCTURED_REPLY, b"");
        }
        for (kind, payload, want) in [
            (opt::EXTENDED_HEADERS, &b"x"[..], rep::ERR_INVALID),
            (opt::EXTENDED_HEADERS, b"", rep::ACK),
            (opt::EXTENDED_HEADERS, b"", rep::ERR_INVALID),
            (opt::STRUCTURED_REPLY, b"", rep::ERR_EXT_HEADER_REQD),
        ] {
            let got = ask(&mut h, kind, payload);
            assert!(starts(&got, kind, want), "option {kind}: {got:x?}");
        }
        let contexts = contexts_payload("disk0", &["base:allocation"]);
        ask(&mut h, opt::SET_META_CONTEXT, &contexts);
        let step = h.feed(&option(opt::GO, &info_payload("disk0", &[])));
        let Ok(Step::Done(n)) = step else { panic!() };
        assert!(n.mode == Mode::Extended && n.contexts == base());
        assert!(n.transmission_flags & proto::tflag::SEND_DF != 0);
    }
    let mut h = begun(3);
    ask(&mut h, opt::EXTENDED_HEADERS, b"");
    assert!(h.feed(&option(opt::EXPORT_NAME, b"disk1")).is_err());
}

#[test]
fn violations_end_the_connection() {
    let too_long = [b"IHAVEOPT".as_slice(), &[0, 0, 0, 3, 0, 1, 0, 1]].concat();
    for bytes in [&b"IHAVEOPS\0\0\0\x03\0\0\0\0"[..], &too_long] {
        let mut h = begun(3);
        assert!(h.feed(bytes).is_err());
        assert!(h.feed(&option(opt::LIST, b"")).is_err());
    }
    assert!(Handshake::new(&TABLE).feed(&[0, 0, 0, 4]).is_err());
    assert!(begun(0).feed(&option(opt::LIST, b"")).is_err());
    let mut h = begun(3);
    let flood = option(opt::INFO, b"").repeat(300);
    while h.feed(&flood).is_ok() {
        h.take_output();
    }
}

/// 255 lists in 4 KiB were answered with 288 MiB, at once.
#[test]
fn lists_are_few_and_told_piece_by_piece() {
    let many = (0..1000).map(|n| disk(format!("disk{n}"), "d".repeat(200)));
    let many = Disks::new(many.collect());
    let mut h = Handshake::new(&many);
    h.take_output();
    h.feed(&3u32.to_be_bytes()).unwrap();
    let mut all = Vec::new();
    let mut step = h.feed(&option(opt::LIST, b"").repeat(255)).unwrap();
    loop {
        let output = h.take_output();
        assert!(output.len() <= MOST_OUTPUT + 8192, "{}", output.len());
        all.extend(output);
        match step {
            Step::Output => step = h.feed(&[]).unwrap(),
            Step::More => break,
            _ => panic!("{step:?}"),
        }
    }
    let mut kinds = HashMap::new();
    let mut rest = &all[..];
    while !rest.is_empty() {
        *kinds.entry(u32_at(rest, 12)).or_insert(0) += 1;
        rest = &rest[20 + u32_at(rest, 16) as usize..];
    }
    let told = [rep::SERVER, rep::ACK, rep::ERR_POLICY].map(|k| kinds[&k]);
    assert_eq!(told, [4000, 4, 251]);
}

#[test]
fn a_client_that_finds_no_place_is_told() {
    let full = |disk: &Arc<Disk>| Err(format!("{} is full", disk.name()));
    let mut h = Handshake::with_door(&TABLE, &full);
    h.feed(&3u32.to_be_bytes()).unwrap();
    h.take_output();
    let go = option(opt::GO, &info_payload("disk0", &[]));
    assert!(matches!(h.feed(&go), Ok(Step::More)));
    let output = h.take_output();
    assert_eq!(u32_at(&output, 12), rep::ERR_POLICY);
    assert_eq!(&output[20..], b"disk0 is full");
    let info = option(opt::INFO, &info_payload("disk0", &[]));
    assert!(matches!(h.feed(&info), Ok(Step::More)));
    assert_eq!(u32_at(&h.take_output(), 12), rep::INFO);
    assert!(h.feed(&option(opt::EXPORT_NAME, b"disk0")).is_err());
}

#[test]
fn bytes_may_come_one_by_one() {
    let mut all = 3u32.to_be_bytes().to_vec();
    all.extend(option(opt::STRUCTURED_REPLY, b""));
    all.extend(option(opt::LIST, b""));
    all.extend(option(opt::GO, &info_payload("disk1", &[])));
    let mut h = Handshake::new(&TABLE);
    let last = all.len() - 1;
    for (i, b) in all.iter().enumerate() {
        match h.feed(&[*b]).unwrap() {
            Step::More => assert!(i < last),
            Step::Done(n) => {
                assert_eq!((i, n.export.as_str()), (last, "disk1"));
                assert!(n.leftover.is_empty());
            }
            Step::Aborted | Step::Output | Step::StartTls => panic!(),
        }
    }
}

#[test]
fn random_options_never_panic_and_end_at_most_once() {
    let mut rng = crate::nbd::testing::Rng::from_env(3);
    let names = ["disk0", "disk1", "", "base:allocation", "nope"];
    for _ in 0..2000 {
        let mut h = begun(3);
        let mut bytes = Vec::new();
        for _ in 0..rng.below(6) {
            let name = names[rng.below(5) as usize];
            let query = names[rng.below(5) as usize];
            let mut payload = match rng.below(4) {
                0 => vec![],
                1 => name.as_bytes().to_vec(),
                2 => info_payload(name, &[rng.below(5) as u16]),
                _ => contexts_payload(name, &[query]),
            };
            if rng.below(3) == 0 && !payload.is_empty() {
                let at = rng.below(payload.len() as u64) as usize;
                payload[at] = rng.below(256) as u8;
            }
            bytes.extend(option(rng.below(13) as u32, &payload));
        }
        let mut over = false;
        for piece in bytes.chunks(1 + rng.below(40) as usize) {
            match h.feed(piece) {
                Ok(Step::More | Step::Output) => assert!(!over),
                Ok(Step::Done(_) | Step::Aborted) => assert!(!std::mem::replace(&mut over, true)),
                Ok(Step::StartTls) => panic!("TLS where there is none"),
                Err(_) => over = true,
            }
        }
    }
}

/// A negotiation with this use of TLS, after the client's flags.
fn with_tls<'a>(rules: &'a Rules, tls: TlsUse) -> Handshake<'a> {
    let mut h = Handshake::new(&TABLE).admitting(rules, Identity::default(), tls);
    assert!(matches!(h.feed(&3u32.to_be_bytes()), Ok(Step::More)));
    h.take_output();
    h
}

/// The type of the only reply in the output.
fn reply_type(h: &mut Handshake<'_>) -> u32 {
    u32_at(&h.take_output(), 12)
}

#[test]
fn disks_are_for_those_who_began_tls_where_it_is_required() {
    let mut h = with_tls(Rules::everyone(), TlsUse::Required);
    for (number, payload) in [
        (opt::LIST, Vec::new()),
        (opt::STRUCTURED_REPLY, Vec::new()),
        (opt::INFO, info_payload("disk0", &[])),
        (opt::GO, info_payload("disk0", &[])),
        (77, Vec::new()),
    ] {
        let step = h.feed(&option(number, &payload));
        assert!(matches!(step, Ok(Step::More)), "{number}: {step:?}");
        assert_eq!(reply_type(&mut h), rep::ERR_TLS_REQD, "{number}");
    }
    assert!(matches!(
        h.feed(&option(opt::STARTTLS, b"x")),
        Ok(Step::More)
    ));
    assert_eq!(reply_type(&mut h), rep::ERR_INVALID);
    assert!(matches!(
        h.feed(&option(opt::STARTTLS, b"")),
        Ok(Step::StartTls)
    ));
    assert_eq!(reply_type(&mut h), rep::ACK);
    h.secured(Vec::new());
    assert!(matches!(
        h.feed(&option(opt::STARTTLS, b"")),
        Ok(Step::More)
    ));
    assert_eq!(reply_type(&mut h), rep::ERR_INVALID);
    let step = h.feed(&option(opt::GO, &info_payload("disk0", &[])));
    assert!(matches!(step, Ok(Step::Done(_))));
    // The old way has no error reply.
    let mut h = with_tls(Rules::everyone(), TlsUse::Required);
    assert!(h.feed(&option(opt::EXPORT_NAME, b"disk0")).is_err());
    // Without TLS the option is not known.
    let mut h = with_tls(Rules::everyone(), TlsUse::Absent);
    assert!(matches!(
        h.feed(&option(opt::STARTTLS, b"")),
        Ok(Step::More)
    ));
    assert_eq!(reply_type(&mut h), rep::ERR_UNSUP);
}

#[test]
fn nothing_of_the_clear_counts_under_tls() {
    let mut h = with_tls(Rules::everyone(), TlsUse::Offered);
    for bytes in [
        option(opt::STRUCTURED_REPLY, b""),
        option(
            opt::SET_META_CONTEXT,
            &contexts_payload("disk0", &["base:allocation"]),
        ),
    ] {
        assert!(matches!(h.feed(&bytes), Ok(Step::More)));
    }
    let step = h.feed(&option(opt::STARTTLS, b""));
    assert!(matches!(step, Ok(Step::StartTls)));
    h.secured(Vec::new());
    match h.feed(&option(opt::GO, &info_payload("disk0", &[]))) {
        Ok(Step::Done(n)) => assert!(n.mode == Mode::Simple && n.contexts.is_empty()),
        step => panic!("{step:?}"),
    }
    // An option that somebody put behind STARTTLS.
    let mut h = with_tls(Rules::everyone(), TlsUse::Offered);
    let mut bytes = option(opt::STARTTLS, b"");
    bytes.extend(option(opt::LIST, b""));
    assert!(h.feed(&bytes).is_err());
}

#[test]
fn a_client_meets_the_disks_that_it_has_a_right_to() {
    let rule = |who, disk: &str, rights| Rule {
        who,
        disk: Some(disk.to_owned()),
        rights,
    };
    let rules = Rules::new(vec![
        rule(Who::Any, "disk1", Rights::ReadOnly),
        rule(
            Who::Certificate("backup".into()),
            "disk0",
            Rights::ReadWrite,
        ),
    ]);
    let go = |h: &mut Handshake<'_>, disk: &str| {
        let step = h.feed(&option(opt::GO, &info_payload(disk, &[])));
        match step.unwrap() {
            Step::Done(n) => Some(n.transmission_flags & tflag::READ_ONLY != 0),
            _ => None,
        }
    };
    let mut h = with_tls(&rules, TlsUse::Offered);
    assert!(matches!(h.feed(&option(opt::LIST, b"")), Ok(Step::More)));
    let listed = h.take_output();
    let has = |name: &[u8]| listed.windows(name.len()).any(|w| w == name);
    assert!(has(b"disk1") && !has(b"disk0"));
    assert_eq!(go(&mut h, "disk0"), None);
    assert_eq!(reply_type(&mut h), rep::ERR_UNKNOWN);
    assert_eq!(h.take_denied().as_deref(), Some("disk0"));
    assert_eq!(go(&mut h, "disk1"), Some(true));
    let mut h = with_tls(&rules, TlsUse::Offered);
    h.secured(vec!["backup".into()]);
    assert_eq!(go(&mut h, "disk0"), Some(false));
}
