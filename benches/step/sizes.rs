//! Where a case runs, and how many parameters it has.

use candle_core::Device;
use optimisers::Isa;

/// Where the cases are measured and how large they are.
pub struct Sizes {
    pub device: Device,
    /// The instruction set of our steps on the CPU.
    pub isa: Isa,
    pub quick: bool,
    /// In place of what would be chosen here.
    pub elements: Option<usize>,
}

impl Sizes {
    /// Two tensors, large enough that no cache holds them.
    pub fn two(&self, case: &str) -> Vec<usize> {
        let elements = self.elements.unwrap_or_else(|| match (&self.device, self.quick) {
            (Device::Cpu, true) => 1 << 23,
            (Device::Cpu, false) => 1 << 25,
            (_, false) if is_main(case) => 1_000_000_000,
            _ => 100_000_000,
        });
        vec![elements.div_ceil(2); 2]
    }

    /// One tensor, for a rule by itself.
    pub fn one(&self) -> Vec<usize> {
        vec![self.elements.unwrap_or(if self.device.is_cpu() {
            1 << 24
        } else {
            100_000_000
        })]
    }
}

/// Whether a GPU is given the parameters of a large model for this case.
fn is_main(case: &str) -> bool {
    matches!(case, "adamw_f32" | "mixed_bf16_adamw" | "bf16_adamw") || case.starts_with("chain3")
}
