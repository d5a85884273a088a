//! The state of a rule for one parameter: named tensors, counters and numbers, nothing else.
//!
//! A state is a tree: the states of held rules are its `children`, in the order in which the rule describes
//! them. The full name of an entry has the indices on its way in front, as in `0.t`. Every list of entries
//! has the order of `State::walk`, because checkpoints pair names with memory by position.
//!
//! A wrapper or the size of the parameter may convert tensors to another format (`store_as`, `widen_small`).

pub(crate) mod copies;
pub(crate) mod held;
pub(crate) mod parts;
pub(crate) mod rows;
pub(crate) mod shared;
pub(crate) mod slot;
pub(crate) mod transfer;

use std::fmt;

use super::description::ChildPlace;
use super::{Adjust, Parameter};
use crate::engine::{Buffer, filled, rounded};
use crate::error::{Error, ErrorKind, Result, joined};
use crate::numbers::codes::BLOCK;
use crate::numbers::{Code, DType, Records, Shape, compute_dtype, elem_count};
use crate::tensors::{Device, Tensor, Var};
use slot::{EntryTraits, Initial, Renewal, Sign, Slot, SlotFormat};

/// The state of one rule for one parameter: named tensors, counters and numbers.
///
/// It includes the states of the rules that the rule holds. A rule's [`init`](crate::Rule::init) makes it;
/// the engines update the tensors in place.
#[must_use]
#[derive(Default)]
pub struct State {
    /// The copy of the parameter that steps are taken on: a master, or under `Offload` the copy on the CPU.
    pub(crate) master: Option<Buffer>,
    /// Under `Offload`, what goes to the device after a step: the variable of `master`, or scratch for the
    /// rounded master of a held state. Scratch is overwritten in each step, hence never saved.
    pub(crate) staging: Option<Var>,
    pub(crate) tensors: Vec<(&'static str, Buffer)>,
    pub(crate) counters: Vec<(&'static str, u64)>,
    /// Real numbers that are not per element.
    pub(crate) numbers: Vec<(&'static str, f64)>,
    /// Properties of own entries besides their values. Entries without a property have no element here.
    pub(crate) traits: Vec<(&'static str, EntryTraits)>,
    /// Whether tensors of another state are taken over only all together. They are one sum, and a part of it
    /// would give a wrong mean.
    pub(crate) is_one: bool,
    pub(crate) children: Vec<Child>,
}

/// The state of a held rule.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) place: ChildPlace,
    pub(crate) state: State,
}

/// All that can be written in a state and in those of held rules.
#[derive(Debug, Default)]
pub(crate) struct StateParts<'s> {
    pub(crate) tensors: Vec<&'s mut Buffer>,
    pub(crate) counters: Vec<&'s mut u64>,
    pub(crate) numbers: Vec<&'s mut f64>,
}

/// The entries by their full names: tensors with format and shape, not with their numbers; then counters and
/// numbers of the whole parameter.
impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensor = |(name, tensor): (String, &Buffer)| {
            format!("{name} {} {:?}", SlotFormat::of(tensor), tensor.shape())
        };
        let entries = self.tensors().into_iter().map(tensor);
        let counters = self.counters().into_iter().map(|(name, count)| format!("{name} {count}"));
        let numbers = self.numbers().into_iter().map(|(name, number)| format!("{name} {number:?}"));
        f.write_str(&joined(&entries.chain(counters).chain(numbers).collect::<Vec<_>>()))
    }
}

impl State {
    /// No state at all.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Tensors of the shape and on the device of `x`, and one counter `t` of applied steps.
    ///
    /// # Errors
    /// If a slot cannot be stored in its format, see [`Slot::stored_as`]; if the device has no memory left.
    pub fn for_slots(x: Parameter<'_>, slots: &[Slot]) -> Result<Self> {
        let state = slots
            .iter()
            .try_fold(State::empty().with_counter("t"), |state, slot| state.with_slot(*slot, x, x.shape()))?;
        // If all tensors are copies, new weights leave nothing of the earlier steps, so `t` starts anew too.
        let only_copies = !slots.is_empty() && slots.iter().all(|slot| slot.initial == Initial::Parameter);
        Ok(if only_copies { state.zeroed_by_new_weights("t") } else { state })
    }

