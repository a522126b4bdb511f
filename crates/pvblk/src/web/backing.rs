//! [`Backing`]: the control methods behind the API, in this process or over a control socket.

use super::metrics::Snapshot;
use crate::control::rpc::{NO_METHOD, RpcError};
use crate::control::{ASK_PATIENCE, Client, Methods};
use crate::events::{self, EventsQuery};
use crate::hops::{self, HopsQuery, Reader};
use parking_lot::{Condvar, Mutex};
use pvblk_trace::live::HopsReport;
use pvblk_web::Events;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::io::{self, BufRead, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Work that sends the lines of a stream to a reader.
pub type Streamed = Box<dyn FnOnce(&mut Events<'_>) -> io::Result<()> + Send>;

/// Period in which a stream looks whether its reader is still there.
const LOOK: Duration = Duration::from_millis(250);
/// Longest line of a stream in bytes.
const LONGEST_LINE: usize = 16 << 20;

/// The control methods of a server. Every call may wait.
pub trait Backing: Send + Sync {
    /// Calls a method that has one result.
    fn call(&self, method: &str, params: Value) -> Result<Value, RpcError>;

    /// Begins a stream.
    fn stream(&self, method: &str, params: Value) -> Result<Streamed, RpcError>;

    /// Follows one request in `every` through its hops, until `take` returns false. `take` gets the figures of each second, and is asked with nothing in between.
    fn follow(
        &self,
        every: u32,
        take: &mut dyn FnMut(Option<HopsReport>) -> bool,
    ) -> Result<(), RpcError>;

    /// The figures of this moment, or one line that says why there are none.
    fn snapshot(&self) -> Result<Snapshot, String>;

    /// An error says in one line why the server isn't there.
    fn is_there(&self) -> Result<(), String>;
}

/// The methods of this process.
pub struct Inside {
    methods: Methods,
}

impl Inside {
    pub fn new(methods: Methods) -> Inside {
        Inside { methods }
    }
}

impl Backing for Inside {
    fn call(&self, method: &str, params: Value) -> Result<Value, RpcError> {
        self.methods.call(method, params)
    }

    fn stream(&self, method: &str, params: Value) -> Result<Streamed, RpcError> {
        match method {
            "events" => {
                let query = EventsQuery::parse(params);
                let query = query.map_err(|e| {
                    RpcError::new(crate::control::rpc::INVALID_PARAMS, e.to_string())
                })?;
                let log = Arc::clone(self.methods.reached().service.events());
                Ok(Box::new(move |reader| {
                    let reader = RefCell::new(reader);
                    let is_over = || reader.borrow_mut().is_over();
                    events::answer(&log, &query, is_over, |event| {
                        reader.borrow_mut().send(event)
                    })
                }))
            }
            "hops" => {
                let query = self.methods.hops_query(params)?;
                let feed = Arc::clone(&self.methods.reached().feed);
                Ok(Box::new(move |reader| {
                    let reader = RefCell::new(reader);
                    let state = || {
                        let mut reader = reader.borrow_mut();
                        Ok(match (reader.is_over()?, reader.is_taken()?) {
                            (true, _) => Reader::IsGone,
                            (false, true) => Reader::Takes,
                            (false, false) => Reader::IsSlow,
                        })
                    };
                    hops::answer(&feed, &query, state, |object| {
                        reader.borrow_mut().offer(object)
                    })
                }))
            }
            _ => Err(RpcError::new(
                NO_METHOD,
                format!("this server has no {method}"),
            )),
        }
    }

    fn follow(
        &self,
        every: u32,
        take: &mut dyn FnMut(Option<HopsReport>) -> bool,
    ) -> Result<(), RpcError> {
        let take = RefCell::new(take);
        let reader = || {
            Ok(match (take.borrow_mut())(None) {
                true => Reader::Takes,
                false => Reader::IsGone,
            })
        };
        let put = |report| {
            // The next look ends it if this is the last one that is taken.
            (take.borrow_mut())(Some(report));
            Ok(())
        };
        let feed = &self.methods.reached().feed;
        let followed = hops::follow(feed, &HopsQuery::of_all(every), reader, put);
        followed.map_err(|e| RpcError::new(BUSY, e.to_string()))
    }

    fn snapshot(&self) -> Result<Snapshot, String> {
        Ok(Snapshot::inside(self.methods.reached()))
    }

    fn is_there(&self) -> Result<(), String> {
        Ok(())
    }
}

/// Connections of calls and of streams at a time. A control socket takes 16, of which readings of metrics need 4: readers over HTTP leave some to others.
const MOST_CALLS: usize = 4;
const MOST_STREAMS: usize = 6;
/// Longest time that a call waits for a place.
const CALL_PATIENCE: Duration = Duration::from_secs(5);
/// Code of an error: too much is at work.
const BUSY: i64 = 6;

/// The methods behind a control socket: a connection for each call.
pub struct Behind {
    control: PathBuf,
    calls: Connections,
    streams: Connections,
}

impl Behind {
    pub fn new(control: PathBuf) -> Behind {
        Behind {
            control,
            calls: Connections::new(MOST_CALLS),
            streams: Connections::new(MOST_STREAMS),
        }
    }

    fn connect(&self) -> Result<Client, RpcError> {
        Client::connect(&self.control, ASK_PATIENCE).map_err(gone)
    }
}

/// Places for connections.
struct Connections(Arc<Free>);

struct Free {
    places: Mutex<usize>,
    changed: Condvar,
}

/// One of them, until it is dropped.
struct Place(Arc<Free>);

impl Connections {
    fn new(places: usize) -> Connections {
        Connections(Arc::new(Free {
            places: Mutex::new(places),
            changed: Condvar::new(),
        }))
    }

    /// A place, waited for as long as `patience`.
    fn take(&self, patience: Duration) -> Result<Place, RpcError> {
        let mut places = self.0.places.lock();
        let is_full = |places: &mut usize| *places == 0;
        let waited = self
            .0
            .changed
            .wait_while_for(&mut places, is_full, patience);
        if waited.timed_out() {
            return Err(RpcError::new(
                BUSY,
                "too many readers are at work: try again later",
            ));
        }
        *places -= 1;
        Ok(Place(Arc::clone(&self.0)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.places.lock() += 1;
        self.0.changed.notify_one();
    }
}

/// Code 7: the server is stopping, or isn't there any more.
fn gone(e: anyhow::Error) -> RpcError {
    RpcError::new(7, pvblk_block::error_line(&*e))
}

/// Gives `take` each line of a stream whose reads end after a while, until the stream ends or `is_over`.
fn each_line(
    lines: &mut impl BufRead,
    mut is_over: impl FnMut() -> io::Result<bool>,
    mut take: impl FnMut(&str) -> io::Result<()>,
) -> io::Result<()> {
    let mut line = Vec::new();
    loop {
        match lines.read_until(b'\n', &mut line) {
            Ok(0) => return Ok(()),
            Ok(_) if line.last() == Some(&b'\n') => {
                take(String::from_utf8_lossy(&line).trim_end())?;
                line.clear();
            }
            // The end is next.
            Ok(_) => {}
            // The beginning of a line stays.
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) => return Err(e),
        }
        if line.len() > LONGEST_LINE || is_over()? {
            return Ok(());
        }
    }
}

impl Backing for Behind {
    fn call(&self, method: &str, params: Value) -> Result<Value, RpcError> {
        let _place = self.calls.take(CALL_PATIENCE)?;
        self.connect()?.request(method, params).map_err(gone)?
    }

    fn stream(&self, method: &str, params: Value) -> Result<Streamed, RpcError> {
        let place = self.streams.take(Duration::ZERO)?;
        let mut client = self.connect()?;
        client.request(method, params).map_err(gone)??;
        let mut lines = client.lines(LOOK).map_err(gone)?;
        Ok(Box::new(move |reader| {
            let _place = place;
            let reader = RefCell::new(reader);
            let is_over = || reader.borrow_mut().is_over();
            each_line(&mut lines, is_over, |line| reader.borrow_mut().send(line))
        }))
    }

    fn follow(
        &self,
        every: u32,
        take: &mut dyn FnMut(Option<HopsReport>) -> bool,
    ) -> Result<(), RpcError> {
        let _place = self.streams.take(Duration::ZERO)?;
        let mut client = self.connect()?;
        let params = serde_json::to_value(HopsQuery::of_all(every)).unwrap_or_default();
        client.request("hops", params).map_err(gone)??;
        let mut lines = client.lines(LOOK).map_err(gone)?;
        let take = RefCell::new(take);
        let is_over = || Ok(!(take.borrow_mut())(None));
        let followed = each_line(&mut lines, is_over, |line| {
            (take.borrow_mut())(Some(serde_json::from_str(line)?));
            Ok(())
        });
        followed.map_err(|e| RpcError::new(7, e.to_string()))
    }

    fn snapshot(&self) -> Result<Snapshot, String> {
        Snapshot::behind(&self.control).map_err(|e| pvblk_block::error_line(&*e))
    }

    fn is_there(&self) -> Result<(), String> {
        let version = self.call("pvblk.version", json!({}));
        version.map(drop).map_err(|e| e.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_waited_for_and_comes_back() {
        let connections = Arc::new(Connections::new(2));
        let first = connections.take(Duration::ZERO).unwrap();
        let _second = connections.take(Duration::ZERO).unwrap();
        let refused = connections.take(Duration::ZERO).err().unwrap();
        assert_eq!(refused.code, BUSY);
        let waiting = Arc::clone(&connections);
        let third = std::thread::spawn(move || waiting.take(Duration::from_secs(60)).is_ok());
        drop(first);
        assert!(third.join().unwrap());
    }
}
