//! Which matrices a parameter is made of, what is made of them, and what becomes of parameters that are none.

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AdaDelta, AdaMuon, Adam, AdamW, Checkpoint, CheckpointFile, ClipGlobalNorm, DecoupledDecay, Engine,
    ErrorKind, Fallback, FieldValue, Kahan, MatrixForm, MixedPrecision, Momentum, Muon, NewtonSchulz,
    NorMuon, Offload, Optimiser, OptimiserChain, Parameter, Products, Q8, Rule, Schedule, Setup, Sizes,
    SplitMaster, StateTree, StepScale, StochasticRounding, StoreAs, Update, ranks, setup, setup_with, update,
};

use support::common::{
    Grads, Vars, bits, engines, grads, is_kind, model, numbers, random, says, tensor, values, var,
};

/// The rules of this kind, with one way of cutting.
fn rules(form: MatrixForm, heads: u64, parts: Sizes) -> [Box<dyn Rule>; 3] {
    [
        Box::new(Muon {
            matrix: form,
            heads,
            parts,
            lambda: 0.1,
            ..Muon::new(0.1)
        }),
        Box::new(NorMuon {
            matrix: form,
            heads,
            parts,
            lambda: 0.1,
            ..NorMuon::new(0.1)
        }),
        Box::new(AdaMuon {
            matrix: form,
            heads,
            parts,
            lambda: 0.1,
            ..AdaMuon::new(0.1)
        }),
    ]
}

/// The parameter after three steps on `engine`.
fn trained(engine: Engine, rule: &dyn Rule, x: &Tensor, gradients: &[Tensor]) -> Tensor {
    let x = var(x);
    let mut state = setup(dyn_clone::clone_box(rule), &x).expect("a state");
    for gradient in gradients {
        Update::new(&mut state)
            .engine(engine)
            .apply(&x, &Grads::from([(String::new(), gradient.clone())]))
            .expect("an update");
    }
    x.as_detached_tensor()
}

/// The same rules with both norms set.
fn with_norms(rules: [Box<dyn Rule>; 3]) -> [Box<dyn Rule>; 3] {
    rules.map(|mut rule| {
        for field in ["equilibrate", "renormalise"] {
            assert!(rule.set_field(field, true.into()).expect("a flag"));
        }
        rule
    })
}

/// A run of a whole equals runs of its pieces, which `cut` takes out of a tensor, bit for bit.
fn assert_piecewise(
    rules: [[Box<dyn Rule>; 3]; 2],
    shape: &[usize],
    dtype: DType,
    cut: impl Fn(&Tensor) -> Vec<Tensor>,
) {
    let (x, gradients) = (
        tensor(1, shape, dtype),
        [2, 3, 4].map(|seed| tensor(seed, shape, dtype)),
    );
    let [whole, piece] = rules;
    for (whole, piece) in whole.iter().zip(&piece) {
        for engine in engines() {
            let got = cut(&trained(engine, &**whole, &x, &gradients));
            let of_gradients = gradients.each_ref().map(&cut);
            for (i, start) in cut(&x).iter().enumerate() {
                let gradients = of_gradients.each_ref().map(|pieces| pieces[i].clone());
                let expected = trained(engine, &**piece, start, &gradients);
                assert_eq!(
                    bits(&got[i].contiguous().expect("a copy")),
                    bits(&expected),
                    "{} of {shape:?}, piece {i}, {engine:?}",
                    whole.name()
                );
            }
        }
    }
}

fn along(tensor: &Tensor, dim: usize, sizes: &[usize]) -> Vec<Tensor> {
    let starts = sizes
        .iter()
        .scan(0, |start, size| Some(std::mem::replace(start, *start + size)));
    let pieces = starts
        .zip(sizes)
        .map(|(start, &size)| tensor.narrow(dim, start, size)?.contiguous());
    pieces.collect::<candle_core::Result<_>>().expect("pieces")
}

