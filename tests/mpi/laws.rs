//! What holds over ranks, of any number and over any transport.

use std::fs;
use std::process::ExitCode;

use candle_core::{DType, Tensor};
use optimisers::mpi::{World, run};
use optimisers::{
    AccumGrad, AdamW, Checkpoint, CheckpointFile, ClipGlobalNorm, Communicator, Engine, Error, Kahan, LAMB,
    MixedPrecision, Muon, Optimiser, OptimiserChain, Prodigy, Setup, SplitMaster, StateTree, Update, setup,
    update,
};

use crate::job::folder;
use support::common::{Vars, model, snapshot, tensor};
use support::random_programs as letters;
use support::reports::{Said, assert_part, gradients, parameters, said, steps};
use support::threads::on;

pub type Case = (&'static str, fn() -> ExitCode);

pub const CASES: &[Case] = &[
    ("bytes_arrive", || rank(bytes_arrive)),
    ("equal_gradients", || rank(equal_gradients)),
    ("different_gradients", || rank(different_gradients)),
    ("checkpoints", || rank(checkpoints)),
    ("an_error_is_one_on_all", || rank(an_error_is_one_on_all)),
];

/// Runs this process as a rank.
pub fn rank(work: fn(World) -> Result<(), Error>) -> ExitCode {
    match run(work) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Random lengths cut in random places, empty ones among them, and some that no buffer of MPI holds.
fn bytes_arrive(world: World) -> Result<(), Error> {
    for call in 0..100 {
        letters::call(&world, 7, call)?;
    }
    let (size, me) = (world.size(), world.rank());
    let own: Vec<Vec<u8>> = (0..size)
        .map(|to| vec![(10 * me + to) as u8; if to == me { 0 } else { (5 << 20) + me }])
        .collect();
    let mut got: Vec<Vec<u8>> = (0..size)
        .map(|from| vec![0; if from == me { 0 } else { (5 << 20) + from }])
        .collect();
    let to: Vec<Vec<&[u8]>> = own.iter().map(|bytes| bytes.chunks(1 << 20).collect()).collect();
    let mut from: Vec<Vec<&mut [u8]>> = got
        .iter_mut()
        .map(|bytes| {
            if bytes.is_empty() {
                vec![]
            } else {
                vec![&mut bytes[..]]
            }
        })
        .collect();
    world.exchange(&to, &mut from)?;
    for (from, bytes) in got.iter().enumerate() {
        assert!(
            bytes.iter().all(|byte| *byte == (10 * from + me) as u8),
            "from {from}"
        );
    }
    Ok(())
}

fn optimisers() -> Vec<Optimiser> {
    let clipped = || OptimiserChain::new((ClipGlobalNorm::new(0.5), AdamW::new(0.1)));
    vec![
        Optimiser::new(MixedPrecision::new(DType::F32, AdamW::new(0.1))),
        Optimiser::new(MixedPrecision::new(DType::F32, clipped())),
        Optimiser::new(SplitMaster::new(OptimiserChain::new((
            AccumGrad::new(2),
            LAMB::new(0.1),
        )))),
        Optimiser::new(Kahan::new(Prodigy::new(1.0))),
        Optimiser::new(MixedPrecision::new(
            DType::F32,
            Muon::new(0.1).with_fallback(AdamW::new(0.1)),
        )),
    ]
}

/// The bits of one process, norms included. Sums of up to four equal numbers of 16 bits are exact.
fn equal_gradients(world: World) -> Result<(), Error> {
    for optimiser in optimisers() {
        let dtypes = [DType::BF16; 2];
        let whole = steps(Setup::default(), Engine::Fused, optimiser.clone(), dtypes, 4);
        let own = steps(Setup::over(&world), Engine::Fused, optimiser.clone(), dtypes, 4);
        assert_part(&own, &whole, &optimiser.name());
    }
    Ok(())
}

/// What ranks say that have gradients and weights of their own.
fn differing(world: &(impl Communicator + Clone + 'static), optimiser: Optimiser) -> Vec<Said> {
    let model = model(&parameters(DType::BF16));
    let mut state = Setup::over(world).build(optimiser, &model).expect("a state");
    let step = |call| {
        let weight = 1 + (world.rank() as u64 + call) % 3;
        let grads = gradients(call, world.rank() as u64, DType::BF16);
        let outcome = Update::new(&mut state)
            .weight(weight)
            .apply(&model, &grads)
            .expect("an update");
        said(outcome, &model, &state)
    };
    (0..3).map(step).collect()
}

/// The bits of ranks that are threads of one process.
fn different_gradients(world: World) -> Result<(), Error> {
    for optimiser in optimisers() {
        let own = differing(&world, optimiser.clone());
        let name = optimiser.name();
        let threads = on(world.size(), move |world| differing(&world, optimiser.clone()));
        assert_part(&own, &threads[world.rank()], &name);
    }
    Ok(())
}

fn train(state: &mut StateTree, model: &Vars, calls: std::ops::Range<u64>) -> Result<(), Error> {
    calls
        .into_iter()
        .try_for_each(|call| update(state, model, &gradients(call, 0, DType::BF16)).map(drop))
}

/// The file of one process, byte for byte, from which any number of ranks goes on.
fn checkpoints(world: World) -> Result<(), Error> {
    for optimiser in optimisers() {
        let file = |state: &StateTree, model: &Vars| {
            let file = tempfile::NamedTempFile::new().expect("a file");
            Checkpoint::new(state).model(model).save(file.path())?;
            Ok::<_, Error>(fs::read(file.path()).expect("the file"))
        };
        let whole = model(&parameters(DType::BF16));
        let mut state = setup(optimiser.clone(), &whole)?;
        train(&mut state, &whole, 0..3)?;
        let early = file(&state, &whole)?;
        train(&mut state, &whole, 3..5)?;
        let late = file(&state, &whole)?;

        let path = folder().join(optimiser.name().replace(['/', ' '], "_"));
        let own = model(&parameters(DType::BF16));
        let mut state = Setup::over(&world).build(optimiser.clone(), &own)?;
        train(&mut state, &own, 0..3)?;
        Checkpoint::new(&state).model(&own).save(&path)?;
        assert!(
            fs::read(&path).expect("the file") == early,
            "{}",
            optimiser.name()
        );
        let own = model(&parameters(DType::BF16));
        let mut state = Setup::over(&world).build(optimiser.clone(), &own)?;
        CheckpointFile::open(&path)?.restore_with_model(&mut state, &own)?;
        train(&mut state, &own, 3..5)?;
        Checkpoint::new(&state).model(&own).save(&path)?;
        assert!(fs::read(&path).expect("the file") == late, "{}", optimiser.name());
    }
    Ok(())
}

/// Each rank in turn has a gradient of another shape, another rate or another call: all return an error that
/// says who and what, nothing has moved, and the next call is as if there had been none.
fn an_error_is_one_on_all(world: World) -> Result<(), Error> {
    let model = model(&parameters(DType::BF16));
    let mut state = Setup::over(&world).build(MixedPrecision::new(DType::F32, AdamW::new(0.1)), &model)?;
    train(&mut state, &model, 0..1)?;
    let refused = |state: &mut StateTree,
                   what: &str,
                   words: &[&str],
                   call: &dyn Fn(&mut StateTree) -> Result<(), Error>| {
        let before = snapshot(&model, state);
        let error = call(state).expect_err(what).to_string();
        assert!(
            words.iter().all(|word| error.contains(word)),
            "rank {}, {what}: {error}",
            world.rank()
        );
        assert!(snapshot(&model, state) == before, "{what}");
    };
    for bad in 0..world.size() {
        let is_bad = world.rank() == bad;
        // Of two ranks nobody knows which is the odd one, and rank 1 is named.
        let name = format!("rank {}", if world.size() == 2 { 1 } else { bad });
        let other_rank = format!("rank {bad} refused");
        let shape = if is_bad { "[2]" } else { &other_rank };
        refused(&mut state, "another shape", &[shape, "\"0\""], &|state| {
            let mut grads = gradients(1, 0, DType::BF16);
            if is_bad {
                grads.insert("0".to_string(), tensor(1, &[2], DType::BF16));
            }
            update(state, &model, &grads).map(drop)
        });
        if world.size() > 1 {
            state.adjust(if is_bad { 0.2 } else { 0.1 })?;
            refused(
                &mut state,
                "another rate",
                &[&name, "the optimiser of", "eta = 0.2"],
                &|state| train(state, &model, 1..2),
            );
            state.adjust(0.1)?;
            refused(
                &mut state,
                "another call",
                &["called", "update", "save"],
                &|state| match is_bad {
                    true => Checkpoint::new(state).save(folder().join("unsaved")).map(drop),
                    false => train(state, &model, 1..2),
                },
            );
            assert!(!folder().join("unsaved").exists());
        }
    }
    let all: Vec<Tensor> = model.values().map(|x| x.as_tensor().clone()).collect();
    train(&mut state, &model, 1..3)?;
    let expected = steps(
        Setup::default(),
        Engine::Fused,
        Optimiser::new(MixedPrecision::new(DType::F32, AdamW::new(0.1))),
        [DType::BF16; 2],
        3,
    );
    let bits: Vec<Vec<u64>> = all.iter().map(support::common::bits).collect();
    assert!(bits == expected[2].model, "as if there had been no errors");
    Ok(())
}
