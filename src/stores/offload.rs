use std::borrow::Cow;

use crate::error::Result;
use crate::rule::field::FieldValue;
use crate::rule::{Described, Description, IntoOptimiser, Optimiser};

/// Keeps the state of parameters of other devices in the CPU's memory, and updates them on the CPU.
///
/// A step brings gradients to the CPU and parameters back to their device:
///
/// ```text
/// dx = the gradient, brought to the CPU
/// x̂  = optimiser(x̂, dx)         x̂ and all state are on the CPU, and so is the arithmetic
/// x  = x̂, brought to the device in the parameter's dtype
/// ```
///
/// The device needs memory for parameters and gradients only, at the price of two transfers per step. The
/// numbers are those of `optimiser` on the CPU, bit for bit. For a parameter on the CPU this wrapper changes
/// nothing.
///
/// `Offload` wraps any optimiser, and can be chosen per parameter (with [`setup_with`](crate::setup_with)). A
/// norm over several parameters includes those of all devices. Source: Ren et al. 2021, "ZeRO-Offload",
/// [arXiv 2101.06840](https://arxiv.org/abs/2101.06840).
///
/// # State
/// x̂ is the state tensor `master`, in CPU memory. If `optimiser` is a
/// [`MixedPrecision`](crate::MixedPrecision), x̂ is the master of that wrapper (4 bytes in F32). Otherwise x̂
/// is a copy of the parameter in the parameter's dtype (2 or 4 bytes; 8 in F64). The optimiser's own state
/// comes in addition: 8 bytes for the moments of AdamW, and 2.125 for what
/// [`SplitMaster`](crate::SplitMaster) keeps of a master. The table has bytes per element of a bf16
/// parameter:
///
/// | | on the device | on the CPU |
/// | --- | --- | --- |
/// | `MixedPrecision(F32, AdamW)` | 2 + 12 | 0 |
/// | `Offload(MixedPrecision(F32, AdamW))` | 2 | 12 |
/// | `Offload(SplitMaster(AdamW))` | 2 | 2 + 10.125 |
///
/// Three kinds of memory are not state, and [`bytes`](crate::StateTree::bytes) does not count them:
///
/// - on the CPU, if the master has another dtype than the parameter, a *staging* buffer of the parameter's
///   size, with the rounded parameter for the upload;
/// - on the CPU during a step, the gradients of three batches (see below): one is downloaded, one waits and
///   one is computed. If a norm, or the check that gradients are finite, comes first, the gradients of all
///   parameters are in memory;
/// - on the device, the copy that one transfer needs, at most as large as one parameter.
///
/// The parameter follows x̂, as with any master. In every step [`update`](crate::update) downloads a sample
/// of each parameter: runs of 64 elements, two runs for each million elements, but at least 16. If the sample
/// shows that the parameter was changed on its device, `update` refuses it. A sample shows that a parameter
/// has new weights, but can miss a change of a few elements.
/// [`check_masters`](crate::StateTree::check_masters) compares all elements.
/// [`refresh_masters`](crate::StateTree::refresh_masters) sets x̂ to the parameters that were changed.
/// [`set_masters`](crate::StateTree::set_masters), [`masters`](crate::StateTree::masters) and checkpoints
/// treat x̂ as a master.
///
/// A checkpoint can be restored on any other device. With [`converting`](crate::CheckpointFile::converting)
/// it can also be restored into a state without this wrapper. [`rebind`](crate::StateTree::rebind) to a model
/// on another device moves no state. `rebind` only makes or drops the tensors that this wrapper adds: the
/// staging buffer, or x̂ if it is a copy of the parameter.
///
/// # Speed
/// Parameters are updated in batches of about a million elements: several parameters, or a piece of a large
/// one. Transfers have threads of their own: while one batch is computed, the gradients of the next batch are
/// downloaded and the parameters of the batch before are uploaded. A parameter is not divided if its rule
/// needs the whole tensor or its gradient is not contiguous. If a norm, or the check that gradients are
/// finite, comes first, all gradients are downloaded before it, and only uploads overlap.
///
/// # Errors
/// [`setup`](crate::setup) refuses an `Offload` in an `Offload`, and over [several
/// ranks](crate::Setup::over) every `Offload`.
///
/// # Departures
/// DeepSpeed downloads gradients during the backward pass, through pinned memory, and can delay an update by
/// a step. candle returns gradients only after the backward pass, and transfers through ordinary memory. Here
/// no step is delayed, and nothing is divided among several devices.
///
/// ```
/// use candle_core::{DType::{BF16, F32}, Device, Var};
/// use optimisers::{AdamW, MixedPrecision, Offload, setup, update};
///
/// let device = Device::cuda_if_available(0)?;
/// let x = Var::ones(3, BF16, &device)?;
/// let mut state = setup(Offload::new(MixedPrecision::new(F32, AdamW::new(1e-3))), &x)?;
/// for _ in 0..4 {
///     update(&mut state, &x, &x.sum_all()?.backward()?)?;
/// }
/// assert_eq!(x.to_dtype(F32)?.to_vec1::<f32>()?, [0.99609375; 3]);
/// assert_eq!(state.bytes(), 3 * 12);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a rule does nothing by itself: pass it to `setup`"]
#[derive(Clone, Debug)]
pub struct Offload(Optimiser);

