//! [`PortTable`]: the sockets of a server, by number. A number is never given out again.

use super::server::Port;
use std::collections::BTreeMap;
use std::ops::{Index, IndexMut};
use std::path::Path;

#[derive(Default)]
pub(super) struct PortTable {
    ports: BTreeMap<usize, Port>,
    next: usize,
}

impl PortTable {
    /// The number of the port that is put in next.
    pub fn next(&self) -> usize {
        self.next
    }

    pub fn put(&mut self, port: Port) {
        self.ports.insert(self.next, port);
        self.next += 1;
    }

    pub fn take(&mut self, number: usize) {
        self.ports.remove(&number);
    }

    pub fn has(&self, number: usize) -> bool {
        self.ports.contains_key(&number)
    }

    pub fn get(&mut self, number: usize) -> Option<&mut Port> {
        self.ports.get_mut(&number)
    }

    /// The port that listens there.
    pub fn at(&self, path: &Path) -> Option<usize> {
        let mut all = self.ports.iter();
        all.find(|(_, port)| port.path() == Some(path))
            .map(|(number, _)| *number)
    }

    pub fn numbers(&self) -> Vec<usize> {
        self.ports.keys().copied().collect()
    }
}

impl Index<usize> for PortTable {
    type Output = Port;

    fn index(&self, number: usize) -> &Port {
        &self.ports[&number]
    }
}

impl IndexMut<usize> for PortTable {
    fn index_mut(&mut self, number: usize) -> &mut Port {
        let port = self.ports.get_mut(&number);
        port.unwrap_or_else(|| panic!("there is no port {number}"))
    }
}
