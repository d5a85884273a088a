//! The rules that a run can train with.

use clap::ValueEnum;
use optimisers::{
    ADOPT, APOLLO, AdEMAMix, AdaMuon, Adafactor, AdamW, Fallback, Lion, MarsAdamW, Momentum, Muon, NorMuon,
    Prodigy, Rule, SOAP, ScheduleFree,
};
use serde::Serialize;

/// The decays of Adam's moments. The second is quicker than usual, for short runs with small batches.
const BETA: (f64, f64) = (0.9, 0.99);
/// The learning rate of AdamW, alone or beside a rule for matrices.
const ADAMW: f64 = 4e-3;
/// What rules for the matrices inside a network leave to AdamW, beside vectors.
const EMBEDDINGS: [&str; 3] = ["characters.weight", "positions.weight", "logits.weight"];

/// A rule by its name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RuleName {
    Adamw,
    Adopt,
    Ademamix,
    Mars,
    Lion,
    Adafactor,
    Prodigy,
    ScheduleFree,
    Momentum,
    Apollo,
    Soap,
    /// With AdamW for embeddings, the last layer and vectors
    Muon,
    /// With AdamW, as for Muon
    Normuon,
    /// With AdamW, as for Muon
    Adamuon,
}

impl RuleName {
    /// The best of 1, 2 and 5 times a power of ten for the runs that `--compare` makes.
    pub(crate) fn eta(self) -> f64 {
        match self {
            RuleName::Adamw | RuleName::Adopt | RuleName::Ademamix => ADAMW,
            RuleName::Lion => 2e-3,
            RuleName::Mars | RuleName::ScheduleFree | RuleName::Apollo | RuleName::Adamuon => 1e-2,
            RuleName::Soap | RuleName::Muon | RuleName::Normuon => 2e-2,
            RuleName::Adafactor => 5e-2,
            RuleName::Momentum => 0.1,
            RuleName::Prodigy => 0.5,
        }
    }

    /// The rule for a parameter with this weight decay.
    pub(crate) fn rule(self, eta: f64, lambda: f64) -> Box<dyn Rule> {
        match self {
            RuleName::Adamw => Box::new(adamw(eta, lambda)),
            RuleName::Ademamix => Box::new(AdEMAMix {
                beta: (0.9, 0.99, 0.999),
                alpha: 2.0,
                lambda,
                ..AdEMAMix::new(eta)
            }),
            RuleName::Adopt => Box::new(ADOPT {
                beta: BETA,
                lambda,
                ..ADOPT::new(eta)
            }),
            RuleName::Mars => Box::new(MarsAdamW {
                lambda,
                ..MarsAdamW::new(eta)
            }),
            RuleName::Apollo => Box::new(APOLLO {
                beta: BETA,
                lambda,
                rank: 16,
                ..APOLLO::new(eta)
            }),
            RuleName::Soap => Box::new(SOAP {
                lambda,
                ..SOAP::new(eta)
            }),
            RuleName::Lion => Box::new(Lion {
                lambda,
                ..Lion::new(eta)
            }),
            RuleName::Adafactor => Box::new(Adafactor {
                lambda,
                ..Adafactor::new(eta)
            }),
            RuleName::Prodigy => Box::new(Prodigy {
                beta: BETA,
                lambda,
                ..Prodigy::new(eta)
            }),
            RuleName::ScheduleFree => Box::new(ScheduleFree {
                beta: BETA,
                lambda,
                ..ScheduleFree::new(eta)
            }),
            RuleName::Momentum => Box::new(Momentum::new(eta)),
            RuleName::Muon => with_adamw(
                Muon {
                    lambda,
                    ..Muon::new(eta)
                },
                lambda,
            ),
            RuleName::Normuon => with_adamw(
                NorMuon {
                    lambda,
                    ..NorMuon::new(eta)
                },
                lambda,
            ),
            RuleName::Adamuon => with_adamw(
                AdaMuon {
                    lambda,
                    ..AdaMuon::new(eta)
                },
                lambda,
            ),
        }
    }
}

fn adamw(eta: f64, lambda: f64) -> AdamW {
    AdamW {
        beta: BETA,
        lambda,
        ..AdamW::new(eta)
    }
}

/// A rule for the matrices inside the network.
fn with_adamw(rule: impl Rule + Clone, lambda: f64) -> Box<dyn Rule> {
    Box::new(Fallback::new(rule, adamw(ADAMW, lambda)).except(EMBEDDINGS))
}
