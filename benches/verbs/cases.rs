//! The verbs.

use std::collections::BTreeMap;
use std::error::Error;
use std::hint::black_box;

use candle_core::{DType, Tensor, Var};
use candle_nn::Optimizer as _;
use optimisers::rules::{AccumGrad, Adam, AdamW, Descent};
use optimisers::{
    Accumulator, CandleOptimizer, Checkpoint, CheckpointFile, CheckpointSaver, Fallback, LossScaler,
    MixedPrecision, Optimiser, OptimiserChain, PrecisionPolicy, ReduceOnPlateau, Sam, Schedule, Setup,
    StateTree, StateValue, Update, Weights, audit, broadcast, destructure, ranks, setup, setup_with,
    trainables, update,
};

use crate::trained::{Start, Trained, chain, variable};

type Done = Result<(), Box<dyn Error>>;

/// What is timed.
#[derive(Clone, Copy)]
pub enum Run {
    /// One call for all leaves.
    All(fn(&mut Trained) -> Done),
    /// A call for a leaf, by its number.
    Each(fn(&mut Trained, usize) -> Done),
}

pub struct Case {
    pub name: &'static str,
    pub start: Start,
    /// The number of leaves, phases or members in the small run, where it is another than usual.
    pub few: Option<usize>,
    pub run: Run,
}

fn all_leaves(name: &'static str, start: Start, run: fn(&mut Trained) -> Done) -> Case {
    Case {
        name,
        start,
        few: None,
        run: Run::All(run),
    }
}

fn each_leaf(name: &'static str, start: Start, run: fn(&mut Trained, usize) -> Done) -> Case {
    Case {
        name,
        start,
        few: None,
        run: Run::Each(run),
    }
}

fn done<T>(value: T) -> Done {
    black_box(value);
    Ok(())
}

/// Verbs of a step, of a whole state, of single leaves, of files, and of schedules and chains.
pub fn all() -> Vec<Case> {
    [steps(), states(), leaves(), files(), long()]
        .into_iter()
        .flatten()
        .collect()
}

fn steps() -> Vec<Case> {
    use Start::{Masters, Nothing, OneRule, OwnRates};
    vec![
        all_leaves("setup", Nothing, |t| done(setup(AdamW::new(1e-3), &t.model)?)),
        all_leaves("setup_masters", Nothing, |t| {
            done(setup(
                MixedPrecision::new(DType::F32, AdamW::new(1e-3)),
                &t.model,
            )?)
        }),
        all_leaves("setup_with", Nothing, |t| {
            done(setup_with(&t.model, |path, _| {
                Some(AdamW::new(path.len() as f64))
            })?)
        }),
        all_leaves("setup_fallback", Nothing, |t| {
            let rule = Fallback::new(AdamW::new(1e-3), Descent::new(0.1)).except(["layers.1*", "layers.2*"]);
            done(setup(rule, &t.model)?)
        }),
        all_leaves("setup_over_ranks", Nothing, over_ranks),
        all_leaves("update", OneRule, |t| {
            done(update(&mut t.state, &t.model, &t.gradients)?)
        }),
        all_leaves("update_masters", Masters, |t| {
            done(update(&mut t.state, &t.model, &t.gradients)?)
        }),
        all_leaves("update_own_rates", OwnRates, |t| {
            done(update(&mut t.state, &t.model, &t.gradients)?)
        }),
        all_leaves("update_owned", OneRule, |t| {
            done(Update::new(&mut t.state).apply_owned(&t.model, std::mem::take(&mut t.gradients))?)
        }),
        all_leaves("update_scaled", OneRule, |t| {
            let mut scaler = LossScaler::dynamic();
            let _loss = scaler.scale(&Tensor::new(1f32, &candle_core::Device::Cpu)?)?;
            done(
                Update::new(&mut t.state)
                    .scaler(&mut scaler)
                    .apply(&t.model, &t.gradients)?,
            )
        }),
        all_leaves("update_figures", OneRule, |t| {
            done(
                Update::new(&mut t.state)
                    .with_figures()
                    .apply(&t.model, &t.gradients)?,
            )
        }),
        all_leaves("update_half_of_the_gradients", OneRule, |t| {
            t.gradients.truncate(t.gradients.len() / 2);
            done(update(&mut t.state, &t.model, &t.gradients)?)
        }),
        all_leaves("push", OneRule, |t| {
            let step = Update::new(&mut t.state).begin(&t.model)?;
            for (path, gradient) in &t.gradients {
                step.push(path, gradient.clone())?;
            }
            done(step.finish()?)
        }),
        all_leaves("functional", OneRule, |t| {
            let parameters = trainables(&t.model)?;
            let gradients: BTreeMap<String, Tensor> = t.gradients.iter().cloned().collect();
            done(Update::functional(&t.state).apply(&parameters, &gradients)?)
        }),
        all_leaves("candle_optimizer", Nothing, |t| {
            let mut optimizer = CandleOptimizer::for_model(&t.model, AdamW::new(1e-3))?;
            optimizer.set_learning_rate(0.1);
            done(optimizer.step(&sum_of(&t.model)?.backward()?)?)
        }),
        all_leaves("release_windows", Nothing, |t| {
            let rule = OptimiserChain::new((AccumGrad::new(2), AdamW::new(1e-3)));
            t.state = setup(rule, &t.model)?;
            update(&mut t.state, &t.model, &t.gradients)?;
            done(Update::new(&mut t.state).release_windows(&t.model)?)
        }),
        all_leaves("sam", OneRule, |t| {
            Ok(Sam::new(0.05)
                .ascend(Update::new(&mut t.state), &t.model, &t.gradients)?
                .restore()?)
        }),
        all_leaves("accumulate", OneRule, |t| {
            let mut sums = Accumulator::new(DType::F32, &t.model)?;
            sums.add(&t.gradients)?;
            done(sums.take()?)
        }),
        all_leaves("push_one", OneRule, |t| {
            let step = Update::new(&mut t.state).begin(&t.model)?;
            step.push(&t.names[0], t.gradients[0].1.clone())?;
            done(step.finish()?)
        }),
        all_leaves("audit", OneRule, |t| done(audit(&t.model, &sum_of(&t.model)?)?)),
        all_leaves("destructure", OneRule, |t| {
            let (flat, structure) = destructure(&t.model)?;
            Ok(structure.assign(&flat, &t.model)?)
        }),
        all_leaves("policy", OneRule, |t| {
            Ok(PrecisionPolicy::new([("*", DType::F32)])?.check(&t.model)?)
        }),
    ]
}

