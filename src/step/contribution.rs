//! A rank's contribution to an update, and the aspects that must be the same on all ranks.
//!
//! Each call sends one fingerprint per aspect, some for the call and four for each leaf (a parameter with its
//! state). The words of an aspect are made only if its fingerprint differs between ranks, so `visit_aspects`
//! passes each fingerprint together with a function that makes the words.

use super::call::UpdateCall;
use crate::engine::{Sources, WrittenStorages, unshared};
use crate::error::{Error, Result};
use crate::model::lent::{Lend, Lent, check_parameter};
use crate::numbers::{DType, Fingerprint, first_non_finite, is_wider, ranges_to_read};
use crate::ranks::{Agreement, Aspect, unreadable_error};
use crate::tensors::{Tensor, dtype_of, in_dtype, sum};
use crate::{ranks::LeafParts, tree::Leaf};

/// This rank's share of a leaf: its part of the parameter, and its gradient.
pub(crate) struct OwnLeaf<'x> {
    pub(crate) parts: LeafParts,
    /// This rank's part of the parameter.
    pub(crate) x: Lent<'x>,
    /// This rank's gradient of the whole parameter, because other ranks get their parts from this gradient.
    /// `None` without a gradient or with weight 0.
    pub(crate) gradient: Option<Tensor>,
}

impl<'x> OwnLeaf<'x> {
    pub(crate) fn new(
        call: &UpdateCall,
        leaf: &Leaf,
        x: &'x dyn Lend,
        sources: Result<Sources<'_>>,
        targets: &WrittenStorages,
    ) -> Result<Self> {
        // A rank without state of the leaf also checks that the parameter can be written, because `share`
        // writes the parts of other ranks.
        check_parameter("parameter", x, !leaf.frozen).map_err(|error| error.at(leaf.path()))?;
        let own_leaf = OwnLeaf {
            parts: leaf.parts_of_ranks()?,
            x: leaf.own_part(x)?,
            // A rank with weight 0 sends nothing.
            gradient: match (sources?, call.options.weight) {
                (_, 0) => None,
                (sources, _) => own_gradient(leaf, x, sources, targets)?,
            },
        };
        // With `finite_only` an overflow on the wire skips the call, so an overflow is no error here.
        let takes_overflow = call.options.finite_only || call.options.takes_overflow;
        if !takes_overflow && !leaf.frozen {
            own_leaf.check_no_overflow(leaf.path())?;
        }
        Ok(own_leaf)
    }

    /// The dtype in which the gradient travels; `None` without a gradient.
    pub(crate) fn sent_dtype(&self) -> Option<DType> {
        let dtype = dtype_of(self.gradient.as_ref()?);
        Some(
            self.parts
                .wire
                .filter(|wire| is_wider(dtype, *wire))
                .unwrap_or(dtype),
        )
    }

    /// Refuses a gradient if a finite number would become infinite in the dtype in which it travels.
    fn check_no_overflow(&self, path: &str) -> Result<()> {
        let (Some(gradient), Some(dtype)) = (&self.gradient, self.sent_dtype()) else {
            return Ok(());
        };
        if gradient.dtype() == dtype {
            return Ok(());
        }
        // Numbers that are infinite or NaN already are found by the checks of the step.
        let or_zero = |number: f64| if number.is_finite() { number } else { 0.0 };
        match find_number(gradient, |numbers| {
            first_non_finite(numbers.into_iter().map(or_zero), dtype)
        })? {
            Some((index, number)) => Err(Error::too_large(
                "the gradient that is sent to other ranks",
                number,
                index,
                dtype,
            )
            .at(path)
            .with_remedy("send it as BF16, or skip such calls (`Update::finite_only`, `LossScaler`)")),
            None => Ok(()),
        }
    }

    /// Whether all numbers of the gradient are finite.
    pub(crate) fn is_finite(&self) -> Result<bool> {
        let Some(gradient) = &self.gradient else {
            return Ok(true);
        };
        Ok(find_number(gradient, |numbers| first_non_finite(numbers, DType::F64))?.is_none())
    }
}

