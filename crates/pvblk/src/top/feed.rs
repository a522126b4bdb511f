//! Threads that ask the server, and give each answer to one channel.

use super::hops::HopsReport;
use crate::control::Client;
use crate::disks::{DiskPage, DiskShown};
use crate::events::EventForm;
use crate::log::rfc3339;
use crate::memory::Report;
use crate::stat;
use anyhow::{Context, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};
use pvblk_block::error_line;
use pvblk_raid5::ask::Detail;
use serde_json::{Map, Value, json};
use std::io::BufRead;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant, SystemTime};

/// Longest time for an answer that doesn't depend on a disk.
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval at which a server that went away is looked for.
const AGAIN: Duration = Duration::from_secs(1);
/// Longest time between two looks at the list of disks, and at memory that isn't shown.
const SELDOM: Duration = Duration::from_secs(5);
/// Time after which a question that a disk refused is asked again.
const REFUSED: Duration = Duration::from_secs(10);

/// An answer, or how it stands with the server.
pub enum News {
    /// A server answers; its version.
    Live(String),
    /// It doesn't, and why.
    Gone(String),
    Counted(stat::Answer),
    Listed(Vec<DiskShown>),
    Memory(Box<Report>),
    /// With it, whether it happened within the last minute.
    Event(EventForm, bool),
    /// Hops of this disk, or of all.
    Hops(Option<String>, HopsReport),
    /// There are none, and why.
    NoHops(String),
    /// State of the array that a disk is.
    Array(String, Box<Detail>),
    /// Counters of a disk's cache.
    Cache(String, Map<String, Value>),
}

/// The part of the state of the screen that decides what is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    pub interval: Duration,
    pub paused: bool,
    /// The disk that is shown.
    pub disk: Option<String>,
    /// One request in so many is followed through its hops.
    pub every: u32,
    /// Memory is shown.
    pub memory: bool,
}

struct State {
    wanted: Wanted,
    /// Number of the present stream of hops.
    hops: u64,
    /// The socket of that stream.
    socket: Option<UnixStream>,
    /// An event told of a change of disks.
    changed: bool,
    over: bool,
}

struct Shared {
    path: PathBuf,
    state: Mutex<State>,
    changed: Condvar,
    news: Box<dyn Fn(News) + Send + Sync>,
}

/// The work of one thread, until the feed is over.
type Body = fn(&Shared);

/// The threads, until it is dropped. They aren't waited for: one may wait for a disk.
pub struct Feed {
    shared: Arc<Shared>,
}

