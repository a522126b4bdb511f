//! Every field and negotiated flag of a request is checked here before anything is done with it.

use pvblk_block::SECTOR;
use pvblk_protocol::nbd::{
    Command, Contexts, LONGEST_QUESTION, MAX_PAYLOAD, Mode, NbdRequest, cflag, err, tflag,
};

/// The terms that a connection negotiated, and the size that its device has now.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Transmission flags that the client was told ([`tflag`]).
    pub transmission_flags: u16,
    pub mode: Mode,
    /// The metadata contexts that were selected.
    pub contexts: Contexts,
    /// Size of the export in bytes, now.
    pub size_bytes: u64,
}

impl Terms {
    /// The terms of a connection to a device that has `sectors` (512 B).
    pub fn new(flags: u16, mode: Mode, contexts: Contexts, sectors: u64) -> Terms {
        Terms {
            transmission_flags: flags,
            mode,
            contexts,
            size_bytes: sectors.saturating_mul(SECTOR),
        }
    }

    fn has(&self, flag: u16) -> bool {
        self.transmission_flags & flag != 0
    }
}

/// The decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Run,
    /// Look at the payload first: it has the length of the range, and the contexts.
    Question,
    /// Answer success without reaching the device: the length is 0.
    Nothing,
    /// Answer this error ([`err`]). The payload, if there is one, has to be skipped first.
    Refuse(u32),
    /// The client is leaving; no reply.
    Disconnect,
}