fn states() -> Vec<Case> {
    use Start::{Averages, Masters, OneRule, OwnRates};
    vec![
        all_leaves("adjust", OneRule, |t| Ok(t.state.adjust(0.1)?)),
        all_leaves("adjust_own_rates", OwnRates, |t| Ok(t.state.adjust(0.1)?)),
        all_leaves("adjust_fields", OwnRates, |t| {
            Ok(t.state
                .all()
                .adjust_fields([("beta", (0.8, 0.9).into()), ("lambda", 0.1.into())])?)
        }),
        all_leaves("adjust_whole_number", OwnRates, |t| {
            Ok(t.state.all().adjust_field("bias_correction", false)?)
        }),
        all_leaves("schedule", OneRule, |t| {
            Ok(t.state.schedule(Schedule::linear(1e-3, 0.0, 100))?)
        }),
        all_leaves("schedule_own_rates", OwnRates, |t| {
            Ok(t.state.schedule(Schedule::linear(1.0, 0.0, 100).relative())?)
        }),
        all_leaves("set_steps", OwnRates, |t| Ok(t.state.set_steps(50)?)),
        all_leaves("observe", OneRule, |t| {
            done(ReduceOnPlateau::new().observe(1.0, &mut t.state)?)
        }),
        all_leaves("observe_own_rates", OwnRates, |t| {
            done(ReduceOnPlateau::new().observe(1.0, &mut t.state)?)
        }),
        all_leaves("select", OneRule, |t| {
            t.state
                .select_where(|leaf| leaf.path().ends_with("weight"))?
                .freeze();
            t.state.all().thaw();
            t.state.all().allow_missing();
            t.state.all().allow_low_precision();
            Ok(())
        }),
        all_leaves("replace", OneRule, |t| {
            done(t.state.all().replace(Adam::new(1e-3), &t.model)?)
        }),
        all_leaves("replace_own_rates", OwnRates, |t| {
            done(t.state.all().replace(Adam::new(1e-3), &t.model)?)
        }),
        all_leaves("add", OneRule, |t| {
            let names = t
                .names
                .iter()
                .map(|name| Ok((format!("more.{name}"), variable(DType::F32)?)));
            t.model.extend(names.collect::<candle_core::Result<Vec<_>>>()?);
            done(t.state.add(Adam::new(1e-3), &t.model)?)
        }),
        all_leaves("resize_rows", OneRule, |t| {
            enlarge(t.model.values_mut())?;
            done(t.state.resize_rows("", &t.model, &[Some(0), Some(1), None])?)
        }),
        all_leaves("rename", OneRule, |t| Ok(t.state.rename("layers", "blocks")?)),
        all_leaves("remove", OneRule, |t| done(t.state.remove("layers")?)),
        all_leaves("rebind", OneRule, |t| Ok(t.state.rebind(&t.model)?)),
        all_leaves("try_clone", OwnRates, |t| done(t.state.try_clone()?)),
        all_leaves("entries", OneRule, |t| done(t.state.entries()?.len())),
        all_leaves("set_entries", OwnRates, |t| {
            let tensors = t
                .gradients
                .iter()
                .map(|(path, m)| (&path[..], "m", StateValue::Tensor(m)));
            let counters = t
                .names
                .iter()
                .map(|path| (&path[..], "t", StateValue::Counter(7)));
            Ok(t.state.set_entries(tensors.chain(counters))?)
        }),
        all_leaves("set_entry_of_the_state", OwnRates, |t| {
            Ok(t.state
                .set_entries([("", "state.steps", StateValue::Counter(7))])?)
        }),
        all_leaves("averages", Averages, |t| done(t.state.averages(&t.model)?)),
        all_leaves("with_averages", Averages, |t| {
            Ok(t.state
                .with_averages(&t.model, || Ok::<(), optimisers::Error>(()))?)
        }),
        all_leaves("masters", Masters, |t| done(t.state.masters(&t.model)?)),
        all_leaves("check_masters", Masters, |t| {
            Ok(t.state.check_masters(&t.model)?)
        }),
        all_leaves("refresh_masters", Masters, |t| {
            Ok(t.state.refresh_masters(&t.model)?)
        }),
        all_leaves("set_masters", Masters, |t| {
            let masters = t.state.masters(&t.model)?;
            done(t.state.set_masters(&t.model, &masters)?)
        }),
        all_leaves("warnings", OwnRates, |t| done(t.state.warnings().len())),
        all_leaves("display", OwnRates, |t| done(t.state.to_string())),
        all_leaves("debug", OwnRates, |t| done(format!("{:?}", t.state))),
        all_leaves("read", OwnRates, |t| {
            let leaves = t
                .state
                .leaves()
                .map(|leaf| (leaf.learning_rate(), leaf.field("beta"), leaf.counters()));
            done((leaves.count(), t.state.bytes(), t.state.elements()))
        }),
    ]
}

