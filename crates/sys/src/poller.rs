//! [`Poller`]: waits on many descriptors (epoll).

use rustix::event::{Timespec, epoll};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// A set of descriptors to wait on, level-triggered. The set is itself a descriptor, so sets nest.
#[derive(Debug)]
pub struct Poller(OwnedFd);

/// Readiness of one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollEvent {
    /// Token given to [`Poller::add`].
    pub token: u64,
    /// There is something to read, or the peer hung up.
    pub readable: bool,
    /// There is room to write.
    pub writable: bool,
    /// The peer closed its end.
    pub hangup: bool,
}

fn flags(read: bool, write: bool) -> epoll::EventFlags {
    let mut f = epoll::EventFlags::empty();
    if read {
        f |= epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
    }
    if write {
        f |= epoll::EventFlags::OUT;
    }
    f
}

impl Poller {
    /// Creates an empty set.
    pub fn new() -> io::Result<Poller> {
        Ok(Poller(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Adds `fd` to the set: waits until it is readable, or writable if `write` is set. A closed descriptor leaves
    /// the set.
    pub fn add(&self, fd: BorrowedFd<'_>, token: u64, write: bool) -> io::Result<()> {
        Ok(epoll::add(
            &self.0,
            fd,
            epoll::EventData::new_u64(token),
            flags(true, write),
        )?)
    }

    /// Adds `fd` for exceptional conditions only (`EPOLLPRI`), edge-triggered: the kernel's pressure files report
    /// this way. Events are reported as readable.
    pub fn add_priority(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let flags = epoll::EventFlags::PRI | epoll::EventFlags::ET;
        Ok(epoll::add(
            &self.0,
            fd,
            epoll::EventData::new_u64(token),
            flags,
        )?)
    }

    /// Adds `fd` for the end of its stream only, which is reported once. Data that can be read before the end isn't reported.
    pub fn add_hangup(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let flags = epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::add(&self.0, fd, data, flags)?)
    }

    /// Changes the conditions that `fd` is waited for; with neither it stays in the set and only errors are reported.
    pub fn set(&self, fd: BorrowedFd<'_>, token: u64, read: bool, write: bool) -> io::Result<()> {
        Ok(epoll::modify(
            &self.0,
            fd,
            epoll::EventData::new_u64(token),
            flags(read, write),
        )?)
    }

    /// Removes `fd` from the set.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::delete(&self.0, fd)?)
    }

    /// Waits up to `timeout` (`None`: for ever; zero: not at all) and appends up to 64 events to `out`. A signal ends
    /// the wait early, without events.
    pub fn wait(&self, out: &mut Vec<PollEvent>, timeout: Option<Duration>) -> io::Result<()> {
        let spec = timeout.map(|t| Timespec {
            tv_sec: t.as_secs() as i64,
            tv_nsec: t.subsec_nanos() as _,
        });
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 64];
        let (ready, _) = match epoll::wait(&self.0, &mut events, spec.as_ref()) {
            Ok(r) => r,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(rustix::io::Errno::NOSYS) => return self.wait_in_milliseconds(out, timeout),
            Err(e) => return Err(e.into()),
        };
        out.extend(ready.iter().map(|e| {
            let (set, data) = (e.flags, e.data);
            event(set, data.u64())
        }));
        Ok(())
    }

    /// As [`Poller::wait`], for kernels before 5.11 and for valgrind, which lack `epoll_pwait2`. Timeouts are rounded up.
    #[cold]
    fn wait_in_milliseconds(
        &self,
        out: &mut Vec<PollEvent>,
        timeout: Option<Duration>,
    ) -> io::Result<()> {
        let timeout = timeout.map_or(-1, |t| {
            t.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32
        });
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        // SAFETY: there is room for as many events as are asked for.
        let n = unsafe {
            libc::epoll_wait(
                self.0.as_raw_fd(),
                events.as_mut_ptr(),
                events.len() as i32,
                timeout,
            )
        };
        if n < 0 {
            let e = io::Error::last_os_error();
            return match e.kind() {
                io::ErrorKind::Interrupted => Ok(()),
                _ => Err(e),
            };
        }
        let of_kernel = events.iter().take(n as usize);
        out.extend(of_kernel.map(|e| event(epoll::EventFlags::from_bits_retain(e.events), e.u64)));
        Ok(())
    }
}

