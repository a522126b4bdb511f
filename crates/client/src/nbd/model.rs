//! For tests: an NBD server with a volatile cache, which crashes where a seed says so.

use fastrand::Rng;
use parking_lot::Mutex;
use pvblk_protocol::nbd::{
    self as proto, Command, FLAG_FIXED_NEWSTYLE, IHAVEOPT, Mode, NBDMAGIC, OPTION_REPLY_MAGIC,
    cflag, info, opt, rep, u32_at, u64_at,
};
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The server's disk, and the choices that are left to chance.
pub struct Model {
    pub rng: Rng,
    /// Contents that survive a crash.
    pub stable: Vec<u8>,
    /// Contents that reads see.
    pub visible: Vec<u8>,
    /// Writes that no flush covers, in order of their execution.
    unflushed: Vec<(usize, Vec<u8>)>,
    /// Transmission flags that the next connections are told.
    pub flags: u16,
    pub mode: Mode,
    /// One of so many commands crashes the server; 0: none does.
    pub crash_odds: u32,
    /// Crashes right after the answer to the flush of this number, from 1 on.
    pub crash_after_flush: Option<u64>,
    pub crashes: u32,
    /// Commands that were executed, by number.
    pub commands: [u64; 8],
    /// Connections that were accepted.
    pub accepted: u32,
    epoch: u64,
    streams: Vec<UnixStream>,
    /// Says on each new connection that it has this size instead.
    pub told_bytes: Option<u64>,
    /// Ends a connection at its first command, without an answer.
    pub hangs_up: bool,
    /// Writes wait before they are executed.
    pub holds_writes: bool,
    /// Answers each question for block status so: bytes and state of each extent.
    pub told_status: Option<Vec<(u32, u32)>>,
}

impl Model {
    /// Loses each unflushed write or keeps it, and ends all connections.
    pub fn crash(&mut self) {
        self.crashes += 1;
        self.epoch += 1;
        for (at, data) in std::mem::take(&mut self.unflushed) {
            if self.rng.u8(..4) == 0 {
                self.stable[at..at + data.len()].copy_from_slice(&data);
            }
        }
        self.visible = self.stable.clone();
        for stream in self.streams.drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    fn write(&mut self, at: usize, data: &[u8], fua: bool) {
        let volatile = self.flags & proto::tflag::SEND_FLUSH != 0;
        self.visible[at..at + data.len()].copy_from_slice(data);
        if volatile && !fua {
            self.unflushed.push((at, data.to_vec()));
            return;
        }
        // Stable: older data in the cache must not come over it.
        self.stable[at..at + data.len()].copy_from_slice(data);
        self.unflushed.push((at, data.to_vec()));
        if !volatile {
            self.unflushed.clear();
        } else {
            self.settle(at, data.len());
        }
    }

    /// The cache's data of this range is stable.
    fn settle(&mut self, at: usize, len: usize) {
        let visible = &self.visible;
        for (from, data) in &mut self.unflushed {
            let (lo, hi) = ((*from).max(at), (*from + data.len()).min(at + len));
            if lo < hi {
                data[lo - *from..hi - *from].copy_from_slice(&visible[lo..hi]);
            }
        }
    }

    fn execute(&mut self, command: &Taken) {
        self.commands[usize::from(command.number)] += 1;
        let (at, len) = (command.offset as usize, command.len as usize);
        let fua = command.flags & cflag::FUA != 0;
        match Command::from(command.number) {
            Command::Write => self.write(at, &command.data, fua),
            Command::WriteZeroes => self.write(at, &vec![0; len], fua),
            Command::Flush => {
                self.stable = self.visible.clone();
                self.unflushed.clear();
            }
            _ => {}
        }
    }
}

struct Taken {
    flags: u16,
    number: u16,
    cookie: u64,
    offset: u64,
    len: u64,
    data: Vec<u8>,
}

/// A listening server; ends with the process.
pub struct ModelServer {
    pub path: PathBuf,
    pub model: Arc<Mutex<Model>>,
    _dir: tempfile::TempDir,
}

impl ModelServer {
    pub fn start(bytes: usize, flags: u16, mode: Mode, seed: u64) -> ModelServer {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let model = Arc::new(Mutex::new(Model {
            rng: Rng::with_seed(seed),
            stable: vec![0; bytes],
            visible: vec![0; bytes],
            unflushed: Vec::new(),
            flags,
            mode,
            crash_odds: 0,
            crash_after_flush: None,
            crashes: 0,
            commands: [0; 8],
            accepted: 0,
            epoch: 0,
            streams: Vec::new(),
            told_bytes: None,
            hangs_up: false,
            holds_writes: false,
            told_status: None,
        }));
        let server = ModelServer {
            path,
            model,
            _dir: dir,
        };
        server.listen();
        server
    }

