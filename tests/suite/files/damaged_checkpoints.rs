//! Files that were damaged, or made to do harm: an error or a checkpoint, never a panic, and on an error
//! nothing has changed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::DType;
use optimisers::{
    AccumGrad, Adam, Checkpoint, CheckpointFile, ClipNorm, LossScaler, MixedPrecision, Optimiser,
    OptimiserChain, Outcome, Parameter, Result, ScheduleFree, StateTree, setup_with, update,
};

use crate::model::models::CPU;
use support::common::{Vars, random, snapshot, var};
use support::crafted_checkpoints::{Pieces, file_of, open, with_checksum};

/// A source of choices.
pub(crate) struct Choices(pub(crate) u64);

impl Choices {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn range(&mut self, length: usize) -> std::ops::Range<usize> {
        let (a, b) = (self.below(length + 1), self.below(length + 1));
        a.min(b)..a.max(b)
    }
}

/// A small model with masters, moments, numbers and a window that is half-way.
fn started(seed: u64) -> (Vars, StateTree) {
    let leaf = |(path, shape, dtype): (&str, &[usize], DType)| {
        (path.to_string(), var(&random(seed, shape, dtype, CPU)))
    };
    let model: Vars = [("a", &[2][..], DType::BF16), ("b", &[], DType::F32), ("c", &[0, 2], DType::F64)]
        .into_iter()
        .map(leaf)
        .collect();
    let choose = |path: &str, _: Parameter<'_>| -> Option<Box<dyn Optimiser>> {
        let chain = OptimiserChain::new((AccumGrad::new(2), ClipNorm::new(1.0), Adam::new(0.01)));
        Some(if path == "b" {
            Box::new(ScheduleFree::new(0.01))
        } else {
            Box::new(MixedPrecision::new(DType::F32, chain))
        })
    };
    let mut state = setup_with(&model, choose).unwrap();
    (0..3).for_each(|call| _ = step(&model, &mut state, call).unwrap());
    (model, state)
}

fn step(model: &Vars, state: &mut StateTree, seed: u64) -> Result<Outcome> {
    let gradients: BTreeMap<_, _> =
        model.iter().map(|(path, x)| (path.clone(), random(seed, x.dims(), x.dtype(), CPU))).collect();
    update(state, model, &gradients)
}

fn file() -> Vec<u8> {
    let (model, state) = started(1);
    file_of(Checkpoint::new(&state).model(&model).note("n", 1).scaler(&LossScaler::dynamic()))
}

/// Texts that stand in headers, and some that should not.
const WORDS: [&str; 34] = [
    "0",
    "1",
    "2",
    "-1",
    "1.5",
    "1e999",
    "18446744073709551615",
    "18446744073709551616",
    "9223372036854775808",
    "null",
    "true",
    "{}",
    "[]",
    "\"\"",
    "\"F64\"",
    "\"BF16\"",
    "\"F4\"",
    "\"U8\"",
    "\"BOOL\"",
    "\"I64\"",
    ",",
    ":",
    "[",
    "]",
    "{",
    "}",
    "\\\"",
    "\\u0000",
    "\\ud800",
    "\"nan\"",
    "[0,0]",
    "[2]",
    "a",
    "/master",
];

/// Changes the bytes somewhere, in one of the ways in which files get damaged or forged.
fn mutate(bytes: &mut Vec<u8>, choices: &mut Choices) {
    let length = bytes.len();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap_or_default()).min(length as u64) as usize;
    match choices.below(10) {
        0 => {
            let place = choices.below(length);
            bytes[place] ^= 1 << choices.below(8);
        }
        1 => {
            let (place, value) = (choices.below(length), choices.next() as u8);
            bytes[place] = value;
        }
        2 => {
            let range = choices.range(length);
            let value = choices.one_of(&[0, 0xff, b'0', b'"', b'[']);
            bytes[range].fill(value);
        }
        3 => {
            let (place, count) = (choices.below(length + 1), 1 + choices.below(20));
            let inserted: Vec<u8> = (0..count).map(|_| choices.next() as u8).collect();
            bytes.splice(place..place, inserted);
        }
        4 => {
            let start = choices.below(length);
            let count = 1 + choices.below(20.min(length - start));
            bytes.drain(start..start + count);
        }
        5 => bytes.truncate(choices.below(length)),
        6 => {
            let (one, other, count) = (choices.below(length), choices.below(length), 1 + choices.below(40));
            (0..count).for_each(|i| bytes.swap((one + i) % length, (other + i) % length));
        }
        7 => {
            let near = (header as u64).wrapping_add(choices.next() % 65).wrapping_sub(32);
            let claimed = choices.one_of(&[
                near,
                near,
                0,
                1,
                length as u64,
                u64::MAX,
                1 << 63,
                100_000_000,
                (length - 8) as u64,
            ]);
            bytes[..8].copy_from_slice(&claimed.to_le_bytes());
        }
        8 => {
            let from = choices.range(length);
            let piece = bytes[from].iter().take(300).copied().collect::<Vec<u8>>();
            let place = choices.below(length);
            bytes.splice(place..place, piece);
        }
        _ => replace_word(bytes, header, choices),
    }
}

