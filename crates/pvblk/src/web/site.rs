//! [`Site`]: the answer to each path.

use super::api::{self, Asked};
use super::backing::Backing;
use super::metrics::{Form, Metrics, Query};
use pvblk_web::{Answer, Method, Request, Response, Status, Token};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most methods at work for all readers: one may wait for a disk, and metrics are to be read meanwhile.
const MOST_CALLS: usize = 16;
/// Most readings of metrics at once; each holds the figures of all disks.
const MOST_READINGS: usize = 4;
/// Code of an error: too much is at work.
const BUSY: i64 = 6;

/// The page's data, the metrics and the API of a server.
pub struct Site {
    backing: Arc<dyn Backing>,
    token: Option<Token>,
    metrics: Arc<Metrics>,
    calls: Places,
    readings: Places,
}

impl Site {
    pub fn new(backing: Arc<dyn Backing>, token: Option<Token>) -> Site {
        Site {
            backing,
            token,
            metrics: Arc::default(),
            calls: Places::default(),
            readings: Places::default(),
        }
    }

    fn api(&self, method: &str, request: &Request) -> Answer {
        if request.method == Method::Post
            && let Err(refused) = self.may_change(request)
        {
            return Answer::Whole(refused);
        }
        let asked = match request.method {
            Method::Post => api::change(method, request),
            _ => api::read(method, &request.query),
        };
        let Asked {
            method,
            params,
            is_stream,
        } = match asked {
            Ok(asked) => asked,
            Err(e) => return Answer::Whole(api::answer(Err(e))),
        };
        if is_stream {
            return match self.backing.stream(&method, params) {
                Ok(stream) => Answer::Events(stream),
                Err(e) => Answer::Whole(api::answer(Err(e))),
            };
        }
        let Some(_place) = self.calls.take(MOST_CALLS) else {
            let why = format!("{MOST_CALLS} requests are at work: try again later");
            return Answer::Whole(api::refusal(Status::Unavailable, BUSY, &why));
        };
        Answer::Whole(api::answer(self.backing.call(&method, params)))
    }

    /// Lets a request change something, or returns the answer that says what to do.
    fn may_change(&self, request: &Request) -> Result<(), Response> {
        match &self.token {
            None => Err(api::refusal(
                Status::Forbidden,
                1,
                "nothing is changed over HTTP: start the server with --web-token-file FILE and send the token, or use the control socket",
            )),
            Some(token) if token.is_in(request.header("authorization")) => Ok(()),
            Some(_) => Err(api::refusal(
                Status::Unauthorized,
                1,
                "changes need the token of --web-token-file: send Authorization: Bearer TOKEN",
            )),
        }
    }

    fn metrics(&self, request: &Request) -> Answer {
        let query = match Query::parse(&request.query) {
            Ok(query) => query,
            Err(why) => return Answer::Whole(Response::line(Status::BadRequest, &why)),
        };
        let form = Form::of_accept(request.list("accept").as_deref());
        let Some(place) = self.readings.take(MOST_READINGS) else {
            let why = format!("{MOST_READINGS} readers take metrics already: try again later");
            return Answer::Whole(Response::line(Status::Unavailable, &why));
        };
        if request.method == Method::Head {
            return Answer::Written(form.content_type(), Box::new(|_| Ok(())));
        }
        let (metrics, backing) = (Arc::clone(&self.metrics), Arc::clone(&self.backing));
        let write = move |out: &mut dyn std::io::Write| {
            let written = metrics.write(&backing, form, query, out);
            drop(place);
            written
        };
        Answer::Written(form.content_type(), Box::new(write))
    }
}

impl pvblk_web::Site for Site {
    fn answer(&self, request: &Request) -> Option<Answer> {
        if let Some(method) = request.path.strip_prefix("/api/") {
            return Some(self.api(method, request));
        }
        if !request.is_reading() {
            return None;
        }
        match request.path.as_str() {
            "/metrics" => Some(self.metrics(request)),
            "/healthz" => Some(Answer::Whole(match self.backing.is_there() {
                Ok(()) => Response::line(Status::Ok, "ok"),
                Err(why) => Response::line(Status::Unavailable, &why),
            })),
            _ => None,
        }
    }
}

/// A bounded number of places.
#[derive(Default)]
struct Places(Arc<AtomicUsize>);

impl Places {
    fn take(&self, most: usize) -> Option<Place> {
        let place = Place(Arc::clone(&self.0));
        let others = self.0.fetch_add(1, Ordering::AcqRel);
        (others < most).then_some(place)
    }
}

struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