/// Variables with another row.
fn enlarge<'v>(variables: impl Iterator<Item = &'v mut Var>) -> candle_core::Result<()> {
    for x in variables {
        *x = Var::from_tensor(&Tensor::cat(&[x.as_tensor(), &x.narrow(0, 0, 1)?], 0)?)?;
    }
    Ok(())
}

fn leaves() -> Vec<Case> {
    use Start::{OneRule, OwnRates};
    vec![
        each_leaf("leaf", OneRule, |t, i| {
            done(t.state.leaf(&t.names[i]).map(|leaf| leaf.learning_rate()))
        }),
        each_leaf("at_adjust", OneRule, |t, i| {
            Ok(t.state.at(&t.names[i])?.adjust(0.1)?)
        }),
        each_leaf("at_adjust_own_rates", OwnRates, |t, i| {
            Ok(t.state.at(&t.names[i])?.adjust(0.1)?)
        }),
        each_leaf("at_freeze", OneRule, |t, i| {
            t.state.at(&t.names[i])?.freeze();
            Ok(())
        }),
        each_leaf("at_schedule", OneRule, |t, i| {
            Ok(t.state
                .at(&t.names[i])?
                .schedule(Schedule::linear(1e-3, 0.0, 100))?)
        }),
        each_leaf("at_observe", OwnRates, |t, i| {
            done(ReduceOnPlateau::new().observe(1.0, t.state.at(&t.names[i])?)?)
        }),
        each_leaf("at_replace", OneRule, |t, i| {
            done(t.state.at(&t.names[i])?.replace(Adam::new(1e-3), &t.model)?)
        }),
        each_leaf("at_replace_own_rates", OwnRates, |t, i| {
            done(t.state.at(&t.names[i])?.replace(Adam::new(1e-3), &t.model)?)
        }),
        each_leaf("set_entry", OneRule, |t, i| {
            Ok(t.state
                .set_entries([(&t.names[i], "m", StateValue::Tensor(&t.gradients[i].1))])?)
        }),
        each_leaf("set_entry_own_rates", OwnRates, |t, i| {
            Ok(t.state
                .set_entries([(&t.names[i], "t", StateValue::Counter(7))])?)
        }),
        each_leaf("add_one", OneRule, |t, i| {
            t.model.insert(format!("more.{i}"), variable(DType::F32)?);
            done(t.state.add(Adam::new(1e-3), &t.model)?)
        }),
        each_leaf("add_with_one", OneRule, |t, i| {
            t.model.insert(format!("more.{i}"), variable(DType::F32)?);
            done(t.state.add_with(&t.model, |_, _| Some(Adam::new(1e-3)))?)
        }),
        each_leaf("resize_rows_of_one", OneRule, |t, i| {
            enlarge(t.model.get_mut(&t.names[i]).into_iter())?;
            done(
                t.state
                    .resize_rows(&t.names[i], &t.model, &[Some(0), Some(1), None])?,
            )
        }),
        each_leaf("rename_one", OneRule, |t, i| {
            Ok(t.state.rename(&t.names[i], &format!("more.{i}"))?)
        }),
        each_leaf("remove_one", OneRule, |t, i| done(t.state.remove(&t.names[i])?)),
    ]
}

