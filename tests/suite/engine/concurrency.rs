//! Updates beside evaluations and beside each other: nothing hangs, and nobody sees half an update.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;
#[cfg(feature = "cuda")]
use std::time::Instant;

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{LayerNorm, Linear};
use optimisers::{Adam, ClipGlobalNorm, Descent, MixedPrecision, OptimiserChain, model, setup, update};
use rayon::prelude::*;

use support::common::{self, Grads, bits, devices, grads, random, values, var};

const CPU: &Device = &Device::Cpu;

/// After which a test is taken to hang. The longest takes 2 s alone, and 13 times as long beside ten programs
/// that keep two cores busy.
const LIMIT: Duration = Duration::from_secs(300);

/// Runs `work` in a thread of its own; fails instead of hanging.
///
/// One test at a time, because of [`models_in_rayon_tasks_beside_another_model`].
fn watched(work: impl FnOnce() + Send + 'static) {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (done, finished) = channel();
    let thread = std::thread::spawn(move || {
        work();
        let _ = done.send(());
    });
    if let Err(std::sync::mpsc::RecvTimeoutError::Timeout) = finished.recv_timeout(LIMIT + 2 * stress()) {
        panic!("deadlock");
    }
    thread.join().expect("no panic in the watched thread");
}

struct Net {
    norm: LayerNorm,
    /// 300 x 300: more than the 65536 elements from which a leaf is cut up.
    large: Linear,
    small: Linear,
}

model!(Net { norm, large, small });

impl Net {
    fn new() -> Self {
        let tensor =
            |seed, shape: &[usize]| var(&(random(seed, shape, DType::F32, CPU) * 0.05).unwrap()).into_inner();
        Net {
            norm: LayerNorm::new(tensor(1, &[300]), tensor(2, &[300]), 1e-5),
            large: Linear::new(tensor(3, &[300, 300]), Some(tensor(4, &[300]))),
            small: Linear::new(tensor(5, &[4, 300]), None),
        }
    }

    fn gradients(&self) -> Grads {
        let mut grads = Grads::new();
        optimisers::Model::visit(
            self,
            &mut optimisers::Visitor::new(&mut |path, x| {
                grads.insert(
                    path.to_string(),
                    random(path.len() as u64, x.dims(), DType::F32, CPU),
                );
            }),
        );
        grads
    }

    fn parameters(&self) -> [Vec<u64>; 3] {
        [self.large.weight(), self.small.weight(), self.norm.weight()].map(bits)
    }

    /// Reads several variables in one operation, and one variable twice.
    fn evaluate(&self) {
        let x = random(7, &[2, 300], DType::F32, CPU);
        let y = self
            .small
            .forward(&self.large.forward(&self.norm.forward(&x).unwrap()).unwrap())
            .unwrap();
        let square = self.large.weight().matmul(self.large.weight()).unwrap();
        assert_eq!((y.dims(), square.dims()), (&[2, 4][..], &[300, 300][..]));
    }
}

#[test]
fn an_update_beside_an_evaluation() {
    watched(|| {
        let net = Net::new();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    net.evaluate();
                }
            });
            let mut state = setup(
                OptimiserChain::new((ClipGlobalNorm::new(0.1), Adam::new(1e-4))),
                &net,
            )
            .unwrap();
            let grads = net.gradients();
            for _ in 0..60 {
                update(&mut state, &net, &grads).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
            assert!(state.leaves().all(|leaf| leaf.steps() == 60));
        });
    });
}

#[test]
fn an_update_in_a_rayon_task_beside_evaluations() {
    watched(|| {
        let net = Net::new();
        let grads = net.gradients();
        let mut state = setup(Adam::new(1e-4), &net).unwrap();
        rayon::join(
            || (0..40).for_each(|_| _ = update(&mut state, &net, &grads).unwrap()),
            || (0..40).into_par_iter().for_each(|_| net.evaluate()),
        );
        assert!(state.leaves().all(|leaf| leaf.steps() == 40));
    });
}

/// A thread that stays. One that ends while its stream of a GPU has work hangs in the driver.
fn worker() -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap()
}

