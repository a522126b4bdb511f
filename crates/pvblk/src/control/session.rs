//! A client that speaks JSON-RPC: requests in lines, answered when they are done.

use super::lines::Lines;
use super::methods::{self, Call};
use super::rpc::{INVALID_PARAMS, INVALID_REQUEST, Request, Response, RpcError};
use super::server::{Shared, stream_events, stream_hops, trace};
use crate::events::EventsQuery;
use parking_lot::{Condvar, Mutex};
use serde_json::{Value, json};
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Most requests of one client at work; it isn't read while there are so many.
const MOST_OF_CLIENT: usize = 64;
/// Most requests of all clients at work.
const MOST_OF_ALL: usize = 512;
/// Code of an error: too much is at work.
const BUSY: i64 = 6;

/// The client's side of all its requests.
struct Client {
    socket: Arc<UnixStream>,
    /// Held while a line is written: requests at work whose answers weren't begun.
    unanswered: Mutex<usize>,
    /// Requests at work, until their answers are written.
    at_work: Mutex<usize>,
    ended: Condvar,
}

impl Client {
    /// A client that doesn't take its answers is let go.
    fn answer(&self, response: &Response) {
        let _writing = self.unanswered.lock();
        self.write(response);
    }

    /// To be called by the holder of `unanswered`.
    fn write(&self, response: &Response) {
        if (&*self.socket)
            .write_all(response.line().as_bytes())
            .is_err()
        {
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }

    fn wait_below(&self, most: usize) {
        let mut at_work = self.at_work.lock();
        while *at_work >= most {
            self.ended.wait(&mut at_work);
        }
    }
}

/// A place among the requests at work.
struct Place {
    client: Arc<Client>,
    shared: Arc<Shared>,
    is_answered: bool,
}

impl Place {
    fn take(client: &Arc<Client>, shared: &Arc<Shared>) -> Option<Place> {
        client.wait_below(MOST_OF_CLIENT);
        *client.at_work.lock() += 1;
        *client.unanswered.lock() += 1;
        let all = shared.at_work.fetch_add(1, Ordering::AcqRel);
        let place = Place {
            client: Arc::clone(client),
            shared: Arc::clone(shared),
            is_answered: false,
        };
        (all < MOST_OF_ALL).then_some(place)
    }

