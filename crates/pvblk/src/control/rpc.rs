//! JSON-RPC 2.0 in lines: the form of requests and responses. No I/O.
//!
//! The types are here and not in `pvblk-protocol`, because only this command speaks the protocol, at both ends, and `protocol` needs no JSON for anything else.

use crate::disks::{Refused, Why};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Version of the methods and of their parameters. It grows by one when a client of the version before would be misunderstood; fields and methods are added without.
pub const PROTOCOL: u32 = 1;

pub const PARSE_ERROR: i64 = -32700;
pub const INVALID_REQUEST: i64 = -32600;
pub const NO_METHOD: i64 = -32601;
pub const INVALID_PARAMS: i64 = -32602;

/// A request in one line. Without `id` it gets no response.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    pub jsonrpc: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<Value>,
    pub method: String,
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub params: Value,
}

/// A response in one line: a result, or an error.
#[derive(Debug, Serialize, Deserialize)]
pub struct Response {
    pub jsonrpc: String,
    pub id: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RpcError>,
}

/// Why a request wasn't carried out: one line for people, and a number for programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RpcError {
    pub code: i64,
    pub message: String,
}

impl RpcError {
    pub fn new(code: i64, message: impl Into<String>) -> RpcError {
        let message = message.into();
        RpcError { code, message }
    }
}

impl From<Refused> for RpcError {
    fn from(refused: Refused) -> RpcError {
        let code = match refused.why {
            Why::Invalid => INVALID_PARAMS,
            Why::Failed => 1,
            Why::NoDisk => 2,
            Why::Exists => 3,
            Why::InUse => 4,
            Why::Late => 5,
            Why::Busy => 6,
            Why::Stopping => 7,
        };
        RpcError::new(code, refused.text)
    }
}

impl Request {
    /// Parses a line; an error is the response to it.
    pub fn parse(line: &str) -> Result<Request, Box<Response>> {
        let refuse = |code, text: String| {
            Box::new(Response::new(Value::Null, Err(RpcError::new(code, text))))
        };
        let value: Value = serde_json::from_str(line)
            .map_err(|e| refuse(PARSE_ERROR, format!("the line isn't JSON: {e}")))?;
        if value.is_array() {
            let text = "batches aren't taken: send each request in a line of its own";
            return Err(refuse(INVALID_REQUEST, text.to_owned()));
        }
        let id = value.get("id").cloned();
        let request: Result<Request, _> = serde_json::from_value(value);
        let request = request.map_err(|e| e.to_string()).and_then(|r| {
            let scalar =
                r.id.as_ref()
                    .is_none_or(|id| id.is_string() || id.is_number());
            match (r.jsonrpc.as_str(), scalar) {
                ("2.0", true) => Ok(r),
                ("2.0", false) => Err("id is neither a text nor a number".to_owned()),
                (other, _) => Err(format!("jsonrpc is {other:?}, not \"2.0\"")),
            }
        });
        request.map_err(|why| {
            let mut refused = refuse(INVALID_REQUEST, format!("not a JSON-RPC request: {why}"));
            refused.id = id
                .filter(|id| id.is_string() || id.is_number())
                .unwrap_or(Value::Null);
            refused
        })
    }
}

impl Response {
    pub fn new(id: Value, outcome: Result<Value, RpcError>) -> Response {
        let (result, error) = match outcome {
            Ok(result) => (Some(result), None),
            Err(error) => (None, Some(error)),
        };
        Response {
            jsonrpc: "2.0".to_owned(),
            id,
            result,
            error,
        }
    }

    /// The line, with its end.
    pub fn line(&self) -> String {
        let text = serde_json::to_string(self);
        let text = text.unwrap_or_else(|e| format!("{{\"jsonrpc\":\"2.0\",\"id\":null,\"error\":{{\"code\":-32603,\"message\":\"{e}\"}}}}"));
        text + "\n"
    }
}

/// Parameters of a method, by name.
pub struct Params(Map<String, Value>);

