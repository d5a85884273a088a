//! The same initial values on all ranks.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::model::lent::Lent;
use crate::model::{Model, Variable, in_path_order};
use crate::ranks::{Agreement, Aspect, Call, Communicator, StateWorld};
use crate::ranks::{LeafParts, share};
use crate::tensors::Tensor;

/// Gives all ranks the values that rank 0 has of a model's variables, trainable or not.
///
/// Processes with random initial weights differ, which [`Setup::over`](crate::Setup::over) refuses: call
/// `broadcast` first, on all ranks. It sends the variables in ranges, so it takes little memory.
///
/// # Errors
/// On all ranks, before anything has changed, if the models differ in paths, shapes or dtypes, or if the
/// transport has a [device](crate::Communicator::device) and a variable is on another one. Also if a rank has
/// left.
///
/// ```
/// use candle_core::{Device, Var};
/// use optimisers::{AdamW, Communicator, Setup, broadcast, ranks};
///
/// let train = |world: optimisers::LocalRank| -> optimisers::Result<Vec<f32>> {
///     let x = Var::randn(0f32, 1.0, 1000, &Device::Cpu)?;
///     broadcast(&world, &x)?;
///     let _state = Setup::over(&world).build(AdamW::new(0.1), &x)?;
///     Ok(x.to_vec1()?)
/// };
/// let threads: Vec<_> = ranks(2).into_iter().map(|rank| std::thread::spawn(move || train(rank))).collect();
/// let values: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<_, _>>()?;
/// assert_eq!(values[0], values[1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn broadcast<C, M>(world: &C, model: &M) -> Result<()>
where
    C: Communicator + Clone + 'static,
    M: Model + ?Sized,
{
    let world = StateWorld::new(Arc::new(world.clone()));
    let described = in_path_order(model, |tensor| tensor.is_variable()).and_then(|variables| {
        let aspects =
            variables.iter().map(|variable| aspect(&world, variable)).collect::<Result<Vec<_>>>()?;
        Ok((variables, Agreement::on(aspects), Vec::new()))
    });
    let (variables, _) = world.agree_on(Call::Broadcast, described)?;
    // As if rank 0 had all of the state, so that `share` gives its values to all others.
    let of_first = |x: &Lent<'_>| LeafParts::of_first(x.elem_count(), world.rank(), world.size());
    let variables: Vec<_> =
        variables.into_iter().map(|variable| (of_first(&variable.x), variable.x)).collect();
    share(&world, &variables)
}

/// Describes a variable by what must be the same on all ranks.
fn aspect(world: &StateWorld, variable: &Variable<'_>) -> Result<Aspect> {
    let (path, x) = (variable.path(), &*variable.x);
    world.check_device(path, x.device())?;
    if !x.tensor().is_none_or(Tensor::is_contiguous) {
        return Err(Error::new(ErrorKind::Memory, "it is not contiguous, so its values cannot be sent")
            .with_remedy("replace the variable by a contiguous copy")
            .at(path));
    }
    Ok(Aspect::new("a variable", format!("{:?} of shape {:?} in {:?}", variable.paths, x.shape(), x.dtype())))
}
