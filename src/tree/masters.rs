//! The high-precision copies of a model's parameters: reading, setting, refreshing, comparing.
//!
//! A model and its masters get all new values or none: `new_masters` makes and checks all values before the
//! first is set.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Debug;
use std::io::{self, Write};

use super::{Leaf, StateTree};
use crate::engine::{owned_on, set_lent};
use crate::error::{Error, ErrorKind, Result};
use crate::model::cuts::is_running_statistic;
use crate::model::lent::{Lend, Lent, check_parameter, send_bytes};
use crate::model::{Identity, Model, Variable, identity, in_path_order};
use crate::numbers::{Requirements, is_supported, ranges_to_read};
use crate::ranks::{Aspect, Call, Held};
use crate::rule::{Extent, difference};
use crate::tensors::{Tensor, dtype_of};

impl StateTree {
    /// Copies of the most precise value of each parameter, by path.
    ///
    /// The most precise value is the master, if there is one. Under [`SplitMaster`](crate::SplitMaster) or
    /// [`Kahan`](crate::Kahan) it is the sum of the parameter and its low bits or lost digits. Otherwise it
    /// is the parameter.
    ///
    /// If a parameter has never taken a step and is not its master rounded, the parameter itself is taken.
    /// BatchNorm's running statistics are an example.
    ///
    /// [`StateTree::save_masters`] writes these values to a file for other tools. Over
    /// [ranks](crate::Setup::over) all ranks call this method and get whole tensors, while `save_masters`
    /// writes only the parts of each rank. Running statistics are made of the parts of all ranks, too: call
    /// [`broadcast`](crate::broadcast) first. Without candle the numbers are read as those of
    /// [`Leaf::tensor`].
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
        let parts = self.master_parts(model);
        Ok(self
            .gather(
                Call::Masters,
                parts.map(|parts| parts.into_iter().enumerate().collect()),
            )?
            .into_iter()
            .map(|(leaf, master)| (self.leaves[leaf].path.clone(), master))
            .collect())
    }

    /// The most precise copies of this rank's parts, in the order of the leaves.
    pub(crate) fn master_parts<M: Model + ?Sized>(&self, model: &M) -> Result<Vec<Tensor>> {
        let parameters = self.parameters(model)?;
        let master = |(leaf, x): (&Leaf, &Lent<'_>)| leaf.master(&*leaf.own_part(&**x)?);
        self.leaves().zip(&parameters).map(master).collect()
    }

    /// Sets the most precise copy of each parameter to `values`, and the parameter to the rounded copy.
    ///
    /// With this method a model starts from an f32 checkpoint and keeps the digits that its dtype cannot
    /// hold.
    ///
    /// `values` is a map of tensors by path, or [`Weights`](crate::Weights) from files. Every parameter needs
    /// a value, in F16, BF16, F32 or F64. Other variables of the model are set, too: with a map the variables
    /// that have a value there, with files all variables. Values of other dtypes have to have the dtype of
    /// their variable, and their numbers are not looked at. A map must not have a name that the model lacks.
    /// Files may have such names, and this method returns them. If the state was
    /// [renamed](StateTree::rename), a map may have the paths of the state, which count first, or of the
    /// model. Over [ranks](crate::Setup::over) all ranks call this method with the same values.
    ///
    /// # Copies in the state
    /// State that started as a copy of the parameter is set to the new weights, too, at any step. The rest of
    /// the state stays, such as moments and step counts. So right after [`setup`](crate::setup) the state is
    /// the same as if the set-up had seen these weights. Later on:
    ///
    /// | | |
    /// | --- | --- |
    /// | [`Ema`](crate::Ema), [`UniformAverage`](crate::UniformAverage) | the average and the count of its steps start anew |
    /// | [`Lookahead`](crate::Lookahead) | the slow weights are the new ones, and the next k steps begin |
    /// | [`ScheduleFree`](crate::ScheduleFree) | x̄ and z are the new weights, and the mean starts anew |
    /// | [`Prodigy`](crate::Prodigy) | distances are measured from the new weights, the estimate stays |
    /// | [`SplitMaster`](crate::SplitMaster), [`Kahan`](crate::Kahan) | the low bits or lost digits are those of the new weights |
    /// | rules with a [`Slot::parameter`](crate::Slot::parameter) | the slot has the new weights; if the rule has no other tensors, the count of steps starts anew |
    ///
    /// # Errors
    /// If a value is missing, unknown, of another shape or a wrong dtype, not finite (unless the files are
    /// [accepted](crate::Weights::accepting_non_finite)) or too large for its dtype; if two paths of one
    /// variable have different values; if a file cannot be read; if the model has averages instead of its
    /// parameters; if `model` is not the state's. Nothing changes then. If another rank fails after all ranks
    /// have agreed, this call is an error, too, but this rank has all of the new weights.
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
    /// Call this method even if there are no masters. Otherwise a rule that keeps a copy of the parameter
    /// ([`Lookahead`](crate::Lookahead), [`ScheduleFree`](crate::ScheduleFree), [`MADGRAD`](crate::MADGRAD))
    /// or its norm ([`Hyperball`](crate::Hyperball)) would lead the parameter back to the old weights, and
    /// [`Kahan`](crate::Kahan) would add the digits that the old weights have lost. On the CPU an
    /// [`update`](crate::update) notices new weights by a [sample](crate::Slot::parameter).
    ///
    /// State that started as a copy of the parameter is set to the parameter again, as by
    /// [`set_masters`](StateTree::set_masters). The rest of the state stays.
    ///
    /// # Errors
    /// If the model has averages instead of its parameters, if `model` is not the state's, or if ranks have
    /// different weights (running statistics may differ). Nothing changes then.
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
        let plan = self.check_parameters().and_then(|()| {
            let parameters = self.parameters(model)?;
            for (leaf, x) in self.leaves().zip(&parameters) {
                check_parameter("parameter", &**x, true).map_err(|error| error.at(leaf.path()))?;
            }
            Ok(parameters)
        });
        // Each rank refreshes its own parts, so the parameters have to be the same on all ranks.
        let parameters = self.world.compare(Call::RefreshMasters, plan, |parameters| {
            let leaves = self.leaves().zip(parameters);
            leaves
                .filter(|(leaf, _)| !is_running_statistic(leaf.path()))
                .map(|(leaf, x)| values_aspect(leaf.path(), &**x))
                .collect()
        })?;
        let refresh = |(leaf, x): (&mut Box<Leaf>, &Lent<'_>)| leaf.refresh(&*leaf.own_part(&**x)?);
        let outcome = self.leaves.iter_mut().zip(&parameters).try_for_each(refresh);
        self.saved_starts.clear();
        self.world.settle(Call::MastersRefreshed, outcome)
    }

    /// Compares every element of every parameter with its master.
    ///
    /// Before the first step this method also compares the state that started as a copy of the parameter. On
    /// a device this method is the only way to notice a change after the first step: see
    /// [`MixedPrecision`](crate::MixedPrecision).
    ///
    /// A parameter without a gradient in any call of [`update`](crate::update), such as BatchNorm's running
    /// statistics, is passed over. Over [ranks](crate::Setup::over) all ranks call this method, and each rank
    /// compares its parts.
    ///
    /// # Errors
    /// If a parameter is not its master rounded, or `model` is not the state's.
    pub fn check_masters<M: Model + ?Sized>(&self, model: &M) -> Result<()> {
        let check = |parameters: Vec<Lent<'_>>| {
            let mut trained = self
                .leaves
                .iter()
                .zip(&parameters)
                .filter(|(leaf, _)| !leaf.is_unreached());
            trained.try_for_each(|(leaf, x)| {
                let part = leaf.own_part(leaf.parameter(&**x))?;
                leaf.check_unchanged(&leaf.state, &*part, Extent::Whole)
                    .map_err(|error| error.counted_from(leaf.part().start))
            })
        };
        self.world
            .settle(Call::CheckMasters, self.parameters(model).and_then(check))
    }
}

