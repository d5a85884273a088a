//! Files and texts that were changed at random or on purpose: an error or a value, in little time and in
//! memory of a small multiple of their length.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Var};
use optimisers::config::OptimiserConfig;
use optimisers::torch::TorchState;
use optimisers::{AdamW, Error, ErrorKind, Schedule, setup};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Bytes for each of an input: an object of 56 for the shortest instruction, which other objects may refer to
/// 16 times; and a start.
const BYTES_PER_BYTE: usize = 16 * 64;
const START: usize = 64 << 10;

/// Runs a case within its bounds of time and memory.
fn bounded<T>(what: impl Debug, length: usize, run: impl FnOnce() -> T) -> T {
    let (start, mut value) = (Instant::now(), None);
    let bytes = crate::peak(|| value = Some(run()));
    assert!(bytes <= START + BYTES_PER_BYTE * length, "{what:?}: {bytes} bytes for an input of {length}");
    // Of a machine that does other things, too.
    assert!(start.elapsed() < Duration::from_secs(5), "{what:?}: {:?}", start.elapsed());
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
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(30);
    println!("SEED={seed}");
    let mut random = Random(seed);
    crafted_pickles_are_refused();
    nested_configurations_are_refused(&mut random);
    mutated_pickles_are_read_or_refused(&mut random);
    mutated_configurations_are_read_or_refused(&mut random);
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

/// A number of little-endian bytes in a file.
fn number(bytes: &[u8]) -> usize {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte))
}

/// The records of an archive of `torch.save`.
fn records(archive: &[u8]) -> Vec<(String, Vec<u8>)> {
    let end = archive.windows(4).rposition(|window| window == b"PK\x05\x06").expect("an end");
    let (mut records, mut at) = (Vec::new(), number(&archive[end + 16..end + 20]));
    while archive[at..].starts_with(b"PK\x01\x02") {
        let entry = &archive[at..];
        let [name, extra, comment] = [28, 30, 32].map(|at| number(&entry[at..at + 2]));
        let (length, header) = (number(&entry[24..28]), number(&entry[42..46]));
        let start = header
            + 30
            + number(&archive[header + 26..header + 28])
            + number(&archive[header + 28..header + 30]);
        records.push((
            String::from_utf8_lossy(&entry[46..46 + name]).into_owned(),
            archive[start..start + length].to_vec(),
        ));
        at += 46 + name + extra + comment;
    }
    records
}

/// An archive of records without checksums, as torch writes it on request.
fn archive(records: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in records {
        let lengths = [bytes.len() as u32; 2].map(u32::to_le_bytes).concat();
        let name_length = (name.len() as u16).to_le_bytes();
        let header = (file.len() as u32).to_le_bytes();
        file.extend(
            [&b"PK\x03\x04"[..], &[0; 14], &lengths, &name_length, &[0; 2], name.as_bytes(), bytes].concat(),
        );
        directory.extend(
            [&b"PK\x01\x02"[..], &[0; 16], &lengths, &name_length, &[0; 12], &header, name.as_bytes()]
                .concat(),
        );
    }
    let [start, length] = [file.len() as u32, directory.len() as u32].map(u32::to_le_bytes);
    let count = (records.len() as u16).to_le_bytes();
    [&file[..], &directory, b"PK\x05\x06", &[0; 4], &count, &count, &length, &start, &[0; 2]].concat()
}

/// A file with such a pickle and nothing else.
fn pickled(pickle: &[u8]) -> Vec<u8> {
    archive(&[("archive/data.pkl".to_string(), pickle.to_vec())])
}

fn model() -> Vec<Var> {
    vec![Var::ones((2, 3), DType::F32, &Device::Cpu).expect("a variable")]
}

/// Whether a file is refused as one of another format, or a damaged one.
fn is_unreadable(error: &Error) -> bool {
    error.kind() == ErrorKind::File
        && error.to_string().starts_with("torch state state: neither a whole safetensors file nor one that")
}

