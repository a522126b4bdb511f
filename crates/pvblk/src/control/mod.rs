//! The control socket of a running server. Decision 26; docs/reference/control.md is for those who write clients.
//!
//! A client sends JSON-RPC 2.0 requests, one object in each line, and gets each response when it is done:
//!
//! ```text
//! > {"jsonrpc":"2.0","id":1,"method":"disk.add","params":{"name":"a","volume":"mem:1G"}}
//! > {"jsonrpc":"2.0","id":2,"method":"disk.list"}
//! < {"jsonrpc":"2.0","id":2,"result":{"disks":[…],"next":null}}
//! < {"jsonrpc":"2.0","id":1,"result":{"name":"a",…}}
//! ```
//!
//! A first line that doesn't begin with `{` is a question of earlier versions, one for each connection:
//!
//! ```text
//! > trace            what happens to requests from now on
//! < ok               then records as in a blktrace file, until the asker shuts its side down; then the rest, and the end
//! < error: …         or why not, in one line
//!
//! > ask DISK JSON    a question to what a disk stands on, such as: ask vm1 {"raid": "detail"}
//! < ok               then the answer, JSON in one line, and the end
//! < error: …         or why not, in one line
//!
//! > memory JSON      a question about the process's memory, such as: memory {"memory": "squeeze"}
//! < ok               then the answer, JSON in one line, and the end
//! < error: …         or why not, in one line
//! ```

mod client;
mod inside;
mod lines;
mod methods;
pub mod rpc;
mod server;
mod session;
mod socket;

pub use client::{ASK_PATIENCE, Client, Stream, ask, ask_memory};
pub use inside::Methods;
pub use server::{Reached, Server, no_disk};
pub use socket::{ControlArg, ControlSocket};

/// Asks for a trace.
const TRACE: &str = "trace";
/// Asks a disk.
const ASK: &str = "ask ";
/// Asks about memory.
const MEMORY: &str = "memory ";
/// The answer before a trace, and before a disk's answer.
const OK: &str = "ok";
/// Longest question in bytes: one may name a new member by a path.
const LONGEST_QUESTION: usize = 16 << 10;
/// The beginning of an answer that refuses.
const ERROR: &str = "error: ";