fn event(set: epoll::EventFlags, token: u64) -> PollEvent {
    let closed = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
    let hangup = set.intersects(closed);
    PollEvent {
        token,
        readable: set.intersects(epoll::EventFlags::IN | epoll::EventFlags::PRI) || hangup,
        writable: set.contains(epoll::EventFlags::OUT) || hangup,
        hangup,
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EventFd;

    /// Modelled devices and pauses of a few microseconds depend on this. One short wait of many is enough, since
    /// other processes use this CPU too: with timeouts in whole milliseconds none would be short.
    #[test]
    fn waits_are_shorter_than_a_millisecond() {
        let p = Poller::new().unwrap();
        let mut got = Vec::new();
        let begin = std::time::Instant::now();
        loop {
            let start = std::time::Instant::now();
            p.wait(&mut got, Some(Duration::from_micros(100))).unwrap();
            let took = start.elapsed();
            assert!(took >= Duration::from_micros(100), "{took:?}");
            if took < Duration::from_micros(900) {
                return;
            }
            assert!(
                begin.elapsed().as_secs() < 60,
                "{took:?}, and none was shorter"
            );
        }
    }

    #[test]
    fn waits_without_epoll_pwait2_report_the_same() {
        let (p, e) = (Poller::new().unwrap(), EventFd::new().unwrap());
        p.add(e.as_fd(), 7, true).unwrap();
        let both = || {
            let (mut a, mut b) = (Vec::new(), Vec::new());
            p.wait(&mut a, Some(Duration::ZERO)).unwrap();
            p.wait_in_milliseconds(&mut b, Some(Duration::ZERO))
                .unwrap();
            assert_eq!(a, b);
            a
        };
        assert!(
            both()
                .iter()
                .all(|e| e.token == 7 && e.writable && !e.readable)
        );
        e.notify();
        assert!(both()[0].readable);
        p.remove(e.as_fd()).unwrap();
        assert!(both().is_empty());
        let start = std::time::Instant::now();
        let timeout = Some(Duration::from_micros(1100));
        p.wait_in_milliseconds(&mut Vec::new(), timeout).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(2));
    }

    #[test]
    fn a_hang_up_is_reported_once_and_data_are_not() {
        use std::io::Write as _;
        use std::os::unix::net::UnixStream;
        let p = Poller::new().unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        p.add_hangup(theirs.as_fd(), 7).unwrap();
        let mut got = Vec::new();
        ours.write_all(b"x").unwrap();
        p.wait(&mut got, Some(Duration::ZERO)).unwrap();
        assert!(got.is_empty());
        drop(ours);
        p.wait(&mut got, Some(Duration::from_secs(60))).unwrap();
        assert!(got.len() == 1 && got[0].token == 7 && got[0].hangup);
        p.wait(&mut got, Some(Duration::ZERO)).unwrap();
        assert_eq!(got.len(), 1);
    }

    #[test]
    fn sets_nest() {
        let (inner, outer, e) = (
            Poller::new().unwrap(),
            Poller::new().unwrap(),
            EventFd::new().unwrap(),
        );
        inner.add(e.as_fd(), 1, false).unwrap();
        outer.add(inner.as_fd(), 2, false).unwrap();
        let mut got = Vec::new();
        outer.wait(&mut got, Some(Duration::ZERO)).unwrap();
        assert!(got.is_empty());
        e.notify();
        outer.wait(&mut got, Some(Duration::ZERO)).unwrap();
        assert_eq!(got[0].token, 2);
        assert!(got[0].readable && !got[0].hangup);
    }
}
