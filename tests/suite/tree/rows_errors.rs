//! Other rows that are refused, and what they leave.

use candle_core::{DType, Var};
use optimisers::{
    Adam, Descent, Ema, Error, ErrorKind, MixedPrecision, OptimiserChain, Setup, StateChange, StateTree,
    setup, setup_with,
};

use crate::tree::rows::{step, with_rows};
use support::common::{Vars, assert_same, forget_ascent, grads, is_kind, model, says, snapshot, tensor, var};
use support::threads::on;

/// Refuses, and leaves everything as it was.
fn refused(
    state: &mut StateTree,
    old: &Vars,
    path: &str,
    new: &Vars,
    rows: &[Option<usize>],
    words: &[&str],
) -> Error {
    let before = snapshot(old, state);
    let error = state.resize_rows(path, new, rows).expect_err("an error");
    says(&error, words);
    assert_same(&[snapshot(old, state)], &[before], words);
    error
}

#[test]
fn what_does_not_fit_is_refused_before_anything_changes() {
    let old = model(&[tensor(1, &[2, 3], DType::BF16), tensor(2, &[2, 3], DType::BF16)]);
    let mut state = setup(MixedPrecision::new(DType::F32, Adam::new(0.1)), &old).expect("a state");
    step(&mut state, &old, 1);
    let rows = [Some(0), Some(1), None];
    let good = with_rows(&old, "1", &rows);
    let with = |path: &str, x: &Var| {
        let mut new = good.clone();
        new.insert(path.to_string(), x.clone());
        new
    };
    let of = |shape: &[usize], dtype| var(&tensor(1, shape, dtype));

    let unknown = refused(
        &mut state,
        &old,
        "1",
        &good,
        &[Some(0), Some(2), None],
        &["row 1", "old row 2", "there were 2"],
    );
    assert_eq!(
        (unknown.kind(), unknown.path(), unknown.got()),
        (ErrorKind::Argument, Some("1"), Some("2"))
    );
    assert_eq!(unknown.expected(), Some("one below 2, because there were 2 rows"));
    let count = refused(&mut state, &old, "1", &good, &rows[..2], &["[3, 3]", "2 entries"]);
    let shape = ErrorKind::Tensor;
    assert_eq!(
        (count.kind(), count.path(), count.got(), count.expected()),
        (shape, Some("1"), Some("[3, 3]"), Some("[2, 3]"))
    );
    for (got, dtype, kind, expected) in [
        (&[3, 4][..], DType::BF16, shape, ["[3, 4]", "[3, 3]"]),
        (&[3, 3, 1], DType::BF16, shape, ["[3, 3, 1]", "[3, 3]"]),
        (&[3, 3], DType::F32, ErrorKind::Tensor, ["F32", "BF16"]),
    ] {
        let error = refused(
            &mut state,
            &old,
            "1",
            &with("1", &of(got, dtype)),
            &rows,
            &["its variable in the model"],
        );
        assert_eq!(
            (error.kind(), error.path(), [error.got(), error.expected()]),
            (kind, Some("1"), expected.map(Some))
        );
    }
    refused(
        &mut state,
        &old,
        "1",
        &with("1", &of(&[], DType::BF16)),
        &rows,
        &["no rows"],
    );
    let changed = refused(
        &mut state,
        &old,
        "1",
        &with("1", &of(&[3, 3], DType::BF16)),
        &rows,
        &["row 0 is to be the old row 0", "None"],
    );
    assert_eq!((changed.kind(), changed.path()), (ErrorKind::Changed, Some("1")));
    let moved = with_rows(&old, "1", &[Some(1), Some(0), None]);
    refused(&mut state, &old, "1", &moved, &rows, &["old row 0"]);
    refused(&mut state, &old, "2", &good, &rows, &["\"2\"", "selects no leaf"]);
    refused(
        &mut state,
        &old,
        "1",
        &Vars::new(),
        &rows,
        &["but the model does not"],
    );
    refused(
        &mut state,
        &old,
        "1",
        &with("1", &old["0"]),
        &rows[..2],
        &["\"0\" and \"1\"", "one in the model"],
    );
    refused(
        &mut state,
        &old,
        "",
        &with("0", &good["1"]),
        &rows,
        &["\"0\" and \"1\"", "one in the model"],
    );
    // The first of both would do.
    let both = with("0", &with_rows(&old, "0", &rows)["0"]);
    refused(
        &mut state,
        &old,
        "",
        &{
            let mut both = both.clone();
            both.insert("1".into(), of(&[3, 4], DType::BF16));
            both
        },
        &rows,
        &["\"1\""],
    );
    assert_eq!(state.resize_rows("", &both, &rows).expect("other rows").len(), 2);
}

#[test]
fn left_out_variables_other_weights_and_ranks_are_refused() {
    let old = model(&[tensor(1, &[2], DType::F32), tensor(2, &[2], DType::F32)]);
    let chain = || OptimiserChain::new((Descent::new(0.1), Ema::new(0.5)));
    let mut state = setup_with(&old, |path, _| (path == "0").then(chain)).expect("a state");
    step(&mut state, &old, 1);
    let rows = [Some(1), Some(0)];
    let mut tied = old.clone();
    tied.insert("0".to_string(), old["1"].clone());
    is_kind(
        &state.resize_rows("0", &tied, &rows).expect_err("joined"),
        ErrorKind::Model,
        &["in this state and one in the model"],
    );
    is_kind(
        &state.resize_rows("1", &old, &rows).expect_err("left out"),
        ErrorKind::UnknownName,
        &["\"1\" selects no leaf"],
    );
    let new = with_rows(&old, "0", &rows);
    forget_ascent(
        &mut state,
        &old,
        &grads([Some(tensor(5, &[2], DType::F32)), None]),
    );
    let other = state
        .resize_rows("0", &new, &rows)
        .expect_err("other weights in the model");
    is_kind(
        &other,
        ErrorKind::Changed,
        &["the model has other weights instead of this parameter"],
    );
    assert_eq!(other.path(), Some("0"));
    state
        .with_averages(&old, || Ok::<_, optimisers::Error>(()))
        .expect("parameters");
    state.resize_rows("0", &new, &rows).expect("other rows");

    let of_ranks = on(2, move |world| {
        let old = model(&[tensor(1, &[2], DType::F32)]);
        let mut state = Setup::over(&world).build(Adam::new(0.1), &old).expect("a state");
        state
            .resize_rows("0", &with_rows(&old, "0", &rows), &rows)
            .expect_err("a divided state")
    });
    of_ranks.iter().for_each(|error| {
        is_kind(
            error,
            ErrorKind::Unsupported,
            &["`resize_rows`", "divided among 2 ranks"],
        )
    });
    let alone: Vec<Vec<StateChange>> = on(1, move |world| {
        let old = model(&[tensor(1, &[2], DType::F32)]);
        let mut state = Setup::over(&world).build(Adam::new(0.1), &old).expect("a state");
        let new = with_rows(&old, "0", &rows);
        let answer = state.resize_rows("0", &new, &rows).expect("other rows");
        step(&mut state, &new, 1);
        answer
    });
    assert_eq!(alone[0][0].kept, ["m", "v", "t"]);
}
