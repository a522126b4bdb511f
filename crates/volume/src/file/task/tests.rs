use super::*;
use crate::FileVolume;
use crate::spec::FileSpec;
use pvblk_sys::Buffer;
use std::sync::Arc;

fn volume() -> (tempfile::TempDir, Arc<FileShared>) {
    let folder = tempfile::tempdir().unwrap();
    let spec = FileSpec {
        size_bytes: Some(1 << 20),
        ..FileSpec::new(folder.path().join("disk"))
    };
    let volume = FileVolume::open(&spec).unwrap();
    (folder, Arc::clone(&volume.shared))
}

fn os(errno: Errno) -> io::Result<u64> {
    Err(errno.into())
}

fn write(fua: bool) -> Box<Request> {
    let buffer = Buffer::anonymous(4096).unwrap();
    let mut request = Request::with_buffers(Op::Write, 0, vec![buffer], 0);
    request.flags.set(RequestFlags::FUA, fua);
    request
}

#[test]
fn a_short_write_goes_on_and_fua_syncs_where_the_write_does_not() {
    let (_folder, shared) = volume();
    for (fua, durable, last) in [
        (false, false, Next::Done(Status::Ok)),
        (true, true, Next::Done(Status::Ok)),
        (true, false, Next::Step),
    ] {
        let request = write(fua);
        let mut task = Task::begin(&request).unwrap();
        assert_eq!(
            task.advance(&request, Ok(1024), durable, &shared),
            Next::Step
        );
        assert_eq!(
            task.advance(&request, os(Errno::INTR), durable, &shared),
            Next::Step
        );
        assert_eq!((task.step, task.done), (Step::Data, 1024));
        assert_eq!(task.advance(&request, Ok(3072), durable, &shared), last);
        if last == Next::Step {
            assert_eq!(task.step, Step::Sync);
            assert_eq!(
                task.advance(&request, Ok(0), durable, &shared),
                Next::Done(Status::Ok)
            );
        }
    }
}

#[test]
fn a_write_that_stops_fails_and_a_read_that_stops_is_zeros() {
    let (_folder, shared) = volume();
    let mut request = write(false);
    let mut task = Task::begin(&request).unwrap();
    assert_eq!(
        task.advance(&request, Ok(0), true, &shared),
        Next::Done(Status::IoError)
    );
    request.op = Op::Read;
    request.buffers[0].write(0, &[9; 4096]);
    let mut task = Task::begin(&request).unwrap();
    assert_eq!(task.advance(&request, Ok(1000), true, &shared), Next::Step);
    assert_eq!(
        task.advance(&request, Ok(0), true, &shared),
        Next::Done(Status::Ok)
    );
    let data = request.buffers[0].to_vec();
    assert!(data[..1000].iter().all(|&b| b == 9) && data[1000..].iter().all(|&b| b == 0));
}

#[test]
fn write_zeroes_falls_back_to_writing_and_then_syncs() {
    let (_folder, shared) = volume();
    let mut request = Request::new(Op::WriteZeroes, 0, 16, 0);
    request.flags = RequestFlags::FUA | RequestFlags::NO_UNMAP;
    assert_eq!(
        allocate_mode(&request),
        FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE
    );
    let mut task = Task::begin(&request).unwrap();
    assert_eq!(
        task.advance(&request, os(Errno::OPNOTSUPP), true, &shared),
        Next::Step
    );
    assert_eq!((task.step, task.done), (Step::Zeros, 0));
    assert_eq!(task.advance(&request, Ok(4096), true, &shared), Next::Step);
    assert_eq!((task.step, task.done), (Step::Zeros, 4096));
    assert_eq!(task.advance(&request, Ok(4096), true, &shared), Next::Step);
    assert_eq!(task.step, Step::Sync);
    assert_eq!(
        task.advance(&request, Ok(0), true, &shared),
        Next::Done(Status::Ok)
    );
    let request = Request::new(Op::Discard, 0, 16, 0);
    for (errno, status) in [
        (Errno::OPNOTSUPP, Status::Unsupported),
        (Errno::BUSY, Status::Ok),
        (Errno::IO, Status::IoError),
    ] {
        let mut task = Task::begin(&request).unwrap();
        assert_eq!(
            task.advance(&request, os(errno), true, &shared),
            Next::Done(status)
        );
    }
}

#[test]
fn errors_have_their_status() {
    let (_folder, shared) = volume();
    for (errno, status) in [
        (Errno::NOSPC, Status::NoSpace),
        (Errno::DQUOT, Status::NoSpace),
        (Errno::OPNOTSUPP, Status::Unsupported),
        (Errno::IO, Status::IoError),
        (Errno::INVAL, Status::IoError),
    ] {
        let request = write(false);
        let mut task = Task::begin(&request).unwrap();
        assert_eq!(
            task.advance(&request, os(errno), true, &shared),
            Next::Done(status)
        );
    }
    assert!(!shared.data_lost.load(Ordering::Acquire));
}

#[test]
fn a_failed_flush_is_never_forgotten() {
    for durable in [false, true] {
        let (_folder, shared) = volume();
        let flush = Request::new(Op::Flush, 0, 0, 0);
        let mut task = Task::begin(&flush).unwrap();
        assert_eq!(
            task.advance(&flush, Ok(0), true, &shared),
            Next::Done(Status::Ok)
        );
        let failing = if durable { write(true) } else { flush };
        let mut task = Task::begin(&failing).unwrap();
        assert_eq!(
            task.advance(&failing, os(Errno::IO), true, &shared),
            Next::Done(Status::IoError)
        );
        let flush = Request::new(Op::Flush, 0, 0, 0);
        let mut task = Task::begin(&flush).unwrap();
        assert_eq!(
            task.advance(&flush, Ok(0), true, &shared),
            Next::Done(Status::IoError)
        );
    }
}
