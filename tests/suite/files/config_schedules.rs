//! Schedules from JSON and TOML, and back.

use optimisers::Schedule;
use serde_json::{Value, json};

use crate::whole::random_models::Dice;

/// The schedule after a way through JSON, and one through TOML.
fn copies(schedule: &Schedule) -> [Schedule; 2] {
    let json = serde_json::to_string(schedule).unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
    let toml = toml::to_string(schedule).unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
    [
        serde_json::from_str(&json).unwrap_or_else(|error| panic!("{json}: {error}")),
        toml::from_str(&toml).unwrap_or_else(|error| panic!("{toml}: {error}")),
    ]
}

#[test]
fn every_constructor_is_read_and_written() {
    let cases = [
        (json!({"Constant": {"eta": 0.5}}), Schedule::constant(0.5)),
        (
            json!({"Linear": {"start": 0.0, "end": 0.5, "steps": 10}}),
            Schedule::linear(0.0, 0.5, 10),
        ),
        (
            json!({"Polynomial": {"start": 0.0, "end": 0.5, "steps": 10, "power": 2.0}}),
            Schedule::polynomial(0.0, 0.5, 10, 2.0),
        ),
        (
            json!({"Cosine": {"start": 0.5, "end": 0.25, "steps": 10}}),
            Schedule::cosine(0.5, 0.25, 10),
        ),
        (
            json!({"OneMinusSquareRoot": {"start": 0.5, "end": 0.25, "steps": 10}}),
            Schedule::one_minus_square_root(0.5, 0.25, 10),
        ),
        (
            json!({"CosineRestarts": {"high": 0.5, "low": 0.25, "steps": 10, "factor": 1.5}}),
            Schedule::cosine_restarts(0.5, 0.25, 10, 1.5),
        ),
        (
            json!({"OneCycle": {"peak": 0.5, "steps": 10}}),
            Schedule::one_cycle(0.5, 10),
        ),
        (
            json!({"Exponential": {"start": 0.5, "rate": 0.25, "steps": 10}}),
            Schedule::exponential(0.5, 0.25, 10),
        ),
        (
            json!({"Step": {"start": 0.5, "rate": 0.25, "steps": 10}}),
            Schedule::step(0.5, 0.25, 10),
        ),
        (
            json!({"InverseSquareRoot": {"peak": 0.5, "warmup": 10}}),
            Schedule::inverse_square_root(0.5, 10),
        ),
        (
            json!({"WarmupStableThen": {
                "peak": 0.5, "warmup": 10, "stable": 7, "decay": {"Linear": {"start": 0.5, "end": 0.0, "steps": 3}},
            }}),
            Schedule::warmup_stable_decay(0.5, 0.0, 10, 7, 3),
        ),
        (
            json!({"Then": {"first": {"Constant": {"eta": 1.0}}, "steps": 5, "next": {"Constant": {"eta": 2.0}}}}),
            Schedule::constant(1.0).then(5, Schedule::constant(2.0)),
        ),
        (
            json!({"Constant": {"eta": 0.5, "relative": true, "field": "0.lambda"}}),
            Schedule::constant(0.5).relative().field("0.lambda"),
        ),
    ];
    for (text, expected) in cases {
        let schedule: Schedule =
            serde_json::from_value(text.clone()).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(schedule, expected);
        assert_eq!(serde_json::to_value(&expected).expect("a value"), text);
        assert_eq!(copies(&expected), [expected.clone(), expected]);
    }
    // What one part says holds for the whole.
    let part = json!({"Then": {
        "first": {"Constant": {"eta": 1, "relative": true}}, "steps": 5, "next": {"Constant": {"eta": 2, "field": "lambda", "relative": false}},
    }});
    let whole = Schedule::constant(1.0)
        .then(5, Schedule::constant(2.0))
        .field("lambda")
        .relative();
    assert_eq!(
        serde_json::from_value::<Schedule>(part).expect("a schedule"),
        whole
    );
}

