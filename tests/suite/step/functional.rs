//! The functional form, copies, and states that go to another model.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    Adam, Descent, ErrorKind, MixedPrecision, Model, StateTree, Update, Visitor, setup, setup_with, update,
};

use support::common::{
    Vars, assert_same, bits, devices, grads, is_kind, model, optimisers_for, random, snapshot, unnamed, var,
};

fn tensors(seed: u64, dtype: DType) -> [Tensor; 4] {
    let shapes: [&[usize]; 4] = [&[3, 5], &[], &[3, 0], &[7]];
    shapes.map(|shape| random(seed, shape, dtype, &Device::Cpu))
}

/// The variables as plain parameters by path.
fn parameters(model: &Vars) -> BTreeMap<String, Tensor> {
    model
        .iter()
        .map(|(path, var)| (path.clone(), var.as_tensor().clone()))
        .collect()
}

fn as_vars(parameters: &BTreeMap<String, Tensor>) -> Vars {
    parameters
        .iter()
        .map(|(path, tensor)| (path.clone(), Var::from_tensor(tensor).expect("a variable")))
        .collect()
}

#[test]
fn it_gives_the_bits_of_update_and_leaves_its_arguments() {
    for dtype in [DType::BF16, DType::F32] {
        for optimiser in optimisers_for(dtype) {
            let in_place = model(&tensors(0, dtype));
            let mut state = setup(optimiser.clone(), &in_place).expect("a state");

            let start = model(&tensors(0, dtype));
            let mut functional: (StateTree, _) = (
                setup(optimiser.clone(), &start).expect("a state"),
                parameters(&start),
            );
            for call in 1..=6 {
                let gradients = grads(tensors(call, DType::F32).map(Some));
                let outcome = update(&mut state, &in_place, &gradients).expect("an update");

                let before = snapshot(&as_vars(&functional.1), &functional.0);
                let (next_state, next, functional_outcome) = Update::functional(&functional.0)
                    .apply(&functional.1, &gradients)
                    .expect("an update");
                assert_same(
                    &[snapshot(&as_vars(&functional.1), &functional.0)],
                    &[before],
                    optimiser.name(),
                );
                assert_eq!(functional_outcome, outcome);
                functional = (next_state, next);
                assert_same(
                    &[snapshot(&as_vars(&functional.1), &functional.0)],
                    &[snapshot(&in_place, &state)],
                    optimiser.name(),
                );
            }
        }
    }
}

#[test]
fn it_takes_a_grad_store_and_its_results_can_be_updated_in_place() {
    let start = model(&[random(1, &[4], DType::F32, &Device::Cpu)]);
    let state = setup(Adam::new(0.1), &start).expect("a state");
    let grads_of = |parameters: &BTreeMap<String, Tensor>| {
        parameters["0"]
            .sqr()
            .and_then(|x| x.sum_all()?.backward())
            .expect("gradients")
    };

    let (mut state, next, outcome) = Update::functional(&state)
        .apply(&parameters(&start), &grads_of(&parameters(&start)))
        .expect("an update");
    assert_eq!(outcome.applied, 1);
    let grads = grads_of(&next);
    let (_, functional, _) = Update::functional(&state)
        .apply(&next, &grads)
        .expect("an update");
    update(&mut state, &next, &grads).expect("an update");
    assert_eq!(bits(&functional["0"]), bits(&next["0"]));
}

/// What to do about another model.
const ANOTHER: &str = "pass the model that `setup` saw, or set up a state for this model";

