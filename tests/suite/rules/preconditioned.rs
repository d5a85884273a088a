//! Rules of matrices: `SOAP`, `Shampoo`, `GaLore` and `APOLLO`. Their trajectories are in `goldens`.

use candle_core::{DType, Device, Tensor};
use optimisers::{
    APOLLO, AdamW, Adjust, Engine, ErrorKind, GaLore, IntoOptimiser, MatrixForm, Rule, SOAP, Shampoo,
    StateTree, setup, update,
};

use support::common::{
    Snapshot, assert_same, bits, engines, grads, model, numbers, rounding_to_nearest, says, snapshot, tensor,
    trajectory, values, var,
};

/// One of each, which acts on the smallest matrices and changes bases, roots and projections in every second
/// step.
fn all() -> Vec<Box<dyn Rule>> {
    vec![
        Box::new(SOAP {
            interval: 2,
            lambda: 0.1,
            ..SOAP::new(0.05)
        }),
        Box::new(SOAP {
            interval: 2,
            max_size: 3,
            ..SOAP::new(0.05)
        }),
        Box::new(Shampoo {
            interval: 2,
            lambda: 0.1,
            ..Shampoo::new(0.05)
        }),
        Box::new(Shampoo {
            interval: 1,
            graft: false,
            beta: (0.5, 1.0),
            epsilon: (1e-4, 1e-8),
            ..Shampoo::new(0.05)
        }),
        Box::new(Shampoo {
            interval: 2,
            max_size: 3,
            ..Shampoo::new(0.05)
        }),
        Box::new(GaLore {
            rank: 2,
            interval: 2,
            lambda: 0.1,
            ..GaLore::new(0.05)
        }),
        Box::new(APOLLO {
            rank: 2,
            interval: 2,
            lambda: 0.1,
            ..APOLLO::new(0.05)
        }),
        Box::new(APOLLO {
            interval: 2,
            ..APOLLO::mini(0.05)
        }),
    ]
}

const SHAPES: [&[usize]; 6] = [&[4, 4], &[6, 3], &[3, 5], &[2, 3, 4], &[5], &[3, 1]];

fn tensors(seed: u64, shapes: &[&[usize]], dtype: DType) -> Vec<Tensor> {
    shapes
        .iter()
        .enumerate()
        .map(|(i, shape)| tensor(seed + 20 * i as u64, shape, dtype))
        .collect()
}

fn run(engine: Engine, optimiser: impl IntoOptimiser, dtype: DType) -> Vec<Snapshot> {
    let steps: Vec<_> = (1..=6)
        .map(|call| grads(tensors(call, &SHAPES, dtype).into_iter().map(Some)))
        .collect();
    trajectory(engine, optimiser, &tensors(0, &SHAPES, dtype), &steps)
}

#[test]
fn every_engine_has_the_same_bits() {
    for dtype in [DType::BF16, DType::F32, DType::F64] {
        for rule in all() {
            for optimiser in rounding_to_nearest(dtype, rule) {
                let expected = run(Engine::Fused, optimiser.clone(), dtype);
                for engine in engines() {
                    assert_same(
                        &run(engine, optimiser.clone(), dtype),
                        &expected,
                        (&optimiser, engine, dtype),
                    );
                }
            }
        }
    }
}

/// The parameter after each of these gradients.
fn path_of(optimiser: impl IntoOptimiser, x0: &Tensor, gradients: &[Tensor]) -> Vec<Tensor> {
    let x = var(x0);
    let mut state = setup(optimiser, &x).expect("a state");
    let step = |gradient: &Tensor| {
        update(&mut state, &x, &[("", gradient.clone())]).expect("an update");
        x.as_tensor().copy().expect("a copy")
    };
    gradients.iter().map(step).collect()
}

/// A stack is its matrices one by one. Projections are of a place in a stack, so of those only the first
/// matrix is compared.
#[test]
fn a_stack_is_its_matrices() {
    let (x, gradients) = (
        tensor(0, &[3, 4, 4], DType::F64),
        (1..6)
            .map(|seed| tensor(seed, &[3, 4, 4], DType::F64))
            .collect::<Vec<_>>(),
    );
    for rule in all() {
        let projected = rule.field("rank").is_some();
        let whole = path_of(rule.clone(), &x, &gradients);
        for i in 0..if projected { 1 } else { 3 } {
            let part = |tensor: &Tensor| tensor.get(i).expect("a matrix");
            let alone = path_of(
                rule.clone(),
                &part(&x),
                &gradients.iter().map(part).collect::<Vec<_>>(),
            );
            for (whole, alone) in whole.iter().zip(&alone) {
                assert_eq!(bits(&part(whole)), bits(alone), "{rule:?}");
            }
        }
    }
}

