//! What changes from step to step.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::kernel::{KernelArgument, KernelArray, PrintedKernel};
use crate::numbers::DType;

/// One step of a parameter: the kernel to launch, and the numbers of this step.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PrintedStep {
    /// The same in most steps; another where the rule computes something else, as at the end of a window of
    /// [`AccumGrad`](crate::AccumGrad).
    pub kernel: Arc<PrintedKernel>,
    /// Hyper-parameters, bias corrections and whatever else the code takes by value, computed as an update
    /// does. They are rounded to the kernel's [arithmetic](PrintedKernel::arithmetic) when they are passed.
    pub scalars: Vec<f64>,
    /// What decides random bits, of [`StochasticRounding`](crate::StochasticRounding); 0 for others.
    pub key: u64,
    /// Whether the parameter moves. `false` where a gradient is only collected.
    pub moves: bool,
}

/// How far a [`Printed`](super::Printed) has come: what a program that is to be resumed has to keep besides
/// the buffers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PrintedProgress {
    /// The counters by their names in checkpoints, such as `t`, the number of steps taken.
    pub counters: Vec<(String, u64)>,
    /// The numbers that a rule remembers for a parameter as a whole, such as the sum of weights of
    /// [`ScheduleFree`](crate::ScheduleFree).
    pub numbers: Vec<(String, f64)>,
    /// The calls of windows of [`AccumGrad`](crate::AccumGrad) that are open.
    pub calls: u64,
}

impl PrintedStep {
    /// The values of all arguments for a parameter of so many elements, each at the front of a word: what
    /// `kernelParams` of `cuLaunchKernel` points to, one word for each.
    ///
    /// `address` is asked for the address of each array.
    pub fn words(&self, length: usize, mut address: impl FnMut(&KernelArray) -> u64) -> Vec<u64> {
        let scalar = |value: f64| match self.kernel.arithmetic {
            DType::F64 => value.to_bits(),
            _ => {
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
