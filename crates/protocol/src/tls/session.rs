//! One TLS session of a server or a client, fed with bytes: no I/O, so that it can be driven alone.

use pvblk_block::Error;
use rustls::CommonState;
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::pki_types::CertificateDer;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncryptError, InsufficientSizeError, UnbufferedStatus,
    WriteTraffic,
};

/// One end of a session: [`UnbufferedServerConnection`] or [`UnbufferedClientConnection`], whose calls are alike.
pub trait TlsEnd {
    type Data;

    fn process<'c, 'i>(&'c mut self, input: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data>;

    fn common(&self) -> &CommonState;
}

impl TlsEnd for UnbufferedServerConnection {
    type Data = ServerConnectionData;

    fn process<'c, 'i>(&'c mut self, input: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(input)
    }

    fn common(&self) -> &CommonState {
        self
    }
}

impl TlsEnd for UnbufferedClientConnection {
    type Data = ClientConnectionData;

    fn process<'c, 'i>(&'c mut self, input: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(input)
    }

    fn common(&self) -> &CommonState {
        self
    }
}

/// Room for messages from the peer: three of the longest.
const INPUT: usize = 64 << 10;
/// Bytes of a message's header (RFC 8446, "Record Layer").
const HEADER: usize = 5;
/// Above so many bytes of output no more input is looked at.
const MOST_OUTPUT: usize = 160 << 10;
/// Room that a message needs beside its data.
const OVERHEAD: usize = 64;
/// Most data of one message.
const FRAGMENT: usize = 16 << 10;

/// The state of a session's handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shaken {
    /// Bytes of the peer are needed, once the output is sent.
    More,
    /// It is over; these data came with its end.
    Done(Vec<u8>),
}

/// A session. Bytes of the peer go in through [`TlsSession::room`] and [`TlsSession::filled`], and bytes for it come out of [`TlsSession::output`].
pub struct TlsSession<E> {
    connection: E,
    /// Messages that came, `start..end` of it; no memory until there is one.
    input: Vec<u8>,
    start: usize,
    end: usize,
    output: Output,
    /// The peer has closed in order.
    closed: bool,
}

/// A failure of the session, in words for a log.
pub(super) fn broken(e: impl std::fmt::Display) -> Error {
    Error::protocol(format!("TLS: {e}"))
}

impl<E: TlsEnd> TlsSession<E> {
    pub fn new(connection: E) -> TlsSession<E> {
        TlsSession {
            connection,
            input: Vec::new(),
            start: 0,
            end: 0,
            output: Output::default(),
            closed: false,
        }
    }

    /// Where the next bytes of the peer go; empty if what is here has to be looked at first.
    pub fn room(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.input.len() < INPUT {
            self.input.resize(INPUT, 0);
        }
        &mut self.input[self.end..]
    }

    /// So many bytes are in the room.
    pub fn filled(&mut self, bytes: usize) {
        self.end = (self.end + bytes).min(self.input.len());
    }

    /// Bytes for the peer that are not sent.
    pub fn output(&self) -> &[u8] {
        self.output.bytes()
    }

    /// So many bytes of the output are sent.
    pub fn sent(&mut self, bytes: usize) {
        self.output.skip(bytes);
    }

