//! What must not compile, and what the compiler says: an optimiser where a gradient rule belongs, what is no
//! model, what are no gradients, slots without a length that loops can trust. The compiler's first message
//! says what to write instead.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

const NOT_A_RULE: &str =
    "does not turn a gradient into a gradient, so it cannot stand in a chain or inside `MixedPrecision`";
const MIXED: &str = "`MixedPrecision<Adam>` does not turn a gradient into a gradient";
const NOT_A_TUPLE: &str = "is not a tuple of up to 8 rules";

const CHAIN: &str = "`OptimiserChain::new((a, b))`";
const MASTERS: &str = "`MixedPrecision::new(F32, OptimiserChain::new((a, b)))`";
const IN_ORDER: &str = "`setup(Adam::new(1e-3), &model)`";
const A_STRUCT: &str = "`optimisers::model!(Net { hidden, output });`, with `..` for fields without tensors";
const GRADIENTS: &str = "`update(&mut state, &model, &loss.backward()?)`";

/// The libraries of this name that cargo has built, the newest first.
fn built(directory: &Path, library: &str) -> Vec<PathBuf> {
    let prefix = format!("lib{library}-");
    let files = std::fs::read_dir(directory)
        .expect("the directory of this test")
        .flatten()
        .map(|entry| entry.path());
    let matching = files.filter(|path| {
        path.extension().is_some_and(|extension| extension == "rlib")
            && path
                .file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
    });
    let mut matching: Vec<PathBuf> = matching.collect();
    let modified = |path: &PathBuf| {
        path.metadata()
            .and_then(|data| data.modified())
            .expect("a modification time")
    };
    matching.sort_by_key(|path| std::cmp::Reverse(modified(path)));
    assert!(
        !matching.is_empty(),
        "no {prefix}*.rlib in {}",
        directory.display()
    );
    matching
}

/// The builds of this crate and of candle that a case is compiled against.
struct Builds {
    optimisers: PathBuf,
    candle: PathBuf,
}

impl Builds {
    /// The newest of this crate that has candle, and that of candle which goes with it: there is one for each
    /// set of features.
    fn newest() -> Self {
        let [optimisers, candle] = ["optimisers", "candle_core"].map(|library| built(&libraries(), library));
        let pair = |optimisers: &PathBuf, candle: &PathBuf| Builds {
            optimisers: optimisers.clone(),
            candle: candle.clone(),
        };
        let compiles = |builds: &Builds, case| compile_with(builds, &program(case)).status.success();
        let with_candle = optimisers
            .iter()
            .find(|optimisers| compiles(&pair(optimisers, &candle[0]), "with_candle"));
        let optimisers = with_candle.unwrap_or(&optimisers[0]);
        let fits = candle
            .iter()
            .map(|candle| pair(optimisers, candle))
            .find(|builds| compiles(builds, "control"));
        fits.unwrap_or_else(|| pair(optimisers, &candle[0]))
    }
}

fn compile(program: &Path) -> Output {
    static BUILDS: LazyLock<Builds> = LazyLock::new(Builds::newest);
    compile_with(&BUILDS, program)
}

fn program(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("compile_fail")
        .join(format!("{case}.rs"))
}

fn libraries() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    test.parent().expect("a directory").to_path_buf()
}

fn compile_with(Builds { optimisers, candle }: &Builds, program: &Path) -> Output {
    let libraries = libraries();
    let folder = tempfile::tempdir().expect("a temporary folder");
    Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args([
            "--edition",
            "2024",
            "--crate-type",
            "lib",
            "--emit=metadata",
            "--out-dir",
        ])
        .arg(folder.path())
        .arg("-L")
        .arg(format!("dependency={}", libraries.display()))
        .arg("--extern")
        .arg(format!("optimisers={}", optimisers.display()))
        .arg("--extern")
        .arg(format!("candle_core={}", candle.display()))
        .arg(program)
        .output()
        .expect("rustc runs")
}