    /// Adds a tensor of this `shape`, which may be another than that of `x`.
    ///
    /// # Errors
    /// As [`State::for_slots`].
    pub fn with_slot(mut self, slot: Slot, x: Parameter<'_>, shape: impl Into<Shape>) -> Result<Self> {
        let shape = crate::tensors::Shape::from(shape.into().dims());
        let dtype =
            if let Some(SlotFormat::Dtype(dtype)) = slot.format { dtype } else { compute_dtype(x.dtype()) };
        let copied = if slot.is_average { Renewal::Average } else { Renewal::Copy };
        let renewal = (slot.initial == Initial::Parameter).then_some(copied);
        // Set first, because `traits_of` and `code_of` read them.
        if slot.sign.is_some() || renewal.is_some() {
            *self.traits_mut(slot.name) = EntryTraits { sign: slot.sign, renewal, ..EntryTraits::default() };
        }
        self.traits_of(slot.name).check_format(slot.name, slot.format.unwrap_or(dtype.into()))?;
        let code = (slot.format == Some(SlotFormat::Q8)).then(|| self.code_of(slot.name));
        let new =
            |values: &Tensor| code.map_or_else(|| Buffer::new(values), |code| Buffer::coded(values, code));
        let buffer = match slot.initial {
            // Takes no memory before its first write, so that `StoreAs` can exchange the format for free.
            Initial::Value(0.0) => Buffer::of_zeros(shape, dtype, code.map(Records::Codes), x.device())?,
            Initial::Value(initial) => new(&filled(initial, shape, dtype, x.device())?)?,
            Initial::Parameter => new(&rounded(&x.values()?, dtype)?.broadcast_as(shape)?)?,
        };
        self.tensors.push((slot.name, buffer.of_squares(slot.sign == Some(Sign::SecondMoment))));
        Ok(self)
    }

    /// Adds a tensor that exists already.
    pub(crate) fn with_buffer(mut self, name: &'static str, buffer: Buffer) -> Self {
        self.tensors.push((name, buffer));
        self
    }

    /// Adds a counter that starts at 0.
    pub fn with_counter(mut self, name: &'static str) -> Self {
        self.counters.push((name, 0));
        self
    }

    /// Adds a number that is not per element, such as the sum of a rule's weights. Checkpoints save it.
    ///
    /// `range` is a function of [`range`](crate::range), or one like it. A finite number outside of it is
    /// refused in a file and by [`set_entries`](crate::StateTree::set_entries). A checkpoint is not saved
    /// either if a step has set such a number, so the range has to contain all that steps can set.
    pub fn with_number(
        mut self,
        name: &'static str,
        value: f64,
        range: fn(f64) -> Option<&'static str>,
    ) -> Self {
        self.numbers.push((name, value));
        self.traits_mut(name).range = Some(range);
        self
    }

    /// The state of a store that has a master, around the state of its rule.
    pub(crate) fn with_master(master: &Tensor, inner: State) -> Result<Self> {
        Ok(State { master: Some(Buffer::new(master)?), ..State::default() }.stored_with(inner))
    }

    /// The tensor whose rounding the parameter has to be, if there is one, also inside of `Offload`.
    pub(crate) fn followed(&self) -> Option<&Buffer> {
        match (&self.master, &self.children[..]) {
            (None, [Child { place: ChildPlace::Stored, state }]) => state.followed(),
            (master, _) => master.as_ref(),
        }
    }

    /// Whether this is the tensor whose rounding the parameter has to be.
    pub(crate) fn is_followed(&self, tensor: &Buffer) -> bool {
        self.followed().is_some_and(|master| std::ptr::eq(master, tensor))
    }

    /// Makes this the state of a store, around the state of its rule.
    pub(crate) fn stored_with(mut self, rule: State) -> Self {
        self.children.push(Child { place: ChildPlace::Stored, state: rule });
        self
    }

    pub(super) fn traits_of(&self, name: &str) -> EntryTraits {
        self.traits
            .iter()
            .find(|(own, _)| *own == name)
            .map_or_else(EntryTraits::default, |(_, traits)| *traits)
    }

