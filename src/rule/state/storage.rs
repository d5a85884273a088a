//! How a parameter is stored, as data.

use serde::{Deserialize, Serialize};

/// How an optimiser stores a parameter and what belongs to it.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageScheme {
    pub(crate) kind: StorageKind,
    /// Whether the state of a parameter on another device is on the CPU, with a copy of that parameter.
    pub(crate) offloaded: bool,
    /// Whether that is so for parameters on the CPU as well. Files are the same for every device.
    #[serde(skip)]
    pub(crate) everywhere: bool,
}

/// What is kept beside a low-precision parameter. Files have these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[doc(hidden)]
pub enum StorageKind {
    /// Nothing: steps are rounded to its dtype.
    Rounded,
    /// A precise copy.
    Master,
    /// The lower half of an f32.
    Split,
    /// What the last rounding lost.
    Compensated,
    /// A counter for roundings at random.
    Stochastic,
}

impl StorageScheme {
    /// The storage of this kind where the parameter is.
    pub(crate) fn on_device(kind: StorageKind) -> Self {
        StorageScheme { kind, offloaded: false, everywhere: false }
    }

    /// Whether another precision or device is only a conversion: the state has no tensors but the parameter's
    /// own and the rule's.
    pub(crate) fn is_convertible(self) -> bool {
        matches!(self.kind, StorageKind::Rounded | StorageKind::Master)
    }

    /// Whether a part of a parameter can be stored without the rest. Random rounding depends on the place of
    /// an element.
    pub(crate) fn is_divisible(self) -> bool {
        self.kind != StorageKind::Stochastic
    }

    /// Whether a state tensor named `master` may be a copy of the parameter, and not the rule's.
    pub(crate) fn may_have_master(self) -> bool {
        self.offloaded || self.kind == StorageKind::Master
    }
}