/// Restores the file of a state.
fn restored(t: &mut Trained, prepare: impl FnOnce(CheckpointFile) -> CheckpointFile) -> Done {
    let file = prepare(CheckpointFile::from_bytes("bytes", std::mem::take(&mut t.file))?);
    done(file.restore(&mut t.state)?)
}

fn files() -> Vec<Case> {
    use Start::{Masters, Nothing, OneRule, OwnRates};
    vec![
        all_leaves("to_bytes", OneRule, |t| {
            done(Checkpoint::new(&t.state).model(&t.model).to_bytes()?)
        }),
        all_leaves("to_bytes_own_rates", OwnRates, |t| {
            done(Checkpoint::new(&t.state).to_bytes()?)
        }),
        all_leaves("restore", OneRule, |t| restored(t, |file| file)),
        all_leaves("schedules_of_leaves", OneRule, |t| {
            for name in &t.names {
                t.state.at(name)?.schedule(Schedule::linear(1e-3, 0.0, 100))?;
            }
            t.file = Checkpoint::new(&t.state).to_bytes()?.0;
            restored(t, |file| file)
        }),
        all_leaves("restore_masters", Masters, |t| {
            let file = CheckpointFile::from_bytes("bytes", std::mem::take(&mut t.file))?;
            done(file.restore_with_model(&mut t.state, &t.model)?)
        }),
        all_leaves("restore_own_rates", OwnRates, |t| restored(t, |file| file)),
        all_leaves("restore_keeping_settings", OwnRates, |t| {
            restored(t, CheckpointFile::keeping_settings)
        }),
        all_leaves("restore_into_new", OwnRates, |t| {
            t.state = setup(AdamW::new(0.1), &t.model)?;
            restored(t, CheckpointFile::keeping_settings)
        }),
        all_leaves("restore_except", OneRule, |t| {
            t.state.rename("layers.1", "layers.one")?;
            restored(t, |file| file.except(["*.1.*", "*.one.*"]))
        }),
        all_leaves("save_masters", Masters, |t| {
            let folder = tempfile::tempdir()?;
            let path = folder.path().join("masters.safetensors");
            t.state.save_masters(&t.model, &path)?;
            done(Weights::open([&path])?.load_into(&t.model)?)
        }),
        all_leaves("saver", OneRule, |t| {
            let folder = tempfile::tempdir()?;
            let mut saver = CheckpointSaver::new(folder.path().join("run"));
            saver.save(1, Checkpoint::new(&t.state).model(&t.model))?;
            saver.wait()?;
            done(saver.newest()?)
        }),
        all_leaves("bytes_of_a_checkpoint", Nothing, |t| {
            let mut checkpoint = Checkpoint::new(&t.state);
            for name in &t.names {
                checkpoint = checkpoint.bytes(name.clone(), [1u8]);
            }
            let bytes = checkpoint.to_bytes()?.0;
            let file = CheckpointFile::from_bytes("bytes", bytes)?;
            let names = t.names.iter().take(crate::CALLS);
            done(
                names
                    .map(|name| file.bytes(name))
                    .collect::<Result<Vec<_>, _>>()?,
            )
        }),
        #[cfg(feature = "config")]
        all_leaves("config_of_state", OwnRates, |t| {
            done(optimisers::config::OptimiserConfig::of_state(&t.state)?)
        }),
        #[cfg(feature = "config")]
        all_leaves("config_setup", OwnRates, |t| {
            done(optimisers::config::OptimiserConfig::of_state(&t.state)?.setup(&t.model)?)
        }),
        #[cfg(feature = "torch")]
        all_leaves("torch", OwnRates, |t| {
            let folder = tempfile::tempdir()?;
            let path = folder.path().join("torch.safetensors");
            t.state.save_torch(&path)?;
            done(optimisers::torch::TorchState::open(&path)?.restore(&mut t.state)?)
        }),
    ]
}