    pub(super) fn traits_mut(&mut self, name: &'static str) -> &mut EntryTraits {
        let place = self.traits.iter().position(|(own, _)| *own == name).unwrap_or_else(|| {
            self.traits.push((name, EntryTraits::default()));
            self.traits.len() - 1
        });
        &mut self.traits[place].1
    }

    /// Visits this state, then those of held rules in order, each with the prefix of its names.
    pub(super) fn walk<'s>(&'s self, prefix: &str, visit: &mut dyn FnMut(&str, &'s State)) {
        visit(prefix, self);
        for child in &self.children {
            child.state.walk(&child.prefixed(prefix), visit);
        }
    }

    /// Every tensor under its full name, the rule's own first.
    pub(crate) fn tensors(&self) -> Vec<(String, &Buffer)> {
        let mut tensors = Vec::new();
        self.walk("", &mut |prefix, state| {
            let master = state.master.iter().map(|buffer| ("master", buffer));
            let slots = state.tensors.iter().map(|(name, buffer)| (*name, buffer));
            tensors.extend(master.chain(slots).map(|(name, tensor)| (format!("{prefix}{name}"), tensor)));
        });
        tensors
    }

    /// Every counter under its full name.
    pub(crate) fn counters(&self) -> Vec<(String, u64)> {
        let mut counters = Vec::new();
        self.walk("", &mut |prefix, state| {
            counters.extend(state.counters.iter().map(|(name, count)| (format!("{prefix}{name}"), *count)))
        });
        counters
    }

    /// Every number under its full name.
    pub(crate) fn numbers(&self) -> Vec<(String, f64)> {
        let mut numbers = Vec::new();
        self.walk("", &mut |prefix, state| {
            numbers.extend(state.numbers.iter().map(|(name, value)| (format!("{prefix}{name}"), *value)))
        });
        numbers
    }

    /// What is expected of the number with this full name, if `value` is finite and out of its range.
    ///
    /// Infinity and NaN are not asked, because a program may [accept
    /// them](crate::CheckpointFile::accepting_non_finite).
    pub(crate) fn number_fault(&self, name: &str, value: f64) -> Option<&'static str> {
        let mut expected = None;
        self.walk("", &mut |prefix, state| {
            let own =
                name.strip_prefix(prefix).filter(|own| state.numbers.iter().any(|(name, _)| name == own));
            expected = expected.or_else(|| state.traits_of(own?).range?(value));
        });
        expected.filter(|_| value.is_finite())
    }

    /// Everything, in the order of [`State::tensors`], [`State::counters`] and [`State::numbers`].
    pub(crate) fn parts_mut(&mut self) -> StateParts<'_> {
        let mut parts = StateParts::default();
        self.collect_mut(&mut parts);
        parts
    }

    fn collect_mut<'s>(&'s mut self, parts: &mut StateParts<'s>) {
        // The order of `walk`: see the head of this file.
        parts.tensors.extend(self.master.as_mut());
        parts.tensors.extend(self.tensors.iter_mut().map(|(_, buffer)| buffer));
        parts.counters.extend(self.counters.iter_mut().map(|(_, count)| count));
        parts.numbers.extend(self.numbers.iter_mut().map(|(_, value)| value));
        for child in &mut self.children {
            child.state.collect_mut(parts);
        }
    }

    /// A copy with storage of its own, on the same devices.
    pub(crate) fn copy(&self) -> Result<Self> {
        self.map_tensors(&|buffer| buffer.on(buffer.device()))
    }

    /// A copy on a device.
    pub(crate) fn to_device(&self, device: &Device) -> Result<Self> {
        self.map_tensors(&|buffer| buffer.on(device))
    }

    fn map_tensors(&self, buffer: &dyn Fn(&Buffer) -> Result<Buffer>) -> Result<Self> {
        let copied =
            |child: &Child| Ok(Child { place: child.place, state: child.state.map_tensors(buffer)? });
        let master = self.master.as_ref().map(buffer).transpose()?;
        let staging = match (&self.staging, &master) {
            // `staging` is the variable of the master, so the copies have to share one variable, too.
            (Some(_), Some(master)) => master.variable().cloned(),
            (Some(room), None) => Some(Var::zeros(room.shape(), room.dtype(), room.device())?),
            (None, _) => None,
        };
        Ok(State {
            staging,
            tensors: self
                .tensors
                .iter()
                .map(|(name, old)| Ok((*name, buffer(old)?)))
                .collect::<Result<_>>()?,
            counters: self.counters.clone(),
            numbers: self.numbers.clone(),
            traits: self.traits.clone(),
            is_one: self.is_one,
            children: self.children.iter().map(copied).collect::<Result<_>>()?,
            master,
        })
    }
}

