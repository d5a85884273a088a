//! `Twin`: the user's own F32 model as the masters of one in 16 bits.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarBuilder, VarMap, linear};
use optimisers::{
    AccumGrad, Adam, ClipGlobalNorm, Descent, ErrorKind, LossScaler, MixedPrecision, OptimiserChain, Outcome,
    TensorProblem, Twin, Update, setup, update,
};

use support::common::{
    Vars, bits, bits16, grads, is_kind, model, nearest16, rules_and_chains, snapshot, tensor, values, var,
};

fn twin_of(precise: &Vars, dtype: DType) -> (Vars, Twin) {
    let low: Vars =
        precise.iter().map(|(path, x)| (path.clone(), var(&x.to_dtype(dtype).expect("a copy")))).collect();
    let twin = Twin::new(precise, &low).expect("a pair");
    (low, twin)
}

/// The user's own F32 variables are the masters: the same bits as with `MixedPrecision`, without its copy.
#[test]
fn a_pair_of_models_is_mixed_precision_without_the_copy() {
    for dtype in [DType::BF16, DType::F16] {
        for rule in rules_and_chains() {
            let start = [tensor(1, &[4, 5], dtype), tensor(2, &[3, 0], dtype), tensor(3, &[], dtype)];
            let mixed = model(&start);
            let mut mixed_state =
                setup(MixedPrecision::new(DType::F32, rule.clone()), &mixed).expect("a state");

            let precise = model(&start.clone().map(|x| x.to_dtype(DType::F32).expect("a copy")));
            let (low, twin) = twin_of(&precise, dtype);
            let mut state = setup(rule.clone(), &twin).expect("a state");
            assert_eq!(state.bytes() + 4 * 21, mixed_state.bytes());
            let mut outcome = Outcome::default();
            for call in 0..6 {
                let gradients = grads(
                    [(4, &[4, 5][..]), (5, &[3, 0]), (6, &[])]
                        .map(|(seed, shape)| Some(tensor(seed + 10 * call, shape, dtype))),
                );
                let expected = update(&mut mixed_state, &mixed, &gradients).expect("an update");
                outcome = update(&mut state, &twin, &gradients).expect("an update");
                assert_eq!(outcome, expected);
                for path in mixed.keys() {
                    assert_eq!(bits(&low[path]), bits(&mixed[path]), "{}", rule.name());
                    let master = mixed_state
                        .leaf(path)
                        .and_then(|leaf| leaf.tensor("master").ok()?)
                        .expect("a master");
                    assert_eq!(bits(&precise[path]), bits(&master), "{}", rule.name());
                }
            }
            assert_eq!(outcome.without_gradient, [""; 0]);
        }
    }
}

#[test]
fn a_twin_trains_a_network_with_gradients_from_its_own_graph() {
    let precise = VarMap::new();
    linear(3, 2, VarBuilder::from_varmap(&precise, DType::F32, &Device::Cpu).pp("layer")).expect("a layer");
    let low =
        Twin::variables(&precise, |path, _| if path.ends_with("bias") { DType::F32 } else { DType::F16 })
            .expect("variables");
    let builder = VarBuilder::from_varmap(&low, DType::F16, &Device::Cpu).pp("layer");
    let (weight, bias) =
        (builder.get((2, 3), "weight").expect("a weight"), builder.get(2, "bias").expect("a bias"));
    assert_eq!((weight.dtype(), bias.dtype()), (DType::F16, DType::F32));
    let twin = Twin::new(&precise, &low).expect("a pair");
    let rule = OptimiserChain::new((AccumGrad::new(2), ClipGlobalNorm::new(1.0), Adam::new(0.05)));
    let mut state = setup(rule, &twin).expect("a state");
    let mut scaler = LossScaler::fixed(128.0);
    let input = tensor(1, &[8, 3], DType::F16);
    let mut losses = Vec::new();
    for _ in 0..40 {
        let layer = candle_nn::Linear::new(weight.clone(), None);
        let output = layer
            .forward(&input)
            .and_then(|y| y.to_dtype(DType::F32)?.broadcast_add(&bias))
            .expect("an output");
        let loss = (output - 1.0).and_then(|error| error.sqr()?.mean_all()).expect("a loss");
        losses.push(loss.to_scalar::<f32>().expect("a number"));
        let gradients = scaler.scale(&loss).expect("a loss").backward().expect("gradients");
        let outcome =
            Update::new(&mut state).scaler(&mut scaler).apply(&twin, &gradients).expect("an update");
        assert!(outcome.without_gradient.is_empty() && outcome.skipped().is_none(), "{outcome:?}");
    }
    assert!(losses[39] < 0.5 * losses[0], "{losses:?}");
    let stored =
        precise.data().lock().expect("variables")["layer.weight"].to_dtype(DType::F16).expect("a copy");
    assert_eq!(bits16(&weight), bits16(&stored));
}

