//! Entries of a state that are read and set in memory: what is refused, and that nothing is set then. That
//! every state is handed over bit for bit is in `files::checkpoints` and in the laws of plain numbers.

use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    AccumGrad, Adam, AdamW, CandleOptimizer, Ema, ErrorKind, Lend, MemoryMut, MixedPrecision, OptimiserChain,
    Q8, Result, Schedule, ScheduleFree, SplitMaster, StateTree, StateValue, StoreAs, TensorSlice,
    UniformAverage, View, setup, update,
};

use support::common::{
    Vars, bits, constant, grads, is_kind, model, number_bits, random, says, snapshot, tensor,
};
use support::tested::Tested;

const CPU: &Device = &Device::Cpu;

/// A state after two steps of one parameter, `0`, of 5000 elements.
fn stepped(optimiser: impl optimisers::IntoOptimiser, dtype: DType) -> (Vars, StateTree) {
    let model = model(&[random(1, &[5000], dtype, CPU)]);
    let mut state = setup(optimiser, &model).expect("a state");
    for seed in [2, 3] {
        update(
            &mut state,
            &model,
            &grads([Some(random(seed, &[5000], dtype, CPU))]),
        )
        .expect("an update");
    }
    (model, state)
}

/// A state with tensors in f32, f16, 8 bits and bytes, a counter, and a number.
fn mixed() -> (Vars, StateTree) {
    let formats = StoreAs::new([("m", DType::F16)], StoreAs::new([("v", Q8)], AdamW::new(0.1)));
    stepped(
        SplitMaster::new(OptimiserChain::new((formats, ScheduleFree::new(0.1)))),
        DType::BF16,
    )
}

fn numbers(value: &StateValue<'_>) -> Vec<f64> {
    let StateValue::Tensor(tensor) = value else {
        panic!("{value:?} is no tensor")
    };
    let mut numbers = Vec::new();
    let read = tensor.read(&mut |view| {
        numbers = view.numbers();
        Ok(())
    });
    read.map(|()| numbers).expect("numbers")
}

#[test]
fn entries_are_those_of_leaves() -> Tested {
    let (model, state) = mixed();
    let entries = state.entries()?;
    let leaf = state.leaf("0").expect("the leaf");
    let mut kinds = Vec::new();
    for (path, name, value) in &entries {
        kinds.push((*path, name.as_str(), format!("{value:?}")));
        match value {
            StateValue::Tensor(lent) => {
                let tensor = leaf.tensor(name)?;
                assert_eq!(bits(&lent.to_tensor()?), bits(&tensor), "{name}");
                let read: Vec<u64> = numbers(value).into_iter().map(number_bits).collect();
                assert_eq!(read, bits(&tensor), "{name}");
            }
            StateValue::Bytes(bytes) => assert!(bytes.iter().any(|byte| *byte != 0), "{name}"),
            StateValue::Counter(count) if path.is_empty() => {
                assert_eq!(*count, state.steps() * u64::from(name == "state.steps"))
            }
            StateValue::Counter(_) | StateValue::Number(_) => {}
        }
    }
    let blocks = 5000usize.div_ceil(128);
    let expected = [
        ("", "state.steps", "Counter(2)".to_string()),
        ("", "state.calls", "Counter(0)".to_string()),
        ("0", "rest", format!("Bytes({})", blocks * (256 + 16))),
        ("0", "0.m", "Tensor(F16 of [5000])".to_string()),
        ("0", "0.v", format!("Bytes({})", blocks * 132)),
    ];
    assert_eq!(kinds[..5], expected);
    let counters = ["0.t", "1.t", "leaf.steps", "leaf.waited", "leaf.received"];
    let is_counter = |name: &&str| counters.contains(name);
    assert_eq!(
        kinds
            .iter()
            .map(|(_, name, _)| *name)
            .filter(is_counter)
            .collect::<Vec<_>>(),
        counters
    );
    assert!(
        kinds
            .iter()
            .any(|(_, name, kind)| *name == "1.weights" && kind.starts_with("Number("))
    );
    assert_eq!(model.len(), 1);
    Ok(())
}

