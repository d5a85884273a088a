//! Runs that change over between torch and this crate in the middle.

use std::path::Path;
use std::process::Command;

use candle_core::DType;
use optimisers::{setup, torch::TorchState};
use serde_json::json;

use support::common::says;
use support::tested::Tested;
use support::torch_runs::{
    GROUP_RATES, assert_close, assert_exact, json as read, model, model_in, optimisers, parameters,
    read_parameters, scheduled, start, start_in, steps,
};

fn python(step: &str, folder: &Path) {
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/python/torch_state.py");
    let output = Command::new(python)
        .arg(script)
        .arg(step)
        .arg(folder)
        .output()
        .expect("python3");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
#[ignore = "needs python3 with torch and safetensors; PYTHON names another interpreter"]
fn a_run_changes_over_from_torch_and_to_torch() -> Tested {
    let folder = tempfile::tempdir()?;
    let folder = folder.path();
    python("start", folder);
    let expected = read(&folder.join("expected.json"));
    let runs = optimisers()
        .into_iter()
        .filter(|(name, _)| expected.get(name).is_some());
    let mut halves = serde_json::Map::new();
    for (name, optimiser) in runs {
        let [after_20, after_40] =
            ["after_20", "after_40"].map(|half| read_parameters(&expected[name][half]));
        let model = model(&after_20);
        let mut state = setup(optimiser.clone(), &model)?;
        let file = TorchState::open(folder.join(format!("{name}.safetensors")))?;
        assert_eq!(file.restore(&mut state)?, [""; 0], "{name}");
        steps(&mut state, &model, 20);
        assert_close(&parameters(&model), &after_40, &format!("from torch: {name}"));
        let model = start();
        let mut state = setup(optimiser, &model)?;
        steps(&mut state, &model, 20);
        assert_close(&parameters(&model), &after_20, name);
        state.save_torch(folder.join(format!("{name}.here.safetensors")))?;
        halves.insert(name.to_string(), json!(parameters(&model)));
    }
    std::fs::write(
        folder.join("parameters.json"),
        serde_json::Value::Object(halves).to_string(),
    )?;
    python("finish", folder);
    let got = read(&folder.join("got.json"));
    for (name, got) in got.as_object().expect("runs") {
        assert_close(
            &read_parameters(got),
            &read_parameters(&expected[name]["after_40"]),
            &format!("to torch: {name}"),
        );
    }
    assert!(got.as_object().is_some_and(|runs| runs.len() >= 10));
    Ok(())
}

/// Two groups under one schedule, which changes over in the middle with everything else, in f64.
#[test]
#[ignore = "needs python3 with torch and safetensors; PYTHON names another interpreter"]
fn a_run_with_a_scheduler_changes_over_from_torch_and_to_torch() -> Tested {
    let folder = tempfile::tempdir()?;
    let folder = folder.path();
    python("start_scheduled", folder);
    let expected = read(&folder.join("scheduled.json"));
    let mut halves = serde_json::Map::new();
    for run in scheduled() {
        let name = run.name;
        let [after_20, after_40] =
            ["after_20", "after_40"].map(|half| read_parameters(&expected[name][half]));
        let pickled = TorchState::open(folder.join(format!("{name}.pt"))).expect_err("another format");
        says(&pickled, &["a file of `torch.save`", "the function `convert`"]);
        let training = read(&folder.join(name).join("training.json"));
        assert_eq!(training["scaler"]["scale"], 1024.0);
        let model = model_in(DType::F64, &after_20);
        let mut state = setup(run.optimiser.clone(), &model)?;
        state.schedule(run.schedule.clone())?;
        state.set_steps(training["last_epoch"].as_u64().expect("a count"))?;
        let file = TorchState::open(folder.join(name).join("optimizer.safetensors"))?;
        file.taking_over_fields().restore(&mut state)?;
        steps(&mut state, &model, 20);
        assert_exact(&parameters(&model), &after_40, &format!("from torch: {name}"));
        let model = start_in(DType::F64);
        let mut state = setup(run.optimiser, &model)?;
        let [fc, others] = GROUP_RATES;
        // The last of a chain has torch's rate.
        let field = if name.starts_with("momentum") {
            "1.eta"
        } else {
            "eta"
        };
        state
            .at("fc")
            .and_then(|mut leaves| leaves.adjust_field(field, fc))?;
        state
            .at("conv")
            .and_then(|mut leaves| leaves.adjust_field(field, others))?;
        state.schedule(run.schedule)?;
        steps(&mut state, &model, 20);
        assert_exact(&parameters(&model), &after_20, name);
        state.save_torch(folder.join(format!("{name}.here.safetensors")))?;
        halves.insert(name.to_string(), json!(parameters(&model)));
    }
    std::fs::write(
        folder.join("parameters.json"),
        serde_json::Value::Object(halves).to_string(),
    )?;
    python("finish_scheduled", folder);
    let got = read(&folder.join("got.json"));
    for (name, got) in got.as_object().expect("runs") {
        assert_exact(
            &read_parameters(got),
            &read_parameters(&expected[name]["after_40"]),
            &format!("to torch: {name}"),
        );
    }
    assert_eq!(got.as_object().map(|runs| runs.len()), Some(3));
    Ok(())
}
