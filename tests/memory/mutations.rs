//! Files and texts that were changed at random or on purpose: an error or a value, in little time and in
//! memory of a small multiple of their length.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Var};
use optimisers::config::OptimiserConfig;
use optimisers::torch::TorchState;
use optimisers::{AdamW, ErrorKind, Schedule, setup};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Bytes for each byte of an input, and a start. The shortest values of a text, such as the `1` of a list, need
/// the most.
const BYTES_PER_BYTE: usize = 128;
const START: usize = 64 << 10;

/// Runs a case within its bounds of time and memory.
fn bounded<T>(what: impl Debug, length: usize, run: impl FnOnce() -> T) -> T {
    let (start, mut value) = (Instant::now(), None);
    let bytes = crate::peak(|| value = Some(run()));
    assert!(
        bytes <= START + BYTES_PER_BYTE * length,
        "{what:?}: {bytes} bytes for an input of {length}"
    );
    // Of a machine that does other things, too.
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{what:?}: {:?}",
        start.elapsed()
    );
    value.expect("a case that has run")
}

/// A generator of random numbers: SplitMix64.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// All cases, with random numbers from what `SEED` says.
pub fn are_read_or_refused() {
    let seed = std::env::var("SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(30);
    println!("SEED={seed}");
    let mut random = Random(seed);
    nested_configurations_are_refused(&mut random);
    mutated_configurations_are_read_or_refused(&mut random);
    mutated_states_of_torch_are_read_or_refused(&mut random);
}

fn model() -> Vec<Var> {
    vec![Var::ones((2, 3), DType::F32, &Device::Cpu).expect("a variable")]
}

/// The header of the file is changed, which has the names, shapes and places of tensors, and the groups.
fn mutated_states_of_torch_are_read_or_refused(random: &mut Random) {
    let goldens = ["adamw", "lion", "momentum", "rmsprop_momentum"]
        .map(|name| {
            format!(
                "{}/golden/torch_state/{name}.safetensors",
                env!("CARGO_MANIFEST_DIR")
            )
        })
        .map(|path| std::fs::read(path).expect("a file"));
    let mut read = 0;
    for case in 0..5000 {
        let (length, rest) = goldens[case % goldens.len()]
            .split_first_chunk::<8>()
            .expect("a length");
        let (header, tensors) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let header = mutated(header, b"{}[]\",:\\0123456789.eE-truefalsn", 2, random);
        let file = [&header.len().to_le_bytes()[..], &header, tensors].concat();
        let mut state = setup(AdamW::new(0.1), &model()).expect("a state");
        let outcome = bounded(("case", case), file.len(), || {
            TorchState::from_bytes("state", file)?
                .restore(&mut state)
                .map(drop)
        });
        // What fits this model is not the question, but whether the file is read.
        read += usize::from(outcome.is_err_and(|error| error.kind() != ErrorKind::File));
    }
    println!("{read} of 5000 states of torch are read");
    assert!((100..4900).contains(&read), "{read} of 5000");
}

/// Bytes with some others in their place, up to so often: single ones, runs of one, parts that were
/// elsewhere, cuts.
fn mutated(base: &[u8], alphabet: &[u8], times: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = base.to_vec();
    for _ in 0..1 + random.below(times) {
        let (at, other) = (random.below(bytes.len()), random.below(bytes.len()));
        let length = random.below(1 + (bytes.len() - at).min(40));
        match random.below(8) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => bytes[at] = random.pick(alphabet),
            3 => bytes.insert(at, random.pick(alphabet)),
            4 => drop(bytes.drain(at..at + length)),
            5 => {
                let part = bytes[at..at + length].repeat(1 + random.below(4));
                drop(bytes.splice(other..other, part));
            }
            6 => {
                let run = vec![random.pick(alphabet); random.below(300)];
                drop(bytes.splice(at..at, run));
            }
            _ => bytes[at..at + length].fill(random.pick(&[0, 0xff, 0x7f])),
        }
        if bytes.is_empty() {
            break;
        }
    }
    bytes
}

/// The value of a text that reads back equal from its own text; `None` if it is refused, with a place where
/// it is JSON.
fn read_back<T: DeserializeOwned + Serialize + PartialEq + Debug>(text: &str) -> Option<T> {
    let value: T = match serde_json::from_str(text) {
        Ok(value) => value,
        Err(error) => {
            let is_json = serde_json::from_str::<Value>(text).is_ok();
            let told = error.to_string();
            assert!(
                !is_json || told.starts_with("configuration") || told.contains("deep"),
                "{told} for {text}"
            );
            return None;
        }
    };
    let again = serde_json::to_string(&value).and_then(|text| serde_json::from_str::<T>(&text));
    assert_eq!(again.expect("its own text"), value);
    Some(value)
}

/// Reads a text as an optimiser, and makes of it whatever it can become; whether it could be read.
fn is_optimiser(text: &str) -> bool {
    let Some(config) = read_back::<OptimiserConfig>(text) else {
        return false;
    };
    // What no rule is called is refused here, and what does not fit the model.
    let _ = config.setup(&model());
    match config.optimiser() {
        Ok(optimiser) => {
            let again = OptimiserConfig::of(&optimiser)
                .and_then(|config| config.optimiser())
                .expect("what was built");
            assert_eq!(format!("{again:?}"), format!("{optimiser:?}"));
        }
        Err(error) if error.place().is_some() => {}
        Err(error) => panic!("{error} without a place, for {text}"),
    }
    true
}

