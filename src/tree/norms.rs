//! The norms of earlier calls, and which norm is an outlier among them.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::engine::NormLimit;
use crate::numbers::Fingerprint;
use crate::rule::field::Number;

/// The last norms of each group of parameters with a limit, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct NormHistories(BTreeMap<u64, VecDeque<Number>>);

/// The norms of a call that have a limit, by group.
pub(crate) type LimitedNorms = BTreeMap<u64, (f64, NormLimit)>;

/// A norm that is too far above those of earlier calls.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Outlier {
    /// The [group](crate::SkipOutliers::group) of parameters.
    pub group: u64,
    /// The norm of their gradients.
    pub norm: f64,
    /// The largest norm that is accepted.
    pub limit: f64,
}

impl NormHistories {
    /// The fewest norms, the current norm included, that decide on an outlier. Half of [`NormLimit::window`]
    /// must be filled, too, but never more than all of it.
    const FEWEST: usize = 20;

    /// The least standard deviation, relative to the mean. A smaller deviation is likely due to rounding.
    const ROUNDING: f64 = 1e-6;

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The first group whose norm is an outlier.
    pub(crate) fn outlier(&self, norms: &LimitedNorms) -> Option<Outlier> {
        norms
            .iter()
            .find_map(|(&group, &(norm, NormLimit { sigma, window, .. }))| {
                let limit = self.limit(group, sigma, window).filter(|limit| norm > *limit)?;
                Some(Outlier { group, norm, limit })
            })
    }

    /// The largest norm of a group that is no outlier; `None` if there are too few norms to decide.
    fn limit(&self, group: u64, sigma: f64, window: usize) -> Option<f64> {
        let norms = self.0.get(&group)?;
        let norms: Vec<f64> = norms
            .iter()
            .rev()
            .take(window)
            .map(|Number(norm)| *norm)
            .collect();
        let count = norms.len() as f64;
        // `FEWEST` includes the current norm, hence − 1.
        if norms.len() < window.min(Self::FEWEST.max(window / 2) - 1) {
            return None;
        }
        let mean = norms.iter().sum::<f64>() / count;
        let variance = norms.iter().map(|norm| (norm - mean).powi(2)).sum::<f64>() / (count - 1.0);
        // No limit if all norms are zero, because then every other norm would be an outlier.
        (mean > 0.0).then_some(mean + sigma * variance.sqrt().max(Self::ROUNDING * mean))
    }

    /// Adds the norms of a call to the histories.
    pub(crate) fn record(&mut self, norms: &LimitedNorms) {
        for (&group, &(norm, limit)) in norms {
            let history = self.0.entry(group).or_default();
            history.push_back(Number(norm));
            history.drain(..history.len().saturating_sub(limit.window));
        }
    }

    /// A hash of all norms.
    pub(crate) fn fingerprint(&self) -> u64 {
        let add_group = |hash: Fingerprint, (group, norms): (&u64, &VecDeque<Number>)| {
            let with_group = hash.number(*group).number(norms.len() as u64);
            norms
                .iter()
                .fold(with_group, |hash, Number(norm)| hash.real(*norm))
        };
        self.0.iter().fold(Fingerprint::new(), add_group).finish()
    }

    /// The first number that is not a norm.
    pub(crate) fn first_invalid(&self) -> Option<f64> {
        let mut norms = self.0.values().flatten().map(|Number(norm)| *norm);
        norms.find(|norm| !(*norm >= 0.0 && norm.is_finite()))
    }
}
