//! Random models, optimisers and gradients: every engine gives the same bits, and an error changes nothing.
//!
//! `RANDOM_MODELS` says how many models there are (300 if not said), `RANDOM_SEED` which is the first. A
//! failure names its seed.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::DType::{self, BF16, F16, F32, F64};
use candle_core::{Device, Tensor};
use optimisers::{
    AccumGrad, Average, ClipGlobalNorm, ClipNorm, Descent, Engine, Kahan, LossScaler, MixedPrecision,
    NonFinite, Offload, Optimiser, OptimiserChain, Parameter, Rule, Setup, SplitMaster, StateTree,
    StochasticRounding, Update, rules,
};

use crate::model::slices::{apply_in_slices, in_slices};
use support::common::{
    Grads, Snapshot, Vars, assert_close, for_any_shape, instruction_sets, random, snapshot, var,
};
use support::threads::on;

/// Random choices that a seed decides.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 17
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.number() % end as u64) as usize
    }

    pub(crate) fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub(crate) fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }
}

const DTYPES: [DType; 4] = [F16, BF16, F32, F64];

fn shape(dice: &mut Dice) -> Vec<usize> {
    match dice.below(12) {
        0 => vec![],
        1 => vec![0],
        2 => vec![3, 0],
        3 => vec![1],
        4 if dice.one_in(4) => vec![70_001],
        4 | 5 => vec![1 + dice.below(3000)],
        6 => vec![1 + dice.below(4), 1 + dice.below(5), 1 + dice.below(6)],
        7 | 8 => vec![1 + dice.below(30)],
        _ => vec![1 + dice.below(12), 1 + dice.below(40)],
    }
}

/// The rules of the catalogue.
fn listed() -> Vec<Box<dyn Rule>> {
    rules::catalogue()
        .into_iter()
        .map(|listing| listing.rule)
        .collect()
}

/// A chain of up to four of these rules, with what stands around rules.
fn chain(dice: &mut Dice, rules: &[Box<dyn Rule>]) -> Box<dyn Rule> {
    let mut members: Vec<Box<dyn Rule>> = Vec::new();
    if dice.one_in(3) {
        let average = dice.of(&[Average::Mean, Average::Sum, Average::Weighted]);
        members.push(Box::new(AccumGrad {
            average,
            ..AccumGrad::new(1 + dice.below(4) as u64)
        }));
    }
    if dice.one_in(3) {
        let non_finite = dice.of(&[NonFinite::Error, NonFinite::Pass, NonFinite::Skip]);
        let p = dice.of(&[1.0, 2.0, 3.0, 0.5, 40.0, f64::INFINITY]);
        members.push(match dice.below(2) {
            0 => Box::new(ClipGlobalNorm {
                non_finite,
                group: dice.below(2) as u64,
                ..ClipGlobalNorm::new(0.1)
            }),
            _ => Box::new(ClipNorm {
                non_finite,
                p,
                ..ClipNorm::new(0.05)
            }),
        });
    }
    for _ in 0..1 + dice.below(3) {
        let listed = for_any_shape(rules[dice.below(rules.len())].clone());
        members.push(match dice.below(6) {
            0 => Box::new(Some(listed)),
            1 => Box::new(OptimiserChain::new((Some(listed), None::<Descent>))),
            _ => listed,
        });
    }
    Box::new(OptimiserChain::new(members))
}

fn optimiser(dice: &mut Dice, rules: &[Box<dyn Rule>], dtype: DType) -> Optimiser {
    let rule = chain(dice, rules);
    let wrapped: Optimiser = match dice.below(8) {
        0 | 1 => Optimiser::new(rule),
        2 | 3 => Optimiser::new(MixedPrecision::new(F32, rule)),
        4 => Optimiser::new(MixedPrecision::new(F64, rule)),
        5 => Optimiser::new(Kahan::new(rule)),
        6 => Optimiser::new(StochasticRounding::new(dice.number(), rule)),
        _ if dtype == F16 => Optimiser::new(rule),
        _ => Optimiser::new(SplitMaster::new(rule)),
    };
    if dice.one_in(6) {
        Optimiser::new(Offload::new(wrapped).everywhere())
    } else {
        wrapped
    }
}

/// How a gradient is made, for the same bits in each run.
#[derive(Clone, Debug)]
enum GradientOf {
    Missing,
    Numbers {
        seed: u64,
        dtype: DType,
        layout: usize,
    },
    One(f64, DType),
    Spoilt {
        seed: u64,
        dtype: DType,
        value: f64,
    },
    /// The parameter itself, or a view of it.
    Parameter(usize),
    /// Of another shape.
    Misfit,
}

