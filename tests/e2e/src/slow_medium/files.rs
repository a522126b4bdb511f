//! The files of the medium, as the kernel asks for them.

use super::rules::Kind;
use super::schedule::{Job, Schedule};
use super::{Options, control};
use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyWrite, Request, TimeOrNow,
    WriteFlags,
};
use rustix::fs::{FallocateFlags, MemfdFlags, SeekFrom};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

/// Inode of the control file; the files follow.
const CONTROL: u64 = 2;
/// Attributes and names are asked for each time.
const NO_TIME: Duration = Duration::ZERO;
const HANDLE: FileHandle = FileHandle(0);

#[derive(Debug)]
pub(super) struct Node {
    ino: u64,
    name: String,
    pub file: File,
}

/// All files, by name.
#[derive(Debug)]
pub(super) struct Files {
    nodes: Mutex<BTreeMap<String, Arc<Node>>>,
    next: Mutex<u64>,
    options: Options,
}

impl Files {
    /// Those that are in the backing folder already, if there is one.
    pub fn new(options: Options) -> io::Result<Files> {
        let files = Files {
            nodes: Mutex::default(),
            next: Mutex::new(CONTROL + 1),
            options,
        };
        if let Some(folder) = &files.options.backing {
            for entry in std::fs::read_dir(folder)? {
                let entry = entry?;
                if entry.file_type()?.is_file() {
                    files.add(&entry.file_name().to_string_lossy())?;
                }
            }
        }
        Ok(files)
    }

    fn nodes(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Node>>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file `name`, an empty one if it is new.
    pub fn add(&self, name: &str) -> io::Result<Arc<Node>> {
        let mut nodes = self.nodes();
        if let Some(node) = nodes.get(name) {
            return Ok(Arc::clone(node));
        }
        let file = match &self.options.backing {
            Some(folder) => File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(folder.join(name))?,
            None => File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?),
        };
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let node = Arc::new(Node {
            ino: *next,
            name: name.to_owned(),
            file,
        });
        *next += 1;
        nodes.insert(name.to_owned(), Arc::clone(&node));
        Ok(node)
    }

    /// The file `name`, if there is one.
    pub fn get(&self, name: &str) -> Option<Arc<Node>> {
        self.nodes().get(name).cloned()
    }

    fn names(&self) -> Vec<String> {
        self.nodes().keys().cloned().collect()
    }

    fn by_inode(&self, ino: INodeNo) -> Result<Arc<Node>, Errno> {
        let nodes = self.nodes();
        let found = nodes.values().find(|n| n.ino == ino.0).cloned();
        // A file that was unlinked while it is open isn't found.
        found.ok_or(Errno::ENOENT)
    }
}

/// The file system's side of the FUSE connection.
#[derive(Debug)]
pub(super) struct SlowFs {
    pub files: Arc<Files>,
    pub schedule: Arc<Schedule>,
}

