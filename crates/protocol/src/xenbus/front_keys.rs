//! Keys that a front end publishes: reading and writing them.

use super::number::{flag, optional_u32, parse_u32, quote};
use super::offers::one_page;
use super::{BackendOffers, Change};
use crate::blkif::{Abi, RingSize};
use pvblk_block::Error;
use std::collections::BTreeSet;

/// Keys of one queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueKeys {
    /// Grant reference of each page of the ring, in order: as many as the ring has pages.
    pub ring_refs: Vec<u32>,
    /// Event channel port, not 0.
    pub event_channel: u32,
}

/// A front end's checked keys. Grant references and ports are unique, but not known to exist yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontKeys {
    /// 1 to 64 queues, all with rings of one size.
    pub queues: Vec<QueueKeys>,
    /// Size of every ring.
    pub ring: RingSize,
    /// Layout of the entries of every ring.
    pub abi: Abi,
    /// The front end uses persistent grants (`feature-persistent`).
    pub persistent: bool,
}

type Read<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Reads a front end's keys and checks them against the offers (blkif.h, "Frontend XenBus Nodes").
///
/// Does no I/O of its own: `read` returns a key's value. Errors name the queue and the key.
pub fn parse_front_keys(read: Read<'_>, offers: &BackendOffers) -> Result<FrontKeys, Error> {
    let abi = match read("protocol") {
        // Without the key, the header says: the back end's native layout.
        None => Abi::default(),
        Some(name) => *[Abi::X86_64, Abi::X86_32]
            .iter()
            .find(|abi| abi.name() == name)
            .ok_or_else(|| {
                Error::protocol(format!(
                    "protocol is {}, not x86_64-abi or x86_32-abi",
                    quote(&name)
                ))
            })?,
    };
    let count = queue_count(read, offers)?;
    let (ring, numbered) = ring_size(read, offers)?;
    let mut queues = Vec::with_capacity(count as usize);
    let (mut refs, mut ports) = (BTreeSet::new(), BTreeSet::new());
    for index in 0..count {
        let dir = QueueDirectory {
            read,
            index: (count > 1).then_some(index),
        };
        let queue = dir.queue(ring, numbered)?;
        for &r in &queue.ring_refs {
            if !refs.insert(r) {
                return Err(dir.error(format!("grant reference {r} is used by two ring pages")));
            }
        }
        if !ports.insert(queue.event_channel) {
            return Err(dir.error(format!(
                "event-channel {} belongs to another queue",
                queue.event_channel
            )));
        }
        queues.push(queue);
    }
    Ok(FrontKeys {
        queues,
        ring,
        abi,
        persistent: flag(read, "feature-persistent")?,
    })
}

fn queue_count(read: Read<'_>, offers: &BackendOffers) -> Result<u32, Error> {
    if offers.max_queues.is_none() {
        return Ok(1);
    }
    let n = optional_u32(read, "multi-queue-num-queues")?.unwrap_or(1);
    if n == 0 || n > offers.queue_limit() {
        return Err(Error::protocol(format!(
            "multi-queue-num-queues is {n}, 1 to {} were offered",
            offers.queue_limit()
        )));
    }
    Ok(n)
}

/// The rings' size, and true if their keys are numbered.
fn ring_size(read: Read<'_>, offers: &BackendOffers) -> Result<(RingSize, bool), Error> {
    if offers.max_ring.is_none() {
        return Ok((one_page(), false));
    }
    let limit = offers.ring_limit();
    let size = if let Some(order) = optional_u32(read, "ring-page-order")? {
        RingSize::from_order(order)
            .filter(|&s| s <= limit)
            .ok_or_else(|| {
                Error::protocol(format!(
                    "ring-page-order is {order}, 0 to {} were offered",
                    limit.order()
                ))
            })?
    } else if let Some(pages) = optional_u32(read, "num-ring-pages")? {
        RingSize::from_pages(pages as usize)
            .filter(|&s| s <= limit)
            .ok_or_else(|| {
                Error::protocol(format!(
                    "num-ring-pages is {pages}, not a power of two up to {}",
                    limit.pages()
                ))
            })?
    } else {
        one_page()
    };
    Ok((size, size.order() > 0))
}

/// The directory of one queue's keys: the top if there is only one queue.
struct QueueDirectory<'a> {
    read: Read<'a>,
    index: Option<u32>,
}

impl QueueDirectory<'_> {
    fn error(&self, why: String) -> Error {
        Error::protocol(match self.index {
            Some(i) => format!("queue {i}: {why}"),
            None => why,
        })
    }

    fn number(&self, key: &str) -> Result<u32, Error> {
        self.optional(key)?
            .ok_or_else(|| self.error(format!("{key} is missing")))
    }

    fn optional(&self, key: &str) -> Result<Option<u32>, Error> {
        let value = match self.index {
            Some(i) => (self.read)(&format!("queue-{i}/{key}")),
            None => (self.read)(key),
        };
        let Some(value) = value else { return Ok(None) };
        match parse_u32(key, &value) {
            Ok(n) => Ok(Some(n)),
            Err(e) => Err(match self.index {
                Some(i) => e.context(format!("queue {i}")),
                None => e,
            }),
        }
    }

    fn queue(&self, ring: RingSize, numbered: bool) -> Result<QueueKeys, Error> {
        let ring_refs = if numbered {
            (0..ring.pages())
                .map(|i| self.number(&format!("ring-ref{i}")))
                .collect::<Result<_, _>>()?
        } else {
            // A front end that writes `ring-page-order` 0 may number its only page.
            let one = match self.optional("ring-ref")? {
                Some(r) => r,
                None => match self.optional("ring-ref0")? {
                    Some(r) => r,
                    None => return Err(self.error("ring-ref is missing".into())),
                },
            };
            vec![one]
        };
        let event_channel = self.number("event-channel")?;
        if event_channel == 0 {
            return Err(self.error("event-channel is 0, which is no port".into()));
        }
        Ok(QueueKeys {
            ring_refs,
            event_channel,
        })
    }
}

/// The name of a front end's key for its ring's size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RingSizeKey {
    #[default]
    Order,
    DeprecatedPages,
}

impl FrontKeys {
    /// The keys to publish, without `state`, as Linux writes them: at the top for one queue, `ring-ref` for one page.
    pub fn changes(&self, size_key: RingSizeKey) -> Vec<Change> {
        let mut keys = vec![
            Change::set("protocol", self.abi.name()),
            Change::flag("feature-persistent", self.persistent),
        ];
        if self.ring.order() > 0 {
            keys.push(match size_key {
                RingSizeKey::Order => Change::set("ring-page-order", self.ring.order()),
                RingSizeKey::DeprecatedPages => Change::set("num-ring-pages", self.ring.pages()),
            });
        }
        if self.queues.len() > 1 {
            keys.push(Change::set("multi-queue-num-queues", self.queues.len()));
        }
        for (i, queue) in self.queues.iter().enumerate() {
            let dir = if self.queues.len() > 1 {
                format!("queue-{i}/")
            } else {
                String::new()
            };
            for (page, r) in queue.ring_refs.iter().enumerate() {
                let name = if self.ring.order() > 0 {
                    format!("{dir}ring-ref{page}")
                } else {
                    format!("{dir}ring-ref")
                };
                keys.push(Change::set(name, r));
            }
            keys.push(Change::set(
                format!("{dir}event-channel"),
                queue.event_channel,
            ));
        }
        keys
    }
}

#[cfg(test)]
#[path = "front_keys_tests.rs"]
mod tests;
