//! What `audit` says of a model and a loss.

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{BatchNormConfig, ModuleT, VarBuilder, VarMap, batch_norm, layer_norm, linear};
use optimisers::{AdamW, Audit, ErrorKind, Model, Reach, Visitor, audit, setup, update};

use crate::training::cuts::listed;
use support::common::{Vars, is_kind, model, random, values};

const CPU: &Device = &Device::Cpu;

fn ones(length: usize) -> Tensor {
    Tensor::ones(length, DType::F32, CPU).expect("ones")
}

fn reaches(audit: &Audit) -> Vec<Reach> {
    audit.variables().iter().map(|variable| variable.reach).collect()
}

#[test]
fn every_kind_of_gradient_is_told() {
    let model = model(&[ones(4), ones(4), ones(4), ones(4), ones(0)]);
    let weights = Tensor::new(&[3f32, 0.0, -4.0, 0.0], CPU).expect("a tensor");
    let poison = Tensor::new(&[f32::NAN, 1.0, f32::INFINITY, f32::NEG_INFINITY], CPU).expect("a tensor");
    let zeros = weights.zeros_like().expect("zeros");
    let terms = [("0", &weights), ("1", &zeros), ("2", &poison)]
        .map(|(path, weights)| model[path].mul(weights).expect("a term"));
    let empty = model["4"].sum_all().expect("a sum");
    let loss = Tensor::cat(&terms, 0).and_then(|x| x.sum_all()? + empty).expect("a loss");
    let before: Vec<_> = model.values().map(|var| values(var)).collect();
    let found = audit(&model, &loss).expect("an audit");
    let gradient = |norm| Reach::Gradient { norm };
    assert_eq!(
        reaches(&found),
        [gradient(5.0), Reach::Zero, Reach::NonFinite { count: 3 }, Reach::Unreached, gradient(0.0)]
    );
    assert_eq!(found.unreached().collect::<Vec<_>>(), ["3"]);
    assert_eq!(found.variables()[0].shape, [4]);
    assert_eq!(found.variables()[0].dtype, DType::F32);
    assert_eq!(model.values().map(|var| values(var)).collect::<Vec<_>>(), before);
    // The graph is still whole.
    assert!(loss.backward().expect("gradients").get(&model["0"]).is_some());
}

/// Squares of these are 0 and infinite in f64.
#[test]
fn norms_of_very_small_and_very_large_gradients_are_right() {
    for size in [1e-200f64, 1e200] {
        let x = Var::zeros(2, DType::F64, CPU).expect("a variable");
        let loss = x
            .mul(&Tensor::new(&[3.0 * size, 4.0 * size], CPU).expect("a tensor"))
            .and_then(|x| x.sum_all())
            .expect("a loss");
        let [Reach::Gradient { norm }] = reaches(&audit(&x, &loss).expect("an audit"))[..] else {
            panic!("a gradient")
        };
        assert!((norm / (5.0 * size) - 1.0).abs() < 1e-12, "{norm}");
    }
}

#[test]
fn the_table_has_a_line_for_each_variable_and_names_what_cuts() {
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::BF16, CPU);
    let first = linear(4, 8, builder.pp("first")).expect("a layer");
    let norm = layer_norm(8, 1e-5, builder.pp("norm")).expect("a norm");
    let last = linear(8, 1, builder.pp("last")).expect("a layer");
    let x = random(1, &[2, 4], DType::BF16, CPU);
    let output = first.forward(&x).and_then(|x| last.forward(&norm.forward(&x)?)).expect("an output");
    let text = audit(&variables, &output.sum_all().expect("a loss")).expect("an audit").to_string();
    let lines: Vec<&str> = text.lines().collect();
    let words = |line: &str| line.split_whitespace().map(str::to_string).collect::<Vec<_>>();
    assert_eq!(words(lines[0]), ["variable", "shape", "dtype", "gradient"]);
    assert_eq!(words(lines[1]), ["first.bias", "[8]", "BF16", "none"]);
    assert_eq!(words(lines[2]), ["first.weight", "[8,", "4]", "BF16", "none"]);
    assert_eq!(words(lines[3]), ["last.bias", "[1]", "BF16", "norm", "2.000e0"]);
    assert_eq!(lines[1].find("none"), lines[6].find("none"), "columns:\n{text}");
    assert_eq!(
        lines[7],
        "The loss does not reach 4 of 6 variables. If it should depend on them, something cuts the graph."
    );
    names_what_cuts(lines[8]);
    assert_eq!(lines.len(), 9);

    let whole =
        audit(&variables, &first.forward(&x).and_then(|x| last.forward(&x)?.sum_all()).expect("a loss"))
            .expect("an audit");
    assert_eq!(whole.unreached().collect::<Vec<_>>(), ["norm.bias", "norm.weight"]);
    assert!(
        !audit(&vec![first, last], &output.sum_all().expect("a loss"))
            .expect("an audit")
            .to_string()
            .contains("not show")
    );
}

