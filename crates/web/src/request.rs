//! [`Request`]: a request that was read whole.

/// Method of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Get,
    /// As `Get`, without the body of its answer.
    Head,
    Post,
}

/// A request that was read whole.
#[derive(Debug)]
pub struct Request {
    pub method: Method,
    /// The target before `?`, as it was sent.
    pub path: String,
    /// Parameters, decoded; each name is there once.
    pub query: Vec<(String, String)>,
    /// Names in lower case.
    pub(super) headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    /// The first header of this name, in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_str())
    }

    /// All headers of this name, in lower case, as one list.
    pub fn list(&self, name: &str) -> Option<String> {
        let all = self.headers.iter().filter(|(n, _)| n == name);
        let all: Vec<&str> = all.map(|(_, value)| value.as_str()).collect();
        (!all.is_empty()).then(|| all.join(","))
    }

    pub fn is_reading(&self) -> bool {
        self.method != Method::Post
    }
}
