//! A selection of leaves of a state, and adjustments of their hyper-parameters. An adjustment sets all values
//! or none.
//!
//! An `Adjustment` is made in three steps for each leaf, in copies, so that an error changes nothing:
//! 1. Set the fields in a copy of the leaf's own optimiser, and check ranges.
//! 2. For fields that are no real numbers, check that the state would have the same layout.
//! 3. Resolve the leaf's schedules in the copy, because a relative schedule may now leave the range.
//!
//! Thousands of leaves may share an optimiser, so steps 1 and 2 are cached by its address. `commit` then only
//! assigns the copies.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::acting::{KeyedCache, acting_optimisers};
use super::drives::{Drives, NumberPlace, ScheduleAssignment, ScheduleResolver, fields_with};
use super::{Leaf, StateTree, leaked_error};
use crate::error::{Error, Result, distinct, first_names, one_of};
use crate::numbers::Fingerprint;
use crate::ranks::StateWorld;
use crate::rule::{Adjust, Described, FieldValue, Optimiser, RATE, unknown_name_error};

/// Some leaves of a [`StateTree`](crate::StateTree), to be adjusted, frozen or thawed together.
#[must_use = "a selection does nothing by itself: adjust, freeze or replace it"]
#[derive(Debug)]
pub struct Selection<'t> {
    pub(super) leaves: Vec<&'t mut Leaf>,
    /// The count of applied steps of the state.
    pub(crate) steps: u64,
    /// The state's schedules for all leaves, also for those that are added later; `None` unless `all` or
    /// `at("")` has made the selection.
    pub(super) for_all: Option<&'t mut Vec<ScheduleAssignment>>,
    pub(super) world: &'t StateWorld,
    /// Whether the selection is empty because the state has lost its leaves.
    pub(super) is_leaked: bool,
}

