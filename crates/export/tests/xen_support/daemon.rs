//! A small xenstore daemon for tests: real messages on a Unix socket, and a tree that the test can change.

use super::WAIT;
use parking_lot::{Condvar, Mutex};
use pvblk_export::xen::Xenstore;
use pvblk_protocol::xenstore::{Head, MAX_PAYLOAD, Message, Operation, take_message, texts};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;
use tempfile::TempDir;

/// Home directory of all clients, where relative paths begin.
const HOME: &str = "/local/domain/0";

type Nodes = BTreeMap<String, (Vec<u8>, u64)>;
type OnChange = Box<dyn Fn(&str, Option<&str>) + Send>;
type Refuse = Box<dyn Fn(Operation, &str) -> Option<&'static str> + Send>;

struct Watch {
    client: u64,
    /// Absolute or special path.
    path: String,
    token: String,
    /// Events name the path as it was given to the watch.
    relative: bool,
}

/// An open transaction: its view of the tree and its changes.
struct OpenTransaction {
    begun: Nodes,
    view: Nodes,
    touched: BTreeSet<String>,
    changes: Vec<NodeChange>,
}

#[derive(Clone)]
enum NodeChange {
    Write(String, Vec<u8>),
    Make(String),
    Remove(String),
}

/// The tree, its watches, and counts of requests.
#[derive(Default)]
pub struct Tree {
    nodes: Nodes,
    counter: u64,
    watches: Vec<Watch>,
    clients: HashMap<u64, (Sender<Vec<u8>>, UnixStream)>,
    transactions: HashMap<(u64, u32), OpenTransaction>,
    next: u32,
    requests: HashMap<(u32, String), usize>,
    on_change: Option<OnChange>,
    refuse: Option<Refuse>,
    /// When this path is read, send one more event and the reply, and then nothing.
    last_word: Option<String>,
}

type DaemonReply = Result<Vec<u8>, &'static str>;

fn check(path: &str) -> Result<String, &'static str> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-/_@".contains(&b);
    let name = path.strip_prefix('@').unwrap_or(path);
    if name.is_empty() || path.len() > 3072 || !name.bytes().all(allowed) || path.contains("//") {
        return Err("EINVAL");
    }
    if path.len() > 1 && path.ends_with('/') {
        return Err("EINVAL");
    }
    Ok(match path.starts_with(['/', '@']) {
        true => path.to_owned(),
        false => format!("{HOME}/{path}"),
    })
}

fn parent(path: &str) -> Option<&str> {
    let (parent, _) = path.rsplit_once('/')?;
    (!parent.is_empty()).then_some(parent)
}

fn below(path: &str, directory: &str) -> bool {
    let rest = path.strip_prefix(directory);
    rest.is_some_and(|r| r.is_empty() || r.starts_with('/'))
}

/// Applies a change. Returns paths with a flag: watches at or above the path are notified, or only watches of exactly
/// that path.
fn apply(
    nodes: &mut Nodes,
    counter: &mut u64,
    change: &NodeChange,
) -> Result<Vec<(String, bool)>, &'static str> {
    *counter += 1;
    let (path, value) = match change {
        NodeChange::Remove(path) => {
            let gone: Vec<String> = nodes.keys().filter(|p| below(p, path)).cloned().collect();
            if gone.is_empty() {
                let there = parent(path).is_none_or(|p| nodes.contains_key(p));
                return if there { Ok(Vec::new()) } else { Err("ENOENT") };
            }
            gone.iter().for_each(|p| drop(nodes.remove(p)));
            return Ok(gone.into_iter().map(|p| (p.clone(), p != *path)).collect());
        }
        NodeChange::Write(path, value) => (path, Some(value)),
        NodeChange::Make(path) if nodes.contains_key(path) => return Ok(Vec::new()),
        NodeChange::Make(path) => (path, None),
    };
    let mut up = parent(path);
    while let Some(directory) = up {
        nodes
            .entry(directory.to_owned())
            .or_insert((Vec::new(), *counter));
        up = parent(directory);
    }
    nodes.insert(path.clone(), (value.cloned().unwrap_or_default(), *counter));
    Ok(vec![(path.clone(), false)])
}

fn children(nodes: &Nodes, path: &str) -> DaemonReply {
    if !nodes.contains_key(path) {
        return Err("ENOENT");
    }
    let from = format!("{path}/");
    let names = nodes
        .range(from.clone()..)
        .map_while(|(p, _)| p.strip_prefix(&from));
    let mut all = Vec::new();
    for name in names.filter(|n| !n.contains('/')) {
        all.extend(name.as_bytes());
        all.push(0);
    }
    if all.len() > MAX_PAYLOAD {
        Err("E2BIG")
    } else {
        Ok(all)
    }
}

