//! [`Users`]: who uses a disk, so that a second one doesn't come in without a word.

use crate::seldom;
use crate::seldom::Seldom;
use parking_lot::Mutex;
use pvblk_block::{Error, ErrorKind};
use std::sync::Arc;

/// The front ends of a disk, by name. A front end may have many queues; it is one user.
///
/// A disk with a file system that isn't made for sharing loses data when two front ends write to it. That the disk is meant to be
/// shared can't be seen from here, so a second one is let in with a warning, unless the disk is exclusive.
#[derive(Debug)]
pub struct Users {
    disk: String,
    exclusive: bool,
    names: Mutex<Vec<(String, usize)>>,
}

/// A place among the [`Users`] of a disk, until it is dropped.
#[derive(Debug)]
pub struct User {
    users: Arc<Users>,
    name: String,
}

impl Users {
    /// Of a disk of that name; `exclusive`: a second one is refused.
    pub fn new(disk: &str, exclusive: bool) -> Arc<Users> {
        Arc::new(Users {
            disk: disk.to_owned(),
            exclusive,
            names: Mutex::default(),
        })
    }

    /// Lets `name` in, once more if it is there already. Warns if there is another one, or refuses.
    pub fn enter(self: &Arc<Users>, name: &str) -> Result<Arc<User>, Error> {
        let mut names = self.names.lock();
        match names.iter_mut().find(|(n, _)| n == name) {
            Some((_, count)) => *count += 1,
            None => {
                if let Some((other, _)) = names.first() {
                    let disk = &self.disk;
                    if self.exclusive {
                        let why = format!("disk {disk} is exclusive, and {other} uses it");
                        return Err(Error::new(ErrorKind::Exhausted, why));
                    }
                    seldom!(
                        warn,
                        Seldom::of(disk, "shared"),
                        "disk {disk}: {name} uses it beside {other}: a file system that isn't made for sharing loses data; --exclusive {disk} refuses a second one"
                    );
                }
                names.push((name.to_owned(), 1));
            }
        }
        Ok(Arc::new(User {
            users: Arc::clone(self),
            name: name.to_owned(),
        }))
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let mut names = self.users.names.lock();
        if let Some(index) = names.iter().position(|(n, _)| *n == self.name) {
            names[index].1 -= 1;
            if names[index].1 == 0 {
                names.remove(index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exclusive_disk_has_one_user_at_a_time() {
        let users = Users::new("a", true);
        let first = users.enter("guest 1").unwrap();
        let again = users.enter("guest 1").unwrap();
        let refused = users.enter("guest 2").unwrap_err();
        assert_eq!(
            refused.to_string(),
            "disk a is exclusive, and guest 1 uses it"
        );
        drop(first);
        assert!(users.enter("guest 2").is_err());
        drop(again);
        assert!(users.enter("guest 2").is_ok());
        assert!(users.enter("guest 1").is_ok());
    }

    #[test]
    fn others_are_let_in() {
        let users = Users::new("a", false);
        let first = users.enter("guest 1").unwrap();
        let second = users.enter("guest 2").unwrap();
        drop((first, second));
        assert!(users.names.lock().is_empty());
    }
}
