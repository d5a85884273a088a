//! Masters that can be trusted: reading, setting, refreshing, noticing changes.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use optimisers::{
    Adam, AdamW, Checkpoint, CheckpointFile, Descent, Error, ErrorKind, Kahan, MixedPrecision, Optimiser,
    SplitMaster, Update, setup, update,
};

use support::common::{
    Vars, assert_same, bits, bits16, engines, grads, is_kind, model, nearest16, snapshot, tensor, values, var,
};

/// T27: masters that start from an f32 checkpoint keep what the parameters cannot.
#[test]
fn t27_masters_can_be_initialised_from_a_wider_checkpoint() {
    let wide = tensor(1, &[50], DType::F64);
    for optimiser in [
        Optimiser::new(MixedPrecision::new(DType::F64, Adam::new(0.1))),
        Optimiser::new(MixedPrecision::new(DType::F32, Adam::new(0.1))),
        Optimiser::new(SplitMaster::new(Adam::new(0.1))),
        Optimiser::new(Kahan::new(Adam::new(0.1))),
        Optimiser::new(Adam::new(0.1)),
    ] {
        let x = model(&[tensor(2, &[50], DType::BF16)]);
        let mut state = setup(optimiser.clone(), &x).expect("a state");
        update(&mut state, &x, &grads([Some(tensor(3, &[50], DType::BF16))])).expect("an update");
        let moment = |state: &optimisers::StateTree| {
            state
                .leaf("0")
                .and_then(|leaf| leaf.tensor("m").ok())
                .map(|m| bits(&m))
        };
        let before = moment(&state);
        state
            .set_masters(&x, &BTreeMap::from([("0".to_string(), wide.clone())]))
            .expect("new masters");
        assert_eq!(moment(&state), before, "the rest of the state stays");
        let masters = state.masters(&x).expect("masters");
        let name = optimiser.name();
        let digits = if name.contains("F64") {
            53
        } else if name.contains("F32") || name.contains("Split") {
            24
        } else if name.contains("Kahan") {
            16
        } else {
            8
        };
        for ((master, exact), x) in values(&masters["0"])
            .into_iter()
            .zip(values(&wide))
            .zip(bits16(&x["0"]))
        {
            assert!(
                (master - exact).abs() <= exact.abs() * 2f64.powi(-digits),
                "{name}: {master} for {exact}"
            );
            let rounded = nearest16(DType::BF16, exact);
            assert!(
                x == rounded || (name.contains("Split") && x == rounded + 1),
                "{name}"
            );
        }
        state
            .check_masters(&x)
            .expect("parameters that are their masters rounded");
    }
}

