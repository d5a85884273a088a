//! Text from the network.

use std::io::Write;

use candle_core::{Result, Tensor};
use candle_nn::ops::softmax;

use crate::model::Gpt;
use crate::random::Random;
use crate::text::Text;

/// Which text to make.
pub(crate) struct Sample<'a> {
    /// Characters to make.
    pub(crate) length: usize,
    /// The logits are divided by it: below 1 the likely becomes likelier; 0 takes the likeliest each time.
    pub(crate) temperature: f64,
    /// What the text starts with.
    pub(crate) prompt: &'a [u32],
    /// How far the network can look back.
    pub(crate) context: usize,
    pub(crate) random: Random,
}

impl Sample<'_> {
    /// Prints the text, character by character, until it is long enough or `stop` holds.
    pub(crate) fn print(
        mut self,
        gpt: &Gpt,
        text: &Text,
        stop: impl Fn() -> bool,
    ) -> std::result::Result<(), Box<dyn std::error::Error>> {
        let mut out = std::io::stdout().lock();
        let mut numbers = self.prompt.to_vec();
        write!(out, "{}", text.decode(&numbers))?;
        for _ in 0..self.length {
            if stop() {
                break;
            }
            let number = self.next(gpt, &numbers)?;
            numbers.push(number);
            write!(out, "{}", text.decode(&[number]))?;
            out.flush()?;
        }
        Ok(writeln!(out)?)
    }

    /// The character after those of `numbers`.
    fn next(&mut self, gpt: &Gpt, numbers: &[u32]) -> Result<u32> {
        let seen = &numbers[numbers.len().saturating_sub(self.context)..];
        let logits = gpt
            .forward(&Tensor::new(seen, gpt.device())?.unsqueeze(0)?)?
            .get(seen.len() - 1)?;
        if self.temperature == 0.0 {
            return logits.argmax(0)?.to_scalar();
        }
        let probabilities = softmax(&(logits / self.temperature)?, 0)?.to_vec1::<f32>()?;
        Ok(draw(&probabilities, self.random.unit()))
    }
}

/// The number whose part of 0..1 has `point` in it, when each gets a part as long as its probability.
fn draw(probabilities: &[f32], point: f32) -> u32 {
    let mut end = 0.0;
    let place = probabilities.iter().position(|probability| {
        end += probability;
        point < end
    });
    // The sum may be a little below 1.
    place.unwrap_or(probabilities.len() - 1) as u32
}
