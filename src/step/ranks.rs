//! The ranks of a call: their agreements, their weights and their norms. Gradients travel in
//! `step/ranks/exchange.rs`.
//!
//! A process alone has all gradients and agrees with itself, so the stages of a step are the same for one
//! process and for several ranks. With several ranks each agreement is a meeting point that every rank must
//! reach, also with an error. So errors go through `settle` or into the next agreement; a `?` before the
//! agreement would leave the other ranks waiting.

pub(crate) mod exchange;

use super::call::UpdateCall;
use super::contribution::{Contribution, OwnLeaf, update_agreement};
use super::leaf::{GradientSource, LeafUpdate};
use crate::engine::{ChunkTotals, Engine, Job, ReduceOutcome, UpdateTargets, reduce};
use crate::error::{Error, ErrorKind, Result};
use crate::model::gradients::GradientLookUp;
use crate::model::lent::{Lend, Lent};
use crate::numbers::{counts, widest_compute_dtype};
use crate::ranks::{Call, KeptSums, StateWorld, difference_error};
use crate::tree::Leaf;

/// The ranks that take part in a call, with their gradients as one rank has them: the rank's own gradients
/// as a whole, and for its own parts the gradients of the other ranks, once these gradients are fetched.
pub(super) struct Ranks<'w> {
    pub(super) world: &'w StateWorld,
    /// This rank's share of each leaf; empty without other ranks.
    pub(super) leaves: Vec<OwnLeaf<'w>>,
    /// The contribution of each rank, by rank; empty without other ranks.
    contributions: Vec<Contribution>,
}

impl<'w> Ranks<'w> {
    /// The ranks of a call without other ranks.
    pub(super) const fn alone(world: &'w StateWorld) -> Self {
        Ranks {
            world,
            leaves: Vec::new(),
            contributions: Vec::new(),
        }
    }

