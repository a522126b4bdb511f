//! A front end for a guest of Xen, in user space, that breaks rules: tests/vm/scripts/xen-hostile.sh runs it in a guest whose kernel has
//! no blkfront, against `pvblk serve --xen`.
//!
//!   hostile_front DEVICE CASE...
//!
//! DEVICE is a number, such as 51712 for xvda. Each case connects, does what its name says, sees what becomes of it, and leaves the
//! device so that the next one can connect; a last case `vanish` can't. A case that doesn't go as it must ends the program with 1.

use pvblk_export::xen::Xenstore;
use pvblk_protocol::blkif::FrontRing;
use pvblk_protocol::blkif::wire::{
    ENTRY_SIZE, OP_READ, OP_WRITE, RSP_ERROR, RSP_OKAY, RequestHeader, Response, Segment,
};
use pvblk_sys::xen::{EventPort, GrantAllocator, GrantedPage};
use pvblk_sys::{PAGE_SIZE, Region};
use std::error::Error;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Everything is emulated.
const PATIENCE: Duration = Duration::from_secs(60);
/// Of a ring's page (blkif.h).
const REQ_PROD: usize = 0;
/// A reference that nobody has: each table begins small, and gntalloc gives the lowest.
const NOBODYS: u32 = 60_000;

fn whole(gref: u32) -> Segment {
    Segment {
        gref,
        first_sect: 0,
        last_sect: 7,
        pad: 0,
    }
}

/// One device, and what a connection has.
struct Front {
    xenstore: Xenstore,
    allocator: GrantAllocator,
    directory: String,
    back: String,
    next_id: u64,
}

struct Connection {
    /// The page once more, to write nonsense to.
    raw: Region,
    ring: FrontRing,
    port: EventPort,
    _page: GrantedPage,
}

impl Front {
    fn open(device: &str) -> Result<Front> {
        let mut xenstore = Xenstore::connect()?;
        let directory = format!("device/vbd/{device}");
        let back = xenstore.read(&format!("{directory}/backend"))?;
        Ok(Front {
            back: back.ok_or("no such device")?,
            xenstore,
            allocator: GrantAllocator::open()?,
            directory,
            next_id: 1,
        })
    }

    fn put(&mut self, keys: &[(&str, String)]) -> Result<()> {
        let directory = &self.directory;
        Ok(self.xenstore.transaction(|t| {
            keys.iter()
                .try_for_each(|(key, value)| t.write(&format!("{directory}/{key}"), value))
        })?)
    }

    fn set_state(&mut self, state: &str) -> Result<()> {
        self.put(&[("state", state.into())])
    }

    fn back(&mut self, key: &str) -> Result<Option<String>> {
        Ok(self.xenstore.read(&format!("{}/{key}", self.back))?)
    }