impl Child {
    pub(super) fn prefixed(&self, outer: &str) -> String {
        self.place.number().map_or_else(|| outer.to_string(), |i| format!("{outer}{i}."))
    }
}

/// The error for a state whose layout is not that of `rule`. A rule returns this error and not the bare
/// gradient, because the bare gradient would be a step of another size.
pub(crate) fn state_of_another_rule<T>(rule: &(impl Adjust + ?Sized)) -> Result<T> {
    Err(not_made_by(&rule.name()))
}

pub(in crate::rule) fn not_made_by(rule: &str) -> Error {
    Error::new(ErrorKind::Contract, format!("the state was not made by {rule}"))
        .with_remedy("keep the state that the `init` of each rule made, also of each held rule")
}

/// The fewest elements that a tensor in 8 bits has. A multiple of the block.
const LEAST_CODED: usize = 32 * BLOCK;

impl State {
    pub(crate) fn code_of(&self, slot: &str) -> Code {
        if self.traits_of(slot).sign.is_some() { Code::NonNegative } else { Code::Signed }
    }

    /// Converts tensors to `format`, also of held rules, and returns how many were converted.
    ///
    /// With a `name` these are the tensors of this name, which must all fit the format. Without one these are
    /// all tensors that fit.
    pub(crate) fn store_as(&mut self, name: Option<&str>, format: SlotFormat) -> Result<usize> {
        let mut converted = 0;
        for index in 0..self.tensors.len() {
            let own = self.tensors[index].0;
            let (traits, code) = (self.traits_of(own), self.code_of(own));
            match name {
                Some(name) if name == own => traits.check_format(own, format)?,
                None if traits.check_format(own, format).is_ok() => {}
                _ => continue,
            }
            converted += 1;
            let buffer = &mut self.tensors[index].1;
            let stored = match format {
                // Made anew, because a conversion would make a copy in F32, which for 8 bits takes several
                // times the memory of the state.
                _ if buffer.is_zero() => {
                    let (dtype, records) = match format {
                        SlotFormat::Dtype(dtype) => (dtype, None),
                        SlotFormat::Q8 => (DType::U8, Some(Records::Codes(code))),
                    };
                    Buffer::of_zeros(buffer.shape().into(), dtype, records, buffer.device())?
                }
                SlotFormat::Dtype(dtype) => Buffer::new(&rounded(&buffer.tensor()?, dtype)?)?,
                SlotFormat::Q8 => Buffer::coded(&buffer.tensor()?, code)?,
            };
            // A new buffer lacks this mark, by which checks of gradients find squares that would overflow.
            *buffer = stored.of_squares(buffer.is_of_squares());
        }
        self.children
            .iter_mut()
            .try_fold(converted, |converted, child| Ok(converted + child.state.store_as(name, format)?))
    }

    /// Converts tensors that are too small for 8 bits back to F32. The state is for `part` elements of a
    /// parameter with `whole` elements.
    pub(crate) fn widen_small(&mut self, part: usize, whole: usize) -> Result<()> {
        for (_, buffer) in self.tensors.iter_mut().filter(|(_, buffer)| buffer.code().is_some()) {
            // A tensor as long as the part counts as long as the whole, so that all ranks decide alike.
            let elements = elem_count(buffer.shape());
            if (if elements == part { whole } else { elements }) < LEAST_CODED {
                *buffer = Buffer::new(&buffer.tensor()?)?.of_squares(buffer.is_of_squares());
            }
        }
        self.children.iter_mut().try_for_each(|child| child.state.widen_small(part, whole))
    }
}
