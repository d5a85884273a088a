//! Steps of a model.

use std::cell::RefCell;
use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use optimisers::mpi::World;
use optimisers::{
    AdamW, ClipGlobalNorm, Communicator, Error, IntoOptimiser, MixedPrecision, OptimiserChain, Setup,
    StateTree, Update, ranks,
};

use crate::Case;
use crate::collectives::{all_reduce, wide};

/// A transformer's: an embedding, matrices and vectors.
pub fn sizes(millions: usize) -> Vec<usize> {
    let mut sizes = vec![millions << 18];
    for _ in 0..3 * millions / 4 {
        sizes.extend([1 << 20, 1 << 10]);
    }
    sizes
}

type Model = BTreeMap<String, Var>;
type Gradients = BTreeMap<String, Tensor>;

/// A model with its state.
struct Trained {
    model: Model,
    state: StateTree,
}

impl Trained {
    fn new(setup: Setup, optimiser: impl IntoOptimiser, sizes: &[usize]) -> Result<RefCell<Self>, Error> {
        let of_leaf = |(index, size): (usize, &usize)| {
            Ok((format!("{index:04}"), Var::from_tensor(&numbers(*size, index)?)?))
        };
        let model: Model = sizes
            .iter()
            .enumerate()
            .map(of_leaf)
            .collect::<Result<_, Error>>()?;
        let state = setup.build(optimiser, &model)?;
        Ok(RefCell::new(Trained { model, state }))
    }

    fn step(&mut self, gradients: &Gradients) -> Result<(), Error> {
        Update::new(&mut self.state)
            .apply(&self.model, gradients)
            .map(drop)
    }
}

/// Numbers between -1 and 1.
fn numbers(length: usize, seed: usize) -> Result<Tensor, Error> {
    let numbers: Vec<f32> = (0..length)
        .map(|index| ((index * 7919 + seed * 104_729) % 2001) as f32 * 1e-3 - 1.0)
        .collect();
    Ok(Tensor::from_vec(numbers, length, &Device::Cpu)?.to_dtype(DType::BF16)?)
}

/// All states that the cases have.
pub struct Steps {
    gradients: Gradients,
    whole: RefCell<Trained>,
    whole_clipped: RefCell<Trained>,
    world_of_one: RefCell<Trained>,
    sharded: RefCell<Trained>,
    sharded_clipped: RefCell<Trained>,
}

impl Steps {
    pub fn new(world: &World, sizes: &[usize]) -> Result<Self, Error> {
        let adamw = || AdamW::new(1e-3);
        let plain = || MixedPrecision::new(DType::F32, adamw());
        let clipped = || {
            MixedPrecision::new(
                DType::F32,
                OptimiserChain::new((ClipGlobalNorm::new(0.05), adamw())),
            )
        };
        let gradient = |(index, size): (usize, &usize)| {
            Ok((format!("{index:04}"), numbers(*size, 100 + index + world.rank())?))
        };
        let alone = ranks(1).remove(0);
        Ok(Steps {
            gradients: sizes
                .iter()
                .enumerate()
                .map(gradient)
                .collect::<Result<_, Error>>()?,
            whole: Trained::new(Setup::default(), plain(), sizes)?,
            whole_clipped: Trained::new(Setup::default(), clipped(), sizes)?,
            world_of_one: Trained::new(Setup::over(&alone), plain(), sizes)?,
            sharded: Trained::new(Setup::over(world), plain(), sizes)?,
            sharded_clipped: Trained::new(Setup::over(world), clipped(), sizes)?,
        })
    }

    fn case<'c>(
        &'c self,
        name: &'static str,
        baseline: &'static str,
        trained: &'c RefCell<Trained>,
    ) -> Case<'c> {
        Case {
            name,
            baseline,
            run: Box::new(|| trained.borrow_mut().step(&self.gradients)),
        }
    }

    pub fn cases(&self) -> Vec<Case<'_>> {
        vec![
            self.case("whole", "whole", &self.whole),
            Case {
                name: "data_parallel",
                baseline: "whole",
                run: Box::new(|| self.data_parallel()),
            },
            self.case("sharded", "whole", &self.sharded),
            self.case("world_of_one", "whole", &self.world_of_one),
            self.case("whole_clipped", "whole_clipped", &self.whole_clipped),
            self.case("sharded_clipped", "whole_clipped", &self.sharded_clipped),
        ]
    }

    /// What a framework does without parts: the sum in f32, and all of the update on every rank.
    fn data_parallel(&self) -> Result<(), Error> {
        let sum = |(path, gradient): (&String, &Tensor)| {
            let mut numbers: Vec<f32> = gradient.to_vec1::<half::bf16>()?.into_iter().map(wide).collect();
            all_reduce(&mut numbers);
            let length = numbers.len();
            Ok((path.clone(), Tensor::from_vec(numbers, length, &Device::Cpu)?))
        };
        let sums = self.gradients.iter().map(sum).collect::<Result<_, Error>>()?;
        self.whole.borrow_mut().step(&sums)
    }
}