/// The refusal of a new value, which is all that is wrong among others that are right.
fn refused(
    model: &Vars,
    state: &mut StateTree,
    path: &str,
    name: &str,
    value: StateValue<'_>,
) -> optimisers::Error {
    let before = snapshot(model, state);
    let steps = || {
        (
            "0".to_string(),
            "leaf.waited".to_string(),
            StateValue::Counter(77),
        )
    };
    let entries = [steps(), (path.to_string(), name.to_string(), value)];
    let error = state.set_entries(entries).expect_err(name);
    assert!(snapshot(model, state) == before, "{error}");
    assert_eq!(
        state.leaf("0").map(|leaf| leaf.calls_without_gradient()),
        Some(0),
        "{error}"
    );
    error
}

#[test]
fn values_that_do_not_fit_are_refused_and_nothing_is_set() -> Tested {
    use StateValue::{Bytes, Counter, Number};
    let (model, mut state) = mixed();
    let of = |values: &[f32]| Tensor::new(values, CPU).expect("a tensor");
    let with = |element: usize, value: f32| {
        let mut values = vec![0.25f32; 5000];
        values[element] = value;
        of(&values)
    };
    let [nan, large, negative] = [with(4999, f32::NAN), with(7, 70000.0), with(140, -1.0)];
    let [short, integers] = [of(&[1.0]), Tensor::zeros(5000, DType::U32, CPU)?];
    let blocks = 5000usize.div_ceil(128);
    let record = |block: usize, bits: u32| {
        let mut records = vec![0u8; blocks * 132];
        records[block * 132..][..4].copy_from_slice(&bits.to_le_bytes());
        Bytes(records.into())
    };
    let tensor = |tensor| StateValue::Tensor(tensor);
    let cases = [
        (
            "1",
            "0.m",
            tensor(&short),
            ErrorKind::UnknownName,
            "parameter \"1\": there is no parameter of the state \"1\", expected one of: 0",
        ),
        (
            "",
            "0.m",
            tensor(&short),
            ErrorKind::UnknownName,
            "there is no parameter of the state",
        ),
        (
            "",
            "state.step",
            StateValue::Counter(1),
            ErrorKind::UnknownName,
            "no entry of the whole state \"state.step\" (did you mean state.steps?)",
        ),
        (
            "0",
            "m",
            tensor(&short),
            ErrorKind::UnknownName,
            "there is no entry \"m\", expected one of: rest, 0.m, 0.v",
        ),
        (
            "0",
            "leaf.waited",
            Counter(1),
            ErrorKind::Argument,
            "the value for \"leaf.waited\" is given twice",
        ),
        (
            "0",
            "0.m",
            Number(1.0),
            ErrorKind::Argument,
            "the value for \"0.m\" is a number, expected a tensor",
        ),
        (
            "0",
            "0.m",
            Bytes(vec![0; 10000].into()),
            ErrorKind::Argument,
            "is bytes, expected a tensor",
        ),
        (
            "0",
            "0.v",
            Counter(1),
            ErrorKind::Argument,
            "is a counter, expected a tensor or its bytes",
        ),
        (
            "0",
            "rest",
            tensor(&nan),
            ErrorKind::Argument,
            "is a tensor, expected bytes",
        ),
        (
            "0",
            "0.t",
            Number(1.0),
            ErrorKind::Argument,
            "is a number, expected a counter",
        ),
        (
            "0",
            "1.weights",
            Counter(1),
            ErrorKind::Argument,
            "is a counter, expected a number",
        ),
        (
            "",
            "state.steps",
            tensor(&short),
            ErrorKind::Argument,
            "is a tensor, expected a counter",
        ),
        (
            "0",
            "0.m",
            tensor(&short),
            ErrorKind::Tensor,
            "the value for \"0.m\" has shape [1], expected [5000]; pass",
        ),
        (
            "0",
            "0.m",
            tensor(&integers),
            ErrorKind::Tensor,
            "is U32, expected F16; pass values in F16, BF16, F32 or F64",
        ),
        (
            "0",
            "0.m",
            tensor(&nan),
            ErrorKind::NotFinite,
            "is NaN at element 4999",
        ),
        (
            "0",
            "0.m",
            tensor(&large),
            ErrorKind::Tensor,
            "is 70000 at element 7, expected a number that F16 can hold",
        ),
        (
            "0",
            "0.v",
            tensor(&nan),
            ErrorKind::NotFinite,
            "is NaN at element 4999, expected a finite number; to accept infinities and NaN, restore the state",
        ),
        (
            "0",
            "0.v",
            tensor(&negative),
            ErrorKind::Tensor,
            "is -1 at element 140, expected 0 or more",
        ),
        (
            "0",
            "0.v",
            Bytes(vec![0; 131].into()),
            ErrorKind::Argument,
            "the length of the value for \"0.v\" is 131, expected 5280",
        ),
        (
            "0",
            "0.v",
            record(1, 0xbf80_0000),
            ErrorKind::File,
            "the scale of block 1 is -1, expected 0 or more",
        ),
        (
            "0",
            "0.v",
            record(2, 0x7fc0_0000),
            ErrorKind::NotFinite,
            "is NaN at element 256",
        ),
        (
            "0",
            "1.weights",
            Number(f64::INFINITY),
            ErrorKind::NotFinite,
            "is inf, expected a finite number",
        ),
        (
            "0",
            "0.t",
            Counter(u64::MAX),
            ErrorKind::Argument,
            "expected a number of calls that can be made",
        ),
        (
            "",
            "state.norms",
            Bytes(b"{\"1\":[-1.0]}".to_vec().into()),
            ErrorKind::Argument,
            "the norms of earlier calls are damaged",
        ),
        (
            "",
            "state.norms",
            Counter(1),
            ErrorKind::Argument,
            "is a counter, expected bytes",
        ),
        (
            "",
            "state.calls",
            Counter(u64::MAX),
            ErrorKind::Argument,
            "expected a number of calls that can be made",
        ),
    ];
    for (path, name, value, kind, words) in cases {
        let error = refused(&model, &mut state, path, name, value);
        assert!(error.path().is_some(), "{error}");
        is_kind(&error, kind, &[words]);
    }
    Ok(())
}

