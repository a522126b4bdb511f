//! Prints the size and the limits of a disk: `disk_info SPEC`.

use pvblk_disk::{Disk, Error};

fn main() -> Result<(), Error> {
    let Some(spec) = std::env::args().nth(1) else {
        eprintln!("usage: disk_info SPEC, such as rings:unix:pvblk.sock,disk=vm1");
        std::process::exit(2);
    };
    let disk = Disk::open(&spec)?;
    let limits = disk.limits();
    println!("size             {}", disk.size_bytes());
    println!("logical sector   {}", limits.logical_sector_bytes);
    println!("physical sector  {}", limits.physical_sector_bytes);
    println!("longest request  {}", limits.max_request_bytes);
    println!("discard          {}", limits.discard_granularity_bytes);
    println!("write zeroes     {}", limits.write_zeroes);
    println!("read only        {}", limits.read_only);
    println!("volatile cache   {}", limits.volatile_cache);
    disk.close()
}