fn gradient_of(dice: &mut Dice, length: usize, spoilt: bool) -> GradientOf {
    let (seed, dtype) = (dice.number(), dice.of(&DTYPES));
    match dice.below(20) {
        0 | 1 => GradientOf::Missing,
        2 => GradientOf::One(dice.of(&[0.0, 1e-3, 2.0]), dtype),
        3 => GradientOf::Parameter(dice.below(3)),
        4 | 5 if spoilt && length > 0 => GradientOf::Spoilt {
            seed,
            dtype,
            value: dice.of(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]),
        },
        6 if spoilt && dice.one_in(4) => GradientOf::Misfit,
        _ => GradientOf::Numbers {
            seed,
            dtype,
            layout: dice.below(3),
        },
    }
}

impl GradientOf {
    fn tensor(&self, x: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let cpu = &Device::Cpu;
        Ok(Some(match *self {
            GradientOf::Missing => return Ok(None),
            GradientOf::One(value, dtype) => Tensor::new(value, cpu)?
                .to_dtype(dtype)?
                .broadcast_as(x.shape())?,
            GradientOf::Parameter(0) => x.clone(),
            GradientOf::Parameter(1) => x.detach(),
            GradientOf::Parameter(_) => x.reshape(x.shape())?,
            GradientOf::Misfit => Tensor::zeros(x.elem_count() + 1, F32, cpu)?,
            GradientOf::Numbers { seed, dtype, layout } => match (layout, x.dims()) {
                (1, [rows, columns]) => random(seed, &[*columns, *rows], dtype, cpu).t()?,
                (2, [rows, columns]) => {
                    random(seed, &[*rows + 2, *columns], dtype, cpu).narrow(0, 1, *rows)?
                }
                _ => random(seed, x.dims(), dtype, cpu),
            },
            GradientOf::Spoilt { seed, dtype, value } => {
                let mut values: Vec<f64> = random(seed, &[x.elem_count()], F64, cpu).to_vec1()?;
                let place = seed as usize % values.len();
                values[place] = value;
                Tensor::from_vec(values, x.shape(), cpu)?.to_dtype(dtype)?
            }
        }))
    }
}

/// What happens in one call.
#[derive(Clone, Debug)]
struct Call {
    gradients: Vec<GradientOf>,
    finite_only: bool,
    weight: u64,
    loss_scale: Option<f64>,
    /// A leaf that is frozen or thawed before.
    toggled: Option<usize>,
}

struct Case {
    parameters: Vec<Tensor>,
    optimisers: Vec<Optimiser>,
    calls: Vec<Call>,
}

impl Case {
    fn new(seed: u64) -> Self {
        Case::of(&listed(), seed)
    }

    /// A case with these rules.
    fn of(rules: &[Box<dyn Rule>], seed: u64) -> Self {
        let mut dice = Dice(seed);
        let dice = &mut dice;
        let leaves = 1 + dice.below(4);
        let parameters: Vec<Tensor> = (0..leaves)
            .map(|_| random(dice.number(), &shape(dice), dice.of(&DTYPES), &Device::Cpu))
            .collect();
        let shared = dice.one_in(2).then(|| optimiser(dice, rules, F16));
        let mut optimiser = |x: &Tensor| {
            shared
                .clone()
                .unwrap_or_else(|| optimiser(dice, rules, x.dtype()))
        };
        let optimisers = parameters.iter().map(&mut optimiser).collect();
        let spoilt = dice.one_in(2);
        let call = |_| Call {
            gradients: parameters
                .iter()
                .map(|x| gradient_of(dice, x.elem_count(), spoilt))
                .collect(),
            finite_only: dice.one_in(3),
            weight: 1 + dice.below(5) as u64,
            loss_scale: dice.one_in(4).then(|| dice.of(&[1024.0, 3.0, 0.125])),
            toggled: dice.one_in(6).then(|| dice.below(leaves)),
        };
        let calls = (0..4).map(call).collect();
        Case {
            parameters,
            optimisers,
            calls,
        }
    }

    fn model(&self) -> Vars {
        self.parameters
            .iter()
            .enumerate()
            .map(|(i, x)| (i.to_string(), var(x)))
            .collect()
    }

    /// What was said in each call, and what is there after it.
    fn run(&self, engine: Engine) -> (Vec<String>, Vec<Snapshot>) {
        self.run_over(engine, Setup::default())
    }

