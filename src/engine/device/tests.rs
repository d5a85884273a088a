use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Var};
use smallvec::smallvec;

use super::*;
use crate::engine::kernel::erased;
use crate::engine::memory::Buffer;
use crate::engine::plan::Step;
use crate::model::lent::Lent;
use crate::numbers::value::ScaleBy;

/// A device that records its launches and computes nothing.
#[derive(Default)]
struct Recorder {
    compiler: Option<fn(&str) -> bool>,
    address_count: u64,
    result_count: usize,
    launched: Arc<Mutex<Vec<Launch<()>>>>,
}

impl Recorder {
    fn next_address(&mut self) -> Result<u64> {
        self.address_count += 1;
        Ok(16 * self.address_count)
    }
}

impl<'a> Backend<'a> for Recorder {
    type Function = ();

    fn function(&mut self, source: &str) -> Result<Option<()>> {
        Ok(self
            .compiler
            .is_some_and(|compiles| compiles(source))
            .then_some(()))
    }

    fn read_address(&mut self, _: Tensor) -> Result<u64> {
        self.next_address()
    }

    fn write_address(&mut self, _: Tensor) -> Result<u64> {
        self.next_address()
    }

    fn read_state_address(&mut self, _: &'a Buffer) -> Result<u64> {
        self.next_address()
    }

    fn write_state_address(&mut self, _: &'a mut Buffer) -> Result<u64> {
        self.next_address()
    }

    fn launch(&mut self, launches: Vec<Launch<()>>, result_count: usize) -> Result<()> {
        self.result_count = result_count;
        self.launched.lock().expect("a lock").extend(launches);
        Ok(())
    }

    fn read_results(self) -> Result<Vec<f64>> {
        Ok(vec![1.0; self.result_count])
    }
}

fn descent<'a>(x: &'a Tensor, eta: f64) -> Job<'a> {
    let step = Step::Map {
        kernel: erased(ScaleBy(eta)),
        slots: &mut [],
    };
    Job {
        steps: smallvec![step],
        epilogue: Epilogue::Subtract,
        ..Job::new(
            "x",
            Operand::Lent(x),
            smallvec![Lent::Tensor(x.copy().expect("a copy"))],
        )
    }
}

fn compiling_recorder() -> Recorder {
    Recorder {
        compiler: Some(|_| true),
        ..Recorder::default()
    }
}

#[test]
fn a_row_has_length_addresses_and_scalars() -> Result<()> {
    let x = Var::zeros(40_000, DType::F32, &Device::Cpu)?;
    let backend = compiling_recorder();
    let launched = backend.launched.clone();
    let mut jobs = [0.5, 0.25].map(|eta| descent(&x, eta));
    assert_eq!(
        commit_with(backend, &mut jobs.iter_mut().collect::<Vec<_>>())?,
        [true, true]
    );
    let launched = launched.lock().expect("a lock");
    let [
        Launch {
            rows,
            block_offsets,
            blocks: 80,
            first_result: None,
            ..
        },
    ] = &launched[..]
    else {
        panic!("one launch")
    };
    let scalar = |eta: f32| u64::from(eta.to_bits());
    assert_eq!(
        rows[..],
        [40_000, 1, 16, 32, scalar(0.5), 40_000, 1, 48, 64, scalar(0.25)]
    );
    assert_eq!(block_offsets[..], [0, 40]);
    Ok(())
}

#[test]
fn a_leaf_has_a_total_for_each_chunk() -> Result<()> {
    let x = Var::zeros(40_000, DType::F32, &Device::Cpu)?;
    let job = descent(&x, 0.5);
    let request = |reducer| {
        Ok::<_, crate::error::Error>(ReductionRequest {
            view: LeafView::gradient(&job, 1)?,
            reducer,
        })
    };
    let requests = [
        request(Reducer::norm(2.0))?,
        request(Reducer::norm(f64::INFINITY))?,
        request(Reducer::norm(2.0))?,
    ];
    let totals = reduce_with(compiling_recorder(), &requests)?;
    // Every result is 1, and there are three chunks.
    assert!(
        totals
            .iter()
            .all(|totals| totals.as_deref() == Some(&[1.0; 3][..])),
        "{totals:?}"
    );
    let joined = requests
        .iter()
        .zip(totals.into_iter().flatten())
        .map(|(request, totals)| request.reducer.op.total(&totals));
    assert_eq!(joined.collect::<Vec<_>>(), [3.0, 1.0, 3.0]);
    Ok(())
}

#[test]
fn jobs_without_a_kernel_are_left_to_tensor_operations() -> Result<()> {
    let x = Var::zeros(5, DType::F32, &Device::Cpu)?;
    let mut job = descent(&x, 0.5);
    assert_eq!(commit_with(Recorder::default(), &mut [&mut job])?, [false]);
    let request = ReductionRequest {
        view: LeafView::gradient(&job, 1)?,
        reducer: Reducer::norm(2.0),
    };
    assert_eq!(reduce_with(Recorder::default(), &[request])?, [None]);
    assert!(matches!(
        copy_with(Recorder::default(), &[request.view])?[..],
        [None]
    ));

    // No kernel reads U32.
    let words = Var::zeros(5, DType::U32, &Device::Cpu)?;
    assert_eq!(
        commit_with(compiling_recorder(), &mut [&mut descent(&words, 0.5)])?,
        [false]
    );
    Ok(())
}