    /// Agrees on the call, and sets its weight and divisor to the values of all ranks together. Also returns
    /// the sources from which plans get the gradients of their leaves.
    pub(super) fn agree<'g>(
        world: &'w StateWorld,
        call: &mut UpdateCall,
        leaves: &[Box<Leaf>],
        parameters: &'w [Lent<'_>],
        grads: &'g dyn GradientLookUp,
        by_leaf: Vec<GradientSource<'g>>,
    ) -> Result<(Self, Vec<GradientSource<'g>>)> {
        if !world.is_divided() {
            return Ok((Ranks::alone(world), by_leaf));
        }
        let targets = UpdateTargets::all_registered();
        let gradients = GradientSource::for_all_leaves(by_leaf);
        let own_leaves = leaves
            .iter()
            .zip(parameters)
            .zip(gradients)
            .map(|((leaf, x), mut gradient)| {
                OwnLeaf::new(call, leaf, &**x, gradient.take(leaf, &**x, grads), &targets)
            });
        let prepared = own_leaves.collect::<Result<Vec<_>>>().map(|own_leaves| {
            let message = Contribution::message(call, &own_leaves);
            (own_leaves, update_agreement(call, leaves), message)
        });
        let (own_leaves, messages) = world.agree_on(Call::Update, prepared)?;
        let mut contributions = messages
            .iter()
            .enumerate()
            .map(|message| Contribution::from_message(message, leaves.len()))
            .collect::<Result<Vec<_>>>()?;
        // All ranks have the same contributions, so what follows is the same on all, errors too.
        check_any_gradient(call, &contributions)?;
        set_weights(call, &mut contributions)?;
        let ranks = Ranks {
            world,
            leaves: own_leaves,
            contributions,
        };
        let sources = ranks.promised_sources();
        Ok((ranks, sources))
    }

    /// The sources that the plans of all leaves get until the gradients come.
    fn promised_sources<'g>(&self) -> Vec<GradientSource<'g>> {
        let promise = |leaf: usize| {
            let dtypes = self
                .contributions
                .iter()
                .filter_map(|contribution| contribution.dtypes[leaf]);
            let mut dtypes = dtypes.peekable();
            match dtypes.peek() {
                Some(_) => GradientSource::Promised(widest_compute_dtype(dtypes)),
                None => GradientSource::from_handles([]),
            }
        };
        (0..self.leaves.len()).map(promise).collect()
    }

    /// This rank's part of the parameter of a leaf.
    pub(super) fn part<'a>(&'a self, leaf: usize, parameters: &'a [Lent<'_>]) -> &'a dyn Lend {
        self.leaves
            .get(leaf)
            .map_or_else(|| &*parameters[leaf] as _, |own_leaf| &*own_leaf.x)
    }

    /// If the state requires all gradients, refuses a gradient that only some ranks have. What no rank has is
    /// refused by `StepSummary`. In a window of `AccumGrad` a rank may bring the gradient in another call.
    pub(super) fn check_required(&self, call: &UpdateCall, updates: &[LeafUpdate<'_, '_>]) -> Result<()> {
        if !call.requires_all {
            return Ok(());
        }
        for (leaf, LeafUpdate { plan, job, .. }) in updates.iter().enumerate() {
            let is_required = plan.has_gradient && !plan.allows_missing && !plan.windows.counts_call;
            let lacks =
                |contribution: &Contribution| contribution.weight > 0 && contribution.dtypes[leaf].is_none();
            // A frozen leaf has no job.
            let (Some(job), true, Some(rank)) = (job, is_required, self.contributions.iter().position(lacks))
            else {
                continue;
            };
            let problem = format!("rank {rank} has no gradient for it, and the state requires all gradients");
            let remedy = "declare the parameter with `Selection::allow_missing`, and its gradient counts as \
                          zeros there; or set `Update::weight` to 0 on a rank without data";
            let error = Error::new(ErrorKind::NoGradient, problem).of_rank(rank);
            return Err(error.with_remedy(remedy).at(job.path));
        }
        Ok(())
    }

    /// Fetches the gradients that are needed before anything is written. Returns the leaves whose gradients
    /// come in the commit.
    pub(super) fn add_up(
        &self,
        engine: Engine,
        jobs: &mut [Option<Job<'_>>],
        sums: &mut KeptSums,
    ) -> Result<Vec<usize>> {
        if !self.world.is_divided() {
            return Ok(Vec::new());
        }
        self.fetch_sums(engine, jobs, sums)
            .or_else(|error| self.world.settle(Call::Plan, Err(error)))
    }

    /// The reduce stage.
    pub(super) fn reduce(&self, engine: Engine, jobs: &mut [Option<Job<'_>>]) -> Result<ReduceOutcome> {
        let gather = |totals| self.gather(totals);
        let outcome = reduce(
            engine,
            &gather,
            &mut jobs.iter_mut().flatten().collect::<Vec<_>>(),
        );
        outcome.map_err(|error| self.add_origin(error, jobs))
    }

    /// If an error of all ranks is about a gradient that is not finite, adds the first rank that brought such
    /// a gradient.
    fn add_origin(&self, error: Error, jobs: &[Option<Job<'_>>]) -> Error {
        let path = error.path().filter(|_| error.kind() == ErrorKind::NotFinite);
        let leaf = path.and_then(|path| {
            jobs.iter()
                .position(|job| job.as_ref().is_some_and(|job| job.path == path))
        });
        let Some(own_leaf) = leaf.and_then(|leaf| self.leaves.get(leaf)) else {
            return error;
        };
        // Every rank has the same error, so every rank takes part in this agreement.
        let own_message = own_leaf
            .is_finite()
            .map(|is_finite| ((), vec![u8::from(!is_finite)]));
        match self.world.agree(Call::Reduce, own_message) {
            Ok(((), messages)) => match messages.iter().position(|message| *message == [1]) {
                Some(rank) => error.caused_by_rank(rank),
                None => error,
            },
            Err(error) => error,
        }
    }

    /// The commit stage. An error names the parameters that have moved.
    pub(super) fn commit(
        &self,
        engine: Engine,
        jobs: &mut [Option<Job<'_>>],
        late_leaves: &[usize],
    ) -> Result<()> {
        let result = self.commit_all(engine, jobs, late_leaves);
        let moved_paths = jobs
            .iter()
            .flatten()
            .filter(|job| job.has_moved)
            .map(|job| job.path);
        self.world
            .settle(Call::Commit, result.map_err(|error| error.after(moved_paths)))
    }

    /// The totals of the chunks of all ranks, in the order of elements.
    ///
    /// # Errors
    /// If this or another rank has failed, or has other numbers to add up.
    fn gather(&self, own_totals: Result<Vec<ChunkTotals>>) -> Result<Vec<ChunkTotals>> {
        if !self.world.is_divided() {
            return own_totals;
        }
        let prepared = own_totals.map(|lists| {
            let mut bytes = Vec::new();
            for list in &lists {
                // Each list goes with its length, because other ranks have other numbers of chunks.
                bytes.extend((list.len() as u64).to_le_bytes());
                bytes.extend(list.iter().flat_map(|total| total.to_le_bytes()));
            }
            (lists.len(), bytes)
        });
        let (count, messages) = self.world.agree(Call::Reduce, prepared)?;
        let mut totals = vec![ChunkTotals::new(); count];
        for (rank, message) in messages.iter().enumerate() {
            if read_totals(message, &mut totals).is_none() {
                let own_rank = self.world.rank();
                let what = format_args!("the number of norms and sums, compared with rank {own_rank}");
                return Err(difference_error(rank, what));
            }
        }
        Ok(totals)
    }
}

/// Refuses a rank that has no gradient although it counts in the mean, unless no rank has a gradient or such
/// a call is allowed.
fn check_any_gradient(call: &UpdateCall, contributions: &[Contribution]) -> Result<()> {
    let has_any = |contribution: &Contribution| contribution.dtypes.iter().any(Option::is_some);
    let lacks_all = |contribution: &Contribution| contribution.weight > 0 && !has_any(contribution);
    let rank = contributions.iter().position(lacks_all);
    let Some(rank) = rank.filter(|_| !call.options.allow_no_gradients && contributions.iter().any(has_any))
    else {
        return Ok(());
    };
    let problem = format!("rank {rank} has no gradient at all, but a weight above 0 in the mean");
    let remedy = match call.requires_all {
        true => "on a rank without data set `Update::weight` to 0",
        false => {
            "on a rank without data set `Update::weight` to 0; or call `Update::allow_no_gradients` on all \
             ranks, and its gradients count as zeros"
        }
    };
    let error = Error::new(ErrorKind::NoGradient, problem).of_rank(rank);
    Err(error.with_remedy(remedy))
}

/// Sets the weight and the divisor of a call to those of all ranks together, and divides the weights of the
/// ranks by their greatest common divisor, so that equal weights become 1 and no multiplication rounds.
fn set_weights(call: &mut UpdateCall, contributions: &mut [Contribution]) -> Result<()> {
    let ranks = contributions.len();
    let weights = || contributions.iter().map(|contribution| contribution.weight);
    let (weight, divisor) = (
        weights().fold(0, u64::saturating_add),
        weights().fold(0, greatest_common_divisor),
    );
    counts::check(format!("the sum of the weights of all {ranks} ranks is"), weight)
        .map_err(|error| error.with_remedy("set smaller weights with `Update::weight`"))?;
    if divisor == 0 && !call.options.allow_no_gradients {
        let problem = format!("the weights of all {ranks} ranks are");
        let error = Error::new(ErrorKind::Argument, problem).with_got(0);
        let remedy = "set the weight of each rank with `Update::weight`; or call \
                      `Update::allow_no_gradients`, if no rank has data";
        return Err(error.with_expected("at least one above 0").with_remedy(remedy));
    }
    // If all weights are 0, there is no gradient to divide.
    let divisor = divisor.max(1);
    contributions
        .iter_mut()
        .for_each(|contribution| contribution.weight /= divisor);
    (call.weight, call.divisor) = (weight, (weight / divisor).max(1));
    Ok(())
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

/// Appends the lists in the message of a rank to `totals`. `None` if the message has more or fewer lists.
fn read_totals(message: &[u8], totals: &mut [ChunkTotals]) -> Option<()> {
    let mut words = message.as_chunks().0.iter();
    for list in totals {
        let length = usize::try_from(u64::from_le_bytes(*words.next()?)).ok()?;
        let (numbers, rest) = words.as_slice().split_at_checked(length)?;
        list.extend(numbers.iter().map(|word| f64::from_le_bytes(*word)));
        words = rest.iter();
    }
    words.next().is_none().then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_of_other_numbers_of_lists_are_unreadable() {
        let message = |words: &[u64]| {
            words
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .collect::<Vec<_>>()
        };
        let one = 1f64.to_bits();
        let read = |words: &[u64]| {
            let mut totals = vec![ChunkTotals::new(); 2];
            read_totals(&message(words), &mut totals).map(|()| totals.iter().map(|list| list.len()).collect())
        };
        let lengths: Option<Vec<usize>> = read(&[0, 2, one, one]);
        assert_eq!(lengths, Some(vec![0, 2]));
        let others = [
            &[][..],
            &[0],
            &[0, 2, one],
            &[1, one],
            &[0, 0, 0],
            &[u64::MAX, one, 0],
        ];
        for words in others {
            assert_eq!(read(words), None::<Vec<usize>>, "{words:?}");
        }
    }
}