#[test]
fn a_stack_is_a_loop_over_its_matrices() {
    let (none, plain) = (Sizes::default(), || rules(MatrixForm::Stack, 1, Sizes::default()));
    for (shape, dtype) in [
        ([3, 4, 6], DType::F32),
        ([3, 6, 4], DType::F64),
        ([5, 130, 70], DType::F32),
        ([2, 1, 3], DType::F32),
    ] {
        let matrices = |x: &Tensor| {
            along(x, 0, &vec![1; shape[0]])
                .iter()
                .map(|matrix| matrix.squeeze(0).expect("a matrix"))
                .collect()
        };
        assert_piecewise([plain(), plain()], &shape, dtype, matrices);
    }
    let outer = |x: &Tensor| {
        along(x, 0, &[1, 1])
            .iter()
            .flat_map(|half| along(&half.squeeze(0).expect("a stack"), 0, &[1, 1, 1]))
            .collect()
    };
    assert_piecewise([plain(), plain()], &[2, 3, 4, 5], DType::F32, outer);
    // Heads and parts are rows.
    assert_piecewise(
        [rules(MatrixForm::Stack, 3, none), plain()],
        &[12, 5],
        DType::F32,
        |x| along(x, 0, &[4; 3]),
    );
    assert_piecewise(
        [rules(MatrixForm::Stack, 3, none), plain()],
        &[2, 12, 5],
        DType::F32,
        |x| along(x, 1, &[4; 3]),
    );
    // Norms are those of each, too.
    let [heads, each] = [rules(MatrixForm::Stack, 3, none), plain()].map(with_norms);
    assert_piecewise([heads, each], &[12, 5], DType::F32, |x| along(x, 0, &[4; 3]));
    let [parts, each] = [rules(MatrixForm::Stack, 1, Sizes::from([6, 2, 4])), plain()].map(with_norms);
    assert_piecewise([parts, each], &[12, 5], DType::F32, |x| along(x, 0, &[6, 2, 4]));
    assert_piecewise(
        [rules(MatrixForm::Stack, 1, Sizes::from([6, 2, 4])), plain()],
        &[12, 5],
        DType::F32,
        |x| along(x, 0, &[6, 2, 4]),
    );
    assert_piecewise(
        [rules(MatrixForm::Stack, 1, Sizes::from([3, 2])), plain()],
        &[2, 5, 4],
        DType::F64,
        |x| along(x, 1, &[3, 2]),
    );
}

#[test]
fn a_kernel_is_a_matrix_of_its_outputs() {
    let flat = |x: &Tensor| vec![x.flatten_from(1).expect("a matrix")];
    let form = |form| rules(form, 1, Sizes::default());
    assert_piecewise(
        [form(MatrixForm::Flat), form(MatrixForm::Stack)],
        &[6, 2, 3, 3],
        DType::F32,
        flat,
    );
    let heads = |form| rules(form, 2, Sizes::default());
    assert_piecewise(
        [heads(MatrixForm::Flat), heads(MatrixForm::Stack)],
        &[6, 2, 3],
        DType::F32,
        flat,
    );
    let parts = |form| rules(form, 1, Sizes::from([4, 2]));
    assert_piecewise(
        [parts(MatrixForm::Flat), parts(MatrixForm::Stack)],
        &[6, 2, 3],
        DType::F32,
        flat,
    );
}

/// What the pages say of the kernel [8, 4, 3, 3]: a matrix of 8 rows and 36 columns. The authors' codes have
/// other sizes for it.
#[test]
fn a_kernel_has_the_steps_of_its_flat_matrix() {
    let step = |rule: Optimiser| {
        let gradient = tensor(3, &[8, 4, 3, 3], DType::F64);
        let x = model(&[gradient.zeros_like().expect("zeros")]);
        let mut state = setup(rule, &x).expect("a state");
        update(&mut state, &x, &grads([Some(gradient)])).expect("an update");
        let v = state
            .leaf("0")
            .and_then(|leaf| leaf.tensor_names().into_iter().find(|name| name.contains('v')));
        (
            values(&x["0"]),
            v.map(|name| {
                state
                    .leaf("0")
                    .expect("the leaf")
                    .tensor(&name)
                    .expect("a copy")
                    .elem_count()
            }),
        )
    };
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let matrix = MatrixForm::Flat;

    // Original: 1, as for a matrix that is wider than high. MatchAdamW: 0.2·√36.
    let (plain, _) = step(Optimiser::new(Muon {
        matrix,
        ..Muon::new(1.0)
    }));
    let (matched, _) = step(Optimiser::new(Muon {
        matrix,
        scale: StepScale::MatchAdamW,
        ..Muon::new(1.0)
    }));
    let (none, _) = step(Optimiser::new(Muon {
        matrix,
        scale: StepScale::None,
        ..Muon::new(1.0)
    }));
    assert_eq!(plain, none);
    assert!(
        (norm(&matched) / norm(&none) - 1.2).abs() < 1e-12,
        "{}",
        norm(&matched) / norm(&none)
    );

    // One second moment for each output channel, all of which have one length in the first step, and the norm
    // that Muon's step has.
    let (rows, count) = step(Optimiser::new(NorMuon {
        matrix,
        ..NorMuon::new(1.0)
    }));
    assert_eq!(count, Some(8), "not the 96 rows of all windows");
    let length = norm(&none) / 8f64.sqrt();
    assert!(rows.chunks(36).all(|row| (norm(row) / length - 1.0).abs() < 1e-6));

    // 0.2·√(8·36), and not 0.2·√(3·8).
    let (all, count) = step(Optimiser::new(AdaMuon {
        matrix,
        ..AdaMuon::new(1.0)
    }));
    assert_eq!(count, Some(288));
    assert!(
        (norm(&all) / 3.394112549695428 - 1.0).abs() < 1e-6,
        "{}",
        norm(&all)
    );
}