#[test]
fn it_refuses_parameters_that_are_not_the_states() {
    let start = model(&[
        random(1, &[4], DType::F32, &Device::Cpu),
        random(2, &[2], DType::F32, &Device::Cpu),
    ]);
    let state = setup(Adam::new(0.1), &start).expect("a state");
    let gradients = grads([Some(random(3, &[4], DType::F32, &Device::Cpu))]);
    let attempt = |change: &dyn Fn(&mut BTreeMap<String, Tensor>)| {
        let mut parameters = parameters(&start);
        change(&mut parameters);
        Update::functional(&state)
            .apply(&parameters, &gradients)
            .map(|_| ())
            .expect_err("refused")
    };
    let missing = attempt(&|parameters| drop(parameters.remove("1")));
    assert_eq!(missing.path(), Some("1"), "{missing}");
    is_kind(
        &missing,
        ErrorKind::Model,
        &["the state has this parameter, but the model does not"],
    );
    let unknown =
        attempt(&|parameters| drop(parameters.insert("2".into(), random(4, &[1], DType::F32, &Device::Cpu))));
    assert_eq!(unknown.path(), Some("2"), "{unknown}");
    is_kind(&unknown, ErrorKind::Model, &["it is not in this state"]);
    let misshapen =
        attempt(&|parameters| drop(parameters.insert("1".into(), random(4, &[3], DType::F32, &Device::Cpu))));
    assert_eq!(misshapen.kind(), ErrorKind::Tensor, "{misshapen}");
    assert_eq!(
        misshapen.to_string(),
        format!(r#"parameter "1": its variable in the model has shape [3], expected [2]; {ANOTHER}"#)
    );
    let converted = attempt(&|parameters| {
        drop(parameters.insert("1".into(), random(2, &[2], DType::BF16, &Device::Cpu)))
    });
    assert_eq!(
        (converted.kind(), converted.path()),
        (ErrorKind::Tensor, Some("1")),
        "{converted}"
    );
    assert_eq!(
        (converted.got(), converted.expected()),
        (Some("BF16"), Some("F32")),
        "{converted}"
    );
    let stranger = grads([None, None, Some(random(3, &[4], DType::F32, &Device::Cpu))]);
    let error = Update::functional(&state)
        .apply(&parameters(&start), &stranger)
        .expect_err("refused");
    is_kind(&error, ErrorKind::UnknownName, &["the gradient of \"2\""]);
}

/// Only one of two tensors of a tied parameter would get its gradient and move.
#[test]
fn t61_two_tensors_of_a_tied_parameter_are_refused() {
    let x = random(1, &[4], DType::F32, &Device::Cpu);
    let shared = var(&x);
    let model = Vars::from(["in", "out"].map(|path| (path.to_string(), shared.clone())));
    let state = setup(Adam::new(0.1), &model).expect("a state");
    let apply = |out: Tensor| {
        let parameters = BTreeMap::from([("in".to_string(), x.clone()), ("out".to_string(), out)]);
        let gradients = [("in", random(3, &[4], DType::F32, &Device::Cpu))];
        Update::functional(&state)
            .apply(&parameters, &gradients)
            .map(|(_, parameters, _)| parameters.into_keys().collect::<Vec<_>>())
    };
    assert_eq!(apply(x.clone()).expect("one tensor"), ["in"]);
    for out in [
        x.copy().expect("a copy"),
        random(2, &[4], DType::F32, &Device::Cpu),
    ] {
        let error = apply(out).expect_err("two tensors");
        is_kind(
            &error,
            ErrorKind::Model,
            &["\"in\" and \"out\" are one variable", "pass one tensor"],
        );
    }
}

/// A gradient for a variable that was left out is no error, and moves nothing, in either form.
#[test]
fn what_was_left_out_stays_left_out() {
    let all = model(&[
        random(1, &[4], DType::F32, &Device::Cpu),
        random(2, &[2], DType::F32, &Device::Cpu),
    ]);
    let state = setup_with(&all, |path, _| (path == "0").then(|| Descent::new(0.1))).expect("a state");
    let gradients = grads([
        Some(random(3, &[4], DType::F32, &Device::Cpu)),
        Some(random(4, &[2], DType::F32, &Device::Cpu)),
    ]);
    let trained = BTreeMap::from([("0".to_string(), all["0"].as_tensor().clone())]);
    let (state, next, _) = Update::functional(&state)
        .apply(&trained, &gradients)
        .expect("an update");
    let (_, after, _) = Update::functional(&state)
        .apply(&next, &gradients)
        .expect("another");
    assert_eq!(after.keys().collect::<Vec<_>>(), ["0"]);
    assert_ne!(bits(&after["0"]), bits(&next["0"]));

    let mut state = state.try_clone().expect("a copy");
    state.rebind(&all).expect("the old model");
    let before = [bits(&all["0"]), bits(&all["1"])];
    let outcome = update(&mut state, &all, &gradients).expect("an update");
    assert_eq!(
        (
            outcome.applied,
            state.leaves().map(|leaf| leaf.path()).collect::<Vec<_>>()
        ),
        (1, vec!["0"])
    );
    assert_ne!(bits(&all["0"]), before[0]);
    assert_eq!(bits(&all["1"]), before[1], "left out");
}

#[test]
fn a_clone_has_storage_of_its_own() {
    for dtype in [DType::F16, DType::F32, DType::F64] {
        for optimiser in optimisers_for(dtype) {
            let (first, second) = (model(&tensors(0, dtype)), model(&tensors(0, dtype)));
            let mut state = setup(optimiser.clone(), &first).expect("a state");
            update(&mut state, &first, &grads(tensors(1, dtype).map(Some))).expect("an update");
            update(
                &mut setup(optimiser.clone(), &second).expect("a state"),
                &second,
                &grads(tensors(1, dtype).map(Some)),
            )
            .expect("an update");

            let mut copy = state.try_clone().expect("a copy");
            copy.rebind(&second).expect("the same paths");
            let before = snapshot(&second, &copy);
            for call in 2..=6 {
                update(&mut state, &first, &grads(tensors(call, dtype).map(Some))).expect("an update");
            }
            assert_same(&[snapshot(&second, &copy)], &[before], optimiser.name());
            for call in 2..=6 {
                update(&mut copy, &second, &grads(tensors(call, dtype).map(Some))).expect("an update");
            }
            assert_same(
                &[snapshot(&second, &copy)],
                &[snapshot(&first, &state)],
                optimiser.name(),
            );
        }
    }
}

#[test]
fn a_state_moves_to_the_device_of_its_new_model() {
    for device in devices() {
        let here = model(&tensors(0, DType::BF16));
        let there: Vars = here
            .iter()
            .map(|(path, x)| (path.clone(), var(&x.to_device(&device).expect("a copy"))))
            .collect();
        let rule = MixedPrecision::new(DType::F32, Adam::new(0.1));
        let mut state = setup(rule, &here).expect("a state");
        update(&mut state, &here, &grads(tensors(1, DType::F32).map(Some))).expect("an update");
        let expected = snapshot(&here, &state);
        for (path, x) in &there {
            if x.elem_count() > 0 {
                x.set(&here[path].to_device(&device).expect("a copy"))
                    .expect("the parameters of the moved model");
            }
        }
        let mut moved = state.try_clone().expect("a copy");
        moved.rebind(&there).expect("the same paths");
        assert_same(
            &[unnamed(snapshot(&there, &moved))],
            &[unnamed(expected)],
            &device,
        );
        for leaf in moved.leaves() {
            for name in leaf.tensor_names() {
                let tensor = leaf.tensor(&name).expect("a copy");
                assert!(tensor.device().same_device(&device), "{name}");
            }
        }
        let gradients = tensors(2, DType::F32).map(|gradient| gradient.to_device(&device).ok());
        update(&mut moved, &there, &grads(gradients)).expect("an update");
    }
}

/// A model that can lose and gain variables.
struct Named(Vec<(&'static str, Var)>);

impl Model for Named {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        self.0.iter().for_each(|(name, var)| visitor.child(name, var));
    }
}

#[test]
fn rebinding_refuses_another_model_and_changes_nothing() {
    let fresh = |seed, shape: &[usize], dtype| var(&random(seed, shape, dtype, &Device::Cpu));
    let x = Named(vec![
        ("a", fresh(1, &[2], DType::F32)),
        ("b", fresh(2, &[3], DType::F32)),
    ]);
    let mut state = setup(Adam::new(0.1), &x).expect("a state");
    let mut refused =
        |other: Vec<(&'static str, Var)>| state.rebind(&Named(other)).expect_err("refused").to_string();
    let lacks = refused(vec![("a", fresh(3, &[2], DType::F32))]);
    assert!(
        lacks.contains(r#"parameter "b": the state has this parameter, but the model does not"#),
        "{lacks}"
    );
    let more = refused(vec![
        ("a", fresh(3, &[2], DType::F32)),
        ("b", fresh(4, &[3], DType::F32)),
        ("c", fresh(5, &[1], DType::F32)),
    ]);
    assert!(
        more.contains(r#"parameter "c": it is not in this state"#),
        "{more}"
    );
    let dtype = refused(vec![
        ("a", fresh(3, &[2], DType::BF16)),
        ("b", fresh(4, &[3], DType::F32)),
    ]);
    assert_eq!(
        dtype,
        format!(r#"parameter "a": its variable in the model is BF16, expected F32; {ANOTHER}"#)
    );
    let gradients = BTreeMap::from([("a", random(9, &[2], DType::F32, &Device::Cpu))]);
    assert_eq!(
        update(&mut state, &x, &gradients)
            .expect("still the old model's")
            .applied,
        1
    );
}
