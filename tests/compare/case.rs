//! What both sides of the comparison speak of: a random training in plain data, and what is there after each of
//! its events.
//!
//! Nothing here names the crate that is compared, so that a commit with another interface takes the same cases.
//! An adapter names every field of [`Case`] and [`Step`] and every variant of the enums, without `..` and `_`.
//! An adapter that does not know a kind of case then does not compile; otherwise it would pass over what it does
//! not know, and the comparison would be hollow.

use std::path::PathBuf;

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    F16,
    BF16,
    F32,
    F64,
}

/// How the optimiser stores its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    Bare,
    MasterF32,
    MasterF64,
    Kahan,
    Split,
    Split24,
    Stochastic,
    Offload,
    OffloadMaster,
}

/// How the state tensors of the rule are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moments {
    AsTheyAre,
    InBF16,
    In8Bits,
}

/// What stands before the rules.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Around {
    Nothing,
    /// A window of this many calls.
    Window(u64),
    /// A limit of all gradients' norm.
    ClipAll(f64),
    /// A limit of each gradient's norm.
    ClipEach(f64),
    /// Lion with a mask.
    Cautious,
}

/// The learning rate of step 0, 1, and so on, up to a last step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Curve {
    Linear {
        first: f64,
        last: f64,
        steps: u64,
    },
    Cosine {
        first: f64,
        last: f64,
        steps: u64,
    },
    /// Up from 0, and down to 0.
    WarmUp {
        peak: f64,
        warmup: u64,
        steps: u64,
    },
    /// Each parameter's own rate, times a factor that falls from 1.
    OfOwnRates {
        last: f64,
        steps: u64,
    },
}

#[derive(Clone, Debug)]
pub struct Parameter {
    pub shape: Vec<usize>,
    pub format: Format,
    pub values: Vec<f64>,
}

/// How the gradients of a step are handed over.
#[derive(Clone, Debug, PartialEq)]
pub enum Delivery {
    Lent,
    /// To be freed as they are used.
    Given,
    /// One at a time, in this order of parameters.
    Streamed(Vec<usize>),
}

/// A gradient in a format of its own; `None` if there is none.
pub type Gradient = Option<(Format, Vec<f64>)>;

#[derive(Clone, Debug)]
pub struct Step {
    /// For each rank, for each parameter.
    pub gradients: Vec<Vec<Gradient>>,
    pub delivery: Delivery,
    pub finite_only: bool,
    /// Of each rank.
    pub weights: Vec<u64>,
    pub loss_scale: Option<f64>,
}

/// What happens in a training.
#[derive(Clone, Debug)]
pub enum Event {
    Step(Step),
    /// All is saved to a file, and read from there into a fresh state and fresh parameters.
    Resume,
    Freeze(usize),
    Thaw(usize),
    /// A rate of its own for a parameter.
    Rate(usize, f64),
    /// Another value of a field, for all.
    Field(&'static str, f64),
    /// Other rules, in the same store, for a parameter.
    Replace(usize, Vec<String>),
    /// One parameter more, with the rules of the case.
    Add(Parameter),
}

/// One training.
#[derive(Clone, Debug)]
pub struct Case {
    /// Names of rules, a chain of them.
    pub rules: Vec<String>,
    pub around: Around,
    pub moments: Moments,
    pub store: Store,
    pub curve: Option<Curve>,
    /// Over how many ranks the state is divided.
    pub ranks: usize,
    /// Whether parameters and gradients lie in slices, and not in candle's tensors.
    pub slices: bool,
    /// Whether single operations of tensors compute the steps.
    pub tensors: bool,
    pub parameters: Vec<Parameter>,
    pub events: Vec<Event>,
    /// Where [`Event::Resume`] saves.
    pub file: PathBuf,
}

/// After an event: whether it was taken, and every bit by name, of parameters, state tensors and counters. After
/// a step also its outcome.
#[derive(Clone, Debug, PartialEq)]
pub struct After {
    pub taken: bool,
    pub bits: Vec<(String, Vec<u64>)>,
}

/// What came of a step, each a number or NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// 0 moved, 1 accumulated, 2 nothing to move, 3 not finite, 4 skipped for another reason.
    pub status: u8,
    pub applied: usize,
    pub accumulated: usize,
    pub frozen: usize,
    pub without_gradient: usize,
    pub learning_rate: f64,
    pub norm: f64,
    pub loss_scale: f64,
}

impl Outcome {
    /// By name.
    pub fn bits(self) -> Vec<(String, Vec<u64>)> {
        let Outcome {
            status,
            applied,
            accumulated,
            frozen,
            without_gradient,
            learning_rate,
            norm,
            loss_scale,
        } = self;
        let counts = [
            ("status", status.into()),
            ("applied", applied),
            ("accumulated", accumulated),
            ("frozen", frozen),
            ("without gradient", without_gradient),
        ];
        let numbers = [
            ("learning rate", learning_rate),
            ("norm", norm),
            ("loss scale", loss_scale),
        ];
        let counts = counts.map(|(name, count)| (name, count as u64));
        let all = counts
            .into_iter()
            .chain(numbers.map(|(name, number)| (name, bits(number))));
        all.map(|(name, bits)| (format!("outcome: {name}"), vec![bits]))
            .collect()
    }
}