    fn run_over(&self, engine: Engine, setup: Setup) -> (Vec<String>, Vec<Snapshot>) {
        self.run_in(engine, setup, false)
    }

    /// As [`Case::run_over`], or with parameters and gradients in memory that the program owns.
    fn run_in(&self, engine: Engine, setup: Setup, slices: bool) -> (Vec<String>, Vec<Snapshot>) {
        let model = self.model();
        let choose = |path: &str, _: Parameter<'_>| {
            Some(self.optimisers[path.parse::<usize>().expect("an index")].clone())
        };
        let made = if slices {
            in_slices(&model, |parameters| setup.build_with(parameters, choose))
        } else {
            setup.build_with(&model, choose)
        };
        let mut state = match made {
            Ok(state) => state,
            Err(error) => return (vec![error.to_string()], Vec::new()),
        };
        let (mut said, mut snapshots) = (Vec::new(), Vec::new());
        for call in &self.calls {
            if let Some(leaf) = call.toggled {
                let is_frozen = state.leaf(&leaf.to_string()).expect("a leaf").is_frozen();
                let leaf = state.at(&leaf.to_string()).expect("a leaf");
                if is_frozen { leaf.thaw() } else { leaf.freeze() }
            }
            let before = everything(&model, &state);
            let outcome = self.call(engine, call, &model, &mut state, slices);
            let after = everything(&model, &state);
            if outcome.is_err() {
                assert!(before == after, "an error changed something: {outcome:?}");
            }
            said.push(outcome.unwrap_or_else(|error| error));
            snapshots.push(after);
        }
        (said, snapshots)
    }

    fn call(
        &self,
        engine: Engine,
        call: &Call,
        model: &Vars,
        state: &mut StateTree,
        slices: bool,
    ) -> Result<String, String> {
        let gradient = |(gradient, (path, x)): (&GradientOf, (&String, &candle_core::Var))| {
            Some((path.clone(), gradient.tensor(x).expect("a gradient")?))
        };
        let grads: Grads = call.gradients.iter().zip(model).filter_map(gradient).collect();
        let mut update = Update::new(state).engine(engine).weight(call.weight);
        if call.finite_only {
            update = update.finite_only();
        }
        let mut scaler = call.loss_scale.map(LossScaler::fixed);
        let outcome = match (&mut scaler, slices) {
            (None, false) => update.apply(model, &grads),
            (None, true) => apply_in_slices(model, &grads, |model, grads| update.apply(model, grads)),
            (Some(scaler), false) => {
                let _ = scaler
                    .scale(&Tensor::new(1f32, &Device::Cpu).expect("a loss"))
                    .expect("a scaled loss");
                update.scaler(scaler).apply(model, &grads)
            }
            (Some(scaler), true) => {
                assert_eq!(scaler.factor().ok(), call.loss_scale);
                apply_in_slices(model, &grads, |model, grads| {
                    update.scaler(scaler).apply(model, grads)
                })
            }
        };
        outcome
            .map(|outcome| format!("{outcome:?}"))
            .map_err(|error| error.to_string())
    }
}

/// The name of which elements there are.
const PART: &str = "/part";

/// The snapshot with the numbers that are not per element.
fn everything(model: &Vars, state: &StateTree) -> Snapshot {
    let mut all = snapshot(model, state);
    for leaf in state.leaves() {
        all.extend(
            leaf.numbers()
                .into_iter()
                .map(|(name, value)| (format!("{}/{name}", leaf.path()), vec![value.to_bits()])),
        );
        all.push((
            format!("{}{PART}", leaf.path()),
            vec![leaf.part().start as u64, leaf.part().end as u64],
        ));
    }
    all
}

fn count() -> u64 {
    std::env::var("RANDOM_MODELS")
        .ok()
        .and_then(|count| count.parse().ok())
        .unwrap_or(300)
}

fn first_seed() -> u64 {
    std::env::var("RANDOM_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(1)
}

/// Asserts that random models with these rules have the same bits and errors on all engines. Returns how
/// often each status came, and `refused`.
pub fn assert_models_agree(rules: &[Box<dyn Rule>], count: u64) -> BTreeMap<&'static str, usize> {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for seed in first_seed()..first_seed() + count {
        let case = Case::of(rules, seed);
        let what = || format!("seed {seed}: {:?} with {:?}", case.optimisers, case.calls);
        let (said, expected) = case.run(Engine::Tensors);
        for engine in [vec![Engine::Fused], instruction_sets()].concat() {
            let (other_said, got) = case.run(engine);
            assert_eq!(said, other_said, "{engine:?}, {}", what());
            assert!(expected == got, "other bits with {engine:?}, {}", what());
        }
        for said in said {
            let kind = ["Stepped", "Accumulated", "Skipped"]
                .into_iter()
                .find(|kind| said.contains(&format!("status: {kind}")));
            *seen.entry(kind.unwrap_or("refused")).or_default() += 1;
        }
    }
    seen
}

