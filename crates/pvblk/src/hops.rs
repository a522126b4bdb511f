//! The serving side of `hops`: where the time of requests goes, second by second.

use pvblk_block::Error;
use pvblk_block::trace::MOST_EVERY;
use pvblk_trace::live::{HopsReport, Live};
use pvblk_trace::{Feed, Next, Subscription};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of objects.
const PERIOD: Duration = Duration::from_secs(1);
/// Period in which a quiet stream looks whether its reader is still there.
const LOOK: Duration = Duration::from_millis(50);

/// A question for hops.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HopsQuery {
    /// Only of this disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// One request of so many is followed.
    #[serde(default = "some")]
    pub every: u32,
    /// Only counts and sums: no histograms, and no slowest requests. A server of before doesn't know it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub brief: bool,
    /// One object a second; without it one object is the answer, after a second.
    #[serde(default)]
    pub stream: bool,
}

/// Few enough that watching costs next to nothing.
fn some() -> u32 {
    64
}

impl HopsQuery {
    /// A stream about all disks.
    pub fn of_all(every: u32) -> HopsQuery {
        HopsQuery {
            disk: None,
            every,
            brief: true,
            stream: true,
        }
    }

    /// The question from its JSON; null asks for all disks.
    pub fn parse(params: Value) -> Result<HopsQuery, Error> {
        let params = match params {
            Value::Null => Value::Object(serde_json::Map::new()),
            other => other,
        };
        let query: HopsQuery =
            serde_json::from_value(params).map_err(|e| Error::config(format!("hops: {e}")))?;
        if !(1..=MOST_EVERY).contains(&query.every) {
            let text = format!("hops: every: a number from 1 to {MOST_EVERY}");
            return Err(Error::config(text));
        }
        Ok(query)
    }
}

/// The state of the reader of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    Takes,
    /// It hasn't taken all yet that was put: the next object covers a longer time.
    IsSlow,
    IsGone,
}

/// Follows requests for one listener.
struct Listening {
    subscription: Subscription,
    live: Live,
    every: u32,
    brief: bool,
}

impl Listening {
    fn open(feed: &Arc<Feed>, query: &HopsQuery) -> io::Result<Listening> {
        let subscription = feed.subscribe_every(query.every)?;
        let collector = subscription.collector().clone();
        let now_ns = collector.now_ns();
        let every = collector.every();
        let names = Box::new(move || collector.devices());
        Ok(Listening {
            subscription,
            live: Live::new(names, query.disk.clone(), now_ns),
            every,
            brief: query.brief,
        })
    }

    /// Waits a little for events, and takes them in.
    fn listen(&mut self) {
        if let Next::Events(events) = self.subscription.next(LOOK) {
            self.live.events(&events);
        }
    }

    /// True if more or fewer requests are followed than at the last report.
    fn has_changed(&self) -> bool {
        self.subscription.collector().every() != self.every
    }

    fn report(&mut self) -> HopsReport {
        let collector = self.subscription.collector();
        let every = std::mem::replace(&mut self.every, collector.every());
        let mut report = self.live.take(collector.now_ns(), u64::from(every));
        if self.brief {
            report.make_brief();
        }
        report
    }
}

/// Gives `put` an object in JSON each second, until the reader is gone: see [`follow`].
pub fn answer(
    feed: &Arc<Feed>,
    query: &HopsQuery,
    reader: impl FnMut() -> io::Result<Reader>,
    mut put: impl FnMut(&str) -> io::Result<()>,
) -> io::Result<()> {
    follow(feed, query, reader, |report| {
        put(&serde_json::to_string(&report)?)
    })
}

/// Gives `put` the figures of each second, until the reader is gone. `reader` is asked often, and must not wait. If other listeners change how many
/// requests are followed, figures come early.
pub fn follow(
    feed: &Arc<Feed>,
    query: &HopsQuery,
    mut reader: impl FnMut() -> io::Result<Reader>,
    mut put: impl FnMut(HopsReport) -> io::Result<()>,
) -> io::Result<()> {
    let mut listening = Listening::open(feed, query)?;
    let mut next = Instant::now() + PERIOD;
    loop {
        listening.listen();
        let is_time = listening.has_changed() || Instant::now() >= next;
        match reader()? {
            Reader::IsGone => return Ok(()),
            Reader::Takes if is_time => {
                put(listening.report())?;
                next = (next + PERIOD).max(Instant::now());
            }
            _ => {}
        }
    }
}