#[test]
fn the_pieces_compile_in_their_places() {
    let output = compile(&program("control"));
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Asserts that a case does not compile. The result is what the compiler says.
fn refused(case: &str, sentences: &[&str]) -> String {
    let output = compile(&program(case));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{case} compiles");
    for sentence in sentences {
        assert!(
            message.contains(sentence),
            "{case}: no {sentence:?} in\n{message}"
        );
    }
    message
}

/// The first error of a line in a program: what it is, where, and what its place is labelled with.
fn first_error(line: &str) -> String {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = folder.path().join("mistake.rs");
    let source = include_str!("../../compile_fail/a_line.rs").replace("// The line", &format!("{line};"));
    std::fs::write(&program, source).expect("a program");
    let output = compile(&program);
    let message = String::from_utf8_lossy(&output.stderr);
    let first = message.split("\n\n").find(|part| part.starts_with("error"));
    first
        .unwrap_or_else(|| panic!("{line} compiles: {message}"))
        .to_string()
}

/// A new user reads the first error, and of this what stands at the line.
#[test]
fn the_compiler_says_what_to_write() {
    let cases = [
        (
            "OptimiserChain::new(ClipGrad::new(1.0), Adam::new(1e-3))",
            "`ClipGrad` is not a tuple",
            CHAIN,
        ),
        (
            "OptimiserChain::new(ClipGrad::new(1.0), Adam::new(1e-3), Adam::new(1e-3))",
            NOT_A_TUPLE,
            CHAIN,
        ),
        (
            "OptimiserChain::new(Adam::new(1e-3))",
            NOT_A_TUPLE,
            "or `((a,))` for one rule",
        ),
        ("OptimiserChain::new(vec![Adam::new(1e-3)])", NOT_A_TUPLE, CHAIN),
        (
            "OptimiserChain::new((Adam::new(1e-3), MixedPrecision::new(F32, Adam::new(1e-3))))",
            MIXED,
            MASTERS,
        ),
        (
            "OptimiserChain::new((ClipGrad::new(1.0), Optimiser::new(Adam::new(1e-3))))",
            NOT_A_RULE,
            MASTERS,
        ),
        (
            "MixedPrecision::new(F64, MixedPrecision::new(F32, Adam::new(1e-3)))",
            MIXED,
            MASTERS,
        ),
        (
            "MixedPrecision::new(F32, (ClipGrad::new(1.0), Adam::new(1e-3)))",
            NOT_A_RULE,
            MASTERS,
        ),
        (
            "MixedPrecision::new(Adam::new(1e-3), F32)",
            "`Adam` is no dtype",
            "`MixedPrecision::new(F32, rule)`",
        ),
        (
            "setup(&model, Adam::new(1e-3))",
            "`&Var` is not an optimiser",
            IN_ORDER,
        ),
        (
            "setup((ClipGrad::new(1.0), Adam::new(1e-3)), &model)",
            "`(ClipGrad, Adam)` is not an optimiser",
            CHAIN,
        ),
        (
            "setup(vec![Adam::new(1e-3)], &model)",
            "`Vec<Adam>` is not an optimiser",
            CHAIN,
        ),
        (
            "setup(String::from(\"Adam\"), &model)",
            "String` is not an optimiser",
            IN_ORDER,
        ),
        (
            "setup(Adam::new(1e-3), &net)",
            "`Net` does not show its tensors",
            A_STRUCT,
        ),
        (
            "model!(Net { hidden, units })",
            "`usize` does not show its tensors",
            A_STRUCT,
        ),
        (
            "update(&mut state, &model, &loss.backward())",
            "GradStore, candle_core::Error>` is no",
            GRADIENTS,
        ),
        (
            "update(&mut state, &model, &loss)",
            "`candle_core::Tensor` is no collection of gradients",
            GRADIENTS,
        ),
    ];
    for (line, message, remedy) in cases {
        let error = first_error(line);
        let label = error.split(" = ").next().unwrap_or_default();
        assert!(error.contains(message), "{line}: no {message:?} in\n{error}");
        assert!(
            label.contains(remedy),
            "{line}: no {remedy:?} at the line in\n{error}"
        );
        // The first is the trait of most rules, and the second would be one rule of several.
        for astray in ["Elementwise", "unary tuple"] {
            assert!(
                !error.contains(astray),
                "{line}: {astray} sends the reader astray in\n{error}"
            );
        }
    }
}

/// Where a signature has types and references, the compiler finds the line itself. A note has the order.
#[test]
fn the_first_error_proposes_the_line() {
    let cases = [
        ("update(state, &model, &loss.backward()?)", "update(&mut state, "),
        (
            "update(&mut state, model, &loss.backward()?)",
            "update(&mut state, &model, ",
        ),
        (
            "update(&mut state, &model, loss.backward()?)",
            "&model, &loss.backward()?)",
        ),
        (
            "update(&mut state, &loss.backward()?, &model)",
            "`update(&mut state, &variables, &grads)`",
        ),
        ("setup(Adam::new(1e-3), model)", "setup(Adam::new(1e-3), &model)"),
        ("AdamW::new(1)", "AdamW::new(1.0)"),
    ];
    for (line, proposed) in cases {
        let error = first_error(line);
        assert!(error.contains(proposed), "{line}: no {proposed:?} in\n{error}");
    }
}

#[test]
fn the_number_of_slots_is_known_when_a_rule_is_compiled() {
    refused("slots_without_a_length", &["E0277", "Array<T>` is not satisfied"]);
    refused(
        "slots_of_two_lengths",
        &[
            "E0308",
            "expected an array with a size of 2, found one with a size of 1",
        ],
    );
    refused("another_array", &["E0603", "trait `Array` is private"]);
    refused("another_value", &["E0277", "Sealed` is not satisfied"]);
}

/// It would not be trained, and nothing would say so.
#[test]
fn a_field_that_the_model_forgets_does_not_compile() {
    let message = refused(
        "forgotten_field",
        &[
            "E0027",
            "pattern does not mention field `forgotten`",
            "missing field `head`",
        ],
    );
    assert!(
        message.contains("model!(Net { hidden, .. });"),
        "no remedy in\n{message}"
    );
}

/// A result is seen where its type says so, behind `?` as well, or the function.
#[test]
fn the_compiler_sees_results_that_are_dropped() {
    let types = [
        "Update",
        "Selection",
        "Schedule",
        "Checkpoint",
        "Setup",
        "StateTree",
        "AdamW",
        "ScaledLoss",
    ];
    let functions = ["Accumulator::take", "Value::sqrt"];
    let message = refused("dropped_results", &[]);
    for name in types.into_iter().chain(functions) {
        assert!(
            message.contains(&format!("{name}` that must be used")),
            "no {name} in\n{message}"
        );
    }
}

/// A scaled loss is no tensor, and its gradients are no `GradStore`: `backward_step` and `step` of an
/// optimiser would not know the scale.
#[test]
fn t59_a_scale_is_not_dropped_by_a_coercion() {
    refused(
        "scaled_loss",
        &[
            "expected `&Tensor`, found `&ScaledLoss`",
            "expected `&GradStore`, found `&ScaledGradients<GradStore>`",
        ],
    );
}

/// An update between an ascent and its restore, and one while averages are in the model.
#[test]
fn a_state_is_lent_while_the_model_is_away() {
    refused(
        "update_while_climbed",
        &[
            "E0499",
            "cannot borrow `*state` as mutable more than once at a time",
        ],
    );
    refused(
        "update_with_averages",
        &[
            "E0500",
            "closure requires unique access to `*state` but it is already borrowed",
        ],
    );
}
