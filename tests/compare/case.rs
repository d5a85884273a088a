//! What both sides of the comparison speak of: a random training, in plain data, and what is there after each
//! of its calls.

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

#[derive(Clone, Debug)]
pub struct Parameter {
    pub shape: Vec<usize>,
    pub format: Format,
    pub values: Vec<f64>,
}

#[derive(Clone, Debug)]
pub struct Call {
    /// For each parameter its gradient, in a format of its own; none if it has none.
    pub gradients: Vec<Option<(Format, Vec<f64>)>>,
    pub finite_only: bool,
    pub weight: u64,
    pub loss_scale: Option<f64>,
}

/// One training.
#[derive(Clone, Debug)]
pub struct Case {
    /// Names of rules, a chain of them.
    pub rules: Vec<String>,
    pub around: Around,
    pub moments: Moments,
    pub store: Store,
    /// Whether parameters and gradients lie in slices, and not in candle's tensors.
    pub slices: bool,
    /// Whether single operations of tensors compute the steps.
    pub tensors: bool,
    pub parameters: Vec<Parameter>,
    pub calls: Vec<Call>,
}

/// After a call: whether it was taken, and every bit by name, of parameters, state tensors and counters.
pub type After = (bool, Vec<(String, Vec<u64>)>);

/// After each call; none where the model was refused.
pub type Run = Option<Vec<After>>;

/// Random numbers that a seed decides.
pub struct Dice(pub u64);

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
        (0..count).map(|_| (self.number() as f64 / (1u64 << 52) as f64 - 1.0) * size).collect()
    }
}

const FORMATS: [Format; 4] = [Format::F16, Format::BF16, Format::F32, Format::F64];

impl Case {
    /// The case of this seed, with a chain that begins with this rule, of these that there are.
    pub fn new(seed: u64, rule: &str, rules: &[String]) -> Self {
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
        let moments = dice.of(&[Moments::AsTheyAre, Moments::AsTheyAre, Moments::InBF16, Moments::In8Bits]);
        let store = dice.of(&[
            Store::Bare,
            Store::MasterF32,
            Store::MasterF64,
            Store::Kahan,
            Store::Split,
            Store::Split24,
            Store::Stochastic,
            Store::Offload,
            Store::OffloadMaster,
        ]);
        let one_format = dice.one_in(2).then(|| dice.of(&FORMATS));
        let parameters: Vec<Parameter> = (0..1 + dice.below(3))
            .map(|_| {
                let shape = match dice.below(10) {
                    0 => vec![1],
                    1 | 2 => vec![1 + dice.below(700)],
                    3 => vec![1 + dice.below(3), 1 + dice.below(6), 1 + dice.below(6)],
                    4 if dice.one_in(20) => vec![40_000],
                    _ => vec![1 + dice.below(12), 1 + dice.below(40)],
                };
                let format = one_format.unwrap_or_else(|| dice.of(&FORMATS));
                Parameter { values: dice.values(shape.iter().product(), 1.0), shape, format }
            })
            .collect();
        let call = |_| Call {
            gradients: parameters
                .iter()
                .map(|x| {
                    (!dice.one_in(12)).then(|| {
                        (
                            if dice.one_in(2) { x.format } else { dice.of(&FORMATS) },
                            dice.values(x.values.len(), 0.5),
                        )
                    })
                })
                .collect(),
            finite_only: dice.one_in(3),
            weight: 1 + dice.below(4) as u64,
            loss_scale: dice.one_in(4).then(|| dice.of(&[1024.0, 0.125])),
        };
        let calls = (0..5).map(call).collect();
        Case {
            rules: chain,
            around,
            moments,
            store,
            slices: dice.one_in(3),
            tensors: dice.one_in(4),
            parameters,
            calls,
        }
    }
}
