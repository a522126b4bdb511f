//! Both halves of the handshake against each other and against scripts, in memory.

use super::*;
use pvblk_block::Error;
use pvblk_client::rings::{
    FrontEvent, FrontPersonality, FrontResources, FrontWishes, FrontendNegotiation,
};
use pvblk_protocol::blkif::RingSize;
use pvblk_protocol::xenbus::DiskProperties;
use pvblk_protocol::xenbus::{
    BackendOffers, Change, FrontKeys, KeyMap, QueueKeys, Store, XenbusState,
};

const DISK: DiskProperties = DiskProperties {
    sectors: 2048,
    sector_size: 512,
    physical_sector_size: 4096,
    read_only: false,
    flush: true,
    barrier: true,
    discard: true,
    discard_secure: false,
    discard_granularity: 4096,
    persistent: false,
    max_indirect_segments: 0,
    cache_mark: Some(7),
    contents_mark: None,
};

/// One end's copies of both directories.
#[derive(Default)]
struct End {
    own: KeyMap,
    peer: KeyMap,
    transactions: usize,
}

impl Store for End {
    fn read(&self, key: &str) -> Option<String> {
        self.peer.get(key).map(str::to_owned)
    }
    fn write(&mut self, changes: &[Change]) -> Result<(), Error> {
        self.transactions += 1;
        self.own.apply(changes.to_vec())
    }
}

#[derive(Default)]
struct Disk {
    connected: Option<FrontKeys>,
    refuse: Option<&'static str>,
    slow: bool,
    disconnects: usize,
}

impl Connector for Disk {
    fn connect(&mut self, front: &FrontKeys) -> Result<DiskProperties, Error> {
        if let Some(why) = self.refuse {
            return Err(Error::protocol(why));
        }
        assert!(self.connected.is_none(), "connected twice");
        self.connected = Some(front.clone());
        Ok(DISK)
    }
    fn disconnect(&mut self) -> bool {
        self.disconnects += 1;
        if !self.slow {
            self.connected = None;
        }
        self.connected.is_none()
    }
}

struct Rings;

impl FrontResources for Rings {
    fn allocate(&mut self, queues: usize, ring: RingSize) -> Result<Vec<QueueKeys>, Error> {
        Ok((0..queues as u32)
            .map(|q| QueueKeys {
                ring_refs: (0..ring.pages() as u32).map(|p| 8 + q * 16 + p).collect(),
                event_channel: q + 1,
            })
            .collect())
    }
}

/// A back end with its store and disk, and a script for a front end.
struct Back {
    end: End,
    disk: Disk,
    negotiation: BackendNegotiation,
}

impl Back {
    fn new(offers: BackendOffers) -> Back {
        let mut back = Back {
            end: End::default(),
            disk: Disk::default(),
            negotiation: BackendNegotiation::new(offers, true),
        };
        back.negotiation.start(&mut back.end).unwrap();
        back
    }
    fn front_writes(&mut self, keys: &[(&str, &str)]) -> XenbusState {
        let changes = keys.iter().map(|(k, v)| Change::set(*k, v)).collect();
        self.end.peer.apply(changes).unwrap();
        self.negotiation
            .peer_changed(&mut self.end, &mut self.disk)
            .unwrap();
        let published = self.end.own.get("state").and_then(XenbusState::parse);
        assert_eq!(published, Some(self.negotiation.state()));
        self.negotiation.state()
    }
    fn connected() -> Back {
        let mut back = Back::new(BackendOffers::default());
        let keys = [("ring-ref", "8"), ("event-channel", "1"), ("state", "3")];
        assert_eq!(back.front_writes(&keys), XenbusState::Connected);
        back
    }
    fn error(&self) -> &str {
        self.end.own.get("error").unwrap_or("")
    }
}

fn wishes(queues: u32, order: u32, personality: FrontPersonality) -> FrontWishes {
    FrontWishes {
        queues,
        ring: RingSize::from_order(order).unwrap(),
        persistent: true,
        personality,
    }
}

/// Runs both halves until neither moves; returns queues, order and the disk as the front end sees it.
fn negotiate(offers: BackendOffers, wishes: FrontWishes) -> (usize, u32, DiskProperties) {
    let mut back = Back::new(offers);
    let mut end = End::default();
    let mut front = FrontendNegotiation::new(wishes);
    front.start(&mut end).unwrap();
    let mut seen = None;
    for _ in 0..8 {
        end.peer = back.end.own.clone();
        if let Some(FrontEvent::Connected(disk)) = front.peer_changed(&mut end, &mut Rings).unwrap()
        {
            seen = Some(disk);
        }
        back.end.peer = end.own.clone();
        back.negotiation
            .peer_changed(&mut back.end, &mut back.disk)
            .unwrap();
    }
    assert_eq!(front.state(), XenbusState::Connected);
    assert_eq!(back.negotiation.state(), XenbusState::Connected);
    let keys = back.disk.connected.unwrap();
    (keys.queues.len(), keys.ring.order(), seen.unwrap())
}