fn message(operation: u32, request: u32, transaction: u32, payload: &[u8]) -> Vec<u8> {
    let head = Head {
        operation,
        request,
        transaction,
        len: payload.len() as u32,
    };
    [&head.encode(), payload].concat()
}

impl Tree {
    /// Writes a node, with its events.
    pub fn write(&mut self, path: &str, value: &str) {
        assert!(
            path.len() + 1 + value.len() <= MAX_PAYLOAD,
            "no guest can write that"
        );
        self.change(NodeChange::Write(path.into(), value.into()))
            .unwrap();
    }

    /// Removes a node and all nodes below it, with their events; it need not exist.
    pub fn remove(&mut self, path: &str) {
        let _ = self.change(NodeChange::Remove(path.into()));
    }

    pub fn read(&self, path: &str) -> Option<String> {
        let (value, _) = self.nodes.get(path)?;
        Some(String::from_utf8_lossy(value).into_owned())
    }

    /// All nodes as text for messages of failed tests.
    fn list(&self) -> String {
        let line = |path: &String| format!("\n{path} = {:?}", self.read(path).unwrap_or_default());
        self.nodes.keys().map(line).collect()
    }

    /// All nodes below this one as text.
    pub fn below(&self, path: &str) -> String {
        let lines = self.list();
        let found = lines.lines().filter(|l| l.starts_with(path));
        found.map(|l| format!("{l}\n")).collect()
    }

    /// All domains but our own.
    pub fn guests(&self) -> Vec<String> {
        let names = children(&self.nodes, "/local/domain").unwrap_or_default();
        texts(&names).into_iter().filter(|d| d != "0").collect()
    }

    /// Removes the hooks of the test.
    pub fn forget_hooks(&mut self) {
        (self.on_change, self.refuse, self.last_word) = (None, None, None);
    }

    fn change(&mut self, change: NodeChange) -> DaemonReply {
        let told = apply(&mut self.nodes, &mut self.counter, &change)?;
        self.tell(&told);
        Ok(b"OK\0".to_vec())
    }

    fn tell(&self, told: &[(String, bool)]) {
        for (path, exact) in told {
            if let Some(f) = &self.on_change {
                f(path, self.read(path).as_deref());
            }
            for watch in &self.watches {
                let hears = if *exact {
                    watch.path == *path
                } else {
                    below(path, &watch.path)
                };
                if hears {
                    self.event(watch, path);
                }
            }
        }
    }

    fn event(&self, watch: &Watch, path: &str) {
        let home = format!("{HOME}/");
        let path = match watch.relative {
            true => path.strip_prefix(&home).unwrap_or(path),
            false => path,
        };
        let payload = [path.as_bytes(), &[0], watch.token.as_bytes(), &[0]].concat();
        let bytes = message(Operation::WatchEvent as u32, 0, 0, &payload);
        self.send(watch.client, bytes);
    }

    fn send(&self, client: u64, bytes: Vec<u8>) {
        if let Some((out, _)) = self.clients.get(&client) {
            let _ = out.send(bytes);
        }
    }

    fn gone(&mut self, client: u64) {
        self.watches.retain(|w| w.client != client);
        self.transactions.retain(|(c, _), _| *c != client);
        if let Some((_, socket)) = self.clients.remove(&client) {
            let _ = socket.shutdown(Shutdown::Read);
        }
    }

    fn handle(&mut self, client: u64, Message { head, payload }: &Message) {
        let args = texts(payload);
        let result = self.answer(client, head, payload, &args);
        let (operation, payload) = match result {
            Ok(payload) => (head.operation, payload),
            Err(code) => (Operation::Error as u32, [code.as_bytes(), &[0]].concat()),
        };
        let is_last = head.operation == Operation::Read as u32
            && self.last_word.is_some()
            && self.last_word == args.first().cloned();
        if is_last {
            let watches = self.watches.iter().filter(|w| w.client == client);
            watches.for_each(|w| self.event(w, &w.path));
        }
        self.send(
            client,
            message(operation, head.request, head.transaction, &payload),
        );
        if head.operation == Operation::Watch as u32
            && operation == head.operation
            && let Some(watch) = self.watches.last()
        {
            self.event(watch, &watch.path);
        }
        if is_last {
            self.gone(client);
        }
    }

