//! The servers that ours are compared with: processes that listen on Unix sockets.

use crate::child;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub const QEMU: &str = "qemu-storage-daemon";
/// Longest start of a peer.
const START: Duration = Duration::from_secs(30);

/// A peer's process, which ends when this is dropped.
pub struct Peer(Child);

impl Peer {
    fn spawn(mut command: Command, name: &str) -> Result<Peer> {
        let child = command.stdin(Stdio::null()).spawn();
        let child = child.with_context(|| format!("starting {name}: is it installed?"))?;
        Ok(Peer(child))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Waits until the peer, which is starting, has made a socket.
    fn wait_for(&mut self, socket: &Path, name: &str) -> Result<()> {
        let deadline = Instant::now() + START;
        while !socket.exists() {
            ensure!(Instant::now() < deadline, "{name} did not start");
            if let Some(status) = self.0.try_wait()? {
                bail!("{name} ended at once: {status}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Lets a peer that burns its CPU at rest run, or stand still: until then nothing else can be measured there.
    pub fn let_run(&self, runs: bool) -> Result<()> {
        use rustix::process::{Pid, Signal, kill_process};
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        let signal = if runs { Signal::CONT } else { Signal::STOP };
        kill_process(pid.context("a process without a number")?, signal)?;
        Ok(())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Null disks of `bytes` each, which fill buffers with zeros, one for each socket.
pub fn start_qemu(sockets: &[PathBuf], bytes: u64, queues: u16, cpu: usize) -> Result<Peer> {
    let mut command = child::on_cpu(Some(cpu), QEMU);
    command.args(["--object", "iothread,id=t"]);
    for (n, socket) in sockets.iter().enumerate() {
        let disk = format!("driver=null-co,node-name=d{n},size={bytes},read-zeroes=on");
        let export = format!(
            "type=vhost-user-blk,id=e{n},node-name=d{n},addr.type=unix,addr.path={},writable=on,num-queues={queues},iothread=t",
            socket.display()
        );
        command.args(["--blockdev", &disk, "--export", &export]);
    }
    let mut peer = Peer::spawn(command, QEMU)?;
    for socket in sockets {
        peer.wait_for(socket, QEMU)?;
    }
    Ok(peer)
}

/// The version that a program tells, in a line.
pub fn version(program: impl AsRef<Path>) -> Result<String> {
    let program = program.as_ref();
    let out = Command::new(program).arg("--version").output();
    let out = out.with_context(|| format!("running {}: is it installed?", program.display()))?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// The program of a build of SPDK, in the folder that the user has named.
pub fn spdk_program(build: &Path) -> Result<PathBuf> {
    let program = build.join("build/bin/vhost");
    let there = program.is_file();
    ensure!(
        there,
        "there is no {}: name the folder in which SPDK was built",
        program.display()
    );
    Ok(program)
}

/// SPDK's vhost target, which lies in a folder with its sockets.
pub struct Spdk {
    pub process: Peer,
    /// Its null disks, which don't touch buffers.
    pub null: Vec<PathBuf>,
    /// Its disks in memory.
    pub malloc: Vec<PathBuf>,
}

impl Spdk {
    /// Starts it on one CPU, with so many disks of so many bytes of each kind. It has huge pages if enough of them are free.
    pub fn start(
        program: &Path,
        dir: &Path,
        (disks, of_each): (usize, u64),
        cpu: usize,
    ) -> Result<Spdk> {
        ensure!(cpu < 64, "SPDK is given its CPU as a mask of 64");
        let bytes = disks as u64 * of_each;
        let (memory_mib, mask) = (memory_mib(bytes), format!("{:#x}", 1u64 << cpu));
        let rpc = dir.join("rpc");
        // If this program is killed, SPDK ends too, even if it stands still.
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "taskset", "-c", &cpu.to_string()])
            .arg(program)
            .args(["-m", &mask])
            .args([
                "-s",
                &memory_mib.to_string(),
                "--no-pci",
                "--silence-noticelog",
            ])
            .arg("-S")
            .arg(dir)
            .arg("-r")
            .arg(&rpc)
            .stdout(Stdio::null())
            .stderr(File::create(dir.join("log"))?);
        command.arg(match has_huge_pages(bytes) {
            true => "--huge-unlink",
            false => "--no-huge",
        });
        let name = program.display().to_string();
        let mut process = Peer::spawn(command, &name)?;
        let told = || {
            let log = std::fs::read_to_string(dir.join("log")).unwrap_or_default();
            log.lines().last().unwrap_or("it told nothing").to_owned()
        };
        process.wait_for(&rpc, &name).with_context(told)?;
        let mut calls = Calls::connect(&rpc)?;
        calls.call("framework_wait_init", json!({}))?;
        let blocks = of_each / 512;
        let mut make = |kind: &str, method: &str| -> Result<Vec<PathBuf>> {
            let mut sockets = Vec::new();
            for n in 0..disks {
                let name = format!("{kind}{n}");
                let disk = json!({"name": name, "num_blocks": blocks, "block_size": 512});
                calls.call(method, disk)?;
                let controller = json!({"ctrlr": name, "dev_name": name, "cpumask": mask});
                calls.call("vhost_create_blk_controller", controller)?;
                process.wait_for(&dir.join(&name), &name)?;
                sockets.push(dir.join(&name));
            }
            Ok(sockets)
        };
        let null = make("null", "bdev_null_create")?;
        let malloc = make("malloc", "bdev_malloc_create")?;
        Ok(Spdk {
            process,
            null,
            malloc,
        })
    }
}

/// Memory of SPDK's process with disks of `bytes`.
fn memory_mib(bytes: u64) -> u64 {
    (bytes >> 20) + 1024
}

/// True if SPDK gets huge pages: it needs a hugetlbfs, too.
pub fn has_huge_pages(bytes: u64) -> bool {
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    let is_mounted = mounts.lines().any(|line| line.contains(" hugetlbfs "));
    is_mounted && free_huge_mib() >= memory_mib(bytes)
}

/// Memory in huge pages that nobody uses, in MiB.
fn free_huge_mib() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
    };
    let (pages, kib) = (field("HugePages_Free:"), field("Hugepagesize:"));
    (pages.unwrap_or(0) * kib.unwrap_or(0)) >> 10
}

/// JSON-RPC with SPDK, one call at a time.
struct Calls(UnixStream);

impl Calls {
    fn connect(socket: &Path) -> Result<Calls> {
        let deadline = Instant::now() + START;
        loop {
            match UnixStream::connect(socket) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(START))?;
                    return Ok(Calls(stream));
                }
                Err(e) if Instant::now() > deadline => return Err(e).context("reaching SPDK"),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    fn call(&mut self, method: &str, params: Value) -> Result<()> {
        let mut call = json!({"jsonrpc": "2.0", "id": 1, "method": method});
        if params.as_object().is_some_and(|params| !params.is_empty()) {
            call["params"] = params;
        }
        self.0.write_all(call.to_string().as_bytes())?;
        let mut answers = serde_json::Deserializer::from_reader(&self.0);
        let answer =
            Value::deserialize(&mut answers).with_context(|| format!("SPDK's {method}"))?;
        match answer.get("error") {
            None => Ok(()),
            Some(error) => bail!("SPDK's {method}: {error}"),
        }
    }
}