#[test]
fn what_is_no_matrix_is_refused_at_setup() {
    let refused = |rule: Optimiser, shape: &[usize], words: &[&str]| {
        says(
            &setup(rule, &model(&[tensor(1, shape, DType::F32)])).expect_err("no such matrix"),
            words,
        );
    };
    for rule in rules(MatrixForm::Stack, 1, Sizes::default()) {
        let name = rule.name();
        refused(
            Optimiser::new(rule.clone()),
            &[5],
            &[
                "parameter \"0\"",
                &format!("{name} works on matrices, got the shape [5]"),
                "with_fallback",
            ],
        );
        refused(
            Optimiser::new(MixedPrecision::new(DType::F64, rule)),
            &[],
            &[&name, "the shape []"],
        );
    }
    let cut = |heads, parts: Sizes| {
        Optimiser::new(Muon {
            heads,
            parts,
            ..Muon::new(0.1)
        })
    };
    refused(
        cut(5, Sizes::default()),
        &[4, 6],
        &[
            "parameter \"0\"",
            "heads is 5, expected a divisor of the 4 rows",
            "setup_with",
        ],
    );
    refused(
        cut(1, Sizes::from([2, 3])),
        &[4, 6],
        &["parts is [2, 3], which are 5 rows", "expected the 4 rows"],
    );
    refused(
        cut(2, Sizes::from([2, 2])),
        &[4, 6],
        &["heads is 2, expected 1, because `parts` is [2, 2]"],
    );
    // Cut otherwise later, it is refused as well.
    let x = model(&[tensor(1, &[4, 3, 2], DType::F32)]);
    for (rule, field, value) in [
        (Optimiser::new(Muon::new(0.1)), "heads", FieldValue::Count(7)),
        (
            Optimiser::new(NorMuon::new(0.1)),
            "matrix",
            MatrixForm::Flat.into(),
        ),
        (
            Optimiser::new(AdaMuon::new(0.1)),
            "parts",
            Sizes::from([1, 1]).into(),
        ),
    ] {
        let mut state = setup(rule, &x).expect("a state");
        let own = state.leaf("0").and_then(|leaf| leaf.field(field));
        says(
            &state.all().adjust_field(field, value).expect_err("other rows"),
            &["parameter \"0\"", field],
        );
        assert_eq!(state.leaf("0").and_then(|leaf| leaf.field(field)), own);
    }
}

type Matrix = Vec<Vec<f64>>;

fn product(a: &Matrix, b: &Matrix) -> Matrix {
    let columns = b[0].len();
    a.iter()
        .map(|row| {
            (0..columns)
                .map(|j| row.iter().zip(b).map(|(x, other)| x * other[j]).sum())
                .collect()
        })
        .collect()
}

fn transposed(a: &Matrix) -> Matrix {
    (0..a[0].len())
        .map(|j| a.iter().map(|row| row[j]).collect())
        .collect()
}

fn frobenius(a: &Matrix) -> f64 {
    a.iter().flatten().map(|x| x * x).sum::<f64>().sqrt()
}

/// The iteration with (a, b, c) of each step, from a matrix of this norm.
fn newton_schulz(matrix: &Matrix, norm: f64, steps: &[(f64, f64, f64)]) -> Matrix {
    let size = frobenius(matrix) + 1e-8;
    let mut u: Matrix = matrix
        .iter()
        .map(|row| row.iter().map(|x| x / size * norm).collect())
        .collect();
    for &(a, b, c) in steps {
        let s = product(&u, &transposed(&u));
        let square = product(&s, &s);
        let odd = |i: usize, j: usize| {
            (0..u.len())
                .map(|k| (b * s[i][k] + c * square[i][k]) * u[k][j])
                .sum::<f64>()
        };
        u = (0..u.len())
            .map(|i| (0..u[0].len()).map(|j| a * u[i][j] + odd(i, j)).collect())
            .collect();
    }
    u
}

/// Muon's momentum of rows, as the recurrence says.
fn momentum(m: &mut Matrix, g: &Matrix, rho: f64, nesterov: bool, t: i32) -> Matrix {
    let correction = |t: i32| 1.0 - rho.powi(t);
    m.iter_mut()
        .flatten()
        .zip(g.iter().flatten())
        .for_each(|(m, g)| *m = rho * *m + (1.0 - rho) * g);
    let of = |(m, g): (&f64, &f64)| match nesterov {
        true => rho * m / correction(t + 1) + (1.0 - rho) * g / correction(t),
        false => m / correction(t),
    };
    m.iter()
        .zip(g)
        .map(|(m, g)| m.iter().zip(g).map(of).collect())
        .collect()
}

