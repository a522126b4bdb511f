//! The front end's side of the socket: one question or order at a time, each with its answer.

use super::VhostClientConfig;
use crate::dial::SocketType;
use pvblk_block::Error;
use pvblk_protocol::nbd::NbdAddr;
use pvblk_protocol::vhost_user::{Code, HEADER, Header, MAX_PAYLOAD, features, flags, message};
use pvblk_sys::fdpass;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use zerocopy::FromBytes;

/// A connection to a server.
pub(super) struct Front {
    socket: UnixStream,
    /// Features of the protocol that are used.
    taken: u64,
}

impl Front {
    pub fn connect(path: &Path, config: &VhostClientConfig) -> Result<Front, Error> {
        let os = |e| Error::os("connecting", e);
        let (address, timeout) = (NbdAddr::Unix(path.to_owned()), config.timeout);
        let dialer = &config.dialer;
        let socket = dialer.connection(&address, SocketType::STREAM, timeout);
        let socket = UnixStream::from(socket.map_err(os)?);
        socket.set_nonblocking(false).map_err(os)?;
        socket.set_read_timeout(Some(timeout)).map_err(os)?;
        socket.set_write_timeout(Some(timeout)).map_err(os)?;
        Ok(Front { socket, taken: 0 })
    }

    /// The socket, to be watched by somebody else.
    pub fn copy_socket(&self) -> Result<UnixStream, Error> {
        let copy = self.socket.try_clone();
        copy.map_err(|e| Error::os("copying a descriptor", e))
    }

    /// Ends the connection; whoever watches the socket learns of it.
    pub fn hang_up(&self) {
        // It may have ended already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// True if a feature of the protocol is used.
    pub fn has(&self, feature: u64) -> bool {
        self.taken & feature != 0
    }

    /// Uses these features of the protocol from now on.
    pub fn take(&mut self, taken: u64) -> Result<(), Error> {
        // Nothing says yet that orders are answered.
        self.send(Code::SetProtocolFeatures, 0, &taken.to_le_bytes(), &[])?;
        self.taken = taken;
        Ok(())
    }

    /// Asks for something that has an answer of its own.
    pub fn ask(&mut self, code: Code, payload: &[u8]) -> Result<Vec<u8>, Error> {
        self.send(code, 0, payload, &[])?;
        self.answer(code)
    }

    /// Asks for something whose answer comes with a descriptor.
    pub fn ask_for_file(
        &mut self,
        code: Code,
        payload: &[u8],
    ) -> Result<(Vec<u8>, OwnedFd), Error> {
        self.send(code, 0, payload, &[])?;
        let mut files = Vec::new();
        let answer = self.answer_with(code, &mut files)?;
        let file = files.pop();
        let file = file.ok_or_else(|| Error::protocol(format!("{code}: no descriptor came")));
        Ok((answer, file?))
    }

    /// Asks for a number.
    pub fn number(&mut self, code: Code) -> Result<u64, Error> {
        let answer = self.ask(code, &[])?;
        let bytes = answer.try_into();
        let bytes = bytes.map_err(|_| Error::protocol(format!("{code}: the answer is no number")));
        Ok(u64::from_le_bytes(bytes?))
    }

    /// Orders something; waits until it is done, if the server can tell.
    pub fn tell(
        &mut self,
        code: Code,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Error> {
        if !self.has(features::REPLY_ACK) {
            return self.send(code, 0, payload, fds);
        }
        self.send(code, flags::NEED_REPLY, payload, fds)?;
        match self.answer(code)?.iter().all(|&b| b == 0) {
            true => Ok(()),
            false => Err(Error::protocol(format!(
                "{code}: the server refuses it; its log may say why"
            ))),
        }
    }

    fn send(
        &self,
        code: Code,
        flag: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Error> {
        let bytes = message(code as u32, flag, payload);
        fdpass::send(self.socket.as_fd(), &bytes, fds).map_err(|e| Error::os(code.to_string(), e))
    }

    fn answer(&self, code: Code) -> Result<Vec<u8>, Error> {
        // Descriptors that nobody asked for are closed.
        self.answer_with(code, &mut Vec::new())
    }

    fn answer_with(&self, code: Code, files: &mut Vec<OwnedFd>) -> Result<Vec<u8>, Error> {
        let head = self.receive(code, HEADER, files)?;
        let head = Header::read_from_bytes(&head);
        let head = head.map_err(|_| Error::protocol(format!("{code}: no answer")))?;
        let is_answer = head.flags & flags::REPLY != 0 && head.request == code as u32;
        if !is_answer || head.size as usize > MAX_PAYLOAD {
            let (request, size) = (head.request, head.size);
            return Err(Error::protocol(format!(
                "{code}: the answer is one to request {request}, with {size} bytes"
            )));
        }
        self.receive(code, head.size as usize, files)
    }

    fn receive(&self, code: Code, len: usize, files: &mut Vec<OwnedFd>) -> Result<Vec<u8>, Error> {
        let mut all = vec![0; len];
        let mut have = 0;
        while have < len {
            match fdpass::recv(self.socket.as_fd(), &mut all[have..], true) {
                Ok((0, _)) => {
                    return Err(Error::protocol(format!(
                        "{code}: the server closed the connection: is it serving somebody else?"
                    )));
                }
                Ok((n, more)) => {
                    have += n;
                    files.extend(more);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    return Err(Error::protocol(format!(
                        "{code}: no answer in time: is the server serving somebody else?"
                    )));
                }
                Err(e) => return Err(Error::os(code.to_string(), e)),
            }
        }
        Ok(all)
    }
}
