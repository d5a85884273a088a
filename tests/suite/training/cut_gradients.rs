//! candle's operations without a gradient, each as its users have reported it, by the number of the report.
//!
//! candle returns no gradient and no error; the log, the outcome, `require_all` and `audit` name the
//! parameters; what replaces the operation trains.

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::{
    LayerNorm, LayerNormConfig, Linear, RmsNorm, VarBuilder, VarMap, embedding, layer_norm, linear,
    linear_no_bias, loss::mse, ops, rms_norm, rotary_emb,
};
use optimisers::{AdamW, ErrorKind, MixedPrecision, audit, setup, update};

use support::common::{Vars, is_kind, logged, random, snapshot, values, var};

const CPU: &Device = &Device::Cpu;
const WIDTH: usize = 8;

/// Whether a loss is computed with the operation that cuts, or with what replaces it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum With {
    Cut,
    Replacement,
}

/// A model of fixed weights, from its variables.
fn built<M>(dtype: DType, build: impl FnOnce(VarBuilder<'_>) -> Result<M>) -> (Vars, M) {
    let map = VarMap::new();
    let model = build(VarBuilder::from_varmap(&map, dtype, CPU)).expect("a model");
    let variables: Vars =
        map.data().lock().expect("the map").iter().map(|(path, var)| (path.clone(), var.clone())).collect();
    for (seed, (path, var)) in variables.iter().enumerate().filter(|(_, (path, _))| !path.contains("norm")) {
        let scale = if path.ends_with("bias") { 0.1 } else { 0.4 };
        var.set(&(random(seed as u64 + 1, var.dims(), dtype, CPU) * scale).expect("weights"))
            .expect("a variable");
    }
    (variables, model)
}

fn input(shape: &[usize], dtype: DType) -> Tensor {
    random(91, shape, dtype, CPU)
}

/// A loss that depends on all of an output, in F32.
fn loss(output: &Tensor) -> Result<Tensor> {
    mse(&output.to_dtype(DType::F32)?, &random(92, output.dims(), DType::F32, CPU))
}

/// What each of the four says about the variables of `cut`, and that the replacement trains all.
fn check(variables: &Vars, cut: &[&str], loss: impl Fn(With) -> Result<Tensor>) {
    let number = |with| loss(with).and_then(|loss| loss.to_scalar::<f32>()).expect("a loss");
    assert!(
        (number(With::Cut) - number(With::Replacement)).abs() < 1e-3 * number(With::Cut),
        "the replacement computes the same"
    );

    let cut_loss = loss(With::Cut).expect("a loss");
    let gradients = cut_loss.backward().expect("no error from candle");
    let without: Vec<&String> =
        variables.iter().filter(|(_, var)| gradients.get(var).is_none()).map(|(path, _)| path).collect();
    assert_eq!(without, cut);

    let mut state = setup(MixedPrecision::new(DType::F32, AdamW::new(1e-2)), variables).expect("a state");
    let (outcomes, lines) =
        logged(|| [(); 3].map(|()| update(&mut state, variables, &gradients).expect("an update")));
    for outcome in outcomes {
        assert_eq!(outcome.without_gradient.iter().collect::<Vec<_>>(), cut);
        assert_eq!(
            (outcome.applied, outcome.without_gradient.len()),
            (variables.len() - cut.len(), cut.len())
        );
    }
    let [line] = &lines[..] else { panic!("one warning, got {lines:?}") };
    for words in [format!("{} of {} parameters", cut.len(), variables.len()), cut.join(", ")] {
        assert!(line.contains(&words), "no {words:?} in {line}");
    }
    for path in cut {
        let leaf = state.leaf(path).expect("a leaf");
        assert_eq!(
            (leaf.calls_without_gradient(), leaf.has_had_gradient(), leaf.steps()),
            (3, false, 0),
            "{path}"
        );
    }

    state.require_all();
    let before = snapshot(variables, &state);
    let error = update(&mut state, variables, &gradients).expect_err("parameters without a gradient");
    assert_eq!((error.kind(), error.got()), (ErrorKind::NoGradient, Some(&*cut.join(", "))), "{error}");
    assert!(
        error.to_string().starts_with(&format!(
            "{} of {} parameters have no gradient",
            cut.len(),
            variables.len()
        )),
        "{error}"
    );
    assert_eq!(snapshot(variables, &state), before);
    assert!(cut.iter().all(|path| state.leaf(path).is_some_and(|leaf| leaf.calls_without_gradient() == 3)));

    let found = audit(variables, &cut_loss).expect("an audit");
    assert_eq!(found.unreached().collect::<Vec<_>>(), cut, "{found}");

    let start: Vec<Vec<f64>> = variables.values().map(|var| values(var)).collect();
    let first = number(With::Replacement);
    for _ in 0..150 {
        let gradients = loss(With::Replacement).and_then(|loss| loss.backward()).expect("gradients");
        let outcome = update(&mut state, variables, &gradients).expect("a step with all gradients");
        assert!(outcome.without_gradient.is_empty());
    }
    for ((path, var), start) in variables.iter().zip(start) {
        assert_ne!(values(var), start, "{path}");
        assert_eq!(state.leaf(path).map(|leaf| leaf.calls_without_gradient()), Some(0), "{path}");
    }
    let last = number(With::Replacement);
    assert!(last < 0.5 * first, "{last} after {first}");
}

fn slow_layer_norm(norm: &LayerNorm, x: &Tensor) -> Result<Tensor> {
    ops::layer_norm_slow(x, norm.weight(), norm.bias().expect("a bias"), norm.eps() as f32)
}

fn rms(norm: &RmsNorm, x: &Tensor, with: With) -> Result<Tensor> {
    match with {
        With::Cut => norm.forward(x),
        With::Replacement => norm.forward_diff(x),
    }
}

#[test]
fn candle_2168_rms_norm_of_a_contiguous_input() {
    let (variables, (first, norm, last)) = built(DType::F32, |b| {
        Ok((
            linear(WIDTH, 16, b.pp("first"))?,
            rms_norm(16, 1e-5, b.pp("norm"))?,
            linear(16, WIDTH, b.pp("last"))?,
        ))
    });
    let forward = |with| last.forward(&rms(&norm, &first.forward(&input(&[6, WIDTH], DType::F32))?, with)?);
    check(&variables, &["first.bias", "first.weight", "norm.weight"], |with| loss(&forward(with)?));
}

/// Only the layout of the input tells whether the module cuts.
#[test]
fn candle_2977_layer_norm_cuts_for_contiguous_inputs_alone() {
    let (variables, (first, norm)) = built(DType::F32, |b| {
        Ok((linear(WIDTH, 6, b.pp("first"))?, layer_norm(6, LayerNormConfig::default(), b.pp("norm"))?))
    });
    let hidden = || first.forward(&input(&[6, WIDTH], DType::F32))?.t();
    let forward = |with| match with {
        With::Cut => norm.forward(&hidden()?.contiguous()?),
        With::Replacement => norm.forward(&hidden()?),
    };
    let output = random(9, &[6, 3], DType::F32, CPU);
    // Nothing at all has a gradient, which was an error before.
    let gradients =
        forward(With::Cut).and_then(|y| loss(&y.matmul(&output)?)?.backward()).expect("no error from candle");
    let mut state = setup(AdamW::new(1e-2), &variables).expect("a state");
    let error = update(&mut state, &variables, &gradients).expect_err("no gradients");
    is_kind(&error, ErrorKind::NoGradient, &["there is no gradient for any of the 4 parameters"]);
    // A variable behind the norm has one, and hides that the others have none.
    let mut variables = variables;
    let last = var(&output);
    variables.insert("output".to_string(), last.clone());
    check(&variables, &["first.bias", "first.weight", "norm.bias", "norm.weight"], |with| {
        loss(&forward(with)?.matmul(&last)?)
    });
}

/// Two of six parameters have gradients.
#[test]
fn candle_3011_linear_layer_norm_linear() {
    let (variables, (first, norm, last)) = built(DType::F32, |b| {
        Ok((
            linear(WIDTH, 16, b.pp("linear1"))?,
            layer_norm(16, 1e-5, b.pp("layer_norm"))?,
            linear(16, WIDTH, b.pp("linear2"))?,
        ))
    });
    let forward = |with| {
        let x = first.forward(&input(&[4, WIDTH], DType::F32))?;
        last.forward(&if with == With::Cut { norm.forward(&x)? } else { slow_layer_norm(&norm, &x)? })
    };
    check(&variables, &["layer_norm.bias", "layer_norm.weight", "linear1.bias", "linear1.weight"], |with| {
        loss(&forward(with)?)
    });
}

/// Attention with one head, whose scores are taken of what `turn` makes of queries and keys.
struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
}