    fn answer(&mut self, client: u64, head: &Head, payload: &[u8], args: &[String]) -> DaemonReply {
        const ALL: [Operation; 10] = [
            Operation::Directory,
            Operation::Read,
            Operation::Watch,
            Operation::Unwatch,
            Operation::TransactionStart,
            Operation::TransactionEnd,
            Operation::Write,
            Operation::Mkdir,
            Operation::Remove,
            Operation::SetPermissions,
        ];
        let known = ALL.into_iter().find(|o| *o as u32 == head.operation);
        let operation = known.ok_or("ENOSYS")?;
        let first = args.first().map(String::as_str).unwrap_or("");
        *self
            .requests
            .entry((head.operation, first.to_owned()))
            .or_default() += 1;
        if let Some(code) = self.refuse.as_ref().and_then(|f| f(operation, first)) {
            return Err(code);
        }
        let ok = || Ok(b"OK\0".to_vec());
        match operation {
            Operation::TransactionStart => {
                if head.transaction != 0 {
                    return Err("EBUSY");
                }
                self.next += 1;
                let nodes = &self.nodes;
                let transaction = OpenTransaction {
                    begun: nodes.clone(),
                    view: nodes.clone(),
                    touched: BTreeSet::new(),
                    changes: Vec::new(),
                };
                self.transactions.insert((client, self.next), transaction);
                return Ok(format!("{}\0", self.next).into_bytes());
            }
            Operation::TransactionEnd => {
                let key = (client, head.transaction);
                let done = self.transactions.remove(&key).ok_or("ENOENT")?;
                match first {
                    "T" => return self.commit(&done),
                    "F" => return ok(),
                    _ => return Err("EINVAL"),
                }
            }
            _ => {}
        }
        let path = check(first)?;
        let token = args.get(1).cloned();
        match operation {
            Operation::Watch => {
                let token = token.ok_or("EINVAL")?;
                let same = |w: &Watch| (w.client, &w.path, &w.token) == (client, &path, &token);
                if self.watches.iter().any(same) {
                    return Err("EEXIST");
                }
                self.watches.push(Watch {
                    client,
                    path,
                    token,
                    relative: !first.starts_with(['/', '@']),
                });
                return ok();
            }
            Operation::Unwatch => {
                let token = token.ok_or("EINVAL")?;
                let before = self.watches.len();
                self.watches
                    .retain(|w| (w.client, &w.path, &w.token) != (client, &path, &token));
                return if self.watches.len() < before {
                    ok()
                } else {
                    Err("ENOENT")
                };
            }
            _ => {}
        }
        let value = payload.get(first.len() + 1..).unwrap_or(&[]).to_vec();
        let change = match operation {
            Operation::Write => Some(NodeChange::Write(path.clone(), value)),
            Operation::Mkdir => Some(NodeChange::Make(path.clone())),
            Operation::Remove if path == "/" => return Err("EINVAL"),
            Operation::Remove => Some(NodeChange::Remove(path.clone())),
            _ => None,
        };
        let transaction = match head.transaction {
            0 => None,
            id => Some(self.transactions.get_mut(&(client, id)).ok_or("ENOENT")?),
        };
        if let Some(change) = change {
            let Some(t) = transaction else {
                return self.change(change);
            };
            t.touched.insert(path);
            apply(&mut t.view, &mut self.counter, &change)?;
            t.changes.push(change);
            return ok();
        }
        let nodes = match transaction {
            Some(t) => {
                t.touched.insert(path.clone());
                &t.view
            }
            None => &self.nodes,
        };
        match operation {
            Operation::Directory => children(nodes, &path),
            Operation::Read => nodes.get(&path).map(|n| n.0.clone()).ok_or("ENOENT"),
            _ => nodes.get(&path).map(|_| b"OK\0".to_vec()).ok_or("ENOENT"),
        }
    }

    fn commit(&mut self, t: &OpenTransaction) -> DaemonReply {
        let version = |nodes: &Nodes, p: &String| nodes.get(p).map(|n| n.1);
        let same = |p: &String| version(&t.begun, p) == version(&self.nodes, p);
        if !t.touched.iter().all(same) {
            return Err("EAGAIN");
        }
        for change in &t.changes {
            let _ = self.change(change.clone());
        }
        Ok(b"OK\0".to_vec())
    }
}

struct SharedTree {
    tree: Mutex<Tree>,
    changed: Condvar,
}

/// The daemon. Clients are served until their sockets close.
pub struct Daemon {
    shared: Arc<SharedTree>,
    dir: TempDir,
}

