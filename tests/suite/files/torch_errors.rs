//! What of torch's is refused: other definitions, files that do not fit, damaged ones; and what of here torch
//! has no words for.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use optimisers::torch::TorchState;
use optimisers::{
    AMSGrad, AccumGrad, AdaGrad, Adam, AdamW, Average, ClipGlobalNorm, DecoupledDecay, Descent, ErrorKind,
    Momentum, Nesterov, Optimiser, OptimiserChain, Parameter, RMSProp, Scale, Schedule, StateTree,
    WeightDecay, setup,
};
use serde_json::{Value, json};

use crate::files::torch_state::{bytes, count, file, floats, group, lone, moments, refused, torch_error};
use support::common::{Vars, constant, is_kind, says, var};
use support::tested::Tested;

#[test]
fn definitions_that_differ_are_refused() -> Tested {
    let model = lone();
    let adam = || setup(Adam::new(1e-3), &model).expect("a state");
    let adamw = || setup(AdamW::new(1e-3), &model).expect("a state");
    let sgd = json!({ "betas": "removed", "amsgrad": "removed", "eps": "removed", "momentum": 0.9, "dampening": 0, "nesterov": false });
    let with = |base: &Value, key: &str, value: Value| {
        let mut changes = base.clone();
        changes[key] = value;
        changes
    };
    let none = json!({});
    let differs = [
        (adam(), with(&none, "maximize", json!(true)), "maximize"),
        (
            setup(OptimiserChain::new((Scale::new(-1.0), Adam::new(1e-3))), &model)?,
            none.clone(),
            "maximize",
        ),
        (
            adam(),
            with(&none, "weight_decay", json!(0.1)),
            "weight_decay (in the gradient)",
        ),
        (
            adam(),
            json!({ "weight_decay": 0.1, "decoupled_weight_decay": true }),
            "weight_decay (decoupled)",
        ),
        (
            adamw(),
            json!({ "weight_decay": 0.1, "decoupled_weight_decay": false }),
            "weight_decay (in the gradient)",
        ),
        (
            adam(),
            with(&none, "grad_averaging", json!(true)),
            "grad_averaging",
        ),
        (
            setup(Momentum::new(1e-3), &model)?,
            with(&sgd, "dampening", json!(0.5)),
            "dampening",
        ),
        (
            setup(AdaGrad::new(1e-3), &model)?,
            json!({ "betas": "removed", "amsgrad": "removed", "lr_decay": 0.1 }),
            "lr_decay",
        ),
    ];
    for (mut state, changes, key) in differs {
        // Nothing here could take it over.
        let error = torch_error(refused(
            &file(&moments(), changes).taking_over_fields(),
            &model,
            &mut state,
        ));
        is_kind(
            &error,
            ErrorKind::OtherRule,
            &[&format!("torch's {key} in the file is ")],
        );
        assert_eq!(error.path(), Some("x"), "{key}: {error}");
    }
    let others = [
        (adam(), with(&none, "amsgrad", json!(true)), "`AMSGradW`"),
        (adam(), sgd.clone(), "`Momentum`"),
        (
            setup(Momentum::new(1e-3), &model)?,
            with(&sgd, "nesterov", json!(true)),
            "`Nesterov`",
        ),
        (
            setup(Momentum::new(1e-3), &model)?,
            with(&sgd, "momentum", json!(0)),
            "`Descent`",
        ),
        (
            setup(RMSProp::new(1e-3), &model)?,
            json!({ "betas": "removed", "amsgrad": "removed", "alpha": 0.9, "centered": true }),
            "`RMSProp` with `centred`",
        ),
    ];
    for (mut state, changes, expected) in others {
        let error = torch_error(refused(&file(&moments(), changes), &model, &mut state));
        is_kind(
            &error,
            ErrorKind::OtherRule,
            &["the optimiser of the file is torch's "],
        );
        assert_eq!(error.remedy(), Some(&*format!("set up {expected}")), "{error}");
        assert_ne!(
            error.got().map(|got| format!("torch's {got}")).as_deref(),
            error.expected().and_then(|text| text.split(", ").next())
        );
    }
    Ok(())
}

