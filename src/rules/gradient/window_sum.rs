//! The sum of the gradients of a window: one, or partial sums of powers of two of gradients.

use crate::numbers::value::Value;
use crate::rule::{Arithmetic, Gradient, OwnTensors, Slot, Slots, Summation};

macro_rules! names {
    ($($number:literal)*) => {
        [$(concat!("acc", $number)),*]
    };
}

/// The names of the partial sums: as many as any count of gradients needs.
const NAMES: [&str; 63] = names!["" 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38
    39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62];

/// `acc += w·dx`.
#[derive(Clone, Copy)]
struct Collect {
    weight: f64,
}

impl Arithmetic for Collect {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [acc]: &mut [V; 1]) -> V {
        *acc = *acc + dx * self.weight;
        dx
    }
}

/// `acc = w·dx`, whatever it was.
#[derive(Clone, Copy)]
struct Begin {
    weight: f64,
}

impl Arithmetic for Begin {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [acc]: &mut [V; 1]) -> V {
        *acc = dx * self.weight;
        dx
    }
}

/// `dx' = (acc + w·dx) / total`, `acc = 0`.
#[derive(Clone, Copy)]
struct Release {
    weight: f64,
    total: f64,
}

impl Arithmetic for Release {
    type Slots<T> = [T; 1];
    const KEEPS_NON_FINITE: bool = true;

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [acc]: &mut [V; 1]) -> V {
        let average = (*acc + dx * self.weight) / self.total;
        *acc = dx.constant(0.0);
        average
    }
}

/// `dx' = acc / total`, `acc = 0`, where the last gradient does not count.
#[derive(Clone, Copy)]
struct ReleaseCollected {
    total: f64,
}

impl Arithmetic for ReleaseCollected {
    type Slots<T> = [T; 1];

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, [acc]: &mut [V; 1]) -> V {
        let average = *acc / self.total;
        *acc = dx.constant(0.0);
        average
    }
}

/// `dx' = w·dx / total`, where there is no other gradient.
#[derive(Clone, Copy)]
struct ReleaseOne {
    weight: f64,
    total: f64,
}

impl Arithmetic for ReleaseOne {
    type Slots<T> = [T; 0];
    const KEEPS_NON_FINITE: bool = true;

    #[inline(always)]
    fn step<V: Value>(self, _x: V, dx: V, []: &mut [V; 0]) -> V {
        dx * self.weight / self.total
    }
}

/// The state of a sum of `n` gradients.
pub(crate) fn slots(order: Summation, n: u64) -> Vec<Slot> {
    NAMES.into_iter().take(most(order, n)).map(Slot::zeros).collect()
}

/// The most partial sums before the last gradient: the most ones that a number below `n` has in binary.
fn most(order: Summation, n: u64) -> usize {
    match order {
        Summation::InOrder => 1,
        Summation::Pairwise => n.checked_ilog2().map_or(1, |log| log.max(1) as usize),
    }
}

/// What a window has collected.
pub(crate) struct WindowSum<'a> {
    /// Partial sums, the oldest first, and room for others.
    sums: OwnTensors<'a>,
    /// How many there are.
    held: usize,
    /// How many of them, the newest, become one with the next gradient.
    joined: usize,
    /// Whether there is any gradient in them.
    has_any: bool,
}

impl<'a> WindowSum<'a> {
    /// The sum of `received` gradients; `None` if these are not the tensors for `n`.
    ///
    /// Pairwise, there is a partial sum for each 1 of `received` in binary. The next gradient is carried
    /// through the 1s at its end.
    pub(crate) fn of(received: u64, order: Summation, n: u64, tensors: OwnTensors<'a>) -> Option<Self> {
        if tensors.len() != most(order, n) {
            return None;
        }
        let (held, joined) = match order {
            Summation::InOrder => (1, 1),
            Summation::Pairwise => {
                // With `full` gradients all tensors are taken, and none has the sum of one: the next joins
                // the last.
                let full = (u64::MAX >> (u64::BITS as usize - 1 - tensors.len())) - 1;
                let joined = if received >= full { 1 } else { received.trailing_ones() };
                (received.min(full).count_ones() as usize, joined as usize)
            }
        };
        Some(WindowSum { sums: tensors, held, joined, has_any: received > 0 })
    }

    /// Adds a gradient.
    pub(crate) fn collect(self, mut dx: Gradient<'a>, mut weight: f64) -> Gradient<'a> {
        let (sum, newer) = self.sums[self.held - self.joined..].split_at_mut(1);
        if self.joined == 0 {
            return dx.map(Begin { weight }, Slots(sum));
        }
        for newer in newer[..self.joined - 1].chunks_mut(1).rev() {
            dx = dx.map(Release { weight, total: 1.0 }, Slots(newer));
            weight = 1.0;
        }
        dx.map(Collect { weight }, Slots(sum))
    }

    /// The sum of all that was collected and of this gradient with its weight (or without it), divided by
    /// `total`.
    pub(crate) fn release(self, mut dx: Gradient<'a>, mut weight: Option<f64>, total: f64) -> Gradient<'a> {
        if let (0, Some(weight)) = (self.held, weight) {
            return dx.map(ReleaseOne { weight, total }, Slots::none());
        }
        for (index, sum) in self.sums[..self.held].chunks_mut(1).enumerate().rev() {
            let (sum, total) = (Slots(sum), if index == 0 { total } else { 1.0 });
            dx = match weight {
                None => dx.release(ReleaseCollected { total }, sum),
                Some(weight) if self.has_any => dx.release(Release { weight, total }, sum),
                Some(weight) => dx.map(Release { weight, total }, sum),
            };
            weight = Some(1.0);
        }
        dx
    }
}
