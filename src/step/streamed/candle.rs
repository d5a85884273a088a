//! The methods of a streamed step for [`Segments`](crate::Segments).

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};

use candle_core::{Tensor, TensorId};

use super::super::call::UpdateCall;
use super::super::leaf::LeafPlan;
use super::super::summary::StepSummary;
use super::{OpenLeaf, StreamedStep, plan_leaf};
use crate::engine::Progress;
use crate::error::Result;
use crate::model::candle::not_candle_variable;
use crate::model::lent::Lent;

impl StreamedStep<'_> {
    /// The scale of the loss that the gradients belong to.
    pub(crate) fn loss_scale(&self) -> f64 {
        self.call.loss_scale
    }

    /// The paths of the model's variables. Refuses other memory, because such memory is in no graph.
    pub(crate) fn paths(&mut self) -> Result<HashMap<TensorId, String>> {
        let path = |(open_leaf, x): (&mut Mutex<OpenLeaf>, &Lent<'_>)| {
            let path = &open_leaf
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner)
                .leaf
                .path;
            let variable = x.tensor().ok_or_else(|| not_candle_variable(path))?;
            Ok((variable.id(), path.clone()))
        };
        self.leaves.iter_mut().zip(&self.parameters).map(path).collect()
    }

    /// [`StateTree::warn_of_others`](crate::StateTree::warn_of_others) for variables that no leaf has, unless
    /// the state leaves them out.
    pub(crate) fn warn_of_others<'v>(
        &mut self,
        without_leaf: impl Iterator<Item = &'v Tensor>,
    ) -> Result<()> {
        if !self.state.looks_for_others() {
            return Ok(());
        }
        let left_out: HashSet<_> = self
            .state
            .left_out
            .iter()
            .filter_map(|variable| variable.id)
            .collect();
        let others: Vec<_> = without_leaf.filter(|x| !left_out.contains(&x.id())).collect();
        self.warnings.extend(self.state.warn_of_others(&others)?);
        Ok(())
    }

    /// Refuses the step before the first push, if a required gradient will not come. `will_come` is true for
    /// a variable whose gradient will come.
    pub(crate) fn check_complete(&mut self, will_come: impl Fn(&Tensor) -> bool) -> Result<()> {
        let (leaves, call) = (self.leaves.iter_mut(), &self.call);
        let plans = leaves.zip(&self.parameters).map(|(open_leaf, x)| {
            let leaf = &mut open_leaf.get_mut().unwrap_or_else(PoisonError::into_inner).leaf;
            if x.tensor().is_some_and(&will_come) && !leaf.is_frozen() {
                let progress = Some(Progress::Applied);
                return Ok(LeafPlan {
                    progress,
                    has_gradient: true,
                    moves: true,
                    ..LeafPlan::default()
                });
            }
            // The rule decides what a missing gradient means: a window, for example, may wait for a gradient
            // of a later call.
            plan_leaf(call, leaf, x, [], &mut None).map(|planned| planned.plans[0].clone())
        });
        let plans = plans.collect::<Result<Vec<_>>>()?;
        // The call is not streamed here, because the error would report that parameters have moved.
        let summary = StepSummary::new(
            &UpdateCall {
                is_streamed: false,
                ..call.clone()
            },
            &plans,
        );
        if summary.is_refused() {
            self.put_back();
            return Err(summary.refusal(self.state));
        }
        Ok(())
    }

    /// Pushes the gradient of a segment. If the gradient is not finite and the scaler is dynamic, the
    /// parameter stays and the step goes on, because the falling scale shows the overflow.
    pub(crate) fn push_of_segment(&self, path: &str, gradient: &Tensor) -> Result<()> {
        let is_dynamic = self.scaler.as_ref().is_some_and(|scaler| scaler.is_dynamic());
        self.push_lent(path, gradient, is_dynamic)
            .map_err(|error| {
                match self.overflow_path.get() {
            Some(_) if !is_dynamic => error.with_remedy(
                "parameters that only later segments read have moved; to skip such a step as a whole, give \
                 the gradients of `Segments::gradients` to an update with `Update::finite_only` or a dynamic \
                 `LossScaler`",
            ),
            _ => error,
        }
            })
    }
}