/// Numbers of any float dtype are rounded once to what the state stores.
#[test]
fn tensors_are_rounded_to_the_state() -> Tested {
    let (_, mut state) = mixed();
    let values: Vec<f64> = (0..5000).map(|i| f64::from(i) / 4999.0 + 1e-9).collect();
    let wide = TensorSlice::new(5000, &values)?;
    let set = [
        ("0", "0.m", StateValue::Tensor(&wide)),
        ("0", "0.v", StateValue::Tensor(&wide)),
    ];
    state.set_entries(set)?;
    let leaf = state.leaf("0").expect("the leaf");
    let stored = |name: &str| leaf.tensor(name).expect("a tensor");
    let halves = Tensor::new(&values[..], CPU).and_then(|values| values.to_dtype(DType::F16))?;
    assert_eq!(bits(&stored("0.m")), bits(&halves));
    let coded = stored("0.v").to_vec1::<f32>()?;
    assert!(
        coded
            .iter()
            .zip(&values)
            .all(|(a, b)| (f64::from(*a) - b).abs() <= b / 8.0)
    );
    // Elements that do not lie in order, as a framework may lend them.
    let columns = random(5, &[5000, 2], DType::F32, CPU)
        .narrow(1, 1, 1)
        .and_then(|column| column.squeeze(1));
    let column = columns?;
    state.set_entries([("0", "0.m", StateValue::Tensor(&column))])?;
    let leaf = state.leaf("0").expect("the leaf");
    let stored = leaf.tensor("0.m")?;
    assert_eq!(bits(&stored), bits(&column.to_dtype(DType::F16)?));
    Ok(())
}

/// A column of a matrix of two columns, in memory of its owner.
struct Column(Vec<f32>);

impl Lend for Column {
    fn lent_shape(&self) -> &[usize] {
        &[5000]
    }

    fn lent_dtype(&self) -> optimisers::DType {
        optimisers::DType::F32
    }

    fn memory(&self) -> Option<usize> {
        None
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        run(View::strided(&self.0[1..], &[5000], &[2])?)
    }