/// Twelve steps of `rule` on a wide matrix in f64, on every engine, are what `step` makes of momentum, x and
/// gradients written out.
fn assert_follows(rule: impl Rule + Clone, mut step: impl FnMut(&mut Matrix, &Matrix, &mut Matrix, i32)) {
    let (rows, columns) = (3, 5);
    let read = |flat: Vec<f64>| -> Matrix { flat.chunks(columns).map(<[f64]>::to_vec).collect() };
    let tensor = |seed| {
        Tensor::from_vec(numbers(seed, rows * columns), (rows, columns), &Device::Cpu).expect("a matrix")
    };
    let xs: Vec<Vars> = engines().iter().map(|_| model(&[tensor(1)])).collect();
    let mut states: Vec<StateTree> = xs
        .iter()
        .map(|x| setup(rule.clone(), x).expect("a state"))
        .collect();
    let (mut expected, mut m) = (read(numbers(1, rows * columns)), vec![vec![0.0; columns]; rows]);
    for t in 1..=12 {
        let gradient = tensor(100 + t as u64);
        step(&mut expected, &read(values(&gradient)), &mut m, t);
        for ((engine, x), state) in engines().into_iter().zip(&xs).zip(&mut states) {
            Update::new(state)
                .engine(engine)
                .apply(x, &grads([Some(gradient.clone())]))
                .expect("an update");
            for (got, expected) in values(&x["0"]).into_iter().zip(expected.iter().flatten()) {
                assert!(
                    (got - expected).abs() <= 1e-11 * expected.abs().max(1e-2),
                    "{}, step {t}: {got} for {expected}",
                    rule.name()
                );
            }
        }
    }
}

fn moved(x: &mut Matrix, direction: &Matrix, eta: f64, lambda: f64) {
    x.iter_mut()
        .flatten()
        .zip(direction.iter().flatten())
        .for_each(|(x, u)| *x -= eta * (u + lambda * *x));
}

const JORDAN: (f64, f64, f64) = (3.4445, -4.775, 2.0315);

#[test]
fn muon_follows_its_recurrence() {
    let express = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    ];
    let safe = express.map(|(a, b, c)| (a / 1.01, b / 1.01f64.powi(3), c / 1.01f64.powi(5)));
    let quintic = [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
    ];
    let root = 5f64.sqrt();
    for (coefficients, norm, steps, scale, factor) in [
        (
            NewtonSchulz::Jordan,
            1.0,
            vec![JORDAN; 5],
            StepScale::Original,
            1.0,
        ),
        (
            NewtonSchulz::PolarExpress,
            1.0 / 1.01,
            safe.to_vec(),
            StepScale::MatchAdamW,
            0.2 * root,
        ),
        (
            NewtonSchulz::Quintic,
            1.0,
            quintic.to_vec(),
            StepScale::Spectral,
            (3f64 / 5.0).sqrt(),
        ),
        (
            NewtonSchulz::Cubic,
            1.0,
            vec![(1.5, -0.5, 0.0); 4],
            StepScale::None,
            1.0,
        ),
    ] {
        for nesterov in [true, false] {
            let ns_steps = steps.len() as u64;
            let rule = Muon {
                rho: 0.8,
                lambda: 0.3,
                nesterov,
                coefficients,
                ns_steps,
                scale,
                ..Muon::new(0.05)
            };
            assert_follows(rule, |x, g, m, t| {
                let mut u = newton_schulz(&momentum(m, g, 0.8, nesterov, t), norm, &steps);
                u.iter_mut().flatten().for_each(|u| *u *= factor);
                moved(x, &u, 0.05, 0.3);
            });
        }
    }
}

/// The loop of the authors' code, with the corrected momentum.
#[test]
fn normuon_follows_its_recurrence() {
    let mut v = [0.0; 3];
    assert_follows(
        NorMuon {
            beta: (0.8, 0.7),
            lambda: 0.3,
            ..NorMuon::new(0.05)
        },
        |x, g, m, t| {
            let mut u = newton_schulz(&momentum(m, g, 0.8, true, t), 1.0, &[JORDAN; 5]);
            let before = frobenius(&u);
            for (row, v) in u.iter_mut().zip(&mut v) {
                *v = 0.7 * *v + 0.3 * row.iter().map(|u| u * u).sum::<f64>() / 5.0;
                row.iter_mut().for_each(|u| *u /= v.sqrt() + 1e-8);
            }
            let factor = before / (frobenius(&u) + 1e-8);
            u.iter_mut().flatten().for_each(|u| *u *= factor);
            moved(x, &u, 0.05, 0.3);
        },
    );
}

