//! Checkpoints of a state that is divided among ranks: one file, the same as that of one process, read by any
//! number of ranks, or by none.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use optimisers::{
    AccumGrad, Adafactor, Adam, AdamW, Checkpoint, CheckpointFile, ClipGlobalNorm, Communicator, ErrorKind,
    Kahan, LocalRank, Lookahead, LossScaler, MixedPrecision, Optimiser, OptimiserChain, Prodigy, Q8,
    ScheduleFree, Setup, SplitMaster, StateTree, StateValue, StochasticRounding, StoreAs, setup, update,
};

use support::common::{Grads, Vars, bits, model, muon, says, tensor, var};
use support::crafted_checkpoints::file_of;
use support::reports::{gradients, parameters};
use support::threads::on;

const SIZES: [usize; 5] = [1, 2, 3, 4, 8];

/// Parameters of all kinds: large and empty ones, a scalar, one that is tied, one that is to be frozen, and a
/// variable that is none.
fn variables(dtype: DType, seed: u64) -> Vars {
    let mut model = model(&parameters(dtype));
    model.insert("scalar".to_string(), var(&tensor(seed, &[], dtype)));
    model.insert("frozen".to_string(), var(&tensor(seed, &[7], dtype)));
    model.insert("tied".to_string(), model["1"].clone());
    model.insert(
        "tokens".to_string(),
        var(&Tensor::new(&[seed as u32, 5], crate::model::models::CPU).expect("a tensor")),
    );
    model["2"]
        .set(&tensor(seed + 2, &[130, 140], dtype))
        .expect("values");
    model
}

/// A state in one process, or of a rank.
fn state_of(world: Option<&LocalRank>, optimiser: &Optimiser, model: &Vars) -> StateTree {
    let mut state = match world {
        Some(world) => Setup::over(world).build(optimiser.clone(), model),
        None => setup(optimiser.clone(), model),
    }
    .expect("a state");
    state.at("frozen").expect("a leaf").freeze();
    state
}

/// Equal on all ranks, and of 16 bits, so that sums of three are exact in f32.
fn train(state: &mut StateTree, model: &Vars, calls: std::ops::Range<u64>) {
    for call in calls {
        let mut grads: Grads = gradients(call, 0, DType::BF16);
        grads.insert("scalar".to_string(), tensor(call, &[], DType::BF16));
        update(state, model, &grads).expect("an update");
    }
}

fn full<'s>(state: &'s StateTree, model: &'s Vars) -> Checkpoint<'s> {
    Checkpoint::new(state)
        .model(model)
        .bytes("step", "4")
        .bytes("text", "\u{1f511}\n\"")
        .scaler(&LossScaler::dynamic())
}

fn optimisers() -> Vec<Optimiser> {
    let clipped = || OptimiserChain::new((ClipGlobalNorm::new(0.5), AdamW::new(0.1)));
    vec![
        Optimiser::new(MixedPrecision::new(DType::F32, AdamW::new(0.1))),
        Optimiser::new(MixedPrecision::new(
            DType::F64,
            OptimiserChain::new((AccumGrad::new(3), clipped())),
        )),
        Optimiser::new(SplitMaster::new(clipped())),
        Optimiser::new(SplitMaster::of_24_bits(StoreAs::new([("v", Q8)], clipped()))),
        Optimiser::new(Kahan::new(OptimiserChain::new((
            Adam::new(0.1),
            Lookahead::new(3),
        )))),
        Optimiser::new(MixedPrecision::new(DType::F32, Adafactor::new(0.1))),
        Optimiser::new(OptimiserChain::new((muon(), Adam::new(0.1)))),
        Optimiser::new(MixedPrecision::new(DType::F32, Prodigy::new(1.0))),
        Optimiser::new(StochasticRounding::new(7, AdamW::new(0.1))),
        Optimiser::new(StoreAs::new(
            [("m", DType::BF16)],
            OptimiserChain::new((AccumGrad::new(2), Adam::new(0.1))),
        )),
        Optimiser::new(MixedPrecision::new(DType::F32, ScheduleFree::new(0.1))),
        Optimiser::new(MixedPrecision::new(DType::F32, StoreAs::all(Q8, clipped()))),
    ]
}