    /// Waits until the back end's state is one of these.
    fn until_back(&mut self, states: &[&str]) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            let state = self.back("state")?;
            if state.as_deref().is_some_and(|s| states.contains(&s)) {
                return Ok(());
            }
            if Instant::now() >= end {
                return Err(format!("the back end's state is {state:?}, not of {states:?}").into());
            }
            sleep(Duration::from_millis(20));
        }
    }

    /// A ring with its keys, and a page for data; `change` may replace keys.
    fn offer(&mut self, persistent: bool, change: &[(&str, String)]) -> Result<Connection> {
        self.until_back(&["2"])?;
        let page = self.allocator.page(0, true)?;
        let (raw, ring) = (page.again()?, FrontRing::new(page.again()?));
        let port = EventPort::offer(0)?;
        let mut keys = vec![
            ("ring-ref", page.gref.to_string()),
            ("event-channel", port.number().to_string()),
            ("protocol", "x86_64-abi".into()),
            ("feature-persistent", u8::from(persistent).to_string()),
        ];
        keys.extend_from_slice(change);
        keys.push(("state", "3".into()));
        self.put(&keys)?;
        Ok(Connection {
            raw,
            ring: ring.ok_or("a page is a ring")?,
            port,
            _page: page,
        })
    }

    fn connect(&mut self, persistent: bool) -> Result<Connection> {
        let connection = self.offer(persistent, &[])?;
        self.until_back(&["4"])?;
        self.set_state("4")?;
        Ok(connection)
    }

    /// Ends the connection, and makes the device ready for the next.
    fn close(&mut self, connection: Connection) -> Result<()> {
        self.set_state("5")?;
        self.until_back(&["5", "6"])?;
        self.set_state("6")?;
        self.until_back(&["6"])?;
        drop(connection);
        self.set_state("1")?;
        self.until_back(&["2"])
    }

    /// The back end must end the connection, with this in its reason.
    fn refused(&mut self, connection: Connection, reason: &str) -> Result<()> {
        self.until_back(&["5", "6"])?;
        let why = self.back("error")?.unwrap_or_default();
        println!("  refused: {why}");
        match why.contains(reason) {
            true => self.close(connection),
            false => Err(format!("it doesn't say {reason:?}").into()),
        }
    }

    fn request(&mut self, c: &mut Connection, op: u8, segments: &[Segment]) -> u64 {
        self.next_id += 1;
        let header = RequestHeader {
            operation: op,
            nr_segments: segments.len() as u8,
            handle: 0,
            pad: 0,
            id: self.next_id,
            sector_number: 0,
        };
        c.ring.put_rw(&header, segments);
        self.next_id
    }

    /// One request, and its answer.
    fn ask(&mut self, c: &mut Connection, op: u8, segments: &[Segment]) -> Result<i16> {
        let id = self.request(c, op, segments);
        c.kick();
        let answer = c.answer()?;
        match answer.id == id {
            true => Ok(answer.status),
            false => Err(format!("an answer to {}, not to {id}", answer.id).into()),
        }
    }

    /// Reads back the data that was written.
    fn check(&mut self, c: &mut Connection) -> Result<()> {
        let data = self.allocator.page(0, true)?;
        let mark = [self.next_id as u8; PAGE_SIZE];
        data.page.write(0, &mark);
        let wrote = self.ask(c, OP_WRITE, &[whole(data.gref)])?;
        data.page.zero(0, PAGE_SIZE);
        let read = self.ask(c, OP_READ, &[whole(data.gref)])?;
        let mut found = [0; PAGE_SIZE];
        data.page.read(0, &mut found);
        match (wrote, read, found == mark) {
            (RSP_OKAY, RSP_OKAY, true) => Ok(()),
            other => Err(format!("write, read, data: {other:?}").into()),
        }
    }

    fn expect(&mut self, c: &mut Connection, segments: &[Segment], expected: i16) -> Result<()> {
        for op in [OP_READ, OP_WRITE] {
            let status = self.ask(c, op, segments)?;
            if status != expected {
                return Err(format!("operation {op}: status {status}, not {expected}").into());
            }
        }
        Ok(())
    }
}

impl Connection {
    fn kick(&mut self) {
        if self.ring.publish() {
            let _ = self.port.notify();
        }
    }

    fn answer(&mut self) -> Result<Response> {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(response) = self.ring.take()? {
                return Ok(response);
            }
            if Instant::now() >= end {
                return Err("no answer".into());
            }
            sleep(Duration::from_millis(1));
        }
    }
}

