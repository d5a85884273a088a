//! Python reads a checkpoint with the safetensors library, and can edit one.

use std::collections::BTreeMap;
use std::process::Command;

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{
    Adam, Checkpoint, CheckpointFile, MixedPrecision, OptimiserChain, StateTree, WeightDecay, setup, update,
};
use serde_json::{Value, json};

/// The values as texts that both sides read as the same numbers.
fn entry(tensor: &Tensor) -> Value {
    let dtype = match tensor.dtype() {
        DType::F16 => "float16",
        DType::F32 => "float32",
        DType::F64 => "float64",
        DType::U32 => "uint32",
        other => panic!("numpy has no {other:?}"),
    };
    let values: Vec<f64> = tensor
        .flatten_all()
        .and_then(|flat| flat.to_dtype(DType::F64)?.to_vec1())
        .expect("numbers");
    let texts: Vec<String> = values.into_iter().map(|value| format!("{value:e}")).collect();
    json!([dtype, tensor.dims(), texts])
}

fn model() -> BTreeMap<&'static str, Var> {
    let numbers = [0.1, -0.0, 1e-7, 65504.0, 2.0 / 3.0, 5e-8];
    let variable = |shape: &[usize], dtype| {
        let values = Tensor::from_slice(&numbers[..shape.iter().product()], shape, &Device::Cpu);
        values
            .and_then(|values| Var::from_tensor(&values.to_dtype(dtype)?))
            .expect("a variable")
    };
    BTreeMap::from([
        ("double", variable(&[3], DType::F64)),
        ("empty", variable(&[0, 2], DType::F32)),
        ("half", variable(&[2, 3], DType::F16)),
        ("scalar", variable(&[], DType::F32)),
        ("tokens", variable(&[1], DType::U32)),
    ])
}

fn started(model: &BTreeMap<&str, Var>) -> StateTree {
    let chain = OptimiserChain::new((WeightDecay::new(0.1), Adam::new(1e-3)));
    setup(MixedPrecision::new(DType::F32, chain), model).expect("a state")
}

#[test]
#[ignore = "needs python3 with safetensors and numpy; PYTHON names another interpreter"]
fn python_reads_what_was_saved() {
    let folder = tempfile::tempdir().expect("a folder");
    let [checkpoint, expected, edited] = ["saved", "expected", "edited"].map(|name| folder.path().join(name));
    let model = model();
    let mut state = started(&model);
    let float = |(path, x): (&&'static str, &Var)| {
        x.dtype()
            .is_float()
            .then(|| (*path, (x.as_tensor() * 0.3).expect("a gradient")))
    };
    for _ in 0..3 {
        update(
            &mut state,
            &model,
            &model.iter().filter_map(float).collect::<BTreeMap<_, _>>(),
        )
        .expect("an update");
    }
    Checkpoint::new(&state)
        .model(&model)
        .bytes("step", "3")
        .bytes("\"ключ\"", "\\ \n")
        .save(&checkpoint)
        .expect("a save");

    let mut tensors: BTreeMap<String, Value> = model
        .iter()
        .map(|(path, x)| (path.to_string(), entry(x)))
        .collect();
    for (name, bytes) in [("step", &b"3"[..]), ("\"ключ\"", b"\\ \n")] {
        let numbers: Vec<String> = bytes.iter().map(u8::to_string).collect();
        tensors.insert(
            format!("optimisers.bytes/{name}"),
            json!(["uint8", [bytes.len()], numbers]),
        );
    }
    let mut leaves = BTreeMap::new();
    for leaf in state.leaves() {
        for name in leaf.tensor_names() {
            tensors.insert(
                format!("{}/{name}", leaf.path()),
                entry(&leaf.tensor(&name).expect("a copy")),
            );
        }
        let counters: BTreeMap<_, _> = leaf.counters().into_iter().collect();
        let fields = json!({
            "lambda": 0.1, "eta": 1e-3, "beta": [0.9, 0.999], "epsilon": 1e-8, "bias_correction": true,
        });
        leaves.insert(
            leaf.path(),
            json!({ "steps": leaf.steps(), "counters": counters, "fields": fields }),
        );
    }
    let facts = json!({ "tensors": tensors, "leaves": leaves, "bytes": ["\"ключ\"", "step"] });
    std::fs::write(&expected, facts.to_string()).expect("a written file");

    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/python/read_checkpoint.py");
    let output = Command::new(python)
        .arg(script)
        .args([&checkpoint, &expected, &edited])
        .output()
        .expect("python3");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        format!("{} tensors are the same", tensors.len())
    );

    let mut resumed = started(&model);
    let error = CheckpointFile::open(&edited)
        .and_then(|file| file.restore(&mut resumed))
        .expect_err("a changed file");
    assert!(
        error.to_string().contains("CheckpointFile::open_edited"),
        "{error}"
    );
    CheckpointFile::open_edited(&edited)
        .and_then(|file| file.restore(&mut resumed))
        .expect("a checkpoint");
    let moment = |state: &StateTree| {
        state
            .leaf("half")?
            .tensor("1.m")
            .ok()?
            .flatten_all()
            .ok()?
            .to_vec1::<f32>()
            .ok()
    };
    assert_eq!(moment(&resumed), Some(vec![0.25; 6]));
    assert_ne!(moment(&state), moment(&resumed));
}