    /// The peer's certificate, which was verified.
    pub fn peer_certificate(&self) -> Option<&CertificateDer<'static>> {
        self.connection.common().peer_certificates()?.first()
    }

    /// True once the peer has closed the session.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// True if a whole message is here, so that [`TlsSession::decrypt`] gets on without more bytes.
    pub fn has_message(&self) -> bool {
        let here = &self.input[self.start..self.end];
        match here.get(HEADER - 2..HEADER) {
            Some(length) => {
                here.len() >= HEADER + usize::from(u16::from_be_bytes([length[0], length[1]]))
            }
            None => false,
        }
    }

    /// Gets on with the handshake. On an error, output may be left that tells the peer.
    pub fn shake(&mut self) -> Result<Shaken, Error> {
        let mut data = Vec::new();
        self.step(&mut |d| data.extend_from_slice(d))?;
        Ok(match self.connection.common().is_handshaking() {
            true => Shaken::More,
            false => Shaken::Done(data),
        })
    }

    /// Gives the data of the next message that has some to `take`; false if there is none.
    pub fn decrypt(&mut self, take: &mut impl FnMut(&[u8])) -> Result<bool, Error> {
        let mut taken = false;
        self.step(&mut |data| {
            taken |= !data.is_empty();
            take(data);
        })?;
        Ok(taken)
    }

    /// Looks at messages until one has data, more bytes are needed, or there is much to send.
    fn step(&mut self, take: &mut impl FnMut(&[u8])) -> Result<(), Error> {
        loop {
            if self.output().len() > MOST_OUTPUT {
                return Err(broken("the peer asks and takes no answer"));
            }
            let input = &mut self.input[self.start..self.end];
            let UnbufferedStatus { discard, state } = self.connection.process(input);
            let mut goes_on = true;
            let state = match state {
                Ok(state) => state,
                Err(e) => {
                    self.start += discard;
                    self.say_last_words();
                    return Err(broken(e));
                }
            };
            match state {
                ConnectionState::ReadTraffic(mut traffic) => {
                    while let Some(record) = traffic.next_record() {
                        take(record.map_err(broken)?.payload);
                    }
                    goes_on = false;
                }
                ConnectionState::EncodeTlsData(mut data) => {
                    self.output.put(OVERHEAD, |room| match data.encode(room) {
                        Err(EncodeError::InsufficientSize(more)) => Err(Some(more)),
                        Err(EncodeError::AlreadyEncoded) => Err(None),
                        Ok(n) => Ok(n),
                    })?;
                }
                ConnectionState::TransmitTlsData(data) => data.done(),
                ConnectionState::PeerClosed | ConnectionState::Closed => {
                    self.closed = true;
                    goes_on = false;
                }
                ConnectionState::BlockedHandshake | ConnectionState::WriteTraffic(_) => {
                    goes_on = false;
                }
                _ => return Err(broken("data before the handshake")),
            }
            self.start += discard;
            if !goes_on {
                return Ok(());
            }
        }
    }

    /// After an error the session has an alert for the peer.
    fn say_last_words(&mut self) {
        if let ConnectionState::EncodeTlsData(mut alert) =
            match self.connection.process(&mut []).state {
                Ok(state) => state,
                Err(_) => return,
            }
        {
            let _ = self
                .output
                .put(OVERHEAD, |room| alert.encode(room).map_err(|_| None));
        }
    }

    /// Puts `data` into messages of the output. Its caller has sent what was there before.
    pub fn encrypt(&mut self, data: &[u8]) -> Result<(), Error> {
        let room = data.len() + OVERHEAD * (data.len() / FRAGMENT + 1);
        self.write(|traffic, output| {
            output.put(room, |room| match traffic.encrypt(data, room) {
                Err(EncryptError::InsufficientSize(more)) => Err(Some(more)),
                Err(EncryptError::EncryptExhausted) => Err(None),
                Ok(n) => Ok(n),
            })
        })
    }

    /// Tells the peer that nothing follows.
    pub fn close(&mut self) {
        let _ = self.write(|traffic, output| {
            output.put(OVERHEAD, |room| {
                traffic.queue_close_notify(room).map_err(|_| None)
            })
        });
    }

    fn write(
        &mut self,
        write: impl FnOnce(&mut WriteTraffic<'_, E::Data>, &mut Output) -> Result<(), Error>,
    ) -> Result<(), Error> {
        loop {
            let UnbufferedStatus { state, .. } = self.connection.process(&mut []);
            match state.map_err(broken)? {
                ConnectionState::WriteTraffic(mut traffic) => {
                    return write(&mut traffic, &mut self.output);
                }
                ConnectionState::EncodeTlsData(mut data) => {
                    self.output.put(OVERHEAD, |room| match data.encode(room) {
                        Err(EncodeError::InsufficientSize(more)) => Err(Some(more)),
                        Err(EncodeError::AlreadyEncoded) => Err(None),
                        Ok(n) => Ok(n),
                    })?;
                }
                ConnectionState::TransmitTlsData(data) => data.done(),
                ConnectionState::PeerClosed => self.closed = true,
                _ => return Err(broken("the session is closed")),
            }
        }
    }

    /// Gives memory back that isn't needed.
    pub fn release(&mut self) {
        if self.start == self.end {
            self.input = Vec::new();
            (self.start, self.end) = (0, 0);
        }
        if self.output.bytes().is_empty() {
            self.output = Output::default();
        }
    }

    /// Bytes of memory for messages.
    pub fn memory(&self) -> usize {
        self.input.capacity() + self.output.memory.capacity()
    }
}

/// Bytes for the peer. Its memory is kept, so that it isn't cleared again for each message.
#[derive(Default)]
struct Output {
    memory: Vec<u8>,
    /// The bytes are `start..end` of the memory.
    start: usize,
    end: usize,
}

impl Output {
    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.end]
    }

    fn skip(&mut self, bytes: usize) {
        self.start += bytes.min(self.end - self.start);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Has `encode` put bytes behind the others, with at least `room` for them; it is called again if it needs more.
    fn put(
        &mut self,
        mut room: usize,
        mut encode: impl FnMut(&mut [u8]) -> Result<usize, Option<InsufficientSizeError>>,
    ) -> Result<(), Error> {
        for _ in 0..2 {
            if self.memory.len() < self.end + room {
                self.memory.resize(self.end + room, 0);
            }
            match encode(&mut self.memory[self.end..]) {
                Ok(n) => {
                    self.end += n;
                    return Ok(());
                }
                Err(Some(more)) => room = more.required_size,
                Err(None) => break,
            }
        }
        Err(broken("the session can't be written to any more"))
    }
}
