//! Files that were damaged, or made to do harm: an error or a checkpoint, never a panic, and on an error
//! nothing has changed.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::DType;
use optimisers::{
    AccumGrad, Adam, Checkpoint, ClipNorm, ErrorKind, LossScaler, MixedPrecision, Optimiser, OptimiserChain,
    Outcome, Parameter, Result, ScheduleFree, StateTree, setup_with, update,
};
use serde_json::{Value, json};

use crate::model::models::CPU;
use support::common::{Vars, is_kind, random, snapshot, var};
use support::crafted_checkpoints::{Pieces, file_of, open, with_checksum};

/// A small model with masters, moments, numbers and a window that is half-way.
fn started(seed: u64) -> (Vars, StateTree) {
    let leaf = |(path, shape, dtype): (&str, &[usize], DType)| {
        (path.to_string(), var(&random(seed, shape, dtype, CPU)))
    };
    let model: Vars = [
        ("a", &[2][..], DType::BF16),
        ("b", &[], DType::F32),
        ("c", &[0, 2], DType::F64),
    ]
    .into_iter()
    .map(leaf)
    .collect();
    let choose = |path: &str, _: Parameter<'_>| -> Option<Optimiser> {
        let chain = OptimiserChain::new((AccumGrad::new(2), ClipNorm::new(1.0), Adam::new(0.01)));
        Some(if path == "b" {
            Optimiser::new(ScheduleFree::new(0.01))
        } else {
            Optimiser::new(MixedPrecision::new(DType::F32, chain))
        })
    };
    let mut state = setup_with(&model, choose).unwrap();
    (0..3).for_each(|call| _ = step(&model, &mut state, call).unwrap());
    (model, state)
}

fn step(model: &Vars, state: &mut StateTree, seed: u64) -> Result<Outcome> {
    let gradients: BTreeMap<_, _> = model
        .iter()
        .map(|(path, x)| (path.clone(), random(seed, x.dims(), x.dtype(), CPU)))
        .collect();
    update(state, model, &gradients)
}

fn file() -> Vec<u8> {
    let (model, state) = started(1);
    file_of(
        Checkpoint::new(&state)
            .model(&model)
            .bytes("n", "1")
            .scaler(&LossScaler::dynamic()),
    )
}

/// Tries files out, and counts those that are refused when they are read, when they are restored, and others:
/// to show that they reach every part of the reading.
struct Trial {
    model: Vars,
    state: StateTree,
    counts: [usize; 3],
}

impl Trial {
    fn new() -> Self {
        let (model, state) = started(20);
        Trial {
            model,
            state,
            counts: [0; 3],
        }
    }

    fn run(&mut self, bytes: &[u8], what: impl std::fmt::Display) {
        for (convert, with_model) in [(false, true), (true, false), (true, true)] {
            let outcome = catch_unwind(AssertUnwindSafe(|| self.restore(bytes, convert, with_model)));
            let text = String::from_utf8_lossy(bytes);
            self.counts[outcome.unwrap_or_else(|_| panic!("{what}, {convert}, {with_model}: {text}"))] += 1;
        }
    }

    fn restore(&mut self, bytes: &[u8], convert: bool, with_model: bool) -> usize {
        let (model, state) = (&self.model, &mut self.state);
        let Ok(mut file) = open(bytes) else { return 0 };
        if convert {
            file = file.converting().accepting_non_finite();
        }
        let before = snapshot(model, state);
        let result = if with_model {
            file.restore_with_model(state, model)
        } else {
            file.restore(state)
        };
        if result.is_err() {
            assert!(snapshot(model, state) == before, "something changed");
        }
        let is_restored = result.is_ok();
        // What was accepted can be worked with; whether a rule refuses it is another matter.
        let _ = (step(model, state, 5), file.scaler());
        file.tensor_names()
            .into_iter()
            .for_each(|name| _ = file.tensor(&name));
        1 + usize::from(is_restored)
    }

    fn check(self) {
        assert!(self.counts.iter().all(|&count| count > 100), "{:?}", self.counts);
    }
}

/// Every bit is covered by the checksum or by the format, and with the right checksum by what reads it.
#[test]
fn every_single_bit_counts() {
    let (original, mut trial) = (file(), Trial::new());
    for place in 0..original.len() {
        for bit in 0..8 {
            let mut bytes = original.clone();
            bytes[place] ^= 1 << bit;
            assert!(open(&bytes).is_err(), "bit {bit} of byte {place}");
            if bit == place % 8 || bit == 7 {
                trial.run(&with_checksum(bytes), format_args!("bit {bit} of byte {place}"));
            }
        }
    }
    trial.check();
}

