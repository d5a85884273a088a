//! Calls that are skipped once their numbers are known: what becomes of the state, and what is said.

use crate::error::Result;
use crate::outcome::{Outcome, Outlier, Status};
use crate::tree::{LimitedNorms, NormOutlier, StateTree};
use crate::warning::Warning;

/// The gradient of this parameter is not finite. If all gradients of the call are, windows `cannot_end`: what they have collected would be as little
/// finite in the next call.
pub(super) fn not_finite(state: &mut StateTree, outcome: Outcome, path: String, cannot_end: bool) -> Result<Outcome> {
    let outcome = without_effect(outcome);
    if !cannot_end {
        return Ok(Outcome { overflow: Some(path), ..outcome });
    }
    state.end_windows()?;
    let warnings = state.warnings.meet(Warning::WindowsGivenUp { path: path.clone() }).into_iter().collect();
    Ok(Outcome { given_up: Some(path), warnings, ..outcome })
}

/// A norm is an outlier. It counts among those before the next call all the same, as norms that stay large are none any more; of what windows have
/// collected for it, nothing stays.
pub(super) fn outlier(state: &mut StateTree, outcome: Outcome, found: NormOutlier, norms: &LimitedNorms) -> Result<Outcome> {
    let NormOutlier { group, norm, limit, is_collected } = found;
    state.norms.record(norms);
    if is_collected {
        state.end_windows()?;
    }
    Ok(Outcome { outlier: Some(Outlier { group, norm, limit }), ..without_effect(outcome) })
}

fn without_effect(outcome: Outcome) -> Outcome {
    Outcome { applied: 0, accumulated: 0, status: Status::Skipped, ..outcome }
}