/// New values of a model's variables, for [`StateTree::set_masters`].
///
/// These values are made from a reference to a map from paths to tensors, or from a reference to
/// [`Weights`](crate::Weights).
#[derive(Clone, Debug)]
pub struct MasterValues<'v>(MasterSource<'v>);

#[derive(Clone, Debug)]
enum MasterSource<'v> {
    Tensors(BTreeMap<String, Tensor>),
    Files(&'v dyn WeightFiles),
}

/// Weights in files, which are read for a certain model.
pub(crate) trait WeightFiles: Debug {
    /// The values of a model's variables by path, checked, and the names in the files that no variable has.
    fn masters(&self, model: &dyn Model) -> Result<(BTreeMap<String, Tensor>, Vec<String>)>;
}

impl<'v> MasterValues<'v> {
    pub(crate) fn from_files(files: &'v dyn WeightFiles) -> Self {
        MasterValues(MasterSource::Files(files))
    }
}

impl<'v> From<&'v BTreeMap<String, Tensor>> for MasterValues<'v> {
    fn from(values: &'v BTreeMap<String, Tensor>) -> Self {
        MasterValues(MasterSource::Tensors(values.clone()))
    }
}

impl<'v> From<&'v HashMap<String, Tensor>> for MasterValues<'v> {
    fn from(values: &'v HashMap<String, Tensor>) -> Self {
        MasterValues(MasterSource::Tensors(
            values
                .iter()
                .map(|(path, value)| (path.clone(), value.clone()))
                .collect(),
        ))
    }
}