impl Attention {
    fn new(b: VarBuilder<'_>) -> Result<Self> {
        let layer = |name| linear_no_bias(WIDTH, WIDTH, b.pp(name));
        Ok(Attention { query: layer("query")?, key: layer("key")?, value: layer("value")? })
    }

    fn forward(
        &self,
        x: &Tensor,
        turn: impl Fn(&Tensor) -> Result<Tensor>,
        softmax: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let scores = turn(&self.query.forward(x)?)?.matmul(&turn(&self.key.forward(x)?)?.t()?)?;
        softmax(&(scores / (WIDTH as f64).sqrt())?)?.matmul(&self.value.forward(x)?)
    }
}

/// Cosines and sines of a length and half a width.
fn angles(length: usize) -> (Tensor, Tensor) {
    let angles = random(7, &[length, WIDTH / 2], DType::F32, CPU);
    (angles.cos().expect("cosines"), angles.sin().expect("sines"))
}

#[test]
fn candle_3568_rotary_embeddings_of_queries_and_keys() {
    let (variables, attention) = built(DType::F32, Attention::new);
    let (x, (cos, sin)) = (input(&[2, 5, WIDTH], DType::F32), angles(5));
    let forward = |with| {
        let turn = |x: &Tensor| {
            let x = x.unsqueeze(1)?;
            let turned = if with == With::Cut {
                rotary_emb::rope(&x, &cos, &sin)?
            } else {
                rotary_emb::rope_slow(&x, &cos, &sin)?
            };
            turned.squeeze(1)
        };
        attention.forward(&x, turn, |scores| ops::softmax(scores, D::Minus1))
    };
    check(&variables, &["key.weight", "query.weight"], |with| loss(&forward(with)?));
}

