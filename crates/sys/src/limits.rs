//! Resource limits of the process.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Raises the soft limit on open descriptors to the hard limit: a server needs about ten descriptors for each
/// attached disk. Returns the limit in force; `None` if there is none.
pub fn raise_open_files() -> Option<u64> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // A refusal leaves the limit as it was.
    let _ = setrlimit(Resource::Nofile, limit);
    getrlimit(Resource::Nofile).current
}

/// True if the process may do whatever root may do.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        let now = super::raise_open_files();
        let hard = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
        assert_eq!(now, hard);
    }
}
