//! Random models, optimisers and gradients: portable code, another number of ranks and a run that is resumed
//! have the bits of the run.
//!
//! `RANDOM_MODELS` says how many models there are (100 if not said). A failure names its number.

use optimisers::{
    Checkpoint, CheckpointFile, DType, Engine, IntoOptimiser, Isa, LocalRank, Optimiser, Result, Setup,
    StateTree, Update, ranks, setup,
};
use optimisers_plain::{Named, Plain, Vector, all_rules, hash, numbers, saved, stored};

/// Random choices that a seed decides.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % end as u64) as usize
    }

    fn model(&mut self) -> Plain {
        let count = 1 + self.below(6);
        let named = |path: usize| {
            let shape: Vec<usize> = match self.below(8) {
                0 => vec![],
                1 => vec![3, 0],
                2 => vec![1],
                3 => vec![1 + self.below(20_000)],
                4 => vec![1 + self.below(4), 1 + self.below(5), 1 + self.below(6)],
                _ => vec![1 + self.below(30), 1 + self.below(200)],
            };
            let dtype = [DType::F16, DType::BF16, DType::F32, DType::F64][self.below(4)];
            let values = Vector::new(dtype, &numbers(self.0, shape.iter().product()));
            Named {
                path: path.to_string(),
                shape,
                dtype,
                values,
            }
        };
        Plain((0..count).map(named).collect())
    }

    fn optimiser(&mut self) -> (String, Optimiser) {
        let rules = all_rules();
        let (name, rule) = &rules[self.below(rules.len())];
        let mut stored = stored(&|| rule.clone());
        let (store, optimiser) = stored.swap_remove(self.below(stored.len()));
        (format!("{name}, {store}"), optimiser)
    }
}

fn train(
    state: &mut StateTree,
    model: &mut Plain,
    steps: std::ops::Range<u64>,
    engine: Engine,
) -> Result<()> {
    for step in steps {
        let gradients = model.gradients(step);
        Update::new(state)
            .engine(engine)
            .apply(&model.lend(), &gradients.show())?;
    }
    Ok(())
}

/// The bits after six steps on each of these ranks.
fn on_ranks(count: usize, start: &Plain, optimiser: &(impl IntoOptimiser + Clone)) -> Vec<u64> {
    let of_rank = |world: LocalRank| -> Result<u64> {
        let mut model = start.clone();
        let mut state = Setup::over(&world).build(optimiser.clone(), &model.lend())?;
        train(&mut state, &mut model, 0..6, Engine::default())?;
        Ok(model.hash())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks(count)
            .into_iter()
            .map(|world| scope.spawn(|| of_rank(world)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a rank").expect("six steps"))
            .collect()
    })
}

#[test]
fn every_way_has_the_bits_of_the_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("checkpoint.safetensors");
    let count: u64 = std::env::var("RANDOM_MODELS").map_or(100, |count| count.parse().expect("a number"));
    let mut trained = 0;
    for number in 0..count {
        let mut dice = Dice(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let (start, (name, optimiser)) = (dice.model(), dice.optimiser());
        let made = |model: &mut Plain| setup(optimiser.clone(), &model.lend());
        let mut model = start.clone();
        // Some stores are for models of other dtypes.
        let Ok(mut state) = made(&mut model) else { continue };
        train(&mut state, &mut model, 0..3, Engine::default())
            .unwrap_or_else(|error| panic!("{number}: {name}: {error}"));
        Checkpoint::new(&state)
            .model(&model.lend())
            .save(&path)
            .expect("a checkpoint");
        train(&mut state, &mut model, 3..6, Engine::default()).expect("three steps");
        let expected = (model.hash(), hash(&saved(&state, &mut model)));

        let mut portable = start.clone();
        let mut state = made(&mut portable).expect("a state");
        train(&mut state, &mut portable, 0..6, Engine::FusedWith(Isa::PORTABLE)).expect("six steps");
        assert_eq!(
            (portable.hash(), hash(&saved(&state, &mut portable))),
            expected,
            "{number}: {name}, portable"
        );

        let mut resumed = start.clone();
        let mut state = made(&mut resumed).expect("a state");
        let file = CheckpointFile::open(&path).expect("the file");
        file.restore_with_model(&mut state, &resumed.lend())
            .expect("a restored state");
        train(&mut state, &mut resumed, 3..6, Engine::default()).expect("three steps");
        assert_eq!(
            (resumed.hash(), hash(&saved(&state, &mut resumed))),
            expected,
            "{number}: {name}, resumed"
        );

        // An offloaded state is of one process, and random rounding is drawn by rank.
        if !name.contains("offloaded") && !name.contains("stochastic") {
            // A sum of two or four equal gradients is exact, and so is their mean.
            let ranks = [2, 4][dice.below(2)];
            assert_eq!(
                on_ranks(ranks, &start, &optimiser),
                vec![expected.0; ranks],
                "{number}: {name}, {ranks} ranks"
            );
        }
        trained += 1;
    }
    assert!(trained > count / 2, "{trained} of {count} models were trained");
}