#[test]
fn a_file_cut_off_anywhere() {
    let original = file();
    let cut = (0..original.len()).map(|length| original[..length].to_vec());
    for bytes in cut.chain([[&original[..], &[0]].concat()]) {
        for bytes in [bytes.clone(), with_checksum(bytes)] {
            let error = open(&bytes).expect_err("an error");
            is_kind(
                &error,
                ErrorKind::File,
                &["crafted", "not a whole safetensors file"],
            );
        }
    }
    assert!(open(&with_checksum(original)).is_ok());
}

/// What a header is said to be long decides what is read as one.
#[test]
fn every_length_of_the_header() {
    let (original, end) = (file(), file().len() as u64);
    let far = [1 << 32, 100_000_000, 1 << 63, u64::MAX - 8, u64::MAX];
    let own = u64::from_le_bytes(original[..8].try_into().expect("eight bytes"));
    for length in (0..end + 2).chain(far).filter(|length| *length != own) {
        let mut bytes = original.clone();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        assert!(open(&with_checksum(bytes)).is_err(), "{length}");
    }
}

/// Every value that differs from this one in one place.
fn edits(value: &Value) -> Vec<Value> {
    let (largest, huge) = (u64::MAX, 1u64 << 63);
    let mut all: Vec<Value> = serde_json::from_value(json!([
        null, true, -1, 0, 1, 1.5, 1e300, largest, huge, "", "a", "F64"
    ]))
    .expect("values");
    all.extend([
        json!("bf16"),
        json!("nan"),
        json!("Skip"),
        json!([]),
        json!([0, 0]),
        json!([2]),
        json!({}),
    ]);
    match value {
        Value::Object(map) => {
            for (key, inner) in map {
                let mut without = map.clone();
                without.remove(key);
                for (name, inner) in edits(inner)
                    .into_iter()
                    .map(|inner| (key.as_str(), inner))
                    .chain([("d", inner.clone())])
                {
                    let mut map = without.clone();
                    map.insert(name.to_string(), inner.clone());
                    all.push(map.into());
                }
                let mut more = map.clone();
                more.insert(format!("{key}/master"), inner.clone());
                all.extend([without.into(), more.into()]);
            }
        }
        Value::Array(list) => {
            all.push(list.iter().rev().cloned().collect());
            for (i, inner) in list.iter().enumerate() {
                let around = |inner: &[Value]| Value::from([&list[..i], inner, &list[i + 1..]].concat());
                all.extend([around(&[]), around(&[inner.clone(), inner.clone()])]);
                all.extend(edits(inner).into_iter().map(|inner| around(&[inner])));
            }
        }
        Value::Number(number) => {
            all.extend(
                number
                    .as_u64()
                    .into_iter()
                    .flat_map(|n| [n.wrapping_sub(1), n + 1, 4 * n])
                    .map(Value::from),
            );
        }
        _ => {}
    }
    all
}

/// With the checksum that belongs to them.
#[test]
fn every_edit_of_a_description_and_of_a_list_of_tensors() {
    let (original, mut trial) = (Pieces::of(&file()), Trial::new());
    for description in edits(&original.description) {
        trial.run(
            &Pieces {
                description,
                ..original.clone()
            }
            .bytes(),
            "a description",
        );
    }
    for tensors in edits(&original.tensors).into_iter().filter(Value::is_object) {
        trial.run(
            &Pieces {
                tensors,
                ..original.clone()
            }
            .bytes(),
            "a list of tensors",
        );
    }
    trial.check();
}

/// A shape may claim any lengths beside a zero.
#[test]
fn lengths_beside_a_zero() {
    for shape in [
        [0, usize::MAX, usize::MAX],
        [0, 1 << 33, 1 << 33],
        [usize::MAX, 0, 3],
    ] {
        let mut pieces = Pieces::of(&file());
        pieces.push("huge", "F32", &shape, &[]);
        if let Ok(file) = open(&pieces.bytes()) {
            assert_eq!(file.tensor("huge").unwrap().unwrap().elem_count(), 0);
        }
    }
}
