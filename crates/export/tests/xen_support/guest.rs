//! A guest with a front end like Linux's blkfront, which can also break rules.

use super::daemon::Daemon;
use super::hypervisor::{FakeXen, Memory, Port, wait_on};
use pvblk_export::xen::node::Node;
use pvblk_protocol::blkif::wire::{
    DiscardRequest, IndirectRequest, OP_DISCARD, OP_FLUSH, OP_INDIRECT, OP_READ, OP_WRITE,
    RequestHeader, Response, SEGMENTS_PER_INDIRECT_PAGE, Segment,
};
use pvblk_protocol::blkif::{FrontRing, RingSize};
use pvblk_sys::PAGE_SIZE;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;

/// Frames of one guest's memory; most of them are never accessed.
const FRAMES: usize = 4096;

/// Keys that one connection may write and the next may not.
const STALE: [&str; 9] = [
    "event-channel",
    "ring-page-order",
    "num-ring-pages",
    "multi-queue-num-queues",
    "ring-ref",
    "ring-ref0",
    "ring-ref1",
    "queue-0",
    "queue-1",
];

/// Wishes of a front end.
#[derive(Clone, Copy)]
pub struct Wishes {
    pub queues: usize,
    pub order: u32,
    pub persistent: bool,
}

pub const SMALL: Wishes = Wishes {
    queues: 1,
    order: 0,
    persistent: false,
};

/// A segment of a whole page.
pub fn whole(gref: u32) -> Segment {
    Segment {
        gref,
        first_sect: 0,
        last_sect: 7,
        pad: 0,
    }
}

pub struct FrontQueue {
    pub ring: FrontRing,
    pub port: Arc<Port>,
    pub port_number: u32,
    pub frames: Vec<u32>,
    pub refs: Vec<u32>,
}

/// One granted page of data.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    pub frame: u32,
    pub gref: u32,
}

pub struct Guest {
    pub node: Node,
    pub daemon: Arc<Daemon>,
    pub xen: Arc<FakeXen>,
    pub memory: Arc<Memory>,
    pub queues: Vec<FrontQueue>,
    pub wishes: Wishes,
    next_frame: u32,
    next_ref: u32,
    next_port: u32,
    next_id: u64,
    idle: Vec<Page>,
    answers: HashMap<u64, Response>,
}

impl Guest {
    /// A running domain without attached disks.
    pub fn new(daemon: &Arc<Daemon>, xen: &Arc<FakeXen>, domid: u16) -> Guest {
        Guest::named(daemon, xen, domid, &format!("guest{domid}"))
    }

    /// A domain with this name. No event reports it yet.
    pub fn named(daemon: &Arc<Daemon>, xen: &Arc<FakeXen>, domid: u16, name: &str) -> Guest {
        daemon.write(&format!("/local/domain/{domid}/name"), name);
        Guest {
            node: Node {
                domid,
                devid: 51712,
            },
            daemon: Arc::clone(daemon),
            xen: Arc::clone(xen),
            memory: xen.create(domid, FRAMES),
            queues: Vec::new(),
            wishes: SMALL,
            next_frame: 1,
            next_ref: 8,
            next_port: 1,
            next_id: 100,
            idle: Vec::new(),
            answers: HashMap::new(),
        }
    }

    pub fn front(&self, key: &str) -> String {
        format!("{}/{key}", self.node.front_end())
    }

    pub fn back(&self, key: &str) -> String {
        format!("{}/{key}", self.node.back_end(0))
    }

    pub fn until_back(&self, state: &str) {
        self.daemon.until_is(&self.back("state"), state);
    }

    pub fn set_state(&self, state: &str) {
        self.daemon.write(&self.front("state"), state);
    }

    pub fn frame(&mut self) -> u32 {
        self.next_frame += 1;
        assert!((self.next_frame as usize) < FRAMES);
        self.next_frame
    }

    pub fn grant(&mut self, frame: u32, read_only: bool) -> u32 {
        self.next_ref += 1;
        self.memory.grant(self.next_ref, frame, read_only);
        self.next_ref
    }

    /// Grants a fresh page.
    pub fn page(&mut self, read_only: bool) -> Page {
        let frame = self.frame();
        let gref = self.grant(frame, read_only);
        Page { frame, gref }
    }

