//! The adapter of this commit: a case through the crate as it is. A comparison uses the adapter that each commit
//! has itself.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use case::{After, Around, Case, Curve, Delivery, Event, Format, Moments, Parameter, Run, Step, Store};
use half::{bf16, f16};
use optimisers::{
    AccumGrad, AdamW, Cautious, Checkpoint, CheckpointFile, ClipGlobalNorm, ClipNorm, Engine, Fallback,
    GradientSlices, Kahan, Lion, LocalRank, LossScaler, MemoryMut, MemoryRef, MixedPrecision, Model, Offload,
    Optimiser, OptimiserChain, Outcome, ParameterSlices, Q8, Rule, Schedule, Setup, SkipReason, SplitMaster,
    StateTree, Status, StochasticRounding, StoreAs, TensorSlice, Update, ranks, rules,
};

type Failure = Box<dyn std::error::Error>;

/// The names of all rules.
pub fn names() -> Vec<String> {
    rules::catalogue()
        .iter()
        .map(|listing| listing.name.to_string())
        .collect()
}

/// Runs a case.
pub fn run(case: &Case) -> Run {
    // Each state would print its own.
    optimisers::Warning::silence();
    if case.ranks == 1 {
        return on_rank(case, 0, None);
    }
    let world = ranks(case.ranks);
    let runs = std::thread::scope(|scope| {
        let of_rank = |(rank, world)| scope.spawn(move || on_rank(case, rank, Some(world)));
        let threads: Vec<_> = world.into_iter().enumerate().map(of_rank).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a rank that does not panic"))
            .collect()
    });
    case::together(runs)
}

fn on_rank(case: &Case, rank: usize, world: Option<LocalRank>) -> Run {
    let mut training = Training::new(case, rank, world)?;
    let mut all = Vec::new();
    for event in &case.events {
        let outcome = training.run(event);
        let taken = outcome.is_ok();
        let mut bits = outcome.ok().flatten().map_or(Vec::new(), case::Outcome::bits);
        bits.extend(training.bits());
        all.push(After { taken, bits });
        // Later events name the parameter.
        if !taken && matches!(event, Event::Add(_)) {
            break;
        }
    }
    Some(all)
}

/// A training that goes on.
struct Training<'c> {
    case: &'c Case,
    rank: usize,
    world: Option<LocalRank>,
    /// For each parameter its path, in order.
    paths: Vec<String>,
    parameters: Vec<Parameter>,
    rules: Vec<Vec<String>>,
    /// Parameters in slices.
    numbers: Vec<Numbers>,
    /// Parameters in candle's tensors.
    variables: BTreeMap<String, Var>,
    state: StateTree,
}

impl<'c> Training<'c> {
    fn new(case: &'c Case, rank: usize, world: Option<LocalRank>) -> Option<Self> {
        // All fields, so that one that is not used here does not go unnoticed.
        let Case {
            rules,
            around,
            moments,
            store,
            curve,
            ranks: _,
            slices,
            tensors: _,
            parameters,
            events: _,
            file: _,
        } = case;
        let paths: Vec<String> = (0..parameters.len()).map(|index| index.to_string()).collect();
        let mut numbers: Vec<_> = parameters
            .iter()
            .map(|x| Numbers::new(x.format, &x.values))
            .collect();
        let variables = variables(&paths, parameters, &numbers);
        let setup = world.as_ref().map_or_else(Setup::default, Setup::over);
        let optimiser = optimiser(rules, *around, *moments, *store)?;
        let mut state = match slices {
            true => setup.build(optimiser, &lent(&paths, parameters, &mut numbers)),
            false => setup.build(optimiser, &variables),
        }
        .ok()?;
        // So that a rule whose defaults have changed is the same.
        let _ = state.all().adjust_field("lambda", 0.01);
        // A rule without a rate is refused here.
        curve
            .map(|curve| state.schedule(schedule(curve)))
            .transpose()
            .ok()?;
        let (rules, parameters) = (vec![rules.clone(); paths.len()], parameters.clone());
        Some(Training {
            case,
            rank,
            world,
            paths,
            parameters,
            rules,
            numbers,
            variables,
            state,
        })
    }