/// The first number of a tensor that `find` returns, with its index. `find` gets the numbers range by range,
/// so that a large tensor is not copied as a whole to f64.
fn find_number(
    tensor: &Tensor,
    find: impl Fn(Vec<f64>) -> Option<(usize, f64)>,
) -> Result<Option<(usize, f64)>> {
    let flat = tensor.flatten_all()?;
    for range in ranges_to_read(0..flat.elem_count()) {
        let numbers = in_dtype(&flat.narrow(0, range.start, range.len())?, DType::F64)?.to_vec1::<f64>()?;
        if let Some((index, number)) = find(numbers) {
            return Ok(Some((range.start + index, number)));
        }
    }
    Ok(None)
}

/// A rank's contribution to a call.
pub(crate) struct Contribution {
    pub(crate) weight: u64,
    /// The dtype in which each leaf's gradient travels; `None` without a gradient or with weight 0.
    pub(crate) dtypes: Vec<Option<DType>>,
}

/// This rank's whole gradient of a leaf. Gradients of tied parameters are added up in the dtype of the
/// arithmetic.
fn own_gradient(
    leaf: &Leaf,
    x: &dyn Lend,
    sources: Sources<'_>,
    targets: &WrittenStorages,
) -> Result<Option<Tensor>> {
    let prepare = |gradient: Lent<'_>| {
        // Reshaped, because memory that is no tensor may come as a vector.
        let tensor = gradient.tensor_or_copy()?.reshape(x.shape())?;
        // `unshared` copies a tensor in memory that updates write, because other ranks still read the
        // gradient while the commit writes.
        unshared("gradient", tensor, targets, &[]).map_err(|error| error.at(leaf.path()))
    };
    let gradients = sources.into_iter().map(prepare).collect::<Result<Vec<_>>>()?;
    let [first, others @ ..] = &gradients[..] else {
        return Ok(None);
    };
    if others.is_empty() {
        return Ok(Some(first.detach()));
    }
    let compute = leaf.compute_dtype(gradients.iter().map(|gradient| gradient.dtype()));
    let widen = |gradient: &Tensor| in_dtype(gradient, compute);
    let total = others
        .iter()
        .try_fold(widen(first)?, |total, other| sum(&total, &widen(other)?))?;
    Ok(Some(total.detach()))
}

/// The aspects of a call that must be the same on all ranks.
pub(crate) fn update_agreement<'a>(call: &'a UpdateCall, leaves: &'a [Box<Leaf>]) -> Agreement<'a> {
    let mut fingerprints = Vec::with_capacity(6 + 4 * leaves.len());
    visit_aspects(call, leaves, |fingerprint, _| fingerprints.push(fingerprint));
    Agreement::lazy(fingerprints, move |index| {
        let (mut count, mut chosen) = (0, Aspect::default());
        visit_aspects(call, leaves, |_, aspect| {
            if count == index {
                chosen = aspect();
            }
            count += 1;
        });
        chosen
    })
}