impl Daemon {
    pub fn new() -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let shared = Arc::new(SharedTree {
            tree: Mutex::default(),
            changed: Condvar::new(),
        });
        shared.tree.lock().write(HOME, "");
        let serving = Arc::downgrade(&shared);
        std::thread::spawn(move || {
            for (id, socket) in listener.incoming().flatten().enumerate() {
                let Some(shared) = serving.upgrade() else {
                    return;
                };
                std::thread::spawn(move || shared.serve(id as u64, socket));
            }
        });
        Daemon { shared, dir }
    }

    /// Connects another client.
    pub fn client(&self) -> Xenstore {
        Xenstore::connect_to(&self.dir.path().join("socket")).unwrap()
    }

    /// Destroys all guests, so that a server waits for none.
    pub fn end_guests(&self) {
        self.edit(|tree| {
            tree.forget_hooks();
            for domid in tree.guests() {
                tree.remove(&format!("/local/domain/{domid}"));
                tree.remove(&format!("/local/domain/0/backend/pvblk/{domid}"));
            }
        });
        self.fire("@releaseDomain");
    }

    /// Changes several nodes before any client sees one of them.
    pub fn edit<T>(&self, work: impl FnOnce(&mut Tree) -> T) -> T {
        let result = work(&mut self.shared.tree.lock());
        self.shared.changed.notify_all();
        result
    }

    pub fn read(&self, path: &str) -> Option<String> {
        self.shared.tree.lock().read(path)
    }

    pub fn write(&self, path: &str, value: &str) {
        self.edit(|t| t.write(path, value));
    }

    pub fn remove(&self, path: &str) {
        self.edit(|t| t.remove(path));
    }

    /// Notifies watches of a special path.
    pub fn fire(&self, special: &str) {
        self.edit(|t| t.tell(&[(special.to_owned(), false)]));
    }

    /// Calls `f` with each path that changes, and its new value.
    pub fn on_change(&self, f: impl Fn(&str, Option<&str>) + Send + 'static) {
        self.edit(|t| t.on_change = Some(Box::new(f)));
    }

    /// Refuses requests for which `f` returns an error.
    pub fn refuse(&self, f: impl Fn(Operation, &str) -> Option<&'static str> + Send + 'static) {
        self.edit(|t| t.refuse = Some(Box::new(f)));
    }

    /// A client that reads this path gets an event that everything changed, the reply, and then the end of its
    /// connection.
    pub fn last_word(&self, path: &str) {
        self.edit(|t| t.last_word = Some(path.to_owned()));
    }

    /// Number of requests of this kind for this path.
    pub fn requests(&self, operation: Operation, path: &str) -> usize {
        let tree = self.shared.tree.lock();
        let found = tree.requests.get(&(operation as u32, path.to_owned()));
        found.copied().unwrap_or(0)
    }

    /// Waits until `done` is true of the tree.
    pub fn until(&self, what: &str, mut done: impl FnMut(&Tree) -> bool) {
        let deadline = Instant::now() + WAIT;
        let mut tree = self.shared.tree.lock();
        while !done(&tree) {
            let timed_out = self
                .shared
                .changed
                .wait_until(&mut tree, deadline)
                .timed_out();
            assert!(!timed_out, "{what}; there is{}", tree.list());
        }
    }

    /// Waits until a node has this value.
    pub fn until_is(&self, path: &str, value: &str) {
        self.until(&format!("{path} is {value}"), |t| {
            t.read(path).as_deref() == Some(value)
        });
    }

    /// Waits until a node is gone.
    pub fn until_gone(&self, path: &str) {
        self.until(&format!("{path} is gone"), |t| t.read(path).is_none());
    }
}

impl SharedTree {
    fn serve(self: Arc<SharedTree>, id: u64, mut socket: UnixStream) {
        let (out, queue) = channel::<Vec<u8>>();
        let mut writer = socket.try_clone().unwrap();
        let ours = socket.try_clone().unwrap();
        self.tree.lock().clients.insert(id, (out, ours));
        // On a thread of its own: a client that doesn't read its events must not stop the others.
        std::thread::spawn(move || {
            while let Ok(bytes) = queue.recv() {
                if writer.write_all(&bytes).is_err() {
                    break;
                }
            }
            let _ = writer.shutdown(Shutdown::Both);
        });
        let (mut input, mut bytes) = (Vec::new(), [0; 4096]);
        while let Ok(n @ 1..) = socket.read(&mut bytes) {
            input.extend(&bytes[..n]);
            while let Ok(Some(message)) = take_message(&mut input) {
                self.tree.lock().handle(id, &message);
                self.changed.notify_all();
            }
        }
        self.tree.lock().gone(id);
    }
}