/// The file after four calls, that after three more, and that of the masters after the four, by one process.
fn of_one_process(optimiser: &Optimiser) -> [Vec<u8>; 3] {
    let folder = tempfile::tempdir().expect("a folder");
    let model = variables(DType::BF16, 1);
    let mut state = state_of(None, optimiser, &model);
    train(&mut state, &model, 0..4);
    let early = file_of(full(&state, &model));
    state
        .save_masters(&model, folder.path().join("masters"))
        .expect("a save");
    let masters = fs::read(folder.path().join("masters")).expect("the file");
    train(&mut state, &model, 4..7);
    [early, file_of(full(&state, &model)), masters]
}

/// Files of any number of ranks are those of one process, so that what resumes from one resumes from all.
#[test]
fn files_do_not_know_how_many_ranks_wrote_them() {
    for optimiser in optimisers() {
        let files = Arc::new(of_one_process(&optimiser));
        for size in SIZES {
            let folder = Arc::new(tempfile::tempdir().expect("a folder"));
            let (files, optimiser) = (files.clone(), optimiser.clone());
            on(size, move |world| {
                let what = format!("{} on {size}", optimiser.name());
                let at = |name: &str| folder.path().join(name);
                let same = |name: &str, file: &[u8]| {
                    assert!(fs::read(at(name)).expect("the file") == file, "{what}: {name}")
                };
                let model = variables(DType::BF16, 1);
                let mut state = state_of(Some(&world), &optimiser, &model);
                train(&mut state, &model, 0..4);
                if world.rank() > 0 {
                    // What is no parameter is the first rank's.
                    model["tokens"]
                        .set(&model["tokens"].zeros_like().expect("zeros"))
                        .expect("values");
                }
                full(&state, &model).save(at("early")).expect("a save");
                state.save_masters(&model, at("masters")).expect("a save");
                same("early", &files[0]);
                same("masters", &files[2]);

                let model = variables(DType::BF16, 50);
                let mut state = state_of(Some(&world), &optimiser, &model);
                train(&mut state, &model, 11..13);
                let file = CheckpointFile::open(at("early")).expect("a checkpoint");
                file.restore_with_model(&mut state, &model).expect("a restore");
                CheckpointFile::open(at("early"))
                    .and_then(|file| file.restore(&mut state))
                    .expect("a load");
                train(&mut state, &model, 4..7);
                full(&state, &model).save(at("late")).expect("a save");
                same("late", &files[1]);
            });
        }
    }
}

/// Whole entries are set on all ranks, which take their parts.
#[test]
fn entries_are_set_over_ranks() {
    for optimiser in optimisers() {
        let expected = Arc::new(of_one_process(&optimiser));
        let folder = Arc::new(tempfile::tempdir().expect("a folder"));
        on(3, move |world| {
            let alone = variables(DType::BF16, 1);
            let mut whole = state_of(None, &optimiser, &alone);
            train(&mut whole, &alone, 0..4);
            let model = variables(DType::BF16, 50);
            let mut state = state_of(Some(&world), &optimiser, &model);
            train(&mut state, &model, 11..13);
            model
                .iter()
                .for_each(|(path, x)| x.set(&alone[path]).expect("values"));
            // Each rank in another order, as maps have.
            let mut entries = whole.entries().expect("entries");
            entries.rotate_left(5 * world.rank());
            state.set_entries(entries).expect("new entries");
            full(&state, &model)
                .save(folder.path().join("early"))
                .expect("a save");
            let file = fs::read(folder.path().join("early")).expect("the file");
            assert!(file == expected[0], "{}", optimiser.name());

            says(
                &state.entries().expect_err("a part"),
                &["`entries` needs the whole state"],
            );
            says(
                &full(&state, &model).to_bytes().expect_err("a part"),
                &["`to_bytes` needs the whole state"],
            );
            let steps = StateValue::Counter(world.rank() as u64);
            let differs = state
                .set_entries([("0", "leaf.steps", steps)])
                .expect_err("other entries");
            assert_eq!(differs.kind(), ErrorKind::Ranks, "{differs}");
        });
    }
}

