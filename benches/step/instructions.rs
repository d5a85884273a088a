//! The instruction set of our step, by its name on the command line.

use clap::ValueEnum;
use optimisers::engine::Isa;

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
        let named = |name: &&IsaName| name.isa() == Isa::best();
        IsaName::value_variants().iter().find(named).copied().unwrap_or(IsaName::Portable)
    }

    pub fn isa(self) -> Isa {
        match self {
            IsaName::Portable => Isa::Portable,
            IsaName::Avx2 => Isa::Avx2,
            IsaName::Avx512 => Isa::Avx512,
        }
    }

    /// The instruction set, where this processor has it: the engine would go on with the best below it, and the figures would be of that.
    pub fn expect(self) -> Result<Isa, String> {
        let best = IsaName::best();
        if self.isa() > best.isa() { Err(format!("this processor has no {self}: the best it has is {best}")) } else { Ok(self.isa()) }
    }
}

impl std::fmt::Display for IsaName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}
