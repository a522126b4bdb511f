use super::*;
use crate::{Amount, BlockSizes, Distribution, Mix};
use std::time::Duration;

fn parse(text: &str) -> Jobs {
    parse_jobs(text, "t.fio").unwrap()
}

/// One job with these lines.
fn job(lines: &str) -> JobSpec {
    parse(&format!("[j]\n{lines}")).jobs.remove(0)
}

fn refused(lines: &str) -> String {
    let e = parse_jobs(&format!("[j]\n{lines}"), "t.fio").unwrap_err();
    let text = e.to_string();
    assert!(
        text.starts_with("t.fio:2: ") && !text.contains('\n'),
        "{text}"
    );
    text
}

/// fio's own example of an IOmeter file server, without its comments.
const IOMETER: &str = "\
# a comment of the whole line
[global]
description=Emulation of Intel IOmeter File Server Access Pattern

[iometer]
bssplit=512/10:1k/5:2k/5:4k/60:8k/2:16k/4:32k/4:64k/10
rw=randrw
rwmixread=80
direct=1
size=4g
ioengine=libaio
; another comment
iodepth=64
";

#[test]
fn the_iometer_example_is_read_as_it_is() {
    let jobs = parse(IOMETER);
    assert_eq!(jobs.ignored, ["description", "direct", "ioengine"]);
    assert_eq!(jobs.global.len(), 1);
    let j = &jobs.jobs[0];
    assert_eq!(
        (j.name.as_str(), j.mix, j.random),
        ("iometer", Mix::Both, true)
    );
    assert_eq!((j.read_percent, j.iodepth), (80, 64));
    assert_eq!(j.size, Some(Amount::Bytes(4 << 30)));
    assert_eq!((j.min_bytes(), j.max_bytes()), (512, 65536));
    let BlockSizes::Split(parts) = &j.sizes[1] else {
        panic!("not split");
    };
    assert_eq!((parts.len(), parts[3]), (8, (4096, 60)));
    assert_eq!(j.options.len(), 7);
}

#[test]
fn sections_inherit_what_stands_before_them() {
    let jobs = parse(
        "[global]\nbs=8k # half\nrw=write\n[a]\nnumjobs=3\n[global]\niodepth=4\n[b]\nstonewall\nrw=read",
    );
    let [a, b] = &jobs.jobs[..] else {
        panic!("two jobs");
    };
    assert_eq!((a.iodepth, a.numjobs, a.mix), (1, 3, Mix::Write));
    assert_eq!((b.iodepth, b.numjobs, b.mix), (4, 1, Mix::Read));
    assert_eq!(b.sizes[0], BlockSizes::Fixed(8192));
    assert!(b.stonewall && !a.stonewall);
}