/// The root mean square of the step is 0.2·η, as the paper's γ makes it.
#[test]
fn adamuon_follows_its_recurrence() {
    let mut v = vec![vec![0.0; 5]; 3];
    assert_follows(
        AdaMuon {
            beta: (0.8, 0.7),
            lambda: 0.3,
            ..AdaMuon::new(0.05)
        },
        |x, g, m, t| {
            let signs: Matrix = momentum(m, g, 0.8, true, t)
                .iter()
                .map(|row| row.iter().map(|u| u.signum()).collect())
                .collect();
            let mut u = newton_schulz(&signs, 1.0, &[JORDAN; 5]);
            for (u, v) in u.iter_mut().flatten().zip(v.iter_mut().flatten()) {
                *v = 0.7 * *v + 0.3 * *u * *u;
                *u /= v.sqrt() + 1e-8;
            }
            let gamma = 0.2 * 15f64.sqrt() / (frobenius(&u) + 1e-8);
            u.iter_mut().flatten().for_each(|u| *u *= gamma);
            moved(x, &u, 0.05, 0.3);
        },
    );
}

/// One step from zero by a matrix whose singular values are far apart.
fn first_step(rule: Muon, dtype: DType) -> Matrix {
    let gradient = random(7, &[6, 40], dtype, &Device::Cpu);
    let x = var(&gradient.zeros_like().expect("zeros"));
    let mut state = setup(
        Muon {
            scale: StepScale::None,
            ..rule
        },
        &x,
    )
    .expect("a state");
    update(&mut state, &x, &Grads::from([(String::new(), gradient)])).expect("an update");
    values(&x).chunks(40).map(<[f64]>::to_vec).collect()
}

#[test]
fn polynomials_lead_to_orthogonal_matrices() {
    let error = |coefficients, ns_steps| {
        let u = first_step(
            Muon {
                coefficients,
                ns_steps,
                ..Muon::new(1.0)
            },
            DType::F64,
        );
        let square = product(&u, &transposed(&u));
        let off = |(i, row): (usize, &Vec<f64>)| {
            row.iter()
                .enumerate()
                .map(|(j, x)| (x - f64::from(i == j)).abs())
                .fold(0.0, f64::max)
        };
        square.iter().enumerate().map(off).fold(0.0, f64::max)
    };
    assert!(error(NewtonSchulz::Cubic, 20) < 1e-12);
    assert!(error(NewtonSchulz::PolarExpress, 10) < 1e-9);
    assert!(error(NewtonSchulz::Jordan, 10) < 0.6);
    assert!(error(NewtonSchulz::Quintic, 10) < 0.6);
}

/// A step of momentum without memory, which is the matrix made orthogonal.
fn orthogonal(rule: Muon, gradient: &Tensor) -> Matrix {
    let x = var(&gradient.zeros_like().expect("zeros"));
    let rule = Muon {
        eta: 1.0,
        rho: 0.0,
        epsilon: 0.0,
        scale: StepScale::None,
        ..rule
    };
    let mut state = setup(rule, &x).expect("a state");
    update(&mut state, &x, &Grads::from([(String::new(), gradient.clone())])).expect("an update");
    values(&x)
        .chunks(gradient.dims()[1])
        .map(<[f64]>::to_vec)
        .collect()
}

/// Powers of 2 change no digit: the factor of a row is gone, and the norm of the whole with it.
#[test]
fn equilibrated_steps_have_no_lengths_of_rows() {
    let gradient = random(7, &[4, 6], DType::F64, &Device::Cpu);
    let factors = Tensor::new(&[[1f64], [1024.0], [0.25], [2f64.powi(-60)]], &Device::Cpu).expect("factors");
    let scaled = gradient.broadcast_mul(&factors).expect("a product");
    let step = |equilibrate, gradient: &Tensor| {
        orthogonal(
            Muon {
                equilibrate,
                ..Muon::new(1.0)
            },
            gradient,
        )
    };
    let difference = |a: Matrix, b: Matrix| {
        a.iter()
            .flatten()
            .zip(b.iter().flatten())
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f64::max)
    };
    assert!(difference(step(true, &gradient), step(true, &scaled)) < 1e-14);
    assert!(difference(step(false, &gradient), step(false, &scaled)) > 0.1);
}

#[test]
fn renormalised_steps_have_the_norm_of_an_orthogonal_matrix() {
    for (shape, root) in [([3, 7], 3f64.sqrt()), ([7, 3], 3f64.sqrt())] {
        let gradient = random(8, &shape, DType::F64, &Device::Cpu);
        let norm = |renormalise| {
            frobenius(&orthogonal(
                Muon {
                    renormalise,
                    ..Muon::new(1.0)
                },
                &gradient,
            ))
        };
        assert!(
            (norm(true) - root).abs() < 1e-14 && (norm(false) - root).abs() > 1e-3,
            "{shape:?}"
        );
    }
}