/// One object, after a second; earlier if `is_over`.
pub fn once(
    feed: &Arc<Feed>,
    query: &HopsQuery,
    is_over: impl Fn() -> bool,
) -> io::Result<HopsReport> {
    let mut listening = Listening::open(feed, query)?;
    let until = Instant::now() + PERIOD;
    while Instant::now() < until && !is_over() {
        listening.listen();
    }
    Ok(listening.report())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traces::Traces;
    use pvblk_block::{BlockDevice, Buffer, Completion, Op, Queue, QueueContext, Request};
    use serde_json::json;

    fn parse(params: Value) -> Result<HopsQuery, String> {
        HopsQuery::parse(params).map_err(|e| e.to_string())
    }

    #[test]
    fn questions_are_checked() {
        let all = parse(Value::Null).unwrap();
        assert_eq!(
            (all.disk.as_deref(), all.every, all.stream),
            (None, 64, false)
        );
        assert!(parse(json!({"brief": true})).unwrap().brief && !all.brief);
        let one = parse(json!({"disk": "a", "every": 1, "stream": true})).unwrap();
        assert_eq!(
            (one.disk.as_deref(), one.every, one.stream),
            (Some("a"), 1, true)
        );
        for wrong in [
            json!({"every": 0}),
            json!({"every": -1}),
            json!({"every": MOST_EVERY + 1}),
            json!({"disc": "a"}),
            json!([1]),
        ] {
            assert!(parse(wrong.clone()).is_err(), "{wrong}");
        }
    }

    /// Reads one sector after another.
    struct Load {
        queue: Queue,
        request: Option<Box<Request>>,
        sector: u64,
    }

    impl Load {
        fn on(traces: &Traces, disk: &str) -> Load {
            let device: Arc<dyn BlockDevice> = pvblk_volume::open("mem:1M").unwrap();
            let mut context = QueueContext::new(1);
            context.tracing = traces.of(disk);
            let buffer = Buffer::anonymous(4096).unwrap();
            Load {
                queue: Queue::open(&device, &context).unwrap(),
                request: Some(Request::with_buffers(Op::Read, 0, vec![buffer], 0)),
                sector: 0,
            }
        }

        fn step(&mut self) {
            let Some(mut request) = self.request.take() else {
                return;
            };
            self.sector = (self.sector + 8) % 2048;
            request.sector = self.sector;
            self.queue.submit(&mut vec![request]);
            let mut done: Vec<Completion> = Vec::new();
            self.queue.poll(&mut done);
            self.request = done.pop().map(|c| c.request);
        }
    }

    #[test]
    fn a_slow_reader_gets_fewer_objects_of_more_time() {
        let traces = Traces::of_server();
        let (mut a, mut b) = (Load::on(&traces, "a"), Load::on(&traces, "b"));
        let query = parse(json!({"disk": "a", "every": 1, "stream": true})).unwrap();
        let begin = Instant::now();
        let mut reports: Vec<HopsReport> = Vec::new();
        let (mut put, mut looks) = (0, 0);
        let reports_of = &mut reports;
        answer(
            traces.feed(),
            &query,
            || {
                a.step();
                b.step();
                looks += 1;
                let busy = begin.elapsed() < PERIOD * 3;
                Ok(match (busy, put) {
                    (_, 2..) => Reader::IsGone,
                    (true, _) => Reader::IsSlow,
                    (false, _) => {
                        put += 1;
                        Reader::Takes
                    }
                })
            },
            |line| {
                reports_of.push(serde_json::from_str(line)?);
                Ok(())
            },
        )
        .unwrap();
        assert!(looks > 3);
        let first = &reports[0];
        assert!(
            first.elapsed_ns >= PERIOD.as_nanos() as u64 * 3,
            "{first:?}"
        );
        let disks: Vec<&str> = first.disks.iter().map(|d| d.disk.as_str()).collect();
        assert_eq!(disks, ["a"]);
        let disk = &first.disks[0];
        assert!(disk.requests > 0);
        let slowest = &disk.slowest[0];
        assert_eq!((slowest.op.as_str(), slowest.bytes), ("read", 4096));
        let parts: u64 = slowest.hops.iter().map(|h| h.ns).sum();
        assert_eq!(parts, slowest.total_ns);
    }

    #[test]
    fn one_object_is_the_answer() {
        let traces = Traces::of_server();
        let query = parse(Value::Null).unwrap();
        let report = once(traces.feed(), &query, || false).unwrap();
        assert_eq!((report.every, report.disks.len()), (64, 0));
    }
}
