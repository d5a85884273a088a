//! Storage that is shared with the program: which storages updates write, and copies of what lies in them.
//!
//! An update waits for the lock of a gradient while it holds the lock of a parameter. That cannot deadlock as
//! long as nobody writes the gradient meanwhile. So a gradient that lies in a variable, of whatever model, is
//! copied before anything is locked. For other memory there is a register:
//!
//! 1. A state registers the storages that its updates write, from `setup` on.
//! 2. If a call finds a parameter in other memory, it registers that memory before it reads the register.
//! 3. The call copies gradients that lie in a registered storage.
//!
//! If calls would wait for each other in a circle, the one that read the register last has found the storages
//! of all others, and has copied what lies there. Storages stay registered between calls. Otherwise a program
//! that reads two parameters at once could wait for the update that waits for it.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use crate::error::Result;
use crate::model::lent::{Lend, read, storage_of};
use crate::tensors::{Tensor, allocated, bytes, dtype_of, on_cpu};

/// The storages that updates write, by address, each with the number of states that write it.
pub(crate) type WrittenStorages = HashMap<usize, usize>;

static WRITTEN: LazyLock<RwLock<Arc<WrittenStorages>>> = LazyLock::new(RwLock::default);

/// The addresses of a parameter's or gradient's memory and of its first element. They are compared and
/// prefetched; nothing is read through them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses {
    /// Equal exactly if two tensors share memory. `None` if nobody else can access the memory.
    pub(in crate::engine) memory: Option<usize>,
    /// 0, if the element is not on the CPU.
    pub(in crate::engine) first: usize,
}

impl Addresses {
    /// The addresses of lent memory. Refuses a storage that does not hold what its tensor declares. `role` is
    /// that of the memory in errors, such as "gradient".
    pub(crate) fn of(role: &'static str, lender: &dyn Lend) -> Result<Self> {
        let Some(tensor) = lender.tensor() else {
            let mut first = 0;
            read(role, lender, &mut |view| {
                first = view.memory().address();
                Ok(())
            })?;
            return Ok(Addresses { memory: lender.memory(), first });
        };
        // One lock for both addresses, so that they belong to one storage.
        let (storage, layout) = storage_of(tensor).map_err(|error| error.in_role(role))?;
        let first = on_cpu(&storage).map_or(0, |numbers| {
            let start = layout.start_offset() * tensor.dtype().size_in_bytes();
            bytes(numbers).map_or(0, |bytes| bytes.as_ptr().wrapping_add(start).addr())
        });
        Ok(Addresses { memory: Some(std::ptr::from_ref(&*storage).addr()), first })
    }
}

/// Storages that are registered while this value lives, so that all updates of the process find them.
#[derive(Debug, Default)]
pub(crate) struct UpdateTargets(WrittenStorages);

impl UpdateTargets {
    /// Registers more storages.
    pub(crate) fn add(&mut self, storages: impl IntoIterator<Item = usize>) {
        let added = counted(storages);
        change(|written| join(written, &added));
        join(&mut self.0, &added);
    }

    /// Registers `storages` instead of the earlier ones. If both are the same, as in most calls, nothing is
    /// locked.
    pub(crate) fn keep(&mut self, storages: impl IntoIterator<Item = usize>) {
        let storages = counted(storages);
        if self.0 != storages {
            change(|written| join(written, &storages));
            // The earlier ones are dropped, and with them their place in the register.
            *self = UpdateTargets(storages);
        }
    }

    /// Takes each of `storages` off the register once.
    pub(crate) fn forget(&mut self, storages: impl IntoIterator<Item = usize>) {
        let mut forgotten = counted(storages);
        forgotten.retain(|storage, times| {
            *times = (*times).min(self.0.get(storage).copied().unwrap_or_default());
            *times > 0
        });
        subtract(&mut self.0, &forgotten);
        drop(UpdateTargets(forgotten));
    }

    /// The storages that all states have registered.
    pub(crate) fn all() -> Arc<WrittenStorages> {
        WRITTEN.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for UpdateTargets {
    fn drop(&mut self) {
        change(|written| subtract(written, &self.0));
    }
}

/// How often each storage comes.
fn counted(storages: impl IntoIterator<Item = usize>) -> WrittenStorages {
    let mut counted = WrittenStorages::new();
    storages.into_iter().for_each(|storage| *counted.entry(storage).or_default() += 1);
    counted
}

fn join(written: &mut WrittenStorages, others: &WrittenStorages) {
    others.iter().for_each(|(storage, times)| *written.entry(*storage).or_default() += times);
}

fn subtract(written: &mut WrittenStorages, others: &WrittenStorages) {
    for (storage, times) in others {
        match written.get_mut(storage) {
            Some(count) if *count > *times => *count -= times,
            _ => drop(written.remove(storage)),
        }
    }
}

/// Changes the map. Readers share the map and hold no lock, because they may run code of the program, and
/// that code may make states, which change the map.
fn change(how: impl FnOnce(&mut WrittenStorages)) {
    how(Arc::make_mut(&mut WRITTEN.write().unwrap_or_else(PoisonError::into_inner)));
}

/// The tensor, or a copy if somebody may write its memory: a variable, a storage that a state writes, or one
/// of the caller's `own`.
///
/// # Errors
/// If the storage does not hold what the tensor declares.
pub(crate) fn unshared(
    role: &'static str,
    tensor: Tensor,
    written: &WrittenStorages,
    own: &[usize],
) -> Result<Tensor> {
    drop(storage_of(&tensor).map_err(|error| error.in_role(role))?);
    let is_written = |storage: usize| written.contains_key(&storage) || own.contains(&storage);
    let is_shared = tensor.is_variable() || Lend::memory(&tensor).is_some_and(is_written);
    if !is_shared {
        return Ok(tensor);
    }
    allocated(tensor.elem_count(), dtype_of(&tensor), tensor.device(), || tensor.detach().copy())
}