    /// Makes and grants rings and returns their keys, without `state`, as blkfront writes them (`talk_to_blkback`).
    pub fn keys(&mut self, wishes: Wishes) -> Vec<(String, String)> {
        self.let_go();
        self.wishes = wishes;
        // Their grants belong to the earlier connection.
        self.idle.clear();
        let Wishes {
            queues,
            order,
            persistent,
        } = wishes;
        let mut keys = vec![("protocol".to_owned(), "x86_64-abi".to_owned())];
        let mut put = |key: String, value: u32| keys.push((key, value.to_string()));
        put("feature-persistent".into(), u32::from(persistent));
        if order > 0 {
            put("ring-page-order".into(), order);
        }
        if queues > 1 {
            put("multi-queue-num-queues".into(), queues as u32);
        }
        let pages = RingSize::from_order(order).unwrap().pages();
        for index in 0..queues {
            let directory = if queues > 1 {
                format!("queue-{index}/")
            } else {
                String::new()
            };
            let mut frames: Vec<u32> = (0..pages).map(|_| self.frame()).collect();
            // The pages of a ring need not be neighbours.
            frames.reverse();
            let refs: Vec<u32> = frames.iter().map(|&f| self.grant(f, false)).collect();
            for (page, gref) in refs.iter().enumerate() {
                let name = if order > 0 {
                    format!("ring-ref{page}")
                } else {
                    "ring-ref".into()
                };
                put(format!("{directory}{name}"), *gref);
            }
            self.next_port += 1;
            let port = self.xen.offer(self.node.domid, self.next_port);
            put(format!("{directory}event-channel"), self.next_port);
            self.queues.push(FrontQueue {
                ring: FrontRing::new(self.memory.frames(&frames)).unwrap(),
                port,
                port_number: self.next_port,
                frames,
                refs,
            });
        }
        keys
    }

    /// Writes the keys, and the state last.
    pub fn publish(&self, keys: &[(String, String)], state: &str) {
        self.daemon.edit(|tree| {
            // Keys of an earlier connection must not be used for this one.
            for key in STALE {
                tree.remove(&self.front(key));
            }
            keys.iter().for_each(|(k, v)| tree.write(&self.front(k), v));
            tree.write(&self.front("state"), state);
        });
    }

    /// Does the whole handshake.
    pub fn connect(&mut self, wishes: Wishes) {
        self.until_back("2");
        let keys = self.keys(wishes);
        self.publish(&keys, "3");
        self.until_back("4");
        self.set_state("4");
    }

    /// Disconnects in order.
    pub fn close(&mut self) {
        self.set_state("5");
        self.until_back("5");
        self.set_state("6");
        self.until_back("6");
        self.let_go();
    }

    /// Takes the rings back.
    pub fn let_go(&mut self) {
        for queue in std::mem::take(&mut self.queues) {
            let pages = queue.refs.len();
            queue.refs.iter().for_each(|&r| self.memory.revoke(r));
            drop(queue);
            self.memory.own_pages.fetch_sub(pages, Ordering::AcqRel);
        }
        self.answers.clear();
    }

    /// Destroys the domain, and its part of xenstore.
    pub fn destroy(&self) {
        self.xen.destroy(self.node.domid);
        self.daemon
            .remove(&format!("/local/domain/{}", self.node.domid));
        self.daemon.fire("@releaseDomain");
    }

    pub fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Puts a read, write or flush; not visible yet.
    pub fn put(&mut self, queue: usize, operation: u8, sector: u64, segments: &[Segment]) -> u64 {
        let id = self.id();
        let header = RequestHeader {
            operation,
            nr_segments: segments.len() as u8,
            id,
            sector_number: sector,
            ..RequestHeader::default()
        };
        self.queues[queue].ring.put_rw(&header, segments);
        id
    }

    /// Puts a request whose segments are on a page of their own, which is returned.
    pub fn put_indirect(
        &mut self,
        queue: usize,
        op: u8,
        sector: u64,
        segments: &[Segment],
    ) -> (u64, Page) {
        assert!(segments.len() <= SEGMENTS_PER_INDIRECT_PAGE);
        let (id, page) = (self.id(), self.take_page(false));
        self.memory
            .all
            .write(page.frame as usize * PAGE_SIZE, segments.as_bytes());
        let mut grefs = [0; 8];
        grefs[0] = page.gref;
        let request = IndirectRequest {
            operation: OP_INDIRECT,
            indirect_op: op,
            nr_segments: segments.len() as u16,
            pad: 0,
            id,
            sector_number: sector,
            handle: 0,
            pad2: 0,
            indirect_grefs: grefs,
            pad3: 0,
        };
        self.queues[queue].ring.put(&request);
        (id, page)
    }

    pub fn put_discard(&mut self, queue: usize, sector: u64, sectors: u64) -> u64 {
        let id = self.id();
        self.queues[queue].ring.put(&DiscardRequest {
            operation: OP_DISCARD,
            flag: 0,
            handle: 0,
            pad: 0,
            id,
            sector_number: sector,
            nr_sectors: sectors,
        });
        id
    }

    /// Makes requests visible, and notifies if the back end wants that.
    pub fn kick(&mut self, queue: usize) {
        let queue = &mut self.queues[queue];
        if queue.ring.publish() {
            queue.port.ring();
        }
    }

    /// Waits for the response to a request, asleep as a guest is.
    pub fn answer(&mut self, queue: usize, id: u64) -> Response {
        let FrontQueue { ring, port, .. } = &mut self.queues[queue];
        let answers = &mut self.answers;
        wait_on(port, || {
            loop {
                if let Some(found) = answers.remove(&id) {
                    return Some(found);
                }
                match ring.take().unwrap() {
                    Some(response) => drop(answers.insert(response.id, response)),
                    None if ring.arm() => {}
                    None => return None,
                }
            }
        })
    }

