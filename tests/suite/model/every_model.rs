//! Every method that takes a model, with every kind of model.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use optimisers::config::{OptimiserConfig, Registry};
use optimisers::{
    Accumulator, AdamW, CandleOptimizer, Checkpoint, CheckpointFile, Descent, Ema, ErrorKind, Leaf,
    MixedPrecision, Model, OptimiserChain, ParameterSlices, PrecisionPolicy, Result, Sam, Segments, Setup,
    StateTree, StreamedStep, Update, Visitor, Weights, audit, broadcast, destructure, model, ranks, setup,
    setup_with, trainables, update,
};

use crate::model::models::var_map;
use crate::whole::structure::all_code;
use support::common::{Grads, Vars, tensor, values, var};

const CPU: &Device = &Device::Cpu;
const NAMES: [&str; 3] = ["running_mean", "running_var", "w"];

fn rule() -> MixedPrecision<OptimiserChain<(AdamW, Ema)>> {
    MixedPrecision::new(DType::F32, OptimiserChain::new((AdamW::new(0.1), Ema::new(0.5))))
}

fn shape(path: &str) -> &'static [usize] {
    if path.ends_with('w') { &[4, 3] } else { &[2] }
}

/// What a method is tried with: a state, and what else it takes.
struct Case {
    state: StateTree,
    grads: Grads,
    /// Variables of the same paths, of another model.
    other: Vars,
    folder: tempfile::TempDir,
}

impl Case {
    fn new(state: StateTree) -> Self {
        let of_leaf = |(leaf, seed): (&Leaf, u64)| {
            (
                leaf.path().to_string(),
                var(&tensor(seed, leaf.shape(), DType::F32)),
            )
        };
        let other: Vars = state.leaves().zip(1..).map(of_leaf).collect();
        let grads = other
            .iter()
            .map(|(path, x)| (path.clone(), x.ones_like().expect("ones")))
            .collect();
        Case {
            state,
            grads,
            other,
            folder: tempfile::tempdir().expect("a folder"),
        }
    }

    fn tensors(&self) -> BTreeMap<String, Tensor> {
        self.other
            .iter()
            .map(|(path, x)| (path.clone(), x.as_detached_tensor()))
            .collect()
    }

    /// A safetensors file with a tensor for each parameter.
    fn weights(&self) -> std::path::PathBuf {
        let file = self.folder.path().join("weights.safetensors");
        candle_core::safetensors::save(&HashMap::<String, Tensor>::from_iter(self.tensors()), &file)
            .expect("a file");
        file
    }

    /// A checkpoint of another model with the same paths, and of its state.
    fn checkpoint(&self) -> std::path::PathBuf {
        let file = self.folder.path().join("checkpoint");
        let state = setup(rule(), &self.other).expect("a state");
        Checkpoint::new(&state)
            .model(&self.other)
            .save(&file)
            .expect("a file");
        file
    }

    fn flat(&self) -> Tensor {
        destructure(&self.other).expect("a vector").0
    }

    /// The path of the matrix.
    fn matrix(&self) -> String {
        self.other
            .keys()
            .find(|path| path.ends_with('w'))
            .expect("the matrix")
            .clone()
    }

    /// Forgets the matrix, so that it can be added.
    fn without_matrix(&mut self) -> Result<String> {
        let path = self.matrix();
        self.state.remove(&path)?;
        Ok(path)
    }
}

/// What a method does with slices themselves.
#[derive(Clone, Copy, PartialEq)]
enum Slices {
    Taken,
    /// It works with candle's variables alone.
    Refused,
}

type Method = (&'static str, Slices, fn(&mut Case, &dyn Model) -> Result<()>);

fn loss() -> Tensor {
    Tensor::zeros((), DType::F32, CPU).expect("a loss")
}

/// A segment for each variable, which adds its sum.
fn segments(model: &dyn Model) -> Segments<'static, Tensor> {
    let mut tensors = Vec::new();
    model.visit(&mut Visitor::new(&mut |_, x| tensors.push(x.clone())));
    let sum = |x: Tensor| move |sum: &Tensor| sum + x.sum_all()?;
    tensors
        .into_iter()
        .fold(Segments::new(&loss()), |segments, x| segments.then(sum(x)))
}

fn push_all(grads: &Grads, step: StreamedStep<'_>) -> Result<()> {
    grads
        .iter()
        .try_for_each(|(path, gradient)| step.push(path, gradient.clone()))?;
    step.finish().map(drop)
}

