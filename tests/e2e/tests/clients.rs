//! The clients that people move images with: qemu-img, nbdcopy, nbdinfo.

use pvblk_e2e::outcome::check;
use pvblk_e2e::tools::{compare, need, run_ok};
use pvblk_e2e::{Daemon, MIB, Route, Stage, Stop, disk_bytes, pattern, run_all, stage};
use serde_json::Value;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::ExitCode;

fn main() -> ExitCode {
    run_all(&[
        ("qemu_img_over_nbd", || qemu_img(Route::Nbd)),
        ("qemu_img_over_rings", || qemu_img(Route::Rings)),
        ("nbdcopy_over_nbd", || nbdcopy(Route::Nbd)),
        ("nbdcopy_over_rings", || nbdcopy(Route::Rings)),
        ("nbdinfo_tells_size_and_abilities_over_nbd", || {
            abilities(Route::Nbd)
        }),
        ("nbdinfo_tells_size_and_abilities_over_rings", || {
            abilities(Route::Rings)
        }),
        ("odd_lengths_over_nbd", || odd_lengths(Route::Nbd)),
        ("odd_lengths_over_rings", || odd_lengths(Route::Rings)),
        ("nbdinfo_lists_exports", exports_are_listed),
        ("nbdinfo_maps_holes", holes_are_mapped),
    ])
}

/// A patterned image in, compared through the route, and again in the disk's own file.
fn qemu_img(route: Route) -> Result<(), Stop> {
    need(&["qemu-img", "cmp"])?;
    let mut stage = Stage::new(route, disk_bytes())?;
    let image = stage.path("image.raw");
    pattern::write(&image, disk_bytes(), 1)?;
    let (image_arg, uri) = (image.display().to_string(), stage.uri());
    run_ok(
        "qemu-img",
        ["convert", "-n", "-f", "raw", "-O", "raw", &image_arg, &uri],
    )?;
    run_ok(
        "qemu-img",
        ["compare", "-f", "raw", "-F", "raw", &image_arg, &uri],
    )?;
    stage.stop()?;
    compare(&image, &stage.disk())
}

fn nbdcopy(route: Route) -> Result<(), Stop> {
    need(&["nbdcopy", "cmp"])?;
    let mut stage = Stage::new(route, disk_bytes())?;
    let (image, back) = (stage.path("image.raw"), stage.path("back.raw"));
    pattern::write(&image, disk_bytes(), 2)?;
    let uri = stage.uri();
    run_ok("nbdcopy", ["--flush", &image.display().to_string(), &uri])?;
    run_ok("nbdcopy", [&uri, &back.display().to_string()])?;
    compare(&image, &back)?;
    stage.stop()?;
    compare(&image, &stage.disk())
}

fn info(args: &[&str]) -> Result<Value, Stop> {
    let said = run_ok("nbdinfo", ["--json"].iter().chain(args))?;
    Ok(serde_json::from_str(&said.stdout)?)
}

fn abilities(route: Route) -> Result<(), Stop> {
    need(&["nbdinfo"])?;
    let stage = Stage::new(route, 64 * MIB)?;
    let info = info(&[&stage.uri()])?;
    let export = &info["exports"][0];
    check(export["export-size"] == 64 * MIB, || {
        format!("another size: {info:#}")
    })?;
    for (ability, expected) in [
        ("is_read_only", false),
        ("can_flush", true),
        ("can_fua", true),
        ("can_multi_conn", true),
        ("can_trim", true),
        // blkif has no operation that writes zeros: over rings the attached process does.
        ("can_zero", true),
        ("can_fast_zero", route == Route::Nbd),
        ("can_cache", false),
    ] {
        check(export[ability] == expected, || {
            format!("{ability} isn't {expected}: {info:#}")
        })?;
    }
    // Parts of blocks are read, changed and written, as clients that never ask expect.
    check(export["block_size_minimum"] == 1, || {
        format!("the smallest block isn't a byte: {info:#}")
    })
}