/// A file of another precision, in which one parameter has had no gradient and was moved by others.
#[test]
fn conversions_are_those_of_one_process() {
    let mixed = Optimiser::new(MixedPrecision::new(DType::F32, Adam::new(0.1)));
    let bare = Optimiser::new(Adam::new(0.1));
    let model = variables(DType::BF16, 1);
    let mut state = state_of(None, &mixed, &model);
    update(&mut state, &model, &gradients(1, 0, DType::BF16)).expect("an update");
    let moved = (model["scalar"].as_tensor() + 1.0).expect("a sum");
    model["scalar"].set(&moved).expect("a value");
    let narrow = file_of(full(&state, &model));
    let model = variables(DType::F32, 1);
    let mut state = state_of(None, &bare, &model);
    train(&mut state, &model, 0..2);
    let wide = file_of(full(&state, &model));
    for (file, dtype, optimiser) in [
        (&narrow, DType::F32, &bare),
        (&wide, DType::BF16, &mixed),
        (&narrow, DType::F16, &mixed),
    ] {
        let restored = move |world: Option<&LocalRank>, file: &[u8], optimiser: &Optimiser| {
            let model = variables(dtype, 9);
            let mut state = state_of(world, optimiser, &model);
            let file = CheckpointFile::from_bytes("file", file.to_vec()).expect("a checkpoint");
            file.converting()
                .restore_with_model(&mut state, &model)
                .expect("a restore");
            (model, state)
        };
        let (model, state) = restored(None, file, optimiser);
        let expected = file_of(full(&state, &model));
        let (file, optimiser) = (file.clone(), optimiser.clone());
        let folder = Arc::new(tempfile::tempdir().expect("a folder"));
        on(3, move |world| {
            let (model, state) = restored(Some(&world), &file, &optimiser);
            full(&state, &model)
                .save(folder.path().join("run"))
                .expect("a save");
            assert!(
                fs::read(folder.path().join("run")).expect("the file") == expected,
                "{dtype:?} on rank {}",
                world.rank()
            );
        });
    }
}

/// Each rank sets its masters, and the parameters as their owners do.
#[test]
fn new_masters_are_those_of_one_process() {
    let values = || -> Grads {
        let model = variables(DType::F32, 30);
        let all = model
            .iter()
            .filter(|(path, x)| *path != "tied" && x.dtype().is_float());
        all.map(|(path, x)| (path.clone(), (x.as_tensor() * 1.0001).expect("a product")))
            .collect()
    };
    for optimiser in optimisers() {
        let [folder, expected] = [(); 2].map(|()| Arc::new(tempfile::tempdir().expect("a folder")));
        let run = {
            let optimiser = optimiser.clone();
            move |world: Option<&LocalRank>, path: PathBuf| {
                let model = variables(DType::BF16, 1);
                let mut state = state_of(world, &optimiser, &model);
                train(&mut state, &model, 0..2);
                state.set_masters(&model, &values()).expect("new masters");
                state
                    .check_masters(&model)
                    .expect("parameters that are their masters rounded");
                full(&state, &model).save(&path).expect("a save");
                let parameters: Vec<_> = model
                    .values()
                    .map(|x| bits(&x.to_dtype(DType::F64).expect("values")))
                    .collect();
                (fs::read(&path).expect("the file"), parameters)
            }
        };
        let expected = run(None, expected.path().join("run"));
        for got in on(3, move |world| run(Some(&world), folder.path().join("run"))) {
            assert!(got == expected, "{}", optimiser.name());
        }
    }
}
