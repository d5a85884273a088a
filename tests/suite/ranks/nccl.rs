//! NCCL between GPUs. On a machine without one these tests have nothing to look at; with one they run a world
//! of one, with more a law or two.

use candle_core::cuda::cudarc::driver::CudaContext;
use candle_core::{DType, Device, Tensor};
use optimisers::nccl::World;
use optimisers::{
    AdamW, ClipGlobalNorm, Communicator, Engine, LocalRank, MixedPrecision, Optimiser, OptimiserChain, Setup,
    SplitMaster, Update, broadcast,
};

use support::common::{Vars, bits, grads, model, muon, random};
use support::reports::SHAPES;
use support::threads::on;

/// How many GPUs can be used.
fn gpus() -> usize {
    if Device::new_cuda(0).is_err() {
        return 0;
    }
    CudaContext::device_count().expect("devices") as usize
}

fn gpu(index: usize) -> Device {
    Device::new_cuda(index).expect("a GPU")
}

/// What each of so many ranks returns, each on a GPU of its own.
fn on_gpus<T: Send + 'static>(
    size: usize,
    work: impl Fn(&World, &Device) -> T + Send + Sync + 'static,
) -> Vec<T> {
    on(size, move |host: LocalRank| {
        let device = gpu(host.rank());
        work(&World::over(&host, &device).expect("a world"), &device)
    })
}

fn parameters(dtype: DType, device: &Device) -> Vars {
    model(
        &(1..)
            .zip(SHAPES)
            .map(|(seed, shape)| random(seed, shape, dtype, device))
            .collect::<Vec<_>>(),
    )
}

fn gradients(call: u64, rank: u64, device: &Device) -> Vec<Option<Tensor>> {
    (0..)
        .zip(SHAPES)
        .map(|(index, shape)| Some(random(100 * call + 10 * rank + index, shape, DType::BF16, device)))
        .collect()
}

fn without_norms() -> Vec<Optimiser> {
    vec![
        Optimiser::new(MixedPrecision::new(DType::F32, AdamW::new(0.1))),
        Optimiser::new(MixedPrecision::new(DType::F32, muon())),
    ]
}

fn with_a_norm() -> Optimiser {
    Optimiser::new(SplitMaster::new(OptimiserChain::new((
        ClipGlobalNorm::new(0.5),
        AdamW::new(0.1),
    ))))
}

/// The parameters after three calls with the gradients that `of` says.
fn trained(setup: Setup, optimiser: &Optimiser, device: &Device, weight: u64, of: u64) -> Vec<Vec<u64>> {
    let model = parameters(DType::BF16, device);
    let mut state = setup.build(optimiser.clone(), &model).expect("a state");
    for call in 0..3 {
        let update = Update::new(&mut state).engine(Engine::Fused).weight(weight);
        update
            .apply(&model, &grads(gradients(call, of, device)))
            .expect("an update");
    }
    model.values().map(|x| bits(x)).collect()
}

/// NCCL starts, moves what a rank sends itself, and an update has the bits of one without a world.
#[test]
fn a_world_of_one_changes_no_bit() {
    if gpus() == 0 {
        return;
    }
    on_gpus(1, |world, device| {
        world.exchange_tensors(&[vec![]], &[vec![]]).expect("nothing");
        for dtype in [
            DType::U8,
            DType::U32,
            DType::I64,
            DType::F16,
            DType::BF16,
            DType::F32,
            DType::F64,
        ] {
            let values = random(1, &[1000], DType::F64, device)
                .to_dtype(dtype)
                .expect("values");
            let memory = Tensor::zeros(2000, dtype, device).expect("memory");
            let place = |tensor: &Tensor, start, length| tensor.narrow(0, start, length).expect("a place");
            let to = [vec![
                place(&values, 0, 0),
                place(&values, 10, 300),
                place(&values, 500, 1),
            ]];
            let from = [vec![
                place(&memory, 0, 0),
                place(&memory, 64, 300),
                place(&memory, 1999, 1),
            ]];
            world
                .exchange_tensors(&to, &from)
                .expect("an exchange with itself");
            // What is sent may be dropped as soon as the call has returned.
            let sent: Vec<_> = to[0].iter().map(bits).collect();
            drop((to, values));
            assert_eq!(from[0].iter().map(bits).collect::<Vec<_>>(), sent, "{dtype:?}");
            assert!(
                bits(&place(&memory, 364, 1635)).iter().all(|bits| *bits == 0),
                "{dtype:?}"
            );
        }
        for optimiser in without_norms().into_iter().chain([with_a_norm()]) {
            let [own, whole] =
                [Setup::over(world), Setup::default()].map(|setup| trained(setup, &optimiser, device, 1, 0));
            assert_eq!(own, whole, "{}", optimiser.name());
        }
    });
}

