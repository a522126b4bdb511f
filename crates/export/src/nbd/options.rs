//! Payloads of options and their replies; pure.

use pvblk_block::{BlockDevice, SECTOR};
use pvblk_protocol::nbd as proto;
use pvblk_protocol::nbd::{Context, MAX_STRING, OPTION_REPLY_MAGIC, info, rep, u32_at};

/// Most queries for metadata contexts in an option; we have two contexts.
const MAX_QUERIES: u32 = 64;

/// Why an option's payload is refused: an option reply error ([`rep`]).
pub(super) type Refusal = u32;

/// Takes pieces from the front of a payload.
pub(super) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, n: usize) -> Result<&'a [u8], Refusal> {
        let (head, rest) = self.0.split_at_checked(n).ok_or(rep::ERR_INVALID)?;
        self.0 = rest;
        Ok(head)
    }

    fn u16(&mut self) -> Result<u16, Refusal> {
        let b = self.bytes(2)?;
        Ok(u16::from_be_bytes([b[0], b[1]]))
    }

    fn u32(&mut self) -> Result<u32, Refusal> {
        Ok(u32_at(self.bytes(4)?, 0))
    }

    /// A string with its length in front: at most [`MAX_STRING`] bytes of UTF-8 without NUL.
    fn string(&mut self) -> Result<&'a str, Refusal> {
        let n = self.u32()? as usize;
        if n > MAX_STRING {
            return Err(rep::ERR_TOO_BIG);
        }
        text(self.bytes(n)?)
    }

    fn end(&self) -> Result<(), Refusal> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(rep::ERR_INVALID)
        }
    }
}

/// The protocol's strings are UTF-8 without NUL (proto.md, "Values").
pub(super) fn text(b: &[u8]) -> Result<&str, Refusal> {
    match std::str::from_utf8(b) {
        Ok(s) if !b.contains(&0) => Ok(s),
        _ => Err(rep::ERR_INVALID),
    }
}

/// The payload of `NBD_OPT_INFO` and `NBD_OPT_GO`: an export, and what to know about it.
pub(super) fn parse_info(payload: &[u8]) -> Result<(&str, Vec<u16>), Refusal> {
    let mut r = Reader(payload);
    let name = r.string()?;
    let n = r.u16()?;
    // Checked before the vector grows: the payload's own limit bounds it.
    let wanted = (0..n).map(|_| r.u16()).collect::<Result<Vec<_>, _>>()?;
    r.end()?;
    Ok((name, wanted))
}

/// The payload of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`: an export, and queries.
pub(super) fn parse_contexts(payload: &[u8]) -> Result<(&str, Queries<'_>), Refusal> {
    let mut r = Reader(payload);
    let name = r.string()?;
    let n = r.u32()?;
    let queries = Queries { rest: r, left: n };
    // A payload that isn't well-formed is that also where it has too many.
    let mut all = Queries {
        rest: Reader(queries.rest.0),
        left: n,
    };
    all.try_for_each(|query| query.map(drop))?;
    all.rest.end()?;
    match n > MAX_QUERIES {
        true => Err(rep::ERR_TOO_BIG),
        false => Ok((name, queries)),
    }
}

/// Queries for contexts, one after another.
pub(super) struct Queries<'a> {
    rest: Reader<'a>,
    left: u32,
}

impl Queries<'_> {
    pub fn is_empty(&self) -> bool {
        self.left == 0
    }
}

impl<'a> Iterator for Queries<'a> {
    type Item = Result<&'a str, Refusal>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        Some(self.rest.string())
    }
}

/// Appends an option reply.
pub(super) fn reply(out: &mut Vec<u8>, option: u32, kind: u32, payload: &[&[u8]]) {
    let len: usize = payload.iter().map(|p| p.len()).sum();
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    // Replies hold a bounded name or a short text: they fit by far.
    out.extend_from_slice(&(len as u32).to_be_bytes());
    for p in payload {
        out.extend_from_slice(p);
    }
}

/// Appends an error with a text for people.
pub(super) fn refuse(out: &mut Vec<u8>, option: u32, kind: Refusal) {
    let text = match kind {
        rep::ERR_UNSUP => "this option is not supported",
        rep::ERR_UNKNOWN => "there is no such export: ask for the list",
        rep::ERR_TOO_BIG => "a string of the option is longer than 4096 bytes, or it has too many",
        rep::ERR_POLICY => "this is not allowed here",
        rep::ERR_TLS_REQD => "this server wants TLS first",
        _ => "the option's data make no sense",
    };
    reply(out, option, kind, &[text.as_bytes()]);
}

/// A disk's description for clients, who need not know the host's files.
pub(super) fn about(device: &dyn BlockDevice) -> String {
    format!("disk of {} MiB", device.capacity_sectors() / 2048)
}

/// Appends the information on an export: size and block sizes always, the rest if it is wanted.
pub(super) fn describe(
    out: &mut Vec<u8>,
    option: u32,
    device: &dyn BlockDevice,
    flags: u16,
    name: &str,
    wanted: &[u16],
) {
    let limits = device.limits();
    let size = device.capacity_sectors().saturating_mul(SECTOR);
    reply(
        out,
        option,
        rep::INFO,
        &[
            &info::EXPORT.to_be_bytes(),
            &size.to_be_bytes(),
            &flags.to_be_bytes(),
        ],
    );
    // Always told, so that a client which never asks still learns what it has to keep to.
    let (min, preferred, max) = proto::block_sizes(&limits);
    reply(
        out,
        option,
        rep::INFO,
        &[
            &info::BLOCK_SIZE.to_be_bytes(),
            &min.to_be_bytes(),
            &preferred.to_be_bytes(),
            &max.to_be_bytes(),
        ],
    );
    let description = about(device);
    for (kind, text) in [(info::NAME, name), (info::DESCRIPTION, &description)] {
        if wanted.contains(&kind) {
            let text = &text.as_bytes()[..text.floor_char_boundary(MAX_STRING)];
            reply(out, option, rep::INFO, &[&kind.to_be_bytes(), text]);
        }
    }
}

/// Appends a metadata context, with its number if it was `selected`.
pub(super) fn context(out: &mut Vec<u8>, option: u32, context: Context, selected: bool) {
    let id = if selected { context.id() } else { 0 };
    reply(
        out,
        option,
        rep::META_CONTEXT,
        &[&id.to_be_bytes(), context.name().as_bytes()],
    );
}