/// A basis belongs to the gradients, not to the axes: in turned axes SOAP and Shampoo make the turned steps.
/// This also is why no sign of an eigenvector matters: a reflection of one axis is among the turns.
#[test]
fn steps_turn_with_the_axes() {
    let n = 4;
    // A turn of the first two axes, and a reflection of the last.
    let (sine, cosine) = 0.7f64.sin_cos();
    let turn = vec![
        cosine, -sine, 0.0, 0.0, sine, cosine, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, -1.0,
    ];
    let turn = Tensor::from_vec(turn, (n, n), &Device::Cpu).expect("a turn");
    let turned = |x: &Tensor| turn.matmul(x).expect("a product");
    let (x, gradients) = (
        tensor(0, &[n, n], DType::F64),
        (1..9)
            .map(|seed| tensor(seed, &[n, n], DType::F64))
            .collect::<Vec<_>>(),
    );
    let rules: [Box<dyn Rule>; 2] = [
        Box::new(SOAP {
            interval: 2,
            ..SOAP::new(0.05)
        }),
        Box::new(Shampoo {
            interval: 2,
            graft: false,
            epsilon: (1e-3, 0.0),
            ..Shampoo::new(0.05)
        }),
    ];
    for rule in rules {
        let straight = path_of(rule.clone(), &x, &gradients);
        let other = path_of(
            rule.clone(),
            &turned(&x),
            &gradients.iter().map(turned).collect::<Vec<_>>(),
        );
        // The first step is none, or Adam's, which is one of the axes: what follows is compared.
        let moved = |path: &[Tensor], t: usize| (&path[t] - &path[t - 1]).expect("a step");
        for t in 1..gradients.len() {
            for (got, expected) in values(&moved(&other, t))
                .iter()
                .zip(values(&turned(&moved(&straight, t))))
            {
                assert!(
                    (got - expected).abs() < 1e-12,
                    "{}, step {t}: {got} for {expected}",
                    rule.name()
                );
            }
        }
    }
}

/// What the state takes, as the documentation of the rules has it.
#[test]
fn state_has_the_size_that_is_said() {
    let bytes = |rule: Box<dyn Rule>, shape: &[usize]| {
        setup(rule, &model(&[tensor(1, shape, DType::F32)]))
            .expect("a state")
            .bytes()
    };
    let (soap, shampoo) = (
        |max_size| SOAP {
            max_size,
            ..SOAP::default()
        },
        |max_size| Shampoo {
            max_size,
            ..Shampoo::default()
        },
    );
    for (max_size, expected) in [
        (1024, 4 * (2 * 48 + 2 * (36 + 64))),
        (6, 4 * (2 * 48 + 2 * 36)),
        (5, 8 * 48),
    ] {
        assert_eq!(bytes(Box::new(soap(max_size)), &[6, 8]), expected);
        assert_eq!(bytes(Box::new(shampoo(max_size)), &[6, 8]), expected);
    }
    assert_eq!(
        bytes(Box::new(soap(1024)), &[3, 6, 8]),
        3 * 4 * (2 * 48 + 2 * (36 + 64))
    );
    assert_eq!(
        bytes(
            Box::new(GaLore {
                rank: 2,
                ..GaLore::default()
            }),
            &[6, 8]
        ),
        4 * 2 * 2 * 8
    );
    assert_eq!(
        bytes(
            Box::new(APOLLO {
                rank: 2,
                ..APOLLO::default()
            }),
            &[8, 6]
        ),
        4 * (2 * 2 * 8 + 1)
    );
    assert_eq!(
        bytes(Box::new(APOLLO::mini(0.1)), &[3, 6, 8]),
        4 * 3 * (2 * 8 + 1)
    );
    for rule in all() {
        assert_eq!(bytes(rule.clone(), &[5]), 4 * 2 * 5, "{rule:?}");
    }
}