#[test]
fn masters_are_refused_without_a_trace() {
    let x: Vars = [
        ("a", &[3][..], DType::BF16),
        ("b", &[2], DType::F32),
        ("left", &[1], DType::F32),
    ]
    .map(|(path, shape, dtype)| (path.to_string(), var(&tensor(1, shape, dtype))))
    .into();
    let rule = MixedPrecision::new(DType::F32, Adam::new(0.1));
    let mut state =
        optimisers::setup_with(&x, |path, _| (path != "left").then(|| rule.clone())).expect("a state");
    let good = || -> BTreeMap<String, Tensor> {
        [
            ("a", tensor(5, &[3], DType::F64)),
            ("b", tensor(6, &[2], DType::BF16)),
        ]
        .map(|(path, value)| (path.to_string(), value))
        .into()
    };
    let before = snapshot(&x, &state);
    let mut attempt = |change: &dyn Fn(&mut BTreeMap<String, Tensor>)| {
        let mut values = good();
        change(&mut values);
        let error = state.set_masters(&x, &values).expect_err("refused");
        assert_same(&[snapshot(&x, &state)], std::slice::from_ref(&before), &error);
        error
    };
    let of_tensor = |problem: ErrorKind, error: &Error, path: &str, words: &[&str]| {
        is_kind(error, problem, words);
        assert_eq!(error.path(), Some(path), "{error}");
    };
    of_tensor(
        ErrorKind::Tensor,
        &attempt(&|values| drop(values.remove("b"))),
        "b",
        &["no value for it"],
    );
    let unknown = attempt(&|values| drop(values.insert("c".into(), tensor(1, &[1], DType::F32))));
    is_kind(
        &unknown,
        ErrorKind::UnknownName,
        &[r#"variable in the model with the path "c""#],
    );
    let longer = attempt(&|values| drop(values.insert("b".into(), tensor(1, &[3], DType::F32))));
    of_tensor(
        ErrorKind::Tensor,
        &longer,
        "b",
        &["the value for it has shape [3], expected [2]"],
    );
    let integers = Tensor::zeros(2, DType::U32, &Device::Cpu).expect("integers");
    let whole = attempt(&|values| drop(values.insert("b".into(), integers.clone())));
    of_tensor(
        ErrorKind::Tensor,
        &whole,
        "b",
        &["U32, expected F32; pass values in F16, BF16, F32 or F64"],
    );
    let infinite = Tensor::new(&[0.0, 1.0, f64::INFINITY], &Device::Cpu).expect("a tensor");
    let infinite = attempt(&|values| drop(values.insert("a".into(), infinite.clone())));
    of_tensor(ErrorKind::NotFinite, &infinite, "a", &["inf at element 2"]);
    let left = Tensor::new(&[f32::NAN], &Device::Cpu).expect("a tensor");
    let left = attempt(&|values| drop(values.insert("left".into(), left.clone())));
    of_tensor(ErrorKind::NotFinite, &left, "left", &["NaN at element 0"]);

    // A number that its parameter can only hold as an infinity.
    let large = |number: f64| Tensor::new(&[0.0, number, 1.0], &Device::Cpu).expect("a tensor");
    let beyond = attempt(&|values| drop(values.insert("a".into(), large(3.4e38))));
    of_tensor(
        ErrorKind::Tensor,
        &beyond,
        "a",
        &[
            &3.4e38.to_string(),
            "at element 1, expected a number that BF16 can hold",
        ],
    );
    let beyond =
        attempt(&|values| drop(values.insert("b".into(), large(-1e300).narrow(0, 1, 2).expect("a view"))));
    of_tensor(ErrorKind::Tensor, &beyond, "b", &["a number that F32 can hold"]);

    let mut with_left = good();
    with_left.insert("left".into(), tensor(9, &[1], DType::F64));
    state
        .set_masters(&x, &with_left)
        .expect("masters, and a variable without a leaf");
    assert_eq!(values(&x["left"])[0] as f32, values(&with_left["left"])[0] as f32);
}

/// T26: new weights are not silently overwritten by old masters.
#[test]
fn t26_a_changed_parameter_is_noticed() {
    for (parameter, master) in [
        (DType::BF16, DType::F32),
        (DType::F16, DType::F64),
        (DType::F32, DType::F64),
    ] {
        for engine in engines() {
            let x = model(&[tensor(1, &[7], parameter), tensor(2, &[100, 50], parameter)]);
            let mut state = setup(MixedPrecision::new(master, Adam::new(0.1)), &x).expect("a state");
            let gradients = grads([
                Some(tensor(3, &[7], DType::F32)),
                Some(tensor(5, &[100, 50], DType::F32)),
            ]);
            let step = |state: &mut _| Update::new(state).engine(engine).apply(&x, &gradients);
            step(&mut state).expect("an update");
            x["1"]
                .set(&tensor(4, &[100, 50], parameter))
                .expect("new weights");
            let before = snapshot(&x, &state);
            let error = step(&mut state).expect_err("noticed");
            assert_eq!(error.path(), Some("1"), "{error}");
            is_kind(
                &error,
                ErrorKind::Changed,
                &["its master", "refresh_masters", "keep_masters"],
            );
            is_kind(
                &state.check_masters(&x).expect_err("seen"),
                ErrorKind::Changed,
                &["its master"],
            );
            assert_same(&[snapshot(&x, &state)], &[before], &error);

            let mut kept = state.try_clone().expect("a copy");
            let only_first = grads([Some(tensor(3, &[7], DType::F32)), None]);
            Update::new(&mut kept)
                .engine(engine)
                .keep_masters()
                .apply(&x, &only_first)
                .expect("accepted");

            state.refresh_masters(&x).expect("masters");
            state.check_masters(&x).expect("consistent");
            assert_eq!(values(&state.masters(&x).expect("masters")["1"]), values(&x["1"]));
            step(&mut state).expect("an update");
        }
    }
}

/// An update looks at a sample, the check at every element.
#[test]
fn the_whole_check_sees_every_element() {
    let x = model(&[tensor(1, &[100_000], DType::BF16)]);
    let mut state = setup(MixedPrecision::new(DType::F32, Descent::new(0.1)), &x).expect("a state");
    let gradient = grads([Some(x["0"].zeros_like().expect("zeros"))]);
    update(&mut state, &x, &gradient).expect("the first update, which looks at every element");
    let mut numbers = values(&x["0"]);
    numbers[99_000] += 1.0;
    let changed = Tensor::from_vec(numbers, 100_000, &Device::Cpu)
        .and_then(|x| x.to_dtype(DType::BF16))
        .expect("a tensor");
    x["0"].set(&changed).expect("one other weight");
    update(&mut state, &x, &gradient).expect("not in the sample");
    x["0"].set(&changed).expect("again");
    let error = state.check_masters(&x).expect_err("seen");
    is_kind(&error, ErrorKind::Changed, &["its master"]);
    assert_eq!(error.element(), Some(99_000), "{error}");
}

/// A NaN in master and parameter is no difference, and neither is a subnormal, an infinity or a zero of
/// either sign.
#[test]
fn extreme_numbers_are_no_difference() {
    let numbers = [
        f64::NAN,
        f64::INFINITY,
        -f64::INFINITY,
        0.0,
        -0.0,
        1e-40,
        -1e-45,
        3.3e38,
        65519.0,
        1e-7,
    ];
    for dtype in [DType::F16, DType::BF16] {
        let x = model(&[Tensor::new(&numbers, &Device::Cpu)
            .and_then(|x| x.to_dtype(dtype))
            .expect("a tensor")]);
        let mut state = setup(MixedPrecision::new(DType::F32, Descent::new(1.0)), &x).expect("a state");
        let gradient = Tensor::new(
            &[0.0, 0.0, 0.0, 0.0, 0.0, 1e-42, 0.0, 1e38, -1.0, 1e-9],
            &Device::Cpu,
        )
        .expect("a gradient");
        for _ in 0..3 {
            update(&mut state, &x, &grads([Some(gradient.clone())])).expect("an update");
            state.check_masters(&x).expect("rounded");
        }
    }
}

/// Adding masters to a running state and taking them off again keeps moments and counters.
#[test]
fn mixed_precision_can_be_added_and_taken_off() {
    let x = model(&[tensor(1, &[20], DType::BF16)]);
    let mut state = setup(AdamW::new(0.01), &x).expect("a state");
    let gradient = |seed| grads([Some(tensor(seed, &[20], DType::BF16))]);
    update(&mut state, &x, &gradient(2)).expect("an update");
    state
        .all()
        .replace(MixedPrecision::new(DType::F32, AdamW::new(0.01)), &x)
        .expect("masters");
    update(&mut state, &x, &gradient(3)).expect("an update");
    assert_eq!(
        state.leaf("0").map(|leaf| (leaf.steps(), leaf.counters())),
        Some((2, vec![("t".to_string(), 2)]))
    );
    let master = values(&state.masters(&x).expect("masters")["0"]);
    assert_ne!(master, values(&x["0"]));
    state.all().replace(AdamW::new(0.01), &x).expect("no masters");
    assert_eq!(
        values(&state.masters(&x).expect("parameters")["0"]),
        values(&x["0"])
    );
    update(&mut state, &x, &gradient(4)).expect("an update");
    assert_eq!(
        state.leaf("0").map(|leaf| leaf.counters()),
        Some(vec![("t".to_string(), 3)])
    );
}

/// Masters go to other tools and come back by name.
#[test]
fn masters_are_read_by_a_var_map() {
    let precise = Var::from_tensor(&tensor(1, &[3, 2], DType::F32)).expect("a variable");
    let x: Vars = [(
        "layer.weight".to_string(),
        var(&precise.to_dtype(DType::BF16).expect("a copy")),
    )]
    .into();
    let mut state = setup(MixedPrecision::new(DType::F32, Adam::new(0.01)), &x).expect("a state");
    update(
        &mut state,
        &x,
        &BTreeMap::from([("layer.weight", tensor(2, &[3, 2], DType::BF16))]),
    )
    .expect("an update");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("masters.safetensors");
    state.save_masters(&x, &file).expect("a file");

    let mut map = VarMap::new();
    map.data().lock().expect("variables").insert(
        "layer.weight".to_string(),
        Var::zeros((3, 2), DType::F32, &Device::Cpu).expect("a variable"),
    );
    map.load(&file).expect("weights");
    let loaded = map.data().lock().expect("variables")["layer.weight"].clone();
    assert_eq!(
        bits(&loaded),
        bits(&state.masters(&x).expect("masters")["layer.weight"])
    );

    let fresh: Vars = [("layer.weight".to_string(), var(&tensor(7, &[3, 2], DType::BF16)))].into();
    let mut fresh_state = setup(MixedPrecision::new(DType::F32, Adam::new(0.01)), &fresh).expect("a state");
    let of_file = candle_core::safetensors::load(&file, &Device::Cpu).expect("tensors");
    fresh_state.set_masters(&fresh, &of_file).expect("masters");
    assert_eq!(
        bits(&fresh_state.masters(&fresh).expect("masters")["layer.weight"]),
        bits(&loaded)
    );
    assert_eq!(bits16(&fresh["layer.weight"]), bits16(&x["layer.weight"]));
}

/// A file whose parameters are not its masters rounded is not taken over.
#[test]
fn a_checkpoint_with_changed_parameters_is_refused() {
    let x = model(&[tensor(1, &[2000], DType::BF16)]);
    let mut state = setup(MixedPrecision::new(DType::F32, Adam::new(0.01)), &x).expect("a state");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.safetensors");
    x["0"]
        .set(&tensor(2, &[2000], DType::BF16))
        .expect("other weights");
    Checkpoint::new(&state).model(&x).save(&path).expect("a file");
    let before = snapshot(&x, &state);
    let file = CheckpointFile::open(&path).expect("a file");
    let error = file.restore_with_model(&mut state, &x).expect_err("refused");
    is_kind(
        &error,
        ErrorKind::Changed,
        &[r#"parameter "0""#, "refresh_masters"],
    );
    assert_same(&[snapshot(&x, &state)], &[before], &error);
    file.restore(&mut state).expect("the state alone");
    state.refresh_masters(&x).expect("masters");
    state.check_masters(&x).expect("consistent");
}
