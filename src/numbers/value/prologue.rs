//! Scaling, clipping and decay of a gradient in the loop of the next step, so that they need no loops of
//! their own.

use super::Value;

/// Operations on a gradient before arithmetic, each at most once and in this order.
///
/// ```text
/// dx' = clamp(dx·scale, -limit, limit) + decay·x
/// ```
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prologue {
    scale: Option<f64>,
    limit: Option<f64>,
    decay: Option<f64>,
}

impl Prologue {
    /// dx·factor
    pub(crate) fn scale(factor: f64) -> Self {
        Prologue {
            scale: Some(factor),
            ..Prologue::default()
        }
    }

    /// clamp(dx, -limit, limit)
    pub(crate) fn limit(limit: f64) -> Self {
        Prologue {
            limit: Some(limit),
            ..Prologue::default()
        }
    }

    /// dx + lambda·x
    pub(crate) fn decay(lambda: f64) -> Self {
        Prologue {
            decay: Some(lambda),
            ..Prologue::default()
        }
    }

    /// The prologue that does `self` and then `next`. `None` if their operations are not in the order of the
    /// type.
    pub(crate) fn then(self, next: Prologue) -> Option<Prologue> {
        let is_in_order = match next {
            Prologue { scale: Some(_), .. } => self == Prologue::default(),
            Prologue { limit: Some(_), .. } => self.limit.or(self.decay).is_none(),
            Prologue { decay: Some(_), .. } => self.decay.is_none(),
            _ => true,
        };
        let joined = || Prologue {
            scale: self.scale.or(next.scale),
            limit: self.limit.or(next.limit),
            decay: self.decay.or(next.decay),
        };
        is_in_order.then(joined)
    }

    /// The factor, if the prologue is a multiplication by a power of two and nothing else. Such a product is
    /// exact.
    pub(crate) fn exact_scale(self) -> Option<f64> {
        const FRACTION: u64 = (1 << 52) - 1;
        let factor = self
            .scale
            .filter(|factor| factor.is_normal() && factor.to_bits() & FRACTION == 0);
        factor.filter(|_| self.limit.or(self.decay).is_none())
    }

    /// The gradient for the arithmetic, with the same bits as if each operation were a step of its own.
    #[inline(always)]
    pub(crate) fn apply<V: Value>(self, x: V, dx: V) -> V {
        // A factor of 1 and infinite limits change no bit, so absent operations need no branch. A decay of 0
        // does change bits: x·0 is NaN if x is infinite, and -0 + 0 is 0.
        let limit = self.limit.unwrap_or(f64::INFINITY);
        let clipped = (dx * self.scale.unwrap_or(1.0)).clamp(-limit, limit);
        match self.decay {
            Some(decay) => clipped + x * decay,
            None => clipped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Lane;
    use super::*;

    #[test]
    fn parts_are_joined_in_order_and_each_once() {
        let [scale, limit, decay] = [Prologue::scale(2.0), Prologue::limit(3.0), Prologue::decay(0.5)];
        let all = Prologue {
            scale: Some(2.0),
            limit: Some(3.0),
            decay: Some(0.5),
        };
        assert_eq!(scale.then(limit).and_then(|two| two.then(decay)), Some(all));
        assert_eq!(limit.then(decay).and_then(|two| scale.then(two)), Some(all));
        assert_eq!(Prologue::default().then(all), Some(all));
        assert_eq!(all.then(Prologue::default()), Some(all));
        for (first, second) in [
            (scale, scale),
            (limit, limit),
            (decay, decay),
            (limit, scale),
            (decay, scale),
            (decay, limit),
            (all, limit),
        ] {
            assert_eq!(first.then(second), None);
        }
    }

    #[test]
    fn only_a_power_of_two_alone_is_exact() {
        assert_eq!(Prologue::scale(-0.25).exact_scale(), Some(-0.25));
        for inexact in [
            Prologue::scale(3.0),
            Prologue::scale(0.0),
            Prologue::scale(f64::INFINITY),
            Prologue::limit(2.0),
            Prologue::decay(2.0),
        ] {
            assert_eq!(inexact.exact_scale(), None);
        }
        assert_eq!(
            Prologue::scale(2.0)
                .then(Prologue::limit(1.0))
                .and_then(Prologue::exact_scale),
            None
        );
    }

    #[test]
    fn absent_parts_change_no_bit() {
        for x in [-1.0, f32::NAN, f32::INFINITY] {
            for dx in [0.0, -0.0, 1e-45, f32::MAX, f32::NEG_INFINITY, f32::NAN] {
                assert_eq!(
                    Prologue::default().apply(Lane(x), Lane(dx)).0.to_bits(),
                    dx.to_bits()
                );
            }
        }
    }
}
