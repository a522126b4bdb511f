//! `pvblk-lab idle`: measures a server with many attached disks that have nothing to do.

use crate::child::{Server, cpu_percent};
use crate::driver::Driver;
use crate::machine::Machine;
use anyhow::{Context, Result};
use pvblk_block::BlockDevice;
use pvblk_client::local::{ConnectOptions, FrontLink, connect};
use pvblk_client::rings::Frontend;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Debug, Serialize)]
pub struct IdleResult {
    pub machine: Machine,
    /// Disks served and attached.
    pub disks: usize,
    /// Length of the measurement in seconds.
    pub seconds: u64,
    /// CPU of the server in percent of one CPU.
    pub cpu_percent: f64,
    /// Private bytes by the server's own bill.
    pub bill_private: u64,
    /// Bytes of shared mappings by the server's own bill.
    pub bill_shared: u64,
    /// `RssAnon` of the server by the kernel, in bytes.
    pub kernel_rss_anon: u64,
    /// Sizes of the server's shared mappings by the kernel, in bytes.
    pub kernel_shared: u64,
}

/// Serves and attaches `disks` disks, does one write and read on each, then watches for `seconds`.
pub fn run(disks: usize, seconds: u64, dir: &Path, progress: &dyn Fn(&str)) -> Result<IdleResult> {
    let socket = dir.join("rings.sock");
    let mut args: Vec<String> = vec![
        "serve".into(),
        "--local".into(),
        format!("unix:{}", socket.display()),
    ];
    for i in 0..disks {
        args.push("--disk".into());
        args.push(format!("d{i}=mem:4M"));
    }
    let server = Server::start(&args, None)?;
    let options = ConnectOptions {
        queues: 2,
        ring_pages: 8,
        memory_bytes: 8 << 20,
        ..ConnectOptions::default()
    };
    let mut fronts: Vec<(Arc<Frontend>, FrontLink)> = Vec::new();
    for i in 0..disks {
        progress(&format!("attaching disk {} of {disks}", i + 1));
        let (parts, link) = connect(&socket, &format!("d{i}"), &options)?;
        let device = Frontend::new(parts)?;
        let shared: Arc<dyn BlockDevice> = device.clone();
        for queue in 0..2 {
            Driver::open(&shared, queue, 1, 4096)?.write_block(7, &[1; 8])?;
        }
        fronts.push((device, link));
    }
    std::thread::sleep(Duration::from_secs(2));
    progress(&format!("watching for {seconds} s"));
    let cpu_percent = cpu_percent(server.pid(), Duration::from_secs(seconds))?;
    server.signal("USR1")?;
    let (bill_private, bill_shared) = read_bill(&server)?;
    let kernel = pvblk_sys::proc_status::memory(Some(server.pid()))?;
    for (_, link) in &mut fronts {
        link.close()?;
    }
    Ok(IdleResult {
        machine: Machine::here(),
        disks,
        seconds,
        cpu_percent,
        bill_private,
        bill_shared,
        kernel_rss_anon: kernel.rss_anon,
        kernel_shared: kernel.shared_mapped,
    })
}

fn read_bill(server: &Server) -> Result<(u64, u64)> {
    loop {
        let line = server
            .line(Duration::from_secs(10))
            .context("the server printed no bill")?;
        let Some(rest) = line.strip_prefix("sum: ") else {
            continue;
        };
        let numbers: Vec<u64> = rest
            .split_whitespace()
            .filter_map(|w| w.parse().ok())
            .collect();
        let [private, shared, ..] = numbers[..] else {
            continue;
        };
        return Ok((private * 1024, shared * 1024));
    }
}

impl IdleResult {
    /// The bill divided by the kernel's figures: for private memory, and for all.
    pub fn ratios(&self) -> (f64, f64) {
        let all = (self.bill_private + self.bill_shared) as f64
            / (self.kernel_rss_anon + self.kernel_shared) as f64;
        (self.bill_private as f64 / self.kernel_rss_anon as f64, all)
    }

    pub fn table(&self) -> String {
        let (private, all) = self.ratios();
        format!(
            "{} attached idle disks, {} s: {:.3} % of a CPU\n\
             memory bill / kernel: private {} / {} KiB = {private:.3}, with shared mappings {} / {} KiB = {all:.3}",
            self.disks,
            self.seconds,
            self.cpu_percent,
            self.bill_private / 1024,
            self.kernel_rss_anon / 1024,
            (self.bill_private + self.bill_shared) / 1024,
            (self.kernel_rss_anon + self.kernel_shared) / 1024,
        )
    }
}