/// Options of torch's SGD, for a file with a velocity.
fn sgd(momentum: f64, nesterov: bool, lr: f64) -> Value {
    json!({
        "betas": "removed", "amsgrad": "removed", "eps": "removed", "momentum": momentum, "dampening": 0, "nesterov": nesterov, "lr": lr,
    })
}

/// A scheduler's keys in a group, and whether the run can go on.
#[test]
fn what_schedulers_move_besides_the_rate_is_refused() -> Tested {
    let model = lone();
    let mut state = setup(Adam::new(1e-3), &model)?;
    for key in ["max_momentum", "base_momentum"] {
        let error = torch_error(refused(
            &file(&moments(), json!({ key: 0.95 })).taking_over_fields(),
            &model,
            &mut state,
        ));
        is_kind(
            &error,
            ErrorKind::Unsupported,
            &["changes the momentum, or β₁", key],
        );
        assert!(
            error
                .remedy()
                .is_some_and(|remedy| remedy.contains("field(\"beta1\")")),
            "{error}"
        );
        // A schedule that moves it here too, at the number that the file has in this step.
        for (start, is_same) in [(0.9, true), (0.95, false)] {
            let mut state = setup(Adam::new(1e-3), &model)?;
            state.schedule(Schedule::linear(start, 0.5, 100).field("beta1"))?;
            state.set_steps(0)?;
            let restored = file(&moments(), json!({ key: 0.95 })).restore(&mut state);
            assert_eq!(restored.is_ok(), is_same, "{restored:?}");
        }
    }
    // A decay that follows a schedule is compared with its value in this step.
    for (decay, is_same) in [(0.05, true), (0.1, false)] {
        let mut state = setup(
            AdamW {
                lambda: 0.1,
                ..AdamW::new(1e-3)
            },
            &model,
        )?;
        state.schedule(Schedule::constant(0.5).relative().field("lambda"))?;
        let changes = json!({ "weight_decay": decay, "decoupled_weight_decay": true });
        let restored = file(&moments(), changes).taking_over_fields().restore(&mut state);
        assert_eq!(restored.is_ok(), is_same, "{restored:?}");
        assert_eq!(
            state.leaf("x").and_then(|leaf| leaf.field("lambda")),
            Some(0.1.into())
        );
    }
    // Those of `OneCycleLR(cycle_momentum=False)`.
    file(&moments(), json!({ "max_lr": 0.25, "min_lr": 1e-7 })).restore(&mut state)?;
    Ok(())
}

/// Numbers of a file that would be lost, or stand for others, in silence.
#[test]
fn numbers_that_cannot_be_trusted_are_refused() -> Tested {
    let model = lone();
    let momentum = || setup(Momentum::new(1e-3), &model).expect("a state");
    let nesterov = || setup(Nesterov::new(1e-3), &model).expect("a state");
    let outside = || {
        setup(
            OptimiserChain::new((Momentum::new(1.0), Descent::new(1e-3))),
            &model,
        )
        .expect("a state")
    };
    let buffer = |numbers: &[f32]| [("x/momentum_buffer", floats(numbers))];
    let takes = |state: &mut StateTree, entries: &[(&str, Tensor)], changes: Value, words: Option<&str>| {
        let file = file(entries, changes).taking_over_fields();
        let Some(words) = words else {
            return assert!(file.restore(state).is_ok_and(|unmoved| unmoved.is_empty()));
        };
        let error = torch_error(refused(&file, &model, state));
        assert!(
            error.to_string().contains(words) && error.remedy().is_some(),
            "{words}: {error}"
        );
    };
    // A velocity here has the rate inside.
    let lost = Some(
        "momentum_buffer in the file is -2 at element 1, expected 0, because the velocity here \
         contains the learning rate",
    );
    takes(&mut momentum(), &buffer(&[0.0, -2.0]), sgd(0.9, false, 0.0), lost);
    takes(&mut nesterov(), &buffer(&[0.0, -2.0]), sgd(0.9, true, 0.0), lost);
    takes(&mut momentum(), &buffer(&[0.0, 0.0]), sgd(0.9, false, 0.0), None);
    takes(&mut outside(), &buffer(&[0.0, -2.0]), sgd(0.9, false, 0.0), None);
    let adam = || setup(Adam::new(1e-3), &model).expect("a state");
    let large = Some("at element 0, expected a number that F32 can hold");
    takes(
        &mut momentum(),
        &buffer(&[1e38, 0.0]),
        sgd(0.9, false, 1e3),
        large,
    );
    // Counts that 16 bits stop at.
    for (dtype, last) in [(DType::BF16, 256.0f32), (DType::F16, 2048.0)] {
        let words = format!(
            "step in the file is {last}, expected a count in F32, because adding 1 to this count in \
             {dtype:?} changes nothing"
        );
        for (number, words) in [(last - 1.0, None), (last, Some(&*words))] {
            let count = count(number).to_dtype(dtype)?;
            let mut entries = moments();
            entries[2].1 = count.clone();
            let above =
                (count.ones_like()? + &count).and_then(|next| next.to_dtype(DType::F32)?.to_scalar::<f32>());
            assert_eq!(above? == number, words.is_some(), "{dtype:?}");
            takes(&mut adam(), &entries, json!({}), words);
        }
    }
    let mut entries = moments();
    entries[2].1 = count(16_777_216.0);
    takes(&mut adam(), &entries, json!({}), None);
    let error = refused(
        &file(&buffer(&[1e38, 0.0]), sgd(0.9, false, 1e3)).taking_over_fields(),
        &model,
        &mut momentum(),
    );
    assert_eq!(error.kind(), ErrorKind::Tensor);
    Ok(())
}

