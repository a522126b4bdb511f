//! The smallest NBD server: it answers, and does nothing else. The rate of a client of this server is the
//! limit of the client itself, and of the socket.
//!
//! It grants structured replies unless told not to: clients that have them spend more on each reply, so
//! the two limits differ.
//!
//! One thread for each connection; one receive takes all requests that are there, one send answers them
//! all. Reads return the same zeros, writes are thrown away. It trusts its client, so it is for benchmarks only.

use std::io::{self, IoSlice, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Most bytes of one read that it serves.
const MAX_READ: usize = 4 << 20;
/// Most parts of one send.
const PARTS: usize = 256;
const REPLY_MAGIC: [u8; 4] = 0x6744_6698u32.to_be_bytes();

/// Serves an export of `size` bytes under any name, for ever. With `simple` it refuses structured replies.
pub fn serve(socket: &Path, size: u64, simple: bool) -> io::Result<()> {
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket)?;
    for stream in listener.incoming() {
        let mut stream = stream?;
        std::thread::spawn(move || {
            // A client that goes away is no error here.
            let _ = negotiate(&mut stream, size, simple).and_then(|s| transmit(&mut stream, s));
        });
    }
    Ok(())
}

/// True if structured replies were agreed on.
fn negotiate(s: &mut UnixStream, size: u64, simple: bool) -> io::Result<bool> {
    s.write_all(b"NBDMAGICIHAVEOPT\x00\x03")?;
    s.read_exact(&mut [0; 4])?;
    // The flags are: has flags, flush, FUA, trim, multi-connection.
    let flags = (1u16 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 8).to_be_bytes();
    let mut structured = false;
    loop {
        let mut head = [0; 16];
        s.read_exact(&mut head)?;
        let option = u32::from_be_bytes([head[8], head[9], head[10], head[11]]);
        let len = u32::from_be_bytes([head[12], head[13], head[14], head[15]]);
        let mut data = vec![0; len.min(65536) as usize];
        s.read_exact(&mut data)?;
        let reply = |kind: u32, payload: &[u8]| {
            let mut r = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
            r.extend(option.to_be_bytes());
            r.extend(kind.to_be_bytes());
            r.extend((payload.len() as u32).to_be_bytes());
            r.extend(payload);
            r
        };
        match option {
            1 => {
                s.write_all(&size.to_be_bytes())?;
                s.write_all(&flags)?;
                return Ok(structured);
            }
            2 => return Err(io::ErrorKind::ConnectionAborted.into()),
            6 | 7 => {
                let mut info = vec![0, 0];
                info.extend(size.to_be_bytes());
                info.extend(flags);
                s.write_all(&reply(3, &info))?;
                s.write_all(&reply(1, &[]))?;
                if option == 7 {
                    return Ok(structured);
                }
            }
            8 if !simple => {
                structured = true;
                s.write_all(&reply(1, &[]))?;
            }
            _ => s.write_all(&reply(0x8000_0001, &[]))?,
        }
    }
}

/// A reply's header: its bytes, their number, and the number of bytes of data that follow.
type Head = ([u8; 28], usize, usize);

/// Simple replies have 16 bytes of header; a structured one for a read has 20, and 8 of offset.
fn head(request: &[u8], data: usize, structured: bool) -> Head {
    let mut h = [0; 28];
    if structured && data > 0 {
        h[..4].copy_from_slice(&0x668e_33efu32.to_be_bytes());
        h[4..8].copy_from_slice(&[0, 1, 0, 1]); // done; offset and data
        h[8..16].copy_from_slice(&request[8..16]);
        h[16..20].copy_from_slice(&(data as u32 + 8).to_be_bytes());
        h[20..28].copy_from_slice(&request[16..24]);
        return (h, 28, data);
    }
    h[..4].copy_from_slice(&REPLY_MAGIC);
    h[8..16].copy_from_slice(&request[8..16]);
    (h, 16, data)
}

fn transmit(s: &mut UnixStream, structured: bool) -> io::Result<()> {
    let zeros = vec![0u8; MAX_READ];
    let mut buffer = vec![0u8; 1 << 20];
    let mut have = 0;
    let mut headers: Vec<Head> = Vec::new();
    loop {
        let n = s.read(&mut buffer[have..])?;
        if n == 0 {
            return Ok(());
        }
        have += n;
        let mut at = 0;
        while have - at >= 28 {
            let r = &buffer[at..at + 28];
            let kind = u16::from_be_bytes([r[6], r[7]]);
            let len = u32::from_be_bytes([r[24], r[25], r[26], r[27]]) as usize;
            let payload = if kind == 1 { len } else { 0 };
            if have - at < 28 + payload {
                break;
            }
            if kind == 2 {
                return Ok(());
            }
            let data = if kind == 0 { len.min(MAX_READ) } else { 0 };
            headers.push(head(r, data, structured));
            at += 28 + payload;
        }
        buffer.copy_within(at..have, 0);
        have -= at;
        for chunk in headers.chunks(PARTS / 2) {
            let mut parts: Vec<IoSlice> = Vec::with_capacity(PARTS);
            for (header, used, data) in chunk {
                parts.push(IoSlice::new(&header[..*used]));
                if *data > 0 {
                    parts.push(IoSlice::new(&zeros[..*data]));
                }
            }
            let mut left = &mut parts[..];
            while !left.is_empty() {
                let n = s.write_vectored(left)?;
                IoSlice::advance_slices(&mut left, n);
            }
        }
        headers.clear();
    }
}