/// A rank that has nothing of a parameter knows the names of its state all the same.
#[test]
fn names_of_tensors_follow_from_the_number_of_dimensions() {
    for rule in all() {
        for shapes in [
            [&[4, 4][..], &[9, 2], &[0, 0]],
            [&[2, 3, 4], &[1, 9, 9], &[0, 0, 0]],
            [&[5], &[100], &[0]],
        ] {
            let state = setup(
                rule.clone(),
                &model(&shapes.map(|shape| tensor(1, shape, DType::F32))),
            )
            .expect("a state");
            let names: Vec<_> = state.leaves().map(|leaf| leaf.tensor_names()).collect();
            assert!(
                names.iter().all(|other| *other == names[0]),
                "{names:?} of {rule:?}"
            );
        }
    }
}

/// Another reading of the same parameter has other matrices. What is not projected or turned is the same in
/// either.
#[test]
fn another_form_is_refused() {
    for rule in all() {
        let x = model(&[tensor(1, &[3, 4, 5], DType::F32)]);
        let mut state = setup(rule.clone(), &x).expect("a state");
        let step = |state: &mut StateTree| {
            update(state, &x, &grads([Some(tensor(2, &[3, 4, 5], DType::F32))])).expect("an update")
        };
        step(&mut state);
        let before = snapshot(&x, &state);
        let is_of_matrices = |name: &str| {
            let dims = state
                .leaf("0")
                .and_then(|leaf| leaf.tensor(name).ok())
                .map(|tensor| tensor.dims().to_vec())
                .unwrap_or_default();
            dims != [3, 4, 5] && dims.iter().product::<usize>() > 0
        };
        let has_matrices = state
            .leaf("0")
            .expect("the leaf")
            .tensor_names()
            .iter()
            .any(|name| is_of_matrices(name));
        match state.all().adjust_field("matrix", MatrixForm::Flat) {
            Ok(()) => assert!(!has_matrices, "{rule:?}"),
            Err(error) => {
                assert_eq!(
                    (error.kind(), error.path()),
                    (ErrorKind::Argument, Some("0")),
                    "{error}"
                );
                assert_eq!(snapshot(&x, &state), before);
            }
        }
        step(&mut state);
    }
}

/// Without matrices these rules are AdamW, SOAP from the second gradient on.
#[test]
fn vectors_have_adams_step() {
    let (x, gradients) = (
        tensor(0, &[5], DType::F64),
        (1..6)
            .map(|seed| tensor(seed, &[5], DType::F64))
            .collect::<Vec<_>>(),
    );
    let adam = |beta| AdamW {
        beta,
        lambda: 0.1,
        ..AdamW::new(0.05)
    };
    let rules: [(Box<dyn Rule>, _, usize); 4] = [
        (
            Box::new(SOAP {
                lambda: 0.1,
                ..SOAP::new(0.05)
            }),
            (0.95, 0.95),
            1,
        ),
        (
            Box::new(Shampoo {
                lambda: 0.1,
                ..Shampoo::new(0.05)
            }),
            (0.9, 0.999),
            0,
        ),
        (
            Box::new(GaLore {
                lambda: 0.1,
                ..GaLore::new(0.05)
            }),
            (0.9, 0.999),
            0,
        ),
        (
            Box::new(APOLLO {
                lambda: 0.1,
                ..APOLLO::new(0.05)
            }),
            (0.9, 0.999),
            0,
        ),
    ];
    for (rule, beta, skipped) in rules {
        let got = path_of(rule.clone(), &x, &gradients);
        let expected = path_of(adam(beta), &x, &gradients[skipped..]);
        assert!(skipped == 0 || bits(&got[0]) == bits(&x));
        for (got, expected) in got[skipped..].iter().zip(&expected) {
            assert!(
                values(got)
                    .iter()
                    .zip(values(expected))
                    .all(|(got, expected)| (got - expected).abs() < 1e-14),
                "{rule:?}"
            );
        }
    }
}

