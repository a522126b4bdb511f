//! Target `nbd_contexts`: queries for metadata contexts, and questions about some of them, against plain models.

use arbitrary::{Result, Unstructured};
use pvblk_protocol::nbd::{Context, Contexts, LONGEST_QUESTION, parse_question};

pub fn nbd_contexts(data: &[u8]) {
    let _ = play(&mut Unstructured::new(data));
}

fn play(u: &mut Unstructured<'_>) -> Result<()> {
    let pick: u8 = u.arbitrary()?;
    let some = |c: &Context| pick & c.id() as u8 != 0;
    let selected: Contexts = Context::ALL.into_iter().filter(some).collect();
    while !u.is_empty() {
        if u.arbitrary()? {
            query(u, selected)?;
        } else {
            question(u, selected)?;
        }
    }
    Ok(())
}

fn query(u: &mut Unstructured<'_>, available: Contexts) -> Result<()> {
    let whole = u.choose(&["base:allocation", "x-pvblk:cache", "qemu:allocation-depth"])?;
    let mut text = (*whole).to_owned();
    let most = text.len();
    text.truncate(u.int_in_range(0..=most)?);
    if u.ratio(1, 8)? {
        text.push_str(u.arbitrary::<&str>()?);
    }
    let wildcards = u.arbitrary()?;
    let got = available.named_by(&text, wildcards);
    for context in Context::ALL {
        let (space, leaf) = context.name().split_once(':').expect("a namespace");
        let named = match text.split_once(':') {
            Some((s, "")) => wildcards && s == space,
            Some((s, l)) => s == space && l == leaf,
            None => false,
        };
        let want = named && available.has(context);
        assert_eq!(got.has(context), want, "{text:?} {wildcards}");
    }
    Ok(())
}

fn question(u: &mut Unstructured<'_>, selected: Contexts) -> Result<()> {
    let mut bytes = u.arbitrary::<u64>()?.to_be_bytes().to_vec();
    for _ in 0..u.int_in_range(0..=4)? {
        let id = match u.ratio(1, 8)? {
            true => u.arbitrary()?,
            false => u.int_in_range(0..=3u32)?,
        };
        bytes.extend(id.to_be_bytes());
    }
    if u.ratio(1, 4)? {
        let most = bytes.len();
        bytes.truncate(u.int_in_range(0..=most)?);
    }
    let got = parse_question(&bytes, selected);
    let ids: Vec<u32> = bytes
        .get(8..)
        .unwrap_or_default()
        .chunks(4)
        .map(|b| b.iter().fold(0, |n, &b| n << 8 | u32::from(b)))
        .collect();
    let names = |id: &u32| selected.iter().any(|c| c.id() == *id);
    let once = (1..ids.len()).all(|n| !ids[..n].contains(&ids[n]));
    let right = bytes.len().is_multiple_of(4) && !ids.is_empty() && once && ids.iter().all(names);
    assert_eq!(got.is_some(), right, "{bytes:x?} {selected:?}");
    if let Some((len, asked)) = got {
        assert!(bytes.len() <= LONGEST_QUESTION);
        assert_eq!(len.to_be_bytes(), bytes[..8]);
        assert_eq!(asked.len(), ids.len());
        assert!(asked.iter().all(|c| ids.contains(&c.id())));
    }
    Ok(())
}