/// The world that was made on one thread is used on others, whose streams of the device are others.
#[test]
fn what_is_moved_is_in_order_with_every_thread() {
    if gpus() == 0 {
        return;
    }
    on_gpus(1, |world, device| {
        let memory = Tensor::zeros(1 << 20, DType::F32, device).expect("memory");
        for turn in 0..50 {
            let send = || {
                let values = (Tensor::ones(1 << 20, DType::F32, device).expect("ones") * f64::from(turn))
                    .expect("values");
                world
                    .exchange_tensors(&[vec![values]], &[vec![memory.clone()]])
                    .expect("an exchange");
            };
            std::thread::scope(|scope| scope.spawn(send).join()).expect("no panic");
        }
        assert!(
            memory
                .to_vec1::<f32>()
                .expect("values")
                .iter()
                .all(|value| *value == 49.0)
        );
    });
}

#[test]
fn two_ranks_on_one_gpu_are_refused_on_both() {
    if gpus() == 0 {
        return;
    }
    let errors = on(2, |host| {
        World::over(&host, &gpu(0)).expect_err("one GPU").to_string()
    });
    assert!(
        errors
            .iter()
            .all(|error| error.contains("ranks 0 and 1 have the same")),
        "{errors:?}"
    );
}

#[test]
fn a_device_that_is_no_gpu_is_refused_on_all() {
    let errors = on(2, |host| {
        World::over(&host, &Device::Cpu).expect_err("no GPU").to_string()
    });
    assert!(
        errors
            .iter()
            .all(|error| error.contains("NCCL moves tensors between CUDA devices")),
        "{errors:?}"
    );
}

#[test]
fn parameters_on_another_device_are_refused() {
    if gpus() == 0 {
        return;
    }
    on_gpus(1, |world, _| {
        for device in [Device::Cpu, gpu(0)] {
            let error = Setup::over(world)
                .build(AdamW::new(0.1), &parameters(DType::F32, &device))
                .expect_err("another device");
            assert!(
                error
                    .to_string()
                    .contains("make the model on a clone of the transport's device"),
                "{error}"
            );
        }
    });
}

/// With two GPUs or more: equal gradients of 16 bits give the bits of one process, and others those of ranks
/// whose tensors go through the host.
#[test]
fn several_gpus_have_the_bits_of_one_and_of_the_host() {
    let size = gpus().min(4);
    if size < 2 {
        return;
    }
    for optimiser in without_norms() {
        let whole = trained(Setup::default(), &optimiser, &gpu(0), 1, 0);
        let rule = optimiser.clone();
        let equal = on_gpus(size, move |world, device| {
            trained(Setup::over(world), &rule, device, 1, 0)
        });
        equal
            .iter()
            .for_each(|own| assert_eq!(own, &whole, "{}", optimiser.name()));
    }
    for optimiser in without_norms().into_iter().chain([with_a_norm()]) {
        let [rule, other] = [optimiser.clone(), optimiser.clone()];
        let by_nccl = on_gpus(size, move |world, device| {
            let rank = world.rank() as u64;
            trained(Setup::over(world), &rule, device, 1 + rank, rank)
        });
        let by_host = on(size, move |world| {
            let rank = world.rank() as u64;
            trained(Setup::over(&world), &other, &gpu(world.rank()), 1 + rank, rank)
        });
        assert_eq!(by_nccl, by_host, "{}", optimiser.name());
    }
    let values = on_gpus(size, |world, device| {
        let model = parameters(DType::F32, device);
        model.values().for_each(|x| {
            x.set(&x.affine(world.rank() as f64, 0.5).expect("values"))
                .expect("a value")
        });
        broadcast(world, &model).expect("one model");
        model.values().map(|x| bits(x)).collect::<Vec<_>>()
    });
    assert!(values.iter().all(|own| own == &values[0]));
}
