//! What a rule is made of, told by the rule itself, and all that follows from that.

use std::fmt::{self, Display};

use candle_core::Tensor;
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::field::{Field, FieldValue};

/// Tells what a rule is made of: its kind, its hyper-parameters, and the rules that it holds.
///
/// That is all there is to say for [`Adjust`](crate::Adjust), checkpoints, schedules and errors:
/// [`hyper_parameters!`](crate::hyper_parameters) says it for a struct, and a rule that holds others says what is
/// its own and names them.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use optimisers::{Adjust, Describe, Describer, Descent, Flow, Gradient, Result, Rule, State, range, setup, update};
///
/// /// Runs a rule with a gradient that is `factor` times as long.
/// #[derive(Clone, Debug)]
/// struct Louder<R> {
///     factor: f64,
///     inner: R,
/// }
///
/// impl<R: Rule + Clone> Describe for Louder<R> {
///     fn describe(&mut self, rule: &mut Describer<'_>) {
///         rule.kind("Louder");
///         rule.field("factor", &mut self.factor, 1.0, range::positive);
///         rule.holds(&mut self.inner);
///     }
/// }
///
/// impl<R: Rule + Clone> Rule for Louder<R> {
///     fn inner(&self) -> Option<&dyn Rule> {
///         Some(&self.inner)
///     }
///
///     fn init(&self, x: &Tensor) -> Result<State> {
///         self.inner.init(x)
///     }
///
///     fn apply<'a>(&'a self, state: &'a mut State, x: &'a Tensor, dx: Gradient<'a>) -> Result<Flow<'a>> {
///         self.inner.apply(state, x, dx.scale(self.factor))
///     }
/// }
///
/// let x = Var::new(&[1f32], &Device::Cpu)?;
/// let mut rule = Louder { factor: 2.0, inner: Descent::new(0.25) };
/// assert_eq!(rule.name(), "Louder(Descent)");
/// rule.adjust(0.125)?;
/// rule.adjust_field("factor", 4.0)?;
/// let refused = rule.adjust_field("factor", -1.0).unwrap_err();
/// assert_eq!(refused.to_string(), "Louder: factor is -1, expected a number above 0");
///
/// let mut state = setup(rule, &x)?;
/// update(&mut state, &x, &[("", Tensor::new(&[1f32], &Device::Cpu)?)])?;
/// assert_eq!(x.to_vec1::<f32>()?, [0.5]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Describe {
    /// Says its [kind](Describer::kind), then its labels and fields, and then what it holds: the same each time. Whoever
    /// asks may set the fields that it is shown.
    fn describe(&mut self, rule: &mut Describer<'_>);
}

/// What a rule [describes](Describe) itself to.
pub struct Describer<'v> {
    tell: &'v mut dyn FnMut(&Position, Event<'_>),
    position: Position,
    /// How many members were named so far.
    members: usize,
    /// Whether something that it holds was named.
    has_parts: bool,
}

/// Where in a description something is said.
#[derive(Clone, Default)]
struct Position {
    kind: &'static str,
    /// The numbers of the members that it is in, from the outermost on.
    members: SmallVec<[usize; 4]>,
    /// Whether it is about a rule that has no part in fields, as another has been taken.
    is_hidden: bool,
}

impl Position {
    /// What names in here begin with: empty, or as `1.`.
    fn place(&self) -> String {
        self.members.iter().map(|member| format!("{member}.")).collect()
    }
}