/// Gradients of zeros, of rank one, of any size: parameters and state stay finite. What is not finite comes
/// out as such, and ends.
#[test]
fn any_gradient_is_borne() {
    let shape = [4, 6];
    let outer = || {
        let column = tensor(7, &[4, 1], DType::F32);
        column.matmul(&tensor(8, &[1, 6], DType::F32)).expect("a product")
    };
    let of = |scale: f64| (tensor(9, &shape, DType::F32) * scale).expect("a gradient");
    let zeros = Tensor::zeros(&shape, DType::F32, &Device::Cpu).expect("zeros");
    let one_row = Tensor::cat(
        &[
            &of(1.0).narrow(0, 0, 1).expect("a row"),
            &zeros.narrow(0, 1, 3).expect("rows"),
        ],
        0,
    )
    .expect("rows");
    let gradients = [
        zeros.clone(),
        zeros,
        outer(),
        one_row,
        of(1e-15),
        of(1e15),
        of(1.0),
        of(1e-12),
        of(1e12),
        of(1.0),
    ];
    for rule in all() {
        let x = tensor(0, &shape, DType::F32);
        for first in 0..gradients.len() {
            let order: Vec<Tensor> = gradients[first..]
                .iter()
                .chain(&gradients[..first])
                .cloned()
                .collect();
            let model = model(std::slice::from_ref(&x));
            let mut state = setup(rule.clone(), &model).expect("a state");
            for gradient in order {
                update(&mut state, &model, &grads([Some(gradient)])).expect("an update");
            }
            for (name, numbers) in snapshot(&model, &state) {
                assert!(
                    numbers.iter().all(|&bits| f64::from_bits(bits).is_finite()),
                    "{name} of {rule:?} from gradient {first} on"
                );
            }
        }
        for bad in [f32::NAN, f32::INFINITY] {
            let mut numbers: Vec<f32> = values(&of(1.0)).into_iter().map(|x| x as f32).collect();
            numbers[5] = bad;
            let bad = Tensor::from_vec(numbers, &shape, &Device::Cpu).expect("a gradient");
            for count in [0, 1, 2] {
                let mut order = vec![of(1.0); count];
                order.extend([bad.clone(), of(1.0), of(1.0), of(1.0)]);
                let end = path_of(rule.clone(), &x, &order);
                assert!(values(&end[end.len() - 1]).iter().any(|x| x.is_nan()), "{rule:?}");
            }
        }
    }
}

/// After a gradient of zeros the next step has its full length.
#[test]
fn apollo_goes_on_after_zeros() {
    let gradient = |seed| tensor(seed, &[3, 6], DType::F64);
    let zeros = gradient(1).zeros_like().expect("zeros");
    let x = gradient(0);
    let rule = APOLLO {
        beta: (0.0, 0.0),
        rank: 2,
        ..APOLLO::new(0.1)
    };
    let path = path_of(rule, &x, &[gradient(1), zeros, gradient(2), gradient(3)]);
    let moved = |t: usize| {
        values(&(&path[t] - &path[t - 1]).expect("a step"))
            .iter()
            .map(|x| x * x)
            .sum::<f64>()
            .sqrt()
    };
    assert_eq!(moved(1), 0.0);
    assert!(
        moved(2) > 0.1 && moved(3) < moved(2) * 1.01001,
        "{} {}",
        moved(2),
        moved(3)
    );
}

/// The projection keeps the size of a gradient, whatever the rank: in the first step Adam's elements are ±1,
/// so `rank` for each of 300 columns.
#[test]
fn apollo_has_the_steps_of_its_authors_size() {
    let gradient = tensor(1, &[256, 300], DType::F32);
    for (rule, rank) in [
        (APOLLO::mini(0.01), 1.0),
        (
            APOLLO {
                rank: 16,
                tensor_wise: true,
                ..APOLLO::new(0.01)
            },
            16.0,
        ),
    ] {
        let expected = rule.eta * rule.alpha * f64::sqrt(rank * 300.0);
        let path = path_of(
            rule,
            &gradient.zeros_like().expect("zeros"),
            std::slice::from_ref(&gradient),
        );
        let length = values(&path[0]).iter().map(|x| x * x).sum::<f64>().sqrt();
        assert!(
            (0.8..1.25).contains(&(length / expected)),
            "rank {rank}: {length} for {expected}"
        );
    }
}

