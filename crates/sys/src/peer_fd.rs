//! Unchecked descriptors from a peer.
//!
//! Closing a file of FUSE or NFS waits for its server (`flush`), and closing a TCP socket may wait for its peer
//! (`SO_LINGER`). The sender of the descriptor may be that server. So an unchecked descriptor is closed on a thread
//! that serves only its sender.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

/// Most descriptors of one peer that wait to be closed; then [`Closer::has_room`] is false.
const MAX_WAITING: usize = 64;

/// Closes the descriptors of one peer, or of one group of peers, on a thread that runs while there are any.
#[derive(Debug, Default)]
pub struct Closer(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    fds: Vec<OwnedFd>,
    /// The thread is closing a descriptor, or about to look for the next.
    at_work: bool,
}

impl Closer {
    /// Creates a closer; its thread starts with the first descriptor.
    pub fn new() -> Arc<Closer> {
        Arc::default()
    }

    /// False while too many descriptors wait; then accept no more from this peer.
    pub fn has_room(&self) -> bool {
        self.lock().fds.len() < MAX_WAITING
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(self: &Arc<Closer>, fd: OwnedFd) {
        let mut waiting = self.lock();
        waiting.fds.push(fd);
        if waiting.at_work {
            return;
        }
        let closer = Arc::clone(self);
        let thread = std::thread::Builder::new().name("pvblk-close".into());
        let spawned = thread.stack_size(64 << 10).spawn(move || closer.run());
        // If no thread can be started, the descriptors stay open until a later close starts one.
        waiting.at_work = spawned.is_ok();
    }

    fn run(&self) {
        loop {
            let mut waiting = self.lock();
            let Some(fd) = waiting.fds.pop() else {
                waiting.at_work = false;
                return;
            };
            drop(waiting);
            drop(fd);
        }
    }
}

/// A descriptor from a peer. It may be any file; dropping it never waits.
#[derive(Debug)]
pub struct PeerFd {
    fd: Option<OwnedFd>,
    closer: Arc<Closer>,
}

impl PeerFd {
    /// Takes a descriptor that was just received.
    pub fn new(fd: OwnedFd, closer: &Arc<Closer>) -> PeerFd {
        PeerFd {
            fd: Some(fd),
            closer: Arc::clone(closer),
        }
    }

    /// Returns the plain descriptor if `check` accepts it as a kind whose closing doesn't wait. Otherwise the closer
    /// closes it.
    pub fn checked(
        mut self,
        check: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>,
    ) -> io::Result<OwnedFd> {
        check(self.as_fd())?;
        self.fd.take().ok_or(io::ErrorKind::NotFound.into())
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.fd {
            Some(fd) => fd.as_fd(),
            None => unreachable!("taken only by value"),
        }
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.closer.close(fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn a_dropped_descriptor_is_closed_by_another_thread() {
        let closer = Closer::new();
        for _ in 0..2 {
            let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
            ours.set_read_timeout(Some(Duration::from_secs(60)))
                .unwrap();
            drop(PeerFd::new(theirs.into(), &closer));
            assert_eq!(io::Read::read(&mut &ours, &mut [0]).unwrap(), 0);
        }
        let until = Instant::now() + Duration::from_secs(60);
        while closer.lock().at_work {
            assert!(Instant::now() < until, "the thread doesn't end");
            std::thread::yield_now();
        }
        // While one close hangs, a bounded number of others wait.
        closer.lock().at_work = true;
        for n in 0..MAX_WAITING {
            assert!(closer.has_room(), "{n}");
            let event = crate::EventFd::new().unwrap();
            drop(PeerFd::new(
                event.as_fd().try_clone_to_owned().unwrap(),
                &closer,
            ));
        }
        assert!(!closer.has_room());
    }

    #[test]
    fn a_checked_descriptor_belongs_to_the_caller() {
        let closer = Closer::new();
        let one = || std::fs::File::open("/dev/null").unwrap().into();
        let refuse = |_: BorrowedFd<'_>| Err(io::ErrorKind::InvalidInput.into());
        assert!(PeerFd::new(one(), &closer).checked(refuse).is_err());
        assert!(PeerFd::new(one(), &closer).checked(|_| Ok(())).is_ok());
    }
}