/// All of them by name; names that several have stand as often.
const METHODS: &[Method] = &[
    ("setup", Slices::Taken, |_, model| setup(rule(), model).map(drop)),
    ("build", Slices::Taken, |_, model| {
        Setup::default().build(rule(), model).map(drop)
    }),
    ("setup", Slices::Taken, |_, model| config().setup(model).map(drop)),
    ("setup", Slices::Taken, |_, model| {
        Registry::default().setup(&config(), model).map(drop)
    }),
    ("setup_with", Slices::Taken, |_, model| {
        setup_with(model, |_, _| Some(rule())).map(drop)
    }),
    ("build_with", Slices::Taken, |_, model| {
        Setup::default().build_with(model, |_, _| Some(rule())).map(drop)
    }),
    ("update", Slices::Taken, |case, model| {
        update(&mut case.state, model, &case.grads).map(drop)
    }),
    ("apply", Slices::Taken, |case, model| {
        Update::new(&mut case.state).apply(model, &case.grads).map(drop)
    }),
    ("apply_owned", Slices::Taken, |case, model| {
        Update::new(&mut case.state)
            .apply_owned(model, case.grads.clone())
            .map(drop)
    }),
    ("release_windows", Slices::Taken, |case, model| {
        Update::new(&mut case.state).release_windows(model).map(drop)
    }),
    ("begin", Slices::Taken, |case, model| {
        push_all(&case.grads, Update::new(&mut case.state).begin(model)?)
    }),
    ("ascend", Slices::Taken, |case, model| {
        Sam::new(0.1)
            .ascend(Update::new(&mut case.state), model, &case.grads)?
            .restore()
    }),
    ("add", Slices::Taken, |case, model| {
        let path = case.without_matrix()?;
        assert_eq!(case.state.add(rule(), model)?, [path]);
        Ok(())
    }),
    ("add_with", Slices::Taken, |case, model| {
        let path = case.without_matrix()?;
        assert_eq!(case.state.add_with(model, |_, _| Some(rule()))?, [path]);
        Ok(())
    }),
    ("rebind", Slices::Taken, |case, model| case.state.rebind(model)),
    ("replace", Slices::Taken, |case, model| {
        let replaced = case.state.all().replace(Descent::new(0.5), model)?;
        assert!(
            case.state
                .leaves()
                .all(|leaf| leaf.optimiser().name() == "Descent")
        );
        assert_eq!(
            replaced.iter().map(|replaced| &replaced.path).collect::<Vec<_>>(),
            case.other.keys().collect::<Vec<_>>()
        );
        update(&mut case.state, model, &case.grads).map(drop)
    }),
    ("resize_rows", Slices::Taken, |case, model| {
        let (path, rows) = (case.matrix(), [0, 1, 2, 3].map(Some));
        case.state.resize_rows(&path, model, &rows).map(drop)
    }),
    ("averages", Slices::Taken, |case, model| {
        case.state.averages(model).map(drop)
    }),
    ("with_averages", Slices::Taken, |case, model| {
        case.state.with_averages(model, || Ok(()))
    }),
    ("masters", Slices::Taken, |case, model| {
        case.state.masters(model).map(drop)
    }),
    ("set_masters", Slices::Taken, |case, model| {
        let values = case.tensors();
        case.state.set_masters(model, &values)?;
        let weights = Weights::open([case.weights()])?;
        case.state.set_masters(model, &weights).map(drop)
    }),
    ("load_into", Slices::Taken, |case, model| {
        Weights::open([case.weights()])?.load_into(model).map(drop)
    }),
    ("refresh_masters", Slices::Taken, |case, model| {
        case.state.refresh_masters(model)
    }),
    ("check_masters", Slices::Taken, |case, model| {
        case.state.check_masters(model)
    }),
    ("save_masters", Slices::Taken, |case, model| {
        case.state
            .save_masters(model, case.folder.path().join("masters"))
            .map(drop)
    }),
    ("model", Slices::Taken, |case, model| {
        Checkpoint::new(&case.state)
            .model(model)
            .save(case.folder.path().join("state"))
            .map(drop)
    }),
    ("restore_with_model", Slices::Taken, |case, model| {
        let file = case.checkpoint();
        CheckpointFile::open(file)?
            .restore_with_model(&mut case.state, model)
            .map(drop)
    }),
    ("check", Slices::Taken, |_, model| {
        PrecisionPolicy::new([("*", DType::F32)])?.check(model)
    }),
    ("new", Slices::Taken, |case, model| {
        let mut sums = Accumulator::new(DType::F32, model)?;
        sums.add(&case.grads)
    }),
    ("trainables", Slices::Refused, |_, model| {
        trainables(model).map(drop)
    }),
    ("destructure", Slices::Refused, |_, model| {
        destructure(model).map(drop)
    }),
    ("assign", Slices::Refused, |case, model| {
        destructure(&case.other)?.1.assign(&case.flat(), model)
    }),
    ("train", Slices::Refused, |case, model| {
        let outcome = segments(model)
            .train(Update::new(&mut case.state), model, Tensor::sum_all)?
            .1;
        assert_eq!(outcome.applied, NAMES.len());
        Ok(())
    }),
    ("audit", Slices::Refused, |_, model| {
        audit(model, &loss()).map(drop)
    }),
    ("broadcast", Slices::Taken, |_, model| {
        broadcast(&ranks(1)[0], model)
    }),
    ("for_model", Slices::Refused, |_, model| {
        CandleOptimizer::for_model(model, rule()).map(drop)
    }),
];