/// Rows of zeros stay where they are, whatever ε is, and tiny ones move as far as others.
#[test]
fn norms_of_zero_and_tiny_rows_make_finite_steps() {
    let (equilibrate, renormalise) = (true, true);
    for dtype in [DType::F32, DType::F64] {
        let rows = [
            [0f64, 0.0, 0.0],
            [3e6, -1e6, 2e6],
            [1e-30, 2e-30, -1e-30],
            [0.0, 0.0, 0.0],
        ];
        let gradient = Tensor::new(&rows, &Device::Cpu)
            .and_then(|x| x.to_dtype(dtype))
            .expect("a matrix");
        let step = orthogonal(
            Muon {
                equilibrate,
                renormalise,
                ..Muon::new(1.0)
            },
            &gradient,
        );
        assert!(
            step.iter().flatten().all(|x| x.is_finite()),
            "{dtype:?}: {step:?}"
        );
        assert!(
            step[0].iter().chain(&step[3]).all(|x| *x == 0.0),
            "{dtype:?}: {step:?}"
        );
        let [long, short] = [1, 2].map(|i| frobenius(&vec![step[i].clone()]));
        assert!((long / short - 1.0).abs() < 0.5, "{dtype:?}: {long} and {short}");
        let nothing = gradient.zeros_like().expect("zeros");
        for rule in with_norms(rules(MatrixForm::Stack, 1, Sizes::default())) {
            let mut rule = rule;
            assert!(rule.set_field("epsilon", 0.0.into()).expect("a number"));
            let got = trained(
                Engine::Fused,
                &*rule,
                &nothing,
                &[nothing.clone(), gradient.clone()],
            );
            assert!(
                values(&got).into_iter().all(f64::is_finite),
                "{rule:?} in {dtype:?}"
            );
        }
    }
}

#[test]
fn products_in_16_bits_are_near() {
    let exact = first_step(Muon::new(1.0), DType::F32);
    for (products, tolerance) in [(Products::BF16, 0.1), (Products::F16, 0.02)] {
        let got = first_step(
            Muon {
                products,
                ..Muon::new(1.0)
            },
            DType::F32,
        );
        let difference: Matrix = got
            .iter()
            .zip(&exact)
            .map(|(a, b)| a.iter().zip(b).map(|(a, b)| a - b).collect())
            .collect();
        let relative = frobenius(&difference) / frobenius(&exact);
        assert!(
            relative > 1e-6 && relative < tolerance,
            "{products:?}: {relative}"
        );
    }
}

/// A matrix of one element is 1 before the first step. Coefficients of 16 bits would leave 0.6875.
#[test]
fn coefficients_have_more_digits_than_products_of_16_bits() {
    let step = |products| {
        let x = model(&[Tensor::zeros((1, 1), DType::F32, &Device::Cpu).expect("zeros")]);
        let mut state = setup(
            Muon {
                ns_steps: 1,
                products,
                ..Muon::new(1.0)
            },
            &x,
        )
        .expect("a state");
        update(
            &mut state,
            &x,
            &grads([Tensor::ones((1, 1), DType::F32, &Device::Cpu).ok()]),
        )
        .expect("an update");
        -values(&x["0"])[0]
    };
    let rounded = |x: f64| half::bf16::from_f64(x).to_f64();
    assert_eq!(step(Products::BF16), rounded(3.4445 + rounded(-4.775 + 2.0315)));
    assert_eq!(step(Products::BF16), 0.6953125);
    assert!((step(Products::F16) - 0.701).abs() < 1e-3 && (step(Products::Compute) - 0.701).abs() < 1e-6);
}

fn network(dtype: DType) -> Vars {
    let shapes: [(&str, &[usize]); 4] = [
        ("embedding.weight", &[10, 4]),
        ("layer.bias", &[4]),
        ("layer.weight", &[4, 4]),
        ("scale", &[]),
    ];
    shapes
        .iter()
        .zip(1..)
        .map(|((path, shape), seed)| (path.to_string(), var(&tensor(seed, shape, dtype))))
        .collect()
}

fn gradients(model: &Vars, seed: u64) -> Grads {
    model
        .iter()
        .zip(seed..)
        .map(|((path, x), seed)| (path.clone(), tensor(seed, x.dims(), DType::F32)))
        .collect()
}

fn fallback() -> Fallback<Muon, AdamW> {
    Muon::new(0.1).with_fallback(AdamW::new(0.01)).except(["embed*"])
}