    /// Does what an event says.
    fn run(&mut self, event: &Event) -> Result<Option<case::Outcome>, Failure> {
        match event {
            Event::Step(step) => return self.step(step).map(|outcome| Some(described(&outcome))),
            Event::Resume => self.resume()?,
            Event::Freeze(parameter) => self.state.at(&self.paths[*parameter])?.freeze(),
            Event::Thaw(parameter) => self.state.at(&self.paths[*parameter])?.thaw(),
            Event::Rate(parameter, eta) => self.state.at(&self.paths[*parameter])?.adjust(*eta)?,
            Event::Field(field, value) => self.state.all().adjust_field(field, *value)?,
            Event::Replace(parameter, rules) => {
                let (path, optimiser) = (self.paths[*parameter].clone(), self.optimiser(rules)?);
                self.with_model(|state, model| state.at(&path)?.replace(optimiser, model).map(drop))?;
                self.rules[*parameter] = rules.clone();
            }
            Event::Add(parameter) => self.add(parameter)?,
        }
        Ok(None)
    }

    fn step(&mut self, step: &Step) -> Result<Outcome, Failure> {
        let Step {
            gradients,
            delivery,
            finite_only,
            weights,
            loss_scale,
        } = step;
        let numbers = gradients[self.rank].iter().map(|gradient| {
            let (format, values) = gradient.as_ref()?;
            Some(Numbers::new(*format, values))
        });
        let numbers: Vec<Option<Numbers>> = numbers.collect();
        let tensors = numbers
            .iter()
            .zip(&self.parameters)
            .map(|(numbers, x)| Some(numbers.as_ref()?.tensor(&x.shape)));
        let tensors: Vec<Option<Tensor>> = tensors.collect();
        let (paths, is_of_slices) = (self.paths.clone(), self.case.slices);
        let mut by_path = BTreeMap::new();
        let mut slices = GradientSlices::new();
        for ((path, numbers), tensor) in paths.iter().zip(&numbers).zip(&tensors) {
            if let (Some(numbers), Some(tensor)) = (numbers, tensor) {
                slices = slices.with(path, numbers.show())?;
                by_path.insert(path.clone(), tensor.clone());
            }
        }
        let engine = if self.case.tensors {
            Engine::Tensors
        } else {
            Engine::Fused
        };
        let mut scaler = loss_scale.map(LossScaler::fixed);
        if let Some(scaler) = &mut scaler {
            scaler.factor()?;
        }
        let weight = weights[self.rank];
        let outcome = self.with_model(|state, model| {
            let mut update = Update::new(state).engine(engine).weight(weight);
            if *finite_only {
                update = update.finite_only();
            }
            if let Some(scaler) = &mut scaler {
                update = update.scaler(scaler);
            }
            match (delivery, is_of_slices) {
                (Delivery::Lent, true) => update.apply(model, &slices),
                (Delivery::Lent, false) => update.apply(model, &by_path),
                (Delivery::Given, true) => update.apply_owned(model, slices),
                (Delivery::Given, false) => update.apply_owned(model, by_path),
                (Delivery::Streamed(order), is_of_slices) => {
                    let open = update.begin(model)?;
                    for &index in order {
                        match (&numbers[index], &tensors[index]) {
                            (Some(numbers), Some(tensor)) if is_of_slices => {
                                open.push(&paths[index], TensorSlice::new(tensor.dims(), numbers.show())?)?
                            }
                            (_, Some(tensor)) => open.push(&paths[index], tensor.clone())?,
                            _ => {}
                        }
                    }
                    open.finish()
                }
            }
        })?;
        Ok(outcome)
    }

    /// Goes on from a file, as another process would.
    fn resume(&mut self) -> Result<(), Failure> {
        let file = &self.case.file;
        self.with_model(|state, model| Checkpoint::new(state).model(model).save(file).map(drop))?;
        for (numbers, x) in self.numbers.iter_mut().zip(&self.parameters) {
            *numbers = Numbers::new(x.format, &vec![1.0; x.values.len()]);
        }
        self.variables = variables(&self.paths, &self.parameters, &self.numbers);
        let optimisers = self
            .rules
            .iter()
            .map(|rules| self.optimiser(rules))
            .collect::<Result<Vec<_>, _>>()?;
        let optimisers: BTreeMap<String, _> = self.paths.iter().cloned().zip(optimisers).collect();
        let setup = self.world.as_ref().map_or_else(Setup::default, Setup::over);
        self.state =
            self.with_model(|_, model| setup.build_with(model, |path, _| optimisers.get(path).cloned()))?;
        let saved = CheckpointFile::open(file)?;
        self.with_model(|state, model| saved.restore_with_model(state, model).map(drop))?;
        Ok(())
    }

