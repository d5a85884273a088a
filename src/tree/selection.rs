use std::collections::HashMap;
use std::collections::HashSet;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::Arc;

use smallvec::SmallVec;

use super::once::Once;
use super::{Leaf, StateTree, leaked};
use crate::error::{Error, ErrorKind, Result, listed, one_of};
use crate::rule::{FieldValue, Optimiser, RATE, available, has_no, set_value};

/// Some leaves of a [`StateTree`](crate::StateTree), to be adjusted, frozen or thawed together.
#[must_use = "a selection does nothing by itself: adjust, freeze or replace it"]
#[derive(Debug)]
pub struct Selection<'t> {
    pub(super) leaves: Vec<&'t mut Leaf>,
    /// Whether these are none because the state has lost its leaves.
    pub(super) is_leaked: bool,
}

impl Selection<'_> {
    /// [`StateTree::check_leaves`] of the state.
    pub(crate) fn check_leaves(&self) -> Result<()> {
        if self.is_leaked { Err(leaked()) } else { Ok(()) }
    }

    /// The selected leaves.
    pub fn leaves(&self) -> impl Iterator<Item = &Leaf> {
        self.leaves.iter().map(|leaf| &**leaf)
    }

    pub(crate) fn leaves_mut(&mut self) -> impl Iterator<Item = &mut Leaf> {
        self.leaves.iter_mut().map(|leaf| &mut **leaf)
    }

    /// Updates pass these leaves over from now on: no state, no counter and no parameter moves.
    ///
    /// Only numbers of the whole model follow it, as the estimate of [`Prodigy`](crate::Prodigy).
    pub fn freeze(self) {
        for leaf in self.leaves {
            leaf.frozen = true;
        }
    }

    /// Updates move these leaves again, from the state they were frozen with.
    pub fn thaw(self) {
        for leaf in self.leaves.into_iter().filter(|leaf| leaf.frozen) {
            leaf.frozen = false;
            leaf.waiting.calls = 0;
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
            leaf.waiting.is_allowed = true;
        }
    }

    /// Declares that these leaves are meant to be in 16 bits without a master.
    ///
    /// The warning about steps that are lost there, [`Warning::LowPrecision`](crate::Warning::LowPrecision),
    /// does not speak of them then. If you call this before the first update, nothing is printed.
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

    /// Sets the learning rate: in a chain with several, [their product](crate::Adjust::adjust).
    ///
    /// The rate is the leaves' own then: a new [`Scheduler`](crate::Scheduler) may start from it, even if
    /// another has driven the leaves before.
    ///
    /// # Errors
    /// As [`Selection::adjust_field`].
    pub fn adjust(&mut self, eta: f64) -> Result<()> {
        self.adjust_field(RATE, eta)
    }

    /// Sets a hyper-parameter of every leaf that has it, through chains and wrappers.
    ///
    /// A name that several members have is set in all; only `eta` sets [their
    /// product](crate::Adjust::adjust). With a place before it (`1.lambda`) a name is set in that member. A
    /// whole number is accepted for a real one.
    ///
    /// Whether a field decides the layout of the state depends on the parameter: `rank` of
    /// [`GaLore`](crate::GaLore) does for a matrix that is larger. Fields that are no real numbers are tried
    /// on states of the rule, on the CPU. Those of a rule that is not [divisible](crate::Rule::is_divisible)
    /// have the sizes of the parameters, and one exists at a time.
    ///
    /// # Errors
    /// If no leaf has a field of that name, the value is of the wrong type or out of range, or the field
    /// decides the layout of the state. If no value of the last `eta` makes the
    /// [product](crate::Adjust::adjust) right. Nothing changes then.
    pub fn adjust_field(&mut self, field: &str, value: impl Into<FieldValue>) -> Result<()> {
        self.adjust_fields([(field, value.into())])
    }

    /// Sets several hyper-parameters in their order, all or none. Ranges are checked when all are set.
    ///
    /// # Errors
    /// As [`Selection::adjust_field`], for any of them.
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
        let values: SmallVec<[(&str, FieldValue); 2]> = values.into_iter().collect();
        let names: SmallVec<[&str; 2]> = values.iter().map(|(name, _)| *name).collect();
        let values = values.into_iter().map(|(name, value)| (SetField::Named(name), value)).collect();
        let adjustment = Adjustment::new(self.leaves(), vec![values], |_| Some(0))?;
        if let Some(name) = adjustment.missing() {
            let mut rules: Vec<String> = self.leaves().map(|leaf| leaf.optimiser.rule().name()).collect();
            rules.sort();
            rules.dedup();
            let rules = listed(rules.iter().map(String::as_str)).join(" or ");
            return Err(has_no(&rules, "field", name, &available_in(self.leaves(), name)));
        }
        adjustment.commit(self.leaves_mut());
        for leaf in self.leaves_mut() {
            names.iter().for_each(|name| leaf.unmark(name));
        }
        Ok(())
    }
}

