//! The options that decide what a run computes.

use candle_core::DType;
use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum};
use optimisers::{Rule, Schedule};
use serde::Serialize;

use crate::model::Size;
use crate::rules::RuleName;

/// What a run computes. A checkpoint keeps these, and a run can be resumed with the same ones only.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Settings {
    /// How many blocks of attention and feed-forward the network has
    #[arg(long, default_value_t = 2, value_parser = size())]
    pub(crate) layers: usize,

    /// The numbers per character within the network
    #[arg(long, default_value_t = 96, value_parser = size())]
    pub(crate) width: usize,

    /// The attention heads per block; must divide the width
    #[arg(long, default_value_t = 4, value_parser = size())]
    pub(crate) heads: usize,

    /// How many characters the network sees at most
    #[arg(long, default_value_t = 64, value_parser = size())]
    pub(crate) context: usize,

    /// The dtype of matrices and matrix products; norms and sums are in f32. On the CPU bf16 takes a fifth
    /// more time than f32, and f16, which gets loss scaling, twice as much
    #[arg(long, value_enum, default_value_t = Precision::Bf16)]
    pub(crate) dtype: Precision,

    /// How the optimiser keeps parameters and moments
    #[arg(long, value_enum, default_value_t = Keep::F32)]
    pub(crate) keep: Keep,

    /// Windows of the text per step
    #[arg(long, default_value_t = 16, value_parser = size())]
    pub(crate) batch: usize,

    /// Into how many parts a batch is cut, whose gradients are added up; must divide it
    #[arg(long, default_value_t = 1, value_parser = size())]
    pub(crate) micro_batches: usize,

    /// Frees each gradient once its parameter is written; the numbers stay the same
    #[arg(long)]
    pub(crate) stream: bool,

    /// In a step, keeps the activations of one block in memory, and computes those of the others twice; the
    /// numbers stay the same
    #[arg(long)]
    pub(crate) segments: bool,

    /// Steps of the whole run
    #[arg(long, default_value_t = 1600, value_parser = steps())]
    pub(crate) steps: usize,

    /// What makes steps of gradients; AdamW if not given
    #[arg(long, value_enum)]
    pub(crate) rule: Option<RuleName>,

    /// The highest learning rate, which is reached after the warm-up; the rule's own if not given
    #[arg(long, value_parser = not_negative, allow_negative_numbers = true)]
    pub(crate) eta: Option<f64>,

    /// Steps in which the learning rate rises from zero; afterwards it falls as a cosine to a tenth
    #[arg(long, default_value_t = 50)]
    pub(crate) warm_up: usize,

    /// The weight decay of matrices
    #[arg(long, default_value_t = 0.1, value_parser = not_negative, allow_negative_numbers = true)]
    pub(crate) lambda: f64,

    /// Decides the initial weights, the windows of each step, and the sample
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,

    /// Computes the validation loss every so many steps
    #[arg(long, default_value_t = 200, value_parser = steps())]
    pub(crate) evaluate_every: usize,
}

/// A dtype by its name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Precision {
    Bf16,
    F16,
    F32,
}

/// In how many bits masters and moments are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Keep {
    /// Masters and moments in f32: 12 bytes of state per parameter
    F32,
    /// Masters in f32, moments in 8 bits: 6 bytes
    Q8,
    /// 8 bits beside each bf16 in place of a master, moments in 8 bits: 3 bytes
    Split24Q8,
}

impl Settings {
    /// Fails where options do not go together, or not with so many ranks.
    pub(crate) fn check(&self, ranks: usize) -> Result<(), String> {
        let pairs = [
            ("heads", self.heads, "width", self.width),
            ("micro-batches", self.micro_batches, "batch", self.batch),
        ];
        match pairs
            .into_iter()
            .find(|(_, part, _, whole)| !whole.is_multiple_of(*part))
        {
            Some((part_name, part, name, whole)) => {
                Err(format!("--{part_name} {part} does not divide --{name} {whole}"))
            }
            None if self.keep == Keep::Split24Q8 && self.dtype == Precision::F16 => {
                Err("--keep split24-q8 is for --dtype bf16 and f32: an f16 is no part of an f32".to_string())
            }
            None if !self.micro_batches.is_multiple_of(ranks) => Err(format!(
                "--micro-batches {} cannot be shared by {ranks} ranks: give a multiple of {ranks}",
                self.micro_batches
            )),
            None => Ok(()),
        }
    }

    /// The network for a text with that many different characters.
    pub(crate) fn size(&self, characters: usize) -> Size {
        let Settings {
            context,
            layers,
            width,
            heads,
            ..
        } = *self;
        Size {
            characters,
            context,
            layers,
            width,
            heads,
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        match self.dtype {
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
            Precision::F32 => DType::F32,
        }
    }

    /// The rule for a parameter with this weight decay.
    pub(crate) fn rule(&self, lambda: f64) -> Box<dyn Rule> {
        self.rule_name().rule(self.eta(), lambda)
    }

    pub(crate) fn eta(&self) -> f64 {
        self.eta.unwrap_or(self.rule_name().eta())
    }

    fn rule_name(&self) -> RuleName {
        self.rule.unwrap_or(RuleName::Adamw)
    }

    /// Learning rates rise in a line and fall as a cosine. A rule for matrices and the one beside it have
    /// each their own.
    pub(crate) fn schedule(&self) -> Schedule {
        let (steps, warm_up) = (self.steps as u64, self.warm_up as u64);
        let rise = Schedule::linear(1.0 / (warm_up as f64 + 1.0), 1.0, warm_up);
        rise.then(warm_up, Schedule::cosine(1.0, 0.1, steps.saturating_sub(warm_up)))
            .relative()
    }
}

/// A length of something that is kept in memory.
fn size() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=1 << 16)
}

/// A number of steps.
pub(crate) fn steps() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=1 << 32)
}

/// A finite number from 0.
pub(crate) fn not_negative(number: &str) -> Result<f64, String> {
    let number: f64 = number.parse().map_err(|error| format!("{error}"))?;
    if number.is_finite() && number >= 0.0 {
        Ok(number)
    } else {
        Err("expected a finite number that is not negative".to_string())
    }
}