fn attributes(ino: u64, kind: FileType, size: u64, blocks: u64) -> FileAttr {
    let then = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino: INodeNo(ino),
        size,
        blocks,
        atime: then,
        mtime: then,
        ctime: then,
        crtime: then,
        kind,
        perm: if kind == FileType::Directory {
            0o755
        } else {
            0o600
        },
        nlink: 1,
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Node {
    fn attributes(&self) -> io::Result<FileAttr> {
        let metadata = self.file.metadata()?;
        let (size, blocks) = (metadata.len(), metadata.blocks());
        Ok(attributes(self.ino, FileType::RegularFile, size, blocks))
    }

    fn read(&self, offset: u64, size: u32) -> io::Result<Vec<u8>> {
        let mut data = vec![0; size as usize];
        let mut at = 0;
        while at < data.len() {
            match self.file.read_at(&mut data[at..], offset + at as u64)? {
                0 => break,
                n => at += n,
            }
        }
        data.truncate(at);
        Ok(data)
    }

    fn allocate(&self, offset: u64, length: u64, mode: i32) -> io::Result<()> {
        let flags = FallocateFlags::from_bits_retain(mode as u32);
        let done = rustix::fs::fallocate(&self.file, flags, offset, length);
        // Memory has no mode that zeroes and keeps the place; a hole reads the same.
        let zero = flags.contains(FallocateFlags::ZERO_RANGE);
        if done == Err(rustix::io::Errno::OPNOTSUPP) && zero {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let end = offset + length;
            if !flags.contains(FallocateFlags::KEEP_SIZE) && self.file.metadata()?.len() < end {
                self.file.set_len(end)?;
            }
            return Ok(rustix::fs::fallocate(&self.file, hole, offset, length)?);
        }
        Ok(done?)
    }

    fn seek(&self, offset: i64, whence: i32) -> io::Result<i64> {
        let offset = u64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        let from = match whence {
            SEEK_DATA => SeekFrom::Data(offset),
            SEEK_HOLE => SeekFrom::Hole(offset),
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let at = rustix::fs::seek(&self.file, from)?;
        i64::try_from(at).map_err(io::Error::other)
    }
}

const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;

fn control_attributes() -> FileAttr {
    attributes(CONTROL, FileType::RegularFile, 0, 0)
}

fn error(e: io::Error) -> Errno {
    Errno::from(e)
}

impl SlowFs {
    /// Treats a request to `ino` by its rule: `done` does the request and completes it.
    fn treat<R: Send + 'static>(
        &self,
        ino: INodeNo,
        kind: Kind,
        reply: R,
        refuse: fn(R, Errno),
        done: impl FnOnce(&Node, R) + Send + 'static,
    ) {
        let node = match self.files.by_inode(ino) {
            Ok(node) => node,
            Err(e) => return refuse(reply, e),
        };
        let name = node.name.clone();
        let job: Job = Box::new(move |errno| match errno {
            Some(errno) => refuse(reply, Errno::from_i32(errno)),
            None => done(&node, reply),
        });
        self.schedule.take(&name, kind, job);
    }

    fn open_flags(&self) -> FopenFlags {
        // Nobody else changes the files. Without this an `open` throws the cached pages out, and waits for those that a
        // held request has locked.
        let mut flags = FopenFlags::FOPEN_KEEP_CACHE;
        if self.files.options.direct_io {
            flags |= FopenFlags::FOPEN_DIRECT_IO;
        }
        if self.files.options.parallel_writes {
            flags |= FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        }
        flags
    }
}

impl Filesystem for SlowFs {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Held requests may be many, and none may keep the kernel from sending others.
        let _ = config.set_max_background(u16::MAX);
        let _ = config.set_max_write(1 << 20);
        let mut wanted = Vec::new();
        if self.files.options.asynchronous {
            wanted.push(InitFlags::FUSE_ASYNC_DIO);
        }
        if self.files.options.write_back {
            wanted.push(InitFlags::FUSE_WRITEBACK_CACHE);
        }
        for flag in wanted {
            config
                .add_capabilities(flag)
                .map_err(|_| io::Error::other(format!("this kernel's FUSE lacks {flag:?}")))?;
        }
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && name == control::NAME {
            return reply.entry(&NO_TIME, &control_attributes(), Generation(0));
        }
        match self.files.get(&name.to_string_lossy()) {
            Some(node) if parent == INodeNo::ROOT => match node.attributes() {
                Ok(attributes) => reply.entry(&NO_TIME, &attributes, Generation(0)),
                Err(e) => reply.error(error(e)),
            },
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match ino {
            INodeNo::ROOT => reply.attr(&NO_TIME, &attributes(1, FileType::Directory, 0, 0)),
            INodeNo(CONTROL) => reply.attr(&NO_TIME, &control_attributes()),
            _ => self.treat(
                ino,
                Kind::Getattr,
                reply,
                ReplyAttr::error,
                |node, reply| match node.attributes() {
                    Ok(attributes) => reply.attr(&NO_TIME, &attributes),
                    Err(e) => reply.error(error(e)),
                },
            ),
        }
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if ino == INodeNo(CONTROL) {
            return reply.attr(&NO_TIME, &control_attributes());
        }
        let kind = match size {
            Some(_) => Kind::Truncate,
            None => Kind::Getattr,
        };
        self.treat(ino, kind, reply, ReplyAttr::error, move |node, reply| {
            let done = size.map_or(Ok(()), |size| node.file.set_len(size));
            match done.and_then(|()| node.attributes()) {
                Ok(attributes) => reply.attr(&NO_TIME, &attributes),
                Err(e) => reply.error(error(e)),
            }
        });
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.to_string_lossy();
        let known = parent == INodeNo::ROOT && self.files.nodes().remove(&*name).is_some();
        if !known {
            return reply.error(Errno::ENOENT);
        }
        if let Some(folder) = &self.files.options.backing
            && let Err(e) = std::fs::remove_file(folder.join(&*name))
        {
            return reply.error(error(e));
        }
        reply.ok();
    }

    fn open(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        if ino == INodeNo(CONTROL) {
            return reply.opened(HANDLE, FopenFlags::FOPEN_DIRECT_IO);
        }
        let flags = self.open_flags();
        self.treat(ino, Kind::Open, reply, ReplyOpen::error, move |_, reply| {
            reply.opened(HANDLE, flags);
        });
    }

    fn create(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        if parent != INodeNo::ROOT || name == control::NAME {
            return reply.error(Errno::EPERM);
        }
        let node = match self.files.add(&name.to_string_lossy()) {
            Ok(node) => node,
            Err(e) => return reply.error(error(e)),
        };
        let flags = self.open_flags();
        let refuse = ReplyCreate::error;
        self.treat(
            INodeNo(node.ino),
            Kind::Open,
            reply,
            refuse,
            move |node, reply| match node.attributes() {
                Ok(attributes) => {
                    reply.created(&NO_TIME, &attributes, Generation(0), HANDLE, flags);
                }
                Err(e) => reply.error(error(e)),
            },
        );
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if ino == INodeNo(CONTROL) {
            let text = control::status(&self.schedule, &self.files.names());
            let from = usize::try_from(offset)
                .unwrap_or(usize::MAX)
                .min(text.len());
            let to = from.saturating_add(size as usize).min(text.len());
            return reply.data(&text.as_bytes()[from..to]);
        }
        self.treat(
            ino,
            Kind::Read,
            reply,
            ReplyData::error,
            move |node, reply| match node.read(offset, size) {
                Ok(data) => reply.data(&data),
                Err(e) => reply.error(error(e)),
            },
        );
    }

    fn write(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let len = data.len() as u32;
        if ino == INodeNo(CONTROL) {
            return match control::obey(&self.schedule, &String::from_utf8_lossy(data)) {
                Ok(()) => reply.written(len),
                Err(_) => reply.error(Errno::EINVAL),
            };
        }
        let data = data.to_owned();
        let refuse = ReplyWrite::error;
        self.treat(
            ino,
            Kind::Write,
            reply,
            refuse,
            move |node, reply| match node.file.write_all_at(&data, offset) {
                Ok(()) => reply.written(len),
                Err(e) => reply.error(error(e)),
            },
        );
    }

    fn flush(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        if ino == INodeNo(CONTROL) {
            return reply.ok();
        }
        self.treat(ino, Kind::Close, reply, ReplyEmpty::error, |_, reply| {
            reply.ok();
        });
    }

    fn fsync(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        if ino == INodeNo(CONTROL) {
            return reply.ok();
        }
        self.treat(ino, Kind::Fsync, reply, ReplyEmpty::error, |_, reply| {
            reply.ok();
        });
    }

    fn readdir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let mut all = vec![
            (1, FileType::Directory, ".".to_owned()),
            (1, FileType::Directory, "..".to_owned()),
            (CONTROL, FileType::RegularFile, control::NAME.to_owned()),
        ];
        let nodes = self.files.nodes();
        all.extend(
            nodes
                .values()
                .map(|n| (n.ino, FileType::RegularFile, n.name.clone())),
        );
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        for (i, (ino, kind, name)) in all.into_iter().enumerate().skip(from) {
            if reply.add(INodeNo(ino), i as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn fallocate(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let refuse = ReplyEmpty::error;
        self.treat(
            ino,
            Kind::Fallocate,
            reply,
            refuse,
            move |node, reply| match node.allocate(offset, length, mode) {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(error(e)),
            },
        );
    }

    fn lseek(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let refuse = ReplyLseek::error;
        self.treat(
            ino,
            Kind::Lseek,
            reply,
            refuse,
            move |node, reply| match node.seek(offset, whence) {
                Ok(at) => reply.offset(at),
                Err(e) => reply.error(error(e)),
            },
        );
    }
}
