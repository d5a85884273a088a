//! What happens if there is no memory left: an error with path, bytes and remedy, and nothing has changed.

use candle_core::{DType, Device, Tensor};
use optimisers::__private::emulation::with_little_memory;
use optimisers::{
    Adam, AdamW, ClipGlobalNorm, Descent, Describe, Describer, Engine, Error, ErrorKind, Flow, Gradient,
    MixedPrecision, OptimiserChain, Parameter, Rule, Slot, State, Update, setup, update,
};

use crate::engine::emulated::can_run;
use support::common::{Vars, grads, model, muon, optimisers_for, random, snapshot};

/// The bytes that a call may ask for at once.
const LITTLE: usize = 100;

fn is_out_of_memory(error: &Error) -> bool {
    let bytes = error
        .got()
        .and_then(|got| got.strip_suffix(" bytes")?.parse::<usize>().ok());
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    assert!(error.path().is_some() && error.remedy().is_some(), "{error:#?}");
    assert!(bytes.is_some_and(|bytes| bytes > LITTLE), "{error:#?}");
    true
}

#[test]
fn setup_is_refused() {
    for dtype in [DType::F32, DType::BF16] {
        let model = model(&[random(1, &[20, 30], dtype, &Device::Cpu)]);
        let mut refused = 0;
        for optimiser in optimisers_for(dtype) {
            match with_little_memory(LITTLE, || setup(optimiser.clone(), &model)) {
                Ok(state) => assert!(state.bytes() <= LITTLE, "{}", optimiser.name()),
                Err(error) => refused += usize::from(is_out_of_memory(&error)),
            }
            let _state = setup(optimiser, &model).expect("a state");
        }
        assert!(refused > 10, "{refused}");
    }
}

/// Replacing a rule and copying a state need memory, too.
#[test]
fn an_edit_is_refused() {
    let model = model(&[random(1, &[20, 30], DType::F32, &Device::Cpu)]);
    let mut state = setup(Descent::new(0.1), &model).expect("a state");
    let replaced = with_little_memory(LITTLE, || state.all().replace(Adam::new(0.1), &model).map(drop));
    is_out_of_memory(&replaced.expect_err("no memory"));
    state.all().replace(Adam::new(0.1), &model).expect("memory");
    is_out_of_memory(&with_little_memory(LITTLE, || state.try_clone().map(drop)).expect_err("no memory"));
}

/// An update copies a gradient that lies by columns, one that lies in a variable, and the inputs of functions.
#[test]
fn an_update_is_refused_and_changes_nothing() {
    if !can_run() {
        return;
    }
    let clipped = || OptimiserChain::new((ClipGlobalNorm::new(0.3), AdamW::new(0.1)));
    let transposed = || {
        random(2, &[30, 20], DType::F32, &Device::Cpu)
            .t()
            .expect("a transposed tensor")
    };
    let in_order = || random(2, &[20, 30], DType::F32, &Device::Cpu);
    let run = |model: &Vars, engine: Engine, rule: Box<dyn Rule>, gradient: Tensor| {
        let mut state = setup(rule.clone(), model).expect("a state");
        let before = snapshot(model, &state);
        let gradients = grads([Some(gradient)]);
        let mut step = |bytes| {
            with_little_memory(bytes, || {
                Update::new(&mut state).engine(engine).apply(model, &gradients)
            })
        };
        let error = step(LITTLE).expect_err("no memory");
        is_out_of_memory(&error);
        assert_eq!(error.path(), Some("0"));
        step(usize::MAX).expect("memory");
        let after = snapshot(model, &state);
        assert!(before != after);
        (before, after)
    };
    let rows: [(Engine, Box<dyn Rule>, Tensor); 5] = [
        (Engine::Emulated, Box::new(AdamW::new(0.1)), transposed()),
        (Engine::Emulated, Box::new(clipped()), transposed()),
        (Engine::Emulated, Box::new(muon()), in_order()),
        (Engine::Fused, Box::new(muon()), in_order()),
        (
            Engine::Fused,
            Box::new(clipped()),
            support::common::var(&in_order()).as_tensor().clone(),
        ),
    ];
    for (engine, rule, gradient) in rows {
        let fresh = || model(&[random(1, &[20, 30], DType::F32, &Device::Cpu)]);
        let (_, after) = run(&fresh(), engine, rule.clone(), gradient.clone());
        let model = fresh();
        let mut state = setup(rule, &model).expect("a state");
        Update::new(&mut state)
            .engine(engine)
            .apply(&model, &grads([Some(gradient)]))
            .expect("a step");
        assert!(snapshot(&model, &state) == after, "{engine:?}");
    }
}

/// A rule whose state no machine has room for.
#[derive(Clone, Debug)]
struct Enormous;

impl Describe for Enormous {
    fn describe(&mut self, rule: &mut Describer<'_>) {
        rule.kind("Enormous");
    }
}

impl Rule for Enormous {
    fn init(&self, x: Parameter<'_>) -> Result<State, Error> {
        State::empty().with_slot(Slot::zeros("history"), x, [1 << 23, 1 << 23])
    }

    fn apply<'a>(&'a self, _: &'a mut State, _: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>, Error> {
        Ok(Flow::Step(dx))
    }
}

/// The CPU refuses by itself; candle would end the process.
#[test]
fn the_cpu_refuses_what_it_can_never_have() {
    let mut model = model(&[random(1, &[4], DType::BF16, &Device::Cpu)]);
    let mut state = setup(Descent::new(0.1), &model).expect("a state");
    let error = setup(MixedPrecision::new(DType::F32, Enormous), &model).expect_err("no memory");
    is_out_of_memory(&error);
    assert_eq!(
        (error.path(), error.got()),
        (Some("0"), Some("281474976710656 bytes"))
    );
    model.insert(
        "1".to_string(),
        support::common::var(&random(1, &[4], DType::F32, &Device::Cpu)),
    );
    is_out_of_memory(&state.add(Enormous, &model).expect_err("no memory"));
    model.remove("1");
    update(
        &mut state,
        &model,
        &grads([Some(random(2, &[4], DType::BF16, &Device::Cpu))]),
    )
    .expect("a step");
}