#[test]
fn candle_3569_softmax_of_attention_scores() {
    let (variables, attention) = built(DType::F32, Attention::new);
    let x = input(&[2, 5, WIDTH], DType::F32);
    let forward = |with| {
        let softmax = |scores: &Tensor| {
            if with == With::Cut { ops::softmax_last_dim(scores) } else { ops::softmax(scores, D::Minus1) }
        };
        attention.forward(&x, |x| Ok(x.clone()), softmax)
    };
    check(&variables, &["key.weight", "query.weight"], |with| loss(&forward(with)?));
}

/// A frozen base with two low-rank adaptors, each before a layer norm: the last norm leaves neither a
/// gradient, only what is behind it has one.
#[test]
fn candle_3752_adaptors_before_layer_norms() {
    let (variables, adaptors) = built(DType::F32, |b| {
        let adaptor = |name| -> Result<_> {
            Ok((
                linear_no_bias(WIDTH, 2, b.pp(name).pp("down"))?,
                linear_no_bias(2, WIDTH, b.pp(name).pp("up"))?,
            ))
        };
        Ok([adaptor("block.0")?, adaptor("block.1")?, adaptor("head")?])
    });
    let base = |seed| random(seed, &[WIDTH, WIDTH], DType::F32, CPU);
    let norm = LayerNorm::new(
        Tensor::ones(WIDTH, DType::F32, CPU).expect("ones"),
        Tensor::zeros(WIDTH, DType::F32, CPU).expect("zeros"),
        1e-5,
    );
    let normalised =
        |x: &Tensor, with| if with == With::Cut { norm.forward(x) } else { slow_layer_norm(&norm, x) };
    let forward = |with| {
        let mut x = input(&[6, WIDTH], DType::F32);
        for (seed, (down, up)) in adaptors.iter().enumerate() {
            let adapted = (x.matmul(&base(seed as u64 + 20))? + up.forward(&down.forward(&x)?)?)?;
            x = if seed < 2 { normalised(&adapted, with)? } else { adapted };
        }
        loss(&x)
    };
    let cut = ["block.0.down.weight", "block.0.up.weight", "block.1.down.weight", "block.1.up.weight"];
    check(&variables, &cut, forward);
}

/// What a new user writes: a loss that falls although two of seven parameters are trained.
#[test]
fn a_loss_falls_although_most_parameters_are_cut_off() {
    let dtype = DType::BF16;
    let (variables, (tokens, first, norm, last)) = built(dtype, |b| {
        let tokens = embedding(12, WIDTH, b.pp("embedding"))?;
        Ok((
            tokens,
            linear(WIDTH, 16, b.pp("hidden"))?,
            layer_norm(16, 1e-5, b.pp("norm"))?,
            linear(16, WIDTH, b.pp("output"))?,
        ))
    });
    let numbers = Tensor::arange(0u32, 12, CPU).expect("numbers");
    let forward = |with| {
        let x = first.forward(&tokens.forward(&numbers)?)?;
        last.forward(&if with == With::Cut { norm.forward(&x)? } else { slow_layer_norm(&norm, &x)? })
    };
    let cut = ["embedding.weight", "hidden.bias", "hidden.weight", "norm.bias", "norm.weight"];
    let start = loss(&forward(With::Cut).expect("an output"))
        .and_then(|loss| loss.to_scalar::<f32>())
        .expect("a loss");
    let mut state = setup(MixedPrecision::new(DType::F32, AdamW::new(1e-2)), &variables).expect("a state");
    for _ in 0..200 {
        let gradients = forward(With::Cut).and_then(|y| loss(&y)?.backward()).expect("gradients");
        assert_eq!(update(&mut state, &variables, &gradients).expect("an update").without_gradient, cut);
    }
    let end = loss(&forward(With::Cut).expect("an output"))
        .and_then(|loss| loss.to_scalar::<f32>())
        .expect("a loss");
    assert!(end < 0.7 * start, "{end} after {start}");
}
