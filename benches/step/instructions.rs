//! The instruction set of our step, by its name on the command line.

use clap::ValueEnum;
use optimisers::Isa;

/// An [`Isa`] that can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IsaName {
    Portable,
    Avx2,
    Avx512,
}

impl IsaName {
    /// The best that this processor has.
    pub fn best() -> Self {
        let is_here = |name: &&IsaName| name.isa().is_some();
        IsaName::value_variants()
            .iter()
            .rfind(is_here)
            .copied()
            .unwrap_or(IsaName::Portable)
    }

    fn isa(self) -> Option<Isa> {
        match self {
            IsaName::Portable => Some(Isa::PORTABLE),
            IsaName::Avx2 => Isa::avx2(),
            IsaName::Avx512 => Isa::avx512(),
        }
    }

    /// The instruction set, where this processor has it.
    pub fn expect(self) -> Result<Isa, String> {
        self.isa().ok_or_else(|| {
            format!(
                "this processor has no {self}: the best it has is {}",
                IsaName::best()
            )
        })
    }
}

impl std::fmt::Display for IsaName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}
