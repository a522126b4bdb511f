//! Target `store`: what a local peer says in the handshake: messages, keys, and the back end's way through its states.

use arbitrary::{Result, Unstructured};
use pvblk_block::Error;
use pvblk_export::xenbus::{BackendNegotiation, Connector};
use pvblk_protocol::blkif::RingSize;
use pvblk_protocol::local::{Frame, MAX_FRAME};
use pvblk_protocol::xenbus::DiskProperties;
use pvblk_protocol::xenbus::{
    BackendOffers, Change, FrontKeys, KeyMap, MAX_BYTES, MAX_KEYS, Store, XenbusState, check_key,
    parse_front_keys, parse_offers, parse_properties,
};
use std::collections::BTreeSet;

pub fn store(data: &[u8]) {
    // Once as bytes on the wire, once as choices.
    frame(data);
    let _ = negotiate(&mut Unstructured::new(data));
}

fn frame(data: &[u8]) {
    let Ok(frame) = Frame::decode(data) else {
        return;
    };
    assert!(data.len() <= MAX_FRAME);
    assert_eq!(
        frame.encode().as_deref(),
        Some(data),
        "it reads more than one spelling"
    );
    if let Frame::Write(changes) = frame {
        let mut map = KeyMap::new();
        let result = map.apply(changes.clone());
        check_map(&map);
        let good = changes.iter().all(|c| check_key(&c.key).is_ok());
        assert!(good || result.is_err(), "a bad key is taken");
    }
}

fn check_map(map: &KeyMap) {
    assert!(map.len() <= MAX_KEYS && map.bytes() <= MAX_BYTES);
}

#[derive(Default)]
struct Two {
    peer: KeyMap,
    ours: KeyMap,
}

impl Store for Two {
    fn read(&self, key: &str) -> Option<String> {
        self.peer.get(key).map(str::to_owned)
    }
    fn write(&mut self, changes: &[Change]) -> std::result::Result<(), Error> {
        self.ours.apply(changes.to_vec())
    }
}

/// The memory behind a connection, and its answers.
struct Rings {
    offers: BackendOffers,
    connected: bool,
    draining: bool,
    refuses: bool,
    slow: bool,
}

impl Connector for Rings {
    fn connect(&mut self, front: &FrontKeys) -> std::result::Result<DiskProperties, Error> {
        assert!(!self.connected && !self.draining, "connected twice");
        check_keys(front, &self.offers);
        if self.refuses {
            return Err(Error::protocol("no"));
        }
        self.connected = true;
        Ok(DiskProperties {
            sectors: 1000,
            sector_size: 512,
            physical_sector_size: 4096,
            read_only: false,
            flush: true,
            barrier: true,
            discard: true,
            discard_secure: false,
            discard_granularity: 512,
            persistent: true,
            max_indirect_segments: 32,
            cache_mark: None,
            contents_mark: None,
        })
    }

    fn disconnect(&mut self) -> bool {
        if self.connected {
            self.connected = false;
            self.draining = self.slow;
        }
        !self.draining
    }
}

/// Whatever the keys were, what comes out of them is within the offers.
fn check_keys(front: &FrontKeys, offers: &BackendOffers) {
    let queues = front.queues.len() as u32;
    assert!(queues >= 1 && queues <= offers.queue_limit());
    assert!(front.ring <= offers.ring_limit());
    let (mut refs, mut ports) = (BTreeSet::new(), BTreeSet::new());
    for q in &front.queues {
        assert_eq!(q.ring_refs.len(), front.ring.pages());
        assert!(
            q.ring_refs.iter().all(|r| refs.insert(*r)),
            "a page is used twice"
        );
        assert!(q.event_channel != 0 && ports.insert(q.event_channel));
    }
}

fn change(u: &mut Unstructured<'_>) -> Result<Change> {
    let names = [
        "state",
        "protocol",
        "ring-ref",
        "ring-ref0",
        "ring-ref1",
        "event-channel",
        "ring-page-order",
        "num-ring-pages",
        "multi-queue-num-queues",
        "feature-persistent",
        "queue-0/ring-ref",
        "queue-0/ring-ref0",
        "queue-0/ring-ref1",
        "queue-0/event-channel",
        "queue-1/ring-ref",
        "queue-1/ring-ref0",
        "queue-1/ring-ref1",
        "queue-1/event-channel",
        "sectors",
        "sector-size",
        "max-ring-page-order",
    ];
    let key = if u.ratio(1, 30)? {
        u.arbitrary::<&str>()?
    } else {
        u.choose(&names)?
    };
    let values = [
        "0",
        "1",
        "2",
        "3",
        "4",
        "5",
        "6",
        "8",
        "16",
        "512",
        "x86_64-abi",
    ];
    let value = match u.int_in_range(0..=15)? {
        0 => u.arbitrary::<&str>()?.to_owned(),
        1 => u.arbitrary::<u64>()?.to_string(),
        2 => return Ok(Change::remove(key)),
        3..=6 => u.int_in_range(8..=40u32)?.to_string(),
        _ => (*u.choose(&values)?).to_owned(),
    };
    Ok(Change::set(key, value))
}