#[test]
fn every_option_sets_what_it_says() {
    for (text, mix, random) in [
        ("read", Mix::Read, false),
        ("write", Mix::Write, false),
        ("rw", Mix::Both, false),
        ("readwrite", Mix::Both, false),
        ("randread", Mix::Read, true),
        ("randwrite", Mix::Write, true),
        ("randrw", Mix::Both, true),
    ] {
        let j = job(&format!("readwrite={text}"));
        assert_eq!((j.mix, j.random), (mix, random));
    }
    let j = job(
        "bs=4k,64k\nba=512\nrwmixwrite=30\niodepth=32\niodepth_batch=8\nsize=50%\noffset=1m\n\
         offset_increment=10%\nio_size=2g\nnumber_ios=1000\nruntime=90\ntime_based\nramp_time=500ms\n\
         loops=3\nrandseed=7\nrandrepeat=0\nnorandommap\nrandom_distribution=zipf:1.2\n\
         verify=crc32c\nverify_fatal=1\ndo_verify=0\nfsync=16\nrate_iops=500\nthinktime=20\n\
         thinktime_blocks=4\nnumjobs=2\nnew_group\ngroup_reporting\ncontinue_on_error=all\n\
         name=other\nfilename=mem:1G",
    );
    assert_eq!(j.sizes, [BlockSizes::Fixed(4096), BlockSizes::Fixed(65536)]);
    assert_eq!((j.align_bytes, j.read_percent), (Some(512), 70));
    assert_eq!((j.iodepth, j.iodepth_batch), (32, 8));
    assert_eq!(j.size, Some(Amount::Percent(50)));
    assert_eq!(j.offset, Amount::Bytes(1 << 20));
    assert_eq!(j.offset_increment, Amount::Percent(10));
    assert_eq!(j.io_size, Some(Amount::Bytes(2 << 30)));
    assert_eq!(j.number_ios, Some(1000));
    assert_eq!(j.runtime, Some(Duration::from_secs(90)));
    assert_eq!(j.ramp_time, Duration::from_millis(500));
    assert_eq!((j.loops, j.seed, j.flush_every), (3, 7, Some(16)));
    assert!(j.time_based && !j.repeatable && !j.random_map);
    assert_eq!(j.distribution, Distribution::Zipf(1.2));
    assert!(j.verify.on && j.verify.fatal && !j.verify.after && !j.verify.only);
    assert_eq!(j.rate_iops, Some(500));
    assert_eq!(j.thinktime, Duration::from_micros(20));
    assert_eq!((j.thinktime_blocks, j.numjobs), (4, 2));
    assert!(j.new_group && j.group_reporting && j.continue_on_error);
    assert_eq!(
        (j.name.as_str(), j.target.as_deref()),
        ("other", Some("mem:1G"))
    );
    assert_eq!(job("bsrange=1k-4k").sizes[0].max(), 4096);
    assert_eq!(job("fdatasync=2").flush_every, Some(2));
    assert_eq!(job("fsync=0").flush_every, None);
    assert_eq!(job("uri=nbd://h/x").target.as_deref(), Some("nbd://h/x"));
    assert_eq!(
        job("random_distribution=pareto").distribution,
        Distribution::Pareto(0.2)
    );
}

#[test]
fn what_is_not_understood_is_told_with_its_place() {
    for (line, says) in [
        ("rw=trim", "\"trim\" is not supported"),
        ("rw=randread:8", "randread:8"),
        ("verify=md5", "crc32c"),
        (
            "zonemode=zbd",
            "zonemode: it is not supported here; supported: blockalign",
        ),
        ("verify_pattern=0", "verify_pattern"),
        ("iodept=3", "iodepth"),
        ("bs=4q", "is not a size"),
        ("bs=100", "multiple of 512"),
        ("bs", "it needs a value"),
        ("bssplit=4k/10", "add up to 10%"),
        ("rwmixread=101", "from 0 to 100"),
        ("random_distribution=normal:5", "zipf:EXPONENT"),
        ("random_distribution=zipf:x", "not a number"),
        ("random_distribution=pareto:1", "between 0 and 1"),
        ("runtime=soon", "not a time"),
        ("continue_on_error=maybe", "all or none"),
        (
            "size=${NOWHERE_TO_BE_FOUND}",
            "NOWHERE_TO_BE_FOUND is not set",
        ),
        ("size=${OPEN", "a variable is"),
        ("[open", "a section is [name]"),
    ] {
        let text = refused(line);
        assert!(text.contains(says), "{line}: {text}");
    }
    for (text, says) in [
        ("bs=4k", "before any"),
        ("[global]\nbs=4k", "there is no job"),
    ] {
        let e = parse_jobs(text, "t.fio").unwrap_err().to_string();
        assert!(e.contains(says), "{e}");
    }
}

#[test]
fn variables_come_from_outside() {
    let jobs = parse_with("[j]\nsize=${N}m\nbs=${N}k", "t", |name| {
        (name == "N").then(|| "8".to_owned())
    })
    .unwrap();
    assert_eq!(jobs.jobs[0].size, Some(Amount::Bytes(8 << 20)));
}

#[test]
fn flags_make_a_job_and_change_all() {
    let mut jobs = Jobs::from_options(["rw=randwrite", "time_based", "runtime=1"]).unwrap();
    jobs.set_all("bs=16k").unwrap();
    let j = &jobs.jobs[0];
    assert_eq!((j.max_bytes(), j.time_based), (16384, true));
    let e = jobs.set_all("bs=1").unwrap_err().to_string();
    assert!(e.starts_with("bs: "), "{e}");
}