fn config() -> OptimiserConfig {
    serde_json::from_str(r#"{"AdamW": {"eta": 0.1}}"#).expect("a configuration")
}

/// A method that takes a model and has no row above is not tried.
#[test]
fn the_list_has_every_method_that_takes_a_model() {
    let part = |text: &str, ends: &[char]| text.split(ends).next().unwrap_or_default().to_string();
    let code = all_code().join("\n");
    let heads = code.split("pub fn ").skip(1).map(|head| part(head, &['{', ';']));
    let mut found: Vec<String> = heads
        .filter(|head| head.contains(": Model"))
        .map(|head| part(&head, &['<', '(']))
        .collect();
    let mut listed: Vec<&str> = METHODS.iter().map(|(name, ..)| *name).collect();
    found.sort();
    listed.sort_unstable();
    assert_eq!(found, listed);
}

struct Net<M> {
    running_mean: M,
    running_var: M,
    w: M,
}
model!([M: Model] Net<M> { running_mean, running_var, w });

/// Shows what it has without the macro.
struct Own(Vars);

impl Model for Own {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        for (name, part) in &self.0 {
            visitor.child(name, part);
        }
    }
}

fn parameter(name: &str) -> Var {
    var(&Tensor::ones(shape(name), DType::F32, CPU).expect("ones"))
}

fn variables() -> Vars {
    NAMES.map(|name| (name.to_string(), parameter(name))).into()
}

/// Every kind of model of variables, each with its own.
fn models() -> Vec<(&'static str, Box<dyn Model>)> {
    let net = || {
        let [running_mean, running_var, w] = NAMES.map(parameter);
        Net {
            running_mean,
            running_var,
            w,
        }
    };
    let tensors = || {
        let [running_mean, running_var, w] = NAMES.map(|name| parameter(name).as_tensor().clone());
        Net {
            running_mean,
            running_var,
            w,
        }
    };
    vec![
        ("a map", Box::new(variables())),
        (
            "a hash map",
            Box::new(HashMap::<String, Var>::from_iter(variables())),
        ),
        ("a VarMap", Box::new(var_map(variables()))),
        ("a struct", Box::new(net())),
        ("a struct of tensors", Box::new(tensors())),
        ("an own model", Box::new(Own(variables()))),
        ("an option", Box::new(Some(net()))),
        ("pointers", Box::new(Rc::new(Arc::new(Box::new(net()))))),
        ("a tuple", Box::new((VarMap::new(), net()))),
        ("a vector", Box::new(vec![net()])),
        ("an array", Box::new([net()])),
        ("a model in a map", Box::new(BTreeMap::from([("net", net())]))),
    ]
}

#[test]
fn every_method_takes_every_model_of_variables() {
    for (row, (name, _, method)) in METHODS.iter().enumerate() {
        for (kind, model) in models() {
            let mut case = Case::new(setup(rule(), &model).expect("a state"));
            let done = method(&mut case, &model);
            assert!(
                done.is_ok(),
                "{name} (row {row}) of {kind}: {}",
                done.err().map_or(String::new(), |error| error.to_string())
            );
        }
    }
}

/// Vectors for the parameters.
fn vectors() -> [Vec<f32>; 3] {
    NAMES.map(|name| vec![1.0; shape(name).iter().product()])
}

fn slices(vectors: &mut [Vec<f32>; 3]) -> ParameterSlices<'_> {
    let mut slices = ParameterSlices::new();
    for (name, values) in NAMES.into_iter().zip(vectors) {
        slices = slices.with(name, shape(name), values).expect("a parameter");
    }
    slices
}

fn assert_needs_variables(done: Result<()>, what: &str) {
    let error = done.expect_err(what);
    assert_eq!(
        (error.kind(), error.path().is_some()),
        (ErrorKind::Unsupported, true),
        "{what}: {error}"
    );
    assert!(
        error.to_string().contains("this call needs candle variables"),
        "{what}: {error}"
    );
}

