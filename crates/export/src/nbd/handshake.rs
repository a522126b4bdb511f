//! Fixed newstyle negotiation as a state machine fed with bytes: no I/O, so that it can be driven alone.

use super::access::{Identity, Rights, Rules};
use super::block_status;
use super::options::{self, Refusal};
use pvblk_backend::{Disk, Disks};
use pvblk_block::{BlockDevice, Error, SECTOR};
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{
    Contexts, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, IHAVEOPT, Mode, NBDMAGIC, opt, rep, tflag,
    u32_at, u64_at,
};
use std::collections::VecDeque;
use std::sync::Arc;

/// Longest payload of an option, in bytes. Longer ones end the connection.
const MAX_OPTION: usize = 64 << 10;
/// Most options of one negotiation; no client needs a tenth of it.
const MAX_OPTIONS: u32 = 256;
/// Lists of exports in one negotiation; more are refused.
const MAX_LISTS: u32 = 4;
/// Exports taken from the table at a time.
const PAGE: usize = 64;
/// Above so many bytes of output the next option, or the next export of a list, waits until they are sent.
const MOST_OUTPUT: usize = 16 << 10;
/// Bytes of an option's header.
const OPTION_BYTES: usize = 16;

/// Asked before a client gets an export; errors with a line for the client if there is no place for it.
pub type Door<'a> = dyn Fn(&Arc<Disk>) -> Result<(), String> + 'a;

/// The terms on which both sides agreed.
#[derive(Clone)]
pub struct Negotiated {
    /// The export's name; for a client that asked for the default export, that one's.
    pub export: String,
    pub device: Arc<dyn BlockDevice>,
    /// Transmission flags that the client was told.
    pub transmission_flags: u16,
    /// Form of requests and replies.
    pub mode: Mode,
    /// The metadata contexts that were selected for this export.
    pub contexts: Contexts,
    /// The client asked for no padding after `NBD_OPT_EXPORT_NAME`.
    pub no_zeroes: bool,
    /// Bytes received after the negotiation's end: the first requests.
    pub leftover: Vec<u8>,
}

impl std::fmt::Debug for Negotiated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Negotiated")
            .field("export", &self.export)
            .field("mode", &self.mode)
            .field("contexts", &self.contexts)
            .finish_non_exhaustive()
    }
}

/// Where the negotiation stands after some bytes.
#[derive(Debug)]
pub enum Step {
    /// More bytes are needed.
    More,
    /// The output has to be sent; then there is more of it, without further bytes: [`Handshake::feed`] nothing.
    Output,
    /// The transmission phase begins, once the output is sent.
    Done(Box<Negotiated>),
    /// TLS begins, once the output is sent; then [`Handshake::secured`].
    StartTls,
    /// The client ended the negotiation; send the output, then close.
    Aborted,
}

/// The part that TLS has in a negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsUse {
    /// The listener has none.
    Absent,
    Offered,
    /// Nothing is said of disks before it.
    Required,
    Established,
}

enum State {
    ClientFlags,
    Options,
    /// In a list of exports: the next ones, and how many were taken from the table.
    Listing(VecDeque<Arc<Disk>>, usize),
    Over,
}

/// One negotiation (proto.md, "Fixed newstyle negotiation").
pub struct Handshake<'a> {
    disks: &'a Disks,
    door: &'a Door<'a>,
    rules: &'a Rules,
    client: Identity,
    tls: TlsUse,
    /// The last disk that the client asked for and may not use.
    denied: Option<String>,
    state: State,
    input: Vec<u8>,
    output: Vec<u8>,
    options_seen: u32,
    lists_seen: u32,
    fixed: bool,
    no_zeroes: bool,
    mode: Mode,
    /// Contexts that were selected, and the export for which they were.
    selected: Option<(String, Contexts)>,
}