/// A loss that every parameter takes part in.
fn sum_of(model: &BTreeMap<String, Var>) -> candle_core::Result<Tensor> {
    let sums = model
        .values()
        .map(|x| x.sum_all()?.reshape(1))
        .collect::<candle_core::Result<Vec<_>>>()?;
    Tensor::cat(&sums, 0)?.sum_all()
}

/// A broadcast, a setup, a step and a checkpoint over two ranks.
fn over_ranks(t: &mut Trained) -> Done {
    let gradients = &t.gradients;
    let run = |world: optimisers::LocalRank, model: BTreeMap<String, Var>| -> Result<(), optimisers::Error> {
        broadcast(&world, &model)?;
        let mut state = Setup::over(&world).build(AdamW::new(1e-3), &model)?;
        update(&mut state, &model, gradients)?;
        state.set_entries(model.keys().map(|path| (path, "t", StateValue::Counter(7))))
    };
    let copies = || {
        let copy = |(path, x): (&String, &Var)| Ok((path.clone(), Var::from_tensor(&x.copy()?)?));
        t.model
            .iter()
            .map(copy)
            .collect::<candle_core::Result<BTreeMap<_, _>>>()
    };
    let models = [copies()?, copies()?];
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks(2)
            .into_iter()
            .zip(models)
            .map(|(world, model)| scope.spawn(|| run(world, model)))
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    Ok(())
}

/// A schedule of as many phases as there are leaves.
fn phases(t: &Trained) -> Schedule {
    let next = |schedule: Schedule, phase: usize| {
        schedule.then(phase as u64, Schedule::constant(1.0 / phase as f64))
    };
    (1..t.names.len()).fold(Schedule::constant(1.0), next)
}

/// A state of one leaf with a chain of as many members as there are leaves.
fn chained(t: &Trained) -> Result<(BTreeMap<&'static str, Var>, StateTree), optimisers::Error> {
    let model = BTreeMap::from([("only", variable(DType::F32)?)]);
    let state = setup(chain(t.names.len()), &model)?;
    Ok((model, state))
}

fn long() -> Vec<Case> {
    use Start::Nothing;
    let members = |name, run| Case {
        few: Some(25),
        ..all_leaves(name, Nothing, run)
    };
    vec![
        all_leaves("phases_then", Nothing, |t| done(phases(t))),
        all_leaves("phases_read", Nothing, |t| {
            let schedule = phases(t);
            done(
                (0..t.names.len() as u64)
                    .map(|step| schedule.at(step))
                    .sum::<f64>(),
            )
        }),
        all_leaves("phases_schedule", Nothing, |t| Ok(t.state.schedule(phases(t))?)),
        all_leaves("phases_restore", Nothing, |t| {
            t.state.schedule(phases(t))?;
            let (bytes, _) = Checkpoint::new(&t.state).to_bytes()?;
            done(CheckpointFile::from_bytes("bytes", bytes)?.restore(&mut t.state)?)
        }),
        members("members_setup", |t| done(chained(t)?)),
        members("members_adjust", |t| {
            let (_, mut state) = chained(t)?;
            for member in 0..t.names.len() {
                state.all().adjust_field(&format!("{member}.lambda"), 0.1)?;
            }
            Ok(())
        }),
        members("members_schedules", |t| {
            let (model, mut state) = chained(t)?;
            for member in 0..t.names.len() {
                state.schedule(
                    Schedule::linear(1.0, 0.5, 10)
                        .relative()
                        .field(format!("{member}.lambda")),
                )?;
            }
            done(update(
                &mut state,
                &model,
                &[(
                    "only",
                    Tensor::ones((2, 4), DType::F32, &candle_core::Device::Cpu)?,
                )],
            )?)
        }),
        members("members_read", |t| {
            let optimiser: Optimiser = chain(t.names.len());
            done(
                (0..t.names.len())
                    .filter_map(|member| optimiser.field(&format!("{member}.lambda")))
                    .count(),
            )
        }),
        members("members_set_entries", |t| {
            let (_, mut state) = chained(t)?;
            let names: Vec<String> = (0..t.names.len()).map(|member| format!("{member}.t")).collect();
            Ok(state.set_entries(names.iter().map(|name| ("only", name, StateValue::Counter(7))))?)
        }),
        members("members_restore", |t| {
            let (_, mut state) = chained(t)?;
            let (bytes, _) = Checkpoint::new(&state).to_bytes()?;
            done(CheckpointFile::from_bytes("bytes", bytes)?.restore(&mut state)?)
        }),
    ]
}
