//! Rules from outside the crate: an elementwise one that fuses, one of tensor operations, and one that
//! returns what it was lent.

use std::sync::mpsc::channel;
use std::time::Duration;

use candle_core::{DType, Device, Result as Candle, Tensor, Var};
use optimisers::__private::emulation;
use optimisers::value::Value;
use optimisers::{
    AccumGrad, Adam, ClipGrad, Descent, Elementwise, Engine, Flow, Gradient, MixedPrecision, Momentum,
    OptimiserChain, Parameter, Result, Rule, Slot, State, Update, WeightDecay, hyper_parameters, range,
    setup, update,
};

hyper_parameters! {
    /// RMSProp: v = ρ·v + (1 - ρ)·dx², dx' = η·dx / √(v + ε); v starts at 1.
    struct RmsProp {
        /// The learning rate.
        eta: f64 = 0.01 => range::non_negative,
        /// The decay.
        rho: f64 = 0.9 => range::decay,
    }
}

impl Elementwise for RmsProp {
    type Scalars = (f64, f64);
    type Slots<T> = [T; 1];

    fn slots(&self) -> [Slot; 1] {
        [Slot::full("v", 1.0)]
    }

    fn scalars(&self, _t: u64) -> (f64, f64) {
        (self.eta, self.rho)
    }

    fn step<V: Value>((eta, rho): (f64, f64), _x: V, dx: V, [v]: &mut [V; 1]) -> V {
        *v = *v * rho + dx * dx * (1.0 - rho);
        dx * eta / (*v + 1e-8).sqrt()
    }
}

hyper_parameters! {
    /// a = a + mean(|dx|), dx' = strength·dx / (a / t): divides by the mean of all gradients so far.
    struct ByMean {
        /// A factor.
        strength: f64 = 1.0 => range::positive,
    }
}

impl Rule for ByMean {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        State::empty()
            .with_counter("t")
            .with_tensor("a", &Tensor::zeros((), x.dtype().into(), x.device())?)
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(dx.with_tensors(state, |t, _x, dx, slots| {
            slots[0] = (&slots[0] + dx.abs()?.mean_all()?)?;
            let mean = (&slots[0] / t as f64)?;
            Ok((dx * self.strength)?.broadcast_div(&mean)?)
        })))
    }
}

fn start(dtype: DType) -> Candle<Tensor> {
    Tensor::arange(-300f64, 300.0, &Device::Cpu)?
        .affine(0.013, 0.1)?
        .reshape((20, 30))?
        .to_dtype(dtype)
}

fn gradient(step: usize, dtype: DType) -> Candle<Tensor> {
    Tensor::arange(0f64, 600.0, &Device::Cpu)?
        .affine(0.37, step as f64)?
        .sin()?
        .reshape((20, 30))?
        .to_dtype(dtype)
}

fn values(x: &Tensor) -> Vec<f64> {
    x.flatten_all()
        .and_then(|x| x.to_dtype(DType::F64)?.to_vec1())
        .expect("values")
}

/// The largest difference.
fn apart(a: &Tensor, b: &Tensor) -> f64 {
    values(a)
        .iter()
        .zip(values(b))
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f64::max)
}

fn by_path(gradient: Tensor) -> std::collections::HashMap<&'static str, Tensor> {
    [("", gradient)].into()
}

