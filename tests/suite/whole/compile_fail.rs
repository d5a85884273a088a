//! What must not compile, and what the compiler says: an optimiser where a gradient rule belongs, what is no
//! model, what are no gradients, slots without a length that loops can trust. The compiler's message says
//! what to write instead.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

const NOT_A_RULE: &str =
    "does not turn a gradient into a gradient, so it cannot stand in a chain or inside `MixedPrecision`";
const REMEDY: &str = "`MixedPrecision` decides how the parameter is stored and goes outermost: write \
                      `MixedPrecision::new(F32, OptimiserChain::new((";

/// The libraries of this name that cargo has built, the newest first.
fn built(directory: &Path, library: &str) -> Vec<PathBuf> {
    let prefix = format!("lib{library}-");
    let files =
        std::fs::read_dir(directory).expect("the directory of this test").flatten().map(|entry| entry.path());
    let matching = files.filter(|path| {
        path.extension().is_some_and(|extension| extension == "rlib")
            && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
    });
    let mut matching: Vec<PathBuf> = matching.collect();
    let modified =
        |path: &PathBuf| path.metadata().and_then(|data| data.modified()).expect("a modification time");
    matching.sort_by_key(|path| std::cmp::Reverse(modified(path)));
    assert!(!matching.is_empty(), "no {prefix}*.rlib in {}", directory.display());
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
        let compiles = |builds: &Builds, case| compile_with(builds, case).status.success();
        let with_candle =
            optimisers.iter().find(|optimisers| compiles(&pair(optimisers, &candle[0]), "with_candle"));
        let optimisers = with_candle.unwrap_or(&optimisers[0]);
        let fits =
            candle.iter().map(|candle| pair(optimisers, candle)).find(|builds| compiles(builds, "control"));
        fits.unwrap_or_else(|| pair(optimisers, &candle[0]))
    }
}

fn compile(case: &str) -> Output {
    static BUILDS: LazyLock<Builds> = LazyLock::new(Builds::newest);
    compile_with(&BUILDS, case)
}

fn libraries() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    test.parent().expect("a directory").to_path_buf()
}

fn compile_with(Builds { optimisers, candle }: &Builds, case: &str) -> Output {
    let libraries = libraries();
    let out = std::env::temp_dir().join(format!(
        "optimisers-{case}-{:?}-{}",
        std::thread::current().id(),
        std::process::id()
    ));
    let output = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--edition", "2024", "--crate-type", "lib", "--emit=metadata", "-o"])
        .arg(&out)
        .arg("-L")
        .arg(format!("dependency={}", libraries.display()))
        .arg("--extern")
        .arg(format!("optimisers={}", optimisers.display()))
        .arg("--extern")
        .arg(format!("candle_core={}", candle.display()))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("compile_fail").join(format!("{case}.rs")))
        .output()
        .expect("rustc runs");
    // Only the control leaves a file.
    let _ = std::fs::remove_file(out);
    output
}

#[test]
fn the_pieces_compile_in_their_places() {
    let output = compile("control");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Asserts that a case does not compile. The result is what the compiler says.
fn refused(case: &str, sentences: &[&str]) -> String {
    let output = compile(case);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{case} compiles");
    for sentence in sentences {
        assert!(message.contains(sentence), "{case}: no {sentence:?} in\n{message}");
    }
    message
}

#[test]
fn the_compiler_says_what_to_write() {
    let cases: [(&str, &[&str]); 7] = [
        ("mixed_in_chain", &["`MixedPrecision<Adam>` does not", NOT_A_RULE, REMEDY]),
        ("mixed_in_mixed", &["`MixedPrecision<Adam>` does not", NOT_A_RULE, REMEDY]),
        ("optimiser_in_chain", &["`Optimiser` does not", NOT_A_RULE, REMEDY]),
        (
            "tuple_of_rules",
            &[
                "`(ClipGrad, Adam)` is not an optimiser",
                "are a chain: `OptimiserChain::new((ClipGrad::new(1.0), ",
            ],
        ),
        (
            "not_a_model",
            &[
                "`Net` does not show its tensors",
                "not a model",
                "`optimisers::model!(Net { hidden, output });`",
            ],
        ),
        ("not_gradients", &["Tensor` is no collection of gradients", "not gradients", "`loss.backward()?`"]),
        (
            "not_a_rule",
            &["String` is not an optimiser", "expected a rule, a chain of rules or `MixedPrecision`"],
        ),
    ];
    for (case, sentences) in cases {
        let message = refused(case, sentences);
        assert!(!message.contains("Elementwise"), "{case} sends the reader astray:\n{message}");
    }
}

#[test]
fn the_number_of_slots_is_known_when_a_rule_is_compiled() {
    refused("slots_without_a_length", &["E0277", "Array<T>` is not satisfied"]);
    refused(
        "slots_of_two_lengths",
        &["E0308", "expected an array with a size of 2, found one with a size of 1"],
    );
    refused("another_array", &["E0603", "trait `Array` is private"]);
    refused("another_value", &["E0277", "Sealed` is not satisfied"]);
}

/// It would not be trained, and nothing would say so.
#[test]
fn a_field_that_the_model_forgets_does_not_compile() {
    let message = refused(
        "forgotten_field",
        &["E0027", "pattern does not mention field `forgotten`", "missing field `head`"],
    );
    assert!(message.contains("model!(Net { hidden, .. });"), "no remedy in\n{message}");
}

/// A result is seen where its type says so, behind `?` as well, or the function.
#[test]
fn the_compiler_sees_results_that_are_dropped() {
    let types =
        ["Update", "Selection", "Schedule", "Checkpoint", "Setup", "StateTree", "AdamW", "ScaledLoss"];
    let functions = ["Accumulator::take", "Value::sqrt"];
    let message = refused("dropped_results", &[]);
    for name in types.into_iter().chain(functions) {
        assert!(message.contains(&format!("{name}` that must be used")), "no {name} in\n{message}");
    }
}

/// An update between an ascent and its restore, and one while averages are in the model.
#[test]
fn a_state_is_lent_while_the_model_is_away() {
    refused("update_while_climbed", &["E0499", "cannot borrow `*state` as mutable more than once at a time"]);
    refused(
        "update_with_averages",
        &["E0500", "closure requires unique access to `*state` but it is already borrowed"],
    );
}
