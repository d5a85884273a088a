//! The content of a file in either format: torch's groups, and for each parameter where its state is.

use std::collections::{BTreeMap, HashMap};

use candle_core::Tensor;
use serde_json::{Map, Value};

use super::objects::damaged;
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::DType;

/// The state of an optimiser. The numbers of its tensors stay in the file.
#[derive(Debug, Default)]
pub(super) struct Content {
    /// The hyper-parameters of each group, by torch's names.
    pub(super) groups: Vec<Map<String, Value>>,
    /// The parameters, in the order of the groups.
    pub(super) parameters: Vec<TorchParameter>,
    /// The names of the parameters, if the file has them or the user gave them.
    pub(super) names: Option<Vec<String>>,
}

/// torch's state of one parameter.
#[derive(Debug)]
pub(super) struct TorchParameter {
    /// The index in [`Content::groups`].
    pub(super) group: usize,
    /// The entries, by torch's names.
    pub(super) entries: BTreeMap<String, StateEntry>,
}

/// An entry of the state of one parameter.
#[derive(Debug)]
pub(super) enum StateEntry {
    Number(f64),
    Tensor(StoredTensor),
    /// Anything else, described for errors.
    Other(String),
}

/// The place, dtype and shape of a tensor in the file.
#[derive(Debug)]
pub(super) struct StoredTensor {
    /// The tensor of a safetensors file, or the record of an archive.
    pub(super) place: String,
    /// Which elements of the record belong to the tensor. `None` in a safetensors file.
    pub(super) strided: Option<StridedRun>,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
}

/// The elements of a record that belong to a tensor. A record is a whole storage of torch, and a tensor is a
/// view of it.
#[derive(Debug)]
pub(super) struct StridedRun {
    /// The index of the first element in the record.
    pub(super) offset: usize,
    pub(super) strides: Vec<usize>,
    /// The number of elements from the first one of the tensor to the last, as a shape.
    pub(super) span: [usize; 1],
}

impl StridedRun {
    /// The tensor of this shape. `run` has the record's numbers from the tensor's first element to its last.
    pub(super) fn of(&self, run: &Tensor, shape: &[usize]) -> candle_core::Result<Tensor> {
        if self.span == [0] {
            // Before the loop, because the other dimensions of an empty tensor may be of any size.
            return run.reshape(shape);
        }
        let mut places = vec![0i64];
        for (length, stride) in shape.iter().zip(&self.strides) {
            places = places
                .iter()
                .flat_map(|place| (0..*length).map(move |i| place + (i * stride) as i64))
                .collect();
        }
        // Most tensors are contiguous and need no selection.
        if places.iter().copied().eq(0..self.span[0] as i64) {
            return run.reshape(shape);
        }
        let places = Tensor::from_vec(places, shape.iter().product::<usize>(), run.device())?;
        run.index_select(&places, 0)?.reshape(shape)
    }
}

/// The groups of a file, each with its parameters.
pub(super) struct NamedGroups<K> {
    pub(super) groups: Vec<(Map<String, Value>, Vec<K>)>,
}

impl<K: Eq + std::hash::Hash + std::fmt::Debug> NamedGroups<K> {
    /// The content of a file, from its groups and the state of each parameter.
    pub(super) fn with_state(self, mut state: HashMap<K, BTreeMap<String, StateEntry>>) -> Result<Content> {
        let mut content = Content::default();
        for (group, (settings, keys)) in self.groups.into_iter().enumerate() {
            for key in keys {
                // torch has no state for a parameter before the first step.
                let entries = state.remove(&key).unwrap_or_default();
                content.parameters.push(TorchParameter { group, entries });
            }
            content.groups.push(settings);
        }
        match state.keys().map(|key| format!("{key:?}")).min() {
            Some(key) => Err(damaged(format!("it has the state of a parameter {key} that no group has"))),
            None => Ok(content),
        }
    }
}

impl Content {
    /// The names of the parameters. An error if there are none, or not one for each parameter.
    pub(super) fn check_names(&self) -> Result<&[String]> {
        let parameters = self.parameters.len();
        let unnamed = || {
            Error::new(
                ErrorKind::File,
                format!("the file has numbers instead of names for its {parameters} parameters"),
            )
            .with_remedy(
                "give the names, in the order of the optimiser's groups, with `TorchState::named`, or save \
                 the file with `param_names`",
            )
        };
        let names = self.names.as_ref().ok_or_else(unnamed)?;
        if names.len() == parameters {
            return Ok(names);
        }
        Err(Error::new(ErrorKind::Argument, "the parameters of the file are given")
            .with_got(format_args!("{} names", names.len()))
            .with_expected(parameters)
            .with_remedy("name all parameters of the optimiser, in the order of its groups, frozen ones too"))
    }
}

/// The texts of a JSON list, if it has only texts.
pub(super) fn texts(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|text| text.as_str().map(str::to_string)).collect()
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn elements_of_a_run_are_in_the_order_of_the_shape() -> candle_core::Result<()> {
        let run = |strides: &[usize], span| StridedRun { offset: 0, strides: strides.to_vec(), span: [span] };
        let numbers = Tensor::new(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0], &Device::Cpu)?;
        assert_eq!(
            run(&[1, 2], 6).of(&numbers, &[2, 3])?.to_vec2::<f32>()?,
            [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
        );
        // Makes no list of 2⁴⁰ places.
        let none =
            run(&[0, 1], 0).of(&Tensor::zeros(0, candle_core::DType::F32, &Device::Cpu)?, &[1 << 40, 0])?;
        assert_eq!(none.dims(), [1 << 40, 0]);
        Ok(())
    }
}