    fn add(&mut self, parameter: &Parameter) -> Result<(), Failure> {
        let optimiser = self.optimiser(&self.case.rules)?;
        let (path, numbers) = (
            self.paths.len().to_string(),
            Numbers::new(parameter.format, &parameter.values),
        );
        self.variables
            .insert(path.clone(), Var::from_tensor(&numbers.tensor(&parameter.shape))?);
        self.paths.push(path);
        self.parameters.push(parameter.clone());
        self.numbers.push(numbers);
        self.rules.push(self.case.rules.clone());
        self.with_model(|state, model| state.add(optimiser, model).map(drop))
    }

    fn optimiser(&self, rules: &[String]) -> Result<Optimiser, Failure> {
        let Case {
            around,
            moments,
            store,
            ..
        } = *self.case;
        optimiser(rules, around, moments, store).ok_or_else(|| "a rule that there is not".into())
    }

    fn with_model<T>(
        &mut self,
        run: impl FnOnce(&mut StateTree, &dyn Model) -> optimisers::Result<T>,
    ) -> Result<T, Failure> {
        let Training {
            state,
            paths,
            parameters,
            numbers,
            variables,
            ..
        } = self;
        Ok(match self.case.slices {
            true => run(state, &lent(paths, parameters, numbers)),
            false => run(state, variables),
        }?)
    }

    /// Every bit that is there.
    fn bits(&self) -> Vec<(String, Vec<u64>)> {
        let mut all = Vec::new();
        for ((path, x), numbers) in self.paths.iter().zip(&self.parameters).zip(&self.numbers) {
            let tensor = match self.case.slices {
                true => numbers.tensor(&x.shape),
                false => self.variables[path].as_detached_tensor(),
            };
            all.push((path.clone(), bits(&tensor)));
        }
        for leaf in self.state.leaves() {
            let mut push = |name: &str, bits| all.push((format!("{}/{name}", leaf.path()), bits));
            for name in leaf.tensor_names() {
                push(&name, bits(&leaf.tensor(&name).expect("a copy")));
            }
            leaf.counters()
                .into_iter()
                .for_each(|(name, count)| push(&name, vec![count]));
            leaf.numbers()
                .into_iter()
                .for_each(|(name, number)| push(&name, vec![case::bits(number)]));
            push("steps", vec![leaf.steps()]);
        }
        all
    }
}

fn schedule(curve: Curve) -> Schedule {
    match curve {
        Curve::Linear { first, last, steps } => Schedule::linear(first, last, steps),
        Curve::Cosine { first, last, steps } => Schedule::cosine(first, last, steps),
        Curve::WarmUp { peak, warmup, steps } => {
            Schedule::linear(0.0, peak, warmup).then(warmup, Schedule::linear(peak, 0.0, steps - warmup))
        }
        Curve::OfOwnRates { last, steps } => Schedule::linear(1.0, last, steps).relative(),
    }
}

fn described(outcome: &Outcome) -> case::Outcome {
    let status = match &outcome.status {
        Status::Stepped => 0,
        Status::Accumulated => 1,
        Status::Skipped(SkipReason::NothingToMove) => 2,
        Status::Skipped(SkipReason::NotFinite { .. }) => 3,
        Status::Skipped(_) => 4,
    };
    case::Outcome {
        status,
        applied: outcome.applied,
        accumulated: outcome.accumulated,
        frozen: outcome.frozen,
        without_gradient: outcome.without_gradient.len(),
        learning_rate: outcome.learning_rate.unwrap_or(f64::NAN),
        norm: outcome.global_norm.unwrap_or(f64::NAN),
        loss_scale: outcome.loss_scale.unwrap_or(f64::NAN),
    }
}

fn variables(paths: &[String], parameters: &[Parameter], numbers: &[Numbers]) -> BTreeMap<String, Var> {
    let all = paths.iter().zip(parameters).zip(numbers);
    all.map(|((path, x), numbers)| {
        (
            path.clone(),
            Var::from_tensor(&numbers.tensor(&x.shape)).expect("a variable"),
        )
    })
    .collect()
}