/// Checks a request (proto.md, "Request types" and "Command flags").
///
/// Zero lengths, which the document leaves open, succeed and do nothing. A write or a write-zeroes past
/// the end is ENOSPC; any other range error, a length over [`MAX_PAYLOAD`] of a read or a write, an unknown command, a flag or a
/// command that was not negotiated, a write without a payload, a payload of a command that has none: EINVAL. Writing to a read-only export: EPERM. Any offset and length is fine: the minimum block size is 1.
pub fn check(r: &NbdRequest, t: &Terms) -> Verdict {
    let (own_flags, needed) = match r.command {
        Command::Disconnect => return Verdict::Disconnect,
        Command::Read if t.mode.has_chunks() && t.has(tflag::SEND_DF) => (cflag::DF, 0),
        Command::Read | Command::Write => (0, 0),
        Command::Flush => (0, tflag::SEND_FLUSH),
        Command::Trim => (0, tflag::SEND_TRIM),
        Command::WriteZeroes if t.has(tflag::SEND_FAST_ZERO) => {
            (cflag::NO_HOLE | cflag::FAST_ZERO, tflag::SEND_WRITE_ZEROES)
        }
        Command::WriteZeroes => (cflag::NO_HOLE, tflag::SEND_WRITE_ZEROES),
        Command::BlockStatus if !t.contexts.is_empty() => (cflag::REQ_ONE, 0),
        Command::Cache => (0, tflag::SEND_CACHE),
        Command::BlockStatus | Command::Unknown(_) => {
            return Verdict::Refuse(err::EINVAL);
        }
    };
    let asks = r.command == Command::BlockStatus
        && r.payload != 0
        && r.payload as usize <= LONGEST_QUESTION
        && t.has(tflag::BLOCK_STATUS_PAYLOAD);
    let carried = match r.command {
        Command::Write => r.len,
        _ if asks => u64::from(r.payload),
        _ => 0,
    };
    if u64::from(r.payload) != carried {
        return Verdict::Refuse(err::EINVAL);
    }
    // FUA is valid with every command once SEND_FUA is negotiated; where nothing is written it means nothing.
    let fua = if t.has(tflag::SEND_FUA) {
        cflag::FUA
    } else {
        0
    };
    if r.flags & !(own_flags | fua) != 0 {
        return Verdict::Refuse(err::EINVAL);
    }
    let writes = matches!(
        r.command,
        Command::Write | Command::Trim | Command::WriteZeroes
    );
    if writes && t.has(tflag::READ_ONLY) {
        return Verdict::Refuse(err::EPERM);
    }
    if needed != 0 && !t.has(needed) {
        return Verdict::Refuse(err::EINVAL);
    }
    if r.command == Command::Flush {
        // Offset and length are reserved and must be zero.
        return if r.offset == 0 && r.len == 0 {
            Verdict::Run
        } else {
            Verdict::Refuse(err::EINVAL)
        };
    }
    if matches!(r.command, Command::Read | Command::Write) && r.len > u64::from(MAX_PAYLOAD) {
        return Verdict::Refuse(err::EINVAL);
    }
    if asks {
        return Verdict::Question;
    }
    let past_end = match r.offset.checked_add(r.len) {
        Some(end) => end > t.size_bytes,
        None => true,
    };
    if past_end {
        let stores = matches!(r.command, Command::Write | Command::WriteZeroes);
        return Verdict::Refuse(if stores { err::ENOSPC } else { err::EINVAL });
    }
    match (r.len, r.command) {
        // A block status reply needs at least one extent, so there is no empty success.
        (0, Command::BlockStatus) => Verdict::Refuse(err::EINVAL),
        (0, _) => Verdict::Nothing,
        _ => Verdict::Run,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_block::Limits;
    use pvblk_protocol::nbd::{Context, transmission_flags};

    fn terms(limits: Limits, structured: bool) -> Terms {
        let mode = match structured {
            true => Mode::Structured,
            false => Mode::Simple,
        };
        let f = transmission_flags(&limits, mode);
        let contexts = Contexts::from_iter(structured.then_some(Context::Allocation));
        Terms::new(f, mode, contexts, 2048)
    }

    fn ask(command: Command, flags: u16, offset: u64, len: u32) -> NbdRequest {
        NbdRequest {
            flags,
            command,
            cookie: 0,
            offset,
            len: u64::from(len),
            payload: if command == Command::Write { len } else { 0 },
        }
    }

    #[test]
    fn only_a_write_has_a_payload() {
        let t = terms(Limits::default(), true);
        let with = |command, len, payload| NbdRequest {
            len,
            payload,
            ..ask(command, 0, 0, 0)
        };
        for (request, want) in [
            (with(Command::Write, 512, 512), Verdict::Run),
            (with(Command::Write, 512, 0), Verdict::Refuse(err::EINVAL)),
            (with(Command::Write, 0, 0), Verdict::Nothing),
            (
                with(Command::BlockStatus, 12, 12),
                Verdict::Refuse(err::EINVAL),
            ),
            (with(Command::Read, 8, 8), Verdict::Refuse(err::EINVAL)),
        ] {
            assert_eq!(check(&request, &t), want, "{request:?}");
        }
        // A question has one where that was agreed on.
        let mut t = t;
        t.transmission_flags |= tflag::BLOCK_STATUS_PAYLOAD;
        let longest = LONGEST_QUESTION as u32;
        for (payload, offset, want) in [
            (12, 0, Verdict::Question),
            // The range's length is in the payload.
            (12, u64::MAX, Verdict::Question),
            (longest, 0, Verdict::Question),
            (longest + 1, 0, Verdict::Refuse(err::EINVAL)),
            (MAX_PAYLOAD, 0, Verdict::Refuse(err::EINVAL)),
        ] {
            let len = u64::from(payload);
            let request = NbdRequest {
                offset,
                ..with(Command::BlockStatus, len, payload)
            };
            assert_eq!(check(&request, &t), want, "{request:?}");
            let odd = NbdRequest {
                flags: cflag::NO_HOLE,
                ..request
            };
            assert_eq!(check(&odd, &t), Verdict::Refuse(err::EINVAL));
        }
    }

    #[test]
    fn each_violation_has_its_error() {
        use Command::{BlockStatus, Cache, Flush, Read, Trim, Unknown, Write, WriteZeroes};
        use Verdict::{Nothing, Refuse, Run};
        let plain = Limits::default();
        let caching = Limits {
            caches_reads: true,
            ..plain
        };
        let ro = Limits {
            read_only: true,
            ..plain
        };
        let poor = Limits {
            write_zeroes: false,
            discard_granularity_bytes: 0,
            ..plain
        };
        const MIB: u64 = 1 << 20;
        let einval = Refuse(err::EINVAL);
        let table = [
            (plain, true, ask(Read, 0, 0, 4096), Run),
            (plain, true, ask(Read, cflag::DF, 0, 4096), Run),
            (plain, false, ask(Read, cflag::DF, 0, 4096), einval),
            (plain, false, ask(Read, cflag::FUA, 0, 4096), Run),
            (plain, false, ask(Read, cflag::NO_HOLE, 0, 4096), einval),
            (plain, false, ask(Read, 1 << 15, 0, 4096), einval),
            (plain, false, ask(Read, 0, MIB - 512, 512), Run),
            (plain, false, ask(Read, 0, MIB - 512, 1024), einval),
            (plain, false, ask(Read, 0, u64::MAX - 511, 512), einval),
            (plain, false, ask(Read, 0, u64::MAX, 1), einval),
            (plain, false, ask(Read, 0, 1, 512), Run),
            (plain, false, ask(Read, 0, 0, 511), Run),
            (plain, false, ask(Read, 0, MIB - 1, 1), Run),
            (plain, false, ask(Read, 0, MIB - 1, 2), einval),
            (plain, false, ask(Read, 0, 512, 0), Nothing),
            (plain, false, ask(Read, 0, 0, MAX_PAYLOAD + 512), einval),
            (plain, false, ask(Write, 0, 7, 1), Run),
            (plain, false, ask(Write, 0, MIB - 7, 8), Refuse(err::ENOSPC)),
            (plain, false, ask(Write, cflag::FUA, 0, 512), Run),
            (plain, false, ask(Write, cflag::DF, 0, 512), einval),
            (plain, false, ask(Write, 0, MIB, 512), Refuse(err::ENOSPC)),
            (plain, false, ask(Write, 0, 0, MAX_PAYLOAD + 1), einval),
            (plain, false, ask(Write, 0, 0, u32::MAX), einval),
            (ro, false, ask(Write, 0, 0, 512), Refuse(err::EPERM)),
            (ro, false, ask(Trim, 0, 0, 512), Refuse(err::EPERM)),
            (plain, false, ask(Flush, 0, 0, 0), Run),
            (plain, false, ask(Flush, cflag::FUA, 0, 0), Run),
            (plain, false, ask(Flush, 0, 0, 512), einval),
            (plain, false, ask(Trim, cflag::FUA, 0, 512), Run),
            (plain, false, ask(Trim, 0, MIB, 512), einval),
            (poor, false, ask(Trim, 0, 0, 512), einval),
            (poor, false, ask(WriteZeroes, 0, 0, 512), Run),
            (
                poor,
                false,
                ask(WriteZeroes, cflag::FAST_ZERO, 0, 512),
                einval,
            ),
            (plain, false, ask(WriteZeroes, 0b1_0011, 0, 512), Run),
            (
                plain,
                false,
                ask(WriteZeroes, 0, MIB, 512),
                Refuse(err::ENOSPC),
            ),
            (plain, true, ask(BlockStatus, cflag::REQ_ONE, 0, 512), Run),
            (plain, true, ask(BlockStatus, 0, 0, 0), einval),
            (plain, false, ask(BlockStatus, 0, 0, 512), einval),
            (plain, false, ask(Cache, 0, 0, 512), einval),
            (caching, false, ask(Cache, 0, 0, 512), Run),
            (caching, false, ask(Cache, cflag::DF, 0, 512), einval),
            (plain, false, ask(Unknown(8), 0, 0, 512), einval),
            (
                plain,
                false,
                ask(Command::Disconnect, 0xffff, 9, 9),
                Verdict::Disconnect,
            ),
        ];
        for (limits, structured, request, want) in table {
            assert_eq!(
                check(&request, &terms(limits, structured)),
                want,
                "{request:?}"
            );
        }
    }

    #[test]
    fn huge_trims_are_fine_on_huge_exports() {
        let mut t = terms(Limits::default(), false);
        t.size_bytes = 1 << 40;
        for c in [Command::Trim, Command::WriteZeroes] {
            assert_eq!(check(&ask(c, 0, 512, u32::MAX - 511), &t), Verdict::Run);
            let all = NbdRequest {
                len: 1 << 40,
                ..ask(c, 0, 0, 0)
            };
            assert_eq!(check(&all, &t), Verdict::Run);
            let len = u64::MAX;
            assert_ne!(check(&NbdRequest { len, ..all }, &t), Verdict::Run);
        }
    }
}