impl Selection<'_> {
    /// [`StateTree::check_leaves`] of the state.
    pub(crate) fn check_leaves(&self) -> Result<()> {
        if self.is_leaked {
            Err(leaked_error())
        } else {
            Ok(())
        }
    }

    /// The selected leaves.
    pub fn leaves(&self) -> impl Iterator<Item = &Leaf> + Clone {
        self.leaves.iter().map(|leaf| &**leaf)
    }

    pub(crate) fn leaves_mut(&mut self) -> impl Iterator<Item = &mut Leaf> {
        self.leaves.iter_mut().map(|leaf| &mut **leaf)
    }

    /// From now on updates skip these leaves: no state, no counter and no parameter changes.
    ///
    /// Two things still change: numbers of the whole model, such as the estimate of
    /// [`Prodigy`](crate::Prodigy), and the count of the steps that an [average](crate::Ema) misses.
    pub fn freeze(self) {
        let has_begun = self.steps > 0;
        self.leaves
            .into_iter()
            .for_each(|leaf| leaf.set_optimiser(leaf.optimiser.clone(), true, has_begun));
    }

    /// From now on updates move these leaves again. A leaf continues with the state that it had when it was
    /// frozen.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use optimisers::{Descent, setup, update};
    ///
    /// let model = [("encoder", Var::new(&[1f32], &Device::Cpu)?), ("head", Var::new(&[1f32], &Device::Cpu)?)];
    /// let model = std::collections::BTreeMap::from(model);
    /// let loss = || model["encoder"].mul(&model["head"])?.sum_all();
    /// let mut state = setup(Descent::new(0.25), &model)?;
    /// state.at("encoder")?.freeze();
    /// update(&mut state, &model, &loss()?.backward()?)?;
    /// assert_eq!((model["encoder"].to_vec1::<f32>()?, model["head"].to_vec1::<f32>()?), (vec![1.0], vec![0.75]));
    /// state.at("encoder")?.thaw();
    /// update(&mut state, &model, &loss()?.backward()?)?;
    /// assert_eq!(model["encoder"].to_vec1::<f32>()?, [0.8125]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn thaw(self) {
        for leaf in self.leaves.into_iter().filter(|leaf| leaf.frozen) {
            leaf.set_optimiser(leaf.optimiser.clone(), false, self.steps > 0);
            leaf.missing_gradients.calls = 0;
        }
    }

    /// Declares that these leaves may lack a gradient, such as experts that get no token.
    ///
    /// No warning names them, and [`StateTree::require_all`](crate::StateTree::require_all) does not refuse
    /// them.
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Descent, setup, update};
    ///
    /// let experts = [Var::ones(2, DType::F32, &Device::Cpu)?, Var::ones(2, DType::F32, &Device::Cpu)?];
    /// let mut state = setup(Descent::new(0.1), &experts)?;
    /// state.require_all();
    /// state.all().allow_missing();
    /// let outcome = update(&mut state, &experts, &experts[1].sqr()?.sum_all()?.backward()?)?;
    /// assert_eq!(outcome.without_gradient, ["0"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn allow_missing(self) {
        for leaf in self.leaves {
            leaf.missing_gradients.is_allowed = true;
        }
    }

    /// Declares that these leaves are meant to be in 16 bits without a master.
    ///
    /// [`Warning::LowPrecision`](crate::Warning::LowPrecision), which is about steps lost by rounding, then
    /// does not count these leaves. If you call this method before the first update, nothing is printed.
    ///
    /// ```
    /// use candle_core::{DType, Device, Var};
    /// use optimisers::{Momentum, Warning, setup};
    ///
    /// let model = [Var::ones(2, DType::BF16, &Device::Cpu)?, Var::ones(2, DType::F16, &Device::Cpu)?];
    /// let mut state = setup(Momentum::new(0.1), &model)?;
    /// assert!(matches!(&state.warnings()[0], Warning::LowPrecision { bf16: 1, f16: 1, .. }));
    /// state.all().allow_low_precision();
    /// assert!(state.warnings().is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn allow_low_precision(self) {
        for leaf in self.leaves {
            leaf.allows_low_precision = true;
        }
    }

    /// Sets the learning rate; in a chain with several rates, [their product](crate::Adjust::adjust).
    ///
    /// This rate is the leaves' own. A [relative](crate::Schedule::relative) schedule multiplies it.
    ///
    /// # Errors
    /// As [`Selection::adjust_field`].
    pub fn adjust(&mut self, eta: f64) -> Result<()> {
        self.adjust_field(RATE, eta)
    }

    /// Sets a hyper-parameter of every leaf that has it, through chains and wrappers.
    ///
    /// If several members of a chain have the field, it is set in all of them. Only `eta` sets [the
    /// product of their rates](crate::Adjust::adjust). A place before the name (`1.lambda`) chooses a member.
    /// A whole number is accepted as a real number.
    ///
    /// A field that decides the layout of the state cannot be adjusted. A field may decide the layout for
    /// some parameters only: `rank` of [`GaLore`](crate::GaLore) does so for a matrix with more than `rank`
    /// rows and columns. So for a field that is no real number, this method makes temporary states on the
    /// CPU, one at a time, and compares their layouts. If the rule is not
    /// [divisible](crate::Rule::is_divisible), a temporary state is as large as the real state.
    ///
    /// # Errors
    /// If no leaf has a field of that name (a [setting](crate::Describer::setting) is no field); if the value
    /// is of the wrong type or out of range; if the field decides the layout of the state; if no value of
    /// the last `eta` gives the [product](crate::Adjust::adjust); if a [schedule](StateTree::schedule) that
    /// is not relative sets the field, or a relative schedule would leave the range. Nothing changes then.
    pub fn adjust_field(&mut self, field: &str, value: impl Into<FieldValue>) -> Result<()> {
        self.adjust_fields([(field, value.into())])
    }

    /// Sets several hyper-parameters in this order, all or none. Ranges are checked after all values are set.
    ///
    /// # Errors
    /// As [`Selection::adjust_field`], for each of the hyper-parameters.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Var};
    /// # use optimisers::{Adam, FieldValue, setup};
    /// # let model = Var::zeros(2, DType::F32, &Device::Cpu)?;
    /// # let mut state = setup(Adam::new(1e-3), &model)?;
    /// state.all().adjust_fields([("eta", 1e-4.into()), ("beta", (0.9, 0.95).into())])?;
    /// assert!(state.all().adjust_fields([("eta", 1.0.into()), ("beta", (0.9, 2.0).into())]).is_err());
    /// assert_eq!(state.leaf("").and_then(|leaf| leaf.field("eta")), Some(FieldValue::Real(1e-4)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn adjust_fields<'f>(
        &mut self,
        values: impl IntoIterator<Item = (&'f str, FieldValue)>,
    ) -> Result<()> {
        self.check_leaves()?;
        let edit = values
            .into_iter()
            .map(|(name, value)| (SetField::Named(name), value))
            .collect();
        let adjustment = Adjustment::new(self.leaves(), self.steps, vec![edit], |_| Some(0))?;
        if let Some(name) = adjustment.missing_field() {
            let make_setting_error =
                |leaf: &Leaf| Some(leaf.optimiser.description().setting_error(name)?.at(&leaf.path));
            if let Some(error) = self.leaves().find_map(make_setting_error) {
                return Err(error);
            }
            let rule_names: BTreeSet<String> =
                self.leaves().map(|leaf| leaf.optimiser.rule().name()).collect();
            let rules = first_names(rule_names.iter()).join(" or ");
            return Err(unknown_name_error(
                &rules,
                "field",
                name,
                &available_fields(self.leaves(), name),
            ));
        }
        self.commit(adjustment);
        Ok(())
    }

    /// Commits an adjustment that was made for these leaves.
    pub(crate) fn commit(&mut self, adjustment: Adjustment<'_>) {
        adjustment.commit(self.leaves_mut());
    }
}