impl<'a> Handshake<'a> {
    /// A fresh one; the greeting is in its output.
    pub fn new(disks: &'a Disks) -> Handshake<'a> {
        Handshake::with_door(disks, &|_| Ok(()))
    }

    /// As [`Handshake::new`], with somebody who may refuse clients.
    pub fn with_door(disks: &'a Disks, door: &'a Door<'a>) -> Handshake<'a> {
        let mut output = Vec::with_capacity(256);
        output.extend_from_slice(&NBDMAGIC.to_be_bytes());
        output.extend_from_slice(&IHAVEOPT.to_be_bytes());
        output.extend_from_slice(&(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
        Handshake {
            disks,
            door,
            rules: Rules::everyone(),
            client: Identity::default(),
            tls: TlsUse::Absent,
            denied: None,
            state: State::ClientFlags,
            input: Vec::new(),
            output,
            options_seen: 0,
            lists_seen: 0,
            fixed: false,
            no_zeroes: false,
            mode: Mode::Simple,
            selected: None,
        }
    }

    /// With these rules for this client, and TLS or not.
    #[must_use]
    pub fn admitting(self, rules: &'a Rules, client: Identity, tls: TlsUse) -> Handshake<'a> {
        Handshake {
            rules,
            client,
            tls,
            ..self
        }
    }

    /// TLS has begun, with a client whose certificate has these names. Everything that was agreed on before it is forgotten (proto.md, "TLS support").
    pub fn secured(&mut self, names: Vec<String>) {
        self.tls = TlsUse::Established;
        self.client.names = names;
        self.mode = Mode::Simple;
        self.selected = None;
    }

    /// The client, as far as it is known.
    pub fn client(&self) -> &Identity {
        &self.client
    }

    /// A disk that the client asked for since the last call, and that it may not use.
    pub fn take_denied(&mut self) -> Option<String> {
        self.denied.take()
    }

    /// Bytes to send to the client; empties them here.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Takes bytes from the client. An error means that the connection has to be closed. After
    /// [`Step::Done`] or [`Step::Aborted`] further bytes are refused.
    ///
    /// Feed it in small pieces (4 KiB). Its output is bounded: [`Step::Output`].
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Step, Error> {
        self.input.extend_from_slice(bytes);
        let mut used = 0;
        let step = self.run(&mut used);
        self.input.drain(..used);
        match step {
            Ok(Step::More | Step::Output) => {}
            // Whoever put bytes between this option and TLS isn't the client.
            Ok(Step::StartTls) if !self.input.is_empty() => {
                self.state = State::Over;
                return Err(Error::protocol("bytes between NBD_OPT_STARTTLS and TLS"));
            }
            Ok(Step::StartTls) => {}
            Ok(Step::Done(mut n)) => {
                self.state = State::Over;
                n.leftover = std::mem::take(&mut self.input);
                return Ok(Step::Done(n));
            }
            _ => self.state = State::Over,
        }
        step
    }

    fn run(&mut self, used: &mut usize) -> Result<Step, Error> {
        loop {
            if self.output.len() >= MOST_OUTPUT {
                return Ok(Step::Output);
            }
            let at = *used;
            let rest = &self.input[at..];
            match &self.state {
                State::Over => return Err(Error::protocol("bytes after the negotiation's end")),
                State::Listing(..) => self.list_more(),
                State::ClientFlags => {
                    if rest.len() < 4 {
                        return Ok(Step::More);
                    }
                    let flags = u32_at(rest, 0);
                    let known = u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
                    if flags & !known != 0 {
                        return Err(Error::protocol(format!(
                            "the client sets unknown handshake flags {flags:#x}"
                        )));
                    }
                    self.fixed = flags & u32::from(FLAG_FIXED_NEWSTYLE) != 0;
                    self.no_zeroes = flags & u32::from(FLAG_NO_ZEROES) != 0;
                    self.state = State::Options;
                    *used += 4;
                }
                State::Options => {
                    if rest.len() < OPTION_BYTES {
                        return Ok(Step::More);
                    }
                    if u64_at(rest, 0) != IHAVEOPT {
                        return Err(Error::protocol("an option doesn't start with IHAVEOPT"));
                    }
                    let option = u32_at(rest, 8);
                    let len = u32_at(rest, 12) as usize;
                    if len > MAX_OPTION {
                        return Err(Error::protocol(format!(
                            "option {option} has {len} bytes, more than {MAX_OPTION}"
                        )));
                    }
                    if rest.len() < OPTION_BYTES + len {
                        return Ok(Step::More);
                    }
                    *used += OPTION_BYTES + len;
                    self.options_seen += 1;
                    if self.options_seen > MAX_OPTIONS {
                        return Err(Error::protocol(format!(
                            "more than {MAX_OPTIONS} options in one negotiation"
                        )));
                    }
                    let payload = self.input[at + OPTION_BYTES..*used].to_vec();
                    match self.option(option, &payload)? {
                        Step::More => {}
                        end => return Ok(end),
                    }
                }
            }
        }
    }

    /// One complete option.
    fn option(&mut self, option: u32, payload: &[u8]) -> Result<Step, Error> {
        let in_clear = self.tls == TlsUse::Required;
        if option == opt::EXPORT_NAME {
            if in_clear {
                return Err(Error::protocol("the client asks for an export without TLS"));
            }
            return self.export_name(payload);
        }
        if !self.fixed {
            // Such a client wouldn't understand a reply.
            return Err(Error::protocol(format!(
                "option {option} from a client that doesn't know fixed newstyle"
            )));
        }
        let done = match option {
            opt::ABORT => {
                self.ack(option);
                return Ok(Step::Aborted);
            }
            opt::STARTTLS => match self.start_tls(payload) {
                Ok(()) => return Ok(Step::StartTls),
                Err(refusal) => Err(refusal),
            },
            _ if in_clear => Err(rep::ERR_TLS_REQD),
            opt::LIST => self.list(payload),
            opt::INFO | opt::GO => match self.info(option, payload) {
                Ok(Some(n)) => return Ok(Step::Done(n)),
                Ok(None) => Ok(()),
                Err(refusal) => Err(refusal),
            },
            opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS => self.agree(option, payload),
            opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => self.contexts(option, payload),
            _ => Err(rep::ERR_UNSUP),
        };
        if let Err(refusal) = done {
            options::refuse(&mut self.output, option, refusal);
        }
        Ok(Step::More)
    }

    fn start_tls(&mut self, payload: &[u8]) -> Result<(), Refusal> {
        match self.tls {
            TlsUse::Absent => return Err(rep::ERR_UNSUP),
            TlsUse::Established => return Err(rep::ERR_INVALID),
            TlsUse::Offered | TlsUse::Required => {}
        }
        if !payload.is_empty() {
            return Err(rep::ERR_INVALID);
        }
        self.ack(opt::STARTTLS);
        Ok(())
    }

    /// Structured replies or extended headers; the latter include the former.
    fn agree(&mut self, option: u32, payload: &[u8]) -> Result<(), Refusal> {
        let is_extended = option == opt::EXTENDED_HEADERS;
        if !payload.is_empty() || (is_extended && self.mode == Mode::Extended) {
            return Err(rep::ERR_INVALID);
        }
        self.mode = match self.mode {
            _ if is_extended => Mode::Extended,
            Mode::Extended => return Err(rep::ERR_EXT_HEADER_REQD),
            _ => Mode::Structured,
        };
        self.ack(option);
        Ok(())
    }

    fn ack(&mut self, option: u32) {
        options::reply(&mut self.output, option, rep::ACK, &[]);
    }

    /// Finds an export that is there for the client; the empty name stands for the default one.
    fn find(&mut self, name: &str) -> Result<Arc<Disk>, Refusal> {
        let disk = self.disks.export(name).ok_or(rep::ERR_UNKNOWN)?;
        if self.rights(&disk) == Rights::None {
            self.denied = Some(disk.name().to_owned());
            return Err(rep::ERR_UNKNOWN);
        }
        Ok(disk)
    }

    fn rights(&self, disk: &Disk) -> Rights {
        self.rules.rights(&self.client, disk.name())
    }

    /// Transmission flags of a disk for the client.
    fn flags(&self, disk: &Disk) -> u16 {
        let mut limits = disk.device().limits();
        limits.read_only |= self.rights(disk) < Rights::ReadWrite;
        let mut flags = proto::transmission_flags(&limits, self.mode);
        if self.mode == Mode::Extended && !self.selection(disk).is_empty() {
            flags |= tflag::BLOCK_STATUS_PAYLOAD;
        }
        flags
    }

    /// The contexts that were selected for a disk.
    fn selection(&self, disk: &Disk) -> Contexts {
        match &self.selected {
            Some((name, contexts)) if name == disk.name() => *contexts,
            _ => Contexts::default(),
        }
    }

    fn negotiated(&self, disk: &Disk) -> Box<Negotiated> {
        let device = Arc::clone(disk.device());
        let flags = self.flags(disk);
        Box::new(Negotiated {
            contexts: self.selection(disk),
            export: disk.name().to_owned(),
            device,
            transmission_flags: flags,
            mode: self.mode,
            no_zeroes: self.no_zeroes,
            leftover: Vec::new(),
        })
    }

    fn export_name(&mut self, payload: &[u8]) -> Result<Step, Error> {
        // This option has no error reply: whatever is wrong closes the connection.
        if self.mode == Mode::Extended {
            return Err(Error::protocol(
                "NBD_OPT_EXPORT_NAME after extended headers were agreed on",
            ));
        }
        let name = options::text(payload)
            .ok()
            .filter(|n| n.len() <= proto::MAX_STRING)
            .ok_or_else(|| Error::protocol("the export's name is not a string of the protocol"))?;
        let disk = self
            .find(name)
            .map_err(|_| Error::protocol(format!("the client asks for unknown export {name:?}")))?;
        (self.door)(&disk).map_err(Error::protocol)?;
        let n = self.negotiated(&disk);
        let size = n.device.capacity_sectors().saturating_mul(SECTOR);
        self.output.extend_from_slice(&size.to_be_bytes());
        self.output
            .extend_from_slice(&n.transmission_flags.to_be_bytes());
        if !self.no_zeroes {
            self.output.extend_from_slice(&[0; 124]);
        }
        Ok(Step::Done(n))
    }

    fn list(&mut self, payload: &[u8]) -> Result<(), Refusal> {
        if !payload.is_empty() {
            return Err(rep::ERR_INVALID);
        }
        self.lists_seen += 1;
        if self.lists_seen > MAX_LISTS {
            return Err(rep::ERR_POLICY);
        }
        self.state = State::Listing(VecDeque::new(), 0);
        Ok(())
    }

    /// One more export of a list, or its end.
    fn list_more(&mut self) {
        let State::Listing(next, taken) = &mut self.state else {
            return;
        };
        if next.is_empty() {
            next.extend(self.disks.page(*taken, PAGE));
            *taken += next.len();
        }
        let Some(disk) = next.pop_front() else {
            self.state = State::Options;
            return self.ack(opt::LIST);
        };
        if disk.name().len() > proto::MAX_STRING || self.rights(&disk) == Rights::None {
            return;
        }
        let (name, about) = (disk.name().as_bytes(), options::about(&**disk.device()));
        let text = &about.as_bytes()[..about.floor_char_boundary(proto::MAX_STRING)];
        options::reply(
            &mut self.output,
            opt::LIST,
            rep::SERVER,
            &[&(name.len() as u32).to_be_bytes(), name, text],
        );
    }

    fn info(&mut self, option: u32, payload: &[u8]) -> Result<Option<Box<Negotiated>>, Refusal> {
        let (name, wanted) = options::parse_info(payload)?;
        let disk = self.find(name)?;
        if option == opt::GO
            && let Err(why) = (self.door)(&disk)
        {
            let why = [why.as_bytes()];
            options::reply(&mut self.output, option, rep::ERR_POLICY, &why);
            return Ok(None);
        }
        let flags = self.flags(&disk);
        options::describe(
            &mut self.output,
            option,
            &**disk.device(),
            flags,
            disk.name(),
            &wanted,
        );
        self.ack(option);
        Ok((option == opt::GO).then(|| self.negotiated(&disk)))
    }

    fn contexts(&mut self, option: u32, payload: &[u8]) -> Result<(), Refusal> {
        let set = option == opt::SET_META_CONTEXT;
        if set {
            // A selection that fails leaves none.
            self.selected = None;
        }
        if !self.mode.has_chunks() {
            return Err(rep::ERR_INVALID);
        }
        let (name, mut queries) = options::parse_contexts(payload)?;
        let disk = self.find(name)?;
        let available = block_status::contexts(&**disk.device());
        let wanted = match queries.is_empty() {
            true if !set => available,
            _ => queries.try_fold(Contexts::default(), |all, query| {
                Ok::<_, Refusal>(all.with(available.named_by(query?, !set)))
            })?,
        };
        for context in wanted.iter() {
            options::context(&mut self.output, option, context, set);
        }
        if set {
            self.selected = Some((disk.name().to_owned(), wanted));
        }
        self.ack(option);
        Ok(())
    }
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