/// Calls `visit` for each aspect of a call and then for each aspect of each leaf, with the fingerprint of the
/// aspect and a function that makes the aspect.
fn visit_aspects(call: &UpdateCall, leaves: &[Box<Leaf>], mut visit: impl FnMut(u64, &dyn Fn() -> Aspect)) {
    visit(leaves.len() as u64, &|| {
        Aspect::new("the number of parameters in the state", leaves.len())
    });
    visit(call.loss_scale.to_bits(), &|| {
        Aspect::new("the loss scale", call.loss_scale)
    });
    let options = named_options(call);
    let flags = options
        .iter()
        .rev()
        .fold(0, |flags, (_, is_on)| flags << 1 | u64::from(*is_on));
    visit(flags, &|| {
        let names: Vec<_> = options
            .iter()
            .filter(|(_, is_on)| *is_on)
            .map(|(name, _)| *name)
            .collect();
        let text = if names.is_empty() {
            "none".to_string()
        } else {
            names.join(" and ")
        };
        Aspect::new("the options of the call", text)
    });
    visit(call.calls, &|| {
        Aspect::new("the calls that windows of accumulation have counted", call.calls)
    });
    visit(call.steps, &|| {
        Aspect::new("the count of applied steps", call.steps)
    });
    visit(call.norms, &|| {
        Aspect::new("the history of norms", format!("checksum {:016x}", call.norms))
    });
    let mut last: Option<(*const (), u64)> = None;
    for (index, leaf) in leaves.iter().enumerate() {
        let name = |what: &str| format!("{what} of {:?}", leaf.path());
        let path_fingerprint = Fingerprint::new().bytes(leaf.path().as_bytes()).finish();
        visit(path_fingerprint, &|| {
            Aspect::new(
                format!("the name of parameter {index}"),
                format!("{:?}", leaf.path()),
            )
        });
        // Neighbouring leaves usually have the same optimiser, which is then hashed once.
        let acting = std::ptr::from_ref(leaf.acting()).cast::<()>();
        let optimiser_fingerprint = match last {
            Some((last_acting, fingerprint)) if last_acting == acting => fingerprint,
            _ => leaf.acting().description().fingerprint(),
        };
        last = Some((acting, optimiser_fingerprint));
        visit(optimiser_fingerprint, &|| leaf.optimiser_aspect());
        // Steps and flags of the leaf in one number.
        let may_lack = leaf.missing_gradients.is_allowed;
        let progress = leaf.steps << 2 | u64::from(leaf.frozen) << 1 | u64::from(may_lack);
        visit(progress, &|| {
            let is_frozen = if leaf.is_frozen() { ", frozen" } else { "" };
            let may_lack = if may_lack {
                ", allowed to have no gradient"
            } else {
                ""
            };
            Aspect::new(
                name("the progress"),
                format!("{} steps{is_frozen}{may_lack}", leaf.steps),
            )
        });
        let engine = call.options.engine;
        visit(engine.is_fused_on_cpu(&leaf.device).into(), &|| {
            Aspect::new(name("the engine"), format!("{engine:?} on {:?}", leaf.device))
        });
    }
}

/// The options that must be the same on all ranks, with their names.
fn named_options(call: &UpdateCall) -> [(&'static str, bool); 6] {
    [
        ("finite_only", call.options.finite_only),
        ("keep_masters", call.options.keep_masters),
        ("allow_no_gradients", call.options.allow_no_gradients),
        ("require_all", call.requires_all),
        ("figures", call.options.figures),
        ("release_windows", call.options.releases_windows),
    ]
}

impl Contribution {
    /// This rank's message: its weight, and the dtypes of its gradients.
    pub(crate) fn message(call: &UpdateCall, own_leaves: &[OwnLeaf<'_>]) -> Vec<u8> {
        let codes = own_leaves
            .iter()
            .map(|leaf| leaf.sent_dtype().map_or(0, code_of_dtype));
        call.options
            .weight
            .to_le_bytes()
            .into_iter()
            .chain(codes)
            .collect()
    }

    /// The contribution in the message of a rank. The message must have a dtype for each leaf.
    pub(crate) fn from_message((rank, message): (usize, &Vec<u8>), leaf_count: usize) -> Result<Self> {
        let weight_and_codes = message
            .split_first_chunk()
            .filter(|(_, codes)| codes.len() == leaf_count);
        let (weight, codes) = weight_and_codes.ok_or_else(|| unreadable_error(rank))?;
        Ok(Contribution {
            weight: u64::from_le_bytes(*weight),
            dtypes: codes.iter().map(|code| dtype_of_code(*code)).collect(),
        })
    }
}

/// The dtypes of gradients, by their codes on the wire, from 1. Code 0 means that there is no gradient.
const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

fn code_of_dtype(dtype: DType) -> u8 {
    DTYPES
        .iter()
        .position(|entry| *entry == dtype)
        .map_or(0, |index| index as u8 + 1)
}

fn dtype_of_code(code: u8) -> Option<DType> {
    DTYPES.get(usize::from(code).checked_sub(1)?).copied()
}