    fn write(&self, _: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        Err(optimisers::Error::other("read-only"))
    }
}

/// Only the column is read: the NaN in the other column does not matter.
#[test]
fn lent_elements_that_do_not_lie_in_order() -> Tested {
    let (_, mut state) = stepped(Adam::new(0.1), DType::F32);
    let mut numbers: Vec<f32> = (0..10_000).map(|i| i as f32).collect();
    numbers[70] = f32::NAN;
    state.set_entries([("0", "m", StateValue::Tensor(&Column(numbers.clone())))])?;
    let expected: Vec<f32> = (0..5000).map(|i| (2 * i + 1) as f32).collect();
    assert_eq!(
        state.leaf("0").expect("the leaf").tensor("m")?.to_vec1::<f32>()?,
        expected
    );
    numbers[71] = f32::NAN;
    let refused = state.set_entries([("0", "m", StateValue::Tensor(&Column(numbers)))]);
    is_kind(
        &refused.expect_err("a refusal"),
        ErrorKind::NotFinite,
        &["is NaN at element 35"],
    );
    Ok(())
}

/// Memory that is lent this many times.
#[derive(Debug)]
struct Unreliable {
    left: AtomicUsize,
}

impl Lend for Unreliable {
    fn lent_shape(&self) -> &[usize] {
        &[2]
    }

    fn lent_dtype(&self) -> optimisers::DType {
        optimisers::DType::F32
    }

    fn memory(&self) -> Option<usize> {
        None
    }