/// What a rule says of itself.
enum Event<'e> {
    Begin,
    End,
    Kind,
    Label(&'e dyn Display),
    Brackets,
    Field(&'static str, &'e mut dyn AnyField),
    Fixed(&'static str),
    Require(&'e mut dyn FnMut() -> Result<()>),
    Choice(&'e mut dyn ParameterChoice),
}

impl fmt::Debug for Describer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Describer").field("kind", &self.position.kind).finish_non_exhaustive()
    }
}

impl Describer<'_> {
    /// The kind of rule: the name of its type, which checkpoints know it by.
    pub fn kind(&mut self, kind: &'static str) {
        self.position.kind = kind;
        self.tell(Event::Kind);
    }

    /// What distinguishes it from others of its kind and is no field, as the dtype of masters: a part of its name.
    pub fn label(&mut self, label: impl Display) {
        self.tell(Event::Label(&label));
    }

    /// A hyper-parameter, with its default and its [range](crate::range).
    pub fn field<F: Field>(&mut self, name: &'static str, value: &mut F, default: F, range: fn(F) -> Option<&'static str>) {
        debug_assert!(!self.position.kind.is_empty(), "a rule says its kind before its field {name}");
        debug_assert!(!self.has_parts, "{} says its field {name} after what it holds", self.position.kind);
        self.tell(Event::Field(name, &mut Typed { value, default, range }));
    }

    /// The name of something that looks like a hyper-parameter and cannot be set, as it decides the layout of the state.
    pub fn fixed(&mut self, name: &'static str) {
        self.tell(Event::Fixed(name));
    }

    /// What has to hold beside the ranges of fields. It is asked for only where the rule is checked.
    pub fn require(&mut self, check: impl FnOnce() -> Result<()>) {
        let mut check = Some(check);
        self.tell(Event::Require(&mut || check.take().map_or(Ok(()), |check| check())));
    }

    /// The rule that this one is around: its fields are addressed as if it stood alone.
    pub fn holds(&mut self, rule: &mut dyn Describe) {
        self.part(self.position.clone(), rule);
    }

    /// The next of several rules: its fields are addressed by its number, from 0 on.
    pub fn member(&mut self, rule: &mut dyn Describe) {
        let mut position = self.position.clone();
        position.members.push(self.members);
        self.members += 1;
        self.part(position, rule);
    }

    /// Its name has brackets even where it holds nothing.
    pub(crate) fn brackets(&mut self) {
        self.tell(Event::Brackets);
    }

    /// A rule that may take the place of the one that is held: it has no part in fields.
    pub(crate) fn alternative(&mut self, rule: &mut dyn Describe) {
        self.part(Position { is_hidden: true, ..self.position.clone() }, rule);
    }

    /// A choice that is made for each parameter.
    pub(crate) fn choice(&mut self, choice: &mut dyn ParameterChoice) {
        self.tell(Event::Choice(choice));
    }

    fn part(&mut self, position: Position, rule: &mut dyn Describe) {
        self.has_parts = true;
        let position = Position { kind: "", ..position };
        let mut part = Describer { tell: &mut *self.tell, position, members: 0, has_parts: false };
        part.tell(Event::Begin);
        rule.describe(&mut part);
        part.tell(Event::End);
    }

    fn tell(&mut self, event: Event<'_>) {
        (self.tell)(&self.position, event);
    }
}

/// A choice between rules by path and shape.
pub(crate) trait ParameterChoice {
    /// The patterns of paths that decide.
    fn patterns(&self) -> &[String];

    /// Decides for a parameter.
    fn choose(&mut self, paths: &[String], x: &Tensor);
}

/// A hyper-parameter of any type.
trait AnyField {
    fn value(&self) -> FieldValue;

    fn default(&self) -> FieldValue;

    /// Sets it, or says which type it takes.
    fn set(&mut self, value: FieldValue) -> std::result::Result<(), &'static str>;

    /// What is expected where the value is out of range.
    fn out_of_range(&self) -> Option<&'static str>;
}

struct Typed<'f, F> {
    value: &'f mut F,
    default: F,
    range: fn(F) -> Option<&'static str>,
}

impl<F: Field> AnyField for Typed<'_, F> {
    fn value(&self) -> FieldValue {
        (*self.value).into()
    }

    fn default(&self) -> FieldValue {
        self.default.into()
    }

    fn set(&mut self, value: FieldValue) -> std::result::Result<(), &'static str> {
        *self.value = F::from_value(value).ok_or(F::EXPECTED)?;
        Ok(())
    }

    fn out_of_range(&self) -> Option<&'static str> {
        (self.range)(*self.value)
    }
}

/// Tells `tell` all that a rule says of itself and of what it holds.
fn visit(rule: &mut dyn Describe, mut tell: impl FnMut(&Position, Event<'_>)) {
    rule.describe(&mut Describer { tell: &mut tell, position: Position::default(), members: 0, has_parts: false });
}

/// A name for people: the kind, with labels and what is held in brackets.
pub(super) fn name(rule: &mut dyn Describe) -> String {
    /// A rule that is being described: its kind, and what is in its brackets, if there are any.
    #[derive(Default)]
    struct Named(&'static str, Option<Vec<String>>);

    impl Named {
        fn inside(&mut self) -> &mut Vec<String> {
            self.1.get_or_insert_default()
        }

        fn text(self) -> String {
            self.1.map_or_else(|| self.0.to_string(), |inside| format!("{}({})", self.0, inside.join(", ")))
        }
    }

    let (mut now, mut around) = (Named::default(), Vec::new());
    visit(rule, |position, event| match event {
        Event::Begin => around.push(std::mem::take(&mut now)),
        Event::End => {
            let part = std::mem::replace(&mut now, around.pop().unwrap_or_default()).text();
            now.inside().push(part);
        }
        Event::Kind => now.0 = position.kind,
        Event::Label(label) => now.inside().push(label.to_string()),
        Event::Brackets => drop(now.inside()),
        _ => {}
    });
    now.text()
}

/// A rule in an optimiser, with what is its own.
#[derive(Debug)]
pub(crate) struct MemberDescription {
    pub(crate) kind: &'static str,
    pub(crate) labels: Vec<String>,
    /// What its fields and state tensors are addressed by: empty, or as `1.`.
    place: String,
    pub(crate) fields: Vec<FieldDescription>,
}

/// A hyper-parameter of a rule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FieldDescription {
    pub(crate) name: &'static str,
    pub(crate) value: FieldValue,
    pub(crate) default: FieldValue,
}

impl MemberDescription {
    /// All rules in an optimiser, in their order.
    pub(crate) fn all(rule: &mut dyn Describe) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        visit(rule, |position, event| match (event, all.last_mut()) {
            _ if position.is_hidden => {}
            (Event::Kind, _) => {
                all.push(MemberDescription { kind: position.kind, labels: Vec::new(), place: position.place(), fields: Vec::new() })
            }
            (Event::Label(label), Some(now)) => now.labels.push(label.to_string()),
            (Event::Field(name, field), Some(now)) => {
                now.fields.push(FieldDescription { name, value: field.value(), default: field.default() });
            }
            _ => {}
        });
        all
    }

    /// The full name of a field or state tensor.
    pub(crate) fn at(&self, name: &str) -> String {
        format!("{}{name}", self.place)
    }
}