fn mutated_configurations_are_read_or_refused(random: &mut Random) {
    let optimisers = [
        r#"["ClipGrad", {"AdamW": {"eta": 0.001, "beta": [0.9, 0.95], "lambda": 0.1, "epsilon": 1e-8, "couple": true}}]"#,
        r#"{"MixedPrecision": {"dtype": "F32", "inner": [{"AccumGrad": {"n": 4}}, {"Adam": {"eta": "inf"}}, "Ema"]}}"#,
        r#"{"ByPath": [{"pattern": "*.bias", "optimiser": "LeaveOut"}, {"pattern": "*", "optimiser": {"Offload": "Muon"}}]}"#,
        r#"{"StoreAs": {"slots": {"m": "Q8", "v": "BF16"}, "inner": {"Adam": {}}}}"#,
        r#"{"Cautious": {"inner": {"AdamW": {"eta": 0.001}}, "unscaled": true}}"#,
        r#"{"DecoupledDecay": {"decay_lambda": 0.1, "decay_eta_max": 0.5, "cautious": true, "inner": ["Lion", "None"]}}"#,
        r#"{"Fallback": {"inner": {"Muon": {"parts": [4, 2, 2]}}, "fallback": "AdamW", "except": ["embedding*", "head"]}}"#,
        r#"{"Offload": {"SplitMaster": {"bits": 24, "inner": {"StoreAs": {"slots": "Q8", "inner": "Adam"}}}}}"#,
        r#"{"StochasticRounding": {"seed": 7, "inner": "Adam"}}"#,
    ];
    let schedules = [
        r#"{"Cosine": {"start": 0.001, "end": 0.0, "steps": 1000, "relative": true, "field": "0.eta"}}"#,
        r#"{"CosineRestarts": {"high": 1, "low": 0.5, "steps": 10, "factor": 1.5}}"#,
        r#"{"WarmupStableThen": {"peak": 1, "warmup": 10, "stable": 7, "decay": {"Step": {"start": 1, "rate": 0.5, "steps": 3}}}}"#,
        r#"{"Then": {"first": {"Constant": {"eta": 1}}, "steps": 5, "next": {"InverseSquareRoot": {"peak": 1, "warmup": 2}}}}"#,
    ];
    let mut read_some = |texts: &[&str], cases: usize, is_read: fn(&str) -> bool| {
        let mut read = 0;
        for case in 0..cases {
            let bytes = mutated(
                texts[case % texts.len()].as_bytes(),
                br#"[]{}",:.0123456789-+eE ntf"#,
                2,
                random,
            );
            let text = String::from_utf8_lossy(&bytes);
            read += usize::from(bounded(("case", case), text.len(), || is_read(&text)));
        }
        println!("{read} of {cases} texts are read");
        assert!((cases / 50..cases * 24 / 25).contains(&read), "{read} of {cases}");
    };
    read_some(&optimisers, 7000, is_optimiser);
    read_some(&schedules, 3000, |text| read_back::<Schedule>(text).is_some());
}

/// A value with others in it, and how deep it is.
fn nested(rounds: usize, random: &mut Random) -> (Value, usize) {
    (0..rounds).fold((json!("Adam"), 0), |(inner, depth), _| match random.below(3) {
        0 => (json!([inner]), depth + 1),
        1 => (json!({ "inner": inner }), depth + 1),
        _ => (json!([null, { "Adam": [inner, 1] }]), depth + 3),
    })
}

/// A value of another program does not come from a text, whose reader has a bound of its own.
fn nested_configurations_are_refused(random: &mut Random) {
    let of =
        |value: Value| serde_json::from_value::<OptimiserConfig>(value).map_err(|error| error.to_string());
    let lists = |depth: usize| (0..depth).fold(json!("Adam"), |inner, _| json!([inner]));
    let tables = |depth: usize| (0..depth).fold(json!("Adam"), |inner, _| json!({ "inner": inner }));
    of(lists(64)).expect("an optimiser");
    assert!(of(tables(64)).err().is_none_or(|told| !told.contains("deep")));
    for depth in [65, 66, 100, 1000] {
        assert_eq!(of(lists(depth)).expect_err("refused"), "nested more than 64 deep");
        assert_eq!(
            of(tables(depth)).expect_err("refused"),
            "nested more than 64 deep"
        );
    }
    let toml = |depth: usize| {
        toml::from_str::<BTreeMap<String, OptimiserConfig>>(&format!(
            "x = {}{}",
            "[".repeat(depth),
            "]".repeat(depth)
        ))
    };
    assert!(
        toml(70)
            .expect_err("refused")
            .to_string()
            .contains("nested more than 64 deep")
    );
    for case in 0..300 {
        let rounds = random.below(100);
        let (value, depth) = nested(rounds, random);
        let told = bounded(("case", case), 64 * depth, || of(value)).err();
        assert_eq!(
            told.is_some_and(|told| told == "nested more than 64 deep"),
            depth > 64,
            "case {case}: {depth}"
        );
    }
}
