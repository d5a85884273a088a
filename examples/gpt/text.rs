//! The text: characters as numbers, and windows of them to train on and to validate with.

use std::collections::BTreeSet;
use std::path::Path;

use candle_core::{Device, Result, Tensor};

use crate::random::Random;
use crate::settings::Settings;
use crate::sources::SOURCES;

/// The last tenth of the text is not trained on.
const VALIDATION_PART: usize = 10;
/// The most windows of a validation, so that it stays short with a long text.
const VALIDATION_WINDOWS: usize = 512;

/// A text in which each character is the number of its place in the vocabulary.
pub(crate) struct Text {
    /// The characters that occur, sorted.
    vocabulary: Vec<char>,
    train: Vec<u32>,
    validation: Vec<u32>,
    crc: u32,
}

/// Some windows of the text, and for each of their characters the one that follows it. On the CPU.
pub(crate) struct Batch {
    /// `(windows, context)`
    pub(crate) inputs: Tensor,
    /// `(windows, context)`
    pub(crate) targets: Tensor,
}

impl Text {
    /// The text of a file, or the sources of this crate.
    pub(crate) fn read(path: Option<&Path>) -> std::result::Result<Self, String> {
        match path {
            None => Ok(Text::new(&SOURCES.join("\n"))),
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .map_err(|error| format!("cannot read the text {}: {error}", path.display()))?;
                Ok(Text::new(&text))
            }
        }
    }

    fn new(text: &str) -> Self {
        let vocabulary: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        let mut train: Vec<u32> = text
            .chars()
            .filter_map(|character| number(&vocabulary, character))
            .collect();
        let validation = train.split_off(train.len() - train.len() / VALIDATION_PART);
        Text {
            vocabulary,
            train,
            validation,
            crc: crc32fast::hash(text.as_bytes()),
        }
    }

    /// Fails where the shorter part has no window of `context` characters and the one after them.
    pub(crate) fn check_context(&self, context: usize) -> std::result::Result<(), String> {
        let length = self.validation.len();
        if context < length {
            return Ok(());
        }
        Err(format!(
            "the text is too short for --context {context}: its last tenth, the validation part, has \
             {length} characters"
        ))
    }

    /// How many different characters there are.
    pub(crate) fn characters(&self) -> usize {
        self.vocabulary.len()
    }

    /// The lengths of the two parts.
    pub(crate) fn lengths(&self) -> (usize, usize) {
        (self.train.len(), self.validation.len())
    }

    /// What tells this text from others.
    pub(crate) fn fingerprint(&self) -> String {
        format!(
            "of {} characters with crc32 {:08x}",
            self.train.len() + self.validation.len(),
            self.crc
        )
    }

    /// The numbers of the characters of `text`, which must be in the vocabulary.
    pub(crate) fn encode(&self, text: &str) -> std::result::Result<Vec<u32>, String> {
        let unknown = |character| format!("{character:?} does not occur in the text that is trained on");
        text.chars()
            .map(|character| number(&self.vocabulary, character).ok_or_else(|| unknown(character)))
            .collect()
    }

    /// The first character's number.
    pub(crate) fn start(&self) -> Vec<u32> {
        self.train.iter().take(1).copied().collect()
    }

    /// The characters with these numbers.
    pub(crate) fn decode(&self, numbers: &[u32]) -> String {
        numbers
            .iter()
            .filter_map(|number| self.vocabulary.get(*number as usize))
            .collect()
    }

    /// The windows to train on in a step, cut into micro-batches. They depend on nothing but the settings and
    /// the step, so a resumed run sees what it would have seen, and all ranks together see what one would.
    pub(crate) fn train_batches(
        &self,
        settings: &Settings,
        step: usize,
    ) -> impl Iterator<Item = Result<Batch>> {
        let Settings {
            seed,
            batch: windows,
            context,
            micro_batches,
            ..
        } = *settings;
        let mut random = Random::new(seed ^ ((step as u64 + 1) << 32));
        let starts: Vec<usize> = (0..windows)
            .map(|_| random.below(self.train.len() - context))
            .collect();
        batches(&self.train, starts, windows / micro_batches, context)
    }

    /// All of the validation part, window by window; of a long one, windows at even distances.
    pub(crate) fn validation_batches(
        &self,
        windows: usize,
        context: usize,
    ) -> impl Iterator<Item = Result<Batch>> {
        let there_are = (self.validation.len() - 1) / context;
        let distance = context * there_are.div_ceil(VALIDATION_WINDOWS);
        let starts: Vec<usize> = (0..self.validation.len() - context).step_by(distance).collect();
        batches(&self.validation, starts, windows, context)
    }
}

fn number(vocabulary: &[char], character: char) -> Option<u32> {
    vocabulary
        .binary_search(&character)
        .ok()
        .map(|place| place as u32)
}

/// Batches of so many windows, which begin at these places.
fn batches(
    text: &[u32],
    starts: Vec<usize>,
    windows: usize,
    context: usize,
) -> impl Iterator<Item = Result<Batch>> {
    let cut: Vec<Vec<usize>> = starts.chunks(windows).map(<[usize]>::to_vec).collect();
    cut.into_iter().map(move |starts| batch(text, &starts, context))
}

fn batch(text: &[u32], starts: &[usize], context: usize) -> Result<Batch> {
    let windows = |shift: usize| {
        let numbers: Vec<u32> = starts
            .iter()
            .flat_map(|start| &text[start + shift..start + shift + context])
            .copied()
            .collect();
        Tensor::from_vec(numbers, (starts.len(), context), &Device::Cpu)
    };
    Ok(Batch {
        inputs: windows(0)?,
        targets: windows(1)?,
    })
}
