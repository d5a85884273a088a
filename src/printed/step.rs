//! A printed step, and the progress of a training.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::kernel::{KernelArgument, KernelArray, PrintedKernel};
use crate::numbers::DType;
use crate::rule::State;

/// One step of a parameter: the kernel to launch, and the numbers of this step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PrintedStep {
    /// The kernel. Most steps have the same kernel. A step in which the rule computes something else has
    /// another kernel, as at the end of a window of [`AccumGrad`](crate::AccumGrad).
    pub kernel: Arc<PrintedKernel>,
    /// The scalars that the code takes by value, such as hyper-parameters and bias corrections.
    ///
    /// The scalars are computed as in an update, and rounded to the kernel's
    /// [arithmetic](PrintedKernel::arithmetic) when they are passed.
    pub scalars: Vec<f64>,
    /// The key of the random bits of [`StochasticRounding`](crate::StochasticRounding); 0 for other
    /// optimisers.
    pub key: u64,
    /// Whether the parameter moves; `false` if the step only collects a gradient.
    pub moves: bool,
}

/// The progress of a [`Printed`](super::Printed), which a program saves with the buffers to resume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PrintedProgress {
    /// The rules of the optimiser and how it stores parameters, such as `MixedPrecision(F32, Adam)`.
    pub optimiser: String,
    /// The counters by their names in checkpoints, such as `t`, the number of steps taken.
    pub counters: Vec<(String, u64)>,
    /// The numbers that rules keep for a whole parameter, such as the sum of weights of
    /// [`ScheduleFree`](crate::ScheduleFree).
    pub numbers: Vec<(String, f64)>,
    /// The calls that open windows of [`AccumGrad`](crate::AccumGrad) have counted.
    pub calls: u64,
}

impl PrintedProgress {
    /// The optimiser, and the names of its counters and numbers.
    pub(super) fn form(&self) -> String {
        let counters = self.counters.iter().map(|(name, _)| name);
        let numbers = self.numbers.iter().map(|(name, _)| name);
        let [counters, numbers] =
            [counters.collect(), numbers.collect()].map(|names: Vec<_>| format!("{names:?}"));
        format!(
            "{} with counters {counters} and numbers {numbers}",
            self.optimiser
        )
    }

    /// Sets the counters and numbers of a state of the same optimiser.
    pub(super) fn write_to(&self, state: &mut State) {
        let values = state.values_mut();
        values
            .counters
            .into_iter()
            .zip(&self.counters)
            .for_each(|(counter, (_, next))| *counter = *next);
        values
            .numbers
            .into_iter()
            .zip(&self.numbers)
            .for_each(|(number, (_, next))| *number = *next);
    }
}

impl PrintedStep {
    /// The values of all arguments for a parameter of `length` elements, each at the front of a word.
    ///
    /// `kernelParams` of `cuLaunchKernel` points to these words, one for each argument.
    ///
    /// `address` returns the address of each array.
    pub fn words(&self, length: usize, mut address: impl FnMut(&KernelArray) -> u64) -> Vec<u64> {
        let scalar = |value: f64| match self.kernel.arithmetic {
            DType::F64 => value.to_bits(),
            _ => {
                // The F32 is at the front, because a launch reads the first 4 bytes.
                let [a, b, c, d] = (value as f32).to_ne_bytes();
                u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0])
            }
        };
        let word = |argument: &KernelArgument| match argument {
            KernelArgument::Length => length as u64,
            KernelArgument::Key => self.key,
            KernelArgument::Array(array) => address(array),
            KernelArgument::Scalar(index) => scalar(self.scalars[*index]),
        };
        self.kernel.arguments.iter().map(word).collect()
    }
}
