//! Storage that is shared with the program: which storages updates write, and copies of gradients in them.
//!
//! An update waits for the lock of a gradient while it holds the lock of a parameter. As long as nobody
//! writes the gradient meanwhile, this order cannot deadlock. So a gradient that lies in a variable, of
//! whatever model, is copied before anything is locked. For other memory there is a register:
//!
//! 1. A state registers the storages that its updates write, from `setup` on.
//! 2. If a call finds a parameter in other memory, it registers that memory before it reads the register.
//! 3. The call copies gradients that lie in a registered storage.
//!
//! Calls cannot wait for each other in a circle: of such calls, the last to read the register has found the
//! storages of all others, and has copied its gradients that lie there. Storages stay registered between
//! calls. Otherwise a program that reads two parameters at once, and an update, could wait for each other.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use crate::error::Result;
use crate::model::lent::{Lend, read, storage_of};
use crate::tensors::{Tensor, allocate, bytes, cpu_numbers, dtype_of};

/// The storages that updates write, by address, each with the number of states that write it.
pub(crate) type WrittenStorages = HashMap<usize, usize>;

static WRITTEN: LazyLock<RwLock<Arc<WrittenStorages>>> = LazyLock::new(RwLock::default);

/// The addresses of a parameter's or gradient's memory and of its first element.
///
/// Addresses are compared and prefetched. Nothing is read through them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses {
    /// The same for two tensors exactly if they share memory. `None` if nobody else can access the memory.
    pub(in crate::engine) memory: Option<usize>,
    /// 0 if the element is not on the CPU.
    pub(in crate::engine) first: usize,
}

impl Addresses {
    /// The addresses of lent memory. `role` is the memory's name in errors, such as "gradient".
    ///
    /// # Errors
    /// If a storage does not hold the elements that its tensor declares.
    pub(crate) fn from_lender(role: &'static str, lender: &dyn Lend) -> Result<Self> {
        let Some(tensor) = lender.tensor() else {
            let mut first = 0;
            read(role, lender, &mut |view| {
                first = view.memory().address();
                Ok(())
            })?;
            return Ok(Addresses {
                memory: lender.memory(),
                first,
            });
        };
        // One lock for both addresses, so that both are of the same storage.
        let (storage, layout) = storage_of(tensor).map_err(|error| error.in_role(role))?;
        let first = cpu_numbers(&storage).map_or(0, |numbers| {
            let start = layout.start_offset() * tensor.dtype().size_in_bytes();
            bytes(numbers).map_or(0, |bytes| bytes.as_ptr().wrapping_add(start).addr())
        });
        Ok(Addresses {
            memory: Some(std::ptr::from_ref(&*storage).addr()),
            first,
        })
    }
}

/// Storages that are registered while this value lives, so that all updates of the process find them.
#[derive(Debug, Default)]
pub(crate) struct UpdateTargets(WrittenStorages);

impl UpdateTargets {
    /// Registers more storages.
    pub(crate) fn add(&mut self, storages: impl IntoIterator<Item = usize>) {
        let additions = count_storages(storages);
        change_register(|register| add_counts(register, &additions));
        add_counts(&mut self.0, &additions);
    }

    /// Registers `storages` instead of the earlier storages. If nothing changes, as usual, nothing is locked.
    pub(crate) fn replace(&mut self, storages: impl IntoIterator<Item = usize>) {
        let storages = count_storages(storages);
        if self.0 != storages {
            change_register(|register| add_counts(register, &storages));
            // The earlier value is dropped, which takes its storages off the register.
            *self = UpdateTargets(storages);
        }
    }

    /// Takes each of `storages` off the register once.
    pub(crate) fn forget(&mut self, storages: impl IntoIterator<Item = usize>) {
        let mut removals = count_storages(storages);
        removals.retain(|storage, times| {
            *times = (*times).min(self.0.get(storage).copied().unwrap_or_default());
            *times > 0
        });
        subtract_counts(&mut self.0, &removals);
        drop(UpdateTargets(removals));
    }

    /// The storages that all states have registered.
    pub(crate) fn all_registered() -> Arc<WrittenStorages> {
        WRITTEN.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for UpdateTargets {
    fn drop(&mut self) {
        change_register(|register| subtract_counts(register, &self.0));
    }
}

/// How often each storage occurs.
fn count_storages(storages: impl IntoIterator<Item = usize>) -> WrittenStorages {
    let mut counts = WrittenStorages::new();
    storages
        .into_iter()
        .for_each(|storage| *counts.entry(storage).or_default() += 1);
    counts
}

fn add_counts(counts: &mut WrittenStorages, others: &WrittenStorages) {
    others
        .iter()
        .for_each(|(storage, times)| *counts.entry(*storage).or_default() += times);
}

fn subtract_counts(counts: &mut WrittenStorages, others: &WrittenStorages) {
    for (storage, times) in others {
        match counts.get_mut(storage) {
            Some(count) if *count > *times => *count -= times,
            _ => drop(counts.remove(storage)),
        }
    }
}

/// Changes the register. Readers share the map and hold no lock.
///
/// A reader may run code of the program, and that code may make states, which change the register.
fn change_register(change: impl FnOnce(&mut WrittenStorages)) {
    change(Arc::make_mut(
        &mut WRITTEN.write().unwrap_or_else(PoisonError::into_inner),
    ));
}

/// The tensor, or a copy if somebody may write its memory.
///
/// Somebody may write variables, and the storages in `written_storages` and `call_storages`.
///
/// # Errors
/// If the storage does not hold the elements that the tensor declares.
pub(crate) fn unshared(
    role: &'static str,
    tensor: Tensor,
    written_storages: &WrittenStorages,
    call_storages: &[usize],
) -> Result<Tensor> {
    drop(storage_of(&tensor).map_err(|error| error.in_role(role))?);
    let is_written =
        |storage: usize| written_storages.contains_key(&storage) || call_storages.contains(&storage);
    let is_shared = tensor.is_variable() || Lend::memory(&tensor).is_some_and(is_written);
    if !is_shared {
        return Ok(tensor);
    }
    allocate(tensor.elem_count(), dtype_of(&tensor), tensor.device(), || {
        tensor.detach().copy()
    })
}
