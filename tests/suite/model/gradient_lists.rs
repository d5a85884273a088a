//! Gradients as lists of pairs, and as maps of what is borrowed.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{Adam, Error, ErrorKind, Gradients, LossScaler, Update, setup, update};

use support::common::{Grads, Snapshot, Vars, is_kind, model, random, snapshot};

fn variables() -> Vars {
    model(&[1, 2, 3].map(|seed| random(seed, &[4], DType::F32, &Device::Cpu)))
}

fn gradients() -> Grads {
    (0..3)
        .map(|i| (i.to_string(), random(10 + i, &[4], DType::F32, &Device::Cpu)))
        .collect()
}

/// What one step with these gradients makes of everything.
fn after<G: Gradients + ?Sized>(grads: &G) -> Snapshot {
    let model = variables();
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    assert_eq!(update(&mut state, &model, grads).expect("an update").applied, 3);
    let functional: BTreeMap<_, _> = model
        .iter()
        .map(|(path, x)| (path.clone(), x.as_tensor().clone()))
        .collect();
    assert_eq!(
        Update::functional(&state)
            .apply(&functional, grads)
            .expect("an update")
            .2
            .applied,
        3
    );
    snapshot(&model, &state)
}

#[test]
fn lists_and_maps_of_references_are_gradients_like_a_map() {
    let owned = gradients();
    let expected = after(&owned);
    let borrowed: Vec<(&str, &Tensor)> = owned
        .iter()
        .map(|(path, gradient)| (path.as_str(), gradient))
        .collect();
    let reversed: Vec<(String, Tensor)> = owned.clone().into_iter().rev().collect();
    let named: [(&str, Tensor); 3] = ["2", "0", "1"].map(|path| (path, owned[path].clone()));

    assert_eq!(after(&borrowed), expected);
    assert_eq!(after(borrowed.as_slice()), expected);
    assert_eq!(after(&reversed), expected);
    assert_eq!(after(&reversed[..]), expected);
    assert_eq!(after(&named), expected);
    assert_eq!(after(&named[..]), expected);
    assert_eq!(
        after(&borrowed.iter().copied().collect::<BTreeMap<&str, &Tensor>>()),
        expected
    );
    assert_eq!(
        after(&borrowed.iter().copied().collect::<HashMap<&str, &Tensor>>()),
        expected
    );
    assert_eq!(
        after(
            &owned
                .iter()
                .map(|(path, gradient)| (path.clone(), gradient))
                .collect::<HashMap<String, &Tensor>>()
        ),
        expected
    );
    assert_eq!(
        after(
            &owned
                .iter()
                .map(|(path, gradient)| (path.clone(), Arc::new(gradient.clone())))
                .collect::<BTreeMap<String, Arc<Tensor>>>()
        ),
        expected
    );
    assert_eq!(
        after(
            &borrowed
                .iter()
                .map(|&(path, gradient)| (Cow::Borrowed(path), gradient))
                .collect::<Vec<(Cow<'_, str>, &Tensor)>>()
        ),
        expected
    );
}

#[test]
fn a_path_that_a_list_has_twice_is_refused() {
    let (model, gradient) = (variables(), random(1, &[4], DType::F32, &Device::Cpu));
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    let before = snapshot(&model, &state);
    let twice = [
        ("0", &gradient),
        ("2", &gradient),
        ("1", &gradient),
        ("2", &gradient),
    ];
    let is_refused = |error: Error| {
        let is_named = (error.kind(), error.path()) == (ErrorKind::Contract, Some("2"));
        is_named
            && error
                .to_string()
                .contains("\"2\": the list has two gradients for this parameter")
    };
    assert!(is_refused(
        update(&mut state, &model, &twice).expect_err("refused")
    ));
    assert!(is_refused(
        update(&mut state, &model, &twice.to_vec()).expect_err("refused")
    ));
    assert!(is_refused(
        update(&mut state, &model, &twice[..]).expect_err("refused")
    ));
    let functional: BTreeMap<_, _> = model
        .iter()
        .map(|(path, x)| (path.clone(), x.as_tensor().clone()))
        .collect();
    assert!(is_refused(
        Update::functional(&state)
            .apply(&functional, &twice)
            .expect_err("refused")
    ));
    let mut scaler = LossScaler::fixed(2.0);
    let _ = scaler.scale(&gradient).expect("a loss");
    assert!(is_refused(
        Update::new(&mut state)
            .scaler(&mut scaler)
            .apply(&model, &twice)
            .expect_err("refused")
    ));
    assert_eq!(snapshot(&model, &state), before);
}

#[test]
fn a_list_has_the_checks_of_a_map() {
    let model = variables();
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    let gradient = random(1, &[4], DType::F32, &Device::Cpu);
    let unknown = update(&mut state, &model, &[("0", &gradient), ("7", &gradient)]).expect_err("refused");
    is_kind(&unknown, ErrorKind::UnknownName, &["the gradient of \"7\""]);
    let short = random(1, &[3], DType::F32, &Device::Cpu);
    let misshapen = update(&mut state, &model, &[("1", &short)]).expect_err("refused");
    is_kind(&misshapen, ErrorKind::Tensor, &["the gradient"]);
    assert_eq!(
        (misshapen.path(), misshapen.got(), misshapen.expected()),
        (Some("1"), Some("[3]"), Some("[4]")),
        "{misshapen}"
    );
    let none = update(&mut state, &model, &[] as &[(&str, Tensor)]).expect_err("refused");
    is_kind(&none, ErrorKind::NoGradient, &["any of the 3 parameters"]);
    let outcome = update(&mut state, &model, &[("1", &gradient)]).expect("an update");
    assert_eq!((outcome.applied, outcome.without_gradient.len()), (1, 2));
}

/// Partial gradients under the names of a tied variable are added up, as in a map.
#[test]
fn a_list_may_name_a_tied_variable_by_each_of_its_paths() {
    let x = Var::new(&[0f32], &Device::Cpu).expect("a variable");
    let tied = BTreeMap::from([("embedding", x.clone()), ("head", x.clone())]);
    let mut state = setup(optimisers::Descent::new(1.0), &tied).expect("a state");
    let one = |value: f32| Tensor::new(&[value], &Device::Cpu).expect("a gradient");
    update(&mut state, &tied, &[("head", one(1.0)), ("embedding", one(2.0))]).expect("an update");
    assert_eq!(x.to_vec1::<f32>().expect("a value"), [-3.0]);
}

/// A list of thousands is searched once, not once per parameter.
#[test]
fn a_list_is_looked_through_once() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static COMPARED: AtomicUsize = AtomicUsize::new(0);

    /// A path that counts how often it is looked at.
    struct Counted(String);

    impl std::borrow::Borrow<str> for Counted {
        fn borrow(&self) -> &str {
            COMPARED.fetch_add(1, Ordering::Relaxed);
            &self.0
        }
    }

    let model: Vars = (0..500)
        .map(|i| {
            (
                i.to_string(),
                Var::zeros(1, DType::F32, &Device::Cpu).expect("a variable"),
            )
        })
        .collect();
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    let one = Tensor::ones(1, DType::F32, &Device::Cpu).expect("a gradient");
    let list: Vec<(Counted, &Tensor)> = model.keys().map(|path| (Counted(path.clone()), &one)).collect();
    assert_eq!(update(&mut state, &model, &list).expect("an update").applied, 500);
    assert!(
        COMPARED.load(Ordering::Relaxed) <= 4 * 500,
        "{}",
        COMPARED.load(Ordering::Relaxed)
    );
}