/// All leaves.
impl<'t> From<&'t mut StateTree> for Selection<'t> {
    fn from(state: &'t mut StateTree) -> Self {
        state.all()
    }
}

/// The names of these leaves' fields that an error suggests if no leaf has the field `name`.
pub(crate) fn available_fields<'l>(leaves: impl Iterator<Item = &'l Leaf>, name: &str) -> Vec<String> {
    let names: Vec<String> = leaves
        .flat_map(|leaf| leaf.optimiser.description().available(name))
        .collect();
    distinct(names.iter().map(String::as_str))
}

/// Which fields of an optimiser to set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SetField<'f> {
    /// All fields that a name reaches.
    Named(&'f str),
    /// A real field, or one number of a pair or of three numbers.
    Number(NumberPlace),
}

impl<'f> SetField<'f> {
    /// Sets the field, and returns whether the optimiser has it.
    fn set(self, optimiser: &mut Optimiser, value: FieldValue) -> Result<bool> {
        match (self, value) {
            (SetField::Named(name), _) => optimiser.set_field(name, value),
            (SetField::Number(place), FieldValue::Real(number)) => {
                let fields = fields_with(optimiser, [(place, number)].into_iter());
                optimiser.write(&fields)?;
                Ok(true)
            }
            (SetField::Number(_), _) => Ok(false),
        }
    }

    fn name(self) -> Option<&'f str> {
        if let SetField::Named(name) = self {
            Some(name)
        } else {
            None
        }
    }
}

/// New values of fields of one optimiser, which are set together.
pub(crate) type OptimiserEdit<'f> = Vec<(SetField<'f>, FieldValue)>;

/// A leaf's own optimiser, and the leaf's schedules resolved in it.
type AdjustedOptimiser = (Arc<Optimiser>, Option<Arc<Drives>>);