fn rule(name: &str) -> Option<Box<dyn Rule>> {
    let rule = rules::catalogue()
        .into_iter()
        .find(|listing| listing.name == name)?
        .rule;
    // Rules of matrices have another for vectors.
    let takes_vectors = rule
        .init((&Tensor::zeros(1, DType::F32, &Device::Cpu).ok()?).into())
        .is_ok();
    Some(if takes_vectors {
        rule
    } else {
        Box::new(Fallback::new(rule, AdamW::new(1e-2)))
    })
}

fn optimiser(rules: &[String], around: Around, moments: Moments, store: Store) -> Option<Optimiser> {
    let mut members: Vec<Box<dyn Rule>> = match around {
        Around::Window(calls) => vec![Box::new(AccumGrad::new(calls))],
        Around::ClipAll(limit) => vec![Box::new(ClipGlobalNorm::new(limit))],
        Around::ClipEach(limit) => vec![Box::new(ClipNorm::new(limit))],
        Around::Cautious => vec![Box::new(Cautious::new(Lion::new(1e-2)))],
        Around::Nothing => vec![],
    };
    for name in rules {
        members.push(rule(name)?);
    }
    let rule: Box<dyn Rule> = Box::new(OptimiserChain::new(members));
    let rule = match moments {
        Moments::AsTheyAre => rule,
        Moments::InBF16 => Box::new(StoreAs::all(DType::BF16, rule)),
        Moments::In8Bits => Box::new(StoreAs::all(Q8, rule)),
    };
    Some(match store {
        Store::Bare => Optimiser::new(rule),
        Store::MasterF32 => Optimiser::new(MixedPrecision::new(DType::F32, rule)),
        Store::MasterF64 => Optimiser::new(MixedPrecision::new(DType::F64, rule)),
        Store::Kahan => Optimiser::new(Kahan::new(rule)),
        Store::Split => Optimiser::new(SplitMaster::new(rule)),
        Store::Split24 => Optimiser::new(SplitMaster::of_24_bits(rule)),
        Store::Stochastic => Optimiser::new(StochasticRounding::new(7, rule)),
        Store::Offload => Optimiser::new(Offload::new(rule).everywhere()),
        Store::OffloadMaster => {
            Optimiser::new(Offload::new(MixedPrecision::new(DType::F32, rule)).everywhere())
        }
    })
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    let values = tensor
        .flatten_all()
        .and_then(|flat| flat.to_dtype(DType::F64)?.to_vec1::<f64>())
        .expect("values");
    values.into_iter().map(case::bits).collect()
}

/// Numbers of any format.
enum Numbers {
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Numbers {
    fn new(format: Format, values: &[f64]) -> Self {
        let values = values.iter().copied();
        match format {
            Format::F16 => Numbers::F16(values.map(f16::from_f64).collect()),
            Format::BF16 => Numbers::BF16(values.map(bf16::from_f64).collect()),
            Format::F32 => Numbers::F32(values.map(|value| value as f32).collect()),
            Format::F64 => Numbers::F64(values.collect()),
        }
    }

    fn tensor(&self, shape: &[usize]) -> Tensor {
        let cpu = &Device::Cpu;
        match self {
            Numbers::F16(values) => Tensor::from_slice(values, shape, cpu),
            Numbers::BF16(values) => Tensor::from_slice(values, shape, cpu),
            Numbers::F32(values) => Tensor::from_slice(values, shape, cpu),
            Numbers::F64(values) => Tensor::from_slice(values, shape, cpu),
        }
        .expect("a tensor")
    }

    fn lend(&mut self) -> MemoryMut<'_> {
        match self {
            Numbers::F16(values) => values.into(),
            Numbers::BF16(values) => values.into(),
            Numbers::F32(values) => values.into(),
            Numbers::F64(values) => values.into(),
        }
    }

    fn show(&self) -> MemoryRef<'_> {
        match self {
            Numbers::F16(values) => values.into(),
            Numbers::BF16(values) => values.into(),
            Numbers::F32(values) => values.into(),
            Numbers::F64(values) => values.into(),
        }
    }
}

fn lent<'a>(
    paths: &'a [String],
    parameters: &[Parameter],
    numbers: &'a mut [Numbers],
) -> ParameterSlices<'a> {
    let mut lent = ParameterSlices::new();
    for ((path, Parameter { shape, .. }), numbers) in paths.iter().zip(parameters).zip(numbers) {
        lent = lent
            .with(path, shape.as_slice(), numbers.lend())
            .expect("slices as long as their shapes");
    }
    lent
}
