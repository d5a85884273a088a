//! What a program says to the person who started it. Each case is a process of its own, which has no logger
//! unless it makes one.

use std::process::{Command, Termination};

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{Adam, StateTree, Warning, setup, update};

/// What tells a process of this test which case it is.
const CASE: &str = "OPTIMISERS_WARNINGS_CASE";

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

fn step(state: &mut StateTree, x: &Var) -> Outcome {
    update(
        state,
        x,
        &x.as_tensor().to_dtype(DType::F32)?.sum_all()?.backward()?,
    )?;
    Ok(())
}

/// Parameters in BF16 under a bare rule, in two states with two updates each.
fn bare(allow: bool) -> Outcome {
    for _ in 0..2 {
        let x = Var::ones(4, DType::BF16, &Device::Cpu)?;
        let mut state = setup(Adam::new(1e-4), &x)?;
        if allow {
            state.all().allow_low_precision();
        }
        step(&mut state, &x)?;
        step(&mut state, &x)?;
    }
    Ok(())
}

struct Nowhere;

impl log::Log for Nowhere {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, _: &log::Record) {}

    fn flush(&self) {}
}

/// README's form of `main`: the standard library reports what it returns.
fn main_that_fails() -> Outcome {
    let x = Var::ones(4, DType::F32, &Device::Cpu)?;
    let mut state = setup(Adam::new(1e-3), &x)?;
    update(
        &mut state,
        &x,
        &Tensor::ones((), DType::F32, &Device::Cpu)?.backward()?,
    )?;
    Ok(())
}

/// A case, in the process that is for it; elsewhere none.
#[test]
fn a_case() -> Outcome {
    match std::env::var(CASE).as_deref() {
        Ok("bare") => bare(false),
        Ok("allowed") => bare(true),
        Ok("silent") => {
            Warning::silence();
            bare(false)
        }
        Ok("logger") => {
            log::set_logger(&Nowhere).expect("the only logger");
            log::set_max_level(log::LevelFilter::Warn);
            bare(false)
        }
        Ok("main") => {
            let _ = main_that_fails().report();
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The lines that a case writes to standard error.
fn said(case: &str) -> Vec<String> {
    let test = std::env::current_exe().expect("the path of this test");
    let output = Command::new(test)
        .args(["--exact", "a_case", "--nocapture"])
        .env(CASE, case)
        .output()
        .expect("a process");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{case}: {text}");
    text.lines().map(str::to_string).collect()
}

#[test]
fn a_program_without_a_logger_is_told_once_for_each_state_unless_it_turns_that_off() {
    let bare = said("bare");
    let is_low = |line: &String| {
        line.starts_with("warning: without a master, 1 BF16 parameter loses every step below 2⁻⁹")
    };
    assert!(
        matches!(&bare[..], [first, second] if is_low(first) && is_low(second)),
        "{bare:?}"
    );
    for case in ["allowed", "silent", "logger"] {
        assert_eq!(said(case), [""; 0], "{case}");
    }
}

#[test]
fn a_main_that_returns_an_error_prints_its_text_with_the_remedy() {
    let lines = said("main");
    let text = "Error: there is no gradient for any of the 1 parameters; find out by `audit` whether the \
                loss depends on this model's variables";
    assert_eq!(lines[0], text, "{lines:?}");
}