/// A front end that has done everything right so far.
fn good_front(u: &mut Unstructured<'_>) -> Result<Vec<Change>> {
    let mut changes = vec![
        Change::set("protocol", "x86_64-abi"),
        Change::set("ring-ref", 8),
        Change::set("event-channel", 3),
    ];
    if u.arbitrary()? {
        changes.push(Change::set("multi-queue-num-queues", 2));
        for i in 0..2 {
            changes.push(Change::set(format!("queue-{i}/ring-ref"), 20 + i));
            changes.push(Change::set(format!("queue-{i}/event-channel"), 1 + i));
        }
    }
    changes.push(Change::set("state", *u.choose(&[1, 3, 4])?));
    Ok(changes)
}

fn negotiate(u: &mut Unstructured<'_>) -> Result<()> {
    let offers = if u.ratio(1, 8)? {
        BackendOffers::oldest()
    } else {
        BackendOffers {
            max_queues: *u.choose(&[None, Some(1), Some(2), Some(64)])?,
            max_ring: RingSize::from_order(u.int_in_range(0..=5)?),
            max_indirect_segments: *u.choose(&[None, Some(32), Some(256)])?,
            persistent: u.arbitrary()?,
            barrier: u.arbitrary()?,
        }
    };
    let mut two = Two::default();
    let mut rings = Rings {
        offers,
        connected: false,
        draining: false,
        refuses: u.ratio(1, 8)?,
        slow: u.arbitrary()?,
    };
    let mut back = BackendNegotiation::new(offers, u.arbitrary()?);
    // The store here has no errors of its own: our directory is small.
    let fine = |r: std::result::Result<(), Error>| r.expect("the store takes everything");
    if u.ratio(15, 16)? {
        fine(back.start(&mut two));
    }
    for _ in 0..200 {
        match u.int_in_range(0..=11)? {
            0..=5 => {
                let changes = (0..u.int_in_range(1..=4)?)
                    .map(|_| change(u))
                    .collect::<Result<Vec<_>>>()?;
                let all_good = two.peer.apply(changes).is_ok();
                check_map(&two.peer);
                if !all_good {
                    // Its owner ends the connection.
                    fine(back.break_off(&mut two, &mut rings, "bad keys"));
                }
                fine(back.peer_changed(&mut two, &mut rings));
            }
            6 | 7 => {
                let changes = good_front(u)?;
                if two.peer.apply(changes).is_ok() {
                    fine(back.peer_changed(&mut two, &mut rings));
                }
            }
            8 if rings.draining => {
                rings.draining = false;
                fine(back.drained(&mut two, &mut rings));
            }
            9 => fine(back.resize(&mut two, u.arbitrary()?)),
            10 => fine(back.close(&mut two, &mut rings)),
            11 => back.set_online(u.arbitrary()?),
            _ => {}
        }
        check_state(&back, &two, &rings);
        let read = |key: &str| two.read(key);
        if let Ok(keys) = parse_front_keys(&read, &offers) {
            check_keys(&keys, &offers);
        }
        let _ = parse_offers(&read);
        if let Ok(p) = parse_properties(&read) {
            assert!(p.sector_size >= 512 && p.sector_size.is_power_of_two());
        }
    }
    Ok(())
}

fn check_state(back: &BackendNegotiation, two: &Two, rings: &Rings) {
    let state = back.state();
    if state != XenbusState::Initialising {
        let published = two.ours.get("state").and_then(XenbusState::parse);
        assert_eq!(published, Some(state), "the state isn't what was published");
    }
    match state {
        XenbusState::Connected => assert!(rings.connected && !rings.draining),
        XenbusState::Closing => {}
        _ => assert!(
            !rings.connected && !rings.draining,
            "queues live in state {state}"
        ),
    }
}