#[test]
fn both_halves_agree_on_the_smaller_of_wish_and_offer() {
    let offers = |queues, order| BackendOffers {
        max_queues: Some(queues),
        max_ring: RingSize::from_order(order),
        ..BackendOffers::default()
    };
    let new = FrontPersonality::default();
    let (queues, order, disk) = negotiate(offers(2, 3), wishes(8, 4, new));
    assert_eq!((queues, order), (2, 3));
    assert!(disk.persistent && disk.max_indirect_segments == 256);
    let (queues, order, _) = negotiate(offers(8, 4), wishes(3, 1, new));
    assert_eq!((queues, order), (3, 1));
    let (queues, order, disk) = negotiate(BackendOffers::oldest(), wishes(8, 4, new));
    assert_eq!((queues, order), (1, 0));
    assert!(!disk.persistent && disk.max_indirect_segments == 0);
    let old = FrontPersonality {
        ignores_multi_queue: true,
        ignores_multi_page: true,
        skips_initialised: true,
        deprecated_ring_pages: true,
    };
    let (queues, order, _) = negotiate(offers(8, 4), wishes(8, 4, old));
    assert_eq!((queues, order), (1, 0));
    let red_hat = FrontPersonality {
        deprecated_ring_pages: true,
        ..new
    };
    let (queues, order, _) = negotiate(offers(8, 4), wishes(2, 2, red_hat));
    assert_eq!((queues, order), (2, 2));
}

#[test]
fn the_disk_is_published_in_one_transaction_with_the_state() {
    let back = Back::connected();
    assert_eq!(back.end.transactions, 2);
    assert_eq!(back.end.own.get("sectors"), Some("2048"));
}

#[test]
fn a_repeated_state_does_not_connect_twice() {
    let mut back = Back::connected();
    for state in ["3", "4", "4", "3"] {
        assert_eq!(
            back.front_writes(&[("state", state)]),
            XenbusState::Connected
        );
    }
}

#[test]
fn queues_end_only_after_the_front_end_has_finished() {
    let mut back = Back::connected();
    back.disk.slow = true;
    assert_eq!(back.front_writes(&[("state", "5")]), XenbusState::Closing);
    assert_eq!(back.disk.disconnects, 0);
    assert_eq!(back.front_writes(&[("state", "6")]), XenbusState::Closing);
    assert_eq!(back.disk.disconnects, 1);
    back.disk.connected = None;
    back.negotiation
        .drained(&mut back.end, &mut back.disk)
        .unwrap();
    assert_eq!(back.negotiation.state(), XenbusState::Closed);
    assert_eq!(back.error(), "");
    // The front end comes back, with other keys.
    assert_eq!(back.front_writes(&[("state", "1")]), XenbusState::InitWait);
    assert_eq!(back.front_writes(&[("state", "4")]), XenbusState::Connected);
    // While offline, a front end that left may not come back.
    back.disk.slow = false;
    back.negotiation.set_online(false);
    assert_eq!(back.front_writes(&[("state", "6")]), XenbusState::Closed);
    assert_eq!(back.front_writes(&[("state", "1")]), XenbusState::Closed);
}

#[test]
fn a_front_end_that_returns_while_queues_drain_is_served_after() {
    let mut back = Back::connected();
    back.disk.slow = true;
    back.front_writes(&[("state", "6")]);
    assert_eq!(back.front_writes(&[("state", "1")]), XenbusState::Closing);
    back.disk.connected = None;
    back.negotiation
        .drained(&mut back.end, &mut back.disk)
        .unwrap();
    assert_eq!(back.negotiation.state(), XenbusState::InitWait);
}

#[test]
fn an_invalid_state_ends_this_connection_with_a_reason() {
    for (state, reason) in [
        ("2", "state InitWait is not allowed"),
        ("7", "state Reconfiguring is not allowed"),
        ("8", "state Reconfigured is not allowed"),
        ("9", "state is '9'"),
        ("\n", "state is '\\n'"),
        ("", "state is ''"),
    ] {
        let mut back = Back::connected();
        assert_eq!(
            back.front_writes(&[("state", state)]).number() / 5,
            1,
            "{state}"
        );
        assert!(back.error().starts_with(reason), "{}", back.error());
        assert!(back.disk.connected.is_none());
        let mut waiting = Back::new(BackendOffers::default());
        waiting.front_writes(&[("state", state)]);
        assert!(waiting.error().starts_with(reason), "{}", waiting.error());
    }
    let mut back = Back::connected();
    assert_eq!(back.front_writes(&[("state", "1")]), XenbusState::InitWait);
    assert!(back.disk.connected.is_none());
}