    pub fn status(&mut self, queue: usize, id: u64) -> i16 {
        self.answer(queue, id).status
    }

    /// Takes a page for data: a persistent one again and again, or one with a grant for this request only.
    pub fn take_page(&mut self, read_only: bool) -> Page {
        match self.idle.pop() {
            Some(page) if self.wishes.persistent => page,
            Some(Page { frame, .. }) => {
                let gref = self.grant(frame, read_only);
                Page { frame, gref }
            }
            None => self.page(read_only && !self.wishes.persistent),
        }
    }

    pub fn give_page(&mut self, page: Page) {
        if !self.wishes.persistent {
            self.memory.revoke(page.gref);
        }
        self.idle.push(page);
    }

    /// Takes pages for this many sectors from `first` of the first page on, and returns their segments.
    pub fn pages(
        &mut self,
        first: u8,
        sectors: usize,
        read_only: bool,
    ) -> (Vec<Page>, Vec<Segment>) {
        let (mut pages, mut segments) = (Vec::new(), Vec::new());
        let (mut at, end) = (usize::from(first), usize::from(first) + sectors);
        while at < end {
            let page = self.take_page(read_only);
            let last = (end - at / 8 * 8).min(8) - 1;
            segments.push(Segment {
                gref: page.gref,
                first_sect: (at % 8) as u8,
                last_sect: last as u8,
                pad: 0,
            });
            pages.push(page);
            at = at / 8 * 8 + 8;
        }
        (pages, segments)
    }

    pub fn load(&self, pages: &[Page], first: u8, data: &[u8]) {
        let mut at = usize::from(first) * 512;
        let mut left = data;
        for page in pages {
            let (now, rest) = left.split_at(left.len().min(PAGE_SIZE - at));
            self.memory
                .all
                .write(page.frame as usize * PAGE_SIZE + at, now);
            (left, at) = (rest, 0);
        }
    }

    pub fn store(&self, pages: &[Page], first: u8, len: usize) -> Vec<u8> {
        let mut all = vec![0; len];
        let mut at = usize::from(first) * 512;
        let mut left = &mut all[..];
        for page in pages {
            let n = left.len().min(PAGE_SIZE - at);
            let (now, rest) = left.split_at_mut(n);
            self.memory
                .all
                .read(page.frame as usize * PAGE_SIZE + at, now);
            (left, at) = (rest, 0);
        }
        all
    }

    /// Puts a read or write, direct or indirect depending on its size.
    pub fn put_any(&mut self, queue: usize, op: u8, sector: u64, segments: &[Segment]) -> u64 {
        if segments.len() <= 11 {
            return self.put(queue, op, sector, segments);
        }
        // Its page of segments stays granted: few tests have many of them.
        self.put_indirect(queue, op, sector, segments).0
    }

    pub fn try_write(&mut self, queue: usize, sector: u64, first: u8, data: &[u8]) -> i16 {
        let (pages, segments) = self.pages(first, data.len() / 512, true);
        self.load(&pages, first, data);
        let id = self.put_any(queue, OP_WRITE, sector, &segments);
        self.kick(queue);
        let status = self.status(queue, id);
        pages.into_iter().for_each(|p| self.give_page(p));
        status
    }

    pub fn write(&mut self, queue: usize, sector: u64, first: u8, data: &[u8]) {
        assert_eq!(self.try_write(queue, sector, first, data), 0);
    }

    pub fn read(&mut self, queue: usize, sector: u64, first: u8, len: usize) -> Vec<u8> {
        let (pages, segments) = self.pages(first, len / 512, false);
        // Bytes that the back end doesn't write are noticed.
        self.load(&pages, first, &vec![0xee; len]);
        let id = self.put_any(queue, OP_READ, sector, &segments);
        self.kick(queue);
        assert_eq!(self.status(queue, id), 0);
        let data = self.store(&pages, first, len);
        pages.into_iter().for_each(|p| self.give_page(p));
        data
    }

    pub fn flush(&mut self, queue: usize) -> i16 {
        let id = self.put(queue, OP_FLUSH, 0, &[]);
        self.kick(queue);
        self.status(queue, id)
    }

    /// Writes data that is different each time, and reads it back.
    pub fn check(&mut self) {
        let mark = self.id();
        let data: Vec<u8> = (0..4096 / 8)
            .flat_map(|i| (mark * 1000 + i).to_le_bytes())
            .collect();
        for queue in 0..self.queues.len() {
            self.write(queue, 8 * queue as u64, 0, &data);
            assert_eq!(self.read(queue, 8 * queue as u64, 0, data.len()), data);
        }
    }

    /// Writes a 32-bit number to the start of a ring, where the guest may write any value.
    pub fn set_index(&self, queue: usize, offset: usize, value: u32) {
        let frame = self.queues[queue].frames[0] as usize;
        let index = self.memory.all.atomic_u32(frame * PAGE_SIZE + offset);
        index.store(value, Ordering::Release);
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.let_go();
    }
}