    /// Listens, again if it was [`ModelServer::away`].
    pub fn listen(&self) {
        let listener = UnixListener::bind(&self.path).unwrap();
        let model = Arc::clone(&self.model);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let model = Arc::clone(&model);
                std::thread::spawn(move || {
                    // An error is the end of the connection.
                    let _ = serve(&model, stream);
                });
            }
        });
    }

    /// Crashes, and nobody can connect any more.
    pub fn away(&self) {
        // The listener stays with its thread, but nobody finds it.
        std::fs::remove_file(&self.path).unwrap();
        self.model.lock().crash();
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn serve(model: &Mutex<Model>, mut stream: UnixStream) -> io::Result<()> {
    let epoch = {
        let mut m = model.lock();
        m.accepted += 1;
        m.streams.push(stream.try_clone()?);
        m.epoch
    };
    negotiate(model, &mut stream)?;
    let mode = model.lock().mode;
    loop {
        let mut batch = vec![take(&mut stream, mode)?];
        stream.set_nonblocking(true)?;
        let mut peeked = [0; 1];
        while batch.len() < 8 && rustix_peek(&stream, &mut peeked) {
            stream.set_nonblocking(false)?;
            batch.push(take(&mut stream, mode)?);
            stream.set_nonblocking(true)?;
        }
        stream.set_nonblocking(false)?;
        model.lock().rng.shuffle(&mut batch);
        for command in &batch {
            if command.number == 2 {
                return Ok(());
            }
            if model.lock().hangs_up {
                return stream.shutdown(std::net::Shutdown::Both);
            }
            while command.number == 1 && model.lock().holds_writes {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let reply = {
                let mut m = model.lock();
                if m.epoch != epoch {
                    return Ok(());
                }
                let crashes = m.crash_odds > 0 && {
                    let odds = m.crash_odds;
                    m.rng.u32(..odds) == 0
                };
                let point = m.rng.u8(..3);
                if crashes && point == 0 {
                    m.crash();
                    return Ok(());
                }
                m.execute(command);
                let reply = reply(&m, command, mode);
                if command.number == 3 && m.crash_after_flush == Some(m.commands[3]) {
                    let _ = stream.write_all(&reply);
                    m.crash();
                    return Ok(());
                }
                if crashes {
                    // Before the reply, in its middle, or after it.
                    let n = [0, reply.len() / 2, reply.len()][usize::from(m.rng.u8(..3))];
                    let _ = stream.write_all(&reply[..n]);
                    m.crash();
                    return Ok(());
                }
                reply
            };
            stream.write_all(&reply)?;
        }
    }
}

fn rustix_peek(stream: &UnixStream, byte: &mut [u8; 1]) -> bool {
    let flags = rustix::net::RecvFlags::PEEK;
    matches!(rustix::net::recv(stream, &mut byte[..], flags), Ok((_, n)) if n > 0)
}

fn reply(m: &Model, command: &Taken, mode: Mode) -> Vec<u8> {
    let (cookie, offset) = (command.cookie, command.offset);
    let chunk = |kind, payload: usize| {
        let head = proto::last_chunk(mode, kind, cookie, offset, payload as u32);
        head.as_bytes().to_vec()
    };
    let (at, len) = (command.offset as usize, command.len as usize);
    if command.number == 7 {
        let extended = mode == Mode::Extended;
        let mut payload = 9u32.to_be_bytes().to_vec();
        if extended {
            let count = len.div_ceil(4096).min(10) as u32;
            payload.extend(count.to_be_bytes());
        }
        let mut left = command.len;
        for (bytes, state) in m.told_status.iter().flatten() {
            payload.extend([*bytes, *state].map(u32::to_be_bytes).concat());
        }
        let blocks = if m.told_status.is_some() { 0 } else { 10 };
        // Holes as they are on the disk, in blocks of 4 KiB; at most 10 of them.
        for block in m.visible[at..at + len].chunks(4096).take(blocks) {
            let zero = block.iter().all(|&b| b == 0);
            let n = left.min(block.len() as u64);
            let state = if zero { 3 } else { 0 };
            match extended {
                true => payload.extend([n, state].map(u64::to_be_bytes).concat()),
                false => payload.extend([n as u32, state as u32].map(u32::to_be_bytes).concat()),
            }
            left -= n;
        }
        let kind = match extended {
            true => proto::chunk::BLOCK_STATUS_EXT,
            false => proto::chunk::BLOCK_STATUS,
        };
        let mut b = chunk(kind, payload.len());
        b.extend(payload);
        return b;
    }
    let data = match command.number {
        0 => &m.visible[at..at + len],
        _ => &[],
    };
    if mode == Mode::Extended && command.number != 0 {
        return chunk(proto::chunk::NONE, 0);
    }
    if mode == Mode::Simple || command.number != 0 {
        let mut b = proto::simple_reply(command.cookie, 0).to_vec();
        b.extend(data);
        return b;
    }
    let mut b = chunk(proto::chunk::OFFSET_DATA, 8 + len);
    b.extend(command.offset.to_be_bytes());
    b.extend(data);
    b
}

fn take(stream: &mut UnixStream, mode: Mode) -> io::Result<Taken> {
    let mut head = [0; proto::EXTENDED_BYTES];
    stream.read_exact(&mut head[..mode.request_bytes()])?;
    let (magic, len) = match mode {
        Mode::Extended => (proto::EXTENDED_REQUEST_MAGIC, u64_at(&head, 24)),
        _ => (proto::REQUEST_MAGIC, u64::from(u32_at(&head, 24))),
    };
    assert_eq!(u32_at(&head, 0), magic);
    let mut taken = Taken {
        flags: (u32_at(&head, 4) >> 16) as u16,
        number: u32_at(&head, 4) as u16,
        cookie: u64_at(&head, 8),
        offset: u64_at(&head, 16),
        len,
        data: Vec::new(),
    };
    let has_payload = taken.flags & cflag::PAYLOAD_LEN != 0;
    assert_eq!(has_payload, mode == Mode::Extended && taken.number == 1);
    if taken.number == 1 {
        taken.data = vec![0; taken.len as usize];
        stream.read_exact(&mut taken.data)?;
    }
    Ok(taken)
}

fn negotiate(model: &Mutex<Model>, stream: &mut UnixStream) -> io::Result<()> {
    stream.write_all(&NBDMAGIC.to_be_bytes())?;
    stream.write_all(&IHAVEOPT.to_be_bytes())?;
    stream.write_all(&(FLAG_FIXED_NEWSTYLE | proto::FLAG_NO_ZEROES).to_be_bytes())?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let option = u32_at(&head, 8);
        stream.read_exact(&mut vec![0; u32_at(&head, 12) as usize])?;
        let mut say = |kind: u32, payload: &[u8]| {
            let mut b = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
            b.extend(option.to_be_bytes());
            b.extend(kind.to_be_bytes());
            b.extend((payload.len() as u32).to_be_bytes());
            b.extend(payload);
            stream.write_all(&b)
        };
        let (mode, bytes, flags) = {
            let m = model.lock();
            let bytes = m.told_bytes.unwrap_or(m.visible.len() as u64);
            (m.mode, bytes, m.flags)
        };
        match option {
            opt::EXTENDED_HEADERS if mode == Mode::Extended => say(rep::ACK, &[])?,
            opt::STRUCTURED_REPLY if mode == Mode::Structured => say(rep::ACK, &[])?,
            opt::SET_META_CONTEXT => {
                let mut context = 9u32.to_be_bytes().to_vec();
                context.extend(proto::Context::Allocation.name().as_bytes());
                say(rep::META_CONTEXT, &context)?;
                say(rep::ACK, &[])?;
            }
            opt::GO => {
                let mut export = info::EXPORT.to_be_bytes().to_vec();
                export.extend(bytes.to_be_bytes());
                export.extend(flags.to_be_bytes());
                say(rep::INFO, &export)?;
                say(rep::ACK, &[])?;
                return Ok(());
            }
            _ => say(rep::ERR_UNSUP, &[])?,
        }
    }
}
