//! Servers in network namespaces of a test's own, whose networks can be cut.

use crate::Stop;
use crate::mounted::Undo;
use crate::tools::{need, run, tool};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// For what takes a moment on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The way in which a network is cut.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    /// The link is down.
    Link,
    /// The server's packets go astray, while requests still arrive.
    Astray,
}

/// A namespace with one server, and a link to it.
pub struct Host {
    namespace: String,
    link: &'static str,
    here: String,
    /// Address of the server.
    pub address: String,
    server: Option<Child>,
    _undo: Undo,
}

fn ip(args: &[&str]) -> Result<(), Stop> {
    let finished = run(tool("ip", args), PATIENCE)?;
    finished.success().map(drop)
}

/// Checks that this machine can make network namespaces.
pub fn need_namespaces() -> Result<(), Stop> {
    need(&["ip"])?;
    if !rustix::process::geteuid().is_root() {
        return Stop::skip("network namespaces need root");
    }
    let name = format!("pvblk{}", std::process::id());
    if ip(&["netns", "add", &name]).is_err() {
        return Stop::skip("this machine makes no network namespaces");
    }
    let link = format!("pvt{}", std::process::id() % 100_000);
    let made = ip(&[
        "link", "add", &link, "type", "veth", "peer", "name", "peer", "netns", &name,
    ]);
    ip(&["netns", "del", &name])?;
    match made {
        Ok(()) => Ok(()),
        Err(_) => Stop::skip("this machine makes no veth links"),
    }
}

impl Host {
    /// A new one; `number` is another one for each host of a test, below 64.
    pub fn new(number: u32) -> Result<Host, Stop> {
        let pid = std::process::id();
        let namespace = format!("pvblk{pid}n{number}");
        let outer = format!("pv{}n{number}", pid % 100_000);
        let net = format!("10.{}.{}", 64 + pid / 256 % 128, pid % 256);
        let here = format!("{net}.{}", 4 * number + 1);
        let address = format!("{net}.{}", 4 * number + 2);
        let link = "pvblk0";
        let mut undo = Undo::default();
        ip(&["netns", "add", &namespace])?;
        undo.add("ip", &["netns", "del", &namespace]);
        ip(&[
            "link", "add", &outer, "type", "veth", "peer", "name", link, "netns", &namespace,
        ])?;
        undo.add("ip", &["link", "del", &outer]);
        ip(&["addr", "add", &format!("{here}/30"), "dev", &outer])?;
        ip(&["link", "set", &outer, "up"])?;
        let inside = ["-n", &namespace];
        let own = format!("{address}/30");
        for args in [
            &["addr", "add", &own, "dev", link][..],
            &["link", "set", link, "up"],
            &["link", "set", "lo", "up"],
        ] {
            ip(&[&inside, args].concat())?;
        }
        Ok(Host {
            namespace,
            link,
            here,
            address,
            server: None,
            _undo: undo,
        })
    }

    /// Runs a server there until the end, and waits until it takes connections at a port.
    pub fn serve(&mut self, command: &Command, port: u16) -> Result<(), Stop> {
        let mut inside = tool("ip", ["netns", "exec", &self.namespace]);
        inside.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            if let Some(value) = value {
                inside.env(name, value);
            }
        }
        inside.stdin(Stdio::null()).stdout(Stdio::null());
        inside.stderr(Stdio::null());
        let begin = Instant::now();
        self.server = Some(inside.spawn()?);
        while TcpStream::connect((self.address.as_str(), port)).is_err() {
            if begin.elapsed() > PATIENCE {
                return Stop::fail(format!("no server at {}", self.address));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Kills the server (SIGKILL).
    pub fn kill(&mut self) -> Result<(), Stop> {
        if let Some(mut server) = self.server.take() {
            server.kill()?;
            server.wait()?;
        }
        Ok(())
    }

    /// Cuts the server off, or connects it again.
    pub fn cut(&self, how: Cut, on: bool) -> Result<(), Stop> {
        let inside = ["-n", &self.namespace];
        let args: &[&str] = match (how, on) {
            (Cut::Link, true) => &["link", "set", self.link, "down"],
            (Cut::Link, false) => &["link", "set", self.link, "up"],
            (Cut::Astray, true) => &[
                "neigh",
                "replace",
                &self.here,
                "lladdr",
                "02:00:00:00:00:99",
                "dev",
                self.link,
                "nud",
                "permanent",
            ],
            (Cut::Astray, false) => &["neigh", "del", &self.here, "dev", self.link],
        };
        ip(&[&inside, args].concat())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}