/// New values of fields for some leaves, checked and not written yet.
pub(crate) struct Adjustment<'f> {
    edits: Vec<OptimiserEdit<'f>>,
    /// The count of applied steps of the state.
    steps: u64,
    /// By leaf; `None` for a leaf that stays as it is.
    changes: Vec<Option<AdjustedOptimiser>>,
    /// The acting optimisers of those leaves that change, in the order of the leaves.
    acting: Vec<Option<Arc<Optimiser>>>,
    /// By edit and field, whether any leaf has the field.
    reached: Vec<Vec<bool>>,
}

impl<'f> Adjustment<'f> {
    /// Sets fields in a copy of each leaf's optimiser. `edit_index_of` gets the index of a leaf and returns
    /// the index of the leaf's edit; `None` for a leaf that stays as it is.
    ///
    /// # Errors
    /// If a value is of the wrong type or out of range, or its field decides the layout of the state; if a
    /// schedule does not fit the values.
    pub(crate) fn new<'l>(
        leaves: impl Iterator<Item = &'l Leaf> + Clone,
        steps: u64,
        edits: Vec<OptimiserEdit<'f>>,
        edit_index_of: impl Fn(usize) -> Option<usize>,
    ) -> Result<Self> {
        let mut reached: Vec<Vec<bool>> = edits.iter().map(|edit| vec![false; edit.len()]).collect();
        // Real numbers never decide the layout, so an edit that sets nothing else needs no check.
        let needs_layout_check: Vec<bool> = edits
            .iter()
            .map(|edit| !edit.iter().all(|(_, value)| value.is_real()))
            .collect();
        let (mut copies, mut layout_checks) = (KeyedCache::default(), KeyedCache::default());
        let mut resolver = ScheduleResolver::default();
        let mut change_of = |(leaf_index, leaf): (usize, &'l Leaf)| {
            let Some(edit_index) = edit_index_of(leaf_index) else {
                return Ok(None);
            };
            let with_path = |error: Error| error.at(&leaf.path);
            let optimiser_address = address(&leaf.optimiser);
            let optimiser: Arc<Optimiser> = copies.get_or_make((optimiser_address, edit_index), || {
                let copy = edited_copy(leaf, &edits[edit_index], &mut reached[edit_index]);
                copy.map(Arc::new).map_err(with_path)
            })?;
            if needs_layout_check[edit_index] {
                // Shape and dtype are in the key because the layout depends on the parameter, too.
                let key = (optimiser_address, edit_index, leaf.shape(), leaf.dtype());
                layout_checks.get_or_make(key, || {
                    check_layout(leaf, &optimiser, &edits[edit_index]).map_err(with_path)
                })?;
            }
            let drives = leaf.drives_in(&optimiser, &mut resolver)?.drives;
            Ok(Some((optimiser, drives)))
        };
        let changes: Vec<_> = leaves
            .clone()
            .enumerate()
            .map(&mut change_of)
            .collect::<Result<_>>()?;
        let changed_leaves = leaves.zip(&changes).filter_map(|(leaf, change)| {
            let (optimiser, drives) = change.as_ref()?;
            Some((leaf.path(), optimiser, drives.as_ref()))
        });
        let acting = acting_optimisers(changed_leaves, steps)?;
        Ok(Adjustment {
            edits,
            steps,
            changes,
            acting,
            reached,
        })
    }

    /// [`Adjustment::new`] with an edit for each leaf. A leaf with an empty edit stays as it is.
    ///
    /// # Errors
    /// As [`Adjustment::new`].
    pub(crate) fn per_leaf<'l>(
        leaves: impl Iterator<Item = &'l Leaf> + Clone,
        steps: u64,
        edits: impl IntoIterator<Item = OptimiserEdit<'f>>,
    ) -> Result<Self> {
        // Equal edits become one edit, so that leaves with a common optimiser still have one afterwards.
        let (mut indices, mut distinct_edits) = (HashMap::new(), Vec::new());
        let index_of = |edit: OptimiserEdit<'f>| {
            let index = *indices.entry(fingerprint(&edit)).or_insert(distinct_edits.len());
            if index == distinct_edits.len() {
                distinct_edits.push(edit);
            }
            index
        };
        let edit_indices: Vec<usize> = edits.into_iter().map(index_of).collect();
        let is_empty: Vec<bool> = distinct_edits.iter().map(Vec::is_empty).collect();
        let edit_index_of =
            |leaf_index: usize| Some(edit_indices[leaf_index]).filter(|edit_index| !is_empty[*edit_index]);
        Adjustment::new(leaves, steps, distinct_edits, edit_index_of)
    }

    /// The first field that no leaf has.
    fn missing_field(&self) -> Option<&'f str> {
        let mut fields = self.edits.iter().flatten().zip(self.reached.iter().flatten());
        fields.find_map(|((field, _), is_reached)| field.name().filter(|_| !is_reached))
    }

    /// Gives each leaf its new optimiser, its schedules and its acting optimiser.
    ///
    /// `leaves` are the leaves for which the adjustment was made.
    pub(crate) fn commit<'l>(self, leaves: impl IntoIterator<Item = &'l mut Leaf>) {
        let changed = leaves
            .into_iter()
            .zip(self.changes)
            .filter_map(|(leaf, change)| Some((leaf, change?)));
        for ((leaf, (optimiser, drives)), acting) in changed.zip(self.acting) {
            leaf.set_optimiser(optimiser, leaf.frozen, self.steps > 0);
            (leaf.drives, leaf.acting) = (drives, acting);
        }
    }
}

