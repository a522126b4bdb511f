//! `/api/METHOD`: the control methods over HTTP. `GET` reads, `POST` changes.

use crate::control::rpc::{INVALID_PARAMS, NO_METHOD, RpcError};
use pvblk_web::{Request, Response, Status};
use serde_json::{Map, Value, json};

/// A parameter's form in a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Text,
    /// A number, `true` or `false`.
    Json,
    /// JSON, one of the questions of the method.
    Question,
}

/// A method that `GET` may call: it changes nothing.
struct Reading {
    method: &'static str,
    params: &'static [(&'static str, Form)],
    /// Questions that change nothing.
    questions: &'static [&'static str],
    is_stream: bool,
}

const fn reading(method: &'static str, params: &'static [(&'static str, Form)]) -> Reading {
    Reading {
        method,
        params,
        questions: &[],
        is_stream: false,
    }
}

/// All methods that `GET` may call.
const READING: &[Reading] = &[
    reading("pvblk.version", &[]),
    reading("disk.list", &[("after", Form::Text), ("most", Form::Json)]),
    reading("disk.show", &[("name", Form::Text)]),
    reading("stat", &[("disk", Form::Text)]),
    Reading {
        questions: &[
            r#"{"raid":"detail"}"#,
            r#"{"raid":"spec"}"#,
            r#"{"cache":"counters"}"#,
        ],
        ..reading(
            "disk.ask",
            &[("name", Form::Text), ("question", Form::Question)],
        )
    },
    Reading {
        questions: &[r#"{"memory":"report"}"#],
        ..reading("memory.ask", &[("question", Form::Question)])
    },
    Reading {
        is_stream: true,
        ..reading(
            "events",
            &[
                ("follow", Form::Json),
                ("disk", Form::Text),
                ("after", Form::Json),
            ],
        )
    },
    Reading {
        is_stream: true,
        ..reading(
            "hops",
            &[
                ("disk", Form::Text),
                ("every", Form::Json),
                ("brief", Form::Json),
            ],
        )
    },
];

/// A call of a control method.
#[derive(Debug, PartialEq)]
pub struct Asked {
    pub method: String,
    pub params: Value,
    pub is_stream: bool,
}

/// The call that a `GET` asks for.
pub fn read(method: &str, query: &[(String, String)]) -> Result<Asked, RpcError> {
    let found = READING.iter().find(|r| r.method == method).ok_or_else(|| {
        let all: Vec<&str> = READING.iter().map(|r| r.method).collect();
        let text = format!(
            "GET reads by {}: there is no {method:?} among them; POST calls the others",
            all.join(", ")
        );
        RpcError::new(NO_METHOD, text)
    })?;
    let wrong = |text: String| RpcError::new(INVALID_PARAMS, text);
    let mut params = Map::new();
    for (name, text) in query {
        let form = found.params.iter().find(|(n, _)| n == name);
        let value = match form {
            None => return Err(wrong(format!("params: there is no {name}"))),
            Some((_, Form::Text)) => Value::String(text.clone()),
            Some((_, Form::Json)) => serde_json::from_str(text)
                .ok()
                .filter(|v: &Value| v.is_boolean() || v.is_number())
                .ok_or_else(|| wrong(format!("params: {name}: a number, true or false")))?,
            Some((_, Form::Question)) => {
                let question = serde_json::from_str(text).unwrap_or(Value::Null);
                let is = |q: &&str| serde_json::from_str::<Value>(q).is_ok_and(|q| q == question);
                if !found.questions.iter().any(is) {
                    let all = found.questions.join(", ");
                    return Err(wrong(format!(
                        "params: {name}: GET asks {all}; POST asks the others"
                    )));
                }
                question
            }
        };
        params.insert(name.clone(), value);
    }
    if method == "hops" {
        params.insert("stream".into(), true.into());
    }
    if method == "memory.ask" && params.is_empty() {
        params.insert("question".into(), json!({"memory": "report"}));
    }
    Ok(Asked {
        method: method.to_owned(),
        params: Value::Object(params),
        is_stream: found.is_stream,
    })
}

/// The call that a `POST` asks for.
pub fn change(method: &str, request: &Request) -> Result<Asked, RpcError> {
    let wrong = |text: &str| RpcError::new(INVALID_PARAMS, text);
    if !request.query.is_empty() {
        return Err(wrong("params: POST has them in its body"));
    }
    let form = request.header("content-type").unwrap_or_default();
    let form = form.split(';').next().unwrap_or_default().trim();
    if !form.eq_ignore_ascii_case("application/json") {
        return Err(wrong(
            "send the parameters as a JSON object, with Content-Type: application/json",
        ));
    }
    let params = match request.body.is_empty() {
        true => Value::Object(Map::new()),
        false => serde_json::from_slice(&request.body).unwrap_or(Value::Null),
    };
    if !params.is_object() {
        return Err(wrong("params: the body is no JSON object"));
    }
    if READING.iter().any(|r| r.is_stream && r.method == method) || method == "trace" {
        return Err(RpcError::new(
            NO_METHOD,
            format!("{method} is a stream: GET follows it, or the control socket"),
        ));
    }
    Ok(Asked {
        method: method.to_owned(),
        params,
        is_stream: false,
    })
}

/// The answer to a call.
pub fn answer(outcome: Result<Value, RpcError>) -> Response {
    let (status, value) = match outcome {
        Ok(result) => (Status::Ok, result),
        Err(e) => (
            status(e.code),
            json!({"error": {"code": e.code, "message": e.message}}),
        ),
    };
    response(status, &value)
}

/// An error of the API itself, in the form of the others.
pub fn refusal(status: Status, code: i64, message: &str) -> Response {
    response(
        status,
        &json!({"error": {"code": code, "message": message}}),
    )
}

/// JSON in one line.
fn response(status: Status, value: &Value) -> Response {
    Response::new(
        status,
        "application/json",
        format!("{value}\n").into_bytes(),
    )
}

fn status(code: i64) -> Status {
    match code {
        NO_METHOD | 2 => Status::NotFound,
        // Takes longer; busy; stopping.
        5..=7 => Status::Unavailable,
        _ => Status::BadRequest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(method: &str, query: &str) -> Result<Value, String> {
        let query = pvblk_web::decode_query(query).unwrap();
        read(method, &query)
            .map(|asked| asked.params)
            .map_err(|e| format!("{} {}", e.code, e.message))
    }

    #[test]
    fn parameters_have_the_types_of_their_methods() {
        assert_eq!(params("stat", "disk=5").unwrap(), json!({"disk": "5"}));
        assert_eq!(params("stat", "").unwrap(), json!({}));
        assert_eq!(
            params("disk.list", "most=10&after=true").unwrap(),
            json!({"most": 10, "after": "true"})
        );
        assert_eq!(
            params("events", "follow=true").unwrap(),
            json!({"follow": true})
        );
        assert_eq!(
            params("hops", "disk=a&every=8").unwrap(),
            json!({"disk": "a", "every": 8, "stream": true})
        );
        assert_eq!(
            params("memory.ask", "").unwrap(),
            json!({"question": {"memory": "report"}})
        );
        let question = "name=a&question=%7B%20%22raid%22%3A%22detail%22%7D";
        assert_eq!(
            params("disk.ask", question).unwrap(),
            json!({"name": "a", "question": {"raid": "detail"}})
        );
        assert!(
            params("disk.list", "most=x")
                .unwrap_err()
                .contains("a number")
        );
        assert!(
            params("disk.list", "most=[1]")
                .unwrap_err()
                .contains("a number")
        );
        assert!(
            params("disk.list", "first=1")
                .unwrap_err()
                .starts_with("-32602 params: there is no first")
        );
    }

    #[test]
    fn get_changes_nothing() {
        for method in [
            "disk.add",
            "disk.remove",
            "disk.set",
            "export.add",
            "export.remove",
            "reload",
            "trace",
            "",
            "none",
        ] {
            assert!(
                params(method, "").unwrap_err().starts_with("-32601"),
                "{method}"
            );
        }
        for (method, question) in [
            ("memory.ask", r#"{"memory":"squeeze"}"#),
            ("memory.ask", r#"{"set":{"max_buffer_pages":1}}"#),
            ("disk.ask", r#"{"raid":"fail","member":"0"}"#),
            ("disk.ask", r#"{"raid":"detail","x":1}"#),
            ("disk.ask", r#"{"cache":"drop"}"#),
            ("disk.ask", "detail"),
            ("memory.ask", ""),
        ] {
            let query = [("question".to_owned(), question.to_owned())];
            assert!(read(method, &query).is_err(), "{method} {question}");
        }
    }

    #[test]
    fn errors_have_the_status_that_proxies_understand() {
        let of = |code| answer(Err(RpcError::new(code, "why"))).status;
        assert_eq!(
            [of(INVALID_PARAMS), of(1), of(3), of(4)],
            [Status::BadRequest; 4]
        );
        assert_eq!([of(NO_METHOD), of(2)], [Status::NotFound; 2]);
        assert_eq!([of(5), of(6), of(7)], [Status::Unavailable; 3]);
        let body = answer(Err(RpcError::new(2, "no \"a\""))).body;
        assert_eq!(
            &*body,
            b"{\"error\":{\"code\":2,\"message\":\"no \\\"a\\\"\"}}\n"
        );
        assert_eq!(answer(Ok(json!([1]))).status, Status::Ok);
    }
}
