use super::*;

#[test]
fn questions_are_what_they_are_documented_to_be() {
    let cases = [
        (Question::Detail {}, r#"{"raid":"detail"}"#),
        (
            Question::Fail { member: "2".into() },
            r#"{"raid":"fail","member":"2"}"#,
        ),
        (
            Question::Frozen { on: true },
            r#"{"raid":"frozen","on":true}"#,
        ),
        (
            Question::Stripes { stripes: 512 },
            r#"{"raid":"stripes","stripes":512}"#,
        ),
    ];
    for (question, text) in cases {
        assert_eq!(serde_json::to_string(&question).expect("JSON"), text);
        assert_eq!(
            serde_json::from_str::<Question>(text).expect("a question"),
            question
        );
    }
    let question: Question =
        serde_json::from_str(r#"{"raid":"replace","member":"/srv/a"}"#).expect("a question");
    let expected = Question::Replace {
        member: "/srv/a".into(),
        with: None,
        force: false,
    };
    assert_eq!(question, expected);
}

#[test]
fn what_is_no_question_is_refused() {
    for text in [
        r#"{"raid":"fail"}"#,
        r#"{"raid":"fail","member":2}"#,
        r#"{"raid":"fail","member":"2","force":true}"#,
        r#"{"raid":"detail","json":true}"#,
        r#"{"raid":"grow"}"#,
        r#"{"raid":"stripes","stripes":-1}"#,
        r#"{"raid":["detail"]}"#,
    ] {
        assert!(serde_json::from_str::<Question>(text).is_err(), "{text}");
    }
}