/// The bits of a number; all NaN are one.
pub fn bits(number: f64) -> u64 {
    if number.is_nan() {
        u64::MAX
    } else {
        number.to_bits()
    }
}

/// After each event; `None` where the model was refused.
pub type Run = Option<Vec<After>>;

/// The run of several ranks, from that of each.
pub fn together(runs: Vec<Run>) -> Run {
    let mut runs = runs.into_iter();
    let mut all = runs.next()??;
    for (rank, run) in runs.enumerate() {
        for (all, of_rank) in all.iter_mut().zip(run?) {
            all.taken &= of_rank.taken;
            all.bits.extend(
                of_rank
                    .bits
                    .into_iter()
                    .map(|(name, bits)| (format!("rank {}: {name}", rank + 1), bits)),
            );
        }
    }
    Some(all)
}

/// Random numbers that a seed decides.
struct Dice(u64);

impl Dice {
    fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 11
    }

    fn below(&mut self, end: usize) -> usize {
        (self.number() % end as u64) as usize
    }

    fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }

    fn values(&mut self, count: usize, size: f64) -> Vec<f64> {
        (0..count)
            .map(|_| (self.number() as f64 / (1u64 << 52) as f64 - 1.0) * size)
            .collect()
    }

    fn parameter(&mut self, format: Option<Format>, ranks: usize) -> Parameter {
        let shape = match self.below(10) {
            // Long enough to be cut among ranks.
            _ if ranks > 1 && self.one_in(3) => vec![40_000],
            0 => vec![1],
            1 | 2 => vec![1 + self.below(700)],
            3 => vec![1 + self.below(3), 1 + self.below(6), 1 + self.below(6)],
            4 if self.one_in(20) => vec![40_000],
            _ => vec![1 + self.below(12), 1 + self.below(40)],
        };
        let format = format.unwrap_or_else(|| self.of(&FORMATS));
        Parameter {
            values: self.values(shape.iter().product(), 1.0),
            shape,
            format,
        }
    }

    fn curve(&mut self) -> Curve {
        let (first, steps) = (self.of(&[0.01, 0.1]), 2 + self.below(6) as u64);
        match self.below(4) {
            0 => Curve::Linear {
                first,
                last: 0.001,
                steps,
            },
            1 => Curve::Cosine {
                first,
                last: 0.0,
                steps,
            },
            2 => Curve::WarmUp {
                peak: first,
                warmup: 2,
                steps: steps.max(3),
            },
            _ => Curve::OfOwnRates { last: 0.1, steps },
        }
    }

    /// The order of some parameters.
    fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        (1..count)
            .rev()
            .for_each(|last| order.swap(last, self.below(last + 1)));
        order
    }

    /// A gradient for each parameter; one in `times` is missing.
    fn gradients(&mut self, parameters: &[Parameter], times: usize) -> Vec<Gradient> {
        let mut gradient = |x: &Parameter| {
            let format = if self.one_in(2) {
                x.format
            } else {
                self.of(&FORMATS)
            };
            (!self.one_in(times)).then(|| (format, self.values(x.values.len(), 0.5)))
        };
        parameters.iter().map(&mut gradient).collect()
    }
}

const FORMATS: [Format; 4] = [Format::F16, Format::BF16, Format::F32, Format::F64];
const STORES: [Store; 9] = [
    Store::Bare,
    Store::MasterF32,
    Store::MasterF64,
    Store::Kahan,
    Store::Split,
    Store::Split24,
    Store::Stochastic,
    Store::Offload,
    Store::OffloadMaster,
];

/// How many steps a training has.
const STEPS: usize = 6;

impl Case {
    /// The case of this seed, with a chain that begins with this rule, of these that there are.
    pub fn new(seed: u64, rule: &str, rules: &[String], file: PathBuf) -> Self {
        let mut dice = Dice(seed);
        let dice = &mut dice;
        let mut chain = vec![rule.to_string()];
        if dice.one_in(4) {
            chain.push(dice.of(rules));
        }
        let around = match dice.below(8) {
            0 => Around::Window(2 + dice.below(2) as u64),
            1 => Around::ClipAll(0.3),
            2 => Around::ClipEach(0.1),
            3 => Around::Cautious,
            _ => Around::Nothing,
        };
        let moments = dice.of(&[
            Moments::AsTheyAre,
            Moments::AsTheyAre,
            Moments::InBF16,
            Moments::In8Bits,
        ]);
        let ranks = if dice.one_in(6) { 2 } else { 1 };
        // A divided state is not offloaded.
        let store = dice.of(if ranks > 1 { &STORES[..7] } else { &STORES });
        let curve = dice.one_in(4).then(|| dice.curve());
        let format = dice.one_in(2).then(|| dice.of(&FORMATS));
        let parameters: Vec<Parameter> = (0..1 + dice.below(3))
            .map(|_| dice.parameter(format, ranks))
            .collect();
        let slices = dice.one_in(3);
        let mut case = Case {
            rules: chain,
            around,
            moments,
            store,
            curve,
            ranks,
            slices,
            tensors: dice.one_in(4),
            parameters,
            events: Vec::new(),
            file,
        };
        case.events = case.random_events(dice, rules, format);
        case
    }

