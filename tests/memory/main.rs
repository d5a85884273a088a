//! Saving and restoring copy nothing of the state's size; reading the bytes of a file or a configuration
//! takes memory in proportion to its size, whatever it claims; a step takes memory in proportion to the
//! largest parameter.

mod mutations;
#[path = "../../benches/support/peak.rs"]
mod peak;

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Tensor, Var};
use optimisers::config::OptimiserConfig;
use optimisers::{
    Adafactor, Adam, AdaptiveClip, Centralise, Checkpoint, CheckpointFile, ClipGlobalNorm, ClipNorm, Descent,
    Elementwise, Flow, Gradient, IntoOptimiser, MixedPrecision, Muon, OptimiserChain, Parameter, Result,
    Rule, Segments, Setup, Slot, State, StateTree, Update, hyper_parameters, range, ranks, setup, update,
};
use serde_json::{Value, json};

use peak::{peak, used};
use support::crafted_checkpoints::{Pieces, assembled, file_of, open, with_checksum};

/// A model with its state.
fn started(leaves: usize, length: usize) -> (Vec<Var>, StateTree) {
    let model: Vec<Var> = (0..leaves)
        .map(|_| Var::ones(length, DType::F32, &Device::Cpu).expect("a variable"))
        .collect();
    let state = setup(Adam::new(0.1), &model).expect("a state");
    (model, state)
}

/// The memory that it takes to read a file, and to restore it if that is possible.
fn reading(file: &[u8], model: &[Var], state: &mut StateTree) -> usize {
    peak(|| _ = open(file).and_then(|file| file.converting().restore_with_model(state, model)))
}

/// Pieces one after another, until they have this length together.
fn repeated(piece: impl Fn(usize) -> String, length: usize) -> String {
    let mut pieces = Vec::new();
    let mut total = 0;
    while total < length {
        pieces.push(piece(pieces.len()));
        total += pieces[pieces.len() - 1].len() + 1;
    }
    pieces.join(",")
}