/// Replaces a number, a name or a sign in the header, and keeps the header's length right.
fn replace_word(bytes: &mut Vec<u8>, header: usize, choices: &mut Choices) {
    let end = (8 + header).min(bytes.len());
    let start = 8.min(end) + choices.below(end.saturating_sub(8));
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_' || *byte == b'.';
    let word = bytes[start..end].iter().take_while(|byte| is_word(byte)).count().max(1).min(end - start);
    let new = choices.one_of(&WORDS);
    bytes.splice(start..start + word, new.bytes());
    let length = (header + new.len()).saturating_sub(word) as u64;
    bytes[..8].copy_from_slice(&length.to_le_bytes());
}

/// Texts that stand in descriptions.
const NAMES: [&str; 20] = [
    "",
    "a",
    "b",
    "c",
    "a/master",
    "master",
    "0.acc",
    "2.m",
    "0.calls",
    "2.t",
    "eta",
    "p",
    "bf16",
    "f32",
    "F64",
    "BF16",
    "nan",
    "inf",
    "Skip",
    "OptimiserChain(AccumGrad, ClipNorm, Adam)",
];

/// Replaces, doubles or removes something somewhere in a JSON text.
fn mutate_json(value: &mut serde_json::Value, choices: &mut Choices) {
    use serde_json::Value;
    let goes_on = choices.below(24) > 0;
    match value {
        Value::Object(map) if goes_on && !map.is_empty() => {
            let key = map.keys().nth(choices.below(map.len())).cloned().expect("a key");
            match choices.below(20) {
                0 => _ = map.remove(&key),
                1 => {
                    _ = map.insert(
                        choices.one_of(&["", "d", "a/master", "b/2.m"]).to_string(),
                        map[&key].clone(),
                    )
                }
                _ => mutate_json(&mut map[&key], choices),
            }
        }
        Value::Array(list) if goes_on && !list.is_empty() => {
            let place = choices.below(list.len());
            match choices.below(20) {
                0 => _ = list.remove(place),
                1 => list.push(list[place].clone()),
                2 => list.reverse(),
                _ => mutate_json(&mut list[place], choices),
            }
        }
        // Mostly of the same type, or little would come further than the parser.
        Value::Number(number) if choices.below(8) > 0 => {
            let near = number.as_u64().unwrap_or(0).wrapping_add(choices.next() % 9).wrapping_sub(4);
            let any = choices.next() >> choices.below(64);
            *value = Value::from(choices.one_of(&[near, near, 0, 1, 2, any, u64::MAX, 1 << 63]));
        }
        Value::String(text) if choices.below(8) > 0 => *text = choices.one_of(&NAMES).to_string(),
        Value::Bool(flag) if choices.below(8) > 0 => *flag = !*flag,
        _ => {
            let parsed = serde_json::from_str(choices.one_of(&WORDS));
            *value = parsed.unwrap_or_else(|_| Value::from(choices.next() as f64 / 3.0));
        }
    }
}

