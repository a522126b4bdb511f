//! A server with many disks, and a client of all of them.

use super::group::Group;
use crate::child::{self, Server};
use crate::driver::{Driver, DriverLoad};
use anyhow::{Context, Result, bail};
use pvblk_block::{BlockDevice, Op};
use pvblk_client::nbd::{NbdClient, NbdClientConfig, NbdUri};
use pvblk_protocol::nbd::NbdAddr;
use serde::Deserialize;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a request.
const BLOCK: usize = 32 << 10;
/// Service time of a disk, as one on the network has.
const SERVICE: &str = "5ms";

/// The server's counters of its buffers.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct Pools {
    /// Pages of all pools.
    pub pool_pages: u64,
    /// Pages of the pools that are in use.
    pub in_use_pages: u64,
    /// Pages that pools took from the system.
    pub allocated_pages: u64,
    /// Pages that requests took from pools.
    pub taken_pages: u64,
    /// Pages that squeezes gave back.
    pub squeezed_pages: u64,
}

/// The fields of the server's answer that the experiment needs.
#[derive(Deserialize)]
struct ServerReport {
    total: Pools,
    squeezes: u64,
}

/// A control socket.
#[derive(Clone)]
pub struct Control(PathBuf);

impl Control {
    pub fn at(path: PathBuf) -> Control {
        Control(path)
    }

    /// The server's figures of all disks, and its number of squeezes.
    pub fn pools(&self) -> Result<(Pools, u64)> {
        let report: ServerReport = serde_json::from_str(&self.ask(r#"{"memory":"report"}"#)?)?;
        Ok((report.total, report.squeezes))
    }

    /// The server's answer to a question.
    pub fn ask(&self, question: &str) -> Result<String> {
        let mut socket = UnixStream::connect(&self.0).context("connecting to the server")?;
        socket.set_read_timeout(Some(Duration::from_secs(60)))?;
        writeln!(socket, "memory {question}")?;
        let mut lines = BufReader::new(socket).lines();
        let first = lines.next().transpose()?.unwrap_or_default();
        if first != "ok" {
            bail!("the server was asked {question}: {first}");
        }
        lines.next().transpose()?.context("the server said nothing")
    }
}

/// The server, and a connection to each of its disks.
pub struct Disks {
    pub server: Server,
    pub control: Control,
    drivers: Vec<Driver>,
    depth: u32,
}

impl Disks {
    /// Starts a server in the group with `count` delayed disks and the flags `flags`, and connects to all
    /// disks. Each disk will have up to `pool_bytes` in flight.
    pub fn start(
        dir: &Path,
        group: &Group,
        count: usize,
        pool_bytes: usize,
        flags: &[String],
    ) -> Result<Disks> {
        let (nbd, control) = (dir.join("nbd.sock"), dir.join("ctl"));
        let mut args: Vec<String> = vec![
            "serve".into(),
            "--nbd".into(),
            format!("unix:{}", nbd.display()),
            "--control".into(),
            format!("unix:{}", control.display()),
        ];
        for i in 0..count {
            args.extend(["--disk".into(), format!("d{i}=delay:{SERVICE}:null:64M")]);
        }
        args.extend_from_slice(flags);
        let server = Server::spawn(group.command(&child::pvblk()?, &args)?)?;
        let depth = (pool_bytes / BLOCK).max(1) as u32;
        let mut drivers = Vec::new();
        for i in 0..count {
            let uri = NbdUri::new(NbdAddr::Unix(nbd.clone()), format!("d{i}"));
            let client = NbdClient::connect(&uri, NbdClientConfig::default())?;
            let device: Arc<dyn BlockDevice> = Arc::new(client);
            drivers.push(Driver::open(&device, 0, depth, BLOCK)?);
        }
        Ok(Disks {
            server,
            control: Control(control),
            drivers,
            depth,
        })
    }

    /// Submits as many reads of a disk as fill its pool, all in flight at once. Returns the time
    /// that they took.
    pub fn burst(&mut self, disk: usize) -> Result<Duration> {
        let load = DriverLoad {
            op: Op::Read,
            block: BLOCK,
            depth: self.depth,
            count: u64::from(self.depth),
            span: 64 << 20,
            sleep: true,
        };
        let mut block = 0;
        let place = || {
            block += 1;
            block
        };
        let outcome = self.drivers[disk].run(&load, place, |_, _| {})?;
        Ok(outcome.elapsed)
    }

    /// Submits a burst on each disk.
    pub fn fill(&mut self) -> Result<()> {
        (0..self.drivers.len()).try_for_each(|disk| self.burst(disk).map(drop))
    }

    pub fn len(&self) -> usize {
        self.drivers.len()
    }
}