#[test]
fn pairs_that_do_not_fit_are_refused() {
    let precise = model(&[tensor(1, &[3], DType::F32), tensor(2, &[2], DType::F32)]);
    let low = |tensors: &[Tensor]| model(tensors);
    let wrong_shape = Twin::new(&precise, &low(&[tensor(1, &[4], DType::BF16)])).expect_err("refused");
    is_kind(
        &wrong_shape,
        ErrorKind::Tensor(TensorProblem::Shape),
        &["parameter \"0\": its twin has shape [4], expected [3]"],
    );
    let wider = Twin::new(&precise, &low(&[tensor(1, &[3], DType::F64)])).expect_err("refused");
    let words = "parameter \"0\": its twin is F64, expected a dtype no wider than F32";
    is_kind(&wider, ErrorKind::Tensor(TensorProblem::Dtype), &[words]);
    let stranger =
        low(&[tensor(1, &[3], DType::BF16), tensor(2, &[2], DType::BF16), tensor(3, &[1], DType::BF16)]);
    let unknown = Twin::new(&precise, &stranger).expect_err("refused");
    is_kind(&unknown, ErrorKind::Model, &["the twin has it, and the precise model does not"]);
    assert_eq!(unknown.path(), Some("2"), "{unknown}");
    let itself = Twin::new(&precise, &precise).expect_err("a model is no twin of itself");
    is_kind(&itself, ErrorKind::Model, &["no trainable variable of its own"]);

    let (low, twin) = twin_of(&precise, DType::BF16);
    let gradients = || grads([Some(tensor(3, &[3], DType::BF16)), Some(tensor(4, &[2], DType::BF16))]);
    let mut copying = setup(MixedPrecision::new(DType::F64, Descent::new(0.1)), &twin).expect("a state");
    let two_copies = update(&mut copying, &twin, &gradients()).expect_err("refused");
    is_kind(
        &two_copies,
        ErrorKind::Unsupported,
        &["it has a twin, and MixedPrecision(F64, Descent) keeps a copy of its own"],
    );
    assert_eq!(two_copies.path(), Some("0"), "{two_copies}");
    let mut state = setup(Descent::new(0.1), &twin).expect("a state");
    low["0"].set(&tensor(9, &[3], DType::BF16)).expect("other weights");
    let stale = update(&mut state, &twin, &gradients()).expect_err("refused");
    is_kind(&stale, ErrorKind::Changed, &["the value of its twin is", "`Twin::refresh`"]);
    assert_eq!((stale.path(), stale.element()), (Some("0"), Some(0)), "{stale}");
    twin.refresh().expect("copies");
    update(&mut state, &twin, &gradients()).expect("an update");
    // A gradient that is the twin itself is copied first.
    let before = values(&precise["0"]);
    update(&mut state, &twin, &grads([Some(low["0"].as_tensor().clone()), None])).expect("an update");
    let rate = 0.1f64 as f32;
    let expected = before.iter().map(|x| {
        let low = f32::from_bits(u32::from(nearest16(DType::BF16, *x)) << 16);
        f64::from(*x as f32 - low * rate)
    });
    assert_eq!(values(&precise["0"]), expected.collect::<Vec<_>>());
}

/// A pair computes the gradients of either half, or of both: they are those of one parameter, as of tied
/// ones.
#[test]
fn gradients_of_both_halves_are_added() {
    let start = tensor(1, &[3], DType::F32);
    let precise = model(std::slice::from_ref(&start));
    let (low, twin) = twin_of(&precise, DType::BF16);
    let (high, low) = (precise["0"].as_tensor(), low["0"].as_tensor());
    // As a part of another model, and twice in it.
    let pairs = (vec![twin.clone()], twin);
    let mut state = setup(Descent::new(1.0), &pairs).expect("a state");
    let of_high = || high.sum_all().expect("a loss");
    let of_low = || low.to_dtype(DType::F32).and_then(|x| (x * 2.0)?.sum_all()).expect("a loss");
    let mut expected = values(&start);
    for (loss, gradient) in
        [(of_high(), 1.0), (of_low(), 2.0), ((of_high() + of_low()).expect("a loss"), 3.0)]
    {
        assert_eq!(
            update(&mut state, &pairs, &loss.backward().expect("gradients")).expect("an update").applied,
            1
        );
        expected.iter_mut().for_each(|x| *x = f64::from((*x - gradient) as f32));
        assert_eq!(values(high), expected);
        assert_eq!(bits(low), bits(&high.to_dtype(DType::BF16).expect("rounded")));
    }
}

/// A step would write one twin and leave the other behind.
#[test]
fn a_parameter_in_two_pairs_is_refused() {
    let precise = model(&[tensor(1, &[3], DType::F32), tensor(2, &[2], DType::F32)]);
    let (_, first) = twin_of(&precise, DType::BF16);
    let (_, second) = twin_of(&model_of(&precise, "1"), DType::F16);
    let gradients = [("0.0", tensor(3, &[3], DType::F32)), ("0.1", tensor(4, &[2], DType::F32))];
    let pairs = (first, second);
    let mut state = setup(Descent::new(0.1), &pairs).expect("a state");
    let before = snapshot(&precise, &state);
    let error = update(&mut state, &pairs, &gradients).expect_err("refused");
    is_kind(&error, ErrorKind::Model, &["it has twins in two pairs of this model"]);
    assert_eq!(error.path(), Some("0.1"), "{error}");
    assert_eq!(snapshot(&precise, &state), before);
    assert_eq!(update(&mut state, &pairs.0, &[("0.0", &gradients[0].1)]).expect("one pair alone").applied, 1);
}

/// One variable of a model.
fn model_of(vars: &Vars, path: &str) -> Vars {
    [(path.to_string(), vars[path].clone())].into()
}