/// Variables with their new values, which were checked.
struct NewMasters<'m> {
    /// For the parameters, in the order of the leaves.
    leaves: Vec<(Lent<'m>, Tensor)>,
    /// For variables without a leaf.
    others: Vec<(Lent<'m>, Tensor)>,
    /// The names that no variable has.
    unused: Vec<String>,
}

impl StateTree {
    /// [`StateTree::set_masters`].
    pub(super) fn assign_masters<M: Model + ?Sized>(
        &mut self,
        model: &M,
        values: MasterValues<'_>,
    ) -> Result<Vec<String>> {
        let plan = self
            .check_parameters()
            .and_then(|()| self.new_masters(model, values));
        let NewMasters {
            leaves,
            others,
            unused,
        } = self
            .world
            .compare(Call::NewMasters, plan, |masters| masters.aspects(self))?;
        let (mut set_count, total) = (0, leaves.len() + others.len());
        let mut set_all = || {
            for (leaf, (x, value)) in self.leaves.iter_mut().zip(&leaves) {
                let own_value = leaf.own_part(value)?.tensor_or_copy()?;
                leaf.set_weights(&*leaf.own_part(&**x)?, &own_value)?;
                leaf.set_parts_of_others(&**x, value)?;
                set_count += 1;
            }
            for (x, value) in &others {
                set_lent(&**x, value)?;
                set_count += 1;
            }
            Ok(())
        };
        let outcome = set_all().map_err(|error: Error| error.after_values(set_count, total));
        self.saved_starts.clear();
        self.world.settle(Call::MastersSet, outcome)?;
        Ok(unused)
    }

    /// The variables of a model with this state, and their new values, checked.
    fn new_masters<'m, M: Model + ?Sized>(
        &self,
        model: &'m M,
        MasterValues(source): MasterValues<'_>,
    ) -> Result<NewMasters<'m>> {
        let (values, unused, from_files) = match source {
            MasterSource::Tensors(values) => (values, Vec::new(), false),
            MasterSource::Files(weights) => {
                let (values, unused) = weights.masters(&model)?;
                (values, unused, true)
            }
        };
        let parameters = self.parameters(model)?;
        let variables: BTreeMap<String, Lent<'m>> = in_path_order(model, Tensor::is_variable)?
            .into_iter()
            .map(Variable::into_path_and_handle)
            .collect();
        let known_paths: HashSet<&str> = variables
            .keys()
            .map(String::as_str)
            .chain(self.leaves.iter().flat_map(|leaf| leaf.paths()))
            .collect();
        if let Some(path) = values.keys().find(|path| !known_paths.contains(path.as_str())) {
            let paths = variables.keys().map(String::as_str);
            return Err(Error::unknown_path(
                "variable in the model with the path",
                path,
                paths,
            ));
        }
        // A renamed state has other paths than its model. Files have the paths of the model, so there a path of
        // the state counts only if it is a path of the same variable. A map may have either.
        let path_in_model: HashMap<Identity, &String> =
            variables.iter().map(|(path, x)| (identity(x), path)).collect();
        let mut leaves = Vec::with_capacity(self.len());
        for (leaf, x) in self.leaves.iter().zip(&parameters) {
            let missing = || {
                Error::missing("there is no value for it")
                    .at(leaf.path())
                    .with_remedy("give a value for every leaf of the state")
            };
            let may_name_value = |path: &&str| {
                !from_files
                    || variables
                        .get(*path)
                        .is_some_and(|other| identity(other) == identity(x))
            };
            let mut named_values = leaf
                .paths()
                .filter(may_name_value)
                .filter_map(|path| Some((path, values.get(path)?)));
            let first = named_values.next();
            if let Some((first, value)) = first {
                named_values.try_for_each(|(path, other)| check_equal([first, path], [value, other]))?;
            }
            let value = first
                .map(|(_, value)| value)
                .or_else(|| values.get(*path_in_model.get(&identity(x))?))
                .ok_or_else(missing)?;
            leaves.push((x.clone(), convert_value(leaf.path(), &**x, value, from_files)?));
        }
        let parameter_identities: HashSet<Identity> = parameters.iter().map(identity).collect();
        let others = variables
            .iter()
            .filter(|(_, x)| !parameter_identities.contains(&identity(x)))
            .filter_map(|(path, x)| Some((path, x, values.get(path)?)))
            .map(|(path, x, value)| Ok((x.clone(), convert_value(path, &**x, value, from_files)?)))
            .collect::<Result<Vec<_>>>()?;
        Ok(NewMasters {
            leaves,
            others,
            unused,
        })
    }
}

