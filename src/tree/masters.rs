//! The high-precision copies of a model's parameters: reading, setting, refreshing, comparing.

use std::collections::BTreeMap;

use super::{Leaf, MasterValues, StateTree, values_of};
use crate::error::Result;
use crate::model::Model;
use crate::model::lent::Lent;
use crate::ranks::{Agreement, Call};
use crate::rule::Extent;
use crate::tensors::Tensor;

impl StateTree {
    /// Copies of the most precise value of each parameter, by path.
    ///
    /// That is its master, the sum of a split or compensated parameter and what the parameter lacks, or the
    /// parameter itself.
    ///
    /// If a parameter has never taken a step and is not its master rounded, the parameter itself is taken.
    /// BatchNorm's running statistics are an example.
    ///
    /// [`StateTree::save_masters`] writes these values to a file for other tools. Over
    /// [ranks](crate::Setup::over) all call this, and each gets whole tensors; into a file each writes only
    /// its parts. Without candle the numbers are read as those of [`Leaf::tensor`].
    ///
    /// # Errors
    /// If `model` is not the state's.
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Descent, MixedPrecision, setup, update};
    ///
    /// let x = vec![Var::ones(1, DType::BF16, &Device::Cpu)?];
    /// let mut state = setup(MixedPrecision::new(DType::F32, Descent::new(1e-4)), &x)?;
    /// update(&mut state, &x, &x[0].sum_all()?.backward()?)?;
    /// assert_eq!(x[0].to_dtype(DType::F32)?.to_vec1::<f32>()?, [1.0]);
    /// assert_eq!(state.masters(&x)?["0"].to_vec1::<f32>()?, [0.9999]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn masters<M: Model + ?Sized>(&self, model: &M) -> Result<BTreeMap<String, Tensor>> {
        let parts = self.settle(Call::Masters, self.master_parts(model))?;
        let whole = self.whole(parts.into_iter().enumerate().collect())?;
        Ok(whole.into_iter().map(|(leaf, master)| (self.leaves[leaf].path.clone(), master)).collect())
    }

    /// The most precise copies of this rank's parts, in the order of the leaves.
    pub(crate) fn master_parts<M: Model + ?Sized>(&self, model: &M) -> Result<Vec<Tensor>> {
        let parameters = self.parameters(model)?;
        let master = |(leaf, x): (&Leaf, &Lent<'_>)| leaf.master(&*leaf.own_part(&**x)?);
        self.leaves().zip(&parameters).map(master).collect()
    }

    /// Sets the most precise copy of each parameter to `values`, and the parameter to it, rounded.
    ///
    /// With this a model starts from an f32 checkpoint and keeps what its own dtype cannot hold.
    ///
    /// `values` is a map of tensors by path, or [`Weights`](crate::Weights) from files. Every parameter needs
    /// a value, in any float dtype. The model's other variables are set as well: those that a map has, and
    /// all of them from files. A name that the model does not have is refused in a map. Files may have such
    /// names, which are returned. Over [ranks](crate::Setup::over) all call this with the same values.
    ///
    /// # What follows
    /// State that started as the parameter is set to the new weights, too, at any step. The rest of the state
    /// stays, such as moments and step counts. So right after [`setup`](crate::setup) the state is that of a
    /// set-up with these weights. Later on:
    ///
    /// | | |
    /// | --- | --- |
    /// | [`Ema`](crate::Ema), [`UniformAverage`](crate::UniformAverage) | the average starts anew, and the count of its steps |
    /// | [`Lookahead`](crate::Lookahead) | the slow weights are the new ones, and the next k steps begin |
    /// | [`ScheduleFree`](crate::ScheduleFree) | x̄ and z are the new weights, and the mean starts anew |
    /// | [`Prodigy`](crate::Prodigy) | distances are measured from the new weights, the estimate stays |
    /// | [`SplitMaster`](crate::SplitMaster), [`Kahan`](crate::Kahan) | what the parameter lacks is that of the new weights |
    /// | rules with a [`Slot::parameter`](crate::Slot::parameter) | it is the new weights; without other tensors the count of steps starts anew |
    ///
    /// # Errors
    /// If a parameter is missing, unknown, of another shape, not floating-point, not finite (unless the files
    /// are [accepted](crate::Weights::accepting_non_finite)) or too large for its dtype; if a file cannot be
    /// read; if the model has averages instead of its parameters; if `model` is not the state's. Nothing
    /// changes then. There is one more error: if another rank fails after all have agreed, this rank has all
    /// of the new weights.
    ///
    /// ```
    /// use std::collections::BTreeMap;
    ///
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use optimisers::{Descent, MixedPrecision, Weights, setup};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("model.safetensors");
    /// let x = vec![Var::zeros(1, DType::BF16, &Device::Cpu)?];
    /// let mut state = setup(MixedPrecision::new(DType::F32, Descent::new(1e-4)), &x)?;
    /// let values = BTreeMap::from([("0".to_string(), Tensor::new(&[0.1f32], &Device::Cpu)?)]);
    /// state.set_masters(&x, &values)?;
    /// assert_eq!(state.masters(&x)?["0"].to_vec1::<f32>()?, [0.1]);
    /// assert_eq!(x[0].to_dtype(DType::F32)?.to_vec1::<f32>()?, [0.100097656]);
    ///
    /// state.save_masters(&x, &path)?;
    /// state.set_masters(&x, &Weights::open([&path])?)?;
    /// # assert_eq!(state.masters(&x)?["0"].to_vec1::<f32>()?, [0.1]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_masters<'v, M: Model + ?Sized>(
        &mut self,
        model: &M,
        values: impl Into<MasterValues<'v>>,
    ) -> Result<Vec<String>> {
        self.assign_masters(model, values.into())
    }

    /// Sets every master to its parameter, after new weights were put into the model.
    ///
    /// Call it even if there are no masters, because a rule that keeps a copy of the parameter
    /// ([`Lookahead`](crate::Lookahead), [`ScheduleFree`](crate::ScheduleFree), [`MADGRAD`](crate::MADGRAD))
    /// or its norm ([`Hyperball`](crate::Hyperball)) would lead it back to the old weights, and
    /// [`Kahan`](crate::Kahan) would add what these have lost. On the CPU an [`update`](crate::update)
    /// notices new weights by a [sample](crate::Slot::parameter).
    ///
    /// State that started as the parameter is set to it again, as by [`set_masters`](StateTree::set_masters).
    /// The rest of the state stays.
    ///
    /// # Errors
    /// If the model has averages instead of its parameters, `model` is not the state's, or ranks have
    /// different weights. Nothing changes then.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use optimisers::{Descent, ErrorKind, MixedPrecision, setup, update};
    ///
    /// let x = Var::ones(1, DType::BF16, &Device::Cpu)?;
    /// let mut state = setup(MixedPrecision::new(DType::F32, Descent::new(0.5)), &x)?;
    /// x.set(&Tensor::zeros(1, DType::BF16, &Device::Cpu)?)?;
    /// let grads = x.sum_all()?.backward()?;
    /// assert_eq!(update(&mut state, &x, &grads).unwrap_err().kind(), ErrorKind::Changed);
    /// state.refresh_masters(&x)?;
    /// update(&mut state, &x, &grads)?;
    /// assert_eq!(x.to_dtype(DType::F32)?.to_vec1::<f32>()?, [-0.5]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn refresh_masters<M: Model + ?Sized>(&mut self, model: &M) -> Result<()> {
        let parameters = self.check_parameters().and_then(|()| {
            let parameters = self.parameters(model)?;
            // Each rank refreshes its own parts, so the parameters have to be the same on all.
            let aspects = match self.is_divided() {
                true => self
                    .leaves
                    .iter()
                    .zip(&parameters)
                    .map(|(leaf, x)| values_of(leaf.path(), &x.tensor_or_copy()?))
                    .collect::<Result<_>>()?,
                false => Vec::new(),
            };
            Ok((parameters, Agreement::on(aspects), Vec::new()))
        });
        let (parameters, _) = self.agree_on(Call::RefreshMasters, parameters)?;
        let refresh = |(leaf, x): (&mut Box<Leaf>, &Lent<'_>)| leaf.refresh(&*leaf.own_part(&**x)?);
        let refreshed = self.leaves.iter_mut().zip(&parameters).try_for_each(refresh);
        self.saved_starts.clear();
        self.settle(Call::MastersRefreshed, refreshed)
    }

    /// Compares every element of every parameter with its master.
    ///
    /// Before the first step it also compares the state that started as the parameter. On a device this is
    /// the only way to notice a change after the first step, see [`MixedPrecision`](crate::MixedPrecision).
    ///
    /// A parameter without a gradient in any call of [`update`](crate::update), such as BatchNorm's running
    /// statistics, is passed over. Over [ranks](crate::Setup::over) all call this, and each compares its
    /// parts.
    ///
    /// # Errors
    /// If a parameter is not its master rounded, or `model` is not the state's.
    pub fn check_masters<M: Model + ?Sized>(&self, model: &M) -> Result<()> {
        let check = |parameters: Vec<Lent<'_>>| {
            let mut trained = self.leaves.iter().zip(&parameters).filter(|(leaf, _)| !leaf.is_unreached());
            trained.try_for_each(|(leaf, x)| {
                let part = leaf.own_part(leaf.parameter(&**x))?;
                leaf.check_unchanged(&*part, Extent::Whole)
                    .map_err(|error| error.counted_from(leaf.part().start))
            })
        };
        self.settle(Call::CheckMasters, self.parameters(model).and_then(check))
    }
}