/// candle's `VarMap` makes zeros of what has no initialiser, and `require_all` is content with the gradients.
#[test]
fn variables_with_a_gradient_of_exactly_zero_are_told() {
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, CPU);
    let layer = linear(4, 8, builder.pp("layer")).expect("a layer");
    let scale = builder.get(8, "norm.scale").expect("a variable");
    let loss = layer
        .forward(&random(1, &[2, 4], DType::F32, CPU))
        .and_then(|x| x.broadcast_mul(&scale)?.sum_all())
        .expect("a loss");
    let text = audit(&variables, &loss).expect("an audit").to_string();
    let last = text.lines().last().expect("a line");
    assert!(
        last.starts_with("2 of 3 variables have a gradient of exactly zero: layer.bias, layer.weight. "),
        "{text}"
    );
    assert!(last.contains("LoRA") && last.contains("`VarBuilder::get`") && !text.contains("cuts"), "{text}");

    let scale = scale.ones_like().expect("ones");
    let loss = layer
        .forward(&random(1, &[2, 4], DType::F32, CPU))
        .and_then(|x| x.broadcast_mul(&scale)?.sum_all())
        .expect("a loss");
    assert!(!audit(&layer, &loss).expect("an audit").to_string().contains("exactly zero"));
}

/// Its statistics are variables of the map, and nothing that a loss is differentiated by.
#[test]
fn of_batch_norms_statistics_no_operation_is_accused() {
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, CPU);
    let (first, norm) =
        (linear(4, 4, builder.pp("a")), batch_norm(4, BatchNormConfig::default(), builder.pp("norm")));
    let (first, norm) = (first.expect("a layer"), norm.expect("a norm"));
    let input = random(1, &[5, 4], DType::F32, CPU);
    let loss = |x: &Tensor| norm.forward_t(x, true).and_then(|x| x.powf(3.0)?.sum_all()).expect("a loss");
    let told = |loss: Tensor| {
        let text = audit(&variables, &loss).expect("an audit").to_string();
        let mut state = setup(AdamW::new(0.1), &variables).expect("a state");
        let gradients = loss.backward().expect("gradients");
        let warning =
            update(&mut state, &variables, &gradients).expect("an update").warnings.remove(0).to_string();
        state.require_all();
        let error = update(&mut state, &variables, &gradients).expect_err("a missing gradient").to_string();
        [text, warning, error]
    };
    for text in told(loss(&first.forward(&input).expect("an output"))) {
        assert!(
            text.contains("BatchNorm")
                && text.contains("with `None` for them in `setup_with`")
                && !text.contains("cut"),
            "{text}"
        );
    }
    // With another one missing, that one is named first.
    const NAMES: &str = "a.bias, a.weight, norm.running_mean, norm.running_var";
    for (text, names) in told(loss(&input)).iter().zip(["", NAMES, NAMES]) {
        assert!(!text.contains("BatchNorm") && text.contains(names), "{text}");
        names_what_cuts(text);
    }
}

/// The usual three of the list, each with what to use, and the page that has all.
#[track_caller]
pub(crate) fn names_what_cuts(text: &str) {
    let usual = [
        ("LayerNorm::forward", "ops::layer_norm_slow"),
        ("RmsNorm::forward", "RmsNorm::forward_diff"),
        ("ops::softmax_last_dim", "ops::softmax"),
    ];
    for (operation, instead) in usual {
        assert!(text.contains(&format!("`{operation}` (use `{instead}`)")), "{text}");
        assert!(
            listed()
                .iter()
                .any(|(cuts, replacement)| cuts.contains(operation) && replacement.contains(instead)),
            "{operation}"
        );
    }
    assert!(
        text.contains("`optimisers::guide::cuts`") && text.matches("(use ").count() == 3 && text.len() < 1000,
        "{text}"
    );
}

/// A field that was forgotten in `model!`.
struct Part<'m>(&'m Vars);

impl Model for Part<'_> {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        visitor.child("shown", &self.0["0"]);
        visitor.child("again", &self.0["0"]);
    }
}

#[test]
fn variables_that_the_model_does_not_show_are_told() {
    let model = model(&[ones(3), random(1, &[2, 3], DType::F32, CPU)]);
    let loss = model["0"].broadcast_mul(&model["1"]).and_then(|x| x.sum_all()).expect("a loss");
    let found = audit(&Part(&model), &loss).expect("an audit");
    assert_eq!(found.outside(), [(vec![2, 3], optimisers::DType::F32)]);
    assert_eq!(found.variables()[0].paths, ["again", "shown"]);
    let text = found.to_string();
    assert!(text.contains("again = shown") && text.contains("does not show: [2, 3] of F32"), "{text}");
    assert_eq!(audit(&model, &loss).expect("an audit").outside(), []);
}

#[test]
fn what_cannot_be_audited_is_an_error() {
    let x = Var::ones(2, DType::F32, CPU).expect("a variable");
    let loss = x.sum_all().expect("a loss");
    let error = audit(&Vec::<Var>::new(), &loss).expect_err("no variables");
    is_kind(&error, ErrorKind::Model, &["no trainable floating-point variable"]);
    let kernel = Tensor::ones((1, 1, 2), DType::F32, CPU).expect("a kernel");
    let loss = x
        .reshape((1, 1, 2))
        .and_then(|x| x.conv_transpose1d(&kernel, 0, 0, 1, 1, 1)?.sum_all())
        .expect("a loss");
    let error = audit(&x, &loss).expect_err("no backward pass");
    assert!(error.to_string().contains("conv-transpose1d"), "{error}");
    // A loss that depends on nothing.
    let found = audit(&x, &ones(1).sum_all().expect("a sum")).expect("an audit");
    assert_eq!((reaches(&found), found.outside().len()), (vec![Reach::Unreached], 0));
}
