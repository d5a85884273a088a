//! The cases of `tests/golden`.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

/// A trajectory of one parameter under a rule.
#[derive(Deserialize)]
pub struct Case {
    pub rule: String,
    pub args: BTreeMap<String, Value>,
    pub shape: Vec<usize>,
    pub x0: Value,
    pub grads: Vec<Value>,
    pub x: Vec<Value>,
}

/// The numbers of a list, nested or not.
pub fn flat(numbers: &Value) -> Vec<f64> {
    match numbers {
        Value::Array(rows) => rows.iter().flat_map(flat).collect(),
        number => vec![number.as_f64().expect("a number")],
    }
}
