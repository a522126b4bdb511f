//! [`SpareRequests`]: spare requests, so that the hot path doesn't allocate; they are freed when it
//! isn't used.

use pvblk_block::{Op, Request};

/// Requests that are not in flight, with their lists of buffers, for reuse.
#[derive(Default)]
pub struct SpareRequests(Vec<Box<Request>>);

impl SpareRequests {
    /// A spare request, or a new one; it has no buffers.
    #[inline(always)]
    pub fn take(&mut self) -> Box<Request> {
        let spare = self.0.pop();
        spare.unwrap_or_else(|| Request::new(Op::Flush, 0, 0, 0))
    }

    /// Keeps a request without its buffers.
    #[inline(always)]
    pub fn keep(&mut self, mut request: Box<Request>) {
        request.buffers.clear();
        self.0.push(request);
    }

    /// Frees all spare requests.
    pub fn release(&mut self) {
        self.0 = Vec::new();
    }

    /// Number of spare requests.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if there are no spare requests.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvblk_block::Buffer;

    #[test]
    fn requests_are_used_again_without_their_buffers_until_they_go() {
        let mut spare = SpareRequests::default();
        let mut request = spare.take();
        request.buffers.push(Buffer::anonymous(4096).unwrap());
        let kept: *const Request = &*request;
        spare.keep(request);
        assert_eq!(spare.len(), 1);
        let again = spare.take();
        assert!(std::ptr::eq(kept, &*again) && again.buffers.is_empty() && spare.is_empty());
        spare.keep(again);
        spare.release();
        assert!(spare.is_empty());
    }
}
