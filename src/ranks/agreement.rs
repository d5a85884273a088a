//! Aspects of a call that have to be the same on all ranks, and the error if one differs.
//!
//! An aspect can be long, such as the list of all paths, and is nearly always equal on all ranks. So ranks
//! send each other a fingerprint for each aspect. Only if fingerprints differ, a second agreement
//! ([`Call::Differ`]) sends the words of the first aspect that differs. All ranks compare the same
//! fingerprints, so all find the same aspect and take part in the second agreement.

use std::fmt::{Display, Write};

use serde::{Deserialize, Serialize};

use super::StateWorld;
use super::opening::{Call, odd_rank};
use crate::error::{Error, ErrorKind, Result};
use crate::numbers::Fingerprint;

/// An aspect that has to be the same on all ranks. The value is one word, or a list of words.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Aspect {
    name: String,
    value: Vec<String>,
}

/// The aspects of a call that have to be the same on all ranks.
pub(crate) struct Agreement<'a> {
    fingerprints: Vec<u64>,
    /// Makes the aspect with an index.
    aspect: Box<dyn FnOnce(usize) -> Aspect + 'a>,
}

impl Aspect {
    pub(crate) fn new(name: impl Into<String>, value: impl Display) -> Self {
        Aspect {
            name: name.into(),
            value: vec![value.to_string()],
        }
    }

    /// An aspect whose value is a list of words. An error shows the first word that differs.
    pub(crate) fn of_words(name: impl Into<String>, value: Vec<String>) -> Self {
        Aspect {
            name: name.into(),
            value,
        }
    }

    fn fingerprint(&self) -> u64 {
        let of_name = Fingerprint::new().bytes(self.name.as_bytes());
        self.value
            .iter()
            .fold(of_name, |print, word| print.bytes(word.as_bytes()))
            .finish()
    }
}

impl<'a> Agreement<'a> {
    /// An agreement on aspects whose words exist already.
    pub(crate) fn new(aspects: Vec<Aspect>) -> Agreement<'static> {
        let fingerprints = aspects.iter().map(Aspect::fingerprint).collect();
        // An empty aspect stands for all indices at which only other ranks have an aspect.
        Agreement::lazy(fingerprints, |index| {
            aspects.into_iter().nth(index).unwrap_or_default()
        })
    }

    /// An agreement on aspects that `aspect` makes when an error needs their words. `fingerprints` has a
    /// fingerprint of each aspect.
    pub(crate) fn lazy(fingerprints: Vec<u64>, aspect: impl FnOnce(usize) -> Aspect + 'a) -> Self {
        Agreement {
            fingerprints,
            aspect: Box::new(aspect),
        }
    }

    /// The message of a rank: the number of aspects, their fingerprints, then the bytes in `payload`.
    fn message(&self, payload: &[u8]) -> Vec<u8> {
        let words = std::iter::once(self.fingerprints.len() as u64).chain(self.fingerprints.iter().copied());
        words
            .flat_map(u64::to_le_bytes)
            .chain(payload.iter().copied())
            .collect()
    }
}