impl NewMasters<'_> {
    /// All values, as aspects that have to be the same on all ranks.
    fn aspects(&self, state: &StateTree) -> Result<Vec<Aspect>> {
        let paths = state
            .paths()
            .iter()
            .map(|path| format!("the new values of {path:?}"));
        let names = paths.chain(std::iter::repeat(
            "the new values of a variable without state".to_string(),
        ));
        let values = self.leaves.iter().chain(&self.others).map(|(_, value)| value);
        values
            .zip(names)
            .map(|(value, name)| {
                Ok(Aspect::new(
                    name,
                    format!("checksum {:08x}", checksum("value", value)?),
                ))
            })
            .collect()
    }
}

impl Leaf {
    /// Sets the other ranks' parts of the parameter `x` to the values that these ranks set there.
    fn set_parts_of_others(&self, x: &dyn Lend, values: &Tensor) -> Result<()> {
        let set = |x: &dyn Lend, values: &Tensor| {
            // This rank has no state for other parts, but `set_precise` needs one.
            let mut state = self.optimiser.make_state(x)?;
            self.optimiser.set_precise(&mut state, x, values)
        };
        let set_all = || match self.held() {
            Held::All => Ok(()),
            Held::Nothing => set(x, values),
            Held::Part(own_part) => {
                let (x, values) = (Lent::new(x), values.flatten_all()?);
                // In ranges, so that the state for each range is small.
                let mut others =
                    ranges_to_read(0..own_part.start).chain(ranges_to_read(own_part.end..x.elem_count()));
                others.try_for_each(|range| {
                    let new_values = values.narrow(0, range.start, range.len())?;
                    set(&*x.part(range)?, &new_values)
                })
            }
        };
        set_all().map_err(|error: Error| error.at(self.path()))
    }
}

/// The values of a parameter, as an aspect that has to be the same on all ranks.
pub(crate) fn values_aspect(path: &str, values: &dyn Lend) -> Result<Aspect> {
    let name = format!("the values of {path:?} (give all ranks the same weights, see `broadcast`)");
    Ok(Aspect::new(
        name,
        format!("checksum {:08x}", checksum("parameter", values)?),
    ))
}

/// A checksum of the values of a lender. `role` is that of [`read`](crate::model::lent::read).
pub(super) fn checksum(role: &'static str, values: &dyn Lend) -> Result<u32> {
    let mut sum = Checksum(crc32fast::Hasher::new());
    send_bytes(role, values, &mut sum)?;
    Ok(sum.0.finalize())
}

/// Refuses different values for two paths of one variable, because only one of them could be used.
pub(crate) fn check_equal([path, other_path]: [&str; 2], [value, other]: [&Tensor; 2]) -> Result<()> {
    // Numbers of two dtypes are equal if each is the other rounded.
    let is_rounded = |value: &Tensor, other: &Tensor| -> Result<bool> {
        Ok(difference(value, other, Extent::Whole)?.is_none())
    };
    let are_floats = [value, other]
        .into_iter()
        .all(|value| is_supported(dtype_of(value)));
    let are_equal = value.shape() == other.shape()
        && if are_floats {
            // `difference` reads elements in row-major order only.
            let (value, other) = (value.contiguous()?, other.contiguous()?);
            is_rounded(&value, &other)? && is_rounded(&other, &value)?
        } else {
            value.dtype() == other.dtype() && checksum("value", value)? == checksum("value", other)?
        };
    if are_equal {
        return Ok(());
    }
    let problem =
        format!("{path:?} and {other_path:?} are one variable in the model, but their values differ");
    Err(Error::new(ErrorKind::Model, problem)
        .at(path)
        .with_remedy("untie the two in the model, or pass the same values for both"))
}

/// A writer that hashes the bytes.
struct Checksum(crc32fast::Hasher);

impl Write for Checksum {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Checks a value, and converts it to the form in which it can be written over the parameter `x`. Values from
/// files are checked already.
fn convert_value(path: &str, x: &dyn Lend, value: &Tensor, from_files: bool) -> Result<Tensor> {
    let on_non_finite = "take the values from a file with `Weights::accepting_non_finite`";
    let required = Requirements::of_weights("the value for it", x.shape(), x.dtype(), Some(on_non_finite));
    let check = || {
        check_parameter("parameter", x, true)?;
        if from_files {
            return Ok(());
        }
        let value: &dyn Lend = value;
        let dtype = required.check_form(value.shape(), Some(value.dtype()), value.dtype())?;
        required.check_numbers(dtype, 0, |watch| send_bytes("value", value, watch))
    };
    check().map_err(|error| error.at(path))?;
    owned_on(x.device(), value)
}