/// The same leaves, and the same bits, as where each parameter's rule is chosen by hand.
#[test]
fn a_fallback_is_a_choice_by_hand() {
    let by_hand = |path: &str, x: Parameter<'_>| -> Option<Optimiser> {
        let matrix = x.rank() > 1 && path != "embedding.weight";
        let chain =
            |rule: Box<dyn Rule>| OptimiserChain::new((ClipGlobalNorm::new(1.0), StoreAs::all(Q8, rule)));
        let rule: Box<dyn Rule> = if matrix {
            Box::new(Muon::new(0.1))
        } else {
            Box::new(AdamW::new(0.01))
        };
        Some(Optimiser::new(MixedPrecision::new(DType::F32, chain(rule))))
    };
    let models = [network(DType::BF16), network(DType::BF16)];
    let chain = OptimiserChain::new((ClipGlobalNorm::new(1.0), StoreAs::all(Q8, fallback())));
    let mut states = [
        setup(MixedPrecision::new(DType::F32, chain), &models[0]).expect("a state"),
        setup_with(&models[1], by_hand).expect("a state"),
    ];
    for seed in [10, 20, 30] {
        for (state, model) in states.iter_mut().zip(&models) {
            update(state, model, &gradients(model, seed)).expect("an update");
        }
    }
    for path in models[0].keys() {
        assert_eq!(bits(&models[0][path]), bits(&models[1][path]), "{path}");
        let [leaf, expected] = states.each_ref().map(|state| state.leaf(path).expect("the leaf"));
        assert_eq!(leaf.optimiser().name(), expected.optimiser().name());
        assert_eq!(
            (leaf.optimiser().fields(), leaf.tensor_names()),
            (expected.optimiser().fields(), expected.tensor_names())
        );
    }
    // A checkpoint of one is one of the other.
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("state.safetensors");
    Checkpoint::new(&states[0]).save(&file).expect("a checkpoint");
    CheckpointFile::open(&file)
        .and_then(|file| file.restore(&mut states[1]))
        .expect("the same state");
}

#[test]
fn a_fallback_goes_wherever_rules_go() {
    let model = network(DType::F32);
    let names =
        |state: &StateTree| -> Vec<String> { state.leaves().map(|leaf| leaf.optimiser().name()).collect() };
    let mut state = setup(Adam::new(0.1), &model).expect("a state");
    let replaced = state.all().replace(fallback(), &model).expect("another rule");
    assert_eq!(names(&state), ["AdamW", "AdamW", "Muon", "AdamW"]);
    assert_eq!(
        (&replaced[0].kept[..], &replaced[2].dropped[..]),
        (&["m", "v", "t"].map(String::from)[..], &["v".to_string()][..])
    );
    let mut state =
        setup_with(&model, |path, _| (path == "scale").then(|| Momentum::new(0.1))).expect("a state");
    state
        .add_with(&model, |_, _| Some(fallback()))
        .expect("more parameters");
    assert_eq!(names(&state), ["AdamW", "AdamW", "Muon", "Momentum"]);
    // Fallbacks of fallbacks, in boxes and options.
    let nested =
        Fallback::new(Some(Box::new(fallback()) as Box<dyn Rule>), Momentum::new(0.1)).except(["layer.*"]);
    assert_eq!(
        names(&setup(nested, &model).expect("a state")),
        ["AdamW", "Momentum", "Momentum", "Momentum"]
    );
    let wrapped: [Optimiser; 7] = [
        Optimiser::new(DecoupledDecay::new(0.1, fallback())),
        Optimiser::new(StochasticRounding::new(1, fallback())),
        Optimiser::new(Kahan::new(fallback())),
        Optimiser::new(SplitMaster::new(fallback())),
        Optimiser::new(Offload::new(MixedPrecision::new(DType::F64, fallback())).everywhere()),
        Optimiser::new(StoreAs::new([("m", DType::BF16)], fallback())),
        Optimiser::new(Some(fallback())),
    ];
    for optimiser in wrapped {
        let (name, state) = (optimiser.name(), setup(optimiser, &model).expect("a state"));
        let has = |rule: &str| {
            names(&state)
                .iter()
                .map(|name| name.contains(rule))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            (has("AdamW"), has("Muon")),
            (vec![true, true, false, true], vec![false, false, true, false]),
            "{name}"
        );
    }
    // Over ranks, where matrices stay whole and the rest is cut.
    for world in ranks(1) {
        assert_eq!(
            names(&Setup::over(&world).build(fallback(), &model).expect("a state")),
            ["AdamW", "AdamW", "Muon", "AdamW"]
        );
    }
    let config: optimisers::config::OptimiserConfig = serde_json::from_str(
        r#"[{"ClipNorm": {"omega": 1.0}}, {"Fallback": {"inner": "Muon", "fallback": {"AdamW": {"eta": 0.5}}, "except": ["embed*"]}}]"#,
    )
    .expect("a configuration");
    let state = config.setup(&model).expect("a state");
    assert_eq!(
        names(&state)[1..3],
        [
            "OptimiserChain(ClipNorm, AdamW)",
            "OptimiserChain(ClipNorm, Muon)"
        ]
    );
    assert_eq!(
        serde_json::from_str::<optimisers::config::OptimiserConfig>(
            &serde_json::to_string(&config).expect("text")
        )
        .ok(),
        Some(config)
    );
}

