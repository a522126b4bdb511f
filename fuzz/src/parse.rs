//! Target `parse`: the parser on raw entries, against the model, with every use of a reference counted.

use crate::guest::{DATA_PAGES, Guest, Maps, TableMapper};
use crate::parse_model::{Verdict, judge};
use arbitrary::{Result, Unstructured};
use pvblk_backend::GrantMapper;
use pvblk_backend::parse::{Bad, Parser};
use pvblk_block::{Op, Request, RequestFlags};
use pvblk_protocol::blkif::wire::Entry;
use pvblk_sys::PAGE_SIZE;
use std::sync::{Arc, Mutex};

pub fn parse(data: &[u8]) {
    let _ = play(&mut Unstructured::new(data));
}

fn play(u: &mut Unstructured<'_>) -> Result<()> {
    let mut guest = Guest::new(1);
    let budget = if u.arbitrary()? {
        u.int_in_range(0..=20)?
    } else {
        usize::MAX
    };
    let max_indirect = *u.choose(&[0, 1, 256, 4096, u16::MAX])?;
    let counted = u.arbitrary()?;
    // Two pages of segments, the same few again and again.
    for page in 0..2 {
        let n = u.int_in_range(0..=8)?;
        let bytes = u.bytes(n * 8)?.to_vec();
        if n > 0 {
            let at = guest.data_frame(page * (DATA_PAGES / 2)) as usize * PAGE_SIZE;
            guest.poke(at, &bytes.repeat(PAGE_SIZE / bytes.len()));
        }
    }
    let maps = Arc::new(Mutex::new(Maps {
        budget,
        ..Maps::default()
    }));
    let mut mapper = TableMapper::new(&guest, counted, Arc::clone(&maps));
    let mut parser = Parser::new(max_indirect);
    let mut request = Request::new(Op::Flush, 0, 0, 0);
    for _ in 0..16 {
        let mut raw = [0; 112];
        u.fill_buffer(&mut raw)?;
        let mut entry = Entry::default();
        entry.bytes_mut().copy_from_slice(&raw);
        let left = if counted { budget } else { usize::MAX };
        let got = parser.parse(&entry, &mut mapper, &mut request);
        match (got, judge(&guest, &raw, max_indirect, left)) {
            (Ok(parsed), Verdict::Good(e)) => {
                assert_eq!((parsed.operation, entry.id()), (e.echo, e.id));
                assert_eq!((request.op, request.flags), (e.op, e.flags));
                assert_eq!((request.sector, request.sectors), (e.sector, e.sectors));
                let order = RequestFlags::PREFLUSH | RequestFlags::BARRIER;
                assert_eq!(parsed.ordered, e.flags.intersects(order));
                let sectors = |b: &pvblk_block::Buffer| {
                    let at = b.offset();
                    (0..b.len() / 512).map(move |i| at + i * 512)
                };
                let data: Vec<usize> = request.buffers.iter().flat_map(sectors).collect();
                assert_eq!(data, e.data);
                if counted {
                    let used: Vec<u32> = parser.uses.iter().map(|p| p.gref).collect();
                    assert_eq!(used, e.grefs);
                }
            }
            (Err(bad), Verdict::Bad { status, .. }) => {
                let unknown = matches!(bad, Bad::UnknownOperation(_));
                assert_eq!(status, if unknown { -2 } else { -1 }, "{bad}");
            }
            (got, Verdict::Good(e)) => panic!("{got:?}, must be {e:?}"),
            (got, Verdict::Bad { status, .. }) => panic!("{got:?}, must be answered {status}"),
        }
        // What the parser says that it mapped is exactly what is in use.
        assert!(counted || parser.uses.is_empty());
        request.buffers.clear();
        for page in parser.uses.drain(..) {
            mapper.release(page);
        }
        let maps = maps.lock().expect("one thread");
        assert!(
            maps.total == 0 && maps.live.is_empty(),
            "a reference stays in use"
        );
    }
    guest.check("parse");
    Ok(())
}