#[test]
fn an_elementwise_rule_fuses() -> Result<()> {
    for dtype in [DType::F32, DType::F64] {
        let [fused, tensors] = [Engine::Fused, Engine::Tensors].map(|engine| -> Result<Vec<Tensor>> {
            let x = Var::from_tensor(&start(dtype)?)?;
            let chain = OptimiserChain::new((
                ClipGrad::new(0.8),
                RmsProp::new(0.05),
                WeightDecay::new(0.01),
                Momentum::new(0.5),
            ));
            let mut state = setup(chain, &x)?;
            for step in 0..5 {
                Update::new(&mut state)
                    .engine(engine)
                    .apply(&x, &by_path(gradient(step, dtype)?))?;
            }
            let leaf = state.leaf("").expect("the leaf");
            assert_eq!(leaf.tensor_names(), ["1.v", "3.velocity"]);
            Ok(vec![x.copy()?, leaf.tensor("1.v")?, leaf.tensor("3.velocity")?])
        });

        let mut x = start(DType::F64)?;
        let (mut v, mut velocity) = (x.ones_like()?, x.zeros_like()?);
        for step in 0..5 {
            let dx = gradient(step, DType::F64)?.clamp(-0.8, 0.8)?;
            v = ((v * 0.9)? + (dx.sqr()? * 0.1)?)?;
            let dx = ((dx * 0.05)? / (&v + 1e-8)?.sqrt()?)?;
            let dx = (dx + (&x * 0.01)?)?;
            velocity = ((velocity * 0.9)? + (dx * 0.5)?)?;
            x = (x - &velocity)?;
        }
        let tolerance = if dtype == DType::F32 { 2e-6 } else { 1e-13 };
        for ((fused, tensors), by_hand) in fused?.iter().zip(&tensors?).zip([x, v, velocity]) {
            assert_eq!(values(fused), values(tensors), "the engines agree bit for bit");
            assert!(
                apart(fused, &by_hand) < tolerance,
                "{dtype:?}: {}",
                apart(fused, &by_hand)
            );
        }
    }
    Ok(())
}

#[test]
fn a_rule_of_tensor_operations_in_the_middle_of_a_chain() -> Result<()> {
    for engine in [Engine::Fused, Engine::Tensors] {
        let parameter = Var::from_tensor(&start(DType::BF16)?)?;
        let chain = (
            Momentum::new(0.5),
            ByMean::new(2.0),
            WeightDecay::new(0.1),
            ByMean::new(0.5),
            Adam::new(0.01),
        );
        let mut state = setup(
            MixedPrecision::new(DType::F64, OptimiserChain::new(chain)),
            &parameter,
        )?;

        let mut x = start(DType::BF16)?.to_dtype(DType::F64)?;
        let [mut velocity, mut m, mut v] = [x.zeros_like()?, x.zeros_like()?, x.zeros_like()?];
        let mut a = [0.0; 2];
        for t in 1..=4 {
            let gradient = gradient(t, DType::F16)?;
            let outcome = Update::new(&mut state)
                .engine(engine)
                .apply(&parameter, &by_path(gradient.clone()))?;
            assert_eq!(outcome.applied, 1);

            velocity = ((velocity * 0.9)? + (gradient.to_dtype(DType::F64)? * 0.5)?)?;
            a[0] += velocity.abs()?.mean_all()?.to_scalar::<f64>()?;
            let dx = (&velocity * (2.0 * t as f64 / a[0]))?;
            let dx = (dx + (&x * 0.1)?)?;
            a[1] += dx.abs()?.mean_all()?.to_scalar::<f64>()?;
            let dx = (dx * (0.5 * t as f64 / a[1]))?;
            m = ((m * 0.9)? + (&dx * 0.1)?)?;
            v = ((v * 0.999)? + (dx.sqr()? * 0.001)?)?;
            let corrected = (&v / (1.0 - 0.999f64.powi(t as i32)))?;
            x = (x - ((&m * (0.01 / (1.0 - 0.9f64.powi(t as i32))))? / (corrected.sqrt()? + 1e-8)?)?)?;

            let leaf = state.leaf("").expect("the leaf");
            assert_eq!(
                leaf.tensor_names(),
                ["master", "0.velocity", "1.a", "3.a", "4.m", "4.v"]
            );
            assert!(
                leaf.counters().iter().all(|(_, count)| *count == t as u64),
                "{:?}",
                leaf.counters()
            );
            let by_hand = [
                x.clone(),
                velocity.clone(),
                Tensor::new(a[0], &Device::Cpu)?,
                Tensor::new(a[1], &Device::Cpu)?,
                m.clone(),
                v.clone(),
            ];
            for (name, by_hand) in leaf.tensor_names().into_iter().zip(by_hand) {
                let tensor = leaf.tensor(&name)?;
                assert!(
                    apart(&tensor, &by_hand) < 1e-12,
                    "{name} in step {t}: {}",
                    apart(&tensor, &by_hand)
                );
            }
            let master = leaf.tensor("master")?;
            // candle rounds f64 to bf16 by way of f32, as the engine may not: half a unit in the last place
            // is what counts.
            let half_unit = values(&master).iter().map(|x| x.abs()).fold(0.0, f64::max) / 256.0;
            assert!(apart(&parameter, &master) <= half_unit);
        }
    }
    Ok(())
}