fn schedule(depth: usize, dice: &mut Dice) -> Schedule {
    let real = |dice: &mut Dice| dice.of(&[0.0, -0.0, 1.0, 1e-3, -2.5, 1.0 / 3.0, 1e300, 5e-324]);
    let (start, end, steps) = (real(dice), real(dice), dice.of(&[0, 1, 7, 1000, i64::MAX as u64]));
    let plain = match dice.below(if depth == 0 { 10 } else { 13 }) {
        0 => Schedule::constant(start),
        1 => Schedule::linear(start, end, steps),
        2 => Schedule::polynomial(start, end, steps, real(dice)),
        3 => Schedule::cosine(start, end, steps),
        4 => Schedule::one_minus_square_root(start, end, steps),
        5 => Schedule::cosine_restarts(start, end, steps, dice.of(&[1.0, 1.5, 2.0])),
        6 => Schedule::one_cycle(start, steps),
        7 => Schedule::exponential(start, end, steps),
        8 => Schedule::step(start, end, steps),
        9 => Schedule::inverse_square_root(start, steps),
        10 => Schedule::warmup_stable_then(start, steps, dice.below(9) as u64, schedule(depth - 1, dice)),
        _ => schedule(depth - 1, dice).then(steps, schedule(depth - 1, dice)),
    };
    let plain = if dice.one_in(4) { plain.relative() } else { plain };
    if dice.one_in(4) {
        plain.field(dice.of(&["lambda", "1.eta", ""]))
    } else {
        plain
    }
}

#[test]
fn a_thousand_random_schedules_are_read_again() {
    for seed in 0..1000 {
        let schedule = schedule(3, &mut Dice(seed));
        for copy in copies(&schedule) {
            assert_eq!(copy, schedule, "seed {seed}");
            let steps = [0, 1, 5, 8, 1001, u64::MAX];
            assert_eq!(
                steps.map(|step| copy.at(step).to_bits()),
                steps.map(|step| schedule.at(step).to_bits()),
                "seed {seed}"
            );
        }
    }
}