/// A gradient is made in one thread, memory taken in another as soon as the gradient is dropped, and a
/// parameter read in a third. Each thread has a stream of its own on a GPU, and only the reader waits for the
/// device, so that the work of all of them is there at one time.
#[test]
fn what_a_thread_has_begun_is_in_order_with_the_others() {
    const LENGTH: usize = 1 << 22;
    watched(|| {
        for device in devices() {
            let workers = [worker(), worker(), worker()];
            let [maker, taker, reader] = &workers;
            let full = |value: f32| Tensor::full(value, LENGTH, &device).unwrap();
            let model = common::model(&[full(0.0)]);
            let x = &model["0"];
            let mut state = setup(MixedPrecision::new(DType::F64, Descent::new(1.0)), &model).unwrap();
            let mut expected = 0.0;
            for step in 1..=30 {
                // As many operations as a backward pass may have before the last.
                let gradient = || (0..16).fold(full(0.0), |sum, _| (sum + f64::from(step)).unwrap());
                let gradient = maker.install(gradient);
                update(&mut state, &model, &grads([Some(gradient)])).unwrap();
                expected -= f64::from(16 * step);
                let _taken = taker.install(|| full(f32::NAN));
                let read =
                    reader.install(|| [x.min_all(), x.max_all()].map(|x| values(&x.unwrap())).concat());
                assert_eq!(read, [expected; 2], "step {step} on {:?}", device.location());
            }
            workers
                .iter()
                .for_each(|worker| worker.install(|| device.synchronize()).unwrap());
            device.synchronize().unwrap();
        }
    });
}

/// `Device::synchronize` waits for candle's stream of the thread, which is not the one that updates run on.
#[cfg(feature = "cuda")]
#[test]
fn who_waits_for_a_device_has_waited_for_the_update() {
    let Some(device) = common::first_gpu() else { return };
    let Device::Cuda(gpu) = &device else {
        panic!("a GPU")
    };
    let ones = Tensor::ones(1 << 27, DType::F32, &device).unwrap();
    let model = common::model(&[ones.copy().unwrap()]);
    let mut state = setup(Adam::default(), &model).unwrap();
    let gradients = grads([Some(ones)]);
    // The first compiles the kernel.
    update(&mut state, &model, &gradients).unwrap();
    device.synchronize().unwrap();
    let start = Instant::now();
    // A third would wait for the tables of the first.
    for _ in 0..2 {
        update(&mut state, &model, &gradients).unwrap();
    }
    device.synchronize().unwrap();
    let waited = start.elapsed();
    gpu.cuda_stream()
        .context()
        .default_stream()
        .synchronize()
        .unwrap();
    let more = start.elapsed() - waited;
    assert!(more < waited, "{waited:?}, and then {more:?}");
}

/// A task of rayon that waits for its update may start the next, on the same thread.
#[test]
fn many_models_in_rayon_tasks() {
    watched(|| {
        let nets: Vec<Net> = (0..16).map(|_| Net::new()).collect();
        let results: Vec<Vec<u64>> = nets
            .par_iter()
            .map(|net| {
                let mut state = setup(Adam::new(1e-4), net).unwrap();
                (0..10).for_each(|_| _ = update(&mut state, net, &net.gradients()).unwrap());
                bits(net.large.weight())
            })
            .collect();
        assert!(results.iter().all(|bits| *bits == results[0]));
    });
}

/// One model is updated beside its evaluation, others in tasks of rayon's global pool. An update waits for a
/// parameter that the evaluation reads, and the evaluation waits for the global pool: its workers must not
/// wait for the update.
#[test]
fn models_in_rayon_tasks_beside_another_model() {
    watched(|| {
        let nets: Vec<Net> = (0..16).map(|_| Net::new()).collect();
        let work = |net: &Net, steps: usize| {
            let mut state = setup(Adam::new(1e-4), net).unwrap();
            (0..steps).for_each(|_| _ = update(&mut state, net, &net.gradients()).unwrap());
        };
        let evaluated = Net::new();
        std::thread::scope(|scope| {
            scope.spawn(|| (0..200).for_each(|_| evaluated.evaluate()));
            scope.spawn(|| work(&evaluated, 100));
            nets.par_iter().for_each(|net| work(net, 20));
        });
        let alone = Net::new();
        work(&alone, 20);
        assert!(
            nets.iter().all(|net| net.parameters() == alone.parameters()),
            "as if alone"
        );
    });
}

