//! Members of an array as a cut leaves them: copies of one moment in the middle of writes.

use crate::arrays::{copies, data_offset, wrong_from};
use crate::nbd::{Command, Connection};
use crate::outcome::check;
use crate::{Daemon, Stop};
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Chunks of the array.
pub const CHUNK: usize = 16 << 10;

/// A cut takes a few milliseconds, and one in two to one in fifty has wrong parity.
const TRIES: usize = 2000;

/// An array that is served and has no other client.
pub struct Live<'a> {
    pub daemon: &'a Daemon,
    /// Its NBD socket.
    pub socket: &'a Path,
    /// The files that are copied.
    pub members: &'a [PathBuf],
}

/// Members at one moment.
pub struct Cut {
    /// Copies of them.
    pub members: Vec<PathBuf>,
    /// 4 KiB blocks with wrong parity, where it was looked for.
    pub wrong: usize,
}

impl Live<'_> {
    /// Cuts it off while several clients write to its even chunks.
    ///
    /// With `torn`, each of the cuts has wrong parity in so many bytes of each member.
    pub fn cuts(
        &self,
        wanted: usize,
        torn: Option<usize>,
        dir: &Path,
        rng: &mut fastrand::Rng,
    ) -> Result<Vec<Cut>, Stop> {
        let clients: Result<Vec<Connection>, Stop> =
            (0..3).map(|_| Connection::open(self.socket, "r")).collect();
        let clients = clients?;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let write = |client| {
                let (seed, stop) = (rng.u64(..), &stop);
                scope.spawn(move || write_even_chunks(client, seed, stop))
            };
            let writers: Vec<_> = clients.into_iter().map(write).collect();
            let cuts = self.tries(wanted, torn, dir, rng);
            stop.store(true, Ordering::Relaxed);
            for writer in writers {
                let ended = writer.join();
                let writes = ended.unwrap_or_else(|_| Stop::fail("a writer panicked"))?;
                check(writes > 0, || "nothing was written".into())?;
            }
            cuts
        })
    }

    fn tries(
        &self,
        wanted: usize,
        torn: Option<usize>,
        dir: &Path,
        rng: &mut fastrand::Rng,
    ) -> Result<Vec<Cut>, Stop> {
        let starts: Result<Vec<usize>, Stop> = self.members.iter().map(data_offset).collect();
        let starts = starts?;
        let (mut cuts, mut tries) = (Vec::new(), 0);
        while cuts.len() < wanted && tries < TRIES {
            tries += 1;
            std::thread::sleep(Duration::from_micros(rng.u64(500..4000)));
            let cut = frozen(self.daemon, || {
                let wrong = match torn {
                    Some(bytes) => wrong_from(self.members, &starts, bytes)?,
                    None => 0,
                };
                if torn.is_some() && wrong == 0 {
                    return Ok(None);
                }
                let to = tempfile::tempdir_in(dir)?.keep();
                let members = copies(self.members, &to)?;
                Ok(Some(Cut { members, wrong }))
            })?;
            cuts.extend(cut);
        }
        if torn.is_some() {
            println!("{} of {tries} cuts had wrong parity", cuts.len());
        }
        check(!cuts.is_empty(), || "no cut had wrong parity".into())?;
        Ok(cuts)
    }
}

/// Calls `work` while a server is stopped by SIGSTOP: I/O that it had begun is done, and it begins
/// none.
fn frozen<T>(daemon: &Daemon, work: impl FnOnce() -> Result<T, Stop>) -> Result<T, Stop> {
    daemon.freeze()?;
    let result = all_stopped(daemon.pid()).and_then(|()| work());
    daemon.signal(Signal::CONT)?;
    result
}

/// Waits until no thread of a stopped process runs any more, including the kernel's threads for its I/O.
fn all_stopped(pid: u32) -> Result<(), Stop> {
    let begin = Instant::now();
    loop {
        let mut states = Vec::new();
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            // One that has ended meanwhile has no state.
            let stat = std::fs::read_to_string(task?.path().join("stat")).unwrap_or_default();
            // Behind the name, which is in brackets.
            let state = stat.rsplit_once(") ").and_then(|(_, s)| s.chars().next());
            states.extend(state);
        }
        if states.iter().all(|&s| s == 'T') {
            return Ok(());
        }
        check(begin.elapsed() < Duration::from_secs(60), || {
            format!("told to stop, and threads are {states:?}")
        })?;
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Writes sectors of even chunks, so that stripes have chunks that are never written. Returns the number of
/// completed writes.
fn write_even_chunks(mut client: Connection, seed: u64, stop: &AtomicBool) -> Result<u64, Stop> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let chunks = client.size_bytes / CHUNK as u64;
    let sectors = CHUNK as u64 / 512;
    let mut data = vec![0; CHUNK];
    let (mut sent, mut done) = (0, 0);
    loop {
        let ending = stop.load(Ordering::Relaxed);
        if ending && sent == done {
            return Ok(done);
        }
        if !ending && sent - done < 16 {
            let from = rng.u64(0..sectors);
            let count = rng.u64(1..=sectors - from);
            let data = &mut data[..count as usize * 512];
            rng.fill(data);
            let at = rng.u64(0..chunks / 2) * 2 * CHUNK as u64 + from * 512;
            client.send(Command::Write, sent, at, data)?;
            sent += 1;
            continue;
        }
        let reply = client.receive()?;
        check(reply.is_some_and(|r| r.error == 0), || format!("{reply:?}"))?;
        done += 1;
    }
}