/// Slices are a model as any, but for what is about variables.
#[test]
fn methods_take_slices() {
    for (row, &(name, takes, method)) in METHODS.iter().enumerate() {
        let what = format!("{name} (row {row})");
        let [mut memory, mut optional] = [(); 2].map(|()| vectors());
        let case = || Case::new(setup(rule(), &slices(&mut vectors())).expect("a state"));
        let try_with = |model: &dyn Model, what: &str| match takes {
            Slices::Taken => method(&mut case(), model).unwrap_or_else(|error| panic!("{what}: {error}")),
            Slices::Refused => assert_needs_variables(method(&mut case(), model), what),
        };
        try_with(&slices(&mut memory), &what);
        try_with(
            &Some(Box::new(slices(&mut optional))),
            &format!("{what} of `Some`"),
        );
    }
}

struct Forwards<'a>(ParameterSlices<'a>);

impl Model for Forwards<'_> {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        self.0.visit(visitor);
    }
}

struct Inner<'a> {
    inner: ParameterSlices<'a>,
    other: Var,
}
model!(['a] Inner<'a> { other, inner });

/// Slices stand inside of another model as any tensor does, beside variables.
#[test]
fn methods_take_slices_inside_of_another_model() {
    for (row, &(name, takes, method)) in METHODS.iter().enumerate() {
        let mut memory: [_; 6] = [(); 6].map(|()| vectors());
        let [first, second, third, fourth, fifth, sixth] = &mut memory;
        let models: [(&str, Box<dyn Model + '_>); 6] = [
            ("0.w", Box::new((slices(first), VarMap::new()))),
            ("1.w", Box::new(vec![None, Some(slices(second))])),
            (
                "inner.w",
                Box::new(Inner {
                    inner: slices(third),
                    other: parameter("w"),
                }),
            ),
            ("w", Box::new(Forwards(slices(fourth)))),
            ("net.w", Box::new(HashMap::from([("net", slices(fifth))]))),
            ("0.0.w", Box::new([(Box::new(slices(sixth)),)])),
        ];
        for (path, model) in &models {
            let what = format!("{name} (row {row}) of {path}");
            let state = setup(rule(), model).expect("a state");
            assert!(state.leaf(path).is_some(), "{what}");
            match takes {
                Slices::Taken => {
                    method(&mut Case::new(state), model).unwrap_or_else(|error| panic!("{what}: {error}"))
                }
                Slices::Refused => assert_needs_variables(method(&mut Case::new(state), model), &what),
            }
        }
    }
}

/// The state goes on with what fits of it, from the slices' own values.
#[test]
fn a_rule_is_replaced_where_parameters_are_slices() {
    let mut memory = vectors();
    let parameters = slices(&mut memory);
    let mut state = setup(AdamW::new(0.1), &parameters).expect("a state");
    let grads: Grads = NAMES
        .map(|name| {
            (
                name.to_string(),
                Tensor::ones(shape(name), DType::F32, CPU).expect("ones"),
            )
        })
        .into();
    update(&mut state, &parameters, &grads).expect("an update");
    let replaced = state
        .at("w")
        .expect("a leaf")
        .replace(rule(), &parameters)
        .expect("a rule");
    assert_eq!(
        (replaced[0].path.as_str(), &replaced[0].kept[..]),
        ("w", &["0.m", "0.v", "0.t"].map(String::from)[..])
    );
    let average = state
        .leaf("w")
        .and_then(|leaf| leaf.tensor("1.average").ok())
        .expect("an average");
    let now = values(&state.masters(&parameters).expect("values")["w"]);
    assert_eq!(
        values(&average),
        now,
        "the average starts from where the slice is"
    );
    assert!((now[0] - 0.9).abs() < 1e-2, "{now:?}");

    // A model of another shape under the same path is another model.
    let (mut flat, mut rest) = (vec![1f32; 12], [vec![1f32; 2], vec![1f32; 2]]);
    let [mean, variance] = &mut rest;
    let other = ParameterSlices::new()
        .with("w", 12, &mut flat)
        .and_then(|slices| {
            slices
                .with("running_mean", 2, mean)?
                .with("running_var", 2, variance)
        });
    let error = state
        .all()
        .replace(rule(), &other.expect("slices"))
        .expect_err("another shape");
    assert_eq!(error.kind(), ErrorKind::Tensor, "{error}");
    assert_eq!((error.path(), error.got()), (Some("w"), Some("[12]")), "{error}");
}