/// Files whose header is a long text that stands for many values, and files that claim to be huge.
fn hostile(pieces: &Pieces, length: usize) -> Vec<(&'static str, Vec<u8>)> {
    let text = pieces.description.to_string();
    let described = |description: String| {
        let mut header = pieces.tensors.clone();
        header["__metadata__"] = json!({ "optimisers": description });
        with_checksum(assembled(&header.to_string(), &pieces.data))
    };
    let replaced = |old: &Value, name: &str, new: String| {
        let old = format!("\"{name}\":{old}");
        assert!(text.contains(&old), "{old}");
        described(text.replacen(&old, &format!("\"{name}\":{new}"), 1))
    };
    let part = |name: &str, new: String| replaced(&pieces.description[name], name, new);
    let leaf = |name: &str, new: String| replaced(&pieces.description["leaves"]["0"][name], name, new);
    let fields = |new: String| replaced(&pieces.description["optimisers"][0]["fields"], "fields", new);
    let header = |tensors: String| assembled(&format!("{{{tensors}}}"), &[]);
    let list = |piece: &str| format!("[{}]", repeated(|_| piece.to_string(), length));
    let map = |piece: &dyn Fn(usize) -> String| format!("{{{}}}", repeated(piece, length));
    let nested = |open: &str, close: &str| [open.repeat(length / 8), close.repeat(length / 8)].concat();
    let tensor = |name: usize| format!(r#""{name}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#);
    let a_leaf = |name: usize| {
        format!(
            r#""{name}":{{"optimiser":0,"dtype":"","shape":[],"tensors":[],"counters":[],"steps":0,"frozen":true}}"#
        )
    };
    vec![
        (
            "a huge claimed header",
            [&90_000_000u64.to_le_bytes()[..], &[b' '; 2000]].concat(),
        ),
        (
            "the largest claimed header",
            [&u64::MAX.to_le_bytes()[..], &[b' '; 2000]].concat(),
        ),
        (
            "a huge claimed tensor",
            header(
                r#""x":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}"#.to_string(),
            ),
        ),
        (
            "a long shape",
            header(format!(
                r#""x":{{"dtype":"F32","shape":{},"data_offsets":[0,0]}}"#,
                list("0")
            )),
        ),
        ("a list for a tensor", header(format!(r#""x":{}"#, list("0")))),
        (
            "other metadata",
            header(format!(r#""__metadata__":{}"#, map(&|i| format!(r#""{i}":"""#)))),
        ),
        ("one tensor many times", header(repeated(|_| tensor(0), length))),
        ("many tensors", header(repeated(tensor, length))),
        ("nested lists", header(format!(r#""x":{}"#, nested("[", "]")))),
        (
            "nested maps",
            header(format!(r#""x":{}"#, nested(r#"{"x":"#, "}"))),
        ),
        ("a description of nested lists", described(nested("[", "]"))),
        ("nested lists for hyper-parameters", fields(nested("[", "]"))),
        (
            "a long hyper-parameter",
            fields(format!(r#"[["eta",{}]]"#, list("0"))),
        ),
        ("many hyper-parameters", fields(list(r#"["",0]"#))),
        (
            "many optimisers",
            part("optimisers", list(r#"{"name":"","rule":"","fields":[]}"#)),
        ),
        ("many leaves", part("leaves", map(&a_leaf))),
        ("one leaf many times", part("leaves", map(&|_| a_leaf(0)))),
        ("many variables", part("model", list(r#""""#))),
        ("many counters", leaf("counters", list(r#"["",0]"#))),
        ("many numbers", leaf("numbers", list(r#"["",0]"#))),
        ("many tensor names", leaf("tensors", list(r#""""#))),
        ("many dimensions", leaf("shape", list("0"))),
        (
            "an unknown part",
            described(text.replacen('{', &format!(r#"{{"more":{},"#, list("0")), 1)),
        ),
    ]
}

/// Configurations of about this length that stand for many values, or for few that are nested.
fn configurations(length: usize) -> Vec<(&'static str, String)> {
    let nested = |inside: &str| format!("{}{inside}{}", "[".repeat(60), "]".repeat(60));
    let list = |piece: &str| format!("[{}]", repeated(|_| piece.to_string(), length));
    let map = |piece: &dyn Fn(usize) -> String| format!("{{{}}}", repeated(piece, length));
    vec![
        ("rules in deep lists", nested(&list("\"Adam\""))),
        (
            "rules with fields in deep lists",
            nested(&list("{\"Adam\":{\"eta\":0.1,\"beta\":[0.9,0.99]}}")),
        ),
        ("deep lists", list(&nested(""))),
        ("empty lists in deep lists", nested(&list("[]"))),
        ("numbers in deep lists", nested(&list("0"))),
        (
            "a long text in deep lists",
            nested(&format!("\"{}\"", "x".repeat(length))),
        ),
        (
            "many fields",
            format!("{{\"Adam\":{}}}", map(&|i| format!("\"{i}\":0"))),
        ),
        (
            "one field many times",
            format!("{{\"Adam\":{}}}", map(&|_| "\"\":0".to_string())),
        ),
        ("many rules in a table", map(&|i| format!("\"{i}\":{{}}"))),
        (
            "many choices",
            format!(
                "{{\"ByPath\":{}}}",
                list("{\"pattern\":\"*\",\"optimiser\":null}")
            ),
        ),
        (
            "a deep optimiser",
            format!(
                "{{\"MixedPrecision\":{{\"dtype\":\"F32\",\"inner\":{}}}}}",
                list("[[\"Adam\"]]")
            ),
        ),
    ]
}

/// The most memory that reading a configuration takes, as a multiple of its length.
fn reading_configurations() -> f64 {
    let mut most: f64 = 0.0;
    for length in [300_000, 350_000, 425_000, 500_000] {
        for (name, text) in configurations(length) {
            let taken = peak(|| _ = std::hint::black_box(serde_json::from_str::<OptimiserConfig>(&text)));
            assert!(
                taken < 50_000 + 40 * text.len(),
                "{name}: {taken} bytes for a text of {}",
                text.len()
            );
            most = most.max(taken as f64 / text.len() as f64);
        }
    }
    most
}

/// One test only: the count is of the whole process.
#[test]
fn memory_follows_the_size() {
    a_step_of_whole_tensors();
    gradients_that_are_taken();
    gradients_that_come_one_at_a_time();
    segments();
    a_step_of_ranks();
    files_of_ranks();
    files();
    open_files();
    mutations::are_read_or_refused();
}

/// How many elements each parameter has below.
const LEAF: usize = 1 << 20;

/// The most memory of a warm step, in bytes per element of one parameter, for so many parameters.
fn stepping(leaves: usize, rule: impl Rule + Clone) -> f64 {
    let tensor = |value: f32| Tensor::full(value, (LEAF / 1024, 1024), &Device::Cpu).expect("a tensor");
    let model: Vec<Var> = (0..leaves)
        .map(|_| Var::from_tensor(&tensor(1.0)).expect("a variable"))
        .collect();
    let grads: BTreeMap<String, Tensor> = (0..leaves).map(|leaf| (leaf.to_string(), tensor(0.5))).collect();
    let mut state = setup(rule, &model).expect("a state");
    update(&mut state, &model, &grads).expect("a first update");
    peak(|| drop(update(&mut state, &model, &grads).expect("an update"))) as f64 / LEAF as f64
}

fn a_step_of_whole_tensors() {
    fn of<R: Rule + Clone>(rule: R) {
        let [few, many] = [3, 12].map(|leaves| stepping(leaves, rule.clone()));
        println!("{}: {few:.1} and {many:.1} bytes", rule.name());
        assert!(
            many < 44.0,
            "{}: {many:.1} bytes for each element of a parameter",
            rule.name()
        );
        assert!(
            many < few + 4.5,
            "{}: {few:.1} bytes for 3 parameters, {many:.1} for 12",
            rule.name()
        );
    }
    of(Adafactor::new(0.1));
    of(OptimiserChain::new((
        Adam::new(0.1),
        AdaptiveClip::new(0.1),
        Descent::new(0.1),
    )));
    of(OptimiserChain::new((Centralise::default(), Adam::new(0.1))));
    of(Muon {
        ns_steps: 0,
        ..Muon::new(0.1)
    });
    // The function of a user may refuse the call, so that its results are kept.
    assert!(stepping(12, Doubled::default()) > 12.0 * 4.0);
}

hyper_parameters! {
    /// Gradient descent that notes the least memory that is in use while it works.
    struct Watched {
        /// The learning rate.
        eta: f64 = 0.1 => range::any,
    }
}

/// The least bytes in use while [`Watched`] has worked.
static LEAST: AtomicUsize = AtomicUsize::new(usize::MAX);

impl Elementwise for Watched {
    type Scalars = f64;
    type Slots<T> = [T; 0];

    fn slots(&self) -> [Slot; 0] {
        []
    }

    fn scalars(&self, _t: u64) -> f64 {
        self.eta
    }

    fn step<V: optimisers::value::Value>(eta: f64, _x: V, dx: V, []: &mut [V; 0]) -> V {
        LEAST.fetch_min(used(), Ordering::Relaxed);
        dx * eta
    }
}

/// While the last parameter is written, the gradients of all others are free.
fn gradients_that_are_taken() {
    const LEAVES: usize = 12;
    fn still_there<R: Rule + Clone>(rule: R, is_owned: bool) -> f64 {
        let model: Vec<Var> = (0..LEAVES)
            .map(|_| Var::ones(LEAF, DType::F32, &Device::Cpu).expect("a variable"))
            .collect();
        let mut state = setup(rule, &model).expect("a state");
        let without = used();
        let gradient = || Tensor::ones(LEAF, DType::F32, &Device::Cpu).expect("a tensor");
        let grads: BTreeMap<String, Tensor> =
            (0..LEAVES).map(|leaf| (leaf.to_string(), gradient())).collect();
        LEAST.store(usize::MAX, Ordering::Relaxed);
        let outcome = match is_owned {
            true => Update::new(&mut state).apply_owned(&model, grads),
            false => Update::new(&mut state).apply(&model, &grads),
        };
        assert_eq!(outcome.expect("an update").applied, LEAVES);
        (LEAST.load(Ordering::Relaxed) - without) as f64 / (4 * LEAF) as f64
    }
    fn of<R: Rule + Clone>(rule: R) {
        let [lent, owned] = [false, true].map(|is_owned| still_there(rule.clone(), is_owned));
        println!(
            "{}: gradients of {lent:.2} parameters, and of {owned:.2} where they are taken",
            rule.name()
        );
        assert!(lent > 11.9 && owned < 1.1, "{lent} and {owned}");
    }
    of(Watched::default());
    // The norm reads all gradients before the first is written.
    of(OptimiserChain::new((
        ClipGlobalNorm::new(1.0),
        Watched::default(),
    )));
}

/// Of all gradients only the one that is pushed is in memory.
fn gradients_that_come_one_at_a_time() {
    const LEAVES: usize = 12;
    fn of<O: IntoOptimiser>(optimiser: O) {
        let name = optimiser.name();
        let model: Vec<Var> = (0..LEAVES)
            .map(|_| Var::ones(LEAF, DType::F32, &Device::Cpu).expect("a variable"))
            .collect();
        let mut state = setup(optimiser, &model).expect("a state");
        let gradient = || Tensor::ones(LEAF, DType::F32, &Device::Cpu).expect("a tensor");
        let of_gradients = |bytes: usize| bytes as f64 / (4 * LEAF) as f64;
        let whole = of_gradients(peak(|| {
            let grads: BTreeMap<String, Tensor> =
                (0..LEAVES).map(|leaf| (leaf.to_string(), gradient())).collect();
            drop(update(&mut state, &model, &grads).expect("an update"));
        }));
        let parts = of_gradients(peak(|| {
            let step = Update::new(&mut state).begin(&model).expect("a step");
            (0..LEAVES).for_each(|leaf| step.push(&leaf.to_string(), gradient()).expect("a push"));
            assert_eq!(step.finish().expect("an outcome").applied, LEAVES);
        }));
        println!(
            "{name}: gradients of {whole:.2} parameters, and of {parts:.2} where they come one at a time"
        );
        assert!(whole > 11.9 && parts < 1.1, "{whole} and {parts}");
    }
    of(Adam::new(0.1));
    of(MixedPrecision::new(
        DType::F64,
        OptimiserChain::new((ClipNorm::new(1.0), Adam::new(0.1))),
    ));
}

/// What a further block takes: the input of its segment, or its gradient if gradients are collected.
fn segments() {
    const WIDTH: usize = 256;
    /// A quarter of a gradient.
    const INPUT: usize = WIDTH * WIDTH;
    #[derive(Clone, Copy, Debug)]
    enum Way {
        Whole,
        Gradients,
        Train,
    }
    fn taken(blocks: usize, way: Way) -> usize {
        let matrix = |rows: usize| Tensor::full(1e-3f32, (rows, WIDTH), &Device::Cpu).expect("a tensor");
        let model: Vec<Var> = (0..blocks)
            .map(|_| Var::from_tensor(&matrix(WIDTH)).expect("a variable"))
            .collect();
        let mut state = setup(Descent::new(0.1), &model).expect("a state");
        let input = matrix(WIDTH / 4);
        let block = |w: &Var, x: &Tensor| x + x.matmul(w)?.tanh()?.sqr()?.relu()?;
        let segments = || Segments::new(&input).each(&model, block);
        let mut step = || -> Result<bool> {
            let update = Update::new(&mut state);
            let outcome = match way {
                Way::Whole => {
                    let whole = model.iter().try_fold(input.clone(), |x, w| block(w, &x))?;
                    update.apply_owned(&model, whole.sum_all()?.backward()?)?
                }
                Way::Gradients => {
                    let grads = segments().gradients(|y| y.sum_all())?.1;
                    update.apply_owned(&model, grads)?
                }
                Way::Train => segments().train(update, &model, |y| y.sum_all())?.1,
            };
            Ok(outcome.applied == blocks)
        };
        assert!(step().expect("a first step"));
        peak(|| assert!(step().expect("a step")))
    }
    let of_block = |way| (taken(24, way) - taken(8, way)) as f64 / 16.0 / INPUT as f64;
    for (way, least, most) in [
        (Way::Whole, 9.0, 30.0),
        (Way::Gradients, 3.9, 4.2),
        (Way::Train, 0.99, 1.1),
    ] {
        let inputs = of_block(way);
        println!("{way:?}: a block takes {inputs:.2} times its input");
        assert!((least..most).contains(&inputs), "{way:?}: {inputs}");
    }
    // The graph of the last segment, which runs once, is free before another one runs again.
    let [one, two] = [1, 2].map(|blocks| taken(blocks, Way::Train) as f64 / INPUT as f64);
    println!("a block takes {one:.1} inputs, two in segments {two:.1}");
    assert!(two < 1.3 * one, "{one} {two}");
}

const RANKS: usize = 4;
const LEAVES: usize = 8;

/// The most memory that `work` takes on one of the ranks, beside model and state, after it has been done so
/// many times.
fn of_ranks<O: IntoOptimiser>(
    before: usize,
    optimiser: fn() -> O,
    work: impl Fn(&mut StateTree, &[Var]) + Sync,
) -> usize {
    let barrier = Barrier::new(RANKS + 1);
    let (barrier, work, mut taken) = (&barrier, &work, 0);
    std::thread::scope(|scope| {
        for world in ranks(RANKS) {
            scope.spawn(move || {
                let model: Vec<Var> = (0..LEAVES)
                    .map(|_| Var::from_tensor(&half(1.0)).expect("a variable"))
                    .collect();
                let mut state = Setup::over(&world).build(optimiser(), &model).expect("a state");
                assert_eq!(state.bytes(), 12 * LEAVES * LEAF / RANKS);
                (0..before).for_each(|_| work(&mut state, &model));
                barrier.wait();
                barrier.wait();
                work(&mut state, &model);
                barrier.wait();
            });
        }
        barrier.wait();
        taken = peak(|| {
            barrier.wait();
            barrier.wait();
        });
    });
    taken / RANKS
}

fn half(value: f32) -> Tensor {
    Tensor::full(value, LEAF, &Device::Cpu)
        .and_then(|x| x.to_dtype(DType::BF16))
        .expect("a tensor")
}

fn mixed() -> impl IntoOptimiser {
    MixedPrecision::new(DType::F32, Adam::new(0.1))
}

/// What a step of a divided state takes: windows, and where a norm is asked for 4 / N bytes per element for
/// the sum of the gradients, which is kept.
fn a_step_of_ranks() {
    let gradient = half(0.5);
    let grads: BTreeMap<String, Tensor> = (0..LEAVES)
        .map(|leaf| (leaf.to_string(), gradient.clone()))
        .collect();
    let step = |state: &mut StateTree, model: &[Var]| _ = update(state, model, &grads).expect("an update");
    let clipped = || {
        MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((ClipGlobalNorm::new(1.0), Adam::new(0.1))),
        )
    };
    for (name, sums, taken) in [
        ("", 0, of_ranks(1, mixed, step)),
        (" with a norm", 4, of_ranks(0, clipped, step)),
        (" with another norm", 0, of_ranks(1, clipped, step)),
    ] {
        let windows = taken as f64 - (sums * LEAVES * LEAF / RANKS) as f64;
        println!(
            "a step of {RANKS} ranks{name}: {sums} / N bytes per element and {:.1} MB on each",
            windows / 1e6
        );
        assert!(windows < 8e6, "{windows} bytes");
    }
}

/// Ranks save and restore without copies of anything: windows are all that each takes.
fn files_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let saving = of_ranks(1, mixed, |state, model| {
        _ = Checkpoint::new(state).model(model).save(&path).unwrap()
    });
    let restoring = of_ranks(1, mixed, |state, model| {
        _ = CheckpointFile::open(&path)
            .unwrap()
            .restore_with_model(state, model)
            .unwrap()
    });
    println!("saving and restoring on {RANKS} ranks take {saving} and {restoring} bytes on each");
    assert!(saving < 100_000, "{saving} bytes");
    assert!((500_000..3_000_000).contains(&restoring), "{restoring} bytes");
}

hyper_parameters! {
    /// Doubles the gradient.
    struct Doubled {
        /// Nothing.
        eta: f64 = 0.1 => range::any,
    }
}

impl Rule for Doubled {
    fn apply<'a>(&'a self, state: &'a mut State, _x: Parameter<'a>, dx: Gradient<'a>) -> Result<Flow<'a>> {
        Ok(Flow::Step(dx.with_tensors(state, |_, _, dx, _| Ok((dx * 2.0)?))))
    }
}

/// From a path a state is restored without a copy of the file, or of a tensor of it.
fn open_files() {
    /// 70 MB of parameters, masters and moments.
    const ELEMENTS: usize = 1_250_000;
    const WINDOWS: usize = 3_000_000;
    let of = |dtype: DType| -> Vec<Var> {
        (0..4)
            .map(|_| Var::ones(ELEMENTS, dtype, &Device::Cpu).expect("a variable"))
            .collect()
    };
    let (half, single) = (of(DType::BF16), of(DType::F32));
    let mut half_state = setup(MixedPrecision::new(DType::F32, Adam::new(0.1)), &half).expect("a state");
    let mut single_state = setup(Adam::new(0.1), &single).expect("a state");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let saving = peak(|| _ = Checkpoint::new(&half_state).model(&half).save(&path).unwrap());
    assert!(saving < 100_000, "saving took {saving}");
    let opened = |restore: &mut dyn FnMut(CheckpointFile)| {
        let taken = peak(|| restore(CheckpointFile::open(&path).unwrap()));
        println!("opening and restoring 70 MB took {taken} bytes");
        // Windows there must be, or the count does not work.
        assert!((500_000..WINDOWS).contains(&taken), "{taken} bytes");
    };
    opened(&mut |file| _ = file.restore(&mut half_state).unwrap());
    opened(&mut |file| _ = file.restore_with_model(&mut half_state, &half).unwrap());
    opened(&mut |file| {
        _ = file
            .converting()
            .restore_with_model(&mut half_state, &half)
            .unwrap()
    });
    opened(&mut |file| {
        _ = file
            .converting()
            .restore_with_model(&mut single_state, &single)
            .unwrap()
    });
    Checkpoint::new(&single_state).model(&single).save(&path).unwrap();
    opened(&mut |file| {
        _ = file
            .converting()
            .restore_with_model(&mut half_state, &half)
            .unwrap()
    });
}

fn files() {
    let (model, mut state) = started(8, 200_000);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let saving = peak(|| _ = Checkpoint::new(&state).model(&model).save(&path).unwrap());
    let file = std::fs::read(&path).unwrap();
    assert!(saving < 100_000, "saving {} bytes took {saving}", file.len());
    let taken = reading(&file, &model, &mut state) as f64 / file.len() as f64;
    assert!(
        (1.0..1.2).contains(&taken),
        "reading took {taken:.2} times the file's size"
    );

    let (model, mut state) = started(1, 1000);
    let pieces = Pieces::of(&file_of(Checkpoint::new(&state).model(&model)));
    let mut most = 0;
    // The growth of lists goes in leaps, so that some lengths take more than others.
    for length in [300_000, 350_000, 425_000, 500_000] {
        for (name, file) in hostile(&pieces, length) {
            let taken = reading(&file, &model, &mut state);
            assert!(
                taken < 50_000 + 20 * file.len(),
                "{name}: {taken} bytes for a file of {}",
                file.len()
            );
            most = most.max(100 * taken / file.len().max(length));
        }
    }
    println!("at most {:.1} times the file's size", most as f64 / 100.0);
    assert!(most > 400, "the count works");
    println!(
        "at most {:.1} times the configuration's",
        reading_configurations()
    );
}
