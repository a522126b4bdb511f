//! Writes a greeting to a disk of a pvblk server, and reads it: `disk_first SOCKET DISK`.

use pvblk_disk::{Disk, Error};

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let (Some(socket), Some(name)) = (args.next(), args.next()) else {
        eprintln!("usage: disk_first SOCKET DISK, such as pvblk.sock vm1");
        std::process::exit(2);
    };
    let disk = Disk::connect(socket, &name)?;
    let mut block = vec![0; disk.limits().logical_sector_bytes as usize];
    block[..5].copy_from_slice(b"hello");
    disk.write_at(&block, 0)?;
    disk.flush()?;
    let mut found = [0; 5];
    disk.read_at(&mut found, 0)?;
    println!("{}", String::from_utf8_lossy(&found));
    disk.close()
}