/// One of the files that this number stands for, and whether its checksum was made right.
fn mutant(original: &[u8], pieces: &Pieces, number: u64) -> (Vec<u8>, bool) {
    let mut choices = Choices(number);
    let times = 1 + choices.below(3);
    let kind = choices.below(8);
    if kind < 3 {
        let mut pieces = pieces.clone();
        for _ in 0..times {
            let half = if choices.below(8) == 0 { &mut pieces.tensors } else { &mut pieces.description };
            mutate_json(half, &mut choices);
        }
        // The header of a file is a list of tensors, or `bytes` could not put it together.
        pieces.tensors = Some(pieces.tensors)
            .filter(serde_json::Value::is_object)
            .unwrap_or_else(|| serde_json::json!({}));
        if kind == 0 && !pieces.data.is_empty() {
            let place = choices.below(pieces.data.len());
            pieces.data[place] = choices.one_of(&[0x7f, 0xff, 0x80, 0xf0, 0]);
        }
        return (pieces.bytes(), true);
    }
    let mut bytes = original.to_vec();
    for _ in 0..times {
        if bytes.len() >= 8 {
            mutate(&mut bytes, &mut choices);
        }
    }
    if kind < 5 { (bytes, false) } else { (with_checksum(bytes), true) }
}

/// How a file fared, to show that the files reach every part of the reading.
#[derive(Default)]
struct Counts {
    refused_when_read: AtomicU64,
    refused_when_restored: AtomicU64,
    restored: AtomicU64,
}

fn try_out(bytes: &[u8], number: u64, (model, state): &mut (Vars, StateTree), counts: &Counts) {
    let count = |counter: &AtomicU64| _ = counter.fetch_add(1, Ordering::Relaxed);
    let Ok(file) = open(bytes) else {
        return count(&counts.refused_when_read);
    };
    let set = |file: CheckpointFile| if number & 16 == 0 { file } else { file.converting() };
    let file = set(if number & 32 == 0 { file } else { file.accepting_non_finite() });
    let before = snapshot(model, state);
    let result = if number & 64 == 0 { file.restore(state) } else { file.restore_with_model(state, model) };
    match result {
        Ok(_) => {
            count(&counts.restored);
            // What was accepted can be worked with; whether a rule refuses it is another matter.
            let _ = step(model, state, 5);
        }
        Err(_) => {
            count(&counts.refused_when_restored);
            assert!(snapshot(model, state) == before, "something changed");
        }
    }
    let _ = file.scaler();
    for name in file.tensor_names() {
        let _ = file.tensor(&name);
    }
}

fn try_all(numbers: std::ops::Range<u64>, counts: &Counts) {
    let original = file();
    let pieces = Pieces::of(&original);
    let mut fresh = started(20);
    for number in numbers {
        let (bytes, has_checksum) = mutant(&original, &pieces, number);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            try_out(&bytes, number, &mut fresh, counts)
        }));
        assert!(outcome.is_ok(), "file {number} of this test: {:?}", String::from_utf8_lossy(&bytes));
        assert!(
            has_checksum || bytes == original || open(&bytes).is_err(),
            "file {number} of this test was damaged and accepted"
        );
    }
}

#[test]
fn a_hundred_thousand_damaged_files() {
    const FILES: u64 = 105_000;
    let threads = std::thread::available_parallelism().map_or(2, |count| count.get() as u64).min(8);
    let counts = Counts::default();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (counts, numbers) = (&counts, FILES * thread / threads..FILES * (thread + 1) / threads);
            scope.spawn(move || try_all(numbers, counts));
        }
    });
    let Counts { refused_when_read, refused_when_restored, restored } = counts;
    let counted = [refused_when_read, refused_when_restored, restored].map(AtomicU64::into_inner);
    println!("refused when read, refused when restored, restored: {counted:?}");
    assert!(
        counted.iter().sum::<u64>() == FILES && counted.iter().all(|&count| count > FILES / 100),
        "{counted:?}"
    );
}

/// Every byte that can differ is covered by the checksum, or by the format.
#[test]
fn every_single_bit_counts() {
    let original = file();
    for place in 0..original.len() {
        for bit in 0..8 {
            let mut bytes = original.clone();
            bytes[place] ^= 1 << bit;
            assert!(open(&bytes).is_err(), "bit {bit} of byte {place}");
        }
    }
}

/// A shape may claim any lengths beside a zero.
#[test]
fn lengths_beside_a_zero() {
    for shape in [[0, usize::MAX, usize::MAX], [0, 1 << 33, 1 << 33], [usize::MAX, 0, 3]] {
        let mut pieces = Pieces::of(&file());
        pieces.push("huge", "F32", &shape, &[]);
        if let Ok(file) = open(&pieces.bytes()) {
            assert_eq!(file.tensor("huge").unwrap().unwrap().elem_count(), 0);
        }
    }
}