#[test]
fn engines_give_the_same_bits_and_errors_change_nothing() {
    let seen = assert_models_agree(&listed(), count());
    // Every outcome takes part.
    assert!(
        count() < 300 || seen.len() == 4 && seen.values().all(|calls| *calls as u64 * 40 > count()),
        "{seen:?}"
    );
}

#[test]
fn memory_of_the_caller_has_the_bits_of_variables() {
    for seed in first_seed()..first_seed() + count() {
        let case = Case::new(seed);
        let what = || format!("seed {seed}: {:?} with {:?}", case.optimisers, case.calls);
        for engine in [Engine::Fused, Engine::Tensors] {
            let ((said, expected), (said_of_slices, got)) =
                (case.run(engine), case.run_in(engine, Setup::default(), true));
            assert_eq!(said_of_slices, said, "{}", what());
            assert!(got == expected, "other bits in slices, {}", what());
        }
    }
}

/// Equal gradients on a power of two of ranks have an exact sum in every dtype.
#[test]
fn ranks_have_the_bits_of_one_process() {
    for seed in first_seed()..first_seed() + count() / 2 {
        let case = Arc::new(Case::new(seed));
        // What `Weighted` collects is as many times as large as there are ranks.
        if ["Offload", "Weighted"]
            .iter()
            .any(|name| format!("{:?}", case.optimisers).contains(name))
        {
            continue;
        }
        let what = format!("seed {seed}: {:?} with {:?}", case.optimisers, case.calls);
        let (said, whole) = case.run(Engine::Fused);
        let on_ranks = case.clone();
        for (rank, (rank_said, parts)) in on([2, 4, 8][seed as usize % 3], move |world| {
            on_ranks.run_over(Engine::Fused, Setup::over(&world))
        })
        .into_iter()
        .enumerate()
        {
            // The error of another rank is told as such, and whose gradient it was.
            let own = |said: &String| {
                said.split_once(" refused: ")
                    .map_or(&**said, |(_, own)| own)
                    .replace("the cause is the gradient of rank 0; ", "")
            };
            assert_eq!(
                rank_said.iter().map(own).collect::<Vec<_>>(),
                said,
                "rank {rank}, {what}"
            );
            for (part, whole) in parts.iter().zip(&whole) {
                assert_part(part, whole, &format!("rank {rank}, {what}"));
            }
        }
    }
}

/// What a rank has is all, or its part of it.
fn assert_part(own: &Snapshot, whole: &Snapshot, what: &str) {
    let parts: BTreeMap<&str, &Vec<u64>> = own
        .iter()
        .filter_map(|(name, part)| Some((name.strip_suffix(PART)?, part)))
        .collect();
    for ((name, own), (_, whole)) in own
        .iter()
        .zip(whole)
        .filter(|((name, _), _)| !name.ends_with(PART))
    {
        let path = name.split('/').next().unwrap_or_default();
        let (start, end) = parts
            .get(path)
            .map_or((0, 0), |part| (part[0] as usize, part[1] as usize));
        let is_part =
            || start == end && own.is_empty() || whole.get(start..end).is_some_and(|whole| own == whole);
        assert!(
            own == whole || name.contains('/') && is_part(),
            "{name} of {what}"
        );
    }
}

#[test]
fn a_device_has_the_same_outcomes() {
    if !crate::engine::emulated::can_run() {
        return;
    }
    // Each new chain is compiled, which takes its time.
    for seed in first_seed()..first_seed() + count() / 30 {
        let case = Case::new(seed);
        let ((said, expected), (device_said, got)) = (case.run(Engine::Fused), case.run(Engine::Emulated));
        let words = |said: &[String]| {
            said.iter()
                .map(|said| said.split("norm").next().unwrap_or_default().to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(words(&said), words(&device_said), "seed {seed}");
        assert_close(
            &got,
            &expected,
            1e-4,
            format!("seed {seed}: {:?} with {:?}", case.optimisers, case.calls),
        );
    }
}
