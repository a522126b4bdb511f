//! Who notices that the server is gone while everybody sleeps.

use super::Shared;
use pvblk_block::Error;
use pvblk_sys::{EventFd, Poller};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

/// A thread that waits for the socket to hang up, until it is dropped.
pub(super) struct Watch {
    bell: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub fn start(socket: &UnixStream, shared: &Arc<Shared>) -> Result<Watch, Error> {
        let os = |e| Error::os("watching the server's socket", e);
        let bell = Arc::new(EventFd::new().map_err(os)?);
        let poller = Poller::new().map_err(os)?;
        poller.add(bell.as_fd(), 0, false).map_err(os)?;
        let socket = socket.try_clone().map_err(os)?;
        poller.add(socket.as_fd(), 1, false).map_err(os)?;
        // Answers are read by who asked; a hang-up is reported whatever is waited for.
        poller.set(socket.as_fd(), 1, false, false).map_err(os)?;
        let shared = Arc::clone(shared);
        let body = move || {
            let mut events = Vec::new();
            while events.is_empty() {
                if poller.wait(&mut events, None).is_err() {
                    return;
                }
            }
            if events.iter().any(|e| e.token == 1) {
                shared.fail("the server is gone");
            }
            drop(socket);
        };
        let thread = std::thread::Builder::new().name("pvblk-vhost".into());
        Ok(Watch {
            bell,
            thread: Some(thread.spawn(body).map_err(os)?),
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.bell.notify();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
