//! What can be trained.

use candle_core::{DType, Result, Tensor};
use candle_nn::{Module, loss::cross_entropy};
use optimisers::Model;

use crate::data::Digits;
use crate::model::Mlp;

/// Samples and a network for them.
pub(crate) trait Problem: Sized {
    type Network: Model;

    /// The name in result lines.
    const NAME: &'static str;
    /// The name in words.
    const TITLE: &'static str;
    /// The learning rate.
    const ETA: f64;

    /// A network with random weights where the samples are, the same in every dtype but for rounding.
    fn network(&self, seed: u64, dtype: DType) -> Result<Self::Network>;

    /// The same samples for a network of another dtype.
    fn to_dtype(&self, dtype: DType) -> Result<Self>;

    /// How many samples there are to train on.
    fn samples(&self) -> usize;

    /// The mean loss of the samples of the given numbers, in F32.
    fn loss(&self, network: &Self::Network, numbers: &[u32]) -> Result<Tensor>;

    /// The part of the test samples that is told right, for a problem that has a right and a wrong.
    fn accuracy(&self, network: &Self::Network) -> Result<Option<f32>>;
}

impl Problem for Digits {
    type Network = Mlp;

    const NAME: &'static str = "digits";
    const TITLE: &'static str = "handwritten digits";
    const ETA: f64 = 1e-3;

    fn network(&self, seed: u64, dtype: DType) -> Result<Mlp> {
        Mlp::new(seed, dtype, self.device())
    }

    fn to_dtype(&self, dtype: DType) -> Result<Self> {
        self.to_dtype(dtype)
    }

    fn samples(&self) -> usize {
        self.train.len()
    }

    fn loss(&self, mlp: &Mlp, numbers: &[u32]) -> Result<Tensor> {
        let batch = self.train.batch(numbers)?;
        // In f32, as in the digits example: a mean of exponentials is no place for 8 bits of precision.
        cross_entropy(&mlp.forward(&batch.pixels)?.to_dtype(DType::F32)?, &batch.labels)
    }

    fn accuracy(&self, mlp: &Mlp) -> Result<Option<f32>> {
        mlp.accuracy(&self.test).map(Some)
    }
}
