//! [`Users`]: the front ends and clients of a disk, and its fence.
//!
//! A front end that comes back sends again the requests that had no response; an old write that is still at
//! work could land on top of a newer one (docs/decisions/0006-reconnect.md). So while sources of a front end
//! that is gone have requests at work, the disk's *fence* is closed, over all exports: no front end is let
//! in. The fence belongs to the disk, and its users alone decide its state: no server opens or closes it.
//!
//! ```text
//!  enter ──▶ present ──its User is dropped──▶ gone, the fence is closed ──its last source has ended──▶ forgotten
//! ```
//!
//! NBD has no name for "the same client", so its clients don't wait for the fence, and don't close
//! it.

use crate::ratelimit::RateLimit;
use crate::ratelimited;
use parking_lot::Mutex;
use pvblk_block::{Error, ErrorKind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// Called when a fence opens, on any thread; it must not block. A front end that waits keeps it.
pub type FenceOpened = Arc<dyn Fn() + Send + Sync>;

/// The users of one disk.
///
/// A disk with a file system that isn't made for sharing loses data when two front ends write to it. That the disk is meant to be
/// shared can't be seen from here, so a second one is let in with a warning, unless the disk is exclusive.
pub struct Users {
    disk: String,
    exclusive: AtomicBool,
    state: Mutex<UsersState>,
}

#[derive(Default)]
struct UsersState {
    /// In the order in which they came. Clients of NBD are one.
    names: Vec<(String, usize)>,
    /// Front ends that are gone and have sources. The fence is closed while there are any.
    gone: usize,
    /// Front ends that wait for the fence.
    waiting: Vec<Weak<dyn Fn() + Send + Sync>>,
    /// Nobody is let in any more.
    closed: bool,
}

/// A front end among the [`Users`] of a disk. Dropping it says that the front end is gone.
#[derive(Debug)]
pub struct User {
    place: Arc<Place>,
}

/// A user's place, which its sources keep until they have ended.
pub(crate) struct Place {
    users: Arc<Users>,
    name: String,
    end: Mutex<PlaceEnd>,
}

#[derive(Default)]
struct PlaceEnd {
    /// Counted in [`UsersState::gone`].
    gone: bool,
    /// Called when the last source has ended and the fence is open, as far as this place goes.
    then: Option<Box<dyn FnOnce() + Send>>,
}

impl Users {
    /// Of a disk of that name; `exclusive`: a second user is refused.
    pub(crate) fn new(disk: &str, exclusive: bool) -> Arc<Users> {
        Arc::new(Users {
            disk: disk.to_owned(),
            exclusive: AtomicBool::new(exclusive),
            state: Mutex::default(),
        })
    }

    /// True if a second user is refused.
    pub fn is_exclusive(&self) -> bool {
        self.exclusive.load(Ordering::Relaxed)
    }

    /// Refuses a second user from now on, or doesn't; those that are there stay.
    pub fn set_exclusive(&self, exclusive: bool) {
        self.exclusive.store(exclusive, Ordering::Relaxed);
    }

    /// The users that are there or have requests at work, in the order in which they came, and how many clients or queues each one has.
    pub fn names(&self) -> Vec<(String, usize)> {
        self.state.lock().names.clone()
    }

    /// Lets nobody in any more. Unless `force`, errors with the users if there are any, and goes on letting in.
    pub fn close(&self, force: bool) -> Result<(), Vec<(String, usize)>> {
        let mut state = self.state.lock();
        if !force && !state.names.is_empty() {
            return Err(state.names.clone());
        }
        state.closed = true;
        Ok(())
    }

    /// Lets users in again.
    pub fn reopen(&self) {
        self.state.lock().closed = false;
    }

    /// True if nobody is let in any more.
    pub fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    /// Lets a front end in; `None` while the fence is closed: then `opened` is called when it opens, if it is still there. Warns if there is
    /// another user, or refuses.
    pub(crate) fn enter(
        self: &Arc<Users>,
        name: &str,
        opened: &FenceOpened,
    ) -> Result<Option<User>, Error> {
        let mut state = self.state.lock();
        if !state.is_open(opened) {
            return Ok(None);
        }
        let place = self.place(&mut state, name)?;
        Ok(Some(User { place }))
    }

    /// Lets a client in that the fence has nothing to do with. Clients of one name are one user.
    pub(crate) fn enter_client(self: &Arc<Users>, name: &str) -> Result<Arc<Place>, Error> {
        self.place(&mut self.state.lock(), name)
    }

    /// True if the fence is open: a front end may begin. Otherwise `opened` is called once when it opens, if it is still there.
    pub fn fence_is_open(&self, opened: &FenceOpened) -> bool {
        self.state.lock().is_open(opened)
    }

    fn place(self: &Arc<Users>, state: &mut UsersState, name: &str) -> Result<Arc<Place>, Error> {
        if state.closed {
            let why = format!("disk {} is being removed", self.disk);
            return Err(Error::new(ErrorKind::Disconnected, why));
        }
        let names = &mut state.names;
        match names.iter_mut().find(|(n, _)| n == name) {
            Some((_, count)) => *count += 1,
            None => {
                if let Some((other, _)) = names.first() {
                    let disk = &self.disk;
                    if self.is_exclusive() {
                        let why = format!("disk {disk} is exclusive, and {other} uses it");
                        return Err(Error::new(ErrorKind::Exhausted, why));
                    }
                    ratelimited!(
                        warn,
                        RateLimit::of(disk, "shared"),
                        "disk {disk}: {name} uses it beside {other}: a file system that isn't made for sharing loses data; --exclusive {disk} refuses a second one"
                    );
                }
                names.push((name.to_owned(), 1));
            }
        }
        Ok(Arc::new(Place {
            users: Arc::clone(self),
            name: name.to_owned(),
            end: Mutex::default(),
        }))
    }
}

impl UsersState {
    fn is_open(&mut self, opened: &FenceOpened) -> bool {
        if self.gone == 0 {
            return true;
        }
        let opened = Arc::downgrade(opened);
        // Those that gave up leave nothing behind, so that a disk that hangs keeps no more than there are front ends.
        self.waiting
            .retain(|w| w.strong_count() > 0 && !w.ptr_eq(&opened));
        self.waiting.push(opened);
        false
    }
}

impl User {
    pub(crate) fn place(&self) -> &Arc<Place> {
        &self.place
    }

    /// True if no source of it is left.
    pub(crate) fn is_idle(&self) -> bool {
        Arc::strong_count(&self.place) == 1
    }

    /// Has `then` called when the front end is gone and its last source has ended: by the thread that ends it.
    pub(crate) fn at_end(&self, then: impl FnOnce() + Send + 'static) {
        self.place.end.lock().then = Some(Box::new(then));
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.place.users.state.lock().gone += 1;
        self.place.end.lock().gone = true;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let end = self.end.get_mut();
        let mut opened = Vec::new();
        {
            let mut state = self.users.state.lock();
            if let Some(index) = state.names.iter().position(|(n, _)| *n == self.name) {
                state.names[index].1 -= 1;
                if state.names[index].1 == 0 {
                    state.names.remove(index);
                }
            }
            if end.gone {
                state.gone -= 1;
                if state.gone == 0 {
                    opened = std::mem::take(&mut state.waiting);
                }
            }
        }
        opened
            .iter()
            .filter_map(Weak::upgrade)
            .for_each(|tell| tell());
        if let Some(then) = end.then.take() {
            then();
        }
    }
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Place").field("name", &self.name).finish()
    }
}

