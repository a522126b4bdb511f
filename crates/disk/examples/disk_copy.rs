//! Copies a disk to a file, with 16 reads of 256 KiB in flight: `disk_copy SPEC FILE`.

use pvblk_disk::{Disk, Request};
use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(spec), Some(path)) = (args.next(), args.next()) else {
        return Err(
            "usage: disk_copy SPEC FILE, such as rings:unix:pvblk.sock,disk=vm1 vm1.img".into(),
        );
    };
    let disk = Disk::open(&spec)?;
    let size = disk.size_bytes();
    let file = File::create(path)?;
    file.set_len(size)?;
    let piece = disk.limits().max_request_bytes.min(256 << 10);
    let mut queue = disk.queue(16)?;
    let mut buffers = Vec::new();
    for _ in 0..queue.depth() {
        buffers.push(disk.buffer(piece as usize)?);
    }
    let (mut next, mut done) = (0, Vec::new());
    let mut bytes = vec![0; piece as usize];
    loop {
        while next < size
            && let Some(buffer) = buffers.pop()
        {
            let len = piece.min(size - next);
            queue.push(Request::read(next, buffer).first(len as usize).tag(next))?;
            next += len;
        }
        if queue.wait(&mut done, None)? == 0 {
            break;
        }
        for completion in done.drain(..) {
            completion.result?;
            let Some(buffer) = completion.buffer else {
                continue;
            };
            let len = piece.min(size - completion.tag) as usize;
            buffer.copy_to(0, &mut bytes[..len]);
            file.write_all_at(&bytes[..len], completion.tag)?;
            buffers.push(buffer);
        }
    }
    file.sync_all()?;
    drop(queue);
    disk.close()?;
    println!("{size} bytes");
    Ok(())
}