#[test]
fn a_fallback_has_a_learning_rate_for_each() {
    let model = network(DType::F32);
    let mut state = setup(fallback(), &model).expect("a state");
    state
        .schedule(Schedule::constant(0.5).relative())
        .expect("a schedule");
    let rates: Vec<_> = state.leaves().filter_map(|leaf| leaf.learning_rate()).collect();
    assert_eq!(rates, [0.005, 0.005, 0.05, 0.005]);
}

/// Tensors of one name are one quantity: what is not goes its own way when a rule is replaced.
#[test]
fn moments_of_orthogonal_matrices_are_no_moments_of_gradients() {
    let x = model(&[tensor(1, &[3, 4], DType::F32)]);
    let replaced = |from: Optimiser, to: Optimiser| {
        let mut state = setup(from, &x).expect("a state");
        state.all().replace(to, &x).expect("another rule")[0].kept.clone()
    };
    assert_eq!(
        replaced(Optimiser::new(AdaMuon::new(0.1)), Optimiser::new(AdamW::new(0.1))),
        Vec::<String>::new()
    );
    assert_eq!(
        replaced(Optimiser::new(NorMuon::new(0.1)), Optimiser::new(Muon::new(0.1))),
        ["m", "t"]
    );
}

/// A decay that needs a learning rate is refused at setup, whichever of two rules a parameter gets.
#[test]
fn what_is_decided_on_is_checked() {
    let rule = DecoupledDecay::new(0.1, Muon::new(0.1).with_fallback(AdaDelta::default()));
    says(
        &setup(rule, &network(DType::F32)).expect_err("no learning rate"),
        &["eta"],
    );
}

#[test]
fn a_pattern_that_matches_nothing_is_refused() {
    let model = network(DType::F32);
    let rule = || {
        Muon::new(0.1)
            .with_fallback(AdamW::new(0.1))
            .except(["embed*", "haed*"])
    };
    says(
        &setup(rule(), &model).expect_err("a mistyped pattern"),
        &["\"haed*\" matches no parameter", "embedding.weight"],
    );
    let inside = MixedPrecision::new(
        DType::F64,
        OptimiserChain::new((ClipGlobalNorm::new(1.0), Some(rule()))),
    );
    says(
        &setup(inside, &model).expect_err("a mistyped pattern"),
        &["haed*"],
    );
    let config = r#"{"Fallback": {"inner": "Muon", "fallback": "AdamW", "except": "embed*"}}"#;
    let config: optimisers::config::OptimiserConfig = serde_json::from_str(config).expect("a configuration");
    let error = config.optimiser().expect_err("no list").to_string();
    assert!(
        error.contains("Fallback.except") && error.contains("a list of patterns"),
        "{error}"
    );
    // Not asked about its parameter, it does not guess.
    says(
        &fallback()
            .init(Parameter::from(&tensor(1, &[2, 2], DType::F32)))
            .expect_err("not chosen"),
        &["Fallback(Muon, AdamW)", "`Describer::holds`", "`describe`"],
    );
}

/// As a stack, a kernel is thousands of tiny matrices, whose orthogonal steps are ten times too long.
#[test]
fn t71_a_kernel_of_a_convolution_is_one_matrix() {
    for shape in [[64, 32, 3, 3], [16, 8, 1, 1], [16, 1, 3, 3]] {
        let x = model(&[random(1, &shape, DType::F32, &Device::Cpu)]);
        let refused = |rule: Box<dyn Rule>| {
            let error = setup(rule, &x).expect_err("a kernel");
            is_kind(
                &error,
                ErrorKind::Unsupported,
                &["MatrixForm::Stack", "matrices of", "MatrixForm::Flat"],
            );
        };
        refused(Box::new(Muon::new(0.1)));
        refused(Box::new(NorMuon::new(0.1)));
        refused(Box::new(AdaMuon::new(0.1)));
        refused(Box::new(Muon::new(0.1).with_fallback(AdamW::new(0.1))));
        let flat = Muon {
            matrix: MatrixForm::Flat,
            ..Muon::new(0.1)
        };
        assert!(setup(flat, &x).is_ok());
    }
    let experts = model(&[random(1, &[2, 3, 4, 5], DType::F32, &Device::Cpu)]);
    assert!(setup(Muon::new(0.1), &experts).is_ok());
}