fn run(front: &mut Front, case: &str) -> Result<()> {
    match case {
        "good" => both(front, |_, _| Ok(())),
        "ring-ref" => {
            let c = front.offer(false, &[("ring-ref", NOBODYS.to_string())])?;
            front.refused(c, "ring-ref")
        }
        "event-channel" => {
            let c = front.offer(false, &[("event-channel", "1000".into())])?;
            front.refused(c, "event-channel")
        }
        "grants" => both(front, |front, c| {
            let good = front.allocator.page(0, true)?;
            // The first two are for console and xenstore, and granted indeed.
            for bad in [NOBODYS, 7, u32::MAX] {
                front.expect(c, &[whole(bad)], RSP_ERROR)?;
                front.expect(c, &[whole(good.gref), whole(bad)], RSP_ERROR)?;
            }
            let constant = front.allocator.page(0, false)?;
            match front.ask(c, OP_READ, &[whole(constant.gref)])? {
                RSP_ERROR => Ok(()),
                other => Err(format!("a read into a read-only page: {other}").into()),
            }
        }),
        "segments" => both(front, |front, c| {
            let good = front.allocator.page(0, true)?;
            for (first_sect, last_sect) in [(0, 8), (7, 6), (255, 255), (8, 8)] {
                let segment = Segment {
                    first_sect,
                    last_sect,
                    ..whole(good.gref)
                };
                front.expect(c, &[segment], RSP_ERROR)?;
            }
            Ok(())
        }),
        "index" => {
            for index in [33, 1000, 1 << 31] {
                let c = front.connect(false)?;
                c.raw.atomic_u32(REQ_PROD).store(index, Ordering::Release);
                c.port.notify()?;
                front.refused(c, "the disk is stopped")?;
            }
            Ok(())
        }
        "revoked" => both(front, |front, c| {
            let (mut fine, mut failed) = (0, 0);
            for _ in 0..20 {
                let pages: Vec<_> = (0..8)
                    .map(|_| front.allocator.page(0, true))
                    .collect::<std::io::Result<_>>()?;
                for page in &pages {
                    front.request(c, OP_READ, &[whole(page.gref)]);
                }
                c.kick();
                drop(pages);
                for _ in 0..8 {
                    match c.answer()?.status {
                        RSP_OKAY => fine += 1,
                        _ => failed += 1,
                    }
                }
            }
            println!(
                "  of requests whose pages went at once {fine} were served and {failed} failed"
            );
            Ok(())
        }),
        "garbage" => both(front, |front, c| {
            let seed = front.next_id ^ u64::from(std::process::id());
            println!("  seed {seed}");
            let mut random = seed | 1;
            for _ in 0..200 {
                for _ in 0..32 {
                    let mut entry = [0; ENTRY_SIZE];
                    for byte in &mut entry {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        *byte = random as u8;
                    }
                    // Nonsense about what exists reaches further than an unknown operation.
                    entry[0] %= 8;
                    c.ring.put(&entry);
                }
                c.kick();
                for _ in 0..32 {
                    c.answer()?;
                }
            }
            Ok(())
        }),
        "storm" => both(front, |_, c| {
            let end = Instant::now() + Duration::from_secs(5);
            let mut rings = 0;
            while Instant::now() < end {
                c.port.notify()?;
                rings += 1;
            }
            println!("  rang {rings} times");
            Ok(())
        }),
        "states" => {
            for state in ["2", "7", "9", "", "connected", "-4"] {
                let c = front.connect(false)?;
                front.set_state(state)?;
                front.refused(c, "state ")?;
            }
            Ok(())
        }
        "vanish" => {
            let mut c = front.connect(true)?;
            let data = front.allocator.page(0, true)?;
            for _ in 0..8 {
                front.request(&mut c, OP_READ, &[whole(data.gref)]);
            }
            c.kick();
            let directory = front.directory.clone();
            front.xenstore.transaction(|t| t.remove(&directory))?;
            front.until_back(&["5", "6"])
        }
        _ => Err("no such case".into()),
    }
}

/// With copied and with persistent grants; the disk has to work before and after.
fn both(front: &mut Front, case: impl Fn(&mut Front, &mut Connection) -> Result<()>) -> Result<()> {
    for persistent in [false, true] {
        let mut c = front.connect(persistent)?;
        front.check(&mut c)?;
        case(front, &mut c)?;
        front.check(&mut c)?;
        front.close(c)?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let device = arguments.next().ok_or("which device?")?;
    let mut front = Front::open(&device)?;
    for case in arguments {
        println!("case {case}");
        run(&mut front, &case).map_err(|e| format!("case {case}: {e}"))?;
        println!("case {case} went as it must");
    }
    Ok(())
}