    /// Ends the request. Its client may ask for a stream as soon as it has the answer.
    fn answer(mut self, response: Option<&Response>) {
        let mut unanswered = self.client.unanswered.lock();
        *unanswered -= 1;
        self.is_answered = true;
        if let Some(response) = response {
            self.client.write(response);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.is_answered {
            *self.client.unanswered.lock() -= 1;
        }
        self.shared.at_work.fetch_sub(1, Ordering::AcqRel);
        *self.client.at_work.lock() -= 1;
        self.client.ended.notify_all();
    }
}

/// Tells a client that there are too many.
pub(super) fn refuse(mut socket: &UnixStream, line: &str, most: usize) -> std::io::Result<()> {
    let id = Request::parse(line).ok().and_then(|r| r.id);
    let text = format!("{most} clients are connected already: end one of them");
    let response = Response::new(id.unwrap_or(Value::Null), Err(RpcError::new(BUSY, text)));
    socket.write_all(response.line().as_bytes())
}

/// Tells a client what is wrong with a line, so that it has no request.
pub(super) fn refuse_line(mut socket: &UnixStream, why: String) -> std::io::Result<()> {
    let response = Response::new(Value::Null, Err(RpcError::new(INVALID_REQUEST, why)));
    socket.write_all(response.line().as_bytes())
}

/// Answers until the client ends, or the server stops.
pub(super) fn run(
    socket: &Arc<UnixStream>,
    shared: &Arc<Shared>,
    mut lines: Lines,
    first: String,
) -> std::io::Result<()> {
    let client = Arc::new(Client {
        socket: Arc::clone(socket),
        unanswered: Mutex::default(),
        at_work: Mutex::default(),
        ended: Condvar::new(),
    });
    shared.end_at_stop(socket);
    let mut next = Some(Ok(first));
    while let Some(line) = next {
        match line {
            Ok(line) if line.is_empty() => {}
            Ok(line) => {
                if let Some(stream) = handle(&client, shared, &line) {
                    return stream;
                }
            }
            Err(why) => {
                let error = RpcError::new(INVALID_REQUEST, why);
                client.answer(&Response::new(Value::Null, Err(error)));
                break;
            }
        }
        if shared.is_stopping() {
            break;
        }
        next = lines.next()?;
    }
    client.wait_below(1);
    Ok(())
}

/// Begins one request. `Some`: the connection was a stream from then on, and is over.
fn handle(client: &Arc<Client>, shared: &Arc<Shared>, line: &str) -> Option<std::io::Result<()>> {
    let Request {
        id, method, params, ..
    } = match Request::parse(line) {
        Ok(request) => request,
        Err(refused) => {
            client.answer(&refused);
            return None;
        }
    };
    let respond = move |outcome| id.map(|id| Response::new(id, outcome));
    let streams = params.get("stream") == Some(&Value::Bool(true));
    let call = methods::find(&method);
    let at_work = match &call {
        Ok(Call::Slow(call)) => Some(*call),
        Ok(Call::Hops) if !streams => Some(methods::hops_once as methods::Method),
        _ => None,
    };
    if let Some(call) = at_work {
        spawn(client, shared, call, params, respond);
        return None;
    }
    let answer = move |client: &Client, outcome| {
        if let Some(response) = respond(outcome) {
            client.answer(&response);
        }
    };
    match call {
        Err(e) => answer(client, Err(e)),
        Ok(Call::Quick(call) | Call::Slow(call)) => answer(client, call(shared, params)),
        Ok(Call::Trace) => return trace_stream(client, shared, params, answer),
        Ok(Call::Events) => return event_stream(client, shared, params, answer),
        Ok(Call::Hops) => return hops_stream(client, shared, params, answer),
    }
    None
}

/// Calls a method on a thread of its own, if there may be one more.
fn spawn(
    client: &Arc<Client>,
    shared: &Arc<Shared>,
    call: methods::Method,
    params: Value,
    respond: impl FnOnce(Result<Value, RpcError>) -> Option<Response> + Send + 'static,
) {
    let Some(place) = Place::take(client, shared) else {
        let text = format!("{MOST_OF_ALL} requests are at work: try again later");
        if let Some(response) = respond(Err(RpcError::new(BUSY, text))) {
            client.answer(&response);
        }
        return;
    };
    let body = move || {
        let outcome = call(&place.shared, params);
        place.answer(respond(outcome).as_ref());
    };
    if pvblk_block::spawn("pvblk-control-2", Box::new(body)).is_err() {
        // The request got no answer; its client mustn't wait for one.
        tracing::warn!("a request gets no answer: the system refuses a thread for it");
        let _ = client.socket.shutdown(Shutdown::Both);
    }
}

/// Errors if something else is to be answered on the connection.
fn is_free(client: &Client) -> Result<(), RpcError> {
    match *client.unanswered.lock() {
        0 => Ok(()),
        _ => {
            let text =
                "a stream takes the whole connection: wait for the answers to the requests before";
            Err(RpcError::new(INVALID_REQUEST, text))
        }
    }
}

fn event_stream(
    client: &Arc<Client>,
    shared: &Arc<Shared>,
    params: Value,
    answer: impl FnOnce(&Client, Result<Value, RpcError>),
) -> Option<std::io::Result<()>> {
    let query = EventsQuery::parse(params);
    let query = query.map_err(|e| RpcError::new(INVALID_PARAMS, e.to_string()));
    match is_free(client).and(query) {
        Err(e) => {
            answer(client, Err(e));
            None
        }
        Ok(query) => {
            answer(client, Ok(json!({"stream": "events"})));
            Some(stream_events(&client.socket, shared, &query))
        }
    }
}

fn hops_stream(
    client: &Arc<Client>,
    shared: &Arc<Shared>,
    params: Value,
    answer: impl FnOnce(&Client, Result<Value, RpcError>),
) -> Option<std::io::Result<()>> {
    match is_free(client).and_then(|()| methods::hops_query(shared, params)) {
        Err(e) => {
            answer(client, Err(e));
            None
        }
        Ok(query) => {
            answer(client, Ok(json!({"stream": "hops"})));
            Some(stream_hops(&client.socket, shared, &query))
        }
    }
}

fn trace_stream(
    client: &Arc<Client>,
    shared: &Arc<Shared>,
    params: Value,
    answer: impl FnOnce(&Client, Result<Value, RpcError>),
) -> Option<std::io::Result<()>> {
    let every = match is_free(client).and_then(|()| methods::trace_every(params)) {
        Ok(every) => every,
        Err(e) => {
            answer(client, Err(e));
            return None;
        }
    };
    match shared.reached.feed.subscribe_every(every) {
        Err(e) => {
            answer(
                client,
                Err(RpcError::new(1, format!("starting a trace: {e}"))),
            );
            None
        }
        Ok(subscription) => {
            answer(client, Ok(json!({"stream": "blktrace"})));
            Some(trace(&client.socket, shared, &subscription))
        }
    }
}