impl Offload {
    /// Runs `inner` on the CPU.
    pub fn new(inner: impl IntoOptimiser) -> Self {
        Offload(inner.into_optimiser().offloaded())
    }

    /// Treats parameters on the CPU as if they were on another device: for tests without such a device.
    ///
    /// ```
    /// use candle_core::{DType::F32, Device, Var};
    /// use optimisers::{Adam, Offload, setup};
    ///
    /// let x = Var::ones(3, F32, &Device::Cpu)?;
    /// assert_eq!(setup(Offload::new(Adam::new(1e-3)), &x)?.bytes(), 3 * 8);
    /// assert_eq!(setup(Offload::new(Adam::new(1e-3)).everywhere(), &x)?.bytes(), 3 * (4 + 8));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn everywhere(self) -> Self {
        Offload(self.0.offloaded_everywhere())
    }
}

impl Described for Offload {
    fn description(&self) -> Cow<'_, Description> {
        Described::description(&self.0)
    }

    fn write(&mut self, values: &[(usize, FieldValue)]) -> Result<()> {
        self.0.write(values)
    }

    fn check_described(&self) -> Result<()> {
        self.0.check_described()
    }
}

impl IntoOptimiser for Offload {
    fn into_optimiser(self) -> Optimiser {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::rule::State;
    use crate::rules::Adam;
    use crate::stores::MixedPrecision;
    use crate::tensors::{Device, Var};

    fn names(state: &State) -> Vec<String> {
        state.tensors().into_iter().map(|(name, _)| name).collect()
    }

    /// Moves a state to another device and back, as `rebind` does.
    #[test]
    fn the_copy_of_a_parameter_is_where_it_is_needed() {
        for (mixed, dtype, near_names, far_names) in [
            (false, DType::F32, vec!["m", "v"], vec!["master", "m", "v"]),
            (true, DType::F32, vec!["m", "v"], vec!["master", "m", "v"]),
            (
                true,
                DType::BF16,
                vec!["master", "m", "v"],
                vec!["master", "m", "v"],
            ),
        ] {
            let x = Var::ones(3, dtype, &Device::Cpu).expect("a variable");
            let adam = Adam::new(0.1);
            let inner = match mixed {
                true => Optimiser::new(MixedPrecision::new(DType::F32, adam)),
                false => Optimiser::new(adam),
            };
            let near = Optimiser::new(Offload::new(inner.clone()));
            let far = Optimiser::new(Offload::new(inner).everywhere());
            let state = near.make_state(&x).expect("a state");
            assert_eq!(names(&state), near_names);
            let moved = far.state_for(&state, &x).expect("a state elsewhere");
            assert_eq!(
                (names(&moved), moved.staging.is_some()),
                (far_names.iter().map(|name| name.to_string()).collect(), true)
            );
            let third = far.state_for(&moved, &x).expect("a state on a third device");
            assert_eq!((names(&third), third.staging.is_some()), (names(&moved), true));
            let returned = near.state_for(&third, &x).expect("a state on the CPU");
            assert_eq!(
                (names(&returned), returned.staging.is_some()),
                (names(&state), false)
            );
        }
    }
}
