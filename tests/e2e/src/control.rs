//! A client of the control socket: JSON-RPC in lines.

use crate::Stop;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// One connection of a client, which waits for each response.
pub struct Control {
    socket: BufReader<UnixStream>,
    last: u64,
}

impl Control {
    /// Connects to a server that is ready.
    pub fn open(path: &Path) -> Result<Control, Stop> {
        let socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(Duration::from_secs(120)))?;
        Ok(Control {
            socket: BufReader::new(socket),
            last: 0,
        })
    }

    /// Sends a request, and waits for nothing.
    pub fn send(&mut self, method: &str, params: &Value) -> Result<(), Stop> {
        self.last += 1;
        let request =
            json!({"jsonrpc": "2.0", "id": self.last, "method": method, "params": params});
        Ok(writeln!(self.socket.get_mut(), "{request}")?)
    }

    /// The next response; `None`: the server has gone.
    pub fn receive(&mut self) -> Result<Option<Value>, Stop> {
        let mut line = String::new();
        match self.socket.read_line(&mut line) {
            Ok(_) if line.ends_with('\n') => Ok(Some(serde_json::from_str(&line)?)),
            Ok(_) => Ok(None),
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// The result of a request that must be carried out.
    pub fn must(&mut self, method: &str, params: Value) -> Result<Value, Stop> {
        self.send(method, &params)?;
        let response = self.receive()?.unwrap_or_default();
        match response.get("result") {
            Some(result) => Ok(result.clone()),
            None => Stop::fail(format!("{method} {params}: {response}")),
        }
    }
}