/// Each text names what differs.
#[test]
fn kinds_of_sgd_are_told_apart() -> Tested {
    let model = lone();
    let rules: [(Optimiser, &str); 4] = [
        (Optimiser::new(Descent::new(1e-3)), "SGD"),
        (Optimiser::new(Momentum::new(1e-3)), "SGD(momentum)"),
        (
            Optimiser::new(Momentum {
                rho: 0.0,
                ..Momentum::new(1e-3)
            }),
            "SGD",
        ),
        (Optimiser::new(Nesterov::new(1e-3)), "SGD(nesterov, momentum)"),
    ];
    let files = [
        ("SGD", 0.0, false),
        ("SGD(momentum)", 0.9, false),
        ("SGD(nesterov, momentum)", 0.9, true),
    ];
    for ((rule, own), (kind, momentum, nesterov)) in
        rules.iter().flat_map(|rule| files.map(|file| (rule, file)))
    {
        let mut state = setup(rule.clone(), &model)?;
        let buffer = (momentum != 0.0).then(|| ("x/momentum_buffer", floats(&[1.0, 2.0])));
        let file = file(buffer.as_slice(), sgd(momentum, nesterov, 1e-3));
        if *own == kind {
            file.restore(&mut state)?;
            continue;
        }
        let error = torch_error(refused(&file, &model, &mut state));
        is_kind(
            &error,
            ErrorKind::OtherRule,
            &[&format!(
                "the optimiser of the file is torch's {kind}, expected torch's {own}, which "
            )],
        );
    }
    Ok(())
}

