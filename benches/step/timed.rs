//! How long something takes.

use std::time::{Duration, Instant};

use candle_core::{Device, Result};

/// Something to be timed: steps over `elements` parameters.
pub struct Timed {
    pub elements: usize,
    /// Where the steps run.
    pub device: Device,
    /// Takes steps for as long as the function it is given says so.
    pub run: Box<Steps>,
}

/// Steps, taken while the function that is passed says so.
type Steps = dyn FnMut(&mut dyn FnMut() -> bool);

impl Timed {
    /// Nanoseconds per parameter, over as many steps as fill a measurable time.
    pub fn nanoseconds(&mut self) -> Result<f64> {
        let (taken, steps) = if self.device.is_cpu() {
            self.while_watched()
        } else {
            self.between_waits()?
        };
        Ok(taken.as_nanos() as f64 / f64::from(steps) / self.elements as f64)
    }

    /// The clock is read after every step, after one that warms up: whoever ran before has left the caches
    /// and the page tables to itself.
    fn while_watched(&mut self) -> (Duration, u32) {
        let mut start = Instant::now();
        let mut taken = Duration::ZERO;
        let mut steps = 0u32;
        (self.run)(&mut || {
            if steps <= 1 {
                start = Instant::now();
            }
            taken = start.elapsed();
            let go_on = steps <= 1 || taken < Duration::from_millis(20);
            steps += u32::from(go_on);
            go_on
        });
        (taken, steps - 1)
    }

    /// On a GPU, where steps are only handed over, the clock is read when it has nothing left to do.
    fn between_waits(&mut self) -> Result<(Duration, u32)> {
        self.until_done(1)?;
        let one = self.until_done(1)?;
        let steps = (0.2 / one.as_secs_f64()).ceil().clamp(1.0, 1e5) as u32;
        Ok((self.until_done(steps)?, steps))
    }

    fn until_done(&mut self, mut steps: u32) -> Result<Duration> {
        self.device.synchronize()?;
        let start = Instant::now();
        (self.run)(&mut || {
            let go_on = steps > 0;
            steps = steps.saturating_sub(1);
            go_on
        });
        self.device.synchronize()?;
        Ok(start.elapsed())
    }
}
