//! A transport that moves tensors by itself: the bits of one that carries bytes, and parameters that are
//! where it can move them.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Tensor};
use optimisers::{
    AccumGrad, AdamW, Checkpoint, CheckpointFile, ClipGlobalNorm, CommunicationError, Communicator, Ema,
    Engine, Kahan, LAMB, LocalRank, MixedPrecision, Optimiser, OptimiserChain, Setup, SplitMaster, StateTree,
    Update, broadcast,
};

use crate::model::models::CPU;
use support::common::{Vars, bits, model, muon, tensor, var};
use support::reports::{Said, assert_part, gradients, parameters, said, steps};
use support::threads::on;

/// A rank that has a device, and counts the elements that it has moved there.
#[derive(Clone, Debug)]
struct Mover {
    host: LocalRank,
    device: Device,
    moved: Arc<AtomicUsize>,
}

impl Mover {
    fn new(host: LocalRank, device: Device) -> Self {
        Mover {
            host,
            device,
            moved: Arc::default(),
        }
    }
}

/// The numbers as F64, which holds those of all dtypes.
fn told(tensor: &Tensor) -> Vec<u8> {
    let numbers: Vec<f64> = tensor
        .to_dtype(DType::F64)
        .and_then(|numbers| numbers.to_vec1())
        .expect("numbers");
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

impl Communicator for Mover {
    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn size(&self) -> usize {
        self.host.size()
    }

    fn exchange(&self, _: &[Vec<&[u8]>], _: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError> {
        unreachable!("only tensors are exchanged, and those by themselves")
    }

    fn gather(&self, own: &[&[u8]], from: &mut [Vec<&mut [u8]>]) -> Result<(), CommunicationError> {
        self.host.gather(own, from)
    }

    fn device(&self) -> Option<&Device> {
        Some(&self.device)
    }

    fn exchange_tensors(&self, to: &[Vec<Tensor>], from: &[Vec<Tensor>]) -> Result<(), CommunicationError> {
        for tensor in to.iter().chain(from).flatten() {
            self.moved.fetch_add(tensor.elem_count(), Ordering::Relaxed);
            assert!(
                tensor.is_contiguous()
                    && tensor.dims().len() == 1
                    && tensor.device().same_device(&self.device)
            );
        }
        let sent: Vec<Vec<Vec<u8>>> = to
            .iter()
            .map(|tensors| tensors.iter().map(told).collect())
            .collect();
        let mut got: Vec<Vec<Vec<u8>>> = from
            .iter()
            .map(|rooms| rooms.iter().map(|room| vec![0; 8 * room.elem_count()]).collect())
            .collect();
        // Messages one by one, so that one that is cut otherwise by its receiver is an error.
        let count = |lists: &[Vec<Vec<u8>>]| lists.iter().map(Vec::len).max().unwrap_or_default() as u64;
        let mut turns = vec![[0; 8]; self.size()];
        let mut others: Vec<Vec<&mut [u8]>> = turns.iter_mut().map(|turn| vec![&mut turn[..]]).collect();
        others[self.rank()].clear();
        let own = count(&sent).max(count(&got));
        self.host.gather(&[&own.to_le_bytes()], &mut others)?;
        let most = turns.into_iter().map(u64::from_le_bytes).fold(own, u64::max);
        for turn in 0..most as usize {
            let to: Vec<Vec<&[u8]>> = sent
                .iter()
                .map(|messages| messages.get(turn).map(|bytes| &bytes[..]).into_iter().collect())
                .collect();
            let mut from: Vec<Vec<&mut [u8]>> = got
                .iter_mut()
                .map(|messages| {
                    messages
                        .get_mut(turn)
                        .map(|bytes| &mut bytes[..])
                        .into_iter()
                        .collect()
                })
                .collect();
            self.host.exchange(&to, &mut from)?;
        }
        for (room, bytes) in from
            .iter()
            .flatten()
            .zip(got.iter().flatten())
            .filter(|(room, _)| room.elem_count() > 0)
        {
            let numbers: Vec<f64> = bytes
                .as_chunks()
                .0
                .iter()
                .map(|number| f64::from_le_bytes(*number))
                .collect();
            let values = Tensor::new(numbers, &self.device)
                .and_then(|values| values.to_dtype(room.dtype()))
                .expect("a tensor");
            room.slice_set(&values, 0, 0).expect("room");
        }
        Ok(())
    }
}

/// Runs ranks that move tensors by themselves, and looks that they have.
fn on_movers<T: Send + 'static>(size: usize, work: impl Fn(&Mover) -> T + Send + Sync + 'static) -> Vec<T> {
    on(size, move |host| {
        let world = Mover::new(host, CPU.clone());
        let result = work(&world);
        assert!(world.moved.load(Ordering::Relaxed) > 0);
        result
    })
}

fn optimisers() -> Vec<Optimiser> {
    vec![
        Optimiser::new(MixedPrecision::new(
            DType::F32,
            OptimiserChain::new((ClipGlobalNorm::new(0.5), AdamW::new(0.1))),
        )),
        Optimiser::new(SplitMaster::new(OptimiserChain::new((
            AccumGrad::new(2),
            LAMB::new(0.1),
        )))),
        Optimiser::new(Kahan::new(AdamW::new(0.1))),
        Optimiser::new(MixedPrecision::new(DType::F32, muon())),
    ]
}

#[test]
fn equal_gradients_give_the_bits_of_one_process() {
    for (optimiser, engine) in
        optimisers()
            .into_iter()
            .zip([Engine::Fused, Engine::Fused, Engine::Tensors, Engine::Fused])
    {
        let whole = steps(Setup::default(), engine, optimiser.clone(), [DType::BF16; 2], 3);
        let rule = optimiser.clone();
        let ranks = on_movers(3, move |world| {
            steps(Setup::over(world), engine, rule.clone(), [DType::BF16; 2], 3)
        });
        ranks
            .iter()
            .for_each(|own| assert_part(own, &whole, &optimiser.name()));
    }
}

/// Steps with gradients of each rank's own, some of which travel in a narrower dtype and count differently;
/// then a checkpoint in this file, and averages.
fn train<C: Communicator + Clone + 'static>(world: &C, file: &Path) -> (Vec<Said>, Vec<Vec<u64>>) {
    let model = model(&parameters(DType::F32));
    let rule = OptimiserChain::new((ClipGlobalNorm::new(0.5), AdamW::new(0.1), Ema::new(0.5)));
    let setup = Setup::over(world).wire(|path, _| (path == "2").then_some(DType::BF16));
    let mut state = setup.build(rule, &model).expect("a state");
    let step = |state: &mut StateTree, call| {
        let update = Update::new(state).weight(1 + world.rank() as u64);
        let outcome = update
            .apply(&model, &gradients(call, world.rank() as u64, DType::F32))
            .expect("an update");
        said(outcome, &model, state)
    };
    let mut all: Vec<Said> = (0..3).map(|call| step(&mut state, call)).collect();
    Checkpoint::new(&state)
        .model(&model)
        .save(file)
        .expect("a checkpoint");
    let of_model = || Ok::<_, optimisers::Error>(model.values().map(|x| bits(x)).collect());
    let averages = state.with_averages(&model, of_model).expect("averages");
    CheckpointFile::open(file)
        .and_then(|saved| saved.restore_with_model(&mut state, &model))
        .expect("a restored state");
    all.push(step(&mut state, 3));
    (all, averages)
}

