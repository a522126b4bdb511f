//! An opener behind a socket: each call is a message of JSON, with a descriptor beside it, and so is its answer.

use super::*;
use crate::opener::{FileAnswer, FileCall, PassCall, PassedOpener, carry_out};
use pvblk_sys::fdpass;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Most bytes of a message.
const MOST: usize = 64 << 10;

/// The client's end of the socket. A thread carries the calls out, until this is dropped.
#[derive(Debug)]
pub(super) struct Socket(Mutex<OwnedFd>);

pub(super) fn over(opener: &Arc<Elsewhere>) -> PassedOpener<Socket> {
    let (ours, theirs) = fdpass::pair().expect("two sockets");
    let opener = Arc::clone(opener);
    std::thread::spawn(move || {
        while let Some((call, file)) = receive::<FileCall>(&theirs) {
            let file = file.as_ref().map(AsFd::as_fd);
            let (answer, opened) = carry_out(&*opener, call, file);
            send(&theirs, &answer, opened.as_ref().map(AsFd::as_fd));
        }
    });
    PassedOpener(Socket(Mutex::new(ours)))
}

impl PassCall for Socket {
    fn pass(
        &self,
        call: FileCall,
        file: Option<BorrowedFd<'_>>,
    ) -> io::Result<(FileAnswer, Option<OwnedFd>)> {
        let socket = self.0.lock().unwrap();
        send(&socket, &call, file);
        Ok(receive(&socket).expect("an answer"))
    }
}

fn send(socket: &OwnedFd, message: &impl Serialize, file: Option<BorrowedFd<'_>>) {
    let bytes = serde_json::to_vec(message).expect("JSON");
    assert!(bytes.len() <= MOST);
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    // Whoever asked may be gone.
    let _ = fdpass::send(socket.as_fd(), &bytes, &files);
}

/// `None`: the other side is gone.
fn receive<T: DeserializeOwned>(socket: &OwnedFd) -> Option<(T, Option<OwnedFd>)> {
    let mut bytes = vec![0; MOST];
    let (n, mut files) = fdpass::recv(socket.as_fd(), &mut bytes, true).expect("a message");
    match n {
        0 => None,
        n => Some((
            serde_json::from_slice(&bytes[..n]).expect("JSON"),
            files.pop(),
        )),
    }
}