#[test]
fn two_models_in_two_threads() {
    watched(|| {
        let steps = || {
            let net = Net::new();
            let grads = net.gradients();
            let mut state = setup(
                OptimiserChain::new((ClipGlobalNorm::new(0.1), Adam::new(1e-3))),
                &net,
            )
            .unwrap();
            (0..40).for_each(|_| _ = update(&mut state, &net, &grads).unwrap());
            net.parameters()
        };
        let together = std::thread::scope(|scope| {
            [scope.spawn(steps), scope.spawn(steps)].map(|thread| thread.join().unwrap())
        });
        let alone = steps();
        assert!(together.iter().all(|bits| *bits == alone), "as if alone");
    });
}

#[test]
fn no_parameter_is_seen_half_way() {
    for dtype in [DType::F32, DType::BF16] {
        watched(move || {
            let x = Var::zeros(200_000, dtype, CPU).unwrap();
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    let mut seen = std::collections::BTreeSet::new();
                    while !stop.load(Ordering::Relaxed) {
                        // One operation, so one look at the storage.
                        let copy = x
                            .as_detached_tensor()
                            .copy()
                            .unwrap()
                            .to_dtype(DType::F32)
                            .unwrap()
                            .to_vec1::<f32>()
                            .unwrap();
                        assert!(copy.iter().all(|value| *value == copy[0]), "half an update");
                        seen.insert(copy[0].to_bits());
                    }
                    seen.len()
                });
                let mut state = setup(MixedPrecision::new(DType::F32, Descent::new(1.0)), &x).unwrap();
                let grads =
                    std::collections::BTreeMap::from([("", Tensor::ones(200_000, dtype, CPU).unwrap())]);
                for _ in 0..100 {
                    update(&mut state, &x, &grads).unwrap();
                }
                // A reader that saw nothing move, or died early, has proved nothing: let it look at both
                // sides of one more step.
                while !reader.is_finished() {
                    std::thread::sleep(Duration::from_millis(100));
                    update(&mut state, &x, &grads).unwrap();
                    std::thread::sleep(Duration::from_millis(100));
                    stop.store(true, Ordering::Relaxed);
                }
                assert!(reader.join().expect("whole parameters") >= 2);
            });
        });
    }
}

/// How long the tests below go on: `STRESS_SECONDS`, or two.
fn stress() -> Duration {
    let seconds = std::env::var("STRESS_SECONDS")
        .ok()
        .and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(seconds.unwrap_or(2))
}

/// Calls each of these again and again, in a thread of its own, until the time is over. The result is how
/// often each was called.
fn until_the_time_is_over<const N: usize>(work: [&mut (dyn FnMut() + Send); N]) -> [usize; N] {
    let start = std::time::Instant::now();
    std::thread::scope(|scope| {
        let again = |work: &mut (dyn FnMut() + Send)| {
            let mut calls = 0;
            while start.elapsed() < stress() {
                work();
                calls += 1;
            }
            calls
        };
        work.map(|work| scope.spawn(move || again(work)))
            .map(|thread| thread.join().expect("no panic"))
    })
}

/// Each player's gradient is the other's parameter, or a view of it.
#[test]
fn players_whose_gradients_are_each_other() {
    watched(|| {
        for view in [
            |other: &Var| other.as_tensor().clone(),
            |other: &Var| other.as_detached_tensor().reshape((4, 2500)).unwrap(),
        ] {
            let players = [1, 2].map(|seed| var(&random(seed, &[4, 2500], DType::F32, CPU)));
            let [x, y] = &players;
            let mut states = players
                .each_ref()
                .map(|player| setup(Descent::new(1e-6), player).unwrap());
            let [of_x, of_y] = &mut states;
            let gradients = [y, x].map(|other| std::collections::BTreeMap::from([("", view(other))]));
            let calls = until_the_time_is_over([
                &mut || drop(update(of_x, x, &gradients[0]).unwrap()),
                &mut || drop(update(of_y, y, &gradients[1]).unwrap()),
                &mut || drop(x.mul(y).unwrap().sum_all().unwrap()),
            ]);
            assert!(calls.iter().all(|calls| *calls > 0), "{calls:?}");
        }
    });
}