#[test]
fn different_gradients_checkpoints_and_averages_are_those_of_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = ["bytes", "tensors"].map(|name| folder.path().join(name));
    let [by_bytes, by_tensors] = files.clone();
    let bytes = on(3, move |world| train(&world, &by_bytes));
    let tensors = on_movers(3, move |world| train(world, &by_tensors));
    for ((own, averages), (expected, other_averages)) in tensors.iter().zip(&bytes) {
        for (own, expected) in own.iter().zip(expected) {
            assert_eq!((&own.outcome, &own.model), (&expected.outcome, &expected.model));
            assert_eq!(own.leaves, expected.leaves);
        }
        assert_eq!(averages, other_averages);
    }
    let [bytes, tensors] = files.map(|file| fs::read(file).expect("a file"));
    assert!(bytes == tensors, "the files are the same");
}

#[test]
fn initial_values_of_every_dtype_are_those_of_the_first_rank() {
    let values = on_movers(2, |world| {
        let variable = |dtype: DType| {
            var(&tensor(world.rank() as u64, &[33_000], DType::F64)
                .to_dtype(dtype)
                .expect("values"))
        };
        let dtypes = [
            DType::U8,
            DType::U32,
            DType::I64,
            DType::F16,
            DType::BF16,
            DType::F32,
            DType::F64,
        ];
        let model: Vars = dtypes.map(|dtype| (format!("{dtype:?}"), variable(dtype))).into();
        broadcast(world, &model).expect("one model");
        model.values().map(|x| bits(x)).collect::<Vec<_>>()
    });
    assert!(values[0] == values[1] && values[0].len() == 7);
}

/// A device that no tensor is on, on one rank of three.
#[cfg(not(feature = "cuda"))]
#[test]
fn a_parameter_that_the_transport_cannot_move_is_refused_by_all() {
    use optimisers::ErrorKind;

    let errors = on(3, |host| {
        let is_elsewhere = host.rank() == 1;
        let device = if is_elsewhere {
            Device::Cuda(candle_core::CudaDevice)
        } else {
            CPU.clone()
        };
        let world = Mover::new(host.clone(), device);
        let model = model(&parameters(DType::F32));
        let before: Vec<_> = model.values().map(|x| bits(x)).collect();
        let error = Setup::over(&world)
            .build(AdamW::new(0.1), &model)
            .expect_err("another device");
        let kind = if is_elsewhere {
            ErrorKind::Tensor
        } else {
            ErrorKind::Ranks
        };
        assert_eq!(
            broadcast(&world, &model).expect_err("another device").kind(),
            kind
        );
        assert!(model.values().map(|x| bits(x)).eq(before));
        let rank = (!is_elsewhere).then_some(1);
        assert_eq!(
            (error.kind(), error.path(), error.rank()),
            (kind, is_elsewhere.then_some("0"), rank),
            "{error}"
        );
        // All are in step, and the host's own transport takes the model.
        let mut state = Setup::over(&host)
            .build(AdamW::new(0.1), &model)
            .expect("a state");
        Update::new(&mut state)
            .apply(&model, &gradients(0, 0, DType::F32))
            .expect("an update");
        error.to_string()
    });
    let told = "parameter \"0\": it is on Cpu, expected Cuda(CudaDevice); the transport moves tensors of no \
                other device: make the model on a clone of the transport's device (each `Device::new_cuda` \
                is a device of its own), or divide the model over a transport for the host, such as MPI or \
                `ranks`";
    assert_eq!(
        errors,
        [
            format!("rank 1 refused: {told}"),
            told.to_string(),
            format!("rank 1 refused: {told}")
        ]
    );
}
