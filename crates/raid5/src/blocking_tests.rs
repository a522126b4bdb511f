use super::*;
use crate::testing::{Power, disks};

#[test]
fn any_range_of_any_device() {
    let seed = pvblk_testing::seed();
    let mut rng = fastrand::Rng::with_seed(seed);
    for spec in [
        "mem:3M",
        "mem:3M,sector=4096",
        "delay:10us:mem:3M",
        "delay:10us,channels=1:mem:3M",
    ] {
        let device = pvblk_volume::open(spec).expect("a device");
        let unit = u64::from(device.limits().logical_sector_bytes);
        let mut disk = Blocking::open(&device).expect("a queue");
        let mut image = vec![0; 3 << 20];
        let blocks = (3 << 20) / unit;
        for _ in 0..60 {
            let first = rng.u64(0..blocks);
            let len = rng.u64(1..=blocks - first);
            let at = (first * unit) as usize;
            let bytes = (len * unit) as usize;
            let sector = first * unit / 512;
            if rng.bool() {
                let mut new = vec![0; bytes];
                rng.fill(&mut new);
                image[at..at + bytes].copy_from_slice(&new);
                match rng.bool() {
                    true => disk.write(sector, &new, &mut sleepy()),
                    false => disk.write_cached(sector, &new, &mut sleepy()),
                }
                .expect("written");
            } else {
                let mut back = vec![1; bytes];
                disk.read(sector, &mut back, &mut sleepy()).expect("read");
                assert!(back == image[at..at + bytes], "{spec}, seed {seed}");
            }
        }
        disk.flush(&mut sleepy()).expect("flushed");
    }
}

#[test]
fn errors_are_told_in_one_line() {
    let [disk] = &Power::writes(1).supply(&disks(1))[..] else {
        panic!("one");
    };
    let mut disk = Blocking::open(&disk.1).expect("a queue");
    disk.write(0, &[1; 512], &mut sleepy()).expect("power");
    let error = disk.write(8, &[1; 1024], &mut sleepy()).expect_err("none");
    assert_eq!(
        error.to_string(),
        "failing: writing 2 sectors at 8: I/O error"
    );
    let error = disk.flush(&mut sleepy()).expect_err("none");
    assert_eq!(error.to_string(), "failing: flushing: I/O error");
    let error = disk.read(1 << 30, &mut [0; 512], &mut sleepy());
    let error = error.expect_err("outside").to_string();
    assert!(error.contains("outside of it"), "{error}");
    assert!(!disk.is_ended());
}

#[test]
fn the_caller_can_end_it() {
    let device =
        pvblk_volume::open("delay:1h:mem:1M").or_else(|_| pvblk_volume::open("delay:3600s:mem:1M"));
    let mut disk = Blocking::open(&device.expect("a device")).expect("a queue");
    let mut looks = 0;
    let mut idle = || {
        looks += 1;
        match looks {
            5 => Err(Error::config("enough")),
            _ => Ok(()),
        }
    };
    let error = disk.read(0, &mut [0; 4096], &mut idle).expect_err("ended");
    assert_eq!(error.to_string(), "enough");
    assert!(disk.is_ended());
    let error = disk
        .read(0, &mut [0; 4096], &mut sleepy())
        .expect_err("ended");
    assert!(error.to_string().contains("ended halfway"), "{error}");
}