/// See [`Adjust::fields`](super::Adjust::fields).
pub(super) fn fields(rule: &mut dyn Describe) -> Vec<(&'static str, FieldValue)> {
    MemberDescription::all(rule).into_iter().flat_map(|member| member.fields).map(|field| (field.name, field.value)).collect()
}

/// See [`Adjust::places`](super::Adjust::places).
pub(super) fn places(rule: &mut dyn Describe) -> Vec<String> {
    MemberDescription::all(rule).iter().flat_map(|member| member.fields.iter().map(|field| member.at(field.name))).collect()
}

/// Why a field was not set: what the rule of this kind takes, or `None` where the field decides the layout of its state.
pub(super) struct Refusal {
    pub(super) kind: &'static str,
    pub(super) name: &'static str,
    pub(super) expected: Option<&'static str>,
    pub(super) got: FieldValue,
}

/// Sets all fields that a name reaches, and says whether there was one.
pub(super) fn set_field(rule: &mut dyn Describe, name: &str, value: FieldValue) -> std::result::Result<bool, Refusal> {
    let (address, name) = address(name);
    let mut found = Ok(false);
    visit(rule, |position, event| {
        let reaches = |known: &str| known == name && !position.is_hidden && position.members.starts_with(&address);
        let refused = |name, expected| Err(Refusal { kind: position.kind, name, expected, got: value });
        match event {
            Event::Field(known, field) if found.is_ok() && reaches(known) => {
                found = field.set(value).map_or_else(|expected| refused(known, Some(expected)), |()| Ok(true));
            }
            Event::Fixed(known) if found.is_ok() && reaches(known) => found = refused(known, None),
            _ => {}
        }
    });
    found
}

/// Sets all fields in their order to these values; where there are fewer, the first ones.
pub(super) fn set_fields(rule: &mut dyn Describe, values: &[FieldValue]) -> std::result::Result<(), Refusal> {
    let (mut values, mut set) = (values.iter(), Ok(()));
    visit(rule, |position, event| match event {
        Event::Field(name, field) if set.is_ok() && !position.is_hidden => {
            let Some(&got) = values.next() else { return };
            set = field.set(got).map_err(|expected| Refusal { kind: position.kind, name, expected: Some(expected), got });
        }
        _ => {}
    });
    set
}

/// The members that a name begins with, and the field in the last of them.
pub(super) fn address(name: &str) -> (SmallVec<[usize; 4]>, &str) {
    let (mut members, mut rest) = (SmallVec::new(), name);
    while let Some((index, inside)) = rest.split_once('.') {
        let Some(member) = index.parse().ok().filter(|number: &usize| number.to_string() == index) else { break };
        members.push(member);
        rest = inside;
    }
    (members, rest)
}

/// Checks every field against its range, and what else rules require.
pub(super) fn check(rule: &mut dyn Describe) -> Result<()> {
    let mut checked = Ok(());
    visit(rule, |position, event| match event {
        _ if checked.is_err() => {}
        Event::Field(name, field) => {
            if let Some(expected) = field.out_of_range() {
                checked = Err(Error::out_of_range(position.kind, name, field.value(), expected));
            }
        }
        Event::Require(check) => checked = check(),
        _ => {}
    });
    checked
}

/// The patterns of paths by which rules are chosen.
pub(crate) fn patterns(rule: &mut dyn Describe) -> Vec<String> {
    let mut all = Vec::new();
    visit(rule, |_, event| {
        if let Event::Choice(choice) = event {
            all.extend_from_slice(choice.patterns());
        }
    });
    all
}

/// Makes all choices for a parameter, and says whether there was one.
pub(crate) fn choose(rule: &mut dyn Describe, paths: &[String], x: &Tensor) -> bool {
    let mut has_chosen = false;
    visit(rule, |_, event| {
        if let Event::Choice(choice) = event {
            choice.choose(paths, x);
            has_chosen = true;
        }
    });
    has_chosen
}