impl std::fmt::Debug for Users {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Users")
            .field("names", &state.names)
            .field("gone", &state.gone)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn nobody() -> FenceOpened {
        Arc::new(|| ())
    }

    fn enter(users: &Arc<Users>, name: &str) -> Result<Option<User>, Error> {
        users.enter(name, &nobody())
    }

    #[test]
    fn an_exclusive_disk_has_one_user_at_a_time() {
        let users = Users::new("a", true);
        let first = users.enter_client("NBD").unwrap();
        let again = users.enter_client("NBD").unwrap();
        let refused = enter(&users, "guest 2").unwrap_err();
        assert_eq!(refused.to_string(), "disk a is exclusive, and NBD uses it");
        drop(first);
        assert!(enter(&users, "guest 2").is_err());
        drop(again);
        let second = enter(&users, "guest 2").unwrap().unwrap();
        assert!(users.enter_client("NBD").is_err());
        // Its requests are at work: one that comes waits, and isn't refused.
        let source = Arc::clone(second.place());
        drop(second);
        assert!(enter(&users, "guest 3").unwrap().is_none());
        drop(source);
        assert!(enter(&users, "guest 3").unwrap().is_some());
    }

    #[test]
    fn others_are_let_in() {
        let users = Users::new("a", false);
        let first = enter(&users, "guest 1").unwrap().unwrap();
        let second = enter(&users, "guest 2").unwrap().unwrap();
        drop((first, second));
        assert!(users.state.lock().names.is_empty());
    }

    #[test]
    fn the_fence_opens_when_the_last_source_of_those_who_are_gone_has_ended_and_tells_each_waiter_once()
     {
        let users = Users::new("a", false);
        let told = Arc::new(AtomicUsize::new(0));
        let waiter = || -> FenceOpened {
            let told = Arc::clone(&told);
            Arc::new(move || {
                told.fetch_add(1, Ordering::Relaxed);
            })
        };
        let (one, two, three) = (waiter(), waiter(), waiter());
        let users_now = || told.load(Ordering::Relaxed);
        let front = || enter(&users, "guest").unwrap().unwrap();
        let (a, b) = (front(), front());
        let (of_a, of_b) = (Arc::clone(a.place()), Arc::clone(b.place()));
        assert!(users.fence_is_open(&one) && !a.is_idle() && !b.is_idle());
        let ended = Arc::new(AtomicUsize::new(0));
        let mark = Arc::clone(&ended);
        a.at_end(move || {
            mark.fetch_add(1, Ordering::Relaxed);
        });
        drop((a, b));
        assert!(!users.fence_is_open(&one) && !users.fence_is_open(&one));
        assert!(users.enter("guest", &two).unwrap().is_none());
        assert!(!users.fence_is_open(&three));
        // It gave up.
        drop(three);
        // NBD's clients neither wait nor are waited for.
        let client = users.enter_client("NBD").unwrap();
        drop(of_a);
        assert_eq!(ended.load(Ordering::Relaxed), 1);
        assert!(!users.fence_is_open(&one) && users_now() == 0);
        drop(of_b);
        assert_eq!(users_now(), 2);
        assert!(users.fence_is_open(&one));
        // One without sources closes nothing behind it.
        drop(enter(&users, "guest").unwrap());
        assert!(users.fence_is_open(&one) && users_now() == 2);
        drop(client);
    }
}