#[test]
fn a_missing_gradient_runs_no_function() -> Result<()> {
    let model = [
        Var::from_tensor(&start(DType::F32)?)?,
        Var::from_tensor(&start(DType::F32)?)?,
    ];
    let mut state = setup(
        OptimiserChain::new((AccumGrad::new(2), ByMean::default(), Descent::new(1.0))),
        &model,
    )?;
    let grads: std::collections::HashMap<&str, Tensor> = [("0", gradient(1, DType::F32)?)].into();
    for (applied, waiting) in [(0, 1), (1, 1)] {
        let outcome = update(&mut state, &model, &grads)?;
        assert_eq!(
            (outcome.applied, outcome.without_gradient.len()),
            (applied, waiting)
        );
    }
    let counters: Vec<_> = state
        .leaves()
        .map(|leaf| leaf.counters().into_iter().find(|(name, _)| name == "1.t"))
        .collect();
    assert_eq!(
        counters,
        [Some(("1.t".to_string(), 1)), Some(("1.t".to_string(), 0))]
    );
    assert_eq!(values(&model[1]), values(&start(DType::F32)?));
    assert!(values(&model[0]) != values(&start(DType::F32)?));
    Ok(())
}

hyper_parameters! {
    /// last = x, dx' = x: keeps and returns the parameter it was lent, storage and all.
    struct Pull {
        /// Not used.
        unused: f64 = 1.0 => range::any,
    }
}

impl Rule for Pull {
    fn init(&self, x: Parameter<'_>) -> Result<State> {
        State::empty().with_slot(Slot::zeros("last"), x, x.shape())
    }

    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(dx.with_tensors(state, |_, x, _, slots| {
            slots[0] = x.clone();
            Ok(x.clone())
        })))
    }
}

#[test]
fn a_rule_may_keep_and_return_the_parameter() {
    let mut engines = vec![Engine::Fused, Engine::Tensors];
    engines.extend(emulation::is_available().then_some(Engine::Emulated));
    for (large, engine) in [false, true]
        .into_iter()
        .flat_map(|large| engines.iter().map(move |&engine| (large, engine)))
    {
        let (done, finished) = channel();
        std::thread::spawn(move || {
            let halve = || -> Result<bool> {
                let ones = Tensor::ones(if large { 100_000 } else { 3 }, DType::F32, &Device::Cpu)?;
                let x = Var::from_tensor(&ones)?;
                let mut state = setup(OptimiserChain::new((Pull::default(), Descent::new(0.5))), &x)?;
                Update::new(&mut state).engine(engine).apply(&x, &by_path(ones))?;
                let last = state.leaf("").expect("a leaf").tensor("0.last")?;
                Ok(values(&x).iter().all(|&x| x == 0.5)
                    && last.to_vec1::<f32>()?.iter().all(|&last| last == 1.0))
            };
            done.send(halve()).expect("someone listens");
        });
        let halved = finished
            .recv_timeout(Duration::from_secs(60))
            .expect("no deadlock");
        assert!(halved.expect("no error"), "large: {large}, {engine:?}");
    }
}
