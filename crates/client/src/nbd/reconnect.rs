//! The thread of a volume that notices that its server is gone, and looks for the next one.

use super::OnReconnect;
use super::connect::Connected;
use super::kept::{Kept, Plant};
use super::link::{BELL, Link};
use super::replay::replay;
use pvblk_block::{Error, ErrorKind};
use pvblk_sys::Poller;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Pauses between attempts: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A server that answers nothing, and goes sooner, isn't called again before a pause, which grows.
const STAYS: Duration = Duration::from_secs(5);
/// Pause before the next attempt to make a single connection.
const OWED_PAUSE: Duration = Duration::from_secs(1);

/// Starts the thread. It ends soon after [`Link::stop`] is set and the bell rung; nobody waits for it.
pub(super) fn start(link: &Arc<Link>) -> Result<(), Error> {
    let link = Arc::clone(link);
    let uri = link.uri.to_string();
    let body = move || run(&link);
    match std::thread::Builder::new()
        .name("pvblk-nbd-link".into())
        .stack_size(256 << 10)
        .spawn(body)
    {
        Ok(_) => Ok(()),
        Err(e) => Err(Error::os(format!("{uri}: a thread for its connections"), e)),
    }
}

fn stopped(link: &Link) -> bool {
    link.stop.load(Ordering::Acquire)
}

fn run(link: &Link) {
    let mut events = Vec::new();
    let mut told = String::new();
    let mut pause = Pause::default();
    while !stopped(link) {
        events.clear();
        let owed = link.is_owed().then_some(OWED_PAUSE);
        if let Err(e) = link.poller.wait(&mut events, owed) {
            tracing::warn!("{}: waiting for the server: {e}", link.uri);
            std::thread::sleep(LONGEST_PAUSE);
        }
        link.bell.drain();
        for event in &events {
            if event.token != BELL {
                link.lost(event.token, "the server hung up");
            }
        }
        if let Some(why) = link.is_down() {
            look_for(link, &why, &mut pause);
        }
        while !stopped(link) && link.is_owed() {
            if let Err(e) = link.pay() {
                let why = e.to_string();
                if told != why {
                    tracing::warn!("one connection less for now: {why}");
                    told = why;
                }
                break;
            }
        }
    }
}

/// The pause before the next attempt.
struct Pause {
    next: Duration,
    /// Time at which the last attempt succeeded.
    connected: Option<Instant>,
}

impl Default for Pause {
    fn default() -> Pause {
        Pause {
            next: FIRST_PAUSE,
            connected: None,
        }
    }
}

impl Pause {
    /// A server is gone at `now`, which has answered a request or hasn't. `Some`: it was of no use, and isn't called again before this pause is over.
    fn lost(&mut self, now: Instant, answered: bool) -> Option<Duration> {
        let came = self.connected.take()?;
        if answered || now.duration_since(came) >= STAYS {
            self.next = FIRST_PAUSE;
            return None;
        }
        Some(self.failed())
    }

    /// The pause after an attempt that has failed.
    fn failed(&mut self) -> Duration {
        let now = self.next;
        self.next = (now * 2).min(LONGEST_PAUSE);
        now
    }
}

/// Connects again, however long it takes, or gives up.
fn look_for(link: &Link, why: &str, pause: &mut Pause) {
    let begin = Instant::now();
    debug_assert_eq!(link.config.on_reconnect, OnReconnect::Resend);
    tracing::warn!("{}: {why}; its requests wait for the server", link.uri);
    if let Some(pause) = pause.lost(begin, link.take_answered()) {
        sleep(link, pause);
    }
    let mut told = String::new();
    while !stopped(link) {
        let until = link.config.wait.map(|wait| begin + wait);
        let failed = match attempt(link, until) {
            Ok(()) => {
                let after = begin.elapsed().as_secs_f64();
                tracing::info!("{}: connected again after {after:.3} s", link.uri);
                pause.connected = Some(Instant::now());
                return;
            }
            Err(e) => e.to_string(),
        };
        if told != failed {
            tracing::info!("not connected yet: {failed}");
            told = failed;
        }
        let mut pause = pause.failed();
        if let Some(wait) = link.config.wait {
            let left = wait.saturating_sub(begin.elapsed());
            if left.is_zero() {
                let seconds = wait.as_secs_f64();
                let why = format!("{}: {why}; not back after {seconds} s: {told}", link.uri);
                tracing::error!("{why}");
                return link.give_up(&why);
            }
            pause = pause.min(left);
        }
        sleep(link, pause);
    }
}

/// One attempt: all connections, and the replay over the first, which goes on until this time at the longest.
fn attempt(link: &Link, until: Option<Instant>) -> Result<(), Error> {
    let is_over = || stopped(link) || until.is_some_and(|until| Instant::now() >= until);
    let mut connections: Vec<Connected> = Vec::new();
    let least = link.least_bytes();
    connections.push(link.another(least)?);
    if let Some(kept) = &link.kept {
        if kept.has(Plant::HandedEarly) {
            return handed_early(link, kept, least);
        }
        let done = replay(kept, &connections[0], &is_over);
        done.map_err(|why| Error::protocol(format!("{}: {why}", link.uri)))?;
        kept.replayed();
    }
    loop {
        let count = link.needs();
        while connections.len() < count && !stopped(link) {
            connections.push(link.another(least)?);
        }
        if stopped(link) {
            return Err(Error::protocol("stopped"));
        }
        // A server that died in between may have left the first ones to the dead and made the last ones anew. Their requests could outlive
        // the loss of the others.
        if !connections.iter().all(Connected::is_alive) {
            let why = format!("{}: the server went away again", link.uri);
            return Err(Error::new(ErrorKind::Disconnected, why));
        }
        connections = match link.resume(connections) {
            Ok(()) => return Ok(()),
            // One more queue was opened meanwhile.
            Err(back) => back,
        };
    }
}

/// With the planted bug: requests go first.
fn handed_early(link: &Link, kept: &Kept, least: u64) -> Result<(), Error> {
    let apart = link.another(least)?;
    let mut connections = Vec::new();
    while connections.len() < link.needs() {
        connections.push(link.another(least)?);
    }
    let _ = link.resume(connections);
    let done = replay(kept, &apart, &|| stopped(link));
    kept.replayed();
    done.map_err(Error::protocol)
}

/// Sleeps, unless the volume is closed. The bell is rung for other reasons, too.
fn sleep(link: &Link, time: Duration) {
    let until = Instant::now() + time;
    let mut events = Vec::new();
    while !stopped(link) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        let waited = Poller::new().and_then(|p| {
            p.add(link.bell.as_fd(), BELL, false)?;
            p.wait(&mut events, Some(left))
        });
        if waited.is_err() {
            std::thread::sleep(left);
        }
        link.bell.drain();
    }
}