/// All leaves.
impl<'t> From<&'t mut StateTree> for Selection<'t> {
    fn from(state: &'t mut StateTree) -> Self {
        state.all()
    }
}

/// The hyper-parameters in reach, for the error that this name is missing.
pub(crate) fn available_in<'l>(leaves: impl Iterator<Item = &'l Leaf>, name: &str) -> Vec<String> {
    let mut seen = HashSet::new();
    let mut all: Vec<String> = leaves.flat_map(|leaf| available(&*leaf.optimiser, name)).collect();
    all.retain(|name| seen.insert(name.clone()));
    all
}

/// A field that is to be set.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SetField<'f> {
    /// All fields that a name reaches.
    Named(&'f str),
    /// The real number with this index.
    At(usize),
}

impl SetField<'_> {
    /// Sets the field, and returns whether there was one.
    fn set(self, optimiser: &mut dyn Optimiser, value: FieldValue) -> Result<bool> {
        match self {
            SetField::Named(name) => optimiser.set_field(name, value),
            SetField::At(index) => set_value(optimiser, index, value).map(|()| true),
        }
    }

    /// The name that an error has for it.
    fn name(self, optimiser: &dyn Optimiser) -> String {
        match self {
            SetField::Named(name) => name.to_string(),
            SetField::At(index) => optimiser.places().get(index).cloned().unwrap_or_default(),
        }
    }
}

/// Fields that are set together.
type FieldSetting<'f> = Vec<(SetField<'f>, FieldValue)>;

/// Fields to be set in leaves, tried on copies of their optimisers.
pub(crate) struct Adjustment<'f> {
    settings: Vec<FieldSetting<'f>>,
    changes: Vec<Change>,
    /// Which fields of each setting a leaf has.
    reached: Vec<Vec<bool>>,
}

/// What happens to a leaf's optimiser.
enum Change {
    Keep,
    /// The leaf's own takes the fields of this setting.
    Set(usize),
    /// A new optimiser, which several leaves share, takes its place.
    Replace(Arc<dyn Optimiser>),
}