impl Params {
    /// True if none is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn of(value: Value) -> Result<Params, RpcError> {
        match value {
            Value::Object(map) => Ok(Params(map)),
            Value::Null => Ok(Params(Map::new())),
            _ => Err(RpcError::new(
                INVALID_PARAMS,
                "params: give an object, by name",
            )),
        }
    }

    /// Takes one out.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, RpcError> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value)
                .map(Some)
                .map_err(|e| RpcError::new(INVALID_PARAMS, format!("params: {name}: {e}"))),
        }
    }

    /// Takes one out that must be there.
    pub fn need<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, RpcError> {
        let value = self.take(name)?;
        value.ok_or_else(|| RpcError::new(INVALID_PARAMS, format!("params: {name} is missing")))
    }

    /// All that is left.
    pub fn rest<T: DeserializeOwned>(self) -> Result<T, RpcError> {
        serde_json::from_value(Value::Object(self.0))
            .map_err(|e| RpcError::new(INVALID_PARAMS, format!("params: {e}")))
    }

    /// Errors if something is left.
    pub fn end(self) -> Result<(), RpcError> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => Err(RpcError::new(
                INVALID_PARAMS,
                format!("params: there is no {name}"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_requests_or_say_what_is_wrong_with_them() {
        let ok =
            Request::parse(r#"{"jsonrpc":"2.0","id":7,"method":"a","params":{"b":1}}"#).unwrap();
        assert_eq!((ok.id, ok.method.as_str()), (Some(7.into()), "a"));
        let quiet = Request::parse(r#"{"jsonrpc":"2.0","method":"a"}"#).unwrap();
        assert!(quiet.id.is_none() && quiet.params.is_null());
        for (line, code, id) in [
            ("{", PARSE_ERROR, Value::Null),
            ("7", INVALID_REQUEST, Value::Null),
            ("[]", INVALID_REQUEST, Value::Null),
            (r#"{"id":"x","method":"a"}"#, INVALID_REQUEST, "x".into()),
            (
                r#"{"jsonrpc":"1.0","id":3,"method":"a"}"#,
                INVALID_REQUEST,
                3.into(),
            ),
            (
                r#"{"jsonrpc":"2.0","id":{},"method":"a"}"#,
                INVALID_REQUEST,
                Value::Null,
            ),
            (r#"{"jsonrpc":"2.0","id":3}"#, INVALID_REQUEST, 3.into()),
        ] {
            let refused = Request::parse(line).unwrap_err();
            assert_eq!(
                (refused.error.unwrap().code, refused.id),
                (code, id),
                "{line}"
            );
        }
        let deep = "[".repeat(10_000);
        assert_eq!(
            Request::parse(&deep).unwrap_err().error.unwrap().code,
            PARSE_ERROR
        );
    }

    #[test]
    fn a_response_is_one_line() {
        let line = Response::new(1.into(), Err(RpcError::new(2, "a\nb"))).line();
        assert_eq!(
            line,
            "{\"jsonrpc\":\"2.0\",\"id\":1,\"error\":{\"code\":2,\"message\":\"a\\nb\"}}\n"
        );
        let line = Response::new("x".into(), Ok(Value::Null)).line();
        assert_eq!(line, "{\"jsonrpc\":\"2.0\",\"id\":\"x\",\"result\":null}\n");
    }

    #[test]
    fn parameters_are_taken_by_name_and_none_is_ignored() {
        let params = || Params::of(serde_json::json!({"a": 1, "b": "x"})).unwrap();
        let mut p = params();
        assert_eq!(p.take::<u32>("a"), Ok(Some(1)));
        assert!(
            p.need::<String>("c")
                .unwrap_err()
                .message
                .contains("c is missing")
        );
        assert!(p.end().unwrap_err().message.contains("there is no b"));
        assert!(params().need::<u32>("b").is_err());
        assert!(Params::of(Value::Array(Vec::new())).is_err());
        assert!(Params::of(Value::Null).unwrap().end().is_ok());
    }
}