/// Seeds, paths and intervals have other projections, the rest is a function of them.
#[test]
fn projections_follow_from_seed_path_and_interval() {
    let gradient = tensor(1, &[4, 6], DType::F64);
    let zeros = Tensor::zeros((4, 6), DType::F64, &Device::Cpu).expect("zeros");
    let moved = |rule: GaLore, steps: usize| {
        path_of(
            GaLore {
                rank: 2,
                beta: (0.0, 0.0),
                ..rule
            },
            &zeros,
            &vec![gradient.clone(); steps],
        )
    };
    let first = |rule: GaLore| values(&moved(rule, 1)[0]);
    assert_eq!(first(GaLore::new(0.1)), first(GaLore::new(0.1)));
    assert_ne!(
        first(GaLore::new(0.1)),
        first(GaLore {
            seed: 1,
            ..GaLore::new(0.1)
        })
    );
    let path = moved(
        GaLore {
            interval: 2,
            ..GaLore::new(0.1)
        },
        3,
    );
    let step = |t: usize| values(&(&path[t] - &path[t - 1]).expect("a step"));
    assert!(
        step(1)
            .iter()
            .zip(values(&path[0]))
            .all(|(step, first)| (step - first).abs() < 1e-12)
    );
    assert!(
        step(2)
            .iter()
            .zip(step(1))
            .any(|(third, second)| (third - second).abs() > 1e-3)
    );

    let model = model(&[zeros.clone(), zeros]);
    let mut state = setup(
        GaLore {
            rank: 2,
            ..GaLore::new(0.1)
        },
        &model,
    )
    .expect("a state");
    update(
        &mut state,
        &model,
        &grads([Some(gradient.clone()), Some(gradient)]),
    )
    .expect("an update");
    assert_ne!(bits(&model["0"]), bits(&model["1"]));
}

#[test]
fn numbers_out_of_range_are_refused() {
    let x = var(&Tensor::from_vec(numbers(1, 6), (2, 3), &Device::Cpu).expect("a tensor"));
    for (rule, words) in [
        (
            Box::new(SOAP {
                interval: 0,
                ..SOAP::default()
            }) as Box<dyn Rule>,
            ["SOAP", "interval", "1 or more"],
        ),
        (
            Box::new(Shampoo {
                beta: (0.9, 1.5),
                ..Shampoo::default()
            }),
            ["Shampoo", "beta", "one in [0, 1]"],
        ),
        (
            Box::new(Shampoo {
                beta: (1.0, 0.9),
                ..Shampoo::default()
            }),
            ["Shampoo", "beta", "one in [0, 1]"],
        ),
        (
            Box::new(Shampoo {
                exponent: 0.0,
                ..Shampoo::default()
            }),
            ["Shampoo", "exponent", "above 0"],
        ),
        (
            Box::new(Shampoo {
                exponent: 1.5,
                ..Shampoo::default()
            }),
            ["Shampoo", "exponent", "at most 1"],
        ),
        (
            Box::new(GaLore {
                rank: 0,
                ..GaLore::default()
            }),
            ["GaLore", "rank", "1 or more"],
        ),
        (
            Box::new(APOLLO {
                growth: -0.1,
                ..APOLLO::default()
            }),
            ["APOLLO", "growth", "0 or more"],
        ),
    ] {
        says(&setup(rule, &x).expect_err("a number out of range"), &words);
    }
}

/// Steps in f32 are those in f64 to its accuracy, where gradients have full rank.
#[test]
fn precision_is_that_of_the_arithmetic() {
    for rule in all() {
        let path = |dtype: DType| {
            let gradients: Vec<Tensor> = (1..6)
                .map(|seed| {
                    tensor(seed, &[4, 4], DType::F32)
                        .to_dtype(dtype)
                        .expect("a gradient")
                })
                .collect();
            path_of(
                rule.clone(),
                &tensor(0, &[4, 4], DType::F32)
                    .to_dtype(dtype)
                    .expect("a parameter"),
                &gradients,
            )
        };
        for (got, expected) in path(DType::F32).iter().zip(&path(DType::F64)) {
            let error = values(got)
                .iter()
                .zip(values(expected))
                .map(|(got, expected)| (got - expected).abs())
                .fold(0.0, f64::max);
            assert!(error < 1e-4, "{rule:?}: {error:e}");
        }
    }
}