impl<'f> Adjustment<'f> {
    /// Tries to set, in each leaf, the fields of the setting that `which` returns for it.
    ///
    /// # Errors
    /// If a value is of the wrong type or out of range, or its field decides the layout of the state.
    pub(crate) fn new<'l>(
        leaves: impl Iterator<Item = &'l Leaf>,
        settings: Vec<FieldSetting<'f>>,
        which: impl Fn(usize) -> Option<usize>,
    ) -> Result<Self> {
        let mut reached: Vec<Vec<bool>> = settings.iter().map(|setting| vec![false; setting.len()]).collect();
        let (mut shared, mut fitting) = (Once::default(), Once::default());
        let mut change = |(i, leaf): (usize, &'l Leaf)| {
            let Some(setting) = which(i) else { return Ok(Change::Keep) };
            let with_path = |error: Error| error.at(&leaf.path);
            let mut adjusted = || {
                with_fields(leaf, &settings[setting], &mut reached[setting]).map(Arc::from).map_err(with_path)
            };
            let (own, is_shared) = (address(&leaf.optimiser), Arc::strong_count(&leaf.optimiser) > 1);
            let optimiser = if is_shared { shared.get((own, setting), adjusted)? } else { adjusted()? };
            if settings[setting].iter().any(|(_, value)| !value.is_real()) {
                // Whether a field decides on the state depends on the parameter, too.
                let check_layout = || check_layout(leaf, &*optimiser, &settings[setting]).map_err(with_path);
                fitting.get((own, setting, leaf.shape(), leaf.dtype()), check_layout)?;
            }
            Ok(if is_shared { Change::Replace(optimiser) } else { Change::Set(setting) })
        };
        let changes = leaves.enumerate().map(&mut change).collect::<Result<_>>()?;
        Ok(Adjustment { settings, changes, reached })
    }

    /// [`Adjustment::new`] by keys: leaves with one key get its setting, leaves without one keep what they
    /// have.
    ///
    /// # Errors
    /// As [`Adjustment::new`].
    pub(crate) fn by_key<'l, K: Eq + Hash>(
        leaves: impl Iterator<Item = &'l Leaf>,
        keys: impl IntoIterator<Item = Option<K>>,
        setting: impl Fn(&K) -> FieldSetting<'f>,
    ) -> Result<Self> {
        let mut settings = Vec::new();
        let mut places: HashMap<K, usize> = HashMap::new();
        let mut place = |key: K| match places.entry(key) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                settings.push(setting(new.key()));
                *new.insert(settings.len() - 1)
            }
        };
        let which: Vec<Option<usize>> = keys.into_iter().map(|key| key.map(&mut place)).collect();
        Adjustment::new(leaves, settings, |leaf| which[leaf])
    }

    /// The first field that no leaf has.
    fn missing(&self) -> Option<&'f str> {
        let fields = self.settings.iter().flatten().zip(self.reached.iter().flatten());
        fields.into_iter().find_map(|((field, _), reached)| match field {
            SetField::Named(name) if !reached => Some(*name),
            _ => None,
        })
    }

    /// Sets the fields in the leaves for which it was made.
    pub(crate) fn commit<'l>(self, leaves: impl IntoIterator<Item = &'l mut Leaf>) {
        for (leaf, change) in leaves.into_iter().zip(self.changes) {
            match change {
                Change::Keep => {}
                Change::Set(setting) => set_in_place(&mut leaf.optimiser, &self.settings[setting]),
                Change::Replace(optimiser) => leaf.optimiser = optimiser,
            }
        }
    }
}

/// Sets fields that a copy has taken.
fn set_in_place(optimiser: &mut Arc<dyn Optimiser>, setting: &FieldSetting<'_>) {
    let Some(optimiser) = Arc::get_mut(optimiser) else { return };
    for (field, value) in setting {
        let _taken = field.set(optimiser, *value);
    }
}

fn address(optimiser: &Arc<dyn Optimiser>) -> *const () {
    Arc::as_ptr(optimiser).cast()
}

/// The leaf's optimiser with these values; marks which were found.
fn with_fields(leaf: &Leaf, setting: &FieldSetting<'_>, reached: &mut [bool]) -> Result<Box<dyn Optimiser>> {
    let mut optimiser = dyn_clone::clone_box(&*leaf.optimiser);
    for ((field, value), reached) in setting.iter().zip(reached) {
        *reached |= field.set(&mut *optimiser, *value)?;
    }
    optimiser.check()?;
    Ok(optimiser)
}

/// Refuses fields with which the rule, `adjusted` now, would have made another state for this leaf.
fn check_layout(leaf: &Leaf, adjusted: &dyn Optimiser, setting: &FieldSetting<'_>) -> Result<()> {
    if leaf.fits(adjusted)? {
        return Ok(());
    }
    let decides = |(field, value): &&(SetField<'_>, FieldValue)| {
        let mut alone = dyn_clone::clone_box(&*leaf.optimiser);
        let is_set = field.set(&mut *alone, *value);
        is_set.is_ok_and(|is_set| is_set) && !leaf.fits(&*alone).is_ok_and(|fits| fits)
    };
    let Some((field, _)) = setting.iter().find(decides).or(setting.first()) else { return Ok(()) };
    let (rule, field) = (adjusted.rule().name(), field.name(adjusted));
    let available: Vec<String> =
        available(adjusted, &field).into_iter().filter(|name| *name != field).collect();
    let problem = format!("{rule}: {field} decides the layout of the state and cannot be adjusted");
    let error = Error::new(ErrorKind::Argument, problem).with_expected(one_of(&available));
    Err(error.with_remedy("set up a new state, or give the parameters another rule by `Selection::replace`"))
}
