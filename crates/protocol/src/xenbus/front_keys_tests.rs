use super::*;
use crate::xenbus::KeyMap;

fn keys(queues: u32, order: u32) -> FrontKeys {
    let ring = RingSize::from_order(order).unwrap();
    FrontKeys {
        queues: (0..queues)
            .map(|q| QueueKeys {
                ring_refs: (0..ring.pages() as u32).map(|p| 8 + q * 16 + p).collect(),
                event_channel: q + 1,
            })
            .collect(),
        ring,
        abi: Abi::X86_64,
        persistent: true,
    }
}

fn parse(map: &KeyMap, offers: &BackendOffers) -> Result<FrontKeys, Error> {
    parse_front_keys(&|k| map.get(k).map(str::to_owned), offers)
}

#[test]
fn every_shape_survives_its_keys() {
    let offers = BackendOffers {
        max_queues: Some(64),
        ..BackendOffers::default()
    };
    for queues in [1, 2, 63, 64] {
        for order in 0..=4 {
            for size_key in [RingSizeKey::Order, RingSizeKey::DeprecatedPages] {
                let mut map = KeyMap::new();
                map.apply(keys(queues, order).changes(size_key)).unwrap();
                assert_eq!(parse(&map, &offers).unwrap(), keys(queues, order));
                assert_eq!(map.get("ring-ref").is_some(), queues == 1 && order == 0);
                assert_eq!(
                    map.get("queue-0/ring-ref0").is_some(),
                    queues > 1 && order > 0
                );
            }
        }
    }
}

#[test]
fn an_old_back_end_reads_only_the_top_directory() {
    let mut map = KeyMap::new();
    map.apply(keys(1, 0).changes(RingSizeKey::Order)).unwrap();
    map.apply(vec![
        Change::set("multi-queue-num-queues", 7),
        Change::set("ring-page-order", 3),
    ])
    .unwrap();
    assert_eq!(parse(&map, &BackendOffers::oldest()).unwrap(), keys(1, 0));
}

#[test]
fn native_protocol_and_a_numbered_single_page_are_accepted() {
    let mut map = KeyMap::new();
    map.apply(vec![
        Change::set("ring-page-order", 0),
        Change::set("ring-ref0", 8),
        Change::set("event-channel", 1),
    ])
    .unwrap();
    let got = parse(&map, &BackendOffers::default()).unwrap();
    assert_eq!(
        (got.queues[0].ring_refs.as_slice(), got.persistent),
        (&[8][..], false)
    );
    assert_eq!(got.abi, Abi::X86_64);
    map.apply(vec![Change::set("protocol", "x86_32-abi")])
        .unwrap();
    let got = parse(&map, &BackendOffers::default()).unwrap();
    assert_eq!(got.abi, Abi::X86_32);
}

/// Each line changes one key of a valid set; the refusal must name it.
#[test]
fn every_spoiled_key_is_refused_with_its_reason() {
    let many = |n: u32| n.to_string();
    let cases: Vec<(u32, u32, &str, Option<String>, &str)> = vec![
        (
            2,
            3,
            "protocol",
            Some("arm-abi".into()),
            "protocol is 'arm-abi'",
        ),
        (
            2,
            3,
            "protocol",
            Some("\u{1b}[2J".into()),
            "protocol is '\\u{1b}[2J'",
        ),
        (
            2,
            3,
            "multi-queue-num-queues",
            Some("0".into()),
            "1 to 4 were offered",
        ),
        (
            2,
            3,
            "multi-queue-num-queues",
            Some("5".into()),
            "1 to 4 were offered",
        ),
        (
            2,
            3,
            "multi-queue-num-queues",
            Some("4294967297".into()),
            "the most is 4294967295",
        ),
        (
            2,
            3,
            "multi-queue-num-queues",
            Some("two".into()),
            "'two', not a number",
        ),
        (
            2,
            3,
            "multi-queue-num-queues",
            Some(" 2".into()),
            "not a number",
        ),
        (
            2,
            3,
            "multi-queue-num-queues",
            Some("+2".into()),
            "not a number",
        ),
        (
            2,
            3,
            "multi-queue-num-queues",
            Some(String::new()),
            "not a number",
        ),
        (
            2,
            3,
            "multi-queue-num-queues",
            Some("3".into()),
            "queue 2: ring-ref0 is missing",
        ),
        (2, 3, "multi-queue-num-queues", None, "ring-ref0 is missing"),
        (
            2,
            3,
            "ring-page-order",
            Some("5".into()),
            "0 to 4 were offered",
        ),
        (
            2,
            3,
            "ring-page-order",
            Some(many(u32::MAX)),
            "0 to 4 were offered",
        ),
        (
            2,
            3,
            "ring-page-order",
            Some("4".into()),
            "queue 0: ring-ref8 is missing",
        ),
        (
            1,
            0,
            "num-ring-pages",
            Some("3".into()),
            "not a power of two up to 16",
        ),
        (
            1,
            0,
            "num-ring-pages",
            Some("0".into()),
            "not a power of two",
        ),
        (
            1,
            0,
            "num-ring-pages",
            Some("32".into()),
            "not a power of two up to 16",
        ),
        (1, 0, "ring-ref", None, "ring-ref is missing"),
        (
            1,
            0,
            "ring-ref",
            Some("4294967296".into()),
            "ring-ref is 4294967296",
        ),
        (1, 0, "event-channel", None, "event-channel is missing"),
        (1, 0, "event-channel", Some("0".into()), "no port"),
        (
            2,
            3,
            "queue-1/ring-ref7",
            None,
            "queue 1: ring-ref7 is missing",
        ),
        (
            2,
            3,
            "queue-1/ring-ref7",
            Some("8".into()),
            "queue 1: grant reference 8 is used by two",
        ),
        (
            2,
            3,
            "queue-0/ring-ref1",
            Some("8".into()),
            "queue 0: grant reference 8 is used by two",
        ),
        (
            2,
            3,
            "queue-1/event-channel",
            Some("1".into()),
            "queue 1: event-channel 1 belongs",
        ),
        (
            2,
            3,
            "feature-persistent",
            Some("yes".into()),
            "feature-persistent is 'yes'",
        ),
    ];
    for (queues, order, key, value, reason) in cases {
        let mut map = KeyMap::new();
        map.apply(keys(queues, order).changes(RingSizeKey::Order))
            .unwrap();
        map.apply(vec![Change {
            key: key.into(),
            value: value.clone(),
        }])
        .unwrap();
        let e = parse(&map, &BackendOffers::default())
            .expect_err(key)
            .to_string();
        assert!(e.contains(reason), "{key}={value:?}: {e}");
    }
}