#[test]
fn files_that_do_not_fit_are_refused() -> Tested {
    let model = lone();
    let mut state = setup(Adam::new(1e-3), &model)?;
    let with = |name: &'static str, tensor: Option<Tensor>| {
        let mut entries: Vec<_> = moments().into_iter().filter(|(own, _)| *own != name).collect();
        entries.extend(tensor.map(|tensor| (name, tensor)));
        file(&entries, json!({}))
    };
    let mut error = |file: &TorchState| torch_error(refused(file, &model, &mut state)).to_string();
    let whole = |numbers: &[u32]| Tensor::new(numbers, &Device::Cpu).expect("a tensor");
    let cases = [
        (
            with("x/exp_avg", None),
            "the file lacks \"exp_avg\" of this parameter; the file has: exp_avg_sq, step",
        ),
        (with("x/step", None), "the file lacks \"step\""),
        (
            with("x/exp_inf", Some(floats(&[1.0, 1.0]))),
            "the rule here has no state for the file's entry \"exp_inf\"",
        ),
        (
            with("x/exp_avg", Some(floats(&[1.0]))),
            "exp_avg in the file has shape [1], expected [2]",
        ),
        (
            with("x/exp_avg", Some(whole(&[1, 2]))),
            "exp_avg in the file is U32, expected F16",
        ),
        (
            with("x/exp_avg", Some(floats(&[1.0, f32::NAN]))),
            "exp_avg in the file is NaN at element 1",
        ),
        (
            with("x/exp_avg_sq", Some(floats(&[1.0, -1.0]))),
            "exp_avg_sq in the file is -1 at element 1, expected 0 or more",
        ),
        (
            with("x/step", Some(count(1.5))),
            "step in the file is 1.5, expected a count of steps",
        ),
        (
            with("x/step", Some(count(-1.0))),
            "step in the file is -1, expected a count of steps",
        ),
        (
            with("x/step", Some(floats(&[1.0, 2.0]))),
            "step in the file is a tensor of F32 and shape [2]",
        ),
    ];
    for (file, words) in cases {
        let error = error(&file);
        assert!(
            error.starts_with("torch state state: parameter \"x\": ") && error.contains(words),
            "{words}: {error}"
        );
    }
    let cases = [
        (
            file(&[], json!({ "params": ["y"] })),
            "parameter \"y\": the file has this parameter, but the state does not; the state has: x",
        ),
        (
            file(&[], json!({ "params": [] })),
            "parameter \"x\": the file lacks this parameter",
        ),
        (
            file(&moments(), json!({ "params": ["x", "x"] })),
            "parameter \"x\": two parameters of the file are this parameter",
        ),
        (
            file(&moments(), json!({ "lr": "fast" })),
            "the file's lr is \"fast\", expected a number",
        ),
        (
            file(&moments(), json!({ "betas": [0.9] })),
            "the file's betas is [0.9], expected two numbers",
        ),
        (
            file(&moments(), json!({ "amsgrad": "removed" })),
            "no rule of this crate continues an optimiser with the hyper-parameters betas",
        ),
    ];
    for (file, words) in cases {
        let error = error(&file);
        assert!(error.contains(words), "{words}: {error}");
    }
    let invalid = file(&moments(), json!({ "betas": [0.9, 1.5] })).taking_over_fields();
    says(&refused(&invalid, &model, &mut state), &["beta is (0.9, 1.5)"]);
    with("x/exp_avg", Some(floats(&[1.0, f32::NAN])))
        .accepting_non_finite()
        .restore(&mut state)?;
    Ok(())
}