/// A file of an odd length goes in, also through a pipe, and comes out; the data after it stays.
fn odd_lengths(route: Route) -> Result<(), Stop> {
    need(&["nbdcopy", "qemu-io", "cmp"])?;
    const LEN: u64 = 3 * MIB + 12_345;
    let mut stage = Stage::with_file(route, 16 * MIB, |disk| {
        let file = std::fs::OpenOptions::new().write(true).open(disk)?;
        Ok(file.write_all_at(&[0x5a; 4096], LEN)?)
    })?;
    let (image, uri) = (stage.path("odd"), stage.uri());
    pattern::write(&image, LEN.next_multiple_of(MIB), 3)?;
    std::fs::OpenOptions::new()
        .write(true)
        .open(&image)?
        .set_len(LEN)?;
    run_ok("nbdcopy", ["--flush", &image.display().to_string(), &uri])?;
    let piped = format!("cat '{}' | nbdcopy -- - '{uri}'", image.display());
    run_ok("sh", ["-c", &piped])?;
    let lines = [
        format!("read -P 0x5a {LEN} 4096"),
        format!("write -P 0x11 {} 3", LEN + 1),
        format!("write -z {} 1000", LEN + 100),
        format!("discard {} 2", LEN + 2000),
        format!("read -P 0x5a {LEN} 1"),
        format!("read -P 0x11 {} 3", LEN + 1),
        format!("read -P 0x5a {} 96", LEN + 4),
        format!("read -P 0 {} 1000", LEN + 100),
        format!("read -P 0x5a {} 2996", LEN + 1100),
    ];
    let mut args = vec!["-f".to_owned(), "raw".into()];
    for line in lines {
        args.extend(["-c".to_owned(), line]);
    }
    args.push(uri);
    let said = run_ok("qemu-io", &args)?.stdout;
    check(!said.contains("fail") && !said.contains("error"), || {
        format!("qemu-io found other data:\n{said}")
    })?;
    stage.stop()?;
    let disk = std::fs::File::open(stage.disk())?;
    let (mut got, want) = (vec![0; LEN as usize], std::fs::read(&image)?);
    disk.read_exact_at(&mut got, 0)?;
    check(got == want, || "the disk holds other data".into())
}

fn exports_are_listed() -> Result<(), Stop> {
    need(&["nbdinfo"])?;
    let dir = tempfile::tempdir()?;
    let socket = dir.path().join("nbd.sock");
    let mut serve = Daemon::start([
        "serve",
        "--disk",
        "small=mem:4M",
        "--disk",
        "large=null:1G",
        "--disk",
        "slow=delay:210us:mem:8M",
        "--nbd",
        &stage::unix(&socket),
    ])?;
    let list = info(&["--list", &stage::uri(&socket, "")])?;
    for (name, bytes) in [("small", 4 * MIB), ("large", 1024 * MIB), ("slow", 8 * MIB)] {
        let found = list["exports"]
            .as_array()
            .into_iter()
            .flatten()
            .any(|e| e["export-name"] == name && e["export-size"] == bytes);
        check(found, || {
            format!("{name} of {bytes} bytes isn't listed: {list:#}")
        })?;
        let alone = info(&[&stage::uri(&socket, name)])?;
        check(alone["exports"][0]["export-size"] == bytes, || {
            format!("{name} has another size: {alone:#}")
        })?;
    }
    let default = info(&[&stage::uri(&socket, "")])?;
    check(default["exports"][0]["export-size"] == 4 * MIB, || {
        format!("the first disk isn't the default: {default:#}")
    })?;
    serve.stop()
}

/// One MiB of data in a file of holes is reported as data, the rest as holes.
fn holes_are_mapped() -> Result<(), Stop> {
    const DATA: u64 = 16 * MIB;
    need(&["nbdinfo"])?;
    let stage = Stage::with_file(Route::Nbd, 64 * MIB, |disk| {
        let file = std::fs::OpenOptions::new().write(true).open(disk)?;
        file.write_all_at(&[0x5a; MIB as usize], DATA)?;
        Ok(file.sync_all()?)
    })?;
    if std::fs::metadata(stage.disk())?.blocks() * 512 > 8 * MIB {
        return Stop::skip("the file system for temporary files has no holes");
    }
    let map = info(&["--map", &stage.uri()])?;
    let extents = map.as_array().cloned().unwrap_or_default();
    let number = |e: &Value, key: &str| e[key].as_u64().unwrap_or(0);
    let (mut end, mut holes) = (0, 0);
    for extent in &extents {
        let (offset, length) = (number(extent, "offset"), number(extent, "length"));
        check(offset == end && length > 0, || {
            format!("extents don't follow on: {map:#}")
        })?;
        end = offset + length;
        let is_hole = number(extent, "type") & 1 != 0;
        let has_data = offset < DATA + MIB && DATA < end;
        check(!(is_hole && has_data), || {
            format!("data told as a hole: {map:#}")
        })?;
        holes += if is_hole { length } else { 0 };
    }
    check(end == 64 * MIB && holes >= 60 * MIB, || {
        format!("{holes} bytes of holes in {end}: {map:#}")
    })
}