impl Feed {
    /// Asks the server at `path`, first once to see that there is one.
    pub fn start<T: Send + 'static>(
        path: &Path,
        wanted: Wanted,
        news: Sender<T>,
        of: impl Fn(News) -> T + Send + Sync + 'static,
    ) -> Result<Feed> {
        version(&mut Client::connect(path, PATIENCE)?)?;
        let shared = Arc::new(Shared {
            path: path.to_owned(),
            state: Mutex::new(State {
                wanted,
                hops: 0,
                socket: None,
                changed: false,
                over: false,
            }),
            changed: Condvar::new(),
            // The receiver is gone only at the end.
            news: Box::new(move |n| drop(news.send(of(n)))),
        });
        let threads: [(&str, Body); 4] = [
            ("pvblk-top-count", count),
            ("pvblk-top-ask", ask),
            ("pvblk-top-event", follow_events),
            ("pvblk-top-hops", follow_hops),
        ];
        for (name, body) in threads {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name(name.into())
                .spawn(move || body(&shared))
                .context("starting a thread")?;
        }
        Ok(Feed { shared })
    }

    /// From now on this is asked for.
    pub fn want(&self, wanted: &Wanted) {
        let mut state = self.shared.state.lock();
        if state.wanted == *wanted {
            return;
        }
        let is_other = |old: &Wanted| old.disk != wanted.disk || old.every != wanted.every;
        if is_other(&state.wanted) || wanted.paused {
            state.end_hops();
        }
        state.wanted.clone_from(wanted);
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.over = true;
        state.end_hops();
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl State {
    fn end_hops(&mut self) {
        self.hops += 1;
        if let Some(socket) = self.socket.take() {
            // It may have ended by itself.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    /// Waits until `until`, or for a reason to do something earlier. `None`: it is over.
    fn wait(
        &self,
        until: Instant,
        earlier: impl Fn(&State) -> bool,
    ) -> Option<MutexGuard<'_, State>> {
        let mut state = self.state.lock();
        while !state.over && !earlier(&state) {
            if self.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        (!state.over).then_some(state)
    }

    /// The same while nothing is asked for because of a pause.
    fn wait_for_resume(&self) -> Option<Wanted> {
        let mut state = self.state.lock();
        while !state.over && state.wanted.paused {
            self.changed.wait(&mut state);
        }
        (!state.over).then(|| state.wanted.clone())
    }

    fn connect(&self) -> Result<Client> {
        Client::connect(&self.path, PATIENCE)
    }

    fn tell(&self, news: News) {
        (self.news)(news);
    }

    /// Sleeps before another try. False: it is over.
    fn again(&self) -> bool {
        self.wait(Instant::now() + AGAIN, |_| false).is_some()
    }
}

fn version(client: &mut Client) -> Result<String> {
    let version: Value = client.call("pvblk.version", Value::Null)?;
    Ok(version["version"].as_str().unwrap_or("?").to_owned())
}

/// The thread of counters, of the list of disks, and of memory.
fn count(shared: &Shared) {
    let mut client = None;
    let (mut list_at, mut memory_at) = (Instant::now(), Instant::now());
    while let Some(wanted) = shared.wait_for_resume() {
        let begin = Instant::now();
        let is_new = client.is_none();
        let changed = std::mem::take(&mut shared.state.lock().changed);
        let list = is_new || changed || begin >= list_at;
        let memory = is_new || wanted.memory || begin >= memory_at;
        if list {
            list_at = begin + SELDOM;
        }
        if memory {
            memory_at = begin + SELDOM;
        }
        let pause = match look(shared, &mut client, list, memory) {
            Ok(()) => wanted.interval,
            Err(e) => {
                client = None;
                shared.tell(News::Gone(error_line(&*e)));
                AGAIN
            }
        };
        let sooner = |s: &State| s.wanted.interval < wanted.interval || s.wanted.paused;
        if shared.wait(begin + pause, sooner).is_none() {
            return;
        }
    }
}

/// One look at the counters and what else is due.
fn look(shared: &Shared, client: &mut Option<Client>, list: bool, memory: bool) -> Result<()> {
    let client = match client {
        Some(client) => client,
        None => {
            let mut new = shared.connect()?;
            shared.tell(News::Live(version(&mut new)?));
            client.insert(new)
        }
    };
    if list {
        // `pvblk attach` has no list.
        if let Some(disks) = disks(client)? {
            shared.tell(News::Listed(disks));
        }
    }
    shared.tell(News::Counted(client.call("stat", Value::Null)?));
    if memory {
        let question = json!({"question": {"memory": "report"}});
        shared.tell(News::Memory(client.call("memory.ask", question)?));
    }
    Ok(())
}

/// All disks; `None` if the server has no list.
fn disks(client: &mut Client) -> Result<Option<Vec<DiskShown>>> {
    let (mut disks, mut after) = (Vec::new(), None);
    for _ in 0..MOST_PAGES {
        let page = client.call("disk.list", json!({ "after": after }));
        let page: DiskPage = match page {
            Ok(page) => page,
            Err(e) if client.is_open() => {
                tracing::debug!("{}", error_line(&*e));
                return Ok(None);
            }
            Err(e) => return Err(e),
        };
        disks.extend(page.disks);
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    Ok(Some(disks))
}

/// The thread of the array and the cache of the shown disk.
fn ask(shared: &Shared) {
    let mut client = None;
    let mut refused: [Option<(String, Instant)>; 2] = [None, None];
    let mut last: Option<String> = None;
    while let Some(wanted) = shared.wait_for_resume() {
        let begin = Instant::now();
        if let Some(disk) = &wanted.disk {
            for (which, question) in QUESTIONS.iter().enumerate() {
                let rests = |(d, at): &(String, Instant)| d == disk && at.elapsed() < REFUSED;
                if refused[which].as_ref().is_some_and(rests) {
                    continue;
                }
                if put(shared, &mut client, disk, which, question).is_err() {
                    client = None;
                    refused[which] = Some((disk.clone(), Instant::now()));
                }
            }
        }
        last.clone_from(&wanted.disk);
        let sooner = |s: &State| s.wanted.disk != last || s.wanted.paused;
        if shared.wait(begin + wanted.interval, sooner).is_none() {
            return;
        }
    }
}

/// Most pages of disks that are asked for: more than there can be disks.
const MOST_PAGES: usize = 70;
const QUESTIONS: [&str; 2] = [r#"{"raid":"detail"}"#, r#"{"cache":"counters"}"#];

/// Asks a disk one of [`QUESTIONS`]. Errors are those of disks that aren't of this kind, too.
fn put(
    shared: &Shared,
    client: &mut Option<Client>,
    disk: &str,
    which: usize,
    question: &str,
) -> Result<()> {
    let client = match client {
        Some(client) => client,
        None => client.insert(Client::connect(&shared.path, crate::control::ASK_PATIENCE)?),
    };
    let question: Value = serde_json::from_str(question)?;
    let params = json!({"name": disk, "question": question});
    let news = match which {
        0 => News::Array(disk.to_owned(), client.call("disk.ask", params)?),
        _ => News::Cache(disk.to_owned(), client.call("disk.ask", params)?),
    };
    shared.tell(news);
    Ok(())
}

/// The thread of events. After a reconnect those that the server kept come again; the model knows them by their numbers.
fn follow_events(shared: &Shared) {
    loop {
        let stream = shared
            .connect()
            .and_then(|client| client.stream("events", json!({"follow": true})));
        for line in stream.into_iter().flat_map(BufRead::lines) {
            let Ok(line) = line else { break };
            if let Ok(event) = serde_json::from_str::<EventForm>(&line) {
                // Both are of this machine's clock, in the same form.
                let minute_ago = rfc3339(SystemTime::now() - Duration::from_secs(60));
                let is_recent = event.time > minute_ago;
                shared.tell(News::Event(event, is_recent));
                shared.state.lock().changed = true;
            }
        }
        if !shared.again() {
            return;
        }
    }
}

/// The thread of hops.
fn follow_hops(shared: &Shared) {
    loop {
        let Some(wanted) = shared.wait_for_resume() else {
            return;
        };
        let number = shared.state.lock().hops;
        let mut pause = AGAIN;
        if let Err(e) = hops(shared, &wanted, number) {
            shared.tell(News::NoHops(error_line(&*e)));
            pause = SELDOM;
        }
        // A stream that ended because another one is wanted.
        let is_other = |s: &State| s.hops != number;
        if shared.wait(Instant::now() + pause, is_other).is_none() {
            return;
        }
    }
}

/// Follows one stream to its end.
fn hops(shared: &Shared, wanted: &Wanted, number: u64) -> Result<()> {
    let client = shared.connect()?;
    let socket = client.socket()?;
    {
        let mut state = shared.state.lock();
        if state.hops != number || state.over {
            return Ok(());
        }
        state.socket = Some(socket);
    }
    let mut params = json!({"every": wanted.every, "stream": true});
    if let Some(disk) = &wanted.disk {
        params["disk"] = disk.as_str().into();
    }
    for line in client.stream("hops", params)?.lines() {
        let Ok(line) = line else { break };
        let answer = serde_json::from_str(&line).context("hops")?;
        let state = shared.state.lock();
        if state.hops != number {
            break;
        }
        let is_paused = state.wanted.paused;
        drop(state);
        if !is_paused {
            shared.tell(News::Hops(wanted.disk.clone(), answer));
        }
    }
    Ok(())
}