    fn random_events(&self, dice: &mut Dice, rules: &[String], format: Option<Format>) -> Vec<Event> {
        let mut parameters = self.parameters.clone();
        let is_streamed = self.ranks == 1 && dice.one_in(5);
        let is_given = dice.one_in(6);
        // Of a window it matters when a gradient is missing.
        let missing = if let Around::Window(_) = self.around {
            4
        } else {
            12
        };
        let step = |dice: &mut Dice, parameters: &[Parameter]| {
            let first = dice.gradients(parameters, missing);
            let mut gradients = vec![first; self.ranks];
            // Those of other ranks have the same formats. One may be missing there.
            for gradient in gradients[1..].iter_mut().flatten() {
                if let Some((_, values)) = gradient {
                    *values = dice.values(values.len(), 0.5);
                }
                if dice.one_in(12) {
                    *gradient = None;
                }
            }
            Step {
                gradients,
                delivery: if is_streamed {
                    Delivery::Streamed(dice.order(parameters.len()))
                } else if is_given {
                    Delivery::Given
                } else {
                    Delivery::Lent
                },
                finite_only: dice.one_in(3),
                weights: (0..self.ranks).map(|_| 1 + dice.below(4) as u64).collect(),
                loss_scale: dice.one_in(4).then(|| dice.of(&[1024.0, 0.125])),
            }
        };
        let (mut events, mut frozen) = (vec![Event::Step(step(dice, &parameters))], None);
        for _ in 1..STEPS {
            // Few, so that most trainings with one of them have no other.
            match dice.below(30) {
                0 | 1 => events.push(Event::Resume),
                2 | 3 if frozen.is_none() => {
                    let parameter = dice.below(parameters.len());
                    frozen = Some(parameter);
                    events.push(Event::Freeze(parameter));
                }
                4 => events.push(Event::Rate(dice.below(parameters.len()), 0.03)),
                5 => {
                    let (field, value) = dice.of(&[("epsilon", 1e-4), ("rho", 0.5), ("lambda", 0.1)]);
                    events.push(Event::Field(field, value));
                }
                6 => events.push(Event::Replace(dice.below(parameters.len()), vec![dice.of(rules)])),
                // A divided state takes no parameter more.
                7 if self.ranks == 1 => {
                    let parameter = dice.parameter(format, self.ranks);
                    parameters.push(parameter.clone());
                    events.push(Event::Add(parameter));
                }
                _ => {}
            }
            events.push(Event::Step(step(dice, &parameters)));
            if dice.one_in(2) {
                events.extend(frozen.take().map(Event::Thaw));
            }
        }
        events
    }

    /// Of which [`KINDS`] it is.
    pub fn kinds(&self) -> Vec<&'static str> {
        let steps: Vec<&Step> = self
            .events
            .iter()
            .filter_map(|event| {
                if let Event::Step(step) = event {
                    Some(step)
                } else {
                    None
                }
            })
            .collect();
        let has = |kind: &dyn Fn(&Event) -> bool| self.events.iter().any(kind);
        let misses_one = steps
            .iter()
            .any(|step| step.gradients.iter().flatten().any(Option::is_none));
        let is_one = [
            self.slices,
            self.tensors,
            self.ranks > 1,
            self.curve.is_some(),
            steps
                .iter()
                .any(|step| matches!(step.delivery, Delivery::Streamed(_))),
            steps.iter().any(|step| step.delivery == Delivery::Given),
            steps.iter().any(|step| step.loss_scale.is_some()),
            misses_one,
            misses_one && matches!(self.around, Around::Window(_)),
            has(&|event| matches!(event, Event::Resume)),
            has(&|event| matches!(event, Event::Thaw(_))),
            has(&|event| matches!(event, Event::Rate(..))),
            has(&|event| matches!(event, Event::Field(..))),
            has(&|event| matches!(event, Event::Replace(..))),
            has(&|event| matches!(event, Event::Add(_))),
        ];
        KINDS
            .into_iter()
            .zip(is_one)
            .filter_map(|(kind, is_one)| is_one.then_some(kind))
            .collect()
    }
}

/// What the comparison counts.
pub const KINDS: [&str; 15] = [
    "slices",
    "tensor operations",
    "two ranks",
    "a curve of rates",
    "streamed gradients",
    "given gradients",
    "a scaled loss",
    "a missing gradient",
    "a window with a missing gradient",
    "saved and resumed",
    "frozen and thawed",
    "a rate of its own",
    "another field",
    "replaced rules",
    "an added parameter",
];
