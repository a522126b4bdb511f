//! The cost of access to granted pages: mapped and unmapped one by one, mapped in bulk, or copied in one call. For a domain of
//! Xen, with its own pages; decision 15 has the figures. Prints microseconds a page, the median of 31 rounds.

use pvblk_sys::xen::{CopyDirection, GrantAllocator, GrantCopy, GrantDevice};
use pvblk_sys::{Buffer, PAGE_SIZE, Region};
use std::sync::Arc;
use std::time::Instant;

const ROUNDS: usize = 31;

fn main() -> std::io::Result<()> {
    let own: u16 = match std::env::args().nth(1) {
        Some(text) => text.parse().map_err(std::io::Error::other)?,
        None => 0,
    };
    let (allocator, device) = (GrantAllocator::open()?, GrantDevice::open()?);
    println!("pages\tone by one\tin bulk\tcopied there\tcopied back");
    for count in [1, 8, 32, 128] {
        let pages = (0..count).map(|_| allocator.page(own, true));
        let pages = pages.collect::<std::io::Result<Vec<_>>>()?;
        let grefs: Vec<u32> = pages.iter().map(|p| p.gref).collect();
        let memory = Region::anonymous(count * PAGE_SIZE).map_err(std::io::Error::other)?;
        memory.zero(0, memory.len());
        let memory = Arc::new(memory);
        let copies = grefs.iter().enumerate().map(|(i, &gref)| GrantCopy {
            gref,
            offset: 0,
            buffer: Buffer::new(&memory, i * PAGE_SIZE, PAGE_SIZE).expect("inside"),
            tag: 0,
            failed: false,
        });
        let mut copies: Vec<GrantCopy> = copies.collect();
        let touch = |region: &Region| {
            for page in 0..region.len() / PAGE_SIZE {
                region
                    .atomic_u32(page * PAGE_SIZE)
                    .load(std::sync::atomic::Ordering::Relaxed);
            }
        };
        let one_by_one = median(count, || {
            for &gref in &grefs {
                touch(&device.map(own, &[gref], true)?);
            }
            Ok(())
        })?;
        let in_bulk = median(count, || {
            touch(&device.map(own, &grefs, true)?);
            Ok(())
        })?;
        let mut copied = |direction| {
            median(count, || {
                device.copy(own, direction, &mut copies);
                match copies.iter().any(|c| c.failed) {
                    true => Err(std::io::Error::other("a copy was refused")),
                    false => Ok(()),
                }
            })
        };
        let (from, to) = (
            copied(CopyDirection::FromGuest)?,
            copied(CopyDirection::ToGuest)?,
        );
        println!("{count}\t{one_by_one:.1}\t{in_bulk:.1}\t{from:.1}\t{to:.1}");
    }
    Ok(())
}

/// Microseconds a page.
fn median(pages: usize, mut work: impl FnMut() -> std::io::Result<()>) -> std::io::Result<f64> {
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        work()?;
        times.push(begin.elapsed().as_secs_f64() * 1e6 / pages as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[ROUNDS / 2])
}
