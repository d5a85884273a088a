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
use crate::tensors::{Tensor, bytes, on_cpu};

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
pub(crate) struct UpdateTargets(Vec<usize>);

impl UpdateTargets {
    pub(crate) fn new(storages: impl IntoIterator<Item = usize>) -> Self {
        let storages: Vec<usize> = storages.into_iter().collect();
        change(|written| storages.iter().for_each(|&storage| *written.entry(storage).or_default() += 1));
        UpdateTargets(storages)
    }

    /// Registers `storages` instead of the earlier ones. If both are the same, as in most calls, nothing is
    /// locked.
    pub(crate) fn keep(&mut self, storages: Vec<usize>) {
        if self.0 != storages {
            *self = UpdateTargets::new(storages);
        }
    }

    /// Takes each of `storages` off the register once.
    pub(crate) fn forget(&mut self, storages: impl IntoIterator<Item = usize>) {
        let mut forgotten = WrittenStorages::new();
        storages.into_iter().for_each(|storage| *forgotten.entry(storage).or_default() += 1);
        let is_forgotten = |storage: &mut usize| {
            forgotten.get_mut(storage).filter(|left| **left > 0).map(|left| *left -= 1).is_some()
        };
        drop(UpdateTargets(self.0.extract_if(.., is_forgotten).collect()));
    }

    /// The storages that all states have registered.
    pub(crate) fn all() -> Arc<WrittenStorages> {
        WRITTEN.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for UpdateTargets {
    fn drop(&mut self) {
        let forget = |written: &mut WrittenStorages, storage: &usize| match written.get_mut(storage) {
            Some(1) | None => drop(written.remove(storage)),
            Some(states) => *states -= 1,
        };
        change(|written| self.0.iter().for_each(|storage| forget(written, storage)));
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
    if is_shared { Ok(tensor.detach().copy()?) } else { Ok(tensor) }
}