impl StateWorld {
    /// [`StateWorld::agree`] that also compares the aspects of an agreement.
    ///
    /// # Errors
    /// As [`StateWorld::agree`]; if an aspect differs, on all ranks.
    pub(crate) fn agree_on<T>(
        &self,
        call: Call,
        prepared: Result<(T, Agreement<'_>, Vec<u8>)>,
    ) -> Result<(T, Vec<Vec<u8>>)> {
        let prepared_with_message = prepared.map(|(value, agreement, payload)| {
            let message = agreement.message(&payload);
            ((value, agreement), message)
        });
        let ((value, agreement), messages) = self.agree(call, prepared_with_message)?;
        let contents = messages
            .iter()
            .enumerate()
            .map(|(rank, message)| split_message(message).ok_or_else(|| unreadable_error(rank)))
            .collect::<Result<Vec<_>>>()?;
        let first_difference = |(prints, _): &(&[[u8; 8]], &[u8])| {
            let expected = contents[0].0;
            let index = expected
                .iter()
                .zip(*prints)
                .position(|(expected, print)| expected != print);
            index.or_else(|| (expected.len() != prints.len()).then_some(expected.len().min(prints.len())))
        };
        match contents.iter().filter_map(first_difference).min() {
            None => Ok((
                value,
                contents.iter().map(|(_, payload)| payload.to_vec()).collect(),
            )),
            Some(index) => Err(self.describe_difference((agreement.aspect)(index))?),
        }
    }

    /// [`StateWorld::agree_on`] without bytes: returns the value of `prepared` if no rank refuses and all
    /// have the same `aspects` of the value. A process alone makes no aspects.
    ///
    /// # Errors
    /// As [`StateWorld::agree_on`].
    pub(crate) fn compare<T>(
        &self,
        call: Call,
        prepared: Result<T>,
        aspects: impl FnOnce(&T) -> Result<Vec<Aspect>>,
    ) -> Result<T> {
        if !self.is_divided() {
            return prepared;
        }
        let with_aspects = prepared.and_then(|value| {
            let agreement = Agreement::new(aspects(&value)?);
            Ok((value, agreement, Vec::new()))
        });
        let (value, _) = self.agree_on(call, with_aspects)?;
        Ok(value)
    }

    /// The error for an aspect that differs, with the words of all ranks.
    fn describe_difference(&self, own_aspect: Aspect) -> Result<Error> {
        let own_message = serde_json::to_vec(&own_aspect).map_err(Error::other);
        let ((), messages) = self.agree(Call::Differ, own_message.map(|bytes| ((), bytes)))?;
        let aspect = |(rank, message): (usize, &Vec<u8>)| {
            serde_json::from_slice(message).map_err(|error| unreadable_error(rank).caused_by(error))
        };
        let aspects = messages
            .iter()
            .enumerate()
            .map(aspect)
            .collect::<Result<Vec<Aspect>>>()?;
        let rank = odd_rank(&aspects).map_or(0, |odd| odd.rank);
        let name = aspects
            .iter()
            .map(|aspect| &aspect.name)
            .find(|name| !name.is_empty())
            .unwrap_or(&aspects[0].name);
        // The first word that differs. The end of a list counts as different, so that the search ends.
        let word_index = (0..).find(|i| {
            aspects
                .iter()
                .any(|aspect| aspect.value.get(*i) != aspects[0].value.get(*i) || aspect.value.len() <= *i)
        });
        let text = |aspect: &Aspect| {
            let word = word_index.and_then(|index| aspect.value.get(index));
            let word = shorten(word.map_or("nothing more", String::as_str));
            if aspect.name == *name || aspect.name.is_empty() {
                word
            } else {
                format!("{word} as {}", aspect.name)
            }
        };
        let mut values: Vec<(String, Vec<usize>)> = Vec::new();
        for (rank, word) in aspects.iter().map(text).enumerate() {
            match values.iter_mut().find(|(value, _)| *value == word) {
                Some((_, ranks)) => ranks.push(rank),
                None => values.push((word, vec![rank])),
            }
        }
        let mut difference = format!("{name}: ");
        for (i, (word, ranks)) in values.iter().enumerate() {
            let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
            let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
            let separator = if i == 0 { "" } else { "; " };
            write!(difference, "{separator}{word} on {noun} {}", ranks.join(" and "))
                .map_err(Error::other)?;
        }
        Ok(difference_error(rank, difference))
    }
}

/// The error that a rank differs from others.
pub(crate) fn difference_error(rank: usize, what: impl Display) -> Error {
    Error::new(ErrorKind::Ranks, format!("rank {rank} differs in {what}"))
        .of_rank(rank)
        .with_remedy("all ranks need the same")
}

/// The error for a message that is unreadable, because another build must have sent it.
pub(crate) fn unreadable_error(rank: usize) -> Error {
    let problem = format!("rank {rank} sent what this version of optimisers cannot read");
    Error::new(ErrorKind::Communication, problem)
        .of_rank(rank)
        .with_remedy("run one build on all ranks")
}

/// A word, cut to a length that fits an error.
fn shorten(word: &str) -> String {
    const LONGEST: usize = 200;
    word.char_indices()
        .nth(LONGEST)
        .map_or_else(|| word.to_string(), |(end, _)| format!("{}...", &word[..end]))
}

/// Splits a message into its fingerprints and the bytes after them.
fn split_message(message: &[u8]) -> Option<(&[[u8; 8]], &[u8])> {
    let (count, rest) = message.split_first_chunk::<8>()?;
    let bytes = usize::try_from(u64::from_le_bytes(*count)).ok()?.checked_mul(8)?;
    let (prints, payload) = rest.split_at_checked(bytes)?;
    Some((prints.as_chunks().0, payload))
}
