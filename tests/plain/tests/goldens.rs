//! Trajectories of other libraries, from `tests/golden`, on slices.

use optimisers::{DType, FieldValue, OptimiserChain, Rule, rules, setup, update};
use optimisers_plain::golden::{Case, flat};
use optimisers_plain::{Named, OF_CANDLE, Plain, Vector};
use serde_json::Value;

/// The rule of that name with these hyper-parameters; `None` if it needs candle or its arguments have names
/// of their own, which `tests/suite/rules/goldens.rs` translates.
fn rule(case: &Case) -> Option<Box<dyn Rule>> {
    let listed = |name: &str| {
        rules::catalogue()
            .into_iter()
            .find(|listing| listing.name == name)
            .map(|listing| listing.rule)
    };
    let mut rule: Box<dyn Rule> = match case
        .rule
        .strip_prefix("chain(")
        .and_then(|rest| rest.strip_suffix(')'))
    {
        Some(members) => Box::new(OptimiserChain::new(
            members.split(", ").map(listed).collect::<Option<Vec<_>>>()?,
        )),
        None if OF_CANDLE.contains(&&*case.rule) => return None,
        None => listed(&case.rule)?,
    };
    for (field, value) in &case.args {
        let field = field.trim_end_matches('_');
        let (_, default) = rule.fields().into_iter().find(|(known, _)| *known == field)?;
        let value = match default {
            FieldValue::Real(_) => FieldValue::Real(value.as_f64()?),
            FieldValue::Pair(..) => FieldValue::Pair(value[0].as_f64()?, value[1].as_f64()?),
            FieldValue::Triple(..) => {
                FieldValue::Triple(value[0].as_f64()?, value[1].as_f64()?, value[2].as_f64()?)
            }
            FieldValue::Count(_) => FieldValue::Count(value.as_u64()?),
            FieldValue::Flag(_) => FieldValue::Flag(value.as_bool()?),
            _ => return None,
        };
        rule.set_field(field, value).expect("a value of the field's type");
    }
    Some(rule)
}

#[test]
fn rules_follow_their_oracles() {
    let files = [
        include_str!("../../golden/rules.json"),
        include_str!("../../golden/modern.json"),
    ];
    let cases: Vec<Case> = files
        .iter()
        .flat_map(|text| serde_json::from_str::<Vec<Case>>(text).expect("golden cases"))
        .collect();
    let mut followed = 0;
    for case in &cases {
        let Some(rule) = rule(case) else { continue };
        let of = |numbers: &Value| {
            let values = Vector::new(DType::F64, &flat(numbers));
            Plain(vec![Named {
                path: "x".to_string(),
                shape: case.shape.clone(),
                dtype: DType::F64,
                values,
            }])
        };
        let mut x = of(&case.x0);
        let mut state = setup(rule, &x.lend()).expect("a state");
        for (step, (gradient, expected)) in case.grads.iter().zip(&case.x).enumerate() {
            update(&mut state, &x.lend(), &of(gradient).show()).expect("an update");
            let (got, expected) = (x.0[0].values.numbers(), flat(expected));
            let floor = 1e-3 * expected.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
            for (got, expected) in got.iter().zip(&expected) {
                let error = (got - expected).abs() / expected.abs().max(floor);
                assert!(
                    error <= 1e-10,
                    "{} {:?}, step {step}: {got:e} for {expected:e}",
                    case.rule,
                    case.args
                );
            }
        }
        followed += 1;
    }
    assert!(followed >= 75, "{followed} of {} cases", cases.len());
}
