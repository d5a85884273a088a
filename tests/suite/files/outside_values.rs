//! Values from outside: files of weights, checkpoints, and values that a program sets are refused for the same
//! reasons, in the same words, and then nothing has changed.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Tensor, Var};
use optimisers::{
    Checkpoint, CheckpointFile, Descent, Error, ErrorKind, MixedPrecision, Momentum, StateTree, StateValue,
    StoreAs, Weights, setup,
};

use crate::model::models::CPU;
use support::common::{Vars, assert_same, is_kind, model, snapshot};
use support::tested::Tested;

/// An attempt to write values of the parameter `0`, which has three elements of F16.
type WayIn = fn(&Vars, &mut StateTree, &Tensor) -> Result<(), Error>;

/// The rule of all states.
fn rule() -> StoreAs<Momentum> {
    StoreAs::all(DType::F16, Momentum::new(0.1))
}

/// The values in a file, with a name that is the parameter's path.
fn weights(values: &Tensor) -> Weights {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("weights");
    let tensors = HashMap::from([("0", values.clone())]);
    candle_core::safetensors::save(&tensors, &path).expect("a file");
    // The open file outlives its folder.
    Weights::open([path]).expect("weights")
}

/// A checkpoint of a model whose parameter `0` has these values.
fn checkpoint(values: &Tensor) -> CheckpointFile {
    let model = model(std::slice::from_ref(values));
    let state = setup(rule(), &model).expect("a state");
    let bytes = Checkpoint::new(&state).model(&model).to_bytes().expect("bytes").0;
    CheckpointFile::from_bytes("run", bytes)
        .expect("a checkpoint")
        .converting()
}

const LOAD: WayIn = |model, _, values| weights(values).load_into(model).map(drop);
const SET_FROM_FILES: WayIn = |model, state, values| state.set_masters(model, &weights(values)).map(drop);
const SET: WayIn = |model, state, values| {
    let values = BTreeMap::from([("0".to_string(), values.clone())]);
    state.set_masters(model, &values).map(drop)
};
const SET_ENTRY: WayIn =
    |_, state, values| state.set_entries([("0", "velocity", StateValue::Tensor(values))]);
const RESTORE: WayIn = |model, state, values| checkpoint(values).restore_with_model(state, model).map(drop);

#[test]
fn every_way_in_refuses_the_same() -> Tested {
    let numbers = |numbers: &[f32]| Tensor::new(numbers, CPU);
    let ways = [
        ("load_into", LOAD),
        ("set_masters, files", SET_FROM_FILES),
        ("set_masters", SET),
        ("set_entries", SET_ENTRY),
        ("restore_with_model", RESTORE),
    ];
    let faults = [
        (
            numbers(&[1.0, 2.0])?,
            ErrorKind::Tensor,
            "has shape [2], expected [3]; pass ",
        ),
        (
            numbers(&[1.0, f32::NAN, 3.0])?,
            ErrorKind::NotFinite,
            "is NaN at element 1, expected a finite number; to accept infinities and NaN, ",
        ),
        (
            numbers(&[1.0, -7e4, f32::INFINITY])?,
            ErrorKind::Tensor,
            "is -70000 at element 1, expected a number that F16 can hold; give the parameter or state a \
             wider dtype; to round the number to infinity, ",
        ),
        (
            Tensor::new(&[1u32, 2, 3], CPU)?,
            ErrorKind::Tensor,
            "is U32, expected F16; pass values in F16, BF16, F32 or F64",
        ),
    ];
    for (name, way_in) in ways {
        let model = model(&[Tensor::new(&[0.5f32, 1.0, 1.5], CPU)?.to_dtype(DType::F16)?]);
        let mut state = setup(rule(), &model)?;
        let before = snapshot(&model, &state);
        for (values, kind, words) in &faults {
            // Integers are not trained, so that no checkpoint has them as a parameter.
            if (name, values.dtype()) == ("restore_with_model", DType::U32) {
                continue;
            }
            let error = way_in(&model, &mut state, values).expect_err(words);
            is_kind(&error, *kind, &[words]);
            assert_eq!(error.path(), Some("0"), "{name}: {error}");
            assert_same(&[snapshot(&model, &state)], std::slice::from_ref(&before), name);
        }
    }
    Ok(())
}

/// Integers are written as they are. One dtype of integers is not converted into another, where a number could
/// become another one.
#[test]
fn t58_integers_have_to_have_the_dtype_of_their_variable() -> Tested {
    let model = BTreeMap::from([
        ("steps".to_string(), Var::new(&[1u8, 2], CPU)?),
        ("x".to_string(), Var::new(&[1f32], CPU)?),
    ]);
    let mut state = setup(
        MixedPrecision::new(optimisers::DType::F64, Descent::new(0.1)),
        &model,
    )?;
    let mut values = BTreeMap::from([("x".to_string(), Tensor::new(&[2f32], CPU)?)]);
    values.insert("steps".to_string(), Tensor::new(&[300i64, 4], CPU)?);
    let error = state.set_masters(&model, &values).expect_err("another dtype");
    is_kind(
        &error,
        ErrorKind::Tensor,
        &["is I64, expected U8; pass values in U8"],
    );
    assert_eq!(model["x"].to_vec1::<f32>()?, [1.0]);
    values.insert("steps".to_string(), Tensor::new(&[30u8, 4], CPU)?);
    state.set_masters(&model, &values)?;
    assert_eq!(model["steps"].to_vec1::<u8>()?, [30, 4]);
    Ok(())
}

/// An empty view may begin after the end of its storage.
#[test]
fn empty_views_are_values() -> Tested {
    let model = model(&[Tensor::zeros((0, 2), DType::F32, CPU)?]);
    let mut state = setup(Momentum::new(0.1), &model)?;
    let view = Tensor::zeros((0, 3), DType::F32, CPU)?.narrow(1, 1, 2)?;
    state.set_entries([("0", "velocity", StateValue::Tensor(&view))])?;
    state.set_masters(&model, &BTreeMap::from([("0".to_string(), view)]))?;
    Ok(())
}

/// A state with exchanged names still gets the values of its own parameters from files, which have the names of
/// the model.
#[test]
fn files_have_the_names_of_the_model() -> Tested {
    let named = |values: [f32; 2]| -> Result<BTreeMap<String, Var>, candle_core::Error> {
        let variable = |(name, value)| Ok((String::from(name), Var::new(&[value], CPU)?));
        ["a", "b"].into_iter().zip(values).map(variable).collect()
    };
    let model = named([0.0, 0.0])?;
    let mut state = setup(
        MixedPrecision::new(optimisers::DType::F64, Descent::new(0.1)),
        &model,
    )?;
    for (from, to) in [("a", "c"), ("b", "a"), ("c", "b")] {
        state.rename(from, to)?;
    }
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("weights");
    candle_core::safetensors::save(
        &HashMap::from([
            ("a", Tensor::new(&[1f32], CPU)?),
            ("b", Tensor::new(&[2f32], CPU)?),
        ]),
        &path,
    )?;
    state.set_masters(&model, &Weights::open([path])?)?;
    for (name, expected) in [("a", 1.0), ("b", 2.0)] {
        assert_eq!(model[name].to_vec1::<f32>()?, [expected], "{name}");
    }
    Ok(())
}