    fn read(&self, run: &mut dyn FnMut(View<'_>) -> Result<()>) -> Result<()> {
        if self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .is_err()
        {
            return Err(optimisers::Error::other("gone"));
        }
        run(View::new(&[0.5f32, 0.25]))
    }

    fn write(&self, _: &mut dyn FnMut(MemoryMut<'_>) -> Result<()>) -> Result<()> {
        Err(optimisers::Error::other("read-only"))
    }
}

#[test]
fn memory_that_is_not_lent_again() -> Tested {
    let model = model(&[constant(1.0, 2, DType::F32)]);
    let mut state = setup(Adam::new(0.1), &model)?;
    let lent = |times| Unreliable {
        left: AtomicUsize::new(times),
    };
    let before = snapshot(&model, &state);
    let never = state
        .set_entries([("0", "m", StateValue::Tensor(&lent(0)))])
        .expect_err("not lent");
    is_kind(
        &never,
        ErrorKind::Memory,
        &["parameter \"0\": ", "does not lend the memory: gone"],
    );
    assert!(snapshot(&model, &state) == before);
    let once = state
        .set_entries([("0", "m", StateValue::Tensor(&lent(1)))])
        .expect_err("lent once");
    is_kind(
        &once,
        ErrorKind::Memory,
        &["parameter \"0\": ", "does not lend the memory: gone"],
    );
    assert!(
        !once.to_string().contains("after") && snapshot(&model, &state) == before,
        "{once}"
    );
    let values = || StateValue::Counter(3);
    let (unread, read) = (lent(1), lent(2));
    let entries = [
        ("0", "t", values()),
        ("0", "v", StateValue::Tensor(&read)),
        ("0", "m", StateValue::Tensor(&unread)),
    ];
    let after = state.set_entries(entries).expect_err("lent once");
    says(
        &after,
        &[
            "after it had begun to write 2 of 3 values",
            "set or restore all values again",
        ],
    );
    state.set_entries([("0", "m", StateValue::Tensor(&lent(2)))])?;
    Ok(())
}

/// A master that is not the one that the parameter is rounded from is found in the next step, wherever it
/// differs and whatever is set after it.
#[test]
fn a_master_goes_with_its_parameter() -> Tested {
    const LENGTH: usize = 100_000;
    let model = model(&[constant(1.0, LENGTH, DType::BF16)]);
    let mut state = setup(MixedPrecision::new(DType::F32, Adam::new(0.1)), &model)?;
    let grads = grads([Some(constant(0.5, LENGTH, DType::BF16))]);
    update(&mut state, &model, &grads)?;
    let mut values = model["0"].to_dtype(DType::F32).and_then(|x| x.to_vec1::<f32>())?;
    values[77_777] = 3.0;
    let master = TensorSlice::new(LENGTH, &values)?;
    let entries = [
        ("master", StateValue::Tensor(&master)),
        ("leaf.steps", StateValue::Counter(9)),
    ];
    state.set_entries(entries.map(|(name, value)| ("0", name, value)))?;
    let changed = update(&mut state, &model, &grads).expect_err("another master");
    assert_eq!(
        (changed.kind(), changed.element()),
        (ErrorKind::Changed, Some(77_777)),
        "{changed}"
    );
    let parameter = Tensor::new(&values[..], CPU).and_then(|x| x.to_dtype(DType::BF16))?;
    model["0"].set(&parameter)?;
    update(&mut state, &model, &grads)?;
    Ok(())
}

/// A schedule goes on at the steps that are set, and an open window with the calls.
#[test]
fn counters_of_the_whole_state() -> Tested {
    // Leaves that share a schedule.
    let model = model(&[constant(1.0, 2, DType::F32), constant(1.0, 2, DType::F32)]);
    let mut state = setup(OptimiserChain::new((AccumGrad::new(3), Adam::new(0.1))), &model)?;
    state.schedule(Schedule::linear(1.0, 0.25, 3))?;
    for (steps, rate) in [(2, 0.5), (5, 0.25)] {
        state.set_entries([("", "state.steps", StateValue::Counter(steps))])?;
        let rates: Vec<_> = state.leaves().map(|leaf| leaf.learning_rate()).collect();
        assert_eq!((state.steps(), &rates[..]), (steps, &[Some(rate); 2][..]));
    }
    let grads = grads([0.5, 0.5].map(|value| Some(constant(value, 2, DType::F32))));
    state.set_entries([("", "state.calls", StateValue::Counter(2))])?;
    update(&mut state, &model, &grads)?;
    assert_eq!(state.steps(), 6);
    Ok(())
}

/// torch's average, an exponential one or a mean, with the count of the models in it.
#[test]
fn an_average_is_handed_over() -> Tested {
    let model = model(&[constant(1.0, 2, DType::F32)]);
    let shadow = tensor(3, &[2], DType::F32);
    let grads = grads([Some(constant(0.0, 2, DType::F32))]);
    for (optimiser, new) in [
        (
            optimisers::Optimiser::new(OptimiserChain::new((
                Adam::new(0.1),
                Ema {
                    start: 1,
                    ..Ema::new(0.75)
                },
            ))),
            0.25,
        ),
        (
            optimisers::Optimiser::new(OptimiserChain::new((Adam::new(0.1), UniformAverage::default()))),
            0.1,
        ),
    ] {
        let mut state = setup(optimiser, &model)?;
        let entries = [
            ("1.average", StateValue::Tensor(&shadow)),
            ("1.t", StateValue::Counter(9)),
            ("leaf.steps", StateValue::Counter(9)),
        ];
        state.set_entries(entries.map(|(name, value)| ("0", name, value)))?;
        let read = |state: &StateTree| {
            state.averages(&model).expect("averages")["0"]
                .to_vec1::<f32>()
                .expect("numbers")
        };
        assert_eq!(read(&state), shadow.to_vec1::<f32>()?);
        update(&mut state, &model, &grads)?;
        for (average, before) in read(&state).into_iter().zip(shadow.to_vec1::<f32>()?) {
            let expected = f64::from(before) + (1.0 - f64::from(before)) * new;
            assert!(
                (f64::from(average) - expected).abs() < 1e-6,
                "{average} for {expected}"
            );
        }
    }
    Ok(())
}

/// A place in a list is no name: in another process it may be that of another parameter.
#[test]
fn states_that_are_not_handed_over() -> Tested {
    let x = Var::ones(2, DType::F32, CPU)?;
    let unnamed = <CandleOptimizer<Adam> as candle_nn::Optimizer>::new(vec![x], Adam::new(0.1));
    let unnamed = unnamed?;
    says(
        &unnamed.state().entries().expect_err("no names"),
        &["it has no name, only a place in the list"],
    );
    Ok(())
}