#[test]
fn refused_resources_are_reported_and_the_front_end_may_try_again() {
    let mut back = Back::new(BackendOffers::default());
    back.disk.refuse = Some("no such grant");
    let keys = [("ring-ref", "8"), ("event-channel", "1"), ("state", "4")];
    assert_eq!(back.front_writes(&keys), XenbusState::Closing);
    assert_eq!(back.error(), "no such grant");
    assert_eq!(back.front_writes(&[("state", "6")]), XenbusState::Closed);
    back.disk.refuse = None;
    assert_eq!(back.front_writes(&[("state", "1")]), XenbusState::InitWait);
    assert_eq!(back.error(), "");
    assert_eq!(back.front_writes(&keys), XenbusState::Connected);
}

#[test]
fn a_broken_ring_ends_the_queues_at_once() {
    let mut back = Back::connected();
    for _ in 0..3 {
        back.negotiation
            .break_off(&mut back.end, &mut back.disk, "queue 0: ring index")
            .unwrap();
        assert_eq!(back.negotiation.state(), XenbusState::Closing);
        assert!(back.disk.connected.is_none());
    }
    assert_eq!(back.error(), "queue 0: ring index");
    assert_eq!(back.front_writes(&[("state", "6")]), XenbusState::Closed);
}

#[test]
fn a_resize_rewrites_sectors_and_state() {
    let mut back = Back::connected();
    let before = back.end.transactions;
    back.negotiation.resize(&mut back.end, 2048).unwrap();
    assert_eq!(back.end.transactions, before);
    back.negotiation.resize(&mut back.end, 4096).unwrap();
    assert_eq!(back.end.own.get("sectors"), Some("4096"));
    assert_eq!(back.negotiation.state(), XenbusState::Connected);
}

/// A front end against a scripted back end.
fn front_sees(scripts: &[&[(&str, &str)]]) -> Vec<Result<Option<FrontEvent>, String>> {
    let mut end = End::default();
    let mut front = FrontendNegotiation::new(wishes(2, 1, FrontPersonality::default()));
    front.start(&mut end).unwrap();
    let mut all = Vec::new();
    for keys in scripts {
        let changes = keys.iter().map(|(k, v)| Change::set(*k, v)).collect();
        end.peer.apply(changes).unwrap();
        let seen = front.peer_changed(&mut end, &mut Rings);
        all.push(seen.map_err(|e| e.to_string()));
    }
    all
}

#[test]
fn a_front_end_follows_its_back_end() {
    let seen = front_sees(&[
        &[("state", "6")],
        &[("state", "2")],
        &[("state", "4"), ("sectors", "100")],
        &[("state", "4")],
        &[("state", "4"), ("sectors", "200")],
        &[("state", "5"), ("error", "moving\naway")],
        &[("state", "6")],
    ]);
    assert!(matches!(seen[2], Ok(Some(FrontEvent::Connected(p))) if p.sectors == 100));
    assert_eq!(seen[3], Ok(None));
    assert_eq!(seen[4], Ok(Some(FrontEvent::Resized { sectors: 200 })));
    let reason = Some("moving away".to_string());
    assert_eq!(
        seen[5],
        Ok(Some(FrontEvent::Closing {
            reason: reason.clone()
        }))
    );
    assert_eq!(seen[6], Ok(Some(FrontEvent::Closed { reason })));
}

#[test]
fn a_front_end_refuses_a_back_end_that_breaks_the_protocol() {
    for (scripts, reason) in [
        (&[&[("state", "x")][..]][..], "state is 'x'"),
        (&[&[("state", "7")]], "Reconfiguring"),
        (&[&[("state", "5"), ("error", "busy")]], "busy"),
        (
            &[&[("state", "2"), ("multi-queue-max-queues", "-1")]],
            "multi-queue-max-queues",
        ),
        (
            &[&[("state", "2")], &[("state", "4")]],
            "sectors is missing",
        ),
        (
            &[&[("state", "2")], &[("state", "6"), ("error", "bad grant")]],
            "bad grant",
        ),
        (
            &[
                &[("state", "2")],
                &[("state", "4"), ("sectors", "1")],
                &[("sectors", "y")],
            ],
            "sectors is 'y'",
        ),
        (
            &[
                &[("state", "2")],
                &[("state", "4"), ("sectors", "1")],
                &[("state", "2")],
            ],
            "InitWait while the front end is Connected",
        ),
    ] {
        let seen = front_sees(scripts);
        let e = seen.last().unwrap().clone().expect_err(reason);
        assert!(e.contains(reason), "{e}");
    }
}
