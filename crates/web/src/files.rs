//! The files of the page, which are in the program.

use crate::request::Request;
use crate::response::{Response, Status};
use flate2::Compression;
use flate2::write::GzEncoder;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::sync::OnceLock;

/// A file of the page.
struct File {
    path: &'static str,
    content_type: &'static str,
    bytes: &'static [u8],
    /// Made for the first reader.
    prepared: OnceLock<Prepared>,
}

/// Something to recognize a file by, and its bytes compressed.
struct Prepared {
    etag: String,
    compressed: Vec<u8>,
}

macro_rules! files {
    ($($name:literal $content_type:literal,)+) => {
        static FILES: [File; [$($name),+].len()] = [$(File {
            path: concat!("/", $name),
            content_type: $content_type,
            bytes: include_bytes!(concat!("../page/", $name)),
            prepared: OnceLock::new(),
        }),+];
    };
}

// Every file of `page/`.
files! {
    "index.html" "text/html; charset=utf-8",
    "api.js" "text/javascript; charset=utf-8",
    "app.js" "text/javascript; charset=utf-8",
    "base.css" "text/css; charset=utf-8",
    "changes.js" "text/javascript; charset=utf-8",
    "disk.js" "text/javascript; charset=utf-8",
    "disks.js" "text/javascript; charset=utf-8",
    "dom.js" "text/javascript; charset=utf-8",
    "events.js" "text/javascript; charset=utf-8",
    "flow.js" "text/javascript; charset=utf-8",
    "format.js" "text/javascript; charset=utf-8",
    "heatmap.js" "text/javascript; charset=utf-8",
    "histogram.js" "text/javascript; charset=utf-8",
    "hops.js" "text/javascript; charset=utf-8",
    "icon.svg" "image/svg+xml",
    "members.js" "text/javascript; charset=utf-8",
    "memory.js" "text/javascript; charset=utf-8",
    "panels.css" "text/css; charset=utf-8",
    "plot.js" "text/javascript; charset=utf-8",
    "state.js" "text/javascript; charset=utf-8",
    "store.js" "text/javascript; charset=utf-8",
    "theme.js" "text/javascript; charset=utf-8",
    "views.css" "text/css; charset=utf-8",
    "waterfall.js" "text/javascript; charset=utf-8",
}

impl File {
    fn prepared(&self) -> &Prepared {
        self.prepared.get_or_init(|| {
            let mut hasher = DefaultHasher::new();
            self.bytes.hash(&mut hasher);
            let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
            // Writing to memory doesn't fail.
            let compressed = encoder
                .write_all(self.bytes)
                .and_then(|()| encoder.finish());
            Prepared {
                etag: format!("\"{:016x}\"", hasher.finish()),
                compressed: compressed.unwrap_or_default(),
            }
        })
    }
}

/// The file that a request asks for.
pub(super) fn find(request: &Request) -> Option<Response> {
    let path = match request.path.as_str() {
        "/" => "/index.html",
        path => path,
    };
    let file = FILES.iter().find(|f| f.path == path)?;
    let prepared = file.prepared();
    let known = request.list("if-none-match").unwrap_or_default();
    let mut known = known
        .split(',')
        .map(|tag| tag.trim().trim_start_matches("W/"));
    let mut response = Response::new(Status::Ok, file.content_type, Vec::new());
    response.etag = Some(prepared.etag.clone());
    if known.any(|tag| tag == prepared.etag || tag == "*") {
        response.status = Status::NotModified;
        return Some(response);
    }
    let takes = request.list("accept-encoding").unwrap_or_default();
    response.is_compressed = takes_gzip(&takes) && !prepared.compressed.is_empty();
    response.body = match response.is_compressed {
        true => prepared.compressed.as_slice().into(),
        false => file.bytes.into(),
    };
    Some(response)
}

/// True if a reader takes compressed bytes.
fn takes_gzip(accept: &str) -> bool {
    accept.split(',').any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let is_gzip = parts
            .next()
            .is_some_and(|name| name.eq_ignore_ascii_case("gzip"));
        let refused = |p: &str| {
            p.strip_prefix("q=")
                .is_some_and(|q| q.parse().unwrap_or(0.0_f32) <= 0.0)
        };
        is_gzip && !parts.any(refused)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Method;
    use std::io::Read;

    fn ask(path: &str, headers: &[(&str, &str)]) -> Option<Response> {
        let headers = headers
            .iter()
            .map(|(n, v)| ((*n).to_owned(), (*v).to_owned()));
        find(&Request {
            method: Method::Get,
            path: path.to_owned(),
            query: Vec::new(),
            headers: headers.collect(),
            body: Vec::new(),
        })
    }

    #[test]
    fn every_file_of_the_page_is_served() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/page");
        let mut names: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|e| format!("/{}", e.unwrap().file_name().to_string_lossy()))
            .collect();
        names.sort();
        let mut served: Vec<&str> = FILES.iter().map(|f| f.path).collect();
        served.sort_unstable();
        assert_eq!(names, served, "the list in files.rs and crates/web/page");
    }

    #[test]
    fn readers_get_what_they_do_not_have_and_can_take() {
        let plain = ask("/", &[]).unwrap();
        assert_eq!((plain.status, plain.is_compressed), (Status::Ok, false));
        let gzip = ask("/index.html", &[("accept-encoding", "br, gzip;q=0.5")]).unwrap();
        assert!(gzip.is_compressed);
        let mut text = Vec::new();
        flate2::read::GzDecoder::new(&*gzip.body)
            .read_to_end(&mut text)
            .unwrap();
        assert_eq!(text, &*plain.body);
        assert!(
            !ask("/", &[("accept-encoding", "gzip;q=0, br")])
                .unwrap()
                .is_compressed
        );
        let etag = plain.etag.unwrap();
        let again = ask("/", &[("if-none-match", &format!("\"x\", W/{etag}"))]).unwrap();
        assert_eq!((again.status, again.body.len()), (Status::NotModified, 0));
        for path in ["/../Cargo.toml", "/index.html/", "//", "/%69ndex.html"] {
            assert!(ask(path, &[]).is_none(), "{path}");
        }
    }
}