#[test]
fn what_is_no_schedule_is_refused() {
    let linear = |key: &str, value: Value| {
        let mut arguments = json!({"start": 0, "end": 1, "steps": 10});
        arguments[key] = value;
        json!({ "Linear": arguments })
    };
    let such = r#"expected a schedule such as {"Constant": {"eta": 0.001}}"#;
    let cases: [(Value, &[&str]); 24] = [
        (json!(1), &["configuration: got 1, ", such]),
        (json!(null), &["configuration: got null, ", such]),
        (json!([]), &["configuration: got [], ", such]),
        (json!({}), &["configuration: got {}, ", such]),
        (
            json!({"Linear": {}, "Cosine": {}}),
            &["configuration: got {\"", such],
        ),
        (json!("Linear"), &["configuration: got \"Linear\", ", such]),
        (
            json!({"Linear": 1}),
            &["configuration: got {\"Linear\":1}, ", such],
        ),
        (
            json!({"Linear": {"start": 0, "steps": 1}}),
            &["at Linear: got {\"start\":0,\"steps\":1}, expected a table with \"end\""],
        ),
        (
            json!({"Cosin": {}}),
            &[
                "configuration: there is no schedule \"Cosin\" (did you mean Cosine?), \
                 expected one of: Constant, Linear, ",
            ],
        ),
        (
            json!({"cosine": {}}),
            &["there is no schedule \"cosine\" (did you mean Cosine?)"],
        ),
        (
            linear("stesp", json!(1)),
            &["at Linear: there is no key \"stesp\" (did you mean steps?), \
                 expected one of: start, end, steps, relative, field"],
        ),
        (
            linear("start", json!("fast")),
            &["at Linear.start: got \"fast\", expected a real number"],
        ),
        (
            linear("start", json!("nan")),
            &["at Linear.start: got \"nan\", expected a finite number"],
        ),
        (
            linear("end", json!("-inf")),
            &["at Linear.end: got \"-inf\", expected a finite number"],
        ),
        (
            linear("end", json!(null)),
            &["at Linear.end: got null, expected a real number"],
        ),
        (
            linear("steps", json!(-1)),
            &["at Linear.steps: got -1.0, expected a count"],
        ),
        (
            linear("steps", json!(1.5)),
            &["at Linear.steps: got 1.5, expected a count"],
        ),
        (
            linear("relative", json!(1)),
            &["at Linear.relative: got 1, expected true or false"],
        ),
        (
            linear("field", json!(1)),
            &["at Linear.field: got 1, expected the name of a field"],
        ),
        (
            linear("field", json!(null)),
            &["at Linear.field: got null, expected the name of a field"],
        ),
        (
            json!({"CosineRestarts": {"high": 1, "low": 0, "steps": 9, "factor": 0.5}}),
            &[
                "at CosineRestarts: ",
                "factor is 0.5, expected a finite number of 1 or more",
            ],
        ),
        (
            json!({"Then": {"first": "Linear", "steps": 1, "next": {}}}),
            &["at Then.first: got \"Linear\", ", such],
        ),
        (
            json!({"Then": {"first": {"Constant": {"eta": 1}}, "steps": 1, "next": {}}}),
            &["at Then.next: got {}, ", such],
        ),
        (
            json!({"WarmupStableThen": {"peak": 1, "warmup": 1, "stable": 1, "decay": {"Linea": {}}}}),
            &["at WarmupStableThen.decay: there is no schedule \"Linea\" (did you mean Linear?)"],
        ),
    ];
    for (text, words) in cases {
        let error = serde_json::from_value::<Schedule>(text.clone())
            .expect_err("refused")
            .to_string();
        assert!(
            words.iter().all(|words| error.contains(words)),
            "{error} for {text}"
        );
    }
    for number in ["nan", "inf", "-inf"] {
        let error = toml::from_str::<Schedule>(&format!("[Constant]\neta = {number}")).expect_err("refused");
        let words = format!("at Constant.eta: got \"{number}\", expected a finite number");
        assert!(error.to_string().contains(&words), "{error}");
    }
    let twice = serde_json::from_str::<Schedule>(r#"{"Constant": {"eta": 1, "eta": 2}}"#)
        .expect_err("refused")
        .to_string();
    assert!(
        twice.contains("at Constant.eta: the key is repeated here, with 2, expected the key once"),
        "{twice}"
    );
}

/// A table whose name is a tag, as serde_yaml writes an enum.
#[test]
fn a_tag_of_yaml_is_a_schedule() {
    use serde::Deserialize;
    use serde::de::value::{EnumAccessDeserializer, Error, MapAccessDeserializer, MapDeserializer};
    let arguments = std::collections::BTreeMap::from([("eta", 0.25)]);
    let table = MapDeserializer::<_, Error>::new([("Constant", arguments)].into_iter());
    let tagged = Schedule::deserialize(EnumAccessDeserializer::new(MapAccessDeserializer::new(table)));
    assert_eq!(tagged, Ok(Schedule::constant(0.25)));
}

#[test]
fn what_has_no_text_is_not_written() {
    // Two levels for each `then`.
    let nested = |depth: u64| {
        (1..=depth).fold(Schedule::constant(0.0), |inner, i| {
            inner.then(7 * i, Schedule::constant(i as f64))
        })
    };
    let text = serde_json::to_string(&nested(31)).expect("a text");
    assert_eq!(
        serde_json::from_str::<Schedule>(&text).expect("a schedule"),
        nested(31)
    );
    let error = serde_json::to_string(&nested(32))
        .expect_err("refused")
        .to_string();
    assert!(error.contains("nested more than 64 deep"), "{error}");
    let deeper = format!(r#"{{"Then":{{"first":{text},"steps":1,"next":{{"Constant":{{"eta":1}}}}}}}}"#);
    let error = serde_json::from_str::<Schedule>(&deeper)
        .expect_err("refused")
        .to_string();
    assert!(error.contains("nested more than 64 deep"), "{error}");
}