#[test]
fn files_of_other_formats_are_refused() -> Tested {
    let flat = bytes(&moments(), &group(json!({})));
    let plain = safetensors::serialize(HashMap::from([("x", floats(&[1.0]))]), None)?;
    let stray = bytes(&[("y/exp_avg", floats(&[1.0]))], &group(json!({})));
    let unnamed = bytes(&[("exp_avg", floats(&[1.0]))], &group(json!({})));
    let pickled =
        "a file of `torch.save`, and not a safetensors file; convert the file with the function `convert`";
    let cases: [(Vec<u8>, &str); 7] = [
        (Vec::new(), "not a whole safetensors file"),
        (b"\x80\x02}q\x00.".to_vec(), pickled),
        (b"PK\x03\x04\0\0\0\0\0\0".to_vec(), pickled),
        (flat[..flat.len() - 1].to_vec(), "not a whole safetensors file"),
        (plain, "its metadata has no \"param_groups\""),
        (stray, "it has the state of a parameter \"y\" that no group has"),
        (unnamed, "is not named <parameter>/<key>"),
    ];
    for (bytes, words) in cases {
        let error = torch_error(TorchState::from_bytes("state", bytes).expect_err("an error")).to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
    let missing = TorchState::open("no/such/file").expect_err("an error");
    is_kind(
        &missing,
        ErrorKind::Io,
        &["torch state no/such/file: cannot read the file"],
    );
    Ok(())
}

#[test]
fn what_torch_does_not_know_is_not_written() -> Tested {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("state");
    let model = lone();
    let refused = |state: &StateTree, words: &str| {
        says(&state.save_torch(&path).expect_err("an error"), &[words]);
        assert!(!path.exists());
    };
    let state = |optimiser: &Optimiser| setup(optimiser.clone(), &model).expect("a state");
    let decayed = |couple| AdamW {
        lambda: 0.1,
        couple,
        ..AdamW::new(0.1)
    };
    let uncorrected = Optimiser::new(AdamW {
        bias_correction: false,
        ..AdamW::new(0.1)
    });
    let decoupled = || DecoupledDecay::new(0.1, Adam::new(0.1));
    let cases = [
        (
            Optimiser::new(AMSGrad::new(0.1)),
            "the rules of AMSGrad with a counterpart in torch are none, expected exactly one of Adam",
        ),
        (
            Optimiser::new(OptimiserChain::new((Adam::new(0.1), Momentum::new(1.0)))),
            "with a counterpart in torch are Adam and Momentum",
        ),
        (
            Optimiser::new(decayed(false)),
            "not in proportion to the learning rate",
        ),
        (
            uncorrected.clone(),
            "parameter \"x\": torch has no counterpart of moments without bias corrections",
        ),
        (
            Optimiser::new(decoupled().corrected(1.0)),
            "not in proportion to the learning rate",
        ),
        (
            Optimiser::new(OptimiserChain::new((Adam::new(0.1), WeightDecay::new(0.1)))),
            "a WeightDecay after the rule",
        ),
        (
            Optimiser::new(OptimiserChain::new((
                WeightDecay::new(0.1),
                Scale::new(-1.0),
                Adam::new(0.1),
            ))),
            "a WeightDecay before a Scale, a clip or another rule",
        ),
        (
            Optimiser::new(OptimiserChain::new((
                WeightDecay::new(0.1),
                AccumGrad {
                    average: Average::Sum,
                    ..AccumGrad::new(2)
                },
                Adam::new(0.1),
            ))),
            "a WeightDecay before a Scale, a clip or another rule",
        ),
        (
            Optimiser::new(OptimiserChain::new((
                WeightDecay::new(0.1),
                ClipGlobalNorm::new(1.0),
                Adam::new(0.1),
            ))),
            "a WeightDecay before a Scale, a clip or another rule",
        ),
        (
            Optimiser::new(OptimiserChain::new((WeightDecay::new(0.1), decayed(true)))),
            "a decay in the gradient together with a decoupled decay",
        ),
        (
            Optimiser::new(DecoupledDecay::new(0.1, Momentum::new(0.1))),
            "this weight decay in SGD",
        ),
        (Optimiser::new(decoupled().cautious()), "a cautious weight decay"),
        (
            Optimiser::new(Momentum::new(0.0)),
            "a velocity that contains a learning rate of 0",
        ),
    ];
    for (optimiser, words) in &cases {
        refused(&state(optimiser), words);
    }
    // Nor is torch's state taken over by such a rule.
    let torch = folder.path().join("torch");
    state(&Optimiser::new(AdamW::new(0.1))).save_torch(&torch)?;
    let error = TorchState::open(&torch)
        .and_then(|torch| torch.taking_over_fields().restore(&mut state(&uncorrected)));
    says(
        &error.expect_err("other steps"),
        &["moments without bias corrections"],
    );
    let mixed = Vars::from(
        [("a", &model["x"]), ("b", &var(&constant(1.0, 2, DType::F32)))]
            .map(|(name, x)| (name.to_string(), x.clone())),
    );
    let choose = |path: &str, _: Parameter<'_>| -> Option<Optimiser> {
        Some(if path == "a" {
            Optimiser::new(Adam::new(0.1))
        } else {
            Optimiser::new(Momentum::new(0.1))
        })
    };
    let mixed = optimisers::setup_with(&mixed, choose)?;
    refused(
        &mixed,
        "parameter \"b\": its optimiser in torch would be SGD, expected Adam, as for \"a\"",
    );
    state(&Optimiser::new(OptimiserChain::new((
        AccumGrad::new(2),
        decoupled(),
    ))))
    .save_torch(&path)?;
    Ok(())
}
