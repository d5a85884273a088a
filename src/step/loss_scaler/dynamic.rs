//! How a loss scale moves, and what an overflow does to a window (the calls that an `AccumGrad` collects).

use serde::{Deserialize, Serialize};

/// How a dynamic scale moves.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DynamicScale {
    /// The scale at the start, at least 1.18e-38.
    pub initial: f64,
    /// The factor by which the scale grows after `growth_interval` steps without overflow; at least 1.
    pub growth_factor: f64,
    /// The factor by which the scale falls on overflow; in (0, 1].
    pub backoff_factor: f64,
    /// The number of steps in a row without overflow after which the scale grows; at least 1.
    pub growth_interval: u64,
    /// The number of the overflow on which the scale falls; 1 is the first. Counted anew when the scale
    /// grows.
    pub hysteresis: u64,
    /// The smallest scale, at least 1.18e-38. An overflow at this scale is an error.
    pub floor: f64,
}

impl Default for DynamicScale {
    fn default() -> Self {
        DynamicScale {
            initial: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            hysteresis: 1,
            floor: f64::from(f32::MIN_POSITIVE),
        }
    }
}

/// What an overflow does to a window of [`AccumGrad`](crate::AccumGrad).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OnOverflow {
    /// The micro-batch does not count; the window needs one more.
    #[default]
    SkipMicroBatch,
    /// The window is given up: its sum is forgotten, and the next micro-batch is the first of a new window.
    EndWindow,
}
