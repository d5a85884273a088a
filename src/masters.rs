//! The high-precision copies of a model's parameters: reading, setting, refreshing, comparing.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use candle_core::{DType, Device, Tensor};

use crate::checkpoint::save_tensors;
use crate::engine::{owned_on, set_tensor};
use crate::error::{MasterError, Result, listed};
use crate::model::{Model, by_first_path};
use crate::rule::Leaf as RuleLeaf;
use crate::tree::{Leaf, StateTree};

impl StateTree {
    /// The most precise copy of each parameter, by path: its master where it has one, the number that a split or compensated parameter stands
    /// for, or the parameter itself. They are copies.
    ///
    /// [`StateTree::save_masters`] writes them to a file for other tools.
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
        let parameters = self.parameters(model)?;
        let master = |(leaf, x): (&Leaf, &Tensor)| {
            let master = leaf.optimiser.master(&leaf.state, x).map_err(|error| error.at(leaf.path()))?;
            Ok((leaf.path().to_string(), master))
        };
        self.leaves.iter().zip(&parameters).map(master).collect()
    }

    /// Sets the most precise copy of each parameter to `values`, and the parameter to it rounded: so a model starts from an f32 checkpoint
    /// without first losing what its own dtype cannot hold. The rest of the state stays.
    ///
    /// `values` are by path, one for every leaf, in any float dtype. They may hold the model's other variables too, which are set as well; names
    /// that the model does not have are refused.
    ///
    /// # Errors
    /// If a parameter is missing, unknown, of another shape, not floating-point or not finite; nothing changes then. If `model` is not the
    /// state's.
    ///
    /// ```
    /// use std::collections::BTreeMap;
    ///
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use optimisers::{Descent, MixedPrecision, setup};
    ///
    /// let x = vec![Var::zeros(1, DType::BF16, &Device::Cpu)?];
    /// let mut state = setup(MixedPrecision::new(DType::F32, Descent::new(1e-4)), &x)?;
    /// let checkpoint = BTreeMap::from([("0".to_string(), Tensor::new(&[0.1f32], &Device::Cpu)?)]);
    /// state.set_masters(&x, &checkpoint)?;
    /// assert_eq!(state.masters(&x)?["0"].to_vec1::<f32>()?, [0.1]);
    /// assert_eq!(x[0].to_dtype(DType::F32)?.to_vec1::<f32>()?, [0.100097656]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_masters<M: Model + ?Sized>(&mut self, model: &M, values: &BTreeMap<String, Tensor>) -> Result<()> {
        let parameters = self.parameters(model)?;
        let variables = by_first_path(model, Tensor::is_variable)?;
        let known: HashSet<&str> = variables.keys().map(String::as_str).chain(self.leaves.iter().flat_map(|leaf| leaf.paths())).collect();
        if let Some(path) = values.keys().find(|path| !known.contains(path.as_str())) {
            return Err(MasterError::Unknown { path: path.clone(), available: listed(variables.keys().map(String::as_str)) }.into());
        }
        let mut masters = Vec::with_capacity(self.len());
        for (leaf, x) in self.leaves.iter().zip(&parameters) {
            let found = leaf.paths().find_map(|path| values.get(path));
            let value = found.ok_or_else(|| MasterError::Missing { path: leaf.path().to_string() })?;
            masters.push(fitting(leaf.path(), x, value)?);
        }
        let of_leaf = |x: &Tensor| parameters.iter().any(|parameter| parameter.id() == x.id());
        let others = variables.iter().filter(|(_, x)| !of_leaf(x)).filter_map(|(path, x)| Some((path, x, values.get(path)?)));
        let others = others.map(|(path, x, value)| Ok((x, fitting(path, x, value)?))).collect::<Result<Vec<_>>>()?;

        for ((leaf, x), value) in self.leaves.iter_mut().zip(&parameters).zip(masters) {
            leaf.optimiser.set_master(&mut leaf.state, x, &value).map_err(|error| error.at(&leaf.path))?;
        }
        others.into_iter().try_for_each(|(x, value)| Ok(set_tensor(x, &value)?))
    }

    /// Saves the [masters](StateTree::masters) to a safetensors file under the parameters' names, which `VarMap::load`, torch and other tools
    /// read. It is written as a [checkpoint](crate::Checkpoint::save) is: the file has what it had before, or all that is new.
    ///
    /// # Errors
    /// If `model` is not the state's, or the file system fails.
    pub fn save_masters<M: Model + ?Sized>(&self, model: &M, path: impl AsRef<Path>) -> Result<()> {
        save_tensors(path.as_ref(), &self.masters(model)?)
    }

    /// [Sets the masters](StateTree::set_masters) from a safetensors file with the parameters' names, in any float dtype.
    ///
    /// # Errors
    /// As [`StateTree::set_masters`]; if the file cannot be read.
    pub fn load_masters<M: Model + ?Sized>(&mut self, model: &M, path: impl AsRef<Path>) -> Result<()> {
        let values = candle_core::safetensors::load(path, &Device::Cpu)?;
        self.set_masters(model, &values.into_iter().collect())
    }

    /// Makes every master the parameter that it belongs to: for when new weights were put into the model. The rest of the state stays.
    ///
    /// # Errors
    /// If `model` is not the state's.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use optimisers::{Descent, Error, MasterError, MixedPrecision, setup, update};
    ///
    /// let x = Var::ones(1, DType::BF16, &Device::Cpu)?;
    /// let mut state = setup(MixedPrecision::new(DType::F32, Descent::new(0.5)), &x)?;
    /// x.set(&Tensor::zeros(1, DType::BF16, &Device::Cpu)?)?;
    /// let grads = x.sum_all()?.backward()?;
    /// assert!(matches!(update(&mut state, &x, &grads), Err(Error::Master(MasterError::Stale { .. }))));
    /// state.refresh_masters(&x)?;
    /// update(&mut state, &x, &grads)?;
    /// assert_eq!(x.to_dtype(DType::F32)?.to_vec1::<f32>()?, [-0.5]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn refresh_masters<M: Model + ?Sized>(&mut self, model: &M) -> Result<()> {
        let parameters = self.parameters(model)?;
        for (leaf, x) in self.leaves.iter_mut().zip(&parameters) {
            let values = owned_on(x.device(), x)?;
            leaf.optimiser.set_master(&mut leaf.state, x, &values).map_err(|error| error.at(&leaf.path))?;
        }
        Ok(())
    }

    /// Compares every element of every parameter with its master. An [`update`](crate::update) compares up to 1024 of each.
    ///
    /// # Errors
    /// If a parameter is not its master rounded, or `model` is not the state's.
    pub fn check_masters<M: Model + ?Sized>(&self, model: &M) -> Result<()> {
        let parameters = self.parameters(model)?;
        self.leaves
            .iter()
            .zip(&parameters)
            .try_for_each(|(leaf, x)| leaf.optimiser.expect_rounded(&leaf.state, RuleLeaf { path: leaf.path(), x, is_trusted: false }))
    }
}

/// The value as it can be written over a parameter.
fn fitting(path: &str, x: &Tensor, value: &Tensor) -> Result<Tensor> {
    if value.shape() != x.shape() || value.dtype().is_float() != x.dtype().is_float() {
        let (expected, got) = ((x.shape().clone(), x.dtype()), (value.shape().clone(), value.dtype()));
        return Err(MasterError::Shape { path: path.to_string(), expected, got }.into());
    }
    if value.dtype().is_float() {
        let numbers: Vec<f64> = value.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?;
        if let Some((index, value)) = numbers.into_iter().enumerate().find(|(_, number)| !number.is_finite()) {
            return Err(MasterError::NonFinite { path: path.to_string(), index, value }.into());
        }
    }
    Ok(owned_on(x.device(), value)?)
}