/// A hash of fields and values.
fn fingerprint(edit: &OptimiserEdit<'_>) -> u64 {
    let add_field = |hash: Fingerprint, (field, value): &(SetField<'_>, FieldValue)| {
        let with_name = match field {
            SetField::Named(name) => hash.bytes(name.as_bytes()),
            SetField::Number((index, part)) => hash
                .number(*index as u64)
                .number(part.map_or(0, |part| part as u64 + 1)),
        };
        value.add_to_hash(with_name)
    };
    edit.iter().fold(Fingerprint::new(), add_field).finish()
}

fn address(optimiser: &Arc<Optimiser>) -> *const () {
    Arc::as_ptr(optimiser).cast()
}

/// A copy of the leaf's optimiser with these values. Marks in `reached` the fields that the optimiser has.
fn edited_copy(leaf: &Leaf, edit: &OptimiserEdit<'_>, reached: &mut [bool]) -> Result<Optimiser> {
    let mut optimiser = Optimiser::clone(&leaf.optimiser);
    for ((field, value), is_reached) in edit.iter().zip(reached) {
        *is_reached |= field.set(&mut optimiser, *value)?;
    }
    optimiser.check()?;
    Ok(optimiser)
}

/// Refuses fields if the `adjusted` optimiser would make state of another layout for this leaf.
fn check_layout(leaf: &Leaf, adjusted: &Optimiser, edit: &OptimiserEdit<'_>) -> Result<()> {
    if leaf.has_layout_of(adjusted)? {
        return Ok(());
    }
    // The error names the first field that changes the layout by itself. If only several fields together
    // change the layout, the error names the first field of the edit.
    let decides = |(field, value): &&(SetField<'_>, FieldValue)| {
        let mut copy = Optimiser::clone(&leaf.optimiser);
        field.set(&mut copy, *value).is_ok_and(|has_field| has_field)
            && !leaf.has_layout_of(&copy).is_ok_and(|has_layout| has_layout)
    };
    let Some((field, _)) = edit.iter().find(decides).or(edit.first()) else {
        return Ok(());
    };
    // Only a `SetField::Number` has no name, and numbers decide no layout.
    let field = field.name().unwrap_or_default();
    let other_names: Vec<String> = adjusted
        .description()
        .available(field)
        .into_iter()
        .filter(|name| *name != field)
        .collect();
    let remedy = "set up a new state, or give the parameters another rule by `Selection::replace`";
    let error = adjusted.layout_error(field).with_expected(one_of(&other_names));
    Err(error.with_remedy(remedy))
}