fn refused(name: &str, file: Vec<u8>) -> String {
    let length = file.len();
    match bounded(name, length, || TorchState::from_bytes("state", file)) {
        Err(error) if is_unreadable(&error) => {
            std::error::Error::source(&error).expect("a reason").to_string()
        }
        other => panic!("{name}: {other:?}"),
    }
}

/// Objects in objects, 60 000 of them, and a text of 4 GiB: once these ended the process.
fn crafted_pickles_are_refused() {
    const TIMES: usize = 60_000;
    let nested: [(&str, Vec<u8>); 5] = [
        ("tuples", [&b")"[..], &b"\x85".repeat(TIMES)].concat()),
        ("lists", [b"]".repeat(TIMES), b"a".repeat(TIMES - 1)].concat()),
        ("lists that are kept", [b"]q\0".repeat(TIMES), b"a".repeat(TIMES - 1)].concat()),
        ("dicts", [b"}N".repeat(TIMES), b"}".to_vec(), b"s".repeat(TIMES)].concat()),
        ("marked tuples", [b"(".repeat(TIMES), b"t".repeat(TIMES)].concat()),
    ];
    for (name, pickle) in nested {
        let reason = refused(name, pickled(&[&b"\x80\x02"[..], &pickle, b"."].concat()));
        assert_eq!(reason, "its objects are nested more than 64 deep", "{name}");
        // It is refused in a thread with little memory for its calls, too.
        let file = pickled(&[&b"\x80\x02"[..], &pickle, b"."].concat());
        let thread = std::thread::Builder::new()
            .stack_size(256 << 10)
            .spawn(move || TorchState::from_bytes("state", file).is_err());
        assert!(thread.expect("a thread").join().expect("no panic"), "{name}");
    }
    let reason = refused("a long text", pickled(b"\x80\x02X\xf0\xff\xff\xffabc."));
    assert_eq!(reason, "it ends within a text");
}

fn mutated_pickles_are_read_or_refused(random: &mut Random) {
    let goldens: Vec<Vec<(String, Vec<u8>)>> = ["adamw", "several", "lion", "momentum", "rmsprop_momentum"]
        .map(|name| format!("{}/golden/torch_state/{name}.pt", env!("CARGO_MANIFEST_DIR")))
        .map(|path| records(&std::fs::read(path).expect("a file")))
        .into();
    let codes: &[u8] = b"\x80\x81\x85\x86\x87\x88\x89\x8a()]}NQRXabcdehjqrstuGJKM.\n";
    let mut read = 0;
    for case in 0..5000 {
        let mut records = goldens[case % goldens.len()].clone();
        let (_, pickle) = records.iter_mut().find(|(name, _)| name.ends_with("data.pkl")).expect("a pickle");
        *pickle = mutated(pickle, codes, 4, random);
        let file = archive(&records);
        let mut state = setup(AdamW::new(0.1), &model()).expect("a state");
        let outcome = bounded(("case", case), file.len(), || {
            let file = TorchState::from_bytes("state", file)?;
            file.restore(&mut state).map(drop)
        });
        // What fits this model is not the question, but whether it is read.
        read += usize::from(outcome.as_ref().err().is_none_or(|error| !is_unreadable(error)));
    }
    println!("{read} of 5000 pickles are read");
    assert!((100..4900).contains(&read), "{read} of 5000");
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
    let Some(config) = read_back::<OptimiserConfig>(text) else { return false };
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
            let bytes =
                mutated(texts[case % texts.len()].as_bytes(), br#"[]{}",:.0123456789-+eE ntf"#, 2, random);
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
        assert_eq!(of(tables(depth)).expect_err("refused"), "nested more than 64 deep");
    }
    let toml = |depth: usize| {
        toml::from_str::<BTreeMap<String, OptimiserConfig>>(&format!(
            "x = {}{}",
            "[".repeat(depth),
            "]".repeat(depth)
        ))
    };
    assert!(toml(70).expect_err("refused").to_string().contains("nested more than 64 deep"));
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
