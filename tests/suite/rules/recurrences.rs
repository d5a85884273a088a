//! Rules of which no other library's trajectory is at hand, against their recurrences written out; and what
//! the others do at the edges.

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AdEMAMix, Adafactor, Adam, AdamW, Adan, AdaptiveClip, Cautious, Centralise, Descent, Engine, GradNoise,
    IntoOptimiser, LAMB, LARS, Lion, MixedPrecision, Momentum, Muon, Optimiser, OptimiserChain, Prodigy,
    RAdam, Rprop, StateTree, Update, setup, update,
};

use support::common::{Grads, bits, grads, model, numbers, random, says, values, var};

/// After each step a rule's parameter is what `by_hand` makes of the one before, the gradient and the number
/// of the step.
pub fn assert_follows(
    rule: impl IntoOptimiser + Clone,
    shape: &[usize],
    mut by_hand: impl FnMut(&mut [f64], &[f64], i32),
) {
    let count = shape.iter().product();
    let tensor = |values: Vec<f64>| Tensor::from_vec(values, shape, &Device::Cpu).expect("a tensor");
    let xs = [Engine::Fused, Engine::Tensors].map(|_| var(&tensor(numbers(1, count))));
    let mut states = [0, 1].map(|i| setup(rule.clone(), &xs[i]).expect("a state"));
    let mut expected = numbers(1, count);
    for t in 1..=12 {
        let gradient = numbers(100 + t as u64, count);
        by_hand(&mut expected, &gradient, t);
        let given = Grads::from([(String::new(), tensor(gradient))]);
        for ((engine, x), state) in [Engine::Fused, Engine::Tensors]
            .into_iter()
            .zip(&xs)
            .zip(&mut states)
        {
            Update::new(state)
                .engine(engine)
                .apply(x, &given)
                .expect("an update");
            for (got, expected) in values(x).into_iter().zip(&expected) {
                assert!(
                    (got - expected).abs() <= 1e-11 * expected.abs().max(1e-2),
                    "{}, step {t}: {got} for {expected}",
                    rule.name()
                );
            }
        }
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// The loop of the authors' code, with the gradient's change of the paper.
#[test]
fn adan() {
    let (eta, (b1, b2, b3), lambda, epsilon) = (0.05, (0.9, 0.8, 0.95), 0.1, 1e-8);
    let mut state: Option<[Vec<f64>; 4]> = None;
    assert_follows(
        Adan {
            eta,
            beta: (b1, b2, b3),
            lambda,
            epsilon,
        },
        &[7],
        |x, g, t| {
            let [m, d, n, last] =
                state.get_or_insert_with(|| [vec![0.0; 7], vec![0.0; 7], vec![0.0; 7], g.to_vec()]);
            for i in 0..x.len() {
                let change = g[i] - last[i];
                m[i] = b1 * m[i] + (1.0 - b1) * g[i];
                d[i] = b2 * d[i] + (1.0 - b2) * change;
                n[i] = b3 * n[i] + (1.0 - b3) * (g[i] + b2 * change).powi(2);
                let denominator = n[i].sqrt() / (1.0 - b3.powi(t)).sqrt() + epsilon;
                let step = eta / (1.0 - b1.powi(t)) * m[i] / denominator
                    + eta * b2 / (1.0 - b2.powi(t)) * d[i] / denominator;
                x[i] = (x[i] - step) / (1.0 + eta * lambda);
                last[i] = g[i];
            }
        },
    );
}

#[test]
fn signum() {
    let (eta, beta, lambda) = (0.05, 0.8, 0.3);
    let mut m = [0.0; 7];
    assert_follows(
        Lion {
            lambda,
            ..Lion::signum(eta, beta)
        },
        &[7],
        |x, g, _| {
            for i in 0..x.len() {
                m[i] = beta * m[i] + (1.0 - beta) * g[i];
                x[i] = x[i] * (1.0 - eta * lambda) - eta * m[i].signum();
            }
        },
    );
}

/// With λ = 0 AdamW is Adam, without the corrections too.
#[test]
fn moments_without_corrections() {
    let (eta, beta, epsilon, bias_correction) = (0.05, (0.8, 0.95), 1e-6, false);
    let by_hand = |lambda: f64| {
        let [mut m, mut v] = [(); 2].map(|()| vec![0.0; 5]);
        move |x: &mut [f64], g: &[f64], _: i32| {
            for i in 0..x.len() {
                m[i] = 0.8 * m[i] + 0.2 * g[i];
                v[i] = 0.95 * v[i] + 0.05 * g[i] * g[i];
                x[i] -= eta * (m[i] / (v[i].sqrt() + epsilon) + lambda * x[i]);
            }
        }
    };
    assert_follows(
        Adam {
            eta,
            beta,
            epsilon,
            bias_correction,
        },
        &[5],
        by_hand(0.0),
    );
    let adamw = AdamW {
        eta,
        beta,
        epsilon,
        bias_correction,
        lambda: 0.3,
        couple: true,
    };
    assert_follows(adamw, &[5], by_hand(0.3));
    // A β next to 1 has no correction either.
    let beta = (1.0 - f64::EPSILON / 2.0, 0.95);
    assert_follows(
        Adam {
            eta: 1e15,
            beta,
            epsilon,
            bias_correction,
        },
        &[5],
        {
            let [mut m, mut v] = [(); 2].map(|()| vec![0.0; 5]);
            move |x, g, _| {
                for i in 0..x.len() {
                    m[i] = beta.0 * m[i] + (1.0 - beta.0) * g[i];
                    v[i] = 0.95 * v[i] + 0.05 * g[i] * g[i];
                    x[i] -= 1e15 * m[i] / (v[i].sqrt() + epsilon);
                }
            }
        },
    );
}

/// Up to 4 the factor of a step is no real number.
#[test]
fn a_threshold_of_radam_is_at_least_4() {
    let x = model(&[matrix(2, 2)]);
    for threshold in [3.999, -5.0, f64::NAN, f64::INFINITY] {
        let error = setup(
            RAdam {
                threshold,
                ..RAdam::new(0.1)
            },
            &x,
        )
        .expect_err("no such threshold");
        says(&error, &["threshold", "a finite number of 4 or more"]);
    }
}

/// The half-life of the slow mean, in steps, grows in proportion to t.
#[test]
fn the_warm_up_of_ademamix() {
    let rule = AdEMAMix {
        beta: (0.8, 0.95, 0.99),
        alpha: 4.0,
        lambda: 0.2,
        warmup: 8,
        ..AdEMAMix::new(0.05)
    };
    let half_life = |beta: f64| 0.5f64.ln() / beta.ln() - 1.0;
    let [mut m, mut v, mut slow] = [(); 3].map(|()| vec![0.0; 5]);
    assert_follows(rule, &[5], |x, g, t| {
        let part = f64::from(t.min(8)) / 8.0;
        let steps = (1.0 - part) * half_life(0.8) + part * half_life(0.99);
        let (alpha, b3) = (4.0 * part, (0.5f64.ln() / (steps + 1.0)).exp());
        for i in 0..x.len() {
            m[i] = 0.8 * m[i] + 0.2 * g[i];
            v[i] = 0.95 * v[i] + 0.05 * g[i] * g[i];
            slow[i] = b3 * slow[i] + (1.0 - b3) * g[i];
            let root = (v[i] / (1.0 - 0.95f64.powi(t))).sqrt() + 1e-8;
            x[i] -= 0.05 * ((m[i] / (1.0 - 0.8f64.powi(t)) + alpha * slow[i]) / root + 0.2 * x[i]);
        }
    });
    // A β of 0 has no logarithm.
    let rule = AdEMAMix {
        beta: (0.0, 0.9, 0.9),
        warmup: 3,
        ..AdEMAMix::new(0.1)
    };
    let x = model(&[Tensor::new(&[1.0, -1.0], &Device::Cpu).expect("a tensor")]);
    let mut state = setup(rule, &x).expect("a state");
    update(
        &mut state,
        &x,
        &grads([Tensor::new(&[1.0, 2.0], &Device::Cpu).ok()]),
    )
    .expect("an update");
    assert!(values(&x["0"]).into_iter().all(f64::is_finite));
}

#[test]
fn cautious_steps() {
    let mut velocity = vec![0.0; 9];
    assert_follows(
        Cautious::new(Momentum {
            rho: 0.95,
            ..Momentum::new(0.1)
        }),
        &[9],
        |x, g, _| {
            for (v, g) in velocity.iter_mut().zip(g) {
                *v = 0.95 * *v + 0.1 * g;
            }
            let agree: Vec<bool> = velocity.iter().zip(g).map(|(v, g)| v * g > 0.0).collect();
            let mean = agree.iter().filter(|&&agree| agree).count() as f64 / agree.len() as f64;
            for ((x, v), agree) in x.iter_mut().zip(&velocity).zip(agree) {
                *x -= if agree { v / mean } else { 0.0 };
            }
        },
    );
}

/// A mask of nothing, a gradient whose product with the step underflows, and NaN.
#[test]
fn cautious_steps_at_the_edges() {
    let run = |gradients: &[[f32; 2]]| {
        let x = var(&Tensor::zeros(2, DType::F32, &Device::Cpu).expect("zeros"));
        let mut state = setup(
            Cautious::new(Momentum {
                rho: 0.5,
                ..Momentum::new(1.0)
            }),
            &x,
        )
        .expect("a state");
        for gradient in gradients {
            let gradient = Tensor::new(gradient, &Device::Cpu).expect("a gradient");
            update(&mut state, &x, &Grads::from([(String::new(), gradient)])).expect("an update");
        }
        values(&x)
    };
    assert_eq!(
        run(&[[1.0, -1.0], [-0.25, 0.25]]),
        [-1.0, 1.0],
        "where nothing agrees nothing moves"
    );
    assert_eq!(run(&[[1e-30, 0.0]]), [-2.0 * f64::from(1e-30f32), 0.0]);
    let with_nan = run(&[[f32::NAN, 1.0]]);
    assert!(with_nan[0].is_nan() && with_nan[1] == -1.0, "{with_nan:?}");
}

#[test]
fn centralised_gradients() {
    let rule = OptimiserChain::new((Centralise::new(0.5), Descent::new(0.1)));
    assert_follows(rule.clone(), &[3, 2, 5], |x, g, _| {
        for (x, g) in x.chunks_mut(10).zip(g.chunks(10)) {
            let mean = g.iter().sum::<f64>() / 10.0;
            x.iter_mut()
                .zip(g)
                .for_each(|(x, g)| *x -= 0.1 * (g - 0.5 * mean));
        }
    });
    for shape in [&[6][..], &[]] {
        assert_follows(rule.clone(), shape, |x, g, _| {
            x.iter_mut().zip(g).for_each(|(x, g)| *x -= 0.1 * g)
        });
    }
}

#[test]
fn adaptive_clipping() {
    let rule = |omega| {
        OptimiserChain::new((
            AdaptiveClip {
                epsilon: 0.5,
                ..AdaptiveClip::new(omega)
            },
            Descent::new(0.1),
        ))
    };
    for (shape, unit) in [(&[4, 3, 2][..], 6), (&[5, 1], 1), (&[7], 7), (&[], 1)] {
        assert_follows(rule(0.8), shape, |x, g, _| {
            for (x, g) in x.chunks_mut(unit).zip(g.chunks(unit)) {
                let factor = (0.8 * norm(x).max(0.5) / norm(g)).min(1.0);
                x.iter_mut().zip(g).for_each(|(x, g)| *x -= 0.1 * factor * g);
            }
        });
    }
    // Squares of these leave the range of f32.
    for size in [1e-25f32, 1e25] {
        let x = var(
            &(Tensor::new(&[[3f32, 4.0], [0.0, 0.0]], &Device::Cpu).expect("a tensor") * f64::from(size))
                .expect("a product"),
        );
        let before = values(&x);
        let mut state = setup(
            OptimiserChain::new((
                AdaptiveClip {
                    epsilon: 0.0,
                    ..AdaptiveClip::new(0.5)
                },
                Descent::new(1.0),
            )),
            &x,
        )
        .expect("a state");
        let gradient = (Tensor::new(&[[0f32, 10.0], [1.0, 0.0]], &Device::Cpu).expect("a tensor")
            * f64::from(size))
        .expect("a product");
        update(&mut state, &x, &Grads::from([(String::new(), gradient)])).expect("an update");
        let moved: Vec<f64> = before
            .iter()
            .zip(values(&x))
            .map(|(before, x)| (before - x) / f64::from(size))
            .collect();
        assert!(
            moved[0] == 0.0 && (moved[1] - 2.5).abs() < 1e-6 && moved[2..] == [0.0, 0.0],
            "{moved:?}"
        );
    }
}

/// The noise alone, by step, of two parameters of one shape.
fn noise(rule: GradNoise, threads: usize) -> Vec<[Vec<f64>; 2]> {
    const COUNT: usize = 30_000;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .expect("a pool");
    let zeros = || Tensor::zeros(COUNT, DType::F32, &Device::Cpu).expect("zeros");
    let model = model(&[zeros(), zeros()]);
    let mut state = setup(rule, &model).expect("a state");
    let step = |_| {
        let before = ["0", "1"].map(|path| values(&model[path]));
        pool.install(|| update(&mut state, &model, &grads([Some(zeros()), Some(zeros())])))
            .expect("an update");
        [0, 1].map(|i| {
            before[i]
                .iter()
                .zip(values(&model[["0", "1"][i]]))
                .map(|(before, x)| before - x)
                .collect()
        })
    };
    (0..4).map(step).collect()
}

#[test]
fn gradient_noise_is_normal_and_fades() {
    let rule = GradNoise {
        sigma: 0.5,
        gamma: 0.55,
        seed: 3,
    };
    let by_step = noise(rule.clone(), 1);
    for (t, of_both) in (1..).zip(&by_step) {
        for noise in of_both {
            let mean = |f: &dyn Fn(f64) -> f64| noise.iter().map(|&z| f(z)).sum::<f64>() / noise.len() as f64;
            let variance = 0.25 / f64::from(t).powf(0.55);
            let (got_mean, got_variance) = (mean(&|z| z), mean(&|z| z * z));
            assert!(
                got_mean.abs() < 0.02 && (got_variance / variance - 1.0).abs() < 0.05,
                "step {t}: {got_mean}, {got_variance}"
            );
            let within = mean(&|z| f64::from(u8::from(z.abs() < variance.sqrt())));
            assert!(
                (within - 0.6827).abs() < 0.02,
                "step {t}: {within} within a standard deviation"
            );
        }
        assert_ne!(of_both[0], of_both[1], "parameters have their own noise");
    }
    assert_eq!(noise(rule.clone(), 3), by_step);
    assert_ne!(
        noise(
            GradNoise {
                seed: 4,
                ..rule.clone()
            },
            1
        )[0],
        by_step[0]
    );
    assert_eq!(
        noise(GradNoise { sigma: 0.0, ..rule }, 1)[0][0],
        vec![0.0; 30_000]
    );
}

/// What one step from zero takes off, as a matrix of f64.
fn first_step(rule: impl IntoOptimiser, gradient: &Tensor) -> Tensor {
    let x = var(&gradient.zeros_like().expect("zeros"));
    let mut state = setup(rule, &x).expect("a state");
    update(&mut state, &x, &Grads::from([(String::new(), gradient.clone())])).expect("an update");
    x.as_detached_tensor().neg().expect("a step")
}

fn close(a: &Tensor, b: &Tensor) -> bool {
    a.elem_count() == b.elem_count()
        && values(a)
            .iter()
            .zip(values(b))
            .all(|(a, b)| (a - b).abs() < 1e-12)
}

fn matrix(rows: usize, columns: usize) -> Tensor {
    Tensor::from_vec(numbers(5, rows * columns), (rows, columns), &Device::Cpu).expect("a matrix")
}

/// The singular values come near to 1 from wherever they are; more steps make no difference to what is there
/// already, up to the iteration's wobble.
#[test]
fn muon_orthogonalises() {
    for (rows, columns) in [(4, 9), (6, 6), (9, 4), (1, 5)] {
        let step = first_step(
            Muon {
                ns_steps: 8,
                ..Muon::new(1.0)
            },
            &matrix(rows, columns),
        );
        let step = (step / (rows as f64 / columns as f64).max(1.0).sqrt()).expect("the orthogonal part");
        let wide = if rows > columns {
            step.t().expect("transposed")
        } else {
            step
        };
        let square = wide
            .matmul(&wide.t().expect("transposed"))
            .expect("a product")
            .to_vec2::<f64>()
            .expect("numbers");
        for (i, row) in square.iter().enumerate() {
            for (j, &value) in row.iter().enumerate() {
                let expected = if i == j { 0.4..1.5 } else { -0.4..0.4 };
                assert!(expected.contains(&value), "{rows} by {columns}: {square:?}");
            }
        }
    }
}

#[test]
fn muon_takes_a_matrix_either_way() {
    let rule = Muon::new(0.1);
    let wide = matrix(4, 6);
    let tall = wide.t().and_then(|tall| tall.contiguous()).expect("transposed");
    let longer =
        (first_step(rule.clone(), &wide).t().expect("transposed") * 1.5f64.sqrt()).expect("a product");
    assert!(close(
        &first_step(rule.clone(), &tall),
        &longer.contiguous().expect("a copy")
    ));
    // The decay is apart from the rest.
    let decaying = MixedPrecision::new(
        DType::F64,
        Muon {
            lambda: 0.5,
            ..Muon::new(0.1)
        },
    );
    let x = var(&Tensor::ones((2, 2), DType::F64, &Device::Cpu).expect("ones"));
    let mut state = setup(decaying, &x).expect("a state");
    update(
        &mut state,
        &x,
        &Grads::from([(String::new(), x.zeros_like().expect("zeros"))]),
    )
    .expect("an update");
    assert_eq!(values(&x), [0.95; 4]);
}

/// For a vector Adafactor keeps the whole second moment.
#[test]
fn adafactor_of_a_vector() {
    let rms = |x: &[f64]| norm(x) / (x.len() as f64).sqrt();
    let mut v = [0.0; 6];
    assert_follows(
        Adafactor {
            eta: 0.3,
            lambda: 0.1,
            d: 0.9,
            epsilon: (1e-15, 2.0),
            ..Adafactor::default()
        },
        &[6],
        |x, g, t| {
            let t = f64::from(t);
            let (weight, alpha) = (t.powf(-0.8), rms(x).max(2.0) * t.sqrt().recip().min(0.3));
            for (v, g) in v.iter_mut().zip(g) {
                *v = (1.0 - weight) * *v + weight * g * g;
            }
            let u: Vec<f64> = v.iter().zip(g).map(|(v, g)| g / v.sqrt()).collect();
            let clip = (rms(&u) / 0.9).max(1.0);
            x.iter_mut()
                .zip(&u)
                .for_each(|(x, u)| *x = *x * (1.0 - 0.3 * 0.1) - alpha / clip * u);
        },
    );
}

/// More than two dimensions are a stack of matrices, each with rows and columns of its own.
#[test]
fn adafactor_of_a_stack() {
    let (mut r, mut c) = (vec![[0.0; 3]; 2], vec![[0.0; 4]; 2]);
    assert_follows(
        Adafactor {
            epsilon: (1e-15, 5.0),
            ..Adafactor::new(0.2)
        },
        &[2, 3, 4],
        |x, g, t| {
            let weight = f64::from(t).powf(-0.8);
            let mut u = Vec::new();
            for (s, g) in g.chunks(12).enumerate() {
                let square = |i: usize, j: usize| g[4 * i + j] * g[4 * i + j];
                for (i, row) in r[s].iter_mut().enumerate() {
                    *row += weight * ((0..4).map(|j| square(i, j)).sum::<f64>() / 4.0 - *row);
                }
                for (j, column) in c[s].iter_mut().enumerate() {
                    *column += weight * ((0..3).map(|i| square(i, j)).sum::<f64>() / 3.0 - *column);
                }
                let mean = r[s].iter().sum::<f64>() / 3.0;
                u.extend(
                    g.iter()
                        .enumerate()
                        .map(|(k, g)| g / (r[s][k / 4] * c[s][k % 4] / mean).sqrt()),
                );
            }
            let clip = (norm(&u) / 24f64.sqrt()).max(1.0);
            let alpha = 5.0 * 0.2f64.min(f64::from(t).sqrt().recip());
            x.iter_mut().zip(u).for_each(|(x, u)| *x -= alpha / clip * u);
        },
    );
    let state = setup(
        Adafactor::default(),
        &var(&Tensor::zeros((100, 50, 40), DType::BF16, &Device::Cpu).expect("zeros")),
    );
    assert_eq!(state.expect("a state").bytes(), 100 * 4 * (50 + 40));
}

/// A parameter of zeros has no size that a step could be a part of; a step of zeros no direction.
#[test]
fn trust_ratios_of_nothing() {
    let gradient = Tensor::new(&[3.0, -4.0], &Device::Cpu).expect("a gradient");
    let adam = first_step(
        Adam {
            epsilon: 1e-6,
            ..Adam::new(0.1)
        },
        &gradient,
    );
    assert!(close(&first_step(LAMB::new(0.1), &gradient), &adam));
    assert!(close(
        &first_step(LARS::new(0.1), &gradient),
        &first_step(Momentum::new(0.1), &gradient)
    ));
    for rule in [Optimiser::new(LAMB::new(0.1)), Optimiser::new(LARS::new(0.1))] {
        let x = var(&gradient);
        let mut state = setup(rule, &x).expect("a state");
        update(
            &mut state,
            &x,
            &Grads::from([(String::new(), gradient.zeros_like().expect("zeros"))]),
        )
        .expect("an update");
        assert_eq!(bits(&x), bits(&gradient));
    }
}

/// Norms are those of the master, and of what the chain before made of the gradient.
#[test]
fn trust_ratios_inside_mixed_precision_and_chains() {
    let x = var(&Tensor::new(&[3f32, 4.0], &Device::Cpu)
        .and_then(|x| x.to_dtype(DType::BF16))
        .expect("a parameter"));
    let chain = OptimiserChain::new((
        Momentum::new(1.0),
        LARS {
            trust: 0.5,
            rho: 0.0,
            ..LARS::new(1.0)
        },
    ));
    let mut state = setup(MixedPrecision::new(DType::F64, chain), &x).expect("a state");
    update(
        &mut state,
        &x,
        &Grads::from([(
            String::new(),
            Tensor::new(&[0.0, 10.0], &Device::Cpu).expect("a gradient"),
        )]),
    )
    .expect("an update");
    let master = state
        .leaf("")
        .and_then(|leaf| leaf.tensor("master").ok())
        .expect("a master");
    assert_eq!(values(&master), [3.0, 1.5]);
}

/// The sign is remembered, so a product of gradients that underflows is no zero.
#[test]
fn rprop_sees_the_sign_of_tiny_gradients() {
    let x = var(&Tensor::zeros(3, DType::F32, &Device::Cpu).expect("zeros"));
    let mut state = setup(
        Rprop {
            ell: (0.5, 2.0),
            ..Rprop::new(1.0)
        },
        &x,
    )
    .expect("a state");
    for gradient in [
        [1e-30f32, 1.0, 0.0],
        [1e-30, -1.0, 0.0],
        [1e-30, -1.0, 1.0],
        [-1e-30, -1.0, 1.0],
    ] {
        let gradient = Tensor::new(&gradient, &Device::Cpu).expect("a gradient");
        update(&mut state, &x, &Grads::from([(String::new(), gradient)])).expect("an update");
    }
    // Steps 1, 2, 4, none; 1, none, 1/2, 1; none, none, 1, 2.
    assert_eq!(values(&x), [-7.0, -1.0 + 0.5 + 1.0, -3.0]);
}

/// Decays that follow the learning rate are those of AdamW.
#[test]
fn decoupled_decays_are_alike() {
    let zero = Tensor::zeros(2, DType::F64, &Device::Cpu).expect("zeros");
    let start = Tensor::new(&[1.0, -2.0], &Device::Cpu).expect("a tensor");
    let run = |rule: Optimiser| {
        let x = var(&start);
        let mut state = setup(rule, &x).expect("a state");
        update(&mut state, &x, &Grads::from([(String::new(), zero.clone())])).expect("an update");
        values(&x)
    };
    let expected = run(Optimiser::new(AdamW {
        lambda: 0.5,
        ..AdamW::new(0.1)
    }));
    let rules: [Optimiser; 3] = [
        Optimiser::new(Lion {
            lambda: 0.5,
            ..Lion::new(0.1)
        }),
        Optimiser::new(AdEMAMix {
            lambda: 0.5,
            ..AdEMAMix::new(0.1)
        }),
        Optimiser::new(Adafactor {
            lambda: 0.5,
            ..Adafactor::new(0.1)
        }),
    ];
    for rule in rules {
        let name = rule.name();
        assert_eq!(run(rule), expected, "{name}");
    }
}

/// One estimate for the whole model: a model in two tensors is the model in one, and a tensor without a
/// gradient hears of it.
#[test]
fn an_estimate_is_of_the_whole_model() {
    let rule = Prodigy {
        estimate: 1e-2,
        ..Prodigy::default()
    };
    let whole = |seed| random(seed, &[11], DType::F64, &Device::Cpu);
    let halves =
        |seed| [whole(seed).narrow(0, 0, 4), whole(seed).narrow(0, 4, 7)].map(|half| half.expect("a half"));
    let (one, two) = (model(&[whole(0)]), model(&halves(0)));
    let mut states = [&one, &two].map(|model| setup(rule.clone(), model).expect("a state"));
    let estimate =
        |state: &StateTree| -> Vec<f64> { state.leaves().map(|leaf| leaf.numbers()[0].1).collect() };
    for call in 1..=20 {
        update(&mut states[0], &one, &grads([Some(whole(call))])).expect("an update");
        update(&mut states[1], &two, &grads(halves(call).map(Some))).expect("an update");
        let parts = [values(&two["0"]), values(&two["1"])].concat();
        for (whole, part) in values(&one["0"]).into_iter().zip(parts) {
            assert!(
                (whole - part).abs() <= 1e-12 * whole.abs().max(1e-3),
                "call {call}: {whole} and {part}"
            );
        }
        let [of_whole, of_parts] = [estimate(&states[0]), estimate(&states[1])];
        assert!(
            of_parts.iter().all(|d| (d / of_whole[0] - 1.0).abs() < 1e-12),
            "{of_parts:?} for {of_whole:?}"
        );
    }
    let before = bits(&two["1"]);
    update(&mut states[1], &two, &grads([Some(halves(30)[0].clone()), None])).expect("an update");
    assert_eq!(bits(&two["1"]), before);
    let estimates = estimate(&states[1]);
    assert_eq!(estimates[0], estimates[1]);
}

/// torch limits the step size in every step, also where no sign has changed.
#[test]
fn rprop_keeps_every_step_size_within_its_bounds() {
    let run = |rule: Rprop, gradients: &[f32], change: &dyn Fn(&mut StateTree, usize)| {
        let x = var(&Tensor::zeros(1, DType::F32, &Device::Cpu).expect("zeros"));
        let mut state = setup(rule, &x).expect("a state");
        let mut step = |(call, gradient): (usize, &f32)| {
            change(&mut state, call);
            let gradient = Tensor::new(&[*gradient], &Device::Cpu).expect("a gradient");
            update(&mut state, &x, &Grads::from([(String::new(), gradient)])).expect("an update");
            values(&x)[0]
        };
        gradients.iter().enumerate().map(&mut step).collect::<Vec<f64>>()
    };
    let same = |_: &mut StateTree, _: usize| {};
    assert_eq!(run(Rprop::new(100.0), &[1.0], &same), [-50.0]);
    assert_eq!(run(Rprop::new(0.0), &[1.0], &same), [-f64::from(1e-6f32)]);
    let falling = |state: &mut StateTree, call: usize| {
        if call == 1 {
            state.all().adjust_field("gamma2", 0.5).expect("a bound");
        }
    };
    // The sign changes, no step; then γ₂ limits a step size that was 10.
    let ell = (0.5, 2.0);
    let moved = run(
        Rprop {
            ell,
            ..Rprop::new(10.0)
        },
        &[1.0, -1.0, -1.0, -1.0],
        &falling,
    );
    assert_eq!(moved, [-10.0, -10.0, -9.5, -9.0]);
}
